//! Matrix products on checked slices: the one place of this crate that hands out pointers.
//!
//! [`matmul`] is split between threads by tiles of the result, never along the summed axis, so its
//! bits do not depend on the number of threads (a test holds `gemm` to that). In a long sum of few
//! results, as the gradient of a weight is, threads would meet after every few hundred terms;
//! [`matmul_deep`] cuts such a sum into parts, by the sizes alone.

use std::cell::Cell;
use std::hint::black_box;
use std::ops::Range;

use gemm::Parallelism;
use rayon::prelude::*;

/// Terms of a part of a sum at least.
const DEPTH: usize = 1024;

/// The most parts of a sum.
const PARTS: usize = 4;

/// The most results whose sums are cut. To add up the parts of more takes longer than threads lose
/// by waiting for each other.
const RESULTS: usize = 1 << 19;

/// Rows of a task that adds up parts.
const ROWS: usize = 16;

/// Terms that are added to a deep product at once.
const TERMS: usize = 256;

/// Rows of a deep product that are computed at once: with [`TERMS`], what a core's cache holds.
const BLOCK_ROWS: Range<usize> = 64..512;

/// Rows, and terms, that `gemm` packs at once at most: eight tiles of 64 rows with AVX-512, less elsewhere.
const PACKED: usize = 512;

/// Floats behind every row of copied terms: without them, rows whose length is a power of two would
/// share few places of the cache.
const GAP: usize = 16;

/// Floats of a line of the cache.
const LINE: usize = 16;

thread_local! {
    /// Terms of the left factor, kept between products.
    static COPIED: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// Columns of a deep product that are computed at once: two tiles of `gemm`, the most that keep it on x86
/// from packing the copied terms once more, as `tests/allocations.rs` sees. It would allocate for that, so
/// that memory grows from product to product: an aligned allocation does not fit the place that the last
/// one has left.
fn columns() -> usize {
    #[cfg(target_arch = "x86_64")]
    if !is_x86_feature_detected!("avx512f") {
        return 32;
    }
    128
}

/// A matrix in a slice; strides are in elements.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    /// Where its elements lie.
    pub data: &'a [f32],
    /// From a row to the next.
    pub row_stride: usize,
    /// From a column to the next.
    pub column_stride: usize,
}

/// Bytes that [`matmul_deep`] keeps on so many threads.
pub(crate) fn scratch_deep([m, n, k]: [usize; 3], threads: usize) -> usize {
    let parts = parts([m, n, k]);
    let blocks = row_blocks(m, parts, threads);
    let copied = (m.div_ceil(blocks) + GAP) * TERMS;
    // On this architecture `gemm` packs whatever it is given.
    let packed = if cfg!(target_arch = "aarch64") { copied } else { 0 };
    ((parts - 1) * m * n + (copied + packed) * threads) * size_of::<f32>()
}

/// Bytes that `gemm` keeps on so many threads of a weight `[m, n]` and its like: what it packs of one factor
/// at once, in a buffer for each thread.
pub(crate) fn packed([m, n]: [usize; 2], threads: usize) -> usize {
    m.min(PACKED) * n.min(PACKED) * threads * size_of::<f32>()
}

/// Into how many blocks of rows [`matmul_deep`] cuts every part of a sum.
fn row_blocks(m: usize, parts: usize, threads: usize) -> usize {
    let wanted = threads.div_ceil(parts).min(m / BLOCK_ROWS.start);
    wanted.max(m.div_ceil(BLOCK_ROWS.end)).max(1)
}

/// Into how many parts [`matmul_deep`] cuts a sum.
fn parts([m, n, k]: [usize; 3]) -> usize {
    match (1..=RESULTS).contains(&m.saturating_mul(n)) {
        true => (k / DEPTH).clamp(1, PARTS),
        false => 1,
    }
}

impl<'a> Matrix<'a> {
    /// Row-major with rows `stride` apart.
    pub fn rows(data: &'a [f32], stride: usize) -> Self {
        Self { data, row_stride: stride, column_stride: 1 }
    }

    /// The transpose of a row-major matrix with rows `stride` apart.
    pub fn transposed(data: &'a [f32], stride: usize) -> Self {
        Self { data, row_stride: 1, column_stride: stride }
    }

    /// Whether `rows × columns` elements, at least one, lie inside the slice.
    fn holds(&self, rows: usize, columns: usize) -> bool {
        let row = (rows - 1).checked_mul(self.row_stride);
        let column = (columns - 1).checked_mul(self.column_stride);
        let end = row.zip(column).and_then(|(row, column)| row.checked_add(column));
        end.is_some_and(|end| end < self.data.len())
    }
}

