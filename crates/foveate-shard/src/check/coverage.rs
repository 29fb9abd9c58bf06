//! (b) Every live tile is computed exactly once, and (g) how much each rank computes.

use std::collections::HashMap;
use std::ops::Range;

use crate::check::{At, Contradiction};
use crate::plan::{Cells, ShardPlan, Strategy};
use crate::plane::{LayerBlockMask, Planes, live_keys};
use crate::ranges::Ranges;

pub(super) struct Coverage {
    pub tiles: u64,
    pub loads: Vec<u64>,
}

/// What a stage of a rank computes.
struct Compute<'a> {
    rank: usize,
    stage: usize,
    cells: &'a Cells,
}

pub(super) fn check(plan: &ShardPlan, planes: &Planes) -> Result<Coverage, Contradiction> {
    let mut computes = Vec::new();
    for (rank, own) in plan.ranks.iter().enumerate() {
        for (stage, s) in own.stages.iter().enumerate() {
            computes.push(Compute { rank, stage, cells: &s.compute });
        }
    }
    let whole = &plan.whole;
    let mut tiles = 0;
    for batch in elementary(whole.batch, computes.iter().map(|c| &c.cells.batch)) {
        for heads in elementary(whole.heads, computes.iter().map(|c| &c.cells.heads)) {
            let within = |c: &&Compute<'_>| {
                c.cells.batch.contains(&batch.start) && c.cells.heads.contains(&heads.start)
            };
            let own: Vec<&Compute<'_>> = computes.iter().filter(within).collect();
            tiles += cell(planes, &batch, &heads, &own)?;
        }
    }
    if let Strategy::Exchange(_) = plan.strategy {
        needless(plan, planes)?;
    }
    let loads = plan.ranks.iter().map(|rank| load(planes, rank.stages.first().map(|s| &s.compute)));
    Ok(Coverage { tiles, loads: loads.collect() })
}

/// The intervals between all ends of some ranges of `0..len`.
fn elementary<'a>(len: usize, ranges: impl Iterator<Item = &'a Range<usize>>) -> Vec<Range<usize>> {
    let mut ends: Vec<usize> = ranges.flat_map(|r| [r.start, r.end]).chain([0, len]).collect();
    ends.sort_unstable();
    ends.dedup();
    ends.windows(2).map(|w| w[0]..w[1]).collect()
}

/// Keys of the stages that compute some queries: of any, and of more than one.
struct Keys {
    any: Ranges,
    twice: Ranges,
}

