//! Packing of operands into the layouts that products read.
//!
//! A product sums over the columns of its `a` operand (queries, or what [`Format::transpose`] makes of
//! keys) and over the rows of its `b` operand ([`Format::to_b`]). This module alone knows of dtypes,
//! strides and pages, so a call computes the same bits for any layout of the same numbers. Padding
//! is zero.
//!
//! The elements of operands are f32, or pairs of bf16 where the processor multiplies those: a
//! [`Format`]. Rows that are dense and consecutive already are read in place.
//!
//! In the forward each key tile of a KV head is packed once: k transposed (columns are keys) in
//! panels, and v by rows. Where most keys are seen by one or two query tiles, as in short sequences
//! and documents, each query tile packs what it sees for itself: a tile that another thread packed
//! would come from a more distant cache than the keys.

use std::ops::Range;
use std::sync::OnceLock;

use bytemuck::cast_slice_mut;
use foveate_problem::Operands;
use foveate_tensor::{Layout, Slice, TensorRef};
use half::bf16;

use crate::pool::{Pool, PoolBuffer};
use crate::simd::{self, LANES, Matrix, Pair, Panels, TileProduct};
use crate::tasks::KvHead;
use crate::tiles::Tiles;

/// The elements that a pass multiplies, and how operands are converted to them.
pub trait Format: TileProduct {
    /// The elements of `t`'s storage from the one at `place` on, if they are numbers of this
    /// format.
    fn stored<'a>(t: TensorRef<'a>, place: usize) -> Option<&'a [Self]>;

    /// `Σ x²` over a row.
    fn square_sum(row: &[Self]) -> f32;

    /// The numbers in elements, in order.
    fn numbers(elements: &[Self]) -> impl Iterator<Item = f32>;

    /// Copies the vector at `[b, h, s]`, padded with zeros.
    fn load_row(t: TensorRef<'_>, at: [usize; 3], into: &mut [Self]);

    /// Writes `n` rows of `dim` numbers as the columns of a matrix, in panels.
    fn transpose(rows: Matrix<'_, Self>, n: usize, dim: usize, into: &mut [Self]);

    /// `n` rows of `dim` numbers as a `b` operand, in place or converted into `buffer`.
    fn to_b<'a>(
        rows: Matrix<'a, Self>,
        n: usize,
        dim: usize,
        buffer: &'a mut [Self],
    ) -> Panels<'a, Self>;

    /// The floats in which a subtile of scores is computed that becomes elements of `tile` from `at`
    /// on: there, or in `buffer`.
    fn subtile<'a>(tile: &'a mut [Self], at: usize, buffer: &'a mut [f32]) -> &'a mut [f32];

    /// Converts `columns` of a subtile of `rows` rows, `stride` apart, from `buffer` to elements of its
    /// tile, as a `b` operand.
    fn store_subtile(
        buffer: &[f32],
        rows: usize,
        stride: usize,
        columns: Range<usize>,
        tile: &mut [Self],
    );

    /// `columns` of a subtile of `rows` rows, `stride` apart, as an `a` operand, in place or converted
    /// into `buffer`.
    fn to_a<'a>(
        subtile: &'a [f32],
        rows: usize,
        stride: usize,
        columns: Range<usize>,
        buffer: &'a mut [Self],
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

    fn to_b<'a>(rows: Matrix<'a>, _: usize, _: usize, _: &'a mut [f32]) -> Panels<'a> {
        Panels::rows(rows.data, rows.row)
    }

    fn subtile<'a>(tile: &'a mut [f32], at: usize, _: &'a mut [f32]) -> &'a mut [f32] {
        &mut tile[at..]
    }

    fn store_subtile(_: &[f32], _: usize, _: usize, _: Range<usize>, _: &mut [f32]) {}

    fn to_a<'a>(
        subtile: &'a [f32],
        _: usize,
        stride: usize,
        _: Range<usize>,
        _: &'a mut [f32],
    ) -> Matrix<'a> {
        Matrix::rows(subtile, stride)
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

    fn to_b<'a>(
        rows: Matrix<'a, Pair>,
        n: usize,
        dim: usize,
        buffer: &'a mut [Pair],
    ) -> Panels<'a, Pair> {
        simd::interleave(rows, n, dim, buffer);
        Panels::rows(buffer, dim)
    }

    fn subtile<'a>(_: &'a mut [Pair], _: usize, buffer: &'a mut [f32]) -> &'a mut [f32] {
        buffer
    }

    fn store_subtile(
        buffer: &[f32],
        rows: usize,
        stride: usize,
        columns: Range<usize>,
        tile: &mut [Pair],
    ) {
        simd::round_beside(buffer, rows, stride, columns, tile);
    }

    fn to_a<'a>(
        subtile: &'a [f32],
        rows: usize,
        stride: usize,
        columns: Range<usize>,
        buffer: &'a mut [Pair],
    ) -> Matrix<'a, Pair> {
        simd::round_along(subtile, rows, stride, columns, buffer);
        Matrix::rows(buffer, stride / 2)
    }
}

