//! Keys and values as the products want them.
//!
//! In the forward each key tile of a unit becomes one block of f32: k transposed (columns are keys)
//! in panels and v in rows. Every dtype, stride and page meets here and nowhere else, so a call
//! computes the same bits for any layout of the same numbers. Padding is zero.
//!
//! In the forward, rows that lie as they would be copied, f32 and one after another, are read where
//! they are ([`neighbours`]).

use std::ops::Range;
use std::sync::OnceLock;

use foveate_problem::Operands;
use foveate_tensor::{Slice, TensorRef};

use crate::simd::{self, Matrix, Panels};
use crate::tiles::Tiles;
use crate::work::Unit;

/// Blocks of the units of a wave. Each is packed by a task of its own, and whoever needs it earlier
/// waits for it.
pub struct Packed<'a> {
    operands: Operands<'a>,
    units: &'a [Unit],
    /// Factor on the keys.
    scale: f32,
    blocks: Vec<OnceLock<&'a [f32]>>,
    /// First block of each unit.
    first: Vec<usize>,
    tiles: Tiles,
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
}

/// Floats the blocks of a unit take.
pub fn elems(tiles: &Tiles, len_k: usize) -> usize {
    len_k.div_ceil(tiles.kv) * block_elems(tiles)
}

fn block_elems(tiles: &Tiles) -> usize {
    tiles.kv * (tiles.dim + tiles.dim_v)
}

impl<'a> Packed<'a> {
    /// Room for the blocks of `units` in `data`, which holds [`elems`] of each, and what is to be
    /// packed into it, unit by unit. Keys are multiplied by `scale`.
    pub fn new(
        operands: &Operands<'a>,
        units: &'a [Unit],
        tiles: Tiles,
        scale: f32,
        data: &'a mut [f32],
    ) -> (Self, Vec<Packing<'a>>) {
        let mut rooms = data.chunks_exact_mut(block_elems(&tiles));
        let (mut first, mut packings) = (Vec::with_capacity(units.len()), Vec::new());
        for (u, unit) in units.iter().enumerate() {
            first.push(packings.len());
            for tile in 0..unit.keys.len.div_ceil(tiles.kv) {
                let into = rooms.next().expect("room for every block");
                packings.push(Packing { unit: u, tile, into });
            }
        }
        let blocks = packings.iter().map(|_| OnceLock::new()).collect();
        (Self { operands: *operands, units, scale, blocks, first, tiles }, packings)
    }

    /// The rows of a tile where they lie in `t`, if they are neighbours there and `dim` long.
    fn in_place(&self, t: TensorRef<'a>, dim: usize, u: usize, tile: usize) -> Option<Matrix<'a>> {
        if self.operands.pages.is_some() || t.shape()[3] != dim {
            return None;
        }
        let keys = &self.units[u].keys;
        neighbours(t, [keys.batch, self.units[u].h_kv, keys.start + tile * self.tiles.kv])
    }

    /// Packs one block. Keys pass through `rows_of_k`, a tile of them.
    pub fn pack(&self, packing: Packing<'a>, rows_of_k: &mut [f32]) {
        let (tiles, Packing { unit: u, tile, into }) = (&self.tiles, packing);
        let (operands, unit, start) = (&self.operands, &self.units[u], tile * tiles.kv);
        let keys = start..unit.keys.len.min(start + tiles.kv);
        let (k_t, v_rows) = into.split_at_mut(tiles.kv * tiles.dim);
        let k = self.in_place(operands.k, tiles.dim, u, tile).unwrap_or_else(|| {
            load_keys(operands, operands.k, unit, &keys, tiles.dim, rows_of_k);
            Matrix::rows(rows_of_k, tiles.dim)
        });
        simd::transpose(k, keys.len(), tiles.dim, self.scale, k_t);
        if self.in_place(operands.v, tiles.dim_v, u, tile).is_none() {
            load_keys(operands, operands.v, unit, &keys, tiles.dim_v, v_rows);
        }
        let packed = self.blocks[self.first[u] + tile].set(into);
        assert!(packed.is_ok(), "a block is packed once");
    }

    /// Tile `t` of unit `u` of the wave.
    pub fn block(&self, u: usize, t: usize) -> Block<'_> {
        let Tiles { kv, dim, dim_v, .. } = self.tiles;
        let block = self.blocks[self.first[u] + t].wait();
        let (k_t, v) = block.split_at(kv * dim);
        let v = self.in_place(self.operands.v, dim_v, u, t).map_or(v, |v| v.data);
        Block { k_t: Panels::packed(k_t, dim), v: Panels::rows(v, dim_v) }
    }
}

/// The vectors from `[b, h, s]` on where they lie, if they are f32 and follow one another.
pub fn neighbours<'a>(t: TensorRef<'a>, [b, h, s]: [usize; 3]) -> Option<Matrix<'a>> {
    let (layout, dim) = (t.layout(), t.shape()[3]);
    match t.data() {
        Slice::F32(data)
            if layout.strides[3] == 1 && layout.strides[2] == dim && layout.fold.is_none() =>
        {
            Some(Matrix::rows(&data[layout.at([b, h, s, 0])..], dim))
        }
        _ => None,
    }
}

/// Copies the rows `keys` of a unit in `t`, k or v of `operands`, `dim` floats apart, each padded
/// with zeros.
pub fn load_keys(
    operands: &Operands<'_>,
    t: TensorRef<'_>,
    unit: &Unit,
    keys: &Range<usize>,
    dim: usize,
    into: &mut [f32],
) {
    load_rows_at(t, unit.h_kv, keys.len(), dim, into, |r| {
        operands.key_place(unit.keys.batch, unit.keys.start + keys.start + r)
    });
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
