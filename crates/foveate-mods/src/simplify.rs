//! Simplification, at the one place where nodes are made.
//!
//! [`Graph::simplified`] is what tracing and differentiation call instead of
//! [`Graph::intern`]. It folds constants with the meaning of [`crate::arithmetic`] and applies only
//! identities that hold bit for bit: integer arithmetic wraps, so its ring identities hold; on
//! floats `x·1`, `x/1` and `x−0` are kept out, while `x+0` (wrong for −0) and `x·0` (wrong for
//! NaN) stay. Operands of commutative operations are put into an order that depends on what
//! they say, not on when they were made, so that `a & b` and `b & a` are one node.

use crate::arithmetic;
use crate::ir::{BinaryOp, Graph, Node, NodeId, UnaryOp};
use crate::value::{ScalarValue, Type};

use BinaryOp::{Add, And, Div, Eq, Le, Lt, Max, Min, Mul, Ne, Or, Rem, Sub, Xor};

impl Graph {
    /// The value of a constant node.
    pub fn constant(&self, id: NodeId) -> Option<ScalarValue> {
        match self.node(id) {
            Node::Bool(v) => Some(ScalarValue::Bool(*v)),
            Node::I32(v) => Some(ScalarValue::I32(*v)),
            Node::F32(v) => Some(ScalarValue::F32(f32::from_bits(*v))),
            _ => None,
        }
    }

    /// The node of a constant.
    pub fn constant_node(&mut self, value: ScalarValue) -> NodeId {
        self.intern(match value {
            ScalarValue::Bool(v) => Node::Bool(v),
            ScalarValue::I32(v) => Node::I32(v),
            // One NaN: its sign and payload differ between machines.
            ScalarValue::F32(v) if v.is_nan() => Node::F32(f32::NAN.to_bits()),
            ScalarValue::F32(v) => Node::F32(v.to_bits()),
        })
    }

    /// Adds `node` in its simplest form, or finds it.
    pub fn simplified(&mut self, node: Node) -> NodeId {
        match node {
            Node::Unary(op, x) => self.simplified_unary(op, x),
            Node::Binary(op, x, y) => self.simplified_binary(op, x, y),
            Node::Select { cond, then, other } => self.simplified_select(cond, then, other),
            Node::Cast(to, x) => match self.constant(x) {
                Some(v) => self.constant_node(arithmetic::cast(to, v)),
                None => self.intern(node),
            },
            Node::F32(bits) => self.constant_node(ScalarValue::F32(f32::from_bits(bits))),
            node => self.intern(node),
        }
    }

    fn simplified_unary(&mut self, op: UnaryOp, x: NodeId) -> NodeId {
        if let Some(v) = self.constant(x) {
            return self.constant_node(arithmetic::unary(op, v));
        }
        match (op, self.node(x).clone()) {
            (UnaryOp::Not, Node::Unary(UnaryOp::Not, y))
            | (UnaryOp::Neg, Node::Unary(UnaryOp::Neg, y)) => y,
            (UnaryOp::Detach, Node::Unary(UnaryOp::Detach, _)) => x,
            (UnaryOp::Not, Node::Binary(Eq, a, b)) => self.simplified_binary(Ne, a, b),
            (UnaryOp::Not, Node::Binary(Ne, a, b)) => self.simplified_binary(Eq, a, b),
            // `!(a < b)` is `b <= a` only where there is no NaN.
            (UnaryOp::Not, Node::Binary(Lt, a, b)) if self.ty(a) == Type::I32 => {
                self.simplified_binary(Le, b, a)
            }
            (UnaryOp::Not, Node::Binary(Le, a, b)) if self.ty(a) == Type::I32 => {
                self.simplified_binary(Lt, b, a)
            }
            _ => self.intern(Node::Unary(op, x)),
        }
    }

