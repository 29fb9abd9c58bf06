//! A wave cut into lanes, and their parts of dq.
//!
//! A lane has a part of dq for the rows that see one of its keys, from the first to the last tile
//! of them: under a causal mask lanes of late keys have few, under a window all have.

use std::ops::Range;
use std::sync::Mutex;

use foveate_tensor::TensorMut;

use crate::call::Call;
use crate::simd;
use crate::work::{Pieces, Unit};

/// The lanes of a wave.
pub struct Lanes {
    /// Sequence and query head of each head of the wave, unit by unit.
    heads: Vec<(usize, usize)>,
    lanes: Vec<Lane>,
}

/// A range of keys of a unit.
pub struct Lane {
    /// Unit of the wave.
    pub unit: usize,
    pub keys: Range<usize>,
    /// Which of the unit's lanes it is.
    index: usize,
    /// Number, among the wave's, of the unit's first head.
    pub first_head: usize,
    /// Of each head of the unit.
    pub parts: Vec<Part>,
    /// Live tiles, for the order of tasks.
    cost: usize,
}

/// A lane's part of dq of one head.
pub struct Part {
    /// Rows of the head: whole tiles.
    pub rows: Range<usize>,
    /// Its first row among those of the lane's parts.
    pub at: usize,
}

/// A lane and where its gradients go.
pub struct Task<'a> {
    pub lane: &'a Lane,
    pub dk: TensorMut<'a>,
    pub dv: TensorMut<'a>,
    /// The lane's parts of dq, one after another.
    pub dq: &'a mut [f32],
}

impl Lane {
    /// Rows of all parts.
    fn rows(&self) -> usize {
        self.parts.iter().map(|part| part.rows.len()).sum()
    }
}

impl Lanes {
    /// Cuts the units of a wave.
    pub fn cut(call: &Call<'_>, wave: &[Unit]) -> Self {
        let (mut heads, mut lanes) = (Vec::new(), Vec::new());
        for (u, unit) in wave.iter().enumerate() {
            let first_head = heads.len();
            heads.extend(call.heads_of(unit));
            let len = call.tiles.lane(unit.keys.len, call.units.len());
            for (index, start) in (0..unit.keys.len).step_by(len).enumerate() {
                let keys = start..unit.keys.len.min(start + len);
                let (mut parts, mut at, mut cost) = (Vec::new(), 0, 0);
                for &(b, h) in &heads[first_head..] {
                    let (rows, tiles) = seen_by(call, b, h, &keys);
                    parts.push(Part { rows: rows.clone(), at });
                    at += rows.len();
                    cost += tiles;
                }
                lanes.push(Lane { unit: u, keys, index, first_head, parts, cost });
            }
        }
        Self { heads, lanes }
    }

    /// Floats of all parts of dq.
    pub fn elems(&self, dim: usize) -> usize {
        self.lanes.iter().map(|lane| lane.rows() * dim).sum()
    }

    /// Sequence and query head of a head of the wave.
    pub fn head(&self, head: usize) -> (usize, usize) {
        self.heads[head]
    }

    /// A task for each lane, longest first. `parts` holds [`Self::elems`].
    pub fn tasks<'a, 'b: 'a>(
        &'a self,
        dim: usize,
        mut parts: &'a mut [f32],
        wave: &[Unit],
        dk: &mut Pieces<'b, 4>,
        dv: &mut Pieces<'b, 4>,
    ) -> Vec<Task<'a>> {
        let mut tasks = Vec::with_capacity(self.lanes.len());
        for lane in &self.lanes {
            let unit = &wave[lane.unit];
            let dq;
            (dq, parts) = parts.split_at_mut(lane.rows() * dim);
            let dk = dk.take(unit.span, unit.h_kv, lane.index);
            let dv = dv.take(unit.span, unit.h_kv, lane.index);
            tasks.push(Task { lane, dk, dv, dq });
        }
        tasks.sort_by_key(|task| std::cmp::Reverse(task.lane.cost));
        tasks
    }
}

