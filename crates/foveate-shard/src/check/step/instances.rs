//! What ranks do at an edge, held against what their partners do and hold.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use crate::check::{At, Contradiction};
use crate::map::Axis;
use crate::ranges::Ranges;
use crate::step::{Call, Copies, Edge, EdgeKind, Held, Moved, StepPlan, Terms, Transfer};

pub(super) struct Done {
    pub transfers: usize,
    pub sums: usize,
}

/// Whose gradients of a batch are in the sum that a rank has of a group, by edge's value.
type Summed = HashMap<(String, usize), Arc<Vec<usize>>>;

/// An edge, with the transfer that follows from its layouts.
struct Moving<'a> {
    edge: &'a Edge,
    transfer: Transfer,
}

impl Moving<'_> {
    /// Where only elements that several ranks of `tensor` hold are summed, those that these hold.
    fn copies(&self) -> Option<Copies> {
        self.transfer.sum.as_ref().and_then(|(terms, _)| terms.copies)
    }

    fn value(&self) -> String {
        self.edge.values[0].clone()
    }
}

pub(super) fn check(plan: &StepPlan) -> Result<Done, Contradiction> {
    let edges: Vec<&Edge> = plan.edges().collect();
    // Edges of one class move parts of the same array between the same layouts.
    let mut classes: HashMap<(&Held, &Held, Moved), usize> = HashMap::new();
    let mut lists: HashMap<usize, Vec<Option<usize>>> = HashMap::new();
    for (rank, own) in plan.ranks.iter().enumerate() {
        let address = Arc::as_ptr(&own.calls).addr();
        if let Entry::Vacant(list) = lists.entry(address) {
            list.insert(places(&edges, rank, &own.calls)?);
        }
    }
    let mut checks = Checks {
        plan,
        lists,
        summed: Summed::new(),
        counted: HashSet::new(),
        proven: HashSet::new(),
    };
    let (mut transfers, mut sums) = (0, 0);
    for edge in edges {
        let next = classes.len();
        let class = *classes.entry((&edge.from, &edge.to, edge.moved)).or_insert(next);
        let transfer = edge.from.transfer(&edge.to).expect("the flow was checked");
        let moving = Moving { edge, transfer };
        let mut done: HashSet<[usize; 2]> = HashSet::new();
        let mut met: HashSet<usize> = HashSet::new();
        for rank in 0..plan.ranks.len() {
            let at = At::rank('e', rank);
            let does = edge.kind.name();
            let Some(call) = checks.call(edge, rank) else {
                if takes_part(plan, &moving, rank) {
                    let message = format!("takes no part in its {does}");
                    return at.contradicts(moving.value(), message);
                }
                continue;
            };
            if !takes_part(plan, &moving, rank) {
                let message = format!("takes part in its {does}, of which it has none");
                return at.contradicts(moving.value(), message);
            }
            let members = plan.ranks[rank].members(call.among);
            if !members.contains(&rank) {
                let message = format!("{does} among {members:?}, it is none of");
                return at.contradicts(moving.value(), message);
            }
            // Ranks that do it together have the same list of members, and mostly the same one of parts.
            let key = [Arc::as_ptr(members).addr(), Arc::as_ptr(&call.parts).addr()];
            if done.insert(key) {
                checks.meets(&moving, rank, call)?;
                if checks.proven.insert((class, key)) {
                    checks.content(&moving, rank, call)?;
                }
            }
            if met.insert(key[0]) && edge.kind.sums() {
                checks.sum(&moving, rank, members)?;
                sums += 1;
            }
        }
        transfers += met.len();
    }
    Ok(Done { transfers, sums })
}

/// Where in a list of calls each edge is. They are in the order of the step.
fn places(
    edges: &[&Edge],
    rank: usize,
    calls: &[Call],
) -> Result<Vec<Option<usize>>, Contradiction> {
    let mut places = vec![None; edges.len()];
    let mut last = None;
    for (place, call) in calls.iter().enumerate() {
        let Some(edge) = edges.get(call.edge) else {
            let message = format!("calls edge {} of a step of {}", call.edge, edges.len());
            return At::rank('e', rank).contradicts("step", message);
        };
        if last.is_some_and(|last| last >= call.edge) {
            let before = &edges[last.unwrap_or(0)].values[0];
            let message = format!(
                "its {} comes behind edge {} ({before}) on this rank, before it on others",
                edge.kind.name(),
                last.unwrap_or(0)
            );
            return At::rank('e', rank).contradicts(edge.values[0].clone(), message);
        }
        last = Some(call.edge);
        places[call.edge] = Some(place);
    }
    Ok(places)
}

