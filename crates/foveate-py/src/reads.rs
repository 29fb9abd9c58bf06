//! What a function reads, found without running it: what its trace depends on (`_kept` of the package).
//!
//! Asked in every call with a mask or a score, mostly after attention has taken the processor's caches: in
//! Rust for the instructions and objects that Python's own walk of closures and globals would bring back.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};

/// Parts of what is read that are followed at most.
const MOST_READ: usize = 64;

/// What values are told by.
struct Known {
    function: Py<PyAny>,
    tensors: [Py<PyAny>; 2],
    strided: Py<PyAny>,
    torch: Py<PyAny>,
    /// Functions of Python's own that only compute.
    computing: [Py<PyAny>; 3],
    builtins: Py<PyDict>,
}

fn known(py: Python<'_>) -> PyResult<&'static Known> {
    static FOUND: PyOnceLock<Known> = PyOnceLock::new();
    FOUND.get_or_try_init(py, || {
        let torch = py.import("torch")?;
        let builtins = py.import("builtins")?;
        let of = |name| builtins.getattr(name).map(Bound::unbind);
        let parameter = py.import("torch.nn")?.getattr("Parameter")?.unbind();
        Ok::<_, PyErr>(Known {
            function: py.import("types")?.getattr("FunctionType")?.unbind(),
            tensors: [torch.getattr("Tensor")?.unbind(), parameter],
            strided: torch.getattr("strided")?.unbind(),
            computing: [of("enumerate")?, of("range")?, of("zip")?],
            builtins: builtins.dict().unbind(),
            torch: torch.into_any().unbind(),
        })
    })
}

/// Notes in `key` what the trace of a mask or score function depends on, and in `tensors` the tensors that it
/// captures; false where nothing can be said of something that it reads. `globals_of` gives the globals that code
/// reads, or None of code that may do more than compute.
#[pyfunction]
pub fn reads(
    function: &Bound<'_, PyAny>,
    key: &Bound<'_, PyList>,
    tensors: &Bound<'_, PyList>,
    globals_of: &Bound<'_, PyAny>,
) -> PyResult<bool> {
    Walk { known: known(function.py())?, key, tensors, globals_of }.value(function)
}

struct Walk<'a, 'py> {
    known: &'static Known,
    key: &'a Bound<'py, PyList>,
    tensors: &'a Bound<'py, PyList>,
    globals_of: &'a Bound<'py, PyAny>,
}

impl<'py> Walk<'_, 'py> {
    fn values(&self, values: impl IntoIterator<Item = Bound<'py, PyAny>>) -> PyResult<bool> {
        for value in values {
            if !self.value(&value)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn value(&self, value: &Bound<'py, PyAny>) -> PyResult<bool> {
        let (py, key, known) = (value.py(), self.key, self.known);
        let kind = value.get_type();
        if key.len() > MOST_READ {
            return Ok(false);
        }
        if known.tensors.iter().any(|tensor| kind.is(tensor)) {
            return self.tensor(value);
        }
        if kind.is(&known.function) {
            return self.function(value);
        }
        if let Ok(number) = value.cast_exact::<PyFloat>() {
            // Its bits tell -0.0 from 0.0.
            key.append(kind)?;
            key.append(number.value().to_bits())?;
        } else if value.is_exact_instance_of::<PyInt>()
            || value.is_exact_instance_of::<PyBool>()
            || value.is_exact_instance_of::<PyString>()
        {
            key.append(kind)?;
            key.append(value)?;
        } else if let Ok(names) = value.cast_exact::<PyDict>() {
            key.append(kind)?;
            key.append(names.len())?;
            names.keys().iter().try_for_each(|name| key.append(name))?;
            return self.values(names.values());
        } else if kind.getattr(intern!(py, "__dict__"))?.contains(intern!(py, "_reads"))? {
            // A mask, and no class made of it, which may compute something else.
            let read = value.getattr(intern!(py, "_reads"))?.cast_into::<PyTuple>()?;
            key.append(kind)?;
            key.append(read.len())?;
            return self.values(read.iter());
        } else if value.is(&known.torch) || known.computing.iter().any(|of| value.is(of)) {
            key.append(value)?;
        } else {
            return Ok(false);
        }
        Ok(true)
    }

    fn tensor(&self, value: &Bound<'py, PyAny>) -> PyResult<bool> {
        let py = value.py();
        let strided = value.getattr(intern!(py, "layout"))?.is(&self.known.strided);
        if !strided || value.call_method0(intern!(py, "is_neg"))?.is_truthy()? {
            return Ok(false);
        }
        self.tensors.append(value)?;
        let of = [
            value.getattr(intern!(py, "dtype"))?,
            value.getattr(intern!(py, "shape"))?,
            value.getattr(intern!(py, "device"))?,
            value.getattr(intern!(py, "requires_grad"))?,
        ];
        self.key.append(PyTuple::new(py, of)?)?;
        Ok(true)
    }

    fn function(&self, function: &Bound<'py, PyAny>) -> PyResult<bool> {
        let py = function.py();
        let code = function.getattr(intern!(py, "__code__"))?;
        let names = self.globals_of.call1((&code,))?;
        let Ok(names) = names.cast_into::<PyTuple>() else { return Ok(false) };
        if function.getattr(intern!(py, "__kwdefaults__"))?.is_truthy()? {
            return Ok(false);
        }
        let defaults = function.getattr(intern!(py, "__defaults__"))?;
        let defaults = defaults.cast_into::<PyTuple>().unwrap_or_else(|_| PyTuple::empty(py));
        self.key.append(code)?;
        self.key.append(defaults.len())?;
        let mut read = Vec::new();
        if let Ok(cells) = function.getattr(intern!(py, "__closure__"))?.cast_into::<PyTuple>() {
            for cell in cells.iter() {
                // One that is empty yet has none.
                let Ok(value) = cell.getattr(intern!(py, "cell_contents")) else {
                    return Ok(false);
                };
                read.push(value);
            }
        }
        if !names.is_empty() {
            let globals = function.getattr(intern!(py, "__globals__"))?;
            // A class of dictionaries may compute what it gives.
            let Ok(globals) = globals.cast_exact::<PyDict>() else { return Ok(false) };
            for name in names.iter() {
                let found = match globals.get_item(&name)? {
                    None => self.known.builtins.bind(py).get_item(&name)?,
                    found => found,
                };
                let Some(value) = found else { return Ok(false) };
                read.push(value);
            }
        }
        Ok(self.values(read)? && self.values(defaults.iter())?)
    }
}
