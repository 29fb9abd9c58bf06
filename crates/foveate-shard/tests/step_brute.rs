//! A check of steps term by term: every element of every value is followed on every rank with the terms that are in it,
//! and its verdict is compared with the checker's on small random steps with random faults.

mod steps;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use foveate::tensor::random::Random;
use foveate_shard::step::{
    Among, Call, Copies, Edge, EdgeKind, Event, Held, Moved, Owned, Stays, StepPlan,
};
use foveate_shard::{Axis, MeshAxis, Ranges};
use steps::{Model, again, shape, sharding};

/// The first number is an element of a group or a token; the terms in it are pairs of a part of some axis, for
/// elements that several ranks of `tensor` hold, or of what a product is cut along, and of a row and a token.
type Terms = BTreeSet<(usize, [usize; 2])>;
type Elements = BTreeMap<usize, Terms>;

/// A value on a rank: what it has of it, as which layout, and how many batches are in it.
#[derive(Clone)]
struct Value {
    held: Held,
    elements: Elements,
    batches: usize,
}

type Outcome<T = ()> = Result<T, String>;

fn fail<T>(what: impl Into<String>) -> Outcome<T> {
    Err(what.into())
}

fn positions(ranges: &Ranges) -> impl Iterator<Item = usize> + '_ {
    ranges.as_slice().iter().cloned().flatten()
}

struct Brute<'a> {
    plan: &'a StepPlan,
    right: &'a StepPlan,
    ranks: Vec<BTreeMap<String, Value>>,
}

