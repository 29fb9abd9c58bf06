//! Plans on the CPU, found again by the structure of their traced functions.
//!
//! A function is traced in each call, unless it can read nothing else than in an earlier one
//! (`python/foveate/_kept.py`), so what it reads is what it reads now. The structure of the trace has
//! no elements of captured tensors and no values of captured numbers; plans are kept by
//! structure, and a call binds elements and values to one. A plan whose mask did not change keeps
//! its block masks.

use std::collections::HashMap;
use std::slice;
use std::sync::{Arc, Mutex};

use foveate::cpu::threads::each;
use foveate::mask::{BlockMask, Kind, Tile, Varies};
use foveate::mods::{DynExpr, Head, Program};
use foveate::tensor::Slice;
use foveate::{
    AnyBuffer, Attention, Device, ForwardRef, GradientsMut, MaskMod, Problem, ScalarValue,
    ScoreMod, TensorMut, TensorRef,
};
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;

use crate::call::Call;
use crate::dlpack::Place;
use crate::dtype::{Dtype, TorchDtype};
use crate::error::{raised, refused};
use crate::tensor::{Borrowed, Held};
use crate::threads;
use crate::traced::Traced;

/// A traced function with the tensors that it reads, as they are in this call.
pub struct Function<'a> {
    program: &'a Program,
    tensors: Vec<Held>,
}

impl<'a> Function<'a> {
    /// `program` with the tensors that it reads, in the order of its slots.
    pub fn new(program: &'a Program, tensors: Vec<Held>) -> Self {
        Self { program, tensors }
    }

    /// `learned` takes the place of the captured tensors that want a gradient, unless it is empty.
    /// The operands are in `place`.
    pub fn of(
        py: Python<'_>,
        traced: &'a Traced,
        learned: &[Bound<'_, PyAny>],
        place: Place,
    ) -> PyResult<Self> {
        let mut learned = learned.iter();
        let tensors = traced.in_order().iter().map(|c| {
            let capture = c.get();
            capture.now(py, if capture.is_learned() { learned.next() } else { None }, place)
        });
        Ok(Self { program: traced.program(), tensors: tensors.collect::<PyResult<_>>()? })
    }

    pub fn program(&self) -> &'a Program {
        self.program
    }

    /// The tensors by the names that `kept`, a program of its structure, has for them.
    pub fn named(self, kept: &Program) -> impl Iterator<Item = (String, Held)> {
        let slots = kept.graph().buffers().iter().map(|slot| slot.name().to_owned());
        slots.zip(self.tensors)
    }

    /// Whether it reads something else than what `kept`, a program of its structure, holds.
    fn differs(&self, kept: &Program) -> bool {
        let slots = kept.graph().buffers().iter().zip(&self.tensors);
        let values = kept.graph().scalars().iter().zip(self.program.graph().scalars());
        values.into_iter().any(|(kept, now)| kept.value != now.value)
            || slots.into_iter().any(|(slot, tensor)| !tensor.is_held(slot))
    }
}

