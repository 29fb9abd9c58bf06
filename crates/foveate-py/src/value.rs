//! Values of a mod while torch code is traced: an expression of the IR, the dtype that torch would
//! give it, and what is known of its range.
//!
//! The IR has three types; torch has more dtypes. A value keeps torch's, so that promotion is torch's
//! and integers of 8 and 16 bits wrap where torch's do. Floats are computed in f32 whatever their
//! dtype, as torch's compiled kernels do. Integers are computed in 32 bits: where coordinates and
//! numbers alone could leave these, tracing is refused instead of giving another result than torch's
//! 64 bits.

use std::cell::RefCell;

use foveate::mods::ir::{BinaryOp, UnaryOp};
use foveate::mods::{DynExpr, Leaf, Type};
use foveate::{Scalar, ScalarValue};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyFloat, PyInt};

use crate::dtype::{Dtype, TorchDtype};
use crate::error::{raised, refused};

/// A number of Python.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    Bool(bool),
    Int(i64),
    Float(f64),
}

impl Number {
    fn ty(self) -> Type {
        match self {
            Number::Bool(_) => Type::Bool,
            Number::Int(_) => Type::I32,
            Number::Float(_) => Type::F32,
        }
    }

    /// The dtype of an operation of a value of `dtype` with this number: that of the value, unless
    /// the number is of a higher kind.
    fn beside(self, dtype: Dtype) -> Dtype {
        if (self.ty() as u8) <= (dtype.ty() as u8) {
            return dtype;
        }
        match self {
            Number::Bool(_) => Dtype::Bool,
            Number::Int(_) => Dtype::I64,
            Number::Float(_) => Dtype::F32,
        }
    }

    /// As a value of `dtype`.
    ///
    /// # Errors
    /// When it is an integer beyond 32 bits.
    pub fn of(self, dtype: Dtype) -> PyResult<ScalarValue> {
        Ok(match (dtype.ty(), self) {
            (Type::Bool, Number::Bool(v)) => ScalarValue::Bool(v),
            (Type::Bool, Number::Int(v)) => ScalarValue::Bool(v != 0),
            (Type::Bool, Number::Float(v)) => ScalarValue::Bool(v != 0.0),
            (Type::I32, Number::Bool(v)) => ScalarValue::I32(i32::from(v)),
            (Type::I32, Number::Int(v)) => ScalarValue::I32(i32::try_from(v).map_err(|_| {
                refused(format!("the integer {v} does not fit 32 bits, which mods compute in"))
            })?),
            (Type::I32, Number::Float(v)) => ScalarValue::I32(v as i32),
            (Type::F32, Number::Bool(v)) => ScalarValue::F32(f32::from(u8::from(v))),
            (Type::F32, Number::Int(v)) => ScalarValue::F32(v as f32),
            (Type::F32, Number::Float(v)) => ScalarValue::F32(v as f32),
        })
    }

    /// Tells numbers apart for [`Literals`]: `1` from `1.0`.
    fn key(self) -> (u8, u64) {
        match self {
            Number::Bool(v) => (0, u64::from(v)),
            Number::Int(v) => (1, v as u64),
            Number::Float(v) => (2, v.to_bits()),
        }
    }
}

/// A number of Python.
pub fn number(x: &Bound<'_, PyAny>) -> PyResult<Option<Number>> {
    if let Ok(v) = x.cast::<PyBool>() {
        return Ok(Some(Number::Bool(v.is_true())));
    }
    if x.is_instance_of::<PyInt>() {
        // An integer beyond 64 bits is as far away as one at their end.
        let far = || if x.lt(0).unwrap_or(false) { i64::MIN } else { i64::MAX };
        return Ok(Some(Number::Int(x.extract().unwrap_or_else(|_| far()))));
    }
    if x.is_instance_of::<PyFloat>() {
        return Ok(Some(Number::Float(x.extract()?)));
    }
    Ok(None)
}

