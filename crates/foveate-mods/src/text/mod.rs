//! The text form of masks and scores, as recipes and the command line write it.
//!
//! ```text
//! causal & document                       named masks, joined with & | ^ !
//! q >= kv && q - kv < 256                 plain Rust over the coordinates
//! let d = q - kv; d >= 0 && d < window    lets, run-time scalars, captured buffers
//! softcap(30) then alibi(8)               scores one after another
//! if q >= kv { score } else { score * 0.5 + bias[h, q - kv] }
//! ```
//!
//! Values are bool, i32 or f32. The coordinates are `b h h_kv q kv q_len kv_len`, a score also
//! has `score`. Operators, from loose to tight: `then` (scores), `| ||`, `^`, `& &&`,
//! comparisons (which do not chain), `+ -`, `* / %`, `as f32`, prefix `- !`, `.abs()`. Unlike in
//! Rust, `&` and `|` bind as loosely as `&&` and `||`: there are no bits to work on. Integer
//! literals are f32 where an f32 is needed; nothing else converts by itself.
//!
//! After `then`, `score` and the named scores are on the score before it. A `let` keeps the value
//! it was given: in `let raw = score; softcap(30) then score + raw`, `raw` is not capped.
//!
//! Functions: `abs min max floor exp exp2 log log2 sqrt rsqrt tanh sigmoid erf sin cos pow mix
//! unit detach select from_end`, conversions `i32(x) f32(x) bool(x)`, and every name of [`crate::catalogue`].
//! Each can be written as a method: `score.tanh()`.
//!
//! Printing a mod ([`std::fmt::Display`]) gives text that parses back to an equal mod, given
//! its captures by [`Program::text`].

mod lexer;
mod parser;
mod printer;
mod words;

use crate::error::ModError;
pub use crate::names::{Names, nearest};
use crate::program::{MaskMod, Program, ScoreMod};

/// Reads a mask.
///
/// # Errors
/// With the place, what was expected there, and what was probably meant; or when a run-time
/// scalar is called like a coordinate or a word of the language.
pub fn parse_mask(text: &str, names: &Names) -> Result<MaskMod, ModError> {
    MaskMod::new(&parser::parse(text, names, parser::Wanted::Mask)?)
}

/// Reads a score.
///
/// # Errors
/// With the place, what was expected there, and what was probably meant; or when a run-time
/// scalar is called like a coordinate or a word of the language.
pub fn parse_score(text: &str, names: &Names) -> Result<ScoreMod, ModError> {
    ScoreMod::new(&parser::parse(text, names, parser::Wanted::Score)?)
}

impl Program {
    /// Root 0 as text, and the names that the text uses.
    pub fn text(&self) -> (String, Names) {
        printer::print(self)
    }
}

impl std::fmt::Display for MaskMod {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.program().text().0)
    }
}

impl std::fmt::Display for ScoreMod {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.program().text().0)
    }
}

#[cfg(test)]
mod tests;
