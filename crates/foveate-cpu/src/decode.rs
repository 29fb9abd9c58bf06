//! The forward pass of few queries over many keys: generation from a KV cache.
//!
//! Every key and value serves a handful of query rows, so reading them bounds the pass. They are read
//! once, in place and in their dtype (unless their elements are not consecutive). The query heads of
//! a KV head are rows of one task; nothing is packed. There are too few heads to occupy all threads,
//! so the keys of a head are split over tasks (split-KV). The results of the splits are combined in
//! order, by their row maxima and denominators. The splits depend on the lengths only.

use std::ops::Range;

use foveate_problem::{ForwardArgs, Operands};
use foveate_tensor::{Slice, TensorRef};

use crate::call::{Call, head};
use crate::error::CpuError;
use crate::mods::Evaluator;
use crate::nonfinite;
use crate::pack;
use crate::pool::PoolBuffer;
use crate::simd::{self, RowState, Rows};
use crate::stages::{Clock, Stage};
use crate::tasks::{KvHead, OutputTiles, RowRange, run};

/// Query rows that see one tile of keys up to which keys are read in place. With more rows packed
/// products are faster, and products of pairs with fewer: measured for D 64 and 128 on two AVX-512
/// cores.
const MAX_ROWS: usize = 48;
const MAX_ROWS_OF_PAIRS: usize = 16;
/// The most query rows of a KV head, of which each tile of keys may be seen by a few alone, as where
/// batch entries share one cache.
const MAX_ROWS_OF_A_HEAD: usize = 512;
/// The most splits of a head's keys, and the fewest keys of a split.
const MAX_KV_SPLITS: usize = 64;
const MIN_SPLIT_KEYS: usize = 512;

/// The most splits of the keys of a head that so many query rows attend to. Every split keeps a result of
/// all rows, so that more rows than [`MAX_ROWS`] take fewer splits in the same memory.
fn most_splits(rows: usize) -> usize {
    (MAX_ROWS * MAX_KV_SPLITS / rows.max(MAX_ROWS)).max(1)
}

/// Whether `call` has few enough query rows for this module.
pub fn suits(call: &Call<'_>) -> bool {
    let few = |kv_head: &KvHead| {
        rows_of(call, kv_head) <= MAX_ROWS_OF_A_HEAD
            && rows_of_a_tile(call, kv_head) <= most_rows(call)
    };
    let one_tile = call.sequences.iter().all(|s| s.q_len <= call.tiles.q);
    one_tile && call.kv_heads.iter().all(few)
}

fn most_rows(call: &Call<'_>) -> usize {
    if call.pairs { MAX_ROWS_OF_PAIRS } else { MAX_ROWS }
}

/// Why `call` is not one for this module, where it is not.
pub fn declines(call: &Call<'_>) -> Option<String> {
    if suits(call) {
        return None;
    }
    let rows = call.kv_heads.iter().map(|kv_head| rows_of(call, kv_head)).max().unwrap_or(0);
    Some(format!(
        "up to {rows} query rows attend to a KV head; keys are read in place for up to {} at a tile \
         of keys, within one query tile ({})",
        most_rows(call),
        call.tiles.q
    ))
}

/// The most query rows that see one tile of keys of a KV head.
fn rows_of_a_tile(call: &Call<'_>, kv_head: &KvHead) -> usize {
    let all = rows_of(call, kv_head);
    if all <= most_rows(call) {
        return all;
    }
    let mut rows = vec![0; kv_head.keys.len.div_ceil(call.tiles.kv)];
    for (b, h) in call.heads_of(kv_head).filter(|&(b, _)| call.sequences[b].q_len > 0) {
        for (tile, _) in call.live(b, h).tiles(0, &(0..rows.len())) {
            rows[tile] += call.sequences[b].q_len;
        }
    }
    rows.into_iter().max().unwrap_or(0)
}

/// Query rows that attend to a KV head.
fn rows_of(call: &Call<'_>, kv_head: &KvHead) -> usize {
    call.heads_of(kv_head).map(|(b, _)| call.sequences[b].q_len).sum()
}

/// Keys of a split, whole tiles.
fn split_keys(call: &Call<'_>, kv_head: &KvHead) -> usize {
    let most = most_splits(rows_of(call, kv_head));
    let keys = kv_head.keys.len.div_ceil(most).max(MIN_SPLIT_KEYS);
    keys.next_multiple_of(call.tiles.kv)
}

