//! Steps of a case on a device, timed, and their products alone.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use foveate::DType;
use foveate::tensor::random::Random;
use foveate_nn::{
    Account, AdamW, Array, BlockTime, Blocks, COPY_IN, COPY_OUT, Gradients, KEYS_WAIT, LinearShape,
    MemoryEstimate, Model, ModelConfig, Moments, NnError, OptimizerStep, ParameterState, Part,
    PartMut, Precision, Recomputation, Recording, Rule, StepKind, Treatment,
};
use foveate_shard::MeshAxis;
use foveate_shard::collectives::Collectives;
use foveate_train::TrainError;
use foveate_train::device::OnDevice;
use foveate_train::host_memory::{HostMemory, check_offload};
use foveate_train::machine;
use foveate_train::memory::{Setting, beside, least_that_fits};
use foveate_train::metrics::Tflops;
use foveate_train::trainer::{MeshBatch, MeshModel};
use serde::Serialize;
use serde_json::json;

use super::case::Case;
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::memory;
use crate::progress::{PATIENCE, Progress, waiting};

/// Batches before those that are timed, in whole steps.
const WARM: usize = 4;
/// Steps before them where passes are recorded: one that runs, one whose blocks are timed, two that are recorded.
const RECORDED: usize = 4;
/// Batches that are profiled, in whole steps.
const PROFILED: usize = 2;
/// Steps by which the time is taken that a device works at one.
const WORKING: usize = 5;
/// Longer than the host takes to fill a queue.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);
/// Batches of different tokens, taken in turn.
const BATCHES: usize = 4;
/// Passes of products alone, of which the last is timed.
const PASSES: usize = 3;

/// Blocks that are products of layers: forward, and both gradients.
const LINEAR: [&str; 3] = ["linear", "linear backward, input", "linear backward, weight"];

/// Steps to be run.
#[derive(Clone, Copy)]
pub struct Steps<'a> {
    pub case: &'a Case,
    pub steps: usize,
    pub deterministic: bool,
}

/// The same, on a rank of those that share the model, until Ctrl-C is pressed.
pub struct Watched<'a> {
    steps: Steps<'a>,
    world: &'a dyn Collectives,
    interrupt: &'a Interrupt,
}

impl<'a> Steps<'a> {
    pub fn watched(self, world: &'a dyn Collectives, interrupt: &'a Interrupt) -> Watched<'a> {
        Watched { steps: self, world, interrupt }
    }
}

/// What steps took.
#[derive(Debug)]
pub struct Measured {
    pub gpu: Option<String>,
    pub ranks: usize,
    /// Where there are several ranks.
    pub mesh: Option<String>,
    pub deterministic: bool,
    pub state: &'static str,
    /// Of the whole model.
    pub parameters: u64,
    /// The median.
    pub ms: f64,
    pub min_ms: f64,
    /// What was computed again.
    pub recompute: Recomputation,
    /// Seconds in which the weights were there.
    pub weights_s: f64,
    /// Seconds of the first step, in which kernels are compiled and products timed.
    pub first_step_s: f64,
    /// In which the host queues a step, the median.
    pub queue_ms: f64,
    /// The most memory of the GPU that was held at once, arrays and scratch, or of the process.
    pub peak_bytes: Option<u64>,
    /// Of arrays, by the dry run; on a processor with the process.
    pub planned_bytes: u64,
    /// The peak rate of the device, where it is known.
    pub peak_tflops: Option<f64>,
    /// Keys that a query sees on average, by the masks of all layers.
    keys: f64,
    /// In which the device works at a step: without waiting for the host. None where it takes no times, and of
    /// several ranks, which wait for each other.
    pub working_ms: Option<f64>,
    /// A profiled step, the mean.
    pub profiled_ms: f64,
    /// Of a profiled step; none where the device takes no times.
    pub blocks: Vec<BlockSum>,
    /// Of a profiled step, in which attention waits for what other ranks have; part of its blocks' time.
    pub keys_wait_ms: f64,
    /// Of a profiled step, copies to and from the memory of the host, beside its blocks.
    pub copies: Vec<BlockSum>,
    /// Whether the passes of batches were recorded when steps were timed, where that was asked for.
    pub recording: Option<Recording>,
    /// Time of the products of the layers of a step when nothing else runs.
    pub alone_ms: Option<f64>,
}

