//! The inner loops: products of tiles and passes over score rows.
//!
//! - `level`: instruction sets, and operations on sixteen floats; `x86` and `baseline` have them.
//! - `prefetch`: asking for memory early.
//! - `product`: tile products from registers, of floats or of pairs of bf16.
//! - `pairs`: floats and rows into pairs.
//! - `rows`, `exp`: passes over rows.
//! - `stream`: products with keys and values read where they lie.
//! - `transpose`: rows into panels.
//!
//! This is the only module of the crate with `unsafe` in it: functions compiled for a feature
//! that was found at run time, and the pointers of the products, which its safe functions check.

mod baseline;
mod exp;
mod level;
mod pairs;
mod prefetch;
mod product;
mod rows;
mod stream;
mod transpose;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use level::larger;
pub use level::{LANES, VARIABLE, asked, level};
pub use pairs::{interleave, round_along, round_beside};
pub use prefetch::Ahead;
pub use product::{Element, Matrix, Pair, Panels, Part, STRIP, Write, product};
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
