//! Global coordinates: where batch entries, heads and rows of the operands stand in the whole problem.
//!
//! Mods are written in global coordinates and backends count from 0. The difference is
//! substituted into the mods' IR before a backend sees them, so no backend knows of shards or
//! caches, and analysis and derivatives stay exact.

use foveate_mods::expr::{b, h, h_kv, kv, kv_len, q, q_len, scalar};
use foveate_mods::{Buffer, DynExpr, Expr, Leaf, MaskMod, ModError, ScoreMod};

use crate::error::Error;

/// The position of row `i` of an operand, or which head or batch entry of the whole the `i`-th is.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum Positions {
    /// Row `i` is position `i`.
    #[default]
    Rows,
    /// Row `i` is position `i + offset`. The offset is a run-time scalar, called `q_offset` for the
    /// rows of q and so on ([`Coordinates`]): [`crate::Plan::set_scalar`] moves it without planning again.
    Offset(i32),
    /// Row `i` is position `map[i]`, or `map[b, i]` when the buffer has two axes, `b` counting the
    /// call's batch entries.
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

/// Where the operands of a call stand in the whole problem: global batch entries, heads, positions
/// and lengths. Without any, the call is the whole problem.
///
/// Rank 1 of two that share 8 query heads, 2 key/value heads and 4,096 tokens:
///
/// ```
/// use foveate::{Attention, Coordinates, Positions, masks};
///
/// let here = Coordinates::new()
///     .heads(Positions::offset(4), Positions::offset(1))
///     .q(Positions::offset(2048))
///     .lengths(4096, 4096);
/// let program = Attention::new().mask(masks::causal_bottom_right()).coordinates(here);
/// ```
#[derive(Clone, Debug, Default)]
pub struct Coordinates {
    b: Positions,
    h: Positions,
    h_kv: Positions,
    q: Positions,
    kv: Positions,
    lengths: Option<[i32; 2]>,
}

impl Coordinates {
    /// Those of the whole problem: row `i` is position `i`, and so on.
    pub fn new() -> Self {
        Self::default()
    }

    /// Which batch entry of the whole each entry is: offset `b_offset`, or a map with one axis.
    pub fn batch(self, b: Positions) -> Self {
        Self { b, ..self }
    }

    /// Which query head and which key/value head of the whole each one is: offsets `h_offset` and
    /// `h_kv_offset`, or maps with one axis.
    pub fn heads(self, h: Positions, h_kv: Positions) -> Self {
        Self { h, h_kv, ..self }
    }

    /// Positions of the rows of q: offset `q_offset`, or a map.
    pub fn q(self, q: Positions) -> Self {
        Self { q, ..self }
    }

    /// Positions of the rows of k and v: offset `kv_offset`, or a map.
    pub fn kv(self, kv: Positions) -> Self {
        Self { kv, ..self }
    }

    /// Numbers of queries and of keys of the whole problem, for mods that read `q_len` and `kv_len`:
    /// run-time scalars `global_q_len` and `global_kv_len`.
    pub fn lengths(self, q_len: i32, kv_len: i32) -> Self {
        Self { lengths: Some([q_len, kv_len]), ..self }
    }

    /// What to put for each leaf.
    ///
    /// # Errors
    /// When the map of an axis other than the rows has not one axis.
    pub(crate) fn substitution(&self) -> Result<Substitution, Error> {
        for (name, map) in [("batch", &self.b), ("heads", &self.h), ("heads", &self.h_kv)] {
            if let Positions::Map(map) = map
                && map.shape().len() != 1
            {
                let reason = format!(
                    "the map `{}` has shape {:?}; it must have one axis",
                    map.any().name(),
                    map.shape()
                );
                return Err(Error::option(name, reason));
            }
        }
        let length = |i: usize, name, local: Expr<i32>| match self.lengths {
            None => local,
            Some(lengths) => scalar(name, lengths[i]),
        };
        Ok(Substitution {
            b: self.b.of_row(b(), "b_offset"),
            h: self.h.of_row(h(), "h_offset"),
            h_kv: self.h_kv.of_row(h_kv(), "h_kv_offset"),
            q: self.q.of_row(q(), "q_offset"),
            kv: self.kv.of_row(kv(), "kv_offset"),
            q_len: length(0, "global_q_len", q_len()),
            kv_len: length(1, "global_kv_len", kv_len()),
        })
    }
}

/// What to put for the leaves of a mod.
pub(crate) struct Substitution {
    b: Expr<i32>,
    h: Expr<i32>,
    h_kv: Expr<i32>,
    q: Expr<i32>,
    kv: Expr<i32>,
    q_len: Expr<i32>,
    kv_len: Expr<i32>,
}

impl Substitution {
    fn leaf(&self, leaf: Leaf) -> DynExpr {
        let global = match leaf {
            Leaf::B => &self.b,
            Leaf::H => &self.h,
            Leaf::HKv => &self.h_kv,
            Leaf::Q => &self.q,
            Leaf::Kv => &self.kv,
            Leaf::QLen => &self.q_len,
            Leaf::KvLen => &self.kv_len,
            Leaf::Score => return DynExpr::leaf(leaf),
        };
        global.dynamic().clone()
    }

    pub(crate) fn mask(&self, mask: &MaskMod) -> Result<MaskMod, ModError> {
        MaskMod::new(mask.at(&|l| self.leaf(l)).dynamic())
    }

    pub(crate) fn score(&self, score: &ScoreMod) -> Result<ScoreMod, ModError> {
        ScoreMod::new(score.at(&|l| self.leaf(l)).dynamic())
    }
}
