//! What a step moves between ranks beside the keys of attention, as data: weights that are gathered,
//! gradients that are summed, the stream between products, and sums that all ranks need.
//!
//! A step is a list of [`Event`]s, the same on all ranks: a stage reads values and gives values, each in a
//! [`Held`], which says what of it every rank has and of which sums it is a term. Where a value is in
//! another [`Held`] than the next stage reads, an [`Edge`] stands between them, and its kind follows from the
//! two ([`Held::transfer`]). A rank's [`Call`]s say with whom it does each edge, and who has which elements
//! there. [`StepPlan::prove`] holds all of it against one another.

mod derive;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use foveate::tensor::ElementType;

use crate::layout::Sharding;
use crate::map::Axis;
use crate::mesh::MeshAxis;
use crate::ranges::Ranges;

pub(crate) use derive::{LOSS, axes_of};

/// A group of parameters on the ranks of one place on `tensor`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GroupShape {
    /// Its name.
    pub name: String,
    /// Elements that are trained: the first ones of the group.
    pub trained: usize,
    /// Elements that are not.
    pub frozen: usize,
    /// Trained elements that other ranks of `tensor` hold, too.
    pub copied: Vec<CopiedElements>,
}

impl GroupShape {
    /// How many elements it has copies of. They lie elsewhere on each rank, in the same order.
    pub fn copied_among(&self, among: Copies) -> usize {
        let copied = self.copied.iter().filter(|copied| copied.among == among);
        copied.map(|copied| copied.elements.len()).sum()
    }
}

/// Trained elements of a group that several ranks of `tensor` hold.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CopiedElements {
    /// The elements, of the group.
    pub elements: Range<usize>,
    /// The ranks.
    pub among: Copies,
    /// What each of these ranks has terms of in their gradient.
    pub of: Axis,
}

/// Ranks of `tensor` that hold the same elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Copies {
    /// All of them.
    All,
    /// Those with the same key/value heads.
    KvHeads,
}

/// How long gathered weights stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stays {
    /// Until the layer has used them.
    Layer,
    /// From the forward to the backward pass of a batch.
    Batch,
    /// Until parameters are updated.
    Step,
}

/// Products of a layer that its backward pass computes again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Again {
    /// Queries, keys and values.
    pub qkv: bool,
    /// What attention adds to the stream.
    pub out: bool,
    /// Gate and up.
    pub gate_up: bool,
    /// What the feed-forward part adds to the stream, which takes gate and up.
    pub down: bool,
}

/// What a step is derived from, besides the map.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct StepShape {
    /// The groups of parameters by place on `tensor`: the embedding, the layers, the head.
    pub groups: Vec<Vec<GroupShape>>,
    /// Trained elements are cut between blocks of so many.
    pub block: usize,
    /// Whether the head's matrix is the embedding.
    pub tied: bool,
    /// How long gathered weights stay.
    pub stays: Stays,
    /// Of each layer, what is computed again.
    pub again: Vec<Again>,
    /// Batches whose gradients a step adds up.
    pub batches: usize,
    /// Whether each group is updated in the backward pass.
    pub in_backward: bool,
    /// Type of weights and of the stream.
    pub weights: ElementType,
    /// Type that gradients travel as.
    pub reduces: ElementType,
}

/// That what ranks have of a value are terms of a sum.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Terms {
    /// The axes over which ranks have other terms.
    pub over: Vec<MeshAxis>,
    /// What the terms are of: each rank has those of its part of these axes.
    pub of: Vec<Axis>,
    /// Where only copied elements are meant, those that these ranks hold.
    pub copies: Option<Copies>,
}

/// What of a value every rank has.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Held {
    /// Type of the elements.
    pub element: ElementType,
    /// Its axes, with the axes of the mesh that cut them, those of size 1 left out.
    pub axes: Vec<(Axis, Vec<MeshAxis>)>,
    /// The sums that it is a term of; none where it is complete.
    pub terms: Vec<Terms>,
}

