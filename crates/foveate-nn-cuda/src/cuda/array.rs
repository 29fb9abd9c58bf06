//! Arrays in device memory, and where parts of them lie.

use std::sync::Arc;
use std::time::Duration;

use foveate::Layout;
use foveate_gpu::abi::Address;
use foveate_gpu::driver::{Allocation, HostArray, default_timeout};
use foveate_gpu::{DeviceArray, DeviceTensor, ElementType, GpuError};
use foveate_nn::{Array, NnError, NnErrorKind, Part, PartMut};
use foveate_tensor::DType;

/// Elements in the memory of a GPU; none before [`foveate_nn::Blocks::resize`].
#[derive(Debug)]
pub struct CudaArray {
    /// Nothing where there are no elements.
    memory: Option<Memory>,
    pub(super) dtype: DType,
    pub(super) elems: usize,
}

/// Memory of an array, at least as long as its elements.
#[derive(Debug)]
pub(super) enum Memory {
    Device {
        of: Arc<Allocation>,
        /// The first byte, where it lies in the memory of another array.
        within: Option<usize>,
    },
    /// Of the host: no operand of a block, but what passes through the device in pieces.
    Host(HostArray),
}

impl Memory {
    /// All of an allocation.
    pub fn of_device(memory: Allocation) -> Self {
        Self::Device { of: Arc::new(memory), within: None }
    }
}

impl Default for CudaArray {
    fn default() -> Self {
        Self { memory: None, dtype: DType::F32, elems: 0 }
    }
}

impl Array for CudaArray {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn elems(&self) -> usize {
        self.elems
    }

    fn address(&self) -> Address {
        self.address_of(0)
    }
}

impl CudaArray {
    /// Makes it hold `elems` elements of `dtype` in memory of its own, of the host or of the device. Where it has
    /// less of that, `take` takes so many bytes; what it had is given back before, so that they may be the same.
    pub(super) fn fit(
        &mut self,
        name: &'static str,
        (dtype, elems): (DType, usize),
        on_host: bool,
        take: impl FnOnce(usize) -> Result<Memory, NnError>,
    ) -> Result<(), NnError> {
        let bytes = elems.checked_mul(dtype.bytes()).ok_or(NnErrorKind::Memory { name, elems })?;
        let own = match &self.memory {
            Some(Memory::Device { of, within: None }) if !on_host => of.bytes(),
            Some(Memory::Host(host)) if on_host => host.bytes(),
            _ => 0,
        };
        if own < bytes.max(1) {
            (self.memory, self.elems) = (None, 0);
            self.memory = Some(take(bytes)?);
        }
        (self.dtype, self.elems) = (dtype, elems);
        Ok(())
    }

    /// Its memory, where that is the host's.
    pub(super) fn on_host(&self) -> Option<&HostArray> {
        match &self.memory {
            Some(Memory::Host(host)) => Some(host),
            _ => None,
        }
    }

    /// Goes into the memory of `other` from byte `start` on; false where that has fewer than `bytes`.
    pub(super) fn set_within(&mut self, other: &Self, start: usize, bytes: usize) -> bool {
        let (of, within) = match &other.memory {
            Some(Memory::Device { of, within }) => (of, within.unwrap_or(0)),
            Some(Memory::Host(_)) => return false,
            None => return bytes == 0,
        };
        let start = within.saturating_add(start);
        let fits = start.checked_add(bytes).is_some_and(|end| end <= of.bytes());
        if fits {
            self.memory = Some(Memory::Device { of: Arc::clone(of), within: Some(start) });
        }
        fits
    }

    /// Sets `bytes` bytes from byte `start` on.
    pub(super) fn fill_at(&self, start: usize, byte: u8, bytes: usize) -> Result<(), GpuError> {
        match &self.memory {
            Some(Memory::Device { of, within }) => {
                of.fill_at(within.unwrap_or(0) + start, byte, bytes)
            }
            Some(Memory::Host(host)) => host.fill(start, byte, bytes, default_timeout()),
            None => {
                assert_eq!(bytes, 0, "the array has no memory");
                Ok(())
            }
        }
    }

    /// Copies `data` to byte `start` and those behind it.
    pub(super) fn write_at(&self, start: usize, data: &[u8]) -> Result<(), GpuError> {
        match &self.memory {
            Some(Memory::Device { of, within }) => of.write_at(within.unwrap_or(0) + start, data),
            Some(Memory::Host(host)) => {
                host.change(start, data.len(), default_timeout(), |some| some.copy_from_slice(data))
            }
            None => {
                assert_eq!(data.len(), 0, "the array has no memory");
                Ok(())
            }
        }
    }

