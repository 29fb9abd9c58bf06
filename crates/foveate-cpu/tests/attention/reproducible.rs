//! The same bits for any number of threads, any strides, any number of calls.

use std::time::Duration;

use foveate_cpu::{CpuOptions, CpuPlan, Stages};
use foveate_mods::Buffer;
use foveate_mods::expr::{h, kv, q, score};
use foveate_problem::{Arrangement, Dropout};
use foveate_tensor::random::Random;
use foveate_tensor::{DType, Data, Layout, Tensor};

use crate::common::{Case, Inputs, Results, run, run_into, vector};
use crate::oracle::{causal, mask, score_mod};

fn busy_case() -> Case {
    let bias = Buffer::learned("bias", &[6, 5], vector(&mut Random::new(2), 30)).unwrap();
    Case {
        batch: 2,
        heads: [6, 2],
        lens: [131, 131],
        dims: [20, 9],
        mask: mask(causal()),
        score: score_mod(score() + bias.at([h(), (q() + kv()) % 5])),
        dropout: Some(Dropout::new(0.1, 7)),
        sink: true,
        ..Case::default()
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for options in [CpuOptions::default(), Case::default().options] {
        let case = Case { options, ..busy_case() };
        let on = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| case.run().bits())
        };
        let one = on(1);
        assert!([2, 3, 5].into_iter().all(|threads| on(threads) == one));
    }
}

#[test]
fn few_queries_over_many_keys_give_the_same_bits_on_any_number_of_threads() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let case = Case { lens: [3, 1700], dims: [32, 48], dtype, ..busy_case() };
        let on = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| case.run().bits())
        };
        let one = on(1);
        assert!([2, 5].into_iter().all(|threads| on(threads) == one), "{dtype}");
    }
}

/// The same numbers with the axes in another order in memory and gaps between elements.
fn scattered<const N: usize>(t: &Tensor<N>, random: &mut Random) -> Tensor<N> {
    let shape = t.shape();
    let mut order: Vec<usize> = (0..N).collect();
    for i in (1..N).rev() {
        order.swap(i, random.below(i + 1));
    }
    let mut strides = [0; N];
    let mut step = 1 + random.below(3);
    for axis in order {
        strides[axis] = step;
        step = step * shape[axis].max(1) + random.below(4);
    }
    let layout = Layout::strided(shape, strides, random.below(9));
    let mut data = Data::filled(t.dtype(), layout.end().unwrap(), f64::NAN);
    let mut into = foveate_tensor::TensorMut::new(&mut data, layout).unwrap();
    let mut index = [0; N];
    for value in t.to_f64() {
        into.write(index, value);
        for axis in (0..N).rev() {
            index[axis] += 1;
            if index[axis] < shape[axis] {
                break;
            }
            index[axis] = 0;
        }
    }
    Tensor::new(data, layout).unwrap()
}

#[test]
fn any_strides_give_the_same_bits() {
    for seed in 0..12 {
        let mut random = Random::new(seed);
        let dtype = [DType::F32, DType::BF16, DType::F16][random.below(3)];
        // Few queries take another way, and head dims of whole groups of lanes too.
        let (lens, dims) = if seed < 8 { ([40, 61], [20, 9]) } else { ([2, 90], [16, 32]) };
        let case = Case { seed, dtype, lens, dims, ..busy_case() };
        let inputs = case.inputs();
        let want = run(&case.plan(&inputs), &inputs, &case.spec()).unwrap();
        let mut move_all = |i: &Inputs| Inputs {
            q: scattered(&i.q, &mut random),
            k: scattered(&i.k, &mut random),
            v: scattered(&i.v, &mut random),
            d_out: scattered(&i.d_out, &mut random),
            d_lse: None,
            sink: i.sink.clone(),
            offsets: None,
        };
        let moved = move_all(&inputs);
        let mut got = Results {
            out: scattered(&want.out, &mut random),
            lse: scattered(&want.lse, &mut random),
            max_score: scattered(&want.max_score, &mut random),
            dq: scattered(&want.dq, &mut random),
            dk: scattered(&want.dk, &mut random),
            dv: scattered(&want.dv, &mut random),
            ..want.clone()
        };
        run_into(&case.plan(&moved), &moved, &mut got, false).unwrap();
        assert!(got.bits() == want.bits(), "seed {seed}");
    }
}

