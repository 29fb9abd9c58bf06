//! Elementary functions in f32, written so that loops over them vectorise: no calls, no
//! branches. The same function serves a single value and a row, so every evaluation of a mod
//! gives the same bits.
//!
//! The polynomials of `exp` and `log` are those of S. L. Moshier's Cephes library; `erf` is a
//! Maclaurin series below 0.5 and formula 7.1.26 of Abramowitz and Stegun above. The tests bound
//! the error against f64.

const LN2_HI: f32 = 0.693_359_4;
const LN2_LO: f32 = -2.121_944_4e-4;

/// Added to a number below 2²² it leaves the nearest integer in the low bits of the sum.
const ROUND: f32 = 12_582_912.0;

/// `2^n` for an integer-valued `n` in `[-126, 127]`.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits(((n + 127) << 23) as u32)
}

/// `e^r · 2^n` for |r| ≤ 0.35 and `shifted = n + ROUND`, with the scaling in two steps so that
/// subnormals come out.
#[inline(always)]
fn exp_scaled(r: f32, shifted: f32) -> f32 {
    let mut p = 1.987_569_2e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 5e-1;
    let y = (p * r * r + r) + 1.0;
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = n >> 1;
    y * power_of_two(half) * power_of_two(n - half)
}

/// `e^x`, within 2 ulp.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let c = x.clamp(-104.0, 89.0);
    let shifted = c * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let y = exp_scaled((c - n * LN2_HI) - n * LN2_LO, shifted);
    if x.is_nan() { x } else { y }
}

/// `2^x`, within 2 ulp.
#[inline(always)]
pub fn exp2(x: f32) -> f32 {
    let c = x.clamp(-150.0, 128.0);
    let shifted = c + ROUND;
    let y = exp_scaled((c - (shifted - ROUND)) * std::f32::consts::LN_2, shifted);
    if x.is_nan() { x } else { y }
}

/// Natural logarithm, within 2 ulp.
#[inline(always)]
pub fn log(x: f32) -> f32 {
    let subnormal = x < f32::MIN_POSITIVE;
    let scaled = if subnormal { x * 8_388_608.0 } else { x };
    let bits = scaled.to_bits() as i32;
    // Mantissa in [√½, √2).
    let exponent = bits.wrapping_sub(0x3F35_04F3) >> 23;
    let m = f32::from_bits(bits.wrapping_sub(exponent << 23) as u32) - 1.0;
    let e = exponent as f32 - if subnormal { 23.0 } else { 0.0 };
    let z = m * m;
    let mut p = 7.037_683_6e-2;
    p = p * m - 1.151_461e-1;
    p = p * m + 1.167_699_9e-1;
    p = p * m - 1.242_014_1e-1;
    p = p * m + 1.424_932_3e-1;
    p = p * m - 1.666_805_8e-1;
    p = p * m + 2.000_071_5e-1;
    p = p * m - 2.499_999_4e-1;
    p = p * m + 3.333_333e-1;
    let y = p * m * z + e * LN2_LO - 0.5 * z;
    let y = (m + y) + e * LN2_HI;
    if x > 0.0 && x < f32::INFINITY {
        y
    } else if x == 0.0 {
        f32::NEG_INFINITY
    } else if x == f32::INFINITY {
        x
    } else {
        f32::NAN
    }
}

/// Binary logarithm, within 3 ulp or 1e-7.
#[inline(always)]
pub fn log2(x: f32) -> f32 {
    log(x) * std::f32::consts::LOG2_E
}

/// Hyperbolic tangent, within 2 ulp: `e/(e + 2)` with `e = e^2|x| - 1 = 2^n·(e^r - 1) + (2^n - 1)`,
/// where `2|x| = n·ln 2 + r`. The polynomial of `e^r - 1` has a small relative error, 2·10⁻⁸, so one
/// formula serves small `x` as well as large.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    // NaN stays.
    let a = if x.abs() > 10.0 { 10.0 } else { x.abs() };
    let shifted = a * (2.0 * std::f32::consts::LOG2_E) + ROUND;
    let n = shifted - ROUND;
    let r = ((a + a) - n * LN2_HI) - n * LN2_LO;
    let mut p = 1.388_202_1e-3;
    p = p * r + 8.369_135e-3;
    p = p * r + 4.166_728_6e-2;
    p = p * r + 1.666_652_4e-1;
    p = p * r + 4.999_999_7e-1;
    let scale = power_of_two((shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32));
    let e = scale * (p * r * r + r) + (scale - 1.0);
    (e / (e + 2.0)).copysign(x)
}

