//! Attention, one row at a time, in any precision.

use std::collections::BTreeMap;

use foveate_mods::Program;
use foveate_mods::ir::{Leaf, Node};
use foveate_problem::{Dims, Dropout, Operands, Pages, Sequence, Spec};
use foveate_tensor::TensorRef;

use crate::error::ReferenceError;
use crate::eval::{Point, Value, element, eval};
use crate::real::{Function, Real};

/// Results of a forward pass, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct Forward {
    /// `[B, Hq, Sq, Dv]`.
    pub out: Vec<f64>,
    /// Natural log of the denominator, `[B, Hq, Sq]`.
    pub lse: Vec<f64>,
    /// Largest score, `[B, Hq, Sq]`; the sink is not a score.
    pub max_score: Vec<f64>,
}

/// Results of a backward pass, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients {
    /// `[B, Hq, Sq, D]`.
    pub dq: Vec<f64>,
    /// `[Bk, Hkv, Sk, D]`, summed over the batch when k is shared.
    pub dk: Vec<f64>,
    /// `[Bk, Hkv, Sk, Dv]`.
    pub dv: Vec<f64>,
    /// `[Hq]`; empty without a sink.
    pub d_sink: Vec<f64>,
    /// One entry for each element of each learned buffer of the score.
    pub captures: BTreeMap<String, Vec<f64>>,
}

/// Gradients that a backward pass starts from.
#[derive(Clone, Copy, Debug)]
pub struct Upstream<'a> {
    /// With respect to `out`.
    pub d_out: TensorRef<'a>,
    /// With respect to `lse`.
    pub d_lse: Option<TensorRef<'a, 3>>,
}

/// A load of a learned buffer in the score's graph.
struct LearnedLoad {
    node: usize,
    buffer: String,
}

