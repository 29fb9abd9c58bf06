//! Attention on CUDA tensors: where they lie, on torch's current stream, in memory of torch's allocator.
//!
//! Plans are kept by structure, as on the CPU, and one plan serves all tensors: captured ones are read
//! where they lie in every call, and what depends on their elements (range tables, block lists) is made
//! in the call, on the device. Nothing waits for the device.
//!
//! Torch's allocator is called with the GIL held. A call that is the first of its shapes may compile
//! kernels, so it runs without the GIL and takes the GIL for memory only; all others are launches of
//! some microseconds and keep it.

mod kept;
pub mod memory;

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex};

use foveate::cuda::{
    CudaError, CudaPlan, DeviceArray, DeviceBackward, DeviceBlockLists, DeviceForward,
    DeviceOffsets, DeviceOperands, DevicePages, DeviceTensor, Engine, Queue, TileTables, Wanted,
    tile_kinds_on,
};
use foveate::mask::Varies;
use foveate::mods::DynExpr;
use foveate::{AnyBuffer, DType, Layout, MaskMod};
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::call::Call;
use crate::dlpack::Place;
use crate::dtype::TorchDtype;
use crate::error::raised;
use crate::plan::{Backward, Function};
use crate::tensor::{Borrowed, Held};
use crate::threads::computed;
use crate::traced::Traced;
use kept::{Class, Kept, LENGTHS, SEED};
use memory::{Current, TorchAllocator};

/// Torch's streams with their memory, by device and handle. Torch keeps its streams as long as the
/// process.
static QUEUES: Mutex<Option<HashMap<(usize, usize), Queue>>> = Mutex::new(None);

/// The engine of a device.
fn engine(device: usize) -> PyResult<Arc<Engine>> {
    Engine::get(device).map_err(|e| memory::raised(e.into()))
}

/// The queue on torch's current stream of a device.
fn queue(py: Python<'_>, engine: &Engine, device: usize) -> PyResult<Queue> {
    let stream = memory::current_stream(py, device)?;
    let mut queues = QUEUES.lock().unwrap_or_else(|e| e.into_inner());
    let queue = queues.get_or_insert_default().entry((device, stream)).or_insert_with(|| {
        // SAFETY: torch made the stream in the device's primary context, and never destroys its streams;
        // whoever hands it another one keeps that one for as long as torch may use it.
        let queue = unsafe { engine.queue_on(stream) };
        queue.with_allocator(Arc::new(TorchAllocator { device }))
    });
    Ok(queue.clone())
}

fn tensor<const N: usize>(of: &Borrowed) -> PyResult<DeviceTensor<N>> {
    let fail = |_| PyValueError::new_err(format!("a tensor has {} axes, not {N}", of.shape.len()));
    let shape = of.shape.as_slice().try_into().map_err(fail)?;
    let strides = of.strides.as_slice().try_into().map_err(fail)?;
    Ok(DeviceTensor {
        address: of.address as u64,
        dtype: of.dtype.operand()?,
        layout: Layout::strided(shape, strides, 0),
    })
}

fn array(of: &Borrowed) -> DeviceArray<'_> {
    DeviceArray {
        strides: Some(&of.strides),
        ..DeviceArray::new(of.address as u64, of.dtype, &of.shape)
    }
}

/// Where the sequences of packed rows begin: offsets of queries and of keys, contiguous int32, and at least
/// the rows of the longest.
pub type Sequences = ([Held; 2], [usize; 2]);

/// [`Sequences`], as Python hands them over.
type Offsets<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, usize, usize);

/// The keys of each batch entry whose keys lie in pages.
pub enum Lengths {
    Known(Vec<i32>),
    /// Contiguous int32, on the device.
    There(Held),
}

/// Where keys lie in pages: the table, contiguous int32, and the lengths.
pub type Pages = (Held, Lengths);

