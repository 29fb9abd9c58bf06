//! One operation over the registers of a rate, or over a strip.

use std::ops::Range;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::bits::MaskBits;
use super::compile::{Compiled, Place};
use super::level::for_each_level;
use super::machine::{Machine, View};
use super::outside::note;
use super::registers::{Line, Operand, Register, bool, int, of_bool, of_int, padded};
use crate::arithmetic::{self, euclid_rem, floor_div, shift_left, shift_right, unary_f32};
use crate::capture::AnyBuffer;
use crate::elements::Elements;
use crate::eval::position;
use crate::ir::{BinaryOp, Leaf, Node, NodeId, UnaryOp, mix};
use crate::math;
use crate::value::Type;

/// The lines of a result. Loops over them are plain loops over slices, which compilers turn into
/// vectors; nested over groups they would be unrolled first.
struct Out<'a> {
    data: &'a mut [f32],
    lines: usize,
    width: usize,
}

impl<'a> Out<'a> {
    /// Takes all lines as one when every operand's follow one another.
    #[inline(always)]
    fn flatten(&mut self, operands: &[&Operand<'_>]) {
        if operands.iter().all(|x| x.is_flat(self.width)) {
            (self.lines, self.width) = (1, self.lines * self.width);
        }
    }

    /// Each line and its number.
    #[inline(always)]
    fn each_line(self) -> impl Iterator<Item = (usize, &'a mut [f32])> {
        self.data.chunks_exact_mut(self.width).take(self.lines).enumerate()
    }

    /// `out = f(x)`.
    #[inline(always)]
    fn map(mut self, x: Operand<'_>, f: impl Fn(f32) -> f32) {
        self.flatten(&[&x]);
        let width = self.width;
        for (r, out) in self.each_line() {
            match x.line(r, width) {
                Line::One(x) => out.fill(f(x)),
                Line::Each(x) => out.iter_mut().zip(x).for_each(|(o, &x)| *o = f(x)),
            }
        }
    }

    /// `out = f(x, y)`.
    #[inline(always)]
    fn zip(mut self, x: Operand<'_>, y: Operand<'_>, f: impl Fn(f32, f32) -> f32) {
        self.flatten(&[&x, &y]);
        let width = self.width;
        for (r, out) in self.each_line() {
            match (x.line(r, width), y.line(r, width)) {
                (Line::Each(x), Line::Each(y)) => {
                    out.iter_mut().zip(x).zip(y).for_each(|((o, &x), &y)| *o = f(x, y));
                }
                (Line::Each(x), Line::One(y)) => {
                    out.iter_mut().zip(x).for_each(|(o, &x)| *o = f(x, y));
                }
                (Line::One(x), Line::Each(y)) => {
                    out.iter_mut().zip(y).for_each(|(o, &y)| *o = f(x, y));
                }
                (Line::One(x), Line::One(y)) => out.fill(f(x, y)),
            }
        }
    }

    /// `out = if c { x } else { y }`.
    #[inline(always)]
    fn select(mut self, c: Operand<'_>, x: Operand<'_>, y: Operand<'_>) {
        self.flatten(&[&c, &x, &y]);
        let width = self.width;
        for (r, out) in self.each_line() {
            y.line(r, width).copy_to(out);
            match (c.line(r, width), x.line(r, width)) {
                (Line::One(c), x) if bool(c) => x.copy_to(out),
                (Line::One(_), _) => {}
                (Line::Each(c), Line::Each(x)) => {
                    for ((o, &c), &x) in out.iter_mut().zip(c).zip(x) {
                        *o = if bool(c) { x } else { *o };
                    }
                }
                (Line::Each(c), Line::One(x)) => {
                    out.iter_mut().zip(c).for_each(|(o, &c)| *o = if bool(c) { x } else { *o });
                }
            }
        }
    }

    #[inline(always)]
    fn zip_int(self, x: Operand<'_>, y: Operand<'_>, f: impl Fn(i32, i32) -> i32) {
        self.zip(x, y, |x, y| of_int(f(int(x), int(y))));
    }

    #[inline(always)]
    fn compare(self, x: Operand<'_>, y: Operand<'_>, f: impl Fn(f32, f32) -> bool) {
        self.zip(x, y, |x, y| of_bool(f(x, y)));
    }
}

for_each_level! {
    /// Evaluates `nodes`, which are in order, over what `view` says.
    pub(super) run = run_body(
        machine: &mut Machine, compiled: &Compiled, nodes: &[usize], view: View<'_>
    )
}

#[inline(always)]
fn run_body(machine: &mut Machine, compiled: &Compiled, nodes: &[usize], view: View<'_>) {
    for &i in nodes {
        let register = match compiled.places[i] {
            Place::Row(register)
            | Place::Column(register)
            | Place::Diagonal(register)
            | Place::Full(register) => register,
            Place::Head | Place::Score => unreachable!("it has no register to fill"),
        };
        let mut into = std::mem::take(&mut machine.registers[register]);
        step(machine, compiled, i, view, &mut into);
        machine.registers[register] = into;
    }
}

#[inline(always)]
fn step(machine: &mut Machine, compiled: &Compiled, i: usize, view: View<'_>, into: &mut Register) {
    let graph = compiled.program.graph();
    let (lines, width) = machine.extent(view);
    let out = Out { data: into.get_mut(), lines, width };
    let of = |x: &NodeId| machine.operand(compiled, x.index(), view);
    match &graph.nodes()[i] {
        Node::Leaf(Leaf::Score) => {
            let View::Strip(scores) = view else { unreachable!("scores are read in strips") };
            let (start, step) = (machine.strip.1.start, scores.stride as isize);
            out.map(Operand { data: scores.data, start, step, one: false }, |x| x);
        }
        Node::Leaf(leaf) => {
            let first = if *leaf == Leaf::Q { machine.q.start } else { machine.kv.start };
            // Padding may lie past the largest position.
            let places = out.data[..width].iter_mut().zip(0i32..);
            places.for_each(|(o, x)| *o = of_int(first.wrapping_add(x)));
        }
        Node::Load { buffer, index, from_end } => {
            let buffer = &graph.buffers()[*buffer as usize];
            machine.load(compiled, buffer, (index, *from_end), view, out);
        }
        Node::Unary(op, x) if graph.ty(*x) == Type::I32 => match op {
            UnaryOp::Neg => out.map(of(x), |x| of_int(int(x).wrapping_neg())),
            UnaryOp::Unit => out.map(of(x), |x| arithmetic::unit(int(x))),
            UnaryOp::Abs => out.map(of(x), |x| of_int(int(x).wrapping_abs())),
            UnaryOp::Detach => out.map(of(x), |x| x),
            op => unreachable!("{op:?} does not take an i32"),
        },
        Node::Unary(op, x) => unary(*op, of(x), out),
        Node::Binary(op, x, y) => match graph.ty(*x) {
            Type::Bool => bools(*op, of(x), of(y), out),
            Type::I32 => integers(*op, of(x), of(y), out),
            Type::F32 => floats(*op, of(x), of(y), out),
        },
        Node::Select { cond, then, other } => out.select(of(cond), of(then), of(other)),
        Node::Cast(to, x) => match (to, graph.ty(*x)) {
            (Type::F32, Type::I32) => out.map(of(x), |x| int(x) as f32),
            (Type::F32, Type::Bool) => out.map(of(x), |x| int(x) as f32),
            (Type::I32, Type::F32) => out.map(of(x), |x| of_int(x as i32)),
            // A bool lies in a register as the integer it becomes.
            _ => out.map(of(x), |x| x),
        },
        Node::Bool(_) | Node::I32(_) | Node::F32(_) | Node::Scalar(_) => {
            unreachable!("constants change with the head at most")
        }
    }
}

#[inline(always)]
fn unary(op: UnaryOp, x: Operand<'_>, out: Out<'_>) {
    match op {
        UnaryOp::Not => out.map(x, |x| of_bool(!bool(x))),
        UnaryOp::Neg => out.map(x, |x| -x),
        UnaryOp::Abs => out.map(x, f32::abs),
        UnaryOp::Detach => out.map(x, |x| x),
        UnaryOp::Floor => out.map(x, f32::floor),
        UnaryOp::Exp => out.map(x, math::exp),
        UnaryOp::Exp2 => out.map(x, math::exp2),
        UnaryOp::Log => out.map(x, math::log),
        UnaryOp::Log2 => out.map(x, math::log2),
        UnaryOp::Sqrt => out.map(x, f32::sqrt),
        UnaryOp::Rsqrt => out.map(x, |x| 1.0 / x.sqrt()),
        UnaryOp::Tanh => out.map(x, math::tanh),
        UnaryOp::Sigmoid => out.map(x, math::sigmoid),
        UnaryOp::Erf => out.map(x, math::erf),
        UnaryOp::Sin | UnaryOp::Cos | UnaryOp::Unit => out.map(x, |x| unary_f32(op, x)),
    }
}

#[inline(always)]
fn bools(op: BinaryOp, x: Operand<'_>, y: Operand<'_>, out: Out<'_>) {
    match op {
        BinaryOp::And => out.zip_int(x, y, |x, y| x & y),
        BinaryOp::Or => out.zip_int(x, y, |x, y| x | y),
        BinaryOp::Eq => out.zip_int(x, y, |x, y| x ^ y ^ 1),
        BinaryOp::Xor | BinaryOp::Ne => out.zip_int(x, y, |x, y| x ^ y),
        op => unreachable!("{op:?} does not take bools"),
    }
}

#[inline(always)]
fn integers(op: BinaryOp, x: Operand<'_>, y: Operand<'_>, out: Out<'_>) {
    match op {
        BinaryOp::Add => out.zip_int(x, y, i32::wrapping_add),
        BinaryOp::Sub => out.zip_int(x, y, i32::wrapping_sub),
        BinaryOp::Mul => out.zip_int(x, y, i32::wrapping_mul),
        BinaryOp::Div => out.zip_int(x, y, floor_div),
        BinaryOp::Rem => out.zip_int(x, y, euclid_rem),
        BinaryOp::Min => out.zip_int(x, y, i32::min),
        BinaryOp::Max => out.zip_int(x, y, i32::max),
        BinaryOp::Mix => out.zip_int(x, y, mix),
        BinaryOp::Eq => out.compare(x, y, |x, y| int(x) == int(y)),
        BinaryOp::Ne => out.compare(x, y, |x, y| int(x) != int(y)),
        BinaryOp::Lt => out.compare(x, y, |x, y| int(x) < int(y)),
        BinaryOp::Le => out.compare(x, y, |x, y| int(x) <= int(y)),
        BinaryOp::And => out.zip_int(x, y, |x, y| x & y),
        BinaryOp::Or => out.zip_int(x, y, |x, y| x | y),
        BinaryOp::Xor => out.zip_int(x, y, |x, y| x ^ y),
        BinaryOp::Shl => out.zip_int(x, y, shift_left),
        BinaryOp::Shr => out.zip_int(x, y, shift_right),
        BinaryOp::Pow => unreachable!("a graph is well-typed"),
    }
}

#[inline(always)]
fn floats(op: BinaryOp, x: Operand<'_>, y: Operand<'_>, out: Out<'_>) {
    match op {
        BinaryOp::Add => out.zip(x, y, |x, y| x + y),
        BinaryOp::Sub => out.zip(x, y, |x, y| x - y),
        BinaryOp::Mul => out.zip(x, y, |x, y| x * y),
        BinaryOp::Div => out.zip(x, y, |x, y| x / y),
        BinaryOp::Rem => out.zip(x, y, |x, y| x - y * (x / y).floor()),
        BinaryOp::Min => out.zip(x, y, f32::min),
        BinaryOp::Max => out.zip(x, y, f32::max),
        BinaryOp::Pow => out.zip(x, y, f32::powf),
        BinaryOp::Eq => out.compare(x, y, |x, y| x == y),
        BinaryOp::Ne => out.compare(x, y, |x, y| x != y),
        BinaryOp::Lt => out.compare(x, y, |x, y| x < y),
        BinaryOp::Le => out.compare(x, y, |x, y| x <= y),
        BinaryOp::Mix
        | BinaryOp::And
        | BinaryOp::Or
        | BinaryOp::Xor
        | BinaryOp::Shl
        | BinaryOp::Shr => unreachable!("a graph is well-typed"),
    }
}

impl Machine {
    /// Reads a captured buffer.
    fn load(
        &mut self,
        compiled: &Compiled,
        buffer: &AnyBuffer,
        (index, from_end): (&[NodeId], bool),
        view: View<'_>,
        out: Out<'_>,
    ) {
        let mut positions = std::mem::take(&mut self.positions);
        let mut outside = std::mem::take(&mut self.outside);
        // Entries that are in the tile; the others pad the last group.
        let (list, first, inside) = match view {
            View::Rows { .. } => (&mut outside.rows, 0, self.q.len()),
            View::Columns { .. } => (&mut outside.columns, 0, self.kv.len()),
            View::Diagonals { .. } => {
                let count = (self.q.len() + self.kv.len()).saturating_sub(1);
                (&mut outside.diagonals, 0, count)
            }
            View::Strip(_) => (&mut outside.entries, self.strip.1.start, self.kv.len()),
        };
        let entries = out.lines * out.width;
        let counts = index.last().is_some_and(|x| compiled.counts[x.index()]);
        let operands: Vec<Operand<'_>> =
            index.iter().map(|x| self.operand(compiled, x.index(), view)).collect();
        let elements = buffer.elements();
        let wide = matches!(elements, Elements::I64(_));
        let axes = Axes { shape: buffer.shape(), strides: buffer.strides(), from_end };
        for (r, line) in out.data.chunks_exact_mut(out.width).take(out.lines).enumerate() {
            let lines = || operands.iter().map(|x| x.line(r, out.width));
            let held = counts && !wide && !buffer.is_on_device();
            if let Some(start) = axes.run_start(lines(), out.width, held) {
                copy_run(elements, buffer.offset() + start, line);
                continue;
            }
            let positions = &mut positions[..out.width];
            positions.fill(buffer.offset());
            for (index, (&len, &stride)) in lines().zip(axes.shape.iter().zip(axes.strides)) {
                for (c, p) in positions.iter_mut().enumerate() {
                    let i = match index {
                        Line::One(i) => int(i),
                        Line::Each(i) => int(i[c]),
                    };
                    let i = position(i, len, from_end);
                    *p += (i.max(0) as usize).min(len.saturating_sub(1)) * stride;
                    if i as u64 as usize >= len && first + c < inside {
                        note(list, r * out.width + c, entries);
                    }
                }
            }
            if buffer.elems() == 0 {
                line.fill(0.0);
                continue;
            }
            gather(elements, positions, line);
            if wide {
                for (c, &p) in positions.iter().enumerate() {
                    if elements.too_wide(p).is_some() && first + c < inside {
                        note(list, r * out.width + c, entries);
                    }
                }
            }
        }
        drop(operands);
        (self.positions, self.outside) = (positions, outside);
    }
}

/// How the indices of a read become a place.
#[derive(Clone, Copy)]
pub(super) struct Axes<'a> {
    pub shape: &'a [usize],
    pub strides: &'a [usize],
    /// Whether negative indices count from the end of their axis.
    pub from_end: bool,
}

