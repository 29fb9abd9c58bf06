//! What the process says when its memory ends: one line and exit code 1, in the place of an abort.
//!
//! The allocator is the system's. Where that has no memory, what was asked for by
//! `foveate::tensor::memory` is refused, and whoever asked says so; anything else would end the process by
//! an abort, which names nothing but a number of bytes. A system that gives more than it has ends processes
//! in the place of refusing them (`kill -9`): nothing can be said then.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;
use std::panic;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use foveate::tensor::memory::is_asking;

/// The system's allocator, which says when there is no memory.
pub struct Told;

/// Whether it does; the process that renders templates tells whoever started it by its abort.
static TELLS: AtomicBool = AtomicBool::new(false);
/// How what is under way goes on, in words that follow "then".
static GOES_ON: Mutex<String> = Mutex::new(String::new());

/// From here on, memory that ends is told of.
pub fn watch() {
    TELLS.store(true, Ordering::Relaxed);
    let before = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        let message = panic.payload().downcast_ref::<String>();
        // A thread that the system has started has no memory for the stack of its handlers of signals.
        if message.is_some_and(|m| m.starts_with("failed to allocate an alternative stack")) {
            end(None);
        }
        before(panic);
    }));
}

/// How what is under way can go on once there is memory, in words that follow "then".
pub fn goes_on(how: String) {
    *GOES_ON.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = how;
}

/// What was allocated; without it, and where nobody asked whether it is there, the end of the process.
fn found(at: *mut u8, bytes: usize) -> *mut u8 {
    if at.is_null() && !is_asking() && TELLS.load(Ordering::Relaxed) {
        end(Some(bytes));
    }
    at
}

/// Ends the process. What it says takes no memory.
fn end(bytes: Option<usize>) -> ! {
    // Held until the process is gone: one thread says it.
    let mut to = std::io::stderr().lock();
    let _ = match bytes {
        Some(bytes) => write!(to, "error: there is no memory for {bytes} B more"),
        None => write!(to, "error: there is no memory for one more thread"),
    };
    let _ = write!(
        to,
        ": end what else takes memory, raise the limit of this process (ulimit -v), or ask for less"
    );
    if let Ok(how) = GOES_ON.try_lock()
        && !how.is_empty()
    {
        let _ = write!(to, "; then {how}");
    }
    let _ = writeln!(to);
    signal_hook::low_level::exit(1)
}

// SAFETY: every call is the system's, with the same arguments, and what it returns is returned or the process
// ends.
unsafe impl GlobalAlloc for Told {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise is the system's.
        found(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise is the system's.
        found(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // SAFETY: the caller's promise is the system's.
        found(unsafe { System.realloc(at, layout, bytes) }, bytes)
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is the system's.
        unsafe { System.dealloc(at, layout) }
    }
}
