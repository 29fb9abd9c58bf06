//! Tensors from and for other libraries in the same process, by the DLPack protocol (NumPy,
//! PyTorch, JAX and others speak it), on the CPU. Nothing is copied.
//!
//! A tensor that another library gives stays in its [`Managed`] handle, whose deleter runs once, when
//! the handle is dropped; [`TensorRef::from_dlpack`] and [`TensorMut::from_dlpack`] borrow it. A
//! tensor that is given away is [`Tensor::into_dlpack`]: whoever takes it calls the deleter, which
//! drops the tensor.
//!
//! ```
//! use foveate_tensor::{Tensor, TensorRef};
//!
//! let out = Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [1, 1, 2, 2])?;
//! // Another library takes it as a capsule of this pointer, and gives such capsules.
//! let ours = out.into_dlpack()?;
//! let theirs = ours;
//! // SAFETY: nobody writes the tensor while the view is used.
//! let k = unsafe { TensorRef::from_dlpack(&theirs)? };
//! let k: TensorRef<'_> = k;
//! assert_eq!(k.as_slice::<f32>()?, [1.0, 2.0, 3.0, 4.0]);
//! # Ok::<(), foveate_tensor::TensorError>(())
//! ```

use dlpark::ffi::{DLDataType, DLDevice, DLManagedTensorVersioned};
use dlpark::metadata::Fixed;
pub use dlpark::{DlpackFlags, Managed, ManagedTensorBase, legacy, versioned};
use half::{bf16, f16};

use crate::dtype::DType;
use crate::error::{TensorError, TensorErrorKind};
use crate::layout::Layout;
use crate::slice::{Slice, SliceMut};
use crate::view::{Tensor, TensorMut, TensorRef};

impl<'a, const N: usize> TensorRef<'a, N> {
    /// A view of a tensor of another library.
    ///
    /// # Safety
    /// The memory from the tensor's first to its last element, those between that belong to other
    /// views included, holds initialised elements, and nobody writes it during `'a`.
    ///
    /// # Errors
    /// When the tensor is not on the CPU, has not `N` axes, is of a dtype that tensors here do not
    /// have, has a negative stride, or does not lie at a multiple of its elements' size.
    pub unsafe fn from_dlpack<M: ManagedTensorBase>(
        tensor: &'a Managed<M>,
    ) -> Result<Self, TensorError> {
        let tensor = tensor.validate().map_err(foreign)?;
        let Found { layout, dtype, start, len } = Found::of(&tensor)?;
        // SAFETY: the caller's promise; `start` is aligned and not null, which `Found` checks.
        let data = unsafe {
            match dtype {
                DType::F32 => Slice::F32(std::slice::from_raw_parts(start.cast(), len)),
                DType::F16 => Slice::F16(std::slice::from_raw_parts(start.cast::<f16>(), len)),
                DType::BF16 => Slice::BF16(std::slice::from_raw_parts(start.cast::<bf16>(), len)),
                DType::F8E4M3 => Slice::F8E4M3(std::slice::from_raw_parts(start.cast(), len)),
                DType::F64 => Slice::F64(std::slice::from_raw_parts(start.cast(), len)),
            }
        };
        Self::new(data, layout)
    }
}

impl<'a, const N: usize> TensorMut<'a, N> {
    /// A tensor of another library as a destination.
    ///
    /// # Safety
    /// The memory from the tensor's first to its last element, those between that belong to other
    /// views included, holds initialised elements, and nobody else reads or writes it during `'a`.
    ///
    /// # Errors
    /// Those of [`TensorRef::from_dlpack`], a tensor that is read-only, or one that would be written
    /// twice at some element.
    pub unsafe fn from_dlpack<M: ManagedTensorBase>(
        tensor: &'a mut Managed<M>,
    ) -> Result<Self, TensorError> {
        if tensor.flags().contains(DlpackFlags::READ_ONLY) {
            return Err(refused("it is read-only; a destination has to be writable"));
        }
        let tensor = tensor.validate().map_err(foreign)?;
        let Found { layout, dtype, start, len } = Found::of(&tensor)?;
        let start = start.cast_mut();
        // SAFETY: the caller's promise; `start` is aligned and not null, which `Found` checks.
        let data = unsafe {
            match dtype {
                DType::F32 => SliceMut::F32(std::slice::from_raw_parts_mut(start.cast(), len)),
                DType::F16 => SliceMut::F16(std::slice::from_raw_parts_mut(start.cast(), len)),
                DType::BF16 => SliceMut::BF16(std::slice::from_raw_parts_mut(start.cast(), len)),
                DType::F8E4M3 => {
                    SliceMut::F8E4M3(std::slice::from_raw_parts_mut(start.cast(), len))
                }
                DType::F64 => SliceMut::F64(std::slice::from_raw_parts_mut(start.cast(), len)),
            }
        };
        Self::new(data, layout)
    }
}

