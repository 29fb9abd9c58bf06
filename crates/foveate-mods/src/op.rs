//! The operations of masks and scores: what each takes and gives.
//!
//! Whatever evaluates, prints, bounds or differentiates mods has a table of them. Matches are
//! exhaustive, and tests run over [`UnaryOp::ALL`] and [`BinaryOp::ALL`] where the compiler cannot
//! look: an operation that one table lacks fails a test that names the operation.

use crate::value::Type;

/// Defines the operations of one arity, and the list of them all.
macro_rules! operations {
    ($(#[$doc:meta])* $name:ident { $($(#[$what:meta])* $op:ident,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $name {
            $($(#[$what])* $op,)*
        }

        impl $name {
            /// Every operation, in the order of the enum.
            pub const ALL: &[Self] = &[$(Self::$op,)*];
        }
    };
}

operations! {
    /// Operations on one value.
    UnaryOp {
        /// `!x` on bool.
        Not,
        /// `-x` on i32 (wrapping) or f32.
        Neg,
        /// `|x|` on i32 (wrapping) or f32.
        Abs,
        /// Rounds towards minus infinity (f32).
        Floor,
        /// `e^x` (f32).
        Exp,
        /// `2^x` (f32).
        Exp2,
        /// Natural logarithm (f32).
        Log,
        /// Binary logarithm (f32).
        Log2,
        /// Square root (f32).
        Sqrt,
        /// `1/√x` (f32).
        Rsqrt,
        /// Hyperbolic tangent (f32).
        Tanh,
        /// `1/(1+e^-x)` (f32).
        Sigmoid,
        /// Error function (f32).
        Erf,
        /// Sine (f32).
        Sin,
        /// Cosine (f32).
        Cos,
        /// i32 bits to an f32 in `[0, 1)`: `(x as u32 >> 8) · 2⁻²⁴`.
        Unit,
        /// The same i32 or f32, through which no gradient passes.
        Detach,
    }
}

operations! {
    /// Operations on two values of one type. `>` and `>=` are `<` and `<=` with operands swapped.
    BinaryOp {
        /// Sum of i32 (wrapping) or f32.
        Add,
        /// Difference of i32 (wrapping) or f32.
        Sub,
        /// Product of i32 (wrapping) or f32.
        Mul,
        /// Quotient of f32; of i32 rounded towards minus infinity, 0 when the divisor is 0.
        Div,
        /// Euclidean remainder of i32, 0 when the divisor is 0; of f32, `x - y·floor(x/y)`.
        Rem,
        /// Smaller of i32 or f32.
        Min,
        /// Larger of i32 or f32.
        Max,
        /// `x^y` (f32).
        Pow,
        /// Equality of bool, i32 or f32.
        Eq,
        /// Inequality of bool, i32 or f32.
        Ne,
        /// `x < y` on i32 or f32.
        Lt,
        /// `x <= y` on i32 or f32.
        Le,
        /// Conjunction of bool, or of the bits of i32. Both sides are always evaluated; nothing can
        /// trap.
        And,
        /// Disjunction of bool, or of the bits of i32.
        Or,
        /// Exclusive or of bool, or of the bits of i32.
        Xor,
        /// Bits of an i32 shifted up by `y`; 0 when `y` is not in `0..32`.
        Shl,
        /// Bits of an i32 shifted down by `y`, the sign shifted in; all sign when `y` is not in
        /// `0..32`.
        Shr,
        /// Counter-based hash of two i32 into one, see [`mix`].
        Mix,
    }
}

impl UnaryOp {
    /// The types that it takes.
    pub fn takes(self) -> &'static [Type] {
        use UnaryOp::*;
        match self {
            Not => &[Type::Bool],
            Neg | Abs | Detach => &[Type::I32, Type::F32],
            Unit => &[Type::I32],
            Floor | Exp | Exp2 | Log | Log2 | Sqrt | Rsqrt | Tanh | Sigmoid | Erf | Sin | Cos => {
                &[Type::F32]
            }
        }
    }

    /// The type that it gives for an operand of type `of`.
    pub fn result(self, of: Type) -> Type {
        if self == UnaryOp::Unit { Type::F32 } else { of }
    }
}

impl BinaryOp {
    /// The types that it takes, both operands having the same.
    pub fn takes(self) -> &'static [Type] {
        use BinaryOp::*;
        match self {
            And | Or | Xor => &[Type::Bool, Type::I32],
            Eq | Ne => &[Type::Bool, Type::I32, Type::F32],
            Shl | Shr | Mix => &[Type::I32],
            Pow => &[Type::F32],
            Add | Sub | Mul | Div | Rem | Min | Max | Lt | Le => &[Type::I32, Type::F32],
        }
    }

    /// The type that it gives for operands of type `of`.
    pub fn result(self, of: Type) -> Type {
        use BinaryOp::*;
        if matches!(self, Eq | Ne | Lt | Le) { Type::Bool } else { of }
    }
}

/// The hash behind [`BinaryOp::Mix`], the same bits on every backend: the 32-bit finaliser
/// of MurmurHash3 over `x · 0x9E3779B1 + y + 0x7F4A7C15`.
#[inline(always)]
pub fn mix(x: i32, y: i32) -> i32 {
    let mut z =
        (x as u32).wrapping_mul(0x9E37_79B1).wrapping_add(y as u32).wrapping_add(0x7F4A_7C15);
    z = (z ^ (z >> 16)).wrapping_mul(0x85EB_CA6B);
    z = (z ^ (z >> 13)).wrapping_mul(0xC2B2_AE35);
    (z ^ (z >> 16)) as i32
}
