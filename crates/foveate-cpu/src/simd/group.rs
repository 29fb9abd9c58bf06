//! Groups of sixteen floats, and the operations that every instruction set has on them.
//!
//! A loop is written once, generic over [`Simd`], and compiled once for each instruction set. A
//! value of a type that implements [`Simd`] proves that this machine has the instructions, so its
//! methods are safe. A group has [`LANES`] floats on every level (one register of AVX-512, two of
//! AVX2, four of NEON), so a loop adds the same numbers in the same order everywhere.

use half::{bf16, f16};

/// Floats in a group.
pub const LANES: usize = 16;

/// A group in memory.
pub type Lanes = [f32; LANES];

/// Two bf16.
pub type Pair = [bf16; 2];

/// Rows and groups of columns of a product whose accumulators fit the registers.
#[allow(dead_code, reason = "a target has some of them")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegisterBlock {
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
    /// The accumulators of a product that fit the registers.
    const REGISTER_BLOCK: RegisterBlock;

    /// `x` in every lane.
    fn splat(self, x: f32) -> Self::V;
    fn load(self, from: &Lanes) -> Self::V;
    /// A group of f16, exactly.
    fn load_f16(self, from: &[f16; LANES]) -> Self::V;
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
    /// `x`, but 0 in the lanes where `score` is `-∞`, whatever `x` is there.
    fn clear_masked(self, x: Self::V, score: Self::V) -> Self::V;
    /// The bits of each lane shifted left by 23, as a float: an integer becomes an exponent.
    fn to_exponent(self, x: Self::V) -> Self::V;

    /// Exchanges the lanes of `a` whose number has the bit `STEP` for the lanes of `b` that are
    /// `STEP` lower. Applied to all pairs of rows `STEP` apart, for 8, 4, 2 and 1, it transposes
    /// sixteen rows.
    fn exchange<const STEP: usize>(self, a: Self::V, b: Self::V) -> [Self::V; 2];
    /// Exchanges each lane for the one whose number differs in the bit `STEP`: 8, 4, 2 or 1.
    fn swap<const STEP: usize>(self, x: Self::V) -> Self::V;
    /// Lane 0.
    fn first(self, x: Self::V) -> f32;

    /// The sum of the lanes, by halves.
    #[inline(always)]
    fn sum(self, x: Self::V) -> f32 {
        self.fold(x, |a, b| self.add(a, b))
    }

    /// The largest lane; NaN when one is.
    #[inline(always)]
    fn largest(self, x: Self::V) -> f32 {
        self.fold(x, |a, b| self.larger(a, b))
    }

    /// Reduces the lanes with `f`, by halves.
    #[inline(always)]
    fn fold(self, x: Self::V, f: impl Fn(Self::V, Self::V) -> Self::V) -> f32 {
        let x = f(x, self.swap::<8>(x));
        let x = f(x, self.swap::<4>(x));
        let x = f(x, self.swap::<2>(x));
        self.first(f(x, self.swap::<1>(x)))
    }
}

/// Instructions that round floats to bf16, ties to even.
pub trait Round: Copy {
    /// The instructions for floats of the same level.
    type Floats: Simd;

    fn floats(self) -> Self::Floats;
    /// Rounds each lane.
    fn along(self, x: <Self::Floats as Simd>::V, to: &mut [bf16; LANES]);
    /// Rounds lane `i` of both into pair `i`.
    fn beside(
        self,
        first: <Self::Floats as Simd>::V,
        second: <Self::Floats as Simd>::V,
        to: &mut [Pair; LANES],
    );
}

/// The larger of two; NaN when either is.
#[inline(always)]
pub fn larger(a: f32, b: f32) -> f32 {
    if b > a || b.is_nan() { b } else { a }
}

/// Converts an f16 to f32 exactly and without branches. A product corrects the bias of the exponent
/// and normalises subnormals; infinity and NaN get the largest exponent. All operations are on
/// 32 bits, which compilers vectorise.
#[inline(always)]
pub fn widen(bits: u16) -> f32 {
    const CORRECTION: f32 = f32::from_bits((127 + 127 - 15) << 23);
    const NOT_FINITE: u32 = 0x7c00 << 13;
    let bits = u32::from(bits);
    let magnitude = (bits & 0x7fff) << 13;
    let exponent = if magnitude >= NOT_FINITE { 0x7f80_0000 } else { 0 };
    let finite = (f32::from_bits(magnitude) * CORRECTION).to_bits();
    f32::from_bits(finite | exponent | (bits & 0x8000) << 16)
}

/// Defines methods of a [`Simd`] by intrinsics.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! methods {
    ($(
        $(#[$doc:meta])*
        $vis:vis $name:ident $(<const $n:ident>)? ($($arg:ident: $ty:ty),*) $(-> $ret:ty)? = $e:expr;
    )*) => {$(
        $(#[$doc])*
        #[inline(always)]
        $vis fn $name $(<const $n: usize>)? (self, $($arg: $ty),*) $(-> $ret)? {
            // SAFETY: `self` proves that the machine has the instructions; references to groups
            // are valid for the loads and stores of a group.
            unsafe { $e }
        }
    )*};
}
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) use methods;
