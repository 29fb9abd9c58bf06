//! Which scores of a tile read the same element of a learned buffer.
//!
//! A tile of scores has thousands of entries and often reads few elements: one for each query, for
//! each key, for each distance between them, or a single one. The kernel then adds up what the
//! entries give to an element in registers, and adds one number to memory. What an index depends
//! on is found from its program; whatever is not proven is [`Shared::Nowhere`], which is always
//! right.

use foveate_mods::ir::{BinaryOp, UnaryOp};
use foveate_mods::{Leaf, Node, NodeId, Program, Type};

/// The scores of one head of one sequence that read the same element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shared {
    /// All.
    Everywhere,
    /// Those of one query.
    Row,
    /// Those of one key.
    Column,
    /// Those with the same distance between key and query.
    Diagonal,
    /// As far as is known, none.
    Nowhere,
}

impl Shared {
    /// Its `CaptureKind` in `kernels/mods.cuh`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Everywhere => "CAPTURE_BLOCK",
            Self::Row => "CAPTURE_ROW",
            Self::Column => "CAPTURE_COLUMN",
            Self::Diagonal => "CAPTURE_DIAGONAL",
            Self::Nowhere => "CAPTURE_EACH",
        }
    }

    /// Who reads the same as two indices together say.
    fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Everywhere, x) | (x, Self::Everywhere) => x,
            (x, y) if x == y => x,
            _ => Self::Nowhere,
        }
    }

    /// Of `query · q + key · kv` plus something that is the same everywhere.
    fn of_sum(query: i32, key: i32) -> Self {
        match (query, key) {
            (0, 0) => Self::Everywhere,
            (_, 0) => Self::Row,
            (0, _) => Self::Column,
            _ if query == key.wrapping_neg() => Self::Diagonal,
            _ => Self::Nowhere,
        }
    }
}

/// What is known of a node.
#[derive(Clone, Copy)]
struct Known {
    shared: Shared,
    /// The factors of q and kv, where the node is their sum plus something shared everywhere.
    sum: Option<(i32, i32)>,
}

impl Known {
    fn sum(query: i32, key: i32) -> Self {
        Self { shared: Shared::of_sum(query, key), sum: Some((query, key)) }
    }
}

/// Which scores read the same element by the indices `index` of `program`.
pub(super) fn shared(program: &Program, index: &[NodeId]) -> Shared {
    let mut known: Vec<Known> = Vec::with_capacity(program.graph().nodes().len());
    for (node, &ty) in program.graph().nodes().iter().zip(program.graph().types()) {
        let of = |id: &NodeId| known[id.index()];
        let sums = |x: &NodeId, y: &NodeId| Some((of(x).sum?, of(y).sum?));
        let sum = match node {
            Node::Leaf(Leaf::Q) => Some((1, 0)),
            Node::Leaf(Leaf::Kv) => Some((0, 1)),
            Node::Unary(UnaryOp::Detach, x) => of(x).sum,
            Node::Unary(UnaryOp::Neg, x) => {
                of(x).sum.map(|(q, kv)| (q.wrapping_neg(), kv.wrapping_neg()))
            }
            Node::Binary(BinaryOp::Add, x, y) => {
                sums(x, y).map(|(x, y)| (x.0.wrapping_add(y.0), x.1.wrapping_add(y.1)))
            }
            Node::Binary(BinaryOp::Sub, x, y) => {
                sums(x, y).map(|(x, y)| (x.0.wrapping_sub(y.0), x.1.wrapping_sub(y.1)))
            }
            _ => None,
        };
        known.push(match sum {
            Some((query, key)) if ty == Type::I32 => Known::sum(query, key),
            _ => {
                let mut shared = match node {
                    Node::Leaf(Leaf::Score) => Shared::Nowhere,
                    _ => Shared::Everywhere,
                };
                node.for_each_operand(|x| shared = shared.and(known[x.index()].shared));
                match shared {
                    Shared::Everywhere => Known::sum(0, 0),
                    shared => Known { shared, sum: None },
                }
            }
        });
    }
    index.iter().fold(Shared::Everywhere, |all, id| all.and(known[id.index()].shared))
}
