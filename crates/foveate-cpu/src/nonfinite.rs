//! Products of weights with non-finite values.
//!
//! A weight of 0 takes no value, not even a non-finite one: what a mask hides or dropout drops does
//! not reach `out`. But a product of tiles multiplies every value, and 0 times infinity is NaN.
//! Checking all values beforehand would slow every call down. So the forward checks its results
//! instead: where a row is non-finite although the sum of its weights is finite, it computes the
//! tile again with the products of this module. They multiply a non-finite row of values only by
//! weights that are not 0, and leave finite rows to the products of tiles.

use std::ops::Range;

use crate::pack::Format;
use crate::simd::{self, Matrix, Panels, Part, Rows, Write};

/// Whether one of `rows`, of `dim` numbers each, is non-finite although the sum of its weights, in
/// `sums`, is finite.
pub fn has_nonfinite(rows: &[f32], dim: usize, sums: impl Iterator<Item = f32>) -> bool {
    let has_nonfinite = |(row, sum): (&[f32], f32)| sum.is_finite() && !simd::all_finite(row);
    !simd::all_finite(rows) && rows.chunks_exact(dim).zip(sums).any(has_nonfinite)
}

/// `out += weights·v` for `part` of it, rows of `out` being `stride` apart.
#[cold]
pub fn add<T: Format>(
    out: &mut [f32],
    stride: usize,
    weights: Matrix<'_, T>,
    v: Panels<'_, T>,
    part: &Part,
) {
    let element = |at: usize| &v.data[at * v.depth..][..part.columns.end];
    let is_finite = |at| T::numbers(element(at)).all(f32::is_finite);
    for (depth, finite) in runs(part.depth.clone(), is_finite) {
        if finite {
            let part = Part { depth, ..part.clone() };
            simd::product(out, stride, weights, v, &part, Write::Add);
            continue;
        }
        for (at, r) in depth.flat_map(|at| part.rows.clone().map(move |r| (at, r))) {
            let row = &mut out[r * stride..][part.columns.clone()];
            let weights = T::numbers(&weights.data[r * weights.row + at..][..1]);
            for (i, weight) in weights.enumerate().filter(|(_, weight)| *weight != 0.0) {
                let values = T::numbers(element(at)).skip(i).step_by(T::WIDTH);
                let values = values.skip(part.columns.start);
                row.iter_mut().zip(values).for_each(|(x, value)| *x += weight * value);
            }
        }
    }
}

/// `out[r] += Σ_j p[r * stride + j] · values[j]` for every row `out[r]` of `dim` floats.
#[cold]
pub fn add_in_place(out: &mut [f32], dim: usize, p: &[f32], stride: usize, values: Rows<'_>) {
    let at = |j: usize| values.first + j * values.stride;
    let number = |j: usize, d: usize| values.data.get_f64(at(j) + d) as f32;
    let is_finite = |j: usize| (0..dim).all(|d| number(j, d).is_finite());
    for (keys, finite) in runs(0..values.count, is_finite) {
        if finite {
            let values = Rows { first: at(keys.start), count: keys.len(), ..values };
            simd::add_in_place(out, dim, &p[keys.start..], stride, values);
            continue;
        }
        for (r, row) in out.chunks_exact_mut(dim).enumerate() {
            for j in keys.clone().filter(|j| p[r * stride + j] != 0.0) {
                let weight = p[r * stride + j];
                row.iter_mut().enumerate().for_each(|(d, x)| *x += weight * number(j, d));
            }
        }
    }
}

/// The runs of neighbours that all are finite, or all non-finite.
fn runs(
    all: Range<usize>,
    is_finite: impl Fn(usize) -> bool,
) -> impl Iterator<Item = (Range<usize>, bool)> {
    let mut rest = all.map(move |i| (i, is_finite(i))).peekable();
    std::iter::from_fn(move || {
        let (start, finite) = rest.next()?;
        let mut end = start + 1;
        while rest.next_if(|&(_, other)| other == finite).is_some() {
            end += 1;
        }
        Some((start..end, finite))
    })
}

#[cfg(test)]
mod tests {
    use foveate_tensor::Slice;
    use half::bf16;

    use super::*;
    use crate::simd::{LANES, Pair};

