//! A save that goes on beside the steps: a thread that writes what was copied.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use crate::checkpoint::{Save, Written};
use crate::error::TrainError;

/// A save that goes on beside the steps.
pub(super) struct Pending {
    pub save: Save,
    pub step: u64,
    pub began: Instant,
    /// How long the steps waited.
    pub waited: Duration,
    /// Tells the thread that nobody waits for it.
    dropped: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<Written, TrainError>>>,
}

impl Pending {
    /// Writes what was copied, by `write`, on a thread.
    ///
    /// # Errors
    /// When there can be no thread.
    pub fn start(
        save: Save,
        step: u64,
        began: Instant,
        dropped: Arc<AtomicBool>,
        write: impl FnOnce() -> Result<Written, TrainError> + Send + 'static,
    ) -> Result<Self, TrainError> {
        let thread = Builder::new().name("foveate-save".to_owned()).spawn(write);
        let thread = thread
            .map_err(|e| TrainError::model(format!("no thread could be started to save: {e}")))?;
        Ok(Self { save, step, began, waited: began.elapsed(), dropped, thread: Some(thread) })
    }

    /// Waits for what the thread has written.
    pub fn written(&mut self) -> Result<Written, TrainError> {
        let thread = self.thread.take().expect("it is waited for once");
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// Whether its thread has written, or failed to.
    pub fn is_done(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.dropped.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
