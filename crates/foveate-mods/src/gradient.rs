//! Reverse-mode derivative of a score with respect to the score it is given and to every
//! learned buffer it reads.
//!
//! The result is a program again, simplified like any other and evaluated by the same machinery
//! beside the forward pass. Conventions where a derivative is not unique: `abs` has 0 at 0;
//! `min` and `max` give a tie to their first operand; an `if` passes the gradient to the side
//! taken, whatever its condition depends on. A gradient of zero from the side not taken stays
//! zero even where that side's derivative is infinite or NaN: `x^0` has 0 everywhere for the same
//! reason, and `0^y` has 0 by a positive `y`.
//!
//! Each node's gradient is added up to one value before it is passed on, so a gradient is as long
//! as its score function times a constant, however deep branches are stacked.
//!
//! What has no useful derivative (`floor`, a number made from a comparison or an integer that
//! depends on the score, a buffer index that does) is refused when the gradient is asked for,
//! rather than counted as zero. Who wants it to count as zero says so by `detach`, which no
//! gradient passes.

use std::collections::HashMap;
use std::f32::consts::{FRAC_2_SQRT_PI, LN_2, LOG2_E};

use crate::error::{ModError, ModErrorKind};
use crate::ir::{BinaryOp, Graph, Leaf, Node, NodeId, UnaryOp};
use crate::program::{Program, ScoreMod};
use crate::value::{ScalarValue, Type};

/// The derivative of a score function.
#[derive(Clone, Debug)]
pub struct ScoreGradient {
    program: Program,
    with_score: Program,
    captures: Vec<CaptureGradient>,
}

impl ScoreGradient {
    /// Root 0 is the derivative by the score; the others are those of [`Self::captures`].
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// [`Self::program`] with one more root, the last: the score itself. One run gives both, and
    /// what they have in common once.
    pub fn with_score(&self) -> &Program {
        &self.with_score
    }

    /// One entry for each distinct read of a learned buffer.
    pub fn captures(&self) -> &[CaptureGradient] {
        &self.captures
    }
}

/// How one read of a learned buffer contributes to the buffer's gradient.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaptureGradient {
    /// Slot of the buffer in the gradient program's graph.
    pub buffer: u32,
    /// Root with the derivative of the score by the element read (f32).
    pub value: usize,
    /// Roots with the indices read (i32), one an axis. Clamp them as reads are clamped.
    pub index: Vec<usize>,
    /// Whether negative indices count from the end of their axis.
    pub from_end: bool,
}

impl ScoreMod {
    /// The derivative by the score and by the learned buffers.
    ///
    /// # Errors
    /// Names the operation that has no derivative on the way; those of [`Self::check`].
    pub fn gradient(&self) -> Result<ScoreGradient, ModError> {
        self.check()?;
        let forward = self.program();
        let active = active(forward)?;
        let forward_nodes = forward.graph().nodes().len();
        let mut tape =
            Tape { graph: forward.graph().clone(), parts: vec![Vec::new(); forward_nodes] };
        let root = forward.roots()[0];
        let one = tape.float(1.0);
        tape.parts[root.index()].push(Adjoint { value: one, guard: None, fades: false });

        let mut d_score = None;
        let mut reads = Vec::new();
        for i in (0..forward_nodes).rev() {
            let id = NodeId(i as u32);
            let parts = std::mem::take(&mut tape.parts[i]);
            if parts.is_empty() || !active[i] {
                continue;
            }
            let adjoint = tape.combined(parts);
            match tape.graph.node(id).clone() {
                Node::Leaf(Leaf::Score) => d_score = Some(tape.closed(adjoint).0),
                Node::Load { buffer, index, from_end } => {
                    reads.push((buffer, tape.closed(adjoint).0, index, from_end));
                }
                node => tape.pass_down(&node, id, adjoint, &active),
            }
        }

        let mut roots = vec![d_score.unwrap_or_else(|| tape.float(0.0))];
        let mut captures = Vec::new();
        for (buffer, value, index, from_end) in reads.into_iter().rev() {
            let first = roots.len();
            roots.push(value);
            roots.extend(&index);
            let index = (first + 1..first + 1 + index.len()).collect();
            captures.push(CaptureGradient { buffer, value: first, index, from_end });
        }
        let mut program = Program::from_graph(&tape.graph, &roots);
        roots.push(root);
        let with_score = Program::from_graph(&tape.graph, &roots);
        for capture in &mut captures {
            let buffer = &forward.graph().buffers()[capture.buffer as usize];
            capture.buffer = program.keep_buffer(buffer);
        }
        Ok(ScoreGradient { program, with_score, captures })
    }
}

