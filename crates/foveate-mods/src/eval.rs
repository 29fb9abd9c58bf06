//! Programs evaluated at a single point.

use crate::arithmetic::{binary, cast, unary};
use crate::capture::AnyBuffer;
use crate::ir::Node;
use crate::point::Point;
use crate::program::Program;
use crate::value::{BufferData, ScalarValue};

use ScalarValue::{Bool, F32, I32};

/// A captured-buffer index outside its axis. Reads are clamped to the axis; the first one
/// found is reported.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "captured buffer `{buffer}` was read at index {index} of axis {axis}, which has length {len}; \
     make the buffer as long as the positions that read it"
)]
pub struct OutOfRange {
    /// Name of the buffer.
    pub buffer: String,
    /// Axis of the index.
    pub axis: usize,
    /// The index.
    pub index: i32,
    /// Length of the axis.
    pub len: usize,
}

/// Row-major position of clamped indices, and the first that had to be clamped. An empty
/// buffer has no position: reads of it give 0.
pub(crate) fn locate(
    buffer: &AnyBuffer,
    index: impl Iterator<Item = i32>,
) -> (Option<usize>, Option<OutOfRange>) {
    let mut at = 0;
    let mut wrong = None;
    for (axis, (i, &len)) in index.zip(buffer.shape()).enumerate() {
        if (i < 0 || i as usize >= len) && wrong.is_none() {
            wrong = Some(OutOfRange { buffer: buffer.name().to_owned(), axis, index: i, len });
        }
        at = at * len + (i.max(0) as usize).min(len.saturating_sub(1));
    }
    ((!buffer.data().is_empty()).then_some(at), wrong)
}

/// Element at a row-major position; zero for the missing position of an empty buffer.
pub(crate) fn element(buffer: &AnyBuffer, at: Option<usize>) -> ScalarValue {
    match buffer.data() {
        BufferData::Bool(v) => Bool(at.is_some_and(|i| v[i])),
        BufferData::I32(v) => I32(at.map_or(0, |i| v[i])),
        BufferData::F32(v) => F32(at.map_or(0.0, |i| v[i])),
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
                Node::Load { buffer, index } => {
                    let buffer = &graph.buffers()[*buffer as usize];
                    let (at, wrong) = locate(buffer, index.iter().map(|i| int(values[i.index()])));
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
