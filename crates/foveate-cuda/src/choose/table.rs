//! Configurations that were measured to be the best of their class, on the kernels as they are.
//!
//! All measurements are of an H200 at batch 2, 8192 queries and keys and heads of 2048 numbers
//! together, by the tuner: full, causal, window 1024 and 16 documents, and with a causal mask ALiBi
//! and a soft cap. Where masks or scores want different tiles the one is here that loses least. A
//! device with as much shared memory gets the same choice; what fits less is left to the model.

use super::class::{Class, Sizes};
use crate::compile::config::{Config, Elem, Family, Kernel, Tiles};
use foveate_gpu::profile::Profile;

/// For head dims up to the first number, the tiles of a kernel; on 16-bit operands if not said.
type Known = (usize, Tiles);

/// The same where the main loop is short: [`Sizes::mean_loop_len`] is below the second number.
/// Of the masks above these are documents (256) and the window (960), not causal (4096).
type Few = (usize, usize, Tiles);

const FORWARD: &[Known] = &[
    (64, tiles(128, 96, 4, 2)),
    (96, tiles(128, 64, 4, 2)),
    (128, tiles(128, 48, 4, 2)),
    (192, tiles(128, 96, 8, 2)),
    (256, tiles(128, 128, 8, 1)),
];
/// With a mask, where CTAs are shorter.
const FORWARD_MASKED: &[Known] = &[
    (64, tiles(128, 64, 4, 2)),
    (128, tiles(128, 32, 4, 2)),
    (192, tiles(128, 96, 8, 2)),
    (256, tiles(128, 64, 8, 2)),
];
/// Under a mask without a score that lets a query see fewer keys than the second number.
const FORWARD_FEW: &[Few] = &[
    (64, 1000, tiles(64, 64, 2, 2)),
    (96, 1000, tiles(128, 64, 4, 2)),
    (128, 400, tiles(64, 32, 2, 2)),
    (128, 1000, tiles(128, 48, 4, 2)),
    (192, 1000, tiles(64, 64, 4, 1)),
    (256, 1000, tiles(64, 32, 4, 2)),
];
/// With a score, with or without a mask.
const FORWARD_SCORED: &[Known] = &[
    (64, tiles(128, 64, 4, 2)),
    (96, tiles(128, 64, 4, 1)),
    (128, tiles(128, 64, 4, 2)),
    (192, tiles(128, 96, 8, 2)),
    (256, tiles(64, 64, 4, 1)),
];
/// With a score, on f32 operands; measured at batch 1 and length 4096.
const FORWARD_SCORED_F32: &[Known] = &[(64, tiles(128, 32, 4, 2)), (128, tiles(128, 16, 4, 1))];
const BACKWARD: &[Known] = &[
    (32, tiles(64, 128, 4, 2)),
    (64, tiles(64, 96, 4, 2)),
    (96, tiles(96, 128, 8, 2)),
    (128, tiles(64, 128, 8, 2)),
    (160, tiles(96, 96, 8, 1)),
    (192, tiles(64, 96, 8, 2)),
    (256, tiles(64, 64, 8, 2)),
];
/// Under a mask without a score that lets fewer queries than the second number see a key.
const BACKWARD_FEW: &[Few] = &[
    (32, 800, tiles(64, 128, 4, 2)),
    (64, 800, tiles(64, 64, 4, 2)),
    (96, 800, tiles(64, 64, 4, 2)),
];
const BACKWARD_DQ: &[Known] = &[(128, tiles(64, 64, 4, 2))];
/// Where the query heads of a group share a tile, as of few queries on a cache: up to so many rows. Measured
/// with 32 heads on 8 and 131,072 keys in all, at exactly these head dims.
const FORWARD_PACKED: &[(usize, usize, Tiles)] = &[
    (64, 16, tiles(16, 128, 1, 1)),
    (128, 16, tiles(16, 64, 1, 2)),
    (128, 64, tiles(64, 64, 4, 2)),
];
/// On f32 operands.
const BACKWARD_F32: &[Known] = &[(64, tiles(64, 128, 8, 2)), (128, tiles(64, 96, 8, 1))];

