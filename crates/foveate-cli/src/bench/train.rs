//! `foveate bench train`: how fast a model trains here, on random weights and tokens.
//!
//! Steps run as the trainer runs them: each is queued before the totals of the one before are read.
//! A few warm the device up, the median of the others is reported. Two more are profiled, for where
//! the device's time goes, and at the end the products of the layers run alone, for what their
//! neighbours cost them. On a GPU all of it is done with gradients of fixed bits and with gradients in
//! any order.

mod case;
mod peers;
mod steps;

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{Args as ClapArgs, ValueEnum};
use foveate::cuda::choose::KernelOptions;
use foveate::tensor::count::Count;
use foveate_shard::collectives::{Collectives, Rank};
use foveate_train::device::{DeviceChoice, DeviceOptions};

use crate::explain::kernel_options;
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::number::number;
use crate::output::{Output, bytes, tflops};
use crate::ranks::{self, RankArgs};
use case::Case;
use steps::{Alone, Measured, Steps};

#[derive(Debug, ClapArgs)]
pub struct Args {
    /// Sizes of a published Llama (135m, 1b, 3b, 8b), or a recipe
    #[arg(long, value_name = "NAME|RECIPE", default_value = "1b")]
    model: String,
    /// Override a field of the recipe, such as train.recompute_layers=4 or mesh.tensor=2
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Tokens of a row; the recipe's, 2048 for 135m, 8192 otherwise
    #[arg(long, value_name = "N", value_parser = number::<usize>)]
    len: Option<usize>,
    /// Rows of a batch, over all ranks; the recipe's, otherwise 1
    #[arg(long, value_name = "N", value_parser = number::<usize>)]
    rows: Option<usize>,
    /// Batches of a step; the recipe's, otherwise 1
    #[arg(long, value_name = "N", value_parser = number::<usize>)]
    accumulate: Option<usize>,
    /// Documents of a row, cut at random places
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = number::<usize>)]
    documents: usize,
    /// Mask as text; the recipe's, otherwise `causal`, with `& document` where there are several
    #[arg(long, value_name = "MASK")]
    mask: Option<String>,
    /// Let every other layer, the first among them, see so many keys back and no more
    #[arg(long, value_name = "N", value_parser = number::<usize>)]
    window: Option<usize>,
    /// Score as text, such as softcap(30); the recipe's, otherwise none
    #[arg(long, value_name = "SCORE")]
    score: Option<String>,
    /// What is kept of a parameter, as precision.state in a recipe; `exact` on a GPU
    #[arg(long, value_name = "STATE")]
    state: Option<String>,
    /// What the backward pass computes again, as train.recompute in a recipe
    #[arg(long, value_name = "WHAT")]
    recompute: Option<String>,
    /// What waits in the memory of the host for the backward pass, as train.offload in a recipe
    #[arg(long, value_name = "WHAT")]
    offload: Option<String>,
    /// Where to train: cpu, cuda:0, or auto for the first GPU where there is one
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: DeviceChoice,
    /// Whether sums on a GPU are made in a fixed order
    #[arg(long, value_name = "ORDER", default_value = "both")]
    order: Order,
    /// Use a kernel option of your own for attention, such as forward.family=portable
    #[arg(long, value_name = "KEY=VALUE")]
    kernel: Vec<String>,
    /// Steps that are timed
    #[arg(long, value_name = "N", default_value = "12", value_parser = number::<NonZeroUsize>)]
    steps: NonZeroUsize,
    /// What benches/train_gpu_peers.py printed
    #[arg(long, value_name = "FILE")]
    peers: Option<PathBuf>,
    /// Run nothing, and list where the documents of each row start, as JSON
    #[arg(long)]
    starts: bool,
    /// Print one JSON object an order
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ranks: RankArgs,
}

