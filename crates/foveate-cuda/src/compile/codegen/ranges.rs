//! What range tables of captured buffers take: smallest and largest elements of stretches, made by
//! `kernels/range_table.cu` and read as `kernels/ranges.cuh` says.

use foveate_mods::AnyBuffer;

use crate::compile::params::{Address, RangeTableParams};
use crate::error::CudaError;

/// Elements of a block, `RANGE_BLOCK` on the device.
const BLOCK: usize = 32;

/// Bytes of the range table of a buffer of `shape`: `[levels, rows, blocks]` pairs of 4-byte ends.
/// A row is the last axis, cut into blocks of 32 elements; entry `i` of level `k` holds blocks
/// `i..i + 2^k` of its row. A level is an eighth to a quarter of the buffer.
pub fn range_table_bytes(shape: &[usize]) -> usize {
    let Some((&length, axes)) = shape.split_last().filter(|_| !shape.contains(&0)) else {
        return 0;
    };
    let blocks = length.div_ceil(BLOCK);
    let levels = blocks.ilog2() as usize + 1;
    8 * axes.iter().product::<usize>() * blocks * levels
}

/// The arguments of the kernel that makes the range table of `buffer`, whose element of index 0 is
/// at `elems`.
///
/// # Errors
/// When an axis is longer than i32 indices reach, or there are more than nine.
pub(crate) fn range_table_params(
    buffer: &AnyBuffer,
    elems: Address,
    table: Address,
) -> Result<RangeTableParams, CudaError> {
    let wrong = |what: String| {
        let name = buffer.name();
        Err(CudaError::argument(format!(
            "captured buffer `{name}`, which a mask reads, has {what}"
        )))
    };
    let (shape, strides) = (buffer.shape(), buffer.strides());
    let mut params = RangeTableParams {
        elems,
        table,
        rows: 0,
        length: 0,
        ty: buffer.element() as i32,
        step: 1,
        strides: [0; 8],
        lengths: [1; 8],
        axes: 0,
    };
    let Some((&length, leading)) = shape.split_last() else { return Ok(params) };
    if leading.len() > params.lengths.len() {
        return wrong(format!("{} axes; up to 9 can be bounded", shape.len()));
    }
    if let Some(len) = shape.iter().find(|&&len| i32::try_from(len).is_err()) {
        return wrong(format!("an axis of length {len}; indices are i32"));
    }
    for (axis, (&len, &stride)) in leading.iter().zip(strides).enumerate() {
        (params.lengths[axis], params.strides[axis]) = (len as i32, stride as i64);
    }
    params.rows = buffer.elems() as i64 / (length as i64).max(1);
    (params.length, params.axes) = (length as i32, leading.len() as i32);
    params.step = strides[shape.len() - 1] as i64;
    Ok(params)
}
