//! The CPU backend against the f64 oracle.

use crate::common::{Case, run, vector};
use foveate_cpu::{CpuOptions, CpuPlan};
use foveate_mods::expr::{b, h, h_kv, kv, kv_len, q, q_len, scalar, score};
use foveate_mods::{Buffer, Expr, MaskMod, ScoreMod};
use foveate_problem::{Arrangement, Dims, Dropout, ForwardArgs, Operands, Pages, Spec};
use foveate_reference::Rule;
use foveate_tensor::random::Random;
use foveate_tensor::{DType, Tensor};

pub fn mask(e: Expr<bool>) -> Option<MaskMod> {
    Some(MaskMod::new(e.dynamic()).unwrap())
}

pub fn score_mod(e: Expr<f32>) -> Option<ScoreMod> {
    Some(ScoreMod::new(e.dynamic()).unwrap())
}

pub fn causal() -> Expr<bool> {
    q().ge(kv())
}

fn documents(len: usize) -> Expr<bool> {
    let doc = Buffer::vector("doc", (0..len as i32).map(|i| i * i / 700).collect());
    doc.at([q()]).eq(doc.at([kv()]))
}

#[test]
fn full_attention_of_uneven_shapes_is_right() {
    for (seed, (lens, dims)) in
        [([37, 53], [20, 7]), ([1, 1], [1, 1]), ([65, 16], [64, 48]), ([16, 130], [3, 33])]
            .into_iter()
            .enumerate()
    {
        for options in [CpuOptions::default(), Case::default().options] {
            let case = Case {
                seed: seed as u64,
                batch: 2,
                heads: [4, 2],
                lens,
                dims,
                options,
                ..Case::default()
            };
            case.check(&format!("{lens:?} {dims:?}"));
        }
    }
}

#[test]
fn few_queries_over_many_keys_are_right() {
    for (seed, dtype) in [DType::F32, DType::F16, DType::BF16].into_iter().enumerate() {
        for (q_len, mask) in [(1, None), (5, mask((kv() - q()).abs().lt(700)))] {
            let case = Case {
                seed: seed as u64,
                dtype,
                heads: [6, 2],
                lens: [q_len, 1301],
                dims: [32, 48],
                mask,
                sink: q_len == 1,
                options: CpuOptions::default(),
                ..Case::default()
            };
            case.check(&format!("{dtype}, {q_len} queries"));
        }
    }
}

/// 512 rows, and keys of more splits than so many rows have results for.
#[test]
fn many_entries_that_share_a_long_cache_are_right() {
    let owner: Vec<i32> = (0..5001 / 128 + 1).map(|tile| tile % 32).collect();
    let owner = Buffer::vector("owner", owner);
    let case = Case {
        batch: 32,
        shared_kv: true,
        heads: [16, 1],
        lens: [1, 5001],
        dims: [16, 16],
        mask: mask(owner.at([kv() / 128]).eq(b())),
        options: CpuOptions::default(),
        ..Case::default()
    };
    let described = case.plan(&case.inputs()).describe(Arrangement::Dense);
    assert_eq!(described.decode_declined, None);
    case.check("32 entries of 16 heads, one cache");
}

/// As a cache of pages in one piece: every batch entry has keys of its own, in tiles here and there.
/// Rows of all entries together are more than are multiplied in place; of a tile they are few.
#[test]
fn few_queries_of_many_entries_that_share_a_cache_are_right() {
    let owner: Vec<i32> = (0..1301 / 128 + 1).map(|tile| (tile * 7 + 3) % 4).collect();
    let owner = Buffer::vector("owner", owner);
    for (seed, dtype) in [DType::F32, DType::F16, DType::BF16].into_iter().enumerate() {
        for (heads, q_len) in [([16, 1], 1), ([6, 2], 2)] {
            let case = Case {
                seed: seed as u64,
                dtype,
                batch: 5,
                shared_kv: true,
                heads,
                lens: [q_len, 1301],
                dims: [32, 48],
                mask: mask(owner.at([kv() / 128]).eq(b())),
                sink: q_len == 1,
                options: CpuOptions::default(),
                ..Case::default()
            };
            let described = case.plan(&case.inputs()).describe(Arrangement::Dense);
            assert_eq!(described.decode_declined, None);
            case.check(&format!("{dtype}, {heads:?} heads, {q_len} queries"));
        }
    }
}

#[test]
fn half_types_are_right() {
    for dtype in [DType::F16, DType::BF16] {
        let case =
            Case { dtype, heads: [6, 2], lens: [67, 91], mask: mask(causal()), ..Case::default() };
        case.check(dtype.name());
    }
}

