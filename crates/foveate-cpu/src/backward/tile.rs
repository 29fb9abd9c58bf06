//! What a task does: its lane's keys, chunk by chunk, against the rows that see them.

use std::ops::Range;

use foveate_problem::Operands;
use foveate_tensor::TensorRef;

use super::block::{self, Block};
use super::lanes::{Lanes, Sums, Task};
use super::statistics::Statistics;
use crate::call::{Call, head};
use crate::captures::Slot;
use crate::mods::Evaluator;
use crate::pack;
use crate::simd::{self, LANES, Matrix, Panels, Part, STRIP};
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
    evaluator: Evaluator,
    /// Blocks of a chunk of keys.
    blocks: Lent<'a>,
    v_rows: Lent<'a>,
    /// Rows of a query tile, q scaled.
    q: Lent<'a>,
    d_out: Lent<'a>,
    /// `s`, then `p`.
    p: Lent<'a>,
    /// `dp`, then `ds`.
    ds: Lent<'a>,
    /// Gradients of a chunk of keys.
    dk: Lent<'a>,
    dv: Lent<'a>,
    clock: Clock<'a>,
}

impl<'a> Scratch<'a> {
    /// For tasks of `call`; `captures` says that gradients of learned buffers are wanted.
    pub fn new(call: &'a Call<'a>, captures: bool) -> Self {
        let tiles = call.tiles;
        let chunk = tiles.chunk * tiles.kv;
        Self {
            evaluator: call.mods.evaluator([tiles.q, tiles.kv], Some(captures)),
            blocks: call.pool.lend(tiles.chunk * block::elems(&tiles)),
            v_rows: call.pool.lend(tiles.kv * tiles.dim_v),
            q: call.pool.lend(tiles.q * tiles.dim),
            d_out: call.pool.lend(tiles.q * tiles.dim_v),
            p: call.pool.lend(tiles.q * tiles.kv),
            ds: call.pool.lend(tiles.q * tiles.kv),
            dk: call.pool.lend(chunk * tiles.dim),
            dv: call.pool.lend(chunk * tiles.dim_v),
            clock: Clock::new(call.profile),
        }
    }
}

/// Query rows of a head of the wave.
struct Queries<'a> {
    /// First row.
    start: usize,
    lse: &'a [f32],
    delta: &'a [f32],
}

/// Keys of a tile.
struct Keys {
    /// In their sequence.
    range: Range<usize>,
    /// The first one's place in its chunk.
    offset: usize,
    /// Whether the mask decides inside.
    partial: bool,
}

impl<'a> Worker<'a> {
    /// All keys of a lane.
    pub fn run(&self, scratch: &mut Scratch<'_>, captures: &mut Slot<'_>, mut task: Task<'a>) {
        let (call, tiles) = (self.call, self.call.tiles);
        let lane = task.lane;
        scratch.clock.start();
        task.dq.fill(0.0);
        for first in lane.keys.clone().step_by(tiles.chunk * tiles.kv) {
            let keys = first..lane.keys.end.min(first + tiles.chunk * tiles.kv);
            self.pack(scratch, lane.unit, &keys);
            scratch.dk[..keys.len() * tiles.dim].fill(0.0);
            scratch.dv[..keys.len() * tiles.dim_v].fill(0.0);
            for (i, part) in lane.parts.iter().enumerate() {
                let dq = &mut task.dq[part.at * tiles.dim..][..part.rows.len() * tiles.dim];
                self.head(scratch, captures, lane.first_head + i, part.rows.clone(), &keys, dq);
            }
            for r in 0..keys.len() {
                let at = keys.start - lane.keys.start + r;
                let dk = &scratch.dk[r * tiles.dim..][..call.dims.dim];
                task.dk.write_row(0, 0, at, dk, self.accumulate);
                let dv = &scratch.dv[r * tiles.dim_v..][..call.dims.dim_v];
                task.dv.write_row(0, 0, at, dv, self.accumulate);
            }
            scratch.clock.lap(Stage::Packing);
        }
        call.note(&mut scratch.evaluator);
        self.sums.bring(lane, task.dq);
        scratch.clock.lap(Stage::Packing);
    }