impl Axes<'_> {
    /// Where `width` elements one after another begin that a line of indices reads, counted from the
    /// element of index 0, when it does. `counts` says that the last index is one more at each key.
    pub fn run_start<'a>(
        &self,
        lines: impl Iterator<Item = Line<'a>>,
        width: usize,
        counts: bool,
    ) -> Option<usize> {
        if !counts || self.strides.last() != Some(&1) {
            return None;
        }
        let mut at = 0;
        let axes = self.shape.iter().zip(self.strides);
        for (axis, (line, (&len, stride))) in lines.zip(axes).enumerate() {
            let last = axis + 1 == self.shape.len();
            let (i, count) = match line {
                Line::One(_) if last => return None,
                Line::One(i) => (int(i), 1),
                Line::Each(i) if last => (int(i[0]), width),
                Line::Each(_) => return None,
            };
            let i = usize::try_from(position(i, len, self.from_end)).ok()?;
            at += Some(i).filter(|i| i + count <= len)? * stride;
        }
        Some(at)
    }
}

fn copy_run(from: Elements<'_>, start: usize, into: &mut [f32]) {
    fn copy<T: Copy>(from: &[T], start: usize, into: &mut [f32], read: impl Fn(T) -> f32) {
        let from = &from[start..start + into.len()];
        into.iter_mut().zip(from).for_each(|(o, &x)| *o = read(x));
    }
    match from {
        Elements::Bool(v) => copy(v, start, into, |x| of_bool(x != 0)),
        Elements::U8(v) => copy(v, start, into, |x| of_int(x.into())),
        Elements::I8(v) => copy(v, start, into, |x| of_int(x.into())),
        Elements::I16(v) => copy(v, start, into, |x| of_int(x.into())),
        Elements::I32(v) => copy(v, start, into, of_int),
        Elements::I64(v) => copy(v, start, into, |x| of_int(x as i32)),
        Elements::F16(v) => v[start..start + into.len()].convert_to_f32_slice(into),
        Elements::BF16(v) => v[start..start + into.len()].convert_to_f32_slice(into),
        Elements::F32(v) => into.copy_from_slice(&v[start..start + into.len()]),
        Elements::F64(v) => copy(v, start, into, |x| x as f32),
    }
}

