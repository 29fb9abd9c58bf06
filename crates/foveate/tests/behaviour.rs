//! Plans as users meet them: positions, packed sequences, run-time values, options.

use foveate::mods::expr::{b, h, kv, q, scalar, score};
use foveate::tensor::random::Random;
use foveate::{
    Attention, Buffer, DType, Device, Dropout, Expr, Forward, Layout, MaskMod, Plan, Positions,
    Problem, ScoreMod, Tensor, TensorRef, closure,
};

/// Elements in [-1, 1): what a seed gives is the same everywhere.
fn random(seed: u64, dtype: DType, shape: [usize; 4]) -> Tensor {
    let mut random = Random::new(seed);
    Tensor::from_fn(dtype, shape, |_| random.signed())
}

fn masked(expr: Expr<bool>) -> MaskMod {
    MaskMod::new(expr.dynamic()).expect("a mask")
}

fn scored(expr: Expr<f32>) -> ScoreMod {
    ScoreMod::new(expr.dynamic()).expect("a score")
}

fn plan(program: &Attention, q: &Tensor, k: &Tensor, v: &Tensor) -> Plan {
    program.plan(&Problem::of(q, k, v).expect("a problem"), &Device::cpu()).expect("a plan")
}

fn assert_close(found: &[f64], expected: &[f64], within: f64) {
    assert_eq!(found.len(), expected.len());
    for (i, (a, e)) in found.iter().zip(expected).enumerate() {
        assert!(a == e || (a - e).abs() <= within, "element {i}: {a}, expected {e}");
    }
}

#[test]
fn a_seed_of_dropout_may_change_between_calls_without_a_new_plan_of_the_program() {
    let [q, k, v] = [1, 2, 3].map(|seed| random(seed, DType::F32, [1, 2, 40, 8]));
    let halves = |seed: u64| Buffer::vector("seed", vec![seed as u32 as i32, (seed >> 32) as i32]);
    let dropout = Dropout::with_seed_in(0.4, &halves(1)).expect("two halves");
    let read = plan(&Attention::new().with_dropout(dropout), &q, &k, &v);
    for seed in [1, 0x1234_5678_9ABC_DEF0] {
        let bound = read.rebind(&halves(seed)).expect("a buffer of the same shape");
        let found = bound.forward(&q, &k, &v).expect("forward");
        let given = plan(&Attention::new().dropout(0.4, seed), &q, &k, &v);
        assert_eq!(found.out, given.forward(&q, &k, &v).expect("forward").out);
    }
}

/// Rows `rows` of a tensor's length axis.
fn rows(t: &Tensor, rows: std::ops::Range<usize>) -> Tensor {
    let [nb, nh, _, nd] = t.shape();
    let view = t.view();
    Tensor::from_fn(t.dtype(), [nb, nh, rows.len(), nd], |[b, h, s, d]| {
        view.get_f64([b, h, s + rows.start, d])
    })
}

/// Rows `from..` of a tensor's length axis.
fn rows_from(t: &Tensor, from: usize) -> Tensor {
    rows(t, from..t.shape()[2])
}

#[test]
fn a_shard_of_the_queries_at_its_offset_gives_its_rows_of_the_whole() {
    println!("seeds 1, 2, 3");
    let [q_all, k, v] = [1, 2, 3].map(|seed| random(seed, DType::F32, [2, 4, 37, 24]));
    let slope = scored(score() - (q() - kv()).to_f32() * 0.05);
    let causal = Attention::new().mask(masked(kv().le(q()))).score(slope);
    let whole = plan(&causal, &q_all, &k, &v).forward(&q_all, &k, &v).unwrap();
    let expected = rows_from(&whole.out, 20).to_f64();

    let shard = rows_from(&q_all, 20);
    let at = |p: Positions| causal.clone().positions(p, Positions::Rows);
    let offset = plan(&at(Positions::offset(20)), &shard, &k, &v);
    assert_close(&offset.forward(&shard, &k, &v).unwrap().out.to_f64(), &expected, 2e-6);

    let map = Buffer::vector("shard_rows", (20..37).collect());
    let mapped = plan(&at(Positions::map(map).unwrap()), &shard, &k, &v);
    assert_close(&mapped.forward(&shard, &k, &v).unwrap().out.to_f64(), &expected, 2e-6);

    let moved = plan(&at(Positions::offset(0)), &shard, &k, &v).set_scalar("q_offset", 20).unwrap();
    assert_close(&moved.forward(&shard, &k, &v).unwrap().out.to_f64(), &expected, 2e-6);
}

