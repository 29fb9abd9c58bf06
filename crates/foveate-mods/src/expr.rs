//! Tracing: values that record what is done to them.
//!
//! An [`Expr<T>`] is a handle to a shared, immutable expression. Operators and methods make new
//! ones; Rust's types keep masks and scores well-typed. [`DynExpr`] is the same without the
//! static type, checked when it is made; the text form is built on it.
//!
//! Expressions are plain values: they can be captured by closures, returned, put into vectors
//! and built in loops.
//!
//! What Rust's types cannot refuse while a mod is traced (a buffer indexed with too few indices)
//! is kept in the expression as an error, and is what [`MaskMod::new`] and [`ScoreMod::new`]
//! return. So a body reads like arithmetic and nothing panics.
//!
//! [`MaskMod::new`]: crate::MaskMod::new
//! [`ScoreMod::new`]: crate::ScoreMod::new

use std::marker::PhantomData;
use std::sync::Arc;

use crate::capture::{AnyBuffer, Buffer, Scalar};
use crate::error::{ModError, ModErrorKind};
use crate::ir::{BinaryOp, Leaf, UnaryOp};
use crate::value::{Element, ScalarValue, Type};

/// What one traced node does to its operands.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    Leaf(Leaf),
    Const(ScalarValue),
    Scalar(Scalar),
    /// Whether negative indices count from the end comes second.
    Load(AnyBuffer, bool),
    Unary(UnaryOp),
    Binary(BinaryOp),
    Select,
    Cast(Type),
    /// What could not be made, and why.
    Wrong(ModError),
}

/// One traced operation, with its operands.
#[derive(Debug)]
pub(crate) struct ExprNode {
    pub(crate) op: Op,
    pub(crate) args: Vec<DynExpr>,
}

/// Long chains, as loops build them, are taken apart one by one rather than by recursion.
impl Drop for ExprNode {
    fn drop(&mut self) {
        let mut rest = std::mem::take(&mut self.args);
        while let Some(mut expr) = rest.pop() {
            if let Some(node) = Arc::get_mut(&mut expr.node) {
                rest.append(&mut node.args);
            }
        }
    }
}

/// A traced expression whose type is known at run time.
#[derive(Clone, Debug)]
pub struct DynExpr {
    ty: Type,
    node: Arc<ExprNode>,
}

impl DynExpr {
    fn make(ty: Type, op: Op, args: Vec<DynExpr>) -> Self {
        Self { ty, node: Arc::new(ExprNode { op, args }) }
    }

    pub(crate) fn node(&self) -> &ExprNode {
        &self.node
    }

    pub(crate) fn address(&self) -> usize {
        Arc::as_ptr(&self.node) as usize
    }

    /// The type of its value.
    pub fn ty(&self) -> Type {
        self.ty
    }

    /// A coordinate or the score.
    pub fn leaf(leaf: Leaf) -> Self {
        Self::make(leaf.ty(), Op::Leaf(leaf), Vec::new())
    }

    /// A constant: part of the structure, a different value is a different mod.
    pub fn constant(value: ScalarValue) -> Self {
        Self::make(value.ty(), Op::Const(value), Vec::new())
    }

    /// A run-time scalar.
    pub fn scalar(scalar: Scalar) -> Self {
        Self::make(scalar.ty(), Op::Scalar(scalar), Vec::new())
    }

    /// A value of type `ty` that could not be made. The program built from it says `error`.
    pub(crate) fn wrong(ty: Type, error: ModError) -> Self {
        Self::make(ty, Op::Wrong(error), Vec::new())
    }

    /// An element of a captured buffer.
    ///
    /// # Errors
    /// When there is not one i32 index for each axis.
    pub fn load(buffer: &AnyBuffer, index: Vec<DynExpr>) -> Result<Self, ModError> {
        Self::read(buffer, index, false)
    }

