//! The sizes of a recipe's model: its own, or those that the `config.json` of its checkpoint says.

use std::path::{Path, PathBuf};

use foveate_nn::{AttentionConfig, ModelConfig};
use foveate_train::checkpoint::{self, Checksums};
use foveate_train::recipe::Recipe;
use foveate_train::tokens::BYTE_VOCAB;

use crate::failure::Failure;

/// What is known of a model without its weights.
pub struct Sizes {
    pub config: ModelConfig,
    /// That of the recipe, or of its checkpoint.
    pub attention: Option<AttentionConfig>,
    /// Where the tokenizer of the checkpoint is expected.
    pub tokenizer: Option<PathBuf>,
}

/// Those of the recipe in `file`; `wrong` is an error of it.
///
/// # Errors
/// When sizes are missing or cannot be, or what is wrong with the checkpoint's `config.json`.
pub fn of_recipe(
    recipe: &Recipe,
    file: &Path,
    checksums: Checksums,
    wrong: impl Fn(String) -> Failure,
) -> Result<Sizes, Failure> {
    let Some(folder) = &recipe.model.checkpoint else {
        let vocab = match (&recipe.data.tokenizer, recipe.model.vocab_size) {
            (None, _) => BYTE_VOCAB,
            (Some(_), Some(_)) => 0,
            (Some(file), None) => {
                let file = file.display();
                return Err(wrong(format!(
                    "model.vocab_size is not given, and {file} is not read for it; give it"
                )));
            }
        };
        let config = recipe.model_config(vocab).map_err(&wrong)?;
        let config =
            config.ok_or_else(|| wrong("neither sizes nor a checkpoint are given".into()))?;
        return Ok(Sizes { config, attention: recipe.attention.clone(), tokenizer: None });
    };
    let folder = file.parent().unwrap_or(Path::new("")).join(folder);
    if !folder.exists() {
        let folder = folder.display();
        return Err(wrong(format!(
            "model.checkpoint: {folder} is not there, and its sizes are not known; put the model's \
             config.json there, which is enough, or give sizes, as in recipes/llama3-8b.toml"
        )));
    }
    let from = checkpoint::read_sizes(&folder, checksums)?;
    recipe.check_layers(from.model.num_hidden_layers).map_err(wrong)?;
    let attention = recipe.attention.clone().unwrap_or(from.attention);
    Ok(Sizes { config: from.model, attention: Some(attention), tokenizer: from.tokenizer })
}
