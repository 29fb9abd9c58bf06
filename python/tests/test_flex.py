"""``flex_attention`` beside dense attention in float64."""

import itertools
import math
import warnings

import pytest
import torch
import torch.utils.checkpoint
import torch.utils.data
from reference import UNREAD, attention, close, dense

from foveate import AuxRequest, Mask, _checks, create_block_mask, flex_attention, paged, varlen

SHAPES = [
    # B, Hq, Hkv, L, S, E, Ev
    (2, 4, 4, 37, 41, 16, 16),
    (1, 6, 2, 130, 257, 24, 40),
    (2, 3, 1, 1, 67, 8, 5),
    (1, 1, 1, 65, 1, 33, 1),
    (3, 2, 2, 5, 5, 1, 7),
]


def operands(shape, dtype=torch.float32, seed=0, batch_kv=None):
    b, hq, hkv, l, s, e, ev = shape
    g = torch.Generator().manual_seed(seed)
    bkv = b if batch_kv is None else batch_kv
    sizes = ((b, hq, l, e), (bkv, hkv, s, e), (bkv, hkv, s, ev))
    return tuple(torch.randn(size, generator=g).to(dtype).requires_grad_() for size in sizes)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def compare(q, k, v, score_mod=None, mask_mod=None, learned=(), scale=None, block_mask=None, mask=None):
    """Forward, lse and every gradient, those of captured tensors too, beside float64."""
    extents = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if mask_mod is not None:
        block_mask = create_block_mask(mask_mod, *extents[:2], *extents[2:], BLOCK_SIZE=32)
        mask = dense(mask_mod, extents).expand(extents)
    out, aux = flex_attention(
        q, k, v, score_mod, block_mask, scale, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    gold, gold_lse = attention(q, k, v, score_mod, mask, scale)
    g = torch.Generator().manual_seed(1)
    d_out = torch.randn(out.shape, generator=g).to(out.dtype)
    d_lse = torch.randn(aux.lse.shape, generator=g)
    terms = max(extents[2], extents[3]) * q.shape[-1]
    close("out", out, gold, q.dtype, terms)
    close("lse", aux.lse, gold_lse, torch.float32, terms)
    alive = gold_lse != -math.inf
    wanted = [t for t in (q, k, v, *learned) if t.requires_grad]
    if not wanted or not gold.requires_grad:
        return
    loss = (out * d_out).sum() + aux.lse[alive].mul(d_lse[alive]).sum()
    ours = torch.autograd.grad(loss, wanted, allow_unused=True)
    gold_loss = (gold * d_out.double()).sum() + gold_lse[alive].mul(d_lse[alive].double()).sum()
    golds = torch.autograd.grad(gold_loss, wanted, allow_unused=True)
    lows = [None] * len(golds)
    if q.dtype != torch.float32:
        low, low_lse = attention(q, k, v, score_mod, mask, scale, q.dtype)
        low_loss = (low * d_out).sum() + low_lse[alive].mul(d_lse[alive]).sum()
        lows = torch.autograd.grad(low_loss, wanted, allow_unused=True)
    for t, one, two, low in zip(wanted, ours, golds, lows):
        named = zip(("dq", "dk", "dv", *(f"d_learned[{i}]" for i in range(9))), (q, k, v, *learned))
        name = next(name for name, x in named if x is t)
        two = torch.zeros_like(t) if two is None else two
        one = torch.zeros_like(t) if one is None else one
        assert one.dtype == t.dtype
        close(name, one, two, t.dtype, terms * extents[0] * extents[1], low)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_plain_attention_and_its_gradients_are_those_of_float64(shape, dtype):
    compare(*operands(shape, dtype))


@pytest.mark.parametrize("shape", SHAPES)
def test_causal_attention_leaves_rows_without_keys_at_zero(shape):
    def after(b, h, q_idx, kv_idx):
        return q_idx > kv_idx + 1

    compare(*operands(shape), mask_mod=causal)
    compare(*operands(shape), mask_mod=after)
    q, k, v = operands(shape)
    block_mask = create_block_mask(after, None, None, shape[3], shape[4])
    out, aux = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
    assert not out[:, :, :2].any() and bool((aux.lse[:, :, :2] == -math.inf).all())
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert not dq[:, :, :2].any()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_learned_bias_of_each_head_and_distance_gets_its_gradient(shape):
    b, hq, _, l, s, *_ = shape
    bias = torch.randn(hq, l + s, requires_grad=True)
    slope = torch.randn(hq, dtype=torch.bfloat16).requires_grad_()

    def score_mod(score, b, h, q_idx, kv_idx):
        near = bias[h, q_idx - kv_idx + s] + bias[h, q_idx - kv_idx + s]
        return torch.tanh(score / 5.0) * 5.0 + near + slope[h].float() * (kv_idx - q_idx)

    compare(*operands(shape), score_mod=score_mod, mask_mod=causal, learned=(bias, slope))


def test_a_negative_index_counts_from_the_end():
    table = torch.randn(64, requires_grad=True)
    compare(
        *operands((1, 2, 2, 20, 30, 8, 8)),
        score_mod=lambda score, b, h, q, kv: score + table[q - kv],
        learned=(table,),
    )


@UNREAD
def test_an_index_outside_its_tensor_is_an_index_error():
    table = torch.randn(20)
    q, k, v = operands((1, 1, 1, 20, 30, 8, 8))
    with pytest.raises(IndexError):
        flex_attention(q, k, v, lambda score, b, h, q, kv: score + table[kv])
    compare(q, k, v, lambda score, b, h, q, kv: score + table[q])


def test_only_what_requires_a_gradient_gets_one():
    for wanted in itertools.product([False, True], repeat=4):
        q, k, v = operands((1, 2, 2, 9, 11, 8, 8))
        bias = torch.randn(2)
        for t, w in zip((q, k, v, bias), wanted):
            t.requires_grad_(w)
        out = flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: score + bias[h] * kv_idx)
        assert out.requires_grad == any(wanted)
        if any(wanted):
            out.sum().backward()
        for t, w in zip((q, k, v, bias), wanted):
            assert (t.grad is not None) == w


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0), (1, 1)])
def test_lengths_of_zero_and_one(lengths):
    shape = (2, 4, 2, *lengths, 8, 6)
    compare(*operands(shape))
    compare(*operands(shape), mask_mod=causal)
    compare(*operands((0, 4, 2, 3, 5, 8, 6)))


