//! The intermediate representation of masks and scores.
//!
//! A [`Graph`] is a list of typed nodes in topological order: every operand of a node stands
//! before it. Nodes are hash-consed, so one value is one node, and a graph never changes what
//! it has once said: passes (simplification, differentiation) append nodes or build a new graph.
//!
//! Three types are enough: `bool`, `i32`, `f32`. Integer arithmetic wraps; `/` on integers
//! rounds towards minus infinity and `%` is the Euclidean remainder, and both are 0 for a
//! divisor of 0, so that no index expression can trap.

use std::collections::HashMap;

use foldhash::fast::FixedState;
use foveate_tensor::hash::Fnv;

use crate::capture::{AnyBuffer, Scalar};
pub use crate::op::{BinaryOp, UnaryOp, mix};
use crate::value::Type;

/// What a mod is given: coordinates (i32) and, for scores, the scaled dot product (f32).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Leaf {
    /// Batch index, or the sequence index of a varlen problem.
    B,
    /// Query head.
    H,
    /// Key/value head, `h / (heads_q / heads_kv)`.
    HKv,
    /// Global position of the query.
    Q,
    /// Global position of the key.
    Kv,
    /// Number of queries of the sequence.
    QLen,
    /// Number of keys of the sequence.
    KvLen,
    /// The scaled dot product (f32), or what an earlier score made of it.
    Score,
}

impl Leaf {
    /// Every leaf, in the order of the enum.
    pub const ALL: [Leaf; 8] =
        [Leaf::B, Leaf::H, Leaf::HKv, Leaf::Q, Leaf::Kv, Leaf::QLen, Leaf::KvLen, Leaf::Score];

    /// Its name in the text form.
    pub fn name(self) -> &'static str {
        match self {
            Leaf::B => "b",
            Leaf::H => "h",
            Leaf::HKv => "h_kv",
            Leaf::Q => "q",
            Leaf::Kv => "kv",
            Leaf::QLen => "q_len",
            Leaf::KvLen => "kv_len",
            Leaf::Score => "score",
        }
    }

    /// Its type: f32 for the score, i32 for every coordinate.
    pub fn ty(self) -> Type {
        if self == Leaf::Score { Type::F32 } else { Type::I32 }
    }
}

/// Index of a node in its graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub(crate) u32);

impl NodeId {
    /// Position in [`Graph::nodes`].
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// One operation. Operands are ids of earlier nodes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Node {
    /// A coordinate or the score.
    Leaf(Leaf),
    /// A truth constant.
    Bool(bool),
    /// An integer constant.
    I32(i32),
    /// A float constant, by its bits.
    F32(u32),
    /// Run-time scalar: index into [`Graph::scalars`].
    Scalar(u32),
    /// Element of a captured buffer: index into [`Graph::buffers`], one i32 index an axis.
    Load {
        /// Slot of the buffer.
        buffer: u32,
        /// One index for each axis of the buffer.
        index: Vec<NodeId>,
        /// Whether negative indices count from the end of their axis. Without, they are outside of
        /// it.
        from_end: bool,
    },
    /// Operation on one value.
    Unary(UnaryOp, NodeId),
    /// Operation on two values.
    Binary(BinaryOp, NodeId, NodeId),
    /// `if cond { then } else { other }`; both sides are evaluated.
    Select {
        /// Condition (bool).
        cond: NodeId,
        /// Value where the condition holds.
        then: NodeId,
        /// Value elsewhere, of the same type.
        other: NodeId,
    },
    /// Conversion: bool to number is 0 or 1, f32 to i32 truncates and saturates (NaN is 0).
    Cast(Type, NodeId),
}

impl Node {
    /// Calls `f` with each operand, in order.
    pub fn for_each_operand(&self, mut f: impl FnMut(NodeId)) {
        match self {
            Node::Leaf(_) | Node::Bool(_) | Node::I32(_) | Node::F32(_) | Node::Scalar(_) => {}
            Node::Load { index, .. } => index.iter().copied().for_each(f),
            Node::Unary(_, x) | Node::Cast(_, x) => f(*x),
            Node::Binary(_, x, y) => {
                f(*x);
                f(*y);
            }
            Node::Select { cond, then, other } => {
                f(*cond);
                f(*then);
                f(*other);
            }
        }
    }
}

impl Node {
    /// The same operation on other operands.
    pub fn map_operands(&self, mut f: impl FnMut(NodeId) -> NodeId) -> Node {
        match self {
            Node::Load { buffer, index, from_end } => {
                let index = index.iter().map(|&x| f(x)).collect();
                Node::Load { buffer: *buffer, index, from_end: *from_end }
            }
            Node::Unary(op, x) => Node::Unary(*op, f(*x)),
            Node::Cast(ty, x) => Node::Cast(*ty, f(*x)),
            Node::Binary(op, x, y) => Node::Binary(*op, f(*x), f(*y)),
            Node::Select { cond, then, other } => {
                Node::Select { cond: f(*cond), then: f(*then), other: f(*other) }
            }
            leaf => leaf.clone(),
        }
    }
}

