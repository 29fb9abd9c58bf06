//! Arrays of the crate `ndarray` as tensors, and tensors as its views. Nothing is copied.
//!
//! A view of an array must be dense: its elements fill a piece of memory, in whatever order of axes.
//! The gaps of other views may be borrowed by somebody else; give the whole array and narrow its
//! layout ([`Layout::narrowed`]), or copy (`to_owned`).
//!
//! ```
//! use foveate_tensor::{Tensor, TensorRef};
//! use ndarray::Array4;
//!
//! let array = Array4::from_shape_fn([1, 2, 3, 4], |(_, h, s, d)| (h + s * d) as f32);
//! let view = TensorRef::<4>::try_from(array.view())?;
//! assert_eq!(view.shape(), [1, 2, 3, 4]);
//! let q = Tensor::try_from(array)?;
//! let out: Tensor = q;
//! let array = out.view().to_ndarray::<f32>()?;
//! assert_eq!(array[[0, 1, 2, 3]], 7.0);
//! # Ok::<(), foveate_tensor::TensorError>(())
//! ```

use ndarray::{Array, ArrayView, ArrayViewMut, Dim, Dimension, IntoDimension, ShapeBuilder};

use crate::dtype::Data;
use crate::error::{TensorError, TensorErrorKind};
use crate::float::Float;
use crate::layout::Layout;
use crate::slice::{Slice, SliceMut};
use crate::view::{Tensor, TensorMut, TensorRef};

impl<'a, T: Float, D: Dimension, const N: usize> TryFrom<ArrayView<'a, T, D>> for TensorRef<'a, N>
where
    Slice<'a>: From<&'a [T]>,
{
    type Error = TensorError;

    fn try_from(array: ArrayView<'a, T, D>) -> Result<Self, TensorError> {
        let layout = layout(array.shape(), array.strides())?;
        let elems = array.to_slice_memory_order().ok_or_else(|| gaps(&layout))?;
        Self::new(elems, layout)
    }
}

impl<'a, T: Float, D: Dimension, const N: usize> TryFrom<ArrayViewMut<'a, T, D>>
    for TensorMut<'a, N>
where
    SliceMut<'a>: From<&'a mut [T]>,
{
    type Error = TensorError;

    fn try_from(array: ArrayViewMut<'a, T, D>) -> Result<Self, TensorError> {
        let layout = layout(array.shape(), array.strides())?;
        let elems = array.into_slice_memory_order().ok_or_else(|| gaps(&layout))?;
        Self::new(elems, layout)
    }
}

impl<T: Float, D: Dimension, const N: usize> TryFrom<Array<T, D>> for Tensor<N>
where
    Data: From<Vec<T>>,
{
    type Error = TensorError;

    fn try_from(array: Array<T, D>) -> Result<Self, TensorError> {
        let mut layout = layout(array.shape(), array.strides())?;
        let (elems, offset) = array.into_raw_vec_and_offset();
        layout.offset = offset.unwrap_or(0);
        Self::new(elems, layout)
    }
}

impl<'a, const N: usize> TensorRef<'a, N> {
    /// The view as one of `ndarray`.
    ///
    /// # Errors
    /// When the elements are of another type than `T`, or an axis comes in groups
    /// ([`crate::GroupedAxis`]), which strides cannot say.
    pub fn to_ndarray<T: Float>(&self) -> Result<ArrayView<'a, T, Dim<[usize; N]>>, TensorError>
    where
        Dim<[usize; N]>: Dimension,
        [usize; N]: IntoDimension<Dim = Dim<[usize; N]>>,
    {
        let elems = T::of(self.data())
            .ok_or_else(|| TensorErrorKind::DType { found: self.dtype(), asked: T::DTYPE })?;
        let Layout { shape, strides, offset, groups } = *self.layout();
        if groups.is_some() {
            return Err(refused("its heads come in groups; copy it with `to_vec`"));
        }
        let shape = shape.into_dimension().strides(strides.into_dimension());
        ArrayView::from_shape(shape, &elems[offset.min(elems.len())..])
            .map_err(|e| refused(e.to_string()))
    }
}

