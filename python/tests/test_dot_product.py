"""``DotProductAttention`` beside TransformerEngine's definitions in float64, every score held."""

import math
import sys
import types

import pytest
import torch
from reference import close

from foveate import DotProductAttention

G = torch.Generator().manual_seed(12)
B, HEADS, GROUPS, SQ, SKV, D, DV = 3, 4, 2, 23, 31, 8, 6
Q_LENGTHS, KV_LENGTHS = torch.tensor([23, 9, 0]), torch.tensor([31, 17, 5])
CAUSAL = ("causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right")
PLAIN = ("no_mask", "padding")


def cu(lengths):
    return torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).to(torch.int32)


def allowed(kind, window, at_end, lengths, arbitrary=None):
    """``[b, 1, sq, skv]`` by TransformerEngine's table of mask types."""
    i, j = torch.arange(SQ)[:, None], torch.arange(SKV)[None, :]
    q, kv = (n.view(-1, 1, 1, 1) for n in lengths)
    real_q, real_kv = (q, kv) if "padding" in kind else (SQ, SKV)
    at_end = "bottom_right" in kind or (kind not in ("causal", "padding_causal") and at_end is not False)
    before = i - j + ((real_kv - real_q) if at_end else 0)
    left, right = (-1, -1) if window is None else window
    right = 0 if "causal" in kind else right
    keep = torch.ones(B, 1, SQ, SKV, dtype=torch.bool)
    keep = keep & (before <= left) if left >= 0 else keep
    keep = keep & (before >= -right) if right >= 0 else keep
    if "padding" in kind:
        keep = keep & (i < q) & (j < kv)
    return keep & ~arbitrary if arbitrary is not None else keep, before


