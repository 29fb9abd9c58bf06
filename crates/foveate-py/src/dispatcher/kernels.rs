//! The operators: what `_forward` and `_backward` of `python/foveate/_ops.py` are on CUDA tensors.

use std::ptr;
use std::sync::Arc;

use half::{bf16, f16};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::layout::{Layout, Places, Where, integers};
use super::mods::{self, Captive, Mod, Said, number};
use super::shim::Shim;
use super::stack::{Arguments, Returned, Tensor};
use crate::capture;
use crate::dlpack::Place;
use crate::dtype::{Dtype, TorchDtype};
use crate::plan::{self, Function, Plan, Request};
use crate::tensor::{Borrowed, row_major};

/// A call of an operator.
pub trait Task {
    /// Takes all arguments.
    fn take(arguments: &mut Arguments, layout: Layout) -> Self;

    /// Computes the results.
    fn run(self, py: Python<'_>, shim: &'static Shim) -> PyResult<Vec<Returned>>;
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

/// A plan, with what its error messages name and where its sequences end.
struct Planned {
    plan: Plan,
    mods: [Option<Mod>; 2],
    /// The rows of queries and of keys that belong to a sequence, where there are such.
    ends: Option<[usize; 2]>,
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
        py: Python<'_>,
        shim: &Shim,
        (operands, at): (&[Borrowed; 3], &Where),
        captives: Vec<Captive>,
        learned: &[usize],
        forward_only: bool,
    ) -> PyResult<Planned> {
        let [q, k, _] = operands;
        let length = |of: &Borrowed| of.shape.get(2).copied().unwrap_or(0);
        let mut masked = self.mask.captives()?;
        if self.mask.is_some() && !self.lists.is_empty() {
            let tile = [0, 1].map(|i| self.tile.get(i).map_or(0, |&n| n.max(0) as usize));
            masked.push(mods::table(&self.lists, tile, length(q), length(k))?);
        }
        let mods = [self.mask.read(true, masked, &[])?, self.score.read(false, captives, learned)?];
        let places = at.read(py, operands)?;
        let functions = mods
            .each_ref()
            .map(|made| made.as_ref().map(|made| Function::new(made.program(), made.captured())));
        let [mask, score] = functions;
        let mut threads = 1;
        // SAFETY: the function writes a number.
        unsafe { (shim.threads)(&mut threads) };
        let ends = match &places {
            Places::Sequences(q, k) => Some([q, k].map(|of| of[of.len() - 1] as usize)),
            _ => None,
        };
        let pages = match &places {
            Places::Pages([table, lengths]) => Some([&table[..], &lengths[..]]),
            _ => None,
        };
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
            pages,
            sink: None,
            forward_only,
            threads: threads as usize,
        };
        // SAFETY: the operator's arguments hold the tensors, and the GIL is held.
        let plan = unsafe { request.plan()? };
        Ok(Planned { plan, mods, ends })
    }

    fn dropout(&self) -> PyResult<Option<(f32, u64)>> {
        let Some(seed) = &self.seed else { return Ok(None) };
        let seed = integers(&seed.borrowed()?).filter(|of| of.len() == 1);
        let seed = seed.and_then(|of| u64::try_from(of[0]).ok());
        let wrong =
            || PyValueError::new_err("the seed of dropout must be one integer of at least 0");
        Ok(Some((self.dropout_p as f32, seed.ok_or_else(wrong)?)))
    }
}

impl Planned {
    fn named(&self, py: Python<'_>, error: PyErr) -> PyErr {
        self.mods.iter().flatten().fold(error, |error, of| of.named(py, error))
    }

