//! What a plan will do, as data.

use foveate_mask::Tiling;
use foveate_problem::{Arrangement, Dims, ScaleBlocks, Sequence};

use super::kernels::sizes;
use super::launch::{COUNTED_BYTES, dq_accum_bytes, head_gradient_bytes};
use super::{CudaPlan, longest, sequences};
use crate::choose::schedule::{Axis, Lists, Schedule, TileSize, mask_slots};
use crate::choose::{Class, KernelPlan};
use crate::compile::Candidate;
use crate::compile::config::{Config, Kernel};
use crate::error::CudaError;
use foveate_gpu::Arch;

/// What a call does: configurations, how much is live, what memory it needs.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Description {
    /// Name of the GPU and its architecture.
    pub device: String,
    /// Number of SMs.
    pub sms: usize,
    /// The configuration of each kernel, with its bytes of shared memory.
    pub kernels: Vec<String>,
    /// What driver or NVRTC lack of what the Hopper family needs, on compute capability 9.0; then
    /// kernels that run otherwise than they were planned, and why, of those that have been needed
    /// so far.
    pub notes: Vec<String>,
    /// The tiles of the forward, or their cells where these are what its kernel passes over, takes as
    /// they are or evaluates the mask in.
    pub tiling: Tiling,
    /// Workspace of a forward pass in bytes.
    pub forward_bytes: usize,
    /// Workspace of a backward pass in bytes; 0 where there is none.
    pub backward_bytes: usize,
}

impl CudaPlan {
    /// What a call of the planned sizes on contiguous operands does, whose sequences lie as
    /// `arrangement` says. Packed problems need their offsets; without any, the description is
    /// that of no sequences. `scales` are the blocks of scales that f8e4m3 operands have.
    ///
    /// # Errors
    /// Those of planning, and a captured buffer in device memory, on which it depends what is live.
    pub fn describe(
        &self,
        arrangement: Arrangement<'_>,
        scales: Option<ScaleBlocks>,
    ) -> Result<Description, CudaError> {
        self.spec.check_on_host()?;
        let dims = self.dims.arranged(arrangement);
        let sequences = sequences(&dims, arrangement);
        let page_size = arrangement.page_size();
        let class = Class {
            scale_blocks: scales.is_some_and(|blocks| blocks != ScaleBlocks::WHOLE),
            ..self.class().contiguous(page_size)
        };
        let backward = self.gradient.is_ok() && !arrangement.paged();
        let sizes = sizes(&dims, longest(&sequences));
        let chosen = self.chosen(class.clone(), sizes, backward)?;
        let chosen = self.settled(chosen, class.clone(), sizes, None)?;
        let forward = &self.running(&chosen.kernels[0]).config;
        let tile = TileSize::of(forward);
        let cell_q = tile.q / tile.cells.0;
        let mask = self.spec.mask.as_ref();
        let schedule = Schedule::new(&dims, &sequences, mask, Axis::Queries, tile);
        let columns = |s: &Sequence| s.k_len.div_ceil(tile.kv);
        let tiles: usize = sequences.iter().map(|s| s.q_len.div_ceil(cell_q) * columns(s)).sum();
        let tiles = tiles.saturating_mul(dims.heads_q / forward.heads());
        let lists = match &schedule.lists {
            None => {
                ListStats { full: tiles, live_pairs: schedule.live_pairs, ..ListStats::default() }
            }
            Some(lists) => ListStats::of(&schedule, lists, &dims, forward),
        };
        let pairs = |s: &Sequence| dims.heads_q as f64 * s.q_len as f64 * s.k_len as f64;
        let pairs: f64 = sequences.iter().map(pairs).sum();
        let info = self.engine.device().info();
        Ok(Description {
            device: format!("{} ({})", info.name, info.arch()),
            sms: info.sms as usize,
            kernels: chosen
                .kernels
                .iter()
                .map(|c| kernel_line(self.running(c), info.arch()))
                .collect(),
            notes: self
                .without_hopper()
                .into_iter()
                .chain(self.notes())
                .chain(lists.without_room())
                .collect(),
            tiling: Tiling {
                tile_q: cell_q,
                tile_kv: tile.kv,
                tile_heads: forward.heads(),
                tiles,
                full_tiles: lists.full,
                partial_tiles: lists.partial,
                bits_tiles: lists.by_bits,
                live_pairs: lists.live_pairs,
                seen_pairs: schedule.seen_pairs,
                block_masks: lists.masks,
                runs: lists.runs,
                block_mask_bytes: lists.bytes,
                density: schedule.seen_pairs as f64 / pairs.max(1.0),
            },
            forward_bytes: match chosen.kv_splits {
                1 => 0,
                kv_splits => 4 * kv_splits * rows(&dims) * (dims.dim_v + 2),
            },
            backward_bytes: match backward {
                true => self.backward_bytes(&class, &dims, schedule.sum_rows, &chosen),
                false => 0,
            },
        })
    }

