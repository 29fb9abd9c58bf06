//! From a mask to runs.

use std::ops::Range;

use foveate_mods::{Bounds, Cover, Head, Machine, MaskBits, MaskMod, TileProgram};

use crate::live::Live;
use crate::{BlockMask, Kind, Run, Tile};

pub(crate) fn build(
    mask: &MaskMod,
    head: Head,
    q_len: usize,
    kv_len: usize,
    tile: Tile,
) -> BlockMask {
    assert!(tile.q > 0 && tile.kv > 0, "a tile has queries and keys");
    let fits = |len: usize| i32::try_from(len).expect("positions are i32");
    let compiled = TileProgram::compile(mask.program());
    let mut machine = compiled.machine(tile.q as usize, tile.kv as usize);
    machine.set_head(head);
    let rows = q_len.div_ceil(tile.q as usize);
    let mut builder = Builder {
        bounds: Bounds::new(mask.program()),
        machine,
        bits: MaskBits::default(),
        head,
        q_len: fits(q_len),
        kv_len: fits(kv_len),
        tile,
        rows: vec![Vec::new(); rows],
    };
    builder.visit(0..rows as u32, 0..kv_len.div_ceil(tile.kv as usize) as u32);
    let out_of_range = builder.machine.out_of_range().cloned();
    let mask = BlockMask::from_rows(q_len, kv_len, tile, builder.rows, Live::of(mask, head));
    BlockMask { out_of_range, ..mask }
}

struct Builder {
    bounds: Bounds,
    machine: Machine,
    bits: MaskBits,
    head: Head,
    q_len: i32,
    kv_len: i32,
    tile: Tile,
    rows: Vec<Vec<Run>>,
}

impl Builder {
    /// Decides the tiles `rows × columns`. Every row meets its columns from left to right. The
    /// depth is the number of halvings, at most 62.
    fn visit(&mut self, rows: Range<u32>, columns: Range<u32>) {
        if rows.is_empty() || columns.is_empty() {
            return;
        }
        let q = span(&rows, self.tile.q, self.q_len);
        let kv = span(&columns, self.tile.kv, self.kv_len);
        match self.bounds.cover(&self.head, q.clone(), kv.clone()) {
            Cover::Empty => {}
            Cover::Full => {
                for row in rows {
                    self.push(row, columns.clone(), Kind::Full);
                }
            }
            Cover::Undecided if rows.len() == 1 && columns.len() == 1 => {
                if let Some(kind) = self.evaluate(q, kv) {
                    self.push(rows.start, columns, kind);
                }
            }
            Cover::Undecided if rows.len() > columns.len() => {
                let middle = rows.start + rows.len() as u32 / 2;
                self.visit(rows.start..middle, columns.clone());
                self.visit(middle..rows.end, columns);
            }
            Cover::Undecided => {
                let middle = columns.start + columns.len() as u32 / 2;
                self.visit(rows.clone(), columns.start..middle);
                self.visit(rows, middle..columns.end);
            }
        }
    }

    /// What one tile is, by its points. The outermost rows come first: in a tile on an edge they
    /// usually differ, and then no other row can change what it is. Where an index may be out of
    /// range all rows are evaluated, so that it is met.
    fn evaluate(&mut self, q: Range<i32>, kv: Range<i32>) -> Option<Kind> {
        let settled = self.bounds.reads_inside(&self.head, q.clone(), kv.clone());
        let (mut any, mut all) = (false, true);
        for rows in [q.start..q.start + 1, q.end - 1..q.end, q] {
            let points = rows.len() as u64 * kv.len() as u64;
            self.machine.set_tile(rows, kv.clone());
            self.machine.mask_bits(None, &mut self.bits);
            let live = self.bits.count();
            any |= live > 0;
            all &= live == points;
            if any && !all && settled {
                break;
            }
        }
        match (any, all) {
            (true, true) => Some(Kind::Full),
            (true, false) => Some(Kind::Partial),
            _ => None,
        }
    }

    fn push(&mut self, row: u32, columns: Range<u32>, kind: Kind) {
        let runs = &mut self.rows[row as usize];
        match runs.last_mut() {
            Some(last) if last.kind == kind && last.tiles().end == columns.start => {
                last.count += columns.len() as u32;
            }
            _ => runs.push(Run { first: columns.start, count: columns.len() as u32, kind }),
        }
    }
}

/// Positions of a stretch of tiles.
fn span(tiles: &Range<u32>, tile: u32, len: i32) -> Range<i32> {
    let at = |t: u32| (u64::from(t) * u64::from(tile)).min(len as u64) as i32;
    at(tiles.start)..at(tiles.end)
}