/// Marks the f32 nodes a gradient passes through.
fn active(program: &Program) -> Result<Vec<bool>, ModError> {
    let graph = program.graph();
    // Depends on the score or a learned buffer, in whatever type.
    let mut touched = vec![false; graph.nodes().len()];
    let refuse = |operation: String| Err(ModErrorKind::NoDerivative { operation }.into());
    for (i, node) in graph.nodes().iter().enumerate() {
        let mut from_touched = false;
        node.for_each_operand(|x| from_touched |= touched[x.index()]);
        match node {
            Node::Load { buffer, index, .. } => {
                let buffer = &graph.buffers()[*buffer as usize];
                if index.iter().any(|x| touched[x.index()]) {
                    return refuse(format!(
                        "an index of `{}` that depends on the score",
                        buffer.name()
                    ));
                }
                touched[i] = buffer.learned();
                continue;
            }
            Node::Unary(UnaryOp::Detach, _) => continue,
            Node::Unary(UnaryOp::Floor, _) if from_touched => return refuse("floor".into()),
            Node::Unary(UnaryOp::Unit, _) if from_touched => return refuse("unit".into()),
            Node::Cast(Type::F32, x) if from_touched => {
                return refuse(format!("the conversion from {} to f32", graph.ty(*x)));
            }
            _ => {}
        }
        touched[i] = from_touched || *node == Node::Leaf(Leaf::Score);
    }
    for (i, touched) in touched.iter_mut().enumerate() {
        *touched &= graph.ty(NodeId(i as u32)) == Type::F32;
    }
    Ok(touched)
}

/// A gradient on its way to a node.
#[derive(Clone, Copy, Debug)]
struct Adjoint {
    value: NodeId,
    /// `(c, side)`: `value` counts where the condition `c` is `side`, elsewhere zero does. Kept
    /// apart so that what multiplies `value` goes inside the branch.
    guard: Option<(NodeId, bool)>,
    /// `value` itself may be the zero of a side not taken.
    fades: bool,
}

struct Tape {
    graph: Graph,
    /// Gradients arriving at each forward node, to be added up.
    parts: Vec<Vec<Adjoint>>,
}

impl Tape {
    fn float(&mut self, v: f32) -> NodeId {
        self.graph.constant_node(ScalarValue::F32(v))
    }

    fn unary(&mut self, op: UnaryOp, x: NodeId) -> NodeId {
        self.graph.simplified(Node::Unary(op, x))
    }

    fn binary(&mut self, op: BinaryOp, x: NodeId, y: NodeId) -> NodeId {
        self.graph.simplified(Node::Binary(op, x, y))
    }

    fn mul(&mut self, x: NodeId, y: NodeId) -> NodeId {
        self.binary(BinaryOp::Mul, x, y)
    }

    fn select(&mut self, cond: NodeId, then: NodeId, other: NodeId) -> NodeId {
        self.graph.simplified(Node::Select { cond, then, other })
    }

    fn is_zero(&self, id: NodeId) -> bool {
        *self.graph.node(id) == Node::F32(0)
    }

    /// True when a product with `id` cannot make NaN of a zero.
    fn is_finite(&self, id: NodeId) -> bool {
        match self.graph.node(id) {
            Node::F32(bits) => f32::from_bits(*bits).is_finite(),
            Node::Cast(..) | Node::Unary(UnaryOp::Unit, _) => true,
            _ => false,
        }
    }

    /// The value of `adjoint` with its guard applied, and whether that fades.
    fn closed(&mut self, adjoint: Adjoint) -> (NodeId, bool) {
        let Some((cond, side)) = adjoint.guard else { return (adjoint.value, adjoint.fades) };
        let zero = self.float(0.0);
        let value = match side {
            true => self.select(cond, adjoint.value, zero),
            false => self.select(cond, zero, adjoint.value),
        };
        (value, true)
    }

