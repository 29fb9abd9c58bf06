//! The training loop: a pure function of recipe, documents and seed, watched by an observer.
//!
//! Everything a step needs is recomputed from the step number and the data cursor, so a run
//! that was interrupted, by Ctrl-C or by `kill -9`, continues from its last checkpoint with the
//! losses it would have had.

mod copies;
mod counting;
mod disks;
mod evaluation;
mod folder;
mod mesh_model;
mod pending;
mod profile;
mod saving;
mod setup;
mod step;

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Instant;

use foveate_nn::{Blocks, MemoryEstimate, Recomputation, Recording};
use foveate_shard::Mesh;
use foveate_shard::collectives::{Collectives, OneRank};

use crate::checkpoint::{self, Checksums};
use crate::context::RunContext;
use crate::corpus::Skipped;
use crate::device::OnDevice;
use crate::error::{Earlier, TrainError};
use crate::loader::{Loader, Wanted};
use crate::metrics::{EvalMetrics, Record, SaveMetrics, StepMetrics, Tflops, curve, unix_time};
use crate::pack::PackOptions;
use crate::pairs::PairCounter;
use crate::ranks::{Ranks, end_with};
use crate::recipe::Recipe;
use evaluation::HeldOut;
pub use evaluation::{TokenLoss, TotalLoss, held_out_loss, token_losses};
use folder::Folder;
pub use mesh_model::{MeshBatch, MeshModel, batch};
use profile::Profile;
use setup::{Setup, packing};
use step::{Progress, QueuedStep, StepGradients};

/// What a run starts with.
#[derive(Clone, Debug)]
pub struct Started {
    /// Step it starts after; 0 unless resumed.
    pub step: u64,
    /// Steps of the whole run.
    pub steps: u64,
    /// Trained values.
    pub parameters: u64,
    /// Documents to train on.
    pub train_documents: usize,
    /// Documents held out.
    pub held_out_documents: usize,
    /// Documents left out because they cannot be used.
    pub skipped_documents: usize,
    /// The first of them.
    pub first_skipped: Option<Skipped>,
    /// Learned attention buffers that a checkpoint to start from did not have.
    pub fresh_buffers: Vec<String>,
    /// The masks that let no query see any key, as the recipe writes them.
    pub blind_masks: Vec<String>,
    /// The masks that let tokens see the next one, which they are to predict; empty where there is none.
    pub telling_masks: Vec<String>,
    /// The most memory that the run takes, saves included: the process's, or the GPU's.
    pub memory: MemoryEstimate,
    /// What the backward pass computes again.
    pub recompute: Recomputation,
    /// The GPU that computes; none is the CPU.
    pub gpu: Option<String>,
    /// The GPUs that the ranks are on, and how many each, where these are not all alike: a step takes as
    /// long as the slowest of them.
    pub mixed_devices: Option<String>,
    /// Where ranks have several disks, a checkpoint newer than the one that the run goes on from, which is not whole:
    /// its step, and what is missing.
    pub passed_over: Option<String>,
    /// Why a run that was to be resumed begins at its first step.
    pub anew: Option<Anew>,
    /// Of a run that goes on, what its log lacks of the steps before, or has beside records, a line each.
    pub log: Vec<String>,
    /// What the steps before a resume ran on, where that was another device.
    pub other_device: Option<String>,
    /// What the bits of steps depend on and was other in the steps before a resume, a line each:
    /// driver, libraries, kernels. Empty where the device is another one.
    pub changed: Vec<String>,
    /// The ranks of the run.
    pub mesh: Mesh,
    /// How keys and queries of different ranks of `context` meet where a row is one document, and why;
    /// none where one rank has all tokens of its rows.
    pub context: Option<String>,
    /// That ranks of `tensor` hold copies of key/value heads, and which; none where each has its own.
    pub copied_heads: Option<String>,
    /// Whether the passes of batches are recorded, where the recipe asks for it.
    pub recording: Option<Recording>,
    /// Folder of the run.
    pub dir: PathBuf,
}

