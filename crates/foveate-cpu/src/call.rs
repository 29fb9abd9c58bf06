//! The state of one call, which both passes share.

use std::sync::Mutex;

use foveate_mods::Head;
use foveate_problem::{Dims, Sequence};

use crate::error::{CpuError, CpuErrorKind};
use crate::masks::Live;
use crate::mods::{Evaluator, Mods};
use crate::pool::Pool;
use crate::simd;
use crate::stages::Profile;
use crate::tasks::KvHead;
use crate::tiles::Tiles;

/// One call of a plan: its sizes, its live tiles, and the parts of the plan that it uses.
pub struct Call<'a> {
    pub dims: Dims,
    pub sequences: Vec<Sequence>,
    pub kv_heads: Vec<KvHead>,
    pub tiles: Tiles,
    /// Limit of a wave's workspace, in bytes.
    pub wave_bytes: usize,
    /// The live tiles of each query head, sequence by sequence.
    pub live: Vec<Live>,
    /// Factor on `q·k`.
    pub scale: f32,
    /// Logit of each query head that joins the denominator.
    pub sink: Option<Vec<f32>>,
    /// `1/(1-p)` of the dropout.
    pub dropout_scale: f32,
    /// Whether operands are multiplied as pairs of bf16.
    pub pairs: bool,
    pub mods: &'a Mods,
    pub pool: &'a Pool,
    /// The profile that stages are added to.
    pub profile: Option<&'a Profile>,
    pub out_of_range: Mutex<Option<String>>,
}

impl Call<'_> {
    /// The sequences and query heads that attend to a KV head, in order.
    pub fn heads_of(&self, kv_head: &KvHead) -> impl Iterator<Item = (usize, usize)> {
        let group = self.dims.group();
        let heads = kv_head.h_kv * group..(kv_head.h_kv + 1) * group;
        kv_head.sequences.clone().flat_map(move |b| heads.clone().map(move |h| (b, h)))
    }

    /// The live tiles of a head.
    pub fn live(&self, b: usize, h: usize) -> &Live {
        &self.live[b * self.dims.heads_q + h]
    }

    /// Columns of tiles that the keys of a sequence have.
    pub fn key_tiles(&self, b: usize) -> std::ops::Range<usize> {
        0..self.sequences[b].k_len.div_ceil(self.tiles.kv)
    }

    /// Divides a row of `out` of query head `h` by its denominator: `sum`, relative to the row maximum
    /// `max`, and the sink. Returns its `lse`. An empty row becomes 0.
    pub fn divide(&self, h: usize, max: f32, sum: f32, row: &mut [f32]) -> f32 {
        let (mut shift, mut own, mut denominator) = (max, 1.0, sum);
        if let Some(sink) = self.sink.as_ref().map(|sink| sink[h]) {
            // Relative to the larger of both, so that neither exponential overflows.
            shift = if sink > shift { sink } else { shift };
            own = (max - shift).exp();
            denominator = denominator * own + (sink - shift).exp();
        }
        if shift == f32::NEG_INFINITY {
            row.fill(0.0);
            return f32::NEG_INFINITY;
        }
        simd::rescale(row, own * self.dropout_scale / denominator);
        shift + denominator.ln()
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

/// The coordinates of a head that mods see.
pub fn head(dims: &Dims, s: &Sequence, h: usize) -> Head {
    Head {
        b: s.b as i32,
        h: h as i32,
        h_kv: (h / dims.group()) as i32,
        q_len: s.q_len as i32,
        kv_len: s.k_len as i32,
    }
}
