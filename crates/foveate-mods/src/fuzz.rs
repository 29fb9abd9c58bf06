//! Mods of every operation, and random ones, for the tests of whatever evaluates mods.
//!
//! Hidden from the documentation; public because the oracle and the GPU's code generation test with
//! it, in crates of their own.
//!
//! Both come from [`UnaryOp::ALL`] and [`BinaryOp::ALL`]: an operation that is added is in every
//! test that asks here, on every backend.

use crate::capture::AnyBuffer;
use crate::expr::{DynExpr, Expr};
use crate::op::{BinaryOp, UnaryOp};
use crate::value::{ScalarValue, Type};

const TYPES: [Type; 3] = [Type::Bool, Type::I32, Type::F32];

/// One operation on operands of one type.
#[derive(Clone, Debug)]
pub struct Operation {
    /// Its name and the type of its operands.
    pub name: String,
    /// The type of its operands.
    pub operands: Type,
    /// It, applied to coordinates and, where it takes f32, to the given number.
    pub value: DynExpr,
}

/// Every operation with every type that it takes, and every conversion.
///
/// The f32 operands are `x`, the score for example, and `2 - 3x`; those of i32 `q` and `kv`; those
/// of bool comparisons of `x` and of `q` and `kv`. So where `x` is between 0 and 1 every operation
/// is defined.
pub fn every_operation(x: &Expr<f32>) -> Vec<Operation> {
    use crate::expr::{kv, q};
    let operands = |ty: Type| match ty {
        Type::Bool => [x.lt(0.4).dynamic().clone(), kv().le(q()).dynamic().clone()],
        Type::I32 => [q().dynamic().clone(), kv().dynamic().clone()],
        Type::F32 => {
            let other = 2.0 - x * 3.0;
            [x.dynamic().clone(), other.dynamic().clone()]
        }
    };
    let made = "operands have a type that it takes";
    let mut all = Vec::new();
    for &op in UnaryOp::ALL {
        all.extend(op.takes().iter().map(|&ty| {
            let [x, _] = operands(ty);
            let value = DynExpr::unary(op, x).expect(made);
            Operation { name: format!("{op:?} of {ty}"), operands: ty, value }
        }));
    }
    for &op in BinaryOp::ALL {
        all.extend(op.takes().iter().map(|&ty| {
            let [x, y] = operands(ty);
            let value = DynExpr::binary(op, x, y).expect(made);
            Operation { name: format!("{op:?} of {ty}"), operands: ty, value }
        }));
    }
    for (from, to) in TYPES.iter().flat_map(|&from| TYPES.map(|to| (from, to))) {
        if from != to {
            let [x, _] = operands(from);
            let value = x.cast(to);
            all.push(Operation { name: format!("{from} to {to}"), operands: from, value });
        }
    }
    for ty in TYPES {
        let [x, y] = operands(ty);
        let value = DynExpr::select(kv().le(q()).dynamic().clone(), x, y).expect(made);
        all.push(Operation { name: format!("choice of {ty}"), operands: ty, value });
    }
    all
}

/// A random expression of type `wanted` of `operations` operations. `below` draws a number below
/// its argument; `given` are the leaves and scalars to start from, an i32 and an f32 among them,
/// and `buffers` what may be read.
pub fn expression(
    below: &mut dyn FnMut(usize) -> usize,
    given: &[DynExpr],
    buffers: &[AnyBuffer],
    operations: usize,
    wanted: Type,
) -> DynExpr {
    let integers = [0, 1, -1, 2, 3, 7, -5, 100, i32::MAX, i32::MIN];
    let floats = [0.0, -0.0, 0.5, -3.0, 1e30, f32::INFINITY, f32::NAN];
    let mut pool = Pool { of: given.to_vec() };
    for _ in 0..3 {
        let value = ScalarValue::I32(integers[below(integers.len())]);
        pool.of.push(DynExpr::constant(value));
        let value = ScalarValue::F32(floats[below(floats.len())]);
        pool.of.push(DynExpr::constant(value));
    }
    let (x, y) = (pool.pick(below, Type::I32), pool.pick(below, Type::I32));
    pool.of.push(x.clone().cast(Type::F32));
    pool.of.push(DynExpr::binary(BinaryOp::Le, x, y).expect("both are i32"));
    for _ in 0..operations {
        // Integers more often than the rest: masks are made of them.
        let made = match below(11) {
            0 | 1 => pool.binary(below, Type::I32, Type::I32),
            2 => pool.binary(below, Type::I32, Type::Bool),
            3 => {
                let buffer = &buffers[below(buffers.len())];
                let axes = buffer.shape().len();
                let index = (0..axes).map(|_| pool.pick(below, Type::I32)).collect();
                DynExpr::read(buffer, index, below(3) == 0).expect("one index an axis")
            }
            4 => pool.binary(below, Type::F32, Type::F32),
            5 => pool.binary(below, Type::F32, Type::Bool),
            6 => pool.unary(below, Type::F32),
            7 if below(5) == 0 => pool.unary(below, Type::Bool),
            7 => pool.binary(below, Type::Bool, Type::Bool),
            8 => pool.unary(below, Type::I32),
            9 => {
                let from = TYPES[below(3)];
                pool.pick(below, from).cast(TYPES[below(3)])
            }
            _ => {
                let ty = TYPES[below(3)];
                let (x, y) = (pool.pick(below, ty), pool.pick(below, ty));
                let cond = pool.pick(below, Type::Bool);
                DynExpr::select(cond, x, y).expect("both sides have one type")
            }
        };
        pool.of.push(made);
    }
    pool.of.into_iter().rev().find(|e| e.ty() == wanted).expect("every type is in the pool")
}

/// What a random expression is made of.
struct Pool {
    of: Vec<DynExpr>,
}

impl Pool {
    /// An expression of type `ty`: the later of two, so that expressions grow deep.
    fn pick(&self, below: &mut dyn FnMut(usize) -> usize, ty: Type) -> DynExpr {
        let of: Vec<_> = self.of.iter().filter(|e| e.ty() == ty).collect();
        of[below(of.len()).max(below(of.len()))].clone()
    }

    /// Any operation on one `ty`.
    fn unary(&self, below: &mut dyn FnMut(usize) -> usize, ty: Type) -> DynExpr {
        let all: Vec<_> = UnaryOp::ALL.iter().filter(|op| op.takes().contains(&ty)).collect();
        let op = *all[below(all.len())];
        DynExpr::unary(op, self.pick(below, ty)).expect("the operation takes the type")
    }

    /// Any operation on two `ty` that gives a `result`.
    fn binary(&self, below: &mut dyn FnMut(usize) -> usize, ty: Type, result: Type) -> DynExpr {
        let fits = |op: &&BinaryOp| op.takes().contains(&ty) && op.result(ty) == result;
        let all: Vec<_> = BinaryOp::ALL.iter().filter(fits).collect();
        let op = *all[below(all.len())];
        let (x, y) = (self.pick(below, ty), self.pick(below, ty));
        DynExpr::binary(op, x, y).expect("the operation takes the type")
    }
}
