//! What the macros turn Rust syntax into.
//!
//! `#[mask_mod]`, `#[score_mod]` and their closure forms rewrite an ordinary Rust body into
//! calls of the functions here: `q - kv < window` becomes `lt(sub(q, kv), window)`. Each function
//! is generic over small traits, so that Rust's type checker checks the mod and the compiler's
//! message says what is wrong in the words of a mod. Everything returns an [`Expr`]: a body runs
//! once, when the mod is made, and leaves nothing borrowed behind.
//!
//! Three kinds of operand meet here: expressions ([`Expr`]), literals without a suffix
//! ([`Int`], [`Float`]) that take the type of what they are combined with, and names from around
//! the closure, which [`get`] captures: a number as a run-time scalar called like the variable,
//! everything else as it is.
//!
//! The functions can be called by hand, but [`crate::expr`] is the pleasant way to do that.

use std::rc::Rc;
use std::sync::Arc;

use crate::capture::{Buffer, Element};
use crate::expr::{self, DynExpr, Expr, IntoScalar, Number};
use crate::ir::{BinaryOp, Leaf};
use crate::program::{MaskMod, ScoreMod};

/// An integer literal: an i32, or an f32 next to an f32.
#[derive(Clone, Copy, Debug)]
pub struct Int(pub i32);

/// A float literal.
#[derive(Clone, Copy, Debug)]
pub struct Float(pub f32);

const CHECKED: &str = "Rust's types allow the operands";

// ---------------------------------------------------------------------------------------------
// Captures.

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
        impl<$($of)*> Pass for $ty {}
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

/// Arguments that a call hands over unchanged.
pub trait Pass {}

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

// ---------------------------------------------------------------------------------------------
// Types of operands.

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

/// Arguments of calls: literals get their usual type.
pub trait Settle {
    /// What is passed.
    type To;
    /// The argument as it is passed.
    fn settle(self) -> Self::To;
}

impl<T: Pass> Settle for T {
    type To = T;
    fn settle(self) -> T {
        self
    }
}

impl Settle for Int {
    type To = Expr<i32>;
    fn settle(self) -> Expr<i32> {
        self.adapt()
    }
}

impl Settle for Float {
    type To = Expr<f32>;
    fn settle(self) -> Expr<f32> {
        self.adapt()
    }
}

/// An argument as it is passed.
pub fn settle<T: Settle>(x: T) -> T::To {
    x.settle()
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

// ---------------------------------------------------------------------------------------------
// Operations.

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

/// `x && y`.
pub fn and(x: impl Adapt<bool>, y: impl Adapt<bool>) -> Expr<bool> {
    apply(BinaryOp::And, (x.adapt(), y.adapt()))
}

/// `x || y`.
pub fn or(x: impl Adapt<bool>, y: impl Adapt<bool>) -> Expr<bool> {
    apply(BinaryOp::Or, (x.adapt(), y.adapt()))
}

/// `x ^ y`.
pub fn xor(x: impl Adapt<bool>, y: impl Adapt<bool>) -> Expr<bool> {
    apply(BinaryOp::Xor, (x.adapt(), y.adapt()))
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

/// `buffer[i][j]…`.
///
/// # Panics
/// When the number of indices is not the buffer's number of axes, as [`Buffer::at`].
pub fn index<X: Indexed, const N: usize>(buffer: X, index: [Expr<i32>; N]) -> Expr<X::Elem> {
    buffer.element(index)
}

// ---------------------------------------------------------------------------------------------
// Calls.

/// Mods that can be called with these arguments, the coordinates that are not given being those
/// at hand: a mask with `()`, `(q, kv)` or `(b, h, q, kv)`, a score function with `(score)`,
/// `(score, q, kv)` or `(score, b, h, q, kv)`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be called in a mod with `{Args}`",
    label = "wrong arguments, or not a mod or function over expressions",
    note = "masks take `(q, kv)` or `(b, h, q, kv)`, score functions `(score)`, `(score, q, kv)` or `(score, b, h, q, kv)`; make a mod with captures first: `same_document(&doc)(q, kv)`"
)]
pub trait Mod<Args> {
    /// What the call gives.
    type Value;
    /// The mod's value at `args`.
    fn apply(&self, args: Args) -> Self::Value;
}

type I = Expr<i32>;
type S = Expr<f32>;

fn placed<const N: usize>(given: [(Leaf, DynExpr); N]) -> impl Fn(Leaf) -> DynExpr {
    move |leaf| {
        let found = given.iter().find(|(l, _)| *l == leaf);
        found.map_or_else(|| DynExpr::leaf(leaf), |(_, e)| e.clone())
    }
}

