//! What a task does: its lane's keys, chunk by chunk, against the rows that see them.

use std::cell::LazyCell;
use std::ops::Range;

use foveate_problem::Operands;
use foveate_tensor::TensorRef;

use super::block::{self, Block};
use super::lanes::{Lanes, Sums, Task};
use super::statistics::Statistics;
use crate::call::{Call, head};
use crate::captures::Slot;
use crate::mods::Evaluator;
use crate::pack::{self, Format, both_elems, elements};
use crate::reach::{Reach, lowest};
use crate::simd::{self, LANES, Matrix, Panels, Part, RowStatistics, STRIP, Write};
use crate::stages::{Clock, Stage};
use crate::work::{Lent, Unit};

/// What all tasks of a wave read.
pub struct Worker<'a> {
    pub call: &'a Call<'a>,
    pub wave: &'a [Unit],
    pub lanes: &'a Lanes,
    pub sums: &'a Sums<'a>,
    pub statistics: &'a Statistics<'a>,
    pub operands: &'a Operands<'a>,
    pub d_out: TensorRef<'a>,
    pub accumulate: bool,
}

/// What a thread works in.
pub struct Scratch<'a> {
    /// Blocks of a chunk of keys.
    blocks: Lent<'a>,
    v_rows: Lent<'a>,
    /// Rows of a query tile, and the same across.
    q: [Lent<'a>; 2],
    d_out: [Lent<'a>; 2],
    work: Work<'a>,
}

/// Tiles at work.
struct Work<'a> {
    evaluator: Evaluator,
    p: Weights<'a>,
    ds: Weights<'a>,
    /// The rows of the tile outside of which `p` and `ds` are 0.
    rows: Range<usize>,
    /// `ds` of a strip as a factor.
    factor: Lent<'a>,
    /// Gradients of a chunk of keys.
    dk: Lent<'a>,
    dv: Lent<'a>,
    clock: Clock<'a>,
}

/// `s`, then `p`, of a tile; or `dp`, then `ds`.
struct Weights<'a> {
    /// As elements.
    tile: Lent<'a>,
    /// A strip as floats, where those are not elements.
    strip: Lent<'a>,
}

impl Weights<'_> {
    /// The floats of the strip that begins with element `at` of the tile.
    fn strip<T: Format>(&mut self, at: usize) -> &mut [f32] {
        T::strip(elements(&mut self.tile), at, &mut self.strip)
    }
}

impl<'a> Scratch<'a> {
    /// For tasks of `call`; `captures` says that gradients of learned buffers are wanted.
    pub fn new<T: Format>(call: &'a Call<'a>, captures: bool) -> Self {
        let (tiles, pool) = (call.tiles, call.pool);
        let chunk = tiles.chunk * tiles.kv;
        let both = |dim| both_elems::<T>(tiles.q, dim).map(|elems| pool.lend(elems));
        let weights = || {
            let rows = tiles.q.div_ceil(T::WIDTH);
            Weights { tile: pool.lend(rows * tiles.kv), strip: pool.lend(STRIP * tiles.kv) }
        };
        Self {
            blocks: pool.lend(tiles.chunk * block::elems::<T>(&tiles)),
            v_rows: pool.lend(tiles.kv * tiles.dim_v),
            q: both(tiles.dim),
            d_out: both(tiles.dim_v),
            work: Work {
                evaluator: call.mods.evaluator([tiles.q, tiles.kv], Some(captures)),
                p: weights(),
                ds: weights(),
                rows: 0..0,
                factor: pool.lend(STRIP * tiles.kv / T::WIDTH),
                dk: pool.lend(chunk * tiles.dim),
                dv: pool.lend(chunk * tiles.dim_v),
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
    q: Both<'a, T>,
    d_out: Both<'a, T>,
    statistics: RowStatistics<'a>,
}

/// Rows as a factor, and as what a product sums over.
struct Both<'a, T> {
    rows: Matrix<'a, T>,
    across: Panels<'a, T>,
}

impl<'a, T: Format> Both<'a, T> {
    /// `n` rows of `dim` numbers of `t`.
    fn of(
        t: TensorRef<'a>,
        at: [usize; 3],
        n: usize,
        dim: usize,
        [rows, across]: &'a mut [Lent<'_>; 2],
    ) -> Self {
        let rows = pack::rows(t, at, n, dim, elements(rows));
        Self { rows, across: T::across(rows, n, dim, elements(across)) }
    }
}

/// Keys of a tile.
struct Keys<'a, T> {
    /// In their sequence.
    range: Range<usize>,
    /// The first one's place in its chunk.
    offset: usize,
    /// Whether the mask decides inside.
    partial: bool,
    block: &'a Block<'a, T>,
}

