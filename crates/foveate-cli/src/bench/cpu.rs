//! `foveate bench cpu`: how fast attention runs on the processor.
//!
//! On its own it is measured beside what one writes without fusion: the whole score matrix by
//! `gemm`, masked, softmaxed, multiplied by `gemm`; the two alternate in one run. A script that
//! alternates it with another implementation drives this command with `--serve`.

mod cases;
mod prepared;
mod serve;
mod unfused;

use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use foveate::cpu::Stages;
use serde::Serialize;

use super::workload::Workload;
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::output::Output;
use prepared::Prepared;
use unfused::Unfused;

#[derive(Debug, ClapArgs)]
pub struct Args {
    /// Run the cases whose name contains this only, those of the comparison with PyTorch, too
    #[arg(long, value_name = "TEXT", default_value = "")]
    filter: String,
    /// Runs of each case, of which the median is reported
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    /// Show where the time goes, as shares of the time of all threads, instead of the peer
    #[arg(long)]
    profile: bool,
    /// Leave the unfused peer out, as it is where there are not as many queries as keys or its
    /// score matrices exceed 2 GiB
    #[arg(long)]
    no_peer: bool,
    /// Threads to run on (all that the machine has when left out)
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
    /// Print the cases of the comparison with PyTorch and run nothing
    #[arg(long)]
    list: bool,
    /// Run the cases that standard input asks for, one JSON request a line
    #[arg(long, conflicts_with_all = ["list", "filter", "repeat", "profile", "no_peer"])]
    serve: bool,
    /// Print one JSON object a case
    #[arg(long)]
    json: bool,
}

impl Args {
    /// Threads to run on, where a number was given.
    pub fn threads(&self) -> Option<usize> {
        self.threads.map(|n| n as usize)
    }
}

/// A case of the comparison with PyTorch.
#[derive(Debug, Serialize)]
struct ListedCase<'a> {
    case: String,
    #[serde(flatten)]
    work: &'a Workload,
    /// Operations on the pairs that the mask lets through.
    flops: f64,
}

/// What a case took.
#[derive(Debug, Serialize)]
struct CpuTiming {
    case: String,
    ms: f64,
    min_ms: f64,
    tflops: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    peer: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    peer_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    profile: Option<Shares>,
}

/// Shares of the time of all threads.
#[derive(Debug, Serialize)]
struct Shares {
    products: f64,
    softmax: f64,
    mods: f64,
    packing: f64,
    idle: f64,
}

impl Shares {
    fn of(stages: &Stages) -> Self {
        let share = |of: Duration| of.as_secs_f64() / stages.total.as_secs_f64();
        Self {
            products: share(stages.products),
            softmax: share(stages.softmax),
            mods: share(stages.mods),
            packing: share(stages.packing),
            idle: share(stages.idle()),
        }
    }
}

/// Runs the grid and prints a line a case as it ends.
pub fn run(args: &Args, out: &mut Output) -> Result<(), Failure> {
    if args.serve {
        return serve::serve(std::io::stdin().lock(), out);
    }
    let grid = match (args.list, args.filter.is_empty()) {
        (true, _) => cases::comparison(),
        (false, true) => cases::everyday(),
        (false, false) => cases::every(),
    };
    let (cases, others): (Vec<_>, Vec<_>) =
        grid.into_iter().partition(|c| c.name().contains(&args.filter));
    if cases.is_empty() {
        let message = format!("no case has `{}` in its name", args.filter);
        let example = others.first().map(Workload::name).unwrap_or_default();
        let help = format!("names are like {example}; `foveate bench cpu --list` prints them");
        return Err(Failure::usage(message).help(help));
    }
    if args.list {
        return list(&cases, args.json, out);
    }
    if !args.json {
        let head = format!("{:<44} {:>10} {:>10}", "case", "ms", "TFLOP/s");
        let more = match (args.profile, args.no_peer) {
            (true, _) => "  products  softmax     mods  packing     idle",
            (false, true) => "",
            (false, false) => "   unfused ms    ratio",
        };
        out.line(head + more)?;
    }
    let interrupt = Interrupt::watch()?;
    for case in &cases {
        interrupt.check()?;
        let outcome = measure(case, args)?;
        if args.json {
            out.json(&outcome)?;
            continue;
        }
        let mut line =
            format!("{:<44} {:>10.3} {:>10.4}", outcome.case, outcome.ms, outcome.tflops);
        if let (Some(ms), Some(ratio)) = (outcome.peer_ms, outcome.ratio) {
            line += &format!(" {ms:>12.3} {ratio:>7.2}x");
        }
        if let Some(Shares { products, softmax, mods, packing, idle }) = outcome.profile {
            line += &format!(" {:>7.1} %", 100.0 * products);
            for share in [softmax, mods, packing, idle] {
                line += &format!(" {:>6.1} %", 100.0 * share);
            }
        }
        out.line(line)?;
        out.flush()?;
    }
    Ok(())
}

