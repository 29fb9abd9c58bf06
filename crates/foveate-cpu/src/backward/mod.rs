//! The backward pass: five products a tile, no atomics.
//!
//! With `p = exp(s - lse)` recomputed from q and k, and `delta = Σ d_out·out - d_lse` of each row:
//!
//! ```text
//! s  = q·kᵀ        p = exp(score(s) - lse)
//! dp = d_out·vᵀ    ds = p·(dp - delta)·∂score/∂s
//! dv += pᵀ·d_out   dk += dsᵀ·q   dq += ds·k
//! ```
//!
//! A task owns a *KV split*: a range of keys of one KV head. It visits its keys in chunks. It packs a
//! chunk, which stays in L2 with its dk and dv, and visits all query rows of all heads (and
//! sequences) that see the chunk. So one task sums dk and dv, in one order, and writes
//! them once. Every split that a query row sees adds to its dq. A head has at most eight splits, each
//! with an f32 `dq_accum` of its own; the task that finishes last adds them up in order. The number
//! of splits depends on the problem only. That is the price of five products instead of seven
//! without atomics: at most eight f32 copies of dq for the heads of a wave, O(S).
//!
//! Operands in bf16 are multiplied in pairs where the processor does that. `p` and `ds` are rounded
//! to bf16 for their products, as the gradients will be. A `d_out` of another dtype than the operands
//! is not rounded: then the pass runs in f32.
//!
//! - `kv_split` splits the keys of a wave, and adds up dq.
//! - `key_tile` packs the keys and values of a tile.
//! - `statistics` has `lse` and `delta` of the rows of a wave.
//! - `tile` is the loop of a task and the products of a tile.

mod key_tile;
mod kv_split;
mod statistics;
mod tile;

use foveate_problem::BackwardArgs;
use foveate_tensor::DType;

use crate::call::Call;
use crate::captures::CaptureSums;
use crate::error::CpuError;
use crate::pack::Format;
use crate::simd::Pair;
use crate::tasks::{KvHead, OutputTiles, RowRange, key_ranges, run, waves};

use kv_split::{DqAccum, KvSplits};
use statistics::{Sources, Statistics};
use tile::{Scratch, Wanted, Worker};

/// Runs the backward pass of `call`.
pub fn backward(call: &Call<'_>, args: BackwardArgs<'_>) -> Result<(), CpuError> {
    match call.pairs && args.d_out.dtype() == DType::BF16 {
        true => run_in::<Pair>(call, args),
        false => run_in::<f32>(call, args),
    }
}

/// [`backward`] with operands in a format.
fn run_in<T: Format>(call: &Call<'_>, args: BackwardArgs<'_>) -> Result<(), CpuError> {
    let BackwardArgs { operands, out, lse, d_out, d_lse, dq, dk, dv, accumulate, .. } = args;
    let tiles = call.tiles;
    let ranges: Vec<RowRange> = call.sequences.iter().map(RowRange::queries).collect();
    let keys = key_ranges(&call.dims, &call.sequences);
    let split_len = |len: usize| tiles.kv_split_len(len, call.kv_heads.len());
    let mut dq = dq.map(|dq| OutputTiles::split(dq, &ranges, |_| tiles.q));
    let mut dk = dk.map(|dk| OutputTiles::split(dk, &keys, split_len));
    let mut dv = dv.map(|dv| OutputTiles::split(dv, &keys, split_len));
    let wanted = Wanted { dq: dq.is_some(), dk: dk.is_some(), dv: dv.is_some() };
    // Without a destination dq has rows of no elements.
    let dim_q = if wanted.dq { tiles.dim } else { 0 };
    let mut captures = CaptureSums::new(call, args.d_captures, accumulate)?;
    let captures_wanted = captures.wanted();
    let mut d_sink = vec![0.0; call.dims.heads_q];

    for wave in waves(&call.kv_heads, call.wave_bytes, |kv_head| wave_elems(call, kv_head)) {
        let splits = KvSplits::new(call, wave);
        // The largest first, so that it and not a smaller one takes what the forward pass has left.
        let mut dq_buffer = call.pool.alloc(splits.elems(dim_q));
        let rows: usize = wave.iter().map(|kv_head| rows_of(call, kv_head)).sum();
        let mut rows_buffer = call.pool.alloc(3 * rows);
        let sources = Sources { out, lse, d_out, d_lse };
        let statistics =
            Statistics::new::<T>(call, wave, &operands, sources, &mut rows_buffer, &mut d_sink);
        let tasks = splits.tasks(dim_q, &mut dq_buffer, wave, &mut dk, &mut dv);
        let dq_accum = DqAccum::new(call, wave, &splits, &mut dq, accumulate);
        let worker = Worker {
            call,
            wave,
            splits: &splits,
            dq_accum: &dq_accum,
            statistics: &statistics,
            operands: &operands,
            d_out,
            accumulate,
        };
        let scratch = || Scratch::new::<T>(call, captures_wanted, wanted);
        run(captures.deal(call, tasks), scratch, |scratch, (slot, tasks)| {
            tasks.into_iter().for_each(|task| worker.run::<T>(scratch, slot, task));
        });
    }
    captures.store(accumulate);
    if let Some(mut into) = args.d_sink {
        let d_sink: Vec<f32> = d_sink.into_iter().map(|x| x as f32).collect();
        into.store(&d_sink, accumulate);
    }
    call.finish()
}

/// Takes the workspace of a thread from the pool, and gives it back.
pub fn take_scratch(call: &Call<'_>) {
    let all = Wanted { dq: true, dk: true, dv: true };
    match call.pairs {
        true => drop(Scratch::new::<Pair>(call, false, all)),
        false => drop(Scratch::new::<f32>(call, false, all)),
    }
    drop(call.pool.alloc(call.tiles.q * call.tiles.dim));
}

/// Query rows of all heads of a KV head.
fn rows_of(call: &Call<'_>, kv_head: &KvHead) -> usize {
    call.heads_of(kv_head).map(|(b, _)| call.sequences[b].q_len).sum()
}

/// Floats of workspace that a KV head takes at most: `dq_accum` and row statistics.
pub fn wave_elems(call: &Call<'_>, kv_head: &KvHead) -> usize {
    let (tiles, len) = (&call.tiles, kv_head.keys.len);
    let splits = len.div_ceil(tiles.kv_split_len(len, call.kv_heads.len()));
    rows_of(call, kv_head) * (splits * tiles.dim + 3)
}
