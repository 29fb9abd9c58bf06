//! Recipes: everything a run is, in one TOML file.
//!
//! Unknown keys are refused at every level, values are checked before anything is read or
//! written, and each error says file, line and column. Overrides (`--set train.steps=100`)
//! change the parsed file before it is checked. Paths in a recipe are relative to the recipe's
//! folder, except `run.dir`, which is relative to where the command runs.

use std::collections::BTreeMap;
use std::io;
use std::path::{self, Path, PathBuf};

use foveate::tensor::count::Count;
use foveate_nn::{
    AdamW, AttentionConfig, ModelConfig, Offload, Parameter, ParameterLayout, ParameterState,
    Recomputation, Recompute, RopePairing, RopeScaling, Rule, Sgd, Treatment,
};
use serde::{Deserialize, Serialize};

use crate::corpus::{BadDocument, Format};
use crate::device::{DeviceChoice, DeviceOptions};
use crate::error::TrainError;
use crate::schedule::{Schedule, ScheduleKind};
use crate::whole;

mod check;
mod mesh;
mod mistakes;

pub use mesh::{AxisSize, ChosenLinks, MeshSection, ReduceDtype, machine};
use mistakes::{located, of_override};

/// A training run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Where the run writes, and its seed.
    pub run: RunSection,
    /// The model: sizes to start from nothing, or a checkpoint to start from.
    pub model: ModelSection,
    /// Mask and score. A checkpoint's own are used where this section is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention: Option<AttentionConfig>,
    /// The documents.
    pub data: DataSection,
    /// Steps, batch, memory and how often to look and to save.
    #[serde(default)]
    pub train: Train,
    /// What is kept of each parameter.
    #[serde(default)]
    pub precision: PrecisionSection,
    /// AdamW.
    #[serde(default)]
    pub optimizer: Optimizer,
    /// The learning rate over the steps.
    #[serde(default)]
    pub schedule: ScheduleSection,
    /// How the ranks of a run stand.
    #[serde(default)]
    pub mesh: MeshSection,
    /// In a recipe that a run has saved: all that it took from elsewhere. Nothing reads it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resolved: Option<toml::Table>,
}

/// Where a run writes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunSection {
    /// Folder of checkpoints, metrics and curves, relative to where the command runs.
    pub dir: PathBuf,
    /// Seed of first weights, data order and held-out split.
    #[serde(default)]
    pub seed: u64,
    /// `cpu`, `cuda:N`, or `auto` for the first GPU where there is one.
    #[serde(default)]
    pub device: DeviceChoice,
    /// Whether a GPU records the pass of a batch once and replays it: `auto`, `on` or `off`.
    #[serde(default)]
    pub graphs: GraphsChoice,
    /// Whether all ranks see one `dir` (`shared`), or those of each host one on its own disk (`local`).
    #[serde(default)]
    pub disks: DisksChoice,
}

/// Where the ranks of several hosts write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DisksChoice {
    /// To one folder, on a file system that all hosts share.
    #[default]
    Shared,
    /// To a folder of the same name on the disk of each host.
    Local,
}

/// Whether the passes of batches are recorded as CUDA graphs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GraphsChoice {
    /// They are where queueing them block by block would take a tenth of a pass, and nothing is in the way.
    #[default]
    Auto,
    /// They are queued block by block.
    Off,
    /// They are, where they can be.
    On,
}

/// The model section: either `checkpoint`, or sizes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelSection {
    /// Folder of a Hugging Face Llama checkpoint to start from; then no size may be given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<PathBuf>,
    /// Number of token ids; the tokenizer's when not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vocab_size: Option<usize>,
    /// Width of the residual stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hidden_size: Option<usize>,
    /// Width of the feed-forward part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub intermediate_size: Option<usize>,
    /// Number of layers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_hidden_layers: Option<usize>,
    /// Query heads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_attention_heads: Option<usize>,
    /// Key/value heads; as many as query heads when not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_key_value_heads: Option<usize>,
    /// Length of a query, key or value vector; `hidden_size / num_attention_heads` when not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<usize>,
    /// What RMSNorm adds to the mean square (default 1e-6).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rms_norm_eps: Option<f32>,
    /// Base of the rotary frequencies (default 10000).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rope_theta: Option<f64>,
    /// Scaling of the rotary frequencies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rope_scaling: Option<RopeScaling>,
    /// `half_split` (default) or `interleaved`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rope_pairing: Option<RopePairing>,
    /// Longest sequence; `data.len` when not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_position_embeddings: Option<usize>,
    /// True when the output projection is the embedding (default false).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tie_word_embeddings: Option<bool>,
}