    /// An element of a captured buffer, negative indices counted from the end of their axis: -1 is
    /// the last, as in Python.
    ///
    /// # Errors
    /// When there is not one i32 index for each axis.
    pub fn load_from_end(buffer: &AnyBuffer, index: Vec<DynExpr>) -> Result<Self, ModError> {
        Self::read(buffer, index, true)
    }

    pub(crate) fn read(
        buffer: &AnyBuffer,
        index: Vec<DynExpr>,
        from_end: bool,
    ) -> Result<Self, ModError> {
        if index.len() != buffer.shape().len() {
            return Err(ModErrorKind::Rank {
                name: buffer.name().to_owned(),
                rank: buffer.shape().len(),
                given: index.len(),
            }
            .into());
        }
        for i in &index {
            expect(|| format!("an index of `{}`", buffer.name()), i.ty, &[Type::I32])?;
        }
        Ok(Self::make(buffer.ty(), Op::Load(buffer.clone(), from_end), index))
    }

    /// An operation on one value.
    ///
    /// # Errors
    /// When the operation does not take the operand's type.
    pub fn unary(op: UnaryOp, x: DynExpr) -> Result<Self, ModError> {
        expect(|| format!("{op:?}").to_lowercase(), x.ty, op.takes())?;
        Ok(Self::make(op.result(x.ty), Op::Unary(op), vec![x]))
    }

    /// An operation on two values of one type.
    ///
    /// # Errors
    /// When the operation does not take the operands' types, or they differ.
    pub fn binary(op: BinaryOp, x: DynExpr, y: DynExpr) -> Result<Self, ModError> {
        let name = || format!("{op:?}").to_lowercase();
        expect(name, x.ty, op.takes())?;
        expect(name, y.ty, &[x.ty])?;
        Ok(Self::make(op.result(x.ty), Op::Binary(op), vec![x, y]))
    }

    /// `if cond { then } else { other }`.
    ///
    /// # Errors
    /// When the condition is not bool or the branches' types differ.
    pub fn select(cond: DynExpr, then: DynExpr, other: DynExpr) -> Result<Self, ModError> {
        expect(|| "the condition of if".into(), cond.ty, &[Type::Bool])?;
        expect(|| "the else branch".into(), other.ty, &[then.ty])?;
        Ok(Self::make(then.ty, Op::Select, vec![cond, then, other]))
    }

    /// A conversion. To bool means `!= 0`.
    pub fn cast(self, to: Type) -> Self {
        if self.ty == to {
            return self;
        }
        match (self.ty, to) {
            (Type::I32, Type::Bool) => {
                Self::binary(BinaryOp::Ne, self, Self::constant(ScalarValue::I32(0)))
                    .expect("both are i32")
            }
            (Type::F32, Type::Bool) => {
                Self::binary(BinaryOp::Ne, self, Self::constant(ScalarValue::F32(0.0)))
                    .expect("both are f32")
            }
            _ => Self::make(to, Op::Cast(to), vec![self]),
        }
    }

    /// The expression with its type made static.
    ///
    /// # Errors
    /// When the type is another one.
    pub fn typed<T: Element>(self) -> Result<Expr<T>, ModError> {
        expect(|| "the expression".into(), self.ty, &[T::TYPE])?;
        Ok(Expr { dyn_expr: self, of: PhantomData })
    }
}

fn expect(operation: impl Fn() -> String, found: Type, takes: &[Type]) -> Result<(), ModError> {
    if takes.contains(&found) {
        return Ok(());
    }
    let expected = takes.iter().map(Type::to_string).collect::<Vec<_>>().join(" or ");
    Err(ModErrorKind::Type { operation: operation(), expected, found }.into())
}

/// A traced expression of type `T`: `bool`, `i32` or `f32`.
#[derive(Debug)]
pub struct Expr<T: Element> {
    dyn_expr: DynExpr,
    of: PhantomData<T>,
}

