//! A backend that computes nothing: it notes what a step would do.
//!
//! The step is the one that trains, so what is noted cannot differ from what runs: every array
//! with its size and the blocks between which it holds something, every block with its operations
//! and the bytes that it reads and writes.

use std::ops::Range;
use std::sync::Arc;

use foveate::DType;

use crate::architecture::Activation;
use crate::backend::{
    Array, ArrayBytes, AttentionShape, Blocks, KvCache, LayerAttention, LinearShape, LossGradients,
    LossOperands, Moments, NormForward, PackedHeads, Part, PartMut, PlanBytes, ProcessMemory,
    Rotation, StreamTransfers, SumOverRanks, Sums, Transfers, Turn, VocabularyPart, Weights,
};
use crate::batch::Batch;
use crate::config::Norm;
use crate::error::NnError;
use crate::moments::Moment;
use crate::optimizer::{OptimizerStep, Span};
use crate::precision::Precision;
use crate::program::AttentionProgram;
use crate::rope::RopeTable;
use crate::sharing::{Sharing, TensorSharing};
use crate::through_host::{StreamThroughHost, ThroughHost};

/// Notes what blocks would do.
#[derive(Debug)]
pub struct Dry {
    precision: Precision,
    logits_tokens: usize,
    shares_memory: bool,
    /// Bytes of the host's memory beside that of a device.
    pub(crate) host_bytes: u64,
    pub(crate) arrays: Vec<NotedArray>,
    pub(crate) blocks: Vec<NotedBlock>,
}

/// An array without elements.
#[derive(Debug)]
pub struct DryArray {
    /// Its index among all; none before it was given a size.
    pub(crate) index: Option<usize>,
    dtype: DType,
    elems: usize,
}

impl Default for DryArray {
    fn default() -> Self {
        Self { index: None, dtype: DType::F32, elems: 0 }
    }
}

impl Array for DryArray {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn elems(&self) -> usize {
        self.elems
    }
}

/// An array of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct NotedArray {
    /// What it holds.
    pub name: &'static str,
    /// Type of its elements.
    pub dtype: DType,
    /// Its size.
    pub bytes: u64,
    /// The blocks, by index, between which its contents are needed: each range begins with the
    /// block that overwrites it and ends behind the last one that reads what was written. One
    /// that was written before the step begins with 0; none are of an array that no block touches.
    pub needed: Vec<Range<usize>>,
}

/// A block that was called.
#[derive(Clone, Debug, PartialEq)]
pub struct NotedBlock {
    /// Its name.
    pub block: &'static str,
    /// Floating-point operations of its products, a multiply-add being two; attention counts every
    /// pair of query and key.
    pub flops: f64,
    /// Bytes that it reads and writes, each once.
    pub bytes: f64,
    /// That of a product with weights of a layer, or of either of its gradients.
    pub linear: Option<LinearShape>,
    /// Rows, columns and terms of a product that is a gradient of a weight.
    pub(crate) deep_product: Option<[usize; 3]>,
}

/// What a block does with an array.
#[derive(Clone, Copy)]
enum Use {
    Reads,
    Updates,
    /// A part of the array, so that what else it holds stays needed.
    Writes,
    Overwrites,
}

/// An array, the elements that a block touches, and what it does with them.
type Access = (Option<usize>, usize, Use);

fn reads(array: &DryArray) -> Access {
    (array.index, array.elems, Use::Reads)
}

fn reads_part(part: &Part<'_, DryArray>) -> Access {
    (part.array.index, part.place.len(), Use::Reads)
}

fn reads_norm(forward: &NormForward<'_, DryArray>) -> [Access; 3] {
    [reads(forward.x), reads_part(&forward.weight), reads(forward.inverse)]
}

fn updates(array: &DryArray) -> Access {
    (array.index, array.elems, Use::Updates)
}

fn updates_part(part: &PartMut<'_, DryArray>) -> Access {
    let usage = if part.accumulate { Use::Updates } else { Use::Writes };
    (part.array.index, part.place.len(), usage)
}

fn overwrites(array: &DryArray) -> Access {
    (array.index, array.elems, Use::Overwrites)
}

impl Dry {
    /// Notes what `blocks` would do with a vocabulary of `vocab`.
    pub fn of<B: Blocks>(blocks: &B, vocab: usize) -> Self {
        let shares_memory = blocks.shares_memory();
        Self { shares_memory, ..Self::new(blocks.precision(), blocks.logits_tokens(vocab)) }
    }

