//! The attention program of a model, and its plans: one for training, where a row is a whole
//! sequence, and one for generation, where queries follow a cache.
//!
//! A plan is made once. What changes from batch to batch (the documents) and from step to step
//! (learned buffers) is bound to it.

use std::sync::{Mutex, PoisonError};

use foveate::mods::text::{Names, parse_mask, parse_score};
use foveate::mods::{Leaf, ModError};
use foveate::{
    AnyBuffer, Attention, BufferData, DType, Device, MaskMod, Plan, Positions, Problem,
    ScalarValue, ScoreMod,
};

use crate::backend::{Blocks, LayerProgram};
use crate::config::{
    AttentionConfig, BufferValues, LearnedBuffer, ModelConfig, ProgramConfig, ScalarConfig,
};
use crate::error::{NnError, NnErrorKind};

/// The buffer of document ids, `[rows, len]` i32, that every batch brings.
pub(crate) const DOCUMENTS: &str = "doc";

/// What a query sees and what becomes of its scores.
#[derive(Clone, Debug, Default)]
pub struct AttentionProgram {
    /// The mask; none lets every query see every key. It may capture an i32 buffer `doc` with
    /// two axes, which every batch replaces by its document ids.
    pub mask: Option<MaskMod>,
    /// The score. Learned buffers it captures must be in `learned`.
    pub score: Option<ScoreMod>,
    /// Learned buffers by name: each layer trains its own.
    pub learned: Vec<(String, LearnedBuffer)>,
}

impl AttentionProgram {
    /// The program that `config` describes, for `heads` query heads. An empty mask lets every
    /// query see every key.
    ///
    /// # Errors
    /// When mask or score cannot be read (with the place), or a buffer's shape does not hold
    /// its values.
    pub fn parse(config: &ProgramConfig, heads: usize) -> Result<Self, NnError> {
        let doc = AnyBuffer::new(DOCUMENTS, &[1, 1], BufferData::I32(vec![0]), false)?;
        let mut names = Names::new().heads(heads).buffer(&doc);
        for (name, buffer) in &config.buffers {
            if name == DOCUMENTS {
                let reason = "every batch brings this buffer; choose another name";
                return Err(NnError::config(format!("attention.buffers.{name}"), reason));
            }
            let data = match &buffer.values {
                BufferValues::Bool(v) => BufferData::Bool(v.clone()),
                BufferValues::I32(v) => BufferData::I32(v.clone()),
                BufferValues::F32(v) => BufferData::F32(v.clone()),
            };
            names = names.buffer(&AnyBuffer::new(name, &buffer.shape, data, false)?);
        }
        for (name, LearnedBuffer { shape, init, .. }) in &config.learned {
            if name == DOCUMENTS || config.buffers.contains_key(name) {
                let reason = "there is a buffer of this name already; rename one";
                return Err(NnError::config(format!("attention.learned.{name}"), reason));
            }
            let elems = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
            let Some(elems) = elems.filter(|&n| n > 0 && n <= i32::MAX as usize) else {
                let reason = format!("shape {shape:?} has no elements, or too many");
                return Err(NnError::config(format!("attention.learned.{name}"), reason));
            };
            let data = BufferData::F32(vec![*init; elems]);
            names = names.buffer(&AnyBuffer::new(name, shape, data, true)?);
        }
        for (name, &value) in &config.scalars {
            let value = match value {
                ScalarConfig::Bool(v) => ScalarValue::Bool(v),
                ScalarConfig::I32(v) => ScalarValue::I32(v),
                ScalarConfig::F32(v) => ScalarValue::F32(v),
            };
            names = names.scalar(name, value);
        }
        let mask = Some(config.mask.trim()).filter(|m| !m.is_empty());
        let score = config.score.as_deref();
        Ok(Self {
            mask: mask
                .map(|m| parse_mask(m, &names))
                .transpose()
                .map_err(in_field("attention.mask"))?,
            score: score
                .map(|s| parse_score(s, &names))
                .transpose()
                .map_err(in_field("attention.score"))?,
            learned: config.learned.iter().map(|(n, b)| (n.clone(), b.clone())).collect(),
        })
    }

    /// The buffers that mask and score read.
    pub fn captures(&self) -> impl Iterator<Item = &AnyBuffer> {
        let mask = self.mask.iter().flat_map(|m| m.program().graph().buffers());
        let score = self.score.iter().flat_map(|s| s.program().graph().buffers());
        mask.chain(score)
    }

    fn reads(&self, leaf: Leaf) -> bool {
        self.mask.as_ref().is_some_and(|m| m.program().uses(leaf))
            || self.score.as_ref().is_some_and(|s| s.program().uses(leaf))
    }