/// The data section.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataSection {
    /// Folder that `files` and `exclude` start from.
    #[serde(default = "here")]
    pub root: PathBuf,
    /// Paths or globs. A `.jsonl` file is one document a line, any other file one document.
    pub files: Vec<String>,
    /// Globs of files to leave out.
    #[serde(default)]
    pub exclude: Vec<String>,
    /// `auto` (by extension), `text` or `jsonl`.
    #[serde(default)]
    pub format: Format,
    /// `error` or `skip` for a document that cannot be used.
    #[serde(default)]
    pub on_bad_document: BadDocument,
    /// Tokens of a packed row.
    pub len: usize,
    /// False keeps each document in one row: it starts a new row where it does not fit and is
    /// cut at a row's length.
    #[serde(default = "yes")]
    pub split_documents: bool,
    /// False takes documents in the order of their files.
    #[serde(default = "yes")]
    pub shuffle: bool,
    /// Share of the documents to hold out, from 0 to 1.
    #[serde(default = "held_out")]
    pub held_out: f64,
    /// A `tokenizers` JSON file; without one, bytes (or the checkpoint's tokenizer).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<PathBuf>,
    /// Whether the token that begins a text is added to a document; the tokenizer's own rule when not
    /// given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub add_bos_token: Option<bool>,
    /// The same of the token that ends a text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub add_eos_token: Option<bool>,
    /// A Jinja file for conversations; the checkpoint's or a plain one when not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<PathBuf>,
}

fn here() -> PathBuf {
    PathBuf::from(".")
}

fn yes() -> bool {
    true
}

fn held_out() -> f64 {
    0.05
}

/// Steps of a run whose recipe says nothing of its length.
pub(crate) const STEPS: u64 = 1000;

/// The train section.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Train {
    /// Optimiser steps (1000 where neither these nor epochs are given).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// Passes over the training documents, in place of steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epochs: Option<u64>,
    /// Packed rows of a batch.
    pub batch_rows: usize,
    /// Batches whose gradients are added up for one step.
    pub accumulate: usize,
    /// Weight of the z-loss of steps, `z_loss · ln² Σ eᶻ` of each labelled token with the logits z; 0 for none.
    pub z_loss: f64,
    /// Activations computed again in the backward pass: `none`, `attention`, `mlp`, `full`, or `auto` for
    /// the least that fits the device.
    pub recompute: RecomputeChoice,
    /// The first layers that do; all when not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recompute_layers: Option<usize>,
    /// What waits in the memory of the host for the backward pass, on a GPU: `none`, or `layer_inputs`.
    pub offload: Offload,
    /// Steps between held-out evaluations; 0 for one at the end only.
    pub eval_every: u64,
    /// Held-out rows of an evaluation during training; the last one takes all.
    pub eval_rows: usize,
    /// Steps between checkpoints; 0 for one at the end only.
    pub save_every: u64,
    /// Newest checkpoints to keep.
    pub keep: usize,
    /// Dtype of saved weights: `f32`, `bf16` or `f16`. Masters for resuming are always f32.
    pub save_dtype: SaveDtype,
    /// Whether steps go on while a checkpoint is written from a copy in host memory. Where nothing is said they
    /// do on a GPU, if host memory holds the copy, and do not on a CPU, where the copy takes of the memory
    /// of the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub async_save: Option<bool>,
    /// Whether a GPU's results have the same bits in every run, at some cost; a CPU's always have.
    pub deterministic: bool,
}

impl Default for Train {
    fn default() -> Self {
        Self {
            steps: None,
            epochs: None,
            batch_rows: 8,
            accumulate: 1,
            z_loss: 0.0,
            recompute: RecomputeChoice::None,
            recompute_layers: None,
            offload: Offload::None,
            eval_every: 100,
            eval_rows: 32,
            save_every: 100,
            keep: 2,
            save_dtype: SaveDtype::F32,
            async_save: None,
            deterministic: true,
        }
    }
}

/// What the backward pass computes again instead of keeping.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RecomputeChoice {
    /// Nothing.
    #[default]
    None,
    /// The attention part of each layer.
    Attention,
    /// Gate and up.
    Mlp,
    /// Each layer as a whole.
    Full,
    /// The least that fits.
    Auto,
}

