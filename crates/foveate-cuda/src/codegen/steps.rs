//! How long printed expressions are, about.
//!
//! It decides what is copied to each place that needs it and what is called or put into a loop, so
//! that a long score does not take the compiler long.

use foveate_mods::ir::{BinaryOp, UnaryOp};
use foveate_mods::{Node, NodeId, Program, Type};

/// About how many instructions `roots` take, once each. With `fast_math` floats that no integer
/// hangs on come from the special function units; else an elementary function is a polynomial.
pub(super) fn steps(program: &Program, roots: &[NodeId], fast_math: bool) -> usize {
    let (nodes, types) = (program.graph().nodes(), program.graph().types());
    let mut needed = vec![false; nodes.len()];
    let mut exact = vec![!fast_math; nodes.len()];
    roots.iter().for_each(|root| needed[root.index()] = true);
    let mut steps = 0;
    for (i, node) in nodes.iter().enumerate().rev().filter(|(_, node)| !is_free(node)) {
        if !needed[i] {
            continue;
        }
        let decides = exact[i] || types[i] != Type::F32;
        node.for_each_operand(|x| {
            needed[x.index()] = true;
            exact[x.index()] |= decides;
        });
        steps += match node {
            Node::Unary(op, _) if decides => unary_steps(*op),
            Node::Unary(op, _) => unary_steps(*op).min(fast_steps(*op)),
            Node::Binary(BinaryOp::Div, ..) if !decides => 2,
            Node::Binary(BinaryOp::Div | BinaryOp::Rem, ..) => 10,
            Node::Binary(BinaryOp::Pow, ..) => 60,
            _ => 1,
        };
    }
    steps
}

/// A leaf: nothing is computed.
fn is_free(node: &Node) -> bool {
    matches!(node, Node::Leaf(_) | Node::Bool(_) | Node::I32(_) | Node::F32(_) | Node::Scalar(_))
}

fn unary_steps(op: UnaryOp) -> usize {
    match op {
        UnaryOp::Neg | UnaryOp::Not | UnaryOp::Abs | UnaryOp::Floor | UnaryOp::Unit => 1,
        UnaryOp::Sqrt | UnaryOp::Rsqrt => 10,
        UnaryOp::Sin | UnaryOp::Cos => 60,
        _ => 30,
    }
}

/// With the special function units.
fn fast_steps(op: UnaryOp) -> usize {
    match op {
        UnaryOp::Erf => 30,
        UnaryOp::Sin | UnaryOp::Cos => 20,
        _ => 3,
    }
}
