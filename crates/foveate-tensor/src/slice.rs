//! Borrowed elements of one dtype, behind views and destinations.

use half::{bf16, f16};

use crate::dtype::{DType, Data};
use crate::f8::F8E4M3;
use crate::round;

/// Elements behind a shared view.
#[derive(Clone, Copy, Debug)]
pub enum Slice<'a> {
    /// f32 elements.
    F32(&'a [f32]),
    /// f16 elements.
    F16(&'a [f16]),
    /// bf16 elements.
    BF16(&'a [bf16]),
    /// e4m3 elements.
    F8E4M3(&'a [F8E4M3]),
    /// f64 elements.
    F64(&'a [f64]),
}

impl Slice<'_> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Slice::F32(v) => v.len(),
            Slice::F16(v) => v.len(),
            Slice::BF16(v) => v.len(),
            Slice::F8E4M3(v) => v.len(),
            Slice::F64(v) => v.len(),
        }
    }

    /// True when there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The dtype.
    pub fn dtype(&self) -> DType {
        match self {
            Slice::F32(_) => DType::F32,
            Slice::F16(_) => DType::F16,
            Slice::BF16(_) => DType::BF16,
            Slice::F8E4M3(_) => DType::F8E4M3,
            Slice::F64(_) => DType::F64,
        }
    }

    /// Element `i`, widened.
    pub fn get_f64(&self, i: usize) -> f64 {
        match self {
            Slice::F32(v) => v[i].into(),
            Slice::F16(v) => v[i].to_f64(),
            Slice::BF16(v) => v[i].to_f64(),
            Slice::F8E4M3(v) => v[i].to_f64(),
            Slice::F64(v) => v[i],
        }
    }
}

impl<'a> From<&'a Data> for Slice<'a> {
    fn from(data: &'a Data) -> Self {
        match data {
            Data::F32(v) => Slice::F32(v),
            Data::F16(v) => Slice::F16(v),
            Data::BF16(v) => Slice::BF16(v),
            Data::F8E4M3(v) => Slice::F8E4M3(v),
            Data::F64(v) => Slice::F64(v),
        }
    }
}

/// Elements behind a destination.
#[derive(Debug)]
pub enum SliceMut<'a> {
    /// f32 elements.
    F32(&'a mut [f32]),
    /// f16 elements.
    F16(&'a mut [f16]),
    /// bf16 elements.
    BF16(&'a mut [bf16]),
    /// e4m3 elements.
    F8E4M3(&'a mut [F8E4M3]),
    /// f64 elements.
    F64(&'a mut [f64]),
}

impl<'a> SliceMut<'a> {
    /// The dtype.
    pub fn dtype(&self) -> DType {
        match self {
            SliceMut::F32(_) => DType::F32,
            SliceMut::F16(_) => DType::F16,
            SliceMut::BF16(_) => DType::BF16,
            SliceMut::F8E4M3(_) => DType::F8E4M3,
            SliceMut::F64(_) => DType::F64,
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.elems()
    }

    /// True when there are no elements.
    pub fn is_empty(&self) -> bool {
        self.elems() == 0
    }

    /// The same destination for a shorter time.
    pub fn reborrow(&mut self) -> SliceMut<'_> {
        match self {
            SliceMut::F32(v) => SliceMut::F32(v),
            SliceMut::F16(v) => SliceMut::F16(v),
            SliceMut::BF16(v) => SliceMut::BF16(v),
            SliceMut::F8E4M3(v) => SliceMut::F8E4M3(v),
            SliceMut::F64(v) => SliceMut::F64(v),
        }
    }

    /// Destinations of `count` elements each, the last one of what is left.
    pub fn chunks(self, count: usize) -> Vec<SliceMut<'a>> {
        match self {
            SliceMut::F32(v) => v.chunks_mut(count).map(SliceMut::F32).collect(),
            SliceMut::F16(v) => v.chunks_mut(count).map(SliceMut::F16).collect(),
            SliceMut::BF16(v) => v.chunks_mut(count).map(SliceMut::BF16).collect(),
            SliceMut::F8E4M3(v) => v.chunks_mut(count).map(SliceMut::F8E4M3).collect(),
            SliceMut::F64(v) => v.chunks_mut(count).map(SliceMut::F64).collect(),
        }
    }

    /// Writes `values`, or adds them to what is there, each result rounded once.
    ///
    /// # Panics
    /// When there are fewer values than elements.
    pub fn store(&mut self, values: &[f32], add: bool) {
        fn each<T: Copy>(
            into: &mut [T],
            values: &[f32],
            add: bool,
            wide: impl Fn(T) -> f64,
            narrow: impl Fn(f64) -> T,
        ) {
            for (into, &x) in into.iter_mut().zip(values) {
                *into = narrow(if add { wide(*into) + f64::from(x) } else { x.into() });
            }
        }
        assert!(values.len() >= self.elems(), "a value for each element");
        match self {
            // In f32 a sum of two f32 is rounded once, too.
            SliceMut::F32(into) => into
                .iter_mut()
                .zip(values)
                .for_each(|(into, &x)| *into = if add { *into + x } else { x }),
            SliceMut::F16(into) => each(into, values, add, f16::to_f64, round::to_f16),
            SliceMut::BF16(into) => each(into, values, add, bf16::to_f64, round::to_bf16),
            SliceMut::F8E4M3(into) => each(into, values, add, F8E4M3::to_f64, F8E4M3::from_f64),
            SliceMut::F64(into) => each(into, values, add, |x| x, |x| x),
        }
    }

    pub(crate) fn elems(&self) -> usize {
        match self {
            SliceMut::F32(v) => v.len(),
            SliceMut::F16(v) => v.len(),
            SliceMut::BF16(v) => v.len(),
            SliceMut::F8E4M3(v) => v.len(),
            SliceMut::F64(v) => v.len(),
        }
    }
}

impl<'a> From<&'a mut Data> for SliceMut<'a> {
    fn from(data: &'a mut Data) -> Self {
        match data {
            Data::F32(v) => SliceMut::F32(v),
            Data::F16(v) => SliceMut::F16(v),
            Data::BF16(v) => SliceMut::BF16(v),
            Data::F8E4M3(v) => SliceMut::F8E4M3(v),
            Data::F64(v) => SliceMut::F64(v),
        }
    }
}
