//! Every block against an f64 twin: the forward by value, the backward by central differences of
//! the twin. Sizes divide nothing, and destinations that are overwritten start as NaN.

use std::sync::Arc;

use crate::architecture::Activation;
use crate::backend::{
    AttentionShape, Blocks, LayerAttention, LayerProgram, LinearShape, LossGradients, LossOperands,
    Moments, NormForward, PackedHeads, Part, PartMut, Rotation, Turn, Weights,
};
use crate::batch::{Batch, IGNORE};
use crate::config::{Norm, ProgramConfig, RopePairing};
use crate::cpu::{Cpu, CpuBatch, CpuPlan, CpuTotals, gated, level, loss, norm, rope};
use crate::matmul::{Matrix, matmul, matmul_deep};
use crate::optimizer::{OptimizerStep, Rule, Sgd, Span, Treatment};
use crate::program::AttentionProgram;
use crate::rope::{RopeTable, Rotary};
use crate::tests::tiny;
use foveate::tensor::random::Random;

fn random(n: usize, seed: u64) -> Vec<f32> {
    let mut random = Random::new(seed);
    (0..n).map(|_| random.normal() as f32).collect()
}

/// A whole array as the gradient of a weight.
fn whole_mut(array: &mut Vec<f32>) -> PartMut<'_, Vec<f32>> {
    let place = 0..array.len();
    PartMut { array, place, accumulate: true }
}

/// One row on the device.
fn uploaded(tokens: &[u32], labels: &[i32], positions: &[i32], table: RopeTable) -> CpuBatch {
    let documents = vec![0; tokens.len()];
    let batch = Batch {
        rows: 1,
        len: tokens.len(),
        tokens,
        labels,
        documents: &documents,
        positions,
        live_pairs: &[],
        order: &[],
    };
    Cpu::default().upload(&batch, &[Arc::new(table)]).unwrap()
}

fn nan(n: usize) -> Vec<f32> {
    vec![f32::NAN; n]
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| x.into()).collect()
}

fn assert_close(found: &[f32], gold: &[f64], what: &str) {
    assert_eq!(found.len(), gold.len(), "{what}");
    let scale = gold.iter().fold(1.0f64, |m, x| m.max(x.abs()));
    for (i, (&x, &y)) in found.iter().zip(gold).enumerate() {
        assert!((f64::from(x) - y).abs() <= 3e-6 * scale, "{what}[{i}]: {x}, the twin has {y}");
    }
}

/// Gradient of `f` at `x`.
fn differences(x: &[f32], f: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let mut x = wide(x);
    (0..x.len())
        .map(|i| {
            let (old, step) = (x[i], 1e-5);
            x[i] = old + step;
            let up = f(&x);
            x[i] = old - step;
            let down = f(&x);
            x[i] = old;
            (up - down) / (2.0 * step)
        })
        .collect()
}

fn dot(a: &[f64], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, &b)| a * f64::from(b)).sum()
}

fn norm_twin(x: &[f64], w: &[f64], eps: f64) -> Vec<f64> {
    let rows = x.chunks(w.len()).flat_map(|row| {
        let mean = row.iter().map(|x| x * x).sum::<f64>() / w.len() as f64;
        let scaled = row.iter().zip(w).map(move |(x, w)| x * w / (mean + eps).sqrt());
        scaled.collect::<Vec<_>>()
    });
    rows.collect()
}

#[test]
fn rms_norm_and_its_gradients_are_those_of_its_twin() {
    let mut cpu = Cpu::default();
    for offset in [0.0, 1.0] {
        rms_norm_is_its_twin(&mut cpu, Norm { eps: 1e-3, offset });
    }
}