#[test]
fn a_mod_whose_body_was_wrong_is_refused_when_it_is_planned() {
    let [q, k] = [[1, 2, 5, 4], [1, 2, 7, 4]].map(|shape| random(5, DType::F32, shape));
    let table = Buffer::new("table", &[7, 7], vec![true; 49]).unwrap();
    let masked = closure::mask_mod!(|q, kv| q >= kv && table[q]);
    let score = closure::score_mod!(|score, q, kv| if table[q] { score } else { 0 });
    let near = closure::mask_mod!(|q, kv| q - kv < 3);
    for program in
        [Attention::new().mask(near).mask(masked), Attention::new().score(score.then(&score))]
    {
        let e = program.plan(&Problem::of(&q, &k, &k).unwrap(), &Device::cpu()).unwrap_err();
        let told = e.to_string();
        assert!(told.contains("buffer `table` has 2 axes but was given 1 index"), "{told}");
        assert!(told.contains("behaviour.rs:"), "{told}");
    }
}

#[test]
fn a_position_map_of_three_axes_is_refused() {
    let map = Buffer::new("map", &[1, 1, 2], vec![0, 1]).unwrap();
    let e = Positions::map(map).unwrap_err();
    assert_eq!(e.to_string(), "buffer `map` has 3 axes but was given 2 indices");
}

#[test]
fn masks_and_scores_given_one_after_another_compose() {
    println!("seed 4");
    let t = random(4, DType::F32, [1, 3, 29, 17]);
    let near = || masked((q() - kv()).lt(7));
    let causal = || masked(kv().le(q()));
    let double = || scored(score() * 2.0);
    let shift = || scored(score() + h().to_f32());
    let chained = Attention::new().mask(near()).mask(causal()).score(double()).score(shift());
    let joined = Attention::new().mask(near() & causal()).score(double().then(&shift()));
    let run = |a: &Attention| plan(a, &t, &t, &t).forward(&t, &t, &t).unwrap();
    assert_eq!(run(&chained).out, run(&joined).out);
    let reversed = Attention::new().mask(causal()).score(shift()).score(double());
    assert_ne!(run(&chained).lse, run(&reversed).lse);
}

#[test]
fn packed_sequences_give_what_each_gives_alone_and_other_offsets_need_no_other_plan() {
    println!("seeds 5, 6, 7");
    let [q_all, k, v] = [5, 6, 7].map(|seed| random(seed, DType::F32, [1, 2, 40, 16]));
    let program = Attention::new().mask(masked(kv().le(q()))).score(scored(score() * 0.5));
    let problem = Problem::of(&q_all, &k, &v).unwrap().varlen(&[0, 40], &[0, 40]).unwrap();
    let one = program.plan(&problem, &Device::cpu()).unwrap();
    let packed = one.with_varlen(&[0, 11, 11, 33], &[0, 11, 11, 33]).unwrap();
    let all = packed.forward(&q_all, &k, &v).unwrap();
    for (from, to) in [(0, 11), (11, 33)] {
        let part = |t: &Tensor| {
            let view = t.view();
            Tensor::from_fn(DType::F32, [1, 2, to - from, 16], |[b, h, s, d]| {
                view.get_f64([b, h, s + from, d])
            })
        };
        let [q, k, v] = [&q_all, &k, &v].map(part);
        let alone = plan(&program, &q, &k, &v).forward(&q, &k, &v).unwrap();
        assert_close(&part(&all.out).to_f64(), &alone.out.to_f64(), 2e-6);
    }
    assert!(rows_from(&all.out, 33).to_f64().iter().all(|&x| x == 0.0), "the tail is untouched");

    // Plans of fewer rows, and of more batch entries that are no sequences.
    for shape in [[1, 2, 9, 16], [3, 2, 7, 16]] {
        let t = random(8, DType::F32, shape);
        let other =
            plan(&program, &t, &t, &t).with_varlen(&[0, 11, 11, 33], &[0, 11, 11, 33]).unwrap();
        assert_eq!(other.forward(&q_all, &k, &v).unwrap().out, all.out, "{shape:?}");
        assert!(other.explain().to_string().contains("33"), "{shape:?}");
        let e = other.forward(&t, &t, &t).unwrap_err().to_string();
        assert!(e.contains("33") || e.contains("batch"), "{shape:?}: {e}");
    }
}