impl Train {
    /// What is computed again, where the recipe says it.
    pub fn recomputation(&self) -> Option<Recomputation> {
        let what = match self.recompute {
            RecomputeChoice::None => Recompute::None,
            RecomputeChoice::Attention => Recompute::Attention,
            RecomputeChoice::Mlp => Recompute::Mlp,
            RecomputeChoice::Full => Recompute::Full,
            RecomputeChoice::Auto => return None,
        };
        let layers = self.recompute_layers.unwrap_or(usize::MAX);
        Some(Recomputation { what, layers, offload: self.offload })
    }
}

/// Dtype of saved weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SaveDtype {
    /// IEEE binary32.
    #[default]
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE binary16.
    F16,
}

impl SaveDtype {
    /// What PyTorch calls it.
    pub(crate) fn torch_name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
            Self::F16 => "float16",
        }
    }
}

/// The precision section.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PrecisionSection {
    /// `f32` (on the CPU), `exact` (on a GPU where nothing is said), `bf16_gradients`, `bf16_moments`,
    /// `int8_moments` (on a CPU, too), `host_moments` or `bf16`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<ParameterState>,
}

/// The optimizer section.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Optimizer {
    /// `adamw`, or `sgd`: gradient descent with momentum.
    pub kind: OptimizerKind,
    /// Peak learning rate.
    pub lr: f64,
    /// Decay of the mean of gradients.
    pub beta1: f64,
    /// Decay of the mean of squared gradients.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Memory of the gradient, of `sgd`.
    pub momentum: f64,
    /// Decoupled decay of parameters with two axes or more.
    pub weight_decay: f64,
    /// Largest global norm of the gradients; 0 for no limit.
    pub clip_norm: f64,
    /// Whether parameters are updated in the backward pass, each group as soon as its gradients are there,
    /// which then take no memory.
    pub in_backward: bool,
    /// Parameters that are treated otherwise; the first that matches a name counts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<OptimizerGroup>,
}

/// How parameters follow their gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// AdamW.
    #[default]
    AdamW,
    /// Gradient descent with momentum.
    Sgd,
}

/// Parameters by their names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerGroup {
    /// Their names in a checkpoint, where `*` stands for anything, such as `model.layers.0.*`.
    #[serde(rename = "match")]
    pub names: String,
    /// Factor of the learning rate.
    #[serde(default = "one")]
    pub rate: f64,
    /// The weight decay; `optimizer.weight_decay`, for what has two axes, when not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
    /// Whether they stay as they are: without gradient, moments and master.
    #[serde(default)]
    pub frozen: bool,
}

fn one() -> f64 {
    1.0
}

impl OptimizerGroup {
    /// Whether a parameter of this name is one of them.
    pub fn matches(&self, name: &str) -> bool {
        let mut parts = self.names.split('*');
        let first = parts.next().unwrap_or_default();
        let Some(mut rest) = name.strip_prefix(first) else { return false };
        let parts: Vec<&str> = parts.collect();
        let Some((last, between)) = parts.split_last() else { return rest.is_empty() };
        for part in between {
            let Some(at) = rest.find(part) else { return false };
            rest = &rest[at + part.len()..];
        }
        rest.ends_with(last)
    }
}

impl Optimizer {
    /// The rule and its constants.
    pub fn rule(&self) -> Rule {
        let weight_decay = self.weight_decay;
        match self.kind {
            OptimizerKind::AdamW => Rule::AdamW(AdamW {
                beta1: self.beta1,
                beta2: self.beta2,
                eps: self.eps,
                weight_decay,
            }),
            OptimizerKind::Sgd => Rule::Sgd(Sgd { momentum: self.momentum, weight_decay }),
        }
    }

    fn group(&self, name: &str) -> Option<&OptimizerGroup> {
        self.groups.iter().find(|group| group.matches(name))
    }

    /// Whether a parameter stays as it is.
    pub fn is_frozen(&self, name: &str) -> bool {
        self.group(name).is_some_and(|group| group.frozen)
    }

    /// How a parameter is treated.
    pub fn treatment(&self, parameter: &Parameter) -> Treatment {
        let usual = Treatment::of(parameter);
        let Some(group) = self.group(&parameter.name) else { return usual };
        // The factor is of the rule's decay.
        let decay = match group.weight_decay {
            None => usual.decay,
            Some(0.0) => 0.0,
            Some(decay) => (decay / self.weight_decay) as f32,
        };
        Treatment { rate: group.rate as f32, decay }
    }

