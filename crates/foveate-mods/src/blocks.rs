//! Masks given as lists of tiles by hand.
//!
//! The lists are authoritative (as in FlexAttention's `BlockMask.from_kv_blocks`): a tile that
//! none names is masked. They become a captured table of tiles, so the mask is a mod like any
//! other: it composes, slices and runs on every backend.

use crate::capture::Buffer;
use crate::error::ModError;
use crate::expr;
use crate::parameter::{along, argument};
use crate::program::MaskMod;
use crate::value::BufferData;

/// Tiles of each row of query tiles: `counts [B|1, H|1, rows]` says how many of the row's entries
/// in `tiles [B|1, H|1, rows, max]` count. Entries behind the count are ignored.
#[derive(Clone, Copy, Debug)]
pub struct BlockLists<'a> {
    /// Number of listed tiles a row.
    pub counts: &'a Buffer<i32>,
    /// Indices of listed key tiles.
    pub tiles: &'a Buffer<i32>,
}

/// A mask of tiles of `tile.0` queries × `tile.1` keys: those in `partial` follow `mask`, those
/// in `full` are visible entirely, all others are masked. It is
/// `mask & blocks(tile, partial) | blocks(tile, full)`.
///
/// # Errors
/// Those of [`blocks`].
pub fn block_lists(
    tile: (i32, i32),
    partial: BlockLists<'_>,
    full: Option<BlockLists<'_>>,
    mask: &MaskMod,
) -> Result<MaskMod, ModError> {
    let follows = mask.clone() & blocks(tile, partial)?;
    Ok(match full {
        Some(full) => follows | blocks(tile, full)?,
        None => follows,
    })
}

/// A mask of tiles of `tile.0` queries × `tile.1` keys of any size, whose kinds stand in `table
/// [B|1, H|1, rows, columns]`: 0 is masked, 1 follows `mask`, anything else is visible entirely. The
/// table is authoritative: what lies outside of it is masked. It is a captured buffer, read where it
/// lies: u8 memory of somebody else's ([`crate::AnyBuffer::shared`]) or in device memory
/// ([`crate::AnyBuffer::on_device`]), where the host reads none of it.
///
/// ```
/// use foveate_mods::{AnyBuffer, Buffer, SharedElements, masks};
///
/// let kinds = SharedElements::from_vec(vec![1u8, 0, 2, 1]);
/// let table = AnyBuffer::shared("kinds", &kinds, &[1, 1, 2, 2], &[0, 0, 2, 1], 0, false)?;
/// let mask = masks::block_table((128, 128), &Buffer::from_any(table)?, &masks::causal())?;
/// # Ok::<(), foveate_mods::ModError>(())
/// ```
///
/// # Errors
/// When a tile side is not positive, or the table has not four axes with an element.
pub fn block_table(
    tile: (i32, i32),
    table: &Buffer<i32>,
    mask: &MaskMod,
) -> Result<MaskMod, ModError> {
    let of = "block_table";
    if tile.0 < 1 || tile.1 < 1 {
        return Err(argument(of, format!("a tile has positive sides, not {}x{}", tile.0, tile.1)));
    }
    let &[batches, heads, rows, columns] = table.shape() else {
        let shape = table.shape();
        let reason = format!("a table has shape [batch, heads, rows, columns], not {shape:?}");
        return Err(argument(of, reason));
    };
    let last = |len: usize| i32::try_from(len).ok().filter(|&len| len > 0).map(|len| len - 1);
    let (Some(last_row), Some(last_column)) = (last(rows), last(columns)) else {
        let reason =
            format!("a table of {rows} rows and {columns} columns of tiles cannot be read");
        return Err(argument(of, reason));
    };
    let (row, column) = (expr::q() / tile.0, expr::kv() / tile.1);
    let inside = row.le(last_row) & column.le(last_column);
    let kind = table.at([
        along(expr::b(), batches),
        along(expr::h(), heads),
        row.min(last_row),
        column.min(last_column),
    ]);
    let live = kind.eq(1) & mask.expr() | kind.ne(0) & kind.ne(1);
    MaskMod::new((inside & live).dynamic())
}

