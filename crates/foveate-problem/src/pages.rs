//! Keys and values in pages, as a cache of several sequences that grow keeps them.

use crate::{ProblemError, Sequence};

/// Where the keys and values of each batch entry lie in pages of one size: row `r` of entry `b` is
/// row `r % page_size` of page `table[b, r / page_size]`. k is `[pages, Hkv, page_size, D]` then,
/// and v `[pages, Hkv, page_size, Dv]`. Entries of the table behind the last that a length needs
/// are not looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pages<'a> {
    table: &'a [i32],
    lengths: &'a [i32],
}

impl<'a> Pages<'a> {
    /// Takes the table `[B, entries]`, row-major, and the number of keys of each batch entry.
    ///
    /// # Errors
    /// When a length is negative, or the table has not as many entries for each length.
    pub fn new(table: &'a [i32], lengths: &'a [i32]) -> Result<Self, ProblemError> {
        if let Some((b, len)) = lengths.iter().enumerate().find(|(_, len)| **len < 0) {
            return fail(format!("batch entry {b} has {len} keys in pages; it needs 0 or more"));
        }
        if !table.len().is_multiple_of(lengths.len().max(1)) {
            return fail(format!(
                "a page table of {} numbers is not as long for each of {} batch entries",
                table.len(),
                lengths.len()
            ));
        }
        Ok(Self { table, lengths })
    }

    /// The table, row-major.
    pub fn table(&self) -> &'a [i32] {
        self.table
    }

    /// Number of keys of each batch entry.
    pub fn lengths(&self) -> &'a [i32] {
        self.lengths
    }

    /// Entries of the table for each batch entry.
    pub fn entries(&self) -> usize {
        self.table.len() / self.lengths.len().max(1)
    }

    /// Keys of the longest batch entry.
    pub fn longest(&self) -> usize {
        self.lengths.iter().copied().max().unwrap_or(0) as usize
    }

    /// Gives each of the sequences of a batch its number of keys, one of `lengths`.
    pub fn limit(sequences: &mut [Sequence], lengths: &[i32]) {
        for (s, len) in sequences.iter_mut().zip(lengths) {
            s.k_len = (*len).max(0) as usize;
        }
    }

    /// Why there is no backward pass on pages: several entries may name one page, so a gradient of
    /// a page would be a sum over them that nobody asks for.
    pub fn no_gradients() -> ProblemError {
        ProblemError::new("keys and values in pages have no gradients; gather them for a backward")
    }

    /// The page of row `row` of batch entry `b`, and the row in it.
    pub fn locate(&self, b: usize, row: usize, page_size: usize) -> [usize; 2] {
        [self.table[b * self.entries() + row / page_size] as usize, row % page_size]
    }

    /// Whether there is a page for every key of `batch` entries, among `pages` of `page_size` rows.
    ///
    /// # Errors
    /// Names the first batch entry that is too long for its table, or whose page is none.
    pub fn check(&self, batch: usize, pages: usize, page_size: usize) -> Result<(), ProblemError> {
        if self.lengths.len() != batch {
            let given = self.lengths.len();
            return fail(format!("{given} lengths of keys in pages for a batch of {batch}"));
        }
        let entries = self.entries();
        for (b, &len) in self.lengths.iter().enumerate() {
            let len = len as usize;
            if len > entries.saturating_mul(page_size) {
                return fail(format!(
                    "the {len} keys of batch entry {b} need more than the {entries} pages of \
                     {page_size} in its page table"
                ));
            }
            let needed = &self.table[b * entries..][..len.div_ceil(page_size.max(1))];
            let none = |page: &i32| usize::try_from(*page).map_or(true, |page| page >= pages);
            if let Some((i, page)) = needed.iter().enumerate().find(|(_, page)| none(page)) {
                return fail(format!(
                    "entry {i} of the page table of batch entry {b} is {page}; k and v have \
                     {pages} pages"
                ));
            }
        }
        Ok(())
    }
}

fn fail<T>(message: String) -> Result<T, ProblemError> {
    Err(ProblemError::new(message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_found_by_way_of_the_table() {
        let pages = Pages::new(&[4, 0, 2, 1, -1, -1], &[20, 7]).unwrap();
        assert_eq!((pages.entries(), pages.longest()), (3, 20));
        assert!(pages.check(2, 5, 7).is_ok(), "entries that no key needs may be anything");
        assert_eq!(pages.locate(0, 6, 7), [4, 6]);
        assert_eq!(pages.locate(0, 14, 7), [2, 0]);
        assert_eq!(pages.locate(1, 3, 7), [1, 3]);
        assert!(Pages::new(&[], &[]).unwrap().check(0, 3, 7).is_ok());
    }

    #[test]
    fn a_table_that_does_not_fit_says_what_does_not() {
        let said = |table: &[i32], lengths: &[i32]| {
            let checked = Pages::new(table, lengths).and_then(|p| p.check(2, 5, 7));
            checked.unwrap_err().to_string()
        };
        assert!(said(&[0; 4], &[3, -1]).starts_with("batch entry 1 has -1 keys"));
        assert!(said(&[0; 5], &[3, 3]).contains("5 numbers is not as long for each of 2"));
        assert!(
            said(&[0; 3], &[3, 3, 3]).starts_with("3 lengths of keys in pages for a batch of 2")
        );
        assert_eq!(
            said(&[0; 4], &[3, 15]),
            "the 15 keys of batch entry 1 need more than the 2 pages of 7 in its page table"
        );
        for page in [5, -1] {
            let expected = format!("entry 1 of the page table of batch entry 0 is {page};");
            assert!(said(&[0, page, 0, 0], &[8, 3]).starts_with(&expected));
        }
    }
}