    /// Sets rows of a new tensor `[1, H, rows, ...]` past the last sequence of queries or keys to `value`,
    /// bytes of an element: nothing is computed there.
    fn clear(&self, side: usize, of: &Borrowed, value: &[u8]) {
        let Some(end) = self.ends.map(|ends| ends[side]) else { return };
        let (heads, rows) = (of.shape[1], of.shape[2]);
        let wide = of.shape.get(3).copied().unwrap_or(1);
        for (head, row) in (0..heads).flat_map(|head| (end..rows).map(move |row| (head, row))) {
            let first = head * of.strides[1] + row * of.strides[2];
            for at in (0..wide).map(|at| first + at) {
                let bytes = of.address + at * of.dtype.bytes();
                // SAFETY: the element is one of the tensor's, whose last axis is contiguous and which
                // nobody else knows of; `value` has its bytes.
                unsafe { ptr::copy_nonoverlapping(value.as_ptr(), bytes as *mut u8, value.len()) };
            }
        }
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

    fn run(self, py: Python<'_>, shim: &'static Shim) -> PyResult<Vec<Returned>> {
        let [query, key, value] = &self.operands.tensors;
        let q = query.borrowed()?;
        // Those of another dtype are converted to the query's.
        let (key, value) = (same_dtype(shim, key, q.dtype)?, same_dtype(shim, value, q.dtype)?);
        let operands = [q, key.borrowed()?, value.borrowed()?];
        let at = (&operands, &self.operands.at);
        let captives = self.mods.score.captives()?;
        let planned = self.mods.plan(py, shim, at, captives, &[], true)?;
        let [q, _, v] = &operands;
        let rows = &q.shape[..3];
        let out = in_order(shim, q, &[rows, &v.shape[3..]].concat())?;
        let of_rows = |shape: &[usize]| Tensor::empty(shim, Dtype::F32, shape, &steps(shape));
        let lse = of_rows(rows)?;
        let max_scores = of_rows(if self.max_scores { rows } else { &[0] })?;
        let into = [out.written()?, lse.written()?, max_scores.written()?];
        let [to_out, to_lse, to_max] = &into;
        let to_max = self.max_scores.then_some(to_max);
        // SAFETY: the tensors are held, and the results are new.
        unsafe { planned.plan.run_forward(py, &operands, to_out, Some(to_lse), to_max) }
            .map_err(|error| planned.named(py, error))?;
        planned.clear(0, to_out, &[0; 8][..to_out.dtype.bytes()]);
        for of_rows in [Some(to_lse), to_max].into_iter().flatten() {
            planned.clear(0, of_rows, &f32::NEG_INFINITY.to_ne_bytes());
        }
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

    fn run(self, py: Python<'_>, shim: &'static Shim) -> PyResult<Vec<Returned>> {
        let [q, k, v] = &self.operands.tensors;
        let operands = [q.borrowed()?, k.borrowed()?, v.borrowed()?];
        let mut captives = self.mods.score.captives()?;
        let learned = self.learned(captives.len())?;
        let mut destinations = Vec::with_capacity(learned.len());
        for &at in &learned {
            // Gradients are of float32 at most.
            if captives[at].tensor.dtype == Dtype::F64 {
                let narrow = Arc::new(converted(shim, &captives[at].tensor, Dtype::F32)?);
                captives[at] = Captive::new(&narrow)?;
            }
            let Borrowed { dtype, shape, .. } = &captives[at].tensor;
            destinations.push(zeros(shim, *dtype, shape)?);
        }
        let at = (&operands, &self.operands.at);
        let planned = self.mods.plan(py, shim, at, captives, &learned, false)?;
        let mut gradients = Vec::with_capacity(3);
        for (of, at) in operands.iter().zip(0..) {
            let wanted = self.needs.get(at).copied().unwrap_or(false);
            gradients.push(if wanted { Some(in_order(shim, of, &of.shape)?) } else { None });
        }
        let out = self.out.borrowed()?;
        let destination = |name: &str| {
            let at = learned.iter().position(|&at| number(name, "s") == Some(at));
            at.map(|at| destinations[at].written()).transpose()
        };
        let written = |at: usize| gradients[at].as_ref().map(Tensor::written).transpose();
        let of = plan::Backward {
            d_out: match &self.d_out {
                Some(d_out) => d_out.borrowed()?,
                None => nothing(&out),
            },
            d_lse: self.d_lse.as_ref().map(|d| d.borrowed()).transpose()?,
            lse: self.lse.borrowed()?,
            gradients: [written(0)?, written(1)?, written(2)?],
            captures: planned.plan.captured().map(destination).collect::<PyResult<_>>()?,
            d_sink: None,
            out,
            operands,
        };
        // SAFETY: the tensors are held, and the gradients are new.
        unsafe { planned.plan.run_backward(py, &of) }.map_err(|error| planned.named(py, error))?;
        for (gradient, side) in of.gradients.iter().zip([0, 1, 1]) {
            if let Some(of) = gradient {
                planned.clear(side, of, &[0; 8][..of.dtype.bytes()]);
            }
        }
        let mut results = Vec::with_capacity(4);
        for (gradient, of) in gradients.into_iter().zip(&of.operands) {
            results.push(Returned::Tensor(match gradient {
                Some(gradient) => gradient,
                None => Tensor::empty(shim, of.dtype, &[0], &[1])?,
            }));
        }
        let captured = learned.iter().zip(destinations).map(|(&at, made)| {
            match self.mods.score.captures[at].borrowed()?.dtype {
                Dtype::F64 => converted(shim, &made.borrowed()?, Dtype::F64),
                _ => Ok(made),
            }
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

/// Strides of a new row-major tensor, as torch makes them where an axis is empty, too.
fn steps(shape: &[usize]) -> Vec<usize> {
    row_major(&shape.iter().map(|&n| n.max(1)).collect::<Vec<_>>())
}

/// A new tensor of `shape` whose axes lie in memory in the order of `like`'s, the last one innermost.
fn in_order(shim: &'static Shim, like: &Borrowed, shape: &[usize]) -> PyResult<Tensor> {
    // Without elements the order is all there is.
    if like.is_contiguous() && like.elems() > 0 {
        return Tensor::empty(shim, like.dtype, shape, &steps(shape));
    }
    let mut order: Vec<usize> = (0..shape.len() - 1).collect();
    order.sort_by_key(|&axis| (std::cmp::Reverse(like.strides[axis]), axis));
    let mut made = vec![1; shape.len()];
    let mut step = shape[shape.len() - 1].max(1);
    for &axis in order.iter().rev() {
        made[axis] = step;
        step *= shape[axis].max(1);
    }
    Tensor::empty(shim, like.dtype, shape, &made)
}

/// A new row-major tensor of zeros.
fn zeros(shim: &'static Shim, dtype: Dtype, shape: &[usize]) -> PyResult<Tensor> {
    let made = Tensor::empty(shim, dtype, shape, &steps(shape))?;
    let at = made.written()?;
    // SAFETY: the tensor is new and has so many bytes, of which 0 is 0.
    unsafe { ptr::write_bytes(at.address as *mut u8, 0, at.bytes()) };
    Ok(made)
}

/// A tensor of zeros of the shape and dtype of `like`, all of which lie in one place.
fn nothing(like: &Borrowed) -> Borrowed {
    static ZERO: u64 = 0;
    Borrowed {
        place: Place::Cpu,
        address: ptr::from_ref(&ZERO) as usize,
        dtype: like.dtype,
        shape: like.shape.clone(),
        strides: vec![0; like.shape.len()],
    }
}

/// `tensor`, converted where it is of another dtype.
fn same_dtype(shim: &'static Shim, tensor: &Arc<Tensor>, dtype: Dtype) -> PyResult<Arc<Tensor>> {
    let at = tensor.borrowed()?;
    Ok(if at.dtype == dtype { tensor.clone() } else { Arc::new(converted(shim, &at, dtype)?) })
}

/// A row-major copy of floats in another dtype of floats.
fn converted(shim: &'static Shim, of: &Borrowed, dtype: Dtype) -> PyResult<Tensor> {
    // SAFETY: the caller holds the tensor, and each type is its dtype.
    let elements: Vec<f32> = unsafe {
        match of.dtype {
            Dtype::F32 => capture::each::<f32>(of).collect(),
            Dtype::F16 => capture::each::<f16>(of).map(f16::to_f32).collect(),
            Dtype::BF16 => capture::each::<bf16>(of).map(bf16::to_f32).collect(),
            Dtype::F64 => capture::each::<f64>(of).map(|x| x as f32).collect(),
            other => return Err(other.operand().expect_err("integers are no operands")),
        }
    };
    let made = Tensor::empty(shim, dtype, &of.shape, &steps(&of.shape))?;
    let at = made.written()?;
    let each = elements.into_iter();
    // SAFETY: the tensor is new, and each type is its dtype.
    unsafe {
        match dtype {
            Dtype::F32 => at.elements_mut().iter_mut().zip(each).for_each(|(to, x)| *to = x),
            Dtype::F16 => {
                at.elements_mut().iter_mut().zip(each).for_each(|(to, x)| *to = f16::from_f32(x));
            }
            Dtype::BF16 => {
                at.elements_mut().iter_mut().zip(each).for_each(|(to, x)| *to = bf16::from_f32(x));
            }
            Dtype::F64 => {
                at.elements_mut().iter_mut().zip(each).for_each(|(to, x)| *to = f64::from(x));
            }
            other => return Err(other.operand().expect_err("integers are no operands")),
        }
    }
    Ok(made)
}
