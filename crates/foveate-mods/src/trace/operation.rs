//! Operators and functions of a body.

use super::operand::{Adapt, Cast, Float, Int, Pair};
use crate::capture::Buffer;
use crate::expr::{DynExpr, Expr, Number};
use crate::ir::BinaryOp;
use crate::value::Element;

const CHECKED: &str = "Rust's types allow the operands";

fn apply<T: Element, R: Element>(op: BinaryOp, (x, y): (Expr<T>, Expr<T>)) -> Expr<R> {
    let made = DynExpr::binary(op, x.dynamic().clone(), y.dynamic().clone());
    made.and_then(DynExpr::typed).expect(CHECKED)
}

macro_rules! arithmetic {
    ($($(#[$doc:meta])* $name:ident $op:ident;)*) => {$(
        $(#[$doc])*
        pub fn $name<A: Pair<B>, B>(x: A, y: B) -> Expr<A::Of> where A::Of: Number {
            apply(BinaryOp::$op, x.pair(y))
        }
    )*};
}

arithmetic! {
    /// `x + y`.
    add Add;
    /// `x - y`.
    sub Sub;
    /// `x * y`.
    mul Mul;
    /// `x / y`, rounded towards minus infinity on integers.
    div Div;
    /// `x % y`, the Euclidean remainder on integers.
    rem Rem;
    /// The smaller of two.
    min Min;
    /// The larger of two.
    max Max;
}

/// `x < y`.
pub fn lt<A: Pair<B>, B>(x: A, y: B) -> Expr<bool>
where
    A::Of: Number,
{
    apply(BinaryOp::Lt, x.pair(y))
}

/// `x <= y`.
pub fn le<A: Pair<B>, B>(x: A, y: B) -> Expr<bool>
where
    A::Of: Number,
{
    apply(BinaryOp::Le, x.pair(y))
}

/// `x > y`.
pub fn gt<A: Pair<B>, B>(x: A, y: B) -> Expr<bool>
where
    A::Of: Number,
{
    let (x, y) = x.pair(y);
    apply(BinaryOp::Lt, (y, x))
}

/// `x >= y`.
pub fn ge<A: Pair<B>, B>(x: A, y: B) -> Expr<bool>
where
    A::Of: Number,
{
    let (x, y) = x.pair(y);
    apply(BinaryOp::Le, (y, x))
}

/// `x == y`.
pub fn eq<A: Pair<B>, B>(x: A, y: B) -> Expr<bool> {
    apply(BinaryOp::Eq, x.pair(y))
}

/// `x != y`.
pub fn ne<A: Pair<B>, B>(x: A, y: B) -> Expr<bool> {
    apply(BinaryOp::Ne, x.pair(y))
}

/// What has bits: integers, and truth values, which are one.
#[diagnostic::on_unimplemented(
    message = "a mod has no bits of `{Self}`",
    label = "not an i32 or bool",
    note = "convert it with `as i32`"
)]
pub trait Bits: Element {}
impl Bits for bool {}
impl Bits for i32 {}

macro_rules! bits {
    ($($(#[$doc:meta])* $name:ident $op:ident;)*) => {$(
        $(#[$doc])*
        pub fn $name<A: Pair<B>, B>(x: A, y: B) -> Expr<A::Of> where A::Of: Bits {
            apply(BinaryOp::$op, x.pair(y))
        }
    )*};
}

bits! {
    /// `x & y`.
    bit_and And;
    /// `x | y`.
    bit_or Or;
    /// `x ^ y`.
    xor Xor;
}

/// `x << y`, 0 for distances outside of `0..32`.
pub fn shl(x: impl Adapt<i32>, y: impl Adapt<i32>) -> Expr<i32> {
    apply(BinaryOp::Shl, (x.adapt(), y.adapt()))
}

/// `x >> y`, the sign for distances outside of `0..32`.
pub fn shr(x: impl Adapt<i32>, y: impl Adapt<i32>) -> Expr<i32> {
    apply(BinaryOp::Shr, (x.adapt(), y.adapt()))
}

/// `x && y`.
pub fn and(x: impl Adapt<bool>, y: impl Adapt<bool>) -> Expr<bool> {
    apply(BinaryOp::And, (x.adapt(), y.adapt()))
}

/// `x || y`.
pub fn or(x: impl Adapt<bool>, y: impl Adapt<bool>) -> Expr<bool> {
    apply(BinaryOp::Or, (x.adapt(), y.adapt()))
}

/// `!x`.
pub fn not(x: impl Adapt<bool>) -> Expr<bool> {
    !x.adapt()
}

/// `if c { x } else { y }`.
pub fn select<A: Pair<B>, B>(c: impl Adapt<bool>, x: A, y: B) -> Expr<A::Of> {
    let (x, y) = x.pair(y);
    c.adapt().select(x, y)
}

/// What has a sign: numbers.
#[diagnostic::on_unimplemented(
    message = "`{Self}` has no sign in a mod",
    label = "not an i32 or f32",
    note = "negate a truth value with `!`"
)]
pub trait Signed {
    /// What comes out.
    type To;
    /// `-x`.
    fn negated(self) -> Self::To;
    /// `|x|`.
    fn magnitude(self) -> Self::To;
}

