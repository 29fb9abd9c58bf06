//! What a kernel takes of an SM, from its configuration alone.
//!
//! Shared memory is exact: each kernel file states the same sum at its top, computes it, and
//! leaves it in the cubin as `fv_shared_bytes`. Registers are an estimate, and a bound: the sums
//! that a thread keeps, plus what an instruction stream around them was seen to take. A
//! configuration whose sums leave no room would spill, and is not one to choose.

pub(crate) mod hopper;

use std::fmt;

use crate::compile::config::{Config, Elem, Entry, Family, Kernel};
use foveate_gpu::profile::{Profile, REGISTER_UNIT, REGISTERS_PER_THREAD};

/// Bytes of local memory a thread, spills included, that a compiled kernel may take: what takes
/// more is refused. Words that are written outside the loop and read in it once a step cost less
/// than the smaller tile that would do without.
pub const LOCAL_BYTES_ALLOWED: u32 = 40;

/// The same of a kernel that adds dq in order, in whose place two would run: dq alone computes scores again. One with
/// 48 B, of a rank's part of a causal row of 65,536 tokens, took 0.83 of the time of the two on an H200.
const LOCAL_BYTES_IN_ORDER: u32 = 48;

/// Bytes of local memory that a thread of a kernel of this configuration may take.
pub(crate) fn local_bytes_allowed(config: &Config) -> u32 {
    if config.ordered_dq { LOCAL_BYTES_IN_ORDER } else { LOCAL_BYTES_ALLOWED }
}

/// Warps that a CTA can have, on every capability.
pub(crate) const WARPS_PER_CTA: usize = 32;
/// The longest side of a tile that any device has shared memory for: a bound on what a user can ask
/// for, so that what a CTA takes is a number.
const LONGEST_SIDE: usize = 4096;
/// Registers that a CTA can have, on every capability.
const REGISTERS_PER_BLOCK: usize = 1 << 16;
/// Bytes after each row of a tile in shared memory, against bank conflicts.
const PAD: usize = 16;

/// Why a configuration cannot run on a device.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case", tag = "why")]
pub enum Refusal {
    /// The kernel cannot be compiled for these tiles and warps.
    Shape {
        /// Which condition does not hold.
        reason: String,
    },
    /// More shared memory than a CTA can ask for.
    Shared {
        /// Bytes of a CTA.
        bytes: usize,
        /// Bytes that a CTA can ask for.
        limit: usize,
    },
    /// The kernel's family does not take the problem, or not on this device.
    Family {
        /// The family and what it needs.
        reason: String,
    },
    /// More registers than a thread can have: sums would go to memory in every step.
    Registers {
        /// Registers of a thread.
        needed: usize,
        /// Registers that a thread can have.
        limit: usize,
    },
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shape { reason } | Self::Family { reason } => f.write_str(reason),
            Self::Shared { bytes, limit } => {
                write!(f, "{bytes} B of shared memory, a CTA can have {limit}")
            }
            Self::Registers { needed, limit } => {
                write!(f, "{needed} registers a thread, it can have {limit}")
            }
        }
    }
}

/// What one CTA takes.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Resources {
    /// Threads.
    pub threads: usize,
    /// Bytes of dynamic shared memory; there is no other.
    pub shared_bytes: usize,
    /// What the shared memory holds, and bytes of it.
    pub shared: Vec<(&'static str, usize)>,
    /// Registers that a thread takes at most.
    pub registers: usize,
    /// Registers of a thread by its role, where roles deal them out again after the launch.
    pub roles: Vec<(&'static str, usize)>,
    /// Registers that a thread cannot do without: with fewer, numbers go to local memory.
    pub needed: usize,
}

/// What limits the number of CTAs that an SM holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// Shared memory.
    Shared,
    /// Registers.
    Registers,
    /// Threads.
    Threads,
    /// The number of CTAs itself.
    Ctas,
}

/// CTAs that an SM holds at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Occupancy {
    /// Their number.
    pub ctas: usize,
    /// What there is not enough of for another one.
    pub limit: Limit,
}

impl Resources {
    /// What a CTA of `config` takes.
    ///
    /// # Errors
    /// [`Refusal::Shape`] for tiles and warps that the kernel does not take,
    /// [`Refusal::Registers`] when a thread's sums do not fit its registers.
    pub fn of(config: &Config) -> Result<Self, Refusal> {
        match config.family {
            Family::Portable => Self::of_portable(config),
            Family::Hopper => hopper::resources(config),
        }
    }

