//! AVX-512 and AVX2.

use super::group::{LANES, Lanes, Pair, RegisterBlock, Round, Simd, methods};
use half::{bf16, f16};
use std::arch::x86_64::*;

/// Proof of AVX-512 F, BW, DQ, VL.
#[derive(Clone, Copy)]
pub struct Avx512(());

impl Avx512 {
    /// # Safety
    /// The machine has [`super::level::Level::Avx512`].
    #[inline(always)]
    pub unsafe fn new() -> Self {
        Self(())
    }
}

impl Simd for Avx512 {
    type V = __m512;
    const REGISTER_BLOCK: RegisterBlock = RegisterBlock::R12G2;

    methods! {
        splat(x: f32) -> __m512 = _mm512_set1_ps(x);
        load(from: &Lanes) -> __m512 = _mm512_loadu_ps(from.as_ptr());
        load_f16(from: &[f16; LANES]) -> __m512 =
            _mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast()));
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
        clear_masked(x: __m512, score: __m512) -> __m512 = {
            let masked = _mm512_set1_ps(f32::NEG_INFINITY);
            _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(score, masked), x)
        };
        to_exponent(x: __m512) -> __m512 =
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_castps_si512(x)));
        exchange<const STEP>(a: __m512, b: __m512) -> [__m512; 2] = {
            let pick = |lanes: [i32; 16]| {
                _mm512_permutex2var_ps(a, _mm512_loadu_si512(lanes.as_ptr().cast()), b)
            };
            [pick(const { lower(STEP) }), pick(const { upper(STEP) })]
        };
        swap<const STEP>(x: __m512) -> __m512 = match STEP {
            8 => _mm512_shuffle_f32x4::<0b01_00_11_10>(x, x),
            4 => _mm512_shuffle_f32x4::<0b10_11_00_01>(x, x),
            2 => _mm512_permute_ps::<0b01_00_11_10>(x),
            _ => _mm512_permute_ps::<0b10_11_00_01>(x),
        };
        first(x: __m512) -> f32 = _mm512_cvtss_f32(x);
    }
}

/// Proof of AVX-512 F, BW, DQ, VL and BF16.
#[derive(Clone, Copy)]
pub struct Avx512Pairs(Avx512);

/// Sixteen pairs of bf16 in registers.
pub type PairGroup = __m512bh;

impl Avx512Pairs {
    /// # Safety
    /// The machine has [`super::level::Level::Avx512Bf16`].
    #[inline(always)]
    pub unsafe fn new() -> Self {
        // SAFETY: as given.
        Self(unsafe { Avx512::new() })
    }

    methods! {
        pub load_pairs(from: &[Pair; LANES]) -> PairGroup =
            std::mem::transmute::<__m512i, __m512bh>(_mm512_loadu_si512(from.as_ptr().cast()));
        pub splat_pair(x: Pair) -> PairGroup =
            std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(bytemuck::cast(x)));
        /// `a·b + c` in each lane, the second products first.
        pub add_products(a: PairGroup, b: PairGroup, c: __m512) -> __m512 =
            _mm512_dpbf16_ps(c, a, b);
    }
}

impl Round for Avx512Pairs {
    type Floats = Avx512;

    #[inline(always)]
    fn floats(self) -> Avx512 {
        self.0
    }

    methods! {
        along(x: __m512, to: &mut [bf16; LANES]) = _mm256_storeu_si256(
            to.as_mut_ptr().cast(),
            std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(x)),
        );
        beside(first: __m512, second: __m512, to: &mut [Pair; LANES]) = {
            let wide = |x| _mm512_cvtepu16_epi32(
                std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(x))
            );
            let pairs = _mm512_or_si512(wide(first), _mm512_slli_epi32::<16>(wide(second)));
            _mm512_storeu_si512(to.as_mut_ptr().cast(), pairs)
        };
    }
}

/// The lanes of `a` (0 to 15) and `b` (16 to 31) that the first result of [`Simd::exchange`] takes.
const fn lower(step: usize) -> [i32; 16] {
    let (mut lanes, mut l) = ([0; 16], 0);
    while l < 16 {
        lanes[l] = if l & step == 0 { l } else { 16 + l - step } as i32;
        l += 1;
    }
    lanes
}

/// The lanes that the second result takes.
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
    /// The machine has [`super::level::Level::Avx2`].
    #[inline(always)]
    pub unsafe fn new() -> Self {
        Self(())
    }
}

impl Simd for Avx2 {
    type V = [__m256; 2];
    const REGISTER_BLOCK: RegisterBlock = RegisterBlock::R6G1;

    methods! {
        splat(x: f32) -> [__m256; 2] = [_mm256_set1_ps(x); 2];
        load(from: &Lanes) -> [__m256; 2] = {
            let p = from.as_ptr();
            [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))]
        };
        load_f16(from: &[f16; LANES]) -> [__m256; 2] = {
            let p = from.as_ptr().cast::<__m128i>();
            [_mm256_cvtph_ps(_mm_loadu_si128(p)), _mm256_cvtph_ps(_mm_loadu_si128(p.add(1)))]
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
        clear_masked(x: [__m256; 2], score: [__m256; 2]) -> [__m256; 2] = {
            let masked = _mm256_set1_ps(f32::NEG_INFINITY);
            let one = |x, score| _mm256_and_ps(x, _mm256_cmp_ps::<_CMP_NEQ_UQ>(score, masked));
            [one(x[0], score[0]), one(x[1], score[1])]
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
        swap<const STEP>(x: [__m256; 2]) -> [__m256; 2] = match STEP {
            8 => [x[1], x[0]],
            4 => x.map(|x| _mm256_permute2f128_ps::<0x01>(x, x)),
            2 => x.map(|x| _mm256_permute_ps::<0b01_00_11_10>(x)),
            _ => x.map(|x| _mm256_permute_ps::<0b10_11_00_01>(x)),
        };
        first(x: [__m256; 2]) -> f32 = _mm256_cvtss_f32(x[0]);
    }
}
