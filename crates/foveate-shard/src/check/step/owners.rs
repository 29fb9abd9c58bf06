//! Every parameter element, and every square in the norm, has one owner; every token's loss is counted once.

use std::collections::BTreeMap;

use crate::check::{At, Contradiction};
use crate::map::Axis;
use crate::ranges::Ranges;
use crate::step::{Copies, StepPlan};

/// Elements with one owner, in every copy of the parameters.
pub(super) fn check(plan: &StepPlan) -> Result<u64, Contradiction> {
    let map = plan.sharding.map();
    if plan.ranks.len() != map.mesh().ranks() {
        let message = format!("{} ranks are planned, the mesh is {}", plan.ranks.len(), map.mesh());
        return At::plan('a').contradicts("mesh", message);
    }
    let mut elements = 0;
    // Ranks that have the same tokens and other parameters count them once.
    let mut counted: BTreeMap<[usize; 2], Vec<usize>> = BTreeMap::new();
    // By place on `tensor` and copy: who owns which elements of a group.
    let mut owners: BTreeMap<[usize; 2], Vec<usize>> = BTreeMap::new();
    for (rank, own) in plan.ranks.iter().enumerate() {
        let tensor = map.part(Axis::Heads, rank);
        if own.owned.len() != plan.shape.groups[tensor].len() {
            let message =
                format!("the rank does not say of {} groups what it owns", own.owned.len());
            return At::rank('d', rank).contradicts("elements", message);
        }
        let tokens = [map.part(Axis::Batch, rank), map.part(Axis::Seq, rank)];
        counted.entry(tokens).or_default().extend(own.counts_tokens.then_some(rank));
        let copy = map.mesh().group(rank, map.of(Axis::Elements))[0];
        owners.entry([tensor, copy]).or_default().push(rank);
    }
    for (tokens, ranks) in &counted {
        let [rows, row] = [Axis::Batch, Axis::Seq].map(|axis| plan.sharding.cut(axis));
        let is_empty = rows.range(tokens[0]).is_empty() || row.range(tokens[1]).is_empty();
        if ranks.len() != 1 && !is_empty {
            let message = format!(
                "of part {} of the batch and {} of its tokens is counted by ranks {ranks:?}, not by one",
                tokens[0], tokens[1]
            );
            return At { rank: ranks.last().copied(), ..At::plan('d') }
                .contradicts("loss", message);
        }
    }
    let mut squares: Vec<Vec<Ranges>> =
        plan.shape.groups.iter().map(|groups| vec![Ranges::default(); groups.len()]).collect();
    for (&[tensor, _], ranks) in &owners {
        for (group, shape) in plan.shape.groups[tensor].iter().enumerate() {
            let whole = Ranges::one(0..shape.trained + shape.frozen);
            let mut owned = Ranges::default();
            for &rank in ranks {
                let (at, own) = (At::rank('d', rank), &plan.ranks[rank].owned[group]);
                let twice = owned.intersection(&own.elements);
                if !twice.is_empty() {
                    let message = format!("elements {twice} of {} have two owners", shape.name);
                    return at.contradicts(shape.name.clone(), message);
                }
                owned = owned.union(&own.elements);
                let trained = own.elements.intersection(&Ranges::one(0..shape.trained));
                let first = trained.as_slice().first().map_or(own.random_from, |run| run.start);
                if own.random_from != first {
                    let message = format!(
                        "random numbers of {} begin at element {}, its elements at {first}",
                        shape.name, own.random_from
                    );
                    return at.contradicts("random index", message);
                }
                let others = own.counted.difference(&trained);
                let twice = squares[tensor][group].intersection(&own.counted);
                if !others.is_empty() || !twice.is_empty() {
                    let what =
                        if others.is_empty() { "a second time" } else { "without owning them" };
                    let which = if others.is_empty() { twice } else { others };
                    let message =
                        format!("squares of elements {which} of {} are counted {what}", shape.name);
                    return at.contradicts("norm", message);
                }
                squares[tensor][group] = squares[tensor][group].union(&own.counted);
            }
            for (wrong, what) in
                [(whole.difference(&owned), "no owner"), (owned.difference(&whole), "an owner")]
            {
                if !wrong.is_empty() {
                    let message = format!("elements {wrong} of {} have {what}", shape.name);
                    return At::plan('d').contradicts(shape.name.clone(), message);
                }
            }
            elements += whole.len() as u64;
        }
    }
    counts_once(plan, &squares)?;
    Ok(elements)
}

/// The squares of every element that is trained are counted, of copied ones by the first of their holders.
fn counts_once(plan: &StepPlan, squares: &[Vec<Ranges>]) -> Result<(), Contradiction> {
    let holders = plan.sharding.cut(Axis::KvHeads);
    for (tensor, groups) in plan.shape.groups.iter().enumerate() {
        for (group, shape) in groups.iter().enumerate() {
            let elsewhere = shape.copied.iter().filter(|copied| match copied.among {
                Copies::All => tensor > 0,
                Copies::KvHeads => holders.copies(tensor).start != tensor,
            });
            let elsewhere = Ranges::of(elsewhere.map(|copied| copied.elements.clone()));
            let wanted = Ranges::one(0..shape.trained).difference(&elsewhere);
            for (wrong, times) in [
                (wanted.difference(&squares[tensor][group]), "never"),
                (squares[tensor][group].intersection(&elsewhere), "on a second place of tensor"),
            ] {
                if !wrong.is_empty() {
                    let message = format!(
                        "squares of elements {wrong} of {}, place {tensor} of tensor, are counted {times}",
                        shape.name
                    );
                    return At::plan('d').contradicts("norm", message);
                }
            }
        }
    }
    Ok(())
}
