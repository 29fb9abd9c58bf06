//! The model: its parameters, its attention plans and the workspace of its steps.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use crate::batch::{Batch, IGNORE, LossSum};
use crate::config::{AttentionConfig, ModelConfig};
use crate::cpu::Cpu;
use crate::error::NnError;
use crate::matmul::{Matrix, matmul};
use crate::parameters::{Parameter, Places, Start, first_values, layout, unfilled};
use crate::program::{AttentionProgram, Plans};
use crate::step::{Clocks, Step};
use crate::tape::{Recompute, Workspace};

/// A Llama-family model on the CPU, in f32.
#[derive(Debug)]
pub struct Model {
    pub(crate) config: ModelConfig,
    pub(crate) plans: Plans,
    pub(crate) places: Places,
    pub(crate) parameters: Vec<Parameter>,
    /// How each parameter starts.
    starts: Vec<Start>,
    workspace: Mutex<Workspace<Vec<f32>>>,
}

/// One gradient for each parameter of a model, in the same order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gradients {
    /// Row-major like the parameters.
    pub arrays: Vec<Vec<f32>>,
}

impl Gradients {
    /// Zeros for every parameter of `model`.
    pub fn zeros(model: &Model) -> Self {
        Self { arrays: model.parameters.iter().map(|p| vec![0.0; p.data.len()]).collect() }
    }

    /// Sets all to zero.
    pub fn clear(&mut self) {
        self.arrays.iter_mut().for_each(|g| g.fill(0.0));
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
        let mut model = Self::unfilled_with_program(config, program)?;
        model.draw_missing(seed);
        Ok(model)
    }

    /// A model whose parameters have names and shapes but no elements, to be read from a
    /// checkpoint: no value is drawn that would be overwritten. A model with a parameter that has
    /// no elements refuses to run.
    ///
    /// # Errors
    /// Those of [`Model::new`].
    pub fn unfilled(config: ModelConfig, attention: &AttentionConfig) -> Result<Self, NnError> {
        config.validate()?;
        let program = AttentionProgram::parse(attention, config.num_attention_heads)?;
        Self::unfilled_with_program(config, &program)
    }

    fn unfilled_with_program(
        config: ModelConfig,
        program: &AttentionProgram,
    ) -> Result<Self, NnError> {
        config.validate()?;
        let plans = Plans::new(program, &config)?;
        let places = Places::new(&config, program.learned.len());
        let (parameters, starts) = unfilled(layout(&config, &program.learned));
        Ok(Self { config, plans, places, parameters, starts, workspace: Mutex::default() })
    }

    /// Gives every parameter without elements the first values that [`Model::new`] gives it.
    pub fn draw_missing(&mut self, seed: u64) {
        for (i, (p, start)) in self.parameters.iter_mut().zip(&self.starts).enumerate() {
            if p.data.is_empty() {
                p.data = first_values(i, &p.shape, *start, seed);
            }
        }
    }

    /// The sizes.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// All parameters, in a fixed order. A tied output projection is not among them.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// All parameters, to be changed. Lengths must stay.
    pub fn parameters_mut(&mut self) -> &mut [Parameter] {
        &mut self.parameters
    }

    /// The parameter called `name`.
    pub fn parameter(&self, name: &str) -> Option<&Parameter> {
        self.parameters.iter().find(|p| p.name == name)
    }

    /// The loss of a batch, summed over its labelled tokens.
    ///
    /// # Errors
    /// When the batch does not fit the model, or attention reads a buffer out of its bounds.
    pub fn loss(&self, batch: &Batch<'_>) -> Result<LossSum, NnError> {
        self.run(batch, false, |step, ws| step.loss(ws))
    }

