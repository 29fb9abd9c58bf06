//! Modelled time of a launch, to rank configurations that fit.
//!
//! One step of a CTA (a tile of queries against a tile of keys) takes so many cycles of the
//! tensor cores, of shared memory, of the units for powers, and of the path to L2. CTAs on one SM
//! share these units, so a round in which each makes a step takes as long as the busiest unit, but
//! never less than one CTA alone needs for its own chain of dependent parts. Launches are waves of
//! such rounds.
//!
//! The model is there to rank, within one kernel and one device. It knows nothing of clocks under
//! load, caches that overflow, or masks.

use super::class::{Class, Sizes};
use crate::compile::config::{Config, Elem, Family, Kernel};
use crate::compile::resources::{Resources, Warps};
use foveate_gpu::profile::Profile;

/// Bytes of shared memory that an SM reads or writes in a cycle.
const SHARED_PER_CYCLE: f64 = 128.0;
/// Powers that an SM computes in a cycle.
const POWERS_PER_CYCLE: f64 = 16.0;
/// Instructions for one score beside its power: scaling, maximum, sum, rounding.
const SCORE_CYCLES: f64 = 8.0 / 128.0;
/// Cycles of one score that a mask or a score function adds.
const MOD_CYCLES: f64 = 8.0 / 128.0;
/// Bytes of f32 sums that an SM adds to in L2 in a cycle.
const ADDED_PER_CYCLE: f64 = 32.0;
/// Operations that `mma.sync` does in a cycle of an SM at most: from Hopper on the peak
/// needs other instructions.
const MMA_PER_CYCLE: f64 = 2600.0;
/// Operations that `wgmma` does in a cycle of an SM.
const WGMMA_PER_CYCLE: f64 = 4096.0;
/// The part of the time of powers that does not run beside products, in the forward of the Hopper
/// family.
const POWERS_ALONE: f64 = 0.75;
/// The same of its backward, where it stands for all that is done with scores, as a multiple of the
/// time of powers.
const SCORES_ALONE: f64 = 2.6;
/// Cycles that a step waits for its copies and barriers, by stages.
const WAITS: [f64; 2] = [1100.0, 800.0];
/// Cycles of a step for each row of its tile of queries, however many keys there are: maxima and
/// sums over lanes.
const ROW_CYCLES: f64 = 2.0;
/// Cycles of a step in which units idle because nothing is issued to them: starting copies, finding
/// the next tile, barriers.
const ISSUED: f64 = 200.0;
/// Cycles of a CTA in its prologue and its epilogue.
const ENDS: f64 = 3000.0;

/// Microseconds of a launch that does little, behind another.
const LAUNCH_US: f64 = 3.0;
/// The part of all pairs from which on a mask is taken to be like a causal one, whose items are of all sizes.
const LIKE_CAUSAL: f64 = 0.3;
/// The part of the time of items of whole groups that those of query heads may take to be preferred.
const WORTH_SPLITTING: f64 = 0.9;

/// Keys of a KV split below which joining costs more than it gains.
const LEAST_KEYS_OF_SPLIT: usize = 256;

/// Cycles of one step by unit.
struct Step {
    tensor: f64,
    shared: f64,
    scores: f64,
    sums: f64,
}

/// Whether the tiles of a launch are too few for all SMs while smaller ones are not. The Hopper family was measured on
/// fewer at head dims above 64, and not on fewer than these: its backward was 1.25 times as fast on 64 of 132 SMs as
/// the portable one on all of them, and its forward on 112 of them 2.9 times.
pub fn leaves_idle(profile: &Profile, config: &Config, sizes: &Sizes) -> bool {
    let wide = config.family == Family::Hopper && config.dim.max(config.dim_v) > 64;
    let least = match config.kernel {
        Kernel::Forward if wide => profile.sms * 112 / 132,
        kernel if wide && kernel.owns_keys() => profile.sms * 64 / 132,
        _ => profile.sms,
    };
    ctas(config, sizes) < least
}

