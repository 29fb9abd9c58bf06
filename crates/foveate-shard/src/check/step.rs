//! A step between the attention of its layers: what stages read has come, every sum has every term once, and no
//! order of ranks waits in a circle.
//!
//! A stage or an edge is the same on all ranks, so what they have of a value is followed once ([`flow`]). What
//! ranks do at an edge is compared between those that do it together ([`instances`]): each gives what it holds,
//! gets what the edge says, and adds each term once, in order of rank. All ranks do the edges in the order of
//! their numbers, so of those that are not done the first has all its members waiting at it.

mod instances;
mod owners;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;

use crate::check::{At, Contradiction};
use crate::map::Axis;
use crate::step::{Edge, Event, Held, LOSS, RankStep, Read, StepPlan, StepStage, axes_of};

/// What was proven of a step, in numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct StepProof {
    /// Ranks.
    pub ranks: usize,
    /// Edges between two layouts of a value.
    pub edges: usize,
    /// Stages whose values have come.
    pub stages: usize,
    /// Groups of ranks that do an edge together, over all edges.
    pub transfers: usize,
    /// Of these, sums that have every term once.
    pub sums: usize,
    /// Parameter elements with one owner in every copy.
    pub parameter_elements: u64,
    /// Identity of what was proven: equal steps have equal ones.
    pub step_hash: u64,
}

impl fmt::Display for StepProof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { edges, stages, transfers, sums, parameter_elements, .. } = self;
        writeln!(f, "the step between its attention, step {:016x}", self.step_hash)?;
        writeln!(
            f,
            "(c) stages      {stages} read what has come, by {edges} edges of two layouts"
        )?;
        writeln!(
            f,
            "(d) sums        {sums} with every term once, in order of rank; {parameter_elements} \
             parameter elements with one owner"
        )?;
        write!(f, "(e) transfers   {transfers} among ranks, in one order on all of them")
    }
}

/// A step that was proven: what may run.
#[derive(Clone, Debug)]
pub struct ProvenStep {
    plan: StepPlan,
    proof: StepProof,
}

impl ProvenStep {
    /// The step.
    pub fn plan(&self) -> &StepPlan {
        &self.plan
    }

    /// What was proven.
    pub fn proof(&self) -> &StepProof {
        &self.proof
    }
}

impl StepPlan {
    /// Proves the step.
    ///
    /// # Errors
    /// The first contradiction: point, operand, rank and what contradicts what.
    pub fn prove(self) -> Result<ProvenStep, Contradiction> {
        let (edges, stages) = flow(&self)?;
        let parameter_elements = owners::check(&self)?;
        let instances::Done { transfers, sums } = instances::check(&self)?;
        let ranks = self.ranks.len();
        let step_hash = self.hash();
        let proof =
            StepProof { ranks, edges, stages, transfers, sums, parameter_elements, step_hash };
        Ok(ProvenStep { plan: self, proof })
    }

    /// Identity of the step: equal steps have equal ones, in every process of one version.
    pub fn hash(&self) -> u64 {
        let said = format!("{:?}", (&self.sharding, &self.shape, &self.events));
        let mut words = vec![crate::hash::slice(said.as_bytes())];
        // What ranks have in common is read once.
        let mut known: HashMap<usize, u64> = HashMap::new();
        for RankStep { owned, groups, calls, counts_tokens } in &self.ranks {
            let one = known.entry(Arc::as_ptr(owned).addr());
            words.push(*one.or_insert_with(|| super::of(owned)));
            let one = known.entry(Arc::as_ptr(calls).addr());
            words.push(*one.or_insert_with(|| super::of(calls)));
            for members in groups {
                let one = known.entry(Arc::as_ptr(members).addr());
                words.push(*one.or_insert_with(|| super::of(members)));
            }
            words.push(u64::from(*counts_tokens));
        }
        crate::hash::words(words)
    }
}

/// What ranks have of the values that there are, and how many batches are in each.
type Values = BTreeMap<String, (Held, usize)>;

