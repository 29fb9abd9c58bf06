//! The forward pass.
//!
//! One task is one query tile of one head. It walks the live key tiles of its row from left to
//! right with the online softmax: scores `s = q·kᵀ` of a tile, running maximum `m` and
//! denominator `l` of each row, the output so far rescaled by `exp(m_old - m_new)` and
//! `exp(s - m)·v` added. Only at the end is it divided by the denominator.

use foveate_problem::ForwardArgs;
use foveate_tensor::TensorMut;

use crate::call::{Call, head};
use crate::error::CpuError;
use crate::mods::Evaluator;
use crate::pack::{self, Packed};
use crate::simd::{self, Matrix, Part};
use crate::work::{Pieces, Span, Unit, run, waves};

/// A query tile of a head, and where its results go.
struct Task<'a> {
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
struct Scratch {
    evaluator: Evaluator,
    q: Vec<f32>,
    scores: Vec<f32>,
    out: Vec<f32>,
    /// Largest score so far, by row.
    max: Vec<f32>,
    /// Denominator so far relative to `max`, by row.
    sum: Vec<f32>,
}

/// Floats of workspace a unit takes: packed keys.
pub fn wave_elems(call: &Call<'_>, unit: &Unit) -> usize {
    pack::elems(&call.tiles, unit.keys.len, false)
}

/// Runs the forward pass of `call`.
pub fn forward(call: &Call<'_>, args: ForwardArgs<'_>) -> Result<(), CpuError> {
    let ForwardArgs { operands, out, lse, max_score } = args;
    let tiles = call.tiles;
    let spans: Vec<Span> = call.sequences.iter().map(Span::queries).collect();
    let mut out = Pieces::cut(out, &spans, |_| tiles.q);
    let mut lse = Pieces::cut(lse, &spans, |_| tiles.q);
    let mut max_score = max_score.map(|t| Pieces::cut(t, &spans, |_| tiles.q));
    for wave in waves(&call.units, call.wave_bytes, |unit| wave_elems(call, unit)) {
        let data = call.pool.take(wave.iter().map(|unit| wave_elems(call, unit)).sum());
        let packed = Packed::new(operands.k, operands.v, wave, tiles, false, data);
        let mut tasks = Vec::new();
        for (u, unit) in wave.iter().enumerate() {
            let first = tasks.len();
            for (b, h) in call.heads_of(unit) {
                let live = call.live(b, h);
                let keys = call.key_tiles(b);
                for tile in 0..call.sequences[b].q_len.div_ceil(tiles.q) {
                    tasks.push(Task {
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
            tasks[first..].sort_by_key(|t| std::cmp::Reverse(t.cost));
        }
        let scratch = || Scratch {
            evaluator: call.mods.evaluator([tiles.q, tiles.kv], None),
            q: vec![0.0; tiles.q * tiles.dim],
            scores: vec![0.0; tiles.q * tiles.kv],
            out: vec![0.0; tiles.q * tiles.dim_v],
            max: vec![0.0; tiles.q],
            sum: vec![0.0; tiles.q],
        };
        run(tasks.into_iter(), scratch, |s, task| query_tile(call, operands.q, &packed, s, task));
        call.pool.give(packed.into_data());
    }
    call.finish()
}

fn query_tile(
    call: &Call<'_>,
    q: foveate_tensor::TensorRef<'_>,
    packed: &Packed,
    scratch: &mut Scratch,
    task: Task<'_>,
) {
    let tiles = call.tiles;
    let sequence = &call.sequences[task.b];
    let start = task.tile * tiles.q;
    let rows = tiles.q.min(sequence.q_len - start);
    let at = [sequence.q_batch, task.h, sequence.q_start + start];
    pack::load_rows(q, at, rows, tiles.dim, &mut scratch.q);
    simd::scale(&mut scratch.q, call.scale);
    scratch.out[..rows * tiles.dim_v].fill(0.0);
    scratch.max.fill(f32::NEG_INFINITY);
    scratch.sum.fill(0.0);
    scratch.evaluator.enter(head(&call.dims, sequence, task.h));

    let live = call.live(task.b, task.h);
    for (tile, partial) in live.tiles(task.tile, &call.key_tiles(task.b)) {
        let first_key = tile * tiles.kv;
        let keys = tiles.kv.min(sequence.k_len - first_key);
        let block = packed.block(task.unit, tile);
        let width = simd::padded(keys);
        simd::product(
            &mut scratch.scores,
            tiles.kv,
            Matrix::rows(&scratch.q, tiles.dim),
            block.k_t,
            &Part::all(rows, call.dims.dim, width),
            false,
        );
        scratch.evaluator.tile(start..start + rows, first_key..first_key + keys, partial);
        scratch.evaluator.score(0..rows, 0..width, &mut scratch.scores, tiles.kv);
        for r in 0..rows {
            let row = &mut scratch.scores[r * tiles.kv..][..width];
            let max = simd::larger(scratch.max[r], simd::max(row));
            if max == f32::NEG_INFINITY {
                row.fill(0.0);
                continue;
            }
            if max != scratch.max[r] {
                let factor = (scratch.max[r] - max).exp();
                scratch.max[r] = max;
                scratch.sum[r] *= factor;
                simd::scale(&mut scratch.out[r * tiles.dim_v..][..tiles.dim_v], factor);
            }
            scratch.sum[r] += simd::exp_sum(row, max);
        }
        scratch.evaluator.drop_out(0..rows, 0..width, &mut scratch.scores, tiles.kv);
        simd::product(
            &mut scratch.out,
            tiles.dim_v,
            Matrix::rows(&scratch.scores, tiles.kv),
            block.v,
            &Part::all(rows, keys, tiles.dim_v),
            true,
        );
    }
    call.note(&mut scratch.evaluator);
    store(call, scratch, task, rows);
}

/// Divides by the denominator and writes the rows out.
fn store(call: &Call<'_>, scratch: &mut Scratch, mut task: Task<'_>, rows: usize) {
    let sink = call.sink.map_or(f32::NEG_INFINITY, |s| s[task.h]);
    for r in 0..rows {
        let (max, sum) = (scratch.max[r], scratch.sum[r]);
        // Against the larger of both, so that neither exponential overflows.
        let top = simd::larger(max, sink);
        let row = &mut scratch.out[r * call.tiles.dim_v..][..call.tiles.dim_v];
        let lse = if top == f32::NEG_INFINITY {
            row.fill(0.0);
            f32::NEG_INFINITY
        } else {
            let own = (max - top).exp();
            let denominator = sum * own + (sink - top).exp();
            simd::scale(row, own * call.keep_factor / denominator);
            top + denominator.ln()
        };
        task.out.write_row(0, 0, r, &row[..call.dims.dim_v], false);
        task.lse.write([0, 0, r], lse.into());
        if let Some(max_score) = &mut task.max_score {
            max_score.write([0, 0, r], max.into());
        }
    }
}