/// CTAs of a launch.
pub fn ctas(config: &Config, sizes: &Sizes) -> usize {
    let tiles = match config.kernel.owns_keys() {
        true if config.split_gqa => sizes.keys.div_ceil(config.tile_kv) * sizes.heads_q,
        true => sizes.keys.div_ceil(config.tile_kv) * sizes.heads_kv,
        false => sizes.queries.div_ceil(config.queries()) * (sizes.heads_q / config.heads()),
    };
    tiles * sizes.batch
}

/// KV splits of a forward: more than one where tiles of queries alone leave SMs
/// idle; `resident` of them are on one at a time.
pub fn kv_splits(profile: &Profile, config: &Config, resident: usize, sizes: &Sizes) -> usize {
    match config.family {
        Family::Portable => {}
        Family::Hopper => return 1,
    }
    let ctas = ctas(config, sizes);
    let slots = profile.sms * resident.max(1);
    let most = sizes.keys / LEAST_KEYS_OF_SPLIT;
    if ctas == 0 || 2 * ctas > slots { 1 } else { (slots / ctas).min(most).max(1) }
}

/// Microseconds of a launch without a mask.
pub fn time_us(profile: &Profile, config: &Config, resources: &Resources, sizes: &Sizes) -> f64 {
    let steps = steps(config, sizes);
    let resident = resources.occupancy(profile).ctas.max(1);
    let kv_splits = match config.kernel.shares_keys() {
        true => kv_splits(profile, config, resident, sizes),
        false => 1,
    };
    let steps = steps.div_ceil(kv_splits) as f64;
    let ctas = ctas(config, sizes) * kv_splits;
    match config.family {
        Family::Portable => {
            let cycles = portable_cycles(profile, config, steps, ctas, resident);
            (cycles / profile.clock_mhz).hypot(reading_us(profile, config, sizes))
        }
        Family::Hopper => {
            let item = hopper_item_us(profile, config, steps);
            turns(ctas, profile) * item + group_sums_us(profile, config, sizes)
        }
    }
}

/// Steps of a CTA, or of an item, without a mask.
fn steps(config: &Config, sizes: &Sizes) -> usize {
    let heads = if config.split_gqa { 1 } else { config.group };
    match config.kernel.owns_keys() {
        true => heads * sizes.queries.div_ceil(config.tile_q),
        false => sizes.keys.div_ceil(config.tile_kv),
    }
}

/// Whether query heads should have items of their own in the Hopper family's backward of `config`, where those of a
/// group have one together: where SMs wait for the heaviest of these for longer than it takes to add up what heads
/// give.
pub fn splits_gqa(profile: &Profile, config: &Config, class: &Class, sizes: &Sizes) -> bool {
    if !class.can_split_gqa(config.kernel) || config.family != Family::Hopper {
        return false;
    }
    let split = Config { split_gqa: true, ..config.clone() };
    let [whole, split] = [config, &split].map(|config| backward_us(profile, config, sizes));
    split < WORTH_SPLITTING * whole
}

/// Microseconds of the Hopper family's backward under a mask that leaves [`Sizes::mean_kv_len`], with what adds up
/// the gradients of query heads.
fn backward_us(profile: &Profile, config: &Config, sizes: &Sizes) -> f64 {
    let (steps, items) = (steps(config, sizes) as f64, ctas(config, sizes));
    let live = sizes.mean_kv_len as f64 / sizes.keys.max(1) as f64;
    let mean = hopper_item_us(profile, config, steps * live);
    let even = turns(items, profile) * mean;
    // Under a mask like causal the heaviest items are as without a mask, and light ones fill the gaps at the end.
    let time = match (LIKE_CAUSAL..1.0).contains(&live) {
        true => {
            let on_all = mean * items as f64 / profile.sms as f64;
            hopper_item_us(profile, config, steps).max(on_all)
        }
        false => even,
    };
    time + group_sums_us(profile, config, sizes)
}

