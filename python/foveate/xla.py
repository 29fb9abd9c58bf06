"""``flash_attention`` with the arguments of ``torch_xla.experimental.custom_kernel``'s, on CPU and CUDA tensors.

Sharded, it is given one ``partition_spec`` for ``q``, as there, and a mesh of torch's. The entries of that spec
are read as the axes of attention: batch, heads, sequence, dim. From these the layout of every operand follows,
segment ids and bias too, in the forward and in the backward. A spec is never cut by position, which is how ids came
to be sharded along their sequence by the axis of heads (pytorch/xla#8334).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

import torch
from torch import Tensor

from . import _arguments as arguments
from ._flex import flex_attention
from ._masks import Mask
from ._trace import element_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["flash_attention"]

Entry = Any  # None, the name or the number of an axis of the mesh, or a tuple of these.


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    q_segment_ids: Tensor | None = None,
    kv_segment_ids: Tensor | None = None,
    sm_scale: float = 1.0,
    *,
    ab: Tensor | None = None,
    partition_spec: tuple[Entry, ...] | None = None,
    mesh: DeviceMesh | None = None,
) -> Tensor:
    """Attention.

    Args:
        q: ``[B, H, Sq, D]``, or with two axes of batch before ``H``.
        k, v: ``[B, Hkv, Skv, D]`` and ``[B, Hkv, Skv, Dv]``; ``Hkv`` divides ``H``.
        causal: Keys up to the query, both counted from the first.
        q_segment_ids, kv_segment_ids: ``[B, Sq]`` and ``[B, Skv]``, integers; queries see keys of their segment. Both
            or neither.
        sm_scale: Factor on scores, with ``ab`` in them. It is 1 unless it is given.
        ab: ``[B|1, H|1, Sq|1, Skv|1]``, added to ``q @ k`` before the factor, as torch_xla's kernel does; it gets its
            gradient.
        partition_spec: For each axis of ``q`` the axis of ``mesh`` that shards it, by name or number, a tuple of them
            or None. Axes of batch and heads can be sharded.
        mesh: A ``torch.distributed`` device mesh, with ``partition_spec``. Operands are then either whole on each rank
            or DTensors; one that is laid out otherwise than the spec says is an error.

    Returns:
        ``[B, H, Sq, Dv]``; with a mesh a DTensor, laid out as ``q``. A query without a key gives 0.

    Raises:
        TypeError: An argument is of another kind than it must be.
        ValueError: Shapes, ids or layouts do not fit each other; the sequence is sharded, for which keys would have to
            travel between ranks.
    """
    ids = (("q_segment_ids", q_segment_ids), ("kv_segment_ids", kv_segment_ids))
    for name, t in (("q", q), ("k", k), ("v", v), *ids, ("ab", ab)):
        if t is not None or name in ("q", "k", "v"):
            arguments.tensor(name, t)
    causal, sm_scale = arguments.flag("causal", causal), arguments.number("sm_scale", sm_scale)
    batch = q.dim() - 3
    if batch not in (1, 2) or any(t.dim() != q.dim() for t in (k, v)):
        raise ValueError(f"q, k and v must have 4 or 5 axes, got {[tuple(t.shape) for t in (q, k, v)]}")
    if (q_segment_ids is None) != (kv_segment_ids is None):
        raise ValueError("q_segment_ids and kv_segment_ids go together: one of them is None")
    operands: dict[str, tuple[Tensor, str]] = {}
    axes = "ab"[:batch]
    for name, tensor, of in (
        ("q", q, axes + "hsd"),
        ("k", k, axes + "hsd"),
        ("v", v, axes + "hsd"),
        ("q_segment_ids", q_segment_ids, axes + "s"),
        ("kv_segment_ids", kv_segment_ids, axes + "s"),
        ("ab", ab, axes + "hst"),
    ):
        if tensor is not None:
            _check(name, tensor, of, q.shape, k.shape)
            operands[name] = (tensor, of)
    if mesh is None:
        if partition_spec is not None:
            raise ValueError("partition_spec needs a mesh: torch.distributed.device_mesh.init_device_mesh makes one")
        return _local(batch, causal, sm_scale, **{name: t for name, (t, _) in operands.items()})
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh of torch.distributed, got {arguments.shown(mesh)}")
    if partition_spec is None:
        raise ValueError("a mesh needs a partition_spec")
    if not isinstance(partition_spec, (tuple, list)):
        raise TypeError(f"partition_spec must be a tuple, got {arguments.shown(partition_spec)}")
    by_axis = _by_axis(partition_spec, axes, mesh, {"a": q.size(0), "b": q.size(batch - 1), "h": k.size(batch)})
    from torch.distributed.tensor import DTensor

    parts = {name: _shard(name, t, of, by_axis, mesh) for name, (t, of) in operands.items()}
    out = _local(batch, causal, sm_scale, **parts)
    shape = torch.Size((*q.shape[:-1], v.size(-1)))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        out.contiguous(),
        mesh,
        _placements(axes + "hsd", shape, by_axis, mesh),
        run_check=False,
        shape=shape,
        stride=stride,
    )


def _check(name: str, tensor: Tensor, axes: str, q_shape: torch.Size, k_shape: torch.Size) -> None:
    """Raises where an operand does not fit the others."""
    batch = len(q_shape) - 3
    shape = k_shape if name in ("v", "kv_segment_ids") else q_shape
    if name.endswith("ids"):
        wanted = (*shape[:batch], shape[-2])
        if tensor.is_floating_point() or tensor.is_complex():
            raise ValueError(f"{name} must be integers, got {tensor.dtype}: ids in floats merge when they are rounded")
        if tuple(tensor.shape) != wanted:
            raise ValueError(f"{name} must be {list(wanted)}, got {list(tensor.shape)}")
    elif name == "ab":
        wanted = (*q_shape[:-1], k_shape[-2])
        if tensor.dim() != len(wanted) or any(a not in (1, b) for a, b in zip(tensor.shape, wanted)):
            raise ValueError(f"ab must be {list(wanted)}, or 1 where it is the same for all, got {list(tensor.shape)}")
    elif name != "q" and tensor.shape[:batch] != q_shape[:batch]:
        raise ValueError(f"{name} has batch {list(tensor.shape[:batch])}, and q {list(q_shape[:batch])}")


def _local(batch: int, causal: bool, scale: float, q: Tensor, k: Tensor, v: Tensor, **more: Tensor) -> Tensor:
    """Attention of tensors that lie on this rank."""
    whole = q.shape[:batch]
    q, k, v = (t.flatten(0, batch - 1) for t in (q, k, v))
    mask = Mask.causal() if causal else None
    if "q_segment_ids" in more:
        ids = (more["q_segment_ids"].flatten(0, batch - 1), more["kv_segment_ids"].flatten(0, batch - 1))
        same = Mask.document(*ids)
        mask = same if mask is None else mask & same
    score = None
    if "ab" in more:
        bias = more["ab"]
        if batch == 2 and 1 in bias.shape[:2]:
            bias = bias.expand(*whole, *bias.shape[2:])
        score = _added(bias.flatten(0, batch - 1), scale)
    out = flex_attention(q, k, v, score, mask, scale, enable_gqa=True)
    return out.unflatten(0, whole) if batch == 2 else out


def _added(bias: Tensor, scale: float) -> Callable[..., Any]:
    at = element_of(bias)
    return lambda score, *point: score + at(*point) * scale


def _by_axis(spec: tuple[Entry, ...], axes: str, mesh: DeviceMesh, extents: dict[str, int]) -> dict[str, list[int]]:
    """The mesh's axes that shard each axis of attention."""
    if len(spec) != len(axes) + 3:
        raise ValueError(f"partition_spec must have an entry for each of q's {len(axes) + 3} axes, got {spec}")
    found: dict[str, list[int]] = {}
    used: set[int] = set()
    for axis, entry in zip(axes + "hsd", spec):
        given = () if entry is None else entry if isinstance(entry, (tuple, list)) else (entry,)
        numbers = [_mesh_axis(name, mesh) for name in given if name is not None]
        for number in numbers:
            if number in used:
                raise ValueError(f"partition_spec {spec} names axis {number} of the mesh twice")
            used.add(number)
        if numbers and axis == "s":
            raise ValueError(
                f"partition_spec {spec} shards the sequence: each rank would see its own keys only, and no plan says "
                "how keys travel; shard batch or heads"
            )
        if numbers and axis == "d":
            raise ValueError(f"partition_spec {spec} shards the size of a head, over which scores are summed")
        # One entry is on each rank.
        found[axis] = sorted(numbers) if extents.get(axis, 1) > 1 else []
    shards = 1
    for number in found["h"]:
        shards *= mesh.size(number)
    if extents["h"] % shards:
        raise ValueError(
            f"partition_spec {spec} makes {shards} shards of heads, which must divide {extents['h']} key and value "
            "heads"
        )
    return found


