//! The inner loops: products of tiles and passes over score rows.
//!
//! - `level`: instruction sets, and operations on sixteen floats.
//! - `product`: tile products from registers.
//! - `rows`, `exp`: passes over rows.
//! - `stream`: products with keys and values read where they lie.
//! - `transpose`: rows into panels.
//!
//! This is the only module of the crate with `unsafe` in it: functions compiled for a feature
//! that was found at run time, and the pointers of the products, which its safe functions check.

mod exp;
mod level;
mod product;
mod rows;
mod stream;
mod transpose;

pub use level::{LANES, level};
pub use product::{Matrix, Panels, Part, STRIP, product};
pub use rows::{RowState, add, d_softmax, dot, exp_sum, scale, soften};
pub use stream::{Rows, add_in_place, scores_in_place};
pub use transpose::transpose;

/// `n` rounded up to whole groups.
pub const fn padded(n: usize) -> usize {
    n.div_ceil(LANES) * LANES
}