/// The numbers of a trace: which stand in the function's source, asked for when the first number is met, and how
/// many run-time scalars there are.
#[derive(Default)]
struct Context {
    literals: Option<Vec<(u8, u64)>>,
    /// Every number is a constant.
    constants: bool,
    scalars: usize,
    prefix: &'static str,
}

thread_local! {
    /// Those of the trace that this thread runs.
    static CONTEXT: RefCell<Context> = RefCell::default();
}

/// The numbers of the trace of a mask or score function while it does not run. Which are constants is asked of
/// `foveate._trace.literals()` when the first is met; others were captured and are run-time scalars. With
/// `constants` all numbers are constants.
#[pyclass(module = "foveate._native")]
pub struct Numbers(Context);

#[pymethods]
impl Numbers {
    #[new]
    #[pyo3(signature = (mask, constants = false))]
    fn new(mask: bool, constants: bool) -> Self {
        Self(Context { constants, prefix: if mask { "m" } else { "s" }, ..Context::default() })
    }

    /// Makes them those of this thread's trace and keeps those that were, or the other way round: a function that
    /// is traced may call what traces another one.
    fn exchange(&mut self) {
        CONTEXT.with_borrow_mut(|context| std::mem::swap(context, &mut self.0));
    }
}

/// A run-time scalar of this trace, with a name of its own; a constant where all numbers are.
pub fn scalar(value: ScalarValue) -> DynExpr {
    if CONTEXT.with_borrow(|c| c.constants) {
        return DynExpr::constant(value);
    }
    let name = CONTEXT.with_borrow_mut(|c| {
        c.scalars += 1;
        format!("{}n{}", c.prefix, c.scalars - 1)
    });
    DynExpr::scalar(Scalar { name, value })
}

/// Whether a number stands in the source of the function that runs: it is part of the structure then.
/// Another one was captured, and becomes a run-time scalar.
fn is_literal(of: Number) -> PyResult<bool> {
    // A bool is one of two structures: what it switches off folds away.
    if matches!(of, Number::Bool(_)) || CONTEXT.with_borrow(|c| c.constants) {
        return Ok(true);
    }
    let known = || CONTEXT.with_borrow(|c| Some(c.literals.as_ref()?.contains(&of.key())));
    if let Some(known) = known() {
        return Ok(known);
    }
    let literals = Python::attach(|py| -> PyResult<Vec<_>> {
        let found = py.import("foveate._trace")?.call_method0("literals")?;
        let keys = found.try_iter()?.map(|x| Ok(number(&x?)?.map(Number::key)));
        keys.filter_map(Result::transpose).collect()
    })?;
    CONTEXT.with_borrow_mut(|c| c.literals = Some(literals));
    Ok(known() == Some(true))
}

type Range = Option<(i64, i64)>;

/// A traced value.
#[derive(Clone, Debug)]
pub struct Value {
    pub expr: DynExpr,
    pub dtype: Dtype,
    /// Bounds of an integer that is made of coordinates and numbers alone.
    pub range: Range,
    /// Whether it depends on the score or on a captured tensor that wants a gradient. Torch's
    /// gradient through its steps is 0, as is that of what is detached; the IR's would be refused.
    pub learns: bool,
}

/// What an operation is given.
#[derive(Clone, Debug)]
pub enum Operand {
    Value(Value),
    Number(Number),
}

impl From<Value> for Operand {
    fn from(value: Value) -> Self {
        Self::Value(value)
    }
}

impl Operand {
    fn dtype(&self) -> Option<Dtype> {
        match self {
            Operand::Value(v) => Some(v.dtype),
            Operand::Number(_) => None,
        }
    }

    /// As a value of `dtype`.
    pub fn to(&self, dtype: Dtype) -> PyResult<Value> {
        match self {
            Operand::Value(v) => v.cast(dtype),
            Operand::Number(n) => Value::number(*n, dtype),
        }
    }
}

