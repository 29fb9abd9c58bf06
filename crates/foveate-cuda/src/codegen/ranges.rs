//! Smallest and largest elements of stretches of a captured buffer, as `kernels/ranges.cuh`
//! reads them.

use foveate_mods::{AnyBuffer, BufferData};

/// Elements of a block, `RANGE_BLOCK` on the device.
const BLOCK: usize = 32;

/// The range table of a buffer: `[levels, rows, blocks]` pairs of 4-byte ends, little-endian. A
/// row is the last axis, cut into blocks of 32 elements; entry `i` of level `k` holds blocks
/// `i..i + 2^k` of its row. Time and memory are `n/32 · log₂` of the blocks of a row, about an
/// eighth of the buffer for each level.
pub fn range_table(buffer: &AnyBuffer) -> Vec<u8> {
    let length = *buffer.shape().last().expect("a buffer has an axis");
    match buffer.data() {
        data if data.is_empty() => vec![0; 8],
        BufferData::Bool(v) => {
            let ints: Vec<i32> = v.iter().map(|&x| i32::from(x)).collect();
            bytes(&levels(&ints, length, |x, y| x < y), |x| x.to_le_bytes())
        }
        BufferData::I32(v) => bytes(&levels(v, length, |x, y| x < y), |x| x.to_le_bytes()),
        // A NaN is below and above everything, so it takes both ends.
        BufferData::F32(v) => {
            let below = |x: f32, y: f32| x.is_nan() || x < y;
            bytes(&levels(v, length, below), |x| x.to_le_bytes())
        }
    }
}

type Ends<T> = (T, T);

fn bytes<T: Copy>(levels: &[Ends<T>], of: impl Fn(T) -> [u8; 4]) -> Vec<u8> {
    levels.iter().flat_map(|&(lo, hi)| [of(lo), of(hi)]).flatten().collect()
}

fn levels<T: Copy>(elems: &[T], length: usize, below: impl Fn(T, T) -> bool) -> Vec<Ends<T>> {
    let join = |a: Ends<T>, b: Ends<T>| {
        let lo = if below(b.0, a.0) { b.0 } else { a.0 };
        let hi = if below(a.1, b.1) { b.1 } else { a.1 };
        (lo, hi)
    };
    let mut all: Vec<Ends<T>> = Vec::new();
    for row in elems.chunks(length) {
        all.extend(row.chunks(BLOCK).map(|block| {
            let one = |&x: &T| (x, x);
            block[1..].iter().map(one).fold(one(&block[0]), join)
        }));
    }
    let blocks = length.div_ceil(BLOCK);
    let level = all.len();
    let mut reach = 1;
    while 2 * reach <= blocks {
        let from = all.len() - level;
        for i in from..from + level {
            // Past the end of its row an entry is not asked for.
            let other = if (i - from) % blocks + reach < blocks { i + reach } else { i };
            all.push(join(all[i], all[other]));
        }
        reach *= 2;
    }
    all
}
