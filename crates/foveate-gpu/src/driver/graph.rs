//! Work that is recorded once and queued again and again.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr;
use std::sync::Arc;

use super::device::Device;
use super::operations::{self, Operation};
use super::stream::Stream;
use super::sys::Handle;
use crate::error::GpuError;
use crate::trace::{self, Noted, note};

/// A CUDA graph: work that was recorded on a stream, ready to be queued as a whole.
#[derive(Debug)]
pub struct Graph {
    device: Device,
    recorded: Handle,
    ready: Handle,
    /// What errors call it.
    label: Arc<str>,
    operations: Vec<Operation>,
    /// What they do with memory whenever the graph runs.
    notes: Vec<Noted>,
}

// SAFETY: the driver lets every thread use a graph that is not changed, and this one never is.
unsafe impl Send for Graph {}
// SAFETY: as above; concurrent launches are ordered by the driver.
unsafe impl Sync for Graph {}

impl Graph {
    /// Records what `work` queues on `stream`, which does not run. `work` must not wait for the
    /// device or ask it for memory: make the same calls once before, so that all is there. The
    /// memory of recorded calls goes back to their queue's pool while the graph still names it: let
    /// the queue be one of its own ([`crate::Engine::new_queue`]) and used for nothing else from
    /// here on.
    ///
    /// # Errors
    /// Those of `work`, and what the driver does not let a graph hold.
    pub fn record<E: From<GpuError>>(
        stream: &Stream,
        work: impl FnOnce() -> Result<(), E>,
    ) -> Result<Self, E> {
        let driver = stream.device().current()?;
        const OF_THIS_THREAD: u32 = 1;
        // SAFETY: the stream is alive.
        let code = unsafe { (driver.capture_begin)(stream.handle(), OF_THIS_THREAD) };
        driver.check(code, || "beginning to record a graph".into())?;
        // A stream must not be left recording.
        let before = stream.launches().queued();
        let work = || catch_unwind(AssertUnwindSafe(work));
        let ((worked, notes), operations) = operations::noted(|| trace::recorded(work));
        let label = match stream.launches().take_back(before) {
            none if none.is_empty() => "a graph".into(),
            kernels => format!("a graph of {kernels}").into(),
        };
        let mut recorded = ptr::null_mut();
        // SAFETY: `recorded` is valid for a write; recording was begun above.
        let code = unsafe { (driver.capture_end)(stream.handle(), &mut recorded) };
        // A graph that something has spoilt is null and may be destroyed.
        let (device, ready) = (stream.device().clone(), ptr::null_mut());
        let mut graph = Self { device, recorded, ready, label, operations, notes };
        worked.unwrap_or_else(|panic| resume_unwind(panic))?;
        driver.check(code, || "recording a graph".into())?;
        // SAFETY: `ready` is valid for a write, the graph was just recorded.
        let code = unsafe { (driver.graph_instantiate)(&mut graph.ready, recorded, 0) };
        driver.check(code, || "getting a graph ready".into())?;
        Ok(graph)
    }

    /// What it queues, in its order, with all that it was given.
    pub fn operations(&self) -> &[Operation] {
        &self.operations
    }

    /// Queues the work.
    ///
    /// # Errors
    /// Those of the driver.
    ///
    /// # Safety
    /// Everything that the recorded work reads and writes is still where it was: operands,
    /// results, what the plan keeps on the device, and the memory of the queue it was recorded on,
    /// none of which was taken since.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<(), GpuError> {
        self.notes.iter().for_each(|noted| note(|| noted.clone()));
        let driver = self.device.current()?;
        // SAFETY: graph and stream are alive; the caller vouches for what the work uses.
        let code = unsafe { (driver.graph_launch)(self.ready, stream.handle()) };
        driver.check(code, || "queueing a graph".into())?;
        stream.launches().note(&self.label);
        Ok(())
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let Ok(driver) = self.device.current() else { return };
        if !self.ready.is_null() {
            // SAFETY: made in `record`. Work that is queued keeps what it needs.
            unsafe { (driver.graph_ready_destroy)(self.ready) };
        }
        if !self.recorded.is_null() {
            // SAFETY: as above.
            unsafe { (driver.graph_destroy)(self.recorded) };
        }
    }
}
