//! The blocks on an NVIDIA GPU: what [`foveate_nn::Blocks`] asks for, queued on one stream.
//!
//! Every array is memory of the queue's pool. What a block needs besides its operands is taken from
//! there when the block is queued and given back at once: whoever gets it next queues its work
//! behind. A step whose sizes were there before so allocates nothing, and since the pool gives memory
//! to work of its own queue only, nothing waits either, but [`Blocks::read`] and downloads.
//!
//! Products are cuBLASLt's, attention is `foveate-cuda`'s on strided views of the packed projection,
//! all else this crate's kernels.

mod array;
mod attention;
mod batch;
mod clock;
mod loss;
#[cfg(test)]
mod tests;
mod transfer;

use std::sync::Arc;

use foveate_gpu::abi::{Abi, Address};
use foveate_gpu::blas::Matmul;
use foveate_gpu::driver::{Allocation, Readback, default_timeout};
use foveate_gpu::{DeviceArray, DeviceTensor, ElementType, Engine, GpuError, GpuErrorKind, Queue};
use foveate_nn::{
    Activation as NnActivation, Array, AttentionProgram, AttentionShape, Batch, BlockTime, Blocks,
    KvCache, LayerAttention, LinearShape, Moment, MomentDtype, Moments, NnError, NnErrorKind, Norm,
    OptimizerStep, PackedHeads, Part, PartMut, PlanBytes, Precision, RopePairing, RopeTable,
    Rotation, Rule, Span, Sums, Weights, join_master, split_master,
};
use foveate_tensor::DType;

use crate::embedding::{Embedding, EmbeddingBackward, TokenOrder};
use crate::gated::{Activation, Gated, GatedBackward};
use crate::head_norm::{self, HeadNorm, HeadNormBackward, Heads};
use crate::launch::{Block, Kernels};
use crate::norm::{self, RmsNorm, RmsNormAgain, RmsNormBackward};
use crate::optimizer::{
    self, CONSTANTS_LEN, Factor, Piece, Pieces, Squares, StepConstants, TOTALS_LEN, Update,
};
use crate::rope::{Pairing, Rope};
use crate::vectors::{self, Add, AddRows, ColumnSums, CopyRows, Widen};
pub use array::CudaArray;
use array::{Place, batched, numbers, rows_of};
pub use attention::AttentionPlan;
use attention::Learned;
pub use batch::CudaBatch;
use batch::Rotations;
use clock::{Clock, Timed};
use transfer::{each_as, narrowed, widened};

/// Tokens whose logits are held at once, at least and at most. Each chunk reads the whole head, and all
/// but the first of a step read its gradient and write it again.
const LOGITS_TOKENS: [usize; 2] = [1024, 16_384];
/// The share of the GPU's memory that logits may take.
const LOGITS_SHARE: usize = 64;

/// An NVIDIA GPU.
#[derive(Debug)]
pub struct Cuda {
    kernels: Kernels,
    queue: Queue,
    ordinal: usize,
    precision: Precision,
    deterministic: bool,
    clock: Clock,
    /// The last tables of rotations that were uploaded.
    tables: Vec<Arc<Rotations>>,
    /// Host memory that totals were read through and others can be.
    readbacks: Vec<Readback>,
}

/// Running totals in device memory.
#[derive(Debug)]
pub struct CudaTotals {
    memory: Allocation,
    /// Of the clock.
    step: u64,
    /// Their copy for the host, queued behind the optimiser.
    readback: Option<Readback>,
}

/// What AdamW goes through, in device memory.
#[derive(Debug)]
pub struct CudaSpans {
    pieces: Pieces,
    table: Allocation,
}

/// The power of two of tokens whose logits, of `token_bytes` each, take `bytes` or less.
fn logits_tokens(bytes: usize, token_bytes: usize) -> usize {
    let [least, most] = LOGITS_TOKENS;
    let tokens = bytes / token_bytes.max(1);
    tokens.checked_ilog2().map_or(0, |log| 1 << log).clamp(least, most)
}

/// Tokens whose logits are held at once on a GPU with so much memory, of a vocabulary of `vocab`.
pub fn logits_tokens_of(memory_bytes: u64, vocab: usize, precision: Precision) -> usize {
    logits_tokens(memory_bytes as usize / LOGITS_SHARE, vocab * precision.weights.bytes())
}

/// What a product multiplies with that is there before it.
fn beta(accumulate: bool) -> f32 {
    f32::from(u8::from(accumulate))
}

