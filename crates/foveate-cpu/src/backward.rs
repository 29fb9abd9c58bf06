//! The backward pass: five products a tile, no atomics.
//!
//! With `p = exp(s - lse)` recomputed from q and k, and `delta = Σ d_out·out - d_lse` of each row:
//!
//! ```text
//! s  = q·kᵀ        p = exp(score(s) - lse)
//! dp = d_out·vᵀ    ds = p·(dp - delta)·∂score/∂s
//! dv += pᵀ·d_out   dk += dsᵀ·q   dq += ds·k
//! ```
//!
//! A task owns a *lane*: a range of keys of one key/value head. It goes through its keys in
//! chunks that stay in the second-level cache with their dk and dv, and for each chunk over all
//! query rows of all heads (and sequences) that see it. So dk and dv are summed in one place, in
//! one order, and written once. dq of a row gets a part from every lane; a head has at most
//! eight, each with its own f32 dq, added up in order afterwards. The number of lanes depends on
//! the problem only. That is the price of five products instead of seven without atomics: at
//! most eight f32 copies of dq for the heads of a wave, O(S).

use foveate_problem::BackwardArgs;
use foveate_tensor::{TensorMut, TensorRef};

use crate::call::{Call, head};
use crate::captures::{CaptureSums, Slot};
use crate::error::CpuError;
use crate::huge::shares;
use crate::mods::Evaluator;
use crate::pack::{self, Packed};
use crate::simd::{self, LANES, Matrix, Panels, Part, STRIP};
use crate::work::{Pieces, Span, Unit, key_spans, run, waves};

/// Statistics of the rows of a head: lse (`+∞` for an empty row, whose every `p` is then 0),
/// `delta`, and the [`shares`] of what `p` is, which join `d_out` and `delta` instead of `p`.
struct Statistics<'a> {
    lse: &'a [f32],
    delta: &'a [f32],
    share: &'a [f32],
}

/// A range of keys of a unit, and where their gradients go.
struct Task<'a> {
    /// Unit of the wave.
    unit: usize,
    /// First key.
    first_key: usize,
    cost: usize,
    dk: TensorMut<'a>,
    dv: TensorMut<'a>,
    /// This lane's part of dq, for each head in order of [`Call::heads_of`].
    dq: &'a mut [f32],
}

/// Where things of a wave's units lie in its buffers.
struct Places {
    /// First row of each unit's heads, in the row statistics.
    rows: Vec<usize>,
    /// Rows of all heads of a unit.
    unit_rows: Vec<usize>,
    /// First float of each unit's parts of dq.
    dq: Vec<usize>,
    lanes: Vec<usize>,
}

struct Scratch {
    evaluator: Evaluator,
    q: Vec<f32>,
    d_out: Vec<f32>,
    /// `s`, then `p`.
    p: Vec<f32>,
    /// `dp`, then `ds`.
    ds: Vec<f32>,
    dk: Vec<f32>,
    dv: Vec<f32>,
}

