//! Groups of parameters that are cut over ranks, gathered for the stages that need them.
//!
//! A pass gathers a group one stage ahead, so that the transfer runs beside the layer before, and drops
//! it after use. The gradients of a group are summed over ranks while the backward pass goes on with the
//! next one, and only the own part of the sum is kept. How parts reach other ranks is up to [`Transfers`].

use std::collections::VecDeque;

use crate::backend::{Blocks, PartMut, Transfers, Weights};
use crate::error::NnError;
use crate::parameters::ParameterLayout;
use crate::share::{Cutting, Reshard};
use crate::sharing::CutGroup;

/// Which way a pass goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Forward,
    Backward,
}

/// The groups that a pass over `layers` layers uses, in order. The head's backward pass follows its
/// forward pass at once, and that of the embedding reads no parameters.
fn stages(layers: usize, backward: bool) -> impl Iterator<Item = (usize, Phase)> {
    let forward = (0..layers + 2).map(|group| (group, Phase::Forward));
    let back = (1..=layers).rev().map(|group| (group, Phase::Backward));
    forward.chain(back.filter(move |_| backward))
}

/// When groups are gathered and dropped in the stages of a pass.
#[derive(Clone, Debug)]
struct Schedule {
    reshard: Reshard,
    /// Stages that have not begun.
    ahead: VecDeque<(usize, Phase)>,
    /// Whether a group is gathered, or is being.
    held: Vec<bool>,
}

/// What happens before a stage.
#[derive(Debug, Default)]
struct Turn {
    /// Groups that are dropped.
    dropped: Vec<usize>,
    /// Groups whose gathering begins, in order: those of this stage, then those of the next.
    begun: Vec<usize>,
    /// Groups that the stage uses.
    used: Vec<usize>,
}

impl Schedule {
    fn new(layout: &ParameterLayout, reshard: Reshard) -> Self {
        Self { reshard, ahead: VecDeque::new(), held: vec![false; layout.groups().len()] }
    }

    fn start(&mut self, layout: &ParameterLayout, backward: bool) {
        self.ahead = stages(layout.groups().len() - 2, backward).collect();
    }

    fn turn(&mut self, layout: &ParameterLayout) -> Turn {
        let Some((now, _)) = self.ahead.pop_front() else { return Turn::default() };
        let used = layout.used_with(now);
        let of = |&(group, _): &(usize, Phase)| layout.used_with(group);
        let next = self.ahead.front().map_or(Vec::new(), of);
        let later: Vec<usize> = match self.reshard {
            Reshard::Always => next.clone(),
            Reshard::AfterBackward => self.ahead.iter().flat_map(of).collect(),
            Reshard::Never => (0..self.held.len()).collect(),
        };
        let stays = |group: &usize| used.contains(group) || later.contains(group);
        let dropped: Vec<usize> =
            (0..self.held.len()).filter(|group| self.held[*group] && !stays(group)).collect();
        dropped.iter().for_each(|&group| self.held[group] = false);
        let mut begun = Vec::new();
        for &group in used.iter().chain(&next) {
            if !std::mem::replace(&mut self.held[group], true) {
                begun.push(group);
            }
        }
        Turn { dropped, begun, used }
    }

    /// Elements of what is gathered, or on its way.
    fn elems(&self, layout: &ParameterLayout) -> usize {
        let held = layout.groups().iter().zip(&self.held).filter(|(_, held)| **held);
        held.fold(0, |sum, (group, _)| sum.saturating_add(group.elems()))
    }

    fn forget(&mut self) {
        self.held.fill(false);
    }
}

/// A transfer of a group of parameters in a step, and what runs beside it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupTransfer {
    /// The group, by its index.
    pub group: usize,
    /// What moves.
    pub kind: GroupTransferKind,
    /// The stage that computes while it is under way, by its group and whether it is of the backward
    /// pass; none waits for it.
    pub beside: Option<(usize, bool)>,
}

/// What moves of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupTransferKind {
    /// Its parameters, from parts to all of them on every rank.
    Gather,
    /// Its gradients, from those of every rank to parts of their sum.
    Reduce,
}

