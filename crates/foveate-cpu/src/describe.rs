//! What a plan will do, as data.

use crate::call::Call;
use crate::masks::Live;
use crate::work::{Unit, waves};
use crate::{backward, forward, simd};

/// What a call does: how it is tiled, how much of it is live, what memory it needs.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Description {
    /// Instruction set of the row passes, chosen for this machine.
    pub instructions: &'static str,
    /// Threads of the pool it was asked from.
    pub threads: usize,
    /// Queries in a tile.
    pub tile_q: usize,
    /// Keys in a tile.
    pub tile_kv: usize,
    /// Tiles of all heads, live or not.
    pub tiles: usize,
    /// Tiles where every query sees every key.
    pub full_tiles: usize,
    /// Tiles inside which the mask decides.
    pub partial_tiles: usize,
    /// Block masks that heads share; 0 without a mask.
    pub block_masks: usize,
    /// Workspace of a forward pass in bytes, without a few tiles for each thread.
    pub forward_bytes: usize,
    /// Workspace of a backward pass in bytes, without a few tiles for each thread and the sums
    /// of learned buffers.
    pub backward_bytes: usize,
}

impl Description {
    pub(crate) fn of(call: &Call<'_>) -> Self {
        let (mut tiles, mut kinds) = (0, [0, 0]);
        let mut masks = std::collections::HashSet::new();
        for s in &call.sequences {
            let rows = s.q_len.div_ceil(call.tiles.q);
            for h in 0..call.dims.heads_q {
                let live = call.live(s.b, h);
                tiles += rows * call.key_tiles(s.b).len();
                if let Live::Some(mask) = live {
                    masks.insert(std::sync::Arc::as_ptr(mask) as usize);
                }
                for row in 0..rows {
                    let [full, partial] = live.kinds(row);
                    kinds = [kinds[0] + full, kinds[1] + partial];
                }
            }
        }
        let largest = |elems: &dyn Fn(&Unit) -> usize| {
            let waves = waves(&call.units, elems);
            let wave = |wave: &[Unit]| wave.iter().map(elems).sum::<usize>();
            4 * waves.into_iter().map(wave).max().unwrap_or(0)
        };
        Self {
            instructions: simd::level().name(),
            threads: rayon::current_num_threads(),
            tile_q: call.tiles.q,
            tile_kv: call.tiles.kv,
            tiles,
            full_tiles: kinds[0],
            partial_tiles: kinds[1],
            block_masks: masks.len(),
            forward_bytes: largest(&|unit| forward::wave_elems(call, unit)),
            backward_bytes: largest(&|unit| backward::wave_elems(call, unit)),
        }
    }
}