/// Watches a run; every method has an empty default.
pub trait Observer {
    /// The run is about to take its first step.
    fn started(&mut self, _run: &Started) {}
    /// A step was taken. Where a device is given the next step while it runs one, this comes once
    /// the next one is queued.
    fn step(&mut self, _metrics: &StepMetrics) {}
    /// The held-out documents were looked at.
    fn evaluated(&mut self, _metrics: &EvalMetrics) {}
    /// A checkpoint was saved.
    fn saved(&mut self, _path: &Path, _metrics: &SaveMetrics) {}
    /// Passes of batches are queued block by block from here on, though they were recorded: why, in words
    /// that follow "since".
    fn not_recorded(&mut self, _reason: &str) {}
    /// Steps wait for saves from here on, though they were to go on beside them: why, in words that follow
    /// "since".
    fn saves_wait(&mut self, _reason: &str) {}
    /// The first document was cut that is longer than a row and may not be split.
    fn cuts(&mut self) {}
    /// A profile was written.
    fn profiled(&mut self, _path: &Path) {}
    /// The tokens of `done` documents are counted, of `all`.
    fn counting(&mut self, _done: usize, _all: usize) {}
    /// This share of an evaluation is done, from 0 to 1.
    fn evaluating(&mut self, _share: f64) {}
    /// Something that may take long begins, in words such as `saving`; it lasts until the next one
    /// does.
    fn begins(&mut self, _what: &'static str) {}
    /// Asked after every step: true saves a checkpoint and ends the run, to be resumed. Asked, too,
    /// before each batch of an evaluation, which true leaves unfinished for a resume to begin with, and
    /// before each document is looked at: true ends a run that has not begun, as
    /// [`TrainErrorKind::Interrupted`](crate::TrainErrorKind::Interrupted).
    fn interrupted(&mut self) -> bool {
        false
    }
}

/// What a run came to.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Mean loss of a held-out token in nats; `None` without a held-out token that has a target, or when the run
    /// was interrupted.
    pub held_out_loss: Option<f64>,
    /// Documents held out.
    pub held_out_documents: usize,
    /// Tokens that were left out because their documents are longer than a row and may not be split, over all
    /// steps of this process.
    pub cut_tokens: u64,
    /// Mean training loss of the last step, in nats.
    pub train_loss: Option<f64>,
    /// Labelled tokens (those with a target) a second, over all steps of this process.
    pub labelled_tokens_per_s: f64,
    /// Packed tokens (padding included) a second, over all steps of this process.
    pub packed_tokens_per_s: f64,
    /// Share of the packed tokens that are padding, from 0 to 1.
    pub padding_share: f64,
    /// Share of the seconds of the steps in which the host waited for rows that were not packed yet, from 0 to 1.
    pub data_share: f64,
    /// What the model computes, over all steps of this process, on all ranks together.
    pub tflops: Tflops,
    /// The peak rate of the ranks' devices together, in TFLOP/s; none where it is not known, as of a CPU.
    pub peak_tflops: Option<f64>,
    /// The most memory of the GPU that this run has held, in bytes; on a CPU the most resident memory of the
    /// process, 0 where the system does not say.
    pub peak_memory_bytes: u64,
    /// Steps done, those before a resume included.
    pub steps: u64,
    /// Seconds of the steps of this process.
    pub seconds: f64,
    /// The last checkpoint.
    pub checkpoint: PathBuf,
    /// True when the observer ended the run.
    pub interrupted: bool,
}

/// What becomes of a run that is in `run.dir` already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// There is none, or the new one is refused.
    New,
    /// It is continued from its newest checkpoint; begun where there is none, which is an [`Anew`].
    Resume,
    /// It is removed, once all that the new one reads was found to be right: checkpoints, metrics,
    /// event files, curve and saved recipe, and nothing else in the folder.
    Over,
}

/// Why a run that was to be resumed begins at its first step, which one command of a launcher always asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Anew {
    /// There is none in its folder.
    NoRun,
    /// It died before its first checkpoint.
    Unsaved {
        /// The last step in its log.
        step: u64,
    },
    /// It died when its first checkpoint was on some of several disks.
    Torn {
        /// Which step that is, and a file of it that no disk has.
        lacks: String,
    },
}

impl fmt::Display for Anew {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoRun => f.write_str("there is no run in its folder; one begins"),
            Self::Unsaved { step } => {
                write!(
                    f,
                    "the run here died at step {step}, before its first checkpoint; it begins anew"
                )
            }
            Self::Torn { lacks } => {
                write!(
                    f,
                    "the first checkpoint is not whole, {lacks}; it is set aside, and the run begins anew"
                )
            }
        }
    }
}

