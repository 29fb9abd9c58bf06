//! What a kernel of the Hopper family takes of an SM, and which configurations there are.
//!
//! A CTA has the SM to itself: as many threads as the 65,536 registers are dealt out to,
//! and shared memory up to the limit. The roles deal the registers out again (`setmaxnreg`), so
//! what a consumer can have is more than what the launch gives every thread.

use super::{Refusal, Resources};
use crate::compile::config::{Config, Count, Elem, Family, HeadDims, Kernel};

/// Bytes of shared memory that a CTA can have on compute capability 9.0.
const SHARED_LIMIT: usize = 232_448;
/// Bytes of items, steps and mbarriers.
const END_BYTES: usize = 1024;
/// Columns of a product, which the sums of P V are as wide as.
const MOST_DIM: usize = 256;
/// Bytes of a row of a panel.
const PANEL_ROW: usize = 128;

/// Registers of a consumer's thread, by consumers: `CONSUMER_REGISTERS` of the kernels' files.
const CONSUMER_REGISTERS: [usize; 3] = [256, 232, 160];
/// The same of a producer's: `PRODUCER_REGISTERS`.
const PRODUCER_REGISTERS: [usize; 3] = [56, 40, 32];
/// Registers of a consumer beside sums and weights: statistics of its rows, addresses, a mask's or a
/// score's own numbers.
const WORKING: usize = 32;
/// The same in the backward, whose constants are few and pinned.
const WORKING_BACKWARD: usize = 24;

/// Bytes of the least `cp.async`.
pub(crate) const LEAST_COPY: usize = 4;
/// Numbers that a backward writes of a row at a time, all of which are the row's.
const ROW_UNIT: usize = 8;

/// Problems that the family does not compute, in words for planner and resource model alike.
const NO_F32: &str = "f32 operands; no products of f32";
const NO_E4M3: &str = "f8e4m3 operands; it has a forward of them";
pub(crate) const NO_PACKED_GQA: &str = "few queries, whose heads share a tile";

/// Why the family has no `kernel` of operands of `dtype`, where it has none.
pub(crate) fn refused_dtype(dtype: Elem, kernel: Kernel) -> Option<&'static str> {
    match dtype {
        Elem::F32 => Some(NO_F32),
        Elem::E4m3 if kernel != Kernel::Forward => Some(NO_E4M3),
        Elem::E4m3 | Elem::F16 | Elem::Bf16 => None,
    }
}

/// Why the family has no `kernel` of rows of `dim` and `dim_v` numbers, where it has none.
pub(crate) fn refused_dims(kernel: Kernel, dim: usize, dim_v: usize) -> Option<String> {
    let dims = HeadDims(dim, dim_v);
    if dim.max(dim_v) > MOST_DIM {
        return Some(format!("head dim {dims}; it takes those up to {MOST_DIM}"));
    }
    let whole = kernel.is_of_forward() || [dim, dim_v].iter().all(|d| d.is_multiple_of(ROW_UNIT));
    (!whole).then(|| format!("head dim {dims}; its backward takes multiples of {ROW_UNIT}"))
}

/// What a CTA of `config` takes.
///
/// # Errors
/// [`Refusal::Family`] for what the family does not compute, [`Refusal::Shape`] for tiles that its
/// warpgroups do not have, [`Refusal::Registers`] when a consumer's sums do not fit.
pub(super) fn resources(config: &Config) -> Result<Resources, Refusal> {
    check(config)?;
    let consumers = config.warps / 4 - 1;
    let beside = if config.kernel.is_of_forward() { WORKING } else { WORKING_BACKWARD };
    let needed = numbers(config) + beside;
    let [producers, limit] = match has_many_sums(config) {
        true => [24, 240],
        false => [PRODUCER_REGISTERS[consumers - 1], CONSUMER_REGISTERS[consumers - 1]],
    };
    if needed > limit {
        return Err(Refusal::Registers { needed, limit });
    }
    let shared = shared_memory(config);
    Ok(Resources {
        threads: config.threads(),
        shared_bytes: shared.iter().map(|(_, bytes)| bytes).sum(),
        shared,
        registers: (65_536 / config.threads() / 8 * 8).min(255),
        roles: vec![("producers", producers), ("consumers", limit)],
        // Words of mask bits are among what is beside: where they are too many, without them there may be enough.
        needed: needed + mask_words(config),
    })
}

