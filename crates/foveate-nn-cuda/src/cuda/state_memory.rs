//! Memory of the host that weights and moments are copied to while steps go on.
//!
//! ```text
//! the blocks'   step n | forward and backward of step n + 1 | update n + 1
//! copies out           | weights, moments ------------------^
//! a thread                                reads ------------------------
//! ```
//!
//! It is pinned, so that the device copies by itself at the rate of the bus, and made once, since pinning takes far
//! longer than that: in pieces, as the driver lets nobody else in meanwhile. The host waits for nothing; what
//! writes weights or moments next does, on the device.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock};
use std::thread::ScopedJoinHandle;
use std::time::Instant;

use foveate_gpu::GpuError;
use foveate_gpu::abi::Address;
use foveate_gpu::driver::{Device, HostArray, default_timeout};
use foveate_nn::{Array, ArrayBytes, COPY_OUT, NnError, NnErrorKind, StateMemory};

use super::array::CudaArray;
use super::sharing::FAREWELL;
use super::{Cuda, failed};

/// Bytes that are pinned at once.
const PIECE: usize = 64 << 20;
/// Threads that pin.
const THREADS: usize = 4;

/// Pinned memory of the host.
#[derive(Debug)]
pub struct CudaStateMemory {
    device: Device,
    /// Bytes of a piece.
    piece: usize,
    /// All but the last are whole.
    pieces: RwLock<Vec<HostArray>>,
}

impl CudaStateMemory {
    pub(super) fn new(device: &Device) -> Self {
        Self { device: device.clone(), piece: PIECE, pieces: RwLock::default() }
    }

    /// The same in pieces of so many bytes, as tests of small models have it.
    pub fn in_pieces_of(mut self, bytes: usize) -> Self {
        self.piece = bytes.max(1);
        self
    }

    /// The pieces that bytes from `start` on lie in: which, where in it, and how many of them.
    fn places(&self, start: usize, bytes: usize) -> impl Iterator<Item = (usize, usize, usize)> {
        let (piece, end) = (self.piece, start + bytes);
        let mut at = start;
        std::iter::from_fn(move || {
            let some = (piece - at % piece).min(end - at);
            let place = (at / piece, at % piece, some);
            at += some;
            (some > 0).then_some(place)
        })
    }
}

impl Drop for CudaStateMemory {
    /// One wait for the copies of all pieces. Where the device hangs, all are left to it: to free one may wait for
    /// the device as well.
    fn drop(&mut self) {
        let pieces = self.pieces.get_mut().unwrap_or_else(PoisonError::into_inner);
        let until = Instant::now() + FAREWELL;
        let left = || until.saturating_duration_since(Instant::now());
        if pieces.iter().try_for_each(|piece| piece.wait(left())).is_err() {
            pieces.drain(..).for_each(HostArray::leave);
        }
    }
}

impl StateMemory for CudaStateMemory {
    fn reserve(&self, bytes: usize, stop: &AtomicBool) -> Result<(), NnError> {
        let mut pieces = self.pieces.write().unwrap_or_else(PoisonError::into_inner);
        let room: usize = pieces.iter().map(HostArray::bytes).sum();
        if room >= bytes {
            return Ok(());
        }
        // All but the last are whole.
        pieces.pop_if(|last| last.bytes() < self.piece);
        let (first, end) = (pieces.len(), bytes.div_ceil(self.piece));
        let (next, over) = (AtomicUsize::new(first), AtomicBool::new(false));
        let make = || {
            let mut made = Vec::new();
            while !stop.load(Ordering::Relaxed) && !over.load(Ordering::Relaxed) {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= end {
                    break;
                }
                let some = self.piece.min(bytes - number * self.piece);
                let piece = HostArray::new(&self.device, some);
                over.fetch_or(piece.is_err(), Ordering::Relaxed);
                made.push((number, piece?));
            }
            Ok::<_, GpuError>(made)
        };
        let made: Result<Vec<_>, _> = std::thread::scope(|scope| {
            let others = THREADS.min(end - first) - 1;
            let threads: Vec<_> = (0..others).map(|_| scope.spawn(make)).collect();
            let own = make();
            let joined = |thread: ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            std::iter::once(own).chain(threads.into_iter().map(joined)).collect()
        });
        let made = made.map_err(|e| {
            let reason = format!("{bytes} B of host memory for what is saved: {e}");
            NnError::from(NnErrorKind::Device(reason))
        })?;
        let mut made: Vec<_> = made.into_iter().flatten().collect();
        made.sort_by_key(|(number, _)| *number);
        pieces.extend(made.into_iter().map(|(_, piece)| piece));
        Ok(())
    }

