//! Block masks: the live tiles of a mask, as runs per row of tiles.
//!
//! # Should I use this?
//!
//! The crate `foveate` builds block masks where it needs them. Use this one to look at a mask's
//! sparsity, to draw it, or to write a backend.
//!
//! # What it is
//!
//! The plane of queries and keys is cut into tiles. A tile is *empty* (no query in it sees a key
//! in it), *full* (every query sees every key) or *partial*. A [`BlockMask`] keeps, for each row
//! of tiles, the runs of neighbouring full or partial tiles. Usual masks have a few runs a row,
//! so the memory is proportional to the rows, not to the tiles.
//!
//! ```
//! use foveate_mask::{BlockMask, Kind, Tile};
//! use foveate_mods::{Head, MaskMod, expr};
//!
//! let causal = MaskMod::new(expr::q().ge(expr::kv()).dynamic())?;
//! let mask = BlockMask::build(&causal, Head::default(), 300, 300, Tile { q: 128, kv: 128 });
//! let row = mask.row(2);
//! assert_eq!((row[0].first, row[0].count, row[0].kind), (0, 2, Kind::Full));
//! assert_eq!((row[1].first, row[1].count, row[1].kind), (2, 1, Kind::Partial));
//! assert_eq!(mask.stats().live_entries, 300 * 301 / 2);
//! # Ok::<(), foveate_mods::ModError>(())
//! ```
//!
//! # How it is built
//!
//! From the whole plane downwards: [`foveate_mods::Bounds`] proves a rectangle empty or full, or
//! it is halved along its longer side. Single tiles that remain undecided are evaluated, the
//! outermost rows first, so the result is exact. For causal, window, prefix and document masks the work is
//! proportional to the rows of tiles and to the tiles on the masks' edges.
//!
//! A causal mask over 4,194,304 × 4,194,304 positions takes 14 ms and 0.9 MB:
//! `docs/records/2026-11-block-masks.md`, by `foveate bench mask`. What masks cost a call is in the
//! manual, `docs/masks-and-scores.md`.

mod blind;
mod build;
mod lists;
mod live;
pub mod picture;
mod progress;

use std::ops::ControlFlow::{self, Continue};
use std::ops::Range;

pub use blind::sees_nothing;
#[cfg(feature = "counts")]
pub use build::built;
pub use lists::MaskError;
pub use progress::Progress;

use foveate_mods::{Head, Leaf, MaskMod, OutOfRange};
use live::Live;

/// Size of a tile: queries by keys, at least 1 each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Queries.
    pub q: u32,
    /// Keys.
    pub kv: u32,
}

/// What a live tile is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Every query of the tile sees every key of it: the mask need not be evaluated.
    Full,
    /// Some do not.
    Partial,
}

/// Neighbouring live tiles of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Run {
    /// First tile.
    pub first: u32,
    /// Number of tiles, at least 1.
    pub count: u32,
    /// What they are.
    pub kind: Kind,
}

impl Run {
    /// The tiles.
    pub fn tiles(&self) -> Range<u32> {
        self.first..self.first + self.count
    }
}

/// The live tiles of one head: for each row of tiles its runs, from left to right, not touching
/// unless their kinds differ.
#[derive(Clone, Debug)]
pub struct BlockMask {
    q_len: usize,
    kv_len: usize,
    tile: Tile,
    /// `runs[starts[i]..starts[i + 1]]` are those of row `i`.
    starts: Vec<u32>,
    runs: Vec<Run>,
    live: Live,
    out_of_range: Option<OutOfRange>,
}

/// How a call on all heads is cut into tiles, and how much of it is live. Zeros say nothing.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct Tiling {
    /// Queries in a tile, of each of the heads that share it.
    pub tile_q: usize,
    /// Keys in a tile.
    pub tile_kv: usize,
    /// Query heads that share a tile; 1 on the CPU.
    pub tile_heads: usize,
    /// Tiles of all heads, live or not; those that heads share are one.
    pub tiles: usize,
    /// Tiles where every query sees every key.
    pub full_tiles: usize,
    /// Tiles inside which the mask decides.
    pub partial_tiles: usize,
    /// Those of the partial ones in which the mask is read as bits that were made with the lists; it is
    /// evaluated in the others.
    pub bits_tiles: usize,
    /// Pairs of query and key that are computed, of all heads: those in live tiles on a GPU,
    /// those that the mask lets through on the CPU, which leaves out what is dead in a tile.
    pub live_pairs: u64,
    /// Those of them that the mask lets through.
    pub seen_pairs: u64,
    /// Block masks that batch entries and heads share; 0 without a mask.
    pub block_masks: usize,
    /// Runs of live tiles in those block masks.
    pub runs: u64,
    /// Memory of those block masks in bytes, and of mask bits where the forward reads them.
    pub block_mask_bytes: u64,
    /// Share of the pairs of query and key that the mask lets through; of those of the block masks on the CPU.
    pub density: f64,
}