    /// Notes what blocks of a precision would do that hold the logits of so many tokens at once and whose
    /// arrays have memory of their own each.
    pub fn new(precision: Precision, logits_tokens: usize) -> Self {
        let (host_bytes, arrays, blocks) = Default::default();
        Self { precision, logits_tokens, shares_memory: false, host_bytes, arrays, blocks }
    }

    /// The same of blocks whose arrays may share memory.
    pub fn sharing(self) -> Self {
        Self { shares_memory: true, ..self }
    }

    /// The same, with nothing noted.
    pub(crate) fn again(&self) -> Self {
        Self { shares_memory: self.shares_memory, ..Self::new(self.precision, self.logits_tokens) }
    }

    /// An array that a step finds and leaves behind, such as weights.
    pub(crate) fn state(&mut self, name: &'static str, dtype: DType, elems: usize) -> DryArray {
        let bytes = (elems as u64).saturating_mul(dtype.bytes() as u64);
        self.arrays.push(NotedArray { name, dtype, bytes, needed: Vec::new() });
        DryArray { index: Some(self.arrays.len() - 1), dtype, elems }
    }

    fn note(&mut self, block: &'static str, accesses: &[Access]) -> Result<(), NnError> {
        self.product(block, accesses, 0.0, None)
    }

    fn product(
        &mut self,
        block: &'static str,
        accesses: &[Access],
        flops: f64,
        deep_product: Option<[usize; 3]>,
    ) -> Result<(), NnError> {
        let now = self.blocks.len();
        let mut bytes = 0.0;
        for &(index, elems, usage) in accesses {
            let array = &mut self.arrays[index.expect("the step has fitted its arrays")];
            let times = if matches!(usage, Use::Updates) { 2.0 } else { 1.0 };
            bytes += times * elems as f64 * array.dtype.bytes() as f64;
            match (usage, array.needed.last_mut()) {
                (Use::Overwrites, _) => array.needed.push(now..now + 1),
                (_, Some(last)) => last.end = now + 1,
                // It was there before the step.
                (_, None) => array.needed.push(0..now + 1),
            }
        }
        self.blocks.push(NotedBlock { block, flops, bytes, linear: None, deep_product });
        Ok(())
    }

    /// [`Self::product`], with weights of a layer.
    fn layer_product(
        &mut self,
        block: &'static str,
        accesses: &[Access],
        shape: LinearShape,
        deep_product: Option<[usize; 3]>,
    ) -> Result<(), NnError> {
        self.product(block, accesses, shape.flops(), deep_product)?;
        self.blocks.last_mut().expect("it was noted").linear = Some(shape);
        Ok(())
    }
}

impl LinearShape {
    fn flops(&self) -> f64 {
        2.0 * self.tokens as f64 * self.inputs as f64 * self.outputs as f64
    }
}

impl PackedHeads {
    /// Operations of one product of attention over all pairs of query and key.
    fn flops(&self, keys: usize) -> f64 {
        [self.rows, self.len, self.heads_q, keys, self.dim]
            .iter()
            .map(|&n| n as f64)
            .product::<f64>()
            * 2.0
    }
}

impl Blocks for Dry {
    type Plan = ();
    type Array = DryArray;
    type Batch = ();
    type Totals = ();
    /// Elements of all spans.
    type Spans = usize;
    type StateMemory = ProcessMemory;

    fn precision(&self) -> Precision {
        self.precision
    }

    fn logits_tokens(&self, _: usize) -> usize {
        self.logits_tokens
    }

    fn free_bytes(&mut self) -> Result<Option<u64>, NnError> {
        Ok(None)
    }

    fn shares_memory(&self) -> bool {
        self.shares_memory
    }

    fn resize(
        &mut self,
        name: &'static str,
        array: &mut DryArray,
        dtype: DType,
        elems: usize,
    ) -> Result<(), NnError> {
        *array = self.state(name, dtype, elems);
        Ok(())
    }

    fn resize_on_host(
        &mut self,
        _: &'static str,
        array: &mut DryArray,
        dtype: DType,
        elems: usize,
    ) -> Result<(), NnError> {
        let bytes =
            |elems: usize, dtype: DType| (elems as u64).saturating_mul(dtype.bytes() as u64);
        let before = bytes(array.elems, array.dtype);
        self.host_bytes =
            self.host_bytes.saturating_sub(before).saturating_add(bytes(elems, dtype));
        *array = DryArray { index: None, dtype, elems };
        Ok(())
    }

    fn leave(&mut self, from: &DryArray, _: &mut DryArray) -> Result<(), NnError> {
        self.note("copy to the host", &[reads(from)])
    }

