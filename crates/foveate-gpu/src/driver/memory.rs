//! Memory of a device, given out again and again.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use super::allocator::{ALLOCATION_ALIGN, Allocator};
use super::device::{Device, Relaxed};
use super::free_list::FreeList;
use super::pinned::Pinned;
use super::staging::Staging;
use super::stream::{Event, Stream, default_timeout};
use super::sys::OUT_OF_MEMORY;
use crate::error::{GpuError, GpuErrorKind};
use crate::sync::lock;
use crate::trace::{Noted, note};

/// Blocks are multiples of this up to [`LARGE`], and of `LARGE` beyond it, so that nearly equal
/// requests reuse each other's memory.
const SMALL: usize = 512;
const LARGE: usize = 1 << 20;

/// Set and not empty, allocations have exactly the bytes that were asked for, so that compute-sanitizer
/// sees every access past an operand's end.
const EXACT_VARIABLE: &str = "FOVEATE_EXACT_MEMORY";

/// Memory for the work of one stream. Cheap to clone.
///
/// When the last clone and the last allocation are gone that work may be queued for, the end of the
/// stream's work is marked, and memory is given to other streams only when that end is reached. What
/// plans keep for the stream does not count, or it would keep itself.
#[derive(Clone, Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    /// Nothing for what plans keep.
    _user: Option<Arc<User>>,
    /// How long to wait for work that is in the way.
    timeout: Duration,
}

#[derive(Debug)]
struct Shared {
    stream: Arc<Stream>,
    /// Whose memory it is, where it is not the pool's own.
    allocator: Option<Arc<dyn Allocator>>,
    /// Whose free memory is handed back where the device has no more, since graphs name that of this pool.
    beside: Option<Pool>,
    free: Mutex<FreeList>,
    /// [`Pool::fingerprint`].
    fingerprint: AtomicU64,
    exact: bool,
    staging: Mutex<Staging>,
    /// The end of all work that uses its memory, once nobody queues any more; nothing where it could
    /// not be marked.
    ended: OnceLock<Option<Event>>,
}

/// Whoever may queue work on a pool's stream. The last to go marks the end of that work; from there
/// on nobody promises that the stream is there.
#[derive(Debug)]
struct User(Arc<Shared>);

impl Drop for User {
    fn drop(&mut self) {
        let stream = &self.0.stream;
        let mark = || {
            stream.refuse_recording("the end of a queue")?;
            let end = Event::new(stream.device())?;
            end.record(stream).map(|()| end)
        };
        // Without the mark, memory is freed by the driver, which waits.
        let _ = self.0.ended.set(mark().ok());
    }
}

/// Device memory that goes back to its pool when it is dropped.
#[derive(Debug)]
pub struct Allocation {
    pool: Pool,
    address: u64,
    bytes: usize,
    capacity: usize,
}

impl Pool {
    /// A pool for work queued on `stream`, which waits as long as [`default_timeout`] says.
    pub fn new(stream: Arc<Stream>) -> Self {
        Self::of(stream, None, None)
    }

    /// A pool for work on the same stream that is recorded in graphs. Graphs go on using its memory after it
    /// was given back, so none of it is handed back to the device or to other queues before the pool goes.
    pub(crate) fn for_graphs(&self) -> Self {
        Self::of(self.stream().clone(), None, Some(self.downgrade()))
    }

    /// A number for all memory that the pool has had and what of it is taken: where it is the same, the same
    /// calls get the same memory.
    pub fn fingerprint(&self) -> u64 {
        self.shared.fingerprint.load(Ordering::Relaxed)
    }

    fn note_changed(&self, what: impl Hash) {
        let mut hasher = DefaultHasher::new();
        what.hash(&mut hasher);
        self.shared.fingerprint.fetch_xor(hasher.finish(), Ordering::Relaxed);
    }

    /// A pool whose memory is `allocator`'s, all of it: nothing is kept in free lists.
    pub fn with_allocator(stream: Arc<Stream>, allocator: Arc<dyn Allocator>) -> Self {
        Self::of(stream, Some(allocator), None)
    }

    fn of(
        stream: Arc<Stream>,
        allocator: Option<Arc<dyn Allocator>>,
        beside: Option<Self>,
    ) -> Self {
        let (free, fingerprint, staging, ended) = Default::default();
        let exact = std::env::var_os(EXACT_VARIABLE).is_some_and(|value| !value.is_empty());
        let shared = Arc::new(Shared {
            stream,
            allocator,
            beside,
            free,
            fingerprint,
            exact,
            staging,
            ended,
        });
        Self { _user: Some(Arc::new(User(shared.clone()))), shared, timeout: default_timeout() }
    }

