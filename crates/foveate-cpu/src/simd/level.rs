//! Instruction sets: sixteen floats at a time on each of them.
//!
//! Loops are written once, generic over a [`Simd`], and compiled once per instruction set by
//! `for_each_level!`. A value of such a type is the proof that this machine has the instructions,
//! so its methods are safe. A group has [`LANES`] floats on every level, in one register of
//! AVX-512, two of AVX2, four of NEON: loops do the same sums in the same order everywhere.

use std::sync::OnceLock;

/// Floats in a group.
pub const LANES: usize = 16;

/// A group in memory.
pub type Lanes = [f32; LANES];

/// An instruction set that loops are compiled for.
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

    #[cfg(all(target_arch = "x86_64", not(miri)))]
    fn is_here(self) -> bool {
        let fma = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        match self {
            Level::Avx512 => {
                fma && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            Level::Avx2 => fma,
            Level::Baseline => true,
        }
    }

    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    fn is_here(self) -> bool {
        self == Level::Baseline
    }

    /// The levels of this machine, best first.
    pub fn available() -> &'static [Level] {
        static LEVELS: OnceLock<Vec<Level>> = OnceLock::new();
        LEVELS.get_or_init(|| {
            let levels = [Level::Avx512, Level::Avx2, Level::Baseline];
            levels.into_iter().filter(|level| level.is_here()).collect()
        })
    }
}

/// The best level of this machine.
#[inline]
pub fn level() -> Level {
    Level::available()[0]
}

/// Defines `fn name(args) -> ret` that runs `body(simd, args)` compiled for [`level`], and
/// `name_on(level, args)` for the tests, which compares levels.
macro_rules! for_each_level {
    ($(#[$doc:meta])* $vis:vis $name:ident / $on:ident = $body:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)?) => {
        $(#[$doc])*
        #[inline]
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            $on($crate::simd::level::level(), $($arg),*)
        }

        /// The same on `level`, which this machine has.
        #[inline]
        $vis fn $on(level: $crate::simd::level::Level, $($arg: $ty),*) $(-> $ret)? {
            debug_assert!($crate::simd::level::Level::available().contains(&level));
            match level {
                #[cfg(target_arch = "x86_64")]
                $crate::simd::level::Level::Avx512 => {
                    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                    fn run($($arg: $ty),*) $(-> $ret)? {
                        // SAFETY: this function has the features of the token.
                        $body(unsafe { $crate::simd::level::x86::Avx512::new() }, $($arg),*)
                    }
                    // SAFETY: a level is one of those that were found on this machine.
                    unsafe { run($($arg),*) }
                }
                #[cfg(target_arch = "x86_64")]
                $crate::simd::level::Level::Avx2 => {
                    #[target_feature(enable = "avx2,fma")]
                    fn run($($arg: $ty),*) $(-> $ret)? {
                        // SAFETY: this function has the features of the token.
                        $body(unsafe { $crate::simd::level::x86::Avx2::new() }, $($arg),*)
                    }
                    // SAFETY: a level is one of those that were found on this machine.
                    unsafe { run($($arg),*) }
                }
                _ => $body($crate::simd::level::Baseline::new(), $($arg),*),
            }
        }
    };
}
pub(crate) use for_each_level;

/// Rows and groups of columns of the block of a product whose sums fit the registers.
#[allow(dead_code, reason = "a target has some of them")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Block {
    /// 12 rows, 2 groups.
    R12G2,
    /// 6 rows, 1 group.
    R6G1,
    /// 2 rows, 1 group.
    R2G1,
}

/// Operations on groups.
pub trait Simd: Copy {
    /// A group in registers.
    type V: Copy;
    /// What fits the registers.
    const BLOCK: Block;

