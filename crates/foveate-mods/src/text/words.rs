//! The vocabulary of the text form, in tables that parser and printer share: what one writes the
//! other reads.

use crate::ir::{BinaryOp, UnaryOp};
use crate::value::Type;

/// Binary operators: mark, how tightly it binds, operation, whether operands are exchanged.
pub(super) const OPERATORS: [(&str, u8, BinaryOp, bool); 18] = [
    ("||", 1, BinaryOp::Or, false),
    ("|", 1, BinaryOp::Or, false),
    ("^", 2, BinaryOp::Xor, false),
    ("&&", 3, BinaryOp::And, false),
    ("&", 3, BinaryOp::And, false),
    ("==", COMPARE, BinaryOp::Eq, false),
    ("!=", COMPARE, BinaryOp::Ne, false),
    ("<", COMPARE, BinaryOp::Lt, false),
    ("<=", COMPARE, BinaryOp::Le, false),
    (">", COMPARE, BinaryOp::Lt, true),
    (">=", COMPARE, BinaryOp::Le, true),
    ("<<", 5, BinaryOp::Shl, false),
    (">>", 5, BinaryOp::Shr, false),
    ("+", 6, BinaryOp::Add, false),
    ("-", 6, BinaryOp::Sub, false),
    ("*", 7, BinaryOp::Mul, false),
    ("/", 7, BinaryOp::Div, false),
    ("%", 7, BinaryOp::Rem, false),
];

pub(super) const COMPARE: u8 = 4;

pub(super) const UNARY: [(&str, UnaryOp); 15] = [
    ("abs", UnaryOp::Abs),
    ("floor", UnaryOp::Floor),
    ("exp", UnaryOp::Exp),
    ("exp2", UnaryOp::Exp2),
    ("log", UnaryOp::Log),
    ("log2", UnaryOp::Log2),
    ("sqrt", UnaryOp::Sqrt),
    ("rsqrt", UnaryOp::Rsqrt),
    ("tanh", UnaryOp::Tanh),
    ("sigmoid", UnaryOp::Sigmoid),
    ("erf", UnaryOp::Erf),
    ("sin", UnaryOp::Sin),
    ("cos", UnaryOp::Cos),
    ("unit", UnaryOp::Unit),
    ("detach", UnaryOp::Detach),
];

pub(super) const BINARY: [(&str, BinaryOp); 4] = [
    ("min", BinaryOp::Min),
    ("max", BinaryOp::Max),
    ("pow", BinaryOp::Pow),
    ("mix", BinaryOp::Mix),
];

pub(super) const TYPES: [(&str, Type); 3] =
    [("bool", Type::Bool), ("i32", Type::I32), ("f32", Type::F32)];

/// The read whose negative indices count from the end: a buffer and its indices.
pub(super) const FROM_END: &str = "from_end";

/// Words that cannot be the names of values.
pub(super) const WORDS: [&str; 9] =
    ["let", "if", "else", "then", "as", "true", "false", "inf", "nan"];

/// The function of an operation in the text form, for those that have no operator.
pub(super) fn function_name(op: Result<UnaryOp, BinaryOp>) -> Option<&'static str> {
    match op {
        Ok(op) => UNARY.iter().find(|(_, o)| *o == op).map(|(name, _)| *name),
        Err(op) => BINARY.iter().find(|(_, o)| *o == op).map(|(name, _)| *name),
    }
}

/// The operator of an operation and how tightly it binds.
pub(super) fn operator(op: BinaryOp) -> Option<(&'static str, u8)> {
    let found = OPERATORS.iter().rev().find(|(_, _, o, swapped)| *o == op && !swapped);
    found.map(|(mark, tight, ..)| (*mark, *tight))
}
