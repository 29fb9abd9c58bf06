//! `foveate kernels check`: compiles what the planner chooses and compares what it takes with its
//! plan and with the recorded table.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use foveate_cuda::CudaError;
use foveate_cuda::cache::Cache;
use foveate_cuda::check::{ARCHS, Listed, Taken, list};
use foveate_cuda::nvrtc::Compiler;
use serde::Serialize;

use super::table::{Standing, Table};
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::output::Output;

/// Compile every kernel of the planner's list and compare what it takes with the recorded table
#[derive(Debug, clap::Args)]
pub struct Args {
    /// An architecture, such as sm_90 (all that are listed when left out)
    #[arg(long, value_name = "ARCH")]
    arch: Vec<String>,
    /// A sample of the list
    #[arg(long)]
    few: bool,
    /// Only kernels whose name has this in it, such as "backward bf16"
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Record what was found
    #[arg(long, value_name = "FILE", num_args = 0..=1,
        default_missing_value = "conformance/kernel-resources.toml")]
    update: Option<PathBuf>,
    /// Compile on so many threads (as many as there are cores when left out)
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Print one JSON object for each kernel
    #[arg(long)]
    json: bool,
}

/// What came of one kernel.
#[derive(Serialize)]
struct Line<'a> {
    arch: &'a str,
    kernel: String,
    tiles: String,
    seconds: f64,
    #[serde(flatten)]
    taken: Option<Taken>,
    standing: Option<Standing>,
    error: Option<String>,
}

/// Compiles, prints a line for each kernel, and fails when one does not hold.
pub fn run(args: &Args, out: &mut Output) -> Result<(), Failure> {
    let cuda = |e: CudaError| Failure::new(e.to_string());
    let archs: Vec<String> = match args.arch.is_empty() {
        true => ARCHS.iter().map(|(arch, _)| (*arch).to_owned()).collect(),
        false => args.arch.clone(),
    };
    let mut kernels: Vec<Listed> = Vec::new();
    for arch in &archs {
        kernels.extend(list(arch, args.few).map_err(|e| Failure::usage(e.to_string()))?);
    }
    if let Some(text) = &args.filter {
        kernels.retain(|k| k.name().contains(text.as_str()));
    }
    if kernels.is_empty() {
        return Err(Failure::usage("no kernel that is listed has this in its name"));
    }
    let compiler = Compiler::get().map_err(cuda)?;
    let mut table = Table::recorded()?;
    let interrupt = Interrupt::watch()?;
    let mut progress = Progress::new(kernels.len());
    let mut done = Vec::new();
    let (mut changed, mut worse, mut failed) = (0, 0, 0);
    each(&kernels, compiler, args.threads, |kernel, result, took| {
        interrupt.check()?;
        progress.one();
        let taken = result.as_ref().ok().copied();
        let standing = taken.map(|t| table.standing(kernel, &t));
        changed += usize::from(matches!(standing, Some(Standing::Changed | Standing::New)));
        worse += usize::from(standing == Some(Standing::Worse));
        failed += usize::from(standing.is_none());
        done.extend(taken.map(|t| (kernel, t)));
        let line = Line {
            arch: &kernel.arch,
            kernel: kernel.name(),
            tiles: kernel.tiles(),
            seconds: took.as_secs_f64(),
            taken,
            standing,
            error: result.err().map(|e| e.to_string()),
        };
        if args.json { Ok(out.json(&line)?) } else { line.print(out) }
    })?;
    if !args.json {
        out.line(format_args!(
            "{} kernels in {:.0} s with NVRTC {}.{}: {changed} new or changed, {worse} worse, \
             {failed} failed",
            kernels.len(),
            progress.began.elapsed().as_secs_f64(),
            compiler.version().0,
            compiler.version().1
        ))?;
    }
    if let Some(path) = &args.update {
        if !args.few && args.filter.is_none() {
            archs.iter().for_each(|arch| table.forget(arch));
        }
        done.into_iter().for_each(|(kernel, taken)| table.record(kernel, taken));
        table.write(path)?;
        worse = 0;
    }
    match worse + failed {
        0 => Ok(()),
        n => Err(Failure::new(format!(
            "{n} kernels do not compile, or take more than was planned or recorded"
        ))
        .help("the lines above say which; --update records what is meant to be so")),
    }
}

/// Compiles on several threads and calls `then` here, in the order they finish.
fn each<'a>(
    kernels: &'a [Listed],
    compiler: &Compiler,
    threads: Option<usize>,
    mut then: impl FnMut(&'a Listed, Result<Taken, CudaError>, Duration) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let cores = thread::available_parallelism().map_or(1, |n| n.get());
    let threads = threads.unwrap_or(cores).clamp(1, kernels.len());
    let next = AtomicUsize::new(0);
    let cache = Cache::get();
    thread::scope(|scope| {
        let (send, receive) = mpsc::channel();
        for _ in 0..threads {
            let (send, next) = (send.clone(), &next);
            scope.spawn(move || {
                while let Some(kernel) = kernels.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let began = Instant::now();
                    let result = kernel.check(compiler, cache);
                    cache.forget();
                    // Nobody listens any more: the command has failed and waits for the threads.
                    if send.send((kernel, result, began.elapsed())).is_err() {
                        break;
                    }
                }
            });
        }
        drop(send);
        receive.into_iter().try_for_each(|(kernel, result, took)| then(kernel, result, took))
    })
}

/// Says on standard error how far the command is, where it takes longer than one waits unasked.
struct Progress {
    all: usize,
    done: usize,
    began: Instant,
    said: Instant,
}

impl Progress {
    const EVERY: Duration = Duration::from_secs(20);

    fn new(all: usize) -> Self {
        let now = Instant::now();
        Self { all, done: 0, began: now, said: now }
    }

    /// Counts a kernel.
    fn one(&mut self) {
        self.done += 1;
        if self.said.elapsed() >= Self::EVERY && self.done < self.all {
            self.said = Instant::now();
            let each = self.began.elapsed() / self.done as u32;
            let left = each * (self.all - self.done) as u32;
            let Self { all, done, .. } = self;
            eprintln!("{done} of {all} kernels, {:.0} s left", left.as_secs_f64());
        }
    }
}

impl Line<'_> {
    fn print(&self, out: &mut Output) -> Result<(), Failure> {
        let Self { arch, kernel, tiles, seconds, .. } = self;
        let head = format!("{arch:<6} {kernel:<44} {tiles:<32} {seconds:>5.1} s");
        let line = match (&self.taken, &self.standing, &self.error) {
            (Some(t), Some(standing), _) => format!(
                "{head} {:>6} B shared, {:>3} registers, {:>3} B local  {standing}",
                t.shared_bytes, t.registers, t.local_bytes
            ),
            (_, _, error) => format!("{head}  {}", error.as_deref().unwrap_or_default()),
        };
        out.line(line)?;
        Ok(out.flush()?)
    }
}
