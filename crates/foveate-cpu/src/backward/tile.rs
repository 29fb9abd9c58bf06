//! The loop of a backward task, over the chunks of its split and the query rows that see them, and
//! the five products of a tile.

use std::cell::LazyCell;
use std::ops::Range;

use foveate_problem::Operands;
use foveate_tensor::TensorRef;

use super::key_tile::{self, KeyTile};
use super::kv_split::{DqAccum, KvSplitTask, KvSplits};
use super::statistics::Statistics;
use crate::call::{Call, head};
use crate::mods::Evaluator;
use crate::pack::{self, Format, elements, operand_elems};
use crate::pool::PoolBuffer;
use crate::score_bounds::{ScoreBounds, lowest};
use crate::simd::{self, LANES, Matrix, Panels, Part, RowStatistics, SUBTILE_ROWS, Write};
use crate::slots::Slot;
use crate::stages::{Clock, Stage};
use crate::tasks::KvHead;

/// The arguments that all tasks of a wave share.
pub struct Worker<'a> {
    pub call: &'a Call<'a>,
    pub wave: &'a [KvHead],
    pub splits: &'a KvSplits,
    pub dq_accum: &'a DqAccum<'a>,
    pub statistics: &'a Statistics<'a>,
    pub operands: &'a Operands<'a>,
    pub d_out: TensorRef<'a>,
    pub accumulate: bool,
}

/// The gradients that have a destination.
#[derive(Clone, Copy)]
pub struct Wanted {
    pub dq: bool,
    pub dk: bool,
    pub dv: bool,
}

/// The workspace of a thread.
pub struct Scratch<'a> {
    /// The packed key tiles of a chunk.
    key_tiles: PoolBuffer<'a>,
    v_rows: PoolBuffer<'a>,
    /// Rows of a query tile, as `a` and as `b` operand.
    q: [PoolBuffer<'a>; 2],
    d_out: [PoolBuffer<'a>; 2],
    acc: GradAccumulators<'a>,
}

/// The accumulators of dk and dv of a chunk, with what a tile needs.
struct GradAccumulators<'a> {
    evaluator: Evaluator,
    p: ScoreTile<'a>,
    ds: ScoreTile<'a>,
    /// The rows of the tile outside of which `p` and `ds` are 0.
    nonzero_rows: Range<usize>,
    /// `ds` of a subtile as an `a` operand.
    ds_a: PoolBuffer<'a>,
    /// Accumulators of a chunk of keys.
    dk: PoolBuffer<'a>,
    dv: PoolBuffer<'a>,
    wanted: Wanted,
    clock: Clock<'a>,
}

/// The scores of a tile, then its weights `p`; or `dp`, then `ds`.
struct ScoreTile<'a> {
    /// The tile as elements.
    tile: PoolBuffer<'a>,
    /// A subtile as floats, where those are not elements.
    subtile: PoolBuffer<'a>,
}

impl ScoreTile<'_> {
    /// The floats of the subtile that begins with element `at` of the tile.
    fn subtile<T: Format>(&mut self, at: usize) -> &mut [f32] {
        T::subtile(elements(&mut self.tile), at, &mut self.subtile)
    }
}

impl<'a> Scratch<'a> {
    /// For tasks of `call`. `captures` says whether gradients of learned buffers are wanted.
    pub fn new<T: Format>(call: &'a Call<'a>, captures: bool, wanted: Wanted) -> Self {
        let (tiles, pool) = (call.tiles, call.pool);
        let chunk = tiles.chunk * tiles.kv;
        let both = |dim| operand_elems::<T>(tiles.q, dim).map(|elems| pool.alloc(elems));
        let score_tile = || {
            let rows = tiles.q.div_ceil(T::WIDTH);
            ScoreTile {
                tile: pool.alloc(rows * tiles.kv),
                subtile: pool.alloc(SUBTILE_ROWS * tiles.kv),
            }
        };
        Self {
            key_tiles: pool.alloc(tiles.chunk * key_tile::elems::<T>(&tiles)),
            v_rows: pool.alloc(tiles.kv * tiles.dim_v),
            q: both(tiles.dim),
            d_out: both(tiles.dim_v),
            acc: GradAccumulators {
                evaluator: call.mods.evaluator([tiles.q, tiles.kv], Some(captures)),
                p: score_tile(),
                ds: score_tile(),
                nonzero_rows: 0..0,
                ds_a: pool.alloc(SUBTILE_ROWS * tiles.kv / T::WIDTH),
                dk: pool.alloc(chunk * tiles.dim),
                dv: pool.alloc(chunk * tiles.dim_v),
                wanted,
                clock: Clock::new(call.profile),
            },
        }
    }
}

/// A query tile.
struct Queries<'a, T> {
    /// First row.
    start: usize,
    rows: usize,
    q: TileOperand<'a, T>,
    d_out: TileOperand<'a, T>,
    statistics: RowStatistics<'a>,
}