impl<T: Element> Clone for Expr<T> {
    fn clone(&self) -> Self {
        Self { dyn_expr: self.dyn_expr.clone(), of: PhantomData }
    }
}

impl<T: Element> Expr<T> {
    /// The expression without its static type.
    pub fn dynamic(&self) -> &DynExpr {
        &self.dyn_expr
    }

    fn unary_op(&self, op: UnaryOp) -> Self {
        let made = DynExpr::unary(op, self.dyn_expr.clone());
        Expr { dyn_expr: made.expect("Rust's types allow the operand"), of: PhantomData }
    }

    fn binary_op<R: Element>(&self, op: BinaryOp, other: &Self) -> Expr<R> {
        let made = DynExpr::binary(op, self.dyn_expr.clone(), other.dyn_expr.clone());
        Expr { dyn_expr: made.expect("Rust's types allow the operands"), of: PhantomData }
    }

    /// `self == other`, traced.
    pub fn eq(&self, other: impl Into<Expr<T>>) -> Expr<bool> {
        self.binary_op(BinaryOp::Eq, &other.into())
    }

    /// `self != other`, traced.
    pub fn ne(&self, other: impl Into<Expr<T>>) -> Expr<bool> {
        self.binary_op(BinaryOp::Ne, &other.into())
    }
}

impl<T: Element> From<&Expr<T>> for Expr<T> {
    fn from(e: &Expr<T>) -> Self {
        e.clone()
    }
}

impl From<bool> for Expr<bool> {
    fn from(v: bool) -> Self {
        Expr { dyn_expr: DynExpr::constant(ScalarValue::Bool(v)), of: PhantomData }
    }
}

impl From<i32> for Expr<i32> {
    fn from(v: i32) -> Self {
        Expr { dyn_expr: DynExpr::constant(ScalarValue::I32(v)), of: PhantomData }
    }
}

impl From<f32> for Expr<f32> {
    fn from(v: f32) -> Self {
        Expr { dyn_expr: DynExpr::constant(ScalarValue::F32(v)), of: PhantomData }
    }
}

/// Numbers: what arithmetic and ordering are defined on.
pub trait Number: Element {}
impl Number for i32 {}
impl Number for f32 {}

impl<T: Number> Expr<T> {
    /// `self < other`, traced.
    pub fn lt(&self, other: impl Into<Expr<T>>) -> Expr<bool> {
        self.binary_op(BinaryOp::Lt, &other.into())
    }

    /// `self <= other`, traced.
    pub fn le(&self, other: impl Into<Expr<T>>) -> Expr<bool> {
        self.binary_op(BinaryOp::Le, &other.into())
    }

    /// `self > other`, traced.
    pub fn gt(&self, other: impl Into<Expr<T>>) -> Expr<bool> {
        other.into().binary_op(BinaryOp::Lt, self)
    }

    /// `self >= other`, traced.
    pub fn ge(&self, other: impl Into<Expr<T>>) -> Expr<bool> {
        other.into().binary_op(BinaryOp::Le, self)
    }

    /// The smaller of two.
    pub fn min(&self, other: impl Into<Expr<T>>) -> Self {
        self.binary_op(BinaryOp::Min, &other.into())
    }

    /// The larger of two.
    pub fn max(&self, other: impl Into<Expr<T>>) -> Self {
        self.binary_op(BinaryOp::Max, &other.into())
    }

    /// Absolute value.
    pub fn abs(&self) -> Self {
        self.unary_op(UnaryOp::Abs)
    }

    /// The same value, through which no gradient passes, so that what is made of it may be a step:
    /// `score.detach().floor()`.
    pub fn detach(&self) -> Self {
        self.unary_op(UnaryOp::Detach)
    }
}

