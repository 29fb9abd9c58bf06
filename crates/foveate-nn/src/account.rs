//! What a model costs before it is made: parameters, memory, floating-point operations.

use crate::config::{LearnedBuffer, ModelConfig};
use crate::error::NnError;
use crate::matmul::{Scratch, scratch_deep};
use crate::model::Model;
use crate::parameters::Layout;
use crate::tape::{Recompute, loss_chunk};

/// What a training process takes besides what follows from the sizes: the program, its threads, the
/// texts that wait to be packed. Measured on Linux, release and debug builds.
const PROCESS: u64 = 21 << 20;

/// Tokens of the largest batch whose attention is described to know its workspace.
const COUNTED_TOKENS: usize = 1 << 22;

/// Bytes that training takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryEstimate {
    /// Parameters.
    pub weights: u64,
    /// Gradients, f32.
    pub gradients: u64,
    /// AdamW's two moments, f32, and f32 master weights when the weights are not f32.
    pub optimizer: u64,
    /// Arrays of one step: what is saved, what is scratch, and one chunk of logits.
    pub activations: u64,
    /// Workspace of attention; 0 where only sizes are known.
    pub attention: u64,
    /// The process itself, and what its matrix products pack; 0 where only sizes are known.
    pub process: u64,
}

impl MemoryEstimate {
    /// All of it, in bytes.
    pub fn total(&self) -> u64 {
        let arrays = [self.weights, self.gradients, self.optimizer, self.activations];
        let rest = [self.attention, self.process];
        arrays.into_iter().chain(rest).fold(0, u64::saturating_add)
    }
}

/// Floating-point operations, a multiply-add being two.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FlopCount {
    /// In matrix products with weights.
    pub linear: f64,
    /// In attention.
    pub attention: f64,
}

impl FlopCount {
    /// All of them.
    pub fn total(&self) -> f64 {
        self.linear + self.attention
    }
}

impl ModelConfig {
    /// Number of trained values; a tied output projection counts once. Learned attention
    /// buffers are not among them.
    pub fn parameter_count(&self) -> u64 {
        self.parameter_count_with(&[])
    }

    /// [`ModelConfig::parameter_count`] with learned attention buffers in every layer.
    pub fn parameter_count_with(&self, learned: &[(String, LearnedBuffer)]) -> u64 {
        Layout::new(self, learned).parameter_count()
    }

    /// Bytes that a step over `rows` rows of `len` tokens takes, with weights and activations
    /// of `bytes` bytes an element: 4 for f32, 2 for bf16. For f32 the activations are exactly
    /// those of the step's workspace. Attention's own workspace and the process are not counted:
    /// [`Model::training_memory`] does. Sizes past counting give the largest count.
    pub fn memory_estimate(
        &self,
        rows: usize,
        len: usize,
        bytes: u64,
        recompute: Recompute,
    ) -> MemoryEstimate {
        let parameters = Layout::new(self, &[]).elems() as u64;
        let tokens = rows.saturating_mul(len);
        let (hidden, wide) = (self.hidden_size, self.intermediate_size);
        let (attention, qkv) = (self.attention_width(), self.qkv_width());
        let layers = self.num_hidden_layers;
        let kept = recompute.kept(layers);
        // Elements a token; statistics (inverse norms, lse) stay in f32.
        let inputs = (layers + 1) * hidden;
        let saved = kept.0 * (qkv + attention) + kept.1 * (hidden + 2 * wide);
        let scratch = 3 * hidden + wide + attention + qkv;
        let statistics = kept.0 * (1 + self.num_attention_heads) + kept.1 + 1;
        let a_token = (inputs + saved + scratch) as u64 * bytes + statistics as u64 * 4;
        let logits = loss_chunk(self, tokens) as u64 * self.vocab_size as u64 * 4;
        let master = if bytes == 4 { 0 } else { 4 };
        MemoryEstimate {
            weights: parameters.saturating_mul(bytes),
            gradients: parameters.saturating_mul(4),
            optimizer: parameters.saturating_mul(8 + master),
            activations: (tokens as u64).saturating_mul(a_token).saturating_add(logits),
            attention: 0,
            process: 0,
        }
    }

