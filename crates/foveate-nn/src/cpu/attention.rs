//! Attention through the crate `foveate`, on strided views of the packed projection: nothing is
//! copied, and the gradients of queries, keys and values are written back packed.

use foveate::tensor::packed::{Order, PackedShape, QkvMut, QkvPacked, QkvRef};
use foveate::{
    BackwardArgs, CaptureGrad, ForwardArgs, Layout, Operands, Plan, TensorMut, TensorRef,
};

use crate::backend::PackedHeads;
use crate::config::QkvOrder;
use crate::error::NnError;

fn packing(p: PackedHeads) -> Result<QkvPacked, NnError> {
    let shape = PackedShape {
        order: Order::Bshd,
        batch: p.rows,
        len: p.len,
        heads_q: p.heads_q,
        heads_kv: p.heads_kv,
        dim: p.dim,
        dim_v: p.dim,
    };
    Ok(match p.order {
        QkvOrder::Stacked => QkvPacked::stacked(&shape)?,
        QkvOrder::Interleaved => QkvPacked::interleaved(&shape)?,
    })
}

fn operands(p: PackedHeads, qkv: &[f32]) -> Result<Operands<'_>, NnError> {
    let QkvRef { q, k, v, .. } = packing(p)?.views(qkv)?;
    Ok(Operands { q, k, v, sink: None, varlen: None, pages: None })
}

fn out_layout(p: PackedHeads) -> Layout {
    let width = p.heads_q * p.dim;
    Layout::strided([p.rows, p.heads_q, p.len, p.dim], [p.len * width, p.dim, width, 1], 0)
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
        out: TensorMut::new(out, out_layout(heads))?,
        lse: TensorMut::new(lse, lse_layout(heads))?,
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
    let d_captures = names
        .iter()
        .zip(captures)
        .map(|(name, into)| CaptureGrad { name, into: into.as_mut_slice().into() });
    let d_captures: Vec<_> = d_captures.collect();
    let accumulate = !d_captures.is_empty();
    if accumulate {
        d_qkv.fill(0.0);
    }
    let QkvMut { q: dq, k: dk, v: dv, .. } = packing(heads)?.views_mut(d_qkv)?;
    plan.backward_into(BackwardArgs {
        operands: operands(heads, qkv)?,
        out: TensorRef::new(out, out_layout(heads))?,
        lse: TensorRef::new(lse, lse_layout(heads))?,
        d_out: TensorRef::new(d_out, out_layout(heads))?,
        d_lse: None,
        dq: Some(dq),
        dk: Some(dk),
        dv: Some(dv),
        accumulate,
        d_sink: None,
        d_captures,
    })?;
    Ok(())
}
