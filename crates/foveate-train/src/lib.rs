//! Data, packing, checkpoints, optimiser, recipes and the training loop.
//!
//! A run is a pure function of its [recipe](recipe::Recipe), its documents and its seed: the data
//! order, the packing and the arithmetic do not depend on threads, time or interruptions.
//! Everything that a resumed run needs is in the last checkpoint, and a resumed run's losses equal
//! an uninterrupted run's bit for bit.

pub mod chat;
pub mod checkpoint;
pub mod corpus;
pub mod error;
pub mod machine;
pub mod metrics;
pub mod optimizer;
pub mod pack;
pub mod recipe;
pub mod rng;
mod safetensors;
pub mod schedule;
pub mod tokens;
pub mod trainer;

pub use error::{TrainError, TrainErrorKind};