impl Brute<'_> {
    fn part(&self, axis: Axis, rank: usize) -> std::ops::Range<usize> {
        self.right.sharding.range(axis, rank)
    }

    fn tensor(&self, rank: usize) -> usize {
        self.right.sharding.map().part(Axis::Heads, rank)
    }

    /// Rows and tokens of a rank.
    fn tokens(&self, rank: usize) -> Vec<[usize; 2]> {
        let tokens = self.part(Axis::Seq, rank);
        self.part(Axis::Batch, rank).flat_map(|b| tokens.clone().map(move |t| [b, t])).collect()
    }

    fn group_of(value: &str, plan: &StepPlan) -> Option<usize> {
        let names = plan.shape.groups[0].iter();
        let is = |name: &str| {
            [
                "weights",
                "weights, gathered",
                "gradients",
                "gradients of a batch",
                "gradients by the head",
            ]
            .iter()
            .any(|what| value == format!("{name} {what}"))
        };
        names.map(|group| &group.name).position(|name| is(name))
    }

    /// The elements of a value in a layout, each with the terms that a rank gives itself.
    fn given(&self, value: &str, held: &Held, rank: usize) -> Elements {
        let map = self.right.sharding.map();
        if let Some(group) = Self::group_of(value, self.right) {
            let shape = &self.right.shape.groups[map.part(Axis::Heads, rank)][group];
            let is_cut = held.axes.iter().any(|(_, on)| !on.is_empty());
            let all = shape.trained + if value.contains("weights") { shape.frozen } else { 0 };
            let elements: Vec<usize> = match is_cut {
                true => positions(&self.plan.ranks[rank].owned[group].elements)
                    .filter(|&e| e < all)
                    .collect(),
                false => (0..all).collect(),
            };
            let tokens = match held.terms.iter().any(|t| t.copies.is_none()) {
                true => self.tokens(rank),
                false => vec![[0, 0]],
            };
            let terms = |element: &usize| {
                let copied = shape.copied.iter().find(|c| c.elements.contains(element));
                let sums = copied.filter(|c| held.terms.iter().any(|t| t.copies == Some(c.among)));
                let parts: Vec<usize> = match sums {
                    Some(copied) => self.part(copied.of, rank).collect(),
                    None => vec![0],
                };
                let pairs = parts.iter().flat_map(|&p| tokens.iter().map(move |&t| (p, t)));
                (*element, pairs.collect())
            };
            return elements.iter().map(terms).collect();
        }
        if held.axes.is_empty() {
            let counts = self.plan.ranks[rank].counts_tokens && !held.terms.is_empty();
            let tokens = if counts { self.tokens(rank) } else { vec![] };
            return [(0, tokens.into_iter().map(|t| (0, t)).collect())].into();
        }
        let stream = held.axes.iter().any(|(axis, _)| *axis == Axis::Stream);
        let tokens = self.part(if stream { Axis::Stream } else { Axis::Seq }, rank);
        let parts = match held.terms.first() {
            Some(terms) => self.part(terms.of[0], rank),
            None => 0..1,
        };
        let rows = self.part(Axis::Batch, rank).len();
        let terms = |t: usize| (t, parts.clone().map(|p| (p, [rows, 0])).collect());
        tokens.map(terms).collect()
    }

    fn stages(&mut self, event: &Event, masters: &mut BTreeMap<String, usize>) -> Outcome {
        let Event::Stage(stage) = event else { return Ok(()) };
        for rank in 0..self.ranks.len() {
            for read in &stage.reads {
                let Some(value) = self.ranks[rank].get(&read.value) else {
                    return fail(format!("{} is not there", read.value));
                };
                if value.held != read.held || value.batches != read.batches {
                    return fail("another layout");
                }
                if read.held.terms.is_empty() {
                    self.complete(&read.value, value, rank)?;
                }
                if stage.name == "update" {
                    *masters.entry(read.value.clone()).or_default() += 1;
                }
            }
            let added = stage.reads.first().filter(|_| stage.name.ends_with(": add"));
            let added = added.map(|read| self.ranks[rank][&read.value].elements.clone());
            for value in &stage.drops {
                if self.ranks[rank].remove(value).is_none() {
                    return fail("drops nothing");
                }
            }
            for given in &stage.gives {
                let own = || self.given(&given.value, &given.held, rank);
                let elements = added.clone().unwrap_or_else(own);
                let value = Value { held: given.held.clone(), elements, batches: 1 };
                self.put(rank, &given.value, value, given.adds)?;
            }
        }
        Ok(())
    }

    fn put(&mut self, rank: usize, name: &str, value: Value, adds: bool) -> Outcome {
        match self.ranks[rank].get_mut(name) {
            None => drop(self.ranks[rank].insert(name.to_owned(), value)),
            Some(found) if adds && found.held == value.held => found.batches += value.batches,
            Some(_) => return fail("given twice"),
        }
        Ok(())
    }

    /// Every element of a layout is there, with every term of it.
    fn complete(&self, name: &str, value: &Value, rank: usize) -> Outcome {
        let wanted = self.given(name, &value.held, rank);
        if wanted.keys().ne(value.elements.keys()) {
            return fail(format!("elements of {name}"));
        }
        let sharding = &self.right.sharding;
        let (rows, len) = (sharding.cut(Axis::Batch).len(), sharding.cut(Axis::Seq).len());
        let all_tokens = || (0..rows).flat_map(|b| (0..len).map(move |t| [b, t]));
        let map = sharding.map();
        for (element, terms) in &value.elements {
            let mut parts = 0..1;
            let tokens: BTreeSet<[usize; 2]>;
            if let Some(group) = Self::group_of(name, self.right) {
                if name.contains("weights") {
                    continue;
                }
                tokens = match self.right.ranks.len() / map.parts(Axis::Heads) {
                    1 => [[0, 0]].into(),
                    _ => all_tokens().collect(),
                };
                let shape = &self.right.shape.groups[map.part(Axis::Heads, rank)][group];
                let copied = shape.copied.iter().find(|c| c.elements.contains(element));
                if let Some(copied) = copied {
                    let per = sharding.cut(Axis::Heads).len() / sharding.cut(Axis::KvHeads).len();
                    let kv = self.part(Axis::KvHeads, rank);
                    parts = match (copied.among, copied.of) {
                        (Copies::KvHeads, _) => kv.start * per..kv.end * per,
                        (Copies::All, Axis::Stream) => self.part(Axis::Seq, rank),
                        (Copies::All, of) => 0..sharding.cut(of).len(),
                    };
                    // Of each rank's tokens its own parts of the stream.
                    if copied.of == Axis::Stream {
                        let found: BTreeSet<[usize; 2]> = terms.iter().map(|t| t.1).collect();
                        let first: BTreeSet<usize> = terms
                            .iter()
                            .filter(|t| t.1 == *found.first().unwrap())
                            .map(|t| t.0)
                            .collect();
                        if found != tokens || first.is_empty() {
                            return fail("terms of the stream");
                        }
                        continue;
                    }
                }
            } else if value.held.axes.is_empty() {
                tokens = all_tokens().collect();
                if self.right.ranks.len() == 1 {
                    continue;
                }
            } else {
                // How many parts there are follows from the sum that was made.
                continue;
            }
            let wanted: Terms = parts.flat_map(|p| tokens.iter().map(move |&t| (p, t))).collect();
            if *terms != wanted {
                return fail(format!("terms of {name}"));
            }
        }
        Ok(())
    }

    fn edge(&mut self, edge: &Edge) -> Outcome {
        let transfer = edge.from.transfer(&edge.to);
        if transfer.as_ref().is_none_or(|transfer| transfer.kind != edge.kind) {
            return fail("another kind");
        }
        let sum = transfer.and_then(|transfer| transfer.sum);
        let before = self.ranks.clone();
        for rank in 0..self.ranks.len() {
            let Some(own) = before[rank].get(&edge.values[0]).filter(|v| v.held == edge.from)
            else {
                return fail("another layout before an edge");
            };
            let mut elements = own.elements.clone();
            if let Some(call) = self.call(edge, rank) {
                elements = self.exchanged(edge, rank, call, &before)?;
            }
            if edge.kind.sums() {
                self.ranks[rank].remove(&edge.values[0]);
            }
            let value = Value { held: edge.to.clone(), elements, batches: own.batches };
            if self.given(&edge.values[1], &edge.to, rank).keys().ne(value.elements.keys()) {
                return fail(format!("elements of {} behind an edge", edge.values[1]));
            }
            // A product's sum is complete.
            if let (Some((terms, true)), Moved::Tokens { .. }) = (&sum, edge.moved) {
                let len = self.right.sharding.cut(terms.of[0]).len();
                if value.elements.values().any(|terms| terms.len() != len) {
                    return fail("terms of a product");
                }
            }
            self.put(rank, &edge.values[1], value, edge.adds)?;
        }
        Ok(())
    }

    fn call(&self, edge: &Edge, rank: usize) -> Option<&Call> {
        self.plan.ranks[rank].calls.iter().find(|call| call.edge == edge.number)
    }

    fn exchanged(
        &self,
        edge: &Edge,
        rank: usize,
        call: &Call,
        before: &[BTreeMap<String, Value>],
    ) -> Outcome<Elements> {
        let members = self.plan.ranks[rank].members(call.among);
        let Some(place) = members.iter().position(|&member| member == rank) else {
            return fail("none of its group");
        };
        if !members.windows(2).all(|two| two[0] < two[1]) || call.parts.len() != members.len() {
            return fail("members");
        }
        let sums = edge.kind.sums();
        let terms = edge.from.transfer(&edge.to).and_then(|transfer| transfer.sum);
        let copies = terms.and_then(|(terms, _)| terms.copies);
        // Copied elements lie elsewhere on each rank; parts count them.
        let place_of = |rank: usize, at: usize| match (copies, edge.moved) {
            (Some(among), Moved::Elements { group, .. }) => {
                let shape = &self.right.shape.groups[self.tensor(rank)][group];
                let copied = shape.copied.iter().filter(|copied| copied.among == among);
                copied.flat_map(|copied| copied.elements.clone()).nth(at)
            }
            _ => Some(at),
        };
        let mut elements = match edge.kind {
            // What is no part of the sum stays as it is.
            EdgeKind::AllReduce => before[rank][&edge.values[0]].elements.clone(),
            EdgeKind::AllGather | EdgeKind::ReduceScatter => Elements::new(),
        };
        if edge.kind == EdgeKind::AllReduce {
            for at in positions(&call.parts[place]) {
                let Some(element) = place_of(rank, at) else { return fail("no such copy") };
                elements.remove(&element);
            }
        }
        for (i, &member) in members.iter().enumerate() {
            let theirs = self.plan.ranks.get(member).and_then(|_| self.call(edge, member));
            let Some(theirs) = theirs else { return fail("waits for ever") };
            if self.plan.ranks[member].members(theirs.among) != members
                || theirs.parts != call.parts
            {
                return fail("other members or parts");
            }
            let is_copied = matches!(call.among, Among::Tensor | Among::KvHolders);
            if matches!(edge.moved, Moved::Elements { .. })
                && !is_copied
                && self.tensor(member) != self.tensor(rank)
            {
                return fail("other parameters");
            }
            if matches!(edge.moved, Moved::Tokens { .. })
                && self.tokens(member) != self.tokens(rank)
            {
                return fail("other tokens");
            }
            let part = if sums { &call.parts[place] } else { &call.parts[i] };
            for at in positions(part) {
                let (Some(theirs), Some(element)) = (place_of(member, at), place_of(rank, at))
                else {
                    return fail("no such copy");
                };
                let Some(terms) = before[member][&edge.values[0]].elements.get(&theirs) else {
                    return fail("sends what it has not");
                };
                let there = elements.contains_key(&element);
                if !sums && there {
                    return fail("comes twice");
                }
                let sum = elements.entry(element).or_default();
                for term in terms {
                    if !sum.insert(*term) {
                        return fail("a term twice");
                    }
                }
            }
        }
        Ok(elements)
    }
}