/// A KV split: a range of keys of a KV head, and the buffer of its result.
struct DecodeSplit<'a> {
    kv_head: &'a KvHead,
    keys: Range<usize>,
    result: &'a mut [f32],
}

/// A query head of a KV head.
struct Head {
    b: usize,
    h: usize,
    /// Its query rows among those of the KV head.
    rows: Range<usize>,
}

impl Head {
    /// The key tiles of `range` that the head sees, and whether each is partial.
    fn live<'a>(
        &self,
        call: &'a Call<'_>,
        range: &'a Range<usize>,
    ) -> impl Iterator<Item = (usize, bool)> + use<'a> {
        let live = call.live(self.b, self.h);
        (!self.rows.is_empty()).then(|| live.tiles(0, range)).into_iter().flatten()
    }
}

/// A query head against a key tile.
struct HeadTile<'a> {
    /// Its query rows.
    rows: &'a Range<usize>,
    /// Whether the tile is partial; `None` when it is empty.
    partial: Option<bool>,
}

/// The result of a split, or of a whole KV head: for each row the maximum, the denominator relative
/// to it, and the output accumulator.
struct SplitResult<'a> {
    max: &'a mut [f32],
    sum: &'a mut [f32],
    out: &'a mut [f32],
}

impl<'a> SplitResult<'a> {
    fn elems(rows: usize, dim_v: usize) -> usize {
        rows * (dim_v + 2)
    }

    /// The result of no keys.
    fn empty(data: &'a mut [f32], rows: usize) -> Self {
        data.fill(0.0);
        let result = Self::of(data, rows);
        result.max.fill(f32::NEG_INFINITY);
        result
    }

    fn of(data: &'a mut [f32], rows: usize) -> Self {
        let (max, rest) = data.split_at_mut(rows);
        let (sum, out) = rest.split_at_mut(rows);
        Self { max, sum, out }
    }

