//! Permutations of a row's tokens, with an identity.

use std::fmt;
use std::ops::Range;

use crate::error::{ShardError, refused};

/// Tells permutations apart: equal permutations have equal identities, in every process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PermutationId(u64);

impl fmt::Display for PermutationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// A bijection of the tokens of a row: which ranges of the row, in which order. Tokens, labels,
/// positions, documents and rotary rows all move by one of these.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Permutation {
    /// Ranges of the row in their new order; they cover it once.
    ranges: Vec<Range<usize>>,
    len: usize,
    id: PermutationId,
}

impl Permutation {
    /// The permutation that puts `ranges` of a row one after another.
    ///
    /// # Errors
    /// When they do not cover `0..len` exactly once; the message says where.
    pub fn new(ranges: Vec<Range<usize>>, len: usize) -> Result<Self, ShardError> {
        let mut sorted: Vec<_> = ranges.iter().filter(|r| !r.is_empty()).collect();
        sorted.sort_unstable_by_key(|r| r.start);
        let mut end = 0;
        for range in sorted {
            if range.start != end {
                let what = if range.start > end { "are in no range" } else { "are in two ranges" };
                let (from, to) = (end.min(range.start), end.max(range.start));
                return refused(format!("permutation of {len} tokens: {from}..{to} {what}"));
            }
            end = range.end;
        }
        if end != len {
            let (from, to) = (end.min(len), end.max(len));
            return refused(format!(
                "permutation of {len} tokens: ranges end at {end}, {from}..{to} differ"
            ));
        }
        let mut joined: Vec<Range<usize>> = Vec::new();
        for range in ranges.into_iter().filter(|r| !r.is_empty()) {
            match joined.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => joined.push(range),
            }
        }
        let id = PermutationId(hash(&joined, len));
        Ok(Self { ranges: joined, len, id })
    }

    /// Every token where it was.
    pub fn identity(len: usize) -> Self {
        let whole = 0..len;
        Self::new(vec![whole], len).expect("one range covers the row once")
    }

    /// Which permutation this is.
    pub fn id(&self) -> PermutationId {
        self.id
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True when there is no token.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The ranges of the row, in their new order.
    pub fn ranges(&self) -> &[Range<usize>] {
        &self.ranges
    }

    /// The row's positions of the tokens in `new`, a range of the new order.
    ///
    /// # Panics
    /// When the range leaves the row.
    pub fn positions(&self, new: Range<usize>) -> Vec<Range<usize>> {
        assert!(new.end <= self.len, "{new:?} of {} tokens", self.len);
        let (mut at, mut found) = (0, Vec::new());
        for range in &self.ranges {
            let (from, to) = (new.start.max(at), new.end.min(at + range.len()));
            if from < to {
                found.push(range.start + from - at..range.start + to - at);
            }
            at += range.len();
        }
        found
    }

    /// The values of a row in the new order; `width` values belong to a token.
    ///
    /// # Panics
    /// When there are not `width` values for each token.
    pub fn apply<T: Clone>(&self, row: &[T], width: usize) -> Vec<T> {
        assert_eq!(row.len(), self.len * width, "a row of {} tokens", self.len);
        let values = self.ranges.iter().map(|r| &row[r.start * width..r.end * width]);
        values.collect::<Vec<_>>().concat()
    }

    /// The permutation that undoes this one.
    pub fn inverse(&self) -> Self {
        let mut starts: Vec<_> = Vec::new();
        let mut at = 0;
        for range in &self.ranges {
            starts.push((range.start, at..at + range.len()));
            at += range.len();
        }
        starts.sort_unstable_by_key(|(start, _)| *start);
        let ranges = starts.into_iter().map(|(_, new)| new).collect();
        Self::new(ranges, self.len).expect("the inverse of a bijection is one")
    }
}

/// The order of tokens where parts of the batch have a permutation each: that of all where they have the same.
pub(crate) fn order_of(permutations: &[Permutation]) -> Option<PermutationId> {
    let first = permutations.first()?.id;
    if permutations.iter().all(|permutation| permutation.id == first) {
        return Some(first);
    }
    Some(PermutationId(crate::hash::words(permutations.iter().map(|permutation| permutation.id.0))))
}

/// The same in every process, as identities are.
fn hash(ranges: &[Range<usize>], len: usize) -> u64 {
    let words = ranges.iter().flat_map(|r| [r.start as u64, r.end as u64]);
    crate::hash::words(words.chain([len as u64]))
}
