//! Torch's allocator, streams and current device, as Python hands them out.
//!
//! Memory comes from `torch.cuda.caching_allocator_alloc`'s function, so `torch.cuda.memory_allocated`
//! counts it, a graph that is recorded owns what was taken for it, and what there is no memory for is
//! torch's own `OutOfMemoryError`. That exception cannot travel through the engine: it waits in
//! [`RAISED`] until the engine's error is back here.

use std::cell::{Cell, RefCell};
use std::path::PathBuf;

use foveate::cuda::{CudaError, CudaErrorKind};
use foveate::gpu::GpuError;
use foveate::gpu::abi::Address;
use foveate::gpu::driver::Allocator;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;

thread_local! {
    /// What torch's allocator raised in the call that this thread makes.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };

    /// Whether torch wants all memory back from each call of this thread.
    static LENT: Cell<bool> = const { Cell::new(false) };
}

/// Tells the engine where the packages of this interpreter keep NVIDIA's libraries, once, before there is an
/// engine. The caller holds no lock: Python's code runs.
pub fn start(py: Python<'_>) -> PyResult<()> {
    static TOLD: PyOnceLock<()> = PyOnceLock::new();
    let tell = || {
        let found = py.import("foveate._cuda")?.call_method0("library_folders")?;
        foveate::gpu::loader::look_first_in(found.extract::<Vec<PathBuf>>()?);
        Ok(())
    };
    TOLD.get_or_try_init(py, tell).map(|_| ())
}

/// Functions of `torch._C`, and what Python has imported.
struct Functions {
    modules: Py<PyDict>,
    deterministic: Py<PyAny>,
    allocate: Py<PyAny>,
    free: Py<PyAny>,
    stream: Py<PyAny>,
    device: Py<PyAny>,
    exchange: Py<PyAny>,
}

fn functions(py: Python<'_>) -> PyResult<&'static Functions> {
    static FOUND: PyOnceLock<Functions> = PyOnceLock::new();
    FOUND.get_or_try_init(py, || {
        let c = py.import("torch")?.getattr("_C")?;
        let named = |name: &str| Ok::<_, PyErr>(c.getattr(name)?.unbind());
        Ok(Functions {
            modules: py.import("sys")?.getattr("modules")?.cast_into()?.unbind(),
            deterministic: named("_get_deterministic_algorithms")?,
            allocate: named("_cuda_cudaCachingAllocator_raw_alloc")?,
            free: named("_cuda_cudaCachingAllocator_raw_delete")?,
            stream: named("_cuda_getCurrentRawStream")?,
            device: named("_cuda_getDevice")?,
            exchange: named("_cuda_exchangeDevice")?,
        })
    })
}

/// The handle of torch's current stream of a device.
pub fn current_stream(py: Python<'_>, device: usize) -> PyResult<usize> {
    functions(py)?.stream.call1(py, (device,))?.extract(py)
}

/// Whether torch asks for algorithms that give the same bits in each run.
pub fn deterministic(py: Python<'_>) -> PyResult<bool> {
    functions(py)?.deterministic.call0(py)?.extract(py)
}

/// While it lives, calls of this thread keep no memory for later ones where torch's trees of graphs
/// (`mode="reduce-overhead"`) warm up: they hand out the memory of graphs then, and hold every block that
/// outlives a call for a mistake.
pub struct Lent {
    before: bool,
}

impl Lent {
    pub fn on(py: Python<'_>, device: usize) -> PyResult<Self> {
        Ok(Self { before: LENT.replace(warms_up(py, device)?) })
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        LENT.set(self.before);
    }
}

/// Whether torch's trees of graphs have the current stream.
fn warms_up(py: Python<'_>, device: usize) -> PyResult<bool> {
    let modules = functions(py)?.modules.bind(py);
    let Some(trees) = modules.get_item(intern!(py, "torch._inductor.cudagraph_trees"))? else {
        return Ok(false);
    };
    // With `create_if_none_exists`.
    let manager = trees.call_method1(intern!(py, "get_manager"), (device, false))?;
    if manager.is_none() {
        return Ok(false);
    }
    let stream = manager.getattr(intern!(py, "stream"))?.getattr(intern!(py, "cuda_stream"))?;
    Ok(stream.extract::<usize>()? == current_stream(py, device)?)
}

/// The exception of torch's allocator where it has no memory of `bytes` B on a device, of which torch's stable
/// functions say no type.
pub fn no_memory(py: Python<'_>, device: usize, bytes: usize) -> PyErr {
    let allocator = TorchAllocator { device };
    let stream = current_stream(py, device);
    match stream.and_then(|stream| allocator.take(py, bytes, stream)) {
        Err(error) => error,
        Ok(address) => {
            allocator.give_back(py, address);
            crate::error::runtime(format!("PyTorch made no tensor of {bytes} B on cuda:{device}"))
        }
    }
}

/// A device as torch's current one of this thread; dropped, it leaves the one that it found.
pub struct Current<'py> {
    py: Python<'py>,
    restore: Option<i64>,
}

impl<'py> Current<'py> {
    pub fn set(py: Python<'py>, device: usize) -> PyResult<Self> {
        let functions = functions(py)?;
        let found: i64 = functions.device.call0(py)?.extract(py)?;
        if found == device as i64 {
            return Ok(Self { py, restore: None });
        }
        functions.exchange.call1(py, (device,))?;
        Ok(Self { py, restore: Some(found) })
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if let Some(device) = self.restore
            && let Ok(functions) = functions(self.py)
        {
            // A device that was current can be again; there is nobody to tell otherwise.
            let _ = functions.exchange.call1(self.py, (device,));
        }
    }
}

/// Torch's caching allocator on one device.
#[derive(Debug)]
pub struct TorchAllocator {
    pub device: usize,
}

impl TorchAllocator {
    fn take(&self, py: Python<'_>, bytes: usize, stream: usize) -> PyResult<Address> {
        let _current = Current::set(py, self.device)?;
        functions(py)?.allocate.call1(py, (bytes, stream))?.extract(py)
    }

    fn give_back(&self, py: Python<'_>, address: Address) {
        if let Ok(functions) = functions(py) {
            let _ = functions.free.call1(py, (address,));
        }
    }
}

// SAFETY: torch gives memory of the current device, which is made this one, in the order of the stream
// that it is told, and takes it back in the same order.
unsafe impl Allocator for TorchAllocator {
    fn allocate(&self, bytes: usize, stream: usize) -> Result<Address, GpuError> {
        Python::attach(|py| self.take(py, bytes, stream)).map_err(|error| {
            RAISED.set(Some(error));
            GpuError::argument(format!("PyTorch's allocator gave no memory of {bytes} B"))
        })
    }

    fn lends(&self) -> bool {
        LENT.get()
    }

    unsafe fn free(&self, address: Address, _bytes: usize, _stream: usize) {
        // At the end of the process there is no interpreter, and torch's memory goes with it.
        Python::try_attach(|py| self.give_back(py, address));
    }
}

/// Forgets what an earlier call of this thread raised.
pub fn forget_error() {
    RAISED.set(None);
}

/// An error of a call as an exception: torch's own where its allocator raised one.
pub fn raised(error: CudaError) -> PyErr {
    if let Some(raised) = RAISED.take() {
        return raised;
    }
    match error.kind() {
        CudaErrorKind::Gpu(gpu) => crate::error::runtime(gpu.to_string()),
        CudaErrorKind::OutOfRange { reason } => {
            pyo3::exceptions::PyIndexError::new_err(reason.clone())
        }
        other => pyo3::exceptions::PyValueError::new_err(other.to_string()),
    }
}
