//! The chain rule over a strip: what roots that are derivatives do to gradients.
//!
//! An entry without a gradient has none after it either, whatever the derivative is there. That an
//! element of a buffer serves a whole row, column or diagonal shows in how often the indices
//! change, so its sum is made in lanes first and added to the buffer once.

use std::ops::Range;

use super::level::for_each_level;
use super::machine::Machine;
use super::rate::Rate;
use super::registers::{LANES, Line, Operand};
use super::steps::Axes;
use crate::eval::clamped;

/// Where a program says by which element of a buffer its result changes, and how much.
#[derive(Clone, Copy, Debug)]
pub struct Read<'a> {
    /// Root with the derivative by the element.
    pub value: usize,
    /// Roots with its indices, one an axis.
    pub index: &'a [usize],
    /// Whether negative indices count from the end of their axis.
    pub from_end: bool,
    /// Shape of the buffer.
    pub shape: &'a [usize],
}

impl Machine {
    /// `d = d·root` over the strip that was run last, whose first row `d` begins with.
    pub fn multiply(&self, root: usize, d: &mut [f32], stride: usize) {
        let (rows, columns) = self.strip.clone();
        multiply(&self.root(root), rows.len(), columns, d, stride);
    }

    /// Adds `d` times the derivative by each element of a buffer to `into`, the buffer's gradient,
    /// over the strip that was run last. Indices are clamped. `d` is 0 past the tile's keys.
    pub fn add_read(&self, read: Read<'_>, d: &[f32], stride: usize, into: &mut [f32]) {
        let (rows, columns) = self.strip.clone();
        let (height, width) = (rows.len(), columns.len());
        let keys = width.min(self.kv.len() - columns.start);
        if height == 0 || width == 0 || into.is_empty() {
            return;
        }
        let value = self.root(read.value);
        let roots: Vec<Operand<'_>> = read.index.iter().map(|&x| self.root(x)).collect();
        let at = |r: usize, c: usize| {
            roots.iter().zip(read.shape).fold(0, |at, (index, &len)| {
                at * len + clamped(index.at(r, c).to_bits() as i32, len, read.from_end)
            })
        };
        let d = Rows { data: d, stride, columns: &columns };
        let mut sums = vec![0.0; height + width];
        let compiled = &self.program.0;
        let node = |root: usize| compiled.program.roots()[root].index();
        let strides = row_major(read.shape);
        let axes = Axes { shape: read.shape, strides: &strides, from_end: read.from_end };
        let counts = read.index.last().is_some_and(|&root| compiled.counts[node(root)]);
        match self.program.0.rate(read.index.iter().copied()) {
            Rate::Head => {
                (0..height).for_each(|r| into[at(0, 0)] += sum(&value, r, d));
            }
            Rate::Row => (0..height).for_each(|r| into[at(r, 0)] += sum(&value, r, d)),
            Rate::Column => {
                (0..height).for_each(|r| add(&value, r, d, &mut sums[..width]));
                (0..width).for_each(|c| into[at(0, c)] += sums[c]);
            }
            Rate::Diagonal => {
                for r in 0..height {
                    add(&value, r, d, &mut sums[height - 1 - r..][..width]);
                }
                for (i, sum) in sums[..height + width - 1].iter().enumerate() {
                    let r = (height - 1).saturating_sub(i);
                    into[at(r, i + r + 1 - height)] += sum;
                }
            }
            Rate::Full => {
                for r in 0..height {
                    let lines = roots.iter().map(|x| x.line(r, width));
                    if let Some(start) = axes.run_start(lines, keys, counts) {
                        sums[..width].fill(0.0);
                        add(&value, r, d, &mut sums[..width]);
                        let into = &mut into[start..start + keys];
                        into.iter_mut().zip(&sums).for_each(|(sum, x)| *sum += x);
                        continue;
                    }
                    for (c, &d) in d.row(r).iter().enumerate() {
                        if d != 0.0 {
                            into[at(r, c)] += d * value.at(r, c);
                        }
                    }
                }
            }
        }
    }
}

