//! One operation along a row.

use super::{Compiled, Entries, Lane, Machine};
use crate::capture::{AnyBuffer, BufferData, ScalarValue};
use crate::eval::{self, OutOfRange, euclid_rem, floor_div, unary_f32};
use crate::ir::{BinaryOp, Leaf, Node, NodeId, Type, UnaryOp, mix};
use crate::math;

/// An operand: a row, or one value for the whole row.
#[derive(Clone, Copy)]
enum Src<'a, T> {
    Row(&'a [T]),
    One(T),
}

/// `out[j] = f(x[j])`.
#[inline(always)]
fn map<T: Copy, R>(out: &mut [R], x: Src<'_, T>, f: impl Fn(T) -> R) {
    match x {
        Src::Row(x) => out.iter_mut().zip(x).for_each(|(o, &x)| *o = f(x)),
        Src::One(x) => out.iter_mut().for_each(|o| *o = f(x)),
    }
}

/// `out[j] = f(x[j], y[j])`.
#[inline(always)]
fn zip<T: Copy, R>(out: &mut [R], x: Src<'_, T>, y: Src<'_, T>, f: impl Fn(T, T) -> R) {
    match (x, y) {
        (Src::Row(x), Src::Row(y)) => {
            out.iter_mut().zip(x).zip(y).for_each(|((o, &x), &y)| *o = f(x, y));
        }
        (Src::Row(x), Src::One(y)) => out.iter_mut().zip(x).for_each(|(o, &x)| *o = f(x, y)),
        (Src::One(x), Src::Row(y)) => out.iter_mut().zip(y).for_each(|(o, &y)| *o = f(x, y)),
        (Src::One(x), Src::One(y)) => out.iter_mut().for_each(|o| *o = f(x, y)),
    }
}

/// `out[j] = if c[j] { x[j] } else { y[j] }`.
fn select<T: Copy>(out: &mut [T], c: Src<'_, bool>, x: Src<'_, T>, y: Src<'_, T>) {
    let Src::Row(c) = c else {
        let Src::One(c) = c else { unreachable!() };
        return map(out, if c { x } else { y }, |x| x);
    };
    match (x, y) {
        (Src::Row(x), Src::Row(y)) => {
            for (((o, &c), &x), &y) in out.iter_mut().zip(c).zip(x).zip(y) {
                *o = if c { x } else { y };
            }
        }
        (Src::Row(x), Src::One(y)) => {
            out.iter_mut().zip(c).zip(x).for_each(|((o, &c), &x)| *o = if c { x } else { y });
        }
        (Src::One(x), Src::Row(y)) => {
            out.iter_mut().zip(c).zip(y).for_each(|((o, &c), &y)| *o = if c { x } else { y });
        }
        (Src::One(x), Src::One(y)) => {
            out.iter_mut().zip(c).for_each(|(o, &c)| *o = if c { x } else { y });
        }
    }
}