    fn of_portable(config: &Config) -> Result<Self, Refusal> {
        check_shape(config)?;
        let needed = sums(config) + working(config);
        if needed > REGISTERS_PER_THREAD {
            return Err(Refusal::Registers { needed, limit: REGISTERS_PER_THREAD });
        }
        let shared = shared_memory(config);
        Ok(Self {
            threads: config.threads(),
            shared_bytes: shared.iter().map(|(_, bytes)| bytes).sum(),
            shared,
            registers: register_bound(config),
            roles: Vec::new(),
            needed,
        })
    }

    /// The same, when a CTA fits `profile`.
    ///
    /// # Errors
    /// Those of [`Self::of`], and [`Refusal::Shared`].
    pub fn on(config: &Config, profile: &Profile) -> Result<Self, Refusal> {
        let resources = Self::of(config)?;
        let (bytes, limit) = (resources.shared_bytes, profile.shared_per_block);
        if bytes > limit {
            return Err(Refusal::Shared { bytes, limit });
        }
        Ok(resources)
    }

    /// CTAs that an SM of `profile` holds at once.
    pub fn occupancy(&self, profile: &Profile) -> Occupancy {
        let of_warp = (self.registers * 32).next_multiple_of(REGISTER_UNIT);
        let of_block = of_warp * self.threads.div_ceil(32);
        let shared = self.shared_bytes + profile.shared_reserved;
        let limits = [
            (profile.shared_per_sm / shared.max(1), Limit::Shared),
            (profile.registers_per_sm / of_block.max(1), Limit::Registers),
            (profile.threads_per_sm / self.threads.max(1), Limit::Threads),
            (profile.ctas_per_sm, Limit::Ctas),
        ];
        let (ctas, limit) = limits.into_iter().min_by_key(|(n, _)| *n).expect("four limits");
        Occupancy { ctas, limit }
    }
}

/// Bytes of shared memory that a CTA of `entry` asks for, in the file of a kernel that takes
/// `kernel`.
pub fn shared_bytes_of(entry: Entry, kernel: &Resources) -> u32 {
    match entry {
        // An f32 for each of its warps.
        Entry::SinkGradient => 128,
        Entry::CaptureSums | Entry::DqRanks | Entry::MaskBits => 0,
        Entry::Forward
        | Entry::Combine
        | Entry::Delta
        | Entry::RowWeightSum
        | Entry::Backward
        | Entry::BackwardDq
        | Entry::Dq
        | Entry::GroupSums
        | Entry::BlockLists
        | Entry::RangeTable
        | Entry::Sequences
        | Entry::TransposeValues => kernel.shared_bytes as u32,
    }
}

fn check_shape(config: &Config) -> Result<(), Refusal> {
    let Config { tile_q, tile_kv, warps, stages, .. } = *config;
    let shape = |reason: String| Err(Refusal::Shape { reason });
    if !(1..=WARPS_PER_CTA).contains(&warps) {
        return shape(format!("{warps} warps; a CTA has 1 to {WARPS_PER_CTA}"));
    }
    let is_side = |n: usize| n.is_multiple_of(16) && (16..=LONGEST_SIDE).contains(&n);
    if let Some(side) = [tile_q, tile_kv].into_iter().find(|side| !is_side(*side)) {
        return shape(format!(
            "a side of {side}; both sides of a tile are multiples of 16 up to {LONGEST_SIDE}"
        ));
    }
    if !(1..=2).contains(&stages) {
        return shape(format!("{stages} stages; a kernel has 1 or 2"));
    }
    if config.kernel.has_tiles() && config.dtype == Elem::E4m3 {
        let reason = "portable: f8e4m3 operands; the hopper family takes them".to_owned();
        return Err(Refusal::Family { reason });
    }
    match config.kernel {
        Kernel::Forward if tile_q % (16 * warps) != 0 => shape(format!(
            "{warps} warps cannot share {tile_q} queries; each takes a multiple of 16"
        )),
        Kernel::Backward | Kernel::BackwardDq
            if Warps::divide(warps, tile_q, tile_kv, true).is_none() =>
        {
            shape(format!(
                "{warps} warps cannot share tile {tile_q}x{tile_kv} evenly, in rectangles of \
                 multiples of 16x8"
            ))
        }
        Kernel::Forward
        | Kernel::Combine
        | Kernel::Delta
        | Kernel::RowWeightSum
        | Kernel::Backward
        | Kernel::BackwardDq
        | Kernel::Dq
        | Kernel::GroupSums
        | Kernel::BlockLists
        | Kernel::RangeTable
        | Kernel::Sequences
        | Kernel::TransposeValues => Ok(()),
    }
}