    /// The sum of `parts`. The two sides of one condition become one branch.
    fn combined(&mut self, parts: Vec<Adjoint>) -> Adjoint {
        /// What arrives under one condition, or under none.
        struct Group {
            cond: Option<NodeId>,
            /// By side; where there is no condition, in the first.
            sums: [Option<NodeId>; 2],
            fades: bool,
        }
        let mut groups: Vec<Group> = Vec::new();
        let mut found: HashMap<Option<NodeId>, usize> = HashMap::new();
        for part in parts {
            let (cond, side) = part.guard.map_or((None, false), |(c, side)| (Some(c), side));
            let at = *found.entry(cond).or_insert(groups.len());
            if at == groups.len() {
                groups.push(Group { cond, sums: [None; 2], fades: false });
            }
            let old = groups[at].sums[usize::from(side)];
            let sum = old.map_or(part.value, |old| self.binary(BinaryOp::Add, old, part.value));
            groups[at].sums[usize::from(side)] = Some(sum);
            groups[at].fades |= part.fades;
        }
        let joined: Vec<Adjoint> = groups
            .into_iter()
            .map(|Group { cond, sums, fades }| match (cond, sums) {
                (Some(cond), [Some(other), Some(then)]) => {
                    Adjoint { value: self.select(cond, then, other), guard: None, fades }
                }
                (cond, [first, second]) => Adjoint {
                    value: first.or(second).expect("a group has a part"),
                    guard: cond.map(|c| (c, second.is_some())),
                    fades,
                },
            })
            .collect();
        if let [only] = joined[..] {
            return only;
        }
        let closed: Vec<(NodeId, bool)> = joined.into_iter().map(|a| self.closed(a)).collect();
        let sum = closed.into_iter().reduce(|(sum, fades), (value, value_fades)| {
            (self.binary(BinaryOp::Add, sum, value), fades | value_fades)
        });
        let (value, fades) = sum.expect("a node that is reached has a gradient");
        Adjoint { value, guard: None, fades }
    }

    /// Adds `local(adjoint)` to the gradient of `to`, for a `local` that is linear. `tame` says
    /// that it makes zero of zero, whatever the operands' values are.
    fn give(
        &mut self,
        to: NodeId,
        adjoint: Adjoint,
        active: &[bool],
        tame: bool,
        local: &dyn Fn(&mut Self, NodeId) -> NodeId,
    ) {
        if !active[to.index()] {
            return;
        }
        let mut value = local(self, adjoint.value);
        if adjoint.fades && !tame {
            let zero = self.float(0.0);
            let faded = self.binary(BinaryOp::Eq, adjoint.value, zero);
            value = self.select(faded, zero, value);
        }
        if !self.is_zero(value) {
            self.parts[to.index()].push(Adjoint { value, ..adjoint });
        }
    }

    /// Adds `adjoint` to the gradient of `then` where `cond` holds and to that of `other` elsewhere.
    fn branch(
        &mut self,
        cond: NodeId,
        then: NodeId,
        other: NodeId,
        adjoint: Adjoint,
        active: &[bool],
    ) {
        let (value, fades) = self.closed(adjoint);
        for (to, side) in [(then, true), (other, false)] {
            let adjoint = Adjoint { value, guard: Some((cond, side)), fades };
            self.give(to, adjoint, active, true, &|_, a| a);
        }
    }

    /// Hands the gradient of node `id` to its operands.
    fn pass_down(&mut self, node: &Node, id: NodeId, adjoint: Adjoint, active: &[bool]) {
        match *node {
            Node::Unary(op, x) => {
                // At 0 the derivative of `abs` is a zero like that of a side not taken.
                let fades = adjoint.fades || op == UnaryOp::Abs;
                let tame = matches!(op, UnaryOp::Neg | UnaryOp::Abs);
                let adjoint = Adjoint { fades, ..adjoint };
                self.give(x, adjoint, active, tame, &|t, a| t.unary_rule(op, x, id, a));
            }
            Node::Binary(op, x, y) => self.binary_rule(op, x, y, id, adjoint, active),
            Node::Select { cond, then, other } => self.branch(cond, then, other, adjoint, active),
            _ => {}
        }
    }

