//! (c) What is read has arrived and gradients return; (e) sends meet receives; (f) bytes.

use std::ops::Range;

use crate::check::{At, Contradiction, RankBytes};
use crate::plan::{
    BACK, BACK_QUERIES, Cells, Part, RankPlan, ShardPlan, Stage, Strategy, WITH_KEYS, WITH_QUERIES,
    part_bytes, result_bytes,
};
use crate::ranges::Ranges;

pub(super) struct Transfers {
    pub transfers: usize,
    pub bytes: Vec<RankBytes>,
}

pub(super) fn check(plan: &ShardPlan) -> Result<Transfers, Contradiction> {
    let stages = plan.ranks.first().map_or(0, |r| r.stages.len());
    for (rank, own) in plan.ranks.iter().enumerate() {
        if own.stages.len() != stages {
            let message = format!("it has {} stages, rank 0 has {stages}", own.stages.len());
            return At::rank('e', rank).contradicts("k", message);
        }
        let sinks: Vec<usize> = (0..stages).filter(|&s| own.stages[s].sink).collect();
        if sinks.len() != 1 {
            let message = format!("it joins the denominator in stages {sinks:?}, not in one");
            return At::rank('b', rank).contradicts("sink", message);
        }
    }
    let mut transfers = 0;
    for stage in 0..stages {
        transfers +=
            meet(plan, Some(stage), |r| (&r.stages[stage].sends, &r.stages[stage].receives))?;
    }
    transfers += meet(plan, None, |r| (&r.returns, &r.returned))?;
    for rank in 0..plan.ranks.len() {
        arrives(plan, rank)?;
        returns(plan, rank)?;
    }
    Ok(Transfers { transfers, bytes: plan.ranks.iter().map(|r| bytes_of(plan, r)).collect() })
}

/// An operand of a part, for messages.
fn operand(part: &Part) -> &'static str {
    part.carries.first().copied().unwrap_or("k")
}

/// Every send of one exchange has its receive, with equal cells, arrays and bytes.
fn meet<'a>(
    plan: &'a ShardPlan,
    stage: Option<usize>,
    of: impl Fn(&'a RankPlan) -> (&'a Vec<Part>, &'a Vec<Part>),
) -> Result<usize, Contradiction> {
    let mut transfers = 0;
    for (rank, own) in plan.ranks.iter().enumerate() {
        let at = At { stage, ..At::rank('e', rank) };
        let group = plan.context_group(rank);
        let (sends, receives) = of(own);
        for (parts, verb, other) in [(sends, "sends", "receives"), (receives, "receives", "sends")]
        {
            for (i, part) in parts.iter().enumerate() {
                let peer = part.peer;
                if peer == rank || !group.contains(&peer) {
                    let message =
                        format!("{verb} a part, but rank {peer} is no other of {group:?}");
                    return at.contradicts(operand(part), message);
                }
                if parts[..i].iter().any(|p| p.peer == peer) {
                    let message = format!("{verb} two parts in one exchange with rank {peer}");
                    return at.contradicts(operand(part), message);
                }
                let bytes = part_bytes(&plan.shape, &part.cells, &part.carries);
                if bytes != part.bytes {
                    let message = format!(
                        "{verb} {} bytes with rank {peer}, but {} of {} are {bytes}",
                        part.bytes,
                        part.carries.join(", "),
                        cells(&part.cells)
                    );
                    return at.contradicts(operand(part), message);
                }
                let (their_sends, their_receives) = of(&plan.ranks[peer]);
                let theirs = if verb == "sends" { their_receives } else { their_sends };
                match theirs.iter().find(|p| p.peer == rank) {
                    None => {
                        let message = format!("{verb} a part that rank {peer} never {other}");
                        return at.contradicts(operand(part), message);
                    }
                    Some(p)
                        if (&p.cells, &p.carries, p.bytes)
                            != (&part.cells, &part.carries, part.bytes) =>
                    {
                        let message = format!(
                            "{verb} {} of {} ({} bytes), rank {peer} {other} {} of {} ({} bytes)",
                            part.carries.join(", "),
                            cells(&part.cells),
                            part.bytes,
                            p.carries.join(", "),
                            cells(&p.cells),
                            p.bytes
                        );
                        return at.contradicts(differing(part, p), message);
                    }
                    Some(_) => {}
                }
            }
        }
        transfers += sends.len();
    }
    Ok(transfers)
}

/// The first array that one part has and the other has not, or its first array.
fn differing(one: &Part, other: &Part) -> &'static str {
    let lacks =
        |a: &Part, b: &Part| a.carries.iter().copied().find(|name| !b.carries.contains(name));
    lacks(one, other).or(lacks(other, one)).unwrap_or(operand(one))
}