fn rms_norm_is_its_twin(cpu: &mut Cpu, shape: Norm) {
    let (tokens, width) = (37, 19);
    let (x, r, w, g) = (
        random(tokens * width, 1),
        random(tokens * width, 2),
        random(width, 3),
        random(tokens * width, 4),
    );
    let gold = |x: &[f64], w: &[f64]| {
        let w: Vec<f64> = w.iter().map(|w| w + f64::from(shape.offset)).collect();
        norm_twin(x, &w, shape.eps.into())
    };
    let (mut inverse, mut out, mut again) = (nan(tokens), nan(x.len()), nan(x.len()));
    cpu.rms_norm(&x, Part::whole(&w), shape, &mut inverse, &mut out).unwrap();
    assert_close(&out, &gold(&wide(&x), &wide(&w)), "out");
    let forward = NormForward { x: &x, weight: Part::whole(&w), norm: shape, inverse: &inverse };
    cpu.rms_norm_again(forward, &mut again).unwrap();
    assert_eq!(out, again);

    let (mut sum, mut fused) = (x.clone(), nan(x.len()));
    cpu.add_rms_norm(&r, &mut sum, Part::whole(&w), shape, &mut inverse, &mut fused).unwrap();
    let plain: Vec<f32> = x.iter().zip(&r).map(|(a, b)| a + b).collect();
    assert_eq!(sum, plain);
    assert_close(&fused, &gold(&wide(&plain), &wide(&w)), "fused");

    cpu.rms_norm(&x, Part::whole(&w), shape, &mut inverse, &mut out).unwrap();
    let (mut d_x, mut d_w) = (nan(x.len()), vec![1.0; width]);
    let forward = NormForward { x: &x, weight: Part::whole(&w), norm: shape, inverse: &inverse };
    let (into, d_weight) = (PartMut::whole(&mut d_x, false), Some(whole_mut(&mut d_w)));
    again.fill(f32::NAN);
    cpu.rms_norm_backward(forward.again(), &g, into, d_weight, Some(&mut again)).unwrap();
    assert_eq!(out, again);
    let gold_x = differences(&x, |x| dot(&gold(x, &wide(&w)), &g));
    let gold_w = differences(&w, |w| 1.0 * w.iter().sum::<f64>() + dot(&gold(&wide(&x), w), &g));
    assert_close(&d_x, &gold_x, "d_x");
    assert_close(&d_w, &gold_w, "d_weight, added to 1");
    let mut added = x.clone();
    let (into, d_weight) = (PartMut::whole(&mut added, true), Some(whole_mut(&mut d_w)));
    cpu.rms_norm_backward(forward, &g, into, d_weight, None).unwrap();
    let gold_added: Vec<f64> = gold_x.iter().zip(&x).map(|(a, &b)| a + f64::from(b)).collect();
    assert_close(&added, &gold_added, "d_x, added to x");
}

#[test]
fn heads_are_normalised_one_by_one_and_values_are_not() {
    let mut cpu = Cpu::default();
    let heads = PackedHeads { rows: 3, len: 130, heads_q: 3, heads_kv: 2, dim: 6 };
    let (tokens, width, turned) = (390, heads.width(), 5);
    let shape = Norm { eps: 1e-3, offset: 1.0 };
    let (x, w, g) = (random(tokens * width, 31), random(12, 32), random(tokens * width, 33));
    let gold = |x: &[f64], w: &[f64]| -> Vec<f64> {
        let w: Vec<f64> = w.iter().map(|w| w + 1.0).collect();
        let head = |(i, head): (usize, &[f64])| match i % 7 {
            0..3 => norm_twin(head, &w[..6], 1e-3),
            3..5 => norm_twin(head, &w[6..], 1e-3),
            _ => head.to_vec(),
        };
        x.chunks(6).enumerate().flat_map(head).collect()
    };
    let (mut inverse, mut out) = (nan(tokens * turned), nan(x.len()));
    cpu.head_norm(heads, &x, Part::whole(&w), shape, None, &mut inverse, &mut out).unwrap();
    assert_close(&out, &gold(&wide(&x), &wide(&w)), "out");
    let (mut d_x, mut d_w) = (g.clone(), vec![1.0; 12]);
    let forward = NormForward { x: &x, weight: Part::whole(&w), norm: shape, inverse: &inverse };
    cpu.head_norm_backward(heads, forward, None, &mut d_x, Some(whole_mut(&mut d_w))).unwrap();
    // Tokens do not mix, so that a token's gradient is its own.
    for t in [0, 1, 255, 389] {
        let at = t * width..(t + 1) * width;
        let gold_x = differences(&x[at.clone()], |x| dot(&gold(x, &wide(&w)), &g[at.clone()]));
        assert_close(&d_x[at.clone()], &gold_x, "d_x");
    }
    let gold_w = differences(&w, |w| w.iter().sum::<f64>() + dot(&gold(&wide(&x), w), &g));
    assert_close(&d_w, &gold_w, "d_weight, added to 1");
}

