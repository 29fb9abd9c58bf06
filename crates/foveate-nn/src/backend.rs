//! The blocks a device has to bring to train a model.
//!
//! [`crate::Cpu`] is one implementation and [`crate::Dry`], which computes nothing and accounts for
//! everything, another; a GPU is a third. Shapes are in tokens `T` (all rows of a batch at once)
//! and widths; matrices are row-major and weights are `[out, in]`. Blocks check nothing but
//! bounds: the step that calls them has fitted the arrays.
//!
//! A block may only be queued when it returns, so none returns a number: sums stay on the device
//! ([`Blocks::Totals`]) until [`Blocks::read`] waits for them. What depends on a batch alone is
//! made once ([`Blocks::upload`], [`Blocks::bind`]). Nothing but `read`, [`Blocks::download`] and
//! [`Blocks::download_weights`] waits.

mod recording;
mod state_memory;
mod stream;
mod sums;
mod transfers;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use foveate::{Attention, Coordinates, DType, Positions};

use crate::architecture::Activation;
pub use crate::array::{
    Array, LinearShape, Moments, PackedHeads, Part, PartMut, Rotation, Turn, Weights,
};
use crate::batch::Batch;
use crate::config::{LearnedBuffer, Norm};
use crate::device_context::DeviceContext;
use crate::error::NnError;
#[cfg(doc)]
use crate::labelled::LabelledTokens;
use crate::moments::Moment;
use crate::optimizer::{OptimizerStep, Span};
use crate::precision::Precision;
use crate::program::AttentionProgram;
use crate::rope::RopeTable;
use crate::sharing::{Carrier, Peers, ReplicaSums, Sharing, TensorSharing};
pub(crate) use recording::numbers_of;
pub use recording::{PassIdentity, PassWork, Recording};
pub use state_memory::{ArrayBytes, ProcessMemory, StateMemory};
pub use stream::{StreamProduct, StreamTransfers, VocabularyPart};
pub use sums::{BlockTime, COPY_IN, COPY_OUT, KEYS_WAIT, SumOverRanks, Sums};
pub use transfers::Transfers;

/// What attention is planned for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    /// The packed projection of a training batch; in generation one row, as long as the cache has
    /// room for.
    pub heads: PackedHeads,
    /// The first query head and the first key/value head of it, among those of the model.
    pub first_heads: [usize; 2],
    /// Keys that a query sees on average, where the batch says so: a power of two.
    pub mean_kv_len: Option<usize>,
    /// Whether queries follow a cache: forward only, and one document.
    pub cached: bool,
}

impl AttentionShape {
    /// `program` for its heads: masks, scores and dropout are told which of the model's they are.
    pub fn attention(&self, program: &AttentionProgram) -> Attention {
        let attention = program.attention();
        if self.first_heads == [0, 0] {
            return attention;
        }
        let [h, h_kv] = self.first_heads.map(|first| {
            Positions::offset(i32::try_from(first).expect("a model counts its heads in i32"))
        });
        attention.coordinates(Coordinates::new().heads(h, h_kv))
    }
}

/// Bytes of a device's memory that a process holds, in use or free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeldBytes {
    /// Now.
    pub now: u64,
    /// The most at once, since the backend was made.
    pub peak: u64,
}

/// Bytes that attention takes besides its operands in a batch of one document a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlanBytes {
    /// Of its workspace, which plans share.
    pub workspace: u64,
    /// Of its block masks.
    pub masks: u64,
}

/// The attention program of one layer.
pub struct LayerProgram<'a, B: Blocks> {
    /// The plan, bound to the batch, without the layer's learned buffers.
    pub plan: &'a B::Plan,
    /// Name and shape of each learned buffer.
    pub learned: &'a [(String, LearnedBuffer)],
}

/// Attention of one layer in one batch.
pub struct LayerAttention<'a, B: Blocks> {
    /// What it runs.
    pub program: &'a LayerProgram<'a, B>,
    /// The packed projection.
    pub heads: PackedHeads,
    /// The layer's values of them, one after another.
    pub values: Part<'a, B::Array>,
}

/// Keys and values of the tokens that were read before, `[capacity, heads_kv · dim]` each.
#[derive(Debug)]
pub struct KvCache<'a, A> {
    /// Rotated keys.
    pub keys: &'a mut A,
    /// Values.
    pub values: &'a mut A,
    /// Tokens in the cache already.
    pub position: usize,
}

