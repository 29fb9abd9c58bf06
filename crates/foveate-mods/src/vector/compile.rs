//! How often each node of a program changes, and where its values are kept.

use std::sync::Arc;

use super::plan::{Step, steps};
use super::rate::{Rate, rates};
use crate::ir::{BinaryOp, Leaf, Node, NodeId};
use crate::program::Program;

/// Where the values of a node are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// With the values of the head.
    Head,
    /// A register of this number, of one value a query; so for the others.
    Row(usize),
    Column(usize),
    Diagonal(usize),
    /// A register of one value an entry of a strip.
    Full(usize),
    /// The caller's scores.
    Score,
}

#[derive(Debug)]
pub(super) struct Compiled {
    pub program: Program,
    /// Of each node.
    pub places: Vec<Place>,
    /// Where a node that changes with queries or keys alone lies along the diagonals, for those
    /// that need it.
    pub expanded: Vec<Option<usize>>,
    /// Whether a node is an integer that is one more at the next key.
    pub counts: Vec<bool>,
    /// Nodes by rate, in topological order, and those to be expanded before the diagonals.
    pub head: Vec<usize>,
    pub row: Vec<usize>,
    pub column: Vec<usize>,
    pub expand: Vec<usize>,
    pub diagonal: Vec<usize>,
    pub full: Vec<usize>,
    /// The steps that make root 0, a bool, without evaluating it at every entry.
    pub planes: Option<Vec<Step>>,
    /// The only root, when one operation on the score is all there is to evaluate at an entry.
    pub on_score: Option<OnScore>,
    /// Registers of all kinds.
    pub registers: Vec<RegisterKind>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RegisterKind {
    Row,
    Column,
    Diagonal,
    Full,
}

/// The score with one operation done to it: an addition, a difference or a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OnScore {
    pub op: BinaryOp,
    /// The other operand, which changes less often than entries.
    pub other: usize,
    /// Whether the score comes first.
    pub first: bool,
}

impl OnScore {
    fn of(program: &Program, rates: &[Rate]) -> Option<Self> {
        let ([root], graph) = (program.roots(), program.graph()) else { return None };
        let Node::Binary(op, x, y) = *graph.node(*root) else { return None };
        let is_score = |x: NodeId| *graph.node(x) == Node::Leaf(Leaf::Score);
        let rare = |x: NodeId| rates[x.index()] != Rate::Full;
        let known = matches!(op, BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul);
        match [x, y] {
            _ if !known => None,
            [x, y] if is_score(x) && rare(y) => Some(Self { op, other: y.index(), first: true }),
            [x, y] if rare(x) && is_score(y) => Some(Self { op, other: x.index(), first: false }),
            _ => None,
        }
    }
}

/// A program prepared for evaluation over tiles. Cheap to clone and to share.
#[derive(Clone, Debug)]
pub struct TileProgram(pub(super) Arc<Compiled>);

impl TileProgram {
    /// Sorts the nodes by how often they change and gives their values places.
    pub fn compile(program: &Program) -> Self {
        let (rates, affine) = rates(program);
        let at = |rate| (0..rates.len()).filter(|&i| rates[i] == rate).collect::<Vec<usize>>();
        let graph = program.graph();
        let mut compiled = Compiled {
            program: program.clone(),
            places: vec![Place::Head; rates.len()],
            expanded: vec![None; rates.len()],
            counts: affine.iter().map(|a| a.is_some_and(|a| a.column == 1)).collect(),
            head: at(Rate::Head),
            row: at(Rate::Row),
            column: at(Rate::Column),
            expand: Vec::new(),
            diagonal: at(Rate::Diagonal),
            full: at(Rate::Full),
            planes: steps(program, &rates),
            on_score: OnScore::of(program, &rates),
            registers: Vec::new(),
        };
        // The score is read where the caller has it. As a root it is copied: roots outlive it.
        let is_root = |i: usize| program.roots().contains(&NodeId(i as u32));
        compiled.full.retain(|&i| graph.nodes()[i] != Node::Leaf(Leaf::Score) || is_root(i));
        for (i, node) in graph.nodes().iter().enumerate() {
            compiled.places[i] = match rates[i] {
                Rate::Head => Place::Head,
                Rate::Row => Place::Row(compiled.register(RegisterKind::Row)),
                Rate::Column => Place::Column(compiled.register(RegisterKind::Column)),
                Rate::Diagonal => Place::Diagonal(compiled.register(RegisterKind::Diagonal)),
                Rate::Full => Place::Score,
            };
            if rates[i] == Rate::Diagonal {
                node.for_each_operand(|x| {
                    let x = x.index();
                    let alone = matches!(rates[x], Rate::Row | Rate::Column);
                    if alone && compiled.expanded[x].is_none() {
                        compiled.expanded[x] = Some(compiled.register(RegisterKind::Diagonal));
                        compiled.expand.push(x);
                    }
                });
            }
        }
        compiled.place_full();
        Self(Arc::new(compiled))
    }

    /// The program.
    pub fn program(&self) -> &Program {
        &self.0.program
    }
}

impl Compiled {
    fn register(&mut self, kind: RegisterKind) -> usize {
        self.registers.push(kind);
        self.registers.len() - 1
    }

    /// How often any of these roots changes.
    pub fn rate(&self, roots: impl Iterator<Item = usize>) -> Rate {
        let rate = |root: usize| match self.places[self.program.roots()[root].index()] {
            Place::Head => Rate::Head,
            Place::Row(_) => Rate::Row,
            Place::Column(_) => Rate::Column,
            Place::Diagonal(_) => Rate::Diagonal,
            Place::Full(_) | Place::Score => Rate::Full,
        };
        roots.map(rate).fold(Rate::Head, Rate::join)
    }

    /// Gives the nodes that change with every entry registers, one used again when all that read it
    /// have run, so that a strip of all of them stays in L1.
    fn place_full(&mut self) {
        let program = self.program.clone();
        let graph = program.graph();
        let mut last_use = vec![0; graph.nodes().len()];
        for (i, node) in graph.nodes().iter().enumerate() {
            node.for_each_operand(|x| last_use[x.index()] = i);
        }
        for root in program.roots() {
            last_use[root.index()] = usize::MAX;
        }
        let mut free: Vec<usize> = Vec::new();
        for i in self.full.clone() {
            let register = free.pop().unwrap_or_else(|| self.register(RegisterKind::Full));
            self.places[i] = Place::Full(register);
            let mut done = Vec::new();
            graph.nodes()[i].for_each_operand(|x| {
                if let Place::Full(register) = self.places[x.index()]
                    && last_use[x.index()] == i
                    && !done.contains(&register)
                {
                    done.push(register);
                }
            });
            free.extend(done);
        }
    }
}
