//! What a run is made of before its first step: documents, model, state and logs.

mod masks;
mod model;
mod resume;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use foveate::tensor::count::Count;
use foveate_nn::{
    AttentionConfig, Blocks, Carrier, Model, ModelConfig, Moments, NnError, Parameter,
    ParameterState, Recomputation, Recording,
};
use foveate_shard::collectives::Collectives;
use foveate_shard::{MeshAxis, Sharding};
use serde::Serialize;

use masks::{blind_masks, telling_masks};
use model::{Made, fits, model};
use resume::{found, moved, resumed, same_run};

use super::copies::CopyMemory;
use super::disks::{Disks, Whole};
use super::folder::{Claim, Folder};
use super::pending::Pending;
use super::{Anew, Observer, Options, Start, Started, counting};
use crate::chat::{ChatTemplate, DEFAULT_TEMPLATE};
use crate::checkpoint::{self, CheckpointConfig, Checksums, State};
use crate::context::{ContextPlanner, Described, RunContext, is_needed};
use crate::corpus::{Asker, Corpus, Sources, TokenCounts};
use crate::error::TrainError;
use crate::graphs;
use crate::machine;
use crate::metrics::{JsonlLog, Record, RunMetrics, TensorBoardLog, unix_time};
use crate::pack::PackOptions;
use crate::ranks::{PARAMETERS, ROWS, Ranks};
use crate::recipe::{DisksChoice, GraphsChoice, Optimizer, Recipe, STEPS};
use crate::schedule::Schedule;
use crate::step_plan;
use crate::tensor::{TensorRanks, copied_heads};
use crate::tokens::{Ends, Tokenizer};
use crate::transfers::{GroupPeers, ParameterRanks, step_ranks};
use crate::whole;

/// A run between two steps.
pub(super) struct Setup<'a, B: Blocks> {
    /// Before model and moments, which stay until they are copied.
    pub saving: Option<Pending>,
    /// Where saves beside the steps are copied to.
    pub copies: Option<CopyMemory<B::StateMemory>>,
    pub recipe: &'a Recipe,
    pub folder: Folder<'a>,
    pub ranks: Ranks<'a>,
    /// Which ranks have the folder on one disk.
    pub disks: Disks,
    /// Where several ranks have the tokens of a row.
    pub context: Option<RunContext>,
    /// Which tokens each rank has then.
    cuts: Option<Sharding>,
    /// The ranks that hold the same parameters.
    pub replicas: Box<dyn Collectives>,
    /// Of the first rank of each disk.
    pub logs: Option<Logs>,
    pub corpus: Arc<Corpus>,
    /// The documents' numbers of tokens, where something needs them.
    pub counts: Option<Arc<TokenCounts>>,
    /// The checkpoint the weights came from at first.
    pub origin: Option<PathBuf>,
    pub template_source: Option<String>,
    pub train: Vec<usize>,
    pub held_out: Vec<usize>,
    pub model: Model<B>,
    pub attention: AttentionConfig,
    pub moments: Moments<B::Array>,
    /// What the optimiser changes, and how: all of it, or that of each group.
    pub spans: Vec<B::Spans>,
    /// What the backward pass computes again.
    pub recompute: Recomputation,
    pub state: State,
    /// Steps that are done, of which the last may be some behind the last that was queued.
    pub done: u64,
    pub started: Started,
    pub records: Vec<Record>,
    pub schedule: Schedule,
    /// Whether steps go on while a checkpoint is written.
    pub saves_beside: bool,
}

/// Where a run is told of.
pub(super) struct Logs {
    /// The folder is this run's until it ends.
    _claim: Claim,
    pub jsonl: JsonlLog,
    pub board: TensorBoardLog,
}

