//! What a step saves: explicit arrays, made once and used again by every step.
//!
//! A layer saves four groups. Its input always stays, or waits in the memory of the host. What attention needs, what lies between
//! attention and the feed-forward part, and gate and up each have an array for every layer that
//! keeps the group, and one that all layers share which compute it again. Recomputation runs the
//! same blocks on the same numbers, so gradients are bitwise equal in all modes.
//!
//! On a rank of `tensor` arrays of `[S, …]` are of the rank's own tokens of the stream between products,
//! and `[T, …]` of all tokens, of the rank's heads and columns. Elsewhere the two are the same tokens.

use foveate::DType;
use serde::{Deserialize, Serialize};

use crate::arena::Arena;
use crate::backend::{Array, Blocks};
use crate::config::ModelConfig;
use crate::error::NnError;
use crate::offload::{self, HostInputs, Offload};
use crate::tensor::TensorPart;

/// Which activations are computed again in the backward pass instead of being kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// None: most memory, least work.
    #[default]
    None,
    /// The packed projection and attention.
    Attention,
    /// Gate and up: most of what a layer keeps.
    Mlp,
    /// Everything but the inputs of the layers: least memory, one more forward pass.
    Full,
}

impl Recompute {
    /// All modes, in the order of the memory that they leave.
    pub const ALL: [Self; 4] = [Self::None, Self::Attention, Self::Mlp, Self::Full];

    /// Its name in a recipe.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Attention => "attention",
            Self::Mlp => "mlp",
            Self::Full => "full",
        }
    }
}

/// What the first layers compute again; the others keep everything. And where what is kept waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recomputation {
    /// What.
    pub what: Recompute,
    /// How many layers; as many as there are if fewer.
    pub layers: usize,
    /// What of all layers waits in the memory of the host.
    pub offload: Offload,
}

impl From<Recompute> for Recomputation {
    /// In all layers.
    fn from(what: Recompute) -> Self {
        Self { what, layers: usize::MAX, offload: Offload::None }
    }
}

impl Recomputation {
    /// It as numbers.
    pub(crate) fn numbers(self) -> [u64; 3] {
        [self.what as u64, self.layers as u64, self.offload as u64]
    }

    /// What `layer` computes again.
    pub(crate) fn of(self, layer: usize) -> Recompute {
        if layer < self.layers { self.what } else { Recompute::None }
    }

    /// Layers of `layers` whose attention is kept at once: those that compute it again share one's
    /// place.
    pub fn kept_attention(self, layers: usize) -> usize {
        self.kept(layers).attention.count()
    }

    /// Inputs of layers, and the output of the last, that are on the device at once.
    pub(crate) fn inputs(self, layers: usize) -> usize {
        match self.offload {
            Offload::None => layers + 1,
            Offload::LayerInputs => offload::INPUTS,
        }
    }

    pub(crate) fn kept(self, layers: usize) -> Kept {
        let first = self.layers.min(layers);
        let of = |again: bool| Slots { layers, shared: if again { first } else { 0 } };
        Kept {
            attention: of(matches!(self.what, Recompute::Attention | Recompute::Full)),
            residual: of(self.what == Recompute::Full),
            gate_up: of(matches!(self.what, Recompute::Mlp | Recompute::Full)),
        }
    }
}

/// Where the groups of each layer are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Kept {
    pub attention: Slots,
    pub residual: Slots,
    pub gate_up: Slots,
}

impl Kept {
    /// Nothing is kept: a pass without gradients.
    pub fn nothing(layers: usize) -> Self {
        Recomputation::from(Recompute::Full).kept(layers)
    }
}

/// The places of a group: the first `shared` layers have one together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Slots {
    layers: usize,
    shared: usize,
}

impl Slots {
    fn count(self) -> usize {
        usize::from(self.shared > 0) + self.layers - self.shared
    }

    /// The place of `layer`.
    pub fn of(self, layer: usize) -> usize {
        if layer < self.shared { 0 } else { layer - self.shared + usize::from(self.shared > 0) }
    }
}

/// What attention saves, `T` being all tokens of the batch.
#[derive(Debug, Default)]
pub(crate) struct AttentionTape<A> {
    /// Reciprocal root mean squares before attention, `[S]`.
    pub inverse: A,
    /// Packed queries, keys and values, `[T, qkv_width]`: rotated, or as projected where heads are
    /// normalised.
    pub qkv: A,
    /// Reciprocal root mean squares of query and key heads, `[T, heads_q + heads_kv]`, where they are
    /// normalised.
    pub heads_inverse: A,
    /// Output of attention, `[T, attention_width]`.
    pub out: A,
    /// Its log denominators, `[rows, heads, len]`.
    pub lse: A,
}

