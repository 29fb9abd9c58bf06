//! The mask bits of a tile, one an entry.

use std::ops::Range;

use super::level::for_each_level;
use super::registers::LANES;

/// Entries of a word.
pub(super) const WORD: usize = u64::BITS as usize;

/// The mask bits of a tile, row by row, with the columns between which a row has any that is set.
#[derive(Clone, Debug, Default)]
pub struct MaskBits {
    words: Vec<u64>,
    /// Words of a row.
    row_words: usize,
    spans: Vec<Span>,
}

/// Which columns of a row are set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Span {
    /// From the first true column to past the last one.
    columns: Range<usize>,
    /// Whether one in between is not.
    gaps: bool,
}

impl MaskBits {
    /// Makes it `rows × columns`, of values to be [`Self::set`].
    pub(super) fn resize(&mut self, rows: usize, columns: usize) {
        self.row_words = columns.div_ceil(WORD);
        self.words.clear();
        self.words.resize(rows * self.row_words, 0);
        self.spans.clear();
        self.spans.resize(rows, Span::default());
    }

    /// Makes it `rows × columns` of a plane, whose rows are whole words and hold anything past
    /// their columns.
    pub(super) fn copy_from(&mut self, rows: usize, columns: usize, plane: &[u64]) {
        self.resize(rows, columns);
        self.words.copy_from_slice(plane);
        let in_use = u64::MAX >> (WORD - 1 - columns.wrapping_sub(1) % WORD);
        let own = self.words.chunks_exact_mut(self.row_words.max(1));
        for (row, own_span) in own.zip(&mut self.spans) {
            *row.last_mut().expect("a row has words") &= in_use;
            *own_span = span(row);
        }
    }

    /// Makes it `rows × columns` of what distances alone decide: row `r` has the bits of `distances`
    /// from `rows - 1 - r` on. Those hold anything past what the rows have, and a word more.
    pub(super) fn lay_out(&mut self, rows: usize, columns: usize, distances: &mut [u64]) {
        self.row_words = columns.div_ceil(WORD);
        let used = (rows + columns).saturating_sub(1);
        for (w, word) in distances.iter_mut().enumerate() {
            *word &= first_bits(used.saturating_sub(w * WORD).min(WORD));
        }
        let Span { columns: all, gaps } = span(distances);
        self.words.resize(rows * self.row_words, 0);
        self.spans.clear();
        for (r, row) in self.words.chunks_exact_mut(self.row_words.max(1)).enumerate() {
            let at = rows - 1 - r;
            shifted(distances, at, row);
            let [start, end] = [all.start, all.end].map(|c| c.saturating_sub(at).min(columns));
            *row.last_mut().expect("a row has words") &= first_bits((columns - 1) % WORD + 1);
            let clipped = || Span { columns: if start < end { start..end } else { 0..0 }, gaps };
            self.spans.push(if gaps { span(row) } else { clipped() });
        }
        self.spans.resize(rows, Span::default());
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.spans.len()
    }

    /// Sets row `r`, of `n` columns. `bools` holds whole groups of 0 and 1, by their bits.
    #[inline(always)]
    pub(super) fn set(&mut self, r: usize, n: usize, bools: &[f32]) {
        let row = &mut self.words[r * self.row_words..][..self.row_words];
        row.fill(0);
        for (g, group) in bools.as_chunks::<LANES>().0.iter().enumerate() {
            let at = g * LANES;
            let in_use = n.saturating_sub(at).min(LANES);
            let bits = gather(group, |x| x.to_bits() & 1 == 1) & ((1u64 << in_use) - 1);
            if bits != 0 {
                row[at / WORD] |= bits << (at % WORD);
            }
        }
        self.spans[r] = span(row);
    }

    /// Sets row `r`, of `n` columns, to one value.
    pub(super) fn set_all(&mut self, r: usize, n: usize, value: bool) {
        let row = &mut self.words[r * self.row_words..][..self.row_words];
        for (w, word) in row.iter_mut().enumerate() {
            *word = first_bits(if value { n.saturating_sub(w * WORD).min(WORD) } else { 0 });
        }
        self.spans[r] = span(row);
    }

