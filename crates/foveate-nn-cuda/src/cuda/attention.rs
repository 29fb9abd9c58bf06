//! Attention on strided views of the packed projection, with learned buffers in device memory.

use foveate::cuda::choose::KernelOptions;
use foveate::cuda::{CudaError, CudaPlan, DeviceBackward, DeviceForward, DeviceOperands};
use foveate::mods::Leaf;
use foveate::{
    AnyBuffer, Buffer, BufferData, Coordinates, DType, Device, Layout, Positions, Problem,
    ScalarValue,
};
use foveate_gpu::abi::Address;
use foveate_gpu::driver::Allocation;
use foveate_gpu::{DeviceArray, DeviceTensor, ElementType, Queue};
use foveate_nn::{
    AttentionProgram, AttentionShape, ContextPlan, DOCUMENTS, KvCache, LayerAttention,
    LearnedBuffer, NnError, NnErrorKind, PackedHeads, Part, PartMut,
};

use super::Cuda;
use super::array::{CudaArray, Place, rows_of};
use super::batch::Words;
use super::clock::Timed;
use crate::vectors::{Add, CopyRows, Widen};

/// An attention program planned for a GPU. Cheap to clone.
#[derive(Clone, Debug)]
pub struct AttentionPlan {
    plan: CudaPlan,
    reads_documents: bool,
    reads_query: bool,
    /// Captured buffers by name, but for learned ones.
    captured: Vec<(&'static str, Words)>,
}

/// Buffers of positions of the rank's queries and of the keys that they see.
pub(super) const POSITIONS: [&str; 2] = ["shard_q_positions", "shard_kv_positions"];

/// Learned buffers in device memory, f32, one after another.
pub(super) struct Learned<'a> {
    pub buffers: &'a [(String, LearnedBuffer)],
    pub values: Address,
    /// Their gradients, as they lie; overwritten.
    pub gradients: Address,
}

/// Whether mask or score read the place of the query.
fn reads_query(program: &AttentionProgram) -> bool {
    let mask = program.mask.as_ref().is_some_and(|mask| mask.program().uses(Leaf::Q));
    mask || program.score.as_ref().is_some_and(|score| score.program().uses(Leaf::Q))
}

/// Whether mods of a plan capture a buffer of this name.
fn captures(plan: &CudaPlan, name: &str) -> bool {
    let mut programs = plan.spec().programs();
    programs.any(|program| program.graph().buffers().iter().any(|b| b.name() == name))
}

/// `plan`, with the learned buffers of its program in device memory.
fn with_learned(mut plan: CudaPlan, program: &AttentionProgram) -> Result<CudaPlan, NnError> {
    for (name, LearnedBuffer { shape, .. }) in &program.learned {
        let buffer = AnyBuffer::on_device(name, shape, ElementType::F32, true)?;
        plan = plan.rebind(&buffer).map_err(|e| error(&e))?;
    }
    Ok(plan)
}

/// A line that names what failed.
fn error(e: &CudaError) -> NnError {
    NnErrorKind::Device(format!("attention: {e}")).into()
}

impl AttentionPlan {
    /// A plan for batches of a shape, or for a cache that holds one document.
    pub fn new(
        program: &AttentionProgram,
        shape: &AttentionShape,
        (ordinal, dtype, deterministic): (usize, DType, bool),
    ) -> Result<Self, NnError> {
        let AttentionShape { heads, mean_kv_len, cached, .. } = *shape;
        let PackedHeads { rows, len, heads_q, heads_kv, dim } = heads;
        let mut attention = shape.attention(program).deterministic(deterministic);
        if let Some(keys) = mean_kv_len {
            attention = attention.mean_kv_len(keys);
        }
        let kv = [rows, heads_kv, len, dim];
        let mut problem = Problem::shaped(dtype, [rows, heads_q, len, dim], kv, kv)?;
        if cached {
            attention = attention.positions(Positions::offset(0), Positions::Rows);
            problem = problem.forward_only();
        }
        let planned = attention.plan(&problem, &Device::cuda(ordinal))?;
        let mut plan = planned.cuda().expect("it was planned for a GPU").clone();
        let reads_documents = program.reads_documents();
        // What the host holds of a buffer says nothing of what the device will.
        if reads_documents {
            let documents = match cached {
                true => AnyBuffer::new(
                    DOCUMENTS,
                    &[rows, len],
                    BufferData::I32(vec![0; rows * len]),
                    false,
                )?,
                false => AnyBuffer::on_device(DOCUMENTS, &[rows, len], ElementType::I32, false)?,
            };
            plan = plan.rebind(&documents).map_err(|e| error(&e))?;
        }
        let plan = with_learned(plan, program)?;
        let (reads_documents, captured) = (reads_documents && !cached, Vec::new());
        Ok(Self { plan, reads_documents, reads_query: reads_query(program), captured })
    }

