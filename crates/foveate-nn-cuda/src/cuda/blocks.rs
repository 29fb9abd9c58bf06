//! What [`foveate_nn::Blocks`] asks for, block by block.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use foveate_gpu::blas::{self, Matmul};
use foveate_gpu::driver::HostArray;
use foveate_gpu::nvrtc::Compiler;
use foveate_gpu::profile::Profile;
use foveate_gpu::{DeviceTensor, GpuError, GpuErrorKind};
use foveate_nn::{
    self as nn, Activation as NnActivation, Array, ArrayBytes, AttentionProgram, AttentionShape,
    Batch, BlockTime, Blocks, Carrier, ContextOf, HeldBytes, KvCache, LayerAttention, LinearShape,
    LossGradients, LossOperands, Moment, MomentDtype, Moments, NnError, NnErrorKind, Norm,
    NormForward, OptimizerStep, PackedHeads, Part, PartMut, PassIdentity, PassWork, Peers,
    PlanBytes, Precision, Recording, ReplicaSumsOf, RopeTable, Rotation, Sharing, Span,
    StreamTransfers, SumOverRanks, Sums, TensorSharing, Transfers, VocabularyPart, Weights,
};
use foveate_tensor::DType;

use super::CudaStateMemory;
use super::array::{CudaArray, Memory, Place, batched};
use super::attention::AttentionPlan;
use super::batch::{CudaBatch, Rotations, turn_of};
use super::bus::Way;
use super::clock::Timed;
use super::totals::CudaTotals;
use super::updates::CudaSpans;
use super::{Cuda, beta, context, failed, logits_tokens_of, sharing, transfer};
use crate::gated::{Activation, Gated, GatedBackward};
use crate::head_norm::{self, HeadNorm, HeadNormBackward, Heads};
use crate::norm::{self, RmsNorm, RmsNormAgain, RmsNormBackward};
use crate::pause::Pause;
use crate::rope::Rope;
use crate::vectors::{AddRows, ColumnSums};

fn heads_of(heads: PackedHeads) -> Heads {
    Heads { queries: heads.heads_q, keys: heads.heads_kv, dim: heads.dim }
}

fn activation_of(activation: NnActivation) -> Activation {
    match activation {
        NnActivation::Silu => Activation::Silu,
        NnActivation::Gelu => Activation::Gelu,
    }
}

/// Operations of a product that is worth to be tuned: a microsecond or two.
const LEAST_TUNED: f64 = 1e9;

impl Blocks for Cuda {
    type Plan = AttentionPlan;
    type Array = CudaArray;
    type Batch = CudaBatch;
    type Totals = CudaTotals;
    type Spans = CudaSpans;
    type StateMemory = CudaStateMemory;

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

    fn total_bytes(&self) -> Option<u64> {
        Some(self.kernels.engine().device().info().memory_bytes as u64)
    }

    /// In 16 bits; none for weights of 32.
    fn peak_tflops(&self) -> Option<f64> {
        let info = self.kernels.engine().device().info();
        Profile::peak_tflops(info).filter(|_| self.precision.weights != DType::F32)
    }

    fn held_bytes(&self) -> Option<HeldBytes> {
        let held = self.kernels.engine().device().held();
        Some(HeldBytes { now: held.now, peak: held.peak })
    }

    fn resize(
        &mut self,
        name: &'static str,
        array: &mut CudaArray,
        dtype: DType,
        elems: usize,
    ) -> Result<(), NnError> {
        array.fit(name, (dtype, elems), false, |bytes| {
            let taken = self.queue.pool().take(bytes).map_err(|e| match e.kind() {
                GpuErrorKind::OutOfMemory { .. } => NnErrorKind::Memory { name, elems }.into(),
                _ => failed(&e),
            })?;
            Ok(Memory::of_device(taken))
        })
    }

