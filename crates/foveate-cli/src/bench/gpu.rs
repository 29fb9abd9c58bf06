//! `foveate bench gpu`: how fast attention runs on a GPU, beside what PyTorch makes of it.
//!
//! A case is run warm between device events, the host ahead, until its time is spent, and its median is reported;
//! the rate counts the operations on pairs that the mask lets through. Clock and power of the GPU
//! while it runs stand beside it, where NVML tells them. The peers are timed by
//! `benches/gpu_peers.py` on the same cases and the same data; its report is joined here, and
//! results that differ are said to.

mod cases;
mod chart;
mod floor;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use foveate::cuda::Engine;
use foveate::cuda::choose::{KernelOptions, Tuned};
use foveate::gpu::nvml::{Conditions, Watch};
use foveate::{DType, ScaleBlocks, gpu};
use foveate_train::whole;
use serde::{Deserialize, Serialize};

use crate::explain::kernel_options;
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::number::{number, seconds};
use crate::output::Output;
use crate::tune;
use cases::{Case, Prepared};
use floor::{Floor, Limit};

/// How many elements of a result are compared with a peer's.
const SAMPLES: usize = 16;
/// Runs that are timed without a pause.
const AT_ONCE: usize = 5;

#[derive(Debug, ClapArgs)]
pub struct Args {
    /// Run the cases whose name contains one of these only
    #[arg(long, value_name = "TEXT", value_delimiter = ',')]
    filter: Vec<String>,
    /// Which GPU
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = number::<usize>)]
    device: usize,
    /// Timing of one case in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 0.3, allow_negative_numbers = true, value_parser = seconds)]
    seconds: f64,
    /// Tune the kernels of each case first, and record what is found, as `foveate tune` does
    #[arg(long, conflicts_with = "list")]
    tune: bool,
    /// Use a kernel option of your own, such as forward.family=portable
    #[arg(long, value_name = "KEY=VALUE", conflicts_with = "tune")]
    kernel: Vec<String>,
    /// Dtype of q, k and v: bf16, or f8e4m3 for the forwards
    #[arg(long, default_value = "bf16", value_parser = dtype)]
    dtype: DType,
    /// Scales of f8e4m3 operands: one for each head, or for so many rows
    #[arg(long, value_name = "head|ROWS", value_parser = scale_blocks)]
    scales: Option<ScaleBlocks>,
    /// Make every sum in a fixed order
    #[arg(long)]
    deterministic: bool,
    /// What benches/gpu_peers.py printed for these cases
    #[arg(long, value_name = "FILE")]
    peers: Option<PathBuf>,
    /// Draw the rates
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print the cases and run nothing
    #[arg(long)]
    list: bool,
    /// Print one JSON object a case and peer
    #[arg(long)]
    json: bool,
}

/// A line of the report of `benches/gpu_peers.py`.
#[derive(Debug, Deserialize)]
struct Peer {
    case: String,
    peer: String,
    ms: Option<f64>,
    #[serde(default)]
    sample: Vec<f32>,
    declined: Option<String>,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct GpuTiming<'a> {
    case: &'a str,
    ms: f64,
    min_ms: f64,
    runs: usize,
    tflops: f64,
    /// Of a case with a mask: the least time that it takes, what limits it, and that time over ours.
    #[serde(skip_serializing_if = "Option::is_none")]
    floor_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    floor_limit: Option<Limit>,
    #[serde(skip_serializing_if = "Option::is_none")]
    of_floor: Option<f64>,
    /// What the floor was made of, in the same run: the rate without a mask, and that of a copy.
    #[serde(skip_serializing_if = "Option::is_none")]
    full_tflops: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    copy_gbs: Option<f64>,
    #[serde(flatten)]
    conditions: Option<&'a Conditions>,
    #[serde(skip_serializing_if = "Option::is_none")]
    peer: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    peer_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    peer_tflops: Option<f64>,
    /// The peer's time over ours.
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio: Option<f64>,
    /// Largest difference of the sampled elements, over the largest of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    difference: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    declined: Option<&'a str>,
}

