//! Norms, gates, rotary positions, sums of rows and of ranks.

use std::time::{Duration, Instant};

use super::*;
use crate::embedding::{EmbeddingBackward, TokenOrder};
use crate::gated::{Activation, Gated, GatedBackward};
use crate::head_norm::{self, HeadNorm, HeadNormBackward, Heads};
use crate::norm::{self, RmsNorm, RmsNormAgain, RmsNormBackward};
use crate::pause::Pause;
use crate::ranks::{Narrow, SumRanks};
use crate::rope::{Pairing, Rope, Turn};
use crate::vectors::{Add, AddRows, ColumnSums, CopyRows, Widen};

const TOKENS: usize = 7;

/// The norm of rows of `x`: each row's factor, and out.
fn norm_of(x: &[f64], weight: &[f64], eps: f64, offset: f64) -> (Vec<f64>, Vec<f64>) {
    let width = weight.len();
    let inverse: Vec<f64> = x
        .chunks(width)
        .map(|row| 1.0 / (row.iter().map(|x| x * x).sum::<f64>() / width as f64 + eps).sqrt())
        .collect();
    let out = x
        .iter()
        .enumerate()
        .map(|(i, x)| x * inverse[i / width] * (offset + weight[i % width]))
        .collect();
    (inverse, out)
}

/// Gradients of x and of the weight for `g` of out.
fn norm_gradients(
    x: &[f64],
    weight: &[f64],
    inverse: &[f64],
    g: &[f64],
    offset: f64,
) -> (Vec<f64>, Vec<f64>) {
    let width = weight.len();
    let (mut d_x, mut d_weight) = (Vec::new(), vec![0.0; width]);
    for ((x, g), r) in x.chunks(width).zip(g.chunks(width)).zip(inverse) {
        let product = |i: usize| g[i] * (offset + weight[i]);
        let mean = (0..width).map(|i| product(i) * x[i]).sum::<f64>() / width as f64;
        d_x.extend((0..width).map(|i| r * (product(i) - x[i] * r * r * mean)));
        d_weight.iter_mut().enumerate().for_each(|(i, sum)| *sum += g[i] * x[i] * r);
    }
    (d_x, d_weight)
}

#[test]
fn norms_and_their_gradients_are_those_of_f64() {
    let mut random = Random::new(1);
    let f32s = Placing::dense(DType::F32);
    for (placing, width) in placings() {
        for (with_residual, offset) in [(false, 0.0), (true, 1.0)] {
            let shape = [TOKENS, width];
            let x = placing.random(shape, &mut random, 3.0);
            let residual = placing.random(shape, &mut random, 3.0);
            let weight = placing.random([1, width], &mut random, 1.0);
            let (sum, out) = (placing.empty(shape), placing.empty(shape));
            let inverse = f32s.empty([1, TOKENS]);
            let block = RmsNorm {
                x: x.tensor(),
                residual: with_residual.then(|| (residual.tensor(), sum.tensor())),
                weight: weight.vector(),
                inverse: inverse.vector(),
                out: out.tensor(),
                eps: 1e-5,
                offset: offset as f32,
            };
            if !run(&block) {
                return;
            }
            let tolerance = tolerance(placing.dtype);
            let x = if with_residual {
                let added: Vec<f64> =
                    x.values().iter().zip(residual.values()).map(|(a, b)| a + b).collect();
                close("sum", &sum.values(), &added, tolerance);
                &sum
            } else {
                &x
            };
            let (values, weights) = (x.values(), weight.values());
            let (factors, expected) = norm_of(&values, &weights, 1e-5, offset);
            close("inverse", &inverse.values(), &factors, 1e-6);
            close("out", &out.values(), &expected, tolerance);

            let again = placing.empty(shape);
            run(&RmsNormAgain {
                x: x.tensor(),
                weight: weight.vector(),
                inverse: inverse.vector(),
                out: again.tensor(),
                offset: offset as f32,
            });
            assert_eq!(again.values(), out.values(), "to the bit");

            let d_out = placing.random(shape, &mut random, 1.0);
            let d_x = placing.random(shape, &mut random, 1.0);
            let before = d_x.values();
            let d_weight = f32s.random([1, width], &mut random, 1.0);
            let weight_before = d_weight.values();
            let partial = f32s.empty([norm::parts(TOKENS), width]);
            let beside = placing.empty(shape);
            run(&RmsNormBackward {
                x: x.tensor(),
                weight: weight.vector(),
                inverse: inverse.vector(),
                d_out: d_out.tensor(),
                d_x: d_x.tensor(),
                accumulate: with_residual,
                again: Some(beside.tensor()),
                d_weight: Some(d_weight.vector()),
                accumulate_weight: !with_residual,
                partial: partial.tensor(),
                offset: offset as f32,
            });
            assert_eq!(beside.values(), out.values(), "to the bit, beside the gradients");
            let g = d_out.values();
            let (mut expected_x, mut expected_weight) =
                norm_gradients(&values, &weights, &factors, &g, offset);
            if with_residual {
                expected_x.iter_mut().zip(before).for_each(|(x, before)| *x += before);
            } else {
                expected_weight.iter_mut().zip(weight_before).for_each(|(x, b)| *x += b);
            }
            close("d_x", &d_x.values(), &expected_x, tolerance + 2e-6);
            close("d_weight", &d_weight.values(), &expected_weight, 4e-6);
        }
    }
}

