//! Losses, gradients and updates of a model.

use std::collections::VecDeque;
use std::time::Instant;

use foveate::DType;

use super::prepared::{Begun, Fixed, Prepared};
use super::{Gradients, Model, Running, lock};
use crate::account::{StepKind, Training};
use crate::backend::{Array, Blocks, Moments, Part, PartMut, Sums, numbers_of};
use crate::batch::{Batch, LossSum, Queued};
use crate::context::ContextAttention;
use crate::error::NnError;
use crate::gathering::Gathering;
use crate::groups::{Cut, Owners, PassingGradients, Summed, Updated};
use crate::held::Target;
use crate::offload::Offload;
use crate::optimizer::OptimizerStep;
use crate::pass::Whole;
use crate::stream::leave_to_first;
use crate::tape::Recomputation;

impl<B: Blocks> Model<B> {
    /// Queues the loss of a batch and its gradients, which are added to `totals` and `gradients`.
    /// Gradients are of the sum over labelled tokens; on the CPU they are bitwise the same for every
    /// `recompute` and any number of threads.
    ///
    /// # Errors
    /// When the batch does not fit the model, gradients are not of this model's shapes, or the
    /// device fails. After an error in attention the gradients hold parts of a step.
    pub fn accumulate(
        &self,
        batch: &Batch<'_>,
        gradients: &mut Gradients<B::Array>,
        recompute: impl Into<Recomputation>,
        totals: &mut B::Totals,
    ) -> Result<Queued, NnError> {
        self.accumulate_over(batch, None, gradients, recompute, totals)
    }

    /// [`Model::accumulate`] of a batch that may be this rank's part of one whose tokens are on several
    /// ranks: losses and gradients are those of its tokens, and attention is that of `context`. All
    /// ranks that share the rows call it.
    ///
    /// # Errors
    /// Those of [`Model::accumulate`] and of `context`.
    pub fn accumulate_over(
        &self,
        batch: &Batch<'_>,
        context: Option<&mut dyn ContextAttention>,
        gradients: &mut Gradients<B::Array>,
        recompute: impl Into<Recomputation>,
        totals: &mut B::Totals,
    ) -> Result<Queued, NnError> {
        let (found, want) = (gradients.array.elems(), self.share.trained());
        if found != want {
            let reason = format!("have {found} elements; this model's have {want}");
            return Err(NnError::parameter("gradients", reason));
        }
        if gradients.one_batch && !gradients.cleared {
            let reason = "are of one batch a step and hold one; clear them first";
            return Err(NnError::parameter("gradients", reason));
        }
        self.check_parameters()?;
        let (Gradients { array, cleared, one_batch }, recompute) = (gradients, recompute.into());
        let (running, fixed) = (&mut *self.running(), self.fixed());
        let shares = running.shares(fixed, context.is_some());
        let one_batch = *one_batch && shares;
        let kind = StepKind::Training(Training { one_batch, ..recompute.into() });
        let prepared = Prepared::new(running, fixed, batch, context.as_deref())?;
        let programs = prepared.of_layers(&self.programs);
        let idle = one_batch.then_some(&*array);
        let Begun { mut pass, blocks, workspace, gathering, passing, .. } =
            running.begin(fixed, &prepared, &programs, context, kind, idle)?;
        let accumulate = !std::mem::take(cleared);
        match gathering {
            None => {
                if accumulate {
                    leave_to_first(blocks, &self.layout, array)?;
                }
                let reused = one_batch.then_some(&self.layout);
                let weights = &self.weights.array;
                let of = [accumulate, one_batch].map(u64::from);
                let of = of.into_iter().chain([u64::from(self.z_weight.to_bits())]);
                let numbers = recompute.numbers().into_iter().chain(of);
                let arrays = [weights, &*array].into_iter().flat_map(numbers_of);
                let identity =
                    prepared.identity(numbers.chain(arrays).chain(workspace.arena.numbers()));
                let mut work = |blocks: &mut B, totals: &mut B::Totals| {
                    // It runs a second time where its recording fails.
                    workspace.arena.rewind();
                    let gradients = Some(Target::whole(array, accumulate));
                    let mut all = Whole { weights, gradients, reused };
                    pass.forward_backward(blocks, &mut all, workspace, recompute, totals)
                };
                // Copies to the host and back are on queues that no record has.
                match shares && recompute.offload == Offload::None {
                    true => blocks.queue_pass(&identity, totals, &mut work)?,
                    false => work(blocks, totals)?,
                }
            }
            Some(gathering) => {
                passing.fit(blocks, &self.layout)?;
                gathering.start(&self.layout, true);
                let cut = self.cut_by(gathering);
                let mut sums = Summed { cut, passing, at: 0, into: array, accumulate };
                pass.forward_backward(blocks, &mut sums, workspace, recompute, totals)?;
                gathering.end();
            }
        }
        let live = pass.live_pairs(blocks, &self.programs, &prepared.plans, batch);
        Ok(prepared.queued(live, batch))
    }

