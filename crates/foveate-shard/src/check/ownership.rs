//! (d) Labels count once, and so do query heads of copied key/value heads.

use crate::check::{At, Contradiction};
use crate::plan::ShardPlan;
use crate::ranges::Ranges;

/// Labels that are counted.
pub(super) fn check(plan: &ShardPlan) -> Result<u64, Contradiction> {
    labels(plan)?;
    keys(plan)?;
    Ok((plan.whole.batch * plan.whole.q_len) as u64)
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

/// Every token of every batch entry is counted by one rank.
fn labels(plan: &ShardPlan) -> Result<(), Contradiction> {
    let all = || plan.ranks.iter().map(|rank| &rank.labels).enumerate();
    let mut ends: Vec<usize> = all().flat_map(|(_, (b, _))| [b.start, b.end]).collect();
    ends.extend([0, plan.whole.batch]);
    ends.sort_unstable();
    ends.dedup();
    let row = Ranges::one(0..plan.whole.q_len);
    for batch in ends.windows(2).map(|w| w[0]..w[1]) {
        let mut seen = Ranges::default();
        for (rank, (_, tokens)) in all().filter(|(_, (of, _))| of.contains(&batch.start)) {
            let twice = seen.intersection(tokens);
            if !twice.is_empty() {
                let message =
                    format!("tokens {twice} of batch entries {batch:?} are counted twice");
                return At::rank('d', rank).contradicts("labels", message);
            }
            seen = seen.union(tokens);
        }
        for (wrong, what) in [
            (row.difference(&seen), "are never"),
            (seen.difference(&row), "are not in the row and are"),
        ] {
            if !wrong.is_empty() {
                let message = format!("tokens {wrong} of batch entries {batch:?} {what} counted");
                return At::plan('d').contradicts("labels", message);
            }
        }
    }
    Ok(())
}