/// Rows as `a` and as `b` operand.
struct TileOperand<'a, T> {
    a: Matrix<'a, T>,
    b: Panels<'a, T>,
}

impl<'a, T: Format> TileOperand<'a, T> {
    /// `n` rows of `dim` numbers of `t`.
    fn of(
        t: TensorRef<'a>,
        at: [usize; 3],
        n: usize,
        dim: usize,
        [a, b]: &'a mut [PoolBuffer<'_>; 2],
    ) -> Self {
        let a = pack::rows(t, at, n, dim, elements(a));
        Self { a, b: T::to_b(a, n, dim, elements(b)) }
    }
}

/// The keys of a tile.
struct Keys<'a, T> {
    /// Positions in their sequence.
    range: Range<usize>,
    /// Position of the first in its chunk.
    offset: usize,
    /// Whether the tile is partial.
    partial: bool,
    key_tile: &'a KeyTile<'a, T>,
}

impl<'a> Worker<'a> {
    /// Visits all keys of a split.
    pub fn run<T: Format>(
        &self,
        scratch: &mut Scratch<'_>,
        captures: &mut Slot<'_>,
        mut task: KvSplitTask<'a>,
    ) {
        let (call, tiles) = (self.call, self.call.tiles);
        let split = task.split;
        scratch.acc.clock.start();
        task.dq_accum.fill(0.0);
        for first in split.keys.clone().step_by(tiles.chunk * tiles.kv) {
            let keys = first..split.keys.end.min(first + tiles.chunk * tiles.kv);
            self.chunk::<T>(scratch, captures, &mut task, &keys);
            let GradAccumulators { dk, dv, clock, .. } = &mut scratch.acc;
            let (dk, dv) = (&mut dk[..keys.len() * tiles.dim], &dv[..keys.len() * tiles.dim_v]);
            // The constant factor of the products, once for each chunk.
            simd::scale(dk, call.scale);
            for (r, key) in keys.enumerate() {
                let at = key - split.keys.start;
                if let Some(into) = &mut task.dk {
                    let dk = &dk[r * tiles.dim..][..call.dims.dim];
                    into.write_row(0, 0, at, dk, self.accumulate);
                }
                if let Some(into) = &mut task.dv {
                    let dv = &dv[r * tiles.dim_v..][..call.dims.dim_v];
                    into.write_row(0, 0, at, dv, self.accumulate);
                }
            }
            clock.lap(Stage::Packing);
        }
        call.note(&mut scratch.acc.evaluator);
        self.dq_accum.finish(split, task.dq_accum);
        scratch.acc.clock.lap(Stage::Packing);
    }

    /// Visits the query rows that see a chunk of a split's keys.
    fn chunk<T: Format>(
        &self,
        scratch: &mut Scratch<'_>,
        captures: &mut Slot<'_>,
        task: &mut KvSplitTask<'a>,
        keys: &Range<usize>,
    ) {
        let (tiles, split) = (&self.call.tiles, task.split);
        let Scratch { key_tiles, v_rows, q, d_out, acc } = scratch;
        let buffers = key_tiles.chunks_exact_mut(key_tile::elems::<T>(tiles));
        let kv_head = &self.wave[split.kv_head];
        let of_tile = |(first, buffer)| {
            let keys = first..keys.end.min(first + tiles.kv);
            let norms = self.call.mods.has_score_bounds();
            key_tile::pack(self.operands, kv_head, &keys, tiles, norms, buffer, v_rows)
        };
        let key_tiles: Vec<KeyTile<'_, T>> =
            keys.clone().step_by(tiles.kv).zip(buffers).map(of_tile).collect();
        acc.dk[..keys.len() * tiles.dim].fill(0.0);
        acc.dv[..keys.len() * tiles.dim_v].fill(0.0);
        for (i, part) in split.parts.iter().enumerate() {
            let dim = if acc.wanted.dq { tiles.dim } else { 0 };
            let dq = &mut task.dq_accum[part.at * dim..][..part.rows.len() * dim];
            let head = split.first_head + i;
            self.head(
                acc,
                [&mut *q, &mut *d_out],
                captures,
                head,
                &part.rows,
                (keys, &key_tiles),
                dq,
            );
        }
    }

