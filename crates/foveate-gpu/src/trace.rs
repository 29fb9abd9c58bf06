//! What work does with device memory, in its order: for whoever checks that order, in a test or in a
//! debugger. Nothing is noted until somebody asks, and then the work of every thread and device is.
//!
//! Work of one stream runs in the order of its notes. That of two streams does so only where the later one
//! follows a mark behind the earlier one, or the host has seen that mark reached before it queued more.

use std::cell::RefCell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::abi::Address;
use crate::sync::lock;

/// Something that happened to device memory, or that the host did for work on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Noted {
    /// A pool gave memory to somebody, from an address on.
    Taken {
        /// Where it starts.
        address: Address,
        /// Its length.
        bytes: usize,
    },
    /// It went back.
    Given {
        /// Where it starts.
        address: Address,
    },
    /// The driver gave memory that it did not give to anybody else.
    Allocated {
        /// Where it starts.
        address: Address,
        /// Its length.
        bytes: usize,
    },
    /// Work was queued that reads from the first address up to the second one.
    Read {
        /// The operand.
        name: String,
        /// Its addresses.
        span: (Address, Address),
        /// The stream it was queued on ([`crate::driver::Stream::number`]).
        stream: u64,
    },
    /// Work was queued that writes there, or reads and writes.
    Written {
        /// The operand.
        name: String,
        /// Its addresses.
        span: (Address, Address),
        /// The stream it was queued on.
        stream: u64,
    },
    /// An event marks the present end of a stream's work.
    Marked {
        /// The event, by a number of its own.
        event: u64,
        /// The stream.
        stream: u64,
    },
    /// What is queued on a stream from here on waits for what an event marks.
    Follows {
        /// The stream.
        stream: u64,
        /// The event.
        event: u64,
    },
    /// The host has seen that what an event marks is done.
    Reached {
        /// The event.
        event: u64,
    },
    /// The host waited.
    Waited {
        /// For what.
        what: String,
    },
    /// A plan was made.
    Planned {
        /// The queries and the keys of a row that it expects.
        lengths: [usize; 2],
    },
    /// A plan was made again, for captured buffers of other lengths.
    Bound {
        /// Their names and shapes.
        buffers: Vec<(String, Vec<usize>)>,
    },
}

/// The number of the host among streams: what it reads and writes itself is done at once.
pub const HOST: u64 = 0;

static ON: AtomicBool = AtomicBool::new(false);
static NOTES: Mutex<Vec<Noted>> = Mutex::new(Vec::new());

/// Notes from here on, and forgets what was noted.
pub fn start() {
    lock(&NOTES).clear();
    ON.store(true, Ordering::Release);
}

/// What was noted since [`start`], and the end of it.
pub fn stop() -> Vec<Noted> {
    ON.store(false, Ordering::Release);
    std::mem::take(&mut lock(&NOTES))
}

thread_local! {
    /// What this thread does while a graph is recorded, which happens when the graph runs.
    static RECORDED: RefCell<Option<Vec<Noted>>> = const { RefCell::new(None) };
}

/// What this thread notes in `work`, which is kept for each time that the work runs and noted nowhere else.
pub(crate) fn recorded<T>(work: impl FnOnce() -> T) -> (T, Vec<Noted>) {
    let before = RECORDED.replace(Some(Vec::new()));
    let done = work();
    (done, RECORDED.replace(before).unwrap_or_default())
}

/// Whether somebody asked.
pub(crate) fn is_noting() -> bool {
    ON.load(Ordering::Acquire) || RECORDED.with_borrow(Option::is_some)
}

/// Notes what happened, where somebody asked.
pub fn note(make: impl FnOnce() -> Noted) {
    if !is_noting() {
        return;
    }
    let noted = make();
    let elsewhere = RECORDED.with_borrow_mut(|recorded| match recorded {
        Some(recorded) => {
            recorded.push(noted);
            None
        }
        None => Some(noted),
    });
    lock(&NOTES).extend(elsewhere);
}