    /// The same memory, where filling allocations that are taken from here waits for at most `limit` for
    /// earlier copies, and so for the work before them.
    pub fn with_timeout(&self, limit: Duration) -> Self {
        Self { timeout: limit, ..self.clone() }
    }

    /// The same memory for what is kept until its work is finished: it does not keep the end of the
    /// stream's work from being marked. Whoever uses it has one that does beside it.
    pub fn downgrade(&self) -> Self {
        Self { _user: None, ..self.clone() }
    }

    /// Whether allocations have exactly the bytes that were asked for (`FOVEATE_EXACT_MEMORY`).
    pub fn is_exact(&self) -> bool {
        self.shared.exact
    }

    /// The stream that its memory is used on.
    pub fn stream(&self) -> &Arc<Stream> {
        &self.shared.stream
    }

    /// `bytes` of memory with arbitrary contents, aligned to 256 bytes.
    ///
    /// # Errors
    /// [`GpuErrorKind::OutOfMemory`], after all free memory went back to the device;
    /// [`GpuErrorKind::Argument`] while a graph is recorded and no free memory is large enough. Of a
    /// pool with an allocator, those of the allocator.
    pub fn take(&self, bytes: usize) -> Result<Allocation, GpuError> {
        if let Some(allocator) = &self.shared.allocator {
            return self.take_from(&**allocator, bytes);
        }
        let step = if bytes > LARGE { LARGE } else { SMALL };
        // A free allocation that is not much too large serves as well.
        let (capacity, most) = match bytes.max(1) {
            exact if self.shared.exact => (exact, exact),
            // More than any device has stays as it is, for the driver to refuse.
            bytes => {
                let capacity = bytes.checked_next_multiple_of(step).unwrap_or(bytes);
                (capacity, capacity.saturating_add(capacity / 4))
            }
        };
        let own = self.free().pop(capacity, most);
        let (address, capacity) = match own {
            Some(found) => found,
            None => {
                let shared = self.stream().device().free_list().pop(capacity, most);
                let allocate = || Ok::<_, GpuError>((self.allocate(capacity)?, capacity));
                let new = shared.map_or_else(allocate, Ok)?;
                self.note_changed(("new", new));
                new
            }
        };
        note(|| Noted::Taken { address, bytes });
        self.note_changed((address, capacity));
        Ok(Allocation { pool: self.clone(), address, bytes, capacity })
    }

    fn take_from(&self, allocator: &dyn Allocator, bytes: usize) -> Result<Allocation, GpuError> {
        let capacity = bytes.max(1);
        let address = allocator.allocate(capacity, self.stream().handle() as usize)?;
        let allocation = Allocation { pool: self.clone(), address, bytes, capacity };
        if address == 0 || !address.is_multiple_of(ALLOCATION_ALIGN) {
            return Err(GpuError::argument(format!(
                "the allocator gave memory at {address:#x}; it must start at a multiple of \
                 {ALLOCATION_ALIGN} bytes"
            )));
        }
        Ok(allocation)
    }

    /// A copy of `data` on the device, in order with the stream's work.
    ///
    /// # Errors
    /// Those of [`Self::take`] and of the driver.
    pub fn upload(&self, data: &[u8]) -> Result<Allocation, GpuError> {
        let memory = self.take(data.len())?;
        memory.write(data)?;
        Ok(memory)
    }