/// Runs the grid and prints a line a case as it ends.
pub fn run(args: &Args, out: &mut Output) -> Result<(), Failure> {
    let cases = wanted(&args.filter, args.dtype, args.scales)?;
    if args.list {
        return list(&cases, args.json, out);
    }
    let kernels = kernel_options(&args.kernel)?;
    Engine::get(args.device)?;
    let peers = args.peers.as_deref().map(read_peers).transpose()?.unwrap_or_default();
    let names = peer_names(&peers);
    if !args.json {
        let heads: String = names.iter().map(|n| format!(" {n:>13} {:>6}", "ratio")).collect();
        out.line(format!(
            "{:<44} {:>9} {:>8} {:>14} {:>15}{heads}",
            "case", "ms", "TFLOP/s", "of its floor", "clock, power"
        ))?;
    }
    let interrupt = Interrupt::watch()?;
    let mut bars = Vec::new();
    let (mut floors, mut lowered) = (Floors::default(), BTreeSet::new());
    let watched = watched(args.device)?;
    for case in &cases {
        interrupt.check()?;
        let prepared = Prepared::new(case, args.device, kernels, args.deterministic)?;
        if args.tune {
            tune(&case.case, &prepared, &interrupt)?;
        }
        let budget = Duration::from_secs_f64(args.seconds);
        let (mut times, conditions) = time(&prepared, budget, watched.as_ref())?;
        lowered.extend(conditions.iter().flat_map(|seen| &seen.limits).copied());
        let sample = prepared.sample(SAMPLES)?;
        times.sort_by(f64::total_cmp);
        let ms = times[times.len() / 2];
        let tflops = |ms: f64| case.flops / ms / 1e9;
        floors.full.insert(case.case.clone(), tflops(ms));
        let floor = floors.of(case, args, kernels)?;
        let own = GpuTiming {
            case: &case.case,
            ms,
            min_ms: times[0],
            runs: times.len(),
            tflops: tflops(ms),
            floor_ms: floor.map(|(floor, ..)| floor.ms),
            floor_limit: floor.map(|(floor, ..)| floor.limit),
            of_floor: floor.map(|(floor, ..)| floor.ms / ms),
            full_tflops: floor.map(|(_, full, _)| full),
            copy_gbs: floor.map(|(.., copy)| copy),
            conditions: conditions.as_ref(),
            peer: None,
            peer_ms: None,
            peer_tflops: None,
            ratio: None,
            difference: None,
            declined: None,
        };
        let of_case = peers.get(&case.case).map_or(&[][..], Vec::as_slice);
        let beside = |peer| Beside::of(peer, case, ms, &sample);
        if args.json {
            if of_case.is_empty() {
                out.json(&own)?;
            }
            for peer in of_case {
                out.json(&own.beside(peer, &beside(peer)))?;
            }
        } else {
            let besides = names.iter().map(|n| of_case.iter().find(|p| p.peer == *n).map(beside));
            out.line(own.line() + &besides.map(Beside::cell).collect::<String>())?;
            out.flush()?;
        }
        let mut rates = vec![("foveate".to_owned(), own.tflops)];
        rates.extend(of_case.iter().filter_map(|p| Some((p.peer.clone(), tflops(p.ms?)))));
        bars.push((case.case.clone(), rates));
    }
    if !args.json && !lowered.is_empty() {
        let by = Vec::from_iter(lowered).join(" and ");
        out.line(format!("* the clock was lowered, by {by}"))?;
    }
    if let Some(file) = &args.svg {
        std::fs::write(file, chart::svg(&bars))
            .map_err(|e| Failure::new(format!("cannot write {}: {e}", file.display())))?;
    }
    Ok(())
}

/// A peer's result of a case beside ours.
struct Beside {
    tflops: Option<f64>,
    /// Its time over ours.
    ratio: Option<f64>,
    difference: Option<f64>,
}

impl Beside {
    /// Of a peer where ours takes `ms` and has these numbers.
    fn of(peer: &Peer, case: &Case, ms: f64, sample: &[f32]) -> Self {
        Self {
            tflops: peer.ms.map(|theirs| case.flops / theirs / 1e9),
            ratio: peer.ms.map(|theirs| theirs / ms),
            difference: peer.ms.map(|_| difference(sample, &peer.sample)),
        }
    }

    /// Its two columns.
    fn cell(this: Option<Self>) -> String {
        match this {
            Some(Self { tflops: Some(rate), ratio: Some(ratio), difference: Some(difference) }) => {
                let differs = if difference > 0.05 { "!" } else { " " };
                format!(" {rate:>12.1}{differs} {ratio:>5.2}x")
            }
            _ => format!(" {:>13} {:>6}", "-", "-"),
        }
    }
}

