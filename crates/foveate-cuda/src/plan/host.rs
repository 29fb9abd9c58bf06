//! Passes on host tensors: copied to the device, computed, copied back.
//!
//! Operands keep their strides on the way, so a packed projection is read on the device as it
//! lies on the host. A destination gets memory of its own of the same strides, filled with a
//! pattern that no result has; what comes back is written through the destination's view, row by
//! row, and that nothing between its rows was touched is checked.

use std::ops::Range;

use foveate_mods::AnyBuffer;
use foveate_problem::{BackwardArgs, Dims, ForwardArgs, Operands, Scales, Sequence};
use foveate_tensor::{
    DType, Data, Layout, Slice, SliceMut, Tensor, TensorMut, TensorRef, Varlen, indices,
};

use super::call::Call;
use super::{CudaPlan, sequences};
use crate::compile::codegen::buffer_bytes;
use crate::error::{CudaError, CudaErrorKind};
use crate::operands::{
    DeviceBackward, DeviceForward, DeviceOffsets, DeviceOperands, DevicePages, DeviceScales,
    DeviceVarlen,
};
use foveate_gpu::driver::{Allocation, Pool};
use foveate_gpu::{DeviceArray, DeviceTensor};
use foveate_gpu::{ElementType, GpuErrorKind};

/// Every byte of a destination before a pass: a NaN in every dtype, with bits that no arithmetic
/// gives.
const UNTOUCHED: u8 = 0xFF;

/// Starts of views keep their distance from a multiple of this, so that the device sees the
/// alignment of the host's layout.
const KEPT_OFFSET: usize = 64;

impl CudaPlan {
    /// Computes `out`, `lse` and, when asked, `max_score`.
    ///
    /// # Errors
    /// When operands or destinations do not fit the plan or each other, or the device fails. Also
    /// when a mod read a captured buffer outside its bounds; the results are written then, the
    /// index clamped.
    pub fn forward(&self, args: ForwardArgs<'_>) -> Result<(), CudaError> {
        self.spec.check_on_host()?;
        // Before anything is copied to the device.
        args.check_destinations(&Dims::of(&args.operands)?)?;
        let queue = self.engine.queue();
        let pool = &self.pool(queue);
        let host = Copies::of(pool, &args.operands)?;
        let captures = self.captures(pool)?;
        let captures = arrays(&captures);
        let table = match args.operands.pages {
            None => None,
            Some(pages) => {
                let allocation = pool.upload(bytemuck::cast_slice(pages.table()))?;
                Some((allocation, pages))
            }
        };
        let offsets = self.offsets(pool, args.operands.varlen)?;
        let mut operands = host.operands(varlen(&offsets, args.operands.varlen));
        operands.pages = table.as_ref().map(|(allocation, pages)| DevicePages {
            table: allocation.address(),
            entries: pages.entries(),
            lengths: pages.lengths(),
        });
        operands.captures = &captures;
        let dims = self.admit(&operands)?;
        let ForwardArgs { operands: from, mut out, mut lse, mut max_score } = args;
        let on_out = Destination::new(pool, &out, stored(out.dtype()), false)?;
        let on_lse = Destination::new(pool, &lse, DType::F32, false)?;
        let on_max = match &max_score {
            None => None,
            Some(max) => Some(Destination::new(pool, max, DType::F32, false)?),
        };
        let device = DeviceForward {
            operands,
            out: on_out.tensor,
            lse: on_lse.tensor,
            max_score: on_max.as_ref().map(|m| m.tensor),
        };
        let plan = self.bound(operands.captures)?;
        let told = plan.launch_forward(&Call::new(queue, &dims, &operands, true)?, &device);
        let told = self.results(told)?;
        let rows = Rows::new(&dims, &sequences(&dims, from.arrangement()));
        on_out.download("out", &rows.q, self, whole_row(&mut out))?;
        on_lse.download("lse", &rows.q, self, number(&mut lse))?;
        if let (Some(on_max), Some(max)) = (on_max, &mut max_score) {
            on_max.download("max_score", &rows.q, self, number(max))?;
        }
        told
    }

