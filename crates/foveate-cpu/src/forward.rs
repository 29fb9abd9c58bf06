//! The forward pass.
//!
//! One task is one query tile of one head. It walks the live key tiles of its row with the online
//! softmax: scores `s = q·kᵀ`, running maximum `m` and denominator `l` of each row, the output so
//! far rescaled by `exp(m_old - m_new)` and `exp(s - m)·v` added. Only at the end is it divided by
//! the denominator. It goes from left to right; under a score that puts keys out of reach, from
//! those on that it raises most, and leaves out what is [`out of reach`](crate::reach).
//!
//! Inside a tile the work goes strip by strip, a strip being the rows of one block of a product:
//! scores of a strip are made, weighed and multiplied by v while they are in the first-level
//! cache, and the keys and values of the tile stay in the second for all strips. In a tile that
//! the mask decides, a strip computes the columns that some row of it sees. While it does, the
//! queries and values that only the next strip reads are asked for.
//!
//! Packing keys and values is done by tasks, too: those of a head stand before its query tiles, so
//! that a query tile waits only for what another thread is packing right now. Where there are few
//! query tiles for each key, they pack for themselves.

use std::ops::Range;

use foveate_problem::ForwardArgs;
use foveate_tensor::{TensorMut, TensorRef};

use crate::call::{Call, head};
use crate::error::CpuError;
use crate::mods::Evaluator;
use crate::pack::{self, Block, Format, Packed, Packing, elements};
use crate::reach::{Reach, lowest};
use crate::seen;
use crate::simd::{self, Ahead, LANES, Matrix, Pair, Part, RowState, STRIP, Write};
use crate::stages::{Clock, Stage};
use crate::work::{Lent, Pieces, Span, Unit, run, waves};

/// Queries that have their reach looked at together.
const CONFINED: usize = 4 * STRIP;

/// What a thread is given to do.
#[expect(clippy::large_enum_variant, reason = "most are query tiles")]
enum Task<'a> {
    Pack(Packing<'a>),
    Tile(QueryTile<'a>),
}

/// A query tile of a head, and where its results go.
struct QueryTile<'a> {
    /// Unit of the wave.
    unit: usize,
    /// Sequence.
    b: usize,
    /// Query head.
    h: usize,
    /// Query tile.
    tile: usize,
    /// Live key tiles, for the order of tasks.
    cost: usize,
    out: TensorMut<'a>,
    lse: TensorMut<'a, 3>,
    max_score: Option<TensorMut<'a, 3>>,
}

/// What a thread works in.
struct Scratch<'a> {
    /// Queries of a tile; while packing, keys.
    rows: Lent<'a>,
    /// For what its query tiles pack themselves, once there is any.
    own: Option<pack::Room<'a>>,
    work: Work<'a>,
}

/// A query tile at work.
struct Work<'a> {
    evaluator: Evaluator,
    /// Scores of a strip.
    scores: Lent<'a>,
    /// Their weights, where those are not floats.
    weights: Lent<'a>,
    out: Lent<'a>,
    /// The softmax of each row.
    states: Vec<RowState>,
    /// Whether some values are not finite, which rows without a weight for them must not take.
    careful: bool,
    clock: Clock<'a>,
}

/// Floats of workspace a unit takes.
pub fn wave_elems(call: &Call<'_>, unit: &Unit) -> usize {
    if shares_blocks(call, unit) { pack::elems(&call.tiles, unit.keys.len) } else { 0 }
}

/// Whether key tiles of a unit are seen by so many query tiles, on average more than two, that they
/// are packed once for all.
fn shares_blocks(call: &Call<'_>, unit: &Unit) -> bool {
    let mut most = 2 * unit.keys.len.div_ceil(call.tiles.kv);
    call.heads_of(unit).any(|(b, h)| {
        let (live, keys) = (call.live(b, h), call.key_tiles(b));
        (0..call.sequences[b].q_len.div_ceil(call.tiles.q)).any(|tile| {
            let seen = live.count(tile, &keys);
            let over = seen > most;
            most = most.saturating_sub(seen);
            over
        })
    })
}

/// Runs the forward pass of `call`.
pub fn forward(call: &Call<'_>, args: ForwardArgs<'_>) -> Result<(), CpuError> {
    match call.pairs {
        true => run_in::<Pair>(call, args),
        false => run_in::<f32>(call, args),
    }
}