impl<'a> GpuTiming<'a> {
    /// Our part of a line.
    fn line(&self) -> String {
        let of_floor = match (self.of_floor, self.floor_limit) {
            (Some(part), Some(Limit::Bytes)) => format!("{part:.2} (bytes)"),
            (Some(part), _) => format!("{part:.2} (tiles)"),
            _ => String::new(),
        };
        let conditions = self.conditions.map_or_else(|| "-".to_owned(), told);
        let Self { case, ms, tflops, .. } = self;
        format!("{case:<44} {ms:>9.3} {tflops:>8.1} {of_floor:>14} {conditions:>15}")
    }

    /// The same with a peer's.
    fn beside(&self, peer: &'a Peer, beside: &Beside) -> Self {
        Self {
            peer: Some(&peer.peer),
            peer_ms: peer.ms,
            peer_tflops: beside.tflops,
            ratio: beside.ratio,
            difference: beside.difference,
            declined: peer.declined.as_deref(),
            ..*self
        }
    }
}

/// The GPU, where NVML tells its clock and power; otherwise a line that says why not.
fn watched(ordinal: usize) -> Result<Option<gpu::driver::Device>, Failure> {
    let device = Engine::get(ordinal)?.device().clone();
    match Watch::begin(&device) {
        Ok(_) => Ok(Some(device)),
        Err(e) => {
            crate::output::tell!("clock and power are left out: {e}");
            Ok(None)
        }
    }
}

/// In MHz and watts, with a mark where something lowered the clock.
fn told(seen: &Conditions) -> String {
    let lowered = if seen.limits.is_empty() { "" } else { "*" };
    let watts = seen.watts.map(|watts| format!("{watts:.0} W"));
    format!("{}{lowered} MHz {:>5}", seen.sm_mhz, watts.as_deref().unwrap_or("-"))
}

/// What floors are made of, as far as it was measured in this run.
#[derive(Default)]
struct Floors {
    /// TFLOP/s of cases by name.
    full: BTreeMap<String, f64>,
    /// GB/s of a copy.
    copy: Option<f64>,
}

impl Floors {
    /// The floor of a case with a mask, the rate of the same problem without one and that of a copy. What was not
    /// measured yet is measured now.
    fn of(
        &mut self,
        case: &Case,
        args: &Args,
        kernels: KernelOptions,
    ) -> Result<Option<(Floor, f64, f64)>, Failure> {
        let Some(full) = case.without_mask() else { return Ok(None) };
        let rate = match self.full.get(&full.case) {
            Some(rate) => *rate,
            None => {
                let prepared = Prepared::new(&full, args.device, kernels, args.deterministic)?;
                let budget = Duration::from_secs_f64(args.seconds);
                let (mut times, _) = time(&prepared, budget, None)?;
                times.sort_by(f64::total_cmp);
                let rate = full.flops / times[times.len() / 2] / 1e9;
                self.full.insert(full.case, rate);
                rate
            }
        };
        let copy = match self.copy {
            Some(copy) => copy,
            None => *self.copy.insert(floor::copy_gbs(args.device)?),
        };
        Ok(Some((Floor::of(&case.work, rate, copy), rate, copy)))
    }
}

/// The cases whose name contains one of `filter`; all of them where it is empty.
fn wanted(
    filter: &[String],
    dtype: DType,
    scales: Option<ScaleBlocks>,
) -> Result<Vec<Case>, Failure> {
    if scales.is_some() && dtype != DType::F8E4M3 {
        let message = format!("--scales is for f8e4m3 operands, not {dtype}");
        return Err(Failure::usage(message).help("add `--dtype f8e4m3`"));
    }
    let mut cases = cases::grid(dtype, scales);
    cases.retain(|c| filter.is_empty() || filter.iter().any(|f| c.case.contains(f.as_str())));
    if cases.is_empty() {
        let message = format!("no case has `{}` in its name", filter.join("` or `"));
        return Err(Failure::usage(message).help("`foveate bench gpu --list` names the cases"));
    }
    Ok(cases)
}

fn dtype(text: &str) -> Result<DType, String> {
    let found = [DType::BF16, DType::F8E4M3].into_iter().find(|d| d.name() == text);
    found.ok_or_else(|| "bf16 or f8e4m3".to_owned())
}

/// Blocks of scales, as many rows of q as of k and v.
fn scale_blocks(text: &str) -> Result<ScaleBlocks, String> {
    let rows = match text {
        "head" => return Ok(ScaleBlocks::WHOLE),
        rows => rows.parse().ok().filter(|rows: &usize| *rows > 0),
    };
    let rows = rows.filter(|rows| rows.is_multiple_of(ScaleBlocks::UNIT));
    let blocks = rows.map(|rows| ScaleBlocks { q: rows, kv: rows });
    blocks.ok_or_else(|| format!("`head` or a multiple of {} rows", ScaleBlocks::UNIT))
}

