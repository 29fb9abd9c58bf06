//! What a problem is tuned on: random operands in device memory, and memory for results.

use foveate_problem::{Arrangement, Dims};
use foveate_tensor::{DType, F8E4M3};
use half::{bf16, f16};

use crate::compile::params::Address;
use crate::error::CudaError;
use crate::plan::CudaPlan;
use foveate_gpu::DeviceTensor;
use foveate_gpu::driver::{Allocation, Pool};

/// Operands and destinations. Those of the backward are empty where none is tuned.
pub(super) struct OnDevice {
    _blocks: Vec<Allocation>,
    pub q: DeviceTensor,
    pub k: DeviceTensor,
    pub v: DeviceTensor,
    /// The page table, and its entries for each batch entry.
    pub table: Option<(Address, usize)>,
    pub out: DeviceTensor,
    pub lse: DeviceTensor<3>,
    pub d_out: DeviceTensor,
    pub dq: DeviceTensor,
    pub dk: DeviceTensor,
    pub dv: DeviceTensor,
    pub captures: Vec<(String, DeviceTensor<1>)>,
}

impl OnDevice {
    pub fn new(
        plan: &CudaPlan,
        dims: &Dims,
        arrangement: Arrangement<'_>,
        backward: bool,
    ) -> Result<Self, CudaError> {
        let pool = &plan.pool(plan.engine.queue());
        let mut allocations = Vec::new();
        let [q, mut k, mut v] = [dims.q_shape(), dims.k_shape(), dims.v_shape()];
        let mut table = None;
        if let Arrangement::Paged { page_size, .. } = arrangement {
            let page_size = page_size.max(1);
            let entries = dims.len_k.div_ceil(page_size);
            let pages = scattered(dims.batch * entries);
            [k, v] = [k, v].map(|[_, heads, _, dim]| [pages.len(), heads, page_size, dim]);
            let allocation = pool.upload(bytemuck::cast_slice(&pages))?;
            table = Some((allocation.address(), entries));
            allocations.push(allocation);
        }
        let noise = noise(plan.dtype);
        let mut filled = |shape: [usize; 4]| {
            let elems: usize = shape.iter().product();
            let allocation = pool.take(elems * plan.dtype.bytes())?;
            for start in (0..allocation.bytes()).step_by(noise.len()) {
                allocation
                    .write_at(start, &noise[..noise.len().min(allocation.bytes() - start)])?;
            }
            let tensor = DeviceTensor::contiguous(allocation.address(), plan.dtype, shape);
            allocations.push(allocation);
            Ok::<_, CudaError>(tensor)
        };
        let (of_q, of_k, of_v) = (filled(q)?, filled(k)?, filled(v)?);
        let out = filled(dims.out_shape())?;
        let mut wanted = |shape: [usize; 4]| filled(if backward { shape } else { [0; 4] });
        let (dq, dk, dv) = (wanted(q)?, wanted(k)?, wanted(v)?);
        let d_out = wanted(dims.out_shape())?;
        let lse = empty(pool, &mut allocations, dims.row_shape())?;
        let mut captures = Vec::new();
        for buffer in plan.spec.learned().iter().filter(|_| backward) {
            let into = empty(pool, &mut allocations, [buffer.elems()])?;
            captures.push((buffer.name().to_owned(), into));
        }
        let (q, k, v) = (of_q, of_k, of_v);
        Ok(Self { _blocks: allocations, q, k, v, table, out, lse, d_out, dq, dk, dv, captures })
    }
}

/// Pages 0 to `count` in an order without neighbours, as a cache that has been in use for a while
/// hands them out.
fn scattered(count: usize) -> Vec<i32> {
    // A prime: each page once, unless there are a multiple of it.
    const STEP: usize = 1_000_003;
    (0..count).map(|i| (i * STEP % count) as i32).collect()
}

/// Memory for f32 numbers.
fn empty<const N: usize>(
    pool: &Pool,
    allocations: &mut Vec<Allocation>,
    shape: [usize; N],
) -> Result<DeviceTensor<N>, CudaError> {
    let allocation = pool.take(4 * shape.iter().product::<usize>())?;
    let tensor = DeviceTensor::contiguous(allocation.address(), DType::F32, shape);
    allocations.push(allocation);
    Ok(tensor)
}

/// About a million random numbers of mean 0 and variance 1. Their count is odd and has no small
/// divisors, so that rows of a tensor that repeats them differ.
fn noise(dtype: DType) -> Vec<u8> {
    const COUNT: i32 = 1_000_003;
    let number = |i: i32| {
        let bytes = foveate_mods::ir::mix(1, i).to_le_bytes();
        let sum: i32 = bytes.iter().map(|&b| i32::from(b)).sum();
        // Four uniform bytes have the variance 4 (256² − 1) / 12.
        (sum - 510) as f32 / (4.0 * 65535.0 / 12.0f32).sqrt()
    };
    let numbers = (0..COUNT).map(number);
    match dtype {
        DType::F16 => numbers.flat_map(|x| f16::from_f32(x).to_le_bytes()).collect(),
        DType::BF16 => numbers.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
        DType::F8E4M3 => numbers.map(|x| F8E4M3::from_f32(x).to_bits()).collect(),
        _ => numbers.flat_map(f32::to_le_bytes).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_is_handed_out_once() {
        for count in [0, 1, 2, 7, 1000, 8192] {
            let mut pages = scattered(count);
            assert!(count < 4 || pages.windows(2).any(|pair| (pair[0] - pair[1]).abs() > 1));
            pages.sort_unstable();
            assert!(pages.into_iter().eq(0..count as i32), "{count}");
        }
    }
}
