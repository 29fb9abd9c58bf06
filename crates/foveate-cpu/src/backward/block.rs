//! The keys and values of a chunk as the products want them.
//!
//! The task that owns the keys packs them when it comes to their chunk, so that they are in its
//! cache, and nowhere else, while they are used.

use std::ops::Range;

use foveate_problem::Operands;

use crate::pack::{self, Format, both_elems, key_rows};
use crate::simd::Panels;
use crate::tiles::Tiles;
use crate::work::Unit;

/// One key tile: k across, k and v transposed. Columns of the transposed are keys.
pub struct Block<'a, T> {
    pub k: Panels<'a, T>,
    pub k_t: Panels<'a, T>,
    pub v_t: Panels<'a, T>,
    /// The largest norm of a key, or infinity where that is not wanted.
    pub norm: f32,
}

/// Floats of a block.
pub fn elems<T: Format>(tiles: &Tiles) -> usize {
    let [rows, across] = both_elems::<T>(tiles.kv, tiles.dim);
    2 * rows + across + tiles.kv * tiles.dim_v / T::WIDTH
}

/// The rows `keys` of a unit as a block in `room`, which holds [`elems`]. Values pass through
/// `v_rows`, a tile of them. `norms` says that those of keys are wanted. Padding is zero.
pub fn pack<'a, T: Format>(
    operands: &Operands<'a>,
    unit: &Unit,
    keys: &Range<usize>,
    tiles: &Tiles,
    norms: bool,
    room: &'a mut [f32],
    v_rows: &mut [f32],
) -> Block<'a, T> {
    let Tiles { kv, dim, dim_v, .. } = *tiles;
    let [rows, across] = both_elems::<T>(kv, dim);
    let (k_rows, rest) = pack::elements(room).split_at_mut(rows);
    let (k, rest) = rest.split_at_mut(across);
    let (k_t, v_t) = rest.split_at_mut(rows);
    let k_rows = key_rows(operands, operands.k, unit, keys, dim, k_rows);
    T::transpose(k_rows, keys.len(), dim, k_t);
    let norm = if norms { pack::largest_norm(k_rows, keys.len(), dim) } else { f32::INFINITY };
    let v_rows = pack::elements(v_rows);
    let v_rows = key_rows(operands, operands.v, unit, keys, dim_v, v_rows);
    T::transpose(v_rows, keys.len(), dim_v, v_t);
    Block {
        k: T::across(k_rows, keys.len(), dim, k),
        k_t: Panels::packed(k_t, dim / T::WIDTH),
        v_t: Panels::packed(v_t, dim_v / T::WIDTH),
        norm,
    }
}
