//! Fused attention on the CPU, forward and backward.
//!
//! A [`CpuPlan`] is a program (mask, score, dropout) checked and compiled for operands of one
//! dtype and head geometry; [`CpuPlan::forward`] and [`CpuPlan::backward`] run it on operands of
//! any lengths and strides, never holding a row of scores longer than a tile.
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
//! in one run. On two AVX-512 cores (Zen 4), 8 heads, the share of that rate reached, by live
//! area:
//!
//! | f32 | forward, full / causal | backward, full / causal |
//! | --- | --- | --- |
//! | D 64, S 2048 | 0.94 / 0.88 | 0.96 / 0.95 |
//! | D 128, S 2048 | 1.04 / 0.96 | 0.99 / 0.93 |
//! | D 64, S 512 | 0.88 / 0.69 | 0.90 / 0.80 |
//! | D 128, S 512 | 0.94 / 0.77 | 0.89 / 0.78 |
//!
//! That product is not the machine's limit: on one core our tile products alone run 1.12 times as
//! fast. bf16 where the processor multiplies pairs of it takes 0.6 of the time of f32 at S 2048,
//! D 64; where it is converted to f32, as much to within 7 %.
//! Beside the causal backward at D 64 a prefix takes 3 % longer, a soft cap 20 %, a learned relative
//! bias 18 %; a learned bias of every pair of positions takes 1.6 times as long. ALiBi with 8 heads
//! takes 0.83 of the time at S 2048, because the weights of many keys are 0.
//!
//! What bounds it: at S 2048 products take 0.83 to 0.86 of the backward's time, row passes 0.05,
//! mods 0.02 (0.16 with a soft cap), and bringing operands in and gradients out the rest; of a
//! window of 256 at S 8192, where there are few tiles for each row, that is 0.16. The forward at
//! S 2048 spends 0.78 to 0.88 in products, 0.07 (D 128) to 0.13 (D 64) in the softmax, 0.02 to 0.05
//! in bringing operands in and results out; at S 512 that last is 0.07 to 0.16, most of it waiting
//! for operands that are read once, a causal mask 0.05, and threads without work up to 0.14.

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
pub mod stages;
mod tasks;
pub mod tiles;

pub use describe::{Description, instructions};
pub use error::{CpuError, CpuErrorKind};
pub use plan::CpuPlan;
pub use stages::Stages;
pub use tiles::CpuOptions;
