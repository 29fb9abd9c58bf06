//! Data, packing, checkpoints, optimiser, recipes and the training loop.
//!
//! A run is a pure function of its [recipe](recipe::Recipe), its documents and its seed: the data
//! order, the packing and the arithmetic do not depend on threads, time or interruptions.
//! Everything that a resumed run needs is in the last checkpoint, and a resumed run's losses equal
//! an uninterrupted run's bit for bit.
//!
//! A recipe is read with overrides, and says what is wrong with it by file, line and column:
//!
//! ```
//! use foveate_train::recipe::Recipe;
//!
//! let text = "
//! [run]
//! dir = 'runs/example'
//! [model]
//! hidden_size = 64
//! intermediate_size = 128
//! num_hidden_layers = 2
//! num_attention_heads = 4
//! [data]
//! files = ['*.md']
//! len = 256
//! ";
//! let recipe = Recipe::parse(text, "example.toml", &["train.steps=10".to_owned()])?;
//! assert_eq!(recipe.train.steps, Some(10));
//! let refused = Recipe::parse(text, "example.toml", &["train.stesp=10".to_owned()]).unwrap_err();
//! assert!(refused.to_string().contains("stesp"));
//! # Ok::<(), foveate_train::TrainError>(())
//! ```
//!
//! [`trainer::train`] runs one. Every field, what a run leaves and how it is resumed: the manual,
//! `docs/recipes.md`.

pub mod chat;
pub mod checkpoint;
mod context;
pub mod corpus;
pub mod device;
pub mod error;
mod graphs;
pub mod host_memory;
mod loader;
pub mod machine;
pub mod memory;
pub mod metrics;
mod order;
pub mod pack;
mod pairs;
mod ranks;
pub mod recipe;
mod safetensors;
pub mod schedule;
pub mod step_plan;
mod tensor;
pub mod tokens;
pub mod trainer;
mod transfers;
pub mod whole;

pub use error::{TrainError, TrainErrorKind};