fn layout<const N: usize>(shape: &[usize], strides: &[isize]) -> Result<Layout<N>, TensorError> {
    let Ok(shape) = <[usize; N]>::try_from(shape) else {
        return Err(refused(format!("its shape is {shape:?}; {N} axes are expected")));
    };
    // Strides of axes of length 1 mean nothing, and those of empty arrays neither.
    let idle = |axis: usize| shape[axis] == 1 || shape.contains(&0);
    let mut positive = [0; N];
    for (axis, to) in positive.iter_mut().enumerate() {
        *to = match usize::try_from(strides[axis]) {
            Ok(stride) => stride,
            Err(_) if idle(axis) => 0,
            Err(_) => {
                let reason =
                    format!("its strides are {strides:?}; a reversed view has to be copied");
                return Err(refused(reason));
            }
        };
    }
    Ok(Layout::strided(shape, positive, 0))
}

fn gaps<const N: usize>(layout: &Layout<N>) -> TensorError {
    refused(format!(
        "there are gaps between its elements (shape {:?}, strides {:?}); give the whole array and \
         narrow its layout, or copy it with `to_owned`",
        layout.shape, layout.strides
    ))
}

fn refused(reason: impl Into<String>) -> TensorError {
    TensorErrorKind::Foreign { reason: reason.into() }.into()
}

#[cfg(test)]
mod tests {
    use ndarray::{Array2, Array3, Array4, ArrayView2, arr2, s};

    use super::*;

    #[test]
    fn arrays_go_in_and_views_come_out_in_any_order_of_axes() {
        let array = Array4::from_shape_fn((1, 3, 2, 4), |(b, s, h, d)| {
            (b + 10 * s + 100 * h + 1000 * d) as f32
        });
        // [batch, length, heads, dim] as [batch, heads, length, dim].
        let permuted = array.view().permuted_axes([0, 2, 1, 3]);
        let view = TensorRef::<4>::try_from(permuted).unwrap();
        assert_eq!(view.get_f64([0, 1, 2, 3]), 3120.0);
        assert_eq!(view.to_ndarray::<f32>().unwrap(), permuted);
        assert!(view.to_ndarray::<f64>().is_err());

        let place = array.as_ptr();
        let tensor = Tensor::<4>::try_from(array.permuted_axes([0, 2, 1, 3])).unwrap();
        assert_eq!(tensor.view().get_f64([0, 1, 2, 3]), 3120.0);
        assert_eq!(tensor.view().to_ndarray::<f32>().unwrap().as_ptr(), place);

        let mut out = Array3::<f64>::from_elem((1, 2, 3), f64::NAN);
        let mut to = TensorMut::<3>::try_from(out.view_mut().reversed_axes()).unwrap();
        to.write([2, 1, 0], 7.0);
        assert_eq!(out[[0, 1, 2]], 7.0);
    }

    #[test]
    fn an_array_that_cannot_be_a_view_is_refused_with_the_reason() {
        let array = arr2(&[[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]]);
        let said =
            |view: ArrayView2<'_, f32>| TensorRef::<2>::try_from(view).unwrap_err().to_string();
        assert!(said(array.slice(s![.., ..;-1])).contains("a reversed view has to be copied"));
        assert!(said(array.slice(s![.., ..2])).contains("gaps between its elements"));
        let flat = TensorRef::<3>::try_from(array.view()).unwrap_err().to_string();
        assert!(flat.contains("its shape is [2, 3]; 3 axes are expected"), "{flat}");
        let cut = Tensor::<2>::try_from(array.slice_move(s![1.., ..])).unwrap();
        assert_eq!(cut.to_vec::<f32>(), [4.0, 5.0, 6.0]);
        let empty = Tensor::<2>::try_from(Array2::<f32>::zeros((0, 3))).unwrap();
        assert!(empty.to_vec::<f32>().is_empty());
    }
}
