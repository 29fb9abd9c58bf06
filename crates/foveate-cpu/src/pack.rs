//! Keys and values as the products want them.
//!
//! Each key tile of a unit becomes one block of f32: k transposed (columns are keys) in panels
//! and v in rows; for the backward also k in rows and v transposed. Every dtype and stride meets
//! here and nowhere else, so a call computes the same bits for any layout of the same numbers.
//! Padding is zero.

use foveate_tensor::TensorRef;
use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, ParallelIterator};
use rayon::slice::ParallelSliceMut;

use crate::simd::{LANES, Panels};
use crate::tiles::Tiles;
use crate::work::Unit;

/// Blocks of the units of a wave.
pub struct Packed {
    data: Vec<f32>,
    /// First block of each unit.
    first: Vec<usize>,
    tiles: Tiles,
    backward: bool,
}

/// One key tile. Element `(i, j)` of `k_t` is component `i` of key `j`.
pub struct Block<'a> {
    pub k_t: Panels<'a>,
    pub v: Panels<'a>,
    /// Backward only.
    pub k: Panels<'a>,
    /// Backward only.
    pub v_t: Panels<'a>,
}

/// Floats the blocks of a unit take.
pub fn elems(tiles: &Tiles, len_k: usize, backward: bool) -> usize {
    len_k.div_ceil(tiles.kv) * block_elems(tiles, backward)
}

fn block_elems(tiles: &Tiles, backward: bool) -> usize {
    tiles.kv * (tiles.dim + tiles.dim_v) * if backward { 2 } else { 1 }
}

impl Packed {
    /// Packs the keys and values of `units` into `data`, which holds [`elems`] of each.
    pub fn new(
        k: TensorRef<'_>,
        v: TensorRef<'_>,
        units: &[Unit],
        tiles: Tiles,
        backward: bool,
        mut data: Vec<f32>,
    ) -> Self {
        let mut first = Vec::with_capacity(units.len());
        let mut owner = Vec::new();
        for (u, unit) in units.iter().enumerate() {
            first.push(owner.len());
            owner.extend((0..unit.keys.len.div_ceil(tiles.kv)).map(|t| (u, t)));
        }
        let block = block_elems(&tiles, backward);
        let pack = |rows_of_k: &mut Vec<f32>, block: &mut [f32], u: usize, t: usize| {
            let unit: &Unit = &units[u];
            let start = t * tiles.kv;
            let rows = tiles.kv.min(unit.keys.len - start);
            let at = [unit.keys.batch, unit.h_kv, unit.keys.start + start];
            let (k_t, rest) = block.split_at_mut(tiles.kv * tiles.dim);
            let k_rows = if backward { tiles.kv * tiles.dim } else { 0 };
            let (k_rows, rest) = rest.split_at_mut(k_rows);
            let (v_rows, v_t) = rest.split_at_mut(tiles.kv * tiles.dim_v);
            let k_rows = if backward {
                k_rows
            } else {
                rows_of_k.resize(tiles.kv * tiles.dim, 0.0);
                rows_of_k
            };
            load_rows(k, at, rows, tiles.dim, k_rows);
            transpose(k_rows, rows, tiles.dim, k_t);
            load_rows(v, at, rows, tiles.dim_v, v_rows);
            if backward {
                transpose(v_rows, rows, tiles.dim_v, v_t);
            }
        };
        data.par_chunks_exact_mut(block)
            .zip(owner.into_par_iter())
            .for_each_init(Vec::new, |rows_of_k, (block, (u, t))| pack(rows_of_k, block, u, t));
        Self { data, first, tiles, backward }
    }

    /// Tile `t` of unit `u` of the wave.
    pub fn block(&self, u: usize, t: usize) -> Block<'_> {
        let Tiles { kv, dim, dim_v, .. } = self.tiles;
        let len = block_elems(&self.tiles, self.backward);
        let block = &self.data[(self.first[u] + t) * len..][..len];
        let (k_t, rest) = block.split_at(kv * dim);
        let (k, rest) = if self.backward { rest.split_at(kv * dim) } else { (&rest[..0], rest) };
        let (v, v_t) = rest.split_at(kv * dim_v);
        Block {
            k_t: Panels::packed(k_t, dim),
            v: Panels::rows(v, dim_v),
            k: Panels::rows(k, dim),
            v_t: Panels::packed(v_t, dim_v),
        }
    }

    /// The buffer, for the next wave.
    pub fn into_data(self) -> Vec<f32> {
        self.data
    }
}

/// Copies `rows` vectors from `[b, h, s]` on, `dim` floats apart, each padded with zeros.
pub fn load_rows(
    t: TensorRef<'_>,
    [b, h, s]: [usize; 3],
    rows: usize,
    dim: usize,
    into: &mut [f32],
) {
    let len = t.shape()[3];
    for (r, row) in into.chunks_exact_mut(dim).take(rows).enumerate() {
        t.load_row(b, h, s + r, &mut row[..len]);
        row[len..].fill(0.0);
    }
}

/// Writes the first `n` rows of `rows`, `dim` long, as columns of `into`, in panels of a depth of
/// `dim`. Columns from `n` on are zero.
fn transpose(rows: &[f32], n: usize, dim: usize, into: &mut [f32]) {
    for (p, panel) in into.chunks_exact_mut(dim * LANES).enumerate() {
        let group = LANES.min(n.saturating_sub(p * LANES));
        if group < LANES {
            panel.fill(0.0);
        }
        let from = &rows[(p * LANES).min(n) * dim..][..group * dim];
        for (d, to) in panel.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            for (x, row) in to.iter_mut().zip(from.chunks_exact(dim)) {
                *x = row[d];
            }
        }
    }
}
