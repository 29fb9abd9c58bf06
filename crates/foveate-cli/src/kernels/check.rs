//! `foveate kernels check`: compiles what the planner chooses, and the kernels between a model's
//! products, and compares what they take with their plans and with the recorded table.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use foveate_cuda::CudaError;
use foveate_cuda::compile::check::Taken;
use foveate_gpu::Arch;
use foveate_gpu::cache::Cache;
use foveate_gpu::nvrtc::Compiler;
use serde::Serialize;

use super::blocks;
use super::list::{self, ARCHS, Checked, Cta, Listed};
use super::table::{Standing, Table, rows};
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::number::number;
use crate::output::Output;
use crate::progress::Progress;

/// Compile every kernel of attention that the planner lists, and those between a model's products,
/// and compare what they take with the recorded table
#[derive(Debug, clap::Args)]
pub struct Args {
    /// An architecture, such as sm_90 (all that are listed when left out)
    #[arg(long, value_name = "ARCH")]
    arch: Vec<Arch>,
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
    #[arg(long, value_name = "N", value_parser = number::<usize>)]
    threads: Option<usize>,
    /// Print one JSON object for each entry point of a kernel
    #[arg(long)]
    json: bool,
}

/// What came of one entry point of a kernel's file, or of a kernel that does not compile.
#[derive(Serialize)]
struct Line {
    /// What it is compiled for.
    arch: Arch,
    kernel: String,
    tiles: String,
    seconds: f64,
    #[serde(flatten)]
    taken: Option<Taken>,
    standing: Option<Standing>,
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
    error: Option<String>,
}

/// Entry points by what came of them.
#[derive(Default)]
struct Count {
    changed: usize,
    worse: usize,
    failed: usize,
    /// Kernels that run with other tiles than the planner chose.
    fallbacks: usize,
}

/// Compiles, prints a line for each entry point, and fails when one does not hold.
pub fn run(args: &Args, out: &mut Output) -> Result<(), Failure> {
    let archs: Vec<Arch> = match args.arch.is_empty() {
        true => ARCHS.iter().map(|(arch, _)| *arch).collect(),
        false => args.arch.clone(),
    };
    let kernels = wanted(args, &archs)?;
    let compiler = Compiler::get().map_err(|e| Failure::new(e.to_string()))?;
    let mut table = Table::recorded()?;
    let interrupt = Interrupt::watch()?;
    let mut progress = Progress::new(kernels.len());
    let mut done = Vec::new();
    let mut count = Count::default();
    each(&kernels, compiler, args.threads, |kernel, result, took| {
        interrupt.check()?;
        let lines = lines(kernel, &result, took, &table);
        lines.iter().for_each(|line| count.add(line));
        done.extend(result.ok().map(|found| (kernel, found)));
        progress.step(&kernel.name(), || {
            lines.iter().try_for_each(|line| match args.json {
                true => Ok(out.json(line)?),
                false => line.print(out),
            })
        })
    })?;
    if !args.json {
        let Count { changed, worse, failed, fallbacks } = count;
        out.line(format_args!(
            "{} kernels in {:.0} s with NVRTC {}.{}: {changed} new or changed, {worse} worse, \
             {failed} failed; {fallbacks} run with other tiles than the planner chose",
            kernels.len(),
            progress.elapsed().as_secs_f64(),
            compiler.version().0,
            compiler.version().1
        ))?;
    }
    if let Some(path) = &args.update {
        if !args.few && args.filter.is_none() && count.failed == 0 {
            archs.iter().for_each(|&arch| table.remove(arch));
        }
        done.iter().for_each(|(kernel, found)| table.record(*kernel, found));
        table.write(path)?;
        count.worse = 0;
    }
    match count.worse + count.failed {
        0 => Ok(()),
        n => Err(Failure::new(format!(
            "{n} kernels do not compile, take more than was planned or recorded, or run in place of \
             the planner's choice without being recorded so"
        ))
        .help("the lines above say which; --update records what is meant to be so")),
    }
}

/// The kernels that were asked for.
fn wanted(args: &Args, archs: &[Arch]) -> Result<Vec<Box<dyn Listed>>, Failure> {
    let mut kernels: Vec<Box<dyn Listed>> = Vec::new();
    for &arch in archs {
        let attention = list::list(arch, args.few).map_err(|e| Failure::usage(e.to_string()))?;
        kernels.extend(attention.into_iter().map(|kernel| -> Box<dyn Listed> { Box::new(kernel) }));
        let blocks = blocks::list(arch, args.few).into_iter();
        kernels.extend(blocks.map(|block| -> Box<dyn Listed> { Box::new(block) }));
    }
    if let Some(text) = &args.filter {
        kernels.retain(|k| k.name().contains(text.as_str()));
    }
    match kernels.is_empty() {
        true => Err(Failure::usage("no kernel that is listed has this in its name")),
        false => Ok(kernels),
    }
}

