//! Fused attention on NVIDIA GPUs.
//!
//! Everything up to a launch is pure and runs on a machine without a GPU: mods are printed as
//! CUDA C++, a configuration is chosen by an exact model of what it takes of the device, and the
//! source is put together. What NVIDIA ships (driver, NVRTC, cuBLASLt, NCCL) is loaded at run time.
//!
//! A kernel's source is, in this order: the macros of its configuration, `kernels/params.cuh`
//! (the arguments, mirrored in [`abi`]), the printed mods, the shared device functions, and one
//! kernel file.

#![deny(clippy::undocumented_unsafe_blocks)]

pub mod abi;
pub mod ahead;
pub mod blas;
pub mod cache;
pub mod check;
pub mod codegen;
pub mod config;
mod cubin;

pub mod driver;
pub mod engine;
mod error;
pub mod library;
pub mod nccl;
pub mod nvrtc;
pub mod plan;
pub mod planner;
pub mod profile;
pub mod resources;
pub mod schedule;
mod settle;
pub mod source;
pub mod tensors;
pub mod tuner;

pub use engine::{Engine, Queue};
pub use error::{CudaError, CudaErrorKind};
pub use foveate_mods::Type;
pub use plan::{CudaOptions, CudaPlan, Description};
pub use tensors::{
    DeviceArray, DeviceBackward, DeviceForward, DeviceOffsets, DeviceOperands, DevicePages,
    DeviceTensor, DeviceVarlen,
};
pub use tuner::{Records, Tuning};
