//! The instruction sets of this machine, and the dispatch of loops to them.
//!
//! `for_each_level!` compiles a loop over floats for every level, `for_pairs!` a loop over pairs of
//! bf16. Only these macros make the tokens ([`Simd`](super::group::Simd),
//! [`Round`](super::group::Round)) that prove a level's instructions, after they have matched on a
//! level that was detected.

use std::ffi::OsStr;
use std::sync::OnceLock;

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
        // `foveate-mods` detects what mods need; products need FMA and F16C besides.
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

    /// The levels of this machine, best first, beginning with the one that [`VARIABLE`] names.
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

/// The environment variable that names the best level to use. It serves to compare levels on one
/// machine.
pub const VARIABLE: &str = "FOVEATE_CPU_LEVEL";

/// The level that [`VARIABLE`] names.
///
/// # Errors
/// When this machine does not have that level.
pub fn asked() -> Result<Option<Level>, String> {
    named(&std::env::var_os(VARIABLE).unwrap_or_default())
}

/// The level of this machine called `name`; `None` for an empty name, as when the variable is not
/// set.
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

/// Defines `fn name(args) -> ret`, which runs `body(simd, args)` compiled for [`level`], and
/// `name_on(level, args)`, with which the tests compare levels.
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

/// Defines `fn name(args)`, which runs `body(instructions, args)` compiled for pairs of bf16 where
/// [`level`] has them, and `name_on(level, args)`.
macro_rules! for_pairs {
    ($(#[$doc:meta])* $vis:vis $name:ident / $on:ident = $body:ident($($arg:ident: $ty:ty),* $(,)?)) => {
        $(#[$doc])*
        #[inline]
        $vis fn $name($($arg: $ty),*) {
            $on($crate::simd::level::level(), $($arg),*)
        }

        /// The same on `level`, which this machine has.
        #[inline]
        $vis fn $on(level: $crate::simd::level::Level, $($arg: $ty),*) {
            debug_assert!($crate::simd::level::Level::available().contains(&level));
            match level {
                #[cfg(target_arch = "x86_64")]
                $crate::simd::level::Level::Avx512Bf16 => {
                    #[target_feature(
                        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c"
                    )]
                    fn run($($arg: $ty),*) {
                        // SAFETY: this function has the features of the token.
                        $body(unsafe { $crate::simd::x86::Avx512Pairs::new() }, $($arg),*)
                    }
                    // SAFETY: a level is one of those that were found on this machine.
                    unsafe { run($($arg),*) }
                }
                _ => $body($crate::simd::baseline::Baseline::new(), $($arg),*),
            }
        }
    };
}
pub(crate) use for_pairs;

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;
    use crate::simd::group::{LANES, Lanes, Simd};

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
