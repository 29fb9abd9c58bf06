//! Programs evaluated over tiles of queries and keys, the way CPU kernels need them.
//!
//! Every node is evaluated as rarely as it can change (`compile`): what depends on the head alone
//! once per [`Machine::set_head`], what depends on the query or the key alone once a row or column
//! of a tile, what depends on their distance once a *diagonal* of a tile (causal masks, windows,
//! ALiBi, relative biases), and only the rest once an entry. That rest runs one operation at a time
//! over strips of rows small enough that all intermediates stay in the first-level cache, in loops
//! over groups of [`LANES`] floats, compiled once per instruction set (`level`). Most masks need
//! none of that: their truths are made of bits, a word at a time (`planes`).
//!
//! All values lie in lanes of f32: integers by their bits, truths as the bits of 0 and 1. So one
//! kind of storage serves every type, and the caller's scores are read where they are.
//!
//! Captured-buffer indices are clamped to their axis; the first one that had to be, at an entry
//! that counts, is kept for [`Machine::out_of_range`]. Loads that were hoisted count like the
//! others: at the entries that use them. Both sides of an `if` are evaluated, so both must index in
//! range.

mod adjoint;
mod bits;
mod compile;
mod level;
mod outside;
mod planes;
mod steps;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::Arc;

pub use adjoint::Read;
pub use bits::Bits;
pub use compile::Kernel;
use compile::{Compiled, LaneKind, OnScore, Place};
pub use level::{Level, level};
use outside::Outside;
use steps::{Operand, View};

use crate::capture::ScalarValue;
use crate::eval::{self, OutOfRange, Point};
use crate::ir::{Node, NodeId};

/// Floats in a group: loops run over whole groups.
pub const LANES: usize = 16;

/// Entries of a strip: each value of one takes a few KiB.
const STRIP: usize = 1024;
/// Rows that a strip may have however wide it is.
const STRIP_ROWS: usize = 12;

const fn padded(n: usize) -> usize {
    n.div_ceil(LANES) * LANES
}

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

/// Scores of the rows of a strip: that of column `c` in its row `r` at `data[r * stride + c]`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scores<'a> {
    /// The scores; whole groups in each row.
    pub data: &'a [f32],
    /// Distance between rows.
    pub stride: usize,
}

/// Values of one node, beginning at a multiple of a cache line.
#[derive(Debug, Default)]
struct Lane {
    data: Vec<f32>,
    start: usize,
}

impl Lane {
    fn new(len: usize) -> Self {
        let data = vec![0.0; len + LANES];
        let start = data.as_ptr().align_offset(LANES * size_of::<f32>()).min(LANES);
        Self { data, start }
    }

    fn get(&self) -> &[f32] {
        &self.data[self.start..]
    }

    fn get_mut(&mut self) -> &mut [f32] {
        &mut self.data[self.start..]
    }
}

/// The registers of a [`Kernel`] at work. Calls go from outside in: [`Self::set_head`],
/// [`Self::set_tile`], then [`Self::run`] for strips of its rows, then what reads the roots.
#[derive(Debug)]
pub struct Machine {
    kernel: Kernel,
    /// Values of the nodes that change with the head, and their bits.
    scalars: Vec<ScalarValue>,
    values: Vec<f32>,
    lanes: Vec<Lane>,
    head: Head,
    q: Range<i32>,
    kv: Range<i32>,
    /// Rows and columns, whole groups, that were run last.
    strip: (Range<usize>, Range<usize>),
    /// Scratch for row-major buffer positions.
    positions: Vec<usize>,
    /// Scratch for truths: planes, and those of distances.
    planes: Vec<Vec<u64>>,
    diagonal: Vec<u64>,
    outside: Outside,
    wrong: Option<OutOfRange>,
    largest: [usize; 2],
}

impl Machine {
    fn new(kernel: Kernel, rows: usize, columns: usize) -> Self {
        let compiled = &kernel.0;
        let [rows, columns] = [padded(rows.max(1)), padded(columns.max(1))];
        let len = |kind: &LaneKind| match kind {
            LaneKind::Row => rows,
            LaneKind::Column => columns,
            LaneKind::Diagonal => rows + columns,
            LaneKind::Full => STRIP.max(STRIP_ROWS * columns),
        };
        let nodes = compiled.places.len();
        Self {
            lanes: compiled.lanes.iter().map(|kind| Lane::new(len(kind))).collect(),
            scalars: vec![ScalarValue::I32(0); nodes],
            values: vec![0.0; nodes],
            head: Head::default(),
            q: 0..0,
            kv: 0..0,
            strip: Default::default(),
            positions: vec![0; rows + columns],
            planes: Vec::new(),
            diagonal: Vec::new(),
            outside: Outside::default(),
            wrong: None,
            largest: [rows, columns],
            kernel,
        }
    }

