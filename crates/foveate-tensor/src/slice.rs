//! Borrowed elements of one dtype, behind views and destinations.

use half::{bf16, f16};

use crate::dtype::{DType, Data};

/// Elements behind a shared view.
#[derive(Clone, Copy, Debug)]
pub enum Slice<'a> {
    /// f32 elements.
    F32(&'a [f32]),
    /// f16 elements.
    F16(&'a [f16]),
    /// bf16 elements.
    BF16(&'a [bf16]),
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
            Slice::F64(_) => DType::F64,
        }
    }

    /// Element `i`, widened.
    pub fn get_f64(&self, i: usize) -> f64 {
        match self {
            Slice::F32(v) => v[i].into(),
            Slice::F16(v) => v[i].to_f64(),
            Slice::BF16(v) => v[i].to_f64(),
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
    /// f64 elements.
    F64(&'a mut [f64]),
}

impl SliceMut<'_> {
    pub(crate) fn elems(&self) -> usize {
        match self {
            SliceMut::F32(v) => v.len(),
            SliceMut::F16(v) => v.len(),
            SliceMut::BF16(v) => v.len(),
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
            Data::F64(v) => SliceMut::F64(v),
        }
    }
}