    /// Gradient of `x` from gradient `a` of `v = op(x)`.
    fn unary_rule(&mut self, op: UnaryOp, x: NodeId, v: NodeId, a: NodeId) -> NodeId {
        match op {
            UnaryOp::Neg => self.unary(UnaryOp::Neg, a),
            UnaryOp::Abs => {
                let zero = self.float(0.0);
                let negative = self.binary(BinaryOp::Lt, x, zero);
                let positive = self.binary(BinaryOp::Lt, zero, x);
                let minus = self.unary(UnaryOp::Neg, a);
                let right = self.select(positive, a, zero);
                self.select(negative, minus, right)
            }
            UnaryOp::Exp => self.mul(a, v),
            UnaryOp::Exp2 => {
                let ln2 = self.float(LN_2);
                let d = self.mul(v, ln2);
                self.mul(a, d)
            }
            UnaryOp::Log => self.binary(BinaryOp::Div, a, x),
            UnaryOp::Log2 => {
                let log2e = self.float(LOG2_E);
                let d = self.binary(BinaryOp::Div, log2e, x);
                self.mul(a, d)
            }
            UnaryOp::Sqrt => {
                let half = self.float(0.5);
                let d = self.binary(BinaryOp::Div, half, v);
                self.mul(a, d)
            }
            UnaryOp::Rsqrt => {
                let minus_half = self.float(-0.5);
                let d = self.binary(BinaryOp::Div, v, x);
                let d = self.mul(minus_half, d);
                self.mul(a, d)
            }
            UnaryOp::Tanh => {
                let one = self.float(1.0);
                let square = self.mul(v, v);
                let d = self.binary(BinaryOp::Sub, one, square);
                self.mul(a, d)
            }
            UnaryOp::Sigmoid => {
                let one = self.float(1.0);
                let rest = self.binary(BinaryOp::Sub, one, v);
                let d = self.mul(v, rest);
                self.mul(a, d)
            }
            UnaryOp::Erf => {
                let square = self.mul(x, x);
                let minus = self.unary(UnaryOp::Neg, square);
                let e = self.unary(UnaryOp::Exp, minus);
                let factor = self.float(FRAC_2_SQRT_PI);
                let d = self.mul(factor, e);
                self.mul(a, d)
            }
            UnaryOp::Sin => {
                let d = self.unary(UnaryOp::Cos, x);
                self.mul(a, d)
            }
            UnaryOp::Cos => {
                let d = self.unary(UnaryOp::Sin, x);
                let d = self.unary(UnaryOp::Neg, d);
                self.mul(a, d)
            }
            UnaryOp::Floor | UnaryOp::Not | UnaryOp::Unit | UnaryOp::Detach => {
                unreachable!("no gradient passes through them")
            }
        }
    }

