//! Checks of operands, and how kernels find them.

use foveate_gpu::abi::Address;
use foveate_gpu::{DeviceArray, DeviceTensor, ElementType, GpuError};
use foveate_tensor::DType;

use crate::params::Rows;

/// Bytes that a thread reads at once.
const VECTOR_BYTES: usize = 16;

/// Checks a matrix `[rows, width]` of `dtype`.
pub(crate) fn matrix(
    name: &str,
    tensor: &DeviceTensor<2>,
    shape: [usize; 2],
    dtype: DType,
) -> Result<Rows, GpuError> {
    tensor.check_shape(name, shape)?;
    tensor.check_dtype(name, dtype)?;
    let [stride, elem] = tensor.layout.strides;
    if tensor.layout.groups.is_some() || (shape[1] > 1 && elem != 1) {
        return Err(GpuError::argument(format!(
            "{name} has {elem} elements from one of a row to the next; they must lie side by side"
        )));
    }
    let stride = i64::try_from(stride)
        .map_err(|_| GpuError::argument(format!("{name} has a row stride of {stride}")))?;
    Ok(Rows { data: tensor.start(), stride })
}

/// Checks a matrix whose rows lie side by side; gives its address.
pub(crate) fn dense(
    name: &str,
    tensor: &DeviceTensor<2>,
    shape: [usize; 2],
    dtype: DType,
) -> Result<Address, GpuError> {
    let Rows { data, stride } = matrix(name, tensor, shape, dtype)?;
    if shape[0] > 1 && stride as usize != shape[1] {
        return Err(GpuError::argument(format!("rows of {name} must lie side by side")));
    }
    Ok(data)
}

/// Checks integers `[len]`.
pub(crate) fn integers(name: &str, array: &DeviceArray<'_>, len: usize) -> Result<(), GpuError> {
    self::array(name, array, ElementType::I32, len)
}

/// Checks `[len]` elements without strides.
pub(crate) fn array(
    name: &str,
    array: &DeviceArray<'_>,
    element: ElementType,
    len: usize,
) -> Result<(), GpuError> {
    if array.element != element || array.shape != [len] || array.strides.is_some() {
        return Err(GpuError::argument(format!(
            "{name} is {} {:?}{}; it must be {element} [{len}]",
            array.element,
            array.shape,
            if array.strides.is_some() { " with strides" } else { "" }
        )));
    }
    Ok(())
}

/// A dtype of operands.
pub(crate) fn operand_dtype(name: &str, dtype: DType) -> Result<DType, GpuError> {
    match dtype {
        DType::F16 | DType::BF16 | DType::F32 => Ok(dtype),
        DType::F8E4M3 | DType::F64 => {
            Err(GpuError::argument(format!("{name} is {dtype}; blocks take f16, bf16 and f32")))
        }
    }
}

/// A number as kernels count.
pub(crate) fn count(name: &str, number: usize) -> Result<i32, GpuError> {
    i32::try_from(number)
        .map_err(|_| GpuError::argument(format!("{number} {name} are more than a kernel counts")))
}

/// Elements of `dtype` that a thread may read at once: 16 bytes where every row starts at a
/// multiple of 16 and `widths` are whole vectors, else one.
pub(crate) fn vector(dtype: DType, matrices: &[Rows], widths: &[usize]) -> usize {
    let elems = VECTOR_BYTES / dtype.bytes();
    let aligned = |rows: &Rows| {
        rows.data.is_multiple_of(VECTOR_BYTES as u64)
            && (rows.stride as usize).is_multiple_of(elems)
    };
    let whole = widths.iter().all(|width| width % elems == 0);
    if whole && matrices.iter().all(aligned) { elems } else { 1 }
}

/// Whether f32 numbers from an address on may be read and written beside vectors of operands.
pub(crate) fn whole_f32(address: Address) -> bool {
    address.is_multiple_of(VECTOR_BYTES as u64)
}

/// A vector as a matrix of one row.
pub(crate) fn one_row(tensor: &DeviceTensor<1>) -> Rows {
    Rows { data: tensor.start(), stride: 0 }
}
