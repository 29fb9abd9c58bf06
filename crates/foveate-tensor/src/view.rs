//! Borrowed and owned tensors.
//!
//! A [`TensorMut`] is a destination: it can be written from several threads and several
//! destinations can lie interleaved in one buffer (dq, dk and dv of one packed projection), so
//! it holds a pointer rather than a slice. Its invariants, checked when it is made: every
//! element lies inside the borrowed storage, no two elements of one view share memory.

use std::marker::PhantomData;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::dtype::{DType, Data};
use crate::error::{TensorError, TensorErrorKind};
use crate::f8::F8E4M3;
use crate::float::Float;
use crate::layout::{Layout, indices};
use crate::round;
use crate::slice::{Slice, SliceMut};

/// A read-only view. `N` is 4 for operands, 3 for statistics.
#[derive(Clone, Copy, Debug)]
pub struct TensorRef<'a, const N: usize = 4> {
    data: Slice<'a>,
    layout: Layout<N>,
}

impl<'a, const N: usize> TensorRef<'a, N> {
    /// A view of `data`: a slice or vector of one of the dtypes, or [`Data`].
    ///
    /// # Errors
    /// When the layout reaches past the storage.
    pub fn new(data: impl Into<Slice<'a>>, layout: Layout<N>) -> Result<Self, TensorError> {
        let data = data.into();
        layout.check(data.len())?;
        Ok(Self { data, layout })
    }

    /// A view of all of `data`, row-major: the last axis of `shape` is the fastest.
    ///
    /// # Errors
    /// When `data` has not as many elements as the shape.
    pub fn from_slice(data: impl Into<Slice<'a>>, shape: [usize; N]) -> Result<Self, TensorError> {
        let data = data.into();
        Self::new(data, Layout::of_all(data.len(), shape)?)
    }

    /// The elements where they lie, in row-major order of the shape.
    ///
    /// # Errors
    /// When they are of another type than `T`, or do not lie one after the other in that order:
    /// [`Self::to_vec`] copies then.
    pub fn as_slice<T: Float>(&self) -> Result<&'a [T], TensorError> {
        let elems = T::of(self.data).ok_or_else(|| other_dtype::<T>(self.dtype()))?;
        Ok(&elems[self.layout.row_major()?])
    }

    /// The elements in row-major order, each rounded once to `T` where that is another type.
    pub fn to_vec<T: Float>(&self) -> Vec<T> {
        match self.as_slice() {
            Ok(elems) => elems.to_vec(),
            Err(_) => indices(self.shape()).map(|at| T::from_f64(self.get_f64(at))).collect(),
        }
    }

    /// The storage, which the layout indexes.
    pub fn data(&self) -> Slice<'a> {
        self.data
    }

    /// The layout.
    pub fn layout(&self) -> &Layout<N> {
        &self.layout
    }

    /// Length of each axis.
    pub fn shape(&self) -> [usize; N] {
        self.layout.shape
    }

    /// The dtype.
    pub fn dtype(&self) -> DType {
        self.data.dtype()
    }

    /// The element at `index`, widened.
    pub fn get_f64(&self, index: [usize; N]) -> f64 {
        self.data.get_f64(self.layout.at(index))
    }
}

impl<const N: usize> TensorRef<'static, N> {
    /// A view of `shape` whose every element is one zero: for what looks at shapes and dtypes alone.
    pub fn zeros(dtype: DType, shape: [usize; N]) -> Self {
        let data = match dtype {
            DType::F32 => Slice::F32(&[0.0]),
            DType::F16 => Slice::F16(&[f16::ZERO]),
            DType::BF16 => Slice::BF16(&[bf16::ZERO]),
            DType::F8E4M3 => Slice::F8E4M3(&[F8E4M3::ZERO]),
            DType::F64 => Slice::F64(&[0.0]),
        };
        // No stride leaves the one element that there is.
        Self { data, layout: Layout::strided(shape, [0; N], 0) }
    }
}

