//! The instructions that every machine of the target has: NEON, or scalar floats.

use half::bf16;
#[cfg(not(target_arch = "aarch64"))]
use half::f16;

use super::group::{LANES, Pair, Round, Simd};
#[cfg(not(target_arch = "aarch64"))]
use super::group::{Lanes, RegisterBlock, larger, widen};

/// NEON, which every AArch64 has.
#[cfg(target_arch = "aarch64")]
#[derive(Clone, Copy)]
pub struct Baseline(());

/// Scalar floats, which the compiler may vectorise and Miri can run.
#[cfg(not(target_arch = "aarch64"))]
#[derive(Clone, Copy)]
pub struct Baseline(());

impl Baseline {
    #[inline(always)]
    pub fn new() -> Self {
        Self(())
    }
}

impl Round for Baseline {
    type Floats = Self;

    #[inline(always)]
    fn floats(self) -> Self {
        self
    }

    #[inline(always)]
    fn along(self, x: <Self as Simd>::V, to: &mut [bf16; LANES]) {
        let mut lanes = [0.0; LANES];
        self.store(x, &mut lanes);
        *to = lanes.map(bf16::from_f32);
    }

    #[inline(always)]
    fn beside(self, first: <Self as Simd>::V, second: <Self as Simd>::V, to: &mut [Pair; LANES]) {
        let mut rows = [[0.0; LANES]; 2];
        self.store(first, &mut rows[0]);
        self.store(second, &mut rows[1]);
        *to = std::array::from_fn(|i| [rows[0][i], rows[1][i]].map(bf16::from_f32));
    }
}

#[cfg(target_arch = "aarch64")]
mod neon {
    use super::Baseline;
    use crate::simd::group::{LANES, Lanes, RegisterBlock, Simd, methods, widen};
    use half::f16;
    use std::arch::aarch64::*;

    type V = [float32x4_t; 4];

    #[inline(always)]
    fn map2(a: V, b: V, f: impl Fn(float32x4_t, float32x4_t) -> float32x4_t) -> V {
        [f(a[0], b[0]), f(a[1], b[1]), f(a[2], b[2]), f(a[3], b[3])]
    }

    impl Simd for Baseline {
        type V = V;
        const REGISTER_BLOCK: RegisterBlock = RegisterBlock::R6G1;

        methods! {
            splat(x: f32) -> V = [vdupq_n_f32(x); 4];
            load(from: &Lanes) -> V = {
                let p = from.as_ptr();
                [vld1q_f32(p), vld1q_f32(p.add(4)), vld1q_f32(p.add(8)), vld1q_f32(p.add(12))]
            };
            load_f16(from: &[f16; LANES]) -> V = {
                let lanes = from.map(|x| widen(x.to_bits()));
                let p = lanes.as_ptr();
                [vld1q_f32(p), vld1q_f32(p.add(4)), vld1q_f32(p.add(8)), vld1q_f32(p.add(12))]
            };
            store(x: V, to: &mut Lanes) = {
                let p = to.as_mut_ptr();
                vst1q_f32(p, x[0]);
                vst1q_f32(p.add(4), x[1]);
                vst1q_f32(p.add(8), x[2]);
                vst1q_f32(p.add(12), x[3]);
            };
            add(a: V, b: V) -> V = map2(a, b, |a, b| vaddq_f32(a, b));
            sub(a: V, b: V) -> V = map2(a, b, |a, b| vsubq_f32(a, b));
            mul(a: V, b: V) -> V = map2(a, b, |a, b| vmulq_f32(a, b));
            mul_add(a: V, b: V, c: V) -> V = [
                vfmaq_f32(c[0], a[0], b[0]),
                vfmaq_f32(c[1], a[1], b[1]),
                vfmaq_f32(c[2], a[2], b[2]),
                vfmaq_f32(c[3], a[3], b[3]),
            ];
            max(a: V, b: V) -> V = map2(a, b, |a, b| vmaxq_f32(a, b));
            min(a: V, b: V) -> V = map2(a, b, |a, b| vminq_f32(a, b));
            larger(a: V, b: V) -> V = map2(a, b, |a, b| vmaxq_f32(a, b));
            clear_masked(x: V, score: V) -> V = map2(x, score, |x, score| {
                let masked = vceqq_f32(score, vdupq_n_f32(f32::NEG_INFINITY));
                vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x), masked))
            });
            to_exponent(x: V) -> V = x.map(|x| {
                vreinterpretq_f32_s32(vshlq_n_s32::<23>(vreinterpretq_s32_f32(x)))
            });
            exchange<const STEP>(a: V, b: V) -> [V; 2] = match STEP {
                8 => [[a[0], a[1], b[0], b[1]], [a[2], a[3], b[2], b[3]]],
                4 => [[a[0], b[0], a[2], b[2]], [a[1], b[1], a[3], b[3]]],
                2 => {
                    let pairs = |x: V| x.map(|x| vreinterpretq_f64_f32(x));
                    let (a, b) = (pairs(a), pairs(b));
                    let trn = |f: unsafe fn(float64x2_t, float64x2_t) -> float64x2_t| {
                        std::array::from_fn(|i| vreinterpretq_f32_f64(f(a[i], b[i])))
                    };
                    [trn(vtrn1q_f64), trn(vtrn2q_f64)]
                }
                _ => [
                    map2(a, b, |a, b| vtrn1q_f32(a, b)),
                    map2(a, b, |a, b| vtrn2q_f32(a, b)),
                ],
            };
            swap<const STEP>(x: V) -> V = match STEP {
                8 => [x[2], x[3], x[0], x[1]],
                4 => [x[1], x[0], x[3], x[2]],
                2 => x.map(|x| vextq_f32::<2>(x, x)),
                _ => x.map(|x| vrev64q_f32(x)),
            };
            first(x: V) -> f32 = vgetq_lane_f32::<0>(x[0]);
        }
    }
}

