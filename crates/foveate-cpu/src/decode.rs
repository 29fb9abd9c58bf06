//! The forward pass of few queries over many keys: generation from a cache.
//!
//! Every key and value is needed for a handful of query rows, so reading them bounds the pass.
//! They are read once, where they lie and in their dtype (unless their elements are no
//! neighbours): the query heads that share a key/value head are rows of one task, nothing is
//! packed. The keys of a head are split over tasks, since there are too few heads to share among
//! threads, and the parts are combined in their order by the maxima and denominators that they
//! were made with. How they are split depends on the
//! lengths only.

use std::ops::Range;

use foveate_problem::{ForwardArgs, Operands};
use foveate_tensor::{Slice, TensorRef};

use crate::call::{Call, head};
use crate::error::CpuError;
use crate::mods::Evaluator;
use crate::pack;
use crate::seen;
use crate::simd::{self, RowState, Rows};
use crate::stages::{Clock, Stage};
use crate::work::{Lent, Pieces, Span, Unit, run};

/// Query rows of a key/value head up to which keys are read in place. With more of them packed
/// products are faster, and earlier so where they are products of pairs: measured for D 64 and 128
/// on two AVX-512 cores.
const MAX_ROWS: usize = 48;
const MAX_ROWS_OF_PAIRS: usize = 16;
/// Parts that the keys of a head are split into at most, and keys of a part at least.
const PARTS: usize = 64;
const MIN_KEYS: usize = 512;

/// Whether the pass of `call` is one for this module.
pub fn suits(call: &Call<'_>) -> bool {
    let most = if call.pairs { MAX_ROWS_OF_PAIRS } else { MAX_ROWS };
    let few = |unit: &Unit| rows_of(call, unit) <= most;
    let one_tile = call.sequences.iter().all(|s| s.q_len <= call.tiles.q);
    one_tile && call.units.iter().all(few)
}

/// Query rows that attend to a unit.
fn rows_of(call: &Call<'_>, unit: &Unit) -> usize {
    call.heads_of(unit).map(|(b, _)| call.sequences[b].q_len).sum()
}

/// Keys of a part, whole tiles.
fn part_keys(call: &Call<'_>, unit: &Unit) -> usize {
    let keys = unit.keys.len.div_ceil(PARTS).max(MIN_KEYS);
    keys.next_multiple_of(call.tiles.kv)
}

/// Some keys of a unit, and where its share of the results goes.
struct Part<'a> {
    unit: &'a Unit,
    keys: Range<usize>,
    share: &'a mut [f32],
}

/// A head of a unit: its query rows among those of the unit.
struct Row {
    b: usize,
    h: usize,
    rows: Range<usize>,
}

impl Row {
    /// What the head sees of a key tile.
    fn sees(&self, call: &Call<'_>, tile: usize) -> Seen<'_> {
        let live = call.live(self.b, self.h);
        let kind = (!self.rows.is_empty()).then(|| live.tiles(0, &(tile..tile + 1)).next());
        Seen { rows: &self.rows, partial: kind.flatten().map(|(_, partial)| partial) }
    }
}

/// What a head sees of a key tile.
struct Seen<'a> {
    /// Its query rows.
    rows: &'a Range<usize>,
    /// Whether the mask decides inside; `None` when it sees nothing of it.
    partial: Option<bool>,
}

/// The share of a part, or of a whole unit: for each row the largest score, the denominator
/// relative to it, and the output before it is divided.
struct Share<'a> {
    max: &'a mut [f32],
    sum: &'a mut [f32],
    out: &'a mut [f32],
}

impl<'a> Share<'a> {
    fn elems(rows: usize, dim_v: usize) -> usize {
        rows * (dim_v + 2)
    }

    /// A share that has seen nothing.
    fn empty(data: &'a mut [f32], rows: usize) -> Self {
        data.fill(0.0);
        let share = Self::of(data, rows);
        share.max.fill(f32::NEG_INFINITY);
        share
    }

