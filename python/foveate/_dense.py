"""Attention of float64 tensors by plain torch operations: slow, holding all scores, differentiable twice.

It is for ``torch.autograd.gradcheck`` and for comparisons. Functions are called once, on points that are
broadcast against each other; captured tensors are read as when they are traced.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Callable

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as _torch_flex
from torch.nn.attention.flex_attention import BlockMask
from torch.overrides import TorchFunctionMode

from . import _blocks, _calls, _source
from ._arguments import warn
from ._native import TraceError
from ._masks import Mask

_LARGE = 256 << 20


class _Point(torch.Tensor):
    """Indices or scores at all points, of four axes or broadcast to these."""


class _Reader(_calls.Reader):
    value = _Point

    def operand(self, name: str, x: Any) -> Any:
        if isinstance(x, Tensor) and not isinstance(x, _Point):
            if x.dim() != 0:
                raise TraceError(f"`{name}` is given a captured tensor of shape {tuple(x.shape)}; index it first")
            return x.as_subclass(_Point)
        return x

    def element(self, tensor: Tensor, index: list[Any]) -> Tensor:
        # Indexing reads a 0-d tensor on the host, which would wait for a device, and one of an axis where it lies.
        at = (i.as_subclass(Tensor).long() if isinstance(i, _Point) else i for i in index)
        return tensor[tuple(i.reshape(1) if isinstance(i, Tensor) and i.dim() == 0 else i for i in at)].as_subclass(
            _Point
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and any(map(_has_point, args)):
            return self.read(*args)
        name = getattr(func, "__name__", "")
        if name in ("embedding", "gather", "take") and any(map(_has_point, args)):
            return _calls.READING[name](self, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _Indexing(TorchFunctionMode):
    """Reads at indices that vmap has hidden, which ``t[i]`` takes for numbers where they have no axis left."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__getitem__:
            return func(*args, **(kwargs or {}))
        of, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
        if not any(isinstance(i, Tensor) for i in index):
            return func(*args)
        at = next((n for n, i in enumerate(index) if i is Ellipsis), len(index))
        index = index[:at] + (slice(None),) * (of.dim() - len(index) + (at < len(index))) + index[at + 1 :]
        if any(isinstance(i, slice) and i != slice(None) for i in index):
            raise TraceError("a slice beside a traced index must be `:`")
        number = functools.partial(torch.tensor, device=of.device)
        return torch.ops.aten.index(
            of, [None if isinstance(i, slice) else i if isinstance(i, Tensor) else number(i) for i in index]
        )


def _has_point(x: Any) -> bool:
    return isinstance(x, (_Point, _calls.Rows)) or (isinstance(x, (tuple, list)) and any(map(_has_point, x)))


def _at_all_points(
    function: Callable[..., Any], extents: tuple[int, ...], device: torch.device, *scores: Tensor
) -> Tensor:
    indices = [torch.arange(n, device=device) for n in extents]
    axes = (t.reshape([-1 if at == axis else 1 for at in range(4)]) for axis, t in enumerate(indices))
    try:
        with _Reader():
            result = function(*(t.as_subclass(_Point) for t in (*scores, *axes)))
    except TypeError as error:
        wrong = _source.miscalled("score" if scores else "mask", function, len(scores) + 4, error)
        if wrong is None:
            raise
        raise wrong from None
    except _calls.RowError:
        if 0 in extents:
            return scores[0] if scores else torch.zeros(extents, dtype=torch.bool, device=device)
        # By torch's vmap, which holds the rows of all points.
        with _Indexing():
            result = _torch_flex._vmap_for_bhqkv(function, prefix=(0,) * len(scores))(*scores, *indices)
    if not isinstance(result, Tensor):
        name, where = _source.name_of(function), _source.defined(function)
        raise ValueError(f"`{name}` must return a tensor, got {type(result)}{where}")
    if result.dim() > 4:
        raise TraceError(f"`{_source.name_of(function)}` returns a row of a captured tensor: index all of its axes")
    return result.as_subclass(Tensor).expand(extents)


def _allowed(block_mask: BlockMask | Mask, extents: tuple[int, int, int, int], device: torch.device) -> Tensor:
    if isinstance(block_mask, Mask):
        return _blocks.dense(block_mask, extents, device)
    allowed = _at_all_points(block_mask.mask_mod, extents, device)
    if allowed.dtype != torch.bool:
        name, where = _source.name_of(block_mask.mask_mod), _source.defined(block_mask.mask_mod)
        raise ValueError(f"mask_mod `{name}` must return bools, got {allowed.dtype}{where}")
    kinds = _blocks.kinds_of(block_mask, extents, device)
    if kinds is None:
        return allowed
    kinds = kinds[: extents[0], : extents[1]]
    for axis, tile in ((2, block_mask.BLOCK_SIZE[0]), (3, block_mask.BLOCK_SIZE[1])):
        kinds = kinds.repeat_interleave(min(tile, extents[axis]), axis).narrow(axis, 0, extents[axis])
    return (kinds == 2) | ((kinds == 1) & allowed)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Any] | None,
    block_mask: BlockMask | Mask | None,
    scale: float | None,
    sink: Tensor | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``out``, ``lse`` and ``max_scores``, in float64 as torch's are."""
    extents = (q.size(0), q.size(1), q.size(2), k.size(2))
    if math.prod(extents) * 8 >= _LARGE:
        warn(f"float64 attention holds all scores, {math.prod(extents) * 8 >> 20} MiB of them; float32 does not")
    group = q.size(1) // k.size(1) if k.size(1) else 1
    k, v = (t.repeat_interleave(group, 1).expand(q.size(0), -1, -1, -1) for t in (k, v))
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.size(-1)) if scale is None else scale)
    if score_mod is not None:
        scores = _at_all_points(score_mod, extents, q.device, scores).to(torch.float64)
    if block_mask is not None:
        scores = scores.masked_fill(~_allowed(block_mask, extents, q.device), -math.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.double().reshape(1, -1, 1, 1).expand(*extents[:3], 1)], -1)
    if scores.size(-1) == 0:
        empty = q.new_full(extents[:3], -math.inf)
        return (q.sum(-1, keepdim=True) * 0).expand(*extents[:3], v.size(3)), empty, empty
    dead = (scores == -math.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(dead, 0.0)
    lse = scores.logsumexp(-1).masked_fill(dead.squeeze(-1), -math.inf)
    weights = scores.softmax(-1).masked_fill(dead, 0.0)[..., : extents[3]]
    if dropout_p:
        weights = torch.nn.functional.dropout(weights, dropout_p)
    most = scores.detach()[..., : extents[3]].amax(-1) if extents[3] else lse.detach()
    return weights @ v, lse, most.masked_fill(dead.squeeze(-1), -math.inf)
