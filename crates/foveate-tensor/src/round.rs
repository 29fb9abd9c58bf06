//! Numbers of f64 rounded to 16 bits, once. The conversions of `half` from f64 pass over low bits, or round twice, by
//! what the processor has.

use half::{bf16, f16};

/// `value`, rounded to the nearest, ties to even.
pub(crate) fn to_f16(value: f64) -> f16 {
    f16::from_f32(to_odd(value))
}

/// `value`, rounded to the nearest, ties to even.
pub(crate) fn to_bf16(value: f64) -> bf16 {
    bf16::from_f32(to_odd(value))
}

/// `value` in f32, the odd one of two neighbours where it lies between them: rounded to 16 bits, that is `value` rounded
/// once, since no tie comes of a value that is none.
fn to_odd(value: f64) -> f32 {
    let near = value as f32;
    if value.is_nan() || f64::from(near) == value || near.to_bits() & 1 == 1 {
        return near;
    }
    let toward_zero = f64::from(near).abs() > value.abs();
    f32::from_bits(if toward_zero { near.to_bits() - 1 } else { near.to_bits() + 1 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    /// That no neighbour of the number with the bits `found` is nearer to `value`, nor as near and even.
    fn check(value: f64, found: u16, of: fn(u16) -> f64) {
        let apart = (value - of(found)).abs();
        for other in [found.wrapping_sub(1), found.wrapping_add(1)].map(of) {
            let there = (value - other).abs();
            let nearest = apart < there || apart == there && found.is_multiple_of(2);
            assert!(nearest || !other.is_finite(), "{value:e} is {found:x}");
        }
    }

    #[test]
    fn ties_of_16_bits_go_to_the_even_number_and_values_beside_them_to_the_nearest() {
        let f16_of = |bits| f16::from_bits(bits).to_f64();
        let bf16_of = |bits| bf16::from_bits(bits).to_f64();
        let around = |low: f64, high: f64| {
            let tie = (low + high) / 2.0;
            [tie.next_down(), tie, tie.next_up()]
        };
        for bits in 0..f16::MAX.to_bits() {
            for value in around(f16_of(bits), f16_of(bits + 1)) {
                check(value, to_f16(value).to_bits(), f16_of);
            }
        }
        for bits in 0..bf16::MAX.to_bits() {
            for value in around(bf16_of(bits), bf16_of(bits + 1)) {
                check(value, to_bf16(value).to_bits(), bf16_of);
            }
        }
    }

    #[test]
    fn numbers_of_f32_are_rounded_alike_from_f64() {
        let mut random = Random::new(5);
        for _ in 0..1 << 18 {
            let value = random.normal() as f32;
            let wide = f64::from(value);
            assert_eq!(f16::from_f32(value), to_f16(wide), "{value:e}");
            assert_eq!(bf16::from_f32(value), to_bf16(wide), "{value:e}");
        }
    }

    #[test]
    fn what_16_bits_do_not_hold_is_infinite_zero_or_none() {
        for (value, f, b) in [
            (65519.999, 0x7BFF, 0x4780),
            (65520.0, 0x7C00, 0x4780),
            (-1e300, 0xFC00, 0xFF80),
            (f64::INFINITY, 0x7C00, 0x7F80),
            (-1e-300, 0x8000, 0x8000),
            (0.0, 0, 0),
        ] {
            let found = (to_f16(value), to_bf16(value));
            assert_eq!((found.0.to_bits(), found.1.to_bits()), (f, b), "{value:e}");
        }
        assert!(to_f16(f64::NAN).is_nan());
        assert!(to_bf16(f64::NAN).is_nan());
    }
}
