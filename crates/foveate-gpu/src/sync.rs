//! Locks.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A lock that outlives a panic elsewhere, for data that is valid between any two statements.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
