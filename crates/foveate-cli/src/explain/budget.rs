//! `foveate explain --recipe`: what a recipe takes, before there are weights or data; with `--device`
//! what a step of it takes of one GPU and runs there, which need not be there.

use std::cmp::Reverse;
use std::path::Path;

use foveate::tensor::count::Count;
use foveate::{AnyBuffer, Attention, BufferData, DType, Device, Explanation, Plan, Problem};
use foveate_cuda::aot::{self, Usage};
use foveate_cuda::choose::{KernelOptions, KernelPlan};
use foveate_gpu::profile::Profile;
use foveate_nn::{
    Account, AttentionProgram, Cutting, FlopCount, MemoryEstimate, Model, ModelConfig, NnError,
    Offload, ParameterState, Precision, Recomputation, Recompute, StepKind,
};
use foveate_problem::Spec;
use foveate_train::checkpoint::Checksums;
use foveate_train::device::DeviceChoice;
use foveate_train::error::TrainError;
use foveate_train::memory::{GpuProfile, PROFILES, Planned, Setting, save_copy_bytes_on_cpu};
use foveate_train::recipe::Recipe;
use foveate_train::tokens::memory_of;
use serde_json::json;

use super::mesh::{OverRanks, sum_of};
use crate::blind;
use crate::failure::Failure;
use crate::limits::{Limits, Need};
use crate::output::{Output, bytes, count};
use crate::sizes::{self, Sizes};

/// What a recipe takes.
struct Budget {
    /// That of the recipe.
    device: DeviceChoice,
    parameters: u64,
    /// Of a batch.
    rows: usize,
    /// Tokens of a row.
    len: usize,
    memory: Vec<OnCpu>,
    /// What it takes of GPUs.
    gpus: Gpus,
    /// For each token.
    flops: FlopCount,
    /// What one batch runs.
    step: Account,
    /// Over the ranks of a mesh, where one is given.
    over_ranks: Option<OverRanks>,
    /// Of one layer by program, which has a name where there are several.
    attention: Vec<(Option<String>, Explanation)>,
}

