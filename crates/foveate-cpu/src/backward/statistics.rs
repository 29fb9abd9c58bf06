//! `lse` and `delta` of the rows of a wave, and the gradient of the sinks.

use std::ops::Range;

use foveate_problem::Operands;
use foveate_tensor::TensorRef;

use crate::call::Call;
use crate::pack::Format;
use crate::pool::PoolBuffer;
use crate::row_weight_sum::row_weight_sums;
use crate::simd::{self, RowStatistics};
use crate::tasks::{KvHead, run};

/// The tensors that row statistics are computed from.
#[derive(Clone, Copy)]
pub struct Sources<'a> {
    pub out: TensorRef<'a>,
    pub lse: TensorRef<'a, 3>,
    pub d_out: TensorRef<'a>,
    pub d_lse: Option<TensorRef<'a, 3>>,
}

/// The lse of each row (`+∞` for an empty row, whose weights are then 0), its `delta`, and the factor of
/// its weights: [`row_weight_sums`], and dropout's of entries that are kept.
///
/// Dropout's is in the weights before they are rounded for dv, as an eager program stores them: weights that are
/// nearly equal may have twice the relative error on either side of a power of two. What multiplies the weights to
/// `ds` is then divided by it: `delta` here, `dp` by leaving it as the product is.
pub struct Statistics<'a> {
    lse: &'a [f32],
    delta: &'a [f32],
    weight_factor: &'a [f32],
    /// First row of each query head of the wave.
    first: Vec<usize>,
}

/// The rows of one query head.
struct Rows<'a> {
    b: usize,
    h: usize,
    weight_factor: &'a mut [f32],
    lse: &'a mut [f32],
    delta: &'a mut [f32],
    d_sink: &'a mut f64,
}

impl<'a> Statistics<'a> {
    /// Computes them into `buffer`, three floats a row, and adds to the gradients of the sinks.
    pub fn new<T: Format>(
        call: &Call<'_>,
        wave: &[KvHead],
        operands: &Operands<'_>,
        from: Sources<'_>,
        buffer: &'a mut [f32],
        d_sink: &mut [f64],
    ) -> Self {
        let heads: Vec<(usize, usize)> = wave.iter().flat_map(|u| call.heads_of(u)).collect();
        let mut parts = vec![0.0; heads.len()];
        let mut first = Vec::with_capacity(heads.len());
        let rows = buffer.len() / 3;
        let (weight_factor, rest) = buffer.split_at_mut(rows);
        let (lse, delta) = rest.split_at_mut(rows);
        row_weight_sums::<T>(call, wave, operands, from.lse, weight_factor);
        let mut left = [&mut *weight_factor, &mut *lse, &mut *delta];
        let mut row = 0;
        let mut tasks = Vec::with_capacity(heads.len());
        for (&(b, h), d_sink) in heads.iter().zip(&mut parts) {
            let len = call.sequences[b].q_len;
            first.push(row);
            row += len;
            let [weight_factor, lse, delta] = left.each_mut().map(|left| {
                let (own, rest) = std::mem::take(left).split_at_mut(len);
                *left = rest;
                own
            });
            tasks.push(Rows { b, h, weight_factor, lse, delta, d_sink });
        }
        let dim_v = call.tiles.dim_v;
        let vectors = || {
            let mut vectors = [0; 2].map(|_| call.pool.alloc(dim_v));
            // The padding stays 0.
            vectors.iter_mut().for_each(|vector| vector.fill(0.0));
            vectors
        };
        run(tasks.into_iter(), vectors, |vectors, rows| rows.compute(call, from, vectors));
        for ((_, h), part) in heads.into_iter().zip(parts) {
            d_sink[h] += part;
        }
        Self { lse, delta, weight_factor, first }
    }

    /// The statistics of rows of a query head of the wave.
    pub fn of(&self, head: usize, rows: Range<usize>) -> RowStatistics<'_> {
        let all =
            RowStatistics { lse: self.lse, delta: self.delta, weight_factor: self.weight_factor };
        all.of(self.first[head] + rows.start..self.first[head] + rows.end)
    }
}

impl Rows<'_> {
    fn compute(self, call: &Call<'_>, from: Sources<'_>, [out, d_out]: &mut [PoolBuffer<'_>; 2]) {
        let Self { b, h, weight_factor, lse, delta, d_sink } = self;
        let s = &call.sequences[b];
        let own = ..call.dims.dim_v;
        let scalar = |t: TensorRef<'_, 3>, at| t.get_f64(at) as f32;
        for r in 0..s.q_len {
            let at = [s.q_batch, h, s.q_start + r];
            lse[r] = scalar(from.lse, at);
            if lse[r] == f32::NEG_INFINITY {
                (lse[r], delta[r]) = (f32::INFINITY, 0.0);
                continue;
            }
            from.out.load_row(at[0], at[1], at[2], &mut out[own]);
            from.d_out.load_row(at[0], at[1], at[2], &mut d_out[own]);
            let d_lse = from.d_lse.map_or(0.0, |t| scalar(t, at));
            delta[r] = simd::dot(out, d_out) - d_lse;
            if let Some(sink) = &call.sink {
                *d_sink -= f64::from((sink[h] - lse[r]).exp() * weight_factor[r] * delta[r]);
            }
            weight_factor[r] *= call.dropout_scale;
            delta[r] /= call.dropout_scale;
        }
    }
}
