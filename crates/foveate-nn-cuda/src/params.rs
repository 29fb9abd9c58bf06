//! The parameters of kernels, as `kernels/*.cu` declare them.

use foveate_gpu::abi::Address;
use foveate_gpu::abi_structs;

abi_structs! {
    /// A matrix: elements of a row side by side.
    pub struct Rows {
        /// Address of its first element.
        pub data: Address,
        /// Elements from a row to the next.
        pub stride: i64,
    }
    /// Of `kernels/rms_norm.cu`.
    pub struct RmsNormParams {
        /// `[tokens, width]`.
        pub x: Rows,
        /// No residual: all zeros.
        pub residual: Rows,
        /// Of x and the residual.
        pub sum: Rows,
        /// `[tokens, width]`.
        pub out: Rows,
        /// `[width]`.
        pub weight: Address,
        /// f32 `[tokens]`.
        pub inverse: Address,
        /// Columns.
        pub width: i32,
        /// Added to the mean square.
        pub eps: f32,
        /// Added to the weight.
        pub offset: f32,
    }
    /// Of `kernels/rms_norm.cuh`.
    pub struct RmsNormBackwardParams {
        /// `[tokens, width]`.
        pub x: Rows,
        /// `[tokens, width]`.
        pub d_out: Rows,
        /// `[tokens, width]`.
        pub d_x: Rows,
        /// `[tokens, width]`, or nothing.
        pub again: Rows,
        /// `[width]`.
        pub weight: Address,
        /// f32 `[tokens]`.
        pub inverse: Address,
        /// f32 `[parts, width]`.
        pub partial: Address,
        /// Tokens.
        pub rows: i32,
        /// Columns.
        pub width: i32,
        /// Whether the gradient is added to `d_x`.
        pub accumulate: i32,
        /// Added to the weight.
        pub offset: f32,
    }
    /// Of `kernels/sum_parts.cu`.
    pub struct SumPartsParams {
        /// f32 `[parts, width]`.
        pub partial: Address,
        /// `[width]`.
        pub sum: Address,
        /// Rows of `partial`.
        pub parts: i32,
        /// Columns.
        pub width: i32,
        /// Whether the sum is added to what is there.
        pub accumulate: i32,
        /// Whether it is f32, not the operands' dtype.
        pub sum_is_f32: i32,
    }
    /// Of `kernels/gated.cu`.
    pub struct GatedParams {
        /// `[tokens, 2 width]`.
        pub gate_up: Rows,
        /// `[tokens, width]`.
        pub out: Rows,
        /// Columns of `out`.
        pub width: i32,
    }
    /// Of `kernels/rope.cu`.
    pub struct RopeParams {
        /// `[tokens, at least heads · dim]`.
        pub qkv: Rows,
        /// i32 `[tokens]`.
        pub positions: Address,
        /// f32 `[positions, rotated]`.
        pub table: Address,
        /// Heads that turn.
        pub heads: i32,
        /// Columns of a head.
        pub dim: i32,
        /// Columns of a head that turn.
        pub rotated: i32,
        /// -1: back.
        pub sign: f32,
    }
    /// Of `kernels/embedding.cu`.
    pub struct EmbeddingParams {
        /// `[vocabulary, width]`.
        pub table: Rows,
        /// `[tokens, width]`.
        pub out: Rows,
        /// i32 `[tokens]`.
        pub tokens: Address,
        /// Columns.
        pub width: i32,
        /// Of what is read.
        pub scale: f32,
        /// Token of the first row of the table.
        pub first: i32,
        /// Rows of the table.
        pub rows: i32,
    }
    /// Of `kernels/embedding.cu`.
    pub struct EmbeddingBackwardParams {
        /// `[tokens, width]`.
        pub d_out: Rows,
        /// `[rows, width]`.
        pub d_table: Address,
        /// Places, sorted by token.
        pub order: Address,
        /// Four integers for each CTA.
        pub segments: Address,
        /// f32 rows of `width`.
        pub partial: Address,
        /// Columns.
        pub width: i32,
        /// Of the sums.
        pub scale: f32,
        /// Token of the first row of the table.
        pub first: i32,
        /// Rows of the table.
        pub rows: i32,
    }
    /// Of `kernels/cross_entropy.cu`.
    pub struct CrossEntropyParams {
        /// `[tokens, vocabulary]`.
        pub logits: Rows,
        /// i32 `[tokens]`.
        pub labels: Address,
        /// f32 `[tokens]`.
        pub losses: Address,
        /// f32 `[tokens]`, or 0 for none.
        pub z_losses: Address,
        /// Columns.
        pub vocabulary: i32,
        /// Whether logits become their gradient.
        pub wants_gradient: i32,
        /// Of logits.
        pub cap: f32,
        /// Of the square of lse.
        pub z_weight: f32,
    }
    /// Of `kernels/cross_entropy.cu`.
    pub struct LogitSumsParams {
        /// `[tokens, vocabulary]`.
        pub logits: Rows,
        /// i32 `[tokens]`.
        pub labels: Address,
        /// f32 `[tokens, 3]`.
        pub sums: Address,
        /// Columns.
        pub vocabulary: i32,
        /// Id of the first column.
        pub first: i32,
        /// Of logits.
        pub cap: f32,
    }
    /// Of `kernels/cross_entropy.cu`.
    pub struct CrossEntropyPartParams {
        /// `[tokens, vocabulary]`.
        pub logits: Rows,
        /// i32 `[tokens]`.
        pub labels: Address,
        /// f32 `[ranks, tokens, 3]`.
        pub sums: Address,
        /// f32 `[tokens]`.
        pub losses: Address,
        /// f32 `[tokens]`, or 0 for none.
        pub z_losses: Address,
        /// Columns.
        pub vocabulary: i32,
        /// Id of the first column.
        pub first: i32,
        /// Ranks.
        pub ranks: i32,
        /// Tokens.
        pub tokens: i32,
        /// Whether logits become their gradient.
        pub wants_gradient: i32,
        /// Of logits.
        pub cap: f32,
        /// Of the z-loss.
        pub z_weight: f32,
        /// Nothing.
        pub unused: i32,
    }
    /// Of `kernels/cross_entropy.cu`.
    pub struct TotalParams {
        /// f32 `[tokens]`.
        pub losses: Address,
        /// f32 `[tokens]`, or 0 for none.
        pub z_losses: Address,
        /// i32 `[tokens]`.
        pub labels: Address,
        /// f64.
        pub loss: Address,
        /// f64.
        pub z_loss: Address,
        /// i64.
        pub labelled: Address,
        /// Tokens.
        pub tokens: i32,
    }
    /// Of `kernels/vectors.cu`.
    pub struct ElemsParams {
        /// `[elems]`.
        pub from: Address,
        /// `[elems]`.
        pub to: Address,
        /// Elements.
        pub elems: i64,
    }
    /// Of `kernels/column_sums.cu`.
    pub struct ColumnSumsParams {
        /// `[rows, width]`.
        pub from: Rows,
        /// `[width]`, added to.
        pub to: Address,
        /// Rows.
        pub rows: i32,
        /// Columns.
        pub width: i32,
        /// Whether `to` is f32, not as operands.
        pub to_is_f32: i32,
    }
    /// Of `kernels/head_norm.cu`.
    pub struct HeadNormParams {
        /// `[tokens, (heads_q + 2 · heads_kv) · dim]`.
        pub qkv: Rows,
        /// As qkv.
        pub out: Rows,
        /// `[2, dim]`.
        pub weight: Address,
        /// f32 `[tokens, heads_q + heads_kv]`.
        pub inverse: Address,
        /// i32 `[tokens]`, where heads turn.
        pub positions: Address,
        /// f32 `[positions, rotated]`, where heads turn.
        pub table: Address,
        /// Tokens.
        pub tokens: i32,
        /// Query heads.
        pub heads_q: i32,
        /// Key/value heads.
        pub heads_kv: i32,
        /// Columns of a head.
        pub dim: i32,
        /// Columns of a head that turn.
        pub rotated: i32,
        /// Added to the mean square.
        pub eps: f32,
        /// Added to the weight.
        pub offset: f32,
    }
    /// Of `kernels/head_norm.cu`.
    pub struct HeadNormBackwardParams {
        /// `[tokens, (heads_q + 2 · heads_kv) · dim]`.
        pub qkv: Rows,
        /// As qkv.
        pub d_qkv: Rows,
        /// `[2, dim]`.
        pub weight: Address,
        /// f32 `[tokens, heads_q + heads_kv]`.
        pub inverse: Address,
        /// f32 `[parts, 2 · dim]`.
        pub partial: Address,
        /// i32 `[tokens]`, where heads turn.
        pub positions: Address,
        /// f32 `[positions, rotated]`, where heads turn.
        pub table: Address,
        /// Tokens.
        pub tokens: i32,
        /// Query heads.
        pub heads_q: i32,
        /// Key/value heads.
        pub heads_kv: i32,
        /// Columns of a head.
        pub dim: i32,
        /// Columns of a head that turn.
        pub rotated: i32,
        /// Added to the weight.
        pub offset: f32,
    }
    /// Of `kernels/vectors.cu`.
    pub struct RowsParams {
        /// `[rows, width]`.
        pub from: Rows,
        /// `[rows, width]`.
        pub to: Rows,
        /// Columns.
        pub width: i32,
    }
    /// Of `kernels/pause.cu`.
    pub struct PauseParams {
        /// That it takes.
        pub nanoseconds: i64,
    }
    /// Of `kernels/ranks.cu`.
    pub struct NarrowParams {
        /// f32 `[elems]`.
        pub from: Address,
        /// `[elems]`.
        pub to: Address,
        /// Elements.
        pub elems: i64,
    }
    /// Of `kernels/ranks.cu`.
    pub struct SumRanksParams {
        /// `[elems]` of each rank.
        pub from: [Address; 32],
        /// `[elems]`.
        pub to: Address,
        /// Elements.
        pub elems: i64,
        /// How many there are of `from`.
        pub ranks: i32,
        /// Whether the sum is added to what is there.
        pub accumulate: i32,
        /// Whether it is f32, not the operands' dtype.
        pub to_is_f32: i32,
        /// Nothing.
        pub unused: i32,
    }
    /// Of `kernels/updates.cuh`.
    pub struct PieceParams {
        /// The first element.
        pub first: i64,
        /// The one after the last.
        pub end: i64,
        /// From an element's place in the arena to its index among all parameters.
        pub shift: i64,
        /// Number of its first chunk.
        pub chunk: i32,
        /// Factor of the step's rate.
        pub rate: f32,
        /// Factor of the weight decay.
        pub decay: f32,
        /// Nothing.
        pub unused: i32,
    }
    /// What the host says of a step; it lies in device memory as f64 `[3]`.
    pub struct StepConstants {
        /// The learning rate.
        pub rate: f32,
        /// 1/(1 − β₁ᵗ).
        pub mean_scale: f32,
        /// 1/(1 − β₂ᵗ).
        pub root_scale: f32,
        /// The largest norm of the mean gradient; 0: any.
        pub clip: f32,
        /// Of seed and step.
        pub random: u64,
    }
    /// What a step adds up; it lies in device memory as f64 `[5]`, zeros before a step.
    pub struct Totals {
        /// Sum of the losses, the bits of an f64.
        pub loss: u64,
        /// Tokens with a label.
        pub labelled: i64,
        /// Sum of the z-losses, the bits of an f64.
        pub z_loss: u64,
        /// Sum of the squares of all gradients, the bits of an f64.
        pub squares: u64,
        /// What gradients are multiplied with: the mean over labels, and clipping.
        pub factor: f32,
        /// 1 where the loss or a gradient is not finite, or a square beyond f32, in this step or in one that
        /// it was queued behind: nothing is updated.
        pub skipped: i32,
    }
    /// Of `kernels/updates.cuh`.
    pub struct UpdateParams {
        /// f32 or bf16.
        pub weights: Address,
        /// 16 bits each, or null.
        pub remainders: Address,
        /// f32 or bf16, of weights from `first_gradient` on.
        pub gradients: Address,
        /// f32 or bf16, or codes of 8 bits and their scales.
        pub means: Address,
        /// As `means`; null where the rule keeps none.
        pub squares: Address,
        /// PieceParams.
        pub pieces: Address,
        /// [`StepConstants`].
        pub constants: Address,
        /// [`Totals`].
        pub totals: Address,
        /// Elements that moments are kept of.
        pub elems: i64,
        /// The weight whose gradient is the first.
        pub first_gradient: i64,
        /// Pieces.
        pub piece_count: i32,
        /// β₁.
        pub beta1: f32,
        /// β₂.
        pub beta2: f32,
        /// Added to the root.
        pub eps: f32,
        /// λ.
        pub weight_decay: f32,
    }
    /// Of `kernels/context.cu`.
    pub struct JoinParams {
        /// f32 `[tokens, heads, dim]`.
        pub out: Address,
        /// f32 `[rows, heads, len]`.
        pub lse: Address,
        /// As `out`.
        pub part: Address,
        /// As `lse`.
        pub part_lse: Address,
        /// As `out`, f32 or as operands.
        pub to: Address,
        /// As `lse`.
        pub to_lse: Address,
        /// Elements of `out`.
        pub elems: i64,
        /// Heads.
        pub heads: i32,
        /// Tokens of a row.
        pub len: i32,
        /// Columns of a head.
        pub dim: i32,
        /// Whether `to` is f32, not the operands' dtype.
        pub to_is_f32: i32,
        /// The first token of a row that `part` has.
        pub first: i32,
        /// How many it has.
        pub count: i32,
    }
    /// Of `kernels/context.cu`.
    pub struct SumKeysParams {
        /// f32 `[all rows, width]`.
        pub from: Address,
        /// i32 `[parts, rows]`.
        pub sources: Address,
        /// `[rows, width]`.
        pub to: Rows,
        /// Parts.
        pub parts: i32,
        /// Rows of `to`.
        pub rows: i32,
        /// Columns.
        pub width: i32,
    }
    /// Of `kernels/updates.cuh`.
    pub struct SquaresParams {
        /// f32 or bf16.
        pub gradients: Address,
        /// Elements.
        pub elems: i64,
        /// f64, one a CTA.
        pub partial: Address,
    }
    /// Of `kernels/updates.cuh`.
    pub struct FactorParams {
        /// f64 `[parts]`.
        pub partial: Address,
        /// [`StepConstants`].
        pub constants: Address,
        /// [`Totals`].
        pub totals: Address,
        /// i64: 1 where a step before was skipped.
        pub stopped: Address,
        /// Parts.
        pub parts: i32,
        /// Whether to add to the squares of gradients before.
        pub more: i32,
    }
}

/// A struct's name, its size, and the offset of each of its fields.
#[cfg(test)]
type Struct = (&'static str, usize, &'static [(&'static str, usize)]);

/// All of them.
#[cfg(test)]
pub(crate) fn structs() -> &'static [Struct] {
    STRUCTS
}
