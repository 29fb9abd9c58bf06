//! The description of a plan: tiles, density, workspace.

use std::collections::HashMap;
use std::sync::Arc;

use foveate_mask::{Stats, Tiling};

use crate::call::Call;
use crate::error::{CpuError, CpuErrorKind};
use crate::masks::Live;
use crate::tasks::{KvHead, waves};
use crate::{backward, decode, forward, simd};

/// The instruction set of this process's row passes and products: the best one of the machine, or
/// the lesser one that `FOVEATE_CPU_LEVEL` names.
///
/// # Errors
/// When the machine does not have that level. [`CpuPlan::new`](crate::CpuPlan::new) gives the same
/// error.
pub fn instructions() -> Result<&'static str, CpuError> {
    simd::asked().map_err(|reason| CpuErrorKind::Option { name: simd::VARIABLE, reason })?;
    Ok(simd::level().name())
}

/// What a call does: how it is tiled, how much of it is live, what memory it needs.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Description {
    /// Instruction set of the row passes, chosen for this machine.
    pub instructions: &'static str,
    /// Threads of the pool it was asked from.
    pub threads: usize,
    /// The tiles of the forward.
    pub tiling: Tiling,
    /// Why the forward is not that of a few queries, which reads keys in place; `None` when it is.
    pub decode_declined: Option<String>,
    /// Workspace of a forward pass in bytes, without a few tiles for each thread.
    pub forward_bytes: usize,
    /// Workspace of a backward pass in bytes, without a few tiles for each thread and the sums
    /// of learned buffers.
    pub backward_bytes: usize,
}

impl Description {
    pub(crate) fn of(call: &Call<'_>, backward: &Call<'_>) -> Self {
        let (mut tiles, mut kinds) = (0usize, [0usize; 2]);
        let mut masks = HashMap::new();
        let mut live_pairs = 0u64;
        for s in &call.sequences {
            let rows = s.q_len.div_ceil(call.tiles.q);
            for h in 0..call.dims.heads_q {
                let live = call.live(s.b, h);
                let all = rows.saturating_mul(call.key_tiles(s.b).len());
                tiles = tiles.saturating_add(all);
                let pairs = match live {
                    Live::All(_) => {
                        kinds[0] = kinds[0].saturating_add(all);
                        s.q_len as u64 * s.k_len as u64
                    }
                    Live::Some(mask) => {
                        let entry = masks.entry(Arc::as_ptr(mask));
                        for row in 0..rows {
                            let [full, partial] = live.kinds(row);
                            kinds = [kinds[0] + full, kinds[1] + partial];
                        }
                        entry.or_insert_with(|| mask.stats()).live_entries
                    }
                };
                live_pairs = live_pairs.saturating_add(pairs);
            }
        }
        let sum = |of: &dyn Fn(&Stats) -> u64| masks.values().map(of).sum();
        let entries: u64 = sum(&|s| s.entries);
        let live_entries: u64 = sum(&|s| s.live_entries);
        let largest = |call: &Call<'_>, elems: &dyn Fn(&KvHead) -> usize| {
            let waves = waves(&call.kv_heads, call.wave_bytes, elems);
            let wave = |wave: &[KvHead]| wave.iter().map(elems).sum::<usize>();
            4 * waves.into_iter().map(wave).max().unwrap_or(0)
        };
        Self {
            instructions: simd::level().name(),
            threads: crate::threads::count(),
            tiling: Tiling {
                tile_q: call.tiles.q,
                tile_kv: call.tiles.kv,
                tile_heads: 1,
                tiles,
                full_tiles: kinds[0],
                partial_tiles: kinds[1],
                bits_tiles: 0,
                live_pairs,
                seen_pairs: live_pairs,
                block_masks: masks.len(),
                runs: sum(&|s| s.runs),
                block_mask_bytes: sum(&|s| s.bytes),
                density: if entries == 0 { 1.0 } else { live_entries as f64 / entries as f64 },
            },
            decode_declined: decode::declines(call),
            forward_bytes: largest(call, &|kv_head| forward::wave_elems(call, kv_head)),
            backward_bytes: largest(backward, &|kv_head| backward::wave_elems(backward, kv_head)),
        }
    }
}
