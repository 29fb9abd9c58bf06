//! Models of published sizes with weights that are made up.

use foveate_nn::{Blocks, Model, ModelConfig, NnError, RopePairing};

/// SmolLM-135M, Llama-3.2-1B and -3B, Llama-3.1-8B.
pub fn sizes(name: &str) -> Result<ModelConfig, String> {
    let [hidden, wide, layers, heads, kv, vocab] = match name {
        "135m" => [576, 1536, 30, 9, 3, 49_152],
        "1b" => [2048, 8192, 16, 32, 8, 128_256],
        "3b" => [3072, 8192, 28, 24, 8, 128_256],
        "8b" => [4096, 14_336, 32, 32, 8, 128_256],
        _ => return Err(format!("there is no model {name}; name 135m, 1b, 3b or 8b")),
    };
    Ok(ModelConfig {
        vocab_size: vocab,
        hidden_size: hidden,
        intermediate_size: wide,
        num_hidden_layers: layers,
        num_attention_heads: heads,
        num_key_value_heads: Some(kv),
        head_dim: None,
        rms_norm_eps: 1e-5,
        rope_theta: 500_000.0,
        rope_scaling: None,
        rope_pairing: RopePairing::default(),
        max_position_embeddings: 8192,
        tie_word_embeddings: name != "8b",
        architecture: Default::default(),
    })
}

/// The same few numbers again and again, and ones for norms: to draw eight billion takes minutes.
pub fn fill<B: Blocks>(model: &mut Model<B>) -> Result<(), NnError> {
    let small: Vec<f32> = (0..1 << 20).map(|i| ((i * 37 % 1009) as f32 - 504.0) * 5e-5).collect();
    (0..model.parameters().len()).try_for_each(|index| {
        let is_norm = model.parameters()[index].shape.len() == 1;
        model.fill_repeating(index, if is_norm { &[1.0] } else { &small })
    })
}
