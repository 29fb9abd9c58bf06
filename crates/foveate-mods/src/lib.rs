//! Mask and score functions as values: traced, simplified, differentiated, bounded, evaluated.

// The attributes name this crate as other crates do.
extern crate self as foveate_mods;

mod blocks;
pub mod bounds;
pub mod capture;
pub mod catalogue;
pub mod closure;
pub mod depends;
pub mod error;
pub mod eval;
pub mod expr;
pub mod gradient;
pub mod ir;
pub mod masks;
mod math;
pub mod program;
pub mod scores;
mod simplify;
mod structure;
pub mod text;
pub mod trace;
pub mod vector;

pub use bounds::{Bounds, Cover};
pub use capture::{AnyBuffer, Buffer, BufferData, Element, Scalar, ScalarValue};
pub use error::{ModError, ModErrorKind};
pub use eval::{OutOfRange, Point};
pub use expr::{DynExpr, Expr};
pub use gradient::{CaptureGradient, ScoreGradient};
pub use ir::{Graph, Leaf, Node, NodeId, Type};
pub use program::{MaskMod, Program, ScoreMod};
pub use vector::{Head, Kernel, Machine};

#[doc(inline)]
pub use foveate_macros::{mask_mod, score_mod};

/// For the expansion of [`closure`]'s macros.
#[doc(hidden)]
pub mod __macros {
    pub use foveate_macros::{mask_closure, score_closure};
}
