//! Fused attention on NVIDIA GPUs.
//!
//! Everything up to a launch is pure and runs on a machine without a GPU: mods are printed as
//! CUDA C++, a configuration is chosen by an exact model of what it takes of the device, and the
//! source is put together. What NVIDIA ships (driver, NVRTC, cuBLASLt, NCCL) is loaded at run time.
//!
//! A kernel's source is, in this order: the macros of its configuration, `kernels/params.cuh`
//! (the arguments, mirrored in [`compile::params`]), the printed mods, the shared device functions, and one
//! kernel file.

#![deny(clippy::undocumented_unsafe_blocks)]

pub mod aot;
pub mod choose;
pub mod compile;
mod error;
pub mod operands;
pub mod plan;

pub use choose::{Records, Tuning};
pub use error::{CudaError, CudaErrorKind};
pub use foveate_gpu::{DeviceArray, DeviceTensor, Element, Engine, Queue};
pub use operands::{
    DeviceBackward, DeviceForward, DeviceOffsets, DeviceOperands, DevicePages, DeviceVarlen,
};
pub use plan::{CudaOptions, CudaPlan, Description};
