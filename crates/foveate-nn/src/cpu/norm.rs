//! RMSNorm, with and without the residual addition.
//!
//! `y = x·r·w` with `r = 1/√(mean x² + ε)`, so for a gradient `g` of `y`
//! `dw = Σ_t g·x·r` and `dx = r·(g·w − x·r²·mean(g·w·x))`; w is the weight, plus an offset. What is
//! normalised is a row, or each query and key head of a packed projection.

use rayon::prelude::*;

use super::TASK;
use super::level::for_each_level;
use super::math::sum;
use crate::backend::{NormForward, PackedHeads, PartMut};
use crate::config::Norm;

pub(super) fn forward(x: &[f32], weight: &[f32], norm: Norm, inverse: &mut [f32], out: &mut [f32]) {
    let chunk = weight.len() * TASK;
    let tasks =
        out.par_chunks_mut(chunk).zip(inverse.par_chunks_mut(TASK)).zip(x.par_chunks(chunk));
    tasks.for_each(|((out, inverse), x)| forward_task(x, weight, norm, inverse, out));
}

for_each_level! {
    forward_task / forward_task_on = forward_body(
        x: &[f32],
        weight: &[f32],
        norm: Norm,
        inverse: &mut [f32],
        out: &mut [f32],
    )
}

#[inline(always)]
fn forward_body(x: &[f32], weight: &[f32], norm: Norm, inverse: &mut [f32], out: &mut [f32]) {
    let width = weight.len();
    let rows = out.chunks_exact_mut(width).zip(inverse).zip(x.chunks_exact(width));
    for ((out, inverse), x) in rows {
        *inverse = inverse_root(x, norm.eps);
        normalise(x, weight, norm.offset, *inverse, out);
    }
}

pub(super) fn add_forward(
    residual: &[f32],
    x: &mut [f32],
    weight: &[f32],
    norm: Norm,
    inverse: &mut [f32],
    out: &mut [f32],
) {
    let chunk = weight.len() * TASK;
    let tasks = out
        .par_chunks_mut(chunk)
        .zip(inverse.par_chunks_mut(TASK))
        .zip(x.par_chunks_mut(chunk))
        .zip(residual.par_chunks(chunk));
    tasks.for_each(|(((out, inverse), x), residual)| {
        add_forward_task(residual, x, weight, norm, inverse, out);
    });
}

for_each_level! {
    add_forward_task / add_forward_task_on = add_forward_body(
        residual: &[f32],
        x: &mut [f32],
        weight: &[f32],
        norm: Norm,
        inverse: &mut [f32],
        out: &mut [f32],
    )
}

#[inline(always)]
fn add_forward_body(
    residual: &[f32],
    x: &mut [f32],
    weight: &[f32],
    norm: Norm,
    inverse: &mut [f32],
    out: &mut [f32],
) {
    let width = weight.len();
    let rows = out
        .chunks_exact_mut(width)
        .zip(inverse)
        .zip(x.chunks_exact_mut(width))
        .zip(residual.chunks_exact(width));
    for (((out, inverse), x), residual) in rows {
        x.iter_mut().zip(residual).for_each(|(x, r)| *x += r);
        *inverse = inverse_root(x, norm.eps);
        normalise(x, weight, norm.offset, *inverse, out);
    }
}

pub(super) fn again(forward: &NormForward<'_, Vec<f32>>, out: &mut [f32]) {
    let &NormForward { x, ref weight, norm, inverse } = forward;
    let weight = weight.values();
    let chunk = weight.len() * TASK;
    let tasks = out.par_chunks_mut(chunk).zip(inverse.par_chunks(TASK)).zip(x.par_chunks(chunk));
    tasks.for_each(|((out, inverse), x)| again_task(x, weight, norm, inverse, out));
}

for_each_level! {
    again_task / again_task_on = again_body(
        x: &[f32],
        weight: &[f32],
        norm: Norm,
        inverse: &[f32],
        out: &mut [f32],
    )
}

#[inline(always)]
fn again_body(x: &[f32], weight: &[f32], norm: Norm, inverse: &[f32], out: &mut [f32]) {
    let width = weight.len();
    let rows = out.chunks_exact_mut(width).zip(inverse).zip(x.chunks_exact(width));
    for ((out, &inverse), x) in rows {
        normalise(x, weight, norm.offset, inverse, out);
    }
}

pub(super) fn backward(
    forward: &NormForward<'_, Vec<f32>>,
    d_out: &[f32],
    d_x: PartMut<'_, Vec<f32>>,
    d_weight: Option<&mut [f32]>,
) {
    let &NormForward { x, ref weight, norm, inverse } = forward;
    let (weight, accumulate) = (weight.values(), d_x.accumulate);
    // Tokens that one partial sum of d_weight covers: fixed, so that its order is.
    let tokens = 8 * TASK;
    let chunk = weight.len() * tokens;
    let partials: Vec<Vec<f32>> = d_x
        .values()
        .par_chunks_mut(chunk)
        .zip(x.par_chunks(chunk))
        .zip(d_out.par_chunks(chunk))
        .zip(inverse.par_chunks(tokens))
        .map(|(((d_x, x), d_out), inverse)| {
            backward_task(x, weight, norm.offset, inverse, d_out, d_x, accumulate)
        })
        .collect();
    add_all(partials, d_weight);
}