/// Checks the batch entries and heads of one cell, of which `computes` are; returns live tiles.
fn cell(
    planes: &Planes,
    batch: &Range<usize>,
    heads: &Range<usize>,
    computes: &[&Compute<'_>],
) -> Result<u64, Contradiction> {
    let of_cell = |block_mask: &&LayerBlockMask| block_mask.pairs(batch, heads) > 0;
    let block_masks: Vec<&LayerBlockMask> = planes.block_masks().iter().filter(of_cell).collect();
    let (len, side) = (planes.whole().q_len, planes.tile().q as usize);
    // Where the set of stages that compute a query changes.
    let mut changes: Vec<(usize, bool, usize)> = Vec::new();
    for (i, compute) in computes.iter().enumerate() {
        for range in compute.cells.q.as_slice() {
            changes.push((range.start, true, i));
            changes.push((range.end, false, i));
        }
    }
    changes.sort_unstable();
    if let Some(&(past, ..)) = changes.iter().find(|c| c.0 > len) {
        let message = format!("queries end at {past}, the row has {len}");
        return At::plan('b').contradicts("q", message);
    }
    let mut active: Vec<usize> = Vec::new();
    let mut known: HashMap<Vec<usize>, Keys> = HashMap::new();
    let (mut at, mut next, mut tiles) = (0, 0, 0);
    while at < len {
        while let Some(&(_, begins, i)) = changes.get(next).filter(|c| c.0 <= at) {
            match begins {
                true => active.push(i),
                false => active.retain(|&a| a != i),
            }
            next += 1;
        }
        active.sort_unstable();
        let end = changes.get(next).map_or(len, |c| c.0.min(len));
        if active.is_empty() {
            let message = format!(
                "queries {at}..{end} of heads {heads:?} and batch entries {batch:?} are computed by \
                 no rank"
            );
            return At::plan('b').contradicts("q", message);
        }
        let keys = known.entry(active.clone()).or_insert_with(|| keys_of(computes, &active));
        for row in at / side..end.div_ceil(side) {
            for block_mask in &block_masks {
                let live = Ranges::of(live_keys(&block_mask.tiles, row));
                let missing = live.difference(&keys.any);
                if !missing.is_empty() {
                    let first = computes[active[0]];
                    return At::rank('b', first.rank)
                        .contradicts("k", unseen(at, end, block_mask, &missing));
                }
                let twice = live.intersection(&keys.twice);
                if !twice.is_empty() {
                    return doubled(computes, &active, at..end, &twice);
                }
                let begins = at <= row * side;
                let runs =
                    block_mask.tiles.row(row).iter().map(|r| u64::from(r.count)).sum::<u64>();
                tiles += if begins { runs * block_mask.pairs(batch, heads) } else { 0 };
            }
        }
        at = end;
    }
    Ok(tiles)
}

fn keys_of(computes: &[&Compute<'_>], active: &[usize]) -> Keys {
    let mut keys = Keys { any: Ranges::default(), twice: Ranges::default() };
    for &i in active {
        let own = &computes[i].cells.kv;
        keys.twice = keys.twice.union(&keys.any.intersection(own));
        keys.any = keys.any.union(own);
    }
    keys
}

fn unseen(from: usize, to: usize, block_mask: &LayerBlockMask, missing: &Ranges) -> String {
    let of =
        |name: &str, one: Option<usize>| one.map_or(String::new(), |i| format!(", {name} {i}"));
    format!(
        "live keys {missing} of queries {from}..{to} are computed by no stage (mask {}{}{})",
        block_mask.mask,
        of("batch entry", block_mask.b),
        of("head", block_mask.h)
    )
}

fn doubled<T>(
    computes: &[&Compute<'_>],
    active: &[usize],
    queries: Range<usize>,
    twice: &Ranges,
) -> Result<T, Contradiction> {
    let reads = |i: &&usize| computes[**i].cells.kv.common(twice) > 0;
    let of: Vec<_> = active.iter().filter(reads).map(|&i| computes[i]).collect();
    let names: Vec<_> = of.iter().map(|c| format!("rank {} stage {}", c.rank, c.stage)).collect();
    let message =
        format!("keys {twice} of queries {queries:?} are computed by {}", names.join(" and "));
    let last = of[of.len() - 1];
    At::stage('b', last.rank, last.stage).contradicts("k", message)
}

/// Keys that arrive for an exchange are needed by a query of the rank's rows and heads, and queries of its stages
/// see some.
fn needless(plan: &ShardPlan, planes: &Planes) -> Result<(), Contradiction> {
    for (rank, own) in plan.ranks.iter().enumerate() {
        let part = planes.part(&own.own.batch, &own.own.heads);
        let needs = part.needs_of(&own.own.q);
        for (number, stage) in own.stages.iter().enumerate() {
            let arrive = stage.receives.iter().flat_map(|p| p.cells.kv.as_slice().iter().cloned());
            let dead = Ranges::of(arrive).difference(&needs);
            if !dead.is_empty() {
                let message = format!("keys {dead} arrive, and no query of the rank sees them");
                return At::stage('b', rank, number).contradicts("k", message);
            }
            if number == 0 || stage.compute.is_empty() {
                continue;
            }
            let Cells { q, kv, .. } = &stage.compute;
            let at = At::stage('b', rank, number);
            let begun = own.stages.first().map_or(&own.own.q, |first| &first.compute.q);
            let lost = q.difference(begun);
            if !lost.is_empty() {
                let message =
                    format!("queries {lost} join a result that the first stage has not begun");
                return at.contradicts("q", message);
            }
            let blind = q.difference(&part.seeing(q, kv));
            if !blind.is_empty() {
                let message =
                    format!("queries {blind} are computed, and see none of the stage's keys");
                return at.contradicts("q", message);
            }
        }
    }
    Ok(())
}

impl ShardPlan {
    /// Live tiles that each stage of a rank computes, over all layers, batch entries and heads.
    pub fn live_tiles(&self, planes: &Planes, rank: usize) -> Vec<u64> {
        self.ranks[rank].stages.iter().map(|stage| live_tiles(planes, &stage.compute)).collect()
    }
}

fn live_tiles(planes: &Planes, cells: &Cells) -> u64 {
    let side = [planes.tile().q, planes.tile().kv].map(|side| side as usize);
    let mut tiles = 0;
    for block_mask in planes.block_masks() {
        let times = block_mask.layers * block_mask.pairs(&cells.batch, &cells.heads);
        if times == 0 {
            continue;
        }
        let rows =
            cells.q.as_slice().iter().flat_map(|r| r.start / side[0]..r.end.div_ceil(side[0]));
        for row in rows {
            let live = Ranges::of(live_keys(&block_mask.tiles, row));
            tiles += times * live.common(&cells.kv).div_ceil(side[1]) as u64;
        }
    }
    tiles
}

/// Live entries of some queries, over all layers.
fn load(planes: &Planes, cells: Option<&Cells>) -> u64 {
    let Some(cells) = cells.filter(|c| !c.is_empty()) else { return 0 };
    let (len, side) = (planes.whole().q_len, planes.tile().q as usize);
    let mut load = 0;
    for block_mask in planes.block_masks() {
        let times = block_mask.layers * block_mask.pairs(&cells.batch, &cells.heads);
        if times == 0 {
            continue;
        }
        for range in cells.q.as_slice() {
            for row in range.start / side..range.end.div_ceil(side) {
                let tile = row * side..len.min((row + 1) * side);
                let rows = range.end.min(tile.end) - range.start.max(tile.start);
                load += times * block_mask.live[row] * rows as u64 / tile.len() as u64;
            }
        }
    }
    load
}
