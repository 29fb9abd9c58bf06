//! Arrays in device memory that are no tensors: captured buffers, offsets of sequences, tables.

use std::fmt;

use foveate_tensor::DType;

use crate::abi::Address;

/// The type of an array's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// A byte, 0 or 1.
    Bool,
    /// 8 bits without sign.
    U8,
    /// 8 bits with sign.
    I8,
    /// 16 bits with sign.
    I16,
    /// 32 bits with sign.
    I32,
    /// 64 bits with sign.
    I64,
    /// IEEE half precision.
    F16,
    /// The upper half of an f32.
    BF16,
    /// IEEE single precision.
    F32,
    /// IEEE double precision.
    F64,
}

impl Element {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Self::Bool | Self::U8 | Self::I8 => 1,
            Self::I16 | Self::F16 | Self::BF16 => 2,
            Self::I32 | Self::F32 => 4,
            Self::I64 | Self::F64 => 8,
        }
    }

    /// The name users write: `bool`, `u8`, `i8`, `i16`, `i32`, `i64`, `f16`, `bf16`, `f32`, `f64`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bool => "bool",
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::I16 => "i16",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::F32 => "f32",
            Self::F64 => "f64",
        }
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl From<DType> for Element {
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::F16 => Self::F16,
            DType::BF16 => Self::BF16,
            DType::F32 => Self::F32,
            DType::F64 => Self::F64,
        }
    }
}

/// An array in device memory: row-major with nothing between its elements, or with strides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceArray<'a> {
    /// Address of its first element.
    pub address: Address,
    /// Type of its elements.
    pub element: Element,
    /// Length of each axis.
    pub shape: &'a [usize],
    /// Distance of neighbours along each axis, in elements, 0 where the axis is broadcast; `None` for
    /// a row-major array. Captured buffers alone may have strides.
    pub strides: Option<&'a [usize]>,
    /// A promise: arrays of the same address, type, shape and version have the same contents. What
    /// a plan makes of them (range tables, block lists) is then kept from call to call. With `None`
    /// every call makes it anew.
    pub version: Option<u64>,
}

impl<'a> DeviceArray<'a> {
    /// An array of which nothing is promised.
    pub fn new(address: Address, element: Element, shape: &'a [usize]) -> Self {
        Self { address, element, shape, strides: None, version: None }
    }

    /// Elements from the first to the last one in memory, both counted; `None` when they are too many
    /// to count.
    pub fn span(&self) -> Option<usize> {
        let elems = self.shape.iter().try_fold(1usize, |n, &len| n.checked_mul(len))?;
        let Some(strides) = self.strides.filter(|_| elems > 0) else { return Some(elems) };
        let mut axes = self.shape.iter().zip(strides);
        axes.try_fold(1usize, |n, (&len, &stride)| n.checked_add((len - 1).checked_mul(stride)?))
    }
}