    fn check(&self) -> Result<(), NnError> {
        if let Some(mask) = &self.mask {
            mask.check().map_err(in_field("attention.mask"))?;
        }
        if let Some(score) = &self.score {
            score.check().map_err(in_field("attention.score"))?;
        }
        for (name, LearnedBuffer { shape, .. }) in &self.learned {
            let field = format!("attention.learned.{name}");
            let Some(captured) = self.captures().find(|b| b.name() == name) else {
                return Err(NnError::config(field, "is not read by the score; remove it"));
            };
            if !captured.learned() || captured.shape().len() != shape.len() {
                let reason = format!(
                    "has {} axes; the score reads {} buffer with {}",
                    shape.len(),
                    if captured.learned() { "a learned" } else { "a constant" },
                    captured.shape().len()
                );
                return Err(NnError::config(field, reason));
            }
        }
        let missing =
            |b: &&AnyBuffer| b.learned() && self.learned.iter().all(|(n, _)| n != b.name());
        match self.captures().find(missing) {
            Some(b) => {
                let reason = "the score reads it as learned, but its shape is not given";
                Err(NnError::config(format!("attention.learned.{}", b.name()), reason))
            }
            None => Ok(()),
        }
    }
}

/// A program joined with the sizes of a model.
#[derive(Debug)]
pub(crate) struct Plans {
    attention: Attention,
    /// The plan of training, the shape `[rows, len]` and the `mean_kv_len` it was made for, the last
    /// ones asked for.
    train: Mutex<([usize; 2], Option<usize>, Plan)>,
    generate: Plan,
    /// The learned buffers of a layer.
    learned: Vec<(String, LearnedBuffer)>,
    reads_documents: bool,
    reads_query: bool,
    /// Query heads, key/value heads, length of a head's vector.
    heads: [usize; 3],
}

fn problem(
    [heads, kv_heads, dim]: [usize; 3],
    [rows, len]: [usize; 2],
) -> Result<Problem, NnError> {
    let kv = [rows, kv_heads, len, dim];
    Ok(Problem::shaped(DType::F32, [rows, heads, len, dim], kv, kv)?)
}

impl Plans {
    pub fn new(program: &AttentionProgram, config: &ModelConfig) -> Result<Self, NnError> {
        program.check()?;
        let heads = [config.num_attention_heads, config.kv_heads(), config.dim()];
        let mut attention = Attention::new();
        if let Some(mask) = &program.mask {
            attention = attention.mask(mask.clone());
        }
        if let Some(score) = &program.score {
            attention = attention.score(score.clone());
        }
        let (device, shape) = (Device::cpu(), [1, 1]);
        let train = attention.clone().plan(&problem(heads, shape)?, &device)?;
        let cached = attention.clone().positions(Positions::offset(0), Positions::Rows);
        Ok(Self {
            attention,
            train: Mutex::new((shape, None, train)),
            generate: cached.plan(&problem(heads, shape)?.forward_only(), &device)?,
            learned: program.learned.clone(),
            reads_documents: program.captures().any(|b| b.name() == DOCUMENTS),
            reads_query: program.reads(Leaf::Q),
            heads,
        })
    }

    /// The learned buffers of a layer.
    pub fn learned(&self) -> &[(String, LearnedBuffer)] {
        &self.learned
    }

    /// `plan` over the documents `[rows, len]` of a batch. All layers share its block masks.
    fn documents(
        &self,
        plan: &Plan,
        shape: [usize; 2],
        documents: &[i32],
    ) -> Result<Plan, NnError> {
        if !self.reads_documents {
            return Ok(plan.clone());
        }
        let data = BufferData::I32(documents.to_vec());
        Ok(plan.rebind(&AnyBuffer::new(DOCUMENTS, &shape, data, false)?)?)
    }

    /// The plan of a batch whose documents are `[rows, len]`, without the learned buffers of a layer.
    /// Batches of one shape share the block masks that do not depend on the documents.
    /// `mean_kv_len` tells the planner how many keys a query sees where it does not look at the
    /// documents; it is rounded up to a power of two, so that few plans are made.
    pub fn training(
        &self,
        shape: [usize; 2],
        documents: &[i32],
        mean_kv_len: Option<usize>,
    ) -> Result<Plan, NnError> {
        let keys = mean_kv_len.filter(|_| self.reads_documents).map(usize::next_power_of_two);
        // A plan is replaced as a whole, so one that a panic left behind is sound.
        let mut train = self.train.lock().unwrap_or_else(PoisonError::into_inner);
        if (train.0, train.1) != (shape, keys) {
            let mut attention = self.attention.clone();
            if let Some(keys) = keys {
                attention = attention.mean_kv_len(keys);
            }
            let plan = attention.plan(&problem(self.heads, shape)?, &Device::cpu())?;
            *train = (shape, keys, plan);
        }
        self.documents(&train.2, shape, documents)
    }

    /// Pairs of query and key that the mask lets through in the batch that `plan` was made for by
    /// [`Self::training`], in the mean of the heads. After a step the block masks of its passes are
    /// counted, and none is built for that.
    pub fn live_pairs(&self, plan: &Plan) -> Option<f64> {
        let described = plan.cpu()?.describe(plan.problem().arrangement());
        Some(described.tiling.live_pairs as f64 / self.heads[0] as f64)
    }

