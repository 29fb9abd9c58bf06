//! `foveate bench cpu` (and [`gpu`]): how fast attention runs here, beside the same products unfused.
//!
//! A case is run warm a number of times and its median is reported. The rate counts the
//! operations on pairs of a query and a key that the mask lets through, so a mask never makes it
//! look better than it is. The peer is what one writes without fusion: the whole score matrix by
//! `gemm`, masked, softmaxed, multiplied by `gemm`; its passes alternate with ours in one run.

mod cases;
mod gpu;
mod peer;

use std::time::Instant;

use clap::{Args as ClapArgs, Subcommand};
use serde::Serialize;

use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::output::Output;
use cases::{Case, Pass, Prepared};

/// Measure attention on this machine, beside the same products unfused
#[derive(Debug, ClapArgs)]
pub struct Args {
    #[command(subcommand)]
    on: On,
}

#[derive(Debug, Subcommand)]
enum On {
    /// On the processor
    Cpu(CpuArgs),
    /// On an NVIDIA GPU, beside PyTorch's attention
    Gpu(gpu::Args),
}

#[derive(Debug, ClapArgs)]
struct CpuArgs {
    /// Run the cases whose name contains this only
    #[arg(long, value_name = "TEXT", default_value = "")]
    filter: String,
    /// Runs of each case, of which the median is reported
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    /// Leave the unfused peer out
    #[arg(long)]
    no_peer: bool,
    /// Print one JSON object a case
    #[arg(long)]
    json: bool,
}

/// What a case took.
#[derive(Debug, Serialize)]
struct Outcome {
    case: String,
    ms: f64,
    tflops: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    peer: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    peer_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio: Option<f64>,
}

/// Runs the grid and prints a line a case as it ends.
pub fn run(args: &Args, out: &mut Output) -> Result<(), Failure> {
    let args = match &args.on {
        On::Cpu(args) => args,
        On::Gpu(args) => return gpu::run(args, out),
    };
    let cases: Vec<Case> =
        cases::grid().into_iter().filter(|c| c.name().contains(&args.filter)).collect();
    if cases.is_empty() {
        let names: Vec<_> = cases::grid().iter().map(Case::name).collect();
        let message = format!("no case has `{}` in its name", args.filter);
        return Err(Failure::usage(message).help(format!("the cases are {}", names.join(", "))));
    }
    if !args.json {
        let head = format!("{:<44} {:>10} {:>10}", "case", "ms", "TFLOP/s");
        let peer = if args.no_peer { "" } else { "   unfused ms    ratio" };
        out.line(head + peer)?;
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
        out.line(line)?;
        out.flush()?;
    }
    Ok(())
}

fn measure(case: &Case, args: &CpuArgs) -> Result<Outcome, Failure> {
    let mut prepared = Prepared::new(case)?;
    let mut peer = (!args.no_peer).then(|| peer::Peer::new(&prepared));
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    // The first run of each is warm-up.
    for run in 0..=args.repeat {
        let began = Instant::now();
        match case.pass {
            Pass::Forward => prepared.forward()?,
            Pass::Backward => prepared.backward()?,
        }
        let took = began.elapsed().as_secs_f64() * 1e3;
        let peer_took = peer.as_mut().map(|peer| {
            let began = Instant::now();
            match case.pass {
                Pass::Forward => peer.forward(),
                Pass::Backward => peer.backward(),
            }
            began.elapsed().as_secs_f64() * 1e3
        });
        if run > 0 {
            ours.push(took);
            theirs.extend(peer_took);
        }
    }
    let ms = median(ours);
    let peer_ms = peer.is_some().then(|| median(theirs));
    Ok(Outcome {
        case: case.name(),
        ms,
        tflops: prepared.live_flops() / ms / 1e9,
        peer: peer.is_some().then_some("unfused gemm"),
        peer_ms,
        ratio: peer_ms.map(|theirs| theirs / ms),
    })
}

fn median(mut ms: Vec<f64>) -> f64 {
    ms.sort_by(f64::total_cmp);
    ms[ms.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fused_and_unfused_attention_agree_on_every_mask_of_the_grid() {
        for (i, case) in cases::small().iter().enumerate() {
            let mut prepared = Prepared::new(case).expect("the case is planned");
            let mut peer = peer::Peer::new(&prepared);
            prepared.forward().expect("it runs");
            peer.forward();
            close(&prepared.out(), peer.out(), &format!("case {i}, out"));
            prepared.backward().expect("it runs");
            peer.backward();
            for (name, ours, theirs) in prepared
                .gradients()
                .into_iter()
                .zip(peer.gradients())
                .map(|((name, ours), theirs)| (name, ours, theirs))
            {
                close(&ours, theirs, &format!("case {i}, {name}"));
            }
        }
    }

    fn close(ours: &[f32], theirs: &[f32], what: &str) {
        assert_eq!(ours.len(), theirs.len(), "{what}");
        for (i, (a, b)) in ours.iter().zip(theirs).enumerate() {
            assert!((a - b).abs() <= 1e-4 * (1.0 + b.abs()), "{what}[{i}]: {a} and {b}");
        }
    }

    #[test]
    fn the_median_of_an_odd_number_of_runs_is_the_middle_one() {
        assert_eq!(median(vec![5.0, 1.0, 3.0]), 3.0);
    }
}
