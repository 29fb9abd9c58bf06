//! What both passes of one call share.

use foveate_problem::{Dims, Sequence};

use crate::error::CpuError;
use crate::masks::Live;
use crate::mods::{Evaluator, Head, Mods};
use crate::tiles::Tiles;
use crate::work::{Pool, Unit};

/// One call of a plan: its sizes, its pieces and the plan's parts that it uses.
pub struct Call<'a> {
    pub dims: Dims,
    pub sequences: Vec<Sequence>,
    pub units: Vec<Unit>,
    pub tiles: Tiles,
    /// Factor on `q·k`.
    pub scale: f32,
    /// Logit of each query head that joins the denominator.
    pub sink: Option<&'a [f32]>,
    /// `1/(1-p)` of the dropout.
    pub keep_factor: f32,
    pub mods: &'a Mods,
    pub pool: &'a Pool,
}

impl Call<'_> {
    /// The sequences and query heads that attend to a unit, in order.
    pub fn heads_of(&self, unit: &Unit) -> impl Iterator<Item = (usize, usize)> {
        let group = self.dims.group();
        let heads = unit.h_kv * group..(unit.h_kv + 1) * group;
        unit.sequences.clone().flat_map(move |b| heads.clone().map(move |h| (b, h)))
    }

    /// The live tiles of a head.
    pub fn live(&self, b: usize, _h: usize) -> Result<Live, CpuError> {
        Ok(Live { tiles: self.sequences[b].k_len.div_ceil(self.tiles.kv) })
    }

    /// What mods are told about a head.
    pub fn head(&self, b: usize, h: usize) -> Head {
        let s = &self.sequences[b];
        Head {
            b: b as i32,
            h: h as i32,
            h_kv: (h / self.dims.group()) as i32,
            q_len: s.q_len as i32,
            kv_len: s.k_len as i32,
        }
    }

    /// Remembers an index out of range that `evaluator` has met.
    pub fn note(&self, _evaluator: &Evaluator) {}

    /// Reports what was noted.
    pub fn finish(&self) -> Result<(), CpuError> {
        Ok(())
    }
}
