//! Parameters and gradients a group at a time: gathered from ranks, or updated in the backward pass.

use std::collections::VecDeque;

use crate::backend::{Array, Blocks, Moments, SumOverRanks, Weights};
use crate::error::NnError;
use crate::gathering::{Gathering, Phase};
use crate::held::{Held, Target};
use crate::optimizer::OptimizerStep;
use crate::parameters::ParameterLayout;
use crate::pass::{Parameters, Trained, clear_between};
use crate::share::Share;
use crate::sharing::StepRanks;
use crate::stream::counted_elsewhere;

/// The gradients of a group of parameters at a time.
#[derive(Debug, Default)]
pub struct PassingGradients<A = Vec<f32>> {
    /// Of the embedding, where it is the output projection, too; else no elements.
    embedding: A,
    /// Of any other group.
    group: A,
}

impl<A: Array> PassingGradients<A> {
    /// Makes them fit.
    pub(crate) fn fit<B: Blocks<Array = A>>(
        &mut self,
        blocks: &mut B,
        layout: &ParameterLayout,
    ) -> Result<(), NnError> {
        let dtype = blocks.precision().gradients;
        let [embedding, group] = layout.passing();
        blocks.resize("gradients of the embedding", &mut self.embedding, dtype, embedding)?;
        blocks.resize("gradients of a group", &mut self.group, dtype, group)
    }

    /// Begins the gradients of a group, which are written over; what belongs to no parameter is 0.
    fn begin<B: Blocks<Array = A>>(
        &mut self,
        blocks: &mut B,
        layout: &ParameterLayout,
        group: usize,
    ) -> Result<(), NnError> {
        self.fit(blocks, layout)?;
        let dtype = blocks.precision().gradients;
        for group in layout.begun_with(group) {
            let (array, place) = (self.of(layout, group), &layout.groups()[group].place);
            // As long as the group, whose norm is that of all elements.
            blocks.resize("gradients of a group", array, dtype, place.len())?;
            clear_between(blocks, layout, group, (array, place.start))?;
        }
        Ok(())
    }

    fn target(&mut self, layout: &ParameterLayout, group: usize) -> Target<'_, A> {
        let groups = layout.groups();
        let embedding = layout.is_tied().then_some((&mut self.embedding, groups[0].place.end));
        let (array, first) = (&mut self.group, groups[group].place.start);
        Target { array, first, embedding, accumulate: false }
    }

    /// Those of a group, which begin the array.
    fn of(&mut self, layout: &ParameterLayout, group: usize) -> &mut A {
        match layout.is_tied() && group == 0 {
            true => &mut self.embedding,
            false => &mut self.group,
        }
    }
}

/// A model whose parameters are cut over ranks, and whose gradients nobody wants.
pub(crate) struct Cut<'a, B: Blocks> {
    pub layout: &'a ParameterLayout,
    pub share: &'a Share,
    /// Of this rank.
    pub weights: &'a Weights<B::Array>,
    pub gathering: &'a mut Gathering<B>,
}

impl<B: Blocks> Parameters<B> for Cut<'_, B> {
    fn need(&mut self, blocks: &mut B, stage: (usize, Phase)) -> Result<(), NnError> {
        self.gathering.need(blocks, self.weights, self.layout, stage)
    }

    fn held(&self) -> Held<'_, B::Array> {
        Held::Groups(self.layout, self.gathering.held())
    }
}

/// [`Cut`], with the own part of the sum of the gradients of all ranks.
pub(crate) struct Summed<'a, B: Blocks> {
    pub cut: Cut<'a, B>,
    pub passing: &'a mut PassingGradients<B::Array>,
    /// The group that the pass is at.
    pub at: usize,
    /// The own part.
    pub into: &'a mut B::Array,
    /// Whether it is added to what is there.
    pub accumulate: bool,
}

impl<B: Blocks> Parameters<B> for Summed<'_, B> {
    fn need(&mut self, blocks: &mut B, stage: (usize, Phase)) -> Result<(), NnError> {
        self.cut.need(blocks, stage)
    }

    fn held(&self) -> Held<'_, B::Array> {
        Parameters::<B>::held(&self.cut)
    }
}

impl<B: Blocks> Trained<B> for Summed<'_, B> {
    fn begin(&mut self, blocks: &mut B, group: usize) -> Result<(), NnError> {
        self.at = group;
        self.passing.begin(blocks, self.cut.layout, group)
    }

    fn split(&mut self) -> (Held<'_, B::Array>, Target<'_, B::Array>) {
        let Cut { layout, gathering, .. } = &self.cut;
        (Held::Groups(layout, gathering.held()), self.passing.target(layout, self.at))
    }

    fn complete(&mut self, blocks: &mut B, group: usize, _: &mut B::Totals) -> Result<(), NnError> {
        let Self { cut: Cut { layout, share, gathering, .. }, passing, into, accumulate, .. } =
            self;
        let first = |group: usize| share.groups()[group].first_trained();
        let gradients = passing.of(layout, group);
        gathering.reduce(blocks, group, gradients, (into, first(group), *accumulate))?;
        while let Some(summed) = gathering.summed(usize::from(group > 0)) {
            gathering.reduced(blocks, (into, first(summed), *accumulate))?;
        }
        Ok(())
    }
}

