//! [`mask_mod!`](crate::closure::mask_mod) and [`score_mod!`](crate::closure::score_mod) around
//! closures.
//!
//! They live in a module of their own because Rust allows one macro of a name in a scope, and
//! the attributes `#[mask_mod]` and `#[score_mod]` have these names at the root. Say
//! `closure::mask_mod!(…)`, or `use foveate::closure::mask_mod` in the function (or the module)
//! that makes mods from closures; an attribute of that name imported further out still works.
//!
//! ```
//! use foveate_mods::{Buffer, MaskMod, closure};
//!
//! /// One mask for each layer: `window` doubles, `doc` is shared.
//! fn layers(doc: &Buffer<i32>, n: usize) -> Vec<MaskMod> {
//!     (0..n)
//!         .map(|layer| {
//!             let window = 128 << layer;
//!             closure::mask_mod!(|q, kv| q >= kv && q - kv < window && doc[q] == doc[kv])
//!         })
//!         .collect()
//! }
//! assert_eq!(layers(&Buffer::vector("doc", vec![0, 0, 1]), 3).len(), 3);
//! ```

#[doc(inline)]
pub use crate::{__mask_closure as mask_mod, __score_closure as score_mod};

/// A [`MaskMod`](crate::MaskMod) from a closure over coordinates: `mask_mod!(|q, kv| q >= kv)`.
///
/// The body is what `#[mask_mod]` takes. Names from around the closure are captured: numbers as
/// run-time scalars called like the variable (`constant(n)` makes one part of the structure),
/// buffers, expressions and mods by sharing. Nothing stays borrowed.
#[doc(hidden)]
#[macro_export]
macro_rules! __mask_closure {
    ($($closure:tt)*) => { $crate::__macros::mask_closure!([$crate] $($closure)*) };
}

/// A [`ScoreMod`](crate::ScoreMod) from a closure over the score and coordinates:
/// `score_mod!(|score, q, kv| score - (q - kv) as f32 * slope)`.
///
/// The body and the captures are those of [`mask_mod!`](crate::closure::mask_mod).
#[doc(hidden)]
#[macro_export]
macro_rules! __score_closure {
    ($($closure:tt)*) => { $crate::__macros::score_closure!([$crate] $($closure)*) };
}
