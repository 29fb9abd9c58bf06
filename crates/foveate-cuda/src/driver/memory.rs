//! Memory of a device, given out again and again.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::device::Device;
use super::staging::Staging;
use super::stream::Stream;
use super::sys::OUT_OF_MEMORY;
use crate::error::{CudaError, CudaErrorKind};

/// Blocks are multiples of this up to [`LARGE`], and of `LARGE` beyond it, so that nearly equal
/// requests reuse each other's blocks.
const SMALL: usize = 512;
const LARGE: usize = 1 << 20;

/// Set, blocks have exactly the bytes that were asked for, so that compute-sanitizer sees every
/// access past an operand's end.
const EXACT_VARIABLE: &str = "FOVEATE_EXACT_MEMORY";

/// Memory for the work of one stream. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Pool(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    stream: Arc<Stream>,
    /// Addresses of free blocks, by size.
    free: Mutex<BTreeMap<usize, Vec<u64>>>,
    exact: bool,
    staging: Mutex<Staging>,
}

/// Device memory that goes back to its pool when it is dropped.
#[derive(Debug)]
pub struct Block {
    pool: Pool,
    address: u64,
    bytes: usize,
    room: usize,
}

impl Pool {
    /// A pool for work queued on `stream`.
    pub fn new(stream: Arc<Stream>) -> Self {
        let (free, staging) = Default::default();
        let exact = std::env::var_os(EXACT_VARIABLE).is_some();
        Self(Arc::new(Shared { stream, free, exact, staging }))
    }

    /// The stream that its memory is used on.
    pub fn stream(&self) -> &Arc<Stream> {
        &self.0.stream
    }

    /// `bytes` of memory with arbitrary contents, aligned to 256 bytes.
    ///
    /// # Errors
    /// [`CudaErrorKind::OutOfMemory`], after every free block was handed back to the device.
    pub fn take(&self, bytes: usize) -> Result<Block, CudaError> {
        let step = if bytes > LARGE { LARGE } else { SMALL };
        // A free block that is not much too large serves as well.
        let (room, most) = match bytes.max(1) {
            exact if self.0.exact => (exact, exact),
            // More than any device has stays as it is, for the driver to refuse.
            bytes => {
                let room = bytes.checked_next_multiple_of(step).unwrap_or(bytes);
                (room, room.saturating_add(room / 4))
            }
        };
        let found = {
            let mut free = self.0.free.lock().unwrap_or_else(PoisonError::into_inner);
            let fitting = free.range_mut(room..=most).find(|(_, list)| !list.is_empty());
            fitting.and_then(|(&size, list)| list.pop().map(|address| (address, size)))
        };
        let (address, room) = match found {
            Some(found) => found,
            None => (self.allocate(room)?, room),
        };
        Ok(Block { pool: self.clone(), address, bytes, room })
    }

    /// A copy of `data` on the device, in order with the stream's work.
    ///
    /// # Errors
    /// Those of [`Self::take`] and of the driver.
    pub fn upload(&self, data: &[u8]) -> Result<Block, CudaError> {
        let block = self.take(data.len())?;
        block.write(data)?;
        Ok(block)
    }

    /// Hands every free block back to the device, once the stream's work is done.
    ///
    /// # Errors
    /// When the work does not end, or failed.
    pub fn release(&self) -> Result<(), CudaError> {
        let blocks = || self.0.free.lock().unwrap_or_else(PoisonError::into_inner);
        // Taken before the wait, which is for the work of these blocks: another thread may free
        // more meanwhile.
        let mut free = std::mem::take(&mut *blocks());
        let freed = self.wait_and_free(&mut free);
        for (size, mut addresses) in free {
            blocks().entry(size).or_default().append(&mut addresses);
        }
        freed
    }

    /// Takes out of `free` what it hands back.
    fn wait_and_free(&self, free: &mut BTreeMap<usize, Vec<u64>>) -> Result<(), CudaError> {
        self.0.stream.wait(Duration::from_secs(60), "work before memory is handed back")?;
        let driver = self.0.stream.device().current()?;
        for addresses in free.values_mut() {
            while let Some(address) = addresses.pop() {
                // SAFETY: allocated by `allocate`, free, and no longer used by queued work.
                let code = unsafe { (driver.free)(address) };
                driver.check(code, || "handing memory back".into())?;
            }
        }
        Ok(())
    }

    fn allocate(&self, bytes: usize) -> Result<u64, CudaError> {
        self.0.stream.refuse_recording("taking memory of the device")?;
        let device = self.0.stream.device();
        let driver = device.current()?;
        let mut address = 0;
        // SAFETY: `address` is valid for a write, and the context is current.
        let mut code = unsafe { (driver.alloc)(&mut address, bytes) };
        if code == OUT_OF_MEMORY {
            self.release()?;
            // SAFETY: as above.
            code = unsafe { (driver.alloc)(&mut address, bytes) };
        }
        if code == OUT_OF_MEMORY {
            let (free, total) = device.memory()?;
            return Err(CudaErrorKind::OutOfMemory { bytes, free, total }.into());
        }
        driver.check(code, || format!("allocating {bytes} B"))?;
        Ok(address)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let Ok(driver) = self.stream.device().current() else { return };
        let free = self.free.get_mut().unwrap_or_else(PoisonError::into_inner);
        for address in std::mem::take(free).into_values().flatten() {
            // SAFETY: allocated by `allocate` and free. Freeing waits for the device's work.
            unsafe { (driver.free)(address) };
        }
    }
}

