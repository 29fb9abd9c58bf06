//! Numbers of the host as elements in device memory, and back.

use foveate_gpu::Queue;
use foveate_gpu::abi::Address;
use foveate_gpu::driver::default_timeout;
use foveate_nn::moments::{self, BLOCK, Moment};
use foveate_nn::{NnError, PartMut, Weights, join_master, split_master};
use foveate_tensor::DType;
use half::bf16;

use super::array::{CudaArray, Place};
use super::failed;

/// Elements that are converted at once on their way to and from the device.
const CONVERTED: usize = 1 << 20;

/// Copies elements to the device, a few at a time as bytes.
pub fn write(
    into: &CudaArray,
    first: usize,
    values: &[f32],
    bytes: impl Fn(&[f32]) -> Vec<u8>,
) -> Result<(), NnError> {
    let size = into.dtype.bytes();
    for (i, some) in values.chunks(CONVERTED).enumerate() {
        let at = (first + i * CONVERTED) * size;
        into.write_at(at, &bytes(some)).map_err(|e| failed(&e))?;
    }
    Ok(())
}

/// Copies the first `period` elements of a part over the others, twice as many at a time.
pub fn repeat(queue: &Queue, part: &PartMut<'_, CudaArray>, period: usize) -> Result<(), NnError> {
    let (start, dtype, elems) = part.place();
    let bytes = elems * dtype.bytes();
    let mut there = period.clamp(1, elems.max(1)) * dtype.bytes();
    while there < bytes {
        let some = there.min(bytes - there);
        let stream = queue.stream();
        // SAFETY: both ranges lie in the part, whose memory is of the queue's own pool.
        unsafe { stream.copy(start + there as Address, start, stream.device(), some) }
            .map_err(|e| failed(&e))?;
        there += some;
    }
    Ok(())
}

/// Copies bytes of an array back, a few elements at a time.
pub fn read(
    from: &CudaArray,
    first: usize,
    count: usize,
    mut take: impl FnMut(usize, &[u8]),
) -> Result<(), NnError> {
    let size = from.dtype.bytes();
    for start in (0..count).step_by(CONVERTED) {
        let mut bytes = vec![0; CONVERTED.min(count - start) * size];
        from.read_at((first + start) * size, &mut bytes, default_timeout())
            .map_err(|e| failed(&e))?;
        take(start, &bytes);
    }
    Ok(())
}

/// Copies numbers to the device, each rounded to the nearest.
pub fn write_numbers(into: &CudaArray, first: usize, values: &[f32]) -> Result<(), NnError> {
    write(into, first, values, |some| narrowed(into.dtype, some))
}

/// Copies as many numbers back as `values` holds.
pub fn read_numbers(from: &CudaArray, first: usize, values: &mut [f32]) -> Result<(), NnError> {
    let dtype = from.dtype;
    read(from, first, values.len(), |start, bytes| {
        let values = &mut values[start..][..bytes.len() / dtype.bytes()];
        values.iter_mut().enumerate().for_each(|(i, x)| *x = widened(dtype, bytes, i));
    })
}

/// Copies masters to the device, as weights and what completes them.
pub fn write_weights(
    into: &Weights<CudaArray>,
    first: usize,
    masters: &[f32],
) -> Result<(), NnError> {
    // What is not trained has no master.
    if first >= into.remainders.elems {
        return write_numbers(&into.array, first, masters);
    }
    write(&into.array, first, masters, |some| each_as(some, |x| split_master(x).0.to_ne_bytes()))?;
    write(&into.remainders, first, masters, |some| {
        each_as(some, |x| split_master(x).1.to_ne_bytes())
    })
}

/// Copies masters back.
pub fn read_weights(
    from: &Weights<CudaArray>,
    first: usize,
    masters: &mut [f32],
) -> Result<(), NnError> {
    let count = masters.len();
    if first >= from.remainders.elems {
        return read_numbers(&from.array, first, masters);
    }
    let halves = |bytes: &[u8]| -> Vec<u16> {
        bytes.chunks_exact(2).map(|b| u16::from_ne_bytes([b[0], b[1]])).collect()
    };
    let mut remainders = Vec::with_capacity(count);
    read(&from.remainders, first, count, |_, bytes| remainders.extend(halves(bytes)))?;
    read(&from.array, first, count, |start, bytes| {
        for (i, weight) in halves(bytes).into_iter().enumerate() {
            masters[start + i] = join_master(weight, remainders[start + i]);
        }
    })
}