    fn wait(&self) -> Result<(), NnError> {
        let pieces = self.pieces.read().unwrap_or_else(PoisonError::into_inner);
        let mut all = pieces.iter();
        all.try_for_each(|piece| piece.wait(default_timeout())).map_err(|e| failed(&e))
    }

    fn read(&self, start: usize, mut into: &mut [u8]) -> Result<(), NnError> {
        let pieces = self.pieces.read().unwrap_or_else(PoisonError::into_inner);
        for (piece, start, some) in self.places(start, into.len()) {
            let (part, rest) = into.split_at_mut(some);
            pieces[piece].read(start, part, default_timeout()).map_err(|e| failed(&e))?;
            into = rest;
        }
        Ok(())
    }
}

impl Cuda {
    /// Queues copies of what lies on the device, behind what the blocks' queue has been given so far, and copies what
    /// lies in the memory of the host, by as many threads as there are.
    pub(super) fn copy_arrays_out(
        &mut self,
        from: &[ArrayBytes<'_, CudaArray>],
        to: &CudaStateMemory,
    ) -> Result<(), NnError> {
        let bus = self.bus()?;
        let pieces = to.pieces.read().unwrap_or_else(PoisonError::into_inner);
        let all: usize = from.iter().map(|of| of.bytes.len()).sum();
        let room: usize = pieces.iter().map(HostArray::bytes).sum();
        assert!(all <= room, "{all} B are copied to {room} B");
        let ([ready, left], stream) = (&bus.state, bus.leaving.stream());
        let (queue, clock) = (&self.queue, &mut self.clock);
        let mut queued = || {
            ready.record(queue.stream())?;
            stream.after(ready)?;
            let begin = clock.copy_begins(stream)?;
            let (mut at, mut on_host) = (0, Vec::new());
            for ArrayBytes { array, bytes } in from {
                let mut first = bytes.start;
                for (piece, start, some) in to.places(at, bytes.len()) {
                    match array.on_host() {
                        Some(host) => on_host.push((host, first, piece, start, some)),
                        None => {
                            let address = array.address() + first as Address;
                            // SAFETY: the array has those bytes and stays where it is until the copy is waited
                            // for; the piece is marked behind the copy.
                            unsafe { pieces[piece].copy_from(stream, start, address, some)? }
                        }
                    }
                    first += some;
                }
                at += bytes.len();
            }
            clock.copy_ends(stream, COPY_OUT, begin)?;
            // While the device copies.
            for (host, first, piece, start, some) in on_host {
                let limit = default_timeout();
                let mut read = Ok(());
                pieces[piece]
                    .change(start, some, limit, |into| read = host.read(first, into, limit))?;
                read?;
            }
            pieces.iter().take(all.div_ceil(to.piece)).try_for_each(|piece| piece.mark(stream))?;
            left.record(stream)
        };
        let queued = queued().map_err(|e| failed(&e));
        if queued.is_err() {
            // Copies that no mark is behind.
            bus.settle();
        }
        self.copying = queued.is_ok();
        queued
    }

    /// Makes the blocks' queue wait for the copies that [`Self::copy_arrays_out`] queued last, before weights or
    /// moments are written.
    pub(super) fn await_copies_out(&mut self) -> Result<(), NnError> {
        let Some(bus) = self.bus.as_ref().filter(|_| self.copying) else { return Ok(()) };
        self.queue.stream().after(&bus.state[1]).map_err(|e| failed(&e))?;
        self.copying = false;
        Ok(())
    }
}
