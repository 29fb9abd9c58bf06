"""``foveate.sdpa``: the functions that take the place of PyTorch's operators, on CPU tensors; and on CUDA that they
take it.
"""

import math

import pytest
import torch
import torch.nn.attention
import torch.nn.functional as F
from reference import attention, close

from foveate import sdpa

G = torch.Generator().manual_seed(2)


def operands(*sizes):
    return tuple(torch.randn(size, generator=G).requires_grad_() for size in sizes)


def gold(tensors, keep, weights):
    """``out``, ``lse`` and the gradients of ``[B, H, S, D]``."""
    double = [t.detach().double().requires_grad_() for t in tensors]
    out, lse = attention(*double, mask=keep)
    return out, lse, torch.autograd.grad((out * weights).sum(), double)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(21, 21), (13, 40)])
def test_the_dense_operators(causal, lengths):
    sq, skv = lengths
    tensors = operands((2, 4, sq, 16), (2, 2, skv, 16), (2, 2, skv, 16))
    # Causal aligns the last query with the last key.
    keep = torch.ones(sq, skv, dtype=torch.bool).tril(skv - sq) if causal else None
    weights = torch.randn(2, 4, sq, 16, generator=G).double()
    golden, golden_lse, golds = gold(tensors, keep, weights)
    plain = [t.detach() for t in tensors]
    out, lse, _, _, max_q, max_k, seed, unused, _ = sdpa.forward(*plain, 0.0, causal)
    assert (max_q, max_k) == lengths
    close("out", out, golden, torch.float32, 16 * skv)
    close("lse", lse, golden_lse, torch.float32, 16)
    ours = sdpa.backward(weights.float(), *plain, out, lse, None, None, max_q, max_k, 0.0, causal, seed, unused)
    for name, one, two in zip("qkv", ours, golds):
        close(f"d{name}", one, two, torch.float32, 16 * skv * sq)
    rows = [t.transpose(1, 2) for t in plain]
    again, same_lse, *_ = sdpa.flash_forward(*rows, None, None, sq, skv, 0.0, causal, False)
    assert torch.equal(again.transpose(1, 2), out) and torch.equal(same_lse, lse)
    through = sdpa.flash_backward(
        weights.float().transpose(1, 2), *rows, again, lse, None, None, sq, skv, 0.0, causal, seed, unused
    )
    for a, b in zip(through, ours):  # On CUDA dq is summed in any order.
        torch.testing.assert_close(a.transpose(1, 2), b)


@pytest.mark.parametrize(
    "causal, left, right", [(False, None, None), (True, -1, -1), (False, 5, 3), (True, 6, 0), (False, -1, 2)]
)
@pytest.mark.parametrize("same", [True, False])
def test_sequences_with_windows(same, causal, left, right):
    q_lengths = [7, 0, 20, 1]
    k_lengths = q_lengths if same else [11, 3, 20, 9]
    cu_q, cu_k = (
        torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()], dtype=torch.int32) for n in (q_lengths, k_lengths)
    )
    rows, keys = sum(q_lengths), sum(k_lengths)
    tensors = operands((rows, 4, 16), (keys, 2, 16), (keys, 2, 16))
    plain = [t.detach() for t in tensors]
    cu_k = cu_q if same else cu_k
    windows = dict(window_size_left=left, window_size_right=right)
    out, lse, seed, unused, _ = sdpa.flash_forward(*plain, cu_q, cu_k, 20, 20, 0.0, causal, False, **windows)
    assert out.shape == (rows, 4, 16) and lse.shape == (4, rows)
    weights = torch.randn(out.shape, generator=G)
    ours = sdpa.flash_backward(weights, *plain, out, lse, cu_q, cu_k, 20, 20, 0.0, causal, seed, unused, **windows)
    for b, (n, m) in enumerate(zip(q_lengths, k_lengths)):
        at, of = slice(int(cu_q[b]), int(cu_q[b + 1])), slice(int(cu_k[b]), int(cu_k[b + 1]))
        if n == 0 or m == 0:
            assert not any(g[s].any() for g, s in zip(ours, (at, of, of)))
            continue
        before = torch.arange(n)[:, None] + m - n - torch.arange(m)
        keep = torch.ones(n, m, dtype=torch.bool)
        keep &= before <= left if left is not None and left >= 0 else True
        keep &= before >= (0 if causal else -right) if causal or (right is not None and right >= 0) else True
        one = [t[s].transpose(0, 1)[None] for t, s in zip(plain, (at, of, of))]
        golden, golden_lse, golds = gold(one, keep, weights[at].transpose(0, 1)[None].double())
        close("out", out[at].transpose(0, 1)[None], golden, torch.float32, 16 * 20)
        close("lse", lse[:, at][None], golden_lse, torch.float32, 16)
        for name, mine, theirs in zip("qkv", (ours[0][at], ours[1][of], ours[2][of]), golds):
            close(f"d{name}", mine.transpose(0, 1)[None], theirs, torch.float32, 16 * 20 * 20)