impl Args {
    /// Which rank this is asked to be.
    pub fn ranks(&self) -> &RankArgs {
        &self.ranks
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Order {
    /// The same bits in every run
    Fixed,
    /// Attention's gradients in any order
    Any,
    /// One after the other, for what the fixed order costs
    Both,
}

/// Measures steps and prints them.
pub fn run(args: &Args, out: &mut Output) -> Result<(), Failure> {
    let case = Case::of(args)?;
    let attention = kernel_options(&args.kernel)?;
    if let (DeviceChoice::Cpu, Some(given)) = (args.device, args.kernel.first()) {
        let wrong = Failure::usage(format!("--kernel {given} is of a GPU, and --device is cpu"));
        return Err(wrong.help("leave --kernel out, or choose a GPU by --device"));
    }
    if args.starts {
        out.json(&case.starts(0))?;
        return Ok(());
    }
    if let Some((ranks, deadline)) = args.ranks.threads()? {
        ranks::tell_devices(args.device, ranks);
        let interrupt = Interrupt::watch()?;
        let bench = |world: &Rank, out: Option<&mut Output>| {
            let device = ranks::device(args.device, world.rank());
            let interrupt = interrupt.clone();
            Bench { args, case: &case, attention, world, device, interrupt }.run(out)
        };
        let first = |world: &Rank| bench(world, Some(out));
        return ranks::in_threads(ranks, deadline, first, |world| bench(world, None));
    }
    let launch = args.ranks.find()?;
    let device = ranks::device(args.device, launch.local_rank);
    let world = &*ranks::meet(&launch)?;
    let interrupt = Interrupt::watch()?;
    let bench = Bench { args, case: &case, attention, world, device, interrupt };
    bench.run((world.rank() == 0).then_some(out))
}

/// The measurement on a rank.
struct Bench<'a> {
    args: &'a Args,
    case: &'a Case,
    attention: KernelOptions,
    world: &'a dyn Collectives,
    device: DeviceChoice,
    interrupt: Interrupt,
}

impl Bench<'_> {
    /// Measures, and prints what was found where there is an `out`.
    fn run(&self, mut out: Option<&mut Output>) -> Result<(), Failure> {
        let &Self { args, case, attention, world, device, .. } = self;
        let peers = args.peers.as_deref().map(peers::read).transpose()?.unwrap_or_default();
        let orders: &[bool] = match args.order {
            Order::Fixed => &[true],
            Order::Any => &[false],
            Order::Both => &[true, false],
        };
        let mut all: Vec<Measured> = Vec::new();
        for &deterministic in orders {
            let state = case.recipe.precision.state;
            let options = DeviceOptions { device, state, deterministic, attention };
            let steps = Steps { case, steps: args.steps.get(), deterministic };
            let found = options.run(steps.watched(world, &self.interrupt));
            let mut found = found.map_err(|e| case.failure(e))??;
            // A processor has one order.
            let more = found.gpu.is_some();
            if more && all.is_empty() && world.ranks() == 1 {
                let (recompute, interrupt) = (found.recompute, &self.interrupt);
                found.alone_ms = options.run(Alone { case, recompute, interrupt })??;
            } else {
                found.alone_ms = all.first().and_then(|first| first.alone_ms);
            }
            if let Some(out) = &mut out {
                if args.json {
                    out.json(&found.json(case))?;
                } else {
                    print(case, &found, all.first(), out)?;
                    peers::print(case, &found, &peers, out)?;
                }
                out.flush()?;
            }
            all.push(found);
            if !more {
                break;
            }
        }
        Ok(())
    }
}