/// `into [m, n] = a [m, k] · b [k, n]`, added to what is there when `accumulate`. `into` is
/// row-major with rows `stride` apart.
///
/// # Panics
/// When a factor or the result does not fit its slice, rows of the result overlap, or `k` is 0.
pub fn matmul(
    [m, n, k]: [usize; 3],
    a: Matrix<'_>,
    b: Matrix<'_>,
    into: &mut [f32],
    stride: usize,
    accumulate: bool,
) {
    multiply([m, n, k], a, b, into, stride, accumulate, rayon::current_num_threads());
}

/// `into [m, n] += aᵀ · b` of `a [k, m]` and `b [k, n]` for a `k` much larger than `m` and `n`, all
/// row-major. The bits do not depend on the number of threads, but differ from those of [`matmul`]. `kept`
/// holds the parts of cut sums but the first, and grows to the most that a product needs.
///
/// # Panics
/// When a factor or the result does not fit its slice.
pub(crate) fn matmul_deep(
    [m, n, k]: [usize; 3],
    a: &[f32],
    b: &[f32],
    into: &mut [f32],
    kept: &mut Vec<f32>,
) {
    if m * n == 0 {
        return;
    }
    let (parts, threads) = (parts([m, n, k]), rayon::current_num_threads());
    let (blocks, depth) = (row_blocks(m, parts, threads), k.div_ceil(parts));
    let (threads, columns) = (threads.div_ceil(parts * blocks), columns());
    kept.resize(kept.len().max((parts - 1) * m * n), 0.0);
    let (into, others) = (&mut into[..m * n], &mut kept[..(parts - 1) * m * n]);
    let mut tasks = Vec::with_capacity(parts * blocks);
    let sums = std::iter::once(&mut *into).chain(others.chunks_exact_mut(m * n));
    for (part, mut sums) in sums.enumerate() {
        for block in 0..blocks {
            let rows = m * block / blocks..m * (block + 1) / blocks;
            let (own, behind) = sums.split_at_mut(rows.len() * n);
            sums = behind;
            tasks.push((rows, part * depth..k.min((part + 1) * depth), own, part == 0));
        }
    }
    tasks.into_par_iter().for_each(|(rows, terms, into, mut accumulate)| {
        let stride = rows.len() + GAP;
        let mut copied = COPIED.take();
        copied.resize(copied.len().max(TERMS * stride), 0.0);
        for first in terms.clone().step_by(TERMS) {
            let count = TERMS.min(terms.end - first);
            // Both factors are read once in the order in which they lie, since `gemm` then goes through
            // the left one eight columns at a time, and would wait for memory at every row.
            let left = a[first * m..][..count * m].chunks_exact(m);
            for (to, from) in copied.chunks_exact_mut(stride).zip(left) {
                to[..rows.len()].copy_from_slice(&from[rows.clone()]);
            }
            let right = &b[first * n..][..count * n];
            // Of the right one a value in each cache line suffices: this read exists to bring it into
            // the cache, and its result is not used.
            black_box(right.iter().step_by(LINE).fold(0, |bits, x| bits | x.to_bits()));
            let left = Matrix::transposed(&copied, stride);
            for column in (0..n).step_by(columns) {
                let (right, into) = (Matrix::rows(&right[column..], n), &mut into[column..]);
                let size = [rows.len(), columns.min(n - column), count];
                multiply(size, left, right, into, n, accumulate, threads);
            }
            accumulate = true;
        }
        COPIED.set(copied);
    });
    into.par_chunks_mut(ROWS * n).enumerate().for_each(|(task, into)| {
        for sums in others.chunks_exact(m * n) {
            into.iter_mut().zip(&sums[task * ROWS * n..]).for_each(|(x, sum)| *x += sum);
        }
    });
}

/// [`matmul`] on at most so many threads.
fn multiply(
    [m, n, k]: [usize; 3],
    a: Matrix<'_>,
    b: Matrix<'_>,
    into: &mut [f32],
    stride: usize,
    accumulate: bool,
    threads: usize,
) {
    if m == 0 || n == 0 {
        return;
    }
    let end = (m - 1).checked_mul(stride).and_then(|rows| rows.checked_add(n));
    let fits = end.is_some_and(|end| end <= into.len());
    assert!(fits && stride >= n, "the result fits its slice");
    assert!(k > 0 && a.holds(m, k) && b.holds(k, n), "the factors fit their slices");
    let parallelism = if threads > 1 { Parallelism::Rayon(threads) } else { Parallelism::None };
    // SAFETY: all elements addressed are inside the slices by the asserts above, `into` is
    // borrowed exclusively and its rows do not overlap.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            into.as_mut_ptr(),
            1,
            stride as isize,
            accumulate,
            a.data.as_ptr(),
            a.column_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.column_stride as isize,
            b.row_stride as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
}
