//! Operands as the products want them.
//!
//! A product sums over the columns of rows (queries, or what [`Format::transpose`] makes of keys),
//! or over rows as [`Format::across`] has them. Every dtype, stride and page meets here and nowhere
//! else, so a call computes the same bits for any layout of the same numbers. Padding is zero.
//!
//! Operands are f32, or pairs where they are bf16 and the processor multiplies pairs: a
//! [`Format`]. Rows that lie as they would be copied, one after another, are read where they are.
//!
//! In the forward each key tile of a unit becomes one block: k transposed (columns are keys) in
//! panels, and v across. Where most keys are seen by one or two query tiles, as in short sequences
//! and documents, each query tile packs what it sees for itself: what the others' threads had
//! packed would come from further away than the keys.

use std::ops::Range;
use std::sync::OnceLock;

use bytemuck::cast_slice_mut;
use foveate_problem::Operands;
use foveate_tensor::{Layout, Slice, TensorRef};
use half::bf16;

use crate::simd::{self, LANES, Matrix, Pair, Panels, TileProduct};
use crate::tiles::Tiles;
use crate::work::{Lent, Pool, Unit};

/// What operands of a pass are multiplied as.
pub trait Format: TileProduct {
    /// The elements of `t`'s storage from the one at `place` on, if they are numbers of this
    /// format.
    fn stored<'a>(t: TensorRef<'a>, place: usize) -> Option<&'a [Self]>;

    /// `Σ x²` over a row.
    fn square_sum(row: &[Self]) -> f32;

    /// The numbers of elements, in order.
    fn numbers(elements: &[Self]) -> impl Iterator<Item = f32>;

    /// Copies the vector at `[b, h, s]`, padded with zeros.
    fn load_row(t: TensorRef<'_>, at: [usize; 3], into: &mut [Self]);

    /// Writes `n` rows of `dim` numbers as the columns of a matrix, in panels.
    fn transpose(rows: Matrix<'_, Self>, n: usize, dim: usize, into: &mut [Self]);

    /// `n` rows of `dim` numbers as what a product sums over, in `room` unless they are that
    /// already.
    fn across<'a>(
        rows: Matrix<'a, Self>,
        n: usize,
        dim: usize,
        room: &'a mut [Self],
    ) -> Panels<'a, Self>;

    /// The place for a strip of scores that become elements of `tile` from `at` on: there, or in
    /// `room`.
    fn strip<'a>(tile: &'a mut [Self], at: usize, room: &'a mut [f32]) -> &'a mut [f32];

    /// Brings `columns` of a strip of `rows` rows, `stride` apart, from its `room` to where it
    /// begins in its tile, brought together by rows.
    fn keep(room: &[f32], rows: usize, stride: usize, columns: Range<usize>, tile: &mut [Self]);

    /// `columns` of a strip of `rows` rows, `stride` apart, as what is multiplied, in `room` unless
    /// it is that already.
    fn factor<'a>(
        strip: &'a [f32],
        rows: usize,
        stride: usize,
        columns: Range<usize>,
        room: &'a mut [Self],
    ) -> Matrix<'a, Self>;
}

impl Format for f32 {
    fn stored<'a>(t: TensorRef<'a>, place: usize) -> Option<&'a [f32]> {
        match t.data() {
            Slice::F32(data) => Some(&data[place..]),
            _ => None,
        }
    }

    fn square_sum(row: &[f32]) -> f32 {
        simd::dot(row, row)
    }

    fn numbers(elements: &[f32]) -> impl Iterator<Item = f32> {
        elements.iter().copied()
    }

    fn load_row(t: TensorRef<'_>, [b, h, s]: [usize; 3], into: &mut [f32]) {
        let (own, padding) = into.split_at_mut(t.shape()[3]);
        t.load_row(b, h, s, own);
        padding.fill(0.0);
    }

    fn transpose(rows: Matrix<'_>, n: usize, dim: usize, into: &mut [f32]) {
        simd::transpose(rows, n, dim, into);
    }

    fn across<'a>(rows: Matrix<'a>, _: usize, _: usize, _: &'a mut [f32]) -> Panels<'a> {
        Panels::rows(rows.data, rows.row)
    }

    fn strip<'a>(tile: &'a mut [f32], at: usize, _: &'a mut [f32]) -> &'a mut [f32] {
        &mut tile[at..]
    }

    fn keep(_: &[f32], _: usize, _: usize, _: Range<usize>, _: &mut [f32]) {}

    fn factor<'a>(
        strip: &'a [f32],
        _: usize,
        stride: usize,
        _: Range<usize>,
        _: &'a mut [f32],
    ) -> Matrix<'a> {
        Matrix::rows(strip, stride)
    }
}

