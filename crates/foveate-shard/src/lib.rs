//! Attention over many ranks, from one map.
//!
//! # Should I use this?
//!
//! Yes, when one GPU or one process is too small for a row, a batch or the heads of a model, and
//! when a mask that is wrong on the second rank must not be possible. One rank needs the crate
//! `foveate` alone.
//!
//! # The parts
//!
//! - [`Mesh`]: ranks as `replicate × shard × context × tensor`.
//! - [`Map`]: names of axes ([`Axis`]) to axes of the mesh, once.
//! - [`Sharding`]: the map with the stored length of every part. From it and the names of an array's
//!   axes follows its [`ShardLayout`], for every array of a step ([`arrays`]).
//! - [`Sharded`]: a rank's part of an array with its layout. One that arrives with another layout
//!   than the derived one is an error that names operand, axis, expected and found; nothing is
//!   resharded silently.
//! - [`interchange`]: layouts as JAX's `PartitionSpec` and DTensor's placements.
//! - [`collectives`]: what ranks send each other, with ranks that are threads of a process, or
//!   processes that meet over TCP.
//! - [`launch`]: which rank a process is, by what its launcher says.
//! - [`Permutation`]: the order of a row's tokens, as a value with an identity.
//! - [`Dispatch`]: which rank of `context` computes which tokens, by the live entries of the masks of
//!   all layers ([`Planes`]).
//! - [`ShardPlan`]: what every rank holds, receives, computes and returns, as data.
//!   [`ShardPlan::prove`] proves it or names the first [`Contradiction`].
//! - [`step`]: what moves between ranks beside the keys of attention, from one layout of a value to the next;
//!   [`step::StepPlan::prove`] proves it.
//! - [`picture`]: who computes what.
//! - [`simulate`]: how long a step would take on machines that are not here.
//! - [`RankAttention`]: attention on one rank of a [`ProvenPlan`], on the CPU; [`combine()`] joins
//!   partial results.
//!
//! ```
//! use foveate_shard::{Lengths, Map, Mesh, Sharding, arrays};
//!
//! let map = Map::new(Mesh::parse("shard=2,context=4", 8)?);
//! let lengths = Lengths {
//!     batch: 2, seq: 8192, kv_seq: 8192, heads: 32, kv_heads: 8, dim: 128, dim_v: 128,
//!     hidden: 4096, ffn: 14336, vocab: 128256,
//! };
//! let sharding = Sharding::new(map, &lengths)?;
//! let residual = arrays::by_name("residual").expect("it is listed").layout(&sharding)?;
//! assert_eq!(residual.to_string(), "bf16[batch@shard, stream@context, hidden]");
//! # Ok::<(), foveate_shard::ShardError>(())
//! ```
//!
//! The manual is `docs/sharding.md`.

pub mod arrays;
mod attention;
mod check;
pub mod collectives;
mod combine;
mod dispatch;
mod error;
mod hash;
pub mod interchange;
pub mod launch;
mod layout;
mod map;
mod mesh;
mod permutation;
pub mod picture;
mod plan;
mod plane;
mod ranges;
pub mod simulate;
pub mod step;
mod table;

pub use attention::{PlannedAttention, RankAttention, RankForward, RankGradients, Statement};
pub use check::step::{ProvenStep, StepProof};
pub use check::{Contradiction, Limits, Proof, ProvenPlan, RankBytes};
pub use combine::combine;
pub use dispatch::{CHUNKS_A_RANK, Dispatch, usual_tile};
pub use error::ShardError;
pub use layout::{Cut, CutAxis, Lengths, ShardLayout, Sharded, Sharding};
pub use map::{Axis, Map};
pub use mesh::{Mesh, MeshAxis};
pub use permutation::{Permutation, PermutationId};
pub use plan::{Cells, Links, ModelShape, Part, PlanOptions, RankPlan, ShardPlan, Stage, Strategy};
pub use plane::{LayerBlockMask, LayerMask, Planes, Whole};
pub use ranges::Ranges;