    fn of(data: &'a mut [f32], rows: usize) -> Self {
        let (max, rest) = data.split_at_mut(rows);
        let (sum, out) = rest.split_at_mut(rows);
        Self { max, sum, out }
    }

    /// Adds the share of later keys.
    fn add(&mut self, other: &Share<'_>, dim_v: usize) {
        for r in 0..self.max.len() {
            let (own, theirs) = (self.max[r], other.max[r]);
            // NaN when either is.
            let max = if theirs > own || theirs.is_nan() { theirs } else { own };
            if max == f32::NEG_INFINITY {
                continue;
            }
            let (own, theirs) = ((own - max).exp(), (theirs - max).exp());
            // A weight of 0 takes nothing, not even of infinity.
            let times = |x: f32, weight: f32| if weight == 0.0 { 0.0 } else { x * weight };
            self.max[r] = max;
            self.sum[r] = self.sum[r] * own + other.sum[r] * theirs;
            let into = self.out[r * dim_v..][..dim_v].iter_mut();
            for (x, &y) in into.zip(&other.out[r * dim_v..][..dim_v]) {
                *x = times(*x, own) + times(y, theirs);
            }
        }
    }
}

/// What a thread works in.
struct Scratch<'a> {
    /// One for each head of a unit.
    evaluators: Vec<Evaluator>,
    q: Lent<'a>,
    scores: Lent<'a>,
    /// Keys or values of a tile that cannot be read in place.
    copied: Lent<'a>,
    /// Whether some values are not finite, which rows without a weight for them must not take.
    careful: bool,
    clock: Clock<'a>,
}

/// Runs the forward pass of `call`, which [`suits`].
pub fn forward(call: &Call<'_>, args: ForwardArgs<'_>) -> Result<(), CpuError> {
    let ForwardArgs { operands, out, lse, max_score } = args;
    let (tiles, dim_v) = (call.tiles, call.tiles.dim_v);
    let share = |unit: &Unit| Share::elems(rows_of(call, unit), dim_v);
    let parts = |unit: &Unit| unit.keys.len.div_ceil(part_keys(call, unit)).max(1);
    let mut shares = call.pool.lend(call.units.iter().map(|u| share(u) * parts(u)).sum());
    let mut tasks = Vec::new();
    let mut rest = &mut shares[..];
    for unit in &call.units {
        let step = part_keys(call, unit);
        for part in 0..parts(unit) {
            let (own, more) = rest.split_at_mut(share(unit));
            rest = more;
            let keys = part * step..unit.keys.len.min((part + 1) * step);
            tasks.push(Part { unit, keys, share: own });
        }
    }
    let heads = call.units.iter().map(|u| call.heads_of(u).count()).max().unwrap_or(0);
    let scratch = || Scratch {
        evaluators: (0..heads).map(|_| call.mods.evaluator([tiles.q, tiles.kv], None)).collect(),
        q: call.pool.lend(MAX_ROWS * tiles.dim),
        scores: call.pool.lend(MAX_ROWS * tiles.kv),
        copied: call.pool.lend(tiles.kv * tiles.dim.max(dim_v)),
        careful: false,
        clock: Clock::new(call.profile),
    };
    run(tasks.into_iter(), scratch, |scratch, part| attend(call, &operands, scratch, part));

    let spans: Vec<Span> = call.sequences.iter().map(Span::queries).collect();
    let mut out = Pieces::cut(out, &spans, |len| len);
    let mut lse = Pieces::cut(lse, &spans, |len| len);
    let mut max_score = max_score.map(|t| Pieces::cut(t, &spans, |len| len));
    let mut rest = &mut shares[..];
    for unit in &call.units {
        let (own, more) = rest.split_at_mut(share(unit) * parts(unit));
        rest = more;
        let (first, later) = own.split_at_mut(share(unit));
        let mut total = Share::of(first, rows_of(call, unit));
        for part in later.chunks_exact_mut(share(unit).max(1)) {
            total.add(&Share::of(part, rows_of(call, unit)), dim_v);
        }
        for Row { b, h, rows } in heads_in(call, unit).filter(|head| !head.rows.is_empty()) {
            let (mut out, mut lse) = (out.take(b, h, 0), lse.take(b, h, 0));
            let mut max_score = max_score.as_mut().map(|m| m.take(b, h, 0));
            for (i, r) in rows.enumerate() {
                let row = &mut total.out[r * dim_v..][..dim_v];
                let own = call.divide(h, total.max[r], total.sum[r], row);
                out.write_row(0, 0, i, &row[..call.dims.dim_v], false);
                lse.write([0, 0, i], own.into());
                if let Some(max_score) = &mut max_score {
                    max_score.write([0, 0, i], total.max[r].into());
                }
            }
        }
    }
    call.finish()
}

