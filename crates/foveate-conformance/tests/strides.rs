//! Strides never change a bit of a result.

use foveate_cpu::{CpuOptions, CpuPlan};
use foveate_mods::{MaskMod, expr};
use foveate_problem::{BackwardArgs, Dims, ForwardArgs, Operands, Spec};
use foveate_tensor::random::Random;
use foveate_tensor::{
    DType, Data, Layout, Order, PackedShape, QkvMut, QkvPacked, Tensor, TensorMut, TensorRef,
    indices,
};
use proptest::prelude::*;

/// A view of `shape` in some order of axes, every axis cut from a longer one, with the length of
/// its storage. `repeat` gives the head axis stride 0.
fn any_layout(shape: [usize; 4], repeat: bool) -> impl Strategy<Value = (Layout, usize)> {
    let order = Just([0usize, 1, 2, 3]).prop_shuffle();
    (
        order,
        prop::array::uniform4(0..3usize),
        prop::array::uniform4(0..3usize),
        0..7usize,
        any::<u16>(),
    )
        .prop_map(move |(order, before, after, lead, junk)| {
            let mut strides = [0; 4];
            let (mut step, mut offset) = (1, lead);
            for axis in order {
                strides[axis] = step;
                offset += before[axis] * step;
                step *= before[axis] + shape[axis] + after[axis];
            }
            for axis in (0..4).filter(|&a| shape[a] == 1) {
                strides[axis] = junk.into();
            }
            if repeat {
                strides[1] = 0;
            }
            let layout = Layout::strided(shape, strides, offset);
            (layout, layout.end().expect("small"))
        })
}

fn placed(values: &Tensor, (layout, len): (Layout, usize)) -> Tensor {
    let mut all = vec![f64::NAN; len];
    indices(layout.shape).for_each(|index| all[layout.at(index)] = values.view().get_f64(index));
    Tensor::new(Data::from_f64(values.dtype(), all), layout).expect("made to fit")
}

fn spec() -> Spec {
    let mask = MaskMod::new(expr::q().ge(expr::kv()).dynamic()).expect("bool");
    Spec { mask: Some(mask), score: None, scale: None, dropout: None }
}

/// out, dq, dk and dv, row-major, computed from and into these layouts.
fn attention(inputs: [&Tensor; 4], outputs: [(Layout, usize); 4]) -> [Vec<u64>; 4] {
    let [q, k, v, d_out] = inputs;
    let operands = Operands::new(q.view(), k.view(), v.view());
    let dims = Dims::of(&operands).expect("a problem");
    let plan = CpuPlan::new(&spec(), &dims, q.dtype(), CpuOptions::default()).expect("planned");
    let mut data = outputs.map(|(_, len)| Data::filled(q.dtype(), len, f64::NAN));
    let mut lse = Tensor::<3>::filled(DType::F32, dims.row_shape(), f64::NAN);
    let [out, dq, dk, dv] = &mut data;
    let layouts = outputs.map(|(layout, _)| layout);
    plan.forward(ForwardArgs {
        operands,
        out: TensorMut::new(&mut *out, layouts[0]).expect("disjoint"),
        lse: lse.view_mut().expect("dense"),
        max_score: None,
    })
    .expect("forward");
    plan.backward(BackwardArgs {
        operands,
        out: TensorRef::new(&*out, layouts[0]).expect("fits"),
        lse: lse.view(),
        d_out: d_out.view(),
        d_lse: None,
        dq: Some(TensorMut::new(dq, layouts[1]).expect("disjoint")),
        dk: Some(TensorMut::new(dk, layouts[2]).expect("disjoint")),
        dv: Some(TensorMut::new(dv, layouts[3]).expect("disjoint")),
        accumulate: false,
        d_sink: None,
        d_captures: Vec::new(),
    })
    .expect("backward");
    std::array::from_fn(|i| bits(&data[i], layouts[i]))
}

fn bits(data: &Data, layout: Layout) -> Vec<u64> {
    let view = TensorRef::new(data, layout).expect("fits");
    let mut bits = Vec::new();
    indices(layout.shape).for_each(|index| bits.push(view.get_f64(index).to_bits()));
    bits
}

fn dense(shape: [usize; 4]) -> (Layout, usize) {
    let layout = Layout::contiguous(shape);
    (layout, layout.elems())
}

type Drawn = (DType, bool, u64, [(Layout, usize); 8]);