impl<'a, B: Blocks> Setup<'a, B> {
    /// Reads and checks all that the recipe at `file` names, then makes the run's folder. No rank
    /// writes before all have read, but what it has not of a checkpoint on local disks.
    pub fn new(
        ranks: Ranks<'a>,
        recipe: &'a Recipe,
        file: &Path,
        mut options: Options,
        blocks: B,
        gpu: Option<String>,
        observer: &mut dyn Observer,
    ) -> Result<Self, TrainError> {
        // What decides which transfers come next.
        ranks.agree(&[
            ("run.disks", u64::from(recipe.run.disks == DisksChoice::Local)),
            ("start of the run", options.start as u64),
        ])?;
        let mut disks = Disks::found(ranks, recipe)?;
        let (whole, anew) = match options.start {
            Start::Resume => found(ranks, &mut disks, Folder::new(&recipe.run.dir))?,
            Start::New | Start::Over => (None, None),
        };
        if anew == Some(Anew::NoRun) {
            options.start = Start::New;
        }
        let again = options.start == Start::Resume && anew.is_some();
        let texts = Texts::read(ranks, recipe, file, &options, (whole.as_ref(), again), observer);
        let mut texts = ranks.together(texts)?;
        let all_new = ranks.all(&[u8::from(texts.is_new)])?.iter().all(|is_new| *is_new == [1]);
        if all_new && !again {
            ranks.together(same_run(recipe, &texts.folder.recipe()))?;
        }
        let passed_over = whole.as_ref().and_then(|whole| whole.passed_over.clone());
        // But for the rank's own GPU, and for where the machine's file is: its links are compared.
        let mut alike = recipe.clone();
        (alike.run.device, alike.mesh.machine) = Default::default();
        let text = alike.to_toml()?;
        ranks.agree(&[
            ("version", hash(env!("CARGO_PKG_VERSION")) ^ hash(options.commit.unwrap_or(""))),
            ("recipe", hash(&text)),
            ("mesh", hash(&ranks.mesh().to_string())),
            ("set of documents", texts.corpus.fingerprint()),
        ])?;
        let mixed = mixed_devices(ranks, gpu.as_deref())?;
        ranks.together(carried(ranks, recipe, gpu.is_some()))?;
        texts.counts = counts(ranks, recipe, &texts, observer)?.map(Arc::new);
        let last = texts.last.clone();
        let made = Self::made((ranks, disks, whole), recipe, file, texts, blocks, gpu, observer);
        let (mut run, resolved) = ranks.together(made)?;
        let transfers = ranks.together(run.proven_transfers())?;
        ranks.agree(&[
            ("step", run.state.step),
            ("number of parameters", run.started.parameters),
            ("transfers of a step", transfers),
        ])?;
        run.agree_on_saves()?;
        let leads = run.disks.leads();
        let logs = leads.then(|| run.open(options, last.as_deref(), again, &resolved));
        run.logs = ranks.together(logs.transpose())?;
        run.started.mixed_devices = mixed;
        run.started.passed_over = passed_over;
        run.started.anew = anew;
        Ok(run)
    }

    /// Proves what moves between ranks in a step, beside the keys of attention; its identity, 0 of one rank.
    fn proven_transfers(&mut self) -> Result<u64, TrainError> {
        if self.ranks.alone() {
            return Ok(0);
        }
        let Self { ranks, model, recipe, recompute, cuts, .. } = self;
        let step = step_plan::proven(*ranks, model, recipe, *recompute, cuts.take())?;
        Ok(step.proof().step_hash)
    }

    /// Takes the run's folder, and starts its logs.
    fn open(
        &mut self,
        options: Options,
        last: Option<&Path>,
        anew: bool,
        resolved: &str,
    ) -> Result<Logs, TrainError> {
        let part = last.filter(|_| self.disks.are_several());
        let claim = self.folder.claim(options.start, last, part, anew)?;
        let cache = self.folder.cache();
        if let Some(counts) = &self.counts
            && TokenCounts::read(&cache, &self.corpus).is_none()
        {
            counts.write(&cache, &self.corpus)?;
        }
        let dir = &self.recipe.run.dir;
        self.started.log = self.folder.told_of_log(self.state.step)?;
        let jsonl = log(&self.folder.metrics(), self.state.step, options.commit)?;
        self.records = self.folder.records()?;
        whole::replace(&self.folder.recipe(), resolved.as_bytes())?;
        let board =
            TensorBoardLog::create(dir, self.state.step).map_err(|e| TrainError::write(dir, e))?;
        Ok(Logs { _claim: claim, jsonl, board })
    }

