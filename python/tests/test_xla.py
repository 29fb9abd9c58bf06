"""``foveate.xla.flash_attention`` beside dense attention in float64, on one rank and on four."""

import itertools
import math
import os

import pytest
import torch
from processes import run_ranks
from reference import close

from foveate.xla import flash_attention

G = torch.Generator().manual_seed(21)


def operands(*, lead=(4,), heads=(4, 4), lengths=(29, 29), ab=None, ids=True, seed=5):
    g = torch.Generator().manual_seed(seed)
    (sq, skv), (h, hkv) = lengths, heads
    made = dict(
        q=torch.randn(*lead, h, sq, 8, generator=g),
        k=torch.randn(*lead, hkv, skv, 8, generator=g),
        v=torch.randn(*lead, hkv, skv, 6, generator=g),
    )
    if ab is not None:
        made["ab"] = torch.randn(ab, generator=g)
    made = {name: t.requires_grad_() for name, t in made.items()}
    if ids:
        # One segment of the queries is of no key.
        made["q_segment_ids"] = torch.randint(0, 4, (*lead, sq), generator=g).sort(-1).values
        made["kv_segment_ids"] = torch.randint(0, 3, (*lead, skv), generator=g).sort(-1).values
    return made


def gold(q, k, v, causal=False, sm_scale=1.0, ab=None, q_segment_ids=None, kv_segment_ids=None):
    k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scores = q.double() @ k.double().transpose(-2, -1)
    scores = (scores if ab is None else scores + ab.double()) * sm_scale
    keep = torch.ones(scores.shape[-2:], dtype=torch.bool)
    keep = keep.tril() if causal else keep
    if q_segment_ids is not None:
        keep = keep & (q_segment_ids[..., None] == kv_segment_ids[..., None, :])[..., None, :, :]
    scores = scores.masked_fill(~keep, -math.inf)
    dead = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(dead, 0).softmax(-1).masked_fill(dead, 0) @ v.double()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sm_scale", [1.0, 0.35])
@pytest.mark.parametrize("shape", [
    dict(),
    dict(ids=False, ab=(4, 4, 29, 29)),
    dict(lengths=(29, 41), ab=(1, 4, 29, 41), heads=(4, 2)),
    dict(lead=(2, 2), ab=(2, 2, 4, 29, 29)),
    dict(lead=(2, 3), ab=(1, 3, 1, 1, 29)),
    dict(lengths=(5, 513), ids=False),
])
def test_results_and_gradients_are_those_of_the_definition(shape, sm_scale, causal):
    given = operands(**shape)
    out = flash_attention(**given, causal=causal, sm_scale=sm_scale)
    golden = gold(**given, causal=causal, sm_scale=sm_scale)
    terms = 8 * given["k"].shape[-2]
    close("out", out, golden, torch.float32, terms)
    learned = [t for t in given.values() if t.requires_grad]
    weights = torch.randn(out.shape, generator=G)
    pairs = (torch.autograd.grad((x * weights).sum(), learned) for x in (out, golden))
    for name, one, two in zip(given, *pairs):
        close(name, one, two, torch.float32, terms * 29)


def test_the_arguments_stand_where_torch_xlas_stand():
    given = operands(ab=(4, 4, 29, 29))
    q, k, v, ab, ids, kv_ids = given.values()
    ours = flash_attention(q, k, v, True, ids, kv_ids, 0.5, ab=ab, partition_spec=None, mesh=None)
    assert torch.equal(ours, flash_attention(**given, causal=True, sm_scale=0.5))


# What four ranks run: operands, the mesh, the spec, and whether operands are DTensors.
SHARDED = [
    ({}, ((4,), ("data",)), ("data", None, None, None), False),
    ({}, ((4,), ("data",)), (0, None, None, None), True),
    (dict(ab=(4, 4, 29, 29)), ((2, 2), ("data", "model")), ("data", "model", None, None), False),
    (dict(ab=(1, 4, 29, 29), heads=(4, 2)), ((2, 2), ("data", "model")), ("data", "model", None, None), True),
    (dict(ab=(1, 1, 1, 29)), ((2, 2), ("data", "model")), (("data", "model"), None, None, None), False),
    (dict(lead=(3,), ab=(3, 1, 29, 29)), ((4,), ("data",)), ("data", None, None, None), False),
    (dict(lead=(1,), ab=(1, 4, 29, 29)), ((2, 2), ("data", "model")), ("data", "model", None, None), False),
    (
        dict(lead=(2, 2), lengths=(29, 41), ab=(2, 1, 4, 29, 41)),
        ((2, 2), ("fsdp", "dp")),
        ("fsdp", "dp", None, None, None),
        False,
    ),
    (dict(ab=(4, 4, 29, 29)), ((2, 2), ("data", "other")), ("data", None, None, None), False),
]


