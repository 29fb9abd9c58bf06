//! Transformer blocks on NVIDIA GPUs.
//!
//! [`Cuda`] is the backend that `foveate-nn`'s model trains on: products by cuBLASLt, attention by
//! `foveate-cuda`, everything between them by this crate's kernels, all queued on one stream and none
//! of it waited for. The kernels can be used alone, too.
//!
//! A block is a struct that says where its operands lie. It checks them and becomes launches, which
//! are data ([`Block::launches`]); [`Kernels`] compiles their sources once and queues them.
//! Operands are f16, bf16 or f32, every sum is made in f32 or f64 in an order that sizes fix, so
//! the same call has the same bits. Matrices are `[tokens, width]`, elements of a row side by side,
//! rows any distance apart: a packed projection is one matrix, and so is some of its columns.
//!
//! ```no_run
//! # use foveate_gpu::{DeviceTensor, Engine, GpuError};
//! # use foveate_nn_cuda::{Kernels, norm::RmsNorm};
//! # use foveate_tensor::DType;
//! # fn normalise(x: u64, weight: u64, inverse: u64, out: u64) -> Result<(), GpuError> {
//! let kernels = Kernels::new(Engine::get(0)?);
//! let matrix = |address| DeviceTensor::contiguous(address, DType::BF16, [8192, 4096]);
//! let norm = RmsNorm {
//!     x: matrix(x),
//!     residual: None,
//!     weight: DeviceTensor::contiguous(weight, DType::BF16, [4096]),
//!     inverse: DeviceTensor::contiguous(inverse, DType::F32, [8192]),
//!     out: matrix(out),
//!     eps: 1e-5,
//!     offset: 0.0,
//! };
//! // SAFETY: the memory stays allocated until the queue's work is done.
//! unsafe { kernels.queue(kernels.engine().queue(), &norm)? };
//! # Ok(())
//! # }
//! ```
//!
//! `docs/gpu.md` in the repository says what GPU kernels need of a machine, and how they are tested.
//!
//! | block | traffic, bytes an element of `[tokens, width]`, operands of 2 bytes |
//! | --- | --- |
//! | [`norm::RmsNorm`] | 4; with a residual 8 |
//! | [`norm::RmsNormAgain`] | 4 |
//! | [`norm::RmsNormBackward`] | 6; accumulating 8; 2 more for out once more |
//! | [`gated::Gated`], its backward | 6, 12 |
//! | [`rope::Rope`] | 4, of the heads that turn |
//! | [`embedding::Embedding`], its backward | 4; 2, and 8 of each row of the table that is met |
//! | [`loss::CrossEntropy`] | 6 of the logits, of which 2 come from L2 where the rows in work fit it; without gradient 2 |
//! | [`vectors::CopyRows`] | 4 |
//! | [`ranks::SumRanks`] | 4 of each rank, and 4 |
//! | [`context::Join`] | 8 of each part, and 4 |
//! | [`context::SumKeys`] | 4 of each rank that has a part, and 2 |
//! | [`optimizer::Update`] | a parameter: 28 (f32), 28 (bf16 and remainder), 18 with bf16 moments too; 16 all bf16 |

pub mod context;
mod cuda;
pub mod embedding;
pub mod gated;
pub mod head_norm;
mod key_rows;
mod launch;
pub mod listed;
pub mod loss;
pub mod norm;
mod operands;
pub mod optimizer;
mod params;
pub mod pause;
pub mod ranks;
pub mod rope;
#[cfg(test)]
mod tests;
pub mod vectors;

pub use cuda::{
    AttentionPlan, Cuda, CudaArray, CudaBatch, CudaSpans, CudaStateMemory, CudaTotals,
    logits_tokens_of,
};
pub use launch::{Block, KernelLaunch, Kernels, Source};
