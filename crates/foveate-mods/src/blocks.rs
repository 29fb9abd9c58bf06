//! Masks given as lists of tiles by hand.
//!
//! The lists are authoritative (as in FlexAttention's `BlockMask.from_kv_blocks`): a tile that
//! none names is masked, a full tile is visible without the mask being asked, a partial one is
//! what the mask says. The lists become a captured table of tile kinds, so the mask is a mod
//! like any other: it composes, slices and runs on every backend.

use crate::capture::Buffer;
use crate::error::ModError;
use crate::expr::{self, Expr};
use crate::parameter::argument;
use crate::program::MaskMod;

/// Tiles of each row of query tiles: `counts [B|1, H|1, rows]` says how many of the row's entries
/// in `tiles [B|1, H|1, rows, max]` count. Entries behind the count are ignored.
#[derive(Clone, Copy, Debug)]
pub struct BlockLists<'a> {
    /// Number of listed tiles a row.
    pub counts: &'a Buffer<i32>,
    /// Indices of listed key tiles.
    pub tiles: &'a Buffer<i32>,
}

const PARTIAL: i32 = 1;
const FULL: i32 = 2;

/// A mask of tiles of `tile.0` queries × `tile.1` keys: those in `partial` follow `mask`, those
/// in `full` are visible entirely, all others are masked.
///
/// # Errors
/// When a tile side is not positive, the shapes do not fit each other, a count exceeds the
/// list's room, or an index is negative.
pub fn block_lists(
    tile: (i32, i32),
    partial: BlockLists<'_>,
    full: Option<BlockLists<'_>>,
    mask: &MaskMod,
) -> Result<MaskMod, ModError> {
    let of = "block_lists";
    if tile.0 < 1 || tile.1 < 1 {
        return Err(argument(of, format!("a tile has positive sides, not {}x{}", tile.0, tile.1)));
    }
    let [batches, heads, rows] = *partial.counts.shape() else {
        let shape = partial.counts.shape();
        return Err(argument(of, format!("counts have shape [batch, heads, rows], not {shape:?}")));
    };
    let lists = || [(partial, PARTIAL)].into_iter().chain(full.map(|list| (list, FULL)));
    let mut columns = 0;
    for (list, _) in lists() {
        let (counts, tiles) = (list.counts.shape(), list.tiles.shape());
        if counts != [batches, heads, rows] || tiles.len() != 4 || tiles[..3] != *counts {
            return Err(argument(
                of,
                format!(
                    "counts {counts:?} and tiles {tiles:?} must be [{batches}, {heads}, {rows}] \
                     and that with the room for a row's tiles"
                ),
            ));
        }
        for (row, listed) in rows_of(list) {
            let listed = listed.map_err(|reason| argument(of, format!("row {row}: {reason}")))?;
            columns = listed.iter().map(|&t| t as usize + 1).fold(columns, usize::max);
        }
    }
    // One row and one column at least, so that the table has an element to read.
    let (table_rows, table_columns) = (rows.max(1), columns.max(1));
    let (batches, heads) = (batches.max(1), heads.max(1));
    let mut kinds = vec![0; batches * heads * table_rows * table_columns];
    for (list, kind) in lists() {
        for (row, listed) in rows_of(list) {
            for &t in listed.expect("the lists were checked above") {
                kinds[row * table_columns + t as usize] = kind;
            }
        }
    }
    let kinds = Buffer::new("blocks", &[batches, heads, table_rows, table_columns], kinds)?;
    let at = |leaf: Expr<i32>, len: usize| if len == 1 { Expr::from(0) } else { leaf };
    let (row, column) = (expr::q() / tile.0, expr::kv() / tile.1);
    let (last_row, last_column) = (table_rows as i32 - 1, table_columns as i32 - 1);
    let inside = row.le(last_row) & column.le(last_column);
    let kind = kinds.at([
        at(expr::b(), batches),
        at(expr::h(), heads),
        row.min(last_row),
        column.min(last_column),
    ]);
    let visible = kind.eq(FULL) | (kind.eq(PARTIAL) & mask.expr());
    MaskMod::new((inside & visible).dynamic())
}

type Listed<'a> = Result<&'a [i32], String>;

