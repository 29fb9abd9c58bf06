//! The blocks on the processor, on the rayon pool they are called in.
//!
//! Elementwise work is cut into tasks of whole tokens; every sum over tokens is taken in an order
//! fixed by the shapes, so no result depends on the number of threads. Inner loops are plain
//! loops over slices, compiled for each instruction set (`level`).

mod attention;
mod embed;
mod gated;
mod level;
mod loss;
pub(crate) mod math;
mod norm;
mod plan;
mod rope;
#[cfg(test)]
mod tests;
mod update;

use std::sync::Arc;
use std::time::Instant;

use foveate::DType;
use foveate::tensor::memory::reserve_exact;
use rayon::prelude::*;

use crate::architecture::Activation;
use crate::backend::{
    Array, ArrayBytes, AttentionShape, Blocks, KvCache, LayerAttention, LinearShape, LossGradients,
    LossOperands, Moments, NormForward, PackedHeads, Part, PartMut, PlanBytes, ProcessMemory,
    Rotation, StreamTransfers, SumOverRanks, Sums, Transfers, Turn, VocabularyPart, Weights,
};
use crate::batch::{Batch, BlockSeconds, IGNORE, token_order};
use crate::config::Norm;
use crate::error::NnError;
use crate::labelled::LabelledTokens;
use crate::matmul::{Matrix, matmul, matmul_deep};
use crate::moments::{self, Moment};
use crate::optimizer::{OptimizerStep, Span, clip_factor};
use crate::precision::{MomentDtype, ParameterState, Precision};
use crate::program::AttentionProgram;
use crate::rope::RopeTable;
use crate::sharing::{RankSums, Sharing, TensorSharing};
use crate::through_host::{StreamThroughHost, ThroughHost};
pub use plan::CpuPlan;

/// The processor, which keeps all in f32 but for moments where it is told so.
#[derive(Debug)]
pub struct Cpu {
    moments: MomentDtype,
    /// The first plan, in whose workspace all others run.
    first: Option<CpuPlan>,
    /// Parts of sums that products of many terms are cut into, kept between them.
    sums: Vec<f32>,
    /// Seconds since the last [`Blocks::read`], by what took them.
    seconds: BlockSeconds,
}

impl Default for Cpu {
    fn default() -> Self {
        Self {
            moments: MomentDtype::F32,
            first: None,
            sums: Vec::new(),
            seconds: BlockSeconds::default(),
        }
    }
}

impl Cpu {
    /// With moments of 8 bits.
    pub fn with_int8_moments() -> Self {
        Self { moments: MomentDtype::Int8, ..Self::default() }
    }
}

/// Tokens of one elementwise task.
const TASK: usize = 32;

/// A batch in the form that the blocks read.
#[derive(Debug)]
pub struct CpuBatch {
    tokens: Vec<u32>,
    labels: Vec<i32>,
    positions: Vec<i32>,
    /// Indices of the tokens, sorted by id and then by index.
    order: Vec<u32>,
    tables: Vec<Arc<RopeTable>>,
    /// Tokens of a row.
    len: usize,
    /// Tokens with a label.
    labelled: u64,
    /// These, where the head multiplies them alone.
    rows: Option<LabelledTokens>,
}

/// Sums of a step.
#[derive(Debug, Default)]
pub struct CpuTotals {
    nats: f64,
    z_loss: f64,
    labelled: u64,
    /// Of the sums over tokens of all gradients.
    squares: f64,
    grad_norm: f64,
    /// What gradients are multiplied with.
    factor: f64,
}

impl CpuTotals {
    fn add(&mut self, nats: f64, z_loss: f64) {
        self.nats += nats;
        self.z_loss += z_loss;
    }
}

impl Array for Vec<f32> {
    fn dtype(&self) -> DType {
        DType::F32
    }

    fn elems(&self) -> usize {
        self.len()
    }
}

impl<'a> Part<'a, Vec<f32>> {
    fn values(&self) -> &'a [f32] {
        &self.array[self.place.clone()]
    }
}