/// The dtype that torch computes an operation of these in.
pub fn common(a: &Operand, b: &Operand) -> Dtype {
    match (a, b) {
        (Operand::Value(a), Operand::Value(b)) => a.dtype.promoted(b.dtype),
        (Operand::Value(v), Operand::Number(n)) | (Operand::Number(n), Operand::Value(v)) => {
            n.beside(v.dtype)
        }
        (Operand::Number(a), Operand::Number(b)) => b.beside(a.beside(Dtype::Bool)),
    }
}

impl Value {
    /// A coordinate, one of `extent`, or the score.
    pub fn leaf(leaf: Leaf, extent: i64) -> Self {
        let score = leaf == Leaf::Score;
        Self {
            expr: DynExpr::leaf(leaf),
            dtype: if score { Dtype::F32 } else { Dtype::I64 },
            range: (!score).then_some((0, (extent - 1).max(0))),
            learns: score,
        }
    }

    /// A number of the function that is traced, as a value of `dtype`.
    ///
    /// # Errors
    /// When it is an integer beyond 32 bits.
    pub fn number(number: Number, dtype: Dtype) -> PyResult<Self> {
        let value = number.of(dtype)?;
        let made = Self::constant(value, dtype);
        Ok(if is_literal(number)? { made } else { Self { expr: scalar(value), ..made } })
    }

    /// A constant of the tracer's own: part of the structure.
    pub fn constant(value: ScalarValue, dtype: Dtype) -> Self {
        let range = match value {
            ScalarValue::I32(v) => Some((i64::from(v), i64::from(v))),
            _ => None,
        };
        Self { expr: DynExpr::constant(value), dtype, range, learns: false }
    }

    fn int(v: i32) -> Self {
        Self::constant(ScalarValue::I32(v), Dtype::I64)
    }

    fn truth(v: bool) -> Self {
        Self::constant(ScalarValue::Bool(v), Dtype::Bool)
    }

    fn float(v: f32) -> Self {
        Self::constant(ScalarValue::F32(v), Dtype::F32)
    }

    /// The value in another dtype.
    ///
    /// # Errors
    /// Never for values that were traced.
    pub fn cast(&self, dtype: Dtype) -> PyResult<Self> {
        let range = match (self.dtype.ty(), dtype.ty()) {
            (Type::Bool, Type::I32) => Some((0, 1)),
            (Type::I32, Type::I32) => self.range,
            _ => None,
        };
        if (self.dtype.ty(), dtype.ty()) == (Type::Bool, Type::F32) {
            // A branch: torch's gradient through it is 0, and a conversion's is refused.
            let [one, zero] = [1.0, 0.0].map(|v| Self::float(v).expr);
            let expr = DynExpr::select(self.expr.clone(), one, zero).map_err(raised)?;
            return Ok(Self { expr, dtype, range, learns: self.learns });
        }
        let from = match (self.dtype.ty(), dtype.ty()) {
            (Type::I32, Type::F32) => self.detached()?,
            _ => self.clone(),
        };
        Self { expr: from.expr.cast(dtype.ty()), dtype, range, learns: from.learns }.wrapped()
    }

    /// The value, through which no gradient passes.
    ///
    /// # Errors
    /// Never for values that were traced.
    pub fn detached(&self) -> PyResult<Self> {
        if !self.learns || self.dtype.ty() == Type::Bool {
            return Ok(Self { learns: false, ..self.clone() });
        }
        let expr = DynExpr::unary(UnaryOp::Detach, self.expr.clone()).map_err(raised)?;
        Ok(Self { expr, learns: false, ..self.clone() })
    }