impl ParameterLayout {
    /// The transfers of one batch of a step in which parameters are cut, in the order in which they begin.
    pub fn transfers(&self, reshard: Reshard) -> Vec<GroupTransfer> {
        let (layers, mut schedule) = (self.groups().len() - 2, Schedule::new(self, reshard));
        schedule.start(self, true);
        let mut all = Vec::new();
        let reduce =
            |group: usize, beside| GroupTransfer { group, kind: GroupTransferKind::Reduce, beside };
        for stage @ (at, phase) in stages(layers, true) {
            let turn = schedule.turn(self);
            for group in turn.begun {
                // What a stage uses itself is waited for.
                let beside =
                    (!turn.used.contains(&group)).then_some((at, phase == Phase::Backward));
                all.push(GroupTransfer { group, kind: GroupTransferKind::Gather, beside });
            }
            let is_head = stage == (layers + 1, Phase::Forward);
            if is_head || phase == Phase::Backward {
                let next = if is_head { layers } else { at - 1 };
                all.push(reduce(at, Some((next, true))));
            }
        }
        all.push(reduce(0, None));
        all.retain(|t| {
            t.kind == GroupTransferKind::Gather || !self.groups()[t.group].place.is_empty()
        });
        all
    }
}

/// Groups that come and go.
pub(crate) struct Gathering<B: Blocks> {
    cutting: Cutting,
    transfers: Box<dyn Transfers<B>>,
    cuts: Vec<CutGroup>,
    /// The gathered groups: what is trained of each, then what is not; no elements of the others.
    held: Vec<B::Array>,
    /// Groups whose gathering has begun, in order.
    coming: VecDeque<usize>,
    schedule: Schedule,
    /// Groups whose gradients are being summed, in order.
    summing: VecDeque<usize>,
    /// The most elements that were gathered at once.
    most: usize,
}

impl<B: Blocks> Gathering<B> {
    /// Of rank `part` of those that `cutting` is over.
    pub fn new(
        layout: &ParameterLayout,
        cutting: Cutting,
        part: usize,
        transfers: Box<dyn Transfers<B>>,
    ) -> Self {
        let mut held = Vec::new();
        held.resize_with(layout.groups().len(), B::Array::default);
        Self {
            cutting,
            transfers,
            cuts: CutGroup::all(layout, part, cutting.parts),
            held,
            coming: VecDeque::new(),
            schedule: Schedule::new(layout, cutting.reshard),
            summing: VecDeque::new(),
            most: 0,
        }
    }

    pub fn held(&self) -> &[B::Array] {
        &self.held
    }

    /// The most elements that were gathered at once.
    pub fn most(&self) -> usize {
        self.most
    }

    /// Begins a pass.
    pub fn start(&mut self, layout: &ParameterLayout, backward: bool) {
        self.schedule.start(layout, backward);
    }

    /// Waits for what a stage uses, and begins to gather what the next one does.
    pub fn need(
        &mut self,
        blocks: &mut B,
        own: &Weights<B::Array>,
        layout: &ParameterLayout,
        stage: (usize, Phase),
    ) -> Result<(), NnError> {
        debug_assert_eq!(self.schedule.ahead.front(), Some(&stage), "stages come in their order");
        let Turn { dropped, begun, used } = self.schedule.turn(layout);
        dropped.into_iter().for_each(|group| self.held[group] = B::Array::default());
        self.most = self.most.max(self.schedule.elems(layout));
        let dtype = blocks.precision().weights;
        for group in begun {
            let (cut, array) = (&self.cuts[group], &mut self.held[group]);
            blocks.resize("gathered parameters", array, dtype, cut.elems())?;
            self.transfers.gather(blocks, &own.array, cut, array)?;
            self.coming.push_back(group);
        }
        while used.iter().any(|group| self.coming.contains(group)) {
            let group = self.coming.pop_front().expect("one is coming");
            self.transfers.gathered(blocks, &self.cuts[group], &mut self.held[group])?;
        }
        Ok(())
    }

    /// The pass is over.
    pub fn end(&mut self) {
        if self.cutting.reshard != Reshard::Never {
            self.updated();
        }
    }

    /// Parameters are about to be updated: what was gathered is gone.
    pub fn updated(&mut self) {
        self.held.iter_mut().for_each(|array| *array = B::Array::default());
        self.schedule.forget();
    }

