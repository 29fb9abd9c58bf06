//! `foveate-conformance`: the corpus on what this machine has.
//!
//! ```text
//! foveate-conformance run [--cases FOLDER] [--only TEXT] [--on gpu|cpu|all] [--backend TEXT]
//!                         [--workers N] [--timeout SECONDS] [--subset N|cover] [--dtype DTYPE]
//!                         [--waits endless|bounded]
//! foveate-conformance determinism [--repeats N]
//! foveate-conformance misuse
//! foveate-conformance placement
//! foveate-conformance probes [--only TEXT]
//! foveate-conformance host-time
//! foveate-conformance trespass memcheck|synccheck|racecheck|mbarrier
//! foveate-conformance launches
//! foveate-conformance libraries
//! foveate-conformance soak [--seconds N] [--seed N] [--only KIND] [--rounds N] [--foveate FILE]
//! ```
//!
//! Cases run in worker processes, one at a time in each. A case that hangs, crashes or leaves the
//! GPU's context broken costs its worker and nothing else: the worker is replaced and the next
//! case starts clean.

#[macro_use]
mod say;

mod gpu;
mod options;
mod soak;
mod workers;

use std::io::{BufRead, Write};
use std::process::ExitCode;
use std::time::Duration;

use foveate_gpu::Engine;

use foveate_conformance::{Backend, Case, Outcome, Report, Row, check_each};

use crate::gpu::checks::let_tools_tell;
use crate::gpu::{
    determinism, host_time, launches, libraries, misuse, placement, probes, trespass,
};
use crate::options::Options;

/// Time between two lines of progress.
const PROGRESS: Duration = Duration::from_secs(10);

const HELP: &str = "\
foveate-conformance run [--cases FOLDER] [--only TEXT] [--on gpu|cpu|all] [--backend TEXT]
                        [--workers N] [--timeout SECONDS] [--subset N|cover]
                        [--dtype f32|f16|bf16|f8e4m3] [--waits endless|bounded]
    Runs every case whose name has TEXT in it on the backends whose names have theirs; of the cases
    N, evenly chosen, or the smallest that together have every feature of all (cover). Cases in f32
    run in the dtype given. With --workers 0 cases run in this process. With bounded waits Hopper kernels
    that hang end after seconds, and the driver prints in which wait, CTA and thread. Failures of
    workers and how far they are are told on stderr as they come, the table on stdout at the end.
foveate-conformance determinism [--repeats N] [--only TEXT]
    Runs deterministic passes again and again and compares every bit, and the numbers with those of
    sums in any order; reads and writes past 2^31 elements.
foveate-conformance misuse
    Asks the GPU what it cannot do, by every family of kernels, and for each that one clear error says so.
foveate-conformance placement
    Compares the bits of passes whose data lies elsewhere, in device memory, in pages, in a graph, or that run beside
    each other, by every family of kernels.
foveate-conformance probes [--only TEXT]
    Runs a small kernel for each wrapper of PTX that Hopper kernels stand on and compares what it writes with whole
    numbers, and both families of kernels with each other. A kernel that hangs or faults ends the process: --only
    TEXT runs those whose names have TEXT in them.
foveate-conformance host-time
    Measures the host's time for queueing a forward pass.
foveate-conformance trespass memcheck|synccheck|racecheck|mbarrier
    Runs a kernel that this tool of compute-sanitizer must complain of; or one that is right and
    whose warps hand over by an mbarrier.
foveate-conformance launches
    Loads a tile by a tensor map in a cluster whose kernel starts before the one ahead has ended.
foveate-conformance libraries
    Checks products by cuBLASLt against sums in f64, and what goes between ranks by NCCL.
foveate-conformance soak [--seconds N] [--seed N] [--only programs|kills|damage|commands]
                         [--rounds N] [--foveate FILE]
    Looks for faults at random, for 600 seconds unless told otherwise: programs on the CPU against
    the oracle, and, with the binary FILE (`foveate` beside this one), runs that are killed,
    damaged files and wrong command lines. A fault is one line with the seed that replays it.";

