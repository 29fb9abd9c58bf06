//! Floats of 8 bits.

use std::fmt;

/// A float of 8 bits: a sign, 4 bits of exponent with bias 7, 3 of mantissa. Others call it e4m3fn.
///
/// The largest number is 448, the smallest normal one 2⁻⁶, the smallest one 2⁻⁹. There is no infinity, and one
/// NaN of each sign.
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub struct F8E4M3(u8);

impl F8E4M3 {
    /// The largest number, 448.
    pub const MAX: Self = Self(0x7e);
    /// NaN.
    pub const NAN: Self = Self(0x7f);
    /// 0.
    pub const ZERO: Self = Self(0);

    /// The number of these bits: sign, exponent, mantissa, from the highest on.
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits)
    }

    /// Its bits.
    pub const fn to_bits(self) -> u8 {
        self.0
    }

    /// `value` rounded to nearest, ties to even. What is larger than 448, infinity too, becomes 448, as
    /// conversions on GPUs have it; NaN stays NaN.
    pub fn from_f64(value: f64) -> Self {
        const SMALLEST_NORMAL: i32 = -6;
        if value.is_nan() {
            return Self::NAN;
        }
        let sign = if value.is_sign_negative() { 0x80 } else { 0 };
        let size = value.abs();
        if size >= Self::MAX.to_f64() {
            return Self(sign | Self::MAX.0);
        }
        // The exponent of an f64 is its bits 52 to 62, biased by 1023.
        let exponent = ((size.to_bits() >> 52) as i32 - 1023).max(SMALLEST_NORMAL);
        // In units of the last place, 0 to 16: the implicit bit of a normal number adds 1 to the exponent,
        // and so does what was rounded up to a power of two.
        let units = (size * power(3 - exponent)).round_ties_even() as u8;
        let field = (exponent - SMALLEST_NORMAL) as u8;
        Self(sign | ((field << 3) + units))
    }

    /// `value` as [`Self::from_f64`] rounds it.
    pub fn from_f32(value: f32) -> Self {
        Self::from_f64(value.into())
    }

    /// Its value, exactly.
    pub fn to_f64(self) -> f64 {
        let (exponent, mantissa) = (i32::from(self.0 >> 3 & 15), f64::from(self.0 & 7));
        let size = match (exponent, self.0 & 7) {
            (15, 7) => f64::NAN,
            (0, _) => mantissa * power(-9),
            _ => (8.0 + mantissa) * power(exponent - 10),
        };
        if self.0 & 0x80 == 0 { size } else { -size }
    }

    /// Its value, exactly.
    pub fn to_f32(self) -> f32 {
        self.to_f64() as f32
    }

    /// True when it is NaN.
    pub fn is_nan(self) -> bool {
        self.0 & 0x7f == Self::NAN.0
    }
}

/// 2 to a power that a normal f64 has, exactly: of `powi` that is not promised.
fn power(exponent: i32) -> f64 {
    f64::from_bits(((1023 + exponent) as u64) << 52)
}

// SAFETY: a byte, of which any bits are a number.
unsafe impl bytemuck::Zeroable for F8E4M3 {}
// SAFETY: as above; it has no padding.
unsafe impl bytemuck::Pod for F8E4M3 {}

impl PartialEq for F8E4M3 {
    fn eq(&self, other: &Self) -> bool {
        self.to_f64() == other.to_f64()
    }
}

impl fmt::Debug for F8E4M3 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.to_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_the_value_of_its_fields_and_comes_back() {
        for bits in 0..=255u8 {
            let number = F8E4M3::from_bits(bits);
            let value = number.to_f64();
            if bits & 0x7f == 0x7f {
                assert!(value.is_nan() && number.is_nan() && F8E4M3::from_f64(value).is_nan());
                continue;
            }
            assert_eq!(value.is_sign_negative(), bits >= 0x80);
            assert_eq!(F8E4M3::from_f64(value).to_bits(), bits);
            assert_eq!(F8E4M3::from_f32(number.to_f32()).to_bits(), bits);
        }
        let value = |bits| F8E4M3::from_bits(bits).to_f64();
        assert_eq!((value(0x01), value(0x07)), (power(-9), 7.0 * power(-9)));
        assert_eq!((value(0x08), value(0x38), value(0x39)), (power(-6), 1.0, 1.125));
        assert_eq!((value(0x7e), value(0xfe)), (448.0, -448.0));
    }

    #[test]
    fn numbers_beside_every_boundary_round_to_the_nearest_and_ties_to_even() {
        for low in 0..0x7eu8 {
            let [below, above] = [low, low + 1].map(|bits| F8E4M3::from_bits(bits).to_f32());
            // Exact: the sum has one bit more than its terms.
            let boundary = (below + above) / 2.0;
            let even = low + (low & 1);
            for (x, nearest) in [
                (below.next_up(), low),
                (boundary.next_down(), low),
                (boundary, even),
                (boundary.next_up(), low + 1),
                (above.next_down(), low + 1),
            ] {
                assert_eq!(F8E4M3::from_f32(x).to_bits(), nearest, "{x:e}");
                assert_eq!(F8E4M3::from_f32(-x).to_bits(), nearest | 0x80, "-{x:e}");
            }
            let wide = f64::from(boundary);
            assert_eq!(F8E4M3::from_f64(wide.next_down()).to_bits(), low);
            assert_eq!(F8E4M3::from_f64(wide.next_up()).to_bits(), low + 1);
        }
    }

    #[test]
    fn what_is_too_large_becomes_the_largest_and_what_is_too_small_zero() {
        for large in [448f32.next_up(), 464.0, 480.0, 1e30, f32::MAX, f32::INFINITY] {
            assert_eq!(F8E4M3::from_f32(large).to_bits(), 0x7e, "{large:e}");
            assert_eq!(F8E4M3::from_f32(-large).to_bits(), 0xfe, "-{large:e}");
        }
        let half_of_smallest = power(-10) as f32;
        for small in [0.0, f32::MIN_POSITIVE, half_of_smallest.next_down(), half_of_smallest] {
            assert_eq!(F8E4M3::from_f32(small).to_bits(), 0, "{small:e}");
            assert_eq!(F8E4M3::from_f32(-small).to_bits(), 0x80, "-{small:e}");
        }
        assert_eq!(F8E4M3::from_f32(half_of_smallest.next_up()).to_bits(), 1);
        assert!(F8E4M3::from_f32(f32::NAN).is_nan());
    }
}