/// Counts over a [`BlockMask`]. All but `live_entries` follow the number of runs; that one is
/// counted point by point, once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Tiles of the plane.
    pub tiles: u64,
    /// Full tiles.
    pub full: u64,
    /// Partial tiles.
    pub partial: u64,
    /// Points where the mask is true.
    pub live_entries: u64,
    /// Points of the plane, queries times keys.
    pub entries: u64,
    /// Runs.
    pub runs: u64,
    /// Memory of the runs, in bytes.
    pub bytes: u64,
}

impl Stats {
    /// Share of the points where the mask is false, between 0 and 1.
    pub fn sparsity(&self) -> f64 {
        if self.entries == 0 { 0.0 } else { 1.0 - self.live_entries as f64 / self.entries as f64 }
    }
}

impl BlockMask {
    /// The live tiles of `mask` for one head, exactly. `q_len` and `kv_len` may be 0 and need
    /// not be multiples of the tile; `head` gives the mask its `b`, `h` and lengths. A mask that
    /// holds an error ([`MaskMod::check`]) is false everywhere.
    ///
    /// Memory and time follow the runs, of which a mask without any pattern in small tiles has as
    /// many as tiles: [`Self::build_watched`] can be broken off.
    ///
    /// # Panics
    /// When a tile has no queries or no keys, a length is over `i32::MAX`, or there are more runs
    /// than `u32::MAX`.
    pub fn build(mask: &MaskMod, head: Head, q_len: usize, kv_len: usize, tile: Tile) -> Self {
        let built = build::build(mask, head, q_len, kv_len, tile, &mut |_| Continue(()));
        built.expect("nobody breaks it off")
    }

