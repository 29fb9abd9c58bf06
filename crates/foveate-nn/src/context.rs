//! Attention of a batch whose tokens are on several ranks (context parallelism).
//!
//! A rank holds the same tokens of every row of a batch: tokens, labels, documents and positions move
//! together, before [`crate::Batch`] is made of them, and every block but attention works on tokens
//! alone. Attention needs keys of other ranks, so a step asks [`ContextAttention`] for it, which whoever
//! knows the ranks implements. Rows go through host memory, in f32.

use std::ops::Range;

use crate::backend::{Blocks, PackedHeads, Part, PartMut};
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

/// [`ContextAttention`] on arrays of a device.
pub(crate) struct Context<'a> {
    pub attention: &'a mut dyn ContextAttention,
    /// The program of each layer.
    pub programs: &'a [usize],
}

/// A layer's attention on arrays of a device.
pub(crate) struct ContextCall<'a, A> {
    pub layer: usize,
    pub slot: usize,
    pub heads: PackedHeads,
    pub learned: Part<'a, A>,
}

impl<'a> Context<'a> {
    pub fn of(attention: &'a mut dyn ContextAttention, programs: &'a Programs) -> Self {
        Self { attention, programs: programs.of_layer() }
    }

    pub fn forward<B: Blocks>(
        &mut self,
        blocks: &mut B,
        call: ContextCall<'_, B::Array>,
        qkv: &B::Array,
        out: &mut B::Array,
    ) -> Result<(), NnError> {
        let ContextCall { layer, slot, heads, learned } = call;
        let learned = &host(blocks, learned)?;
        let layer = ContextLayer { program: self.programs[layer], slot, heads, learned };
        let (of_qkv, of_out) = places(heads);
        let qkv = host(blocks, Part { array: qkv, place: of_qkv })?;
        let mut values = vec![0.0; of_out.len()];
        self.attention.forward(&layer, &qkv, &mut values)?;
        blocks.fill(PartMut { array: out, place: of_out, accumulate: false }, &values)
    }

    pub fn backward<B: Blocks>(
        &mut self,
        blocks: &mut B,
        call: ContextCall<'_, B::Array>,
        d_out: &B::Array,
        d_qkv: &mut B::Array,
        d_learned: PartMut<'_, B::Array>,
    ) -> Result<(), NnError> {
        let ContextCall { layer, slot, heads, learned } = call;
        let learned = &host(blocks, learned)?;
        let layer = ContextLayer { program: self.programs[layer], slot, heads, learned };
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
