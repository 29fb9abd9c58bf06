//! How long printed expressions are, about.
//!
//! It decides what is copied to each place that needs it and what is called or put into a loop, so
//! that a long score does not take the compiler long.

use foveate_mods::ir::{BinaryOp, UnaryOp};
use foveate_mods::{MaskMod, Node, NodeId, Program, ScoreMod};

use super::needed;
use super::print::decides;

/// About how many instructions `roots` take, once each. With `fast_math` floats that no integer
/// depends on come from the special function units; else an elementary function is a polynomial.
pub(super) fn steps(program: &Program, roots: &[NodeId], fast_math: bool) -> usize {
    let nodes = program.graph().nodes();
    let mut needed = vec![false; nodes.len()];
    let exact = if fast_math { decides(program, roots) } else { vec![true; nodes.len()] };
    roots.iter().for_each(|root| needed[root.index()] = true);
    let mut steps = 0;
    for (i, node) in nodes.iter().enumerate().rev() {
        if !needed[i] {
            continue;
        }
        node.for_each_operand(|x| needed[x.index()] = true);
        steps += match node {
            Node::Unary(op, _) if exact[i] => unary_steps(*op),
            Node::Unary(op, _) => unary_steps(*op).min(fast_steps(*op)),
            Node::Binary(op, ..) => binary_steps(*op, exact[i]),
            Node::Load { .. } | Node::Select { .. } | Node::Cast(..) => 1,
            Node::Leaf(_) | Node::Bool(_) | Node::I32(_) | Node::F32(_) | Node::Scalar(_) => 0,
        };
    }
    steps
}

/// About how many instructions a mask's evaluation takes for one pair: a load is one and what finds its address.
pub(crate) fn mask_steps(mask: &MaskMod) -> usize {
    evaluation_steps(mask.program())
}

/// Whether a mask's evaluation reads a captured buffer.
pub(crate) fn mask_reads(mask: &MaskMod) -> bool {
    loads(mask.program()) > 0
}

/// [`mask_steps`] of a score, whose elementary functions count as if they were polynomials.
pub(crate) fn score_steps(score: &ScoreMod) -> usize {
    evaluation_steps(score.program())
}

fn evaluation_steps(program: &Program) -> usize {
    const ADDRESS: usize = 3;
    steps(program, program.roots(), false) + ADDRESS * loads(program)
}

fn loads(program: &Program) -> usize {
    let nodes = program.graph().nodes().iter().zip(needed(program, program.roots()));
    nodes.filter(|(node, needed)| *needed && matches!(node, Node::Load { .. })).count()
}

fn unary_steps(op: UnaryOp) -> usize {
    match op {
        UnaryOp::Detach => 0,
        UnaryOp::Neg | UnaryOp::Not | UnaryOp::Abs | UnaryOp::Floor | UnaryOp::Unit => 1,
        UnaryOp::Sqrt | UnaryOp::Rsqrt => 10,
        UnaryOp::Sin | UnaryOp::Cos => 60,
        UnaryOp::Exp
        | UnaryOp::Exp2
        | UnaryOp::Log
        | UnaryOp::Log2
        | UnaryOp::Tanh
        | UnaryOp::Sigmoid
        | UnaryOp::Erf => 30,
    }
}

/// With the special function units.
fn fast_steps(op: UnaryOp) -> usize {
    match op {
        UnaryOp::Detach => 0,
        UnaryOp::Erf => 30,
        UnaryOp::Sin | UnaryOp::Cos => 20,
        UnaryOp::Neg
        | UnaryOp::Not
        | UnaryOp::Abs
        | UnaryOp::Floor
        | UnaryOp::Unit
        | UnaryOp::Sqrt
        | UnaryOp::Rsqrt
        | UnaryOp::Exp
        | UnaryOp::Exp2
        | UnaryOp::Log
        | UnaryOp::Log2
        | UnaryOp::Tanh
        | UnaryOp::Sigmoid => 3,
    }
}

fn binary_steps(op: BinaryOp, exact: bool) -> usize {
    match op {
        BinaryOp::Div if !exact => 2,
        BinaryOp::Div | BinaryOp::Rem => 10,
        BinaryOp::Pow => 60,
        BinaryOp::Add
        | BinaryOp::Sub
        | BinaryOp::Mul
        | BinaryOp::Min
        | BinaryOp::Max
        | BinaryOp::Eq
        | BinaryOp::Ne
        | BinaryOp::Lt
        | BinaryOp::Le
        | BinaryOp::And
        | BinaryOp::Or
        | BinaryOp::Xor
        | BinaryOp::Shl
        | BinaryOp::Shr
        | BinaryOp::Mix => 1,
    }
}

#[cfg(test)]
mod tests {
    use foveate_mods::text::{Names, parse_score};

    use super::*;

    #[test]
    fn what_a_comparison_of_a_score_reads_is_as_short_as_the_score() {
        for (text, fast, accurate) in [
            ("tanh(score)", 3, 30),
            // The comparison and the choice are one instruction each.
            ("if tanh(score) > 0.5 { score } else { 0.0 }", 3 + 2, 30 + 2),
            ("if score / 3.0 > 0.5 { score } else { 0.0 }", 2 + 2, 10 + 2),
            // An integer is the same on every backend, so what it depends on is accurate.
            ("score + f32(i32(tanh(score)))", 30 + 3, 30 + 3),
        ] {
            let score = parse_score(text, &Names::new()).unwrap_or_else(|e| panic!("{text}: {e}"));
            let of = |fast| steps(score.program(), score.program().roots(), fast);
            assert_eq!([of(true), of(false)], [fast, accurate], "{text}");
        }
    }
}
