//! `e^x` by a polynomial.

use std::f32::consts::LN_2;

use super::group::Simd;

/// Adding it leaves a rounded integer, plus the bias of the exponent, in the low bits.
const ROUND: f32 = 12_582_912.0 + 127.0;

/// `e^x` to about one unit in the last place: `x = n·ln 2 + r` with `|r| ≤ ½ ln 2`, a polynomial
/// in `r`, times `2^n`. Below the smallest normal result it is 0, above `2^127.5` it is `+∞`, NaN
/// stays NaN.
///
/// The polynomial is the one of degree 6 with the smallest relative error, 3·10⁻⁹, that starts
/// with `1 + r`.
#[inline(always)]
pub fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    const LN2_HIGH: f32 = 0.693_145_75;
    const LN2_LOW: f32 = 1.428_606_8e-6;
    // Of 2^-127, whose exponent is that of 0, and of 2^128, whose is that of ∞.
    const LOWEST: f32 = -88.029_69;
    const HIGHEST: f32 = 88.722_84;

    // The constant first, so that NaN stays.
    let x = s.max(s.splat(LOWEST), x);
    let x = s.min(s.splat(HIGHEST), x);
    let shifted = s.mul_add(x, s.splat(std::f32::consts::LOG2_E), s.splat(ROUND));
    let n = s.sub(shifted, s.splat(ROUND));
    let r = s.mul_add(n, s.splat(-LN2_HIGH), x);
    let r = s.mul_add(n, s.splat(-LN2_LOW), r);
    let mut p = s.splat(0.001_381_459_4);
    for c in [0.008_368_719, 0.041_668_39, 0.166_665_21, 0.499_999_94, 1.0, 1.0] {
        p = s.mul_add(p, r, s.splat(c));
    }
    s.mul(p, s.to_exponent(shifted))
}

/// `2^x` for `x` up to 1, within two units in the last place: the same with `r = x - n`, and a
/// polynomial of degree 5, whose error is 1·10⁻⁷. Below `2^-126` it is 0, NaN stays NaN.
#[inline(always)]
pub fn exp2_small<S: Simd>(s: S, x: S::V) -> S::V {
    let x = s.max(s.splat(-127.0), x);
    let shifted = s.add(x, s.splat(ROUND));
    let r = s.sub(x, s.sub(shifted, s.splat(ROUND)));
    let mut p = s.splat(0.001_330_025_4);
    for c in [0.009_669_722, 0.055_505_6, 0.240_222_81, LN_2, 1.0] {
        p = s.mul_add(p, r, s.splat(c));
    }
    s.mul(p, s.to_exponent(shifted))
}

/// [`exp2_small`] of any `x`; from `2^127` on it is that.
#[inline(always)]
pub fn exp2<S: Simd>(s: S, x: S::V) -> S::V {
    exp2_small(s, s.min(s.splat(127.0), x))
}

#[cfg(test)]
mod tests {
    use super::super::group::LANES;
    use super::super::level::Level;
    use super::super::rows::exp_sum_on;

    fn exp_on(level: Level, x: f32) -> f32 {
        let mut row = [x; LANES];
        exp_sum_on(level, &mut row, 0.0);
        row[0]
    }

    fn error_in_ulp(x: f32, got: f32) -> f64 {
        let exact = f64::from(x).exp();
        let ulp = f64::from(f32::from_bits((exact as f32).to_bits() + 1)) - f64::from(exact as f32);
        (f64::from(got) - exact).abs() / ulp
    }

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        let steps = if cfg!(miri) { 200 } else { 40_000 };
        for &level in Level::available() {
            for i in 0..steps {
                let x = -87.3 + 175.6 * (i as f32) / steps as f32;
                let got = exp_on(level, x);
                assert!(error_in_ulp(x, got) < 2.0, "{}: exp({x}) gave {got}", level.name());
            }
        }
    }

    #[test]
    fn exp_keeps_what_is_not_finite() {
        for &level in Level::available() {
            let f = |x| exp_on(level, x);
            assert_eq!(f(f32::NEG_INFINITY), 0.0);
            assert_eq!(f(-200.0), 0.0);
            assert_eq!(f(f32::INFINITY), f32::INFINITY);
            assert_eq!(f(89.0), f32::INFINITY);
            assert_eq!(f(0.0), 1.0);
            assert!(f(f32::NAN).is_nan());
        }
    }
}