def gold(q, k, v, keep, bias=None, pre=None, sink=None):
    """``[b, h, s, d]`` operands; ``bias`` joins scores that are scaled, ``pre`` those that are not."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(HEADS // k.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-2, -1)
    scores = (scores if pre is None else scores + pre.double()) / math.sqrt(D)
    scores = scores if bias is None else scores + bias.double()
    scores = scores.masked_fill(~keep, -math.inf)
    largest = scores.amax((0, 2, 3))
    if sink is not None:
        scores = torch.cat([scores, sink.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    dead = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(dead, 0).softmax(-1).masked_fill(dead, 0)[..., : k.shape[2]]
    return (weights @ v), largest


def operands(dtype=torch.float32):
    sizes = ((B, SQ, HEADS, D), (B, SKV, GROUPS, D), (B, SKV, GROUPS, DV))
    return tuple(torch.randn(size, generator=G).to(dtype).requires_grad_() for size in sizes)


def in_format(form, tensors, lengths):
    """``[b, s, h, d]`` operands in a format; rows of sequences one after another, and one more at the end."""
    if form == "bshd":
        return tensors
    if form == "sbhd":
        return tuple(t.transpose(0, 1) for t in tensors)
    of = (lengths[0], lengths[1], lengths[1])
    return tuple(torch.cat([*(t[b, : n[b]] for b in range(B)), t[0, :1] * 0 + 5]) for t, n in zip(tensors, of))


def out_of_format(form, out):
    """``[b, h, s, d]``, with 0 in padding."""
    if form != "thd":
        out = out if form == "bshd" else out.transpose(0, 1)
        return out.unflatten(-1, (HEADS, DV)).transpose(1, 2)
    parts = out[: int(Q_LENGTHS.sum())].split(Q_LENGTHS.tolist())
    rows = torch.stack([torch.cat([p, p.new_zeros(SQ - len(p), p.shape[1])]) for p in parts])
    return rows.unflatten(-1, (HEADS, DV)).transpose(1, 2)


def compare(out, golden, tensors, golds=None, low=1e-6):
    close("out", out, golden, out.dtype, SKV * D)
    weights = torch.randn(out.shape, generator=G)
    ours = torch.autograd.grad((out * weights).sum(), tensors)
    theirs = torch.autograd.grad((golden * weights.double()).sum(), tensors if golds is None else golds)
    for at, (one, two) in enumerate(zip(ours, theirs)):
        close(f"gradient {at}", one, two, one.dtype, SKV * D * SQ)


@pytest.mark.parametrize("form", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("kind, window, at_end", [
    *((kind, window, None) for kind in CAUSAL for window in (None, (4, 0))),
    *((kind, window, at_end) for kind in PLAIN for window in (None, (4, 3)) for at_end in (None, False)),
])
def test_every_mask_in_every_format(form, kind, window, at_end):
    module = DotProductAttention(
        HEADS, (D, DV), GROUPS, qkv_format=form, attn_mask_type=kind, window_size=window, bottom_right_diagonal=at_end
    )
    tensors = operands()
    q, k, v = in_format(form, tensors, (Q_LENGTHS, KV_LENGTHS))
    cus = dict(cu_seqlens_q=cu(Q_LENGTHS), cu_seqlens_kv=cu(KV_LENGTHS)) if "padding" in kind else {}
    if form == "thd" and "padding" not in kind:
        with pytest.raises(ValueError, match="needs a padding"):
            module(q, k, v)
        return
    out = module(q, k, v, **cus)
    assert out.is_contiguous()
    if form == "thd":
        assert out.shape == (33, HEADS * DV) and not out[32:].any()
    keep, _ = allowed(kind, window, at_end, (Q_LENGTHS, KV_LENGTHS))
    golden, _ = gold(*(t.transpose(1, 2) for t in tensors), keep)
    compare(out_of_format(form, out), golden, tensors)


def test_masks_of_padding_are_tensors_too_and_one_may_be_arbitrary():
    tensors = operands()
    outs = tuple(torch.arange(n).view(1, 1, 1, -1) >= lengths.view(-1, 1, 1, 1)
                 for n, lengths in ((SQ, Q_LENGTHS), (SKV, KV_LENGTHS)))
    module = DotProductAttention(HEADS, (D, DV), GROUPS, qkv_format="bshd", attention_type="cross")
    out = module(*tensors, attention_mask=outs, attn_mask_type="causal,padding")
    keep, _ = allowed("padding_causal", None, None, (Q_LENGTHS, KV_LENGTHS))
    compare(out_of_format("bshd", out), gold(*(t.transpose(1, 2) for t in tensors), keep)[0], tensors)
    for shape in ((B, HEADS, SQ, SKV), (1, 1, SQ, SKV), (B, 1, 1, SKV)):
        masked_out = torch.rand(shape, generator=G) > 0.6
        out = module(*tensors, attention_mask=masked_out, attn_mask_type="arbitrary")
        compare(out_of_format("bshd", out), gold(*(t.transpose(1, 2) for t in tensors), ~masked_out)[0], tensors)


@pytest.mark.parametrize("kind", ["pre_scale_bias", "post_scale_bias"])
@pytest.mark.parametrize(
    "shape", [(1, HEADS, SQ, SKV), (B, 1, SQ, SKV), (B, HEADS, SQ, SKV), (1, 1, SQ, SKV), (1, 1, 1, SKV)]
)
def test_biases_of_every_shape_get_their_gradients(kind, shape):
    tensors, bias = operands(), torch.randn(shape, generator=G).requires_grad_()
    module = DotProductAttention(HEADS, (D, DV), GROUPS, qkv_format="bshd", attn_mask_type="padding_causal")
    out = module(*tensors, core_attention_bias_type=kind, core_attention_bias=bias,
                 cu_seqlens_q=cu(Q_LENGTHS), cu_seqlens_kv=cu(KV_LENGTHS))
    keep, _ = allowed("padding_causal", None, None, (Q_LENGTHS, KV_LENGTHS))
    joined = dict(pre=bias) if kind == "pre_scale_bias" else dict(bias=bias)
    golden, _ = gold(*(t.transpose(1, 2) for t in tensors), keep, **joined)
    compare(out_of_format("bshd", out), golden, (*tensors, bias))


@pytest.mark.parametrize("kind", ["causal", "causal_bottom_right", "padding", "padding_causal_bottom_right"])
@pytest.mark.parametrize("slopes", [None, (HEADS,), (B, HEADS)])
def test_alibi_counts_from_the_diagonal_of_its_mask(kind, slopes):
    tensors = operands()
    given = None if slopes is None else torch.rand(slopes, generator=G)
    module = DotProductAttention(HEADS, (D, DV), GROUPS, qkv_format="bshd", attn_mask_type=kind)
    cus = dict(cu_seqlens_q=cu(Q_LENGTHS), cu_seqlens_kv=cu(KV_LENGTHS)) if "padding" in kind else {}
    out = module(*tensors, core_attention_bias_type="alibi", alibi_slopes=given, **cus)
    keep, before = allowed(kind, None, None, (Q_LENGTHS, KV_LENGTHS))
    usual = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])
    slope = (usual if given is None else given).view(-1, HEADS, 1, 1)
    golden, _ = gold(*(t.transpose(1, 2) for t in tensors), keep, bias=-slope * before.abs())
    compare(out_of_format("bshd", out), golden, tensors)


def test_alibi_of_heads_that_are_no_power_of_two_goes_on_between():
    from foveate._dot_product import alibi_slopes_of

    assert torch.allclose(alibi_slopes_of(6), torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]))


@pytest.mark.parametrize("form", ["sbhd", "thd"])
@pytest.mark.parametrize("softmax", ["off-by-one", "learnable"])
def test_sinks_and_the_largest_score_of_each_head(softmax, form):
    tensors = operands()
    module = DotProductAttention(HEADS, (D, DV), GROUPS, qkv_format=form, attn_mask_type="padding_causal",
                                 softmax_type=softmax, return_max_logit=True)
    if softmax == "learnable":
        module.load_state_dict({"softmax_offset": torch.randn(HEADS, generator=G), "_extra_state": torch.empty(0)})
    out, largest = module(
        *in_format(form, tensors, (Q_LENGTHS, KV_LENGTHS)), cu_seqlens_q=cu(Q_LENGTHS), cu_seqlens_kv=cu(KV_LENGTHS)
    )
    keep, _ = allowed("padding_causal", None, None, (Q_LENGTHS, KV_LENGTHS))
    sink = module.softmax_offset
    golden, most = gold(*(t.transpose(1, 2) for t in tensors), keep, sink=sink)
    close("largest", largest, most, torch.float32, D)
    compare(out_of_format(form, out), golden, (*tensors, *([sink] if softmax == "learnable" else [])))


def test_rows_between_sequences_count_for_nothing():
    tensors = operands()
    room = (Q_LENGTHS + torch.tensor([2, 0, 3]), KV_LENGTHS + torch.tensor([1, 4, 0]))

    def spread(t, lengths, room):
        rows = [
            torch.cat([t[b, : lengths[b]], torch.full((int(room[b] - lengths[b]), *t.shape[2:]), math.nan)])
            for b in range(B)
        ]
        return torch.cat(rows).detach().requires_grad_()

    q, k, v = (spread(t, n, r) for t, n, r in zip(tensors, (Q_LENGTHS, KV_LENGTHS, KV_LENGTHS), (*room, room[1])))
    module = DotProductAttention(HEADS, (D, DV), GROUPS, qkv_format="thd", attn_mask_type="padding_causal_bottom_right")
    cus = dict(cu_seqlens_q=cu(Q_LENGTHS), cu_seqlens_kv=cu(KV_LENGTHS))
    out = module(q, k, v, **cus, cu_seqlens_q_padded=cu(room[0]), cu_seqlens_kv_padded=cu(room[1]))
    dense = module(*in_format("thd", tensors, (Q_LENGTHS, KV_LENGTHS)), **cus)
    kept = torch.cat([torch.arange(int(r)) < n for n, r in zip(Q_LENGTHS, room[0])])
    torch.testing.assert_close(out[kept], dense[:-1])
    assert not out[~kept].any()
    # Nor does what their gradient holds.
    out.backward(torch.where(kept[:, None], 1.0, math.nan).expand_as(out))
    kept_kv = torch.cat([torch.arange(int(r)) < n for n, r in zip(KV_LENGTHS, room[1])])
    for gradient, inside in ((q.grad, kept), (k.grad, kept_kv), (v.grad, kept_kv)):
        assert bool(torch.isfinite(gradient).all()) and not gradient[~inside].any()
    with pytest.raises(ValueError, match="no room"):
        module(
            q,
            k,
            v,
            **cus,
            cu_seqlens_q_padded=cu(Q_LENGTHS - 1 + torch.tensor([0, 0, 1])),
            cu_seqlens_kv_padded=cu(room[1]),
        )


@pytest.mark.parametrize("at", [-3, -2])
@pytest.mark.parametrize("form", ["sbhd", "bshd", "thd"])
def test_one_buffer_of_queries_keys_and_values_gets_one_gradient(form, at):
    lead = {"sbhd": (SQ, B), "bshd": (B, SQ), "thd": (SQ,)}[form]
    packed = torch.randn((*lead, 3, HEADS, D) if at == -3 else (*lead, HEADS, 3, D), generator=G).requires_grad_()
    module = DotProductAttention(
        HEADS, D, qkv_format=form, attn_mask_type="padding_causal" if form == "thd" else "causal"
    )
    lengths = torch.tensor([9, 14])
    cus = dict(cu_seqlens_q=cu(lengths), cu_seqlens_kv=cu(lengths)) if form == "thd" else {}
    out = module(qkv_layer=packed, qkv_interleave_dim=at, **cus)
    q, k, v = (t.contiguous() for t in packed.unbind(at))
    assert torch.equal(out, module(q, k, v, **cus))
    assert torch.equal(out, module(q, kv_layer=torch.stack([k, v], at), qkv_interleave_dim=at, **cus))
    one, two = (torch.autograd.grad(x.square().sum(), packed)[0] for x in (out, module(q, k, v, **cus)))
    assert torch.equal(one, two)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("groups", [1, 2, HEADS])
def test_te_1195_views_of_one_buffer_are_read_by_their_strides(groups, interleaved):
    """TransformerEngine#1195: fused projections of MQA and GQA, split and handed on without a copy."""
    ratio = HEADS // groups
    buffer = torch.randn(SQ, 2, (HEADS + 2 * groups) * D, generator=G).requires_grad_()
    shape, axis = ((groups, ratio + 2, D), -2) if interleaved else ((ratio + 2, groups, D), -3)
    parts = buffer.unflatten(-1, shape).split((ratio, 1, 1), axis)
    q, k, v = (t.flatten(2, 3) for t in parts)
    assert k.data_ptr() == parts[1].data_ptr() and (groups == 1 or not k.is_contiguous())
    module = DotProductAttention(HEADS, D, groups, attn_mask_type="causal", window_size=(-1, 0))
    out, copied = module(q, k, v), module(*(t.contiguous() for t in (q, k, v)))
    assert torch.equal(out, copied)
    one, two = (torch.autograd.grad(x.square().sum(), buffer)[0] for x in (out, copied))
    assert torch.equal(one, two) and one.shape == buffer.shape


