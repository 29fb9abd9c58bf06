//! Running totals of a step, and how the host comes by them.

use foveate_gpu::driver::{Allocation, Readback, default_timeout};
use foveate_nn::{NnError, Sums};

use super::{Cuda, failed};
use crate::optimizer::TOTALS_LEN;

/// Running totals in device memory.
#[derive(Debug)]
pub struct CudaTotals {
    pub(super) memory: Allocation,
    /// Of the clock.
    step: u64,
    /// Their copy for the host, queued behind the optimiser.
    pub(super) readback: Option<Readback>,
}

impl Cuda {
    /// Copies the numbers of `from`, behind what was queued before.
    pub(super) fn copy_totals(&self, from: &CudaTotals, to: &CudaTotals) -> Result<(), NnError> {
        let (stream, [from, to]) = (self.queue.stream(), [from, to].map(|of| of.memory.address()));
        // SAFETY: both are memory of this device with room for totals, and belong to the queue's stream.
        unsafe { stream.copy(to, from, stream.device(), 8 * TOTALS_LEN) }.map_err(|e| failed(&e))
    }

    /// Zeros.
    pub(super) fn new_totals(&mut self) -> Result<CudaTotals, NnError> {
        if self.stopped.is_none() {
            let stopped = self.scratch("a flag", 8)?;
            stopped.fill(0).map_err(|e| failed(&e))?;
            self.stopped = Some(stopped);
        }
        let step = self.clock.step();
        self.totals_of(step)
    }

    /// Zeros of a step of the clock.
    pub(super) fn totals_of(&self, step: u64) -> Result<CudaTotals, NnError> {
        let memory = self.scratch("totals", 8 * TOTALS_LEN)?;
        memory.fill(0).map_err(|e| failed(&e))?;
        Ok(CudaTotals { memory, step, readback: None })
    }

    /// Their numbers, from the copy that the optimiser queued where it ran.
    pub(super) fn read_totals(&mut self, totals: CudaTotals) -> Result<Sums, NnError> {
        let mut words = [[0; 8]; TOTALS_LEN];
        let bytes = words.as_flattened_mut();
        let updates = totals.readback.is_some();
        match totals.readback {
            Some(mut readback) => {
                let read = readback.wait(default_timeout()).map_err(|e| failed(&e))?;
                bytes.copy_from_slice(read);
                self.readbacks.push(readback);
            }
            None => totals.memory.read(bytes, default_timeout()).map_err(|e| failed(&e))?,
        }
        let [nats, labelled, squares, _] = words.map(u64::from_ne_bytes);
        let nats = f64::from_bits(nats);
        let grad_norm = f64::from_bits(squares).sqrt() / labelled.max(1) as f64;
        let is_finite = nats.is_finite() && grad_norm.is_finite();
        if let Some(stopped) = self.stopped.as_ref().filter(|_| updates && !is_finite) {
            // Whoever reads of it decides what comes next.
            stopped.fill(0).map_err(|e| failed(&e))?;
        }
        let times = self.clock.read(totals.step).map_err(|e| failed(&e))?;
        Ok(Sums { nats, labelled, grad_norm, ..times })
    }

    /// Queues the copy that the host reads.
    pub(super) fn queue_readback(&mut self, totals: &mut CudaTotals) -> Result<(), NnError> {
        let mut readback = match self.readbacks.pop() {
            Some(free) => free,
            None => Readback::new(&totals.memory).map_err(|e| failed(&e))?,
        };
        readback.queue(&totals.memory).map_err(|e| failed(&e))?;
        totals.readback = Some(readback);
        Ok(())
    }
}