    /// The run, without its logs, and the recipe as it is saved.
    fn made(
        (ranks, disks, whole): (Ranks<'a>, Disks, Option<Whole>),
        recipe: &'a Recipe,
        file: &Path,
        texts: Texts<'a>,
        blocks: B,
        gpu: Option<String>,
        observer: &mut dyn Observer,
    ) -> Result<(Self, String), TrainError> {
        let chat_template = texts.chat_template().to_owned();
        let Texts {
            folder, last, origin, from, template_source, corpus, counts, checksums, ..
        } = texts;
        let place = file.parent().unwrap_or(Path::new(""));
        let wrong = |message: String| TrainError::recipe(file.display().to_string(), message);
        let (train, held_out) = corpus.split(recipe.data.held_out, recipe.run.seed);
        let made = model(ranks, recipe, from.as_ref(), corpus.tokenizer(), blocks);
        let mut made = made.map_err(wrong)?;
        let (context, described) = shared(ranks, recipe, &mut made, gpu.as_deref(), wrong)?;
        let Made { mut model, attention, memory, recompute, saves_beside } = made;
        model.set_z_loss(recipe.train.z_loss as f32)?;
        let (strategy, cuts) = described.map(|told| (told.strategy, told.cuts)).unzip();
        let steps = steps(recipe, counts.as_deref(), &train);
        let (fingerprint, rule) = (corpus.fingerprint(), recipe.optimizer.rule());
        let copies = (saves_beside && saves_beside_steps(recipe, 0, steps))
            .then(|| CopyMemory::begin(&model, &rule, &ranks.owned(model.layout())));
        let copies = copies.transpose()?;
        observer.begins("making the model");
        if let (Some(whole), Some(last)) = (&whole, &last) {
            let held = disks.leads().then(|| folder.hold()).transpose();
            let _held = ranks.together(held)?;
            disks.bring(ranks, whole, last, &model, &rule)?;
        }
        let (moments, mut state, fresh_buffers) = match &last {
            Some(last) => resumed(steps, last, &mut model, &rule, fingerprint, checksums)?,
            None => begun(origin.as_deref(), recipe, &mut model, fingerprint, checksums)?,
        };
        let depends = model.bits_depend_on(recipe.train.batch_rows, recipe.data.len);
        let depends = depends.map_err(|e| wrong(e.to_string()))?;
        let (other_device, changed) = moved(&mut state, last.is_some(), gpu.clone(), depends);
        model.choose(&state.choices);
        let copies = copies.filter(|_| saves_beside_steps(recipe, state.step, steps));
        let started = Started {
            step: state.step,
            steps,
            parameters: model.layout().parameter_count(),
            train_documents: train.len(),
            held_out_documents: held_out.len(),
            skipped_documents: corpus.skipped().len(),
            first_skipped: corpus.skipped().first().cloned(),
            fresh_buffers,
            blind_masks: blind_masks(&attention, model.config(), recipe.data.len),
            telling_masks: telling_masks(&attention, model.config(), recipe.data.len),
            memory,
            recompute,
            gpu,
            mixed_devices: None,
            passed_over: None,
            anew: None,
            log: Vec::new(),
            other_device,
            changed,
            mesh: ranks.mesh(),
            copied_heads: copied_heads(model.config(), model.tensor_part()),
            recording: recording(ranks, recipe, &model),
            context: strategy.filter(|_| ranks.mesh().size(MeshAxis::Context) > 1),
            dir: recipe.run.dir.clone(),
        };
        let mut run = Self {
            recipe,
            ranks,
            disks,
            context,
            cuts,
            replicas: ranks.group(&[MeshAxis::Replicate])?,
            logs: None,
            folder,
            corpus,
            counts,
            origin,
            template_source,
            train,
            held_out,
            spans: spans(&model, &recipe.optimizer)?,
            recompute,
            model,
            attention,
            moments,
            done: state.step,
            state,
            started,
            records: Vec::new(),
            saves_beside,
            saving: None,
            copies,
            schedule: recipe.learning_rate(steps),
        };
        let resolved = run.resolved(place, chat_template)?;
        run.admit_copies(observer)?;
        Ok((run, resolved))
    }

    /// The recipe as the run saves it. Its paths are relative to `place`.
    fn resolved(&self, place: &Path, chat_template: String) -> Result<String, TrainError> {
        let (recipe, tokenizer, model) =
            (self.recipe, self.corpus.tokenizer(), self.model.config());
        let resolved = Resolved {
            steps: self.started.steps,
            checkpoint: self.origin.as_deref().map(absolute),
            root: absolute(&place.join(&recipe.data.root)),
            fingerprint: format!("{:016x}", self.corpus.fingerprint()),
            train_documents: self.train.len(),
            held_out_documents: self.held_out.len(),
            tokenizer: tokenizer.path().map(absolute),
            opening_tokens: tokenizer.opening().to_vec(),
            closing_tokens: tokenizer.closing().to_vec(),
            stop_tokens: tokenizer.stops().to_vec(),
            chat_template,
            model: ModelConfig {
                num_key_value_heads: Some(model.kv_heads()),
                head_dim: Some(model.dim()),
                ..model.clone()
            },
            attention: self.attention.clone(),
        };
        let unwritable =
            |e: toml::ser::Error| TrainError::recipe("recipe", format!("cannot be written: {e}"));
        let resolved = Some(toml::Table::try_from(resolved).map_err(unwritable)?);
        Recipe { resolved, ..recipe.clone() }.to_toml()
    }
}

/// Whether a run that is at `step` of so many saves before its end.
fn saves_beside_steps(recipe: &Recipe, step: u64, steps: u64) -> bool {
    let every = recipe.train.save_every;
    let next = step.checked_div(every).map(|saves| (saves + 1).saturating_mul(every));
    next.is_some_and(|next| next < steps)
}

/// What a run reads before it has a model.
struct Texts<'a> {
    folder: Folder<'a>,
    /// The checkpoint that it continues from.
    last: Option<PathBuf>,
    /// Whether this rank's disk is new to the run.
    is_new: bool,
    /// The checkpoint that it starts from.
    origin: Option<PathBuf>,
    from: Option<CheckpointConfig>,
    template_source: Option<String>,
    corpus: Arc<Corpus>,
    /// The documents' numbers of tokens, where something needs them.
    counts: Option<Arc<TokenCounts>>,
    /// Whether what is read is held to its checksums.
    checksums: Checksums,
}

