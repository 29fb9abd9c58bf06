//! SwiGLU: `silu(gate) · up`, with `silu(x) = x·σ(x)` and `silu'(x) = σ·(1 + x·(1 − σ))`.

use rayon::prelude::*;

use super::TASK;
use super::level::for_each_level;
use super::math::sigmoid;

pub(super) fn forward(width: usize, gate_up: &[f32], out: &mut [f32]) {
    let tasks = out.par_chunks_mut(width * TASK).zip(gate_up.par_chunks(2 * width * TASK));
    tasks.for_each(|(out, gate_up)| {
        for (out, row) in out.chunks_exact_mut(width).zip(gate_up.chunks_exact(2 * width)) {
            let (gate, up) = row.split_at(width);
            activate(gate, up, out);
        }
    });
}

for_each_level! {
    activate / activate_on = activate_body(gate: &[f32], up: &[f32], out: &mut [f32])
}

#[inline(always)]
fn activate_body(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((o, &g), &u) in out.iter_mut().zip(gate).zip(up) {
        *o = g * sigmoid(g) * u;
    }
}

pub(super) fn backward(width: usize, gate_up: &mut [f32], d_out: &mut [f32]) {
    let tasks = d_out.par_chunks_mut(width * TASK).zip(gate_up.par_chunks_mut(2 * width * TASK));
    tasks.for_each(|(d_out, gate_up)| {
        for (d_out, row) in d_out.chunks_exact_mut(width).zip(gate_up.chunks_exact_mut(2 * width)) {
            let (gate, up) = row.split_at_mut(width);
            differentiate(gate, up, d_out);
        }
    });
}

for_each_level! {
    differentiate / differentiate_on = differentiate_body(gate: &mut [f32], up: &mut [f32], d_out: &mut [f32])
}

#[inline(always)]
fn differentiate_body(gate: &mut [f32], up: &mut [f32], d_out: &mut [f32]) {
    for ((d, g), u) in d_out.iter_mut().zip(gate).zip(up) {
        let (x, v, dy) = (*g, *u, *d);
        let s = sigmoid(x);
        *d = x * s * v;
        *u = dy * x * s;
        *g = dy * v * (s * (1.0 + x * (1.0 - s)));
    }
}
