//! Captured-buffer indices outside their axis.
//!
//! Loads note where they had to clamp, at the rate they run at. Only if any did are the entries of
//! a strip looked at one by one, and the first that counts is evaluated as a point to say what is
//! wrong.

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
    pub(super) fn any(&self) -> bool {
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
