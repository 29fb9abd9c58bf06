//! The oracle against central differences of itself, and against cases worked by hand.

use foveate_mods::text::{Names, parse_mask};
use foveate_mods::{AnyBuffer, Buffer, BufferData, MaskMod, ScoreMod, expr};
use foveate_problem::{Dropout, Operands, ScaleBlocks, Scales, Spec};
use foveate_tensor::random::Random;
use foveate_tensor::{DType, Float, Slice, Tensor, Varlen};

use crate::{Forward, Upstream, backward, forward, low};

/// Numbers in (-1, 1), multiples of 1/64 so that f32 holds them and a small step exactly.
struct Numbers(Random);

impl Numbers {
    fn new(seed: u64) -> Self {
        Self(Random::new(seed))
    }

    fn next(&mut self) -> f64 {
        self.0.below(127) as f64 / 64.0 - 0.984_375
    }

    fn tensor<const N: usize>(&mut self, shape: [usize; N]) -> Tensor<N> {
        Tensor::from_fn(DType::F64, shape, |_| self.next())
    }

    fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.next() as f32).collect()
    }
}

/// What the loss of a case depends on.
#[derive(Clone)]
struct Inputs {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Option<Vec<f32>>,
    bias: Vec<f32>,
}

/// A case: shapes, offsets and program; the bias is a learned buffer `[3, 4]`.
struct Case {
    varlen: Option<(Vec<i32>, Vec<i32>)>,
    dropout: Option<Dropout>,
    score: fn(&Buffer<f32>) -> Option<ScoreMod>,
    mask: Option<MaskMod>,
}

impl Case {
    fn spec(&self, bias: &[f32]) -> Spec {
        let bias = Buffer::learned("bias", &[3, 4], bias.to_vec()).expect("12 elements");
        let score = (self.score)(&bias);
        Spec { mask: self.mask.clone(), score, scale: Some(0.75), dropout: self.dropout.clone() }
    }

    fn operands<'a>(&'a self, inputs: &'a Inputs) -> Operands<'a> {
        let packed = |t: &Tensor| t.shape()[2];
        let varlen = self.varlen.as_ref().map(|(cu_q, cu_k)| {
            Varlen::new(cu_q, cu_k, packed(&inputs.q), packed(&inputs.k)).expect("offsets fit")
        });
        let Inputs { q, k, v, sink, .. } = inputs;
        Operands {
            q: q.view(),
            k: k.view(),
            v: v.view(),
            sink: sink.as_deref().map(Slice::F32),
            varlen,
            pages: None,
            scales: None,
        }
    }

    fn loss(&self, inputs: &Inputs, d_out: &Tensor, d_lse: &Tensor<3>) -> f64 {
        let Forward { out, lse, .. } =
            forward(&self.spec(&inputs.bias), &self.operands(inputs)).expect("a problem");
        let sum = |values: &[f64], weights: Vec<f64>| -> f64 {
            values.iter().zip(weights).filter(|(x, _)| x.is_finite()).map(|(x, w)| x * w).sum()
        };
        sum(&out, d_out.to_f64()) + sum(&lse, d_lse.to_f64())
    }
}

const STEP: f64 = 1.0 / 4096.0;

fn nudged(tensor: &Tensor, at: usize, by: f64) -> Tensor {
    let mut i = 0;
    let values = tensor.to_f64();
    Tensor::from_fn(DType::F64, tensor.shape(), |_| {
        i += 1;
        values[i - 1] + if i - 1 == at { by } else { 0.0 }
    })
}

fn check(case: &Case, inputs: &Inputs, seed: u64) {
    let mut random = Numbers::new(seed);
    let [b, h, s, _] = inputs.q.shape();
    let d_out = random.tensor([b, h, s, inputs.v.shape()[3]]);
    let d_lse = random.tensor([b, h, s]);
    let upstream = Upstream { d_out: d_out.view(), d_lse: Some(d_lse.view()) };
    let spec = case.spec(&inputs.bias);
    let found = backward(&spec, &case.operands(inputs), &upstream).expect("a problem");
    let compare = |name: &str, gradient: &[f64], nudge: &dyn Fn(usize, f64) -> Inputs| {
        for (i, &g) in gradient.iter().enumerate() {
            let loss = |by| case.loss(&nudge(i, by), &d_out, &d_lse);
            let slope = (loss(STEP) - loss(-STEP)) / (2.0 * STEP);
            let untouched = g.is_nan() && slope == 0.0;
            assert!(
                untouched || (g - slope).abs() < 2e-6,
                "seed {seed}, {name}[{i}]: {g}, {slope}"
            );
        }
    };
    let with = |f: &dyn Fn(&mut Inputs)| {
        let mut inputs = inputs.clone();
        f(&mut inputs);
        inputs
    };
    compare("dq", &found.dq, &|i, by| with(&|x| x.q = nudged(&x.q, i, by)));
    compare("dk", &found.dk, &|i, by| with(&|x| x.k = nudged(&x.k, i, by)));
    compare("dv", &found.dv, &|i, by| with(&|x| x.v = nudged(&x.v, i, by)));
    compare("d_sink", &found.d_sink, &|i, by| {
        with(&|x| x.sink.as_mut().expect("there is one")[i] += by as f32)
    });
    if let Some(bias) = found.captures.get("bias") {
        assert!(bias.iter().any(|g| *g != 0.0), "the bias matters");
        compare("bias", bias, &|i, by| with(&|x| x.bias[i] += by as f32));
    }
}