def test_one_batch_of_keys_is_shared():
    q, k, v = operands((3, 4, 2, 33, 35, 16, 8), batch_kv=1)
    compare(q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: q_idx + b >= kv_idx)


def test_every_order_of_strides_is_read_and_kept():
    shape = (2, 3, 3, 17, 19, 8, 8)
    for order in itertools.permutations(range(4)):
        inverse = [order.index(axis) for axis in range(4)]
        q, k, v = (t.detach().permute(order).contiguous().permute(inverse).requires_grad_() for t in operands(shape))
        out = flex_attention(q, k, v)
        close("out", out, attention(q, k, v)[0], q.dtype, 19 * 8)
        outer = [axis for axis in sorted(range(4), key=lambda a: -q.stride(a)) if axis != 3]
        assert sorted(range(3), key=lambda a: -out.stride(a)) == outer and out.stride(3) == 1
        d_out = torch.randn(out.shape).permute(order).contiguous().permute(inverse)
        grads = torch.autograd.grad((out * d_out).sum(), (q, k, v))
        golds = torch.autograd.grad((attention(q, k, v)[0] * d_out).sum(), (q, k, v))
        for name, t, one, two in zip(("dq", "dk", "dv"), (q, k, v), grads, golds):
            close(name, one, two, t.dtype, 19 * 8)
            outer = [axis for axis in sorted(range(4), key=lambda a: -t.stride(a)) if axis != 3]
            assert sorted(range(3), key=lambda a: -one.stride(a)) == outer and one.stride(3) == 1, name


def test_views_are_read_where_they_lie():
    base = torch.randn(2, 40, 3, 5, 16)
    q, k, v = (base[:, 3:36, i, 1:5].transpose(1, 2) for i in range(3))
    expanded = k[:, :1].expand(-1, 4, -1, -1)
    compare(q.detach().requires_grad_(), k, v)
    out = flex_attention(q, expanded, v)
    close("out", out, attention(q, expanded, v)[0], q.dtype, 33 * 16)
    out.sum()
    q = q.detach().requires_grad_()
    d_q = torch.autograd.grad(flex_attention(q, expanded, v).sum(), q)[0]
    close("dq", d_q, torch.autograd.grad(attention(q, expanded, v)[0].sum(), q)[0], q.dtype, 33 * 16)


