//! The forward pass.
//!
//! A task is a query tile of a head. It visits the live key tiles with the online softmax: scores
//! `s = q·kᵀ`, the running maximum `m` and denominator `l` of each row, and an output accumulator
//! that is rescaled by `exp(m_old - m_new)` before `exp(s - m)·v` is added. The epilogue divides it
//! by the denominator. Key tiles are visited from left to right. Where the score's bounds differ
//! enough between tiles, those with the highest bound come first, and tiles whose weights are all 0
//! ([`score_bounds`](crate::score_bounds)) are skipped.
//!
//! A tile is processed in subtiles of [`SUBTILE_ROWS`] query rows. The scores of a subtile stay in
//! L1 until they are multiplied with v; the keys and values of the tile stay in L2 for all subtiles.
//! In a partial tile a subtile computes only the columns that one of its rows sees. The queries and
//! values that only the next subtile reads are prefetched meanwhile.
//!
//! Tasks pack keys and values, too. The pack tasks of a head come before its query tiles, so a query
//! tile waits only for a key tile that another thread is packing at that moment. Where there are few
//! query tiles for each key, each query tile packs for itself.

use std::ops::{Deref, DerefMut, Range};

use foveate_problem::ForwardArgs;
use foveate_tensor::{TensorMut, TensorRef};

use crate::call::{Call, head};
use crate::error::CpuError;
use crate::mods::Evaluator;
use crate::nonfinite;
use crate::pack::{self, Format, PackTask, PackedTile, PackedTiles, elements};
use crate::pool::PoolBuffer;
use crate::score_bounds::{ScoreBounds, lowest};
use crate::simd::{self, LANES, Matrix, Pair, Part, Prefetch, RowState, SUBTILE_ROWS, Write};
use crate::stages::{Clock, Stage};
use crate::tasks::{KvHead, OutputTiles, RowRange, run, waves};

/// Queries whose scores are bounded together.
const BOUND_ROWS: usize = 4 * SUBTILE_ROWS;

/// What a thread is given.
#[expect(clippy::large_enum_variant, reason = "most are query tiles")]
enum ForwardTask<'a> {
    Pack(PackTask<'a>),
    Tile(QueryTile<'a>),
}

/// A query tile of a head, and where its results go.
struct QueryTile<'a> {
    /// Index of the KV head in the wave.
    kv_head: usize,
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

/// The workspace of a thread.
struct Scratch<'a> {
    /// Queries of a tile; keys or values while packing.
    rows: PoolBuffer<'a>,
    /// Key tiles that its query tiles pack for themselves, once there is one.
    own: Option<pack::PackScratch<'a>>,
    acc: OutAccumulator<'a>,
}

/// The accumulator of a query tile, with what a subtile needs.
struct OutAccumulator<'a> {
    evaluator: Evaluator,
    /// Scores of a subtile, then its weights.
    scores: PoolBuffer<'a>,
    /// The weights as elements, where those are not floats.
    weights: PoolBuffer<'a>,
    out: PoolBuffer<'a>,
    /// The softmax of each row.
    states: RowStates<'a>,
    /// Whether some values are non-finite, so that a weight of 0 must not multiply them.
    has_nonfinite: bool,
    clock: Clock<'a>,
}

/// The softmax of each row of a query tile, in the pool's memory.
struct RowStates<'a>(PoolBuffer<'a>);

impl Deref for RowStates<'_> {
    type Target = [RowState];

    fn deref(&self) -> &[RowState] {
        bytemuck::cast_slice(&self.0)
    }
}

impl DerefMut for RowStates<'_> {
    fn deref_mut(&mut self) -> &mut [RowState] {
        bytemuck::cast_slice_mut(&mut self.0)
    }
}

/// Floats of workspace that a KV head takes.
pub fn wave_elems(call: &Call<'_>, kv_head: &KvHead) -> usize {
    if packs_once(call, kv_head) { pack::elems(&call.tiles, kv_head.keys.len) } else { 0 }
}