/// Logistic function `1/(1 + e^-x)`.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Error function, within 4 ulp.
#[inline(always)]
pub fn erf(x: f32) -> f32 {
    let z = x * x;
    let mut p = 1.0 / 9360.0;
    p = p * z - 1.0 / 1320.0;
    p = p * z + 1.0 / 216.0;
    p = p * z - 1.0 / 42.0;
    p = p * z + 1.0 / 10.0;
    p = p * z - 1.0 / 3.0;
    let small = (p * z * x + x) * std::f32::consts::FRAC_2_SQRT_PI;
    let t = 1.0 / (1.0 + 0.327_591_1 * x.abs());
    let mut q = 1.061_405_4;
    q = q * t - 1.453_152;
    q = q * t + 1.421_413_7;
    q = q * t - 0.284_496_74;
    q = q * t + 0.254_829_6;
    let large = (1.0 - q * t * exp(-z)).copysign(x);
    if x.abs() < 0.5 { small } else { large }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Largest error of `f` against `g`, in units of the last place of g's f32 value.
    fn worst(f: impl Fn(f32) -> f32, g: impl Fn(f64) -> f64, from: f32, to: f32) -> f64 {
        let n = 200_000;
        (0..=n)
            .map(|i| {
                let x = from + (to - from) * (i as f32 / n as f32);
                let want = g(f64::from(x));
                let ulp = f64::from((want as f32).abs()) * f64::from(f32::EPSILON);
                (f64::from(f(x)) - want).abs() / ulp.max(1e-37)
            })
            .fold(0.0, f64::max)
    }

    #[test]
    fn every_function_is_within_its_stated_error_of_f64() {
        assert!(worst(exp, f64::exp, -87.0, 88.7) <= 2.0);
        assert!(worst(exp2, f64::exp2, -126.0, 127.9) <= 2.0);
        assert!(worst(log, f64::ln, 1e-30, 0.9) <= 2.0);
        assert!(worst(log, f64::ln, 1.1, 1e9) <= 2.0);
        assert!(worst(log2, f64::log2, 1.5, 1e9) <= 3.0);
        assert!(worst(tanh, f64::tanh, -12.0, 12.0) <= 2.0);
        assert!(worst(tanh, f64::tanh, -1e-3, 1e-3) <= 2.0);
        assert!(worst(sigmoid, |x| 1.0 / (1.0 + (-x).exp()), -80.0, 80.0) <= 4.0);
    }

    #[test]
    fn tanh_is_odd_and_never_past_one() {
        for i in 0..=200_000 {
            let x = i as f32 * 6e-5;
            assert!(tanh(x) <= 1.0, "tanh({x}) gave {}", tanh(x));
            assert_eq!(tanh(-x).to_bits(), (-tanh(x)).to_bits());
        }
        for x in [1e-45, 1e-40, f32::MIN_POSITIVE, 1e-20] {
            assert_eq!(tanh(x), x);
        }
        assert_eq!((tanh(1e30), tanh(-1e30)), (1.0, -1.0));
    }

    #[test]
    fn erf_agrees_with_tabulated_values() {
        for (x, want) in [
            (0.1_f32, 0.112_462_916_018_284_9_f64),
            (0.5, 0.520_499_877_813_046_5),
            (1.0, 0.842_700_792_949_714_9),
            (2.0, 0.995_322_265_018_952_7),
        ] {
            assert!((f64::from(erf(x)) - want).abs() <= 4.0 * 6e-8, "erf({x})");
            assert_eq!(erf(-x), -erf(x));
        }
    }

    #[test]
    fn limits_and_nan_come_out_as_ieee_says() {
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp2(200.0), f32::INFINITY);
        assert_eq!(exp2(-140.0), 2f32.powi(-140));
        assert_eq!(log(0.0), f32::NEG_INFINITY);
        assert_eq!(log(f32::INFINITY), f32::INFINITY);
        assert_eq!(tanh(f32::INFINITY), 1.0);
        assert_eq!(erf(f32::NEG_INFINITY), -1.0);
        assert!(log(-1e30).is_nan() && log(f32::NEG_INFINITY).is_nan());
        assert!(log(-1.0).is_nan() && exp(f32::NAN).is_nan() && tanh(f32::NAN).is_nan());
        assert!(erf(f32::NAN).is_nan() && exp2(f32::NAN).is_nan() && log(f32::NAN).is_nan());
    }
}
