//! What a launch works on: sequences, tiles in the order they are begun, and for each tile the
//! runs of live tiles on the other axis.
//!
//! It depends on lengths and on the mask, not on operands, so a plan keeps it from call to call.
//! Sequences that the mask cannot tell apart (equal lengths, and equal `b` if it reads `b`) share
//! their lists; heads share them unless the mask reads the head. Tiles with the most work come
//! first: the CTAs of a launch are started in order, so the short ones fill the gaps at the end.

use std::collections::HashMap;

use foveate_mask::{BlockMask, Tile as MaskTile, Varies};
use foveate_mods::{Head, MaskMod};
use foveate_problem::{Dims, Sequence};

use crate::compile::cells::Cells;
use crate::compile::config::Config;
use crate::compile::params;

/// The axis that CTAs divide between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Axis {
    /// A CTA owns queries, and its main loop runs over the keys.
    Queries,
    /// A CTA owns keys, and its main loop runs over the queries.
    Keys,
}

/// Queries and keys of a tile, and what lists tell apart in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TileSize {
    /// Queries.
    pub q: usize,
    /// Keys.
    pub kv: usize,
    /// Its cells. Only tiles of [`Axis::Queries`] have several.
    pub cells: Cells,
}

impl TileSize {
    /// A tile of one cell.
    pub const fn whole(q: usize, kv: usize) -> Self {
        Self { q, kv, cells: Cells::WHOLE }
    }

    /// The tiles of a kernel.
    pub(crate) fn of(config: &Config) -> Self {
        Self { q: config.queries(), kv: config.tile_kv, cells: config.cells() }
    }
}

/// The work of one kernel, on the host.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// Every sequence, in order.
    pub sequences: Vec<params::Sequence>,
    /// Every tile of the axis, the heaviest first.
    pub tiles: Vec<params::Tile>,
    /// The runs of every row, when there is a mask.
    pub lists: Option<Lists>,
    /// Rows of `dq_accum` for a head.
    pub sum_rows: usize,
    /// Sequences from a tile's own on that read the same keys.
    pub sharing: usize,
    /// Tiles of the longest row.
    pub longest: usize,
    /// Pairs of a query and a key in live tiles, of all heads.
    pub live_pairs: u64,
    /// Those of them that the mask lets through.
    pub seen_pairs: u64,
    /// An index outside the axis of its captured buffer that the mask reads.
    pub out_of_range: Option<String>,
}

/// Runs by row, padded to the longest row.
#[derive(Clone, Debug, PartialEq)]
pub struct Lists {
    /// Number of runs of each row.
    pub counts: Vec<i32>,
    /// `[rows, capacity]`.
    pub runs: Vec<params::Run>,
    /// Most runs of a row.
    pub capacity: usize,
    /// Rows between two heads, 0 when all heads share them.
    pub head_stride: usize,
}

impl Axis {
    fn tiles(self, s: &Sequence, size: TileSize) -> usize {
        match self {
            Self::Queries => s.q_len.div_ceil(size.q),
            Self::Keys => s.k_len.div_ceil(size.kv),
        }
    }

    /// Tiles of the other axis in the longest sequence.
    fn longest(self, sequences: &[Sequence], size: TileSize) -> usize {
        let other = if self == Self::Queries { Self::Keys } else { Self::Queries };
        sequences.iter().map(|s| other.tiles(s, size)).max().unwrap_or(0)
    }
}

