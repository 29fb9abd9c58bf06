"""Transforms of ``torch.func``."""

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from reference import attention, close
from torch.autograd import forward_ad

from foveate import Mask, TraceError, create_block_mask, flex_attention, paged, varlen

G = torch.Generator().manual_seed(6)


def operands(*batch):
    return tuple(torch.randn(*batch, 2, 4, n, 8, generator=G) for n in (11, 13, 13))


def test_grad_and_vjp_reach_operands_and_captured_tensors():
    q, k, v = operands()
    slope = torch.randn(4, generator=G)

    def loss(q, k, v, slope, flex=True):
        def score_mod(s, b, h, i, j):
            return s + slope[h] * (i - j)

        if flex:
            return flex_attention(q, k, v, score_mod, Mask.causal()).square().sum()
        mask = torch.ones(11, 13, dtype=torch.bool).tril()
        scores = q.double() @ k.double().transpose(-2, -1) / 8**0.5
        scores = scores + slope.double().reshape(1, 4, 1, 1) * (torch.arange(11)[:, None] - torch.arange(13))
        return (torch.softmax(scores.masked_fill(~mask, -torch.inf), -1) @ v.double()).square().sum()

    ours = torch.func.grad(loss, argnums=(0, 1, 2, 3))(q, k, v, slope)
    golds = torch.func.grad(lambda *x: loss(*x, flex=False), argnums=(0, 1, 2, 3))(q, k, v, slope)
    for one, two in zip(ours, golds):
        close("gradient", one, two, one.dtype, 13 * 8 * 11)
    value, pull = torch.func.vjp(lambda q: flex_attention(q, k, v), q)
    (dq,) = pull(torch.ones_like(value))
    leaf = q.clone().requires_grad_()
    close("dq", dq, torch.autograd.grad(attention(leaf, k, v)[0].sum(), leaf)[0], torch.float32, 13 * 8)


def test_vmap_runs_each_entry():
    q, k, v = operands(3)
    slope = torch.randn(4, requires_grad=True)

    def one(q, k, v):
        return flex_attention(q, k, v, lambda s, b, h, i, j: s + slope[h] * j, Mask.causal())

    batched = torch.vmap(one)(q, k, v)
    gold = torch.stack([one(*entry) for entry in zip(q, k, v)])
    assert torch.equal(batched, gold)
    shared = torch.vmap(one, in_dims=(0, None, None))(q, k[0], v[0])
    assert torch.equal(shared, torch.stack([one(entry, k[0], v[0]) for entry in q]))
    per_entry = torch.vmap(torch.func.grad(lambda q, k, v: one(q, k, v).sum()))(q, k, v)
    for at in range(3):
        leaf = q[at].clone().requires_grad_()
        close("dq", per_entry[at], torch.autograd.grad(one(leaf, k[at], v[at]).sum(), leaf)[0], torch.float32, 1)
    leaf = q.clone().requires_grad_()
    ours = torch.autograd.grad(torch.vmap(one)(leaf, k, v).sum(), (leaf, slope))
    golds = torch.autograd.grad(sum(one(*entry).sum() for entry in zip(leaf, k, v)), (leaf, slope))
    for a, b in zip(ours, golds):
        close("gradient", a, b, torch.float32, 13 * 8 * 11)


