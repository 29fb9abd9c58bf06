//! Numbers that a case puts into operands in place of random ones: infinity, NaN, huge values.
//!
//! They are placed by logical axes, so that a row of keys is the same in every layout, in pages too.

use serde::Deserialize;

use crate::error::CaseError;

/// What a number is put into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Operand {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
    /// The gradient that the backward starts from.
    DOut,
}

/// One row, or `[first, end]`: the rows from the first up to the end, which is not one of them.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(untagged)]
pub enum Rows {
    /// One.
    One(usize),
    /// Several.
    Range([usize; 2]),
}

/// A number for some elements of an operand.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Override {
    /// `q`, `k`, `v` or `d_out`.
    pub operand: Operand,
    /// Batch entry; every one if absent.
    pub batch: Option<usize>,
    /// Query head of q and `d_out`, key/value head of k and v; every one if absent.
    pub head: Option<usize>,
    /// Rows of the operand, those of packed sequences counted through; in pages the keys of each
    /// batch entry.
    pub row: Rows,
    /// Place in the row's vector; every one if absent.
    pub column: Option<usize>,
    /// What they are.
    pub value: f64,
}

impl Operand {
    /// As cases write it.
    pub fn name(self) -> &'static str {
        match self {
            Operand::Q => "q",
            Operand::K => "k",
            Operand::V => "v",
            Operand::DOut => "d_out",
        }
    }
}

impl Override {
    fn rows(&self) -> std::ops::Range<usize> {
        match self.row {
            Rows::One(row) => row..row + 1,
            Rows::Range([first, end]) => first..end,
        }
    }

    /// Checks that it lies in an operand of shape `[batch, heads, rows, columns]`.
    ///
    /// # Errors
    /// Which place lies outside, or that there is no row.
    pub fn check(&self, at: &str, shape: [usize; 4]) -> Result<(), CaseError> {
        let rows = self.rows();
        if rows.is_empty() {
            return Err(CaseError::new(at, format!("set: no row in {rows:?}")));
        }
        let places = [
            ("batch entry", self.batch),
            ("head", self.head),
            ("row", Some(rows.end - 1)),
            ("column", self.column),
        ];
        for ((axis, place), length) in places.into_iter().zip(shape) {
            if let Some(place) = place.filter(|&place| place >= length) {
                let operand = self.operand.name();
                let message = format!("set: {operand} has no {axis} {place}, only {length}");
                return Err(CaseError::new(at, message));
            }
        }
        Ok(())
    }

    /// The number for the element at `[batch, head, row, column]` of an operand; the last one that
    /// was one.
    pub fn find(all: &[Self], operand: Operand, [b, h, s, d]: [usize; 4]) -> Option<f64> {
        let is = |own: Option<usize>, at| own.is_none_or(|own| own == at);
        let holds = |one: &&Self| {
            one.operand == operand
                && is(one.batch, b)
                && is(one.head, h)
                && one.rows().contains(&s)
                && is(one.column, d)
        };
        all.iter().rev().find(holds).map(|one| one.value)
    }
}
