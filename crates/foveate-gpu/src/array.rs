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
    /// 32 bits with sign.
    I32,
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
            Self::Bool | Self::U8 => 1,
            Self::F16 | Self::BF16 => 2,
            Self::I32 | Self::F32 => 4,
            Self::F64 => 8,
        }
    }

    /// The name users write: `bool`, `u8`, `i32`, `f16`, `bf16`, `f32`, `f64`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bool => "bool",
            Self::U8 => "u8",
            Self::I32 => "i32",
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

/// An array in device memory: row-major, nothing between its elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceArray<'a> {
    /// Address of its first element.
    pub address: Address,
    /// Type of its elements.
    pub element: Element,
    /// Length of each axis.
    pub shape: &'a [usize],
    /// A promise: arrays of the same address, type, shape and version have the same contents. What
    /// a plan makes of them (range tables, block lists) is then kept from call to call. With `None`
    /// every call makes it anew.
    pub version: Option<u64>,
}

impl<'a> DeviceArray<'a> {
    /// An array of which nothing is promised.
    pub fn new(address: Address, element: Element, shape: &'a [usize]) -> Self {
        Self { address, element, shape, version: None }
    }
}
