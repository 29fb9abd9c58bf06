//! What each node of a program depends on. Hoisting, block masks and code generation ask this.

use crate::ir::{Leaf, Node};
use crate::program::Program;

/// A set of leaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Leaves(u8);

impl Leaves {
    /// No leaf.
    pub const NONE: Leaves = Leaves(0);

    /// Just `leaf`.
    pub fn of(leaf: Leaf) -> Self {
        Leaves(1 << leaf as u8)
    }

    /// True when `leaf` is in the set.
    pub fn contains(self, leaf: Leaf) -> bool {
        self.0 & (1 << leaf as u8) != 0
    }

    /// Both sets together.
    pub fn union(self, other: Self) -> Self {
        Leaves(self.0 | other.0)
    }
}

impl Program {
    /// The leaves each node depends on, by node index.
    pub fn depends(&self) -> Vec<Leaves> {
        let mut sets: Vec<Leaves> = Vec::with_capacity(self.graph().nodes().len());
        for node in self.graph().nodes() {
            let mut set = match node {
                Node::Leaf(leaf) => Leaves::of(*leaf),
                _ => Leaves::NONE,
            };
            node.for_each_operand(|x| set = set.union(sets[x.index()]));
            sets.push(set);
        }
        sets
    }

    /// The leaves the roots depend on.
    pub fn roots_depend(&self) -> Leaves {
        let sets = self.depends();
        self.roots().iter().fold(Leaves::NONE, |all, r| all.union(sets[r.index()]))
    }
}