impl<'a> Texts<'a> {
    fn read(
        ranks: Ranks<'_>,
        recipe: &'a Recipe,
        file: &Path,
        options: &Options,
        (whole, again): (Option<&Whole>, bool),
        observer: &mut dyn Observer,
    ) -> Result<Self, TrainError> {
        let &Options { start, checksums, renderer, .. } = options;
        rows_suffice(recipe, ranks.mesh().size_of(&ROWS))?;
        let place = file.parent().unwrap_or(Path::new(""));
        let folder = Folder::new(&recipe.run.dir);
        folder.check_recipe(file, start)?;
        let part = whole.map(|whole| whole.place(&folder.checkpoints()));
        let last = folder.admit(start, part.as_deref(), again)?;
        // A disk that is new to the run has no recipe of it, whatever part of a checkpoint was brought to it; one
        // where a run died while it began may have none, either.
        let is_new = (part.is_some() || again) && !folder.recipe().exists();
        if (last.is_some() || again) && !is_new {
            same_run(recipe, &folder.recipe())?;
        }
        let origin = recipe.model.checkpoint.as_ref().map(|folder| place.join(folder));
        let read = |folder| checkpoint::read_config(folder, checksums);
        let from = origin.as_deref().map(read).transpose()?;
        let (template, template_source) = chat_template(recipe, place, from.as_ref())?;
        let template = renderer.into_iter().fold(template, ChatTemplate::isolated);
        let tokenizer = tokenizer(recipe, place, from.as_ref())?;
        let corpus = Arc::new(documents(recipe, place, tokenizer, template, observer)?);
        let named = [&recipe.data.tokenizer, &recipe.data.chat_template].into_iter().flatten();
        let read = named.map(|file| place.join(file)).chain(origin.clone());
        let read: Vec<PathBuf> = read.chain(corpus.files().iter().cloned()).collect();
        folder.spare(start, read.iter().cloned())?;
        folder.stand_apart(start, read, origin.as_deref())?;
        let counts = None;
        Ok(Self { folder, last, is_new, origin, from, template_source, corpus, counts, checksums })
    }

