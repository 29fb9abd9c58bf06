//! Attention over ranks that share the rows of a batch, as a device computes it: what moves between the ranks, as
//! data, and what a device does with it.

use std::ops::Range;
use std::sync::Arc;

use crate::array::{LinearShape, PackedHeads, Part, PartMut, Turn};
use crate::error::NnError;
use crate::program::AttentionProgram;

/// What the ranks that share the rows of a batch do in attention, seen from one of them: data, for a device
/// that moves keys and computes by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContextPlan {
    /// Rows of the whole batch, and tokens of a row.
    pub whole: [usize; 2],
    /// Documents of the whole batch, `[rows, len]`.
    pub documents: Vec<i32>,
    /// This rank's first row of the whole batch.
    pub first_row: usize,
    /// Its first query head and its first key/value head, of the model's.
    pub first_heads: [usize; 2],
    /// Keys that a query of this rank sees on average.
    pub mean_kv_len: usize,
    /// This rank, of those that share the rows.
    pub rank: usize,
    /// Positions of the tokens that each rank holds, in the order in which it holds them.
    pub tokens: Vec<Vec<Range<usize>>>,
    /// How keys and queries of different ranks meet.
    pub moves: ContextMoves,
}

impl ContextPlan {
    /// Whether keys of any of the ranks go to another one.
    pub fn keys_travel(&self) -> bool {
        let ContextMoves::Keys(stages) = &self.moves else { return false };
        stages.iter().any(|stage| stage.moves)
    }
}

/// How keys and queries of different ranks meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ContextMoves {
    /// Keys and values go to the queries that see them, in stages. The first one's attention is over the
    /// rank's own keys and those that arrive in it, that of the others over those that arrive.
    Keys(Vec<KeyStage>),
    /// Every rank gives its tokens of other ranks' heads for all tokens of its own: of each rank the query
    /// heads and the key/value heads, counted from [`ContextPlan::first_heads`] on.
    Heads(Vec<[Range<usize>; 2]>),
}

/// A stage of an exchange of keys; positions by rank, ascending and not overlapping.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyStage {
    /// Whether any of the ranks sends something.
    pub moves: bool,
    /// This rank's keys that each rank gets.
    pub sends: Vec<Vec<Range<usize>>>,
    /// Keys of each rank that this one gets.
    pub receives: Vec<Vec<Range<usize>>>,
    /// Of this rank's tokens, as it holds them, those from the first to the last that sees a key of the
    /// stage; all in the first stage, none where no key is.
    pub queries: Range<usize>,
}

/// Attention over several ranks by the blocks `B` of a device, on its arrays `A` and of its batches `T`. Every rank
/// that shares the rows calls the same methods in the same order.
pub trait DeviceContext<B, A, T>: Send {
    /// Takes the plan of the batches that come next, `heads` being the packed projection of the rank's
    /// tokens. The same one costs nothing.
    ///
    /// # Errors
    /// When no kernel takes a program in this shape.
    fn plan(
        &mut self,
        blocks: &mut B,
        programs: &[AttentionProgram],
        heads: PackedHeads,
        plan: &Arc<ContextPlan>,
    ) -> Result<(), NnError>;

    /// Computes the packed projection that attention of a layer reads, keys and values first, so that they travel
    /// while queries are computed: see [`crate::ModelConfig::keys_first`]. [`Self::forward`] comes next.
    ///
    /// # Errors
    /// Those of [`Self::forward`].
    fn project(
        &mut self,
        blocks: &mut B,
        call: &ContextCall<'_, A>,
        projection: &Projection<'_, A, T>,
        qkv: &mut A,
    ) -> Result<(), NnError>;

    /// Attention of a layer: see [`crate::Blocks::attention`]. What the backward pass needs of other ranks is kept in
    /// `call.slot`, where it replaces what was there.
    ///
    /// # Errors
    /// When ranks fail to meet, or the device fails.
    fn forward(
        &mut self,
        blocks: &mut B,
        call: ContextCall<'_, A>,
        qkv: &A,
        out: &mut A,
        lse: &mut A,
    ) -> Result<(), NnError>;

    /// Its gradients: see [`crate::Blocks::attention_backward`]. Those of learned buffers are of this rank's
    /// queries. What of `d_qkv` other ranks have a part in comes with [`Self::returned`], which is called next.
    ///
    /// # Errors
    /// Those of [`Self::forward`].
    fn backward(
        &mut self,
        blocks: &mut B,
        call: ContextCall<'_, A>,
        forward: ContextForward<'_, A>,
        d_out: &A,
        d_qkv: &mut A,
        d_learned: PartMut<'_, A>,
    ) -> Result<(), NnError>;

    /// What is queued next finds all of the gradients of the last [`Self::backward`] in its `d_qkv`; what was queued
    /// since runs while those of other ranks arrive.
    ///
    /// # Errors
    /// Those of [`Self::forward`].
    fn returned(&mut self, blocks: &mut B, d_qkv: &mut A) -> Result<(), NnError>;
}

/// Which attention of a step is asked for, on arrays of a device.
#[derive(Debug)]
pub struct ContextCall<'a, A> {
    /// The layer's program, an index into [`crate::Model::programs`].
    pub program: usize,
    /// See [`crate::ContextLayer::slot`].
    pub slot: usize,
    /// The packed projection of the rank's tokens.
    pub heads: PackedHeads,
    /// The layer's values of its learned buffers, one after another.
    pub learned: Part<'a, A>,
}

/// The packed projection of a layer: `x · weightᵀ`, plus the bias where there is one, whose query and key heads turn
/// where they do.
#[derive(Debug)]
pub struct Projection<'a, A, T> {
    /// Of the product.
    pub shape: LinearShape,
    /// The normalised stream.
    pub x: &'a A,
    /// Of queries, keys and values, in this order.
    pub weight: Part<'a, A>,
    /// The same for every token.
    pub bias: Option<Part<'a, A>>,
    /// How the heads turn.
    pub turn: Option<Turn<'a, T>>,
}

/// What a forward pass read and wrote.
#[derive(Debug)]
pub struct ContextForward<'a, A> {
    /// The packed projection.
    pub qkv: &'a A,
    /// The output of attention.
    pub out: &'a A,
    /// Natural logs of the denominators.
    pub lse: &'a A,
}
