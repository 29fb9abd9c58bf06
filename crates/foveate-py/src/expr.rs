//! `Expr`: what a mask or score function is called with in place of tensors.
//!
//! Python's operators on it record what they do. Everything else that torch can do to a tensor
//! arrives in `python/foveate/_trace.py`, which says it in these operators.

use foveate::mods::{DynExpr, Leaf};
use foveate::{Scalar, ScalarValue};
use pyo3::exceptions::PyAttributeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::pyclass::CompareOp;
use pyo3::types::{PyTuple, PyType};

use crate::dtype::{Dtype, TorchDtype};
use crate::error::refused;
use crate::value::{self, Operand, Value};

/// A traced 0-d tensor.
#[pyclass(frozen, module = "foveate._native")]
pub struct Expr(pub Value);

/// An operand, or `None` for an object that is no number and no traced value: another class may
/// know what to do with it.
fn operand(x: &Bound<'_, PyAny>) -> PyResult<Option<Operand>> {
    if let Ok(expr) = x.cast::<Expr>() {
        return Ok(Some(Operand::Value(expr.get().0.clone())));
    }
    Ok(value::number(x)?.map(Operand::Number))
}

/// An operand.
///
/// # Errors
/// When it is neither a number nor a traced value.
pub fn operand_of(x: &Bound<'_, PyAny>) -> PyResult<Operand> {
    operand(x)?.ok_or_else(|| {
        let kind = x.get_type().name().map_or_else(|_| "this".to_owned(), |n| n.to_string());
        refused(format!("an operand is a {kind}, neither a traced value nor a number"))
    })
}

impl Expr {
    fn with(&self, name: &str, other: &Bound<'_, PyAny>, swapped: bool) -> PyResult<Py<PyAny>> {
        let py = other.py();
        let Some(other) = operand(other)? else { return Ok(py.NotImplemented()) };
        let this = Operand::Value(self.0.clone());
        let made = match swapped {
            false => value::binary(name, &this, &other),
            true => value::binary(name, &other, &this),
        };
        Ok(Py::new(py, Expr(made?))?.into_any())
    }

    fn unary(&self, name: &str) -> PyResult<Expr> {
        value::unary(name, &Operand::Value(self.0.clone())).map(Expr)
    }
}

const BRANCH: &str = "Python control flow (if, while, and, or, not, in, assert, a < b < c) on a \
                      traced value; use torch.where, &, | and ~";
const NUMBER: &str = "a traced value has no number yet: a mask or score function is read once, \
                      for all indices; .item(), int(), float() and range() cannot be used on it";

#[pymethods]
impl Expr {
    fn __add__(&self, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        self.with("add", other, false)
    }
    fn __radd__(&self, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        self.with("add", other, true)
    }
    fn __sub__(&self, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        self.with("sub", other, false)
    }
    fn __rsub__(&self, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        self.with("sub", other, true)
    }
    fn __mul__(&self, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        self.with("mul", other, false)
    }
    fn __rmul__(&self, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        self.with("mul", other, true)
    }
    fn __truediv__(&self, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        self.with("truediv", other, false)
    }
    fn __rtruediv__(&self, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        self.with("truediv", other, true)
    }
    fn __floordiv__(&self, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        self.with("floordiv", other, false)
    }
    fn __rfloordiv__(&self, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        self.with("floordiv", other, true)
    }
    fn __mod__(&self, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        self.with("mod", other, false)
    }
    fn __rmod__(&self, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        self.with("mod", other, true)
    }
    fn __and__(&self, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        self.with("and", other, false)
    }
    fn __rand__(&self, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        self.with("and", other, true)
    }
    fn __or__(&self, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        self.with("or", other, false)
    }
    fn __ror__(&self, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        self.with("or", other, true)
    }
    fn __xor__(&self, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        self.with("xor", other, false)
    }
    fn __rxor__(&self, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        self.with("xor", other, true)
    }
    fn __lshift__(&self, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        self.with("lshift", other, false)
    }
    fn __rlshift__(&self, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        self.with("lshift", other, true)
    }
    fn __rshift__(&self, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        self.with("rshift", other, false)
    }
    fn __rrshift__(&self, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        self.with("rshift", other, true)
    }