impl Block {
    /// Its address on the device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its length.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn stream(&self) -> &Stream {
        self.pool.stream()
    }

    /// Copies `data` to the start of the block, in order with the stream's work. `data` can be
    /// reused at once.
    ///
    /// # Errors
    /// When it does not fit, and those of the driver.
    pub fn write(&self, data: &[u8]) -> Result<(), CudaError> {
        self.write_at(0, data)
    }

    /// The same from byte `start` of the block on.
    ///
    /// # Errors
    /// Those of [`Self::write`].
    pub fn write_at(&self, start: usize, data: &[u8]) -> Result<(), CudaError> {
        self.fits(start, data.len())?;
        let mut staging = self.pool.0.staging.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the block has room, checked above, and its memory is not freed before the
        // stream's work is done.
        unsafe { staging.upload(self.stream(), self.address + start as u64, data) }
    }

    /// Copies the start of the block to `data`, behind the stream's work, and waits for it, at
    /// most `limit`.
    ///
    /// # Errors
    /// When `data` is longer than the block, the work does not end in time or failed.
    pub fn read(&self, data: &mut [u8], limit: Duration) -> Result<(), CudaError> {
        self.read_at(0, data, limit)
    }

    /// The same from byte `start` of the block on.
    ///
    /// # Errors
    /// Those of [`Self::read`].
    pub fn read_at(&self, start: usize, data: &mut [u8], limit: Duration) -> Result<(), CudaError> {
        self.fits(start, data.len())?;
        self.stream().wait(limit, "work on the device")?;
        let mut staging = self.pool.0.staging.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: as in `write_at`.
        unsafe { staging.download(self.stream(), self.address + start as u64, data, limit) }
    }

    /// Sets every byte, in order with the stream's work.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn fill(&self, byte: u8) -> Result<(), CudaError> {
        let driver = self.stream().device().current()?;
        // SAFETY: the block has that many bytes.
        let code =
            unsafe { (driver.set_bytes)(self.address, byte, self.bytes, self.stream().handle()) };
        driver.check(code, || format!("filling {} B", self.bytes))
    }

    fn fits(&self, start: usize, bytes: usize) -> Result<(), CudaError> {
        if start.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            let from = if start == 0 { String::new() } else { format!(" from byte {start} on") };
            return Err(CudaError::argument(format!(
                "{bytes} B do not fit a block of {} B{from}",
                self.bytes
            )));
        }
        Ok(())
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let mut free = self.pool.0.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.entry(self.room).or_default().push(self.address);
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
    pub fn new(device: &Device, bytes: usize) -> Result<Self, CudaError> {
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
        if let Ok(driver) = self.device.current() {
            // SAFETY: allocated in `new`.
            unsafe { (driver.host_free)(self.data.cast()) };
        }
    }
}

impl Device {
    /// Checks that `bytes` from `address` on are memory of this device: what somebody else hands
    /// over to be read or written.
    ///
    /// # Errors
    /// When the address is of the host, of another device, or of nothing the driver knows, or
    /// the allocation ends before the range does; `what` names the operand.
    pub fn check_address(&self, what: &str, address: u64, bytes: usize) -> Result<(), CudaError> {
        let driver = self.current()?;
        const MEMORY_TYPE: i32 = 2;
        const DEVICE_ORDINAL: i32 = 9;
        const RANGE_START: i32 = 11;
        const RANGE_SIZE: i32 = 12;
        const ON_DEVICE: u32 = 2;
        let attribute = |which: i32| {
            let mut value = 0u64;
            // SAFETY: no attribute asked for here is longer than eight bytes.
            let code =
                unsafe { (driver.pointer_attribute)((&raw mut value).cast(), which, address) };
            (code == 0).then_some(value)
        };
        if attribute(MEMORY_TYPE).map(|t| t as u32) != Some(ON_DEVICE) {
            return Err(CudaError::argument(format!(
                "{what} is at {address:#x}, which is no device memory; copy it to the GPU first"
            )));
        }
        let ordinal = attribute(DEVICE_ORDINAL).map_or(-1, |d| d as i32);
        if ordinal as usize != self.ordinal() {
            return Err(CudaError::argument(format!(
                "{what} is on GPU {ordinal}, but the work is for GPU {}",
                self.ordinal()
            )));
        }
        if let (Some(start), Some(size)) = (attribute(RANGE_START), attribute(RANGE_SIZE))
            && size > 0
            && address.checked_add(bytes as u64).is_none_or(|end| end > start + size)
        {
            return Err(CudaError::argument(format!(
                "{what} needs {bytes} B from {address:#x} on, but its memory ends {} B after that",
                start + size - address
            )));
        }
        Ok(())
    }
}