    /// Computes `dq`, `dk`, `dv` and, when asked, the gradients of the sink and of learned
    /// captured buffers.
    ///
    /// # Errors
    /// When operands or destinations do not fit the plan or each other, the score cannot be
    /// differentiated, or the device fails. Also when a mod read a captured buffer outside its
    /// bounds; the gradients are written then, the index clamped.
    pub fn backward(&self, args: BackwardArgs<'_>) -> Result<(), CudaError> {
        self.spec.check_on_host()?;
        args.check_destinations(&Dims::of(&args.operands)?, &self.spec)?;
        self.differentiable()?;
        let queue = self.engine.queue();
        let pool = &self.pool(queue);
        let host = Copies::of(pool, &args.operands)?;
        let captures = self.captures(pool)?;
        let captures = arrays(&captures);
        let offsets = self.offsets(pool, args.operands.varlen)?;
        let operands = DeviceOperands {
            captures: &captures,
            ..host.operands(varlen(&offsets, args.operands.varlen))
        };
        let dims = self.admit(&operands)?;
        let BackwardArgs { operands: from, out, lse, d_out, d_lse, accumulate, .. } = args;
        let (mut dq, mut dk, mut dv) = (args.dq, args.dk, args.dv);
        let (mut d_sink, mut d_captures) = (args.d_sink, args.d_captures);
        let out = Copy::of_dtype(pool, &out, self.dtype)?;
        let d_out = Copy::of_dtype(pool, &d_out, self.dtype)?;
        let lse = Copy::new(pool, &lse)?;
        let d_lse = d_lse.map(|d_lse| Copy::new(pool, &d_lse)).transpose()?;
        let dtypes = [&dq, &dk, &dv].into_iter().flatten().map(|t| stored(t.dtype()));
        let mut dtypes: Vec<DType> = dtypes.collect();
        dtypes.dedup();
        let dtype = if let [dtype] = dtypes[..] { dtype } else { DType::F32 };
        let on_device = |wanted: &Option<TensorMut<'_>>| {
            let wanted = wanted.as_ref();
            wanted.map(|into| Destination::new(pool, into, dtype, accumulate)).transpose()
        };
        let [on_dq, on_dk, on_dv] = [on_device(&dq)?, on_device(&dk)?, on_device(&dv)?];
        let tensor = |on: &Option<Destination<4>>| on.as_ref().map(|on| on.tensor);
        // Sums in f32, which are added to a destination and rounded there.
        let vector = |into: &SliceMut<'_>| -> Result<(Allocation, DeviceTensor<1>), CudaError> {
            let allocation = pool.upload(&vec![0; 4 * into.len()])?;
            let tensor = DeviceTensor::contiguous(allocation.address(), DType::F32, [into.len()]);
            Ok((allocation, tensor))
        };
        let on_sink = d_sink.as_ref().map(vector).transpose()?;
        let on_captures: Vec<_> =
            d_captures.iter().map(|grad| vector(&grad.into)).collect::<Result<_, _>>()?;
        let names = d_captures.iter().map(|grad| grad.name);
        let device = DeviceBackward {
            operands,
            out: out.tensor,
            lse: lse.tensor,
            d_out: d_out.tensor,
            d_lse: d_lse.as_ref().map(|d| d.tensor),
            dq: tensor(&on_dq),
            dk: tensor(&on_dk),
            dv: tensor(&on_dv),
            accumulate,
            d_sink: on_sink.as_ref().map(|(_, tensor)| *tensor),
            d_captures: names.zip(on_captures.iter().map(|(_, tensor)| *tensor)).collect(),
        };
        let plan = self.bound(operands.captures)?;
        let told = plan.launch_backward(&Call::new(queue, &dims, &operands, true)?, &device);
        let told = self.results(told)?;
        let rows = Rows::new(&dims, &sequences(&dims, from.arrangement()));
        for (name, on, rows, into) in [
            ("dq", &on_dq, &rows.q, &mut dq),
            ("dk", &on_dk, &rows.k, &mut dk),
            ("dv", &on_dv, &rows.k, &mut dv),
        ] {
            if let (Some(on), Some(into)) = (on, into) {
                on.download(name, rows, self, whole_row(into))?;
            }
        }
        let fetch = |allocation: &Allocation, into: &mut SliceMut<'_>| {
            let mut sums = vec![0f32; into.len()];
            let read = allocation.read(bytemuck::cast_slice_mut(&mut sums), self.options.timeout);
            read.map(|()| into.store(&sums, accumulate))
        };
        if let (Some((allocation, _)), Some(into)) = (&on_sink, &mut d_sink) {
            fetch(allocation, into)?;
        }
        for ((allocation, _), grad) in on_captures.iter().zip(&mut d_captures) {
            fetch(allocation, &mut grad.into)?;
        }
        told
    }

    /// The captured buffers in device memory, when they are to be used from there. Those that share
    /// a name with another stay with the plan.
    fn captures(&self, pool: &Pool) -> Result<Vec<(Allocation, &AnyBuffer)>, CudaError> {
        let all: Vec<&AnyBuffer> = self.spec.programs().flat_map(|p| p.graph().buffers()).collect();
        let mut copies: Vec<(Allocation, &AnyBuffer)> = Vec::new();
        for buffer in all.iter().filter(|_| self.forced.contents_on_device) {
            let alone = all.iter().all(|b| b.name() != buffer.name() || b.same(buffer));
            if alone && !copies.iter().any(|(_, b)| b.same(buffer)) {
                copies.push((pool.upload(&buffer_bytes(buffer))?, buffer));
            }
        }
        Ok(copies)
    }

    /// The offsets of packed operands in device memory, when they are to be used from there.
    fn offsets(
        &self,
        pool: &Pool,
        varlen: Option<Varlen<'_>>,
    ) -> Result<Option<CopiedOffsets>, CudaError> {
        let Some(varlen) = varlen.filter(|_| self.forced.contents_on_device) else {
            return Ok(None);
        };
        let copy = |rows: &dyn Fn(usize) -> Range<usize>, all: &[i32]| {
            let longest = (0..varlen.sequences()).map(|b| rows(b).len()).max().unwrap_or(0);
            Ok::<_, CudaError>((pool.upload(bytemuck::cast_slice(all))?, longest))
        };
        let (q, longest_q) = copy(&|b| varlen.q_rows(b), varlen.cu_q())?;
        let (k, longest_k) = copy(&|b| varlen.k_rows(b), varlen.cu_k())?;
        let count = [varlen.sequences() + 1];
        Ok(Some(CopiedOffsets { q, k, count, longest_q, longest_k }))
    }

    /// The outcome of a pass whose results are there; an error when they are not.
    fn results(&self, told: Result<(), CudaError>) -> Result<Result<(), CudaError>, CudaError> {
        match &told {
            Err(e) if !matches!(e.kind(), CudaErrorKind::OutOfRange { .. }) => Err(e.clone()),
            _ => Ok(told),
        }
    }
}

