//! Runs cases.

use foveate_mods::{AnyBuffer, ElementType};
use foveate_problem::{BackwardArgs, CaptureGrad, Dims, ForwardArgs, Operands, Sequence, Spec};
use foveate_reference::{Forward, Gradients, NonFinite, Rule, Upstream, backward, forward, low};
use foveate_tensor::{
    DType, Data, Layout, Slice, SliceMut, Tensor, TensorError, TensorMut, TensorRef,
};
use rayon::prelude::*;

use crate::backend::{ACCUMULATE_START, Backend, Prepared};
use crate::case::Case;
use crate::compare::{Mismatches, rounded_to_f16, row_major};
use crate::error::CaseError;
use crate::inputs::{Inputs, fill};
use crate::report::{Outcome, Report, Row};
use crate::storage::Storage;

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

/// Runs one case on each of `backends`, telling how each did as soon as it is done.
///
/// # Errors
/// Those of [`check`].
pub fn check_each(
    case: &Case,
    backends: &[Box<dyn Backend>],
    mut tell: impl FnMut(Row),
) -> Result<(), CaseError> {
    let inputs = Inputs::draw(case)?;
    let problem = Problem::of(case, &inputs)?;
    for backend in backends {
        let outcome = match backend.prepare(&inputs.program, &problem.dims, inputs.dtype) {
            Err(reason) => Outcome::Declined(reason),
            Ok(plan) => match problem.run(&*plan) {
                Err(reason) if backend.declines(&reason) => Outcome::Declined(reason),
                Err(reason) => Outcome::Failed(vec![reason]),
                Ok(lines) if lines.is_empty() => Outcome::Passed,
                Ok(lines) => Outcome::Failed(lines),
            },
        };
        let backend = backend.name().into();
        tell(Row { case: case.name.clone(), seed: case.seed(), backend, outcome });
    }
    Ok(())
}

/// What the oracle (gold) and the plain implementation in the operands' precision (low) give.
struct Answers {
    gold: Forward,
    low: Forward,
    /// `lse` and `max_score` of the plain implementation.
    statistics: Forward,
    /// Gold and low, where there is a backward.
    gradients: Option<[Gradients; 2]>,
}

impl Answers {
    fn of(
        spec: &Spec,
        operands: &Operands<'_>,
        upstream: &Upstream<'_>,
    ) -> Result<Self, foveate_reference::ReferenceError> {
        Ok(Self {
            gold: forward(spec, operands)?,
            low: low::forward(spec, operands)?,
            statistics: low::statistics(spec, operands)?,
            gradients: match operands.pages.is_some() || operands.q.dtype() == DType::F8E4M3 {
                true => None,
                false => {
                    let gold = backward(spec, operands, upstream)?;
                    let low = low::backward_drawn(spec, operands, upstream, &gold)?;
                    Some([gold, low])
                }
            },
        })
    }
}

/// A case with its data and its answers.
struct Problem<'a> {
    case: &'a Case,
    storage: &'a Storage,
    spec: &'a Spec,
    operands: Operands<'a>,
    dims: Dims,
    upstream: Upstream<'a>,
    answers: Answers,
    tanh_like: bool,
    /// Learned buffers, and the dtype that their gradients come in: their own.
    learned: Vec<(String, DType)>,
}

/// What a forward pass wrote, as the backward pass reads it.
struct Saved {
    out: Data,
    lse: Tensor<3>,
}

impl<'a> Problem<'a> {
    fn of(case: &'a Case, inputs: &'a Inputs<'_>) -> Result<Self, CaseError> {
        let fail = |e: &dyn std::fmt::Display| CaseError::new(&case.name, e);
        let (operands, upstream) = (inputs.operands()?, inputs.upstream()?);
        let dims = Dims::of(&operands).map_err(|e| fail(&e))?;
        let answers = Answers::of(&inputs.program.local, &operands, &upstream);
        let answers = answers.map_err(|e| fail(&e))?;
        let of = |b: &AnyBuffer| match b.element() {
            ElementType::F16 => DType::F16,
            ElementType::BF16 => DType::BF16,
            _ => DType::F32,
        };
        let learned = inputs.program.local.learned();
        let learned = learned.into_iter().map(|b| (b.name().to_owned(), of(b))).collect();
        let tanh_like = case.tanh_like || is_tanh_in_half(&inputs.program.local, inputs.dtype);
        let (storage, spec) = (&inputs.storage, &inputs.program.local);
        Ok(Self { case, storage, spec, operands, dims, upstream, answers, tanh_like, learned })
    }