impl Schedule {
    /// The work of `sequences`, whose tiles of `axis` are owned by CTAs. With keys that the
    /// whole batch shares, the tiles of [`Axis::Keys`] are those of the first sequence alone.
    pub fn new(
        dims: &Dims,
        sequences: &[Sequence],
        mask: Option<&MaskMod>,
        axis: Axis,
        size: TileSize,
    ) -> Self {
        let masks = mask.map(|mask| Masks::new(dims, sequences, mask, axis, size));
        let first_row = |i: usize| masks.as_ref().map_or(0, |m| m.classes.first_row[i]);
        let sharing = sharing(dims, sequences, axis);
        let mut tiles = Vec::new();
        let mut live_pairs = 0;
        for (i, s) in sequences.iter().enumerate() {
            for tile in 0..axis.tiles(s, size) {
                let work = match &masks {
                    Some(masks) => masks.work(i, tile),
                    None => dims.heads_q as u64 * whole(s, axis, tile, size),
                };
                live_pairs += work;
                if i % sharing == 0 {
                    tiles.push((work, i, tile));
                }
            }
        }
        match axis {
            // A mask like causal gives the last of them the most work.
            Axis::Queries => tiles.reverse(),
            // Those of a sequence stay in order, in which they may have to add dq: each counts for as much
            // as the heaviest that is left.
            Axis::Keys => {
                let mut left = (usize::MAX, 0);
                for (work, sequence, _) in tiles.iter_mut().rev() {
                    let heaviest = if left.0 == *sequence { left.1 } else { 0 };
                    *work = heaviest.max(*work);
                    left = (*sequence, *work);
                }
            }
        }
        tiles.sort_by_key(|&(work, ..)| std::cmp::Reverse(work));
        Self {
            sequences: place(sequences, first_row),
            tiles: tiles.iter().map(|&(_, sequence, tile)| tile_of(sequence, tile)).collect(),
            sum_rows: sum_rows(sequences),
            sharing,
            longest: axis.longest(sequences, size),
            live_pairs,
            seen_pairs: masks.as_ref().map_or(live_pairs, |m| m.seen_pairs),
            out_of_range: masks.as_ref().and_then(|m| m.out_of_range.clone()),
            lists: masks.map(|m| m.lists),
        }
    }
}

/// A schedule whose lists are still to be made: by the device, from the mask.
#[derive(Clone, Debug, PartialEq)]
pub struct Outline {
    /// Every sequence, in order.
    pub sequences: Vec<params::Sequence>,
    /// Every tile of the axis. How much is live is not known yet, so the order is a guess: half way
    /// between a causal mask and none.
    pub tiles: Vec<params::Tile>,
    /// One tile for each row of the lists of a head.
    pub rows: Vec<params::Tile>,
    /// Heads that have lists of their own; 1 when all share them.
    pub heads: usize,
    /// Rows between two heads, 0 when all heads share them.
    pub head_stride: usize,
    /// Runs that a row has memory for. Where there are more, the device joins the closest.
    pub capacity: usize,
    /// Tiles of the longest row.
    pub longest: usize,
    /// Rows of `dq_accum` for a head.
    pub sum_rows: usize,
    /// Sequences from a tile's own on that read the same keys.
    pub sharing: usize,
}

/// Bytes that the runs of all rows may take before rows get memory for fewer.
const RUN_BYTES: usize = 64 << 20;

impl Outline {
    /// The work of `sequences` under `mask`; see [`Schedule::new`].
    pub fn new(
        dims: &Dims,
        sequences: &[Sequence],
        mask: &MaskMod,
        axis: Axis,
        size: TileSize,
    ) -> Self {
        let classes = Classes::new(sequences, mask, axis, size);
        let heads = if classes.varies.by_head { dims.heads_q } else { 1 };
        let sharing = sharing(dims, sequences, axis);
        let owned = sequences.iter().enumerate().filter(|(i, _)| i % sharing == 0);
        let mut tiles: Vec<(usize, usize)> =
            owned.flat_map(|(i, s)| (0..axis.tiles(s, size)).map(move |tile| (i, tile))).collect();
        tiles.sort_by_key(|&(i, tile)| {
            let s = &sequences[i];
            std::cmp::Reverse(match axis {
                Axis::Queries => s.k_len + s.k_len.min((tile + 1) * size.q),
                Axis::Keys => s.q_len + s.q_len.saturating_sub(tile * size.kv),
            })
        });
        let rows = classes
            .members
            .iter()
            .flat_map(|&i| (0..axis.tiles(&sequences[i], size)).map(move |tile| tile_of(i, tile)));
        let longest = axis.longest(sequences, size);
        Self {
            sequences: place(sequences, |i| classes.first_row[i]),
            tiles: tiles.iter().map(|&(sequence, tile)| tile_of(sequence, tile)).collect(),
            rows: rows.collect(),
            heads,
            head_stride: if classes.varies.by_head { classes.rows } else { 0 },
            capacity: run_capacity(longest, classes.rows * heads),
            longest,
            sum_rows: sum_rows(sequences),
            sharing,
        }
    }
}

/// Runs that there is memory for in each of `rows` rows of at most `longest` tiles.
pub(crate) fn run_capacity(longest: usize, rows: usize) -> usize {
    let capacity = RUN_BYTES / size_of::<params::Run>() / rows.max(1);
    longest.min(capacity.clamp(8, 256)).max(1)
}

