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
//! A task owns a *lane*: a range of keys of one key/value head. It goes through its keys in
//! chunks that it packs and that stay in the second-level cache with their dk and dv, and for each
//! chunk over all query rows of all heads (and sequences) that see it. So dk and dv are summed in one place, in
//! one order, and written once. dq of a row gets a part from every lane that it sees; a head has at
//! most eight, each with its own f32 dq of the rows that see it, added up in order when
//! the last is there. The
//! number of lanes depends on the problem only. That is the price of five products instead of
//! seven without atomics: at most eight f32 copies of dq for the heads of a wave, O(S).
//!
//! Operands in bf16 are multiplied in pairs where the processor does that, and `p` and `ds` are
//! rounded to bf16 for their products, as the gradients will be. A `d_out` of another dtype than
//! theirs is not rounded: then all of it is done in f32.
//!
//! - `lanes` cuts a wave into lanes, and adds their parts of dq up.
//! - `block` has the keys and values of a tile packed.
//! - `statistics` has `lse` and `delta` of its rows.
//! - `tile` is what a task does.

mod block;
mod lanes;
mod statistics;
mod tile;

use foveate_problem::BackwardArgs;
use foveate_tensor::DType;

use crate::call::Call;
use crate::captures::CaptureSums;
use crate::error::CpuError;
use crate::pack::Format;
use crate::simd::Pair;
use crate::work::{Pieces, Span, Unit, key_spans, run, waves};

use lanes::{Lanes, Sums};
use statistics::{Sources, Statistics};
use tile::{Scratch, Worker};

/// Runs the backward pass of `call`.
pub fn backward(call: &Call<'_>, args: BackwardArgs<'_>) -> Result<(), CpuError> {
    match call.pairs && args.d_out.dtype() == DType::BF16 {
        true => run_in::<Pair>(call, args),
        false => run_in::<f32>(call, args),
    }
}

/// The same with operands in a format.
fn run_in<T: Format>(call: &Call<'_>, args: BackwardArgs<'_>) -> Result<(), CpuError> {
    let BackwardArgs { operands, out, lse, d_out, d_lse, dq, dk, dv, accumulate, .. } = args;
    let tiles = call.tiles;
    let spans: Vec<Span> = call.sequences.iter().map(Span::queries).collect();
    let keys = key_spans(&call.dims, &call.sequences);
    let lane_len = |len: usize| tiles.lane(len, call.units.len());
    let mut dq = Pieces::cut(dq, &spans, |_| tiles.q);
    let mut dk = Pieces::cut(dk, &keys, lane_len);
    let mut dv = Pieces::cut(dv, &keys, lane_len);
    let mut captures = CaptureSums::new(call.mods, call.pool, args.d_captures, accumulate)?;
    let captures_wanted = captures.wanted();
    let mut d_sink = vec![0.0; call.dims.heads_q];

    for wave in waves(&call.units, call.wave_bytes, |unit| wave_elems(call, unit)) {
        let rows: usize = wave.iter().map(|unit| rows_of(call, unit)).sum();
        let mut room = call.pool.lend(3 * rows);
        let sources = Sources { out, lse, d_out, d_lse };
        let statistics =
            Statistics::new::<T>(call, wave, &operands, sources, &mut room, &mut d_sink);
        let lanes = Lanes::cut(call, wave);
        let mut parts = call.pool.lend(lanes.elems(tiles.dim));
        let tasks = lanes.tasks(tiles.dim, &mut parts, wave, &mut dk, &mut dv);
        let sums = Sums::new(call, wave, &lanes, &mut dq, accumulate);
        let worker = Worker {
            call,
            wave,
            lanes: &lanes,
            sums: &sums,
            statistics: &statistics,
            operands: &operands,
            d_out,
            accumulate,
        };
        let scratch = || Scratch::new::<T>(call, captures_wanted);
        run(captures.share(tasks), scratch, |scratch, (slot, tasks)| {
            tasks.into_iter().for_each(|task| worker.run::<T>(scratch, slot, task));
        });
    }
    captures.store(accumulate);
    if let Some(into) = args.d_sink {
        for (into, own) in into.iter_mut().zip(d_sink) {
            *into = if accumulate { *into + own as f32 } else { own as f32 };
        }
    }
    call.finish()
}

/// Query rows of all heads of a unit.
fn rows_of(call: &Call<'_>, unit: &Unit) -> usize {
    call.heads_of(unit).map(|(b, _)| call.sequences[b].q_len).sum()
}

/// Floats of workspace a unit takes at most: parts of dq and row statistics.
pub fn wave_elems(call: &Call<'_>, unit: &Unit) -> usize {
    let (tiles, len) = (&call.tiles, unit.keys.len);
    let lanes = len.div_ceil(tiles.lane(len, call.units.len()));
    rows_of(call, unit) * (lanes * tiles.dim + 3)
}
