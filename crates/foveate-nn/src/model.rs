//! The model: its parameters on a device, its attention plans and the workspace of its steps.

mod gradients;
mod memory;
mod prepared;
mod replay;
mod state;
mod training;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use foveate::DType;

use crate::account::StepKind;
use crate::arena::Places;
use crate::backend::{
    Array, BlockTime, Blocks, ContextOf, HeldBytes, Moments, PackedHeads, Part, PartMut, Recording,
    ReplicaSumsOf, StreamTransfers, Sums, Weights,
};
use crate::config::{AttentionConfig, ModelConfig};
use crate::cpu::Cpu;
use crate::error::NnError;
use crate::gathering::Gathering;
use crate::groups::PassingGradients;
use crate::moments::Moment;
use crate::optimizer::{Rule, Span, Treatment};
use crate::parameters::{Parameter, ParameterGroup, ParameterLayout};
use crate::plans::{Plans, Programs};
use crate::precision::Precision;
use crate::program::AttentionProgram;
use crate::rope::RopeTable;
use crate::share::{Cutting, Share};
use crate::sharing::{Carrier, Peers, Sharing, StepRanks, TensorSharing};
use crate::tape::Workspace;
use crate::tensor::TensorPart;

pub use gradients::Gradients;
pub use replay::{NotFinite, NotFinitePlace};

/// A model on the device of `B`: the CPU, in f32, unless said otherwise.
pub struct Model<B: Blocks = Cpu> {
    pub(crate) config: ModelConfig,
    /// What of it this rank has.
    pub(crate) part: TensorPart,
    /// The sizes of that.
    pub(crate) local: ModelConfig,
    pub(crate) programs: Programs,
    pub(crate) layout: ParameterLayout,
    /// What of the parameters is held: all of it, unless they are cut over ranks.
    share: Share,
    /// The parameters that are held; empty before the first one is given values.
    pub(crate) weights: Weights<B::Array>,
    /// Which parameters have values.
    filled: Vec<bool>,
    /// Of the loss that gradients are of: the weight of its z-loss, or 0.
    z_weight: f32,
    running: Mutex<Running<B>>,
}

/// What steps go on using.
pub(crate) struct Running<B: Blocks> {
    pub blocks: B,
    workspace: Workspace<B::Array>,
    /// Where the arrays of passes lie, by what is run.
    places: Vec<(Passed, Option<Places>)>,
    plans: Plans<B>,
    tables: Vec<Arc<RopeTable>>,
    /// Where parameters are cut over ranks.
    gathering: Option<Gathering<B>>,
    /// Those that take steps together.
    ranks: Option<StepRanks>,
    /// Between ranks of `tensor`.
    tensor: Option<Box<dyn StreamTransfers<B>>>,
    /// Attention over the ranks of `context`, where the device computes it.
    context: Option<ContextOf<B>>,
    /// Over ranks that hold the same parameters, where the device sums.
    replicas: Option<ReplicaSumsOf<B>>,
    /// Gradients of a group at a time, whose sums are kept.
    passing: PassingGradients<B::Array>,
}

/// What the places of arrays depend on: rows of a batch and tokens of a row, what is run, and whether
/// the memory of gradients is idle.
type Passed = ([usize; 2], StepKind, bool);

impl Moments {
    /// Zero moments for `elems` elements.
    pub fn zeros(elems: usize) -> Self {
        Self { mean: vec![0.0; elems], square: vec![0.0; elems] }
    }
}