/// A query sees the keys of the tiles that are listed for its row, in tiles of `tile.0` queries ×
/// `tile.1` keys. Rows and tiles that are not listed are masked.
///
/// # Errors
/// When a tile side is not positive, a list is in device memory, the shapes do not fit each other,
/// a count exceeds the last axis of the tiles, an index is negative, or the table of tiles would have over
/// `i32::MAX` of them.
pub fn blocks(tile: (i32, i32), list: BlockLists<'_>) -> Result<MaskMod, ModError> {
    let of = "blocks";
    if tile.0 < 1 || tile.1 < 1 {
        return Err(argument(of, format!("a tile has positive sides, not {}x{}", tile.0, tile.1)));
    }
    for buffer in [list.counts, list.tiles] {
        let buffer = buffer.any();
        if buffer.is_on_device() {
            return Err(argument(
                of,
                format!(
                    "`{}` is in device memory, and lists are read on the host when the mask is \
                     made; copy it to host memory first",
                    buffer.name()
                ),
            ));
        }
    }
    let (counts, tiles) = (list.counts.shape(), list.tiles.shape());
    let &[batches, heads, rows] = counts else {
        return Err(argument(
            of,
            format!("counts have shape [batch, heads, rows], not {counts:?}"),
        ));
    };
    if tiles.len() != 4 || tiles[..3] != *counts {
        return Err(argument(
            of,
            format!("tiles of counts {counts:?} have that shape and one axis more, not {tiles:?}"),
        ));
    }
    let mut columns = 0;
    for (row, listed) in rows_of(list) {
        let listed = listed.map_err(|reason| argument(of, format!("row {row}: {reason}")))?;
        columns = listed.iter().map(|&t| t as usize + 1).fold(columns, usize::max);
    }
    // One of each at least, so that the table has an element to read.
    let shape = [batches, heads, rows, columns].map(|len| len.max(1));
    let elems = shape.iter().try_fold(1usize, |n, &len| n.checked_mul(len));
    let Some(elems) = elems.filter(|&n| n <= i32::MAX as usize) else {
        let reason = format!("tile {} makes a table of {shape:?} tiles, too many", columns - 1);
        return Err(argument(of, reason));
    };
    let mut live = vec![false; elems];
    for (row, listed) in rows_of(list) {
        for t in listed.expect("the lists were checked above") {
            live[row * shape[3] + t as usize] = true;
        }
    }
    // Named after the list, so that two lists are rebound apart.
    let live = Buffer::new(format!("live_{}", list.tiles.any().name()), &shape, live)?;
    let (row, column) = (expr::q() / tile.0, expr::kv() / tile.1);
    let (last_row, last_column) = (shape[2] as i32 - 1, shape[3] as i32 - 1);
    let inside = row.le(last_row) & column.le(last_column);
    let listed = live.at([
        along(expr::b(), shape[0]),
        along(expr::h(), shape[1]),
        row.min(last_row),
        column.min(last_column),
    ]);
    MaskMod::new((inside & listed).dynamic())
}

type Listed = Result<Vec<i32>, String>;

/// The listed tiles of each row (counted over batch and heads), or why they cannot be.
fn rows_of(list: BlockLists<'_>) -> impl Iterator<Item = (usize, Listed)> {
    let most = list.tiles.shape().last().copied().unwrap_or(0);
    let tiles = elems(list.tiles);
    elems(list.counts).into_iter().enumerate().map(move |(row, count)| {
        let listed = usize::try_from(count).ok().filter(|&n| n <= most);
        let listed = listed.ok_or_else(|| format!("{count} tiles do not fit a list of {most}"));
        let listed = listed.map(|n| tiles[row * most..row * most + n].to_vec());
        let negative = |t: &[i32]| t.iter().find(|&&t| t < 0).copied();
        (
            row,
            listed.and_then(|t| match negative(&t) {
                Some(t) => Err(format!("tile {t} is negative")),
                None => Ok(t),
            }),
        )
    })
}