impl<'a> TensorRef<'a, 4> {
    /// Copies the vector at `[b, h, s, ..]` into `into`, rounded to f32.
    ///
    /// # Panics
    /// When `into` is longer than what is left of the storage.
    pub fn load_row(&self, b: usize, h: usize, s: usize, into: &mut [f32]) {
        debug_assert_eq!(into.len(), self.layout.shape[3]);
        let start = self.layout.at([b, h, s, 0]);
        let n = into.len();
        let step = match &self.layout.groups {
            Some(groups) if groups.axis == 3 => None,
            _ => Some(self.layout.strides[3]),
        };
        match (self.data, step) {
            (Slice::F32(v), Some(1)) => into.copy_from_slice(&v[start..start + n]),
            (Slice::F16(v), Some(1)) => v[start..start + n].convert_to_f32_slice(into),
            (Slice::BF16(v), Some(1)) => v[start..start + n].convert_to_f32_slice(into),
            (Slice::F32(v), Some(step)) => gather(into, |i| v[start + i * step]),
            (Slice::F16(v), Some(step)) => gather(into, |i| v[start + i * step].to_f32()),
            (Slice::BF16(v), Some(step)) => gather(into, |i| v[start + i * step].to_f32()),
            (data, _) => gather(into, |i| data.get_f64(self.layout.at([b, h, s, i])) as f32),
        }
    }

    /// The vector at `[b, h, s, ..]` where it lies, when it is f32 and its elements are neighbours.
    pub fn row(&self, b: usize, h: usize, s: usize) -> Option<&'a [f32]> {
        let n = self.layout.shape[3];
        let grouped = self.layout.groups.is_some_and(|groups| groups.axis == 3);
        match self.data {
            Slice::F32(v) if (self.layout.strides[3] == 1 && !grouped) || n == 1 => {
                let start = self.layout.at([b, h, s, 0]);
                v.get(start..start + n)
            }
            _ => None,
        }
    }
}

fn gather(into: &mut [f32], get: impl Fn(usize) -> f32) {
    into.iter_mut().enumerate().for_each(|(i, x)| *x = get(i));
}

/// A destination. See the module for its invariants.
#[derive(Debug)]
pub struct TensorMut<'a, const N: usize = 4> {
    pointer: *mut u8,
    dtype: DType,
    layout: Layout<N>,
    borrowed: PhantomData<&'a mut [u8]>,
}

// SAFETY: a `TensorMut` is an exclusive borrow of its elements, which are plain numbers.
unsafe impl<const N: usize> Send for TensorMut<'_, N> {}
// SAFETY: shared access writes only through `store_row`/`set`, whose callers promise that no
// two threads touch one row.
unsafe impl<const N: usize> Sync for TensorMut<'_, N> {}

impl<'a, const N: usize> TensorMut<'a, N> {
    /// A destination in `data`: `&mut Data` or a mutable slice of one of the dtypes.
    ///
    /// # Errors
    /// When the layout reaches past the storage or writes an element twice.
    pub fn new(data: impl Into<SliceMut<'a>>, layout: Layout<N>) -> Result<Self, TensorError> {
        // SAFETY: one layout shares no element with another.
        let [part] = unsafe { Self::parts(data.into(), [Some(layout)]) }?;
        Ok(part.expect("a destination for the layout given"))
    }

    /// All of `data` as a destination, row-major: the last axis of `shape` is the fastest.
    ///
    /// # Errors
    /// When `data` has not as many elements as the shape.
    pub fn from_slice(
        data: impl Into<SliceMut<'a>>,
        shape: [usize; N],
    ) -> Result<Self, TensorError> {
        let data = data.into();
        let layout = Layout::of_all(data.elems(), shape)?;
        Self::new(data, layout)
    }

    /// A destination for each layout.
    ///
    /// # Safety
    /// No two of the layouts share an element.
    ///
    /// # Errors
    /// When a layout reaches past the storage or writes an element twice.
    pub(crate) unsafe fn parts<const M: usize>(
        data: SliceMut<'a>,
        layouts: [Option<Layout<N>>; M],
    ) -> Result<[Option<Self>; M], TensorError> {
        let len = data.elems();
        let (pointer, dtype) = match data {
            SliceMut::F32(v) => (v.as_mut_ptr().cast(), DType::F32),
            SliceMut::F16(v) => (v.as_mut_ptr().cast(), DType::F16),
            SliceMut::BF16(v) => (v.as_mut_ptr().cast(), DType::BF16),
            SliceMut::F8E4M3(v) => (v.as_mut_ptr().cast(), DType::F8E4M3),
            SliceMut::F64(v) => (v.as_mut_ptr().cast(), DType::F64),
        };
        for layout in layouts.iter().flatten() {
            layout.check(len)?;
            layout.check_disjoint()?;
        }
        let part = |layout| Self { pointer, dtype, layout, borrowed: PhantomData };
        Ok(layouts.map(|layout| layout.map(part)))
    }

