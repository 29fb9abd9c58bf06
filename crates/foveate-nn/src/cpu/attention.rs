//! Attention through the crate `foveate`, on strided views of the packed projection: nothing is
//! copied, and the gradients of queries, keys and values are written back packed.

use foveate::tensor::packed::{Order, PackedShape, QkvMut, QkvPacked, QkvRef};
use foveate::{
    AnyBuffer, BackwardArgs, BufferData, CaptureGrad, ForwardArgs, Layout, Operands, Plan,
    TensorMut, TensorRef,
};

use crate::backend::{KvCache, LayerAttention, PackedHeads};
use crate::config::LearnedBuffer;
use crate::cpu::Cpu;
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
    Ok(QkvPacked::stacked(&shape)?)
}

fn operands(p: PackedHeads, qkv: &[f32]) -> Result<Operands<'_>, NnError> {
    let QkvRef { q, k, v, .. } = packing(p)?.views(qkv)?;
    Ok(Operands::new(q, k, v))
}

fn out_layout(p: PackedHeads) -> Layout {
    let width = p.heads_q * p.dim;
    Layout::strided([p.rows, p.heads_q, p.len, p.dim], [p.len * width, p.dim, width, 1], 0)
}

fn lse_layout(p: PackedHeads) -> Layout<3> {
    Layout::contiguous([p.rows, p.heads_q, p.len])
}

/// The plan with the layer's learned buffers.
fn bound(layer: &LayerAttention<'_, Cpu>) -> Result<Plan, NnError> {
    let (mut plan, mut values) = (layer.program.plan.plan().clone(), layer.values.values());
    for (name, LearnedBuffer { shape, .. }) in layer.program.learned {
        let (own, rest) = values.split_at(shape.iter().product());
        plan = plan.rebind(&AnyBuffer::new(name, shape, BufferData::F32(own.to_vec()), true)?)?;
        values = rest;
    }
    Ok(plan)
}

pub(super) fn forward(
    layer: &LayerAttention<'_, Cpu>,
    qkv: &[f32],
    out: &mut [f32],
    lse: &mut [f32],
) -> Result<(), NnError> {
    let heads = layer.heads;
    bound(layer)?.forward_into(ForwardArgs {
        operands: operands(heads, qkv)?,
        out: TensorMut::new(out, out_layout(heads))?,
        lse: TensorMut::new(lse, lse_layout(heads))?,
        max_score: None,
    })?;
    Ok(())
}

/// Puts the keys and values of a packed projection into the cache, then attends to all in it.
pub(super) fn forward_cached(
    layer: &LayerAttention<'_, Cpu>,
    qkv: &[f32],
    KvCache { keys, values, position }: KvCache<'_, Vec<f32>>,
    out: &mut [f32],
    lse: &mut [f32],
) -> Result<(), NnError> {
    let PackedHeads { len, heads_q, heads_kv, dim, .. } = layer.heads;
    let (q, kv) = (heads_q * dim, heads_kv * dim);
    for (i, row) in qkv.chunks_exact(layer.heads.width()).enumerate() {
        let to = (position + i) * kv..(position + i + 1) * kv;
        keys[to.clone()].copy_from_slice(&row[q..q + kv]);
        values[to].copy_from_slice(&row[q + kv..]);
    }
    let layout = |len, heads, width| Layout::strided([1, heads, len, dim], [0, dim, width, 1], 0);
    let cached = layout(position + len, heads_kv, kv);
    bound(layer)?.forward_into(ForwardArgs {
        operands: Operands {
            q: TensorRef::new(qkv, layout(len, heads_q, layer.heads.width()))?,
            k: TensorRef::new(&*keys, cached)?,
            v: TensorRef::new(&*values, cached)?,
            sink: None,
            varlen: None,
            pages: None,
            scales: None,
        },
        out: TensorMut::new(out, layout(len, heads_q, q))?,
        lse: TensorMut::new(lse, lse_layout(layer.heads))?,
        max_score: None,
    })?;
    Ok(())
}

pub(super) fn backward(
    layer: &LayerAttention<'_, Cpu>,
    qkv: &[f32],
    out: &[f32],
    lse: &[f32],
    d_out: &[f32],
    d_qkv: &mut [f32],
    d_learned: &mut [f32],
) -> Result<(), NnError> {
    let heads = layer.heads;
    // A plan overwrites all its destinations or adds to all. The packed gradient is of this batch
    // alone, those of learned buffers are sums over batches: they are small, so they are added.
    let mut found = vec![0.0; d_learned.len()];
    let mut rest = found.as_mut_slice();
    let mut d_captures = Vec::with_capacity(layer.program.learned.len());
    for (name, LearnedBuffer { shape, .. }) in layer.program.learned {
        let (own, others) = rest.split_at_mut(shape.iter().product());
        d_captures.push(CaptureGrad { name, into: own.into() });
        rest = others;
    }
    let QkvMut { q: dq, k: dk, v: dv, .. } = packing(heads)?.views_mut(d_qkv)?;
    bound(layer)?.backward_into(BackwardArgs {
        operands: operands(heads, qkv)?,
        out: TensorRef::new(out, out_layout(heads))?,
        lse: TensorRef::new(lse, lse_layout(heads))?,
        d_out: TensorRef::new(d_out, out_layout(heads))?,
        d_lse: None,
        dq: Some(dq),
        dk: Some(dk),
        dv: Some(dv),
        accumulate: false,
        d_sink: None,
        d_captures,
    })?;
    d_learned.iter_mut().zip(&found).for_each(|(sum, found)| *sum += found);
    Ok(())
}
