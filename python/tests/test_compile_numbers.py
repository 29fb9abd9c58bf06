"""Numbers that masks and scores capture in a compiled function: another value compiles nothing."""

import math

import pytest
import torch
import torch._dynamo.testing
from compiled import Backend, needs_compiler
from torch.nn.attention import flex_attention as torch_flex
from torch.utils.checkpoint import checkpoint

import foveate
from foveate import Mask, flex_attention, paged, varlen

ENDS = torch.tensor([0, 10, 24], dtype=torch.int32)
FLOATS = (0.5, 0.7, 0.3, 0.25, 0.9)
SIZES = (5, 7, 2, 11, 24)


def operands():
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(1, 2, 24, 8, generator=generator).requires_grad_() for _ in range(3)]


def compilations(model, numbers, dynamic=None, tolerance=2e-5, **options):
    """How often ``model(q, k, v, number)`` was compiled in all when it was called with each of the numbers, in the end: its
    results and gradients are those of uncompiled calls."""
    inputs, backend, counts = operands(), Backend(), []
    compiled = backend.compile(model, dynamic=dynamic, **options)
    for number in numbers:
        results = []
        for run in (model, compiled):
            torch.manual_seed(1)
            out = run(*inputs, number)
            results.append((out, *torch.autograd.grad(out.float().square().sum(), inputs)))
        for gold, ours in zip(*results):
            torch.testing.assert_close(ours, gold, rtol=0, atol=tolerance * (gold.abs().max().item() + 1))
        counts.append(backend.compilations)
    assert not any(name.startswith("flex_attention") for name in backend.operators), backend.operators
    return counts


class Capped(torch.nn.Module):
    alpha = 0.0

    def forward(self, q, k, v):
        return flex_attention(q, k, v, lambda s, b, h, i, j: torch.tanh(s / self.alpha) * self.alpha)


CAPPED = Capped()


def capped(q, k, v, alpha):
    CAPPED.alpha = alpha
    return CAPPED(q, k, v)


def computed(q, k, v, alpha):
    slope = (alpha * 3 - 1) / 2
    return flex_attention(q, k, v, lambda s, b, h, i, j: s * slope + alpha)


def twice(q, k, v, alpha):
    def score(s, b, h, i, j):
        return torch.where(i > j, s.clamp(-alpha, alpha), alpha)

    inner = flex_attention(q * alpha, k, v, score)
    return flex_attention(inner, k, v, score, Mask(lambda b, h, i, j: (i - j) * alpha < 4)) * alpha


def sequences(q, k, v, alpha):
    rows = (x[0].transpose(0, 1) for x in (q, k, v))
    return varlen(*rows, ENDS, score_mod=lambda s, b, h, i, j: s - alpha * (i - j))


def checkpointed(q, k, v, alpha):
    def block(q, k, v):
        return flex_attention(q, k, v, lambda s, b, h, i, j: s * alpha)

    return checkpoint(block, q, k, v, use_reentrant=False)


FLOAT = {
    "a closure's": lambda q, k, v, a: flex_attention(q, k, v, lambda s, b, h, i, j: s * a + (i - j) * a),
    "a module's": capped,
    "one computed of it": computed,
    "the same of two calls and their masks": twice,
    "as an exponent": lambda q, k, v, a: flex_attention(q, k, v, lambda s, b, h, i, j: s * 2.0 ** (-4 * a)),
    "of 16 bits": lambda q, k, v, a: flex_attention(q.half(), k.half(), v.half(), lambda s, b, h, i, j: s * a),
    "of varlen": sequences,
    "of a checkpointed block": checkpointed,
    "named in a text": lambda q, k, v, a: flex_attention(q, k, v, block_mask=Mask("f32(q - kv) < far * 9.0", far=a)),
    "computed, and named in a text": lambda q, k, v, a: flex_attention(
        q, k, v, lambda s, b, h, i, j: s * a, Mask("f32(q - kv) < far", far=a * 10) & Mask.causal()
    ),
    "of torch's own name": lambda q, k, v, a: torch_flex.flex_attention(q, k, v, lambda s, b, h, i, j: s * a),
}


@pytest.mark.parametrize("name", FLOAT)
def test_a_captured_float_compiles_once_more_and_then_never(name):
    with foveate.enable():
        assert compilations(FLOAT[name], FLOATS, tolerance=2e-3 if "16" in name else 2e-5) == [1, 2, 2, 2, 2]
        if name != "a module's":  # Of a module torch takes floats for constants until they change.
            assert compilations(FLOAT[name], FLOATS, dynamic=True, tolerance=2e-3 if "16" in name else 2e-5) == [1] * 5


INTEGER = {
    "sliding_window": Mask.sliding_window,
    "window": lambda n: Mask.window(n, n + 1),
    "chunked": Mask.chunked,
    "dilated": lambda n: Mask.dilated(n * 3, n),
    "prefix and global_tokens": lambda n: Mask.causal() & (Mask.prefix(n) | Mask.global_tokens(n)),
    "in a text": lambda n: Mask("window(n) | kv < n", n=n),
    "of offsets": lambda n: Mask.from_cu_seqlens(torch.tensor([0, n, 24])),
    "in a function": lambda n: Mask(lambda b, h, i, j: i - j < n),
}