    /// Waits for the bytes from `start` on, at most `limit`, and copies them to `data`.
    pub(super) fn read_at(
        &self,
        start: usize,
        data: &mut [u8],
        limit: Duration,
    ) -> Result<(), GpuError> {
        match &self.memory {
            Some(Memory::Device { of, within }) => {
                of.read_at(within.unwrap_or(0) + start, data, limit)
            }
            Some(Memory::Host(host)) => host.read(start, data, limit),
            None => {
                assert_eq!(data.len(), 0, "the array has no memory");
                Ok(())
            }
        }
    }

    /// Where element `at` lies.
    fn address_of(&self, at: usize) -> Address {
        let start = match &self.memory {
            Some(Memory::Device { of, within }) => of.address() + within.unwrap_or(0) as Address,
            // The check of a block's operands names it.
            Some(Memory::Host(host)) => host.address(),
            None => 0,
        };
        start + (at * self.dtype.bytes()) as Address
    }

    /// All elements, in rows of `width`.
    pub(super) fn rows(&self, width: usize) -> DeviceTensor<2> {
        Part::whole(self).rows(width)
    }

    /// All elements.
    pub(super) fn vector(&self) -> DeviceTensor<1> {
        Part::whole(self).vector()
    }
}

/// A range of elements in device memory, as operands of blocks.
pub(super) trait Place {
    /// Address of the first, dtype, number.
    fn place(&self) -> (Address, DType, usize);

    /// A matrix with rows of `width`.
    fn rows(&self, width: usize) -> DeviceTensor<2> {
        let (address, dtype, elems) = self.place();
        DeviceTensor::contiguous(address, dtype, [elems / width.max(1), width])
    }

    /// A matrix `[1, rows, width]` as products take it.
    fn matrix(&self, width: usize) -> DeviceTensor<3> {
        let (address, dtype, elems) = self.place();
        DeviceTensor::contiguous(address, dtype, [1, elems / width.max(1), width])
    }

    fn vector(&self) -> DeviceTensor<1> {
        let (address, dtype, elems) = self.place();
        DeviceTensor::contiguous(address, dtype, [elems])
    }
}

impl Place for Part<'_, CudaArray> {
    fn place(&self) -> (Address, DType, usize) {
        (self.array.address_of(self.place.start), self.array.dtype, self.place.len())
    }
}

impl Place for PartMut<'_, CudaArray> {
    fn place(&self) -> (Address, DType, usize) {
        (self.array.address_of(self.place.start), self.array.dtype, self.place.len())
    }
}

/// Elements from `first` on of a vector.
pub(super) fn part_of(vector: &DeviceTensor<1>, first: usize, len: usize) -> DeviceTensor<1> {
    let address = vector.start() + (first * vector.dtype.bytes()) as Address;
    DeviceTensor::contiguous(address, vector.dtype, [len])
}

/// Rows from `first` on of a matrix whose rows lie side by side.
pub(super) fn rows_of(matrix: &DeviceTensor<2>, first: usize, count: usize) -> DeviceTensor<2> {
    let [_, width] = matrix.layout.shape;
    let address = matrix.start() + (first * width * matrix.dtype.bytes()) as Address;
    DeviceTensor::contiguous(address, matrix.dtype, [count, width])
}

/// The matrix as products take it, or some of the columns of one.
pub(super) fn batched(matrix: &DeviceTensor<2>) -> DeviceTensor<3> {
    let ([rows, width], [stride, elem]) = (matrix.layout.shape, matrix.layout.strides);
    let strides = [rows * stride, stride, elem];
    let layout = Layout::strided([1, rows, width], strides, matrix.layout.offset);
    DeviceTensor { address: matrix.address, dtype: matrix.dtype, layout }
}

/// f64 numbers in memory of their own.
pub(super) fn numbers<'a>(memory: &Allocation, len: &'a [usize; 1]) -> DeviceArray<'a> {
    DeviceArray::new(memory.address(), ElementType::F64, len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_columns_of_a_matrix_are_a_factor_where_they_lie() {
        let columns = Layout::strided([5, 3], [8, 1], 2);
        let some = DeviceTensor { address: 512, dtype: DType::BF16, layout: columns };
        let factor = batched(&some);
        assert_eq!((factor.start(), factor.layout.shape), (516, [1, 5, 3]));
        assert_eq!(factor.layout.strides[1..], [8, 1]);
    }
}
