//! Runs cases.

use foveate_problem::{BackwardArgs, CaptureGrad, Dims, ForwardArgs, Operands, Pages, Sequence};
use foveate_reference::{
    Forward, Gradients, NotFinite, Rule, Tolerance, Upstream, backward, forward, low,
};
use foveate_tensor::{DType, Data, Layout, Packing, Tensor, TensorMut, TensorRef, indices};
use rayon::prelude::*;

use crate::backend::Backend;
use crate::case::{Case, CaseError};
use crate::data::{PageTable, Place, Random, fill, place};
use crate::given::{self, Given};
use crate::report::{Outcome, Report, Row};

/// What gradients that are accumulated start from.
pub(crate) const START: f64 = 0.5;

/// Runs every case on every backend, cases in parallel.
pub fn run(cases: &[Case], backends: &[Box<dyn Backend>]) -> Report {
    let rows = cases.par_iter().flat_map(|case| match check(case, backends) {
        Ok(rows) => rows,
        Err(error) => vec![Row {
            case: case.name.clone(),
            seed: case.seed(),
            backend: "harness".into(),
            outcome: Outcome::Failed(vec![error.to_string()]),
        }],
    });
    Report { rows: rows.collect() }
}

/// Runs one case on each of `backends`.
///
/// # Errors
/// When the case itself cannot be: a text that does not parse, sizes that do not fit, or no answer
/// from the oracle.
pub fn check(case: &Case, backends: &[Box<dyn Backend>]) -> Result<Vec<Row>, CaseError> {
    let mut rows = Vec::new();
    check_each(case, backends, |row| rows.push(row))?;
    Ok(rows)
}

/// The same, telling how each backend did as soon as it is done.
///
/// # Errors
/// Those of [`check`].
pub fn check_each(
    case: &Case,
    backends: &[Box<dyn Backend>],
    mut tell: impl FnMut(Row),
) -> Result<(), CaseError> {
    let fail = |e: &dyn std::fmt::Display| CaseError::new(&case.name, e);
    let mut random = Random::new(case.seed());
    let question = case.question(&mut random)?;
    let spec = &question.local;
    let dtype = case.dtype()?;
    let place = place(case)?;

    let packing = match &case.varlen {
        None => None,
        Some(lengths) => Some(Packing::new(&lengths.q, &lengths.k).map_err(|e| fail(&e))?),
    };
    let rows = case.len.map(|n| n + case.tail);
    let varlen = packing.as_ref().map(|p| p.varlen(rows[0], rows[1])).transpose();
    let varlen = varlen.map_err(|e| fail(&e))?;
    let used = |operand: usize, entry: usize, row: usize| match (&packing, &place.pages) {
        (Some(p), _) => row < if operand == 0 { p.rows_q() } else { p.rows_k() },
        (None, Some(pages)) if operand > 0 => row < pages.used[entry],
        (None, _) => true,
    };
    check_given(case, &place)?;
    let magnitude = case.magnitude.unwrap_or(1.0);
    let data = fill(dtype, &place.sizes, &place.operands, used, |operand, index| {
        let x = random.normal() * magnitude;
        let [entry, h, row, d] = index;
        let key = |pages: &PageTable| pages.key(entry, row, place.operands[1].1.shape[2]);
        let [b, s] = match place.pages.as_ref().filter(|_| operand > 0) {
            Some(pages) => key(pages).expect("a row in use is a key's"),
            None => [entry, row],
        };
        let operand = [given::Operand::Q, given::Operand::K, given::Operand::V][operand];
        Given::find(&case.set, operand, [b, h, s, d]).unwrap_or(x)
    });
    let view = |i: usize| {
        let (buffer, layout) = place.operands[i];
        TensorRef::new((&data[buffer]).into(), layout).map_err(|e| fail(&e))
    };
    let sink = case.sinks(&mut random);
    let pages = place.pages.as_ref().map(|p| Pages::new(&p.table, &p.lengths)).transpose();
    let pages = pages.map_err(|e| fail(&e))?;
    let operands =
        Operands { q: view(0)?, k: view(1)?, v: view(2)?, sink: sink.as_deref(), varlen, pages };
    let dims = Dims::of(&operands).map_err(|e| fail(&e))?;
    let d_out = fill(dtype, &[place.out.1], &[(0, place.out.0)], used, |_, index| {
        let x = random.normal();
        Given::find(&case.set, given::Operand::DOut, index).unwrap_or(x)
    })
    .remove(0);
    let d_out = TensorRef::new((&d_out).into(), place.out.0).map_err(|e| fail(&e))?;
    let rows = Layout::contiguous(dims.row_shape());
    let d_lse: Option<Vec<f32>> =
        case.d_lse.then(|| (0..rows.elems()).map(|_| random.normal() as f32).collect());
    let d_lse = d_lse.as_deref().map(|v| TensorRef::f32(v, rows)).transpose();
    let upstream = Upstream { d_out, d_lse: d_lse.map_err(|e| fail(&e))? };

    let problem = Problem {
        case,
        place: &place,
        operands,
        dims,
        upstream,
        gold: forward(spec, &operands).map_err(|e| fail(&e))?,
        low: low::forward(spec, &operands).map_err(|e| fail(&e))?,
        gradients: match pages {
            Some(_) => None,
            None => Some([
                backward(spec, &operands, &upstream).map_err(|e| fail(&e))?,
                low::backward(spec, &operands, &upstream).map_err(|e| fail(&e))?,
            ]),
        },
        statistics: low::statistics(spec, &operands).map_err(|e| fail(&e))?,
    };
    let row = |backend: &dyn Backend| {
        let outcome = match backend.prepare(&question, &dims, dtype) {
            Err(reason) => Outcome::Declined(reason),
            Ok(plan) => match problem.run(&*plan) {
                Err(reason) => Outcome::Failed(vec![reason]),
                Ok(lines) if lines.is_empty() => Outcome::Passed,
                Ok(lines) => Outcome::Failed(lines),
            },
        };
        Row { case: case.name.clone(), seed: case.seed(), backend: backend.name().into(), outcome }
    };
    backends.iter().for_each(|backend| tell(row(&**backend)));
    Ok(())
}