/// Captured buffers as a call takes them.
fn arrays<'a>(captures: &'a [(Allocation, &'a AnyBuffer)]) -> Vec<(&'a str, DeviceArray<'a>)> {
    let array = |allocation: &Allocation, b: &'a AnyBuffer| {
        let address = allocation.address();
        let strides = Some(b.strides()).filter(|_| !b.is_dense());
        DeviceArray { strides, ..DeviceArray::new(address, b.element(), b.shape()) }
    };
    captures.iter().map(|(allocation, b)| (b.name(), array(allocation, b))).collect()
}

/// Offsets in device memory.
struct CopiedOffsets {
    q: Allocation,
    k: Allocation,
    count: [usize; 1],
    longest_q: usize,
    longest_k: usize,
}

/// Offsets as a call takes them: those in device memory where there are any.
fn varlen<'a>(
    copied: &'a Option<CopiedOffsets>,
    known: Option<Varlen<'a>>,
) -> Option<DeviceVarlen<'a>> {
    let Some(CopiedOffsets { q, k, count, longest_q, longest_k }) = copied else {
        return known.map(Into::into);
    };
    let (longest_q, longest_k) = (*longest_q, *longest_k);
    let [q, k] =
        [q, k].map(|allocation| DeviceArray::new(allocation.address(), ElementType::I32, count));
    Some(DeviceOffsets { q, k, longest_q, longest_k }.into())
}

/// What the device stores for a destination of `dtype`.
fn stored(dtype: DType) -> DType {
    if matches!(dtype, DType::F8E4M3 | DType::F64) { DType::F32 } else { dtype }
}

fn bytes_of(slice: Slice<'_>) -> &[u8] {
    match slice {
        Slice::F32(v) => bytemuck::cast_slice(v),
        Slice::F16(v) => bytemuck::cast_slice(v),
        Slice::BF16(v) => bytemuck::cast_slice(v),
        Slice::F8E4M3(v) => bytemuck::cast_slice(v),
        Slice::F64(v) => bytemuck::cast_slice(v),
    }
}