/// All calls of a block in a step.
#[derive(Debug, Serialize)]
pub struct BlockSum {
    pub block: &'static str,
    pub calls: usize,
    pub ms: f64,
    /// Operations, attention's over the pairs that the mask lets through.
    pub flops: f64,
    /// Read and written, each operand once.
    pub bytes: f64,
}

impl Measured {
    pub fn tokens_per_s(&self, case: &Case) -> f64 {
        case.tokens() as f64 / self.ms * 1e3
    }

    /// What a rank computes.
    pub fn tflops(&self, case: &Case) -> Tflops {
        let tokens = self.tokens_per_s(case) / self.ranks as f64;
        Tflops::of(&case.config, tokens, case.len(), self.keys)
    }

    /// The share of a step in which the device works.
    pub fn working_share(&self) -> Option<f64> {
        self.working_ms.map(|working| working / self.ms)
    }

    /// Products of the layers in a profiled step, where one was profiled.
    pub fn products_ms(&self) -> Option<f64> {
        let products = self.blocks.iter().filter(|block| LINEAR.contains(&block.block));
        (!self.blocks.is_empty()).then(|| products.map(|block| block.ms).sum())
    }

    pub fn json(&self, case: &Case) -> serde_json::Value {
        let tflops = self.tflops(case);
        let Tflops { live, dense, half } = tflops;
        json!({
            "peer": "foveate",
            "version": env!("CARGO_PKG_VERSION"),
            "model": case.name,
            "parameters": self.parameters,
            "rows": case.rows(),
            "len": case.len(),
            "accumulate": case.accumulate(),
            "documents": case.documents,
            "mask": case.mask(),
            "state": self.state,
            "recompute": self.recompute.what.name(),
            "offload": self.recompute.offload.name(),
            "recompute_layers": self.recompute.layers.min(case.config.num_hidden_layers),
            "window": case.window,
            "score": case.score,
            "ranks": self.ranks,
            "mesh": self.mesh,
            "device": self.gpu.as_deref().unwrap_or("cpu"),
            "deterministic": self.deterministic,
            "ms": self.ms,
            "min_ms": self.min_ms,
            "tokens_per_s": self.tokens_per_s(case),
            "queue_ms": self.queue_ms,
            "weights_s": self.weights_s,
            "first_step_s": self.first_step_s,
            "peak_bytes": self.peak_bytes,
            "planned_bytes": self.planned_bytes,
            "tflops_live": live,
            "tflops_all_pairs": dense,
            "tflops_half_of_pairs": half,
            "mfu": self.peak_tflops.map(|peak| tflops.mfu(peak)),
            "profiled_ms": self.profiled_ms,
            "blocks": self.blocks,
            "keys_wait_ms": self.keys_wait_ms,
            "copies": self.copies,
            "working_ms": self.working_ms,
            "working_share": self.working_share(),
            "graphs": self.recording.as_ref().map(|recording| *recording == Recording::On),
            "products_ms": self.products_ms(),
            "products_alone_ms": self.alone_ms,
        })
    }
}

impl OnDevice for Watched<'_> {
    type Output = Result<Measured, Failure>;

    fn run<B: Blocks>(self, blocks: B, gpu: Option<String>) -> Self::Output {
        self.measured(blocks, gpu).map_err(|failure| match &failure {
            // The others wait for this rank in a transfer.
            Failure::Failed(report) | Failure::Usage(report) => {
                let said = self.world.abort(&report.to_string());
                said.map_or(failure, |_| Failure::Elsewhere)
            }
            _ => failure,
        })
    }
}

