//! What a plan will do, and why.

use std::fmt;

use foveate_mask::Tiling;
use foveate_problem::{Arrangement, Spec};
use foveate_tensor::count::Count;

use crate::device::Device;
use crate::error::Declined;
use crate::problem::Problem;

/// How a backend runs a problem.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
#[non_exhaustive]
pub struct Execution {
    /// Instruction set that was chosen for this machine; of a GPU its name and architecture.
    pub instructions: String,
    /// Threads of the pool it was asked from; of a GPU its SMs.
    pub threads: usize,
    /// The kernels that run, with their configurations and what they take of the device.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub kernels: Vec<String>,
    /// Kernels that run otherwise than they were planned, and why; of those that have been needed
    /// so far.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Keys that a query sees on average, as the caller stated for the choice of tiles.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mean_kv_len: Option<usize>,
    /// Kernels that do not take the problem, and why.
    #[serde(skip)]
    pub declined: Vec<Declined>,
    /// Copies that a call on host tensors makes.
    #[serde(skip)]
    pub copies: Vec<String>,
    /// Why something is missing here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
    /// The tiles of the forward.
    #[serde(flatten)]
    pub tiling: Tiling,
    /// Workspace of a forward pass in bytes.
    pub forward_bytes: usize,
    /// Workspace of a backward pass in bytes.
    pub backward_bytes: usize,
}

/// What a plan will do. [`fmt::Display`] writes it for people, `serde` for programs.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
#[non_exhaustive]
pub struct Explanation {
    /// The backend that runs the plan.
    pub backend: &'static str,
    /// The device.
    pub device: String,
    /// What declined to run it, with the reasons: backends, and kernels of the one that runs.
    pub declined: Vec<Declined>,
    /// True for varlen operands: sequences one after another in one buffer.
    pub packed: bool,
    /// Batch entries, or sequences of varlen operands.
    pub batch: usize,
    /// Query heads.
    pub heads_q: usize,
    /// Key/value heads.
    pub heads_kv: usize,
    /// Rows of q.
    pub len_q: usize,
    /// Rows of k and v, of the longest batch entry where they lie in pages.
    pub len_k: usize,
    /// Keys of a page where they lie in pages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub page_size: Option<usize>,
    /// Length of a query or key vector.
    pub dim: usize,
    /// Length of a value vector.
    pub dim_v: usize,
    /// The dtype of the operands.
    pub dtype: &'static str,
    /// The mask as it runs: simplified, positions substituted; `None` is all keys.
    pub mask: Option<String>,
    /// The score as it runs; `None` leaves it as it is.
    pub score: Option<String>,
    /// Chance that a probability is dropped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dropout: Option<f32>,
    /// Factor on `q·k`.
    pub scale: f32,
    /// Buffers that the mask and the score capture, and what they have.
    pub captures: Vec<String>,
    /// True when a backward pass was planned for.
    pub backward: bool,
    /// Strides seen, in elements.
    pub strides: [[usize; 4]; 3],
    /// Copies that a call on host tensors makes. Empty: every stride is read in place.
    pub copies: Vec<String>,
    /// How the backend runs it.
    pub execution: Execution,
    /// Multiply-adds counted as two, of a forward pass without a mask.
    pub dense_forward_flops: f64,
    /// The same of a backward pass: five products.
    pub dense_backward_flops: f64,
    /// Operations of a forward pass on live tiles.
    pub live_forward_flops: f64,
    /// Operations of a backward pass on live tiles.
    pub live_backward_flops: f64,
}