impl<const N: usize> Tensor<N> {
    /// The tensor for another library, which drops it when it has done with it. Nothing is copied.
    ///
    /// # Errors
    /// When one of its axes comes in groups, which strides cannot say ([`crate::GroupedAxis`]).
    pub fn into_dlpack(self) -> Result<versioned::Dlpack, TensorError> {
        let layout = *self.layout();
        if layout.groups.is_some() {
            return Err(refused(
                "its heads come in groups; `Tensor::from_vec(t.to_vec(), ..)` does not",
            ));
        }
        let (dtype, bytes) = (declared(self.dtype()), self.dtype().bytes());
        let data = match self.view().data() {
            Slice::F32(v) => v.as_ptr().cast(),
            Slice::F16(v) => v.as_ptr().cast(),
            Slice::BF16(v) => v.as_ptr().cast(),
            Slice::F8E4M3(v) => v.as_ptr().cast(),
            Slice::F64(v) => v.as_ptr().cast::<std::ffi::c_void>(),
        };
        let described = Fixed::new(layout.shape, layout.strides);
        // The elements are on the heap and stay where they are when the tensor moves into its box.
        let mut made =
            described.initialize_as::<DLManagedTensorVersioned>(Box::new(self)).map_err(foreign)?;
        made.set_data(data.cast_mut()).set_dtype(dtype).set_device(DLDevice::CPU);
        made.set_byte_offset((layout.offset * bytes) as u64);
        // SAFETY: data, shape and strides are those of the tensor, which lives until the deleter
        // drops it; it is given away, so nothing else refers to its elements.
        Ok(unsafe { made.finish() })
    }
}

/// What a foreign tensor is here: `len` elements at `start`, seen through `layout`.
struct Found<const N: usize> {
    layout: Layout<N>,
    dtype: DType,
    start: *const u8,
    len: usize,
}

impl<const N: usize> Found<N> {
    fn of(tensor: &dlpark::TensorRef<'_>) -> Result<Self, TensorError> {
        if tensor.device().device_type != DLDevice::CPU.device_type {
            return Err(refused("it is not in the memory of the CPU; copy it there first"));
        }
        let all = [DType::F32, DType::F16, DType::BF16, DType::F8E4M3, DType::F64];
        let dtype = all.into_iter().find(|&dtype| declared(dtype).matches(tensor.dtype()));
        let Some(dtype) = dtype else {
            return Err(refused("its elements are none of f32, f16, bf16, f8e4m3 and f64"));
        };
        let lengths = |of: &[i64]| -> Option<[usize; N]> {
            let lengths: Vec<usize> =
                of.iter().map(|&n| n.try_into().ok()).collect::<Option<_>>()?;
            lengths.try_into().ok()
        };
        let Some(shape) = lengths(tensor.shape()) else {
            let axes = tensor.shape();
            return Err(refused(format!("its shape is {axes:?}; {N} axes are expected")));
        };
        let strides = tensor.strides_or_compact().map_err(foreign)?;
        let Some(strides) = lengths(&strides) else {
            let reason = format!("its strides are {strides:?}; a reversed view has to be copied");
            return Err(refused(reason));
        };
        let layout = Layout::strided(shape, strides, 0);
        let Some(len) = layout.end() else {
            return Err(refused("it reaches past the end of the address space"));
        };
        if len == 0 {
            // An empty tensor may have no memory at all.
            let start = std::ptr::NonNull::<f64>::dangling().as_ptr().cast_const().cast();
            return Ok(Self { layout, dtype, start, len });
        }
        let offset = usize::try_from(tensor.byte_offset()).unwrap_or(usize::MAX);
        let start = tensor.data_ptr().cast::<u8>();
        if start.is_null() || (start as usize).wrapping_add(offset) % dtype.bytes() != 0 {
            return Err(refused(format!(
                "it does not lie at a multiple of {} bytes",
                dtype.bytes()
            )));
        }
        Ok(Self { layout, dtype, start: start.wrapping_add(offset), len })
    }
}

fn declared(dtype: DType) -> DLDataType {
    match dtype {
        DType::F32 => DLDataType::F32,
        DType::F16 => DLDataType::F16,
        DType::BF16 => DLDataType::BF16,
        DType::F8E4M3 => DLDataType::F8E4M3FN,
        DType::F64 => DLDataType::F64,
    }
}

fn refused(reason: impl Into<String>) -> TensorError {
    TensorErrorKind::Foreign { reason: reason.into() }.into()
}