impl<'a> Worker<'a> {
    /// All keys of a lane.
    pub fn run<T: Format>(
        &self,
        scratch: &mut Scratch<'_>,
        captures: &mut Slot<'_>,
        mut task: Task<'a>,
    ) {
        let (call, tiles) = (self.call, self.call.tiles);
        let lane = task.lane;
        scratch.work.clock.start();
        task.dq.fill(0.0);
        for first in lane.keys.clone().step_by(tiles.chunk * tiles.kv) {
            let keys = first..lane.keys.end.min(first + tiles.chunk * tiles.kv);
            self.chunk::<T>(scratch, captures, &mut task, &keys);
            let Work { dk, dv, clock, .. } = &mut scratch.work;
            let (dk, dv) = (&mut dk[..keys.len() * tiles.dim], &mut dv[..keys.len() * tiles.dim_v]);
            // Factors of the products, once.
            simd::scale(dk, call.scale);
            if call.keep_factor != 1.0 {
                simd::scale(dv, call.keep_factor);
            }
            for (r, key) in keys.enumerate() {
                let at = key - lane.keys.start;
                let dk = &dk[r * tiles.dim..][..call.dims.dim];
                task.dk.write_row(0, 0, at, dk, self.accumulate);
                let dv = &dv[r * tiles.dim_v..][..call.dims.dim_v];
                task.dv.write_row(0, 0, at, dv, self.accumulate);
            }
            clock.lap(Stage::Packing);
        }
        call.note(&mut scratch.work.evaluator);
        self.sums.bring(lane, task.dq);
        scratch.work.clock.lap(Stage::Packing);
    }

    /// A chunk of a lane's keys against the rows that see them.
    fn chunk<T: Format>(
        &self,
        scratch: &mut Scratch<'_>,
        captures: &mut Slot<'_>,
        task: &mut Task<'a>,
        keys: &Range<usize>,
    ) {
        let (tiles, lane) = (&self.call.tiles, task.lane);
        let Scratch { blocks, v_rows, q, d_out, work } = scratch;
        let rooms = blocks.chunks_exact_mut(block::elems::<T>(tiles));
        let unit = &self.wave[lane.unit];
        let of_tile = |(first, room)| {
            let keys = first..keys.end.min(first + tiles.kv);
            let norms = self.call.mods.has_reach();
            block::pack(self.operands, unit, &keys, tiles, norms, room, v_rows)
        };
        let blocks: Vec<Block<'_, T>> =
            keys.clone().step_by(tiles.kv).zip(rooms).map(of_tile).collect();
        work.dk[..keys.len() * tiles.dim].fill(0.0);
        work.dv[..keys.len() * tiles.dim_v].fill(0.0);
        for (i, part) in lane.parts.iter().enumerate() {
            let dq = &mut task.dq[part.at * tiles.dim..][..part.rows.len() * tiles.dim];
            let head = lane.first_head + i;
            self.head(
                work,
                [&mut *q, &mut *d_out],
                captures,
                head,
                &part.rows,
                (keys, &blocks),
                dq,
            );
        }
    }

