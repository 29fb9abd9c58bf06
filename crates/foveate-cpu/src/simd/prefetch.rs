//! Software prefetch.
//!
//! The hardware prefetcher follows long runs of neighbouring lines. It is too late for the short
//! runs that a subtile reads for the first time: a few rows of queries and values, and sixteen rows
//! of keys at a time while they are transposed.

/// Bytes of a cache line.
const LINE: usize = 64;

/// Prefetches `data`.
#[inline]
pub fn prefetch<T>(data: &[T]) {
    // The first element may be inside a line.
    data.chunks(LINE / size_of::<T>()).for_each(|line| prefetch_line(line.as_ptr()));
}

/// A prefetch that is issued in parts, between other work: a core stalls when more than about two
/// dozen lines are outstanding.
pub struct Prefetch<'a, T> {
    data: [&'a [T]; 2],
    /// Elements of a part of each slice.
    parts: [usize; 2],
}

impl<'a, T> Prefetch<'a, T> {
    /// `data` in so many parts.
    pub fn new(data: [&'a [T]; 2], parts: usize) -> Self {
        let line = LINE / size_of::<T>();
        Self { data, parts: data.map(|data| data.len().div_ceil(line).div_ceil(parts) * line) }
    }

    /// Prefetches the next part.
    pub fn issue(&mut self) {
        for (data, &part) in self.data.iter_mut().zip(&self.parts) {
            let (now, later) = data.split_at(part.min(data.len()));
            prefetch(now);
            *data = later;
        }
    }
}

/// Prefetches the line at `at`, which may be any address: the instruction ignores one that is not
/// mapped.
#[inline(always)]
pub fn prefetch_line<T>(at: *const T) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint, which every x86-64 has and which never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = at;
}
