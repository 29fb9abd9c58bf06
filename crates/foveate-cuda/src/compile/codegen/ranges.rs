//! What range tables of captured buffers take: smallest and largest elements of stretches, made by
//! `kernels/range_table.cu` and read as `kernels/ranges.cuh` says.

use foveate_mods::Type;

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

/// How kernels that take elements of any type are told which.
pub(crate) fn type_number(ty: Type) -> i32 {
    match ty {
        Type::Bool => 0,
        Type::I32 => 1,
        Type::F32 => 2,
    }
}
