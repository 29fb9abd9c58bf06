//! The operations of masks and scores.

/// Operations on one value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum UnaryOp {
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
}

/// Operations on two values of one type. `>` and `>=` are `<` and `<=` with operands swapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BinaryOp {
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
    /// Conjunction of bool. Both sides are always evaluated; nothing can trap.
    And,
    /// Disjunction of bool.
    Or,
    /// Exclusive or of bool.
    Xor,
    /// Counter-based hash of two i32 into one, see [`mix`].
    Mix,
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
