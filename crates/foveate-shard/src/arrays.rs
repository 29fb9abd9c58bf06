//! The arrays of a training step, by the names of their axes.
//!
//! Every array that a step touches is here once. Its layout is [`Sharding::layout`] of its names:
//! there is no other way to give it one.

use foveate::tensor::ElementType;

use crate::error::ShardError;
use crate::layout::{ShardLayout, Sharding};
use crate::map::Axis;

/// An array of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Array {
    /// What it is called.
    pub name: &'static str,
    /// Type of its elements in mixed-precision training.
    pub element: ElementType,
    /// Names of its axes.
    pub axes: &'static [Axis],
}

impl Array {
    /// The layout that follows from the map.
    ///
    /// # Errors
    /// Those of [`Sharding::layout`].
    pub fn layout(&self, sharding: &Sharding) -> Result<ShardLayout, ShardError> {
        sharding.layout(self.element, self.axes)
    }

    /// [`Self::layout`] in training in another type than bf16, which `half` is put for.
    ///
    /// # Errors
    /// Those of [`Sharding::layout`].
    pub fn layout_in(
        &self,
        sharding: &Sharding,
        half: ElementType,
    ) -> Result<ShardLayout, ShardError> {
        let element = if self.element == ElementType::BF16 { half } else { self.element };
        sharding.layout(element, self.axes)
    }
}

use Axis::{
    Batch, Captured, Dim, DimV, Elements, Ffn, Heads, Hidden, KvHeads, KvSeq, Seq, Stream, Vocab,
};
use ElementType::{BF16, F32, I32};

const fn array(name: &'static str, element: ElementType, axes: &'static [Axis]) -> Array {
    Array { name, element, axes }
}

/// Queries, keys and values as attention takes them, in the order of [`foveate::Plan::forward`], then
/// what it gives, then what is captured.
pub const ATTENTION: &[Array] = &[
    array("q", BF16, &[Batch, Heads, Seq, Dim]),
    array("k", BF16, &[Batch, KvHeads, KvSeq, Dim]),
    array("v", BF16, &[Batch, KvHeads, KvSeq, DimV]),
    array("q_positions", I32, &[Seq]),
    array("kv_positions", I32, &[KvSeq]),
    array("sink", F32, &[Heads]),
    array("capture", F32, &[Captured]),
    array("out", BF16, &[Batch, Heads, Seq, DimV]),
    array("lse", F32, &[Batch, Heads, Seq]),
    array("d_out", BF16, &[Batch, Heads, Seq, DimV]),
    array("dq", BF16, &[Batch, Heads, Seq, Dim]),
    array("dk", BF16, &[Batch, KvHeads, KvSeq, Dim]),
    array("dv", BF16, &[Batch, KvHeads, KvSeq, DimV]),
    array("d_sink", F32, &[Heads]),
    array("d_capture", F32, &[Captured]),
];

/// The arrays of the model around attention, and of the optimiser.
pub const MODEL: &[Array] = &[
    array("tokens", I32, &[Batch, Seq]),
    array("labels", I32, &[Batch, Seq]),
    array("positions", I32, &[Batch, Seq]),
    array("documents", I32, &[Batch, Seq]),
    array("rotary", F32, &[Seq, Dim]),
    array("residual", BF16, &[Batch, Stream, Hidden]),
    // What products with qkv, gate, up and head read.
    array("normed", BF16, &[Batch, Seq, Hidden]),
    // Interleaved: `r` query heads, a key head and a value head for each key/value head.
    array("qkv", BF16, &[Batch, Seq, KvHeads, Dim]),
    array("gate_up", BF16, &[Batch, Seq, Ffn]),
    array("logits", BF16, &[Batch, Seq, Vocab]),
    array("weights", BF16, &[Elements]),
    array("masters", F32, &[Elements]),
    array("gradients", F32, &[Elements]),
    array("moment_1", F32, &[Elements]),
    array("moment_2", F32, &[Elements]),
    array("metrics", F32, &[]),
];

/// The array called `name`.
pub fn by_name(name: &str) -> Option<&'static Array> {
    ATTENTION.iter().chain(MODEL).find(|a| a.name == name)
}
