//! Types of operands: which meet, and what stands where a type is wanted.

use crate::expr::Expr;
use crate::value::Element;

/// An integer literal: an i32, or an f32 next to an f32.
#[derive(Clone, Copy, Debug)]
pub struct Int(pub i32);

/// A float literal.
#[derive(Clone, Copy, Debug)]
pub struct Float(pub f32);

/// Two operands of one type, literals taking the other's.
#[diagnostic::on_unimplemented(
    message = "a mod cannot combine `{Self}` with `{Rhs}`",
    label = "the two sides have different types",
    note = "convert one of them with `as f32` or `as i32`; call a mod with its coordinates, `other(q, kv)`, to use its value"
)]
pub trait Pair<Rhs> {
    /// The type both get.
    type Of: Element;
    /// Both as expressions.
    fn pair(self, rhs: Rhs) -> (Expr<Self::Of>, Expr<Self::Of>);
}

impl<T: Element> Pair<Expr<T>> for Expr<T> {
    type Of = T;
    fn pair(self, rhs: Expr<T>) -> (Expr<T>, Expr<T>) {
        (self, rhs)
    }
}

macro_rules! pairs {
    ($($left:ty, $right:ty => $of:ty;)*) => {$(
        impl Pair<$right> for $left {
            type Of = $of;
            fn pair(self, rhs: $right) -> (Expr<$of>, Expr<$of>) { (self.adapt(), rhs.adapt()) }
        }
    )*};
}

pairs! {
    Expr<i32>, Int => i32;
    Int, Expr<i32> => i32;
    Expr<f32>, Int => f32;
    Int, Expr<f32> => f32;
    Expr<f32>, Float => f32;
    Float, Expr<f32> => f32;
    Int, Int => i32;
    Float, Float => f32;
    Int, Float => f32;
    Float, Int => f32;
}

/// Operands that can stand where a `T` is wanted.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a value of type `{T}` in a mod",
    label = "a `{T}` is wanted here",
    note = "convert numbers with `as f32` or `as i32`; call a mod with its coordinates, `other(q, kv)`, to use its value"
)]
pub trait Adapt<T: Element> {
    /// The operand as an expression of that type.
    fn adapt(self) -> Expr<T>;
}

impl<T: Element> Adapt<T> for Expr<T> {
    fn adapt(self) -> Expr<T> {
        self
    }
}

impl Adapt<i32> for Int {
    fn adapt(self) -> Expr<i32> {
        self.0.into()
    }
}

impl Adapt<f32> for Int {
    fn adapt(self) -> Expr<f32> {
        (self.0 as f32).into()
    }
}

impl Adapt<f32> for Float {
    fn adapt(self) -> Expr<f32> {
        self.0.into()
    }
}

/// `x` where a `T` is wanted: `let x: f32 = …`, indices, conditions.
pub fn typed<T: Element, X: Adapt<T>>(x: X) -> Expr<T> {
    x.adapt()
}

/// Arguments that a call hands over unchanged.
pub trait Unchanged {}

/// Arguments of calls: literals get their usual type.
pub trait Resolve {
    /// What is passed.
    type To;
    /// The argument as it is passed.
    fn resolve(self) -> Self::To;
}

impl<T: Unchanged> Resolve for T {
    type To = T;
    fn resolve(self) -> T {
        self
    }
}

impl Resolve for Int {
    type To = Expr<i32>;
    fn resolve(self) -> Expr<i32> {
        self.adapt()
    }
}

impl Resolve for Float {
    type To = Expr<f32>;
    fn resolve(self) -> Expr<f32> {
        self.adapt()
    }
}

/// An argument as it is passed.
pub fn resolve<T: Resolve>(x: T) -> T::To {
    x.resolve()
}

/// What `as` converts: numbers and truth values.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be converted with `as` in a mod",
    label = "not a number or truth value",
    note = "call a mod with its coordinates, `other(q, kv)`, to use its value"
)]
pub trait Cast {
    /// As a float.
    fn to_f32(self) -> Expr<f32>;
    /// As an integer, truncated and saturating.
    fn to_i32(self) -> Expr<i32>;
}

macro_rules! casts {
    ($($ty:ty, $to_f32:expr, $to_i32:expr;)*) => {$(
        impl Cast for $ty {
            fn to_f32(self) -> Expr<f32> { let f: fn($ty) -> Expr<f32> = $to_f32; f(self) }
            fn to_i32(self) -> Expr<i32> { let f: fn($ty) -> Expr<i32> = $to_i32; f(self) }
        }
    )*};
}

casts! {
    Expr<bool>, |x| Expr::<bool>::to_f32(&x), |x| Expr::<bool>::to_i32(&x);
    Expr<i32>, |x| Expr::<i32>::to_f32(&x), |x| x;
    Expr<f32>, |x| x, |x| Expr::<f32>::to_i32(&x);
    Int, |x| x.adapt(), |x| x.adapt();
    Float, |x| x.adapt(), |x| (x.0 as i32).into();
}

/// `x as f32`.
pub fn to_f32(x: impl Cast) -> Expr<f32> {
    x.to_f32()
}

/// `x as i32`.
pub fn to_i32(x: impl Cast) -> Expr<i32> {
    x.to_i32()
}