/// Attention planned for CUDA operands, with what its functions capture now.
#[pyclass(frozen, name = "CudaPlan", module = "foveate._native")]
pub struct Plan {
    kept: Arc<Kept>,
    device: usize,
    /// What a backward makes, if one follows: its kernels are compiled beside those of the forward.
    backward: Option<Wanted>,
    /// By the names of the plan's captured buffers.
    captures: Vec<(String, Held)>,
    sink: Option<Held>,
    varlen: Option<Sequences>,
    /// The table, and the most keys of each batch entry.
    pages: Option<(Held, Vec<i32>)>,
}

/// What a plan is asked for, of tensors on `device` that the caller holds.
pub struct Request<'a> {
    pub device: usize,
    pub operands: &'a [Borrowed; 3],
    pub mask: Option<Function<'a>>,
    pub score: Option<Function<'a>>,
    pub scale: Option<f64>,
    /// A probability, and a seed, int32 `[2]`.
    pub dropout: Option<(f32, Held)>,
    pub varlen: Option<Sequences>,
    pub pages: Option<Pages>,
    pub sink: Option<Held>,
    /// What a backward makes, if one follows.
    pub backward: Option<Wanted>,
    pub deterministic: bool,
}

impl Request<'_> {
    /// A plan with what its functions capture now.
    pub fn plan(self, py: Python<'_>) -> PyResult<Plan> {
        memory::start(py)?;
        let Self { device, mask, score, scale, dropout, varlen, sink, backward, .. } = self;
        let [q, k, v] = self.operands;
        let (q, k, v) = (tensor(q)?, tensor(k)?, tensor(v)?);
        let dims = class_dims(&q, &k, &v);
        let mut lengths = None;
        let pages = self.pages.map(|(table, of)| {
            let most = match of {
                Lengths::Known(known) => known,
                Lengths::There(held) => {
                    lengths = Some(held);
                    let most = table.at.shape[1].saturating_mul(dims.len_k);
                    vec![i32::try_from(most).unwrap_or(i32::MAX); table.at.shape[0]]
                }
            };
            (table, most)
        });
        let class = Class {
            device,
            dtype: q.dtype,
            heads: [dims.heads_q, dims.heads_kv],
            dims: [dims.dim, dims.dim_v],
            scale: scale.map(|s| (s as f32).to_bits()),
            dropout: dropout.as_ref().map(|(p, _)| p.to_bits()),
            deterministic: self.deterministic,
            counted: lengths.is_some(),
        };
        let programs = [&mask, &score].map(|f| f.as_ref().map(Function::program));
        let kept = Kept::found(&class, &dims, programs)?;
        let functions = kept.programs().into_iter().zip([mask, score]);
        let mut captures: Vec<_> =
            functions.filter_map(|(kept, now)| Some(now?.named(kept?))).flatten().collect();
        captures.extend(dropout.map(|(_, seed)| (SEED.into(), seed)));
        captures.extend(lengths.map(|lengths| (LENGTHS.into(), lengths)));
        Ok(Plan { kept, device, backward, captures, sink, varlen, pages })
    }
}

