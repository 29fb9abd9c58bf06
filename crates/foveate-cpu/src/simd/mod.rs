//! The inner loops: products of tiles and passes over score rows.
//!
//! - `group`: sixteen floats, and the operations on them; `x86` and `baseline` have those of the
//!   instruction sets.
//! - `level`: which instruction sets this machine has, and how loops are compiled for each.
//! - `prefetch`: asking for memory early.
//! - `operands`, `product`: tile products from registers, of floats or of pairs of bf16.
//! - `pairs`: floats and rows into pairs.
//! - `rows`, `exp`: passes over rows.
//! - `stream`: products with keys and values read where they lie.
//! - `transpose`: rows into panels.
//!
//! This is the only module of the crate with `unsafe` in it: functions compiled for a feature
//! that was found at run time, and the pointers of the products, which its safe functions check.

mod baseline;
mod exp;
mod group;
mod level;
mod operands;
mod pairs;
mod prefetch;
mod product;
mod rows;
mod stream;
mod transpose;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use group::{LANES, Pair, larger};
pub use level::{VARIABLE, asked, level};
pub use operands::{Element, Matrix, Panels, Part, Write};
pub use pairs::{interleave, round_along, round_beside};
pub use prefetch::Ahead;
pub use product::{STRIP, TileProduct, product};
pub use rows::{
    NOTHING, RowState, RowStatistics, add, all_finite, derive, dot, exp_sum, pair_square_sum,
    reweigh, scale, soften, weighs_nothing,
};
pub use stream::{Rows, add_in_place, scores_in_place};
pub use transpose::{transpose, transpose_pairs};

/// `n` rounded up to whole groups.
pub const fn padded(n: usize) -> usize {
    n.div_ceil(LANES) * LANES
}