for_each_level! {
    /// Writes `d_x`, or adds to it, and returns the gradient of the weight.
    backward_task / backward_task_on = backward_body(
        x: &[f32],
        weight: &[f32],
        offset: f32,
        inverse: &[f32],
        d_out: &[f32],
        d_x: &mut [f32],
        accumulate: bool,
    ) -> Vec<f32>
}

#[inline(always)]
fn backward_body(
    x: &[f32],
    weight: &[f32],
    offset: f32,
    inverse: &[f32],
    d_out: &[f32],
    d_x: &mut [f32],
    accumulate: bool,
) -> Vec<f32> {
    let width = weight.len();
    let (mut d_weight, mut d_scaled) = (vec![0.0f32; width], vec![0.0f32; width]);
    let rows = d_x
        .chunks_exact_mut(width)
        .zip(x.chunks_exact(width))
        .zip(d_out.chunks_exact(width))
        .zip(inverse);
    for (((d_x, x), g), &r) in rows {
        for (((s, dw), (&g, &x)), &w) in
            d_scaled.iter_mut().zip(&mut d_weight).zip(g.iter().zip(x)).zip(weight)
        {
            *dw += g * (x * r);
            *s = g * (offset + w);
        }
        let mean = sum(&d_scaled, x, |a, b| a * b) / width as f32;
        let slope = mean * r * r;
        for ((d, &s), &x) in d_x.iter_mut().zip(&d_scaled).zip(x) {
            let value = r * (s - x * slope);
            *d = if accumulate { *d + value } else { value };
        }
    }
    d_weight
}

/// Adds the gradients of the weight that tasks found, where it is trained.
fn add_all(partials: Vec<Vec<f32>>, d_weight: Option<&mut [f32]>) {
    let Some(d_weight) = d_weight else { return };
    for partial in partials {
        d_weight.iter_mut().zip(partial).for_each(|(a, b)| *a += b);
    }
}

/// The heads of one token, each with the weight and the place of its reciprocal root; those of values
/// come last and have none.
fn normalised(heads: PackedHeads) -> impl Iterator<Item = (usize, std::ops::Range<usize>)> {
    (0..heads.heads_q + heads.heads_kv).map(move |head| {
        let first = if head < heads.heads_q { 0 } else { heads.dim };
        (head, first..first + heads.dim)
    })
}

pub(super) fn heads_forward(
    heads: PackedHeads,
    qkv: &[f32],
    weight: &[f32],
    norm: Norm,
    inverse: &mut [f32],
    out: &mut [f32],
) {
    let (width, dim, turned) = (heads.width(), heads.dim, heads.heads_q + heads.heads_kv);
    let tokens = out
        .par_chunks_mut(width * TASK)
        .zip(inverse.par_chunks_mut(turned * TASK))
        .zip(qkv.par_chunks(width * TASK));
    tokens.for_each(|((out, inverse), qkv)| {
        let rows = out.chunks_exact_mut(width).zip(inverse.chunks_exact_mut(turned));
        for ((out, inverse), qkv) in rows.zip(qkv.chunks_exact(width)) {
            for (head, of_weight) in normalised(heads) {
                let (at, weight) = (head * dim..(head + 1) * dim, &weight[of_weight]);
                let inverse = std::slice::from_mut(&mut inverse[head]);
                forward_task(&qkv[at.clone()], weight, norm, inverse, &mut out[at]);
            }
            out[turned * dim..].copy_from_slice(&qkv[turned * dim..]);
        }
    });
}

pub(super) fn heads_backward(
    heads: PackedHeads,
    forward: &NormForward<'_, Vec<f32>>,
    d_qkv: &mut [f32],
    d_weight: Option<&mut [f32]>,
) {
    let &NormForward { x: qkv, ref weight, norm, inverse } = forward;
    let weight = weight.values();
    let (width, dim, turned) = (heads.width(), heads.dim, heads.heads_q + heads.heads_kv);
    let tokens = 8 * TASK;
    let partials: Vec<Vec<f32>> = d_qkv
        .par_chunks_mut(width * tokens)
        .zip(qkv.par_chunks(width * tokens))
        .zip(inverse.par_chunks(turned * tokens))
        .map(|((d_qkv, qkv), inverse)| {
            let (mut d_weight, mut d_head) = (vec![0.0f32; 2 * dim], vec![0.0f32; dim]);
            let rows = d_qkv.chunks_exact_mut(width).zip(qkv.chunks_exact(width));
            for ((d_qkv, qkv), inverse) in rows.zip(inverse.chunks_exact(turned)) {
                for (head, of_weight) in normalised(heads) {
                    let at = head * dim..(head + 1) * dim;
                    let (weight, inverse) = (&weight[of_weight.clone()], &inverse[head..=head]);
                    let (x, g) = (&qkv[at.clone()], &d_qkv[at.clone()]);
                    let d_w = backward_task(x, weight, norm.offset, inverse, g, &mut d_head, false);
                    d_weight[of_weight].iter_mut().zip(d_w).for_each(|(a, b)| *a += b);
                    d_qkv[at].copy_from_slice(&d_head);
                }
            }
            d_weight
        })
        .collect();
    add_all(partials, d_weight);
}

#[inline(always)]
fn normalise(x: &[f32], weight: &[f32], offset: f32, inverse: f32, out: &mut [f32]) {
    for ((o, &x), &w) in out.iter_mut().zip(x).zip(weight) {
        *o = x * inverse * (offset + w);
    }
}

#[inline(always)]
fn inverse_root(x: &[f32], eps: f32) -> f32 {
    1.0 / (sum(x, x, |a, b| a * b) / x.len() as f32 + eps).sqrt()
}
