//! Conversion to pairs of bf16, from floats and from rows of bf16.
//!
//! A product of pairs sums over the two numbers of a pair. The numbers of a row are pairs already;
//! for a sum over rows, [`interleave`] and [`round_beside`] interleave two rows at a time.

use std::ops::Range;

use half::bf16;

use super::group::{Lanes, Pair, Round, Simd};
use super::level::for_pairs;
use super::operands::Matrix;

for_pairs! {
    /// Rounds `columns`, whole groups, of `rows` rows of floats, `stride` apart, to pairs of
    /// neighbours, `stride / 2` apart.
    pub round_along / round_along_on = along_body(
        from: &[f32],
        rows: usize,
        stride: usize,
        columns: Range<usize>,
        into: &mut [Pair],
    )
}

for_pairs! {
    /// Rounds `columns`, whole groups, of each two of `rows` rows of floats, `stride` apart, to one
    /// row of pairs, as far apart. After the last row, zeros stand in for one more.
    pub round_beside / round_beside_on = beside_body(
        from: &[f32],
        rows: usize,
        stride: usize,
        columns: Range<usize>,
        into: &mut [Pair],
    )
}

for_pairs! {
    /// Makes of each two of `rows`' first `n` rows one row of `dim` pairs. After the last row,
    /// zeros stand in for one more.
    ///
    /// # Panics
    /// When `rows` does not hold them, or its columns are not neighbours.
    pub interleave / interleave_on = interleave_body(
        rows: Matrix<'_, Pair>,
        n: usize,
        dim: usize,
        into: &mut [Pair],
    )
}

#[inline(always)]
fn groups(row: &[f32]) -> &[Lanes] {
    row.as_chunks().0
}

#[inline(always)]
fn along_body<R: Round>(
    r: R,
    from: &[f32],
    rows: usize,
    stride: usize,
    columns: Range<usize>,
    into: &mut [Pair],
) {
    let s = r.floats();
    let half = columns.start / 2..columns.end / 2;
    for (from, into) in from.chunks(stride).zip(into.chunks_mut(stride / 2)).take(rows) {
        let numbers = into[half.clone()].as_flattened_mut().as_chunks_mut().0;
        for (from, to) in groups(&from[columns.clone()]).iter().zip(numbers) {
            r.along(s.load(from), to);
        }
    }
}

#[inline(always)]
fn beside_body<R: Round>(
    r: R,
    from: &[f32],
    rows: usize,
    stride: usize,
    columns: Range<usize>,
    into: &mut [Pair],
) {
    let s = r.floats();
    for (i, into) in into.chunks_mut(stride).take(rows.div_ceil(2)).enumerate() {
        let into = into[columns.clone()].as_chunks_mut().0;
        let row = |row: usize| groups(&from[row * stride..][columns.clone()]);
        let first = row(2 * i);
        if 2 * i + 1 < rows {
            for ((first, second), to) in first.iter().zip(row(2 * i + 1)).zip(into) {
                r.beside(s.load(first), s.load(second), to);
            }
        } else {
            for (first, to) in first.iter().zip(into) {
                r.beside(s.load(first), s.splat(0.0), to);
            }
        }
    }
}

#[inline(always)]
fn interleave_body<R: Round>(
    _: R,
    rows: Matrix<'_, Pair>,
    n: usize,
    dim: usize,
    into: &mut [Pair],
) {
    assert!(rows.column == 1, "the numbers of a row are neighbours");
    for (i, into) in into.chunks_exact_mut(dim).take(n.div_ceil(2)).enumerate() {
        let row = |row: usize| rows.data[row * rows.row..][..dim / 2].as_flattened();
        let first = row(2 * i);
        if 2 * i + 1 < n {
            for ((&a, &b), to) in first.iter().zip(row(2 * i + 1)).zip(into) {
                *to = [a, b];
            }
        } else {
            for (&a, to) in first.iter().zip(into) {
                *to = [a, bf16::ZERO];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::level::Level;
    use super::*;

    const NAN: Pair = [bf16::NAN; 2];

    #[test]
    fn floats_are_rounded_into_pairs_along_and_beside_on_every_level() {
        let (stride, columns) = (64, 16..48);
        let number = |i: usize| ((i * 7919 + 13) as f32 * 0.37).sin() * 1.7;
        for rows in [1, 2, 5, 12] {
            let from: Vec<f32> = (0..rows * stride).map(number).collect();
            let at = |r: usize, j: usize| {
                bf16::from_f32(if r < rows { from[r * stride + j] } else { 0.0 })
            };
            for &level in Level::available() {
                let mut along = vec![NAN; rows * stride / 2];
                round_along_on(level, &from, rows, stride, columns.clone(), &mut along);
                for (i, pair) in along.iter().enumerate() {
                    let (r, j) = (i / (stride / 2), i % (stride / 2) * 2);
                    match columns.contains(&j) {
                        true => assert_eq!(*pair, [at(r, j), at(r, j + 1)], "{}", level.name()),
                        false => assert!(pair[0].is_nan() && pair[1].is_nan()),
                    }
                }
                let mut beside = vec![NAN; rows.div_ceil(2) * stride];
                round_beside_on(level, &from, rows, stride, columns.clone(), &mut beside);
                for (i, pair) in beside.iter().enumerate() {
                    let (r, j) = (i / stride * 2, i % stride);
                    match columns.contains(&j) {
                        true => assert_eq!(*pair, [at(r, j), at(r + 1, j)], "{}", level.name()),
                        false => assert!(pair[0].is_nan() && pair[1].is_nan()),
                    }
                }
            }
        }
    }

    #[test]
    fn two_rows_become_one_of_pairs_on_every_level() {
        for (n, dim) in [(1, 16), (2, 48), (7, 80)] {
            let numbers: Vec<bf16> = (0..n * dim).map(|i| bf16::from_f32(i as f32)).collect();
            let rows = Matrix::rows(numbers.as_chunks::<2>().0, dim / 2);
            for &level in Level::available() {
                let mut into = vec![NAN; n.div_ceil(2) * dim];
                interleave_on(level, rows, n, dim, &mut into);
                for (i, pair) in into.iter().enumerate() {
                    let at = |r: usize| numbers.get(r * dim + i % dim).copied();
                    let row = i / dim * 2;
                    assert_eq!(*pair, [at(row).unwrap(), at(row + 1).unwrap_or(bf16::ZERO)]);
                }
            }
        }
    }
}