    /// Refuses groups that name no parameter of `layout`, or all of them as frozen.
    pub(crate) fn check_groups(&self, layout: &ParameterLayout) -> Result<(), String> {
        for group in &self.groups {
            if !layout.parameters().iter().any(|p| group.matches(&p.name)) {
                return Err(format!(
                    "optimizer.groups: `{}` matches no parameter; names are those of the checkpoint, \
                     such as {}",
                    group.names,
                    layout.parameters()[0].name
                ));
            }
        }
        match layout.trained() {
            0 => Err("optimizer.groups: every parameter is frozen; leave one to train".to_owned()),
            _ => Ok(()),
        }
    }
}

impl Default for Optimizer {
    fn default() -> Self {
        Self {
            kind: OptimizerKind::AdamW,
            lr: 3e-4,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            momentum: 0.9,
            weight_decay: 0.1,
            clip_norm: 1.0,
            in_backward: false,
            groups: Vec::new(),
        }
    }
}

/// The schedule section.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ScheduleSection {
    /// `constant`, `linear`, `cosine` or `wsd`.
    pub kind: ScheduleKind,
    /// Steps of the rise to the peak.
    pub warmup_steps: u64,
    /// Steps of the final fall of `wsd`.
    pub decay_steps: u64,
    /// The floor, as a fraction of the peak.
    pub min_ratio: f64,
}

impl Default for ScheduleSection {
    fn default() -> Self {
        Self { kind: ScheduleKind::Cosine, warmup_steps: 20, decay_steps: 100, min_ratio: 0.1 }
    }
}

impl Recipe {
    /// Reads a recipe and applies `key.path=value` overrides.
    ///
    /// # Errors
    /// When the file cannot be read, is not TOML, has an unknown or ill-typed key, asks for
    /// something impossible, or names a machine that is none: with file, line and column, or the override.
    pub fn load(path: &Path, overrides: &[String]) -> Result<Self, TrainError> {
        let mut recipe = Self::read(path, overrides)?;
        let file = path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let machine = recipe.mesh.locate_machine(file.parent().unwrap_or(Path::new("")));
        machine.map_err(|why| {
            let place = path.display().to_string();
            TrainError::recipe(place, format!("mesh.machine {why}")).of_overrides(overrides)
        })?;
        Ok(recipe)
    }

    /// The same, but for the machine that it names, which may be gone.
    ///
    /// # Errors
    /// Those of [`Self::load`].
    pub(crate) fn read(path: &Path, overrides: &[String]) -> Result<Self, TrainError> {
        let place = path.display().to_string();
        let text = whole::read_text(path).map_err(|e| {
            let remedy = match e.kind() {
                io::ErrorKind::NotFound => "; give the path of a recipe that is there",
                io::ErrorKind::IsADirectory => "; give the path of a recipe in it",
                _ => "",
            };
            TrainError::recipe(&place, format!("could not be read: {e}{remedy}"))
        })?;
        Self::parse(&text, &place, overrides)
    }

    /// Reads the text of a recipe; `place` names it in errors.
    ///
    /// # Errors
    /// Those of [`Self::load`].
    pub fn parse(text: &str, place: &str, overrides: &[String]) -> Result<Self, TrainError> {
        let mut recipe: Self = toml::from_str(text).map_err(|e| located(place, text, &e))?;
        if !overrides.is_empty() {
            let mut table: toml::Table =
                toml::from_str(text).map_err(|e| located(place, text, &e))?;
            for set in overrides {
                let is_text = override_value(&mut table, set)?;
                let (field, value) = set.split_once('=').unwrap_or_default();
                let given = (value.trim(), is_text);
                recipe = table
                    .clone()
                    .try_into()
                    .map_err(|e| of_override(set, field.trim(), given, &e))?;
            }
        }
        recipe.check(place).map_err(|e| e.of_overrides(overrides))?;
        if recipe.train.epochs.is_none() {
            recipe.train.steps.get_or_insert(STEPS);
        }
        Ok(recipe)
    }

    /// The device and how it computes.
    pub fn device(&self) -> DeviceOptions {
        DeviceOptions {
            state: self.precision.state,
            deterministic: self.train.deterministic,
            ..self.run.device.into()
        }
    }