/// What moves at an edge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EdgeKind {
    /// Every rank gets all parts.
    AllGather,
    /// Every rank gets its part of a sum.
    ReduceScatter,
    /// Every rank gets a sum.
    AllReduce,
}

impl EdgeKind {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllGather => "all-gather",
            Self::ReduceScatter => "reduce-scatter",
            Self::AllReduce => "all-reduce",
        }
    }

    /// Whether ranks' terms are added.
    pub fn sums(self) -> bool {
        self != Self::AllGather
    }
}

/// The way from one [`Held`] to another.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Transfer {
    /// What moves.
    pub kind: EdgeKind,
    /// Ranks that differ on these axes alone do it together.
    pub over: Vec<MeshAxis>,
    /// The sum that is made, as it was before, and whether all terms are in it behind the edge.
    pub sum: Option<(Terms, bool)>,
}

impl Held {
    /// What moves where ranks have a value like this and need it like `to`; `None` where no single transfer
    /// leads there.
    pub fn transfer(&self, to: &Self) -> Option<Transfer> {
        let names = |held: &Self| held.axes.iter().map(|(axis, _)| *axis).collect::<Vec<_>>();
        // The stream is the tokens, cut once more.
        let whole = |axes: Vec<Axis>| -> Vec<Axis> {
            axes.into_iter().map(|a| if a == Axis::Stream { Axis::Seq } else { a }).collect()
        };
        if whole(names(self)) != whole(names(to)) || self.element != to.element {
            return None;
        }
        let cut: Vec<_> = self.axes.iter().zip(&to.axes).filter(|(a, b)| a.1 != b.1).collect();
        let rest = |all: &[MeshAxis], some: &[MeshAxis]| -> Option<Vec<MeshAxis>> {
            let within = some.iter().all(|axis| all.contains(axis)) && some.len() < all.len();
            within.then(|| all.iter().copied().filter(|axis| !some.contains(axis)).collect())
        };
        let gone: Vec<&Terms> = self.terms.iter().filter(|t| !to.terms.contains(t)).collect();
        let come: Vec<&Terms> = to.terms.iter().filter(|t| !self.terms.contains(t)).collect();
        match (&gone[..], &come[..], &cut[..]) {
            ([], [], [(from, to)]) => {
                let (kind, over) = (EdgeKind::AllGather, rest(&from.1, &to.1)?);
                Some(Transfer { kind, over, sum: None })
            }
            ([before], come, cut) if come.len() <= 1 && cut.len() <= 1 => {
                let left = come.first().map_or(&[][..], |after| &after.over);
                let of_one =
                    |after: &&Terms| (&after.of, after.copies) == (&before.of, before.copies);
                let over = rest(&before.over, left).filter(|_| come.iter().all(of_one))?;
                let kind = match cut {
                    [] => EdgeKind::AllReduce,
                    [(from, to), ..] => {
                        rest(&to.1, &from.1).filter(|added| *added == over)?;
                        EdgeKind::ReduceScatter
                    }
                };
                Some(Transfer { kind, over, sum: Some(((*before).clone(), left.is_empty())) })
            }
            _ => None,
        }
    }
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axis = |(axis, on): &(Axis, Vec<MeshAxis>)| match on[..] {
            [] => axis.to_string(),
            [one] => format!("{axis}@{one}"),
            _ => format!("{axis}@({})", names(on)),
        };
        let axes: Vec<_> = self.axes.iter().map(axis).collect();
        write!(f, "{}[{}]", self.element, axes.join(", "))?;
        match &self.terms[..] {
            [] => Ok(()),
            terms => {
                let over = |t: &Terms| match t.copies {
                    None => names(&t.over),
                    Some(Copies::All) => format!("{} (copies)", names(&t.over)),
                    Some(Copies::KvHeads) => format!("{} (key/value heads)", names(&t.over)),
                };
                write!(f, " by {}", terms.iter().map(over).collect::<Vec<_>>().join(" and by "))
            }
        }
    }
}

