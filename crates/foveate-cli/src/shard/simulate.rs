//! `foveate shard simulate`: how long a step of a recipe would take on a mesh of a machine.
//!
//! Blocks of a step are those of the dry run on a rank's part; what they take follows from the
//! machine's rates. Transfers are those of the plan. Ranks with one place on `context` do the same
//! at the same time, so one of them stands for all.

use std::path::PathBuf;

use foveate_nn::{Account, ModelConfig, NotedBlock, ParameterState, Recomputation, Recompute};
use foveate_shard::simulate::{Idle, Machine, Queue, Span, Task, TaskId, Timeline, Timing};
use foveate_shard::{Limits, MeshAxis, Part, ProvenPlan, Strategy};
use serde::Serialize;

use super::memory::{self, Reshard, StepMemory};
use super::plan::{PlanArgs, PlannedRecipe};
use crate::failure::Failure;
use crate::limits::{self, Need};
use crate::output::{Output, bytes, count, write_file};

/// Bytes of a task while it is simulated.
const TASK_BYTES: f64 = 600.0;

/// Predict a step's time, what is not hidden and memory by rank, on machines that are not here
#[derive(Debug, clap::Args)]
#[command(arg_required_else_help = true)]
pub struct Args {
    #[command(flatten)]
    what: PlanArgs,
    /// The machine: h100x8, h200x8, or a TOML file like those of crates/foveate-shard/machines
    #[arg(long, value_name = "NAME|FILE")]
    machine: String,
    /// When gathered weights are dropped
    #[arg(long, value_enum, default_value_t = Reshard::Always)]
    reshard: Reshard,
    /// Write a trace for Chrome or ui.perfetto.dev to this file
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    limits: limits::Limits,
}

#[derive(Debug, Serialize)]
struct Report {
    simulated: bool,
    mesh: String,
    machine: String,
    source: String,
    strategy: String,
    recompute: String,
    step_ms: f64,
    tokens_per_s_per_gpu: f64,
    tflops_dense: f64,
    tflops_live: f64,
    peak_tflops: f64,
    imbalance: f64,
    memory_bytes: u64,
    device_bytes: u64,
    /// By place on `context`.
    ranks: Vec<RankReport>,
}

#[derive(Debug, Serialize)]
struct RankReport {
    compute_ms: f64,
    memory_bytes: u64,
    idle: Vec<Idle>,
}

/// Plans, simulates and prints.
pub fn run(args: &Args, out: &mut Output) -> Result<(), Failure> {
    let machine = memory::machine(&args.machine)?;
    let PlannedRecipe { recipe, config, planes, plan, .. } = args.what.plan(&args.limits)?;
    let tiles: Vec<Vec<u64>> = {
        let reps = plan.sharding.map().mesh().group(0, &[MeshAxis::Context]);
        reps.into_iter().map(|rank| plan.live_tiles(&planes, rank)).collect()
    };
    let proven =
        plan.prove(&planes, &Limits::default()).map_err(|e| Failure::new(e.to_string()))?;
    let plan = proven.plan();
    let mesh = *plan.sharding.map().mesh();
    let reps = mesh.group(0, &[MeshAxis::Context]);
    let step = StepMemory::of(&recipe, &config, &proven, &machine, args.reshard)?;
    let layers = config.num_hidden_layers;
    let stages = plan.ranks[0].stages.len();
    let tasks = layers * reps.len() * (24 * mesh.size(MeshAxis::Tensor) + 2 * stages + 4) * 2;
    let need = Need { bytes: tasks as f64 * TASK_BYTES, seconds: 0.0 };
    args.limits.admit("the tasks of a step", need, "give a smaller mesh")?;
    let model = Step {
        machine: &machine,
        proven: &proven,
        config: &config,
        account: &step.account,
        state: step.setting.state,
        recompute: step.setting.recompute,
        rows: step.setting.rows,
        len: step.len,
        layers,
        tiles: &tiles,
        reshard: args.reshard,
        reps: &reps,
    };
    // Batches of a step but the first are alike.
    let once = model.timing(1);
    let accumulate = recipe.train.accumulate.max(1);
    let timing = if accumulate > 1 { model.timing(2) } else { once.clone() };
    let more = timing.seconds() - once.seconds();
    let seconds = once.seconds() + more * (accumulate - 1) as f64;
    if let Some(file) = &args.trace {
        write_file(file, &timing.trace().to_string())?;
    }
    let batches = if accumulate > 1 { 2.0 } else { 1.0 };
    let tokens = (plan.whole.batch * plan.whole.q_len * accumulate) as f64;
    let rate = tokens / seconds / mesh.ranks() as f64;
    let entries = proven.proof().live_entries as f64;
    let queries = (plan.whole.batch * plan.whole.heads * plan.whole.q_len * layers) as f64;
    let tflops = |keys: f64| rate * config.flops_per_token(keys).total() * 1e-12;
    let report = Report {
        simulated: true,
        mesh: mesh.to_string(),
        machine: machine.name.clone(),
        source: machine.source.clone(),
        strategy: plan.strategy.to_string(),
        recompute: step.setting.recompute.what.name().to_owned(),
        step_ms: seconds * 1e3,
        tokens_per_s_per_gpu: rate,
        tflops_dense: tflops(plan.whole.kv_len as f64),
        tflops_live: tflops(entries / queries),
        peak_tflops: machine.gpu.peak_tflops,
        imbalance: proven.proof().imbalance,
        memory_bytes: step.most(),
        device_bytes: step.device,
        ranks: (0..reps.len())
            .map(|rank| RankReport {
                compute_ms: timing.busy(rank, Queue::Compute) * 1e3 / batches,
                memory_bytes: step.bytes[rank],
                idle: timing.idle(rank),
            })
            .collect(),
    };
    if args.json {
        return Ok(out.json(&report)?);
    }
    print(&report, batches, out)
}

