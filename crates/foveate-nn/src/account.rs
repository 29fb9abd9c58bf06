//! What a step takes, noted by running it dry: arrays, blocks, memory, operations.

use crate::arena::{Idle, Places};
use crate::backend::{Array, Blocks, LayerProgram};
use crate::config::{AttentionConfig, LearnedBuffer, ModelConfig};
use crate::cpu::Cpu;
use crate::dry::{Dry, DryArray, NotedArray, NotedBlock};
use crate::error::NnError;
use crate::gathering::Phase;
use crate::held::{Held, Target};
use crate::matmul::{packed, scratch_deep};
use crate::parameters::ParameterLayout;
use crate::pass::{Parameters, Pass, Trained, Whole};
use crate::process;
use crate::share::Cutting;
use crate::stream::Stream;
use crate::tape::{Recomputation, Workspace};
use crate::tensor::TensorPart;

use foveate::DType;

/// What is run dry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepKind {
    /// The loss alone, as an evaluation computes it.
    Loss,
    /// The loss and its gradients, with the optimiser's moments beside them.
    Training(Training),
}

/// What training keeps and computes again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Training {
    /// Activations that are computed again.
    pub recompute: Recomputation,
    /// Whether parameters are updated in the backward pass, so that gradients of a group exist at a
    /// time.
    pub in_backward: bool,
    /// Whether the optimiser keeps the mean of squares beside that of gradients.
    pub squares: bool,
    /// Whether a step has one batch, so that activations may lie where gradients come to be.
    pub one_batch: bool,
    /// Over how many ranks parameters are cut.
    pub cutting: Cutting,
}

impl<R: Into<Recomputation>> From<R> for Training {
    /// With AdamW, after the backward pass, of any number of batches.
    fn from(recompute: R) -> Self {
        let (recompute, cutting) = (recompute.into(), Cutting::WHOLE);
        Self { recompute, in_backward: false, squares: true, one_batch: false, cutting }
    }
}

/// All that a step does, in order, and all that it does it with.
#[derive(Clone, Debug, PartialEq)]
pub struct Account {
    /// Parameters, what completes them to masters, gradients and the optimiser's moments.
    pub state: Vec<NotedArray>,
    /// What a step keeps and passes on.
    pub activations: Vec<NotedArray>,
    /// The blocks, in their order.
    pub blocks: Vec<NotedBlock>,
    /// Bytes of the host's memory beside that of a device: of moments and of inputs of layers that lie there.
    pub host_bytes: u64,
    /// Where those of a pass lie, where they share memory: all but the first [`OF_BATCH`].
    pub(crate) places: Option<Places>,
}

/// Activations that are there before a pass: the batch, and its rotations.
const OF_BATCH: usize = 2;

impl Account {
    /// Floating-point operations of all products, those of attention over all pairs of query and
    /// key; what is computed twice counts twice.
    pub fn flops(&self) -> f64 {
        self.blocks.iter().map(|block| block.flops).sum()
    }

    /// Bytes that all blocks read and write.
    pub fn bytes_moved(&self) -> f64 {
        self.blocks.iter().map(|block| block.bytes).sum()
    }

    /// The most bytes of activations that are needed at once: the size of an arena in which no two
    /// arrays lie in one place while both are needed, if there were no gaps.
    pub fn needed_bytes(&self) -> u64 {
        let mut changes = vec![0i128; self.blocks.len() + 1];
        for array in &self.activations {
            for needed in &array.needed {
                changes[needed.start] += i128::from(array.bytes);
                changes[needed.end] -= i128::from(array.bytes);
            }
        }
        let live = changes.into_iter().scan(0i128, |live, change| {
            *live += change;
            Some(*live)
        });
        u64::try_from(live.max().unwrap_or(0)).unwrap_or(u64::MAX)
    }

    /// Bytes of all activations: of the memory that those of a pass share beside that of gradients, where
    /// the device lets them, or of each.
    pub fn activation_bytes(&self) -> u64 {
        match &self.places {
            None => sum(&self.activations),
            Some(places) => sum(&self.activations[..OF_BATCH]).saturating_add(places.arena),
        }
    }