/// More rows than parts, in which every part sums several, and a gradient of 16 bits.
#[test]
fn the_gradient_of_a_norms_weight_sums_all_rows() {
    // Rows that a warp holds, the widest of them, and those of a CTA, which holds a vector a thread or two.
    for (tokens, width) in [(2100, 600), (2100, 1016), (1100, 2040), (600, 2056)] {
        sums_all_rows(tokens, width);
    }
}

fn sums_all_rows(tokens: usize, width: usize) {
    let mut random = Random::new(2);
    let placing = Placing::dense(DType::BF16);
    let f32s = Placing::dense(DType::F32);
    let x = placing.random([tokens, width], &mut random, 1.0);
    let d_out = placing.random([tokens, width], &mut random, 1.0);
    let weight = placing.matrix([1, width], &vec![1.0; width]);
    let inverse = f32s.matrix([1, tokens], &vec![0.5; tokens]);
    let d_weight = placing.empty([1, width]);
    let partial = f32s.empty([norm::parts(tokens), width]);
    let ran = run(&RmsNormBackward {
        x: x.tensor(),
        weight: weight.vector(),
        inverse: inverse.vector(),
        d_out: d_out.tensor(),
        d_x: d_out.tensor(),
        accumulate: false,
        again: None,
        d_weight: Some(d_weight.vector()),
        accumulate_weight: false,
        partial: partial.tensor(),
        offset: 0.0,
    });
    if !ran {
        return;
    }
    // d_x took the place of d_out, so what it was is drawn once more.
    let mut random = Random::new(2);
    let values = x.values();
    placing.random([tokens, width], &mut random, 1.0);
    let g = placing.random([tokens, width], &mut random, 1.0).values();
    let (ones, halves) = (vec![1.0; width], vec![0.5; tokens]);
    let (expected_x, expected) = norm_gradients(&values, &ones, &halves, &g, 0.0);
    close("d_weight", &d_weight.values(), &expected, tolerance(DType::BF16));
    close("d_x", &d_out.values(), &expected_x, tolerance(DType::BF16));
}

fn angle(position: usize, pair: usize) -> f64 {
    position as f64 * 0.7 + pair as f64 * 0.3
}

/// A table of rotations: `half` cosines of each position, then as many sines.
fn angles(positions: usize, half: usize) -> Vec<f64> {
    let of = |p: usize| {
        let cosines = (0..half).map(move |i| angle(p, i).cos());
        cosines.chain((0..half).map(move |i| angle(p, i).sin()))
    };
    (0..positions).flat_map(of).collect()
}