def test_scale_and_aux_outputs():
    q, k, v = operands((1, 2, 2, 20, 20, 8, 8))
    compare(q, k, v, scale=0.25)
    compare(q, k, v, scale=-0.5)
    out, aux = flex_attention(q, k, v, return_aux=AuxRequest(max_scores=True))
    assert aux.lse is None and not aux.max_scores.requires_grad
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(8)
    assert torch.allclose(aux.max_scores, scores.amax(-1), atol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        again, lse = flex_attention(q, k, v, return_lse=True)
    assert torch.equal(out, again) and torch.allclose(lse, scores.logsumexp(-1), atol=1e-5)


def test_a_captured_tensor_written_in_place_changes_the_next_call():
    q, k, v = operands((1, 2, 2, 40, 40, 8, 8))
    documents = torch.arange(40) // 13
    bias = torch.zeros(2)

    def same(b, h, q_idx, kv_idx):
        return documents[q_idx] == documents[kv_idx]

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + bias[h] * kv_idx

    block_mask = create_block_mask(same, None, None, 40, 40)
    memory = documents.numpy() if documents.is_cpu else documents.data
    for change in (lambda: None, lambda: documents.floor_divide_(2), lambda: bias.add_(0.1),
                   lambda: documents.data.zero_(), lambda: memory.__setitem__(slice(7), 5)):
        change()
        out = flex_attention(q, k, v, score_mod, block_mask)
        gold, _ = attention(q, k, v, score_mod, dense(same, (1, 2, 40, 40)))
        close("out", out, gold, q.dtype, 40 * 8)


def test_closures_and_globals_count_as_they_are_in_each_call():
    q, k, v = operands((1, 1, 1, 30, 30, 8, 8))
    state = {"window": 3}

    def window(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() < state["window"]

    block_mask = create_block_mask(window, None, None, 30, 30)
    for state["window"] in (3, 7, 1, 300):
        out = flex_attention(q, k, v, block_mask=block_mask)
        close("out", out, attention(q, k, v, mask=dense(window, (1, 1, 30, 30)))[0], q.dtype, 240)


@pytest.mark.cpu("the memory is the test's own")
def test_a_tensor_that_takes_a_freed_ones_address_is_another_tensor():
    q, k, v = operands((1, 1, 1, 64, 64, 8, 8))
    memory, addresses = bytearray(64 * 8), set()
    for i in range(8):
        memory[:] = (torch.arange(64) // (8 + i)).numpy().tobytes()
        documents = torch.frombuffer(memory, dtype=torch.int64)
        addresses.add(documents.data_ptr())
        mask = create_block_mask(lambda b, h, i, j: documents[i] == documents[j], None, None, 64, 64)
        out = flex_attention(q, k, v, block_mask=mask)
        gold = attention(q, k, v, mask=documents[:, None] == documents[None, :])[0]
        close("out", out, gold, q.dtype, 64 * 8)
        del documents, mask
    assert len(addresses) == 1


def test_a_large_captured_tensor_is_read_where_it_lies():
    q, k, v = operands((2, 3, 3, 300, 310, 8, 8))
    base = torch.randn(300, 3, 2, 620, dtype=torch.bfloat16)
    bias = base.permute(2, 1, 0, 3)[..., ::2].requires_grad_()
    allowed = torch.rand(2, 1, 3000, 310) < 0.8
    compare(
        q, k, v, lambda s, b, h, i, j: s + bias[b, h, i, j].float(),
        mask_mod=lambda b, h, i, j: allowed[b, h * 0, 3 * i, j], learned=(bias,),
    )
    out = flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[b, h, i, j].float())
    with torch.no_grad():
        base.zero_()
    again = flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[b, h, i, j].float())
    close("out", again, flex_attention(q, k, v), q.dtype, 310 * 8)
    assert not torch.allclose(out, again)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("which", ["sink", "bias", "dense bias"])
def test_what_gets_a_gradient_must_not_be_written_to_before_the_backward(which):
    q, k, v = operands((1, 3, 3, 20, 30, 8, 8))
    read = {"sink": torch.randn(3), "bias": torch.randn(3), "dense bias": torch.randn(3, 20, 30)}
    read = {name: t.requires_grad_() for name, t in read.items()}

    def score_mod(s, b, h, i, j):
        return s + read["bias"][h] * (i - j) + read["dense bias"][h, i, j]

    out = flex_attention(q, k, v, score_mod, sink=read["sink"])
    with torch.no_grad():
        read[which].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_large_captured_tensor_is_not_kept():
    import gc
    import weakref

    q, k, v = operands((1, 1, 1, 700, 700, 8, 8))
    bias = torch.randn(700, 700)
    gone = weakref.ref(bias)
    flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[i, j])
    mask = create_block_mask(lambda b, h, i, j: bias[i, j] > 0, None, None, 700, 700)
    flex_attention(q, k, v, block_mask=mask)
    del bias, mask
    gc.collect()
    assert gone() is None


