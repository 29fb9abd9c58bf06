//! Configurations that were measured to be the best of their class, on the kernels as they are.
//!
//! All measurements are of an H200 at batch 2, 8192 queries and keys and heads of 2048 numbers
//! together, by the tuner: full, causal, window 1024 and 16 documents, and with a causal mask ALiBi
//! and a soft cap. Where masks or scores want different tiles the one is here that loses least. A
//! device with as much shared memory gets the same choice; what fits less is left to the model.

use super::{Class, Sizes, Tiles};
use crate::config::{Elem, Kernel};
use crate::profile::Profile;

/// For head dims up to the first number, the tiles of a kernel; on 16-bit operands if not said.
type Known = (usize, Tiles);

/// Queries that see a key, below which they are few: of the masks above, documents (256 of them) and
/// the window (960), but not causal (4096).
const FEW: f64 = 1500.0;

const FORWARD: &[Known] = &[
    (64, tiles(128, 96, 4, 2)),
    (96, tiles(128, 64, 4, 2)),
    (128, tiles(128, 48, 4, 2)),
    (192, tiles(128, 96, 8, 2)),
    (256, tiles(128, 128, 8, 1)),
];
/// With a mask, where blocks are shorter.
const FORWARD_MASKED: &[Known] =
    &[(128, tiles(128, 64, 4, 2)), (192, tiles(128, 96, 8, 2)), (256, tiles(64, 32, 4, 2))];
/// With a score, with or without a mask.
const FORWARD_SCORED: &[Known] =
    &[(128, tiles(128, 64, 4, 2)), (192, tiles(128, 96, 8, 2)), (256, tiles(64, 64, 4, 1))];
const BACKWARD: &[Known] = &[
    (32, tiles(64, 128, 4, 2)),
    (64, tiles(64, 96, 4, 2)),
    (96, tiles(96, 128, 8, 2)),
    (128, tiles(64, 128, 8, 2)),
    (160, tiles(96, 96, 8, 1)),
    (192, tiles(64, 96, 8, 2)),
    (256, tiles(64, 64, 8, 2)),
];
/// Under a mask that lets few queries see a key, where that is another; else [`BACKWARD`].
const BACKWARD_FEW: &[Known] = &[(32, tiles(64, 128, 4, 2)), (64, tiles(64, 64, 4, 2))];
const BACKWARD_DQ: &[Known] = &[(128, tiles(64, 64, 4, 2))];
/// On f32 operands.
const BACKWARD_F32: &[Known] = &[(64, tiles(64, 128, 8, 2)), (128, tiles(64, 96, 8, 1))];

const fn tiles(tile_q: usize, tile_kv: usize, warps: usize, stages: usize) -> Tiles {
    Tiles { tile_q, tile_kv, warps, stages }
}

/// The measured choice, when there is one.
pub fn of(profile: &Profile, class: &Class, sizes: &Sizes, kernel: Kernel) -> Option<Tiles> {
    if profile.capability < (9, 0) || profile.capability >= (11, 0) {
        return None;
    }
    let few = class.mask && !class.score && sizes.walk(kernel) < FEW;
    let table = match (kernel, class.dtype) {
        (Kernel::Backward, Elem::F32) => BACKWARD_F32,
        (_, Elem::F32) => return None,
        (Kernel::Forward, _) if class.score => FORWARD_SCORED,
        (Kernel::Forward, _) if class.mask => FORWARD_MASKED,
        (Kernel::Forward, _) => FORWARD,
        (Kernel::Backward, _) => BACKWARD,
        (Kernel::BackwardDq, _) => BACKWARD_DQ,
        _ => return None,
    };
    let first = match (kernel, class.dtype) {
        (Kernel::Backward, Elem::F16 | Elem::Bf16) if few => BACKWARD_FEW,
        _ => &[],
    };
    let dim = class.dim.max(class.dim_v);
    first.iter().chain(table).find(|(up_to, _)| dim <= *up_to).map(|(_, tiles)| *tiles)
}
