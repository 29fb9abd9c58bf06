//! Attention without mods against a few lines of f64.

use foveate_cpu::{CpuOptions, CpuPlan};
use foveate_problem::{BackwardArgs, Dims, ForwardArgs, Operands, Spec};
use foveate_tensor::{DType, Tensor};

fn random(seed: u64, shape: [usize; 4]) -> Tensor {
    let mut state = seed;
    Tensor::from_fn(DType::F32, shape, |_| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f64 / (1u64 << 23) as f64 - 1.0
    })
}

fn close(name: &str, got: &Tensor, want: &[f64]) {
    for (i, (got, want)) in got.to_f64().iter().zip(want).enumerate() {
        assert!((got - want).abs() < 2e-5, "{name}[{i}]: {got} for {want}");
    }
}

#[test]
fn full_attention_and_its_gradient_are_those_of_the_formula() {
    let [batch, heads, groups, len_q, len_k, dim, dim_v] = [2, 4, 2, 37, 150, 20, 7];
    let q = random(1, [batch, heads, len_q, dim]);
    let k = random(2, [batch, groups, len_k, dim]);
    let v = random(3, [batch, groups, len_k, dim_v]);
    let d_out = random(4, [batch, heads, len_q, dim_v]);
    let operands = Operands { q: q.view(), k: k.view(), v: v.view(), sink: None, varlen: None };
    let dims = Dims::of(&operands).unwrap();
    let spec = Spec { mask: None, score: None, scale: None, dropout: None };
    let plan = CpuPlan::new(&spec, &dims, DType::F32, CpuOptions::default()).unwrap();
    let nan = |like: &Tensor| Tensor::filled(DType::F32, like.shape(), f64::NAN);
    let mut out = nan(&d_out);
    let mut lse = Tensor::filled(DType::F32, [batch, heads, len_q], f64::NAN);
    plan.forward(ForwardArgs {
        operands,
        out: out.view_mut().unwrap(),
        lse: lse.view_mut().unwrap(),
        max_score: None,
    })
    .unwrap();
    let (mut dq, mut dk, mut dv) = (nan(&q), nan(&k), nan(&v));
    plan.backward(BackwardArgs {
        operands,
        out: out.view(),
        lse: lse.view(),
        d_out: d_out.view(),
        d_lse: None,
        dq: dq.view_mut().unwrap(),
        dk: dk.view_mut().unwrap(),
        dv: dv.view_mut().unwrap(),
        accumulate: false,
        d_sink: None,
        d_captures: vec![],
    })
    .unwrap();

    let scale = 1.0 / (dim as f64).sqrt();
    let at = |t: &Tensor, i: [usize; 4]| t.view().get_f64(i);
    let place = |t: &Tensor, i: [usize; 4]| t.layout().at(i);
    let [mut w_out, mut w_dq, mut w_dk, mut w_dv] =
        [&out, &dq, &dk, &dv].map(|t| vec![0.0; t.layout().elems()]);
    let mut w_lse = Vec::new();
    for b in 0..batch {
        for h in 0..heads {
            let g = h * groups / heads;
            for i in 0..len_q {
                let dot = |x: &Tensor, xi: [usize; 4], y: &Tensor, yi: [usize; 4]| {
                    let d = x.shape()[3];
                    (0..d)
                        .map(|d| at(x, [xi[0], xi[1], xi[2], d]) * at(y, [yi[0], yi[1], yi[2], d]))
                        .sum::<f64>()
                };
                let weights: Vec<f64> = (0..len_k)
                    .map(|j| (scale * dot(&q, [b, h, i, 0], &k, [b, g, j, 0])).exp())
                    .collect();
                let sum: f64 = weights.iter().sum();
                w_lse.push(sum.ln());
                let dp: Vec<f64> =
                    (0..len_k).map(|j| dot(&d_out, [b, h, i, 0], &v, [b, g, j, 0])).collect();
                let delta: f64 = dp.iter().zip(&weights).map(|(d, w)| d * w / sum).sum();
                for j in 0..len_k {
                    let p = weights[j] / sum;
                    let ds = p * (dp[j] - delta) * scale;
                    for d in 0..dim_v {
                        w_out[place(&out, [b, h, i, d])] += p * at(&v, [b, g, j, d]);
                        w_dv[place(&dv, [b, g, j, d])] += p * at(&d_out, [b, h, i, d]);
                    }
                    for d in 0..dim {
                        w_dq[place(&dq, [b, h, i, d])] += ds * at(&k, [b, g, j, d]);
                        w_dk[place(&dk, [b, g, j, d])] += ds * at(&q, [b, h, i, d]);
                    }
                }
            }
        }
    }
    close("out", &out, &w_out);
    close("dq", &dq, &w_dq);
    close("dk", &dk, &w_dk);
    close("dv", &dv, &w_dv);
    assert!(lse.to_f64().iter().zip(&w_lse).all(|(a, b)| (a - b).abs() < 1e-5));
}