/// A line that says what the device, or a library of it, refused.
fn failed(e: &GpuError) -> NnError {
    NnErrorKind::Device(e.to_string()).into()
}

fn heads_of(heads: PackedHeads) -> Heads {
    Heads { queries: heads.heads_q, keys: heads.heads_kv, dim: heads.dim }
}

fn activation_of(activation: NnActivation) -> Activation {
    match activation {
        NnActivation::Silu => Activation::Silu,
        NnActivation::Gelu => Activation::Gelu,
    }
}

impl Cuda {
    /// GPU `ordinal`, on a queue of its own. `deterministic` makes attention's gradients the same bits
    /// in every run, as all else is.
    ///
    /// # Errors
    /// Without a driver or a GPU of this number; for a precision that no kernels are made for.
    pub fn new(ordinal: usize, precision: Precision, deterministic: bool) -> Result<Self, NnError> {
        let Precision { weights, gradients, .. } = precision;
        if gradients != DType::F32 && gradients != weights {
            let reason =
                format!("gradients are f32 or {weights} as their weights, not {gradients}");
            return Err(NnErrorKind::Device(reason).into());
        }
        let engine = Engine::get(ordinal).map_err(|e| failed(&e))?;
        let queue = engine.new_queue().map_err(|e| failed(&e))?;
        let (clock, tables, readbacks) = Default::default();
        let kernels = Kernels::new(engine);
        Ok(Self { kernels, queue, ordinal, precision, deterministic, clock, tables, readbacks })
    }

    /// Its name, as the driver says it.
    pub fn name(&self) -> &str {
        &self.kernels.engine().device().info().name
    }

    /// Whether a GPU `ordinal` can be used.
    ///
    /// # Errors
    /// Why not, in a line.
    pub fn available(ordinal: usize) -> Result<(), NnError> {
        Engine::get(ordinal).map(drop).map_err(|e| failed(&e))
    }

    /// Queues a block.
    fn run(&self, block: &impl Block) -> Result<(), NnError> {
        // SAFETY: operands are allocations of the queue's own pool, which gives their memory to later
        // work of this queue alone, and frees it only when that is done.
        unsafe { self.kernels.queue(&self.queue, block) }.map_err(|e| failed(&e))
    }

    fn product(&self, matmul: &Matmul) -> Result<(), NnError> {
        self.kernels.engine().matmul(&self.queue, matmul).map_err(|e| failed(&e))
    }

    /// Memory for what is queued next.
    fn scratch(&self, name: &'static str, bytes: usize) -> Result<Allocation, NnError> {
        self.queue.pool().take(bytes).map_err(|e| match e.kind() {
            GpuErrorKind::OutOfMemory { .. } => NnErrorKind::Memory { name, elems: bytes }.into(),
            _ => failed(&e),
        })
    }

    fn copied(&self, bytes: &[u8]) -> Result<Allocation, NnError> {
        self.queue.pool().upload(bytes).map_err(|e| failed(&e))
    }

    /// Queues `work`, whose device time is of `kind`.
    fn timed(
        &mut self,
        kind: Timed,
        work: impl FnOnce(&mut Self) -> Result<(), NnError>,
    ) -> Result<(), NnError> {
        self.clock.begin(self.queue.stream(), kind).map_err(|e| failed(&e))?;
        work(self)?;
        self.clock.end(self.queue.stream()).map_err(|e| failed(&e))
    }

    /// Queues a block, whose device time is of `kind`.
    fn run_timed(&mut self, kind: Timed, block: &impl Block) -> Result<(), NnError> {
        self.timed(kind, |this| this.run(block))
    }

    /// Sets a gradient that blocks can only add to to 0, unless it is to be accumulated.
    fn begin_sums(&self, gradient: &PartMut<'_, CudaArray>) -> Result<(), NnError> {
        let (size, place) = (gradient.array.dtype.bytes(), &gradient.place);
        match &gradient.array.memory {
            Some(memory) if !gradient.accumulate => {
                memory.fill_at(place.start * size, 0, place.len() * size).map_err(|e| failed(&e))
            }
            _ => Ok(()),
        }
    }