    /// Where the arrays of a loss lie, in memory that is idle first.
    fn places_of_loss(self, idle: Option<Idle>) -> Option<Places> {
        match idle {
            None => self.places,
            Some(idle) => self.places.map(|_| Places::new(&self.activations[OF_BATCH..], &[idle])),
        }
    }

    fn state_bytes(&self, name: &str) -> u64 {
        sum(self.state.iter().filter(|array| array.name == name))
    }

    /// The memory of a process that runs such steps on the CPU, where every array has a place of
    /// its own; without attention's workspace.
    pub fn memory(&self) -> MemoryEstimate {
        let threads = rayon::current_num_threads();
        let deep = || self.blocks.iter().filter_map(|block| block.deep_product);
        let kept = deep().map(|sizes| scratch_deep(sizes, threads)).max().unwrap_or(0);
        let packed = deep().map(|[m, n, _]| packed([m, n], threads)).max().unwrap_or(0);
        MemoryEstimate {
            weights: [WEIGHTS, GATHERED, REMAINDERS]
                .map(|name| self.state_bytes(name))
                .into_iter()
                .fold(0, u64::saturating_add),
            gradients: self.state_bytes(GRADIENTS),
            optimizer: self.state_bytes(MOMENT),
            activations: self.activation_bytes(),
            attention: 0,
            process: process::bytes() + (kept + packed) as u64,
            host: self.host_bytes,
        }
    }
}

/// Bytes of all of them.
fn sum<'a>(arrays: impl IntoIterator<Item = &'a NotedArray>) -> u64 {
    arrays.into_iter().fold(0, |bytes, array| bytes.saturating_add(array.bytes))
}

const WEIGHTS: &str = "weights";
/// Groups of parameters of other ranks.
const GATHERED: &str = "gathered parameters";
const REMAINDERS: &str = "remainders";
const GRADIENTS: &str = "gradients";
const MOMENT: &str = "moment";

/// Bytes that training takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryEstimate {
    /// Parameters, with what completes them to masters, and those gathered from other ranks.
    pub weights: u64,
    /// Gradients.
    pub gradients: u64,
    /// AdamW's two moments.
    pub optimizer: u64,
    /// Arrays of one step: what is kept, what is passed on, and one chunk of logits.
    pub activations: u64,
    /// Workspace of attention; 0 before it is planned.
    pub attention: u64,
    /// The process itself, and what its matrix products pack.
    pub process: u64,
    /// The optimiser's moments and inputs of layers in the memory of the host beside that of a device: no
    /// part of [`MemoryEstimate::total`].
    pub host: u64,
}

impl MemoryEstimate {
    /// All of it, in bytes.
    pub fn total(&self) -> u64 {
        let arrays = [self.weights, self.gradients, self.optimizer, self.activations];
        let rest = [self.attention, self.process];
        arrays.into_iter().chain(rest).fold(0, u64::saturating_add)
    }
}

/// Floating-point operations, a multiply-add being two.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FlopCount {
    /// In matrix products with weights.
    pub linear: f64,
    /// In attention.
    pub attention: f64,
}

impl FlopCount {
    /// All of them.
    pub fn total(&self) -> f64 {
        self.linear + self.attention
    }
}

impl ModelConfig {
    /// Number of trained values; a tied output projection counts once. Learned attention
    /// buffers are not among them.
    pub fn parameter_count(&self) -> u64 {
        ParameterLayout::new(self, &[], &|_| false).expect("nothing is frozen").parameter_count()
    }

    /// Operations of training on one token, forward and backward, when its query sees `keys`
    /// keys on average: the sequence length counts dense, the mask's live pairs divided by
    /// queries counts mask-aware. A backward pass counts twice its forward pass, and nothing
    /// that is computed again counts.
    pub fn flops_per_token(&self, keys: f64) -> FlopCount {
        let (hidden, wide) = (self.hidden_size as f64, self.intermediate_size as f64);
        let (attention, layers) = (self.attention_width() as f64, self.num_hidden_layers as f64);
        let layer = hidden * (self.qkv_width() as f64 + attention + 3.0 * wide);
        let weights = layers * layer + hidden * self.vocab_size as f64;
        FlopCount { linear: 6.0 * weights, attention: 12.0 * layers * attention * keys }
    }