    /// The source of the chat template: the recipe's, the checkpoint's, or the default.
    fn chat_template(&self) -> &str {
        let of_checkpoint = || self.from.as_ref().and_then(|from| from.chat_template.as_deref());
        self.template_source.as_deref().or_else(of_checkpoint).unwrap_or(DEFAULT_TEMPLATE)
    }
}

/// The documents' numbers of tokens, where ranks find their rows by them or epochs become steps: those
/// that are kept in the run's folder, which rank 0 reads, or counted by all ranks.
fn counts(
    ranks: Ranks<'_>,
    recipe: &Recipe,
    texts: &Texts<'_>,
    observer: &mut dyn Observer,
) -> Result<Option<TokenCounts>, TrainError> {
    if ranks.alone() && recipe.train.epochs.is_none() {
        return Ok(None);
    }
    let corpus = &texts.corpus;
    let kept = ranks.first().then(|| TokenCounts::read(&texts.folder.cache(), corpus)).flatten();
    let kept = ranks.bytes_of_first(kept.map_or(Vec::new(), |counts| counts.to_bytes()))?;
    let kept = TokenCounts::from_bytes(&kept).filter(|counts| counts.len() == corpus.len());
    if kept.is_some() {
        return Ok(kept);
    }
    observer.begins("counting the documents' tokens");
    counting::count(ranks, corpus, observer).map(Some)
}

/// The GPUs that the ranks are on, this one on `gpu`, where these are not all alike. All ranks call it.
///
/// # Errors
/// When some are on GPUs and others on CPUs, which compute in other types.
pub(super) fn mixed_devices(
    ranks: Ranks<'_>,
    gpu: Option<&str>,
) -> Result<Option<String>, TrainError> {
    let all = ranks.all(gpu.unwrap_or_default().as_bytes())?;
    let mut kinds = BTreeMap::<&[u8], Vec<usize>>::new();
    all.iter().enumerate().for_each(|(rank, gpu)| kinds.entry(gpu).or_default().push(rank));
    let on_gpu = all.iter().position(|gpu| !gpu.is_empty());
    let mixed = match (kinds.get(&b""[..]), on_gpu) {
        (Some(on_cpu), Some(first)) => Err(TrainError::recipe(
            "run.device",
            format!(
                "ranks {on_cpu:?} compute on the CPU, and rank {first} on {}; give every rank a GPU, or \
                 set run.device = \"cpu\"",
                String::from_utf8_lossy(&all[first])
            ),
        )),
        _ => Ok((kinds.len() > 1).then(|| {
            let of = |(gpu, ranks): (&&[u8], &Vec<usize>)| {
                format!("{} × {}", ranks.len(), String::from_utf8_lossy(gpu))
            };
            kinds.iter().map(of).collect::<Vec<_>>().join(", ")
        })),
    };
    ranks.together(mixed)
}

/// Refuses what carries between GPUs alone where ranks compute on CPUs.
fn carried(ranks: Ranks<'_>, recipe: &Recipe, on_gpu: bool) -> Result<(), TrainError> {
    if on_gpu || ranks.alone() || recipe.mesh.transfers != Carrier::Nccl {
        return Ok(());
    }
    let message = "is \"nccl\", which carries between GPUs, and the ranks compute on CPUs; leave it out, or give \
                   every rank a GPU by run.device";
    Err(TrainError::recipe("mesh.transfers", message))
}