/// Elements as bytes of `dtype`, rounded to the nearest.
pub fn narrowed(dtype: DType, values: &[f32]) -> Vec<u8> {
    match dtype {
        DType::BF16 => each_as(values, |x| bf16::from_f32(x).to_ne_bytes()),
        DType::F16 => each_as(values, |x| half::f16::from_f32(x).to_ne_bytes()),
        _ => each_as(values, f32::to_ne_bytes),
    }
}

/// The bytes of each number, one after another.
pub fn each_as<const N: usize>(values: &[f32], bytes: impl Fn(f32) -> [u8; N]) -> Vec<u8> {
    let mut all = vec![0; N * values.len()];
    let each = all.as_chunks_mut().0.iter_mut().zip(values);
    each.for_each(|(into, &x)| *into = bytes(x));
    all
}

/// Element `i` of bytes of `dtype`.
pub fn widened(dtype: DType, bytes: &[u8], i: usize) -> f32 {
    let two = || [bytes[2 * i], bytes[2 * i + 1]];
    match dtype {
        DType::BF16 => bf16::from_ne_bytes(two()).to_f32(),
        DType::F16 => half::f16::from_ne_bytes(two()).to_f32(),
        _ => {
            f32::from_ne_bytes([bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]])
        }
    }
}

/// The blocks of a moment of 8 bits that elements lie in, as a moment of their own.
struct Blocks {
    /// The first of them.
    first: usize,
    count: usize,
    /// Bytes from the start of the array to the scales of all blocks.
    scales: usize,
}

impl Blocks {
    fn of(elems: usize, first: usize, len: usize) -> Self {
        let (start, end) = (first / BLOCK, (first + len).div_ceil(BLOCK));
        Self { first: start, count: end - start, scales: elems.div_ceil(BLOCK) * BLOCK }
    }

    /// Where their codes lie and how many bytes these are; then their scales.
    fn places(&self) -> [(usize, usize); 2] {
        [(self.first * BLOCK, self.count * BLOCK), (self.scales + self.first * 4, self.count * 4)]
    }

    fn read(&self, from: &CudaArray) -> Result<Vec<f32>, NnError> {
        let mut bytes = Vec::new();
        for (at, len) in self.places() {
            let mut part = vec![0; len];
            from.read_at(at, &mut part, default_timeout()).map_err(|e| failed(&e))?;
            bytes.extend(part);
        }
        Ok(bytes.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect())
    }
}

/// Copies elements of a moment of 8 bits to the device, each rounded to the nearest.
pub fn write_blocks(
    into: &CudaArray,
    moment: Moment,
    elems: usize,
    first: usize,
    values: &[f32],
) -> Result<(), NnError> {
    for (i, some) in values.chunks(CONVERTED).enumerate() {
        let first = first + i * CONVERTED;
        let blocks = Blocks::of(elems, first, some.len());
        let (mut words, own) = (blocks.read(into)?, blocks.count * BLOCK);
        moments::write(moment, &mut words, own, first - blocks.first * BLOCK, some);
        let mut bytes: &[u8] = bytemuck::cast_slice(&words);
        for (at, len) in blocks.places() {
            let (part, rest) = bytes.split_at(len);
            into.write_at(at, part).map_err(|e| failed(&e))?;
            bytes = rest;
        }
    }
    Ok(())
}

/// Copies elements of a moment of 8 bits back.
pub fn read_blocks(
    from: &CudaArray,
    moment: Moment,
    elems: usize,
    first: usize,
    values: &mut [f32],
) -> Result<(), NnError> {
    for (i, some) in values.chunks_mut(CONVERTED).enumerate() {
        let first = first + i * CONVERTED;
        let blocks = Blocks::of(elems, first, some.len());
        let words = blocks.read(from)?;
        moments::read(moment, &words, blocks.count * BLOCK, first - blocks.first * BLOCK, some);
    }
    Ok(())
}