fn print(report: &Report, batches: f64, out: &mut Output) -> Result<(), Failure> {
    out.line(format_args!("simulated, not measured: {}", report.machine))?;
    out.line(format_args!("rates     {}", report.source))?;
    out.line(format_args!(
        "mesh      {}; keys by {}; computed again: {}",
        report.mesh, report.strategy, report.recompute
    ))?;
    out.line(format_args!(
        "step      {:.1} ms, {} tokens/s a GPU",
        report.step_ms,
        count(report.tokens_per_s_per_gpu.round())
    ))?;
    let share = |tflops: f64| 100.0 * tflops / report.peak_tflops;
    out.line(format_args!(
        "rate      {:.0} TFLOP/s a GPU ({:.1} %), attention counted whole; {:.0} ({:.1} %) by live \
         entries",
        report.tflops_dense,
        share(report.tflops_dense),
        report.tflops_live,
        share(report.tflops_live)
    ))?;
    let fits = if report.memory_bytes <= report.device_bytes { "" } else { ": it does not fit" };
    out.line(format_args!(
        "memory    {} of {}{fits}",
        bytes(report.memory_bytes as f64),
        bytes(report.device_bytes as f64)
    ))?;
    out.line(format_args!("imbalance {:.4}", report.imbalance))?;
    for (rank, of) in report.ranks.iter().enumerate() {
        let waits: Vec<String> = of
            .idle
            .iter()
            .filter(|idle| idle.seconds * 1e3 / batches >= 0.05)
            .map(|idle| format!("{} {:.1} ms", idle.queue.name(), idle.seconds * 1e3 / batches))
            .collect();
        let waits = if waits.is_empty() { "nothing".to_owned() } else { waits.join(", ") };
        out.line(format_args!(
            "context {rank:<3} computes {:.1} ms, waits for {waits}; {}",
            of.compute_ms,
            bytes(of.memory_bytes as f64)
        ))?;
    }
    Ok(())
}

/// Blocks of the stream between layers, whose tokens are cut over `tensor`.
const STREAM_BLOCKS: [&str; 7] = [
    "embed",
    "embed backward",
    "rms_norm",
    "add_rms_norm",
    "rms_norm again",
    "rms_norm backward",
    "add",
];

/// What a step is simulated from.
struct Step<'a> {
    machine: &'a Machine,
    proven: &'a ProvenPlan,
    config: &'a ModelConfig,
    account: &'a Account,
    state: ParameterState,
    recompute: Recomputation,
    /// Of a rank.
    rows: usize,
    /// Tokens of a row on a rank.
    len: usize,
    layers: usize,
    /// Live tiles of each stage, by place on `context`.
    tiles: &'a [Vec<u64>],
    reshard: Reshard,
    /// Ranks that stand for those of their place on `context`.
    reps: &'a [usize],
}