    /// Bytes of the workspace and of the block masks in a batch of one document a row.
    fn workspace_bytes(&self, [rows, len]: [usize; 2]) -> Result<[u64; 2], NnError> {
        let plan = self.training([rows, len], &vec![0; rows * len], None)?;
        let Some(cpu) = plan.cpu() else { return Ok([0; 2]) };
        let described = cpu.describe(plan.problem().arrangement());
        let workspace = described.forward_bytes.max(described.backward_bytes) as u64;
        Ok([workspace, described.tiling.block_mask_bytes])
    }

    /// The plan for a cache of `capacity` positions that hold one document, without the learned
    /// buffers of a layer.
    pub fn generation(&self, capacity: usize) -> Result<Plan, NnError> {
        self.documents(&self.generate, [1, capacity], &vec![0; capacity])
    }

    /// `plan` for queries that start at `position`.
    pub fn at(&self, plan: &Plan, position: usize) -> Result<Plan, NnError> {
        if !self.reads_query {
            return Ok(plan.clone());
        }
        Ok(plan.set_scalar("q_offset", position as i32)?)
    }
}

/// The programs of a model, and which layer runs which.
#[derive(Debug)]
pub(crate) struct Programs {
    all: Vec<Plans>,
    of_layer: Vec<usize>,
}

impl Programs {
    /// One program for all layers.
    pub fn uniform(program: &AttentionProgram, config: &ModelConfig) -> Result<Self, NnError> {
        let all = vec![Plans::new(program, config)?];
        Ok(Self { all, of_layer: vec![0; config.num_hidden_layers] })
    }

    /// Those that a configuration describes.
    pub fn parse(attention: &AttentionConfig, config: &ModelConfig) -> Result<Self, NnError> {
        let heads = config.num_attention_heads;
        let AttentionConfig::Pattern { layers, programs } = attention else {
            let program = AttentionProgram::parse(attention.of_layer(0).1, heads)?;
            return Self::uniform(&program, config);
        };
        if layers.len() > config.num_hidden_layers {
            let (names, count) = (layers.len(), config.num_hidden_layers);
            let reason = format!("names {names} programs; num_hidden_layers is {count}");
            return Err(NnError::config("attention.layers", reason));
        }
        let plans = |(name, program): (&String, &ProgramConfig)| {
            let planned =
                AttentionProgram::parse(program, heads).and_then(|p| Plans::new(&p, config));
            planned.map_err(|e| e.in_program(name))
        };
        let all = programs.iter().map(plans).collect::<Result<_, _>>()?;
        let index = |name: &String| programs.keys().position(|known| known == name);
        let of_layer = layers.iter().cycle().take(config.num_hidden_layers);
        let of_layer = of_layer.map(|name| index(name).expect("a layer names a program"));
        Ok(Self { all, of_layer: of_layer.collect() })
    }

    /// The learned buffers of every layer.
    pub fn learned(&self) -> Vec<&[(String, LearnedBuffer)]> {
        self.of_layer.iter().map(|&program| self.all[program].learned()).collect()
    }

    /// What each layer runs, of plans that there are one for each program of.
    pub fn of_layers<'a, B: Blocks>(&'a self, plans: &'a [B::Plan]) -> Vec<LayerProgram<'a, B>> {
        let layer = |&i: &usize| LayerProgram { plan: &plans[i], learned: self.all[i].learned() };
        self.of_layer.iter().map(layer).collect()
    }

    /// [`Plans::training`] of each program.
    pub fn training(
        &self,
        shape: [usize; 2],
        documents: &[i32],
        mean_kv_len: Option<usize>,
    ) -> Result<Vec<Plan>, NnError> {
        self.all.iter().map(|plans| plans.training(shape, documents, mean_kv_len)).collect()
    }

    /// [`Plans::generation`] of each program.
    pub fn generation(&self, capacity: usize) -> Result<Vec<Plan>, NnError> {
        self.all.iter().map(|plans| plans.generation(capacity)).collect()
    }

    /// [`Plans::at`] of each program.
    pub fn at(&self, plans: &[Plan], position: usize) -> Result<Vec<Plan>, NnError> {
        self.all.iter().zip(plans).map(|(own, plan)| own.at(plan, position)).collect()
    }

    /// [`Plans::live_pairs`] in the mean of the layers.
    pub fn live_pairs(&self, plans: &[Plan]) -> Option<f64> {
        let each: Option<Vec<f64>> =
            self.all.iter().zip(plans).map(|(own, plan)| own.live_pairs(plan)).collect();
        let each = each?;
        let sum: f64 = self.of_layer.iter().map(|&program| each[program]).sum();
        Some(sum / self.of_layer.len() as f64)
    }

    /// Bytes that attention takes besides its operands in a batch of one document a row: the
    /// largest workspace, and the block masks of all programs.
    pub fn workspace_bytes(&self, shape: [usize; 2]) -> Result<u64, NnError> {
        let (mut workspace, mut masks) = (0, 0);
        for plans in &self.all {
            let [own, mask] = plans.workspace_bytes(shape)?;
            (workspace, masks) = (own.max(workspace), masks + mask);
        }
        Ok(workspace + masks)
    }
}

/// Puts the field of the configuration before an error of a mask or score.
fn in_field(field: &'static str) -> impl Fn(ModError) -> NnError {
    move |error| NnErrorKind::Text { field: field.to_owned(), error }.into()
}
