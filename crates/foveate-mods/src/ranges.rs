//! Smallest and largest element of any stretch of a captured buffer.
//!
//! Elements are taken row-major in blocks of 64; the blocks' ranges go into a sparse table, so a
//! stretch is two overlapping powers of two of blocks and at most two ends of single elements. For
//! `n` elements that is about `n/8 · log₂(n/64) / 8` words, an eighth to a half of the buffer. An axis
//! of stride 0 is one element long here, so a buffer that is broadcast takes what its memory does.

use crate::elements::{Elements, Placed, RowMajor};
use crate::interval::Interval;
use crate::value::{ScalarValue, Type};

const BLOCK: usize = 64;

/// Leading axes with up to this many rows are joined row by row; beyond, as one stretch.
const ROWS: usize = 64;

#[derive(Clone, Debug)]
pub(crate) struct RangeTable {
    /// `levels[k][i]` holds blocks `i..i + 2^k`.
    levels: Vec<Vec<Interval>>,
    /// The shape without what is broadcast.
    shape: Vec<usize>,
    /// Whether the elements of that shape lie row-major in memory, from the buffer's offset on.
    dense: bool,
    /// An i64 that no i32 holds is among the elements.
    too_wide: bool,
}

impl RangeTable {
    pub(crate) fn new(buffer: Placed<'_>) -> Self {
        let axes = buffer.shape.iter().zip(buffer.strides);
        let shape: Vec<usize> =
            axes.map(|(&len, &stride)| if stride == 0 { len.min(1) } else { len }).collect();
        let mut step = 1;
        let dense = shape.iter().zip(buffer.strides).rev().all(|(&len, &stride)| {
            let next = len <= 1 || stride == step;
            step *= len;
            next
        });
        let elements = buffer.elements;
        let len = if elements.is_empty() { 0 } else { shape.iter().product() };
        let too_wide = matches!(elements, Elements::I64(_))
            && RowMajor::new(&shape, buffer.strides, buffer.offset)
                .any(|at| elements.too_wide(at).is_some());
        let mut table = Self { levels: Vec::new(), shape, dense, too_wide };
        let blocks = (0..len).step_by(BLOCK);
        let first: Vec<Interval> =
            blocks.map(|i| table.scan(buffer, i, (i + BLOCK).min(len))).collect();
        table.levels.push(first);
        let mut reach = 1;
        while 2 * reach <= table.levels[0].len() {
            let below = table.levels.last().expect("level 0 is there");
            let pairs = below.iter().zip(&below[reach..]);
            let level = pairs.map(|(a, b)| a.union(*b)).collect();
            table.levels.push(level);
            reach *= 2;
        }
        table
    }

    /// Whether a read may be one of an i64 that no i32 holds, and has to be reported.
    pub(crate) fn has_too_wide(&self) -> bool {
        self.too_wide
    }

    /// Range of the elements that positions in the given ranges read, clamped to the axes of
    /// `buffer`, of which the table was made.
    pub(crate) fn range(
        &self,
        buffer: Placed<'_>,
        position: impl Iterator<Item = Interval>,
    ) -> Interval {
        if self.levels[0].is_empty() {
            return Interval::one(match buffer.ty {
                Type::Bool => ScalarValue::Bool(false),
                Type::I32 => ScalarValue::I32(0),
                Type::F32 => ScalarValue::F32(0.0),
            });
        }
        let mut axes: Vec<(usize, usize, usize)> = Vec::with_capacity(self.shape.len());
        for (i, &len) in position.zip(&self.shape) {
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
            return self.stretch(buffer, flat(&|a| a.0) + last.0, flat(&|a| a.1) + last.1 + 1);
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
            let range = self.stretch(buffer, base + last.0, base + last.1 + 1);
            all = Some(all.map_or(range, |a| a.union(range)));
        }
        all.expect("ranges are not empty")
    }

    fn stretch(&self, buffer: Placed<'_>, from: usize, to: usize) -> Interval {
        let (first, last) = (from.div_ceil(BLOCK), to / BLOCK);
        if first >= last {
            return self.scan(buffer, from, to);
        }
        let level = (last - first).ilog2() as usize;
        let blocks = &self.levels[level];
        let mut range = blocks[first].union(blocks[last - (1 << level)]);
        if from < first * BLOCK {
            range = range.union(self.scan(buffer, from, first * BLOCK));
        }
        if last * BLOCK < to {
            range = range.union(self.scan(buffer, last * BLOCK, to));
        }
        range
    }

    /// Range of the elements `from..to`, row-major, one at least.
    fn scan(&self, buffer: Placed<'_>, from: usize, to: usize) -> Interval {
        let (elements, offset) = (buffer.elements, buffer.offset);
        if self.dense {
            return of_places(elements, offset + from..offset + to);
        }
        let mut rest = from;
        let mut index = vec![0; self.shape.len()];
        for (index, &len) in index.iter_mut().zip(&self.shape).rev() {
            *index = rest % len;
            rest /= len;
        }
        let places = RowMajor::starting(&self.shape, buffer.strides, offset, index);
        of_places(elements, places.take(to - from))
    }
}

/// Range of the elements at places in memory.
fn of_places(elements: Elements<'_>, places: impl Iterator<Item = usize>) -> Interval {
    fn bools(all: impl Iterator<Item = bool>) -> Interval {
        let (mut yes, mut no) = (false, false);
        all.for_each(|x| (yes, no) = (yes | x, no | !x));
        Interval::Bool { yes, no }
    }
    fn ints(all: impl Iterator<Item = i32>) -> Interval {
        let (lo, hi) = all.fold((i32::MAX, i32::MIN), |(lo, hi), x| (lo.min(x), hi.max(x)));
        Interval::I32 { lo, hi }
    }
    fn floats(all: impl Iterator<Item = f32>) -> Interval {
        let ends = (f32::INFINITY, f32::NEG_INFINITY, false);
        let (lo, hi, nan) =
            all.fold(ends, |(lo, hi, nan), x| (lo.min(x), hi.max(x), nan | x.is_nan()));
        if nan { Interval::ANY_F32 } else { Interval::F32 { lo, hi, nan } }
    }
    match elements {
        Elements::Bool(v) => bools(places.map(|at| v[at] != 0)),
        Elements::U8(v) => ints(places.map(|at| v[at].into())),
        Elements::I8(v) => ints(places.map(|at| v[at].into())),
        Elements::I16(v) => ints(places.map(|at| v[at].into())),
        Elements::I32(v) => ints(places.map(|at| v[at])),
        Elements::I64(v) => ints(places.map(|at| v[at] as i32)),
        Elements::F16(v) => floats(places.map(|at| v[at].to_f32())),
        Elements::BF16(v) => floats(places.map(|at| v[at].to_f32())),
        Elements::F32(v) => floats(places.map(|at| v[at])),
        Elements::F64(v) => floats(places.map(|at| v[at] as f32)),
    }
}