/// Seconds of the blocks of a pass, attention left out.
#[derive(Clone, Copy, Debug, Default)]
struct Pass {
    embedding: f64,
    /// Of all layers.
    layers: f64,
}

/// How the stream between products moves over `tensor`, as a step on GPUs does it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Moves {
    /// Each product takes the tokens of one rank: those of this one while others' come, or those of others
    /// first, each on its way while the next are computed.
    Beside,
    /// In one piece, for which the rank waits.
    Waited,
}

/// Products of a layer, forward.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Product {
    Qkv,
    Out,
    GateUp,
    Down,
}

impl Product {
    const ALL: [Self; 4] = [Self::Qkv, Self::Out, Self::GateUp, Self::Down];

    fn name(self) -> &'static str {
        match self {
            Self::Qkv => "qkv",
            Self::Out => "out",
            Self::GateUp => "gate, up",
            Self::Down => "down",
        }
    }

    /// Elements of its weight.
    fn weight(self, config: &ModelConfig) -> f64 {
        let wide = match self {
            Self::Qkv => config.qkv_width(),
            Self::Out => config.attention_width(),
            Self::GateUp => 2 * config.intermediate_size,
            Self::Down => config.intermediate_size,
        };
        config.hidden_size as f64 * wide as f64
    }

    /// What moves before and behind: tokens are gathered for weights that are cut by rows, and sums of what
    /// those give that are cut by columns go to the ranks that have the tokens. Backward the other way round.
    fn moves(self) -> [Option<Moves>; 2] {
        match self {
            Self::Qkv | Self::GateUp => [Some(Moves::Beside), None],
            Self::Out | Self::Down => [None, Some(Moves::Beside)],
        }
    }

    /// Those that a backward pass computes again.
    fn again(what: Recompute) -> &'static [Self] {
        match what {
            Recompute::None => &[],
            Recompute::Attention => &[Self::Qkv],
            Recompute::Mlp => &[Self::GateUp],
            Recompute::Full => &[Self::Qkv, Self::Out, Self::GateUp],
        }
    }
}

impl Step<'_> {
    fn tensor(&self) -> usize {
        self.mesh().size(MeshAxis::Tensor)
    }

    fn mesh(&self) -> &foveate_shard::Mesh {
        self.proven.plan().sharding.map().mesh()
    }

    fn seconds(&self, block: &NotedBlock) -> f64 {
        let name = block.block;
        let share = if STREAM_BLOCKS.contains(&name) { self.tensor() as f64 } else { 1.0 };
        match name {
            "loss" | "loss backward" => {
                let products = if name == "loss" { 2.0 } else { 6.0 };
                let logits = block.flops / (products * self.config.hidden_size as f64);
                // 16 bits, read and written.
                self.machine.product_seconds(block.flops)
                    + self.machine.moving_seconds("cross-entropy", 4.0 * logits)
            }
            _ if block.flops > 0.0 => self.machine.product_seconds(block.flops),
            _ => self.machine.moving_seconds(name, block.bytes / share),
        }
    }

    fn pass(&self, blocks: &[NotedBlock]) -> Pass {
        let mut pass = Pass::default();
        for block in blocks {
            match block.block {
                "attention" | "attention backward" => {}
                "embed" | "embed backward" => pass.embedding += self.seconds(block),
                _ => pass.layers += self.seconds(block),
            }
        }
        pass
    }

    /// What a layer computes again in its backward pass.
    fn again(&self, layer: usize) -> Recompute {
        match layer < self.recompute.layers {
            true => self.recompute.what,
            false => Recompute::None,
        }
    }

    /// Seconds for each element of a product's weight, forward, or of its two products backward.
    fn seconds_per_weight(&self, pass: Pass, backward: bool) -> f64 {
        let sum = |products: &[Product]| -> f64 {
            products.iter().map(|product| product.weight(self.config)).sum()
        };
        let each = if backward { 2.0 } else { 1.0 } * sum(&Product::ALL);
        let again = (0..self.layers).filter(|_| backward).map(|layer| self.again(layer));
        let all =
            self.layers as f64 * each + again.map(|what| sum(Product::again(what))).sum::<f64>();
        pass.layers / all
    }

    /// When the tasks of so many batches and of the update behind them run.
    fn timing(&self, batches: usize) -> Timing {
        let of_loss = |block: &NotedBlock| block.block.starts_with("loss");
        let blocks = &self.account.blocks;
        let first = blocks.iter().position(of_loss).unwrap_or(blocks.len());
        let last = blocks.iter().rposition(of_loss).map_or(blocks.len(), |last| last + 1);
        let (forward, backward) = (self.pass(&blocks[..first]), self.pass(&blocks[last..]));
        let head: f64 = blocks[first..last].iter().map(|block| self.seconds(block)).sum();
        let mut run = Run {
            step: self,
            line: Timeline::default(),
            before: vec![Vec::new(); self.reps.len()],
            computed: Vec::new(),
        };
        for batch in 0..batches {
            run.batch(batch, forward, head, backward);
        }
        run.update();
        run.line.run()
    }
}