#[cfg(not(target_arch = "aarch64"))]
impl Simd for Baseline {
    type V = Lanes;
    const REGISTER_BLOCK: RegisterBlock = RegisterBlock::R2G1;

    #[inline(always)]
    fn splat(self, x: f32) -> Lanes {
        [x; LANES]
    }

    #[inline(always)]
    fn load(self, from: &Lanes) -> Lanes {
        *from
    }

    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> Lanes {
        from.map(|x| widen(x.to_bits()))
    }

    #[inline(always)]
    fn store(self, x: Lanes, to: &mut Lanes) {
        *to = x;
    }

    #[inline(always)]
    fn add(self, a: Lanes, b: Lanes) -> Lanes {
        std::array::from_fn(|i| a[i] + b[i])
    }

    #[inline(always)]
    fn sub(self, a: Lanes, b: Lanes) -> Lanes {
        std::array::from_fn(|i| a[i] - b[i])
    }

    #[inline(always)]
    fn mul(self, a: Lanes, b: Lanes) -> Lanes {
        std::array::from_fn(|i| a[i] * b[i])
    }

    #[inline(always)]
    fn mul_add(self, a: Lanes, b: Lanes, c: Lanes) -> Lanes {
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }

    #[inline(always)]
    fn max(self, a: Lanes, b: Lanes) -> Lanes {
        std::array::from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn min(self, a: Lanes, b: Lanes) -> Lanes {
        std::array::from_fn(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn larger(self, a: Lanes, b: Lanes) -> Lanes {
        std::array::from_fn(|i| larger(a[i], b[i]))
    }

    #[inline(always)]
    fn clear_masked(self, x: Lanes, score: Lanes) -> Lanes {
        std::array::from_fn(|i| if score[i] == f32::NEG_INFINITY { 0.0 } else { x[i] })
    }

    #[inline(always)]
    fn to_exponent(self, x: Lanes) -> Lanes {
        x.map(|x| f32::from_bits(x.to_bits() << 23))
    }

    #[inline(always)]
    fn swap<const STEP: usize>(self, x: Lanes) -> Lanes {
        std::array::from_fn(|l| x[l ^ STEP])
    }

    #[inline(always)]
    fn first(self, x: Lanes) -> f32 {
        x[0]
    }

    #[inline(always)]
    fn exchange<const STEP: usize>(self, a: Lanes, b: Lanes) -> [Lanes; 2] {
        [
            std::array::from_fn(|l| if l & STEP == 0 { a[l] } else { b[l - STEP] }),
            std::array::from_fn(|l| if l & STEP == 0 { a[l + STEP] } else { b[l] }),
        ]
    }
}
