//! Device memory from somebody else's allocator.

use std::fmt;

use crate::abi::Address;
use crate::error::GpuError;

/// Multiple of which an [`Allocator`]'s addresses are, in bytes.
pub const ALLOCATION_ALIGN: u64 = 256;

/// Device memory for the work of one stream, in the stream's order: PyTorch's caching allocator, or
/// any other. A queue that has one ([`crate::Queue::with_allocator`]) takes all of its device memory
/// from it, also while a CUDA graph is recorded, and keeps none in a free list.
///
/// # Safety
/// Memory that [`Self::allocate`] gives is memory of the stream's device, `bytes` long. Work that is
/// queued on the stream from then until [`Self::free`] has it for itself.
pub unsafe trait Allocator: fmt::Debug + Send + Sync {
    /// The address of `bytes` bytes (at least 1) with arbitrary contents, a multiple of
    /// [`ALLOCATION_ALIGN`], for work on the `CUstream` `stream` (0 is the default stream). While
    /// the stream is recorded, the recorded work uses the memory whenever the graph runs.
    ///
    /// # Errors
    /// The allocator's own: [`GpuErrorKind::OutOfMemory`](crate::GpuErrorKind::OutOfMemory), or
    /// [`GpuError::argument`] with a reason.
    fn allocate(&self, bytes: usize, stream: usize) -> Result<Address, GpuError>;

    /// Takes memory back. Work of the stream that was queued before may still use it, so it is for
    /// work behind that. Caches give memory back after the queue is gone: `stream` is then a name and
    /// no stream that is still there.
    ///
    /// # Safety
    /// [`Self::allocate`] gave `address` for the same `bytes` and `stream`, and it is given back
    /// once.
    unsafe fn free(&self, address: Address, bytes: usize, stream: usize);

    /// Whether what it gives now is lent for the call alone, as it is where a graph is recorded: the call then gives
    /// everything back, and keeps nothing for the next one.
    fn lends(&self) -> bool {
        false
    }
}
