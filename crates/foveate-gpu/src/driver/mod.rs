//! The driver: devices, memory, streams, kernels.
//!
//! A small table of the driver's functions, loaded at run time, with safe types on top. Our own
//! loader and not a crate of bindings: the forty functions used have been stable since CUDA 11,
//! and a missing driver or symbol has to be an error with advice, never a panic at a first call.
//!
//! All types keep their device's primary context alive and make it current while they call the
//! driver, so they work on any thread and beside PyTorch, which uses the same context. Afterwards
//! the context is current that was current before, or none, also after errors; where that is the
//! device's own, nothing is set at all.
//!
//! Memory is given out for use on one stream ([`Pool`]): an allocation that is dropped while work of
//! that stream still reads it can be given out again at once, since the next work is queued
//! behind it. Free memory of a queue that is gone serves others (`free_list`). Copies go through
//! pinned memory of ours, so that what a caller gave is free at once.
//!
//! A pool may take its memory from somebody else instead ([`Allocator`]).
//!
//! `tests/without_a_gpu.rs` runs this layer against a driver made for tests.

mod allocator;
mod device;
mod free_list;
mod graph;
mod held;
mod host;
mod launches;
mod memory;
mod module;
pub mod operations;
mod pinned;
mod readback;
mod staging;
mod stream;
pub(crate) mod sys;
mod tensor_map;

pub use allocator::{ALLOCATION_ALIGN, Allocator};
pub use device::{Device, DeviceInfo};
pub use graph::Graph;
pub use held::HeldBytes;
pub use host::HostArray;
pub use memory::{Allocation, Pool};
pub use module::{Function, Launch, Module};
pub use operations::Operation;
pub use pinned::Pinned;
pub use readback::Readback;
pub(crate) use stream::pause;
pub use stream::{Event, Stream, default_timeout};
pub use tensor_map::{Fill, L2Promotion, Swizzle, TensorMap, Tiled};