    /// Runs a step over `rows` rows of `len` tokens dry: nothing is computed, and no memory is taken
    /// that grows with a size but the number of layers. Sizes that no memory holds saturate. On the
    /// CPU, in f32.
    ///
    /// # Errors
    /// None today: nothing that a dry block does fails.
    pub fn dry_run(
        &self,
        attention: &AttentionConfig,
        rows: usize,
        len: usize,
        kind: StepKind,
    ) -> Result<Account, NnError> {
        self.dry_run_on(&Cpu::default(), attention, &|_| false, rows, len, kind)
    }

    /// [`ModelConfig::dry_run`] of a step by `blocks`, in their precision, in which the parameters are
    /// not trained that `frozen` says so of.
    ///
    /// # Errors
    /// Those of [`ParameterLayout::new`].
    pub fn dry_run_on<B: Blocks>(
        &self,
        blocks: &B,
        attention: &AttentionConfig,
        frozen: &dyn Fn(&str) -> bool,
        rows: usize,
        len: usize,
        kind: StepKind,
    ) -> Result<Account, NnError> {
        let of_layer = |layer| attention.of_layer(layer).1.learned.clone().into_iter().collect();
        let learned: Vec<Vec<_>> = (0..self.num_hidden_layers).map(of_layer).collect();
        let learned: Vec<&[_]> = learned.iter().map(Vec::as_slice).collect();
        let part = TensorPart::of(self, 0, kind.cutting().tensor)?;
        let dry = Dry::of(blocks, part.most_vocab);
        let layout = ParameterLayout::of_part(self, &learned, frozen, &part)?;
        dry_run(dry, &part.local(self), &part, &layout, &learned, [rows, len], kind)
    }
}

impl StepKind {
    pub(crate) fn cutting(self) -> Cutting {
        match self {
            Self::Training(training) => training.cutting,
            Self::Loss => Cutting::WHOLE,
        }
    }

    /// Whether a rank passes through its layers without other ranks, which is when arrays of a pass share
    /// memory: parameters are whole, and no gradients of replicas are summed on the way.
    fn has_all(self) -> bool {
        let Cutting { parts, tensor, replicated, .. } = self.cutting();
        let summed = matches!(self, Self::Training(training) if training.in_backward) && replicated;
        parts == 1 && tensor == 1 && !summed
    }
}

/// What a step finds and leaves behind.
struct State {
    /// Those that blocks read: where parameters are cut over ranks, the gathered ones.
    weights: DryArray,
    /// Those of the embedding, where it has them apart, and all others.
    gradients: [DryArray; 2],
}

impl State {
    /// That of a rank, noted by `dry`.
    fn noted(dry: &mut Dry, layout: &ParameterLayout, kind: StepKind) -> Self {
        let (precision, cutting) = (dry.precision(), kind.cutting());
        let is_cut = cutting.parts > 1;
        // The first rank has the largest part.
        let share = layout.share(0, cutting.parts);
        let trained = share.trained();
        let mut weights = dry.state(WEIGHTS, precision.weights, share.elems());
        if is_cut {
            weights = dry.state(GATHERED, precision.weights, layout.gathered(cutting.reshard));
        }
        let mut gradients = [DryArray::default(), DryArray::default()];
        if let StepKind::Training(training) = kind {
            let passes = training.in_backward || is_cut;
            let sizes = if passes { layout.passing() } else { [0, trained] };
            gradients = sizes.map(|elems| dry.state(GRADIENTS, precision.gradients, elems));
            if is_cut {
                // A group on its way to other ranks, and the part that is kept.
                let places = layout.groups().iter().map(|group| group.place.len());
                let largest = places.max().unwrap_or(0);
                dry.state(GRADIENTS, DType::F32, largest);
                if cutting.rounds && precision.gradients == DType::F32 {
                    dry.state(GRADIENTS, DType::BF16, largest);
                }
                let kept = if training.in_backward { 0 } else { trained };
                dry.state(GRADIENTS, precision.gradients, kept);
            }
            let (dtype, elems) = precision.moments.array(precision.moments_on_device(trained));
            let moments = 1 + usize::from(training.squares);
            for _ in 0..moments {
                dry.state(MOMENT, dtype, elems);
            }
            if precision.host_moments {
                let bytes = trained.saturating_mul(moments).saturating_mul(dtype.bytes());
                dry.host_bytes = dry.host_bytes.saturating_add(bytes as u64);
            }
        }
        if precision.remainders {
            // 16 bits each.
            dry.state(REMAINDERS, DType::BF16, trained);
        }
        Self { weights, gradients }
    }
}