/// Microseconds of adding up the gradients of keys that query heads have of their own: they are written and read in
/// f32.
fn group_sums_us(profile: &Profile, config: &Config, sizes: &Sizes) -> f64 {
    if !config.split_gqa {
        return 0.0;
    }
    let numbers = sizes.batch * sizes.heads_q * sizes.keys * (config.dim + config.dim_v);
    LAUNCH_US + (2 * 4 * numbers) as f64 / profile.bandwidth_gbs * 1e-3
}

/// How often an SM takes an item, where all are alike.
fn turns(items: usize, profile: &Profile) -> f64 {
    let turns = items as f64 / profile.sms as f64;
    if turns < 4.0 { turns.ceil() } else { turns }
}

/// Cycles of `ctas` of the portable family that have `steps` steps each, `resident` of them on an SM
/// at a time.
fn portable_cycles(
    profile: &Profile,
    config: &Config,
    steps: f64,
    ctas: usize,
    resident: usize,
) -> f64 {
    let step = Step::of(profile, config);
    let a_round = |ctas: usize| ENDS + steps * step.round(config, ctas);
    let full = ctas / (profile.sms * resident);
    let left = ctas - full * profile.sms * resident;
    full as f64 * a_round(resident)
        + if left > 0 { a_round(left.div_ceil(profile.sms)) } else { 0.0 }
}

/// Microseconds of an item of the Hopper family that has `steps` steps. Consumers of the
/// forward take turns, so that most of their powers run beside the products of others; what remains
/// was fitted to head dims 64, 128 and 256, which it gives to 2 percent. Those of the backward wait
/// for each other's gradients of scores in every step; fitted to head dims 64 and 128, to 2 percent.
fn hopper_item_us(profile: &Profile, config: &Config, steps: f64) -> f64 {
    let scores = (config.tile_q * config.tile_kv) as f64;
    let (dim, dim_v) = (config.padded_dim(), config.padded_dim_v());
    let dims = match config.kernel {
        Kernel::BackwardDq => 2 * dim + dim_v,
        Kernel::Backward if config.separate_dq => 2 * (dim + dim_v),
        Kernel::Backward => 3 * dim + 2 * dim_v,
        Kernel::Forward
        | Kernel::Combine
        | Kernel::Delta
        | Kernel::RowWeightSum
        | Kernel::Dq
        | Kernel::GroupSums
        | Kernel::BlockLists
        | Kernel::RangeTable
        | Kernel::Sequences
        | Kernel::TransposeValues => dim + dim_v,
    };
    // Operands of half the bytes have twice the rate.
    let rate = WGMMA_PER_CYCLE * 2.0 / config.dtype.bytes() as f64;
    let products = 2.0 * scores * dims as f64 / rate;
    let mods = u8::from(config.mask) + u8::from(config.score) + u8::from(config.dropout);
    let powers = scores * (1.0 / POWERS_PER_CYCLE + MOD_CYCLES * f64::from(mods));
    let alone = if config.kernel.owns_keys() { SCORES_ALONE } else { POWERS_ALONE };
    (ENDS + steps * (products + alone * powers)) / profile.clock_mhz
}

/// Microseconds that a forward reads keys and values from device memory, where one tile of queries
/// is all there is for them; more tiles share what L2 holds.
fn reading_us(profile: &Profile, config: &Config, sizes: &Sizes) -> f64 {
    if !config.kernel.shares_keys() || sizes.queries > config.queries() {
        return 0.0;
    }
    let numbers = sizes.batch * sizes.heads_kv * sizes.keys * (config.dim + config.dim_v);
    (numbers * config.dtype.bytes()) as f64 / profile.bandwidth_gbs * 1e-3
}

