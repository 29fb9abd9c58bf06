//! The instruction set that loops over lanes are compiled for, found at run time.
//!
//! This is the only module of the crate with `unsafe` in it: calls of functions compiled for
//! features that were found on this machine.

/// An instruction set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// AVX-512 F, BW, DQ, VL.
    Avx512,
    /// AVX2.
    Avx2,
    /// What the compiler may assume of the target.
    Baseline,
}

/// The best level of this machine.
#[inline]
pub fn level() -> Level {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        if is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx2")
        {
            return Level::Avx512;
        }
        if is_x86_feature_detected!("avx2") {
            return Level::Avx2;
        }
    }
    Level::Baseline
}

/// Defines `fn name(args) -> ret` that runs `body(args)`, an `#[inline(always)]` function,
/// compiled for [`level`]. No level fuses multiply-adds: all give the same bits.
macro_rules! for_each_level {
    ($(#[$doc:meta])* $vis:vis $name:ident = $body:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)?) => {
        $(#[$doc])*
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2")]
                fn avx512($($arg: $ty),*) $(-> $ret)? { $body($($arg),*) }
                #[target_feature(enable = "avx2")]
                fn avx2($($arg: $ty),*) $(-> $ret)? { $body($($arg),*) }
                match $crate::vector::level::level() {
                    // SAFETY: `level` has found these features on this machine.
                    $crate::vector::level::Level::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: `level` has found these features on this machine.
                    $crate::vector::level::Level::Avx2 => return unsafe { avx2($($arg),*) },
                    $crate::vector::level::Level::Baseline => {}
                }
            }
            $body($($arg),*)
        }
    };
}

pub(super) use for_each_level;
