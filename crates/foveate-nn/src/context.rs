//! Attention of a batch whose tokens are on several ranks (context parallelism).
//!
//! A rank holds the same tokens of every row of a batch: tokens, labels, documents and positions move
//! together, before [`crate::Batch`] is made of them, and every block but attention works on tokens
//! alone. Attention needs keys of other ranks. A device that moves them itself ([`DeviceContext`]) is told
//! who needs which by a [`ContextPlan`]; elsewhere a step asks [`ContextAttention`], which whoever knows the
//! ranks implements, and rows go through host memory, in f32.

use std::ops::Range;
use std::sync::Arc;

use crate::backend::{Blocks, ContextOf, PackedHeads, Part, PartMut};
use crate::device_context::{ContextCall, ContextForward, ContextPlan, DeviceContext};
use crate::error::NnError;
use crate::plans::Programs;

/// Attention of the tokens that this rank holds, over the keys of all ranks. Every rank that shares
/// the rows calls the same methods in the same order.
pub trait ContextAttention: Send {
    /// Attention of a layer. `qkv` is the packed projection of the rank's tokens, turned by their
    /// positions, `[rows, len, (heads_q + 2·heads_kv) · dim]`; `out` becomes
    /// `[rows, len, heads_q, dim]`. What the backward pass needs is kept in `layer.slot`, where it
    /// replaces what was there.
    ///
    /// # Errors
    /// When the batch is another than the one that was planned, or ranks fail to meet.
    fn forward(
        &mut self,
        layer: &ContextLayer<'_>,
        qkv: &[f32],
        out: &mut [f32],
    ) -> Result<(), NnError>;

    /// The gradients of the attention whose forward pass kept something in `layer.slot`: `d_qkv` is
    /// overwritten; the part of this rank's queries in the gradients of the learned buffers is added to
    /// `d_learned`, in which the buffers lie as their values do.
    ///
    /// # Errors
    /// Those of [`Self::forward`].
    fn backward(
        &mut self,
        layer: &ContextLayer<'_>,
        d_out: &[f32],
        d_qkv: &mut [f32],
        d_learned: &mut [f32],
    ) -> Result<(), NnError>;

    /// What the ranks do, for a device that does it; then the two methods above are not called. None
    /// where the device does not.
    fn plan(&self) -> Option<&Arc<ContextPlan>> {
        None
    }

    /// Positions that the tokens of all ranks reach: RoPE may depend on them.
    fn positions(&self) -> usize;

    /// Pairs of query and key that the masks let through for this rank's queries, in the mean of the
    /// heads and the layers.
    fn live_pairs(&self) -> f64;
}

/// Which attention of a step is asked for.
#[derive(Clone, Copy, Debug)]
pub struct ContextLayer<'a> {
    /// The layer's program, an index into [`crate::Model::programs`].
    pub program: usize,
    /// Where a forward pass keeps what the backward pass needs: layers that are computed again share
    /// one.
    pub slot: usize,
    /// The packed projection of the rank's tokens.
    pub heads: PackedHeads,
    /// The layer's values of its learned buffers, one after another.
    pub learned: &'a [f32],
}

/// Attention over several ranks, by the device or by the host.
pub(crate) struct Context<'a, B: Blocks> {
    pub attention: &'a mut dyn ContextAttention,
    device: Option<&'a mut (dyn DeviceContext<B, B::Array, B::Batch> + 'static)>,
    /// The program of each layer.
    programs: &'a [usize],
}