fn inputs(seed: u64, q: [usize; 4], k: [usize; 4], dim_v: usize, sink: bool) -> Inputs {
    let mut random = Numbers::new(seed);
    let [bk, g, sk, _] = k;
    Inputs {
        q: random.tensor(q),
        k: random.tensor(k),
        v: random.tensor([bk, g, sk, dim_v]),
        sink: sink.then(|| random.floats(q[1])),
        bias: random.floats(12),
    }
}

fn causal() -> MaskMod {
    MaskMod::new(expr::q().ge(expr::kv()).dynamic()).expect("bool")
}

fn score_mod(expr: foveate_mods::Expr<f32>) -> Option<ScoreMod> {
    Some(ScoreMod::new(expr.dynamic()).expect("f32"))
}

#[test]
fn gradients_of_grouped_heads_with_two_dims_match_central_differences() {
    let case = Case { varlen: None, dropout: None, score: |_| None, mask: Some(causal()) };
    check(&case, &inputs(1, [2, 4, 5, 3], [2, 2, 4, 3], 2, false), 11);
}

#[test]
fn gradients_of_sinks_dropout_and_a_shared_key_match_central_differences() {
    let dropout = Some(Dropout::new(0.3, 42));
    let case = Case { varlen: None, dropout, score: |_| None, mask: None };
    check(&case, &inputs(2, [3, 2, 3, 2], [1, 1, 5, 2], 4, true), 12);
}

#[test]
fn gradients_of_packed_sequences_with_empty_ones_and_a_tail_match_central_differences() {
    let varlen = Some((vec![0, 3, 3, 5, 6], vec![1, 3, 6, 6, 8]));
    let dropout = Some(Dropout::new(0.25, 7));
    let case = Case { varlen, dropout, score: |_| None, mask: Some(causal()) };
    check(&case, &inputs(3, [1, 2, 8, 3], [1, 2, 9, 3], 3, true), 13);
}

#[test]
fn gradients_of_a_buffer_read_twice_match_central_differences() {
    let case = Case {
        varlen: None,
        dropout: None,
        score: |bias| {
            let [q, kv] = [expr::q(), expr::kv()];
            let there = bias.at([expr::h().min(2), q.clone().min(3)]);
            let back = bias.at([kv.clone().min(2), kv.min(3)]);
            score_mod((expr::score() * there.clone().exp() + there * back).tanh() * 2.0)
        },
        mask: Some(causal()),
    };
    check(&case, &inputs(4, [1, 3, 4, 3], [1, 1, 4, 3], 3, true), 14);
}

fn every_smooth_operation(bias: &Buffer<f32>) -> foveate_mods::Expr<f32> {
    let s = || expr::score();
    let x = bias.at([expr::q(), expr::kv()]);
    let smooth = s().sin() + s().cos() * x.sigmoid() + (s() * 0.5).exp2() + s().erf();
    let positive = s() * s() + 1.5;
    let roots = positive.sqrt() + positive.rsqrt() + positive.log() + positive.log2();
    let powers = positive.pow(x.clone() + 0.25) / (positive.clone() + 1.0);
    let kinks = s().abs() - (s() + 0.013).max(x.clone() - 0.007).min(0.83);
    let branch = s().gt(0.017).select::<f32>(x.tanh() * s(), -s());
    smooth + roots - powers + kinks + branch
}

#[test]
fn the_derivative_of_every_float_operation_matches_central_differences() {
    let score = |bias: &Buffer<f32>| score_mod(every_smooth_operation(bias));
    let case = Case { varlen: None, dropout: None, score, mask: None };
    check(&case, &inputs(5, [1, 1, 3, 2], [1, 1, 4, 2], 2, false), 15);
}

