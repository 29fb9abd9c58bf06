//! The inner loops: tile products and passes over score rows.
//!
//! Row passes are ordinary Rust over groups of [`LANES`] floats, written once and compiled once
//! per instruction set: [`level`] picks AVX-512, AVX2 with FMA, or what the target has anyway
//! (NEON on AArch64, plain code elsewhere and under Miri). A group of lanes is summed before
//! lanes are, so a row sums in one order on every level; only fused multiply-adds differ.
//!
//! This is the only module of the crate with `unsafe` in it: calls of functions compiled for a
//! feature that was found at run time, and the pointers that `gemm` takes.

use std::sync::OnceLock;

/// Floats in a group. Rows given to this module are padded to a multiple of it.
pub const LANES: usize = 16;

/// `n` rounded up to whole groups.
pub const fn padded(n: usize) -> usize {
    n.div_ceil(LANES) * LANES
}

/// An instruction set row passes are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// AVX-512 F, BW, DQ, VL.
    Avx512,
    /// AVX2 and FMA.
    Avx2,
    /// What the compiler may assume of the target.
    Baseline,
}

impl Level {
    /// Its name, for reports.
    pub fn name(self) -> &'static str {
        match self {
            Level::Avx512 => "AVX-512",
            Level::Avx2 => "AVX2+FMA",
            Level::Baseline if cfg!(target_arch = "aarch64") => "NEON",
            Level::Baseline => "baseline",
        }
    }
}

/// The best level of this machine. Asked for every row, so found once.
#[inline]
pub fn level() -> Level {
    static LEVEL: OnceLock<Level> = OnceLock::new();
    *LEVEL.get_or_init(detect)
}

fn detect() -> Level {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        if is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("fma")
        {
            return Level::Avx512;
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            return Level::Avx2;
        }
    }
    Level::Baseline
}

/// Defines `fn name(args) -> ret` that runs `body::<FMA>(args)` compiled for [`level`].
macro_rules! for_each_level {
    ($(#[$doc:meta])* $name:ident = $body:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)?) => {
        $(#[$doc])*
        pub fn $name($($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                fn avx512($($arg: $ty),*) $(-> $ret)? { $body::<true>($($arg),*) }
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($arg: $ty),*) $(-> $ret)? { $body::<true>($($arg),*) }
                match level() {
                    // SAFETY: `level` has found these features on this machine.
                    Level::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: `level` has found these features on this machine.
                    Level::Avx2 => return unsafe { avx2($($arg),*) },
                    Level::Baseline => {}
                }
            }
            $body::<{ cfg!(target_arch = "aarch64") }>($($arg),*)
        }
    };
}

for_each_level! {
    /// The largest element of `row`; `-∞` when empty, NaN when one is NaN.
    max = max_body(row: &[f32]) -> f32
}
for_each_level! {
    /// `row[i] = exp(row[i] - shift)`; returns the sum. `-∞` becomes 0 for any finite `shift`.
    exp_sum = exp_sum_body(row: &mut [f32], shift: f32) -> f32
}
for_each_level! {
    /// `row[i] *= factor`.
    scale = scale_body(row: &mut [f32], factor: f32)
}
for_each_level! {
    /// `into[i] += row[i]`.
    add = add_body(into: &mut [f32], row: &[f32])
}
for_each_level! {
    /// `Σ a[i]·b[i]`.
    dot = dot_body(a: &[f32], b: &[f32]) -> f32
}
for_each_level! {
    /// Derivative of the softmax: `d[i] = p[i]·(d[i] - delta)`.
    d_softmax = d_softmax_body(p: &[f32], d: &mut [f32], delta: f32)
}

type Group = [f32; LANES];

/// The groups of a row.
#[inline(always)]
fn groups(row: &[f32]) -> impl Iterator<Item = &Group> {
    let (groups, rest) = row.as_chunks::<LANES>();
    debug_assert!(rest.is_empty(), "rows are padded to whole groups");
    groups.iter()
}

/// The groups of a row, to be changed.
#[inline(always)]
fn groups_mut(row: &mut [f32]) -> impl Iterator<Item = &mut Group> {
    let (groups, rest) = row.as_chunks_mut::<LANES>();
    debug_assert!(rest.is_empty(), "rows are padded to whole groups");
    groups.iter_mut()
}

#[inline(always)]
fn mul_add<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

#[inline(always)]
fn fold(mut lanes: Group, f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] = f(lanes[i], lanes[i + half]);
        }
        half /= 2;
    }
    lanes[0]
}