    /// Evaluates what depends on the head alone.
    pub fn set_head(&mut self, head: Head) {
        self.head = head;
        (self.q, self.kv) = (0..0, 0..0);
        self.outside = Outside::default();
        let compiled = Arc::clone(&self.kernel.0);
        for &i in &compiled.head {
            self.scalars[i] = self.scalar(&compiled, i);
            self.values[i] = steps::bits_of(self.scalars[i]);
        }
    }

    /// Evaluates what depends on the queries `q`, on the keys `kv` or on their distances alone.
    /// What has not changed since the last tile of the head is kept.
    ///
    /// # Panics
    /// When the tile is larger than the machine's.
    pub fn set_tile(&mut self, q: Range<i32>, kv: Range<i32>) {
        let [rows, columns] = self.largest;
        assert!(q.len() <= rows && kv.len() <= columns, "a tile is as large as the machine's");
        let compiled = Arc::clone(&self.kernel.0);
        let [new_q, new_kv] = [q != self.q, kv != self.kv];
        let moved = q.len() != self.q.len()
            || kv.len() != self.kv.len()
            || q.start.wrapping_sub(kv.start) != self.q.start.wrapping_sub(self.kv.start);
        (self.q, self.kv) = (q, kv);
        let [rows, columns] = [padded(self.q.len()), padded(self.kv.len())];
        if new_q {
            self.outside.rows.clear();
            steps::run(self, &compiled, &compiled.row, View::Rows { width: rows });
        }
        if new_kv {
            self.outside.columns.clear();
            steps::run(self, &compiled, &compiled.column, View::Columns { width: columns });
        }
        if moved && !compiled.diagonal.is_empty() {
            self.outside.diagonals.clear();
            let width = padded(self.q.len() + columns);
            self.expand(&compiled, width);
            steps::run(self, &compiled, &compiled.diagonal, View::Diagonals { width });
        }
    }

    /// Lays what changes with queries or keys alone out along the diagonals: along the first
    /// column from the last query up, then along the first row.
    fn expand(&mut self, compiled: &Compiled, width: usize) {
        let last = self.q.len().saturating_sub(1);
        for &i in &compiled.expand {
            let into = compiled.expanded[i].expect("it is to be expanded");
            let mut into = std::mem::take(&mut self.lanes[into]);
            let out = &mut into.get_mut()[..width];
            match compiled.places[i] {
                Place::Row(lane) => {
                    let rows = &self.lanes[lane].get()[..=last];
                    out[..=last].iter_mut().zip(rows.iter().rev()).for_each(|(o, x)| *o = *x);
                    out[last..].fill(rows[0]);
                }
                Place::Column(lane) => {
                    let columns = &self.lanes[lane].get()[..padded(self.kv.len())];
                    let n = columns.len().min(width - last);
                    out[..last].fill(columns[0]);
                    out[last..last + n].copy_from_slice(&columns[..n]);
                    out[last + n..].fill(columns[n - 1]);
                }
                _ => unreachable!("only rows and columns are expanded"),
            }
            self.lanes[compiled.expanded[i].expect("as above")] = into;
        }
    }

    /// Rows that a strip of so many columns may have: twelve at least.
    pub fn strip_rows(columns: usize) -> usize {
        (STRIP / padded(columns).max(LANES)).max(STRIP_ROWS)
    }

    /// Evaluates the entries `rows × columns` of the tile, a strip of at most
    /// [`Self::strip_rows`]. `columns` begins at a multiple of [`LANES`]; all of its last group is
    /// computed. Indices out of range count where `live`, everywhere in the tile without.
    ///
    /// # Panics
    /// When the strip is too large or not inside the tile, or `scores` lack an entry.
    pub fn run(
        &mut self,
        rows: Range<usize>,
        columns: Range<usize>,
        scores: Scores<'_>,
        live: Option<&Bits>,
    ) {
        self.set_strip(rows, columns);
        let compiled = Arc::clone(&self.kernel.0);
        steps::run(self, &compiled, &compiled.full, View::Strip(scores));
        self.count_outside(scores, live);
    }