/// Elements at places in memory; zeros when there are none.
fn gather(from: Elements<'_>, places: &[usize], into: &mut [f32]) {
    fn each<T: Copy>(from: &[T], places: &[usize], into: &mut [f32], read: impl Fn(T) -> f32) {
        let into = into.iter_mut().zip(places);
        into.for_each(|(o, &p)| *o = from.get(p).map_or(0.0, |&x| read(x)));
    }
    match from {
        Elements::Bool(v) => each(v, places, into, |x| of_bool(x != 0)),
        Elements::U8(v) => each(v, places, into, |x| of_int(x.into())),
        Elements::I8(v) => each(v, places, into, |x| of_int(x.into())),
        Elements::I16(v) => each(v, places, into, |x| of_int(x.into())),
        Elements::I32(v) => each(v, places, into, of_int),
        Elements::I64(v) => each(v, places, into, |x| of_int(x as i32)),
        Elements::F16(v) => each(v, places, into, f16::to_f32),
        Elements::BF16(v) => each(v, places, into, bf16::to_f32),
        Elements::F32(v) => each(v, places, into, |x| x),
        Elements::F64(v) => each(v, places, into, |x| x as f32),
    }
}

for_each_level! {
    /// Keeps the mask bits of rows `rows` of a tile of so many columns.
    pub(super) pack = pack_body(
        root: &Operand<'_>, rows: Range<usize>, columns: usize, into: &mut MaskBits
    )
}

