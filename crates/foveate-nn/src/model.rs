//! The model: its parameters, its attention plans and the workspace of its steps.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crate::backend::Blocks;
use crate::batch::{Batch, IGNORE, LossSum};
use crate::config::{AttentionConfig, ModelConfig};
use crate::cpu::Cpu;
use crate::error::NnError;
use crate::parameters::{Parameter, ParameterLayout};
use crate::program::{AttentionProgram, Programs};
use crate::rope::RopeTable;
use crate::step::Step;
use crate::tape::{Recompute, Workspace};

/// A Llama-family model on the CPU, in f32.
#[derive(Debug)]
pub struct Model {
    pub(crate) config: ModelConfig,
    pub(crate) plans: Programs,
    pub(crate) layout: ParameterLayout,
    /// All parameters; empty before the first one is given values.
    pub(crate) weights: Vec<f32>,
    /// Which parameters have values.
    filled: Vec<bool>,
    running: Mutex<Running>,
}

/// What steps go on using.
#[derive(Debug, Default)]
struct Running {
    blocks: Cpu,
    workspace: Workspace<Vec<f32>>,
    table: Arc<RopeTable>,
}

/// The gradients of all parameters of a model, each at its parameter's place.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gradients {
    /// Elements as [`ParameterLayout`] places them.
    pub array: Vec<f32>,
}

impl Gradients {
    /// Zeros for every parameter of `model`.
    pub fn zeros(model: &Model) -> Self {
        Self { array: vec![0.0; model.layout.elems()] }
    }

    /// Sets all to zero.
    pub fn clear(&mut self) {
        self.array.fill(0.0);
    }

    /// The gradient of one parameter, row-major.
    pub fn of(&self, parameter: &Parameter) -> &[f32] {
        &self.array[parameter.place.clone()]
    }
}

impl Model {
    /// A model with first values that depend on `seed` alone: weights normal with deviation
    /// 0.02, those that write the residual stream smaller by `√(2·layers)`, norms 1.
    ///
    /// # Errors
    /// When a size does not fit, or mask or score cannot be read, bound or planned.
    pub fn new(
        config: ModelConfig,
        attention: &AttentionConfig,
        seed: u64,
    ) -> Result<Self, NnError> {
        let mut model = Self::unfilled(config, attention)?;
        model.draw_missing(seed);
        Ok(model)
    }

    /// [`Model::new`] with an attention program built in Rust.
    ///
    /// # Errors
    /// Those of [`Model::new`].
    pub fn with_program(
        config: ModelConfig,
        program: &AttentionProgram,
        seed: u64,
    ) -> Result<Self, NnError> {
        config.validate()?;
        let plans = Programs::uniform(program, &config)?;
        let mut model = Self::of(config, plans);
        model.draw_missing(seed);
        Ok(model)
    }

    /// A model whose parameters have names and shapes but no values, to be read from a
    /// checkpoint: no value is drawn that would be overwritten, and no memory is taken before the
    /// first is read. A model with a parameter that has no values refuses to run.
    ///
    /// # Errors
    /// Those of [`Model::new`].
    pub fn unfilled(config: ModelConfig, attention: &AttentionConfig) -> Result<Self, NnError> {
        config.validate()?;
        let plans = Programs::parse(attention, &config)?;
        Ok(Self::of(config, plans))
    }

    fn of(config: ModelConfig, plans: Programs) -> Self {
        let layout = ParameterLayout::new(&config, &plans.learned());
        let filled = vec![false; layout.parameters().len()];
        let running = Mutex::default();
        Self { config, plans, layout, weights: Vec::new(), filled, running }
    }

    /// Gives every parameter without values the first values that [`Model::new`] gives it.
    pub fn draw_missing(&mut self, seed: u64) {
        self.allocate();
        for (i, p) in self.layout.parameters().iter().enumerate() {
            if !self.filled[i] {
                self.layout.draw(i, seed, &mut self.weights[p.place.clone()]);
            }
        }
        self.filled.fill(true);
    }

