"""The float64 path: plain operations, differentiable twice."""

import pytest
import torch
from reference import attention, dense

from foveate import AuxRequest, BlockMask, TraceError, create_block_mask, flex_attention

G = torch.Generator().manual_seed(9)


def operands(b=2, h=4, hkv=2, l=5, s=7, e=3, ev=2):
    sizes = ((b, h, l, e), (b, hkv, s, e), (b, hkv, s, ev))
    return tuple(torch.randn(size, generator=G, dtype=torch.float64).requires_grad_() for size in sizes)


def causal(b, h, i, j):
    return i >= j


def test_gradcheck_passes_once_and_twice_with_captured_tensors_and_empty_rows():
    # Each element is moved by itself, so there are few.
    q, k, v = operands(h=2, hkv=1)
    bias = torch.randn(2, 12, generator=G, dtype=torch.float64).requires_grad_()
    sink = torch.randn(2, generator=G, dtype=torch.float64).requires_grad_()
    mask = create_block_mask(lambda b, h, i, j: i > j + b, 2, None, 5, 7)

    def run(q, k, v, bias, sink):
        def score_mod(score, b, h, i, j):
            return torch.tanh(score) + bias[h][i - j] * bias[h, j]

        return flex_attention(q, k, v, score_mod, mask, enable_gqa=True, sink=sink)

    def without_sink(q, k, v):
        out, aux = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
        return out, aux.lse.masked_fill(aux.lse == -torch.inf, 0.0)

    assert torch.autograd.gradcheck(run, (q, k, v, bias, sink))
    assert torch.autograd.gradcheck(without_sink, (q, k, v))
    assert torch.autograd.gradgradcheck(without_sink, (q, k, v))


def test_float64_says_what_float32_says():
    q, k, v = operands(2, 4, 2, 70, 90, 8, 8)
    table = torch.randn(4, 90, generator=G)
    mask = create_block_mask(causal, 2, 4, 70, 90, BLOCK_SIZE=16)
    lists = BlockMask.from_kv_blocks(
        mask.kv_num_blocks, mask.kv_indices, BLOCK_SIZE=16, mask_mod=causal, seq_lengths=(70, 90)
    )

    def score_mod(score, b, h, i, j):
        return score + table[h][j] - i / (h + 1)

    for block_mask in (None, mask, lists):
        out, aux = flex_attention(
            q, k, v, score_mod, block_mask, enable_gqa=True, return_aux=AuxRequest(lse=True, max_scores=True)
        )
        assert {out.dtype, aux.lse.dtype, aux.max_scores.dtype} == {torch.float64}
        single, one = flex_attention(
            *(t.float() for t in (q, k, v)), score_mod, block_mask, enable_gqa=True,
            return_aux=AuxRequest(lse=True, max_scores=True),
        )
        assert torch.allclose(out, single.double(), atol=2e-4)
        assert torch.allclose(aux.lse, one.lse.double(), atol=2e-4)
        assert torch.allclose(aux.max_scores, one.max_scores.double(), atol=2e-4)
    gold, _ = attention(q, k, v, score_mod, dense(causal, (2, 4, 70, 90)))
    assert torch.allclose(flex_attention(q, k, v, score_mod, mask, enable_gqa=True), gold, atol=1e-12)


def test_lengths_of_zero_and_what_cannot_be_read():
    q, k, v = operands(s=0)
    out = flex_attention(q, k, v, enable_gqa=True)
    assert not out.any() and out.shape == (2, 4, 5, 2)
    out.sum().backward()
    assert not q.grad.any()
    q, k, v = operands()
    table = torch.randn(4, 7)
    with pytest.raises(TraceError, match="index all of its axes"):
        flex_attention(q, k, v, lambda s, b, h, i, j: s + table[h], enable_gqa=True)


def test_rows_of_captured_tensors_are_vectors_as_in_other_dtypes():
    q, k, v = operands(b=1, h=2, hkv=2)
    places = torch.randn(7, 3, generator=G, dtype=torch.float64).requires_grad_()
    groups = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 0], [1, 1], [2, 2], [0, 2]])

    def score_mod(score, b, h, i, j):
        apart = (places[i] - places[j]).square().sum(-1)
        return score * torch.exp(-apart) + torch.dot(places[i], places[j])

    mask = create_block_mask(lambda b, h, i, j: (groups[i] == groups[j]).any(-1), None, None, 5, 7)

    def run(q, k, v, places):
        return flex_attention(q, k, v, score_mod, mask)

    assert torch.autograd.gradcheck(run, (q, k, v, places))
    ours = flex_attention(q.float(), k.float(), v.float(), score_mod, mask)
    torch.testing.assert_close(ours.double(), run(q, k, v, places), rtol=1e-5, atol=1e-5)
    none = flex_attention(
        q[:, :, :0],
        k,
        v,
        score_mod,
        BlockMask.from_kv_blocks(mask.kv_num_blocks, mask.kv_indices, None, None, 128, mask.mask_mod, (0, 7)),
    )
    assert none.shape == (1, 2, 0, 2)


def test_all_scores_of_more_than_256_mib_warn(monkeypatch):
    from foveate import _dense

    assert _dense._LARGE == 256 << 20
    monkeypatch.setattr(_dense, "_LARGE", 2 * 4 * 20 * 20 * 8)  # Of these operands.
    q, k, v = operands(l=20, s=20)
    with pytest.warns(UserWarning, match="all scores") as warned:
        flex_attention(q, k, v, enable_gqa=True)
    assert [w.filename for w in warned] == [__file__]


def test_a_second_derivative_in_float32_is_a_clear_error():
    q, k, v = (t.detach().float().requires_grad_() for t in operands())
    out = flex_attention(q, k, v, enable_gqa=True).sum()
    (dq,) = torch.autograd.grad(out, q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        (out + dq.square().sum()).backward()


def test_a_captured_number_in_a_tensor_is_an_index_among_others():
    q, k, v = operands(hkv=4)
    table, layer = torch.randn(3, 4, q.size(2), dtype=torch.float64), torch.tensor(2)
    ours = flex_attention(q, k, v, lambda s, b, h, i, j: s + table[layer, h, i] + table[layer, 1, layer])
    theirs = flex_attention(q, k, v, lambda s, b, h, i, j: s + table[2, h, i] + table[2, 1, 2])
    assert torch.equal(ours, theirs)