/// Elements of a buffer of the pool.
pub fn elements<T: Format>(buffer: &mut [f32]) -> &mut [T] {
    cast_slice_mut(buffer)
}

/// Floats that `n` rows of `dim` numbers take as an `a` operand, and as a `b` operand besides.
pub const fn operand_elems<T: Format>(n: usize, dim: usize) -> [usize; 2] {
    [n * dim / T::WIDTH, n.div_ceil(2) * dim * (T::WIDTH - 1)]
}

/// Whether the numbers of a row are consecutive.
fn is_dense(layout: &Layout<4>) -> bool {
    layout.strides[3] == 1 && layout.groups.is_none_or(|groups| groups.axis != 3)
}

/// The vectors from `[b, h, s]` on in place, if they are of the format, dense, `dim` long and
/// consecutive.
pub fn neighbours<'a, T: Format>(
    t: TensorRef<'a>,
    [b, h, s]: [usize; 3],
    dim: usize,
) -> Option<Matrix<'a, T>> {
    let layout = t.layout();
    let follow = layout.shape[3] == dim && layout.strides[2] == dim;
    if !follow || layout.strides[3] != 1 || layout.groups.is_some() {
        return None;
    }
    T::stored(t, layout.at([b, h, s, 0])).map(|data| Matrix::rows(data, dim / T::WIDTH))
}

/// `n` vectors from `[b, h, s]` on, padded with zeros to `dim`: in place, or copied to `buffer`.
pub fn rows<'a, T: Format>(
    t: TensorRef<'a>,
    [b, h, s]: [usize; 3],
    n: usize,
    dim: usize,
    buffer: &'a mut [T],
) -> Matrix<'a, T> {
    neighbours(t, [b, h, s], dim).unwrap_or_else(|| {
        load_rows(t, [b, h, s], n, dim, buffer);
        Matrix::rows(buffer, dim / T::WIDTH)
    })
}

/// The rows `keys` of a KV head in `t`, k or v of `operands`, padded with zeros to `dim`: in place, or
/// copied to `buffer`.
pub fn key_rows<'a, T: Format>(
    operands: &Operands<'a>,
    t: TensorRef<'a>,
    kv_head: &KvHead,
    keys: &Range<usize>,
    dim: usize,
    buffer: &'a mut [T],
) -> Matrix<'a, T> {
    keys_in_place(operands, t, kv_head, keys.start, dim).unwrap_or_else(|| {
        load_keys(operands, t, kv_head, keys, dim, buffer);
        Matrix::rows(buffer, dim / T::WIDTH)
    })
}