/// Both passes. `round` rounds what an eager program would store in the operands' dtype; without
/// `upstream` the gradients are empty.
pub(crate) fn run<F: Real>(
    spec: &Spec,
    operands: &Operands<'_>,
    round: &dyn Fn(F) -> F,
    upstream: Option<&Upstream<'_>>,
) -> Result<(Forward, Gradients), ReferenceError> {
    spec.check()?;
    spec.check_on_host()?;
    let dims = Dims::of(operands)?;
    let Dims { heads_q, dim, dim_v, len_q, len_k, .. } = dims;
    if operands.pages.is_some() && upstream.is_some() {
        return Err(Pages::no_gradients().into());
    }
    let [_, _, stored_k, _] = operands.k.shape();
    let c = F::of;
    let (zero, empty) = (c(0.0), c(f64::NEG_INFINITY));
    let scale = c(spec.scale.map_or(1.0 / (dim as f64).sqrt(), f64::from));
    let keep = spec.dropout.as_ref().map(Dropout::keep_mask);
    let kept_scale = c(spec.dropout.as_ref().map_or(1.0, |d| 1.0 / (1.0 - f64::from(d.p()))));
    let learned = spec.score.as_ref().map_or(Vec::new(), |s| learned_loads(s.program()));

    let (q, k, v) = (dense::<F>(&operands.q), dense::<F>(&operands.k), dense::<F>(&operands.v));
    let d_out = upstream.map(|u| dense::<F>(&u.d_out));
    let d_lse =
        upstream.and_then(|u| u.d_lse.as_ref()).map(|t| row_major(t.shape(), |i| t.get_f64(i)));

    let untouched = |n: usize| vec![c(f64::NAN); n];
    let size = |shape: [usize; 4]| shape.iter().product::<usize>();
    let mut out = untouched(size(dims.out_shape()));
    let rows: usize = dims.row_shape().iter().product();
    let (mut lse, mut max_score) = (untouched(rows), untouched(rows));
    let [mut dq, mut dk, mut dv] =
        [dims.q_shape(), dims.k_shape(), dims.v_shape()].map(|shape| untouched(size(shape)));
    let mut d_sink = vec![zero; operands.sink.map_or(0, <[f32]>::len)];
    let mut captures: BTreeMap<String, Vec<F>> = spec
        .learned()
        .into_iter()
        .map(|b| (b.name().to_owned(), vec![zero; b.data().len()]))
        .collect();

    let sequences = operands.sequences(&dims);
    for Sequence { k_batch, k_start, k_len, .. } in &sequences {
        for g in 0..dims.heads_kv {
            let first = (k_batch * dims.heads_kv + g) * len_k + k_start;
            dk[first * dim..(first + k_len) * dim].fill(zero);
            dv[first * dim_v..(first + k_len) * dim_v].fill(zero);
        }
    }
    let mut values = Vec::new();
    for &Sequence { b, q_batch, k_batch, q_start, q_len, k_start, k_len } in &sequences {
        for (h, qi) in (0..heads_q).flat_map(|h| (0..q_len).map(move |qi| (h, qi))) {
            let g = h / dims.group();
            let row = (q_batch * heads_q + h) * len_q + q_start + qi;
            let key = |kv: usize| {
                let [entry, row] = operands.locate_key(k_batch, k_start + kv);
                (entry * dims.heads_kv + g) * stored_k + row
            };
            let at = |kv: usize, score: F| Point {
                b: b as i32,
                h: h as i32,
                h_kv: g as i32,
                q: qi as i32,
                kv: kv as i32,
                q_len: q_len as i32,
                kv_len: k_len as i32,
                score,
            };
            let q = &q[row * dim..][..dim];

            let mut raw = vec![zero; k_len];
            let mut score = vec![empty; k_len];
            let mut factor = vec![kept_scale; k_len];
            for kv in 0..k_len {
                let mut holds = |mask: &foveate_mods::MaskMod| {
                    eval(mask.program(), &at(kv, zero), None, &mut values)?;
                    Ok::<_, ReferenceError>(root(mask.program(), &values).bool())
                };
                if let Some(mask) = &spec.mask
                    && !holds(mask)?
                {
                    continue;
                }
                if let Some(keep) = keep
                    && !holds(keep)?
                {
                    factor[kv] = zero;
                }
                raw[kv] = round(dot(q, &k[key(kv) * dim..])) * scale;
                score[kv] = raw[kv];
                if let Some(score_mod) = &spec.score {
                    eval(score_mod.program(), &at(kv, raw[kv]), None, &mut values)?;
                    score[kv] = root(score_mod.program(), &values).real().0;
                }
            }

            let sink = operands.sink.map_or(empty, |s| c(s[h].into()));
            let max = score.iter().copied().fold(empty, larger);
            let shift = larger(max, sink);
            let weight = |s: F| if s == empty { zero } else { (s - shift).apply(Function::Exp) };
            let denominator = score.iter().map(|&s| weight(s)).fold(weight(sink), |x, y| x + y);
            lse[row] = if shift == empty { empty } else { shift + denominator.apply(Function::Ln) };
            max_score[row] = max;
            let share = |w: F| if w == zero { zero } else { w / denominator };
            let p: Vec<F> = score.iter().map(|&s| share(weight(s))).collect();
            let dropped = |kv: usize| round(p[kv] * factor[kv]);
            for (d, o) in out[row * dim_v..][..dim_v].iter_mut().enumerate() {
                let of = |kv: usize| weighted(dropped(kv), v[key(kv) * dim_v + d]);
                *o = round((0..k_len).map(of).fold(zero, |x, y| x + y));
            }

            let Some(d_out) = &d_out else { continue };
            let d_out = &d_out[row * dim_v..][..dim_v];
            let d_lse = d_lse.as_ref().map_or(zero, |t| c(t[row]));
            let dp: Vec<F> = (0..k_len)
                .map(|kv| weighted(factor[kv], round(dot(d_out, &v[key(kv) * dim_v..]))))
                .collect();
            // Σ p·dp by way of out, as programs that do not keep p have it. The sum runs backwards:
            // in the order of dp it would cancel exactly in a row with one key, and the plain
            // implementation would seem to need no tolerance there.
            let terms = d_out.iter().zip(&out[row * dim_v..][..dim_v]).rev();
            let delta = terms.fold(zero, |sum, (&d, &o)| sum + d * o);
            if operands.sink.is_some() {
                d_sink[h] += share(weight(sink)) * (d_lse - delta);
            }
            let dq = &mut dq[row * dim..][..dim];
            dq.fill(zero);
            for kv in (0..k_len).filter(|&kv| p[kv] != zero) {
                for d in 0..dim_v {
                    dv[key(kv) * dim_v + d] += dropped(kv) * d_out[d];
                }
                let d_score = p[kv] * (dp[kv] - delta + d_lse);
                let mut d_raw = d_score;
                if let Some(score_mod) = &spec.score {
                    let program = score_mod.program();
                    let at = at(kv, raw[kv]);
                    d_raw = match position(program, &SCORE) {
                        None => zero,
                        seed => d_score * slope(program, &at, seed, &mut values)?,
                    };
                    for LearnedLoad { node, buffer } in &learned {
                        let slope = slope(program, &at, Some(*node), &mut values)?;
                        let load = &program.graph().nodes()[*node];
                        let (_, i) = element(program, load, &values)?;
                        captures.get_mut(buffer).expect("one for each learned buffer")[i] +=
                            d_score * slope;
                    }
                }
                let d_dot = round(d_raw * scale);
                for d in 0..dim {
                    dq[d] += d_dot * k[key(kv) * dim + d];
                    dk[key(kv) * dim + d] += d_dot * q[d];
                }
            }
        }
    }
    let wide = |values: Vec<F>| values.into_iter().map(F::to_f64).collect::<Vec<_>>();
    let stored = |values: Vec<F>| values.into_iter().map(|x| round(x).to_f64()).collect();
    let forward = Forward { out: wide(out), lse: wide(lse), max_score: wide(max_score) };
    let gradients = Gradients {
        dq: stored(dq),
        dk: stored(dk),
        dv: stored(dv),
        d_sink: wide(d_sink),
        captures: captures.into_iter().map(|(name, values)| (name, wide(values))).collect(),
    };
    Ok((forward, gradients))
}

