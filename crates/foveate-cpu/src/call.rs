//! What both passes of one call share.

use std::sync::Mutex;

use foveate_mods::Head;
use foveate_problem::{Dims, Sequence};

use crate::error::{CpuError, CpuErrorKind};
use crate::masks::Live;
use crate::mods::{Evaluator, Mods};
use crate::simd;
use crate::stages::Profile;
use crate::tiles::Tiles;
use crate::work::{Pool, Unit};

/// One call of a plan: its sizes, its pieces and the plan's parts that it uses.
pub struct Call<'a> {
    pub dims: Dims,
    pub sequences: Vec<Sequence>,
    pub units: Vec<Unit>,
    pub tiles: Tiles,
    /// Workspace of a wave.
    pub wave_bytes: usize,
    /// Of each head, sequence by sequence.
    pub live: Vec<Live>,
    /// Factor on `q·k`.
    pub scale: f32,
    /// Logit of each query head that joins the denominator.
    pub sink: Option<&'a [f32]>,
    /// `1/(1-p)` of the dropout.
    pub keep_factor: f32,
    /// Whether operands are multiplied in pairs.
    pub pairs: bool,
    pub mods: &'a Mods,
    pub pool: &'a Pool,
    /// Who wants to know where time goes.
    pub profile: Option<&'a Profile>,
    pub out_of_range: Mutex<Option<String>>,
}

impl Call<'_> {
    /// The sequences and query heads that attend to a unit, in order.
    pub fn heads_of(&self, unit: &Unit) -> impl Iterator<Item = (usize, usize)> {
        let group = self.dims.group();
        let heads = unit.h_kv * group..(unit.h_kv + 1) * group;
        unit.sequences.clone().flat_map(move |b| heads.clone().map(move |h| (b, h)))
    }

    /// The live tiles of a head.
    pub fn live(&self, b: usize, h: usize) -> &Live {
        &self.live[b * self.dims.heads_q + h]
    }

    /// Columns of tiles that the keys of a sequence have.
    pub fn key_tiles(&self, b: usize) -> std::ops::Range<usize> {
        0..self.sequences[b].k_len.div_ceil(self.tiles.kv)
    }

    /// Divides a row of `out` of head `h` by its denominator, `sum` relative to `max` and the sink;
    /// returns its `lse`. A row that saw nothing is 0.
    pub fn divide(&self, h: usize, max: f32, sum: f32, row: &mut [f32]) -> f32 {
        let (mut top, mut own, mut denominator) = (max, 1.0, sum);
        if let Some(sink) = self.sink.map(|sink| sink[h]) {
            // Against the larger of both, so that neither exponential overflows.
            top = if sink > top { sink } else { top };
            own = (max - top).exp();
            denominator = denominator * own + (sink - top).exp();
        }
        if top == f32::NEG_INFINITY {
            row.fill(0.0);
            return f32::NEG_INFINITY;
        }
        simd::reweigh(row, own * self.keep_factor / denominator);
        top + denominator.ln()
    }

    /// Remembers the first index out of range that the mods of `evaluator` have met.
    pub fn note(&self, evaluator: &mut Evaluator) {
        if let Some(reason) = evaluator.out_of_range() {
            let mut noted = self.out_of_range.lock().unwrap_or_else(|e| e.into_inner());
            noted.get_or_insert(reason);
        }
    }

    /// Reports what was noted.
    pub fn finish(&self) -> Result<(), CpuError> {
        let mut noted = self.out_of_range.lock().unwrap_or_else(|e| e.into_inner());
        match noted.take() {
            Some(reason) => Err(CpuErrorKind::OutOfRange { reason }.into()),
            None => Ok(()),
        }
    }
}

/// What mods are told about a head.
pub fn head(dims: &Dims, s: &Sequence, h: usize) -> Head {
    Head {
        b: s.b as i32,
        h: h as i32,
        h_kv: (h / dims.group()) as i32,
        q_len: s.q_len as i32,
        kv_len: s.k_len as i32,
    }
}
