//! Programs evaluated at a single point.

use crate::arithmetic::{binary, cast, unary};
use crate::capture::AnyBuffer;
use crate::ir::Node;
use crate::point::Point;
use crate::program::Program;
use crate::value::{ScalarValue, Type};

use ScalarValue::{Bool, F32, I32};

/// A read of a captured buffer that cannot be had as it stands; the first one found is reported.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OutOfRange {
    /// An index outside its axis. The read is clamped to the axis.
    #[error(
        "captured buffer `{buffer}` was read at index {index} of axis {axis}, which has length \
         {len}; make the buffer as long as the positions that read it"
    )]
    Index {
        /// Name of the buffer.
        buffer: String,
        /// Axis of the index.
        axis: usize,
        /// The index.
        index: i32,
        /// Length of the axis.
        len: usize,
    },
    /// An i64 element that no i32 holds. Its lower 32 bits are read.
    #[error(
        "captured buffer `{buffer}` holds {value}, and masks and scores compute with i32; number \
         what it holds from 0 on"
    )]
    Value {
        /// Name of the buffer.
        buffer: String,
        /// The element.
        value: i64,
    },
}

/// The position that an index means on an axis of length `len`: itself, or with `from_end` counted
/// from the end where it is negative. It may be outside the axis.
#[inline(always)]
pub(crate) fn position(index: i32, len: usize, from_end: bool) -> i64 {
    let index = i64::from(index);
    if from_end && index < 0 { index.saturating_add_unsigned(len as u64) } else { index }
}

/// The position that is read for index `index` of an axis of length `len`, which is not 0.
#[inline(always)]
pub(crate) fn clamped(index: i32, len: usize, from_end: bool) -> usize {
    (position(index, len, from_end).max(0) as usize).min(len.saturating_sub(1))
}

/// Place in memory of clamped indices, and the first that had to be clamped. An empty buffer has no
/// places: reads of it give 0.
pub(crate) fn locate(
    buffer: &AnyBuffer,
    index: impl Iterator<Item = i32>,
    from_end: bool,
) -> (Option<usize>, Option<OutOfRange>) {
    let mut at = buffer.offset();
    let mut wrong = None;
    let axes = buffer.shape().iter().zip(buffer.strides());
    for (axis, (index, (&len, stride))) in index.zip(axes).enumerate() {
        let position = position(index, len, from_end);
        if usize::try_from(position).is_ok_and(|p| p < len) {
            at += position as usize * stride;
            continue;
        }
        at += clamped(index, len, from_end) * stride;
        let buffer = || buffer.name().to_owned();
        wrong.get_or_insert_with(|| OutOfRange::Index { buffer: buffer(), axis, index, len });
    }
    let at = (buffer.elems() > 0).then_some(at);
    let wide = at.and_then(|at| buffer.elements().too_wide(at));
    let wide = || wide.map(|value| OutOfRange::Value { buffer: buffer.name().to_owned(), value });
    (at, wrong.or_else(wide))
}

/// Element at a place in memory; zero for the missing place of an empty buffer.
pub(crate) fn element(buffer: &AnyBuffer, at: Option<usize>) -> ScalarValue {
    match (at, buffer.ty()) {
        (Some(at), _) if !buffer.is_on_device() => buffer.elements().get(at),
        (_, Type::Bool) => Bool(false),
        (_, Type::I32) => I32(0),
        (_, Type::F32) => F32(0.0),
    }
}

impl Program {
    /// Every root's value at one point, in f32. Meant for tests and single values; rows are the
    /// business of [`crate::vector`].
    ///
    /// # Errors
    /// The first captured-buffer index outside its axis.
    pub fn eval(&self, point: &Point) -> Result<Vec<ScalarValue>, OutOfRange> {
        let graph = self.graph();
        let mut values: Vec<ScalarValue> = Vec::with_capacity(graph.nodes().len());
        for node in graph.nodes() {
            let value = match node {
                Node::Leaf(leaf) => point.leaf(*leaf),
                Node::Bool(v) => Bool(*v),
                Node::I32(v) => I32(*v),
                Node::F32(v) => F32(f32::from_bits(*v)),
                Node::Scalar(slot) => graph.scalars()[*slot as usize].value,
                Node::Load { buffer, index, from_end } => {
                    let buffer = &graph.buffers()[*buffer as usize];
                    let index = index.iter().map(|i| int(values[i.index()]));
                    let (at, wrong) = locate(buffer, index, *from_end);
                    if let Some(wrong) = wrong {
                        return Err(wrong);
                    }
                    element(buffer, at)
                }
                Node::Unary(op, x) => unary(*op, values[x.index()]),
                Node::Binary(op, x, y) => binary(*op, values[x.index()], values[y.index()]),
                Node::Select { cond, then, other } => {
                    if values[cond.index()] == Bool(true) {
                        values[then.index()]
                    } else {
                        values[other.index()]
                    }
                }
                Node::Cast(to, x) => cast(*to, values[x.index()]),
            };
            values.push(value);
        }
        Ok(self.roots().iter().map(|r| values[r.index()]).collect())
    }
}

pub(crate) fn int(v: ScalarValue) -> i32 {
    match v {
        I32(v) => v,
        _ => unreachable!("a graph is well-typed"),
    }
}
