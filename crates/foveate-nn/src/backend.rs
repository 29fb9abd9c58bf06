//! The blocks a device has to bring to train a model.
//!
//! [`crate::Cpu`] is one implementation; a GPU is another. Shapes are in tokens `T` (all rows of a
//! batch at once) and widths; matrices are row-major f32 and weights are `[out, in]`. Blocks
//! check nothing but slice bounds: the step that calls them has fitted the arrays.

use std::ops::Range;

use foveate::Plan;

use crate::config::{LearnedBuffer, RopePairing};
use crate::error::NnError;
use crate::rope::RopeTable;

/// A range of an array: a weight among all parameters.
#[derive(Debug)]
pub struct Part<'a, A> {
    /// The array.
    pub array: &'a A,
    /// Elements of it.
    pub place: Range<usize>,
}

/// A [`Part`] to write to: a gradient among all gradients.
#[derive(Debug)]
pub struct PartMut<'a, A> {
    /// The array.
    pub array: &'a mut A,
    /// Elements of it.
    pub place: Range<usize>,
}

/// The sizes of a linear block `y [tokens, outputs] = x [tokens, inputs] · weightᵀ`.
#[derive(Clone, Copy, Debug)]
pub struct LinearShape {
    /// Rows of x and y.
    pub tokens: usize,
    /// Columns of x and of the weight.
    pub inputs: usize,
    /// Columns of y, rows of the weight.
    pub outputs: usize,
}

/// A packed projection `[rows, len, (heads_q + 2·heads_kv) · dim]`: of each token all query heads,
/// all key heads, all value heads.
#[derive(Clone, Copy, Debug)]
pub struct PackedHeads {
    /// Batch entries.
    pub rows: usize,
    /// Tokens of a row.
    pub len: usize,
    /// Query heads.
    pub heads_q: usize,
    /// Key/value heads.
    pub heads_kv: usize,
    /// Length of a head's vector.
    pub dim: usize,
}

impl PackedHeads {
    /// Heads of all three kinds.
    pub fn slots(&self) -> usize {
        self.heads_q + 2 * self.heads_kv
    }

    /// Columns of the projection.
    pub fn width(&self) -> usize {
        self.slots() * self.dim
    }
}

/// Which way RoPE turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rotation {
    /// By the position: the forward pass.
    Forward,
    /// Back: the backward pass.
    Backward,
}

/// Attention of one layer in one batch.
#[derive(Debug)]
pub struct LayerAttention<'a, A> {
    /// The plan of the batch, without the layer's learned buffers.
    pub plan: &'a Plan,
    /// The packed projection.
    pub heads: PackedHeads,
    /// Name and shape of each learned buffer.
    pub learned: &'a [(String, LearnedBuffer)],
    /// The layer's values of them, one after another.
    pub values: Part<'a, A>,
}

/// The blocks of a transformer, forward and backward, on one device.
pub trait Blocks: Sync {
    /// f32 elements on the device.
    type Array: Default + Send + Sync;

    /// Makes `array` hold `elems` elements; what they are is not defined.
    fn resize(&self, array: &mut Self::Array, elems: usize);

    /// `out[t] = table[tokens[t]]`.
    fn embed(
        &self,
        tokens: &[u32],
        table: Part<'_, Self::Array>,
        width: usize,
        out: &mut Self::Array,
    );

    /// `d_table[tokens[t]] += d_out[t]`, in order of `t`.
    fn embed_backward(
        &self,
        tokens: &[u32],
        d_out: &Self::Array,
        width: usize,
        d_table: PartMut<'_, Self::Array>,
    );

    /// `inverse[t] = 1/√(mean(x[t]²) + eps)`, `out[t] = x[t] · inverse[t] · weight`.
    fn rms_norm(
        &self,
        x: &Self::Array,
        weight: Part<'_, Self::Array>,
        eps: f32,
        inverse: &mut Self::Array,
        out: &mut Self::Array,
    );

    /// `x += residual`, then [`Blocks::rms_norm`] of `x`, in one pass.
    fn add_rms_norm(
        &self,
        residual: &Self::Array,
        x: &mut Self::Array,
        weight: Part<'_, Self::Array>,
        eps: f32,
        inverse: &mut Self::Array,
        out: &mut Self::Array,
    );