    /// Packs a chunk of a unit's keys.
    fn pack(&self, scratch: &mut Scratch<'_>, unit: usize, keys: &Range<usize>) {
        let (tiles, unit) = (&self.call.tiles, &self.wave[unit]);
        let blocks = scratch.blocks.chunks_exact_mut(block::elems(tiles));
        for (first, block) in keys.clone().step_by(tiles.kv).zip(blocks) {
            let keys = first..keys.end.min(first + tiles.kv);
            block::pack(self.operands, unit, &keys, tiles, block, &mut scratch.v_rows);
        }
    }

    /// The rows of a head that see a lane against one chunk of its keys. `dq` is theirs.
    fn head(
        &self,
        scratch: &mut Scratch<'_>,
        captures: &mut Slot<'_>,
        of_wave: usize,
        rows: Range<usize>,
        keys: &Range<usize>,
        dq: &mut [f32],
    ) {
        let (call, tiles) = (self.call, self.call.tiles);
        let (b, h) = self.lanes.head(of_wave);
        let sequence = &call.sequences[b];
        let key_tiles = keys.start / tiles.kv..keys.end.div_ceil(tiles.kv);
        scratch.evaluator.enter(head(&call.dims, sequence, h));
        for start in rows.clone().step_by(tiles.q) {
            let mut live = call.live(b, h).tiles(start / tiles.q, &key_tiles).peekable();
            if live.peek().is_none() {
                continue;
            }
            let end = rows.end.min(start + tiles.q);
            let at = [sequence.q_batch, h, sequence.q_start + start];
            let [lse, delta, share] = self.statistics.of(of_wave, start..end);
            self.load(scratch, at, share);
            let queries = Queries { start, lse, delta };
            let dq = &mut dq[(start - rows.start) * tiles.dim..][..(end - start) * tiles.dim];
            for (tile, partial) in live {
                let first = tile * tiles.kv;
                let range = first..keys.end.min(first + tiles.kv);
                let own = Keys { range, offset: first - keys.start, partial };
                self.tile(scratch, captures, &queries, &own, dq);
            }
        }
    }

    /// Brings q and d_out of a query tile, d_out times the share of each row.
    fn load(&self, scratch: &mut Scratch<'_>, at: [usize; 3], share: &[f32]) {
        let (call, tiles, rows) = (self.call, self.call.tiles, share.len());
        let Scratch { q, d_out, clock, .. } = scratch;
        pack::load_rows(self.operands.q, at, rows, tiles.dim, q);
        simd::scale(&mut q[..rows * tiles.dim], call.scale);
        pack::load_rows(self.d_out, at, rows, tiles.dim_v, d_out);
        // The factor of kept entries, on d_out once instead of on p and dp.
        if call.keep_factor != 1.0 {
            simd::scale(&mut d_out[..rows * tiles.dim_v], call.keep_factor);
        }
        for (d_out, &share) in d_out.chunks_exact_mut(tiles.dim_v).zip(share) {
            if share != 1.0 {
                simd::scale(d_out, share);
            }
        }
        clock.lap(Stage::Packing);
    }

    /// The five products of one tile.
    fn tile(
        &self,
        scratch: &mut Scratch<'_>,
        captures: &mut Slot<'_>,
        queries: &Queries<'_>,
        keys: &Keys,
        dq: &mut [f32],
    ) {
        let rows = queries.lse.len();
        let tile = queries.start..queries.start + rows;
        scratch.evaluator.tile(tile, keys.range.clone(), keys.partial);
        scratch.clock.lap(Stage::Mods);
        for start in (0..rows).step_by(STRIP) {
            let strip = start..rows.min(start + STRIP);
            self.strip(scratch, captures, queries, keys, strip, dq);
        }
        self.keys(scratch, keys);
    }

