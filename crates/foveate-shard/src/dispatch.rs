//! Dispatch: which rank of `context` computes which queries.
//!
//! A row is cut into chunks of a few tiles. A chunk's work is its live entries, counted exactly from
//! the runs of the block masks of all layers. Chunks go to ranks in equal numbers: the heaviest
//! first, to the least loaded rank, ties to the rank that already needs most of the same keys. Then
//! chunks of the most loaded rank are exchanged while that helps. A row that is balanced in its own
//! order stays in it, because neighbours share keys. Of others the same exchanges are made in their own order,
//! then exchanges by which ranks need fewer keys of each other; that order is taken where it is balanced, needs a
//! quarter fewer keys and takes less time.
//! The same masks always give the same dispatch. Rows that other ranks compute have a dispatch of
//! their own; every rank has as many tokens of each.

use std::ops::Range;

use crate::error::{ShardError, refused};
use crate::layout::Cut;
use crate::permutation::Permutation;
use crate::plane::{Planes, PlanesPart};
use crate::ranges::Ranges;
use foveate::mask::Tile;
use foveate::tensor::count::Count;

/// Chunks of a row for each rank, where the row has so many tiles.
pub const CHUNKS_A_RANK: usize = 8;

/// The usual tile of rows of `len` tokens over `ranks` ranks: its side is 128, or the largest power of
/// two with which each rank has [`CHUNKS_A_RANK`] chunks, where that is less.
pub fn usual_tile(len: usize, ranks: usize) -> Tile {
    let most = (len / ranks.saturating_mul(CHUNKS_A_RANK).max(1)).clamp(1, 128);
    let side = 1 << most.ilog2();
    Tile { q: side, kv: side }
}

/// A row whose own order is this balanced stays in it.
const BALANCED: f64 = 1.02;

/// Live entries of a head that take as long as a key and a value of a head of other ranks, and their gradients: 14
/// operations for each number of a head's vector at 330 TFLOP/s, beside 12 bytes at 360 GB/s.
const ENTRIES_A_KEY: u64 = 800;

/// Exchanges whose keys are counted at most, in some microseconds each.
const MOST_COUNTED: usize = 4096;

/// The tokens of a row on the ranks of `context`.
#[derive(Clone, Debug, PartialEq)]
pub struct Dispatch {
    permutation: Permutation,
    cut: Cut,
    loads: Vec<u64>,
}

/// Queries that stay together.
struct Chunk {
    tokens: Range<usize>,
    work: u64,
    keys: Ranges,
}

impl Dispatch {
    /// The tokens of a row on `ranks` ranks, in chunks of `chunk` tokens, a multiple of the tile's;
    /// of as many tiles as give 8 chunks or more a rank when it is `None`.
    ///
    /// # Errors
    /// When the row has fewer chunks than there are ranks, or a chunk is no multiple of a tile.
    pub fn new(planes: &Planes, ranks: usize, chunk: Option<usize>) -> Result<Self, ShardError> {
        let whole = planes.whole();
        Self::of_rows(&planes.part(&(0..whole.batch), &(0..whole.heads)), ranks, chunk)
    }

