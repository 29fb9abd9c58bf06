//! What torch hands to a kernel, and what a kernel hands back: tensors, lists, strings, numbers.
//!
//! A kernel owns its arguments. [`Arguments`] takes them one after another, in the order of the schema, and
//! whatever was not taken is nobody's: a kernel takes all of them before anything can fail.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::slice;
use std::sync::Arc;

use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::prelude::*;

use super::shim::{Handle, Shim, Value};
use crate::dlpack::Place;
use crate::dtype::Dtype;
use crate::tensor::Borrowed;

/// A tensor that is held.
pub struct Tensor {
    handle: Handle,
    shim: &'static Shim,
}

// SAFETY: torch counts those who hold a tensor atomically, and any thread may let go of it.
unsafe impl Send for Tensor {}
// SAFETY: through a shared reference only sizes and addresses are read, which nobody changes.
unsafe impl Sync for Tensor {}

impl Drop for Tensor {
    fn drop(&mut self) {
        // SAFETY: the handle is owned, and this is its end.
        unsafe { (self.shim.delete_tensor)(self.handle) };
    }
}

impl Tensor {
    /// # Safety
    /// Nobody else owns the handle.
    pub unsafe fn new(shim: &'static Shim, handle: Handle) -> Self {
        Self { handle, shim }
    }

    /// Sets all elements to 0, in the order of the current stream.
    ///
    /// # Errors
    /// When torch refuses.
    pub fn zero(&self) -> PyResult<()> {
        // SAFETY: the handle is owned.
        match unsafe { (self.shim.zero)(self.handle) } {
            0 => Ok(()),
            _ => Err(PyRuntimeError::new_err("PyTorch did not set a tensor to 0")),
        }
    }

    /// Makes the elements those of `from`, of the same shape, converted, in the order of the current stream.
    ///
    /// # Errors
    /// When torch refuses.
    pub fn copy(&self, from: &Self) -> PyResult<()> {
        // SAFETY: both handles are owned.
        match unsafe { (self.shim.copy)(self.handle, from.handle, 0) } {
            0 => Ok(()),
            _ => Err(PyRuntimeError::new_err("PyTorch did not convert a tensor")),
        }
    }

    /// Where its elements lie, while it is held.
    ///
    /// # Errors
    /// When it is neither in host memory nor on a CUDA device, or of a dtype that is not known here.
    pub fn borrowed(&self) -> PyResult<Borrowed> {
        let shim = self.shim;
        let (mut dim, mut sizes, mut strides) = (0i64, std::ptr::null(), std::ptr::null());
        let (mut dtype, mut kind, mut device) = (0i32, 0i32, 0i32);
        let mut address = std::ptr::null();
        // SAFETY: the handle is owned; each function writes to the place that it is given.
        let failed = unsafe {
            (shim.dim)(self.handle, &mut dim)
                | (shim.sizes)(self.handle, &mut sizes)
                | (shim.strides)(self.handle, &mut strides)
                | (shim.dtype)(self.handle, &mut dtype)
                | (shim.device_type)(self.handle, &mut kind)
                | (shim.device_index)(self.handle, &mut device)
        };
        // SAFETY: functions without arguments.
        let place = match unsafe { ((shim.cpu)(), (shim.cuda)()) } {
            (cpu, _) if kind == cpu => Place::Cpu,
            (_, cuda) if kind == cuda => Place::Cuda(device as usize),
            _ => {
                return Err(PyRuntimeError::new_err(
                    "a tensor is on neither a CPU nor a CUDA device",
                ));
            }
        };
        if failed != 0 {
            return Err(PyTypeError::new_err("a tensor says no shape, dtype or device"));
        }
        // SAFETY: as above.
        if unsafe { (shim.const_data)(self.handle, &mut address) } != 0 {
            return Err(PyTypeError::new_err("a tensor has no elements in memory"));
        }
        let axes = |of: *const i64| match dim {
            0 => Vec::new(),
            // SAFETY: torch points to one number for each axis, inside the tensor that is held.
            _ => unsafe { slice::from_raw_parts(of, dim as usize) }
                .iter()
                .map(|&n| n as usize)
                .collect(),
        };
        let dtype = DTYPES.into_iter().find(|&d| code(shim, d) == dtype).ok_or_else(|| {
            PyTypeError::new_err(
                "a tensor has a dtype that neither attention nor a mask or score reads",
            )
        })?;
        Ok(Borrowed {
            place,
            address: address as usize,
            dtype,
            shape: axes(sizes),
            strides: axes(strides),
        })
    }

    /// Where its elements lie, to be written.
    ///
    /// # Errors
    /// As [`Self::borrowed`].
    pub fn written(&self) -> PyResult<Borrowed> {
        let mut address = null_mut();
        // SAFETY: as in `borrowed`.
        if unsafe { (self.shim.mutable_data)(self.handle, &mut address) } != 0 {
            return Err(PyTypeError::new_err("a tensor has no elements in memory"));
        }
        Ok(Borrowed { address: address as usize, ..self.borrowed()? })
    }

