//! What can go wrong between a program and a GPU.

use std::fmt;
use std::path::PathBuf;

use foveate_tensor::count::Count;

use crate::arch::Arch;
use crate::library::{LIBRARIES_VARIABLE, Library};

/// Major CUDA version of the oldest libraries that are supported.
pub(crate) const OLDEST_CUDA: u32 = 12;

/// A refusal or a failure of a GPU or of a library of NVIDIA's. [`Self::kind`] has the details.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{kind}")]
pub struct GpuError {
    kind: Box<GpuErrorKind>,
}

/// What is wrong.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum GpuErrorKind {
    /// A library of NVIDIA's is not on this machine, or cannot be opened.
    Missing {
        /// What it is, `NVRTC`.
        library: &'static str,
        /// How to get it.
        advice: &'static str,
        /// The files looked for, in order.
        tried: Vec<PathBuf>,
        /// A file that is there but cannot be opened, and why.
        unusable: Option<String>,
    },
    /// A library lacks a function.
    Symbol {
        /// What it is.
        library: &'static str,
        /// The function.
        symbol: &'static str,
    },
    /// The driver refused a call.
    Driver {
        /// What was to be done.
        doing: String,
        /// The driver's code.
        code: i32,
        /// Its name and description.
        says: String,
    },
    /// The device has not enough memory.
    OutOfMemory {
        /// Bytes asked for.
        bytes: usize,
        /// Bytes free on the device.
        free: usize,
        /// Bytes of the device.
        total: usize,
    },
    /// The driver cannot load what this library makes.
    OldDriver {
        /// The driver's CUDA version.
        driver: (u32, u32),
        /// The library.
        library: Library,
        /// Its CUDA version.
        version: (u32, u32),
    },
    /// A library is of a version that is not supported.
    OldLibrary {
        /// Which.
        library: Library,
        /// Its version, `2.9.8`.
        version: String,
        /// The oldest that is, `2.18`.
        needed: &'static str,
    },
    /// A library refused a call.
    Library {
        /// What was to be done.
        doing: String,
        /// Which library.
        library: Library,
        /// Its code.
        code: i32,
        /// The code's name, and what the library says about it.
        says: String,
    },
    /// Ranks that work together lost each other: a communicator failed and can be used no more.
    Communication {
        /// The rank that tells.
        rank: usize,
        /// Number of ranks.
        ranks: usize,
        /// What happened.
        reason: String,
    },
    /// A kernel was compiled for an architecture that the device is not of.
    Architecture {
        /// What it was compiled for.
        arch: Arch,
        /// Name of the device.
        device: String,
        /// Compute capability of the device.
        capability: (u32, u32),
    },
    /// NVRTC does not know an architecture.
    UnknownArchitecture {
        /// The architecture.
        arch: Arch,
        /// NVRTC's version.
        version: (i32, i32),
    },
    /// NVRTC refused a source.
    Compile {
        /// The architecture it was for.
        arch: Arch,
        /// NVRTC's log.
        log: String,
    },
    /// A compiled kernel could not be kept where it was asked for.
    Unkept {
        /// The file, why it could not be written, and what to do.
        reason: String,
    },
    /// A compiled kernel is not what was planned.
    Resources {
        /// The kernel.
        kernel: String,
        /// What differs.
        reason: String,
    },
    /// The device did not finish in time.
    Timeout {
        /// What was waited for.
        waiting: String,
        /// For how long, in seconds.
        seconds: f64,
        /// Which launches of the stream may not be done; empty where none was made on it.
        launches: String,
    },
    /// An argument cannot be used.
    Argument {
        /// Which, why, and what to do.
        reason: String,
    },
}

impl GpuError {
    /// What is wrong.
    pub fn kind(&self) -> &GpuErrorKind {
        &self.kind
    }

    /// An argument that cannot be used: which, why, and what to do.
    pub fn argument(reason: impl Into<String>) -> Self {
        GpuErrorKind::Argument { reason: reason.into() }.into()
    }
}

impl From<GpuErrorKind> for GpuError {
    fn from(kind: GpuErrorKind) -> Self {
        Self { kind: Box::new(kind) }
    }
}

/// Whether nothing runs in a context any more after this code of the driver's: addresses, instructions,
/// assertions, time limits.
pub(crate) fn breaks_context(code: i32) -> bool {
    matches!(code, 700 | 702 | 709 | 710 | 714..=719)
}