/// Attention over ranks on the device of `B`.
pub type ContextOf<B> = Box<dyn DeviceContext<B, <B as Blocks>::Array, <B as Blocks>::Batch>>;

/// Sums over ranks with the same parameters, on the device of `B`.
pub type ReplicaSumsOf<B> = Box<dyn ReplicaSums<B, <B as Blocks>::Array>>;

/// A norm that was computed: what it read, and what it left to the backward pass.
#[derive(Debug)]
pub struct NormForward<'a, A> {
    /// What was normalised.
    pub x: &'a A,
    /// The weight.
    pub weight: Part<'a, A>,
    /// Its numbers.
    pub norm: Norm,
    /// Reciprocal root mean squares, as [`Blocks::rms_norm`] or [`Blocks::head_norm`] wrote them.
    pub inverse: &'a A,
}

impl<A: Array> NormForward<'_, A> {
    /// The same.
    pub fn again(&self) -> Self {
        Self { weight: self.weight.again(), ..*self }
    }
}

/// Operands of a loss, whose logits are `x · weightᵀ`.
#[derive(Debug)]
pub struct LossOperands<'a, A> {
    /// `[T, width]`; scratch behind the loss.
    pub x: &'a mut A,
    /// `[ids, width]`, of the vocabulary or of the part of it that a rank has.
    pub weight: Part<'a, A>,
    /// Columns of x and of the weight.
    pub width: usize,
    /// With a cap, logits z are `cap · tanh(z / cap)`.
    pub cap: Option<f32>,
    /// 0, or the weight of the z-loss (PaLM, section 5), `z_weight · ln² Σ eᶻ` of a labelled token: gradients are of
    /// that, too, and it is added up apart from the cross-entropy.
    pub z_weight: f32,
    /// Scratch: never are all logits held, but those of as many tokens at once as it has room for.
    pub logits: &'a mut A,
}

/// Where the gradients of a loss go.
#[derive(Debug)]
pub struct LossGradients<'a, A> {
    /// That of x, `[T, width]`, overwritten.
    pub d_x: &'a mut A,
    /// That of the weight, where it is trained.
    pub d_weight: Option<PartMut<'a, A>>,
}

/// The blocks of a transformer, forward and backward, on one device.
///
/// Every block fails when the device does: its memory ends, or an operation before it went wrong.
/// Times in [`Sums`] are the device's own, and a backend may take them of some steps only; nothing
/// waits for them but [`Blocks::read`].
pub trait Blocks: Sized {
    /// Attention as it was planned.
    type Plan;
    /// Elements on the device.
    type Array: Array;
    /// A batch on the device.
    type Batch;
    /// Running totals on the device.
    type Totals;
    /// What the optimiser goes through, on the device.
    type Spans;
    /// Memory of the host that arrays are copied to while steps go on.
    type StateMemory: StateMemory;

    /// Dtypes of parameters, gradients, moments and activations.
    fn precision(&self) -> Precision;

    /// Tokens whose logits are held at once, of a vocabulary of `vocab`.
    fn logits_tokens(&self, vocab: usize) -> usize;

    /// Bytes of device memory that are free; `None` where arrays are in the memory of the process.
    ///
    /// # Errors
    /// When the device does not say.
    fn free_bytes(&mut self) -> Result<Option<u64>, NnError>;

    /// Bytes of device memory that there are, in use or not; `None` where arrays are in the memory of the
    /// process.
    fn total_bytes(&self) -> Option<u64> {
        None
    }

    /// What this process holds of the device's memory, arrays and scratch; `None` where arrays are in the
    /// memory of the process.
    fn held_bytes(&self) -> Option<HeldBytes> {
        None
    }

    /// The device's peak rate of products of weights, in TFLOP/s: what MFU is a share of; `None` where no
    /// maker's figure is known.
    fn peak_tflops(&self) -> Option<f64> {
        None
    }

    /// Makes `array` hold `elems` elements of `dtype`; what they are is not defined. `name` is for
    /// accounts and errors.
    ///
    /// # Errors
    /// When memory does not suffice.
    fn resize(
        &mut self,
        name: &'static str,
        array: &mut Self::Array,
        dtype: DType,
        elems: usize,
    ) -> Result<(), NnError>;