#[test]
fn masks_choose_keys() {
    let window = (q() - kv()).abs().lt(scalar("window", 9));
    let by_head = (q() + h() * 3 + b() * 5 - kv()).rem_is_small();
    let masks = [
        ("causal", causal()),
        ("aligned to the end", (q() + (kv_len() - q_len())).ge(kv())),
        ("window", window.clone()),
        ("documents", documents(90) & causal()),
        ("window in a document", documents(90) & window),
        ("by batch and head", by_head),
        ("by key/value head", (kv() + h_kv()).gt(q())),
        ("nothing", q().lt(0)),
    ];
    for (name, m) in masks {
        for lens in [[71, 71], [40, 90], [90, 33]] {
            let case =
                Case { batch: 2, heads: [4, 2], lens, mask: mask(m.clone()), ..Case::default() };
            case.check(name);
        }
    }
}

#[test]
fn documents_that_end_inside_a_strip_are_right() {
    for (seed, dtype) in [DType::F32, DType::BF16].into_iter().enumerate() {
        // Of 23 tokens, so that each end is at another row of a subtile.
        let ids = (0..151).map(|i| i / 23).collect();
        let doc = Buffer::vector("doc", ids);
        let same = doc.at([q()]).eq(doc.at([kv()]));
        for tile in [None, Some(32)] {
            let options = CpuOptions { tile_q: tile, tile_kv: tile, ..CpuOptions::default() };
            let case = Case {
                seed: seed as u64,
                dtype,
                heads: [4, 2],
                lens: [151, 151],
                dims: [48, 20],
                mask: mask(causal() & same.clone()),
                options,
                ..Case::default()
            };
            case.check(&format!("{dtype}, tiles of {tile:?}"));
        }
    }
}

#[test]
fn rows_of_a_strip_may_begin_at_different_tiles_or_see_nothing() {
    let begins = kv().ge((q() % 3) * 20) & (q() % 5).ne(4);
    for sink in [false, true] {
        let mask = mask(begins.clone());
        let case = Case { lens: [45, 70], heads: [4, 2], mask, sink, ..Case::default() };
        case.check(&format!("a sink: {sink}"));
    }
}

trait Small {
    fn rem_is_small(self) -> Expr<bool>;
}

impl Small for Expr<i32> {
    fn rem_is_small(self) -> Expr<bool> {
        (self % 7).lt(3)
    }
}

#[test]
fn scores_and_their_derivatives_are_right() {
    let slope = h().to_f32() * 0.25 + 0.125;
    let cap = scalar("cap", 3.0);
    let soft_cap = (score() / cap.clone()).tanh() * cap;
    let alibi = score() - (q() - kv()).abs().to_f32() * slope;
    for (name, rule, s) in [
        ("alibi", Rule::Plain, alibi.clone()),
        ("soft cap", Rule::TanhLike, soft_cap.clone()),
        ("square", Rule::Plain, score() * score() * 0.25),
    ] {
        for m in [None, mask(causal())] {
            let case = Case {
                heads: [4, 2],
                rule,
                mask: m,
                score: score_mod(s.clone()),
                ..Case::default()
            };
            case.check(name);
        }
    }
}

#[test]
fn what_is_no_number_in_d_out_reaches_keys_out_of_reach() {
    let far = (q() - kv()).abs().to_f32() * 4.0;
    let case = Case { lens: [190, 201], score: score_mod(score() - far), ..Case::default() };
    let mut inputs = case.inputs();
    let (row, column) = (170, 3);
    inputs.d_out = Tensor::from_fn(DType::F32, inputs.d_out.shape(), |at| {
        if at[1..] == [1, row, column] { f64::NAN } else { 0.5 }
    });
    let results = run(&case.plan(&inputs), &inputs, &case.spec()).unwrap();
    // The oracle's p·d_out and p·(dp - delta) are NaN for every key of the row, whatever p.
    let (dk, dv) = (results.dk.to_f64(), results.dv.to_f64());
    let [_, _, keys, dim] = inputs.k.shape();
    for key in 0..keys {
        let at = (keys + key) * dim;
        assert!(dk[at..at + dim].iter().all(|x| x.is_nan()), "dk of key {key}");
        assert!(dv[at + column].is_nan(), "dv of key {key}");
        assert!(dv[at].is_finite() && dv[key * dim..][..dim].iter().all(|x| x.is_finite()));
    }
}