/// What is wrong with a step, term by term; `right` is one of the same problem that nobody changed.
fn brute(plan: &StepPlan, right: &StepPlan) -> Outcome {
    if plan.ranks.len() != right.ranks.len() {
        return fail("ranks");
    }
    let map = right.sharding.map();
    for rank in &plan.ranks {
        if !rank.calls.is_sorted_by(|a, b| a.edge < b.edge) {
            return fail("order");
        }
        if rank.calls.last().is_some_and(|call| call.edge >= plan.edges().count()) {
            return fail("no such edge");
        }
    }
    let mut numbers = plan.edges().map(|edge| edge.number);
    if (0..plan.edges().count()).any(|number| numbers.next() != Some(number)) {
        return fail("numbers");
    }
    owned(plan, right)?;
    let mut brute = Brute { plan, right, ranks: vec![BTreeMap::new(); plan.ranks.len()] };
    for rank in 0..plan.ranks.len() {
        for (group, shape) in right.shape.groups[0].iter().enumerate() {
            let name = format!("{} weights", shape.name);
            let on = map.of(Axis::Elements).iter().copied();
            let on: Vec<MeshAxis> = on.filter(|&axis| map.mesh().size(axis) > 1).collect();
            let held = Held {
                element: right.shape.weights,
                axes: vec![(Axis::Elements, on)],
                terms: vec![],
            };
            let own = positions(&plan.ranks[rank].owned[group].elements);
            let elements = own.map(|element| (element, Terms::new())).collect();
            brute.ranks[rank].insert(name, Value { held, elements, batches: 1 });
        }
    }
    let mut updated = BTreeMap::new();
    for event in &plan.events {
        match event {
            Event::Stage(_) => brute.stages(event, &mut updated)?,
            Event::Edge(edge) => brute.edge(edge)?,
        }
    }
    for (group, shape) in right.shape.groups[0].iter().enumerate() {
        let trains = right.shape.groups.iter().any(|groups| groups[group].trained > 0);
        let times = updated.get(&format!("{} gradients", shape.name)).copied().unwrap_or(0);
        if times != if trains { plan.ranks.len() } else { 0 } {
            return fail("updates");
        }
    }
    let left = brute.ranks[0].keys().filter(|value| !value.ends_with(" weights"));
    if left.into_iter().any(|value| value != "loss, z-loss and labels") {
        return fail("left behind the step");
    }
    Ok(())
}

