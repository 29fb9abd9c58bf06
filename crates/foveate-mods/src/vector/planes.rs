//! The mask bits of a tile, by whole words.
//!
//! Most of a mask is known before an entry is looked at: whether its distance is inside a window,
//! its key before another, its query in the key's document. Bools that change with queries, keys
//! or distances alone become bits once and are laid out over the tile: those of distances by
//! shifting, since each row has the bits of the row before, one column further. Logic between
//! bools combines words. Only a comparison of the numbers of queries and keys looks at entries, once for
//! neighbouring queries that have the same number.

use super::bits::{MaskBits, WORD, gather, shifted};
use super::compile::{Compiled, Place};
use super::level::for_each_level;
use super::machine::{Machine, View};
use super::plan::Step;
use super::registers::{LANES, Line, Operand, Scores, bool, int, padded};
use crate::ir::BinaryOp;

impl Machine {
    /// Makes the mask bits of the tile by `steps`, which leaves the tile as the strip.
    pub(super) fn by_planes(&mut self, compiled: &Compiled, steps: &[Step], into: &mut MaskBits) {
        let (rows, columns) = (self.q.len(), self.kv.len());
        self.strip = (0..rows, 0..padded(columns));
        if let [Step::Of(i)] = steps
            && let Place::Diagonal(register) = compiled.places[*i]
        {
            self.pack_distances(register);
            return into.lay_out(rows, columns, &mut self.diagonal);
        }
        let mut planes = std::mem::take(&mut self.planes);
        let mut depth = 0;
        for step in steps {
            if let Step::Of(_) | Step::Compare(..) = step {
                if planes.len() == depth {
                    planes.push(Vec::new());
                }
                self.plane(compiled, *step, &mut planes[depth]);
                depth += 1;
                continue;
            }
            let (before, last) = planes[..depth].split_at_mut(depth - 1);
            let Step::Both(op) = step else {
                last[0].iter_mut().for_each(|x| *x = !*x);
                continue;
            };
            depth -= 1;
            let both = before[depth - 1].iter_mut().zip(&last[0]);
            match op {
                BinaryOp::And => both.for_each(|(x, y)| *x &= y),
                BinaryOp::Or => both.for_each(|(x, y)| *x |= y),
                BinaryOp::Eq => both.for_each(|(x, y)| *x = !(*x ^ y)),
                BinaryOp::Xor | BinaryOp::Ne => both.for_each(|(x, y)| *x ^= y),
                op => unreachable!("{op:?} does not take bools"),
            }
        }
        into.copy_from(rows, columns, &planes[0]);
        self.planes = planes;
    }

    /// Packs a register of bools that distances decide.
    fn pack_distances(&mut self, register: usize) {
        let Self { registers, diagonal, .. } = self;
        let bools = &registers[register].get()[..padded(self.q.len() + padded(self.kv.len()))];
        diagonal.clear();
        // A row reads a word more than it has.
        diagonal.resize(bools.len().div_ceil(WORD) + 2, 0);
        pack(bools, diagonal);
    }

    /// Writes the plane of a step that adds one.
    fn plane(&mut self, compiled: &Compiled, step: Step, into: &mut Vec<u64>) {
        let (rows, width) = (self.q.len(), padded(self.kv.len()));
        let words = width.div_ceil(WORD);
        into.clear();
        into.resize(rows * words, 0);
        if let Step::Of(i) = step
            && let Place::Diagonal(register) = compiled.places[i]
        {
            self.pack_distances(register);
            for (r, row) in into.chunks_exact_mut(words.max(1)).enumerate() {
                shifted(&self.diagonal, rows - 1 - r, row);
            }
            return;
        }
        let operand = |i| self.operand(compiled, i, View::Strip(Scores::default()));
        match step {
            Step::Of(i) => fill(&operand(i), width, into),
            Step::Compare(op, [x, y]) => compare(op, &operand(x), &operand(y), width, into),
            Step::Not | Step::Both(_) => unreachable!("it changes planes that are there"),
        }
    }
}

for_each_level! {
    /// Packs bools, whole groups, into bits that are 0.
    pack = pack_body(bools: &[f32], into: &mut [u64])
}

#[inline(always)]
fn pack_body(bools: &[f32], into: &mut [u64]) {
    for (g, group) in bools.as_chunks::<LANES>().0.iter().enumerate() {
        let at = g * LANES;
        into[at / WORD] |= gather(group, |x| bool(*x)) << (at % WORD);
    }
}

/// Fills a plane that is 0 with what is the same for all keys or for all queries.
fn fill(bools: &Operand<'_>, width: usize, into: &mut [u64]) {
    let words = width.div_ceil(WORD).max(1);
    for r in 0..into.len() / words {
        let own = r * words..(r + 1) * words;
        match bools.line(r, width) {
            Line::One(x) => into[own].fill(if bool(x) { u64::MAX } else { 0 }),
            Line::Each(_) if r > 0 => into.copy_within(own.start - words..own.start, own.start),
            Line::Each(x) => pack(x, &mut into[own]),
        }
    }
}

for_each_level! {
    /// Fills a plane that is 0 with a comparison of integers.
    compare = compare_body(
        op: BinaryOp, x: &Operand<'_>, y: &Operand<'_>, width: usize, into: &mut [u64]
    )
}

#[inline(always)]
fn compare_body(op: BinaryOp, x: &Operand<'_>, y: &Operand<'_>, width: usize, into: &mut [u64]) {
    match op {
        BinaryOp::Eq => compare_by(x, y, width, into, |x, y| x == y),
        BinaryOp::Ne => compare_by(x, y, width, into, |x, y| x != y),
        BinaryOp::Lt => compare_by(x, y, width, into, |x, y| x < y),
        BinaryOp::Le => compare_by(x, y, width, into, |x, y| x <= y),
        _ => unreachable!("only comparisons of integers have planes"),
    }
}

#[inline(always)]
fn compare_by(
    x: &Operand<'_>,
    y: &Operand<'_>,
    width: usize,
    into: &mut [u64],
    f: impl Fn(i32, i32) -> bool,
) {
    let words = width.div_ceil(WORD).max(1);
    for r in 0..into.len() / words {
        let own = r * words..(r + 1) * words;
        if r > 0 && x.repeats(r) && y.repeats(r) {
            into.copy_within(own.start - words..own.start, own.start);
            continue;
        }
        let (x, y) = (x.line(r, width), y.line(r, width));
        for at in (0..width).step_by(LANES) {
            let group = |line: Line<'_>| match line {
                Line::One(x) => [x; LANES],
                Line::Each(x) => *x[at..].first_chunk().expect("lines are whole groups"),
            };
            let (x, y) = (group(x), group(y));
            let pairs: [(f32, f32); LANES] = std::array::from_fn(|l| (x[l], y[l]));
            let bits = gather(&pairs, |&(x, y)| f(int(x), int(y)));
            into[own.start + at / WORD] |= bits << (at % WORD);
        }
    }
}
