//! The KV splits of a wave, and the sum of their dq.
//!
//! A split accumulates dq for the query rows that see one of its keys, from the first such tile to
//! the last: under a causal mask splits of late keys have few rows, under a window all have few.

use std::ops::Range;
use std::sync::Mutex;

use foveate_tensor::TensorMut;

use crate::call::Call;
use crate::simd;
use crate::tasks::{KvHead, OutputTiles};

/// The KV splits of a wave.
pub struct KvSplits {
    /// Sequence and query head of each head of the wave, KV head by KV head.
    heads: Vec<(usize, usize)>,
    splits: Vec<KvSplit>,
}

/// A range of keys of a KV head.
pub struct KvSplit {
    /// Index of the KV head in the wave.
    pub kv_head: usize,
    pub keys: Range<usize>,
    /// Its index among the splits of the KV head.
    index: usize,
    /// Index, in the wave, of the first query head of the KV head.
    pub first_head: usize,
    /// The rows of dq that it accumulates, for each query head of the KV head.
    pub parts: Vec<DqPart>,
    /// Live tiles, for the order of tasks.
    cost: usize,
}

/// The rows of dq of one query head that a split accumulates.
pub struct DqPart {
    /// Rows of the query head: whole tiles.
    pub rows: Range<usize>,
    /// Its first row in the split's `dq_accum`.
    pub at: usize,
}

/// A split and the destinations of its gradients.
pub struct KvSplitTask<'a> {
    pub split: &'a KvSplit,
    pub dk: Option<TensorMut<'a>>,
    pub dv: Option<TensorMut<'a>>,
    /// The f32 dq of the split's rows, query head after query head.
    pub dq_accum: &'a mut [f32],
}

impl KvSplit {
    /// Rows of all parts.
    fn rows(&self) -> usize {
        self.parts.iter().map(|part| part.rows.len()).sum()
    }
}

impl KvSplits {
    /// Splits the keys of a wave.
    pub fn new(call: &Call<'_>, wave: &[KvHead]) -> Self {
        let (mut heads, mut splits) = (Vec::new(), Vec::new());
        for (u, kv_head) in wave.iter().enumerate() {
            let first_head = heads.len();
            heads.extend(call.heads_of(kv_head));
            let len = call.tiles.kv_split_len(kv_head.keys.len, call.kv_heads.len());
            for (index, start) in (0..kv_head.keys.len).step_by(len).enumerate() {
                let keys = start..kv_head.keys.len.min(start + len);
                let (mut parts, mut at, mut cost) = (Vec::new(), 0, 0);
                for &(b, h) in &heads[first_head..] {
                    let (rows, tiles) = rows_that_see(call, b, h, &keys);
                    parts.push(DqPart { rows: rows.clone(), at });
                    at += rows.len();
                    cost += tiles;
                }
                splits.push(KvSplit { kv_head: u, keys, index, first_head, parts, cost });
            }
        }
        Self { heads, splits }
    }

    /// Floats of `dq_accum` of all splits.
    pub fn elems(&self, dim: usize) -> usize {
        self.splits.iter().map(|split| split.rows() * dim).sum()
    }

    /// Sequence and query head of a query head of the wave.
    pub fn head(&self, head: usize) -> (usize, usize) {
        self.heads[head]
    }

    /// A task for each split, longest first. `buffer` holds [`Self::elems`], which are none for
    /// rows of `dim` 0.
    pub fn tasks<'a, 'b: 'a>(
        &'a self,
        dim: usize,
        mut buffer: &'a mut [f32],
        wave: &[KvHead],
        dk: &mut Option<OutputTiles<'b, 4>>,
        dv: &mut Option<OutputTiles<'b, 4>>,
    ) -> Vec<KvSplitTask<'a>> {
        let mut tasks = Vec::with_capacity(self.splits.len());
        for split in &self.splits {
            let kv_head = &wave[split.kv_head];
            let dq_accum;
            (dq_accum, buffer) = buffer.split_at_mut(split.rows() * dim);
            let own = |of: &mut Option<OutputTiles<'b, 4>>| {
                of.as_mut().map(|of| of.take(kv_head.range, kv_head.h_kv, split.index))
            };
            let (dk, dv) = (own(dk), own(dv));
            tasks.push(KvSplitTask { split, dk, dv, dq_accum });
        }
        tasks.sort_by_key(|task| std::cmp::Reverse(task.split.cost));
        tasks
    }
}