/// The listed tiles of each row (counted over batch and heads), or why they cannot be.
fn rows_of<'a>(list: BlockLists<'a>) -> impl Iterator<Item = (usize, Listed<'a>)> {
    let room = list.tiles.shape().last().copied().unwrap_or(0);
    let (counts, tiles) = (elems(list.counts), elems(list.tiles));
    counts.iter().enumerate().map(move |(row, &count)| {
        let listed = usize::try_from(count).ok().filter(|&n| n <= room);
        let listed = listed.ok_or_else(|| format!("{count} tiles do not fit a list of {room}"));
        let listed = listed.map(|n| &tiles[row * room..row * room + n]);
        let negative = |t: &[i32]| t.iter().find(|&&t| t < 0).copied();
        (
            row,
            listed.and_then(|t| match negative(t) {
                Some(t) => Err(format!("tile {t} is negative")),
                None => Ok(t),
            }),
        )
    })
}

fn elems(buffer: &Buffer<i32>) -> &[i32] {
    match buffer.any().data() {
        crate::BufferData::I32(v) => v,
        _ => unreachable!("a Buffer<i32> holds i32"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::ScalarValue;
    use crate::eval::Point;
    use crate::masks::causal;

    fn buffer(shape: &[usize], elems: Vec<i32>) -> Buffer<i32> {
        Buffer::new("list", shape, elems).unwrap()
    }

    #[test]
    fn lists_are_authoritative() {
        // Heads 0 and 1, three rows of tiles of 2×3; entries behind the count are nonsense.
        let counts = buffer(&[1, 2, 3], vec![1, 1, 0, 0, 2, 1]);
        let tiles = buffer(&[1, 2, 3, 2], vec![0, 99, 1, 99, 99, 99, 99, -1, 0, 1, 2, 99]);
        let full_counts = buffer(&[1, 2, 3], vec![0, 1, 0, 1, 0, 0]);
        let full_tiles = buffer(&[1, 2, 3, 1], vec![9, 0, 9, 2, 9, 9]);
        let partial = BlockLists { counts: &counts, tiles: &tiles };
        let full = BlockLists { counts: &full_counts, tiles: &full_tiles };
        let mask = block_lists((2, 3), partial, Some(full), &causal()).unwrap();
        let kinds = [[[1, 0, 0], [2, 1, 0], [0, 0, 0]], [[0, 0, 2], [1, 1, 0], [0, 0, 1]]];
        for (h, tiles) in kinds.iter().enumerate() {
            for q in 0..9 {
                for kv in 0..13 {
                    let kind =
                        tiles.get(q as usize / 2).and_then(|row| row.get(kv as usize / 3)).copied();
                    let wanted = kind == Some(2) || kind == Some(1) && kv <= q;
                    let point = Point { b: 1, h: h as i32, q, kv, ..Point::default() };
                    let value = mask.program().eval(&point).unwrap()[0];
                    assert_eq!(value, ScalarValue::Bool(wanted), "h {h}, q {q}, kv {kv}");
                }
            }
        }
    }

    #[test]
    fn lists_that_contradict_themselves_are_refused() {
        let counts = buffer(&[1, 1, 1], vec![3]);
        let tiles = buffer(&[1, 1, 1, 2], vec![0, -4]);
        let list = BlockLists { counts: &counts, tiles: &tiles };
        let error = block_lists((1, 1), list, None, &causal()).unwrap_err().to_string();
        assert_eq!(error, "block_lists: row 0: 3 tiles do not fit a list of 2");
        let counts = buffer(&[1, 1, 1], vec![2]);
        let list = BlockLists { counts: &counts, tiles: &tiles };
        let error = block_lists((1, 1), list, None, &causal()).unwrap_err().to_string();
        assert_eq!(error, "block_lists: row 0: tile -4 is negative");
        let error = block_lists((0, 1), list, None, &causal()).unwrap_err().to_string();
        assert_eq!(error, "block_lists: a tile has positive sides, not 0x1");
        let counts = buffer(&[1], vec![0]);
        let list = BlockLists { counts: &counts, tiles: &tiles };
        assert!(block_lists((1, 1), list, None, &causal()).is_err());
    }
}
