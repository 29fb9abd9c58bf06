//! The masks of a model over one row of tokens: which keys a tile of queries needs, and how much work
//! it is.

use std::borrow::Cow;
use std::ops::Range;

use foveate::mask::{BlockMask, Tile, Varies};
use foveate::mods::{Head, MaskMod};

use crate::error::{ShardError, refused};
use crate::ranges::Ranges;

/// Sizes of the whole attention problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Whole {
    /// Batch entries.
    pub batch: usize,
    /// Query heads; a multiple of `kv_heads`.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Queries of a row.
    pub q_len: usize,
    /// Keys of a row.
    pub kv_len: usize,
}

/// A mask and how many layers have it.
#[derive(Clone, Debug)]
pub struct LayerMask {
    /// The mask in global coordinates; `None` is every key.
    pub mask: Option<MaskMod>,
    /// Number of layers.
    pub layers: u64,
}

/// The block mask of some batch entries and heads of some layers.
#[derive(Clone, Debug)]
pub struct LayerBlockMask {
    /// Index of the layers' mask in what the planes were made of.
    pub mask: usize,
    /// The one batch entry that it is of; `None` for all.
    pub b: Option<usize>,
    /// The one query head that it is of; `None` for all.
    pub h: Option<usize>,
    /// Its live tiles.
    pub tiles: BlockMask,
    /// Number of layers.
    pub layers: u64,
    /// Live entries of each of its rows of tiles.
    pub live: Vec<u64>,
}

impl LayerBlockMask {
    fn new(mask: usize, layers: u64, [b, h]: [Option<usize>; 2], tiles: BlockMask) -> Self {
        let live = tiles.live_by_row();
        Self { mask, b, h, tiles, layers, live }
    }

    /// How many of some batch entries and heads it is of.
    pub(crate) fn pairs(&self, batch: &Range<usize>, heads: &Range<usize>) -> u64 {
        let of = |one: Option<usize>, all: &Range<usize>| match one {
            None => all.len(),
            Some(one) => usize::from(all.contains(&one)),
        };
        (of(self.b, batch) * of(self.h, heads)) as u64
    }
}

/// The block masks of all layers over one plane of queries and keys.
#[derive(Clone, Debug)]
pub struct Planes {
    whole: Whole,
    tile: Tile,
    masks: Vec<Option<MaskMod>>,
    block_masks: Vec<LayerBlockMask>,
    /// By row of tiles.
    work: Vec<u64>,
    needs: Vec<Ranges>,
}

/// Rows of tiles of the block masks of a mask, of which there is one for each batch entry and head that it tells
/// apart: 4,096 of a million tokens.
const MOST_ROWS: usize = 1 << 25;

impl Planes {
    /// The block masks of `layers` in tiles of `tile`. A mask that reads `b` or `h` has one for each
    /// batch entry or head.
    ///
    /// # Errors
    /// When there is no layer, a length exceeds `i32::MAX`, heads do not fit key/value heads, a mask
    /// reads a captured buffer outside its axis or in device memory, or tells so many batch entries and heads
    /// apart that their block masks have more than 33,554,432 rows of tiles.
    pub fn new(whole: Whole, layers: &[LayerMask], tile: Tile) -> Result<Self, ShardError> {
        let Whole { batch, heads, kv_heads, q_len, kv_len } = whole;
        if layers.is_empty() {
            return refused("no layer has a mask; give the mask of one at least");
        }
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return refused(format!("{heads} query heads cannot share {kv_heads} key/value heads"));
        }
        if tile.q == 0 || tile.kv == 0 {
            return refused("a tile has a query and a key at least");
        }
        let [q_len_i32, kv_len_i32] = [q_len, kv_len].map(i32::try_from);
        let (Ok(q_len_i32), Ok(kv_len_i32)) = (q_len_i32, kv_len_i32) else {
            return refused(format!(
                "{q_len} queries and {kv_len} keys; masks count to {}",
                i32::MAX
            ));
        };
        let rows = q_len.div_ceil(tile.q as usize);
        let mut block_masks = Vec::new();
        for (index, LayerMask { mask, layers }) in layers.iter().enumerate() {
            let Some(mask) = mask else {
                let tiles = BlockMask::full(q_len, kv_len, tile);
                block_masks.push(LayerBlockMask::new(index, *layers, [None, None], tiles));
                continue;
            };
            mask.check().map_err(|e| ShardError::new(e.to_string()))?;
            for buffer in mask.program().graph().buffers() {
                if buffer.is_on_device() {
                    let name = buffer.name();
                    return refused(format!(
                        "the mask reads `{name}` in device memory, and plans are made on the host; \
                         give it in host memory"
                    ));
                }
            }
            let varies = Varies::of(mask);
            let each = |varies: bool, n: usize| match varies {
                true => (0..n).map(Some).collect(),
                false => vec![None],
            };
            let (entries, of_heads) = (each(varies.by_batch, batch), each(varies.by_head, heads));
            let all = entries.len().saturating_mul(of_heads.len()).saturating_mul(rows);
            if all > MOST_ROWS {
                return refused(format!(
                    "a mask differs between {} batch entries and {} heads, whose block masks have {all} rows of \
                     {} queries where {MOST_ROWS} are allowed; plan for a smaller batch",
                    entries.len(),
                    of_heads.len(),
                    tile.q
                ));
            }
            for &b in &entries {
                for &h in &of_heads {
                    let own = h.unwrap_or(0);
                    let head = Head {
                        b: b.unwrap_or(0) as i32,
                        h: own as i32,
                        h_kv: (own / (heads / kv_heads)) as i32,
                        q_len: q_len_i32,
                        kv_len: kv_len_i32,
                    };
                    let tiles = BlockMask::build(mask, head, q_len, kv_len, tile);
                    if let Some(read) = tiles.out_of_range() {
                        return refused(read.to_string());
                    }
                    block_masks.push(LayerBlockMask::new(index, *layers, [b, h], tiles));
                }
            }
        }
        let mut work = vec![0; rows];
        for block_mask in &block_masks {
            let times = block_mask.layers * block_mask.pairs(&(0..batch), &(0..heads));
            for (sum, live) in work.iter_mut().zip(&block_mask.live) {
                *sum += live * times;
            }
        }
        let keys = |row: usize| {
            let runs =
                block_masks.iter().flat_map(move |block_mask| live_keys(&block_mask.tiles, row));
            Ranges::of(runs)
        };
        let needs = (0..rows).map(keys).collect();
        let masks = layers.iter().map(|l| l.mask.clone()).collect();
        Ok(Self { whole, tile, masks, block_masks, work, needs })
    }

    /// Sizes of the problem.
    pub fn whole(&self) -> &Whole {
        &self.whole
    }

    /// Size of the tiles.
    pub fn tile(&self) -> Tile {
        self.tile
    }

    /// The masks that the planes were made of, in order.
    pub fn masks(&self) -> &[Option<MaskMod>] {
        &self.masks
    }

    /// The block masks.
    pub fn block_masks(&self) -> &[LayerBlockMask] {
        &self.block_masks
    }

    /// Live entries of each row of tiles, over all layers, batch entries and heads.
    pub fn work(&self) -> &[u64] {
        &self.work
    }

    /// Keys in live tiles of each row of tiles, over all layers, batch entries and heads.
    pub fn needs(&self) -> &[Ranges] {
        &self.needs
    }

    /// The block masks of some batch entries and heads.
    pub(crate) fn part(&self, batch: &Range<usize>, heads: &Range<usize>) -> PlanesPart<'_> {
        let of = |index: &usize| self.block_masks[*index].pairs(batch, heads) > 0;
        let which = (0..self.block_masks.len()).filter(of).collect();
        PlanesPart { planes: self, which, batch: batch.clone(), heads: heads.clone() }
    }
}