/// The same with operands in a format.
fn run_in<T: Format>(call: &Call<'_>, args: ForwardArgs<'_>) -> Result<(), CpuError> {
    let ForwardArgs { operands, out, lse, max_score } = args;
    let tiles = call.tiles;
    let spans: Vec<Span> = call.sequences.iter().map(Span::queries).collect();
    let mut out = Pieces::cut(out, &spans, |_| tiles.q);
    let mut lse = Pieces::cut(lse, &spans, |_| tiles.q);
    let mut max_score = max_score.map(|t| Pieces::cut(t, &spans, |_| tiles.q));
    for wave in waves(&call.units, call.wave_bytes, |unit| wave_elems(call, unit)) {
        let mut blocks = call.pool.lend(wave.iter().map(|unit| wave_elems(call, unit)).sum());
        let shared = |unit: &Unit| shares_blocks(call, unit);
        let (packed, packings) =
            Packed::<T>::new(&operands, wave, shared, tiles, call.mods.has_reach(), &mut blocks);
        let mut packings = packings.into_iter().peekable();
        let mut tasks = Vec::new();
        for (u, unit) in wave.iter().enumerate() {
            tasks.extend(std::iter::from_fn(|| packings.next_if(|p| p.unit == u)).map(Task::Pack));
            let mut query_tiles = Vec::new();
            for (b, h) in call.heads_of(unit) {
                let live = call.live(b, h);
                let keys = call.key_tiles(b);
                for tile in 0..call.sequences[b].q_len.div_ceil(tiles.q) {
                    query_tiles.push(QueryTile {
                        unit: u,
                        b,
                        h,
                        tile,
                        cost: live.count(tile, &keys),
                        out: out.take(b, h, tile),
                        lse: lse.take(b, h, tile),
                        max_score: max_score.as_mut().map(|m| m.take(b, h, tile)),
                    });
                }
            }
            // Heads in order, so that few are in the caches at once; longest first inside.
            query_tiles.sort_by_key(|t| std::cmp::Reverse(t.cost));
            tasks.extend(query_tiles.into_iter().map(Task::Tile));
        }
        let wave = Wave { call, packed: &packed, q: operands.q };
        run(
            tasks.into_iter(),
            || Scratch::new::<T>(call),
            |scratch, task| match task {
                Task::Pack(packing) => {
                    scratch.work.clock.start();
                    packed.pack(packing, &mut scratch.rows);
                    scratch.work.clock.lap(Stage::Packing);
                }
                Task::Tile(tile) => wave.query_tile(scratch, tile),
            },
        );
    }
    call.finish()
}

impl<'a> Scratch<'a> {
    fn new<T: Format>(call: &'a Call<'_>) -> Self {
        let tiles = &call.tiles;
        let work = Work {
            evaluator: call.mods.evaluator([tiles.q, tiles.kv], None),
            scores: call.pool.lend(STRIP * tiles.kv),
            weights: call.pool.lend(STRIP * tiles.kv * (T::WIDTH - 1) / T::WIDTH),
            out: call.pool.lend(tiles.q * tiles.dim_v),
            states: vec![RowState::START; tiles.q],
            careful: false,
            clock: Clock::new(call.profile),
        };
        let rows = call.pool.lend(tiles.q.max(tiles.kv) * tiles.dim.max(tiles.dim_v));
        Self { rows, own: None, work }
    }
}

/// What all query tiles of a wave read.
struct Wave<'a, T> {
    call: &'a Call<'a>,
    packed: &'a Packed<'a, T>,
    q: TensorRef<'a>,
}

/// The queries of a tile, packed.
struct Queries<'a, T> {
    /// Unit of the wave.
    unit: usize,
    /// First query, and how many.
    start: usize,
    rows: usize,
    q: Matrix<'a, T>,
    /// What tells which keys they reach, where that may leave any out, and their largest norm.
    reach: Option<(Reach<'a>, f32)>,
    /// Whether there are some that nothing has read.
    fresh: bool,
}

/// A key tile of a row, and whether the mask decides inside.
struct KeyTile {
    tile: usize,
    keys: Range<usize>,
    partial: bool,
}