    const KEYS: usize = 9;
    const DIM: usize = 2 * LANES;
    const ODD: [(usize, f32); 4] =
        [(2, f32::NAN), (3, f32::INFINITY), (6, f32::NEG_INFINITY), (8, f32::NAN)];

    /// Weights of two rows, every third of them 0, and values that are not finite in some rows.
    fn numbers() -> ([Vec<f32>; 2], Vec<f32>) {
        let weights = [0, 1].map(|r| {
            (0..KEYS).map(|j| if j % 3 == r { 0.0 } else { 0.25 * (j + 1) as f32 }).collect()
        });
        let mut values: Vec<f32> = (0..KEYS * DIM).map(|i| (i % 23) as f32 - 9.0).collect();
        ODD.iter().for_each(|(j, x)| values[j * DIM + 5] = *x);
        (weights, values)
    }

    /// What becomes of ones when the keys `from..` are added.
    fn expected(row: usize, from: usize) -> Vec<f32> {
        let (weights, values) = numbers();
        let of = |d: usize| {
            let terms = (from..KEYS).filter(|&j| weights[row][j] != 0.0);
            terms.map(|j| weights[row][j] * values[j * DIM + d]).fold(1.0, |sum, x| sum + x)
        };
        (0..DIM).map(of).collect()
    }

    fn assert_same(got: &[f32], row: usize, from: usize) {
        let want = expected(row, from);
        assert!(want.iter().filter(|x| !x.is_finite()).count() <= 1);
        for (d, (got, want)) in got.iter().zip(want).enumerate() {
            assert!(*got == want || got.is_nan() && want.is_nan(), "{row}, {d}: {got} of {want}");
        }
    }

    #[test]
    fn a_row_takes_what_it_has_a_weight_for_and_nothing_else() {
        let (weights, values) = numbers();
        let stride = 12;
        let mut a = vec![0.0; 2 * stride];
        weights.iter().enumerate().for_each(|(r, w)| a[r * stride..][..KEYS].copy_from_slice(w));
        // Pairs are neighbours along a row of weights, and in two rows of values.
        let pairs = |x: &[f32]| -> Vec<Pair> {
            x.as_chunks::<2>().0.iter().map(|pair| pair.map(bf16::from_f32)).collect()
        };
        let at = |j: usize, d: usize| if j < KEYS { values[j * DIM + d] } else { 0.0 };
        let beside: Vec<f32> = (0..KEYS.next_multiple_of(2) * DIM)
            .map(|i| at(i / (2 * DIM) * 2 + i % 2, i / 2 % DIM))
            .collect();
        let (a_pairs, v_pairs) = (pairs(&a), pairs(&beside));
        for from in [0, 4] {
            let part = Part { rows: 0..2, columns: 0..DIM, depth: from..KEYS };
            let mut out = vec![1.0; 2 * DIM];
            let v = Panels::rows(&values, DIM);
            add(&mut out, DIM, Matrix::rows(&a, stride), v, &part);
            out.chunks_exact(DIM).enumerate().for_each(|(r, row)| assert_same(row, r, from));

            let mut out = vec![1.0; 2 * DIM];
            let (a, v) = (Matrix::rows(&a_pairs, stride / 2), Panels::rows(&v_pairs, DIM));
            add(&mut out, DIM, a, v, &part.in_elements::<Pair>());
            out.chunks_exact(DIM).enumerate().for_each(|(r, row)| assert_same(row, r, from));
        }
        let mut out = vec![1.0; 2 * DIM];
        let rows = Rows { data: Slice::F32(&values), first: 0, stride: DIM, count: KEYS };
        add_in_place(&mut out, DIM, &a, stride, rows);
        out.chunks_exact(DIM).enumerate().for_each(|(r, row)| assert_same(row, r, 0));
    }

    #[test]
    fn results_are_tainted_where_they_are_not_finite_though_their_weights_are() {
        let mut rows = vec![1.0; 3 * DIM];
        let sums = [2.0, f32::NAN, 0.0];
        let is = |rows: &[f32]| has_nonfinite(rows, DIM, sums.into_iter());
        assert!(!is(&rows));
        rows[DIM + 3] = f32::NAN;
        assert!(!is(&rows), "a row of NaN scores is rightly NaN");
        rows[2 * DIM + 7] = f32::INFINITY;
        assert!(is(&rows));
    }
}
