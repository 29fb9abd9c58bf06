//! The attention programs of a model, and their plans: those for training, where a row is a whole
//! sequence, and those for generation, where queries follow a cache.
//!
//! A backend plans a program once for each shape of batch. What changes from batch to batch (the
//! documents) and from step to step (learned buffers) is bound to the plan.

use std::sync::Arc;

use crate::backend::{AttentionShape, Blocks, LayerProgram, PackedHeads};
use crate::batch::Batch;
use crate::config::{AttentionConfig, LearnedBuffer, ModelConfig, ProgramConfig};
use crate::error::NnError;
use crate::program::AttentionProgram;

/// The programs of a model, and which layer runs which.
#[derive(Debug)]
pub(crate) struct Programs {
    all: Vec<AttentionProgram>,
    of_layer: Vec<usize>,
}

impl Programs {
    /// One program for all layers.
    pub fn uniform(program: &AttentionProgram, config: &ModelConfig) -> Result<Self, NnError> {
        program.check(config)?;
        Ok(Self { all: vec![program.clone()], of_layer: vec![0; config.num_hidden_layers] })
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
        let parse = |(name, program): (&String, &ProgramConfig)| {
            let parsed = AttentionProgram::parse(program, heads);
            let checked = parsed.and_then(|p| p.check(config).map(|()| p));
            checked.map_err(|e| e.in_program(name))
        };
        let all = programs.iter().map(parse).collect::<Result<_, _>>()?;
        let index = |name: &String| programs.keys().position(|known| known == name);
        let of_layer = layers.iter().cycle().take(config.num_hidden_layers);
        let of_layer = of_layer.map(|name| index(name).expect("a layer names a program"));
        Ok(Self { all, of_layer: of_layer.collect() })
    }

    /// The programs.
    pub fn all(&self) -> &[AttentionProgram] {
        &self.all
    }

    /// The program of each layer.
    pub fn of_layer(&self) -> &[usize] {
        &self.of_layer
    }

    /// The learned buffers of every layer.
    pub fn learned(&self) -> Vec<&[(String, LearnedBuffer)]> {
        self.of_layer.iter().map(|&program| self.all[program].learned.as_slice()).collect()
    }

    /// A plan for each program, which is told its `mean_kv_len`, where there is one.
    pub fn plan<B: Blocks>(
        &self,
        blocks: &mut B,
        heads: PackedHeads,
        first_heads: [usize; 2],
        mean_kv_len: &[Option<usize>],
        cached: bool,
    ) -> Result<Vec<B::Plan>, NnError> {
        let plan = |(number, program): (usize, &AttentionProgram)| {
            let mean_kv_len = mean_kv_len.get(number).copied().flatten();
            blocks.plan(program, &AttentionShape { heads, first_heads, mean_kv_len, cached })
        };
        self.all.iter().enumerate().map(plan).collect()
    }

    /// Keys that a query sees on average, for each program that reads the documents, at which a planner
    /// may not look; rounded up to a power of two, so that few plans are made.
    ///
    /// # Errors
    /// When `batch` has counted pairs of some programs only.
    pub fn mean_kv_len(&self, batch: &Batch<'_>) -> Result<Vec<Option<usize>>, NnError> {
        let (pairs, programs) = (batch.live_pairs, self.all.len());
        if pairs.is_empty() {
            return Ok(Vec::new());
        }
        if pairs.len() != programs {
            let told = pairs.len();
            return Err(NnError::batch(format!(
                "live_pairs has {told} elements; the model has {programs} attention programs"
            )));
        }
        let keys = |pairs: f64| (pairs / batch.tokens_total().max(1) as f64).ceil() as usize;
        let of = |(program, &pairs): (&AttentionProgram, &f64)| {
            program.reads_documents().then(|| keys(pairs).next_power_of_two())
        };
        Ok(self.all.iter().zip(pairs).map(of).collect())
    }

    /// What each layer runs, of plans that there are one for each program of.
    pub fn of_layers<'a, B: Blocks>(&'a self, plans: &'a [B::Plan]) -> Vec<LayerProgram<'a, B>> {
        let layer = |&i: &usize| LayerProgram { plan: &plans[i], learned: &self.all[i].learned };
        self.of_layer.iter().map(layer).collect()
    }

    /// [`Blocks::live_pairs`] in the mean of the layers, or what was counted before.
    pub fn live_pairs<B: Blocks>(
        &self,
        blocks: &B,
        plans: &[B::Plan],
        counted: &[f64],
    ) -> Option<f64> {
        let of = |(number, plan)| blocks.live_pairs(plan).or_else(|| counted.get(number).copied());
        let each = plans.iter().enumerate().map(of).collect::<Option<Vec<f64>>>()?;
        let sum: f64 = self.of_layer.iter().map(|&program| each[program]).sum();
        Some(sum / self.of_layer.len() as f64)
    }
}

/// The plans of training batches, the last few that were asked for: batches of one shape share what
/// does not depend on their documents.
pub(crate) struct Plans<B: Blocks> {
    made: Vec<Made<B>>,
}

struct Made<B: Blocks> {
    heads: PackedHeads,
    /// Of each program.
    mean_kv_len: Vec<Option<usize>>,
    /// One for each program.
    plans: Arc<[B::Plan]>,
}

/// Shapes and lengths of documents whose plans are kept.
const PLANS_KEPT: usize = 4;

impl<B: Blocks> Default for Plans<B> {
    fn default() -> Self {
        Self { made: Vec::new() }
    }
}

impl<B: Blocks> Plans<B> {
    /// The plans of `programs` for packed projections like `heads`, the first of which are `first_heads`
    /// of the model's.
    pub fn of(
        &mut self,
        blocks: &mut B,
        programs: &Programs,
        heads: PackedHeads,
        first_heads: [usize; 2],
        mean_kv_len: Vec<Option<usize>>,
    ) -> Result<Arc<[B::Plan]>, NnError> {
        let is_wanted = |m: &Made<B>| m.heads == heads && m.mean_kv_len == mean_kv_len;
        let made = match self.made.iter().position(is_wanted) {
            Some(i) => self.made.remove(i),
            None => {
                let plans = programs.plan(blocks, heads, first_heads, &mean_kv_len, false)?;
                let plans = plans.into();
                Made { heads, mean_kv_len, plans }
            }
        };
        self.made.truncate(PLANS_KEPT - 1);
        let plans = Arc::clone(&made.plans);
        self.made.insert(0, made);
        Ok(plans)
    }
}