    fn simplified_binary(&mut self, op: BinaryOp, x: NodeId, y: NodeId) -> NodeId {
        let (cx, cy) = (self.constant(x), self.constant(y));
        if let (Some(cx), Some(cy)) = (cx, cy) {
            return self.constant_node(arithmetic::binary(op, cx, cy));
        }
        let ty = self.ty(x);
        let found = match ty {
            Type::Bool => self.bool_identity(op, x, y),
            Type::I32 => self.i32_identity(op, x, y),
            Type::F32 => {
                let one = Some(ScalarValue::F32(1.0));
                match op {
                    Mul if cx == one => Some(y),
                    Mul | Div if cy == one => Some(x),
                    Sub if matches!(cy, Some(ScalarValue::F32(v)) if v.to_bits() == 0) => Some(x),
                    _ => None,
                }
            }
        };
        if let Some(id) = found {
            return id;
        }
        let commutes = match op {
            Add | Mul | Eq | Ne | And | Or | Xor => true,
            Min | Max => ty == Type::I32,
            _ => false,
        };
        let swap = commutes && self.order_key(y) < self.order_key(x);
        self.intern(if swap { Node::Binary(op, y, x) } else { Node::Binary(op, x, y) })
    }

    fn bool_identity(&mut self, op: BinaryOp, x: NodeId, y: NodeId) -> Option<NodeId> {
        let truth = |g: &Graph, id| match g.constant(id) {
            Some(ScalarValue::Bool(v)) => Some(v),
            _ => None,
        };
        let negates = |g: &Graph, a: NodeId, b: NodeId| *g.node(a) == Node::Unary(UnaryOp::Not, b);
        if x == y {
            return Some(match op {
                And | Or => x,
                Eq => self.constant_node(ScalarValue::Bool(true)),
                _ => self.constant_node(ScalarValue::Bool(false)),
            });
        }
        if matches!(op, And | Or) && (negates(self, x, y) || negates(self, y, x)) {
            return Some(self.constant_node(ScalarValue::Bool(op == Or)));
        }
        let (known, other) = match (truth(self, x), truth(self, y)) {
            (Some(v), _) => (v, y),
            (_, Some(v)) => (v, x),
            _ => return None,
        };
        Some(match (op, known) {
            (And, true) | (Or, false) | (Xor | Ne, false) | (Eq, true) => other,
            (And, false) | (Or, true) => self.constant_node(ScalarValue::Bool(known)),
            _ => self.simplified_unary(UnaryOp::Not, other),
        })
    }

    fn i32_identity(&mut self, op: BinaryOp, x: NodeId, y: NodeId) -> Option<NodeId> {
        let int = |g: &Graph, id| match g.constant(id) {
            Some(ScalarValue::I32(v)) => Some(v),
            _ => None,
        };
        match (op, int(self, x), int(self, y)) {
            (Add, Some(0), _) | (Mul, Some(1), _) => return Some(y),
            (Add | Sub, _, Some(0)) | (Mul | Div, _, Some(1)) => return Some(x),
            (Mul, Some(0), _) | (Mul, _, Some(0)) | (Rem, _, Some(1)) => {
                return Some(self.constant_node(ScalarValue::I32(0)));
            }
            _ => {}
        }
        if x != y {
            return None;
        }
        match op {
            Min | Max => Some(x),
            Sub => Some(self.constant_node(ScalarValue::I32(0))),
            Eq | Le => Some(self.constant_node(ScalarValue::Bool(true))),
            Ne | Lt => Some(self.constant_node(ScalarValue::Bool(false))),
            _ => None,
        }
    }

    fn simplified_select(&mut self, cond: NodeId, then: NodeId, other: NodeId) -> NodeId {
        if then == other {
            return then;
        }
        if let Some(ScalarValue::Bool(v)) = self.constant(cond) {
            return if v { then } else { other };
        }
        if let Node::Unary(UnaryOp::Not, c) = *self.node(cond) {
            return self.simplified_select(c, other, then);
        }
        if self.ty(then) == Type::Bool {
            match (self.constant(then), self.constant(other)) {
                (Some(ScalarValue::Bool(true)), _) => {
                    return self.simplified_binary(Or, cond, other);
                }
                (_, Some(ScalarValue::Bool(false))) => {
                    return self.simplified_binary(And, cond, then);
                }
                (Some(ScalarValue::Bool(false)), _) => {
                    let not = self.simplified_unary(UnaryOp::Not, cond);
                    return self.simplified_binary(And, not, other);
                }
                (_, Some(ScalarValue::Bool(true))) => {
                    let not = self.simplified_unary(UnaryOp::Not, cond);
                    return self.simplified_binary(Or, not, then);
                }
                _ => {}
            }
        }
        self.intern(Node::Select { cond, then, other })
    }
}
