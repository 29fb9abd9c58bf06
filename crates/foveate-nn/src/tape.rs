//! What a step saves: explicit arrays, made once and used again by every step.
//!
//! A layer saves three groups. Its input always stays. What attention needs and what the
//! feed-forward part needs each have an array per layer, or one that all layers share when the
//! group is recomputed. Recomputation runs the same blocks on the same numbers, so gradients
//! are bitwise equal in all modes.

use foveate::DType;
use serde::{Deserialize, Serialize};

use crate::backend::{Array, Blocks};
use crate::config::ModelConfig;
use crate::error::NnError;

/// Which activations are computed again in the backward pass instead of being kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// None: most memory, least work.
    #[default]
    None,
    /// The packed projection and attention.
    Attention,
    /// Everything but the inputs of the layers: least memory, one more forward pass.
    Full,
}

impl Recompute {
    /// Layers whose (attention, feed-forward) activations are kept at once.
    pub(crate) fn kept(self, layers: usize) -> (usize, usize) {
        match self {
            Recompute::None => (layers, layers),
            Recompute::Attention => (1, layers),
            Recompute::Full => (1, 1),
        }
    }
}

/// What attention saves, `T` being all tokens of the batch.
#[derive(Debug, Default)]
pub(crate) struct AttentionTape<A> {
    /// Reciprocal root mean squares before attention, `[T]`.
    pub inverse: A,
    /// Packed, rotated queries, keys and values, `[T, qkv_width]`.
    pub qkv: A,
    /// Output of attention, `[T, attention_width]`.
    pub out: A,
    /// Its log denominators, `[rows, heads, len]`.
    pub lse: A,
}

/// What the feed-forward part saves.
#[derive(Debug, Default)]
pub(crate) struct MlpTape<A> {
    /// The residual stream after attention, `[T, hidden]`.
    pub x: A,
    /// Reciprocal root mean squares of `x`, `[T]`.
    pub inverse: A,
    /// Gate and up projections side by side, `[T, 2·intermediate]`.
    pub gate_up: A,
}

/// Arrays of a step.
#[derive(Debug, Default)]
pub(crate) struct Workspace<A> {
    /// Inputs of the layers, and the output of the last: `layers + 1` of `[T, hidden]`.
    pub inputs: Vec<A>,
    pub attention: Vec<AttentionTape<A>>,
    pub mlp: Vec<MlpTape<A>>,
    /// Reciprocal root mean squares of the last norm, `[T]`.
    pub inverse: A,
    /// A normalised stream, or the gradient of one, `[T, hidden]`.
    pub normed: A,
    /// Gradient of a normalised stream, `[T, hidden]`.
    pub d_normed: A,
    /// Running gradient of the residual stream, `[T, hidden]`.
    pub d_x: A,
    /// Output of SwiGLU or its gradient, `[T, intermediate]`.
    pub activated: A,
    /// Gradient of the output of attention, `[T, attention_width]`.
    pub d_attention: A,
    /// Gradient of the packed projection, `[T, qkv_width]`.
    pub d_qkv: A,
    /// Logits of one chunk of tokens.
    pub logits: A,
}

impl<A: Array> Workspace<A> {
    /// Makes the arrays fit a forward pass over `tokens` tokens in which the groups of
    /// `kept` layers and `inputs` inputs stay.
    pub fn fit<B: Blocks<Array = A>>(
        &mut self,
        blocks: &mut B,
        config: &ModelConfig,
        tokens: usize,
        inputs: usize,
        (attention, mlp): (usize, usize),
    ) -> Result<(), NnError> {
        let (hidden, wide) = (config.hidden_size, config.intermediate_size);
        self.inputs.resize_with(inputs, A::default);
        self.attention.resize_with(attention, AttentionTape::default);
        self.mlp.resize_with(mlp, MlpTape::default);
        let mut fit = fitting(blocks, tokens);
        for x in &mut self.inputs {
            fit("layer input", x, Of::Stream(hidden))?;
        }
        for a in &mut self.attention {
            fit("inverse rms", &mut a.inverse, Of::Sums(1))?;
            fit("qkv", &mut a.qkv, Of::Stream(config.qkv_width()))?;
            fit("attention output", &mut a.out, Of::Stream(config.attention_width()))?;
            fit("lse", &mut a.lse, Of::Sums(config.num_attention_heads))?;
        }
        for m in &mut self.mlp {
            fit("residual", &mut m.x, Of::Stream(hidden))?;
            fit("inverse rms", &mut m.inverse, Of::Sums(1))?;
            fit("gate and up", &mut m.gate_up, Of::Stream(2 * wide))?;
        }
        fit("inverse rms", &mut self.inverse, Of::Sums(1))?;
        fit("normed", &mut self.normed, Of::Stream(hidden))?;
        fit("activated", &mut self.activated, Of::Stream(wide))
    }

    /// Makes the arrays of the loss fit.
    pub fn fit_loss<B: Blocks<Array = A>>(
        &mut self,
        blocks: &mut B,
        config: &ModelConfig,
        tokens: usize,
    ) -> Result<(), NnError> {
        let vocab = config.vocab_size;
        let elems = blocks.logits_tokens(vocab).min(tokens.max(1)) * vocab;
        let dtype = blocks.precision().weights;
        blocks.resize("logits", &mut self.logits, dtype, elems)
    }

    /// Makes the arrays of the backward pass fit.
    pub fn fit_backward<B: Blocks<Array = A>>(
        &mut self,
        blocks: &mut B,
        config: &ModelConfig,
        tokens: usize,
    ) -> Result<(), NnError> {
        let (hidden, attention) = (config.hidden_size, config.attention_width());
        let mut fit = fitting(blocks, tokens);
        fit("d_normed", &mut self.d_normed, Of::Stream(hidden))?;
        fit("d_x", &mut self.d_x, Of::Stream(hidden))?;
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
}

/// Makes an array fit `tokens` tokens.
fn fitting<B: Blocks>(
    blocks: &mut B,
    tokens: usize,
) -> impl FnMut(&'static str, &mut B::Array, Of) -> Result<(), NnError> {
    move |name, array, of| {
        let (dtype, width) = match of {
            Of::Stream(width) => (blocks.precision().weights, width),
            Of::Sums(width) => (DType::F32, width),
        };
        blocks.resize(name, array, dtype, tokens.saturating_mul(width))
    }
}
