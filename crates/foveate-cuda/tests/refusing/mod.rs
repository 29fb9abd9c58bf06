//! An allocator for tests that has no memory any more, sooner or later.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use foveate_cuda::Engine;
use foveate_gpu::abi::Address;
use foveate_gpu::driver::{Allocation, Allocator};
use foveate_gpu::{GpuError, GpuErrorKind};

/// Gives memory of the engine's own pool so many times, and says then that there is none.
#[derive(Debug)]
pub struct Refusing {
    engine: Arc<Engine>,
    parts: Mutex<HashMap<Address, Allocation>>,
    left: AtomicUsize,
}

impl Refusing {
    pub fn after(allowed: usize, engine: &Arc<Engine>) -> Arc<Self> {
        Arc::new(Self { engine: engine.clone(), parts: Mutex::default(), left: allowed.into() })
    }
}

// SAFETY: the engine's own pool gives the memory, which is kept for as long as the allocator is there.
unsafe impl Allocator for Refusing {
    fn allocate(&self, bytes: usize, _: usize) -> Result<Address, GpuError> {
        let one = |left: usize| left.checked_sub(1);
        if self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one).is_err() {
            return Err(GpuErrorKind::OutOfMemory { bytes, free: 0, total: 0 }.into());
        }
        let memory = self.engine.queue().pool().take(bytes + 256)?;
        let address = memory.address().next_multiple_of(256);
        self.parts.lock().unwrap_or_else(PoisonError::into_inner).insert(address, memory);
        Ok(address)
    }

    // What was given is not given again before all work on it is done.
    unsafe fn free(&self, _: Address, _: usize, _: usize) {}
}
