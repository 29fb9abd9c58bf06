//! Kernels of the package's operators on CPU tensors, which torch's dispatcher calls without Python.
//!
//! `python/foveate/_ops.py` defines the operators and registers everything else of them: kernels for CUDA
//! tensors, shapes of results, rules of vmap. It asks [`register_kernels`] for those of CPU tensors and has
//! its own where this torch lacks a function ([`shim`]). Arguments and results travel as [`stack`] says;
//! [`kernels`] are the operators, [`mods`] their programs, [`layout`] where keys lie.
//!
//! **Errors.** Torch's stable functions give a kernel no way to say one: C++ extensions throw. Here nothing
//! of Rust unwinds into torch. A kernel catches its panics, puts its exception by for the thread, and as
//! the last thing it does throws C++'s `std::runtime_error` with the same words, of which torch makes a
//! `RuntimeError`. Whoever calls the operator from Python has the exception itself by [`kernel_error`].

mod kernels;
mod layout;
mod mods;
mod shim;
pub mod stack;

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::threads;
use kernels::{Backward, Forward, Task};
use layout::Layout;
use shim::{Shim, Value};
use stack::{Arguments, Returned};

/// The functions that kernels call, there before torch may call a kernel.
static SHIM: OnceLock<Shim> = OnceLock::new();

/// Whether torch has the kernels. Asked and said with the GIL held.
static REGISTERED: AtomicBool = AtomicBool::new(false);

/// How many kernels have been called.
static CALLS: AtomicU64 = AtomicU64::new(0);

/// What a kernel says after Python's end.
const GONE: &CStr =
    c"Foveate's kernels on CPU tensors need the Python interpreter, which has ended";

thread_local! {
    /// What the last kernel of this thread failed with, and its words.
    static FAILED: RefCell<Option<(CString, PyErr)>> = const { RefCell::new(None) };
}

/// Registers the kernels with the libtorch at `path`, which the process has loaded; returns why not, if
/// not: then none of them is registered.
#[pyfunction]
pub fn register_kernels(path: PathBuf) -> Option<String> {
    if REGISTERED.load(Ordering::Relaxed) {
        return None;
    }
    let shim = match Shim::find(&path) {
        Ok(shim) => SHIM.get_or_init(|| shim),
        Err(reason) => return Some(reason),
    };
    let kernels: [(&CStr, shim::Kernel); 5] = [
        (c"forward", forward),
        (c"backward", backward),
        (c"varlen_forward", varlen_forward),
        (c"varlen_backward", varlen_backward),
        (c"paged", paged),
    ];
    let done = shim.register(c"CPU", &kernels);
    REGISTERED.store(done.is_ok(), Ordering::Relaxed);
    done.err()
}

/// The functions of torch's that [`register_kernels`] looks for.
#[pyfunction]
pub fn kernel_functions() -> Vec<&'static str> {
    shim::FUNCTIONS.to_vec()
}

/// How many kernels torch has called, in this process.
#[pyfunction]
pub fn kernel_calls() -> u64 {
    CALLS.load(Ordering::Relaxed)
}

/// The exception of the kernel that failed last in this thread, if it has these words; it is not kept.
#[pyfunction]
pub fn kernel_error(words: &str) -> Option<PyErr> {
    let (said, error) = FAILED.take()?;
    (said.to_bytes() == words.as_bytes()).then_some(error)
}

extern "C-unwind" fn forward(stack: *mut Value, _: u64, _: u64) {
    // SAFETY: torch calls it as `Kernel` says, on arguments of this operator.
    unsafe { serve::<Forward>(stack, Layout::Dense) }
}

extern "C-unwind" fn backward(stack: *mut Value, _: u64, _: u64) {
    // SAFETY: as above.
    unsafe { serve::<Backward>(stack, Layout::Dense) }
}

extern "C-unwind" fn varlen_forward(stack: *mut Value, _: u64, _: u64) {
    // SAFETY: as above.
    unsafe { serve::<Forward>(stack, Layout::Sequences) }
}

extern "C-unwind" fn varlen_backward(stack: *mut Value, _: u64, _: u64) {
    // SAFETY: as above.
    unsafe { serve::<Backward>(stack, Layout::Sequences) }
}

extern "C-unwind" fn paged(stack: *mut Value, _: u64, _: u64) {
    // SAFETY: as above.
    unsafe { serve::<Forward>(stack, Layout::Pages) }
}

/// Runs a kernel; one that fails ends by an exception of C++.
///
/// # Safety
/// `stack` holds the arguments of `T` in this layout, and has place for its results. The caller has
/// nothing to drop.
unsafe fn serve<T: Task>(stack: *mut Value, layout: Layout) {
    CALLS.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the caller's promise.
    if let Some(words) = unsafe { attempt::<T>(stack, layout) } {
        let shim = SHIM.get().expect("kernels are registered by it");
        // SAFETY: the words are kept for this thread, and nothing in this frame is dropped.
        unsafe { shim.throw(words) }
    }
}

/// Runs a kernel; the words of its error, which stay until the next one of this thread.
///
/// # Safety
/// As for [`serve`].
unsafe fn attempt<T: Task>(stack: *mut Value, layout: Layout) -> Option<*const c_char> {
    let run = || -> PyResult<()> {
        let shim = SHIM.get().expect("kernels are registered by it");
        // SAFETY: the caller's promise.
        let mut arguments = unsafe { Arguments::new(shim, stack) };
        let task = T::take(&mut arguments, layout);
        let results = Python::try_attach(|py| task.run(py, shim));
        let results =
            results.unwrap_or_else(|| Err(PyRuntimeError::new_err(GONE.to_string_lossy())))?;
        let values = results.into_iter().map(|of| Returned::into_value(of, shim));
        for (at, value) in values.collect::<PyResult<Vec<_>>>()?.into_iter().enumerate() {
            // SAFETY: there is place for the results, and the arguments are taken.
            unsafe { *stack.add(at) = value };
        }
        Ok(())
    };
    // What a panic leaves half-written is the call's own, which nobody sees.
    let done = catch_unwind(AssertUnwindSafe(run));
    let error = match done {
        Ok(Ok(())) => return None,
        Ok(Err(error)) => error,
        Err(panic) => PyRuntimeError::new_err(threads::what(panic.as_ref())),
    };
    // A thread or an interpreter that ends has no place for the error, and nothing unwinds for that.
    let kept = catch_unwind(AssertUnwindSafe(|| keep(error))).ok().flatten();
    Some(kept.unwrap_or(GONE.as_ptr()))
}

/// Puts an error by for this thread; its words, or `None` where Python cannot say them.
fn keep(error: PyErr) -> Option<*const c_char> {
    let words = Python::try_attach(|py| error.value(py).str().map(|s| s.to_string()))?;
    let words = words.unwrap_or_else(|_| "an error without words".into()).replace('\0', " ");
    let words = CString::new(words).unwrap_or_default();
    Some(FAILED.with_borrow_mut(|failed| failed.insert((words, error)).0.as_ptr()))
}