macro_rules! mod_calls {
    ($($of:ty, ($($ty:ident $leaf:ident),*) -> $value:ty;)*) => {$(
        impl Mod<($($ty,)*)> for $of {
            type Value = $value;
            #[allow(non_snake_case)]
            fn apply(&self, ($($leaf,)*): ($($ty,)*)) -> $value {
                self.at(&placed([$((Leaf::$leaf, $leaf.dynamic().clone())),*]))
            }
        }
    )*};
}

mod_calls! {
    MaskMod, () -> Expr<bool>;
    MaskMod, (I Q, I Kv) -> Expr<bool>;
    MaskMod, (I B, I H, I Q, I Kv) -> Expr<bool>;
    ScoreMod, (S Score) -> S;
    ScoreMod, (S Score, I Q, I Kv) -> S;
    ScoreMod, (S Score, I B, I H, I Q, I Kv) -> S;
}

impl<Args, M: Mod<Args> + ?Sized> Mod<Args> for &M {
    type Value = M::Value;
    fn apply(&self, args: Args) -> M::Value {
        (**self).apply(args)
    }
}

/// A call in the making. `called((&&&Call { .. }).value())` picks, in this order: a function or
/// closure that takes the arguments, a function without parameters that makes a mod which takes
/// them (what `#[mask_mod]` makes of a function without captures), a mod.
#[derive(Debug)]
pub struct Call<'a, F, Args> {
    /// What is called.
    pub of: &'a F,
    /// The arguments, a tuple.
    pub args: &'a Args,
}

/// The value of a call that was made.
#[derive(Debug)]
pub struct Done<T>(T);

/// A call that only a mod can answer. It is checked apart from the choice, so that what the
/// compiler says is [`Mod`]'s message.
#[derive(Debug)]
pub struct Pending<'a, F, Args>(&'a F, Args);

/// Calls of functions and closures.
pub trait CallFunction {
    /// What the call gives.
    type Value;
    /// Calls it.
    fn value(&self) -> Done<Self::Value>;
}

macro_rules! function_calls {
    ($(($($arg:ident),*);)*) => {$(
        impl<F, R, $($arg: Clone),*> CallFunction for &&Call<'_, F, ($($arg,)*)>
        where
            F: Fn($($arg),*) -> R,
        {
            type Value = R;
            #[allow(non_snake_case)]
            fn value(&self) -> Done<R> {
                let ($($arg,)*) = self.args;
                Done((self.of)($($arg.clone()),*))
            }
        }
    )*};
}

function_calls! {
    ();
    (A);
    (A, B);
    (A, B, C);
    (A, B, C, D);
    (A, B, C, D, E);
    (A, B, C, D, E, G);
    (A, B, C, D, E, G, H);
    (A, B, C, D, E, G, H, J);
}

/// Calls of functions that make mods.
pub trait CallMaker {
    /// What the call gives.
    type Value;
    /// Makes the mod and calls it.
    fn value(&self) -> Done<Self::Value>;
}

impl<F, M, Args: Clone> CallMaker for &Call<'_, F, Args>
where
    F: Fn() -> M,
    M: Mod<Args>,
{
    type Value = M::Value;
    fn value(&self) -> Done<M::Value> {
        Done((self.of)().apply(self.args.clone()))
    }
}

impl<'a, F, Args: Clone> Call<'a, F, Args> {
    /// The call of a mod.
    pub fn value(&self) -> Pending<'a, F, Args> {
        Pending(self.of, self.args.clone())
    }
}

/// Calls on their way to a value.
pub trait Called {
    /// What the call gives.
    type Value;
    /// The value.
    fn finish(self) -> Self::Value;
}

impl<T> Called for Done<T> {
    type Value = T;
    fn finish(self) -> T {
        self.0
    }
}

impl<F: Mod<Args>, Args> Called for Pending<'_, F, Args> {
    type Value = F::Value;
    fn finish(self) -> F::Value {
        self.0.apply(self.1)
    }
}

/// The value of a call.
pub fn called<C: Called>(call: C) -> C::Value {
    call.finish()
}

// ---------------------------------------------------------------------------------------------
// Results.

/// A finished mask.
///
/// # Panics
/// When the body reads the score, which only a captured expression can bring into a mask.
pub fn mask(body: impl Adapt<bool>) -> MaskMod {
    match MaskMod::new(body.adapt().dynamic()) {
        Ok(mask) => mask,
        Err(e) => panic!("{e}"),
    }
}

/// A finished score function.
pub fn score(body: impl Adapt<f32>) -> ScoreMod {
    ScoreMod::new(body.adapt().dynamic()).expect("the body is an f32")
}
