//! What models of other families have that a Llama has not.

use serde::{Deserialize, Serialize};

/// Where a model differs from a Llama, of which all is as the default says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Architecture {
    /// The family, as `model_type` of a Hugging Face `config.json` names it.
    pub family: String,
    /// A bias after the projections of queries, keys and values (Qwen2).
    pub qkv_bias: bool,
    /// RMSNorm of each query and key head before RoPE (Qwen3, Gemma 3).
    pub head_norms: bool,
    /// RMSNorm of what attention and the feed-forward part add to the residual stream (Gemma 2, 3).
    pub output_norms: bool,
    /// The weights of norms are distances from 1 (Gemma).
    pub centered_norms: bool,
    /// What the gate goes through.
    pub activation: Activation,
    /// Embeddings are multiplied with √hidden (Gemma).
    pub scaled_embedding: bool,
    /// Logits z become `cap · tanh(z / cap)` (Gemma 2).
    pub logit_cap: Option<f32>,
    /// Queries, keys and values, and gate and up, are one tensor each in a checkpoint (Phi-3).
    pub packed_weights: bool,
    /// Share of a head's components that RoPE turns, the first ones (Phi-4-mini).
    pub rotary_share: f64,
    /// Base of the rotary frequencies of layers that say `local`; these are never scaled (Gemma 3).
    pub local_rope_theta: Option<f64>,
    /// Which rotation a layer uses, repeated over the layers; all are `global` where it is empty
    /// (SmolLM3, Gemma 3).
    pub layer_rope: Vec<LayerRope>,
}

impl Default for Architecture {
    fn default() -> Self {
        Self {
            family: "llama".to_owned(),
            qkv_bias: false,
            head_norms: false,
            output_norms: false,
            centered_norms: false,
            activation: Activation::Silu,
            scaled_embedding: false,
            logit_cap: None,
            packed_weights: false,
            rotary_share: 1.0,
            local_rope_theta: None,
            layer_rope: Vec::new(),
        }
    }
}

impl Architecture {
    /// Whether the model is a Llama.
    pub fn is_llama(&self) -> bool {
        *self == Self::default()
    }

    /// Which rotation `layer` uses.
    pub fn rope_of(&self, layer: usize) -> LayerRope {
        let pattern = &self.layer_rope;
        pattern.get(layer % pattern.len().max(1)).copied().unwrap_or_default()
    }
}

/// What the gate of the feed-forward part goes through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// SiLU, `x·σ(x)`.
    #[default]
    Silu,
    /// GELU by tanh.
    Gelu,
}

/// The rotation of a layer's queries and keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerRope {
    /// By `rope_theta`, scaled by `rope_scaling`.
    #[default]
    Global,
    /// By `local_rope_theta`.
    Local,
    /// None.
    None,
}
