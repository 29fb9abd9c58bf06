//! What the macros turn Rust syntax into.
//!
//! `#[mask_mod]`, `#[score_mod]` and their closure forms rewrite an ordinary Rust body into
//! calls of the functions here: `q - kv < window` becomes `lt(sub(q, kv), window)`. Each function
//! is generic over small traits, so that Rust's type checker checks the mod and the compiler's
//! message says what is wrong in the words of a mod. Everything returns an [`Expr`]: a body runs
//! once, when the mod is made, and leaves nothing borrowed behind.
//!
//! Three kinds of operand meet here: expressions ([`Expr`]), literals without a suffix
//! ([`Int`], [`Float`]) that take the type of what they are combined with, and names from around
//! the closure, which [`get`] captures: a number as a run-time scalar called like the variable,
//! everything else as it is.
//!
//! A body that cannot be a mod (a buffer indexed with too few indices) makes one that holds the
//! error, with the place of the body: [`MaskMod::check`] says it, and so does planning.
//!
//! The functions can be called by hand, but [`crate::expr`] is the pleasant way to do that.
//!
//! [`Expr`]: crate::Expr

mod call;
mod capture;
mod operand;
mod operation;

use std::panic::Location;

use crate::program::{MaskMod, ScoreMod};

pub use call::*;
pub use capture::*;
pub use operand::*;
pub use operation::*;

/// An integer literal: an i32, or an f32 next to an f32.
#[derive(Clone, Copy, Debug)]
pub struct Int(pub i32);

/// A float literal.
#[derive(Clone, Copy, Debug)]
pub struct Float(pub f32);

/// A finished mask. One that reads the score, which only a captured expression can bring into it,
/// holds that error.
#[track_caller]
pub fn mask(body: impl Adapt<bool>) -> MaskMod {
    let place = Location::caller();
    MaskMod::holding(MaskMod::new(body.adapt().dynamic()).map_err(|e| e.at(place)))
}

/// A finished score function.
#[track_caller]
pub fn score(body: impl Adapt<f32>) -> ScoreMod {
    let place = Location::caller();
    ScoreMod::holding(ScoreMod::new(body.adapt().dynamic()).map_err(|e| e.at(place)))
}