impl<'a, B: Blocks> Context<'a, B> {
    /// `attention` of a batch, where its rows are on several ranks; by `device`, where there is one and a plan
    /// for it.
    pub fn of(
        attention: Option<&'a mut (dyn ContextAttention + '_)>,
        device: &'a mut Option<ContextOf<B>>,
        blocks: &mut B,
        programs: &'a Programs,
        heads: PackedHeads,
    ) -> Result<Option<Self>, NnError> {
        let Some(attention) = attention else { return Ok(None) };
        let mut device = device.as_deref_mut().filter(|_| attention.plan().is_some());
        if let (Some(device), Some(plan)) = (&mut device, attention.plan()) {
            device.plan(blocks, programs.all(), heads, plan)?;
        }
        Ok(Some(Self { attention, device, programs: programs.of_layer() }))
    }

    pub fn again(&mut self) -> Context<'_, B> {
        let device = self.device.as_deref_mut();
        Context { attention: &mut *self.attention, device, programs: self.programs }
    }

    pub fn program(&self, layer: usize) -> usize {
        self.programs[layer]
    }

    /// The device that moves keys, in a batch of which some travel.
    pub fn moves_keys(
        &mut self,
    ) -> Option<&mut (dyn DeviceContext<B, B::Array, B::Batch> + 'static)> {
        let travel = self.attention.plan().is_some_and(|plan| plan.keys_travel());
        self.device.as_deref_mut().filter(|_| travel)
    }

    pub fn forward(
        &mut self,
        blocks: &mut B,
        call: ContextCall<'_, B::Array>,
        qkv: &B::Array,
        out: &mut B::Array,
        lse: &mut B::Array,
    ) -> Result<(), NnError> {
        if let Some(device) = &mut self.device {
            return device.forward(blocks, call, qkv, out, lse);
        }
        let ContextCall { program, slot, heads, learned } = call;
        let learned = &host(blocks, learned)?;
        let layer = ContextLayer { program, slot, heads, learned };
        let (of_qkv, of_out) = places(heads);
        let qkv = host(blocks, Part { array: qkv, place: of_qkv })?;
        let mut values = vec![0.0; of_out.len()];
        self.attention.forward(&layer, &qkv, &mut values)?;
        blocks.fill(PartMut { array: out, place: of_out, accumulate: false }, &values)
    }

    /// Behind it [`Self::returned`] is called, before anything reads `d_qkv`.
    pub fn backward(
        &mut self,
        blocks: &mut B,
        call: ContextCall<'_, B::Array>,
        forward: ContextForward<'_, B::Array>,
        d_out: &B::Array,
        d_qkv: &mut B::Array,
        d_learned: PartMut<'_, B::Array>,
    ) -> Result<(), NnError> {
        if let Some(device) = &mut self.device {
            return device.backward(blocks, call, forward, d_out, d_qkv, d_learned);
        }
        let ContextCall { program, slot, heads, learned } = call;
        let learned = &host(blocks, learned)?;
        let layer = ContextLayer { program, slot, heads, learned };
        let (of_qkv, of_out) = places(heads);
        let d_out = host(blocks, Part { array: d_out, place: of_out })?;
        let mut values = vec![0.0; of_qkv.len()];
        let mut sums = vec![0.0; d_learned.place.len()];
        if d_learned.accumulate && !sums.is_empty() {
            let before = Part { array: &*d_learned.array, place: d_learned.place.clone() };
            blocks.download(before, &mut sums)?;
        }
        self.attention.backward(&layer, &d_out, &mut values, &mut sums)?;
        if !sums.is_empty() {
            blocks.fill(d_learned, &sums)?;
        }
        blocks.fill(PartMut { array: d_qkv, place: of_qkv, accumulate: false }, &values)
    }

    /// Makes the `d_qkv` of [`Self::backward`] whole.
    pub fn returned(&mut self, blocks: &mut B, d_qkv: &mut B::Array) -> Result<(), NnError> {
        match &mut self.device {
            Some(device) => device.returned(blocks, d_qkv),
            None => Ok(()),
        }
    }
}

/// Elements of the packed projection and of the output of attention.
fn places(heads: PackedHeads) -> (Range<usize>, Range<usize>) {
    let tokens = heads.rows * heads.len;
    (0..tokens * heads.width(), 0..tokens * heads.heads_q * heads.dim)
}

fn host<B: Blocks>(blocks: &mut B, part: Part<'_, B::Array>) -> Result<Vec<f32>, NnError> {
    let mut values = vec![0.0; part.place.len()];
    if !values.is_empty() {
        blocks.download(part, &mut values)?;
    }
    Ok(values)
}
