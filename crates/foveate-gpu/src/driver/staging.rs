//! Host memory on its way to and from the device.
//!
//! Whether a copy from or to a caller's memory is done when the driver's call returns depends on
//! that memory (somebody may have pinned it) and on the system. So every copy goes through pinned
//! memory of ours, and an event marks its end: what a caller gave can be reused at once, what a
//! caller asked for is there, and a device that hangs is an error after a time, not a call that
//! never returns.
//!
//! Two chunks are filled in turns, each from start to end, so that many small copies can be
//! queued behind long work without waiting. A chunk is filled again only when all copies through
//! it are done.

use std::ptr;
use std::time::Duration;

use super::pinned::Pinned;
use super::stream::{Event, Stream};
use crate::error::GpuError;

const CHUNK_BYTES: usize = 4 << 20;
const CHUNKS: usize = 2;
/// Distance that starts of copies keep.
const ALIGN: usize = 256;

/// The chunks of one stream, made when they are first needed.
#[derive(Debug, Default)]
pub(super) struct Staging {
    chunks: Vec<Chunk>,
    at: usize,
}

#[derive(Debug)]
struct Chunk {
    memory: Pinned,
    /// Bytes of the copies queued since it was last free.
    used: usize,
    /// Follows the last of them.
    copied: Event,
}

impl Staging {
    /// Queues a copy of `data` to `address`, which has room for it. `data` is not read afterwards.
    /// Where both chunks hold copies that are queued, it waits for the older ones, and so for the
    /// work before them; at most `limit` for each chunk.
    ///
    /// # Errors
    /// When earlier copies do not end in time, and those of the driver.
    ///
    /// # Safety
    /// `data.len()` bytes from `address` on are memory of the stream's device that lives as long
    /// as work queued on `stream`.
    pub unsafe fn upload(
        &mut self,
        stream: &Stream,
        address: u64,
        data: &[u8],
        limit: Duration,
    ) -> Result<(), GpuError> {
        let driver = stream.device().current()?;
        for (i, piece) in data.chunks(CHUNK_BYTES).enumerate() {
            let chunk = self.with_room(stream, piece.len(), limit)?;
            let start = chunk.start();
            let to = address + (i * CHUNK_BYTES) as u64;
            // SAFETY: the chunk has room for the piece from `start` on, which no queued copy uses.
            unsafe { ptr::copy_nonoverlapping(piece.as_ptr(), start, piece.len()) };
            // SAFETY: both sides have that many bytes; the chunk outlives the copy, since it is
            // waited for before it is filled again or freed.
            let code = unsafe {
                (driver.to_device)(to, start.cast_const().cast(), piece.len(), stream.handle())
            };
            driver.check(code, || format!("copying {} B to the device", data.len()))?;
            self.queued(stream, piece.len())?;
        }
        Ok(())
    }

    /// Copies from `address` to `data`, behind the stream's work; each chunk at most in `limit`.
    ///
    /// # Errors
    /// When the work does not end in time or failed, and those of the driver.
    ///
    /// # Safety
    /// As for [`Self::upload`].
    pub unsafe fn download(
        &mut self,
        stream: &Stream,
        address: u64,
        data: &mut [u8],
        limit: Duration,
    ) -> Result<(), GpuError> {
        let driver = stream.device().current()?;
        let bytes = data.len();
        for (i, piece) in data.chunks_mut(CHUNK_BYTES).enumerate() {
            let start = self.with_room(stream, piece.len(), limit)?.start();
            let from = address + (i * CHUNK_BYTES) as u64;
            // SAFETY: as in `upload`; nobody reads this part of the chunk before the copy is done.
            let code =
                unsafe { (driver.to_host)(start.cast(), from, piece.len(), stream.handle()) };
            driver.check(code, || format!("copying {bytes} B from the device"))?;
            self.queued(stream, piece.len())?;
            self.chunks[self.at].copied.wait(limit, "a copy from the device")?;
            // SAFETY: the copy has initialised those bytes and is done.
            unsafe {
                ptr::copy_nonoverlapping(start.cast_const(), piece.as_mut_ptr(), piece.len())
            };
        }
        Ok(())
    }

    /// Takes out the chunks whose copies are done.
    pub fn take_finished(&mut self) -> Vec<*mut u8> {
        let (done, busy): (Vec<_>, Vec<_>) =
            self.chunks.drain(..).partition(|chunk| matches!(chunk.copied.done(), Ok(true)));
        (self.chunks, self.at) = (busy, 0);
        done.into_iter().map(|chunk| chunk.memory.into_raw()).collect()
    }

    /// The chunk to copy `bytes` through next.
    fn with_room(
        &mut self,
        stream: &Stream,
        bytes: usize,
        limit: Duration,
    ) -> Result<&Chunk, GpuError> {
        stream.refuse_recording("a copy between host and device")?;
        if self.chunks.get(self.at).is_some_and(|chunk| chunk.used + bytes > CHUNK_BYTES) {
            self.at = (self.at + 1) % CHUNKS;
            if let Some(chunk) = self.chunks.get_mut(self.at) {
                chunk.copied.wait(limit, "copies between host and device")?;
                chunk.used = 0;
            }
        }
        if self.at >= self.chunks.len() {
            let device = stream.device();
            let memory = match device.free_list().pop_pinned() {
                // SAFETY: only `take_finished` puts chunks there.
                Some(data) => unsafe { Pinned::from_raw(device, data, CHUNK_BYTES) },
                None => Pinned::new(device, CHUNK_BYTES)?,
            };
            self.chunks.push(Chunk { memory, used: 0, copied: Event::new(device)? });
            self.at = self.chunks.len() - 1;
        }
        Ok(&self.chunks[self.at])
    }

    /// Notes that a copy of `bytes` through the present chunk is queued.
    fn queued(&mut self, stream: &Stream, bytes: usize) -> Result<(), GpuError> {
        let chunk = &mut self.chunks[self.at];
        chunk.used = (chunk.used + bytes).next_multiple_of(ALIGN);
        chunk.copied.record(stream).inspect_err(|_| {
            // The end of the copy is unknown, so the memory is never used or freed again.
            std::mem::forget(self.chunks.swap_remove(self.at));
            self.at = 0;
        })
    }
}

impl Chunk {
    /// Where the next copy goes.
    fn start(&self) -> *mut u8 {
        // In bounds: `with_room` has left place behind `used`.
        self.memory.data().wrapping_add(self.used)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        for chunk in self.chunks.drain(..) {
            // Memory that the device may still read or write is not freed.
            if chunk.copied.wait(Duration::from_secs(5), "copies").is_err() {
                std::mem::forget(chunk);
            }
        }
    }
}
