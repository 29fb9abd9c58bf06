//! NVIDIA GPUs, without attention: what a crate with kernels of its own stands on.
//!
//! Nothing of NVIDIA's is linked. Driver, NVRTC, cuBLASLt and NCCL are found and opened at run time
//! ([`loader`]), so one binary runs on machines with and without a GPU, and everything up to a
//! launch can be tried on a machine without one.
//!
//! # A kernel of your own
//!
//! Source, the plan of what it takes, parameters, checks of what it reads and writes, a launch. The
//! code is compiled once and kept on disk; a kernel that takes more than its plan does not run.
//! The manual is `docs/gpu.md` in the repository.
//!
//! ```no_run
//! use foveate_gpu::access::Accesses;
//! use foveate_gpu::driver::Launch;
//! use foveate_gpu::kernel::{Expected, KernelSource};
//! use foveate_gpu::{DeviceTensor, Engine, GpuError, Queue};
//! use foveate_tensor::DType;
//!
//! const SOURCE: &str = r#"
//! extern "C" __global__ void scale(const float* x, float* y, float factor, int len) {
//!     const int i = blockIdx.x * blockDim.x + threadIdx.x;
//!     if (i < len) y[i] = factor * x[i];
//! }"#;
//!
//! const EXPECTED: Expected<'static> = Expected {
//!     name: "scale",
//!     entry: "scale",
//!     registers: 32,
//!     local_bytes: 0,
//!     static_shared_bytes: 0,
//!     shared_bytes: None,
//! };
//!
//! /// y = factor · x, both f32 `[len]`, in order with the queue's other work.
//! fn scale(
//!     engine: &Engine,
//!     queue: &Queue,
//!     x: &DeviceTensor<1>,
//!     y: &DeviceTensor<1>,
//!     factor: f32,
//! ) -> Result<(), GpuError> {
//!     let len = x.layout.shape[0];
//!     x.check_side_by_side("x", len, DType::F32)?;
//!     y.check_side_by_side("y", len, DType::F32)?;
//!     let count =
//!         i32::try_from(len).map_err(|_| GpuError::argument(format!("{len} is too long")))?;
//!     let mut accesses = Accesses::default();
//!     accesses.read("x", x)?;
//!     accesses.write("y", y)?;
//!     accesses.check_apart(engine.checked_apart())?;
//!     accesses.check_device(engine, queue)?;
//!     let source = KernelSource { text: SOURCE.into(), arch: engine.device().info().arch() };
//!     let kernel = engine.kernel(&source, &EXPECTED)?;
//!     let launch = Launch::new([count.unsigned_abs().div_ceil(256), 1, 1], 256);
//!     // SAFETY: x and y are memory of this device, checked above, and keep the kernel inside; their
//!     // owner keeps them until the queue's work is done.
//!     unsafe { kernel.launch(queue, &launch, (x.start(), y.start(), factor, count)) }
//! }
//! ```
//!
//! # Parts
//!
//! From bottom to top:
//!
//! - [`library`], [`loader`]: which libraries there are, where they are looked for;
//! - [`driver`]: devices, streams, events, memory, modules, graphs;
//! - [`abi`]: parameters of kernels, laid out as C lays them out;
//! - [`Arch`], [`nvrtc`], [`cubin`], [`cache`]: CUDA C++ to machine code for an architecture, kept in
//!   memory and on disk;
//! - [`profile`]: what a GPU offers, as data, also of GPUs that are not there;
//! - [`Engine`], [`Queue`]: one GPU in this process; a stream with memory for its work;
//! - [`kernel`]: kernels that are compared with their plan, and their launches;
//! - [`DeviceTensor`], [`DeviceArray`], [`access`]: what lies in device memory, and the checks of it
//!   that come before every launch;
//! - [`tma`]: which of those tensors the copy engine moves, and by which tensor map;
//! - [`hopper`]: what kernels for `sm_90a` need of a machine;
//! - [`trace`]: what work did with memory, for whoever checks its order;
//! - [`blas`], [`nccl`]: matrix products and transfers between GPUs;
//! - [`nvml`]: clocks and power while something is timed.

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
pub mod hopper;
pub mod kernel;
pub mod library;
pub mod loader;
pub mod nccl;
pub mod nvml;
pub mod nvrtc;
pub mod profile;
mod queue;
pub mod sync;
mod tensor;
pub mod tma;
pub mod trace;

pub use arch::Arch;
pub use array::DeviceArray;
pub use engine::Engine;
pub use error::{GpuError, GpuErrorKind};
pub use foveate_tensor::ElementType;
pub use queue::{Queue, WeakQueue};
pub use tensor::DeviceTensor;