/// That the numbers a case gives have a place in its operands.
fn check_given(case: &Case, place: &Place) -> Result<(), CaseError> {
    for given in &case.set {
        let mut shape = match given.operand {
            given::Operand::Q => place.operands[0].1.shape,
            given::Operand::K => place.operands[1].1.shape,
            given::Operand::V => place.operands[2].1.shape,
            given::Operand::DOut => place.out.0.shape,
        };
        if place.pages.is_some() && matches!(given.operand, given::Operand::K | given::Operand::V) {
            (shape[0], shape[2]) = (case.batch, case.len[1]);
        }
        given.check(&case.name, shape)?;
    }
    Ok(())
}

/// A case with its data and the answers.
struct Problem<'a> {
    case: &'a Case,
    place: &'a Place,
    operands: Operands<'a>,
    dims: Dims,
    upstream: Upstream<'a>,
    gold: Forward,
    low: Forward,
    /// Gold and low, where there is a backward.
    gradients: Option<[Gradients; 2]>,
    statistics: Forward,
}

impl Problem<'_> {
    /// Both passes of a plan; a line for each result that is wrong.
    fn run(&self, plan: &dyn crate::Prepared) -> Result<Vec<String>, String> {
        let Problem { case, dims, operands, upstream, gold, low, .. } = self;
        let dtype = operands.q.dtype();
        let gradients = case.gradient_dtype().map_err(|e| e.to_string())?;
        let text = |e: foveate_tensor::TensorError| e.to_string();

        let (layout, size) = self.place.out;
        let mut out = Data::filled(dtype, size, f64::NAN);
        let [mut lse, mut max_score] =
            [(); 2].map(|()| Tensor::<3>::filled(DType::F32, dims.row_shape(), f64::NAN));
        plan.forward(ForwardArgs {
            operands: *operands,
            out: TensorMut::new(&mut out, layout).map_err(text)?,
            lse: lse.view_mut().map_err(text)?,
            max_score: Some(max_score.view_mut().map_err(text)?),
        })?;

        let (rule, not_finite) = (case.rule(), NotFinite::Same);
        let mut wrong = Wrong { rule, not_finite, lines: Vec::new() };
        wrong.strays("out", &out, &[layout]);
        let view = TensorRef::new((&out).into(), layout).map_err(text)?;
        wrong.compare("out", dtype, &gold.out, &low.out, &row_major(&view));
        let statistics = &self.statistics;
        let coarse = case.tanh_like && dtype != DType::F32 && plan.approximates_tanh();
        let precision = if coarse { DType::F16 } else { DType::F32 };
        let mut compare = |name, gold: &[f64], low: &[f64], ours: &[f64]| {
            let low = if coarse { rounded(gold) } else { low.to_vec() };
            wrong.compare(name, precision, gold, &low, ours);
        };
        compare("lse", &gold.lse, &statistics.lse, &lse.to_f64());
        compare("max_score", &gold.max_score, &statistics.max_score, &max_score.to_f64());

        let Some([gold, low]) = &self.gradients else { return Ok(wrong.lines) };
        let start = if case.accumulate { START } else { f64::NAN };
        let (sizes, layouts) = self.gradient_places();
        let covered = |operand: usize, _: usize, row: usize| {
            let has = |s: &Sequence| match operand {
                0 => (s.q_start..s.q_start + s.q_len).contains(&row),
                _ => (s.k_start..s.k_start + s.k_len).contains(&row),
            };
            dims.sequences(operands.varlen).iter().any(has)
        };
        let mut grads = fill(gradients, &sizes, &layouts, covered, |_, _| start);
        let mut d_sink = operands.sink.map(|s| vec![start as f32; s.len()]);
        let mut captures: Vec<(&str, Vec<f32>)> = gold
            .captures
            .iter()
            .map(|(name, values)| (name.as_str(), vec![start as f32; values.len()]))
            .collect();
        {
            let [dq, dk, dv] = self.destinations(&mut grads, &layouts).map_err(text)?;
            plan.backward(BackwardArgs {
                operands: *operands,
                out: view,
                lse: lse.view(),
                d_out: upstream.d_out,
                d_lse: upstream.d_lse,
                dq,
                dk,
                dv,
                accumulate: case.accumulate,
                d_sink: d_sink.as_deref_mut(),
                d_captures: captures
                    .iter_mut()
                    .map(|(name, into)| CaptureGrad { name, into })
                    .collect(),
            })?;
        }
        wrong.not_finite = case.not_finite();
        let start = if case.accumulate { START } else { 0.0 };
        let started = |values: &[f64]| values.iter().map(|x| x + start).collect::<Vec<_>>();
        let mut compare = |name: &str, dtype, gold: &[f64], low: &[f64], ours: &[f64]| {
            wrong.compare(name, dtype, &started(gold), &started(low), ours);
        };
        let names = ["dq", "dk", "dv"];
        let golds = [&gold.dq, &gold.dk, &gold.dv];
        let lows = [&low.dq, &low.dk, &low.dv];
        for i in 0..3 {
            let (buffer, layout) = layouts[i];
            let ours = TensorRef::new((&grads[buffer]).into(), layout).map_err(text)?;
            compare(names[i], dtype, golds[i], lows[i], &row_major(&ours));
        }
        let wide = |values: &[f32]| values.iter().map(|&x| x.into()).collect::<Vec<f64>>();
        if let Some(d_sink) = &d_sink {
            compare("d_sink", dtype, &gold.d_sink, &low.d_sink, &wide(d_sink));
        }
        for (name, ours) in &captures {
            let (gold, low) = (&gold.captures[*name], &low.captures[*name]);
            compare(&format!("gradient of `{name}`"), dtype, gold, low, &wide(ours));
        }
        for (buffer, data) in grads.iter().enumerate() {
            let here = layouts.iter().filter(|(b, _)| *b == buffer).map(|(_, l)| *l);
            wrong.strays("a gradient's buffer", data, &here.collect::<Vec<_>>());
        }
        Ok(wrong.lines)
    }

    /// Buffers and layouts of dq, dk, dv: those of q, k, v, dense where these repeat a head.
    fn gradient_places(&self) -> (Vec<usize>, [(usize, Layout); 3]) {
        let mut sizes = self.place.sizes.clone();
        let mut layouts = self.place.operands;
        if self.place.dense_gradients {
            for (buffer, layout) in &mut layouts[1..] {
                *layout = Layout::contiguous(layout.shape);
                sizes[*buffer] = layout.elems();
            }
        }
        (sizes, layouts)
    }

    fn destinations<'d>(
        &self,
        grads: &'d mut [Data],
        layouts: &[(usize, Layout); 3],
    ) -> Result<[TensorMut<'d>; 3], foveate_tensor::TensorError> {
        if let Some(packed) = &self.place.packed {
            let parts = packed.views_mut(&mut grads[0])?;
            return Ok([parts.q, parts.k, parts.v]);
        }
        let [dq, dk, dv] = grads else { unreachable!("a buffer for each operand") };
        Ok([
            TensorMut::new(dq, layouts[0].1)?,
            TensorMut::new(dk, layouts[1].1)?,
            TensorMut::new(dv, layouts[2].1)?,
        ])
    }
}

