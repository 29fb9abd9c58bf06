//! Mods at one point, with dual numbers.
//!
//! Every float is a pair (value, tangent). The node called the seed has tangent 1, so the tangent
//! of the root is the derivative of the root with respect to that node: the score, or one load
//! of a learned buffer.

use foveate_mods::ir::{BinaryOp, Leaf, Node, UnaryOp, mix};
use foveate_mods::{Elements, Program, ScalarValue, Type};

use crate::error::{ReferenceError, ReferenceErrorKind};
use crate::real::{Function, Real};

/// Where a mod is evaluated.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "the names of the leaves")]
pub struct Point<F> {
    pub b: i32,
    pub h: i32,
    pub h_kv: i32,
    pub q: i32,
    pub kv: i32,
    pub q_len: i32,
    pub kv_len: i32,
    pub score: F,
}

/// The value of a node.
#[derive(Clone, Copy, Debug)]
pub enum Value<F> {
    /// A truth value.
    Bool(bool),
    /// An integer.
    I32(i32),
    /// A number and its tangent.
    Real(F, F),
}

use Value::{Bool, I32, Real as R};

const TYPED: &str = "a graph is well-typed";

impl<F: Real> Value<F> {
    /// The truth value of a mask.
    pub fn bool(self) -> bool {
        let Bool(x) = self else { unreachable!("{TYPED}") };
        x
    }

    /// The integer of an index.
    pub fn i32(self) -> i32 {
        let I32(x) = self else { unreachable!("{TYPED}") };
        x
    }

    /// The number of a score, and its tangent.
    pub fn real(self) -> (F, F) {
        let R(x, dx) = self else { unreachable!("{TYPED}") };
        (x, dx)
    }
}

/// Values of all nodes of `program` at `at`, into `values`; `seed` is the index of the node that
/// has tangent 1.
///
/// # Errors
/// When a buffer is indexed outside its axes, or a tangent meets an operation without derivative.
pub fn eval<F: Real>(
    program: &Program,
    at: &Point<F>,
    seed: Option<usize>,
    values: &mut Vec<Value<F>>,
) -> Result<(), ReferenceError> {
    let graph = program.graph();
    values.clear();
    for (i, node) in graph.nodes().iter().enumerate() {
        let of = |id: foveate_mods::NodeId| values[id.index()];
        let value = match node {
            Node::Leaf(leaf) => match leaf {
                Leaf::B => I32(at.b),
                Leaf::H => I32(at.h),
                Leaf::HKv => I32(at.h_kv),
                Leaf::Q => I32(at.q),
                Leaf::Kv => I32(at.kv),
                Leaf::QLen => I32(at.q_len),
                Leaf::KvLen => I32(at.kv_len),
                Leaf::Score => R(at.score, F::of(0.0)),
            },
            Node::Bool(x) => Bool(*x),
            Node::I32(x) => I32(*x),
            Node::F32(bits) => constant(f32::from_bits(*bits)),
            Node::Scalar(slot) => match graph.scalars()[*slot as usize].value {
                ScalarValue::Bool(x) => Bool(x),
                ScalarValue::I32(x) => I32(x),
                ScalarValue::F32(x) => constant(x),
            },
            Node::Load { .. } => {
                let (buffer, index) = element(program, node, values)?;
                let places = index.iter().zip(buffer.strides()).map(|(i, stride)| i * stride);
                stored(buffer, buffer.offset() + places.sum::<usize>())?
            }
            Node::Unary(op, x) => unary(*op, of(*x))?,
            Node::Binary(op, x, y) => binary(*op, of(*x), of(*y))?,
            Node::Select { cond, then, other } => of(if of(*cond).bool() { *then } else { *other }),
            Node::Cast(ty, x) => cast(*ty, of(*x))?,
        };
        values.push(match value {
            R(x, _) if seed == Some(i) => R(x, F::of(1.0)),
            other => other,
        });
    }
    Ok(())
}