    /// The layout.
    pub fn layout(&self) -> &Layout<N> {
        &self.layout
    }

    /// Length of each axis.
    pub fn shape(&self) -> [usize; N] {
        self.layout.shape
    }

    /// The dtype.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The same destination, borrowed for less long.
    pub fn reborrow(&mut self) -> TensorMut<'_, N> {
        TensorMut {
            pointer: self.pointer,
            dtype: self.dtype,
            layout: self.layout,
            borrowed: PhantomData,
        }
    }

    /// The parts before and from index `at` of `axis`. They share no element, so each can be
    /// written by a thread of its own, with [`Self::write`] and [`TensorMut::write_row`].
    ///
    /// # Panics
    /// When `at` is past the end of the axis.
    pub fn split_at(self, axis: usize, at: usize) -> (Self, Self) {
        let n = self.layout.shape[axis];
        assert!(at <= n, "split at {at} of an axis of {n}");
        let part = |start: usize, len: usize| {
            let layout = self.layout.narrowed(axis, start, len).expect("inside the axis");
            TensorMut { pointer: self.pointer, dtype: self.dtype, layout, borrowed: PhantomData }
        };
        (part(0, at), part(at, n - at))
    }

    /// The element at `index`, widened.
    ///
    /// # Panics
    /// When the index is outside the shape.
    pub fn get_f64(&self, index: [usize; N]) -> f64 {
        assert!(index.iter().zip(self.layout.shape).all(|(i, n)| *i < n), "index inside the shape");
        let at = self.layout.at(index);
        // SAFETY: `at` is inside the storage by the layout's check, every element of which was
        // initialised when it was borrowed; who writes it from another thread promised that
        // nobody reads it.
        unsafe {
            match self.dtype {
                DType::F32 => (*self.pointer.cast::<f32>().add(at)).into(),
                DType::F16 => (*self.pointer.cast::<f16>().add(at)).to_f64(),
                DType::BF16 => (*self.pointer.cast::<bf16>().add(at)).to_f64(),
                DType::F8E4M3 => (*self.pointer.cast::<F8E4M3>().add(at)).to_f64(),
                DType::F64 => *self.pointer.cast::<f64>().add(at),
            }
        }
    }

    /// Writes `value` at `index`, rounded to the dtype.
    ///
    /// # Panics
    /// When the index is outside the shape.
    pub fn write(&mut self, index: [usize; N], value: f64) {
        // SAFETY: the exclusive borrow of this view excludes other writers of its elements.
        unsafe { self.set(index, value) }
    }

    /// Writes `value` at `index`, rounded to the dtype.
    ///
    /// # Safety
    /// No other thread reads or writes this element at the same time.
    pub unsafe fn set(&self, index: [usize; N], value: f64) {
        assert!(index.iter().zip(self.layout.shape).all(|(i, n)| *i < n), "index inside the shape");
        let at = self.layout.at(index);
        // SAFETY: `at` is inside the storage by the layout's check; the caller excludes races.
        unsafe {
            match self.dtype {
                DType::F32 => *self.pointer.cast::<f32>().add(at) = value as f32,
                DType::F16 => *self.pointer.cast::<f16>().add(at) = round::to_f16(value),
                DType::BF16 => *self.pointer.cast::<bf16>().add(at) = round::to_bf16(value),
                DType::F8E4M3 => {
                    *self.pointer.cast::<F8E4M3>().add(at) = F8E4M3::from_f64(value);
                }
                DType::F64 => *self.pointer.cast::<f64>().add(at) = value,
            }
        }
    }
}