/// Bytes of a row of `elems` elements in shared memory.
fn row(elems: usize, dtype: Elem) -> usize {
    elems * dtype.bytes() + PAD
}

/// The sum at the top of each kernel file, term by term.
fn shared_memory(config: &Config) -> Vec<(&'static str, usize)> {
    let Config { tile_q, tile_kv, warps, stages, dtype, .. } = *config;
    let (row_k, row_v) = (row(config.padded_dim(), dtype), row(config.padded_dim_v(), dtype));
    let row_p = row(tile_kv, dtype);
    let mut tiles = match config.kernel {
        Kernel::Forward => {
            vec![("q", tile_q * row_k), ("k, v", stages * tile_kv * (row_k + row_v))]
        }
        Kernel::Backward => vec![
            ("k, v", tile_kv * (row_k + row_v)),
            ("q, d_out, lse, delta", stages * tile_q * (row_k + row_v + 8)),
            ("p, ds", 2 * tile_q * row_p),
            ("meetings", 64),
        ],
        Kernel::BackwardDq => vec![
            ("q, d_out, lse, delta", tile_q * (row_k + row_v + 8)),
            ("k, v", stages * tile_kv * (row_k + row_v)),
            ("ds", tile_q * row_p),
            ("meetings", 64),
        ],
        Kernel::RowWeightSum => vec![("q, k", (tile_q + tile_kv) * row_k)],
        Kernel::Sequences => vec![("scans", 4 * warps)],
        Kernel::TransposeValues => vec![("v", 64 * (config.dim_v.div_ceil(4) | 1) * 4)],
        Kernel::Combine => vec![("shares", warps * config.dim_v.div_ceil(64) * 256)],
        Kernel::Delta
        | Kernel::Dq
        | Kernel::GroupSums
        | Kernel::BlockLists
        | Kernel::RangeTable => vec![],
    };
    // Gradients leave through what held tiles, 16 rows of each warp's accumulators at a time.
    let columns = |m, dim| Warps::divide(warps, m, dim, false).map_or(0, |w| w.columns);
    let columns = match config.kernel {
        Kernel::Backward => {
            columns(tile_kv, config.padded_dim()).max(columns(tile_kv, config.padded_dim_v()))
        }
        Kernel::BackwardDq => columns(tile_q, config.padded_dim()),
        Kernel::Forward
        | Kernel::Combine
        | Kernel::Delta
        | Kernel::RowWeightSum
        | Kernel::Dq
        | Kernel::GroupSums
        | Kernel::BlockLists
        | Kernel::RangeTable
        | Kernel::Sequences
        | Kernel::TransposeValues => return tiles,
    };
    let held: usize = tiles.iter().map(|(_, bytes)| bytes).sum();
    let leaving = warps * 16 * (columns + 1) * 32;
    if leaving > held {
        tiles.push(("gradients on their way out", leaving - held));
    }
    tiles
}

/// How the warps of a CTA divide a product of two tiles: `down` x `across` rectangles of
/// `rows` x `columns` accumulators, each 16 rows x 8 columns. As `divide` in `device.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Warps {
    pub down: usize,
    pub across: usize,
    pub rows: usize,
    pub columns: usize,
}

impl Warps {
    /// The division of m rows and n columns with the fewest operand bytes read, the taller where
    /// two are equal. `None` when `even` is asked for and there is none.
    pub fn divide(warps: usize, m: usize, n: usize, even: bool) -> Option<Self> {
        let fits = |&down: &usize| {
            let across = warps / down;
            warps.is_multiple_of(down)
                && (m / 16).is_multiple_of(down)
                && (!even || (n / 8).is_multiple_of(across))
        };
        let split = |down: usize| {
            let across = warps / down;
            Self { down, across, rows: m / 16 / down, columns: (n / 8).div_ceil(across) }
        };
        // The last of equals: `min_by_key` keeps the first.
        (1..=warps).rev().filter(fits).map(split).min_by_key(|w| 2 * w.rows + w.columns)
    }

