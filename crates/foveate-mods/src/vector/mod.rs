//! Programs evaluated along rows of keys, the way CPU kernels need them.
//!
//! Every node is evaluated as rarely as it can change: what depends on the head alone once per
//! [`Machine::set_head`], what depends on the key alone once per [`Machine::set_columns`], what
//! depends on the query alone once per row, and only the rest along the row, one operation at a
//! time over slices in loops that the compiler vectorises. Rows are a tile wide (64 to 256
//! elements), so every intermediate stays in the first-level cache.
//!
//! Captured-buffer indices are clamped to their axis; the first one that had to be, at an entry
//! that counts, is kept for [`Machine::out_of_range`]. Loads that were hoisted out of the row
//! count like the others: at the entries of a row that use them. Both sides of an `if` are
//! evaluated, so both must index in range.

mod rows;

use std::sync::Arc;

use crate::capture::ScalarValue;
use crate::depends::Leaves;
use crate::eval::{self, OutOfRange};
use crate::ir::{Leaf, Node, NodeId, Type};
use crate::program::Program;

/// What stays the same over all rows and columns of one head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Head {
    /// Batch (or sequence) index.
    pub b: i32,
    /// Query head.
    pub h: i32,
    /// Key/value head.
    pub h_kv: i32,
    /// Number of queries.
    pub q_len: i32,
    /// Number of keys.
    pub kv_len: i32,
}

/// How often a node changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    Head,
    Row,
    Column,
    Full,
}

impl Level {
    fn of(leaves: Leaves) -> Self {
        let row = leaves.contains(Leaf::Q);
        match (row, leaves.contains(Leaf::Kv), leaves.contains(Leaf::Score)) {
            (false, false, false) => Level::Head,
            (true, false, false) => Level::Row,
            (false, true, false) => Level::Column,
            _ => Level::Full,
        }
    }

    fn is_scalar(self) -> bool {
        matches!(self, Level::Head | Level::Row)
    }
}

#[derive(Debug)]
struct Compiled {
    program: Program,
    levels: Vec<Level>,
    /// Node indices of each level, in topological order.
    head: Vec<usize>,
    row: Vec<usize>,
    column: Vec<usize>,
    full: Vec<usize>,
}

/// A program prepared for evaluation along rows. Cheap to clone and to share.
#[derive(Clone, Debug)]
pub struct Kernel(Arc<Compiled>);

impl Kernel {
    /// Sorts the nodes by how often they change.
    pub fn compile(program: &Program) -> Self {
        let levels: Vec<Level> = program.depends().into_iter().map(Level::of).collect();
        let at = |level| (0..levels.len()).filter(|&i| levels[i] == level).collect();
        Self(Arc::new(Compiled {
            program: program.clone(),
            head: at(Level::Head),
            row: at(Level::Row),
            column: at(Level::Column),
            full: at(Level::Full),
            levels,
        }))
    }

    /// The program.
    pub fn program(&self) -> &Program {
        &self.0.program
    }

    /// A machine for rows of at most `max_width` keys.
    pub fn machine(&self, max_width: usize) -> Machine {
        let graph = self.program().graph();
        let root = |i: usize| self.program().roots().iter().any(|r| r.index() == i);
        let lanes = (0..graph.nodes().len()).map(|i| {
            let needed = !self.0.levels[i].is_scalar() || root(i);
            let len = if needed { max_width } else { 0 };
            match graph.ty(NodeId(i as u32)) {
                Type::Bool => Lane::Bool(vec![false; len]),
                Type::I32 => Lane::I32(vec![0; len]),
                Type::F32 => Lane::F32(vec![0.0; len]),
            }
        });
        Machine {
            lanes: lanes.collect(),
            values: vec![ScalarValue::I32(0); graph.nodes().len()],
            positions: vec![0; max_width],
            head: Head::default(),
            width: 0,
            wrong: None,
            hoisted: Default::default(),
            kernel: self.clone(),
        }
    }
}