    /// Lends the place of parameter `index` to `read`, which gives it values.
    ///
    /// # Errors
    /// What `read` returns; the parameter then counts as one without values.
    pub fn fill<E>(
        &mut self,
        index: usize,
        read: impl FnOnce(&mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.allocate();
        self.filled[index] = false;
        read(&mut self.weights[self.layout.parameters()[index].place.clone()])?;
        self.filled[index] = true;
        Ok(())
    }

    fn allocate(&mut self) {
        if self.weights.is_empty() {
            self.weights = vec![0.0; self.layout.elems()];
        }
    }

    /// The sizes.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Names, shapes and places of all parameters.
    pub fn layout(&self) -> &ParameterLayout {
        &self.layout
    }

    /// All parameters, in the order of their places. A tied output projection is not among them.
    pub fn parameters(&self) -> &[Parameter] {
        self.layout.parameters()
    }

    /// The parameter called `name`.
    pub fn parameter(&self, name: &str) -> Option<&Parameter> {
        self.parameters().iter().find(|p| p.name == name)
    }

    /// The values of one parameter, row-major; empty before any was given values.
    pub fn values(&self, parameter: &Parameter) -> &[f32] {
        self.weights.get(parameter.place.clone()).unwrap_or_default()
    }

    /// All parameters, each at its place; empty before any was given values.
    pub fn weights(&self) -> &[f32] {
        &self.weights
    }

    /// All parameters, to be changed.
    pub fn weights_mut(&mut self) -> &mut [f32] {
        &mut self.weights
    }

    /// The loss of a batch, summed over its labelled tokens.
    ///
    /// # Errors
    /// When the batch does not fit the model, or attention reads a buffer out of its bounds.
    pub fn loss(&self, batch: &Batch<'_>) -> Result<LossSum, NnError> {
        self.run(batch, false, |step, ws, totals| step.loss(ws, None, totals))
    }

    /// The loss of each token of a batch in nats, `[rows, len]`; 0 where it has no label.
    ///
    /// # Errors
    /// Those of [`Model::loss`].
    pub fn token_losses(&self, batch: &Batch<'_>) -> Result<Vec<f64>, NnError> {
        let mut losses = vec![0.0; batch.tokens_total()];
        self.run(batch, false, |step, ws, totals| step.loss(ws, Some(&mut losses), totals))?;
        Ok(losses.into_iter().map(f64::from).collect())
    }

    /// The loss of a batch, summed over its labelled tokens, and the gradients of that sum,
    /// which are added to `gradients`. They are bitwise the same for every `recompute` and any
    /// number of threads.
    ///
    /// # Errors
    /// Those of [`Model::loss`], or gradients that are not of this model's shapes. After an
    /// error in attention the gradients hold parts of a step.
    pub fn forward_backward(
        &self,
        batch: &Batch<'_>,
        gradients: &mut Gradients,
        recompute: Recompute,
    ) -> Result<LossSum, NnError> {
        let (found, want) = (gradients.array.len(), self.layout.elems());
        if found != want {
            let reason = format!("have {found} elements; this model's have {want}");
            return Err(NnError::parameter("gradients", reason));
        }
        let array = &mut gradients.array;
        let work = |step: &mut Step<'_, Cpu>, ws: &mut _, totals: &mut _| {
            step.forward_backward(ws, array, recompute, totals)
        };
        self.run(batch, true, work)
    }

    fn run(
        &self,
        batch: &Batch<'_>,
        backward: bool,
        work: impl FnOnce(&mut Step<'_, Cpu>, &mut Workspace<Vec<f32>>, &mut f64) -> Result<(), NnError>,
    ) -> Result<LossSum, NnError> {
        let start = Instant::now();
        batch.validate(&self.config)?;
        self.check_parameters()?;
        let shape = [batch.rows, batch.len];
        let plans = self.plans.training(shape, batch.documents, batch.mean_kv_len)?;
        // A step that panicked leaves arrays of odd sizes, which the next one fits again.
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let Running { blocks, workspace, table } = &mut *running;
        let last = batch.positions.iter().max().map_or(0, |&p| p as usize);
        Arc::make_mut(table).reach(&self.config, last + 1);
        let uploaded = blocks.upload(batch, table)?;
        let mut totals = blocks.totals()?;
        let mut step = Step {
            blocks,
            config: &self.config,
            layout: &self.layout,
            weights: &self.weights,
            programs: &self.plans.of_layers(&plans),
            batch: &uploaded,
            shape,
            cache: None,
        };
        work(&mut step, workspace, &mut totals)?;
        let sums = blocks.read(totals)?;
        Ok(LossSum {
            sum_nats: sums.nats,
            tokens: batch.labels.iter().filter(|&&l| l != IGNORE).count(),
            live_pairs: if backward { self.plans.live_pairs(&plans) } else { None },
            attention_seconds: sums.attention_seconds,
            linear_seconds: sums.linear_seconds,
            loss_seconds: sums.loss_seconds,
            seconds: start.elapsed().as_secs_f64(),
        })
    }

    pub(crate) fn check_parameters(&self) -> Result<(), NnError> {
        match self.filled.iter().position(|filled| !filled) {
            Some(i) => {
                let reason = "has no values; read them from a checkpoint, or draw them";
                Err(NnError::parameter(&self.parameters()[i].name, reason))
            }
            None => Ok(()),
        }
    }
}