impl Format for Pair {
    fn stored<'a>(t: TensorRef<'a>, place: usize) -> Option<&'a [Pair]> {
        match t.data() {
            Slice::BF16(data) => Some(data[place..].as_chunks().0),
            _ => None,
        }
    }

    fn square_sum(row: &[Pair]) -> f32 {
        simd::pair_square_sum(row)
    }

    fn numbers(elements: &[Pair]) -> impl Iterator<Item = f32> {
        elements.as_flattened().iter().map(|x| x.to_f32())
    }

    fn load_row(t: TensorRef<'_>, [b, h, s]: [usize; 3], into: &mut [Pair]) {
        let (own, padding) = into.as_flattened_mut().split_at_mut(t.shape()[3]);
        let Slice::BF16(data) = t.data() else { unreachable!("pairs are for bf16") };
        let place = |d| t.layout().at([b, h, s, d]);
        if is_dense(t.layout()) {
            own.copy_from_slice(&data[place(0)..][..own.len()]);
        } else {
            own.iter_mut().enumerate().for_each(|(d, x)| *x = data[place(d)]);
        }
        padding.fill(bf16::ZERO);
    }

    fn transpose(rows: Matrix<'_, Pair>, n: usize, dim: usize, into: &mut [Pair]) {
        simd::transpose_pairs(rows, n, dim / 2, into);
    }

    fn across<'a>(
        rows: Matrix<'a, Pair>,
        n: usize,
        dim: usize,
        room: &'a mut [Pair],
    ) -> Panels<'a, Pair> {
        simd::interleave(rows, n, dim, room);
        Panels::rows(room, dim)
    }

    fn strip<'a>(_: &'a mut [Pair], _: usize, room: &'a mut [f32]) -> &'a mut [f32] {
        room
    }

    fn keep(room: &[f32], rows: usize, stride: usize, columns: Range<usize>, tile: &mut [Pair]) {
        simd::round_beside(room, rows, stride, columns, tile);
    }

    fn factor<'a>(
        strip: &'a [f32],
        rows: usize,
        stride: usize,
        columns: Range<usize>,
        room: &'a mut [Pair],
    ) -> Matrix<'a, Pair> {
        simd::round_along(strip, rows, stride, columns, room);
        Matrix::rows(room, stride / 2)
    }
}

/// Elements of a buffer of the pool.
pub fn elements<T: Format>(room: &mut [f32]) -> &mut [T] {
    cast_slice_mut(room)
}

/// Floats of a buffer that holds `n` rows of `dim` numbers, and the same across.
pub const fn both_elems<T: Format>(n: usize, dim: usize) -> [usize; 2] {
    [n * dim / T::WIDTH, n.div_ceil(2) * dim * (T::WIDTH - 1)]
}

/// Whether the numbers of a row are neighbours.
fn is_dense(layout: &Layout<4>) -> bool {
    layout.strides[3] == 1 && layout.fold.is_none_or(|fold| fold.axis != 3)
}

/// The vectors from `[b, h, s]` on where they lie, if they are of the format, `dim` long and follow
/// one another.
pub fn neighbours<'a, T: Format>(
    t: TensorRef<'a>,
    [b, h, s]: [usize; 3],
    dim: usize,
) -> Option<Matrix<'a, T>> {
    let layout = t.layout();
    let follow = layout.shape[3] == dim && layout.strides[2] == dim;
    if !follow || layout.strides[3] != 1 || layout.fold.is_some() {
        return None;
    }
    T::stored(t, layout.at([b, h, s, 0])).map(|data| Matrix::rows(data, dim / T::WIDTH))
}

