//! Gated activations: `f(gate) · up`. SiLU is `x·σ(x)`, of slope `σ·(1 + x·(1 − σ))`; GELU by tanh is
//! `x·σ(2u)` with `u = √(2/π)·(x + 0.044715·x³)`, as `(1 + tanh u)/2 = σ(2u)`.

use rayon::prelude::*;

use super::TASK;
use super::level::for_each_level;
use super::math::sigmoid;
use crate::architecture::Activation;

pub(super) fn forward(activation: Activation, width: usize, gate_up: &[f32], out: &mut [f32]) {
    let tasks = out.par_chunks_mut(width * TASK).zip(gate_up.par_chunks(2 * width * TASK));
    tasks.for_each(|(out, gate_up)| {
        for (out, row) in out.chunks_exact_mut(width).zip(gate_up.chunks_exact(2 * width)) {
            let (gate, up) = row.split_at(width);
            activate(activation, gate, up, out);
        }
    });
}

for_each_level! {
    activate / activate_on = activate_body(
        activation: Activation,
        gate: &[f32],
        up: &[f32],
        out: &mut [f32],
    )
}

#[inline(always)]
fn activate_body(activation: Activation, gate: &[f32], up: &[f32], out: &mut [f32]) {
    match activation {
        Activation::Silu => activate_by(silu, gate, up, out),
        Activation::Gelu => activate_by(gelu, gate, up, out),
    }
}

#[inline(always)]
fn activate_by(f: impl Fn(f32) -> (f32, f32), gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((o, &g), &u) in out.iter_mut().zip(gate).zip(up) {
        *o = f(g).0 * u;
    }
}

pub(super) fn backward(
    activation: Activation,
    width: usize,
    gate_up: &mut [f32],
    d_out: &mut [f32],
) {
    let tasks = d_out.par_chunks_mut(width * TASK).zip(gate_up.par_chunks_mut(2 * width * TASK));
    tasks.for_each(|(d_out, gate_up)| {
        for (d_out, row) in d_out.chunks_exact_mut(width).zip(gate_up.chunks_exact_mut(2 * width)) {
            let (gate, up) = row.split_at_mut(width);
            differentiate(activation, gate, up, d_out);
        }
    });
}

for_each_level! {
    differentiate / differentiate_on = differentiate_body(
        activation: Activation,
        gate: &mut [f32],
        up: &mut [f32],
        d_out: &mut [f32],
    )
}

#[inline(always)]
fn differentiate_body(activation: Activation, gate: &mut [f32], up: &mut [f32], d_out: &mut [f32]) {
    match activation {
        Activation::Silu => differentiate_by(silu, gate, up, d_out),
        Activation::Gelu => differentiate_by(gelu, gate, up, d_out),
    }
}

#[inline(always)]
fn differentiate_by(
    f: impl Fn(f32) -> (f32, f32),
    gate: &mut [f32],
    up: &mut [f32],
    d_out: &mut [f32],
) {
    for ((d, g), u) in d_out.iter_mut().zip(gate).zip(up) {
        let ((value, slope), v, dy) = (f(*g), *u, *d);
        *d = value * v;
        *u = dy * value;
        *g = dy * v * slope;
    }
}

/// SiLU and its slope.
#[inline(always)]
fn silu(x: f32) -> (f32, f32) {
    let s = sigmoid(x);
    (x * s, s * (1.0 + x * (1.0 - s)))
}

/// GELU and its slope. Beyond 16 the sigmoid is 0 or 1, whose slope of 0 is to meet no infinite cube.
#[inline(always)]
fn gelu(x: f32) -> (f32, f32) {
    const UNIT: f32 = 0.797_884_6;
    const CUBE: f32 = 0.044_715;
    let c = if x > 16.0 { 16.0 } else { x };
    let c = if c < -16.0 { -16.0 } else { c };
    let s = sigmoid(2.0 * UNIT * c * (1.0 + CUBE * c * c));
    (x * s, s + 2.0 * c * s * (1.0 - s) * UNIT * (1.0 + 3.0 * CUBE * c * c))
}