    /// The same, by the kernels that are asked for. That they fit is found out at the first call.
    pub(super) fn by(self, kernels: KernelOptions) -> Self {
        Self { plan: self.plan.with_kernels(kernels), ..self }
    }

    /// Keys that a query sees, as a plan over ranks expects them: a power of two, so that batches of other
    /// documents have few plans.
    pub(super) fn expected_keys(plan: &ContextPlan) -> usize {
        plan.mean_kv_len.next_power_of_two()
    }

    /// A plan for queries of a rank and keys of all of them, in batches of `plan`'s shape; `first_heads` are
    /// their places among the model's. Documents and positions come with [`Self::capturing`].
    pub(super) fn over_ranks(
        program: &AttentionProgram,
        heads: PackedHeads,
        first_heads: [usize; 2],
        plan: &ContextPlan,
        (ordinal, dtype, deterministic): (usize, DType, bool),
    ) -> Result<Self, NnError> {
        let PackedHeads { rows, len, heads_q, heads_kv, dim } = heads;
        let [all_rows, all] = plan.whole;
        let count = |n: usize| i32::try_from(n).expect("a batch is counted in i32");
        let offset = |first: usize| Positions::offset(count(first));
        let [q, kv] = POSITIONS.map(|name| Positions::map(Buffer::vector(name, vec![0])));
        let [h, h_kv] = first_heads.map(offset);
        let coordinates = Coordinates::new()
            .batch(offset(plan.first_row))
            .heads(h, h_kv)
            .q(q?)
            .kv(kv?)
            .lengths(count(all), count(all));
        let attention = program.attention().deterministic(deterministic);
        let attention = attention.coordinates(coordinates).mean_kv_len(Self::expected_keys(plan));
        let kv = [rows, heads_kv, all, dim];
        let problem = Problem::shaped(dtype, [rows, heads_q, len, dim], kv, kv)?;
        let planned = attention.plan(&problem, &Device::cuda(ordinal))?;
        let mut plan = planned.cuda().expect("it was planned for a GPU").clone();
        let shapes: [(_, &[usize]); 3] =
            [(DOCUMENTS, &[all_rows, all]), (POSITIONS[0], &[len]), (POSITIONS[1], &[all])];
        for (name, shape) in shapes {
            if captures(&plan, name) {
                let buffer = AnyBuffer::on_device(name, shape, ElementType::I32, false)?;
                plan = plan.rebind(&buffer).map_err(|e| error(&e))?;
            }
        }
        let (plan, captured) = (with_learned(plan, program)?, Vec::new());
        Ok(Self { plan, reads_documents: false, reads_query: false, captured })
    }

    /// Over no batch.
    pub(super) fn unbound(&self) -> Self {
        Self { captured: Vec::new(), ..self.clone() }
    }

    /// Whether it is the same plan as `other`, over whatever batch.
    pub(super) fn is_of(&self, other: &Self) -> bool {
        self.plan.is_clone_of(&other.plan)
    }

    /// The kernels that it runs, forward and backward.
    pub(super) fn kernels(&self) -> Result<String, NnError> {
        let all = self.plan.configurations().map_err(|e| error(&e))?;
        let words: Vec<String> = all.iter().map(|config| config.to_string()).collect();
        Ok(words.join("; "))
    }

    /// Over the documents of a batch.
    pub(super) fn over(&self, documents: Words) -> Self {
        let captured = self.reads_documents.then_some((DOCUMENTS, documents));
        Self { captured: captured.into_iter().collect(), ..self.clone() }
    }

