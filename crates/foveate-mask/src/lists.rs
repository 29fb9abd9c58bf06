//! Block masks listed by hand, and what is refused of lists and slices.
//!
//! A list is authoritative: a tile it leaves out is masked, a tile listed as full is not
//! evaluated. The checks here keep the invariants of [`BlockMask`]'s runs.

use std::ops::Range;

use crate::live::Live;
use crate::{BlockMask, Kind, Run, Tile};

/// A block list that does not fit its lengths, or a slice that leaves its block mask. The message
/// says what was given and the limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct MaskError {
    message: String,
}

fn refused<T>(message: String) -> Result<T, MaskError> {
    Err(MaskError { message })
}

/// Checks that a slice takes some of the `len` rows or columns there are.
pub(crate) fn within(what: &str, range: &Range<usize>, len: usize) -> Result<(), MaskError> {
    let Range { start, end } = *range;
    if start > end {
        return refused(format!(
            "{what} {start}..{end} of tiles run backwards; a slice ends where it starts or later"
        ));
    }
    if end > len {
        return refused(format!(
            "{what} {start}..{end} of tiles reach past the last; the block mask has {len}"
        ));
    }
    Ok(())
}

impl BlockMask {
    /// A block mask of listed runs: `rows[i]` are those of row `i` of tiles, from left to right.
    /// Touching runs of one kind are joined. `live_entries` counts whole tiles.
    ///
    /// # Errors
    /// When a tile has no queries or keys, the number of rows is not that of the lengths, or a
    /// run is empty, overlaps the one before it or leaves the row.
    pub fn from_runs(
        q_len: usize,
        kv_len: usize,
        tile: Tile,
        rows: &[Vec<Run>],
    ) -> Result<Self, MaskError> {
        let Tile { q, kv } = tile;
        if q == 0 || kv == 0 {
            return refused(format!(
                "a tile of {q} x {kv} is empty; both sides must be at least 1"
            ));
        }
        let (want, columns) = (q_len.div_ceil(q as usize), kv_len.div_ceil(kv as usize));
        if rows.len() != want {
            let given = rows.len();
            return refused(format!(
                "{given} rows of tiles are listed; {q_len} queries in tiles of {q} need {want}"
            ));
        }
        let mut joined: Vec<Vec<Run>> = Vec::with_capacity(rows.len());
        for (i, row) in rows.iter().enumerate() {
            let mut runs: Vec<Run> = Vec::new();
            for &Run { first, count, kind } in row {
                let from = runs.last().map_or(0, |r| r.tiles().end);
                if count == 0
                    || first < from
                    || u64::from(first) + u64::from(count) > columns as u64
                {
                    return refused(format!(
                        "row {i}: {count} tiles from {first} on must be at least one tile, start \
                         at {from} or later and end by {columns}"
                    ));
                }
                match runs.last_mut() {
                    Some(last) if from == first && last.kind == kind => last.count += count,
                    _ => runs.push(Run { first, count, kind }),
                }
            }
            joined.push(runs);
        }
        Ok(Self::from_rows(q_len, kv_len, tile, joined, Live::Known(0)).counting_tiles())
    }

    /// A block mask listed tile by tile: for each row of tiles the columns of its partial and of
    /// its full tiles, in any order.
    ///
    /// # Errors
    /// Those of [`Self::from_runs`], or when the two lists have different numbers of rows, or a
    /// tile is listed twice.
    pub fn from_kv_blocks(
        q_len: usize,
        kv_len: usize,
        tile: Tile,
        partial: &[Vec<u32>],
        full: &[Vec<u32>],
    ) -> Result<Self, MaskError> {
        if partial.len() != full.len() {
            return refused(format!(
                "partial tiles are listed for {} rows and full tiles for {}; both must list every \
                 row",
                partial.len(),
                full.len()
            ));
        }
        let single = |kind| move |&first: &u32| Run { first, count: 1, kind };
        let row = |(partial, full): (&Vec<u32>, &Vec<u32>)| {
            let partial = partial.iter().map(single(Kind::Partial));
            let mut runs: Vec<Run> = partial.chain(full.iter().map(single(Kind::Full))).collect();
            runs.sort_unstable_by_key(|r| r.first);
            runs
        };
        let rows: Vec<_> = partial.iter().zip(full).map(row).collect();
        Self::from_runs(q_len, kv_len, tile, &rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TILE: Tile = Tile { q: 4, kv: 4 };

    fn run(first: u32, count: u32) -> Run {
        Run { first, count, kind: Kind::Full }
    }

    #[test]
    fn listed_tiles_become_runs() {
        let (partial, full) = ([vec![2, 0], vec![]], [vec![1], vec![1, 0]]);
        let listed = BlockMask::from_kv_blocks(7, 10, TILE, &partial, &full).unwrap();
        assert_eq!(
            listed.row(0).iter().map(|r| r.kind).collect::<Vec<_>>(),
            [Kind::Partial, Kind::Full, Kind::Partial]
        );
        assert_eq!(listed.row(1), [run(0, 2)]);
        assert_eq!(listed.stats().live_entries, 4 * 10 + 3 * 8);
        let joined = BlockMask::from_runs(7, 10, TILE, &[vec![], vec![run(0, 1), run(1, 2)]]);
        assert_eq!(joined.unwrap().row(1), [run(0, 3)]);
    }

    #[test]
    fn a_list_that_does_not_fit_is_refused_with_its_row_and_the_limit() {
        let message = |rows: &[Vec<Run>]| {
            BlockMask::from_runs(7, 10, TILE, rows).expect_err("it does not fit").to_string()
        };
        assert!(message(&[vec![]]).contains("need 2"));
        assert!(message(&[vec![], vec![run(2, 2)]]).starts_with("row 1: 2 tiles from 2 on"));
        assert!(message(&[vec![], vec![run(u32::MAX, u32::MAX)]]).contains("end by 3"));
        assert!(message(&[vec![run(0, 2), run(1, 1)], vec![]]).contains("at 2 or later"));
        assert!(message(&[vec![run(0, 0)], vec![]]).contains("at least one tile"));
        assert!(BlockMask::from_runs(7, 10, Tile { q: 0, kv: 4 }, &[]).is_err());
        let twice = BlockMask::from_kv_blocks(4, 4, TILE, &[vec![0]], &[vec![0]]);
        assert!(twice.is_err());
        assert!(BlockMask::from_kv_blocks(4, 4, TILE, &[vec![0]], &[]).is_err());
    }

    #[test]
    #[expect(clippy::reversed_empty_ranges, reason = "these are what must be refused")]
    fn a_slice_that_leaves_the_block_mask_is_refused_with_what_there_is() {
        let whole = BlockMask::full(7, 10, TILE);
        let told = |sliced: Result<BlockMask, MaskError>| sliced.expect_err("refused").to_string();
        let past = "of tiles reach past the last; the block mask has";
        assert_eq!(told(whole.slice_rows(1..3)), format!("rows 1..3 {past} 2"));
        assert_eq!(told(whole.slice_columns(4..4)), format!("columns 4..4 {past} 3"));
        assert!(told(whole.slice_rows(0..usize::MAX)).ends_with("has 2"));
        assert!(told(whole.slice_rows(2..1)).starts_with("rows 2..1 of tiles run backwards"));
        assert!(told(whole.slice_columns(usize::MAX..0)).contains("run backwards"));
        assert_eq!(whole.slice_rows(2..2).unwrap().q_len(), 0);
        assert_eq!(whole.slice_columns(3..3).unwrap().kv_len(), 0);
    }
}