/// Bytes that the mask bits of all rows may take: a row of 8,192 queries that is partial everywhere takes 8 MiB, and
/// memory that estimates leave free is not taken.
const MASK_BYTES: usize = 16 << 20;

/// Bytes of the mask bits of a tile, whole words of each of the threads that own its side on `axis`, and how many
/// tiles there is memory for in each of `rows` rows of at most `longest`.
pub(crate) fn mask_slots(
    axis: Axis,
    tile: TileSize,
    longest: usize,
    rows: usize,
) -> (usize, usize) {
    let (own, across) = match axis {
        Axis::Queries => (tile.q, tile.kv),
        Axis::Keys => (tile.kv, tile.q),
    };
    let tile_bytes = own / 16 * 32 * across.div_ceil(64) * 4;
    (tile_bytes, longest.min(MASK_BYTES / tile_bytes / rows.max(1)))
}

/// Tiles of `side` rows that `count` sequences of together `rows` rows have at most, none longer than
/// `longest`.
pub(crate) fn most_tiles(count: usize, rows: usize, longest: usize, side: usize) -> usize {
    count.saturating_mul(longest.div_ceil(side)).min(rows / side + count)
}

/// Rows of `dq_accum` that such sequences take at most, each where `kernels/sequences.cu` puts it.
pub(crate) fn most_sum_rows(count: usize, rows: usize) -> usize {
    (rows / 16 * 16).saturating_add(count.saturating_mul(16))
}

/// Sequences from a tile's own on that read the same keys.
fn sharing(dims: &Dims, sequences: &[Sequence], axis: Axis) -> usize {
    match axis == Axis::Keys && dims.shared_kv {
        true => sequences.len().max(1),
        false => 1,
    }
}

/// Rows of `dq_accum` for a head.
fn sum_rows(sequences: &[Sequence]) -> usize {
    sequences.iter().map(|s| s.q_len.next_multiple_of(16)).sum()
}

fn tile_of(sequence: usize, tile: usize) -> params::Tile {
    params::Tile { sequence: sequence as i32, tile: tile as i32 }
}

/// The sequences as kernels take them.
fn place(sequences: &[Sequence], first_row: impl Fn(usize) -> usize) -> Vec<params::Sequence> {
    let number = |n: usize| i32::try_from(n).expect("lengths and rows fit i32");
    let mut sum_row = 0;
    let mut placed = Vec::with_capacity(sequences.len());
    for (i, s) in sequences.iter().enumerate() {
        placed.push(params::Sequence {
            b: number(s.b),
            q_batch: number(s.q_batch),
            k_batch: number(s.k_batch),
            q_start: number(s.q_start),
            q_len: number(s.q_len),
            k_start: number(s.k_start),
            k_len: number(s.k_len),
            first_row: number(first_row(i)),
            sum_row: number(sum_row),
        });
        sum_row += s.q_len.next_multiple_of(16);
    }
    placed
}

/// Sequences that a mask cannot tell apart share their rows.
struct Classes {
    varies: Varies,
    /// First row of each sequence.
    first_row: Vec<usize>,
    /// The first sequence of each class.
    members: Vec<usize>,
    /// How many sequences each class has.
    sizes: Vec<usize>,
    /// Rows of a head.
    rows: usize,
}

impl Classes {
    fn new(sequences: &[Sequence], mask: &MaskMod, axis: Axis, size: TileSize) -> Self {
        let varies = Varies::of(mask);
        let mut rows = 0;
        let mut classes: HashMap<(Option<usize>, usize, usize), [usize; 2]> = HashMap::new();
        let (mut members, mut sizes) = (Vec::new(), Vec::new());
        let first_row = sequences.iter().enumerate().map(|(i, s)| {
            let class = (varies.by_batch.then_some(s.b), s.q_len, s.k_len);
            let [first_row, class] = *classes.entry(class).or_insert_with(|| {
                members.push(i);
                sizes.push(0);
                rows += axis.tiles(s, size);
                [rows - axis.tiles(s, size), members.len() - 1]
            });
            sizes[class] += 1;
            first_row
        });
        let first_row = first_row.collect();
        Self { varies, first_row, members, sizes, rows }
    }
}

