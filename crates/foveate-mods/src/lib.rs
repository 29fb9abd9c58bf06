//! Mask and score functions as values: traced, simplified, differentiated, bounded, evaluated.
//!
//! A [`MaskMod`] says which keys a query sees, a [`ScoreMod`] what becomes of a score. Both are
//! small immutable programs of three types (bool, i32, f32) that can be cloned, compared, hashed,
//! printed, put into vectors and returned. The function that says a mod runs once, when the mod is
//! made; nothing of it is left to be called, borrowed or traced again. The manuals are
//! `docs/masks-and-scores.md` and, for text, `docs/text-form.md`.
//!
//! # Four ways in
//!
//! All four give the same program, so they are equal:
//!
//! ```
//! use foveate_mods::{Buffer, MaskMod, closure, expr, mask_mod, masks, text};
//!
//! let doc = Buffer::vector("doc", vec![0, 0, 1, 1, 1]);
//!
//! // 1. Rust syntax: an attribute on a function, or a macro around a closure.
//! #[mask_mod]
//! fn same_document(q: i32, kv: i32, doc: &Buffer<i32>) -> bool {
//!     q >= kv && doc[q] == doc[kv]
//! }
//! let by_function = same_document(&doc);
//! let by_closure = closure::mask_mod!(|q, kv| q >= kv && doc[q] == doc[kv]);
//!
//! // 2. Tracing: values that record what is done to them.
//! let (q, kv) = (expr::q(), expr::kv());
//! let traced = q.ge(&kv) & doc.at([q]).eq(doc.at([kv]));
//! let by_tracing = MaskMod::new(traced.dynamic())?;
//!
//! // 3. Combinators on finished mods, the named ones among them.
//! let by_combining = masks::causal() & masks::document(&doc)?;
//!
//! // 4. Text, as in recipes and on the command line.
//! let names = text::Names::new().buffer(doc.any());
//! let by_text = text::parse_mask("causal & document", &names)?;
//!
//! for other in [by_closure, by_tracing, by_combining, by_text] {
//!     assert_eq!(by_function, other);
//! }
//! # Ok::<(), foveate_mods::ModError>(())
//! ```
//!
//! Numbers that a mod captures are run-time scalars: their value can change without compiling
//! anything again. `constant(n)` in a closure and `#[constant] n: i32` in a function make a number
//! part of the structure instead.
//!
//! ```
//! use foveate_mods::{ScalarValue, score_mod, scores};
//!
//! #[score_mod]
//! fn soft_cap(score: f32, cap: f32) -> f32 {
//!     cap * (score / cap).tanh()
//! }
//! let gentle = soft_cap(50.0);
//! let firm = gentle.map(|program| program.set_scalar("cap", ScalarValue::F32(30.0)))?;
//! assert_eq!(firm, scores::soft_cap(30.0)?);
//! # Ok::<(), foveate_mods::ModError>(())
//! ```

// The attributes name this crate as other crates do.
extern crate self as foveate_mods;

mod arithmetic;
mod blocks;
pub mod bounds;
pub mod capture;
pub mod catalogue;
pub mod closure;
pub mod depends;
mod elements;
pub mod error;
pub mod eval;
pub mod expr;
#[doc(hidden)]
pub mod fuzz;
pub mod gradient;
mod interval;
pub mod ir;
pub mod masks;
mod math;
mod names;
mod op;
mod parameter;
mod point;
pub mod program;
mod ranges;
pub mod scores;
mod simplify;
mod structure;
pub mod text;
pub mod trace;
mod value;
pub mod vector;

pub use bounds::{Bounds, Cover};
pub use capture::{AnyBuffer, Buffer, Scalar};
pub use elements::{ElementType, Elements, SharedElements, StoredElement};
pub use error::{ModError, ModErrorKind};
pub use eval::OutOfRange;
pub use expr::{DynExpr, Expr};
pub use gradient::{CaptureGradient, ScoreGradient};
pub use ir::{Graph, Leaf, Node, NodeId};
pub use parameter::Parameter;
pub use point::{Head, Point};
pub use program::{MaskMod, Program, ScoreMod};
pub use value::{BufferData, Element, ScalarValue, Type};
pub use vector::{Machine, MaskBits, TileProgram};

#[doc(inline)]
pub use foveate_macros::{mask_mod, score_mod};

/// For the expansion of [`closure`]'s macros.
#[doc(hidden)]
pub mod __macros {
    pub use foveate_macros::{mask_closure, score_closure};
}