/// The stretch of storage that a layout reaches, and the layout in it.
fn cut<const N: usize>(layout: &Layout<N>) -> (Range<usize>, Layout<N>) {
    let end = layout.end().expect("views are checked when they are made");
    let offset = layout.offset % KEPT_OFFSET;
    let start = (layout.offset - offset).min(end);
    (start..end, Layout { offset, ..*layout })
}

/// A host view on the device, where it has the same strides.
struct Copy<const N: usize> {
    _memory: Allocation,
    tensor: DeviceTensor<N>,
}

impl<const N: usize> Copy<N> {
    fn new(pool: &Pool, view: &TensorRef<'_, N>) -> Result<Self, CudaError> {
        let (range, layout) = cut(view.layout());
        let bytes = view.dtype().bytes();
        let all = bytes_of(view.data());
        let memory = pool.upload(&all[range.start * bytes..range.end * bytes])?;
        let tensor = DeviceTensor { address: memory.address(), dtype: view.dtype(), layout };
        Ok(Self { _memory: memory, tensor })
    }

    /// Rounded to `dtype` first when it has another.
    fn of_dtype(pool: &Pool, view: &TensorRef<'_, N>, dtype: DType) -> Result<Self, CudaError> {
        if view.dtype() == dtype {
            return Self::new(pool, view);
        }
        let rounded = Tensor::<N>::from_fn(dtype, view.shape(), |index| view.get_f64(index));
        Self::new(pool, &rounded.view())
    }
}

/// Operands on the device.
struct Copies {
    q: Copy<4>,
    k: Copy<4>,
    v: Copy<4>,
    sink: Option<(Allocation, DeviceTensor<1>)>,
    scales: Option<([Allocation; 3], DeviceScales)>,
}

impl Copies {
    fn of(pool: &Pool, operands: &Operands<'_>) -> Result<Self, CudaError> {
        let sink = match operands.sink {
            None => None,
            Some(sink) => {
                let logits: Vec<f32> = (0..sink.len()).map(|h| sink.get_f64(h) as f32).collect();
                let allocation = pool.upload(bytemuck::cast_slice(&logits))?;
                let tensor =
                    DeviceTensor::contiguous(allocation.address(), DType::F32, [sink.len()]);
                Some((allocation, tensor))
            }
        };
        let scales = match operands.scales {
            None => None,
            Some(Scales { q, k, v, blocks }) => {
                let dims = Dims::of(operands)?;
                let [of_q, of_k, of_v] = blocks.shapes(&dims, dims.longest(operands.varlen))?;
                let upload = |scales: &[f32], shape: [usize; 3]| -> Result<_, CudaError> {
                    let memory = pool.upload(bytemuck::cast_slice(scales))?;
                    let tensor = DeviceTensor::contiguous(memory.address(), DType::F32, shape);
                    Ok((memory, tensor))
                };
                let [(at_q, q), (at_k, k), (at_v, v)] =
                    [upload(q, of_q)?, upload(k, of_k)?, upload(v, of_v)?];
                Some(([at_q, at_k, at_v], DeviceScales { q, k, v, blocks }))
            }
        };
        Ok(Self {
            scales,
            q: Copy::new(pool, &operands.q)?,
            k: Copy::new(pool, &operands.k)?,
            v: Copy::new(pool, &operands.v)?,
            sink,
        })
    }

    fn operands<'a>(&self, varlen: Option<DeviceVarlen<'a>>) -> DeviceOperands<'a> {
        DeviceOperands {
            sink: self.sink.as_ref().map(|(_, tensor)| *tensor),
            scales: self.scales.as_ref().map(|(_, scales)| *scales),
            varlen,
            ..DeviceOperands::new(self.q.tensor, self.k.tensor, self.v.tensor)
        }
    }
}

/// Rows of the length axes that belong to a sequence.
struct Rows {
    q: Vec<Range<usize>>,
    k: Vec<Range<usize>>,
}

impl Rows {
    fn new(dims: &Dims, sequences: &[Sequence]) -> Self {
        // The sequences of operands that are not packed have the same rows.
        let count = if dims.packed { sequences.len() } else { sequences.len().min(1) };
        let owned = &sequences[..count];
        Self {
            q: owned.iter().map(|s| s.q_start..s.q_start + s.q_len).collect(),
            k: owned.iter().map(|s| s.k_start..s.k_start + s.k_len).collect(),
        }
    }
}

