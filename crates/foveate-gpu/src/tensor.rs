//! Tensors in device memory.

use std::fmt;

use foveate_tensor::{DType, Layout};

use crate::abi::Address;
use crate::error::GpuError;

/// A strided tensor in device memory. `N` is 4 for operands, 3 for statistics of rows, 1 for
/// vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceTensor<const N: usize = 4> {
    /// Address of the storage that the layout indexes.
    pub address: Address,
    /// The dtype.
    pub dtype: DType,
    /// Where its elements lie in the storage.
    pub layout: Layout<N>,
}

impl<const N: usize> DeviceTensor<N> {
    /// A row-major tensor from `address` on.
    pub fn contiguous(address: Address, dtype: DType, shape: [usize; N]) -> Self {
        Self { address, dtype, layout: Layout::contiguous(shape) }
    }

    /// Address of element 0.
    pub fn start(&self) -> Address {
        // What overflows is refused by its span.
        self.address.wrapping_add(self.layout.offset.wrapping_mul(self.dtype.bytes()) as u64)
    }

    /// The first address, and the one after the last; equal for no elements.
    pub(crate) fn span(&self) -> Result<(Address, Address), GpuError> {
        let end = self.layout.end().and_then(|end| end.checked_mul(self.dtype.bytes()));
        let end = end.and_then(|end| self.address.checked_add(end as u64)).ok_or_else(|| {
            GpuError::argument(format!("strides {:?} overflow an address", self.layout.strides))
        })?;
        Ok(if self.layout.elems() == 0 {
            (self.address, self.address)
        } else {
            (self.start(), end)
        })
    }

    /// Whether it has `shape`; an error names it as `name`.
    ///
    /// # Errors
    /// [`crate::GpuErrorKind::Argument`] with both shapes.
    pub fn check_shape(&self, name: &str, shape: [usize; N]) -> Result<(), GpuError> {
        if self.layout.shape == shape {
            return Ok(());
        }
        let found = self.layout.shape;
        Err(GpuError::argument(format!("{name} has shape {found:?}; it must be {shape:?}")))
    }

    /// Whether it has `dtype`.
    ///
    /// # Errors
    /// [`crate::GpuErrorKind::Argument`] with both dtypes.
    pub fn check_dtype(&self, name: &str, dtype: DType) -> Result<(), GpuError> {
        if self.dtype == dtype {
            return Ok(());
        }
        Err(GpuError::argument(format!("{name} is {}; it must be {dtype}", self.dtype)))
    }

    /// Bytes that divide the start and every distance between rows.
    fn step(&self) -> u64 {
        let layout = &self.layout;
        let bytes = self.dtype.bytes() as u64;
        let first = layout.at([0; N]).wrapping_mul(self.dtype.bytes()) as u64;
        let mut bits = self.address.wrapping_add(first) | 16;
        for axis in (0..N.saturating_sub(1)).filter(|&axis| layout.shape[axis] > 1) {
            bits |= layout.strides[axis] as u64 * bytes;
        }
        if let Some(groups) = layout.groups {
            bits |= groups.outer as u64 * bytes;
        }
        1 << bits.trailing_zeros()
    }
}

impl DeviceTensor<4> {
    /// Bytes that every row is aligned to, at most 16; 0 when the elements of a row are apart.
    pub fn row_align(&self) -> usize {
        let unit = self.layout.strides[3] == 1 || self.layout.shape[3] == 1;
        if self.layout.elems() == 0 {
            16
        } else if unit && self.layout.groups.is_none_or(|groups| groups.axis != 3) {
            self.step().min(16) as usize
        } else {
            0
        }
    }
}

impl DeviceTensor<3> {
    /// The same memory with rows and columns, the last two axes, exchanged.
    pub fn transposed(&self) -> Self {
        let mut of = *self;
        of.layout.shape.swap(1, 2);
        of.layout.strides.swap(1, 2);
        if let Some(groups) = of.layout.groups.as_mut().filter(|groups| groups.axis > 0) {
            groups.axis = 3 - groups.axis;
        }
        of
    }
}

impl DeviceTensor<1> {
    /// Whether it is `len` f32 numbers side by side.
    pub fn check_vector(&self, name: &str, len: usize) -> Result<(), GpuError> {
        self.check_side_by_side(name, len, DType::F32)
    }

    /// Whether it is `len` numbers of `dtype` side by side.
    pub fn check_side_by_side(&self, name: &str, len: usize, dtype: DType) -> Result<(), GpuError> {
        self.check_shape(name, [len])?;
        self.check_dtype(name, dtype)?;
        if len > 1 && self.layout.strides != [1] {
            let stride = self.layout.strides[0];
            return Err(GpuError::argument(format!("{name} has stride {stride}; it must be 1")));
        }
        Ok(())
    }
}

impl<const N: usize> fmt::Display for DeviceTensor<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Layout { shape, strides, .. } = self.layout;
        write!(f, "{} {shape:?}, strides {strides:?}, at {:#x}", self.dtype, self.start())
    }
}