    /// With those of some buffers that it captures.
    pub(super) fn capturing(&self, buffers: &[(&'static str, &Words)]) -> Self {
        let read = buffers.iter().filter(|(name, _)| captures(&self.plan, name));
        let captured = read.map(|&(name, words)| (name, words.clone())).collect();
        Self { captured, ..self.clone() }
    }

    /// For queries that start at `position`.
    pub(super) fn at(&self, position: usize) -> Result<Self, NnError> {
        if !self.reads_query {
            return Ok(self.clone());
        }
        let at = ScalarValue::I32(position as i32);
        let plan = self.plan.set_scalar("q_offset", at).map_err(|e| error(&e))?;
        Ok(Self { plan, ..self.clone() })
    }

    /// Queues the forward pass.
    pub(super) fn forward(
        &self,
        queue: &Queue,
        [q, k, v]: [DeviceTensor; 3],
        learned: &Learned<'_>,
        out: DeviceTensor,
        lse: DeviceTensor<3>,
    ) -> Result<(), NnError> {
        let captures = self.captures(learned);
        let operands = DeviceOperands { captures: &captures, ..DeviceOperands::new(q, k, v) };
        let args = DeviceForward { operands, out, lse, max_score: None };
        self.plan.forward_on(queue, &args).map_err(|e| error(&e))
    }

    /// Queues the backward pass.
    pub(super) fn backward(
        &self,
        queue: &Queue,
        [q, k, v]: [DeviceTensor; 3],
        learned: &Learned<'_>,
        (out, lse, d_out): (DeviceTensor, DeviceTensor<3>, DeviceTensor),
        [dq, dk, dv]: [DeviceTensor; 3],
    ) -> Result<(), NnError> {
        let captures = self.captures(learned);
        let operands = DeviceOperands { captures: &captures, ..DeviceOperands::new(q, k, v) };
        let gradient = |(name, shape, first): (_, &'_ [usize], usize)| {
            let address = learned.gradients + 4 * first as Address;
            let elems = shape.iter().product();
            (name, DeviceTensor::<1>::contiguous(address, DType::F32, [elems]))
        };
        let args = DeviceBackward {
            operands,
            out,
            lse,
            d_out,
            d_lse: None,
            dq: Some(dq),
            dk: Some(dk),
            dv: Some(dv),
            accumulate: false,
            d_sink: None,
            d_captures: learned.each().map(gradient).collect(),
        };
        self.plan.backward_on(queue, &args).map_err(|e| error(&e))
    }

    fn captures<'a>(&'a self, learned: &Learned<'a>) -> Vec<(&'a str, DeviceArray<'a>)> {
        let captured = self.captured.iter().map(|(name, words)| (*name, words.array()));
        let array = |(name, shape, first): (&'a str, &'a [usize], usize)| {
            let address = learned.values + 4 * first as Address;
            (name, DeviceArray::new(address, ElementType::F32, shape))
        };
        captured.chain(learned.each().map(array)).collect()
    }
}

impl<'a> Learned<'a> {
    /// Name, shape and first element of each.
    fn each(&self) -> impl Iterator<Item = (&'a str, &'a [usize], usize)> + use<'a> {
        self.buffers.iter().scan(0, |next, (name, LearnedBuffer { shape, .. })| {
            let first = *next;
            *next += shape.iter().product::<usize>();
            Some((name.as_str(), shape.as_slice(), first))
        })
    }
}

/// Queries, keys and values in a packed projection at `address`.
pub(super) fn packed(heads: PackedHeads, address: Address, dtype: DType) -> [DeviceTensor; 3] {
    let PackedHeads { rows, len, heads_q, heads_kv, dim } = heads;
    let width = heads.width();
    let of = |heads, first| {
        let strides = [len * width, dim, width, 1];
        let layout = Layout::strided([rows, heads, len, dim], strides, first * dim);
        DeviceTensor { address, dtype, layout }
    };
    [of(heads_q, 0), of(heads_kv, heads_q), of(heads_kv, heads_q + heads_kv)]
}

/// `[1, heads, len, dim]` in rows of `width` elements.
pub(super) fn rows(
    [heads, len, dim]: [usize; 3],
    width: usize,
    address: Address,
    dtype: DType,
) -> DeviceTensor {
    let layout = Layout::strided([1, heads, len, dim], [len * width, dim, width, 1], 0);
    DeviceTensor { address, dtype, layout }
}

/// The output of attention, `[rows, len, heads_q, dim]`.
pub(super) fn output(heads: PackedHeads, address: Address, dtype: DType) -> DeviceTensor {
    let PackedHeads { rows, len, heads_q, dim, .. } = heads;
    let width = heads_q * dim;
    let layout = Layout::strided([rows, heads_q, len, dim], [len * width, dim, width, 1], 0);
    DeviceTensor { address, dtype, layout }
}

/// `[rows, heads_q, len]`.
pub(super) fn statistics(heads: PackedHeads, address: Address) -> DeviceTensor<3> {
    DeviceTensor::contiguous(address, DType::F32, [heads.rows, heads.heads_q, heads.len])
}

