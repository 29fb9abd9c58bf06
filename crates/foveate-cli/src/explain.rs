//! `foveate explain`: what would run for a problem that is given by its sizes.

use std::path::PathBuf;

use foveate::mods::text::{parse_mask, parse_score};
use foveate::{Attention, DType, Device, Problem};

mod budget;

use crate::captures::Captures;
use crate::failure::Failure;
use crate::output::Output;

/// Show what would run for a problem given by its sizes
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Query heads, or query heads/key-value heads
    #[arg(long, value_name = "HQ[/HKV]", value_parser = pair, required_unless_present = "recipe")]
    heads: Option<(usize, usize)>,
    /// Number of queries (the sum of --doc-lens when left out)
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    len: Option<usize>,
    /// Number of keys (as many as queries when left out)
    #[arg(long, value_name = "M", allow_negative_numbers = true)]
    kv_len: Option<usize>,
    /// Head dim, or that of queries and keys/that of values
    #[arg(long, value_name = "D[/DV]", value_parser = pair, required_unless_present = "recipe")]
    dim: Option<(usize, usize)>,
    /// Batch entries
    #[arg(long, value_name = "B", allow_negative_numbers = true, default_value_t = 1)]
    batch: usize,
    /// Element type
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = dtype)]
    dtype: DType,
    /// The mask, such as "causal & document"
    #[arg(long, value_name = "TEXT")]
    mask: Option<String>,
    /// The score, such as "softcap(30)"
    #[arg(long, value_name = "TEXT")]
    score: Option<String>,
    /// Plan the backward pass too
    #[arg(long)]
    backward: bool,
    #[command(flatten)]
    captures: Captures,
    /// Explain what a recipe takes instead: parameters, memory, attention; no weights or data
    /// are needed
    #[arg(long, value_name = "FILE", conflicts_with_all = ["heads", "dim", "len", "kv_len", "mask", "score"])]
    recipe: Option<PathBuf>,
    /// Override a field of the recipe, such as data.len=4096
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// `32/8`, or `32` for `32/32`.
fn pair(text: &str) -> Result<(usize, usize), String> {
    let number = |t: &str| t.trim().parse().map_err(|_| format!("`{t}` is no number"));
    match text.split_once('/') {
        None => number(text).map(|n| (n, n)),
        Some((a, b)) => Ok((number(a)?, number(b)?)),
    }
}

fn dtype(text: &str) -> Result<DType, String> {
    let all = [DType::F32, DType::F16, DType::BF16, DType::F64];
    let found = all.into_iter().find(|d| d.name() == text);
    found.ok_or_else(|| "one of f32, f16, bf16, f64".to_owned())
}

/// Plans and prints the explanation.
pub fn run(args: &Args, out: &mut Output) -> Result<(), Failure> {
    if let Some(path) = &args.recipe {
        return budget::run(path, &args.set, args.json, out);
    }
    if !args.set.is_empty() {
        return Err(Failure::usage("--set overrides a field of a recipe, but none is given")
            .help("give --recipe FILE, or leave --set out"));
    }
    let Some(len) = args.len.or(args.captures.documents_len()) else {
        return Err(Failure::usage("--len is missing").help("say how many queries: --len 4096"));
    };
    let kv_len = args.kv_len.unwrap_or(len);
    let (Some((heads, heads_kv)), Some((dim, dim_v))) = (args.heads, args.dim) else {
        return Err(Failure::usage("--heads and --dim are missing"));
    };
    let names = args.captures.names(len.max(kv_len))?.heads(heads);
    let mut program = Attention::new();
    if let Some(text) = &args.mask {
        let mask = parse_mask(text, &names).map_err(|e| Failure::of_text("the mask", &e))?;
        program = program.mask(mask);
    }
    if let Some(text) = &args.score {
        let score = parse_score(text, &names).map_err(|e| Failure::of_text("the score", &e))?;
        program = program.score(score);
    }
    let mut problem = Problem::shaped(
        args.dtype,
        [args.batch, heads, len, dim],
        [args.batch, heads_kv, kv_len, dim],
        [args.batch, heads_kv, kv_len, dim_v],
    )
    .map_err(|e| Failure::usage(e.to_string()))?;
    if !args.backward {
        problem = problem.forward_only();
    }
    let explanation = program.plan(&problem, &Device::cpu())?.explain();
    if args.json {
        return Ok(out.json(&explanation)?);
    }
    Ok(out.text(&explanation)?)
}