    /// [`Blocks::resize`] of an array in the memory of the host, no operand of blocks: what of it is used
    /// passes through the device. Memory that the array did not have before holds zeros.
    ///
    /// # Errors
    /// When memory does not suffice.
    fn resize_on_host(
        &mut self,
        name: &'static str,
        array: &mut Self::Array,
        dtype: DType,
        elems: usize,
    ) -> Result<(), NnError> {
        self.resize(name, array, dtype, elems)?;
        self.clear(array)
    }

    /// Begins to copy an array to one in the memory of the host of as many elements. Until [`Blocks::left`]
    /// neither is written; one copy is under way at a time.
    ///
    /// # Errors
    /// When the device fails.
    fn leave(&mut self, from: &Self::Array, to: &mut Self::Array) -> Result<(), NnError>;

    /// What is queued next waits for the copy that [`Blocks::leave`] began of `from`.
    ///
    /// # Errors
    /// When the device fails.
    fn left(&mut self, from: &Self::Array) -> Result<(), NnError>;

    /// Begins to copy back what [`Blocks::leave`] has copied and [`Blocks::left`] waited for. Until
    /// [`Blocks::brought`] nothing else uses `into`; one copy is under way at a time.
    ///
    /// # Errors
    /// When the device fails.
    fn bring(&mut self, from: &Self::Array, into: &mut Self::Array) -> Result<(), NnError>;

    /// What is queued next waits for the copy that [`Blocks::bring`] began into `into`.
    ///
    /// # Errors
    /// When the device fails.
    fn brought(&mut self, into: &Self::Array) -> Result<(), NnError>;

    /// Memory for [`Blocks::copy_out`], without room.
    fn state_memory(&self) -> Self::StateMemory;