/// A head whose first `2 · half` columns are turned by a position's angles, or back with a sign of −1.
fn turned(head: &[f64], pairing: Pairing, half: usize, position: usize, sign: f64) -> Vec<f64> {
    let mut out = head.to_vec();
    for i in 0..half {
        let (first, second) = match pairing {
            Pairing::Halves => (i, i + half),
            Pairing::Neighbours => (2 * i, 2 * i + 1),
        };
        let (sin, cos) = angle(position, i).sin_cos();
        out[first] = head[first] * cos - sign * head[second] * sin;
        out[second] = head[second] * cos + sign * head[first] * sin;
    }
    out
}

#[test]
fn norms_of_heads_and_their_gradients_are_those_of_f64() {
    let mut random = Random::new(12);
    let f32s = Placing::dense(DType::F32);
    let cases = placings().into_iter().filter(|(_, dim)| *dim <= 512);
    let pairings = [None, Some(Pairing::Halves), Some(Pairing::Neighbours)];
    for ((placing, dim), pairing) in cases.flat_map(|case| pairings.map(|p| (case, p))) {
        // Queries of five heads, keys and values of two: no number of warps. All but a few columns turn.
        let heads = Heads { queries: 5, keys: 2, dim };
        let (tokens, width) = (9, heads.width());
        let shape = [tokens, width];
        let qkv = placing.random(shape, &mut random, 3.0);
        let weight = placing.random([1, 2 * dim], &mut random, 1.0);
        let out = placing.empty(shape);
        let inverse = f32s.empty([1, tokens * heads.normalised()]);
        let (positions, half) = (5, (dim / 2 - 8) / 8 * 8);
        let table =
            Placing::dense(DType::F32).matrix([positions, 2 * half], &angles(positions, half));
        let at: Vec<i32> = (0..tokens).map(|t| (t * 3 % positions) as i32).collect();
        let (at_memory, at_shape) = (Memory::of(&at), [tokens]);
        let turn = pairing.map(|pairing| Turn {
            positions: at_memory.array(ElementType::I32, &at_shape),
            table: table.tensor(),
            pairing,
        });
        // A head of a token, turned.
        let turned = |head: &[f64], token: usize, sign: f64| match pairing {
            None => head.to_vec(),
            Some(pairing) => turned(head, pairing, half, at[token] as usize, sign),
        };
        let ran = run(&HeadNorm {
            heads,
            qkv: qkv.tensor(),
            weight: weight.vector(),
            inverse: inverse.vector(),
            out: out.tensor(),
            eps: 1e-5,
            offset: 1.0,
            turn,
        });
        if !ran {
            return;
        }
        if let Some(Turn { table, .. }) = turn {
            // Angles that no vector begins with are read one by one.
            let table = DeviceTensor { address: table.address + 4, ..table };
            let (out, turn) = (out.tensor(), turn.map(|turn| Turn { table, ..turn }));
            let (qkv, weight, inverse) = (qkv.tensor(), weight.vector(), inverse.vector());
            let block = HeadNorm { heads, qkv, weight, inverse, out, eps: 1e-5, offset: 1.0, turn };
            assert_eq!(block.launches(&mut Accesses::default()).unwrap()[0].source.vector, 1);
        }
        let d_qkv = placing.random(shape, &mut random, 1.0);
        let (values, weights, g) = (qkv.values(), weight.values(), d_qkv.values());
        let d_weight = f32s.random([1, 2 * dim], &mut random, 1.0);
        let before = d_weight.values();
        let parts = head_norm::parts(tokens);
        let partial = f32s.empty([parts, 2 * dim]);
        run(&HeadNormBackward {
            heads,
            qkv: qkv.tensor(),
            weight: weight.vector(),
            inverse: inverse.vector(),
            d_qkv: d_qkv.tensor(),
            d_weight: Some(d_weight.vector()),
            partial: partial.tensor(),
            offset: 1.0,
            turn,
        });
        let (mut expected, mut factors) = (values.clone(), Vec::new());
        let (mut expected_x, mut expected_weight) = (g.clone(), before);
        for (i, x) in values.chunks(dim).enumerate() {
            let (head, at) = (i % 9, i * dim..(i + 1) * dim);
            if head >= 7 {
                continue;
            }
            let first = if head < 5 { 0 } else { dim };
            let weight = &weights[first..first + dim];
            let (factor, normed) = norm_of(x, weight, 1e-5, 1.0);
            let g = turned(&g[at.clone()], i / 9, -1.0);
            let (d_x, d_w) = norm_gradients(x, weight, &factor, &g, 1.0);
            expected[at.clone()].copy_from_slice(&turned(&normed, i / 9, 1.0));
            expected_x[at].copy_from_slice(&d_x);
            expected_weight[first..].iter_mut().zip(d_w).for_each(|(sum, d)| *sum += d);
            factors.extend(factor);
        }
        let tolerance = tolerance(placing.dtype);
        close("inverse", &inverse.values(), &factors, 1e-6);
        close("out", &out.values(), &expected, tolerance);
        close("d_qkv", &d_qkv.values(), &expected_x, tolerance + 2e-6);
        close("d_weight", &d_weight.values(), &expected_weight, 4e-6);
    }
}