    /// The same for some rows of a batch alone. All of them are cut into equal parts, whatever their masks.
    pub(crate) fn of_rows(
        part: &PlanesPart<'_>,
        ranks: usize,
        chunk: Option<usize>,
    ) -> Result<Self, ShardError> {
        let (len, tile) = (part.planes.whole().q_len, part.planes.tile().q as usize);
        if ranks == 0 {
            return refused("a row cannot be dispatched to no ranks");
        }
        let chunk = match chunk {
            Some(chunk) if chunk == 0 || !chunk.is_multiple_of(tile) => {
                return refused(format!(
                    "chunks of {chunk} tokens are no multiple of tiles of {tile} queries; give {}",
                    (chunk / tile).max(1) * tile
                ));
            }
            Some(chunk) => chunk,
            None => (len / (ranks * CHUNKS_A_RANK * tile)).max(1) * tile,
        };
        let number = len.div_ceil(chunk);
        if number < ranks {
            let cut =
                if chunk > tile { ", longer rows, or smaller chunks" } else { ", or longer rows" };
            return refused(format!(
                "a row of {} is {} of {chunk}, and {} need one each; use {} of context or fewer{cut}",
                Count(len, "token"),
                Count(number, "chunk"),
                Count(ranks, "rank"),
                Count(number.max(1), "rank")
            ));
        }
        let chunks: Vec<Chunk> = (0..number)
            .map(|i| {
                let tokens = i * chunk..len.min((i + 1) * chunk);
                let rows = tokens.start / tile..tokens.end.div_ceil(tile);
                Chunk { tokens, work: part.work(rows.clone()), keys: part.keys(rows) }
            })
            .collect();
        let quotas = Cut::even(number, ranks);
        let in_order: Vec<Vec<usize>> = (0..ranks).map(|r| quotas.range(r).collect()).collect();
        let given = if imbalance(&loads(&chunks, &in_order)) <= BALANCED {
            in_order
        } else {
            // A shorter chunk stays where it is in the row's own order.
            let fixed = (!len.is_multiple_of(chunk)).then_some(number - 1);
            let (mut near, mut apart) = (in_order, by_weight(&chunks, &quotas.lengths(), fixed));
            for given in [&mut near, &mut apart] {
                exchange(&chunks, given, fixed);
            }
            let a_key = ENTRIES_A_KEY * part.key_heads();
            if imbalance(&loads(&chunks, &near)) <= BALANCED {
                need_fewer_keys(&chunks, &mut near, fixed, a_key);
            }
            let [of_near, of_apart] = [&near, &apart].map(|given| Times::of(&chunks, given, a_key));
            // Few keys fewer are not worth what balance it lacks.
            let fewer = 4 * of_near.most_keys() <= 3 * of_apart.most_keys();
            let balanced = imbalance(&of_near.loads) <= BALANCED;
            if balanced && fewer && of_near.last() < of_apart.last() { near } else { apart }
        };
        let mut ranges = Vec::with_capacity(number);
        let mut lengths = Vec::with_capacity(ranks);
        for own in &given {
            let tokens = own.iter().map(|&i| chunks[i].tokens.clone());
            lengths.push(tokens.clone().map(|t| t.len()).sum());
            ranges.extend(tokens);
        }
        Ok(Self {
            permutation: Permutation::new(ranges, len)?,
            cut: Cut::of_lengths(&lengths)?,
            loads: loads(&chunks, &given),
        })
    }

    /// The order of the row's tokens: those of rank 0 first, of every rank ascending.
    pub fn permutation(&self) -> &Permutation {
        &self.permutation
    }

    /// Which part of the permuted row each rank holds.
    pub fn cut(&self) -> &Cut {
        &self.cut
    }

    /// Positions of the tokens that a rank holds, ascending.
    ///
    /// # Panics
    /// When there is no such rank.
    pub fn tokens(&self, rank: usize) -> Vec<Range<usize>> {
        self.permutation.positions(self.cut.range(rank))
    }

    /// Live entries that each rank computes, over all layers, batch entries and heads.
    pub fn loads(&self) -> &[u64] {
        &self.loads
    }

    /// The largest load by the mean load; 1 is perfect.
    pub fn imbalance(&self) -> f64 {
        imbalance(&self.loads)
    }
}

fn loads(chunks: &[Chunk], given: &[Vec<usize>]) -> Vec<u64> {
    given.iter().map(|own| own.iter().map(|&i| chunks[i].work).sum()).collect()
}

/// Chunks of a rank, as far as keys follow from them.
struct Held {
    needs: Ranges,
    tokens: Ranges,
}