    /// Adds a z-loss to the loss whose gradients [`Model::accumulate`] and [`Model::step_in_backward`] take:
    /// `weight · ln² Σ eᶻ` of each labelled token with the logits z, which keeps the sum near 1 (PaLM, section 5).
    /// Losses alone ([`Model::loss`]) are without it; 0 takes it away.
    ///
    /// # Errors
    /// When `weight` is negative or not finite.
    pub fn set_z_loss(&mut self, weight: f32) -> Result<(), NnError> {
        if !(weight >= 0.0 && weight.is_finite()) {
            let reason = format!("is {weight}; it is at least 0 and finite");
            return Err(NnError::config("z_loss", reason));
        }
        self.z_weight = weight;
        Ok(())
    }

    pub(super) fn fixed(&self) -> Fixed<'_> {
        let &Self { ref config, ref local, ref part, ref layout, ref programs, z_weight, .. } =
            self;
        Fixed { config, local, part, layout, programs, z_weight }
    }

    fn cut_by<'a>(&'a self, gathering: &'a mut Gathering<B>) -> Cut<'a, B> {
        Cut { layout: &self.layout, share: &self.share, weights: &self.weights, gathering }
    }

    /// Sums gradients over ranks that hold the same ones: on the device where it does ([`Model::replicas`]),
    /// else by `sum`, which takes them a piece at a time, in order, in f32. Then it waits for the device.
    ///
    /// # Errors
    /// Those of `sum`, or when the device fails.
    pub fn reduce<E: From<NnError>>(
        &self,
        gradients: &mut Gradients<B::Array>,
        mut sum: impl FnMut(&mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        const PIECE: usize = 4 << 20;
        let Running { blocks, replicas, .. } = &mut *self.running();
        let array = &mut gradients.array;
        let elems = array.elems();
        if let Some(replicas) = replicas {
            let all = PartMut { array, place: 0..elems, accumulate: false };
            return Ok(replicas.sum(blocks, all)?);
        }
        let mut values = vec![0.0; PIECE.min(elems)];
        for start in (0..elems).step_by(PIECE) {
            let place = start..elems.min(start + PIECE);
            let values = &mut values[..place.len()];
            blocks.download(Part { array, place: place.clone() }, values)?;
            sum(values)?;
            blocks.fill(PartMut { array, place, accumulate: false }, values)?;
        }
        Ok(())
    }

    /// Queues a step on one batch in which each group of parameters is updated as soon as its
    /// gradients are there, in the backward pass: gradients take the memory of the largest group, and of
    /// the embedding where it is the output projection, too. `step.clip_norm` must be 0: the norm of
    /// all gradients is known only at the end. Where the loss is not finite no group is updated; where the
    /// norm of a group is not, neither it nor a later one. `spans` are [`Model::group_spans`].
    ///
    /// # Errors
    /// Those of [`Model::accumulate_over`], or when a norm is to be clipped.
    pub fn step_in_backward(
        &mut self,
        batch: &Batch<'_>,
        context: Option<&mut dyn ContextAttention>,
        gradients: &mut PassingGradients<B::Array>,
        recompute: impl Into<Recomputation>,
        step: &OptimizerStep,
        spans: &[B::Spans],
        moments: &mut Moments<B::Array>,
        totals: &mut B::Totals,
    ) -> Result<Queued, NnError> {
        if step.clip_norm != 0.0 {
            let reason = "must be 0 where parameters are updated in the backward pass: the norm of all \
                          gradients is known only when the last is computed";
            return Err(NnError::config("clip_norm", reason));
        }
        let recompute = recompute.into();
        self.check_parameters()?;
        let z_weight = self.z_weight;
        let Self { config, local, part, programs, layout, share, weights, running, .. } = self;
        let (running, fixed) =
            (&mut *lock(running), Fixed { config, local, part, layout, programs, z_weight });
        let kind = StepKind::Training(Training { in_backward: true, ..recompute.into() });
        let prepared = Prepared::new(running, fixed, batch, context.as_deref())?;
        let of_layers = prepared.of_layers(programs);
        let Begun { mut pass, blocks, workspace, gathering, ranks, .. } =
            running.begin(fixed, &prepared, &of_layers, context, kind, None)?;
        if let Some(gathering) = gathering {
            gathering.start(layout, true);
        }
        let mut parameters = Updated {
            layout,
            share,
            weights,
            gathering: gathering.as_mut(),
            summing: VecDeque::new(),
            passing: gradients,
            at: 0,
            step,
            spans,
            moments,
            more: false,
            ranks,
        };
        pass.forward_backward(blocks, &mut parameters, workspace, recompute, totals)?;
        if let Some(gathering) = gathering {
            gathering.updated();
        }
        let live = pass.live_pairs(blocks, programs, &prepared.plans, batch);
        Ok(prepared.queued(live, batch))
    }

    /// Queues one step of the optimiser with the gradients of the batches that `totals` has added up: their
    /// mean over labelled tokens, clipped. What `totals` has added up becomes that of all ranks that take the
    /// step. Nothing changes where the loss or the norm is not finite, nor by
    /// steps that are queued behind it before [`Model::read`] has told of it: a replay sees the weights
    /// that the step saw.
    ///
    /// # Errors
    /// When no batch was added since gradients were cleared, or the device fails.
    pub fn update(
        &mut self,
        step: &OptimizerStep,
        spans: &B::Spans,
        gradients: &Gradients<B::Array>,
        moments: &mut Moments<B::Array>,
        totals: &mut B::Totals,
    ) -> Result<(), NnError> {
        if gradients.cleared {
            let reason = "hold no batch: none was added since they were cleared";
            return Err(NnError::parameter("gradients", reason));
        }
        let Running { blocks, gathering, ranks, .. } = &mut *lock(&self.running);
        if let Some(gathering) = gathering {
            gathering.updated();
        }
        let owners = Owners { layout: &self.layout, share: &self.share, ranks: ranks.as_ref() };
        owners.clip(blocks, step, (&gradients.array, 0), false, totals)?;
        let (weights, gradients) = (&mut self.weights, (&gradients.array, 0));
        blocks.update(step, spans, weights, gradients, moments, self.share.trained(), totals)
    }

    /// The loss of a batch, summed over its labelled tokens.
    ///
    /// # Errors
    /// When the batch does not fit the model, or attention reads a buffer out of its bounds.
    pub fn loss(&self, batch: &Batch<'_>) -> Result<LossSum, NnError> {
        self.loss_over(batch, None, None)
    }

    /// [`Model::loss`] of what may be this rank's part of a batch: see [`Model::accumulate_over`].
    ///
    /// `between` are gradients that hold nothing between two steps. Where they are of one batch a step
    /// ([`Model::gradients_of_one_batch`]) activations lie in their memory, as those of the steps do, so
    /// that an evaluation between steps of batches of as many rows takes no more memory than the steps;
    /// they count as cleared behind it.
    ///
    /// # Errors
    /// Those of [`Model::loss`] and of `context`.
    pub fn loss_over(
        &self,
        batch: &Batch<'_>,
        context: Option<&mut dyn ContextAttention>,
        between: Option<&mut Gradients<B::Array>>,
    ) -> Result<LossSum, NnError> {
        let start = Instant::now();
        let running = &mut *self.running();
        let mut totals = running.blocks.totals()?;
        let queued = self.run_loss(running, batch, context, None, between, &mut totals)?;
        let sums = running.blocks.read(totals)?;
        Ok(loss_sum(&queued, &sums, start))
    }

    /// The loss of each token of a batch in nats, `[rows, len]`; 0 where it has no label. `between` are
    /// those of [`Model::loss_over`].
    ///
    /// # Errors
    /// Those of [`Model::loss`].
    pub fn token_losses(
        &self,
        batch: &Batch<'_>,
        between: Option<&mut Gradients<B::Array>>,
    ) -> Result<Vec<f64>, NnError> {
        batch.validate(&self.config)?;
        let running = &mut *self.running();
        let (mut each, mut losses) = (B::Array::default(), vec![0.0; batch.tokens_total()]);
        running.blocks.resize("token losses", &mut each, DType::F32, losses.len())?;
        let mut totals = running.blocks.totals()?;
        self.run_loss(running, batch, None, Some(&mut each), between, &mut totals)?;
        running.blocks.read(totals)?;
        running.blocks.download(Part::whole(&each), &mut losses)?;
        Ok(losses.into_iter().map(f64::from).collect())
    }

    /// The loss of a batch, summed over its labelled tokens, and the gradients of that sum, which
    /// are added to `gradients`: [`Model::accumulate`], waited for.
    ///
    /// # Errors
    /// Those of [`Model::accumulate`].
    pub fn forward_backward(
        &self,
        batch: &Batch<'_>,
        gradients: &mut Gradients<B::Array>,
        recompute: impl Into<Recomputation>,
    ) -> Result<LossSum, NnError> {
        let start = Instant::now();
        let mut totals = self.totals()?;
        let queued = self.accumulate(batch, gradients, recompute, &mut totals)?;
        Ok(loss_sum(&queued, &self.read(totals)?, start))
    }

    fn run_loss(
        &self,
        running: &mut Running<B>,
        batch: &Batch<'_>,
        context: Option<&mut dyn ContextAttention>,
        each: Option<&mut B::Array>,
        between: Option<&mut Gradients<B::Array>>,
        totals: &mut B::Totals,
    ) -> Result<Queued, NnError> {
        self.check_parameters()?;
        let fixed = self.fixed();
        let shares = running.shares(fixed, context.is_some());
        let idle = between.filter(|_| shares).and_then(Gradients::idle);
        let prepared = Prepared::new(running, fixed, batch, context.as_deref())?;
        let programs = prepared.of_layers(&self.programs);
        let Begun { mut pass, blocks, workspace, gathering, .. } =
            running.begin(fixed, &prepared, &programs, context, StepKind::Loss, idle)?;
        match gathering {
            None => {
                let weights = &self.weights.array;
                let mut all = Whole { weights, gradients: None, reused: None };
                pass.loss(blocks, &mut all, workspace, each, totals)?;
            }
            Some(gathering) => {
                gathering.start(&self.layout, false);
                let mut cut = self.cut_by(gathering);
                pass.loss(blocks, &mut cut, workspace, each, totals)?;
                gathering.end();
            }
        }
        Ok(prepared.queued(None, batch))
    }
}

fn loss_sum(queued: &Queued, sums: &Sums, start: Instant) -> LossSum {
    LossSum {
        sum_nats: sums.nats,
        tokens: queued.tokens,
        live_pairs: queued.live_pairs,
        blocks: sums.seconds,
        seconds: start.elapsed().as_secs_f64(),
    }
}
