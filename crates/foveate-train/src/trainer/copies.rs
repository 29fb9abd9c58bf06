//! Host memory for what saves beside the steps copy: made by a thread from before weights are read on, and kept from one
//! save to the next, since making it takes far longer than a copy to it.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

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
        #[cfg(test)]
        let planted = tests::PLANTED.get();
        let make = move || {
            #[cfg(test)]
            match planted {
                tests::Planted::Nothing => {}
                tests::Planted::Refusal => {
                    return Err(NnErrorKind::Device("planted".to_owned()).into());
                }
                tests::Planted::Wait => {
                    while !stop.load(Ordering::Relaxed) {
                        std::thread::yield_now();
                    }
                }
            }
            room.reserve(bytes, &stop)
        };
        let thread = Builder::new().name("foveate-save-memory".to_owned()).spawn(make);
        let thread = thread
            .map_err(|e| TrainError::model(format!("no thread could be started to save: {e}")))?;
        Ok(Self { memory, values, dropped, thread: Some(thread) })
    }

    /// Whether it was waited for.
    pub fn is_awaited(&self) -> bool {
        self.thread.is_none()
    }

    /// [`Self::wait`] unless `ends` says that nobody is to wait any longer; none then.
    pub fn wait_unless(&mut self, ends: &mut dyn FnMut() -> bool) -> Option<Result<(), String>> {
        while !self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
            if ends() {
                return None;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Some(self.wait())
    }

    /// Waits until there is room, once.
    ///
    /// # Errors
    /// In words that follow "since", when there is none: nothing can be copied then.
    pub fn wait(&mut self) -> Result<(), String> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        let made = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        made.map_err(|e| {
            let why = match e.kind() {
                NnErrorKind::Memory { .. } => String::new(),
                _ => format!(" ({e})"),
            };
            let values = self.values;
            format!(
                "there is no memory for a copy of {values} values to save while the run goes on{why}"
            )
        })
    }

    /// The memory, which was [waited for](Self::wait).
    pub fn room(&self) -> &Arc<M> {
        &self.memory
    }
}

/// What ends a run that is to save beside its steps, and cannot, since `why`.
pub(super) fn refused(why: &str) -> TrainError {
    TrainError::model(format!("{why}; set train.async_save = false"))
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
pub(super) mod tests {
    use std::cell::Cell;

    use foveate_nn::ProcessMemory;

    use super::*;

    /// What becomes of memory that a thread asks for.
    #[derive(Clone, Copy)]
    pub enum Planted {
        Nothing,
        /// There is none.
        Refusal,
        /// It takes until nobody waits for it.
        Wait,
    }

    thread_local! {
        pub static PLANTED: Cell<Planted> = const { Cell::new(Planted::Nothing) };
    }

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
            refused(&copies.wait().unwrap_err()).to_string()
        };
        let none = told(NnErrorKind::Memory { name: "a copy", elems: 7 });
        let line = "there is no memory for a copy of 7 values to save while the run goes on; set \
                    train.async_save = false";
        assert_eq!(none, line);
        let pinned = told(NnErrorKind::Device("pinning 64 B: no".to_owned()));
        assert_eq!(pinned, line.replace("; set", " (pinning 64 B: no); set"));
        let mut copies = made(|_| Ok(()));
        copies.wait().unwrap();
        assert!(copies.is_awaited());
        copies.wait().unwrap();
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
