//! A step: batches that are queued, the update behind them, and what is told of it when it is done.

use std::time::Instant;

use foveate_nn::{
    Array, Blocks, Gradients, HeldBytes, Model, OptimizerStep, PassingGradients, Recording,
};

use super::Observer;
use super::mesh_model::{batch, sum_replicas};
use super::profile::Profile;
use super::setup::Setup;
use crate::context::ContextBatch;
use crate::error::{TrainError, TrainErrorKind};
use crate::loader::Loader;
use crate::machine;
use crate::metrics::{Record, StepMetrics, Tflops, unix_time};
use crate::pack::Packed;
use crate::recipe::Recipe;

impl<B: Blocks> Setup<'_, B> {
    /// Queues a step, the next one, and gives what is to be told of it.
    pub(super) fn queue(
        &mut self,
        loader: &mut Loader,
        gradients: &mut StepGradients<B::Array>,
        run: &mut Progress,
    ) -> Result<QueuedStep<B>, TrainError> {
        let (step, o) = (self.state.step + 1, &self.recipe.optimizer);
        let optimizer = OptimizerStep {
            rule: o.rule(),
            step,
            rate: o.lr * self.schedule.ratio(self.state.step),
            clip_norm: o.clip_norm,
            seed: self.recipe.run.seed,
        };
        if let StepGradients::Whole(gradients) = gradients {
            self.model.clear(gradients);
        }
        let mut queued = QueuedStep::new(step, optimizer.rate, self.model.totals()?);
        for _ in 0..self.recipe.train.accumulate {
            self.queue_batch(&mut queued, &optimizer, loader, gradients, run)?;
        }
        if let StepGradients::Whole(all) = gradients {
            sum_replicas(&*self.replicas, &mut self.model, all)?;
            let (moments, queueing) = (&mut self.moments, Instant::now());
            self.model.update(&optimizer, &self.spans[0], all, moments, &mut queued.totals)?;
            run.did("queue the update", queueing);
        }
        self.state.step = step;
        Ok(queued)
    }

    /// Queues the next batch of a step; the update, too, where it is made in the backward pass.
    fn queue_batch(
        &mut self,
        step: &mut QueuedStep<B>,
        optimizer: &OptimizerStep,
        loader: &mut Loader,
        gradients: &mut StepGradients<B::Array>,
        run: &mut Progress,
    ) -> Result<(), TrainError> {
        let reading = Instant::now();
        let loaded = loader.take()?;
        let own = loaded.own;
        let mut context = match (&mut self.context, loaded.context) {
            (Some(context), Some(part)) => Some(context.take(self.ranks, part)?),
            _ => None,
        };
        step.sums.data_seconds += reading.elapsed().as_secs_f64();
        run.did("wait for data", reading);
        let queueing = Instant::now();
        let (batch, again, totals) = (batch(&own), self.recompute, &mut step.totals);
        let attention = context.as_deref_mut().map(ContextBatch::attention);
        let queued = match gradients {
            StepGradients::Whole(all) => {
                self.model.accumulate_over(&batch, attention, all, again, totals)?
            }
            StepGradients::Passing(some) => {
                let (spans, moments) = (&self.spans, &mut self.moments);
                self.model.step_in_backward(
                    &batch, attention, some, again, optimizer, spans, moments, totals,
                )?
            }
        };
        run.did("queue", queueing);
        step.sums.pairs += queued.live_pairs.unwrap_or_default();
        step.context_seconds += context.map_or(0.0, ContextBatch::take_seconds);
        step.sums.packed += loaded.places;
        step.sums.padding += loaded.padding;
        step.sums.cut += loaded.cut;
        if self.ranks.alone() {
            step.batches.push(own);
        }
        (self.state.cursor, step.epoch) = (loaded.cursor, loaded.passes);
        Ok(())
    }

    /// Waits for a step, and tells of it.
    pub(super) fn finish(
        &mut self,
        queued: QueuedStep<B>,
        gradients: &mut StepGradients<B::Array>,
        run: &mut Progress,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        let QueuedStep { step, totals, batches, mut sums, .. } = queued;
        let waiting = Instant::now();
        let found = self.model.read(totals)?;
        run.did("wait", waiting);
        if self.started.recording == Some(Recording::On)
            && let off @ Recording::Off(reason) = &self.model.recording()
        {
            observer.not_recorded(reason);
            self.started.recording = Some(off.clone());
        }
        if let Some(profile) = &mut run.profile {
            profile.device(self.model.block_times());
        }
        // Before the numbers are judged: where a rank is lost, a device that waited for it may be left with anything.
        [sums.pairs] = self.ranks.sum([sums.pairs])?;
        sums.labelled = found.labelled;
        let mean = found.nats * (1.0 / sums.labelled.max(1) as f64);
        for (what, value) in [("the loss", mean), ("the gradient norm", found.grad_norm)] {
            if !value.is_finite() {
                let first = self.first_not_finite(&batches, gradients, observer);
                let message = format!("{what} is {value}{}", first.unwrap_or_default());
                return Err(self.not_finite(step, message));
            }
        }
        self.state.tokens += sums.labelled;
        if self.state.tokens == 0 && queued.epoch >= 1.0 {
            let message = "no token of these documents is learned: every text is empty, or the \
                           chat template prints nothing of what assistants say";
            return Err(TrainError::recipe("data.files", message));
        }
        sums.seconds = run.since.elapsed().as_secs_f64();
        run.since = Instant::now();
        if sums.cut > 0 && run.sums.cut == 0 {
            observer.cuts();
        }
        run.sums.add(&sums);
        run.train_loss = Some(mean);
        let tflops = self.tflops(&sums);
        let (memory, blocks) = (self.memory(), found.seconds);
        let metrics = StepMetrics {
            step,
            unix_time: unix_time(),
            epoch: queued.epoch,
            loss: mean,
            z_loss: (self.recipe.train.z_loss > 0.0)
                .then(|| found.z_loss / sums.labelled.max(1) as f64),
            grad_norm: found.grad_norm,
            lr: queued.rate,
            labelled_tokens: self.state.tokens,
            labelled_tokens_per_s: sums.labelled_per_s(),
            packed_tokens_per_s: sums.packed_per_s(),
            padding_share: sums.padding_share(),
            tflops_dense: tflops.dense,
            tflops_live: tflops.live,
            tflops_half: tflops.half,
            mfu: self.peak_tflops().map(|peak| tflops.mfu(peak)),
            memory_bytes: memory.now,
            peak_memory_bytes: memory.peak,
            attention_share: blocks
                .map(|of| (of.attention + queued.context_seconds) / sums.seconds),
            linear_seconds: blocks.map(|of| of.linear),
            loss_seconds: blocks.map(|of| of.loss),
            data_seconds: sums.data_seconds,
            optimizer_seconds: blocks.map(|of| of.optimizer),
            seconds: sums.seconds,
        };
        self.done = step;
        self.record(Record::Step(metrics.clone()))?;
        observer.step(&metrics);
        Ok(())
    }

    /// What the ranks compute together in such steps.
    pub(super) fn tflops(&self, sums: &Sums) -> Tflops {
        let (config, len) = (self.model.config(), self.recipe.data.len);
        Tflops::of(config, sums.packed_per_s(), len, sums.pairs / sums.packed.max(1) as f64)
    }

    /// The peak rate of the ranks' devices together, where it is known.
    pub(super) fn peak_tflops(&self) -> Option<f64> {
        self.model.peak_tflops().map(|peak| peak * self.ranks.count() as f64)
    }

    /// What the run holds of the memory that it computes in: of the GPU, or else of the machine; 0 where the
    /// system does not say.
    pub(super) fn memory(&self) -> HeldBytes {
        self.model.held_bytes().unwrap_or_else(|| HeldBytes {
            now: machine::resident().unwrap_or(0),
            peak: machine::peak_resident().unwrap_or(0),
        })
    }

    /// What ends the run at a number of a step that is not finite. All ranks see the same number, and the
    /// first says so.
    fn not_finite(&self, step: u64, message: String) -> TrainError {
        match self.ranks.first() {
            true if step == 1 => TrainErrorKind::NotFinite { message },
            true => TrainErrorKind::Diverged { step, message, earlier: None },
            false => TrainErrorKind::Elsewhere { message, lost: false },
        }
        .into()
    }

    /// Where a replay of the batches of a step finds the first value that is not finite, in words.
    fn first_not_finite(
        &self,
        batches: &[Packed],
        gradients: &mut StepGradients<B::Array>,
        observer: &mut dyn Observer,
    ) -> Option<String> {
        observer.begins("looking for the first value that is not finite");
        let mut gradients = match gradients {
            StepGradients::Whole(gradients) => Some(gradients),
            StepGradients::Passing(_) => None,
        };
        batches.iter().enumerate().find_map(|(number, packed)| {
            let (gradients, batch) = (gradients.as_deref_mut(), batch(packed));
            // The failure is told of whether or not it can be said where it began.
            let found = self.model.first_not_finite(&batch, gradients, self.recompute).ok()??;
            let of_batch = match batches.len() {
                1 => String::new(),
                _ => format!(", in batch {} of the step", number + 1),
            };
            Some(format!("; in a replay {found}{of_batch}"))
        })
    }
}