/// Follows what ranks have of each value; returns edges and stages.
fn flow(plan: &StepPlan) -> Result<(usize, usize), Contradiction> {
    let mut values = Values::new();
    let of_elements = axes_of(plan.sharding.map(), &[Axis::Elements]);
    for group in plan.shape.groups.first().into_iter().flatten() {
        let axes = vec![(Axis::Elements, of_elements.clone())];
        let own = Held { element: plan.shape.weights, axes, terms: vec![] };
        values.insert(format!("{} weights", group.name), (own, 1));
    }
    let (mut edges, mut stages) = (0, 0);
    for event in &plan.events {
        match event {
            Event::Edge(edge) => {
                if edge.number != edges {
                    let message = format!("is edge {} where {edges} is next", edge.number);
                    return At::plan('e').contradicts(edge.values[0].clone(), message);
                }
                edges += 1;
                moves(&mut values, edge)?;
            }
            Event::Stage(stage) => {
                stages += 1;
                computes(&mut values, stage)?;
            }
        }
    }
    // Weights that stayed gathered would be old in the next step.
    let stays = |value: &&String| !value.ends_with(" weights") && *value != LOSS;
    if let Some(value) = values.keys().find(stays) {
        return At::plan('c').contradicts(value.clone(), "is left when the step has ended");
    }
    updated(plan)?;
    Ok((edges, stages))
}

/// An edge takes a value as it is, and its kind is the one that follows.
fn moves(values: &mut Values, edge: &Edge) -> Result<(), Contradiction> {
    let (at, [value, to]) = (At::plan('c'), &edge.values);
    let wrong = |message: String| at.contradicts(value.clone(), message);
    let Some((held, batches)) = values.get(value) else {
        return wrong(format!("{} where there is none", edge.kind.name()));
    };
    if *held != edge.from {
        return wrong(format!("{} from {} where ranks have {held}", edge.kind.name(), edge.from));
    }
    match edge.from.transfer(&edge.to) {
        Some(transfer) if transfer.kind == edge.kind => {}
        Some(transfer) => {
            return wrong(format!(
                "{} from {} to {}, which takes {}",
                edge.kind.name(),
                edge.from,
                edge.to,
                transfer.kind.name()
            ));
        }
        None => {
            return wrong(format!("no transfer leads from {} to {}", edge.from, edge.to));
        }
    }
    let batches = *batches;
    if edge.kind.sums() {
        // Terms that stayed could be added once more.
        values.remove(value);
    }
    gives(values, at, (to, batches), &edge.to, edge.adds)
}

fn computes(values: &mut Values, stage: &StepStage) -> Result<(), Contradiction> {
    let at = At::plan('c');
    for Read { value, held, batches } in &stage.reads {
        let Some((found, times)) = values.get(value) else {
            let message = format!("{} reads it where there is none", stage.name);
            return at.contradicts(value.clone(), message);
        };
        if found != held {
            let message = format!("{} needs {held}, ranks have {found}", stage.name);
            return at.contradicts(value.clone(), message);
        }
        if times != batches {
            let message =
                format!("{} needs those of {batches} batches, it has {times}", stage.name);
            return at.contradicts(value.clone(), message);
        }
    }
    for value in &stage.drops {
        if values.remove(value).is_none() {
            let message = format!("{} drops it where there is none", stage.name);
            return at.contradicts(value.clone(), message);
        }
    }
    stage.gives.iter().try_for_each(|g| gives(values, at, (&g.value, 1), &g.held, g.adds))
}

fn gives(
    values: &mut Values,
    at: At,
    (value, batches): (&str, usize),
    held: &Held,
    adds: bool,
) -> Result<(), Contradiction> {
    match values.get_mut(value) {
        None => {
            values.insert(value.to_owned(), (held.clone(), batches));
        }
        Some((found, times)) if adds && found == held => *times += batches,
        Some((found, _)) => {
            let message = format!("is given as {held} where ranks have {found} of it");
            return at.contradicts(value, message);
        }
    }
    Ok(())
}

/// Every group that is trained is updated, once.
fn updated(plan: &StepPlan) -> Result<(), Contradiction> {
    for (group, shape) in plan.shape.groups.first().into_iter().flatten().enumerate() {
        let name = format!("{} gradients", shape.name);
        let trains = plan.shape.groups.iter().any(|groups| groups[group].trained > 0);
        let reads = |event: &&Event| match event {
            Event::Stage(stage) => {
                stage.name == "update" && stage.reads.iter().any(|read| read.value == name)
            }
            Event::Edge(_) => false,
        };
        let times = plan.events.iter().filter(reads).count();
        if times != usize::from(trains) {
            let message = format!("update {times} times in a step");
            return At::plan('d').contradicts(name, message);
        }
    }
    Ok(())
}