/// What lies between attention and the feed-forward part.
#[derive(Debug, Default)]
pub(crate) struct ResidualTape<A> {
    /// The residual stream after attention, `[S, hidden]`.
    pub x: A,
    /// Reciprocal root mean squares of `x`, `[S]`.
    pub inverse: A,
    /// What attention adds before it is normalised.
    pub attention: OutputTape<A>,
    /// What the feed-forward part adds before it is normalised.
    pub mlp: OutputTape<A>,
}

/// What a part of a layer adds to the residual stream, where that is normalised; else empty.
#[derive(Debug, Default)]
pub(crate) struct OutputTape<A> {
    /// Before the norm, `[S, hidden]`.
    pub x: A,
    /// Its reciprocal root mean squares, `[S]`.
    pub inverse: A,
}

/// Arrays of a step.
#[derive(Debug, Default)]
pub(crate) struct Workspace<A> {
    /// Inputs of the layers, and the output of the last, `[S, hidden]` each: `layers + 1`, or fewer that
    /// layers have in turn.
    pub inputs: Vec<A>,
    /// Those that wait in the memory of the host.
    pub on_host: HostInputs<A>,
    pub attention: Vec<AttentionTape<A>>,
    pub residual: Vec<ResidualTape<A>>,
    /// Gate and up projections side by side, `[T, 2·intermediate]`.
    pub gate_up: Vec<A>,
    /// Which of those are a layer's.
    pub kept: Kept,
    /// The packed projection, its heads normalised and rotated, `[T, qkv_width]`.
    pub heads: A,
    /// Reciprocal root mean squares of the last norm, `[S]`.
    pub inverse: A,
    /// A normalised stream, or the gradient of one, `[S, hidden]`.
    pub normed: A,
    /// Gradient of a normalised stream, `[S, hidden]`.
    pub d_normed: A,
    /// Running gradient of the residual stream, `[S, hidden]`.
    pub d_x: A,
    /// On a rank of `tensor` the stream of all tokens, or this rank's term of a sum that becomes one,
    /// `[T, hidden]`; else empty.
    pub whole: A,
    /// On a rank of `tensor` its term of the gradient of what the head reads, `[T, hidden]`; else empty.
    pub d_whole: A,
    /// Output of SwiGLU or its gradient, `[T, intermediate]`.
    pub activated: A,
    /// Gradient of the output of attention, `[T, attention_width]`.
    pub d_attention: A,
    /// Gradient of the packed projection, `[T, qkv_width]`.
    pub d_qkv: A,
    /// Logits of one chunk of tokens.
    pub logits: A,
    /// Where they lie.
    pub arena: Arena<A>,
}

impl<A: Array> Workspace<A> {
    /// Makes the arrays fit a forward pass over `[rows, len]` tokens in which the groups that are
    /// `kept` and `inputs` inputs stay. `config` has the sizes of `part`.
    pub fn fit<B: Blocks<Array = A>>(
        &mut self,
        blocks: &mut B,
        config: &ModelConfig,
        part: &TensorPart,
        shape: [usize; 2],
        inputs: usize,
        kept: Kept,
    ) -> Result<(), NnError> {
        let (hidden, wide) = (config.hidden_size, config.intermediate_size);
        let architecture = &config.architecture;
        self.kept = kept;
        self.on_host.rest();
        self.inputs.resize_with(inputs, A::default);
        self.attention.resize_with(kept.attention.count(), AttentionTape::default);
        self.residual.resize_with(kept.residual.count(), ResidualTape::default);
        self.gate_up.resize_with(kept.gate_up.count(), A::default);
        let mut fit = fitting(blocks, &mut self.arena, part, shape);
        for x in &mut self.inputs {
            fit("layer input", x, Of::Own(hidden))?;
        }
        for a in &mut self.attention {
            fit("inverse rms", &mut a.inverse, Of::OwnSums(1))?;
            fit("qkv", &mut a.qkv, Of::Stream(config.qkv_width()))?;
            fit("attention output", &mut a.out, Of::Stream(config.attention_width()))?;
            fit("lse", &mut a.lse, Of::Sums(config.num_attention_heads))?;
            if architecture.head_norms {
                let heads = config.num_attention_heads + config.kv_heads();
                fit("inverse rms of heads", &mut a.heads_inverse, Of::Sums(heads))?;
            }
        }
        for r in &mut self.residual {
            fit("residual", &mut r.x, Of::Own(hidden))?;
            fit("inverse rms", &mut r.inverse, Of::OwnSums(1))?;
            if architecture.output_norms {
                for output in [&mut r.attention, &mut r.mlp] {
                    fit("output", &mut output.x, Of::Own(hidden))?;
                    fit("inverse rms", &mut output.inverse, Of::OwnSums(1))?;
                }
            }
        }
        for gate_up in &mut self.gate_up {
            fit("gate and up", gate_up, Of::Stream(2 * wide))?;
        }
        if architecture.head_norms {
            fit("heads", &mut self.heads, Of::Stream(config.qkv_width()))?;
        }
        fit("inverse rms", &mut self.inverse, Of::OwnSums(1))?;
        fit("normed", &mut self.normed, Of::Own(hidden))?;
        if part.is_cut() {
            fit("stream of all tokens", &mut self.whole, Of::Stream(hidden))?;
        }
        fit("activated", &mut self.activated, Of::Stream(wide))
    }

