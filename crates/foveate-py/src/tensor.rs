//! Tensors of torch, borrowed for a call.
//!
//! A [`Borrowed`] says where a tensor's elements lie. It is taken from the Python object and
//! used only while that object is held: the functions of this module that make slices of it are
//! unsafe for this reason, and only for tensors in host memory ([`Borrowed::of`]). Torch lets other threads
//! write to a tensor that is being read; whoever does has a race here as in any operation of torch's.

use std::any::Any;
use std::sync::Arc;

use foveate::tensor::{Slice, SliceMut};
use foveate::{Layout, TensorMut, TensorRef};
use half::{bf16, f16};
use pyo3::exceptions::{PyNotImplementedError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;

use crate::dlpack::{self, Described, Place};
use crate::dtype::{Dtype, TorchDtype};
use crate::error::{raised, refused};

/// The strides of a row-major tensor, in elements.
pub fn row_major(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis] * shape[axis];
    }
    strides
}

/// Where the elements of a tensor lie.
#[derive(Clone, Debug)]
pub struct Borrowed {
    pub place: Place,
    pub address: usize,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// In elements.
    pub strides: Vec<usize>,
}

/// A tensor with what keeps its memory. One without axes is a vector of one element.
#[derive(Clone)]
pub struct Held {
    pub at: Borrowed,
    _owner: Arc<dyn Any + Send + Sync>,
}

impl Held {
    /// `owner` keeps the memory where the elements lie.
    pub fn new(mut at: Borrowed, owner: Arc<dyn Any + Send + Sync>) -> Self {
        if at.shape.is_empty() {
            (at.shape, at.strides) = (vec![1], vec![1]);
        }
        Self { at, _owner: owner }
    }

    /// A tensor of Python's on the device of the operands.
    ///
    /// # Errors
    /// As [`Borrowed::on`].
    pub fn on(place: Place, tensor: &Bound<'_, PyAny>, what: &str) -> PyResult<Self> {
        let at = Borrowed::on(place, tensor, what)?;
        Ok(Self::new(at, Arc::new(tensor.clone().unbind())))
    }
}

/// Dtype, shape and place of a tensor, of which there need not be elements.
///
/// # Errors
/// When it is neither in host memory nor on a CUDA device, or of a dtype that is not known here.
pub fn kind(tensor: &Bound<'_, PyAny>) -> PyResult<(Dtype, Vec<usize>, Place)> {
    if let Some(found) = dlpack::described(tensor) {
        return Ok((found.dtype, found.shape, found.place));
    }
    asked_kind(tensor)
}

/// [`kind`], by the tensor's attributes.
fn asked_kind(tensor: &Bound<'_, PyAny>) -> PyResult<(Dtype, Vec<usize>, Place)> {
    let py = tensor.py();
    let place = asked_place(tensor)?;
    let dtype = Dtype::of(&tensor.getattr(intern!(py, "dtype"))?)?;
    Ok((dtype, tensor.getattr(intern!(py, "shape"))?.extract()?, place))
}

/// Where a tensor is, by its attributes.
fn asked_place(tensor: &Bound<'_, PyAny>) -> PyResult<Place> {
    let py = tensor.py();
    if tensor.getattr(intern!(py, "is_cpu"))?.is_truthy()? {
        return Ok(Place::Cpu);
    }
    let device = tensor.getattr(intern!(py, "device"))?;
    if tensor.getattr(intern!(py, "is_cuda"))?.is_truthy()? {
        return Ok(Place::Cuda(device.getattr(intern!(py, "index"))?.extract()?));
    }
    Err(PyNotImplementedError::new_err(format!(
        "a tensor is on {device}; Foveate computes on CPU and CUDA tensors"
    )))
}

impl Borrowed {
    /// Where the elements of `tensor` lie; `None` for what takes a closer look.
    pub fn read(tensor: &Bound<'_, PyAny>) -> Option<Self> {
        let Described { place, address, dtype, shape, strides } = dlpack::described(tensor)?;
        Some(Self { place, address, dtype, shape, strides })
    }

