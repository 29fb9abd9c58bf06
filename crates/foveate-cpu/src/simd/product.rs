//! Products of tiles.
//!
//! All five products of attention are `c (+)= a·b` with small `a` and `c` and a `b` that is used
//! many times, so `b` is packed in [`Panels`] of sixteen columns, row after row. `a` is read in
//! place, by rows or by columns. A register block of `c` (12 rows of 32 columns with AVX-512, 6 of
//! 16 with AVX2 and NEON) accumulates over the whole depth: each step loads one or two groups of
//! `b` and multiplies them by one element of each row of `a`.
//!
//! A caller computes a [`Part`]: a range of rows, columns and depth. So it can leave out what the
//! mask hides in a tile, [`SUBTILE_ROWS`] rows at a time.
//!
//! Every element is summed over its depth from first to last, then multiplied by a factor and
//! written, or added to `c`. Levels differ in how a multiply-add rounds and in nothing else; parts
//! and register blocks do not change the bits.
//!
//! Operands are of an [`Element`]: f32, or a [`Pair`] of bf16 that are neighbours along the depth.
//! One instruction of the levels that have it adds the two exact products of a pair to an f32; the
//! other levels have a scalar version, for tests.

use super::baseline::Baseline;
use super::group::{LANES, Lanes, Pair, RegisterBlock, Simd};
use super::level::{for_each_level, for_pairs};
use super::operands::{Element, Matrix, Panels, Part, Write};

/// Rows of a subtile: whole register blocks on every level, so that a part of so many rows costs no
/// more for each row than a whole tile.
pub const SUBTILE_ROWS: usize = 12;

/// An element that products are compiled for.
pub trait TileProduct: Element {
    /// See [`product`].
    fn product(
        c: &mut [f32],
        stride: usize,
        a: Matrix<'_, Self>,
        b: Panels<'_, Self>,
        part: &Part,
        write: Write,
    );
}

impl TileProduct for f32 {
    #[inline]
    fn product(
        c: &mut [f32],
        stride: usize,
        a: Matrix<'_>,
        b: Panels<'_>,
        part: &Part,
        write: Write,
    ) {
        product_f32(c, stride, a, b, part, write);
    }
}

impl TileProduct for Pair {
    #[inline]
    fn product(
        c: &mut [f32],
        stride: usize,
        a: Matrix<'_, Pair>,
        b: Panels<'_, Pair>,
        part: &Part,
        write: Write,
    ) {
        product_pairs(c, stride, a, b, part, write);
    }
}

/// Instructions that multiply groups of elements.
trait Multiply<T>: Copy {
    /// The instructions for the accumulators.
    type Acc: Simd;
    /// A group of elements in registers.
    type Group: Copy;

    fn floats(self) -> Self::Acc;
    fn load_elements(self, from: &[T; LANES]) -> Self::Group;
    /// `x` in every lane.
    fn repeat(self, x: &T) -> Self::Group;
    /// `a·b + c`, the product of pairs being that of two vectors.
    fn add_product(
        self,
        a: Self::Group,
        b: Self::Group,
        c: <Self::Acc as Simd>::V,
    ) -> <Self::Acc as Simd>::V;
}

impl<S: Simd> Multiply<f32> for S {
    type Acc = S;
    type Group = S::V;

    #[inline(always)]
    fn floats(self) -> S {
        self
    }

    #[inline(always)]
    fn load_elements(self, from: &Lanes) -> S::V {
        self.load(from)
    }

    #[inline(always)]
    fn repeat(self, x: &f32) -> S::V {
        self.splat(*x)
    }

    #[inline(always)]
    fn add_product(self, a: S::V, b: S::V, c: S::V) -> S::V {
        self.mul_add(a, b, c)
    }
}

/// Scalar floats.
impl Multiply<Pair> for Baseline {
    type Acc = Self;
    type Group = [<Self as Simd>::V; 2];

    #[inline(always)]
    fn floats(self) -> Self {
        self
    }

    #[inline(always)]
    fn load_elements(self, from: &[Pair; LANES]) -> Self::Group {
        [0, 1].map(|i| self.load(&from.map(|pair| pair[i].to_f32())))
    }

    #[inline(always)]
    fn repeat(self, x: &Pair) -> Self::Group {
        x.map(|x| self.splat(x.to_f32()))
    }