    /// [`Self::build`], telling `watch` how far it is: once before anything is taken, then every few
    /// milliseconds. `None` when `watch` breaks it off.
    ///
    /// # Panics
    /// As [`Self::build`].
    pub fn build_watched(
        mask: &MaskMod,
        head: Head,
        q_len: usize,
        kv_len: usize,
        tile: Tile,
        watch: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Option<Self> {
        build::build(mask, head, q_len, kv_len, tile, watch)
    }

    /// Everything live: what no mask is.
    pub fn full(q_len: usize, kv_len: usize, tile: Tile) -> Self {
        let columns = kv_len.div_ceil(tile.kv as usize) as u32;
        let run = Run { first: 0, count: columns, kind: Kind::Full };
        let rows = q_len.div_ceil(tile.q as usize);
        let row = if columns == 0 { vec![] } else { vec![run] };
        let live = Live::Known(q_len as u64 * kv_len as u64);
        Self::from_rows(q_len, kv_len, tile, vec![row; rows], live)
    }

    fn from_rows(q_len: usize, kv_len: usize, tile: Tile, rows: Vec<Vec<Run>>, live: Live) -> Self {
        let mut starts = Vec::with_capacity(rows.len() + 1);
        let mut runs = Vec::with_capacity(rows.iter().map(Vec::len).sum());
        starts.push(0);
        for row in rows {
            runs.extend(row);
            starts.push(u32::try_from(runs.len()).expect("runs are counted in 32 bits"));
        }
        Self { q_len, kv_len, tile, starts, runs, live, out_of_range: None }
    }

    /// An index, outside the axis of its captured buffer, that the mask reads at some position of
    /// the plane. [`Self::build`] finds one whenever there is any, whatever the tile; which of
    /// several depends on the tile. Parts and transposes of a block mask do not know.
    pub fn out_of_range(&self) -> Option<&OutOfRange> {
        self.out_of_range.as_ref()
    }

    /// Number of queries.
    pub fn q_len(&self) -> usize {
        self.q_len
    }

    /// Number of keys.
    pub fn kv_len(&self) -> usize {
        self.kv_len
    }

    /// Size of the tiles.
    pub fn tile(&self) -> Tile {
        self.tile
    }

    /// Number of rows of tiles.
    pub fn rows(&self) -> usize {
        self.starts.len() - 1
    }

    /// Number of columns of tiles.
    pub fn columns(&self) -> usize {
        self.kv_len.div_ceil(self.tile.kv as usize)
    }

    /// The runs of row `row`, from left to right.
    ///
    /// # Panics
    /// When there is no such row.
    pub fn row(&self, row: usize) -> &[Run] {
        &self.runs[self.starts[row] as usize..self.starts[row + 1] as usize]
    }

    /// What tile `(row, column)` is; `None` when it is empty.
    ///
    /// # Panics
    /// When there is no such row.
    pub fn kind(&self, row: usize, column: u32) -> Option<Kind> {
        self.row(row).iter().find(|r| r.tiles().contains(&column)).map(|r| r.kind)
    }

    /// The same tiles with queries and keys exchanged: for each column of tiles the runs of
    /// rows. Work and memory follow the changes from row to row, not the number of tiles.
    pub fn transpose(&self) -> Self {
        let mut columns: Vec<Vec<Run>> = vec![Vec::new(); self.columns()];
        let mut open: Vec<Option<(u32, Kind)>> = vec![None; self.columns()];
        let nothing: &[Run] = &[];
        for row in 0..=self.rows() {
            let before = if row == 0 { nothing } else { self.row(row - 1) };
            let now = if row == self.rows() { nothing } else { self.row(row) };
            changes(before, now, |tiles, kind| {
                for column in tiles {
                    let column = column as usize;
                    if let Some((first, was)) = open[column].take() {
                        let run = Run { first, count: row as u32 - first, kind: was };
                        columns[column].push(run);
                    }
                    open[column] = kind.map(|kind| (row as u32, kind));
                }
            });
        }
        let tile = Tile { q: self.tile.kv, kv: self.tile.q };
        Self::from_rows(self.kv_len, self.q_len, tile, columns, self.live.transpose())
    }

    /// The rows of tiles `rows`, as a block mask of its own over the same keys: what a shard of
    /// the queries needs. `live_entries` counts whole tiles where the original was exact.
    ///
    /// # Errors
    /// When the range runs backwards or reaches past the last row.
    pub fn slice_rows(&self, rows: Range<usize>) -> Result<Self, MaskError> {
        lists::within("rows", &rows, self.rows())?;
        let tile = self.tile.q as usize;
        let q_len = self.q_len.min(rows.end * tile) - self.q_len.min(rows.start * tile);
        let taken: Vec<Vec<Run>> = rows.map(|r| self.row(r).to_vec()).collect();
        Ok(Self::from_rows(q_len, self.kv_len, self.tile, taken, Live::Known(0)).counting_tiles())
    }

    /// The columns of tiles `columns`, as a block mask of its own: what a prefix of a cache of
    /// keys needs. `live_entries` counts whole tiles.
    ///
    /// # Errors
    /// When the range runs backwards or reaches past the last column.
    pub fn slice_columns(&self, columns: Range<usize>) -> Result<Self, MaskError> {
        lists::within("columns", &columns, self.columns())?;
        let tile = self.tile.kv as usize;
        let kv_len = self.kv_len.min(columns.end * tile) - self.kv_len.min(columns.start * tile);
        let (from, to) = (columns.start as u32, columns.end as u32);
        let cut = |run: &Run| {
            let (first, end) = (run.first.max(from), run.tiles().end.min(to));
            (first < end).then(|| Run { first: first - from, count: end - first, ..*run })
        };
        let taken = (0..self.rows()).map(|r| self.row(r).iter().filter_map(cut).collect());
        Ok(Self::from_rows(self.q_len, kv_len, self.tile, taken.collect(), Live::Known(0))
            .counting_tiles())
    }

    /// The same with `live_entries` counting whole tiles.
    fn counting_tiles(mut self) -> Self {
        self.live = Live::Known(self.live_tile_entries());
        self
    }

    /// Points in live tiles: what kernels that skip empty tiles compute.
    pub fn live_tile_entries(&self) -> u64 {
        self.entries_of(Kind::Full) + self.entries_of(Kind::Partial)
    }

    /// Number of tiles of one kind.
    pub fn tiles_of(&self, kind: Kind) -> u64 {
        self.runs.iter().filter(|r| r.kind == kind).map(|r| u64::from(r.count)).sum()
    }

    /// Memory of the runs, in bytes.
    pub fn bytes(&self) -> u64 {
        let (run, start) = (size_of::<Run>(), size_of::<u32>());
        (self.runs.capacity() * run + self.starts.capacity() * start) as u64
    }

    /// Points where the mask is true, by row of tiles, counted exactly from the runs: the entries of
    /// full tiles, and the points of partial ones. Parts and lists count whole tiles, as in
    /// [`Stats`].
    pub fn live_by_row(&self) -> Vec<u64> {
        self.live.by_row(self)
    }

    /// Points in tiles of one kind.
    fn entries_of(&self, kind: Kind) -> u64 {
        (0..self.rows()).map(|row| self.row_entries_of(row, kind)).sum()
    }

    /// Points in tiles of one kind of a row of tiles.
    fn row_entries_of(&self, row: usize, kind: Kind) -> u64 {
        let wide = |run: &Run| {
            let (q, first) = self.spans(row, run.first);
            let (_, last) = self.spans(row, run.tiles().end - 1);
            q.len() as u64 * (last.end - first.start) as u64
        };
        self.row(row).iter().filter(|run| run.kind == kind).map(wide).sum()
    }

    /// Queries and keys of a tile.
    fn spans(&self, row: usize, column: u32) -> (Range<usize>, Range<usize>) {
        let span = |index: usize, side: u32, len: usize| {
            let side = side as usize;
            index * side..len.min((index + 1) * side)
        };
        (span(row, self.tile.q, self.q_len), span(column as usize, self.tile.kv, self.kv_len))
    }

    /// Whether no query sees any key, although there are some of both. Evaluates partial tiles up to
    /// the first live point.
    pub fn sees_nothing(&self) -> bool {
        self.q_len > 0 && self.kv_len > 0 && !self.live.any(self)
    }

    /// Counts. Evaluates every point of every partial tile when asked first: see [`Stats`].
    pub fn stats(&self) -> Stats {
        self.stats_watched(&mut |_| Continue(())).expect("nobody breaks it off")
    }

    /// [`Self::stats`], telling `watch` how far the counting is. `None` when `watch` breaks it off.
    pub fn stats_watched(
        &self,
        watch: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Option<Stats> {
        Some(Stats {
            tiles: self.rows() as u64 * self.columns() as u64,
            full: self.tiles_of(Kind::Full),
            partial: self.tiles_of(Kind::Partial),
            live_entries: self.live.points(self, watch)?,
            entries: self.q_len as u64 * self.kv_len as u64,
            runs: self.runs.len() as u64,
            bytes: self.bytes(),
        })
    }
}

/// Two are equal when they have the same tiles over the same plane, and as many points.
impl PartialEq for BlockMask {
    fn eq(&self, other: &Self) -> bool {
        let sizes = |m: &Self| (m.q_len, m.kv_len, m.tile);
        sizes(self) == sizes(other)
            && self.starts == other.starts
            && self.runs == other.runs
            && self.out_of_range == other.out_of_range
            && self.stats().live_entries == other.stats().live_entries
    }
}

impl Eq for BlockMask {}

/// Calls `f` for each stretch of tiles whose kind differs between two rows, with its new kind.
fn changes(before: &[Run], now: &[Run], mut f: impl FnMut(Range<u32>, Option<Kind>)) {
    let mut edges: Vec<u32> =
        before.iter().chain(now).flat_map(|r| [r.first, r.tiles().end]).collect();
    edges.sort_unstable();
    edges.dedup();
    let (mut i, mut j) = (0, 0);
    for edge in edges.windows(2) {
        let at = edge[0];
        let find = |runs: &[Run], i: &mut usize| {
            while *i < runs.len() && runs[*i].tiles().end <= at {
                *i += 1;
            }
            runs.get(*i).filter(|r| r.first <= at).map(|r| r.kind)
        };
        let (was, is) = (find(before, &mut i), find(now, &mut j));
        if was != is {
            f(edge[0]..edge[1], is);
        }
    }
}

/// Whether a mask differs between batch entries and between heads. Callers build one block mask
/// for each distinct combination only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Varies {
    /// It reads `b`.
    pub by_batch: bool,
    /// It reads `h` or `h_kv`.
    pub by_head: bool,
}

impl Varies {
    /// What `mask` depends on.
    pub fn of(mask: &MaskMod) -> Self {
        let leaves = mask.program().roots_depend();
        Self {
            by_batch: leaves.contains(Leaf::B),
            by_head: leaves.contains(Leaf::H) || leaves.contains(Leaf::HKv),
        }
    }
}
