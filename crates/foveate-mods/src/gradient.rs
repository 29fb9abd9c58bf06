//! Reverse-mode derivative of a score with respect to the score it is given and to every
//! learned buffer it reads.
//!
//! The result is a program again, simplified like any other and evaluated by the same machinery
//! beside the forward pass. Conventions where a derivative is not unique: `abs` has 0 at 0;
//! `min` and `max` give a tie to their first operand; an `if` passes the gradient to the side
//! taken, whatever its condition depends on. A gradient of zero from the side not taken stays
//! zero even where that side's derivative is infinite.
//!
//! What has no useful derivative (`floor`, a number made from a comparison or an integer that
//! depends on the score, a buffer index that does) is refused when the gradient is asked for,
//! rather than counted as zero.

use std::f32::consts::{FRAC_2_SQRT_PI, LN_2, LOG2_E};

use crate::capture::ScalarValue;
use crate::error::{ModError, ModErrorKind};
use crate::ir::{BinaryOp, Graph, Leaf, Node, NodeId, Type, UnaryOp};
use crate::program::{Program, ScoreMod};

/// The derivative of a score function.
#[derive(Clone, Debug)]
pub struct ScoreGradient {
    program: Program,
    captures: Vec<CaptureGradient>,
}

impl ScoreGradient {
    /// Root 0 is the derivative by the score; the others are those of [`Self::captures`].
    pub fn program(&self) -> &Program {
        &self.program
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
}

impl ScoreMod {
    /// The derivative by the score and by the learned buffers.
    ///
    /// # Errors
    /// Names the operation that has no derivative on the way.
    pub fn gradient(&self) -> Result<ScoreGradient, ModError> {
        let forward = self.program();
        let active = active(forward)?;
        let mut tape = Tape { graph: forward.graph().clone(), parts: Vec::new() };
        let forward_nodes = forward.graph().nodes().len();
        tape.parts.resize(forward_nodes, Vec::new());
        let root = forward.roots()[0];
        let one = tape.float(1.0);
        tape.parts[root.index()].push(one);

        let mut d_score = None;
        let mut reads = Vec::new();
        for i in (0..forward_nodes).rev() {
            let id = NodeId(i as u32);
            let parts = std::mem::take(&mut tape.parts[i]);
            if parts.is_empty() || !active[i] {
                continue;
            }
            let parts = tape.merged(parts);
            match tape.graph.node(id).clone() {
                Node::Leaf(Leaf::Score) => d_score = Some(tape.sum(&parts)),
                Node::Load { buffer, index } => reads.push((buffer, tape.sum(&parts), index)),
                node => {
                    for part in parts {
                        tape.pass_down(&node, id, part, &active);
                    }
                }
            }
        }

        let mut roots = vec![d_score.unwrap_or_else(|| tape.float(0.0))];
        let mut captures = Vec::new();
        for (buffer, value, index) in reads.into_iter().rev() {
            let first = roots.len();
            roots.push(value);
            roots.extend(&index);
            let index = (first + 1..first + 1 + index.len()).collect();
            captures.push(CaptureGradient { buffer, value: first, index });
        }
        let mut program = Program::from_graph(&tape.graph, &roots);
        for capture in &mut captures {
            let buffer = &forward.graph().buffers()[capture.buffer as usize];
            capture.buffer = program.keep_buffer(buffer);
        }
        Ok(ScoreGradient { program, captures })
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
            Node::Load { buffer, index } => {
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
            Node::Unary(UnaryOp::Floor, _) if from_touched => return refuse("floor".into()),
            Node::Unary(UnaryOp::Unit, _) if from_touched => return refuse("unit".into()),
            Node::Cast(Type::F32, x) if from_touched => {
                return refuse(format!("the conversion of a {} to f32", graph.ty(*x)));
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

struct Tape {
    graph: Graph,
    /// Gradients arriving at each forward node, to be added up.
    parts: Vec<Vec<NodeId>>,
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

    fn sum(&mut self, parts: &[NodeId]) -> NodeId {
        let (&first, rest) = parts.split_first().expect("a node that is reached has a gradient");
        rest.iter().fold(first, |sum, &part| self.binary(BinaryOp::Add, sum, part))
    }

    fn is_zero(&self, id: NodeId) -> bool {
        *self.graph.node(id) == Node::F32(0)
    }

    /// `if c { x } else { 0 }` or the other way round: kept apart from other parts, so that
    /// what multiplies it can be put inside the branch.
    fn is_guarded(&self, id: NodeId) -> bool {
        match *self.graph.node(id) {
            Node::Select { then, other, .. } => self.is_zero(then) || self.is_zero(other),
            _ => false,
        }
    }

    fn merged(&mut self, parts: Vec<NodeId>) -> Vec<NodeId> {
        let (mut merged, plain): (Vec<_>, Vec<_>) =
            parts.into_iter().partition(|&p| self.is_guarded(p));
        if !plain.is_empty() {
            merged.push(self.sum(&plain));
        }
        merged
    }

    /// `local(part)` for a function linear in its argument, inside the guards of `part`.
    fn scaled(&mut self, part: NodeId, local: &dyn Fn(&mut Self, NodeId) -> NodeId) -> NodeId {
        match *self.graph.node(part) {
            Node::Select { cond, then, other } if self.is_zero(other) => {
                let then = self.scaled(then, local);
                self.select(cond, then, other)
            }
            Node::Select { cond, then, other } if self.is_zero(then) => {
                let other = self.scaled(other, local);
                self.select(cond, then, other)
            }
            _ => local(self, part),
        }
    }

    fn give(
        &mut self,
        to: NodeId,
        part: NodeId,
        active: &[bool],
        local: &dyn Fn(&mut Self, NodeId) -> NodeId,
    ) {
        if active[to.index()] {
            let part = self.scaled(part, local);
            if !self.is_zero(part) {
                self.parts[to.index()].push(part);
            }
        }
    }

    /// Hands the gradient `part` of node `id` to its operands.
    fn pass_down(&mut self, node: &Node, id: NodeId, part: NodeId, active: &[bool]) {
        match *node {
            Node::Unary(op, x) => self.give(x, part, active, &|t, a| t.unary_rule(op, x, id, a)),
            Node::Binary(op, x, y) => self.binary_rule(op, x, y, id, part, active),
            Node::Select { cond, then, other } => {
                self.give(then, part, active, &|t, a| {
                    let zero = t.float(0.0);
                    t.select(cond, a, zero)
                });
                self.give(other, part, active, &|t, a| {
                    let zero = t.float(0.0);
                    t.select(cond, zero, a)
                });
            }
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
            UnaryOp::Floor | UnaryOp::Not | UnaryOp::Unit => {
                unreachable!("refused before any gradient is passed down")
            }
        }
    }

    fn binary_rule(
        &mut self,
        op: BinaryOp,
        x: NodeId,
        y: NodeId,
        v: NodeId,
        part: NodeId,
        active: &[bool],
    ) {
        type Rule<'a> = &'a dyn Fn(&mut Tape, NodeId) -> NodeId;
        let (to_x, to_y): (Rule<'_>, Rule<'_>) = match op {
            BinaryOp::Add => (&|_, a| a, &|_, a| a),
            BinaryOp::Sub => (&|_, a| a, &|t, a| t.unary(UnaryOp::Neg, a)),
            BinaryOp::Mul => (&|t, a| t.mul(a, y), &|t, a| t.mul(a, x)),
            BinaryOp::Div => (&|t, a| t.binary(BinaryOp::Div, a, y), &|t, a| {
                let d = t.binary(BinaryOp::Div, v, y);
                let d = t.unary(UnaryOp::Neg, d);
                t.mul(a, d)
            }),
            BinaryOp::Rem => (&|_, a| a, &|t, a| {
                let quotient = t.binary(BinaryOp::Div, x, y);
                let whole = t.unary(UnaryOp::Floor, quotient);
                let d = t.unary(UnaryOp::Neg, whole);
                t.mul(a, d)
            }),
            BinaryOp::Min | BinaryOp::Max => {
                let first = match op {
                    BinaryOp::Min => self.binary(BinaryOp::Le, x, y),
                    _ => self.binary(BinaryOp::Le, y, x),
                };
                self.give(x, part, active, &|t, a| {
                    let zero = t.float(0.0);
                    t.select(first, a, zero)
                });
                self.give(y, part, active, &|t, a| {
                    let zero = t.float(0.0);
                    t.select(first, zero, a)
                });
                return;
            }
            BinaryOp::Pow => (
                &|t, a| {
                    let one = t.float(1.0);
                    let less = t.binary(BinaryOp::Sub, y, one);
                    let power = t.binary(BinaryOp::Pow, x, less);
                    let d = t.mul(y, power);
                    t.mul(a, d)
                },
                &|t, a| {
                    let log = t.unary(UnaryOp::Log, x);
                    let d = t.mul(v, log);
                    t.mul(a, d)
                },
            ),
            _ => unreachable!("the other operations do not give an f32"),
        };
        self.give(x, part, active, to_x);
        self.give(y, part, active, to_y);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::Buffer;
    use crate::eval::Point;
    use crate::expr::{self, Expr};

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
    fn the_side_not_taken_adds_no_nan() {
        let s = expr::score();
        let guarded = s.gt(0.0).select(s.log(), &s * 2.0);
        let gradient = ScoreMod::new(guarded.dynamic()).unwrap().gradient().unwrap();
        assert_eq!(value(&gradient.program, 0, 0.0), 2.0);
        assert_eq!(value(&gradient.program, 0, -1.0), 2.0);
        assert_eq!(value(&gradient.program, 0, 4.0), 0.25);
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
        assert!(refused(s().gt(0.0).to_f32()));
        assert!(refused(s().to_i32().to_f32()));
        let table = Buffer::vector("table", vec![1.0f32; 4]);
        assert!(refused(table.at([s().to_i32()]) + s()));
        assert!(!refused(expr::q().to_f32().floor() + s()));
    }
}