const fn tiles(tile_q: usize, tile_kv: usize, warps: usize, stages: usize) -> Tiles {
    Tiles::portable(tile_q, tile_kv, warps, stages)
}

/// The forward of the Hopper family: consumers, keys and stages.
const HOPPER: &[Known] = &[
    (64, Tiles::hopper(3, 128, 3)),
    (96, Tiles::hopper(2, 160, 2)),
    (128, Tiles::hopper(2, 128, 2)),
    (192, Tiles::hopper(2, 112, 2)),
    (256, Tiles::hopper(2, 80, 2)),
];
/// Where a query sees 4,096 keys or more; with a score, of [`FEW_STEPS`].
const HOPPER_LONG: Tiles = Tiles::hopper(2, 176, 2);
/// A score that takes no longer has the wider tiles of long rows sooner: ALiBi and relative biases take 9, a soft cap
/// 41, which lost 5 % with them.
const FEW_STEPS: usize = 16;
/// At head dims of 81 to 96 where a query sees 4,096 keys or more: three consumers of fewer keys take turns.
/// Shorter rows were not measured, and at 80 it spills.
const HOPPER_96: Tiles = Tiles::hopper(3, 96, 2);
/// Of q and k of up to 192 and v of up to 128 numbers, as multi-head latent attention has them.
const HOPPER_LATENT: &[Known] = &[(192, Tiles::hopper(2, 128, 2))];
/// Of fewer queries, where the usual tiles leave SMs idle: measured at head dims 64 and 128 without a score.
const HOPPER_FEW: &[Tiles] = &[Tiles::hopper(2, 64, 2), Tiles::hopper(1, 64, 2)];
/// With a score or dropout, which take registers of their own.
const HOPPER_SCORED: &[Known] = &[
    (64, Tiles::hopper(3, 128, 3)),
    (128, Tiles::hopper(2, 128, 2)),
    (192, Tiles::hopper(2, 96, 2)),
    (256, Tiles::hopper(2, 64, 2)),
];

/// On e4m3, whose tiles are of multiples of 64 keys.
const HOPPER_E4M3: &[Known] = &[
    (64, Tiles::hopper(3, 128, 3)),
    (128, Tiles::hopper(2, 192, 3)),
    (192, Tiles::hopper(2, 128, 2)),
    (256, Tiles::hopper(2, 64, 3)),
];

/// The backward of the Hopper family.
const HOPPER_BACKWARD: &[Known] = &[
    (64, Tiles::hopper_backward(128, 3)),
    (128, Tiles::hopper_backward(64, 3)),
    (192, Tiles::hopper_wide_backward(3)),
    (256, Tiles::hopper_wide_backward(2)),
];

/// The same with derivatives of scores and gradients of captured buffers, which take registers of their
/// own.
const HOPPER_BACKWARD_SMALL: &[Known] = &[
    (128, Tiles::hopper_backward(64, 3)),
    (192, Tiles::hopper_wide_backward(3)),
    (256, Tiles::hopper_wide_backward(2)),
];

/// The same with dropout, which leaves no registers for a third stage at head dims up to 64.
const HOPPER_BACKWARD_DROPOUT: &[Known] = &[
    (64, Tiles::hopper_backward(128, 2)),
    (128, Tiles::hopper_backward(64, 3)),
    (192, Tiles::hopper_wide_backward(3)),
    (256, Tiles::hopper_wide_backward(2)),
];

/// dq in a kernel of its own.
const HOPPER_DQ: &[Known] = &[
    (64, Tiles::hopper_dq(128, 2)),
    (128, Tiles::hopper_dq(96, 2)),
    (192, Tiles::hopper_dq(80, 2)),
    (256, Tiles::hopper_dq(64, 2)),
];
/// The same with derivatives of scores.
const HOPPER_DQ_SCORED: &[Known] = &[
    (64, Tiles::hopper_dq(96, 2)),
    (128, Tiles::hopper_dq(64, 2)),
    (256, Tiles::hopper_dq(48, 2)),
];