/// What plans attention where ranks compute it together.
pub(super) fn context<B: Blocks>(
    ranks: Ranks<'_>,
    recipe: &Recipe,
    model: &mut Model<B>,
    gpu: Option<&str>,
) -> Result<Option<RunContext>, TrainError> {
    if !is_needed(&ranks.mesh(), model) {
        return Ok(None);
    }
    let peers = GroupPeers::new(ranks, &[MeshAxis::Context])?;
    let by_device = model.context(Box::new(peers), recipe.mesh.transfers);
    let by_device = by_device.map_err(TrainError::model)?;
    if let Some(gpu) = gpu.filter(|_| !by_device) {
        let message = format!(
            "is \"host\", but ranks that share rows, or have to know which rows of a batch they have, \
             compute attention on {gpu} with keys that go between GPUs; leave it out, or set run.device = \
             \"cpu\""
        );
        return Err(TrainError::recipe("mesh.transfers", message));
    }
    let free = ranks.together(model.free_bytes().map_err(Into::into))?;
    let free = free.or_else(|| machine::free().map(|free| free.bytes));
    // All reckon with one machine, of a file that may be another on another host.
    let first = ranks.bytes_of_first(gpu.unwrap_or_default().as_bytes().to_vec())?;
    let links = ranks.together(recipe.mesh.links(std::str::from_utf8(&first).ok()))?;
    ranks.agree(&[("links of mesh.machine", hash(&format!("{:?}", links.links)))])?;
    let planner = ContextPlanner::new(ranks, model, recipe.mesh.strategy, links, by_device, free);
    Ok(Some(RunContext::new(planner)))
}

/// Of what has to be the same on all ranks.
fn hash(text: &str) -> u64 {
    xxhash_rust::xxh3::xxh3_64(text.as_bytes())
}

/// Shares parameters and rows of a model with other ranks, as the recipe says: attention over them, and what is
/// told of it. What it takes is added to the memory of the run; one that does not fit is `wrong`.
fn shared<B: Blocks>(
    ranks: Ranks<'_>,
    recipe: &Recipe,
    Made { model, memory, recompute, .. }: &mut Made<B>,
    gpu: Option<&str>,
    wrong: impl Fn(String) -> TrainError,
) -> Result<(Option<RunContext>, Option<Described>), TrainError> {
    share_parameters(ranks, recipe, model)?;
    let context = context(ranks, recipe, model, gpu)?;
    let described = described(recipe, context.as_ref())?;
    if let Some(described) = &described {
        let kept = recompute.kept_attention(model.config().num_hidden_layers) as u64;
        memory.attention += kept * described.layer_bytes + described.passing_bytes;
        let gpu = model.free_bytes()?.map(|free| (free, free));
        fits(memory, gpu, None).map_err(wrong)?;
    }
    Ok((context, described))
}

/// What the plan of a batch comes to, where ranks compute attention together.
fn described(
    recipe: &Recipe,
    context: Option<&RunContext>,
) -> Result<Option<Described>, TrainError> {
    let shape = [recipe.train.batch_rows, recipe.data.len];
    let described = context.map(|context| context.planner().describe(shape)).transpose();
    described.map_err(|e| TrainError::recipe("[mesh]", e.to_string()))
}

/// Refuses more ranks that share rows than a batch has rows.
pub(super) fn rows_suffice(recipe: &Recipe, ranks: usize) -> Result<(), TrainError> {
    let rows = recipe.train.batch_rows;
    if rows >= ranks {
        return Ok(());
    }
    let message = format!(
        "is {rows}, and {ranks} ranks share the rows of a batch; raise it to {ranks}, or start \
         fewer ranks"
    );
    Err(TrainError::recipe("train.batch_rows", message))
}

/// What a run took from its checkpoint, its documents and the defaults, for the recipe that it saves.
#[derive(Serialize)]
struct Resolved {
    steps: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    checkpoint: Option<PathBuf>,
    root: PathBuf,
    /// Of the documents, in hexadecimal.
    fingerprint: String,
    train_documents: usize,
    held_out_documents: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    tokenizer: Option<PathBuf>,
    opening_tokens: Vec<u32>,
    closing_tokens: Vec<u32>,
    stop_tokens: Vec<u32>,
    chat_template: String,
    model: ModelConfig,
    attention: AttentionConfig,
}

fn absolute(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_path_buf())
}

/// The optimiser steps of the run: those of the recipe, or those of its epochs, for which the documents are
/// counted.
fn steps(recipe: &Recipe, counts: Option<&TokenCounts>, train: &[usize]) -> u64 {
    let (Some(epochs), Some(counts)) = (recipe.train.epochs, counts) else {
        return recipe.train.steps.unwrap_or(STEPS);
    };
    let lengths: Vec<usize> = train.iter().map(|&document| counts.of(document)).collect();
    let rows_a_step = (recipe.train.batch_rows * recipe.train.accumulate) as u64;
    // Of documents without a token the first step tells.
    packing(recipe).rows(&lengths, epochs).div_ceil(rows_a_step).max(1)
}