/// `MANY_SUMS` of the kernel of dq: consumers have registers that producers would need.
fn has_many_sums(config: &Config) -> bool {
    let sums = config.padded_dim() / 2 + config.tile_kv * 5 / 4;
    config.kernel.makes_dq_alone() && sums > 200
}

/// Words of mask bits that a consumer's thread keeps in a step: `mask_words` of the kernels, of a tile of queries in the
/// backward.
fn mask_words(config: &Config) -> usize {
    let across = if config.kernel.owns_keys() { config.tile_q } else { config.tile_kv };
    if config.mask_bits { across.div_ceil(64) } else { 0 }
}

/// Numbers that a consumer's thread keeps at once, where there are most.
fn numbers(config: &Config) -> usize {
    let Config { tile_q, tile_kv, .. } = *config;
    if config.kernel.is_of_forward() {
        // Scores, out, and the weights of the step before.
        return (tile_kv + config.padded_dim_v()) / 2 + tile_kv * config.dtype.bytes() / 8;
    }
    if config.kernel.makes_dq_alone() {
        // dQ, scores and dP, and dS of the step before as an operand; with a derivative its product with
        // the weights later.
        let beside = if config.dscore { tile_kv / 2 } else { tile_kv / 4 };
        return config.padded_dim() / 2 + tile_kv + beside;
    }
    if config.is_wide_backward() {
        // Of one consumer dV, scores, with a derivative also the weights, and these as an operand; of the
        // other dK, dP, its product with what the first one hands over, and that as an operand.
        let sums = config.padded_dim().max(config.padded_dim_v()) / 2;
        return sums + tile_q + tile_q / 4;
    }
    // dK and dV, weights and dP. With a derivative, its product with the weights, and these rounded
    // as an operand; for the gradients of captured buffers, which the derivative of each term may
    // need, also the scores as they were.
    let kept = (config.padded_dim() + config.padded_dim_v()) / 2;
    let of_scores = tile_q / 2;
    let rounded = usize::from(config.dscore) * of_scores / 2;
    kept + 2 * of_scores + rounded + usize::from(config.dscore && config.captures) * of_scores
}

fn check(config: &Config) -> Result<(), Refusal> {
    let family = |reason: &str| Err(Refusal::Family { reason: format!("hopper: {reason}") });
    if !Family::Hopper.has(config.kernel) {
        return family("it has no such kernel");
    }
    if let Some(reason) = refused_dims(config.kernel, config.dim, config.dim_v) {
        return family(&reason);
    }
    if let Some(reason) = refused_dtype(config.dtype, config.kernel) {
        return family(reason);
    }
    if config.pack_gqa {
        return family(NO_PACKED_GQA);
    }
    if config.kv_split {
        return family("split-KV");
    }
    if config.align != 16 && config.kernel != Kernel::Forward {
        return family("rows that are not aligned to 16 B");
    }
    if config.copied.any() && config.align < LEAST_COPY {
        return family("copies of rows that are not aligned to 4 B");
    }
    if config.is_wide_backward() {
        if config.captures {
            return family("gradients of captured buffers at head dims above 128");
        }
        if config.mask_bits {
            return family("mask bits in a backward at head dims above 128");
        }
    }
    check_tiles(config).map_err(|reason| Refusal::Shape { reason })
}