/// The element at a place in memory.
///
/// # Errors
/// When it is an integer that no i32 holds.
fn stored<F: Real>(
    buffer: &foveate_mods::AnyBuffer,
    at: usize,
) -> Result<Value<F>, ReferenceError> {
    let real = |x: f64| R(F::of(x), F::of(0.0));
    Ok(match buffer.elements() {
        Elements::Bool(v) => Bool(v[at] != 0),
        Elements::U8(v) => I32(v[at].into()),
        Elements::I8(v) => I32(v[at].into()),
        Elements::I16(v) => I32(v[at].into()),
        Elements::I32(v) => I32(v[at]),
        Elements::I64(v) => match i32::try_from(v[at]) {
            Ok(x) => I32(x),
            Err(_) => {
                let buffer = buffer.name().to_owned();
                return Err(ReferenceErrorKind::TooWide { buffer, value: v[at] }.into());
            }
        },
        Elements::F16(v) => real(v[at].into()),
        Elements::BF16(v) => real(v[at].into()),
        Elements::F32(v) => real(v[at].into()),
        Elements::F64(v) => real(f64::from(v[at] as f32)),
    })
}

/// The buffer that a load reads, and the position of the element along each axis.
///
/// # Errors
/// When an index is outside its axis.
pub fn element<'p, F: Real>(
    program: &'p Program,
    load: &Node,
    values: &[Value<F>],
) -> Result<(&'p foveate_mods::AnyBuffer, Vec<usize>), ReferenceError> {
    let Node::Load { buffer, index, from_end } = load else {
        unreachable!("called with loads only")
    };
    let buffer = &program.graph().buffers()[*buffer as usize];
    let mut element = Vec::with_capacity(index.len());
    for (axis, (id, &length)) in index.iter().zip(buffer.shape()).enumerate() {
        let index = values[id.index()].i32();
        let from_the_end = if *from_end && index < 0 { length as i64 } else { 0 };
        let position = usize::try_from(i64::from(index) + from_the_end);
        let Some(position) = position.ok().filter(|&p| p < length) else {
            let buffer = buffer.name().to_owned();
            return Err(ReferenceErrorKind::OutOfRange { buffer, axis, index, length }.into());
        };
        element.push(position);
    }
    Ok((buffer, element))
}

fn constant<F: Real>(x: f32) -> Value<F> {
    R(F::of(x.into()), F::of(0.0))
}

/// A value without derivative: refused when a tangent would be lost.
fn flat<F: Real>(
    operation: impl std::fmt::Debug,
    tangents: &[F],
    value: Value<F>,
) -> Result<Value<F>, ReferenceError> {
    if tangents.iter().all(|&t| t == F::of(0.0)) {
        return Ok(value);
    }
    let operation = format!("{operation:?}").to_lowercase();
    Err(ReferenceErrorKind::NoDerivative { operation }.into())
}

fn unary<F: Real>(op: UnaryOp, x: Value<F>) -> Result<Value<F>, ReferenceError> {
    use UnaryOp::*;
    let c = F::of;
    Ok(match (op, x) {
        (Not, Bool(x)) => Bool(!x),
        (Neg, I32(x)) => I32(x.wrapping_neg()),
        (Abs, I32(x)) => I32(x.wrapping_abs()),
        (Detach, I32(x)) => I32(x),
        (Detach, R(x, _)) => R(x, c(0.0)),
        (Unit, I32(x)) => constant((x as u32 >> 8) as f32 / 16_777_216.0),
        (Floor, R(x, dx)) => return flat(op, &[dx], R(x.apply(Function::Floor), c(0.0))),
        (_, R(x, dx)) => {
            // The derivative is formed only under a tangent: at a pole of it, 0 · ∞ is no number.
            let with = |y: F, slope: &dyn Fn() -> F| {
                R(y, if dx == c(0.0) { c(0.0) } else { slope() * dx })
            };
            let f = |f| x.apply(f);
            match op {
                Neg => R(-x, -dx),
                Abs => {
                    if x < c(0.0) {
                        R(-x, -dx)
                    } else {
                        R(x, dx)
                    }
                }
                Exp => with(f(Function::Exp), &|| f(Function::Exp)),
                Exp2 => with(f(Function::Exp2), &|| f(Function::Exp2) * c(2f64.ln())),
                Log => with(f(Function::Ln), &|| c(1.0) / x),
                Log2 => with(f(Function::Log2), &|| c(1.0) / (x * c(2f64.ln()))),
                Sqrt => with(f(Function::Sqrt), &|| c(0.5) / f(Function::Sqrt)),
                Rsqrt => {
                    let y = c(1.0) / f(Function::Sqrt);
                    with(y, &|| c(-0.5) * y / x)
                }
                Tanh => {
                    let y = f(Function::Tanh);
                    with(y, &|| c(1.0) - y * y)
                }
                Sigmoid => {
                    let y = c(1.0) / (c(1.0) + (-x).apply(Function::Exp));
                    with(y, &|| y * (c(1.0) - y))
                }
                Erf => with(f(Function::Erf), &|| {
                    c(std::f64::consts::FRAC_2_SQRT_PI) * (-x * x).apply(Function::Exp)
                }),
                Sin => with(f(Function::Sin), &|| f(Function::Cos)),
                Cos => with(f(Function::Cos), &|| -f(Function::Sin)),
                Not | Floor | Unit | Detach => unreachable!("{TYPED}"),
            }
        }
        _ => unreachable!("{TYPED}"),
    })
}