/// The keys of a KV head from `first` on in `t`, if they can be read in place.
fn keys_in_place<'a, T: Format>(
    operands: &Operands<'a>,
    t: TensorRef<'a>,
    kv_head: &KvHead,
    first: usize,
    dim: usize,
) -> Option<Matrix<'a, T>> {
    let at = [kv_head.keys.batch, kv_head.h_kv, kv_head.keys.start + first];
    operands.pages.is_none().then(|| neighbours(t, at, dim))?
}

/// The largest `√Σx²` of `n` rows of `dim` numbers; NaN when one is.
pub fn largest_norm<T: Format>(rows: Matrix<'_, T>, n: usize, dim: usize) -> f32 {
    let sums = (0..n).map(|r| T::square_sum(&rows.data[r * rows.row..][..dim / T::WIDTH]));
    sums.fold(0.0, simd::larger).sqrt()
}

/// The key tiles of the KV heads of a wave. Each shared tile is packed by a task of its own; a query
/// tile that needs it earlier waits for it.
pub struct PackedTiles<'a, T> {
    operands: Operands<'a>,
    kv_heads: &'a [KvHead],
    /// `None` where the task that packs it has panicked, so that no thread waits for ever.
    shared_tiles: Vec<OnceLock<Option<SharedTile<'a, T>>>>,
    /// The first shared tile of each KV head, if its tiles are shared.
    first: Vec<Option<usize>>,
    /// Whether the norms of shared tiles are computed.
    norms: bool,
    tiles: Tiles,
}

/// A packed key tile that several query tiles read.
struct SharedTile<'a, T> {
    elements: &'a [T],
    /// The largest norm of its keys.
    norm: f32,
}

/// A shared tile to be packed.
pub struct PackTask<'a> {
    /// Index of the KV head in the wave.
    pub kv_head: usize,
    tile: usize,
    into: &'a mut [f32],
}

/// A packed key tile. Element `(i, j)` of `k_t` is component `i` of key `j`.
pub struct PackedTile<'a, T> {
    pub k_t: Panels<'a, T>,
    pub v: Panels<'a, T>,
}

/// The workspace of a query tile that packs key tiles for itself.
pub struct PackScratch<'a> {
    /// Rows of keys or values that cannot be read in place.
    rows: PoolBuffer<'a>,
    tile: PoolBuffer<'a>,
}

impl<'a> PackScratch<'a> {
    /// For tiles of these sizes.
    pub fn new(pool: &'a Pool, tiles: &Tiles) -> Self {
        let rows = pool.alloc(tiles.kv * tiles.dim.max(tiles.dim_v));
        Self { rows, tile: pool.alloc(tile_elems::<f32>(tiles)) }
    }
}

/// Floats that the key tiles of a KV head take at most.
pub fn elems(tiles: &Tiles, len_k: usize) -> usize {
    len_k.div_ceil(tiles.kv) * tile_elems::<f32>(tiles)
}

fn tile_elems<T: Format>(tiles: &Tiles) -> usize {
    tiles.kv * (tiles.dim + tiles.dim_v) / T::WIDTH
}

/// Marks a shared tile as failed when it is dropped, so that a panic wakes the threads that wait for
/// the tile.
struct PackGuard<'p, 'a, T>(&'p OnceLock<Option<SharedTile<'a, T>>>);

impl<T> Drop for PackGuard<'_, '_, T> {
    fn drop(&mut self) {
        // A tile that is packed stays.
        self.0.set(None).ok();
    }
}