/// Runs the backward pass of `call`.
pub fn backward(call: &Call<'_>, args: BackwardArgs<'_>) -> Result<(), CpuError> {
    let BackwardArgs { operands, out, lse, d_out, d_lse, dq, dk, dv, accumulate, .. } = args;
    let tiles = call.tiles;
    let spans: Vec<Span> = call.sequences.iter().map(Span::queries).collect();
    let keys = key_spans(&call.dims, &call.sequences);
    let lane_len = |len: usize| tiles.lane(len, call.units.len());
    let mut dq = Pieces::cut(dq, &spans, |_| tiles.q);
    let mut dk = Pieces::cut(dk, &keys, lane_len);
    let mut dv = Pieces::cut(dv, &keys, lane_len);
    let mut captures = CaptureSums::new(call.mods, args.d_captures, accumulate)?;
    let captures_wanted = captures.wanted();
    let mut d_sink = vec![0.0; call.dims.heads_q];

    let lanes = |unit: &Unit| unit.keys.len.div_ceil(lane_len(unit.keys.len));
    let rows = |unit: &Unit| rows_of(call, unit);
    for wave in waves(&call.units, call.wave_bytes, |unit| wave_elems(call, unit)) {
        let places = Places::new(wave, rows, lanes, tiles.dim);
        let elems = wave.iter().map(|u| pack::elems(&tiles, u.keys.len, true)).sum();
        let mut blocks = call.pool.lend(elems);
        let packed = Packed::all(&operands, wave, tiles, &mut blocks);
        let total_rows: usize = places.unit_rows.iter().sum();
        let mut statistics = call.pool.take(3 * total_rows);
        let (share_rows, rest) = statistics.split_at_mut(total_rows);
        let (lse_rows, delta_rows) = rest.split_at_mut(total_rows);
        shares(call, wave, &packed, operands.q, lse, share_rows);
        let sources = Sources { out, lse, d_out, d_lse };
        row_statistics(call, wave, sources, share_rows, lse_rows, delta_rows, &mut d_sink);
        let statistics_of = |row: usize, len: usize| Statistics {
            lse: &lse_rows[row..row + len],
            delta: &delta_rows[row..row + len],
            share: &share_rows[row..row + len],
        };

        let mut parts = call.pool.take(places.dq_elems(tiles.dim));
        let mut rest = &mut parts[..];
        let mut tasks = Vec::new();
        for (u, unit) in wave.iter().enumerate() {
            let len = lane_len(unit.keys.len);
            for lane in 0..places.lanes[u] {
                let (own, more) = rest.split_at_mut(places.unit_rows[u] * tiles.dim);
                rest = more;
                let first_key = lane * len;
                let end = (first_key + len).min(unit.keys.len);
                let range = first_key / tiles.kv..end.div_ceil(tiles.kv);
                let mut cost = 0;
                for (b, h) in call.heads_of(unit) {
                    let tiles = 0..call.sequences[b].q_len.div_ceil(tiles.q);
                    cost += tiles.map(|t| call.live(b, h).count(t, &range)).sum::<usize>();
                }
                tasks.push(Task {
                    unit: u,
                    first_key,
                    cost,
                    dk: dk.take(unit.span, unit.h_kv, lane),
                    dv: dv.take(unit.span, unit.h_kv, lane),
                    dq: own,
                });
            }
        }
        tasks.sort_by_key(|t| std::cmp::Reverse(t.cost));
        let chunk = tiles.chunk * tiles.kv;
        let scratch = || Scratch {
            evaluator: call.mods.evaluator([tiles.q, tiles.kv], Some(captures_wanted)),
            q: vec![0.0; tiles.q * tiles.dim],
            d_out: vec![0.0; tiles.q * tiles.dim_v],
            p: vec![0.0; tiles.q * tiles.kv],
            ds: vec![0.0; tiles.q * tiles.kv],
            dk: vec![0.0; chunk * tiles.dim],
            dv: vec![0.0; chunk * tiles.dim_v],
        };
        let lane = Lane {
            call,
            wave,
            packed: &packed,
            places: &places,
            statistics: &statistics_of,
            q: operands.q,
            d_out,
            accumulate,
        };
        run(captures.share(tasks), scratch, |s, (slot, tasks)| {
            for task in tasks {
                lane.run(s, slot, task);
            }
        });

        let mut rows = Vec::new();
        for (u, unit) in wave.iter().enumerate() {
            let mut row = 0;
            for (b, h) in call.heads_of(unit) {
                let len = call.sequences[b].q_len;
                for tile in 0..len.div_ceil(tiles.q) {
                    rows.push((u, row + tile * tiles.q, dq.take(b, h, tile)));
                }
                row += len;
            }
        }
        let add_up = |sum: &mut Vec<f32>, (u, row, mut piece): (usize, usize, TensorMut<'_>)| {
            let stride = places.unit_rows[u] * tiles.dim;
            for r in 0..piece.shape()[2] {
                let at = places.dq[u] + (row + r) * tiles.dim;
                sum.fill(0.0);
                for lane in 0..places.lanes[u] {
                    simd::add(sum, &parts[at + lane * stride..][..tiles.dim]);
                }
                simd::scale(sum, call.scale);
                piece.write_row(0, 0, r, &sum[..call.dims.dim], accumulate);
            }
        };
        run(rows.into_iter(), || vec![0.0; tiles.dim], add_up);
        call.pool.give(parts);
        call.pool.give(statistics);
    }
    captures.store(accumulate);
    if let Some(into) = args.d_sink {
        for (into, own) in into.iter_mut().zip(d_sink) {
            *into = if accumulate { *into + own as f32 } else { own as f32 };
        }
    }
    call.finish()
}