fn print(
    case: &Case,
    found: &Measured,
    fixed: Option<&Measured>,
    out: &mut Output,
) -> Result<(), Failure> {
    let Case { name, documents, .. } = case;
    if fixed.is_none() {
        out.line(format!(
            "{name}: {} parameters, {} of {} tokens, {} a row, {} a step, `{}`, state {}, \
             recompute {}, {}",
            crate::output::count(found.parameters as f64),
            Count(case.rows(), "row"),
            case.len(),
            Count(*documents, "document"),
            Count(case.accumulate(), "batch"),
            case.mask(),
            found.state,
            case.told(found.recompute),
            found.gpu.as_deref().unwrap_or("the CPU"),
        ))?;
    }
    if let Some(mesh) = found.mesh.as_ref().filter(|_| fixed.is_none()) {
        out.line(format!(
            "{} in the mesh {mesh}; memory, TFLOP/s and blocks are those of rank 0",
            Count(found.ranks, "rank")
        ))?;
    }
    let order = if found.deterministic { "fixed order" } else { "any order" };
    out.line(format!(
        "\n{order}: {:.1} ms a step (fastest {:.1}), {:.0} tokens/s{}, {} of memory, {} by the dry run; \
         the host queues for {:.1} ms; weights took {:.1} s, the first step {:.1} s",
        found.ms,
        found.min_ms,
        found.tokens_per_s(case),
        match found.ranks {
            1 => String::new(),
            ranks => format!(" ({:.0} a rank)", found.tokens_per_s(case) / ranks as f64),
        },
        found.peak_bytes.map_or("?".to_owned(), |n| bytes(n as f64)),
        bytes(found.planned_bytes as f64),
        found.queue_ms,
        found.weights_s,
        found.first_step_s,
    ))?;
    if let Some(recording) = &found.recording {
        out.line(crate::train::recorded(recording))?;
    }
    if let Some(fixed) = fixed.filter(|fixed| fixed.deterministic && !found.deterministic) {
        out.line(format!(
            "the fixed order costs {:.1} % of its step",
            100.0 * (fixed.ms - found.ms) / fixed.ms
        ))?;
    }
    out.line(tflops(found.tflops(case), found.peak_tflops))?;
    if found.blocks.is_empty() {
        return Ok(());
    }
    print_blocks(found, out)?;
    if let Some(share) = found.working_share() {
        out.line(format!(
            "the device works for {:.1} % of a step, by steps that are queued before it begins them",
            100.0 * share
        ))?;
    }
    if let (Some(alone), Some(within)) = (found.alone_ms, found.products_ms()) {
        out.line(format!(
            "products of the layers: {within:.2} ms in the step, {alone:.2} alone, a ratio of {:.3}",
            alone / within
        ))?;
    }
    Ok(())
}

/// The blocks of a profiled step, and what they wait for.
fn print_blocks(found: &Measured, out: &mut Output) -> Result<(), Failure> {
    out.line(format!(
        "{:<26} {:>6} {:>9} {:>7} {:>9} {:>8}",
        "block", "calls", "ms", "share", "TFLOP/s", "GB/s"
    ))?;
    for block in &found.blocks {
        let rate = |of: f64, unit: f64| match of > 0.0 {
            true => format!("{:.0}", of / block.ms / unit),
            false => "-".to_owned(),
        };
        out.line(format!(
            "{:<26} {:>6} {:>9.2} {:>6.1}% {:>9} {:>8}",
            block.block,
            block.calls,
            block.ms,
            100.0 * block.ms / found.profiled_ms,
            rate(block.flops, 1e9),
            rate(block.bytes, 1e6),
        ))?;
    }
    let working: f64 = found.blocks.iter().map(|block| block.ms).sum();
    out.line(format!(
        "{:<26} {:>6} {working:>9.2} {:>6.1}% of {:.2} ms",
        "all blocks",
        "",
        100.0 * working / found.profiled_ms,
        found.profiled_ms
    ))?;
    for copy in &found.copies {
        out.line(format!(
            "{:<26} {:>6} {:>9.2} {:>6.1}% beside the blocks, between host and device",
            copy.block,
            copy.calls,
            copy.ms,
            100.0 * copy.ms / found.profiled_ms
        ))?;
    }
    if found.keys_wait_ms > 0.0 {
        out.line(format!(
            "attention waits for keys and gradients of other ranks for {:.2} ms, {:.1} % of that step",
            found.keys_wait_ms,
            100.0 * found.keys_wait_ms / found.profiled_ms
        ))?;
    }
    Ok(())
}

/// A word that recipes know, of the type that has it.
fn word<T: serde::de::DeserializeOwned>(option: &str, text: &str) -> Result<T, Failure> {
    serde_json::from_value(text.into()).map_err(|e| {
        let said = e.to_string();
        let known = said.split_once("expected ").map_or(said.as_str(), |(_, known)| known);
        Failure::usage(format!("--{option} is \"{text}\"; {known} is expected"))
    })
}