/// `n` vectors from `[b, h, s]` on, padded with zeros to `dim`: where they lie, or copied to `room`.
pub fn rows<'a, T: Format>(
    t: TensorRef<'a>,
    [b, h, s]: [usize; 3],
    n: usize,
    dim: usize,
    room: &'a mut [T],
) -> Matrix<'a, T> {
    neighbours(t, [b, h, s], dim).unwrap_or_else(|| {
        load_rows(t, [b, h, s], n, dim, room);
        Matrix::rows(room, dim / T::WIDTH)
    })
}

/// The rows `keys` of a unit in `t`, k or v of `operands`, padded with zeros to `dim`: where they
/// lie, or copied to `room`.
pub fn key_rows<'a, T: Format>(
    operands: &Operands<'a>,
    t: TensorRef<'a>,
    unit: &Unit,
    keys: &Range<usize>,
    dim: usize,
    room: &'a mut [T],
) -> Matrix<'a, T> {
    keys_in_place(operands, t, unit, keys.start, dim).unwrap_or_else(|| {
        load_keys(operands, t, unit, keys, dim, room);
        Matrix::rows(room, dim / T::WIDTH)
    })
}

/// The keys of a unit from `first` on where they lie in `t`, if they can be read there.
fn keys_in_place<'a, T: Format>(
    operands: &Operands<'a>,
    t: TensorRef<'a>,
    unit: &Unit,
    first: usize,
    dim: usize,
) -> Option<Matrix<'a, T>> {
    let at = [unit.keys.batch, unit.h_kv, unit.keys.start + first];
    operands.pages.is_none().then(|| neighbours(t, at, dim))?
}

/// The largest `√Σx²` of `n` rows of `dim` numbers; NaN when one is.
pub fn largest_norm<T: Format>(rows: Matrix<'_, T>, n: usize, dim: usize) -> f32 {
    let sums = (0..n).map(|r| T::square_sum(&rows.data[r * rows.row..][..dim / T::WIDTH]));
    sums.fold(0.0, simd::larger).sqrt()
}

/// Blocks of the units of a wave. Those that are shared are packed each by a task of its own, and
/// whoever needs one earlier waits for it.
pub struct Packed<'a, T> {
    operands: Operands<'a>,
    units: &'a [Unit],
    /// `None` where packing one has panicked, so that nobody waits for it for ever.
    blocks: Vec<OnceLock<Option<Shared<'a, T>>>>,
    /// First block of each unit, if its blocks are shared.
    first: Vec<Option<usize>>,
    /// Whether shared blocks have norms.
    norms: bool,
    tiles: Tiles,
}

/// A block that is shared.
struct Shared<'a, T> {
    block: &'a [T],
    /// Of its keys, the largest.
    norm: f32,
}

/// A block to be packed.
pub struct Packing<'a> {
    /// Unit of the wave.
    pub unit: usize,
    tile: usize,
    into: &'a mut [f32],
}

/// One key tile. Element `(i, j)` of `k_t` is component `i` of key `j`.
pub struct Block<'a, T> {
    pub k_t: Panels<'a, T>,
    pub v: Panels<'a, T>,
}

/// Room for what a query tile packs for itself.
pub struct Room<'a> {
    /// Rows of keys or values of a tile on their way.
    rows: Lent<'a>,
    block: Lent<'a>,
}

impl<'a> Room<'a> {
    /// For tiles of these sizes.
    pub fn new(pool: &'a Pool, tiles: &Tiles) -> Self {
        let rows = pool.lend(tiles.kv * tiles.dim.max(tiles.dim_v));
        Self { rows, block: pool.lend(block_elems::<f32>(tiles)) }
    }
}

/// Floats the blocks of a unit take at most.
pub fn elems(tiles: &Tiles, len_k: usize) -> usize {
    len_k.div_ceil(tiles.kv) * block_elems::<f32>(tiles)
}

fn block_elems<T: Format>(tiles: &Tiles) -> usize {
    tiles.kv * (tiles.dim + tiles.dim_v) / T::WIDTH
}

/// Where a block is to be, which tells those who wait for it when it will not be there.
struct Place<'p, 'a, T>(&'p OnceLock<Option<Shared<'a, T>>>);