    /// Learned buffers as f32 numbers: where they are, and their gradients; the memory of both.
    fn learned(
        &self,
        layer: &LayerAttention<'_, Self>,
        backward: bool,
    ) -> Result<(Address, Address, [Option<Allocation>; 2]), NnError> {
        let elems = layer.values.place.len();
        if elems == 0 {
            return Ok((0, 0, [None, None]));
        }
        let values = layer.values.vector();
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

    /// What the optimiser's kernels are told of a step, in device memory.
    fn constants(&self, step: &OptimizerStep) -> Result<Allocation, NnError> {
        let OptimizerStep { rule, step, rate, clip_norm, seed } = *step;
        let constants = match rule {
            Rule::AdamW(adamw) => {
                StepConstants::new(step, seed, rate, [adamw.beta1, adamw.beta2], clip_norm)
            }
            Rule::Sgd(_) => StepConstants::of_momentum(step, seed, rate, clip_norm),
        };
        self.copied(&constants.bytes())
    }
}

impl Blocks for Cuda {
    type Plan = AttentionPlan;
    type Array = CudaArray;
    type Batch = CudaBatch;
    type Totals = CudaTotals;
    type Spans = CudaSpans;

    fn precision(&self) -> Precision {
        self.precision
    }

    fn logits_tokens(&self, vocab: usize) -> usize {
        let bytes = self.kernels.engine().device().info().memory_bytes;
        logits_tokens_of(bytes as u64, vocab, self.precision)
    }

    fn free_bytes(&mut self) -> Result<Option<u64>, NnError> {
        let (free, _) = self.kernels.engine().device().memory().map_err(|e| failed(&e))?;
        Ok(Some(free as u64))
    }

    fn resize(
        &mut self,
        name: &'static str,
        array: &mut CudaArray,
        dtype: DType,
        elems: usize,
    ) -> Result<(), NnError> {
        let no_memory = || NnErrorKind::Memory { name, elems };
        let bytes = elems.checked_mul(dtype.bytes()).ok_or_else(no_memory)?;
        if array.memory.as_ref().map_or(0, Allocation::bytes) < bytes {
            // What it had may serve another array.
            array.memory = None;
            let taken = self.queue.pool().take(bytes).map_err(|e| match e.kind() {
                GpuErrorKind::OutOfMemory { .. } => no_memory().into(),
                _ => failed(&e),
            })?;
            array.memory = Some(taken);
        }
        (array.dtype, array.elems) = (dtype, elems);
        Ok(())
    }

    fn clear(&mut self, array: &mut CudaArray) -> Result<(), NnError> {
        array.memory.as_ref().map_or(Ok(()), |memory| memory.fill(0)).map_err(|e| failed(&e))
    }

    fn profile(&mut self, on: bool) -> Result<(), NnError> {
        self.clock.profile(self.queue.stream(), on).map_err(|e| failed(&e))
    }

    fn block_times(&mut self) -> Vec<BlockTime> {
        self.clock.take()
    }

    fn queues(&self) -> bool {
        true
    }

    fn fill(&mut self, into: PartMut<'_, CudaArray>, values: &[f32]) -> Result<(), NnError> {
        let dtype = into.array.dtype;
        transfer::write(into.array, into.place.start, values, |some| narrowed(dtype, some))
    }

    fn download(&mut self, from: Part<'_, CudaArray>, into: &mut [f32]) -> Result<(), NnError> {
        let dtype = from.array.dtype;
        transfer::read(from.array, from.place.start, from.place.len(), |first, bytes| {
            let into = &mut into[first..][..bytes.len() / dtype.bytes()];
            into.iter_mut().enumerate().for_each(|(i, x)| *x = widened(dtype, bytes, i));
        })
    }

    fn fill_weights(
        &mut self,
        into: &mut Weights<CudaArray>,
        first: usize,
        masters: &[f32],
    ) -> Result<(), NnError> {
        let dtype = into.array.dtype;
        // What is not trained has no master.
        if first >= into.remainders.elems {
            return transfer::write(&into.array, first, masters, |some| narrowed(dtype, some));
        }
        transfer::write(&into.array, first, masters, |some| {
            each_as(some, |x| split_master(x).0.to_ne_bytes())
        })?;
        transfer::write(&into.remainders, first, masters, |some| {
            each_as(some, |x| split_master(x).1.to_ne_bytes())
        })
    }

