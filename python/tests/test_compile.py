"""Inside ``torch.compile``: graphs without breaks that call Foveate's operators, with the results of uncompiled calls."""

import functools
import math
import os
import shutil
import warnings

import numpy as np
import pytest
import torch
from compiled import Backend, agrees, needs_compiler, operands
from processes import run
from reference import UNREAD
from torch.nn.attention import flex_attention as torch_flex

import foveate
from foveate import AuxRequest, Mask, create_block_mask, flex_attention


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def test_a_compiled_function_is_one_graph_that_trains_on_our_operators():
    slope = torch.randn(4, requires_grad=True)
    document = torch.tensor([0] * 13 + [1] * 20 + [2] * 4)

    def model(q, k, v, mask):
        def score(s, b, h, i, j):
            return torch.tanh(s / 5) * 5 + slope[h] * (j - i)

        out, aux = flex_attention(q * 2, k, v, score, mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
        return out.sin(), aux.lse

    def within(b, h, i, j):
        return (document[i] == document[j]) & (i >= j)

    inputs = operands(2, 4, 2, 37, 37, 16, 24)
    for mask in (None, create_block_mask(within, None, None, 37, 37), torch_flex.create_block_mask(within, 2, 4, 37, 37, torch.get_default_device(), 16)):
        backend = agrees(model, (*inputs, mask), [slope])
        assert backend.operators == ["foveate.forward.default", "foveate.backward.default"]


def test_a_mask_function_alone_computes_nothing_beside_attention():
    backend = agrees(lambda q, k, v: flex_attention(q, k, v, block_mask=Mask.causal()), operands(1, 2, 2, 24, 24, 8, 8))
    called = [str(n.target) for graph in backend.graphs for n in graph.graph.nodes if n.op == "call_function"]
    beside = [name for name in called if not name.startswith("foveate.") and "getitem" not in name]
    # To and from the base 2 of torch's operator, and constants, which Inductor makes again where they are read,
    # so nowhere: nothing computes tables of tiles.
    assert set(beside) <= {"aten.mul.Scalar", "aten.full.default", "aten.alias.default"}, called
    assert "foveate.forward.default" in called


SCORES = {
    "bias in 4 axes": (lambda t: lambda s, b, h, i, j: s + t["dense"][b, h, i, j], ["dense"]),
    "chained indices": (lambda t: lambda s, b, h, i, j: s + t["dense"][b][h][i][j], ["dense"]),
    "a table from its end": (lambda t: lambda s, b, h, i, j: s + t["table"][h, j - i], ["table"]),
    "a 0-d tensor": (lambda t: lambda s, b, h, i, j: s * t["scale"], ["scale"]),
    "read twice": (lambda t: lambda s, b, h, i, j: s + t["slope"][h] * t["slope"][(h + 1) % 4], ["slope"]),
    "two, one without a gradient": (lambda t: lambda s, b, h, i, j: s + t["slope"][h] * t["fixed"][i], ["slope"]),
    "16 bits": (lambda t: lambda s, b, h, i, j: s + t["half"][h], ["half"]),
    "where, clamp and functions": (
        lambda t: lambda s, b, h, i, j: torch.where(i >= j, s, torch.nn.functional.gelu(s).clamp(-1, 3) - (i - j).abs() / 7),
        [],
    ),
    "a row": (lambda t: lambda s, b, h, i, j: s + torch.dot(t["rows"][i], t["rows"][j]), ["rows"]),
    "steps": (lambda t: lambda s, b, h, i, j: s + torch.floor(2 * s) * t["slope"][h] + torch.round(s + t["slope"][h]), ["slope"]),
    "a detached score": (lambda t: lambda s, b, h, i, j: s * t["slope"][h].detach() + s.detach() * t["slope"][h], ["slope"]),
    "an integer of the score": (lambda t: lambda s, b, h, i, j: s + (4 * s).int().clamp(0, 3) * t["slope"][h], ["slope"]),
    "an inner infinity": (lambda t: lambda s, b, h, i, j: torch.where(i - j < 9, s, -float("inf")), []),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores_and_the_gradients_of_what_they_capture(name):
    make, learned = SCORES[name]
    generator = torch.Generator().manual_seed(1)
    shapes = {"dense": (2, 4, 21, 33), "table": (4, 70), "scale": (), "slope": (4,), "fixed": (21,), "half": (4,), "rows": (33, 3)}
    tensors = {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}
    tensors["half"] = tensors["half"].to(torch.bfloat16)
    for n in learned:
        tensors[n].requires_grad_()
    score = make(tensors)
    agrees(lambda q, k, v: flex_attention(q, k, v, score), operands(2, 4, 4, 21, 33, 8, 8), [tensors[n] for n in learned])


def test_gradients_are_made_of_the_captured_tensors_alone_that_want_them():
    generator = torch.Generator().manual_seed(3)
    first, fixed, last = (torch.randn(n, generator=generator) for n in (21, 33, 33))
    first.requires_grad_()
    last.requires_grad_()

    def model(q, k, v):
        return flex_attention(q, k, v, lambda s, b, h, i, j: s + first[i] * fixed[j] * last[j])

    q, k, v = operands(1, 2, 2, 21, 33, 8, 8)
    inputs = (q, k.detach(), v)
    backend = agrees(model, inputs, [first, last])
    (node,) = (n for graph in backend.graphs for n in graph.graph.nodes if str(n.target) == "foveate.backward.default")
    captured, (needs, places) = node.args[8], node.args[-2:]
    assert len(captured) == 3 and needs == [True, False, True] and places == [0, 2]
    d_q, d_k, d_v, learned = node.meta["val"]
    assert d_k.numel() == 0 and [g.shape for g in learned] == [first.shape, last.shape]


def test_strides_and_16_bits_are_as_uncompiled():
    q, k, v = (torch.randn(2, 19, 3, 8).to(torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(3))
    agrees(lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: s - (i - j).abs()), (q, k, v), tolerance=1e-2)


def test_results_are_natural_logarithms_and_max_scores_have_none():
    q, k, v = operands(1, 2, 2, 9, 12, 8, 8)

    def model(q, k, v):
        out, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True, max_scores=True))
        return out, aux.lse, aux.max_scores

    agrees(model, (q, k, v))
    _, lse, top = Backend().compile(model)(q, k, v)
    scores = q @ k.transpose(-1, -2) / math.sqrt(8)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(top, scores.amax(-1))
    assert lse.requires_grad and not top.requires_grad


