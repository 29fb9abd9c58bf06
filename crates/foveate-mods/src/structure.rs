//! The structure of a program: what it says, whatever its captures hold and are called.
//!
//! Programs are in canonical form ([`Program::build`]), so equal structure is equal nodes, and
//! the hash runs over them in order. It is the same in every process and on every platform;
//! compile caches are keyed by it.

use foveate_tensor::hash::Fnv;

use crate::capture::AnyBuffer;
use crate::ir::hash_node;
use crate::program::{MaskMod, Program, ScoreMod};

impl Program {
    /// Hash of the structure: nodes, types and ranks; not names, contents or scalar values.
    pub fn structural_hash(&self) -> u64 {
        let graph = self.graph();
        let mut hash = Fnv::default();
        for node in graph.nodes() {
            hash_node(&mut hash, node, |x| x.index() as u64);
        }
        for buffer in graph.buffers() {
            let element = buffer.element();
            let widened = if element == buffer.ty().into() { 0 } else { element as u64 + 1 };
            hash.word(buffer.ty() as u64 | widened << 8);
            hash.word(buffer.shape().len() as u64);
            hash.word(u64::from(buffer.learned()));
        }
        for scalar in graph.scalars() {
            hash.word(scalar.ty() as u64);
        }
        for root in self.roots() {
            hash.word(root.index() as u64);
        }
        hash.value()
    }

    /// True when both say the same, whatever their captures hold and are called.
    pub fn same_structure(&self, other: &Self) -> bool {
        let (a, b) = (self.graph(), other.graph());
        let slot = |x: &AnyBuffer| (x.element(), x.shape().len(), x.learned());
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
        let same_data = |(x, y): (&AnyBuffer, &AnyBuffer)| x.same_elements(y);
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
