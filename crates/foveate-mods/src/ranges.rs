//! Smallest and largest element of any stretch of a captured buffer.
//!
//! Elements are taken in blocks of 64; the blocks' ranges go into a sparse table, so a stretch
//! is two overlapping powers of two of blocks and at most two ends of single elements. For `n`
//! elements that is about `n/8 · log₂(n/64) / 8` words, an eighth to a half of the buffer.

use crate::interval::Interval;
use crate::value::{BufferData, ScalarValue, Type};

const BLOCK: usize = 64;

/// Leading axes with up to this many rows are joined row by row; beyond, as one stretch.
const ROWS: usize = 64;

#[derive(Clone, Debug)]
pub(crate) struct RangeTable {
    /// `levels[k][i]` holds blocks `i..i + 2^k`.
    levels: Vec<Vec<Interval>>,
}

impl RangeTable {
    pub(crate) fn new(elems: &BufferData) -> Self {
        let len = elems.len();
        let blocks = (0..len).step_by(BLOCK);
        let first: Vec<Interval> = blocks.map(|i| scan(elems, i, (i + BLOCK).min(len))).collect();
        let mut levels = vec![first];
        let mut reach = 1;
        while 2 * reach <= levels[0].len() {
            let below = levels.last().expect("level 0 is there");
            let pairs = below.iter().zip(&below[reach..]);
            let level = pairs.map(|(a, b)| a.union(*b)).collect();
            levels.push(level);
            reach *= 2;
        }
        Self { levels }
    }

    /// Range of the elements that indices in the given ranges read, clamped to the axes of `shape`.
    /// `elems` are those that the table was made of.
    pub(crate) fn range(
        &self,
        elems: &BufferData,
        shape: &[usize],
        index: impl Iterator<Item = Interval>,
    ) -> Interval {
        if elems.is_empty() {
            return Interval::one(match elems.ty() {
                Type::Bool => ScalarValue::Bool(false),
                Type::I32 => ScalarValue::I32(0),
                Type::F32 => ScalarValue::F32(0.0),
            });
        }
        let mut axes: Vec<(usize, usize, usize)> = Vec::with_capacity(shape.len());
        for (i, &len) in index.zip(shape) {
            let Interval::I32 { lo, hi } = i else { unreachable!("an index is i32") };
            let clamp = |i: i32| (i.max(0) as usize).min(len - 1);
            axes.push((clamp(lo), clamp(hi), len));
        }
        let (last, leading) = axes.split_last().expect("a buffer has an axis");
        let rows: usize = leading.iter().map(|(lo, hi, _)| hi - lo + 1).product();
        let flat = |pick: &dyn Fn(&(usize, usize, usize)) -> usize| {
            leading.iter().fold(0, |at, axis| at * axis.2 + pick(axis)) * last.2
        };
        if rows > ROWS {
            return self.stretch(elems, flat(&|a| a.0) + last.0, flat(&|a| a.1) + last.1 + 1);
        }
        let mut all: Option<Interval> = None;
        for row in 0..rows {
            let mut rest = row;
            let mut at = 0;
            let mut scale = 1;
            for &(lo, hi, len) in leading.iter().rev() {
                let n = hi - lo + 1;
                at += (lo + rest % n) * scale;
                rest /= n;
                scale *= len;
            }
            let base = at * last.2;
            let range = self.stretch(elems, base + last.0, base + last.1 + 1);
            all = Some(all.map_or(range, |a| a.union(range)));
        }
        all.expect("ranges are not empty")
    }

    fn stretch(&self, elems: &BufferData, from: usize, to: usize) -> Interval {
        let (first, last) = (from.div_ceil(BLOCK), to / BLOCK);
        if first >= last {
            return scan(elems, from, to);
        }
        let level = (last - first).ilog2() as usize;
        let blocks = &self.levels[level];
        let mut range = blocks[first].union(blocks[last - (1 << level)]);
        if from < first * BLOCK {
            range = range.union(scan(elems, from, first * BLOCK));
        }
        if last * BLOCK < to {
            range = range.union(scan(elems, last * BLOCK, to));
        }
        range
    }
}

fn scan(elems: &BufferData, from: usize, to: usize) -> Interval {
    match elems {
        BufferData::Bool(v) => {
            let yes = v[from..to].iter().any(|&x| x);
            let no = v[from..to].iter().any(|&x| !x);
            Interval::Bool { yes, no }
        }
        BufferData::I32(v) => {
            let lo = v[from..to].iter().copied().fold(i32::MAX, i32::min);
            let hi = v[from..to].iter().copied().fold(i32::MIN, i32::max);
            Interval::I32 { lo, hi }
        }
        BufferData::F32(v) => {
            if v[from..to].iter().any(|x| x.is_nan()) {
                return Interval::ANY_F32;
            }
            let lo = v[from..to].iter().copied().fold(f32::INFINITY, f32::min);
            let hi = v[from..to].iter().copied().fold(f32::NEG_INFINITY, f32::max);
            Interval::F32 { lo, hi, nan: false }
        }
    }
}