def test_what_a_function_captures_beside_a_gradient_of_something_else_is_read():
    """Inside of a transform every result is wrapped, the tables of block masks and converted integers among them."""
    q, k, v = operands()
    bias, documents = torch.randn(4, 13, generator=G), torch.tensor([0] * 5 + [1] * 8)

    def mask_mod(b, h, i, j):
        return documents[i] == (documents * 1)[j]

    def scored(q, block_mask):
        return flex_attention(q, k, v, lambda s, b, h, i, j: s + (bias * 2)[h, j] * bias[h, i], block_mask)

    def made(create):
        return create(mask_mod, None, None, 11, 13, device=q.device)

    outside = made(create_block_mask), made(torch.nn.attention.flex_attention.create_block_mask)
    calls = {
        "a function": lambda x: scored(x, Mask(mask_mod)),
        "a block mask": lambda x: scored(x, outside[0]),
        "lists": lambda x: scored(x, outside[1]),
        "a block mask that is made there": lambda x: scored(x, made(create_block_mask)),
        "rows": lambda x: varlen(
            *(t[0, :, :11].transpose(0, 1) for t in (x, k, v)), torch.tensor([0, 4, 11]), mask=Mask.causal()
        ),
    }
    for name, call in calls.items():
        leaf = q.clone().requires_grad_()
        gold = torch.autograd.grad(call(leaf).square().sum(), leaf)[0]
        # CUDA sums gradients in any order.
        torch.testing.assert_close(torch.func.grad(lambda x: call(x).square().sum())(q), gold, msg=name)
        assert torch.equal(torch.func.grad(lambda x: (call(q) * x).sum())(torch.ones(())), call(q).sum()), name
    table, lengths = torch.zeros(2, 1, dtype=torch.long), torch.tensor([13, 9])
    decoded = paged(q, k[:1], v[:1], table, lengths)
    pulled = torch.func.grad(lambda x: (paged(q, k[:1], v[:1], table, lengths) * x).sum())(torch.ones(()))
    assert torch.equal(pulled, decoded.sum())


def test_what_only_an_outer_transform_differentiates_is_refused():
    q, k, v = operands()

    def inner(slope):
        return torch.func.grad(lambda x: flex_attention(x, k, v, lambda s, b, h, i, j: s * (slope * 2)[h]).sum())(
            q
        ).sum()

    with pytest.raises(TraceError, match="a captured tensor gets its gradient by an outer transform"):
        torch.func.grad(inner)(torch.ones(4))
    assert torch.equal(torch.vmap(inner)(torch.ones(3, 4)), torch.stack([inner(torch.ones(4))] * 3))
    with pytest.raises(ValueError, match="dropout_p in torch.vmap takes randomness='same'"):
        torch.vmap(lambda x: flex_attention(x, k, v, dropout_p=0.5), randomness="different")(q[None])
    with pytest.raises(NotImplementedError, match="no rule for torch.vmap"):
        torch.vmap(lambda x: paged(x, k[:1], v[:1], torch.zeros(2, 1).int(), torch.tensor([13, 9])))(q[None])


def test_a_derivative_in_forward_mode_is_refused_and_float64_has_one():
    """What is given a tangent and gives none would be constant, to whoever asks."""
    q, k, v = operands()
    slope, ends = torch.ones(4), torch.tensor([0, 11])

    def scored(slope):
        return flex_attention(q, k, v, lambda s, b, h, i, j: s * slope[h])

    def masked(slope):
        return flex_attention(q, k, v, block_mask=Mask(lambda b, h, i, j: slope[h] > j))

    def rows(x):
        return varlen(x[0].transpose(0, 1), *(t[0, :, :11].transpose(0, 1) for t in (k, v)), ends)

    def decoded(x):
        return paged(x, k[:1], v[:1], torch.zeros(2, 1, dtype=torch.int32), torch.tensor([13, 9]))

    scored(slope)  # Its trace is kept.
    for call, x in ((lambda x: flex_attention(x, k, v), q), (rows, q), (decoded, q), (scored, slope), (masked, slope)):
        with pytest.raises(NotImplementedError, match="no derivative in forward mode"):
            torch.func.jvp(call, (x,), (x,))
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no derivative in forward mode"):
            call(forward_ad.make_dual(x, x))
    with pytest.raises(NotImplementedError, match="no derivative in forward mode"):
        torch.func.hessian(lambda x: flex_attention(x, k, v).sum())(q)
    wide = [t.double() for t in (q, k, v)]
    of_q = torch.func.jvp(lambda x: flex_attention(x, *wide[1:]), (wide[0],), (wide[0],))[1]
    gold = torch.func.jvp(lambda x: torch.softmax(x @ wide[1].mT / 8**0.5, -1) @ wide[2], (wide[0],), (wide[0],))[1]
    torch.testing.assert_close(of_q, gold)
    # Beside a derivative of something else nothing is refused.
    assert torch.equal(torch.func.jvp(lambda x: scored(slope) * x, (x.sum(),), (x.sum(),))[1], scored(slope) * 4)