fn cells(cells: &Cells) -> String {
    let mut said = format!("heads {:?} of kv heads {:?}", cells.heads, cells.kv_heads);
    for (name, ranges) in [("queries", &cells.q), ("keys", &cells.kv)] {
        if !ranges.is_empty() {
            said += &format!(", {name} {ranges}");
        }
    }
    said
}

fn holds(outer: &Range<usize>, inner: &Range<usize>) -> bool {
    outer.start <= inner.start && inner.end <= outer.end
}

/// The keys, or the queries, of cells; and whether what a part or a rank has of them is of all batch entries
/// and heads of a computation.
struct Side {
    of: fn(&Cells) -> &Ranges,
    heads: fn(&Cells) -> &Range<usize>,
}

const KEYS: Side = Side { of: |c| &c.kv, heads: |c| &c.kv_heads };
const QUERIES: Side = Side { of: |c| &c.q, heads: |c| &c.heads };

impl Side {
    fn serves(&self, has: &Cells, compute: &Cells) -> bool {
        holds(&has.batch, &compute.batch) && holds((self.heads)(has), (self.heads)(compute))
    }
}

/// Everything that a stage reads is local or has arrived, in that stage or before.
fn arrives(plan: &ShardPlan, rank: usize) -> Result<(), Contradiction> {
    let own = &plan.ranks[rank];
    let mut parts: Vec<&Part> = Vec::new();
    for (number, stage) in own.stages.iter().enumerate() {
        let at = At::stage('c', rank, number);
        for part in &stage.sends {
            for (name, side) in [("k", KEYS), ("q", QUERIES)] {
                let lacks = (side.of)(&part.cells).difference((side.of)(&own.own));
                let heads = !side.serves(&own.own, &part.cells);
                if heads || !lacks.is_empty() {
                    let message = format!(
                        "sends {} to rank {}, of which it does not hold {}",
                        cells(&part.cells),
                        part.peer,
                        if heads { "the heads".to_owned() } else { lacks.to_string() }
                    );
                    return at.contradicts(name, message);
                }
            }
        }
        for part in &stage.receives {
            for (ranges, with) in [(&part.cells.kv, &WITH_KEYS[..]), (&part.cells.q, &WITH_QUERIES)]
            {
                let lacks = with.iter().find(|name| !part.carries.contains(name));
                if let Some(name) = lacks.filter(|_| !ranges.is_empty()) {
                    let message = format!(
                        "{} of {} arrive from rank {} without it",
                        part.carries.join(", "),
                        cells(&part.cells),
                        part.peer
                    );
                    return at.contradicts(*name, message);
                }
            }
            parts.push(part);
        }
        let compute = &stage.compute;
        if compute.is_empty() {
            continue;
        }
        for (name, side) in [("k", KEYS), ("q", QUERIES)] {
            let local = Some(&own.own).into_iter();
            let have = local.chain(parts.iter().map(|p| &p.cells));
            let have = have.filter(|c| side.serves(c, compute));
            let has = Ranges::of(have.flat_map(|c| (side.of)(c).as_slice().iter().cloned()));
            let missing = (side.of)(compute).difference(&has);
            if !missing.is_empty() {
                let message = format!(
                    "reads {missing} of heads {:?}, which are neither local nor arrived",
                    (side.heads)(compute)
                );
                return at.contradicts(name, message);
            }
        }
    }
    Ok(())
}