impl Watched<'_> {
    fn measured<B: Blocks>(&self, mut blocks: B, gpu: Option<String>) -> Result<Measured, Failure> {
        let &Self { steps: Steps { case, steps, deterministic }, world, interrupt } = self;
        let mesh = case.recipe.mesh.of_ranks(world.ranks())?;
        let rows = case.rows().div_ceil(mesh.size_of(&[MeshAxis::Replicate, MeshAxis::Shard]));
        let len = case.len().div_ceil(mesh.size(MeshAxis::Context));
        let cutting = case.recipe.mesh.cutting(&mesh);
        let (config, free) = (&case.config, blocks.free_bytes()?);
        let account = |again: Recomputation| {
            let one_batch = case.accumulate() == 1;
            let kind = foveate_nn::Training { cutting, one_batch, ..again.into() };
            let kind = StepKind::Training(kind);
            config.dry_run_on(&blocks, &case.attention, &|_| false, rows, len, kind)
        };
        let offload = case.recipe.train.offload;
        check_offload(offload, free.is_some()).map_err(Failure::new)?;
        let host = HostMemory::here(world)?;
        let recompute = match case.recompute() {
            Some(recompute) => recompute,
            None if world.ranks() > 1 => {
                return Err(Failure::usage("--recompute auto is for one rank")
                    .help("say what is computed again: none, attention, mlp or full"));
            }
            None => {
                let beside = free.map_or(0, |_| beside(&case.recipe, config, true));
                let total = |again| Ok::<_, NnError>(account(again)?.memory().total() + beside);
                least_that_fits(config.num_hidden_layers, free, offload, total)?
            }
        };
        let account = account(recompute)?;
        let planned = account.memory();
        let help = "give fewer --rows or a shorter --len, --recompute full, or a smaller --state";
        memory::fits(planned.total(), free, help)?;
        if let Some(host) = host {
            let state = ParameterState::of(blocks.precision()).unwrap_or_default();
            let setting = Setting { state, recompute, ..Setting::of(&case.recipe) };
            host.admit(&setting, &planned, || None).map_err(Failure::new)?;
        }
        // What a process takes of its own memory a GPU does not hold.
        let of_device = free.map_or(planned, |_| MemoryEstimate { process: 0, ..planned });
        let precision = blocks.precision();
        let state = ParameterState::of(precision).map_or("other", ParameterState::name);
        let began = Instant::now();
        let making = || Training::new(case, recompute, blocks, world, gpu.as_deref());
        let training = waiting("giving the model its weights", PATIENCE, making);
        let mut training = training.map_err(|e| case.failure(e))?;
        let weights_s = began.elapsed().as_secs_f64();
        let Timings { ms, queue_ms, first_step_s } = training.timed(steps, interrupt)?;
        let held = training.mesh.model.held_bytes();
        let peak_bytes = held.map_or_else(machine::peak_resident, |held| Some(held.peak));
        let recording = training.mesh.recording();
        let middle = |times: &[f64]| times[times.len() / 2];
        let pause = Duration::from_secs_f64(2e-3 * middle(&queue_ms)).min(LONGEST_PAUSE);
        let working_ms = match world.ranks() {
            1 => training.working(pause)?,
            _ => None,
        };
        let Profiled { ms: profiled_ms, mut blocks, keys_wait_ms, copies } =
            training.profiled(pause)?;
        let pairs = training.mesh.pairs_of_all(training.pairs)?;
        let keys = pairs / (case.rows() * case.len()) as f64;
        let elems = training.mesh.model.layout().elems() as f64 / cutting.parts as f64;
        let counted =
            Counted { account: &account, precision, case, keys: keys / len as f64, elems };
        blocks.iter_mut().for_each(|sum| counted.give(sum));
        Ok(Measured {
            gpu,
            ranks: world.ranks(),
            mesh: (world.ranks() > 1).then(|| mesh.to_string()),
            deterministic,
            state,
            parameters: config.parameter_count(),
            ms: middle(&ms),
            min_ms: ms[0],
            queue_ms: middle(&queue_ms),
            peak_bytes,
            planned_bytes: of_device.total(),
            recompute,
            weights_s,
            first_step_s,
            peak_tflops: training.mesh.model.peak_tflops(),
            keys,
            working_ms,
            profiled_ms,
            blocks,
            keys_wait_ms,
            copies,
            recording,
            alone_ms: None,
        })
    }
}

/// What the blocks of a step compute and move, as its dry run notes them.
struct Counted<'a> {
    account: &'a Account,
    precision: Precision,
    case: &'a Case,
    /// Of all keys, how many a query sees in the mean.
    keys: f64,
    /// Parameters of this rank.
    elems: f64,
}