/// `kept`, a program of the structure of `function`, with what a kept plan holds of the elements and
/// values of `function`; calls `each` with what differs.
fn at_rest(
    kept: &Program,
    function: &Function<'_>,
    mut each: impl FnMut(Difference<'_>) -> PyResult<()>,
) -> PyResult<Program> {
    let mut made = kept.clone();
    for (slot, tensor) in kept.graph().buffers().iter().zip(&function.tensors) {
        if let Some(buffer) = tensor.at_rest(slot)? {
            made = made.rebind(&buffer).map_err(raised)?;
            each(Difference::Buffer(&buffer))?;
        }
    }
    let values = function.program.graph().scalars();
    for (slot, now) in kept.graph().scalars().iter().zip(values) {
        if slot.value != now.value {
            made = made.set_scalar(&slot.name, now.value).map_err(raised)?;
            each(Difference::Scalar(&slot.name, now.value))?;
        }
    }
    Ok(made)
}

/// The tensors of a function that are read where they lie, as buffers of `program`, which is the
/// function's as it is kept.
fn borrowed(program: &Program, function: &Function<'_>) -> PyResult<Vec<AnyBuffer>> {
    let slots = program.graph().buffers().iter().zip(&function.tensors);
    slots.filter_map(|(slot, tensor)| tensor.borrowed(slot).transpose()).collect()
}

enum Difference<'a> {
    Buffer(&'a AnyBuffer),
    Scalar(&'a str, ScalarValue),
}

/// What a plan is made for, besides the structure of its mods.
#[derive(Clone, PartialEq)]
struct Class {
    dtype: foveate::DType,
    heads: [usize; 2],
    dims: [usize; 2],
    scale: Option<u32>,
    dropout: bool,
    paged: bool,
    forward_only: bool,
}

/// A plan with the programs that are bound to it.
#[derive(Clone)]
struct Kept {
    class: Class,
    mask: Option<Program>,
    score: Option<Program>,
    plan: foveate::Plan,
}

impl Kept {
    /// Whether it is a plan for these functions, whatever they capture.
    fn suits(&self, class: &Class, mods: [&Option<Function<'_>>; 2]) -> bool {
        let same = |kept: &Option<Program>, function: &Option<Function<'_>>| match (kept, function)
        {
            (None, None) => true,
            (Some(kept), Some(function)) => kept.same_structure(function.program),
            _ => false,
        };
        self.class == *class && same(&self.mask, mods[0]) && same(&self.score, mods[1])
    }

    /// Whether mask and score capture something else now than what is bound here.
    fn differs(&self, mods: [&Option<Function<'_>>; 2]) -> [bool; 2] {
        let differs =
            |kept: &Option<Program>, function: &Option<Function<'_>>| match (kept, function) {
                (Some(kept), Some(function)) => function.differs(kept),
                _ => false,
            };
        [differs(&self.mask, mods[0]), differs(&self.score, mods[1])]
    }

    /// The plan with what the functions capture now.
    fn with(&self, mods: [&Option<Function<'_>>; 2]) -> PyResult<Self> {
        let mut plan = self.plan.clone();
        let mut programs = [self.mask.clone(), self.score.clone()];
        for (program, function) in programs.iter_mut().zip(mods) {
            let (Some(kept), Some(function)) = (&*program, function) else { continue };
            *program = Some(at_rest(kept, function, |difference| {
                plan = match difference {
                    Difference::Buffer(buffer) => plan.rebind(buffer),
                    Difference::Scalar(name, ScalarValue::Bool(v)) => plan.set_scalar(name, v),
                    Difference::Scalar(name, ScalarValue::I32(v)) => plan.set_scalar(name, v),
                    Difference::Scalar(name, ScalarValue::F32(v)) => plan.set_scalar(name, v),
                }
                .map_err(raised)?;
                Ok(())
            })?);
        }
        let [mask, score] = programs;
        Ok(Self { class: self.class.clone(), mask, score, plan })
    }

    /// Bytes of captured elements, about.
    fn bytes(&self) -> usize {
        let of = |p: &Program| p.graph().buffers().iter().map(|b| 4 * b.elems()).sum::<usize>();
        [&self.mask, &self.score].into_iter().flatten().map(of).sum()
    }
}

/// Plans that are kept, and bytes of elements that these have captured: beyond either, the least
/// recently used are dropped.
const MOST: usize = 64;
const MOST_BYTES: usize = 256 << 20;

/// The plans of a process, the most recently used last.
struct Plans {
    process: u32,
    kept: Vec<Arc<Kept>>,
}

/// Locked with the GIL held only, so that a process that is forked never finds it locked.
static PLANS: Mutex<Plans> = Mutex::new(Plans { process: 0, kept: Vec::new() });

/// The plan for these functions: a kept one, as it is or bound anew, or one that `make` makes.
fn found(
    class: &Class,
    mods: [&Option<Function<'_>>; 2],
    make: impl FnOnce() -> PyResult<Kept>,
) -> PyResult<Arc<Kept>> {
    let mut plans = PLANS.lock().unwrap_or_else(|e| e.into_inner());
    if plans.process != std::process::id() {
        plans.process = std::process::id();
        // What plans lock while they run, a thread of the process that was forked may have locked for good.
        std::mem::forget(std::mem::take(&mut plans.kept));
    }
    let kept = &mut plans.kept;
    let mut latest = None;
    let mut same_mask = None;
    for at in (0..kept.len()).rev().filter(|&i| kept[i].suits(class, mods)) {
        match kept[at].differs(mods) {
            [false, false] => {
                let found = kept[at].clone();
                kept[at..].rotate_left(1);
                return Ok(found);
            }
            [false, true] => same_mask = same_mask.or(Some(at)),
            [true, _] => latest = latest.or(Some(at)),
        }
    }
    // Another mask is kept beside the earlier ones, whose block masks it must not take; other
    // elements of a score take the place of the earlier ones.
    let now = Arc::new(match (same_mask, latest) {
        (Some(at), _) => kept.remove(at).with(mods)?,
        (None, Some(at)) => kept[at].with(mods)?,
        (None, None) => make()?,
    });
    kept.push(now.clone());
    while kept.len() > MOST
        || (kept.len() > 1 && kept.iter().map(|k| k.bytes()).sum::<usize>() > MOST_BYTES)
    {
        kept.remove(0);
    }
    Ok(now)
}

/// Attention planned for operands, with what its functions capture now.
#[pyclass(frozen, module = "foveate._native")]
pub struct Plan {
    plan: foveate::Plan,
    /// The score, whose buffers are in the order of its captures.
    score: Option<Program>,
    /// The rows of queries and of keys that belong to a sequence, where there are such.
    ends: Option<[usize; 2]>,
    threads: usize,
    /// Multiplications of a forward pass without a mask.
    work: usize,
}

/// The extents of b, h, q and kv of operands that fit each other without broadcasting; `None` where it
/// takes a closer look: other shapes, dtypes or devices that differ, float64, elements whose sign torch
/// has yet to change.
#[pyfunction]
pub fn extents(
    q: &Bound<'_, PyAny>,
    k: &Bound<'_, PyAny>,
    v: &Bound<'_, PyAny>,
    grouped: bool,
) -> Option<(usize, usize, usize, usize)> {
    fitting([q, k, v], grouped, |t| t.shape.as_slice().try_into().ok())
}

/// Whether rows `[T, H, D]` of one sequence after another fit each other; not where it takes a closer look, as in
/// [`extents`].
#[pyfunction]
pub fn rows_fit(q: &Bound<'_, PyAny>, k: &Bound<'_, PyAny>, v: &Bound<'_, PyAny>) -> bool {
    let of = |t: &Borrowed| match t.shape[..] {
        [rows, heads, dim] => Some([1, heads, rows, dim]),
        _ => None,
    };
    fitting([q, k, v], true, of).is_some()
}

/// [`extents`] of operands whose sizes of `[B, H, S, D]` `of` says.
fn fitting(
    operands: [&Bound<'_, PyAny>; 3],
    grouped: bool,
    of: impl Fn(&Borrowed) -> Option<[usize; 4]>,
) -> Option<(usize, usize, usize, usize)> {
    for tensor in operands {
        if tensor.call_method0(intern!(tensor.py(), "is_neg")).ok()?.is_truthy().ok()? {
            return None;
        }
    }
    let [q, k, v] = operands.map(Borrowed::read);
    let (q, k, v) = (q?, k?, v?);
    let [batch, heads, q_len, dim] = of(&q)?;
    let [kv_batch, kv_heads, kv_len, kv_dim] = of(&k)?;
    let same_dtype = q.dtype.operand().is_ok() && q.dtype == k.dtype && q.dtype == v.dtype;
    let fit = q.place == k.place
        && q.place == v.place
        && batch == kv_batch
        && (heads == kv_heads || (grouped && kv_heads > 0 && heads.is_multiple_of(kv_heads)))
        && dim == kv_dim
        && of(&v)?[..3] == [kv_batch, kv_heads, kv_len];
    (same_dtype && fit).then_some((batch, heads, q_len, kv_len))
}

/// Plans attention of `q [B, Hq, Sq, D]`, `k [B|1, Hkv, Sk, D]`, `v [B|1, Hkv, Sk, Dv]` on CPU tensors
/// of one dtype and any strides. `sink` is contiguous f32 `[Hq]`; `learned` are the score's captured
/// tensors that want a gradient. The call's seed of dropout is a number, its offsets are lists, and its
/// table of pages and their lengths contiguous i32.
#[pyfunction]
#[pyo3(signature = (call, operands, sink, learned, forward_only, threads))]
pub fn plan(
    py: Python<'_>,
    call: Call<'_>,
    operands: [Bound<'_, PyAny>; 3],
    sink: Option<&Bound<'_, PyAny>>,
    learned: Vec<Bound<'_, PyAny>>,
    forward_only: bool,
    threads: usize,
) -> PyResult<Plan> {
    let Call { score, mask, scale, dropout, varlen, pages } = call;
    let [q, k, v] = &operands;
    let pages = pages.as_ref().map(|(t, l)| PyResult::Ok([Borrowed::of(t)?, Borrowed::of(l)?]));
    let pages = pages.transpose()?;
    let request = Request {
        operands: [Borrowed::of(q)?, Borrowed::of(k)?, Borrowed::of(v)?],
        mask: mask.as_ref().map(|m| Function::of(py, m.get(), &[], Place::Cpu)).transpose()?,
        score: score
            .as_ref()
            .map(|s| Function::of(py, s.get(), &learned, Place::Cpu))
            .transpose()?,
        scale,
        dropout: dropout.map(|(p, seed)| PyResult::Ok((p, seed.extract()?))).transpose()?,
        offsets: varlen.map(|offsets| offsets.extract()).transpose()?,
        pages: match &pages {
            Some([table, lengths]) => Some([integers(table)?, integers(lengths)?]),
            None => None,
        },
        sink: sink.map(Borrowed::of).transpose()?,
        forward_only,
        threads,
    };
    // SAFETY: the arguments hold the tensors.
    unsafe { request.plan() }
}

/// What [`plan`] is asked for, of tensors that the caller holds.
pub struct Request<'a> {
    pub operands: [Borrowed; 3],
    pub mask: Option<Function<'a>>,
    pub score: Option<Function<'a>>,
    pub scale: Option<f64>,
    pub dropout: Option<(f32, u64)>,
    /// Of queries and of keys.
    pub offsets: Option<(Vec<i32>, Vec<i32>)>,
    /// The table `[B, entries]` and the lengths `[B]`.
    pub pages: Option<[&'a [i32]; 2]>,
    pub sink: Option<Borrowed>,
    pub forward_only: bool,
    pub threads: usize,
}

impl Request<'_> {
    /// A plan with what its functions capture now.
    ///
    /// # Safety
    /// The tensors are held until this returns. The GIL is held.
    pub unsafe fn plan(self) -> PyResult<Plan> {
        let Self { scale, dropout, forward_only, threads, .. } = self;
        // SAFETY: the caller's promise, and the views are gone when the problem is made.
        let [q, k, v] = unsafe { views(&self.operands)? };
        let mut problem = match self.pages {
            Some([table, lengths]) => Problem::paged(q, k, v, table, lengths),
            None => Problem::of(q, k, v),
        }
        .map_err(raised)?;
        if forward_only {
            problem = problem.forward_only();
        }
        let dims = problem.dims();
        let class = Class {
            dtype: problem.dtype(),
            heads: [dims.heads_q, dims.heads_kv],
            dims: [dims.dim, dims.dim_v],
            scale: scale.map(|s| (s as f32).to_bits()),
            dropout: dropout.is_some(),
            paged: self.pages.is_some(),
            forward_only,
        };
        let pairs = dims.batch.saturating_mul(dims.heads_q).saturating_mul(dims.len_q);
        let work = pairs.saturating_mul(dims.len_k).saturating_mul(dims.dim + dims.dim_v);
        let now = found(&class, [&self.mask, &self.score], || self.made(&class, &problem))?;
        let mut plan = now.plan.clone();
        for (program, function) in [(&now.mask, &self.mask), (&now.score, &self.score)] {
            if let (Some(program), Some(function)) = (program, function) {
                for buffer in borrowed(program, function)? {
                    plan = plan.rebind(&buffer).map_err(raised)?;
                }
            }
        }
        if let Some((p, seed)) = dropout {
            let halves =
                [("dropout_seed_lo", seed as u32), ("dropout_seed_hi", (seed >> 32) as u32)];
            plan = plan.set_scalar("dropout_p", p).map_err(raised)?;
            for (name, half) in halves {
                plan = plan.set_scalar(name, half as i32).map_err(raised)?;
            }
        }
        let mut ends = None;
        if let Some((cu_q, cu_k)) = &self.offsets {
            plan = plan.with_varlen(cu_q, cu_k).map_err(raised)?;
            ends = Some([cu_q, cu_k].map(|of| of.last().map_or(0, |&end| end as usize)));
        }
        if let Some([table, lengths]) = self.pages {
            plan = plan.with_pages(table, lengths).map_err(raised)?;
        }
        if let Some(sink) = &self.sink {
            // SAFETY: the caller's promise, and the plan takes a copy.
            let Slice::F32(sink) = (unsafe { sink.elements_dense()? }) else {
                return Err(PyValueError::new_err("the sink must be contiguous float32"));
            };
            plan = plan.with_sink(sink).map_err(raised)?;
        }
        Ok(Plan { plan, score: now.score.clone(), ends, threads, work })
    }

    /// A plan of its own.
    fn made(&self, class: &Class, problem: &Problem) -> PyResult<Kept> {
        let fresh = |f: &Option<Function<'_>>| {
            f.as_ref().map(|f| at_rest(f.program, f, |_| Ok(()))).transpose()
        };
        let (mask, score) = (fresh(&self.mask)?, fresh(&self.score)?);
        let mut attention = Attention::new();
        let expr = |p: &Program| p.trace(0, &DynExpr::leaf);
        if let Some(p) = &mask {
            attention = attention.mask(MaskMod::new(&expr(p)).map_err(raised)?);
        }
        if let Some(p) = &score {
            attention = attention.score(ScoreMod::new(&expr(p)).map_err(raised)?);
        }
        if let Some(scale) = self.scale {
            attention = attention.scale(scale as f32);
        }
        if let Some((p, seed)) = self.dropout {
            attention = attention.dropout(p, seed);
        }
        let plan = attention.plan(problem, &Device::cpu()).map_err(raised)?;
        Ok(Kept { class: class.clone(), mask, score, plan })
    }
}

/// The elements of a contiguous i32 tensor that an argument of the call holds.
fn integers(tensor: &Borrowed) -> PyResult<&[i32]> {
    if tensor.dtype != Dtype::I32 || !tensor.is_contiguous() {
        return Err(PyValueError::new_err("a page table and lengths must be contiguous int32"));
    }
    // SAFETY: the tensor is held, and of this dtype.
    Ok(unsafe { tensor.elements() })
}

/// # Safety
/// As for [`Borrowed::elements`].
unsafe fn views<'a>(tensors: &[Borrowed; 3]) -> PyResult<[TensorRef<'a>; 3]> {
    let [q, k, v] = tensors;
    // SAFETY: the caller's promise.
    unsafe { Ok([q.view()?, k.view()?, v.view()?]) }
}

/// Tensors of a backward that the caller holds; those it writes to, nobody else knows of.
pub struct Backward<T = Borrowed> {
    pub operands: [T; 3],
    pub out: T,
    pub lse: T,
    pub d_out: T,
    pub d_lse: Option<T>,
    /// Of q, k and v.
    pub gradients: [Option<T>; 3],
    /// For each capture of the score.
    pub captures: Vec<Option<T>>,
    pub d_sink: Option<T>,
}

impl Backward<Bound<'_, PyAny>> {
    /// Where Python's tensors lie, which is in `place`.
    ///
    /// # Errors
    /// When one is elsewhere.
    pub fn on(&self, place: Place) -> PyResult<Backward> {
        let on = |tensor: &Bound<'_, PyAny>, what| Borrowed::on(place, tensor, what);
        let given = |tensor: &Option<Bound<'_, PyAny>>, what| {
            tensor.as_ref().map(|t| on(t, what)).transpose()
        };
        let [q, k, v] = &self.operands;
        let [dq, dk, dv] = &self.gradients;
        let captures = self.captures.iter();
        let captures = captures.map(|d| given(d, "the gradient of a captured tensor"));
        Ok(Backward {
            operands: [on(q, "q")?, on(k, "k")?, on(v, "v")?],
            out: on(&self.out, "out")?,
            lse: on(&self.lse, "lse")?,
            d_out: on(&self.d_out, "the gradient of out")?,
            d_lse: given(&self.d_lse, "the gradient of lse")?,
            gradients: [given(dq, "dq")?, given(dk, "dk")?, given(dv, "dv")?],
            captures: captures.collect::<PyResult<_>>()?,
            d_sink: given(&self.d_sink, "the gradient of the sink")?,
        })
    }
}

impl Plan {
    /// The score's captured tensors by name, in the order that a backward has them.
    pub fn captured(&self) -> impl ExactSizeIterator<Item = &str> {
        let slots = self.score.as_ref().map_or(&[][..], |p| p.graph().buffers());
        slots.iter().map(AnyBuffer::name)
    }

    /// Sets rows of a new tensor `[1, H, rows, ...]` past the last sequence of queries (`side` 0) or keys (1) to
    /// `value`, bytes of an element: nothing is computed there.
    ///
    /// # Safety
    /// The tensor is held, its last axis is contiguous, nobody else knows of it, and `value` has the bytes of
    /// its dtype.
    unsafe fn clear(&self, side: usize, of: &Borrowed, value: &[u8]) {
        let Some(end) = self.ends.map(|ends| ends[side]) else { return };
        let (heads, rows) = (of.shape[1], of.shape[2]);
        let wide = of.shape.get(3).copied().unwrap_or(1);
        for (head, row) in (0..heads).flat_map(|head| (end..rows).map(move |row| (head, row))) {
            let first = of.address + (head * of.strides[1] + row * of.strides[2]) * value.len();
            // SAFETY: the elements are the tensor's, one after another; the rest is the caller's promise.
            let elements =
                unsafe { slice::from_raw_parts_mut(first as *mut u8, wide * value.len()) };
            elements.chunks_exact_mut(value.len()).for_each(|to| to.copy_from_slice(value));
        }
    }

    /// [`Self::forward`].
    ///
    /// # Safety
    /// The tensors are held, and nobody else knows of `out`, `lse` and `max_score`.
    pub unsafe fn run_forward(
        &self,
        py: Python<'_>,
        operands: &[Borrowed; 3],
        to_out: &Borrowed,
        to_lse: Option<&Borrowed>,
        to_max: Option<&Borrowed>,
    ) -> PyResult<()> {
        let rows = [0, 1, 2].map(|axis| to_out.shape.get(axis).copied().unwrap_or(0));
        let mut unread = Vec::new();
        // SAFETY: the caller's promise.
        let ([q, k, v], out, lse, max_score) = unsafe {
            let max_score = to_max.map(|m| m.view_mut()).transpose()?;
            let lse = match to_lse {
                Some(lse) => lse.view_mut()?,
                None => {
                    unread.resize(rows.iter().product(), 0.0f32);
                    TensorMut::from_slice(&mut unread, rows).map_err(raised)?
                }
            };
            (views(operands)?, to_out.view_mut()?, lse, max_score)
        };
        threads::run(py, self.threads, self.work, || {
            let mut call = self.plan.forward_call(q, k, v);
            if let Some(into) = max_score {
                call = call.max_score(into);
            }
            call.write_to(out, lse)
        })?
        .map_err(raised)?;
        // SAFETY: the caller's promise; the plan wrote to them as tensors of this kind.
        unsafe {
            self.clear(0, to_out, &[0; 8][..to_out.dtype.bytes()]);
            for of_rows in [to_lse, to_max].into_iter().flatten() {
                self.clear(0, of_rows, &f32::NEG_INFINITY.to_ne_bytes());
            }
        }
        Ok(())
    }

    /// [`Self::backward`].
    ///
    /// # Safety
    /// As [`Backward`] says.
    pub unsafe fn run_backward(&self, py: Python<'_>, of: &Backward) -> PyResult<()> {
        let slots = self.score.as_ref().map_or(&[][..], |p| p.graph().buffers());
        if of.captures.len() != slots.len() {
            let n = slots.len();
            return Err(PyValueError::new_err(format!("one destination for each of {n} captures")));
        }
        // SAFETY: the caller's promise.
        let ([q, k, v], forward, d_out, d_lse, to) = unsafe {
            let mut to = GradientsMut::none();
            let [dq, dk, dv] = &of.gradients;
            if let Some(dq) = dq {
                to = to.dq(dq.view_mut()?);
            }
            if let Some(dk) = dk {
                to = to.dk(dk.view_mut()?);
            }
            if let Some(dv) = dv {
                to = to.dv(dv.view_mut()?);
            }
            for (slot, into) in slots.iter().zip(&of.captures) {
                if let Some(into) = into {
                    to = to.capture(slot.name(), into.elements_dense_mut()?);
                }
            }
            if let Some(into) = &of.d_sink {
                to = to.d_sink(into.elements_dense_mut()?);
            }
            let forward = ForwardRef { out: of.out.view()?, lse: of.lse.view()? };
            let d_lse = of.d_lse.as_ref().map(|d| d.view::<3>()).transpose()?;
            (views(&of.operands)?, forward, of.d_out.view()?, d_lse, to)
        };
        threads::run(py, self.threads, self.work.saturating_mul(2), || {
            let mut call = self.plan.backward_call(q, k, v, forward, d_out);
            if let Some(d_lse) = d_lse {
                call = call.d_lse(d_lse);
            }
            call.write_to(to)
        })?
        .map_err(raised)?;
        for (gradient, side) in of.gradients.iter().zip([0, 1, 1]) {
            if let Some(of) = gradient {
                // SAFETY: the caller's promise; the plan wrote to it as a tensor of this kind.
                unsafe { self.clear(side, of, &[0; 8][..of.dtype.bytes()]) };
            }
        }
        Ok(())
    }
}

#[pymethods]
impl Plan {
    /// Writes `out [B, Hq, Sq, Dv]` and, where they are given, `lse` and `max_score`, `[B, Hq, Sq]` (f32).
    #[pyo3(signature = (q, k, v, out, lse = None, max_score = None))]
    fn forward(
        &self,
        py: Python<'_>,
        q: &Bound<'_, PyAny>,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        lse: Option<&Bound<'_, PyAny>>,
        max_score: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let operands = [Borrowed::of(q)?, Borrowed::of(k)?, Borrowed::of(v)?];
        let out = Borrowed::of(out)?;
        let [lse, max] = [lse, max_score].map(|of| of.map(Borrowed::of).transpose());
        let (lse, max) = (lse?, max?);
        // SAFETY: the arguments hold the tensors for the call; the destinations are the package's
        // own, new for this call, and nothing else knows of them.
        unsafe { self.run_forward(py, &operands, &out, lse.as_ref(), max.as_ref()) }
    }

    /// Writes those of `dq`, `dk` and `dv` that are given, of the shapes of q, k and v, and for each capture of
    /// the score that has a contiguous destination in `captures` its gradient, and that of the sink.
    /// `d_lse` is `[B, Hq, Sq]`, f32.
    #[pyo3(signature = (operands, forward, d_out, d_lse, gradients, captures, d_sink))]
    fn backward<'py>(
        &self,
        py: Python<'py>,
        operands: [Bound<'py, PyAny>; 3],
        forward: [Bound<'py, PyAny>; 2],
        d_out: Bound<'py, PyAny>,
        d_lse: Option<Bound<'py, PyAny>>,
        gradients: [Option<Bound<'py, PyAny>>; 3],
        captures: Vec<Option<Bound<'py, PyAny>>>,
        d_sink: Option<Bound<'py, PyAny>>,
    ) -> PyResult<()> {
        let [out, lse] = forward;
        let of = Backward { operands, out, lse, d_out, d_lse, gradients, captures, d_sink };
        let of = of.on(Place::Cpu)?;
        // SAFETY: as in `forward`.
        unsafe { self.run_backward(py, &of) }
    }

    /// What runs, in words.
    fn explain(&self, py: Python<'_>) -> PyResult<String> {
        let explain = || self.plan.explain().to_string();
        threads::run(py, self.threads, usize::MAX, explain)
    }
}

/// Writes to `into [B, H, rows, columns]` (uint8, contiguous) what each tile of `mask` is: 0 empty, 1
/// partial, 2 full. Tiles that the lengths cut are not full, as in torch's tables.
#[pyfunction]
pub fn kinds(
    py: Python<'_>,
    mask: &Traced,
    extents: [usize; 4],
    tile: [usize; 2],
    into: &Bound<'_, PyAny>,
    threads: usize,
) -> PyResult<()> {
    let function = Function::of(py, mask, &[], Place::Cpu)?;
    let mut program = at_rest(function.program, &function, |_| Ok(()))?;
    for buffer in borrowed(&program, &function)? {
        program = program.rebind(&buffer).map_err(raised)?;
    }
    let mask = MaskMod::new(&program.trace(0, &DynExpr::leaf)).map_err(raised)?;
    let into = Borrowed::of(into)?;
    let [batch, heads, q_len, kv_len] = extents;
    let fits =
        |n: usize| i32::try_from(n).map_err(|_| refused(format!("{n} does not fit 32 bits")));
    let [q_tile, kv_tile] = tile.map(|n| n.min(1 << 30));
    let tiles = Tile { q: fits(q_tile)? as u32, kv: fits(kv_tile)? as u32 };
    let [rows, columns] = [q_len.div_ceil(q_tile), kv_len.div_ceil(kv_tile)];
    if into.dtype != Dtype::U8 || into.elems() != batch * heads * rows * columns {
        return Err(PyValueError::new_err(
            "the table of tiles must be uint8 [B, H, rows, columns]",
        ));
    }
    let (q, kv) = (fits(q_len)?, fits(kv_len)?);
    let (b_len, h_len) = (fits(batch)?, fits(heads)?);
    // SAFETY: the argument holds the tensor, which is the package's own and new for this call.
    let table: &mut [u8] = unsafe { into.elements_mut() };
    if table.is_empty() {
        return Ok(());
    }
    table.fill(0);
    let varies = Varies::of(&mask);
    let tiles_of_all = into.elems().saturating_mul(1 << 10);
    let outside = threads::run(py, threads, tiles_of_all, || {
        let classes: Vec<(i32, i32)> = (0..if varies.by_batch { b_len } else { 1 })
            .flat_map(|b| (0..if varies.by_head { h_len } else { 1 }).map(move |h| (b, h)))
            .collect();
        let built = each(classes, |(b, h)| {
            let head = Head { b, h, h_kv: h, q_len: q, kv_len: kv };
            ((b, h), BlockMask::build(&mask, head, q_len, kv_len, tiles))
        });
        let built: HashMap<(i32, i32), BlockMask> = built.into_iter().collect();
        for (at, table) in table.chunks_mut(rows * columns).enumerate() {
            let (b, h) = ((at / heads) as i32, (at % heads) as i32);
            let class = (if varies.by_batch { b } else { 0 }, if varies.by_head { h } else { 0 });
            for (row, table) in table.chunks_mut(columns).enumerate() {
                for run in built[&class].row(row) {
                    for column in run.tiles() {
                        let column = column as usize;
                        let whole = (row + 1) * q_tile <= q_len && (column + 1) * kv_tile <= kv_len;
                        table[column] = if run.kind == Kind::Full && whole { 2 } else { 1 };
                    }
                }
            }
        }
        built.values().find_map(|mask| mask.out_of_range().map(|o| o.to_string()))
    })?;
    match outside {
        Some(reason) => Err(PyIndexError::new_err(reason)),
        None => Ok(()),
    }
}
