//! `foveate shard check`: the plan of a recipe on a mesh, proven or with its first contradiction.

use std::path::PathBuf;
use std::time::Instant;

use foveate_shard::{Limits, Proof, StepProof, arrays, picture};
use foveate_train::memory::Setting;
use serde::Serialize;

use super::memory::{self, StepMemory};
use super::plan::{PlanArgs, PlannedRecipe, proven_step, refused, step_shape};
use crate::failure::Failure;
use crate::limits;
use crate::output::{Output, bytes, write_file};
use crate::progress::{PATIENCE, waiting};

/// Prove the plan of a recipe on a mesh: who holds, sends and computes what, and that it is right
#[derive(Debug, clap::Args)]
#[command(arg_required_else_help = true)]
pub struct Args {
    #[command(flatten)]
    what: PlanArgs,
    /// Refuse a plan whose busiest rank computes more than this many times the mean
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    max_imbalance: Option<f64>,
    /// Hold the memory of a whole step to that of this machine's GPUs: h100x8, h200x8, or a TOML file
    #[arg(long, value_name = "NAME|FILE")]
    machine: Option<String>,
    /// Write a picture of who computes what to this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    limits: limits::Limits,
}

#[derive(Debug, Serialize)]
struct Report {
    mesh: String,
    map: String,
    strategy: String,
    reason: String,
    layouts: Vec<[String; 2]>,
    #[serde(flatten)]
    proof: Proof,
    /// What moves beside the keys of attention.
    step: StepProof,
    plan_ms: f64,
    prove_ms: f64,
    /// Of a whole step, of the rank that takes the most.
    #[serde(skip_serializing_if = "Option::is_none")]
    step_bytes: Option<u64>,
}

/// Plans, proves and prints.
pub fn run(args: &Args, out: &mut Output) -> Result<(), Failure> {
    if let Some(given) = args.max_imbalance.filter(|&most| most.is_nan() || most < 1.0) {
        let message = format!("--max-imbalance is {given}; the busiest rank has the mean or more");
        return Err(Failure::usage(message).help("give 1 or more, such as 1.05"));
    }
    let machine = args.machine.as_deref().map(memory::machine).transpose()?;
    let PlannedRecipe { recipe, config, map, planes, plan, plan_ms } =
        args.what.plan(args.what.recipe()?, &args.limits, machine.as_ref())?;
    if let Some(file) = &args.svg {
        write_file(file, &picture::to_svg(&plan, &planes))?;
    }
    let began = Instant::now();
    let limits = Limits { imbalance: args.max_imbalance, attention_bytes: None };
    let proven = waiting("proving the plan", PATIENCE, || plan.prove(&planes, &limits))
        .map_err(|e| Failure::new(e.to_string()))?;
    let cuts = &proven.plan().sharding;
    let shape = step_shape(&recipe, &config, cuts.map().mesh(), &Setting::of(&recipe))?;
    let between = *proven_step(cuts, &shape)?.proof();
    let prove_ms = began.elapsed().as_secs_f64() * 1e3;
    let plan = proven.plan();
    let step = match &machine {
        Some(machine) => Some(StepMemory::of(&recipe, &config, &proven, machine)?),
        None => None,
    };
    if let Some(step) = step.as_ref().filter(|step| !step.fits()) {
        let rank = (0..step.bytes.len()).max_by_key(|&rank| step.bytes[rank]).unwrap_or(0);
        return Err(Failure::new(format!(
            "(f) a step, place {rank} of context: takes {} where the GPU has {}; cut more, or \
             compute more again",
            bytes(step.most() as f64),
            bytes(step.device as f64)
        )));
    }
    let layouts = arrays::ATTENTION.iter().chain(arrays::MODEL).map(|array| {
        let layout = array.layout_in(&plan.sharding, plan.shape.element).map_err(refused)?;
        Ok([array.name.to_owned(), layout.to_string()])
    });
    let report = Report {
        mesh: map.mesh().to_string(),
        map: map.to_string(),
        strategy: plan.strategy.to_string(),
        reason: plan.reason.clone(),
        layouts: layouts.collect::<Result<_, Failure>>()?,
        proof: proven.proof().clone(),
        step: between,
        plan_ms,
        prove_ms,
        step_bytes: step.as_ref().map(StepMemory::most),
    };
    if args.json {
        return Ok(out.json(&report)?);
    }
    out.line(format_args!("mesh      {}", report.mesh))?;
    out.line(format_args!("map       {}", report.map))?;
    for [name, layout] in &report.layouts {
        out.line(format_args!("  {name:<13} {layout}"))?;
    }
    out.line(format_args!("strategy  {}: {}", report.strategy, report.reason))?;
    out.line(&report.proof)?;
    out.line(report.step)?;
    if let Some(step) = &step {
        out.line(format_args!(
            "(f) a step      {} of {} on the rank that takes the most, computed again: {}",
            bytes(step.most() as f64),
            bytes(step.device as f64),
            step.setting.recompute.what.name()
        ))?;
    }
    out.line(format_args!("planned in {plan_ms:.1} ms, proven in {prove_ms:.1} ms"))?;
    if let Some(file) = &args.svg {
        out.line(format_args!("picture   {}", file.display()))?;
    }
    Ok(())
}
