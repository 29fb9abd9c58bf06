//! Traced functions: programs, with the captured tensors that they read.

use foveate::mods::Program;
use foveate::{MaskMod, ScoreMod};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::capture::{self, Capture};
use crate::error::refused;
use crate::expr::Expr;

/// A traced mask or score function.
#[pyclass(frozen, module = "foveate._native")]
pub struct Traced {
    program: Program,
    /// In the order of the program's slots.
    captures: Vec<Py<Capture>>,
    /// What was traced, if it was a function of Python's.
    function: Option<Py<PyAny>>,
}

impl Traced {
    /// `program`, whose buffers are among `captures`; `function` is what it was traced from.
    ///
    /// # Errors
    /// When a buffer is not.
    pub fn new(
        py: Python<'_>,
        program: &Program,
        captures: &[Py<Capture>],
        function: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let captures = capture::in_order(program.graph().buffers(), captures)?;
        let captures = captures.into_iter().map(|c| c.clone_ref(py)).collect();
        Ok(Self { program: program.clone(), captures, function })
    }

    /// The program, whose captured tensors have no elements.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Whether a captured tensor wants a gradient.
    pub fn learns(&self) -> bool {
        self.captures.iter().any(|c| c.get().is_learned())
    }

    /// The captured tensors, in the order of the program's slots.
    pub fn in_order(&self) -> &[Py<Capture>] {
        &self.captures
    }

    fn tensors<'py>(
        &self,
        py: Python<'py>,
        which: impl Fn(&Capture) -> bool,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let found = self.captures.iter().map(|c| c.get()).filter(|c| which(c));
        PyTuple::new(py, found.map(|c| c.tensor(py)).collect::<Vec<_>>())
    }
}

#[pymethods]
impl Traced {
    /// What the program reads.
    #[getter]
    fn captures(&self, py: Python<'_>) -> Vec<Py<Capture>> {
        self.captures.iter().map(|c| c.clone_ref(py)).collect()
    }

    /// The function that was traced, if it was one.
    #[getter]
    fn function(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.function.as_ref().map(|f| f.clone_ref(py))
    }

    /// The tensors that want a gradient, in the order of `captures`.
    #[getter]
    fn learned<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        self.tensors(py, Capture::is_learned)
    }

    /// The tensors that calls read where they lie.
    #[getter]
    fn shared<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        self.tensors(py, Capture::is_shared)
    }

    /// The program in Foveate's text form.
    fn text(&self) -> String {
        self.program.text().0
    }

    /// What is left without the tensors, which it does not hold.
    fn structure(&self) -> Structure {
        let slots = self.captures.iter().map(|c| c.get().slot().clone()).collect();
        Structure { program: self.program.clone(), slots }
    }
}

/// A traced function without its captured tensors.
#[pyclass(frozen, module = "foveate._native")]
pub struct Structure {
    program: Program,
    slots: Vec<capture::Slot>,
}

#[pymethods]
impl Structure {
    /// What tracing `function` would give, which reads these tensors, in the order of [`Traced::captures`] and
    /// of the dtypes, shapes and places of those.
    fn of(
        &self,
        py: Python<'_>,
        tensors: Vec<Bound<'_, PyAny>>,
        function: Py<PyAny>,
    ) -> PyResult<Traced> {
        if tensors.len() != self.slots.len() {
            return Err(PyValueError::new_err("one tensor for each that was captured"));
        }
        let captures = self.slots.iter().zip(tensors);
        let captures = captures.map(|(slot, tensor)| Py::new(py, slot.with(tensor.unbind())));
        Ok(Traced {
            program: self.program.clone(),
            captures: captures.collect::<PyResult<_>>()?,
            function: Some(function),
        })
    }
}

/// The mask that `expr` says, which is what `function` gave.
#[pyfunction]
#[pyo3(signature = (expr, captures, function = None))]
pub fn mask(
    py: Python<'_>,
    expr: &Expr,
    captures: Vec<Py<Capture>>,
    function: Option<Py<PyAny>>,
) -> PyResult<Traced> {
    let made = MaskMod::new(&expr.0.expr).map_err(|e| refused(e.to_string()))?;
    Traced::new(py, made.program(), &captures, function)
}

/// The score that `expr` says, which is what `function` gave.
#[pyfunction]
#[pyo3(signature = (expr, captures, function = None))]
pub fn score(
    py: Python<'_>,
    expr: &Expr,
    captures: Vec<Py<Capture>>,
    function: Option<Py<PyAny>>,
) -> PyResult<Traced> {
    let made = ScoreMod::new(&expr.0.expr).map_err(|e| refused(e.to_string()))?;
    Traced::new(py, made.program(), &captures, function)
}