    /// Operations of training on one token, forward and backward, when its query sees `keys`
    /// keys on average: the sequence length counts dense, the mask's live pairs divided by
    /// queries counts mask-aware. A backward pass counts twice its forward pass, and nothing
    /// that is computed again counts.
    pub fn flops_per_token(&self, keys: f64) -> FlopCount {
        let (hidden, wide) = (self.hidden_size as f64, self.intermediate_size as f64);
        let (attention, layers) = (self.attention_width() as f64, self.num_hidden_layers as f64);
        let layer = hidden * (self.qkv_width() as f64 + attention + 3.0 * wide);
        let weights = layers * layer + hidden * self.vocab_size as f64;
        FlopCount { linear: 6.0 * weights, attention: 12.0 * layers * attention * keys }
    }
}

/// Bytes that the matrix products of a step over so many tokens take besides their operands: those of
/// gradients of weights.
fn products_bytes(config: &ModelConfig, tokens: usize) -> u64 {
    let (hidden, wide) = (config.hidden_size, config.intermediate_size);
    let attention = config.attention_width();
    let products = [
        [config.qkv_width(), hidden, tokens],
        [hidden, attention, tokens],
        [2 * wide, hidden, tokens],
        [hidden, wide, tokens],
        [config.vocab_size, hidden, loss_chunk(config, tokens)],
    ];
    let all = products.map(|sizes| scratch_deep(sizes, rayon::current_num_threads()));
    let most = |of: fn(&Scratch) -> usize| all.iter().map(of).max().unwrap_or(0) as u64;
    most(|one| one.packed) + most(|one| one.kept)
}

impl Model {
    /// The most resident memory, in bytes, of a process that trains this model on rows of `len`
    /// tokens, `rows` at once, and saves it. Parameters need no elements yet
    /// ([`Model::unfilled`]).
    ///
    /// # Errors
    /// When attention cannot be planned for such a batch.
    pub fn training_memory(
        &self,
        rows: usize,
        len: usize,
        recompute: Recompute,
    ) -> Result<MemoryEstimate, NnError> {
        let parameters = self.layout.elems() as u64;
        // The workspace is cut into waves, so more rows than these take no more of it.
        let rows_at_once = rows.min(COUNTED_TOKENS / len.max(1)).max(1);
        Ok(MemoryEstimate {
            weights: parameters * 4,
            gradients: parameters * 4,
            optimizer: parameters * 8,
            attention: self.plans.workspace_bytes([rows_at_once, len])?,
            process: PROCESS + products_bytes(self.config(), rows.saturating_mul(len)),
            ..self.config().memory_estimate(rows, len, 4, recompute)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(json: &[(&str, usize)], tied: bool) -> ModelConfig {
        let get = |name: &str| json.iter().find(|(n, _)| *n == name).map_or(0, |(_, v)| *v);
        ModelConfig {
            vocab_size: get("vocab"),
            hidden_size: get("hidden"),
            intermediate_size: get("wide"),
            num_hidden_layers: get("layers"),
            num_attention_heads: get("heads"),
            num_key_value_heads: Some(get("kv")),
            head_dim: None,
            rms_norm_eps: 1e-5,
            rope_theta: 1e4,
            rope_scaling: None,
            rope_pairing: Default::default(),
            max_position_embeddings: 2048,
            tie_word_embeddings: tied,
        }
    }

    #[test]
    fn published_models_have_their_published_parameter_counts() {
        let small = [
            ("vocab", 49152),
            ("hidden", 576),
            ("wide", 1536),
            ("layers", 30),
            ("heads", 9),
            ("kv", 3),
        ];
        assert_eq!(config(&small, true).parameter_count(), 134_515_008);
        let llama3 = [
            ("vocab", 128_256),
            ("hidden", 4096),
            ("wide", 14336),
            ("layers", 32),
            ("heads", 32),
            ("kv", 8),
        ];
        let llama3 = config(&llama3, false);
        assert_eq!(llama3.parameter_count(), 8_030_261_248);
        let modes = [Recompute::None, Recompute::Attention, Recompute::Full];
        let bytes = modes.map(|m| llama3.memory_estimate(1, 8192, 2, m).activations);
        assert!(bytes[0] > bytes[1] && bytes[1] > bytes[2], "{bytes:?}");
        assert_eq!(llama3.memory_estimate(1, 8192, 2, Recompute::Full).weights, 16_060_522_496);
    }
}