/// How a run starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// What becomes of a run that is in `run.dir` already; one that another process is at work on
    /// is left alone.
    pub start: Start,
    /// Whether checkpoints that are read are held to their checksums.
    pub checksums: Checksums,
    /// The commit that the program was built from, for the log.
    pub commit: Option<&'static str>,
    /// What this program is called with for it to call [`crate::chat::serve`]: chat templates then
    /// render in such a process, within its limits. None renders them in this one.
    pub renderer: Option<&'static [&'static str]>,
    /// Steps, counted from one, whose blocks and host work go into `profile.json` in the run's folder.
    pub profile: Option<Range<u64>>,
}

impl From<Start> for Options {
    fn from(start: Start) -> Self {
        let (checksums, commit, renderer, profile) = (Checksums::Verify, None, None, None);
        Self { start, checksums, commit, renderer, profile }
    }
}

/// Runs a recipe. `file` is where the recipe stands: its paths are relative to that folder, and
/// errors name it.
///
/// # Errors
/// What is wrong with recipe, documents, checkpoint or disk, in one line; earlier checkpoints
/// stay.
pub fn train(
    recipe: &Recipe,
    file: &Path,
    options: impl Into<Options>,
    observer: &mut dyn Observer,
) -> Result<Summary, TrainError> {
    train_on(&OneRank, recipe, file, options, observer)
}

/// Reads a recipe on the ranks of `group`, as [`Recipe::load`] does: where a rank cannot, all end, and the first
/// such rank says why.
///
/// # Errors
/// Those of [`Recipe::load`], of any rank; or a rank that is gone.
pub fn load_recipe(
    group: &dyn Collectives,
    path: &Path,
    overrides: &[String],
) -> Result<Recipe, TrainError> {
    Ranks::unplaced(group).together(Recipe::load(path, overrides))
}

/// Runs a recipe on the ranks of `group`, each of which calls this: rows of a batch are shared among
/// them, and rank 0 writes to the run's folder, which the others can read. The observer of any rank
/// can end the run.
///
/// Where a run of several ranks fails that has begun, as [`Observer::started`] tells, each writes its last
/// transfers to `transfers` in the run's folder ([`foveate_shard::collectives::log`]). One that fails before
/// leaves the folder as it is.
///
/// # Errors
/// Those of [`train`], on all ranks; a rank that is gone; or what the ranks do not agree on.
pub fn train_on(
    group: &dyn Collectives,
    recipe: &Recipe,
    file: &Path,
    options: impl Into<Options>,
    observer: &mut dyn Observer,
) -> Result<Summary, TrainError> {
    let options = options.into();
    let mut begun = false;
    let folder = Folder::new(&recipe.run.dir);
    let newest = || checkpoint::latest(&folder.checkpoints());
    let unread = options.checksums == Checksums::Skip && options.start == Start::Resume;
    let unread = if unread { newest() } else { None };
    let run = Training { group, recipe, file, options, observer, begun: &mut begun };
    // Where a rank has no such device, all know of it.
    let ran = recipe.device().run(run);
    let ran = ran.unwrap_or_else(|e| Ranks::unplaced(group).together(Err(e)));
    let transfers = begun.then(|| folder.transfers());
    end_with(group, ran, transfers.as_deref()).map_err(|e| {
        let earlier = |path| Earlier { verified: unread.as_ref() != Some(&path), path };
        e.of_run(newest().map(earlier))
    })
}

/// A run before it has a device.
struct Training<'a> {
    group: &'a dyn Collectives,
    recipe: &'a Recipe,
    file: &'a Path,
    options: Options,
    observer: &'a mut dyn Observer,
    /// Whether the run has its folder.
    begun: &'a mut bool,
}

impl OnDevice for Training<'_> {
    type Output = Result<Summary, TrainError>;

    fn run<B: Blocks>(self, blocks: B, gpu: Option<String>) -> Self::Output {
        let Self { group, recipe, file, options, observer, begun } = self;
        Ranks::unplaced(group).together(Ok(()))?;
        let ranks = Ranks::in_mesh(group, &recipe.mesh)?;
        let profile = options.profile.clone().filter(|_| ranks.first()).map(Profile::of);
        let mut run = Setup::new(ranks, recipe, file, options, blocks, gpu, observer)?;
        *begun = true;
        observer.started(&run.started);
        let ran = run.steps(profile, observer);
        if let Err(e) = &ran {
            // What was being saved is of steps before; the first failure is told.
            let _ = run.settle_behind(e, observer);
        }
        ran.map_err(|e| e.after(run.done))
    }
}

