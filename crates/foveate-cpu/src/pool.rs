//! The pool of workspace buffers, which a plan keeps between calls.

use std::ops::{Deref, DerefMut};
use std::sync::Mutex;

/// A free list of buffers that outlive a call, so that a training loop allocates once.
#[derive(Debug, Default)]
pub struct Pool(Mutex<Vec<Vec<f32>>>);

impl Pool {
    /// A buffer of `len` floats with undefined contents.
    fn take(&self, len: usize) -> Vec<f32> {
        if len == 0 {
            return Vec::new();
        }
        let mut free = self.0.lock().unwrap_or_else(|e| e.into_inner());
        let best = (0..free.len()).max_by_key(|&i| {
            let capacity = free[i].capacity();
            // The smallest that is large enough, else the largest.
            if capacity >= len { (1, usize::MAX - capacity) } else { (0, capacity) }
        });
        let mut buffer = best.map_or_else(Vec::new, |i| free.swap_remove(i));
        drop(free);
        if buffer.capacity() < len {
            buffer = vec![0.0; len];
        }
        buffer.resize(len, 0.0);
        buffer
    }

    /// A buffer of `len` floats with undefined contents. It returns to the pool when it is dropped.
    pub fn alloc(&self, len: usize) -> PoolBuffer<'_> {
        let mut buffer = self.take(len);
        // A caller that reads what it has not written is found by the tests; not by Miri, which
        // would spend most of its time here.
        if cfg!(debug_assertions) && !cfg!(miri) {
            buffer.fill(f32::NAN);
        }
        PoolBuffer { buffer, pool: self }
    }

    /// Returns a buffer.
    fn give(&self, buffer: Vec<f32>) {
        if buffer.is_empty() {
            return;
        }
        self.0.lock().unwrap_or_else(|e| e.into_inner()).push(buffer);
    }
}

/// A buffer of a [`Pool`], which returns to it when it is dropped.
#[derive(Debug)]
pub struct PoolBuffer<'a> {
    buffer: Vec<f32>,
    pool: &'a Pool,
}

impl Deref for PoolBuffer<'_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.buffer
    }
}

impl DerefMut for PoolBuffer<'_> {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.buffer
    }
}

impl Drop for PoolBuffer<'_> {
    fn drop(&mut self) {
        self.pool.give(std::mem::take(&mut self.buffer));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_gives_buffers_of_the_length_asked_for() {
        let pool = Pool::default();
        pool.give(vec![1.0; 10]);
        pool.give(vec![1.0; 100]);
        assert_eq!(pool.take(7).len(), 7);
        assert_eq!(pool.take(1000).len(), 1000);
        assert_eq!(pool.take(3).len(), 3);
    }
}
