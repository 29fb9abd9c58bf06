//! `foveate explain --device`: which kernels a GPU would run, what they take of it, and which
//! could not run there. No GPU is needed.

use foveate::tensor::count::Count;
use foveate_cuda::Records;
use foveate_cuda::aot::{self, Planned, Usage};
use foveate_cuda::choose::{KernelOptions, admit};
use foveate_gpu::driver;
use foveate_gpu::profile::Profile;
use serde_json::json;

use super::Args;
use crate::blind;
use crate::failure::Failure;
use crate::output::Output;
use crate::problem::Given;

/// Kernel options from texts like `forward.tile_q=64`.
pub fn kernel_options(given: &[String]) -> Result<KernelOptions, Failure> {
    let mut options = KernelOptions::default();
    for given in given {
        let malformed = || Failure::usage(format!("--kernel {given}: KEY=VALUE is expected"));
        let (name, value) = given.split_once('=').ok_or_else(malformed)?;
        options.set(name.trim(), value.trim()).map_err(Failure::usage)?;
    }
    Ok(options)
}

/// Plans for the card called `device` and prints the plan.
pub fn run(args: &Args, given: &Given, device: &str, out: &mut Output) -> Result<(), Failure> {
    let profile = profile(device)?;
    let records = records(device)?;
    let dtype = args.problem.dtype;
    let dims = given.problem.dims();
    admit(&profile, dims, dtype)
        .map_err(|e| Failure::from(e).help("leave --device out for the CPU"))?;
    let options = kernel_options(&args.kernel)?;
    for given in &args.kernel {
        if given.trim().starts_with("backward") && !args.problem.backward {
            let message = format!("--kernel {given} is of the backward pass, which is not planned");
            return Err(Failure::usage(message).help("give --backward, or leave it out"));
        }
    }
    if args.deterministic && !args.problem.backward {
        let message = "--deterministic changes the backward pass only, which is not planned";
        return Err(Failure::usage(message).help("give --backward, or leave it out"));
    }
    let spec = &given.spec;
    let run = Usage {
        backward: args.problem.backward,
        deterministic: args.deterministic,
        checked: false,
        page_size: given.problem.arrangement().page_size(),
        mean_kv_len: args.mean_kv_len,
    };
    let Planned { class, sizes, plan, .. } =
        aot::plan(&profile, spec, dims, dtype, run, &options, records.as_ref())?;
    blind::check(given);
    if args.json {
        return Ok(out.json(&json!({ "class": class, "sizes": sizes, "plan": plan }))?);
    }
    let part = |text: Option<String>| text.unwrap_or_else(|| "none".to_owned());
    out.line(format_args!(
        "problem    {dtype}, batch {}, {}/{} heads, {}, {}, head dim {}/{}",
        dims.batch,
        dims.heads_q,
        dims.heads_kv,
        Count(dims.len_q, "query"),
        Count(dims.len_k, "key"),
        dims.dim,
        dims.dim_v
    ))?;
    out.line(format_args!("mask       {}", part(spec.mask.as_ref().map(|m| m.to_string()))))?;
    out.line(format_args!("score      {}", part(spec.score.as_ref().map(|s| s.to_string()))))?;
    if let Some(dropout) = &spec.dropout {
        out.line(format_args!("dropout    {}", dropout.p()))?;
    }
    if args.mean_kv_len.is_some() {
        out.line(format_args!("live keys  {} a query on average, as stated", sizes.mean_kv_len))?;
    }
    Ok(out.text(&plan)?)
}

/// The profile called `name`, or that of the GPU `cuda:0`.
pub fn profile(name: &str) -> Result<Profile, Failure> {
    match ordinal(name)? {
        Some(ordinal) => Ok(Profile::of(driver::Device::open(ordinal)?.info())),
        None => Profile::named(name)
            .map_err(|e| Failure::usage(e).help("cuda:0 takes the GPU of this machine")),
    }
}

/// What the tuner has found on the GPU `cuda:0`; nothing on a card that is only named, or without
/// NVRTC.
pub fn records(name: &str) -> Result<Option<Records>, Failure> {
    let Some(ordinal) = ordinal(name)? else { return Ok(None) };
    Ok(Records::of(driver::Device::open(ordinal)?.info()).ok())
}

/// The number of `cuda:0`; `None` for the name of a card.
pub fn ordinal(name: &str) -> Result<Option<usize>, Failure> {
    let Some(ordinal) = name.strip_prefix("cuda") else { return Ok(None) };
    let digits = ordinal.strip_prefix(':').unwrap_or("0");
    let ordinal = digits.parse();
    let wrong = |_| Failure::usage(format!("--device {name}: `{digits}` is no number"));
    ordinal.map(Some).map_err(wrong)
}
