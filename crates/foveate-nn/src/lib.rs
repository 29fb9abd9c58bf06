//! Fused transformer blocks with hand-written forward and backward, and the Llama-family model
//! made of them.
//!
//! There is no tensor library and no graph: a training step is a fixed sequence of a dozen
//! blocks ([`Blocks`]) over arrays of a reusable workspace, and what a block saves for its
//! backward pass is written down in the tape. Attention is a program in text form, run by the crate
//! `foveate` straight on the packed projection of queries, keys and values.
//!
//! A training step is bitwise reproducible for any number of threads: every sum is taken in an
//! order that the shapes alone fix.

mod account;
mod backend;
mod batch;
mod config;
mod cpu;
mod error;
mod generate;
mod matmul;
mod model;
mod parameters;
mod program;
mod rope;
mod step;
mod tape;
#[cfg(test)]
mod tests;

pub use account::{FlopCount, MemoryEstimate};
pub use backend::{Blocks, Columns, LinearShape, PackedHeads, Rotation};
pub use batch::{Batch, IGNORE, LossSum};
pub use config::{
    AttentionConfig, BufferConfig, BufferValues, LearnedBuffer, ModelConfig, QkvOrder, RopePairing,
    RopeScaling, ScalarConfig,
};
pub use cpu::Cpu;
pub use error::{NnError, NnErrorKind};
pub use generate::{Generator, Sampling};
pub use matmul::{Matrix, matmul};
pub use model::{Gradients, Model};
pub use parameters::Parameter;
pub use program::AttentionProgram;
pub use rope::{RopeTable, inverse_frequencies};
pub use tape::Recompute;