struct Wrong {
    rule: Rule,
    not_finite: NotFinite,
    lines: Vec<String>,
}

impl Wrong {
    fn compare(&mut self, name: &str, dtype: DType, gold: &[f64], low: &[f64], ours: &[f64]) {
        let Self { rule, not_finite, .. } = *self;
        let found = Tolerance { dtype, rule, not_finite }.measure(gold, low, ours);
        if !found.passes() {
            self.lines.push(format!("{name}: {found}"));
        }
    }

    /// Notes elements outside `layouts` that are no longer NaN.
    fn strays(&mut self, name: &str, data: &Data, layouts: &[Layout]) {
        let mut inside = vec![false; data.len()];
        for layout in layouts {
            indices(layout.shape).for_each(|index| inside[layout.at(index)] = true);
        }
        let all = foveate_tensor::Slice::from(data);
        let stray = (0..data.len()).find(|&i| !inside[i] && !all.get_f64(i).is_nan());
        if let Some(at) = stray {
            self.lines.push(format!("{name}: element {at} lies outside the view and was written"));
        }
    }
}

/// Values rounded to f16.
fn rounded(values: &[f64]) -> Vec<f64> {
    values.iter().map(|&x| half::f16::from_f64(x).to_f64()).collect()
}

fn row_major(view: &TensorRef<'_>) -> Vec<f64> {
    indices(view.shape()).map(|index| view.get_f64(index)).collect()
}
