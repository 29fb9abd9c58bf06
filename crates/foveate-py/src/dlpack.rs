//! Where a tensor's elements lie, by torch's table of C functions.
//!
//! DLPack 1.3 lets a class of tensors carry such a table, in a capsule at `__dlpack_c_exchange_api__`.
//! One call of it answers what takes five attributes of Python, in a twentieth of their time. A torch
//! without the table, another object than a tensor, and whatever the table refuses are asked for their
//! attributes instead, which say what is wrong.

use std::ffi::{c_int, c_void};
use std::{fmt, ptr, slice};

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::{ffi, intern};

use crate::dtype::Dtype;

/// The first members of `DLTensor`, which is the whole of it.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// Describes a tensor that the caller holds; 0 if it could, otherwise an exception is set.
type Describe = unsafe extern "C" fn(tensor: *mut c_void, into: *mut DlTensor) -> c_int;

/// `DLPackExchangeAPI`, up to what is called here. Versions of one major number add members at its end.
#[repr(C)]
struct Table {
    major: u32,
    _minor: u32,
    _before: *const c_void,
    _allocate: *const c_void,
    _owned_from_object: *const c_void,
    _object_from_owned: *const c_void,
    describe: Option<Describe>,
}

const MAJOR: u32 = 1;
const CPU: i32 = 1;
const CUDA: i32 = 2;

/// Where a tensor's elements are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Cpu,
    /// The CUDA device of this index.
    Cuda(usize),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(device) => write!(f, "cuda:{device}"),
        }
    }
}

/// The function of torch's table, if this torch has one.
fn describe(py: Python<'_>) -> Option<Describe> {
    static FOUND: PyOnceLock<Option<Describe>> = PyOnceLock::new();
    let find = || -> PyResult<Option<Describe>> {
        let class = py.import("torch")?.getattr("Tensor")?;
        let capsule = class.getattr(intern!(py, "__dlpack_c_exchange_api__"))?;
        // SAFETY: the capsule is held; one of another name gives null and an exception.
        let table =
            unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), c"dlpack_exchange_api".as_ptr()) };
        if table.is_null() {
            return Err(PyErr::fetch(py));
        }
        // SAFETY: a capsule of this name points to a table that lives as long as the process, and begins
        // with its version; members before those of this major version are where they are here.
        let table = unsafe { &*table.cast::<Table>() };
        Ok(if table.major == MAJOR { table.describe } else { None })
    };
    *FOUND.get_or_init(py, || find().unwrap_or(None))
}

/// What torch says of a tensor.
pub struct Described {
    pub place: Place,
    pub address: usize,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// In elements.
    pub strides: Vec<usize>,
}

/// What torch says of a tensor in host memory or on a CUDA device; `None` for everything else.
pub fn described(tensor: &Bound<'_, PyAny>) -> Option<Described> {
    let describe = describe(tensor.py())?;
    let mut found = DlTensor {
        data: ptr::null_mut(),
        device_type: 0,
        device_id: 0,
        ndim: 0,
        code: 0,
        bits: 0,
        lanes: 0,
        shape: ptr::null(),
        strides: ptr::null(),
        byte_offset: 0,
    };
    // SAFETY: the function is of the class's own table, the object is held and this thread has the GIL.
    if unsafe { describe(tensor.as_ptr().cast(), &mut found) } != 0 {
        drop(PyErr::take(tensor.py()));
        return None;
    }
    let dtype = match (found.code, found.bits) {
        (0, 8) => Dtype::I8,
        (0, 16) => Dtype::I16,
        (0, 32) => Dtype::I32,
        (0, 64) => Dtype::I64,
        (1, 8) => Dtype::U8,
        (2, 16) => Dtype::F16,
        (2, 32) => Dtype::F32,
        (2, 64) => Dtype::F64,
        (4, 16) => Dtype::BF16,
        (6, 8) => Dtype::Bool,
        _ => return None,
    };
    let ndim = usize::try_from(found.ndim).ok()?;
    let axes = |of: *const i64| -> Option<Vec<usize>> {
        if ndim == 0 || of.is_null() {
            return (ndim == 0).then(Vec::new);
        }
        // SAFETY: torch points to `ndim` sizes and strides inside the tensor, which is held.
        let numbers = unsafe { slice::from_raw_parts(of, ndim) };
        numbers.iter().map(|&n| n.try_into().ok()).collect()
    };
    let place = match found.device_type {
        CPU => Place::Cpu,
        CUDA => Place::Cuda(found.device_id.try_into().ok()?),
        _ => return None,
    };
    let made = Described {
        place,
        address: found.data as usize + usize::try_from(found.byte_offset).ok()?,
        dtype,
        shape: axes(found.shape)?,
        strides: axes(found.strides)?,
    };
    (found.lanes == 1 && (!found.data.is_null() || made.shape.contains(&0))).then_some(made)
}
