//! Transposition of rows into panels.

use super::level::{LANES, Simd, for_each_level};
use super::product::Matrix;

for_each_level! {
    /// Writes `factor` times the first `n` rows of `rows` as the columns of a matrix, in panels
    /// that follow one another in `into`, `depth` groups each. Rows are read up to `depth`, whole
    /// groups. Columns from `n` on are zero.
    ///
    /// # Panics
    /// When `rows` does not hold them, or its columns are not neighbours.
    pub transpose / transpose_on = transpose_body(
        rows: Matrix<'_>,
        n: usize,
        depth: usize,
        factor: f32,
        into: &mut [f32],
    )
}

#[inline(always)]
fn transpose_body<S: Simd>(
    s: S,
    rows: Matrix<'_>,
    n: usize,
    depth: usize,
    factor: f32,
    into: &mut [f32],
) {
    assert!(rows.column == 1 && depth.is_multiple_of(LANES), "rows are whole groups");
    let factor = s.splat(factor);
    for (p, panel) in into.chunks_exact_mut(depth * LANES).enumerate() {
        let panel = panel.as_chunks_mut::<LANES>().0;
        for (g, columns) in panel.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            let mut block: [S::V; LANES] = std::array::from_fn(|j| {
                let row = p * LANES + j;
                if row < n {
                    let at = row * rows.row + g * LANES;
                    let group = rows.data[at..].first_chunk().expect("rows hold whole groups");
                    s.mul(s.load(group), factor)
                } else {
                    s.splat(0.0)
                }
            });
            step::<S, 8>(s, &mut block);
            step::<S, 4>(s, &mut block);
            step::<S, 2>(s, &mut block);
            step::<S, 1>(s, &mut block);
            for (column, x) in columns.iter_mut().zip(block) {
                s.store(x, column);
            }
        }
    }
}

#[inline(always)]
fn step<S: Simd, const STEP: usize>(s: S, block: &mut [S::V; LANES]) {
    for i in 0..LANES {
        if i & STEP == 0 {
            [block[i], block[i + STEP]] = s.exchange::<STEP>(block[i], block[i + STEP]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::level::Level;
    use super::*;

    #[test]
    fn rows_become_columns_and_the_rest_zero_on_every_level() {
        for (n, depth, stride) in [(1, 16, 16), (16, 16, 19), (37, 48, 48), (48, 32, 40)] {
            let rows: Vec<f32> = (0..n * stride).map(|i| i as f32).collect();
            for &level in Level::available() {
                let mut into = vec![f32::NAN; 3 * LANES * depth];
                transpose_on(level, Matrix::rows(&rows, stride), n, depth, 2.0, &mut into);
                for (at, &got) in into.iter().enumerate() {
                    let (panel, d, l) = (at / (depth * LANES), at / LANES % depth, at % LANES);
                    let row = panel * LANES + l;
                    let want = if row < n { 2.0 * rows[row * stride + d] } else { 0.0 };
                    assert_eq!(got, want, "{level:?}: {d} of row {row}");
                }
            }
        }
    }
}
