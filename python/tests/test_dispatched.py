"""Tensors that have others' elements, and modes of dispatch that look on: fake tensors, counters of operations,
policies of checkpointing.
"""

import functools

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from foveate import AuxRequest, Mask, create_block_mask, flex_attention, paged, varlen

G = torch.Generator().manual_seed(3)
CU = torch.tensor([0, 13, 13, 40], dtype=torch.int32)
TABLE, LENGTHS = torch.arange(10).view(2, 5), torch.tensor([40, 33])
IDS = torch.tensor([0] * 13 + [1] * 27)


def operands(requires_grad=True, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(2, heads, 40, 16, generator=g).requires_grad_(requires_grad) for heads in (4, 2, 2)]


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def rows(*tensors):
    return [t[0].transpose(0, 1) for t in tensors]


def pages(*tensors):
    return [t.unflatten(2, (5, 8)).transpose(1, 2).flatten(0, 1) for t in tensors]


class Watching(TorchDispatchMode):
    """Notes the package's operators."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "foveate":
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def biased(bias, unread, reach):
    def score_mod(score, b, h, i, j):
        unread[h]
        return score + bias[h] * (i - j) * 0.1 + torch.tanh(score) * reach

    return score_mod


def sliced(extents):
    mask = create_block_mask(causal, *extents, BLOCK_SIZE=8)[:, :, :]
    mask.mask_mod = causal
    return mask


def attended(q, k, v, bias, name):
    flex = functools.partial(flex_attention, q, k, v, biased(bias, torch.ones(4), 0.37), enable_gqa=True)
    if name == "no mask":
        return flex()
    if name == "a named mask and lse":
        return flex(block_mask=Mask.sliding_window(7) & Mask.document(IDS), return_aux=AuxRequest(lse=True))
    if name == "lists":
        return flex(block_mask=sliced((None, None, 40, 40)))
    if name == "lists of entries and heads":
        return flex(block_mask=sliced((2, 4, 40, 40)))
    if name == "a mask of the package and a sink":
        return flex(block_mask=create_block_mask(causal, None, None, 40, 40), sink=bias * 2)
    if name == "dropout":
        torch.manual_seed(7)
        return flex(dropout_p=0.3)
    if name == "sequences":
        return varlen(
            *rows(q, k, v), CU, score_mod=biased(bias, bias, 0.5), mask=Mask.causal(), return_aux=AuxRequest(lse=True)
        )
    assert name == "sequences and a sink"
    return varlen(*rows(q, k, v), CU[:3], CU[:3], sink=bias, return_aux=AuxRequest(lse=True))


CALLS = (
    "no mask",
    "a named mask and lse",
    "lists",
    "lists of entries and heads",
    "a mask of the package and a sink",
    "dropout",
    "sequences",
    "sequences and a sink",
)


def results(name, inputs):
    q, k, v, bias = inputs
    out = attended(q, k, v, bias, name)
    parts = [out] if isinstance(out, torch.Tensor) else [out[0], out[1].lse]
    total = sum((p.masked_fill(p.isinf(), 0) * (1 + torch.arange(p.shape[-1]) % 3)).sum() for p in parts)
    return [*parts, *torch.autograd.grad(total, inputs)]


@pytest.mark.parametrize("name", CALLS)
def test_a_mode_sees_one_operator_and_results_are_the_same(name):
    inputs = [*operands(), torch.randn(4, generator=G).requires_grad_()]
    gold = results(name, inputs)
    with Watching() as watching:
        ours = results(name, inputs)
    kind = "varlen_" if "sequences" in name else ""
    assert watching.seen == [f"{kind}forward.default", f"{kind}backward.default"]
    for one, two in zip(ours, gold):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "dropout"])
def test_tensors_that_wrap_two_give_the_results_of_both(name):
    both = [[*operands(seed=seed), torch.randn(4, generator=G).requires_grad_()] for seed in (0, 1)]
    wrapped = [TwoTensor(a.detach(), b.detach()).requires_grad_() for a, b in zip(*both)]
    golds = [results(name, inputs) for inputs in both]
    for of_both, one, two in zip(results(name, wrapped), *golds):
        assert type(of_both) is TwoTensor
        for ours, gold in ((of_both.a, one), (of_both.b, two)):
            torch.testing.assert_close(ours, gold, rtol=1e-4, atol=1e-5)


@pytest.mark.cpu("ids and offsets are made on the CPU")
@pytest.mark.parametrize("name", CALLS)
def test_fake_tensors_have_shapes_strides_and_gradients(name):
    inputs = [*operands(), torch.randn(4, generator=G).requires_grad_()]
    gold = results(name, inputs)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [torch.empty_strided(t.shape, t.stride()).requires_grad_() for t in inputs]
        ours = results(name, fakes)
    for one, two in zip(ours, gold):
        assert one.dtype == two.dtype and one.shape == two.shape and one.stride() == two.stride()


def test_fake_tensors_need_no_device():
    with FakeTensorMode():
        q, bias = torch.empty(2, 4, 40, 16, device="cuda", dtype=torch.bfloat16), torch.empty(4, device="cuda")
        mask = create_block_mask(causal, None, None, 40, 40, device="cuda")
        out, aux = flex_attention(
            q, q, q, biased(bias, bias, 0.1), mask, dropout_p=0.1, return_aux=AuxRequest(lse=True)
        )
    assert out.device.type == "cuda" and out.shape == q.shape and out.dtype == q.dtype and aux.lse.shape == (2, 4, 40)


def test_block_masks_of_fake_tensors_have_shapes():
    gold = create_block_mask(causal, 2, None, 40, 40, device="cpu", BLOCK_SIZE=8)
    for device in ("cpu", "cuda"):
        with FakeTensorMode():
            mask = create_block_mask(causal, 2, None, 40, 40, device=device, BLOCK_SIZE=8)
        assert mask.kv_indices.shape == gold.kv_indices.shape and mask.kv_indices.device.type == device
        assert mask.full_kv_num_blocks.shape == gold.full_kv_num_blocks.shape and mask.q_indices.dtype == torch.int32


def test_pages_are_seen_and_have_no_gradient():
    q, k, v = operands(requires_grad=False)
    call = functools.partial(paged, mask=Mask.causal(bottom_right=True), page_table=TABLE, lengths=LENGTHS)
    for aux in (None, AuxRequest(lse=True), AuxRequest(max_scores=True)):
        gold = call(q[:, :, :3], *pages(k, v), return_aux=aux)
        with Watching() as watching:
            ours = call(q[:, :, :3], *pages(k, v), return_aux=aux)
        assert watching.seen == ["paged.default"]
        for one, two in zip(
            (ours,) if aux is None else (ours[0], *ours[1]), (gold,) if aux is None else (gold[0], *gold[1])
        ):
            assert (one is None) is (two is None)
            one is None or torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    q.requires_grad_()
    with Watching():
        out = call(q[:, :, :3], *pages(k, v))
    with pytest.raises(RuntimeError, match="foveate.paged has no gradient"):
        out.sum().backward()


@pytest.mark.parametrize("given", [None, [0, 5], torch.tensor(3), torch.zeros(2, 3)])
def test_wrong_offsets_and_pages_are_said_as_of_plain_calls(given):
    rows, q, pages = torch.randn(5, 2, 8), torch.randn(1, 2, 1, 8), torch.randn(3, 2, 4, 8)
    table, lengths = torch.zeros(1, 3, dtype=torch.int32), torch.tensor([9])
    calls = [
        lambda: varlen(rows, rows, rows, torch.tensor([0, 5]), given if given is not None else "none"),
        lambda: paged(q, pages, pages, given, lengths),
        lambda: paged(q, pages, pages, table, given),
    ]
    for call in calls:
        with pytest.raises(ValueError) as plain:
            call()
        with Watching(), pytest.raises(ValueError) as seen:
            call()
        assert str(seen.value) == str(plain.value)


def test_operations_are_counted_as_of_attention_without_a_mask():
    q, k, v = operands()
    counter = FlopCounterMode(display=False)
    with counter:
        flex_attention(q, k, v, block_mask=Mask.causal(), enable_gqa=True).sum().backward()
    pairs = 2 * 4 * 40 * 40
    assert counter.get_total_flops() == 2 * pairs * (16 + 16) + 2 * pairs * (3 * 16 + 2 * 16)
    with FlopCounterMode(display=False) as counter:
        varlen(*rows(q, k, v), CU).sum().backward()
    pairs = 4 * (13**2 + 27**2)
    assert counter.get_total_flops() == 2 * pairs * (16 + 16) + 2 * pairs * (3 * 16 + 2 * 16)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        paged(q[:, :, :3], *pages(k, v), TABLE, LENGTHS)
    assert counter.get_total_flops() == 2 * 4 * 3 * (40 + 33) * (16 + 16)
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        q = torch.empty(2, 4, 40, 16, device="cuda")
        flex_attention(q, q, q)
    assert counter.get_total_flops() == 2 * 2 * 4 * 40 * 40 * (16 + 16)


def test_a_policy_of_checkpointing_saves_or_recomputes_the_operator():
    q, k, v = operands()

    def block(q, k, v):
        return flex_attention(q.sin(), k, v, block_mask=Mask.causal(), enable_gqa=True).cos()

    gold = torch.autograd.grad(block(q, k, v).sum(), (q, k, v))
    for saves in (True, False):
        def policy(ctx, op, *args, **kwargs):
            is_ours = op is torch.ops.foveate.forward.default
            return CheckpointPolicy.MUST_SAVE if is_ours and saves else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        out = checkpoint(block, q, k, v, use_reentrant=False, context_fn=contexts)
        # The policy's mode is asked first, and hands on what it has to compute.
        with Watching() as computed:
            ours = torch.autograd.grad(out.sum(), (q, k, v))
        assert computed.seen.count("forward.default") == (0 if saves else 1)
        for one, two in zip(ours, gold):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


MAX_SCORES = {
    "forward": lambda q, k, v, **more: flex_attention(q, k, v, block_mask=Mask("q != 3"), enable_gqa=True, **more),
    "varlen_forward": lambda q, k, v, **more: varlen(*rows(q, k, v), CU[:3], mask=Mask("q != 3"), **more),
    "paged": lambda q, k, v, **more: paged(q, *pages(k, v), TABLE, LENGTHS, mask=Mask("q != 3"), **more),
}


@pytest.mark.parametrize("name", MAX_SCORES)
def test_max_scores_beside_a_sink_are_those_of_a_plain_call(name):
    tensors, sink = operands(requires_grad=False), 4 + torch.randn(4)
    call = functools.partial(MAX_SCORES[name], return_aux=AuxRequest(lse=True, max_scores=True))
    gold = call(*tensors, sink=sink)
    # The sink is no score, and in some row larger than all of them; a row without a key has none.
    assert torch.equal(gold[1].max_scores, call(*tensors)[1].max_scores)
    assert (gold[1].max_scores[..., :3] < sink[:, None]).any() and gold[1].max_scores[..., 3].isneginf().all()
    with Watching() as watching:
        ours = call(*tensors, sink=sink)
    assert watching.seen == [f"{name}.default"]
    torch.testing.assert_close(ours, gold, rtol=1e-4, atol=1e-5)
    wrapped = call(*(TwoTensor(t, t.clone()) for t in tensors), sink=sink)
    torch.testing.assert_close(wrapped[1].max_scores.b, gold[1].max_scores, rtol=0, atol=0)


def test_what_is_read_must_not_be_written_to_before_the_backward():
    q, k, v = operands()
    bias = torch.randn(4)
    with Watching():
        out = flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h] * j, enable_gqa=True)
    bias.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_second_derivative_is_an_error():
    q, k, v = operands()
    with Watching():
        (dq,) = torch.autograd.grad(flex_attention(q, k, v, enable_gqa=True).sin().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            dq.sum().backward()


TRACED = {
    "flex_attention": lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: s * 0.5, Mask.causal(), enable_gqa=True),
    "varlen": lambda q, k, v: varlen(*rows(q, k, v), CU, mask=Mask.causal()),
    "paged": lambda q, k, v: paged(q, *pages(k, v), TABLE, LENGTHS),
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace")
@pytest.mark.parametrize("name", TRACED)
def test_a_trace_of_torch_jit_records_the_operator(name):
    call, other = TRACED[name], operands(seed=1)
    traced = torch.jit.trace(call, tuple(operands(requires_grad=False)), check_trace=False)
    assert torch.equal(traced(*other), call(*other))
    if name != "paged":
        ours, golds = (torch.autograd.grad(run(*other).square().sum(), other) for run in (traced, call))
        torch.testing.assert_close(ours, golds)