/// Every element has one owner in every copy, and every square is counted once.
fn owned(plan: &StepPlan, right: &StepPlan) -> Outcome {
    let map = right.sharding.map();
    let mut owners: BTreeMap<(usize, usize, usize, usize), usize> = BTreeMap::new();
    let mut counted: BTreeMap<(usize, usize, usize), usize> = BTreeMap::new();
    let mut tokens: BTreeMap<[usize; 2], usize> = BTreeMap::new();
    for (rank, own) in plan.ranks.iter().enumerate() {
        let tensor = map.part(Axis::Heads, rank);
        let replica = map.mesh().index(rank, MeshAxis::Replicate);
        for (group, Owned { elements, random_from, counted: counts }) in
            own.owned.iter().enumerate()
        {
            let trained = right.shape.groups[tensor][group].trained;
            let first = positions(elements).find(|&e| e < trained);
            if first.is_some_and(|first| first != *random_from) {
                return fail("random");
            }
            positions(elements)
                .for_each(|e| *owners.entry((replica, tensor, group, e)).or_default() += 1);
            for e in positions(counts) {
                if e >= trained || !positions(elements).any(|own| own == e) {
                    return fail("counts what it does not own");
                }
                *counted.entry((tensor, group, e)).or_default() += 1;
            }
        }
        if own.counts_tokens {
            for b in right.sharding.range(Axis::Batch, rank) {
                for t in right.sharding.range(Axis::Seq, rank) {
                    *tokens.entry([b, t]).or_default() += 1;
                }
            }
        }
    }
    let (mut all, mut squares) = (0, 0);
    for (tensor, groups) in right.shape.groups.iter().enumerate() {
        for (group, shape) in groups.iter().enumerate() {
            all += shape.trained + shape.frozen;
            for e in 0..shape.trained {
                let copied = shape.copied.iter().find(|copied| copied.elements.contains(&e));
                let first = right.sharding.cut(Axis::KvHeads).copies(tensor).start;
                let here = copied.is_none_or(|copied| match copied.among {
                    Copies::All => tensor == 0,
                    Copies::KvHeads => tensor == first,
                });
                if counted.get(&(tensor, group, e)).copied().unwrap_or(0) != usize::from(here) {
                    return fail("squares");
                }
                squares += usize::from(here);
            }
        }
    }
    let replicas = map.mesh().size(MeshAxis::Replicate);
    let inside = |(_, tensor, group, e): &(usize, usize, usize, usize)| {
        let shape = &right.shape.groups[*tensor][*group];
        *e < shape.trained + shape.frozen
    };
    if owners.len() != all * replicas
        || owners.values().any(|&n| n != 1)
        || !owners.keys().all(inside)
    {
        return fail("owners");
    }
    let sharding = &right.sharding;
    let cells = sharding.cut(Axis::Batch).len() * sharding.cut(Axis::Seq).len();
    if counted.len() != squares || tokens.len() != cells || tokens.values().any(|&n| n != 1) {
        return fail("counts");
    }
    Ok(())
}