impl Explanation {
    pub(crate) fn new(
        backend: &'static str,
        device: &Device,
        problem: &Problem,
        spec: &Spec,
        execution: Execution,
        declined: &[Declined],
    ) -> Self {
        let dims = problem.dims();
        let pairs: f64 = problem
            .sequences()
            .iter()
            .map(|s| dims.heads_q as f64 * s.q_len as f64 * s.k_len as f64)
            .fold(0.0, |all, pairs| all + pairs);
        let (dim, dim_v) = (dims.dim as f64, dims.dim_v as f64);
        let (forward, backward) = (2.0 * (dim + dim_v), 2.0 * (3.0 * dim + 2.0 * dim_v));
        let live = execution.tiling.live_pairs as f64;
        Self {
            backend,
            device: device.to_string(),
            declined: [declined, &execution.declined].concat(),
            packed: dims.packed,
            batch: dims.batch,
            heads_q: dims.heads_q,
            heads_kv: dims.heads_kv,
            len_q: dims.len_q,
            len_k: dims.len_k,
            page_size: match problem.arrangement() {
                Arrangement::Paged { page_size, .. } => Some(page_size),
                Arrangement::Dense | Arrangement::Packed(_) => None,
            },
            dim: dims.dim,
            dim_v: dims.dim_v,
            dtype: problem.dtype().name(),
            mask: spec.mask.as_ref().map(ToString::to_string),
            score: spec.score.as_ref().map(ToString::to_string),
            dropout: spec.dropout.as_ref().map(|d| d.p()),
            scale: spec.scale.unwrap_or(1.0 / (dims.dim as f32).sqrt()),
            captures: captures(spec),
            backward: !problem.is_forward_only(),
            strides: problem.layouts().map(|l| l.strides),
            copies: execution.copies.clone(),
            execution,
            dense_forward_flops: pairs * forward,
            dense_backward_flops: pairs * backward,
            live_forward_flops: live * forward,
            live_backward_flops: live * backward,
        }
    }
}

/// Every buffer of the program under the name that mask and score print it with:
/// `bias: f32 [8, 64], learned`.
fn captures(spec: &Spec) -> Vec<String> {
    let mask = spec.mask.as_ref().map(|m| m.program());
    let score = spec.score.as_ref().map(|s| s.program());
    let mut said = Vec::new();
    for (_, names) in [mask, score].into_iter().flatten().map(|p| p.text()) {
        for (name, buffer) in names.iter().filter_map(|n| Some((n, names.get_buffer(n)?))) {
            let learned = if buffer.learned() { ", learned" } else { "" };
            let (ty, shape) = (buffer.ty(), buffer.shape());
            let bound = match buffer.name() {
                own if own == name => String::new(),
                own => format!(", bound as `{own}`"),
            };
            said.push(format!("{name}: {ty} {shape:?}{learned}{bound}"));
        }
    }
    said.sort();
    said.dedup();
    said
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = |name: &str, text: String| writeln!(f, "{name:<10} {text}");
        let Self { batch, heads_q, heads_kv, len_q, len_k, dim, dim_v, dtype, execution, .. } =
            self;
        line(
            "backend",
            format!(
                "{} on the {}: {}, {}",
                self.backend,
                self.device,
                execution.instructions,
                Count(
                    execution.threads,
                    if execution.kernels.is_empty() { "thread" } else { "SM" }
                )
            ),
        )?;
        let batches = if self.packed { "sequences" } else { "batch" };
        line(
            "problem",
            format!(
                "{batches} {batch}, heads {heads_q}/{heads_kv}, lengths {len_q}/{len_k}, \
                 dims {dim}/{dim_v}, {dtype}, scale {}{}",
                self.scale,
                self.page_size.map_or(String::new(), |n| format!(", keys in pages of {n}"))
            ),
        )?;
        let [q, k, v] = self.strides;
        line("strides", format!("q {q:?}, k {k:?}, v {v:?}"))?;
        let copies = if self.copies.is_empty() { "none".into() } else { self.copies.join(", ") };
        line("copies", copies)?;
        line("mask", self.mask.clone().unwrap_or_else(|| "none".into()))?;
        line("score", self.score.clone().unwrap_or_else(|| "none".into()))?;
        self.dropout.iter().try_for_each(|p| line("dropout", p.to_string()))?;
        if !self.captures.is_empty() {
            line("captures", self.captures.join("; "))?;
        }
        execution.mean_kv_len.iter().try_for_each(|keys| {
            line("live keys", format!("{keys} a query on average, as stated"))
        })?;
        execution.kernels.iter().try_for_each(|kernel| line("kernel", kernel.clone()))?;
        execution.notes.iter().try_for_each(|note| line("note", note.clone()))?;
        execution.trouble.iter().try_for_each(|trouble| line("trouble", trouble.clone()))?;
        let tiling = &execution.tiling;
        line("tiles", tiles(tiling))?;
        if tiling.block_masks > 0 {
            line(
                "block mask",
                format!(
                    "{} in {}, {}; the mask lets {:.1} % of pairs through",
                    Count(tiling.runs as usize, "run"),
                    Count(tiling.block_masks, "mask"),
                    binary(tiling.block_mask_bytes as usize),
                    100.0 * tiling.density
                ),
            )?;
        }
        if tiling.live_pairs == 0 && self.dense_forward_flops > 0.0 && execution.trouble.is_none() {
            line("warning", "the mask lets no query see any key: every output is 0".into())?;
        }
        let flops = |dense: f64, live: f64| format!("{} dense, {} live", si(dense), si(live));
        line("forward", flops(self.dense_forward_flops, self.live_forward_flops))?;
        if self.backward {
            line("backward", flops(self.dense_backward_flops, self.live_backward_flops))?;
        }
        let mut workspace = format!("{} forward", binary(execution.forward_bytes));
        if self.backward {
            workspace += &format!(", {} backward", binary(execution.backward_bytes));
        }
        line("workspace", workspace)?;
        match self.declined.is_empty() {
            true => line("declined", "none".into()),
            false => self
                .declined
                .iter()
                .try_for_each(|d| line("declined", format!("{}: {}", d.backend, d.reason))),
        }
    }
}