    #[inline(always)]
    fn add_product(
        self,
        a: Self::Group,
        b: Self::Group,
        c: <Self as Simd>::V,
    ) -> <Self as Simd>::V {
        self.mul_add(a[0], b[0], self.mul_add(a[1], b[1], c))
    }
}

#[cfg(target_arch = "x86_64")]
impl Multiply<Pair> for super::x86::Avx512Pairs {
    type Acc = super::x86::Avx512;
    type Group = super::x86::PairGroup;

    #[inline(always)]
    fn floats(self) -> Self::Acc {
        super::group::Round::floats(self)
    }

    #[inline(always)]
    fn load_elements(self, from: &[Pair; LANES]) -> Self::Group {
        self.load_pairs(from)
    }

    #[inline(always)]
    fn repeat(self, x: &Pair) -> Self::Group {
        self.splat_pair(*x)
    }

    #[inline(always)]
    fn add_product(
        self,
        a: Self::Group,
        b: Self::Group,
        c: <Self::Acc as Simd>::V,
    ) -> <Self::Acc as Simd>::V {
        self.add_products(a, b, c)
    }
}

/// `c = factor·a·b` or `c += a·b` for `part` of it. `c` is row-major with rows `stride` apart.
///
/// # Panics
/// When an operand does not hold the part, rows of `c` overlap, or columns are not whole groups.
#[inline]
pub fn product<T: TileProduct>(
    c: &mut [f32],
    stride: usize,
    a: Matrix<'_, T>,
    b: Panels<'_, T>,
    part: &Part,
    write: Write,
) {
    T::product(c, stride, a, b, part, write);
}

for_each_level! {
    product_f32 / product_f32_on = product_body(
        c: &mut [f32],
        stride: usize,
        a: Matrix<'_>,
        b: Panels<'_>,
        part: &Part,
        write: Write,
    )
}

for_pairs! {
    product_pairs / product_pairs_on = product_body(
        c: &mut [f32],
        stride: usize,
        a: Matrix<'_, Pair>,
        b: Panels<'_, Pair>,
        part: &Part,
        write: Write,
    )
}

#[inline(always)]
fn product_body<T, M: Multiply<T>>(
    m: M,
    c: &mut [f32],
    stride: usize,
    a: Matrix<'_, T>,
    b: Panels<'_, T>,
    part: &Part,
    write: Write,
) {
    let Part { rows, columns, depth } = part;
    if rows.is_empty() || columns.is_empty() {
        return;
    }
    let whole = columns.start.is_multiple_of(LANES) && columns.end.is_multiple_of(LANES);
    assert!(whole, "columns are whole groups");
    assert!(a.holds(rows, depth) && b.holds(depth, columns), "operands hold the part");
    assert!(columns.end <= stride || rows.len() == 1, "rows of the result do not overlap");
    assert!((rows.end - 1) * stride + columns.end <= c.len(), "the result holds the part");
    let at = At {
        c: c[rows.start * stride + columns.start..].as_mut_ptr(),
        stride,
        // An empty depth may start at the end of its operands.
        a: a.data.as_ptr().wrapping_add(rows.start * a.row + depth.start * a.column),
        a_row: a.row,
        a_depth: a.column,
        b: b.data.as_ptr().wrapping_add(columns.start / LANES * b.panel + depth.start * b.depth),
        panel: b.panel,
        b_depth: b.depth,
        depth: depth.len(),
        write,
    };
    let (rows, groups) = (rows.len(), columns.len() / LANES);
    // SAFETY: the assertions keep every element of the part inside the three slices, and `c` is
    // borrowed exclusively.
    unsafe {
        match M::Acc::REGISTER_BLOCK {
            RegisterBlock::R12G2 => register_blocks::<T, M, 12, 2>(m, at, rows, groups),
            RegisterBlock::R6G1 => register_blocks::<T, M, 6, 1>(m, at, rows, groups),
            RegisterBlock::R2G1 => register_blocks::<T, M, 2, 1>(m, at, rows, groups),
        }
    }
}

/// The addresses of a register block.
struct At<T> {
    c: *mut f32,
    stride: usize,
    a: *const T,
    a_row: usize,
    a_depth: usize,
    b: *const T,
    panel: usize,
    b_depth: usize,
    depth: usize,
    write: Write,
}