/// Pairs of a query and a key of one owned tile without a mask.
fn whole(s: &Sequence, axis: Axis, tile: usize, size: TileSize) -> u64 {
    let part = |len: usize, step: usize| len.min((tile + 1) * step) - tile * step;
    let pairs = match axis {
        Axis::Queries => part(s.q_len, size.q) * s.k_len,
        Axis::Keys => part(s.k_len, size.kv) * s.q_len,
    };
    pairs as u64
}

/// The lists of all classes of heads, one class after the other.
struct Masks {
    lists: Lists,
    classes: Classes,
    /// Live pairs of each row.
    work: Vec<u64>,
    /// Pairs that the mask lets through, of all heads and sequences.
    seen_pairs: u64,
    /// Heads that a row stands for, and rows between heads.
    heads: usize,
    out_of_range: Option<String>,
}

impl Masks {
    fn new(
        dims: &Dims,
        sequences: &[Sequence],
        mask: &MaskMod,
        axis: Axis,
        size: TileSize,
    ) -> Self {
        let classes = Classes::new(sequences, mask, axis, size);
        let (by_head, rows) = (classes.varies.by_head, classes.rows);
        let heads = if by_head { dims.heads_q } else { 1 };
        let mut masks = Vec::with_capacity(heads * classes.members.len());
        let Cells(strips) = size.cells;
        let tile = MaskTile { q: (size.q / strips) as u32, kv: size.kv as u32 };
        for h in 0..heads {
            for s in classes.members.iter().map(|&i| &sequences[i]) {
                let head = Head {
                    b: s.b as i32,
                    h: h as i32,
                    h_kv: (h / dims.group()) as i32,
                    q_len: s.q_len as i32,
                    kv_len: s.k_len as i32,
                };
                masks.push(BlockMask::build(mask, head, s.q_len, s.k_len, tile));
            }
        }
        let out_of_range = masks.iter().find_map(BlockMask::out_of_range).map(ToString::to_string);
        if axis == Axis::Keys {
            masks.iter_mut().for_each(|mask| *mask = mask.transpose());
        }
        let (tall, wide) = match axis {
            Axis::Queries => (size.q, size.kv),
            Axis::Keys => (size.kv, size.q),
        };
        let all = masks.iter().flat_map(|mask| {
            let columns = mask.kv_len().div_ceil(wide);
            let rows: Vec<&[_]> = (0..mask.rows()).map(|row| mask.row(row)).collect();
            let runs = |strips: &[&[_]]| size.cells.runs(strips, columns);
            let found: Vec<_> = rows.chunks(strips).map(runs).collect();
            found.into_iter().enumerate().map(move |(row, runs)| (mask, row, runs))
        });
        let all: Vec<_> = all.collect();
        let capacity = all.iter().map(|(.., runs)| runs.len()).max().unwrap_or(0).max(1);
        let mut lists = Lists {
            counts: Vec::with_capacity(rows * heads),
            runs: vec![params::Run::default(); rows * heads * capacity],
            capacity,
            head_stride: if by_head { rows } else { 0 },
        };
        let mut work = Vec::with_capacity(rows * heads);
        for ((mask, row, runs), into) in all.iter().zip(lists.runs.chunks_exact_mut(capacity)) {
            lists.counts.push(runs.len() as i32);
            into[..runs.len()].copy_from_slice(runs);
            let pairs = |run: &params::Run| {
                let (first, count) = (run.first as usize, run.count_kind >> size.cells.kind_bits());
                ((first + count as usize) * wide).min(mask.kv_len()) - first * wide
            };
            let pairs: usize = runs.iter().map(pairs).sum();
            work.push((pairs * (mask.q_len().min((row + 1) * tall) - row * tall)) as u64);
        }
        let each = if by_head { 1 } else { dims.heads_q };
        let sizes = classes.sizes.iter().cycle();
        let seen = masks.iter().zip(sizes).map(|(m, n)| m.stats().live_entries * (n * each) as u64);
        let seen_pairs = seen.sum();
        Self { lists, classes, work, seen_pairs, heads: each, out_of_range }
    }

    /// Live pairs of a tile over all heads.
    fn work(&self, sequence: usize, tile: usize) -> u64 {
        let row = self.classes.first_row[sequence] + tile;
        if self.lists.head_stride == 0 {
            return self.work[row] * self.heads as u64;
        }
        self.work.iter().skip(row).step_by(self.lists.head_stride).sum()
    }
}