/// Gradients of what a rank computed on and does not hold return to the rank that holds it, once.
fn returns(plan: &ShardPlan, rank: usize) -> Result<(), Contradiction> {
    let own = &plan.ranks[rank];
    let at = At::rank('c', rank);
    let computes: Vec<&Cells> =
        own.stages.iter().map(|s| &s.compute).filter(|c| !c.is_empty()).collect();
    let pairs = |c: &Cells| [c.batch.clone(), c.heads.clone(), c.kv_heads.clone()];
    if let Some(two) = computes.windows(2).find(|two| pairs(two[0]) != pairs(two[1])) {
        let [one, other] = [pairs(two[0]), pairs(two[1])];
        let message = format!(
            "stages compute batch entries, heads and key/value heads {one:?} and {other:?}; gradients \
             of one stage would return for both"
        );
        return at.contradicts("dq", message);
    }
    let sides: [(&str, Side, &[&str]); 2] = [("dk", KEYS, &BACK), ("dq", QUERIES, &BACK_QUERIES)];
    for (name, side, with) in sides {
        let of = side.of;
        let mut computed = Ranges::default();
        for compute in &computes {
            let local = match side.serves(&own.own, compute) {
                true => of(&own.own).clone(),
                false => Ranges::default(),
            };
            computed = computed.union(&of(compute).difference(&local));
        }
        let mut returned = Ranges::default();
        for part in &own.returns {
            let ranges = of(&part.cells);
            if ranges.is_empty() {
                continue;
            }
            if let Some(lacks) = with.iter().find(|name| !part.carries.contains(name)) {
                let message = format!("gradients of {} return without it", cells(&part.cells));
                return at.contradicts(*lacks, message);
            }
            let twice = ranges.intersection(&returned);
            if !twice.is_empty() {
                return at.contradicts(name, format!("gradients of {twice} return twice"));
            }
            let owner = plan.ranks.get(part.peer).map(|r| &r.own);
            let holds =
                |o: &Cells| side.serves(o, &part.cells) && ranges.difference(of(o)).is_empty();
            if !owner.is_some_and(holds) {
                let message = format!(
                    "gradients of {ranges} return to rank {}, which does not hold them",
                    part.peer
                );
                return at.contradicts(name, message);
            }
            let returns = (&part.cells.batch, (side.heads)(&part.cells));
            if let Some(c) = computes.first().filter(|c| (&c.batch, (side.heads)(c)) != returns) {
                let message = format!(
                    "gradients of batch entries and heads {returns:?} return to rank {}, of {:?} that it \
                     computes",
                    part.peer,
                    (&c.batch, (side.heads)(c))
                );
                return at.contradicts(name, message);
            }
            returned = returned.union(ranges);
        }
        let kept = computed.difference(&returned);
        if !kept.is_empty() {
            return at.contradicts(
                name,
                format!("gradients of {kept} never return to the rank that holds them"),
            );
        }
        let extra = returned.difference(&computed);
        if !extra.is_empty() {
            return at.contradicts(
                name,
                format!("gradients of {extra} return, on which it does not compute"),
            );
        }
    }
    Ok(())
}

/// What a rank sends and holds for the attention of one layer, forward and backward.
fn bytes_of(plan: &ShardPlan, rank: &RankPlan) -> RankBytes {
    let sum = |parts: &[Part]| parts.iter().map(|p| p.bytes).sum::<u64>();
    let rows = |c: &Cells| (c.batch.len() * c.heads.len() * c.q.len()) as u64;
    let of_queries = |parts: &[Part]| parts.iter().map(|p| rows(&p.cells)).sum::<u64>();
    // Where queries travelled, out and lse go home, and d_out follows the queries.
    let results =
        |parts: &[Part]| parts.iter().map(|p| result_bytes(&plan.shape, &p.cells)).sum::<u64>();
    let d_out =
        |parts: &[Part]| of_queries(parts) * (plan.shape.dim_v * plan.shape.element.bytes()) as u64;
    let arrays = part_bytes(&plan.shape, &rank.own, &["q", "k", "v", "dq", "dk", "dv"]);
    let own = rows(&rank.own) * (2 * plan.shape.dim_v * plan.shape.element.bytes() + 4) as u64;
    let of_stages = |parts: &dyn Fn(&Stage) -> u64| rank.stages.iter().map(parts).sum::<u64>();
    let bytes = RankBytes {
        forward_received: of_stages(&|s| sum(&s.receives)) + results(&rank.returned),
        forward_sent: of_stages(&|s| sum(&s.sends)) + results(&rank.returns),
        backward_sent: of_stages(&|s| d_out(&s.sends)) + sum(&rank.returns),
        ..RankBytes::default()
    };
    let back = of_stages(&|s| d_out(&s.receives)) + sum(&rank.returns) + sum(&rank.returned);
    let (kept, passing) = of_device(plan, rank);
    RankBytes { held: arrays + own + bytes.forward_received + back, kept, passing, ..bytes }
}

/// [`RankBytes::kept`] and [`RankBytes::passing`].
fn of_device(plan: &ShardPlan, rank: &RankPlan) -> (u64, u64) {
    let Some(first) = rank.stages.first() else { return (0, 0) };
    let all = rank.stages.iter().fold(Ranges::default(), |all, s| all.union(&s.compute.kv));
    let cells = Cells { kv: all, ..first.compute.clone() };
    let of = |carries: &[&str]| part_bytes(&plan.shape, &cells, carries);
    let rows = (cells.batch.len() * cells.heads.len() * cells.q.len()) as u64;
    let out = rows * plan.shape.dim_v as u64;
    if plan.strategy == Strategy::HeadsForTokens {
        let operands = of(&["q", "k", "v"]);
        let out = out * plan.shape.element.bytes() as u64;
        return (operands + out + 4 * rows, operands + out);
    }
    // Out and lse of the stages so far and of one more, where there are several.
    let stages = rank.stages.iter().filter(|stage| !stage.compute.kv.is_empty()).count();
    let joined = if stages > 1 { 4 * (2 * out + 3 * rows) } else { 0 };
    let returned = rank.returned.iter().map(|part| part.bytes).sum::<u64>();
    (of(&["k", "v"]), joined.max(of(&["dk", "dv"]) + returned))
}
