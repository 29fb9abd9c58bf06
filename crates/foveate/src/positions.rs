//! Global coordinates: where the rows of the operands stand in the whole problem.
//!
//! Mods are written in global positions and backends count rows from 0. The difference is
//! substituted into the mods' IR before a backend sees them, so no backend knows of shards or
//! caches, and analysis and derivatives stay exact.

use foveate_mods::expr::{b, kv, q, scalar};
use foveate_mods::{Buffer, DynExpr, Expr, Leaf, MaskMod, ModError, ScoreMod};

/// The position of row `i` of an operand.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum Positions {
    /// Row `i` is position `i`.
    #[default]
    Rows,
    /// Row `i` is position `i + offset`. The offset is a run-time scalar called `q_offset` or
    /// `kv_offset`: [`crate::Plan::set_scalar`] moves it without planning again.
    Offset(i32),
    /// Row `i` is position `map[i]`, or `map[b, i]` when the buffer has two axes.
    Map(Buffer<i32>),
}

impl Positions {
    /// Row `i` is position `i + offset`.
    pub fn offset(offset: i32) -> Self {
        Self::Offset(offset)
    }

    /// Row `i` is position `map[i]`, or `map[b, i]` when the buffer has two axes.
    ///
    /// # Errors
    /// When the buffer has three axes or more.
    pub fn map(map: Buffer<i32>) -> Result<Self, ModError> {
        let i = || kv().dynamic().clone();
        match map.shape().len() {
            1 | 2 => Ok(Self::Map(map)),
            _ => Err(DynExpr::load(map.any(), vec![b().dynamic().clone(), i()])
                .expect_err("a buffer with three axes does not take two indices")),
        }
    }

    fn of_row(&self, row: Expr<i32>, offset_name: &str) -> Expr<i32> {
        match self {
            Self::Rows => row,
            Self::Offset(offset) => row + scalar(offset_name, *offset),
            Self::Map(map) if map.shape().len() == 1 => map.at([row]),
            Self::Map(map) => map.at([b(), row]),
        }
    }
}

/// What to put for the leaves `q` and `kv`.
pub(crate) struct Substitution {
    q: Expr<i32>,
    kv: Expr<i32>,
}

pub(crate) fn substitution(q_positions: &Positions, kv_positions: &Positions) -> Substitution {
    Substitution {
        q: q_positions.of_row(q(), "q_offset"),
        kv: kv_positions.of_row(kv(), "kv_offset"),
    }
}

impl Substitution {
    fn leaf(&self, leaf: Leaf) -> DynExpr {
        match leaf {
            Leaf::Q => self.q.dynamic().clone(),
            Leaf::Kv => self.kv.dynamic().clone(),
            other => DynExpr::leaf(other),
        }
    }

    pub(crate) fn mask(&self, mask: &MaskMod) -> Result<MaskMod, ModError> {
        MaskMod::new(mask.at(&|l| self.leaf(l)).dynamic())
    }

    pub(crate) fn score(&self, score: &ScoreMod) -> Result<ScoreMod, ModError> {
        ScoreMod::new(score.at(&|l| self.leaf(l)).dynamic())
    }
}