/// Feeds a node to `hash`; `operand` says what stands for an operand.
pub(crate) fn hash_node(hash: &mut Fnv, node: &Node, operand: impl Fn(NodeId) -> u64) {
    let (tag, payload) = match node {
        Node::Leaf(leaf) => (0, *leaf as u64),
        Node::Bool(v) => (1, u64::from(*v)),
        Node::I32(v) => (2, u64::from(*v as u32)),
        Node::F32(v) => (3, u64::from(*v)),
        Node::Scalar(slot) => (4, u64::from(*slot)),
        Node::Load { buffer, from_end, .. } => (5, u64::from(*buffer) | u64::from(*from_end) << 32),
        Node::Unary(op, _) => (6, *op as u64),
        Node::Binary(op, ..) => (7, *op as u64),
        Node::Select { .. } => (8, 0),
        Node::Cast(ty, _) => (9, *ty as u64),
    };
    hash.word(tag);
    hash.word(payload);
    node.for_each_operand(|x| hash.word(operand(x)));
}

/// Hash-consed nodes in topological order, with the buffers and scalars they refer to.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    nodes: Vec<Node>,
    types: Vec<Type>,
    /// A hash of what each node says, without slots: orders commutative operands.
    keys: Vec<u64>,
    interned: HashMap<Node, NodeId, FixedState>,
    buffers: Vec<AnyBuffer>,
    scalars: Vec<Scalar>,
}

impl Graph {
    /// An empty graph.
    pub fn new() -> Self {
        Self::default()
    }

    /// All nodes, operands first.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// What stands for each of [`Self::nodes`], in their order.
    pub fn ids(&self) -> impl Iterator<Item = NodeId> {
        (0..self.nodes.len() as u32).map(NodeId)
    }

    /// The node `id` stands for.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.index()]
    }

    /// The type of `id`.
    pub fn ty(&self, id: NodeId) -> Type {
        self.types[id.index()]
    }

    /// The types of all nodes.
    pub fn types(&self) -> &[Type] {
        &self.types
    }

    /// Captured buffers, by slot.
    pub fn buffers(&self) -> &[AnyBuffer] {
        &self.buffers
    }

    /// Run-time scalars, by slot.
    pub fn scalars(&self) -> &[Scalar] {
        &self.scalars
    }

    /// Replaces the contents of a buffer slot. The caller has checked type and rank.
    pub(crate) fn set_buffer(&mut self, slot: usize, buffer: AnyBuffer) {
        self.buffers[slot] = buffer;
    }

    /// Replaces the value of a scalar slot. The caller has checked the type.
    pub(crate) fn set_scalar(&mut self, slot: usize, scalar: Scalar) {
        self.scalars[slot] = scalar;
    }

    /// Slot of `buffer`, added when it is new. The same allocation is the same slot.
    pub fn buffer_slot(&mut self, buffer: &AnyBuffer) -> u32 {
        let found = self.buffers.iter().position(|b| b.same(buffer));
        found.unwrap_or_else(|| {
            self.buffers.push(buffer.clone());
            self.buffers.len() - 1
        }) as u32
    }

    /// Slot of `scalar`, added when it is new. The same name and value is the same slot.
    pub fn scalar_slot(&mut self, scalar: &Scalar) -> u32 {
        let found = self.scalars.iter().position(|s| s == scalar);
        found.unwrap_or_else(|| {
            self.scalars.push(scalar.clone());
            self.scalars.len() - 1
        }) as u32
    }

    /// Adds `node` as it stands, or finds the equal one that is there already.
    ///
    /// The operands' types are an invariant of the callers ([`crate::expr`] by Rust's types,
    /// [`crate::text`] by its checker).
    pub fn intern(&mut self, node: Node) -> NodeId {
        if let Some(&id) = self.interned.get(&node) {
            return id;
        }
        let ty = self.type_of(&node);
        let id = NodeId(u32::try_from(self.nodes.len()).expect("a mod has fewer than 2^32 nodes"));
        let mut key = Fnv::default();
        match &node {
            Node::Scalar(_) => key.word(ty as u64 + 1),
            Node::Load { buffer, index, from_end } => {
                key.word(ty as u64 + 4 + 4 * u64::from(*from_end));
                key.word(self.buffers[*buffer as usize].shape().len() as u64);
                index.iter().for_each(|x| key.word(self.order_key(*x)));
            }
            node => hash_node(&mut key, node, |x| self.order_key(x)),
        }
        self.keys.push(key.value());
        self.nodes.push(node.clone());
        self.types.push(ty);
        self.interned.insert(node, id);
        id
    }

    /// Orders the operands of commutative operations; ties keep the order they were written in.
    pub(crate) fn order_key(&self, id: NodeId) -> u64 {
        self.keys[id.index()]
    }

    fn type_of(&self, node: &Node) -> Type {
        match node {
            Node::Leaf(leaf) => leaf.ty(),
            Node::Bool(_) => Type::Bool,
            Node::I32(_) => Type::I32,
            Node::F32(_) => Type::F32,
            Node::Scalar(slot) => self.scalars[*slot as usize].ty(),
            Node::Load { buffer, .. } => self.buffers[*buffer as usize].ty(),
            Node::Unary(op, x) => op.result(self.ty(*x)),
            Node::Binary(op, x, _) => op.result(self.ty(*x)),
            Node::Select { then, .. } => self.ty(*then),
            Node::Cast(ty, _) => *ty,
        }
    }
}