    /// Whether work is recorded in a graph at present that takes its memory from an allocator. What is
    /// made then belongs to the graph: it is made whenever the graph runs.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn is_recording(&self) -> Result<bool, GpuError> {
        Ok(self.shared.allocator.is_some() && self.stream().is_recording()?)
    }

    /// Whether a call must give all memory back when it ends: where it is recorded in a graph, and
    /// where the allocator only [lends](super::Allocator::lends).
    ///
    /// # Errors
    /// When the driver does not say whether the stream is recorded.
    pub fn is_lent(&self) -> Result<bool, GpuError> {
        match &self.shared.allocator {
            Some(allocator) => Ok(allocator.lends() || self.stream().is_recording()?),
            None => Ok(false),
        }
    }

    fn free(&self) -> MutexGuard<'_, FreeList> {
        self.shared.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn staging(&self) -> MutexGuard<'_, Staging> {
        self.shared.staging.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Frees the pool's free memory, once the stream's work is done, and the free list that the
    /// device's queues share. A pool with an allocator has nothing to free, and memory that graphs name stays.
    ///
    /// # Errors
    /// When the work does not end, or failed.
    pub fn release(&self) -> Result<(), GpuError> {
        if self.shared.allocator.is_some() || self.shared.beside.is_some() {
            return Ok(());
        }
        // Taken before the wait, which is for the work that used this memory: another thread may free
        // more meanwhile.
        let mut free = std::mem::take(&mut *self.free());
        let freed = self.wait_and_free(&mut free);
        self.free().append(free);
        freed
    }

    /// Takes out of `free` what it hands back.
    fn wait_and_free(&self, free: &mut FreeList) -> Result<(), GpuError> {
        self.stream().wait(self.timeout, "work before memory is handed back")?;
        let device = self.stream().device();
        let driver = device.current()?;
        device.free_list().free_all(&driver, device.count_held())?;
        // SAFETY: the context is current, and the work that used them is done.
        unsafe { free.free_all(&driver, device.count_held()) }
    }

    /// Whether nobody can queue work any more and what was queued is done, or its end unknown.
    pub(crate) fn is_finished(&self) -> bool {
        let end = self.shared.ended.get();
        end.is_some_and(|end| !end.as_ref().is_some_and(|end| matches!(end.done(), Ok(false))))
    }

    /// Leaves what is free to other queues of the device, once the end is reached.
    pub(crate) fn release_finished(&self) {
        let end = self.shared.ended.get().and_then(Option::as_ref);
        if end.is_some_and(|end| matches!(end.done(), Ok(true))) {
            let free = std::mem::take(&mut *self.free());
            self.stream().device().free_list().append(free, self.staging().take_finished());
        }
    }

    fn allocate(&self, bytes: usize) -> Result<u64, GpuError> {
        self.stream().refuse_recording("taking memory of the device")?;
        let device = self.stream().device();
        let driver = device.current()?;
        let mut address = 0;
        // SAFETY: `address` is valid for a write, and the context is current.
        let mut code = unsafe { (driver.alloc)(&mut address, bytes) };
        if code == OUT_OF_MEMORY {
            self.shared.beside.as_ref().unwrap_or(self).release()?;
            // SAFETY: as above.
            code = unsafe { (driver.alloc)(&mut address, bytes) };
        }
        if code == OUT_OF_MEMORY {
            let (free, total) = device.memory()?;
            return Err(GpuErrorKind::OutOfMemory { bytes, free, total }.into());
        }
        driver.check(code, || format!("allocating {bytes} B"))?;
        device.count_held().took(bytes);
        note(|| Noted::Allocated { address, bytes });
        Ok(address)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let device = self.stream.device();
        let Ok(driver) = device.current() else { return };
        let free = self.free.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the context is current, and freeing waits for the device's work. There is nobody
        // left to tell of a failure.
        let _ = unsafe { free.free_all(&driver, device.count_held()) };
    }
}