macro_rules! float_methods {
    ($($(#[$doc:meta])* $name:ident => $op:ident),* $(,)?) => {
        impl Expr<f32> {
            $($(#[$doc])* pub fn $name(&self) -> Self { self.unary_op(UnaryOp::$op) })*
        }
    };
}

float_methods! {
    /// Rounds towards minus infinity.
    floor => Floor,
    /// `e^x`.
    exp => Exp,
    /// `2^x`.
    exp2 => Exp2,
    /// Natural logarithm.
    log => Log,
    /// Binary logarithm.
    log2 => Log2,
    /// Square root.
    sqrt => Sqrt,
    /// `1/√x`.
    rsqrt => Rsqrt,
    /// Hyperbolic tangent.
    tanh => Tanh,
    /// `1/(1+e^-x)`.
    sigmoid => Sigmoid,
    /// Error function.
    erf => Erf,
    /// Sine.
    sin => Sin,
    /// Cosine.
    cos => Cos,
}

impl Expr<f32> {
    /// `self` to the power of `other`.
    pub fn pow(&self, other: impl Into<Expr<f32>>) -> Self {
        self.binary_op(BinaryOp::Pow, &other.into())
    }

    /// Truncated to an integer, saturating; NaN is 0.
    pub fn to_i32(&self) -> Expr<i32> {
        Expr { dyn_expr: self.dyn_expr.clone().cast(Type::I32), of: PhantomData }
    }
}

impl Expr<i32> {
    /// Converted to a float.
    pub fn to_f32(&self) -> Expr<f32> {
        Expr { dyn_expr: self.dyn_expr.clone().cast(Type::F32), of: PhantomData }
    }

    /// Hash of two integers, see [`crate::ir::mix`].
    pub fn mix(&self, other: impl Into<Expr<i32>>) -> Self {
        self.binary_op(BinaryOp::Mix, &other.into())
    }

    /// Its bits as a float in `[0, 1)`, see [`UnaryOp::Unit`].
    pub fn unit(&self) -> Expr<f32> {
        let made = DynExpr::unary(UnaryOp::Unit, self.dyn_expr.clone());
        Expr { dyn_expr: made.expect("the operand is i32"), of: PhantomData }
    }
}

impl Expr<bool> {
    /// `if self { then } else { other }`.
    pub fn select<T: Element>(
        &self,
        then: impl Into<Expr<T>>,
        other: impl Into<Expr<T>>,
    ) -> Expr<T> {
        let made =
            DynExpr::select(self.dyn_expr.clone(), then.into().dyn_expr, other.into().dyn_expr);
        Expr { dyn_expr: made.expect("Rust's types allow the branches"), of: PhantomData }
    }

    /// 1 where true, 0 where false.
    pub fn to_i32(&self) -> Expr<i32> {
        Expr { dyn_expr: self.dyn_expr.clone().cast(Type::I32), of: PhantomData }
    }

    /// 1.0 where true, 0.0 where false.
    pub fn to_f32(&self) -> Expr<f32> {
        Expr { dyn_expr: self.dyn_expr.clone().cast(Type::F32), of: PhantomData }
    }
}

impl std::ops::Not for Expr<bool> {
    type Output = Self;
    fn not(self) -> Self {
        self.unary_op(UnaryOp::Not)
    }
}

impl<T: Number> std::ops::Neg for Expr<T> {
    type Output = Self;
    fn neg(self) -> Self {
        self.unary_op(UnaryOp::Neg)
    }
}

macro_rules! operators {
    ($($trait:ident $method:ident $op:ident for $($ty:ty),*;)*) => {$($(
        impl<R: Into<Expr<$ty>>> std::ops::$trait<R> for Expr<$ty> {
            type Output = Expr<$ty>;
            fn $method(self, rhs: R) -> Expr<$ty> { self.binary_op(BinaryOp::$op, &rhs.into()) }
        }
        impl<R: Into<Expr<$ty>>> std::ops::$trait<R> for &Expr<$ty> {
            type Output = Expr<$ty>;
            fn $method(self, rhs: R) -> Expr<$ty> { self.binary_op(BinaryOp::$op, &rhs.into()) }
        }
        impl std::ops::$trait<Expr<$ty>> for $ty {
            type Output = Expr<$ty>;
            fn $method(self, rhs: Expr<$ty>) -> Expr<$ty> {
                Expr::<$ty>::from(self).binary_op(BinaryOp::$op, &rhs)
            }
        }
        impl std::ops::$trait<&Expr<$ty>> for $ty {
            type Output = Expr<$ty>;
            fn $method(self, rhs: &Expr<$ty>) -> Expr<$ty> {
                Expr::<$ty>::from(self).binary_op(BinaryOp::$op, rhs)
            }
        }
    )*)*};
}

operators! {
    Add add Add for i32, f32;
    Sub sub Sub for i32, f32;
    Mul mul Mul for i32, f32;
    Div div Div for i32, f32;
    Rem rem Rem for i32, f32;
    BitAnd bitand And for bool, i32;
    BitOr bitor Or for bool, i32;
    BitXor bitxor Xor for bool, i32;
    Shl shl Shl for i32;
    Shr shr Shr for i32;
}

impl<T: Element> Buffer<T> {
    /// The element at `index`, one index an axis. With another number of indices the mod made of
    /// it is an error.
    pub fn at<const N: usize>(&self, index: [Expr<i32>; N]) -> Expr<T> {
        self.read(index, false)
    }

    /// The element at `index`, negative indices counted from the end of their axis: -1 is the last,
    /// as in Python. With another number of indices the mod made of it is an error.
    pub fn at_from_end<const N: usize>(&self, index: [Expr<i32>; N]) -> Expr<T> {
        self.read(index, true)
    }

    fn read<const N: usize>(&self, index: [Expr<i32>; N], from_end: bool) -> Expr<T> {
        let index = index.into_iter().map(|i| i.dyn_expr).collect();
        let made = DynExpr::read(self.any(), index, from_end);
        let dyn_expr = made.unwrap_or_else(|error| DynExpr::wrong(T::TYPE, error));
        Expr { dyn_expr, of: PhantomData }
    }
}

macro_rules! leaves {
    ($($(#[$doc:meta])* $name:ident : $ty:ty = $leaf:ident),* $(,)?) => {
        $($(#[$doc])* pub fn $name() -> Expr<$ty> {
            Expr { dyn_expr: DynExpr::leaf(Leaf::$leaf), of: PhantomData }
        })*
    };
}

leaves! {
    /// Batch (or sequence) index.
    b: i32 = B,
    /// Query head.
    h: i32 = H,
    /// Key/value head.
    h_kv: i32 = HKv,
    /// Global query position.
    q: i32 = Q,
    /// Global key position.
    kv: i32 = Kv,
    /// Number of queries of the sequence.
    q_len: i32 = QLen,
    /// Number of keys of the sequence.
    kv_len: i32 = KvLen,
    /// The scaled dot product.
    score: f32 = Score,
}

/// A run-time scalar called `name`: `i32`, `f32` or `bool`.
pub fn scalar<T: Element + IntoScalar>(name: impl Into<String>, value: T) -> Expr<T> {
    let dyn_expr = DynExpr::scalar(Scalar { name: name.into(), value: value.into_scalar() });
    Expr { dyn_expr, of: PhantomData }
}

/// Values a run-time scalar can hold.
pub trait IntoScalar {
    /// The value with its type at run time.
    fn into_scalar(self) -> ScalarValue;
}

impl IntoScalar for bool {
    fn into_scalar(self) -> ScalarValue {
        ScalarValue::Bool(self)
    }
}

impl IntoScalar for i32 {
    fn into_scalar(self) -> ScalarValue {
        ScalarValue::I32(self)
    }
}

impl IntoScalar for f32 {
    fn into_scalar(self) -> ScalarValue {
        ScalarValue::F32(self)
    }
}
