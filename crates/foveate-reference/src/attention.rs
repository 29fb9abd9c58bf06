//! Attention, one row at a time, in any precision.

use std::collections::BTreeMap;

use foveate_mods::ir::{Leaf, Node};
use foveate_mods::{MaskMod, Program};
use foveate_problem::{Dims, Operands, Pages, Scales, Sequence, Spec};
use foveate_tensor::{DType, TensorRef};

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

/// What an implementation rounds.
pub(crate) struct Rounding<'a, F> {
    /// `q·k`, its gradient, and `d_out·v`.
    pub dot: &'a dyn Fn(F) -> F,
    /// The probability of a key, that of the row's largest score given too, where it is a factor of v or
    /// d_out.
    pub weight: &'a dyn Fn(F, F) -> F,
    /// out and gradients.
    pub stored: &'a dyn Fn(F) -> F,
}

impl<F: Real> Rounding<'_, F> {
    /// Nothing.
    pub fn none() -> Self {
        Self { dot: &|x| x, weight: &|p, _| p, stored: &|x| x }
    }
}

/// Both passes. `rounding` is of what an eager program would store in the operands' dtype; without
/// `upstream` the gradients are empty.
pub(crate) fn run<F: Real>(
    spec: &Spec,
    operands: &Operands<'_>,
    rounding: &Rounding<'_, F>,
    upstream: Option<&Upstream<'_>>,
) -> Result<(Forward, Gradients), ReferenceError> {
    spec.check()?;
    spec.check_on_host()?;
    let dims = Dims::of(operands)?;
    if operands.pages.is_some() && upstream.is_some() {
        return Err(Pages::no_gradients().into());
    }
    if operands.q.dtype() == DType::F8E4M3 && upstream.is_some() {
        return Err(Scales::no_gradients().into());
    }
    let problem = Problem::new(spec, operands, dims, rounding);
    let upstream = upstream.map(DenseUpstream::of);
    let mut results = Results::untouched(&problem);
    let mut values = Vec::new();
    let sequences = operands.sequences(&dims);
    sequences.iter().for_each(|sequence| results.clear_keys(&dims, sequence));
    for sequence in &sequences {
        for (h, q) in (0..dims.heads_q).flat_map(|h| (0..sequence.q_len).map(move |q| (h, q))) {
            let row = Row::new(&dims, sequence, h, q);
            let scores = problem.scores(&row, &mut values)?;
            let softmax = problem.softmax(&row, &scores);
            results.forward(&problem, &row, &scores, &softmax);
            if let Some(upstream) = &upstream {
                results.backward(&problem, &row, &scores, &softmax, upstream, &mut values)?;
            }
        }
    }
    Ok(results.stored(rounding.stored))
}

/// What is read, widened to dense row-major arrays.
struct Problem<'a, F> {
    spec: &'a Spec,
    operands: &'a Operands<'a>,
    dims: Dims,
    rounding: &'a Rounding<'a, F>,
    scale: F,
    /// `1/(1-p)` of the dropout.
    kept_scale: F,
    learned: Vec<LearnedLoad>,
    q: Vec<F>,
    k: Vec<F>,
    v: Vec<F>,
}

/// What the backward pass starts from, in the same form.
struct DenseUpstream<F> {
    d_out: Vec<F>,
    d_lse: Option<Vec<f64>>,
}

/// One query of one head.
struct Row<'a> {
    sequence: &'a Sequence,
    h: usize,
    h_kv: usize,
    /// Its position in the sequence.
    q: usize,
    /// Its index among the rows of q, out and lse.
    at: usize,
}

/// The scores of a row, one for each key.
struct Scores<F> {
    /// `q·k` times the scale; 0 under the mask.
    raw: Vec<F>,
    /// After the score's program; `-∞` under the mask.
    score: Vec<F>,
    /// What dropout multiplies a probability with.
    factor: Vec<F>,
}

/// The softmax of a row.
struct Softmax<F> {
    p: Vec<F>,
    /// The sink's probability.
    p_sink: F,
    /// That of the largest score.
    p_max: F,
    max: F,
    lse: F,
}

