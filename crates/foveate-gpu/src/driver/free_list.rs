//! Free lists: memory that a pool has and nobody uses, by size.
//!
//! The driver frees memory only after all that the device is doing, whoever queued it, so to free is
//! to wait. Each pool keeps a free list of its own. When a queue is gone and its work is done, its
//! free memory moves to the device's [`SharedFreeList`], without a call of the driver, and from there
//! to whichever queue next asks for as much. The driver gets it back where somebody waits anyway:
//! when memory runs out, or a pool is told to release what is free.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_void;
use std::sync::Mutex;

use super::held::Held;
use super::sys::Driver;
use crate::error::GpuError;
use crate::sync::lock;

/// Addresses of free allocations, by size in bytes. Which one is given out depends on what is free, and not on the
/// order in which it came back.
#[derive(Debug, Default)]
pub(super) struct FreeList(BTreeMap<usize, BTreeSet<u64>>);

impl FreeList {
    /// Adds an allocation.
    pub fn push(&mut self, bytes: usize, address: u64) {
        self.0.entry(bytes).or_default().insert(address);
    }

    /// The smallest allocation of `bytes` to `most`, and its size.
    pub fn pop(&mut self, bytes: usize, most: usize) -> Option<(u64, usize)> {
        let (&size, list) = self.0.range_mut(bytes..=most).find(|(_, list)| !list.is_empty())?;
        list.pop_last().map(|address| (address, size))
    }

    /// Adds what is in `other`.
    pub fn append(&mut self, other: Self) {
        for (size, mut addresses) in other.0 {
            self.0.entry(size).or_default().append(&mut addresses);
        }
    }

    /// Frees every allocation, which `held` counts. The list keeps those that could not be freed.
    ///
    /// # Safety
    /// The context of the allocations is current and no queued work uses them, or the driver waits
    /// for it.
    ///
    /// # Errors
    /// Those of the driver.
    pub unsafe fn free_all(&mut self, driver: &Driver, held: &Held) -> Result<(), GpuError> {
        for (&bytes, addresses) in &mut self.0 {
            while let Some(address) = addresses.pop_last() {
                // SAFETY: allocated by a pool and free; the caller vouches for the rest.
                let code = unsafe { (driver.free)(address) };
                driver.check(code, || "freeing memory".into())?;
                held.freed(bytes);
            }
        }
        Ok(())
    }
}

/// The free list that all queues of a device share, and free chunks of pinned memory, all of one
/// size. No queued work uses what is in it.
#[derive(Debug, Default)]
pub(super) struct SharedFreeList(Mutex<Lists>);

#[derive(Debug, Default)]
struct Lists {
    device: FreeList,
    /// Addresses of pinned chunks.
    pinned: Vec<usize>,
}

impl SharedFreeList {
    /// Adds allocations and pinned chunks that no queued work uses.
    pub fn append(&self, device: FreeList, pinned: impl IntoIterator<Item = *mut u8>) {
        let mut lists = lock(&self.0);
        lists.device.append(device);
        lists.pinned.extend(pinned.into_iter().map(|chunk| chunk as usize));
    }

    /// The smallest allocation of `bytes` to `most`, and its size.
    pub fn pop(&self, bytes: usize, most: usize) -> Option<(u64, usize)> {
        lock(&self.0).device.pop(bytes, most)
    }

    /// A chunk of pinned memory.
    pub fn pop_pinned(&self) -> Option<*mut u8> {
        lock(&self.0).pinned.pop().map(|chunk| chunk as *mut u8)
    }

    /// Frees everything. The device's context is current; the driver may wait.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn free_all(&self, driver: &Driver, held: &Held) -> Result<(), GpuError> {
        let Lists { mut device, pinned } = std::mem::take(&mut *lock(&self.0));
        for chunk in pinned {
            // SAFETY: pinned by `Pinned`, which gave it away, and used by nobody.
            unsafe { (driver.host_free)(chunk as *mut c_void) };
        }
        // SAFETY: no queued work uses what is here.
        let freed = unsafe { device.free_all(driver, held) };
        lock(&self.0).device.append(device);
        freed
    }
}
