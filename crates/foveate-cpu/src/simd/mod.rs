//! The inner loops: products of tiles and passes over score rows.
//!
//! - `group`: the operations on sixteen floats; `x86` and `baseline` implement them.
//! - `level`: the instruction sets of this machine, and the dispatch of loops to them.
//! - `operands`, `product`: products of tiles, of floats or of pairs of bf16.
//! - `pairs`: conversion of floats and rows to pairs of bf16.
//! - `rows`, `exp`: passes over rows.
//! - `stream`: products that read keys and values in place.
//! - `transpose`: transposition of rows into panels.
//! - `prefetch`: software prefetch.
//!
//! No other module of the crate has `unsafe`. It is needed to call functions compiled for features
//! that were detected at run time, and for the pointers of the products, whose bounds the safe
//! functions check.

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
pub use operands::{Matrix, Panels, Part, Write};
pub use pairs::{interleave, round_along, round_beside};
pub use prefetch::Prefetch;
pub use product::{SUBTILE_ROWS, TileProduct, product};
pub use rows::{
    RowState, RowStatistics, ZERO_WEIGHT, add, all_finite, dot, exp_sum, online_softmax,
    pair_square_sum, rescale, scale, softmax_backward, weights_are_zero,
};
pub use stream::{Rows, add_in_place, scores_in_place};
pub use transpose::{transpose, transpose_pairs};

/// `n` rounded up to a multiple of [`LANES`].
pub const fn padded(n: usize) -> usize {
    n.div_ceil(LANES) * LANES
}
