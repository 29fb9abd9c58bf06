//! Sets of positions, as ranges.

use std::fmt;
use std::ops::Range;

/// A set of positions: ranges in ascending order that neither overlap nor touch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Ranges(Vec<Range<usize>>);

impl Ranges {
    /// The positions of all `ranges`, in any order; they may overlap.
    pub fn of(ranges: impl IntoIterator<Item = Range<usize>>) -> Self {
        let mut ranges: Vec<_> = ranges.into_iter().filter(|r| !r.is_empty()).collect();
        if !ranges.is_sorted_by_key(|r| r.start) {
            ranges.sort_unstable_by_key(|r| r.start);
        }
        let mut joined: Vec<Range<usize>> = Vec::with_capacity(ranges.len());
        for range in ranges {
            match joined.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => joined.push(range),
            }
        }
        Self(joined)
    }

    /// The positions of one range.
    pub fn one(range: Range<usize>) -> Self {
        Self::of(std::iter::once(range))
    }

    /// The ranges, ascending.
    pub fn as_slice(&self) -> &[Range<usize>] {
        &self.0
    }

    /// Number of positions.
    pub fn len(&self) -> usize {
        self.0.iter().map(|r| r.len()).sum()
    }

    /// True when there is no position.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Positions of either.
    pub fn union(&self, other: &Self) -> Self {
        Self::of(self.0.iter().chain(&other.0).cloned())
    }

    /// Positions of both.
    pub fn intersection(&self, other: &Self) -> Self {
        let (mut i, mut j, mut both) = (0, 0, Vec::new());
        while let (Some(a), Some(b)) = (self.0.get(i), other.0.get(j)) {
            let common = a.start.max(b.start)..a.end.min(b.end);
            if !common.is_empty() {
                both.push(common);
            }
            if a.end < b.end { i += 1 } else { j += 1 }
        }
        Self(both)
    }

    /// Positions of this one that the other has not.
    pub fn difference(&self, other: &Self) -> Self {
        let (mut rest, mut j) = (Vec::new(), 0);
        for range in &self.0 {
            let mut start = range.start;
            while other.0.get(j).is_some_and(|o| o.end <= start) {
                j += 1;
            }
            let mut at = j;
            while let Some(o) = other.0.get(at).filter(|o| o.start < range.end) {
                if start < o.start {
                    rest.push(start..o.start);
                }
                start = start.max(o.end);
                at += 1;
            }
            if start < range.end {
                rest.push(start..range.end);
            }
        }
        Self(rest)
    }

    /// How many positions both have.
    pub fn common(&self, other: &Self) -> usize {
        let (mut i, mut j, mut common) = (0, 0, 0);
        while let (Some(a), Some(b)) = (self.0.get(i), other.0.get(j)) {
            common += a.end.min(b.end).saturating_sub(a.start.max(b.start));
            if a.end < b.end { i += 1 } else { j += 1 }
        }
        common
    }
}

impl fmt::Display for Ranges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MOST: usize = 4;
        let shown: Vec<_> = self.0.iter().take(MOST).map(|r| format!("{r:?}")).collect();
        f.write_str(if shown.is_empty() { "nothing" } else { "" })?;
        f.write_str(&shown.join(", "))?;
        match self.0.len().saturating_sub(MOST) {
            0 => Ok(()),
            more => write!(f, " and {more} ranges more"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn set(ranges: &[Range<usize>]) -> BTreeSet<usize> {
        ranges.iter().cloned().flatten().collect()
    }

    proptest! {
        #[test]
        fn sets_of_ranges_are_sets(
            a in prop::collection::vec((0..60usize, 0..9usize), 0..8),
            b in prop::collection::vec((0..60usize, 0..9usize), 0..8),
        ) {
            let [a, b] = [a, b].map(|r| r.into_iter().map(|(at, n)| at..at + n).collect::<Vec<_>>());
            let (sa, sb) = (set(&a), set(&b));
            let (a, b) = (Ranges::of(a), Ranges::of(b));
            for (found, wanted) in [
                (&a, &sa),
                (&a.union(&b), &(&sa | &sb)),
                (&a.intersection(&b), &(&sa & &sb)),
                (&a.difference(&b), &(&sa - &sb)),
            ] {
                prop_assert_eq!(&set(found.as_slice()), wanted);
                prop_assert_eq!(found.len(), wanted.len());
                prop_assert_eq!(found, &Ranges::of(found.as_slice().to_vec()), "canonical");
            }
            prop_assert_eq!(a.common(&b), (&sa & &sb).len());
        }
    }
}
