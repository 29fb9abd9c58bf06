"""torchtune's and TorchTitan's smallest Llama trained on packed documents, beside their own attention."""

import types

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, create_mask

import foveate

LENGTHS = [[5, 20, 1, 22], [30, 18]]
SEQ, VOCAB, EOS = 48, 97, 0


def batches(steps):
    g = torch.Generator().manual_seed(31)
    for _ in range(steps):
        tokens = torch.randint(1, VOCAB, (2, SEQ + 1), generator=g)
        for row, lengths in zip(tokens, LENGTHS):
            row[torch.tensor(lengths).cumsum(0) - 1] = EOS
        # What comes next is a function of what is there, so that there is something to learn.
        tokens[:, 1::2] = torch.where(tokens[:, 1::2] == EOS, EOS, (tokens[:, :-1:2] * 7 + 3) % (VOCAB - 1) + 1)
        yield tokens[:, :-1], tokens[:, 1:]


def losses(model, logits_of, steps=20):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = []
    for tokens, labels in batches(steps):
        loss = F.cross_entropy(logits_of(model, tokens).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return torch.tensor(found)


def compare(ours, theirs, alone):
    assert float((ours - theirs).abs().max()) <= 1e-3
    assert ours[-1] < 0.9 * ours[0]
    assert float((theirs - alone).abs().max()) > 5e-3, "documents make no difference"


@pytest.mark.parametrize("mask", [
    torch.ones(2, 5, 5, dtype=torch.bool), torch.ones(3, 8, 8, dtype=torch.bool), torch.ones(8, 8).long(),
    torch.ones(2, 1, 8, 8), "causal",
])
def test_a_wrong_mask_of_torchtunes_is_one_clear_error(mask):
    q, k, v = torch.randn(3, 2, 4, 8, 16)
    with pytest.raises(ValueError, match=r"mask must be .* expands to \[2, 8, 8\], got") as raised:
        foveate.torchtune._attention(q, k, v, mask, 0.0, False)
    assert "\n" not in str(raised.value)


def test_a_mask_without_tables_is_one_of_torchtunes():
    q, k, v = torch.randn(3, 2, 4, 8, 16)
    out = [foveate.torchtune._attention(q, k, v, mask, 0.0, mask is None) for mask in (foveate.Mask.causal(), None)]
    assert torch.equal(*out)


def test_torchtune_trains_on_packed_documents_as_with_its_own_attention(monkeypatch):
    pytest.importorskip("torchao", reason="torchtune is not installed: see scripts/python-env.sh")
    pytest.importorskip("torchtune", reason="torchtune is not installed: see scripts/python-env.sh")
    from torchtune.models.llama3_1 import llama3_1
    from torchtune.modules import attention_utils
    from torchtune.modules import attention as modules
    from torchtune.modules._export import attention as exported

    for of in (attention_utils, modules, exported):
        monkeypatch.setattr(of, "_sdpa_or_flex_attention", of._sdpa_or_flex_attention)

    def trained(mask):
        torch.manual_seed(2)
        model = llama3_1(vocab_size=VOCAB, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=64, max_seq_len=SEQ,
                         intermediate_dim=96)
        return losses(model, lambda m, tokens: m(tokens, mask=mask)), model

    packed = attention_utils.create_block_causal_mask([torch.tensor(n) for n in LENGTHS])
    theirs, model = trained(packed)
    assert model.layers[0].attn._attention_call.__module__.startswith("torchtune")
    alone, _ = trained(None)
    foveate.torchtune.register()
    ours, model = trained(packed)
    assert model.layers[0].attn._attention_call.__module__ == "foveate.torchtune"
    compare(ours, theirs, alone)
    ids = torch.stack([torch.repeat_interleave(torch.arange(len(n)), torch.tensor(n)) for n in LENGTHS])
    blocks = foveate.create_block_mask(lambda b, h, q, kv: (q >= kv) & (ids[b, q] == ids[b, kv]), 2, None, SEQ, SEQ)
    compare(trained(blocks)[0], theirs, alone)
    assert float((trained(None)[0] - alone).abs().max()) <= 1e-3


def test_torchtitan_trains_on_packed_documents_as_with_its_own_attention(monkeypatch):
    pytest.importorskip("torchtitan", reason="TorchTitan is not installed: see scripts/python-env.sh")
    import torchtitan.models.attention as attention
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    tokenizer = types.SimpleNamespace(eos_id=EOS)

    def trained(kind="flex", mask="block_causal"):
        torch.manual_seed(2)
        args = TransformerModelArgs(
            dim=64,
            n_layers=2,
            n_heads=4,
            n_kv_heads=2,
            vocab_size=VOCAB,
            multiple_of=32,
            max_seq_len=SEQ,
            attn_type=kind,
            attn_mask_type=mask,
        )
        model = Transformer(args)
        with torch.no_grad():
            model.init_weights()
        masks = lambda tokens: model.get_attention_masks(tokens, tokenizer) if kind == "flex" else None  # noqa: E731
        return losses(model, lambda m, tokens: m(tokens, masks(tokens)))

    # Its own flex attention has no backward on the CPU: the same layers with dense masks in torch's attention.
    def dense(q, k, v, block_mask, scale, enable_gqa, return_lse):
        keep = create_mask(block_mask.mask_mod, q.shape[0], 1, SEQ, SEQ, q.device)
        return F.scaled_dot_product_attention(q, k, v, keep, scale=scale, enable_gqa=enable_gqa)

    monkeypatch.setattr(
        attention, "_compiled_create_block_mask", lambda *of: create_block_mask(*of, device=torch.get_default_device())
    )
    monkeypatch.setattr(attention.FlexAttentionWrapper, "_compiled_flex_attn", dense)
    theirs = trained()
    alone = trained("sdpa", "causal")
    foveate.torchtitan.register()
    assert attention.FlexAttentionWrapper._compiled_flex_attn is foveate.flex_attention
    compare(trained(), theirs, alone)
    assert float((trained("flex", "causal") - alone).abs().max()) <= 1e-3


def test_torchtune_2113_the_backward_of_its_shape_never_lacks_a_configuration():
    """torchtune#2113: 28 query heads on 4, 512 positions, heads of 128, bf16, packed."""
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, h, 512, 128, generator=g).bfloat16().requires_grad_() for h in (28, 4, 4))
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor([100, 300, 12, 100]))
    mask = foveate.create_block_mask(lambda b, h, i, j: (i >= j) & (ids[i] == ids[j]), 1, None, 512, 512)
    out = foveate.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    d_out = torch.randn(out.shape, generator=g).bfloat16()
    ours = torch.autograd.grad(out, (q, k, v), d_out)
    at = torch.arange(512)
    keep = (at[:, None] >= at) & (ids[:, None] == ids)
    exact = tuple(t.detach().float().requires_grad_() for t in (q, k, v))
    golden = F.scaled_dot_product_attention(*exact, keep, enable_gqa=True)
    theirs = torch.autograd.grad(golden, exact, d_out.float())
    for name, one, two in zip(("out", "dq", "dk", "dv"), (out, *ours), (golden, *theirs)):
        worst, largest = float((one.float() - two).detach().abs().max()), float(two.detach().abs().max())
        assert worst <= 2.0**-7 * largest, f"{name}: {worst:.3g} apart, of {largest:.3g}"