fn names(axes: &[MeshAxis]) -> String {
    axes.iter().map(|a| a.name()).collect::<Vec<_>>().join(",")
}

/// What the parts of an edge are parts of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Moved {
    /// The elements of a group of parameters, by its index: those that are trained alone, or all.
    Elements {
        /// The group.
        group: usize,
        /// Whether what is not trained stays.
        trained: bool,
    },
    /// Tokens of a row, with so many elements each, of all rows of a rank.
    Tokens {
        /// Elements of a token.
        width: usize,
    },
    /// Four numbers, as one: the squares of the gradients of some groups, the loss, the z-loss and the count
    /// of labels.
    Totals,
}

/// A transfer between two layouts of a value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Edge {
    /// Its number among the edges of a step, by which calls name it.
    pub number: usize,
    /// The value as it is before, and behind it.
    pub values: [String; 2],
    /// What ranks have of it before.
    pub from: Held,
    /// What they have behind it.
    pub to: Held,
    /// What moves; it follows from the two.
    pub kind: EdgeKind,
    /// What its parts are parts of.
    pub moved: Moved,
    /// Whether it is added to what earlier batches gave.
    pub adds: bool,
    /// Type of what is sent.
    pub travels: ElementType,
    /// The stage that computes at the same time, where none waits for it.
    pub beside: Option<String>,
}

/// A value that a stage gives.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Given {
    /// Its name.
    pub value: String,
    /// What ranks have of it.
    pub held: Held,
    /// Whether it is added to what earlier batches gave.
    pub adds: bool,
}

/// A value that a stage reads.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Read {
    /// Its name.
    pub value: String,
    /// What each rank has to have of it.
    pub held: Held,
    /// How many batches have to be in it.
    pub batches: usize,
}

/// What ranks compute between two transfers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct StepStage {
    /// Its name.
    pub name: String,
    /// What it reads.
    pub reads: Vec<Read>,
    /// What it gives.
    pub gives: Vec<Given>,
    /// Values that are gone behind it.
    pub drops: Vec<String>,
}

/// A stage or an edge of a step.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// Ranks compute.
    Stage(StepStage),
    /// Ranks send.
    Edge(Edge),
}

/// Ranks that do an edge together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Among {
    /// Those that have other elements of the same parameters.
    Parameters,
    /// Those that have the same elements, and other tokens.
    Replicas,
    /// Those that have other heads, columns and token ids, and the same tokens.
    Tensor,
    /// Of these, those with the same key/value heads.
    KvHolders,
    /// All.
    All,
}

impl Among {
    /// All of them, in the order of [`RankStep::groups`].
    pub const ALL: [Self; 5] =
        [Self::Parameters, Self::Replicas, Self::Tensor, Self::KvHolders, Self::All];
}

/// A rank's part in an edge.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Call {
    /// The edge, by its number.
    pub edge: usize,
    /// With whom.
    pub among: Among,
    /// By member, in their order: what each gives of a gather, gets of a sum that is scattered, or adds to a
    /// sum that all get. Elements are those of the group; copied ones are counted among these.
    pub parts: Arc<Vec<Ranges>>,
}

/// What a rank owns of a group: weights, masters, gradients and moments.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Owned {
    /// The elements, of the group: those that are trained, then those that are not.
    pub elements: Ranges,
    /// Index of the first trained one in the random numbers of the optimiser, counted within the group.
    pub random_from: usize,
    /// Those whose gradients it counts in the norm.
    pub counted: Ranges,
}

/// What a rank has and does in a step.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RankStep {
    /// By group of parameters.
    pub owned: Arc<Vec<Owned>>,
    /// The members of each of [`Among::ALL`], in the order in which their terms are added.
    pub groups: Vec<Arc<Vec<usize>>>,
    /// What it does, in order.
    pub calls: Arc<Vec<Call>>,
    /// Whether it counts its tokens' losses and labels.
    pub counts_tokens: bool,
}