/// The planes of some batch entries and heads.
#[derive(Clone, Debug)]
pub(crate) struct PlanesPart<'a> {
    pub planes: &'a Planes,
    /// Its block masks: parts that have the same ones need the same keys.
    pub which: Vec<usize>,
    batch: Range<usize>,
    heads: Range<usize>,
}

impl PlanesPart<'_> {
    fn block_masks(&self) -> impl Iterator<Item = &LayerBlockMask> {
        self.which.iter().map(|&index| &self.planes.block_masks[index])
    }

    /// Live entries of some rows of tiles, over all layers.
    pub fn work(&self, rows: Range<usize>) -> u64 {
        let of = |block_mask: &LayerBlockMask| {
            let times = block_mask.layers * block_mask.pairs(&self.batch, &self.heads);
            times * block_mask.live[rows.clone()].iter().sum::<u64>()
        };
        self.block_masks().map(of).sum()
    }

    /// How many heads of keys each position has, over all layers and batch entries.
    pub fn key_heads(&self) -> u64 {
        let Whole { heads, kv_heads, .. } = self.planes.whole;
        let all = self.block_masks().map(|of| of.layers * of.pairs(&self.batch, &self.heads));
        all.sum::<u64>() * kv_heads as u64 / heads.max(1) as u64
    }

    /// Keys in live tiles of a row of tiles.
    fn keys_of_row(&self, row: usize) -> Cow<'_, Ranges> {
        if self.which.len() == self.planes.block_masks.len() {
            return Cow::Borrowed(&self.planes.needs[row]);
        }
        Cow::Owned(Ranges::of(self.block_masks().flat_map(|of| live_keys(&of.tiles, row))))
    }

    /// Keys in live tiles of some rows of tiles.
    pub fn keys(&self, rows: impl Iterator<Item = usize>) -> Ranges {
        // Neighbours mostly need the same: joined by row first, so that sorting is cheap.
        Ranges::of(rows.flat_map(|row| self.keys_of_row(row).as_slice().to_vec()))
    }

    /// The keys that some queries need, of whole tiles.
    pub fn needs_of(&self, q: &Ranges) -> Ranges {
        self.keys(self.rows(q))
    }

    /// Those of some queries that see any of `keys`, in whole tiles.
    pub fn seeing(&self, q: &Ranges, keys: &Ranges) -> Ranges {
        if keys.is_empty() {
            return Ranges::default();
        }
        let side = self.planes.tile.q as usize;
        let sees = |row: &usize| self.keys_of_row(*row).common(keys) > 0;
        let seeing = self.rows(q).filter(sees).map(|row| row * side..(row + 1) * side);
        Ranges::of(seeing).intersection(q)
    }

    /// The rows of tiles that have some queries.
    fn rows(&self, q: &Ranges) -> impl Iterator<Item = usize> {
        let side = self.planes.tile.q as usize;
        q.as_slice().iter().flat_map(move |r| r.start / side..r.end.div_ceil(side))
    }
}

/// The keys of a row's live tiles.
pub(crate) fn live_keys(tiles: &BlockMask, row: usize) -> impl Iterator<Item = Range<usize>> {
    let (side, len) = (tiles.tile().kv as usize, tiles.kv_len());
    let keys = move |run: &foveate::mask::Run| {
        let tiles = run.tiles();
        tiles.start as usize * side..len.min(tiles.end as usize * side)
    };
    tiles.row(row).iter().map(keys)
}