/// What a step finds of a batch.
fn note_batch(dry: &mut Dry, config: &ModelConfig, rows: usize, len: usize) {
    // Ids, labels, positions and the order of the ids, 4 bytes each; cosines and sines.
    dry.state("batch", DType::F32, rows.saturating_mul(len).saturating_mul(4));
    let positions = len.checked_next_power_of_two().unwrap_or(usize::MAX);
    let tables = 1 + usize::from(config.architecture.local_rope_theta.is_some());
    let rotations = positions.saturating_mul(config.rotated()).saturating_mul(tables);
    dry.state("rotations", DType::F32, rotations);
}

/// What a step does that `dry` notes.
pub(crate) fn dry_run(
    mut dry: Dry,
    config: &ModelConfig,
    part: &TensorPart,
    layout: &ParameterLayout,
    learned: &[&[(String, LearnedBuffer)]],
    [rows, len]: [usize; 2],
    kind: StepKind,
) -> Result<Account, NnError> {
    let precision = dry.precision();
    let State { weights, mut gradients } = State::noted(&mut dry, layout, kind);
    let states = dry.arrays.len();
    note_batch(&mut dry, config, rows, len);
    let programs: Vec<_> =
        learned.iter().map(|learned| LayerProgram { plan: &(), learned }).collect();
    let (programs, shape) = (&programs[..], [rows, len]);
    let stream = part.is_cut().then_some(Stream { part, shape, transfers: None });
    let mut pass = Pass {
        config,
        layout,
        programs,
        batch: &(),
        shape,
        context: None,
        part,
        stream,
        z_weight: 0.0,
    };
    let mut workspace = Workspace::default();
    let mut idle = Vec::new();
    match kind {
        StepKind::Training(Training { recompute, in_backward, one_batch, .. }) => {
            let [embedding, array] = &mut gradients;
            let apart = (embedding.elems() > 0).then(|| (embedding, layout.groups()[0].place.end));
            // Blocks write to the array of all gradients or to that of a group, whichever it is, as
            // those of a batch that is not the first of its step.
            let target = Target { array, first: 0, embedding: apart, accumulate: true };
            let whole = Whole { weights: &weights, gradients: Some(target), reused: None };
            let mut parameters = Begun { whole, begins: Vec::new() };
            pass.forward_backward(&mut dry, &mut parameters, &mut workspace, recompute, &mut ())?;
            if one_batch && !in_backward && kind.has_all() {
                idle = idle_gradients(layout, precision.gradients, &parameters.begins);
            }
        }
        StepKind::Loss => {
            let mut parameters = Whole { weights: &weights, gradients: None, reused: None };
            pass.loss(&mut dry, &mut parameters, &mut workspace, None, &mut ())?;
        }
    }
    let shares_memory = dry.shares_memory() && kind.has_all();
    let again = dry.again();
    let Dry { mut arrays, blocks, host_bytes, .. } = dry;
    let activations = arrays.split_off(states);
    let mut places = shares_memory.then(|| Places::new(&activations[OF_BATCH..], &idle));
    if let (StepKind::Training(training), Some(places)) = (kind, &mut places) {
        // An evaluation between steps has the same arena.
        let reuses = training.one_batch && !training.in_backward;
        let loss = dry_run(again, config, part, layout, learned, [rows, len], StepKind::Loss)?;
        let loss = loss.places_of_loss(reuses.then(|| all_gradients(layout, precision.gradients)));
        places.arena = places.arena.max(loss.map_or(0, |loss| loss.arena));
    }
    Ok(Account { state: arrays, activations, blocks, host_bytes, places })
}

/// [`Whole`], and the block with which the gradients of each group begin.
struct Begun<'a> {
    whole: Whole<'a, DryArray>,
    begins: Vec<(usize, usize)>,
}

impl Parameters<Dry> for Begun<'_> {
    fn need(&mut self, dry: &mut Dry, stage: (usize, Phase)) -> Result<(), NnError> {
        self.whole.need(dry, stage)
    }

    fn held(&self) -> Held<'_, DryArray> {
        Parameters::<Dry>::held(&self.whole)
    }
}

