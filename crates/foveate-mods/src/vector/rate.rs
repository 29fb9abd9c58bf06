//! How often each node of a program changes over a tile.

use crate::ir::{BinaryOp, Leaf, Node, NodeId, UnaryOp};
use crate::program::Program;
use crate::value::Type;

/// How often a node changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rate {
    /// Once a head.
    Head,
    /// With the query.
    Row,
    /// With the key.
    Column,
    /// With the distance between key and query.
    Diagonal,
    /// With every entry.
    Full,
}

impl Rate {
    /// That of a node whose operands have these, as far as rates tell.
    pub(super) fn join(self, other: Self) -> Self {
        match (self, other) {
            (Rate::Head, x) | (x, Rate::Head) => x,
            (x, y) if x == y => x,
            _ => Rate::Full,
        }
    }
}

/// `q·row + kv·column + c` for some `c` of the head, in wrapping arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Affine {
    pub(super) row: i32,
    pub(super) column: i32,
}

impl Affine {
    fn is_diagonal(self) -> bool {
        self.row != 0 && self.row.wrapping_add(self.column) == 0
    }
}

/// Positions and lengths up to which a comparison of two affine numbers is taken to be one of their
/// distance. Tensors of so many rows do not fit a machine.
const POSITIONS: i32 = 1 << 29;

/// How often each node changes, and which integers are affine in the position.
pub(super) fn rates(program: &Program) -> (Vec<Rate>, Vec<Option<Affine>>) {
    let graph = program.graph();
    let exact = program.never_wraps(&|_| 0..=POSITIONS);
    let mut affine: Vec<Option<Affine>> = Vec::with_capacity(graph.nodes().len());
    let mut rates: Vec<Rate> = Vec::with_capacity(graph.nodes().len());
    for (i, node) in graph.nodes().iter().enumerate() {
        let of = |x: &NodeId| affine[x.index()];
        let mut joined = Rate::Head;
        let mut expandable = true;
        node.for_each_operand(|x| {
            joined = joined.join(rates[x.index()]);
            expandable &= rates[x.index()] != Rate::Full;
        });
        let rate = match node {
            Node::Leaf(Leaf::Q) => Rate::Row,
            Node::Leaf(Leaf::Kv) => Rate::Column,
            Node::Leaf(Leaf::Score) => Rate::Full,
            _ => joined,
        };
        let own = affine_of(node, rate, graph.types()[i], &of, &|x| match graph.node(x) {
            Node::I32(v) => Some(*v),
            _ => None,
        });
        let diagonal = expandable
            && match node {
                Node::Binary(op, x, y) if graph.ty(*x) == Type::I32 && is_comparison(*op) => {
                    let equality = matches!(op, BinaryOp::Eq | BinaryOp::Ne);
                    let comparable = equality || (exact[x.index()] && exact[y.index()]);
                    let apart = of(x).zip(of(y)).map(|(x, y)| Affine {
                        row: x.row.wrapping_sub(y.row),
                        column: x.column.wrapping_sub(y.column),
                    });
                    comparable && apart.is_some_and(Affine::is_diagonal)
                }
                _ => own.is_some_and(Affine::is_diagonal),
            };
        affine.push(own);
        rates.push(if diagonal { Rate::Diagonal } else { rate });
    }
    (rates, affine)
}

fn is_comparison(op: BinaryOp) -> bool {
    matches!(op, BinaryOp::Eq | BinaryOp::Ne | BinaryOp::Lt | BinaryOp::Le)
}

fn affine_of(
    node: &Node,
    rate: Rate,
    ty: Type,
    of: &dyn Fn(&NodeId) -> Option<Affine>,
    constant: &dyn Fn(NodeId) -> Option<i32>,
) -> Option<Affine> {
    if ty != Type::I32 {
        return None;
    }
    let times =
        |x: Affine, c: i32| Affine { row: x.row.wrapping_mul(c), column: x.column.wrapping_mul(c) };
    let plus = |x: Affine, y: Affine| Affine {
        row: x.row.wrapping_add(y.row),
        column: x.column.wrapping_add(y.column),
    };
    match node {
        Node::Leaf(Leaf::Q) => Some(Affine { row: 1, column: 0 }),
        Node::Leaf(Leaf::Kv) => Some(Affine { row: 0, column: 1 }),
        _ if rate == Rate::Head => Some(Affine { row: 0, column: 0 }),
        Node::Unary(UnaryOp::Detach, x) => of(x),
        Node::Unary(UnaryOp::Neg, x) => of(x).map(|x| times(x, -1)),
        Node::Binary(BinaryOp::Add, x, y) => of(x).zip(of(y)).map(|(x, y)| plus(x, y)),
        Node::Binary(BinaryOp::Sub, x, y) => of(x).zip(of(y)).map(|(x, y)| plus(x, times(y, -1))),
        Node::Binary(BinaryOp::Mul, x, y) => {
            let scaled = |x: &NodeId, c: &NodeId| Some(times(of(x)?, constant(*c)?));
            scaled(x, y).or_else(|| scaled(y, x))
        }
        _ => None,
    }
}
