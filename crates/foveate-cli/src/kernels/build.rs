//! `foveate kernels build`: fills the cache of compiled kernels, so that the first step of a
//! training run does not wait for the compiler.

use std::path::{Path, PathBuf};

use clap::{Args as _, Command, FromArgMatches};
use foveate::DType;
use foveate::tensor::count::Count;
use foveate_cuda::aot::{self, Usage};
use foveate_cuda::compile::config::Config;
use foveate_gpu::Arch;
use foveate_gpu::cache::Cache;
use foveate_gpu::hopper;
use foveate_gpu::nvrtc::Compiler;
use foveate_problem::{Dims, Spec};
use foveate_train::whole;
use rayon::prelude::*;

use crate::blind;
use crate::explain::{profile, records};
use crate::failure::Failure;
use crate::number::number;
use crate::output::Output;
use crate::problem::ProblemArgs;

/// Compile the kernels of a problem, or of a list of problems, into the cache
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The card: l40s, h200, rtx4090, ...; or cuda:0 for the one that is there
    #[arg(long, value_name = "NAME")]
    device: String,
    /// A list of problems instead: a TOML file with a table [[problem]] for each, whose keys are
    /// the options of this command
    #[arg(long, value_name = "FILE", conflicts_with_all = ["heads", "dim", "len"])]
    problems: Option<PathBuf>,
    #[command(flatten)]
    problem: Wanted,
}

/// One problem.
#[derive(Debug, clap::Args)]
struct Wanted {
    #[command(flatten)]
    problem: ProblemArgs,
    /// For the same bits in every run
    #[arg(long)]
    deterministic: bool,
    /// With captured indices checked, as host tensors always are
    #[arg(long)]
    checked: bool,
    /// Plan for N live keys a query on average, whatever --mask says
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = number::<usize>)]
    mean_kv_len: Option<usize>,
}

/// Compiles and prints a line for each problem.
pub fn run(args: &Args, out: &mut Output) -> Result<(), Failure> {
    let mut profile = profile(&args.device)?;
    let records = records(&args.device)?;
    let listed = args.problems.as_deref().map(read).transpose()?;
    let wanted = listed.as_deref().unwrap_or(std::slice::from_ref(&args.problem));
    let problems = wanted.iter().map(Wanted::read).collect::<Result<Vec<_>, _>>()?;
    let compiler = Compiler::get()?;
    if profile.hopper_unmet.is_empty() {
        // Of a card that is only named: its machine is taken to have this compiler.
        profile.hopper_unmet.extend(hopper::unmet_by_nvrtc(compiler.version()));
    }
    let cache = Cache::to_fill();
    let folder = cache.folder().ok_or_else(|| {
        Failure::new("there is no folder to keep kernels in").help("set FOVEATE_CACHE_DIR")
    })?;
    let compile = |text: &str, arch: Arch| cache.compile(compiler, text, arch);
    let mut built: Vec<(Config, String)> = Vec::new();
    for (spec, dims, dtype, run) in &problems {
        let kernels = aot::kernels(&profile, spec, dims, *dtype, *run, records.as_ref())?;
        let compiled: Vec<_> = kernels.par_iter().map(|kernel| kernel.build(compile)).collect();
        for kernel in compiled {
            for found in kernel? {
                if !built.contains(&found) {
                    out.line(&found.0)?;
                    built.push(found);
                }
            }
        }
    }
    let (kernels, problems) = (built.len(), wanted.len());
    out.line(format_args!(
        "{} of {} for {} in {}",
        Count(kernels, "kernel"),
        Count(problems, "problem"),
        profile.arch(),
        folder.display()
    ))?;
    Ok(())
}

impl Wanted {
    /// The program, the sizes and the dtype of its operands, and how it is run.
    fn read(&self) -> Result<(Spec, Dims, DType, Usage), Failure> {
        let given = self.problem.read()?;
        blind::check(&given);
        let run = Usage {
            backward: self.problem.backward,
            deterministic: self.deterministic,
            checked: self.checked,
            page_size: given.problem.arrangement().page_size(),
            mean_kv_len: self.mean_kv_len,
        };
        Ok((given.spec, *given.problem.dims(), self.problem.dtype, run))
    }
}

/// The problems of a file. A key is an option of the command line and is read like it.
fn read(path: &Path) -> Result<Vec<Wanted>, Failure> {
    let wrong = |reason: String| Failure::new(format!("{}: {reason}", path.display()));
    let text = whole::read_text(path).map_err(|e| wrong(format!("could not be read: {e}")))?;
    let file: toml::Table = toml::from_str(&text).map_err(|e| wrong(e.to_string()))?;
    let problems = file.get("problem").and_then(|p| p.as_array());
    let problems = problems.ok_or_else(|| wrong("it has no table [[problem]]".to_owned()))?;
    let command = Wanted::augment_args(Command::new("problem").no_binary_name(true));
    let one = |(i, problem): (usize, &toml::Value)| {
        let wrong = |reason: String| wrong(format!("problem {}: {reason}", i + 1));
        let table = problem.as_table().ok_or_else(|| wrong("it is no table".to_owned()))?;
        let mut options = Vec::new();
        for (key, value) in table {
            let key = key.replace('_', "-");
            match value {
                toml::Value::Boolean(true) => options.push(format!("--{key}")),
                toml::Value::Boolean(false) => {}
                toml::Value::String(text) => options.push(format!("--{key}={text}")),
                other => options.push(format!("--{key}={other}")),
            }
        }
        let parsed = command.clone().try_get_matches_from(options);
        let parsed = parsed.and_then(|matches| Wanted::from_arg_matches(&matches));
        parsed.map_err(|e| {
            let said = e.to_string();
            let said = said.lines().next().unwrap_or_default();
            wrong(said.trim_start_matches("error: ").to_owned())
        })
    };
    problems.iter().enumerate().map(one).collect()
}