    /// The array is needed until here.
    fn left(&mut self, from: &DryArray) -> Result<(), NnError> {
        let (array, now) = (from.index.expect("it was copied"), self.blocks.len());
        let last = self.arrays[array].needed.last_mut().expect("it was copied");
        last.end = last.end.max(now);
        Ok(())
    }

    /// The array is written from here on, beside the blocks.
    fn bring(&mut self, _: &DryArray, into: &mut DryArray) -> Result<(), NnError> {
        self.note("copy from the host", &[overwrites(into)])
    }

    fn brought(&mut self, _: &DryArray) -> Result<(), NnError> {
        Ok(())
    }

    fn state_memory(&self) -> ProcessMemory {
        ProcessMemory::default()
    }

    fn copy_out(
        &mut self,
        _: &[ArrayBytes<'_, DryArray>],
        _: &ProcessMemory,
    ) -> Result<(), NnError> {
        Ok(())
    }

    fn upload(&mut self, _: &Batch<'_>, _: &[Arc<RopeTable>]) -> Result<(), NnError> {
        Ok(())
    }

    fn totals(&mut self) -> Result<(), NnError> {
        Ok(())
    }

    fn read(&mut self, (): ()) -> Result<Sums, NnError> {
        Ok(Sums::default())
    }

    fn clear(&mut self, array: &mut DryArray) -> Result<(), NnError> {
        self.note("clear", &[overwrites(array)])
    }

    fn clear_part(&mut self, _: PartMut<'_, DryArray>) -> Result<(), NnError> {
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

    fn fill(&mut self, _: PartMut<'_, DryArray>, _: &[f32]) -> Result<(), NnError> {
        Ok(())
    }

    fn repeat(&mut self, _: PartMut<'_, DryArray>, _: usize) -> Result<(), NnError> {
        Ok(())
    }

    /// Leaves `into` as it is.
    fn download(&mut self, _: Part<'_, DryArray>, _: &mut [f32]) -> Result<(), NnError> {
        Ok(())
    }

    fn fill_weights(
        &mut self,
        _: &mut Weights<DryArray>,
        _: usize,
        _: &[f32],
    ) -> Result<(), NnError> {
        Ok(())
    }

    /// Leaves `masters` as they are.
    fn download_weights(
        &mut self,
        _: &Weights<DryArray>,
        _: usize,
        _: &mut [f32],
    ) -> Result<(), NnError> {
        Ok(())
    }

    fn plan(&mut self, _: &AttentionProgram, _: &AttentionShape) -> Result<(), NnError> {
        Ok(())
    }

    fn bind(&mut self, (): &(), _: &[i32], (): &()) -> Result<(), NnError> {
        Ok(())
    }

    fn at(&mut self, (): &(), _: usize) -> Result<(), NnError> {
        Ok(())
    }

    fn live_pairs(&self, (): &()) -> Option<f64> {
        None
    }

    fn plan_bytes(&mut self, (): &()) -> Result<PlanBytes, NnError> {
        Ok(PlanBytes::default())
    }

    fn spans(&mut self, spans: &[Span]) -> Result<usize, NnError> {
        Ok(spans.iter().map(|span| span.place.len()).sum())
    }

    fn fill_moment(
        &mut self,
        _: Moment,
        _: usize,
        _: &mut DryArray,
        _: usize,
        _: &[f32],
    ) -> Result<(), NnError> {
        Ok(())
    }

    /// Leaves `values` as they are.
    fn download_moment(
        &mut self,
        _: Moment,
        _: usize,
        _: &DryArray,
        _: usize,
        _: &mut [f32],
    ) -> Result<(), NnError> {
        Ok(())
    }

    fn clip(
        &mut self,
        _: &OptimizerStep,
        gradients: &DryArray,
        _: bool,
        _: Option<SumOverRanks<'_>>,
        (): &mut (),
    ) -> Result<(), NnError> {
        self.note("clip", &[reads(gradients)])
    }

    fn update(
        &mut self,
        _: &OptimizerStep,
        &spanned: &usize,
        weights: &mut Weights<DryArray>,
        (gradients, _): (&DryArray, usize),
        moments: &mut Moments<DryArray>,
        elems: usize,
        (): &mut (),
    ) -> Result<(), NnError> {
        let kept = [&weights.array, &weights.remainders, &moments.mean, &moments.square];
        let kept = kept.into_iter().filter(|array| array.index.is_some());
        let mut accesses = vec![(gradients.index, spanned, Use::Reads)];
        // A moment may have fewer words than elements.
        let share = |array: &DryArray| spanned * array.elems.min(elems) / elems.max(1);
        accesses.extend(kept.map(|array| (array.index, share(array), Use::Updates)));
        self.note("update", &accesses)
    }

    fn embed(
        &mut self,
        (): &(),
        _: Option<usize>,
        _: Part<'_, DryArray>,
        _: usize,
        _: f32,
        out: &mut DryArray,
    ) -> Result<(), NnError> {
        // As much is read of the table as is written.
        self.note("embed", &[overwrites(out), reads(out)])
    }

    fn embed_backward(
        &mut self,
        (): &(),
        _: Option<usize>,
        d_out: &DryArray,
        _: usize,
        _: f32,
        d_table: PartMut<'_, DryArray>,
    ) -> Result<(), NnError> {
        let touched = d_out.elems.min(d_table.place.len());
        let table = (d_table.array.index, touched, Use::Updates);
        self.note("embed backward", &[reads(d_out), table])
    }

    fn rms_norm(
        &mut self,
        x: &DryArray,
        weight: Part<'_, DryArray>,
        _: Norm,
        inverse: &mut DryArray,
        out: &mut DryArray,
    ) -> Result<(), NnError> {
        let accesses = [reads(x), reads_part(&weight), overwrites(inverse), overwrites(out)];
        self.note("rms_norm", &accesses)
    }

    fn add_rms_norm(
        &mut self,
        residual: &DryArray,
        x: &mut DryArray,
        weight: Part<'_, DryArray>,
        _: Norm,
        inverse: &mut DryArray,
        out: &mut DryArray,
    ) -> Result<(), NnError> {
        let weight = reads_part(&weight);
        let accesses = [reads(residual), updates(x), weight, overwrites(inverse), overwrites(out)];
        self.note("add_rms_norm", &accesses)
    }

    fn rms_norm_again(
        &mut self,
        forward: NormForward<'_, DryArray>,
        out: &mut DryArray,
    ) -> Result<(), NnError> {
        let [x, weight, inverse] = reads_norm(&forward);
        let accesses = [x, weight, inverse, overwrites(out)];
        self.note("rms_norm again", &accesses)
    }

    fn rms_norm_backward(
        &mut self,
        forward: NormForward<'_, DryArray>,
        d_out: &DryArray,
        d_x: PartMut<'_, DryArray>,
        d_weight: Option<PartMut<'_, DryArray>>,
        again: Option<&mut DryArray>,
    ) -> Result<(), NnError> {
        let d_x = if d_x.accumulate { updates(d_x.array) } else { overwrites(d_x.array) };
        let mut accesses = reads_norm(&forward).to_vec();
        accesses.extend([reads(d_out), d_x]);
        accesses.extend(d_weight.as_ref().map(updates_part));
        accesses.extend(again.map(|out| overwrites(out)));
        self.note("rms_norm backward", &accesses)
    }

    fn linear(
        &mut self,
        shape: LinearShape,
        x: Part<'_, DryArray>,
        weight: Part<'_, DryArray>,
        bias: Option<Part<'_, DryArray>>,
        add: Option<&DryArray>,
        y: &mut DryArray,
    ) -> Result<(), NnError> {
        let mut accesses = vec![reads_part(&x), reads_part(&weight), overwrites(y)];
        accesses.extend(bias.as_ref().map(reads_part));
        accesses.extend(add.map(reads));
        self.layer_product("linear", &accesses, shape, None)
    }

    fn bias_backward(
        &mut self,
        d_y: &DryArray,
        d_bias: PartMut<'_, DryArray>,
    ) -> Result<(), NnError> {
        self.note("bias backward", &[reads(d_y), updates_part(&d_bias)])
    }

    fn head_norm(
        &mut self,
        _: PackedHeads,
        qkv: &DryArray,
        weight: Part<'_, DryArray>,
        _: Norm,
        _: Option<Turn<'_, ()>>,
        inverse: &mut DryArray,
        out: &mut DryArray,
    ) -> Result<(), NnError> {
        let accesses = [reads(qkv), reads_part(&weight), overwrites(inverse), overwrites(out)];
        self.note("head_norm", &accesses)
    }

    fn head_norm_backward(
        &mut self,
        _: PackedHeads,
        forward: NormForward<'_, DryArray>,
        _: Option<Turn<'_, ()>>,
        d_qkv: &mut DryArray,
        d_weight: Option<PartMut<'_, DryArray>>,
    ) -> Result<(), NnError> {
        let mut accesses = reads_norm(&forward).to_vec();
        accesses.push(updates(d_qkv));
        accesses.extend(d_weight.as_ref().map(updates_part));
        self.note("head_norm backward", &accesses)
    }

    fn add(&mut self, x: &DryArray, y: &mut DryArray) -> Result<(), NnError> {
        self.note("add", &[reads(x), updates(y)])
    }

    fn linear_backward_input(
        &mut self,
        shape: LinearShape,
        d_y: &DryArray,
        weight: Part<'_, DryArray>,
        d_x: &mut DryArray,
    ) -> Result<(), NnError> {
        let accesses = [reads(d_y), reads_part(&weight), overwrites(d_x)];
        self.layer_product("linear backward, input", &accesses, shape, None)
    }

    fn linear_backward_weight(
        &mut self,
        shape: LinearShape,
        d_y: &DryArray,
        x: &DryArray,
        d_weight: PartMut<'_, DryArray>,
    ) -> Result<(), NnError> {
        let accesses = [reads(d_y), reads(x), updates_part(&d_weight)];
        let sizes = [shape.outputs, shape.inputs, shape.tokens];
        self.layer_product("linear backward, weight", &accesses, shape, Some(sizes))
    }

    fn rope(
        &mut self,
        _: Turn<'_, ()>,
        _: PackedHeads,
        _: Rotation,
        qkv: &mut DryArray,
    ) -> Result<(), NnError> {
        self.note("rope", &[updates(qkv)])
    }

    fn attention(
        &mut self,
        layer: LayerAttention<'_, Self>,
        qkv: &DryArray,
        cache: Option<KvCache<'_, DryArray>>,
        out: &mut DryArray,
        lse: &mut DryArray,
    ) -> Result<(), NnError> {
        let heads = layer.heads;
        let mut keys = heads.len;
        let mut accesses = vec![reads(qkv), overwrites(out), overwrites(lse)];
        if let Some(cache) = &cache {
            keys += cache.position;
            accesses.extend([updates(cache.keys), updates(cache.values)]);
        }
        self.product("attention", &accesses, 2.0 * heads.flops(keys), None)
    }

    fn attention_backward(
        &mut self,
        layer: LayerAttention<'_, Self>,
        qkv: &DryArray,
        out: &DryArray,
        lse: &DryArray,
        d_out: &DryArray,
        d_qkv: &mut DryArray,
        d_learned: PartMut<'_, DryArray>,
    ) -> Result<(), NnError> {
        let d_learned = updates_part(&d_learned);
        let accesses =
            [reads(qkv), reads(out), reads(lse), reads(d_out), overwrites(d_qkv), d_learned];
        let flops = 5.0 * layer.heads.flops(layer.heads.len);
        self.product("attention backward", &accesses, flops, None)
    }

    fn gated(
        &mut self,
        _: Activation,
        _: usize,
        gate_up: &DryArray,
        out: &mut DryArray,
    ) -> Result<(), NnError> {
        self.note("gated", &[reads(gate_up), overwrites(out)])
    }

    fn gated_backward(
        &mut self,
        _: Activation,
        _: usize,
        gate_up: &mut DryArray,
        d_out: &mut DryArray,
    ) -> Result<(), NnError> {
        self.note("gated backward", &[updates(gate_up), updates(d_out)])
    }

    fn loss_part(
        &mut self,
        batch: &(),
        operands: LossOperands<'_, DryArray>,
        _: Option<VocabularyPart<'_, Self>>,
        gradients: Option<LossGradients<'_, DryArray>>,
        totals: &mut (),
    ) -> Result<(), NnError> {
        self.loss(batch, operands, None, gradients, totals)
    }

    fn loss(
        &mut self,
        (): &(),
        operands: LossOperands<'_, DryArray>,
        each: Option<&mut DryArray>,
        gradients: Option<LossGradients<'_, DryArray>>,
        (): &mut (),
    ) -> Result<(), NnError> {
        let LossOperands { x, weight, width, logits, .. } = operands;
        let vocab = weight.place.len() / width;
        let mut accesses = vec![reads(x), reads_part(&weight), overwrites(logits)];
        accesses.extend(each.map(|each| overwrites(each)));
        let product = 2.0 * x.elems as f64 * vocab as f64;
        let Some(LossGradients { d_x, d_weight }) = gradients else {
            return self.product("loss", &accesses, product, None);
        };
        accesses.push(overwrites(d_x));
        accesses.extend(d_weight.as_ref().map(updates_part));
        let sizes = [vocab, width, logits.elems / vocab];
        self.product("loss backward", &accesses, 3.0 * product, Some(sizes))
    }
}