def test_a_gradient_of_lse_alone():
    agrees(lambda q, k, v: flex_attention(q, k, v, return_aux=AuxRequest(lse=True))[1].lse * 3, operands(1, 2, 2, 9, 12, 8, 8)[:2] + [torch.randn(1, 2, 12, 8)])


def test_lists_of_a_block_mask_count_and_rows_without_tiles_are_empty():
    made = torch_flex.create_block_mask(causal, None, None, 64, 64, torch.get_default_device(), 16)
    made.kv_num_blocks[..., 2] = 0
    made.full_kv_num_blocks[..., 2] = 0
    lists = torch_flex.BlockMask.from_kv_blocks(
        made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices, 16, causal, (64, 64), compute_q_blocks=False
    )

    def model(q, k, v, mask):
        return flex_attention(q, k, v, block_mask=mask)

    inputs = operands(1, 2, 2, 64, 64, 8, 8)
    agrees(model, (*inputs, lists))
    out = Backend().compile(model)(*inputs, lists)
    assert (out[:, :, 32:48] == 0).all() and (out[:, :, 48:] != 0).any()


def test_a_block_mask_of_ours_is_its_function_until_it_is_given_another():
    inputs = operands(1, 2, 2, 40, 40, 8, 8)

    def model(q, k, v, mask):
        return flex_attention(q, k, v, block_mask=mask)

    mask = create_block_mask(causal, None, None, 40, 40, BLOCK_SIZE=8)
    backend = agrees(model, (*inputs, mask))
    mask.mask_mod = torch_flex.noop_mask
    agrees(model, (*inputs, mask))
    mods = [n.args[6] for g in backend.graphs[:1] for n in g.graph.nodes if str(n.target) == "foveate.forward.default"]
    assert mods == ["kv <= q"]


@pytest.mark.parametrize("named", ["foveate", "torch", "varlen"])
def test_another_scale_is_taken_in_a_whole_graph(named):
    def model(q, k, v, scale):
        if named == "varlen":
            packed = (x[0].transpose(0, 1) for x in (q, k, v))
            return foveate.varlen(*packed, offsets, offsets, 24, 24, scale=scale)
        attend = flex_attention if named == "foveate" else torch_flex.flex_attention
        return attend(q, k, v, scale=scale)

    offsets = torch.tensor([0, 10, 24], dtype=torch.int32)
    inputs, backend = operands(1, 2, 2, 24, 24, 8, 8), Backend()
    with foveate.enable():
        compiled = backend.compile(model)
        for scale in (0.1, 0.25, 0.3, 0.7):
            gold, ours = model(*inputs, scale), compiled(*inputs, scale)
            torch.testing.assert_close(ours, gold)
            ours, gold = (torch.autograd.grad(out.sum(), inputs) for out in (ours, gold))
            torch.testing.assert_close(ours, gold)
    assert all(name.startswith("foveate.") for name in backend.operators), backend.operators