/// The heads of a unit, in order.
fn heads_in(call: &Call<'_>, unit: &Unit) -> impl Iterator<Item = Row> {
    let mut next = 0;
    call.heads_of(unit).map(move |(b, h)| {
        let rows = next..next + call.sequences[b].q_len;
        next = rows.end;
        Row { b, h, rows }
    })
}

/// Some keys or values of a unit: where they lie, when that is in rows of neighbours, one distance
/// apart; else copied to `buffer`, so that every layout of the same numbers gives the same bits.
fn rows_in<'a>(
    operands: &Operands<'a>,
    t: TensorRef<'a>,
    unit: &Unit,
    keys: &Range<usize>,
    dim: usize,
    buffer: &'a mut [f32],
) -> Rows<'a> {
    let (layout, count) = (t.layout(), keys.len());
    let place = |r| operands.key_place(unit.keys.batch, unit.keys.start + keys.start + r);
    let ([b, first], [last_b, last]) = (place(0), place(count - 1));
    let follow = operands.pages.is_none() || (b, first + count - 1) == (last_b, last);
    let folded = layout.fold.is_some_and(|fold| fold.axis >= 2);
    if layout.strides[3] == 1
        && layout.shape[3] == dim
        && !folded
        && follow
        && count <= t.shape()[2]
    {
        let first = layout.at([b, unit.h_kv, first, 0]);
        return Rows { data: t.data(), first, stride: layout.strides[2], count };
    }
    pack::load_keys(operands, t, unit, keys, dim, buffer);
    Rows { data: Slice::F32(buffer), first: 0, stride: dim, count }
}

/// One part: all query rows of its unit against its keys, tile by tile.
fn attend(call: &Call<'_>, operands: &Operands<'_>, scratch: &mut Scratch<'_>, mut part: Part<'_>) {
    let (tiles, unit) = (call.tiles, part.unit);
    let heads: Vec<Row> = heads_in(call, unit).collect();
    let rows = heads.last().map_or(0, |head| head.rows.end);
    scratch.clock.start();
    for (own, evaluator) in heads.iter().zip(&mut scratch.evaluators) {
        let s = &call.sequences[own.b];
        let into = &mut scratch.q[own.rows.start * tiles.dim..][..s.q_len * tiles.dim];
        let at = [s.q_batch, own.h, s.q_start];
        pack::load_rows(operands.q, at, s.q_len, tiles.dim, into);
        evaluator.enter(head(&call.dims, s, own.h));
    }
    simd::scale(&mut scratch.q[..rows * tiles.dim], call.scale);
    scratch.clock.lap(Stage::Packing);
    scratch.careful = false;
    let share = add_keys(call, operands, &heads, scratch, &mut part);
    if seen::is_tainted(share.out, tiles.dim_v, share.sum.iter().copied()) {
        scratch.careful = true;
        add_keys(call, operands, &heads, scratch, &mut part);
    }
    scratch.evaluators.iter_mut().for_each(|evaluator| call.note(evaluator));
}