    fn download_weights(
        &mut self,
        from: &Weights<CudaArray>,
        first: usize,
        masters: &mut [f32],
    ) -> Result<(), NnError> {
        let count = masters.len();
        if first >= from.remainders.elems {
            let place = first..first + count;
            return self.download(Part { array: &from.array, place }, masters);
        }
        let halves = |bytes: &[u8]| -> Vec<u16> {
            bytes.chunks_exact(2).map(|b| u16::from_ne_bytes([b[0], b[1]])).collect()
        };
        let mut remainders = Vec::with_capacity(count);
        transfer::read(&from.remainders, first, count, |_, bytes| {
            remainders.extend(halves(bytes))
        })?;
        transfer::read(&from.array, first, count, |start, bytes| {
            for (i, weight) in halves(bytes).into_iter().enumerate() {
                masters[start + i] = join_master(weight, remainders[start + i]);
            }
        })
    }

    fn fill_moment(
        &mut self,
        moment: Moment,
        elems: usize,
        into: &mut CudaArray,
        first: usize,
        values: &[f32],
    ) -> Result<(), NnError> {
        if self.precision.moments != MomentDtype::Int8 {
            let place = first..first + values.len();
            return self.fill(PartMut { array: into, place, accumulate: false }, values);
        }
        transfer::write_blocks(into, moment, elems, first, values)
    }

    fn download_moment(
        &mut self,
        moment: Moment,
        elems: usize,
        from: &CudaArray,
        first: usize,
        values: &mut [f32],
    ) -> Result<(), NnError> {
        if self.precision.moments != MomentDtype::Int8 {
            let place = first..first + values.len();
            return self.download(Part { array: from, place }, values);
        }
        transfer::read_blocks(from, moment, elems, first, values)
    }

    fn plan(
        &mut self,
        program: &AttentionProgram,
        shape: &AttentionShape,
    ) -> Result<AttentionPlan, NnError> {
        let device = (self.ordinal, self.precision.weights, self.deterministic);
        AttentionPlan::new(program, shape, device)
    }

    fn bind(
        &mut self,
        plan: &AttentionPlan,
        _: &[i32],
        batch: &CudaBatch,
    ) -> Result<AttentionPlan, NnError> {
        Ok(plan.over(batch.documents()))
    }

    fn at(&mut self, plan: &AttentionPlan, position: usize) -> Result<AttentionPlan, NnError> {
        plan.at(position)
    }

    /// The device keeps its counts.
    fn live_pairs(&self, _: &AttentionPlan) -> Option<f64> {
        None
    }

    fn plan_bytes(&mut self, _: &AttentionPlan) -> Result<PlanBytes, NnError> {
        Ok(PlanBytes::default())
    }

    fn upload(
        &mut self,
        batch: &Batch<'_>,
        tables: &[Arc<RopeTable>],
    ) -> Result<CudaBatch, NnError> {
        let known = std::mem::take(&mut self.tables);
        let on_device = |table: &Arc<RopeTable>| match known.iter().find(|k| k.is_of(table)) {
            Some(known) => Ok(Arc::clone(known)),
            None => Rotations::new(self.queue.pool(), table).map(Arc::new),
        };
        let tables: Result<Vec<_>, GpuError> = tables.iter().map(on_device).collect();
        self.tables = tables.map_err(|e| failed(&e))?;
        CudaBatch::new(self.queue.pool(), batch, self.tables.clone()).map_err(|e| failed(&e))
    }

    fn totals(&mut self) -> Result<CudaTotals, NnError> {
        let memory = self.scratch("totals", 8 * TOTALS_LEN)?;
        memory.fill(0).map_err(|e| failed(&e))?;
        Ok(CudaTotals { memory, step: self.clock.step(), readback: None })
    }

    /// Waits: totals are read and written again.
    fn count(&mut self, totals: &mut CudaTotals, labelled: usize) -> Result<(), NnError> {
        let mut words = [[0; 8]; TOTALS_LEN];
        let bytes = words.as_flattened_mut();
        totals.memory.read(bytes, default_timeout()).map_err(|e| failed(&e))?;
        let here = u64::from_ne_bytes(words[1]);
        words[1] = (here + labelled as u64).to_ne_bytes();
        totals.memory.write(words.as_flattened()).map_err(|e| failed(&e))
    }

    fn read(&mut self, totals: CudaTotals) -> Result<Sums, NnError> {
        let mut words = [[0; 8]; TOTALS_LEN];
        let bytes = words.as_flattened_mut();
        match totals.readback {
            Some(mut readback) => {
                let read = readback.wait(default_timeout()).map_err(|e| failed(&e))?;
                bytes.copy_from_slice(read);
                self.readbacks.push(readback);
            }
            None => totals.memory.read(bytes, default_timeout()).map_err(|e| failed(&e))?,
        }
        let [nats, labelled, squares, _] = words.map(u64::from_ne_bytes);
        let grad_norm = f64::from_bits(squares).sqrt() / labelled.max(1) as f64;
        let times = self.clock.read(totals.step).map_err(|e| failed(&e))?;
        Ok(Sums { nats: f64::from_bits(nats), grad_norm, ..times })
    }