/// A step that a device was given, and what the host knows of it.
pub(super) struct QueuedStep<B: Blocks> {
    step: u64,
    totals: B::Totals,
    /// Of a run of one rank.
    batches: Vec<Packed>,
    sums: Sums,
    /// Time of attention over ranks of `context`.
    context_seconds: f64,
    epoch: f64,
    rate: f64,
}

impl<B: Blocks> QueuedStep<B> {
    fn new(step: u64, rate: f64, totals: B::Totals) -> Self {
        Self {
            step,
            totals,
            batches: Vec::new(),
            sums: Sums::default(),
            context_seconds: 0.0,
            epoch: 0.0,
            rate,
        }
    }
}

/// How far the steps of this process are.
pub(super) struct Progress {
    pub sums: Sums,
    /// The end of the last step that was waited for, or the beginning of the first after it.
    pub since: Instant,
    pub train_loss: Option<f64>,
    pub profile: Option<Profile>,
}

impl Progress {
    pub fn new(profile: Option<Profile>) -> Self {
        Self { sums: Sums::default(), since: Instant::now(), train_loss: None, profile }
    }

    /// The host has done something since `since`.
    fn did(&mut self, what: &'static str, since: Instant) {
        if let Some(profile) = &mut self.profile {
            profile.host(what, since);
        }
    }
}