    /// Begins to copy bytes of arrays, one after another, to memory of the host that has room for them. What is
    /// queued behind and writes to weights or moments waits for the copy; the arrays stay where they are until
    /// [`StateMemory::wait`].
    ///
    /// # Errors
    /// When the device fails.
    fn copy_out(
        &mut self,
        from: &[ArrayBytes<'_, Self::Array>],
        to: &Self::StateMemory,
    ) -> Result<(), NnError>;

    /// Whether arrays may lie in the memory of another ([`Blocks::resize_within`]).
    fn shares_memory(&self) -> bool {
        false
    }

    /// Makes `array` hold `elems` elements of `dtype` in the memory of another from a byte on, until it is
    /// resized; only where [`Blocks::shares_memory`]. What they are is not defined, and what writes one
    /// writes the other.
    ///
    /// # Errors
    /// When the memory ends before.
    fn resize_within(
        &mut self,
        array: &mut Self::Array,
        dtype: DType,
        elems: usize,
        within: (&Self::Array, usize),
    ) -> Result<(), NnError> {
        let _ = within;
        self.resize("array", array, dtype, elems)
    }

    /// Sets all elements to 0.
    fn clear(&mut self, array: &mut Self::Array) -> Result<(), NnError>;

    /// Sets a part of an array to 0.
    fn clear_part(&mut self, part: PartMut<'_, Self::Array>) -> Result<(), NnError>;

    /// Brings values to the device, rounded to the nearest. `values` may be used again on return.
    fn fill(&mut self, into: PartMut<'_, Self::Array>, values: &[f32]) -> Result<(), NnError>;

    /// Copies the first `period` elements of a part over all that follow in it, again and again.
    fn repeat(&mut self, part: PartMut<'_, Self::Array>, period: usize) -> Result<(), NnError>;

    /// What moves groups of parameters between the ranks that share them: a way of the device's own, or
    /// [`crate::ThroughHost`].
    ///
    /// # Errors
    /// When the ranks cannot go on, or the device cannot reach the others.
    fn transfers(&mut self, ranks: &dyn Sharing) -> Result<Box<dyn Transfers<Self>>, NnError>;

    /// Attention over the ranks of `peers`, which share the rows of a batch, by `carrier`; none where the
    /// device leaves it to the host. All ranks call it.
    ///
    /// # Errors
    /// When the ranks cannot go on, or the device cannot reach the others.
    fn context(
        &mut self,
        _peers: Box<dyn Peers>,
        _carrier: Carrier,
    ) -> Result<Option<ContextOf<Self>>, NnError> {
        Ok(None)
    }

    /// What moves the stream between the ranks of `tensor`: a way of the device's own, or
    /// [`crate::StreamThroughHost`].
    ///
    /// # Errors
    /// When the ranks cannot go on, or the device cannot reach the others.
    fn stream_transfers(
        &mut self,
        ranks: &dyn TensorSharing,
    ) -> Result<Box<dyn StreamTransfers<Self>>, NnError>;

    /// Sums of gradients over the ranks of `peers`, which hold the same parameters, by `carrier`; none where
    /// the device leaves them to the host. All ranks call it.
    ///
    /// # Errors
    /// When the ranks cannot go on, or the device cannot reach the others.
    fn replicas(
        &mut self,
        _peers: Box<dyn Peers>,
        _carrier: Carrier,
    ) -> Result<Option<ReplicaSumsOf<Self>>, NnError> {
        Ok(None)
    }

    /// Waits for elements and reads them back, widened to f32.
    fn download(&mut self, from: Part<'_, Self::Array>, into: &mut [f32]) -> Result<(), NnError>;

    /// [`Blocks::fill`] of parameters from `first` on, by their f32 masters.
    fn fill_weights(
        &mut self,
        into: &mut Weights<Self::Array>,
        first: usize,
        masters: &[f32],
    ) -> Result<(), NnError>;

    /// [`Blocks::download`] of the f32 masters of parameters from `first` on.
    fn download_weights(
        &mut self,
        from: &Weights<Self::Array>,
        first: usize,
        masters: &mut [f32],
    ) -> Result<(), NnError>;

    /// [`Blocks::fill`] of elements of `moment` from `first` on, of the moment of `elems` trained
    /// parameters, to what the precision keeps.
    fn fill_moment(
        &mut self,
        moment: Moment,
        elems: usize,
        into: &mut Self::Array,
        first: usize,
        values: &[f32],
    ) -> Result<(), NnError>;

    /// [`Blocks::download`] of what [`Blocks::fill_moment`] brings.
    fn download_moment(
        &mut self,
        moment: Moment,
        elems: usize,
        from: &Self::Array,
        first: usize,
        values: &mut [f32],
    ) -> Result<(), NnError>;

    /// Plans attention: once for each shape of batch.
    ///
    /// # Errors
    /// When no kernel takes the program in this shape.
    fn plan(
        &mut self,
        program: &AttentionProgram,
        shape: &AttentionShape,
    ) -> Result<Self::Plan, NnError>;

    /// `plan` for a training batch that was uploaded: with its documents, where the program reads
    /// them. All layers that run the program share what this makes. `documents` are those of the
    /// batch on the host.
    fn bind(
        &mut self,
        plan: &Self::Plan,
        documents: &[i32],
        batch: &Self::Batch,
    ) -> Result<Self::Plan, NnError>;

    /// A cached `plan` for queries that start at `position`.
    fn at(&mut self, plan: &Self::Plan, position: usize) -> Result<Self::Plan, NnError>;

    /// Pairs of query and key that the mask lets through in the batch that `plan` was bound to, in
    /// the mean of the heads, after a step; `None` where nothing has counted them.
    fn live_pairs(&self, plan: &Self::Plan) -> Option<f64>;

    /// What results' bits depend on beside the program and its numbers, by name: driver, libraries,
    /// how `plan` computes. Nothing where they depend on nothing else.
    ///
    /// # Errors
    /// Those of planning, and of a library that is missing.
    fn bits_depend_on(&self, plan: &Self::Plan) -> Result<BTreeMap<String, String>, NnError> {
        let _ = plan;
        Ok(BTreeMap::new())
    }

    /// From here on finds out by timing, once for each problem, how to compute where the device's
    /// libraries leave a choice, but for what `given` says, which an earlier run chose
    /// ([`Blocks::choices`]).
    fn choose(&mut self, given: &BTreeMap<String, usize>) {
        let _ = given;
    }

    /// What was chosen, by name: results' bits depend on it. A name says what it is a choice for, down to
    /// the device and its libraries.
    fn choices(&self) -> BTreeMap<String, usize> {
        BTreeMap::new()
    }

    /// What `plan` takes in a batch of the shape it was made for.
    fn plan_bytes(&mut self, plan: &Self::Plan) -> Result<PlanBytes, NnError>;

    /// Brings a batch to the device, with the rotations of its positions, which each of `tables`
    /// reaches, and the order of its tokens that [`Blocks::embed_backward`] sums in.
    fn upload(
        &mut self,
        batch: &Batch<'_>,
        tables: &[Arc<RopeTable>],
    ) -> Result<Self::Batch, NnError>;

    /// Takes the times of every block from here on, or no longer, where a device can: they come with
    /// [`Blocks::block_times`].
    ///
    /// # Errors
    /// When the device fails.
    fn profile(&mut self, _on: bool) -> Result<(), NnError> {
        Ok(())
    }

    /// The times of the blocks of steps whose totals were read since the last call, in their order, and of copies beside
    /// them that are done; those that were under way come once [`Blocks::profile`] has ended the profile.
    fn block_times(&mut self) -> Vec<BlockTime> {
        Vec::new()
    }

    /// Whether blocks are only queued when they return, so that work of the next step can be queued
    /// before the totals of this one are read.
    fn queues(&self) -> bool {
        false
    }

    /// Keeps a device that [queues](Self::queues) busy for `duration`, at most a second, so that what is queued
    /// meanwhile runs without waiting for the host.
    ///
    /// # Errors
    /// When the device fails.
    fn pause(&mut self, _duration: Duration) -> Result<(), NnError> {
        Ok(())
    }

    /// Totals of nothing.
    fn totals(&mut self) -> Result<Self::Totals, NnError>;

    /// Waits for `totals` and reads them back; for no work that was queued behind [`Blocks::update`]. An
    /// error where that changed nothing because of a step before that was not finite, whose totals nobody
    /// has read.
    fn read(&mut self, totals: Self::Totals) -> Result<Sums, NnError>;

    /// Brings to the device what the optimiser goes through: in order, not overlapping.
    ///
    /// # Errors
    /// When memory does not suffice.
    fn spans(&mut self, spans: &[Span]) -> Result<Self::Spans, NnError>;

    /// The norm of the gradients of the mean loss, over the labelled tokens that `totals` counted,
    /// and what [`Blocks::update`] multiplies gradients with: one over those tokens, times what brings
    /// the norm down to `step.clip_norm`. With `more` gradients of the same step, the squares of those
    /// before are in the norm. Where there are other ranks, `sum` makes the squares those of all, NaN where
    /// the loss of any is not finite, and in `totals` loss and tokens, too, unless they are already, with
    /// `more`; then this waits, once.
    ///
    /// # Errors
    /// Those of `sum`.
    fn clip(
        &mut self,
        step: &OptimizerStep,
        gradients: &Self::Array,
        more: bool,
        sum: Option<SumOverRanks<'_>>,
        totals: &mut Self::Totals,
    ) -> Result<(), NnError>;

    /// One step of the optimiser with the factor that [`Blocks::clip`] left in `totals`. None where the loss
    /// or the norm is not finite; and where work is only queued, none of the steps behind, either, until
    /// the totals of that one are read. Of all trained parameters, of which there are `elems`, the first
    /// gradient is that of parameter `first`.
    fn update(
        &mut self,
        step: &OptimizerStep,
        spans: &Self::Spans,
        weights: &mut Weights<Self::Array>,
        gradients: (&Self::Array, usize),
        moments: &mut Moments<Self::Array>,
        elems: usize,
        totals: &mut Self::Totals,
    ) -> Result<(), NnError>;

    /// `out[t] = scale · table[tokens[t]]`. Of a part of the table `first` is the id of its first row;
    /// `out[t]` is 0 where a token has no row.
    fn embed(
        &mut self,
        batch: &Self::Batch,
        first: Option<usize>,
        table: Part<'_, Self::Array>,
        width: usize,
        scale: f32,
        out: &mut Self::Array,
    ) -> Result<(), NnError>;

    /// Adds `scale · d_out[t]` to `d_table[tokens[t]]`, in order of `t`; rows of no token are 0 where
    /// the gradient is not accumulated. `first` is as in [`Blocks::embed`].
    fn embed_backward(
        &mut self,
        batch: &Self::Batch,
        first: Option<usize>,
        d_out: &Self::Array,
        width: usize,
        scale: f32,
        d_table: PartMut<'_, Self::Array>,
    ) -> Result<(), NnError>;

    /// `inverse[t] = 1/√(mean(x[t]²) + eps)`, `out[t] = x[t] · inverse[t] · (offset + weight)`.
    fn rms_norm(
        &mut self,
        x: &Self::Array,
        weight: Part<'_, Self::Array>,
        norm: Norm,
        inverse: &mut Self::Array,
        out: &mut Self::Array,
    ) -> Result<(), NnError>;

    /// `x += residual`, then [`Blocks::rms_norm`] of `x`, in one pass.
    fn add_rms_norm(
        &mut self,
        residual: &Self::Array,
        x: &mut Self::Array,
        weight: Part<'_, Self::Array>,
        norm: Norm,
        inverse: &mut Self::Array,
        out: &mut Self::Array,
    ) -> Result<(), NnError>;

    /// `out` of [`Blocks::rms_norm`] once more, to the bit.
    fn rms_norm_again(
        &mut self,
        forward: NormForward<'_, Self::Array>,
        out: &mut Self::Array,
    ) -> Result<(), NnError>;

    /// The gradient of x to `d_x`, all of an array, and that of the weight to `d_weight`, where it is
    /// trained; to `again`, where there is one, what [`Blocks::rms_norm_again`] gives, in the same pass.
    fn rms_norm_backward(
        &mut self,
        forward: NormForward<'_, Self::Array>,
        d_out: &Self::Array,
        d_x: PartMut<'_, Self::Array>,
        d_weight: Option<PartMut<'_, Self::Array>>,
        again: Option<&mut Self::Array>,
    ) -> Result<(), NnError>;

    /// [`Blocks::rms_norm`] of each query and key head of `qkv` by itself; `weight` are those of query
    /// heads and those of key heads, `[2, dim]`. `out` has the values as they are. `inverse` is
    /// `[T, heads_q + heads_kv]`. Behind the norm heads turn, where they do, as by [`Blocks::rope`].
    fn head_norm(
        &mut self,
        heads: PackedHeads,
        qkv: &Self::Array,
        weight: Part<'_, Self::Array>,
        norm: Norm,
        turn: Option<Turn<'_, Self::Batch>>,
        inverse: &mut Self::Array,
        out: &mut Self::Array,
    ) -> Result<(), NnError>;

    /// In place: `d_qkv` becomes the gradient of what was normalised. That of the weights goes to
    /// `d_weight`, where they are trained.
    fn head_norm_backward(
        &mut self,
        heads: PackedHeads,
        forward: NormForward<'_, Self::Array>,
        turn: Option<Turn<'_, Self::Batch>>,
        d_qkv: &mut Self::Array,
        d_weight: Option<PartMut<'_, Self::Array>>,
    ) -> Result<(), NnError>;

    /// `y += x`.
    fn add(&mut self, x: &Self::Array, y: &mut Self::Array) -> Result<(), NnError>;

    /// `y = x · weightᵀ`, plus what is given of `add`, as y, and `bias`, the same for every token.
    fn linear(
        &mut self,
        shape: LinearShape,
        x: Part<'_, Self::Array>,
        weight: Part<'_, Self::Array>,
        bias: Option<Part<'_, Self::Array>>,
        add: Option<&Self::Array>,
        y: &mut Self::Array,
    ) -> Result<(), NnError>;

    /// `d_bias += Σ_t d_y[t]`.
    fn bias_backward(
        &mut self,
        d_y: &Self::Array,
        d_bias: PartMut<'_, Self::Array>,
    ) -> Result<(), NnError>;

    /// `d_x = d_y · weight`.
    fn linear_backward_input(
        &mut self,
        shape: LinearShape,
        d_y: &Self::Array,
        weight: Part<'_, Self::Array>,
        d_x: &mut Self::Array,
    ) -> Result<(), NnError>;

    /// `d_yᵀ · x`, the gradient of the weight.
    fn linear_backward_weight(
        &mut self,
        shape: LinearShape,
        d_y: &Self::Array,
        x: &Self::Array,
        d_weight: PartMut<'_, Self::Array>,
    ) -> Result<(), NnError>;

    /// Turns the query and key heads of `qkv` in place; what the table has no pairs for stays.
    fn rope(
        &mut self,
        turn: Turn<'_, Self::Batch>,
        heads: PackedHeads,
        rotation: Rotation,
        qkv: &mut Self::Array,
    ) -> Result<(), NnError>;

    /// Attention straight out of the packed projection. `out` is `[rows, len, heads_q, dim]`,
    /// `lse` is `[rows, heads_q, len]`. With a cache, the one row's keys and values are put into
    /// it at its position, and the queries see all that it then holds.
    ///
    /// # Errors
    /// Those of the plan, too.
    fn attention(
        &mut self,
        layer: LayerAttention<'_, Self>,
        qkv: &Self::Array,
        cache: Option<KvCache<'_, Self::Array>>,
        out: &mut Self::Array,
        lse: &mut Self::Array,
    ) -> Result<(), NnError>;

    /// Gradients of attention straight into the packed gradient, which is overwritten; those of
    /// the learned buffers lie in `d_learned` as their values do.
    ///
    /// # Errors
    /// Those of the plan, too.
    fn attention_backward(
        &mut self,
        layer: LayerAttention<'_, Self>,
        qkv: &Self::Array,
        out: &Self::Array,
        lse: &Self::Array,
        d_out: &Self::Array,
        d_qkv: &mut Self::Array,
        d_learned: PartMut<'_, Self::Array>,
    ) -> Result<(), NnError>;

    /// `out = f(gate) · up`, gate and up side by side in `gate_up [T, 2·width]`.
    fn gated(
        &mut self,
        activation: Activation,
        width: usize,
        gate_up: &Self::Array,
        out: &mut Self::Array,
    ) -> Result<(), NnError>;

    /// In place: `gate_up` becomes its gradient, `d_out` becomes `f(gate) · up`.
    fn gated_backward(
        &mut self,
        activation: Activation,
        width: usize,
        gate_up: &mut Self::Array,
        d_out: &mut Self::Array,
    ) -> Result<(), NnError>;

    /// Records passes from here on and queues the records, where the device can ([`Blocks::recording`]).
    fn record_passes(&mut self) {}

    /// Whether passes are recorded.
    fn recording(&self) -> Recording {
        Recording::Off("the device records nothing".into())
    }

    /// Forgets the passes that were recorded, which name memory that goes.
    fn forget_passes(&mut self) {}

    /// Queues `work`, the blocks of a pass that adds to gradients and to `totals`. Where passes are recorded,
    /// queues what an earlier one of the same identity queued instead. May do `work` twice, but queues it
    /// once. No `work` of it begins copies to the host's memory ([`Blocks::leave`]).
    ///
    /// # Errors
    /// Those of `work`; when the record is not what `work` queues.
    fn queue_pass(
        &mut self,
        _of: &PassIdentity<'_, Self>,
        totals: &mut Self::Totals,
        work: &mut PassWork<'_, Self>,
    ) -> Result<(), NnError> {
        work(self, totals)
    }

    /// Adds the cross-entropy of logits and labels to `totals`, with the number of tokens that have a
    /// label, and writes that of each token to `each [T]`, 0 where it has no label; with `gradients`, these in
    /// the same pass. But for `each` the weight is multiplied with the rows of [`LabelledTokens`] alone, where
    /// the batch has such.
    fn loss(
        &mut self,
        batch: &Self::Batch,
        operands: LossOperands<'_, Self::Array>,
        each: Option<&mut Self::Array>,
        gradients: Option<LossGradients<'_, Self::Array>>,
        totals: &mut Self::Totals,
    ) -> Result<(), NnError>;

    /// [`Blocks::loss`] of a rank that has a part of the vocabulary, and so of the weight: largest logits and
    /// sums of exponentials are brought together, never logits. What is written of `d_x` is this rank's term
    /// of a sum over ranks. All ranks have room for the logits of as many tokens. There are no parts where
    /// nothing is computed.
    ///
    /// # Errors
    /// When the ranks cannot go on.
    fn loss_part(
        &mut self,
        batch: &Self::Batch,
        operands: LossOperands<'_, Self::Array>,
        part: Option<VocabularyPart<'_, Self>>,
        gradients: Option<LossGradients<'_, Self::Array>>,
        totals: &mut Self::Totals,
    ) -> Result<(), NnError>;
}