    fn spans(&mut self, spans: &[Span]) -> Result<CudaSpans, NnError> {
        let piece = |Span { place, treatment }: &Span| Piece {
            range: place.clone(),
            rate: treatment.rate,
            decay: treatment.decay,
        };
        let pieces: Vec<Piece> = spans.iter().map(piece).collect();
        let pieces = Pieces::new(&pieces).map_err(|e| failed(&e))?;
        let table = self.copied(&pieces.bytes())?;
        Ok(CudaSpans { pieces, table })
    }

    fn clip(
        &mut self,
        step: &OptimizerStep,
        gradients: &CudaArray,
        more: bool,
        totals: &mut CudaTotals,
    ) -> Result<(), NnError> {
        self.timed(Timed::Clip, |this| {
            let parts = [optimizer::parts(gradients.elems())];
            let partial = this.scratch("squares of gradients", 8 * parts[0])?;
            let partial = numbers(&partial, &parts);
            this.run(&Squares { gradients: gradients.vector(), partial })?;
            let constants = this.constants(step)?;
            let constants = numbers(&constants, &[CONSTANTS_LEN]);
            let totals = numbers(&totals.memory, &[TOTALS_LEN]);
            this.run(&Factor { partial, constants, totals, more })
        })
    }

    fn update(
        &mut self,
        step: &OptimizerStep,
        spans: &CudaSpans,
        weights: &mut Weights<CudaArray>,
        (gradients, first_gradient): (&CudaArray, usize),
        moments: &mut Moments<CudaArray>,
        elems: usize,
        totals: &mut CudaTotals,
    ) -> Result<(), NnError> {
        self.timed(Timed::Update, |this| {
            let remainders_len = [weights.remainders.elems()];
            let remainders = this.precision.remainders.then(|| {
                let at = weights.remainders.vector().start();
                DeviceArray::new(at, ElementType::I16, &remainders_len)
            });
            let constants = this.constants(step)?;
            let rule = match step.rule {
                Rule::AdamW(adamw) => optimizer::Rule::AdamW {
                    betas: [adamw.beta1 as f32, adamw.beta2 as f32],
                    eps: adamw.eps as f32,
                },
                Rule::Sgd(sgd) => optimizer::Rule::Momentum(sgd.momentum as f32),
            };
            this.run(&Update {
                weights: weights.array.vector(),
                remainders,
                gradients: gradients.vector(),
                first_gradient,
                means: moments.mean.vector(),
                squares: step.rule.keeps_squares().then(|| moments.square.vector()),
                trained: elems,
                pieces: &spans.pieces,
                piece_table: numbers(&spans.table, &[spans.pieces.len_f64()]),
                constants: numbers(&constants, &[CONSTANTS_LEN]),
                totals: numbers(&totals.memory, &[TOTALS_LEN]),
                rule,
                weight_decay: step.rule.weight_decay() as f32,
            })
        })?;
        let mut readback = match self.readbacks.pop() {
            Some(free) => free,
            None => Readback::new(&totals.memory).map_err(|e| failed(&e))?,
        };
        readback.queue(&totals.memory).map_err(|e| failed(&e))?;
        totals.readback = Some(readback);
        Ok(())
    }

    fn embed(
        &mut self,
        batch: &CudaBatch,
        table: Part<'_, CudaArray>,
        width: usize,
        scale: f32,
        out: &mut CudaArray,
    ) -> Result<(), NnError> {
        let (table, out) = (table.rows(width), out.rows(width));
        let block = Embedding { table, tokens: batch.tokens(), out, scale };
        self.run_timed(Timed::Embedding, &block)
    }

    fn embed_backward(
        &mut self,
        batch: &CudaBatch,
        d_out: &CudaArray,
        width: usize,
        scale: f32,
        d_table: PartMut<'_, CudaArray>,
    ) -> Result<(), NnError> {
        let most = TokenOrder::most_partial_rows(batch.count());
        let partial = self.scratch("partial rows of the embedding's gradient", 4 * most * width)?;
        let rows = batch.order.partial_rows();
        let block = EmbeddingBackward {
            d_out: d_out.rows(width),
            d_table: d_table.rows(width),
            order: &batch.order,
            words: batch.words(),
            partial: DeviceTensor::contiguous(partial.address(), DType::F32, [rows, width]),
            scale,
        };
        self.timed(Timed::EmbeddingBackward, |this| {
            this.begin_sums(&d_table)?;
            this.run(&block)
        })
    }

