//! What callers have evaluated: heads, tiles, strips and masks.

use std::ops::Range;
use std::sync::Arc;

use super::bits::MaskBits;
use super::compile::{Compiled, OnScore, Place};
use super::machine::{Machine, View};
use super::outside::Outside;
use super::registers::{Scores, bits_of, padded};
use super::steps;
use crate::arithmetic;
use crate::eval;
use crate::ir::{Node, NodeId};
use crate::point::Head;
use crate::value::ScalarValue;

impl Machine {
    /// Evaluates what depends on the head alone.
    pub fn set_head(&mut self, head: Head) {
        self.head = head;
        (self.q, self.kv) = (0..0, 0..0);
        self.outside = Outside::default();
        let compiled = Arc::clone(&self.program.0);
        for &i in &compiled.head {
            self.scalars[i] = self.scalar(&compiled, i);
            self.values[i] = bits_of(self.scalars[i]);
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
        let compiled = Arc::clone(&self.program.0);
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
            let mut into = std::mem::take(&mut self.registers[into]);
            let out = &mut into.get_mut()[..width];
            match compiled.places[i] {
                Place::Row(register) => {
                    let rows = &self.registers[register].get()[..=last];
                    out[..=last].iter_mut().zip(rows.iter().rev()).for_each(|(o, x)| *o = *x);
                    out[last..].fill(rows[0]);
                }
                Place::Column(register) => {
                    let columns = &self.registers[register].get()[..padded(self.kv.len())];
                    let n = columns.len().min(width - last);
                    out[..last].fill(columns[0]);
                    out[last..last + n].copy_from_slice(&columns[..n]);
                    out[last + n..].fill(columns[n - 1]);
                }
                _ => unreachable!("only rows and columns are expanded"),
            }
            self.registers[compiled.expanded[i].expect("as above")] = into;
        }
    }

    /// Evaluates the entries `rows × columns` of the tile, a strip of at most
    /// [`Self::strip_rows`]. `columns` begins at a multiple of `LANES`; all of its last group is
    /// computed. Indices out of range count where `live`, everywhere in the tile without.
    ///
    /// # Panics
    /// When the strip is too large or not inside the tile, or `scores` lack an entry.
    pub fn run(
        &mut self,
        rows: Range<usize>,
        columns: Range<usize>,
        scores: Scores<'_>,
        live: Option<&MaskBits>,
    ) {
        self.set_strip(rows, columns);
        let compiled = Arc::clone(&self.program.0);
        steps::run(self, &compiled, &compiled.full, View::Strip(scores));
        self.count_outside(scores, live);
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
        live: Option<&MaskBits>,
    ) {
        let Some(OnScore { op, other, first }) = self.program.0.on_score else {
            self.run(rows, columns, Scores { data: scores, stride }, live);
            return self.store(root, scores, stride);
        };
        self.set_strip(rows, columns);
        self.count_outside(Scores { data: scores, stride }, live);
        let (rows, columns) = self.strip.clone();
        let other = self.operand(&self.program.0, other, View::Strip(Scores::default()));
        steps::change((op, first), &other, rows.len(), columns, scores, stride);
    }

    /// Writes the mask bits of the tile: root 0, a bool, of a program without scores. With `live`,
    /// only the bits where it is true have to be right.
    pub fn mask_bits(&mut self, live: Option<&MaskBits>, into: &mut MaskBits) {
        let compiled = Arc::clone(&self.program.0);
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

    fn scalar(&mut self, compiled: &Compiled, i: usize) -> ScalarValue {
        let graph = compiled.program.graph();
        let value = |x: &NodeId| self.scalars[x.index()];
        match &graph.nodes()[i] {
            Node::Leaf(leaf) => self.point(0, 0).leaf(*leaf),
            Node::Bool(v) => ScalarValue::Bool(*v),
            Node::I32(v) => ScalarValue::I32(*v),
            Node::F32(v) => ScalarValue::F32(f32::from_bits(*v)),
            Node::Scalar(slot) => graph.scalars()[*slot as usize].value,
            Node::Load { buffer, index, from_end } => {
                let buffer = &graph.buffers()[*buffer as usize];
                let index = index.iter().map(|x| eval::int(value(x)));
                let (at, wrong) = eval::locate(buffer, index, *from_end);
                self.outside.head |= wrong.is_some();
                eval::element(buffer, at)
            }
            Node::Unary(op, x) => arithmetic::unary(*op, value(x)),
            Node::Binary(op, x, y) => arithmetic::binary(*op, value(x), value(y)),
            Node::Select { cond, then, other } => {
                if value(cond) == ScalarValue::Bool(true) {
                    value(then)
                } else {
                    value(other)
                }
            }
            Node::Cast(to, x) => arithmetic::cast(*to, value(x)),
        }
    }

    /// Keeps the first index out of range that counts in the strip.
    pub(super) fn count_outside(&mut self, scores: Scores<'_>, live: Option<&MaskBits>) {
        if self.out_of_range.is_some() || !self.outside.any() {
            return;
        }
        let (rows, columns) = self.strip.clone();
        let set = |list: &[bool], at: usize| list.get(at).copied().unwrap_or(false);
        let last = self.q.len() - 1;
        let Outside { head, rows: by_row, columns: by_column, diagonals, entries } = &self.outside;
        for r in rows.clone() {
            for c in columns.start..columns.end.min(self.kv.len()) {
                let entry = (r - rows.start) * columns.len() + c - columns.start;
                let found = *head
                    || set(by_row, r)
                    || set(by_column, c)
                    || set(diagonals, last - r + c)
                    || set(entries, entry);
                if !found || live.is_some_and(|l| !l.get(r, c)) {
                    continue;
                }
                let score = scores.data.get((r - rows.start) * scores.stride + c);
                let mut point = self.point(r, c);
                point.score = score.copied().unwrap_or(0.0);
                if let Err(wrong) = self.program.program().eval(&point) {
                    self.out_of_range = Some(wrong);
                    return;
                }
            }
        }
    }
}