#[inline(always)]
fn pack_body(root: &Operand<'_>, rows: Range<usize>, columns: usize, into: &mut MaskBits) {
    let width = padded(columns);
    for (line, r) in rows.enumerate() {
        match root.line(line, width) {
            Line::One(x) => into.set_all(r, columns, bool(x)),
            Line::Each(x) => into.set(r, columns, x),
        }
    }
}

for_each_level! {
    /// Writes the columns `columns` of each row of `into`.
    pub(super) store = store_body(
        root: &Operand<'_>, rows: usize, columns: Range<usize>, into: &mut [f32], stride: usize
    )
}

#[inline(always)]
fn store_body(
    root: &Operand<'_>,
    rows: usize,
    columns: Range<usize>,
    into: &mut [f32],
    stride: usize,
) {
    for r in 0..rows {
        let row = &mut into[r * stride..][columns.clone()];
        root.line(r, columns.len()).copy_to(row);
    }
}

for_each_level! {
    /// `score = op(score, other)`, or with the operands exchanged where the score is not first, in
    /// the columns `columns` of each row of `scores`.
    pub(super) change = change_body(
        of: (BinaryOp, bool),
        other: &Operand<'_>,
        rows: usize,
        columns: Range<usize>,
        scores: &mut [f32],
        stride: usize
    )
}

#[inline(always)]
fn change_body(
    (op, first): (BinaryOp, bool),
    other: &Operand<'_>,
    rows: usize,
    columns: Range<usize>,
    scores: &mut [f32],
    stride: usize,
) {
    for r in 0..rows {
        let row = &mut scores[r * stride..][columns.clone()];
        let other = other.line(r, row.len());
        match (op, first) {
            (BinaryOp::Add, _) => change_row(row, other, |x, y| x + y),
            (BinaryOp::Mul, _) => change_row(row, other, |x, y| x * y),
            (_, true) => change_row(row, other, |x, y| x - y),
            (_, false) => change_row(row, other, |x, y| y - x),
        }
    }
}

#[inline(always)]
fn change_row(row: &mut [f32], other: Line<'_>, f: impl Fn(f32, f32) -> f32) {
    match other {
        Line::One(y) => row.iter_mut().for_each(|x| *x = f(*x, y)),
        Line::Each(y) => row.iter_mut().zip(y).for_each(|(x, &y)| *x = f(*x, y)),
    }
}