    /// Adds the result of later keys.
    fn add(&mut self, other: &SplitResult<'_>, dim_v: usize) {
        for r in 0..self.max.len() {
            let (own, theirs) = (self.max[r], other.max[r]);
            let max = simd::larger(own, theirs);
            if max == f32::NEG_INFINITY {
                continue;
            }
            let (own, theirs) = ((own - max).exp(), (theirs - max).exp());
            // A factor of 0 takes nothing, not even infinity.
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

/// The workspace of a thread.
struct Scratch<'a> {
    /// One for each query head of a KV head.
    evaluators: Vec<Evaluator>,
    q: PoolBuffer<'a>,
    scores: PoolBuffer<'a>,
    /// Keys or values of a tile that cannot be read in place.
    copied: PoolBuffer<'a>,
    /// Whether some values are non-finite, so that a weight of 0 must not multiply them.
    has_nonfinite: bool,
    clock: Clock<'a>,
}

/// Runs the forward pass of `call`, which [`suits`].
pub fn forward(call: &Call<'_>, args: ForwardArgs<'_>) -> Result<(), CpuError> {
    let ForwardArgs { operands, out, lse, max_score } = args;
    let (tiles, dim_v) = (call.tiles, call.tiles.dim_v);
    let result = |kv_head: &KvHead| SplitResult::elems(rows_of(call, kv_head), dim_v);
    let splits = |kv_head: &KvHead| kv_head.keys.len.div_ceil(split_keys(call, kv_head)).max(1);
    let mut results = call.pool.alloc(call.kv_heads.iter().map(|u| result(u) * splits(u)).sum());
    let mut tasks = Vec::new();
    let mut rest = &mut results[..];
    for kv_head in &call.kv_heads {
        let step = split_keys(call, kv_head);
        for split in 0..splits(kv_head) {
            let (own, more) = rest.split_at_mut(result(kv_head));
            rest = more;
            let keys = split * step..kv_head.keys.len.min((split + 1) * step);
            tasks.push(DecodeSplit { kv_head, keys, result: own });
        }
    }
    let heads = call.kv_heads.iter().map(|u| call.heads_of(u).count()).max().unwrap_or(0);
    let rows = call.kv_heads.iter().map(|u| rows_of(call, u)).max().unwrap_or(0);
    let scratch = || Scratch {
        evaluators: (0..heads).map(|_| call.mods.evaluator([tiles.q, tiles.kv], None)).collect(),
        q: call.pool.alloc(rows * tiles.dim),
        scores: call.pool.alloc(MAX_ROWS * tiles.kv),
        copied: call.pool.alloc(tiles.kv * tiles.dim.max(dim_v)),
        has_nonfinite: false,
        clock: Clock::new(call.profile),
    };
    run(tasks.into_iter(), scratch, |scratch, split| attend(call, &operands, scratch, split));

    let ranges: Vec<RowRange> = call.sequences.iter().map(RowRange::queries).collect();
    let mut out = OutputTiles::split(out, &ranges, |len| len);
    let mut lse = OutputTiles::split(lse, &ranges, |len| len);
    let mut max_score = max_score.map(|t| OutputTiles::split(t, &ranges, |len| len));
    let mut rest = &mut results[..];
    for kv_head in &call.kv_heads {
        let (own, more) = rest.split_at_mut(result(kv_head) * splits(kv_head));
        rest = more;
        let (first, later) = own.split_at_mut(result(kv_head));
        let mut total = SplitResult::of(first, rows_of(call, kv_head));
        for split in later.chunks_exact_mut(result(kv_head).max(1)) {
            total.add(&SplitResult::of(split, rows_of(call, kv_head)), dim_v);
        }
        for Head { b, h, rows } in heads_in(call, kv_head).filter(|head| !head.rows.is_empty()) {
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

/// The query heads of a KV head, in order.
fn heads_in(call: &Call<'_>, kv_head: &KvHead) -> impl Iterator<Item = Head> {
    let mut next = 0;
    call.heads_of(kv_head).map(move |(b, h)| {
        let rows = next..next + call.sequences[b].q_len;
        next = rows.end;
        Head { b, h, rows }
    })
}

/// Keys or values of a KV head: in place, when their rows are dense and at one distance; else copied
/// to `buffer`, so that every layout of the same numbers gives the same bits.
fn rows_in<'a>(
    operands: &Operands<'a>,
    t: TensorRef<'a>,
    kv_head: &KvHead,
    keys: &Range<usize>,
    dim: usize,
    buffer: &'a mut [f32],
) -> Rows<'a> {
    let (layout, count) = (t.layout(), keys.len());
    let place = |r| operands.locate_key(kv_head.keys.batch, kv_head.keys.start + keys.start + r);
    let ([b, first], [last_b, last]) = (place(0), place(count - 1));
    let follow = operands.pages.is_none() || (b, first + count - 1) == (last_b, last);
    let grouped = layout.groups.is_some_and(|groups| groups.axis >= 2);
    if layout.strides[3] == 1
        && layout.shape[3] == dim
        && !grouped
        && follow
        && count <= t.shape()[2]
    {
        let first = layout.at([b, kv_head.h_kv, first, 0]);
        return Rows { data: t.data(), first, stride: layout.strides[2], count };
    }
    pack::load_keys(operands, t, kv_head, keys, dim, buffer);
    Rows { data: Slice::F32(buffer), first: 0, stride: dim, count }
}

/// Computes one split: all query rows of its KV head against its keys.
fn attend(
    call: &Call<'_>,
    operands: &Operands<'_>,
    scratch: &mut Scratch<'_>,
    mut split: DecodeSplit<'_>,
) {
    let (tiles, kv_head) = (call.tiles, split.kv_head);
    let heads: Vec<Head> = heads_in(call, kv_head).collect();
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
    scratch.has_nonfinite = false;
    let result = add_keys(call, operands, &heads, scratch, &mut split);
    if nonfinite::has_nonfinite(result.out, tiles.dim_v, result.sum.iter().copied()) {
        scratch.has_nonfinite = true;
        add_keys(call, operands, &heads, scratch, &mut split);
    }
    scratch.evaluators.iter_mut().for_each(|evaluator| call.note(evaluator));
}

/// Adds every key tile of a split to its result, which is cleared first.
fn add_keys<'a>(
    call: &Call<'_>,
    operands: &Operands<'_>,
    heads: &[Head],
    scratch: &mut Scratch<'_>,
    split: &'a mut DecodeSplit<'_>,
) -> SplitResult<'a> {
    let tiles = call.tiles;
    let mut result = SplitResult::empty(split.result, heads.last().map_or(0, |head| head.rows.end));
    let range = split.keys.start / tiles.kv..split.keys.end.div_ceil(tiles.kv);
    let mut live: Vec<_> = heads.iter().map(|head| head.live(call, &range).peekable()).collect();
    for tile in range.clone() {
        let keys = tile * tiles.kv..split.keys.end.min((tile + 1) * tiles.kv);
        // Consecutive heads that see the tile are rows of one product.
        let head_tiles: Vec<HeadTile<'_>> = (heads.iter().zip(&mut live))
            .map(|(head, live)| {
                let partial = live.next_if(|&(t, _)| t == tile).map(|(_, partial)| partial);
                HeadTile { rows: &head.rows, partial }
            })
            .collect();
        for (i, heads) in head_tiles
            .chunk_by(|a, b| a.partial.is_some() == b.partial.is_some())
            .scan(0, |next, heads| {
                *next += heads.len();
                Some((*next - heads.len(), heads))
            })
        {
            if heads[0].partial.is_some() {
                add_tile(call, operands, split.kv_head, &keys, (i, heads), scratch, &mut result);
            }
        }
    }
    result
}

/// Adds a key tile to the result of `heads`, which see it; the first of them is head `at` of the
/// KV head.
fn add_tile(
    call: &Call<'_>,
    operands: &Operands<'_>,
    kv_head: &KvHead,
    keys: &Range<usize>,
    (at, heads): (usize, &[HeadTile<'_>]),
    scratch: &mut Scratch<'_>,
    result: &mut SplitResult<'_>,
) {
    let (tiles, width) = (call.tiles, simd::padded(keys.len()));
    let Scratch { evaluators, q, scores, copied, has_nonfinite, clock } = scratch;
    let (first, end) = (heads[0].rows.start, heads[heads.len() - 1].rows.end);
    let q = &q[first * tiles.dim..end * tiles.dim];
    let k = rows_in(operands, operands.k, kv_head, keys, tiles.dim, copied);
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
        (state.max, state.sum) = (result.max[r], result.sum[r]);
    }
    simd::online_softmax(scores, tiles.kv, 0..width, states);
    let out = &mut result.out[first * tiles.dim_v..end * tiles.dim_v];
    for ((r, state), row) in (first..end).zip(states).zip(out.chunks_exact_mut(tiles.dim_v)) {
        (result.max[r], result.sum[r]) = (state.max, state.sum);
        simd::rescale(row, state.factor);
    }
    clock.lap(Stage::Softmax);

    for (own, evaluator) in heads.iter().zip(&evaluators[at..]) {
        let p = &mut scores[(own.rows.start - first) * tiles.kv..][..own.rows.len() * tiles.kv];
        evaluator.apply_dropout(0..own.rows.len(), 0..width, p, tiles.kv);
    }
    clock.lap(Stage::Mods);

    // Values that no row sees are not read.
    let live = heads.iter().zip(&evaluators[at..]).map(|(own, e)| e.live(0..own.rows.len()));
    let Some(live) = live.filter(|keys| !keys.is_empty()).reduce(hull) else { return };
    let keys = keys.start + live.start..keys.start + live.end;
    let v = rows_in(operands, operands.v, kv_head, &keys, tiles.dim_v, copied);
    let p = &scores[live.start..];
    if *has_nonfinite {
        nonfinite::add_in_place(out, tiles.dim_v, p, tiles.kv, v);
    } else {
        simd::add_in_place(out, tiles.dim_v, p, tiles.kv, v);
    }
    clock.lap(Stage::Products);
}

/// The smallest range that has both.
fn hull(a: Range<usize>, b: Range<usize>) -> Range<usize> {
    a.start.min(b.start)..a.end.max(b.end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_splits_take_no_more_memory_for_more_rows() {
        for rows in 1..=MAX_ROWS_OF_A_HEAD {
            let splits = most_splits(rows);
            assert!(splits >= 1 && rows * splits <= MAX_ROWS * MAX_KV_SPLITS, "{rows}");
            assert!(rows > MAX_ROWS || splits == MAX_KV_SPLITS, "{rows}");
        }
    }
}