    /// The value as its dtype holds it: integers of 8 and 16 bits wrap.
    fn wrapped(self) -> PyResult<Self> {
        let Some((low, high)) = self.dtype.narrow() else {
            if let Some((low, high)) = self.range
                && (low < i64::from(i32::MIN) || high > i64::from(i32::MAX))
            {
                return Err(refused(format!(
                    "an integer between {low} and {high} does not fit 32 bits, which mods compute in"
                )));
            }
            return Ok(self);
        };
        if self.range.is_some_and(|(l, h)| l >= low && h <= high) {
            return Ok(self);
        }
        let dtype = self.dtype;
        let offset = Self::int(low as i32).expr;
        let size = Self::int((high - low + 1) as i32).expr;
        let shifted = binary_expr(BinaryOp::Sub, self.expr, offset.clone())?;
        let expr = binary_expr(BinaryOp::Rem, shifted, size)?;
        Ok(Self {
            expr: binary_expr(BinaryOp::Add, expr, offset)?,
            dtype,
            range: Some((low, high)),
            learns: self.learns,
        })
    }

    /// The integer that the value is, when that is known.
    fn known(&self) -> Option<i64> {
        self.range.filter(|(low, high)| low == high).map(|(v, _)| v)
    }

    fn is_float(&self) -> bool {
        self.dtype.ty() == Type::F32
    }
}

fn binary_expr(op: BinaryOp, a: DynExpr, b: DynExpr) -> PyResult<DynExpr> {
    DynExpr::binary(op, a, b).map_err(raised)
}

/// `a op b` on values of one type, without promotion; `range` is that of the result.
fn raw(op: BinaryOp, a: &Value, b: &Value, range: Range) -> PyResult<Value> {
    let expr = binary_expr(op, a.expr.clone(), b.expr.clone())?;
    let dtype = if expr.ty() == Type::Bool { Dtype::Bool } else { a.dtype };
    Ok(Value { expr, dtype, range, learns: a.learns || b.learns })
}

/// `if cond { then } else { other }`, in the dtype that torch promotes both to.
///
/// # Errors
/// When a number does not fit that dtype.
pub fn select(cond: &Operand, then: &Operand, other: &Operand) -> PyResult<Value> {
    let dtype = common(then, other);
    let (cond, then, other) = (cond.to(Dtype::Bool)?, then.to(dtype)?, other.to(dtype)?);
    let range = both(&then, &other).map(|((a, b), (c, d))| (a.min(c), b.max(d)));
    // An integer that a condition chooses is a step of what the condition depends on.
    let learns = cond.learns || then.learns || other.learns;
    let expr = DynExpr::select(cond.expr, then.expr, other.expr).map_err(raised)?;
    Ok(Value { expr, dtype, range, learns })
}

fn both(a: &Value, b: &Value) -> Option<((i64, i64), (i64, i64))> {
    Some((a.range?, b.range?))
}

/// The operation that Python and torch call `name`.
///
/// # Errors
/// When torch has no such operation on these dtypes, or the IR cannot say it.
pub fn binary(name: &str, a: &Operand, b: &Operand) -> PyResult<Value> {
    let dtype = common(a, b);
    match name {
        "add" | "sub" | "mul" => arithmetic(name, a, b, dtype),
        "truediv" => {
            let dtype = if dtype.ty() == Type::F32 { dtype } else { Dtype::F32 };
            raw(BinaryOp::Div, &a.to(dtype)?, &b.to(dtype)?, None)
        }
        "floordiv" => floor_division(&a.to(dtype)?, &b.to(dtype)?),
        "mod" => remainder(&a.to(dtype)?, &b.to(dtype)?),
        "pow" => power(a, b, dtype),
        "and" | "or" | "xor" => bitwise(name, a, b, dtype),
        "lshift" | "rshift" => shift(name, &a.to(dtype)?, &b.to(dtype)?),
        "min" | "max" => {
            let (a, b) = (a.to(dtype)?, b.to(dtype)?);
            if dtype == Dtype::Bool {
                return raw(if name == "min" { BinaryOp::And } else { BinaryOp::Or }, &a, &b, None);
            }
            let range = both(&a, &b).map(|((a, b), (c, d))| {
                if name == "min" { (a.min(c), b.min(d)) } else { (a.max(c), b.max(d)) }
            });
            if !a.is_float() {
                let op = if name == "min" { BinaryOp::Min } else { BinaryOp::Max };
                return raw(op, &a, &b, range);
            }
            // A NaN on either side is the result, as in torch.
            let closer = compared(if name == "min" { "le" } else { "ge" }, &a, &b)?;
            let chosen = raw(BinaryOp::Or, &closer, &compared("ne", &a, &a)?, None)?;
            select(&chosen.into(), &a.into(), &b.into())
        }
        "lt" | "le" | "gt" | "ge" | "eq" | "ne" => comparison(name, a, b, dtype),
        _ => Err(refused(format!("`{name}` is not an operation of masks and scores"))),
    }
}