/// How the training documents are packed.
pub(super) fn packing(recipe: &Recipe) -> PackOptions {
    let data = &recipe.data;
    let shuffle = data.shuffle.then_some(recipe.run.seed);
    PackOptions { len: data.len, split: data.split_documents, shuffle }
}

/// The recipe's tokenizer, the checkpoint's, or bytes.
fn tokenizer(
    recipe: &Recipe,
    place: &Path,
    from: Option<&CheckpointConfig>,
) -> Result<Tokenizer, TrainError> {
    let tokenizer = match (&recipe.data.tokenizer, from) {
        (Some(file), Some(from)) => {
            let known = &from.tokenizer;
            checkpoint::read_tokenizer(&place.join(file), known.bos(), known.eos())?
                .and_stops(known.stops().iter().copied())
        }
        (Some(file), None) => checkpoint::read_tokenizer(&place.join(file), None, None)?,
        (None, Some(from)) => from.tokenizer.clone(),
        (None, None) => Tokenizer::bytes(),
    };
    let data = &recipe.data;
    tokenizer.adding(Ends { bos: data.add_bos_token, eos: data.add_eos_token })
}

fn sources(recipe: &Recipe, place: &Path) -> Sources {
    let data = &recipe.data;
    Sources {
        root: place.join(&data.root),
        files: data.files.clone(),
        exclude: data.exclude.clone(),
        format: data.format,
        on_bad_document: data.on_bad_document,
        asker: Asker::Recipe,
    }
}

/// The documents of the recipe, which conversations become by `template`.
fn documents(
    recipe: &Recipe,
    place: &Path,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    observer: &mut dyn Observer,
) -> Result<Corpus, TrainError> {
    observer.begins("reading the documents");
    let sources = sources(recipe, place);
    Corpus::scan(&sources, tokenizer, Some(template), &mut || observer.interrupted())
}

/// What the optimiser goes through, at once or a group at a time.
fn spans<B: Blocks>(model: &Model<B>, optimizer: &Optimizer) -> Result<Vec<B::Spans>, NnError> {
    let treat = |parameter: &Parameter| optimizer.treatment(parameter);
    match optimizer.in_backward {
        true => model.group_spans(treat),
        false => Ok(vec![model.spans(treat)?]),
    }
}

/// Gives a model that is one rank's part what moves between it and the others, and refuses what it cannot keep.
fn share_tensor<B: Blocks>(
    ranks: Ranks<'_>,
    recipe: &Recipe,
    model: &mut Model<B>,
) -> Result<(), TrainError> {
    let part = model.tensor_part().clone();
    if !part.is_cut() {
        return Ok(());
    }
    if recipe.precision.state == Some(ParameterState::Int8Moments)
        && !model.layout().blocks_are_whole()
    {
        let message = format!(
            "is \"int8_moments\", and with mesh.tensor = {} a block of 256 elements holds key/value heads that \
             several ranks have beside query heads that one has; leave it out, or use at most {} \
             of tensor",
            part.parts,
            Count(model.config().kv_heads(), "rank")
        );
        return Err(TrainError::recipe("precision.state", message));
    }
    model.tensor(&TensorRanks { ranks, part: &part, carrier: recipe.mesh.transfers })?;
    Ok(())
}

/// Cuts parameters over ranks where the mesh says so. Where they are updated in the backward pass, it is
/// the transfers of groups that sum gradients of ranks with the same parameters, too.
pub(super) fn share_parameters<B: Blocks>(
    ranks: Ranks<'_>,
    recipe: &Recipe,
    model: &mut Model<B>,
) -> Result<(), TrainError> {
    let (cutting, in_backward) = (recipe.mesh.cutting(&ranks.mesh()), recipe.optimizer.in_backward);
    let replicated = in_backward && ranks.mesh().size(MeshAxis::Replicate) > 1;
    share_tensor(ranks, recipe, model)?;
    if let Some(ranks) = step_ranks(ranks)? {
        model.step_with(ranks);
    }
    if cutting.parts > 1 || replicated {
        let sharing = ParameterRanks { ranks, mesh: &recipe.mesh, replicated };
        let part = ranks.coordinate(&PARAMETERS);
        model.cut(cutting, part, &sharing)?;
    }
    if !in_backward && ranks.mesh().size(MeshAxis::Replicate) > 1 {
        let peers = GroupPeers::new(ranks, &[MeshAxis::Replicate])?;
        model.replicas(Box::new(peers), recipe.mesh.transfers)?;
    }
    Ok(())
}