#[cfg(test)]
mod tests {
    use foveate_mods::expr::{b, h, kv, q};
    use foveate_tensor::Packing;

    use super::*;

    const SIZE: TileSize = TileSize::whole(16, 32);

    #[test]
    fn mask_bits_take_what_a_row_has_and_never_more_than_their_bytes() {
        let (queries, keys) = (TileSize::whole(128, 128), TileSize::whole(128, 64));
        assert_eq!(mask_slots(Axis::Queries, queries, 64, 64), (2048, 64));
        // Rows of tiles of keys: two words a thread, and one, since queries lie across.
        assert_eq!(mask_slots(Axis::Keys, queries, 64, 64), (2048, 64));
        assert_eq!(mask_slots(Axis::Queries, keys, 64, 64), (1024, 64));
        for rows in [1, 100, 512, 8192, 65_536] {
            let (bytes, slots) = mask_slots(Axis::Queries, queries, 1024, rows);
            assert!(bytes * slots * rows <= MASK_BYTES && slots <= 1024, "{rows}: {slots}");
        }
        assert_eq!(mask_slots(Axis::Queries, queries, 1024, 65_536).1, 0);
    }

    fn dims(batch: usize, heads: [usize; 2], [len_q, len_k]: [usize; 2]) -> Dims {
        Dims {
            batch,
            heads_q: heads[0],
            heads_kv: heads[1],
            len_q,
            len_k,
            dim: 64,
            dim_v: 64,
            shared_kv: false,
            packed: false,
        }
    }

    fn causal() -> MaskMod {
        MaskMod::new(q().ge(kv()).dynamic()).expect("bool")
    }

    /// Whether the lists of `schedule` say that a tile is live, for a head of a sequence.
    fn live(
        schedule: &Schedule,
        axis: Axis,
        sequence: usize,
        head: usize,
        [tq, tk]: [usize; 2],
    ) -> Option<bool> {
        let lists = schedule.lists.as_ref().expect("a mask");
        let (own, other) = if axis == Axis::Queries { (tq, tk) } else { (tk, tq) };
        let first = schedule.sequences[sequence].first_row as usize;
        let row = first + own + head * lists.head_stride;
        let runs = &lists.runs[row * lists.capacity..][..lists.counts[row] as usize];
        let inside =
            |r: &&params::Run| (r.first..r.first + (r.count_kind >> 1)).contains(&(other as i32));
        runs.iter().find(inside).map(|r| r.count_kind & 1 == 1)
    }

