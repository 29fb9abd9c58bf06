//! The numbers and buffers that named masks and scores take.

use crate::capture::Buffer;
use crate::error::{ModError, ModErrorKind};
use crate::expr::{self, DynExpr, Expr, IntoScalar};
use crate::ir::Node;
use crate::program::Program;
use crate::value::{Element, ScalarValue};

pub(crate) fn argument(of: &str, reason: impl Into<String>) -> ModError {
    ModErrorKind::Argument { of: of.to_owned(), reason: reason.into() }.into()
}

/// A number of a named mask or score: an `i32` or `f32`, which becomes a run-time scalar called
/// like the parameter, or an expression, such as a run-time scalar of another name or a buffer
/// read for each head.
///
/// ```
/// use foveate_mods::{Buffer, expr, masks};
/// masks::sliding_window(256)?;
/// masks::sliding_window(expr::scalar("window", 256))?;
/// let of_head = Buffer::vector("windows", vec![64, 256]);
/// masks::sliding_window(of_head.at([expr::h()]))?;
/// assert!(masks::sliding_window(0).is_err());
/// # Ok::<(), foveate_mods::ModError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Parameter<T: Element>(Given<T>);

#[derive(Clone, Debug)]
enum Given<T: Element> {
    Number(T),
    Expr(Expr<T>),
}

macro_rules! numbers {
    ($($ty:ty),*) => {$(
        impl From<$ty> for Parameter<$ty> {
            fn from(number: $ty) -> Self { Self(Given::Number(number)) }
        }
    )*};
}
numbers!(i32, f32);

impl<T: Element> From<Expr<T>> for Parameter<T> {
    fn from(expr: Expr<T>) -> Self {
        Self(Given::Expr(expr))
    }
}

impl<T: Element> From<&Expr<T>> for Parameter<T> {
    fn from(expr: &Expr<T>) -> Self {
        expr.clone().into()
    }
}

impl<T: Element + IntoScalar> Parameter<T> {
    /// The parameter in the mod; a number is the run-time scalar `name`.
    pub(crate) fn named(self, name: &str) -> Expr<T> {
        match self.0 {
            Given::Number(number) => expr::scalar(name, number),
            Given::Expr(expr) => expr,
        }
    }

    /// Its value, where that is the same for every query and key.
    fn value(&self) -> Option<ScalarValue> {
        match &self.0 {
            Given::Number(number) => Some(number.into_scalar()),
            Given::Expr(expr) => known(expr.dynamic()),
        }
    }
}

impl Parameter<i32> {
    /// The parameter `name` of the mask `of`, refused where it is known to be below `least`.
    pub(crate) fn at_least(self, least: i32, of: &str, name: &str) -> Result<Expr<i32>, ModError> {
        match self.value() {
            Some(ScalarValue::I32(v)) if v < least => {
                Err(argument(of, format!("{name} must be at least {least}, not {v}")))
            }
            _ => Ok(self.named(name)),
        }
    }
}

impl Parameter<f32> {
    /// The parameter `name` of the score `of`, refused where it is known not to be positive, or
    /// not to be finite.
    pub(crate) fn positive(self, of: &str, name: &str) -> Result<Expr<f32>, ModError> {
        match self.value() {
            Some(ScalarValue::F32(v)) if !(v > 0.0 && v.is_finite()) => {
                Err(argument(of, format!("{name} must be a positive number, not {v}")))
            }
            _ => Ok(self.named(name)),
        }
    }
}

/// Refuses a buffer whose number of axes is none of `ranks`.
pub(crate) fn rank<T: Element>(
    of: &str,
    buffer: &Buffer<T>,
    ranks: &[usize],
) -> Result<(), ModError> {
    if ranks.contains(&buffer.shape().len()) {
        return Ok(());
    }
    let (name, shape) = (buffer.any().name(), buffer.shape());
    let wanted: Vec<String> = ranks.iter().map(usize::to_string).collect();
    let axes = if ranks == [1] { "axis" } else { "axes" };
    let wanted = wanted.join(" or ");
    Err(argument(of, format!("`{name}` must have {wanted} {axes}, but its shape is {shape:?}")))
}

/// `leaf`, or 0 for an axis of length 1, which is broadcast.
pub(crate) fn along(leaf: Expr<i32>, len: usize) -> Expr<i32> {
    if len == 1 { Expr::from(0) } else { leaf }
}

/// The value of an expression that reads no coordinate and no buffer.
fn known(expr: &DynExpr) -> Option<ScalarValue> {
    let program = Program::build(std::slice::from_ref(expr));
    let varies = |node: &Node| matches!(node, Node::Leaf(_) | Node::Load { .. });
    if program.check().is_err() || program.graph().nodes().iter().any(varies) {
        return None;
    }
    let values = program.eval(&Default::default()).expect("it reads no buffer");
    values.first().copied()
}
