"""Attention of DTensors whose batch or heads are sharded: each rank's part by itself, functions at the whole's
indices."""

from __future__ import annotations

import sys
from typing import Any, Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, BlockMask

from . import _blocks, _trace
from ._masks import Mask


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor, without importing what these are."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def attention(
    run: Callable[..., Any],
    query: Any,
    key: Any,
    value: Any,
    score_mod: Callable[..., Any] | None,
    block_mask: BlockMask | Mask | None,
    sink: Tensor | None,
    **rest: Any,
) -> Any:
    """``run`` of this rank's part; its results as DTensors, laid out as ``query``.

    Raises:
        ValueError: Operands are not all DTensors of one layout, or another axis than batch and heads is sharded.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = query.device_mesh, query.placements
    for name, tensor in (("key", key), ("value", value)):
        if not isinstance(tensor, DTensor) or tensor.device_mesh != mesh or tensor.placements != placements:
            laid = tensor.placements if isinstance(tensor, DTensor) else "whole on each rank"
            raise ValueError(f"query is a DTensor laid out {placements} and {name} is {laid}: distribute them alike")
    if any(p != Replicate() and p not in (Shard(0), Shard(1)) for p in placements):
        raise ValueError(
            f"query is laid out {placements}; a DTensor's batch and heads can be sharded, Shard(0) and Shard(1)"
        )
    if query.dtype == torch.float64:
        raise ValueError("float64 attention takes whole tensors: gather the DTensors by .full_tensor()")
    if rest.pop("dropout_p"):
        raise ValueError("dropout_p needs whole tensors: ranks would drop the same weights of their parts")
    shards = 1
    for number, placement in enumerate(placements):
        shards *= mesh.size(number) if placement == Shard(1) else 1
    if key.size(1) % shards:
        raise ValueError(f"{key.size(1)} key and value heads are sharded in {shards} parts, which must divide them")
    _, (b0, h0, *_) = compute_local_shape_and_global_offset(query.shape, mesh, placements)
    q, k, v = (t.to_local() for t in (query, key, value))
    score = None
    if score_mod is not None:
        score = lambda s, b, h, q_idx, kv_idx: score_mod(s, b + b0, h + h0, q_idx, kv_idx)  # noqa: E731
    mask = None
    if block_mask is not None:
        mask = _Part(block_mask, (query.size(0), query.size(1), query.size(2), key.size(2)), b0, h0, q.device)
    if sink is not None:
        sink = sink[h0 : h0 + q.size(1)]
    result = run(q, k, v, score, mask, sink=sink, **rest)

    def whole(part: Tensor | None, *more: int) -> Any:
        if part is None:
            return None
        shape = torch.Size((*query.shape[:3], *more))
        stride = (
            torch.empty_strided(shape, part.stride(), device="meta").clone(memory_format=torch.preserve_format).stride()
        )
        return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)

    if not isinstance(result, tuple):
        return whole(result, value.size(3))
    out, aux = result
    if isinstance(aux, AuxOutput):
        return whole(out, value.size(3)), AuxOutput(lse=whole(aux.lse), max_scores=whole(aux.max_scores))
    return whole(out, value.size(3)), whole(aux)


class _Part(Mask):
    """A block mask of whole tensors at this rank's batch entries and heads."""

    __slots__ = ("_kinds", "_tile")

    def __init__(
        self, mask: BlockMask | Mask, extents: tuple[int, int, int, int], b0: int, h0: int, device: torch.device
    ) -> None:
        function = mask if isinstance(mask, Mask) else mask.mask_mod
        super().__init__(lambda b, h, q_idx, kv_idx: function(b + b0, h + h0, q_idx, kv_idx))
        self._kinds = None if isinstance(mask, Mask) else _blocks.kinds_of(mask, extents, device)
        self._tile: Any = None if isinstance(mask, Mask) else mask.BLOCK_SIZE
        for axis, first in ((0, b0), (1, h0)):
            if self._kinds is not None and self._kinds.size(axis) > 1:
                self._kinds = self._kinds.narrow(axis, first, self._kinds.size(axis) - first)

    def _program(self, extents: tuple[int, int, int, int]) -> Any:
        wrap = None if self._kinds is None else _blocks.within(self._kinds, self._tile)
        return _trace.mask(self, extents, wrap=wrap)
