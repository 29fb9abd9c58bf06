//! Signals: Ctrl-C, SIGTERM and SIGUSR1 as a flag that a command looks at where it can stop cleanly,
//! the limit of file sizes as an error of the write.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag;

use crate::failure::Failure;

/// Makes a write past the limit of file sizes (`ulimit -f`) an error, which is told; without a handler
/// its signal ends the process silently.
///
/// # Errors
/// When the system takes no handler.
pub fn writes_past_the_limit_fail() -> Result<(), Failure> {
    flag::register(SIGXFSZ, Arc::default())
        .map(drop)
        .map_err(|e| Failure::new(format!("the limit of file sizes cannot be watched: {e}")))
}

/// Set once the user has pressed Ctrl-C, or a scheduler has sent SIGTERM, or SIGUSR1 as a warning
/// before that. A second of the first two ends the process at once.
#[derive(Clone, Debug)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Starts to watch; once a process.
    ///
    /// # Errors
    /// When the system takes no handler.
    pub fn watch() -> Result<Self, Failure> {
        let pressed = Arc::new(AtomicBool::new(false));
        let watch = |signal| -> io::Result<()> {
            // The handlers of a signal run in this order: the first one sees what an earlier signal
            // has set.
            flag::register_conditional_shutdown(signal, 130, Arc::clone(&pressed))?;
            flag::register(signal, Arc::clone(&pressed)).map(drop)
        };
        [SIGINT, SIGTERM]
            .into_iter()
            .try_for_each(watch)
            .and_then(|()| warned(&pressed))
            .map_err(|e| Failure::new(format!("Ctrl-C and SIGTERM cannot be watched: {e}")))?;
        Ok(Self(pressed))
    }

    /// True once the user wants to stop.
    pub fn pressed(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    /// Goes on, or stops when the user wants so.
    ///
    /// # Errors
    /// [`Failure::Interrupted`] after Ctrl-C or SIGTERM.
    pub fn check(&self) -> Result<(), Failure> {
        if self.pressed() { Err(Failure::Interrupted) } else { Ok(()) }
    }
}

/// Schedulers that are asked to warn a job send SIGUSR1, some of them more than once.
#[cfg(unix)]
fn warned(pressed: &Arc<AtomicBool>) -> io::Result<()> {
    flag::register(signal_hook::consts::SIGUSR1, Arc::clone(pressed)).map(drop)
}

#[cfg(not(unix))]
fn warned(_: &Arc<AtomicBool>) -> io::Result<()> {
    Ok(())
}