@pytest.mark.parametrize("name", INTEGER)
def test_an_integer_of_a_mask_compiles_once_more_and_then_never(name):
    def model(q, k, v, n):
        return flex_attention(q, k, v, block_mask=made[n] if name == "of offsets" else INTEGER[name](n))

    made = {n: INTEGER["of offsets"](n) for n in SIZES}
    if name == "of offsets":  # Masks are made before: the host reads the offsets.
        inputs, backend = operands(), Backend()
        compiled = backend.compile(lambda q, k, v, mask: flex_attention(q, k, v, block_mask=mask), dynamic=True)
        for mask in made.values():
            torch.testing.assert_close(compiled(*inputs, mask), flex_attention(*inputs, block_mask=mask))
        assert backend.compilations <= 2
        return
    assert compilations(model, SIZES) == [1, 2, 2, 2, 2]
    assert compilations(model, SIZES, dynamic=True) == [1] * 5


def test_a_size_that_a_named_mask_refuses_is_refused_after_others_too():
    q, k, v = operands()
    backend = Backend()
    compiled = backend.compile(lambda q, k, v, n: flex_attention(q, k, v, block_mask=Mask.sliding_window(n)))
    for n, wrong in ((5, None), (7, None), (-3, "at least 1, not -3"), (0, "at least 1, not 0"), (2**40, "does not fit 32 bits"), (4, None)):
        if wrong:
            with pytest.raises(Exception, match=wrong):
                compiled(q, k, v, n)
        else:
            torch.testing.assert_close(compiled(q, k, v, n), flex_attention(q, k, v, block_mask=Mask.sliding_window(n)))


def test_a_size_below_0_is_refused_after_one_of_0_that_is_taken():
    q, k, v = operands()
    compiled = Backend().compile(lambda q, k, v, n: flex_attention(q, k, v, block_mask=Mask.causal() | Mask.prefix(n)))
    for n in (5, 7, 0, 9):
        gold = flex_attention(q, k, v, block_mask=Mask.causal() | Mask.prefix(n))
        torch.testing.assert_close(compiled(q, k, v, n), gold)
    with pytest.raises(Exception, match="at least 0, not -1"):
        compiled(q, k, v, -1)


def test_an_integer_that_a_graph_reads_from_a_tensor_is_a_scalar():
    q, k, v = operands()
    backend = Backend()

    def model(q, k, v, reach):
        n = reach.item()
        return flex_attention(q, k, v, lambda s, b, h, i, j: s - (i - j) * n, Mask(lambda b, h, i, j: i - j < n))

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = backend.compile(model)
        for n in (5, 3):
            torch.testing.assert_close(compiled(q, k, v, torch.tensor(n)), model(q, k, v, torch.tensor(n)))
    assert backend.compilations == 1 and "foveate.forward.default" in backend.operators


CONSTANT = {
    "a function of Python's": lambda q, k, v, a: flex_attention(q, k, v, lambda s, b, h, i, j: s * math.sqrt(a)),
    "an integer of it": lambda q, k, v, a: flex_attention(q, k, v, lambda s, b, h, i, j: s * int(a * 10)),
    "an argument that is no tensor": lambda q, k, v, a: flex_attention(q, k, v, lambda s, b, h, i, j: torch.nn.functional.leaky_relu(s, a)),
    "dropout_p": lambda q, k, v, a: flex_attention(q, k, v, dropout_p=a),
    "scale": lambda q, k, v, a: flex_attention(q, k, v, lambda s, b, h, i, j: s * a, scale=a),
}


@pytest.mark.parametrize("name", CONSTANT)
def test_where_no_tensor_can_be_each_value_is_right_in_a_graph_of_its_own(name):
    counts = compilations(CONSTANT[name], FLOATS)
    assert [b - a for a, b in zip(counts[1:], counts[2:])] == [1, 1, 1]


def test_a_float_that_decides_compiles_once_for_each_decision():
    def model(q, k, v, a):
        return flex_attention(q, k, v, lambda s, b, h, i, j: s * a if a > 0.4 else s)

    assert compilations(model, FLOATS)[-1] == compilations(model, (0.5, 0.7, 0.3))[-1] == 3


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_backends_take_a_float_that_changes(backend, dtype):
    torch._dynamo.reset()
    q, k, v = (t.detach().to(dtype).requires_grad_() for t in operands())
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)

    def model(q, k, v, a):
        return flex_attention(q, k, v, lambda s, b, h, i, j: s * a)

    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for a in FLOATS:
        ours, gold = compiled(q, k, v, a), model(q, k, v, a)
        torch.testing.assert_close(ours, gold, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-12)
    assert counter.frame_count == 2


def test_pages_take_a_float_that_changes():
    keys, values = (torch.randn(4, 2, 8, 12) for _ in range(2))
    query, table, lengths = torch.randn(2, 4, 3, 12), torch.tensor([[3, 1], [0, 2]]), torch.tensor([12, 9])
    backend = Backend()

    def model(a):
        return paged(query, keys, values, table, lengths, lambda s, b, h, i, j: s * a, Mask.causal(bottom_right=True))

    compiled = backend.compile(model)
    for a in FLOATS:
        torch.testing.assert_close(compiled(a), model(a))
    assert backend.compilations == 2


@needs_compiler
def test_inductor_computes_with_numbers_that_change():
    torch._dynamo.reset()
    inputs = operands()

    def model(q, k, v, a, n):
        return flex_attention(q * 2, k, v, lambda s, b, h, i, j: s * a, Mask.sliding_window(n)).sin()

    compiled = torch.compile(model, fullgraph=True)
    for a, n in zip(FLOATS, SIZES):
        gold, ours = model(*inputs, a, n), compiled(*inputs, a, n)
        torch.testing.assert_close(ours, gold)
        golds, ours = (torch.autograd.grad(out.sum(), inputs) for out in (gold, ours))
        torch.testing.assert_close(ours, golds)