fn list(cases: &[Workload], json: bool, out: &mut Output) -> Result<(), Failure> {
    for work in cases {
        let case = work.name();
        if json {
            out.json(&ListedCase { case, work, flops: work.flops() })?;
        } else {
            out.line(case)?;
        }
    }
    Ok(())
}

fn measure(case: &Workload, args: &Args) -> Result<CpuTiming, Failure> {
    let mut prepared = Prepared::new(case)?;
    let peer = !args.no_peer && !args.profile && Unfused::takes(case);
    let mut unfused = peer.then(|| Unfused::new(&prepared));
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    // The first run of each is warm-up.
    for run in 0..=args.repeat {
        let (took, ran) = timed(|| prepared.run());
        ran?;
        let peer_took = unfused.as_mut().map(|u| timed(|| u.run()).0);
        if run > 0 {
            ours.push(took);
            theirs.extend(peer_took);
        }
    }
    let stages = args.profile.then(|| prepared.profile(args.repeat)).transpose()?;
    ours.sort_by(f64::total_cmp);
    theirs.sort_by(f64::total_cmp);
    let (median, peer_ms) = (ours[ours.len() / 2], theirs.get(theirs.len() / 2).copied());
    Ok(CpuTiming {
        case: case.name(),
        ms: median,
        min_ms: ours[0],
        tflops: case.flops() / median / 1e9,
        peer: peer_ms.map(|_| "unfused gemm"),
        peer_ms,
        ratio: peer_ms.map(|theirs| theirs / median),
        profile: stages.as_ref().map(Shares::of),
    })
}

/// Milliseconds that `work` takes, and what it gives.
fn timed<T>(work: impl FnOnce() -> T) -> (f64, T) {
    let began = Instant::now();
    let given = work();
    (began.elapsed().as_secs_f64() * 1e3, given)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::workload::Direction;

    #[test]
    fn fused_and_unfused_attention_agree_on_every_mask_and_score() {
        for case in cases::small() {
            for pass in [Direction::Forward, Direction::Backward, Direction::Both] {
                let case = Workload { pass, ..case.clone() };
                let mut prepared = Prepared::new(&case).expect("the case is planned");
                let mut unfused = Unfused::new(&prepared);
                prepared.run().expect("it runs");
                unfused.run();
                let (ours, theirs) = (prepared.results(), unfused.results());
                assert_eq!(ours.len(), theirs.len());
                for ((name, ours), (same, theirs)) in ours.iter().zip(theirs) {
                    assert_eq!(*name, same);
                    close(ours, theirs, &format!("{}, {name}", case.name()));
                }
            }
        }
    }

    fn close(ours: &[f32], theirs: &[f32], what: &str) {
        assert_eq!(ours.len(), theirs.len(), "{what}");
        for (i, (a, b)) in ours.iter().zip(theirs).enumerate() {
            assert!((a - b).abs() <= 1e-4 * (1.0 + b.abs()), "{what}[{i}]: {a} and {b}");
        }
    }
}
