//! The threads that compute: as many as torch is set to use, in a pool of this process.
//!
//! The first call makes the pool. A pool does not outlive a `fork`: the child has none of its
//! threads, so it makes its own.

use std::sync::{Arc, Mutex};

use pyo3::PyResult;
use pyo3::exceptions::PyRuntimeError;
use rayon::{ThreadPool, ThreadPoolBuilder};

struct Kept {
    process: u32,
    threads: usize,
    pool: Arc<ThreadPool>,
}

static KEPT: Mutex<Option<Kept>> = Mutex::new(None);

/// A pool of `threads` threads.
///
/// # Errors
/// When the operating system gives no thread.
pub fn pool(threads: usize) -> PyResult<Arc<ThreadPool>> {
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
