//! Torch's allocator, streams and current device, as Python hands them out.
//!
//! Memory comes from `torch.cuda.caching_allocator_alloc`'s function, so `torch.cuda.memory_allocated`
//! counts it, a graph that is recorded owns what was taken for it, and what there is no memory for is
//! torch's own `OutOfMemoryError`. That exception cannot travel through the engine: it waits in
//! [`RAISED`] until the engine's error is back here.

use std::cell::{Cell, RefCell};

use foveate::cuda::{CudaError, CudaErrorKind};
use foveate::gpu::GpuError;
use foveate::gpu::abi::Address;
use foveate::gpu::driver::Allocator;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

thread_local! {
    /// What torch's allocator raised in the call that this thread makes.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };

    /// Whether torch wants all memory back from each call of this thread.
    static LENT: Cell<bool> = const { Cell::new(false) };
}

/// Lets calls of this thread keep no memory for later ones, or keep it again; returns what was so before.
#[pyfunction]
pub fn keep_nothing(on: bool) -> bool {
    LENT.replace(on)
}

/// Functions of `torch._C`.
struct Functions {
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

// SAFETY: torch gives memory of the current device, which is made this one, in the order of the stream
// that it is told, and takes it back in the same order.
unsafe impl Allocator for TorchAllocator {
    fn allocate(&self, bytes: usize, stream: usize) -> Result<Address, GpuError> {
        let given = Python::attach(|py| -> PyResult<Address> {
            let _current = Current::set(py, self.device)?;
            functions(py)?.allocate.call1(py, (bytes, stream))?.extract(py)
        });
        given.map_err(|error| {
            RAISED.set(Some(error));
            GpuError::argument(format!("PyTorch's allocator gave no memory of {bytes} B"))
        })
    }

    fn lends(&self) -> bool {
        LENT.get()
    }

    unsafe fn free(&self, address: Address, _bytes: usize, _stream: usize) {
        // At the end of the process there is no interpreter, and torch's memory goes with it.
        Python::try_attach(|py| {
            if let Ok(functions) = functions(py) {
                let _ = functions.free.call1(py, (address,));
            }
        });
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
