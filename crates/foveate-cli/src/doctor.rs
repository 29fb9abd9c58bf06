//! `foveate doctor`: what this machine offers and what this build makes of it.

use std::fs;
use std::path::PathBuf;

use foveate::tensor::count::Count;
use foveate_gpu::driver::{Device, DeviceInfo};
use foveate_gpu::hopper::{self, Need};
use foveate_gpu::library::Library;
use foveate_gpu::loader::{Outcome, Step};
use foveate_gpu::{Arch, GpuErrorKind, blas, cache, nccl, nvml, nvrtc};
use foveate_shard::launch::Flags;
use foveate_train::machine;
use serde::Serialize;

use crate::failure::Failure;
use crate::output::{Output, bytes};
use crate::{ranks, threads};

/// Show what this machine offers and what this build makes of it
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print one JSON object
    #[arg(long, conflicts_with = "mesh")]
    json: bool,
    /// Show which rank of which run this process would be, and who says so, instead
    #[arg(long)]
    mesh: bool,
}

#[derive(Debug, Serialize)]
struct Findings {
    version: &'static str,
    target: String,
    cpu: Option<String>,
    features: Vec<&'static str>,
    instructions: Option<&'static str>,
    instructions_refused: Option<String>,
    cores: usize,
    threads: usize,
    threads_refused: Option<String>,
    caches: Vec<Cache>,
    memory_bytes: Option<u64>,
    memory_available_bytes: Option<u64>,
    libraries: Vec<Found>,
    gpus: Vec<Gpu>,
    kernel_cache: Option<PathBuf>,
}

/// A library of NVIDIA's: where it is, or what to do.
#[derive(Debug, Serialize)]
struct Found {
    name: &'static str,
    purpose: &'static str,
    path: Option<PathBuf>,
    version: Option<String>,
    advice: Option<String>,
    searched: Vec<Searched>,
}

/// A file that was tried.
#[derive(Debug, Serialize)]
struct Searched {
    origin: &'static str,
    path: PathBuf,
    outcome: &'static str,
    reason: Option<String>,
}

#[derive(Debug, Serialize)]
struct Gpu {
    name: String,
    arch: Arch,
    sms: u32,
    smem_bytes_per_cta: u32,
    memory_bytes: usize,
    /// What the Hopper family needs.
    hopper: Vec<Need>,
}

#[derive(Debug, Serialize)]
struct Cache {
    level: u32,
    kind: String,
    size: String,
}