#[test]
fn a_gradient_through_a_floor_is_an_error_and_not_a_silent_zero() {
    let score = |_: &Buffer<f32>| score_mod(expr::score() + expr::score().floor());
    let case = Case { varlen: None, dropout: None, score, mask: None };
    let inputs = inputs(5, [1, 1, 3, 2], [1, 1, 4, 2], 2, false);
    let upstream = Upstream { d_out: inputs.q.view(), d_lse: None };
    let error = backward(&case.spec(&inputs.bias), &case.operands(&inputs), &upstream);
    let error = error.expect_err("floor").to_string();
    assert!(error.contains("floor has no derivative"), "{error}");
}

#[test]
fn no_gradient_passes_a_detached_score_and_a_floor_of_it_is_no_error() {
    let with = |score: fn(&Buffer<f32>) -> Option<ScoreMod>| {
        let case = Case { varlen: None, dropout: None, score, mask: None };
        let inputs = inputs(5, [1, 1, 3, 2], [1, 1, 4, 2], 2, false);
        let upstream = Upstream { d_out: inputs.q.view(), d_lse: None };
        let spec = case.spec(&inputs.bias);
        let made = backward(&spec, &case.operands(&inputs), &upstream).expect("a gradient");
        [made.dq, made.dk].concat()
    };
    fn s() -> foveate_mods::Expr<f32> {
        expr::score()
    }
    let whole = with(|_| score_mod(s() * 2.0 + s().detach().floor() * s().detach()));
    // The weights are those of all of it, the slope is 2.
    assert!(whole.iter().any(|d| *d != 0.0));
    assert_ne!(whole, with(|_| score_mod(s() * 2.0)));
    let none = with(|_| score_mod(s().detach() * 2.0));
    assert!(none.iter().all(|d| *d == 0.0), "{none:?}");
}

fn plain(mask: Option<MaskMod>) -> Spec {
    Spec { mask, score: None, scale: None, dropout: None }
}

fn view(inputs: &Inputs) -> Operands<'_> {
    let Inputs { q, k, v, sink, .. } = inputs;
    Operands {
        q: q.view(),
        k: k.view(),
        v: v.view(),
        sink: sink.as_deref().map(Slice::F32),
        varlen: None,
        pages: None,
        scales: None,
    }
}

#[test]
fn an_empty_row_is_zero_with_a_minus_infinite_denominator_and_no_gradient() {
    let above = MaskMod::new(expr::kv().gt(expr::q() + 3).dynamic()).expect("bool");
    let inputs = inputs(6, [1, 1, 4, 3], [1, 1, 5, 3], 3, false);
    let found = forward(&plain(Some(above.clone())), &view(&inputs)).expect("a problem");
    assert_eq!(found.out[3..], [0.0; 9]);
    assert_eq!(found.lse[1..], [f64::NEG_INFINITY; 3]);
    assert!(found.lse[0].is_finite());
    let d_lse = Tensor::<3>::filled(DType::F64, [1, 1, 4], 1.0);
    let upstream = Upstream { d_out: inputs.q.view(), d_lse: Some(d_lse.view()) };
    let found = backward(&plain(Some(above)), &view(&inputs), &upstream).expect("a problem");
    assert_eq!(found.dq[3..], [0.0; 9]);
    assert!(found.dk.iter().all(|g| g.is_finite()) && found.dk[..12] == [0.0; 12]);
}

#[test]
fn a_sink_takes_all_of_an_empty_row() {
    let none = MaskMod::new(foveate_mods::Expr::from(false).dynamic()).expect("bool");
    let inputs = inputs(7, [1, 2, 1, 3], [1, 2, 2, 3], 3, true);
    let found = forward(&plain(Some(none)), &view(&inputs)).expect("a problem");
    assert_eq!(found.out, [0.0; 6]);
    let sink = inputs.sink.expect("there is one");
    assert_eq!(found.lse, sink.iter().map(|&s| f64::from(s)).collect::<Vec<_>>());
    assert_eq!(found.max_score, [f64::NEG_INFINITY; 2]);
}

#[test]
fn no_score_resurrects_or_poisons_a_masked_entry() {
    let poison =
        ScoreMod::new(expr::q().ge(expr::kv()).select::<f32>(expr::score(), f32::NAN).dynamic());
    let spec = Spec { score: Some(poison.expect("f32")), ..plain(Some(causal())) };
    let inputs = inputs(8, [1, 2, 4, 3], [1, 2, 4, 3], 3, false);
    let with = forward(&spec, &view(&inputs)).expect("a problem");
    let without = forward(&plain(Some(causal())), &view(&inputs)).expect("a problem");
    assert_eq!(with, without);
}

