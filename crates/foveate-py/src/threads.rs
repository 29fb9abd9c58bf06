//! The threads that compute: as many as torch is set to use, in a pool of this process.
//!
//! The first call of some size makes the pool. A pool does not outlive a `fork`: the child has none of
//! its threads, so it makes its own. Small calls stay on the thread that makes them: to wake another one
//! takes longer than they do. Results are the same bits in either.

use std::panic::{AssertUnwindSafe, catch_unwind};
#[cfg(debug_assertions)]
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use foveate::cpu::threads::on_this_thread;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

struct Kept {
    process: u32,
    threads: usize,
    pool: Arc<ThreadPool>,
}

/// Locked with the GIL held only, as it is by the thread that forks: a child never finds it locked by a
/// thread that it does not have.
static KEPT: Mutex<Option<Kept>> = Mutex::new(None);

/// Multiplications that are done on the calling thread: some 20 µs.
const SMALL: usize = 1 << 18;

/// Runs `call`, of about `multiplications`, on `threads` threads, without the GIL.
///
/// # Errors
/// When the operating system gives no thread, or when `call` panics: nothing unwinds into Python, and
/// the threads serve the next call.
pub fn run<T: Send>(
    py: Python<'_>,
    threads: usize,
    multiplications: usize,
    call: impl FnOnce() -> T + Send,
) -> PyResult<T> {
    let call = || computed(call);
    if threads <= 1 || multiplications < SMALL {
        return py.detach(|| on_this_thread(call));
    }
    let pool = pool(threads)?;
    py.detach(|| pool.install(call))
}

/// What `call` gives.
///
/// # Errors
/// A `RuntimeError` when it panics. What a panic leaves half-written is the call's own, which nobody sees.
pub fn caught<T>(call: impl FnOnce() -> T) -> PyResult<T> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|panic| {
        let said = panic.downcast_ref::<&str>().copied();
        let said = said.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        let said = said.unwrap_or("it panicked");
        PyRuntimeError::new_err(format!("a bug in Foveate, please report it: {said}"))
    })
}

/// [`caught`] of what computes, which tests let panic.
///
/// # Errors
/// Those of [`caught`].
pub fn computed<T>(call: impl FnOnce() -> T) -> PyResult<T> {
    caught(|| {
        #[cfg(debug_assertions)]
        assert!(!PANIC_NEXT.swap(false, Ordering::Relaxed), "injected by a test");
        call()
    })
}

#[cfg(debug_assertions)]
static PANIC_NEXT: AtomicBool = AtomicBool::new(false);

/// The next call that computes panics; for tests, and in builds for these alone.
#[cfg(debug_assertions)]
#[pyfunction]
pub fn panic_next() {
    PANIC_NEXT.store(true, Ordering::Relaxed);
}

/// A pool of `threads` threads. The caller has the GIL.
fn pool(threads: usize) -> PyResult<Arc<ThreadPool>> {
    let process = std::process::id();
    let mut kept = KEPT.lock().unwrap_or_else(|e| e.into_inner());
    if let Some(k) = &*kept
        && (k.process, k.threads) == (process, threads)
    {
        return Ok(k.pool.clone());
    }
    let pool = ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|i| format!("foveate-{i}"))
        .build()
        .map_err(|e| PyRuntimeError::new_err(format!("cannot start {threads} threads: {e}")))?;
    let pool = Arc::new(pool);
    let before = kept.replace(Kept { process, threads, pool: pool.clone() });
    // Dropping a pool ends its threads, which are another process's after a fork.
    if let Some(before) = before
        && before.process != process
    {
        std::mem::forget(before.pool);
    }
    Ok(pool)
}