    /// Both passes of a plan; a line for each result that is wrong.
    fn run(&self, plan: &dyn Prepared) -> Result<Vec<String>, String> {
        let rule = if self.tanh_like { Rule::TanhLike } else { Rule::Plain };
        let mut wrong = Mismatches::new(rule);
        let saved = self.forward(plan, &mut wrong)?;
        if let Some(answers) = &self.answers.gradients {
            self.backward(plan, &saved, answers, &mut wrong)?;
        }
        Ok(wrong.into_lines())
    }

    /// The forward pass that saves what the backward reads; and once more with `max_score`, for which a kernel may take
    /// another way to `out` and `lse`, too.
    fn forward(&self, plan: &dyn Prepared, wrong: &mut Mismatches) -> Result<Saved, String> {
        let saved = self.forward_once(plan, None, wrong)?;
        let mut max_score = Tensor::filled(DType::F32, self.dims.row_shape(), f64::NAN);
        self.forward_once(plan, Some(&mut max_score), wrong)?;
        Ok(saved)
    }

    fn forward_once(
        &self,
        plan: &dyn Prepared,
        mut max_score: Option<&mut Tensor<3>>,
        wrong: &mut Mismatches,
    ) -> Result<Saved, String> {
        let dtype = self.operands.q.dtype();
        let (layout, size) = self.storage.out;
        let mut out = Data::filled(stored(dtype), size, f64::NAN);
        let mut lse = Tensor::filled(DType::F32, self.dims.row_shape(), f64::NAN);
        plan.forward(ForwardArgs {
            operands: self.operands,
            out: TensorMut::new(&mut out, layout).map_err(text)?,
            lse: lse.view_mut().map_err(text)?,
            max_score: max_score.as_mut().map(|m| m.view_mut()).transpose().map_err(text)?,
        })?;

        let Answers { gold, low, statistics, .. } = &self.answers;
        let beside = if max_score.is_some() { " beside max_score" } else { "" };
        wrong.outside(&format!("out{beside}"), &out, &[layout]);
        let view = TensorRef::new(&out, layout).map_err(text)?;
        let compared = [&gold.out[..], &low.out, &row_major(&view)];
        let placed = |place| {
            let placed = low::placed(self.spec, &self.operands, place);
            placed.expect("what has an answer has one at every place")
        };
        // Of f8e4m3 operands `low` divides by the sum last, too.
        let places = if dtype == DType::F8E4M3 { 1 } else { low::PLACES };
        let placed = (1..places).map(placed);
        wrong.compare_with(&format!("out{beside}"), dtype, NonFinite::Same, compared, placed);
        let coarse = self.tanh_like && dtype != DType::F32 && plan.approximates_tanh();
        let precision = if coarse { DType::F16 } else { DType::F32 };
        let mut compare = |name: &str, gold: &[f64], low: &[f64], ours: &Tensor<3>| {
            let rounded = coarse.then(|| rounded_to_f16(gold));
            let low = rounded.as_deref().unwrap_or(low);
            wrong.compare(name, precision, NonFinite::Same, [gold, low, &ours.to_f64()]);
        };
        compare(&format!("lse{beside}"), &gold.lse, &statistics.lse, &lse);
        if let Some(max_score) = max_score {
            compare("max_score", &gold.max_score, &statistics.max_score, max_score);
        }
        Ok(Saved { out, lse })
    }

