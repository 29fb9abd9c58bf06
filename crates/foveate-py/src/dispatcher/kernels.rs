//! The operators, on CPU and CUDA tensors: the device is that of the query.

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::layout::{Layout, Places, Where};
use super::made::Maker;
use super::mods::{self, Mod, Said, number};
use super::stack::{Arguments, Returned, Tensor};
use crate::capture::integers;
use crate::cuda::{self, memory};
use crate::dlpack::Place;
use crate::dtype::{Dtype, TorchDtype};
use crate::plan::{self, Function, Request};
use crate::tensor::{Borrowed, Held};

/// A call of an operator.
pub trait Task {
    /// Takes all arguments.
    fn take(arguments: &mut Arguments, layout: Layout) -> Self;

    /// The query, whose device is that of the call.
    fn query(&self) -> &Tensor;

    /// Computes the results.
    fn run(self, make: Maker<'_>) -> PyResult<Vec<Returned>>;
}

/// q, k and v with where they lie.
struct Operands {
    tensors: [Arc<Tensor>; 3],
    at: Where,
}

/// The arguments from `score` to `dropout_p`.
struct Mods {
    score: Said,
    mask: Said,
    lists: Vec<Arc<Tensor>>,
    tile: Vec<i64>,
    scale: f64,
    seed: Option<Arc<Tensor>>,
    dropout_p: f64,
}

/// `forward`, `varlen_forward` or `paged`.
pub struct Forward {
    operands: Operands,
    mods: Mods,
    max_scores: bool,
}

/// `backward` or `varlen_backward`.
pub struct Backward {
    operands: Operands,
    out: Arc<Tensor>,
    lse: Arc<Tensor>,
    d_out: Option<Arc<Tensor>>,
    d_lse: Option<Arc<Tensor>>,
    mods: Mods,
    needs: Vec<bool>,
    learned: Vec<i64>,
}

/// A plan, with what its error messages name.
struct Planned {
    plan: Plan,
    mods: [Option<Mod>; 2],
}

enum Plan {
    Cpu(plan::Plan),
    Cuda(cuda::Plan),
}

impl Operands {
    fn take(arguments: &mut Arguments, layout: Layout) -> Self {
        let tensors = [arguments.tensor(), arguments.tensor(), arguments.tensor()];
        Self { tensors, at: layout.take(arguments) }
    }
}

impl Mods {
    fn take(arguments: &mut Arguments) -> Self {
        Self {
            score: Said::take(arguments),
            mask: Said::take(arguments),
            lists: arguments.tensors(),
            tile: arguments.integers(),
            scale: arguments.float(),
            seed: arguments.optional_tensor(),
            dropout_p: arguments.float(),
        }
    }

    /// A plan for these operands; `captives` are the score's, of which the `learned` want a gradient.
    fn plan(
        &self,
        make: &Maker<'_>,
        (operands, at): (&[Borrowed; 3], &Where),
        captives: Vec<Held>,
        learned: &[usize],
        forward_only: bool,
    ) -> PyResult<Planned> {
        let [q, k, _] = operands;
        let length = |of: &Borrowed| of.shape.get(2).copied().unwrap_or(0);
        let mut masked = self.mask.captives(make.place)?;
        if self.mask.is_some() && !self.lists.is_empty() {
            let tile = [0, 1].map(|i| self.tile.get(i).map_or(0, |&n| n.max(0) as usize));
            masked.push(mods::table(make, &self.lists, tile, length(q), length(k))?);
        }
        let mods = [self.mask.read(true, masked, &[])?, self.score.read(false, captives, learned)?];
        let functions = mods
            .each_ref()
            .map(|made| made.as_ref().map(|made| Function::new(made.program(), made.captured())));
        let [mask, score] = functions;
        let plan = match make.place {
            Place::Cpu => {
                let mut threads = 1;
                // SAFETY: the function writes a number.
                unsafe { (make.shim.threads)(&mut threads) };
                let places = at.read(make.py, operands)?;
                let request = Request {
                    operands: operands.clone(),
                    mask,
                    score,
                    scale: Some(self.scale),
                    dropout: self.dropout()?,
                    offsets: match &places {
                        Places::Sequences(q, k) => Some((q.clone(), k.clone())),
                        _ => None,
                    },
                    pages: match &places {
                        Places::Pages([table, lengths]) => Some([&table[..], &lengths[..]]),
                        _ => None,
                    },
                    sink: None,
                    forward_only,
                    threads: threads as usize,
                };
                // SAFETY: the operator's arguments hold the tensors, and the GIL is held.
                Plan::Cpu(unsafe { request.plan()? })
            }
            Place::Cuda(device) => {
                let (varlen, pages) = at.there(make, operands)?;
                let request = cuda::Request {
                    device,
                    operands,
                    mask,
                    score,
                    scale: Some(self.scale),
                    dropout: self.dropout_there(make)?,
                    varlen,
                    pages,
                    sink: None,
                    backward: None,
                    deterministic: memory::deterministic(make.py)?,
                };
                Plan::Cuda(request.plan(make.py)?)
            }
        };
        Ok(Planned { plan, mods })
    }