#[test]
fn what_is_no_number_in_k_or_q_reaches_queries_that_are_out_of_reach() {
    let far = (q() - kv()).abs().to_f32() * 4.0;
    for dtype in [DType::F32, DType::BF16] {
        let case = Case {
            lens: [190, 201],
            dims: [32, 32],
            dtype,
            score: score_mod(score() - far.clone()),
            ..Case::default()
        };
        let clean = case.inputs();
        // NaN with every query, for a key far from most; infinities of both signs for a query.
        let with = |t: &Tensor, row: usize, value: f64| {
            Tensor::from_fn(dtype, t.shape(), |at| {
                if at == [0, 1, row, 5] { value } else { t.view().get_f64(at) }
            })
        };
        let mut inputs = case.inputs();
        inputs.k = with(&clean.k, 2, f64::NAN);
        let lse = run(&case.plan(&inputs), &inputs, &case.spec()).unwrap().lse.to_f64();
        assert!(lse[..190].iter().all(|x| x.is_finite()) && lse[190..].iter().all(|x| x.is_nan()));
        let mut inputs = case.inputs();
        inputs.q = with(&clean.q, 100, f64::INFINITY);
        let lse = run(&case.plan(&inputs), &inputs, &case.spec()).unwrap().lse.to_f64();
        for (row, x) in lse.iter().enumerate() {
            assert_eq!(x.is_nan(), row == 190 + 100, "row {row}: {x}");
        }
    }
}

#[test]
fn keys_that_a_bias_puts_out_of_reach_cost_no_accuracy() {
    let gain = Buffer::learned("gain", &[4], vec![1.0, 0.5, 2.0, 0.01]).unwrap();
    let far = (q() - kv()).abs().to_f32() * gain.at([h()]) * 2.0;
    for dtype in [DType::F32, DType::BF16] {
        for (m, dropout) in [(None, None), (mask(causal()), Some(Dropout::new(0.2, 3)))] {
            let case = Case {
                heads: [4, 2],
                lens: [190, 201],
                dtype,
                mask: m,
                score: score_mod(score() - far.clone()),
                dropout,
                ..Case::default()
            };
            case.check(&format!("{dtype}"));
        }
    }
}

#[test]
fn learned_buffers_get_their_gradients() {
    let mut random = Random::new(5);
    let relative = Buffer::learned("relative", &[4, 41], vector(&mut random, 164)).unwrap();
    let gain = Buffer::learned("gain", &[4], vector(&mut random, 4)).unwrap();
    let distance = (q() - kv() + 20).max(0).min(40);
    let read_twice = relative.at([h(), distance.clone()]) + relative.at([h(), (distance * 3) % 41]);
    let s = score() * (gain.at([h()]) + 1.5) + read_twice;
    for m in [None, mask(causal())] {
        let case = Case {
            batch: 2,
            heads: [4, 2],
            score: score_mod(s.clone()),
            mask: m,
            ..Case::default()
        };
        case.check("relative bias and gain");
    }
}

#[test]
fn sinks_dropout_and_the_gradient_of_lse_are_right() {
    let dropout = Some(Dropout::new(0.3, 0xDEAD_BEEF_1234));
    for (sink, drops, d_lse) in
        [(true, false, false), (false, true, false), (false, false, true), (true, true, true)]
    {
        for m in [None, mask(causal())] {
            let dropout = dropout.clone().filter(|_| drops);
            let case =
                Case { batch: 2, heads: [4, 2], sink, dropout, d_lse, mask: m, ..Case::default() };
            case.check(&format!("sink {sink} dropout {drops} d_lse {d_lse}"));
        }
    }
}

#[test]
fn packed_sequences_of_any_length_leave_the_tail_alone() {
    let offsets = [vec![2, 2, 40, 41, 41, 77], vec![0, 30, 30, 63, 64, 90]];
    for (m, sink) in [(None, false), (mask(causal()), true), (mask((q() + b()).ge(kv())), false)] {
        let case = Case {
            heads: [4, 2],
            lens: [85, 95],
            offsets: Some(offsets.clone()),
            mask: m,
            sink,
            d_lse: true,
            ..Case::default()
        };
        case.check("packed");
        let tail = case.run();
        assert!(tail.out.view().get_f64([0, 3, 84, 0]).is_nan());
        assert!(tail.dk.view().get_f64([0, 1, 94, 0]).is_nan());
    }
}

#[test]
fn keys_shared_by_a_batch_sum_its_gradients() {
    for heads in [[4, 4], [6, 2], [5, 1]] {
        let case =
            Case { batch: 3, heads, shared_kv: true, mask: mask(causal()), ..Case::default() };
        case.check(&format!("{heads:?}"));
    }
}

#[test]
fn lengths_of_zero_are_legal() {
    for (lens, sink) in [([0, 5], false), ([5, 0], false), ([5, 0], true), ([0, 0], true)] {
        let case = Case { batch: 2, lens, sink, mask: mask(causal()), ..Case::default() };
        case.check(&format!("{lens:?}"));
        Case { batch: 0, ..case }.check("no batch");
    }
}