impl Step {
    fn of(profile: &Profile, config: &Config) -> Self {
        let Config { tile_q, tile_kv, warps, dtype, .. } = *config;
        let (dim, dim_v) = (config.padded_dim(), config.padded_dim_v());
        let bytes = dtype.bytes() as f64;
        // A product of m x n numbers over k: operations, and operand bytes that all warps read.
        let product = |m: usize, n: usize, k: usize, even: bool| {
            let split = Warps::divide(warps, m, n, even);
            let (rows, columns) = split.map_or((1, 1), |w| (w.rows * 16, w.columns * 8));
            (2.0 * (m * n * k) as f64, (warps * (rows + columns) * k) as f64 * bytes)
        };
        let scores = (tile_q * tile_kv) as f64;
        let (products, moved): (Vec<(f64, f64)>, f64) = match config.kernel {
            Kernel::Forward => {
                let rows = warps as f64 * bytes;
                let keys = 2.0 * (scores * dim as f64);
                let values = 2.0 * (scores * dim_v as f64);
                let q = (tile_q * dim) as f64 * bytes;
                let copied = (tile_kv * (dim + dim_v)) as f64 * bytes;
                let read = vec![
                    (keys, (tile_kv * dim) as f64 * rows + q),
                    (values, (tile_kv * dim_v) as f64 * rows),
                ];
                (read, copied)
            }
            Kernel::Backward => {
                let copied = (tile_q * (dim + dim_v)) as f64 * bytes;
                let mut all = vec![
                    product(tile_q, tile_kv, dim, true),
                    product(tile_q, tile_kv, dim_v, true),
                    product(tile_kv, dim_v, tile_q, false),
                    product(tile_kv, dim, tile_q, false),
                ];
                if !config.separate_dq {
                    all.push(product(tile_q, dim, tile_kv, false));
                }
                (all, copied + 2.0 * scores * bytes)
            }
            Kernel::BackwardDq => {
                let copied = (tile_kv * (dim + dim_v)) as f64 * bytes;
                let all = vec![
                    product(tile_q, tile_kv, dim, true),
                    product(tile_q, tile_kv, dim_v, true),
                    product(tile_q, dim, tile_kv, false),
                ];
                (all, copied + scores * bytes)
            }
            Kernel::Combine
            | Kernel::Delta
            | Kernel::RowWeightSum
            | Kernel::Dq
            | Kernel::GroupSums
            | Kernel::BlockLists
            | Kernel::RangeTable
            | Kernel::Sequences
            | Kernel::TransposeValues => (vec![], 0.0),
        };
        let tflops = profile.bf16_tflops / profile.sms as f64;
        let mut rate = (tflops * 1e6 / profile.clock_mhz).min(MMA_PER_CYCLE);
        if dtype == Elem::F32 {
            // Three products in tf32, at half the rate.
            rate /= 6.0;
        }
        let mods = u8::from(config.mask) + u8::from(config.score) + u8::from(config.dscore);
        let added = config.kernel.owns_keys() && !config.separate_dq;
        Self {
            tensor: products.iter().map(|(operations, _)| operations / rate).sum(),
            shared: (moved + products.iter().map(|(_, read)| read).sum::<f64>()) / SHARED_PER_CYCLE,
            scores: tile_q as f64 * ROW_CYCLES
                + scores * (1.0 / POWERS_PER_CYCLE + SCORE_CYCLES + MOD_CYCLES * f64::from(mods)),
            sums: if added { (tile_q * dim * 4) as f64 / ADDED_PER_CYCLE } else { 0.0 },
        }
    }

    /// Cycles in which each of `ctas` on one SM makes a step.
    fn round(&self, config: &Config, ctas: usize) -> f64 {
        let busiest = self.tensor.max(self.shared).max(self.scores).max(self.sums);
        // A warp has a quarter of the units to itself.
        let alone = (4.0 / config.warps as f64).max(1.0);
        let chain = (self.tensor.max(self.shared) + self.scores) * alone + WAITS[config.stages - 1];
        let shared = ctas as f64 * (busiest + ISSUED);
        // The longer of the two, and a little more where both are about as long.
        (shared.powi(6) + chain.powi(6)).powf(1.0 / 6.0)
    }
}