impl Counted<'_> {
    /// Gives `sum`, whose time was taken, its operations and its bytes of device memory.
    fn give(&self, sum: &mut BlockSum) {
        let noted = self.account.blocks.iter().filter(|noted| noted.block == sum.block);
        let [flops, bytes] =
            noted.fold([0.0; 2], |[flops, bytes], n| [flops + n.flops, bytes + n.bytes]);
        let batches = self.case.accumulate() as f64;
        (sum.flops, sum.bytes) = (flops * batches, bytes * batches);
        if sum.block.starts_with("attention") {
            // Counted for every pair of what tokens are here. What it reads follows from its tiles.
            (sum.flops, sum.bytes) = (sum.flops * self.keys, 0.0);
        }
        let gradient = self.precision.gradients.bytes();
        match sum.block {
            "clip" => sum.bytes = self.elems * gradient as f64,
            // All but the gradient is written, too.
            "update" => {
                let bytes = 2.0 * self.precision.bytes_per_parameter() - gradient as f64;
                sum.bytes = self.elems * bytes;
            }
            _ => {}
        }
    }
}

const RULE: Rule = Rule::AdamW(AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 });

/// A model under way.
struct Training<'a, B: Blocks> {
    case: &'a Case,
    recompute: Recomputation,
    mesh: MeshModel<'a, B>,
    gradients: Gradients<B::Array>,
    moments: Moments<B::Array>,
    spans: B::Spans,
    batches: Vec<MeshBatch>,
    done: usize,
    /// Of query and key that the masks let through of this rank in the last batch.
    pairs: f64,
}

impl<'a, B: Blocks> Training<'a, B> {
    fn new(
        case: &'a Case,
        recompute: Recomputation,
        blocks: B,
        world: &'a dyn Collectives,
        gpu: Option<&str>,
    ) -> Result<Self, TrainError> {
        let (config, attention) = (case.config.clone(), &case.attention);
        let mut mesh = MeshModel::unfilled(world, &case.recipe, config, attention, blocks, gpu)?;
        let model = &mut mesh.model;
        fill(model)?;
        model.choose(&BTreeMap::new());
        let gradients = match case.accumulate() {
            1 => model.gradients_of_one_batch()?,
            _ => model.gradients()?,
        };
        let moments = model.moments(&RULE)?;
        let spans = model.spans(Treatment::of)?;
        let batches = (0..BATCHES).map(|number| mesh.part(&case.batch(number)));
        let batches = batches.collect::<Result<_, _>>()?;
        let (done, pairs) = (0, 0.0);
        Ok(Self { case, recompute, mesh, gradients, moments, spans, batches, done, pairs })
    }

    /// Queues a step.
    fn queue(&mut self) -> Result<B::Totals, TrainError> {
        let (case, gradients) = (self.case, &mut self.gradients);
        let mut totals = self.mesh.model.totals()?;
        self.mesh.model.clear(gradients);
        for number in 0..case.accumulate() {
            let batch = &self.batches[(self.done * case.accumulate() + number) % BATCHES];
            let queued = self.mesh.accumulate(batch, gradients, self.recompute, &mut totals)?;
            self.pairs = queued.live_pairs.unwrap_or_default();
        }
        self.mesh.sum(gradients)?;
        self.done += 1;
        let step = OptimizerStep {
            rule: RULE,
            step: self.done as u64,
            rate: 1e-4,
            clip_norm: 1.0,
            seed: 0,
        };
        let (model, moments) = (&mut self.mesh.model, &mut self.moments);
        model.update(&step, &self.spans, &self.gradients, moments, &mut totals)?;
        Ok(totals)
    }