impl Machine {
    /// What [`Self::add_read`] adds up, entry by entry: calls `give` with a place in the buffer's
    /// gradient, row-major, and what the entries of a row give to it and the places after it. Meant
    /// for reads of which no two entries have the same element.
    pub fn each_read(
        &self,
        read: Read<'_>,
        d: &[f32],
        stride: usize,
        mut give: impl FnMut(usize, &[f32]),
    ) {
        let (rows, columns) = self.strip.clone();
        let (height, width) = (rows.len(), columns.len());
        let keys = width.min(self.kv.len() - columns.start);
        if height == 0 || width == 0 || read.shape.contains(&0) {
            return;
        }
        let value = self.root(read.value);
        let roots: Vec<Operand<'_>> = read.index.iter().map(|&x| self.root(x)).collect();
        let strides = row_major(read.shape);
        let axes = Axes { shape: read.shape, strides: &strides, from_end: read.from_end };
        let compiled = &self.program.0;
        let node = |root: usize| compiled.program.roots()[root].index();
        let counts = read.index.last().is_some_and(|&root| compiled.counts[node(root)]);
        let d = Rows { data: d, stride, columns: &columns };
        let mut terms = vec![0.0; width];
        for r in 0..height {
            terms.fill(0.0);
            add(&value, r, d, &mut terms);
            let lines = roots.iter().map(|x| x.line(r, width));
            if let Some(start) = axes.run_start(lines, keys, counts) {
                give(start, &terms[..keys]);
                continue;
            }
            for (c, term) in terms[..keys].iter().enumerate() {
                let at = roots.iter().zip(read.shape).fold(0, |at, (index, &len)| {
                    at * len + clamped(index.at(r, c).to_bits() as i32, len, read.from_end)
                });
                give(at, std::slice::from_ref(term));
            }
        }
    }
}

fn row_major(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for axis in (1..strides.len()).rev() {
        strides[axis - 1] = strides[axis] * shape[axis];
    }
    strides
}

/// The strip's part of a matrix.
#[derive(Clone, Copy)]
struct Rows<'a> {
    data: &'a [f32],
    stride: usize,
    columns: &'a Range<usize>,
}

impl Rows<'_> {
    #[inline(always)]
    fn row(&self, r: usize) -> &[f32] {
        &self.data[r * self.stride..][self.columns.clone()]
    }
}

#[inline(always)]
fn times(d: f32, x: f32) -> f32 {
    if d == 0.0 { 0.0 } else { d * x }
}

for_each_level! {
    /// `Σ d·x` over row `r`.
    sum = sum_body(x: &Operand<'_>, r: usize, d: Rows<'_>) -> f32
}

#[inline(always)]
fn sum_body(x: &Operand<'_>, r: usize, d: Rows<'_>) -> f32 {
    let row = d.row(r);
    let mut lanes = [0.0; LANES];
    let (groups, _) = row.as_chunks::<LANES>();
    match x.line(r, row.len()) {
        Line::One(x) => {
            for d in groups {
                lanes.iter_mut().zip(d).for_each(|(sum, &d)| *sum += times(d, x));
            }
        }
        Line::Each(x) => {
            for (d, x) in groups.iter().zip(x.as_chunks::<LANES>().0) {
                let terms = d.iter().zip(x);
                lanes.iter_mut().zip(terms).for_each(|(sum, (&d, &x))| *sum += times(d, x));
            }
        }
    }
    let mut half = LANES / 2;
    while half > 0 {
        for l in 0..half {
            lanes[l] += lanes[l + half];
        }
        half /= 2;
    }
    lanes[0]
}

for_each_level! {
    /// `sums += d·x` over row `r`.
    add = add_body(x: &Operand<'_>, r: usize, d: Rows<'_>, sums: &mut [f32])
}

#[inline(always)]
fn add_body(x: &Operand<'_>, r: usize, d: Rows<'_>, sums: &mut [f32]) {
    let row = d.row(r);
    let places = sums.iter_mut().zip(row);
    match x.line(r, row.len()) {
        Line::One(x) => places.for_each(|(sum, &d)| *sum += times(d, x)),
        Line::Each(x) => places.zip(x).for_each(|((sum, &d), &x)| *sum += times(d, x)),
    }
}

for_each_level! {
    /// Multiplies the columns `columns` of each row of `d` by the root, where they are not 0.
    multiply = multiply_body(
        root: &Operand<'_>, rows: usize, columns: Range<usize>, d: &mut [f32], stride: usize
    )
}

#[inline(always)]
fn multiply_body(
    root: &Operand<'_>,
    rows: usize,
    columns: Range<usize>,
    d: &mut [f32],
    stride: usize,
) {
    for r in 0..rows {
        let row = &mut d[r * stride..][columns.clone()];
        match root.line(r, columns.len()) {
            Line::One(x) => row.iter_mut().for_each(|d| *d = times(*d, x)),
            Line::Each(x) => row.iter_mut().zip(x).for_each(|(d, &x)| *d = times(*d, x)),
        }
    }
}