    fn backward(
        &self,
        plan: &dyn Prepared,
        saved: &Saved,
        [gold, low]: &[Gradients; 2],
        wrong: &mut Mismatches,
    ) -> Result<(), String> {
        let Self { case, operands, upstream, .. } = self;
        let dtype = case.gradient_dtype().map_err(|e| e.to_string())?;
        let start = if case.accumulate { ACCUMULATE_START } else { f64::NAN };
        let (sizes, layouts) = self.gradient_storage();
        let mut grads = fill(dtype, &sizes, &layouts, self.covered(), |_, _| start);
        let mut d_sink = operands.sink.map(|s| Data::filled(s.dtype(), s.len(), start));
        // The gradient of a learned buffer comes in the buffer's own dtype.
        let captures = gold.captures.iter().map(|(name, x)| {
            let dtype = self.learned.iter().find(|(of, _)| of == name).map(|(_, dtype)| *dtype);
            (name.as_str(), Data::filled(dtype.unwrap_or(DType::F32), x.len(), start))
        });
        let mut captures: Vec<(&str, Data)> = captures.collect();
        let [dq, dk, dv] = self.destinations(&mut grads, &layouts).map_err(text)?;
        let d_captures = captures
            .iter_mut()
            .filter(|(name, _)| case.wants(name))
            .map(|(name, into)| CaptureGrad { name, into: into.into() });
        plan.backward(BackwardArgs {
            operands: *operands,
            out: TensorRef::new(&saved.out, self.storage.out.0).map_err(text)?,
            lse: saved.lse.view(),
            d_out: upstream.d_out,
            d_lse: upstream.d_lse,
            dq: Some(dq).filter(|_| case.wants("dq")),
            dk: Some(dk).filter(|_| case.wants("dk")),
            dv: Some(dv).filter(|_| case.wants("dv")),
            accumulate: case.accumulate,
            d_sink: d_sink.as_mut().map(SliceMut::from).filter(|_| case.wants("d_sink")),
            d_captures: d_captures.collect(),
        })?;

        let added = if case.accumulate { ACCUMULATE_START } else { 0.0 };
        let plus = |values: &[f64]| values.iter().map(|x| x + added).collect::<Vec<_>>();
        let wide = |values: &Data| {
            (0..values.len()).map(|i| Slice::from(values).get_f64(i)).collect::<Vec<_>>()
        };
        let mut compare = |name: &str, [gold, low, ours]: [&[f64]; 3], stored: DType| {
            let (gold, low) = (plus(gold), plus(low));
            // What is stored in 16 bits is rounded once there, whatever the operands are, and a sum with
            // what was there once more than the gradient itself.
            let (low, dtype) = match stored {
                DType::F32 => (low, dtype),
                stored => (wide(&Data::from_f64(stored, low)), stored),
            };
            wrong.compare(name, dtype, case.nonfinite(), [&gold, &low, ours]);
        };
        let summed = if case.accumulate { dtype } else { DType::F32 };
        let dense =
            [("dq", &gold.dq, &low.dq), ("dk", &gold.dk, &low.dk), ("dv", &gold.dv, &low.dv)];
        for ((name, gold, low), (buffer, layout)) in dense.into_iter().zip(layouts) {
            let ours = row_major(&TensorRef::new(&grads[buffer], layout).map_err(text)?);
            match case.wants(name) {
                true => compare(name, [gold, low, &ours], summed),
                false if ours.iter().all(|&x| x == start || x.is_nan() && start.is_nan()) => {}
                false => return Err(format!("{name} was written, which nobody asked for")),
            }
        }
        if let Some(d_sink) = d_sink.as_ref().filter(|_| case.wants("d_sink")) {
            compare("d_sink", [&gold.d_sink, &low.d_sink, &wide(d_sink)], d_sink.dtype());
        }
        for (name, ours) in captures.iter().filter(|(name, _)| case.wants(name)) {
            let compared = [&gold.captures[*name][..], &low.captures[*name], &wide(ours)];
            compare(&format!("gradient of `{name}`"), compared, ours.dtype());
        }
        for (buffer, data) in grads.iter().enumerate() {
            let inside = layouts.iter().filter(|(b, _)| *b == buffer).map(|(_, l)| *l);
            wrong.outside("a gradient's buffer", data, &inside.collect::<Vec<_>>());
        }
        Ok(())
    }

    /// Whether a row of dq (operand 0), dk or dv is one of a sequence: `(operand, batch, row)`.
    fn covered(&self) -> impl Fn(usize, usize, usize) -> bool {
        let sequences = self.dims.sequences(self.operands.varlen);
        move |operand, _, row| {
            sequences.iter().any(|s: &Sequence| match operand {
                0 => (s.q_start..s.q_start + s.q_len).contains(&row),
                _ => (s.k_start..s.k_start + s.k_len).contains(&row),
            })
        }
    }

    /// Buffers and layouts of dq, dk, dv: those of q, k, v, dense where these repeat a head.
    fn gradient_storage(&self) -> (Vec<usize>, [(usize, Layout); 3]) {
        let mut sizes = self.storage.sizes.clone();
        let mut layouts = self.storage.operands;
        if self.storage.dense_gradients {
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
    ) -> Result<[TensorMut<'d>; 3], TensorError> {
        if let Some(packed) = &self.storage.packed {
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

/// The dtype of out for operands of `dtype`.
fn stored(dtype: DType) -> DType {
    if dtype == DType::F8E4M3 { DType::BF16 } else { dtype }
}

/// Whether a score of 16-bit operands goes through a tanh, which a GPU takes from the hardware. The
/// corpus says so of its cases in 16 bits; those in f32 may be run in 16.
fn is_tanh_in_half(spec: &Spec, dtype: DType) -> bool {
    dtype != DType::F32 && spec.score.as_ref().is_some_and(|s| s.to_string().contains("tanh("))
}

fn text(e: TensorError) -> String {
    e.to_string()
}
