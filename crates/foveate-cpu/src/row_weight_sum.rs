//! The sum of weights of rows whose lse is too large to be exact.
//!
//! `lse` is an f32, so the backward's `exp(score - lse)` has a relative error of up to
//! `|lse|·2⁻²⁴`. A score function may give -1e30 to every key of a row: its lse is then -1e30, too,
//! and each exponential is 1, however many keys share the weight. Where the error is larger than the
//! tolerance, the backward sums the exponentials of the row first and divides its weights by the
//! sum. Both steps use the same products, so the weights add up to 1.

use foveate_problem::Operands;
use foveate_tensor::{DType, TensorRef};

use crate::call::{Call, head};
use crate::mods::Evaluator;
use crate::pack::{self, Format};
use crate::pool::PoolBuffer;
use crate::simd::{self, LANES, Panels, Part, SUBTILE_ROWS, Write};
use crate::tasks::{KvHead, run};

/// The magnitude of lse from which its rounding matters. Below, its error is at most 2⁻¹⁸ of a
/// weight, or 2⁻¹⁵ for 16-bit operands, a sixteenth of what rounding the weight to f16 may cost.
fn large(dtype: DType) -> f32 {
    match dtype {
        DType::F16 | DType::BF16 => 1024.0,
        _ => 128.0,
    }
}

/// What all tasks of a wave read.
struct Wave<'a> {
    call: &'a Call<'a>,
    kv_heads: &'a [KvHead],
    operands: &'a Operands<'a>,
    lse: TensorRef<'a, 3>,
    /// From [`large`].
    large: f32,
}

/// A query tile that has a row with a large lse, and its rows of the result.
struct SumTask<'a> {
    /// Index of the KV head in the wave.
    kv_head: usize,
    /// Sequence.
    b: usize,
    /// Query head.
    h: usize,
    /// First row of the tile.
    start: usize,
    sums: &'a mut [f32],
}

/// The workspace of a thread.
struct Scratch<'a> {
    evaluator: Evaluator,
    q: PoolBuffer<'a>,
    k: PoolBuffer<'a>,
    k_t: PoolBuffer<'a>,
    scores: PoolBuffer<'a>,
}

/// Writes the factor of the weights of each row of a wave's heads, in order: 1, or
/// `1 / Σ exp(score - lse)` where lse is large.
pub fn row_weight_sums<T: Format>(
    call: &Call<'_>,
    kv_heads: &[KvHead],
    operands: &Operands<'_>,
    lse: TensorRef<'_, 3>,
    mut into: &mut [f32],
) {
    let (tiles, pool) = (call.tiles, call.pool);
    let wave = Wave { call, kv_heads, operands, lse, large: large(operands.q.dtype()) };
    into.fill(1.0);
    let mut tasks = Vec::new();
    for (kv_head, own) in kv_heads.iter().enumerate() {
        for (b, h) in call.heads_of(own) {
            let rows;
            (rows, into) = into.split_at_mut(call.sequences[b].q_len);
            for (tile, sums) in rows.chunks_mut(tiles.q).enumerate() {
                let start = tile * tiles.q;
                if (start..start + sums.len()).any(|row| wave.is_large(wave.lse(b, h, row))) {
                    tasks.push(SumTask { kv_head, b, h, start, sums });
                }
            }
        }
    }
    let scratch = || Scratch {
        evaluator: call.mods.evaluator([tiles.q, tiles.kv], None),
        q: pool.alloc(tiles.q * tiles.dim),
        k: pool.alloc(tiles.kv * tiles.dim),
        k_t: pool.alloc(tiles.kv * tiles.dim),
        scores: pool.alloc(tiles.q * tiles.kv),
    };
    run(tasks.into_iter(), scratch, |scratch, task| wave.query_tile::<T>(scratch, task));
}

impl Wave<'_> {
    /// The lse of a row of a sequence.
    fn lse(&self, b: usize, h: usize, row: usize) -> f32 {
        let s = &self.call.sequences[b];
        self.lse.get_f64([s.q_batch, h, s.q_start + row]) as f32
    }

    fn is_large(&self, lse: f32) -> bool {
        lse.is_finite() && lse.abs() >= self.large
    }

    /// The sums of one query tile, over all of its live key tiles.
    fn query_tile<T: Format>(&self, scratch: &mut Scratch<'_>, task: SumTask<'_>) {
        let SumTask { kv_head, b, h, start, sums } = task;
        let (call, tiles, rows) = (self.call, self.call.tiles, sums.len());
        let s = &call.sequences[b];
        let at = [s.q_batch, h, s.q_start + start];
        let q = pack::rows(self.operands.q, at, rows, tiles.dim, pack::elements(&mut scratch.q));
        scratch.evaluator.enter(head(&call.dims, s, h));
        let lse: Vec<f32> = (start..start + rows).map(|row| self.lse(b, h, row)).collect();
        for (sum, lse) in sums.iter_mut().zip(&lse) {
            *sum = call.sink.as_ref().map_or(0.0, |sink| (sink[h] - lse).exp());
        }
        let Scratch { evaluator, k, k_t, scores, .. } = scratch;
        for (key_tile, partial) in call.live(b, h).tiles(start / tiles.q, &call.key_tiles(b)) {
            let first = key_tile * tiles.kv;
            let keys = first..s.k_len.min(first + tiles.kv);
            evaluator.tile(start..start + rows, keys.clone(), partial);
            let (k, k_t) = (pack::elements::<T>(k), pack::elements::<T>(k_t));
            let kv_head = &self.kv_heads[kv_head];
            let k = pack::key_rows(self.operands, self.operands.k, kv_head, &keys, tiles.dim, k);
            T::transpose(k, keys.len(), tiles.dim, k_t);
            let k_t = Panels::packed(k_t, tiles.dim / T::WIDTH);
            for from in (0..rows).step_by(SUBTILE_ROWS) {
                let subtile = from..rows.min(from + SUBTILE_ROWS);
                let live = evaluator.live(subtile.clone());
                if live.is_empty() {
                    continue;
                }
                let columns = live.start / LANES * LANES..simd::padded(live.end);
                let (rows, depth) = (subtile.clone(), 0..call.dims.dim);
                let part = Part { rows, columns: columns.clone(), depth }.in_elements::<T>();
                simd::product(scores, tiles.kv, q, k_t, &part, Write::Times(call.scale));
                let own = &mut scores[from * tiles.kv..];
                evaluator.score(subtile.clone(), columns.clone(), own, tiles.kv);
                for r in subtile.filter(|&r| self.is_large(lse[r])) {
                    let row = &mut scores[r * tiles.kv..][columns.clone()];
                    sums[r] += simd::exp_sum(row, lse[r]);
                }
            }
        }
        for (sum, lse) in sums.iter_mut().zip(&lse) {
            *sum = if self.is_large(*lse) && sum.is_normal() { sum.recip() } else { 1.0 };
        }
        call.note(evaluator);
    }
}