    /// Makes the arrays of the host fit, where inputs of layers wait there.
    pub fn fit_host<B: Blocks<Array = A>>(
        &mut self,
        blocks: &mut B,
        layers: usize,
        offload: Offload,
    ) -> Result<(), NnError> {
        match (offload, self.inputs.first()) {
            (Offload::LayerInputs, Some(input)) => {
                self.on_host.fit(blocks, layers, input.dtype(), input.elems())
            }
            _ => Ok(()),
        }
    }

    /// Makes the arrays of the loss fit.
    pub fn fit_loss<B: Blocks<Array = A>>(
        &mut self,
        blocks: &mut B,
        config: &ModelConfig,
        part: &TensorPart,
        tokens: usize,
    ) -> Result<(), NnError> {
        // Ranks of different parts hold the logits of as many tokens.
        let tokens_at_once = blocks.logits_tokens(part.most_vocab).min(tokens.max(1));
        let elems = tokens_at_once * config.vocab_size;
        let dtype = blocks.precision().weights;
        self.arena.resize(blocks, "logits", &mut self.logits, dtype, elems)
    }

    /// Makes the arrays of the backward pass fit.
    pub fn fit_backward<B: Blocks<Array = A>>(
        &mut self,
        blocks: &mut B,
        config: &ModelConfig,
        part: &TensorPart,
        shape: [usize; 2],
    ) -> Result<(), NnError> {
        let (hidden, attention) = (config.hidden_size, config.attention_width());
        let mut fit = fitting(blocks, &mut self.arena, part, shape);
        fit("d_normed", &mut self.d_normed, Of::Own(hidden))?;
        fit("d_x", &mut self.d_x, Of::Own(hidden))?;
        if part.is_cut() {
            fit("gradient of all tokens", &mut self.d_whole, Of::Stream(hidden))?;
        }
        fit("d_attention", &mut self.d_attention, Of::Stream(attention))?;
        fit("d_qkv", &mut self.d_qkv, Of::Stream(config.qkv_width()))
    }
}

/// What an array of a step holds for each token.
#[derive(Clone, Copy)]
enum Of {
    /// Elements that products read or write, in the dtype of the weights.
    Stream(usize),
    /// Sums in f32.
    Sums(usize),
    /// [`Of::Stream`], of the rank's own tokens.
    Own(usize),
    /// [`Of::Sums`], of the rank's own tokens.
    OwnSums(usize),
}

/// Makes an array fit all tokens of rows, or those that `part` has between products.
fn fitting<B: Blocks>(
    blocks: &mut B,
    arena: &mut Arena<B::Array>,
    part: &TensorPart,
    [rows, len]: [usize; 2],
) -> impl FnMut(&'static str, &mut B::Array, Of) -> Result<(), NnError> {
    let [tokens, own] = [len, part.stream(len).len()].map(|len| rows.saturating_mul(len));
    move |name, array, of| {
        let (dtype, width, tokens) = match of {
            Of::Stream(width) => (blocks.precision().weights, width, tokens),
            Of::Sums(width) => (DType::F32, width, tokens),
            Of::Own(width) => (blocks.precision().weights, width, own),
            Of::OwnSums(width) => (DType::F32, width, own),
        };
        arena.resize(blocks, name, array, dtype, tokens.saturating_mul(width))
    }
}