    /// Begins to sum the gradients of a group, which `gradients` begins with: the own part goes to
    /// `into`, as many elements from `first` on. Nothing where nothing of the group is trained.
    pub fn reduce(
        &mut self,
        blocks: &mut B,
        group: usize,
        gradients: &mut B::Array,
        (into, first, accumulate): (&mut B::Array, usize, bool),
    ) -> Result<(), NnError> {
        let cut = &self.cuts[group];
        if cut.trained() == 0 {
            return Ok(());
        }
        self.summing.push_back(group);
        let place = first..first + cut.own().len();
        self.transfers.reduce(blocks, gradients, cut, PartMut { array: into, place, accumulate })
    }

    /// The group whose sum began first, where more than `most` are under way: [`Gathering::reduced`] is
    /// next.
    pub fn summed(&self, most: usize) -> Option<usize> {
        self.summing.front().copied().filter(|_| self.summing.len() > most)
    }

    /// Waits for the sum that began first, with `into` as it began.
    pub fn reduced(
        &mut self,
        blocks: &mut B,
        (into, first, accumulate): (&mut B::Array, usize, bool),
    ) -> Result<(), NnError> {
        let group = self.summing.pop_front().expect("one is under way");
        let cut = &self.cuts[group];
        let place = first..first + cut.own().len();
        self.transfers.reduced(blocks, cut, PartMut { array: into, place, accumulate })
    }
}

impl ParameterLayout {
    /// Elements of the most that is gathered at once.
    pub(crate) fn gathered(&self, reshard: Reshard) -> usize {
        let mut schedule = Schedule::new(self, reshard);
        schedule.start(self, true);
        let mut most = 0;
        while !schedule.ahead.is_empty() {
            schedule.turn(self);
            most = most.max(schedule.elems(self));
        }
        most
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parameters::ParameterGroup;
    use crate::share::tests::layouts;
    use crate::tests::tiny;

    #[test]
    fn at_once_a_pass_gathers_two_stages_or_all() {
        for layout in layouts() {
            let groups: Vec<usize> = layout.groups().iter().map(ParameterGroup::elems).collect();
            let layers = &groups[1..groups.len() - 1];
            let tied = layout.is_tied();
            let head = groups[groups.len() - 1] + if tied { groups[0] } else { 0 };
            let last = head + layers[layers.len() - 1];
            let most = last.max(groups[0] + layers[0]).max(layers.iter().sum());
            assert_eq!(layers.len(), 2);
            // A tied embedding is on its way again while the last layer runs.
            assert_eq!(layout.gathered(Reshard::Always), most);
            assert_eq!(layout.gathered(Reshard::Never), layout.elems());
            let embedding = if tied { 0 } else { groups[0] };
            let kept = (layout.elems() - embedding).max(groups[0] + layers[0]);
            assert_eq!(layout.gathered(Reshard::AfterBackward), kept);
        }
    }

    #[test]
    fn a_batch_gathers_each_group_ahead_and_sums_its_gradients_behind() {
        use GroupTransferKind::{Gather, Reduce};
        let layout = ParameterLayout::new(&tiny(false), &[], &|_| false).unwrap();
        let of = |reshard| {
            let transfers = layout.transfers(reshard).into_iter();
            transfers.map(|t| (t.kind, t.group, t.beside)).collect::<Vec<_>>()
        };
        let forward = [
            (Gather, 0, None),
            (Gather, 1, Some((0, false))),
            (Gather, 2, Some((1, false))),
            (Gather, 3, Some((2, false))),
        ];
        let back = [(Reduce, 3, Some((2, true))), (Reduce, 2, Some((1, true)))];
        let last = [(Reduce, 1, Some((0, true))), (Reduce, 0, None)];
        // The last layer stays for its backward pass, which is the stage behind the head's.
        let again = [back[0], (Gather, 1, Some((2, true))), back[1]];
        assert_eq!(of(Reshard::Always), [&forward[..], &again, &last].concat());
        assert_eq!(of(Reshard::Never), [&forward[..], &back, &last].concat());
        assert_eq!(of(Reshard::AfterBackward), of(Reshard::Never));
        let frozen = |name: &str| name.contains("layers.1");
        let layout = ParameterLayout::new(&tiny(false), &[], &frozen).unwrap();
        let sums = layout.transfers(Reshard::Always).into_iter().filter(|t| t.kind == Reduce);
        assert_eq!(sums.map(|t| t.group).collect::<Vec<_>>(), [3, 1, 0]);
    }
}