impl TensorMut<'_, 4> {
    /// Writes the vector at `[b, h, s, ..]`, rounded once to the dtype; adds to what is there
    /// (in f32, f64 for f64) when `accumulate`.
    ///
    /// # Panics
    /// When the row is outside the shape or longer than the last axis.
    pub fn write_row(&mut self, b: usize, h: usize, s: usize, row: &[f32], accumulate: bool) {
        // SAFETY: the exclusive borrow of this view excludes other writers of its elements.
        unsafe { self.store_row(b, h, s, row, accumulate) }
    }

    /// Writes the vector at `[b, h, s, ..]`, rounded once to the dtype; adds to what is there
    /// (in f32, f64 for f64) when `accumulate`.
    ///
    /// # Safety
    /// No other thread reads or writes this row at the same time.
    pub unsafe fn store_row(&self, b: usize, h: usize, s: usize, row: &[f32], accumulate: bool) {
        let [nb, nh, ns, nd] = self.layout.shape;
        assert!(b < nb && h < nh && s < ns && row.len() <= nd, "row inside the shape");
        let grouped = self.layout.groups.is_some_and(|groups| groups.axis == 3);
        if self.layout.strides[3] == 1 && !grouped && !accumulate && !row.is_empty() {
            let start = self.layout.at([b, h, s, 0]);
            // SAFETY: the row's elements are neighbours inside the storage by the layout's check;
            // the caller excludes races.
            unsafe {
                match self.dtype {
                    DType::F32 => elems::<f32>(self.pointer, start, row.len()).copy_from_slice(row),
                    DType::F16 => {
                        elems::<f16>(self.pointer, start, row.len()).convert_from_f32_slice(row);
                    }
                    DType::BF16 => {
                        elems::<bf16>(self.pointer, start, row.len()).convert_from_f32_slice(row);
                    }
                    DType::F8E4M3 => {
                        let to = elems::<F8E4M3>(self.pointer, start, row.len());
                        to.iter_mut().zip(row).for_each(|(to, &x)| *to = F8E4M3::from_f32(x));
                    }
                    DType::F64 => {
                        let to = elems::<f64>(self.pointer, start, row.len());
                        to.iter_mut().zip(row).for_each(|(to, &x)| *to = x.into());
                    }
                }
            }
            return;
        }
        for (i, &x) in row.iter().enumerate() {
            let at = self.layout.at([b, h, s, i]);
            // SAFETY: `at` is inside the storage by the layout's check; the caller excludes races.
            unsafe {
                match self.dtype {
                    DType::F32 => {
                        let p = self.pointer.cast::<f32>().add(at);
                        *p = if accumulate { *p + x } else { x };
                    }
                    DType::F16 => {
                        let p = self.pointer.cast::<f16>().add(at);
                        *p = f16::from_f32(if accumulate { (*p).to_f32() + x } else { x });
                    }
                    DType::BF16 => {
                        let p = self.pointer.cast::<bf16>().add(at);
                        *p = bf16::from_f32(if accumulate { (*p).to_f32() + x } else { x });
                    }
                    DType::F8E4M3 => {
                        let p = self.pointer.cast::<F8E4M3>().add(at);
                        *p = F8E4M3::from_f32(if accumulate { (*p).to_f32() + x } else { x });
                    }
                    DType::F64 => {
                        let p = self.pointer.cast::<f64>().add(at);
                        *p = if accumulate { *p + f64::from(x) } else { f64::from(x) };
                    }
                }
            }
        }
    }
}

/// Elements `start..start + len` behind `pointer`.
///
/// # Safety
/// They are inside one allocation of `T`s, and nobody else reads or writes them during `'a`.
unsafe fn elems<'a, T>(pointer: *mut u8, start: usize, len: usize) -> &'a mut [T] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(pointer.cast::<T>().add(start), len) }
}

/// An owned tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor<const N: usize = 4> {
    data: Data,
    layout: Layout<N>,
}

impl<const N: usize> Tensor<N> {
    /// `data`, a vector of one of the dtypes, seen through `layout`.
    ///
    /// # Errors
    /// When the layout reaches past the storage.
    pub fn new(data: impl Into<Data>, layout: Layout<N>) -> Result<Self, TensorError> {
        let data = data.into();
        layout.check(data.len())?;
        Ok(Self { data, layout })
    }