    /// Sums of a thread.
    fn sums(self) -> usize {
        self.rows * self.columns * 4
    }
}

/// Registers beside sums: addresses, operands on their way, loop counters. From what NVRTC 13.0
/// reports of configurations just below and just above where they begin to spill.
fn working(config: &Config) -> usize {
    match config.kernel {
        Kernel::Forward => {
            let rows = config.tile_q / 16 / config.warps;
            // Copies of rows that do not divide the CTA evenly keep more addresses.
            let even = |dim: usize| (dim * config.dtype.bytes()).is_power_of_two();
            let uneven = !(even(config.padded_dim()) && even(config.padded_dim_v()));
            let of_row = [(config.score, 8), (uneven, 14), (config.dtype == Elem::F32, 8)];
            let of_row: usize = of_row.iter().filter(|(on, _)| *on).map(|(_, n)| n).sum();
            20 + rows * (8 + config.tile_kv / 32 + of_row) + 4 * usize::from(config.dropout)
        }
        Kernel::Combine
        | Kernel::Delta
        | Kernel::RowWeightSum
        | Kernel::Backward
        | Kernel::BackwardDq
        | Kernel::Dq
        | Kernel::GroupSums
        | Kernel::BlockLists
        | Kernel::RangeTable
        | Kernel::Sequences
        | Kernel::TransposeValues => {
            if config.dtype == Elem::F32 {
                52
            } else {
                44
            }
        }
    }
}

/// Registers of numbers that a thread of the kernel keeps at once, where there are most.
fn sums(config: &Config) -> usize {
    let Config { tile_q, tile_kv, warps, .. } = *config;
    let (dim, dim_v) = (config.padded_dim(), config.padded_dim_v());
    let divide = |m, n| Warps::divide(warps, m, n, false).map_or(0, Warps::sums);
    let of_scores = Warps::divide(warps, tile_q, tile_kv, true).map_or(0, Warps::sums);
    match config.kernel {
        Kernel::Forward => {
            let rows = tile_q / 16 / warps;
            let scores_and_out = rows * (tile_kv + dim_v) / 2;
            if config.dtype == Elem::F32 {
                // Probabilities as operands, each split in two.
                return scores_and_out + rows * tile_kv / 2;
            }
            // `Q_IN_REGISTERS` of forward_device.cuh.
            let held = scores_and_out + rows * dim / 4;
            if held <= 192 { held } else { scores_and_out }
        }
        Kernel::Backward => {
            let kept = divide(tile_kv, dim) + divide(tile_kv, dim_v);
            // Scores and their gradients. Captured buffers need the scores as they were, and the
            // weights apart from them, if the score has a derivative.
            let scores = of_scores * if config.captures && config.dscore { 4 } else { 2 };
            let scores = scores + if config.dropout { of_scores / 2 } else { 0 };
            let of_dq = if config.separate_dq { 0 } else { divide(tile_q, dim) };
            kept + scores.max(of_dq)
        }
        Kernel::BackwardDq => divide(tile_q, dim) + 2 * of_scores,
        Kernel::RowWeightSum => tile_kv / 2,
        Kernel::Combine
        | Kernel::Delta
        | Kernel::Dq
        | Kernel::GroupSums
        | Kernel::BlockLists
        | Kernel::RangeTable
        | Kernel::Sequences
        | Kernel::TransposeValues => 0,
    }
}

/// Registers that the compiler takes at most: it uses spare ones to begin loads early.
fn register_bound(config: &Config) -> usize {
    let sums = sums(config);
    let bound = match config.kernel {
        Kernel::Combine
        | Kernel::Delta
        | Kernel::Dq
        | Kernel::GroupSums
        | Kernel::BlockLists
        | Kernel::RangeTable
        | Kernel::Sequences
        | Kernel::TransposeValues => 96,
        Kernel::Forward | Kernel::RowWeightSum | Kernel::Backward | Kernel::BackwardDq => {
            match config.dtype {
                Elem::F32 => sums * 2 + 80,
                Elem::F16 | Elem::Bf16 | Elem::E4m3 => sums * 3 / 2 + 56,
            }
        }
    };
    let of_block = REGISTERS_PER_BLOCK / config.threads() / 8 * 8;
    bound.next_multiple_of(8).min(of_block).min(REGISTERS_PER_THREAD)
}
