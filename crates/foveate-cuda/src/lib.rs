//! Fused attention on NVIDIA GPUs since Ampere: forward and backward of any mask and score.
//!
//! Use this crate to plan without a GPU, to compile kernels ahead of time, or to call attention on
//! tensors in device memory; for tensors of the host and a choice between backends there is the
//! crate `foveate`. The manual, with kernels, options, environment and costs, is `docs/gpu.md`.
//!
//! Planning needs a profile of a GPU and no GPU:
//!
//! ```
//! use foveate_cuda::aot::{self, Usage};
//! use foveate_cuda::choose::KernelOptions;
//! use foveate_gpu::profile::Profile;
//! use foveate_mods::{masks, scores};
//! use foveate_problem::{Dims, Spec};
//! use foveate_tensor::DType;
//!
//! let (mask, score) = (Some(masks::causal()), Some(scores::soft_cap(30.0)?));
//! let spec = Spec { mask, score, scale: None, dropout: None };
//! let dims = Dims {
//!     batch: 2,
//!     heads_q: 16,
//!     heads_kv: 4,
//!     len_q: 8192,
//!     len_k: 8192,
//!     dim: 128,
//!     dim_v: 128,
//!     shared_kv: false,
//!     packed: false,
//! };
//! let profile = Profile::named("h200")?;
//! let (usage, options) = (Usage { backward: true, ..Usage::default() }, KernelOptions::default());
//! let planned = aot::plan(&profile, &spec, &dims, DType::BF16, usage, &options, None)?;
//! // Each kernel's tile, smem, registers and occupancy, and what was refused.
//! println!("{}", planned.plan);
//! assert_eq!(planned.plan.kv_splits, 1);
//! assert!(planned.plan.to_string().contains("occupancy"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The flow is that of the folders:
//!
//! 1. [`choose`] decides. [`choose::Pass`] is the table of what a forward or a backward launches;
//!    [`choose::KernelPlan`] has a configuration for each of its kernels: tuned on this GPU,
//!    measured when the kernels were written, or ranked by a model. Pure.
//! 2. [`compile`] makes machine code: mods printed as CUDA C++, the source put together, compiled,
//!    and compared with what was planned. A kernel that spills gives way to the next best.
//! 3. [`plan`] runs: [`CudaPlan`] keeps kernels, schedules, block lists and captured buffers on the
//!    device between calls, and queues the launches of a pass. Only here a GPU is needed.
//!
//! [`aot`] goes through the first two for a problem that has not come yet, and [`operands`] says
//! what a call on device memory is given. NVIDIA's libraries are loaded at run time by `foveate-gpu`.

#![deny(clippy::undocumented_unsafe_blocks)]

pub mod aot;
pub mod choose;
pub mod compile;
mod error;
pub mod operands;
pub mod plan;

pub use choose::{Records, Tuning};
pub use error::{CudaError, CudaErrorKind};
pub use foveate_gpu::{DeviceArray, DeviceTensor, ElementType, Engine, Queue};
pub use operands::{
    DeviceBackward, DeviceForward, DeviceOffsets, DeviceOperands, DevicePages, DeviceScales,
    DeviceVarlen, Wanted,
};
pub use plan::{CudaOptions, CudaPlan, Description, DeviceBlockLists, TileTables, tile_kinds_on};