/// Query rows of all heads of a unit.
fn rows_of(call: &Call<'_>, unit: &Unit) -> usize {
    call.heads_of(unit).map(|(b, _)| call.sequences[b].q_len).sum()
}

/// Floats of workspace a unit takes: packed keys, parts of dq, row statistics.
pub fn wave_elems(call: &Call<'_>, unit: &Unit) -> usize {
    let (tiles, len) = (&call.tiles, unit.keys.len);
    let lanes = len.div_ceil(tiles.lane(len, call.units.len()));
    pack::elems(tiles, len, true) + rows_of(call, unit) * (lanes * tiles.dim + 3)
}

impl Places {
    fn new(
        wave: &[Unit],
        rows: impl Fn(&Unit) -> usize,
        lanes: impl Fn(&Unit) -> usize,
        dim: usize,
    ) -> Self {
        let mut places = Self { rows: vec![], unit_rows: vec![], dq: vec![], lanes: vec![] };
        let (mut row, mut at) = (0, 0);
        for unit in wave {
            let (own, lanes) = (rows(unit), lanes(unit));
            places.rows.push(row);
            places.unit_rows.push(own);
            places.dq.push(at);
            places.lanes.push(lanes);
            row += own;
            at += own * lanes * dim;
        }
        places
    }

    /// Floats of all parts of dq.
    fn dq_elems(&self, dim: usize) -> usize {
        self.unit_rows.iter().zip(&self.lanes).map(|(rows, lanes)| rows * lanes * dim).sum()
    }
}

/// What the row statistics are made of.
#[derive(Clone, Copy)]
struct Sources<'a> {
    out: TensorRef<'a>,
    lse: TensorRef<'a, 3>,
    d_out: TensorRef<'a>,
    d_lse: Option<TensorRef<'a, 3>>,
}

/// Fills lse and delta of every row of a wave, and adds what each row gives the sinks.
fn row_statistics(
    call: &Call<'_>,
    wave: &[Unit],
    from: Sources<'_>,
    mut share_rows: &[f32],
    mut lse_rows: &mut [f32],
    mut delta_rows: &mut [f32],
    d_sink: &mut [f64],
) {
    let heads: Vec<(usize, usize)> = wave.iter().flat_map(|u| call.heads_of(u)).collect();
    let mut parts = vec![0.0; heads.len()];
    let mut tasks = Vec::with_capacity(heads.len());
    for (&(b, h), part) in heads.iter().zip(&mut parts) {
        let len = call.sequences[b].q_len;
        let (share, lse, delta);
        (share, share_rows) = share_rows.split_at(len);
        (lse, lse_rows) = lse_rows.split_at_mut(len);
        (delta, delta_rows) = delta_rows.split_at_mut(len);
        tasks.push((b, h, share, lse, delta, part));
    }
    let dim_v = call.tiles.dim_v;
    run(
        tasks.into_iter(),
        || (vec![0.0; dim_v], vec![0.0; dim_v]),
        |(out, d_out), (b, h, share, lse, delta, d_sink)| {
            let s = &call.sequences[b];
            let own = ..call.dims.dim_v;
            for r in 0..s.q_len {
                let at = [s.q_batch, h, s.q_start + r];
                lse[r] = from.lse.get_f64(at) as f32;
                if lse[r] == f32::NEG_INFINITY {
                    (lse[r], delta[r]) = (f32::INFINITY, 0.0);
                    continue;
                }
                from.out.load_row(at[0], at[1], at[2], &mut out[own]);
                from.d_out.load_row(at[0], at[1], at[2], &mut d_out[own]);
                let d_lse = from.d_lse.map_or(0.0, |t| t.get_f64(at) as f32);
                delta[r] = (simd::dot(out, d_out) - d_lse) * share[r];
                if let Some(sink) = call.sink {
                    *d_sink -= f64::from((sink[h] - lse[r]).exp() * delta[r]);
                }
            }
        },
    );
    for ((_, h), part) in heads.into_iter().zip(parts) {
        d_sink[h] += part;
    }
}