/// Keys of a query and queries of a row from which on a plain forward of head dim 64 was measured under a sparse mask:
/// of 16 documents in rows of 8,192 the Hopper family is 1.11 times as fast as the portable one.
const SPARSE_OF_64: (f64, usize) = (200.0, 4096);

/// The measured choice of the Hopper family, where it was faster than the portable one: not at head
/// dims up to 64 under a mask as sparse as documents, of which the forward's tile of 192 queries covers
/// too much, unless it is plain.
pub fn of_hopper(class: &Class, sizes: &Sizes, kernel: Kernel) -> Option<Tiles> {
    let dim = class.dim.max(class.dim_v);
    let table = match kernel {
        Kernel::Forward if class.dtype == Elem::E4m3 => HOPPER_E4M3,
        Kernel::Forward if dim <= 64 && is_sparse_for_64(class, sizes) => return None,
        Kernel::Forward if has_wide_tiles(class, sizes) => return Some(HOPPER_LONG),
        Kernel::Forward if class.score || class.dropout => HOPPER_SCORED,
        Kernel::Forward if (129..=192).contains(&class.dim) && class.dim_v <= 128 => HOPPER_LATENT,
        Kernel::Forward if (81..=96).contains(&dim) && sizes.mean_kv_len >= 4096 => {
            return Some(HOPPER_96);
        }
        Kernel::Forward => HOPPER,
        Kernel::Backward if class.dscore || class.captures => HOPPER_BACKWARD_SMALL,
        Kernel::Backward if class.dropout => HOPPER_BACKWARD_DROPOUT,
        Kernel::Backward => HOPPER_BACKWARD,
        Kernel::BackwardDq if class.dscore => HOPPER_DQ_SCORED,
        Kernel::BackwardDq => HOPPER_DQ,
        Kernel::Combine
        | Kernel::Delta
        | Kernel::RowWeightSum
        | Kernel::Dq
        | Kernel::GroupSums
        | Kernel::BlockLists
        | Kernel::RangeTable
        | Kernel::Sequences
        | Kernel::TransposeValues => return None,
    };
    let tiles = table.iter().find(|(up_to, _)| dim <= *up_to).map(|(_, tiles)| *tiles);
    tiles.map(|tiles| Tiles { ordered_dq: class.orders_dq(kernel, sizes), ..tiles })
}

/// Tiles of fewer queries for a forward, the most queries first.
pub fn of_few_queries(class: &Class, kernel: Kernel) -> &'static [Tiles] {
    let plain = kernel == Kernel::Forward && class.is_plain_forward();
    let is_measured = plain && class.dim.max(class.dim_v) <= 128;
    if is_measured { HOPPER_FEW } else { &[] }
}

/// Whether the forward of a head dim of up to 64 is the portable family's.
fn is_sparse_for_64(class: &Class, sizes: &Sizes) -> bool {
    let is_measured = class.is_plain_forward() && class.dim.max(class.dim_v) > 48;
    let (keys, queries) = SPARSE_OF_64;
    let are_measured = sizes.mean_loop_len(Kernel::Forward) >= keys && sizes.queries >= queries;
    class.is_sparse(Kernel::Forward, sizes) && !(is_measured && are_measured)
}

/// Whether [`HOPPER_LONG`] was measured to be the faster one: not of pages, whose boxes divide a tile of 128 keys and
/// not one of 176.
fn has_wide_tiles(class: &Class, sizes: &Sizes) -> bool {
    let dims = (97..=128).contains(&class.dim.max(class.dim_v));
    let of_score = !class.score || class.score_steps <= FEW_STEPS;
    dims && sizes.mean_kv_len >= 4096 && of_score && !class.dropout && !class.paged
}