    fn rms_norm(
        &mut self,
        x: &CudaArray,
        weight: Part<'_, CudaArray>,
        norm: Norm,
        inverse: &mut CudaArray,
        out: &mut CudaArray,
    ) -> Result<(), NnError> {
        let width = weight.place.len();
        self.run_timed(
            Timed::Norm,
            &RmsNorm {
                x: x.rows(width),
                residual: None,
                weight: weight.vector(),
                inverse: inverse.vector(),
                out: out.rows(width),
                eps: norm.eps,
                offset: norm.offset,
            },
        )
    }

    fn add_rms_norm(
        &mut self,
        residual: &CudaArray,
        x: &mut CudaArray,
        weight: Part<'_, CudaArray>,
        norm: Norm,
        inverse: &mut CudaArray,
        out: &mut CudaArray,
    ) -> Result<(), NnError> {
        let width = weight.place.len();
        let x = x.rows(width);
        self.run_timed(
            Timed::AddNorm,
            &RmsNorm {
                x,
                residual: Some((residual.rows(width), x)),
                weight: weight.vector(),
                inverse: inverse.vector(),
                out: out.rows(width),
                eps: norm.eps,
                offset: norm.offset,
            },
        )
    }

    fn rms_norm_again(
        &mut self,
        x: &CudaArray,
        weight: Part<'_, CudaArray>,
        norm: Norm,
        inverse: &CudaArray,
        out: &mut CudaArray,
    ) -> Result<(), NnError> {
        let width = weight.place.len();
        self.run_timed(
            Timed::NormAgain,
            &RmsNormAgain {
                x: x.rows(width),
                weight: weight.vector(),
                inverse: inverse.vector(),
                out: out.rows(width),
                offset: norm.offset,
            },
        )
    }

    fn rms_norm_backward(
        &mut self,
        x: &CudaArray,
        weight: Part<'_, CudaArray>,
        norm: Norm,
        inverse: &CudaArray,
        d_out: &CudaArray,
        d_x: &mut CudaArray,
        accumulate: bool,
        d_weight: Option<PartMut<'_, CudaArray>>,
    ) -> Result<(), NnError> {
        let width = weight.place.len();
        let x = x.rows(width);
        let parts = norm::parts(x.layout.shape[0]);
        let partial = self.scratch("partial sums of a norm's gradient", 4 * parts * width)?;
        let accumulate_weight = d_weight.as_ref().is_some_and(|d_weight| d_weight.accumulate);
        self.run_timed(
            Timed::NormBackward,
            &RmsNormBackward {
                x,
                weight: weight.vector(),
                inverse: inverse.vector(),
                d_out: d_out.rows(width),
                d_x: d_x.rows(width),
                accumulate,
                d_weight: d_weight.map(|d_weight| d_weight.vector()),
                accumulate_weight,
                partial: DeviceTensor::contiguous(partial.address(), DType::F32, [parts, width]),
                offset: norm.offset,
            },
        )
    }

    fn linear(
        &mut self,
        LinearShape { inputs, outputs, .. }: LinearShape,
        x: Part<'_, CudaArray>,
        weight: Part<'_, CudaArray>,
        bias: Option<Part<'_, CudaArray>>,
        add: Option<&CudaArray>,
        y: &mut CudaArray,
    ) -> Result<(), NnError> {
        let y = batched(&y.rows(outputs));
        let product = Matmul::new(x.matrix(inputs), weight.matrix(inputs).transposed(), y);
        let product = match add {
            None => product,
            Some(add) => Matmul { beta: 1.0, add: Some(batched(&add.rows(outputs))), ..product },
        };
        let product = Matmul { bias: bias.map(|bias| bias.vector()), ..product };
        self.timed(Timed::Linear, |this| this.product(&product))
    }

    fn bias_backward(
        &mut self,
        d_y: &CudaArray,
        d_bias: PartMut<'_, CudaArray>,
    ) -> Result<(), NnError> {
        let width = d_bias.place.len();
        let from = d_y.rows(width);
        let parts = vectors::parts(from.layout.shape[0]);
        let partial = self.scratch("partial sums of a bias's gradient", 4 * parts * width)?;
        let partial = DeviceTensor::contiguous(partial.address(), DType::F32, [parts, width]);
        self.timed(Timed::BiasBackward, |this| {
            this.begin_sums(&d_bias)?;
            this.run(&ColumnSums { from, to: d_bias.vector(), partial })
        })
    }

