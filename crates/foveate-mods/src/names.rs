//! The names that a text may use, and what a misspelt one was meant to be.

use std::collections::BTreeMap;

use crate::capture::AnyBuffer;
use crate::value::ScalarValue;

/// What a text may refer to, besides the coordinates.
#[derive(Clone, Debug, Default)]
pub struct Names {
    buffers: BTreeMap<String, AnyBuffer>,
    scalars: BTreeMap<String, ScalarValue>,
    heads: Option<usize>,
    positions: Option<usize>,
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

    /// With the number of positions that queries and keys have at most: tables that a named mask
    /// makes, such as the ids of `documents(...)`, are no longer than that.
    pub fn positions(mut self, positions: usize) -> Self {
        self.positions = Some(positions);
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

    /// The number of positions, where it is known.
    pub(crate) fn position_count(&self) -> Option<usize> {
        self.positions
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
