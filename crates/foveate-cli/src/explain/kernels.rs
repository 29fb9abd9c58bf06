//! `foveate explain --device`: which kernels a GPU would run, what they take of it, and which
//! could not run there. No GPU is needed.

use std::fmt;

use foveate::mask::{BlockMask, Tile, Varies};
use foveate::mods::Head;
use foveate::tensor::count::Count;
use foveate_cuda::Records;
use foveate_cuda::aot::{self, Planned, Usage};
use foveate_cuda::choose::{KernelOptions, KernelPlan, admit};
use foveate_cuda::compile::config::{Config, Kernel};
use foveate_gpu::driver;
use foveate_gpu::profile::Profile;
use serde::Serialize;
use serde_json::json;

use super::{Args, probe};
use crate::blind;
use crate::failure::Failure;
use crate::limits::Need;
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
    let of_dq = |given: &&String| given.trim().starts_with("backward_dq.");
    if let Some(given) =
        args.kernel.iter().find(of_dq).filter(|_| plan.config(Kernel::BackwardDq).is_none())
    {
        let message =
            format!("--kernel {given} is of a kernel for dq alone, which this backward has not");
        return Err(Failure::usage(message).help(
            "a deterministic one has it, on Hopper with --kernel backward.ordered_dq=false",
        ));
    }
    let tiles = tiles(args, given, &plan);
    blind::check(given);
    if args.json {
        let told = json!({ "class": class, "sizes": sizes, "tiles": tiles.ok(), "plan": plan });
        return Ok(out.json(&told)?);
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
    match tiles {
        Ok(all) => {
            all.iter().try_for_each(|tiles| out.line(format_args!("tiles      {tiles}")))?;
        }
        Err(long) => {
            out.line(format_args!("tiles      {}; --insist does it", long.message()))?;
        }
    }
    Ok(out.text(&plan)?)
}

/// What the mask makes of a kernel's tiles, or of the cells that it passes over in them, in one head.
#[derive(Debug, Serialize)]
struct Tiles {
    /// The kernel.
    kernel: String,
    /// Queries and keys of a tile.
    tile: [usize; 2],
    /// The same of a cell; a tile of most kernels is one.
    cell: [usize; 2],
    /// Cells, live or not.
    tiles: u64,
    /// Where every query sees every key.
    full: u64,
    /// In which the mask decides.
    partial: u64,
    /// Whether they read its bits, as far as there is room; it is evaluated otherwise.
    by_bits: bool,
    /// Of the pairs that live cells have room for, those that the mask lets through.
    live_share: f64,
    /// The head, where the mask differs by head or batch entry.
    of: Option<&'static str>,
}

impl fmt::Display for Tiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [q, kv] = self.cell;
        let share = |n: u64| 100.0 * n as f64 / self.tiles.max(1) as f64;
        let (full, partial) = (share(self.full), share(self.partial));
        let empty = share(self.tiles - self.full - self.partial);
        write!(f, "{}: {} of {q} x {kv}", self.kernel, self.tiles)?;
        if self.cell != self.tile {
            write!(f, ", cells of tiles of {} x {}", self.tile[0], self.tile[1])?;
        }
        self.of.iter().try_for_each(|of| write!(f, ", {of}"))?;
        let by = if self.by_bits { "mask bits" } else { "evaluation" };
        write!(f, ": {full:.1} % full, {partial:.1} % partial by {by}, {empty:.1} % empty; ")?;
        write!(f, "{:.1} % of what live ones compute is seen", 100.0 * self.live_share)
    }
}

/// The tiles of the kernels that go by the mask; none without one.
///
/// # Errors
/// When counting them takes long.
fn tiles(args: &Args, given: &Given, plan: &KernelPlan) -> Result<Vec<Tiles>, Failure> {
    let Some(mask) = &given.spec.mask else { return Ok(Vec::new()) };
    let dims = given.problem.dims();
    let planned =
        [Kernel::Forward, Kernel::Backward, Kernel::BackwardDq].map(|kernel| plan.config(kernel));
    let planned: Vec<_> = planned.into_iter().flatten().collect();
    let (one, _) = probe(mask, dims);
    let times = planned.len() as f64;
    let need = Need { bytes: one.bytes, seconds: times * one.seconds };
    let (limits, what, fewer) =
        (args.problem.limits, "counting the tiles of this mask", "give fewer positions");
    limits.admit(what, need, fewer)?;
    let varies = Varies::of(mask);
    let of = (varies.by_head || varies.by_batch).then_some("in the first head");
    let head = Head { q_len: dims.len_q as i32, kv_len: dims.len_k as i32, ..Head::default() };
    // A sample may be cheaper than the rest, and building cheaper than counting: both are watched.
    let count = |config: &Config| {
        let tile = [config.queries(), config.tile_kv];
        let cell = [tile[0] / config.cells().0, tile[1]];
        let [q, kv] = cell.map(|n| n as u32);
        let block = limits.watched(what, 0.0, fewer, |watch| {
            BlockMask::build_watched(mask, head, dims.len_q, dims.len_k, Tile { q, kv }, watch)
        })?;
        let stats = limits.watched(what, 0.0, fewer, |watch| block.stats_watched(watch))?;
        let room = (stats.full + stats.partial) as f64 * (cell[0] * cell[1]) as f64;
        Ok(Tiles {
            kernel: config.kernel.to_string(),
            tile,
            cell,
            tiles: stats.tiles,
            full: stats.full,
            partial: stats.partial,
            by_bits: config.mask_bits,
            live_share: if room == 0.0 { 0.0 } else { stats.live_entries as f64 / room },
            of,
        })
    };
    planned.into_iter().map(count).collect()
}

/// The profile called `name`, or that of the GPU `cuda:0`.
pub fn profile(name: &str) -> Result<Profile, Failure> {
    match ordinal(name)? {
        Some(ordinal) => Ok(Profile::of_device(&driver::Device::open(ordinal)?)),
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
