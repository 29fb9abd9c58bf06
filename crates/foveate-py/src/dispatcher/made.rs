//! New tensors of a call, by torch: on the device of its query, in the order of the current stream, in memory of
//! torch's allocator.

use std::ptr::null_mut;
use std::sync::Arc;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use super::shim::Shim;
use super::stack::{Tensor, code};
use crate::cuda::memory;
use crate::dlpack::Place;
use crate::dtype::Dtype;
use crate::tensor::{Borrowed, Held, row_major};

/// Makes tensors in one place. The GIL is held where it does.
#[derive(Clone, Copy)]
pub struct Maker<'py> {
    pub py: Python<'py>,
    pub shim: &'static Shim,
    pub place: Place,
}

impl Maker<'_> {
    /// A new tensor of any elements.
    ///
    /// # Errors
    /// When there is no memory: torch's own `OutOfMemoryError` on a device.
    pub fn strided(&self, dtype: Dtype, shape: &[usize], strides: &[usize]) -> PyResult<Tensor> {
        let Self { shim, place, py } = *self;
        let of = |numbers: &[usize]| numbers.iter().map(|&n| n as i64).collect::<Vec<_>>();
        let (sizes, steps) = (of(shape), of(strides));
        // SAFETY: functions that return constants.
        let (device_type, device) = unsafe {
            match place {
                Place::Cpu => ((shim.cpu)(), -1),
                Place::Cuda(device) => ((shim.cuda)(), device as i32),
            }
        };
        let mut handle = null_mut();
        // SAFETY: torch copies sizes and strides, of which there are as many as it is told.
        let status = unsafe {
            (shim.empty_strided)(
                shape.len() as i64,
                sizes.as_ptr(),
                steps.as_ptr(),
                code(shim, dtype),
                device_type,
                device,
                &mut handle,
            )
        };
        if status == 0 {
            // SAFETY: torch made it, for this call.
            return Ok(unsafe { Tensor::new(shim, handle) });
        }
        Err(match place {
            Place::Cuda(device) => {
                let elems = shape.iter().fold(dtype.bytes(), |n, &of| n.saturating_mul(of));
                memory::no_memory(py, device, elems)
            }
            Place::Cpu => PyRuntimeError::new_err(format!(
                "there is no memory for a tensor of shape {shape:?}"
            )),
        })
    }

    /// A new row-major tensor of any elements.
    ///
    /// # Errors
    /// As [`Self::strided`].
    pub fn empty(&self, dtype: Dtype, shape: &[usize]) -> PyResult<Tensor> {
        // As torch makes strides where an axis is empty, too.
        let strides = row_major(&shape.iter().map(|&n| n.max(1)).collect::<Vec<_>>());
        self.strided(dtype, shape, &strides)
    }

    /// A new row-major tensor of zeros.
    ///
    /// # Errors
    /// As [`Self::strided`].
    pub fn zeros(&self, dtype: Dtype, shape: &[usize]) -> PyResult<Tensor> {
        let made = self.empty(dtype, shape)?;
        made.zero()?;
        Ok(made)
    }

    /// A new tensor of `shape` whose axes lie in memory in the order of `like`'s, the last one innermost.
    ///
    /// # Errors
    /// As [`Self::strided`].
    pub fn in_order(&self, like: &Borrowed, shape: &[usize]) -> PyResult<Tensor> {
        // Without elements the order is all there is.
        if like.is_contiguous() && like.elems() > 0 {
            return self.empty(like.dtype, shape);
        }
        let mut order: Vec<usize> = (0..shape.len() - 1).collect();
        order.sort_by_key(|&axis| (std::cmp::Reverse(like.strides[axis]), axis));
        let mut made = vec![1; shape.len()];
        let mut step = shape[shape.len() - 1].max(1);
        for &axis in order.iter().rev() {
            made[axis] = step;
            step *= shape[axis].max(1);
        }
        self.strided(like.dtype, shape, &made)
    }

    /// `tensor`, which is `what` of the call, or where it is of another dtype a row-major copy in this one.
    ///
    /// # Errors
    /// When it is not where the operands are, and as [`Self::strided`].
    pub fn converted(
        &self,
        tensor: &Arc<Tensor>,
        dtype: Dtype,
        what: &str,
    ) -> PyResult<Arc<Tensor>> {
        match tensor.borrowed()?.in_place(self.place, what)?.dtype == dtype {
            true => Ok(tensor.clone()),
            false => Ok(Arc::new(self.copied(tensor, dtype)?)),
        }
    }

    /// A row-major copy of `tensor` in this dtype.
    ///
    /// # Errors
    /// As [`Self::strided`].
    pub fn copied(&self, tensor: &Tensor, dtype: Dtype) -> PyResult<Tensor> {
        let made = self.empty(dtype, &tensor.borrowed()?.shape)?;
        made.copy(tensor)?;
        Ok(made)
    }

    /// `tensor`, which is `what` of the call, as a contiguous one of this dtype where the operands are.
    ///
    /// # Errors
    /// When it is elsewhere, and as [`Self::strided`].
    pub fn dense(&self, tensor: &Arc<Tensor>, dtype: Dtype, what: &str) -> PyResult<Held> {
        let at = tensor.borrowed()?.in_place(self.place, what)?;
        if at.dtype == dtype && at.is_contiguous() {
            return Ok(Held::new(at, tensor.clone()));
        }
        let made = self.copied(tensor, dtype)?;
        Ok(Held::new(made.borrowed()?, Arc::new(made)))
    }
}