/// What a run of a recipe takes of the CPU: what the backward pass computes again, whether a run there has it by the
/// recipe, bytes.
type OnCpu = (&'static str, bool, MemoryEstimate);

/// What a recipe takes of GPUs.
struct Gpus {
    setting: Setting,
    /// What that computes again, in words.
    again: String,
    /// By what is kept of each parameter, with the recipe's other settings.
    states: Vec<(ParameterState, MemoryEstimate)>,
    /// Of known GPUs, how it fits them, and of `auto` what is computed again there.
    profiles: Vec<(GpuProfile, Fit, Option<String>)>,
}

/// The card that states are compared on: how much memory it has decides what its logits take.
const STATES_ON: GpuProfile = PROFILES[0];

/// How a recipe fits a GPU.
enum Fit {
    /// As it is.
    Fits,
    /// With these keys, and then it takes so many bytes, and of the host's memory so many.
    With(String, u64, u64),
    /// With no rows, recomputation and state.
    Never,
}

impl Fit {
    fn of(planned: &Planned<'_>, setting: &Setting, gpu: GpuProfile) -> Result<Self, NnError> {
        if planned.memory(setting, gpu.bytes)?.total() <= gpu.bytes {
            return Ok(Self::Fits);
        }
        Ok(match planned.nearest(setting, gpu.bytes, None)? {
            Some((keys, memory)) => Self::With(keys, memory.total(), memory.host),
            None => Self::Never,
        })
    }

    fn words(&self) -> String {
        match self {
            Self::Fits => "fits".to_owned(),
            Self::With(keys, less, 0) => format!("fits with {keys} ({})", bytes(*less as f64)),
            Self::With(keys, less, host) => {
                let [less, host] = [less, host].map(|n| bytes(*n as f64));
                format!("fits with {keys} ({less}, and {host} of the host's)")
            }
            Self::Never => "does not fit, whatever rows, recomputation and state".to_owned(),
        }
    }

    fn json(&self) -> serde_json::Value {
        match self {
            Self::With(keys, bytes, host) => json!({ "with": keys, "total": bytes, "host": host }),
            Self::Fits | Self::Never => serde_json::Value::Null,
        }
    }
}

impl Gpus {
    fn of(planned: &Planned<'_>) -> Result<Self, NnError> {
        let (setting, layers) = (Setting::of(planned.recipe), planned.config.num_hidden_layers);
        let mut states = Vec::new();
        for state in ParameterState::ALL {
            states.push((state, planned.memory(&Setting { state, ..setting }, STATES_ON.bytes)?));
        }
        let mut profiles = Vec::new();
        for profile in PROFILES {
            let own = planned.setting_on(profile.bytes)?;
            let is_auto = planned.recipe.train.recomputation().is_none();
            let chosen = is_auto.then(|| again(own.recompute, layers));
            profiles.push((profile, Fit::of(planned, &own, profile)?, chosen));
        }
        Ok(Self { setting, again: again(setting.recompute, layers), states, profiles })
    }

    fn json(&self) -> serde_json::Value {
        let states: serde_json::Map<_, _> = self
            .states
            .iter()
            .map(|(state, m)| {
                let parts = json!({
                    "weights": m.weights,
                    "gradients": m.gradients,
                    "optimizer": m.optimizer,
                    "activations": m.activations,
                    "beside": m.process,
                    "total": m.total(),
                    "host": m.host,
                });
                (state.name().to_owned(), parts)
            })
            .collect();
        let profiles: Vec<_> = self
            .profiles
            .iter()
            .map(|(gpu, fits, chosen)| {
                json!({
                    "gpu": gpu.name,
                    "bytes": gpu.bytes,
                    "fits": matches!(fits, Fit::Fits),
                    "auto": chosen,
                    "nearest": fits.json(),
                })
            })
            .collect();
        json!({
            "of": STATES_ON.name,
            "state": self.setting.state.name(),
            "rows": self.setting.rows,
            "recompute": self.setting.recompute.what.name(),
            "states": states,
            "profiles": profiles,
        })
    }

    fn print(&self, out: &mut Output) -> Result<(), Failure> {
        let Setting { state: own, rows, .. } = self.setting;
        let (again, gpu) = (&self.again, STATES_ON);
        out.line(format!(
            "on a GPU         by state, on an {} ({}), {}, {again} computed again{}; * is the recipe's",
            gpu.name,
            bytes(gpu.bytes as f64),
            Count(rows, "row"),
            match &self.profiles[0] {
                (.., Some(_)) => ", the most that `auto` does",
                _ => "",
            },
        ))?;
        for (state, m) in &self.states {
            let mark = if *state == own { "*" } else { " " };
            out.line(format!(
                "  {mark}{:<15} {} = weights, masters {} + gradients {} + moments {} + \
                 activations {} + {} beside{}",
                state.name(),
                bytes(m.total() as f64),
                bytes(m.weights as f64),
                bytes(m.gradients as f64),
                bytes(m.optimizer as f64),
                bytes(m.activations as f64),
                bytes(m.process as f64),
                match m.host {
                    0 => String::new(),
                    host => format!(", and {} of the host's", bytes(host as f64)),
                },
            ))?;
        }
        out.line(format!("cards            with the state {}:", own.name()))?;
        for (gpu, fits, chosen) in &self.profiles {
            let told = match (fits, chosen) {
                (Fit::Fits, Some(again)) => format!("fits with {again} computed again"),
                _ => fits.words(),
            };
            out.line(format!("  {:<9} {:<9} {told}", gpu.name, bytes(gpu.bytes as f64)))?;
        }
        Ok(())
    }
}

/// What a step of a recipe takes of a GPU, and the kernels of its attention.
struct GpuStep {
    gpu: GpuProfile,
    setting: Setting,
    /// Layers of the model.
    layers: usize,
    memory: MemoryEstimate,
    /// Of a step, by name: how many, and their bytes; the largest first.
    activations: Vec<(&'static str, usize, u64)>,
    /// Of the host's memory, where steps go on beside saves.
    save_copy: Option<u64>,
    fit: Fit,
    /// By program, which has a name where there are several.
    attention: Vec<(Option<String>, KernelPlan)>,
}

impl GpuStep {
    fn of(planned: &Planned<'_>, gpu: GpuProfile) -> Result<Self, Failure> {
        let Planned { recipe, config, attention } = *planned;
        let (setting, layers) = (planned.setting_on(gpu.bytes)?, config.num_hidden_layers);
        let (rows, len) = (setting.rows, recipe.data.len);
        let profile = Profile::named(gpu.name).map_err(Failure::usage)?;
        let mut activations: Vec<(&str, usize, u64)> = Vec::new();
        for array in planned.account(&setting, gpu.bytes)?.activations {
            match activations.iter_mut().find(|(name, ..)| *name == array.name) {
                Some((_, count, bytes)) => (*count, *bytes) = (*count + 1, *bytes + array.bytes),
                None => activations.push((array.name, 1, array.bytes)),
            }
        }
        activations.sort_by_key(|&(_, _, bytes)| Reverse(bytes));
        let dtype = Precision::from(setting.state).weights;
        let q = [rows, config.num_attention_heads, len, config.dim()];
        let kv = [rows, config.kv_heads(), len, config.dim()];
        let problem = Problem::shaped(dtype, q, kv, kv)?;
        let mut plans = Vec::new();
        for (name, program) in attention.programs() {
            let program = AttentionProgram::parse(program, config.num_attention_heads)?;
            let on_cpu = layer(config, &program, rows, len)?.explain();
            let live = on_cpu.live_forward_flops / on_cpu.dense_forward_flops.max(1.0);
            let usage = Usage {
                backward: true,
                deterministic: recipe.train.deterministic,
                mean_kv_len: Some((live * len as f64).round().max(1.0) as usize),
                ..Usage::default()
            };
            let spec = Spec { mask: program.mask, score: program.score, ..Spec::default() };
            let options = KernelOptions::default();
            let planned = aot::plan(&profile, &spec, problem.dims(), dtype, usage, &options, None)?;
            plans.push((name.map(str::to_owned), planned.plan));
        }
        let memory = planned.memory(&setting, gpu.bytes)?;
        let fit = Fit::of(planned, &setting, gpu)?;
        let save_copy = planned.save_copy(&setting)?;
        Ok(Self { gpu, setting, layers, memory, activations, save_copy, fit, attention: plans })
    }

    fn json(&self) -> serde_json::Value {
        let Self { gpu, setting, layers, memory: m, activations, save_copy, fit, attention } = self;
        let activations: serde_json::Map<_, _> = activations
            .iter()
            .map(|(name, count, bytes)| {
                ((*name).to_owned(), json!({ "arrays": count, "bytes": bytes }))
            })
            .collect();
        let attention: Vec<_> =
            attention.iter().map(|(name, plan)| json!({ "program": name, "plan": plan })).collect();
        json!({
            "gpu": gpu.name,
            "bytes": gpu.bytes,
            "state": setting.state.name(),
            "rows": setting.rows,
            "recompute": setting.recompute.what.name(),
            "recompute_layers": setting.recompute.layers.min(*layers),
            "offload": setting.recompute.offload.name(),
            "memory": {
                "weights": m.weights,
                "gradients": m.gradients,
                "optimizer": m.optimizer,
                "activations": m.activations,
                "beside": m.process,
                "total": m.total(),
                "host": m.host,
            },
            "save_copy": save_copy,
            "activations": activations,
            "fits": matches!(fit, Fit::Fits),
            "nearest": fit.json(),
            "attention": attention,
        })
    }

    fn print(&self, out: &mut Output) -> Result<(), Failure> {
        let Self { gpu, setting, layers, memory: m, activations, save_copy, fit, attention } = self;
        out.line(format!(
            "{} with {}: {} of state {}, {}, {} computed again{}",
            gpu.name,
            bytes(gpu.bytes as f64),
            Count(setting.rows, "row"),
            setting.state.name(),
            if setting.in_backward { "updated in the backward pass" } else { "updated at the end" },
            again(setting.recompute, *layers),
            match setting.recompute.offload {
                Offload::None => "",
                Offload::LayerInputs => ", inputs of layers in the host's memory",
            },
        ))?;
        let parts = [
            ("weights, masters", m.weights),
            ("gradients", m.gradients),
            ("moments", m.optimizer),
            ("activations", m.activations),
            ("beside", m.process),
            ("in all", m.total()),
        ];
        for (name, taken) in parts {
            let share = 100.0 * taken as f64 / gpu.bytes as f64;
            let apart: u64 = activations.iter().map(|(.., bytes)| bytes).sum();
            let shared = match name == "activations" && apart > taken {
                true => format!(", {} if none shared its memory with others", bytes(apart as f64)),
                false => String::new(),
            };
            out.line(format!("  {name:<22} {:>10}  {share:>5.1} %{shared}", bytes(taken as f64)))?;
            if name == "activations" {
                for (name, count, taken) in activations {
                    let arrays =
                        if *count > 1 { format!("  {count} of them") } else { String::new() };
                    out.line(format!("    {name:<20} {:>10}{arrays}", bytes(*taken as f64)))?;
                }
            }
        }
        if m.host > 0 {
            let beside = bytes(m.host as f64);
            out.line(format!("  {:<22} {beside:>10}  of the host's memory", "pinned beside"))?;
        }
        if let Some(copied) = save_copy {
            let copied = bytes(*copied as f64);
            let told = "of the host's memory, pinned, where steps go on beside saves";
            out.line(format!("  {:<22} {copied:>10}  {told}", "copy of what is saved"))?;
        }
        out.line(format!("  {}", fit.words()))?;
        for (name, plan) in attention {
            let program = name.as_ref().map_or(String::new(), |n| format!(" of the program `{n}`"));
            out.line(format!("\nattention of one layer{program}, one document a row:"))?;
            out.text(plan)?;
        }
        Ok(())
    }
}

/// What is computed again, in words.
fn again(recompute: Recomputation, of: usize) -> String {
    match recompute {
        Recomputation { what: Recompute::None, .. } => "nothing".to_owned(),
        Recomputation { what, layers, .. } if layers >= of => what.name().to_owned(),
        Recomputation { what, layers, .. } => format!("{} in {layers} of {of} layers", what.name()),
    }
}

/// Prints parameters, memory, operations and the attention plan of one layer.
pub fn run(
    path: &Path,
    set: &[String],
    mesh: Option<&str>,
    device: Option<&str>,
    limits: Limits,
    as_json: bool,
    out: &mut Output,
) -> Result<(), Failure> {
    let gpu = device.map(GpuProfile::named).transpose().map_err(Failure::usage)?;
    let recipe = Recipe::load(path, set)?;
    let place = path.parent().unwrap_or(Path::new(""));
    let wrong = |message: String| {
        Failure::from(TrainError::recipe(path.display().to_string(), message).of_overrides(set))
    };
    // What is read of a checkpoint is shown, and nothing is computed with it.
    let Sizes { config, attention, tokenizer } =
        sizes::of_recipe(&recipe, path, Checksums::Skip, wrong)?;
    let own_tokenizer = recipe.data.tokenizer.as_ref().map(|file| place.join(file));
    let tokenizer_bytes = own_tokenizer.or(tokenizer).as_deref().map_or(0, memory_of);
    let attention = attention.unwrap_or_default();
    let (rows, len) = (recipe.train.batch_rows, recipe.data.len);

    let mut programs = Vec::new();
    for (name, program) in attention.programs() {
        let program = AttentionProgram::parse(program, config.num_attention_heads);
        programs.push((name, program.map_err(|e| wrong(e.to_string()))?));
    }
    if programs.iter().any(|(_, program)| knows_documents(program)) {
        // Ids, and their part of the table of ranges.
        let need = Need { bytes: 6.0 * rows as f64 * len as f64, seconds: 0.0 };
        limits.admit("the table of documents", need, "lower data.len or train.batch_rows")?;
    }

    let planned = Planned { recipe: &recipe, config: &config, attention: &attention };
    if let Some(gpu) = gpu {
        let step = GpuStep::of(&planned, gpu)?;
        return if as_json { Ok(out.json(&step.json())?) } else { step.print(out) };
    }
    let gpus = Gpus::of(&planned).map_err(|e| wrong(e.to_string()))?;
    let model = planned.model_on_cpu().map_err(|e| wrong(e.to_string()))?;
    let (memory, step) = on_cpu(&planned, &model, tokenizer_bytes)?;
    let mut layers = Vec::new();
    for (name, program) in &programs {
        // The text says it itself.
        if as_json && program.sees_nothing(&config, len) {
            blind::warn(&program.mask.iter().map(ToString::to_string).collect::<String>());
        }
        let plan = layer(&config, program, rows, len)?;
        layers.push((name.map(str::to_owned), plan.explain()));
    }
    let over_ranks =
        mesh.map(|text| OverRanks::of(text, &recipe, &config, &attention)).transpose()?;
    let budget = Budget {
        device: recipe.run.device,
        parameters: model.layout().parameter_count(),
        over_ranks,
        rows,
        len,
        memory,
        gpus,
        flops: config.flops_per_token(len as f64),
        step,
        attention: layers,
    };
    if as_json { Ok(out.json(&budget.json())?) } else { budget.print(out) }
}

/// What a recipe takes of the CPU by what is computed again, and what a batch runs there.
fn on_cpu(
    planned: &Planned<'_>,
    model: &Model,
    tokenizer_bytes: u64,
) -> Result<(Vec<OnCpu>, Account), NnError> {
    let Planned { recipe, .. } = *planned;
    let (rows, len) = (recipe.train.batch_rows, recipe.data.len);
    let chosen = recipe.train.recomputation().unwrap_or(Recompute::None.into());
    let training = |recompute| {
        let setting = Setting { recompute, ..Setting::of(recipe) };
        planned.training(&setting, Cutting::WHOLE)
    };
    // Nothing of a CPU waits in the memory of a host.
    let own = Recomputation { offload: Offload::None, ..chosen };
    let mut memory = Vec::new();
    for what in Recompute::ALL {
        let recompute = if what == own.what { own } else { what.into() };
        // `auto` depends on the memory of a machine.
        let is_chosen = recipe.train.recomputation().is_some_and(|chosen| chosen.what == what)
            && !matches!(recipe.run.device, DeviceChoice::Cuda(_));
        let mut estimate = model.training_memory(rows, len, training(recompute))?;
        estimate.process += tokenizer_bytes;
        if recipe.train.async_save == Some(true) {
            estimate.process += save_copy_bytes_on_cpu(recipe, model.layout());
        }
        memory.push((what.name(), is_chosen, estimate));
    }
    let step = model.dry_run(rows, len, StepKind::Training(training(own)))?;
    Ok((memory, step))
}

/// Whether the mask or the score of a program asks which document a token is of.
fn knows_documents(program: &AttentionProgram) -> bool {
    program.captures().any(|b| b.name() == "doc")
}

/// The attention of one layer, with one document a row where it knows documents.
fn layer(
    config: &ModelConfig,
    program: &AttentionProgram,
    rows: usize,
    len: usize,
) -> Result<Plan, Failure> {
    let q = [rows, config.num_attention_heads, len, config.dim()];
    let kv = [rows, config.kv_heads(), len, config.dim()];
    let mut layer = Attention::new();
    if let Some(mask) = &program.mask {
        layer = layer.mask(mask.clone());
    }
    if let Some(score) = &program.score {
        layer = layer.score(score.clone());
    }
    let plan = layer.plan(&Problem::shaped(DType::F32, q, kv, kv)?, &Device::cpu())?;
    if !knows_documents(program) {
        return Ok(plan);
    }
    let one_document = BufferData::I32(vec![0; rows * len]);
    Ok(plan.rebind(&AnyBuffer::new("doc", &[rows, len], one_document, false)?)?)
}

impl Budget {
    fn json(&self) -> serde_json::Value {
        let parts = |m: &MemoryEstimate| {
            json!({
                "weights": m.weights,
                "gradients": m.gradients,
                "optimizer": m.optimizer,
                "activations": m.activations,
                "attention": m.attention,
                "process": m.process,
                "total": m.total(),
            })
        };
        let memory: serde_json::Map<_, _> =
            self.memory.iter().map(|(name, _, m)| ((*name).to_owned(), parts(m))).collect();
        let attention = match &self.attention[..] {
            [(None, explanation)] => json!(explanation),
            all => {
                let named =
                    all.iter().map(|(name, e)| (name.clone().unwrap_or_default(), json!(e)));
                serde_json::Value::Object(named.collect())
            }
        };
        json!({
            "device": self.device.to_string(),
            "parameters": self.parameters,
            "memory_bytes": memory,
            "gpu": self.gpus.json(),
            "mesh": self.over_ranks.as_ref().map(OverRanks::json),
            "flops_per_token": self.flops.total(),
            "step": {
                "blocks": self.step.blocks.len(),
                "flops": self.step.flops(),
                "bytes_moved": self.step.bytes_moved(),
                "activation_bytes_at_once": self.step.needed_bytes(),
            },
            "attention": attention,
        })
    }

    fn print(&self, out: &mut Output) -> Result<(), Failure> {
        let Self { device, parameters, rows, len, flops, step, attention, .. } = self;
        out.line(format!("parameters       {parameters} ({})", count(*parameters as f64)))?;
        let place = match device {
            DeviceChoice::Cpu => format!("{} on the CPU", self.on_cpu()),
            DeviceChoice::Cuda(_) => format!("{} on {device}", self.gpus.setting.state.name()),
            DeviceChoice::Auto => {
                let state = self.gpus.setting.state.name();
                format!(
                    "{state} on the first GPU, {} on the CPU where there is none",
                    self.on_cpu()
                )
            }
        };
        out.line(format!("batch            {} of {len} tokens, {place}", Count(*rows, "row")))?;
        match device {
            DeviceChoice::Cuda(_) => {
                self.gpus.print(out)?;
                self.print_on_cpu(out)?;
            }
            _ => {
                self.print_on_cpu(out)?;
                self.gpus.print(out)?;
            }
        }
        if let Some(over_ranks) = &self.over_ranks {
            over_ranks.print(out)?;
        }
        out.line(format!(
            "FLOP a token     {} in weights, {} in attention (dense, forward and backward)",
            count(flops.linear),
            count(flops.attention)
        ))?;
        out.line(format!(
            "a batch          {} blocks, {} FLOP with what is computed again, {} read and written; \
             {} of its activations are needed at once",
            step.blocks.len(),
            count(step.flops()),
            bytes(step.bytes_moved()),
            bytes(step.needed_bytes() as f64)
        ))?;
        for (name, explanation) in attention {
            let program = name.as_ref().map_or(String::new(), |n| format!(" of the program `{n}`"));
            out.line(format!("\nattention of one layer{program}, one document a row:"))?;
            out.text(explanation)?;
        }
        Ok(())
    }

    /// What a run on the CPU keeps.
    fn on_cpu(&self) -> &'static str {
        match self.gpus.setting.state {
            ParameterState::Int8Moments => "f32 with moments of 8 bits",
            _ => "f32",
        }
    }

    fn print_on_cpu(&self, out: &mut Output) -> Result<(), Failure> {
        for (name, is_chosen, m) in &self.memory {
            let mark = if *is_chosen { "*" } else { " " };
            out.line(format!("memory {mark}{name:<10}{}", sum_of(m)))?;
        }
        let which = match (self.device, self.memory.iter().any(|(_, is_chosen, _)| *is_chosen)) {
            (DeviceChoice::Cuda(_), _) => {
                format!("of a run in {} by `--device cpu`", self.on_cpu())
            }
            (_, true) => "* is the recipe's".to_owned(),
            (_, false) => "`auto` takes the first that fits the machine".to_owned(),
        };
        out.line(format!(
            "                 at most, saves included, by what the backward pass computes again; {which}"
        ))?;
        Ok(())
    }
}