impl<T> Drop for Place<'_, '_, T> {
    fn drop(&mut self) {
        // What is there stays.
        self.0.set(None).ok();
    }
}

impl<'a, T: Format> Packed<'a, T> {
    /// Room in `data` for the blocks of those `units` that are `shared`, [`elems`] of each, and
    /// what is to be packed into it, unit by unit. `norms` says that those of keys are wanted.
    pub fn new(
        operands: &Operands<'a>,
        units: &'a [Unit],
        shared: impl Fn(&Unit) -> bool,
        tiles: Tiles,
        norms: bool,
        data: &'a mut [f32],
    ) -> (Self, Vec<Packing<'a>>) {
        let mut rooms = data.chunks_exact_mut(block_elems::<T>(&tiles));
        let (mut first, mut packings) = (Vec::with_capacity(units.len()), Vec::new());
        for (u, unit) in units.iter().enumerate() {
            let shared = shared(unit);
            first.push(shared.then_some(packings.len()));
            let count = if shared { unit.keys.len.div_ceil(tiles.kv) } else { 0 };
            for tile in 0..count {
                let into = rooms.next().expect("room for every block");
                packings.push(Packing { unit: u, tile, into });
            }
        }
        let blocks = packings.iter().map(|_| OnceLock::new()).collect();
        (Self { operands: *operands, units, blocks, first, norms, tiles }, packings)
    }

    /// The largest norm of the keys of a tile of a unit whose blocks are shared.
    pub fn norm(&self, u: usize, tile: usize) -> f32 {
        self.shared(u, tile).expect("only shared blocks have norms").norm
    }

    /// A tile of a unit, if its blocks are shared, when it is packed.
    ///
    /// # Panics
    /// When packing it has.
    fn shared(&self, u: usize, tile: usize) -> Option<&Shared<'a, T>> {
        let packed = self.blocks[self.first[u]? + tile].wait();
        Some(packed.as_ref().expect("packing the block has not panicked on its thread"))
    }

    /// Whether the blocks of a unit are packed once for all.
    pub fn is_shared(&self, u: usize) -> bool {
        self.first[u].is_some()
    }

    /// The values of a tile across where they lie, if they can be read there.
    fn values_in_place(&self, u: usize, tile: usize) -> Option<Matrix<'a, T>> {
        let (unit, first) = (&self.units[u], tile * self.tiles.kv);
        let own = || keys_in_place(&self.operands, self.operands.v, unit, first, self.tiles.dim_v);
        (T::WIDTH == 1).then(own)?
    }

    /// Packs one block. Rows of keys pass through `room`, a tile of them, and so do values.
    pub fn pack(&self, packing: Packing<'a>, room: &mut [f32]) {
        let Packing { unit, tile, into } = packing;
        let first = self.first[unit].expect("what is not shared has no packings");
        let place = Place(&self.blocks[first + tile]);
        let into = elements::<T>(into);
        let keys = self.units[unit].keys.len - tile * self.tiles.kv;
        let norm = self.fill(unit, tile, 0..keys.min(self.tiles.kv), elements(room), into);
        let packed = place.0.set(Some(Shared { block: into, norm }));
        assert!(packed.is_ok(), "a block is packed once");
    }

    /// Packs those `keys` of a tile, counted from its first, that a block is to have; they begin
    /// with a whole group. Returns their largest norm, if norms are wanted, else infinity.
    fn fill(
        &self,
        u: usize,
        tile: usize,
        keys: Range<usize>,
        room: &mut [T],
        into: &mut [T],
    ) -> f32 {
        let (Tiles { kv, dim, dim_v, .. }, operands) = (self.tiles, &self.operands);
        let (unit, n, first) = (&self.units[u], keys.len(), keys.start);
        let own = tile * kv + first..tile * kv + keys.end;
        let (k_t, v) = into.split_at_mut(kv * dim / T::WIDTH);
        let k = key_rows(operands, operands.k, unit, &own, dim, room);
        T::transpose(
            k,
            n,
            dim,
            &mut k_t[first * dim / T::WIDTH..][..simd::padded(n) * dim / T::WIDTH],
        );
        let norm = if self.norms { largest_norm(k, n, dim) } else { f32::INFINITY };
        let v = &mut v[first * dim_v / T::WIDTH..];
        if T::WIDTH > 1 {
            let rows = key_rows(operands, operands.v, unit, &own, dim_v, room);
            T::across(rows, n, dim_v, v);
        } else if self.values_in_place(u, tile).is_none() {
            load_keys(operands, operands.v, unit, &own, dim_v, v);
        }
        norm
    }

    /// Tile `tile` of unit `u` of the wave, of which `keys` are asked for: the shared block, or one
    /// packed in `room`.
    pub fn block<'b>(
        &'b self,
        u: usize,
        tile: usize,
        keys: Range<usize>,
        room: Option<&'b mut Room<'_>>,
    ) -> Block<'b, T> {
        let Tiles { kv, dim, dim_v, .. } = self.tiles;
        let block: &[T] = match (self.shared(u, tile), room) {
            (Some(shared), _) => shared.block,
            (None, Some(Room { rows, block })) => {
                let block = elements(block);
                let whole = keys.start / LANES * LANES..keys.end;
                self.fill(u, tile, whole, elements(rows), block);
                block
            }
            (None, None) => unreachable!("there is room where blocks are not shared"),
        };
        let (k_t, v) = block.split_at(kv * dim / T::WIDTH);
        let v = self.values_in_place(u, tile).map_or(v, |v| v.data);
        Block { k_t: Panels::packed(k_t, dim / T::WIDTH), v: Panels::rows(v, dim_v) }
    }
}