fn binary<F: Real>(op: BinaryOp, x: Value<F>, y: Value<F>) -> Result<Value<F>, ReferenceError> {
    use BinaryOp::*;
    Ok(match (x, y) {
        (Bool(x), Bool(y)) => Bool(match op {
            And => x & y,
            Or => x | y,
            Xor | Ne => x ^ y,
            Eq => x == y,
            Add | Sub | Mul | Div | Rem | Min | Max | Pow | Lt | Le | Shl | Shr | Mix => {
                unreachable!("{TYPED}")
            }
        }),
        (I32(x), I32(y)) => match op {
            Add => I32(x.wrapping_add(y)),
            Sub => I32(x.wrapping_sub(y)),
            Mul => I32(x.wrapping_mul(y)),
            Div if y == 0 => I32(0),
            // In i64, where i32::MIN / -1 does not overflow; back in i32 it wraps.
            Div => {
                let (x, y) = (i64::from(x), i64::from(y));
                I32((x.div_euclid(y) - i64::from(y < 0 && x.rem_euclid(y) != 0)) as i32)
            }
            Rem if y == 0 => I32(0),
            Rem => I32(x.wrapping_rem_euclid(y)),
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
            // In i64, where no distance below 32 loses a bit of the result.
            Shl if (0..32).contains(&y) => I32((i64::from(x) << y) as i32),
            Shl => I32(0),
            Shr => I32((i64::from(x) >> if (0..32).contains(&y) { y } else { 31 }) as i32),
            Pow => unreachable!("{TYPED}"),
        },
        (R(x, dx), R(y, dy)) => match op {
            Add => R(x + y, dx + dy),
            Sub => R(x - y, dx - dy),
            Mul => R(x * y, times(dx, y) + times(dy, x)),
            Div => {
                let value = x / y;
                R(value, times(dx, F::of(1.0) / y) - times(dy, value / y))
            }
            Rem => {
                let whole = (x / y).apply(Function::Floor);
                R(x - y * whole, dx - times(dy, whole))
            }
            Min => {
                if y < x {
                    R(y, dy)
                } else {
                    R(x, dx)
                }
            }
            Max => {
                if x < y {
                    R(y, dy)
                } else {
                    R(x, dx)
                }
            }
            Pow => {
                let value = x.pow(y);
                let slope_x = y * x.pow(y - F::of(1.0));
                R(value, times(dx, slope_x) + times(dy, value * x.apply(Function::Ln)))
            }
            Eq => Bool(x == y),
            Ne => Bool(x != y),
            Lt => Bool(x < y),
            Le => Bool(x <= y),
            And | Or | Xor | Shl | Shr | Mix => unreachable!("{TYPED}"),
        },
        _ => unreachable!("{TYPED}"),
    })
}

/// `tangent · slope`, 0 without a tangent whatever the slope.
fn times<F: Real>(tangent: F, slope: F) -> F {
    if tangent == F::of(0.0) { tangent } else { tangent * slope }
}

fn cast<F: Real>(to: Type, x: Value<F>) -> Result<Value<F>, ReferenceError> {
    Ok(match (to, x) {
        (Type::I32, Bool(x)) => I32(x.into()),
        (Type::I32, R(x, dx)) => return flat("a cast to i32", &[dx], I32(x.to_f64() as i32)),
        (Type::F32, Bool(x)) => constant(x.into()),
        (Type::F32, I32(x)) => R(F::of(f64::from(x as f32)), F::of(0.0)),
        (_, same) => same,
    })
}

#[cfg(test)]
mod tests;