/// Where the gradients of a step go.
pub(super) enum StepGradients<A> {
    /// Those of all parameters, for the update behind the batches of a step.
    Whole(Gradients<A>),
    /// Those of a group at a time, for updates in the backward pass.
    Passing(PassingGradients<A>),
}

impl<A: Array> StepGradients<A> {
    pub fn new<B: Blocks<Array = A>>(
        recipe: &Recipe,
        model: &Model<B>,
    ) -> Result<Self, TrainError> {
        Ok(match (recipe.optimizer.in_backward, recipe.train.accumulate) {
            (true, _) => Self::Passing(model.passing_gradients()?),
            (false, 1) => Self::Whole(model.gradients_of_one_batch()?),
            (false, _) => Self::Whole(model.gradients()?),
        })
    }
}

/// Tokens and time of some steps.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sums {
    /// Tokens with a target.
    labelled: u64,
    /// All places of the rows.
    packed: u64,
    /// Places without a document.
    padding: u64,
    /// Tokens behind the end of a row that their document may not leave.
    pub cut: u64,
    /// Of query and key that the masks let through.
    pairs: f64,
    /// In which the host waited for rows.
    data_seconds: f64,
    pub seconds: f64,
}

impl Sums {
    fn add(&mut self, other: &Self) {
        self.labelled += other.labelled;
        self.packed += other.packed;
        self.padding += other.padding;
        self.cut += other.cut;
        self.pairs += other.pairs;
        self.data_seconds += other.data_seconds;
        self.seconds += other.seconds;
    }

    pub fn labelled_per_s(&self) -> f64 {
        if self.seconds > 0.0 { self.labelled as f64 / self.seconds } else { 0.0 }
    }

    pub fn packed_per_s(&self) -> f64 {
        if self.seconds > 0.0 { self.packed as f64 / self.seconds } else { 0.0 }
    }

    pub fn padding_share(&self) -> f64 {
        self.padding as f64 / self.packed.max(1) as f64
    }

    pub fn data_share(&self) -> f64 {
        if self.seconds > 0.0 { self.data_seconds / self.seconds } else { 0.0 }
    }
}