impl RankStep {
    /// The members of a group.
    pub fn members(&self, among: Among) -> &Arc<Vec<usize>> {
        &self.groups[among as usize]
    }
}

/// A step over the ranks of a mesh.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepPlan {
    /// The map and the cuts that layouts follow from.
    pub sharding: Sharding,
    /// What it was derived from.
    pub shape: StepShape,
    /// What happens, in order, on all ranks.
    pub events: Vec<Event>,
    /// The ranks, in order.
    pub ranks: Vec<RankStep>,
}

impl StepPlan {
    /// The edges, in order.
    pub fn edges(&self) -> impl Iterator<Item = &Edge> {
        self.events.iter().filter_map(|event| match event {
            Event::Edge(edge) => Some(edge),
            Event::Stage(_) => None,
        })
    }

    /// Bytes that a rank receives at an edge: of a sum that all get, as around a ring.
    ///
    /// # Panics
    /// When there is no such rank.
    pub fn received(&self, edge: &Edge, rank: usize) -> u64 {
        let Some((call, members)) = self.call(edge, rank) else { return 0 };
        let Some(place) = members.iter().position(|&member| member == rank) else { return 0 };
        let (len, others) = (|part: &Ranges| part.len() as u64, members.len() as u64 - 1);
        let all: u64 = call.parts.iter().map(len).sum();
        let entries = match edge.kind {
            EdgeKind::AllGather => all - len(&call.parts[place]),
            EdgeKind::ReduceScatter => len(&call.parts[place]) * others,
            EdgeKind::AllReduce => match edge.moved {
                // All are sent to all.
                Moved::Totals | Moved::Tokens { .. } => len(&call.parts[place]) * others,
                Moved::Elements { .. } => 2 * len(&call.parts[place]) * others / (others + 1),
            },
        };
        entries * self.entry_bytes(edge, rank)
    }

    /// Who does an edge with a rank, and the bytes of each one's part: what it gives of a gather, gets of a sum that
    /// is scattered, or adds to a sum that all get. None where the rank has no part in it.
    ///
    /// # Panics
    /// When there is no such rank.
    pub fn parts(&self, edge: &Edge, rank: usize) -> Option<(&[usize], Vec<u64>)> {
        let (call, members) = self.call(edge, rank)?;
        let bytes = |part: &Ranges| part.len() as u64 * self.entry_bytes(edge, rank);
        Some((members, call.parts.iter().map(bytes).collect()))
    }

    fn call(&self, edge: &Edge, rank: usize) -> Option<(&Call, &[usize])> {
        let own = &self.ranks[rank];
        let at = own.calls.binary_search_by_key(&edge.number, |call| call.edge).ok()?;
        let call = &own.calls[at];
        Some((call, own.members(call.among)))
    }

    /// Bytes of a token, an element or the totals of a rank on their way.
    fn entry_bytes(&self, edge: &Edge, rank: usize) -> u64 {
        let each = match edge.moved {
            Moved::Elements { .. } => 1,
            Moved::Tokens { width } => width * self.sharding.range(Axis::Batch, rank).len(),
            Moved::Totals => 4,
        };
        (each * edge.travels.bytes()) as u64
    }

    /// The trained and the other elements of a group of `shape` that part `part` of `parts` owns.
    pub fn owned(shape: &GroupShape, block: usize, part: usize, parts: usize) -> [Range<usize>; 2] {
        let even = |len: usize, block: usize| {
            let blocks = crate::layout::Cut::even(len.div_ceil(block), parts).range(part);
            (blocks.start * block).min(len)..(blocks.end * block).min(len)
        };
        let frozen = even(shape.frozen, 1);
        let behind = shape.trained + frozen.start..shape.trained + frozen.end;
        [even(shape.trained, block.max(1)), behind]
    }
}