#[test]
fn a_bias_is_added_to_every_token_and_its_gradient_is_their_sum() {
    let mut cpu = Cpu::default();
    let shape = LinearShape { tokens: 70, inputs: 5, outputs: 300 };
    let (x, w) = (random(70 * 5, 34), random(300 * 5, 35));
    let (bias, g) = (random(300, 36), random(70 * 300, 37));
    let (mut plain, mut y) = (nan(70 * 300), nan(70 * 300));
    cpu.linear(shape, Part::whole(&x), Part::whole(&w), None, None, &mut plain).unwrap();
    let given = Some(Part::whole(&bias));
    cpu.linear(shape, Part::whole(&x), Part::whole(&w), given, None, &mut y).unwrap();
    let mut sums: Vec<f64> = vec![0.5; 300];
    for (i, (y, plain)) in y.iter().zip(&plain).enumerate() {
        assert_eq!(*y, plain + bias[i % 300]);
        sums[i % 300] += f64::from(g[i]);
    }
    let mut d_bias = vec![0.5; 300];
    cpu.bias_backward(&g, whole_mut(&mut d_bias)).unwrap();
    assert_close(&d_bias, &sums, "d_bias, added to 0.5");
    cpu.add(&plain, &mut y).unwrap();
    assert!(y.iter().zip(&plain).enumerate().all(|(i, (y, x))| *y == x + bias[i % 300] + x));
}

#[test]
fn gates_and_their_gradients_are_those_of_their_twins() {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    gate_is_its_twin(Activation::Silu, |x| x * sigmoid(x));
    gate_is_its_twin(Activation::Gelu, |x| {
        let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
        0.5 * x * (1.0 + u.tanh())
    });
}

fn gate_is_its_twin(activation: Activation, twin: impl Fn(f64) -> f64) {
    let mut cpu = Cpu::default();
    let (tokens, width) = (35, 11);
    let (mut x, g) = (random(tokens * 2 * width, 5), random(tokens * width, 6));
    x.iter_mut().for_each(|x| *x *= 3.0);
    let gold = |x: &[f64]| -> Vec<f64> {
        let row = |row: &[f64]| -> Vec<f64> {
            let (gate, up) = row.split_at(width);
            gate.iter().zip(up).map(|(&g, u)| twin(g) * u).collect()
        };
        x.chunks(2 * width).flat_map(row).collect()
    };
    let mut out = nan(tokens * width);
    cpu.gated(activation, width, &x, &mut out).unwrap();
    assert_close(&out, &gold(&wide(&x)), "out");
    let (mut d_x, mut again) = (x.clone(), g.clone());
    cpu.gated_backward(activation, width, &mut d_x, &mut again).unwrap();
    assert_eq!(again, out, "the backward pass recomputes the same bits");
    assert_close(&d_x, &differences(&x, |x| dot(&gold(x), &g)), "d_gate_up");
}

