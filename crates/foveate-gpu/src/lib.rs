//! NVIDIA GPUs, without attention: what a crate with kernels of its own stands on.
//!
//! Nothing of NVIDIA's is linked. Driver, NVRTC, cuBLASLt and NCCL are found and opened at run time
//! ([`loader`]), so one binary runs on machines with and without a GPU, and everything up to a
//! launch can be tried on a machine without one.
//!
//! From bottom to top:
//!
//! - [`library`], [`loader`]: which libraries there are, where they are looked for;
//! - [`driver`]: devices, streams, events, memory, modules, graphs;
//! - [`abi`]: parameters of kernels, laid out as C lays them out;
//! - [`nvrtc`], [`cubin`], [`cache`]: CUDA C++ to machine code, kept in memory and on disk;
//! - [`profile`]: what a GPU offers, as data, also of GPUs that are not there;
//! - [`Engine`], [`Queue`]: one GPU in this process; a stream with memory for its work;
//! - [`DeviceTensor`], [`DeviceArray`], [`access`]: what lies in device memory, and the checks of it
//!   that come before every launch;
//! - [`blas`], [`nccl`]: matrix products and transfers between GPUs.

#![deny(clippy::undocumented_unsafe_blocks)]

pub mod abi;
pub mod access;
mod arch;
mod array;
pub mod blas;
pub mod cache;
pub mod cubin;
pub mod driver;
mod engine;
mod error;
pub mod kernel;
pub mod library;
pub mod loader;
pub mod nccl;
pub mod nvrtc;
pub mod profile;
mod queue;
pub mod sync;
mod tensor;

pub use arch::Arch;
pub use array::{DeviceArray, Element};
pub use engine::Engine;
pub use error::{GpuError, GpuErrorKind};
pub use queue::{Queue, WeakQueue};
pub use tensor::DeviceTensor;
