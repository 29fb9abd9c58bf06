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
//! [`MaskMod::check`]: crate::MaskMod::check

mod call;
mod capture;
mod operand;
mod operation;
mod result;

pub use call::*;
pub use capture::*;
pub use operand::*;
pub use operation::*;
pub use result::*;