def ranks(rank, folder):
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    torch.set_num_threads(1)
    for (shape, (sizes, names), spec, distributed), causal in itertools.product(SHARDED, (False, True)):
        mesh = dist.device_mesh.init_device_mesh("cpu", sizes, mesh_dim_names=names)
        given = operands(**shape)
        whole = flash_attention(**given, causal=causal, sm_scale=0.4)
        weights = torch.randn(whole.shape, generator=torch.Generator().manual_seed(2))
        learned = {name: t for name, t in given.items() if t.requires_grad}
        golden = torch.autograd.grad((whole * weights).sum(), list(learned.values()))
        if distributed:
            for name, t in list(given.items()):
                by = spec if len(spec) == t.dim() else (spec[0], None)
                places = [Replicate()] * mesh.ndim
                for axis, entry in enumerate(by):
                    if entry is not None and t.shape[axis] > 1:
                        places[entry if isinstance(entry, int) else names.index(entry)] = Shard(axis)
                given[name] = distribute_tensor(t.detach(), mesh, places).requires_grad_(t.requires_grad)
            learned = {name: given[name] for name in learned}
        out = flash_attention(**given, causal=causal, sm_scale=0.4, partition_spec=spec, mesh=mesh)
        what = f"{shape} {spec}"
        assert isinstance(out, DTensor) and out.shape == whole.shape, what
        assert (out.to_local().numel() < whole.numel()) or shape.get("lead") == (1,), what
        torch.testing.assert_close(out.full_tensor(), whole, atol=1e-6, rtol=1e-5, msg=lambda m: f"{what}: {m}")
        spread = distribute_tensor(weights, mesh, out.placements)
        (out * spread).sum().full_tensor().backward()
        for (name, t), two in zip(learned.items(), golden):
            one = t.grad.full_tensor() if isinstance(t.grad, DTensor) else t.grad
            torch.testing.assert_close(one, two, atol=2e-5, rtol=1e-5, msg=lambda m: f"{what}, {name}: {m}")
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    given = operands(ids=False)
    for spec, words in (
        (("data", None, "model", None), "sequence"),
        (("data", None, None, "model"), "size of a head"),
        (("data", "data", None, None), "twice"),
        (("data", None, None), "each of q's 4 axes"),
        (("rows", None, None, None), "no axis 'rows'"),
        (None, "needs a partition_spec"),
    ):
        with pytest.raises(ValueError, match=words):
            flash_attention(**given, partition_spec=spec, mesh=mesh)
    with pytest.raises(ValueError, match="3 key and value heads"):
        flash_attention(**operands(heads=(3, 3)), partition_spec=("data", "model", None, None), mesh=mesh)
    laid = given | dict(k=distribute_tensor(given["k"].detach(), mesh, [Shard(0), Replicate()]))
    with pytest.raises(ValueError, match="k is laid out .* redistribute"):
        flash_attention(**laid, partition_spec=("data", "model", None, None), mesh=mesh)
    for more, words in (
        (dict(partition_spec="data", mesh=mesh), "partition_spec must be a tuple, got 'data'"),
        (dict(partition_spec=("data", None, None, None), mesh="cpu"), "mesh must be a DeviceMesh .*, got 'cpu'"),
    ):
        with pytest.raises(TypeError, match=words):
            flash_attention(**given, **more)
    dist.destroy_process_group()


def test_xla_8334_segment_ids_under_sharding_on_four_ranks_equal_one(tmp_path):
    """pytorch/xla#8334: ids stayed whole, or were sharded along the sequence by the axis of heads."""
    run_ranks(ranks, str(tmp_path))


@pytest.mark.parametrize("change, words", [
    (dict(kv_segment_ids=None), "go together"),
    (dict(q_segment_ids=torch.zeros(4, 29)), "integers"),
    (dict(q_segment_ids=torch.zeros(4, 28, dtype=torch.int32)), "must be"),
    (dict(ab=torch.zeros(4, 2, 29, 29)), "ab must be"),
    (dict(q=torch.zeros(4, 29, 8)), "4 or 5 axes"),
    (dict(k=torch.zeros(2, 4, 29, 8)), "batch"),
    (dict(partition_spec=(0, None, None, None)), "needs a mesh"),
])
def test_wrong_input_is_one_clear_error(change, words):
    with pytest.raises(ValueError, match=words) as raised:
        flash_attention(**(operands() | change))
    assert "\n" not in str(raised.value)