    fn __pow__(
        &self,
        other: &Bound<'_, PyAny>,
        _modulo: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        self.with("pow", other, false)
    }
    fn __rpow__(
        &self,
        other: &Bound<'_, PyAny>,
        _modulo: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        self.with("pow", other, true)
    }
    fn __richcmp__(&self, other: &Bound<'_, PyAny>, op: CompareOp) -> PyResult<Py<PyAny>> {
        let name = match op {
            CompareOp::Lt => "lt",
            CompareOp::Le => "le",
            CompareOp::Eq => "eq",
            CompareOp::Ne => "ne",
            CompareOp::Gt => "gt",
            CompareOp::Ge => "ge",
        };
        self.with(name, other, false)
    }
    fn __hash__(slf: PyRef<'_, Self>) -> usize {
        slf.as_ptr() as usize
    }
    fn __neg__(&self) -> PyResult<Expr> {
        self.unary("neg")
    }
    fn __pos__(&self) -> Expr {
        Expr(self.0.clone())
    }
    fn __abs__(&self) -> PyResult<Expr> {
        self.unary("abs")
    }
    fn __invert__(&self) -> PyResult<Expr> {
        self.unary("invert")
    }
    fn __bool__(&self) -> PyResult<bool> {
        Err(refused(BRANCH))
    }
    fn __index__(&self) -> PyResult<usize> {
        Err(refused(NUMBER))
    }
    fn __int__(&self) -> PyResult<usize> {
        Err(refused(NUMBER))
    }
    fn __float__(&self) -> PyResult<f64> {
        Err(refused(NUMBER))
    }
    fn __len__(&self) -> PyResult<usize> {
        Err(refused("a traced value is a 0-d tensor: it has no length"))
    }
    fn __getitem__(&self, _index: &Bound<'_, PyAny>) -> PyResult<usize> {
        Err(refused("a traced value is a 0-d tensor: it cannot be indexed"))
    }
    fn __iter__(&self) -> PyResult<Py<PyAny>> {
        Err(refused("a traced value is a 0-d tensor: it cannot be iterated over"))
    }
    fn __repr__(&self) -> String {
        format!("<traced {:?}>", self.0.dtype)
    }

    /// The `torch.dtype` that torch would give the value.
    #[getter]
    fn dtype(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.0.dtype.object(py)
    }

    /// The value in another dtype.
    fn cast(&self, dtype: &Bound<'_, PyAny>) -> PyResult<Expr> {
        self.0.cast(Dtype::of(dtype)?).map(Expr)
    }

    /// What torch's tensors have beyond operators: looked up in `foveate._calls`.
    fn __getattr__(slf: &Bound<'_, Self>, name: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let py = slf.py();
        let dunder: String = name.extract()?;
        if dunder.starts_with("__") {
            return Err(PyAttributeError::new_err(dunder));
        }
        let trace = py.import(intern!(py, "foveate._calls"))?;
        Ok(trace.call_method1(intern!(py, "attribute"), (slf, name))?.unbind())
    }

    /// Makes torch take traced values for tensors. While a function is traced, a mode of
    /// `foveate._calls` answers first.
    #[classmethod]
    #[pyo3(signature = (func, types, args = None, kwargs = None))]
    fn __torch_function__(
        _class: &Bound<'_, PyType>,
        func: &Bound<'_, PyAny>,
        types: &Bound<'_, PyAny>,
        args: Option<&Bound<'_, PyTuple>>,
        kwargs: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        let _ = (func, types, args, kwargs);
        Err(refused("a traced value is used after its function was traced"))
    }
}

/// The coordinate `b`, `h`, `q` or `kv`, one of `extent`, or `score`.
#[pyfunction]
pub fn leaf(name: &str, extent: i64) -> PyResult<Expr> {
    let found = Leaf::ALL.into_iter().find(|l| l.name() == name);
    found
        .map(|leaf| Expr(Value::leaf(leaf, extent)))
        .ok_or_else(|| refused(format!("there is no coordinate `{name}`")))
}

/// An operation on one value or number, by its name in torch.
#[pyfunction]
pub fn unary(name: &str, x: &Bound<'_, PyAny>) -> PyResult<Expr> {
    value::unary(name, &operand_of(x)?).map(Expr)
}

/// An operation on two values or numbers, by its name in Python's `operator` module.
#[pyfunction]
pub fn binary(name: &str, a: &Bound<'_, PyAny>, b: &Bound<'_, PyAny>) -> PyResult<Expr> {
    value::binary(name, &operand_of(a)?, &operand_of(b)?).map(Expr)
}

/// `torch.where` on values and numbers.
#[pyfunction]
pub fn select(
    cond: &Bound<'_, PyAny>,
    then: &Bound<'_, PyAny>,
    other: &Bound<'_, PyAny>,
) -> PyResult<Expr> {
    value::select(&operand_of(cond)?, &operand_of(then)?, &operand_of(other)?).map(Expr)
}

/// A number of the function that is traced, or a traced value, as a value of a `torch.dtype`.
#[pyfunction]
pub fn constant(x: &Bound<'_, PyAny>, dtype: &Bound<'_, PyAny>) -> PyResult<Expr> {
    operand_of(x)?.to(Dtype::of(dtype)?).map(Expr)
}

/// A number of the tracer's own as a value of a `torch.dtype`: part of the structure.
#[pyfunction]
pub fn literal(x: &Bound<'_, PyAny>, dtype: &Bound<'_, PyAny>) -> PyResult<Expr> {
    let dtype = Dtype::of(dtype)?;
    let number = value::number(x)?.ok_or_else(|| refused("a literal is a number"))?;
    Ok(Expr(Value::constant(number.of(dtype)?, dtype)))
}

/// The run-time scalar `name`, an integer of which no more is known than an example; one that does not fit 32 bits
/// is refused when it is given.
#[pyfunction]
pub fn scalar(name: String, example: i64) -> Expr {
    let value = ScalarValue::I32(example.clamp(i32::MIN.into(), i32::MAX.into()) as i32);
    let expr = DynExpr::scalar(Scalar { name, value });
    Expr(Value { expr, dtype: Dtype::I64, range: None, learns: false })
}