    fn dropout(&self) -> PyResult<Option<(f32, u64)>> {
        let Some(seed) = &self.seed else { return Ok(None) };
        let seed = integers(&seed.borrowed()?.in_place(Place::Cpu, SEED)?);
        let seed = seed.filter(|of| of.len() == 1).and_then(|of| u64::try_from(of[0]).ok());
        Ok(Some((self.dropout_p as f32, seed.ok_or_else(no_seed)?)))
    }

    /// [`Self::dropout`], whose seed stays on the device: the two halves of the number.
    fn dropout_there(&self, make: &Maker<'_>) -> PyResult<Option<(f32, Held)>> {
        let Some(seed) = &self.seed else { return Ok(None) };
        let at = seed.borrowed()?;
        if at.dtype.floating() || at.elems() != 1 {
            return Err(no_seed());
        }
        let mut held = make.dense(seed, Dtype::I64, SEED)?;
        held.at.dtype = Dtype::I32;
        (held.at.shape, held.at.strides) = (vec![2], vec![1]);
        Ok(Some((self.dropout_p as f32, held)))
    }
}

/// What the seed is in errors.
const SEED: &str = "the seed of dropout";

fn no_seed() -> PyErr {
    PyValueError::new_err(format!("{SEED} must be one integer of at least 0"))
}

impl Planned {
    /// # Safety
    /// As for [`plan::Plan::run_forward`] and [`cuda::Plan::run_forward`].
    unsafe fn forward(
        &self,
        py: Python<'_>,
        operands: &[Borrowed; 3],
        out: &Borrowed,
        lse: &Borrowed,
        max_scores: Option<&Borrowed>,
    ) -> PyResult<()> {
        // SAFETY: the caller's promise.
        let done = unsafe {
            match &self.plan {
                Plan::Cpu(plan) => plan.run_forward(py, operands, out, Some(lse), max_scores),
                Plan::Cuda(plan) => plan.run_forward(py, operands, out, lse, max_scores),
            }
        };
        done.map_err(|error| self.named(py, error))
    }

    /// # Safety
    /// As for [`plan::Plan::run_backward`] and [`cuda::Plan::run_backward`].
    unsafe fn backward(&self, py: Python<'_>, of: &plan::Backward) -> PyResult<()> {
        // SAFETY: the caller's promise.
        let done = unsafe {
            match &self.plan {
                Plan::Cpu(plan) => plan.run_backward(py, of),
                Plan::Cuda(plan) => plan.run_backward(py, of),
            }
        };
        done.map_err(|error| self.named(py, error))
    }

    /// For each of the score's captured tensors, in the order that a backward has them, what `of` makes of its
    /// number.
    fn captured<T>(&self, of: impl Fn(Option<usize>) -> PyResult<T>) -> PyResult<Vec<T>> {
        let each = |name: &str| of(number(name, "s"));
        match &self.plan {
            Plan::Cpu(plan) => plan.captured().map(each).collect(),
            Plan::Cuda(plan) => plan.captured().map(each).collect(),
        }
    }

    fn named(&self, py: Python<'_>, error: PyErr) -> PyErr {
        self.mods.iter().flatten().fold(error, |error, of| of.named(py, error))
    }
}

impl Task for Forward {
    fn take(arguments: &mut Arguments, layout: Layout) -> Self {
        Self {
            operands: Operands::take(arguments, layout),
            mods: Mods::take(arguments),
            max_scores: arguments.boolean(),
        }
    }

    fn query(&self) -> &Tensor {
        &self.operands.tensors[0]
    }

    fn run(self, make: Maker<'_>) -> PyResult<Vec<Returned>> {
        let [query, key, value] = &self.operands.tensors;
        let q = query.borrowed()?;
        // Those of another dtype are converted to the query's.
        let float = |tensor: &Arc<Tensor>, what| -> PyResult<Arc<Tensor>> {
            match tensor.borrowed()?.dtype.floating() {
                true => make.converted(tensor, q.dtype, what),
                false => Ok(tensor.clone()),
            }
        };
        let (key, value) = (float(key, "k")?, float(value, "v")?);
        let on = |tensor: &Tensor, what| tensor.borrowed()?.in_place(make.place, what);
        let operands = [q, on(&key, "k")?, on(&value, "v")?];
        let captives = self.mods.score.captives(make.place)?;
        let planned = self.mods.plan(&make, (&operands, &self.operands.at), captives, &[], true)?;
        let [q, _, v] = &operands;
        let rows = &q.shape[..3];
        let out = make.in_order(q, &[rows, &v.shape[3..]].concat())?;
        let lse = make.empty(Dtype::F32, rows)?;
        let max_scores = make.empty(Dtype::F32, if self.max_scores { rows } else { &[0] })?;
        let into = [out.written()?, lse.written()?, max_scores.written()?];
        let [to_out, to_lse, to_max] = &into;
        let to_max = self.max_scores.then_some(to_max);
        // SAFETY: the tensors are held, and by torch until what its streams were given is done; the results
        // are new.
        unsafe { planned.forward(make.py, &operands, to_out, to_lse, to_max)? };
        Ok([out, lse, max_scores].map(Returned::Tensor).into())
    }
}

impl Task for Backward {
    fn take(arguments: &mut Arguments, layout: Layout) -> Self {
        Self {
            operands: Operands::take(arguments, layout),
            out: arguments.tensor(),
            lse: arguments.tensor(),
            d_out: arguments.optional_tensor(),
            d_lse: arguments.optional_tensor(),
            mods: Mods::take(arguments),
            needs: arguments.booleans(),
            learned: arguments.integers(),
        }
    }

