//! The dtypes of torch, and how torch promotes them.

use foveate::mods::Type;
use pyo3::exceptions::{PyNotImplementedError, PyTypeError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// A dtype of torch that a captured tensor or a value of a mod can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// `torch.bool`.
    Bool,
    /// `torch.uint8`.
    U8,
    /// `torch.int8`.
    I8,
    /// `torch.int16`.
    I16,
    /// `torch.int32`.
    I32,
    /// `torch.int64`.
    I64,
    /// `torch.float16`.
    F16,
    /// `torch.bfloat16`.
    BF16,
    /// `torch.float32`.
    F32,
    /// `torch.float64`.
    F64,
}

use Dtype::*;

const NAMES: [(&str, Dtype); 10] = [
    ("float32", F32),
    ("bfloat16", BF16),
    ("float16", F16),
    ("int64", I64),
    ("int32", I32),
    ("bool", Bool),
    ("uint8", U8),
    ("int16", I16),
    ("int8", I8),
    ("float64", F64),
];

/// The dtype objects of torch, in the order of [`NAMES`].
fn objects(py: Python<'_>) -> PyResult<&'static [Py<PyAny>]> {
    static OBJECTS: PyOnceLock<Vec<Py<PyAny>>> = PyOnceLock::new();
    let objects = OBJECTS.get_or_try_init(py, || {
        let torch = py.import("torch")?;
        NAMES.iter().map(|(name, _)| Ok(torch.getattr(*name)?.unbind())).collect::<PyResult<_>>()
    })?;
    Ok(objects)
}

impl Dtype {
    /// The dtype that a `torch.dtype` object says.
    ///
    /// # Errors
    /// When it is a dtype that mods do not know (complex, float8, unsigned of 16 bits and more).
    pub fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let all = objects(object.py())?;
        let found = all.iter().position(|x| x.is(object));
        found.map(|i| NAMES[i].1).ok_or_else(|| {
            PyTypeError::new_err(format!("{object} is not a dtype that a mask or score can read"))
        })
    }

    /// Its `torch.dtype` object.
    ///
    /// # Errors
    /// When torch cannot be imported.
    pub fn object(self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let at = NAMES.iter().position(|(_, d)| *d == self).expect("every dtype has a name");
        Ok(objects(py)?[at].clone_ref(py))
    }

    /// The type of its values in a mod.
    pub fn ty(self) -> Type {
        match self {
            Bool => Type::Bool,
            U8 | I8 | I16 | I32 | I64 => Type::I32,
            F16 | BF16 | F32 | F64 => Type::F32,
        }
    }

    /// Size of an element in bytes.
    pub fn bytes(self) -> usize {
        match self {
            Bool | U8 | I8 => 1,
            I16 | F16 | BF16 => 2,
            I32 | F32 => 4,
            I64 | F64 => 8,
        }
    }

    /// Smallest and largest value of an integer narrower than 32 bits: arithmetic on these wraps,
    /// in torch too.
    pub fn narrow(self) -> Option<(i64, i64)> {
        match self {
            U8 => Some((0, 255)),
            I8 => Some((-128, 127)),
            I16 => Some((-32768, 32767)),
            _ => None,
        }
    }

    /// What torch computes in, of operands of these dtypes.
    pub fn promoted(self, other: Self) -> Self {
        let kind = |d: Self| d.ty() as u8;
        match (self, other) {
            (a, b) if a == b => a,
            (a, b) if kind(a) != kind(b) => {
                if kind(a) > kind(b) {
                    a
                } else {
                    b
                }
            }
            (F16, BF16) | (BF16, F16) => F32,
            (U8, I8) | (I8, U8) => I16,
            (a, b) if a.bytes() >= b.bytes() => a,
            (_, b) => b,
        }
    }

    /// The dtype of q, k, v.
    ///
    /// # Errors
    /// When it is none that attention takes.
    pub fn operand(self) -> PyResult<foveate::DType> {
        match self {
            F32 => Ok(foveate::DType::F32),
            F16 => Ok(foveate::DType::F16),
            BF16 => Ok(foveate::DType::BF16),
            other => Err(PyNotImplementedError::new_err(format!(
                "attention takes float32, bfloat16 and float16 tensors, not {other:?}"
            ))),
        }
    }
}