/// Copies the rows `keys` of a unit in `t`, k or v of `operands`, each padded with zeros to `dim`.
pub fn load_keys<T: Format>(
    operands: &Operands<'_>,
    t: TensorRef<'_>,
    unit: &Unit,
    keys: &Range<usize>,
    dim: usize,
    into: &mut [T],
) {
    let rows = into.chunks_exact_mut(dim / T::WIDTH).take(keys.len());
    for (r, row) in rows.enumerate() {
        let place = unit.keys.start + keys.start + r;
        let [b, s] = operands.key_place(unit.keys.batch, place);
        T::load_row(t, [b, unit.h_kv, s], row);
    }
}

/// Copies `n` vectors from `[b, h, s]` on, each padded with zeros to `dim`.
pub fn load_rows<T: Format>(
    t: TensorRef<'_>,
    [b, h, s]: [usize; 3],
    n: usize,
    dim: usize,
    into: &mut [T],
) {
    for (r, row) in into.chunks_exact_mut(dim / T::WIDTH).take(n).enumerate() {
        T::load_row(t, [b, h, s + r], row);
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use foveate_tensor::{DType, Tensor};

    use super::*;
    use crate::work::Span;

    #[test]
    fn nobody_waits_for_a_block_whose_packing_has_panicked() {
        // Vectors that are no neighbours pass through room, of which one packing has too little.
        let k = Tensor::from_fn(DType::F32, [1, 1, 32, 9], |[_, _, s, d]| (s + d) as f64);
        let operands = Operands {
            q: k.view(),
            k: k.view(),
            v: k.view(),
            sink: None,
            varlen: None,
            pages: None,
        };
        let keys = Span { batch: 0, start: 0, len: 32 };
        let units = [Unit { keys, span: 0, h_kv: 0, sequences: 0..1 }];
        let tiles = Tiles { q: 16, kv: 16, chunk: 1, dim: 16, dim_v: 16 };
        let mut data = vec![f32::NAN; elems(&tiles, 32)];
        let (packed, packings) =
            Packed::<f32>::new(&operands, &units, |_| true, tiles, false, &mut data);
        let [first, second] = <[Packing<'_>; 2]>::try_from(packings).ok().expect("two tiles");
        packed.pack(first, &mut [0.0; 16 * 16]);
        let panics = |f: &dyn Fn()| catch_unwind(AssertUnwindSafe(f)).is_err();
        let second = std::cell::Cell::new(Some(second));
        assert!(panics(&|| packed.pack(second.take().expect("once"), &mut [0.0; 16])));
        assert!(panics(&|| assert!(!packed.block(0, 1, 0..16, None).v.data.is_empty())));
        assert_eq!(packed.block(0, 0, 0..16, None).v.data[..3], [0.0, 1.0, 2.0]);
    }
}
