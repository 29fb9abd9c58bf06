//! Calls of mods, of functions that make mods, and of functions over expressions.

use crate::expr::{DynExpr, Expr};
use crate::ir::Leaf;
use crate::program::{MaskMod, ScoreMod};

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