/// What to do about a code of the driver's, where something can be done (numbers of `CUresult` in
/// cuda.h).
fn advice(code: i32) -> Option<&'static str> {
    Some(match code {
        46 => "another process has the GPU for itself: end it, or choose another GPU",
        100 => "see whether nvidia-smi lists a GPU and CUDA_VISIBLE_DEVICES hides none",
        code if breaks_context(code) => "this process cannot use the GPU any more: start it again",
        802 => "the GPUs of this machine are not ready: start nvidia-fabricmanager",
        803 => "the driver was changed under the running system: restart the machine",
        _ => return None,
    })
}

/// Files that were looked for of which a line has the names, if there are more.
const NAMED: usize = 3;

impl fmt::Display for GpuErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { library, advice, tried, unusable } => match unusable {
                Some(why) => write!(f, "{library} cannot be opened ({why}); {advice}"),
                None => {
                    let mut places: Vec<String> =
                        tried.iter().take(NAMED).map(|place| place.display().to_string()).collect();
                    let more = tried.len() - places.len();
                    places.extend((more > 0).then(|| format!("{more} more")));
                    let (all, places) = (Count(tried.len(), "place"), places.join(", "));
                    write!(f, "{library} was not found in {all} ({places}); {advice}")
                }
            },
            Self::Symbol { library, symbol } => {
                write!(f, "{library} has no `{symbol}`; it is too old, a newer one is needed")
            }
            Self::Driver { doing, code, says } => {
                write!(f, "{doing}: the driver says {says} ({code})")?;
                advice(*code).map_or(Ok(()), |advice| write!(f, "; {advice}"))
            }
            Self::OutOfMemory { bytes, free, total } => {
                let mib = |n: usize| n as f64 / f64::from(1 << 20);
                write!(
                    f,
                    "the device is out of memory: {:.1} MiB asked for, {:.1} of {:.1} MiB free; \
                     end what else uses the GPU, or take a smaller batch or shorter sequences",
                    mib(*bytes),
                    mib(*free),
                    mib(*total)
                )
            }
            Self::OldDriver { driver, library, version } => {
                let needed = match version.0 {
                    13 => "580 or newer",
                    12 => "525 or newer",
                    _ => "that came with it, or a newer one",
                };
                let takes = if *library == Library::Nvrtc { "loads" } else { "runs" };
                write!(
                    f,
                    "the driver is for CUDA {}.{} and {takes} no kernels of {} {}.{}; install a \
                     driver {needed}",
                    driver.0,
                    driver.1,
                    library.name(),
                    version.0,
                    version.1
                )?;
                if driver.0 < OLDEST_CUDA {
                    return Ok(());
                }
                write!(
                    f,
                    ", or {} {} (`pip install {}`), to whose folder {} points",
                    library.name(),
                    driver.0,
                    library.package(driver.0),
                    LIBRARIES_VARIABLE
                )
            }
            Self::OldLibrary { library, version, needed } => write!(
                f,
                "{} is of version {version}, {needed} or newer is needed: {}",
                library.name(),
                library.advice()
            ),
            Self::Library { doing, library, code, says } => {
                write!(f, "{doing}: {} says {says} ({code})", library.name())
            }
            Self::Communication { rank, ranks, reason } => {
                write!(f, "rank {rank} of {ranks}: {reason}")
            }
            Self::Architecture { arch, device, capability: (major, minor) } => {
                let ((of, from), native) = (arch.capability(), Arch::new((*major, *minor)));
                write!(f, "a kernel for {arch} runs on compute capability {of}.{from} ")?;
                let range = if arch.is_specific() { "alone".into() } else { format!("to {of}.9") };
                write!(f, "{range}, but {device} has {major}.{minor}; compile it for {native}")
            }
            Self::UnknownArchitecture { arch, version: (major, minor) } => write!(
                f,
                "NVRTC {major}.{minor} does not compile for {arch}; take another architecture, or \
                 another NVRTC: {}",
                Library::Nvrtc.advice()
            ),
            Self::Compile { arch, log } => {
                let first = log.lines().find(|l| l.contains("error")).unwrap_or("no reason given");
                write!(f, "NVRTC refused a kernel for {arch}: {first}")
            }
            Self::Resources { kernel, reason } => write!(f, "kernel {kernel}: {reason}"),
            Self::Timeout { waiting, seconds, launches } => {
                write!(f, "{waiting} did not finish within {seconds} s; ")?;
                match launches.is_empty() {
                    true => f.write_str("the device hangs, or has more to do")?,
                    false => write!(f, "the stream hangs in {launches}, or has more to do")?,
                }
                f.write_str(": FOVEATE_TIMEOUT, or the limit of the call, sets how long to wait")
            }
            Self::Argument { reason } | Self::Unkept { reason } => f.write_str(reason),
        }
    }
}