fn any_problem() -> impl Strategy<Value = Drawn> {
    let dtype = prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::BF16)];
    let sizes = (1..3usize, 1..3usize, 1..3usize, 1..20usize, 1..20usize, 1..10usize, 1..10usize);
    (dtype, any::<bool>(), any::<u64>(), sizes).prop_flat_map(
        |(dtype, repeat, seed, (b, g, r, sq, sk, d, dv))| {
            let (q, k) = ([b, g * r, sq, d], [b, g, sk, d]);
            let (v, out) = ([b, g, sk, dv], [b, g * r, sq, dv]);
            let at = |shape| any_layout(shape, false);
            let read = |shape| any_layout(shape, repeat);
            let layouts = (at(q), read(k), read(v), at(out), at(out), at(q), at(k), at(v));
            layouts.prop_map(move |(a, b, c, d, e, f, g, h)| {
                (dtype, repeat, seed, [a, b, c, d, e, f, g, h])
            })
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn any_legal_strides_give_the_bits_of_contiguous_tensors(
        (dtype, repeat, seed, layouts) in any_problem()
    ) {
        let mut random = Random::new(seed);
        let mut tensor = |i: usize| {
            let shape = layouts[i].0.shape;
            let mut first = [0.0; 4096];
            Tensor::from_fn(dtype, shape, |[b, h, s, d]| {
                let fresh = random.normal();
                // A repeated head has the elements of head 0.
                let at = (b * shape[2] + s) * shape[3] + d;
                if h == 0 {
                    first[at] = fresh;
                }
                if repeat && (i == 1 || i == 2) { first[at] } else { fresh }
            })
        };
        let plain = [tensor(0), tensor(1), tensor(2), tensor(3)];
        let strided: [Tensor; 4] = std::array::from_fn(|i| placed(&plain[i], layouts[i]));
        let outputs: [(Layout, usize); 4] = std::array::from_fn(|i| layouts[4 + i]);
        let expected = attention(plain.each_ref(), outputs.map(|(l, _)| dense(l.shape)));
        prop_assert_eq!(attention(strided.each_ref(), outputs), expected);
    }
}

#[test]
fn the_fused_multi_query_projection_of_transformer_engine_1195_is_followed_at_its_own_size() {
    let shape = PackedShape {
        order: Order::Sbhd,
        batch: 1,
        len: 2048,
        heads_q: 16,
        heads_kv: 1,
        dim: 64,
        dim_v: 64,
    };
    let packing = QkvPacked::interleaved(&shape).expect("sizes fit");
    let mut random = Random::new(1195);
    let fused = Data::from_f64(DType::F16, (0..packing.elems()).map(|_| random.normal()));
    let views = packing.views(&fused).expect("fits");
    let copy = |t: TensorRef<'_>| Tensor::from_fn(DType::F16, t.shape(), |i| t.get_f64(i));
    let [q, k, v] = [views.q, views.k, views.v].map(copy);
    let d_out = Tensor::from_fn(DType::F16, [1, 16, 2048, 64], |_| random.normal());
    let shapes = [d_out.shape(), q.shape(), k.shape(), v.shape()];
    let expected = attention([&q, &k, &v, &d_out], shapes.map(dense));

    let operands = Operands::new(views.q, views.k, views.v);
    let dims = Dims::of(&operands).expect("a problem");
    let plan = CpuPlan::new(&spec(), &dims, DType::F16, CpuOptions::default()).expect("planned");
    let layout = Layout::sbhd(2048, 1, 16, 64);
    let mut out = Data::filled(DType::F16, layout.elems(), f64::NAN);
    let mut lse = Tensor::<3>::filled(DType::F32, dims.row_shape(), f64::NAN);
    plan.forward(ForwardArgs {
        operands,
        out: TensorMut::new(&mut out, layout).expect("disjoint"),
        lse: lse.view_mut().expect("dense"),
        max_score: None,
    })
    .expect("forward");
    let mut gradient = Data::filled(DType::F16, packing.elems(), f64::NAN);
    let QkvMut { q: dq, k: dk, v: dv, .. } = packing.views_mut(&mut gradient).expect("fits");
    plan.backward(BackwardArgs {
        operands,
        out: TensorRef::new(&out, layout).expect("fits"),
        lse: lse.view(),
        d_out: d_out.view(),
        d_lse: None,
        dq: Some(dq),
        dk: Some(dk),
        dv: Some(dv),
        accumulate: false,
        d_sink: None,
        d_captures: Vec::new(),
    })
    .expect("backward");
    assert!(bits(&out, layout) == expected[0], "out");
    for (i, part) in [packing.q(), packing.k(), packing.v()].into_iter().enumerate() {
        assert!(bits(&gradient, *part) == expected[i + 1], "{}", ["dq", "dk", "dv"][i]);
    }
}