    #[test]
    fn lists_of_both_axes_say_of_every_tile_what_the_mask_says_of_its_pairs() {
        let masks = [causal(), MaskMod::new((q() + h() * 7).ge(kv() + b() * 5).dynamic()).unwrap()];
        for mask in &masks {
            for axis in [Axis::Queries, Axis::Keys] {
                let dims = dims(2, [4, 2], [45, 77]);
                let sequences = dims.sequences(None);
                let schedule = Schedule::new(&dims, &sequences, Some(mask), axis, SIZE);
                for (i, s) in sequences.iter().enumerate() {
                    for head in 0..4 {
                        let at = |q: usize, kv: usize| {
                            let shift = if mask == &masks[0] { 0 } else { head * 7 };
                            let right = if mask == &masks[0] { kv } else { kv + s.b * 5 };
                            q + shift >= right
                        };
                        for (tq, tk) in (0..3).flat_map(|tq| (0..3).map(move |tk| (tq, tk))) {
                            let pairs: Vec<bool> = (tq * 16..45.min(tq * 16 + 16))
                                .flat_map(|q| {
                                    (tk * 32..77.min(tk * 32 + 32)).map(move |kv| (q, kv))
                                })
                                .map(|(q, kv)| at(q, kv))
                                .collect();
                            let expected = pairs.contains(&true).then(|| pairs.contains(&false));
                            let found = live(&schedule, axis, i, head, [tq, tk]);
                            assert_eq!(found, expected, "{axis:?} {i} {head} {tq} {tk}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn heads_and_batch_entries_that_a_mask_cannot_tell_apart_share_their_rows() {
        let dims = dims(3, [8, 2], [64, 64]);
        let sequences = dims.sequences(None);
        let rows = |mask: &MaskMod| {
            let found = Schedule::new(&dims, &sequences, Some(mask), Axis::Queries, SIZE);
            let lists = found.lists.expect("a mask");
            (lists.counts.len(), lists.head_stride)
        };
        assert_eq!(rows(&causal()), (4, 0));
        let by_head = MaskMod::new((q() + h()).ge(kv()).dynamic()).unwrap();
        assert_eq!(rows(&by_head), (4 * 8, 4));
        let by_both = MaskMod::new((q() + h()).ge(kv() + b()).dynamic()).unwrap();
        assert_eq!(rows(&by_both), (3 * 4 * 8, 12));
    }

    #[test]
    fn an_outline_has_the_rows_and_places_of_the_schedule() {
        let by_both = MaskMod::new((q() + h()).ge(kv() + b()).dynamic()).unwrap();
        for mask in [causal(), by_both] {
            for axis in [Axis::Queries, Axis::Keys] {
                for shared_kv in [false, true] {
                    let dims = Dims { shared_kv, ..dims(3, [4, 2], [45, 77]) };
                    let sequences = dims.sequences(None);
                    let found = Outline::new(&dims, &sequences, &mask, axis, SIZE);
                    let whole = Schedule::new(&dims, &sequences, Some(&mask), axis, SIZE);
                    let lists = whole.lists.expect("a mask");
                    assert_eq!(found.sequences, whole.sequences);
                    assert_eq!(found.rows.len() * found.heads, lists.counts.len());
                    assert_eq!(found.head_stride, lists.head_stride);
                    assert_eq!(found.tiles.len(), whole.tiles.len());
                    assert!(whole.tiles.iter().all(|tile| found.tiles.contains(tile)));
                    assert!(found.capacity >= lists.capacity);
                    assert_eq!((found.sum_rows, found.sharing), (whole.sum_rows, whole.sharing));
                }
            }
        }
    }

    #[test]
    fn an_outline_begins_with_what_a_causal_mask_makes_heavy() {
        let dims = dims(2, [1, 1], [64, 64]);
        let order = |axis| {
            let found = Outline::new(&dims, &dims.sequences(None), &causal(), axis, SIZE);
            found.tiles.iter().map(|t| (t.tile, t.sequence)).collect::<Vec<_>>()
        };
        let (queries, keys) = (order(Axis::Queries), order(Axis::Keys));
        let last = 64 / SIZE.q as i32 - 1;
        assert_eq!(queries[..3], [(last, 0), (last, 1), (last - 1, 0)]);
        assert_eq!(keys[..3], [(0, 0), (0, 1), (1, 0)]);
    }

    #[test]
    fn the_heaviest_tiles_come_first() {
        let packing = Packing::new(&[20, 0, 70], &[20, 9, 70]).unwrap();
        let varlen = packing.varlen(95, 99).unwrap();
        let dims = Dims { packed: true, ..dims(3, [2, 1], [95, 99]) };
        let sequences = dims.sequences(Some(varlen));
        let causal = causal();
        let schedule = Schedule::new(&dims, &sequences, Some(&causal), Axis::Queries, SIZE);
        let order: Vec<_> = schedule.tiles.iter().map(|t| (t.sequence, t.tile)).collect();
        assert_eq!(order.len(), 2 + 5);
        assert_eq!(order[0], (2, 3), "a whole tile that sees most keys");
        assert_eq!(schedule.sequences[2].sum_row, 32);
        assert_eq!(schedule.sum_rows, 32 + 80);
        let keys = Schedule::new(&dims, &sequences, None, Axis::Keys, SIZE);
        assert_eq!(keys.tiles.len(), 1 + 1 + 3, "keys without queries still need zeros");
        assert_eq!(keys.live_pairs, 2 * (20 * 20 + 70 * 70));
    }

    #[test]
    fn keys_that_a_batch_shares_are_owned_once() {
        let dims = Dims { shared_kv: true, ..dims(3, [2, 1], [10, 40]) };
        let schedule = Schedule::new(&dims, &dims.sequences(None), None, Axis::Keys, SIZE);
        assert_eq!((schedule.sharing, schedule.tiles.len()), (3, 2));
        assert!(schedule.tiles.iter().all(|t| t.sequence == 0));
        let schedule = Schedule::new(&dims, &dims.sequences(None), None, Axis::Queries, SIZE);
        assert_eq!((schedule.sharing, schedule.tiles.len()), (1, 3));
    }
}