impl Allocation {
    /// Its address on the device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its length.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn stream(&self) -> &Stream {
        self.pool.stream()
    }

    /// Copies `data` to the start of the memory, in order with the stream's work. `data` can be
    /// reused at once. While a graph is recorded that takes its memory from an allocator, a copy of
    /// `data` is kept as long as the process, for the graph.
    ///
    /// # Errors
    /// When it does not fit, earlier copies do not end in the pool's time, and those of the driver.
    pub fn write(&self, data: &[u8]) -> Result<(), GpuError> {
        self.write_at(0, data)
    }

    /// The same from byte `start` of the memory on.
    ///
    /// # Errors
    /// Those of [`Self::write`].
    pub fn write_at(&self, start: usize, data: &[u8]) -> Result<(), GpuError> {
        self.fits(start, data.len())?;
        let (address, limit) = (self.address + start as u64, self.pool.timeout);
        note(|| {
            let span = (address, address + data.len() as u64);
            Noted::Written { name: "an upload".into(), span, stream: self.stream().number() }
        });
        if self.pool.is_recording()? {
            return self.record_write(address, data);
        }
        // SAFETY: the allocation has room, checked above, and its memory is not freed before the
        // stream's work is done.
        unsafe { self.pool.staging().upload(self.stream(), address, data, limit) }
    }

    fn record_write(&self, address: u64, data: &[u8]) -> Result<(), GpuError> {
        if data.is_empty() {
            return Ok(());
        }
        let device = self.stream().device();
        let driver = device.current()?;
        let mut copies = lock(device.copies_for_graphs());
        let from = match copies.get(data) {
            Some(&copy) => copy as *const u8,
            None => {
                let _relaxed = Relaxed::new(&driver)?;
                let mut copy = Pinned::new(device, data.len())?;
                copy.as_mut_slice().copy_from_slice(data);
                let copy = copy.into_raw();
                copies.insert(data.into(), copy as usize);
                copy.cast_const()
            }
        };
        // SAFETY: the caller has checked that the memory has room; the pinned copy is never freed.
        let code =
            unsafe { (driver.to_device)(address, from.cast(), data.len(), self.stream().handle()) };
        driver.check(code, || format!("recording a copy of {} B to the device", data.len()))
    }

    /// Copies the start of the memory to `data`, behind the stream's work, and waits for it, at
    /// most `limit`.
    ///
    /// # Errors
    /// When `data` is longer than the allocation, the work does not end in time or failed.
    pub fn read(&self, data: &mut [u8], limit: Duration) -> Result<(), GpuError> {
        self.read_at(0, data, limit)
    }

    /// The same from byte `start` of the memory on.
    ///
    /// # Errors
    /// Those of [`Self::read`].
    pub fn read_at(&self, start: usize, data: &mut [u8], limit: Duration) -> Result<(), GpuError> {
        self.fits(start, data.len())?;
        self.stream().wait(limit, "work on the device")?;
        let address = self.address + start as u64;
        let span = (address, address + data.len() as u64);
        let stream = self.stream().number();
        note(|| Noted::Read { name: "a download".into(), span, stream });
        // SAFETY: as in `write_at`.
        unsafe { self.pool.staging().download(self.stream(), address, data, limit) }
    }

    /// Sets every byte, in order with the stream's work.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn fill(&self, byte: u8) -> Result<(), GpuError> {
        self.fill_at(0, byte, self.bytes)
    }

    /// Sets `bytes` bytes from byte `start` on, in order with the stream's work.
    ///
    /// # Errors
    /// When the allocation ends before, and those of the driver.
    pub fn fill_at(&self, start: usize, byte: u8, bytes: usize) -> Result<(), GpuError> {
        self.fits(start, bytes)?;
        // SAFETY: the allocation has that many bytes, and its memory is not freed before the stream's
        // work is done.
        unsafe { self.stream().fill(self.address + start as u64, byte, bytes) }
    }

    fn fits(&self, start: usize, bytes: usize) -> Result<(), GpuError> {
        if start.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            let from = if start == 0 { String::new() } else { format!(" from byte {start} on") };
            return Err(GpuError::argument(format!(
                "{bytes} B do not fit an allocation of {} B{from}",
                self.bytes
            )));
        }
        Ok(())
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        note(|| Noted::Given { address: self.address });
        match &self.pool.shared.allocator {
            None => {
                self.pool.note_changed((self.address, self.capacity));
                self.pool.free().push(self.capacity, self.address);
            }
            // SAFETY: it gave the memory for the same length and stream, and this is the end of it.
            Some(allocator) => unsafe {
                allocator.free(self.address, self.capacity, self.stream().handle() as usize);
            },
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
    pub fn check_address(&self, what: &str, address: u64, bytes: usize) -> Result<(), GpuError> {
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
            return Err(GpuError::argument(format!(
                "{what} is at {address:#x}, which is no device memory; copy it to the GPU first"
            )));
        }
        let ordinal = attribute(DEVICE_ORDINAL).map_or(-1, |d| d as i32);
        if ordinal as usize != self.ordinal() {
            return Err(GpuError::argument(format!(
                "{what} is on GPU {ordinal}, but the work is for GPU {}",
                self.ordinal()
            )));
        }
        if let (Some(start), Some(size)) = (attribute(RANGE_START), attribute(RANGE_SIZE))
            && size > 0
            && address.checked_add(bytes as u64).is_none_or(|end| end > start + size)
        {
            return Err(GpuError::argument(format!(
                "{what} needs {bytes} B from {address:#x} on, but its memory ends {} B after that",
                start + size - address
            )));
        }
        Ok(())
    }
}
