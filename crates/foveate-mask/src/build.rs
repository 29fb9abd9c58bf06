//! From a mask to runs.

use std::ops::{ControlFlow, Range};

use foveate_mods::{Bounds, Cover, Head, Machine, MaskBits, MaskMod, TileProgram};

use crate::live::Live;
use crate::progress::{Progress, Watch};
use crate::{BlockMask, Kind, Run, Tile};

/// Steps between two calls of a watch.
const STEPS: u32 = 1 << 10;

/// What a row of tiles takes while it is built: its list, the first allocation of that, and its
/// place in the block mask.
const ROW_BYTES: u64 = 92;

/// What a run takes while it is built: its place in a list that doubles, and in the block mask.
const RUN_BYTES: u64 = 30;

#[cfg(feature = "counts")]
static BUILT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

/// How many block masks this process has begun to build.
#[cfg(feature = "counts")]
pub fn built() -> usize {
    BUILT.load(std::sync::atomic::Ordering::SeqCst)
}

pub(crate) fn build(
    mask: &MaskMod,
    head: Head,
    q_len: usize,
    kv_len: usize,
    tile: Tile,
    watch: Watch<'_>,
) -> Option<BlockMask> {
    assert!(tile.q > 0 && tile.kv > 0, "a tile has queries and keys");
    #[cfg(feature = "counts")]
    BUILT.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
    let fits = |len: usize| i32::try_from(len).expect("positions are i32");
    let (q_end, kv_end) = (fits(q_len), fits(kv_len));
    let [rows, columns] = [q_len.div_ceil(tile.q as usize), kv_len.div_ceil(tile.kv as usize)];
    let all = rows as u64 * columns as u64;
    let base_bytes = rows as u64 * ROW_BYTES;
    if watch(Progress { done: 0, all, base_bytes, bytes: base_bytes }).is_break() {
        return None;
    }
    let compiled = TileProgram::compile(mask.program());
    let side = |tile: u32, len: usize| len.clamp(1, tile as usize);
    let mut machine = compiled.machine(side(tile.q, q_len), side(tile.kv, kv_len));
    machine.set_head(head);
    let mut builder = Builder {
        bounds: Bounds::new(mask.program()),
        machine,
        bits: MaskBits::default(),
        head,
        q_len: q_end,
        kv_len: kv_end,
        tile,
        rows: vec![Vec::new(); rows],
        runs: 0,
        decided: 0,
        all,
        steps: 0,
        watch,
    };
    if builder.visit(0..rows as u32, 0..columns as u32).is_break() {
        return None;
    }
    let out_of_range = builder.machine.out_of_range().cloned();
    let mask = BlockMask::from_rows(q_len, kv_len, tile, builder.rows, Live::of(mask, head));
    Some(BlockMask { out_of_range, ..mask })
}

struct Builder<'a> {
    bounds: Bounds,
    machine: Machine,
    bits: MaskBits,
    head: Head,
    q_len: i32,
    kv_len: i32,
    tile: Tile,
    rows: Vec<Vec<Run>>,
    runs: u64,
    /// Tiles of which it is known what they are.
    decided: u64,
    /// Tiles of the plane.
    all: u64,
    steps: u32,
    watch: Watch<'a>,
}

impl Builder<'_> {
    /// Decides the tiles `rows × columns`. Every row meets its columns from left to right. The
    /// depth is the number of halvings, at most 62.
    fn visit(&mut self, rows: Range<u32>, columns: Range<u32>) -> ControlFlow<()> {
        if rows.is_empty() || columns.is_empty() {
            return ControlFlow::Continue(());
        }
        self.tell()?;
        let q = span(&rows, self.tile.q, self.q_len);
        let kv = span(&columns, self.tile.kv, self.kv_len);
        let tiles = rows.len() as u64 * columns.len() as u64;
        match self.bounds.cover(&self.head, q.clone(), kv.clone()) {
            Cover::Empty => {}
            Cover::Full => {
                for row in rows {
                    self.push(row, columns.clone(), Kind::Full);
                }
            }
            Cover::Undecided if tiles == 1 => {
                if let Some(kind) = self.evaluate(q, kv) {
                    self.push(rows.start, columns, kind);
                }
            }
            Cover::Undecided if rows.len() > columns.len() => {
                let middle = rows.start + rows.len() as u32 / 2;
                self.visit(rows.start..middle, columns.clone())?;
                return self.visit(middle..rows.end, columns);
            }
            Cover::Undecided => {
                let middle = columns.start + columns.len() as u32 / 2;
                self.visit(rows.clone(), columns.start..middle)?;
                return self.visit(rows, middle..columns.end);
            }
        }
        self.decided += tiles;
        ControlFlow::Continue(())
    }

    /// Tells the watch now and then how far this is.
    fn tell(&mut self) -> ControlFlow<()> {
        self.steps += 1;
        if self.steps < STEPS {
            return ControlFlow::Continue(());
        }
        self.steps = 0;
        let base_bytes = self.rows.len() as u64 * ROW_BYTES;
        let bytes = base_bytes + self.runs * RUN_BYTES;
        (self.watch)(Progress { done: self.decided, all: self.all, base_bytes, bytes })
    }

    /// What one tile is, by its points. The outermost rows come first: in a tile on an edge they
    /// usually differ, and then no other row can change what it is. Where an index may be out of
    /// range all rows are evaluated, so that it is met.
    fn evaluate(&mut self, q: Range<i32>, kv: Range<i32>) -> Option<Kind> {
        let reads_inside = self.bounds.reads_inside(&self.head, q.clone(), kv.clone());
        let (mut any, mut all) = (false, true);
        for rows in [q.start..q.start + 1, q.end - 1..q.end, q] {
            let points = rows.len() as u64 * kv.len() as u64;
            self.machine.set_tile(rows, kv.clone());
            self.machine.mask_bits(None, &mut self.bits);
            let live = self.bits.count();
            any |= live > 0;
            all &= live == points;
            if any && !all && reads_inside {
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
            _ => {
                runs.push(Run { first: columns.start, count: columns.len() as u32, kind });
                self.runs += 1;
            }
        }
    }
}

/// Positions of a stretch of tiles.
fn span(tiles: &Range<u32>, tile: u32, len: i32) -> Range<i32> {
    let at = |t: u32| (u64::from(t) * u64::from(tile)).min(len as u64) as i32;
    at(tiles.start)..at(tiles.end)
}
