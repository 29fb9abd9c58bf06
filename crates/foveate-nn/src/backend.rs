//! The blocks a device has to bring to train a model.
//!
//! [`crate::Cpu`] is one implementation; a GPU is another. Shapes are in tokens `T` (all rows of a
//! batch at once) and widths; matrices are row-major f32 and weights are `[out, in]`. Blocks
//! check nothing but slice bounds: the step that calls them has fitted the arrays.

use foveate::Plan;

use crate::config::{QkvOrder, RopePairing};
use crate::error::NnError;
use crate::rope::RopeTable;

/// Some neighbouring columns of a wider matrix.
#[derive(Clone, Copy, Debug)]
pub struct Columns {
    /// Columns of the whole matrix.
    pub width: usize,
    /// The first column meant.
    pub first: usize,
}

impl Columns {
    /// All columns.
    pub fn all(width: usize) -> Self {
        Self { width, first: 0 }
    }
}

/// The sizes of a linear block `y [T, outputs] = x [T, inputs] · weightᵀ`, where `y` is some
/// columns of a wider matrix: a packed projection is several blocks that share one `y`. The
/// weight may be some rows of a larger one.
#[derive(Clone, Copy, Debug)]
pub struct LinearShape {
    /// Rows of x and y.
    pub tokens: usize,
    /// Columns of x and of the weight.
    pub inputs: usize,
    /// Rows of the weight.
    pub outputs: usize,
    /// The first of these rows in the weight's array.
    pub first_output: usize,
    /// Where y lies.
    pub y: Columns,
}

/// A packed projection `[rows, len, (heads_q + 2·heads_kv) · dim]`.
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
    /// Order of the heads.
    pub order: QkvOrder,
}

impl PackedHeads {
    /// Heads of all three kinds.
    pub fn slots(&self) -> usize {
        self.heads_q + 2 * self.heads_kv
    }

    /// True when a slot of the packed projection holds a value head.
    pub fn is_value(&self, slot: usize) -> bool {
        match self.order {
            QkvOrder::Stacked => slot >= self.heads_q + self.heads_kv,
            QkvOrder::Interleaved => {
                let group = self.heads_q / self.heads_kv + 2;
                slot % group == group - 1
            }
        }
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

/// The blocks of a transformer, forward and backward, on one device.
pub trait Blocks: Sync {
    /// f32 elements on the device.
    type Array: Default + Send + Sync;

    /// Makes `array` hold `elems` elements; what they are is not defined.
    fn resize(&self, array: &mut Self::Array, elems: usize);

    /// `to = from`.
    fn copy(&self, from: &Self::Array, to: &mut Self::Array);

    /// `out[t] = table[tokens[t]]`.
    fn embed(&self, tokens: &[u32], table: &Self::Array, width: usize, out: &mut Self::Array);

    /// `d_table[tokens[t]] += d_out[t]`, in order of `t`.
    fn embed_backward(
        &self,
        tokens: &[u32],
        d_out: &Self::Array,
        width: usize,
        d_table: &mut Self::Array,
    );

    /// `inverse[t] = 1/√(mean(x[t]²) + eps)`, `out[t] = x[t] · inverse[t] · weight`.
    fn rms_norm(
        &self,
        x: &Self::Array,
        weight: &Self::Array,
        eps: f32,
        inverse: &mut Self::Array,
        out: &mut Self::Array,
    );

    /// `x += residual`, then [`Blocks::rms_norm`] of `x`, in one pass.
    fn add_rms_norm(
        &self,
        residual: &Self::Array,
        x: &mut Self::Array,
        weight: &Self::Array,
        eps: f32,
        inverse: &mut Self::Array,
        out: &mut Self::Array,
    );

    /// `out[t] = x[t] · inverse[t] · weight`, bitwise what [`Blocks::rms_norm`] wrote.
    fn rms_norm_again(
        &self,
        x: &Self::Array,
        weight: &Self::Array,
        inverse: &Self::Array,
        out: &mut Self::Array,
    );

    /// Adds the gradient of x to `d_x` (or overwrites it) and that of the weight to `d_weight`.
    fn rms_norm_backward(
        &self,
        x: &Self::Array,
        weight: &Self::Array,
        inverse: &Self::Array,
        d_out: &Self::Array,
        d_x: &mut Self::Array,
        accumulate: bool,
        d_weight: &mut Self::Array,
    );

    /// `y = x · weightᵀ`, or `y += …`.
    fn linear(
        &self,
        shape: LinearShape,
        x: &Self::Array,
        weight: &Self::Array,
        y: &mut Self::Array,
        accumulate: bool,
    );

    /// `d_x = d_y · weight`, or `d_x += …`.
    fn linear_backward_input(
        &self,
        shape: LinearShape,
        d_y: &Self::Array,
        weight: &Self::Array,
        d_x: &mut Self::Array,
        accumulate: bool,
    );

    /// `d_weight += d_yᵀ · x`.
    fn linear_backward_weight(
        &self,
        shape: LinearShape,
        d_y: &Self::Array,
        x: &Self::Array,
        d_weight: &mut Self::Array,
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
        plan: &Plan,
        heads: PackedHeads,
        qkv: &Self::Array,
        out: &mut Self::Array,
        lse: &mut Self::Array,
    ) -> Result<(), NnError>;

    /// Gradients of attention straight into the packed gradient, which is overwritten; those of
    /// learned buffers, called `names`, are added to `captures`.
    ///
    /// # Errors
    /// Those of the plan.
    fn attention_backward(
        &self,
        plan: &Plan,
        heads: PackedHeads,
        qkv: &Self::Array,
        out: &Self::Array,
        lse: &Self::Array,
        d_out: &Self::Array,
        d_qkv: &mut Self::Array,
        names: &[String],
        captures: &mut [Self::Array],
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
        weight: &Self::Array,
        labels: &[i32],
        logits: &mut Self::Array,
    ) -> f64;

    /// [`Blocks::loss`] with its gradients in the same pass: `d_x` is overwritten, `d_weight`
    /// added to.
    fn loss_backward(
        &self,
        width: usize,
        x: &Self::Array,
        weight: &Self::Array,
        labels: &[i32],
        logits: &mut Self::Array,
        d_x: &mut Self::Array,
        d_weight: &mut Self::Array,
    ) -> f64;
}