#[test]
fn every_instruction_set_gives_the_same_bits() {
    let (tokens, width, shape) = (3, 53, Norm { eps: 1e-5, offset: 1.0 });
    let heads = PackedHeads { rows: 1, len: 1, heads_q: 2, heads_kv: 1, dim: 38 };
    let [x, residual, g] = [1, 2, 3].map(|seed| random(tokens * width, seed));
    let (w, inverse, qkv) = (random(width, 4), random(tokens, 5), random(4 * 38, 6));
    let run = |arch| {
        let mut found = Vec::new();
        let (mut out, mut root) = (nan(x.len()), nan(tokens));
        norm::forward_task_on(arch, &x, &w, shape, &mut root, &mut out);
        found.extend([out.clone(), root.clone()]);
        let mut sum = x.clone();
        norm::add_forward_task_on(arch, &residual, &mut sum, &w, shape, &mut root, &mut out);
        found.extend([sum, out.clone(), root]);
        norm::again_task_on(arch, &x, &w, shape, &inverse, &mut out);
        found.push(out.clone());
        for accumulate in [false, true] {
            let d_x = &mut out;
            found.push(norm::backward_task_on(arch, &x, &w, 1.0, &inverse, &g, d_x, accumulate));
            found.push(out.clone());
        }
        for activation in [Activation::Silu, Activation::Gelu] {
            gated::activate_on(arch, activation, &x, &residual, &mut out);
            found.push(out.clone());
            let (mut gate, mut up, mut d_out) = (x.clone(), residual.clone(), g.clone());
            gated::differentiate_on(arch, activation, &mut gate, &mut up, &mut d_out);
            found.extend([gate, up, d_out]);
        }
        let (mut halves, mut pairs) = (qkv.clone(), qkv.clone());
        rope::rotate_halves_on(arch, heads, &x[..19], &g[..19], -1.0, &mut halves);
        rope::rotate_pairs_on(arch, heads, &x[..19], &g[..19], 1.0, &mut pairs);
        found.extend([halves, pairs]);
        let mut z = x.clone();
        let nats = loss::token_on(arch, 0.01, &mut z, 7, true);
        found.extend([z, nats.map(|nats| nats as f32).to_vec()]);
        let mut z = x.clone();
        let nats = loss::capped_token_on(arch, 2.0, 0.01, &mut z, 7, true);
        found.extend([z, nats.map(|nats| nats as f32).to_vec()]);
        let bits = |x: Vec<f32>| x.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        found.into_iter().map(bits).collect::<Vec<_>>()
    };
    let all = level::available();
    let wanted = run(all[0]);
    for &arch in &all[1..] {
        assert_eq!(run(arch), wanted, "{arch:?}");
    }
}

#[test]
fn a_linear_block_and_its_gradients_are_those_of_its_twin() {
    let mut cpu = Cpu::default();
    let (tokens, inputs, outputs) = (9, 7, 5);
    let shape = LinearShape { tokens, inputs, outputs };
    let (x, all) = (random(tokens * inputs, 7), random((outputs + 3) * inputs, 8));
    let (g, c) = (random(tokens * outputs, 9), random(tokens * outputs, 10));
    // The weight begins after two rows of another, and one follows.
    let place = 2 * inputs..(2 + outputs) * inputs;
    let weight = || Part { array: &all, place: place.clone() };
    let w = all[place.clone()].to_vec();
    let gold = |x: &[f64], w: &[f64]| -> Vec<f64> {
        let cell = |t: usize, o: usize| -> f64 {
            (0..inputs).map(|i| x[t * inputs + i] * w[o * inputs + i]).sum()
        };
        (0..tokens * outputs).map(|i| cell(i / outputs, i % outputs)).collect()
    };
    let wanted = gold(&wide(&x), &wide(&w));
    let mut y = nan(tokens * outputs);
    cpu.linear(shape, Part::whole(&x), weight(), None, None, &mut y).unwrap();
    assert_close(&y, &wanted, "y");
    let mut y = nan(tokens * outputs);
    cpu.linear(shape, Part::whole(&x), weight(), None, Some(&c), &mut y).unwrap();
    let added: Vec<f64> = wanted.iter().zip(&c).map(|(y, &c)| y + f64::from(c)).collect();
    assert_close(&y, &added, "y, added to c");
    let (mut d_x, mut d_all) = (nan(x.len()), nan(all.len()));
    d_all[place.clone()].fill(0.0);
    cpu.linear_backward_input(shape, &g, weight(), &mut d_x).unwrap();
    assert_close(&d_x, &differences(&x, |x| dot(&gold(x, &wide(&w)), &g)), "d_x");
    let gold_w = differences(&w, |w| dot(&gold(&wide(&x), w), &g));
    for times in [1.0, 2.0] {
        let d_weight = PartMut { array: &mut d_all, place: place.clone(), accumulate: true };
        cpu.linear_backward_weight(shape, &g, &x, d_weight).unwrap();
        let wanted: Vec<f64> = gold_w.iter().map(|w| w * times).collect();
        assert_close(&d_all[place.clone()], &wanted, "d_weight, added up");
    }
    let outside = d_all[..place.start].iter().chain(&d_all[place.end..]);
    assert!(outside.into_iter().all(|x| x.is_nan()), "other weights' gradients are left alone");
}