fn nudge(random: &mut Random, ranges: &Ranges) -> Ranges {
    let at = random.below(44);
    let one = Ranges::one(at..at + 1 + random.below(2));
    if random.below(2) == 0 { ranges.union(&one) } else { ranges.difference(&one) }
}

/// Changes something of a step; sometimes nothing that matters.
fn disturb(random: &mut Random, plan: &mut StepPlan) {
    let r = random.below(plan.ranks.len());
    let other = random.below(plan.ranks.len());
    let n = plan.ranks[r].calls.len();
    let at = random.below(n.max(1));
    let events = plan.events.len();
    let event = random.below(events);
    let group = random.below(plan.shape.groups[0].len());
    match random.below(15) {
        0 if n > 0 => drop(Arc::make_mut(&mut plan.ranks[r].calls).remove(at)),
        1 if n > 1 => Arc::make_mut(&mut plan.ranks[r].calls).swap(at, (at + 1) % n),
        2 | 3 if n > 0 => {
            // A part, on all that know it.
            let parts = plan.ranks[r].calls[at].parts.clone();
            let mut changed = (*parts).clone();
            let i = random.below(changed.len());
            changed[i] = nudge(random, &changed[i]);
            let changed = Arc::new(changed);
            for rank in &mut plan.ranks {
                for call in Arc::make_mut(&mut rank.calls) {
                    if call.parts == parts {
                        call.parts = changed.clone();
                    }
                }
            }
        }
        4 if n > 0 => {
            let call = &mut Arc::make_mut(&mut plan.ranks[r].calls)[at];
            let i = random.below(call.parts.len());
            Arc::make_mut(&mut call.parts)[i] = nudge(random, &call.parts[i]);
        }
        5 => {
            // A group, on all its members.
            let among = random.below(5);
            let members = plan.ranks[r].groups[among].clone();
            let mut changed = (*members).clone();
            match random.below(4) {
                0 => drop(changed.pop()),
                1 => changed.push(other),
                2 => changed[0] = other,
                _ => changed.reverse(),
            }
            let changed = Arc::new(changed);
            for rank in plan.ranks.iter_mut().filter(|rank| rank.groups[among] == members) {
                rank.groups[among] = changed.clone();
            }
        }
        6 => {
            let others = plan.ranks[other].groups.clone();
            let among = random.below(5);
            plan.ranks[r].groups[among] = others[among].clone();
        }
        7 => {
            let own = &mut Arc::make_mut(&mut plan.ranks[r].owned)[group];
            own.elements = nudge(random, &own.elements);
        }
        8 => {
            let own = &mut Arc::make_mut(&mut plan.ranks[r].owned)[group];
            own.counted = nudge(random, &own.counted);
        }
        9 => Arc::make_mut(&mut plan.ranks[r].owned)[group].random_from += random.below(2),
        10 => plan.ranks[r].counts_tokens = random.below(2) == 0,
        11 => drop(plan.events.remove(event)),
        12 => {
            let again = plan.events[event].clone();
            plan.events.insert(event, again);
        }
        13 => {
            if let Event::Edge(edge) = &mut plan.events[event] {
                let kinds = [EdgeKind::AllGather, EdgeKind::ReduceScatter, EdgeKind::AllReduce];
                edge.kind = kinds[random.below(3)];
            }
        }
        _ => match &mut plan.events[event] {
            Event::Edge(edge) => match random.below(3) {
                0 => edge.to = edge.from.clone(),
                1 => edge.adds = !edge.adds,
                _ => edge.from.terms.clear(),
            },
            Event::Stage(stage) => drop(stage.drops.pop()),
        },
    }
}