/// How many tiles are of which kind, and what is seen of those that are computed.
fn tiles(tiling: &Tiling) -> String {
    let part = |n: usize| 100.0 * n as f64 / tiling.tiles.max(1) as f64;
    let heads = match tiling.tile_heads {
        0 | 1 => String::new(),
        heads => format!(", {heads} heads share a tile"),
    };
    let by_bits = match tiling.bits_tiles {
        0 => String::new(),
        by_bits => format!("{:.1} % partial by mask bits, ", part(by_bits)),
    };
    format!(
        "{} of {} x {}{heads}: {:.1} % full, {by_bits}{:.1} % partial by evaluation, {:.1} % empty; \
         {:.1} % of what live ones compute is seen",
        tiling.tiles,
        tiling.tile_q,
        tiling.tile_kv,
        part(tiling.full_tiles),
        part(tiling.partial_tiles - tiling.bits_tiles),
        part(tiling.tiles - tiling.full_tiles - tiling.partial_tiles),
        100.0 * tiling.seen_pairs as f64 / tiling.live_pairs.max(1) as f64
    )
}

/// Operations for people: `1.07 TFLOP`.
fn si(mut flops: f64) -> String {
    let mut units = ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"].into_iter();
    let mut unit = units.next().expect("there are units");
    while flops >= 1000.0
        && let Some(next) = units.next()
    {
        (flops, unit) = (flops / 1000.0, next);
    }
    format!("{flops:.3} {unit}")
}

/// Bytes for people: `1.5 MiB`.
fn binary(bytes: usize) -> String {
    let mut n = bytes as f64;
    let mut units = ["B", "KiB", "MiB", "GiB", "TiB"].into_iter();
    let mut unit = units.next().expect("there are units");
    while n >= 1024.0
        && let Some(next) = units.next()
    {
        (n, unit) = (n / 1024.0, next);
    }
    format!("{n:.1} {unit}")
}