@pytest.mark.parametrize("text, names, said", [
    ("causall", {}, "did you mean `causal`"),
    ("causal", {"n": 3}, "`n` is given, and the mask does not read it"),
])
def test_a_wrong_text_is_what_a_compilation_fails_with(text, names, said):
    compiled = Backend().compile(lambda q, k, v: flex_attention(q, k, v, block_mask=Mask(text, **names)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(Exception, match=said):
            compiled(*operands(1, 2, 2, 24, 24, 8, 8))


def test_lengths_batch_and_captured_values_compile_once():
    table = torch.randn(64)

    def model(q, k, v, ids, far):
        mask = create_mask_of(ids, q.shape[2])
        return flex_attention(q, k, v, lambda s, b, h, i, j: torch.where(i - j < far, s + table[i], s), mask)

    def create_mask_of(ids, n):
        return torch_flex.BlockMask.from_kv_blocks(
            torch.ones(1, 1, 1, dtype=torch.int32),
            torch.zeros(1, 1, 1, 1, dtype=torch.int32),
            BLOCK_SIZE=1 << 30,
            mask_mod=lambda b, h, i, j: ids[b, i] == ids[b, j],
            seq_lengths=(n, n),
        )

    backend = Backend()
    compiled = backend.compile(model, dynamic=True)
    for batch, length, far in ((2, 16, 5), (3, 21, 7), (5, 33, 11), (2, 64, 3)):
        inputs = operands(batch, 4, 4, length, length, 8, 8, seed=length)
        ids = torch.randint(0, 3, (batch, length))
        gold, ours = model(*inputs, ids, far), compiled(*inputs, ids, far)
        torch.testing.assert_close(ours, gold)
        ours = torch.autograd.grad(ours.sum(), inputs)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, torch.autograd.grad(gold.sum(), inputs)))
    assert backend.operators == ["foveate.forward.default", "foveate.backward.default"]


def test_an_element_written_in_place_changes_the_next_result():
    table = torch.randn(24)
    q, k, v = operands(1, 2, 2, 24, 24, 8, 8)
    compiled = Backend().compile(lambda: flex_attention(q, k, v, lambda s, b, h, i, j: s + table[j]))
    before = compiled()
    table.mul_(-3)
    assert not torch.allclose(compiled(), before)
    torch.testing.assert_close(compiled(), flex_attention(q, k, v, lambda s, b, h, i, j: s + table[j]))


def test_what_a_function_computes_of_whole_captured_tensors_is_computed_before_the_call():
    g = torch.Generator().manual_seed(2)
    table, lengths = torch.randn(24, generator=g), torch.tensor([9, 11, 4])
    slope = torch.randn(2, generator=g).requires_grad_()

    def score(s, b, h, i, j):
        return s + table.cumsum(0)[j] + slope[h] * torch.flip(table * 2, (0,))[i]

    def mask(b, h, i, j):
        ends = lengths.cumsum(0)
        return (j < ends[1]) & (i < ends[-1])

    def model(q, k, v):
        return flex_attention(q, k, v, score, Mask(mask))

    backend = agrees(model, operands(1, 2, 2, 24, 24, 8, 8), (slope,))
    assert [name.split(".")[1] for name in backend.operators] == ["forward", "backward"]
    q, k, v = operands(1, 2, 2, 24, 24, 8, 8)
    compiled = backend.compile(model)
    before = compiled(q, k, v)
    lengths[1] = 2
    torch.testing.assert_close(compiled(q, k, v), model(q, k, v))
    assert not torch.allclose(before, model(q, k, v))


