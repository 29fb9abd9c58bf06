//! Rows of an array by their global batch entry, head and position.

use std::ops::Range;

use crate::combine::combine;
use crate::error::{ShardError, refused};
use crate::plan::Cells;
use crate::ranges::Ranges;

/// `[batch, heads, positions]` rows of `width` elements each, row-major: bytes of operands, whatever
/// their dtype, and f32 of results.
#[derive(Clone, Debug)]
pub(crate) struct Table<T> {
    batch: Range<usize>,
    heads: Range<usize>,
    positions: Ranges,
    width: usize,
    elems: Vec<T>,
}

/// Which rows of an array.
#[derive(Clone, Debug)]
pub(crate) struct Rows {
    pub(crate) batch: Range<usize>,
    pub(crate) heads: Range<usize>,
    pub(crate) positions: Ranges,
}

impl Rows {
    /// Those of queries.
    pub(crate) fn queries(cells: &Cells) -> Self {
        let Cells { batch, heads, q, .. } = cells.clone();
        Self { batch, heads, positions: q }
    }

    /// Those of keys.
    pub(crate) fn keys(cells: &Cells) -> Self {
        let Cells { batch, kv_heads, kv, .. } = cells.clone();
        Self { batch, heads: kv_heads, positions: kv }
    }

    pub(crate) fn len(&self) -> usize {
        self.batch.len() * self.heads.len() * self.positions.len()
    }
}

impl<T> Table<T> {
    /// The first row of a batch entry and head.
    fn first_of(&self, b: usize, h: usize) -> usize {
        ((b - self.batch.start) * self.heads.len() + h - self.heads.start) * self.positions.len()
    }
}

impl<T: bytemuck::Pod> Table<T> {
    /// Rows of zeros.
    pub(crate) fn zeros(rows: Rows, width: usize) -> Self {
        let elems = vec![T::zeroed(); rows.len() * width];
        let Rows { batch, heads, positions } = rows;
        Self { batch, heads, positions, width, elems }
    }

    /// Rows that were sent.
    pub(crate) fn of_bytes(rows: Rows, width: usize, bytes: &[u8]) -> Result<Self, ShardError> {
        if bytes.len() != rows.len() * width * size_of::<T>() {
            let (has, wants) = (bytes.len(), rows.len() * width * size_of::<T>());
            return refused(format!("{has} bytes are not {} rows, which are {wants}", rows.len()));
        }
        let Rows { batch, heads, positions } = rows;
        Ok(Self { batch, heads, positions, width, elems: elements(bytes) })
    }

    /// These rows of this one, or zeros where it has none.
    pub(crate) fn take(&self, rows: Rows) -> Self {
        let mut taken = Self::zeros(rows, self.width);
        taken.copy_from(self);
        taken
    }

    /// Copies the rows that both have.
    pub(crate) fn copy_from(&mut self, other: &Self) {
        self.visit(other, |own, other| own.copy_from_slice(other));
    }

    fn visit(&mut self, other: &Self, mut f: impl FnMut(&mut [T], &[T])) {
        assert_eq!(self.width, other.width, "rows of one array");
        let width = self.width;
        for (own, theirs, len) in self.common(other) {
            let theirs = &other.elems[theirs * width..(theirs + len) * width];
            f(&mut self.elems[own * width..(own + len) * width], theirs);
        }
    }

    /// The rows that both have: where they begin in each, and how many follow one another.
    fn common<U>(&self, other: &Table<U>) -> Vec<(usize, usize, usize)> {
        let within = |a: &Range<usize>, b: &Range<usize>| a.start.max(b.start)..a.end.min(b.end);
        let runs = overlaps(&self.positions, &other.positions);
        let mut rows = Vec::new();
        for b in within(&self.batch, &other.batch) {
            for h in within(&self.heads, &other.heads) {
                let own = self.first_of(b, h);
                let theirs = other.first_of(b, h);
                rows.extend(runs.iter().map(|&(at, there, len)| (own + at, theirs + there, len)));
            }
        }
        rows
    }

    pub(crate) fn elems(&self) -> &[T] {
        &self.elems
    }

    pub(crate) fn elems_mut(&mut self) -> &mut [T] {
        &mut self.elems
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.elems)
    }

    /// `[batch, heads, positions]`.
    pub(crate) fn shape(&self) -> [usize; 3] {
        [self.batch.len(), self.heads.len(), self.positions.len()]
    }

    pub(crate) fn width(&self) -> usize {
        self.width
    }
}

impl Table<f32> {
    /// Joins the rows of `part`, which are among these, with the logs of their denominators: [`combine`].
    pub(crate) fn join(&mut self, lse: &mut Self, part: &Self, part_lse: &Self) {
        let width = self.width;
        for (own, theirs, len) in self.common(part) {
            combine(
                &mut self.elems[own * width..(own + len) * width],
                &mut lse.elems[own..own + len],
                &part.elems[theirs * width..(theirs + len) * width],
                &part_lse.elems[theirs..theirs + len],
            );
        }
    }

    /// Adds the rows that both have.
    pub(crate) fn add_from(&mut self, other: &Self) {
        self.visit(other, |own, other| own.iter_mut().zip(other).for_each(|(x, y)| *x += y));
    }
}

/// Bytes as elements, of which there is a whole number.
pub(crate) fn elements<T: bytemuck::Pod>(bytes: &[u8]) -> Vec<T> {
    let mut elems = vec![T::zeroed(); bytes.len() / size_of::<T>()];
    bytemuck::cast_slice_mut(&mut elems).copy_from_slice(bytes);
    elems
}

/// Where runs of common positions begin in each of two sets, and their lengths.
fn overlaps(a: &Ranges, b: &Ranges) -> Vec<(usize, usize, usize)> {
    let (a, b) = (a.as_slice(), b.as_slice());
    let (mut i, mut j, mut at_a, mut at_b, mut runs) = (0, 0, 0, 0, Vec::new());
    while let (Some(x), Some(y)) = (a.get(i), b.get(j)) {
        let (from, to) = (x.start.max(y.start), x.end.min(y.end));
        if from < to {
            runs.push((at_a + from - x.start, at_b + from - y.start, to - from));
        }
        if x.end < y.end {
            at_a += x.len();
            i += 1;
        } else {
            at_b += y.len();
            j += 1;
        }
    }
    runs
}
