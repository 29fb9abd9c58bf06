"""CUDA graphs: calls that are recorded give what they give outside one, with new contents too."""

import gc
import math

import torch
from on_cuda import DEVICE, causal, exact_matmul, like, operands, pytestmark, same_tables  # noqa: F401

from foveate import Mask, create_block_mask, flex_attention, prepare


def assert_replays(graph, recorded, step):
    """A replay gives the bits of a call's result, and its gradients but for the order of their sums."""
    graph.replay()
    torch.cuda.synchronize()
    out, *gradients = (t.clone() for t in recorded)
    now, fresh = step()
    assert torch.equal(out, now)
    assert len(gradients) == len(fresh)
    for a, b in zip(gradients, fresh):
        assert (a - b).abs().max() <= 0.02 * b.abs().max()


def test_a_graph_recorded_by_torchs_recipe_replays_with_new_contents():
    q, k, v = operands(l=300, s=300)
    ids = torch.arange(300, device=DEVICE) // 100
    d_out = like(q, 5)

    def step():
        out = flex_attention(q, k, v, block_mask=Mask.causal() & Mask.document(ids), enable_gqa=True)
        return out, torch.autograd.grad(out, (q, k, v), d_out)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, gradients = step()
    for seed, edges in ((7, 80), (8, 33)):
        with torch.no_grad():
            for t, fresh in zip((q, k, v), operands(l=300, s=300, seed=seed)):
                t.copy_(fresh)
            ids.copy_(torch.arange(300, device=DEVICE) // edges)
        assert_replays(graph, (out, *gradients), step)


def test_a_graph_outlives_the_plans_that_it_was_recorded_from():
    q, k, v = (t.detach() for t in operands(l=130, s=130))
    graph = torch.cuda.CUDAGraph()
    call = lambda: flex_attention(q, k, v, block_mask=Mask(causal), enable_gqa=True)  # noqa: E731
    call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = call()
    expected = call()
    gc.collect()
    torch.cuda.empty_cache()
    junk = [torch.full((1 << 20,), math.nan, device=DEVICE) for _ in range(8)]
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
    del junk


def test_a_prepared_call_may_be_first_in_a_graph():
    q, k, v = operands(l=190, s=190, e=32, ev=32)
    window = torch.tensor(31, device=DEVICE)
    mask = Mask(lambda b, h, i, j: (i - j < window) & (i >= j))
    prepare(q, k, v, block_mask=mask, enable_gqa=True)
    d_out = like(q, 3)

    def step():
        out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        return out, torch.autograd.grad(out, (q, k, v), d_out)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, gradients = step()
    for width in (31, 90):
        window.fill_(width)
        assert_replays(graph, (out, *gradients), step)


def test_two_graphs_of_one_pool_and_dropout_in_each_replay():
    q, k, v = (t.detach() for t in operands())
    call = lambda: flex_attention(q, k, v, block_mask=Mask(causal), enable_gqa=True, dropout_p=0.5)  # noqa: E731
    call()
    torch.cuda.synchronize()
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first):
        a = call()
    with torch.cuda.graph(second, pool=first.pool()):
        b = call()
    found = []
    for _ in range(2):
        for graph, out in ((first, a), (second, b)):
            graph.replay()
            found.append(out.clone())
    plain = flex_attention(q, k, v, block_mask=Mask(causal), enable_gqa=True)
    for i, one in enumerate(found):
        assert torch.isfinite(one).all() and not any(torch.equal(one, other) for other in found[:i])
        # Of many entries half are dropped and the others doubled: the mean stays.
        assert (one - plain).float().mean().abs() < 0.02


def test_block_masks_are_made_in_graphs_without_waiting():
    from torch.nn.attention.flex_attention import create_block_mask as torchs

    ids = torch.arange(700, device=DEVICE) // 300

    def documents(b, h, i, j):
        return (ids[i] == ids[j]) & (i >= j)

    def by_head(b, h, i, j):
        return (i >= j) & ((i + b) // (50 * (h + 1)) == j // (50 * (h + 1)))

    create_block_mask(documents, None, None, 700, 700, DEVICE)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        create_block_mask(documents, None, None, 700, 700, DEVICE)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = create_block_mask(documents, None, None, 700, 700, DEVICE)
    for width in (300, 129):
        ids.copy_(torch.arange(700, device=DEVICE) // width)
        graph.replay()
        torch.cuda.synchronize()
        same_tables(recorded, torchs(documents, None, None, 700, 700, DEVICE))
    for tile in (128, 64, (32, 256)):
        for extents in ((2, 4, 300, 700), (2, 4, 256, 512), (1, 1, 1, 1)):
            same_tables(create_block_mask(by_head, *extents, DEVICE, tile), torchs(by_head, *extents, DEVICE, tile))


def test_float64_is_recorded_in_a_graph():
    q, k, v = (t.double().detach() for t in operands(l=20, s=20))
    slope = torch.randn(3, 4, device=DEVICE, dtype=torch.float64)
    layer = torch.tensor(1, device=DEVICE)

    def step():
        out = flex_attention(
            q, k, v, lambda s, b, h, i, j: s + slope[layer, h] * (j - i), Mask.causal(), enable_gqa=True
        )
        return (out,)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (out,) = step()
    for at in (2, 0):
        layer.fill_(at)
        graph.replay()
        assert torch.equal(out, *step())


def test_reduce_overhead_records_graphs_of_forward_and_backward():
    from torch._dynamo.utils import counters
    from torch._inductor.cudagraph_trees import get_manager

    q, k, v = operands()
    d_out = like(q, 1)

    def attend(q, k, v, ids):
        return flex_attention(q * 1, k, v, block_mask=Mask.causal() & Mask.document(ids), enable_gqa=True)

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(attend, mode="reduce-overhead", fullgraph=True)
    for width in (70, 33, 70, 51):
        torch.compiler.cudagraph_mark_step_begin()
        ids = torch.arange(200, device=DEVICE) // width
        out = compiled(q, k, v, ids)
        gradients = torch.autograd.grad(out, (q, k, v), d_out)
        found = [t.clone() for t in (out, *gradients)]
        eager = attend(q, k, v, ids)
        assert torch.equal(found[0], eager)
        for a, b in zip(found[1:], torch.autograd.grad(eager, (q, k, v), d_out)):
            assert (a - b).abs().max() <= 0.02 * b.abs().max()
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert list(get_manager(0, create_if_none_exists=False).get_roots())
    torch._dynamo.reset()