def test_used_keys_are_the_last_ones_that_count():
    q, k, v = (t.detach() for t in operands((2, 5, 4, 16), (2, 12, 4, 16), (2, 12, 4, 16)))
    used = torch.tensor([12, 7], dtype=torch.int32)
    k[1, 7:], v[1, 7:] = math.nan, math.nan
    out, *_ = sdpa.flash_forward(q, k, v, None, None, 5, 12, 0.0, True, False, seqused_k=used)
    for b, n in enumerate(used.tolist()):
        part = [t[b : b + 1, :m].transpose(1, 2) for t, m in ((q, 5), (k, n), (v, n))]
        golden, _ = attention(*part, mask=torch.ones(5, n, dtype=torch.bool).tril(n - 5))
        close("out", out[b : b + 1].transpose(1, 2), golden, torch.float32, 16 * 12)


def test_dropout_of_the_backward_is_that_of_the_forward():
    q, k, v = (t.detach() for t in operands((1, 2, 30, 16), (1, 2, 30, 16), (1, 2, 30, 16)))
    torch.manual_seed(4)
    out, lse, *_, seed, unused, _ = sdpa.forward(q, k, v, 0.4, True)
    dv = sdpa.backward(torch.ones_like(out), q, k, v, out, lse, None, None, 30, 30, 0.4, True, seed, unused)[2]
    # out is linear in v: its sum with weights of one is that of v with dv.
    assert torch.allclose((v * dv).sum(), out.sum(), rtol=1e-4)
    torch.manual_seed(4)
    assert torch.equal(out, sdpa.forward(q, k, v, 0.4, True)[0])
    assert not torch.equal(out, sdpa.forward(q, k, v, 0.4, True)[0])


def test_what_it_does_not_do_is_refused_by_name():
    q = torch.zeros(1, 2, 4, 16)
    with pytest.raises(NotImplementedError, match="return_debug_mask"):
        sdpa.forward(q, q, q, 0.0, False, True)
    with pytest.raises(NotImplementedError, match="alibi_slopes"):
        sdpa.flash_forward(q, q, q, None, None, 2, 2, 0.0, False, False, alibi_slopes=torch.ones(4))


REGISTRY = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "restore_flash_attention_impl"),
    reason="skipped: torch 2.11 is the first that takes and gives back",
)


@REGISTRY
def test_it_is_registered_and_undone_by_torchs_own_call():
    from torch.nn.attention import (
        current_flash_attention_impl,
        list_flash_attention_impls,
        restore_flash_attention_impl,
    )

    assert current_flash_attention_impl() is None
    sdpa.activate()
    try:
        assert current_flash_attention_impl() == "FOVEATE" in list_flash_attention_impls()
        sdpa.activate()
        assert current_flash_attention_impl() == "FOVEATE"
    finally:
        restore_flash_attention_impl()
    assert current_flash_attention_impl() is None


@REGISTRY
@pytest.mark.skipif(not torch.cuda.is_available(), reason="skipped: torch finds no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sdpa_and_varlen_attn_run_here_while_it_is_active(dtype, monkeypatch):
    from torch.nn.attention import SDPBackend, restore_flash_attention_impl, sdpa_kernel
    from torch.nn.attention.varlen import varlen_attn

    calls = []
    monkeypatch.setattr(sdpa, "_forward", lambda *of, real=sdpa._forward: calls.append("forward") or real(*of))
    monkeypatch.setattr(sdpa, "_backward", lambda *of, real=sdpa._backward: calls.append("backward") or real(*of))
    tensors = [torch.randn(2, h, 257, 64, device="cuda").to(dtype).requires_grad_() for h in (4, 2, 2)]
    rows = [torch.randn(257, h, 64, device="cuda").to(dtype).requires_grad_() for h in (4, 4, 4)]
    cu = torch.tensor([0, 100, 101, 257], dtype=torch.int32, device="cuda")

    def run():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
        packed = varlen_attn(*rows, cu, cu, 156, 156, window_size=(-1, 0))
        results = (out, *torch.autograd.grad(out.sum(), tensors), packed, *torch.autograd.grad(packed.sum(), rows))
        return [t.double() for t in results]

    theirs = run()
    assert not calls
    sdpa.activate()
    try:
        ours = run()
    finally:
        restore_flash_attention_impl()
    assert calls == ["forward", "forward", "backward", "backward"] or calls == ["forward", "backward"] * 2
    run()
    assert len(calls) == 4
    for name, one, two in zip("out dq dk dv packed dq dk dv".split(), ours, theirs):
        assert (one - two).abs().max() <= 0.02 * two.abs().max(), name


@pytest.mark.skipif(
    hasattr(torch.nn.attention, "restore_flash_attention_impl"), reason="skipped: this torch has a registry"
)
def test_an_older_torch_is_one_sentence():
    with pytest.raises(RuntimeError, match="needs PyTorch 2.11 or newer, and this is"):
        sdpa.activate()