impl<T: Number> Signed for Expr<T> {
    type To = Expr<T>;
    fn negated(self) -> Expr<T> {
        -self
    }
    fn magnitude(self) -> Expr<T> {
        self.abs()
    }
}

impl Signed for Int {
    type To = Int;
    fn negated(self) -> Int {
        Int(self.0.wrapping_neg())
    }
    fn magnitude(self) -> Int {
        Int(self.0.wrapping_abs())
    }
}

impl Signed for Float {
    type To = Float;
    fn negated(self) -> Float {
        Float(-self.0)
    }
    fn magnitude(self) -> Float {
        Float(self.0.abs())
    }
}

/// `-x`.
pub fn neg<X: Signed>(x: X) -> X::To {
    x.negated()
}

/// `|x|`.
pub fn abs<X: Signed>(x: X) -> X::To {
    x.magnitude()
}

macro_rules! float_functions {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        pub fn $name(x: impl Adapt<f32>) -> Expr<f32> { x.adapt().$name() }
    )*};
}

float_functions! {
    /// Rounds towards minus infinity.
    floor;
    /// `e^x`.
    exp;
    /// `2^x`.
    exp2;
    /// Natural logarithm.
    log;
    /// Binary logarithm.
    log2;
    /// Square root.
    sqrt;
    /// `1/√x`.
    rsqrt;
    /// Hyperbolic tangent.
    tanh;
    /// `1/(1+e^-x)`.
    sigmoid;
    /// Error function.
    erf;
    /// Sine.
    sin;
    /// Cosine.
    cos;
}

/// `x`, through which no gradient passes.
pub fn detach<T: Number>(x: Expr<T>) -> Expr<T> {
    x.detach()
}

/// Rounds towards plus infinity.
pub fn ceil(x: impl Adapt<f32>) -> Expr<f32> {
    -(-x.adapt()).floor()
}

/// `1/x`.
pub fn recip(x: impl Adapt<f32>) -> Expr<f32> {
    1.0 / x.adapt()
}

/// `x^y`.
pub fn pow(x: impl Adapt<f32>, y: impl Adapt<f32>) -> Expr<f32> {
    x.adapt().pow(y.adapt())
}

/// `x^n` for an integer `n`.
pub fn powi(x: impl Adapt<f32>, n: impl Cast) -> Expr<f32> {
    x.adapt().pow(n.to_f32())
}

/// `x` kept within `low..=high`.
pub fn clamp<X: Pair<L>, L, H>(x: X, low: L, high: H) -> Expr<<Expr<X::Of> as Pair<H>>::Of>
where
    X::Of: Number,
    Expr<X::Of>: Pair<H>,
    <Expr<X::Of> as Pair<H>>::Of: Number,
{
    min(max(x, low), high)
}

/// Hash of two integers, see [`crate::ir::mix`].
pub fn mix(x: impl Adapt<i32>, y: impl Adapt<i32>) -> Expr<i32> {
    x.adapt().mix(y.adapt())
}

/// The bits of an integer as a float in `[0, 1)`.
pub fn unit(x: impl Adapt<i32>) -> Expr<f32> {
    x.adapt().unit()
}

/// What can be indexed: captured buffers.
#[diagnostic::on_unimplemented(
    message = "a mod cannot index a `{Self}`",
    label = "not a `Buffer`",
    note = "only captured buffers are indexed, `doc[q]` or `bias[h][q - kv]`; make one with `Buffer::new`"
)]
pub trait Indexed {
    /// Type of an element.
    type Elem: Element;
    /// The element at `index`.
    fn element<const N: usize>(&self, index: [Expr<i32>; N]) -> Expr<Self::Elem>;
}

impl<T: Element> Indexed for Buffer<T> {
    type Elem = T;
    fn element<const N: usize>(&self, index: [Expr<i32>; N]) -> Expr<T> {
        self.at(index)
    }
}

/// `buffer[i][j]…`. As [`Buffer::at`], the mod is an error when there is not one index an axis.
pub fn index<X: Indexed, const N: usize>(buffer: X, index: [Expr<i32>; N]) -> Expr<X::Elem> {
    buffer.element(index)
}