impl<T: Format> Wave<'_, T> {
    fn query_tile<'b>(&'b self, scratch: &mut Scratch<'b>, mut task: QueryTile<'_>) {
        let Scratch { rows: room, own, work } = scratch;
        let (call, tiles) = (self.call, self.call.tiles);
        if !self.packed.is_shared(task.unit) {
            own.get_or_insert_with(|| pack::Room::new(call.pool, &tiles));
        }
        let sequence = &call.sequences[task.b];
        let start = task.tile * tiles.q;
        let rows = tiles.q.min(sequence.q_len - start);
        work.clock.start();
        let at = [sequence.q_batch, task.h, sequence.q_start + start];
        let q = pack::rows(self.q, at, rows, tiles.dim, elements::<T>(room));
        work.clock.lap(Stage::Packing);
        let head = head(&call.dims, sequence, task.h);
        work.evaluator.enter(head);
        let key_tile = |(tile, partial)| {
            let first = tile * tiles.kv;
            KeyTile { tile, keys: first..sequence.k_len.min(first + tiles.kv), partial }
        };
        let live = call.live(task.b, task.h).tiles(task.tile, &call.key_tiles(task.b));
        let mut live: Vec<KeyTile> = live.map(key_tile).collect();
        let reach = call.mods.reach(head).filter(|reach| {
            let shared = self.packed.is_shared(task.unit);
            shared && reach.sort(&(start..start + rows), &mut live, |tile| &tile.keys)
        });
        let reach = reach.map(|reach| (reach, pack::largest_norm(q, rows, tiles.dim)));
        let mut queries = Queries { unit: task.unit, start, rows, q, reach, fresh: true };
        // Once, and with care where that has tainted a row.
        for careful in [false, true] {
            work.careful = careful;
            work.states.fill(RowState::START);
            for tile in &live {
                self.key_tile(work, own.as_mut(), &mut queries, tile);
            }
            if !work.store(call, &mut task, rows) {
                break;
            }
        }
        call.note(&mut work.evaluator);
        work.clock.lap(Stage::Packing);
    }

    /// The part of a query tile that one key tile gives.
    fn key_tile<'b>(
        &'b self,
        work: &mut Work<'b>,
        own: Option<&mut pack::Room<'b>>,
        queries: &mut Queries<'_, T>,
        key_tile: &KeyTile,
    ) {
        let &mut Queries { unit, start, rows, q, .. } = queries;
        let KeyTile { tile, keys, partial } = key_tile;
        if self.reached(queries, key_tile, 0..rows, &work.states).is_empty() {
            return;
        }
        work.evaluator.tile(start..start + rows, keys.clone(), *partial);
        work.clock.lap(Stage::Mods);
        let seen = work.evaluator.live(0..rows);
        let block = self.packed.block(unit, *tile, seen, own);
        work.clock.lap(Stage::Packing);
        // Up to which row columns are confined to those that are reached.
        let mut confined = 0;
        let mut next = work.evaluator.strip(0..rows);
        while !next.is_empty() {
            let strip = next;
            if confined < strip.end {
                confined = rows.min(strip.start + CONFINED);
                let own = strip.start..confined;
                let columns = self.reached(queries, key_tile, own, &work.states);
                work.evaluator.confine(columns);
            }
            next = work.evaluator.strip(strip.end..rows);
            let unread: &[T] =
                if queries.fresh { &q.data[next.start * q.row..next.end * q.row] } else { &[] };
            queries.fresh &= next.end < rows;
            let ahead = Ahead::new([unread, work.next_values(&block, &strip, &next)], 3);
            let q = Matrix { data: &q.data[strip.start * q.row..], ..q };
            work.strip(self.call, q, &block, strip, ahead);
        }
    }

    /// The columns of a key tile outside of which the weights of `rows` of a query tile are 0.
    fn reached(
        &self,
        queries: &Queries<'_, T>,
        key_tile: &KeyTile,
        rows: Range<usize>,
        states: &[RowState],
    ) -> Range<usize> {
        let Some((reach, norm)) = &queries.reach else { return 0..key_tile.keys.len() };
        let seen = lowest(states[rows.clone()].iter().map(|state| state.max));
        let of_keys = || self.packed.norm(queries.unit, key_tile.tile);
        let rows = queries.start + rows.start..queries.start + rows.end;
        reach.columns(&rows, &key_tile.keys, seen, || self.call.scale.abs() * norm * of_keys())
    }
}

