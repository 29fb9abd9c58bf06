//! The pool of workspace buffers, which a plan keeps between calls.

use std::ops::{Deref, DerefMut};
use std::sync::Mutex;

/// A free list of buffers that outlive a call, so that a training loop allocates once.
#[derive(Debug, Default)]
pub struct Pool(Mutex<Vec<Vec<f32>>>);

impl Pool {
    /// A buffer of `len` floats or more with undefined contents.
    fn take(&self, len: usize) -> Vec<f32> {
        let mut free = self.0.lock().unwrap_or_else(|e| e.into_inner());
        let best = (0..free.len()).max_by_key(|&i| {
            let own = free[i].len();
            // The smallest that is large enough, else the largest.
            if own >= len { (1, usize::MAX - own) } else { (0, own) }
        });
        let found = best.map(|i| free.swap_remove(i));
        drop(free);
        found.filter(|buffer| buffer.len() >= len).unwrap_or_else(|| vec![0.0; len])
    }

    /// A buffer of `len` floats with undefined contents. It returns to the pool when it is dropped.
    pub fn alloc(&self, len: usize) -> PoolBuffer<'_> {
        let mut buffer = if len == 0 { Vec::new() } else { self.take(len) };
        // A caller that reads what it has not written is found by the tests; not by Miri, which
        // would spend most of its time here.
        if cfg!(debug_assertions) && !cfg!(miri) {
            buffer[..len].fill(f32::NAN);
        }
        PoolBuffer { buffer, len, pool: self }
    }

    /// Bytes of the buffers that are free.
    pub fn bytes(&self) -> usize {
        let free = self.0.lock().unwrap_or_else(|e| e.into_inner());
        free.iter().map(|buffer| buffer.capacity() * size_of::<f32>()).sum()
    }

    /// Floats of each buffer that is free.
    #[cfg(test)]
    pub fn free(&self) -> Vec<usize> {
        self.0.lock().unwrap_or_else(|e| e.into_inner()).iter().map(Vec::capacity).collect()
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
    /// As long as it was made: what is cut off would have to be written again.
    buffer: Vec<f32>,
    len: usize,
    pool: &'a Pool,
}

impl Deref for PoolBuffer<'_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.buffer[..self.len]
    }
}

impl DerefMut for PoolBuffer<'_> {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.buffer[..self.len]
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
    fn a_buffer_has_the_length_asked_for_and_comes_from_the_smallest_that_has_it() {
        let pool = Pool::default();
        drop((pool.alloc(10), pool.alloc(100)));
        let (small, large) = (pool.alloc(7), pool.alloc(3));
        assert_eq!((small.len(), small.buffer.len()), (7, 10));
        assert_eq!((large.len(), large.buffer.len()), (3, 100));
        assert_eq!(pool.alloc(1000).len(), 1000);
        assert_eq!(pool.alloc(0).len(), 0);
    }
}