fn main() -> ExitCode {
    if std::env::args().any(|arg| arg == "--help" || arg == "-h") {
        say!("{HELP}");
        return ExitCode::SUCCESS;
    }
    let mut args = std::env::args().skip(1);
    let command = args.next().unwrap_or_default();
    let done = match command.as_str() {
        "run" => Options::parse(args).and_then(|options| run(&options)),
        "work" => Options::parse(args).and_then(|options| work(&options)),
        "determinism" => Options::parse(args).and_then(|o| match o.repeats {
            0 | 1 => Err(format!("--repeats {}: bits of 2 runs or more are compared", o.repeats)),
            repeats => determinism::run(repeats, &o.only),
        }),
        "misuse" => nothing_more(args).and_then(|()| misuse::run()),
        "placement" => nothing_more(args).and_then(|()| placement::run()),
        "probes" => Options::parse(args).and_then(|options| probes::run(&options.only)),
        "host-time" => nothing_more(args).and_then(|()| host_time::run()),
        "trespass" => {
            let tool = args.next().unwrap_or_default();
            nothing_more(args).and_then(|()| trespass::run(&tool))
        }
        "launches" => nothing_more(args).and_then(|()| launches::run()),
        "libraries" => nothing_more(args).and_then(|()| libraries::run()),
        "soak" => soak::Options::parse(args).and_then(|options| soak::run(&options)),
        "" => Err("a command is needed; --help lists them".into()),
        _ => Err(format!("{command} is no command; --help lists them")),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(message) => {
            tell!("error: {message}");
            ExitCode::from(2)
        }
    }
}

/// Refuses arguments that a command does not have.
fn nothing_more(mut args: impl Iterator<Item = String>) -> Result<(), String> {
    args.next().map_or(Ok(()), |arg| Err(format!("{arg} is no option; --help lists them")))
}

/// Runs the cases and prints the table; whether none failed.
fn run(options: &Options) -> Result<bool, String> {
    let cases = options.load()?;
    let (backends, reason) = options.backends()?;
    if let Some(reason) = reason {
        say!("cuda declined all {} cases: {reason}", cases.len());
    }
    if backends.is_empty() {
        return Ok(true);
    }
    say!("{} cases", cases.len());
    let report = if options.workers == 0 {
        let mut rows = Vec::new();
        for case in &cases {
            answer(case, &backends, |row| rows.push(row));
        }
        if backends.iter().any(|backend| backend.name().starts_with("cuda"))
            && let Ok(engine) = Engine::get(0)
        {
            let_tools_tell(&engine);
        }
        Report { rows }
    } else {
        let names: Vec<&str> = backends.iter().map(|b| b.name()).collect();
        workers::run(options, &cases, &names)?
    };
    say!("{report}");
    Ok(report.failures().count() == 0)
}

/// Tells how a case went on each backend; a case that cannot be is a failure of all of them.
fn answer(case: &Case, backends: &[Box<dyn Backend>], mut tell: impl FnMut(Row)) {
    if let Err(e) = check_each(case, backends, &mut tell) {
        for backend in backends {
            tell(Row {
                case: case.name.clone(),
                seed: case.seed(),
                backend: backend.name().into(),
                outcome: Outcome::Failed(vec![e.to_string()]),
            });
        }
    }
}

/// A worker: for each line `case backend` of its input it runs that case from that backend on, and
/// prints a row a line. It ends after a row that says that the GPU's context is broken.
fn work(options: &Options) -> Result<bool, String> {
    let cases = options.load()?;
    let (backends, _) = options.backends()?;
    let mut out = std::io::stdout();
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(|e| e.to_string())?;
        let mut numbers = line.split(' ').map(str::parse::<usize>);
        let (Some(Ok(case)), Some(Ok(first))) = (numbers.next(), numbers.next()) else {
            return Err(format!("a worker is told a case and a backend, not {line:?}"));
        };
        answer(&cases[case], &backends[first..], |row| {
            let text = serde_json::to_string(&row).expect("rows are plain data");
            let told = writeln!(out, "{text}").and_then(|()| out.flush());
            if told.is_err() || workers::breaks_context(&row) {
                std::process::exit(1);
            }
        });
    }
    Ok(true)
}
