//! Mask and score functions as values: traced, simplified, differentiated, bounded, evaluated.

pub mod capture;
pub mod error;
pub mod expr;
pub mod ir;
pub mod program;

pub use capture::{AnyBuffer, Buffer, BufferData, Element, Scalar, ScalarValue};
pub use error::{ModError, ModErrorKind};
pub use expr::{DynExpr, Expr};
pub use ir::{Graph, Leaf, Node, NodeId, Type};
pub use program::{MaskMod, Program, ScoreMod};