impl<'a, T: Format> PackedTiles<'a, T> {
    /// Divides `data` among the key tiles of those `kv_heads` that are `shared`, which take [`elems`]
    /// each. Also returns the tasks that pack them, in the order of the KV heads. `norms` says
    /// whether the norms of keys are wanted.
    pub fn new(
        operands: &Operands<'a>,
        kv_heads: &'a [KvHead],
        shared: impl Fn(&KvHead) -> bool,
        tiles: Tiles,
        norms: bool,
        data: &'a mut [f32],
    ) -> (Self, Vec<PackTask<'a>>) {
        let mut buffers = data.chunks_exact_mut(tile_elems::<T>(&tiles));
        let (mut first, mut pack_tasks) = (Vec::with_capacity(kv_heads.len()), Vec::new());
        for (u, kv_head) in kv_heads.iter().enumerate() {
            let shared = shared(kv_head);
            first.push(shared.then_some(pack_tasks.len()));
            let count = if shared { kv_head.keys.len.div_ceil(tiles.kv) } else { 0 };
            for tile in 0..count {
                let into = buffers.next().expect("data holds every tile");
                pack_tasks.push(PackTask { kv_head: u, tile, into });
            }
        }
        let shared_tiles = pack_tasks.iter().map(|_| OnceLock::new()).collect();
        (Self { operands: *operands, kv_heads, shared_tiles, first, norms, tiles }, pack_tasks)
    }

    /// The largest norm of the keys of a shared tile.
    pub fn norm(&self, u: usize, tile: usize) -> f32 {
        self.shared(u, tile).expect("only shared tiles have norms").norm
    }

    /// A tile of a KV head, if its tiles are shared. Waits until it is packed.
    ///
    /// # Panics
    /// When the task that packs it has panicked.
    fn shared(&self, u: usize, tile: usize) -> Option<&SharedTile<'a, T>> {
        let packed = self.shared_tiles[self.first[u]? + tile].wait();
        Some(packed.as_ref().expect("the task that packs the tile has not panicked"))
    }

    /// Whether the tiles of a KV head are packed once for all query tiles.
    pub fn is_shared(&self, u: usize) -> bool {
        self.first[u].is_some()
    }

    /// The values of a tile as a `b` operand, if they can be read in place.
    fn values_in_place(&self, u: usize, tile: usize) -> Option<Matrix<'a, T>> {
        let (kv_head, first) = (&self.kv_heads[u], tile * self.tiles.kv);
        let own =
            || keys_in_place(&self.operands, self.operands.v, kv_head, first, self.tiles.dim_v);
        (T::WIDTH == 1).then(own)?
    }

    /// Packs one shared tile. `buffer` holds the rows of a tile that cannot be read in place.
    pub fn pack(&self, task: PackTask<'a>, buffer: &mut [f32]) {
        let PackTask { kv_head, tile, into } = task;
        let first = self.first[kv_head].expect("only shared tiles have pack tasks");
        let guard = PackGuard(&self.shared_tiles[first + tile]);
        let into = elements::<T>(into);
        let keys = self.kv_heads[kv_head].keys.len - tile * self.tiles.kv;
        let norm = self.fill(kv_head, tile, 0..keys.min(self.tiles.kv), elements(buffer), into);
        let packed = guard.0.set(Some(SharedTile { elements: into, norm }));
        assert!(packed.is_ok(), "a tile is packed once");
    }

    /// Packs those `keys` of a tile, counted from its first, that are needed; they begin with a whole
    /// group. Returns their largest norm, or infinity where norms are not wanted.
    fn fill(
        &self,
        u: usize,
        tile: usize,
        keys: Range<usize>,
        buffer: &mut [T],
        into: &mut [T],
    ) -> f32 {
        let (Tiles { kv, dim, dim_v, .. }, operands) = (self.tiles, &self.operands);
        let (kv_head, n, first) = (&self.kv_heads[u], keys.len(), keys.start);
        let own = tile * kv + first..tile * kv + keys.end;
        let (k_t, v) = into.split_at_mut(kv * dim / T::WIDTH);
        let k = key_rows(operands, operands.k, kv_head, &own, dim, buffer);
        T::transpose(
            k,
            n,
            dim,
            &mut k_t[first * dim / T::WIDTH..][..simd::padded(n) * dim / T::WIDTH],
        );
        let norm = if self.norms { largest_norm(k, n, dim) } else { f32::INFINITY };
        let v = &mut v[first * dim_v / T::WIDTH..];
        if T::WIDTH > 1 {
            let rows = key_rows(operands, operands.v, kv_head, &own, dim_v, buffer);
            T::to_b(rows, n, dim_v, v);
        } else if self.values_in_place(u, tile).is_none() {
            load_keys(operands, operands.v, kv_head, &own, dim_v, v);
        }
        norm
    }

    /// The `keys` of tile `tile` of KV head `u` of the wave: the shared tile, or one packed into
    /// `buffer`.
    pub fn tile<'b>(
        &'b self,
        u: usize,
        tile: usize,
        keys: Range<usize>,
        buffer: Option<&'b mut PackScratch<'_>>,
    ) -> PackedTile<'b, T> {
        let Tiles { kv, dim, dim_v, .. } = self.tiles;
        let packed: &[T] = match (self.shared(u, tile), buffer) {
            (Some(shared), _) => shared.elements,
            (None, Some(PackScratch { rows, tile: own })) => {
                let packed = elements(own);
                let whole = keys.start / LANES * LANES..keys.end;
                self.fill(u, tile, whole, elements(rows), packed);
                packed
            }
            (None, None) => unreachable!("a query tile has a buffer where tiles are not shared"),
        };
        let (k_t, v) = packed.split_at(kv * dim / T::WIDTH);
        let v = self.values_in_place(u, tile).map_or(v, |v| v.data);
        PackedTile { k_t: Panels::packed(k_t, dim / T::WIDTH), v: Panels::rows(v, dim_v) }
    }
}