def test_the_gradient_of_a_whole_tensors_operation_stays_torchs():
    table = torch.randn(24, requires_grad=True)

    def model(q, k, v):
        return flex_attention(q, k, v, lambda s, b, h, i, j: s + table.cumsum(0)[j])

    q, k, v = operands(1, 2, 2, 24, 24, 8, 8)
    backend = Backend()
    with pytest.warns(UserWarning, match="whole captured tensor that requires grad"):
        out = backend.compile(model)(q, k, v)
        ours = torch.autograd.grad(out.sum(), (q, table))
    assert any(name.startswith("flex_attention_backward") for name in backend.operators)
    for a, b in zip(ours, torch.autograd.grad(model(q, k, v).sum(), (q, table))):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def test_what_cannot_be_said_stays_torchs_with_one_warning():
    q, k, v = (t.detach() for t in operands(1, 2, 2, 24, 24, 8, 8))

    def model(q, k, v):
        return flex_attention(q, k, v, lambda s, b, h, i, j: torch.special.bessel_j0(s))

    backend = Backend()
    with pytest.warns(UserWarning, match="stays torch's: `special_bessel_j0` is"):
        out = backend.compile(model)(q, k, v)
    assert backend.operators == ["flex_attention"]
    scores = torch.special.bessel_j0(q @ k.transpose(-2, -1) / math.sqrt(8))
    torch.testing.assert_close(out, scores.softmax(-1) @ v)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        Backend().compile(model)(q, k, v)


@UNREAD
def test_an_index_outside_its_tensor_is_an_index_error():
    table = torch.randn(8)
    q, k, v = operands(1, 2, 2, 24, 24, 8, 8)
    compiled = Backend().compile(lambda: flex_attention(q, k, v, lambda s, b, h, i, j: s + table[j]))
    with pytest.raises(IndexError, match=r"a captured tensor of shape \(8,\) was read at index 8"):
        compiled()


@needs_compiler
def test_inductor_trains_a_model_without_a_graph_break():
    torch._dynamo.reset()
    torch.manual_seed(0)
    project = torch.nn.Linear(32, 96)
    slope = torch.nn.Parameter(torch.full((4,), 0.1))
    mask = create_block_mask(causal, None, None, 48, 48, BLOCK_SIZE=16)

    def model(x):
        q, k, v = project(x).view(2, 48, 3, 4, 8).permute(2, 0, 3, 1, 4)
        out, aux = flex_attention(q, k, v, lambda s, b, h, i, j: s + slope[h] * (j - i), mask, return_aux=AuxRequest(lse=True))
        return (out.transpose(1, 2).reshape(2, 48, 32) + x).square().mean() + aux.lse.mean()

    x = torch.randn(2, 48, 32)
    parameters = (*project.parameters(), slope)
    gold = model(x)
    ours = torch.compile(model, fullgraph=True)(x)
    torch.testing.assert_close(ours, gold)
    for a, b in zip(torch.autograd.grad(ours, parameters), torch.autograd.grad(gold, parameters)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


MASKS = {
    "by name": lambda ids: Mask.causal() & Mask.document(ids),
    "in text with numbers": lambda ids: Mask("q >= kv && f32(q - kv) < far && q - kv < size", size=9, far=np.float64(7.5)),
    "in text with a truth value": lambda ids: Mask("causal && (kv < 9 || all)", all=False),
    "with a function": lambda ids: ~Mask(lambda b, h, i, j: ids[i] != ids[j]) | Mask.prefix(3),
    "of offsets": lambda ids: Mask.from_cu_seqlens(torch.tensor([0, 7, 20, 33])),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_without_tables_are_part_of_the_graph(name):
    ids = torch.tensor([0] * 12 + [1] * 21)
    mask = MASKS[name](ids)
    backend = agrees(lambda q, k, v: flex_attention(q, k, v, block_mask=mask), operands(1, 2, 2, 33, 33, 8, 8))
    assert backend.operators == ["foveate.forward.default", "foveate.backward.default"]


def test_a_default_device_which_sees_each_call_leaves_compiled_functions_as_they_are():
    bias = torch.randn(2, 20).requires_grad_()
    score = lambda s, b, h, i, j: s + bias[h, j]
    with torch.get_default_device():
        backend = agrees(lambda q, k, v: flex_attention(q, k, v, score), operands(1, 2, 2, 20, 20, 8, 8), (bias,))
        assert backend.operators == ["foveate.forward.default", "foveate.backward.default"]
        wrong = Backend().compile(lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i: s))
        with pytest.raises(TypeError, match="is called with 5 values"):
            wrong(*operands(1, 2, 2, 20, 20, 8, 8))


def test_masks_joined_by_and_are_refused_in_a_compiled_function_too():
    mask = Mask.causal()

    def model(q, k, v):
        return flex_attention(q, k, v, block_mask=mask and Mask.prefix(3))

    for fullgraph in (False, True):
        with pytest.raises(Exception, match="a Mask has no truth value, .*: join masks with &"):
            torch.compile(model, backend="eager", fullgraph=fullgraph)(*operands(1, 2, 2, 33, 33, 8, 8))


@pytest.mark.parametrize("returned", [False, True])
def test_a_block_mask_made_in_the_graph_counts_and_is_made_only_if_something_else_reads_it(returned):
    ids = torch.tensor([0] * 12 + [1] * 28)

    def model(q, k, v):
        mask = create_block_mask(lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j), None, None, 40, 40, BLOCK_SIZE=16)
        out = flex_attention(q, k, v, block_mask=mask)
        return (out, mask.kv_num_blocks) if returned else out

    backend = agrees(model, operands(1, 2, 2, 40, 40, 8, 8))
    assert backend.operators == ["foveate.forward.default", "foveate.backward.default"]
    pairs = [n for g in backend.graphs for n in g.graph.nodes if "val" in n.meta and getattr(n.meta["val"], "shape", ())[-2:] == (40, 40)]
    assert bool(pairs) == returned


