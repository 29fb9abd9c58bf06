//! The options of the commands that run cases.

use std::path::PathBuf;
use std::time::Duration;

use foveate_conformance::{Backend, Case, backends, cover, gpu_backends_that_wait, load};

/// What cases run on.
pub type Backends = Vec<Box<dyn Backend>>;

/// Which cases run, on what, and how.
#[derive(Clone, Debug)]
pub struct Options {
    pub cases: PathBuf,
    pub only: String,
    pub on: String,
    pub backend: String,
    pub workers: usize,
    pub timeout: Duration,
    pub repeats: usize,
    pub subset: Subset,
    /// What cases in f32 run in.
    pub dtype: String,
    /// How long kernels wait: `endless` as they are, `bounded` to find the wait that hangs.
    pub waits: String,
}

/// Which of the cases run.
#[derive(Clone, Copy, Debug)]
pub enum Subset {
    /// So many, evenly chosen.
    Evenly(usize),
    /// The smallest that together have every feature of the corpus ([`cover`]).
    Cover,
}

impl std::fmt::Display for Subset {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Evenly(number) => number.fmt(f),
            Self::Cover => "cover".fmt(f),
        }
    }
}

impl Options {
    /// Reads `--name value` pairs.
    pub fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self {
            cases: "conformance/cases".into(),
            only: String::new(),
            on: "gpu".into(),
            backend: String::new(),
            workers: std::thread::available_parallelism().map_or(4, usize::from).min(12),
            timeout: Duration::from_secs(60),
            repeats: 1000,
            subset: Subset::Evenly(usize::MAX),
            dtype: "f32".into(),
            waits: "endless".into(),
        };
        while let Some(name) = args.next() {
            let value = args.next().ok_or_else(|| format!("{name} needs a value"))?;
            let one_of = |known: &[&str]| match known.contains(&value.as_str()) {
                true => Ok(value.clone()),
                false => Err(format!("{name} takes one of {}, not {value:?}", known.join(", "))),
            };
            let number = || value.parse().map_err(|_| format!("{name} is a number, not {value:?}"));
            match name.as_str() {
                "--cases" => options.cases = value.into(),
                "--only" => options.only = value,
                "--on" => options.on = one_of(&["gpu", "cpu", "all"])?,
                "--backend" => options.backend = value,
                "--workers" => options.workers = number()?,
                "--timeout" => options.timeout = Duration::from_secs(number()? as u64),
                "--subset" if value == "cover" => options.subset = Subset::Cover,
                "--subset" if number()? == 0 => return Err("--subset 0 runs nothing".into()),
                "--subset" => options.subset = Subset::Evenly(number()?),
                "--dtype" => options.dtype = one_of(&["f32", "f16", "bf16", "f8e4m3"])?,
                "--waits" => options.waits = one_of(&["endless", "bounded"])?,
                "--repeats" => options.repeats = number()?,
                _ => return Err(format!("{name} is no option; --help lists them")),
            }
        }
        Ok(options)
    }

    /// The cases that were asked for, in the order of the corpus.
    pub fn load(&self) -> Result<Vec<Case>, String> {
        const REMEDY: &str = "name the folder of cases with --cases; in Foveate's repository it is conformance/cases";
        let mut cases = load(&self.cases).map_err(|e| match self.cases.is_dir() {
            true => e.to_string(),
            false => format!("{e}; {REMEDY}"),
        })?;
        if cases.is_empty() {
            return Err(format!("{} has no cases; {REMEDY}", self.cases.display()));
        }
        cases.retain(|case| case.name.contains(&self.only));
        for case in cases.iter_mut().filter(|case| case.dtype == "f32") {
            case.dtype.clone_from(&self.dtype);
        }
        if cases.is_empty() {
            let (folder, only) = (self.cases.display(), &self.only);
            return Err(format!("no case in {folder} has `{only}` in its name"));
        }
        match self.subset {
            Subset::Cover => cover(cases).map_err(|e| e.to_string()),
            Subset::Evenly(number) => {
                let step = cases.len().div_ceil(number);
                Ok(cases.into_iter().step_by(step).collect())
            }
        }
    }

    /// The backends that were asked for; the GPU's reason when there is none.
    pub fn backends(&self) -> Result<(Backends, Option<String>), String> {
        let (gpu, reason) = match self.on.as_str() {
            "cpu" => (Vec::new(), None),
            _ => gpu_backends_that_wait(self.waits == "bounded")
                .map_or_else(|e| (Vec::new(), Some(e)), |gpu| (gpu, None)),
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