    /// All of `data`, a vector of one of the dtypes, row-major: the last axis of `shape` is the
    /// fastest. Nothing is copied.
    ///
    /// ```
    /// use foveate_tensor::Tensor;
    /// let q = Tensor::from_vec(vec![0.5f32; 2 * 3 * 4], [1, 2, 3, 4])?;
    /// assert_eq!(q.as_slice::<f32>()?[0], 0.5);
    /// # Ok::<(), foveate_tensor::TensorError>(())
    /// ```
    ///
    /// # Errors
    /// When `data` has not as many elements as the shape.
    pub fn from_vec(data: impl Into<Data>, shape: [usize; N]) -> Result<Self, TensorError> {
        let data = data.into();
        let layout = Layout::of_all(data.len(), shape)?;
        Self::new(data, layout)
    }

    /// A row-major tensor filled with `value`.
    pub fn filled(dtype: DType, shape: [usize; N], value: f64) -> Self {
        let layout = Layout::contiguous(shape);
        Self { data: Data::filled(dtype, layout.elems(), value), layout }
    }

    /// A row-major tensor of `dtype` whose element at `index` is `f(index)`.
    pub fn from_fn(dtype: DType, shape: [usize; N], mut f: impl FnMut([usize; N]) -> f64) -> Self {
        let layout = Layout::contiguous(shape);
        Self { data: Data::from_f64(dtype, indices(shape).map(&mut f)), layout }
    }

    /// The view of all of it.
    pub fn view(&self) -> TensorRef<'_, N> {
        TensorRef { data: (&self.data).into(), layout: self.layout }
    }

    /// All of it as a destination.
    ///
    /// # Errors
    /// When the layout writes an element twice.
    pub fn view_mut(&mut self) -> Result<TensorMut<'_, N>, TensorError> {
        TensorMut::new(&mut self.data, self.layout)
    }

    /// The layout.
    pub fn layout(&self) -> &Layout<N> {
        &self.layout
    }

    /// Length of each axis.
    pub fn shape(&self) -> [usize; N] {
        self.layout.shape
    }

    /// The dtype.
    pub fn dtype(&self) -> DType {
        self.data.dtype()
    }

    /// The storage, which the layout indexes.
    pub fn data(&self) -> &Data {
        &self.data
    }

    /// The elements in row-major order, widened.
    pub fn to_f64(&self) -> Vec<f64> {
        self.to_vec()
    }

    /// The elements in row-major order, each rounded once to `T` where that is another type.
    pub fn to_vec<T: Float>(&self) -> Vec<T> {
        self.view().to_vec()
    }

    /// The elements where they lie, in row-major order of the shape.
    ///
    /// # Errors
    /// When they are of another type than `T`, or do not lie one after the other in that order:
    /// [`Self::to_vec`] copies then.
    pub fn as_slice<T: Float>(&self) -> Result<&[T], TensorError> {
        self.view().as_slice()
    }

    /// The elements where they lie, to write to, in row-major order of the shape.
    ///
    /// # Errors
    /// Those of [`Self::as_slice`]; [`Self::view_mut`] writes through any strides.
    pub fn as_mut_slice<T: Float>(&mut self) -> Result<&mut [T], TensorError> {
        let dtype = self.dtype();
        let elems = T::of_mut((&mut self.data).into()).ok_or_else(|| other_dtype::<T>(dtype))?;
        Ok(&mut elems[self.layout.row_major()?])
    }

    /// The elements in row-major order. Nothing is copied where they fill the storage in that
    /// order.
    ///
    /// # Errors
    /// When they are of another type than `T`; [`Self::to_vec`] rounds them.
    pub fn into_vec<T: Float>(self) -> Result<Vec<T>, TensorError> {
        let all = self.layout.row_major().ok() == Some(0..self.data.len());
        if self.dtype() != T::DTYPE {
            return Err(other_dtype::<T>(self.dtype()));
        }
        if !all {
            return Ok(self.to_vec());
        }
        Ok(T::from_data(self.data).expect("the dtype is that of the type"))
    }
}

