//! (d) Owners of parameters and random indices, and that tokens and labels count once.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use crate::check::{At, Contradiction};
use crate::mesh::MeshAxis;
use crate::plan::ShardPlan;
use crate::ranges::Ranges;

pub(super) struct Owned {
    pub elements: u64,
    pub labels: u64,
}

pub(super) fn check(plan: &ShardPlan) -> Result<Owned, Contradiction> {
    let labels = plan.ranks.iter().enumerate().map(|(rank, r)| (rank, &r.labels.0, &r.labels.1));
    let labels: Vec<_> = labels.collect();
    once(plan, "labels", "counted", &labels)?;
    keys(plan)?;
    let mesh = plan.sharding.map().mesh();
    // Lists that are right, of which most ranks have the same one.
    let mut sums: HashSet<(*const Vec<usize>, usize)> = HashSet::new();
    let mut elements = 0;
    for (group, len) in &plan.shape.parameters {
        // By copy of the parameters: place on `replicate`, and part of `tensor`.
        let mut copies: BTreeMap<[usize; 2], Vec<(usize, Range<usize>)>> = BTreeMap::new();
        for (rank, own) in plan.ranks.iter().enumerate() {
            let at = At::rank('d', rank);
            let mut found = own.parameters.iter().filter(|p| p.group == *group);
            let (Some(own), None) = (found.next(), found.next()) else {
                return at
                    .contradicts(group.clone(), "the rank does not say once what it owns of it");
            };
            if own.random_from != own.elements.start {
                let message = format!(
                    "random numbers of {group} begin at element {}, its elements at {}",
                    own.random_from, own.elements.start
                );
                return at.contradicts("random index", message);
            }
            let part = |rank: usize| mesh.index(rank, MeshAxis::Tensor);
            if sums.insert((Arc::as_ptr(&own.sums_over), part(rank))) {
                let mut tokens = Vec::new();
                for &other in own.sums_over.iter() {
                    let Some(r) = plan.ranks.get(other) else {
                        return at.contradicts("gradients", format!("there is no rank {other}"));
                    };
                    tokens.push((other, &r.own.batch, &r.own.q));
                }
                if let Some(&other) = own.sums_over.iter().find(|&&o| part(o) != part(rank)) {
                    let message = format!("sums those of rank {other}, of another part of tensor");
                    return at.contradicts("gradients", message);
                }
                once(plan, "gradients", "summed", &tokens)?;
            }
            let place = mesh.place(rank);
            let copy = [place[MeshAxis::Replicate as usize], place[MeshAxis::Tensor as usize]];
            copies.entry(copy).or_default().push((rank, own.elements.clone()));
        }
        for mut owners in copies.into_values() {
            owners.sort_by_key(|(_, r)| (r.start, r.end));
            let mut end = 0;
            for (rank, range) in owners {
                if range.start != end {
                    let (from, to) = (end.min(range.start), end.max(range.start));
                    let what = if range.start > end { "no owner" } else { "two owners" };
                    let message = format!("elements {from}..{to} of {group} have {what}");
                    return At::rank('d', rank).contradicts(group.clone(), message);
                }
                end = range.end;
            }
            if end != *len {
                let message = format!("its owners hold {end} of {len} elements");
                return At::plan('d').contradicts(group.clone(), message);
            }
            elements += end as u64;
        }
    }
    Ok(Owned { elements, labels: (plan.whole.batch * plan.whole.q_len) as u64 })
}

/// Ranks that sum what makes their keys and values hold the same key/value heads and tokens, and every query
/// head of these once.
fn keys(plan: &ShardPlan) -> Result<(), Contradiction> {
    let group = plan.whole.heads / plan.whole.kv_heads.max(1);
    for (rank, own) in plan.ranks.iter().enumerate() {
        let at = At::rank('d', rank);
        if !own.kv_copies.contains(&rank) {
            return at.contradicts("dk", "gradients of its keys are summed without its own");
        }
        let (mut heads, cells) = (own.own.kv_heads.start * group, &own.own);
        for &other in &own.kv_copies {
            let Some(of_other) = plan.ranks.get(other).map(|r| &r.own) else {
                return at.contradicts("dk", format!("there is no rank {other}"));
            };
            let same = (&of_other.kv_heads, &of_other.batch, &of_other.q, &of_other.kv)
                == (&cells.kv_heads, &cells.batch, &cells.q, &cells.kv);
            if !same {
                let message = format!(
                    "gradients of its keys are summed with those of rank {other}, which has others"
                );
                return at.contradicts("dk", message);
            }
            if of_other.heads.start != heads {
                let message = format!(
                    "gradients of query heads {:?} of rank {other} are summed where {heads} is next",
                    of_other.heads
                );
                return at.contradicts("dk", message);
            }
            heads = of_other.heads.end;
        }
        let end = own.own.kv_heads.end * group;
        if heads != end {
            let message = format!("gradients of query heads {heads}..{end} are summed by no rank");
            return at.contradicts("dk", message);
        }
    }
    Ok(())
}

/// Every token of every batch entry is in exactly one of these.
fn once(
    plan: &ShardPlan,
    operand: &str,
    verb: &str,
    tokens: &[(usize, &Range<usize>, &Ranges)],
) -> Result<(), Contradiction> {
    let mut ends: Vec<usize> = tokens.iter().flat_map(|(_, b, _)| [b.start, b.end]).collect();
    ends.extend([0, plan.whole.batch]);
    ends.sort_unstable();
    ends.dedup();
    let row = Ranges::one(0..plan.whole.q_len);
    for batch in ends.windows(2).map(|w| w[0]..w[1]) {
        let mut seen = Ranges::default();
        for (rank, of, tokens) in tokens {
            if !of.contains(&batch.start) {
                continue;
            }
            let twice = seen.intersection(tokens);
            if !twice.is_empty() {
                let message = format!("tokens {twice} of batch entries {batch:?} are {verb} twice");
                return At::rank('d', *rank).contradicts(operand, message);
            }
            seen = seen.union(tokens);
        }
        for (wrong, what) in [
            (row.difference(&seen), "are never"),
            (seen.difference(&row), "are not in the row and are"),
        ] {
            if !wrong.is_empty() {
                let message = format!("tokens {wrong} of batch entries {batch:?} {what} {verb}");
                return At::plan('d').contradicts(operand, message);
            }
        }
    }
    Ok(())
}
