//! What one operation does to one value, and programs evaluated at a single point.
//!
//! [`unary`], [`binary`] and [`cast`] are the meaning of the IR on the CPU: constant folding,
//! row-constant parts of the vector machine and point evaluation all go through them.

use crate::capture::{AnyBuffer, BufferData, ScalarValue};
use crate::ir::{BinaryOp, Leaf, Node, Type, UnaryOp, mix};
use crate::math;
use crate::program::Program;

use ScalarValue::{Bool, F32, I32};

const WELL_TYPED: &str = "a graph is well-typed";

/// Floor division; 0 for a divisor of 0.
#[inline(always)]
pub fn floor_div(x: i32, y: i32) -> i32 {
    if y == 0 {
        return 0;
    }
    let q = x.wrapping_div(y);
    if x.wrapping_rem(y) != 0 && (x < 0) != (y < 0) { q - 1 } else { q }
}

/// Euclidean remainder; 0 for a divisor of 0.
#[inline(always)]
pub fn euclid_rem(x: i32, y: i32) -> i32 {
    if y == 0 { 0 } else { x.wrapping_rem_euclid(y) }
}

/// The smaller of two; the other one where one is NaN.
#[inline(always)]
pub fn min_f32(x: f32, y: f32) -> f32 {
    x.min(y)
}

/// i32 bits to `[0, 1)`, see [`UnaryOp::Unit`].
#[inline(always)]
pub fn unit(x: i32) -> f32 {
    (x as u32 >> 8) as f32 * (1.0 / 16_777_216.0)
}

/// `op` on one f32.
#[inline(always)]
pub fn unary_f32(op: UnaryOp, x: f32) -> f32 {
    match op {
        UnaryOp::Neg => -x,
        UnaryOp::Abs => x.abs(),
        UnaryOp::Floor => x.floor(),
        UnaryOp::Exp => math::exp(x),
        UnaryOp::Exp2 => math::exp2(x),
        UnaryOp::Log => math::log(x),
        UnaryOp::Log2 => math::log2(x),
        UnaryOp::Sqrt => x.sqrt(),
        UnaryOp::Rsqrt => 1.0 / x.sqrt(),
        UnaryOp::Tanh => math::tanh(x),
        UnaryOp::Sigmoid => math::sigmoid(x),
        UnaryOp::Erf => math::erf(x),
        UnaryOp::Sin => x.sin(),
        UnaryOp::Cos => x.cos(),
        UnaryOp::Not | UnaryOp::Unit => unreachable!("{WELL_TYPED}"),
    }
}

/// `op` on one value.
pub fn unary(op: UnaryOp, x: ScalarValue) -> ScalarValue {
    match (op, x) {
        (UnaryOp::Not, Bool(x)) => Bool(!x),
        (UnaryOp::Neg, I32(x)) => I32(x.wrapping_neg()),
        (UnaryOp::Abs, I32(x)) => I32(x.wrapping_abs()),
        (UnaryOp::Unit, I32(x)) => F32(unit(x)),
        (op, F32(x)) => F32(unary_f32(op, x)),
        _ => unreachable!("{WELL_TYPED}"),
    }
}

/// `op` on two values of one type.
pub fn binary(op: BinaryOp, x: ScalarValue, y: ScalarValue) -> ScalarValue {
    use BinaryOp::*;
    match (x, y) {
        (I32(x), I32(y)) => match op {
            Add => I32(x.wrapping_add(y)),
            Sub => I32(x.wrapping_sub(y)),
            Mul => I32(x.wrapping_mul(y)),
            Div => I32(floor_div(x, y)),
            Rem => I32(euclid_rem(x, y)),
            Min => I32(x.min(y)),
            Max => I32(x.max(y)),
            Mix => I32(mix(x, y)),
            Eq => Bool(x == y),
            Ne => Bool(x != y),
            Lt => Bool(x < y),
            Le => Bool(x <= y),
            Pow | And | Or | Xor => unreachable!("{WELL_TYPED}"),
        },
        (F32(x), F32(y)) => match op {
            Add => F32(x + y),
            Sub => F32(x - y),
            Mul => F32(x * y),
            Div => F32(x / y),
            Rem => F32(x - y * (x / y).floor()),
            Min => F32(min_f32(x, y)),
            Max => F32(x.max(y)),
            Pow => F32(x.powf(y)),
            Eq => Bool(x == y),
            Ne => Bool(x != y),
            Lt => Bool(x < y),
            Le => Bool(x <= y),
            Mix | And | Or | Xor => unreachable!("{WELL_TYPED}"),
        },
        (Bool(x), Bool(y)) => Bool(match op {
            And => x & y,
            Or => x | y,
            Xor | Ne => x ^ y,
            Eq => x == y,
            _ => unreachable!("{WELL_TYPED}"),
        }),
        _ => unreachable!("{WELL_TYPED}"),
    }
}

/// Conversion of one value.
pub fn cast(to: Type, x: ScalarValue) -> ScalarValue {
    match (to, x) {
        (Type::I32, Bool(x)) => I32(x.into()),
        (Type::I32, F32(x)) => I32(x as i32),
        (Type::I32, I32(x)) => I32(x),
        (Type::F32, Bool(x)) => F32(if x { 1.0 } else { 0.0 }),
        (Type::F32, I32(x)) => F32(x as f32),
        (Type::F32, F32(x)) => F32(x),
        (Type::Bool, Bool(x)) => Bool(x),
        (Type::Bool, I32(x)) => Bool(x != 0),
        (Type::Bool, F32(x)) => Bool(x != 0.0),
    }
}

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

/// The coordinates and the score at one point.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Point {
    /// Batch index.
    pub b: i32,
    /// Query head.
    pub h: i32,
    /// Key/value head.
    pub h_kv: i32,
    /// Query position.
    pub q: i32,
    /// Key position.
    pub kv: i32,
    /// Number of queries.
    pub q_len: i32,
    /// Number of keys.
    pub kv_len: i32,
    /// Scaled dot product.
    pub score: f32,
}

impl Point {
    /// The value of a leaf here.
    pub fn leaf(&self, leaf: Leaf) -> ScalarValue {
        match leaf {
            Leaf::B => I32(self.b),
            Leaf::H => I32(self.h),
            Leaf::HKv => I32(self.h_kv),
            Leaf::Q => I32(self.q),
            Leaf::Kv => I32(self.kv),
            Leaf::QLen => I32(self.q_len),
            Leaf::KvLen => I32(self.kv_len),
            Leaf::Score => F32(self.score),
        }
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
        _ => unreachable!("{WELL_TYPED}"),
    }
}