#[test]
fn a_matrix_product_has_the_same_bits_on_any_number_of_threads() {
    // Sizes around the edges of gemm's blocks, and both orders of every factor.
    for (seed, [m, n, k]) in
        [[1, 300, 700], [515, 1, 129], [37, 41, 2049], [513, 257, 385], [2050, 65, 64]]
            .into_iter()
            .enumerate()
    {
        let (a, b) = (random(m * k, seed as u64), random(k * n, 100 + seed as u64));
        let orders = [
            (Matrix::rows(&a, k), Matrix::rows(&b, n)),
            (Matrix::rows(&a, k), Matrix::transposed(&b, k)),
            (Matrix::transposed(&a, m), Matrix::rows(&b, n)),
        ];
        for (order, (a, b)) in orders.into_iter().enumerate() {
            let run = |threads: usize| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let mut c = vec![0.5f32; m * n];
                pool.install(|| matmul([m, n, k], a, b, &mut c, n, true));
                c
            };
            let one = run(1);
            for threads in [2, 3, 7] {
                let same = run(threads).iter().zip(&one).all(|(x, y)| x.to_bits() == y.to_bits());
                assert!(same, "{m}×{n}×{k}, order {order}: {threads} threads differ from one");
            }
        }
    }
}

#[test]
fn rope_turns_queries_and_keys_by_their_positions_and_back_again() {
    for rotated in [6, 4] {
        rope_turns_and_turns_back(rotated);
    }
}

fn rope_turns_and_turns_back(rotated: usize) {
    let mut cpu = Cpu::default();
    let mut config = tiny(true);
    config.architecture.rotary_share = rotated as f64 / 6.0;
    config.validate().unwrap();
    let width = 8 * 6;
    let x = random(40 * width, 10);
    let positions: Vec<i32> = (0..40).map(|t| t % 23).collect();
    let mut table = RopeTable::default();
    let rotary = Rotary::of(&config, 23).remove(0);
    table.reach(&rotary, 5);
    table.reach(&rotary, 23);
    let batch = uploaded(&[0; 40], &[0; 40], &positions, table);
    let frequencies = rotary.inverse_frequencies;
    for pairing in [RopePairing::HalfSplit, RopePairing::Interleaved] {
        let heads = PackedHeads { rows: 1, len: 40, heads_q: 4, heads_kv: 2, dim: 6 };
        let turn = || Turn { batch: &batch, table: 0, pairing };
        let mut y = x.clone();
        cpu.rope(turn(), heads, Rotation::Forward, &mut y).unwrap();
        let mut gold = wide(&x);
        for (t, row) in gold.chunks_mut(width).enumerate() {
            // The last two of eight heads are the values.
            for head in row.chunks_mut(6).take(6) {
                for (i, f) in frequencies.iter().enumerate() {
                    let (a, b) = match pairing {
                        RopePairing::HalfSplit => (i, i + rotated / 2),
                        RopePairing::Interleaved => (2 * i, 2 * i + 1),
                    };
                    let (sin, cos) = (f64::from(positions[t]) * f).sin_cos();
                    let (u, v) = (head[a], head[b]);
                    (head[a], head[b]) = (u * cos - v * sin, v * cos + u * sin);
                }
            }
        }
        assert_close(&y, &gold, "turned");
        cpu.rope(turn(), heads, Rotation::Backward, &mut y).unwrap();
        assert_close(&y, &wide(&x), "turned back");
        // Behind a norm in one block, and back before its gradient.
        let (weight, norm) = (random(12, 17), Norm { eps: 1e-3, offset: 1.0 });
        let (mut inverse, mut apart, mut out) = (nan(40 * 6), nan(x.len()), nan(x.len()));
        let w = || Part::whole(&weight);
        cpu.head_norm(heads, &x, w(), norm, None, &mut inverse, &mut apart).unwrap();
        cpu.rope(turn(), heads, Rotation::Forward, &mut apart).unwrap();
        cpu.head_norm(heads, &x, w(), norm, Some(turn()), &mut inverse, &mut out).unwrap();
        assert_eq!(out, apart);
        let forward = NormForward { x: &x, weight: w(), norm, inverse: &inverse };
        cpu.head_norm_backward(heads, forward.again(), Some(turn()), &mut out, None).unwrap();
        cpu.rope(turn(), heads, Rotation::Backward, &mut apart).unwrap();
        cpu.head_norm_backward(heads, forward, None, &mut apart, None).unwrap();
        assert_eq!(out, apart);
    }
}

