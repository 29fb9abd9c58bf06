"""``foveate.varlen`` beside attention of each sequence by itself."""

import pytest
import torch
from reference import UNREAD, attention, close

from foveate import AuxRequest, Mask, flex_attention, varlen

G = torch.Generator().manual_seed(8)
CU_Q = torch.tensor([0, 20, 20, 21, 57], dtype=torch.int32)
CU_K = torch.tensor([0, 13, 30, 30, 66])


def operands(dtype=torch.float32):
    sizes = ((60, 4, 8), (70, 2, 8), (70, 2, 6))
    return tuple(torch.randn(size, generator=G).to(dtype).requires_grad_() for size in sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sequences_attend_to_themselves(dtype):
    q, k, v = operands(dtype)
    slope = torch.randn(4, 4, generator=G).requires_grad_()
    sink = torch.randn(4, generator=G)

    def score_mod(score, b, h, i, j):
        return score + slope[b, h] * (i - j) / 10

    out, aux = varlen(q, k, v, CU_Q, CU_K, 36, 36, score_mod, Mask.causal(), return_aux=AuxRequest(lse=True))
    assert out.is_contiguous() and out.shape == (60, 4, 6) and aux.lse.shape == (4, 60)
    golds, lows = [], []
    for b in range(4):
        (a, e), (s, t) = CU_Q[b : b + 2].tolist(), CU_K[b : b + 2].tolist()
        part = tuple(x[x0:x1].transpose(0, 1)[None] for x, x0, x1 in ((q, a, e), (k, s, t), (v, s, t)))
        mask = (torch.arange(e - a)[:, None] >= torch.arange(t - s)).expand(1, 4, -1, -1)
        distance = (torch.arange(e - a)[:, None] - torch.arange(t - s)) / 10
        bias = lambda x, *_, b=b, d=distance: x + slope[b].to(x.dtype)[:, None, None] * d  # noqa: E731
        scores = lambda p: bias(p[0].double() @ p[1].double().repeat_interleave(2, 1).transpose(-2, -1) / 8**0.5)  # noqa: E731
        masked = scores(part).masked_fill(~mask, -torch.inf)
        dead = (masked == -torch.inf).all(-1, keepdim=True)
        weights = torch.softmax(masked.masked_fill(dead, 0), -1).masked_fill(dead, 0) if t > s else masked
        golds.append((weights @ part[2].double().repeat_interleave(2, 1))[0].transpose(0, 1))
    gold = torch.cat([*golds, torch.zeros(3, 4, 6)])
    close("out", out, gold, dtype, 40 * 8)
    assert not out[57:].any() and bool((aux.lse[:, 57:] == -torch.inf).all())
    d_out = torch.randn(out.shape, generator=G)
    ours = torch.autograd.grad((out * d_out).sum(), (q, k, v, slope))
    theirs = torch.autograd.grad((gold * d_out).sum(), (q, k, v, slope))
    for name, one, two in zip(("dq", "dk", "dv", "d_slope"), ours, theirs):
        close(name, one, two, dtype, 60 * 8, low=two + 4 * two.abs().max() * (0 if dtype == torch.float32 else 2.0**-8))
    assert not ours[0][57:].any() and not ours[1][66:].any() and not ours[2][66:].any()
    with_sink = varlen(q, k, v, CU_Q, CU_K, sink=sink)
    assert not torch.equal(with_sink, varlen(q, k, v, CU_Q, CU_K))


def test_one_sequence_is_plain_attention_and_offsets_may_be_shared():
    q, k, v = (torch.randn(30, 3, 8, generator=G) for _ in range(3))
    out = varlen(q, k, v, torch.tensor([0, 30]))
    gold, _ = attention(*(t.transpose(0, 1)[None] for t in (q, k, v)))
    close("out", out, gold[0].transpose(0, 1), torch.float32, 30 * 8)
    assert torch.equal(varlen(q, k, v, torch.tensor([0])), torch.zeros(30, 3, 8))


def test_a_batch_may_have_more_rows_than_the_one_before_and_follow_a_padded_one():
    for rows in (11, 40, 23):
        q = torch.randn(rows, 2, 12, generator=G)
        out = varlen(q, q, q, torch.tensor([0, 5, rows]))
        gold, _ = attention(*(q[5:].transpose(0, 1)[None],) * 3)
        close("out", out[5:], gold[0].transpose(0, 1), torch.float32, rows * 12)
        padded = torch.randn(3, 2, 7, 12, generator=G)
        flex_attention(padded, padded, padded)


@pytest.mark.parametrize("change, words", [
    pytest.param(dict(cu_seqlens_q=torch.tensor([0, 9, 3])), "decrease", marks=UNREAD),
    pytest.param(dict(cu_seqlens_q=torch.tensor([1, 9])), "begin at 0", marks=UNREAD),
    pytest.param(dict(cu_seqlens_q=torch.tensor([0, 61])), "past the 60 rows", marks=UNREAD),
    pytest.param(dict(cu_seqlens_k=torch.tensor([0, 71])), "past the 70 rows", marks=UNREAD),
    (dict(cu_seqlens_k=torch.tensor([0, 7])), "as many"),
    (dict(cu_seqlens_q=torch.tensor([0.0, 9.0])), "integer"),
    (dict(query=torch.zeros(60, 4)), "rows, heads, dim"),
    (dict(query=torch.zeros(60, 3, 8)), "multiple of kv heads"),
    (dict(query=torch.zeros(60, 4, 8).double()), "one dtype"),
    (dict(dropout_p=2.0), "below 1"),
])
def test_wrong_input_is_one_clear_error(change, words):
    q, k, v = operands()
    arguments = dict(query=q, key=k, value=v, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K) | change
    with pytest.raises(ValueError, match=words) as raised:
        varlen(**arguments)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("transposed", [False, True])
def test_jagged_tensors_are_their_sequences(transposed, repeatable):
    lengths_q, lengths_k = (20, 0, 1, 36), (13, 17, 0, 36)

    def nested(lengths, heads, dim):
        rows = [torch.randn(n, heads, dim, generator=G) for n in lengths]
        made = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
        return made, rows

    (q, q_rows), (k, k_rows), (v, v_rows) = nested(lengths_q, 4, 8), nested(lengths_k, 2, 8), nested(lengths_k, 2, 6)
    given = [t.transpose(1, 2) if transposed else t for t in (q, k, v)]
    out = varlen(*given, mask=Mask.causal())
    assert out.is_nested and out.shape[0] == 4 and out.shape[1 if transposed else 2] == 4
    leaves = [torch.cat(rows).requires_grad_() for rows in (q_rows, k_rows, v_rows)]
    offsets = [torch.tensor([0, *n]).cumsum(0) for n in (lengths_q, lengths_k)]
    flat = varlen(*leaves, *offsets, mask=Mask.causal())
    ours = (out.transpose(1, 2) if transposed else out).values()
    assert torch.equal(ours, flat)
    d_out = torch.randn(flat.shape, generator=G)
    (ours * d_out).sum().backward()
    (flat * d_out).sum().backward()
    for t, leaf in zip((q, k, v), leaves):
        assert torch.equal(t.grad.values(), leaf.grad)


def test_wrong_jagged_input_is_one_clear_error():
    a = torch.nested.nested_tensor([torch.zeros(n, 2, 8) for n in (3, 5)], layout=torch.jagged)
    b = torch.nested.nested_tensor([torch.zeros(n, 2, 8) for n in (5, 3)], layout=torch.jagged)
    strided = torch.nested.nested_tensor([torch.zeros(3, 2, 8)])
    holes = torch.nested.narrow(torch.zeros(2, 9, 2, 8), 1, torch.tensor([0, 2]), torch.tensor([3, 4]), torch.jagged)
    for arguments, words in [
        ((a, a, b), "same lengths"),
        ((a, torch.zeros(8, 2, 8), a), "key is not"),
        ((strided, strided, strided), "query is not"),
        ((holes, holes, holes), "without holes"),
        ((a, a, a, torch.tensor([0, 3, 8])), "offsets of their own"),
        ((torch.zeros(8, 2, 8),) * 3, "cu_seqlens_q is missing"),
    ]:
        with pytest.raises(ValueError, match=words):
            varlen(*arguments)