    /// `out[t] = x[t] · inverse[t] · weight`, bitwise what [`Blocks::rms_norm`] wrote.
    fn rms_norm_again(
        &self,
        x: &Self::Array,
        weight: Part<'_, Self::Array>,
        inverse: &Self::Array,
        out: &mut Self::Array,
    );

    /// Adds the gradient of x to `d_x` (or overwrites it) and that of the weight to `d_weight`.
    fn rms_norm_backward(
        &self,
        x: &Self::Array,
        weight: Part<'_, Self::Array>,
        inverse: &Self::Array,
        d_out: &Self::Array,
        d_x: &mut Self::Array,
        accumulate: bool,
        d_weight: PartMut<'_, Self::Array>,
    );

    /// `y = x · weightᵀ`, or `y = x · weightᵀ + add`.
    fn linear(
        &self,
        shape: LinearShape,
        x: &Self::Array,
        weight: Part<'_, Self::Array>,
        add: Option<&Self::Array>,
        y: &mut Self::Array,
    );

    /// `d_x = d_y · weight`.
    fn linear_backward_input(
        &self,
        shape: LinearShape,
        d_y: &Self::Array,
        weight: Part<'_, Self::Array>,
        d_x: &mut Self::Array,
    );

    /// `d_weight += d_yᵀ · x`.
    fn linear_backward_weight(
        &self,
        shape: LinearShape,
        d_y: &Self::Array,
        x: &Self::Array,
        d_weight: PartMut<'_, Self::Array>,
    );

    /// Turns the query and key heads of `qkv` in place by the angles of their positions.
    fn rope(
        &self,
        heads: PackedHeads,
        pairing: RopePairing,
        table: &RopeTable,
        positions: &[i32],
        rotation: Rotation,
        qkv: &mut Self::Array,
    );

    /// Attention straight out of the packed projection. `out` is `[rows, len, heads_q, dim]`,
    /// `lse` is `[rows, heads_q, len]`.
    ///
    /// # Errors
    /// Those of the plan.
    fn attention(
        &self,
        layer: LayerAttention<'_, Self::Array>,
        qkv: &Self::Array,
        out: &mut Self::Array,
        lse: &mut Self::Array,
    ) -> Result<(), NnError>;

    /// Gradients of attention straight into the packed gradient, which is overwritten; those of
    /// the learned buffers are added to `d_learned`, where they lie as their values do.
    ///
    /// # Errors
    /// Those of the plan.
    fn attention_backward(
        &self,
        layer: LayerAttention<'_, Self::Array>,
        qkv: &Self::Array,
        out: &Self::Array,
        lse: &Self::Array,
        d_out: &Self::Array,
        d_qkv: &mut Self::Array,
        d_learned: PartMut<'_, Self::Array>,
    ) -> Result<(), NnError>;

    /// `out = silu(gate) · up`, gate and up side by side in `gate_up [T, 2·width]`.
    fn swiglu(&self, width: usize, gate_up: &Self::Array, out: &mut Self::Array);

    /// In place: `gate_up` becomes its gradient, `d_out` becomes `silu(gate) · up`.
    fn swiglu_backward(&self, width: usize, gate_up: &mut Self::Array, d_out: &mut Self::Array);

    /// Cross-entropy of `x · weightᵀ` and `labels` without ever holding all logits: chunks of
    /// as many tokens as `logits` has room for. Returns the sum in nats.
    fn loss(
        &self,
        width: usize,
        x: &Self::Array,
        weight: Part<'_, Self::Array>,
        labels: &[i32],
        logits: &mut Self::Array,
    ) -> f64;

    /// [`Blocks::loss`] with its gradients in the same pass: `d_x` is overwritten, `d_weight`
    /// added to.
    fn loss_backward(
        &self,
        width: usize,
        x: &Self::Array,
        weight: Part<'_, Self::Array>,
        labels: &[i32],
        logits: &mut Self::Array,
        d_x: &mut Self::Array,
        d_weight: PartMut<'_, Self::Array>,
    ) -> f64;
}