#[test]
fn embedding_gathers_rows_and_adds_their_gradients_in_token_order() {
    let mut cpu = Cpu::default();
    let (vocab, width) = (53, 7);
    let table = random(vocab * width, 11);
    let tokens: Vec<u32> = (0..90).map(|t| t * t % 53).collect();
    let mut out = nan(90 * width);
    let batch = uploaded(&tokens, &[0; 90], &[0; 90], RopeTable::default());
    cpu.embed(&batch, None, Part::whole(&table), width, 3.0, &mut out).unwrap();
    let d = random(90 * width, 12);
    let mut gradient = vec![0.25; vocab * width];
    let mut plain = gradient.clone();
    cpu.embed_backward(&batch, None, &d, width, 3.0, whole_mut(&mut gradient)).unwrap();
    for (t, &token) in tokens.iter().enumerate() {
        for i in 0..width {
            assert_eq!(out[t * width + i], 3.0 * table[token as usize * width + i]);
            plain[token as usize * width + i] += 3.0 * d[t * width + i];
        }
    }
    assert_eq!(gradient, plain);
}

#[test]
fn chunked_cross_entropy_and_its_gradients_are_those_of_its_twin() {
    for (cap, z_weight) in [(None, 0.0), (Some(3.0), 0.0), (None, 0.02), (Some(3.0), 0.3)] {
        for left_out in [&[4][..], &[4, 22], &[0, 1, 3, 4, 8, 9, 10, 11, 15, 22]] {
            cross_entropy_is_its_twin(cap, z_weight, left_out);
        }
    }
}

