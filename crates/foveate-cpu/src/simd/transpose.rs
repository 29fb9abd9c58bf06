//! Transposition of rows into panels.

use super::group::{LANES, Pair, Simd};
use super::level::for_each_level;
use super::operands::Matrix;
use super::prefetch::prefetch_line;

/// An element as wide as a lane.
trait Lane: Copy {
    /// The padding.
    const ZERO: Self;

    fn load<S: Simd>(s: S, from: &[Self; LANES]) -> S::V;
    fn store<S: Simd>(s: S, x: S::V, to: &mut [Self; LANES]);
}

impl Lane for f32 {
    const ZERO: f32 = 0.0;

    #[inline(always)]
    fn load<S: Simd>(s: S, from: &[f32; LANES]) -> S::V {
        s.load(from)
    }

    #[inline(always)]
    fn store<S: Simd>(s: S, x: S::V, to: &mut [f32; LANES]) {
        s.store(x, to);
    }
}

impl Lane for Pair {
    const ZERO: Pair = [half::bf16::ZERO; 2];

    #[inline(always)]
    fn load<S: Simd>(s: S, from: &[Pair; LANES]) -> S::V {
        s.load(&from.map(|pair| f32::from_bits(bytemuck::cast(pair))))
    }

    #[inline(always)]
    fn store<S: Simd>(s: S, x: S::V, to: &mut [Pair; LANES]) {
        let mut lanes = [0.0; LANES];
        s.store(x, &mut lanes);
        *to = lanes.map(|x| bytemuck::cast(x.to_bits()));
    }
}

for_each_level! {
    /// Writes the first `n` rows of `rows` as the columns of a matrix, in panels that follow one
    /// another in `into`, `depth` groups each. Columns from `n` on are zero.
    ///
    /// # Panics
    /// When `rows` does not hold `depth` elements of each, or they are not neighbours.
    pub transpose / transpose_on = transpose_body(
        rows: Matrix<'_>,
        n: usize,
        depth: usize,
        into: &mut [f32],
    )
}

for_each_level! {
    /// [`transpose`] for pairs.
    pub transpose_pairs / transpose_pairs_on = transpose_body(
        rows: Matrix<'_, Pair>,
        n: usize,
        depth: usize,
        into: &mut [Pair],
    )
}

#[inline(always)]
fn transpose_body<S: Simd, T: Lane>(
    s: S,
    rows: Matrix<'_, T>,
    n: usize,
    depth: usize,
    into: &mut [T],
) {
    assert!(rows.column == 1, "the elements of a row are neighbours");
    for (p, panel) in into.chunks_exact_mut(depth * LANES).enumerate() {
        let ahead = rows.data.as_ptr().wrapping_add((p + 1) * LANES * rows.row);
        for (g, columns) in panel.as_chunks_mut::<LANES>().0.chunks_mut(LANES).enumerate() {
            // Prefetch the same lines of the next panel's rows.
            (0..LANES).for_each(|j| prefetch_line(ahead.wrapping_add(j * rows.row + g * LANES)));
            let mut block = [s.splat(0.0); LANES];
            for (row, column) in (p * LANES..n).zip(&mut block) {
                let from = &rows.data[row * rows.row + g * LANES..][..columns.len()];
                *column = match from.first_chunk() {
                    Some(group) => T::load(s, group),
                    None => {
                        let mut group = [T::ZERO; LANES];
                        group[..from.len()].copy_from_slice(from);
                        T::load(s, &group)
                    }
                };
            }
            step::<S, 8>(s, &mut block);
            step::<S, 4>(s, &mut block);
            step::<S, 2>(s, &mut block);
            step::<S, 1>(s, &mut block);
            for (column, x) in columns.iter_mut().zip(block) {
                T::store(s, x, column);
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
    use half::bf16;

    use super::super::level::Level;
    use super::*;

    #[test]
    fn rows_become_columns_and_the_rest_zero_on_every_level() {
        for (n, depth, stride) in [(1, 16, 16), (16, 16, 19), (37, 48, 48), (48, 40, 40)] {
            let rows: Vec<f32> = (0..n * stride).map(|i| i as f32).collect();
            let halves: Vec<Pair> = rows.iter().map(|&x| [x, -x].map(bf16::from_f32)).collect();
            for &level in Level::available() {
                let mut into = vec![f32::NAN; 3 * LANES * depth];
                transpose_on(level, Matrix::rows(&rows, stride), n, depth, &mut into);
                let mut pairs = vec![[bf16::NAN; 2]; 3 * LANES * depth];
                transpose_pairs_on(level, Matrix::rows(&halves, stride), n, depth, &mut pairs);
                for (at, (&got, pair)) in into.iter().zip(pairs).enumerate() {
                    let (panel, d, l) = (at / (depth * LANES), at / LANES % depth, at % LANES);
                    let row = panel * LANES + l;
                    let want = if row < n { rows[row * stride + d] } else { 0.0 };
                    assert_eq!(got, want, "{level:?}: {d} of row {row}");
                    let want = if row < n { halves[row * stride + d] } else { Pair::ZERO };
                    assert_eq!(pair, want, "{level:?}: {d} of row {row}");
                }
            }
        }
    }
}