    /// Where the elements of `tensor` lie in host memory.
    ///
    /// # Errors
    /// When it is not a tensor in host memory, or of a dtype that is not known here.
    pub fn of(tensor: &Bound<'_, PyAny>) -> PyResult<Self> {
        let found = Self::anywhere(tensor)?;
        match found.place {
            Place::Cpu => Ok(found),
            device => Err(PyValueError::new_err(format!(
                "a tensor is on {device}, and others on the CPU"
            ))),
        }
    }

    /// Where the elements of `tensor` lie, which is `what` of a call on operands in `place`.
    ///
    /// # Errors
    /// When they lie elsewhere, and those of [`Self::anywhere`].
    pub fn on(place: Place, tensor: &Bound<'_, PyAny>, what: &str) -> PyResult<Self> {
        Self::anywhere(tensor)?.in_place(place, what)
    }

    /// The tensor, which is `what` of a call on operands in `place`.
    ///
    /// # Errors
    /// When it lies elsewhere.
    pub fn in_place(self, place: Place, what: &str) -> PyResult<Self> {
        match self.place == place {
            true => Ok(self),
            false => {
                Err(refused(format!("{what} is on {}, and q, k and v are on {place}", self.place)))
            }
        }
    }

    /// Where the elements of `tensor` lie.
    ///
    /// # Errors
    /// When it is neither in host memory nor on a CUDA device, of a dtype that is not known here, or wraps
    /// the tensors that have its elements.
    pub fn anywhere(tensor: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Some(found) = Self::read(tensor) {
            return Ok(found);
        }
        let py = tensor.py();
        let (dtype, shape, place) = asked_kind(tensor)?;
        let found = Self {
            place,
            dtype,
            shape,
            strides: tensor.call_method0(intern!(py, "stride"))?.extract()?,
            address: tensor.call_method0(intern!(py, "data_ptr"))?.extract()?,
        };
        if found.address == 0 && found.elems() > 0 {
            let class = tensor.get_type().name()?.to_string();
            let why = match class.as_str() {
                "Tensor" | "Parameter" => "its storage was freed",
                _ => "use the tensors that it wraps",
            };
            return Err(PyTypeError::new_err(format!(
                "a `{class}` has no elements in memory: {why}"
            )));
        }
        Ok(found)
    }

