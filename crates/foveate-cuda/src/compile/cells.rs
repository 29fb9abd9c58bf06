//! The cells of a tile, and the runs of tiles that have them.

use foveate_mask::{Kind, Run as MaskRun};

use super::params::Run;

/// How many strips of queries a tile of queries by keys is cut into, each a cell that lists tell apart: a kernel
/// passes over cells that hold no visible pair, and evaluates no mask in those that hold no other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cells(pub usize);

impl Cells {
    /// A tile of one cell.
    pub const WHOLE: Self = Self(1);

    /// Bits of [`Run::count_kind`] below the number of tiles. For a tile of one cell: whether the
    /// mask is evaluated. Else for each strip, the first in the lowest bits: whether it is live, and whether
    /// the mask is evaluated in it.
    pub fn kind_bits(self) -> usize {
        if self == Self::WHOLE { 1 } else { 2 * self.0 }
    }

    /// The live cells of a run's tiles, and of each whether the mask is evaluated in it.
    pub(crate) fn live(self, count_kind: i32) -> impl Iterator<Item = (usize, bool)> {
        let kind = if self == Self::WHOLE { (count_kind & 1) << 1 | 1 } else { count_kind };
        let bits = (0..self.0).map(move |cell| (cell, kind >> (2 * cell)));
        bits.filter(|(_, kind)| kind & 1 == 1).map(|(cell, kind)| (cell, kind & 2 == 2))
    }

    /// Bytes of dynamic shared memory of the kernel that builds block lists, for rows of at most
    /// `tiles` tiles: three bits a cell.
    pub fn list_bytes(self, tiles: usize) -> usize {
        self.0 * tiles.div_ceil(32) * 12
    }

    /// The runs of a row of `columns` tiles from those of its strips; one that is not there sees
    /// nothing.
    pub(crate) fn runs(self, strips: &[&[MaskRun]], columns: usize) -> Vec<Run> {
        let mut kinds = vec![0; columns];
        for (strip, runs) in strips.iter().enumerate() {
            for run in *runs {
                let partial = i32::from(run.kind == Kind::Partial);
                for kind in &mut kinds[run.tiles().start as usize..run.tiles().end as usize] {
                    *kind |= (partial << 1 | 1) << (2 * strip);
                }
            }
        }
        let bits = self.kind_bits();
        let mut runs: Vec<Run> = Vec::new();
        let mut open = 0;
        for (tile, found) in kinds.into_iter().enumerate() {
            if found != 0 && found == open {
                runs.last_mut().expect("it is open").count_kind += 1 << bits;
            } else if found != 0 {
                let kind = if self == Self::WHOLE { found >> 1 } else { found };
                runs.push(Run { first: tile as i32, count_kind: 1 << bits | kind });
            }
            open = found;
        }
        runs
    }
}