#[test]
fn one_plan_runs_other_lengths_batches_and_strides_of_its_class() {
    println!("seeds 8, 9");
    let small = random(8, DType::F32, [1, 2, 5, 16]);
    let causal = Attention::new().mask(masked(kv().le(q())));
    let made = plan(&causal, &small, &small, &small);
    let large = random(9, DType::F32, [3, 2, 70, 16]);
    let expected = plan(&causal, &large, &large, &large).forward(&large, &large, &large).unwrap();
    assert_eq!(made.forward(&large, &large, &large).unwrap().out, expected.out);

    // The same elements in [length, batch, heads, dim] order.
    let strides = [2 * 16, 16, 3 * 2 * 16, 1];
    let mut elements = vec![0f32; 3 * 2 * 70 * 16];
    let layout = Layout::strided([3, 2, 70, 16], strides, 0);
    for b in 0..3 {
        for h in 0..2 {
            for s in 0..70 {
                for d in 0..16 {
                    elements[layout.at([b, h, s, d])] = large.view().get_f64([b, h, s, d]) as f32;
                }
            }
        }
    }
    let sbhd = TensorRef::new(&elements, layout).unwrap();
    assert_eq!(made.forward(sbhd, sbhd, sbhd).unwrap().out, expected.out);
}

#[test]
fn gradients_come_in_the_dtype_of_the_operands_or_in_the_one_asked_for() {
    println!("seeds 10, 11");
    let t = random(10, DType::BF16, [1, 2, 19, 16]);
    let d_out = random(11, DType::BF16, [1, 2, 19, 16]);
    let bias = Buffer::learned("bias", &[2], vec![0.3, -0.2]).unwrap();
    let program = Attention::new().score(scored(score() * bias.at([h()])));
    let made = plan(&program, &t, &t, &t).with_sink(&[0.1, -0.3]).unwrap();
    let forward: Forward = made.forward(&t, &t, &t).unwrap();
    let half = made.backward(&t, &t, &t, &forward, &d_out).unwrap();
    let full = made.clone().gradients_in(DType::F32);
    let full = full.backward(&t, &t, &t, &forward, &d_out).unwrap();
    assert_eq!((half.dq.dtype(), full.dq.dtype()), (DType::BF16, DType::F32));
    assert_close(&half.dk.to_f64(), &full.dk.to_f64(), 2e-2);
    assert_eq!(half.captures["bias"].len(), 2);
    assert!(half.captures["bias"].iter().all(|x| x.is_finite() && *x != 0.0));
    assert_eq!(half.d_sink.unwrap().len(), 2);
}

#[test]
fn a_rebound_buffer_and_a_set_scalar_change_what_the_plan_computes() {
    println!("seed 12");
    let t = random(12, DType::F32, [2, 1, 23, 16]);
    let doc = |ids: Vec<i32>| Buffer::new("doc", &[2, 23], ids).unwrap();
    let program = |ids: Vec<i32>, window: i32| {
        let doc = doc(ids);
        let same = doc.at([b(), q()]).eq(doc.at([b(), kv()]));
        Attention::new().mask(masked(same & (q() - kv()).lt(scalar("window", window))))
    };
    let (one, many) = (vec![0; 46], (0..46).map(|i| i / 5).collect::<Vec<i32>>());
    let made = plan(&program(one, 30), &t, &t, &t);
    let changed = made.rebind(&doc(many.clone())).unwrap().set_scalar("window", 3).unwrap();
    let expected = plan(&program(many, 3), &t, &t, &t).forward(&t, &t, &t).unwrap();
    assert_eq!(changed.forward(&t, &t, &t).unwrap().out, expected.out);
    assert_ne!(made.forward(&t, &t, &t).unwrap().out, expected.out);
}