/// What all tasks of a wave read.
struct Lane<'a, F> {
    call: &'a Call<'a>,
    wave: &'a [Unit],
    packed: &'a Packed<'a>,
    places: &'a Places,
    statistics: &'a F,
    q: TensorRef<'a>,
    d_out: TensorRef<'a>,
    accumulate: bool,
}

impl<'a, F: Fn(usize, usize) -> Statistics<'a>> Lane<'a, F> {
    fn run(&self, scratch: &mut Scratch, captures: &mut Slot, mut task: Task<'_>) {
        let (call, tiles, unit) = (self.call, self.call.tiles, &self.wave[task.unit]);
        let end = task.first_key + task.dk.shape()[2];
        task.dq.fill(0.0);
        let chunk = tiles.chunk * tiles.kv;
        for first in (task.first_key..end).step_by(chunk) {
            let keys = first..end.min(first + chunk);
            scratch.dk[..keys.len() * tiles.dim].fill(0.0);
            scratch.dv[..keys.len() * tiles.dim_v].fill(0.0);
            let mut row = 0;
            for (b, h) in call.heads_of(unit) {
                let len = call.sequences[b].q_len;
                let statistics = (self.statistics)(self.places.rows[task.unit] + row, len);
                let dq = &mut task.dq[row * tiles.dim..][..len * tiles.dim];
                self.head(scratch, captures, task.unit, (b, h), keys.clone(), &statistics, dq);
                row += len;
            }
            for r in 0..keys.len() {
                let at = keys.start - task.first_key + r;
                let dk = &scratch.dk[r * tiles.dim..][..call.dims.dim];
                task.dk.write_row(0, 0, at, dk, self.accumulate);
                let dv = &scratch.dv[r * tiles.dim_v..][..call.dims.dim_v];
                task.dv.write_row(0, 0, at, dv, self.accumulate);
            }
        }
        call.note(&mut scratch.evaluator);
    }

    /// All query rows of a head against one chunk of keys.
    fn head(
        &self,
        scratch: &mut Scratch,
        captures: &mut Slot,
        unit: usize,
        (b, h): (usize, usize),
        keys: std::ops::Range<usize>,
        statistics: &Statistics<'_>,
        dq: &mut [f32],
    ) {
        let (call, tiles) = (self.call, self.call.tiles);
        let sequence = &call.sequences[b];
        let live = call.live(b, h);
        let key_tiles = keys.start / tiles.kv..keys.end.div_ceil(tiles.kv);
        scratch.evaluator.enter(head(&call.dims, sequence, h));
        for query_tile in 0..sequence.q_len.div_ceil(tiles.q) {
            let mut live = live.tiles(query_tile, &key_tiles).peekable();
            if live.peek().is_none() {
                continue;
            }
            let start = query_tile * tiles.q;
            let rows = tiles.q.min(sequence.q_len - start);
            let at = [sequence.q_batch, h, sequence.q_start + start];
            pack::load_rows(self.q, at, rows, tiles.dim, &mut scratch.q);
            simd::scale(&mut scratch.q, call.scale);
            pack::load_rows(self.d_out, at, rows, tiles.dim_v, &mut scratch.d_out);
            // The factor of kept entries, on d_out once instead of on p and dp.
            simd::scale(&mut scratch.d_out, call.keep_factor);
            let statistics = Statistics {
                lse: &statistics.lse[start..start + rows],
                delta: &statistics.delta[start..start + rows],
                share: &statistics.share[start..start + rows],
            };
            for (d_out, &share) in scratch.d_out.chunks_mut(tiles.dim_v).zip(statistics.share) {
                if share != 1.0 {
                    simd::scale(d_out, share);
                }
            }
            let dq = &mut dq[start * tiles.dim..][..rows * tiles.dim];
            for (tile, partial) in live {
                let first = tile * tiles.kv;
                let columns = tiles.kv.min(keys.end - first);
                let offset = first - keys.start;
                let place = Place { start, first, columns, offset, partial };
                self.tile(scratch, captures, self.packed.block(unit, tile), place, &statistics, dq);
            }
        }
    }

    /// The five products of one tile.
    fn tile(
        &self,
        scratch: &mut Scratch,
        captures: &mut Slot,
        block: pack::Block<'_>,
        place: Place,
        statistics: &Statistics<'_>,
        dq: &mut [f32],
    ) {
        let (dims, tiles) = (&self.call.dims, self.call.tiles);
        let (rows, keys, stride) = (statistics.lse.len(), place.columns, tiles.kv);
        let Scratch { evaluator, q, d_out, p, ds, dk, dv } = scratch;
        let to = (place.start + rows, place.first + keys);
        evaluator.tile(place.start..to.0, place.first..to.1, place.partial);
        for start in (0..rows).step_by(STRIP) {
            let strip = start..rows.min(start + STRIP);
            let live = evaluator.live(strip.clone());
            // Whole groups of keys; dq's sum begins and ends with keys that are seen.
            let columns = live.start / LANES * LANES..simd::padded(live.end);
            for r in strip.clone() {
                for x in [&mut *p, &mut *ds] {
                    let row = &mut x[r * stride..][..simd::padded(keys)];
                    row[..columns.start].fill(0.0);
                    row[columns.end..].fill(0.0);
                }
            }
            if live.is_empty() {
                continue;
            }
            let scores = |into: &mut [f32], a, b, depth| {
                let (rows, columns) = (strip.clone(), columns.clone());
                simd::product(into, stride, a, b, &Part { rows, columns, depth: 0..depth }, false);
            };
            scores(p, Matrix::rows(q, tiles.dim), block.k_t, dims.dim);
            scores(ds, Matrix::rows(d_out, tiles.dim_v), block.v_t, dims.dim_v);
            let (p, own) = (&mut p[start * stride..], &mut ds[start * stride..]);
            evaluator.score(strip.clone(), columns.clone(), p, stride);
            evaluator.drop_out(strip.clone(), columns.clone(), own, stride);
            for (i, r) in strip.clone().enumerate() {
                let p = &mut p[i * stride..][columns.clone()];
                let ds = &mut own[i * stride..][columns.clone()];
                if statistics.lse[r] == f32::INFINITY {
                    p.fill(0.0);
                    ds.fill(0.0);
                } else {
                    simd::exp_sum(p, statistics.lse[r]);
                    simd::d_softmax(p, ds, statistics.delta[r]);
                }
            }
            evaluator.gradient(own, stride, captures);
            evaluator.drop_out(strip.clone(), columns, p, stride);
            let part = Part { rows: strip, columns: 0..tiles.dim, depth: live };
            simd::product(dq, tiles.dim, Matrix::rows(ds, stride), block.k, &part, true);
        }
        let (p, ds) = (Matrix::rows(p, stride), Matrix::rows(ds, stride));
        let (q, d_out) = (Panels::rows(q, tiles.dim), Panels::rows(d_out, tiles.dim_v));
        let dk = &mut dk[place.offset * tiles.dim..];
        let dv = &mut dv[place.offset * tiles.dim_v..];
        let step = if place.partial { STRIP } else { keys };
        for start in (0..keys).step_by(step) {
            let rows = start..keys.min(start + step);
            let depth = evaluator.live_rows(rows.clone());
            let add = |into: &mut [f32], dim, a: Matrix<'_>, b| {
                let (rows, depth) = (rows.clone(), depth.clone());
                let part = Part { rows, columns: 0..dim, depth };
                simd::product(into, dim, a.transposed(), b, &part, true);
            };
            add(dv, tiles.dim_v, p, d_out);
            add(dk, tiles.dim, ds, q);
        }
    }
}

/// Where a tile lies.
struct Place {
    /// First query of the tile.
    start: usize,
    /// First key of the tile.
    first: usize,
    /// Keys in it.
    columns: usize,
    /// First key of the tile in its chunk.
    offset: usize,
    /// Whether the mask decides inside.
    partial: bool,
}
