//! Parameters: their names and shapes, where each one stands, and their first values.
//!
//! Names and shapes are those of a Hugging Face Llama checkpoint, so saving and loading map
//! nothing. Learned attention buffers follow the weights of their layer.

use crate::config::{LearnedBuffer, ModelConfig};
use foveate::tensor::random::Random;

/// A trained array.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    /// Its name in a checkpoint.
    pub name: String,
    /// Length of each axis; linear weights are `[out, in]`.
    pub shape: Vec<usize>,
    /// Its elements, row-major.
    pub data: Vec<f32>,
}

/// Standard deviation of the first weights.
const INIT_STD: f32 = 0.02;

/// Where the parameters of a layer stand, counted from its first.
pub(crate) mod at {
    pub const NORM: usize = 0;
    pub const Q: usize = 1;
    pub const K: usize = 2;
    pub const V: usize = 3;
    pub const O: usize = 4;
    pub const MLP_NORM: usize = 5;
    pub const GATE: usize = 6;
    pub const UP: usize = 7;
    pub const DOWN: usize = 8;
    pub const LEARNED: usize = 9;
}

/// Where every parameter stands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Places {
    layers: usize,
    learned: usize,
    tied: bool,
}

impl Places {
    pub fn new(config: &ModelConfig, learned: usize) -> Self {
        Self { layers: config.num_hidden_layers, learned, tied: config.tie_word_embeddings }
    }

    pub fn embedding(&self) -> usize {
        0
    }

    /// Parameter `which` (of [`at`]) of `layer`.
    pub fn layer(&self, layer: usize, which: usize) -> usize {
        1 + layer * (at::LEARNED + self.learned) + which
    }

    /// The learned attention buffers of `layer`.
    pub fn learned(&self, layer: usize) -> std::ops::Range<usize> {
        let first = self.layer(layer, at::LEARNED);
        first..first + self.learned
    }

    pub fn norm(&self) -> usize {
        self.layer(self.layers, 0)
    }

    /// The output projection; the embedding when tied.
    pub fn head(&self) -> usize {
        if self.tied { self.embedding() } else { self.norm() + 1 }
    }
}

/// How a parameter starts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Start {
    mean: f32,
    std: f32,
}

/// Name, shape and start of every parameter, in order.
pub(crate) fn layout(
    config: &ModelConfig,
    learned: &[(String, LearnedBuffer)],
) -> Vec<(String, Vec<usize>, Start)> {
    let (hidden, wide) = (config.hidden_size, config.intermediate_size);
    let (q, kv) = (config.attention_width(), config.kv_heads() * config.dim());
    let weight = Start { mean: 0.0, std: INIT_STD };
    // Outputs into the residual stream shrink with depth, so that its variance does not grow.
    let output =
        Start { mean: 0.0, std: INIT_STD / (2.0 * config.num_hidden_layers as f32).sqrt() };
    let ones = Start { mean: 1.0, std: 0.0 };
    let mut all =
        vec![("model.embed_tokens.weight".into(), vec![config.vocab_size, hidden], weight)];
    for layer in 0..config.num_hidden_layers {
        let mut add = |name: &str, shape: Vec<usize>, start| {
            all.push((format!("model.layers.{layer}.{name}"), shape, start));
        };
        add("input_layernorm.weight", vec![hidden], ones);
        add("self_attn.q_proj.weight", vec![q, hidden], weight);
        add("self_attn.k_proj.weight", vec![kv, hidden], weight);
        add("self_attn.v_proj.weight", vec![kv, hidden], weight);
        add("self_attn.o_proj.weight", vec![hidden, q], output);
        add("post_attention_layernorm.weight", vec![hidden], ones);
        add("mlp.gate_proj.weight", vec![wide, hidden], weight);
        add("mlp.up_proj.weight", vec![wide, hidden], weight);
        add("mlp.down_proj.weight", vec![hidden, wide], output);
        for (name, buffer) in learned {
            let start = Start { mean: buffer.init, std: buffer.std };
            add(&format!("self_attn.{name}"), buffer.shape.clone(), start);
        }
    }
    all.push(("model.norm.weight".into(), vec![hidden], ones));
    if !config.tie_word_embeddings {
        all.push(("lm_head.weight".into(), vec![config.vocab_size, hidden], weight));
    }
    all
}

/// The parameters of a layout without elements, and how each starts.
pub(crate) fn unfilled(layout: Vec<(String, Vec<usize>, Start)>) -> (Vec<Parameter>, Vec<Start>) {
    let empty = |(name, shape, start)| (Parameter { name, shape, data: Vec::new() }, start);
    layout.into_iter().map(empty).unzip()
}

/// The first values of parameter `index`, which depend on `seed`, place and shape alone.
pub(crate) fn first_values(index: usize, shape: &[usize], start: Start, seed: u64) -> Vec<f32> {
    let elems = shape.iter().product();
    if start.std == 0.0 {
        return vec![start.mean; elems];
    }
    let mut random = Random::new(seed ^ (index as u64 + 1).wrapping_mul(0xD6E8_FEB8_6659_FD93));
    (0..elems).map(|_| start.mean + start.std * random.normal() as f32).collect()
}
