//! How many points a mask lets through.
//!
//! Exact, and far more work than the tiles themselves: every point of every partial tile is
//! evaluated. So they are counted when somebody asks, once.

use std::ops::ControlFlow::{self, Break, Continue};
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use foveate_mods::{Head, MaskBits, MaskMod, TileProgram};

use crate::progress::{Progress, Watch};
use crate::{BlockMask, Kind};

/// Points that are evaluated between two calls of a watch.
const STEP_POINTS: u64 = 1 << 22;

/// The points of a block mask.
#[derive(Clone, Debug)]
pub(crate) enum Live {
    /// So many.
    Known(u64),
    /// As many as the mask is true at; `transposed` when rows of tiles are keys.
    Counted { of: Arc<Counted>, transposed: bool },
}

#[derive(Debug)]
pub(crate) struct Counted {
    mask: MaskMod,
    head: Head,
    points: OnceLock<u64>,
}

impl Live {
    /// The points of `mask`, not counted yet.
    pub(crate) fn of(mask: &MaskMod, head: Head) -> Self {
        let of = Counted { mask: mask.clone(), head, points: OnceLock::new() };
        Self::Counted { of: Arc::new(of), transposed: false }
    }

    /// The same points with queries and keys exchanged.
    pub(crate) fn transpose(&self) -> Self {
        match self {
            Self::Known(points) => Self::Known(*points),
            Self::Counted { of, transposed } => {
                Self::Counted { of: of.clone(), transposed: !transposed }
            }
        }
    }

    /// Their numbers by row of tiles, of the block mask that holds this.
    pub(crate) fn by_row(&self, tiles: &BlockMask) -> Vec<u64> {
        let mut rows: Vec<u64> =
            (0..tiles.rows()).map(|row| tiles.row_entries_of(row, Kind::Full)).collect();
        match self {
            Self::Known(_) => (rows.iter_mut().enumerate())
                .for_each(|(row, points)| *points += tiles.row_entries_of(row, Kind::Partial)),
            Self::Counted { of, transposed } => {
                let counted =
                    of.count_partial(tiles, *transposed, &mut |_| Continue(()), &mut |row, n| {
                        rows[row] += n;
                        Continue(())
                    });
                counted.expect("nobody breaks it off");
            }
        }
        rows
    }

    /// Whether there is one, of the block mask that holds this; only the partial tiles before the first
    /// one are evaluated.
    pub(crate) fn any(&self, tiles: &BlockMask) -> bool {
        match self {
            _ if tiles.entries_of(Kind::Full) > 0 => true,
            Self::Known(points) => *points > 0,
            Self::Counted { of, transposed } => match of.points.get() {
                Some(points) => *points > 0,
                None => {
                    let first = &mut |_, n| if n > 0 { Break(()) } else { Continue(()) };
                    of.count_partial(tiles, *transposed, &mut |_| Continue(()), first).is_none()
                }
            },
        }
    }

    /// Their number, of the block mask that holds this; `None` when `watch` breaks it off.
    pub(crate) fn points(&self, tiles: &BlockMask, watch: Watch<'_>) -> Option<u64> {
        match self {
            Self::Known(points) => Some(*points),
            Self::Counted { of, transposed } => {
                if let Some(points) = of.points.get() {
                    return Some(*points);
                }
                let mut points = tiles.entries_of(Kind::Full);
                of.count_partial(tiles, *transposed, watch, &mut |_, n| {
                    points += n;
                    Continue(())
                })?;
                Some(*of.points.get_or_init(|| points))
            }
        }
    }
}

impl Counted {
    /// Tells `each` the row and the points of every partial tile, until it or `watch` breaks it off.
    fn count_partial(
        &self,
        tiles: &BlockMask,
        transposed: bool,
        watch: Watch<'_>,
        each: &mut dyn FnMut(usize, u64) -> ControlFlow<()>,
    ) -> Option<()> {
        let partial = |row: usize| tiles.row(row).iter().filter(|r| r.kind == Kind::Partial);
        let [mut q, mut kv] = [tiles.tile.q, tiles.tile.kv].map(|side| side as usize);
        if transposed {
            (q, kv) = (kv, q);
        }
        let compiled = TileProgram::compile(self.mask.program());
        let [rows, columns] = [tiles.q_len, tiles.kv_len];
        let [rows, columns] = if transposed { [columns, rows] } else { [rows, columns] };
        let machine = compiled.machine(rows.clamp(1, q), columns.clamp(1, kv));
        let (mut machine, mut bits) = (machine, MaskBits::default());
        machine.set_head(self.head);
        let (mut done, all, bytes) = (0, tiles.tiles_of(Kind::Partial), tiles.bytes());
        // So that the watch hears of it every few milliseconds.
        let step = (STEP_POINTS / (q as u64 * kv as u64).max(1)).max(1);
        for row in 0..tiles.rows() {
            for column in partial(row).flat_map(|run| run.tiles()) {
                let (mut q, mut kv) = tiles.spans(row, column);
                if transposed {
                    (q, kv) = (kv, q);
                }
                let positions = |span: Range<usize>| span.start as i32..span.end as i32;
                machine.set_tile(positions(q), positions(kv));
                machine.mask_bits(None, &mut bits);
                if each(row, bits.count()).is_break() {
                    return None;
                }
                done += 1;
                let progress = Progress { done, all, base_bytes: bytes, bytes };
                if done % step == 0 && watch(progress).is_break() {
                    return None;
                }
            }
        }
        Some(())
    }
}