def test_checkpointing_and_dropout_repeat():
    module = DotProductAttention(HEADS, (D, DV), GROUPS, attention_dropout=0.3, qkv_format="bshd").train()
    tensors, results = operands(), []
    for checkpointed in (False, True):
        torch.manual_seed(1)
        out = module(*tensors, checkpoint_core_attention=checkpointed)
        results.append((out, *torch.autograd.grad(out.square().sum(), tensors)))
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert not torch.equal(results[0][0], module.eval()(*tensors))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype):
    tensors = operands(dtype)
    out = DotProductAttention(HEADS, (D, DV), GROUPS, qkv_format="bshd")(*tensors)
    keep, _ = allowed("causal", None, None, (Q_LENGTHS, KV_LENGTHS))
    close("out", out_of_format("bshd", out), gold(*(t.transpose(1, 2) for t in tensors), keep)[0], dtype, SKV * D)


@pytest.mark.parametrize(
    "change, words, error",
    [
        (dict(query_layer=torch.zeros(SQ, B, HEADS, D + 1)), "query_layer must be", ValueError),
        (dict(value_layer=None), "query_layer, key_layer and value_layer", ValueError),
        (dict(attn_mask_type="diagonal"), "not one of", ValueError),
        (dict(attn_mask_type="no_mask", window_size=(3, -1)), "both sides", ValueError),
        (dict(attn_mask_type="padding"), "needs attention_mask", ValueError),
        (
            dict(attn_mask_type="arbitrary", attention_mask=torch.zeros(2, 2, dtype=torch.bool)),
            "broadcastable",
            ValueError,
        ),
        (dict(core_attention_bias_type="post_scale_bias"), "core_attention_bias None", ValueError),
        (dict(alibi_slopes=torch.ones(HEADS)), "alibi_slopes are given", ValueError),
        (dict(core_attention_bias_type="alibi", alibi_slopes=torch.ones(3)), "alibi_slopes must be", ValueError),
        (
            dict(core_attention_bias_type="alibi", alibi_slopes=torch.ones(B + 1, HEADS)),
            f"of {B + 1} sequences, and there are {B}",
            ValueError,
        ),
        (
            dict(core_attention_bias_type="post_scale_bias", core_attention_bias=torch.ones(B, HEADS, SQ, SKV - 1)),
            "core_attention_bias must be broadcastable to",
            ValueError,
        ),
        (dict(qkv_format="bhsd"), "not one of", ValueError),
        (
            dict(attn_mask_type="padding", cu_seqlens_q=cu(Q_LENGTHS + 9), cu_seqlens_kv=cu(KV_LENGTHS)),
            "at most 23",
            ValueError,
        ),
        (dict(fp8_output=True), "fp8_output", NotImplementedError),
        (dict(inference_params=object()), "inference_params", NotImplementedError),
        (dict(score_mod=abs), "score_mod", NotImplementedError),
    ],
)
def test_wrong_input_is_one_clear_error(change, words, error):
    q, k, v = in_format("sbhd", operands(), None)
    module = DotProductAttention(HEADS, (D, DV), GROUPS)
    with pytest.raises(error, match=words) as raised:
        module(**(dict(query_layer=q, key_layer=k, value_layer=v) | change))
    assert "\n" not in str(raised.value)


def test_fp8_is_refused_by_the_name_of_its_recipe(monkeypatch):
    class DelayedScaling:
        pass

    manager = types.SimpleNamespace(is_fp8_enabled=lambda: True, get_fp8_recipe=DelayedScaling)
    monkeypatch.setitem(
        sys.modules, "transformer_engine.pytorch.quantization", types.SimpleNamespace(FP8GlobalStateManager=manager)
    )
    with pytest.raises(NotImplementedError, match="DelayedScaling"):
        DotProductAttention(HEADS, D)(*(torch.zeros(4, 1, HEADS, D),) * 3)
    with pytest.raises(NotImplementedError, match="tp_size"):
        DotProductAttention(HEADS, D, tp_size=2)