fn arithmetic(name: &str, a: &Operand, b: &Operand, dtype: Dtype) -> PyResult<Value> {
    if name == "sub" && dtype == Dtype::Bool {
        return Err(refused("`-` of two bools is no operation of torch; use `^`, `~` or .int()"));
    }
    let (a, b) = (a.to(dtype)?, b.to(dtype)?);
    if dtype == Dtype::Bool {
        return raw(if name == "add" { BinaryOp::Or } else { BinaryOp::And }, &a, &b, None);
    }
    let op = match name {
        "add" => BinaryOp::Add,
        "sub" => BinaryOp::Sub,
        _ => BinaryOp::Mul,
    };
    let range = both(&a, &b).map(|((a, b), (c, d))| match op {
        BinaryOp::Add => (a + c, b + d),
        BinaryOp::Sub => (a - d, b - c),
        _ => {
            let all = [a * c, a * d, b * c, b * d];
            (all.into_iter().min().unwrap_or(0), all.into_iter().max().unwrap_or(0))
        }
    });
    raw(op, &a, &b, range)?.wrapped()
}

fn comparison(name: &str, a: &Operand, b: &Operand, dtype: Dtype) -> PyResult<Value> {
    // An integer beyond 32 bits is a bound that no value reaches.
    for (value, number, swapped) in [(a, b, false), (b, a, true)] {
        if let (Operand::Value(_), Operand::Number(Number::Int(n))) = (value, number)
            && dtype.ty() == Type::I32
            && i32::try_from(*n).is_err()
        {
            let less = (*n > 0) != swapped;
            return Ok(Value::truth(match name {
                "eq" => false,
                "ne" => true,
                "lt" | "le" => less,
                _ => !less,
            }));
        }
    }
    compared(name, &a.to(dtype)?, &b.to(dtype)?)
}

fn compared(name: &str, a: &Value, b: &Value) -> PyResult<Value> {
    let as_int = |v: &Value| v.cast(Dtype::I32);
    let (a, b) = match (a.dtype, name) {
        (Dtype::Bool, "eq" | "ne") => (a.clone(), b.clone()),
        (Dtype::Bool, _) => (as_int(a)?, as_int(b)?),
        _ => (a.clone(), b.clone()),
    };
    match name {
        "lt" => raw(BinaryOp::Lt, &a, &b, None),
        "le" => raw(BinaryOp::Le, &a, &b, None),
        "gt" => raw(BinaryOp::Lt, &b, &a, None),
        "ge" => raw(BinaryOp::Le, &b, &a, None),
        "eq" => raw(BinaryOp::Eq, &a, &b, None),
        _ => raw(BinaryOp::Ne, &a, &b, None),
    }
}

fn floor_division(a: &Value, b: &Value) -> PyResult<Value> {
    if a.is_float() {
        return unary("floor", &raw(BinaryOp::Div, a, b, None)?.into());
    }
    let (a, b) = whole(a, b)?;
    let range = match (a.range, b.known()) {
        (Some((low, high)), Some(n)) if n > 0 => Some((low.div_euclid(n), high.div_euclid(n))),
        _ => None,
    };
    raw(BinaryOp::Div, &a, &b, range)?.wrapped()
}