    /// The times of `steps` warm steps.
    ///
    /// A step is timed from the reading of one step's totals to that of the next. The host reads behind
    /// what it has queued, so one more step runs, whose own reading waits for less than a step.
    fn timed(&mut self, steps: usize, interrupt: &Interrupt) -> Result<Timings, Failure> {
        let (mut times, mut queueing) = (Vec::new(), Vec::new());
        let (mut before, mut last) = (None, Instant::now());
        let recorded = if self.mesh.recording().is_some() { RECORDED } else { 0 };
        let warm = WARM.div_ceil(self.case.accumulate()).max(recorded);
        let all = warm + steps + 1;
        let mut progress = Progress::new(all);
        // What may take long in it.
        let first = match self.mesh.model.queues() {
            true => "taking the first step, in which kernels are compiled and products timed",
            false => "taking the first step",
        };
        for number in 0..all {
            interrupt.check()?;
            let began = Instant::now();
            let totals = match number {
                0 => waiting(first, PATIENCE, || self.queue())?,
                _ => self.queue()?,
            };
            progress.step("steps", || ());
            queueing.push(ms_since(began));
            let ready = match self.mesh.model.queues() {
                true => before.replace(totals),
                false => Some(totals),
            };
            if let Some(totals) = ready {
                self.mesh.model.read(totals)?;
                times.push(ms_since(std::mem::replace(&mut last, Instant::now())));
            }
        }
        if let Some(totals) = before {
            self.mesh.model.read(totals)?;
            times.push(ms_since(last));
        }
        let first_step_s = queueing[0] / 1e3;
        let (ms, queue_ms) = (timed(times, warm), timed(queueing, warm));
        Ok(Timings { ms, queue_ms, first_step_s })
    }

    /// A step queued behind `pause`; its milliseconds, without those of the pause.
    fn behind(&mut self, pause: Duration) -> Result<f64, TrainError> {
        let began = Instant::now();
        self.mesh.model.pause(pause)?;
        let totals = self.queue()?;
        self.mesh.model.read(totals)?;
        Ok(match self.mesh.model.queues() {
            true => ms_since(began) - 1e3 * pause.as_secs_f64(),
            false => ms_since(began),
        })
    }

    /// The milliseconds in which the device works at a step, the median of a few: each is queued while the
    /// device is kept busy, so that it never waits for the host. None where work is not queued.
    fn working(&mut self, pause: Duration) -> Result<Option<f64>, TrainError> {
        if !self.mesh.model.queues() {
            return Ok(None);
        }
        let mut times = [0.0; WORKING];
        for ms in &mut times {
            *ms = self.behind(pause)?;
        }
        times.sort_by(f64::total_cmp);
        Ok(Some(times[WORKING / 2]))
    }

    /// A step, in the mean of a few.
    fn profiled(&mut self, pause: Duration) -> Result<Profiled, TrainError> {
        self.mesh.model.profile(true)?;
        let mut profiled = Profiled::default();
        let steps = PROFILED.div_ceil(self.case.accumulate());
        for step in 0..steps {
            profiled.ms += self.behind(pause)? / steps as f64;
            if step + 1 == steps {
                // With copies that are under way.
                self.mesh.model.profile(false)?;
            }
            for BlockTime { block, seconds, .. } in self.mesh.model.block_times() {
                let ms = seconds * 1e3 / steps as f64;
                if block == KEYS_WAIT {
                    profiled.keys_wait_ms += ms;
                    continue;
                }
                let sums = match block {
                    COPY_IN | COPY_OUT => &mut profiled.copies,
                    _ => &mut profiled.blocks,
                };
                let known = sums.iter().position(|sum| sum.block == block);
                let at = known.unwrap_or_else(|| {
                    sums.push(BlockSum { block, calls: 0, ms: 0.0, flops: 0.0, bytes: 0.0 });
                    sums.len() - 1
                });
                sums[at].calls += 1;
                sums[at].ms += ms;
            }
        }
        let all = profiled.blocks.iter_mut().chain(&mut profiled.copies);
        all.for_each(|sum| sum.calls /= steps);
        Ok(profiled)
    }
}

/// A profiled step.
#[derive(Default)]
struct Profiled {
    ms: f64,
    blocks: Vec<BlockSum>,
    keys_wait_ms: f64,
    copies: Vec<BlockSum>,
}

/// What steps took, in rising order.
struct Timings {
    ms: Vec<f64>,
    /// In which the host queued each.
    queue_ms: Vec<f64>,
    /// In which the host queued the very first.
    first_step_s: f64,
}

/// All but the first steps, which are `warm`, and the last, in rising order.
fn timed(mut all: Vec<f64>, warm: usize) -> Vec<f64> {
    all.pop();
    let mut timed = all.split_off(warm);
    timed.sort_by(f64::total_cmp);
    timed
}

