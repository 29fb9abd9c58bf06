//! Matrix products on checked slices: the one place of this crate that hands out pointers.
//!
//! The product is split between threads by tiles of the result, never along the summed axis, so
//! its bits do not depend on the number of threads (a test holds `gemm` to that).

use gemm::Parallelism;

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
    if m == 0 || n == 0 {
        return;
    }
    let end = (m - 1).checked_mul(stride).and_then(|rows| rows.checked_add(n));
    let fits = end.is_some_and(|end| end <= into.len());
    assert!(fits && stride >= n, "the result fits its slice");
    assert!(k > 0 && a.holds(m, k) && b.holds(k, n), "the factors fit their slices");
    let threads = rayon::current_num_threads();
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
