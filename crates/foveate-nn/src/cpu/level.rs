//! Loops over floats, compiled for the instruction sets of this machine.
//!
//! `pulp` finds the best of AVX-512, AVX2, NEON and what the target has when a loop is called. No
//! loop here fuses a multiply-add and every sum has partial sums of its own (`math`), so all
//! levels give the same bits.

/// Defines `fn name(args) -> ret` that runs `body(args)`, an `#[inline(always)]` function, compiled
/// for the best instruction set of the machine, and `name_on(arch, args)`, with which the tests
/// compare instruction sets. What `body` calls is `#[inline(always)]`, too.
macro_rules! for_each_level {
    ($(#[$doc:meta])* $name:ident / $on:ident = $body:ident($($arg:ident: $ty:ty),* $(,)?)) => {
        $crate::cpu::level::for_each_level! {
            $(#[$doc])* $name / $on = $body($($arg: $ty),*) -> ()
        }
    };
    ($(#[$doc:meta])* $name:ident / $on:ident = $body:ident($($arg:ident: $ty:ty),* $(,)?) -> $ret:ty) => {
        $(#[$doc])*
        #[inline]
        pub(super) fn $name($($arg: $ty),*) -> $ret {
            $on(pulp::Arch::new(), $($arg),*)
        }

        /// The same on `arch`.
        #[inline]
        pub(super) fn $on(arch: pulp::Arch, $($arg: $ty),*) -> $ret {
            /// The call, each argument with a type of its own.
            #[allow(non_camel_case_types)]
            struct Call<$($arg),*> { $($arg: $arg),* }
            impl pulp::WithSimd for Call<$($ty),*> {
                type Output = $ret;
                #[inline(always)]
                fn with_simd<S: pulp::Simd>(self, _: S) -> $ret {
                    $body($(self.$arg),*)
                }
            }
            arch.dispatch(Call { $($arg),* })
        }
    };
}
pub(super) use for_each_level;

/// The instruction sets of this machine.
#[cfg(test)]
pub(super) fn available() -> Vec<pulp::Arch> {
    let mut all = vec![pulp::Arch::Scalar];
    #[cfg(target_arch = "x86_64")]
    {
        all.extend(pulp::x86::V3::try_new().map(pulp::Arch::V3));
        all.extend(pulp::x86::V4::try_new().map(pulp::Arch::V4));
    }
    #[cfg(target_arch = "aarch64")]
    all.extend(pulp::aarch64::Neon::try_new().map(pulp::Arch::Neon));
    all
}
