//! (a) Layouts, what ranks hold, and the coordinates that mods are told.

use std::sync::Arc;

use crate::arrays;
use crate::check::{At, Contradiction};
use crate::map::Axis;
use crate::permutation::{PermutationId, order_of};
use crate::plan::{Cells, ShardPlan};
use crate::plane::Planes;
use crate::ranges::Ranges;

/// The number of layouts that agree.
pub(super) fn check(plan: &ShardPlan, planes: &Planes) -> Result<usize, Contradiction> {
    let sharding = &plan.sharding;
    let whole = &plan.whole;
    let at = At::plan('a');
    if whole != planes.whole() {
        let message = format!("the plan is of {whole:?}, the masks are of {:?}", planes.whole());
        return at.contradicts("mask", message);
    }
    let ranks = sharding.map().mesh().ranks();
    if plan.ranks.len() != ranks {
        let message = format!("{} ranks are planned, the mesh has {ranks}", plan.ranks.len());
        return at.contradicts("mesh", message);
    }
    for (axis, len) in [
        (Axis::Batch, whole.batch),
        (Axis::Seq, whole.q_len),
        (Axis::KvSeq, whole.kv_len),
        (Axis::Heads, whole.heads),
        (Axis::KvHeads, whole.kv_heads),
    ] {
        if sharding.cut(axis).len() != len {
            let cut = sharding.cut(axis).lengths();
            let message = format!("parts of {cut:?} are not {len} long together");
            return at.contradicts(axis.name(), message);
        }
    }
    let order = sharding.layout(foveate::tensor::ElementType::I32, &[Axis::Seq]);
    let order = order.ok().and_then(|l| l.order());
    let (parts, rows) = (plan.permutations.len(), sharding.map().parts(Axis::Batch));
    if parts != rows {
        let message = format!("{parts} permutations are given for {rows} parts of the batch");
        return at.contradicts("permutation", message);
    }
    let said = order_of(&plan.permutations);
    if plan.permutations.iter().any(|p| p.len() != whole.q_len) || order != said {
        let of =
            |id: Option<PermutationId>| id.map_or("of the row".to_owned(), |id| id.to_string());
        let message = format!(
            "tokens move by permutation {}, the layouts are in order {}",
            of(said),
            of(order)
        );
        return at.contradicts("permutation", message);
    }
    let mut layouts = 0;
    // Lists that agree, of which most ranks have the same one.
    let mut right: Vec<&Arc<Vec<_>>> = Vec::new();
    for (rank, own) in plan.ranks.iter().enumerate() {
        let at = At::rank('a', rank);
        let all = arrays::ATTENTION.len() + arrays::MODEL.len();
        let known = right.iter().any(|known| Arc::ptr_eq(known, &own.arrays));
        layouts += if known { all } else { 0 };
        for array in arrays::ATTENTION.iter().chain(arrays::MODEL).filter(|_| !known) {
            let mut found = own.arrays.iter().filter(|(name, _)| *name == array.name);
            let (Some((_, layout)), None) = (found.next(), found.next()) else {
                return at.contradicts(array.name, "it has not one layout");
            };
            let derived = match array.layout_in(sharding, plan.shape.element) {
                Ok(derived) => derived,
                Err(error) => return at.contradicts(array.name, error.to_string()),
            };
            if let Err(error) = derived.expect(array.name, layout) {
                return at.contradicts(array.name, error.to_string());
            }
            layouts += 1;
        }
        right.extend((!known).then_some(&own.arrays));
        holds(plan, rank)?;
        for (number, stage) in own.stages.iter().enumerate() {
            let at = At::stage('a', rank, number);
            let (rows, told) = (&stage.compute, &stage.coordinates);
            if let Some((operand, rows, told)) = differing(rows, told) {
                let message = format!("mods are told {told} where rows are {rows} of the whole");
                return at.contradicts(operand, message);
            }
            let group = whole.heads / whole.kv_heads.max(1);
            let (h, kv) = (&rows.heads, &rows.kv_heads);
            let (first, end) = (kv.start * group, kv.end * group);
            // Ranks that hold copies of a key/value head have some of its query heads each.
            let copies =
                sharding.cut(Axis::KvHeads).copies(sharding.map().part(Axis::KvHeads, rank));
            let has_some = copies.len() > 1 && kv.len() == 1;
            let fits = first <= h.start && h.end <= end;
            if !fits || !has_some && (h.start, h.end) != (first, end) {
                let message = format!("query heads {h:?} are not those of key/value heads {kv:?}");
                return at.contradicts("h_kv", message);
            }
            for (name, told, global) in [
                ("q_len", stage.lengths[0], whole.q_len),
                ("kv_len", stage.lengths[1], whole.kv_len),
            ] {
                if told != global {
                    let message = format!("mods are told {told}, the whole problem has {global}");
                    return at.contradicts(name, message);
                }
            }
        }
    }
    Ok(layouts)
}

/// What a rank holds is what its layouts say.
fn holds(plan: &ShardPlan, rank: usize) -> Result<(), Contradiction> {
    let (sharding, whole) = (&plan.sharding, &plan.whole);
    let range = |axis| sharding.range(axis, rank);
    // Keys of self-attention are the row's tokens and move with them.
    let kv = match whole.q_len == whole.kv_len {
        true => Ranges::of(plan.permutation(rank).positions(range(Axis::KvSeq))),
        false => Ranges::one(range(Axis::KvSeq)),
    };
    let derived = Cells {
        batch: range(Axis::Batch),
        heads: range(Axis::Heads),
        kv_heads: range(Axis::KvHeads),
        q: Ranges::of(plan.permutation(rank).positions(range(Axis::Seq))),
        kv,
    };
    if let Some((operand, derived, held)) = differing(&derived, &plan.ranks[rank].own) {
        let message = format!("the rank holds {held}, its layouts say {derived}");
        return At::rank('a', rank).contradicts(operand, message);
    }
    Ok(())
}

/// The first coordinate in which two differ, with both.
fn differing(one: &Cells, other: &Cells) -> Option<(&'static str, String, String)> {
    let ranges = [
        ("b", &one.batch, &other.batch),
        ("h", &one.heads, &other.heads),
        ("h_kv", &one.kv_heads, &other.kv_heads),
    ];
    for (name, one, other) in ranges {
        if one != other {
            return Some((name, format!("{one:?}"), format!("{other:?}")));
        }
    }
    for (name, one, other) in
        [("q_positions", &one.q, &other.q), ("kv_positions", &one.kv, &other.kv)]
    {
        if one != other {
            let less = [one.difference(other), other.difference(one)];
            return Some((
                name,
                format!("{one} (alone {})", less[0]),
                format!("{other} (alone {})", less[1]),
            ));
        }
    }
    None
}
