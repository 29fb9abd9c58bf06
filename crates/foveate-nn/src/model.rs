//! The model: its parameters on a device, its attention plans and the workspace of its steps.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use foveate::DType;

use crate::backend::{
    Array, BlockTime, Blocks, Moments, PackedHeads, Part, PartMut, Sums, Weights,
};
use crate::batch::{Batch, IGNORE, LossSum, Queued};
use crate::config::{AttentionConfig, ModelConfig};
use crate::cpu::Cpu;
use crate::error::NnError;
use crate::optimizer::{OptimizerStep, Span};
use crate::parameters::{Parameter, ParameterLayout};
use crate::plans::{Plans, Programs};
use crate::program::AttentionProgram;
use crate::rope::RopeTable;
use crate::step::{GradientsMut, Step};
use crate::tape::{Recomputation, Workspace};

/// A model on the device of `B`: the CPU, in f32, unless said otherwise.
pub struct Model<B: Blocks = Cpu> {
    pub(crate) config: ModelConfig,
    pub(crate) programs: Programs,
    pub(crate) layout: ParameterLayout,
    /// All parameters; empty before the first one is given values.
    pub(crate) weights: Weights<B::Array>,
    /// Which parameters have values.
    filled: Vec<bool>,
    running: Mutex<Running<B>>,
}

/// What steps go on using.
pub(crate) struct Running<B: Blocks> {
    pub blocks: B,
    workspace: Workspace<B::Array>,
    plans: Plans<B>,
    tables: Vec<Arc<RopeTable>>,
}

/// The gradients of all parameters of a model, each at its parameter's place.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gradients<A = Vec<f32>> {
    /// Elements as [`ParameterLayout`] places them. They mean nothing between [`Model::clear`] and the
    /// next batch.
    pub array: A,
    /// Whether the next batch writes over them.
    pub(crate) cleared: bool,
}

impl Gradients {
    /// Zeros for every parameter of `model`.
    pub fn zeros(model: &Model) -> Self {
        Self { array: vec![0.0; model.layout.elems()], cleared: false }
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

impl Moments {
    /// Zero moments for `elems` elements.
    pub fn zeros(elems: usize) -> Self {
        Self { mean: vec![0.0; elems], square: vec![0.0; elems] }
    }
}

/// Elements brought to the device at once.
const CHUNK: usize = 1 << 16;

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
        model.draw_missing(seed)?;
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
        let programs = Programs::uniform(program, &config)?;
        let mut model = Self::of(Cpu::default(), config, programs);
        model.draw_missing(seed)?;
        Ok(model)
    }

    /// [`Model::unfilled_on`] the CPU.
    ///
    /// # Errors
    /// Those of [`Model::new`].
    pub fn unfilled(config: ModelConfig, attention: &AttentionConfig) -> Result<Self, NnError> {
        Self::unfilled_on(Cpu::default(), config, attention)
    }

    /// The values of one parameter, row-major; empty before any was given values.
    pub fn values(&self, parameter: &Parameter) -> &[f32] {
        self.weights.array.get(parameter.place.clone()).unwrap_or_default()
    }

    /// All parameters, each at its place; empty before any was given values.
    pub fn weights(&self) -> &[f32] {
        &self.weights.array
    }

    /// All parameters, to be changed.
    pub fn weights_mut(&mut self) -> &mut [f32] {
        &mut self.weights.array
    }
}

impl<B: Blocks> Model<B> {
    /// A model on the device of `blocks`, whose parameters have names and shapes but no values, to be
    /// read from a checkpoint: no value is drawn that would be overwritten, and no memory is taken
    /// before the first is read. A model with a parameter that has no values refuses to run.
    ///
    /// # Errors
    /// Those of [`Model::new`].
    pub fn unfilled_on(
        blocks: B,
        config: ModelConfig,
        attention: &AttentionConfig,
    ) -> Result<Self, NnError> {
        config.validate()?;
        let programs = Programs::parse(attention, &config)?;
        Ok(Self::of(blocks, config, programs))
    }