/// First values drawn at once, by all threads.
const DRAWN: usize = 1 << 20;

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
        let part = TensorPart::whole(&config);
        let mut model = Self::of(Cpu::default(), config, programs, &|_| false, part)?;
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
        Self::unfilled_with(blocks, config, attention, &|_| false)
    }

    /// [`Model::unfilled_on`], where the parameters that `frozen` says so of, by their names, are not
    /// trained: they have no gradient, no moments and no master.
    ///
    /// # Errors
    /// Those of [`Model::new`] and of [`ParameterLayout::new`].
    pub fn unfilled_with(
        blocks: B,
        config: ModelConfig,
        attention: &AttentionConfig,
        frozen: &dyn Fn(&str) -> bool,
    ) -> Result<Self, NnError> {
        config.validate()?;
        let part = TensorPart::whole(&config);
        Self::unfilled_part(blocks, config, attention, frozen, part)
    }

    /// [`Model::unfilled_with`], of what a rank of `tensor` has of the model of these sizes. Before it runs
    /// it is given its [`Model::tensor`].
    ///
    /// # Errors
    /// Those of [`Model::unfilled_with`], or when a part has other sizes than the model.
    pub fn unfilled_part(
        blocks: B,
        config: ModelConfig,
        attention: &AttentionConfig,
        frozen: &dyn Fn(&str) -> bool,
        part: TensorPart,
    ) -> Result<Self, NnError> {
        config.validate()?;
        if part.part >= part.parts || part != TensorPart::of(&config, part.part, part.parts)? {
            let reason = format!("{part:?} is no part of a model of these sizes");
            return Err(NnError::parameter("model", reason));
        }
        let programs = Programs::parse(attention, &config)?;
        Self::of(blocks, config, programs, frozen, part)
    }

    fn of(
        blocks: B,
        config: ModelConfig,
        programs: Programs,
        frozen: &dyn Fn(&str) -> bool,
        part: TensorPart,
    ) -> Result<Self, NnError> {
        let layout = ParameterLayout::of_part(&config, &programs.learned(), frozen, &part)?;
        let local = part.local(&config);
        let filled = vec![false; layout.parameters().len()];
        let (workspace, plans) = (Workspace::default(), Plans::default());
        let running = Running {
            blocks,
            workspace,
            places: Vec::new(),
            plans,
            tables: Vec::new(),
            gathering: None,
            ranks: None,
            tensor: None,
            context: None,
            replicas: None,
            passing: Default::default(),
        };
        let (weights, running) = (Weights::default(), Mutex::new(running));
        let share = layout.share(0, 1);
        let z_weight = 0.0;
        Ok(Self {
            config,
            part,
            local,
            programs,
            layout,
            share,
            weights,
            filled,
            z_weight,
            running,
        })
    }

    /// Cuts the parameters over ranks: this one, `part` of `cutting.parts`, holds its [`Share`], and
    /// gathers the rest from `ranks` when a pass needs it. Every rank makes the same passes and updates.
    ///
    /// # Errors
    /// When parameters have values already, or the ranks cannot reach each other.
    pub fn cut(
        &mut self,
        cutting: Cutting,
        part: usize,
        ranks: &dyn Sharing,
    ) -> Result<(), NnError> {
        let mut running = lock(&self.running);
        if self.weights.array.elems() > 0 {
            let reason = "are cut over ranks before they are given values";
            return Err(NnError::parameter("parameters", reason));
        }
        self.share = self.layout.share(part, cutting.parts);
        let transfers = running.blocks.transfers(ranks)?;
        running.gathering = Some(Gathering::new(&self.layout, cutting, part, transfers));
        Ok(())
    }

    /// Lets the stream move between this rank of `tensor` and `ranks`, which have the other parts of the model.
    ///
    /// # Errors
    /// When the ranks cannot reach each other.
    pub fn tensor(&mut self, ranks: &dyn TensorSharing) -> Result<(), NnError> {
        let mut running = lock(&self.running);
        running.tensor = Some(running.blocks.stream_transfers(ranks)?);
        Ok(())
    }

    /// Takes steps together with `ranks`: the norm of gradients, what clips them, whether loss and norm are
    /// finite, and the number of labelled tokens are those of all of them, by one sum of a few numbers. All
    /// ranks make the same updates.
    pub fn step_with(&mut self, ranks: StepRanks) {
        lock(&self.running).ranks = Some(ranks);
    }

    /// Attention over the ranks of `peers`, which share the rows of a batch, by `carrier`. False where the
    /// device leaves it to the host ([`crate::ContextAttention`]). All ranks call it.
    ///
    /// # Errors
    /// When the ranks cannot go on, or the device cannot reach the others.
    pub fn context(&mut self, peers: Box<dyn Peers>, carrier: Carrier) -> Result<bool, NnError> {
        let running = &mut *lock(&self.running);
        running.context = running.blocks.context(peers, carrier)?;
        Ok(running.context.is_some())
    }

    /// Sums of gradients over the ranks of `peers`, which hold the same parameters, by `carrier`; where the
    /// device leaves them to the host, [`Model::reduce`] makes them. All ranks call it.
    ///
    /// # Errors
    /// When the ranks cannot go on, or the device cannot reach the others.
    pub fn replicas(&mut self, peers: Box<dyn Peers>, carrier: Carrier) -> Result<(), NnError> {
        let running = &mut *lock(&self.running);
        running.replicas = running.blocks.replicas(peers, carrier)?;
        Ok(())
    }

    /// Dtypes of parameters, gradients, moments and activations.
    pub fn precision(&self) -> Precision {
        self.running().blocks.precision()
    }

    /// What of the model this rank has.
    pub fn tensor_part(&self) -> &TensorPart {
        &self.part
    }

    /// What of the parameters is held, with its gradients and moments.
    pub fn share(&self) -> &Share {
        &self.share
    }

    /// Whether parameters are cut over ranks, so that it runs on all of them only.
    pub fn is_cut(&self) -> bool {
        self.part.is_cut() || self.running().gathering.is_some()
    }

    /// The most bytes of parameters that were gathered at once.
    pub fn most_gathered_bytes(&self) -> usize {
        let running = self.running();
        let most = running.gathering.as_ref().map_or(0, Gathering::most);
        most * running.blocks.precision().weights.bytes()
    }

    /// Gives every parameter without values the first values that [`Model::new`] gives it.
    ///
    /// # Errors
    /// When the device has no memory for them.
    pub fn draw_missing(&mut self, seed: u64) -> Result<(), NnError> {
        let largest = self.layout.parameters().iter().map(Parameter::elems).max().unwrap_or(0);
        let mut values = vec![0.0; DRAWN.min(largest)];
        for i in 0..self.filled.len() {
            if self.filled[i] {
                continue;
            }
            let draw = self.layout.draw(i, seed);
            let elems = self.layout.parameters()[i].elems();
            self.fill(i, |put| {
                for at in (0..elems).step_by(DRAWN) {
                    let values = &mut values[..DRAWN.min(elems - at)];
                    draw(at, values);
                    put(values)?;
                }
                Ok::<_, NnError>(())
            })?;
        }
        Ok(())
    }

    /// Gives parameter `index` the values that `read` hands on, those of all of it, row-major, in pieces of
    /// any length. Where parameters are cut over ranks, those of the share are kept.
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
        let parameter = &self.layout.parameters()[index];
        let mut running = lock(&self.running);
        let (mut at, elems) = (0, parameter.elems());
        let wrong = |given: usize| {
            let reason = format!("is given {given} values; it has {elems}");
            NnError::parameter(&parameter.name, reason)
        };
        read(&mut |values| {
            let end = at + values.len();
            if end > elems {
                return Err(wrong(end).into());
            }
            for (held, place) in parameter.held(at..end) {
                let values = &values[held.start - at..held.end - at];
                for (piece, first) in self.share.pieces(&(place..place + held.len())) {
                    let values = &values[piece.start - place..piece.end - place];
                    running.blocks.fill_weights(&mut self.weights, first, values)?;
                }
            }
            at = end;
            Ok(())
        })?;
        if at < elems {
            return Err(wrong(at).into());
        }
        self.filled[index] = true;
        Ok(())
    }

    /// Gives parameter `index` the values `period` over and over again, made many on the device: a model
    /// of billions of parameters to be timed has its values in a second. Where parameters are cut over
    /// ranks, each piece of them that is held begins with the first value.
    ///
    /// # Errors
    /// When `period` is empty, or the device has no memory for the values.
    pub fn fill_repeating(&mut self, index: usize, period: &[f32]) -> Result<(), NnError> {
        self.allocate()?;
        let parameter = &self.layout.parameters()[index];
        if period.is_empty() {
            return Err(NnError::parameter(&parameter.name, "is given no values to repeat"));
        }
        let blocks = &mut lock(&self.running).blocks;
        for (piece, first) in self.share.pieces(&parameter.place) {
            let (place, some) = (first..first + piece.len(), period.len().min(piece.len()));
            blocks.fill_weights(&mut self.weights, first, &period[..some])?;
            let Weights { array, remainders } = &mut self.weights;
            for array in [array, remainders] {
                if place.end <= array.elems() {
                    let part = PartMut { array, place: place.clone(), accumulate: false };
                    blocks.repeat(part, some)?;
                }
            }
        }
        self.filled[index] = true;
        Ok(())
    }

    fn allocate(&mut self) -> Result<(), NnError> {
        if self.weights.array.elems() > 0 {
            return Ok(());
        }
        let (mut running, elems) = (lock(&self.running), self.share.elems());
        let blocks = &mut running.blocks;
        let precision = blocks.precision();
        blocks.resize("weights", &mut self.weights.array, precision.weights, elems)?;
        blocks.clear(&mut self.weights.array)?;
        if precision.remainders {
            let trained = self.share.trained();
            blocks.resize("remainders", &mut self.weights.remainders, DType::BF16, trained)?;
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

    /// The attention programs, without the documents of a batch.
    pub fn programs(&self) -> &[AttentionProgram] {
        self.programs.all()
    }

    /// The program of each layer, an index into [`Model::programs`].
    pub fn programs_of_layers(&self) -> &[usize] {
        self.programs.of_layer()
    }

    /// Waits for the f32 masters of the parameters from `first` on, and reads them back.
    ///
    /// # Errors
    /// When another rank owns one of them, or the device fails.
    pub fn masters(&self, first: usize, into: &mut [f32]) -> Result<(), NnError> {
        let mut running = self.running();
        for (piece, own) in self.owned(first..first + into.len())? {
            let into = &mut into[piece.start - first..piece.end - first];
            running.blocks.download_weights(&self.weights, own, into)?;
        }
        Ok(())
    }

    /// The pieces of the share that make up `place`, with where they begin in the arrays of the rank.
    fn owned(&self, place: Range<usize>) -> Result<Vec<(Range<usize>, usize)>, NnError> {
        let pieces = self.share.pieces(&place);
        if pieces.iter().map(|(piece, _)| piece.len()).sum::<usize>() < place.len() {
            let reason = format!("elements {place:?} are not all of this rank's share");
            return Err(NnError::parameter("parameters", reason));
        }
        Ok(pieces)
    }

    /// Waits for elements of the gradients of the share from `first` on, and reads them back.
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

    /// Brings elements of the gradients of the share from `first` on to the device.
    ///
    /// # Errors
    /// When the device fails.
    pub fn upload(&self, array: &mut B::Array, first: usize, from: &[f32]) -> Result<(), NnError> {
        let place = first..first + from.len();
        self.running().blocks.fill(PartMut { array, place, accumulate: false }, from)
    }

    /// Waits for elements of a moment from that of parameter `first` on, and reads them back.
    ///
    /// # Errors
    /// When another rank owns one of them, or the device fails.
    pub fn download_moment(
        &self,
        moment: Moment,
        array: &B::Array,
        first: usize,
        into: &mut [f32],
    ) -> Result<(), NnError> {
        let (mut running, elems) = (self.running(), self.share.trained());
        for (piece, own) in self.owned(first..first + into.len())? {
            let into = &mut into[piece.start - first..piece.end - first];
            running.blocks.download_moment(moment, elems, array, own, into)?;
        }
        Ok(())
    }

    /// Brings elements of a moment from that of parameter `first` on to the device, each rounded to the
    /// nearest that is kept. Of a moment of 8 bits they are to be whole blocks
    /// ([`crate::moments::Filler`]). Where parameters are cut over ranks, those of the share are kept.
    ///
    /// # Errors
    /// When the device fails.
    pub fn upload_moment(
        &self,
        moment: Moment,
        array: &mut B::Array,
        first: usize,
        from: &[f32],
    ) -> Result<(), NnError> {
        let (mut running, elems) = (self.running(), self.share.trained());
        for (piece, own) in self.share.pieces(&(first..first + from.len())) {
            let from = &from[piece.start - first..piece.end - first];
            running.blocks.fill_moment(moment, elems, array, own, from)?;
        }
        Ok(())
    }

    /// Gradients of the share's trained parameters, 0.
    ///
    /// # Errors
    /// When the device has no memory for them.
    pub fn gradients(&self) -> Result<Gradients<B::Array>, NnError> {
        let (blocks, mut array) = (&mut self.running().blocks, B::Array::default());
        let dtype = blocks.precision().gradients;
        blocks.resize("gradients", &mut array, dtype, self.share.trained())?;
        blocks.clear(&mut array)?;
        Ok(Gradients { array, cleared: false, one_batch: false })
    }

    /// [`Model::gradients`] for steps of one batch each: where arrays of the device may share memory,
    /// activations lie in that of the gradients that the backward pass has not come to.
    ///
    /// # Errors
    /// Those of [`Model::gradients`].
    pub fn gradients_of_one_batch(&self) -> Result<Gradients<B::Array>, NnError> {
        Ok(Gradients { cleared: true, one_batch: true, ..self.gradients()? })
    }

    /// The gradients of a group of parameters at a time, of [`Model::step_in_backward`].
    ///
    /// # Errors
    /// When the device has no memory for them.
    pub fn passing_gradients(&self) -> Result<PassingGradients<B::Array>, NnError> {
        let mut gradients = PassingGradients::default();
        gradients.fit(&mut self.running().blocks, &self.layout)?;
        Ok(gradients)
    }

    /// The moments of the share's trained parameters that `rule` keeps, 0.
    ///
    /// # Errors
    /// When the device has no memory for them.
    pub fn moments(&self, rule: &Rule) -> Result<Moments<B::Array>, NnError> {
        let blocks = &mut self.running().blocks;
        let precision = blocks.precision();
        let (dtype, elems) = precision.moments.array(self.share.trained());
        let mut zeros = |name| {
            let mut array = B::Array::default();
            if precision.host_moments {
                blocks.resize_on_host(name, &mut array, dtype, elems)?;
            } else {
                blocks.resize(name, &mut array, dtype, elems)?;
                blocks.clear(&mut array)?;
            }
            Ok::<_, NnError>(array)
        };
        let mean = zeros("means")?;
        let square = if rule.keeps_squares() { zeros("squares")? } else { B::Array::default() };
        Ok(Moments { mean, square })
    }

    /// What the optimiser goes through, each parameter treated as `treat` says.
    ///
    /// # Errors
    /// When the device has no memory for it.
    pub fn spans(&self, treat: impl Fn(&Parameter) -> Treatment) -> Result<B::Spans, NnError> {
        let spans = Span::owned(&Span::of(&self.layout, treat), &self.share);
        self.running().blocks.spans(&spans)
    }

    /// [`Model::spans`] of each group apart, for [`Model::step_in_backward`].
    ///
    /// # Errors
    /// When the device has no memory for them.
    pub fn group_spans(
        &self,
        treat: impl Fn(&Parameter) -> Treatment,
    ) -> Result<Vec<B::Spans>, NnError> {
        let spans = Span::of(&self.layout, treat);
        let blocks = &mut self.running().blocks;
        let mut of = |group: &ParameterGroup| {
            blocks.spans(&Span::owned(&Span::within(&spans, &group.place), &self.share))
        };
        self.layout.groups().iter().map(&mut of).collect()
    }

    /// Totals of nothing, for the batches of a step.
    ///
    /// # Errors
    /// When the device fails.
    pub fn totals(&self) -> Result<B::Totals, NnError> {
        self.running().blocks.totals()
    }

    /// Waits for the totals of a step, and for no work that was queued since its
    /// [`Model::update`]. Those of every step are to be read: a step that is not finite stops the updates
    /// behind it until its totals are.
    ///
    /// # Errors
    /// When the device fails, or did since; and where the update changed nothing because of a step before
    /// that was not finite, whose totals were not read.
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

    /// Keeps a device that queues busy for `duration`, at most a second, so that what is queued meanwhile runs
    /// without waiting for the host.
    ///
    /// # Errors
    /// When the device fails.
    pub fn pause(&self, duration: Duration) -> Result<(), NnError> {
        self.running().blocks.pause(duration)
    }

    /// The times of the blocks of steps whose totals were read since the last call, in their order.
    pub fn block_times(&self) -> Vec<BlockTime> {
        self.running().blocks.block_times()
    }

    /// Has the device record the passes of batches and queue the records for later batches, with the same
    /// bits; where it cannot, [`Model::recording`] says why.
    pub fn record_passes(&self) {
        self.running().blocks.record_passes();
    }

    /// Whether passes are recorded.
    pub fn recording(&self) -> Recording {
        self.running().blocks.recording()
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

    /// What this process holds of the device's memory; `None` where arrays are in the memory of the
    /// process.
    pub fn held_bytes(&self) -> Option<HeldBytes> {
        self.running().blocks.held_bytes()
    }

    /// The peak rate of the device, in TFLOP/s: [`Blocks::peak_tflops`].
    pub fn peak_tflops(&self) -> Option<f64> {
        self.running().blocks.peak_tflops()
    }

    /// What the bits of steps depend on beside program, weights and data, for batches of `rows` rows of
    /// `len` tokens, one document each: of a GPU its driver and libraries, and the kernels of each
    /// attention program. Empty on the CPU, whose results are the same everywhere.
    ///
    /// # Errors
    /// When attention cannot be planned for such a batch, or a library is missing.
    pub fn bits_depend_on(
        &self,
        rows: usize,
        len: usize,
    ) -> Result<BTreeMap<String, String>, NnError> {
        let mut running = self.running();
        let blocks = &mut running.blocks;
        if blocks.free_bytes()?.is_none() {
            return Ok(BTreeMap::new());
        }
        let (heads, first) = (PackedHeads::of(&self.local, [rows, len]), self.part.first_heads());
        let mut all = BTreeMap::new();
        let plans = self.programs.plan(blocks, heads, first, &[], false)?;
        for (number, plan) in plans.iter().enumerate() {
            for (name, value) in blocks.bits_depend_on(plan)? {
                // What several programs differ in is told of each.
                match all.get(&name) {
                    Some(known) if *known != value => {
                        all.insert(format!("{name} {}", number + 1), value);
                    }
                    _ => {
                        all.insert(name, value);
                    }
                }
            }
        }
        Ok(all)
    }

    /// From here on finds out by timing, once for each problem, how to compute where the device's
    /// libraries leave a choice: which algorithm of cuBLASLt multiplies. `given` is what an earlier run
    /// chose ([`Model::choices`]), which is taken where the device and its libraries are the same.
    pub fn choose(&self, given: &BTreeMap<String, usize>) {
        self.running().blocks.choose(given);
    }

    /// What was chosen since [`Model::choose`], by name. The bits of steps depend on it.
    pub fn choices(&self) -> BTreeMap<String, usize> {
        self.running().blocks.choices()
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

impl<B: Blocks> std::fmt::Debug for Model<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model").field("config", &self.config).finish_non_exhaustive()
    }
}

fn lock<T>(running: &Mutex<T>) -> MutexGuard<'_, T> {
    running.lock().unwrap_or_else(PoisonError::into_inner)
}