/// Whether the kernel is written for such tiles. Each reason has the numbers that are wrong and no others, so that
/// one of several candidates is told once.
fn check_tiles(config: &Config) -> Result<(), String> {
    let Config { tile_q, tile_kv, warps, stages, .. } = *config;
    let owns_keys = config.kernel.owns_keys();
    if config.kernel == Kernel::Forward {
        let consumers = match warps {
            8 | 12 | 16 => warps / 4 - 1,
            _ => {
                return Err(format!(
                    "{warps} warps; hopper has 8, 12 or 16, four of them producers and four each of 1 \
                     to 3 consumers"
                ));
            }
        };
        if tile_q != 64 * consumers {
            let consumers = Count(consumers, "consumer");
            return Err(format!("{tile_q} queries; of {consumers} each owns 64"));
        }
    } else if config.is_wide_backward() {
        if warps != 12 || (tile_q, tile_kv) != (64, 64) {
            return Err(format!(
                "tile {tile_q}x{tile_kv}, {warps} warps; hopper has 64x64 and 12 at head dims above \
                 128, where two consumers have dk and dv of the same keys"
            ));
        }
        if !config.separate_dq || config.ordered_dq {
            return Err("hopper leaves dq to a kernel of its own at head dims above 128".into());
        }
    } else {
        let (own, what) = if owns_keys { (tile_kv, "keys") } else { (tile_q, "queries") };
        if warps != 12 || own != 128 {
            return Err(format!(
                "{own} {what}, {warps} warps; hopper has 12, of which two consumers own 64 {what} each"
            ));
        }
    }
    if owns_keys {
        if tile_q != 64 && tile_q != 128 {
            return Err(format!("{tile_q} queries; hopper takes 64 or 128 queries"));
        }
    } else {
        let unit = if config.dtype == Elem::E4m3 { 64 } else { 16 };
        let most = if config.kernel == Kernel::Forward { 256 } else { 128 };
        if !tile_kv.is_multiple_of(unit) || !(32..=most).contains(&tile_kv) {
            return Err(format!(
                "{tile_kv} keys; hopper takes multiples of {unit} keys from 32 to {most}"
            ));
        }
    }
    if !(2..=4).contains(&stages) {
        return Err(format!("{}; hopper has 2 to 4", Count(stages, "stage")));
    }
    Ok(())
}

/// The sum at the top of the kernel's layout in `kernels/hopper`, term by term.
fn shared_memory(config: &Config) -> Vec<(&'static str, usize)> {
    let row = |dim: usize| (dim * config.dtype.bytes()).next_multiple_of(PANEL_ROW);
    // Of e4m3 values lie with keys along their rows.
    let row_v = match config.dtype {
        Elem::E4m3 => config.padded_dim_v(),
        Elem::F16 | Elem::Bf16 | Elem::F32 => row(config.dim_v),
    };
    let row_k = row(config.dim);
    let Config { tile_q, tile_kv, stages, .. } = *config;
    if config.is_wide_backward() {
        return vec![
            ("k, v", tile_kv * (row_k + row_v)),
            ("q, d_out", stages * tile_q * (row_k + row_v)),
            ("p", tile_q * tile_kv * 4 + 512),
            ("lse, delta", stages * tile_q * 8),
            ("steps, barriers", END_BYTES),
        ];
    }
    if config.kernel.owns_keys() {
        return vec![
            ("k, v", tile_kv * (row_k + row_v)),
            ("q, d_out", stages * tile_q * (row_k + row_v)),
            ("ds", 2 * tile_q * tile_kv * 2),
            ("dq", if config.separate_dq { 0 } else { tile_q * config.padded_dim() * 4 }),
            ("lse, delta", if tile_q == 64 { stages } else { 2 } * tile_q * 8),
            ("steps, barriers", END_BYTES),
        ];
    }
    if config.kernel.makes_dq_alone() {
        let fixed = vec![
            ("q, d_out", tile_q * (row_k + row_v)),
            ("lse, delta", tile_q * 8),
            ("steps, barriers", END_BYTES),
        ];
        let taken: usize = fixed.iter().map(|(_, bytes)| bytes).sum();
        let fits = taken + stages * tile_kv * (row_k + row_v) <= SHARED_LIMIT;
        let stages_v = if fits { stages } else { stages - 1 };
        let keys = [("k", stages * tile_kv * row_k), ("v", stages_v * tile_kv * row_v)];
        return fixed.into_iter().chain(keys).collect();
    }
    let keys = config.stages * config.tile_kv * (row_k + row_v);
    let queries = config.tile_q * row_k;
    let fits = 2 * queries + keys + END_BYTES <= SHARED_LIMIT;
    vec![
        ("q", if fits { 2 * queries } else { queries }),
        ("k, v", keys),
        ("items, steps, barriers", END_BYTES),
    ]
}