impl<F: Real> DenseUpstream<F> {
    fn of(upstream: &Upstream<'_>) -> Self {
        let rows = |t: &TensorRef<'_, 3>| row_major(t.shape(), |i| t.get_f64(i));
        Self { d_out: dense(&upstream.d_out), d_lse: upstream.d_lse.as_ref().map(rows) }
    }
}

impl<'a> Row<'a> {
    fn new(dims: &Dims, sequence: &'a Sequence, h: usize, q: usize) -> Self {
        let at = (sequence.q_batch * dims.heads_q + h) * dims.len_q + sequence.q_start + q;
        Self { sequence, h, h_kv: h / dims.group(), q, at }
    }

    /// Where mods are evaluated.
    fn point<F>(&self, kv: usize, score: F) -> Point<F> {
        Point {
            b: self.sequence.b as i32,
            h: self.h as i32,
            h_kv: self.h_kv as i32,
            q: self.q as i32,
            kv: kv as i32,
            q_len: self.sequence.q_len as i32,
            kv_len: self.sequence.k_len as i32,
            score,
        }
    }
}

impl<'a, F: Real> Problem<'a, F> {
    fn new(
        spec: &'a Spec,
        operands: &'a Operands<'a>,
        dims: Dims,
        rounding: &'a Rounding<'a, F>,
    ) -> Self {
        let scale = spec.scale.map_or(1.0 / (dims.dim as f64).sqrt(), f64::from);
        let kept_scale = spec.dropout.as_ref().map_or(1.0, |d| 1.0 / (1.0 - f64::from(d.p())));
        Self {
            spec,
            operands,
            dims,
            rounding,
            scale: F::of(scale),
            kept_scale: F::of(kept_scale),
            learned: spec.score.as_ref().map_or(Vec::new(), |s| learned_loads(s.program())),
            q: dense(&operands.q),
            k: dense(&operands.k),
            v: dense(&operands.v),
        }
    }

    /// What the product of a row with a key is multiplied by beside the scale, and what that key's value is.
    fn scales(&self, row: &Row<'_>, kv: usize) -> [F; 2] {
        let Some(scales) = &self.operands.scales else { return [F::of(1.0); 2] };
        let b = row.sequence.b;
        let of_query = scales.of_query(&self.dims, [b, row.h, row.q]);
        let [of_key, of_value] = scales.of_key(&self.dims, [b, row.h_kv, kv]);
        [F::of(f64::from(of_query) * f64::from(of_key)), F::of(of_value.into())]
    }

    fn query(&self, row: &Row<'_>) -> &[F] {
        &self.q[row.at * self.dims.dim..][..self.dims.dim]
    }

    /// The index of a key among the rows of k and v.
    fn key(&self, row: &Row<'_>, kv: usize) -> usize {
        let [entry, at] = self.operands.locate_key(row.sequence.k_batch, row.sequence.k_start + kv);
        (entry * self.dims.heads_kv + row.h_kv) * self.operands.k.shape()[2] + at
    }

    fn scores(
        &self,
        row: &Row<'_>,
        values: &mut Vec<Value<F>>,
    ) -> Result<Scores<F>, ReferenceError> {
        let (zero, keys) = (F::of(0.0), row.sequence.k_len);
        let mut scores = Scores {
            raw: vec![zero; keys],
            score: vec![F::of(f64::NEG_INFINITY); keys],
            factor: vec![self.kept_scale; keys],
        };
        for kv in 0..keys {
            let mut holds = |mask: &MaskMod| {
                eval(mask.program(), &row.point(kv, zero), None, values)?;
                Ok::<_, ReferenceError>(root(mask.program(), values).bool())
            };
            if let Some(mask) = &self.spec.mask
                && !holds(mask)?
            {
                continue;
            }
            if let Some(dropout) = &self.spec.dropout
                && !holds(dropout.keep_mask())?
            {
                scores.factor[kv] = zero;
            }
            let dot = dot(self.query(row), &self.k[self.key(row, kv) * self.dims.dim..]);
            let raw = (self.rounding.dot)(dot) * self.scale * self.scales(row, kv)[0];
            (scores.raw[kv], scores.score[kv]) = (raw, raw);
            if let Some(score_mod) = &self.spec.score {
                eval(score_mod.program(), &row.point(kv, raw), None, values)?;
                scores.score[kv] = root(score_mod.program(), values).real().0;
            }
        }
        Ok(scores)
    }