    /// `x` in every lane.
    fn splat(self, x: f32) -> Self::V;
    fn load(self, from: &Lanes) -> Self::V;
    fn store(self, x: Self::V, to: &mut Lanes);
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a·b + c`, rounded once where the level can.
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger; NaN when `b` is.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// The smaller; NaN when `b` is.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// The larger; NaN when either is.
    fn larger(self, a: Self::V, b: Self::V) -> Self::V;
    /// The bits of each lane shifted left by 23, as a float: an integer becomes an exponent.
    fn to_exponent(self, x: Self::V) -> Self::V;

    /// `a` and `b`, with the lanes of `a` whose number has the bit `STEP` exchanged for the lanes
    /// of `b` that lie `STEP` lower. Done for all pairs of rows `STEP` apart, and for 8, 4, 2 and
    /// 1, it transposes sixteen rows.
    fn exchange<const STEP: usize>(self, a: Self::V, b: Self::V) -> [Self::V; 2];

    /// The lanes added up, halves first.
    #[inline(always)]
    fn sum(self, x: Self::V) -> f32 {
        self.fold(x, |a, b| self.add(a, b))
    }

    /// The largest lane; NaN when one is.
    #[inline(always)]
    fn largest(self, x: Self::V) -> f32 {
        self.fold(x, |a, b| self.larger(a, b))
    }

    /// `f` of the two halves of the lanes, of their halves, and so on.
    #[inline(always)]
    fn fold(self, x: Self::V, f: impl Fn(Self::V, Self::V) -> Self::V) -> f32 {
        let [a, b] = self.exchange::<8>(x, x);
        let x = f(a, b);
        let [a, b] = self.exchange::<4>(x, x);
        let x = f(a, b);
        let [a, b] = self.exchange::<2>(x, x);
        let x = f(a, b);
        let [a, b] = self.exchange::<1>(x, x);
        let mut lanes = [0.0; LANES];
        self.store(f(a, b), &mut lanes);
        lanes[0]
    }
}

/// The larger of two; NaN when either is.
#[inline(always)]
pub fn larger(a: f32, b: f32) -> f32 {
    if b > a || b.is_nan() { b } else { a }
}

/// Defines methods of a [`Simd`] by intrinsics.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! methods {
    ($(
        $name:ident $(<const $n:ident>)? ($($arg:ident: $ty:ty),*) $(-> $ret:ty)? = $e:expr;
    )*) => {$(
        #[inline(always)]
        fn $name $(<const $n: usize>)? (self, $($arg: $ty),*) $(-> $ret)? {
            // SAFETY: `self` proves that the machine has the instructions; references to groups
            // are valid for the loads and stores of a group.
            unsafe { $e }
        }
    )*};
}

#[cfg(target_arch = "x86_64")]
pub mod x86 {
    //! AVX-512 and AVX2.

    use super::{Block, Lanes, Simd};
    use std::arch::x86_64::*;

    /// Proof of AVX-512 F, BW, DQ, VL.
    #[derive(Clone, Copy)]
    pub struct Avx512(());

    impl Avx512 {
        /// # Safety
        /// The machine has [`super::Level::Avx512`].
        #[inline(always)]
        pub unsafe fn new() -> Self {
            Self(())
        }
    }

    impl Simd for Avx512 {
        type V = __m512;
        const BLOCK: Block = Block::R12G2;

        methods! {
            splat(x: f32) -> __m512 = _mm512_set1_ps(x);
            load(from: &Lanes) -> __m512 = _mm512_loadu_ps(from.as_ptr());
            store(x: __m512, to: &mut Lanes) = _mm512_storeu_ps(to.as_mut_ptr(), x);
            add(a: __m512, b: __m512) -> __m512 = _mm512_add_ps(a, b);
            sub(a: __m512, b: __m512) -> __m512 = _mm512_sub_ps(a, b);
            mul(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
            mul_add(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
            max(a: __m512, b: __m512) -> __m512 = _mm512_max_ps(a, b);
            min(a: __m512, b: __m512) -> __m512 = _mm512_min_ps(a, b);
            larger(a: __m512, b: __m512) -> __m512 = {
                let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, a);
                _mm512_mask_mov_ps(_mm512_max_ps(a, b), nan, a)
            };
            to_exponent(x: __m512) -> __m512 =
                _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_castps_si512(x)));
            exchange<const STEP>(a: __m512, b: __m512) -> [__m512; 2] = {
                let pick = |lanes: [i32; 16]| {
                    _mm512_permutex2var_ps(a, _mm512_loadu_si512(lanes.as_ptr().cast()), b)
                };
                [pick(const { lower(STEP) }), pick(const { upper(STEP) })]
            };
        }
    }

    /// Which lanes of two groups, counted on, the first of [`Simd::exchange`] has.
    const fn lower(step: usize) -> [i32; 16] {
        let (mut lanes, mut l) = ([0; 16], 0);
        while l < 16 {
            lanes[l] = if l & step == 0 { l } else { 16 + l - step } as i32;
            l += 1;
        }
        lanes
    }

    /// The same of the second.
    const fn upper(step: usize) -> [i32; 16] {
        let (mut lanes, mut l) = ([0; 16], 0);
        while l < 16 {
            lanes[l] = if l & step == 0 { l + step } else { 16 + l } as i32;
            l += 1;
        }
        lanes
    }

    /// Proof of AVX2 and FMA.
    #[derive(Clone, Copy)]
    pub struct Avx2(());

    impl Avx2 {
        /// # Safety
        /// The machine has [`super::Level::Avx2`].
        #[inline(always)]
        pub unsafe fn new() -> Self {
            Self(())
        }
    }

    impl Simd for Avx2 {
        type V = [__m256; 2];
        const BLOCK: Block = Block::R6G1;

        methods! {
            splat(x: f32) -> [__m256; 2] = [_mm256_set1_ps(x); 2];
            load(from: &Lanes) -> [__m256; 2] = {
                let p = from.as_ptr();
                [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))]
            };
            store(x: [__m256; 2], to: &mut Lanes) = {
                let p = to.as_mut_ptr();
                _mm256_storeu_ps(p, x[0]);
                _mm256_storeu_ps(p.add(8), x[1]);
            };
            add(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] =
                [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])];
            sub(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] =
                [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])];
            mul(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] =
                [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])];
            mul_add(a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] =
                [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])];
            max(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] =
                [_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])];
            min(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] =
                [_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])];
            larger(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] = {
                let one = |a, b| {
                    let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(a, a);
                    _mm256_blendv_ps(_mm256_max_ps(a, b), a, nan)
                };
                [one(a[0], b[0]), one(a[1], b[1])]
            };
            to_exponent(x: [__m256; 2]) -> [__m256; 2] = {
                let one = |x| {
                    _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_castps_si256(x)))
                };
                [one(x[0]), one(x[1])]
            };
            exchange<const STEP>(a: [__m256; 2], b: [__m256; 2]) -> [[__m256; 2]; 2] = {
                let one = |a, b| match STEP {
                    4 => [_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b)],
                    2 => [_mm256_shuffle_ps::<0x44>(a, b), _mm256_shuffle_ps::<0xEE>(a, b)],
                    _ => [
                        _mm256_blend_ps::<0xAA>(a, _mm256_moveldup_ps(b)),
                        _mm256_blend_ps::<0xAA>(_mm256_movehdup_ps(a), b),
                    ],
                };
                if STEP == 8 {
                    [[a[0], b[0]], [a[1], b[1]]]
                } else {
                    let [low, high] = [one(a[0], b[0]), one(a[1], b[1])];
                    [[low[0], high[0]], [low[1], high[1]]]
                }
            };
        }
    }
}

/// NEON, which every AArch64 has.
#[cfg(target_arch = "aarch64")]
#[derive(Clone, Copy)]
pub struct Baseline(());

/// Plain floats: what the compiler makes of them, and what Miri can run.
#[cfg(not(target_arch = "aarch64"))]
#[derive(Clone, Copy)]
pub struct Baseline(());

impl Baseline {
    #[inline(always)]
    pub fn new() -> Self {
        Self(())
    }
}

#[cfg(target_arch = "aarch64")]
mod neon {
    use super::{Baseline, Block, Lanes, Simd};
    use std::arch::aarch64::*;

    type V = [float32x4_t; 4];

    #[inline(always)]
    fn map2(a: V, b: V, f: impl Fn(float32x4_t, float32x4_t) -> float32x4_t) -> V {
        [f(a[0], b[0]), f(a[1], b[1]), f(a[2], b[2]), f(a[3], b[3])]
    }

    impl Simd for Baseline {
        type V = V;
        const BLOCK: Block = Block::R6G1;

        methods! {
            splat(x: f32) -> V = [vdupq_n_f32(x); 4];
            load(from: &Lanes) -> V = {
                let p = from.as_ptr();
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
        }
    }
}

#[cfg(not(target_arch = "aarch64"))]
impl Simd for Baseline {
    type V = Lanes;
    const BLOCK: Block = Block::R2G1;

    #[inline(always)]
    fn splat(self, x: f32) -> Lanes {
        [x; LANES]
    }

    #[inline(always)]
    fn load(self, from: &Lanes) -> Lanes {
        *from
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
    fn to_exponent(self, x: Lanes) -> Lanes {
        x.map(|x| f32::from_bits(x.to_bits() << 23))
    }

    #[inline(always)]
    fn exchange<const STEP: usize>(self, a: Lanes, b: Lanes) -> [Lanes; 2] {
        [
            std::array::from_fn(|l| if l & STEP == 0 { a[l] } else { b[l - STEP] }),
            std::array::from_fn(|l| if l & STEP == 0 { a[l + STEP] } else { b[l] }),
        ]
    }
}