impl Trained<Dry> for Begun<'_> {
    fn begin(&mut self, dry: &mut Dry, group: usize) -> Result<(), NnError> {
        self.begins.push((group, dry.blocks.len()));
        self.whole.begin(dry, group)
    }

    fn split(&mut self) -> (Held<'_, DryArray>, Target<'_, DryArray>) {
        Trained::<Dry>::split(&mut self.whole)
    }

    fn complete(&mut self, dry: &mut Dry, group: usize, (): &mut ()) -> Result<(), NnError> {
        self.whole.complete(dry, group, &mut ())
    }
}

/// The memory of the gradients of each group, until they begin.
fn idle_gradients(layout: &ParameterLayout, dtype: DType, begins: &[(usize, usize)]) -> Vec<Idle> {
    let bytes = |elems: usize| (elems as u64).saturating_mul(dtype.bytes() as u64);
    let idle = |group: usize, until: usize| {
        let place = &layout.groups()[group].place;
        Idle { place: bytes(place.start)..bytes(place.end), until }
    };
    let begun = begins.iter().flat_map(|&(group, until)| {
        layout.begun_with(group).into_iter().map(move |group| (group, until))
    });
    begun.map(|(group, until)| idle(group, until)).collect()
}

/// The memory of all gradients, which nothing needs between steps of one batch.
fn all_gradients(layout: &ParameterLayout, dtype: DType) -> Idle {
    let bytes = (layout.trained() as u64).saturating_mul(dtype.bytes() as u64);
    Idle { place: 0..bytes, until: usize::MAX }
}

