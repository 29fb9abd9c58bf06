//! The transfers of a step beside the keys of attention: those of the step that is proven, each taken once.

use std::collections::VecDeque;

use foveate_shard::simulate::{Machine, Span};
use foveate_shard::step::{Among, Edge, EdgeKind, Event, Moved, StepPlan};

/// Who does an edge together, and the bytes of each one's part.
pub(super) type Parts = (Vec<usize>, Vec<f64>);

/// The edges of a step that are not taken yet, by what carries them, in their order.
pub(super) struct Transfers<'a> {
    plan: &'a StepPlan,
    /// Weights.
    gathers: VecDeque<&'a Edge>,
    batches: VecDeque<OfBatch<'a>>,
    /// Sums behind all batches: of gradients over copies of the parameters, and of totals.
    last: Vec<&'a Edge>,
}

/// What else moves in a batch.
#[derive(Default)]
struct OfBatch<'a> {
    stream: VecDeque<&'a Edge>,
    /// Gradients that are summed behind their group and, where groups are updated there, their norms.
    sums: VecDeque<&'a Edge>,
}

impl<'a> Transfers<'a> {
    pub fn of(plan: &'a StepPlan) -> Self {
        let (gathers, batches, last) = Default::default();
        let mut of = Self { plan, gathers, batches, last };
        let in_backward = plan.shape.in_backward;
        for event in &plan.events {
            let edge = match event {
                Event::Stage(stage) if stage.name == "embedding forward" => {
                    of.batches.push_back(OfBatch::default());
                    continue;
                }
                Event::Stage(_) => continue,
                Event::Edge(edge) => edge,
            };
            let of_copies = of.is_of_copies(edge);
            match (edge.moved, of.batches.back_mut()) {
                (Moved::Elements { .. }, _) if edge.kind == EdgeKind::AllGather => {
                    of.gathers.push_back(edge);
                }
                (Moved::Tokens { .. }, Some(batch)) => batch.stream.push_back(edge),
                (Moved::Elements { .. }, Some(batch)) if in_backward || !of_copies => {
                    batch.sums.push_back(edge);
                }
                (Moved::Totals, Some(batch)) if in_backward => batch.sums.push_back(edge),
                _ => of.last.push(edge),
            }
        }
        of
    }

    /// Whether an edge sums gradients of ranks with the same elements and other tokens.
    pub fn is_of_copies(&self, edge: &Edge) -> bool {
        let of_first = self.plan.ranks[0].calls.iter().find(|call| call.edge == edge.number);
        of_first.is_some_and(|call| call.among == Among::Replicas)
    }

    /// The next gather, where it is of one of these groups.
    pub fn gather(&mut self, groups: &[usize]) -> Option<&'a Edge> {
        self.gathers
            .pop_front_if(|edge| group_of(edge).is_some_and(|group| groups.contains(&group)))
    }

    /// The next sum of the batch, where the gradients of its group are there.
    pub fn sum(&mut self, is_there: &[bool]) -> Option<&'a Edge> {
        let is_next = |edge: &mut &Edge| group_of(edge).is_none_or(|group| is_there[group]);
        self.batches.front_mut()?.sums.pop_front_if(is_next)
    }

    /// The next transfer of the stream in the batch.
    pub fn stream(&mut self) -> Option<&'a Edge> {
        self.batches.front_mut()?.stream.pop_front()
    }

    /// Ends the batch; what is left of it.
    pub fn end_batch(&mut self) -> impl Iterator<Item = &'a Edge> + use<'a> {
        let OfBatch { stream, sums } = self.batches.pop_front().unwrap_or_default();
        stream.into_iter().chain(sums)
    }

    /// What is summed behind all batches.
    pub fn last(&mut self) -> Vec<&'a Edge> {
        std::mem::take(&mut self.last)
    }

    /// Who does an edge with `rank`, and the bytes of each one's part; nobody where it has none.
    pub fn parts(&self, edge: &Edge, rank: usize) -> Parts {
        let Some((members, parts)) = self.plan.parts(edge, rank) else { return Default::default() };
        (members.to_vec(), parts.into_iter().map(|bytes| bytes as f64).collect())
    }

    /// Seconds of an edge on `rank` in one piece.
    pub fn seconds(&self, machine: &Machine, edge: &Edge, rank: usize) -> (f64, Span) {
        let (members, parts) = self.parts(edge, rank);
        match edge.kind {
            // As around a ring: a part of the sums, then all of them.
            EdgeKind::AllReduce if group_of(edge).is_some() => {
                let own = parts.first().copied().unwrap_or(0.0);
                let (seconds, span) = machine.gather_seconds(&members, own);
                (2.0 * seconds, span)
            }
            _ => machine.gather_seconds(&members, parts.iter().sum()),
        }
    }
}

/// The group whose elements move.
pub(super) fn group_of(edge: &Edge) -> Option<usize> {
    match edge.moved {
        Moved::Elements { group, .. } => Some(group),
        Moved::Tokens { .. } | Moved::Totals => None,
    }
}