    fn set_strip(&mut self, rows: Range<usize>, columns: Range<usize>) {
        assert!(rows.end <= self.q.len() && columns.end <= padded(self.kv.len()), "in the tile");
        assert!(columns.start.is_multiple_of(LANES), "a strip begins with a group");
        assert!(rows.len() <= Self::strip_rows(columns.len()), "a strip has few rows");
        self.strip = (rows, columns.start..padded(columns.end));
        self.outside.entries.clear();
    }

    /// [`Self::run`], and writes root `root`, an f32, over the scores. Where only something is added
    /// to the scores or they are scaled, that happens where they lie, and no root can be read.
    ///
    /// # Panics
    /// As [`Self::run`].
    pub fn change(
        &mut self,
        root: usize,
        [rows, columns]: [Range<usize>; 2],
        scores: &mut [f32],
        stride: usize,
        live: Option<&Bits>,
    ) {
        let Some(OnScore { op, other, first }) = self.kernel.0.on_score else {
            self.run(rows, columns, Scores { data: scores, stride }, live);
            return self.store(root, scores, stride);
        };
        self.set_strip(rows, columns);
        self.count_outside(Scores { data: scores, stride }, live);
        let (rows, columns) = self.strip.clone();
        let other = self.operand(&self.kernel.0, other, View::Strip(Scores::default()));
        steps::change((op, first), &other, rows.len(), columns, scores, stride);
    }

    /// Evaluates a program without scores over the tile and keeps where root 0, a truth, is true.
    /// With `live`, only there is anything asked for.
    pub fn truths(&mut self, live: Option<&Bits>, into: &mut Bits) {
        let compiled = Arc::clone(&self.kernel.0);
        if let Some(steps) = &compiled.planes {
            self.outside.entries.clear();
            self.by_planes(&compiled, steps, into);
            self.count_outside(Scores::default(), live);
            return;
        }
        let (rows, columns) = (self.q.len(), self.kv.len());
        into.resize(rows, columns);
        let step = Self::strip_rows(columns);
        for start in (0..rows).step_by(step) {
            let strip = start..rows.min(start + step);
            self.run(strip.clone(), 0..columns, Scores::default(), live);
            let root = self.root(0);
            steps::pack(&root, strip, columns, into);
        }
    }

    /// Writes root `root`, an f32, over the strip that was run last.
    pub fn store(&self, root: usize, into: &mut [f32], stride: usize) {
        let (rows, columns) = self.strip.clone();
        steps::store(&self.root(root), rows.len(), columns, into, stride);
    }

    /// The first captured-buffer index that was outside its axis since the machine was made.
    pub fn out_of_range(&self) -> Option<&OutOfRange> {
        self.wrong.as_ref()
    }

    /// A root over the strip that was run last.
    fn root(&self, root: usize) -> Operand<'_> {
        let i = self.kernel.program().roots()[root].index();
        self.operand(&self.kernel.0, i, View::Strip(Scores::default()))
    }

    fn scalar(&mut self, compiled: &Compiled, i: usize) -> ScalarValue {
        let graph = compiled.program.graph();
        let value = |x: &NodeId| self.scalars[x.index()];
        match &graph.nodes()[i] {
            Node::Leaf(leaf) => self.point(0, 0).leaf(*leaf),
            Node::Bool(v) => ScalarValue::Bool(*v),
            Node::I32(v) => ScalarValue::I32(*v),
            Node::F32(v) => ScalarValue::F32(f32::from_bits(*v)),
            Node::Scalar(slot) => graph.scalars()[*slot as usize].value,
            Node::Load { buffer, index } => {
                let buffer = &graph.buffers()[*buffer as usize];
                let (at, wrong) = eval::locate(buffer, index.iter().map(|x| eval::int(value(x))));
                self.outside.head |= wrong.is_some();
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
        }
    }

    /// Row `r` and column `c` of the tile as a point.
    fn point(&self, r: usize, c: usize) -> Point {
        let Head { b, h, h_kv, q_len, kv_len } = self.head;
        let (q, kv) = (self.q.start + r as i32, self.kv.start + c as i32);
        Point { b, h, h_kv, q, kv, q_len, kv_len, score: 0.0 }
    }
}
