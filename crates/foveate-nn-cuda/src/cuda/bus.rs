//! Copies between the memory of the device and that of the host: one queue for each direction, beside that of the
//! blocks.
//!
//! Both directions of the bus work at once, and the host waits for nothing. What of a model lies in the memory
//! of the host shares them: moments ([`super::passage`]) and inputs of layers, of which one is on its way in each
//! direction at a time; and copies of weights and moments that are saved ([`super::state_memory`]). A copy begins behind what the blocks' queue has been given so far, and that waits for
//! the copy's event where the step says so ([`foveate_nn::Blocks::left`], [`foveate_nn::Blocks::brought`]).

use std::sync::Arc;

use foveate_gpu::driver::Event;
use foveate_gpu::{GpuError, Queue};
use foveate_nn::{COPY_IN, COPY_OUT, NnError};

use super::array::CudaArray;
use super::sharing::FAREWELL;
use super::{Cuda, failed};

/// The two queues, and where they and the blocks' meet for inputs of layers.
#[derive(Debug)]
pub(super) struct Bus {
    pub arriving: Queue,
    pub leaving: Queue,
    /// The blocks are so far that an input may leave; it has left.
    out: [Event; 2],
    /// The blocks are so far that an input may come; it has come.
    back: [Event; 2],
    /// The blocks are so far that weights and moments may leave; they have left.
    pub state: [Event; 2],
}

impl Bus {
    fn new(blocks: &Cuda) -> Result<Self, GpuError> {
        let engine = blocks.kernels.engine();
        let event = || Event::new(engine.device());
        let (arriving, leaving) = (engine.new_queue()?, engine.new_queue()?);
        let pair = || Ok::<_, GpuError>([event()?, event()?]);
        let (out, back, state) = (pair()?, pair()?, pair()?);
        Ok(Self { arriving, leaving, out, back, state })
    }

    /// Waits until nothing is on its way.
    pub fn settle(&self) {
        for queue in [&self.arriving, &self.leaving] {
            // Where the device has failed there is nobody to tell.
            let _ = queue.stream().wait(FAREWELL, "copies between host and device");
        }
    }
}

impl Drop for Bus {
    /// Arrays go back only when nothing copies from or to them.
    fn drop(&mut self) {
        self.settle();
    }
}

/// Which way an array goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Out,
    Back,
}

impl Way {
    /// As profiles name it.
    fn name(self) -> &'static str {
        match self {
            Self::Out => COPY_OUT,
            Self::Back => COPY_IN,
        }
    }
}

impl Cuda {
    /// The queues, which are made once.
    pub(super) fn bus(&mut self) -> Result<Arc<Bus>, NnError> {
        if let Some(bus) = &self.bus {
            return Ok(Arc::clone(bus));
        }
        let bus = Arc::new(Bus::new(self).map_err(|e| failed(&e))?);
        Ok(Arc::clone(self.bus.insert(bus)))
    }

    /// Queues the copy of all of an array of the device to one of the host, or back.
    pub(super) fn send(
        &mut self,
        way: Way,
        device: &CudaArray,
        host: &CudaArray,
    ) -> Result<(), NnError> {
        let bus = self.bus()?;
        let (address, bytes) = (device.vector().start(), device.elems * device.dtype.bytes());
        let host = host.on_host().expect("the step sends arrays to the host's memory");
        let (stream, [ready, done]) = match way {
            Way::Out => (bus.leaving.stream(), &bus.out),
            Way::Back => (bus.arriving.stream(), &bus.back),
        };
        let (queue, clock) = (&self.queue, &mut self.clock);
        let mut queued = || {
            ready.record(queue.stream())?;
            stream.after(ready)?;
            let begin = clock.copy_begins(stream)?;
            match way {
                // SAFETY: the array is the workspace's, which the blocks' queue has waited for the copy before it
                // goes, or `Bus` has, and the host's is marked behind the copy.
                Way::Out => unsafe { host.copy_from(stream, 0, address, bytes)? },
                // SAFETY: as above.
                Way::Back => unsafe { host.copy_to(stream, 0, address, bytes)? },
            }
            clock.copy_ends(stream, way.name(), begin)?;
            host.mark(stream)?;
            done.record(stream)
        };
        queued().map_err(|e| failed(&e))
    }

    /// Makes the blocks' queue wait for the last copy of its way.
    pub(super) fn await_copy(&self, way: Way) -> Result<(), NnError> {
        let Some(bus) = &self.bus else { return Ok(()) };
        let [_, done] = match way {
            Way::Out => &bus.out,
            Way::Back => &bus.back,
        };
        self.queue.stream().after(done).map_err(|e| failed(&e))
    }
}