#[test]
fn an_index_outside_its_axis_is_an_error_that_names_buffer_index_and_length() {
    let doc = AnyBuffer::new("doc", &[3], BufferData::I32(vec![0; 3]), false).expect("3 elements");
    let at = |i| foveate_mods::DynExpr::load(&doc, vec![i]).expect("one index");
    let same = foveate_mods::DynExpr::binary(
        foveate_mods::ir::BinaryOp::Eq,
        at(expr::q().dynamic().clone()),
        at(expr::kv().dynamic().clone()),
    );
    let mask = MaskMod::new(&same.expect("i32s")).expect("bool");
    let inputs = inputs(9, [1, 1, 4, 3], [1, 1, 4, 3], 3, false);
    let error = forward(&plain(Some(mask)), &view(&inputs)).expect_err("4 positions, 3 elements");
    assert_eq!(error.to_string(), "buffer `doc` is indexed at 3 on axis 0, which has length 3");
}

#[test]
fn a_masked_key_has_no_gradient_wherever_it_stands_and_whatever_its_values_are() {
    let inputs = inputs(11, [1, 2, 9, 3], [1, 1, 9, 3], 3, false);
    let d_out = Numbers::new(12).tensor([1, 2, 9, 3]);
    let upstream = Upstream { d_out: d_out.view(), d_lse: None };
    for hidden in 0..9 {
        let spec = plain(Some(MaskMod::new(expr::kv().ne(hidden).dynamic()).expect("bool")));
        let clean = backward(&spec, &view(&inputs), &upstream).expect("a problem");
        for garbage in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let mut at = 0;
            let values = inputs.v.to_f64();
            let v = Tensor::from_fn(DType::F64, inputs.v.shape(), |_| {
                at += 1;
                if (at - 1) / 3 == hidden as usize { garbage } else { values[at - 1] }
            });
            let spoilt = Inputs { v, ..inputs.clone() };
            let found = backward(&spec, &view(&spoilt), &upstream).expect("a problem");
            assert_eq!(found, clean, "key {hidden} is masked, its values are {garbage}");
            let own = &found.dk[hidden as usize * 3..][..3];
            assert!(own.iter().all(|&dk| dk == 0.0), "dk of key {hidden}: {own:?}");
        }
    }
}

#[test]
fn a_read_that_simplification_leaves_out_is_no_read_and_every_other_one_is() {
    let doc = AnyBuffer::new("doc", &[3], BufferData::I32(vec![0; 3]), false).expect("3 elements");
    let names = Names::new().buffer(&doc);
    let inputs = inputs(9, [1, 1, 4, 3], [1, 1, 4, 3], 3, false);
    let run = |mask: &str| {
        let mask = parse_mask(mask, &names).expect("a mask");
        forward(&plain(Some(mask)), &view(&inputs))
    };
    let masked = run("false").expect("it reads nothing");
    for text in ["doc[q] == 0 & (kv >= q ^ kv >= q)", "doc[q] != doc[q]", "doc[9] * 0 == 1"] {
        assert_eq!(run(text).expect(text), masked, "{text}");
    }
    let causal = run("q >= kv").expect("it reads nothing");
    assert_eq!(run("if false { doc[9] == 0 } else { q >= kv }").expect("no read"), causal);
    for text in ["doc[q] == 0 & kv < 0", "if q < 0 { doc[9] == 0 } else { q >= kv }"] {
        let error = run(text).expect_err("both sides are evaluated");
        assert!(error.to_string().starts_with("buffer `doc` is indexed at"), "{text}: {error}");
    }
}

#[test]
fn the_plain_implementation_is_near_gold_and_not_gold() {
    let mut random = Numbers::new(10);
    for (dtype, bound) in [(DType::F32, 1e-6), (DType::F16, 4e-3), (DType::BF16, 3e-2)] {
        let of = |_: [usize; 4]| random.next();
        let q = Tensor::from_fn(dtype, [1, 2, 9, 8], of);
        let all = q.view();
        let operands = Operands::new(all, all, all);
        let gold = forward(&plain(Some(causal())), &operands).expect("a problem");
        let found = low::forward(&plain(Some(causal())), &operands).expect("a problem");
        let errors = gold.out.iter().zip(&found.out).map(|(g, l)| (g - l).abs());
        let max = errors.fold(0.0, f64::max);
        assert!(max > 0.0 && max < bound, "{dtype}: {max}");
        let statistics = low::statistics(&plain(Some(causal())), &operands).expect("a problem");
        let errors = gold.lse.iter().zip(&statistics.lse).map(|(g, l)| (g - l).abs());
        assert!(errors.fold(0.0, f64::max) < 1e-6, "{dtype}");
    }
}