/// Where the arrays of a pass over `[rows, len]` tokens lie, by `blocks` whose arrays may share memory;
/// those of a loss alone in memory of gradients, too, where it is idle.
pub(crate) fn places<B: Blocks>(
    blocks: &B,
    config: &ModelConfig,
    part: &TensorPart,
    layout: &ParameterLayout,
    learned: &[&[(String, LearnedBuffer)]],
    shape: [usize; 2],
    kind: StepKind,
    reuses: bool,
) -> Result<Option<Places>, NnError> {
    let dry = Dry::of(blocks, part.most_vocab);
    let gradients = all_gradients(layout, blocks.precision().gradients);
    let account = dry_run(dry, config, part, layout, learned, shape, kind)?;
    Ok(match kind {
        StepKind::Training(_) => account.places,
        StepKind::Loss => account.places_of_loss(reuses.then_some(gradients)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ProgramConfig;
    use crate::model::Model;
    use crate::precision::ParameterState;
    use crate::tape::Recompute;

    fn model(json: &[(&str, usize)], tied: bool) -> Model {
        let get = |name: &str| json.iter().find(|(n, _)| *n == name).map_or(0, |(_, v)| *v);
        let config = ModelConfig {
            vocab_size: get("vocab"),
            hidden_size: get("hidden"),
            intermediate_size: get("wide"),
            num_hidden_layers: get("layers"),
            num_attention_heads: get("heads"),
            num_key_value_heads: Some(get("kv")),
            head_dim: None,
            rms_norm_eps: 1e-5,
            rope_theta: 1e4,
            rope_scaling: None,
            rope_pairing: Default::default(),
            max_position_embeddings: 8192,
            tie_word_embeddings: tied,
            architecture: Default::default(),
        };
        let causal = ProgramConfig { mask: "causal".into(), ..Default::default() };
        Model::unfilled(config, &causal.into()).unwrap()
    }

    fn llama3_8b() -> Model {
        let sizes = [
            ("vocab", 128_256),
            ("hidden", 4096),
            ("wide", 14336),
            ("layers", 32),
            ("heads", 32),
            ("kv", 8),
        ];
        model(&sizes, false)
    }

    #[test]
    fn published_models_have_their_published_parameter_counts() {
        let small = [
            ("vocab", 49152),
            ("hidden", 576),
            ("wide", 1536),
            ("layers", 30),
            ("heads", 9),
            ("kv", 3),
        ];
        assert_eq!(model(&small, true).config().parameter_count(), 134_515_008);
        assert_eq!(llama3_8b().config().parameter_count(), 8_030_261_248);
    }

    #[test]
    fn a_dry_run_of_eight_billion_parameters_adds_up_by_hand() {
        let model = llama3_8b();
        let training = |recompute| {
            model.dry_run(1, 8192, StepKind::Training(Training::from(recompute))).unwrap()
        };
        let [none, attention, full] =
            [Recompute::None, Recompute::Attention, Recompute::Full].map(training);
        assert_eq!(none.memory().weights, 8_030_261_248 * 4);
        assert_eq!(none.memory().optimizer, 8_030_261_248 * 8);
        let bytes = [&none, &attention, &full].map(|a| a.memory().activations);
        assert!(bytes[0] > bytes[1] && bytes[1] > bytes[2], "{bytes:?}");
        // A layer keeps qkv, out, lse and an inverse; x, gate, up and an inverse; its input.
        let layer = 8192 * 4 * (6144 + 4096 + 32 + 1 + 4096 + 2 * 14336 + 1 + 4096);
        let kept: u64 = none
            .activations
            .iter()
            .filter(|a| a.name != "batch" && a.name != "rotations" && a.name != "logits")
            .map(|a| a.bytes)
            .sum();
        let once = 8192 * 4 * (4096 * 4 + 1 + 14336 + 4096 + 6144);
        assert_eq!(kept, 32 * layer + once);
        // Forward and backward in products with weights, by the usual count; nothing twice.
        let dense = model.config().flops_per_token(8192.0);
        let linear = dense.linear * 8192.0;
        let pairs = 7.0 / 6.0 * dense.attention * 8192.0;
        assert!((none.flops() / (linear + pairs) - 1.0).abs() < 1e-12, "{}", none.flops());
        assert!(attention.flops() > none.flops() && full.flops() > attention.flops());
        // Blocks of a layer forward and backward, of which a norm's backward gives the norm once more; embedding,
        // last norm and loss.
        assert_eq!(none.blocks.len(), 32 * (9 + 13) + 5);
    }

    #[test]
    fn activations_of_eight_billion_parameters_lie_where_gradients_come_to_be() {
        let model = llama3_8b();
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        // Of each: whether a step has one batch, and GiB that activations take beside all else.
        for (state, one_batch, most) in [
            (ParameterState::Bf16, true, 11.5),
            (ParameterState::Exact, true, 0.2),
            (ParameterState::Exact, false, 25.4),
        ] {
            let dry = Dry::new(state.into(), 8192).sharing();
            let kind = Training { one_batch, ..Recompute::None.into() };
            let causal = ProgramConfig { mask: "causal".into(), ..Default::default() };
            let (attention, kind) = (causal.into(), StepKind::Training(kind));
            let account =
                model.config().dry_run_on(&dry, &attention, &|_| false, 1, 8192, kind).unwrap();
            let found = gib(account.activation_bytes());
            let apart = gib(account.activations.iter().map(|a| a.bytes).sum());
            assert!(found <= most && apart > 25.5, "{state:?}: {found}, apart {apart}");
            // Nothing is read that was there before the pass: it may be somebody else's.
            let passed = &account.activations[OF_BATCH..];
            assert!(
                passed.iter().all(|array| array.needed[0].start > 0 || array.name == "layer input")
            );
            // The memory of no gradients is less than what is needed at once, all gradients included.
            if !one_batch {
                assert!(account.activation_bytes() >= account.needed_bytes());
            }
        }
    }

    #[test]
    fn an_evaluation_between_steps_is_in_what_steps_take() {
        let sizes =
            [("vocab", 130), ("hidden", 96), ("wide", 272), ("layers", 5), ("heads", 6), ("kv", 2)];
        let causal = ProgramConfig { mask: "causal".into(), ..Default::default() };
        let attention = AttentionConfig::from(causal);
        let frozen: [&dyn Fn(&str) -> bool; 4] = [
            &|_| false,
            &|name| name.contains("embed") || name.contains("layers.0."),
            &|name| name.contains("mlp"),
            &|name| !name.ends_with("layernorm.weight"),
        ];
        let small = model(&sizes, true);
        let cases = [(&small, [3, 700]), (&small, [3, 33]), (&llama3_8b(), [1, 8192])];
        let ways = [[false, false], [true, false], [true, true]];
        // Evaluations that would take more than the steps in memory of their own.
        let mut larger = 0;
        for (model, [rows, len]) in cases {
            let mut check = |state: ParameterState, training: Training, frozen| {
                let (config, dry) = (model.config(), Dry::new(state.into(), 64).sharing());
                let account =
                    |kind| config.dry_run_on(&dry, &attention, frozen, rows, len, kind).unwrap();
                let told = account(StepKind::Training(training)).activation_bytes();
                let learned = vec![&[][..]; config.num_hidden_layers];
                let layout = ParameterLayout::new(config, &learned, frozen).unwrap();
                let gradients = all_gradients(&layout, dry.precision().gradients);
                let idle = (training.one_batch && !training.in_backward).then_some(gradients);
                let [idle, apart] = [idle, None].map(|idle| {
                    let loss = account(StepKind::Loss);
                    sum(&loss.activations[..OF_BATCH]) + loss.places_of_loss(idle).unwrap().arena
                });
                assert!(idle <= told, "{training:?} takes {told}, its evaluation {idle}");
                larger += usize::from(apart > told);
            };
            for (what, [one_batch, in_backward]) in
                Recompute::ALL.into_iter().flat_map(|what| ways.map(|way| (what, way)))
            {
                let again = Recomputation { what, layers: 3, ..Recompute::None.into() };
                let training = Training { one_batch, in_backward, ..again.into() };
                for frozen in frozen {
                    check(ParameterState::Exact, training, frozen);
                    check(ParameterState::Bf16, training, frozen);
                }
            }
        }
        assert!(larger > 0);
    }

    #[test]
    fn ranks_that_meet_in_a_pass_have_memory_for_every_array() {
        let sizes =
            [("vocab", 64), ("hidden", 32), ("wide", 48), ("layers", 3), ("heads", 4), ("kv", 2)];
        let model = model(&sizes, false);
        let causal = ProgramConfig { mask: "causal".into(), ..Default::default() };
        let shares = |cutting, in_backward| {
            let dry = Dry::new(ParameterState::Exact.into(), 8192).sharing();
            let training =
                Training { in_backward, one_batch: true, cutting, ..Recompute::None.into() };
            let (attention, kind) = (causal.clone().into(), StepKind::Training(training));
            let account =
                model.config().dry_run_on(&dry, &attention, &|_| false, 1, 16, kind).unwrap();
            account.activation_bytes() < sum(&account.activations)
        };
        let replicated = Cutting { replicated: true, ..Cutting::WHOLE };
        assert!(shares(Cutting::WHOLE, false) && shares(Cutting::WHOLE, true));
        assert!(shares(replicated, false) && !shares(replicated, true));
        assert!(!shares(Cutting { parts: 2, ..Cutting::WHOLE }, false));
        assert!(!shares(Cutting { tensor: 2, ..Cutting::WHOLE }, false));
    }

    #[test]
    fn arrays_are_needed_from_what_overwrites_them_to_their_last_reader() {
        let account = model(
            &[("vocab", 13), ("hidden", 8), ("wide", 10), ("layers", 2), ("heads", 2), ("kv", 1)],
            true,
        );
        let account = account.dry_run(2, 5, StepKind::Training(Recompute::None.into())).unwrap();
        let block = |i: usize| account.blocks[i].block;
        for array in account.activations.iter().filter(|a| a.name == "qkv") {
            let [needed] = &array.needed[..] else { panic!("{array:?}") };
            assert_eq!(block(needed.start), "linear");
            assert_eq!(block(needed.end - 1), "attention backward");
        }
        let d_qkv = account.activations.iter().find(|a| a.name == "d_qkv").unwrap();
        assert_eq!(d_qkv.needed.len(), 2, "once a layer");
        assert!(d_qkv.needed.iter().all(|n| block(n.start) == "attention backward"));
        let weights = &account.state[0];
        assert_eq!(
            (weights.name, weights.needed.len(), weights.needed[0].start),
            ("weights", 1, 0)
        );
        let all: u64 = account.activations.iter().map(|a| a.bytes).sum();
        assert!(account.needed_bytes() < all && account.needed_bytes() > all / 4);
    }
}
