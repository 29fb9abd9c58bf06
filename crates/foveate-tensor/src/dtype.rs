//! Element types and owned storage.

use half::{bf16, f16};

use crate::f8::F8E4M3;
use crate::round;

/// Element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    BF16,
    /// [`F8E4M3`], 8 bits.
    F8E4M3,
    /// IEEE binary64, for the oracle.
    F64,
}

impl DType {
    /// Size of one element in bytes.
    pub fn bytes(self) -> usize {
        match self {
            DType::F64 => 8,
            DType::F32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::F8E4M3 => 1,
        }
    }

    /// The name users write: `f32`, `f16`, `bf16`, `f8e4m3`, `f64`.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F8E4M3 => "f8e4m3",
            DType::F64 => "f64",
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Owned elements of one dtype.
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    /// f32 elements.
    F32(Vec<f32>),
    /// f16 elements.
    F16(Vec<f16>),
    /// bf16 elements.
    BF16(Vec<bf16>),
    /// e4m3 elements.
    F8E4M3(Vec<F8E4M3>),
    /// f64 elements.
    F64(Vec<f64>),
}

impl Data {
    /// `len` elements of `value`, rounded to `dtype`.
    pub fn filled(dtype: DType, len: usize, value: f64) -> Self {
        match dtype {
            DType::F32 => Data::F32(vec![value as f32; len]),
            DType::F16 => Data::F16(vec![round::to_f16(value); len]),
            DType::BF16 => Data::BF16(vec![round::to_bf16(value); len]),
            DType::F8E4M3 => Data::F8E4M3(vec![F8E4M3::from_f64(value); len]),
            DType::F64 => Data::F64(vec![value; len]),
        }
    }

    /// Each value rounded once to `dtype`.
    pub fn from_f64(dtype: DType, values: impl IntoIterator<Item = f64>) -> Self {
        let values = values.into_iter();
        match dtype {
            DType::F32 => Data::F32(values.map(|v| v as f32).collect()),
            DType::F16 => Data::F16(values.map(round::to_f16).collect()),
            DType::BF16 => Data::BF16(values.map(round::to_bf16).collect()),
            DType::F8E4M3 => Data::F8E4M3(values.map(F8E4M3::from_f64).collect()),
            DType::F64 => Data::F64(values.collect()),
        }
    }

    /// The dtype.
    pub fn dtype(&self) -> DType {
        match self {
            Data::F32(_) => DType::F32,
            Data::F16(_) => DType::F16,
            Data::BF16(_) => DType::BF16,
            Data::F8E4M3(_) => DType::F8E4M3,
            Data::F64(_) => DType::F64,
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Data::F32(v) => v.len(),
            Data::F16(v) => v.len(),
            Data::BF16(v) => v.len(),
            Data::F8E4M3(v) => v.len(),
            Data::F64(v) => v.len(),
        }
    }

    /// True when there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