@pytest.mark.parametrize("made", ["in the model", "in the block", "as a Mask in the block"])
def test_torchtitan_1005_a_mask_function_defined_in_a_compiled_function_trains_with_checkpointing(made):
    """What TorchTitan's issue 1005 reports of torch's own. In a checkpointed block Dynamo does not follow torch's
    create_block_mask: it runs the block uncompiled."""
    from torch.utils.checkpoint import checkpoint

    def masked(ids):
        def document_causal(b, h, q_idx, kv_idx):
            return (q_idx >= kv_idx) & (ids[b, q_idx] == ids[b, kv_idx])

        if made == "as a Mask in the block":
            return Mask(document_causal)
        return create_block_mask(document_causal, 2, None, 40, 40, BLOCK_SIZE=16)

    def block(q, k, v, ids, mask):
        return flex_attention(q, k, v, block_mask=masked(ids) if mask is None else mask).relu()

    def model(q, k, v, ids):
        mask = masked(ids) if made == "in the model" else None
        return checkpoint(block, q, k, v, ids, mask, use_reentrant=False)

    inputs = [*operands(2, 2, 2, 40, 40, 8, 8), torch.tensor([[0] * 12 + [1] * 28, [0] * 30 + [1] * 10])]
    if made == "in the block":
        compiled = Backend().compile(model, fullgraph=False)
        ours, gold = (torch.autograd.grad(run(*inputs).square().sum(), inputs[:3]) for run in (compiled, model))
        for a, b in zip(ours, gold):
            torch.testing.assert_close(a, b)
        return
    backend = agrees(model, inputs)
    assert sorted(backend.operators) == ["foveate.backward.default"] + ["foveate.forward.default"] * 2


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_checkpoints_recompute_or_save_the_forward(kind):
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def policy(ctx, op, *args, **kwargs):
        saved = op is torch.ops.higher_order.flex_attention
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def block(q, k, v):
        return flex_attention(q.sin(), k.cos(), v, lambda s, b, h, i, j: s - (i - j).abs()).exp()

    def model(q, k, v):
        options = {}
        if kind == "selective":
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(block, q, k, v, use_reentrant=False, **options).sum()

    inputs = operands(1, 2, 2, 20, 20, 8, 8)
    backend = Backend()
    ours = torch.autograd.grad(backend.compile(model)(*inputs), inputs)
    gold = torch.autograd.grad(block(*inputs).sum(), inputs)
    for a, b in zip(ours, gold):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    forwards = {"full": 2, "selective": 1}[kind]
    assert sorted(backend.operators) == ["foveate.backward.default"] + ["foveate.forward.default"] * forwards


def test_autocast_casts_queries_keys_and_values_alone():
    table = torch.randn(24)
    q, k, v = operands(1, 2, 2, 24, 24, 8, 8)
    device = q.device.type

    def model(q, k, v):
        with torch.autocast(device, torch.bfloat16):
            return flex_attention(q, k, v, lambda s, b, h, i, j: s + table[j])

    backend = agrees(model, (q, k, v), tolerance=2e-2)
    assert Backend().compile(model)(q, k, v).dtype == torch.bfloat16 and len(backend.graphs) == 2