    fn of(blocks: B, config: ModelConfig, programs: Programs) -> Self {
        let layout = ParameterLayout::new(&config, &programs.learned());
        let filled = vec![false; layout.parameters().len()];
        let (workspace, plans) = (Workspace::default(), Plans::default());
        let running = Running { blocks, workspace, plans, tables: Vec::new() };
        let weights = Weights::default();
        Self { config, programs, layout, weights, filled, running: Mutex::new(running) }
    }

    /// Gives every parameter without values the first values that [`Model::new`] gives it.
    ///
    /// # Errors
    /// When the device has no memory for them.
    pub fn draw_missing(&mut self, seed: u64) -> Result<(), NnError> {
        let mut values = vec![0.0; CHUNK];
        for i in 0..self.filled.len() {
            if self.filled[i] {
                continue;
            }
            let mut draw = self.layout.draw(i, seed);
            let mut left = self.layout.parameters()[i].place.len();
            self.fill(i, |put| {
                while left > 0 {
                    let values = &mut values[..left.min(CHUNK)];
                    values.fill_with(&mut draw);
                    put(values)?;
                    left -= values.len();
                }
                Ok::<_, NnError>(())
            })?;
        }
        Ok(())
    }

    /// Gives parameter `index` the values that `read` hands on, row-major, in pieces of any length.
    ///
    /// # Errors
    /// What `read` returns, values that are too many or too few, or no memory on the device; the
    /// parameter then counts as one without values.
    pub fn fill<E: From<NnError>>(
        &mut self,
        index: usize,
        read: impl FnOnce(&mut dyn FnMut(&[f32]) -> Result<(), E>) -> Result<(), E>,
    ) -> Result<(), E> {
        self.allocate()?;
        self.filled[index] = false;
        let Parameter { name, place, .. } = &self.layout.parameters()[index];
        let mut running = lock(&self.running);
        let mut at = place.start;
        let wrong = |given: usize| {
            let reason = format!("is given {given} values; it has {}", place.len());
            NnError::parameter(name, reason)
        };
        read(&mut |values| {
            let end = at + values.len();
            if end > place.end {
                return Err(wrong(end - place.start).into());
            }
            running.blocks.fill_weights(&mut self.weights, at, values)?;
            at = end;
            Ok(())
        })?;
        if at < place.end {
            return Err(wrong(at - place.start).into());
        }
        self.filled[index] = true;
        Ok(())
    }

