//! The keys and values of a chunk as the products want them.
//!
//! The task that owns the keys packs them when it comes to their chunk, so that they are in its
//! cache, and nowhere else, while they are used.

use std::ops::Range;

use foveate_problem::Operands;

use crate::pack::load_keys;
use crate::simd::{self, Matrix, Panels};
use crate::tiles::Tiles;
use crate::work::Unit;

/// One key tile: k in rows, k and v transposed. Columns of the transposed are keys.
pub struct Block<'a> {
    pub k: Panels<'a>,
    pub k_t: Panels<'a>,
    pub v_t: Panels<'a>,
}

/// Floats of a block.
pub fn elems(tiles: &Tiles) -> usize {
    tiles.kv * (2 * tiles.dim + tiles.dim_v)
}

impl<'a> Block<'a> {
    /// The block that [`pack`] made of `data`.
    pub fn of(data: &'a [f32], tiles: &Tiles) -> Self {
        let Tiles { kv, dim, dim_v, .. } = *tiles;
        let (k, rest) = data.split_at(kv * dim);
        let (k_t, v_t) = rest.split_at(kv * dim);
        Self {
            k: Panels::rows(k, dim),
            k_t: Panels::packed(k_t, dim),
            v_t: Panels::packed(v_t, dim_v),
        }
    }
}

/// Packs the rows `keys` of a unit into a block. Values pass through `v_rows`, a tile of them.
/// Padding is zero.
pub fn pack(
    operands: &Operands<'_>,
    unit: &Unit,
    keys: &Range<usize>,
    tiles: &Tiles,
    block: &mut [f32],
    v_rows: &mut [f32],
) {
    let Tiles { kv, dim, dim_v, .. } = *tiles;
    let (k_rows, rest) = block.split_at_mut(kv * dim);
    let (k_t, v_t) = rest.split_at_mut(kv * dim);
    load_keys(operands, operands.k, unit, keys, dim, k_rows);
    simd::transpose(Matrix::rows(k_rows, dim), keys.len(), dim, 1.0, k_t);
    load_keys(operands, operands.v, unit, keys, dim_v, v_rows);
    simd::transpose(Matrix::rows(v_rows, dim_v), keys.len(), dim_v, 1.0, v_t);
}