fn ms_since(began: Instant) -> f64 {
    began.elapsed().as_secs_f64() * 1e3
}

/// Small numbers, to be repeated: to draw billions takes minutes. Their number is odd, so that rows differ.
fn small() -> Vec<f32> {
    let mut random = Random::new(1);
    (0..(1 << 16) + 1).map(|_| 0.02 * random.normal() as f32).collect()
}

/// Gives all weights small values, and norms ones.
fn fill<B: Blocks>(model: &mut Model<B>) -> Result<(), NnError> {
    let (small, ones) = (small(), vec![1.0; 1 << 16]);
    for index in 0..model.parameters().len() {
        let is_norm = model.parameters()[index].shape.len() == 1;
        model.fill_repeating(index, if is_norm { &ones } else { &small })?;
    }
    Ok(())
}

/// The products of the layers of a case, alone: milliseconds of those of a step; nothing where the
/// device takes no times.
pub struct Alone<'a> {
    pub case: &'a Case,
    pub recompute: Recomputation,
    pub interrupt: &'a Interrupt,
}

impl OnDevice for Alone<'_> {
    type Output = Result<Option<f64>, Failure>;

    fn run<B: Blocks>(self, mut blocks: B, _: Option<String>) -> Self::Output {
        let Self { case, recompute, interrupt } = self;
        let kind = StepKind::Training(recompute.into());
        let (config, rows, len) = (&case.config, case.rows(), case.len());
        let account = config.dry_run_on(&blocks, &case.attention, &|_| false, rows, len, kind)?;
        let tokens = rows * len;
        let sizes = sizes(config);
        let shapes = sizes.map(|(inputs, outputs)| LinearShape { tokens, inputs, outputs });
        let Some(ms) = alone(&mut blocks, shapes, config.num_hidden_layers, interrupt)? else {
            return Ok(None);
        };
        let products: Vec<_> = shapes.into_iter().zip(ms).collect();
        let calls = account.blocks.iter().filter_map(|noted| Some((noted.block, noted.linear?)));
        Ok(products_alone(&products, calls).map(|ms| ms * case.accumulate() as f64))
    }
}

/// A product and both its gradients, in milliseconds.
type Product = (LinearShape, [f64; 3]);

/// Milliseconds of `calls`, by block and shape, if all are of `products`: what is computed again counts again.
fn products_alone<'a>(
    products: &[Product],
    calls: impl Iterator<Item = (&'a str, LinearShape)>,
) -> Option<f64> {
    let ms = |(block, shape): (&str, LinearShape)| {
        let number = LINEAR.iter().position(|linear| *linear == block)?;
        let (_, ms) = products.iter().find(|(product, _)| *product == shape)?;
        Some(ms[number])
    };
    calls.map(ms).sum()
}

/// Inputs and outputs of the products of a layer.
fn sizes(config: &ModelConfig) -> [(usize, usize); 4] {
    let (hidden, wide) = (config.hidden_size, config.intermediate_size);
    let attention = config.num_attention_heads * config.dim();
    let qkv = attention + 2 * config.kv_heads() * config.dim();
    [(hidden, qkv), (attention, hidden), (hidden, 2 * wide), (wide, hidden)]
}

/// Operands of a product and its gradients.
struct Operands<A> {
    shape: LinearShape,
    x: A,
    y: A,
    d_x: A,
    weights: A,
    d_weight: A,
}

impl<A: Array> Operands<A> {
    fn new<B: Blocks<Array = A>>(blocks: &mut B, shape: LinearShape) -> Result<Self, NnError> {
        let LinearShape { tokens, inputs, outputs } = shape;
        let (precision, small) = (blocks.precision(), small());
        let mut array = |dtype: DType, elems: usize| -> Result<A, NnError> {
            let mut array = A::default();
            blocks.resize("operand", &mut array, dtype, elems)?;
            let some = &small[..small.len().min(elems)];
            let first = PartMut { array: &mut array, place: 0..some.len(), accumulate: false };
            blocks.fill(first, some)?;
            let all = PartMut { array: &mut array, place: 0..elems, accumulate: false };
            blocks.repeat(all, some.len())?;
            Ok(array)
        };
        Ok(Self {
            shape,
            x: array(precision.weights, tokens * inputs)?,
            y: array(precision.weights, tokens * outputs)?,
            d_x: array(precision.weights, tokens * inputs)?,
            weights: array(precision.weights, inputs * outputs)?,
            d_weight: array(precision.gradients, inputs * outputs)?,
        })
    }

