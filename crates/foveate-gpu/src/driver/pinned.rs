//! Host memory that a device copies from and to by itself.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr;

use super::device::Device;
use crate::error::GpuError;

/// Bytes that are worth a thread of their own to be filled.
const FILLED: usize = 256 << 20;

/// Makes every element `value`: much memory by as many threads as there are, since one has a part of the
/// bandwidth alone.
pub(super) fn fill<T: Copy + Send>(all: &mut [T], value: T) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let piece = all.len().div_ceil(threads).max(FILLED);
    match all.len() > piece {
        false => all.fill(value),
        true => std::thread::scope(|scope| {
            for piece in all.chunks_mut(piece) {
                scope.spawn(move || piece.fill(value));
            }
        }),
    }
}

/// Bytes that are worth a thread of their own to be copied.
const COPIED: usize = 8 << 20;

/// Copies `from` to `to`, which is as long: much memory by as many threads as there are.
pub(super) fn copy(to: &mut [u8], from: &[u8]) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let piece = from.len().div_ceil(threads).max(COPIED);
    match from.len() > piece {
        false => to.copy_from_slice(from),
        true => std::thread::scope(|scope| {
            for (to, from) in to.chunks_mut(piece).zip(from.chunks(piece)) {
                scope.spawn(move || to.copy_from_slice(from));
            }
        }),
    }
}

/// Host memory that the device copies from and to without a detour.
#[derive(Debug)]
pub struct Pinned {
    device: Device,
    data: *mut u8,
    bytes: usize,
}

// SAFETY: it owns its memory.
unsafe impl Send for Pinned {}
// SAFETY: shared access only reads.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// `bytes` zeros.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn new(device: &Device, bytes: usize) -> Result<Self, GpuError> {
        let driver = device.current()?;
        let mut data: *mut c_void = ptr::null_mut();
        // SAFETY: `data` is valid for a write.
        let code = unsafe { (driver.host_alloc)(&mut data, bytes.max(1), 0) };
        driver.check(code, || format!("pinning {bytes} B of host memory"))?;
        // SAFETY: freshly allocated with that many bytes, which nobody else has.
        let fresh =
            unsafe { std::slice::from_raw_parts_mut(data.cast::<MaybeUninit<u8>>(), bytes.max(1)) };
        fill(fresh, MaybeUninit::new(0));
        Ok(Self { device: device.clone(), data: data.cast(), bytes })
    }

    /// Takes over what [`Self::into_raw`] gave.
    ///
    /// # Safety
    /// It is memory of the same device and that many bytes, and this is its only owner.
    pub(super) unsafe fn from_raw(device: &Device, data: *mut u8, bytes: usize) -> Self {
        Self { device: device.clone(), data, bytes }
    }

    /// Gives the memory away.
    pub(super) fn into_raw(mut self) -> *mut u8 {
        std::mem::replace(&mut self.data, ptr::null_mut())
    }

    /// Leaves the memory to whoever may still use it.
    pub(super) fn leak(&mut self) {
        self.data = ptr::null_mut();
    }

    /// Where it starts.
    pub(super) fn data(&self) -> *mut u8 {
        self.data
    }

    /// Its contents.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `data` has `bytes` initialised bytes.
        unsafe { std::slice::from_raw_parts(self.data, self.bytes) }
    }

    /// Its contents.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.data, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.data.is_null() {
            return;
        }
        if let Ok(driver) = self.device.current() {
            // SAFETY: allocated in `new`.
            unsafe { (driver.host_free)(self.data.cast()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_of_much_memory_is_filled_and_nothing_beside_it() {
        for bytes in [0, 1, FILLED, 2 * FILLED + 3] {
            let mut all = vec![7u8; bytes + 2];
            fill(&mut all[1..=bytes], 9);
            assert_eq!((all[0], all[bytes + 1]), (7, 7));
            assert!(all[1..=bytes].iter().all(|&byte| byte == 9), "{bytes} B");
        }
    }

    #[test]
    fn all_of_much_memory_is_copied_and_nothing_beside_it() {
        for bytes in [0, 1, COPIED, 2 * COPIED + 3] {
            let from: Vec<u8> = (0..bytes).map(|i| (i / 7) as u8).collect();
            let mut to = vec![7u8; bytes + 2];
            copy(&mut to[1..=bytes], &from);
            assert_eq!((to[0], to[bytes + 1]), (7, 7));
            assert!(to[1..=bytes] == from, "{bytes} B");
        }
    }
}
