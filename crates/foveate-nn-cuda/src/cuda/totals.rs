//! Running totals of a step, and how the host comes by them.

use foveate_gpu::driver::{Allocation, Readback, default_timeout};
use foveate_nn::{NnError, NnErrorKind, Sums};

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
    /// The number of the last update of their step; 0 before there is one.
    update: u64,
}

/// Which updates the host knows of.
#[derive(Debug, Default)]
pub(super) struct Updates {
    /// How many were queued.
    queued: u64,
    /// How many were when the host last read of a step that was not finite: up to there it knows which changed
    /// nothing.
    told: u64,
}

/// Totals as the device has them.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Found {
    nats: f64,
    labelled: u64,
    z_loss: f64,
    squares: f64,
    /// Whether the update changed nothing.
    skipped: bool,
}

impl Found {
    fn of(words: [[u8; 8]; TOTALS_LEN]) -> Self {
        let [nats, labelled, z_loss, squares, [.., a, b, c, d]] = words;
        Self {
            nats: f64::from_ne_bytes(nats),
            labelled: u64::from_ne_bytes(labelled),
            z_loss: f64::from_ne_bytes(z_loss),
            squares: f64::from_ne_bytes(squares),
            skipped: i32::from_ne_bytes([a, b, c, d]) != 0,
        }
    }

    fn grad_norm(&self) -> f64 {
        self.squares.sqrt() / self.labelled.max(1) as f64
    }
}

/// What totals of an update say of steps that were not finite.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Said {
    /// Nothing that is new.
    Nothing,
    /// That this one was not.
    NotFinite,
    /// That one before was not, of which nobody has read.
    Unread,
}

impl Updates {
    /// Counts an update that is queued; its number.
    fn queue(&mut self) -> u64 {
        self.queued += 1;
        self.queued
    }

    /// What the totals of update `number` say, which the host knows from here on.
    fn read(&mut self, number: u64, found: &Found) -> Said {
        let said = match number {
            0 => Said::Nothing,
            _ if !(found.nats.is_finite() && found.grad_norm().is_finite()) => Said::NotFinite,
            _ if found.skipped && number > self.told => Said::Unread,
            _ => Said::Nothing,
        };
        if said != Said::Nothing {
            self.told = self.queued;
        }
        said
    }
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
        Ok(CudaTotals { memory, step, readback: None, update: 0 })
    }

    /// Their numbers, from the copy that the optimiser queued where it ran. An error where it changed nothing
    /// because of a step before whose totals were dropped.
    pub(super) fn read_totals(&mut self, totals: CudaTotals) -> Result<Sums, NnError> {
        let mut words = [[0; 8]; TOTALS_LEN];
        let bytes = words.as_flattened_mut();
        match totals.readback {
            Some(mut readback) => {
                let read = readback.wait(default_timeout()).map_err(|e| failed(&e))?;
                bytes.copy_from_slice(read);
                self.readbacks.push(readback);
            }
            None => totals.memory.read(bytes, default_timeout()).map_err(|e| failed(&e))?,
        }
        let found = Found::of(words);
        let said = self.updates.read(totals.update, &found);
        if let Some(stopped) = self.stopped.as_ref().filter(|_| said != Said::Nothing) {
            // Whoever reads of it decides what comes next.
            stopped.fill(0).map_err(|e| failed(&e))?;
        }
        let seconds = self.clock.read(totals.step).map_err(|e| failed(&e))?;
        if said == Said::Unread {
            let reason = "changed no weight: a step before was not finite, and its totals were dropped; read \
                          those of every step";
            return Err(NnErrorKind::Device(format!("the step {reason}")).into());
        }
        let Found { nats, z_loss, labelled, .. } = found;
        Ok(Sums { nats, z_loss, labelled, grad_norm: found.grad_norm(), seconds })
    }

    /// Queues the copy that the host reads.
    pub(super) fn queue_readback(&mut self, totals: &mut CudaTotals) -> Result<(), NnError> {
        let mut readback = match self.readbacks.pop() {
            Some(free) => free,
            None => Readback::new(&totals.memory).map_err(|e| failed(&e))?,
        };
        readback.queue(&totals.memory).map_err(|e| failed(&e))?;
        totals.readback = Some(readback);
        if totals.update == 0 {
            self.clock.update();
        }
        totals.update = self.updates.queue();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_that_changed_nothing_is_an_error_unless_the_reason_was_read() {
        let words = |nats: f64, factor: f32, skipped: i32| {
            let mut last = [0; 8];
            last[..4].copy_from_slice(&factor.to_ne_bytes());
            last[4..].copy_from_slice(&skipped.to_ne_bytes());
            let [z_loss, squares] = [0.5f64, 4.0].map(f64::to_ne_bytes);
            Found::of([nats.to_ne_bytes(), 5u64.to_ne_bytes(), z_loss, squares, last])
        };
        let (fine, wrong) = (words(3.0, -1.0, 0), words(f64::INFINITY, 1.0, 1));
        let behind = words(3.0, 1.0, 1);
        assert_eq!((fine.nats, fine.labelled, fine.grad_norm()), (3.0, 5, 0.4));
        assert_eq!(fine.z_loss, 0.5);
        assert!(!fine.skipped && behind.skipped);
        // Read in their order, two of them behind the next one.
        let mut updates = Updates::default();
        let [first, second, third] = [(); 3].map(|()| updates.queue());
        assert_eq!(updates.read(first, &fine), Said::Nothing);
        assert_eq!(updates.read(second, &wrong), Said::NotFinite);
        assert_eq!(updates.read(third, &behind), Said::Nothing);
        let fourth = updates.queue();
        assert_eq!(updates.read(fourth, &fine), Said::Nothing);
        // The totals of the fifth are dropped; those of the two behind it say so once.
        let [_, sixth, seventh] = [(); 3].map(|()| updates.queue());
        assert_eq!(updates.read(sixth, &behind), Said::Unread);
        assert_eq!(updates.read(seventh, &behind), Said::Nothing);
        let eighth = updates.queue();
        assert_eq!(updates.read(eighth, &behind), Said::Unread);
        // Totals without an update say nothing of updates.
        assert_eq!(updates.read(0, &wrong), Said::Nothing);
    }
}