impl<'a> PartMut<'a, Vec<f32>> {
    fn values(self) -> &'a mut [f32] {
        &mut self.array[self.place]
    }

    /// What a gradient is added to: zeros, where it is not accumulated.
    fn sums(self) -> &'a mut [f32] {
        let sums = &mut self.array[self.place];
        if !self.accumulate {
            sums.fill(0.0);
        }
        sums
    }
}

/// Runs `work` and adds the seconds it takes to `sum`.
fn timed<T>(sum: &mut f64, work: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let done = work();
    *sum += start.elapsed().as_secs_f64();
    done
}

/// Bytes of logits that are held at once, but never of fewer than 64 tokens.
const LOGITS_BYTES: usize = 16 << 20;

impl Blocks for Cpu {
    type Plan = CpuPlan;
    type Array = Vec<f32>;
    type Batch = CpuBatch;
    type Totals = CpuTotals;
    type Spans = Vec<Span>;
    type StateMemory = ProcessMemory;

    fn precision(&self) -> Precision {
        Precision { moments: self.moments, ..ParameterState::F32.into() }
    }

    fn logits_tokens(&self, vocab: usize) -> usize {
        (LOGITS_BYTES / 4 / vocab.max(1)).max(64)
    }

    fn free_bytes(&mut self) -> Result<Option<u64>, NnError> {
        Ok(None)
    }

    fn resize(
        &mut self,
        name: &'static str,
        array: &mut Vec<f32>,
        dtype: DType,
        elems: usize,
    ) -> Result<(), NnError> {
        assert!(dtype == DType::F32, "the processor computes in f32");
        let more = elems.saturating_sub(array.len());
        reserve_exact(array, more).map_err(|_| NnError::memory(name, elems))?;
        array.resize(elems, 0.0);
        Ok(())
    }

    fn upload(
        &mut self,
        batch: &Batch<'_>,
        tables: &[Arc<RopeTable>],
    ) -> Result<CpuBatch, NnError> {
        Ok(CpuBatch {
            tokens: batch.tokens.to_vec(),
            labels: batch.labels.to_vec(),
            positions: batch.positions.to_vec(),
            order: match batch.order {
                [] => token_order(batch.tokens),
                order => order.to_vec(),
            },
            tables: tables.to_vec(),
            len: batch.len,
            labelled: batch.labels.iter().filter(|&&label| label != IGNORE).count() as u64,
            rows: LabelledTokens::of(batch.labels),
        })
    }

    fn totals(&mut self) -> Result<CpuTotals, NnError> {
        Ok(CpuTotals::default())
    }

    fn read(&mut self, totals: CpuTotals) -> Result<Sums, NnError> {
        let CpuTotals { nats, z_loss, labelled, grad_norm, .. } = totals;
        let seconds = Some(std::mem::take(&mut self.seconds));
        Ok(Sums { nats, z_loss, labelled, grad_norm, seconds })
    }

    fn clear(&mut self, array: &mut Vec<f32>) -> Result<(), NnError> {
        array.fill(0.0);
        Ok(())
    }

    fn clear_part(&mut self, part: PartMut<'_, Vec<f32>>) -> Result<(), NnError> {
        part.values().fill(0.0);
        Ok(())
    }

    /// All memory is the host's, so this copies and what waits for it need not.
    fn leave(&mut self, from: &Vec<f32>, to: &mut Vec<f32>) -> Result<(), NnError> {
        to.copy_from_slice(from);
        Ok(())
    }

    fn left(&mut self, _: &Vec<f32>) -> Result<(), NnError> {
        Ok(())
    }

    fn bring(&mut self, from: &Vec<f32>, into: &mut Vec<f32>) -> Result<(), NnError> {
        into.copy_from_slice(from);
        Ok(())
    }

    fn brought(&mut self, _: &Vec<f32>) -> Result<(), NnError> {
        Ok(())
    }

    fn state_memory(&self) -> ProcessMemory {
        ProcessMemory::default()
    }

