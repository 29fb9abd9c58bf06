//! Programs evaluated over tiles of queries and keys, the way CPU kernels need them.
//!
//! Every node is evaluated as rarely as it can change (`compile`): what depends on the head alone
//! once per [`Machine::set_head`], what depends on the query or the key alone once a row or column
//! of a tile, what depends on their distance once a *diagonal* of a tile (causal masks, windows,
//! ALiBi, relative biases), and only the rest once an entry. That rest runs one operation at a time
//! over strips of rows small enough that all intermediates stay in L1, in loops
//! over groups of [`LANES`] floats, compiled once per instruction set (`level`). Most masks need
//! none of that: their mask bits are made a word at a time (`planes`).
//!
//! All values lie in registers of f32: integers by their bits, bools as the bits of 0 and 1. So one
//! kind of storage serves every type, and the caller's scores are read where they are.
//!
//! Captured-buffer indices are clamped to their axis; the first one that had to be, at an entry
//! that counts, is kept for [`Machine::out_of_range`]. Loads that were hoisted count like the
//! others: at the entries that use them. Both sides of an `if` are evaluated, so both must index in
//! range.

mod adjoint;
mod bits;
mod compile;
mod level;
mod machine;
mod outside;
mod plan;
mod planes;
mod rate;
mod registers;
mod run;
mod steps;
#[cfg(test)]
mod tests;

pub use adjoint::Read;
pub use bits::MaskBits;
pub use compile::TileProgram;
pub use level::{Level, level};
pub use machine::Machine;
pub use registers::{LANES, Scores};
