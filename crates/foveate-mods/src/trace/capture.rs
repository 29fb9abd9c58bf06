//! What a mod takes from around it: captures, constants, run-time scalars.

use std::rc::Rc;
use std::sync::Arc;

use super::operand::{Float, Int, Unchanged};
use crate::capture::Buffer;
use crate::expr::{self, Expr, IntoScalar};
use crate::program::{MaskMod, ScoreMod};
use crate::value::Element;

/// What a mod can capture.
#[diagnostic::on_unimplemented(
    message = "a mod cannot capture a `{Self}`",
    label = "not an i32, f32, bool, Buffer, Expr, MaskMod or ScoreMod",
    note = "convert it before the mod, for example `let n = n as i32;`; an array becomes a `Buffer`"
)]
pub trait Capture {
    /// What stands for it inside the mod.
    type Traced;
    /// The value inside the mod, `name` being the variable's name.
    fn capture(&self, name: &str) -> Self::Traced;
}

macro_rules! capture_scalars {
    ($($ty:ty),*) => {$(
        impl Capture for $ty {
            type Traced = Expr<$ty>;
            fn capture(&self, name: &str) -> Expr<$ty> { expr::scalar(name, *self) }
        }
    )*};
}

macro_rules! capture_clones {
    ($([$($of:tt)*] $ty:ty),* $(,)?) => {$(
        impl<$($of)*> Capture for $ty {
            type Traced = Self;
            fn capture(&self, _: &str) -> Self { self.clone() }
        }
        impl<$($of)*> Unchanged for $ty {}
    )*};
}

macro_rules! capture_pointees {
    ($($ty:ty),*) => {$(
        impl<T: Capture + ?Sized> Capture for $ty {
            type Traced = T::Traced;
            fn capture(&self, name: &str) -> T::Traced { (**self).capture(name) }
        }
    )*};
}

capture_scalars!(bool, i32, f32);
capture_clones!([T: Element] Expr<T>, [T: Element] Buffer<T>, [] MaskMod, [] ScoreMod);
capture_pointees!(&T, &mut T, Box<T>, Rc<T>, Arc<T>);

impl Capture for Int {
    type Traced = Int;
    fn capture(&self, _: &str) -> Int {
        *self
    }
}

impl Capture for Float {
    type Traced = Float;
    fn capture(&self, _: &str) -> Float {
        *self
    }
}

/// The value of the variable `name` inside a mod.
pub fn get<T: Capture + ?Sized>(value: &T, name: &str) -> T::Traced {
    value.capture(name)
}

/// Values that can be part of a mod's structure.
#[diagnostic::on_unimplemented(
    message = "a `{Self}` cannot be a constant of a mod",
    label = "not an i32, f32 or bool",
    note = "convert it: `constant(n as i32)`"
)]
pub trait Constant {
    /// Its type in the mod.
    type Of: Element;
    /// The value as a constant expression.
    fn into_constant(self) -> Expr<Self::Of>;
}

macro_rules! constants {
    ($($ty:ty),*) => {$(
        impl Constant for $ty {
            type Of = $ty;
            fn into_constant(self) -> Expr<$ty> { self.into() }
        }
        impl Constant for &$ty {
            type Of = $ty;
            fn into_constant(self) -> Expr<$ty> { (*self).into() }
        }
    )*};
}
constants!(bool, i32, f32);

/// A constant: another value is another mod.
pub fn constant<T: Constant>(value: T) -> Expr<T::Of> {
    value.into_constant()
}

/// A run-time scalar called `name`.
pub fn scalar<T: Element + IntoScalar>(name: &str, value: T) -> Expr<T> {
    expr::scalar(name, value)
}
