//! Instruction sets: sixteen floats at a time on each of them.
//!
//! Loops are written once, generic over a [`Simd`], and compiled once per instruction set by
//! `for_each_level!`. A value of such a type is the proof that this machine has the instructions,
//! so its methods are safe. A group has [`LANES`] floats on every level, in one register of
//! AVX-512, two of AVX2, four of NEON: loops do the same sums in the same order everywhere.

use std::ffi::OsStr;
use std::sync::OnceLock;

use half::f16;

/// Floats in a group.
pub const LANES: usize = 16;

/// A group in memory.
pub type Lanes = [f32; LANES];

/// An instruction set that loops are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// AVX-512 with products of bf16.
    Avx512Bf16,
    /// AVX-512 F, BW, DQ, VL.
    Avx512,
    /// AVX2, FMA and F16C.
    Avx2,
    /// What the compiler may assume of the target.
    Baseline,
}

impl Level {
    /// Its name, for reports.
    pub fn name(self) -> &'static str {
        match self {
            Level::Avx512Bf16 => "AVX-512+BF16",
            Level::Avx512 => "AVX-512",
            Level::Avx2 => "AVX2+FMA",
            Level::Baseline if cfg!(target_arch = "aarch64") => "NEON",
            Level::Baseline => "baseline",
        }
    }

    #[cfg(all(target_arch = "x86_64", not(miri)))]
    fn is_here(self) -> bool {
        use foveate_mods::vector;
        // What mods need, which is looked for there, and what products add to it.
        let of_mods = vector::level();
        let added = is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        match self {
            Level::Avx512Bf16 => Level::Avx512.is_here() && is_x86_feature_detected!("avx512bf16"),
            Level::Avx512 => Level::Avx2.is_here() && of_mods == vector::Level::Avx512,
            Level::Avx2 => added && of_mods != vector::Level::Baseline,
            Level::Baseline => true,
        }
    }

    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    fn is_here(self) -> bool {
        self == Level::Baseline
    }

    /// Whether it multiplies pairs of bf16 faster than floats.
    pub fn has_pairs(self) -> bool {
        self == Level::Avx512Bf16
    }

    /// The levels of this machine, best first, from the one asked for on.
    pub fn available() -> &'static [Level] {
        static LEVELS: OnceLock<Vec<Level>> = OnceLock::new();
        LEVELS.get_or_init(|| {
            let here = LEVELS_BEST_FIRST.into_iter().filter(|level| level.is_here());
            match asked() {
                Ok(Some(level)) => here.skip_while(|&own| own != level).collect(),
                _ => here.collect(),
            }
        })
    }
}

const LEVELS_BEST_FIRST: [Level; 4] =
    [Level::Avx512Bf16, Level::Avx512, Level::Avx2, Level::Baseline];

/// The environment variable that names the best level to use, to compare levels on one machine.
pub const VARIABLE: &str = "FOVEATE_CPU_LEVEL";

/// The level that [`VARIABLE`] names.
///
/// # Errors
/// When that is none of this machine's.
pub fn asked() -> Result<Option<Level>, String> {
    named(&std::env::var_os(VARIABLE).unwrap_or_default())
}

/// The level of this machine that is called `name`; none when that is empty, as when it is not set.
fn named(name: &OsStr) -> Result<Option<Level>, String> {
    if name.is_empty() {
        return Ok(None);
    }
    let mut here = LEVELS_BEST_FIRST.into_iter().filter(|level| level.is_here());
    here.clone().find(|level| name == level.name()).map(Some).ok_or_else(|| {
        let names: Vec<&str> = here.by_ref().map(Level::name).collect();
        format!("no level `{}`; this machine has {}", name.display(), names.join(", "))
    })
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
                $crate::simd::level::Level::Avx512Bf16 | $crate::simd::level::Level::Avx512 => {
                    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
                    fn run($($arg: $ty),*) $(-> $ret)? {
                        // SAFETY: this function has the features of the token.
                        $body(unsafe { $crate::simd::x86::Avx512::new() }, $($arg),*)
                    }
                    // SAFETY: a level is one of those that were found on this machine.
                    unsafe { run($($arg),*) }
                }
                #[cfg(target_arch = "x86_64")]
                $crate::simd::level::Level::Avx2 => {
                    #[target_feature(enable = "avx2,fma,f16c")]
                    fn run($($arg: $ty),*) $(-> $ret)? {
                        // SAFETY: this function has the features of the token.
                        $body(unsafe { $crate::simd::x86::Avx2::new() }, $($arg),*)
                    }
                    // SAFETY: a level is one of those that were found on this machine.
                    unsafe { run($($arg),*) }
                }
                _ => $body($crate::simd::baseline::Baseline::new(), $($arg),*),
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

#[cfg(test)]
mod tests {
    use super::*;

    for_each_level! {
        #[expect(dead_code, reason = "the test names the level")]
        widened / widened_on = widened_body(from: &[f16; LANES]) -> Lanes
    }

    #[inline(always)]
    fn widened_body<S: Simd>(s: S, from: &[f16; LANES]) -> Lanes {
        let mut to = [f32::NAN; LANES];
        s.store(s.load_f16(from), &mut to);
        to
    }

    #[test]
    fn a_level_is_asked_for_by_name_and_an_empty_name_asks_for_none() {
        assert_eq!(named(OsStr::new("")), Ok(None));
        assert_eq!(named(OsStr::new(Level::Baseline.name())), Ok(Some(Level::Baseline)));
        let message = named(OsStr::new("AVX-1024")).expect_err("no such level");
        assert!(message.starts_with("no level `AVX-1024`; this machine has "), "{message}");
        assert!(message.ends_with(Level::Baseline.name()), "{message}");
    }

    #[test]
    fn every_half_is_widened_exactly_on_every_level() {
        let step = if cfg!(miri) { 1013 } else { 1 };
        for first in (0..=u16::MAX).step_by(step) {
            let halves = std::array::from_fn(|l| f16::from_bits(first.wrapping_add(l as u16)));
            for &level in Level::available() {
                for (half, got) in halves.iter().zip(widened_on(level, &halves)) {
                    let want = half.to_f32();
                    let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                    assert!(same, "{}: {half:?} gave {got}", level.name());
                }
            }
        }
    }
}
