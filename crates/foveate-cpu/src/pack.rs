//! Keys and values as the products want them.
//!
//! Each key tile of a unit becomes one block of f32: k transposed (columns are keys) in panels
//! and v in rows; for the backward also k in rows and v transposed. Every dtype and stride meets
//! here and nowhere else, so a call computes the same bits for any layout of the same numbers.
//! Padding is zero.

use std::sync::OnceLock;

use foveate_problem::Operands;
use foveate_tensor::TensorRef;
use rayon::iter::{IntoParallelIterator, ParallelIterator};

use crate::simd::{LANES, Panels};
use crate::tiles::Tiles;
use crate::work::Unit;

/// Blocks of the units of a wave. Each is packed by a task of its own, and whoever needs it earlier
/// waits for it.
pub struct Packed<'a> {
    blocks: Vec<OnceLock<&'a [f32]>>,
    /// First block of each unit.
    first: Vec<usize>,
    tiles: Tiles,
    backward: bool,
}

/// A block to be packed.
pub struct Packing<'a> {
    /// Unit of the wave.
    pub unit: usize,
    tile: usize,
    into: &'a mut [f32],
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

impl<'a> Packed<'a> {
    /// Room for the blocks of `units` in `data`, which holds [`elems`] of each, and what is to be
    /// packed into it, unit by unit.
    pub fn new(
        units: &[Unit],
        tiles: Tiles,
        backward: bool,
        data: &'a mut [f32],
    ) -> (Self, Vec<Packing<'a>>) {
        let mut rooms = data.chunks_exact_mut(block_elems(&tiles, backward));
        let (mut first, mut packings) = (Vec::with_capacity(units.len()), Vec::new());
        for (u, unit) in units.iter().enumerate() {
            first.push(packings.len());
            for tile in 0..unit.keys.len.div_ceil(tiles.kv) {
                let into = rooms.next().expect("room for every block");
                packings.push(Packing { unit: u, tile, into });
            }
        }
        let blocks = packings.iter().map(|_| OnceLock::new()).collect();
        (Self { blocks, first, tiles, backward }, packings)
    }

    /// Packs every block of `units`, on all threads.
    pub fn all(operands: &Operands<'_>, units: &[Unit], tiles: Tiles, data: &'a mut [f32]) -> Self {
        let (packed, packings) = Self::new(units, tiles, true, data);
        packings.into_par_iter().for_each(|p| packed.pack(operands, &units[p.unit], p, &mut []));
        packed
    }

    /// Packs one block of `unit`. Without room for k in rows, which the backward has, they pass
    /// through `rows_of_k`.
    pub fn pack(
        &self,
        operands: &Operands<'_>,
        unit: &Unit,
        packing: Packing<'a>,
        rows_of_k: &mut [f32],
    ) {
        let (tiles, Packing { unit: u, tile, into }) = (&self.tiles, packing);
        let start = tile * tiles.kv;
        let rows = tiles.kv.min(unit.keys.len - start);
        let load = |t: TensorRef<'_>, dim: usize, into: &mut [f32]| {
            load_rows_at(t, unit.h_kv, rows, dim, into, |r| {
                operands.key_place(unit.keys.batch, unit.keys.start + start + r)
            });
        };
        let (k_t, rest) = into.split_at_mut(tiles.kv * tiles.dim);
        let room = if self.backward { tiles.kv * tiles.dim } else { 0 };
        let (k_rows, rest) = rest.split_at_mut(room);
        let (v_rows, v_t) = rest.split_at_mut(tiles.kv * tiles.dim_v);
        let k_rows = if self.backward { k_rows } else { rows_of_k };
        load(operands.k, tiles.dim, k_rows);
        transpose(k_rows, rows, tiles.dim, k_t);
        load(operands.v, tiles.dim_v, v_rows);
        if self.backward {
            transpose(v_rows, rows, tiles.dim_v, v_t);
        }
        let packed = self.blocks[self.first[u] + tile].set(into);
        assert!(packed.is_ok(), "a block is packed once");
    }

    /// Tile `t` of unit `u` of the wave.
    pub fn block(&self, u: usize, t: usize) -> Block<'_> {
        let Tiles { kv, dim, dim_v, .. } = self.tiles;
        let block = self.blocks[self.first[u] + t].wait();
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
}

/// Copies `rows` vectors from `[b, h, s]` on, `dim` floats apart, each padded with zeros.
pub fn load_rows(
    t: TensorRef<'_>,
    [b, h, s]: [usize; 3],
    rows: usize,
    dim: usize,
    into: &mut [f32],
) {
    load_rows_at(t, h, rows, dim, into, |r| [b, s + r]);
}

/// Copies `rows` vectors of head `h`, `dim` floats apart, each padded with zeros. Where vector `r`
/// stands on the batch axis and on the length axis is `place(r)`.
fn load_rows_at(
    t: TensorRef<'_>,
    h: usize,
    rows: usize,
    dim: usize,
    into: &mut [f32],
    place: impl Fn(usize) -> [usize; 2],
) {
    let len = t.shape()[3];
    for (r, row) in into.chunks_exact_mut(dim).take(rows).enumerate() {
        let [b, s] = place(r);
        t.load_row(b, h, s, &mut row[..len]);
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
