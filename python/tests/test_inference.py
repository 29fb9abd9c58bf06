"""Every door in ``torch.inference_mode()``: tensors that are made there do not count what is written to them."""

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import foveate
from foveate import AuxRequest, Mask, create_block_mask, flex_attention, huggingface, paged, sdpa, varlen, xla

CU = torch.tensor([0, 13, 13, 40], dtype=torch.int32)
IDS = torch.tensor([0] * 13 + [1] * 27)
BIAS = torch.nn.Parameter(torch.randn(4, generator=torch.Generator().manual_seed(3)))


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def biased(score, b, h, i, j):
    return score + BIAS[h] * (i - j)


def flex(q, k, v, **more):
    return flex_attention(q, k, v, enable_gqa=True, **more)


def rows(*tensors):
    return [t[0].transpose(0, 1) for t in tensors]


def nested(q, k, v):
    one, two, three = (torch.nested.nested_tensor_from_jagged(t, CU.long()) for t in rows(q, k, v))
    return varlen(one, two, three).values()


def in_pages(q, k, v):
    table, lengths = torch.arange(10).view(2, 5), torch.tensor([40, 33])
    k, v = (t.unflatten(2, (5, 8)).transpose(1, 2).flatten(0, 1) for t in (k, v))
    return paged(q[:, :, :3], k, v, table, lengths, biased, Mask.causal(bottom_right=True))


def edited(q, k, v):
    """A mask whose lists are written to after it was used."""
    mask = create_block_mask(causal, None, None, 40, 40, BLOCK_SIZE=8)
    before = flex(q, k, v, block_mask=mask)
    mask.full_kv_num_blocks[..., -1] = 0
    return before, flex(q, k, v, block_mask=mask)


def torchs_edited(q, k, v):
    """The same of a mask that torch made, of which the lists count."""
    mask = torch_flex.create_block_mask(causal, 1, 1, 40, 40, device=q.device, BLOCK_SIZE=8)
    before = flex(q, k, v, block_mask=mask)
    mask.full_kv_num_blocks[..., -1] = 0
    return before, flex(q, k, v, block_mask=mask)


def sliced(q, k, v):
    mask = create_block_mask(causal, 2, 4, 40, 40, BLOCK_SIZE=8)[:, :, :2]
    mask.mask_mod = causal
    return flex(q[:, :, :16], k, v, block_mask=mask._adjust(16, 40))


def through_transformers(q, k, v):
    module = torch.nn.Module()
    mask = huggingface.attention_mask(1, 40, 40, attention_mask=torch.ones(1, 40, dtype=torch.bool))
    cu, both = CU.clone(), []
    for end in (13, 20):
        cu[1:3] = end
        both.append(
            huggingface.attention(module, *(t[:1] for t in (q, k, v)), mask, cu_seq_lens_q=cu, cu_seq_lens_k=cu)[0]
        )
    assert not torch.equal(*both)
    return both


def transformer_engine(q, k, v):
    layer = foveate.DotProductAttention(4, 16, num_gqa_groups=2, qkv_format="thd", attn_mask_type="padding_causal")
    return layer(*rows(q, k, v), cu_seqlens_q=CU, cu_seqlens_kv=CU)


def padded(q, k, v):
    layer = foveate.DotProductAttention(
        4, 16, num_gqa_groups=2, qkv_format="bshd", attn_mask_type="padding_causal", softmax_type="learnable"
    )
    hidden = torch.zeros(2, 1, 1, 40, dtype=torch.bool)
    hidden[0, ..., 30:] = True
    return layer(*(t.transpose(1, 2) for t in (q, k, v)), attention_mask=hidden)


def layer(q, k, v):
    torch.manual_seed(4)
    made = foveate.TransformerLayer(16, 32, 4, hidden_dropout=0.0, attention_dropout=0.0)
    return made(q[0].transpose(0, 1)[:, :2].contiguous(), self_attn_mask_type="causal")


def over_torchs_names(q, k, v):
    with foveate.enable():
        mask = torch_flex.create_block_mask(causal, None, None, 40, 40, device=q.device)
        return torch_flex.flex_attention(q, k, v, biased, mask, enable_gqa=True)


def dropped(q, k, v):
    torch.manual_seed(5)
    return flex(q, k, v, dropout_p=0.25, sink=torch.ones(4))