impl Held {
    fn of<'a>(chunks: impl Iterator<Item = &'a Chunk>) -> Self {
        let chunks: Vec<&Chunk> = chunks.collect();
        let needs = chunks.iter().flat_map(|chunk| chunk.keys.as_slice().iter().cloned());
        let needs = Ranges::of(needs);
        Self { needs, tokens: Ranges::of(chunks.iter().map(|chunk| chunk.tokens.clone())) }
    }

    /// Keys of other ranks that these chunks and another need.
    fn wanted_with(&self, chunk: &Chunk) -> usize {
        let needs = self.needs.union(&chunk.keys);
        let own = needs.common(&self.tokens) + needs.common(&Ranges::one(chunk.tokens.clone()));
        needs.len() - own
    }
}

/// When ranks have computed what they have and got the keys for it, in live entries.
struct Times {
    /// Live entries, by rank.
    loads: Vec<u64>,
    /// Keys of other ranks that it needs.
    keys: Vec<usize>,
    /// Both together.
    all: Vec<u64>,
}

impl Times {
    fn of(chunks: &[Chunk], given: &[Vec<usize>], a_key: u64) -> Self {
        let loads = loads(chunks, given);
        let keys = given.iter().map(|own| {
            let held = Held::of(own.iter().map(|&i| &chunks[i]));
            held.needs.len() - held.needs.common(&held.tokens)
        });
        let keys: Vec<usize> = keys.collect();
        let all = loads.iter().zip(&keys).map(|(load, keys)| load + a_key * *keys as u64).collect();
        Self { loads, keys, all }
    }

    /// Of the rank that ends last.
    fn last(&self) -> u64 {
        self.all.iter().max().copied().unwrap_or(0)
    }

    /// Of the rank that needs most.
    fn most_keys(&self) -> usize {
        self.keys.iter().max().copied().unwrap_or(0)
    }
}

/// Exchanges chunks of the rank that ends last, by its work and the keys that it needs, with those of others while that
/// ends sooner and the ranks stay balanced.
fn need_fewer_keys(chunks: &[Chunk], given: &mut [Vec<usize>], fixed: Option<usize>, a_key: u64) {
    let mut times = Times::of(chunks, given, a_key);
    let most = (BALANCED * times.loads.iter().sum::<u64>() as f64 / given.len() as f64) as u64;
    let may = |i: usize| Some(i) != fixed;
    // Of each rank, what is left without each of its chunks.
    let rests = |own: &[usize]| -> Vec<Held> {
        let without = |i: &usize| Held::of(own.iter().filter(|j| *j != i).map(|&j| &chunks[j]));
        own.iter().map(without).collect()
    };
    let mut left: Vec<Option<Vec<Held>>> = given.iter().map(|_| None).collect();
    let mut counted = 0;
    loop {
        let high = (0..given.len()).max_by_key(|&r| (times.all[r], std::cmp::Reverse(r)));
        let high = high.expect("a rank");
        let of_high = left[high].take().unwrap_or_else(|| rests(&given[high]));
        let mut best: Option<(u64, usize, usize, usize)> = None;
        for low in (0..given.len()).filter(|&r| r != high) {
            for (a, &from) in given[high].iter().enumerate().filter(|(_, from)| may(**from)) {
                for (b, &to) in given[low].iter().enumerate().filter(|(_, to)| may(**to)) {
                    let (x, y) = (chunks[from].work, chunks[to].work);
                    let (at_high, at_low) = (times.loads[high] - x + y, times.loads[low] - y + x);
                    let soonest = best.map_or(times.all[high], |(last, ..)| last);
                    let larger = at_high.max(at_low);
                    if larger > most || larger >= soonest || counted == MOST_COUNTED {
                        continue;
                    }
                    counted += 1;
                    let of_low = left[low].get_or_insert_with(|| rests(&given[low]));
                    let high_ends = at_high + a_key * of_high[a].wanted_with(&chunks[to]) as u64;
                    let low_ends = at_low + a_key * of_low[b].wanted_with(&chunks[from]) as u64;
                    if high_ends.max(low_ends) < soonest {
                        best = Some((high_ends.max(low_ends), low, a, b));
                    }
                }
            }
        }
        let Some((_, low, a, b)) = best else { break };
        let other = given[low][b];
        given[low][b] = std::mem::replace(&mut given[high][a], other);
        times = Times::of(chunks, given, a_key);
        left[low] = None;
    }
    given.iter_mut().for_each(|own| own.sort_unstable());
}