/// Plans attention of `q [B, Hq, Sq, D]`, `k [B|1, Hkv, Sk, D]`, `v [B|1, Hkv, Sk, Dv]` on tensors of one
/// CUDA device and dtype, of any strides. `sink` is f32 `[Hq]`; `learned` takes the place of the score's
/// captured tensors that want a gradient, unless it is empty. Of the call the seed of dropout is int32
/// `[2]`, the offsets are [`Offsets`], and the table of pages is contiguous int32, all of them on the
/// device; the pages' lengths are a list, or int32 on the device.
#[pyfunction]
#[pyo3(signature = (call, operands, sink, learned, forward_only, deterministic))]
pub fn cuda_plan(
    py: Python<'_>,
    call: Call<'_>,
    operands: [Bound<'_, PyAny>; 3],
    sink: Option<&Bound<'_, PyAny>>,
    learned: Vec<Bound<'_, PyAny>>,
    forward_only: bool,
    deterministic: bool,
) -> PyResult<Plan> {
    let Call { score, mask, scale, dropout, varlen, pages } = call;
    let [score, mask] = [&score, &mask].map(|f| f.as_ref().map(|f| f.get()));
    let [q, k, v] = &operands;
    let Place::Cuda(device) = Borrowed::anywhere(q)?.place else {
        return Err(PyValueError::new_err("the query is on no CUDA device"));
    };
    let place = Place::Cuda(device);
    let on = |tensor, what| Borrowed::on(place, tensor, what);
    let hold = |tensor: &Bound<'_, PyAny>, what| Held::on(place, tensor, what);
    Request {
        device,
        operands: &[on(q, "q")?, on(k, "k")?, on(v, "v")?],
        mask: mask.map(|m| Function::of(py, m, &[], place)).transpose()?,
        score: score.map(|s| Function::of(py, s, &learned, place)).transpose()?,
        scale,
        dropout: dropout
            .map(|(p, seed)| PyResult::Ok((p, hold(&seed, "the seed of dropout")?)))
            .transpose()?,
        varlen: varlen
            .map(|offsets| -> PyResult<_> {
                let (q, k, longest_q, longest_k): Offsets<'_> = offsets.extract()?;
                let offsets = [hold(&q, "cu_seqlens_q")?, hold(&k, "cu_seqlens_k")?];
                Ok((offsets, [longest_q, longest_k]))
            })
            .transpose()?,
        pages: pages
            .map(|(table, lengths)| -> PyResult<_> {
                let lengths = match lengths.cast::<PyList>() {
                    Ok(known) => Lengths::Known(known.extract()?),
                    Err(_) => Lengths::There(hold(&lengths, "lengths")?),
                };
                Ok((hold(&table, "page_table")?, lengths))
            })
            .transpose()?,
        sink: sink.map(|sink| hold(sink, "the sink")).transpose()?,
        backward: match forward_only {
            true => None,
            false => Some(Wanted {
                q: requires_grad(q)?,
                k: requires_grad(k)?,
                v: requires_grad(v)?,
                captures: score.is_some_and(Traced::learns),
            }),
        },
        deterministic,
    }
    .plan(py)
}

fn requires_grad(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    tensor.getattr(intern!(tensor.py(), "requires_grad"))?.extract()
}

/// Whether a mask tells batch entries apart, and heads.
#[pyfunction]
pub fn varies(mask: &Traced) -> PyResult<(bool, bool)> {
    let mask = MaskMod::new(&mask.program().trace(0, &DynExpr::leaf)).map_err(raised)?;
    let varies = Varies::of(&mask);
    Ok((varies.by_batch, varies.by_head))
}

/// Queues the making of the runs of live tiles of `mask` on the device of `counts`, int32 `[H|1, B|1, rows]`, and
/// `runs`, int32 `[H|1, B|1, rows, columns, 2]`: the first tile of each run, and twice its tiles, plus 1 where
/// some pair is hidden.
#[pyfunction]
pub fn tile_runs(
    py: Python<'_>,
    mask: &Traced,
    extents: [usize; 4],
    tile: [usize; 2],
    counts: &Bound<'_, PyAny>,
    runs: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let into = [Borrowed::anywhere(counts)?, Borrowed::anywhere(runs)?];
    tiles(py, mask, extents, tile, &into, |plan, queue, captures, arrays| {
        let [batch, _, q_len, kv_len] = extents;
        let into = [arrays[0], arrays[1]];
        plan.tile_runs_on(queue, batch, [q_len, kv_len], tile, captures, into)
    })
}

/// Queues the making of a block mask's tables on their device, contiguous int32:
/// `kv_num_blocks [B, H, rows]`, `kv_indices [B, H, rows, columns]`, `q_num_blocks [B, H, columns]` and
/// `q_indices [B, H, columns, rows]`, and of full tiles the same four, unless these are left out.
#[pyfunction]
pub fn tile_tables(
    py: Python<'_>,
    mask: &Traced,
    extents: [usize; 4],
    tile: [usize; 2],
    tables: Vec<Bound<'_, PyAny>>,
) -> PyResult<()> {
    if ![4, 8].contains(&tables.len()) {
        return Err(PyValueError::new_err("a block mask has four tables, or eight"));
    }
    let into = tables.iter().map(Borrowed::anywhere).collect::<PyResult<Vec<_>>>()?;
    tiles(py, mask, extents, tile, &into, |plan, queue, captures, arrays| {
        let [batch, _, q_len, kv_len] = extents;
        let four = |from: usize| [0, 1, 2, 3].map(|i| arrays[from + i]);
        let full = (arrays.len() == 8).then(|| four(4));
        let into = TileTables { partial: four(0), full };
        plan.tile_tables_on(queue, batch, [q_len, kv_len], tile, captures, &into)
    })
}

/// Queues the making of the table of tiles `into`, contiguous uint8 `[B, H, rows, columns]`, from lists on
/// its device: `kv_num_blocks` and `kv_indices`, and those of full tiles where there are four, int32 of any
/// strides.
pub fn kinds_of_lists(py: Python<'_>, lists: &[Borrowed], into: &Borrowed) -> PyResult<()> {
    let Place::Cuda(device) = into.place else {
        return Err(PyValueError::new_err("the table is on no CUDA device"));
    };
    let pair =
        |at: usize| DeviceBlockLists { counts: array(&lists[at]), tiles: array(&lists[at + 1]) };
    let (partial, full) = (pair(0), (lists.len() == 4).then(|| pair(2)));
    memory::start(py)?;
    let engine = engine(device)?;
    let _current = Current::set(py, device)?;
    let queue = queue(py, &engine, device)?;
    let into = DeviceArray { strides: None, ..array(into) };
    // The first call of a device compiles.
    let run = || computed(|| tile_kinds_on(&engine, &queue, &partial, full.as_ref(), &into));
    py.detach(run)?.map_err(memory::raised)
}

/// Calls `run` with a plan for a mask alone, on the device of contiguous arrays.
fn tiles(
    py: Python<'_>,
    mask: &Traced,
    extents: [usize; 4],
    tile: [usize; 2],
    into: &[Borrowed],
    run: impl FnOnce(
        &CudaPlan,
        &Queue,
        &[(&str, DeviceArray<'_>)],
        &[DeviceArray<'_>],
    ) -> Result<(), CudaError>
    + Send,
) -> PyResult<()> {
    let Place::Cuda(device) = into[0].place else {
        return Err(PyValueError::new_err("the tables are on no CUDA device"));
    };
    if into.iter().any(|of| of.place != into[0].place || !of.is_contiguous()) {
        return Err(PyValueError::new_err("tables must be contiguous, on one device"));
    }
    let [batch, heads, q_len, kv_len] = extents;
    // A mask alone: its plan is never asked for attention, so any head dim and dtype will do.
    let shaped = |len| DeviceTensor::contiguous(0, DType::BF16, [batch, heads.max(1), len, 64]);
    let (q, k) = (shaped(q_len), shaped(kv_len));
    let class = Class {
        device,
        dtype: DType::BF16,
        heads: [heads.max(1); 2],
        dims: [64; 2],
        scale: None,
        dropout: None,
        deterministic: false,
        counted: false,
    };
    memory::start(py)?;
    let mask = Function::of(py, mask, &[], into[0].place)?;
    let kept = Kept::found(&class, &class_dims(&q, &k, &k), [Some(mask.program()), None])?;
    let program = kept.mask.as_ref().expect("the plan was made for a mask");
    let captured: Vec<_> = mask.named(program).collect();
    let captures: Vec<_> =
        captured.iter().map(|(name, held)| (&name[..], array(&held.at))).collect();
    let arrays: Vec<_> = into.iter().map(|of| DeviceArray { strides: None, ..array(of) }).collect();
    let _current = Current::set(py, device)?;
    let queue = queue(py, kept.plan.engine(), device)?;
    let shapes: Vec<_> = captured.iter().map(|(_, h)| (&h.at.shape, &h.at.strides)).collect();
    let mut hasher = DefaultHasher::new();
    ("tiles", extents, tile, into.len(), shapes).hash(&mut hasher);
    let key = hasher.finish();
    memory::forget_error();
    let run = || computed(|| run(&kept.plan, &queue, &captures, &arrays));
    if kept.is_first(key) { py.detach(run) } else { run() }?.map_err(memory::raised)?;
    kept.remember(key);
    Ok(())
}

/// Sizes that plans depend on, and some lengths.
fn class_dims(q: &DeviceTensor, k: &DeviceTensor, v: &DeviceTensor) -> foveate::Dims {
    let [batch, heads_q, len_q, dim] = q.layout.shape;
    foveate::Dims {
        batch,
        heads_q,
        heads_kv: k.layout.shape[1],
        len_q,
        len_k: k.layout.shape[2],
        dim,
        dim_v: v.layout.shape[3],
        shared_kv: false,
        packed: false,
    }
}

impl Plan {
    fn place(&self) -> Place {
        Place::Cuda(self.device)
    }

    /// Calls `run` with the operands of a call on the current stream, and whether it is the first of its
    /// kind; `key` is what else decides its kernels.
    fn run(
        &self,
        py: Python<'_>,
        [q, k, v]: &[Borrowed; 3],
        key: impl Hash,
        run: impl FnOnce(&CudaPlan, &Queue, DeviceOperands<'_>, bool) -> Result<(), CudaError> + Send,
    ) -> PyResult<()> {
        let (q, k, v) = (tensor(q)?, tensor(k)?, tensor(v)?);
        let engine = self.kept.plan.engine();
        let _current = Current::set(py, self.device)?;
        let queue = queue(py, engine, self.device)?;
        let captures: Vec<(&str, DeviceArray<'_>)> =
            self.captures.iter().map(|(name, held)| (&name[..], array(&held.at))).collect();
        let mut operands = DeviceOperands { captures: &captures, ..DeviceOperands::new(q, k, v) };
        operands.sink = self.sink.as_ref().map(|sink| tensor(&sink.at)).transpose()?;
        operands.varlen = self.varlen.as_ref().map(|([q, k], [longest_q, longest_k])| {
            let offsets = |of| DeviceArray { strides: None, ..array(of) };
            let (q, k) = (offsets(&q.at), offsets(&k.at));
            DeviceOffsets { q, k, longest_q: *longest_q, longest_k: *longest_k }.into()
        });
        operands.pages = self.pages.as_ref().map(|(table, lengths)| DevicePages {
            table: table.at.address as u64,
            entries: table.at.shape[1],
            lengths,
        });
        let key = self.key(&operands, key);
        let plan = &self.kept.plan;
        memory::forget_error();
        let done = match self.kept.is_first(key) {
            true => py.detach(|| computed(|| run(plan, &queue, operands, true))),
            false => computed(|| run(plan, &queue, operands, false)),
        };
        done?.map_err(memory::raised)?;
        self.kept.remember(key);
        Ok(())
    }

    /// What decides the kernels of a call.
    fn key(&self, operands: &DeviceOperands<'_>, more: impl Hash) -> u64 {
        let mut hasher = DefaultHasher::new();
        more.hash(&mut hasher);
        for tensor in [&operands.q, &operands.k, &operands.v] {
            layout_key(tensor).hash(&mut hasher);
        }
        for (_, held) in &self.captures {
            (&held.at.shape, &held.at.strides).hash(&mut hasher);
        }
        (self.sink.is_some(), self.pages.is_some()).hash(&mut hasher);
        self.varlen.as_ref().map(|(_, longest)| longest).hash(&mut hasher);
        hasher.finish()
    }
}

/// Shape, strides and alignment of a tensor.
fn layout_key(tensor: &DeviceTensor) -> impl Hash + use<> {
    (tensor.layout.shape, tensor.layout.strides, tensor.start() % 16, tensor.dtype as u8)
}

/// Queues the setting of all rows of a new tensor without gaps to 0.
///
/// # Safety
/// As for [`Stream::fill`]; `rows` is the whole of a tensor that nobody else knows of.
unsafe fn zero(queue: &Queue, rows: &Borrowed) -> Result<(), CudaError> {
    // SAFETY: the caller's promise.
    unsafe { queue.stream().fill(rows.address as u64, 0, rows.span() * rows.dtype.bytes())? };
    Ok(())
}

impl Plan {
    /// The score's captured tensors by name, in the order that a backward has them.
    pub fn captured(&self) -> impl ExactSizeIterator<Item = &str> {
        let slots = self.kept.score.as_ref().map_or(&[][..], |p| p.graph().buffers());
        slots.iter().map(AnyBuffer::name)
    }

    /// [`Self::forward`].
    ///
    /// # Safety
    /// The tensors are held until what is queued is done, `out`, `lse` and `max_score` have no gaps, and nobody
    /// else knows of them.
    pub unsafe fn run_forward(
        &self,
        py: Python<'_>,
        operands: &[Borrowed; 3],
        out: &Borrowed,
        lse: &Borrowed,
        max_score: Option<&Borrowed>,
    ) -> PyResult<()> {
        let args = (tensor(out)?, tensor::<3>(lse)?, max_score.map(tensor::<3>).transpose()?);
        let key = ("forward", self.backward, layout_key(&args.0), max_score.is_some());
        self.run(py, operands, key, |plan, queue, operands, first| {
            let (out_there, lse_there, max_there) = args;
            let args =
                DeviceForward { operands, out: out_there, lse: lse_there, max_score: max_there };
            if first {
                plan.prepare(queue, &args, self.backward)?;
            }
            if self.varlen.is_some() {
                // Of rows past the last sequence nothing is computed.
                for of_rows in [Some(lse), max_score].into_iter().flatten() {
                    let infinity = f32::NEG_INFINITY.to_bits();
                    let (at, elems) = (of_rows.address as u64, of_rows.elems());
                    // SAFETY: the caller's promise, for float32.
                    unsafe { queue.stream().fill_words(at, infinity, elems)? };
                }
                // SAFETY: the caller's promise.
                unsafe { zero(queue, out)? };
            }
            plan.forward_on(queue, &args)
        })
    }

    /// [`Self::backward`].
    ///
    /// # Safety
    /// As [`Backward`] says, until what is queued is done; gradients have no gaps.
    pub unsafe fn run_backward(&self, py: Python<'_>, of: &Backward) -> PyResult<()> {
        let n = self.captured().len();
        if of.captures.len() != n {
            return Err(PyValueError::new_err(format!("one destination for each of {n} captures")));
        }
        let (out, lse, d_out) = (tensor(&of.out)?, tensor::<3>(&of.lse)?, tensor(&of.d_out)?);
        let d_lse = of.d_lse.as_ref().map(tensor::<3>).transpose()?;
        let destination = |into: &Option<Borrowed>| into.as_ref().map(tensor).transpose();
        let [dq, dk, dv] = &of.gradients;
        let [dq, dk, dv] = [destination(dq)?, destination(dk)?, destination(dv)?];
        let d_sink = of.d_sink.as_ref().map(tensor::<1>).transpose()?;
        let vector = |into: &Borrowed| -> PyResult<DeviceTensor<1>> {
            let dtype = into.dtype.operand()?;
            Ok(DeviceTensor::contiguous(into.address as u64, dtype, [into.elems()]))
        };
        let names = self.captured().zip(&of.captures);
        let d_captures = names
            .filter_map(|(name, into)| Some((name, into.as_ref()?)))
            .map(|(name, into)| Ok((name, vector(into)?)))
            .collect::<PyResult<Vec<_>>>()?;
        let layouts = [&out, &d_out].map(layout_key);
        let gradients = [&dq, &dk, &dv].map(|into| into.as_ref().map(layout_key));
        let key =
            ("backward", layouts, gradients, d_lse.is_some(), d_sink.is_some(), d_captures.len());
        self.run(py, &of.operands, key, |plan, queue, operands, _| {
            if self.varlen.is_some() {
                for rows in of.gradients.iter().flatten() {
                    // SAFETY: the caller's promise.
                    unsafe { zero(queue, rows)? };
                }
            }
            let accumulate = false;
            plan.backward_on(
                queue,
                &DeviceBackward {
                    operands,
                    out,
                    lse,
                    d_out,
                    d_lse,
                    dq,
                    dk,
                    dv,
                    accumulate,
                    d_sink,
                    d_captures,
                },
            )
        })
    }
}

#[pymethods]
impl Plan {
    /// Queues the forward: `out [B, Hq, Sq, Dv]`, `lse` and, if it is given, `max_score`, `[B, Hq, Sq]` (f32).
    #[pyo3(signature = (q, k, v, out, lse, max_score = None))]
    fn forward(
        &self,
        py: Python<'_>,
        q: &Bound<'_, PyAny>,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        lse: &Bound<'_, PyAny>,
        max_score: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let on = |tensor, what| Borrowed::on(self.place(), tensor, what);
        let operands = [on(q, "q")?, on(k, "k")?, on(v, "v")?];
        let (out, lse) = (on(out, "out")?, on(lse, "lse")?);
        let max_score = max_score.map(|m| on(m, "max_scores")).transpose()?;
        // SAFETY: torch keeps memory until what its streams were given is done; the results are the
        // package's own, new for this call and dense.
        unsafe { self.run_forward(py, &operands, &out, &lse, max_score.as_ref()) }
    }

    /// Compiles the kernels of [`Self::forward`], and of a backward if one follows. Nothing runs.
    fn prepare(
        &self,
        py: Python<'_>,
        q: &Bound<'_, PyAny>,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        lse: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let on = |tensor, what| Borrowed::on(self.place(), tensor, what);
        let operands = [on(q, "q")?, on(k, "k")?, on(v, "v")?];
        let (out, lse) = (tensor(&on(out, "out")?)?, tensor::<3>(&on(lse, "lse")?)?);
        let key = ("prepare", self.backward, layout_key(&out));
        self.run(py, &operands, key, |plan, queue, operands, _| {
            let args = DeviceForward { operands, out, lse, max_score: None };
            plan.prepare(queue, &args, self.backward)
        })
    }

    /// Queues the backward: those of `dq`, `dk` and `dv` that are given, for each capture of the score that has a
    /// destination in `captures`, contiguous f32, its gradient, and that of the sink. `d_lse` is `[B, Hq, Sq]`, f32.
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
        let of = of.on(self.place())?;
        // SAFETY: as in `forward`.
        unsafe { self.run_backward(py, &of) }
    }

    /// What runs, in words.
    fn explain(&self, py: Python<'_>) -> PyResult<String> {
        let notes = py.detach(|| computed(|| self.kept.plan.notes()))?;
        let device = self.kept.plan.engine().device().info().name.clone();
        let mut said = format!("fused kernels on {device} (cuda:{})", self.device);
        for note in notes {
            said.push('\n');
            said.push_str(&note);
        }
        Ok(said)
    }
}