def test_autocast_casts_queries_keys_and_values_only():
    q, k, v = operands((1, 2, 2, 9, 9, 8, 8))
    bias = torch.randn(9)
    with torch.autocast(q.device.type, dtype=torch.bfloat16):
        out = flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[j])
    assert out.dtype == torch.bfloat16
    rounded = tuple(t.to(torch.bfloat16) for t in (q, k, v))
    assert torch.equal(out, flex_attention(*rounded, lambda s, b, h, i, j: s + bias[j]))


def test_keys_of_another_dtype_run_forward_and_refuse_a_backward():
    q, k, v = (t.detach() for t in operands((1, 2, 2, 9, 9, 8, 8)))
    out = flex_attention(q, k.bfloat16(), v.bfloat16())
    assert torch.equal(out, flex_attention(q, k.bfloat16().float(), v.bfloat16().float()))
    again = flex_attention(q.clone().requires_grad_(), k.bfloat16(), v.bfloat16())
    assert torch.equal(again, out)
    with pytest.raises(ValueError, match="mixed query, key, and value dtype"):
        again.sum().backward()


@pytest.mark.cpu("a GPU has no threads of the host")
def test_results_do_not_depend_on_the_number_of_threads():
    q, k, v = operands((2, 4, 2, 200, 210, 32, 32))
    threads = torch.get_num_threads()
    results = []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            out = flex_attention(q, k, v, enable_gqa=True)
            results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


def with_sink(q, k, v, sink, mask=None):
    """Attention in float64 with one more key of each head, whose value is 0."""
    scores = (q.double() @ k.double().transpose(-2, -1)) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    logits = sink.double().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.softmax(torch.cat([scores, logits], -1), -1)[..., :-1]
    return weights @ v.double(), torch.cat([scores, logits], -1).logsumexp(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sink_joins_the_denominator_and_gets_its_gradient(dtype):
    q, k, v = operands((2, 4, 4, 33, 35, 16, 8))
    sink = torch.randn(4).to(dtype).requires_grad_()
    mask = create_block_mask(lambda b, h, i, j: i > j, None, None, 33, 35)
    dense_mask = dense(lambda b, h, i, j: i > j, (1, 1, 33, 35))
    out, aux = flex_attention(q, k, v, block_mask=mask, sink=sink, return_aux=AuxRequest(lse=True))
    gold, gold_lse = with_sink(q, k, v, sink, dense_mask)
    close("out", out, gold, q.dtype, 35 * 16)
    close("lse", aux.lse, gold_lse, q.dtype, 35 * 16)
    ours = torch.autograd.grad((out.square().sum() + aux.lse.sum()), (q, k, v, sink))
    golds = torch.autograd.grad((gold.square().sum() + gold_lse.sum()), (q, k, v, sink))
    for name, one, two in zip(("dq", "dk", "dv", "d_sink"), ours, golds):
        close(name, one, two, one.dtype, 35 * 16 * 33)
    (only,) = torch.autograd.grad(flex_attention(*(t.detach() for t in (q, k, v)), sink=sink).square().sum(), sink)
    close("d_sink", only, torch.autograd.grad(with_sink(q, k, v, sink)[0].square().sum(), sink)[0], dtype, 35 * 16 * 33)


def test_dropout_is_repeated_by_the_seed_and_right_on_average(repeatable):
    q, k, v = operands((2, 3, 3, 64, 200, 16, 8))

    def run(seed):
        torch.manual_seed(seed)
        out = flex_attention(q, k, v, dropout_p=0.25)
        return (out, *torch.autograd.grad(out.square().sum(), (q, k, v)))

    first, again, other = run(1), run(1), run(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert not any(torch.equal(a, b) for a, b in zip(first, other))
    # Weights can be read off a value of ones of one key at a time; the kept ones are scaled by 4/3.
    eye = torch.eye(200).expand(2, 3, 200, 200)
    torch.manual_seed(1)
    weights = flex_attention(q, k, eye, dropout_p=0.25).detach()
    plain = torch.softmax(q @ k.transpose(-2, -1) / 4, -1).detach()
    kept = weights != 0
    assert abs(float(kept.double().mean()) - 0.75) < 0.005
    close("weights", weights, torch.where(kept, plain / 0.75, 0.0), torch.float32, 200 * 16)
    close("out", first[0], weights.double() @ v.double(), torch.float32, 200 * 16)


def test_dropout_is_the_same_when_a_checkpoint_runs_it_again(repeatable):
    q, k, v = operands((1, 2, 2, 50, 60, 16, 8))
    torch.manual_seed(3)
    plain = torch.autograd.grad(flex_attention(q, k, v, dropout_p=0.5).square().sum(), (q, k, v))
    torch.manual_seed(3)
    call = lambda q, k, v: flex_attention(q, k, v, dropout_p=0.5)  # noqa: E731
    out = torch.utils.checkpoint.checkpoint(call, q, k, v, use_reentrant=False)
    again = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(plain, again))


def _in_child(queue):
    q, k, v = operands((1, 2, 2, 300, 300, 32, 32))
    queue.put(float(flex_attention(q, k, v).detach().sum()))


@pytest.mark.cpu("PyTorch does not let a forked process use CUDA")
def test_a_forked_process_computes_with_threads_of_its_own():
    import multiprocessing

    q, k, v = operands((1, 2, 2, 300, 300, 32, 32))
    here = float(flex_attention(q, k, v).detach().sum())
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue,))
    child.start()
    there = queue.get(timeout=60)
    child.join(60)
    assert child.exitcode == 0 and here == there