/// One node's values along a row.
#[derive(Clone, Debug)]
enum Lane {
    Bool(Vec<bool>),
    I32(Vec<i32>),
    F32(Vec<f32>),
}

/// The registers of a [`Kernel`] at work. Call [`Self::set_head`], then [`Self::set_columns`],
/// then [`Self::run_row`] for each row; setting the head again asks for the columns again.
#[derive(Clone, Debug)]
pub struct Machine {
    kernel: Kernel,
    /// Values of head and row nodes.
    values: Vec<ScalarValue>,
    /// Values of column and full nodes, and of scalar roots.
    lanes: Vec<Lane>,
    /// Scratch for row-major buffer positions.
    positions: Vec<usize>,
    head: Head,
    width: usize,
    wrong: Option<OutOfRange>,
    hoisted: Hoisted,
}

/// Indices out of range met outside the loop over a row, which count once an entry uses them.
#[derive(Clone, Debug, Default)]
struct Hoisted {
    head: Option<OutOfRange>,
    row: Option<OutOfRange>,
    /// With the column.
    columns: Vec<(usize, OutOfRange)>,
}

impl Hoisted {
    /// The first that an entry counts of.
    fn counted(&self, live: Option<&[bool]>) -> Option<&OutOfRange> {
        let counts = |column: usize| live.is_none_or(|l| l[column]);
        let any = || live.is_none_or(|l| l.contains(&true));
        let scalar = self.head.as_ref().or(self.row.as_ref()).filter(|_| any());
        scalar.or_else(|| self.columns.iter().find(|(c, _)| counts(*c)).map(|(_, wrong)| wrong))
    }
}

impl Machine {
    /// Evaluates what depends on the head alone.
    pub fn set_head(&mut self, head: Head) {
        self.head = head;
        self.hoisted = Hoisted::default();
        let compiled = Arc::clone(&self.kernel.0);
        for &i in &compiled.head {
            if let Some(wrong) = self.run_scalar(&compiled, i, 0) {
                self.hoisted.head.get_or_insert(wrong);
            }
        }
    }

    /// Evaluates what depends on the keys `kv_start..kv_start + width` alone.
    ///
    /// # Panics
    /// When `width` exceeds the machine's `max_width`.
    pub fn set_columns(&mut self, kv_start: i32, width: usize) {
        assert!(width <= self.positions.len(), "a row is at most max_width wide");
        self.width = width;
        self.hoisted.columns.clear();
        let compiled = Arc::clone(&self.kernel.0);
        for &i in &compiled.column {
            if compiled.program.graph().nodes()[i] == Node::Leaf(Leaf::Kv) {
                let Lane::I32(lane) = &mut self.lanes[i] else { unreachable!("kv is i32") };
                for (j, x) in lane[..width].iter_mut().enumerate() {
                    *x = kv_start + j as i32;
                }
            } else {
                self.run_lane(&compiled, i, Entries::Columns);
            }
        }
    }

    /// Evaluates the row of query `q`. `score` holds the scores of the columns; it may be empty
    /// when the program does not read the score.
    pub fn run_row(&mut self, q: i32, score: &[f32]) {
        self.run(q, score, None);
    }

    /// The same, but captured-buffer indices count as out of range only where `live`: at
    /// masked entries a score may compute whatever it likes.
    pub fn run_row_where(&mut self, q: i32, score: &[f32], live: &[bool]) {
        self.run(q, score, Some(live));
    }