impl<T> Clone for At<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for At<T> {}

impl<T> At<T> {
    /// Moves down by `rows`.
    #[inline(always)]
    fn down(self, rows: usize) -> Self {
        Self {
            c: self.c.wrapping_add(rows * self.stride),
            a: self.a.wrapping_add(rows * self.a_row),
            ..self
        }
    }

    /// Moves right by `groups` of columns.
    #[inline(always)]
    fn right(self, groups: usize) -> Self {
        Self {
            c: self.c.wrapping_add(groups * LANES),
            b: self.b.wrapping_add(groups * self.panel),
            ..self
        }
    }
}

/// All register blocks of a part, of at most `R` rows and `G` groups.
///
/// # Safety
/// `rows` rows and `groups` groups from `at` on are inside the operands and the result, and the
/// result is the caller's to write.
#[inline(always)]
unsafe fn register_blocks<T, M: Multiply<T>, const R: usize, const G: usize>(
    m: M,
    at: At<T>,
    rows: usize,
    groups: usize,
) {
    // Down first: the panels of a column of register blocks stay in L1.
    let mut group = 0;
    while G == 2 && group + 2 <= groups {
        // SAFETY: as given.
        unsafe { column::<T, M, R, 2>(m, at.right(group), rows) };
        group += 2;
    }
    while group < groups {
        // SAFETY: as given.
        unsafe { column::<T, M, R, 1>(m, at.right(group), rows) };
        group += 1;
    }
}

/// `rows` rows of `G` groups of columns.
///
/// # Safety
/// That of [`register_blocks`].
#[inline(always)]
unsafe fn column<T, M: Multiply<T>, const R: usize, const G: usize>(m: M, at: At<T>, rows: usize) {
    let mut row = 0;
    macro_rules! blocks_of {
        ($rows:expr) => {
            while row + $rows <= rows {
                // SAFETY: as given.
                unsafe { register_block::<T, M, { $rows }, G>(m, at.down(row)) };
                row += $rows;
            }
        };
    }
    blocks_of!(R);
    if R > 8 {
        blocks_of!(8);
    }
    if R > 4 {
        blocks_of!(4);
    }
    if R > 2 {
        blocks_of!(2);
    }
    while row < rows {
        // SAFETY: as given.
        unsafe { register_block::<T, M, 1, G>(m, at.down(row)) };
        row += 1;
    }
}

/// One register block.
///
/// # Safety
/// That of [`register_blocks`].
#[inline(always)]
unsafe fn register_block<T, M: Multiply<T>, const R: usize, const G: usize>(m: M, at: At<T>) {
    if at.a_row == 1 {
        // SAFETY: as given.
        unsafe { accumulate::<T, M, R, G>(m, At { a_row: 1, ..at }) }
    } else {
        // SAFETY: as given.
        unsafe { accumulate::<T, M, R, G>(m, at) }
    }
}