impl<B: Blocks> Setup<'_, B> {
    fn steps(
        &mut self,
        profile: Option<Profile>,
        observer: &mut dyn Observer,
    ) -> Result<Summary, TrainError> {
        let (train, steps) = (&self.recipe.train, self.started.steps);
        let mut loader = self.loader()?;
        let mut gradients = StepGradients::new(self.recipe, &self.model)?;
        let mut run = Progress::new(profile);
        let due = |every: u64, step: u64| every > 0 && step.is_multiple_of(every) && step < steps;
        let (mut saved, mut interrupted) = (None, false);
        if due(train.eval_every, self.state.step) && self.lacks_evaluation()? {
            interrupted = self.evaluate(train.eval_rows, &mut gradients, observer)?.is_none();
            if interrupted {
                saved = Some(self.save(false, observer)?);
            }
        }
        // The step that runs, where the next one is queued behind it.
        let mut running: Option<QueuedStep<B>> = None;
        while self.state.step < steps && !interrupted {
            observer.begins("a step");
            let next = self.state.step + 1;
            if run.profile.as_ref().is_some_and(|profile| profile.begins_with(next)) {
                if let Some(before) = running.take() {
                    self.finish(before, &mut gradients, &mut run, observer)?;
                }
                self.model.profile(true)?;
                run.profile.iter_mut().for_each(Profile::begin);
            }
            if running.is_none() {
                run.since = Instant::now();
            }
            let queued = self.queue(&mut loader, &mut gradients, &mut run)?;
            let step = self.state.step;
            let ends = step == steps || run.profile.as_ref().is_some_and(|p| p.ends_with(step));
            let (evaluates, saves) = (due(train.eval_every, step), due(train.save_every, step));
            if let Some(before) = running.take() {
                self.finish(before, &mut gradients, &mut run, observer)?;
            }
            if self.model.queues() && !evaluates && !saves && !ends {
                running = Some(queued);
            } else {
                self.finish(queued, &mut gradients, &mut run, observer)?;
            }
            if ends {
                self.write_profile(&mut run, observer)?;
            }
            if evaluates {
                self.evaluate(train.eval_rows, &mut gradients, observer)?;
            }
            interrupted = self.after_step(step < steps && observer.interrupted(), observer)?;
            if saves || interrupted {
                if let Some(last) = running.take() {
                    self.finish(last, &mut gradients, &mut run, observer)?;
                }
                saved = Some(self.save(self.saves_beside && !interrupted, observer)?);
            }
        }
        self.write_profile(&mut run, observer)?;
        self.end(&run, saved.filter(|_| interrupted), &mut gradients, observer)
    }

    /// Whether the run goes on from a step whose evaluation was left unfinished, or never begun.
    fn lacks_evaluation(&self) -> Result<bool, TrainError> {
        let step = self.state.step;
        if step == 0 || self.held_out.is_empty() {
            return Ok(false);
        }
        let is_it = |record: &Record| matches!(record, Record::Eval(found) if found.step == step);
        let lacks = self.logs.is_some() && !self.records.iter().any(is_it);
        Ok(self.ranks.bytes_of_first(vec![u8::from(lacks)])? == [1])
    }

    /// Ends a run: one that was interrupted is `saved` already; of another the last checkpoint comes first, since
    /// looking at all that is held out may take long.
    fn end(
        &mut self,
        run: &Progress,
        saved: Option<PathBuf>,
        gradients: &mut StepGradients<B::Array>,
        observer: &mut dyn Observer,
    ) -> Result<Summary, TrainError> {
        let (checkpoint, held_out_loss, interrupted) = match saved {
            Some(path) => (path, None, true),
            None => {
                let path = self.save(false, observer)?;
                let found = self.evaluate(usize::MAX, gradients, observer)?;
                let left = found.is_none() && !self.held_out.is_empty();
                let found = found.filter(|total| total.tokens > 0);
                (path, found.map(|total| total.mean()), left)
            }
        };
        if self.logs.is_some() {
            let curve = self.folder.curve();
            curve::write_svg(&curve, "loss", &self.records)
                .map_err(|e| TrainError::write(&curve, e))?;
        }
        let sums = &run.sums;
        Ok(Summary {
            held_out_loss,
            held_out_documents: self.held_out.len(),
            cut_tokens: sums.cut,
            train_loss: run.train_loss,
            labelled_tokens_per_s: sums.labelled_per_s(),
            packed_tokens_per_s: sums.packed_per_s(),
            padding_share: sums.padding_share(),
            data_share: sums.data_share(),
            tflops: self.tflops(sums),
            peak_tflops: self.peak_tflops(),
            peak_memory_bytes: self.memory().peak,
            steps: self.state.step,
            seconds: sums.seconds,
            checkpoint,
            interrupted,
        })
    }

    /// What loads the rows of the batches from the cursor on.
    fn loader(&self) -> Result<Loader, TrainError> {
        let rows = self.recipe.train.batch_rows;
        let wanted = Wanted {
            documents: self.train.clone(),
            packing: packing(self.recipe),
            rows,
            own: self.ranks.row_part(),
            of_pass: None,
            counts: self.counts.clone(),
            planner: self.context.as_ref().map(RunContext::planner),
            pairs: PairCounter::for_steps(&self.model, self.started.gpu.is_some()),
            sorted: true,
        };
        Loader::start(&self.corpus, wanted, self.state.cursor)?.ok_or_else(|| {
            let message = "state.json has a cursor outside the documents; it was changed or \
                           damaged, so remove this checkpoint and resume from an earlier one";
            let last = checkpoint::latest(&self.folder.checkpoints());
            TrainError::checkpoint(last.as_deref().unwrap_or(&self.recipe.run.dir), message)
        })
    }

    /// Ends the profile that is under way, if one is.
    fn write_profile(
        &mut self,
        run: &mut Progress,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        let Some(mut profile) = run.profile.take_if(|profile| profile.is_under_way()) else {
            return Ok(());
        };
        self.model.profile(false)?;
        // Copies that were under way.
        profile.device(self.model.block_times());
        let file = self.folder.profile();
        profile.write(&file)?;
        observer.profiled(&file);
        Ok(())
    }

    /// The loss of the held-out documents, over at most `rows` rows, in the memory of the gradients of a step; none
    /// where none is held out, or the observer of a rank ended it. Where no token has a target there is nothing to
    /// tell.
    fn evaluate(
        &mut self,
        rows: usize,
        gradients: &mut StepGradients<B::Array>,
        observer: &mut dyn Observer,
    ) -> Result<Option<TotalLoss>, TrainError> {
        if self.held_out.is_empty() {
            return Ok(None);
        }
        observer.begins("evaluating");
        let start = Instant::now();
        let held_out = HeldOut {
            ranks: self.ranks,
            context: self.context.as_mut(),
            model: &self.model,
            between: match gradients {
                StepGradients::Whole(gradients) => Some(gradients),
                StepGradients::Passing(_) => None,
            },
            corpus: &self.corpus,
            documents: &self.held_out,
            packing: PackOptions { shuffle: None, ..packing(self.recipe) },
            counts: self.counts.clone(),
            batch_rows: self.recipe.train.batch_rows,
        };
        let mut watch = |share| {
            observer.evaluating(share);
            !observer.interrupted()
        };
        let Some(found) = held_out.loss(rows, &mut watch)? else { return Ok(None) };
        if found.tokens == 0 {
            return Ok(Some(found));
        }
        let metrics = EvalMetrics {
            step: self.state.step,
            unix_time: unix_time(),
            held_out_loss: found.mean(),
            perplexity: found.mean().exp(),
            labelled_tokens: found.tokens as u64,
            seconds: start.elapsed().as_secs_f64(),
        };
        self.record(Record::Eval(metrics.clone()))?;
        observer.evaluated(&metrics);
        Ok(Some(found))
    }

    fn record(&mut self, record: Record) -> Result<(), TrainError> {
        let Some(logs) = &mut self.logs else { return Ok(()) };
        let failed = |e| TrainError::write(&self.folder.metrics(), e);
        logs.jsonl.append(&record).map_err(failed)?;
        logs.board.append(&record).map_err(|e| TrainError::write(&self.recipe.run.dir, e))?;
        self.records.push(record);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
