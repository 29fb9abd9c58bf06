//! Ctrl-C as a flag that a command looks at where it can stop cleanly.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::failure::Failure;

/// Set once the user has pressed Ctrl-C. A second press ends the process at once.
#[derive(Clone, Debug)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Starts to watch; once a process.
    ///
    /// # Errors
    /// When the system takes no handler.
    pub fn watch() -> Result<Self, Failure> {
        let pressed = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&pressed);
        let handler = move || {
            if flag.swap(true, Ordering::SeqCst) {
                std::process::exit(130);
            }
        };
        ctrlc::set_handler(handler)
            .map_err(|e| Failure::new(format!("Ctrl-C cannot be watched: {e}")))?;
        Ok(Self(pressed))
    }

    /// True once the user wants to stop.
    pub fn pressed(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    /// Goes on, or stops when the user wants so.
    ///
    /// # Errors
    /// [`Failure::Interrupted`] after Ctrl-C.
    pub fn check(&self) -> Result<(), Failure> {
        if self.pressed() { Err(Failure::Interrupted) } else { Ok(()) }
    }
}
