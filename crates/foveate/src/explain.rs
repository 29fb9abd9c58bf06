//! What a plan will do, and why.

use std::fmt;

use foveate_problem::Spec;

use crate::device::Device;
use crate::error::Declined;
use crate::problem::Problem;

/// How a backend runs a problem.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
#[non_exhaustive]
pub struct Work {
    /// Instruction set that was chosen for this machine.
    pub instructions: &'static str,
    /// Threads of the pool it was asked from.
    pub threads: usize,
    /// Queries in a tile.
    pub tile_q: usize,
    /// Keys in a tile.
    pub tile_kv: usize,
    /// Tiles of all heads, live or not.
    pub tiles: usize,
    /// Tiles where every query sees every key.
    pub full_tiles: usize,
    /// Tiles inside which the mask decides.
    pub partial_tiles: usize,
    /// Runs of tiles in the block masks, each a few bytes.
    pub runs: usize,
    /// Block masks that batch entries and heads share; 0 without a mask.
    pub block_masks: usize,
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
    /// Candidates that declined, with their reasons.
    pub declined: Vec<Declined>,
    /// Batch entries, or sequences of packed operands.
    pub batch: usize,
    /// Query heads.
    pub heads_q: usize,
    /// Key/value heads.
    pub heads_kv: usize,
    /// Rows of q.
    pub len_q: usize,
    /// Rows of k and v.
    pub len_k: usize,
    /// Length of a query or key vector.
    pub dim: usize,
    /// Length of a value vector.
    pub dim_v: usize,
    /// The dtype of the operands.
    pub dtype: &'static str,
    /// Strides seen, in elements.
    pub strides: [[usize; 4]; 3],
    /// Copies of operands that the plan makes. Empty: every stride is read in place.
    pub copies: Vec<String>,
    /// How the backend runs it.
    pub work: Work,
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
        _spec: &Spec,
        work: Work,
        declined: &[Declined],
    ) -> Self {
        let dims = problem.dims();
        let pairs: f64 = problem
            .sequences()
            .iter()
            .map(|s| dims.heads_q as f64 * s.q_len as f64 * s.k_len as f64)
            .sum();
        let (dim, dim_v) = (dims.dim as f64, dims.dim_v as f64);
        let (forward, backward) = (2.0 * (dim + dim_v), 2.0 * (3.0 * dim + 2.0 * dim_v));
        let live = if work.tiles == 0 {
            1.0
        } else {
            (work.full_tiles + work.partial_tiles) as f64 / work.tiles as f64
        };
        Self {
            backend,
            device: device.to_string(),
            declined: declined.to_vec(),
            batch: dims.batch,
            heads_q: dims.heads_q,
            heads_kv: dims.heads_kv,
            len_q: dims.len_q,
            len_k: dims.len_k,
            dim: dims.dim,
            dim_v: dims.dim_v,
            dtype: problem.dtype().name(),
            strides: problem.layouts().map(|l| l.strides),
            copies: Vec::new(),
            work,
            dense_forward_flops: pairs * forward,
            dense_backward_flops: pairs * backward,
            live_forward_flops: pairs * forward * live,
            live_backward_flops: pairs * backward * live,
        }
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "backend   {} on the {}", self.backend, self.device)
    }
}