/// Copies the rows `keys` of a KV head in `t`, k or v of `operands`, each padded with zeros to `dim`.
pub fn load_keys<T: Format>(
    operands: &Operands<'_>,
    t: TensorRef<'_>,
    kv_head: &KvHead,
    keys: &Range<usize>,
    dim: usize,
    into: &mut [T],
) {
    let rows = into.chunks_exact_mut(dim / T::WIDTH).take(keys.len());
    for (r, row) in rows.enumerate() {
        let place = kv_head.keys.start + keys.start + r;
        let [b, s] = operands.locate_key(kv_head.keys.batch, place);
        T::load_row(t, [b, kv_head.h_kv, s], row);
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
    use crate::tasks::RowRange;

    #[test]
    fn nobody_waits_for_a_tile_whose_packing_has_panicked() {
        // Vectors that are not dense pass through the buffer, which is too small for one task.
        let k = Tensor::from_fn(DType::F32, [1, 1, 32, 9], |[_, _, s, d]| (s + d) as f64);
        let operands = Operands {
            q: k.view(),
            k: k.view(),
            v: k.view(),
            sink: None,
            varlen: None,
            pages: None,
            scales: None,
        };
        let keys = RowRange { batch: 0, start: 0, len: 32 };
        let kv_heads = [KvHead { keys, range: 0, h_kv: 0, sequences: 0..1 }];
        let tiles = Tiles { q: 16, kv: 16, chunk: 1, dim: 16, dim_v: 16 };
        let mut data = vec![f32::NAN; elems(&tiles, 32)];
        let (packed, pack_tasks) =
            PackedTiles::<f32>::new(&operands, &kv_heads, |_| true, tiles, false, &mut data);
        let [first, second] = <[PackTask<'_>; 2]>::try_from(pack_tasks).ok().expect("two tiles");
        packed.pack(first, &mut [0.0; 16 * 16]);
        let panics = |f: &dyn Fn()| catch_unwind(AssertUnwindSafe(f)).is_err();
        let second = std::cell::Cell::new(Some(second));
        assert!(panics(&|| packed.pack(second.take().expect("once"), &mut [0.0; 16])));
        assert!(panics(&|| assert!(!packed.tile(0, 1, 0..16, None).v.data.is_empty())));
        assert_eq!(packed.tile(0, 0, 0..16, None).v.data[..3], [0.0, 1.0, 2.0]);
    }
}
