//! Captured buffers in device memory.

use foveate_mods::Type;

use super::Places;
use crate::abi::Address;
use crate::error::CudaError;

/// An array in device memory: row-major, nothing between its elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceArray<'a> {
    /// Address of its first element.
    pub address: Address,
    /// Type of its elements. A bool is a byte, 0 or 1.
    pub ty: Type,
    /// Length of each axis.
    pub shape: &'a [usize],
    /// A promise: arrays of the same address, type, shape and version have the same contents. What
    /// a plan makes of them (range tables, block lists) is then kept from call to call. With `None`
    /// every call makes it anew.
    pub version: Option<u64>,
}

impl<'a> DeviceArray<'a> {
    /// An array of which nothing is promised.
    pub fn new(address: Address, ty: Type, shape: &'a [usize]) -> Self {
        Self { address, ty, shape, version: None }
    }

    /// Bytes of an element.
    fn elem_bytes(&self) -> usize {
        if self.ty == Type::Bool { 1 } else { 4 }
    }

    /// Adds where it lies to what a launch reads.
    pub(super) fn place(&self, name: &str, places: &mut Places) -> Result<(), CudaError> {
        let elems = self.shape.iter().try_fold(1usize, |n, &len| n.checked_mul(len));
        let Some(elems) = elems else {
            return Err(CudaError::argument(format!(
                "{name} of shape {:?} has too many elements to count",
                self.shape
            )));
        };
        places.read_array(name, self.address, self.ty.to_string(), self.elem_bytes(), elems)
    }
}
