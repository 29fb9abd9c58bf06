//! The arguments of a product of tiles: operands in memory, the part of the product to compute, and
//! how results are written.

use std::ops::Range;

use bytemuck::Pod;

use super::group::{LANES, Pair};

/// An element of an operand: a number, or a pair of them.
pub trait Element: Pod + Send + Sync {
    /// Numbers in one.
    const WIDTH: usize;
}

impl Element for f32 {
    const WIDTH: usize = 1;
}

impl Element for Pair {
    const WIDTH: usize = 2;
}

/// A matrix inside a slice: element `(i, j)` is at `i * row + j * column`.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a, T = f32> {
    /// The elements.
    pub data: &'a [T],
    /// Distance between rows.
    pub row: usize,
    /// Distance between columns.
    pub column: usize,
}

impl<'a, T> Matrix<'a, T> {
    /// Row-major with rows `stride` apart.
    pub fn rows(data: &'a [T], stride: usize) -> Self {
        Self { data, row: stride, column: 1 }
    }

    /// Rows and columns exchanged.
    pub fn transposed(self) -> Self {
        Self { data: self.data, row: self.column, column: self.row }
    }

    pub(super) fn holds(&self, rows: &Range<usize>, columns: &Range<usize>) -> bool {
        rows.is_empty()
            || columns.is_empty()
            || (rows.end - 1) * self.row + (columns.end - 1) * self.column < self.data.len()
    }
}

/// A matrix in panels of [`LANES`] columns: element `(d, j)` is at
/// `j / 16 * panel + d * depth + j % 16`.
#[derive(Clone, Copy, Debug)]
pub struct Panels<'a, T = f32> {
    /// The elements.
    pub data: &'a [T],
    /// Distance between panels.
    pub panel: usize,
    /// Distance between the groups of a panel.
    pub depth: usize,
}

impl<'a, T> Panels<'a, T> {
    /// Panels of `depth` groups, one after another.
    pub fn packed(data: &'a [T], depth: usize) -> Self {
        Self { data, panel: depth * LANES, depth: LANES }
    }

    /// A row-major matrix whose rows are `stride` apart, read in place. Neighbouring rows should be
    /// close: rows a large power of two apart share few sets of the cache.
    pub fn rows(data: &'a [T], stride: usize) -> Self {
        Self { data, panel: LANES, depth: stride }
    }

    pub(super) fn holds(&self, depth: &Range<usize>, columns: &Range<usize>) -> bool {
        depth.is_empty()
            || columns.is_empty()
            || (columns.end / LANES - 1) * self.panel + (depth.end - 1) * self.depth + LANES
                <= self.data.len()
    }
}

/// The part of `c (+)= a·b` that is computed: elements `rows × columns` of `c`, summed over `depth` columns
/// of `a` and rows of `b`. Columns are whole groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    pub rows: Range<usize>,
    pub columns: Range<usize>,
    pub depth: Range<usize>,
}

impl Part {
    /// All of a product of these sizes.
    #[cfg(test)]
    pub fn all(rows: usize, depth: usize, columns: usize) -> Self {
        Self { rows: 0..rows, columns: 0..columns, depth: 0..depth }
    }

    /// The part with its depth, given in numbers, in elements that hold them.
    pub fn in_elements<T: Element>(self) -> Self {
        let depth = self.depth.start / T::WIDTH..self.depth.end.div_ceil(T::WIDTH);
        Self { depth, ..self }
    }
}

/// How the sums of a product are written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Write {
    /// They replace what was there, times a factor.
    Times(f32),
    /// They are added to what was there.
    Add,
}