/// The larger of two; NaN when either is.
#[inline(always)]
pub fn larger(a: f32, b: f32) -> f32 {
    if b > a || b.is_nan() { b } else { a }
}

#[inline(always)]
fn max_body<const FMA: bool>(row: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for group in groups(row) {
        for (m, &x) in lanes.iter_mut().zip(group) {
            *m = larger(*m, x);
        }
    }
    fold(lanes, larger)
}

#[inline(always)]
fn exp_sum_body<const FMA: bool>(row: &mut [f32], shift: f32) -> f32 {
    let mut lanes = [0.0; LANES];
    for group in groups_mut(row) {
        for (sum, x) in lanes.iter_mut().zip(group) {
            *x = exp::<FMA>(*x - shift);
            *sum += *x;
        }
    }
    fold(lanes, |a, b| a + b)
}

#[inline(always)]
fn scale_body<const FMA: bool>(row: &mut [f32], factor: f32) {
    for group in groups_mut(row) {
        for x in group {
            *x *= factor;
        }
    }
}

#[inline(always)]
fn add_body<const FMA: bool>(into: &mut [f32], row: &[f32]) {
    for (into, group) in groups_mut(into).zip(groups(row)) {
        for (sum, &x) in into.iter_mut().zip(group) {
            *sum += x;
        }
    }
}

#[inline(always)]
fn dot_body<const FMA: bool>(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    for (a, b) in groups(a).zip(groups(b)) {
        for i in 0..LANES {
            lanes[i] = mul_add::<FMA>(a[i], b[i], lanes[i]);
        }
    }
    fold(lanes, |a, b| a + b)
}

#[inline(always)]
fn d_softmax_body<const FMA: bool>(p: &[f32], d: &mut [f32], delta: f32) {
    for (d, p) in groups_mut(d).zip(groups(p)) {
        for (d, &p) in d.iter_mut().zip(p) {
            *d = p * (*d - delta);
        }
    }
}

/// `e^x` to about one unit in the last place: `x = n·ln 2 + r` with `|r| ≤ ½ ln 2`, a polynomial
/// in `r`, and `n` added to the exponent. Below the smallest normal result it is 0, above the
/// largest it is `+∞`, NaN stays NaN.
#[inline(always)]
fn exp<const FMA: bool>(x: f32) -> f32 {
    const SMALLEST: f32 = -87.336_55;
    const LARGEST: f32 = 88.722_84;
    // Adding 1.5·2²³ leaves a rounded integer in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_145_75;
    const LN2_LOW: f32 = 1.428_606_8e-6;

    let clamped = if x > LARGEST { LARGEST } else { x };
    let clamped = if clamped < SMALLEST { SMALLEST } else { clamped };
    let shifted = mul_add::<FMA>(clamped, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = mul_add::<FMA>(n, -LN2_LOW, mul_add::<FMA>(n, -LN2_HIGH, clamped));
    let mut p = 1.0 / 5040.0;
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = mul_add::<FMA>(p, r, c);
    }
    // Two factors, because 2^128 is not a float but 2^127·2 is.
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = n >> 1;
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
    let y = p * power(half) * power(n.wrapping_sub(half));
    let y = if x < SMALLEST { 0.0 } else { y };
    if x > LARGEST { f32::INFINITY } else { y }
}

/// A matrix inside a slice: element `(i, j)` is at `i * row + j * column`.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    /// The elements.
    pub data: &'a [f32],
    /// Distance between rows.
    pub row: usize,
    /// Distance between columns.
    pub column: usize,
}

impl<'a> Matrix<'a> {
    /// Row-major with rows `stride` apart.
    pub fn rows(data: &'a [f32], stride: usize) -> Self {
        Self { data, row: stride, column: 1 }
    }

    /// Rows and columns exchanged.
    pub fn transposed(self) -> Self {
        Self { data: self.data, row: self.column, column: self.row }
    }

    fn holds(&self, rows: usize, columns: usize) -> bool {
        rows == 0
            || columns == 0
            || (rows - 1) * self.row + (columns - 1) * self.column < self.data.len()
    }
}