    fn allocate(&mut self) -> Result<(), NnError> {
        if self.weights.array.elems() > 0 {
            return Ok(());
        }
        let (mut running, elems) = (lock(&self.running), self.layout.elems());
        let blocks = &mut running.blocks;
        let precision = blocks.precision();
        blocks.resize("weights", &mut self.weights.array, precision.weights, elems)?;
        blocks.clear(&mut self.weights.array)?;
        if precision.remainders {
            blocks.resize("remainders", &mut self.weights.remainders, DType::BF16, elems)?;
            blocks.clear(&mut self.weights.remainders)?;
        }
        Ok(())
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

    /// Waits for the f32 masters of the parameters from `first` on, and reads them back.
    ///
    /// # Errors
    /// When the device fails.
    pub fn masters(&self, first: usize, into: &mut [f32]) -> Result<(), NnError> {
        self.running().blocks.download_weights(&self.weights, first, into)
    }

    /// Waits for elements of a moment or of gradients from `first` on, and reads them back.
    ///
    /// # Errors
    /// When the device fails.
    pub fn download(
        &self,
        array: &B::Array,
        first: usize,
        into: &mut [f32],
    ) -> Result<(), NnError> {
        let place = first..first + into.len();
        self.running().blocks.download(Part { array, place }, into)
    }

    /// Brings elements of a moment from `first` on to the device.
    ///
    /// # Errors
    /// When the device fails.
    pub fn upload(&self, array: &mut B::Array, first: usize, from: &[f32]) -> Result<(), NnError> {
        let place = first..first + from.len();
        self.running().blocks.fill(PartMut { array, place, accumulate: false }, from)
    }

    /// Gradients of all parameters, 0.
    ///
    /// # Errors
    /// When the device has no memory for them.
    pub fn gradients(&self) -> Result<Gradients<B::Array>, NnError> {
        let dtype = self.running().blocks.precision().gradients;
        Ok(Gradients { array: self.zeros("gradients", dtype)?, cleared: false })
    }

    /// Moments of all parameters, 0.
    ///
    /// # Errors
    /// When the device has no memory for them.
    pub fn moments(&self) -> Result<Moments<B::Array>, NnError> {
        let dtype = self.running().blocks.precision().moments;
        let [mean, square] = ["means", "squares"].map(|name| self.zeros(name, dtype));
        Ok(Moments { mean: mean?, square: square? })
    }

    fn zeros(&self, name: &'static str, dtype: DType) -> Result<B::Array, NnError> {
        let (mut running, mut array) = (self.running(), B::Array::default());
        let blocks = &mut running.blocks;
        blocks.resize(name, &mut array, dtype, self.layout.elems())?;
        blocks.clear(&mut array)?;
        Ok(array)
    }

    /// What AdamW goes through.
    ///
    /// # Errors
    /// When the device has no memory for it.
    pub fn spans(&self) -> Result<B::Spans, NnError> {
        self.running().blocks.spans(&Span::of(&self.layout))
    }

    /// Totals of nothing, for the batches of a step.
    ///
    /// # Errors
    /// When the device fails.
    pub fn totals(&self) -> Result<B::Totals, NnError> {
        self.running().blocks.totals()
    }

    /// Waits for the totals of a step, and for no work that was queued since its
    /// [`Model::update`].
    ///
    /// # Errors
    /// When the device fails, or did since.
    pub fn read(&self, totals: B::Totals) -> Result<Sums, NnError> {
        self.running().blocks.read(totals)
    }

    /// Forgets the batches that were added to `gradients`: the next one writes over them, so nothing
    /// is set to 0 first.
    pub fn clear(&self, gradients: &mut Gradients<B::Array>) {
        gradients.cleared = true;
    }

    /// Takes the times of every block from here on, or no longer, where the device can.
    ///
    /// # Errors
    /// When the device fails.
    pub fn profile(&self, on: bool) -> Result<(), NnError> {
        self.running().blocks.profile(on)
    }

    /// The times of the blocks of steps whose totals were read since the last call, in their order.
    pub fn block_times(&self) -> Vec<BlockTime> {
        self.running().blocks.block_times()
    }

    /// Whether batches are only queued when [`Model::accumulate`] returns, so that those of the next
    /// step can be queued before the totals of this one are read.
    pub fn queues(&self) -> bool {
        self.running().blocks.queues()
    }

    /// Bytes of the device's memory that are free; `None` where arrays are in the memory of the
    /// process.
    ///
    /// # Errors
    /// When the device does not say.
    pub fn free_bytes(&self) -> Result<Option<u64>, NnError> {
        self.running().blocks.free_bytes()
    }

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
        let (found, want) = (gradients.array.elems(), self.layout.elems());
        if found != want {
            let reason = format!("have {found} elements; this model's have {want}");
            return Err(NnError::parameter("gradients", reason));
        }
        let (Gradients { array, cleared }, recompute) = (gradients, recompute.into());
        self.run(&mut self.running(), batch, true, |step, ws| {
            let accumulate = !std::mem::take(cleared);
            step.forward_backward(ws, GradientsMut { array, accumulate }, recompute, totals)
        })
    }

    /// Sums gradients over ranks by `sum`, which takes them a piece at a time, in order, in f32, and
    /// counts the `labelled` tokens that other ranks have added up. Waits for the device.
    ///
    /// # Errors
    /// Those of `sum`, or when the device fails.
    pub fn reduce<E: From<NnError>>(
        &self,
        gradients: &mut Gradients<B::Array>,
        totals: &mut B::Totals,
        labelled: usize,
        mut sum: impl FnMut(&mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        const PIECE: usize = 4 << 20;
        let mut running = self.running();
        let (blocks, array) = (&mut running.blocks, &mut gradients.array);
        let elems = array.elems();
        let mut values = vec![0.0; PIECE.min(elems)];
        for start in (0..elems).step_by(PIECE) {
            let place = start..elems.min(start + PIECE);
            let values = &mut values[..place.len()];
            blocks.download(Part { array, place: place.clone() }, values)?;
            sum(values)?;
            blocks.fill(PartMut { array, place, accumulate: false }, values)?;
        }
        Ok(blocks.count(totals, labelled)?)
    }

    /// Queues one step of AdamW with the gradients of the batches that `totals` has added up: their
    /// mean over labelled tokens, clipped. Nothing changes where its norm is not finite.
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
        let mut running = lock(&self.running);
        let blocks = &mut running.blocks;
        blocks.clip(step, &gradients.array, totals)?;
        blocks.adamw(step, spans, &mut self.weights, &gradients.array, moments, totals)
    }

