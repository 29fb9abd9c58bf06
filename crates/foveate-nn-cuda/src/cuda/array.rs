//! Arrays in device memory, and where parts of them lie.

use foveate_gpu::abi::Address;
use foveate_gpu::driver::Allocation;
use foveate_gpu::{DeviceArray, DeviceTensor, ElementType};
use foveate_nn::{Array, Part, PartMut};
use foveate_tensor::DType;

/// Elements in the memory of a GPU; none before [`foveate_nn::Blocks::resize`].
#[derive(Debug)]
pub struct CudaArray {
    /// At least as long as the elements.
    pub(super) memory: Option<Allocation>,
    pub(super) dtype: DType,
    pub(super) elems: usize,
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
}

impl CudaArray {
    /// Where element `at` lies.
    fn address(&self, at: usize) -> Address {
        let start = self.memory.as_ref().map_or(0, Allocation::address);
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
        (self.array.address(self.place.start), self.array.dtype, self.place.len())
    }
}

impl Place for PartMut<'_, CudaArray> {
    fn place(&self) -> (Address, DType, usize) {
        (self.array.address(self.place.start), self.array.dtype, self.place.len())
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

/// The matrix as products take it.
pub(super) fn batched(matrix: &DeviceTensor<2>) -> DeviceTensor<3> {
    let [rows, width] = matrix.layout.shape;
    DeviceTensor::contiguous(matrix.start(), matrix.dtype, [1, rows, width])
}

/// f64 numbers in memory of their own.
pub(super) fn numbers<'a>(memory: &Allocation, len: &'a [usize; 1]) -> DeviceArray<'a> {
    DeviceArray::new(memory.address(), ElementType::F64, len)
}
