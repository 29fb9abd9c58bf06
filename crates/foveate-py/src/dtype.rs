//! The dtypes of torch, and how torch promotes them.

use foveate::mods::Type;
use pyo3::exceptions::PyNotImplementedError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::error::refused;

/// A dtype of torch that a captured tensor or a value of a mod can have.
pub use foveate::ElementType as Dtype;

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

/// What torch says of a dtype.
pub trait TorchDtype: Sized {
    /// The dtype that a `torch.dtype` object says.
    ///
    /// # Errors
    /// When it is a dtype that mods do not know (complex, float8, unsigned of 16 bits and more).
    fn of(object: &Bound<'_, PyAny>) -> PyResult<Self>;

    /// Its `torch.dtype` object.
    ///
    /// # Errors
    /// When torch cannot be imported.
    fn object(self, py: Python<'_>) -> PyResult<Py<PyAny>>;

    /// The type of its values in a mod.
    fn ty(self) -> Type;

    /// Whether its values are floats.
    fn floating(self) -> bool;

    /// Smallest and largest value of an integer narrower than 32 bits: arithmetic on these wraps,
    /// in torch too.
    fn narrow(self) -> Option<(i64, i64)>;

    /// What torch computes in, of operands of these dtypes.
    fn promoted(self, other: Self) -> Self;

    /// The dtype of q, k, v.
    ///
    /// # Errors
    /// When it is none that attention takes.
    fn operand(self) -> PyResult<foveate::DType>;
}

impl TorchDtype for Dtype {
    fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let all = objects(object.py())?;
        let found = all.iter().position(|x| x.is(object));
        found.map(|i| NAMES[i].1).ok_or_else(|| {
            refused(format!(
                "{object} is no dtype of masks and scores: convert it, as to float32 or int64"
            ))
        })
    }

    fn object(self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let at = NAMES.iter().position(|(_, d)| *d == self).expect("every dtype has a name");
        Ok(objects(py)?[at].clone_ref(py))
    }

    fn ty(self) -> Type {
        self.into()
    }

    fn floating(self) -> bool {
        self.ty() == Type::F32
    }

    fn narrow(self) -> Option<(i64, i64)> {
        match self {
            U8 => Some((0, 255)),
            I8 => Some((-128, 127)),
            I16 => Some((-32768, 32767)),
            _ => None,
        }
    }

    fn promoted(self, other: Self) -> Self {
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

    fn operand(self) -> PyResult<foveate::DType> {
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