#[test]
fn a_shard_drops_out_what_the_whole_problem_drops_to_the_bit() {
    println!("seeds 21, 22, 23, 24");
    let [q_all, k, v, d_all] =
        [21, 22, 23, 24].map(|seed| random(seed, DType::F32, [2, 2, 96, 16]));
    let program = Attention::new().mask(masked(kv().le(q()))).dropout(0.3, 0xFEED_5EED_0042);
    let run = |program: &Attention, q: &Tensor, d: &Tensor| {
        let plan = plan(program, q, &k, &v);
        let forward = plan.forward(q, &k, &v).unwrap();
        let dq = plan.backward(q, &k, &v, &forward, d).unwrap().dq;
        (forward.out, dq)
    };
    let whole = run(&program, &q_all, &d_all);
    let undropped = run(&Attention::new().mask(masked(kv().le(q()))), &q_all, &d_all);
    assert_ne!(whole.0, undropped.0);

    let [q, d] = [&q_all, &d_all].map(|t| rows(t, 32..64));
    let map = Positions::map(Buffer::vector("rows", (32..64).collect())).unwrap();
    for positions in [Positions::offset(32), map] {
        let shard = program.clone().positions(positions, Positions::Rows);
        let found = run(&shard, &q, &d);
        assert_eq!(found.0, rows(&whole.0, 32..64));
        assert_eq!(found.1, rows(&whole.1, 32..64));
    }
    let local = run(&program, &q, &d);
    assert_ne!(local.0, rows(&whole.0, 32..64), "without its offset it drops others");
}

#[test]
fn an_explanation_counts_dense_and_live_work() {
    let shape = [2, 4, 512, 64];
    let problem = Problem::shaped(DType::F32, shape, [2, 2, 512, 64], [2, 2, 512, 32]).unwrap();
    let dense = Attention::new().plan(&problem, &Device::cpu()).unwrap().explain();
    let pairs = (2 * 4 * 512 * 512) as f64;
    assert_eq!(dense.dense_forward_flops, pairs * 2.0 * (64.0 + 32.0));
    assert_eq!(dense.dense_backward_flops, pairs * 2.0 * (3.0 * 64.0 + 2.0 * 32.0));
    assert_eq!(dense.live_forward_flops, dense.dense_forward_flops);
    assert!(dense.copies.is_empty());

    let causal = Attention::new().mask(masked(kv().le(q())));
    let half = causal.plan(&problem, &Device::cpu()).unwrap().explain();
    let share = half.live_forward_flops / half.dense_forward_flops;
    assert!((0.5..0.7).contains(&share), "{share}");
    let text = half.to_string();
    for part in ["backend    cpu", "heads 4/2, lengths 512/512, dims 64/32", "copies     none"] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
}

#[test]
fn captures_are_explained_under_the_name_that_mask_and_score_print() {
    let problem = Problem::shaped(DType::F32, [1, 2, 9, 8], [1, 2, 9, 8], [1, 2, 9, 8]).unwrap();
    // `bias` and `document` are named mods too; two buffers have one name.
    let bias = Buffer::learned("bias", &[2], vec![0.0; 2]).unwrap();
    let again = Buffer::vector("document", vec![0.0; 9]);
    let other = Buffer::vector("document", vec![1.0; 3]);
    let score = score() + bias.at([h()]) + again.at([q()]) * other.at([h()]);
    let program = Attention::new().score(scored(score));
    let said = program.plan(&problem, &Device::cpu()).unwrap().explain();
    assert!(said.score.as_ref().unwrap().contains("bias[h]"), "{said}");
    assert_eq!(
        said.captures,
        ["bias: f32 [2], learned", "document: f32 [9]", "document_2: f32 [3], bound as `document`"]
    );
}

#[test]
fn what_declined_is_explained_when_something_else_runs() {
    let explained = |queries: usize| {
        let q = [1, 2, queries, 8];
        let problem = Problem::shaped(DType::F32, q, [1, 2, 900, 8], [1, 2, 900, 8]).unwrap();
        Attention::new().plan(&problem, &Device::cpu()).unwrap().explain()
    };
    let [declined] = &explained(300).declined[..] else { panic!("{}", explained(300)) };
    assert_eq!(declined.backend, "cpu decode");
    assert!(declined.reason.contains("300 query rows"), "{}", declined.reason);
    assert!(explained(1).declined.is_empty());
}

#[test]
fn an_explanation_warns_of_a_mask_that_lets_nothing_through() {
    let problem = Problem::shaped(DType::F32, [1, 2, 9, 8], [1, 2, 9, 8], [1, 2, 9, 8]).unwrap();
    let explained = |mask| Attention::new().mask(mask).plan(&problem, &Device::cpu()).unwrap();
    let nothing = explained(masked(kv().lt(0))).explain().to_string();
    assert!(nothing.contains("warning    the mask lets no query see any key"), "{nothing}");
    assert!(!explained(masked(kv().le(q()))).explain().to_string().contains("warning"));
}