    fn head_norm(
        &mut self,
        heads: PackedHeads,
        qkv: &CudaArray,
        weight: Part<'_, CudaArray>,
        norm: Norm,
        inverse: &mut CudaArray,
        out: &mut CudaArray,
    ) -> Result<(), NnError> {
        let width = heads.width();
        self.run_timed(
            Timed::HeadNorm,
            &HeadNorm {
                heads: heads_of(heads),
                qkv: qkv.rows(width),
                weight: weight.vector(),
                inverse: inverse.vector(),
                out: out.rows(width),
                eps: norm.eps,
                offset: norm.offset,
            },
        )
    }

    fn head_norm_backward(
        &mut self,
        heads: PackedHeads,
        qkv: &CudaArray,
        weight: Part<'_, CudaArray>,
        norm: Norm,
        inverse: &CudaArray,
        d_qkv: &mut CudaArray,
        d_weight: Option<PartMut<'_, CudaArray>>,
    ) -> Result<(), NnError> {
        let (width, columns) = (heads.width(), 2 * heads.dim);
        let qkv = qkv.rows(width);
        let parts = head_norm::parts(qkv.layout.shape[0]);
        let partial = self.scratch("partial sums of a norm's gradient", 4 * parts * columns)?;
        let block = HeadNormBackward {
            heads: heads_of(heads),
            qkv,
            weight: weight.vector(),
            inverse: inverse.vector(),
            d_qkv: d_qkv.rows(width),
            d_weight: d_weight.as_ref().map(|d_weight| d_weight.vector()),
            partial: DeviceTensor::contiguous(partial.address(), DType::F32, [parts, columns]),
            offset: norm.offset,
        };
        self.timed(Timed::HeadNormBackward, |this| {
            d_weight.as_ref().map_or(Ok(()), |d_weight| this.begin_sums(d_weight))?;
            this.run(&block)
        })
    }

    fn add(&mut self, x: &CudaArray, y: &mut CudaArray) -> Result<(), NnError> {
        // Rows of any width that divides them: a whole array is one, and long.
        let width = (1..=4096).rev().find(|&width| x.elems().is_multiple_of(width)).unwrap_or(1);
        self.run_timed(Timed::Add, &AddRows { from: x.rows(width), to: y.rows(width) })
    }

    fn linear_backward_input(
        &mut self,
        LinearShape { inputs, outputs, .. }: LinearShape,
        d_y: &CudaArray,
        weight: Part<'_, CudaArray>,
        d_x: &mut CudaArray,
    ) -> Result<(), NnError> {
        let (d_y, d_x) = (batched(&d_y.rows(outputs)), batched(&d_x.rows(inputs)));
        let product = Matmul::new(d_y, weight.matrix(inputs), d_x);
        self.timed(Timed::LinearBackwardInput, |this| this.product(&product))
    }

    fn linear_backward_weight(
        &mut self,
        LinearShape { inputs, outputs, .. }: LinearShape,
        d_y: &CudaArray,
        x: &CudaArray,
        d_weight: PartMut<'_, CudaArray>,
    ) -> Result<(), NnError> {
        let (d_y, x) = (batched(&d_y.rows(outputs)), batched(&x.rows(inputs)));
        let product = Matmul::new(d_y.transposed(), x, d_weight.matrix(inputs));
        let product = Matmul { beta: beta(d_weight.accumulate), ..product };
        self.timed(Timed::LinearBackwardWeight, |this| this.product(&product))
    }

    fn rope(
        &mut self,
        batch: &CudaBatch,
        table: usize,
        heads: PackedHeads,
        pairing: RopePairing,
        rotation: Rotation,
        qkv: &mut CudaArray,
    ) -> Result<(), NnError> {
        self.run_timed(
            Timed::Rope,
            &Rope {
                qkv: qkv.rows(heads.width()),
                heads: heads.heads_q + heads.heads_kv,
                dim: heads.dim,
                positions: batch.positions(),
                table: batch.tables[table].tensor(),
                pairing: match pairing {
                    RopePairing::HalfSplit => Pairing::Halves,
                    RopePairing::Interleaved => Pairing::Neighbours,
                },
                back: rotation == Rotation::Backward,
            },
        )
    }