/// What is wrong when elements of `found` are asked for as `T`.
fn other_dtype<T: Float>(found: DType) -> TensorError {
    TensorErrorKind::DType { found, asked: T::DTYPE }.into()
}

impl<'a, const N: usize> From<&'a Tensor<N>> for TensorRef<'a, N> {
    fn from(tensor: &'a Tensor<N>) -> Self {
        tensor.view()
    }
}

impl<'a, const N: usize> From<&TensorRef<'a, N>> for TensorRef<'a, N> {
    fn from(view: &TensorRef<'a, N>) -> Self {
        *view
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_e4m3_are_rounded_where_they_are_written() {
        for step in [1, 2] {
            let mut data = Data::filled(DType::F8E4M3, 6, f64::NAN);
            let layout = Layout::strided([1, 1, 1, 3], [6, 6, 6, step], 0);
            let mut to = TensorMut::new(&mut data, layout).unwrap();
            to.write_row(0, 0, 0, &[1.06, -0.3, 1e9], false);
            to.write_row(0, 0, 0, &[0.5, 0.0, 1.0], true);
            to.write([0, 0, 0, 1], to.get_f64([0, 0, 0, 1]) - 1.0);
            let mut row = [0.0; 3];
            TensorRef::new(&data, layout).unwrap().load_row(0, 0, 0, &mut row);
            assert_eq!(row, [1.5, -1.25, 448.0]);
        }
    }

    #[test]
    fn rows_are_read_and_written_alike_whatever_the_dtype_and_steps() {
        let grouped = crate::GroupedAxis { axis: 1, inner: 2, outer: 7, first: 1 };
        let layouts = [
            Layout::strided([2, 3, 2, 3], [100, 9, 3, 1], 5),
            Layout::strided([2, 3, 2, 3], [1, 2, 6, 12], 0),
            Layout { groups: Some(grouped), ..Layout::strided([2, 3, 2, 3], [40, 3, 20, 1], 2) },
        ];
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
            for layout in layouts {
                let mut data = Data::filled(dtype, 200, f64::NAN);
                let value = |b: usize, h: usize, s: usize, d: usize| {
                    (1 + d + 3 * (s + 2 * (h + 3 * b))) as f32
                };
                let rows = indices([2, 3, 2]);
                let mut to = TensorMut::new(&mut data, layout).unwrap();
                for [b, h, s] in rows.clone() {
                    let row = [0, 1, 2].map(|d| value(b, h, s, d));
                    to.write_row(b, h, s, &row, false);
                    to.write_row(b, h, s, &row, true);
                }
                assert_eq!(to.get_f64([1, 2, 1, 2]), 2.0 * f64::from(value(1, 2, 1, 2)));
                let from = TensorRef::new(&data, layout).unwrap();
                for [b, h, s] in rows {
                    let expected = [0, 1, 2].map(|d| 2.0 * value(b, h, s, d));
                    let mut row = [0.0; 3];
                    from.load_row(b, h, s, &mut row);
                    assert_eq!(row, expected, "{dtype} {layout:?}");
                    if let Some(row) = from.row(b, h, s) {
                        assert_eq!(row, expected);
                    }
                }
                let direct = from.row(1, 2, 1).is_some();
                assert_eq!(direct, dtype == DType::F32 && layout.strides[3] == 1);
                let view = (0..200).map(|i| from.data().get_f64(i));
                assert_eq!(view.filter(|x| !x.is_nan()).count(), 36, "nothing else is written");
            }
        }
    }

    #[test]
    fn a_vector_goes_in_and_a_slice_comes_out_without_a_copy() {
        let given: Vec<f32> = (0..24).map(|i| i as f32).collect();
        let place = given.as_ptr();
        let mut tensor = Tensor::from_vec(given, [1, 2, 3, 4]).unwrap();
        assert_eq!(tensor.view().get_f64([0, 1, 2, 3]), 23.0);
        assert_eq!(tensor.as_slice::<f32>().unwrap().as_ptr(), place);
        tensor.as_mut_slice::<f32>().unwrap()[23] = 7.0;
        assert_eq!(tensor.to_vec::<f16>()[23], f16::from_f32(7.0));
        let back: Vec<f32> = tensor.into_vec().unwrap();
        assert_eq!((back.as_ptr(), back[23]), (place, 7.0));

        let mut out = vec![f32::NAN; 6];
        let mut to = TensorMut::from_slice(&mut out, [1, 1, 2, 3]).unwrap();
        to.write_row(0, 0, 1, &[1.0, 2.0, 3.0], false);
        to.write_row(0, 0, 0, &[4.0, 5.0, 6.0], false);
        assert_eq!(out, [4.0, 5.0, 6.0, 1.0, 2.0, 3.0]);
        let view = TensorRef::from_slice(&out[3..], [3]).unwrap();
        assert_eq!(view.as_slice::<f32>().unwrap(), [1.0, 2.0, 3.0]);
    }

    #[test]
    fn what_lies_in_another_order_is_copied_into_that_of_the_shape() {
        let elems: Vec<f32> = (0..6).map(|i| i as f32).collect();
        let transposed = Tensor::new(elems, Layout::strided([3, 2], [1, 3], 0)).unwrap();
        let said = transposed.as_slice::<f32>().unwrap_err().to_string();
        assert_eq!(
            said,
            "the elements of shape [3, 2] with strides [1, 3] do not lie one after the other in \
             row-major order; `to_vec` copies them into it"
        );
        assert_eq!(transposed.to_vec::<f32>(), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
        assert_eq!(transposed.into_vec::<f32>().unwrap(), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
        // A part that lies in one piece is a slice, and not all of the vector.
        let whole = Tensor::from_vec(vec![1.0f64, 2.0, 3.0, 4.0], [2, 2]).unwrap();
        let row = whole.view().layout().narrowed(0, 1, 1).unwrap();
        let row = Tensor::new(whole.data().clone(), row).unwrap();
        assert_eq!(row.as_slice::<f64>().unwrap(), [3.0, 4.0]);
        assert_eq!(row.into_vec::<f64>().unwrap(), [3.0, 4.0]);
    }

    #[test]
    fn elements_that_are_not_as_many_or_of_another_type_are_refused_with_both() {
        let few = Tensor::from_vec(vec![0.0f32; 5], [2, 3]).unwrap_err().to_string();
        assert_eq!(few, "5 elements cannot have shape [2, 3], which has 6");
        let mut data = vec![0.0f32; 7];
        assert!(TensorMut::from_slice(&mut data, [2, 3]).is_err());
        assert!(TensorRef::from_slice(&data, [usize::MAX, 3]).is_err());
        let mut halves = Tensor::from_vec(vec![f16::ONE; 2], [2]).unwrap();
        let other = "the elements are f16, not f32; `to_vec` converts them";
        assert_eq!(halves.as_slice::<f32>().unwrap_err().to_string(), other);
        assert_eq!(halves.as_mut_slice::<f32>().unwrap_err().to_string(), other);
        assert_eq!(halves.to_vec::<f32>(), [1.0, 1.0]);
        assert_eq!(halves.into_vec::<f32>().unwrap_err().to_string(), other);
    }

    #[test]
    fn the_parts_of_a_split_destination_are_written_apart() {
        let mut data = Data::filled(DType::F32, 12, 0.0);
        let layout = Layout::strided([1, 2, 3, 2], [0, 2, 4, 1], 0);
        let mut whole = TensorMut::new(&mut data, layout).unwrap();
        let (first, rest) = whole.reborrow().split_at(1, 1);
        let (mut a, mut b) = rest.split_at(2, 2);
        for (i, part) in [&mut a, &mut b].into_iter().enumerate() {
            let rows = part.shape()[2];
            for s in 0..rows {
                part.write_row(0, 0, s, &[1.0 + i as f32, 3.0 + i as f32], true);
            }
        }
        assert_eq!(first.shape(), [1, 1, 3, 2]);
        let (_, empty) = whole.split_at(2, 3);
        assert_eq!(empty.shape(), [1, 2, 0, 2]);
        let Data::F32(v) = data else { unreachable!() };
        assert_eq!(v, [0., 0., 1., 3., 0., 0., 1., 3., 0., 0., 2., 4.]);
    }
}
