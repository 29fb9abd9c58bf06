//! Fused transformer blocks with hand-written forward and backward, and the models made of them:
//! Llama and its relatives.
//!
//! There is no tensor library and no graph: a training step is a fixed sequence of a dozen
//! blocks ([`Blocks`]) over arrays of a reusable workspace, and what a block saves for its
//! backward pass is written down in the tape. Attention is a program in text form, run by the crate
//! `foveate` straight on the packed projection of queries, keys and values.
//!
//! ```
//! use foveate_nn::{Batch, Gradients, Model, ModelConfig, ProgramConfig, Recompute};
//!
//! let config = ModelConfig {
//!     vocab_size: 256,
//!     hidden_size: 16,
//!     intermediate_size: 32,
//!     num_hidden_layers: 1,
//!     num_attention_heads: 2,
//!     num_key_value_heads: Some(1),
//!     head_dim: None,
//!     rms_norm_eps: 1e-5,
//!     rope_theta: 10_000.0,
//!     rope_scaling: None,
//!     rope_pairing: Default::default(),
//!     max_position_embeddings: 8,
//!     tie_word_embeddings: true,
//!     architecture: Default::default(),
//! };
//! let attention = ProgramConfig { mask: "causal & document".into(), ..Default::default() };
//! let model = Model::new(config, &attention.into(), 1)?;
//!
//! // One packed row of two documents; no label crosses from one into the other.
//! let batch = Batch {
//!     rows: 1,
//!     len: 6,
//!     tokens: &[1, 2, 3, 4, 5, 6],
//!     labels: &[2, 3, foveate_nn::IGNORE, 5, 6, foveate_nn::IGNORE],
//!     documents: &[0, 0, 0, 1, 1, 1],
//!     positions: &[0, 1, 2, 0, 1, 2],
//!     live_pairs: &[12.0],
//!     order: &[],
//! };
//! let mut gradients = Gradients::zeros(&model);
//! let loss = model.forward_backward(&batch, &mut gradients, Recompute::None)?;
//! assert_eq!(loss.tokens, 4);
//! # Ok::<(), foveate_nn::NnError>(())
//! ```
//!
//! A training step is bitwise reproducible for any number of threads: every sum is taken in an
//! order that the shapes alone fix. What a recipe says of a model is in the manual,
//! `docs/recipes.md`.

mod account;
mod architecture;
mod arena;
mod array;
mod backend;
mod batch;
mod config;
mod context;
mod cpu;
mod device_context;
mod dry;
mod error;
mod gathering;
mod generate;
mod groups;
mod held;
mod labelled;
mod matmul;
mod model;
pub mod moments;
mod offload;
mod optimizer;
mod parameters;
mod pass;
mod plans;
mod precision;
mod process;
mod program;
mod rope;
mod share;
mod sharing;
mod state_copy;
mod step;
mod stream;
mod tape;
mod tensor;
#[cfg(test)]
mod tests;
mod through_host;

pub use account::{Account, FlopCount, MemoryEstimate, StepKind, Training};
pub use architecture::{Activation, Architecture, LayerRope};
pub use backend::{
    Array, ArrayBytes, AttentionShape, BlockTime, Blocks, COPY_IN, COPY_OUT, ContextOf, HeldBytes,
    KEYS_WAIT, KvCache, LayerAttention, LayerProgram, LinearShape, LossGradients, LossOperands,
    Moments, NormForward, PackedHeads, Part, PartMut, PassIdentity, PassWork, PlanBytes,
    ProcessMemory, Recording, ReplicaSumsOf, Rotation, StateMemory, StreamProduct, StreamTransfers,
    SumOverRanks, Sums, Transfers, Turn, VocabularyPart, Weights,
};
pub use batch::{Batch, BlockSeconds, IGNORE, LossSum, Queued, token_order};
pub use config::{
    AttentionConfig, BufferConfig, BufferValues, LearnedBuffer, ModelConfig, Norm, ProgramConfig,
    RopePairing, RopeScaling, ScalarConfig,
};
pub use context::{ContextAttention, ContextLayer};
pub use cpu::{Cpu, CpuBatch, CpuPlan, CpuTotals};
pub use device_context::{
    ContextCall, ContextForward, ContextMoves, ContextPlan, DeviceContext, KeyStage, Projection,
};
pub use dry::{Dry, DryArray, NotedArray, NotedBlock};
pub use error::{NnError, NnErrorKind};
pub use gathering::{GroupTransfer, GroupTransferKind};
pub use generate::{Generator, Sampling};
pub use groups::PassingGradients;
pub use labelled::LabelledTokens;
pub use matmul::{Matrix, matmul};
pub use model::{Gradients, Model, NotFinite, NotFinitePlace};
pub use moments::Moment;
pub use offload::Offload;
pub use optimizer::{AdamW, OptimizerStep, Rule, Sgd, Span, Treatment, clip_factor};
pub use parameters::{AxisCut, Parameter, ParameterGroup, ParameterLayout};
pub use precision::{
    MOMENTS_PIECE, MOMENTS_PIECES, MomentDtype, ParameterState, Precision, join_master,
    split_master,
};
pub use program::{AttentionProgram, DOCUMENTS};
pub use rope::{RopeTable, Rotary};
pub use share::{Cutting, Owned, Reshard, Share};
pub use sharing::{
    Carrier, CutGroup, HostTransfers, Peers, RankSums, ReplicaSums, Sharing, StepRanks,
    TensorSharing, TensorTransfers,
};
pub use state_copy::StateCopy;
pub use tape::{Recomputation, Recompute};
pub use tensor::{Copied, Holders, StreamCut, TensorPart};
pub use through_host::{StreamThroughHost, ThroughHost};