    /// The configurations of the kernels that a call of the planned sizes on contiguous operands runs,
    /// the forward's first, whatever its captured buffers hold.
    ///
    /// # Errors
    /// Those of planning.
    pub fn configurations(&self) -> Result<Vec<Config>, CudaError> {
        let arrangement = Arrangement::default();
        let longest = longest(&sequences(&self.dims.arranged(arrangement), arrangement));
        let sizes = sizes(&self.dims, longest);
        let class = self.class().contiguous(None);
        let chosen = self.chosen(class.clone(), sizes, self.gradient.is_ok())?;
        let chosen = self.settled(chosen, class, sizes, None)?;
        Ok(chosen.kernels.iter().map(|kernel| self.running(kernel).config.clone()).collect())
    }

    /// Workspace of a backward that every learned buffer gets its gradient from; see
    /// `launch_backward`.
    fn backward_bytes(
        &self,
        class: &Class,
        dims: &Dims,
        sum_rows: usize,
        chosen: &KernelPlan,
    ) -> usize {
        // Delta, and what the weights of a row add up to.
        let of_rows = 4 * rows(dims) * if class.has_row_weight_sum() { 2 } else { 1 };
        let learned: usize = self.spec.learned().iter().map(|b| b.elems()).sum();
        let counted = if self.options.deterministic { COUNTED_BYTES * learned } else { 0 };
        let keys = chosen.config(Kernel::Backward).filter(|config| !config.separate_dq);
        let of_dq = keys.map_or(0, |keys| dq_accum_bytes(keys, dims.heads_q * sum_rows));
        let of_heads = match chosen.splits_gqa() {
            true => head_gradient_bytes(dims),
            false => 0,
        };
        of_rows + counted + of_dq + of_heads
    }
}

/// Rows of every head and batch entry.
fn rows(dims: &Dims) -> usize {
    dims.row_shape().iter().product()
}

/// What the lists of a mask hold.
#[derive(Default)]
struct ListStats {
    /// Cells of all heads by their kind.
    full: usize,
    partial: usize,
    /// Pairs of a query and a key in live ones.
    live_pairs: u64,
    /// Masks that batch entries and heads share.
    masks: usize,
    runs: u64,
    /// Of the runs and of mask bits.
    bytes: u64,
    /// Tiles of a row that there is room for in mask bits, where the kernel reads them.
    row_slots: Option<usize>,
    /// Partial cells whose mask is read as bits.
    by_bits: usize,
}

impl ListStats {
    fn of(schedule: &Schedule, lists: &Lists, dims: &Dims, forward: &Config) -> Self {
        let heads = if lists.head_stride == 0 { 1 } else { dims.heads_q };
        // Tiles for each one listed: heads that share a list have tiles of their own, unless they
        // share those as well.
        let each = dims.heads_q / heads / forward.heads();
        let TileSize { q, kv, cells } = TileSize::of(forward);
        let (bits, cell_q) = (cells.kind_bits(), q / cells.0);
        let (mut kinds, mut live_pairs, mut by_bits) = ([0; 2], 0, 0);
        let (bit_bytes, row_slots) = match forward.mask_bits {
            true => {
                let (rows, tile) = (lists.counts.len(), TileSize::of(forward));
                let (tile_bytes, slots) = mask_slots(Axis::Queries, tile, schedule.longest, rows);
                // Runs have the number of their first slot each.
                (tile_bytes * slots * rows + 4 * lists.runs.len(), slots)
            }
            false => (0, 0),
        };
        for s in &schedule.sequences {
            let [queries, keys] = [s.q_len, s.k_len].map(|len| len.max(0) as usize);
            let tiles = queries.div_ceil(q);
            for h in 0..heads {
                let first = s.first_row as usize + h * lists.head_stride;
                for tile in 0..tiles {
                    let row = first + tile;
                    let of_row = &lists.runs[row * lists.capacity..];
                    let mut slots = row_slots;
                    for run in &of_row[..lists.counts[row] as usize] {
                        let (at, count) = (run.first as usize, (run.count_kind >> bits) as usize);
                        let columns = ((at + count) * kv).min(keys) - at * kv;
                        // As `fv_mask_bits` gives slots to runs.
                        let cut = cells.live(run.count_kind).any(|(_, partial)| partial);
                        let fits = forward.mask_bits && cut && count <= slots;
                        slots -= if fits { count } else { 0 };
                        for (cell, partial) in cells.live(run.count_kind) {
                            let at = tile * q + cell * cell_q;
                            let rows = (at + cell_q).min(queries).saturating_sub(at);
                            kinds[usize::from(partial)] += count * each;
                            by_bits += if partial && fits { count * each } else { 0 };
                            live_pairs += (rows * columns * (dims.heads_q / heads)) as u64;
                        }
                    }
                }
            }
        }
        let mut classes: Vec<i32> = schedule.sequences.iter().map(|s| s.first_row).collect();
        classes.sort_unstable();
        classes.dedup();
        Self {
            full: kinds[0],
            partial: kinds[1],
            live_pairs,
            masks: classes.len() * heads,
            runs: lists.counts.iter().map(|&n| n as u64).sum(),
            bytes: (4 * lists.counts.len() + 8 * lists.runs.len() + bit_bytes) as u64,
            row_slots: forward.mask_bits.then_some(row_slots),
            by_bits,
        }
    }

