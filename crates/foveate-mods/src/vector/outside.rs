//! Captured-buffer indices outside their axis.
//!
//! Loads note where they had to clamp, at the rate they run at. Only if any did are the entries of
//! a strip looked at one by one, and the first that counts is evaluated as a point to say what is
//! wrong.

use super::{Bits, Machine, Scores};

/// Where indices were out of range in the current tile.
#[derive(Debug, Default)]
pub(super) struct Outside {
    pub head: bool,
    /// Empty when none was; so for the others.
    pub rows: Vec<bool>,
    pub columns: Vec<bool>,
    pub diagonals: Vec<bool>,
    /// Of the strip, row by row.
    pub entries: Vec<bool>,
}

impl Outside {
    fn any(&self) -> bool {
        let lists = [&self.rows, &self.columns, &self.diagonals, &self.entries];
        self.head || lists.iter().any(|l| !l.is_empty())
    }
}

/// Notes that `at` of `len` is out of range.
pub(super) fn note(list: &mut Vec<bool>, at: usize, len: usize) {
    if list.len() < len {
        list.resize(len, false);
    }
    list[at] = true;
}

impl Machine {
    /// Keeps the first index out of range that counts in the strip.
    pub(super) fn count_outside(&mut self, scores: Scores<'_>, live: Option<&Bits>) {
        if self.wrong.is_some() || !self.outside.any() {
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
                if let Err(wrong) = self.kernel.program().eval(&point) {
                    self.wrong = Some(wrong);
                    return;
                }
            }
        }
    }
}