fn list(cases: &[Case], as_json: bool, out: &mut Output) -> Result<(), Failure> {
    for case in cases {
        if as_json {
            out.json(case)?;
        } else {
            out.line(&case.case)?;
        }
    }
    Ok(())
}

/// Tunes the kernels of a case, records what is found and says it.
fn tune(case: &str, prepared: &Prepared, interrupt: &Interrupt) -> Result<(), Failure> {
    let tuning = tune::watched(interrupt, |tell| prepared.tune(tell))?;
    for Tuned { kernel, planned, planned_us, best, .. } in &tuning.kernels {
        let (Some((best, us)), Some(planned_us)) = (best, planned_us) else { continue };
        crate::output::tell!(
            "{case}: {kernel} {best} {us:.1} us, planned {planned} {planned_us:.1}"
        );
    }
    Ok(())
}

/// Milliseconds of single runs, after a warm-up, in which kernels may be compiled; and how `watched` was in that time.
fn time(
    prepared: &Prepared,
    budget: Duration,
    watched: Option<&gpu::driver::Device>,
) -> Result<(Vec<f64>, Option<Conditions>), Failure> {
    prepared.times(2)?;
    let watch = watched.map(Watch::begin).transpose()?;
    let (began, mut times) = (Instant::now(), Vec::new());
    while times.len() < 5 || (began.elapsed() < budget && times.len() < 200) {
        times.extend(prepared.times(AT_ONCE)?);
    }
    Ok((times, watch.map(Watch::end).transpose()?))
}

fn read_peers(file: &Path) -> Result<BTreeMap<String, Vec<Peer>>, Failure> {
    let text = whole::read_text(file)
        .map_err(|e| Failure::new(format!("cannot read {}: {e}", file.display())))?;
    let mut peers: BTreeMap<String, Vec<Peer>> = BTreeMap::new();
    for (i, line) in text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()) {
        let peer: Peer = serde_json::from_str(line).map_err(|e| {
            let message = format!("{}, line {}: {e}", file.display(), i + 1);
            Failure::new(message).help("the file is what benches/gpu_peers.py prints")
        })?;
        peers.entry(peer.case.clone()).or_default().push(peer);
    }
    Ok(peers)
}

/// The peers' names, in the order of their first case.
fn peer_names(peers: &BTreeMap<String, Vec<Peer>>) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for peer in peers.values().flatten() {
        if !names.contains(&peer.peer) {
            names.push(peer.peer.clone());
        }
    }
    names
}

/// Largest difference over the largest number; infinite when one is NaN or the counts differ.
fn difference(ours: &[f32], theirs: &[f32]) -> f64 {
    if ours.len() != theirs.len() || ours.iter().chain(theirs).any(|x| x.is_nan()) {
        return f64::INFINITY;
    }
    let largest = theirs.iter().map(|x| x.abs()).fold(f32::MIN_POSITIVE, f32::max);
    let pairs = ours.iter().zip(theirs);
    f64::from(pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / largest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_of_peers_is_read_and_a_broken_line_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("peers.jsonl");
        let good = concat!(
            r#"{"case": "a", "peer": "flex", "ms": 2.0, "min_ms": 1.9, "sample": [1.0]}"#,
            "\n\n",
            r#"{"case": "a", "peer": "cudnn", "declined": "no such mask"}"#,
        );
        std::fs::write(&file, good).unwrap();
        let peers = read_peers(&file).unwrap();
        assert_eq!(peer_names(&peers), ["flex", "cudnn"]);
        assert_eq!(peers["a"][1].declined.as_deref(), Some("no such mask"));
        std::fs::write(&file, "{}\n").unwrap();
        let said = format!("{:?}", read_peers(&file).unwrap_err());
        assert!(said.contains("peers.jsonl, line 1: missing field `case`"), "{said}");
    }

    #[test]
    fn results_that_differ_are_seen() {
        assert_eq!(difference(&[1.0, -2.0], &[1.0, -2.0]), 0.0);
        assert_eq!(difference(&[1.0, -1.0], &[1.0, -2.0]), 0.5);
        assert_eq!(difference(&[f32::NAN], &[1.0]), f64::INFINITY);
        assert_eq!(difference(&[], &[1.0]), f64::INFINITY);
    }
}