/// What runs where a forward of [`HOPPER_LONG`] is not as planned: the usual tiles, which need fewer registers.
pub fn narrower(config: &Config) -> Option<Tiles> {
    let tiles = Tiles::of(config);
    let is_wide = config.kernel == Kernel::Forward && tiles.tile_kv == HOPPER_LONG.tile_kv;
    let usual = Tiles { tile_kv: 128, ..tiles };
    (config.family == Family::Hopper && is_wide).then_some(usual)
}

/// Whether a kernel without the overlap within a warpgroup comes before the portable choice where the
/// assembler serialises `config`. At head dim 128 a plain forward with the overlap is 1.6 times as fast as
/// the portable one, and lost 6 % without; with a score it is 1.3 to 1.5 times as fast, and was not measured
/// without. At head dim 64 with a score it lost a third without, more than the portable kernel does. No
/// backward was measured without.
pub fn waits_rather_than_portable(config: &Config) -> bool {
    let forward = config.family == Family::Hopper && config.kernel == Kernel::Forward;
    forward && config.overlap && config.dim.max(config.dim_v) > 64
}

/// The measured choice where the query heads of a group share a tile. KV splits fill the SMs, however few
/// tiles there are.
pub fn of_packed(profile: &Profile, class: &Class, sizes: &Sizes, kernel: Kernel) -> Option<Tiles> {
    let packed = class.packs_gqa(kernel, sizes, None) && class.dtype != Elem::F32;
    let (dim, rows) = (class.dim.max(class.dim_v), sizes.queries * class.group);
    let known = FORWARD_PACKED.iter().find(|(at, up_to, _)| dim == *at && rows <= *up_to);
    known.filter(|_| packed && is_measured(profile)).map(|(.., tiles)| *tiles)
}

/// Whether cards of this compute capability are as the one that all was measured on.
fn is_measured(profile: &Profile) -> bool {
    profile.capability >= (9, 0) && profile.capability < (11, 0)
}

/// The measured choice, when there is one.
pub fn of(profile: &Profile, class: &Class, sizes: &Sizes, kernel: Kernel) -> Option<Tiles> {
    if !is_measured(profile) {
        return None;
    }
    let f32 = class.dtype == Elem::F32;
    // The bits of dropout leave no registers for more keys.
    let masked = class.mask || (class.dropout && class.dim.max(class.dim_v) <= 64);
    let few_are_met = class.mask && !class.score;
    let none: (&[Known], &[Few]) = (&[], &[]);
    let (table, few) = match kernel {
        Kernel::Forward if f32 && class.score => (FORWARD_SCORED_F32, none.1),
        Kernel::Forward if f32 => none,
        Kernel::Forward if class.score => (FORWARD_SCORED, none.1),
        Kernel::Forward if masked => (FORWARD_MASKED, FORWARD_FEW),
        Kernel::Forward => (FORWARD, none.1),
        Kernel::Backward if f32 => (BACKWARD_F32, none.1),
        Kernel::Backward => (BACKWARD, BACKWARD_FEW),
        Kernel::BackwardDq if f32 => none,
        Kernel::BackwardDq => (BACKWARD_DQ, none.1),
        Kernel::Combine
        | Kernel::Delta
        | Kernel::RowWeightSum
        | Kernel::Dq
        | Kernel::GroupSums
        | Kernel::BlockLists
        | Kernel::RangeTable
        | Kernel::Sequences
        | Kernel::TransposeValues => none,
    };
    let few = if few_are_met { few } else { none.1 };
    let (dim, len) = (class.dim.max(class.dim_v), sizes.mean_loop_len(kernel));
    let of_few = few.iter().find(|(up_to, below, _)| dim <= *up_to && len < *below as f64);
    let of_many = table.iter().find(|(up_to, _)| dim <= *up_to);
    of_few.map(|(.., tiles)| *tiles).or(of_many.map(|(_, tiles)| *tiles))
}