/// # Safety
/// That of [`register_blocks`].
#[inline(always)]
unsafe fn accumulate<T, M: Multiply<T>, const R: usize, const G: usize>(m: M, at: At<T>) {
    let s = m.floats();
    // Local copies: the compiler would reload fields from memory after every store.
    let At { c, stride, mut a, a_row, a_depth, mut b, panel, b_depth, depth, write } = at;
    let mut accumulators = [[s.splat(0.0); G]; R];
    for _ in 0..depth {
        // SAFETY: as given, for this step of the depth.
        unsafe {
            let b_groups: [M::Group; G] =
                std::array::from_fn(|g| m.load_elements(&*b.add(g * panel).cast()));
            for (i, row) in accumulators.iter_mut().enumerate() {
                let x = m.repeat(&*a.add(i * a_row));
                for (sum, &b) in row.iter_mut().zip(&b_groups) {
                    *sum = m.add_product(x, b, *sum);
                }
            }
        }
        a = a.wrapping_add(a_depth);
        b = b.wrapping_add(b_depth);
    }
    // SAFETY: as given; the group is inside the result.
    let into = |i: usize, g: usize| unsafe { &mut *c.add(i * stride + g * LANES).cast::<Lanes>() };
    match write {
        Write::Times(factor) => {
            let factor = s.splat(factor);
            for (i, row) in accumulators.iter().enumerate() {
                for (g, &sum) in row.iter().enumerate() {
                    s.store(s.mul(sum, factor), into(i, g));
                }
            }
        }
        Write::Add => {
            for (i, row) in accumulators.iter().enumerate() {
                for (g, &sum) in row.iter().enumerate() {
                    let into = into(i, g);
                    s.store(s.add(s.load(into), sum), into);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::level::Level;
    use super::*;

    /// Numbers from a seed, so small that their sums of products are exact.
    fn integers(seed: usize, n: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 7919 + seed * 104_729) % 31) as f32 - 15.0).collect()
    }

    /// Every way to store `a`, and to store `b`, of a product.
    fn layouts(
        a: &[f32],
        b: &[f32],
        [rows, depth, columns]: [usize; 3],
        run: impl Fn(Matrix<'_>, Panels<'_>, &str),
    ) {
        let across: Vec<f32> = (0..rows * depth).map(|i| a[i % rows * depth + i / rows]).collect();
        let wide = columns + 16;
        let mut spread = vec![f32::NAN; depth * wide];
        let mut panels = vec![f32::NAN; depth * columns];
        for d in 0..depth {
            for j in 0..columns {
                spread[d * wide + j] = b[d * columns + j];
                panels[(j / LANES * depth + d) * LANES + j % LANES] = b[d * columns + j];
            }
        }
        let a = [Matrix::rows(a, depth), Matrix::rows(&across, rows).transposed()];
        let b = [Panels::packed(&panels, depth), Panels::rows(&spread, wide)];
        for (i, a) in a.into_iter().enumerate() {
            for (j, b) in b.into_iter().enumerate() {
                run(a, b, &format!("layout {i} of a, {j} of b"));
            }
        }
    }

    #[test]
    fn a_product_is_the_product_for_all_sizes_layouts_and_levels() {
        let sizes = if cfg!(miri) { &[3, 13][..] } else { &[1, 2, 3, 5, 8, 11, 12, 13, 31] };
        for (&rows, groups) in sizes.iter().flat_map(|rows| [1, 2, 3].map(|g| (rows, g))) {
            for depth in [0, 1, 7, 20] {
                let columns = groups * LANES;
                let (a, b) = (integers(1, rows * depth), integers(2, depth * columns));
                let stride = columns + LANES;
                layouts(&a, &b, [rows, depth, columns], |a_in, b_in, layout| {
                    for &level in Level::available() {
                        for write in [Write::Times(0.5), Write::Add] {
                            let old = if write == Write::Add { 3.0 } else { f32::NAN };
                            let mut c = vec![old; rows * stride];
                            let part = Part::all(rows, depth, columns);
                            product_f32_on(level, &mut c, stride, a_in, b_in, &part, write);
                            for (at, &got) in c.iter().enumerate() {
                                let (i, j) = (at / stride, at % stride);
                                if j >= columns {
                                    assert_eq!(got.to_bits(), old.to_bits());
                                    continue;
                                }
                                let sum: f32 =
                                    (0..depth).map(|d| a[i * depth + d] * b[d * columns + j]).sum();
                                let want = if write == Write::Add { sum + 3.0 } else { 0.5 * sum };
                                assert_eq!(got, want, "{layout}, {level:?}, {part:?}, {i} {j}");
                            }
                        }
                    }
                });
            }
        }
    }

    #[test]
    fn a_part_is_that_part_of_the_product_and_nothing_else() {
        let [rows, depth, columns] = [29, 17, 64];
        let (a, b) = (integers(3, rows * depth), integers(4, depth * columns));
        let parts = [
            Part { rows: 12..24, columns: 16..48, depth: 3..9 },
            Part { rows: 0..29, columns: 48..64, depth: 16..17 },
            Part { rows: 28..29, columns: 0..64, depth: 0..17 },
            Part { rows: 5..5, columns: 0..64, depth: 0..17 },
            Part { rows: 5..7, columns: 32..32, depth: 0..17 },
            Part { rows: 5..7, columns: 0..16, depth: 17..17 },
        ];
        layouts(&a, &b, [rows, depth, columns], |a_in, b_in, layout| {
            for (&level, part) in
                Level::available().iter().flat_map(|l| parts.iter().map(move |p| (l, p)))
            {
                let mut c = vec![f32::NAN; rows * columns];
                product_f32_on(level, &mut c, columns, a_in, b_in, part, Write::Times(1.0));
                for (at, &got) in c.iter().enumerate() {
                    let (i, j) = (at / columns, at % columns);
                    if part.rows.contains(&i) && part.columns.contains(&j) {
                        let terms =
                            part.depth.clone().map(|d| a[i * depth + d] * b[d * columns + j]);
                        assert_eq!(got, terms.sum::<f32>(), "{layout}, {level:?}, {part:?}");
                    } else {
                        assert!(got.is_nan(), "{layout}, {level:?}, {part:?}: wrote ({i}, {j})");
                    }
                }
            }
        });
    }

    #[test]
    fn the_bits_of_a_product_do_not_depend_on_how_it_is_cut() {
        let [rows, depth, columns] = [31, 40, 48];
        let irrational = |seed, n| -> Vec<f32> {
            integers(seed, n).into_iter().map(|x| (x + 0.1).sin()).collect()
        };
        let (a, b) = (irrational(5, rows * depth), irrational(6, depth * columns));
        for &level in Level::available() {
            let run = |cuts: &[usize], groups: usize| {
                let mut c = vec![f32::NAN; rows * columns];
                for cut in cuts.windows(2) {
                    for j in (0..columns).step_by(groups * LANES) {
                        let columns_of = j..columns.min(j + groups * LANES);
                        let part =
                            Part { rows: cut[0]..cut[1], columns: columns_of, depth: 0..depth };
                        let (a, b) = (Matrix::rows(&a, depth), Panels::rows(&b, columns));
                        product_f32_on(level, &mut c, columns, a, b, &part, Write::Times(1.0));
                    }
                }
                c.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            let whole = run(&[0, rows], 3);
            assert!(whole == run(&[0, 1, 8, 31], 1) && whole == run(&[0, 12, 24, 31], 2));
        }
    }

    #[test]
    fn a_product_of_pairs_is_that_of_their_numbers_on_every_level() {
        for [rows, depth, columns] in [[1usize, 1, 16], [12, 7, 32], [25, 20, 48], [5, 33, 16]] {
            let pairs = depth.div_ceil(2);
            let (mut a, b) = (integers(7, rows * 2 * pairs), integers(8, 2 * pairs * columns));
            // A depth that is odd ends with half a pair.
            for row in a.chunks_exact_mut(2 * pairs) {
                row[depth..].fill(0.0);
            }
            let pair = |x: f32, y: f32| [x, y].map(bf16::from_f32);
            let a_in: Vec<Pair> = a.as_chunks::<2>().0.iter().map(|&[x, y]| pair(x, y)).collect();
            let at = |d: usize, j: usize| b[d * columns + j];
            let b_in: Vec<Pair> = (0..pairs * columns)
                .map(|i| (i / columns, i % columns))
                .map(|(d, j)| pair(at(2 * d, j), at(2 * d + 1, j)))
                .collect();
            let part = Part::all(rows, depth, columns).in_elements::<Pair>();
            for &level in Level::available() {
                for (write, old) in [(Write::Times(0.5), f32::NAN), (Write::Add, 3.0)] {
                    let mut c = vec![old; rows * columns];
                    let (a_in, b_in) = (Matrix::rows(&a_in, pairs), Panels::rows(&b_in, columns));
                    product_pairs_on(level, &mut c, columns, a_in, b_in, &part, write);
                    for (i, &got) in c.iter().enumerate() {
                        let row = &a[i / columns * 2 * pairs..];
                        let sum: f32 = (0..depth).map(|d| row[d] * at(d, i % columns)).sum();
                        let want = if write == Write::Add { sum + 3.0 } else { 0.5 * sum };
                        assert_eq!(got, want, "{}, {part:?}, element {i}", level.name());
                    }
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "operands hold the part")]
    fn a_part_outside_its_operands_is_refused() {
        let part = Part { rows: 0..1, columns: 0..16, depth: 0..3 };
        product(
            &mut [0.0; 16],
            16,
            Matrix::rows(&[0.0; 3], 3),
            Panels::packed(&[0.0; 47], 3),
            &part,
            Write::Add,
        );
    }
}