    /// Number of elements.
    pub fn elems(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether the elements lie one after the other in row-major order.
    pub fn is_contiguous(&self) -> bool {
        let axes = self.shape.iter().zip(&self.strides).zip(row_major(&self.shape));
        self.elems() == 0
            || axes.into_iter().all(|((&n, &stride), dense)| n == 1 || stride == dense)
    }

    /// Bytes of the elements, each counted as often as it is in the tensor.
    pub fn bytes(&self) -> usize {
        self.elems().saturating_mul(self.dtype.bytes())
    }

    /// The span as bytes.
    ///
    /// # Safety
    /// As for [`Self::elements`].
    pub unsafe fn as_bytes<'a>(&self) -> &'a [u8] {
        match self.span() {
            0 => &[],
            // SAFETY: as in `elements`; every byte of a tensor is initialised.
            n => unsafe {
                std::slice::from_raw_parts(self.address as *const u8, n * self.dtype.bytes())
            },
        }
    }

    fn layout<const N: usize>(&self) -> PyResult<Layout<N>> {
        let fail =
            |_| PyValueError::new_err(format!("a tensor has {} axes, not {N}", self.shape.len()));
        let shape = self.shape.as_slice().try_into().map_err(fail)?;
        Ok(Layout::strided(shape, self.strides.as_slice().try_into().map_err(fail)?, 0))
    }

    /// Elements from the first to the last one, those between rows included.
    pub fn span(&self) -> usize {
        if self.elems() == 0 {
            return 0;
        }
        let steps = self.shape.iter().zip(&self.strides).map(|(n, stride)| (n - 1) * stride);
        steps.sum::<usize>() + 1
    }

    /// The span as elements of `T`.
    ///
    /// # Safety
    /// The tensor is held, and not written to through another slice, while the slice is used; `T`
    /// is its dtype.
    pub unsafe fn elements<'a, T>(&self) -> &'a [T] {
        match self.span() {
            0 => &[],
            // SAFETY: torch gives the address of the first element, aligned for its dtype, and
            // keeps `span` elements from there while the tensor is held.
            n => unsafe { std::slice::from_raw_parts(self.address as *const T, n) },
        }
    }

    /// # Safety
    /// As for [`Self::elements`], and nothing else reads or writes the elements meanwhile.
    pub unsafe fn elements_mut<'a, T>(&self) -> &'a mut [T] {
        match self.span() {
            0 => &mut [],
            // SAFETY: as in `elements`; that nothing else uses them is the caller's promise.
            n => unsafe { std::slice::from_raw_parts_mut(self.address as *mut T, n) },
        }
    }

    /// # Safety
    /// As for [`Self::elements`].
    unsafe fn slice<'a>(&self) -> PyResult<Slice<'a>> {
        use foveate::DType::*;
        // SAFETY: the dtype is the tensor's own; the rest is the caller's promise.
        unsafe {
            Ok(match self.dtype.operand()? {
                F32 => self.elements::<f32>().into(),
                F16 => self.elements::<f16>().into(),
                BF16 => self.elements::<bf16>().into(),
                F8E4M3 => self.elements::<foveate::tensor::F8E4M3>().into(),
                F64 => self.elements::<f64>().into(),
            })
        }
    }

    /// # Safety
    /// As for [`Self::elements_mut`].
    unsafe fn slice_mut<'a>(&self) -> PyResult<SliceMut<'a>> {
        use foveate::DType::*;
        // SAFETY: the dtype is the tensor's own; the rest is the caller's promise.
        unsafe {
            Ok(match self.dtype.operand()? {
                F32 => self.elements_mut::<f32>().into(),
                F16 => self.elements_mut::<f16>().into(),
                BF16 => self.elements_mut::<bf16>().into(),
                F8E4M3 => self.elements_mut::<foveate::tensor::F8E4M3>().into(),
                F64 => self.elements_mut::<f64>().into(),
            })
        }
    }

    /// A view of the tensor, of any strides.
    ///
    /// # Safety
    /// As for [`Self::elements`].
    pub unsafe fn view<'a, const N: usize>(&self) -> PyResult<TensorRef<'a, N>> {
        // SAFETY: the caller's promise.
        TensorRef::new(unsafe { self.slice()? }, self.layout()?).map_err(raised)
    }

    /// A destination of any strides without overlap.
    ///
    /// # Safety
    /// As for [`Self::elements_mut`].
    pub unsafe fn view_mut<'a, const N: usize>(&self) -> PyResult<TensorMut<'a, N>> {
        // SAFETY: the caller's promise.
        TensorMut::new(unsafe { self.slice_mut()? }, self.layout()?).map_err(raised)
    }

    fn is_dense(&self) -> PyResult<()> {
        match self.is_contiguous() {
            true => Ok(()),
            false => Err(PyValueError::new_err("the tensor must be contiguous")),
        }
    }

    /// The elements of a contiguous tensor.
    ///
    /// # Safety
    /// As for [`Self::elements`].
    pub unsafe fn elements_dense<'a>(&self) -> PyResult<Slice<'a>> {
        self.is_dense()?;
        // SAFETY: the caller's promise.
        unsafe { self.slice() }
    }

    /// A contiguous destination.
    ///
    /// # Safety
    /// As for [`Self::elements_mut`].
    pub unsafe fn elements_dense_mut<'a>(&self) -> PyResult<SliceMut<'a>> {
        self.is_dense()?;
        // SAFETY: the caller's promise.
        unsafe { self.slice_mut() }
    }
}