def compiled(q, k, v):
    mask = create_block_mask(causal, None, None, 40, 40)
    return torch.compile(flex)(q, k, v, score_mod=biased, block_mask=mask)


CALLS = {
    "no functions": flex,
    "float64": lambda q, k, v: flex(*(t.double() for t in (q, k, v)), score_mod=biased, block_mask=Mask.causal()),
    "aux": lambda q, k, v: flex(q, k, v, score_mod=biased, return_aux=AuxRequest(lse=True, max_scores=True))[1],
    "sink and dropout": dropped,
    "a mask of the package": lambda q, k, v: flex(q, k, v, block_mask=create_block_mask(causal, None, None, 40, 40)),
    "a mask that is edited": edited,
    "a mask of torch's that is edited": torchs_edited,
    "a mask that is sliced": sliced,
    "document": lambda q, k, v: flex(q, k, v, block_mask=Mask.document(IDS.clone()) & Mask.causal()),
    "from_cu_seqlens": lambda q, k, v: flex(q, k, v, block_mask=Mask.from_cu_seqlens(CU.clone())),
    "create_mask": lambda q, k, v: foveate.create_mask(Mask.document(IDS.clone()), 1, 1, 40, 40),
    "varlen": lambda q, k, v: varlen(*rows(q, k, v), CU.clone(), score_mod=biased, mask=Mask.causal()),
    "nested tensors": nested,
    "pages": in_pages,
    "explain": lambda q, k, v: foveate.explain(
        q, k, v, biased, create_block_mask(causal, None, None, 40, 40), enable_gqa=True
    ),
    "transformers": through_transformers,
    "DotProductAttention of sequences": transformer_engine,
    "DotProductAttention of padded ones": padded,
    "TransformerLayer": layer,
    "xla": lambda q, k, v: xla.flash_attention(
        q, k, v, True, IDS.expand(2, -1).clone(), IDS.expand(2, -1).clone(), ab=BIAS[None, :, None, None]
    ),
    "SDPA": lambda q, k, v: sdpa.forward(q, k, v, 0.0, True)[:2],
    "varlen_attn": lambda q, k, v: sdpa.flash_forward(*rows(q, k, v), CU.clone(), CU.clone(), 27, 27, 0.0, True, False)[
        :2
    ],
    "enable": over_torchs_names,
    "compiled": compiled,
}


@pytest.mark.parametrize("name", CALLS)
def test_inference_mode_gives_what_calls_without_gradients_give(name):
    def run():
        g = torch.Generator().manual_seed(2)
        return CALLS[name](*(torch.randn(2, heads, 40, 16, generator=g) for heads in (4, 2, 2)))

    with torch.no_grad():
        gold = run()
    with torch.inference_mode():
        ours = run()
    if isinstance(gold, str):
        assert ours == gold
    else:
        torch.testing.assert_close(ours, gold, rtol=0, atol=0)
    if "edited" in name:
        assert not torch.equal(*ours)


def test_a_mask_that_is_made_for_inference_serves_training():
    with torch.inference_mode():
        mask = create_block_mask(causal, None, None, 40, 40, BLOCK_SIZE=8)
    assert not any(t.is_inference() for t in mask.as_tuple() if isinstance(t, torch.Tensor))
    q = torch.randn(1, 1, 40, 8, requires_grad=True)
    (dq,) = torch.autograd.grad(flex_attention(q, q, q, block_mask=mask).sum(), q)
    gold = flex_attention(q, q, q, block_mask=create_block_mask(causal, None, None, 40, 40))
    assert torch.equal(dq, *torch.autograd.grad(gold.sum(), q))


@pytest.mark.parametrize("grad", [True, False])
def test_making_a_mask_leaves_whether_gradients_are_wanted(grad):
    learned = torch.zeros(40, requires_grad=True)
    with torch.set_grad_enabled(grad):
        if grad:
            with pytest.raises(ValueError, match="requires grad"):
                create_block_mask(lambda b, h, i, j: learned[i] >= learned[j], None, None, 40, 40)
        else:
            create_block_mask(lambda b, h, i, j: learned[i] >= learned[j], None, None, 40, 40)
        assert torch.is_grad_enabled() is grad
