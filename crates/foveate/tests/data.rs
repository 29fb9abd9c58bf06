//! Data in and out: vectors and slices of the caller's, and calls with a gradient of `lse`,
//! destinations of the caller's and sums over several calls, against the f64 oracle.

use foveate::mods::expr::{h, score};
use foveate::tensor::random::Random;
use foveate::{
    Attention, Buffer, Device, ForwardRef, GradientsMut, Layout, Plan, Problem, ScoreMod, Tensor,
    TensorMut, TensorRef, masks,
};
use foveate_problem::{Operands, Spec};
use foveate_reference::Upstream;

const SHAPES: [[usize; 4]; 3] = [[2, 4, 5, 8], [2, 2, 7, 8], [2, 2, 7, 6]];
const OUT: [usize; 4] = [2, 4, 5, 6];
const ROWS: [usize; 3] = [2, 4, 5];
const SINK: [f32; 4] = [0.3, -0.2, 0.1, 0.7];

/// Random numbers in `[-1, 1)`.
fn numbers(seed: u64, len: usize) -> Vec<f32> {
    let mut random = Random::new(seed);
    (0..len).map(|_| random.signed() as f32).collect()
}

fn tensor(seed: u64, shape: [usize; 4]) -> Tensor {
    Tensor::from_vec(numbers(seed, shape.iter().product()), shape).expect("as many as the shape")
}

struct Case {
    operands: [Tensor; 3],
    plan: Plan,
    spec: Spec,
    d_out: Tensor,
    d_lse: Tensor<3>,
}

/// A causal mask, a learned bias for each head, and a sink.
fn case() -> Case {
    let bias = Buffer::learned("bias", &[4], numbers(9, 4)).expect("a vector");
    let biased = ScoreMod::new((score() + bias.at([h()])).dynamic()).expect("a score");
    let operands = [1, 2, 3].map(|i| tensor(i, SHAPES[i as usize - 1]));
    let [q, k, v] = &operands;
    let problem = Problem::of(q, k, v).and_then(|p| p.sink(&SINK)).expect("they fit");
    let program = Attention::new().mask(masks::causal()).score(biased.clone());
    Case {
        plan: program.plan(&problem, &Device::cpu()).expect("the CPU takes it"),
        spec: Spec { mask: Some(masks::causal()), score: Some(biased), scale: None, dropout: None },
        d_out: tensor(4, OUT),
        d_lse: Tensor::from_vec(numbers(5, 40), ROWS).expect("one a row"),
        operands,
    }
}

fn assert_close(what: &str, found: &[f32], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let off = (f64::from(*found) - expected).abs();
        assert!(off < 2e-6 * (1.0 + expected.abs()), "{what}[{i}]: {found}, not {expected}");
    }
}

#[test]
fn vectors_go_in_and_slices_come_out() {
    let Case { operands: [q, k, v], plan, spec, .. } = case();
    let operands = Operands {
        q: q.view(),
        k: k.view(),
        v: v.view(),
        sink: Some((&SINK).into()),
        varlen: None,
        pages: None,
        scales: None,
    };
    let gold = foveate_reference::forward(&spec, &operands).unwrap();
    let forward = plan.forward(&q, &k, &v).unwrap();
    assert_close("out", forward.out.as_slice().unwrap(), &gold.out);
    assert_close("lse", forward.lse.as_slice().unwrap(), &gold.lse);

    // The same into memory of the caller's, with the heads of a position side by side.
    let (mut out, mut lse, mut max) = (vec![f32::NAN; 240], vec![f32::NAN; 40], [f32::NAN; 40]);
    let heads_last = Layout::bshd(2, 5, 4, 6);
    plan.forward_call(&q, &k, &v)
        .max_score(TensorMut::from_slice(&mut max, ROWS).unwrap())
        .write_to(
            TensorMut::new(&mut out, heads_last).unwrap(),
            TensorMut::from_slice(&mut lse, ROWS).unwrap(),
        )
        .unwrap();
    let out = TensorRef::new(&out, heads_last).unwrap();
    assert_eq!(out.to_vec::<f32>(), forward.out.as_slice::<f32>().unwrap());
    assert_eq!(lse, forward.lse.as_slice::<f32>().unwrap());
    assert_close("max_score", &max, &gold.max_score);
}

#[test]
fn a_backward_call_takes_a_gradient_of_lse_own_destinations_and_adds_up() {
    let Case { operands: [q, k, v], plan, spec, d_out, d_lse } = case();
    let operands = Operands {
        q: q.view(),
        k: k.view(),
        v: v.view(),
        sink: Some((&SINK).into()),
        varlen: None,
        pages: None,
        scales: None,
    };
    let upstream = Upstream { d_out: d_out.view(), d_lse: Some(d_lse.view()) };
    let gold = foveate_reference::backward(&spec, &operands, &upstream).unwrap();
    let forward = plan.forward(&q, &k, &v).unwrap();
    let call = || plan.backward_call(&q, &k, &v, &forward, &d_out).d_lse(&d_lse);

    let mut found = call().run().unwrap();
    assert_close("dq", found.dq.as_slice().unwrap(), &gold.dq);
    assert_close("dk", found.dk.as_slice().unwrap(), &gold.dk);
    assert_close("dv", found.dv.as_slice().unwrap(), &gold.dv);
    assert_close("d_sink", found.d_sink.as_deref().unwrap(), &gold.d_sink);
    assert_close("bias", &found.captures["bias"], &gold.captures["bias"]);

    let twice = |once: &[f64]| once.iter().map(|x| 2.0 * x).collect::<Vec<_>>();
    call().add_to(found.view_mut().unwrap()).unwrap();
    assert_close("dq twice", found.dq.as_slice().unwrap(), &twice(&gold.dq));
    assert_close("d_sink twice", found.d_sink.as_deref().unwrap(), &twice(&gold.d_sink));
    assert_close("bias twice", &found.captures["bias"], &twice(&gold.captures["bias"]));

    let [mut dq, mut dk, mut dv] = SHAPES.map(|s| vec![f32::NAN; s.iter().product()]);
    let (mut d_sink, mut bias) = ([f32::NAN; 4], [f32::NAN; 4]);
    let to = GradientsMut::new(
        TensorMut::from_slice(&mut dq, SHAPES[0]).unwrap(),
        TensorMut::from_slice(&mut dk, SHAPES[1]).unwrap(),
        TensorMut::from_slice(&mut dv, SHAPES[2]).unwrap(),
    );
    let forward = ForwardRef { out: forward.out.view(), lse: forward.lse.view() };
    plan.backward_call(&q, &k, &v, forward, &d_out)
        .d_lse(&d_lse)
        .write_to(to.d_sink(&mut d_sink).capture("bias", &mut bias))
        .unwrap();
    assert_close("own dq", &dq, &gold.dq);
    assert_close("own dk", &dk, &gold.dk);
    assert_close("own dv", &dv, &gold.dv);
    assert_close("own d_sink", &d_sink, &gold.d_sink);
    assert_close("own bias", &bias, &gold.captures["bias"]);
}