CACHED = """
import torch
from foveate import Mask, create_block_mask, flex_attention

device = torch.device(DEVICE)
masks = create_block_mask(lambda b, h, i, j: i >= j, None, None, 32, 32, device=device), Mask("kv < 9")
inputs = [torch.randn(1, 2, 32, 8, device=device, requires_grad=True) for _ in range(6)]
def model(*inputs):  # Nothing but attention: no kernel of Inductor's own, which g++ would compile.
    return [flex_attention(*inputs[at::2], block_mask=mask) for at, mask in enumerate(masks)]
outs, golds = torch.compile(model, fullgraph=True, mode=MODE)(*inputs), model(*inputs)
ours, theirs = (torch.autograd.grad(of, inputs, of) for of in (outs, golds))
for a, b in zip((*outs, *ours), (*golds, *theirs)):
    torch.testing.assert_close(a, b)
counted = torch._dynamo.utils.counters
print(dict(counted["aot_autograd"]), dict(counted["inductor"]))
"""


@needs_compiler
def test_inductors_cache_on_disk_serves_another_process_and_no_other_package(tmp_path):
    package = shutil.copytree(os.path.dirname(foveate.__file__), tmp_path / "foveate")
    device = torch.get_default_device().type
    code = CACHED.replace("MODE", "'reduce-overhead'").replace("DEVICE", repr(device))
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path)}

    def counted():
        ended = run(code, **environment)
        assert ended.returncode == 0, ended.stderr
        assert "bypass" not in ended.stdout, ended.stdout
        return [found in ended.stdout for found in ("autograd_cache_miss", "autograd_cache_hit")]

    assert counted() == [True, False]
    assert counted() == [False, True]
    with open(package / "_graph.py", "a") as upgraded:
        upgraded.write("# Another version.\n")
    assert counted() == [True, False]


def test_keys_of_batch_1_are_shared_and_gradients_that_nobody_wants_are_not_computed():
    q, k, v = operands(3, 4, 2, 20, 20, 8, 8)
    k, v = k[:1].detach().requires_grad_(), v[:1].detach()
    allowed = torch.rand(3, 20, 20) < 0.6
    mask = torch_flex.create_block_mask(lambda b, h, i, j: allowed[b, i, j], 3, None, 20, 20, torch.get_default_device(), 8)
    backend = agrees(lambda q, k, v: flex_attention(q, k, v, block_mask=mask, enable_gqa=True), (q, k, v))
    [call] = (n for g in backend.graphs for n in g.graph.nodes if str(n.target) == "foveate.backward.default")
    assert call.args[-2:] == ([True, True, False], [])


def test_without_gradients_keys_may_have_another_dtype():
    q, k, v = (t.detach() for t in operands(1, 2, 2, 20, 20, 8, 8))
    k, v = k.to(torch.bfloat16), v.to(torch.bfloat16)
    with torch.no_grad():
        backend = agrees(lambda q, k, v: flex_attention(q, k, v), (q, k, v))
    assert backend.operators == ["foveate.forward.default"]


def test_a_pass_that_was_there_runs_first_and_is_part_of_the_name_in_the_cache():
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    from foveate import _inductor

    seen = []

    class Named(CustomGraphPass):
        def __call__(self, graph):
            seen.append([str(node.target) for node in graph.nodes if node.op == "call_function"])

        def uuid(self):
            return "named"

    names = []
    for there in (None, Named(), lambda graph: None):
        with config.patch(post_grad_custom_pre_pass=there):
            _inductor.install()
            _inductor.install()
            installed = config.post_grad_custom_pre_pass
            assert installed.before is there
            names.append(installed.uuid())
            if isinstance(there, Named):
                installed(torch.fx.symbolic_trace(lambda x: torch.sin(x)).graph)
    assert names[0] != names[1] and names[1][-1] == "named" and names[2] is None
    assert len(seen) == 1


def test_the_block_masks_of_other_versions_of_torch_are_understood():
    from foveate._inductor import parts_of

    lists, tile, keys = ["num", "idx", "full", "full_idx"], [64, 32], ["q_num", "q_idx", None, None]
    of_2_11 = (100, 90, *lists, *keys, *tile, "mask")
    of_2_15 = (100, 90, *lists, *keys, "order", "order_full", "kv_order", "kv_order_spt", *tile, "mask")
    assert (len(of_2_11), len(of_2_15)) == (13, 17)
    assert parts_of(of_2_11) == parts_of(of_2_15) == (lists, 64, 32, "mask")
    assert parts_of((100, 90, "num", "idx", None, None, *keys, *tile, "mask"))[0] == ["num", "idx"]
    made = torch_flex.create_block_mask(causal, None, None, 32, 32, torch.get_default_device(), 16)
    found, tile_q, tile_kv, mask = parts_of(made.as_tuple())
    assert found[1] is made.kv_indices and (tile_q, tile_kv) == (16, 16) and mask is causal


