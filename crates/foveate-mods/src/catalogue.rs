//! Named masks and scores, as the text form calls them.
//!
//! [`resolve`] turns a name and its arguments into an expression over the coordinates (for a
//! score, over `score` too). A name without arguments is the same as a call with none.

use crate::capture::{AnyBuffer, ScalarValue};
use crate::error::{ModError, ModErrorKind};
use crate::expr::{self, DynExpr, Expr};
use crate::text::Names;

/// An argument of a named mask or score, as written.
#[derive(Clone, Debug)]
pub enum Arg {
    /// An integer literal.
    Int(i64),
    /// A float literal.
    Float(f32),
    /// The name of a captured buffer.
    Buffer(AnyBuffer),
    /// Anything else.
    Expr(DynExpr),
}

const NAMES: [&str; 4] = ["full", "causal", "document", "softcap"];

/// Every name there is.
pub fn names() -> impl Iterator<Item = &'static str> {
    NAMES.into_iter()
}

/// The mask (bool) or score (f32) called `name`; `None` when there is none.
pub fn resolve(name: &str, args: &[Arg], names: &Names) -> Option<Result<DynExpr, ModError>> {
    let made = match name {
        "full" => no_arguments(name, args).map(|()| Expr::from(true).dynamic().clone()),
        "causal" => no_arguments(name, args).map(|()| expr::q().ge(expr::kv()).dynamic().clone()),
        "document" => no_arguments(name, args).and_then(|()| document(names)),
        "softcap" => match args {
            [Arg::Int(cap)] => Ok(softcap(*cap as f32)),
            [Arg::Float(cap)] => Ok(softcap(*cap)),
            _ => Err(argument(name, "takes one number, the cap: `softcap(30)`")),
        },
        _ => return None,
    };
    Some(made)
}

fn argument(of: &str, reason: impl Into<String>) -> ModError {
    ModErrorKind::Argument { of: of.to_owned(), reason: reason.into() }.into()
}

fn no_arguments(name: &str, args: &[Arg]) -> Result<(), ModError> {
    if args.is_empty() { Ok(()) } else { Err(argument(name, "takes no arguments")) }
}

fn document(names: &Names) -> Result<DynExpr, ModError> {
    let Some(doc) = names.get_buffer("doc") else {
        return Err(argument("document", "needs a captured i32 buffer `doc` of document ids"));
    };
    let at = |position: Expr<i32>| {
        let index = match doc.shape().len() {
            1 => vec![position.dynamic().clone()],
            _ => vec![expr::b().dynamic().clone(), position.dynamic().clone()],
        };
        DynExpr::load(doc, index)
    };
    DynExpr::binary(crate::ir::BinaryOp::Eq, at(expr::q())?, at(expr::kv())?)
}

fn softcap(cap: f32) -> DynExpr {
    let cap = expr::scalar("cap", cap);
    let capped = &cap * (expr::score() / &cap).tanh();
    capped.dynamic().clone()
}

impl DynExpr {
    /// The value of a constant.
    pub(crate) fn constant_value(&self) -> Option<ScalarValue> {
        match self.node().op {
            expr::Op::Const(v) => Some(v),
            _ => None,
        }
    }
}