/// The largest load by the mean load.
pub(crate) fn imbalance(loads: &[u64]) -> f64 {
    let (max, sum) = (loads.iter().max().copied().unwrap_or(0), loads.iter().sum::<u64>());
    if sum == 0 { 1.0 } else { max as f64 * loads.len() as f64 / sum as f64 }
}

/// Heaviest first to the least loaded rank that may have one more; first of all `fixed` to the last rank.
fn by_weight(chunks: &[Chunk], quotas: &[usize], fixed: Option<usize>) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..chunks.len()).collect();
    order.sort_by_key(|&i| (Some(i) != fixed, std::cmp::Reverse(chunks[i].work), i));
    let mut given: Vec<Vec<usize>> = vec![Vec::new(); quotas.len()];
    let mut load = vec![0u64; quotas.len()];
    let mut needs = vec![Ranges::default(); quotas.len()];
    for i in order {
        let last = quotas.len() - 1;
        let open = |&r: &usize| given[r].len() < quotas[r] && (Some(i) != fixed || r == last);
        let least = (0..quotas.len()).filter(open).map(|r| load[r]).min();
        let least = least.expect("quotas add up to the number of chunks");
        let tied: Vec<usize> =
            (0..quotas.len()).filter(open).filter(|&r| load[r] == least).collect();
        let shared = |r: usize| needs[r].common(&chunks[i].keys);
        let rank = match tied[..] {
            [one] => one,
            _ => {
                let most = tied.iter().map(|&r| (shared(r), std::cmp::Reverse(r))).max();
                most.expect("a rank has room").1.0
            }
        };
        given[rank].push(i);
        load[rank] += chunks[i].work;
        needs[rank] = needs[rank].union(&chunks[i].keys);
    }
    given.iter_mut().for_each(|own| own.sort_unstable());
    given
}

/// Exchanges chunks of the most loaded rank with those of others while its load falls.
fn exchange(chunks: &[Chunk], given: &mut [Vec<usize>], fixed: Option<usize>) {
    let mut load = loads(chunks, given);
    for _ in 0..4 * given.len() {
        let heaviest = |load: &[u64]| {
            (0..load.len()).max_by_key(|&r| (load[r], std::cmp::Reverse(r))).expect("a rank")
        };
        let high = heaviest(&load);
        // The pair that leaves the larger of the two loads the smallest.
        let mut best: Option<(u64, usize, usize, usize)> = None;
        for low in (0..given.len()).filter(|&r| r != high) {
            for (a, &from) in given[high].iter().enumerate() {
                for (b, &to) in given[low].iter().enumerate() {
                    let (x, y) = (chunks[from].work, chunks[to].work);
                    if x <= y || fixed.is_some_and(|fixed| [from, to].contains(&fixed)) {
                        continue;
                    }
                    let larger = (load[high] - (x - y)).max(load[low] + (x - y));
                    if larger < best.map_or(load[high], |(larger, ..)| larger) {
                        best = Some((larger, low, a, b));
                    }
                }
            }
        }
        let Some((_, low, a, b)) = best else { break };
        let moved = chunks[given[high][a]].work - chunks[given[low][b]].work;
        let other = given[low][b];
        given[low][b] = std::mem::replace(&mut given[high][a], other);
        load[high] -= moved;
        load[low] += moved;
    }
    given.iter_mut().for_each(|own| own.sort_unstable());
}