/// Tasks of a step so far.
struct Run<'a> {
    step: &'a Step<'a>,
    line: Timeline,
    /// What the next block of each rank follows.
    before: Vec<Vec<TaskId>>,
    /// The last kernels of every group that was computed so far, on all ranks.
    computed: Vec<Vec<TaskId>>,
}

impl Run<'_> {
    fn ranks(&self) -> Vec<usize> {
        (0..self.step.reps.len()).collect()
    }

    fn batch(&mut self, batch: usize, forward: Pass, head: f64, backward: Pass) {
        let step = self.step;
        let groups = step.proven.plan().shape.parameters.len();
        let tied = step.config.tie_word_embeddings;
        let keeps = step.reshard != Reshard::Always;
        let gathers = step.reshard != Reshard::Never || batch == 0;
        let mut whole = vec![None; groups];
        for (group, whole) in whole.iter_mut().enumerate() {
            // The head of a tied model is its embedding.
            if gathers && !(tied && group + 1 == groups) {
                *whole = self.gather(group, "gather");
            }
            let needs: Vec<TaskId> = whole.iter().copied().collect();
            match group {
                0 => self.products("embed", forward.embedding, [None, Some(Moves::Waited)], &needs),
                _ if group + 1 == groups => {
                    self.products("head and loss", head, [Some(Moves::Waited); 2], &needs);
                }
                _ => self.layer(&format!("layer {}", group - 1), forward, &needs),
            }
            self.ends_group();
        }
        for group in (0..groups - 1).rev() {
            let again = gathers && !keeps && group > 0;
            let whole = if again { self.gather(group, "gather again") } else { whole[group] };
            let needs: Vec<TaskId> = whole.iter().copied().collect();
            match group {
                0 => {
                    let moves = [Some(Moves::Waited), None];
                    self.products("embed backward", backward.embedding, moves, &needs);
                }
                _ => self.layer_backward(group - 1, backward, &needs),
            }
            self.ends_group();
            self.reduce(group);
            if group + 2 == groups {
                self.reduce(groups - 1);
            }
        }
    }

    /// The kernels of a group are queued.
    fn ends_group(&mut self) {
        let ranks = self.ranks().into_iter();
        self.computed.push(ranks.filter_map(|r| self.line.last(r, Queue::Compute)).collect());
    }

    fn together(
        &mut self,
        name: String,
        queue: Queue,
        (seconds, span): (f64, Span),
        after: Vec<TaskId>,
    ) -> Option<TaskId> {
        let (ranks, span) = (self.ranks(), Some(span));
        (seconds > 0.0).then(|| self.line.add(Task { name, ranks, queue, seconds, span, after }))
    }

    /// Gathers the weights of a group, while the group before the last is computed.
    fn gather(&mut self, group: usize, name: &str) -> Option<TaskId> {
        let (plan, step) = (self.step.proven.plan(), self.step);
        let members = step.mesh().group(step.reps[0], &[MeshAxis::Shard, MeshAxis::Context]);
        let (named, elements) = &plan.shape.parameters[group];
        let taken = step.machine.gather_seconds(&members, 2.0 * *elements as f64);
        let ahead = self.computed.len().checked_sub(2).map(|at| self.computed[at].clone());
        self.together(
            format!("{name} {named}"),
            Queue::Parameters,
            taken,
            ahead.unwrap_or_default(),
        )
    }

    /// Sums the gradients of a group, in f32, and cuts them over the ranks.
    fn reduce(&mut self, group: usize) {
        let (plan, step) = (self.step.proven.plan(), self.step);
        let after = self.computed.last().cloned().unwrap_or_default();
        let (named, elements) = &plan.shape.parameters[group];
        let over = |axes: &[MeshAxis]| step.mesh().group(step.reps[0], axes);
        let members = over(&[MeshAxis::Shard, MeshAxis::Context]);
        let whole = 4.0 * *elements as f64;
        let taken = step.machine.gather_seconds(&members, whole);
        self.together(format!("reduce {named}"), Queue::Gradients, taken, after.clone());
        let copies = over(&[MeshAxis::Replicate]);
        let (seconds, span) = step.machine.gather_seconds(&copies, whole / members.len() as f64);
        let taken = (2.0 * seconds, span);
        self.together(format!("all-reduce {named}"), Queue::Gradients, taken, after);
    }

    /// A layer forward.
    fn layer(&mut self, name: &str, pass: Pass, needs: &[TaskId]) {
        let each = self.step.seconds_per_weight(pass, false);
        for product in Product::ALL {
            self.product(name, product, each, needs);
            if product == Product::Qkv {
                self.attention(&format!("{name}: attention"));
            }
        }
    }

    /// A product, and what moves for it.
    fn product(&mut self, name: &str, product: Product, each: f64, needs: &[TaskId]) {
        let seconds = each * product.weight(self.step.config);
        self.products(&format!("{name}: {}", product.name()), seconds, product.moves(), needs);
    }

    /// A layer backward, with what is computed again.
    fn layer_backward(&mut self, layer: usize, pass: Pass, needs: &[TaskId]) {
        let (name, again) = (format!("layer {layer} backward"), self.step.again(layer));
        let each = self.step.seconds_per_weight(pass, true);
        for &product in Product::again(again) {
            self.product(&format!("{name}, again"), product, each, needs);
            if product == Product::Qkv {
                self.attention(&format!("{name}: attention again"));
            }
        }
        self.gradients(&name, [Product::Down, Product::GateUp], each, needs, |_| {});
        let attention = |run: &mut Self| run.attention_backward(&format!("{name}: attention"));
        self.gradients(&name, [Product::Out, Product::Qkv], each, needs, attention);
    }

    /// From the gradient behind the second of two products of a layer to that before the first. `between` are
    /// the blocks between them.
    fn gradients(
        &mut self,
        name: &str,
        [last, first]: [Product; 2],
        each: f64,
        needs: &[TaskId],
        between: impl FnOnce(&mut Self),
    ) {
        let product = |of: Product, what: &str| {
            (
                format!("{name}: gradient of {} {}", what, of.name()),
                each * of.weight(self.step.config),
            )
        };
        let [of_input, of_weight] = ["before", "of weights,"].map(|what| product(last, what));
        let [weight_of_first, before_first] =
            ["of weights,", "before"].map(|what| product(first, what));
        self.products(&of_input.0, of_input.1, [Some(Moves::Beside), None], needs);
        // The normalised stream that gradients of the first's weights read.
        let ahead = self.stream_of_all(&format!("{name}: stream again"));
        self.products(&of_weight.0, of_weight.1, [None, None], needs);
        between(self);
        for (before, ahead) in self.before.iter_mut().zip(ahead) {
            before.extend(ahead);
        }
        self.products(&weight_of_first.0, weight_of_first.1, [None, None], needs);
        self.products(&before_first.0, before_first.1, [None, Some(Moves::Beside)], needs);
    }

    /// The ranks of `tensor` that share a rank's tokens, and the bytes of the stream of all of these.
    fn stream(&self) -> (Vec<usize>, f64) {
        let step = self.step;
        let group = step.mesh().group(step.reps[0], &[MeshAxis::Tensor]);
        (group, 2.0 * (step.rows * step.len * step.config.hidden_size) as f64)
    }

    /// Gathers the stream, or sums it, in one piece, behind what each rank has computed.
    fn stream_of_all(&mut self, name: &str) -> Vec<Option<TaskId>> {
        let (group, stream) = self.stream();
        let taken = self.step.machine.gather_seconds(&group, stream);
        let moved = |rank: usize| self.moved(rank, name, taken, self.before[rank].clone());
        if group.len() < 2 {
            return vec![None; self.before.len()];
        }
        let tasks: Vec<Task> = self.ranks().into_iter().map(moved).collect();
        tasks.into_iter().map(|task| Some(self.line.add(task))).collect()
    }

    fn moved(
        &self,
        rank: usize,
        name: &str,
        (seconds, span): (f64, Span),
        after: Vec<TaskId>,
    ) -> Task {
        let (name, ranks, span) = (name.to_owned(), vec![rank], Some(span));
        Task { name, ranks, queue: Queue::Stream, seconds, span, after }
    }

    /// Products, and what moves of the stream before and behind them where it is cut.
    fn products(
        &mut self,
        name: &str,
        seconds: f64,
        [before, behind]: [Option<Moves>; 2],
        needs: &[TaskId],
    ) {
        let machine = self.step.machine;
        let (group, stream) = self.stream();
        let parts = group.len();
        let cut = |moves: Option<Moves>| moves.filter(|_| parts > 1);
        let [before, behind] = [before, behind].map(cut);
        let beside = [before, behind].contains(&Some(Moves::Beside));
        let slices = if beside { parts } else { 1 };
        let part = |turn: usize| {
            machine.exchange_seconds(group[0], &[(group[turn], stream / parts as f64)])
        };
        let whole = machine.gather_seconds(&group, stream);
        // Terms of all ranks are read, and the sums of a rank's tokens written.
        let sum = machine.moving_seconds("sum of terms", stream * (1.0 + 1.0 / parts as f64));
        let (gathers, sums) = (format!("{name}: gather tokens"), format!("{name}: send terms"));
        for rank in self.ranks() {
            let earlier = std::mem::take(&mut self.before[rank]);
            let moved = |run: &mut Self, what, taken, after: &[TaskId]| {
                let task = run.moved(rank, what, taken, after.to_vec());
                run.line.add(task)
            };
            let arrive: Vec<Option<TaskId>> = (0..slices)
                .map(|slice| match (before, slice) {
                    (Some(Moves::Waited), _) => Some(moved(self, &gathers, whole, &earlier)),
                    (None, _) | (Some(Moves::Beside), 0) => None,
                    (Some(Moves::Beside), turn) => {
                        Some(moved(self, &gathers, part(turn), &earlier))
                    }
                })
                .collect();
            let (mut ends, mut last) = (Vec::new(), None);
            for (slice, arrived) in arrive.into_iter().enumerate() {
                let after = earlier.iter().chain(needs).copied().chain(arrived).collect();
                let kernels = self.compute(rank, name, seconds / slices as f64, after);
                match behind {
                    Some(Moves::Waited) => ends.push(moved(self, &sums, whole, &[kernels])),
                    Some(Moves::Beside) if slice + 1 < slices => {
                        ends.push(moved(self, &sums, part(slice + 1), &[kernels]));
                    }
                    _ => {}
                }
                last = Some(kernels);
            }
            ends.extend(last);
            self.before[rank] = match behind {
                Some(_) => vec![self.compute(rank, &format!("{name}: sum terms"), sum, ends)],
                None => ends,
            };
        }
    }

    fn compute(&mut self, rank: usize, name: &str, seconds: f64, after: Vec<TaskId>) -> TaskId {
        let (name, ranks) = (name.to_owned(), vec![rank]);
        self.line.add(Task { name, ranks, queue: Queue::Compute, seconds, span: None, after })
    }

    /// Sends parts over `context`, when all ranks have what they send.
    fn exchange(
        &mut self,
        name: String,
        parts: impl Fn(usize) -> Vec<(usize, f64)>,
    ) -> Option<TaskId> {
        let step = self.step;
        let mut taken = (0.0, Span::Host);
        for &rank in step.reps {
            let (seconds, span) = step.machine.exchange_seconds(rank, &parts(rank));
            let span = if span == Span::Network { span } else { taken.1 };
            taken = (seconds.max(taken.0), span);
        }
        let after = self.before.concat();
        self.together(name, Queue::Keys, taken, after)
    }

    /// Seconds of a layer's attention on a rank.
    fn attention_seconds(&self, rank: usize, backward: bool) -> f64 {
        let step = self.step;
        let own = &step.proven.plan().ranks[step.reps[rank]];
        let entries = step.proven.proof().loads[step.reps[rank]] as f64 / step.layers as f64;
        let cells = &own.stages[0].compute;
        let queries = (cells.batch.len() * cells.heads.len() * cells.q.len()).max(1) as f64;
        let work = [entries, entries / queries];
        step.machine.attention_seconds(work, step.config.dim(), backward)
    }

    /// Attention forward, stage by stage.
    fn attention(&mut self, name: &str) {
        let (step, plan) = (self.step, self.step.proven.plan());
        let stages = plan.ranks[0].stages.len();
        let arrive: Vec<Option<TaskId>> = (0..stages)
            .map(|stage| {
                self.exchange(format!("{name}: keys of stage {stage}"), |rank| {
                    pairs(&plan.ranks[rank].stages[stage].receives)
                })
            })
            .collect();
        for rank in self.ranks() {
            let all: u64 = step.tiles[rank].iter().sum();
            let seconds = self.attention_seconds(rank, false);
            let mut after = std::mem::take(&mut self.before[rank]);
            for (stage, &tiles) in step.tiles[rank].iter().enumerate() {
                after.extend(arrive[stage]);
                let part = seconds * tiles as f64 / all.max(1) as f64;
                let name = format!("{name}, stage {stage}");
                after = vec![self.compute(rank, &name, part, after)];
            }
            self.before[rank] = after;
        }
        self.swap_back(name);
    }

    fn attention_backward(&mut self, name: &str) {
        let plan = self.step.proven.plan();
        self.swap_back(name);
        for rank in self.ranks() {
            let seconds = self.attention_seconds(rank, true);
            let after = std::mem::take(&mut self.before[rank]);
            self.before[rank] = vec![self.compute(rank, name, seconds, after)];
        }
        let returned = self.exchange(format!("{name}: gradients of keys"), |rank| {
            pairs(&plan.ranks[rank].returned)
        });
        self.all_after(returned);
    }

    /// With heads for tokens, results and their gradients move as queries do.
    fn swap_back(&mut self, name: &str) {
        let (step, plan) = (self.step, self.step.proven.plan());
        if plan.strategy != Strategy::HeadsForTokens {
            return;
        }
        let moved = self.exchange(format!("{name}: results"), |rank| {
            let own = &plan.ranks[rank].own;
            let rows = own.batch.len() * own.q.len() * own.heads.len() / step.reps.len();
            let bytes = (rows * plan.shape.dim_v * plan.shape.element.bytes()) as f64;
            let peers = step.reps.iter().filter(|&&peer| peer != rank);
            peers.map(|&peer| (peer, bytes)).collect()
        });
        self.all_after(moved);
    }

    fn all_after(&mut self, task: Option<TaskId>) {
        if let Some(task) = task {
            self.before.iter_mut().for_each(|before| before.push(task));
        }
    }

    /// The norm of all gradients, and the update of a rank's part.
    fn update(&mut self) {
        let step = self.step;
        let over = [MeshAxis::Shard, MeshAxis::Context];
        let parts = step.mesh().size_of(&over) as f64;
        let memory = step.account.memory();
        let moved = 2.0 * (memory.weights + memory.optimizer) as f64 + memory.gradients as f64;
        let rounds = !matches!(step.state, ParameterState::F32 | ParameterState::Exact);
        let block = if rounds { "update, rounded" } else { "update" };
        let norm = step.machine.moving_seconds("clip", memory.gradients as f64 / parts);
        let update = step.machine.moving_seconds(block, moved / parts);
        let everyone: Vec<usize> = (0..step.mesh().ranks()).collect();
        let summed: Vec<TaskId> =
            self.ranks().into_iter().filter_map(|r| self.line.last(r, Queue::Gradients)).collect();
        for rank in self.ranks() {
            let after = [&self.before[rank][..], &summed].concat();
            self.before[rank] = vec![self.compute(rank, "norm of gradients", norm, after)];
        }
        let taken = step.machine.gather_seconds(&everyone, 8.0);
        let after = self.before.concat();
        let agreed = self.together("sum the norms".to_owned(), Queue::Gradients, taken, after);
        self.all_after(agreed);
        for rank in self.ranks() {
            let after = std::mem::take(&mut self.before[rank]);
            self.compute(rank, "update", update, after);
        }
    }
}

fn pairs(parts: &[Part]) -> Vec<(usize, f64)> {
    parts.iter().map(|part| (part.peer, part.bytes as f64)).collect()
}