/// Has the passes of batches recorded where the recipe wants it; whether they are. A device that queues nothing
/// is not asked unless the recipe says `on`.
pub(super) fn recording<B: Blocks>(
    ranks: Ranks<'_>,
    recipe: &Recipe,
    model: &Model<B>,
) -> Option<Recording> {
    let auto = recipe.run.graphs == GraphsChoice::Auto;
    if !graphs::wanted(recipe, model.config()) || auto && !model.queues() {
        return None;
    }
    if let Some(reason) = graphs::in_the_way(ranks.alone(), recipe) {
        return Some(Recording::Off(reason.to_owned()));
    }
    model.record_passes();
    Some(model.recording())
}

/// The log at `path` from `step` on, with a line on what continues it.
fn log(path: &Path, step: u64, commit: Option<&str>) -> Result<JsonlLog, TrainError> {
    let unwritable = |e| TrainError::write(path, e);
    let mut log = JsonlLog::open(path, step).map_err(unwritable)?;
    let run = RunMetrics {
        step,
        unix_time: unix_time(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        commit: commit.map(str::to_owned),
        host: machine::host(),
        threads: rayon::current_num_threads(),
    };
    log.append(&Record::Run(run)).map_err(unwritable)?;
    Ok(log)
}

/// Moments, state, and the learned buffers that a checkpoint lacked.
type Began<B> = (Moments<<B as Blocks>::Array>, State, Vec<String>);

/// Moments and state of a run without steps, and the learned buffers that the checkpoint `origin`
/// lacks. Weights that it has go into `model`, the others are drawn.
fn begun<B: Blocks>(
    origin: Option<&Path>,
    recipe: &Recipe,
    model: &mut Model<B>,
    fingerprint: u64,
    checksums: Checksums,
) -> Result<Began<B>, TrainError> {
    let load = |origin| checkpoint::load_weights(origin, model, checksums);
    let fresh_buffers = origin.map(load).transpose()?.unwrap_or_default();
    model.draw_missing(recipe.run.seed)?;
    let moments = model.moments(&recipe.optimizer.rule())?;
    Ok((moments, State { fingerprint, ..Default::default() }, fresh_buffers))
}

/// The template conversations are rendered with, and its source where it is not that of the checkpoint that the run
/// starts from: the recipe's, or one beside a tokenizer that the recipe gives.
fn chat_template(
    recipe: &Recipe,
    place: &Path,
    from: Option<&CheckpointConfig>,
) -> Result<(ChatTemplate, Option<String>), TrainError> {
    let tokenizer = recipe.data.tokenizer.as_ref().map(|file| place.join(file));
    let beside = tokenizer.as_deref().and_then(Path::parent).map(checkpoint::chat).transpose()?;
    let (of_tokenizer, special) = beside.unwrap_or_default();
    let of_checkpoint = from.and_then(|from| from.chat_template.clone());
    let special = special.or(from.map(|from| from.special.clone()).unwrap_or_default());
    let (source, of) = match (&recipe.data.chat_template, from, &tokenizer) {
        (Some(file), ..) => {
            let path = place.join(file);
            let source = whole::read_text(&path)
                .map_err(|e| TrainError::data(&path, None, format!("could not be read: {e}")))?;
            (Some(source), path)
        }
        (None, Some(from), _) if of_checkpoint.is_some() => (of_checkpoint, from.folder.clone()),
        (None, _, Some(file)) => (of_tokenizer, file.clone()),
        (None, ..) => (None, PathBuf::from("chat template")),
    };
    let text = source.as_deref().unwrap_or(DEFAULT_TEMPLATE);
    let template = ChatTemplate::new(text, &of, &special.bos, &special.eos)?;
    let is_own = recipe.data.chat_template.is_some() || tokenizer.is_some();
    Ok((template, source.filter(|_| is_own)))
}