impl Machine {
    fn bool_src(&self, compiled: &Compiled, id: NodeId) -> Src<'_, bool> {
        match (&self.lanes[id.index()], self.values[id.index()]) {
            (_, ScalarValue::Bool(v)) if compiled.levels[id.index()].is_scalar() => Src::One(v),
            (Lane::Bool(lane), _) => Src::Row(&lane[..self.width]),
            _ => unreachable!("the operand is bool"),
        }
    }

    fn i32_src(&self, compiled: &Compiled, id: NodeId) -> Src<'_, i32> {
        match (&self.lanes[id.index()], self.values[id.index()]) {
            (_, ScalarValue::I32(v)) if compiled.levels[id.index()].is_scalar() => Src::One(v),
            (Lane::I32(lane), _) => Src::Row(&lane[..self.width]),
            _ => unreachable!("the operand is i32"),
        }
    }

    fn f32_src(&self, compiled: &Compiled, id: NodeId) -> Src<'_, f32> {
        match (&self.lanes[id.index()], self.values[id.index()]) {
            (_, ScalarValue::F32(v)) if compiled.levels[id.index()].is_scalar() => Src::One(v),
            (Lane::F32(lane), _) => Src::Row(&lane[..self.width]),
            _ => unreachable!("the operand is f32"),
        }
    }

    /// Evaluates column or full node `i` over the current columns.
    pub(super) fn run_lane(&mut self, compiled: &Compiled, i: usize, entries: Entries<'_>) {
        let graph = compiled.program.graph();
        let width = self.width;
        if let Node::Load { buffer, index } = &graph.nodes()[i] {
            let mut lane = std::mem::replace(&mut self.lanes[i], Lane::Bool(Vec::new()));
            self.load(compiled, &graph.buffers()[*buffer as usize], index, &mut lane, entries);
            self.lanes[i] = lane;
            return;
        }
        let mut lane = std::mem::replace(&mut self.lanes[i], Lane::Bool(Vec::new()));
        match (&graph.nodes()[i], &mut lane) {
            (Node::Unary(UnaryOp::Not, x), Lane::Bool(out)) => {
                map(&mut out[..width], self.bool_src(compiled, *x), |x| !x);
            }
            (Node::Unary(op, x), Lane::I32(out)) => {
                let (out, x) = (&mut out[..width], self.i32_src(compiled, *x));
                match op {
                    UnaryOp::Neg => map(out, x, i32::wrapping_neg),
                    _ => map(out, x, i32::wrapping_abs),
                }
            }
            (Node::Unary(UnaryOp::Unit, x), Lane::F32(out)) => {
                map(&mut out[..width], self.i32_src(compiled, *x), eval::unit);
            }
            (Node::Unary(op, x), Lane::F32(out)) => {
                let (out, x) = (&mut out[..width], self.f32_src(compiled, *x));
                match op {
                    UnaryOp::Neg => map(out, x, |x| -x),
                    UnaryOp::Abs => map(out, x, f32::abs),
                    UnaryOp::Exp => map(out, x, math::exp),
                    UnaryOp::Exp2 => map(out, x, math::exp2),
                    UnaryOp::Log => map(out, x, math::log),
                    UnaryOp::Log2 => map(out, x, math::log2),
                    UnaryOp::Sqrt => map(out, x, f32::sqrt),
                    UnaryOp::Rsqrt => map(out, x, |x| 1.0 / x.sqrt()),
                    UnaryOp::Tanh => map(out, x, math::tanh),
                    UnaryOp::Sigmoid => map(out, x, math::sigmoid),
                    UnaryOp::Erf => map(out, x, math::erf),
                    op => map(out, x, |x| unary_f32(*op, x)),
                }
            }
            (Node::Binary(op, x, y), Lane::I32(out)) => {
                let x = self.i32_src(compiled, *x);
                let y = self.i32_src(compiled, *y);
                let out = &mut out[..width];
                match op {
                    BinaryOp::Add => zip(out, x, y, i32::wrapping_add),
                    BinaryOp::Sub => zip(out, x, y, i32::wrapping_sub),
                    BinaryOp::Mul => zip(out, x, y, i32::wrapping_mul),
                    BinaryOp::Div => zip(out, x, y, floor_div),
                    BinaryOp::Rem => zip(out, x, y, euclid_rem),
                    BinaryOp::Min => zip(out, x, y, i32::min),
                    BinaryOp::Max => zip(out, x, y, i32::max),
                    BinaryOp::Mix => zip(out, x, y, mix),
                    _ => unreachable!("a graph is well-typed"),
                }
            }
            (Node::Binary(op, x, y), Lane::F32(out)) => {
                let x = self.f32_src(compiled, *x);
                let y = self.f32_src(compiled, *y);
                let out = &mut out[..width];
                match op {
                    BinaryOp::Add => zip(out, x, y, |x, y| x + y),
                    BinaryOp::Sub => zip(out, x, y, |x, y| x - y),
                    BinaryOp::Mul => zip(out, x, y, |x, y| x * y),
                    BinaryOp::Div => zip(out, x, y, |x, y| x / y),
                    BinaryOp::Rem => zip(out, x, y, |x, y| x - y * (x / y).floor()),
                    BinaryOp::Min => zip(out, x, y, f32::min),
                    BinaryOp::Max => zip(out, x, y, f32::max),
                    BinaryOp::Pow => zip(out, x, y, f32::powf),
                    _ => unreachable!("a graph is well-typed"),
                }
            }
            (Node::Binary(op, x, y), Lane::Bool(out)) => {
                self.compare(compiled, *op, *x, *y, &mut out[..width], graph.ty(*x));
            }
            (Node::Select { cond, then, other }, lane) => {
                let c = self.bool_src(compiled, *cond);
                let (t, e) = (*then, *other);
                match lane {
                    Lane::Bool(out) => {
                        let (t, e) = (self.bool_src(compiled, t), self.bool_src(compiled, e));
                        select(&mut out[..width], c, t, e);
                    }
                    Lane::I32(out) => {
                        let (t, e) = (self.i32_src(compiled, t), self.i32_src(compiled, e));
                        select(&mut out[..width], c, t, e);
                    }
                    Lane::F32(out) => {
                        let (t, e) = (self.f32_src(compiled, t), self.f32_src(compiled, e));
                        select(&mut out[..width], c, t, e);
                    }
                }
            }
            (Node::Cast(_, x), lane) => self.cast(compiled, *x, lane, graph.ty(*x)),
            _ => unreachable!("leaves and constants are set elsewhere"),
        }
        self.lanes[i] = lane;
    }

    fn compare(
        &self,
        compiled: &Compiled,
        op: BinaryOp,
        x: NodeId,
        y: NodeId,
        out: &mut [bool],
        ty: Type,
    ) {
        match ty {
            Type::Bool => {
                let (x, y) = (self.bool_src(compiled, x), self.bool_src(compiled, y));
                match op {
                    BinaryOp::And => zip(out, x, y, |x, y| x & y),
                    BinaryOp::Or => zip(out, x, y, |x, y| x | y),
                    BinaryOp::Eq => zip(out, x, y, |x, y| x == y),
                    _ => zip(out, x, y, |x, y| x ^ y),
                }
            }
            Type::I32 => {
                let (x, y) = (self.i32_src(compiled, x), self.i32_src(compiled, y));
                match op {
                    BinaryOp::Eq => zip(out, x, y, |x, y| x == y),
                    BinaryOp::Ne => zip(out, x, y, |x, y| x != y),
                    BinaryOp::Lt => zip(out, x, y, |x, y| x < y),
                    _ => zip(out, x, y, |x, y| x <= y),
                }
            }
            Type::F32 => {
                let (x, y) = (self.f32_src(compiled, x), self.f32_src(compiled, y));
                match op {
                    BinaryOp::Eq => zip(out, x, y, |x, y| x == y),
                    BinaryOp::Ne => zip(out, x, y, |x, y| x != y),
                    BinaryOp::Lt => zip(out, x, y, |x, y| x < y),
                    _ => zip(out, x, y, |x, y| x <= y),
                }
            }
        }
    }

    fn cast(&self, compiled: &Compiled, x: NodeId, lane: &mut Lane, from: Type) {
        let width = self.width;
        match (lane, from) {
            (Lane::F32(out), Type::I32) => {
                map(&mut out[..width], self.i32_src(compiled, x), |x| x as f32);
            }
            (Lane::F32(out), Type::Bool) => {
                map(&mut out[..width], self.bool_src(compiled, x), |x| u8::from(x).into());
            }
            (Lane::I32(out), Type::F32) => {
                map(&mut out[..width], self.f32_src(compiled, x), |x| x as i32);
            }
            (Lane::I32(out), Type::Bool) => {
                map(&mut out[..width], self.bool_src(compiled, x), i32::from);
            }
            _ => unreachable!("casts to bool and to the same type are not in the IR"),
        }
    }

    /// Reads a captured buffer along the row.
    fn load(
        &mut self,
        compiled: &Compiled,
        buffer: &AnyBuffer,
        index: &[NodeId],
        lane: &mut Lane,
        entries: Entries<'_>,
    ) {
        let width = self.width;
        let mut positions = std::mem::take(&mut self.positions);
        let mut outside = false;
        positions[..width].fill(0);
        for (&id, &len) in index.iter().zip(buffer.shape()) {
            let last = len.saturating_sub(1);
            let put = |p: &mut usize, i: i32| {
                *p = *p * len + (i.max(0) as usize).min(last);
                i as u32 as usize >= len
            };
            match self.i32_src(compiled, id) {
                Src::One(i) => {
                    positions[..width].iter_mut().for_each(|p| outside |= put(p, i));
                }
                Src::Row(row) => {
                    for (p, &i) in positions[..width].iter_mut().zip(row) {
                        outside |= put(p, i);
                    }
                }
            }
        }
        match entries {
            Entries::Columns if outside => {
                for j in 0..width {
                    let wrong = self.outside(compiled, buffer, index, j);
                    self.hoisted.columns.extend(wrong.map(|wrong| (j, wrong)));
                }
            }
            Entries::Row(live) if outside && self.wrong.is_none() => {
                let mut counted = (0..width).filter(|&j| live.is_none_or(|l| l[j]));
                self.wrong = counted.find_map(|j| self.outside(compiled, buffer, index, j));
            }
            _ => {}
        }
        let positions_in = &positions[..width];
        let contiguous = !outside
            && index.len() == 1
            && compiled.program.graph().node(index[0]) == &Node::Leaf(Leaf::Kv);
        match (buffer.data(), lane) {
            _ if buffer.data().is_empty() => {}
            (BufferData::Bool(v), Lane::Bool(out)) => gather(v, positions_in, contiguous, out),
            (BufferData::I32(v), Lane::I32(out)) => gather(v, positions_in, contiguous, out),
            (BufferData::F32(v), Lane::F32(out)) => gather(v, positions_in, contiguous, out),
            _ => unreachable!("a lane has its buffer's type"),
        }
        self.positions = positions;
    }

    /// What is out of range in the indices of entry `j`.
    fn outside(
        &self,
        compiled: &Compiled,
        buffer: &AnyBuffer,
        index: &[NodeId],
        j: usize,
    ) -> Option<OutOfRange> {
        let at = index.iter().map(|&id| match self.i32_src(compiled, id) {
            Src::One(i) => i,
            Src::Row(row) => row[j],
        });
        eval::locate(buffer, at).1
    }
}

fn gather<T: Copy>(from: &[T], positions: &[usize], contiguous: bool, into: &mut [T]) {
    match positions.first() {
        Some(&first) if contiguous => {
            into[..positions.len()].copy_from_slice(&from[first..first + positions.len()]);
        }
        _ => into.iter_mut().zip(positions).for_each(|(o, &p)| *o = from[p]),
    }
}
