//! What a step takes, noted by running it dry: arrays, blocks, memory, operations.

use crate::backend::{Array, Blocks, LayerProgram, PackedHeads};
use crate::config::{AttentionConfig, LearnedBuffer, ModelConfig};
use crate::cpu::Cpu;
use crate::dry::{Dry, DryArray, NotedArray, NotedBlock};
use crate::error::NnError;
use crate::held::Target;
use crate::matmul::{packed, scratch_deep};
use crate::model::Model;
use crate::parameters::ParameterLayout;
use crate::pass::{Pass, Whole};
use crate::process;
use crate::share::Cutting;
use crate::stream::Stream;
use crate::tape::{Recomputation, Workspace};
use crate::tensor::TensorPart;

use foveate::DType;

/// Tokens of the largest batch whose attention is described to know its workspace.
const COUNTED_TOKENS: usize = 1 << 22;

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
    /// Over how many ranks parameters are cut.
    pub cutting: Cutting,
}

impl<R: Into<Recomputation>> From<R> for Training {
    /// With AdamW, after the backward pass.
    fn from(recompute: R) -> Self {
        let (recompute, cutting) = (recompute.into(), Cutting::WHOLE);
        Self { recompute, in_backward: false, squares: true, cutting }
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
}

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
            activations: sum(&self.activations),
            attention: 0,
            process: process::bytes() + (kept + packed) as u64,
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
    fn cutting(self) -> Cutting {
        match self {
            Self::Training(training) => training.cutting,
            Self::Loss => Cutting::WHOLE,
        }
    }
}

fn dry_run(
    mut dry: Dry,
    config: &ModelConfig,
    part: &TensorPart,
    layout: &ParameterLayout,
    learned: &[&[(String, LearnedBuffer)]],
    [rows, len]: [usize; 2],
    kind: StepKind,
) -> Result<Account, NnError> {
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
        for (array, elems) in gradients.iter_mut().zip(sizes) {
            *array = dry.state(GRADIENTS, precision.gradients, elems);
        }
        if is_cut {
            // A group on its way to other ranks, and the part that is kept.
            let largest = layout.groups().iter().map(|group| group.place.len()).max().unwrap_or(0);
            dry.state(GRADIENTS, DType::F32, largest);
            dry.state(
                GRADIENTS,
                precision.gradients,
                if training.in_backward { 0 } else { trained },
            );
        }
        let (dtype, elems) = precision.moments.array(trained);
        for _ in 0..1 + usize::from(training.squares) {
            dry.state(MOMENT, dtype, elems);
        }
    }
    if precision.remainders {
        // 16 bits each.
        dry.state(REMAINDERS, DType::BF16, trained);
    }
    let states = dry.arrays.len();
    // Ids, labels, positions and the order of the ids, 4 bytes each; cosines and sines.
    dry.state("batch", DType::F32, rows.saturating_mul(len).saturating_mul(4));
    let positions = len.checked_next_power_of_two().unwrap_or(usize::MAX);
    let tables = 1 + usize::from(config.architecture.local_rope_theta.is_some());
    let rotations = positions.saturating_mul(config.rotated()).saturating_mul(tables);
    dry.state("rotations", DType::F32, rotations);
    let programs: Vec<_> =
        learned.iter().map(|learned| LayerProgram { plan: &(), learned }).collect();
    let (programs, shape) = (&programs[..], [rows, len]);
    let stream = part.is_cut().then_some(Stream { part, shape, transfers: None });
    let mut pass =
        Pass { config, layout, programs, batch: &(), shape, context: None, part, stream };
    let mut workspace = Workspace::default();
    match kind {
        StepKind::Training(Training { recompute, in_backward, .. }) => {
            let [embedding, array] = &mut gradients;
            let apart = ((in_backward || is_cut) && embedding.elems() > 0)
                .then(|| (embedding, layout.groups()[0].place.end));
            // Blocks write to the array of all gradients or to that of a group, whichever it is, as
            // those of a batch that is not the first of its step.
            let target = Target { array, first: 0, embedding: apart, accumulate: true };
            let mut parameters = Whole { weights: &weights, gradients: Some(target) };
            pass.forward_backward(&mut dry, &mut parameters, &mut workspace, recompute, &mut ())?;
        }
        StepKind::Loss => {
            let mut parameters = Whole { weights: &weights, gradients: None };
            pass.loss(&mut dry, &mut parameters, &mut workspace, None, &mut ())?;
        }
    }
    let Dry { mut arrays, blocks, .. } = dry;
    let activations = arrays.split_off(states);
    Ok(Account { state: arrays, activations, blocks })
}

impl<B: Blocks> Model<B> {
    /// [`ModelConfig::dry_run_on`] of this model. Parameters need no values yet.
    ///
    /// # Errors
    /// Those of [`ModelConfig::dry_run`].
    pub fn dry_run(&self, rows: usize, len: usize, kind: StepKind) -> Result<Account, NnError> {
        let learned = self.programs.learned();
        let tensor = kind.cutting().tensor;
        let (part, layout) = match self.part.parts == tensor {
            true => (self.part.clone(), None),
            false => {
                let part = TensorPart::of(self.config(), 0, tensor)?;
                (part.clone(), Some(self.layout_of(&part)?))
            }
        };
        let (local, layout) = (part.local(self.config()), layout.as_ref().unwrap_or(self.layout()));
        let dry = Dry::of(&self.running().blocks, part.most_vocab);
        dry_run(dry, &local, &part, layout, &learned, [rows, len], kind)
    }

    /// The places of the parameters of a part of this model, of which the same are trained.
    ///
    /// # Errors
    /// Those of [`ParameterLayout::of_part`].
    pub fn layout_of(&self, part: &TensorPart) -> Result<ParameterLayout, NnError> {
        let is_frozen =
            |name: &str| self.parameter(name).is_some_and(|p| !self.layout().trains(&p.place));
        ParameterLayout::of_part(self.config(), &self.programs.learned(), &is_frozen, part)
    }

    /// The most memory, in bytes, that is taken to train this model on rows of `len` tokens, `rows`
    /// at once, and to save it: that of a dry run, and attention's workspace. On the CPU it is the
    /// resident memory of the process.
    ///
    /// # Errors
    /// Those of [`Model::dry_run`], or when attention cannot be planned for such a batch.
    pub fn training_memory(
        &self,
        rows: usize,
        len: usize,
        training: impl Into<Training>,
    ) -> Result<MemoryEstimate, NnError> {
        let training = training.into();
        let account = self.dry_run(rows, len, StepKind::Training(training))?;
        let part = TensorPart::of(self.config(), 0, training.cutting.tensor)?;
        // The workspace is cut into waves, so more rows than these take no more of it.
        let rows_at_once = rows.min(COUNTED_TOKENS / len.max(1)).max(1);
        let mut running = self.running();
        let blocks = &mut running.blocks;
        let heads = PackedHeads::of(&part.local(self.config()), [rows_at_once, len]);
        let (mut workspace, mut masks) = (0, 0);
        for plan in self.programs.plan(blocks, heads, part.first_heads(), None, false)? {
            let bytes = blocks.plan_bytes(&plan)?;
            (workspace, masks) = (bytes.workspace.max(workspace), masks + bytes.masks);
        }
        Ok(MemoryEstimate { attention: workspace + masks, ..account.memory() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ProgramConfig;
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
        // Blocks of a layer forward and backward; embedding, last norm and loss.
        assert_eq!(none.blocks.len(), 32 * (9 + 15) + 5);
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
