//! `foveate doctor`: what this machine offers and what this build makes of it.

use std::fs;

use foveate_train::machine::memory;
use serde::Serialize;

use crate::failure::Failure;
use crate::output::{Output, bytes};

/// Show what this machine offers and what this build makes of it
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Findings {
    version: &'static str,
    target: String,
    cpu: Option<String>,
    features: Vec<&'static str>,
    cores: usize,
    threads: usize,
    caches: Vec<Cache>,
    memory_bytes: Option<u64>,
    memory_available_bytes: Option<u64>,
    gpu: &'static str,
}

#[derive(Debug, Serialize)]
struct Cache {
    level: u32,
    kind: String,
    size: String,
}

/// Looks around and prints what it finds.
pub fn run(args: &Args, out: &mut Output) -> Result<(), Failure> {
    let found = Findings::gather();
    if args.json {
        return Ok(out.json(&found)?);
    }
    let unknown = || "unknown".to_owned();
    out.line(format_args!("foveate   {} for {}", found.version, found.target))?;
    out.line(format_args!("cpu       {}", found.cpu.clone().unwrap_or_else(unknown)))?;
    out.line(format_args!("features  {}", found.features.join(" ")))?;
    out.line(format_args!(
        "threads   {} of {} cores (RAYON_NUM_THREADS sets them)",
        found.threads, found.cores
    ))?;
    let caches = found.caches.iter().map(|c| format!("L{} {} {}", c.level, c.kind, c.size));
    let caches = caches.collect::<Vec<_>>().join(", ");
    out.line(format_args!("caches    {}", if caches.is_empty() { unknown() } else { caches }))?;
    let memory = |n: Option<u64>| n.map_or_else(unknown, |n| bytes(n as f64));
    out.line(format_args!(
        "memory    {}, {} available",
        memory(found.memory_bytes),
        memory(found.memory_available_bytes)
    ))?;
    out.line(format_args!("gpu       {}", found.gpu))?;
    Ok(())
}

impl Findings {
    fn gather() -> Self {
        let [total, available] = ["MemTotal", "MemAvailable"].map(memory);
        Self {
            version: env!("CARGO_PKG_VERSION"),
            target: format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
            cpu: cpu_name(),
            features: features(),
            cores: std::thread::available_parallelism().map_or(1, |n| n.get()),
            threads: rayon::current_num_threads(),
            caches: caches(),
            memory_bytes: total,
            memory_available_bytes: available,
            gpu: "libraries are not used by this build; everything runs on the CPU",
        }
    }
}

fn cpu_name() -> Option<String> {
    let info = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = info.lines().find(|l| l.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn caches() -> Vec<Cache> {
    let cache = |index: usize| {
        let read = |what| {
            let path = format!("/sys/devices/system/cpu/cpu0/cache/index{index}/{what}");
            fs::read_to_string(path).map(|s| s.trim().to_owned()).ok()
        };
        let level = read("level")?.parse().ok()?;
        Some(Cache { level, kind: read("type")?.to_lowercase(), size: read("size")? })
    };
    (0..).map_while(cache).collect()
}

#[cfg(target_arch = "x86_64")]
fn features() -> Vec<&'static str> {
    let mut found = Vec::new();
    macro_rules! detect {
        ($($name:tt),*) => {$(
            if std::arch::is_x86_feature_detected!($name) {
                found.push($name);
            }
        )*};
    }
    detect!("sse4.2", "avx", "f16c", "fma", "avx2", "avx512f", "avx512bw", "avx512vl");
    detect!("avx512vnni", "avx512bf16", "avx512fp16");
    found
}

#[cfg(target_arch = "aarch64")]
fn features() -> Vec<&'static str> {
    let mut found = Vec::new();
    macro_rules! detect {
        ($($name:tt),*) => {$(
            if std::arch::is_aarch64_feature_detected!($name) {
                found.push($name);
            }
        )*};
    }
    detect!("neon", "fp16", "dotprod", "bf16", "sve", "sve2");
    found
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn features() -> Vec<&'static str> {
    Vec::new()
}