    /// The rows of a head that see a lane against one chunk of its keys. `dq` is theirs.
    #[expect(clippy::too_many_arguments, reason = "two of them are rooms")]
    fn head<T: Format>(
        &self,
        work: &mut Work<'_>,
        [q_room, d_out_room]: [&mut [Lent<'_>; 2]; 2],
        captures: &mut Slot<'_>,
        of_wave: usize,
        rows: &Range<usize>,
        (keys, blocks): (&Range<usize>, &[Block<'_, T>]),
        dq: &mut [f32],
    ) {
        let (call, tiles) = (self.call, self.call.tiles);
        let (b, h) = self.lanes.head(of_wave);
        let sequence = &call.sequences[b];
        let first_tile = keys.start / tiles.kv;
        let head = head(&call.dims, sequence, h);
        work.evaluator.enter(head);
        for start in rows.clone().step_by(tiles.q) {
            let key_tiles = first_tile..keys.end.div_ceil(tiles.kv);
            let end = rows.end.min(start + tiles.q);
            let (at, n) = ([sequence.q_batch, h, sequence.q_start + start], end - start);
            let statistics = self.statistics.of(of_wave, start..end);
            let mut live: Vec<_> = call.live(b, h).tiles(start / tiles.q, &key_tiles).collect();
            if let Some(reach) = call.mods.reach(head) {
                let norm = LazyCell::new(|| {
                    let room = elements::<T>(&mut q_room[0]);
                    let rows = pack::rows(self.operands.q, at, n, tiles.dim, room);
                    pack::largest_norm(rows, n, tiles.dim)
                });
                live.retain(|(tile, _)| {
                    let range = tile * tiles.kv..keys.end.min((tile + 1) * tiles.kv);
                    let of_keys = blocks[tile - first_tile].norm;
                    let magnitude = || call.scale.abs() * *norm * of_keys;
                    !is_out_of_reach(&reach, [&(start..end), &range], statistics, magnitude)
                });
            }
            if live.is_empty() {
                continue;
            }
            let queries = Queries {
                start,
                rows: n,
                q: Both::of(self.operands.q, at, n, tiles.dim, q_room),
                d_out: Both::of(self.d_out, at, n, tiles.dim_v, d_out_room),
                statistics,
            };
            work.clock.lap(Stage::Packing);
            let dq = &mut dq[(start - rows.start) * tiles.dim..][..n * tiles.dim];
            for (tile, partial) in live {
                let first = tile * tiles.kv;
                let range = first..keys.end.min(first + tiles.kv);
                let block = &blocks[tile - first_tile];
                let own = Keys { range, offset: first - keys.start, partial, block };
                work.tile(call, captures, &queries, &own, dq);
            }
        }
    }
}

/// Whether `queries` of these statistics give `keys` weights of 0 only, and so no gradient. What is
/// not a number in `d_out` or v has made delta none, and 0 times it is to be seen in every gradient.
fn is_out_of_reach(
    reach: &Reach<'_>,
    [queries, keys]: [&Range<usize>; 2],
    statistics: RowStatistics<'_>,
    magnitude: impl Fn() -> f32,
) -> bool {
    let lowest = lowest(statistics.lse.iter().copied());
    let columns = || reach.columns(queries, keys, lowest, magnitude);
    statistics.delta.iter().all(|delta| delta.is_finite()) && columns().is_empty()
}

impl Work<'_> {
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
        self.rows = queries.rows..queries.rows;
        for start in (0..queries.rows).step_by(STRIP) {
            let strip = start..queries.rows.min(start + STRIP);
            self.strip(call, captures, queries, keys, strip, dq);
        }
        self.keys(call, queries, keys);
    }

    /// `p` and `ds` of a strip of rows, and what it gives dq.
    fn strip<T: Format>(
        &mut self,
        call: &Call<'_>,
        captures: &mut Slot<'_>,
        queries: &Queries<'_, T>,
        keys: &Keys<'_, T>,
        strip: Range<usize>,
        dq: &mut [f32],
    ) {
        let (dims, tiles, stride) = (&call.dims, call.tiles, call.tiles.kv);
        let Self { evaluator, p: p_tile, ds: ds_tile, rows, factor, clock, .. } = self;
        let live = evaluator.live(strip.clone());
        // Whole groups of keys; dq's sum begins and ends with keys that are seen.
        let columns = live.start / LANES * LANES..simd::padded(live.end);
        // A strip has whole elements, but for the last.
        let at = strip.start / T::WIDTH * stride;
        // What the products of keys read beside them is 0.
        let clear = |x: &mut Weights<'_>, columns: Range<usize>| {
            let rows = strip.len().div_ceil(T::WIDTH);
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
        let statistics = queries.statistics.of(strip.clone());
        let scores = |into: &mut [f32], a: Matrix<'_, T>, b, depth, factor| {
            let a = Matrix { data: &a.data[strip.start * a.row..], ..a };
            let part = Part { rows: 0..strip.len(), columns: columns.clone(), depth: 0..depth };
            simd::product(into, stride, a, b, &part.in_elements::<T>(), Write::Times(factor));
        };
        let p = p_tile.strip::<T>(at);
        scores(p, queries.q.rows, keys.block.k_t, dims.dim, call.scale);
        clock.lap(Stage::Products);
        evaluator.score(strip.clone(), columns.clone(), p, stride);
        clock.lap(Stage::Mods);
        // As where a bias grows with the distance. What is not a number in `d_out` or v has made
        // delta none, and 0 times it is to be seen in every gradient.
        if evaluator.has_score()
            && statistics.delta.iter().all(|delta| delta.is_finite())
            && simd::weighs_nothing(p, stride, columns.clone(), statistics.lse)
        {
            for x in [p_tile, ds_tile] {
                clear(x, columns.clone());
            }
            clock.lap(Stage::Softmax);
            return;
        }
        *rows = rows.start.min(strip.start)..strip.end;
        let ds = ds_tile.strip::<T>(at);
        // The factor of kept entries here instead of on what dropout keeps.
        scores(ds, queries.d_out.rows, keys.block.v_t, dims.dim_v, call.keep_factor);
        clock.lap(Stage::Products);
        evaluator.drop_out(strip.clone(), columns.clone(), ds, stride);
        clock.lap(Stage::Mods);
        simd::derive(p, ds, stride, columns.clone(), statistics);
        clock.lap(Stage::Softmax);
        evaluator.gradient(ds, stride, &mut captures.sums);
        evaluator.drop_out(strip.clone(), columns.clone(), p, stride);
        clock.lap(Stage::Mods);
        for x in [&mut *p_tile, &mut *ds_tile] {
            let tile = &mut elements(&mut x.tile)[at..];
            T::keep(&x.strip, strip.len(), stride, columns.clone(), tile);
        }
        let ds = ds_tile.strip::<T>(at);
        let ds = T::factor(ds, strip.len(), stride, columns, elements(factor));
        clock.lap(Stage::Softmax);
        let part = Part { rows: 0..strip.len(), columns: 0..tiles.dim, depth: live };
        let dq = &mut dq[strip.start * tiles.dim..];
        simd::product(dq, tiles.dim, ds, keys.block.k, &part.in_elements::<T>(), Write::Add);
        clock.lap(Stage::Products);
    }

    /// What a tile gives dk and dv.
    fn keys<T: Format>(&mut self, call: &Call<'_>, queries: &Queries<'_, T>, keys: &Keys<'_, T>) {
        let tiles = call.tiles;
        let Self { evaluator, p, ds, rows: weighed, dk, dv, clock, .. } = self;
        let count = keys.range.len();
        let step = if keys.partial { STRIP } else { count };
        for start in (0..count).step_by(step) {
            let rows = start..count.min(start + step);
            let seen = evaluator.live_rows(rows.clone());
            let start = seen.start.max(weighed.start);
            let depth = start..seen.end.min(weighed.end).max(start);
            let add = |into: &mut [f32], dim: usize, a: &mut [f32], b| {
                let into = &mut into[keys.offset * dim..];
                let a = Matrix::rows(&*elements::<T>(a), tiles.kv).transposed();
                let part = Part { rows: rows.clone(), columns: 0..dim, depth: depth.clone() };
                simd::product(into, dim, a, b, &part.in_elements::<T>(), Write::Add);
            };
            add(dv, tiles.dim_v, &mut p.tile, queries.d_out.across);
            add(dk, tiles.dim, &mut ds.tile, queries.q.across);
        }
        clock.lap(Stage::Products);
    }
}