    fn query(&self) -> &Tensor {
        &self.operands.tensors[0]
    }

    fn run(self, make: Maker<'_>) -> PyResult<Vec<Returned>> {
        let on = |tensor: &Tensor, what| tensor.borrowed()?.in_place(make.place, what);
        let [q, k, v] = &self.operands.tensors;
        let operands = [on(q, "q")?, on(k, "k")?, on(v, "v")?];
        let captures = &self.mods.score.captures;
        let mut captives = self.mods.score.captives(make.place)?;
        let learned = self.learned(captures.len())?;
        let mut destinations = Vec::with_capacity(learned.len());
        for &at in &learned {
            let Borrowed { dtype, shape, .. } = captures[at].borrowed()?;
            // Gradients are of float32 at most, and on a device always.
            if dtype == Dtype::F64 {
                captives[at] = make.dense(&captures[at], Dtype::F32, "a captured tensor")?;
            }
            let narrow = dtype != Dtype::F64 && make.place == Place::Cpu;
            let made = make.zeros(if narrow { dtype } else { Dtype::F32 }, &shape)?;
            destinations.push(made);
        }
        let planned =
            self.mods.plan(&make, (&operands, &self.operands.at), captives, &learned, false)?;
        let mut gradients = Vec::with_capacity(3);
        for (of, at) in operands.iter().zip(0..) {
            let wanted = self.needs.get(at).copied().unwrap_or(false);
            gradients.push(if wanted { Some(make.in_order(of, &of.shape)?) } else { None });
        }
        let out = on(&self.out, "out")?;
        let zero = match self.d_out {
            Some(_) => None,
            None => Some(make.zeros(out.dtype, &[1])?),
        };
        let written = |at: usize| gradients[at].as_ref().map(Tensor::written).transpose();
        let destination = |number: Option<usize>| {
            let at = learned.iter().position(|&at| number == Some(at));
            at.map(|at| destinations[at].written()).transpose()
        };
        let of = plan::Backward {
            d_out: match (&self.d_out, &zero) {
                (Some(d_out), _) => on(d_out, "the gradient of out")?,
                // All zeros lie in one place.
                (None, zero) => Borrowed {
                    strides: vec![0; out.shape.len()],
                    shape: out.shape.clone(),
                    ..zero.as_ref().expect("made above").borrowed()?
                },
            },
            d_lse: self.d_lse.as_ref().map(|d| on(d, "the gradient of lse")).transpose()?,
            lse: on(&self.lse, "lse")?,
            gradients: [written(0)?, written(1)?, written(2)?],
            captures: planned.captured(destination)?,
            d_sink: None,
            out,
            operands,
        };
        // SAFETY: as in the forward.
        unsafe { planned.backward(make.py, &of)? };
        let mut results = Vec::with_capacity(4);
        for (gradient, of) in gradients.into_iter().zip(&of.operands) {
            results.push(Returned::Tensor(match gradient {
                Some(gradient) => gradient,
                None => make.empty(of.dtype, &[0])?,
            }));
        }
        let captured = learned.iter().zip(destinations).map(|(&at, made)| {
            let dtype = captures[at].borrowed()?.dtype;
            if made.borrowed()?.dtype == dtype { Ok(made) } else { make.copied(&made, dtype) }
        });
        results.push(Returned::Tensors(captured.collect::<PyResult<_>>()?));
        Ok(results)
    }
}

impl Backward {
    /// The numbers of captured tensors that want a gradient.
    fn learned(&self, captures: usize) -> PyResult<Vec<usize>> {
        let known = |&at: &i64| usize::try_from(at).ok().filter(|&at| at < captures);
        self.learned.iter().map(known).collect::<Option<_>>().ok_or_else(|| {
            let asked = &self.learned;
            PyValueError::new_err(format!(
                "there are {captures} captured tensors, and not all of {asked:?}"
            ))
        })
    }
}
