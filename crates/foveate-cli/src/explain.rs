//! `foveate explain`: what would run for a problem that is given by its sizes.

use std::path::PathBuf;

use foveate::Device;

mod budget;
mod kernels;

pub use kernels::{ordinal, profile, records};

use crate::failure::Failure;
use crate::output::Output;
use crate::problem::ProblemArgs;
use crate::progress::{COUNTING, PATIENCE, waiting};

/// Show what would run for a problem given by its sizes
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    problem: ProblemArgs,
    /// Show the GPU kernels for a card, which need not be there: l40s, h200, rtx4090, ...; or
    /// cuda:0 for the one that is
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// Plan for the same bits in every run (with --device)
    #[arg(long, requires = "device")]
    deterministic: bool,
    /// Use a tile size of your own (with --device), such as backward.tile_q=64
    #[arg(long, value_name = "KEY=VALUE", requires = "device")]
    kernel: Vec<String>,
    /// Explain what a recipe takes instead: parameters, memory, attention; no weights or data
    /// are needed
    #[arg(long, value_name = "FILE", conflicts_with_all = ["heads", "dim", "len", "kv_len", "mask", "score", "device"])]
    recipe: Option<PathBuf>,
    /// Override a field of the recipe, such as data.len=4096
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Plans and prints the explanation.
pub fn run(args: &Args, out: &mut Output) -> Result<(), Failure> {
    if let Some(path) = &args.recipe {
        return budget::run(path, &args.set, args.json, out);
    }
    if !args.set.is_empty() {
        return Err(Failure::usage("--set overrides a field of a recipe, but none is given")
            .help("give --recipe FILE, or leave --set out"));
    }
    let given = args.problem.read()?;
    if let Some(device) = &args.device {
        return kernels::run(args, &given, device, out);
    }
    let plan = given.program().plan(&given.problem, &Device::cpu())?;
    let explanation = waiting(COUNTING, PATIENCE, || plan.explain());
    if args.json {
        return Ok(out.json(&explanation)?);
    }
    Ok(out.text(&explanation)?)
}