    /// Visits the rows of a query head that see a split, against one chunk of its keys. `dq` is the
    /// accumulator of these rows.
    #[expect(clippy::too_many_arguments, reason = "two of them are buffers")]
    fn head<T: Format>(
        &self,
        acc: &mut GradAccumulators<'_>,
        [q_buffer, d_out_buffer]: [&mut [PoolBuffer<'_>; 2]; 2],
        captures: &mut Slot<'_>,
        wave_head: usize,
        rows: &Range<usize>,
        (keys, key_tiles): (&Range<usize>, &[KeyTile<'_, T>]),
        dq: &mut [f32],
    ) {
        let (call, tiles) = (self.call, self.call.tiles);
        let (b, h) = self.splits.head(wave_head);
        let sequence = &call.sequences[b];
        let first_tile = keys.start / tiles.kv;
        let head = head(&call.dims, sequence, h);
        acc.evaluator.enter(head);
        for start in rows.clone().step_by(tiles.q) {
            let in_chunk = first_tile..keys.end.div_ceil(tiles.kv);
            let end = rows.end.min(start + tiles.q);
            let (at, n) = ([sequence.q_batch, h, sequence.q_start + start], end - start);
            let statistics = self.statistics.of(wave_head, start..end);
            let mut live: Vec<_> = call.live(b, h).tiles(start / tiles.q, &in_chunk).collect();
            if let Some(bounds) = call.mods.score_bounds(head) {
                let norm = LazyCell::new(|| {
                    let buffer = elements::<T>(&mut q_buffer[0]);
                    let rows = pack::rows(self.operands.q, at, n, tiles.dim, buffer);
                    pack::largest_norm(rows, n, tiles.dim)
                });
                live.retain(|(tile, _)| {
                    let range = tile * tiles.kv..keys.end.min((tile + 1) * tiles.kv);
                    let of_keys = key_tiles[tile - first_tile].norm;
                    let magnitude = || call.scale.abs() * *norm * of_keys;
                    !all_weights_are_zero(&bounds, [&(start..end), &range], statistics, magnitude)
                });
            }
            if live.is_empty() {
                continue;
            }
            let queries = Queries {
                start,
                rows: n,
                q: TileOperand::of(self.operands.q, at, n, tiles.dim, q_buffer),
                d_out: TileOperand::of(self.d_out, at, n, tiles.dim_v, d_out_buffer),
                statistics,
            };
            acc.clock.lap(Stage::Packing);
            let dim = if acc.wanted.dq { tiles.dim } else { 0 };
            let dq = &mut dq[(start - rows.start) * dim..][..n * dim];
            for (tile, partial) in live {
                let first = tile * tiles.kv;
                let range = first..keys.end.min(first + tiles.kv);
                let key_tile = &key_tiles[tile - first_tile];
                let own = Keys { range, offset: first - keys.start, partial, key_tile };
                acc.tile(call, captures, &queries, &own, dq);
            }
        }
    }
}

/// Whether all weights of `queries` and `keys` are 0, so that the tile has no gradient. Rows whose
/// delta is non-finite, because of `d_out` or v, are not skipped: their gradients are non-finite.
fn all_weights_are_zero(
    bounds: &ScoreBounds<'_>,
    [queries, keys]: [&Range<usize>; 2],
    statistics: RowStatistics<'_>,
    magnitude: impl Fn() -> f32,
) -> bool {
    let lowest = lowest(statistics.lse.iter().copied());
    let columns = || bounds.nonzero_columns(queries, keys, lowest, magnitude);
    statistics.delta.iter().all(|delta| delta.is_finite()) && columns().is_empty()
}

impl GradAccumulators<'_> {
    /// The five products of one tile.
    fn tile<T: Format>(
        &mut self,
        call: &Call<'_>,
        captures: &mut Slot<'_>,
        queries: &Queries<'_, T>,
        keys: &Keys<'_, T>,
        dq: &mut [f32],
    ) {
        let tile = queries.start..queries.start + queries.rows;
        self.evaluator.tile(tile, keys.range.clone(), keys.partial);
        self.clock.lap(Stage::Mods);
        self.nonzero_rows = queries.rows..queries.rows;
        for start in (0..queries.rows).step_by(SUBTILE_ROWS) {
            let subtile = start..queries.rows.min(start + SUBTILE_ROWS);
            self.subtile(call, captures, queries, keys, subtile, dq);
        }
        self.keys(call, queries, keys);
    }

    /// Computes `p` and `ds` of a subtile, and adds to dq.
    fn subtile<T: Format>(
        &mut self,
        call: &Call<'_>,
        captures: &mut Slot<'_>,
        queries: &Queries<'_, T>,
        keys: &Keys<'_, T>,
        subtile: Range<usize>,
        dq: &mut [f32],
    ) {
        let (dims, tiles, stride) = (&call.dims, call.tiles, call.tiles.kv);
        let Self { evaluator, p: p_tile, ds: ds_tile, nonzero_rows, ds_a, wanted, clock, .. } =
            self;
        let live = evaluator.live(subtile.clone());
        // Whole groups of keys; the sum of dq begins and ends with live keys.
        let columns = live.start / LANES * LANES..simd::padded(live.end);
        // All subtiles but the last have whole elements.
        let at = subtile.start / T::WIDTH * stride;
        // The products of dk and dv read whole rows of the tile.
        let clear = |x: &mut ScoreTile<'_>, columns: Range<usize>| {
            let rows = subtile.len().div_ceil(T::WIDTH);
            let own = &mut elements::<T>(&mut x.tile)[at..][..rows * stride];
            own.chunks_exact_mut(stride).for_each(|row| row[columns.clone()].fill(T::zeroed()));
        };
        if keys.partial {
            for x in [&mut *p_tile, &mut *ds_tile] {
                clear(x, 0..columns.start);
                clear(x, columns.end..stride);
            }
        }
        if live.is_empty() {
            return;
        }
        let statistics = queries.statistics.of(subtile.clone());
        let scores = |into: &mut [f32], a: Matrix<'_, T>, b, depth, factor| {
            let a = Matrix { data: &a.data[subtile.start * a.row..], ..a };
            let part = Part { rows: 0..subtile.len(), columns: columns.clone(), depth: 0..depth };
            simd::product(into, stride, a, b, &part.in_elements::<T>(), Write::Times(factor));
        };
        let p = p_tile.subtile::<T>(at);
        scores(p, queries.q.a, keys.key_tile.k_t, dims.dim, call.scale);
        clock.lap(Stage::Products);
        evaluator.score(subtile.clone(), columns.clone(), p, stride);
        clock.lap(Stage::Mods);
        // A score function may lower scores until all weights are 0. Rows whose delta is non-finite,
        // because of `d_out` or v, are not skipped: their gradients are non-finite.
        if evaluator.has_score()
            && statistics.delta.iter().all(|delta| delta.is_finite())
            && simd::weights_are_zero(p, stride, columns.clone(), statistics.lse)
        {
            for x in [p_tile, ds_tile] {
                clear(x, columns.clone());
            }
            clock.lap(Stage::Softmax);
            return;
        }
        *nonzero_rows = nonzero_rows.start.min(subtile.start)..subtile.end;
        let ds = ds_tile.subtile::<T>(at);
        // The scale of kept entries is in the statistics, so that dropout only clears entries.
        scores(ds, queries.d_out.a, keys.key_tile.v_t, dims.dim_v, 1.0);
        clock.lap(Stage::Products);
        evaluator.apply_dropout(subtile.clone(), columns.clone(), ds, stride);
        clock.lap(Stage::Mods);
        simd::softmax_backward(p, ds, stride, columns.clone(), statistics);
        clock.lap(Stage::Softmax);
        evaluator.gradient(ds, stride, captures);
        evaluator.apply_dropout(subtile.clone(), columns.clone(), p, stride);
        clock.lap(Stage::Mods);
        for x in [&mut *p_tile, &mut *ds_tile] {
            let tile = &mut elements(&mut x.tile)[at..];
            T::store_subtile(&x.subtile, subtile.len(), stride, columns.clone(), tile);
        }
        if !wanted.dq {
            clock.lap(Stage::Softmax);
            return;
        }
        let ds = ds_tile.subtile::<T>(at);
        let ds = T::to_a(ds, subtile.len(), stride, columns, elements(ds_a));
        clock.lap(Stage::Softmax);
        let part = Part { rows: 0..subtile.len(), columns: 0..tiles.dim, depth: live };
        let dq = &mut dq[subtile.start * tiles.dim..];
        simd::product(dq, tiles.dim, ds, keys.key_tile.k, &part.in_elements::<T>(), Write::Add);
        clock.lap(Stage::Products);
    }

    /// Adds a tile to dk and dv.
    fn keys<T: Format>(&mut self, call: &Call<'_>, queries: &Queries<'_, T>, keys: &Keys<'_, T>) {
        let tiles = call.tiles;
        let Self { evaluator, p, ds, nonzero_rows, dk, dv, wanted, clock, .. } = self;
        let count = keys.range.len();
        let step = if keys.partial { SUBTILE_ROWS } else { count };
        for start in (0..count).step_by(step) {
            let rows = start..count.min(start + step);
            let live = evaluator.live_rows(rows.clone());
            let start = live.start.max(nonzero_rows.start);
            let depth = start..live.end.min(nonzero_rows.end).max(start);
            let add = |into: &mut [f32], dim: usize, a: &mut [f32], b| {
                let into = &mut into[keys.offset * dim..];
                let a = Matrix::rows(&*elements::<T>(a), tiles.kv).transposed();
                let part = Part { rows: rows.clone(), columns: 0..dim, depth: depth.clone() };
                simd::product(into, dim, a, b, &part.in_elements::<T>(), Write::Add);
            };
            if wanted.dv {
                add(dv, tiles.dim_v, &mut p.tile, queries.d_out.b);
            }
            if wanted.dk {
                add(dk, tiles.dim, &mut ds.tile, queries.q.b);
            }
        }
        clock.lap(Stage::Products);
    }
}