    fn run(&mut self, q: i32, score: &[f32], live: Option<&[bool]>) {
        let compiled = Arc::clone(&self.kernel.0);
        self.hoisted.row = None;
        for &i in &compiled.row {
            if let Some(wrong) = self.run_scalar(&compiled, i, q) {
                self.hoisted.row.get_or_insert(wrong);
            }
        }
        if self.wrong.is_none() && self.width > 0 {
            self.wrong = self.hoisted.counted(live).cloned();
        }
        for &i in &compiled.full {
            if compiled.program.graph().nodes()[i] == Node::Leaf(Leaf::Score) {
                let Lane::F32(lane) = &mut self.lanes[i] else { unreachable!("the score is f32") };
                lane[..self.width].copy_from_slice(&score[..self.width]);
            } else {
                self.run_lane(&compiled, i, Entries::Row(live));
            }
        }
        for root in compiled.program.roots() {
            let i = root.index();
            if compiled.levels[i].is_scalar() {
                match (&mut self.lanes[i], self.values[i]) {
                    (Lane::Bool(lane), ScalarValue::Bool(v)) => lane[..self.width].fill(v),
                    (Lane::I32(lane), ScalarValue::I32(v)) => lane[..self.width].fill(v),
                    (Lane::F32(lane), ScalarValue::F32(v)) => lane[..self.width].fill(v),
                    _ => unreachable!("a lane has its node's type"),
                }
            }
        }
    }

    /// A bool root's values along the row.
    ///
    /// # Panics
    /// When the root is not bool; so for the other two.
    pub fn bools(&self, root: usize) -> &[bool] {
        match self.root(root) {
            Lane::Bool(lane) => &lane[..self.width],
            _ => panic!("root {root} is not bool"),
        }
    }

    /// An i32 root's values along the row.
    pub fn i32s(&self, root: usize) -> &[i32] {
        match self.root(root) {
            Lane::I32(lane) => &lane[..self.width],
            _ => panic!("root {root} is not i32"),
        }
    }

    /// An f32 root's values along the row.
    pub fn f32s(&self, root: usize) -> &[f32] {
        match self.root(root) {
            Lane::F32(lane) => &lane[..self.width],
            _ => panic!("root {root} is not f32"),
        }
    }

    /// The first captured-buffer index that was outside its axis since the machine was made.
    pub fn out_of_range(&self) -> Option<&OutOfRange> {
        self.wrong.as_ref()
    }

    fn root(&self, root: usize) -> &Lane {
        &self.lanes[self.kernel.program().roots()[root].index()]
    }

    fn run_scalar(&mut self, compiled: &Compiled, i: usize, q: i32) -> Option<OutOfRange> {
        let mut outside = None;
        let graph = compiled.program.graph();
        let value = |x: &NodeId| self.values[x.index()];
        self.values[i] = match &graph.nodes()[i] {
            Node::Leaf(leaf) => {
                let Head { b, h, h_kv, q_len, kv_len } = self.head;
                eval::Point { b, h, h_kv, q, q_len, kv_len, ..Default::default() }.leaf(*leaf)
            }
            Node::Bool(v) => ScalarValue::Bool(*v),
            Node::I32(v) => ScalarValue::I32(*v),
            Node::F32(v) => ScalarValue::F32(f32::from_bits(*v)),
            Node::Scalar(slot) => graph.scalars()[*slot as usize].value,
            Node::Load { buffer, index } => {
                let buffer = &graph.buffers()[*buffer as usize];
                let (at, wrong) = eval::locate(buffer, index.iter().map(|x| eval::int(value(x))));
                outside = wrong;
                eval::element(buffer, at)
            }
            Node::Unary(op, x) => eval::unary(*op, value(x)),
            Node::Binary(op, x, y) => eval::binary(*op, value(x), value(y)),
            Node::Select { cond, then, other } => {
                if value(cond) == ScalarValue::Bool(true) {
                    value(then)
                } else {
                    value(other)
                }
            }
            Node::Cast(to, x) => eval::cast(*to, value(x)),
        };
        outside
    }
}

/// The entries that lanes are computed for.
#[derive(Clone, Copy)]
enum Entries<'a> {
    /// Columns, before any row.
    Columns,
    /// A row; indices count at its live entries.
    Row(Option<&'a [bool]>),
}