    fn forward<B: Blocks<Array = A>>(&mut self, blocks: &mut B) -> Result<(), NnError> {
        let Self { shape, x, y, weights, .. } = self;
        blocks.linear(*shape, Part::whole(x), Part::whole(weights), None, None, y)
    }

    fn backward<B: Blocks<Array = A>>(&mut self, blocks: &mut B) -> Result<(), NnError> {
        let Self { shape, x, y, d_x, weights, d_weight } = self;
        blocks.linear_backward_input(*shape, y, Part::whole(weights), d_x)?;
        let place = 0..shape.inputs * shape.outputs;
        let d_weight = PartMut { array: d_weight, place, accumulate: false };
        blocks.linear_backward_weight(*shape, y, x, d_weight)
    }
}

/// Milliseconds of products and both their gradients, the median, in passes forward and back over `layers`
/// layers that have nothing else: as warm as in a step, and without a wait. None where the device takes no
/// times.
fn alone<B: Blocks>(
    blocks: &mut B,
    shapes: [LinearShape; 4],
    layers: usize,
    interrupt: &Interrupt,
) -> Result<Option<[[f64; 3]; 4]>, Failure> {
    let mut all = Vec::new();
    for shape in shapes {
        all.push(Operands::new(blocks, shape)?);
    }
    let mut times = Vec::new();
    for pass in 0..PASSES {
        interrupt.check()?;
        // The first finds its kernels, and warms the device.
        if pass + 1 == PASSES {
            blocks.profile(true)?;
        }
        let totals = blocks.totals()?;
        for _ in 0..layers {
            all.iter_mut().try_for_each(|operands| operands.forward(blocks))?;
        }
        for _ in 0..layers {
            all.iter_mut().rev().try_for_each(|operands| operands.backward(blocks))?;
        }
        blocks.read(totals)?;
        times = blocks.block_times();
    }
    blocks.profile(false)?;
    if times.is_empty() {
        return Ok(None);
    }
    let ms = |block: &str, shape: usize| {
        let of_block = times.iter().filter(|time| time.block == block);
        let mut ms: Vec<f64> =
            of_block.skip(shape).step_by(shapes.len()).map(|time| time.seconds * 1e3).collect();
        ms.sort_by(f64::total_cmp);
        ms[ms.len() / 2]
    };
    let last = shapes.len() - 1;
    Ok(Some(std::array::from_fn(|i| {
        [ms(LINEAR[0], i), ms(LINEAR[1], last - i), ms(LINEAR[2], last - i)]
    })))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warm_steps_are_those_between_the_first_and_the_last() {
        assert_eq!(timed(vec![90.0, 80.0, 70.0, 60.0, 5.0, 7.0, 6.0, 1.0], 4), [5.0, 6.0, 7.0]);
    }

    #[test]
    fn products_that_are_computed_again_count_again() {
        let shape = |inputs, outputs| LinearShape { tokens: 3, inputs, outputs };
        // As many operations, and other times.
        let (wide, narrow) = (shape(2, 4), shape(4, 2));
        let products = [(wide, [1.0, 10.0, 100.0]), (narrow, [2.0, 20.0, 200.0])];
        let calls = [
            (LINEAR[0], wide),
            (LINEAR[0], narrow),
            (LINEAR[0], wide),
            (LINEAR[1], wide),
            (LINEAR[2], narrow),
        ];
        let sum = 1.0 + 2.0 + 1.0 + 10.0 + 200.0;
        assert_eq!(products_alone(&products, calls.into_iter()), Some(sum));
        // A part of a step's time would be taken for all of it.
        let others = [(LINEAR[0], wide), (LINEAR[0], shape(8, 2))];
        assert_eq!(products_alone(&products, others.into_iter()), None);
    }
}