def _mesh_axis(name: Any, mesh: DeviceMesh) -> int:
    names = mesh.mesh_dim_names or ()
    if isinstance(name, str) and name in names:
        return names.index(name)
    if isinstance(name, int) and not isinstance(name, bool) and 0 <= name < mesh.ndim:
        return name
    raise ValueError(f"the mesh has no axis {name!r}; it has {list(names) if names else list(range(mesh.ndim))}")


def _placements(axes: str, shape: torch.Size, by_axis: dict[str, list[int]], mesh: DeviceMesh) -> list[Any]:
    """Where an operand of these axes lies: what is the same for all of a sharded axis is whole on each rank."""
    from torch.distributed.tensor import Replicate, Shard

    placed: list[Any] = [Replicate()] * mesh.ndim
    for at, axis in enumerate(axes):
        if shape[at] > 1:
            for number in by_axis.get(axis, ()):
                placed[number] = Shard(at)
    return placed


def _shard(name: str, tensor: Tensor, axes: str, by_axis: dict[str, list[int]], mesh: DeviceMesh) -> Tensor:
    """This rank's part of an operand."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    wanted = _placements(axes, tensor.shape, by_axis, mesh)
    # The gradient of what all shards read is the sum of theirs.
    shared = {number for numbers in by_axis.values() for number in numbers}
    gradient = [Partial() if p == Replicate() and number in shared else p for number, p in enumerate(wanted)]
    if not isinstance(tensor, DTensor):
        whole = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return whole.redistribute(mesh, wanted).to_local(grad_placements=gradient)
    if tensor.device_mesh != mesh:
        raise ValueError(f"{name} lies on another mesh than the one that is given")
    if list(tensor.placements) != wanted:
        raise ValueError(
            f"{name} is laid out {list(tensor.placements)}, and partition_spec means {wanted}: redistribute it"
        )
    return tensor.to_local(grad_placements=gradient)
