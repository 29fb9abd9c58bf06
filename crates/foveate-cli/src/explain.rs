//! `foveate explain`: what would run for a problem that is given by its sizes.
//!
//! Nothing is computed, yet heads are listed and block masks built; what that takes is estimated
//! first.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Duration;

use foveate::mask::{BlockMask, Kind, Tile, Varies};
use foveate::mods::Head;
use foveate::{Device, Dims, MaskMod};

mod budget;
mod kernels;
mod mesh;

pub use kernels::{kernel_options, ordinal, profile, records};

use crate::blind;
use crate::failure::Failure;
use crate::limits::{Forecast, Need};
use crate::number::number;
use crate::output::Output;
use crate::problem::{Given, ProblemArgs};
use crate::progress::{COUNTING, PATIENCE, waiting};

/// Show what would run for a problem given by its sizes
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    problem: ProblemArgs,
    /// Show the GPU kernels for a card, which need not be there: l40s, h200, rtx4090, ...; or
    /// cuda:0 for the one that is
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// Plan for the same bits in every run (with --device)
    #[arg(long, requires = "device")]
    deterministic: bool,
    /// Plan for N live keys a query on average, whatever --mask says (with --device)
    #[arg(long, value_name = "N", allow_negative_numbers = true, requires = "device", value_parser = number::<usize>)]
    mean_kv_len: Option<usize>,
    /// Use a tile size of your own (with --device), such as backward.tile_q=64
    #[arg(long, value_name = "KEY=VALUE", requires = "device")]
    kernel: Vec<String>,
    /// Explain what a recipe takes instead: parameters, memory, attention; no weights or data
    /// are needed
    #[arg(long, value_name = "FILE", conflicts_with_all = ["heads", "dim", "len", "kv_len", "batch", "dtype", "mask", "score", "dropout", "backward", "page_size", "doc_lens", "buffers", "scalars", "deterministic", "mean_kv_len", "kernel"])]
    recipe: Option<PathBuf>,
    /// Override a field of the recipe, such as data.len=4096
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Show what a rank of a mesh takes and sends, such as replicate=2,shard=4 (with --recipe)
    #[arg(long, value_name = "AXES", requires = "recipe", conflicts_with = "device")]
    mesh: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Plans and prints the explanation.
pub fn run(args: &Args, out: &mut Output) -> Result<(), Failure> {
    if args.device.as_deref() == Some("cpu") {
        // Of a recipe, too, what it takes of the CPU is told without a device.
        return Err(Failure::usage(
            "--device cpu: what the CPU runs is explained where no device is given",
        )
        .help("leave --device out"));
    }
    if let Some(path) = &args.recipe {
        let (mesh, device) = (args.mesh.as_deref(), args.device.as_deref());
        return budget::run(path, &args.set, mesh, device, args.problem.limits, args.json, out);
    }
    if !args.set.is_empty() {
        return Err(Failure::usage("--set overrides a field of a recipe, but none is given")
            .help("give --recipe FILE, or leave --set out"));
    }
    // clap does not ask for --recipe where it conflicts with what else is given.
    if args.mesh.is_some() {
        return Err(Failure::usage("--mesh is of a recipe, but none is given")
            .help("give --recipe FILE, or leave --mesh out"));
    }
    let given = args.problem.read()?;
    if let Some(device) = &args.device {
        return kernels::run(args, &given, device, out);
    }
    let plan = given.program().plan(&given.problem, &Device::cpu())?;
    let fewer = "give fewer heads, batch entries or positions";
    args.problem.limits.admit("explaining this problem", need(&given), fewer)?;
    let explanation = waiting(COUNTING, PATIENCE, || plan.explain());
    if args.json {
        // The text says it itself.
        blind::check(&given);
        return Ok(out.json(&explanation)?);
    }
    Ok(out.text(&explanation)?)
}

/// Memory of the lists that a plan makes for a call: of a batch entry, a head of it, and a
/// key/value head of it, forward and backward.
const LIST_BYTES: [f64; 3] = [256.0, 96.0, 128.0];
/// Time to go through a head, and through a row of tiles of a head, in seconds.
const HEAD_SECONDS: [f64; 2] = [2e-7, 1e-8];
/// Points of a mask that are evaluated in a second on one thread.
const POINTS_A_SECOND: f64 = 1e9;
/// How long the block mask of one head is built to see how long it takes.
const PROBE: Duration = Duration::from_millis(400);

/// What explaining a problem on the CPU takes: lists of its heads, and the block masks of those that
/// the mask tells apart.
fn need(given: &Given) -> Need {
    let dims = given.problem.dims();
    let [batch, heads, heads_kv] = [dims.batch, dims.heads_q, dims.heads_kv].map(|n| n as f64);
    let [entry, head, head_kv] = LIST_BYTES;
    let mut need = Need {
        bytes: batch * (entry + heads * head + heads_kv * head_kv),
        seconds: batch * heads * HEAD_SECONDS[0],
    };
    if let Some(mask) = &given.spec.mask {
        let varies = Varies::of(mask);
        let of = |varies: bool, all: f64| if varies { all } else { 1.0 };
        // The forward and the backward have tiles of their own.
        let masks = 2.0 * of(varies.by_batch, batch) * of(varies.by_head, heads);
        let (one, rows) = probe(mask, dims);
        need.bytes += masks * one.bytes;
        need.seconds += masks * one.seconds + batch * heads * rows * HEAD_SECONDS[1];
    }
    need
}

/// What the block mask of one head takes, and its rows of tiles: it is built for [`PROBE`] or
/// until it is done.
fn probe(mask: &MaskMod, dims: &Dims) -> (Need, f64) {
    let (q_len, kv_len) = (dims.len_q, dims.len_k);
    let head = Head { q_len: q_len as i32, kv_len: kv_len as i32, ..Head::default() };
    let tile = Tile { q: 128, kv: 128 };
    let (mut forecast, mut need) = (Forecast::new(), Need::default());
    let built = BlockMask::build_watched(mask, head, q_len, kv_len, tile, &mut |progress| {
        need = forecast.need(progress);
        match progress.done > 0 && forecast.elapsed() > PROBE {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    });
    if let Some(built) = built {
        let points = built.tiles_of(Kind::Partial) as f64 * f64::from(tile.q * tile.kv);
        need.bytes = need.bytes.max(built.bytes() as f64);
        need.seconds = forecast.elapsed().as_secs_f64() + points / POINTS_A_SECOND;
    }
    (need, q_len.div_ceil(tile.q as usize) as f64)
}
