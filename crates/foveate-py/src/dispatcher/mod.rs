//! The package's operators, which torch's dispatcher calls without Python, on CPU and CUDA tensors.
//!
//! Their schemas and kernels are registered here, through torch's stable C functions ([`shim`]), by
//! [`register_operators`]; `python/foveate/_ops.py` calls it and registers what these functions have no way to
//! say: shapes of results, and rules of vmap. Arguments and results travel as [`stack`] says, and [`made`] makes
//! tensors; [`kernels`] are the operators, [`mods`] their programs, [`layout`] where keys lie.
//!
//! **Python.** A kernel holds the GIL while it plans, as torch's allocator, current stream and device and the
//! settings that count are asked for through `torch._C` (`cuda::memory`), and not while it computes.
//!
//! **Errors.** Torch's stable functions give a kernel no way to say one: C++ extensions throw. Here nothing
//! of Rust unwinds into torch. A kernel catches its panics, puts its exception by for the thread, and as
//! the last thing it does throws C++'s `std::runtime_error` with the same words, of which torch makes a
//! `RuntimeError`. Whoever calls the operator from Python has the exception itself by [`kernel_error`].

mod kernels;
mod layout;
mod made;
mod mods;
mod shim;
pub mod stack;

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::exceptions::{PyImportError, PyRuntimeError};
use pyo3::prelude::*;

use crate::cuda::memory;
use crate::dlpack::Place;
use crate::threads;
use kernels::{Backward, Forward, Task};
use layout::Layout;
use made::Maker;
use shim::{Shim, Value};
use stack::{Arguments, Returned};

/// The functions that kernels call, there before torch may call a kernel.
static SHIM: OnceLock<Shim> = OnceLock::new();

/// How many kernels have been called.
static CALLS: AtomicU64 = AtomicU64::new(0);

/// What a kernel says after Python's end.
const GONE: &CStr = c"Foveate's operators need the Python interpreter, which has ended";

/// What [`register_operators`] found when it had registered them.
static REGISTERED: OnceLock<bool> = OnceLock::new();

thread_local! {
    /// What the last kernel of this thread failed with, and its words.
    static FAILED: RefCell<Option<(CString, PyErr)>> = const { RefCell::new(None) };
}

/// Each operator's name, the parts of its schema, and its kernel: a call of this type on keys that lie so.
macro_rules! operators {
    ($($name:ident $kernel:ty, $layout:ident: $($part:expr),*;)*) => {
        const OPERATORS: &[(&str, &[&str], shim::Kernel)] = &[$((
            stringify!($name),
            &[stringify!($name), $($part),*],
            {
                extern "C-unwind" fn run(stack: *mut Value, _: u64, _: u64) {
                    // SAFETY: torch calls it as `Kernel` says, on arguments of this operator.
                    unsafe { serve::<$kernel>(stack, Layout::$layout) }
                }
                run
            },
        )),*];
    };
}

const QKV: &str = "(Tensor query, Tensor key, Tensor value, ";
const MODS: &str = "str? score, Tensor[] score_captures, SymInt[] score_scalars, \
    str? mask, Tensor[] mask_captures, SymInt[] mask_scalars, Tensor[] lists, SymInt[] tile, \
    float scale, Tensor? seed, float dropout_p, ";
const RESULTS: &str = "bool max_scores) -> (Tensor out, Tensor lse, Tensor max_scores)";
const OF_FORWARD: &str = "Tensor out, Tensor lse, Tensor? d_out, Tensor? d_lse, ";
const GRADIENTS: &str = "bool[3] needs, int[] learned) -> \
    (Tensor dq, Tensor dk, Tensor dv, Tensor[] d_captures)";
const OFFSETS: &str = "Tensor cu_q, Tensor cu_k, ";

operators! {
    forward Forward, Dense: QKV, MODS, RESULTS;
    backward Backward, Dense: QKV, OF_FORWARD, MODS, GRADIENTS;
    varlen_forward Forward, Sequences: QKV, OFFSETS, MODS, RESULTS;
    varlen_backward Backward, Sequences: QKV, OFFSETS, OF_FORWARD, MODS, GRADIENTS;
    paged Forward, Pages:
        "(Tensor query, Tensor key_pages, Tensor value_pages, Tensor page_table, Tensor lengths, ", MODS, RESULTS;
}

/// Defines the operators and registers their kernels with the libtorch at `path`, which the process has loaded;
/// whether they have the tag that says that torch may compile them. Once they are registered, it only says that.
///
/// # Errors
/// `ImportError`: torch lacks what this takes, or refuses it; then nothing is registered.
#[pyfunction]
pub fn register_operators(path: PathBuf) -> PyResult<bool> {
    if let Some(&tagged) = REGISTERED.get() {
        return Ok(tagged);
    }
    let refused = |reason| {
        PyImportError::new_err(format!("foveate's operators need another PyTorch: {reason}"))
    };
    let shim = match SHIM.get() {
        Some(shim) => shim,
        None => {
            let shim = Shim::find(&path).map_err(refused)?;
            SHIM.get_or_init(|| shim)
        }
    };
    let owned = |text: String| CString::new(text).expect("schemas have no 0");
    let said = OPERATORS
        .iter()
        .map(|(name, schema, kernel)| (owned((*name).into()), owned(schema.concat()), *kernel));
    let said: Vec<_> = said.collect();
    let operators: Vec<_> = said.iter().map(|(n, s, k)| (n.as_c_str(), s.as_c_str(), *k)).collect();
    let tagged = shim.register(&[c"CPU", c"CUDA"], &operators).map_err(refused)?;
    Ok(*REGISTERED.get_or_init(|| tagged))
}

/// The functions of torch's that [`register_operators`] looks for.
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
        let results = Python::try_attach(|py| {
            let place = task.query().borrowed()?.place;
            let _lent = match place {
                Place::Cpu => None,
                Place::Cuda(device) => Some(memory::Lent::on(py, device)?),
            };
            task.run(Maker { py, shim, place })
        });
        let results =
            results.unwrap_or_else(|| Err(PyRuntimeError::new_err(GONE.to_string_lossy())))?;
        let values = results.into_iter().map(|of| Returned::into_value(of, shim));
        for (at, value) in values.collect::<PyResult<Vec<_>>>()?.into_iter().enumerate() {
            // SAFETY: there is place for the results, and the arguments are taken.
            unsafe { *stack.add(at) = value };
        }
        Ok(())
    };
    let Err(error) = threads::caught(run).flatten() else { return None };
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