/// Two integers; bools as such.
fn whole(a: &Value, b: &Value) -> PyResult<(Value, Value)> {
    let dtype = if a.dtype == Dtype::Bool { Dtype::U8 } else { a.dtype };
    Ok((a.cast(dtype)?, b.cast(dtype)?))
}

/// The remainder of torch and Python, of the divisor's sign.
fn remainder(a: &Value, b: &Value) -> PyResult<Value> {
    if a.is_float() {
        return raw(BinaryOp::Rem, a, b, None);
    }
    let (a, b) = whole(a, b)?;
    let range = match (a.range, b.known()) {
        (Some((low, high)), Some(n)) if n > 0 && low >= 0 => Some((0, high.min(n - 1))),
        (_, Some(n)) if n > 0 => Some((0, n - 1)),
        _ => None,
    };
    // The IR's remainder is Euclidean: never negative.
    let least = raw(BinaryOp::Rem, &a, &b, range)?;
    if b.range.is_some_and(|(low, _)| low > 0) {
        return Ok(least);
    }
    let zero = Value::int(0).cast(a.dtype)?;
    let negative = compared("lt", &b, &zero)?;
    let some = compared("ne", &least, &zero)?;
    let below = raw(BinaryOp::Add, &least, &b, None)?;
    select(&raw(BinaryOp::And, &negative, &some, None)?.into(), &below.into(), &least.into())
}

fn power(a: &Operand, b: &Operand, dtype: Dtype) -> PyResult<Value> {
    let exponent = match b {
        Operand::Number(Number::Int(n)) => Some(*n),
        Operand::Number(Number::Float(x)) if x.fract() == 0.0 && x.abs() <= 64.0 => Some(*x as i64),
        _ => None,
    };
    let base = a.to(dtype)?;
    match exponent {
        Some(n) if (0..=64).contains(&n) => {
            let one = Value::constant(Number::Int(1).of(dtype)?, dtype);
            (0..n).try_fold(one, |product, _| {
                arithmetic("mul", &product.into(), &base.clone().into(), dtype)
            })
        }
        Some(n) if (-64..0).contains(&n) && base.is_float() => {
            let one = Value::float(1.0).cast(dtype)?;
            let product = power(a, &Operand::Number(Number::Int(-n)), dtype)?;
            raw(BinaryOp::Div, &one, &product, None)
        }
        _ if dtype.ty() == Type::F32 => raw(BinaryOp::Pow, &base, &b.to(dtype)?, None),
        _ => Err(refused(
            "`**` on integers takes a number from 0 to 64 as exponent; make the base a float",
        )),
    }
}

fn bitwise(name: &str, a: &Operand, b: &Operand, dtype: Dtype) -> PyResult<Value> {
    let (a, b) = (a.to(dtype)?, b.to(dtype)?);
    if dtype.ty() == Type::F32 {
        return Err(refused(format!("`{name}` is an operation on bools and integers, not floats")));
    }
    let op = match name {
        "and" => BinaryOp::And,
        "or" => BinaryOp::Or,
        _ => BinaryOp::Xor,
    };
    // Of numbers that are not negative, `&` is no larger than either; others keep below the next
    // power of two.
    let range = match both(&a, &b) {
        _ if dtype == Dtype::Bool => None,
        Some(((0.., x), (0.., y))) if name == "and" => Some((0, x.min(y))),
        Some(((0.., x), (0.., y))) => {
            Some((0, (x.max(y) + 1).unsigned_abs().next_power_of_two() as i64 - 1))
        }
        Some(((0.., x), _)) | Some((_, (0.., x))) if name == "and" => Some((0, x)),
        _ => None,
    };
    raw(op, &a, &b, range)
}

