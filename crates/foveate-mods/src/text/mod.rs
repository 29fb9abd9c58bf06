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
//! unit select`, conversions `i32(x) f32(x) bool(x)`, and every name of [`crate::catalogue`].
//! Each can be written as a method: `score.tanh()`.
//!
//! Printing a mod ([`std::fmt::Display`]) gives text that parses back to an equal mod, given
//! its captures by [`Program::text`].

mod lexer;
mod parser;
mod printer;
mod words;

use std::collections::BTreeMap;

use crate::capture::{AnyBuffer, ScalarValue};
use crate::error::ModError;
use crate::program::{MaskMod, Program, ScoreMod};

/// What a text may refer to, besides the coordinates.
#[derive(Clone, Debug, Default)]
pub struct Names {
    buffers: BTreeMap<String, AnyBuffer>,
    scalars: BTreeMap<String, ScalarValue>,
    heads: Option<usize>,
}

impl Names {
    /// No names.
    pub fn new() -> Self {
        Self::default()
    }

    /// With a captured buffer under its own name.
    pub fn buffer(mut self, buffer: &AnyBuffer) -> Self {
        self.buffers.insert(buffer.name().to_owned(), buffer.clone());
        self
    }

    /// With a captured buffer under another name.
    pub fn buffer_as(mut self, name: impl Into<String>, buffer: &AnyBuffer) -> Self {
        self.buffers.insert(name.into(), buffer.clone());
        self
    }

    /// With a run-time scalar.
    pub fn scalar(mut self, name: impl Into<String>, value: ScalarValue) -> Self {
        self.scalars.insert(name.into(), value);
        self
    }

    /// With the number of query heads, for named scores that have one slope a head.
    pub fn heads(mut self, heads: usize) -> Self {
        self.heads = Some(heads);
        self
    }

    /// The buffer called `name`.
    pub fn get_buffer(&self, name: &str) -> Option<&AnyBuffer> {
        self.buffers.get(name)
    }

    /// The value of the run-time scalar called `name`.
    pub fn get_scalar(&self, name: &str) -> Option<ScalarValue> {
        self.scalars.get(name).copied()
    }

    /// The number of query heads, where it is known.
    pub fn head_count(&self) -> Option<usize> {
        self.heads
    }

    /// The names of the buffers.
    pub(crate) fn buffer_names(&self) -> impl Iterator<Item = &str> {
        self.buffers.keys().map(String::as_str)
    }

    /// All names of buffers and scalars.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        self.buffers.keys().chain(self.scalars.keys()).map(String::as_str)
    }
}

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

/// The one of `known` that `name` was probably meant to be: at most one edit (a character put in,
/// taken out or replaced) and one more for every four characters away, with something in common.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let len = name.chars().count();
    let near = known.into_iter().map(|n| (distance(n, name), n));
    let near = near.filter(|(edits, n)| *edits < len.max(n.chars().count())).min()?;
    (near.0 <= 1 + len / 4).then_some(near.1)
}

/// Edits (insert, delete, replace) between two names.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
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
