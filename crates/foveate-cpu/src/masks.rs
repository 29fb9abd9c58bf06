//! The live tiles of each head.
//!
//! Block masks are built at first use, one for each class of heads that the mask cannot tell
//! apart: the lengths, and `b` and `h` if it reads them. A plan keeps them for later calls; a
//! plan with another binding of something the mask reads starts without any.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use foveate_mask::{BlockMask, Kind, Run, Tile, Varies};
use foveate_mods::Head;
use foveate_mods::{MaskMod, OutOfRange};

use crate::threads;

/// Rows of tiles that a cache keeps; one that would hold more is emptied first.
const CACHED_ROWS: usize = 1 << 20;

/// The live tiles of a head.
#[derive(Clone, Debug)]
pub enum Live {
    /// So many columns of tiles, all of them full.
    All(usize),
    /// The live tiles of a block mask.
    Some(Arc<BlockMask>),
}

impl Live {
    /// The runs of a row: their tiles, and whether these are partial.
    fn runs(&self, row: usize) -> impl Iterator<Item = (Range<usize>, bool)> + '_ {
        let (all, runs) = match self {
            Live::All(tiles) => (Some((0..*tiles, false)), &[][..]),
            Live::Some(mask) => (None, mask.row(row)),
        };
        let of_run = |r: &Run| {
            let tiles = r.tiles();
            (tiles.start as usize..tiles.end as usize, r.kind == Kind::Partial)
        };
        all.into_iter().chain(runs.iter().map(of_run))
    }

    /// An index out of range that the mask reads somewhere.
    pub fn out_of_range(&self) -> Option<&OutOfRange> {
        match self {
            Live::All(_) => None,
            Live::Some(mask) => mask.out_of_range(),
        }
    }

    /// Numbers of full and of partial tiles of a row.
    pub fn kinds(&self, row: usize) -> [usize; 2] {
        self.runs(row).fold([0, 0], |mut sum, (run, partial)| {
            sum[usize::from(partial)] += run.len();
            sum
        })
    }

    /// Number of live tiles of a row inside `range`.
    pub fn count(&self, row: usize, range: &Range<usize>) -> usize {
        self.runs(row).map(|(run, _)| clip(&run, range).len()).sum()
    }

    /// The live tiles of a row inside `range`, left to right, and whether each is partial.
    pub fn tiles(
        &self,
        row: usize,
        range: &Range<usize>,
    ) -> impl Iterator<Item = (usize, bool)> + '_ {
        let range = range.clone();
        self.runs(row).flat_map(move |(run, partial)| clip(&run, &range).map(move |t| (t, partial)))
    }
}

fn clip(run: &Range<usize>, range: &Range<usize>) -> Range<usize> {
    let start = run.start.max(range.start);
    start..run.end.min(range.end).max(start)
}

/// The parameters of a block mask, besides the mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Class {
    q_len: i32,
    kv_len: i32,
    tile_q: usize,
    tile_kv: usize,
    b: Option<i32>,
    h: Option<i32>,
}

/// The block masks of a plan.
#[derive(Debug, Default)]
pub struct MaskCache(Mutex<HashMap<Class, Arc<BlockMask>>>);

impl MaskCache {
    /// The live tiles of each of `heads`, in order, for tiles of `q × kv`.
    pub fn live(&self, mask: &MaskMod, heads: &[Head], [q, kv]: [usize; 2]) -> Vec<Live> {
        let varies = Varies::of(mask);
        let class = |head: &Head| Class {
            q_len: head.q_len,
            kv_len: head.kv_len,
            tile_q: q,
            tile_kv: kv,
            b: varies.by_batch.then_some(head.b),
            h: varies.by_head.then_some(head.h),
        };
        let distinct: HashMap<Class, Head> = heads.iter().map(|h| (class(h), *h)).collect();
        let cached = self.cached().clone();
        let tile = Tile { q: q as u32, kv: kv as u32 };
        let masks =
            threads::each(distinct.into_iter().collect(), |(class, head): (Class, Head)| {
                let (q_len, kv_len) = (head.q_len as usize, head.kv_len as usize);
                let build = || Arc::new(BlockMask::build(mask, head, q_len, kv_len, tile));
                (class, cached.get(&class).cloned().unwrap_or_else(build))
            });
        let masks: HashMap<Class, Arc<BlockMask>> = masks.into_iter().collect();
        self.keep(&masks);
        heads.iter().map(|head| Live::Some(masks[&class(head)].clone())).collect()
    }

    fn keep(&self, masks: &HashMap<Class, Arc<BlockMask>>) {
        let mut cached = self.cached();
        let new = masks.keys().filter(|c| !cached.contains_key(c));
        if new.chain(cached.keys()).map(Class::rows).sum::<usize>() > CACHED_ROWS {
            cached.clear();
        }
        cached.extend(masks.iter().map(|(class, mask)| (*class, mask.clone())));
    }

    /// The addresses of the block masks that are kept, in order.
    #[cfg(test)]
    pub fn addresses(&self) -> Vec<usize> {
        let mut all: Vec<_> =
            self.cached().values().map(|mask| Arc::as_ptr(mask) as usize).collect();
        all.sort_unstable();
        all
    }

    fn cached(&self) -> MutexGuard<'_, HashMap<Class, Arc<BlockMask>>> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl Class {
    fn rows(&self) -> usize {
        (self.q_len as usize).div_ceil(self.tile_q)
    }
}
