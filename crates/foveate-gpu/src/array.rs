//! Arrays in device memory that are no tensors: captured buffers, offsets of sequences, tables.

use foveate_tensor::ElementType;

use crate::abi::Address;

/// An array in device memory: row-major with nothing between its elements, or with strides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceArray<'a> {
    /// Address of its first element.
    pub address: Address,
    /// Type of its elements.
    pub element: ElementType,
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
    pub fn new(address: Address, element: ElementType, shape: &'a [usize]) -> Self {
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
