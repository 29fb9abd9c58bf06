//! Host memory for what saves beside the steps copy: made by a thread from before weights are read on, and kept from one
//! save to the next, since making it takes far longer than a copy to it.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};

use foveate_nn::{Blocks, Model, NnError, NnErrorKind, Rule, StateMemory};

use crate::error::TrainError;

/// The memory, with the thread that makes room in it.
pub(super) struct CopyMemory<M> {
    memory: Arc<M>,
    /// Elements that a save writes.
    values: usize,
    /// Tells the thread that nobody waits for it.
    dropped: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<(), NnError>>>,
}

impl<M: StateMemory> CopyMemory<M> {
    /// Begins to make room for the elements `owned` of weights and moments.
    ///
    /// # Errors
    /// When another rank owns one of them, or there can be no thread.
    pub fn begin<B: Blocks<StateMemory = M>>(
        model: &Model<B>,
        rule: &Rule,
        owned: &[Range<usize>],
    ) -> Result<Self, TrainError> {
        let trained = model.layout().trained();
        let kept = 1 + usize::from(rule.keeps_squares());
        let values = |range: &Range<usize>| {
            range.len() + kept * range.end.min(trained).saturating_sub(range.start)
        };
        let values = owned.iter().map(values).sum();
        let bytes = model.state_bytes(rule, owned)?;
        let (memory, dropped) = (Arc::new(model.state_memory()), Arc::new(AtomicBool::new(false)));
        let (room, stop) = (Arc::clone(&memory), Arc::clone(&dropped));
        let thread = Builder::new()
            .name("foveate-save-memory".to_owned())
            .spawn(move || room.reserve(bytes, &stop));
        let thread = thread
            .map_err(|e| TrainError::model(format!("no thread could be started to save: {e}")))?;
        Ok(Self { memory, values, dropped, thread: Some(thread) })
    }

    /// Waits until there is room, and gives it.
    ///
    /// # Errors
    /// When there is none.
    pub fn room(&mut self) -> Result<&Arc<M>, TrainError> {
        let Some(thread) = self.thread.take() else { return Ok(&self.memory) };
        let made = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        made.map_err(|e| {
            let why = match e.kind() {
                NnErrorKind::Memory { .. } => String::new(),
                _ => format!(" ({e})"),
            };
            TrainError::model(format!(
                "there is no memory for a copy of {} values to save while the run goes on{why}; set \
                 train.async_save = false",
                self.values
            ))
        })?;
        Ok(&self.memory)
    }
}

impl<M> Drop for CopyMemory<M> {
    fn drop(&mut self) {
        self.dropped.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use foveate_nn::ProcessMemory;

    use super::*;

    fn made(
        make: impl FnOnce(&AtomicBool) -> Result<(), NnError> + Send + 'static,
    ) -> CopyMemory<ProcessMemory> {
        let dropped = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&dropped);
        let thread = Some(std::thread::spawn(move || make(&stop)));
        CopyMemory { memory: Arc::default(), values: 7, dropped, thread }
    }

    #[test]
    fn memory_that_is_not_there_is_told_with_what_to_do() {
        let told = |kind: NnErrorKind| {
            let mut copies = made(move |_| Err(kind.into()));
            copies.room().unwrap_err().to_string()
        };
        let none = told(NnErrorKind::Memory { name: "a copy", elems: 7 });
        let line = "there is no memory for a copy of 7 values to save while the run goes on; set \
                    train.async_save = false";
        assert_eq!(none, line);
        let refused = told(NnErrorKind::Device("pinning 64 B: no".to_owned()));
        assert_eq!(refused, line.replace("; set", " (pinning 64 B: no); set"));
        let mut copies = made(|_| Ok(()));
        copies.room().unwrap();
        copies.room().unwrap();
    }

    #[test]
    fn who_makes_the_memory_ends_with_the_run() {
        let ended = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&ended);
        drop(made(move |stop| {
            while !stop.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            told.store(true, Ordering::Relaxed);
            Ok(())
        }));
        assert!(ended.load(Ordering::Relaxed));
    }
}