/// dq of a wave. Whoever brings the last lane of a unit adds the unit's parts up, in their order,
/// while some are still in a cache.
pub struct Sums<'a> {
    call: &'a Call<'a>,
    units: Vec<Mutex<UnitSum<'a>>>,
    accumulate: bool,
}

/// What there is of a unit.
#[derive(Default)]
struct UnitSum<'a> {
    /// Of each lane, once it is there.
    lanes: Vec<Option<(&'a Lane, &'a [f32])>>,
    /// Which of the unit's heads, first row, and where dq of its tile goes.
    into: Vec<(usize, usize, TensorMut<'a>)>,
}

impl<'a> Sums<'a> {
    /// Takes the pieces of `dq` of the heads of a wave. Those of units without keys are written.
    pub fn new<'b: 'a>(
        call: &'a Call<'a>,
        wave: &[Unit],
        lanes: &Lanes,
        dq: &mut Pieces<'b, 4>,
        accumulate: bool,
    ) -> Self {
        let units = wave.iter().enumerate().map(|(u, unit)| {
            let mut into = Vec::new();
            for (i, (b, h)) in call.heads_of(unit).enumerate() {
                for tile in 0..call.sequences[b].q_len.div_ceil(call.tiles.q) {
                    into.push((i, tile * call.tiles.q, dq.take(b, h, tile)));
                }
            }
            let count = lanes.lanes.iter().filter(|lane| lane.unit == u).count();
            UnitSum { lanes: vec![None; count], into }
        });
        let sums = Self { call, units: units.map(Mutex::new).collect(), accumulate };
        for unit in &sums.units {
            sums.add_up_whole(unit);
        }
        sums
    }

    /// Takes the parts of a lane.
    pub fn bring(&self, lane: &'a Lane, parts: &'a [f32]) {
        let unit = &self.units[lane.unit];
        unit.lock().unwrap_or_else(|e| e.into_inner()).lanes[lane.index] = Some((lane, parts));
        self.add_up_whole(unit);
    }

    /// Adds a unit up if all of its lanes are there and nobody has.
    fn add_up_whole(&self, unit: &Mutex<UnitSum<'a>>) {
        let mut unit = unit.lock().unwrap_or_else(|e| e.into_inner());
        if unit.lanes.iter().all(Option::is_some) {
            let whole = std::mem::take(&mut *unit);
            drop(unit);
            self.add_up(whole);
        }
    }

    /// Writes dq of a unit whose lanes are all there.
    fn add_up(&self, unit: UnitSum<'_>) {
        let (dim, dims) = (self.call.tiles.dim, &self.call.dims);
        let mut room = self.call.pool.lend(self.call.tiles.q * dim);
        for (head, first, mut piece) in unit.into {
            let rows = piece.shape()[2];
            let sum = &mut room[..rows * dim];
            sum.fill(0.0);
            for (lane, parts) in unit.lanes.iter().flatten() {
                let part = &lane.parts[head];
                if part.rows.contains(&first) {
                    let at = (part.at + first - part.rows.start) * dim;
                    simd::add(sum, &parts[at..][..rows * dim]);
                }
            }
            simd::scale(sum, self.call.scale);
            for (r, row) in sum.chunks_exact(dim).enumerate() {
                piece.write_row(0, 0, r, &row[..dims.dim], self.accumulate);
            }
        }
    }
}

/// The rows of a head between which queries see one of `keys`, whole tiles of them, and how many
/// tiles of `keys` they see.
fn seen_by(call: &Call<'_>, b: usize, h: usize, keys: &Range<usize>) -> (Range<usize>, usize) {
    let (tiles, len) = (&call.tiles, call.sequences[b].q_len);
    let key_tiles = keys.start / tiles.kv..keys.end.div_ceil(tiles.kv);
    let live = call.live(b, h);
    let (mut rows, mut count) = (len..0, 0);
    for tile in 0..len.div_ceil(tiles.q) {
        let own = live.count(tile, &key_tiles);
        if own > 0 {
            rows = rows.start.min(tile * tiles.q)..len.min((tile + 1) * tiles.q);
            count += own;
        }
    }
    if count == 0 { (0..0, 0) } else { (rows, count) }
}