fn shift(name: &str, a: &Value, b: &Value) -> PyResult<Value> {
    let integers = a.dtype.ty() == Type::I32 && b.dtype.ty() == Type::I32;
    let Some((least, most)) = b.range.filter(|(low, high)| integers && *low >= 0 && *high < 32)
    else {
        return Err(refused(format!(
            "`{name}` takes integers, and a number of bits that is known to be from 0 to 31"
        )));
    };
    if name == "lshift" {
        let range = a.range.map(|(low, high)| {
            (low << if low < 0 { most } else { least }, high << if high < 0 { least } else { most })
        });
        return raw(BinaryOp::Shl, a, b, range)?.wrapped();
    }
    let range = a.range.map(|(low, high)| {
        (low >> if low < 0 { least } else { most }, high >> if high < 0 { most } else { least })
    });
    raw(BinaryOp::Shr, a, b, range)
}

/// The operation on one value that torch calls `name`.
///
/// # Errors
/// When torch has no such operation on its dtype, or the IR cannot say it.
pub fn unary(name: &str, x: &Operand) -> PyResult<Value> {
    let x = x.to(x.dtype().unwrap_or(Dtype::F32))?;
    let apply = |op, x: Value, range| {
        let expr = DynExpr::unary(op, x.expr).map_err(raised)?;
        Value { expr, dtype: x.dtype, range, learns: x.learns }.wrapped()
    };
    match (name, x.dtype.ty()) {
        ("neg", Type::Bool) => Err(refused("`-` on a bool is no operation of torch; use `~`")),
        ("neg", _) => {
            let range = x.range.map(|(low, high)| (-high, -low));
            apply(UnaryOp::Neg, x, range)
        }
        ("abs", Type::Bool) => Ok(x),
        ("abs", _) => {
            let range = x.range.map(|(low, high)| {
                let least = if low <= 0 && high >= 0 { 0 } else { low.abs().min(high.abs()) };
                (least, low.abs().max(high.abs()))
            });
            apply(UnaryOp::Abs, x, range)
        }
        ("invert", Type::Bool) => apply(UnaryOp::Not, x, None),
        ("invert", Type::I32) => {
            let minus_one = Value::int(-1).cast(Dtype::I64)?;
            let dtype = x.dtype;
            arithmetic("sub", &minus_one.into(), &x.into(), Dtype::I64)?.cast(dtype)
        }
        ("invert", Type::F32) => Err(refused("`~` is an operation on bools and integers")),
        ("detach", _) => x.detached(),
        ("floor", Type::Bool | Type::I32) => Ok(x),
        ("floor", Type::F32) => apply(UnaryOp::Floor, x.detached()?, None),
        (name, _) => {
            let op = match name {
                "exp" => UnaryOp::Exp,
                "exp2" => UnaryOp::Exp2,
                "log" => UnaryOp::Log,
                "log2" => UnaryOp::Log2,
                "sqrt" => UnaryOp::Sqrt,
                "rsqrt" => UnaryOp::Rsqrt,
                "tanh" => UnaryOp::Tanh,
                "sigmoid" => UnaryOp::Sigmoid,
                "erf" => UnaryOp::Erf,
                "sin" => UnaryOp::Sin,
                "cos" => UnaryOp::Cos,
                _ => {
                    return Err(refused(format!(
                        "`{name}` is not an operation of masks and scores"
                    )));
                }
            };
            let dtype = if x.is_float() { x.dtype } else { Dtype::F32 };
            apply(op, x.cast(dtype)?, None)
        }
    }
}

/// An index of a captured tensor, an integer.
///
/// # Errors
/// When it is no integer.
pub fn index(index: &Operand) -> PyResult<Value> {
    match index {
        Operand::Value(v) if v.dtype.ty() == Type::I32 => v.detached()?.cast(Dtype::I64),
        Operand::Number(Number::Int(_)) => index.to(Dtype::I64),
        _ => Err(refused("a captured tensor is indexed with integers, not floats or bools")),
    }
}