    fn resize_on_host(
        &mut self,
        name: &'static str,
        array: &mut CudaArray,
        dtype: DType,
        elems: usize,
    ) -> Result<(), NnError> {
        let device = self.kernels.engine().device();
        array.fit(name, (dtype, elems), true, |bytes| {
            let pinned = HostArray::new(device, bytes).map_err(|e| {
                let reason = format!("{name} of {elems} elements in the memory of the host: {e}");
                NnError::from(NnErrorKind::Device(reason))
            })?;
            Ok(Memory::Host(pinned))
        })
    }

    fn state_memory(&self) -> CudaStateMemory {
        CudaStateMemory::new(self.kernels.engine().device())
    }

    fn copy_out(
        &mut self,
        from: &[ArrayBytes<'_, CudaArray>],
        to: &CudaStateMemory,
    ) -> Result<(), NnError> {
        self.copy_arrays_out(from, to)
    }

    fn leave(&mut self, from: &CudaArray, to: &mut CudaArray) -> Result<(), NnError> {
        self.recorder.stop("inputs of layers go to the memory of the host");
        self.send(Way::Out, from, to)
    }

    fn left(&mut self, _: &CudaArray) -> Result<(), NnError> {
        self.await_copy(Way::Out)
    }

    fn bring(&mut self, from: &CudaArray, into: &mut CudaArray) -> Result<(), NnError> {
        self.send(Way::Back, into, from)
    }

    fn brought(&mut self, _: &CudaArray) -> Result<(), NnError> {
        self.await_copy(Way::Back)
    }

    fn shares_memory(&self) -> bool {
        self.shares_memory
    }

    fn resize_within(
        &mut self,
        array: &mut CudaArray,
        dtype: DType,
        elems: usize,
        (within, start): (&CudaArray, usize),
    ) -> Result<(), NnError> {
        let bytes = elems.saturating_mul(dtype.bytes());
        if !array.set_within(within, start, bytes) {
            let reason =
                format!("{bytes} B from byte {start} on are not in the memory of another array");
            return Err(NnErrorKind::Device(reason).into());
        }
        (array.dtype, array.elems) = (dtype, elems);
        Ok(())
    }

    fn clear(&mut self, array: &mut CudaArray) -> Result<(), NnError> {
        array.fill_at(0, 0, array.elems * array.dtype.bytes()).map_err(|e| failed(&e))
    }

    fn clear_part(&mut self, part: PartMut<'_, CudaArray>) -> Result<(), NnError> {
        self.begin_sums(&PartMut { accumulate: false, ..part })
    }

    fn transfers(&mut self, ranks: &dyn Sharing) -> Result<Box<dyn Transfers<Self>>, NnError> {
        sharing::transfers(ranks, self.ordinal)
    }

    fn context(
        &mut self,
        peers: Box<dyn Peers>,
        carrier: Carrier,
    ) -> Result<Option<ContextOf<Self>>, NnError> {
        context::context(peers, self.ordinal, carrier)
    }

    fn stream_transfers(
        &mut self,
        ranks: &dyn TensorSharing,
    ) -> Result<Box<dyn StreamTransfers<Self>>, NnError> {
        sharing::stream_transfers(ranks, self.ordinal)
    }

    fn replicas(
        &mut self,
        peers: Box<dyn Peers>,
        carrier: Carrier,
    ) -> Result<Option<ReplicaSumsOf<Self>>, NnError> {
        sharing::replicas(peers, self.ordinal, carrier)
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

    fn pause(&mut self, duration: Duration) -> Result<(), NnError> {
        self.run(&Pause(duration))
    }

    fn fill(&mut self, into: PartMut<'_, CudaArray>, values: &[f32]) -> Result<(), NnError> {
        transfer::write_numbers(into.array, into.place.start, values)
    }

    fn repeat(&mut self, part: PartMut<'_, CudaArray>, period: usize) -> Result<(), NnError> {
        transfer::repeat(&self.queue, &part, period)
    }

    fn download(&mut self, from: Part<'_, CudaArray>, into: &mut [f32]) -> Result<(), NnError> {
        transfer::read_numbers(from.array, from.place.start, &mut into[..from.place.len()])
    }

    fn fill_weights(
        &mut self,
        into: &mut Weights<CudaArray>,
        first: usize,
        masters: &[f32],
    ) -> Result<(), NnError> {
        self.await_copies_out()?;
        transfer::write_weights(into, first, masters)
    }

    fn download_weights(
        &mut self,
        from: &Weights<CudaArray>,
        first: usize,
        masters: &mut [f32],
    ) -> Result<(), NnError> {
        transfer::read_weights(from, first, masters)
    }

    fn fill_moment(
        &mut self,
        moment: Moment,
        elems: usize,
        into: &mut CudaArray,
        first: usize,
        values: &[f32],
    ) -> Result<(), NnError> {
        self.await_copies_out()?;
        if self.precision.moments != MomentDtype::Int8 {
            return transfer::write_numbers(into, first, values);
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
            return transfer::read_numbers(from, first, values);
        }
        transfer::read_blocks(from, moment, elems, first, values)
    }

    fn plan(
        &mut self,
        program: &AttentionProgram,
        shape: &AttentionShape,
    ) -> Result<AttentionPlan, NnError> {
        let device = (self.ordinal, self.precision.weights, self.deterministic);
        Ok(AttentionPlan::new(program, shape, device)?.by(self.attention))
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

    fn bits_depend_on(&self, plan: &AttentionPlan) -> Result<BTreeMap<String, String>, NnError> {
        let device = self.kernels.engine().device().info();
        let compiler = Compiler::get().map_err(|e| failed(&e))?.version();
        let [major, minor, patch] = blas::version().map_err(|e| failed(&e))?;
        let order = if self.deterministic { "fixed" } else { "any" };
        let all = [
            ("GPU", format!("{}, {} SMs", device.name, device.sms)),
            ("driver", format!("CUDA {}.{}", device.driver.0, device.driver.1)),
            ("NVRTC", format!("{}.{}", compiler.0, compiler.1)),
            ("cuBLASLt", format!("{major}.{minor}.{patch}")),
            ("order of sums", order.to_owned()),
            ("attention", plan.kernels()?),
        ];
        Ok(all.map(|(name, value)| (name.to_owned(), value)).into())
    }

    fn choose(&mut self, given: &BTreeMap<String, usize>) {
        self.kernels.engine().tune_products(LEAST_TUNED, given);
    }

    fn choices(&self) -> BTreeMap<String, usize> {
        self.kernels.engine().product_choices()
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
        let (pool, places) = (self.queue.pool(), self.recorder.places());
        CudaBatch::new(pool, batch, self.tables.clone(), places).map_err(|e| failed(&e))
    }

    fn record_passes(&mut self) {
        self.recorder = self.new_recorder();
    }

    fn recording(&self) -> Recording {
        self.recorder.state()
    }

    fn forget_passes(&mut self) {
        self.recorder.forget(self.queue.for_graphs());
    }

    fn queue_pass(
        &mut self,
        of: &PassIdentity<'_, Self>,
        totals: &mut CudaTotals,
        work: &mut PassWork<'_, Self>,
    ) -> Result<(), NnError> {
        self.queue_recorded(of, totals, work)
    }

    fn totals(&mut self) -> Result<CudaTotals, NnError> {
        self.new_totals()
    }

    fn read(&mut self, totals: CudaTotals) -> Result<Sums, NnError> {
        self.read_totals(totals)
    }

    fn spans(&mut self, spans: &[Span]) -> Result<CudaSpans, NnError> {
        self.upload_spans(spans)
    }

    fn clip(
        &mut self,
        step: &OptimizerStep,
        gradients: &CudaArray,
        more: bool,
        sum: Option<SumOverRanks<'_>>,
        totals: &mut CudaTotals,
    ) -> Result<(), NnError> {
        self.clip_gradients(step, gradients, more, sum, totals)
    }

    fn update(
        &mut self,
        step: &OptimizerStep,
        spans: &CudaSpans,
        weights: &mut Weights<CudaArray>,
        gradients: (&CudaArray, usize),
        moments: &mut Moments<CudaArray>,
        elems: usize,
        totals: &mut CudaTotals,
    ) -> Result<(), NnError> {
        self.update_weights(step, spans, weights, gradients, moments, elems, totals)
    }

    fn embed(
        &mut self,
        batch: &CudaBatch,
        first: Option<usize>,
        table: Part<'_, CudaArray>,
        width: usize,
        scale: f32,
        out: &mut CudaArray,
    ) -> Result<(), NnError> {
        self.embed_rows(batch, first, table, width, scale, out)
    }

    fn embed_backward(
        &mut self,
        batch: &CudaBatch,
        first: Option<usize>,
        d_out: &CudaArray,
        width: usize,
        scale: f32,
        d_table: PartMut<'_, CudaArray>,
    ) -> Result<(), NnError> {
        self.embed_rows_backward(batch, first, d_out, width, scale, d_table)
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
        NormForward { x, weight, norm, inverse }: NormForward<'_, CudaArray>,
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
        NormForward { x, weight, norm, inverse }: NormForward<'_, CudaArray>,
        d_out: &CudaArray,
        d_x: PartMut<'_, CudaArray>,
        d_weight: Option<PartMut<'_, CudaArray>>,
        again: Option<&mut CudaArray>,
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
                accumulate: d_x.accumulate,
                again: again.map(|again| again.rows(width)),
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
        self.timed(Timed::BiasBackward, |this| {
            this.begin_sums(&d_bias)?;
            this.run(&ColumnSums { from, to: d_bias.vector() })
        })
    }

    fn head_norm(
        &mut self,
        heads: PackedHeads,
        qkv: &CudaArray,
        weight: Part<'_, CudaArray>,
        norm: Norm,
        turn: Option<nn::Turn<'_, CudaBatch>>,
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
                turn: turn.as_ref().map(turn_of),
            },
        )
    }

    fn head_norm_backward(
        &mut self,
        heads: PackedHeads,
        NormForward { x: qkv, weight, norm, inverse }: NormForward<'_, CudaArray>,
        turn: Option<nn::Turn<'_, CudaBatch>>,
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
            turn: turn.as_ref().map(turn_of),
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
        turn: nn::Turn<'_, CudaBatch>,
        heads: PackedHeads,
        rotation: Rotation,
        qkv: &mut CudaArray,
    ) -> Result<(), NnError> {
        self.run_timed(
            Timed::Rope,
            &Rope {
                qkv: qkv.rows(heads.width()),
                heads: heads.heads_q + heads.heads_kv,
                dim: heads.dim,
                turn: turn_of(&turn),
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
        self.attend(layer, qkv, cache, out, lse)
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
        self.attend_backward(layer, qkv, (out, lse, d_out), d_qkv, d_learned)
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
        operands: LossOperands<'_, CudaArray>,
        each: Option<&mut CudaArray>,
        gradients: Option<LossGradients<'_, CudaArray>>,
        totals: &mut CudaTotals,
    ) -> Result<(), NnError> {
        self.loss_of_batch(batch, operands, None, each.as_deref(), gradients, totals)
    }

    fn loss_part(
        &mut self,
        batch: &CudaBatch,
        operands: LossOperands<'_, CudaArray>,
        part: Option<VocabularyPart<'_, Self>>,
        gradients: Option<LossGradients<'_, CudaArray>>,
        totals: &mut CudaTotals,
    ) -> Result<(), NnError> {
        let part = part.expect("a GPU computes");
        self.loss_of_batch(batch, operands, Some(part), None, gradients, totals)
    }
}