    fn binary_rule(
        &mut self,
        op: BinaryOp,
        x: NodeId,
        y: NodeId,
        v: NodeId,
        adjoint: Adjoint,
        active: &[bool],
    ) {
        type Rule<'a> = (bool, &'a dyn Fn(&mut Tape, NodeId) -> NodeId);
        let (to_x, to_y): (Rule<'_>, Rule<'_>) = match op {
            BinaryOp::Add => ((true, &|_, a| a), (true, &|_, a| a)),
            BinaryOp::Sub => ((true, &|_, a| a), (true, &|t, a| t.unary(UnaryOp::Neg, a))),
            BinaryOp::Mul => {
                let (tame_x, tame_y) = (self.is_finite(y), self.is_finite(x));
                ((tame_x, &|t, a| t.mul(a, y)), (tame_y, &|t, a| t.mul(a, x)))
            }
            BinaryOp::Div => (
                (false, &|t, a| t.binary(BinaryOp::Div, a, y)),
                (false, &|t, a| {
                    let d = t.binary(BinaryOp::Div, v, y);
                    let d = t.unary(UnaryOp::Neg, d);
                    t.mul(a, d)
                }),
            ),
            BinaryOp::Rem => (
                (true, &|_, a| a),
                (false, &|t, a| {
                    let quotient = t.binary(BinaryOp::Div, x, y);
                    let whole = t.unary(UnaryOp::Floor, quotient);
                    let d = t.unary(UnaryOp::Neg, whole);
                    t.mul(a, d)
                }),
            ),
            BinaryOp::Min | BinaryOp::Max => {
                let first = match op {
                    BinaryOp::Min => self.binary(BinaryOp::Le, x, y),
                    _ => self.binary(BinaryOp::Le, y, x),
                };
                return self.branch(first, x, y, adjoint, active);
            }
            BinaryOp::Pow => (
                (false, &|t, a| {
                    let (zero, one) = (t.float(0.0), t.float(1.0));
                    let less = t.binary(BinaryOp::Sub, y, one);
                    let power = t.binary(BinaryOp::Pow, x, less);
                    let d = t.mul(y, power);
                    let flat = t.binary(BinaryOp::Eq, y, zero);
                    let d = t.select(flat, zero, d);
                    t.mul(a, d)
                }),
                (false, &|t, a| {
                    let zero = t.float(0.0);
                    let log = t.unary(UnaryOp::Log, x);
                    let d = t.mul(v, log);
                    let flat = t.binary(BinaryOp::Eq, v, zero);
                    let d = t.select(flat, zero, d);
                    t.mul(a, d)
                }),
            ),
            BinaryOp::Eq
            | BinaryOp::Ne
            | BinaryOp::Lt
            | BinaryOp::Le
            | BinaryOp::And
            | BinaryOp::Or
            | BinaryOp::Xor
            | BinaryOp::Shl
            | BinaryOp::Shr
            | BinaryOp::Mix => unreachable!("{op:?} does not give an f32"),
        };
        self.give(x, adjoint, active, to_x.0, to_x.1);
        self.give(y, adjoint, active, to_y.0, to_y.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::Buffer;
    use crate::expr::{self, Expr};
    use crate::point::Point;

    fn value(program: &Program, root: usize, score: f32) -> f32 {
        let point = Point { h: 1, q: 3, kv: 2, score, ..Default::default() };
        match program.eval(&point).unwrap()[root] {
            ScalarValue::F32(v) => v,
            other => panic!("{other:?} is not f32"),
        }
    }

    fn check(name: &str, f: impl Fn(Expr<f32>) -> Expr<f32>, at: f32) {
        let score = ScoreMod::new(f(expr::score()).dynamic()).unwrap();
        let step = 1e-2;
        let ahead = value(score.program(), 0, at + step);
        let behind = value(score.program(), 0, at - step);
        let central = (ahead - behind) / (2.0 * step);
        let exact = value(&score.gradient().unwrap().program, 0, at);
        let error = (central - exact).abs() / exact.abs().max(1.0);
        assert!(error < 2e-3, "{name} at {at}: central {central}, exact {exact}");
    }

    #[test]
    fn every_rule_agrees_with_central_differences() {
        for at in [0.7, 1.3, 2.1] {
            check("neg", |s| -s, at);
            check("abs", |s| (s - 1.0).abs() * 2.0, at);
            check("exp", |s| s.exp(), at);
            check("exp2", |s| s.exp2(), at);
            check("log", |s| s.log(), at);
            check("log2", |s| s.log2(), at);
            check("sqrt", |s| s.sqrt(), at);
            check("rsqrt", |s| s.rsqrt(), at);
            check("tanh", |s| s.tanh(), at);
            check("sigmoid", |s| s.sigmoid(), at);
            check("erf", |s| s.erf(), at);
            check("sin", |s| s.sin() * s.cos(), at);
            check("div", |s| 2.0 / (&s + 1.0) + &s / 3.0, at);
            check("rem", |s| (&s + 0.2) % 5.0, at);
            check("min max", |s| s.min(1.0) + s.max(1.5) * 3.0, at);
            check("pow", |s| s.pow(2.5) + s.pow(&s), at);
            check("if", |s| s.gt(1.0).select(&s * &s, &s * 0.1), at);
            check("read twice", |s| &s * &s * &s, at);
        }
    }

    #[test]
    fn gradients_of_stacked_branches_grow_by_the_branch() {
        let nodes = |levels: usize, step: &dyn Fn(Expr<f32>, i32) -> Expr<f32>| {
            let e = (0..levels).fold(expr::score(), |e, i| step(e, i as i32));
            let gradient = ScoreMod::new(e.dynamic()).unwrap().gradient().unwrap();
            gradient.program.graph().nodes().len()
        };
        let per_head = |e: Expr<f32>, i: i32| expr::h().eq(i).select(&e + i as f32, &e * 1.5);
        let leaky = |e: Expr<f32>, _| e.max(&e * 0.1);
        let guarded = |e: Expr<f32>, i: i32| expr::q().lt(i).select(e.log(), e.sqrt());
        let steps: [&dyn Fn(Expr<f32>, i32) -> Expr<f32>; 3] = [&per_head, &leaky, &guarded];
        for step in steps {
            let (some, more) = (nodes(50, step), nodes(100, step));
            assert!(more < 2 * some + 50 && more < 3000, "{some} nodes, then {more}");
            let deep = (0..1000).fold(expr::score(), step);
            let forward = ScoreMod::new(deep.dynamic()).unwrap().program().graph().nodes().len();
            let both = nodes(1000, step);
            assert!(both < 20 * forward, "{forward} nodes forward, {both} in the gradient");
        }
        nodes(20_000, &guarded);
    }

    #[test]
    fn a_power_of_zero_has_no_nan_in_its_gradient() {
        let s = expr::score();
        let at = |e: Expr<f32>, score: f32| {
            let gradient = ScoreMod::new(e.dynamic()).unwrap().gradient().unwrap();
            value(&gradient.program, 0, score)
        };
        assert_eq!(at(s.pow(0.0), 0.0), 0.0);
        assert_eq!(at(s.pow(expr::scalar("y", 0.0)), 0.0), 0.0);
        assert_eq!(at(Expr::from(0.0).pow(&s), 2.0), 0.0);
        assert_eq!(at(s.pow(2.0), 0.0), 0.0);
        assert_eq!(at(s.pow(1.0), 0.0), 1.0);
    }

    #[test]
    fn the_side_not_taken_adds_no_nan() {
        let s = expr::score();
        let guarded = s.gt(0.0).select(s.log(), &s * 2.0);
        let gradient = ScoreMod::new(guarded.dynamic()).unwrap().gradient().unwrap();
        assert_eq!(value(&gradient.program, 0, 0.0), 2.0);
        assert_eq!(value(&gradient.program, 0, -1.0), 2.0);
        assert_eq!(value(&gradient.program, 0, 4.0), 0.25);

        // The guard stands outside a read used twice, a second branch, and a function of both.
        let log = s.log();
        let inner = expr::q().eq(3).select(&log * s.sqrt(), (-log.clone()).exp());
        let nested = s.gt(0.0).select((&inner + &log).tanh(), &s * 2.0) + s.min(0.0);
        let gradient = ScoreMod::new(nested.dynamic()).unwrap().gradient().unwrap();
        assert_eq!(value(&gradient.program, 0, -1.0), 3.0);
        assert!(value(&gradient.program, 0, 1.5).is_finite());
    }

    #[test]
    fn each_read_of_a_learned_buffer_has_its_value_and_index() {
        let bias = Buffer::learned("bias", &[2, 8], vec![0.5; 16]).unwrap();
        let read = bias.at([expr::h(), expr::q() - expr::kv()]);
        let score = expr::score() * &read + bias.at([expr::h(), expr::q()]);
        let gradient = ScoreMod::new(score.dynamic()).unwrap().gradient().unwrap();
        assert_eq!(gradient.captures.len(), 2);
        let point = Point { h: 1, q: 3, kv: 2, score: 7.0, ..Default::default() };
        let roots = gradient.program.eval(&point).unwrap();
        assert_eq!(roots[0], ScalarValue::F32(0.5));
        let mut seen: Vec<_> = gradient
            .captures
            .iter()
            .map(|c| (roots[c.value], c.index.iter().map(|&i| roots[i]).collect::<Vec<_>>()))
            .collect();
        seen.sort_by_key(|(_, index)| format!("{index:?}"));
        let i = ScalarValue::I32;
        assert_eq!(seen[0], (ScalarValue::F32(7.0), vec![i(1), i(1)]));
        assert_eq!(seen[1], (ScalarValue::F32(1.0), vec![i(1), i(3)]));
    }

    #[test]
    fn what_has_no_derivative_is_refused() {
        let refused = |e: Expr<f32>| ScoreMod::new(e.dynamic()).unwrap().gradient().is_err();
        let s = expr::score;
        assert!(refused(s().floor()));
        assert!(!refused(s().detach().floor() + s()));
        assert!(refused(s().to_i32().to_f32()));
        assert!(!refused(s().to_i32().detach().to_f32()));
        assert!(refused(s().gt(0.0).to_f32()));
        assert!(refused(s().to_i32().to_f32()));
        let table = Buffer::vector("table", vec![1.0f32; 4]);
        assert!(refused(table.at([s().to_i32()]) + s()));
        assert!(!refused(expr::q().to_f32().floor() + s()));
    }
}
