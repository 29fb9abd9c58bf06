//! The structure of a program: what it says, whatever its captures hold and are called.
//!
//! Programs are in canonical form ([`Program::build`]), so equal structure is equal nodes, and
//! the hash runs over them in order. It is the same in every process and on every platform;
//! compile caches are keyed by it.

use crate::capture::AnyBuffer;
use crate::ir::{Node, Type};
use crate::program::{MaskMod, Program, ScoreMod};

/// FNV-1a, 64 bits: tiny, stable, good enough where equality is checked behind it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fnv(pub(crate) u64);

impl Fnv {
    pub(crate) fn new() -> Self {
        Self(0xCBF2_9CE4_8422_2325)
    }

    pub(crate) fn word(&mut self, word: u64) {
        for byte in word.to_le_bytes() {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3);
        }
    }
}

/// Feeds a node to `hash`; `operand` says what stands for an operand.
pub(crate) fn hash_node(hash: &mut Fnv, node: &Node, operand: impl Fn(crate::NodeId) -> u64) {
    let (tag, payload) = match node {
        Node::Leaf(leaf) => (0, *leaf as u64),
        Node::Bool(v) => (1, u64::from(*v)),
        Node::I32(v) => (2, u64::from(*v as u32)),
        Node::F32(v) => (3, u64::from(*v)),
        Node::Scalar(slot) => (4, u64::from(*slot)),
        Node::Load { buffer, .. } => (5, u64::from(*buffer)),
        Node::Unary(op, _) => (6, *op as u64),
        Node::Binary(op, ..) => (7, *op as u64),
        Node::Select { .. } => (8, 0),
        Node::Cast(ty, _) => (9, *ty as u64),
    };
    hash.word(tag);
    hash.word(payload);
    node.for_each_operand(|x| hash.word(operand(x)));
}

impl Program {
    /// Hash of the structure: nodes, types and ranks; not names, contents or scalar values.
    pub fn structural_hash(&self) -> u64 {
        let graph = self.graph();
        let mut hash = Fnv::new();
        for node in graph.nodes() {
            hash_node(&mut hash, node, |x| x.index() as u64);
        }
        for buffer in graph.buffers() {
            hash.word(buffer.ty() as u64);
            hash.word(buffer.shape().len() as u64);
            hash.word(u64::from(buffer.learned()));
        }
        for scalar in graph.scalars() {
            hash.word(scalar.ty() as u64);
        }
        for root in self.roots() {
            hash.word(root.index() as u64);
        }
        hash.0
    }

    /// True when both say the same, whatever their captures hold and are called.
    pub fn same_structure(&self, other: &Self) -> bool {
        let (a, b) = (self.graph(), other.graph());
        let slot =
            |x: &AnyBuffer| -> (Type, usize, bool) { (x.ty(), x.shape().len(), x.learned()) };
        self.wrong() == other.wrong()
            && a.nodes() == b.nodes()
            && self.roots() == other.roots()
            && a.buffers().iter().map(slot).eq(b.buffers().iter().map(slot))
            && a.scalars().iter().map(|s| s.ty()).eq(b.scalars().iter().map(|s| s.ty()))
    }
}

/// Equal structure and equal captures: the same values in the same slots, whatever their names.
impl PartialEq for Program {
    fn eq(&self, other: &Self) -> bool {
        let same_data = |(x, y): (&AnyBuffer, &AnyBuffer)| {
            let known = !x.is_on_device() && x.shape() == y.shape();
            x.same(y) || (known && x.data() == y.data())
        };
        self.same_structure(other)
            && self.graph().buffers().iter().zip(other.graph().buffers()).all(same_data)
            && self
                .graph()
                .scalars()
                .iter()
                .zip(other.graph().scalars())
                .all(|(x, y)| x.value == y.value)
    }
}

impl PartialEq for MaskMod {
    fn eq(&self, other: &Self) -> bool {
        self.program() == other.program()
    }
}

impl PartialEq for ScoreMod {
    fn eq(&self, other: &Self) -> bool {
        self.program() == other.program()
    }
}
