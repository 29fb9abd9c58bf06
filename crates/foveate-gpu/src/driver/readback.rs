//! A few bytes of the device that are read while later work runs.

use std::time::Duration;

use super::memory::Allocation;
use super::pinned::Pinned;
use super::stream::Event;
use crate::error::GpuError;
use crate::trace::{Noted, note};

/// Pinned memory that device memory is copied to behind the work that is queued: waiting for it waits
/// for that work alone, and not for what was queued since. It can be used again and again.
#[derive(Debug)]
pub struct Readback {
    memory: Pinned,
    copied: Event,
    queued: bool,
}

impl Readback {
    /// Room for as many bytes as `from` has, on its device.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn new(from: &Allocation) -> Result<Self, GpuError> {
        let device = from.stream().device();
        let memory = Pinned::new(device, from.bytes())?;
        Ok(Self { memory, copied: Event::new(device)?, queued: false })
    }

    /// Queues a copy of all of `from` on its stream.
    ///
    /// # Errors
    /// When it has more bytes than there is room for, while a graph is recorded, and those of the
    /// driver.
    pub fn queue(&mut self, from: &Allocation) -> Result<(), GpuError> {
        let (stream, bytes) = (from.stream(), from.bytes());
        stream.refuse_recording("a copy between host and device")?;
        if bytes > self.memory.as_slice().len() {
            let room = self.memory.as_slice().len();
            return Err(GpuError::argument(format!("{bytes} B do not fit {room} B of the host")));
        }
        let driver = stream.device().current()?;
        let span = (from.address(), from.address() + bytes as u64);
        note(|| Noted::Read { name: "a download".into(), span, stream: stream.number() });
        self.queued = true;
        // SAFETY: both sides have that many bytes. The pinned memory is read and freed only behind
        // the event that follows.
        let code = unsafe {
            (driver.to_host)(self.memory.data().cast(), from.address(), bytes, stream.handle())
        };
        driver.check(code, || format!("copying {bytes} B from the device"))?;
        self.copied.record(stream)
    }

    /// Waits for the copy that was queued last, at most `limit`, and gives what it brought.
    ///
    /// # Errors
    /// When none was queued, the work before it does not end in time, or it failed.
    pub fn wait(&mut self, limit: Duration) -> Result<&[u8], GpuError> {
        if !self.queued {
            return Err(GpuError::argument("no copy from the device is queued"));
        }
        self.copied.wait(limit, "work on the device")?;
        self.queued = false;
        Ok(self.memory.as_slice())
    }
}

impl Drop for Readback {
    fn drop(&mut self) {
        // Memory that the device may still write is not freed.
        if self.queued && self.copied.wait(Duration::from_secs(5), "a copy").is_err() {
            self.memory.leak();
        }
    }
}