@needs_compiler
def test_float64_breaks_a_graph_that_inductor_compiles():
    q, k, v = (t.double() for t in operands(1, 2, 2, 16, 16, 8, 8))

    def model(q):
        return flex_attention(q * 2, k, v).sin()

    torch._dynamo.reset()
    assert torch.allclose(torch.compile(model)(q), model(q), rtol=1e-13)
    assert torch._dynamo.utils.counters["graph_break"]
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="foveate runs outside of compiled regions"):
        torch.compile(model, fullgraph=True)(q)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_float64_is_part_of_the_graph_of_other_backends(backend):
    q, k, v = (t.double().requires_grad_() for t in operands(1, 2, 2, 3, 5, 2, 2))
    bias = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    block_mask = create_block_mask(causal, None, None, 3, 5)

    def model(q, k, v, bias):
        scored = lambda s, b, h, i, j: s + bias[h, j]  # noqa: E731
        out, aux = flex_attention(q, k, v, scored, block_mask, return_aux=AuxRequest(lse=True))
        return out, aux.lse

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for mine, plain in zip(compiled(q, k, v, bias), model(q, k, v, bias)):
        assert mine.dtype == plain.dtype == torch.float64 and torch.allclose(mine, plain, rtol=1e-12)
    assert torch.autograd.gradcheck(compiled, (q, k, v, bias))


def test_a_dynamic_graph_is_traced_once():
    q, k, v = operands(1, 2, 2, 40, 40, 16, 16)
    backend, traced = Backend(), []
    inner = backend._backend
    backend._backend = lambda graph, inputs: traced.append(graph) or inner(graph, inputs)
    compiled = backend.compile(lambda q, k, v: flex_attention(q * 2, k, v), dynamic=True)
    torch.testing.assert_close(compiled(q, k, v), flex_attention(q * 2, k, v))
    assert len(traced) == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_operators_pass_torchs_own_checks(dynamic):
    q, k, v = (t.detach() for t in operands(2, 4, 2, 20, 28, 8, 12))
    slope, ids = torch.randn(4), torch.randint(0, 3, (28,))
    lists = torch_flex.create_block_mask(causal, None, None, 20, 28, torch.get_default_device(), 8)
    lists = [lists.kv_num_blocks, lists.kv_indices, lists.full_kv_num_blocks, lists.full_kv_indices]
    mods = ("score + s0[h] * 0.5", [slope], [], "m1[q / 8, kv / 8] != 0 & kv <= q + mn0 & m0[q] == m0[kv]", [ids], [3], lists, [8, 8], 0.3, torch.tensor(7), 0.25)
    out, lse, _ = torch.ops.foveate.forward(q, k, v, *mods, True)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic") if dynamic else tests
    torch.library.opcheck(torch.ops.foveate.forward, (q, k, v, *mods, True), test_utils=tests)
    d_out, d_lse = torch.randn_like(out), torch.randn_like(lse)
    backward = (q, k, v, out, lse, d_out, d_lse, *mods, [True, False, True], [0])
    torch.library.opcheck(torch.ops.foveate.backward, backward, test_utils=tests)
    cu_q, cu_k = torch.tensor([0, 7, 15]), torch.tensor([0, 20, 28])
    mods = ("score + s0[h] * 0.5", [slope], [], "kv <= q + mn0", [], [3], [], [8, 8], 0.3, torch.tensor(7), 0.25)
    q, k, v = q[:1], k[:1], v[:1]
    out, lse, _ = torch.ops.foveate.varlen_forward(q, k, v, cu_q, cu_k, *mods, True)
    torch.library.opcheck(torch.ops.foveate.varlen_forward, (q, k, v, cu_q, cu_k, *mods, True), test_utils=tests)
    backward = (q, k, v, cu_q, cu_k, out, lse, d_out[:1], None, *mods, [True, False, True], [0])
    torch.library.opcheck(torch.ops.foveate.varlen_backward, backward, test_utils=tests)
    keys, values = torch.randn(5, 2, 4, 8), torch.randn(5, 2, 4, 12)
    table, lengths = torch.tensor([[4, 1, 0]]), torch.tensor([10])
    mods = (*mods[:-2], None, 0.0)
    torch.library.opcheck(torch.ops.foveate.paged, (q, keys, values, table, lengths, *mods, True), test_utils=tests)