    /// The loss of each token of a batch in nats, `[rows, len]`; 0 where it has no label.
    ///
    /// # Errors
    /// Those of [`Model::loss`].
    pub fn token_losses(&self, batch: &Batch<'_>) -> Result<Vec<f64>, NnError> {
        let (width, vocab) = (self.config.hidden_size, self.config.vocab_size);
        let head = Matrix::transposed(&self.parameters[self.places.head()].data, width);
        let mut losses = Vec::with_capacity(batch.labels.len());
        self.run(batch, false, |step, ws| {
            let sum = step.loss(ws)?;
            let chunk = (ws.logits.len() / vocab).max(1);
            for (x, labels) in ws.normed.chunks(chunk * width).zip(batch.labels.chunks(chunk)) {
                let z = &mut ws.logits[..labels.len() * vocab];
                let rows = Matrix::rows(x, width);
                matmul([labels.len(), vocab, width], rows, head, z, vocab, false);
                losses.extend(z.chunks_exact(vocab).zip(labels).map(|(z, &label)| nats(z, label)));
            }
            Ok(sum)
        })?;
        Ok(losses)
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
        let fits = |(p, g): (&Parameter, &Vec<f32>)| p.data.len() == g.len();
        if gradients.arrays.len() != self.parameters.len() {
            let (found, want) = (gradients.arrays.len(), self.parameters.len());
            let reason = format!("there are {found} gradients for {want} parameters");
            return Err(NnError::parameter("gradients", reason));
        }
        let pairs = self.parameters.iter().zip(&gradients.arrays);
        if let Some((p, g)) = pairs.clone().find(|&pair| !fits(pair)) {
            let reason = format!("its gradient has {} of {} elements", g.len(), p.data.len());
            return Err(NnError::parameter(&p.name, reason));
        }
        let arrays = &mut gradients.arrays;
        self.run(batch, true, |step, ws| step.forward_backward(ws, arrays, recompute))
    }

    fn run(
        &self,
        batch: &Batch<'_>,
        backward: bool,
        work: impl FnOnce(&mut Step<'_, Cpu>, &mut Workspace<Vec<f32>>) -> Result<f64, NnError>,
    ) -> Result<LossSum, NnError> {
        let start = Instant::now();
        batch.validate(&self.config)?;
        self.check_parameters()?;
        let shape = [batch.rows, batch.len];
        let bound = self.plans.training(shape, batch.documents)?;
        let plans = (0..self.config.num_hidden_layers)
            .map(|layer| {
                let learned = &self.parameters[self.places.learned(layer)];
                self.plans.layer(&bound, learned)
            })
            .collect::<Result<_, _>>()?;
        let mut step = Step {
            blocks: &Cpu,
            config: &self.config,
            places: self.places,
            order: self.plans.order(),
            parameters: self.parameters.iter().map(|p| &p.data).collect(),
            plans,
            learned: self.plans.learned(),
            batch: *batch,
            clocks: Clocks::default(),
        };
        // A step that panicked leaves arrays of odd sizes, which the next one fits again.
        let mut workspace = self.workspace.lock().unwrap_or_else(PoisonError::into_inner);
        let sum_nats = work(&mut step, &mut workspace)?;
        Ok(LossSum {
            sum_nats,
            tokens: batch.labels.iter().filter(|&&l| l != IGNORE).count(),
            live_pairs: if backward { self.plans.live_pairs(&bound) } else { None },
            attention_seconds: step.clocks.attention.seconds(),
            linear_seconds: step.clocks.linear.seconds(),
            loss_seconds: step.clocks.loss.seconds(),
            seconds: start.elapsed().as_secs_f64(),
        })
    }

    pub(crate) fn check_parameters(&self) -> Result<(), NnError> {
        let odd = |p: &&Parameter| p.data.len() != p.shape.iter().product::<usize>();
        match self.parameters.iter().find(odd) {
            Some(p) => {
                let reason = format!("shape {:?} but {} elements", p.shape, p.data.len());
                Err(NnError::parameter(&p.name, reason))
            }
            None => Ok(()),
        }
    }
}

/// `ln Σ_j e^{z_j} − z_label`; 0 without a label.
fn nats(z: &[f32], label: i32) -> f64 {
    if label == IGNORE {
        return 0.0;
    }
    let most = f64::from(z.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = z.iter().map(|&z| (f64::from(z) - most).exp()).sum();
    most + sum.ln() - f64::from(z[label as usize])
}