/// Whether a rank has terms or parts at an edge that others have, too.
fn takes_part(plan: &StepPlan, moving: &Moving<'_>, rank: usize) -> bool {
    let (copies, moved) = (moving.copies(), moving.edge.moved);
    let (Some(Copies::KvHeads), Moved::Elements { group, .. }) = (copies, moved) else {
        return true;
    };
    let map = plan.sharding.map();
    let copies = plan.sharding.cut(Axis::KvHeads).copies(map.part(Axis::KvHeads, rank));
    let copied = &plan.shape.groups[map.part(Axis::Heads, rank)][group].copied;
    copies.len() > 1 && copied.iter().any(|copied| copied.among == Copies::KvHeads)
}

struct Checks<'a> {
    plan: &'a StepPlan,
    /// By list of calls, where each edge is in it.
    lists: HashMap<usize, Vec<Option<usize>>>,
    summed: Summed,
    /// Lists of ranks whose tokens are all, once.
    counted: HashSet<Vec<usize>>,
    /// Classes of edges, with lists of members and of parts, whose content is right.
    proven: HashSet<(usize, [usize; 2])>,
}

impl<'a> Checks<'a> {
    fn call(&self, edge: &Edge, rank: usize) -> Option<&'a Call> {
        let calls = &self.plan.ranks[rank].calls;
        let places = &self.lists[&Arc::as_ptr(calls).addr()];
        places[edge.number].map(|place| &calls[place])
    }

    /// The members of an edge, as the call of one of them says, do it with each other, each once.
    fn meets(&self, moving: &Moving<'_>, rank: usize, call: &Call) -> Result<(), Contradiction> {
        let (plan, kind) = (self.plan, moving.edge.kind.name());
        let members = plan.ranks[rank].members(call.among);
        let wrong = |point, message| At::rank(point, rank).contradicts(moving.value(), message);
        for &member in members.iter() {
            let theirs = plan.ranks.get(member).and_then(|_| self.call(moving.edge, member));
            let Some(theirs) = theirs else {
                let message = format!("{kind} with rank {member}, which takes no part in it");
                return wrong('e', message);
            };
            let others = plan.ranks[member].members(theirs.among);
            if others != members {
                let message =
                    format!("{kind} among {members:?}, on rank {member} among {others:?}");
                return wrong('e', message);
            }
            if theirs.parts != call.parts {
                return wrong('e', format!("{kind} of other parts than on rank {member}"));
            }
        }
        if !members.is_sorted_by(|a, b| a < b) {
            let point = if moving.edge.kind.sums() { 'd' } else { 'e' };
            let message =
                format!("{kind} among {members:?}, which is not each rank once, in order");
            return wrong(point, message);
        }
        Ok(())
    }

    /// Each gives what it holds, and gets what its layout says.
    fn content(&self, moving: &Moving<'_>, rank: usize, call: &Call) -> Result<(), Contradiction> {
        let Moving { edge, .. } = moving;
        let (kind, sums) = (edge.kind.name(), edge.kind.sums());
        let members = self.plan.ranks[rank].members(call.among);
        let point = if sums { 'd' } else { 'c' };
        let wrong = |rank, message| At::rank(point, rank).contradicts(moving.value(), message);
        if call.parts.len() != members.len() {
            let message = format!("{} parts for {} ranks", call.parts.len(), members.len());
            return wrong(rank, message);
        }
        let [whole, each] = if sums { [&edge.from, &edge.to] } else { [&edge.to, &edge.from] };
        let whole = self.holds(moving, whole, rank);
        let mut all = Ranges::default();
        for (&member, part) in members.iter().zip(call.parts.iter()) {
            if let Some(of) = self.alike(moving, rank, member) {
                return wrong(rank, format!("{kind} with rank {member}, which has {of}"));
            }
            let held = self.holds(moving, each, member);
            if *part != held {
                let verb = if sums { "gets" } else { "gives" };
                return wrong(member, format!("{verb} {part}, its layout says {held}"));
            }
            if edge.kind == EdgeKind::AllReduce && *part != whole {
                return wrong(member, format!("adds {part} where rank {rank} adds {whole}"));
            }
            let twice = all.intersection(part);
            if edge.kind != EdgeKind::AllReduce && !twice.is_empty() {
                return wrong(member, format!("{kind} of {twice} twice"));
            }
            all = all.union(part);
        }
        if all != whole {
            return wrong(rank, format!("{kind} of {all}, where {whole} is needed"));
        }
        Ok(())
    }

    /// In what a member differs from a rank where both should be alike.
    fn alike(&self, moving: &Moving<'_>, rank: usize, member: usize) -> Option<&'static str> {
        let sharding = &self.plan.sharding;
        let differ = |axis| sharding.range(axis, rank) != sharding.range(axis, member);
        // Terms of copied elements are of the same tokens: those of others are summed at another edge.
        let tokens = (differ(Axis::Batch) || differ(Axis::Seq)).then_some("other tokens");
        match (moving.edge.moved, moving.copies()) {
            (Moved::Totals, _) => None,
            (Moved::Tokens { .. }, _) | (_, Some(_)) => tokens,
            (Moved::Elements { .. }, None) => {
                let part = |rank| sharding.map().part(Axis::Heads, rank);
                (part(rank) != part(member)).then_some("other parameters")
            }
        }
    }

    /// What a rank has of what an edge moves.
    fn holds(&self, moving: &Moving<'_>, held: &Held, rank: usize) -> Ranges {
        let sharding = &self.plan.sharding;
        match moving.edge.moved {
            Moved::Totals => Ranges::one(0..1),
            Moved::Tokens { .. } => {
                let cut = held.axes.iter().any(|(axis, _)| *axis == Axis::Stream);
                let axis = if cut { Axis::Stream } else { Axis::Seq };
                Ranges::one(sharding.range(axis, rank))
            }
            Moved::Elements { group, trained } => {
                let shape = &self.plan.shape.groups[sharding.map().part(Axis::Heads, rank)][group];
                if let Some(among) = moving.copies() {
                    return Ranges::one(0..shape.copied_among(among));
                }
                let end = shape.trained + if trained { 0 } else { shape.frozen };
                let all = Ranges::one(0..end);
                match held.axes.iter().any(|(_, on)| !on.is_empty()) {
                    true => self.plan.ranks[rank].owned[group].elements.intersection(&all),
                    false => all,
                }
            }
        }
    }

    /// A sum has each term once.
    fn sum(
        &mut self,
        moving: &Moving<'_>,
        rank: usize,
        members: &Arc<Vec<usize>>,
    ) -> Result<(), Contradiction> {
        let Some((terms, last)) = &moving.transfer.sum else { return Ok(()) };
        let edge = moving.edge;
        for &of in &terms.of {
            match of {
                Axis::Seq if edge.moved == Moved::Totals => {
                    let counts = members.iter().copied();
                    let counts: Vec<usize> =
                        counts.filter(|&member| self.plan.ranks[member].counts_tokens).collect();
                    self.tokens(edge, rank, &counts)?;
                }
                Axis::Seq => self.gradients(edge, *last, rank, members)?,
                // That squares are counted once is of all ranks and edges.
                Axis::Elements => {
                    if members.len() != self.plan.ranks.len() {
                        let message = format!(
                            "{} ranks of {} add theirs",
                            members.len(),
                            self.plan.ranks.len()
                        );
                        return At::rank('d', rank).contradicts("norm", message);
                    }
                }
                of => self.parts(edge, (terms, of), rank, members)?,
            }
        }
        Ok(())
    }

    /// Gradients of a group: of the tokens of all members, or of all those of which these have sums.
    fn gradients(
        &mut self,
        edge: &Edge,
        last: bool,
        rank: usize,
        members: &Arc<Vec<usize>>,
    ) -> Result<(), Contradiction> {
        let [from, to] = &edge.values;
        let mut all: Vec<usize> = Vec::new();
        for &member in members.iter() {
            match self.summed.get(&(from.clone(), member)) {
                Some(ranks) => all.extend(ranks.iter()),
                None => all.push(member),
            }
        }
        if last {
            self.tokens(edge, rank, &all)?;
        }
        let all = if all == **members { Arc::clone(members) } else { Arc::new(all) };
        for &member in members.iter() {
            self.summed.insert((to.clone(), member), Arc::clone(&all));
        }
        Ok(())
    }

    /// Ranks whose tokens are all of the batch, each once.
    fn tokens(&mut self, edge: &Edge, rank: usize, of: &[usize]) -> Result<(), Contradiction> {
        if self.counted.contains(of) {
            return Ok(());
        }
        let sharding = &self.plan.sharding;
        let [rows, len] = [Axis::Batch, Axis::Seq].map(|axis| sharding.cut(axis).len());
        let at = At::rank('d', rank);
        let mut cells: Vec<(Range<usize>, Range<usize>)> = of
            .iter()
            .map(|&rank| (sharding.range(Axis::Batch, rank), sharding.range(Axis::Seq, rank)))
            .filter(|(rows, tokens)| !rows.is_empty() && !tokens.is_empty())
            .collect();
        cells.sort_by_key(|(rows, tokens)| (rows.start, rows.end, tokens.start));
        // Parts of the batch are the same for all ranks, so their rows are equal or apart.
        let mut next = [0, 0];
        let mut end = 0;
        for (rows, tokens) in cells {
            if next[1] == 0 {
                (next[0], end) = (rows.start, rows.end);
            }
            if (rows.start, rows.end) != (next[0], end) || tokens.start != next[1] {
                let what = if tokens.start > next[1] { "never" } else { "twice" };
                let message = format!(
                    "tokens {:?} of rows {rows:?} are summed {what}",
                    next[1].min(tokens.start)..next[1].max(tokens.start)
                );
                return at.contradicts(edge.values[0].clone(), message);
            }
            next[1] = if tokens.end == len { 0 } else { tokens.end };
        }
        let mut rows_of: Vec<Range<usize>> =
            of.iter().map(|&rank| sharding.range(Axis::Batch, rank)).collect();
        rows_of.sort_by_key(|rows| (rows.start, rows.end));
        rows_of.dedup();
        let met = rows_of.iter().fold(0, |at, rows| if rows.start == at { rows.end } else { at });
        if next[1] != 0 || met != rows {
            let message = format!(
                "of {rows} rows of {len} tokens, those behind row {met}, token {} are never summed",
                next[1]
            );
            return at.contradicts(edge.values[0].clone(), message);
        }
        self.counted.insert(of.to_vec());
        Ok(())
    }

    /// Members have terms of each part of an axis once.
    fn parts(
        &self,
        edge: &Edge,
        (terms, of): (&Terms, Axis),
        rank: usize,
        members: &[usize],
    ) -> Result<(), Contradiction> {
        let sharding = &self.plan.sharding;
        let whole = match (of, terms.copies) {
            (Axis::Stream, _) => sharding.range(Axis::Seq, rank),
            (Axis::Heads, Some(Copies::KvHeads)) => {
                let group = sharding.cut(Axis::Heads).len() / sharding.cut(Axis::KvHeads).len();
                let own = sharding.range(Axis::KvHeads, rank);
                own.start * group..own.end * group
            }
            (of, _) => 0..sharding.cut(of).len(),
        };
        let mut at = whole.start;
        for &member in members {
            let own = sharding.range(of, member);
            if own.start != at {
                let what = if own.start > at { "never" } else { "twice" };
                let message = format!(
                    "terms of {of} {:?} are added {what}",
                    at.min(own.start)..at.max(own.start)
                );
                return At::rank('d', member).contradicts(edge.values[0].clone(), message);
            }
            at = own.end;
        }
        if at != whole.end {
            let message = format!("terms of {of} {:?} are never added", at..whole.end);
            return At::rank('d', rank).contradicts(edge.values[0].clone(), message);
        }
        Ok(())
    }
}