fn elems(buffer: &Buffer<i32>) -> Vec<i32> {
    match buffer.any().to_data() {
        BufferData::I32(v) => v,
        _ => unreachable!("a Buffer<i32> is read as i32"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::AnyBuffer;
    use crate::masks::causal;
    use crate::point::Point;
    use crate::text::{Names, parse_mask};
    use crate::value::ScalarValue;

    fn buffer(shape: &[usize], elems: Vec<i32>) -> Buffer<i32> {
        Buffer::new("list", shape, elems).unwrap()
    }

    #[test]
    fn lists_in_device_memory_are_refused_by_name() {
        let here = Buffer::new("counts", &[1, 1, 2], vec![1, 1]).unwrap();
        let tiles = Buffer::new("tiles", &[1, 1, 2, 1], vec![0, 1]).unwrap();
        let counts = Buffer::on_device("far_counts", &[1, 1, 2]).unwrap();
        let far = Buffer::on_device("far_tiles", &[1, 1, 2, 1]).unwrap();
        let told = |list: BlockLists<'_>| {
            let named = blocks((4, 4), list).expect_err("nothing can be read").to_string();
            let joined = block_lists((4, 4), list, None, &causal()).expect_err("neither");
            assert_eq!(joined.to_string(), named);
            named
        };
        let said = told(BlockLists { counts: &counts, tiles: &tiles });
        assert!(said.starts_with("blocks: `far_counts` is in device memory"), "{said}");
        let said = told(BlockLists { counts: &here, tiles: &far });
        assert!(said.starts_with("blocks: `far_tiles` is in device memory"), "{said}");
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
        let named = [("counts", &counts), ("tiles", &tiles), ("whole", &full_counts)];
        let names = named.iter().fold(Names::new(), |n, (name, b)| n.buffer_as(*name, b.any()));
        let names = names.buffer_as("whole_tiles", full_tiles.any());
        let text = "causal & blocks(counts, tiles, 2, 3) | blocks(whole, whole_tiles, 2, 3)";
        assert_eq!(parse_mask(text, &names).unwrap(), mask);
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
    fn a_table_of_kinds_is_the_lists_that_it_stands_for() {
        // Tiles of 2×3; heads apart, the batch shared.
        let kinds = vec![1u8, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0, 2, 1, 1, 0, 0, 0, 1];
        let elements = crate::SharedElements::from_vec(kinds.clone());
        let strides = [0, 9, 3, 1];
        let table = AnyBuffer::shared("kinds", &elements, &[2, 2, 3, 3], &strides, 0, false);
        let here = Buffer::from_any(table.unwrap()).unwrap();
        let far = AnyBuffer::on_device("kinds", &[2, 2, 3, 3], crate::ElementType::U8, false);
        let far = Buffer::from_any(far.unwrap()).unwrap();
        let mask = block_table((2, 3), &here, &causal()).unwrap();
        let elsewhere = block_table((2, 3), &far, &causal()).unwrap();
        assert!(mask.program().same_structure(elsewhere.program()), "no element is looked at");
        let bounds = crate::Bounds::new(mask.program());
        for (h, q, kv) in
            (0..2).flat_map(|h| (0..9).flat_map(move |q| (0..13).map(move |kv| (h, q, kv))))
        {
            let listed = q < 6 && kv < 9;
            let kind = if listed { kinds[h * 9 + q as usize / 2 * 3 + kv as usize / 3] } else { 0 };
            let wanted = kind == 2 || kind == 1 && kv <= q;
            let head =
                crate::Head { b: 1, h: h as i32, q_len: 9, kv_len: 13, ..Default::default() };
            let value = mask.program().eval(&head.at(q, kv)).unwrap()[0];
            assert_eq!(value, ScalarValue::Bool(wanted), "h {h}, q {q}, kv {kv}");
            let (q, kv) = (q / 2 * 2, kv / 3 * 3);
            let cover = bounds.cover(&head, q..q + 2, kv..kv + 3);
            match kind {
                0 => assert_eq!(cover, crate::Cover::Empty),
                2 => assert_eq!(cover, crate::Cover::Full),
                _ => {}
            }
        }
        let flat = Buffer::vector("flat", vec![0]);
        let said = block_table((2, 3), &flat, &causal()).unwrap_err().to_string();
        assert_eq!(said, "block_table: a table has shape [batch, heads, rows, columns], not [1]");
        let said = block_table((2, 0), &here, &causal()).unwrap_err().to_string();
        assert_eq!(said, "block_table: a tile has positive sides, not 2x0");
    }

    #[test]
    fn lists_that_contradict_themselves_are_refused() {
        let counts = buffer(&[1, 1, 1], vec![3]);
        let tiles = buffer(&[1, 1, 1, 2], vec![0, -4]);
        let list = BlockLists { counts: &counts, tiles: &tiles };
        let error = block_lists((1, 1), list, None, &causal()).unwrap_err().to_string();
        assert_eq!(error, "blocks: row 0: 3 tiles do not fit a list of 2");
        let counts = buffer(&[1, 1, 1], vec![2]);
        let list = BlockLists { counts: &counts, tiles: &tiles };
        let error = block_lists((1, 1), list, None, &causal()).unwrap_err().to_string();
        assert_eq!(error, "blocks: row 0: tile -4 is negative");
        let error = block_lists((0, 1), list, None, &causal()).unwrap_err().to_string();
        assert_eq!(error, "blocks: a tile has positive sides, not 0x1");
        let counts = buffer(&[1], vec![0]);
        let list = BlockLists { counts: &counts, tiles: &tiles };
        let error = blocks((1, 1), list).unwrap_err().to_string();
        assert_eq!(error, "blocks: counts have shape [batch, heads, rows], not [1]");
        let (counts, tiles) = (buffer(&[1, 2, 1], vec![1, 1]), buffer(&[1, 1, 1, 1], vec![0]));
        let error = blocks((1, 1), BlockLists { counts: &counts, tiles: &tiles }).unwrap_err();
        assert!(error.to_string().ends_with("and one axis more, not [1, 1, 1, 1]"), "{error}");
        let (counts, tiles) =
            (buffer(&[1, 1, 2], vec![1; 2]), buffer(&[1, 1, 2, 1], vec![0, i32::MAX]));
        let error = blocks((1, 1), BlockLists { counts: &counts, tiles: &tiles }).unwrap_err();
        assert!(error.to_string().ends_with("[1, 1, 2, 2147483648] tiles, too many"), "{error}");
    }
}