    fn softmax(&self, row: &Row<'_>, scores: &Scores<F>) -> Softmax<F> {
        let (zero, empty) = (F::of(0.0), F::of(f64::NEG_INFINITY));
        let sink = self.operands.sink.map_or(empty, |s| F::of(s.get_f64(row.h)));
        let max = scores.score.iter().copied().fold(empty, larger);
        let shift = larger(max, sink);
        let weight = |s: F| if s == empty { zero } else { (s - shift).apply(Function::Exp) };
        let weights = scores.score.iter().map(|&s| weight(s));
        let denominator = weights.clone().fold(weight(sink), |x, y| x + y);
        let share = |w: F| if w == zero { zero } else { w / denominator };
        Softmax {
            p: weights.map(share).collect(),
            p_sink: share(weight(sink)),
            p_max: share(weight(max)),
            max,
            lse: if shift == empty { empty } else { shift + denominator.apply(Function::Ln) },
        }
    }

    /// The probability of a key after dropout, as an eager program stores it.
    fn dropped(&self, scores: &Scores<F>, softmax: &Softmax<F>, kv: usize) -> F {
        let largest = softmax.p_max * self.kept_scale;
        (self.rounding.weight)(softmax.p[kv] * scores.factor[kv], largest)
    }
}

/// What both passes compute, row-major; NaN where nothing was written.
struct Results<F> {
    out: Vec<F>,
    lse: Vec<F>,
    max_score: Vec<F>,
    dq: Vec<F>,
    dk: Vec<F>,
    dv: Vec<F>,
    d_sink: Vec<F>,
    captures: BTreeMap<String, Vec<F>>,
}

impl<F: Real> Results<F> {
    fn untouched(problem: &Problem<'_, F>) -> Self {
        let (dims, zero) = (problem.dims, F::of(0.0));
        let untouched = |shape: &[usize]| vec![F::of(f64::NAN); shape.iter().product()];
        let learned = problem.spec.learned().into_iter();
        Self {
            out: untouched(&dims.out_shape()),
            lse: untouched(&dims.row_shape()),
            max_score: untouched(&dims.row_shape()),
            dq: untouched(&dims.q_shape()),
            dk: untouched(&dims.k_shape()),
            dv: untouched(&dims.v_shape()),
            d_sink: vec![zero; problem.operands.sink.map_or(0, |s| s.len())],
            captures: learned.map(|b| (b.name().to_owned(), vec![zero; b.elems()])).collect(),
        }
    }

    /// Starts the sums of a sequence's keys.
    fn clear_keys(&mut self, dims: &Dims, sequence: &Sequence) {
        for h_kv in 0..dims.heads_kv {
            let head = sequence.k_batch * dims.heads_kv + h_kv;
            let first = head * dims.len_k + sequence.k_start;
            let rows = first..first + sequence.k_len;
            self.dk[rows.start * dims.dim..rows.end * dims.dim].fill(F::of(0.0));
            self.dv[rows.start * dims.dim_v..rows.end * dims.dim_v].fill(F::of(0.0));
        }
    }

    fn forward(
        &mut self,
        problem: &Problem<'_, F>,
        row: &Row<'_>,
        scores: &Scores<F>,
        softmax: &Softmax<F>,
    ) {
        let dim_v = problem.dims.dim_v;
        (self.lse[row.at], self.max_score[row.at]) = (softmax.lse, softmax.max);
        let out = &mut self.out[row.at * dim_v..][..dim_v];
        out.fill(F::of(0.0));
        for kv in 0..row.sequence.k_len {
            let weight = problem.dropped(scores, softmax, kv);
            // 0 times whatever the value is.
            if weight != F::of(0.0) {
                let weight = weight * problem.scales(row, kv)[1];
                add_scaled(out, weight, &problem.v[problem.key(row, kv) * dim_v..]);
            }
        }
        out.iter_mut().for_each(|x| *x = (problem.rounding.stored)(*x));
    }

