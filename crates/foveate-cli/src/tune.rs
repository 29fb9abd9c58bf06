//! `foveate tune`: finds the fastest kernels for a problem on the GPU that is there.

use foveate::cuda::choose::{self, CANDIDATES, Tuned, Tuning};
use foveate::cuda::{CudaError, CudaOptions, CudaPlan, Engine};

use crate::blind;
use crate::explain::ordinal;
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::number::number;
use crate::output::Output;
use crate::problem::ProblemArgs;
use crate::progress::Progress;

/// Time the best candidates for each GPU kernel of a problem, and record the fastest for plans to
/// come
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    problem: ProblemArgs,
    /// The GPU
    #[arg(long, value_name = "cuda:N", default_value = "cuda:0")]
    device: String,
    /// Tune the kernels that give the same bits in every run
    #[arg(long)]
    deterministic: bool,
    /// Tune for N live keys a query on average, whatever --mask says
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = number::<usize>)]
    mean_kv_len: Option<usize>,
    /// Candidates to time for each kernel
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = CANDIDATES as u32, value_parser = clap::value_parser!(u32).range(1..))]
    candidates: u32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Tunes and prints what was found for each kernel.
pub fn run(args: &Args, out: &mut Output) -> Result<(), Failure> {
    let given = args.problem.read()?;
    blind::check(&given);
    let device = ordinal(&args.device)?.ok_or_else(|| {
        Failure::usage(format!("--device {}: only a GPU that is there can be tuned", args.device))
            .help("cuda:0 is the first")
    })?;
    let engine = Engine::get(device)?;
    let Args { deterministic, mean_kv_len, .. } = *args;
    let options = CudaOptions { deterministic, mean_kv_len, ..CudaOptions::default() };
    let dims = given.problem.dims();
    let plan = CudaPlan::new(engine, &given.spec, dims, args.problem.dtype, options)?;
    let interrupt = Interrupt::watch()?;
    let arrangement = given.problem.arrangement();
    let tuning = watched(&interrupt, |tell| {
        plan.tune(arrangement, args.problem.backward, args.candidates as usize, tell)
    })?;
    if args.json {
        out.json(&tuning)?;
    } else {
        print(&tuning, out)?;
    }
    match &tuning.trouble {
        None => Ok(()),
        Some(trouble) => Err(Failure::new(format!("records cannot be kept: {trouble}"))
            .help("set FOVEATE_CACHE_DIR to a folder that can be written")),
    }
}

/// Tunes with progress shown on stderr, until Ctrl-C.
pub fn watched(
    interrupt: &Interrupt,
    tune: impl FnOnce(&mut dyn FnMut(&choose::Progress) -> bool) -> Result<Tuning, CudaError>,
) -> Result<Tuning, Failure> {
    let mut shown = Progress::at_most();
    let tuning = tune(&mut |at| {
        let last = at.us.map_or(String::new(), |us| format!("  {us:.1} us"));
        shown.at(at.done, at.of, &format!("{} {}{last}", at.doing, at.kernel));
        !interrupt.pressed()
    });
    Ok(tuning?)
}

fn print(tuning: &Tuning, out: &mut Output) -> Result<(), Failure> {
    for Tuned { kernel, planned, planned_us, best, timed, skipped } in &tuning.kernels {
        out.line(kernel)?;
        for (tiles, us) in timed {
            let chosen = best.is_some_and(|(best, _)| best == *tiles);
            let mark = match (chosen, tiles == planned) {
                (true, true) => "  the planner's choice, and recorded",
                (true, false) => "  recorded",
                (false, true) => "  the planner's choice",
                (false, false) => "",
            };
            out.line(format!("  {tiles:<34} {us:>10.1} us{mark}").trim_end())?;
        }
        for (tiles, why) in skipped {
            out.line(format_args!("  {tiles:<34}    skipped: {why}"))?;
        }
        match (best, planned_us) {
            (Some((_, us)), Some(planned)) => {
                let faster = 100.0 * (planned / us - 1.0);
                out.line(format_args!(
                    "  a pass is {faster:.1} % faster than with the planner's choice"
                ))?;
            }
            (Some(_), None) => out.line("  the planner's choice could not run")?,
            (None, _) => out.line("  nothing could run, nothing was recorded")?,
        }
    }
    if let (Some(folder), None) = (&tuning.folder, &tuning.trouble) {
        out.line(format_args!("recorded in {}", folder.display()))?;
    }
    Ok(())
}