#[test]
fn the_gradient_of_a_bias_sums_all_rows_and_rows_are_added() {
    let mut random = Random::new(13);
    let f32s = Placing::dense(DType::F32);
    for (placing, width) in placings() {
        // More rows than a CTA asks for at once, and no multiple of them.
        let rows = 5000;
        let from = placing.random([rows, width], &mut random, 1.0);
        let to = f32s.random([1, width], &mut random, 1.0);
        let mut expected = to.values();
        let sums = ColumnSums { from: from.tensor(), to: to.vector() };
        if !run(&sums) {
            return;
        }
        for (i, x) in from.values().iter().enumerate() {
            expected[i % width] += x;
        }
        close("d_bias", &to.values(), &expected, 4e-6);
        let to = placing.random([rows, width], &mut random, 1.0);
        let expected: Vec<f64> =
            to.values().iter().zip(from.values()).map(|(y, x)| y + x).collect();
        run(&AddRows { from: from.tensor(), to: to.tensor() });
        close("rows added", &to.values(), &expected, tolerance(placing.dtype));
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// f and its slope.
fn activated(activation: Activation, x: f64) -> (f64, f64) {
    match activation {
        Activation::Silu => {
            let s = sigmoid(x);
            (x * s, s * (1.0 + x * (1.0 - s)))
        }
        Activation::Gelu => {
            let unit = (2.0 / std::f64::consts::PI).sqrt();
            let t = (unit * (x + 0.044715 * x * x * x)).tanh();
            let slope = 0.5 * x * (1.0 - t * t) * unit * (1.0 + 3.0 * 0.044715 * x * x);
            (0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + slope)
        }
    }
}

#[test]
fn gates_and_their_gradients_are_those_of_f64() {
    let mut random = Random::new(3);
    for (placing, width) in placings() {
        for activation in [Activation::Silu, Activation::Gelu] {
            let gate_up = placing.random([TOKENS, 2 * width], &mut random, 8.0);
            let out = placing.empty([TOKENS, width]);
            let gated = Gated { activation, gate_up: gate_up.tensor(), out: out.tensor() };
            if !run(&gated) {
                return;
            }
            let values = gate_up.values();
            let at =
                |t: usize, i: usize| (values[t * 2 * width + i], values[t * 2 * width + width + i]);
            let each = |of: &dyn Fn(usize, usize) -> f64| -> Vec<f64> {
                (0..TOKENS * width).map(|j| of(j / width, j % width)).collect()
            };
            let expected = each(&|t, i| activated(activation, at(t, i).0).0 * at(t, i).1);
            let tolerance = tolerance(placing.dtype);
            close("out", &out.values(), &expected, tolerance);

            let d_out = placing.random([TOKENS, width], &mut random, 1.0);
            let g = d_out.values();
            run(&GatedBackward { activation, gate_up: gate_up.tensor(), d_out: d_out.tensor() });
            assert_eq!(d_out.values(), out.values(), "out once more");
            let got = gate_up.values();
            let (d_gate, d_up): (Vec<f64>, Vec<f64>) = (0..TOKENS * width)
                .map(|j| {
                    (
                        got[j / width * 2 * width + j % width],
                        got[j / width * 2 * width + width + j % width],
                    )
                })
                .unzip();
            let expected =
                each(&|t, i| g[t * width + i] * at(t, i).1 * activated(activation, at(t, i).0).1);
            close("d_gate", &d_gate, &expected, tolerance);
            let expected = each(&|t, i| g[t * width + i] * activated(activation, at(t, i).0).0);
            close("d_up", &d_up, &expected, tolerance);
        }
    }
}

/// Gates far from 0 neither overflow nor give NaN.
#[test]
fn gates_of_any_size_are_finite() {
    let values = [-1e30, -3e4, -104.0, -88.0, 0.0, 88.0, 3e4, 1e30];
    for activation in [Activation::Silu, Activation::Gelu] {
        let placing = Placing::dense(DType::F32);
        let row: Vec<f64> = values.iter().copied().chain([1.0; 8]).collect();
        let gate_up = placing.matrix([1, 16], &row);
        let out = placing.empty([1, 8]);
        if !run(&Gated { activation, gate_up: gate_up.tensor(), out: out.tensor() }) {
            return;
        }
        let expected: Vec<f64> = values.iter().map(|&x| activated(activation, x).0).collect();
        for (got, expected) in out.values().iter().zip(expected) {
            assert!((got - expected).abs() <= 1e-6 * expected.abs().max(1e-3), "{got}, {expected}");
        }
        let d_out = placing.matrix([1, 8], &[1.0; 8]);
        run(&GatedBackward { activation, gate_up: gate_up.tensor(), d_out: d_out.tensor() });
        for (got, x) in gate_up.values().iter().zip(values) {
            let slope = if x == 0.0 { 0.5 } else { f64::from(x > 0.0) };
            assert!((got - slope).abs() < 1e-5, "the slope at {x} is {got}");
        }
    }
}

#[test]
fn heads_turn_by_their_positions_and_back() {
    let mut random = Random::new(4);
    let (heads, positions) = (3, 5);
    for (placing, _) in placings() {
        for pairing in [Pairing::Halves, Pairing::Neighbours] {
            for (dim, rotated) in [(32, 32), (32, 16), (6, 4)] {
                let width = (heads + 1) * dim + 2;
                let qkv = placing.random([TOKENS, width], &mut random, 2.0);
                let before = qkv.values();
                let half = rotated / 2;
                let table = angles(positions, half);
                let table = Placing::dense(DType::F32).matrix([positions, rotated], &table);
                let at: Vec<i32> = (0..TOKENS).map(|t| (t * 3 % positions) as i32).collect();
                let at_memory = Memory::of(&at);
                let rope = Rope {
                    qkv: qkv.tensor(),
                    heads,
                    dim,
                    turn: Turn {
                        positions: at_memory.array(ElementType::I32, &[TOKENS]),
                        table: table.tensor(),
                        pairing,
                    },
                    back: false,
                };
                if !run(&rope) {
                    return;
                }
                let mut expected = before.clone();
                for (t, &position) in at.iter().enumerate() {
                    for head in 0..heads {
                        let at = t * width + head * dim..t * width + (head + 1) * dim;
                        let head =
                            turned(&before[at.clone()], pairing, half, position as usize, 1.0);
                        expected[at].copy_from_slice(&head);
                    }
                }
                let tolerance = tolerance(placing.dtype);
                close("turned", &qkv.values(), &expected, tolerance);
                run(&Rope { back: true, ..rope });
                close("turned back", &qkv.values(), &before, 2.5 * tolerance);
            }
        }
    }
}

#[test]
fn operands_that_do_not_fit_are_named() {
    let placing = Placing::dense(DType::BF16);
    let f32s = Placing::dense(DType::F32);
    let x = placing.empty([4, 32]);
    let norm = RmsNorm {
        x: x.tensor(),
        residual: None,
        weight: placing.empty([1, 32]).vector(),
        inverse: f32s.empty([1, 4]).vector(),
        out: placing.empty([4, 32]).tensor(),
        eps: 1e-5,
        offset: 0.0,
    };
    let narrow = RmsNorm { weight: placing.empty([1, 31]).vector(), ..norm };
    assert_eq!(refusal(&narrow), "weight has shape [31]; it must be [32]");
    let other = RmsNorm { out: f32s.empty([4, 32]).tensor(), ..norm };
    assert_eq!(refusal(&other), "out is f32; it must be bf16");
    let wide = [1, 16385];
    let wide = RmsNorm {
        x: placing.empty(wide).tensor(),
        weight: placing.empty(wide).vector(),
        inverse: f32s.empty([1, 1]).vector(),
        out: placing.empty(wide).tensor(),
        ..norm
    };
    assert_eq!(refusal(&wide), "RMSNorm of 16385 columns of bf16; it takes 1 to 16384");
    let mut apart = x.tensor();
    apart.layout = Layout { strides: [64, 2], ..apart.layout };
    assert_eq!(
        refusal(&RmsNorm { x: apart, ..norm }),
        "x has 2 elements from one of a row to the next; they must lie side by side"
    );
    let gated = Gated { activation: Activation::Silu, gate_up: x.tensor(), out: x.tensor() };
    assert_eq!(refusal(&gated), "gate_up has shape [4, 32]; it must be [4, 64]");
    let table = f32s.empty([8, 20]);
    let positions = Memory::of(&[0i32; 4]);
    let rope = Rope {
        qkv: x.tensor(),
        heads: 2,
        dim: 16,
        turn: Turn {
            positions: positions.array(ElementType::I32, &[4]),
            table: table.tensor(),
            pairing: Pairing::Halves,
        },
        back: false,
    };
    assert_eq!(
        refusal(&rope),
        "the table has 20 columns; it must have an even number up to the 16 of a head"
    );
    assert_eq!(
        refusal(&Rope { heads: 3, ..rope }),
        "3 heads of 16 columns are more than the 32 columns of qkv"
    );
    let order = TokenOrder::new(&[1, 9]).unwrap();
    let words = Memory::of(&order.words());
    let gradient = EmbeddingBackward {
        d_out: placing.empty([2, 32]).tensor(),
        d_table: f32s.empty([9, 32]).tensor(),
        first: None,
        order: &order,
        words: words.array(ElementType::I32, &[10]),
        partial: f32s.empty([0, 32]).tensor(),
        scale: 1.0,
    };
    assert_eq!(refusal(&gradient), "token 9 is beyond the 9 rows of d_table");
    let apart = Placing { gap: 1, ..f32s }.empty([10, 32]);
    let apart = EmbeddingBackward { d_table: apart.tensor(), ..gradient };
    assert_eq!(refusal(&apart), "rows of d_table must lie side by side");
}

#[test]
fn a_pause_takes_its_time_and_a_second_at_most() {
    let taken = |pause: Duration| {
        let began = Instant::now();
        run(&Pause(pause)).then(|| began.elapsed())
    };
    // The first compiles it.
    if taken(Duration::ZERO).is_none() {
        return;
    }
    assert!(taken(Duration::from_millis(20)) >= Some(Duration::from_millis(20)));
    assert!(taken(Duration::from_secs(3600)) < Some(Duration::from_secs(5)));
}

#[test]
fn rows_are_copied_and_vectors_widened_and_added_to_the_bit() {
    let mut random = Random::new(11);
    for (placing, width) in placings() {
        let from = placing.random([TOKENS, width], &mut random, 2.0);
        let to = Placing { gap: placing.gap + 8, ..placing }.empty([TOKENS, width]);
        if !run(&CopyRows { from: from.tensor(), to: to.tensor() }) {
            return;
        }
        assert_eq!(to.values(), from.values());
        let dense = Placing { gap: 0, ..placing };
        let (narrow, f32s) =
            (dense.random([1, width], &mut random, 2.0), Placing::dense(DType::F32));
        let (wide, sum) = (f32s.empty([1, width]), f32s.random([1, width], &mut random, 2.0));
        let before = sum.values();
        run(&Widen { from: narrow.vector(), to: wide.vector() });
        assert_eq!(wide.values(), narrow.values());
        run(&Add { from: wide.vector(), to: sum.vector() });
        let sums = before.iter().zip(narrow.values()).map(|(a, b)| f64::from(*a as f32 + b as f32));
        assert_eq!(sum.values(), sums.collect::<Vec<_>>());
        let before = narrow.values();
        run(&Add { from: sum.vector(), to: narrow.vector() });
        let sums: Vec<f64> = before.iter().zip(sum.values()).map(|(a, b)| a + b).collect();
        close("a sum of 16 bits", &narrow.values(), &sums, tolerance(placing.dtype));
    }
    let a = Placing::dense(DType::BF16).empty([2, 8]);
    let narrow = Placing::dense(DType::BF16).empty([2, 6]);
    let said = refusal(&CopyRows { from: a.tensor(), to: narrow.tensor() });
    assert_eq!(said, "to has shape [2, 6]; it must be [2, 8]");
    let one = Placing::dense(DType::BF16).empty([1, 8]);
    assert!(refusal(&Widen { from: one.vector(), to: one.vector() }).contains("to is bf16"));
}

#[test]
fn gradients_of_ranks_are_narrowed_and_summed_in_order_to_the_bit() {
    let mut random = Random::new(18);
    for (dtype, elems) in
        [(DType::F32, 768), (DType::BF16, 768), (DType::BF16, 517), (DType::F16, 31)]
    {
        let (own, f32s) = (Placing::dense(dtype), Placing::dense(DType::F32));
        let parts: Vec<_> = (0..35).map(|_| own.random([1, elems], &mut random, 2.0)).collect();
        let bits = |x: &Matrix| x.values().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        for (ranks, accumulate) in [(1, false), (2, true), (3, false), (32, true), (35, false)] {
            let from: Vec<_> = parts[..ranks].iter().map(Matrix::vector).collect();
            let before = f32s.random([1, elems], &mut random, 2.0);
            let to = f32s.matrix([1, elems], &before.values());
            if !run(&SumRanks { from: &from, to: to.vector(), accumulate }) {
                return;
            }
            let mut sums: Vec<f32> = before.values().into_iter().map(|x| x as f32).collect();
            // Of 32 ranks at once, and then of the others.
            for (number, some) in parts[..ranks].chunks(32).enumerate() {
                let mut all = vec![0f32; elems];
                for part in some {
                    all.iter_mut().zip(part.values()).for_each(|(sum, x)| *sum += x as f32);
                }
                let adds = accumulate || number > 0;
                sums.iter_mut()
                    .zip(all)
                    .for_each(|(to, sum)| *to = if adds { sum + *to } else { sum });
            }
            let expected =
                f32s.matrix([1, elems], &sums.iter().map(|&x| f64::from(x)).collect::<Vec<_>>());
            assert_eq!(bits(&to), bits(&expected), "{ranks} ranks of {dtype}");
            if dtype == DType::F32 || ranks > 32 {
                continue;
            }
            // Narrow sums are rounded once.
            let (sum, narrow) = (own.empty([1, elems]), own.empty([1, elems]));
            run(&SumRanks { from: &from, to: sum.vector(), accumulate: false });
            let whole = f32s.empty([1, elems]);
            run(&SumRanks { from: &from, to: whole.vector(), accumulate: false });
            run(&Narrow { from: whole.vector(), to: narrow.vector() });
            assert_eq!(bits(&sum), bits(&narrow), "{ranks} ranks of {dtype}");
        }
    }
    let (narrow, wide) =
        (Placing::dense(DType::BF16).empty([1, 8]), Placing::dense(DType::F32).empty([1, 8]));
    let many = vec![narrow.vector(); 33];
    let said = refusal(&SumRanks { from: &many, to: narrow.vector(), accumulate: false });
    assert_eq!(said, "33 ranks are summed in f32, at most 32 in bf16");
    let none = refusal(&SumRanks { from: &[], to: wide.vector(), accumulate: false });
    assert_eq!(none, "there is no rank whose gradients are summed");
    let mixed = [narrow.vector(), wide.vector()];
    let said = refusal(&SumRanks { from: &mixed, to: wide.vector(), accumulate: false });
    assert_eq!(said, "from is f32; it must be bf16");
}