    /// The model's sizes, for a tokenizer of `vocab` ids; `None` when a checkpoint brings them.
    ///
    /// # Errors
    /// Names a size that is missing, that cannot be, or that the tokenizer exceeds.
    pub fn model_config(&self, vocab: usize) -> Result<Option<ModelConfig>, String> {
        let m = &self.model;
        if m.checkpoint.is_some() {
            return Ok(None);
        }
        let need = |key: &str, value: Option<usize>| {
            value
                .ok_or_else(|| format!("model.{key} is missing; give it, or give model.checkpoint"))
        };
        let vocab_size = m.vocab_size.unwrap_or(vocab);
        if vocab_size < vocab {
            return Err(format!("model.vocab_size is {vocab_size}, below the tokenizer's {vocab}"));
        }
        let config = ModelConfig {
            vocab_size,
            hidden_size: need("hidden_size", m.hidden_size)?,
            intermediate_size: need("intermediate_size", m.intermediate_size)?,
            num_hidden_layers: need("num_hidden_layers", m.num_hidden_layers)?,
            num_attention_heads: need("num_attention_heads", m.num_attention_heads)?,
            num_key_value_heads: m.num_key_value_heads,
            head_dim: m.head_dim,
            rms_norm_eps: m.rms_norm_eps.unwrap_or(1e-6),
            rope_theta: m.rope_theta.unwrap_or(10_000.0),
            rope_scaling: m.rope_scaling.clone(),
            rope_pairing: m.rope_pairing.unwrap_or_default(),
            max_position_embeddings: m.max_position_embeddings.unwrap_or(self.data.len),
            tie_word_embeddings: m.tie_word_embeddings.unwrap_or(false),
            architecture: Default::default(),
        };
        config.validate().map_err(|e| format!("model.{e}"))?;
        self.check_layers(config.num_hidden_layers)?;
        Ok(Some(config))
    }

    /// Refuses to compute more layers again than the model has: `layers`.
    ///
    /// # Errors
    /// Names the key and the number.
    pub fn check_layers(&self, layers: usize) -> Result<(), String> {
        match self.train.recompute_layers.filter(|&again| again > layers) {
            None => Ok(()),
            Some(again) => Err(format!(
                "train.recompute_layers is {again}, and the model has {}; leave it out for all",
                Count(layers, "layer")
            )),
        }
    }

    /// The learning rate's schedule over a run of `steps`.
    pub fn learning_rate(&self, steps: u64) -> Schedule {
        Schedule {
            kind: self.schedule.kind,
            warmup_steps: self.schedule.warmup_steps,
            decay_steps: self.schedule.decay_steps,
            steps,
            min_ratio: self.schedule.min_ratio,
        }
    }

    /// The recipe with every default filled in, as TOML.
    ///
    /// # Errors
    /// When a value has no TOML form.
    pub fn to_toml(&self) -> Result<String, TrainError> {
        toml::to_string_pretty(self).map_err(|e| {
            TrainError::recipe(
                "recipe",
                format!(
                    "cannot be saved: {e}; it is text, so \
                 give folders and files whose names are UTF-8"
                ),
            )
        })
    }
}

/// Whether a text is digits alone, behind a sign or none.
fn is_whole(text: &str) -> bool {
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit())
}

/// Puts the value of an override into `table`. Whether it is a text, since it is no value of TOML.
fn override_value(table: &mut toml::Table, set: &str) -> Result<bool, TrainError> {
    let place = format!("--set {set}");
    let fail = |message: &str| Err(TrainError::recipe(&place, message));
    let Some((path, value)) = set.split_once('=') else {
        return fail("has no `=`; write --set key.path=value");
    };
    let value = value.trim();
    // `value` as TOML where it is, as a plain string where it is not.
    let parsed: Result<BTreeMap<String, toml::Value>, _> = toml::from_str(&format!("v = {value}"));
    let is_text = parsed.as_ref().map_or(true, |parsed| parsed.len() != 1);
    let value = match parsed {
        Ok(mut one) if one.len() == 1 => one.remove("v").expect("just written"),
        Err(_) if is_whole(value) => {
            return fail(&format!(
                "{value} is past {}, the largest whole number of a recipe",
                i64::MAX
            ));
        }
        _ => toml::Value::String(value.to_owned()),
    };
    let mut keys: Vec<&str> = path.trim().split('.').collect();
    let last = keys.pop().expect("split gives one part at least");
    if last.is_empty() || keys.iter().any(|k| k.is_empty()) {
        return fail("has an empty key; write --set key.path=value");
    }
    let mut at = table;
    for key in keys {
        let next = at.entry(key).or_insert_with(|| toml::Value::Table(toml::Table::new()));
        let toml::Value::Table(next) = next else {
            return fail(&format!("`{key}` is a value, not a section"));
        };
        at = next;
    }
    at.insert(last.to_owned(), value);
    Ok(is_text)
}

#[cfg(test)]
mod tests;