def test_a_block_mask_made_inside_a_compiled_function_is_a_block_mask():
    torch._dynamo.reset()

    def model(q):
        mask = create_block_mask(causal, None, None, q.shape[2], q.shape[2])
        return flex_attention(q, q, q, block_mask=mask)

    q = torch.randn(1, 2, 16, 8)
    torch.testing.assert_close(torch.compile(model, backend="eager")(q), model(q))


@needs_compiler
def test_options_for_triton_do_not_break_a_graph():
    torch._dynamo.reset()
    q, k, v = operands(1, 2, 2, 24, 24, 8, 8)
    options = {"BACKEND": "TRITON", "BLOCK_M": 64}
    compiled = torch.compile(lambda: flex_attention(q, k, v, kernel_options=options), fullgraph=True)
    torch.testing.assert_close(compiled(), flex_attention(q, k, v))


def test_a_mask_of_a_partial_function_is_its_lists_in_a_compiled_function():
    def within(b, h, q_idx, kv_idx, lengths):
        return (q_idx < lengths[b]) & (kv_idx < lengths[b])

    mask_mod = functools.partial(within, lengths=torch.tensor([20, 150]))
    mask = create_block_mask(mask_mod, 2, None, 200, 200)
    backend = agrees(lambda q, k, v: flex_attention(q, k, v, block_mask=mask), operands(2, 2, 2, 200, 200, 8, 8))
    assert backend.operators == ["foveate.forward.default", "foveate.backward.default"]


def test_a_gradient_of_several_dtypes_is_torchs_error_in_a_compiled_function():
    q, k, v = operands(1, 2, 2, 24, 24, 8, 8)
    half = [t.detach().half().requires_grad_() for t in (k, v)]
    with pytest.raises(Exception, match="Backward pass with mixed query, key, and value dtype is not supported"):
        torch.compile(lambda: flex_attention(q, *half).sum(), fullgraph=True)().backward()


def test_the_tile_of_a_block_mask_may_be_symbolic():
    allowed = torch.tensor([60, 33])
    backend = Backend()
    compiled = backend.compile(lambda q, k, v, mask: flex_attention(q * 2, k, v, block_mask=mask), dynamic=True)
    for n, tile in ((70, 16), (90, 24), (100, (8, 40))):
        mask = torch_flex.create_block_mask(lambda b, h, i, j: j < allowed[b], 2, None, n, n, torch.get_default_device(), tile)
        q, k, v = operands(2, 2, 2, n, n, 8, 8)
        torch.testing.assert_close(compiled(q, k, v, mask), flex_attention(q * 2, k, v, block_mask=mask))
    assert len(backend.graphs) <= 4, len(backend.graphs)
    assert not any(name.startswith("flex_attention") for name in backend.operators), backend.operators


def test_an_operator_of_another_library_is_what_it_computes_and_not_what_it_is_called():
    library = torch.library.Library("foveate_named", "DEF")
    library.define("relu(Tensor x) -> Tensor")
    library.impl("relu", lambda x: x * 0.25 + 1, "CompositeExplicitAutograd")
    torch.library.register_fake("foveate_named::relu", torch.empty_like, lib=library)
    library.define("index(Tensor x) -> Tensor")
    for of in ("CPU", "CUDA"):
        library.impl("index", torch.exp, of)
    torch.library.register_fake("foveate_named::index", torch.empty_like, lib=library)
    own = torch.ops.foveate_named
    q, k, v = (t.detach() for t in operands(1, 2, 2, 24, 24, 8, 8))
    backend = Backend()
    compiled = backend.compile(lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: own.relu(s)))
    plain = flex_attention(q, k, v, lambda s, b, h, i, j: s * 0.25 + 1)
    torch.testing.assert_close(compiled(q, k, v), plain)
    assert backend.operators == ["foveate.forward.default"]
    backend = Backend()
    compiled = backend.compile(lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: own.index(s)))
    with pytest.warns(UserWarning, match="`foveate_named.index.default` has no decomposition"):
        torch.testing.assert_close(compiled(q, k, v), flex_attention(q, k, v, lambda s, b, h, i, j: torch.exp(s)))
    assert backend.operators == ["flex_attention"]
    library._destroy()