/// What there is to say of a kernel.
fn lines(
    kernel: &dyn Listed,
    result: &Result<Checked, CudaError>,
    took: Duration,
    table: &Table,
) -> Vec<Line> {
    let line = |name, cta: Cta| Line {
        arch: if cta.hopper.is_empty() { kernel.arch() } else { kernel.arch().specific() },
        kernel: name,
        tiles: cta.words,
        seconds: took.as_secs_f64(),
        taken: None,
        standing: None,
        note: None,
        error: None,
    };
    let found = match result {
        Ok(found) => found,
        Err(e) => {
            return vec![Line { error: Some(e.to_string()), ..line(kernel.name(), kernel.cta()) }];
        }
    };
    let of_entry = |(name, taken): (String, Taken)| {
        let standing = Some(table.standing(kernel.arch(), &name, found, &taken));
        Line { taken: Some(taken), standing, ..line(name, found.cta.clone()) }
    };
    let mut lines: Vec<_> = rows(kernel, found).map(of_entry).collect();
    lines[0].note = found.note.clone();
    lines
}

impl Count {
    fn add(&mut self, line: &Line) {
        self.fallbacks += usize::from(line.note.is_some());
        match line.standing {
            None => self.failed += 1,
            Some(Standing::Worse) => self.worse += 1,
            Some(Standing::Changed | Standing::New) => self.changed += 1,
            Some(Standing::Recorded) => {}
        }
    }
}

/// Compiles on several threads and calls `then` here, in the order they finish.
fn each<'a>(
    kernels: &'a [Box<dyn Listed>],
    compiler: &Compiler,
    threads: Option<usize>,
    mut then: impl FnMut(&'a dyn Listed, Result<Checked, CudaError>, Duration) -> Result<(), Failure>,
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
                    if send.send((kernel.as_ref(), result, began.elapsed())).is_err() {
                        break;
                    }
                }
            });
        }
        drop(send);
        receive.into_iter().try_for_each(|(kernel, result, took)| then(kernel, result, took))
    })
}

impl Line {
    fn print(&self, out: &mut Output) -> Result<(), Failure> {
        let Self { arch, kernel, tiles, seconds, .. } = self;
        let arch = arch.to_string();
        let head = format!("{arch:<6} {kernel:<44} {tiles:<32} {seconds:>5.1} s");
        let line = match (&self.taken, &self.standing, &self.error) {
            (Some(t), Some(standing), _) => format!(
                "{head} {:>6} B shared, {:>3} registers, {:>3} B local  {standing}",
                t.shared_bytes, t.registers, t.local_bytes
            ),
            (_, _, error) => format!("{head}  {}", error.as_deref().unwrap_or_default()),
        };
        out.line(line)?;
        if let Some(note) = &self.note {
            out.line(format_args!("       {note}"))?;
        }
        Ok(out.flush()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foveate_gpu::nvrtc::{Advisory, Compiled};
    use std::sync::Arc;

    #[test]
    fn a_default_forward_that_the_assembler_serialises_fails_the_check() {
        let compiler = match Compiler::get() {
            Ok(compiler) => compiler,
            Err(e) => return println!("skipped: {e}"),
        };
        let all = list::list(Arch::new((9, 0)), true).unwrap();
        let kernel = all.iter().find(|l| l.name() == "forward bf16 D 128, plain").unwrap();
        let table = Table::recorded().unwrap();
        let standing = |planted: bool| {
            let result = kernel.compiled_by(|text, arch| {
                let compiled = Cache::at(None).compile(compiler, text, arch)?;
                let mut advisories = compiled.advisories.clone();
                if planted && text.contains("#define FV_OVERLAP 1\n") {
                    let text = "wgmma.mma_async instructions are serialized".to_owned();
                    advisories.push(Advisory { code: 7510, function: None, text });
                }
                Ok(Arc::new(Compiled { advisories, ..Compiled::clone(&compiled) }))
            });
            let lines = lines(kernel, &result, Duration::ZERO, &table);
            let mut count = Count::default();
            lines.iter().for_each(|line| count.add(line));
            (count.worse, lines[0].tiles.clone(), lines[0].note.clone().unwrap_or_default())
        };
        let (worse, tiles, note) = standing(false);
        assert_eq!((worse, note.as_str()), (0, ""));
        let (worse, waiting, note) = standing(true);
        assert_eq!((worse, format!("{waiting}, overlap")), (1, tiles));
        assert!(note.contains("wgmma serialised (C7510, a call); "), "{note}");
    }
}