#[test]
fn features_agree_with_the_oracle_in_any_combination() {
    let bias = Buffer::learned("bias", &[6, 8], vector(&mut Random::new(9), 48)).unwrap();
    let scores = [
        None,
        score_mod((score() * 0.5).tanh() * 2.0),
        score_mod(score() + bias.at([h(), (q() + kv()) % 8])),
    ];
    let masks = [
        None,
        mask(causal()),
        mask((q() - kv()).abs().lt(20)),
        mask(documents(100)),
        mask((h() + b() * 2 + q()).gt(kv())),
    ];
    for seed in 0..40 {
        let mut random = Random::new(100 + seed);
        let packed = random.below(3) == 0;
        let lens = [1 + random.below(80), 1 + random.below(80)];
        let cut = |n: usize| vec![0, n as i32 / 3, n as i32 / 3, n as i32 - (n > 4) as i32];
        let case = Case {
            seed,
            batch: if packed { 1 } else { 1 + random.below(2) },
            heads: [[6, 6], [6, 2], [6, 1]][random.below(3)],
            lens,
            dims: [[16, 16], [24, 9], [5, 32]][random.below(3)],
            dtype: [DType::F32, DType::F32, DType::BF16][random.below(3)],
            mask: masks[random.below(5)].clone(),
            score: scores[random.below(3)].clone(),
            scale: [None, Some(0.3)][random.below(2)],
            dropout: (random.below(3) == 0).then_some(Dropout::new(0.2, seed)),
            sink: random.below(2) == 0,
            d_lse: random.below(2) == 0,
            shared_kv: !packed && random.below(3) == 0,
            offsets: packed.then(|| [cut(lens[0]), cut(lens[1])]),
            options: CpuOptions {
                tile_q: [None, Some(7), Some(32)][random.below(3)],
                tile_kv: [None, Some(16), Some(48)][random.below(3)],
                workspace_bytes: [None, Some(100_000)][random.below(2)],
                ..CpuOptions::default()
            },
            rule: Rule::TanhLike,
        };
        case.check("combination");
    }
}

/// One query on a cache whose keys are more than a task reads, so that parts begin inside pages.
#[test]
fn decoding_from_pages_gives_what_decoding_from_one_piece_gives() {
    const PAGE: usize = 7;
    const LENGTHS: [i32; 2] = [1300, 611];
    let entries = (LENGTHS[0] as usize).div_ceil(PAGE);
    let count = 2 * entries;
    // Every page once, in no order.
    let table: Vec<i32> = (0..count).map(|i| (i * 101 % count) as i32).collect();
    let number =
        |[b, h, s, d]: [usize; 4]| ((b * 31 + h * 17 + s * 7 + d * 3) % 23) as f64 / 11.5 - 1.0;
    let gathered = |b: usize, dim: usize| {
        let page = |s: usize| table[b * entries + s / PAGE] as usize;
        Tensor::from_fn(DType::F32, [1, 2, LENGTHS[b] as usize, dim], |[_, h, s, d]| {
            number([page(s), h, s % PAGE, d])
        })
    };
    let q = Tensor::from_fn(DType::F32, [2, 4, 1, 24], number);
    let [k, v] = [24, 18].map(|dim| Tensor::from_fn(DType::F32, [count, 2, PAGE, dim], number));
    let run = |q: &Tensor, k: &Tensor, v: &Tensor, pages: Option<Pages<'_>>| {
        let operands = Operands { pages, ..Operands::new(q.view(), k.view(), v.view()) };
        let dims = Dims::of(&operands).unwrap();
        let spec = Spec { mask: None, score: None, scale: None, dropout: None };
        let plan = CpuPlan::new(&spec, &dims, DType::F32, CpuOptions::default()).unwrap();
        let mut out = Tensor::filled(DType::F32, dims.out_shape(), f64::NAN);
        let mut lse = Tensor::filled(DType::F32, dims.row_shape(), f64::NAN);
        plan.forward(ForwardArgs {
            operands,
            out: out.view_mut().unwrap(),
            lse: lse.view_mut().unwrap(),
            max_score: None,
        })
        .unwrap();
        (out.to_f64(), lse.to_f64())
    };
    let (out, lse) = run(&q, &k, &v, Some(Pages::new(&table, &LENGTHS).unwrap()));
    for b in 0..2 {
        let of_entry =
            Tensor::from_fn(DType::F32, [1, 4, 1, 24], |[_, h, s, d]| number([b, h, s, d]));
        let (alone, alone_lse) = run(&of_entry, &gathered(b, 24), &gathered(b, 18), None);
        assert_eq!(out[b * alone.len()..][..alone.len()], alone, "entry {b}");
        assert_eq!(lse[b * 4..][..4], alone_lse, "entry {b}");
    }
}