/// dq of a wave. The task that finishes the last split of a KV head adds the splits up, in order,
/// while some are still in a cache.
pub struct DqAccum<'a> {
    call: &'a Call<'a>,
    kv_heads: Vec<Mutex<HeadAccum<'a>>>,
    accumulate: bool,
}

/// The finished splits of a KV head.
#[derive(Default)]
struct HeadAccum<'a> {
    /// Each split and its `dq_accum`, once it is finished.
    splits: Vec<Option<(&'a KvSplit, &'a [f32])>>,
    /// Query head of the KV head, first row of a query tile, and destination of its dq.
    into: Vec<(usize, usize, TensorMut<'a>)>,
}

impl<'a> DqAccum<'a> {
    /// Takes the tiles of `dq` of the heads of a wave. Writes those of KV heads without keys.
    pub fn new<'b: 'a>(
        call: &'a Call<'a>,
        wave: &[KvHead],
        splits: &KvSplits,
        dq: &mut Option<OutputTiles<'b, 4>>,
        accumulate: bool,
    ) -> Self {
        let kv_heads = wave.iter().enumerate().map(|(u, kv_head)| {
            let mut into = Vec::new();
            for (i, (b, h)) in call.heads_of(kv_head).enumerate() {
                let Some(dq) = dq else { break };
                for tile in 0..call.sequences[b].q_len.div_ceil(call.tiles.q) {
                    into.push((i, tile * call.tiles.q, dq.take(b, h, tile)));
                }
            }
            let count = splits.splits.iter().filter(|split| split.kv_head == u).count();
            HeadAccum { splits: vec![None; count], into }
        });
        let dq_accum = Self { call, kv_heads: kv_heads.map(Mutex::new).collect(), accumulate };
        for kv_head in &dq_accum.kv_heads {
            dq_accum.add_up_if_complete(kv_head);
        }
        dq_accum
    }

    /// Takes `dq_accum` of a finished split.
    pub fn finish(&self, split: &'a KvSplit, dq_accum: &'a [f32]) {
        let kv_head = &self.kv_heads[split.kv_head];
        kv_head.lock().unwrap_or_else(|e| e.into_inner()).splits[split.index] =
            Some((split, dq_accum));
        self.add_up_if_complete(kv_head);
    }

    /// Adds the splits of a KV head up when all are finished, once.
    fn add_up_if_complete(&self, kv_head: &Mutex<HeadAccum<'a>>) {
        let mut kv_head = kv_head.lock().unwrap_or_else(|e| e.into_inner());
        if kv_head.splits.iter().all(Option::is_some) {
            let complete = std::mem::take(&mut *kv_head);
            drop(kv_head);
            self.add_up(complete);
        }
    }

    /// Writes dq of a KV head from its splits.
    fn add_up(&self, kv_head: HeadAccum<'_>) {
        let (dim, dims) = (self.call.tiles.dim, &self.call.dims);
        let mut sums = self.call.pool.alloc(self.call.tiles.q * dim);
        for (head, first, mut tile) in kv_head.into {
            let rows = tile.shape()[2];
            let sum = &mut sums[..rows * dim];
            sum.fill(0.0);
            for (split, dq_accum) in kv_head.splits.iter().flatten() {
                let part = &split.parts[head];
                if part.rows.contains(&first) {
                    let at = (part.at + first - part.rows.start) * dim;
                    simd::add(sum, &dq_accum[at..][..rows * dim]);
                }
            }
            simd::scale(sum, self.call.scale);
            for (r, row) in sum.chunks_exact(dim).enumerate() {
                tile.write_row(0, 0, r, &row[..dims.dim], self.accumulate);
            }
        }
    }
}

/// The rows of a query head from the first tile that sees one of `keys` to the last, and the number
/// of live tiles among them.
fn rows_that_see(
    call: &Call<'_>,
    b: usize,
    h: usize,
    keys: &Range<usize>,
) -> (Range<usize>, usize) {
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
