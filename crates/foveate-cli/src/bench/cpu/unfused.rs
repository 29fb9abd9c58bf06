//! Attention without fusion: whole score matrices, products by `gemm`, f32.
//!
//! The backward keeps the probabilities of the forward, as frameworks do that do not fuse, so it
//! needs four products where the fused one needs five.

use std::ops::Range;

use foveate_nn::{Matrix, matmul};
use rayon::prelude::*;

use super::prepared::Prepared;
use crate::bench::workload::{Direction, Workload};

/// Operands and workspace of the unfused implementation.
pub struct Unfused {
    work: Workload,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    d_out: Vec<f32>,
    out: Vec<f32>,
    dq: Vec<f32>,
    dk: Vec<f32>,
    dv: Vec<f32>,
    /// Per head `[len, len]`.
    probabilities: Vec<f32>,
    /// Per head `[len, len]`: the slope of the score function.
    slopes: Vec<f32>,
    /// One head's `[len, len]`.
    d_score: Vec<f32>,
}

/// Bytes of score matrices that the peer may hold.
const MOST_BYTES: usize = 2 << 30;

impl Unfused {
    /// Whether the peer runs this: one batch entry, as many queries as keys, and score matrices of
    /// all heads that fit in memory.
    pub fn takes(work: &Workload) -> bool {
        let scores = work.heads.saturating_mul(work.len).saturating_mul(work.len);
        let square = work.batch == 1 && work.q_len == work.len;
        square && scores.saturating_mul(2 * size_of::<f32>()) <= MOST_BYTES
    }

    /// The same operands of a workload that the peer [`Self::takes`], with a forward pass run.
    pub fn new(prepared: &Prepared) -> Self {
        let work = prepared.work().clone();
        let [q, k, v, d_out] = prepared.widened();
        let square = work.len * work.len;
        let rows = work.heads;
        let mut unfused = Self {
            out: vec![0.0; q.len()],
            dq: vec![0.0; q.len()],
            dk: vec![0.0; k.len()],
            dv: vec![0.0; v.len()],
            probabilities: vec![0.0; rows * square],
            slopes: vec![1.0; rows * square],
            d_score: vec![0.0; square],
            work,
            q,
            k,
            v,
            d_out,
        };
        unfused.forward();
        unfused
    }

    /// The pass of the workload.
    pub fn run(&mut self) {
        if self.work.pass != Direction::Backward {
            self.forward();
        }
        if self.work.pass != Direction::Forward {
            self.backward();
        }
    }

    /// `out` and the probabilities.
    fn forward(&mut self) {
        let Self { work, .. } = self;
        let Workload { heads, len, dim, .. } = *work;
        let scale = 1.0 / (dim as f32).sqrt();
        for h in 0..heads {
            let [own, shared] = rows(work, h);
            let square = h * len * len..(h + 1) * len * len;
            let p = &mut self.probabilities[square.clone()];
            let (q, k, v) = (&self.q[own.clone()], &self.k[shared.clone()], &self.v[shared]);
            matmul(
                [len, len, dim],
                Matrix::rows(q, dim),
                Matrix::transposed(k, dim),
                p,
                len,
                false,
            );
            let slopes = self.slopes[square].par_chunks_mut(len);
            p.par_chunks_mut(len).zip(slopes).enumerate().for_each(|(row, (p, slopes))| {
                for (column, (p, slope)) in p.iter_mut().zip(slopes).enumerate() {
                    (*p, *slope) = work.scored(*p * scale, [h, row, column]);
                    if !work.keeps(row, column) {
                        *p = f32::NEG_INFINITY;
                    }
                }
                let max = p.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                p.iter_mut().for_each(|p| *p = (*p - max).exp());
                let sum: f32 = p.iter().sum();
                p.iter_mut().for_each(|p| *p /= sum);
            });
            let out = &mut self.out[own];
            matmul([len, dim, len], Matrix::rows(p, len), Matrix::rows(v, dim), out, dim, false);
        }
    }

    /// `dq`, `dk` and `dv` from the probabilities of the forward.
    fn backward(&mut self) {
        let Self { work, .. } = self;
        let Workload { heads, heads_kv, len, dim, .. } = *work;
        let group = heads / heads_kv;
        let scale = 1.0 / (dim as f32).sqrt();
        for h in 0..heads {
            let [own, shared] = rows(work, h);
            let square = h * len * len..(h + 1) * len * len;
            let (p, slopes) = (&self.probabilities[square.clone()], &self.slopes[square]);
            let (q, k, v) =
                (&self.q[own.clone()], &self.k[shared.clone()], &self.v[shared.clone()]);
            let d_out = &self.d_out[own.clone()];
            let later = h % group != 0;
            let d_score = &mut self.d_score;
            let dv = &mut self.dv[shared.clone()];
            let (d, v) = (Matrix::rows(d_out, dim), Matrix::transposed(v, dim));
            matmul([len, dim, len], Matrix::transposed(p, len), d, dv, dim, later);
            matmul([len, len, dim], d, v, d_score, len, false);
            let rows = d_score.par_chunks_mut(len).zip(p.par_chunks(len));
            rows.zip(slopes.par_chunks(len)).for_each(|((d, p), slopes)| {
                let delta: f32 = d.iter().zip(p).map(|(d, p)| d * p).sum();
                for ((d, p), slope) in d.iter_mut().zip(p).zip(slopes) {
                    *d = p * (*d - delta) * slope * scale;
                }
            });
            let (dq, dk) = (&mut self.dq[own], &mut self.dk[shared]);
            let [d, d_transposed] = [Matrix::rows(d_score, len), Matrix::transposed(d_score, len)];
            matmul([len, dim, len], d, Matrix::rows(k, dim), dq, dim, false);
            matmul([len, dim, len], d_transposed, Matrix::rows(q, dim), dk, dim, later);
        }
    }

    /// Names and elements of what the pass writes, as [`Prepared::results`] has them.
    #[cfg(test)]
    pub fn results(&self) -> Vec<(&'static str, &[f32])> {
        let gradients = [("dq", &self.dq[..]), ("dk", &self.dk), ("dv", &self.dv)];
        let out = (self.work.pass != Direction::Backward).then_some(("out", &self.out[..]));
        let wanted = gradients.into_iter().filter(|_| self.work.pass != Direction::Forward);
        out.into_iter().chain(wanted).collect()
    }
}

/// The elements of query head `h`, and of its key/value head.
fn rows(work: &Workload, h: usize) -> [Range<usize>; 2] {
    let Workload { heads, heads_kv, len, dim, .. } = *work;
    let (each, g) = (len * dim, h / (heads / heads_kv));
    [h * each..(h + 1) * each, g * each..(g + 1) * each]
}
