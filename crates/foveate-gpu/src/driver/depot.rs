//! What queues that are gone have left of a device's memory.
//!
//! The driver frees memory only after all that the device is doing, whoever queued it, so to free is
//! to wait. Memory whose queue is gone and whose work is done comes here instead, without a call of
//! the driver, and is given out to whichever queue next needs as much. It goes back to the device
//! where somebody waits anyway: when memory runs out, or a pool is told to release what is free.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use super::sys::Driver;
use crate::error::GpuError;

/// Free blocks of one device, and free chunks of pinned memory, all of one size.
#[derive(Debug, Default)]
pub(super) struct Depot(Mutex<Left>);

#[derive(Debug, Default)]
struct Left {
    blocks: Free,
    chunks: Vec<usize>,
}

/// Addresses of free blocks, by size.
#[derive(Debug, Default)]
pub(super) struct Free(BTreeMap<usize, Vec<u64>>);

impl Free {
    /// Adds a block.
    pub fn put(&mut self, bytes: usize, address: u64) {
        self.0.entry(bytes).or_default().push(address);
    }

    /// The smallest block of `bytes` to `most`, and its size.
    pub fn take(&mut self, bytes: usize, most: usize) -> Option<(u64, usize)> {
        let (&size, list) = self.0.range_mut(bytes..=most).find(|(_, list)| !list.is_empty())?;
        list.pop().map(|address| (address, size))
    }

    /// Adds what is in `other`.
    pub fn absorb(&mut self, other: Self) {
        for (size, mut addresses) in other.0 {
            self.0.entry(size).or_default().append(&mut addresses);
        }
    }

    /// Hands every block back to the device. What could not be is still there.
    ///
    /// # Safety
    /// The blocks' context is current and no queued work uses them, or the driver waits for it.
    ///
    /// # Errors
    /// Those of the driver.
    pub unsafe fn hand_back(&mut self, driver: &Driver) -> Result<(), GpuError> {
        for addresses in self.0.values_mut() {
            while let Some(address) = addresses.pop() {
                // SAFETY: allocated by a pool and free; the caller vouches for the rest.
                let code = unsafe { (driver.free)(address) };
                driver.check(code, || "handing memory back".into())?;
            }
        }
        Ok(())
    }
}

impl Depot {
    fn left(&self) -> std::sync::MutexGuard<'_, Left> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes over blocks and chunks that no queued work uses.
    pub fn put(&self, blocks: Free, chunks: impl IntoIterator<Item = *mut u8>) {
        let mut left = self.left();
        left.blocks.absorb(blocks);
        left.chunks.extend(chunks.into_iter().map(|chunk| chunk as usize));
    }

    /// A block of `bytes` to `most`, and its size.
    pub fn block(&self, bytes: usize, most: usize) -> Option<(u64, usize)> {
        self.left().blocks.take(bytes, most)
    }

    /// A chunk of pinned memory.
    pub fn chunk(&self) -> Option<*mut u8> {
        self.left().chunks.pop().map(|chunk| chunk as *mut u8)
    }

    /// Hands everything back. The device's context is current; the driver may wait.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn hand_back(&self, driver: &Driver) -> Result<(), GpuError> {
        let Left { mut blocks, chunks } = std::mem::take(&mut *self.left());
        for chunk in chunks {
            // SAFETY: pinned by `Pinned`, which gave it away, and used by nobody.
            unsafe { (driver.host_free)(chunk as *mut _) };
        }
        // SAFETY: no queued work uses what is here.
        let done = unsafe { blocks.hand_back(driver) };
        self.left().blocks.absorb(blocks);
        done
    }
}