fn foreign(error: impl std::fmt::Display) -> TensorError {
    refused(error.to_string())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// A tensor of another library, whose deleter counts: `elems` seen through shape and strides.
    fn given<const N: usize>(
        elems: Vec<f32>,
        shape: [i64; N],
        strides: [i64; N],
        flags: DlpackFlags,
    ) -> (versioned::Dlpack, Arc<AtomicUsize>) {
        struct Context(Vec<f32>, Arc<AtomicUsize>);
        impl Drop for Context {
            fn drop(&mut self) {
                self.1.fetch_add(1, Ordering::Relaxed);
            }
        }
        let dropped = Arc::new(AtomicUsize::new(0));
        let mut context = Box::new(Context(elems, dropped.clone()));
        let data = context.0.as_mut_ptr().cast();
        let mut made = Fixed::new(shape, strides).initialize(context).unwrap();
        made.set_data(data).set_dtype(DLDataType::F32).set_device(DLDevice::CPU);
        made.set_flags(flags).unwrap();
        // SAFETY: the data are the context's, which the deleter drops.
        (unsafe { made.finish() }, dropped)
    }

    #[test]
    fn a_foreign_tensor_is_read_and_written_in_place_and_deleted_once() {
        let elems = (0..6).map(|i| i as f32).collect();
        // Transposed: [3, 2] of [2, 3].
        let (mut tensor, dropped) = given(elems, [3, 2], [1, 3], DlpackFlags::empty());
        {
            // SAFETY: nobody else knows the tensor.
            let view = unsafe { TensorRef::<2>::from_dlpack(&tensor) }.unwrap();
            assert_eq!(view.to_vec::<f32>(), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
        }
        {
            // SAFETY: nobody else knows the tensor.
            let mut to = unsafe { TensorMut::<2>::from_dlpack(&mut tensor) }.unwrap();
            to.write([2, 1], 9.0);
        }
        // SAFETY: nobody else knows the tensor.
        let view = unsafe { TensorRef::<2>::from_dlpack(&tensor) }.unwrap();
        assert_eq!(view.to_vec::<f32>()[5], 9.0);
        assert_eq!(dropped.load(Ordering::Relaxed), 0);
        drop(tensor);
        assert_eq!(dropped.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_tensor_given_away_is_the_same_memory_and_dropped_by_its_taker() {
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::F8E4M3, DType::F64] {
            let tensor = Tensor::from_fn(dtype, [2, 3], |[i, j]| (3 * i + j) as f64);
            let row = tensor.layout().narrowed(0, 1, 1).unwrap();
            let tensor = Tensor::new(tensor.data().clone(), row).unwrap();
            let place = match tensor.view().data() {
                Slice::F32(v) => v.as_ptr() as usize,
                Slice::F16(v) => v.as_ptr() as usize,
                Slice::BF16(v) => v.as_ptr() as usize,
                Slice::F8E4M3(v) => v.as_ptr() as usize,
                Slice::F64(v) => v.as_ptr() as usize,
            };
            let given = tensor.into_dlpack().unwrap();
            assert_eq!(given.validate_export().unwrap().data_ptr() as usize, place);
            // Through a raw pointer, as a capsule carries it.
            // SAFETY: the pointer is the one that was just given up.
            let taken = unsafe { versioned::Dlpack::from_raw(given.into_raw()) }.unwrap();
            // SAFETY: nobody else knows the tensor.
            let view = unsafe { TensorRef::<2>::from_dlpack(&taken) }.unwrap();
            assert_eq!((view.dtype(), view.to_vec::<f64>()), (dtype, vec![3.0, 4.0, 5.0]));
        }
    }

    #[test]
    fn a_foreign_tensor_that_cannot_be_a_view_is_refused_with_the_reason() {
        let said = |tensor: &versioned::Dlpack| {
            // SAFETY: nobody else knows the tensor.
            unsafe { TensorRef::<2>::from_dlpack(tensor) }.unwrap_err().to_string()
        };
        let plain = DlpackFlags::empty();
        let (three, _) = given(vec![0.0; 6], [1, 2, 3], [6, 3, 1], plain);
        assert!(said(&three).ends_with("its shape is [1, 2, 3]; 2 axes are expected"));
        let (reversed, _) = given(vec![0.0; 6], [2, 3], [3, -1], plain);
        assert!(said(&reversed).contains("a reversed view has to be copied"));
        let (mut fixed, _) = given(vec![0.0; 6], [2, 3], [3, 1], DlpackFlags::READ_ONLY);
        // SAFETY: nobody else knows the tensor.
        let refused = unsafe { TensorMut::<2>::from_dlpack(&mut fixed) }.unwrap_err();
        assert!(refused.to_string().contains("read-only"), "{refused}");
        let (mut shared, _) = given(vec![0.0; 3], [2, 3], [0, 1], plain);
        // SAFETY: nobody else knows the tensor.
        let refused = unsafe { TensorMut::<2>::from_dlpack(&mut shared) }.unwrap_err();
        assert!(refused.to_string().contains("would write some elements twice"), "{refused}");
        let (empty, _) = given(Vec::new(), [0, 3], [3, 1], plain);
        // SAFETY: nobody else knows the tensor.
        assert!(unsafe { TensorRef::<2>::from_dlpack(&empty) }.unwrap().to_vec::<f32>().is_empty());
    }
}
