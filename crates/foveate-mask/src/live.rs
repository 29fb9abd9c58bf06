//! How many points a mask lets through.
//!
//! Exact, and far more work than the tiles themselves: every point of every partial tile is
//! evaluated. So they are counted when somebody asks, once.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use foveate_mods::{Head, MaskBits, MaskMod, TileProgram};

use crate::{BlockMask, Kind};

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

    /// Their number, of the block mask that holds this.
    pub(crate) fn points(&self, tiles: &BlockMask) -> u64 {
        match self {
            Self::Known(points) => *points,
            Self::Counted { of, transposed } => {
                *of.points.get_or_init(|| of.count(tiles, *transposed))
            }
        }
    }
}

impl Counted {
    fn count(&self, tiles: &BlockMask, transposed: bool) -> u64 {
        let partial = |row: usize| tiles.row(row).iter().filter(|r| r.kind == Kind::Partial);
        let [mut q, mut kv] = [tiles.tile.q, tiles.tile.kv].map(|side| side as usize);
        if transposed {
            (q, kv) = (kv, q);
        }
        let compiled = TileProgram::compile(self.mask.program());
        let (mut machine, mut bits) = (compiled.machine(q, kv), MaskBits::default());
        machine.set_head(self.head);
        let mut points = tiles.entries_of(Kind::Full);
        for row in 0..tiles.rows() {
            for column in partial(row).flat_map(|run| run.tiles()) {
                let (mut q, mut kv) = tiles.spans(row, column);
                if transposed {
                    (q, kv) = (kv, q);
                }
                let positions = |span: Range<usize>| span.start as i32..span.end as i32;
                machine.set_tile(positions(q), positions(kv));
                machine.mask_bits(None, &mut bits);
                points += bits.count();
            }
        }
        points
    }
}
