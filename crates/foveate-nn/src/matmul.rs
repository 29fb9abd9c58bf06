//! Matrix products on checked slices: the one place of this crate that hands out pointers.
//!
//! [`matmul`] is split between threads by tiles of the result, never along the summed axis, so its
//! bits do not depend on the number of threads (a test holds `gemm` to that). In a long sum of few
//! results, as the gradient of a weight is, threads would meet after every few hundred terms;
//! [`matmul_deep`] cuts such a sum into parts, by the sizes alone.

use std::cell::Cell;

use gemm::Parallelism;
use rayon::prelude::*;

/// Terms of a part of a sum at least.
const DEPTH: usize = 1024;

/// The most parts of a sum.
const PARTS: usize = 4;

/// The most results whose sums are cut. To add up the parts of more takes longer than threads lose
/// by waiting for each other.
const RESULTS: usize = 1 << 18;

/// Rows of a task that adds up parts.
const ROWS: usize = 16;

/// Terms that `gemm` packs at once of a factor whose terms lie apart, as those of a gradient of a weight
/// do. Nothing is packed of factors whose terms lie side by side.
const PACKED_TERMS: usize = 512;

/// Columns of a result up to which nothing is packed: two of its tiles.
const UNPACKED_COLUMNS: usize = 128;

/// Rows of a result that are computed at once where sums are not cut: 4 MiB are packed. The allocator
/// now and then keeps what was packed for an earlier product, however large it was.
const PACKED_ROWS: usize = 2048;

thread_local! {
    /// The parts of sums but the first, kept between products.
    static OTHERS: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
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

/// Memory of a product besides its operands, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scratch {
    /// While it runs.
    pub packed: usize,
    /// From then on, by every thread that asked for one.
    pub kept: usize,
}

/// What [`matmul_deep`] takes on so many threads.
pub(crate) fn scratch_deep([m, n, k]: [usize; 3], threads: usize) -> Scratch {
    let (parts, f32_bytes) = (parts([m, n, k]), size_of::<f32>());
    let terms = if n > UNPACKED_COLUMNS { k.div_ceil(parts).min(PACKED_TERMS) } else { 0 };
    let rows = if parts > 1 { m } else { m.min(PACKED_ROWS) };
    let part = rows * terms * f32_bytes;
    Scratch { packed: part * parts.min(threads), kept: (parts - 1) * m * n * f32_bytes * threads }
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

/// `into [m, n] += a [m, k] · b [k, n]` for a `k` much larger than `m` and `n`. The bits do not
/// depend on the number of threads, but differ from those of [`matmul`].
///
/// # Panics
/// Those of [`matmul`].
pub(crate) fn matmul_deep(
    [m, n, k]: [usize; 3],
    a: Matrix<'_>,
    b: Matrix<'_>,
    into: &mut [f32],
    stride: usize,
) {
    let parts = parts([m, n, k]);
    if parts < 2 {
        for first in (0..m).step_by(PACKED_ROWS) {
            let a = Matrix { data: &a.data[first * a.row_stride..], ..a };
            let rows = PACKED_ROWS.min(m - first);
            matmul([rows, n, k], a, b, &mut into[first * stride..], stride, true);
        }
        return;
    }
    let depth = k.div_ceil(parts);
    let threads = rayon::current_num_threads().div_ceil(parts);
    let mut kept = OTHERS.take();
    kept.resize(kept.len().max((parts - 1) * m * n), 0.0);
    let others = &mut kept[..(parts - 1) * m * n];
    let sums = others.chunks_exact_mut(m * n).map(|sums| (sums, n, false));
    let sums: Vec<_> = std::iter::once((&mut *into, stride, true)).chain(sums).collect();
    sums.into_par_iter().enumerate().for_each(|(part, (into, stride, accumulate))| {
        let (first, end) = (part * depth, k.min((part + 1) * depth));
        let a = Matrix { data: &a.data[first * a.column_stride..], ..a };
        let b = Matrix { data: &b.data[first * b.row_stride..], ..b };
        multiply([m, n, end - first], a, b, into, stride, accumulate, threads);
    });
    into.par_chunks_mut(stride * ROWS).enumerate().for_each(|(task, into)| {
        for sums in others.chunks_exact(m * n) {
            for (into, sums) in into.chunks_mut(stride).zip(sums[task * ROWS * n..].chunks_exact(n))
            {
                into.iter_mut().zip(sums).for_each(|(x, sum)| *x += sum);
            }
        }
    });
    OTHERS.set(kept);
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