    /// `p` and `ds` of a strip of rows, and what it gives dq.
    fn strip(
        &self,
        scratch: &mut Scratch<'_>,
        captures: &mut Slot<'_>,
        queries: &Queries<'_>,
        keys: &Keys,
        strip: Range<usize>,
        dq: &mut [f32],
    ) {
        let (dims, tiles, stride) = (&self.call.dims, self.call.tiles, self.call.tiles.kv);
        let Scratch { evaluator, blocks, q, d_out, p, ds, clock, .. } = scratch;
        let block = keys.offset / tiles.kv * block::elems(&tiles);
        let block = Block::of(&blocks[block..][..block::elems(&tiles)], &tiles);
        let live = evaluator.live(strip.clone());
        // Whole groups of keys; dq's sum begins and ends with keys that are seen.
        let columns = live.start / LANES * LANES..simd::padded(live.end);
        if keys.partial {
            // What the products of keys read beside them.
            let strip = strip.start * stride..strip.end * stride;
            for x in [&mut *p, &mut *ds] {
                for row in x[strip.clone()].chunks_exact_mut(stride) {
                    row[..columns.start].fill(0.0);
                    row[columns.end..].fill(0.0);
                }
            }
        }
        if live.is_empty() {
            return;
        }
        let scores = |into: &mut [f32], a, b, depth| {
            let part = Part { rows: strip.clone(), columns: columns.clone(), depth: 0..depth };
            simd::product(into, stride, a, b, &part, false);
        };
        scores(p, Matrix::rows(q, tiles.dim), block.k_t, dims.dim);
        scores(ds, Matrix::rows(d_out, tiles.dim_v), block.v_t, dims.dim_v);
        clock.lap(Stage::Products);
        let at = strip.start * stride;
        let (p, own) = (&mut p[at..], &mut ds[at..]);
        evaluator.score(strip.clone(), columns.clone(), p, stride);
        evaluator.drop_out(strip.clone(), columns.clone(), own, stride);
        clock.lap(Stage::Mods);
        let rows = p.chunks_mut(stride).zip(own.chunks_mut(stride));
        for (r, (p, ds)) in strip.clone().zip(rows) {
            let (p, ds) = (&mut p[columns.clone()], &mut ds[columns.clone()]);
            if queries.lse[r] == f32::INFINITY {
                p.fill(0.0);
                ds.fill(0.0);
            } else {
                simd::exp_sum(p, queries.lse[r]);
                simd::d_softmax(p, ds, queries.delta[r]);
            }
        }
        clock.lap(Stage::Softmax);
        evaluator.gradient(own, stride, captures);
        evaluator.drop_out(strip.clone(), columns, p, stride);
        clock.lap(Stage::Mods);
        let part = Part { rows: strip, columns: 0..tiles.dim, depth: live };
        simd::product(dq, tiles.dim, Matrix::rows(ds, stride), block.k, &part, true);
        clock.lap(Stage::Products);
    }

    /// What a tile gives dk and dv.
    fn keys(&self, scratch: &mut Scratch<'_>, keys: &Keys) {
        let tiles = self.call.tiles;
        let Scratch { evaluator, q, d_out, p, ds, dk, dv, clock, .. } = scratch;
        let count = keys.range.len();
        let step = if keys.partial { STRIP } else { count };
        for start in (0..count).step_by(step) {
            let rows = start..count.min(start + step);
            let depth = evaluator.live_rows(rows.clone());
            let add = |into: &mut [f32], dim: usize, a: &[f32], b: &[f32]| {
                let into = &mut into[keys.offset * dim..];
                let (a, b) = (Matrix::rows(a, tiles.kv).transposed(), Panels::rows(b, dim));
                let part = Part { rows: rows.clone(), columns: 0..dim, depth: depth.clone() };
                simd::product(into, dim, a, b, &part, true);
            };
            add(dv, tiles.dim_v, p, d_out);
            add(dk, tiles.dim, ds, q);
        }
        clock.lap(Stage::Products);
    }
}