/// q, k and v of e4m3 with scales of blocks, and the f64 tensors that they stand for.
fn scaled(
    seed: u64,
    [queries, keys]: [usize; 2],
    blocks: ScaleBlocks,
) -> ([Tensor; 3], [Vec<f32>; 3], [Tensor; 3]) {
    let mut random = Random::new(seed);
    let shapes = [[2, 4, queries, 24], [2, 2, keys, 24], [2, 2, keys, 17]];
    let rows = [blocks.q, blocks.kv, blocks.kv];
    let tensors =
        shapes.map(|shape| Tensor::from_fn(DType::F8E4M3, shape, |_| 3.0 * random.normal()));
    let scales = std::array::from_fn(|i| -> Vec<f32> {
        let [b, h, len, _] = shapes[i];
        let count = b * h * len.div_ceil(rows[i]);
        (0..count).map(|_| 0.25 + random.below(1000) as f32 / 2000.0).collect()
    });
    let wide = std::array::from_fn(|i| {
        let (of, [_, heads, len, _]) = (&tensors[i], shapes[i]);
        let each = len.div_ceil(rows[i]);
        let scale =
            |[b, h, s, _]: [usize; 4]| f64::from(scales[i][(b * heads + h) * each + s / rows[i]]);
        Tensor::from_fn(DType::F64, shapes[i], |at| of.view().get_f64(at) * scale(at))
    });
    (tensors, scales, wide)
}

fn apart(gold: &[f64], other: &[f64]) -> f64 {
    gold.iter().zip(other).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max)
}

#[test]
fn e4m3_operands_are_their_elements_times_the_scales_of_their_heads_or_blocks() {
    let spec = plain(Some(causal()));
    for blocks in [ScaleBlocks::WHOLE, ScaleBlocks { q: 64, kv: 128 }] {
        let ([q, k, v], scales, wide) = scaled(20, [137, 145], blocks);
        let operands = Operands::new(q.view(), k.view(), v.view());
        let scaled = Scales { q: &scales[0], k: &scales[1], v: &scales[2], blocks };
        let found = forward(&spec, &Operands { scales: Some(scaled), ..operands }).unwrap();
        let [q, k, v] = wide.each_ref().map(|t| t.view());
        let gold = forward(&spec, &Operands::new(q, k, v)).unwrap();
        assert!(apart(&gold.out, &found.out) < 1e-12 && apart(&gold.lse, &found.lse) < 1e-12);
        let unscaled = forward(&spec, &operands).unwrap();
        assert!(apart(&gold.out, &unscaled.out) > 0.1);
    }
    let ([q, k, v], ..) = scaled(20, [37, 45], ScaleBlocks::WHOLE);
    let operands = Operands::new(q.view(), k.view(), v.view());
    let v = v.view();
    let upstream = Upstream { d_out: v, d_lse: None };
    let refused = backward(&spec, &operands, &upstream).unwrap_err().to_string();
    assert_eq!(refused, "f8e4m3 operands have no gradients; give bf16 or f16 ones to a backward");
}

#[test]
fn the_emulation_of_e4m3_rounds_weights_to_three_bits() {
    let ([q, k, v], scales, _) = scaled(21, [37, 45], ScaleBlocks::WHOLE);
    let scales = Some(Scales::of_heads(&scales[0], &scales[1], &scales[2]));
    let operands = Operands { scales, ..Operands::new(q.view(), k.view(), v.view()) };
    let spec = plain(Some(causal()));
    let gold = forward(&spec, &operands).unwrap();
    let found = low::forward(&spec, &operands).unwrap();
    // Row 0 sees one key, whose weight of 1 is a number of e4m3: out is v, rounded to bf16.
    let row = |x: &[f64]| x[..17].to_vec();
    let rounded: Vec<f64> =
        row(&gold.out).iter().map(|&x| <half::bf16 as Float>::from_f64(x).to_f64()).collect();
    assert!(apart(&rounded, &row(&found.out)) < 1e-6);
    // Others are off by up to 2⁻⁴ of the sum of their terms, and by more than bf16 would be.
    let largest = gold.out.iter().fold(0.0, |x: f64, y| x.max(y.abs()));
    let error = apart(&gold.out, &found.out);
    assert!((2e-3..0.0625).contains(&(error / largest)), "{error} of {largest}");
    let lse = apart(&gold.lse, &low::statistics(&spec, &operands).unwrap().lse);
    assert!((1e-6..5e-3).contains(&lse), "{lse}");
}