/// Whether the key tiles of a KV head are packed once for all query tiles: on average more than two
/// query tiles see each.
fn packs_once(call: &Call<'_>, kv_head: &KvHead) -> bool {
    let mut most = 2 * kv_head.keys.len.div_ceil(call.tiles.kv);
    call.heads_of(kv_head).any(|(b, h)| {
        let (live, keys) = (call.live(b, h), call.key_tiles(b));
        (0..call.sequences[b].q_len.div_ceil(call.tiles.q)).any(|tile| {
            let live_tiles = live.count(tile, &keys);
            let over = live_tiles > most;
            most = most.saturating_sub(live_tiles);
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

/// [`forward`] with operands in a format.
fn run_in<T: Format>(call: &Call<'_>, args: ForwardArgs<'_>) -> Result<(), CpuError> {
    let ForwardArgs { operands, out, lse, max_score } = args;
    let tiles = call.tiles;
    let ranges: Vec<RowRange> = call.sequences.iter().map(RowRange::queries).collect();
    let mut out = OutputTiles::split(out, &ranges, |_| tiles.q);
    let mut lse = OutputTiles::split(lse, &ranges, |_| tiles.q);
    let mut max_score = max_score.map(|t| OutputTiles::split(t, &ranges, |_| tiles.q));
    for wave in waves(&call.kv_heads, call.wave_bytes, |kv_head| wave_elems(call, kv_head)) {
        let mut packed_tiles =
            call.pool.alloc(wave.iter().map(|kv_head| wave_elems(call, kv_head)).sum());
        let shared = |kv_head: &KvHead| packs_once(call, kv_head);
        let (packed, pack_tasks) = PackedTiles::<T>::new(
            &operands,
            wave,
            shared,
            tiles,
            call.mods.has_score_bounds(),
            &mut packed_tiles,
        );
        let mut pack_tasks = pack_tasks.into_iter().peekable();
        let mut tasks = Vec::new();
        for (u, kv_head) in wave.iter().enumerate() {
            tasks.extend(
                std::iter::from_fn(|| pack_tasks.next_if(|p| p.kv_head == u))
                    .map(ForwardTask::Pack),
            );
            let mut query_tiles = Vec::new();
            for (b, h) in call.heads_of(kv_head) {
                let live = call.live(b, h);
                let keys = call.key_tiles(b);
                for tile in 0..call.sequences[b].q_len.div_ceil(tiles.q) {
                    query_tiles.push(QueryTile {
                        kv_head: u,
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
            // Heads stay in order, so that few are in the caches at once; the longest tile of a
            // head comes first.
            query_tiles.sort_by_key(|t| std::cmp::Reverse(t.cost));
            tasks.extend(query_tiles.into_iter().map(ForwardTask::Tile));
        }
        let wave = Wave { call, packed: &packed, q: operands.q };
        run(
            tasks.into_iter(),
            || Scratch::new::<T>(call),
            |scratch, task| match task {
                ForwardTask::Pack(packing) => {
                    scratch.acc.clock.start();
                    packed.pack(packing, &mut scratch.rows);
                    scratch.acc.clock.lap(Stage::Packing);
                }
                ForwardTask::Tile(tile) => wave.query_tile(scratch, tile),
            },
        );
    }
    call.finish()
}

/// Takes the workspace of a thread from the pool, and gives it back.
pub fn take_scratch(call: &Call<'_>) {
    let scratch = match call.pairs {
        true => Scratch::new::<Pair>(call),
        false => Scratch::new::<f32>(call),
    };
    let is_own = |kv_head: &KvHead| !packs_once(call, kv_head);
    let own = call.kv_heads.iter().any(is_own);
    let own = own.then(|| pack::PackScratch::new(call.pool, &call.tiles));
    drop((scratch, own));
}

impl<'a> Scratch<'a> {
    fn new<T: Format>(call: &'a Call<'_>) -> Self {
        let tiles = &call.tiles;
        let acc = OutAccumulator {
            evaluator: call.mods.evaluator([tiles.q, tiles.kv], None),
            scores: call.pool.alloc(SUBTILE_ROWS * tiles.kv),
            weights: call.pool.alloc(SUBTILE_ROWS * tiles.kv * (T::WIDTH - 1) / T::WIDTH),
            out: call.pool.alloc(tiles.q * tiles.dim_v),
            states: RowStates(call.pool.alloc(tiles.q * RowState::ELEMS)),
            has_nonfinite: false,
            clock: Clock::new(call.profile),
        };
        let rows = call.pool.alloc(tiles.q.max(tiles.kv) * tiles.dim.max(tiles.dim_v));
        Self { rows, own: None, acc }
    }
}

/// The arguments that all query tiles of a wave share.
struct Wave<'a, T> {
    call: &'a Call<'a>,
    packed: &'a PackedTiles<'a, T>,
    q: TensorRef<'a>,
}

/// The queries of a tile, packed.
struct Queries<'a, T> {
    /// Index of the KV head in the wave.
    kv_head: usize,
    /// First query, and how many.
    start: usize,
    rows: usize,
    q: Matrix<'a, T>,
    /// The bounds of their scores, where those may skip a key tile, and their largest norm.
    bounds: Option<(ScoreBounds<'a>, f32)>,
    /// Whether some rows have not been read yet.
    fresh: bool,
}

/// A key tile of a row, and whether the mask decides inside.
struct LiveTile {
    tile: usize,
    keys: Range<usize>,
    partial: bool,
}

impl<T: Format> Wave<'_, T> {
    fn query_tile<'b>(&'b self, scratch: &mut Scratch<'b>, mut task: QueryTile<'_>) {
        let Scratch { rows: buffer, own, acc } = scratch;
        let (call, tiles) = (self.call, self.call.tiles);
        if !self.packed.is_shared(task.kv_head) {
            own.get_or_insert_with(|| pack::PackScratch::new(call.pool, &tiles));
        }
        let sequence = &call.sequences[task.b];
        let start = task.tile * tiles.q;
        let rows = tiles.q.min(sequence.q_len - start);
        acc.clock.start();
        let at = [sequence.q_batch, task.h, sequence.q_start + start];
        let q = pack::rows(self.q, at, rows, tiles.dim, elements::<T>(buffer));
        acc.clock.lap(Stage::Packing);
        let head = head(&call.dims, sequence, task.h);
        acc.evaluator.enter(head);
        let key_tile = |(tile, partial)| {
            let first = tile * tiles.kv;
            LiveTile { tile, keys: first..sequence.k_len.min(first + tiles.kv), partial }
        };
        let live = call.live(task.b, task.h).tiles(task.tile, &call.key_tiles(task.b));
        let mut live: Vec<LiveTile> = live.map(key_tile).collect();
        let bounds = call.mods.score_bounds(head).filter(|bounds| {
            let shared = self.packed.is_shared(task.kv_head);
            shared && bounds.sort_tiles(&(start..start + rows), &mut live, |tile| &tile.keys)
        });
        let bounds = bounds.map(|bounds| (bounds, pack::largest_norm(q, rows, tiles.dim)));
        let mut queries = Queries { kv_head: task.kv_head, start, rows, q, bounds, fresh: true };
        // A second time, without products by weights of 0, where a row came out non-finite.
        for has_nonfinite in [false, true] {
            acc.has_nonfinite = has_nonfinite;
            acc.states.fill(RowState::START);
            for tile in &live {
                self.key_tile(acc, own.as_mut(), &mut queries, tile);
            }
            if !acc.store(call, &mut task, rows) {
                break;
            }
        }
        call.note(&mut acc.evaluator);
        acc.clock.lap(Stage::Packing);
    }

    /// Adds one key tile to a query tile.
    fn key_tile<'b>(
        &'b self,
        acc: &mut OutAccumulator<'b>,
        own: Option<&mut pack::PackScratch<'b>>,
        queries: &mut Queries<'_, T>,
        key_tile: &LiveTile,
    ) {
        let &mut Queries { kv_head, start, rows, q, .. } = queries;
        let LiveTile { tile, keys, partial } = key_tile;
        if self.nonzero_columns(queries, key_tile, 0..rows, &acc.states).is_empty() {
            return;
        }
        acc.evaluator.tile(start..start + rows, keys.clone(), *partial);
        acc.clock.lap(Stage::Mods);
        let live = acc.evaluator.live(0..rows);
        let packed = self.packed.tile(kv_head, *tile, live, own);
        acc.clock.lap(Stage::Packing);
        // The row up to which the evaluator is restricted to columns with weights.
        let mut bounded = 0;
        let mut next = acc.evaluator.subtile(0..rows);
        while !next.is_empty() {
            let subtile = next;
            if bounded < subtile.end {
                bounded = rows.min(subtile.start + BOUND_ROWS);
                let own = subtile.start..bounded;
                let columns = self.nonzero_columns(queries, key_tile, own, &acc.states);
                acc.evaluator.restrict(columns);
            }
            next = acc.evaluator.subtile(subtile.end..rows);
            let unread: &[T] =
                if queries.fresh { &q.data[next.start * q.row..next.end * q.row] } else { &[] };
            queries.fresh &= next.end < rows;
            let prefetch = Prefetch::new([unread, acc.next_values(&packed, &subtile, &next)], 3);
            let q = Matrix { data: &q.data[subtile.start * q.row..], ..q };
            acc.subtile(self.call, q, &packed, subtile, prefetch);
        }
    }

    /// The columns of a key tile outside of which all weights of `rows` of a query tile are 0.
    fn nonzero_columns(
        &self,
        queries: &Queries<'_, T>,
        key_tile: &LiveTile,
        rows: Range<usize>,
        states: &[RowState],
    ) -> Range<usize> {
        let Some((bounds, norm)) = &queries.bounds else { return 0..key_tile.keys.len() };
        let row_max = lowest(states[rows.clone()].iter().map(|state| state.max));
        let of_keys = || self.packed.norm(queries.kv_head, key_tile.tile);
        let rows = queries.start + rows.start..queries.start + rows.end;
        bounds.nonzero_columns(&rows, &key_tile.keys, row_max, || {
            self.call.scale.abs() * norm * of_keys()
        })
    }
}

impl OutAccumulator<'_> {
    /// The values of a key tile that the next subtile reads and this one does not.
    fn next_values<'a, T: Format>(
        &self,
        packed: &PackedTile<'a, T>,
        subtile: &Range<usize>,
        next: &Range<usize>,
    ) -> &'a [T] {
        let [now, then] = [subtile, next].map(|rows| self.evaluator.live(rows.clone()));
        let from = then.start.max(now.end);
        if now.is_empty() || from >= then.end {
            return &[];
        }
        let rows = from / T::WIDTH..then.end.div_ceil(T::WIDTH);
        &packed.v.data[rows.start * packed.v.depth..rows.end * packed.v.depth]
    }

    /// Adds one key tile to one subtile of query rows, whose queries are the first of `q`. Issues
    /// `prefetch` meanwhile.
    fn subtile<T: Format>(
        &mut self,
        call: &Call<'_>,
        q: Matrix<'_, T>,
        packed: &PackedTile<'_, T>,
        subtile: Range<usize>,
        mut prefetch: Prefetch<'_, T>,
    ) {
        let (dims, tiles) = (&call.dims, &call.tiles);
        let Self { evaluator, scores, weights, out, states, has_nonfinite, clock } = self;
        let keys = evaluator.live(subtile.clone());
        if keys.is_empty() {
            return;
        }
        let columns = keys.start / LANES * LANES..simd::padded(keys.end);
        let rows = 0..subtile.len();
        let part = Part { rows: rows.clone(), columns: columns.clone(), depth: 0..dims.dim };
        let part = part.in_elements::<T>();
        prefetch.issue();
        simd::product(scores, tiles.kv, q, packed.k_t, &part, Write::Times(call.scale));
        clock.lap(Stage::Products);

        evaluator.score(subtile.clone(), columns.clone(), scores, tiles.kv);
        clock.lap(Stage::Mods);

        prefetch.issue();
        let states = &mut states[subtile.clone()];
        let out = &mut out[subtile.start * tiles.dim_v..][..rows.len() * tiles.dim_v];
        // The accumulator of a row is undefined before its first score.
        let fresh = !*has_nonfinite && states.iter().all(RowState::is_fresh);
        if !fresh {
            let fresh = out.chunks_exact_mut(tiles.dim_v).zip(&*states);
            fresh.filter(|(_, state)| state.is_fresh()).for_each(|(row, _)| row.fill(0.0));
        }
        simd::online_softmax(scores, tiles.kv, columns.clone(), states);
        for (row, state) in out.chunks_exact_mut(tiles.dim_v).zip(states) {
            simd::rescale(row, state.factor);
        }
        clock.lap(Stage::Softmax);

        evaluator.apply_dropout(subtile, columns.clone(), scores, tiles.kv);
        clock.lap(Stage::Mods);

        let weights = T::to_a(scores, rows.len(), tiles.kv, columns, elements(weights));
        clock.lap(Stage::Softmax);
        let part = Part { rows, columns: 0..tiles.dim_v, depth: keys }.in_elements::<T>();
        prefetch.issue();
        if *has_nonfinite {
            nonfinite::add(out, tiles.dim_v, weights, packed.v, &part);
        } else {
            let write = if fresh { Write::Times(1.0) } else { Write::Add };
            simd::product(out, tiles.dim_v, weights, packed.v, &part, write);
        }
        clock.lap(Stage::Products);
    }

    /// The epilogue: divides by the denominator and writes the rows. Returns whether one may be
    /// non-finite because a weight of 0 was multiplied with a non-finite value.
    fn store(&mut self, call: &Call<'_>, task: &mut QueryTile<'_>, rows: usize) -> bool {
        let (dim, dim_v) = (call.tiles.dim_v, call.dims.dim_v);
        let out = self.out.chunks_exact_mut(dim).zip(self.states.iter());
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
        nonfinite::has_nonfinite(&self.out[..rows * dim], dim, sums)
    }
}
