//! Groups of sixteen floats, and what every instruction set can do with them.
//!
//! Loops are written once, generic over a [`Simd`], and compiled once per instruction set. A value
//! of such a type is the proof that this machine has the instructions, so its methods are safe. A
//! group has [`LANES`] floats on every level, in one register of AVX-512, two of AVX2, four of
//! NEON: loops do the same sums in the same order everywhere.

use half::{bf16, f16};

/// Floats in a group.
pub const LANES: usize = 16;

/// A group in memory.
pub type Lanes = [f32; LANES];

/// Two bf16.
pub type Pair = [bf16; 2];

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
    /// The bits of each lane shifted left by 23, as a float: an integer becomes an exponent.
    fn to_exponent(self, x: Self::V) -> Self::V;

    /// `a` and `b`, with the lanes of `a` whose number has the bit `STEP` exchanged for the lanes
    /// of `b` that lie `STEP` lower. Done for all pairs of rows `STEP` apart, and for 8, 4, 2 and
    /// 1, it transposes sixteen rows.
    fn exchange<const STEP: usize>(self, a: Self::V, b: Self::V) -> [Self::V; 2];
    /// The lanes, each in the place of the one whose number differs in the bit `STEP`: 8, 4, 2 or 1.
    fn swap<const STEP: usize>(self, x: Self::V) -> Self::V;
    /// Lane 0.
    fn first(self, x: Self::V) -> f32;

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
        let x = f(x, self.swap::<8>(x));
        let x = f(x, self.swap::<4>(x));
        let x = f(x, self.swap::<2>(x));
        self.first(f(x, self.swap::<1>(x)))
    }
}

/// Instructions that round floats to bf16, ties to even.
pub trait Round: Copy {
    /// Those for floats.
    type Floats: Simd;

    fn floats(self) -> Self::Floats;
    /// Each lane.
    fn along(self, x: <Self::Floats as Simd>::V, to: &mut [bf16; LANES]);
    /// Lane `i` of both becomes pair `i`.
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

/// An f16 as f32, exactly, without branches: the exponent is moved to its place and corrected by a
/// product, which makes subnormals normal, too; infinity and NaN get the exponent of theirs. All
/// of it on 32 bits, as compilers make vectors of.
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
