"""``foveate.enable()``: torch's own names, imported before, run on Foveate until ``disable()``."""

import functools

import pytest
import torch
from compiled import Backend
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import foveate


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def operands():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, 40, 8, generator=generator, requires_grad=True) for _ in range(3)]


kept = functools.partial(flex_attention, scale=0.4)


@pytest.mark.cpu("what PyTorch refuses without the package, it refuses on a CPU")
def test_names_that_were_imported_before_train_uncompiled_and_are_given_back():
    q, k, v = operands()
    bias = torch.randn(2, requires_grad=True)
    code = flex_attention.__code__

    def model(q, k, v):
        mask = create_block_mask(causal, None, None, 40, 40, device="cpu", BLOCK_SIZE=8)
        return kept(q, k, v, lambda s, b, h, i, j: s + bias[h] * (i - j), mask, return_aux=AuxRequest(lse=True))

    # From 2.11 on torch's own refuses; what 2.10 has is unfused.
    refused = pytest.raises(NotImplementedError, match="does not support backward on CPU")
    theirs = refused if torch.__version__ >= "2.11" else pytest.warns(UserWarning, match="unfused")
    with theirs:
        model(q, k, v)
    with foveate.enable():
        out, aux = model(q, k, v)
        ours = torch.autograd.grad(out.sum() + aux.lse.sum(), (q, k, v, bias))
    if theirs is refused:
        with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
            model(q, k, v)
    assert flex_attention.__code__ is code
    mask = foveate.create_block_mask(causal, None, None, 40, 40)
    score = lambda s, b, h, i, j: s + bias[h] * (i - j)  # noqa: E731
    gold, aux_gold = foveate.flex_attention(q, k, v, score, mask, 0.4, return_aux=AuxRequest(lse=True))
    assert torch.equal(out, gold)
    gold = torch.autograd.grad(gold.sum() + aux_gold.lse.sum(), (q, k, v, bias))
    assert all(map(torch.equal, ours, gold))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_mask_that_names_no_device_is_on_one_that_is_there(compiled):
    def model(q, k, v):
        return flex_attention(q, k, v, block_mask=create_block_mask(causal, None, None, 40, 40))

    there = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    q, k, v = (t.detach().to(there) for t in operands())
    gold = foveate.flex_attention(q, k, v, block_mask=foveate.Mask.causal())
    with foveate.enable():
        run = torch.compile(model, fullgraph=True) if compiled else model
        assert torch.equal(run(q, k, v), gold)


def test_a_compiled_model_of_torchs_names_trains_in_one_graph():
    q, k, v = operands()
    ids = torch.tensor([0] * 11 + [1] * 29)

    def model(q, k, v, mask):
        return flex_attention(q * 2, k, v, lambda s, b, h, i, j: s * 0.5 - (i - j), mask).cos()

    mask = create_block_mask(lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j), None, None, 40, 40, ids.device, 8)
    backend = Backend()
    with foveate.enable():
        out = backend.compile(model)(q, k, v, mask)
        ours = torch.autograd.grad(out.sum(), (q, k, v))
        gold = model(q, k, v, mask)
    assert backend.operators == ["foveate.forward.default", "foveate.backward.default"]
    torch.testing.assert_close(out, gold)
    for a, b in zip(ours, torch.autograd.grad(gold.sum(), (q, k, v))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_what_is_compiled_before_and_after_is_compiled_anew():
    q, k, v = (t.detach() for t in operands())

    def model(q, k, v):
        return flex_attention(q, k, v)

    backend = Backend()
    compiled = backend.compile(model)
    gold = compiled(q, k, v)
    foveate.enable()
    try:
        torch.testing.assert_close(compiled(q, k, v), gold)
    finally:
        foveate.disable()
    torch.testing.assert_close(compiled(q, k, v), gold)
    assert backend.operators == ["flex_attention", "foveate.forward.default", "flex_attention"]


def test_enabling_twice_is_enabling_once_and_blocks_nest():
    code = flex_attention.__code__
    with foveate.enable():
        with foveate.enable():
            pass
        assert flex_attention.__code__ is not code
    assert flex_attention.__code__ is code
    foveate.disable()
    assert flex_attention.__code__ is code and torch_flex.create_block_mask.__code__ is not None


def test_a_function_that_cannot_be_traced_stays_torchs_with_a_warning():
    q, k, v = (t.detach() for t in operands())

    def score(s, b, h, i, j):
        return s + torch.special.bessel_j0(s)

    gold = flex_attention(q, k, v, score)
    with foveate.enable(), pytest.warns(UserWarning, match="flex_attention stays torch's: .*bessel_j0") as warned:
        torch.testing.assert_close(flex_attention(q, k, v, score), gold)
    assert [w.filename for w in warned] == [__file__]


def test_an_uncompiled_call_of_a_tensor_that_wraps_others_stays_torchs(monkeypatch):
    from torch.testing._internal.two_tensor import TwoTensor

    from foveate import _enable

    q = torch.randn(1, 2, 16, 8)
    wrapped = TwoTensor(q, q)
    monkeypatch.setitem(_enable.TORCHS, "flex_attention", lambda query, **more: ("torch's", query, more["value"]))
    with foveate.enable():
        assert flex_attention(wrapped, wrapped, wrapped) == ("torch's", wrapped, wrapped)
        assert isinstance(flex_attention(torch.nn.Parameter(q), q, q), torch.Tensor)
