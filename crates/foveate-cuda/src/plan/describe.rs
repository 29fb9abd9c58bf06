//! What a plan will do, as data.

use foveate_tensor::Varlen;

use super::kernels::sizes;
use super::{CudaPlan, sequences};
use crate::error::CudaError;
use crate::planner::Candidate;
use crate::schedule::{Axis, Schedule, TileSize};

/// What a call does: configurations, how much is live, what memory it needs.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Description {
    /// Name of the GPU and its architecture.
    pub device: String,
    /// Multiprocessors.
    pub multiprocessors: usize,
    /// The configuration of each kernel, with its bytes of shared memory.
    pub kernels: Vec<String>,
    /// Kernels that run otherwise than they were planned, and why; of those that have been needed
    /// so far.
    pub notes: Vec<String>,
    /// Queries and keys of a tile of the forward.
    pub tile: TileSize,
    /// Tiles of all heads, live or not.
    pub tiles: usize,
    /// Tiles where every query sees every key.
    pub full_tiles: usize,
    /// Tiles inside which the mask decides.
    pub partial_tiles: usize,
    /// Pairs of a query and a key in live tiles, of all heads.
    pub live_pairs: u64,
    /// Block masks that batch entries and heads share; 0 without a mask.
    pub block_masks: usize,
    /// Runs of live tiles in those block masks.
    pub runs: u64,
    /// Memory of the lists of those runs in bytes.
    pub block_mask_bytes: u64,
    /// Workspace of a forward pass in bytes.
    pub forward_bytes: usize,
    /// Workspace of a backward pass in bytes.
    pub backward_bytes: usize,
}

impl CudaPlan {
    /// What a call of the planned sizes on aligned operands does. Packed problems need their
    /// offsets; without any, the description is that of no sequences.
    ///
    /// # Errors
    /// Those of planning.
    pub fn describe(&self, varlen: Option<Varlen<'_>>) -> Result<Description, CudaError> {
        let mut dims = self.dims;
        if dims.packed {
            dims.batch = varlen.map_or(0, |v| v.sequences());
        }
        let sequences = sequences(&dims, varlen.filter(|_| dims.packed));
        let chosen = self.chosen(self.class(), sizes(&dims, &sequences), self.gradient.is_ok())?;
        let forward = &self.running(&chosen.kernels[0]).config;
        let tile = TileSize { q: forward.queries(), kv: forward.tile_kv };
        let mask = self.spec.mask.as_ref();
        let work = Schedule::new(&dims, &sequences, mask, Axis::Queries, tile);
        let columns = |s: &foveate_problem::Sequence| s.k_len.div_ceil(tile.kv);
        let tiles: usize = sequences.iter().map(|s| s.q_len.div_ceil(tile.q) * columns(s)).sum();
        let tiles = tiles.saturating_mul(dims.heads_q);
        let mut kinds = [0; 2];
        let (mut runs, mut block_masks, mut block_mask_bytes) = (0, 0, 0);
        match &work.lists {
            None => kinds[0] = tiles,
            Some(lists) => {
                let heads = if lists.head_stride == 0 { 1 } else { dims.heads_q };
                let each = dims.heads_q / heads;
                for s in &work.sequences {
                    let rows = s.q_len.max(0) as usize;
                    for row in (0..heads).flat_map(|h| {
                        let first = s.first_row as usize + h * lists.head_stride;
                        first..first + rows.div_ceil(tile.q)
                    }) {
                        let of_row = &lists.runs[row * lists.capacity..];
                        for run in &of_row[..lists.counts[row] as usize] {
                            kinds[(run.count_kind & 1) as usize] +=
                                (run.count_kind >> 1) as usize * each;
                        }
                    }
                }
                runs = lists.counts.iter().map(|&n| n as u64).sum();
                let mut classes: Vec<i32> = work.sequences.iter().map(|s| s.first_row).collect();
                classes.sort_unstable();
                classes.dedup();
                block_masks = classes.len() * heads;
                block_mask_bytes = (4 * lists.counts.len() + 8 * lists.runs.len()) as u64;
            }
        }
        let rows: usize = dims.row_shape().iter().product();
        let sums = dims.heads_q * work.sum_rows * forward.padded_dim();
        let info = self.engine.device().info();
        Ok(Description {
            device: format!("{} ({})", info.name, info.arch()),
            multiprocessors: info.multiprocessors as usize,
            kernels: chosen.kernels.iter().map(|c| kernel_line(self.running(c))).collect(),
            notes: self.notes(),
            tile,
            tiles,
            full_tiles: kinds[0],
            partial_tiles: kinds[1],
            live_pairs: work.live_pairs,
            block_masks,
            runs,
            block_mask_bytes,
            forward_bytes: match chosen.splits {
                1 => 0,
                splits => 4 * splits * rows * (dims.dim_v + 2),
            },
            backward_bytes: 4 * (rows + if self.options.deterministic { 0 } else { sums }),
        })
    }
}

/// A kernel, what its blocks take, and how many of them a multiprocessor holds.
fn kernel_line(kernel: &Candidate) -> String {
    let Candidate { config, resources, occupancy, .. } = kernel;
    format!(
        "{config}: {} B of shared memory, at most {} registers, {} blocks a multiprocessor",
        resources.shared_bytes, resources.registers, occupancy.blocks
    )
}
