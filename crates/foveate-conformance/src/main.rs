//! `foveate-conformance`: the corpus on what this machine has.
//!
//! ```text
//! foveate-conformance run [--cases FOLDER] [--only TEXT] [--on gpu|cpu|all] [--backend TEXT]
//!                         [--workers N] [--timeout SECONDS] [--subset N]
//! foveate-conformance determinism [--repeats N]
//! foveate-conformance misuse
//! foveate-conformance trespass memcheck|synccheck
//! foveate-conformance libraries
//! ```
//!
//! Cases run in worker processes, one at a time in each. A case that hangs, crashes or leaves the
//! GPU's context broken costs its worker and nothing else: the worker is replaced and the next
//! case starts clean.

mod checks;
mod determinism;
mod libraries;
mod misuse;
mod on_device;
mod trespass;
mod workers;

use std::io::{BufRead, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use foveate_conformance::{
    Backend, Case, Outcome, Report, Row, backends, check_each, gpu_backends, load,
};

type Backends = Vec<Box<dyn Backend>>;

/// What was asked for.
#[derive(Clone, Debug)]
pub struct Options {
    cases: PathBuf,
    only: String,
    on: String,
    backend: String,
    workers: usize,
    timeout: Duration,
    repeats: usize,
    subset: usize,
}

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self {
            cases: "conformance/cases".into(),
            only: String::new(),
            on: "gpu".into(),
            backend: String::new(),
            workers: std::thread::available_parallelism().map_or(4, usize::from).min(12),
            timeout: Duration::from_secs(60),
            repeats: 1000,
            subset: usize::MAX,
        };
        while let Some(name) = args.next() {
            let value = args.next().ok_or_else(|| format!("{name} needs a value"))?;
            let number = || value.parse().map_err(|_| format!("{name} is a number, not {value:?}"));
            match name.as_str() {
                "--cases" => options.cases = value.into(),
                "--only" => options.only = value,
                "--on" if ["gpu", "cpu", "all"].contains(&value.as_str()) => options.on = value,
                "--backend" => options.backend = value,
                "--workers" => options.workers = number()?,
                "--timeout" => options.timeout = Duration::from_secs(number()? as u64),
                "--subset" if number()? == 0 => return Err("--subset 0 runs nothing".into()),
                "--subset" => options.subset = number()?,
                "--repeats" => options.repeats = number()?,
                _ => return Err(format!("{name} {value} is no option; --help lists them")),
            }
        }
        Ok(options)
    }

    /// The cases that were asked for, in the order of the corpus.
    fn load(&self) -> Result<Vec<Case>, String> {
        const REMEDY: &str = "name the folder of cases with --cases; in Foveate's repository it is conformance/cases";
        let mut cases = load(&self.cases).map_err(|e| match self.cases.is_dir() {
            true => e.to_string(),
            false => format!("{e}; {REMEDY}"),
        })?;
        if cases.is_empty() {
            return Err(format!("{} has no cases; {REMEDY}", self.cases.display()));
        }
        cases.retain(|case| case.name.contains(&self.only));
        if cases.is_empty() {
            let (folder, only) = (self.cases.display(), &self.only);
            return Err(format!("no case in {folder} has `{only}` in its name"));
        }
        let step = cases.len().div_ceil(self.subset.max(1)).max(1);
        Ok(cases.into_iter().step_by(step).collect())
    }

    /// What cases run on; the GPU's reason when there is none.
    fn backends(&self) -> Result<(Backends, Option<String>), String> {
        let (gpu, reason) = match self.on.as_str() {
            "cpu" => (Vec::new(), None),
            _ => gpu_backends().map_or_else(|e| (Vec::new(), Some(e)), |gpu| (gpu, None)),
        };
        let cpu = if self.on == "gpu" { Vec::new() } else { backends() };
        let mut all: Vec<_> = cpu.into_iter().chain(gpu).collect();
        let names: Vec<_> = all.iter().map(|b| format!("`{}`", b.name())).collect();
        all.retain(|b| b.name().contains(&self.backend));
        if all.is_empty() && !names.is_empty() {
            let (wanted, names) = (&self.backend, names.join(", "));
            return Err(format!("no backend has `{wanted}` in its name; there are {names}"));
        }
        Ok((all, reason))
    }
}

const HELP: &str = "\
foveate-conformance run [--cases FOLDER] [--only TEXT] [--on gpu|cpu|all] [--backend TEXT]
                        [--workers N] [--timeout SECONDS] [--subset N]
    Runs every case whose name has TEXT in it, or N of them, evenly chosen, on the backends whose
    names have theirs; with --workers 0 in this process.
foveate-conformance determinism [--repeats N]
    Runs deterministic passes again and again and compares every bit; reads and writes past 2^31
    elements.
foveate-conformance misuse
    Asks the GPU what it cannot do, and for each that one clear error says so.
foveate-conformance trespass memcheck|synccheck
    Runs a kernel that this tool of compute-sanitizer must complain of.
foveate-conformance libraries
    Checks products by cuBLASLt against sums in f64, and what goes between ranks by NCCL.";

fn main() -> ExitCode {
    if std::env::args().any(|arg| arg == "--help" || arg == "-h") {
        println!("{HELP}");
        return ExitCode::SUCCESS;
    }
    let mut args = std::env::args().skip(1);
    let command = args.next().unwrap_or_default();
    let done = match command.as_str() {
        "run" => Options::parse(args).and_then(|options| run(&options)),
        "work" => Options::parse(args).and_then(|options| work(&options)),
        "determinism" => Options::parse(args).and_then(|o| match o.repeats {
            0 | 1 => Err(format!("--repeats {}: bits of 2 runs or more are compared", o.repeats)),
            repeats => determinism::run(repeats),
        }),
        "misuse" => nothing_more(args).and_then(|()| misuse::run()),
        "trespass" => {
            let tool = args.next().unwrap_or_default();
            nothing_more(args).and_then(|()| trespass::run(&tool))
        }
        "libraries" => nothing_more(args).and_then(|()| libraries::run()),
        "" => Err("a command is needed; --help lists them".into()),
        _ => Err(format!("{command} is no command; --help lists them")),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(message) => {
            eprintln!("error: {message}");
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
        println!("cuda declined all {} cases: {reason}", cases.len());
    }
    if backends.is_empty() {
        return Ok(true);
    }
    println!("{} cases", cases.len());
    let report = if options.workers == 0 {
        let mut rows = Vec::new();
        for case in &cases {
            answer(case, &backends, |row| rows.push(row));
        }
        Report { rows }
    } else {
        let names: Vec<&str> = backends.iter().map(|b| b.name()).collect();
        workers::run(options, &cases, &names)?
    };
    println!("{report}");
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