#[test]
fn the_verdict_on_a_step_is_that_of_a_check_term_by_term() {
    let (mut right, mut wrong) = (0, 0);
    for seed in 0..400 {
        let mut random = Random::new(seed);
        let of = Model {
            layers: 1 + random.below(2),
            kv_heads: 1 + random.below(3),
            tied: random.below(2) == 0,
            rows: 2 + random.below(2),
            len: 4 + random.below(3),
        };
        let tensor = 1 + random.below(2 * of.kv_heads.min(2));
        let mesh = [1 + random.below(2), 1 + random.below(2), 1 + random.below(2), tensor];
        let sharding = sharding(mesh, &of);
        let mut shape = shape(&sharding, &of);
        shape.stays = [Stays::Layer, Stays::Batch, Stays::Step][random.below(3)];
        shape.in_backward = random.below(3) == 0;
        shape.batches = if shape.in_backward { 1 } else { 1 + random.below(2) };
        shape.again.fill_with(|| again(&mut random));
        let plan = StepPlan::new(&sharding, &shape).unwrap();
        assert_eq!(brute(&plan, &plan), Ok(()), "seed {seed}, {mesh:?}: a step as it was made");
        let mut changed = plan.clone();
        for _ in 0..random.below(3) {
            disturb(&mut random, &mut changed);
        }
        let wanted = brute(&changed, &plan);
        let found = changed.prove().map(|_| ());
        match (&wanted, &found) {
            (Ok(()), Ok(())) => right += 1,
            (Err(_), Err(_)) => wrong += 1,
            _ => panic!("seed {seed}, {mesh:?}: term by term {wanted:?}, the checker {found:?}"),
        }
    }
    println!("{right} right steps and {wrong} wrong ones");
    assert!(right > 100 && wrong > 100, "{right} right steps and {wrong} wrong ones");
}
