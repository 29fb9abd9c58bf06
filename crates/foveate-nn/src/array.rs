//! What blocks compute on: arrays in the memory of a device, ranges of them, and sizes.

use std::ops::Range;

use foveate::DType;

use crate::config::{ModelConfig, RopePairing};

/// Elements in the memory of a device.
pub trait Array: Default + Send + Sync {
    /// Their type.
    fn dtype(&self) -> DType;

    /// Their number.
    fn elems(&self) -> usize;

    /// Where the first is, as work that is recorded names it; 0 where none is recorded.
    fn address(&self) -> u64 {
        0
    }
}

/// A range of an array: a weight among all parameters.
#[derive(Debug)]
pub struct Part<'a, A> {
    /// The array.
    pub array: &'a A,
    /// Elements of it.
    pub place: Range<usize>,
}

impl<'a, A: Array> Part<'a, A> {
    /// The same.
    pub fn again(&self) -> Self {
        Self { array: self.array, place: self.place.clone() }
    }

    /// All of an array.
    pub fn whole(array: &'a A) -> Self {
        Self { array, place: 0..array.elems() }
    }
}

/// A [`Part`] to write to: the gradient of a weight among all gradients.
#[derive(Debug)]
pub struct PartMut<'a, A> {
    /// The array.
    pub array: &'a mut A,
    /// Elements of it.
    pub place: Range<usize>,
    /// Whether a gradient is added to what is there. If not, what is there is not read, and every
    /// element is written.
    pub accumulate: bool,
}

impl<'a, A: Array> PartMut<'a, A> {
    /// All of an array.
    pub fn whole(array: &'a mut A, accumulate: bool) -> Self {
        let place = 0..array.elems();
        Self { array, place, accumulate }
    }
}

/// All parameters of a model, each at its place in the layout.
#[derive(Debug, Default)]
pub struct Weights<A> {
    /// What blocks compute with, in the dtype of the precision's weights.
    pub array: A,
    /// The 16 bits that complete each trained weight to an f32 master ([`crate::split_master`]); no
    /// elements where the precision has none.
    pub remainders: A,
}

/// The moments of all trained parameters, each at its parameter's place; how they are kept is up to the
/// precision ([`crate::MomentDtype`]).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Moments<A = Vec<f32>> {
    /// m, the running mean of the gradient.
    pub mean: A,
    /// v, the running mean of its square; no elements where the rule keeps none.
    pub square: A,
}

/// The sizes of a linear block `y [tokens, outputs] = x [tokens, inputs] · weightᵀ`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    /// Those of a model in a batch of `rows` rows of `len` tokens.
    pub fn of(config: &ModelConfig, [rows, len]: [usize; 2]) -> Self {
        Self {
            rows,
            len,
            heads_q: config.num_attention_heads,
            heads_kv: config.kv_heads(),
            dim: config.dim(),
        }
    }

    /// Columns of the projection.
    pub fn width(&self) -> usize {
        (self.heads_q + 2 * self.heads_kv) * self.dim
    }
}

/// How the heads of a layer turn: by the angles of their positions in `table`, one of those that the batch was
/// uploaded with.
#[derive(Debug)]
pub struct Turn<'a, Batch> {
    /// Whose positions.
    pub batch: &'a Batch,
    /// The table's index.
    pub table: usize,
    /// Which elements of a head are a pair.
    pub pairing: RopePairing,
}

/// Which way RoPE turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rotation {
    /// By the position: the forward pass.
    Forward,
    /// Back: the backward pass.
    Backward,
}
