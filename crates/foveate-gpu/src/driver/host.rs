//! Arrays in the memory of the host, which a device copies from and to while the host goes on.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::device::Device;
use super::pinned::{Pinned, copy, fill};
use super::stream::{Event, Stream};
use crate::error::GpuError;
use crate::sync::lock;
use crate::trace::{HOST, Noted, note};

/// How long memory that is dropped waits for the copies that use it.
const FAREWELL: Duration = Duration::from_secs(5);

/// Pinned memory that streams of its device copy pieces from and to. The host reads and writes it behind the
/// work that was marked last ([`HostArray::mark`]), for which it waits.
#[derive(Debug)]
pub struct HostArray {
    memory: Mutex<Pinned>,
    /// Where it starts; the memory does not move.
    start: u64,
    bytes: usize,
    used: Event,
    /// How often it was marked, and how many of these marks the host has seen reached: what has come does not go
    /// again where the device fails later.
    marks: [AtomicU64; 2],
    is_left: bool,
}

impl HostArray {
    /// `bytes` zeros.
    ///
    /// # Errors
    /// When the system does not let so much be pinned, and those of the driver.
    pub fn new(device: &Device, bytes: usize) -> Result<Self, GpuError> {
        let memory = Pinned::new(device, bytes)?;
        let (start, used) = (memory.data() as u64, Event::new(device)?);
        note(|| Noted::Taken { address: start, bytes });
        let (memory, marks) = (Mutex::new(memory), Default::default());
        let array = Self { memory, start, bytes, used, marks, is_left: false };
        array.note_use(0, bytes, HOST, true);
        Ok(array)
    }

    /// Its length.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where it starts.
    pub fn address(&self) -> u64 {
        self.start
    }

    /// Queues a copy of `bytes` bytes from byte `start` on to device memory at `to`.
    ///
    /// # Errors
    /// When the array ends before, while a graph is recorded, and those of the driver.
    ///
    /// # Safety
    /// `to` is memory of the stream's device that stays allocated until the copy is done, and so does this
    /// array, or [`Self::mark`] follows.
    pub unsafe fn copy_to(
        &self,
        stream: &Stream,
        start: usize,
        to: u64,
        bytes: usize,
    ) -> Result<(), GpuError> {
        self.admit(stream, start, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        self.note_use(start, bytes, stream.number(), false);
        note(|| {
            let span = (to, to + bytes as u64);
            Noted::Written { name: "a copy in".into(), span, stream: stream.number() }
        });
        let driver = stream.device().current()?;
        let from = (self.start + start as u64) as *const std::ffi::c_void;
        // SAFETY: the array has those bytes, checked above; the caller vouches for the rest.
        let code = unsafe { (driver.to_device)(to, from, bytes, stream.handle()) };
        driver.check(code, || format!("copying {bytes} B to the device"))
    }

    /// Queues a copy of `bytes` bytes of device memory at `from` to byte `start` on.
    ///
    /// # Errors
    /// Those of [`Self::copy_to`].
    ///
    /// # Safety
    /// That of [`Self::copy_to`].
    pub unsafe fn copy_from(
        &self,
        stream: &Stream,
        start: usize,
        from: u64,
        bytes: usize,
    ) -> Result<(), GpuError> {
        self.admit(stream, start, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        note(|| {
            let span = (from, from + bytes as u64);
            Noted::Read { name: "a copy out".into(), span, stream: stream.number() }
        });
        self.note_use(start, bytes, stream.number(), true);
        let driver = stream.device().current()?;
        let to = (self.start + start as u64) as *mut std::ffi::c_void;
        // SAFETY: as in `copy_to`.
        let code = unsafe { (driver.to_host)(to, from, bytes, stream.handle()) };
        driver.check(code, || format!("copying {bytes} B from the device"))
    }

    /// Marks the end of the copies so far, which `stream` is behind: the host waits for it before it reads,
    /// writes or frees the memory.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn mark(&self, stream: &Stream) -> Result<(), GpuError> {
        self.used.record(stream)?;
        self.marks[0].fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// Waits for the copies, at most `limit`.
    ///
    /// # Errors
    /// When they do not end in time or failed.
    pub fn wait(&self, limit: Duration) -> Result<(), GpuError> {
        let [marked, reached] = self.marks.each_ref().map(|count| count.load(Ordering::Acquire));
        if reached < marked {
            self.used.wait(limit, "copies between host and device")?;
            self.marks[1].fetch_max(marked, Ordering::AcqRel);
        }
        Ok(())
    }

    /// Waits for the copies, at most `limit`, and reads from byte `start` on.
    ///
    /// # Errors
    /// When the array ends before, or the copies do not end in time or failed.
    pub fn read(&self, start: usize, data: &mut [u8], limit: Duration) -> Result<(), GpuError> {
        self.fits(start, data.len())?;
        let memory = lock(&self.memory);
        self.wait(limit)?;
        self.note_use(start, data.len(), HOST, false);
        copy(data, &memory.as_slice()[start..start + data.len()]);
        Ok(())
    }

    /// Waits for the copies, at most `limit`, and has `change` change `bytes` bytes from byte `start` on.
    ///
    /// # Errors
    /// Those of [`Self::read`].
    pub fn change(
        &self,
        start: usize,
        bytes: usize,
        limit: Duration,
        change: impl FnOnce(&mut [u8]),
    ) -> Result<(), GpuError> {
        self.fits(start, bytes)?;
        let mut memory = lock(&self.memory);
        self.wait(limit)?;
        self.note_use(start, bytes, HOST, true);
        change(&mut memory.as_mut_slice()[start..start + bytes]);
        Ok(())
    }

    /// Waits for the copies, at most `limit`, and makes `bytes` bytes from byte `start` on `byte`.
    ///
    /// # Errors
    /// Those of [`Self::read`].
    pub fn fill(
        &self,
        start: usize,
        byte: u8,
        bytes: usize,
        limit: Duration,
    ) -> Result<(), GpuError> {
        self.change(start, bytes, limit, |some| fill(some, byte))
    }

    /// Leaves the memory to the device, which may use it for ever: its end waits for nothing and frees nothing.
    pub fn leave(mut self) {
        self.leak();
    }

    fn leak(&mut self) {
        self.memory.get_mut().unwrap_or_else(PoisonError::into_inner).leak();
        self.is_left = true;
    }

    fn admit(&self, stream: &Stream, start: usize, bytes: usize) -> Result<(), GpuError> {
        stream.refuse_recording("a copy between host and device")?;
        self.fits(start, bytes)
    }

    fn fits(&self, start: usize, bytes: usize) -> Result<(), GpuError> {
        if start.checked_add(bytes).is_some_and(|end| end <= self.bytes) {
            return Ok(());
        }
        Err(GpuError::argument(format!(
            "{bytes} B from byte {start} on are not within {} B of the host",
            self.bytes
        )))
    }

    fn note_use(&self, start: usize, bytes: usize, stream: u64, writes: bool) {
        let first = self.start + start as u64;
        let (span, name) = ((first, first + bytes as u64), || "memory of the host".to_owned());
        note(|| match writes {
            true => Noted::Written { name: name(), span, stream },
            false => Noted::Read { name: name(), span, stream },
        });
    }
}

impl Drop for HostArray {
    fn drop(&mut self) {
        // Memory that the device may still use is not freed.
        if !self.is_left && self.wait(FAREWELL).is_err() {
            self.leak();
        }
        note(|| Noted::Given { address: self.start });
    }
}
