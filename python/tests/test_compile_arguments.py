"""Arguments that torch's operator has no place for, in compiled functions: sinks, dropout, sequences one after another and
pages."""

import pytest
import torch
from compiled import Backend, agrees, needs_compiler, operands

from foveate import AuxRequest, Mask, flex_attention, paged, varlen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sink_is_part_of_the_graph_and_learns(dtype):
    sink = torch.randn(2, requires_grad=True)

    def model(q, k, v):
        # The first three queries see no key.
        mask = Mask("kv + 3 <= q")
        out, aux = flex_attention(q, k, v, block_mask=mask, sink=sink, return_aux=AuxRequest(lse=True, max_scores=True))
        return out, aux.lse, aux.max_scores

    tolerance = 2e-5 if dtype == torch.float32 else 1e-2
    backend = agrees(model, operands(2, 2, 2, 20, 20, 8, 8, dtype=dtype), [sink], tolerance=tolerance)
    assert backend.operators == ["foveate.forward.default", "foveate.backward.default"]


def seeded(function):
    def run(*inputs):
        torch.manual_seed(3)
        return function(*inputs)

    return run


@pytest.mark.parametrize("checkpointed", [False, True])
def test_dropout_is_part_of_the_graph(checkpointed):
    from torch.utils.checkpoint import checkpoint

    def block(q, k, v, ids):
        mask = Mask.document(ids)
        return flex_attention(q, k, v, lambda s, b, h, i, j: s + h, mask, dropout_p=0.4).sin()

    def model(q, k, v, ids):
        return checkpoint(block, q, k, v, ids, use_reentrant=False) if checkpointed else block(q, k, v, ids)

    inputs = [*operands(2, 2, 2, 40, 40, 8, 8), torch.tensor([0] * 12 + [1] * 28)]
    compiled = Backend().compile(model)
    results = []
    for run in (seeded(model), seeded(compiled)):
        out = run(*inputs)
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs[:3])))
    # On CUDA torch's checkpoint draws from a copy of its generator, as it was at compilation.
    if not (checkpointed and inputs[0].is_cuda):
        for ours, gold in zip(results[1], results[0]):
            torch.testing.assert_close(ours, gold)
    assert not torch.equal(compiled(*inputs), compiled(*inputs))


def test_dropout_drops_what_inductors_generator_says():
    if needs_compiler.args[0]:
        pytest.skip("Inductor needs g++")
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: flex_attention(q, k, v, dropout_p=0.25), fullgraph=True)
    q = torch.zeros(1, 2, 64, 8)
    v = torch.eye(64).expand(1, 2, 64, 64)
    outs = [compiled(q, q, v) * 64 * 0.75 for _ in range(2)]
    for out in outs:
        torch.testing.assert_close(out, out.round())
        assert out.max() == 1 and abs(out.mean() - 0.75) < 0.02
    assert not torch.equal(*outs)


def test_varlen_is_part_of_the_graph_forward_and_backward():
    cu_q, cu_k = torch.tensor([0, 7, 7, 20, 33]), torch.tensor([0, 9, 12, 30, 41])
    slope = torch.randn(4, requires_grad=True)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(rows, heads, dim, generator=generator).requires_grad_()
        for rows, heads, dim in ((35, 4, 8), (44, 2, 8), (44, 2, 12))
    )
    sink = torch.randn(4, requires_grad=True)

    def model(q, k, v, cu_q, cu_k, sink):
        out, aux = varlen(
            q * 2, k, v, cu_q, cu_k, None, None, lambda s, b, h, i, j: s + slope[h] * (i - j) + b, Mask.causal(),
            return_aux=AuxRequest(lse=True, max_scores=True), sink=sink,
        )
        return out.sin(), aux.lse.exp(), aux.max_scores

    backend = agrees(model, [q, k, v, cu_q, cu_k, sink], learned=(slope,))
    assert backend.operators == ["foveate.varlen_forward.default", "foveate.varlen_backward.default"]
    for more in (torch.tensor([0, 1, 30]), torch.tensor([0, 35])):
        torch.testing.assert_close(torch.compile(model, backend=backend._backend)(q, k, v, more, more, sink)[0], model(q, k, v, more, more, sink)[0])

    def dropped(q, k, v, cu_q):
        return varlen(q, k[:35], v[:35], cu_q, dropout_p=0.5)

    compiled = Backend().compile(dropped)
    torch.testing.assert_close(seeded(compiled)(q, k, v, cu_q), seeded(dropped)(q, k, v, cu_q))


def test_pages_are_part_of_the_graph():
    keys, values = (torch.randn(16, 2, 8, 12) for _ in range(2))
    table = torch.tensor([[3, 7, 1], [0, 12, -1]])
    lengths = torch.tensor([20, 9])
    sink = torch.randn(4)

    def model(query, table, lengths):
        out, aux = paged(
            query.cos(), keys, values, table, lengths, lambda s, b, h, i, j: s - j, Mask.causal(bottom_right=True),
            return_aux=AuxRequest(lse=True, max_scores=True), sink=sink,
        )
        return out.sin(), aux.lse, aux.max_scores

    backend = agrees(model, [torch.randn(2, 4, 3, 12), table, lengths])
    assert backend.operators == ["foveate.paged.default"]
    with torch.no_grad():
        query = torch.randn(2, 4, 3, 12, requires_grad=True)
        assert Backend().compile(model)(query, table, lengths)[0].shape == (2, 4, 3, 12)


@pytest.mark.parametrize("name", ["varlen", "dropout_p", "paged"])
def test_another_backend_says_that_it_takes_inductor(name):
    q = torch.randn(1, 2, 16, 8)
    cases = {
        "varlen": lambda: varlen(q[0], q[0], q[0], torch.tensor([0, 2])),
        "dropout_p": lambda: flex_attention(q, q, q, dropout_p=0.5),
        "paged": lambda: paged(q, q, q, torch.tensor([[0]]), torch.tensor([3])),
    }
    torch._dynamo.reset()
    with pytest.raises(Exception, match=f"{name} in a compiled function takes the backend Inductor"):
        torch.compile(cases[name], backend="aot_eager", fullgraph=True)()