/// With no labels of the tokens `left_out`.
fn cross_entropy_is_its_twin(cap: Option<f32>, z_weight: f32, left_out: &[usize]) {
    let mut cpu = Cpu::default();
    let (tokens, width, vocab) = (23, 6, 17);
    let mut x = random(tokens * width, 13);
    // One token with logits in the thousands: the softmax has to stay finite.
    let large = if z_weight == 0.0 { 500.0 } else { 5.0 };
    x[5 * width..6 * width].iter_mut().for_each(|x| *x *= large);
    let w = random(vocab * width, 14);
    let mut labels: Vec<i32> = (0..tokens as i32).map(|t| t * 5 % 17).collect();
    left_out.iter().for_each(|&token| labels[token] = IGNORE);
    let labelled = (tokens - left_out.len()) as u64;
    let both = |x: &[f64], w: &[f64]| -> [f64; 2] {
        let token = |t: usize| {
            let logit = |v: usize| -> f64 {
                let z = (0..width).map(|i| x[t * width + i] * w[v * width + i]).sum::<f64>();
                cap.map_or(z, |cap| f64::from(cap) * (z / f64::from(cap)).tanh())
            };
            let most = (0..vocab).map(logit).fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = (0..vocab).map(|v| (logit(v) - most).exp()).sum();
            let lse = most + sum.ln();
            [lse - logit(labels[t] as usize), f64::from(z_weight) * lse * lse]
        };
        let labelled = (0..tokens).filter(|&t| labels[t] != IGNORE).map(token);
        labelled.fold([0.0; 2], |[a, b], [nats, z_loss]| [a + nats, b + z_loss])
    };
    let gold = |x: &[f64], w: &[f64]| -> f64 { both(x, w).iter().sum() };
    let (gold_x, gold_w) =
        (differences(&x, |x| gold(x, &wide(&w))), differences(&w, |w| gold(&wide(&x), w)));
    let batch = uploaded(&[0; 23], &labels, &[0; 23], RopeTable::default());
    for chunk in [1, 5, 23] {
        let (mut d_x, mut d_w) = (nan(x.len()), vec![0.0; w.len()]);
        let mut logits = nan(chunk * vocab);
        let [mut loss, mut alone] = [0.0, 0.5].map(|nats| CpuTotals { nats, ..Default::default() });
        let mut each = nan(tokens);
        let mut of = |each, gradients, totals: &mut CpuTotals| {
            let (weight, logits) = (Part::whole(&w), &mut logits);
            let operands = LossOperands { x: &mut x.clone(), weight, width, cap, z_weight, logits };
            cpu.loss(&batch, operands, each, gradients, totals).unwrap();
        };
        let gradients = LossGradients { d_x: &mut d_x, d_weight: Some(whole_mut(&mut d_w)) };
        of(None, Some(gradients), &mut loss);
        let [wanted, wanted_z] = both(&wide(&x), &wide(&w));
        assert!((loss.z_loss - wanted_z).abs() <= 1e-5 * wanted_z, "{} {wanted_z}", loss.z_loss);
        let nats = loss.nats;
        assert!((nats - wanted).abs() < 1e-6 * wanted, "{nats}, the twin has {wanted}");
        let mut again = CpuTotals::default();
        of(None, None, &mut again);
        assert_eq!((again.nats, again.z_loss), (loss.nats, loss.z_loss), "without gradients");
        of(Some(&mut each), None, &mut alone);
        // Products of fewer rows are summed in another order.
        let allowed = if left_out.len() == 1 { 0.0 } else { 1e-6 * nats };
        assert!((alone.nats - (0.5 + nats)).abs() <= allowed, "added to what was there");
        assert_eq!((loss.labelled, alone.labelled), (labelled, labelled));
        let sum: f64 = wide(&each).iter().sum();
        assert!((sum - wanted).abs() < 1e-6 * wanted, "{sum} by token, the twin has {wanted}");
        assert!(left_out.iter().all(|&token| each[token] == 0.0));
        let z_loss = loss.z_loss;
        let sums = cpu.read(loss).unwrap();
        assert_eq!((sums.nats, sums.z_loss), (nats, z_loss));
        assert_close(&d_x, &gold_x, "d_x");
        assert_close(&d_w, &gold_w, "d_weight");
        let no_gradient = |&token: &usize| d_x[token * width..][..width].iter().all(|&d| d == 0.0);
        assert!(left_out.iter().all(no_gradient));
    }
}

