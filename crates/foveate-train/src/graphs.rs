//! Whether the passes of batches are recorded as CUDA graphs.

use foveate_nn::{ModelConfig, Offload};

use crate::recipe::{GraphsChoice, Recipe};

/// Launches of a pass, by layer: some 1,300 in 30 layers.
const LAUNCHES_OF_LAYER: f64 = 43.0;

/// Seconds in which the host queues one: 11.1 ms for these, on the host of an H200.
const LAUNCH: f64 = 8.5e-6;

/// Operations a second of matrix products on an H200, the fastest GPU measured: on others a pass takes longer, and
/// launches less of it.
const OPERATIONS: f64 = 700e12;

/// The share of a pass from which on launches matter.
const SHARE: f64 = 0.1;

/// Whether passes of a run are to be recorded, by its recipe: `auto` where launches would be a tenth of
/// a pass.
pub(crate) fn wanted(recipe: &Recipe, config: &ModelConfig) -> bool {
    match recipe.run.graphs {
        GraphsChoice::On => true,
        GraphsChoice::Off => false,
        GraphsChoice::Auto => {
            let len = recipe.data.len;
            launches(config, recipe.train.batch_rows.saturating_mul(len), len) >= SHARE
        }
    }
}

/// The seconds in which the host queues a pass over `tokens` tokens in rows of `len`, over those that its matrix
/// products and its attention take.
fn launches(config: &ModelConfig, tokens: usize, len: usize) -> f64 {
    let working = tokens as f64 * config.flops_per_token(len as f64).total() / OPERATIONS;
    LAUNCHES_OF_LAYER * config.num_hidden_layers as f64 * LAUNCH / working
}

/// Why passes of a run with such a recipe are not recorded, on a rank that is alone or not, where something is
/// in the way.
pub(crate) fn in_the_way(alone: bool, recipe: &Recipe) -> Option<&'static str> {
    if !alone {
        return Some("other ranks have part of its steps");
    }
    if recipe.optimizer.in_backward {
        return Some("a pass updates parameters with numbers of its step (optimizer.in_backward)");
    }
    let reason = "inputs of layers go to the memory of the host (train.offload)";
    (recipe.train.offload != Offload::None).then_some(reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_are_much_of_small_models_and_short_batches_and_little_of_others() {
        let sizes = |hidden: usize, wide: usize, layers: usize, heads: [usize; 2], words: usize| {
            let sizes = serde_json::json!({
                "hidden_size": hidden, "intermediate_size": wide, "num_hidden_layers": layers, "vocab_size": words,
                "num_attention_heads": heads[0], "num_key_value_heads": heads[1],
            });
            serde_json::from_value::<ModelConfig>(sizes).unwrap()
        };
        let small = sizes(576, 1536, 30, [9, 3], 49_152);
        let one = sizes(2048, 8192, 16, [32, 8], 128_256);
        let eight = sizes(4096, 14336, 32, [32, 8], 128_256);
        // Measured: 11.1 of 13.5 ms (135M, 2,048 tokens), 4.6 of 41.2 (1B, 2,048); 8B on 8,192 takes 700.
        let share = |config: &ModelConfig, rows, len| launches(config, rows * len, len);
        assert!(share(&small, 1, 2048) > 0.5, "{}", share(&small, 1, 2048));
        assert!(share(&one, 1, 2048) > SHARE, "{}", share(&one, 1, 2048));
        assert!(share(&one, 2, 8192) < SHARE, "{}", share(&one, 2, 8192));
        assert!(share(&eight, 1, 8192) < 0.03, "{}", share(&eight, 1, 8192));
    }
}
