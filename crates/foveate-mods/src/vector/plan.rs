//! How the mask bits of a tile are made of whole words, where a program allows it.

use super::rate::Rate;
use crate::ir::{BinaryOp, Node, UnaryOp};
use crate::program::Program;
use crate::value::Type;

/// A step of making the mask bits of a tile. Planes, which hold a bit an entry, are on a stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Adds the plane of a node that changes less often than entries.
    Of(usize),
    /// Adds the plane of a comparison of two such integers.
    Compare(BinaryOp, [usize; 2]),
    /// Negates the last plane.
    Not,
    /// Makes one of the last two.
    Both(BinaryOp),
}

/// Steps of a program at most: where nodes are shared there may be very many.
const STEPS: usize = 32;

/// The steps that make root 0 of a program whose nodes have these rates, when it is a bool and
/// planes are all it takes.
pub(super) fn steps(program: &Program, rates: &[Rate]) -> Option<Vec<Step>> {
    let mut steps = Vec::new();
    add(program, rates, program.roots().first()?.index(), &mut steps)?;
    Some(steps)
}

fn add(program: &Program, rates: &[Rate], i: usize, steps: &mut Vec<Step>) -> Option<()> {
    let graph = program.graph();
    if graph.types()[i] != Type::Bool || steps.len() == STEPS {
        return None;
    }
    let rare = |i: usize| rates[i] != Rate::Full;
    let last = match &graph.nodes()[i] {
        _ if rare(i) => Step::Of(i),
        Node::Unary(UnaryOp::Not, x) => {
            add(program, rates, x.index(), steps)?;
            Step::Not
        }
        Node::Binary(op, x, y) if graph.ty(*x) == Type::Bool => {
            add(program, rates, x.index(), steps)?;
            add(program, rates, y.index(), steps)?;
            Step::Both(*op)
        }
        Node::Binary(op, x, y) if graph.ty(*x) == Type::I32 => {
            let both = [x.index(), y.index()];
            both.into_iter().all(rare).then_some(Step::Compare(*op, both))?
        }
        _ => return None,
    };
    steps.push(last);
    Some(())
}