/// Memory for a destination on the device, with its strides.
struct Destination<const N: usize> {
    memory: Allocation,
    tensor: DeviceTensor<N>,
    /// What was there before the pass, when it was not [`UNTOUCHED`].
    before: Option<Data>,
}

impl<const N: usize> Destination<N> {
    /// Untouched memory in `dtype`; with `filled`, what the destination holds.
    fn new(
        pool: &Pool,
        to: &TensorMut<'_, N>,
        dtype: DType,
        filled: bool,
    ) -> Result<Self, CudaError> {
        let (range, layout) = cut(to.layout());
        let memory = pool.take(range.len() * dtype.bytes())?;
        let before = match filled {
            false => {
                memory.fill(UNTOUCHED)?;
                None
            }
            true => {
                let mut held = Data::filled(dtype, range.len(), 0.0);
                bytes_mut(&mut held).fill(UNTOUCHED);
                let mut view = TensorMut::new(&mut held, layout).map_err(refused)?;
                indices(layout.shape).for_each(|index| view.write(index, to.get_f64(index)));
                memory.write(bytes_of((&held).into()))?;
                Some(held)
            }
        };
        let tensor = DeviceTensor { address: memory.address(), dtype, layout };
        Ok(Self { memory, tensor, before })
    }

    /// Writes the rows of sequences to the destination with `write`, which is given a row's place
    /// on every axis but the last one. Checks that nothing between them was touched.
    fn download(
        &self,
        name: &str,
        rows: &[Range<usize>],
        plan: &CudaPlan,
        mut write: impl FnMut(&TensorRef<'_, N>, [usize; 3]),
    ) -> Result<(), CudaError> {
        let DeviceTensor { dtype, layout, .. } = self.tensor;
        let size = dtype.bytes();
        let len = layout.end().expect("checked when it was made");
        let mut data = Data::filled(dtype, len, 0.0);
        self.memory.read(bytes_mut(&mut data), plan.options.timeout)?;
        let mut covered = 0;
        let from = TensorRef::new(&data, layout).map_err(refused)?;
        let width = layout.shape.get(3).copied().unwrap_or(1);
        for range in rows {
            for [b, h, s] in indices([layout.shape[0], layout.shape[1], range.len()]) {
                write(&from, [b, h, s + range.start]);
                covered += width;
            }
        }
        if covered == len {
            return Ok(());
        }
        let before = self.before.as_ref().map(|before| bytes_of(before.into()));
        let held = |at: usize| before.map_or(UNTOUCHED, |before| before[at]);
        let after = bytes_mut(&mut data);
        for range in rows {
            let mut shape = layout.shape;
            shape[2] = range.len();
            for mut index in indices(shape) {
                index[2] += range.start;
                let at = layout.at(index) * size;
                (at..at + size).for_each(|i| after[i] = held(i));
            }
        }
        match after.iter().enumerate().position(|(i, &byte)| byte != held(i)) {
            None => Ok(()),
            Some(at) => Err(GpuErrorKind::Resources {
                kernel: name.to_owned(),
                reason: format!("element {} lies outside the view and was written", at / size),
            }
            .into()),
        }
    }
}

/// Writes a row of a tensor.
fn whole_row<'a, 'd>(
    to: &'a mut TensorMut<'d>,
) -> impl FnMut(&TensorRef<'_>, [usize; 3]) + use<'a, 'd> {
    let mut row = vec![0.0; to.shape()[3]];
    move |from, [b, h, s]| {
        from.load_row(b, h, s, &mut row);
        to.write_row(b, h, s, &row, false);
    }
}

/// Writes the number of a row.
fn number<'a, 'd>(
    to: &'a mut TensorMut<'d, 3>,
) -> impl FnMut(&TensorRef<'_, 3>, [usize; 3]) + use<'a, 'd> {
    move |from, index| to.write(index, from.get_f64(index))
}

fn bytes_mut(data: &mut Data) -> &mut [u8] {
    match data {
        Data::F32(v) => bytemuck::cast_slice_mut(v),
        Data::F16(v) => bytemuck::cast_slice_mut(v),
        Data::BF16(v) => bytemuck::cast_slice_mut(v),
        Data::F8E4M3(v) => bytemuck::cast_slice_mut(v),
        Data::F64(v) => bytemuck::cast_slice_mut(v),
    }
}

fn refused(e: foveate_tensor::TensorError) -> CudaError {
    CudaError::argument(e.to_string())
}