    /// That not all partial tiles have mask bits, where a kernel reads them.
    fn without_room(&self) -> Option<String> {
        let Self { row_slots: Some(row_slots), by_bits, partial, .. } = *self else { return None };
        let told = format!(
            "the forward's mask bits have room for {row_slots} tiles of keys for each tile of queries: \
             {} of {partial} partial tiles are evaluated",
            partial - by_bits
        );
        (by_bits < partial).then_some(told)
    }
}

/// A kernel, the architecture that it is compiled for, what its CTAs take, and how many of them an SM holds.
fn kernel_line(kernel: &Candidate, device: Arch) -> String {
    let Candidate { config, resources, occupancy, .. } = kernel;
    format!(
        "{config}, for {}: {} B of shared memory, at most {} registers, {} CTAs per SM",
        config.family.arch(device),
        resources.shared_bytes,
        resources.registers,
        occupancy.ctas
    )
}

#[cfg(test)]
mod tests {
    use foveate_mods::MaskMod;
    use foveate_mods::expr::{h, kv, q};

    use super::*;
    use crate::compile::config::{Elem, Family};

    #[test]
    fn mask_bits_have_no_room_for_all_partial_tiles_of_many_rows() {
        let sides = |mask_bits| Config {
            tile_q: 128,
            tile_kv: 128,
            warps: 12,
            mask: true,
            mask_bits,
            family: Family::Hopper,
            ..Config::new(Kernel::Forward, Elem::Bf16, 128, 128)
        };
        let stats = |heads: usize, mask_bits| {
            let dims = Dims {
                batch: 1,
                heads_q: heads,
                heads_kv: heads,
                len_q: 2048,
                len_k: 2048,
                dim: 128,
                dim_v: 128,
                shared_kv: false,
                packed: false,
            };
            let seen = q().ge(kv()) & ((q() + kv() + h()) % 2).eq(0);
            let mask = MaskMod::new(seen.dynamic()).unwrap();
            let (forward, sequences) = (sides(mask_bits), dims.sequences(None));
            let schedule = Schedule::new(
                &dims,
                &sequences,
                Some(&mask),
                Axis::Queries,
                TileSize::of(&forward),
            );
            ListStats::of(&schedule, schedule.lists.as_ref().unwrap(), &dims, &forward)
        };
        // 16 rows a head, the last of which has 16 tiles of two cells, 2 KiB of bits each.
        let [few, many, evaluated] =
            [(32, true), (64, true), (64, false)].map(|(n, by)| stats(n, by));
        assert_eq!((few.row_slots, few.by_bits, few.without_room()), (Some(16), few.partial, None));
        assert_eq!((few.bytes - stats(32, false).bytes) >> 20, 16);
        let tiles = |of: std::ops::RangeInclusive<usize>| 64 * 2 * of.sum::<usize>();
        assert_eq!(
            (many.row_slots, many.partial, many.by_bits),
            (Some(8), tiles(1..=16), tiles(1..=8))
        );
        let told = "the forward's mask bits have room for 8 tiles of keys for each tile of queries: \
                    12800 of 17408 partial tiles are evaluated";
        assert_eq!(many.without_room().as_deref(), Some(told));
        assert_eq!((evaluated.by_bits, evaluated.without_room()), (0, None));
    }
}