    fn attention(
        &mut self,
        layer: LayerAttention<'_, Self>,
        qkv: &CudaArray,
        cache: Option<KvCache<'_, CudaArray>>,
        out: &mut CudaArray,
        lse: &mut CudaArray,
    ) -> Result<(), NnError> {
        let (heads, dtype) = (layer.heads, qkv.dtype);
        let PackedHeads { len, heads_q, heads_kv, dim, .. } = heads;
        let mut operands = attention::packed(heads, qkv.vector().start(), dtype);
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
                operands[new] = attention::rows(shape, width, cached.vector().start(), dtype);
            }
            operands[0] =
                attention::rows([heads_q, len, dim], heads.width(), operands[0].start(), dtype);
        }
        let out = attention::output(heads, out.vector().start(), dtype);
        let lse = attention::statistics(heads, lse.vector().start());
        self.timed(Timed::Attention, |this| {
            let (values, gradients, _memory) = this.learned(&layer, false)?;
            let learned = Learned { buffers: layer.program.learned, values, gradients };
            layer.program.plan.forward(&this.queue, operands, &learned, out, lse)
        })
    }

    fn attention_backward(
        &mut self,
        layer: LayerAttention<'_, Self>,
        qkv: &CudaArray,
        out: &CudaArray,
        lse: &CudaArray,
        d_out: &CudaArray,
        d_qkv: &mut CudaArray,
        d_learned: PartMut<'_, CudaArray>,
    ) -> Result<(), NnError> {
        let (heads, dtype) = (layer.heads, qkv.dtype);
        let operands = attention::packed(heads, qkv.vector().start(), dtype);
        let destinations = attention::packed(heads, d_qkv.vector().start(), dtype);
        let of_rows = (
            attention::output(heads, out.vector().start(), dtype),
            attention::statistics(heads, lse.vector().start()),
            attention::output(heads, d_out.vector().start(), dtype),
        );
        self.timed(Timed::AttentionBackward, |this| {
            let (values, gradients, _memory) = this.learned(&layer, true)?;
            let learned = Learned { buffers: layer.program.learned, values, gradients };
            let plan = layer.program.plan;
            plan.backward(&this.queue, operands, &learned, of_rows, destinations)?;
            let to = d_learned.vector();
            let [elems] = to.layout.shape;
            if elems == 0 {
                return Ok(());
            }
            let from = DeviceTensor::contiguous(gradients, DType::F32, [elems]);
            this.begin_sums(&d_learned)?;
            this.run(&Add { from, to })
        })
    }

    fn gated(
        &mut self,
        activation: NnActivation,
        width: usize,
        gate_up: &CudaArray,
        out: &mut CudaArray,
    ) -> Result<(), NnError> {
        let (gate_up, out) = (gate_up.rows(2 * width), out.rows(width));
        let block = Gated { activation: activation_of(activation), gate_up, out };
        self.run_timed(Timed::Gate, &block)
    }

    fn gated_backward(
        &mut self,
        activation: NnActivation,
        width: usize,
        gate_up: &mut CudaArray,
        d_out: &mut CudaArray,
    ) -> Result<(), NnError> {
        let (gate_up, d_out) = (gate_up.rows(2 * width), d_out.rows(width));
        let block = GatedBackward { activation: activation_of(activation), gate_up, d_out };
        self.run_timed(Timed::GateBackward, &block)
    }

    fn loss(
        &mut self,
        batch: &CudaBatch,
        width: usize,
        x: &CudaArray,
        weight: Part<'_, CudaArray>,
        cap: Option<f32>,
        logits: &mut CudaArray,
        each: Option<&mut CudaArray>,
        totals: &mut CudaTotals,
    ) -> Result<(), NnError> {
        let each = each.map(|each| &*each);
        self.cross_entropy(batch, width, x, &weight, cap, logits, each, None, totals)
    }

    fn loss_backward(
        &mut self,
        batch: &CudaBatch,
        width: usize,
        x: &CudaArray,
        weight: Part<'_, CudaArray>,
        cap: Option<f32>,
        logits: &mut CudaArray,
        d_x: &mut CudaArray,
        d_weight: Option<PartMut<'_, CudaArray>>,
        totals: &mut CudaTotals,
    ) -> Result<(), NnError> {
        let gradients = Some((&*d_x, d_weight.as_ref()));
        self.cross_entropy(batch, width, x, &weight, cap, logits, None, gradients, totals)
    }
}