/// Every key tile of a part, added to its share, which is empty before.
fn add_keys<'a>(
    call: &Call<'_>,
    operands: &Operands<'_>,
    heads: &[Row],
    scratch: &mut Scratch<'_>,
    part: &'a mut Part<'_>,
) -> Share<'a> {
    let tiles = call.tiles;
    let mut share = Share::empty(part.share, heads.last().map_or(0, |head| head.rows.end));
    for tile in part.keys.start / tiles.kv..part.keys.end.div_ceil(tiles.kv) {
        let keys = tile * tiles.kv..part.keys.end.min((tile + 1) * tiles.kv);
        // Neighbouring heads that see the tile go through the products together.
        let seen: Vec<Seen<'_>> = heads.iter().map(|head| head.sees(call, tile)).collect();
        for (i, heads) in seen.chunk_by(|a, b| a.partial.is_some() == b.partial.is_some()).scan(
            0,
            |next, heads| {
                *next += heads.len();
                Some((*next - heads.len(), heads))
            },
        ) {
            if heads[0].partial.is_some() {
                add_tile(call, operands, part.unit, &keys, (i, heads), scratch, &mut share);
            }
        }
    }
    share
}

/// Adds a key tile to the share of `heads`, which see it; the first of them is head `at` of the
/// unit.
fn add_tile(
    call: &Call<'_>,
    operands: &Operands<'_>,
    unit: &Unit,
    keys: &Range<usize>,
    (at, heads): (usize, &[Seen<'_>]),
    scratch: &mut Scratch<'_>,
    share: &mut Share<'_>,
) {
    let (tiles, width) = (call.tiles, simd::padded(keys.len()));
    let Scratch { evaluators, q, scores, copied, careful, clock } = scratch;
    let (first, end) = (heads[0].rows.start, heads[heads.len() - 1].rows.end);
    let q = &q[first * tiles.dim..end * tiles.dim];
    let k = rows_in(operands, operands.k, unit, keys, tiles.dim, copied);
    simd::scores_in_place(scores, tiles.kv, q, tiles.dim, k);
    clock.lap(Stage::Products);

    for (own, evaluator) in heads.iter().zip(&mut evaluators[at..]) {
        let (rows, partial) = (0..own.rows.len(), own.partial == Some(true));
        evaluator.tile(rows.clone(), keys.clone(), partial);
        let scores = &mut scores[(own.rows.start - first) * tiles.kv..][..rows.len() * tiles.kv];
        evaluator.score(rows, 0..width, scores, tiles.kv);
    }
    clock.lap(Stage::Mods);

    let mut states = [RowState::START; MAX_ROWS];
    let states = &mut states[..end - first];
    for (r, state) in (first..end).zip(&mut *states) {
        (state.max, state.sum) = (share.max[r], share.sum[r]);
    }
    simd::soften(scores, tiles.kv, 0..width, states);
    let out = &mut share.out[first * tiles.dim_v..end * tiles.dim_v];
    for ((r, state), row) in (first..end).zip(states).zip(out.chunks_exact_mut(tiles.dim_v)) {
        (share.max[r], share.sum[r]) = (state.max, state.sum);
        simd::reweigh(row, state.factor);
    }
    clock.lap(Stage::Softmax);

    for (own, evaluator) in heads.iter().zip(&evaluators[at..]) {
        let p = &mut scores[(own.rows.start - first) * tiles.kv..][..own.rows.len() * tiles.kv];
        evaluator.drop_out(0..own.rows.len(), 0..width, p, tiles.kv);
    }
    clock.lap(Stage::Mods);

    // Values that no row sees are not read.
    let seen = heads.iter().zip(&evaluators[at..]).map(|(own, e)| e.live(0..own.rows.len()));
    let Some(seen) = seen.filter(|keys| !keys.is_empty()).reduce(hull) else { return };
    let keys = keys.start + seen.start..keys.start + seen.end;
    let v = rows_in(operands, operands.v, unit, &keys, tiles.dim_v, copied);
    let p = &scores[seen.start..];
    if *careful {
        seen::add_in_place(out, tiles.dim_v, p, tiles.kv, v);
    } else {
        simd::add_in_place(out, tiles.dim_v, p, tiles.kv, v);
    }
    clock.lap(Stage::Products);
}

/// The smallest range that has both.
fn hull(a: Range<usize>, b: Range<usize>) -> Range<usize> {
    a.start.min(b.start)..a.end.max(b.end)
}