    /// The loss of a batch, summed over its labelled tokens.
    ///
    /// # Errors
    /// When the batch does not fit the model, or attention reads a buffer out of its bounds.
    pub fn loss(&self, batch: &Batch<'_>) -> Result<LossSum, NnError> {
        let start = Instant::now();
        let running = &mut *self.running();
        let mut totals = running.blocks.totals()?;
        let queued =
            self.run(running, batch, false, |step, ws| step.loss(ws, None, &mut totals))?;
        let sums = running.blocks.read(totals)?;
        Ok(loss_sum(&queued, &sums, start))
    }

    /// The loss of each token of a batch in nats, `[rows, len]`; 0 where it has no label.
    ///
    /// # Errors
    /// Those of [`Model::loss`].
    pub fn token_losses(&self, batch: &Batch<'_>) -> Result<Vec<f64>, NnError> {
        batch.validate(&self.config)?;
        let running = &mut *self.running();
        let (mut each, mut losses) = (B::Array::default(), vec![0.0; batch.tokens_total()]);
        running.blocks.resize("token losses", &mut each, DType::F32, losses.len())?;
        let mut totals = running.blocks.totals()?;
        self.run(running, batch, false, |step, ws| step.loss(ws, Some(&mut each), &mut totals))?;
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

    fn run(
        &self,
        Running { blocks, workspace, plans, tables }: &mut Running<B>,
        batch: &Batch<'_>,
        counted: bool,
        work: impl FnOnce(&mut Step<'_, B>, &mut Workspace<B::Array>) -> Result<(), NnError>,
    ) -> Result<Queued, NnError> {
        batch.validate(&self.config)?;
        self.check_parameters()?;
        let shape = [batch.rows, batch.len];
        let heads = PackedHeads::of(&self.config, shape);
        let plans = plans.of(blocks, &self.programs, heads, batch.mean_kv_len)?;
        let last = batch.positions.iter().max().map_or(0, |&p| p as usize);
        RopeTable::reach_all(tables, &self.config, last + 1);
        let uploaded = blocks.upload(batch, tables)?;
        let bind = |plan: &B::Plan| blocks.bind(plan, batch.documents, &uploaded);
        let plans: Vec<B::Plan> = plans.iter().map(bind).collect::<Result<_, _>>()?;
        let mut step = Step {
            blocks: &mut *blocks,
            config: &self.config,
            layout: &self.layout,
            weights: &self.weights.array,
            programs: &self.programs.of_layers(&plans),
            batch: &uploaded,
            shape,
            cache: None,
        };
        work(&mut step, workspace)?;
        Ok(Queued {
            tokens: batch.labels.iter().filter(|&&l| l != IGNORE).count(),
            live_pairs: if counted { self.programs.live_pairs(blocks, &plans) } else { None },
        })
    }

    /// What steps use. A step that panicked leaves arrays of odd sizes, which the next one fits
    /// again.
    pub(crate) fn running(&self) -> MutexGuard<'_, Running<B>> {
        lock(&self.running)
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

fn loss_sum(queued: &Queued, sums: &Sums, start: Instant) -> LossSum {
    LossSum {
        sum_nats: sums.nats,
        tokens: queued.tokens,
        live_pairs: queued.live_pairs,
        attention_seconds: sums.attention_seconds,
        linear_seconds: sums.linear_seconds,
        loss_seconds: sums.loss_seconds,
        seconds: start.elapsed().as_secs_f64(),
    }
}

impl<B: Blocks> std::fmt::Debug for Model<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model").field("config", &self.config).finish_non_exhaustive()
    }
}

fn lock<T>(running: &Mutex<T>) -> MutexGuard<'_, T> {
    running.lock().unwrap_or_else(PoisonError::into_inner)
}
