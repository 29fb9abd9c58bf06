//! `foveate shard simulate`: how long a step of a recipe would take on a mesh of a machine.
//!
//! Blocks of a step are those of the dry run on a rank's part; what they take follows from the
//! machine's rates. Transfers are those of the plan of attention and of the step that is proven. Ranks with one place
//! on `context` do the same at the same time, so one of them stands for all.

mod attention;
mod run;
mod step;
mod stream;
mod transfers;

use std::path::PathBuf;

use foveate::tensor::count::Count;
use foveate_shard::simulate::{Idle, Machine, Queue};
use foveate_shard::{Limits, MeshAxis};
use foveate_train::recipe::{self, Recipe};
use serde::Serialize;

use super::memory::{self, StepMemory};
use super::plan::{PlanArgs, PlannedRecipe};
use crate::failure::Failure;
use crate::limits::{self, Need};
use crate::output::{Output, bytes, count, write_file};
use step::Step;

/// Bytes of a task while it is simulated.
const TASK_BYTES: f64 = 600.0;

/// Predict a step's time, what is not hidden and memory by rank, on machines that are not here
#[derive(Debug, clap::Args)]
#[command(arg_required_else_help = true)]
pub struct Args {
    #[command(flatten)]
    what: PlanArgs,
    /// The machine: h100x8, h200x8, or a TOML file like those of crates/foveate-shard/machines; mesh.machine of the
    /// recipe when left out
    #[arg(long, value_name = "NAME|FILE")]
    machine: Option<String>,
    /// Write a trace of a step's first batch, and of the next where there are several, to this file, for Chrome or
    /// ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    limits: limits::Limits,
}

/// What a step takes, with all its batches.
#[derive(Debug, Serialize)]
struct Report {
    simulated: bool,
    mesh: String,
    machine: String,
    source: String,
    strategy: String,
    recompute: String,
    /// Of a step.
    batches: usize,
    /// Of a batch, over all ranks.
    rows: usize,
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
    let given = args.machine.as_deref().map(memory::machine).transpose()?;
    let recipe = args.what.recipe()?;
    let machine = match given {
        Some(machine) => machine,
        None => machine_of(&recipe)?,
    };
    let PlannedRecipe { recipe, config, planes, plan, .. } =
        args.what.plan(recipe, &args.limits, Some(&machine))?;
    let tiles: Vec<Vec<u64>> = {
        let reps = plan.sharding.map().mesh().group(0, &[MeshAxis::Context]);
        reps.into_iter().map(|rank| plan.live_tiles(&planes, rank)).collect()
    };
    let proven =
        plan.prove(&planes, &Limits::default()).map_err(|e| Failure::new(e.to_string()))?;
    let plan = proven.plan();
    let mesh = *plan.sharding.map().mesh();
    let reps = mesh.group(0, &[MeshAxis::Context]);
    let step = StepMemory::of(&recipe, &config, &proven, &machine)?;
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
        layers,
        tiles: &tiles,
        reps: &reps,
    };
    // Batches of a step but the first are alike.
    let accumulate = recipe.train.accumulate.max(1);
    let mut shape = super::plan::step_shape(&recipe, &config, &mesh, &step.setting)?;
    let mut timed = |batches: usize| {
        shape.batches = batches;
        let moves = super::plan::proven_step(&plan.sharding, &shape)?;
        Ok::<_, Failure>(run::timing(&model, moves.plan()))
    };
    let once = timed(1)?;
    let timing = if accumulate > 1 { timed(2)? } else { once.clone() };
    // What is once so much with one batch and so much with two.
    let of_step = |one: f64, two: f64| one + (two - one) * (accumulate - 1) as f64;
    let seconds = of_step(once.seconds(), timing.seconds());
    let idle = |rank: usize| {
        let one = once.idle(rank);
        let of = |idle: Idle| {
            let found = one.iter().find(|other| other.queue == idle.queue);
            let seconds = of_step(found.map_or(0.0, |found| found.seconds), idle.seconds).max(0.0);
            Idle { seconds, ..idle }
        };
        timing.idle(rank).into_iter().map(of).collect()
    };
    if let Some(file) = &args.trace {
        write_file(file, &timing.trace().to_string())?;
    }
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
        batches: accumulate,
        rows: plan.whole.batch,
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
                compute_ms: 1e3
                    * of_step(once.busy(rank, Queue::Compute), timing.busy(rank, Queue::Compute)),
                memory_bytes: step.bytes[rank],
                idle: idle(rank),
            })
            .collect(),
    };
    if args.json {
        return Ok(out.json(&report)?);
    }
    print(&report, out)
}

/// The machine that a recipe names.
fn machine_of(recipe: &Recipe) -> Result<Machine, Failure> {
    let Some(name) = &recipe.mesh.machine else {
        return Err(Failure::usage("no machine is given, and the recipe has no mesh.machine")
            .help("give --machine h100x8, h200x8, or a TOML file like those of crates/foveate-shard/machines"));
    };
    recipe::machine(name).map_err(|why| Failure::usage(format!("mesh.machine {why}")))
}

fn print(report: &Report, out: &mut Output) -> Result<(), Failure> {
    out.line(format_args!("simulated, not measured: {}", report.machine))?;
    out.line(format_args!("rates     {}", report.source))?;
    out.line(format_args!(
        "mesh      {}; keys by {}; computed again: {}",
        report.mesh, report.strategy, report.recompute
    ))?;
    out.line(format_args!(
        "step      {:.1} ms for {} {} of {} over all ranks, {} tokens/s a GPU",
        report.step_ms,
        report.batches,
        if report.batches == 1 { "batch" } else { "batches" },
        Count(report.rows, "row"),
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
            .filter(|idle| idle.seconds * 1e3 >= 0.05)
            .map(|idle| format!("{} {:.1} ms", idle.queue.name(), idle.seconds * 1e3))
            .collect();
        let waits = if waits.is_empty() { "nothing".to_owned() } else { waits.join(", ") };
        out.line(format_args!(
            "context {rank:<3} computes {:.1} ms of the step, waits for {waits}; {}",
            of.compute_ms,
            bytes(of.memory_bytes as f64)
        ))?;
    }
    Ok(())
}
