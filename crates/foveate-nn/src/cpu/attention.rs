//! Attention through the crate `foveate`, on strided views of the packed projection: nothing is
//! copied, and the gradients of queries, keys and values are written back packed.

use foveate::{
    BackwardArgs, CaptureGrad, ForwardArgs, Layout, Operands, Plan, TensorMut, TensorRef,
};

use crate::backend::PackedHeads;
use crate::error::NnError;

/// `heads` neighbouring heads of a `[rows, len, width]` buffer, from head `first` on.
fn heads_layout(p: PackedHeads, all_heads: usize, first: usize, heads: usize) -> Layout {
    let width = all_heads * p.dim;
    let shape = [p.rows, heads, p.len, p.dim];
    Layout::strided(shape, [p.len * width, p.dim, width, 1], first * p.dim)
}

fn packed_heads(p: PackedHeads) -> usize {
    p.heads_q + 2 * p.heads_kv
}

fn operands(p: PackedHeads, qkv: &[f32]) -> Result<Operands<'_>, NnError> {
    let view = |first, heads| TensorRef::f32(qkv, heads_layout(p, packed_heads(p), first, heads));
    Ok(Operands {
        q: view(0, p.heads_q)?,
        k: view(p.heads_q, p.heads_kv)?,
        v: view(p.heads_q + p.heads_kv, p.heads_kv)?,
        sink: None,
        varlen: None,
    })
}

fn out_layout(p: PackedHeads) -> Layout {
    heads_layout(p, p.heads_q, 0, p.heads_q)
}

fn lse_layout(p: PackedHeads) -> Layout<3> {
    Layout::contiguous([p.rows, p.heads_q, p.len])
}

pub(super) fn forward(
    plan: &Plan,
    heads: PackedHeads,
    qkv: &[f32],
    out: &mut [f32],
    lse: &mut [f32],
) -> Result<(), NnError> {
    plan.forward_into(ForwardArgs {
        operands: operands(heads, qkv)?,
        out: TensorMut::f32(out, out_layout(heads))?,
        lse: TensorMut::f32(lse, lse_layout(heads))?,
        max_score: None,
    })?;
    Ok(())
}

pub(super) fn backward(
    plan: &Plan,
    heads: PackedHeads,
    qkv: &[f32],
    out: &[f32],
    lse: &[f32],
    d_out: &[f32],
    d_qkv: &mut [f32],
    names: &[String],
    captures: &mut [Vec<f32>],
) -> Result<(), NnError> {
    // Captured gradients are sums over the batches of an accumulation, those of the packed
    // projection are of this batch alone: the plan adds to both, so the latter start from zero.
    let d_captures = names.iter().zip(captures).map(|(name, into)| CaptureGrad { name, into });
    let d_captures: Vec<_> = d_captures.collect();
    let accumulate = !d_captures.is_empty();
    if accumulate {
        d_qkv.fill(0.0);
    }
    let all = packed_heads(heads);
    let packed = TensorMut::f32(d_qkv, heads_layout(heads, all, 0, all))?;
    let (dq, rest) = packed.split_at(1, heads.heads_q);
    let (dk, dv) = rest.split_at(1, heads.heads_kv);
    plan.backward_into(BackwardArgs {
        operands: operands(heads, qkv)?,
        out: TensorRef::f32(out, out_layout(heads))?,
        lse: TensorRef::f32(lse, lse_layout(heads))?,
        d_out: TensorRef::f32(d_out, out_layout(heads))?,
        d_lse: None,
        dq,
        dk,
        dv,
        accumulate,
        d_sink: None,
        d_captures,
    })?;
    Ok(())
}