/// The ranks that take a step, and what of the parameters this one has.
pub(crate) struct Owners<'a> {
    pub layout: &'a ParameterLayout,
    pub share: &'a Share,
    /// None where there is one rank.
    pub ranks: Option<&'a StepRanks>,
}

impl Owners<'_> {
    /// [`Blocks::clip`] by the norm over all of them; `gradients` are of trained elements of the share from
    /// the given one on.
    pub fn clip<B: Blocks>(
        self,
        blocks: &mut B,
        step: &OptimizerStep,
        (gradients, first): (&B::Array, usize),
        more: bool,
        totals: &mut B::Totals,
    ) -> Result<(), NnError> {
        let Self { layout, share, ranks } = self;
        // Ranks with the same gradients know of each other's losses from the first of them.
        let Some(ranks) = ranks.filter(|ranks| ranks.cut || !more) else {
            return blocks.clip(step, gradients, more, None, totals);
        };
        let elsewhere = &counted_elsewhere(layout, share, [first, gradients.elems()]);
        let sum = SumOverRanks { elsewhere, sum: &mut |own| ranks.sum(own) };
        blocks.clip(step, gradients, more, Some(sum), totals)
    }
}

/// A model that is updated a group at a time, as soon as the gradients of a group are there. Its
/// parameters are cut over ranks where it gathers them.
pub(crate) struct Updated<'a, B: Blocks> {
    pub layout: &'a ParameterLayout,
    pub share: &'a Share,
    pub weights: &'a mut Weights<B::Array>,
    pub gathering: Option<&'a mut Gathering<B>>,
    /// The own parts of gradients that are being summed, in order.
    pub summing: VecDeque<B::Array>,
    pub passing: &'a mut PassingGradients<B::Array>,
    /// The group that the pass is at.
    pub at: usize,
    pub step: &'a OptimizerStep,
    /// Of each group.
    pub spans: &'a [B::Spans],
    pub moments: &'a mut Moments<B::Array>,
    /// Whether a group was updated.
    pub more: bool,
    /// Those that take the step, where there are others.
    pub ranks: Option<&'a StepRanks>,
}

impl<B: Blocks> Parameters<B> for Updated<'_, B> {
    fn need(&mut self, blocks: &mut B, stage: (usize, Phase)) -> Result<(), NnError> {
        let Self { layout, weights, gathering, .. } = self;
        match gathering {
            Some(gathering) => gathering.need(blocks, weights, layout, stage),
            None => Ok(()),
        }
    }

    fn held(&self) -> Held<'_, B::Array> {
        match &self.gathering {
            Some(gathering) => Held::Groups(self.layout, gathering.held()),
            None => Held::All(&self.weights.array),
        }
    }
}

impl<B: Blocks> Trained<B> for Updated<'_, B> {
    fn begin(&mut self, blocks: &mut B, group: usize) -> Result<(), NnError> {
        self.at = group;
        self.passing.begin(blocks, self.layout, group)
    }

    fn split(&mut self) -> (Held<'_, B::Array>, Target<'_, B::Array>) {
        let held = match &self.gathering {
            Some(gathering) => Held::Groups(self.layout, gathering.held()),
            None => Held::All(&self.weights.array),
        };
        (held, self.passing.target(self.layout, self.at))
    }

    fn complete(
        &mut self,
        blocks: &mut B,
        group: usize,
        totals: &mut B::Totals,
    ) -> Result<(), NnError> {
        let Self {
            layout,
            share,
            weights,
            gathering,
            summing,
            passing,
            step,
            spans,
            moments,
            more,
            ranks,
            ..
        } = self;
        let Some(gathering) = gathering else {
            let place = &layout.groups()[group].place;
            if place.is_empty() {
                return Ok(());
            }
            let gradients = passing.of(layout, group);
            let owners = Owners { layout, share, ranks: *ranks };
            owners.clip(blocks, step, (gradients, place.start), *more, totals)?;
            *more = true;
            let gradients = (&*gradients, place.start);
            let (spans, trained) = (&spans[group], share.trained());
            return blocks.update(step, spans, weights, gradients, moments, trained, totals);
        };
        let (mut own, dtype) = (B::Array::default(), blocks.precision().gradients);
        let elems = share.groups()[group].trained.len();
        blocks.resize("gradients of a part", &mut own, dtype, elems)?;
        gathering.reduce(blocks, group, passing.of(layout, group), (&mut own, 0, false))?;
        if !layout.groups()[group].place.is_empty() {
            summing.push_back(own);
        }
        while let Some(group) = gathering.summed(usize::from(group > 0)) {
            let mut array = summing.pop_front().expect("it is being summed");
            gathering.reduced(blocks, (&mut array, 0, false))?;
            let first = share.groups()[group].first_trained();
            let owners = Owners { layout, share, ranks: *ranks };
            owners.clip(blocks, step, (&array, first), *more, totals)?;
            *more = true;
            let gradients = (&array, first);
            let (spans, trained) = (&spans[group], share.trained());
            blocks.update(step, spans, weights, gradients, moments, trained, totals)?;
        }
        Ok(())
    }
}
