//! Tile sizes, from the caches and the problem.
//!
//! A query tile is the rows of a task; a key tile is the columns of one product. In the forward the
//! scores of a subtile of rows stay in L1, and the keys and values of a tile in L2 for all subtiles.
//! In the backward the score tile and its gradient stay in L1, and the keys, values and gradients of
//! a chunk of key tiles in L2.
//!
//! Small problems get small tiles, so that there are tasks for all threads and little padding.
//! The sizes depend on the problem only, never on the machine's threads, because results depend on
//! tiles in the last bits.

use foveate_problem::Dims;

use crate::error::{CpuError, CpuErrorKind};
use crate::simd::{LANES, padded};

/// Floats of L2 that a task may fill (512 KiB).
const L2_ELEMS: usize = 128 << 10;
/// Tasks a call aims for, so that tens of threads have work.
const TASKS: usize = 32;
/// The most KV splits of a head in the backward, each with a `dq_accum`.
const MAX_KV_SPLITS: usize = 8;

/// Options of the CPU backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuOptions {
    /// Rows of a query tile, 1 to 1024; chosen when `None`.
    pub tile_q: Option<usize>,
    /// Columns of a key tile, a multiple of 16 from 16 to 1024; chosen when `None`.
    pub tile_kv: Option<usize>,
    /// Bytes of workspace to stay below where one key/value head does not need more; 256 MiB
    /// when `None`. Of the results only the gradients of learned buffers depend on it, in the
    /// last bits.
    pub workspace_bytes: Option<usize>,
    /// Whether calls measure the time of their stages, for
    /// [`CpuPlan::take_stages`](crate::CpuPlan::take_stages).
    pub profile: bool,
}

/// Tile sizes of a call, with the head dims padded to whole vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiles {
    /// Queries in a tile.
    pub q: usize,
    /// Keys in a tile, whole vectors.
    pub kv: usize,
    /// Key tiles in a chunk of the backward.
    pub chunk: usize,
    /// Head dim of q and k, padded.
    pub dim: usize,
    /// Head dim of v, padded.
    pub dim_v: usize,
}

impl CpuOptions {
    /// Refuses sizes out of range.
    pub(crate) fn check(&self) -> Result<(), CpuError> {
        let refuse = |name, reason| Err(CpuErrorKind::Option { name, reason }.into());
        if let Some(q) = self.tile_q
            && !(1..=1024).contains(&q)
        {
            return refuse("tile_q", format!("{q} rows; a query tile has 1 to 1024"));
        }
        if let Some(kv) = self.tile_kv
            && (!(LANES..=1024).contains(&kv) || !kv.is_multiple_of(LANES))
        {
            let reason = format!("{kv} columns; a key tile has a multiple of {LANES}, to 1024");
            return refuse("tile_kv", reason);
        }
        Ok(())
    }
}

impl Tiles {
    /// The tiles of the forward. Queries and their output take up to 384 KiB, so that under a window
    /// or in documents most keys stay in the cache of one core for all of their queries. A subtile of
    /// scores takes 18 KiB, so that a window of 256 lies in one key tile or two, not in two or three.
    /// Few queries of entries that share their keys most often read a cache of pages, of 128 keys as
    /// PyTorch makes them: in a tile of one page are keys of one entry.
    pub fn forward(dims: &Dims, options: &CpuOptions) -> Self {
        let q = if padded(dims.dim) + padded(dims.dim_v) <= 256 { 384 } else { 192 };
        let shares_cache = dims.shared_kv && dims.batch > 1 && dims.len_q <= 16;
        Self::at_most([q, if shares_cache { 128 } else { 384 }], dims, options, 1)
    }

    /// The tiles of the backward, when `width` numbers of the operands take the space of a float.
    pub fn backward(dims: &Dims, options: &CpuOptions, width: usize) -> Self {
        Self::at_most([128, 128], dims, options, width)
    }

    /// Tiles of at most `[q, kv]`, smaller where the problem is.
    fn at_most([mut q, kv]: [usize; 2], dims: &Dims, options: &CpuOptions, width: usize) -> Self {
        let (dim, dim_v) = (padded(dims.dim), padded(dims.dim_v));
        let rows = dims.heads_q * dims.len_q * if dims.packed { 1 } else { dims.batch };
        while q > 16 && rows.div_ceil(q) < TASKS {
            q /= 2;
        }
        let q = options.tile_q.unwrap_or(q.min(dims.len_q.max(1)));
        let kv = options.tile_kv.unwrap_or(kv.min(padded(dims.len_k.max(1))));
        // Per key: k twice, v transposed, dk and dv.
        let of_key = (2 * dim + dim_v) / width + dim + dim_v;
        let chunk = (L2_ELEMS / (of_key * kv)).clamp(1, dims.len_k.div_ceil(kv).max(1));
        Self { q, kv, chunk, dim, dim_v }
    }

    /// Keys of a KV split of the backward, whole chunks, when there are `kv_heads` KV heads.
    pub fn kv_split_len(&self, len_k: usize, kv_heads: usize) -> usize {
        let chunk = self.chunk * self.kv;
        let chunks = len_k.div_ceil(chunk).max(1);
        let splits = TASKS.div_ceil(kv_heads.max(1)).clamp(1, MAX_KV_SPLITS).min(chunks);
        chunks.div_ceil(splits) * chunk
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dims(heads: usize, len: usize, dim: usize) -> Dims {
        Dims {
            batch: 1,
            heads_q: heads,
            heads_kv: heads,
            len_q: len,
            len_k: len,
            dim,
            dim_v: dim,
            shared_kv: false,
            packed: false,
        }
    }

    #[test]
    fn small_problems_get_small_tiles() {
        let t = Tiles::forward(&dims(1, 5, 7), &CpuOptions::default());
        assert_eq!((t.q, t.kv, t.dim), (5, 16, 16));
        let t = Tiles::backward(&dims(1, 19, 7), &CpuOptions::default(), 1);
        assert_eq!((t.kv, t.chunk), (32, 1), "workspace for more keys than there are");
        let t = Tiles::forward(&dims(8, 4096, 128), &CpuOptions::default());
        assert_eq!((t.q, t.kv, t.dim), (384, 384, 128));
        let t = Tiles::forward(&dims(8, 4096, 64), &CpuOptions::default());
        assert_eq!((t.q, t.kv, t.dim), (384, 384, 64));
        let t = Tiles::backward(&dims(8, 4096, 128), &CpuOptions::default(), 1);
        assert_eq!((t.q, t.kv, t.dim), (128, 128, 128));
    }

    #[test]
    fn partial_sums_are_few_whatever_the_length() {
        for len in [1, 100, 5000, 1_000_000] {
            let t = Tiles::backward(&dims(1, len, 64), &CpuOptions::default(), 1);
            let split = t.kv_split_len(len, 1);
            assert!(len.div_ceil(split) <= MAX_KV_SPLITS && split.is_multiple_of(t.chunk * t.kv));
        }
    }

    #[test]
    fn tile_options_out_of_range_are_refused_with_numbers() {
        let e = CpuOptions { tile_kv: Some(100), ..Default::default() }.check().unwrap_err();
        assert_eq!(
            e.to_string(),
            "option tile_kv: 100 columns; a key tile has a multiple of 16, to 1024"
        );
        let e = CpuOptions { tile_q: Some(0), ..Default::default() }.check().unwrap_err();
        assert_eq!(e.to_string(), "option tile_q: 0 rows; a query tile has 1 to 1024");
    }
}