#[test]
fn a_deep_product_is_that_of_its_twin_with_the_same_bits_on_any_number_of_threads() {
    // Sums of 720 × 740 results are not cut, and 720 rows are two blocks on one thread, 1030 three.
    let sizes = [7, 255, 2047, 2048, 3333, 9000].map(|k| [19, 37, k]);
    let large = [[200, 9, 2100], [130, 97, 300], [720, 740, 280], [1030, 3, 1025]];
    for [m, n, k] in sizes.into_iter().chain(large) {
        let (a, b, old) = (random(k * m, 20), random(k * n, 21), random(m * n, 22));
        let run = |threads| {
            let mut into = old.clone();
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| matmul_deep([m, n, k], &a, &b, &mut into, &mut nan(3)));
            into
        };
        let found = run(1);
        let mut gold = wide(&old);
        for t in 0..k {
            let (a, b) = (&a[t * m..][..m], &b[t * n..][..n]);
            for (sums, &x) in gold.chunks_exact_mut(n).zip(a) {
                sums.iter_mut().zip(b).for_each(|(sum, &y)| *sum += f64::from(x) * f64::from(y));
            }
        }
        assert_close(&found, &gold, "the product");
        for threads in [2, 3, 9, 40] {
            assert_eq!(run(threads), found, "{threads} threads, {m}×{n}×{k}");
        }
    }
}

#[test]
fn plans_of_a_backend_run_in_one_workspace() {
    let mut cpu = Cpu::default();
    let heads = PackedHeads { rows: 1, len: 150, heads_q: 2, heads_kv: 1, dim: 8 };
    let program = AttentionProgram::parse(&ProgramConfig::default(), 2).unwrap();
    let mut plan = |mean_kv_len| {
        let (first_heads, cached) = ([0, 0], false);
        let shape = AttentionShape { heads, first_heads, mean_kv_len, cached };
        cpu.plan(&program, &shape).unwrap()
    };
    let (first, second) = (plan(None), plan(Some(64)));
    let kept = |plan: &CpuPlan| plan.plan().cpu().unwrap().workspace_bytes();
    let (qkv, mut lse) = (random(150 * 32, 31), nan(2 * 150));
    let mut out = nan(150 * 16);
    let (program, values) = (LayerProgram { plan: &first, learned: &[] }, Vec::new());
    let layer = LayerAttention { program: &program, heads, values: Part::whole(&values) };
    cpu.attention(layer, &qkv, None, &mut out, &mut lse).unwrap();
    assert!(kept(&first) > 0 && kept(&first) == kept(&second));
}

/// As on a GPU, whose `fv_factor` says so: a step is told by its loss and its norm together.
#[test]
fn a_loss_that_is_not_finite_updates_nothing_whatever_its_gradients_are() {
    let (mut cpu, start) = (Cpu::default(), random(33, 5));
    let treatment = Treatment { rate: 1.0, decay: 1.0 };
    let spans = vec![Span { origin: 0, place: 0..33, treatment }];
    let rule = Rule::Sgd(Sgd { momentum: 0.9, weight_decay: 0.1 });
    let step = OptimizerStep { rule, step: 1, rate: 0.1, clip_norm: 1.0, seed: 0 };
    for (nats, changes) in [(f64::INFINITY, false), (f64::NAN, false), (3.0, true)] {
        let mut weights = Weights { array: start.clone(), ..Weights::default() };
        let mut moments = Moments { mean: vec![0.0; 33], square: Vec::new() };
        let mut totals = CpuTotals { nats, labelled: 7, ..CpuTotals::default() };
        let (gradients, mut told) = (random(33, 6), f64::INFINITY);
        let mut sum = |own: crate::RankSums| {
            told = own.squares;
            Ok(own)
        };
        let over = crate::SumOverRanks { elsewhere: &[], sum: &mut sum };
        cpu.clip(&step, &gradients, false, Some(over), &mut totals).unwrap();
        assert_eq!(told.is_finite(), changes, "what other ranks are told");
        // One rank has a norm of its own.
        cpu.clip(&step, &gradients, false, None, &mut totals).unwrap();
        assert!(totals.grad_norm.is_finite());
        cpu.update(&step, &spans, &mut weights, (&gradients, 0), &mut moments, 33, &mut totals)
            .unwrap();
        assert_eq!(weights.array != start, changes, "{nats}");
        assert_eq!(moments.mean.iter().any(|&m| m != 0.0), changes, "{nats}");
    }
}
