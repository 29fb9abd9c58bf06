//! Asking for memory before it is needed.
//!
//! Hardware foresees long runs of neighbouring lines. What a short strip reads for the first time
//! it sees too late: a few rows of queries and values, sixteen rows at a time of keys to transpose.

/// Bytes of a cache line.
const LINE: usize = 64;

/// Asks for `data`, which is read soon.
#[inline]
pub fn prefetch<T>(data: &[T]) {
    // From its first element on, which may be inside a line.
    data.chunks(LINE / size_of::<T>()).for_each(|line| prefetch_line(line.as_ptr()));
}

/// What is asked for a part at a time, between other work: a core waits for those beyond about two
/// dozen lines that it has asked for and not got.
pub struct Ahead<'a, T> {
    data: [&'a [T]; 2],
    /// Elements of a part of each.
    parts: [usize; 2],
}

impl<'a, T> Ahead<'a, T> {
    /// `data` in so many parts.
    pub fn new(data: [&'a [T]; 2], parts: usize) -> Self {
        let line = LINE / size_of::<T>();
        Self { data, parts: data.map(|data| data.len().div_ceil(line).div_ceil(parts) * line) }
    }

    /// Asks for the next part.
    pub fn ask(&mut self) {
        for (data, &part) in self.data.iter_mut().zip(&self.parts) {
            let (now, later) = data.split_at(part.min(data.len()));
            prefetch(now);
            *data = later;
        }
    }
}

/// Asks for the line at `at`, which may be anywhere: an address without memory is passed over.
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