impl Work<'_> {
    /// The values of a key tile that the next strip reads and this one does not.
    fn next_values<'a, T: Format>(
        &self,
        block: &Block<'a, T>,
        strip: &Range<usize>,
        next: &Range<usize>,
    ) -> &'a [T] {
        let [seen, then] = [strip, next].map(|rows| self.evaluator.live(rows.clone()));
        let from = then.start.max(seen.end);
        if seen.is_empty() || from >= then.end {
            return &[];
        }
        let rows = from / T::WIDTH..then.end.div_ceil(T::WIDTH);
        &block.v.data[rows.start * block.v.depth..rows.end * block.v.depth]
    }

    /// One strip of query rows, whose queries are the first of `q`, against one key tile. What is
    /// needed `ahead` is asked for meanwhile.
    fn strip<T: Format>(
        &mut self,
        call: &Call<'_>,
        q: Matrix<'_, T>,
        block: &Block<'_, T>,
        strip: Range<usize>,
        mut ahead: Ahead<'_, T>,
    ) {
        let (dims, tiles) = (&call.dims, &call.tiles);
        let Self { evaluator, scores, weights, out, states, careful, clock } = self;
        let keys = evaluator.live(strip.clone());
        if keys.is_empty() {
            return;
        }
        let columns = keys.start / LANES * LANES..simd::padded(keys.end);
        let rows = 0..strip.len();
        let part = Part { rows: rows.clone(), columns: columns.clone(), depth: 0..dims.dim };
        let part = part.in_elements::<T>();
        ahead.ask();
        simd::product(scores, tiles.kv, q, block.k_t, &part, Write::Times(call.scale));
        clock.lap(Stage::Products);

        evaluator.score(strip.clone(), columns.clone(), scores, tiles.kv);
        clock.lap(Stage::Mods);

        ahead.ask();
        let states = &mut states[strip.clone()];
        let out = &mut out[strip.start * tiles.dim_v..][..rows.len() * tiles.dim_v];
        // What rows had before their first score is anything.
        let fresh = !*careful && states.iter().all(RowState::is_fresh);
        if !fresh {
            let fresh = out.chunks_exact_mut(tiles.dim_v).zip(&*states);
            fresh.filter(|(_, state)| state.is_fresh()).for_each(|(row, _)| row.fill(0.0));
        }
        simd::soften(scores, tiles.kv, columns.clone(), states);
        for (row, state) in out.chunks_exact_mut(tiles.dim_v).zip(states) {
            simd::reweigh(row, state.factor);
        }
        clock.lap(Stage::Softmax);

        evaluator.drop_out(strip, columns.clone(), scores, tiles.kv);
        clock.lap(Stage::Mods);

        let weights = T::factor(scores, rows.len(), tiles.kv, columns, elements(weights));
        clock.lap(Stage::Softmax);
        let part = Part { rows, columns: 0..tiles.dim_v, depth: keys }.in_elements::<T>();
        ahead.ask();
        if *careful {
            seen::add(out, tiles.dim_v, weights, block.v, &part);
        } else {
            let write = if fresh { Write::Times(1.0) } else { Write::Add };
            simd::product(out, tiles.dim_v, weights, block.v, &part, write);
        }
        clock.lap(Stage::Products);
    }

    /// Divides by the denominator and writes the rows out; returns whether one may have taken what
    /// it does not see.
    fn store(&mut self, call: &Call<'_>, task: &mut QueryTile<'_>, rows: usize) -> bool {
        let (dim, dim_v) = (call.tiles.dim_v, call.dims.dim_v);
        let out = self.out.chunks_exact_mut(dim).zip(&self.states);
        for (r, (row, state)) in out.take(rows).enumerate() {
            if state.is_fresh() {
                row.fill(0.0);
            }
            let lse = call.divide(task.h, state.max, state.sum, row);
            task.out.write_row(0, 0, r, &row[..dim_v], false);
            task.lse.write([0, 0, r], lse.into());
            if let Some(max_score) = &mut task.max_score {
                max_score.write([0, 0, r], state.max.into());
            }
        }
        let sums = self.states.iter().map(|state| state.sum);
        seen::is_tainted(&self.out[..rows * dim], dim, sums)
    }
}