def test_threads_that_call_at_once_get_their_own_results(repeatable):
    from concurrent.futures import ThreadPoolExecutor

    cases = [operands((1, 2, 2, 20 + 30 * i, 50, 16, 16), seed=i) for i in range(8)]
    slopes = [torch.full((2,), float(i)) for i in range(8)]

    def run(i):
        q, k, v = cases[i]
        out = flex_attention(q, k, v, lambda s, b, h, x, y: s + slopes[i][h] * y)
        return (out, *torch.autograd.grad(out.sum(), (q, k, v)))

    alone = [run(i) for i in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for one, two in zip(alone, pool.map(run, range(8))):
                assert all(torch.equal(a, b) for a, b in zip(one, two))


class _Attends(torch.utils.data.Dataset):
    """Items that are attention, computed by whoever loads them."""

    def __len__(self):
        return 6

    def __getitem__(self, item):
        q = torch.randn(1, 2, 256, 32, generator=torch.Generator().manual_seed(item))
        return flex_attention(q, q, q, lambda s, b, h, i, j: s + item, Mask.causal())


@pytest.mark.cpu("PyTorch does not let a forked process use CUDA")
def test_workers_of_a_data_loader_compute_what_their_parent_does():
    data = _Attends()
    here = [data[item] for item in range(len(data))]
    loaded = list(torch.utils.data.DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="fork"))
    assert len(loaded) == len(here) and all(map(torch.equal, here, loaded))


def test_numbers_whose_sign_torch_has_yet_to_change(repeatable):
    """The imaginary part of a conjugate is such a view: its memory has the other sign."""
    q, k, v = operands((1, 2, 2, 20, 30, 16, 16))
    table, sink, d_out = torch.randn(30), torch.randn(2), torch.randn(1, 2, 20, 16)
    offsets = torch.tensor([0, 20]), torch.tensor([0, 30])

    def run(negated):
        inputs = [t.detach().clone().requires_grad_() for t in (q, k, v, table, sink)]
        a, b, c, bias, logits = map(negated, inputs)
        out = flex_attention(a, b, c, lambda s, b, h, i, j: s + bias[j], sink=logits)
        rows = varlen(*(t[0].transpose(0, 1) for t in (a, b, c)), *offsets)
        with torch.no_grad():
            read = paged(a, b, c, torch.tensor([[0]]), torch.tensor([30]))
        return [out, rows, read, *torch.autograd.grad(out, inputs, negated(d_out))]

    assert torch._neg_view(q).is_neg()
    for lazy, now in zip(run(torch._neg_view), run(torch.neg)):
        torch.testing.assert_close(lazy, now, rtol=0, atol=0)