def test_a_batch_of_gradients_is_vmaps_and_refused_outside_of_torch_func():
    q, k, v = operands()
    leaf, each = q.clone().requires_grad_(), torch.randn(3, 2, 4, 11, 8, generator=G)
    _, pull = torch.func.vjp(lambda x: flex_attention(x, k, v), q)
    golds = torch.stack([pull(d)[0] for d in each])
    assert torch.equal(torch.vmap(lambda d: pull(d)[0])(each), golds)
    with pytest.raises(NotImplementedError, match="takes no batch of gradients by `is_grads_batched`"):
        torch.autograd.grad(flex_attention(leaf, k, v), leaf, each, is_grads_batched=True)
    with pytest.raises(NotImplementedError, match="`torch.func.jacrev`"):
        torch.autograd.functional.jacobian(lambda x: flex_attention(x, k, v), q, vectorize=True)


@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_a_transform_in_a_compiled_function_breaks_its_graph(transform):
    torch._dynamo.reset()
    q, k, v = operands()
    ends = torch.tensor([0, 11])

    def both(x):
        rows = (t[0, :, :11].transpose(0, 1) for t in (x, k, v))
        return flex_attention(x, k, v, lambda s, b, h, i, j: s - 0.1 * j).sum() + varlen(*rows, ends).sum()

    def step(x):
        return torch.func.grad(both)(x) if transform == "grad" else torch.vmap(both)(x[None])

    torch.testing.assert_close(torch.compile(step)(q), step(q))


SLOPES, DOCUMENTS, SCALES = torch.randn(3, 4, generator=G), torch.randint(0, 3, (3, 13), generator=G), torch.rand(3, generator=G)


KEYS = operands()[1:]


def scored(x, slope, ids, scale):
    k, v = KEYS
    mask = Mask.document(ids) & Mask(lambda b, h, i, j: (ids * 2)[i] <= 2 * ids[j])
    return flex_attention(x, k, v, lambda s, b, h, i, j: s * scale + slope[h] * (i - j), mask)