#[test]
fn a_repeated_key_head_is_like_one_with_stride_zero() {
    let case = Case { heads: [4, 4], lens: [30, 30], ..Case::default() };
    let mut inputs = case.inputs();
    let expand = |t: &Tensor| {
        let [b, h, s, d] = t.shape();
        let mut layout = *t.layout();
        layout.strides[1] = 0;
        let view = Tensor::new(t.data().clone(), layout).unwrap();
        let copy = Tensor::from_fn(DType::F32, [b, h, s, d], |i| view.view().get_f64(i));
        (view, copy)
    };
    let ((k_view, k_copy), (v_view, v_copy)) = (expand(&inputs.k), expand(&inputs.v));
    (inputs.k, inputs.v) = (k_copy, v_copy);
    let want = run(&case.plan(&inputs), &inputs, &case.spec()).unwrap();
    (inputs.k, inputs.v) = (k_view, v_view);
    let plan = case.plan(&inputs);
    let mut got = want.clone();
    run_into(&plan, &inputs, &mut got, false).unwrap();
    assert!(got.bits() == want.bits());
}

#[test]
fn a_plan_serves_other_lengths_and_again_with_the_same_bits() {
    let case = busy_case();
    let inputs = case.inputs();
    let plan: CpuPlan = case.plan(&inputs);
    let first = run(&plan, &inputs, &case.spec()).unwrap().bits();
    let longer = Case { lens: [200, 170], batch: 1, ..case.clone() };
    let other = longer.inputs();
    let mixed = run(&plan, &other, &case.spec()).unwrap().bits();
    assert!(mixed == run(&longer.plan(&other), &other, &case.spec()).unwrap().bits());
    assert!(first == run(&plan, &inputs, &case.spec()).unwrap().bits());
}

#[test]
fn accumulating_adds_to_what_is_there() {
    let case = busy_case();
    let inputs = case.inputs();
    let plan = case.plan(&inputs);
    let once = run(&plan, &inputs, &case.spec()).unwrap();
    let mut twice = once.clone();
    run_into(&plan, &inputs, &mut twice, true).unwrap();
    let doubled = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| *b == 2.0 * a);
    for (once, twice) in [(&once.dq, &twice.dq), (&once.dk, &twice.dk), (&once.dv, &twice.dv)] {
        assert!(doubled(&once.to_f64(), &twice.to_f64()));
    }
    for (once, twice) in once.d_sink.iter().zip(&twice.d_sink) {
        assert_eq!(*twice, 2.0 * once);
    }
    for (once, twice) in once.captures["bias"].iter().zip(&twice.captures["bias"]) {
        assert!((twice - 2.0 * once).abs() <= 1e-5 * once.abs().max(1.0));
    }
}

#[test]
fn little_workspace_gives_the_same_bits_but_for_learned_buffers() {
    let without_captures = |case: &Case| {
        let mut results = case.run();
        results.captures.clear();
        results.bits()
    };
    let bytes = |case: &Case| case.plan(&case.inputs()).describe(Arrangement::Dense).backward_bytes;
    let plenty = busy_case();
    for workspace_bytes in [Some(0), Some(bytes(&plenty) / 2)] {
        let options = CpuOptions { workspace_bytes, ..plenty.options };
        let little = Case { options, ..busy_case() };
        assert!(bytes(&little) < bytes(&plenty));
        assert!(without_captures(&little) == without_captures(&plenty));
        little.check("little workspace");
    }
}

#[test]
fn a_profile_counts_where_time_goes_and_changes_no_bits() {
    let case = busy_case();
    let profiled = Case { options: CpuOptions { profile: true, ..case.options }, ..busy_case() };
    let inputs = profiled.inputs();
    let plan = profiled.plan(&inputs);
    assert!(run(&plan, &inputs, &profiled.spec()).unwrap().bits() == case.run().bits());
    let stages = plan.take_stages();
    let busy = stages.products + stages.softmax + stages.mods + stages.packing;
    assert!(stages.products > Duration::ZERO && stages.softmax > Duration::ZERO, "{stages:?}");
    assert!(stages.mods > Duration::ZERO && stages.packing > Duration::ZERO, "{stages:?}");
    assert!(busy + stages.idle() == stages.total, "{stages:?}");
    assert_eq!(plan.take_stages(), Stages::default());
    let plan = case.plan(&inputs);
    run(&plan, &inputs, &case.spec()).unwrap();
    assert_eq!(plan.take_stages(), Stages::default());
}
