//! Rows whose lse is so large that it has no room for the logarithm of a sum.
//!
//! The forward leaves `lse` in f32, and the backward's `exp(score - lse)` is wrong by its rounding,
//! up to `|lse|·2⁻²⁴` of the weight. A score function may give -1e30 to every key of a row: its lse
//! is then -1e30, too, and each of these powers 1, however many keys share the weight. Where that
//! is more than the results may be wrong by, the backward sums the powers of the row once more, and
//! divides by the sum. Both compute them with the same products, so that the weights add up to 1.

use foveate_problem::Operands;
use foveate_tensor::{DType, TensorRef};

use crate::call::{Call, head};
use crate::mods::Evaluator;
use crate::pack::{self, Format};
use crate::simd::{self, LANES, Panels, Part, STRIP, Write};
use crate::work::{Unit, run};

/// From which magnitude of lse on its rounding is felt: below, it is at most 2⁻¹⁸ of a weight, or
/// 2⁻¹⁵ for 16-bit operands, a sixteenth of what rounding it to f16 may cost.
fn huge(dtype: DType) -> f32 {
    match dtype {
        DType::F16 | DType::BF16 => 1024.0,
        _ => 128.0,
    }
}

/// A tile of queries with a huge row, and its part of the result.
struct Task<'a> {
    /// Unit of the wave.
    unit: usize,
    b: usize,
    h: usize,
    tile: usize,
    shares: &'a mut [f32],
}

struct Scratch {
    evaluator: Evaluator,
    q: Vec<f32>,
    k: Vec<f32>,
    k_t: Vec<f32>,
    scores: Vec<f32>,
}

/// For each row of a wave's heads, in order, what its weights are multiplied with: 1, or where lse
/// is huge one over the sum of `exp(score - lse)`.
pub fn shares<T: Format>(
    call: &Call<'_>,
    wave: &[Unit],
    operands: &Operands<'_>,
    lse: TensorRef<'_, 3>,
    mut into: &mut [f32],
) {
    let tiles = call.tiles;
    let huge = huge(operands.q.dtype());
    let is_huge = |lse: f32| lse.is_finite() && lse.abs() >= huge;
    into.fill(1.0);
    let lse_of = |b: usize, h: usize, row: usize| {
        let s = &call.sequences[b];
        lse.get_f64([s.q_batch, h, s.q_start + row]) as f32
    };
    let mut tasks = Vec::new();
    for (unit, own) in wave.iter().enumerate() {
        for (b, h) in call.heads_of(own) {
            let rows;
            (rows, into) = into.split_at_mut(call.sequences[b].q_len);
            for (tile, shares) in rows.chunks_mut(tiles.q).enumerate() {
                let mut rows = tile * tiles.q..tile * tiles.q + shares.len();
                if rows.any(|row| is_huge(lse_of(b, h, row))) {
                    tasks.push(Task { unit, b, h, tile, shares });
                }
            }
        }
    }
    let scratch = || Scratch {
        evaluator: call.mods.evaluator([tiles.q, tiles.kv], None),
        q: vec![0.0; tiles.q * tiles.dim],
        k: vec![0.0; tiles.kv * tiles.dim],
        k_t: vec![0.0; tiles.kv * tiles.dim],
        scores: vec![0.0; tiles.q * tiles.kv],
    };
    run(tasks.into_iter(), scratch, |scratch, Task { unit, b, h, tile, shares }| {
        let Scratch { evaluator, q: own, k, k_t, scores } = scratch;
        let s = &call.sequences[b];
        let (start, rows, stride) = (tile * tiles.q, shares.len(), tiles.kv);
        let at = [s.q_batch, h, s.q_start + start];
        let q = pack::rows(operands.q, at, rows, tiles.dim, pack::elements::<T>(own));
        evaluator.enter(head(&call.dims, s, h));
        let lse: Vec<f32> = (start..start + rows).map(|row| lse_of(b, h, row)).collect();
        for (sum, lse) in shares.iter_mut().zip(&lse) {
            *sum = call.sink.map_or(0.0, |sink| (sink[h] - lse).exp());
        }
        for (key_tile, partial) in call.live(b, h).tiles(tile, &call.key_tiles(b)) {
            let first = key_tile * tiles.kv;
            let keys = first..s.k_len.min(first + tiles.kv);
            evaluator.tile(start..start + rows, keys.clone(), partial);
            let (k, k_t) = (pack::elements::<T>(k), pack::elements::<T>(k_t));
            let k = pack::key_rows(operands, operands.k, &wave[unit], &keys, tiles.dim, k);
            T::transpose(k, keys.len(), tiles.dim, k_t);
            let k_t = Panels::packed(k_t, tiles.dim / T::WIDTH);
            for from in (0..rows).step_by(STRIP) {
                let strip = from..rows.min(from + STRIP);
                let live = evaluator.live(strip.clone());
                if live.is_empty() {
                    continue;
                }
                let columns = live.start / LANES * LANES..simd::padded(live.end);
                let (rows, depth) = (strip.clone(), 0..call.dims.dim);
                let part = Part { rows, columns: columns.clone(), depth }.in_elements::<T>();
                simd::product(scores, stride, q, k_t, &part, Write::Times(call.scale));
                evaluator.score(
                    strip.clone(),
                    columns.clone(),
                    &mut scores[from * stride..],
                    stride,
                );
                for r in strip.filter(|&r| is_huge(lse[r])) {
                    shares[r] += simd::exp_sum(&mut scores[r * stride..][columns.clone()], lse[r]);
                }
            }
        }
        for (share, lse) in shares.iter_mut().zip(&lse) {
            *share = if is_huge(*lse) && share.is_normal() { share.recip() } else { 1.0 };
        }
        call.note(evaluator);
    });
}