CAPTURED = {
    "a score's": lambda x, slope, ids, scale: scored(x, slope, DOCUMENTS[0], SCALES[0]),
    "a mask's": lambda x, slope, ids, scale: scored(x, SLOPES[0], ids, SCALES[0]),
    "a number": lambda x, slope, ids, scale: scored(x, SLOPES[0], DOCUMENTS[0], scale),
    "all": scored,
    "of rows": lambda x, slope, ids, scale: varlen(
        *(t[0, :, :11].transpose(0, 1) for t in (x, *KEYS)), torch.tensor([0, 4, 11]),
        score_mod=lambda s, b, h, i, j: s + slope[h] * j, mask=Mask(lambda b, h, i, j: ids[i] <= ids[j]),
    ),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_batch_is_read_entry_by_entry(name):
    call, q = CAPTURED[name], operands(3)[0]
    batches = q, SLOPES, DOCUMENTS, SCALES
    gold = torch.stack([call(*entry) for entry in zip(*batches)])
    assert torch.equal(torch.vmap(call)(*batches), gold)
    # Where functions alone have a batch, and where it is another axis.
    gold = torch.stack([call(q[0], *entry) for entry in zip(*batches[1:])])
    assert torch.equal(torch.vmap(call, in_dims=(None, 0, 0, 0))(q[0], *batches[1:]), gold)
    assert torch.equal(torch.vmap(call, in_dims=(None, 1, 1, 0))(q[0], SLOPES.T, DOCUMENTS.T, SCALES), gold)

    def gradient(*entry):
        return torch.func.grad(lambda x, slope: call(x, slope, *entry[2:]).square().sum(), argnums=(0, 1))(*entry[:2])

    each = [gradient(*entry) for entry in zip(*batches)]
    for ours, golds in zip(torch.vmap(gradient)(*batches), zip(*each)):
        close("per entry", ours, torch.stack(golds), torch.float32, 13 * 8 * 11)
    leaves = [t.clone().requires_grad_() for t in batches[:2]]
    out = torch.vmap(call)(*leaves, *batches[2:])
    for ours, golds in zip(torch.autograd.grad(out.square().sum(), leaves, materialize_grads=True), zip(*each)):
        close("in all", ours, torch.stack(golds), torch.float32, 13 * 8 * 11)


def test_batches_of_several_vmaps_are_read_in_any_order():
    q = operands(3)[0]
    pairs = [[scored(q[0], slope, ids, SCALES[0]) for ids in DOCUMENTS] for slope in SLOPES]
    gold = torch.stack([torch.stack(of) for of in pairs])

    def both(outer, inner, dims):
        return torch.vmap(lambda a: torch.vmap(lambda b: scored(q[0], *dims(a, b), SCALES[0]))(inner))(outer)

    assert torch.equal(both(SLOPES, DOCUMENTS, lambda slope, ids: (slope, ids)), gold)
    assert torch.equal(both(DOCUMENTS, SLOPES, lambda ids, slope: (slope, ids)), gold.transpose(0, 1))
    inner = torch.vmap(lambda slope: torch.vmap(lambda x: scored(x, slope, DOCUMENTS[0], SCALES[0]))(q))(SLOPES)
    assert torch.equal(inner, torch.stack([torch.stack([scored(x, slope, DOCUMENTS[0], SCALES[0]) for x in q]) for slope in SLOPES]))


def test_a_captured_batch_that_no_call_reads_entry_by_entry_is_refused():
    q, k, v = operands()
    words = "is a batch of torch.vmap: give its entries in the batch axis of one call instead"
    with pytest.raises(TraceError, match=f"mask_mod `<lambda>`: a captured tensor {words}; File .*test_func.py"):
        torch.vmap(lambda ids: create_block_mask(lambda b, h, i, j: ids[i] == ids[j], None, None, 11, 13).kv_indices)(DOCUMENTS)
    with pytest.raises(TraceError, match=f"cu_seqlens_q {words}"):
        rows = k[0].transpose(0, 1)
        torch.vmap(lambda ends: varlen(rows, rows, rows, ends))(torch.tensor([[0, 5, 13], [0, 9, 13]]))
    with pytest.raises(TraceError, match=f"`ids` {words}"):
        torch.vmap(lambda ids: flex_attention(q.double(), k.double(), v.double(), block_mask=Mask.document(ids)))(DOCUMENTS)


class Layer(torch.nn.Module):
    def __init__(self, compiled):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)
        self.attend = torch.compile(self.plain, fullgraph=True) if compiled else self.plain

    def plain(self, q, k, v):
        return flex_attention(q, k, v, lambda s, b, h, i, j: s - 0.1 * (i - j), Mask.causal())

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


# What a schedule that splits the backward sets for compiled parts of any kind. Without the header that Inductor
# compiles once for all processes of a user, where one may read what another is writing.
@torch._inductor.config.patch(cpp_cache_precompile_headers=False)
@pytest.mark.parametrize("compiled", [False, True])
@torch._functorch.config.patch(donated_buffer=False)
def test_a_backward_that_a_pipeline_splits_gives_the_same_gradients(compiled):
    backward = pytest.importorskip("torch.distributed.pipelining._backward")
    torch.manual_seed(0)
    torch._dynamo.reset()
    layer = Layer(compiled)
    x, d = torch.randn(2, 20, 16, requires_grad=True), torch.randn(2, 20, 16)
    layer(x).backward(d)
    whole = [x.grad, *(p.grad for p in layer.parameters())]
    x.grad = None
    for parameter in layer.parameters():
        parameter.grad = None
    dx, groups = backward.stage_backward_input([layer(x)], [d], [x], layer.parameters())
    backward.stage_backward_weight(layer.parameters(), groups)
    for a, b in zip([dx[0], *(p.grad for p in layer.parameters())], whole):
        assert torch.equal(a, b)