    /// Whether `(row, column)` is true.
    pub fn get(&self, row: usize, column: usize) -> bool {
        self.words[row * self.row_words + column / WORD] >> (column % WORD) & 1 == 1
    }

    /// Number of true entries.
    pub fn count(&self) -> u64 {
        self.words.iter().map(|w| u64::from(w.count_ones())).sum()
    }

    /// The columns of `rows` outside of which all is false; empty when all is.
    pub fn columns(&self, rows: Range<usize>) -> Range<usize> {
        let live = self.spans[rows].iter().map(|s| &s.columns).filter(|c| !c.is_empty());
        live.cloned().reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0)
    }

    /// The rows outside of which all is false in `columns`; possibly more.
    pub fn rows_within(&self, columns: Range<usize>) -> Range<usize> {
        let meets = |s: &Span| s.columns.start < columns.end && columns.start < s.columns.end;
        let first = self.spans.iter().position(meets);
        first.map_or(0..0, |first| {
            first..self.spans.iter().rposition(meets).expect("the first one does") + 1
        })
    }

    /// Sets the elements of `row`, which are the columns from `first` on, to `value` where row `r`
    /// is false. `first` is a multiple of a group and `row` is whole groups.
    pub fn fill_false(&self, r: usize, first: usize, row: &mut [f32], value: f32) {
        let Span { columns, gaps } = &self.spans[r];
        let at = |column: usize| column.saturating_sub(first).min(row.len());
        let (start, end) = (at(columns.start), at(columns.end));
        row[..start].fill(value);
        row[end..].fill(value);
        if *gaps {
            fill_gaps(&self.words[r * self.row_words..][..self.row_words], first, row, value);
        }
    }
}

/// The bools of a group, a bit each.
#[inline(always)]
pub(super) fn gather<T>(group: &[T; LANES], bit: impl Fn(&T) -> bool) -> u64 {
    let mut bits = 0u32;
    for (l, x) in group.iter().enumerate() {
        bits |= u32::from(bit(x)) << l;
    }
    bits.into()
}

/// A word whose first `n` bits are true.
fn first_bits(n: usize) -> u64 {
    if n == WORD { u64::MAX } else { (1 << n) - 1 }
}

/// The bits from `at` on.
pub(super) fn shifted(bits: &[u64], at: usize, into: &mut [u64]) {
    let (first, by) = (at / WORD, at % WORD);
    for (x, pair) in into.iter_mut().zip(bits[first..].windows(2)) {
        // In two steps, as there may be nothing to shift.
        *x = pair[0] >> by | pair[1] << 1 << (WORD - 1 - by);
    }
}

fn span(row: &[u64]) -> Span {
    let Some(first) = row.iter().position(|&w| w != 0) else { return Span::default() };
    let last = row.iter().rposition(|&w| w != 0).expect("one is not 0");
    let start = first * WORD + row[first].trailing_zeros() as usize;
    let end = last * WORD + WORD - row[last].leading_zeros() as usize;
    let ones: u32 = row.iter().map(|w| w.count_ones()).sum();
    Span { columns: start..end, gaps: (ones as usize) < end - start }
}

for_each_level! {
    fill_gaps = fill_gaps_body(words: &[u64], first: usize, row: &mut [f32], value: f32)
}

#[inline(always)]
fn fill_gaps_body(words: &[u64], first: usize, row: &mut [f32], value: f32) {
    let (groups, _) = row.as_chunks_mut::<LANES>();
    for (g, group) in groups.iter_mut().enumerate() {
        let at = first + g * LANES;
        let bits = words.get(at / WORD).map_or(0, |w| (w >> (at % WORD)) as u32);
        for (l, x) in group.iter_mut().enumerate() {
            *x = if bits >> l & 1 == 1 { *x } else { value };
        }
    }
}
