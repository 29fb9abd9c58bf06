//! What one operation does to one value.
//!
//! [`unary`], [`binary`] and [`cast`] are the meaning of the IR on the CPU: constant folding,
//! row-constant parts of the vector machine and point evaluation all go through them.

use crate::math;
use crate::op::{BinaryOp, UnaryOp, mix};
use crate::value::{ScalarValue, Type};

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

/// Bits shifted up; 0 when the distance is not in `0..32`.
#[inline(always)]
pub fn shift_left(x: i32, y: i32) -> i32 {
    if (0..32).contains(&y) { x << y } else { 0 }
}

/// Bits shifted down, the sign shifted in; all sign when the distance is not in `0..32`.
#[inline(always)]
pub fn shift_right(x: i32, y: i32) -> i32 {
    if (0..32).contains(&y) { x >> y } else { x >> 31 }
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
        UnaryOp::Detach => x,
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
        (UnaryOp::Detach, x) => x,
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
            And => I32(x & y),
            Or => I32(x | y),
            Xor => I32(x ^ y),
            Shl => I32(shift_left(x, y)),
            Shr => I32(shift_right(x, y)),
            Pow => unreachable!("{WELL_TYPED}"),
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
            Mix | And | Or | Xor | Shl | Shr => unreachable!("{WELL_TYPED}"),
        },
        (Bool(x), Bool(y)) => Bool(match op {
            And => x & y,
            Or => x | y,
            Xor | Ne => x ^ y,
            Eq => x == y,
            Add | Sub | Mul | Div | Rem | Min | Max | Pow | Lt | Le | Shl | Shr | Mix => {
                unreachable!("{WELL_TYPED}")
            }
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