const SCORE: Node = Node::Leaf(Leaf::Score);

fn learned_loads(program: &Program) -> Vec<LearnedLoad> {
    let graph = program.graph();
    let name = |node: &Node| match node {
        Node::Load { buffer, .. } => {
            let buffer = &graph.buffers()[*buffer as usize];
            buffer.learned().then(|| buffer.name().to_owned())
        }
        _ => None,
    };
    let loads = graph.nodes().iter().enumerate();
    loads.filter_map(|(node, n)| name(n).map(|buffer| LearnedLoad { node, buffer })).collect()
}

fn position(program: &Program, node: &Node) -> Option<usize> {
    program.graph().nodes().iter().position(|n| n == node)
}

/// Derivative of the program's result with respect to the node `seed`.
fn slope<F: Real>(
    program: &Program,
    at: &Point<F>,
    seed: Option<usize>,
    values: &mut Vec<Value<F>>,
) -> Result<F, ReferenceError> {
    eval(program, at, seed, values)?;
    Ok(root(program, values).real().1)
}

fn root<F: Real>(program: &Program, values: &[Value<F>]) -> Value<F> {
    values[program.roots()[0].index()]
}

fn dot<F: Real>(x: &[F], y: &[F]) -> F {
    x.iter().zip(y).fold(F::of(0.0), |sum, (&x, &y)| sum + x * y)
}

/// `weight · x`, 0 for a weight of 0 whatever `x` is.
fn weighted<F: Real>(weight: F, x: F) -> F {
    if weight == F::of(0.0) { weight } else { weight * x }
}

/// The larger of two; NaN when either is.
fn larger<F: Real>(x: F, y: F) -> F {
    if x >= y {
        x
    } else if y > x {
        y
    } else {
        x + y
    }
}

fn dense<F: Real>(tensor: &TensorRef<'_>) -> Vec<F> {
    row_major(tensor.shape(), |i| tensor.get_f64(i)).into_iter().map(F::of).collect()
}

fn row_major<const N: usize>(shape: [usize; N], get: impl Fn([usize; N]) -> f64) -> Vec<f64> {
    let mut index = [0; N];
    let total = shape.iter().product();
    let mut values = Vec::with_capacity(total);
    while values.len() < total {
        values.push(get(index));
        for axis in (0..N).rev() {
            index[axis] += 1;
            if index[axis] < shape[axis] {
                break;
            }
            index[axis] = 0;
        }
    }
    values
}