def test_a_deprecated_argument_is_said_once_and_again_when_torchs_list_is_cleared():
    from torch.nn.attention import flex_attention as torch_flex

    q, k, v = operands((1, 1, 1, 4, 4, 8, 8))
    for _ in range(2):
        torch_flex._WARNINGS_SHOWN.discard("deprecated_return_lse")
        with pytest.warns(FutureWarning, match="return_lse is deprecated"):
            flex_attention(q, k, v, return_lse=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            flex_attention(q, k, v, return_lse=True)


def test_what_has_no_memory_any_more_is_refused():
    """As sharded parameters between two uses."""
    for at in range(5):
        q, k, v = (torch.randn(1, 2, 20, 8) for _ in range(3))
        given = [q, k, v, torch.randn(20), torch.randn(2)]
        given[at].untyped_storage().resize_(0)
        table, sink = given[3:]
        with pytest.raises(TypeError, match="a `Tensor` has no elements in memory: its storage was freed"):
            flex_attention(q, k, v, lambda s, b, h, i, j: s + table[j], sink=sink)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_lies_behind_a_mask_reaches_no_result_and_no_gradient_of_a_key_or_query(dtype, junk):
    """Values beside a key that is seen, in a tile of their own and past the last document. The forward is safe of
    keys, too."""
    hidden = torch.zeros(90, dtype=torch.bool)
    hidden[[3, 40, *range(64, 90)]] = True
    q, k, v = operands((2, 4, 2, 70, 90, 16, 16), dtype)

    def seen(b, h, i, j):
        return (i >= j) & ~hidden[j]

    def score(s, b, h, i, j):
        return s + 0.1 * (j - i)

    def filled(t, with_what):
        return t.detach().masked_fill(hidden[:, None], with_what).requires_grad_()

    def call(k, v):
        return flex_attention(q, k, v, score, Mask(seen), enable_gqa=True)

    mask, terms = dense(seen, (2, 4, 70, 90)), 90 * 16
    keys, junk_v = filled(k, 0.0), filled(v, junk)
    gold, _ = attention(q, keys, filled(v, 0.0), score, mask)
    close("out", call(filled(k, junk), junk_v), gold, dtype, terms)
    d_out = torch.randn(gold.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    ours = torch.autograd.grad(call(keys, junk_v), (q, keys, junk_v), d_out)
    golds = torch.autograd.grad(gold, (q, keys), d_out.double())
    low, _ = attention(q, keys, filled(v, 0.0), score, mask, dtype=dtype)
    lows = torch.autograd.grad(low, (q, keys), d_out)
    for name, one, two, low in zip(("dq", "dk"), ours, golds, lows):
        close(name, one, two, dtype, terms * 8, low)
    assert bool(ours[2].isfinite().all()) and not ours[2][:, :, hidden].any()


def test_options_for_triton_change_nothing_and_are_said_once(caplog, monkeypatch):
    q, k, v = operands(SHAPES[0])
    monkeypatch.setattr(_checks, "_said", set())
    options = {"BLOCK_M": 32, "num_warps": 8, "PRESCALE_QK": True, "BACKEND": "TRITON", "fwd_num_stages": 1}
    with caplog.at_level("INFO", "foveate"):
        for _ in range(2):
            assert torch.equal(flex_attention(q, k, v, kernel_options=options), flex_attention(q, k, v))
    (said,) = [record.getMessage() for record in caplog.records if "Triton" in record.getMessage()]
    assert "BLOCK_M" in said and "num_warps" in said
    monkeypatch.setattr(_checks, "_said", set())
    flex_attention(q, k, v, kernel_options={1: 2, "BLOCK_M": 32})
    with pytest.raises(RuntimeError, match="BACKEND cannot be combined with legacy FORCE_USE_FLEX_ATTENTION"):
        flex_attention(q, k, v, kernel_options={"BACKEND": "AUTO", "FORCE_USE_FLEX_ATTENTION": True})