/// Looks around and prints what it finds.
pub fn run(args: &Args, out: &mut Output) -> Result<(), Failure> {
    if args.mesh {
        let launch = ranks::launch(&Flags::default())?;
        return Ok(ranks::lines(&launch).into_iter().try_for_each(|line| out.line(line))?);
    }
    let found = Findings::gather();
    if args.json {
        return Ok(out.json(&found)?);
    }
    let unknown = || "unknown".to_owned();
    out.line(format_args!("foveate   {} for {}", found.version, found.target))?;
    out.line(format_args!("cpu       {}", found.cpu.clone().unwrap_or_else(unknown)))?;
    out.line(format_args!("features  {}", found.features.join(" ")))?;
    let level = match (found.instructions, &found.instructions_refused) {
        (Some(level), _) => format!("{level} (FOVEATE_CPU_LEVEL takes a lesser one)"),
        (None, why) => format!("no attention runs on the CPU: {}", why.as_deref().unwrap_or("?")),
    };
    out.line(format_args!("level     {level}"))?;
    let why = match &found.threads_refused {
        Some(why) => format!("{why}; other commands refuse it"),
        None => "RAYON_NUM_THREADS sets them".to_owned(),
    };
    out.line(format_args!(
        "threads   {} of {} ({why})",
        found.threads,
        Count(found.cores, "core")
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
    if found.gpus.is_empty() {
        out.line(format_args!("gpu       none; attention runs on the CPU"))?;
    }
    for (i, gpu) in found.gpus.iter().enumerate() {
        out.line(format_args!(
            "gpu {i}     {}, {}, {} SMs, {} of smem a CTA, {}",
            gpu.name,
            gpu.arch,
            gpu.sms,
            bytes(f64::from(gpu.smem_bytes_per_cta)),
            bytes(gpu.memory_bytes as f64)
        ))?;
        let runs = gpu.hopper.iter().all(|need| need.met);
        let told = gpu.hopper.iter().filter(|need| runs || !need.met).map(Need::to_string);
        let told = told.collect::<Vec<_>>().join(", ");
        let does = if runs { "kernels run" } else { "no kernels run" };
        out.line(format_args!("hopper    {does} on gpu {i}: {told}"))?;
    }
    let mut told = String::new();
    for library in &found.libraries {
        let name = library.name.trim_start_matches("the NVIDIA ");
        let version = library.version.as_ref().map(|v| format!(" {v}")).unwrap_or_default();
        match (&library.path, &library.advice) {
            (Some(path), None) => {
                out.line(format_args!("{name:<9} {}{version}", path.display()))?
            }
            (Some(path), Some(advice)) => {
                out.line(format_args!("{name:<9} {}, but: {advice}", path.display()))?
            }
            (None, advice) => out.line(format_args!(
                "{name:<9} not found, needed {}: {}",
                library.purpose,
                advice.as_deref().unwrap_or("unknown")
            ))?,
        }
        for step in &library.searched {
            if let Some(why) = &step.reason {
                let path = step.path.display();
                out.line(format_args!("          {path} cannot be opened: {why}"))?;
            }
        }
        if library.path.is_none() {
            let mut folders: Vec<_> =
                library.searched.iter().filter_map(Searched::folder).collect();
            folders.dedup();
            let folders = folders.join(", ");
            match folders == told {
                true => out.line("          looked for in the same folders")?,
                false => out.line(format_args!("          looked for in {folders}"))?,
            }
            told = folders;
        }
    }
    if let Some(folder) = &found.kernel_cache {
        out.line(format_args!("kernels   {}", folder.display()))?;
    }
    Ok(())
}

impl Findings {
    fn gather() -> Self {
        let level = foveate::cpu::instructions();
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let started = threads::start(None).map_err(|e| e.message());
        Self {
            version: env!("CARGO_PKG_VERSION"),
            target: format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
            cpu: cpu_name(),
            features: features(),
            instructions: level.as_ref().ok().copied(),
            instructions_refused: level.err().map(|e| e.to_string()),
            cores,
            threads: started.as_ref().map_or(0, |()| rayon::current_num_threads()),
            threads_refused: started
                .err()
                .or_else(|| threads::refused(std::env::var_os(threads::VARIABLE))),
            caches: caches(),
            memory_bytes: machine::memory("MemTotal"),
            memory_available_bytes: machine::free().map(|free| free.bytes),
            libraries: Library::ALL.map(Found::look_for).into(),
            gpus: gpus(),
            kernel_cache: cache::Cache::get().folder().map(Into::into),
        }
    }
}

impl Found {
    fn look_for(library: Library) -> Self {
        let opened = library.open();
        let dots = |version: [u32; 3]| version.map(|n| n.to_string()).join(".");
        let version = match library {
            Library::Nvrtc => {
                nvrtc::Compiler::get().ok().map(|c| format!("{}.{}", c.version().0, c.version().1))
            }
            Library::Driver => first_gpu().map(|i| format!("CUDA {}.{}", i.driver.0, i.driver.1)),
            Library::CublasLt => blas::version().ok().map(dots),
            Library::Nccl => nccl::version().ok().map(dots),
            Library::Nvml => None,
        };
        let advice = match (&opened, library) {
            (Err(e), _) => Some(match e.kind() {
                GpuErrorKind::Missing { advice, .. } => (*advice).to_owned(),
                _ => e.to_string(),
            }),
            // A driver without a GPU, one that does not start, a library too old.
            (Ok(_), Library::Driver) => Device::count().err().map(|e| e.to_string()),
            (Ok(_), Library::Nvrtc) => {
                let fits = nvrtc::Compiler::get().and_then(|compiler| match first_gpu() {
                    Some(gpu) => nvrtc::check_driver(compiler.version(), gpu.driver),
                    None => Ok(()),
                });
                fits.err().map(|e| e.to_string())
            }
            (Ok(_), Library::CublasLt) => {
                let fits = blas::version().and_then(|[major, minor, _]| match first_gpu() {
                    Some(gpu) => library.check_driver((major, minor), gpu.driver),
                    None => Ok(()),
                });
                fits.err().map(|e| e.to_string())
            }
            (Ok(_), Library::Nccl) => nccl::version().err().map(|e| e.to_string()),
            (Ok(_), Library::Nvml) => nvml::check().err().map(|e| e.to_string()),
        };
        Self {
            name: library.name(),
            purpose: library.purpose(),
            path: opened.ok().map(|o| o.path().into()),
            version,
            advice,
            searched: library.search().steps().iter().map(Searched::of).collect(),
        }
    }
}

impl Searched {
    fn of(step: &Step) -> Self {
        let (outcome, reason) = match &step.outcome {
            Outcome::Absent => ("absent", None),
            Outcome::Unusable(why) => ("unusable", Some(why.clone())),
            Outcome::Opened => ("opened", None),
        };
        Self { origin: step.origin.name(), path: step.path.clone(), outcome, reason }
    }

    /// The folder looked in; for a bare name, who looks.
    fn folder(&self) -> Option<String> {
        let folder = self.path.parent()?;
        let system = folder.as_os_str().is_empty();
        Some(if system { "the system's folders".into() } else { folder.display().to_string() })
    }
}

fn first_gpu() -> Option<DeviceInfo> {
    Device::open(0).ok().map(|d| d.info().clone())
}

fn gpus() -> Vec<Gpu> {
    let devices = (0..Device::count().unwrap_or(0)).filter_map(|i| Device::open(i).ok());
    devices
        .map(|device| {
            let info = device.info();
            Gpu {
                name: info.name.clone(),
                arch: info.arch(),
                sms: info.sms,
                smem_bytes_per_cta: info.shared_bytes_per_block,
                memory_bytes: info.memory_bytes,
                hopper: hopper::needs(&device),
            }
        })
        .collect()
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
