//! Fused attention on the CPU, forward and backward.
//!
//! A [`CpuPlan`] is a program (mask, score, dropout) checked and compiled for operands of one
//! dtype and head geometry; [`CpuPlan::forward`] and [`CpuPlan::backward`] run it on operands of
//! any lengths and strides, never holding a row of scores longer than a tile.
//!
//! The crate `foveate` plans on it; use this one for options of your own:
//!
//! ```
//! use foveate_cpu::{CpuOptions, CpuPlan};
//! use foveate_mods::masks;
//! use foveate_problem::{Dims, ForwardArgs, Operands, Spec};
//! use foveate_tensor::{DType, Tensor};
//!
//! let q = Tensor::filled(DType::F32, [1, 2, 37, 16], 0.5);
//! let operands = Operands::new(q.view(), q.view(), q.view());
//! let spec = Spec { mask: Some(masks::causal()), score: None, scale: None, dropout: None };
//! let options = CpuOptions { tile_q: Some(16), ..CpuOptions::default() };
//! let plan = CpuPlan::new(&spec, &Dims::of(&operands)?, q.dtype(), options)?;
//!
//! let mut out = Tensor::filled(DType::F32, [1, 2, 37, 16], f64::NAN);
//! let mut lse = Tensor::filled(DType::F32, [1, 2, 37], f64::NAN);
//! let (into, statistics) = (out.view_mut()?, lse.view_mut()?);
//! plan.forward(ForwardArgs { operands, out: into, lse: statistics, max_score: None })?;
//! assert!((out.view().get_f64([0, 1, 36, 0]) - 0.5).abs() < 1e-6);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! How a call runs, module by module:
//!
//! - [`tiles`] chooses tile sizes from the problem and the caches.
//! - `masks` finds the live tiles of each head; empty tiles cost nothing.
//! - `tasks` divides the call into tasks that own their rows of the results, and into waves of KV heads
//!   whose workspace is bounded; `pool` keeps the workspace.
//! - `pack` converts operands of any dtype and strides to what products read: f32, or pairs of bf16
//!   where the processor multiplies those.
//! - `forward` and `backward` are the two passes; `mods` evaluates masks, scores and dropout inside a
//!   tile; `score_bounds` finds keys whose weights are 0 from the score function alone;
//!   `row_weight_sum` renormalises rows whose lse is too large to be exact; `captures` sums the
//!   gradients of learned buffers.
//! - `decode` is the forward of few queries over many keys, which are read in place.
//! - `nonfinite` keeps non-finite values from queries that do not see them.
//! - `simd` has the inner loops, and all of the crate's `unsafe`.
//!
//! # Reproducible
//!
//! Which rows a task owns and in which order sums are made depends on the problem and the
//! options, never on threads: the same call gives the same bits for any number of them, and for
//! any strides of the same numbers. Another machine may differ in the last bits, where its
//! instruction set fuses multiply-adds differently.
//!
//! # Memory
//!
//! Workspace is linear in the lengths. In the forward a wave of KV heads holds its keys and values in
//! f32; in the backward it holds up to eight copies of dq for its query heads, each of the rows that
//! see its keys. A wave takes up to 256 MiB (an option), or what one KV head needs if that is more.
//! Learned captured buffers take four to sixteen f32 copies in the backward. The plan keeps its
//! workspace and uses it again.
//!
//! # Speed
//!
//! `examples/speed.rs` compares with a large f32 product of the `gemm` crate on the same threads,
//! in one run. How to use the engine, what it costs and what it cannot do is the manual,
//! `docs/cpu.md`; what bounds it is `docs/records/2026-11-cpu-bounds.md`.

mod backward;
mod call;
mod captures;
mod decode;
pub mod describe;
pub mod error;
mod forward;
mod masks;
mod mods;
mod nonfinite;
mod pack;
pub mod plan;
mod pool;
mod row_weight_sum;
mod score_bounds;
mod simd;
mod slots;
pub mod stages;
mod tasks;
pub mod threads;
pub mod tiles;

pub use describe::{Description, instructions};
pub use error::{CpuError, CpuErrorKind};
pub use plan::CpuPlan;
pub use stages::Stages;
pub use tiles::CpuOptions;
