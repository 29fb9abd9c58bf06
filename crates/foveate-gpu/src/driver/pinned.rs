//! Host memory that a device copies from and to by itself.

use std::ffi::c_void;
use std::ptr;

use super::device::Device;
use crate::error::GpuError;

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
        let data = data.cast::<u8>();
        // SAFETY: freshly allocated with that many bytes.
        unsafe { data.write_bytes(0, bytes.max(1)) };
        Ok(Self { device: device.clone(), data, bytes })
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