/// `c = a·b`, or `c += a·b` with `accumulate`: `c` is `rows × columns`, row-major with rows
/// `stride` apart, and the products are `depth` long.
pub fn matmul(
    c: &mut [f32],
    stride: usize,
    [rows, depth, columns]: [usize; 3],
    a: Matrix<'_>,
    b: Matrix<'_>,
    accumulate: bool,
) {
    assert!(a.holds(rows, depth) && b.holds(depth, columns), "operands hold their elements");
    assert!(columns <= stride || rows <= 1, "rows of the result do not overlap");
    if rows == 0 || columns == 0 {
        return;
    }
    assert!((rows - 1) * stride + columns <= c.len(), "the result holds its elements");
    // SAFETY: the assertions above keep every element that the shapes and strides reach inside
    // the three slices, and `c` is borrowed exclusively.
    unsafe {
        gemm::gemm(
            rows,
            columns,
            depth,
            c.as_mut_ptr(),
            1,
            stride as isize,
            accumulate,
            a.data.as_ptr(),
            a.column as isize,
            a.row as isize,
            b.data.as_ptr(),
            b.column as isize,
            b.row as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error_in_ulp(x: f32, got: f32) -> f64 {
        let exact = f64::from(x).exp();
        let ulp = f64::from(f32::from_bits((exact as f32).to_bits() + 1)) - f64::from(exact as f32);
        (f64::from(got) - exact).abs() / ulp
    }

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        for i in 0..40_000 {
            let x = -87.3 + 175.9 * (i as f32) / 40_000.0;
            let mut row = [x; LANES];
            exp_sum(&mut row, 0.0);
            assert!(error_in_ulp(x, row[0]) < 2.0, "exp({x}) gave {}", row[0]);
            assert!(error_in_ulp(x, exp::<false>(x)) < 2.0, "plain exp({x})");
        }
    }

    #[test]
    fn exp_keeps_what_is_not_finite() {
        for f in [exp::<false>, exp::<true>] {
            assert_eq!(f(f32::NEG_INFINITY), 0.0);
            assert_eq!(f(-200.0), 0.0);
            assert_eq!(f(f32::INFINITY), f32::INFINITY);
            assert_eq!(f(89.0), f32::INFINITY);
            assert_eq!(f(0.0), 1.0);
            assert!(f(f32::NAN).is_nan());
        }
    }

    #[test]
    fn row_passes_agree_with_plain_loops() {
        let row: Vec<f32> = (0..48).map(|i| ((i * 37) % 23) as f32 * 0.25 - 3.0).collect();
        let other: Vec<f32> = (0..48).map(|i| ((i * 11) % 17) as f32 * 0.5 - 4.0).collect();
        assert_eq!(max(&row), row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        assert_eq!(max(&[]), f32::NEG_INFINITY);
        for i in 0..48 {
            let mut spoilt = row.clone();
            spoilt[i] = f32::NAN;
            assert!(max(&spoilt).is_nan());
        }
        let exact: f32 = row.iter().zip(&other).map(|(a, b)| a * b).sum();
        assert!((dot(&row, &other) - exact).abs() < 1e-4);
        let mut got = row.clone();
        let sum = exp_sum(&mut got, 1.5);
        let exact: Vec<f32> = row.iter().map(|x| (x - 1.5).exp()).collect();
        assert!(got.iter().zip(&exact).all(|(a, b)| (a - b).abs() <= 1e-6 * b));
        assert!((sum - exact.iter().sum::<f32>()).abs() < 1e-4 * sum);
        let mut got = row.clone();
        add(&mut got, &other);
        scale(&mut got, 2.0);
        assert!(got.iter().zip(row.iter().zip(&other)).all(|(g, (a, b))| *g == (a + b) * 2.0));
        let mut got = other.clone();
        d_softmax(&row, &mut got, 0.5);
        assert!(got.iter().zip(row.iter().zip(&other)).all(|(g, (p, d))| *g == p * (d - 0.5)));
    }

    #[test]
    fn a_product_of_strided_operands_is_the_product() {
        let (rows, depth, columns) = (5, 7, 19);
        let a: Vec<f32> = (0..rows * depth).map(|i| (i % 11) as f32 - 5.0).collect();
        let b: Vec<f32> = (0..depth * columns).map(|i| (i % 13) as f32 - 6.0).collect();
        let mut c = vec![1.0; rows * 20];
        let at = Matrix { data: &a, row: 1, column: rows };
        matmul(&mut c, 20, [rows, depth, columns], at, Matrix::rows(&b, columns), true);
        for i in 0..rows {
            for j in 0..columns {
                let exact: f32 = (0..depth).map(|d| a[d * rows + i] * b[d * columns + j]).sum();
                assert_eq!(c[i * 20 + j], 1.0 + exact);
            }
            assert_eq!(c[i * 20 + 19], 1.0);
        }
    }
}