    /// The tensor as a value, which whoever reads it owns.
    fn into_value(self) -> Value {
        let handle = self.handle;
        std::mem::forget(self);
        handle as Value
    }
}

const DTYPES: [Dtype; 10] = [
    Dtype::F32,
    Dtype::BF16,
    Dtype::F16,
    Dtype::I64,
    Dtype::I32,
    Dtype::Bool,
    Dtype::U8,
    Dtype::I16,
    Dtype::I8,
    Dtype::F64,
];

/// Torch's number of a dtype.
pub fn code(shim: &Shim, dtype: Dtype) -> i32 {
    let of = match dtype {
        Dtype::F32 => shim.float32,
        Dtype::BF16 => shim.bfloat16,
        Dtype::F16 => shim.float16,
        Dtype::I64 => shim.int64,
        Dtype::I32 => shim.int32,
        Dtype::Bool => shim.boolean,
        Dtype::U8 => shim.uint8,
        Dtype::I16 => shim.int16,
        Dtype::I8 => shim.int8,
        Dtype::F64 => shim.float64,
    };
    // SAFETY: it returns a constant.
    unsafe { of() }
}

/// The arguments of a kernel that are not taken yet.
pub struct Arguments {
    pub shim: &'static Shim,
    next: *const Value,
}

impl Arguments {
    /// # Safety
    /// `stack` points to the arguments of a kernel, which owns them, and they are taken in the order and by
    /// the types of its schema.
    pub unsafe fn new(shim: &'static Shim, stack: *const Value) -> Self {
        Self { shim, next: stack }
    }

    fn value(&mut self) -> Value {
        // SAFETY: the schema has another argument, which is initialised.
        unsafe {
            let value = *self.next;
            self.next = self.next.add(1);
            value
        }
    }

    pub fn tensor(&mut self) -> Arc<Tensor> {
        let handle = self.value() as Handle;
        Arc::new(Tensor { handle, shim: self.shim })
    }

    pub fn float(&mut self) -> f64 {
        f64::from_bits(self.value())
    }

    pub fn boolean(&mut self) -> bool {
        self.value() as u8 != 0
    }

    fn optional(&mut self) -> Option<Value> {
        let place = self.value() as *mut Value;
        // SAFETY: torch keeps the value of an optional argument in a place of its own.
        (!place.is_null()).then(|| unsafe {
            let value = *place;
            self.shim.free(place);
            value
        })
    }

    pub fn optional_tensor(&mut self) -> Option<Arc<Tensor>> {
        let handle = self.optional()? as Handle;
        Some(Arc::new(Tensor { handle, shim: self.shim }))
    }

    pub fn optional_string(&mut self) -> Option<String> {
        let handle = self.optional()? as Handle;
        let (mut length, mut bytes) = (0, std::ptr::null());
        // SAFETY: the string is owned; its bytes are read before it is deleted.
        unsafe {
            (self.shim.string_length)(handle, &mut length);
            (self.shim.string_bytes)(handle, &mut bytes);
            let text = slice::from_raw_parts(bytes.cast(), length);
            let text = String::from_utf8_lossy(text).into_owned();
            (self.shim.delete_string)(handle);
            Some(text)
        }
    }

    fn list<T>(&mut self, of: impl Fn(Value) -> T) -> Vec<T> {
        let handle = self.value() as Handle;
        let mut size = 0;
        // SAFETY: the list is owned, and has so many items, each of which is read once.
        unsafe {
            (self.shim.list_size)(handle, &mut size);
            let items = (0..size).map(|at| {
                let mut item = 0;
                (self.shim.list_item)(handle, at, &mut item);
                of(item)
            });
            let items = items.collect();
            (self.shim.delete_list)(handle);
            items
        }
    }

    pub fn tensors(&mut self) -> Vec<Arc<Tensor>> {
        let shim = self.shim;
        self.list(|item| Arc::new(Tensor { handle: item as *mut c_void, shim }))
    }

    pub fn integers(&mut self) -> Vec<i64> {
        self.list(|item| item as i64)
    }

    pub fn booleans(&mut self) -> Vec<bool> {
        self.list(|item| item as u8 != 0)
    }
}

/// What a kernel leaves on its stack.
pub enum Returned {
    Tensor(Tensor),
    Tensors(Vec<Tensor>),
}

impl Returned {
    /// # Errors
    /// When there is no memory.
    pub fn into_value(self, shim: &Shim) -> PyResult<Value> {
        let tensors = match self {
            Self::Tensor(tensor) => return Ok(tensor.into_value()),
            Self::Tensors(tensors) => tensors,
        };
        let mut list = null_mut();
        // SAFETY: torch writes the list's handle, and takes over what is pushed.
        unsafe {
            if (shim.new_list)(tensors.len(), &mut list) != 0 {
                return Err(PyRuntimeError::new_err("there is no memory for a list"));
            }
            for tensor in tensors {
                (shim.list_push)(list, tensor.into_value());
            }
        }
        Ok(list as Value)
    }
}