    fn copy_out(
        &mut self,
        from: &[ArrayBytes<'_, Vec<f32>>],
        to: &ProcessMemory,
    ) -> Result<(), NnError> {
        let bytes = from.iter().map(|of| &bytemuck::cast_slice(of.array)[of.bytes.clone()]);
        to.fill(&bytes.collect::<Vec<&[u8]>>());
        Ok(())
    }

    fn transfers(&mut self, ranks: &dyn Sharing) -> Result<Box<dyn Transfers<Self>>, NnError> {
        Ok(Box::new(ThroughHost::new(ranks.through_host()?)))
    }

    fn stream_transfers(
        &mut self,
        ranks: &dyn TensorSharing,
    ) -> Result<Box<dyn StreamTransfers<Self>>, NnError> {
        Ok(Box::new(StreamThroughHost::new(ranks.through_host()?)))
    }

    fn fill(&mut self, into: PartMut<'_, Vec<f32>>, values: &[f32]) -> Result<(), NnError> {
        into.values().copy_from_slice(values);
        Ok(())
    }

    fn repeat(&mut self, part: PartMut<'_, Vec<f32>>, period: usize) -> Result<(), NnError> {
        let (first, rest) = part.values().split_at_mut(period);
        rest.chunks_mut(period.max(1)).for_each(|some| some.copy_from_slice(&first[..some.len()]));
        Ok(())
    }

    fn download(&mut self, from: Part<'_, Vec<f32>>, into: &mut [f32]) -> Result<(), NnError> {
        into.copy_from_slice(from.values());
        Ok(())
    }

    fn fill_weights(
        &mut self,
        into: &mut Weights<Vec<f32>>,
        first: usize,
        masters: &[f32],
    ) -> Result<(), NnError> {
        into.array[first..][..masters.len()].copy_from_slice(masters);
        Ok(())
    }

    fn download_weights(
        &mut self,
        from: &Weights<Vec<f32>>,
        first: usize,
        masters: &mut [f32],
    ) -> Result<(), NnError> {
        masters.copy_from_slice(&from.array[first..][..masters.len()]);
        Ok(())
    }

    fn plan(
        &mut self,
        program: &AttentionProgram,
        shape: &AttentionShape,
    ) -> Result<CpuPlan, NnError> {
        let plan = CpuPlan::new(program, shape)?;
        Ok(match &self.first {
            Some(first) => plan.with_workspace_of(first),
            None => self.first.insert(plan).clone(),
        })
    }

    fn bind(
        &mut self,
        plan: &CpuPlan,
        documents: &[i32],
        batch: &CpuBatch,
    ) -> Result<CpuPlan, NnError> {
        plan.over([documents.len() / batch.len, batch.len], documents)
    }

    fn at(&mut self, plan: &CpuPlan, position: usize) -> Result<CpuPlan, NnError> {
        plan.at(position)
    }

    fn live_pairs(&self, plan: &CpuPlan) -> Option<f64> {
        plan.live_pairs()
    }

    fn plan_bytes(&mut self, plan: &CpuPlan) -> Result<PlanBytes, NnError> {
        plan.bytes()
    }

    fn spans(&mut self, spans: &[Span]) -> Result<Vec<Span>, NnError> {
        Ok(spans.to_vec())
    }

    fn fill_moment(
        &mut self,
        moment: Moment,
        elems: usize,
        into: &mut Vec<f32>,
        first: usize,
        values: &[f32],
    ) -> Result<(), NnError> {
        match self.moments {
            MomentDtype::F32 => into[first..][..values.len()].copy_from_slice(values),
            _ => moments::write(moment, into, elems, first, values),
        }
        Ok(())
    }

    fn download_moment(
        &mut self,
        moment: Moment,
        elems: usize,
        from: &Vec<f32>,
        first: usize,
        values: &mut [f32],
    ) -> Result<(), NnError> {
        match self.moments {
            MomentDtype::F32 => values.copy_from_slice(&from[first..][..values.len()]),
            _ => moments::read(moment, from, elems, first, values),
        }
        Ok(())
    }

    fn clip(
        &mut self,
        step: &OptimizerStep,
        gradients: &Vec<f32>,
        more: bool,
        sum: Option<SumOverRanks<'_>>,
        totals: &mut CpuTotals,
    ) -> Result<(), NnError> {
        timed(&mut self.seconds.optimizer, || {
            let before = if more { totals.squares } else { 0.0 };
            let own = update::squares(gradients);
            let elsewhere = sum.as_ref().map_or(&[][..], |over| over.elsewhere).iter();
            let square = |&x: &f32| f64::from(x) * f64::from(x);
            let of_place =
                elsewhere.map(|of| gradients[of.clone()].iter().map(square).sum::<f64>());
            let own = own - of_place.sum::<f64>();
            let &mut CpuTotals { nats, z_loss, labelled, .. } = totals;
            let own = RankSums { squares: own, nats, z_loss, labelled };
            let of_all = sum.map_or(Ok(own), |over| over.of_all(own, more))?;
            (totals.nats, totals.z_loss) = (of_all.nats, of_all.z_loss);
            totals.labelled = of_all.labelled;
            totals.squares = before + of_all.squares;
            let mean = 1.0 / totals.labelled.max(1) as f64;
            totals.grad_norm = totals.squares.sqrt() * mean;
            totals.factor = mean * clip_factor(totals.grad_norm, step.clip_norm);
            Ok(())
        })
    }

    fn update(
        &mut self,
        step: &OptimizerStep,
        spans: &Vec<Span>,
        weights: &mut Weights<Vec<f32>>,
        (gradients, first): (&Vec<f32>, usize),
        moments: &mut Moments,
        elems: usize,
        totals: &mut CpuTotals,
    ) -> Result<(), NnError> {
        if totals.nats.is_finite() && totals.grad_norm.is_finite() {
            let words = [&mut moments.mean[..], &mut moments.square[..]];
            let kept = update::Kept { elems, dtype: self.moments, words };
            let array = &mut weights.array;
            timed(&mut self.seconds.optimizer, || {
                update::update(step, spans, array, (gradients, first), kept, totals.factor);
            });
        }
        Ok(())
    }

    fn embed(
        &mut self,
        batch: &CpuBatch,
        first: Option<usize>,
        table: Part<'_, Vec<f32>>,
        width: usize,
        scale: f32,
        out: &mut Vec<f32>,
    ) -> Result<(), NnError> {
        embed::gather(&batch.tokens, first.unwrap_or(0), table.values(), width, scale, out);
        Ok(())
    }

    fn embed_backward(
        &mut self,
        batch: &CpuBatch,
        first: Option<usize>,
        d_out: &Vec<f32>,
        width: usize,
        scale: f32,
        d_table: PartMut<'_, Vec<f32>>,
    ) -> Result<(), NnError> {
        let (first, d_table) = (first.unwrap_or(0), d_table.sums());
        embed::scatter_add(&batch.tokens, &batch.order, first, d_out, width, scale, d_table);
        Ok(())
    }

    fn rms_norm(
        &mut self,
        x: &Vec<f32>,
        weight: Part<'_, Vec<f32>>,
        norm: Norm,
        inverse: &mut Vec<f32>,
        out: &mut Vec<f32>,
    ) -> Result<(), NnError> {
        norm::forward(x, weight.values(), norm, inverse, out);
        Ok(())
    }

    fn add_rms_norm(
        &mut self,
        residual: &Vec<f32>,
        x: &mut Vec<f32>,
        weight: Part<'_, Vec<f32>>,
        norm: Norm,
        inverse: &mut Vec<f32>,
        out: &mut Vec<f32>,
    ) -> Result<(), NnError> {
        norm::add_forward(residual, x, weight.values(), norm, inverse, out);
        Ok(())
    }

    fn rms_norm_again(
        &mut self,
        forward: NormForward<'_, Vec<f32>>,
        out: &mut Vec<f32>,
    ) -> Result<(), NnError> {
        norm::again(&forward, out);
        Ok(())
    }

    fn rms_norm_backward(
        &mut self,
        forward: NormForward<'_, Vec<f32>>,
        d_out: &Vec<f32>,
        d_x: PartMut<'_, Vec<f32>>,
        d_weight: Option<PartMut<'_, Vec<f32>>>,
        again: Option<&mut Vec<f32>>,
    ) -> Result<(), NnError> {
        norm::backward(&forward, d_out, d_x, d_weight.map(PartMut::sums));
        again.into_iter().for_each(|out| norm::again(&forward, out));
        Ok(())
    }

    fn linear(
        &mut self,
        LinearShape { tokens, inputs, outputs }: LinearShape,
        x: Part<'_, Vec<f32>>,
        weight: Part<'_, Vec<f32>>,
        bias: Option<Part<'_, Vec<f32>>>,
        add: Option<&Vec<f32>>,
        y: &mut Vec<f32>,
    ) -> Result<(), NnError> {
        let a = Matrix::rows(x.values(), inputs);
        let b = Matrix::transposed(weight.values(), inputs);
        timed(&mut self.seconds.linear, || {
            // `gemm` adds only to what is in its destination.
            if let Some(add) = add {
                let size = y.len().div_ceil(rayon::current_num_threads()).max(1 << 14);
                let pieces = y.par_chunks_mut(size).zip(add.par_chunks(size));
                pieces.for_each(|(y, add)| y.copy_from_slice(add));
            }
            matmul([tokens, outputs, inputs], a, b, y, outputs, add.is_some());
            if let Some(bias) = bias {
                let bias = bias.values();
                y.par_chunks_mut(outputs * TASK).for_each(|rows| {
                    for row in rows.chunks_exact_mut(outputs) {
                        row.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
                    }
                });
            }
        });
        Ok(())
    }

    fn bias_backward(
        &mut self,
        d_y: &Vec<f32>,
        d_bias: PartMut<'_, Vec<f32>>,
    ) -> Result<(), NnError> {
        let d_bias = d_bias.sums();
        let width = d_bias.len();
        // Every column is summed in the order of the tokens.
        d_bias.par_chunks_mut(256).enumerate().for_each(|(i, sums)| {
            for row in d_y.chunks_exact(width) {
                sums.iter_mut().zip(&row[i * 256..]).for_each(|(sum, d)| *sum += d);
            }
        });
        Ok(())
    }

    fn head_norm(
        &mut self,
        heads: PackedHeads,
        qkv: &Vec<f32>,
        weight: Part<'_, Vec<f32>>,
        norm: Norm,
        turn: Option<Turn<'_, CpuBatch>>,
        inverse: &mut Vec<f32>,
        out: &mut Vec<f32>,
    ) -> Result<(), NnError> {
        norm::heads_forward(heads, qkv, weight.values(), norm, inverse, out);
        turn.map_or(Ok(()), |turn| self.rope(turn, heads, Rotation::Forward, out))
    }

    fn head_norm_backward(
        &mut self,
        heads: PackedHeads,
        forward: NormForward<'_, Vec<f32>>,
        turn: Option<Turn<'_, CpuBatch>>,
        d_qkv: &mut Vec<f32>,
        d_weight: Option<PartMut<'_, Vec<f32>>>,
    ) -> Result<(), NnError> {
        turn.map_or(Ok(()), |turn| self.rope(turn, heads, Rotation::Backward, d_qkv))?;
        norm::heads_backward(heads, &forward, d_qkv, d_weight.map(PartMut::sums));
        Ok(())
    }

    fn add(&mut self, x: &Vec<f32>, y: &mut Vec<f32>) -> Result<(), NnError> {
        let size = y.len().div_ceil(rayon::current_num_threads()).max(1 << 14);
        let pieces = y.par_chunks_mut(size).zip(x.par_chunks(size));
        pieces.for_each(|(y, x)| y.iter_mut().zip(x).for_each(|(y, x)| *y += x));
        Ok(())
    }

    fn linear_backward_input(
        &mut self,
        LinearShape { tokens, inputs, outputs }: LinearShape,
        d_y: &Vec<f32>,
        weight: Part<'_, Vec<f32>>,
        d_x: &mut Vec<f32>,
    ) -> Result<(), NnError> {
        let (a, b) = (Matrix::rows(d_y, outputs), Matrix::rows(weight.values(), inputs));
        let work = || matmul([tokens, inputs, outputs], a, b, d_x, inputs, false);
        timed(&mut self.seconds.linear, work);
        Ok(())
    }

    fn linear_backward_weight(
        &mut self,
        LinearShape { tokens, inputs, outputs }: LinearShape,
        d_y: &Vec<f32>,
        x: &Vec<f32>,
        d_weight: PartMut<'_, Vec<f32>>,
    ) -> Result<(), NnError> {
        let (sizes, sums) = ([outputs, inputs, tokens], &mut self.sums);
        let work = || matmul_deep(sizes, d_y, x, d_weight.sums(), sums);
        timed(&mut self.seconds.linear, work);
        Ok(())
    }

    fn rope(
        &mut self,
        Turn { batch, table, pairing }: Turn<'_, CpuBatch>,
        heads: PackedHeads,
        rotation: Rotation,
        qkv: &mut Vec<f32>,
    ) -> Result<(), NnError> {
        let table = &batch.tables[table];
        rope::rotate(heads, pairing, table, &batch.positions, rotation, qkv);
        Ok(())
    }

    fn attention(
        &mut self,
        layer: LayerAttention<'_, Self>,
        qkv: &Vec<f32>,
        cache: Option<KvCache<'_, Vec<f32>>>,
        out: &mut Vec<f32>,
        lse: &mut Vec<f32>,
    ) -> Result<(), NnError> {
        timed(&mut self.seconds.attention, || match cache {
            None => attention::forward(&layer, qkv, out, lse),
            Some(cache) => attention::forward_cached(&layer, qkv, cache, out, lse),
        })
    }

    fn attention_backward(
        &mut self,
        layer: LayerAttention<'_, Self>,
        qkv: &Vec<f32>,
        out: &Vec<f32>,
        lse: &Vec<f32>,
        d_out: &Vec<f32>,
        d_qkv: &mut Vec<f32>,
        d_learned: PartMut<'_, Vec<f32>>,
    ) -> Result<(), NnError> {
        timed(&mut self.seconds.attention, || {
            attention::backward(&layer, qkv, out, lse, d_out, d_qkv, d_learned.sums())
        })
    }

    fn gated(
        &mut self,
        activation: Activation,
        width: usize,
        gate_up: &Vec<f32>,
        out: &mut Vec<f32>,
    ) -> Result<(), NnError> {
        gated::forward(activation, width, gate_up, out);
        Ok(())
    }

    fn gated_backward(
        &mut self,
        activation: Activation,
        width: usize,
        gate_up: &mut Vec<f32>,
        d_out: &mut Vec<f32>,
    ) -> Result<(), NnError> {
        gated::backward(activation, width, gate_up, d_out);
        Ok(())
    }

    fn loss(
        &mut self,
        batch: &CpuBatch,
        operands: LossOperands<'_, Vec<f32>>,
        each: Option<&mut Vec<f32>>,
        gradients: Option<LossGradients<'_, Vec<f32>>>,
        totals: &mut CpuTotals,
    ) -> Result<(), NnError> {
        totals.labelled += batch.labelled;
        let [nats, z_loss] = timed(&mut self.seconds.loss, || {
            let each = each.map(Vec::as_mut_slice);
            let rows = batch.rows.as_ref().filter(|_| each.is_none());
            let kept = &mut self.sums;
            loss::of_batch(batch, rows, operands, gradients, kept, |operands, gradients| {
                loss::cross_entropy(operands, each, gradients)
            })
        });
        totals.add(nats, z_loss);
        Ok(())
    }

    fn loss_part(
        &mut self,
        batch: &CpuBatch,
        operands: LossOperands<'_, Vec<f32>>,
        part: Option<VocabularyPart<'_, Self>>,
        gradients: Option<LossGradients<'_, Vec<f32>>>,
        totals: &mut CpuTotals,
    ) -> Result<(), NnError> {
        let mut part = part.expect("the processor computes");
        totals.labelled += batch.labelled;
        let (mut kept, mut seconds) = (std::mem::take(&mut self.sums), 0.0);
        let nats = timed(&mut seconds, || {
            let first = part.first;
            let mut all = |own: Vec<f32>| {
                let mut all = vec![0.0; part.parts * own.len()];
                part.all(self, [own.len() / loss::TOLD, loss::TOLD], &own, &mut all)?;
                Ok(all)
            };
            let rows = batch.rows.as_ref();
            loss::of_batch(batch, rows, operands, gradients, &mut kept, |operands, gradients| {
                let part = loss::Part { first, all: &mut all };
                loss::cross_entropy_part(operands, part, gradients)
            })
        });
        self.sums = kept;
        self.seconds.loss += seconds;
        let [nats, z_loss] = nats?;
        totals.add(nats, z_loss);
        Ok(())
    }
}
