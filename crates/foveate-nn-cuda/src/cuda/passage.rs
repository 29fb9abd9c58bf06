//! Moments that lie in the memory of the host, on their way through the device.
//!
//! ```text
//! copies in     piece 0   piece 1   piece 2   piece 3 ...
//! the blocks'             update 0  update 1  update 2 ...
//! copies out                        piece 0   piece 1 ...
//! ```
//!
//! A piece of both moments comes in on one queue of the [`Bus`], is updated on that of the blocks, and goes out on
//! the other. A slot of device memory holds a piece.
//! It is filled again when what it held has gone out, which is also when the host's memory has what the next
//! step brings in: a piece has the same slot in every step. The first pieces of a step come in while its last
//! backward pass still runs.

use std::ops::Range;
use std::sync::Arc;

use foveate_gpu::abi::Address;
use foveate_gpu::driver::{Allocation, Event, HostArray};
use foveate_gpu::{DeviceTensor, Queue};
use foveate_nn::{COPY_IN, COPY_OUT, MOMENTS_PIECES, Moments, NnError};
use foveate_tensor::DType;

use super::array::CudaArray;
use super::bus::Bus;
use super::clock::Clock;
use super::{Cuda, failed};

/// The slots, on the way between the queues.
#[derive(Debug)]
pub(super) struct Passage {
    bus: Arc<Bus>,
    slots: Vec<Slot>,
    /// Bytes of a piece of one moment.
    bytes: usize,
    /// Moments that a slot has room for.
    moments: usize,
}

/// Device memory of a piece of each moment.
#[derive(Debug)]
struct Slot {
    memory: Allocation,
    arrived: Event,
    updated: Event,
    left: Event,
}

/// A piece that is on the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    slot: usize,
    elems: usize,
    dtype: DType,
    /// Bytes from a piece of means to that of squares in a slot.
    between: usize,
    at: Address,
}

impl Piece {
    /// Of the means, then of the squares.
    fn address(self, moment: usize) -> Address {
        self.at + (moment * self.between) as Address
    }

    /// One of the moments.
    pub fn moment(self, moment: usize) -> DeviceTensor<1> {
        DeviceTensor::contiguous(self.address(moment), self.dtype, [self.elems])
    }
}

/// The moments that the rule keeps: where the host has them.
pub(super) fn kept(moments: &Moments<CudaArray>) -> impl Iterator<Item = &HostArray> {
    [&moments.mean, &moments.square].into_iter().filter_map(CudaArray::on_host)
}

impl Passage {
    /// For pieces of so many bytes of each of the `moments` that a rule keeps.
    pub fn new(blocks: &mut Cuda, bytes: usize, moments: usize) -> Result<Self, NnError> {
        let (bus, device) = (blocks.bus()?, blocks.kernels.engine().device());
        let event = || Event::new(device).map_err(|e| failed(&e));
        let slot = |_| {
            let memory = blocks.scratch("moments on the device", moments * bytes)?;
            Ok(Slot { memory, arrived: event()?, updated: event()?, left: event()? })
        };
        let slots = (0..MOMENTS_PIECES).map(slot).collect::<Result<_, NnError>>()?;
        // The memory may have been others', whose work is queued.
        let before = event()?;
        before.record(blocks.queue.stream()).map_err(|e| failed(&e))?;
        bus.arriving.stream().after(&before).map_err(|e| failed(&e))?;
        Ok(Self { bus, slots, bytes, moments })
    }

    /// Whether its slots have room for pieces of so many bytes of so many moments.
    pub fn fits(&self, bytes: usize, moments: usize) -> bool {
        bytes <= self.bytes && moments <= self.moments
    }

    /// Brings elements `place` of the moments, which are in piece `number`, to the device for what is queued
    /// on `queue` next.
    pub fn bring(
        &self,
        queue: &Queue,
        clock: &mut Clock,
        moments: &Moments<CudaArray>,
        number: usize,
        place: &Range<usize>,
    ) -> Result<Piece, NnError> {
        let (slot, dtype) = (number % self.slots.len(), moments.mean.dtype);
        let Slot { memory, arrived, left, .. } = &self.slots[slot];
        let (elems, between, at) = (place.len(), self.bytes, memory.address());
        let piece = Piece { slot, elems, dtype, between, at };
        let (start, bytes) = (place.start * dtype.bytes(), elems * dtype.bytes());
        assert!(self.fits(bytes, kept(moments).count()), "a piece fits its slot");
        let stream = self.bus.arriving.stream();
        let mut queued = || {
            stream.after(left)?;
            let begin = clock.copy_begins(stream)?;
            for (which, moment) in kept(moments).enumerate() {
                // SAFETY: the slot has room for the piece, stays allocated as long as the queues, and is not in
                // use: what it held has left. The moments are marked behind the copy.
                unsafe { moment.copy_to(stream, start, piece.address(which), bytes)? };
                moment.mark(stream)?;
            }
            clock.copy_ends(stream, COPY_IN, begin)?;
            arrived.record(stream)?;
            queue.stream().after(arrived)
        };
        queued().map_err(|e| failed(&e))?;
        Ok(piece)
    }

    /// Takes elements `place` back to the host, behind what was queued on `queue`.
    pub fn take_back(
        &self,
        queue: &Queue,
        clock: &mut Clock,
        moments: &Moments<CudaArray>,
        piece: Piece,
        place: &Range<usize>,
    ) -> Result<(), NnError> {
        let Slot { updated, left, .. } = &self.slots[piece.slot];
        let size = piece.dtype.bytes();
        let (start, bytes) = (place.start * size, place.len() * size);
        let stream = self.bus.leaving.stream();
        let mut queued = || {
            updated.record(queue.stream())?;
            stream.after(updated)?;
            let begin = clock.copy_begins(stream)?;
            for (which, moment) in kept(moments).enumerate() {
                // SAFETY: as in `bring`.
                unsafe { moment.copy_from(stream, start, piece.address(which), bytes)? };
                moment.mark(stream)?;
            }
            clock.copy_ends(stream, COPY_OUT, begin)?;
            left.record(stream)
        };
        queued().map_err(|e| failed(&e))
    }
}

impl Passage {
    /// Waits until nothing is on its way: for a step that ends in an error, whose last copies no mark is behind.
    pub fn settle(&self) {
        self.bus.settle();
    }
}

impl Drop for Passage {
    /// Slots go back to the pool of the blocks' queue only when nothing copies from or to them.
    fn drop(&mut self) {
        self.settle();
    }
}
