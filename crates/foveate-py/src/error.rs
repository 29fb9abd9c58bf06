//! Errors of Foveate as exceptions of Python.

use foveate::ErrorKind;
use pyo3::exceptions::{PyIndexError, PyRuntimeError, PyValueError};
use pyo3::{PyErr, create_exception};

create_exception!(
    foveate,
    TraceError,
    PyRuntimeError,
    "A mask or score function cannot be traced: the message names operation, file and line."
);

/// A `TraceError`.
pub fn refused(reason: impl Into<String>) -> PyErr {
    TraceError::new_err(reason.into())
}

/// What the machine lacks or refuses.
pub fn runtime(message: String) -> PyErr {
    PyRuntimeError::new_err(message)
}

/// An error of shapes, options or mods as a `ValueError`; what only a call can find, such as an index
/// outside its tensor, as torch raises it.
pub fn raised(error: impl Into<foveate::Error>) -> PyErr {
    let error = error.into();
    let message = error.to_string();
    match error.kind() {
        ErrorKind::OutOfRange { .. } => PyIndexError::new_err(message),
        ErrorKind::Backend { .. } | ErrorKind::Declined { .. } => PyRuntimeError::new_err(message),
        _ => PyValueError::new_err(message),
    }
}