impl Cuda {
    /// Learned buffers as f32 numbers: where they are, and their gradients; the memory of both.
    pub(super) fn learned(
        &self,
        values: &Part<'_, CudaArray>,
        backward: bool,
    ) -> Result<(Address, Address, [Option<Allocation>; 2]), NnError> {
        let elems = values.place.len();
        if elems == 0 {
            return Ok((0, 0, [None, None]));
        }
        let values = values.vector();
        let gradients = backward
            .then(|| self.scratch("gradients of learned buffers", 4 * elems))
            .transpose()?;
        let (at_values, wide) = if values.dtype == DType::F32 {
            (values.start(), None)
        } else {
            let wide = self.scratch("learned buffers", 4 * elems)?;
            let to = DeviceTensor::contiguous(wide.address(), DType::F32, [elems]);
            self.run(&Widen { from: values, to })?;
            (wide.address(), Some(wide))
        };
        let at_gradients = gradients.as_ref().map_or(0, Allocation::address);
        Ok((at_values, at_gradients, [wide, gradients]))
    }

    /// Queues attention; with a cache, of new positions over all that it holds.
    pub(super) fn attend(
        &mut self,
        layer: LayerAttention<'_, Self>,
        qkv: &CudaArray,
        cache: Option<KvCache<'_, CudaArray>>,
        out: &mut CudaArray,
        lse: &mut CudaArray,
    ) -> Result<(), NnError> {
        let (heads, dtype) = (layer.heads, qkv.dtype);
        let PackedHeads { len, heads_q, heads_kv, dim, .. } = heads;
        let mut operands = packed(heads, qkv.vector().start(), dtype);
        if let Some(KvCache { keys, values, position }) = cache {
            let width = heads_kv * dim;
            for (new, cached) in [(1, &*keys), (2, &*values)] {
                let from = DeviceTensor {
                    address: operands[new].start(),
                    dtype,
                    layout: foveate::Layout::strided([len, width], [heads.width(), 1], 0),
                };
                self.run(&CopyRows { from, to: rows_of(&cached.rows(width), position, len) })?;
                let shape = [heads_kv, position + len, dim];
                operands[new] = rows(shape, width, cached.vector().start(), dtype);
            }
            operands[0] = rows([heads_q, len, dim], heads.width(), operands[0].start(), dtype);
        }
        let out = output(heads, out.vector().start(), dtype);
        let lse = statistics(heads, lse.vector().start());
        self.timed(Timed::Attention, |this| {
            let (values, gradients, _memory) = this.learned(&layer.values, false)?;
            let learned = Learned { buffers: layer.program.learned, values, gradients };
            layer.program.plan.forward(&this.queue, operands, &learned, out, lse)
        })
    }

    /// Queues its gradients; those of learned buffers are added to `d_learned`.
    pub(super) fn attend_backward(
        &mut self,
        layer: LayerAttention<'_, Self>,
        qkv: &CudaArray,
        (out, lse, d_out): (&CudaArray, &CudaArray, &CudaArray),
        d_qkv: &mut CudaArray,
        d_learned: PartMut<'_, CudaArray>,
    ) -> Result<(), NnError> {
        let (heads, dtype) = (layer.heads, qkv.dtype);
        let operands = packed(heads, qkv.vector().start(), dtype);
        let destinations = packed(heads, d_qkv.vector().start(), dtype);
        let of_rows = (
            output(heads, out.vector().start(), dtype),
            statistics(heads, lse.vector().start()),
            output(heads, d_out.vector().start(), dtype),
        );
        self.timed(Timed::AttentionBackward, |this| {
            let (values, gradients, _memory) = this.learned(&layer.values, true)?;
            let learned = Learned { buffers: layer.program.learned, values, gradients };
            let plan = layer.program.plan;
            plan.backward(&this.queue, operands, &learned, of_rows, destinations)?;
            this.add_learned(gradients, &d_learned)
        })
    }

    /// Queues that gradients of learned buffers are added to those before.
    pub(super) fn add_learned(
        &self,
        gradients: Address,
        to: &PartMut<'_, CudaArray>,
    ) -> Result<(), NnError> {
        let [elems] = to.vector().layout.shape;
        if elems == 0 {
            return Ok(());
        }
        let from = DeviceTensor::contiguous(gradients, DType::F32, [elems]);
        self.begin_sums(to)?;
        self.run(&Add { from, to: to.vector() })
    }
}