    fn backward(
        &mut self,
        problem: &Problem<'_, F>,
        row: &Row<'_>,
        scores: &Scores<F>,
        softmax: &Softmax<F>,
        upstream: &DenseUpstream<F>,
        values: &mut Vec<Value<F>>,
    ) -> Result<(), ReferenceError> {
        let Dims { dim, dim_v, .. } = problem.dims;
        let (zero, round) = (F::of(0.0), problem.rounding.dot);
        let d_out = &upstream.d_out[row.at * dim_v..][..dim_v];
        let d_lse = upstream.d_lse.as_ref().map_or(zero, |t| F::of(t[row.at]));
        // Σ p·dp by way of out, as programs that do not keep p have it. The sum runs backwards:
        // in the order of dp it would cancel exactly in a row with one key, and the plain
        // implementation would seem to need no tolerance there.
        let terms = d_out.iter().zip(&self.out[row.at * dim_v..][..dim_v]).rev();
        let delta = terms.fold(zero, |sum, (&d, &o)| sum + d * o);
        if problem.operands.sink.is_some() {
            self.d_sink[row.h] += softmax.p_sink * (d_lse - delta);
        }
        self.dq[row.at * dim..][..dim].fill(zero);
        for kv in (0..row.sequence.k_len).filter(|&kv| softmax.p[kv] != zero) {
            let key = problem.key(row, kv);
            let dropped = problem.dropped(scores, softmax, kv);
            add_scaled(&mut self.dv[key * dim_v..][..dim_v], dropped, d_out);
            let dp = weighted(scores.factor[kv], round(dot(d_out, &problem.v[key * dim_v..])));
            let d_score = softmax.p[kv] * (dp - delta + d_lse);
            let at = row.point(kv, scores.raw[kv]);
            let d_raw = self.through_score(problem, &at, d_score, values)?;
            let d_dot = round(d_raw * problem.scale);
            add_scaled(&mut self.dq[row.at * dim..][..dim], d_dot, &problem.k[key * dim..]);
            add_scaled(&mut self.dk[key * dim..][..dim], d_dot, problem.query(row));
        }
        Ok(())
    }

    /// The gradient of a score before its program from that after it, `d_score`; learned buffers get
    /// theirs.
    fn through_score(
        &mut self,
        problem: &Problem<'_, F>,
        at: &Point<F>,
        d_score: F,
        values: &mut Vec<Value<F>>,
    ) -> Result<F, ReferenceError> {
        let Some(score_mod) = &problem.spec.score else { return Ok(d_score) };
        let program = score_mod.program();
        let d_raw = match position(program, &SCORE) {
            None => F::of(0.0),
            seed => d_score * slope(program, at, seed, values)?,
        };
        for LearnedLoad { node, buffer } in &problem.learned {
            let slope = slope(program, at, Some(*node), values)?;
            let (of, index) = element(program, &program.graph().nodes()[*node], values)?;
            let i = index.iter().zip(of.shape()).fold(0, |at, (i, len)| at * len + i);
            let sums = self.captures.get_mut(buffer).expect("one for each learned buffer");
            sums[i] += d_score * slope;
        }
        Ok(d_raw)
    }

    /// In f64, gradients rounded to the dtype of the operands.
    fn stored(self, round: &dyn Fn(F) -> F) -> (Forward, Gradients) {
        let wide = |values: Vec<F>| values.into_iter().map(F::to_f64).collect::<Vec<_>>();
        let stored = |values: Vec<F>| values.into_iter().map(|x| round(x).to_f64()).collect();
        let captures = self.captures.into_iter().map(|(name, values)| (name, wide(values)));
        let gradients = Gradients {
            captures: captures.collect(),
            dq: stored(self.dq),
            dk: stored(self.dk),
            dv: stored(self.dv),
            d_sink: wide(self.d_sink),
        };
        let forward =
            Forward { out: wide(self.out), lse: wide(self.lse), max_score: wide(self.max_score) };
        (forward, gradients)
    }
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

/// Adds `x · y` to each of `sums`.
fn add_scaled<F: Real>(sums: &mut [F], x: F, y: &[F]) {
    sums.iter_mut().zip(y).for_each(|(sum, &y)| *sum += x * y);
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
