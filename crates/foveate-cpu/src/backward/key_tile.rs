//! Key tiles of the backward, packed for its products.
//!
//! The task that owns the keys packs them when it comes to their chunk, so that they stay in the
//! cache of one core while they are used.

use std::ops::Range;

use foveate_problem::Operands;

use crate::pack::{self, Format, key_rows, operand_elems};
use crate::simd::Panels;
use crate::tasks::KvHead;
use crate::tiles::Tiles;

/// A packed key tile: k as a `b` operand, k and v transposed (columns are keys).
pub struct KeyTile<'a, T> {
    pub k: Panels<'a, T>,
    pub k_t: Panels<'a, T>,
    pub v_t: Panels<'a, T>,
    /// The largest norm of a key, or infinity where norms are not wanted.
    pub norm: f32,
}

/// Floats of a packed key tile.
pub fn elems<T: Format>(tiles: &Tiles) -> usize {
    let [rows, b] = operand_elems::<T>(tiles.kv, tiles.dim);
    2 * rows + b + tiles.kv * tiles.dim_v / T::WIDTH
}

/// Packs the rows `keys` of a KV head into `buffer`, which holds [`elems`]. `v_rows` holds the values
/// of a tile that cannot be read in place. `norms` says whether the norms of keys are wanted.
/// Padding is zero.
pub fn pack<'a, T: Format>(
    operands: &Operands<'a>,
    kv_head: &KvHead,
    keys: &Range<usize>,
    tiles: &Tiles,
    norms: bool,
    buffer: &'a mut [f32],
    v_rows: &mut [f32],
) -> KeyTile<'a, T> {
    let Tiles { kv, dim, dim_v, .. } = *tiles;
    let [rows, b] = operand_elems::<T>(kv, dim);
    let (k_rows, rest) = pack::elements(buffer).split_at_mut(rows);
    let (k, rest) = rest.split_at_mut(b);
    let (k_t, v_t) = rest.split_at_mut(rows);
    let k_rows = key_rows(operands, operands.k, kv_head, keys, dim, k_rows);
    T::transpose(k_rows, keys.len(), dim, k_t);
    let norm = if norms { pack::largest_norm(k_rows, keys.len(), dim) } else { f32::INFINITY };
    let v_rows = pack::elements(v_rows);
    let v_rows = key_rows(operands, operands.v, kv_head, keys, dim_v, v_rows);
    T::transpose(v_rows, keys.len(), dim_v, v_t);
    KeyTile {
        k: T::to_b(k_rows, keys.len(), dim, k),
        k_t: Panels::packed(k_t, dim / T::WIDTH),
        v_t: Panels::packed(v_t, dim_v / T::WIDTH),
        norm,
    }
}
