"""Calls that torch's dispatcher has to see: of tensors that have others' elements, and while a mode of dispatch looks
on, or ``torch.jit.trace``.

They are the operators of :mod:`foveate._ops`, so that fake tensors, subclasses, counters of operations and policies of
checkpointing take them like any operator of torch's. Captured numbers are constants of their programs. Masks and
scores are traced as ever; what they capture goes to the operator.
"""

from __future__ import annotations

import math
import sys
from typing import Any, Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from . import _blocks, _checks, _trace
from ._arguments import dispatches

_looking_on = torch._C._len_torch_dispatch_stack
_jit_trace = torch._C._get_tracing_state
_transforms_active = torch._C._are_functorch_transforms_active


def is_watched() -> bool:
    """Whether a mode, or ``torch.jit.trace``, sees the operators that are called."""
    return (bool(_looking_on()) and not _transforms_active()) or _jit_trace() is not None


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None,
    mask: Any,
    extents: tuple[int, int, int, int],
    scale: float | None,
    sink: Tensor | None,
    dropout: tuple[float, Tensor] | None,
    wants_max: bool,
    layout: str = "",
    where: tuple[Tensor, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """``out``, ``lse`` and ``max_scores`` of an operator; ``layout`` is that of its name, whose tensors are ``where``.
    A sink joins its results by their ``lse``, and is no score."""
    _count()
    made = None if score_mod is None else _trace.score(score_mod, extents, constants=True)
    score, score_captures = (None, []) if made is None else _said(made)
    text, mask_captures, lists, tile = _masked(mask, extents, query.device)
    p, seed = dropout or (0.0, None)
    number = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    out, lse, max_scores = _Attention.apply(  # type: ignore[no-untyped-call]
        _operators(layout), (score, text, tile, number, p), wants_max, (len(where), len(mask_captures), len(lists)),
        query, key, value, seed, *where, *mask_captures, *lists, *score_captures,
    )
    if sink is not None:
        out, lse = _checks.joined(out, lse, sink)
    return out, lse, max_scores


def _masked(
    mask: Any, extents: tuple[int, int, int, int], device: torch.device
) -> tuple[Any, list[Any], list[Tensor], list[int]]:
    """The text of a mask, what it captures, the lists that count beside it, and their tile."""
    if mask is None:
        return None, [], [], [1, 1]
    if not isinstance(mask, BlockMask):
        return *_said(_trace.mask(mask, extents, constants=True)), [], [1, 1]
    _blocks.check(mask, extents, device)
    if _blocks.is_own(mask):
        return *_said(_trace.mask(mask.mask_mod, extents, constants=True)), [], [1, 1]
    lists = [t for t in _blocks.lists_of(mask) if t is not None]
    # Of the table that the operator makes of them the program needs to know the axes.
    kinds = torch.empty_strided((*lists[0].shape[:2], 1, 1), (0,) * 4, dtype=torch.uint8)
    wrap = _blocks.within(kinds, mask.BLOCK_SIZE)
    text, captures = _said(_trace.mask(mask.mask_mod, extents, wrap, constants=True))
    return text, captures[:-1], lists, list(mask.BLOCK_SIZE)


def _said(traced: Any) -> tuple[str | None, list[Tensor]]:
    """The text of a program, and captured tensors by the numbers in their names; what it does not read is in no place
    of its own."""
    text: str = traced.text()
    named = {int(capture.name[1:]): capture.tensor for capture in traced.captures}
    captures = [named.get(at, next(iter(named.values()))) for at in range(max(named, default=-1) + 1)]
    return None if text in ("score", "true") else text, captures


def _operators(layout: str) -> tuple[Any, Any]:
    ours = torch.ops.foveate
    if layout == "paged":
        return ours.paged.default, None
    return getattr(ours, f"{layout}forward").default, getattr(ours, f"{layout}backward").default


class _Attention(torch.autograd.Function):
    """An operator and its gradient."""

    @staticmethod
    def forward(ctx: Any, operators: Any, said: Any, wants_max: bool, counts: Any, *tensors: Any) -> Any:
        ctx.of = operators[1], said, counts
        ctx.set_materialize_grads(False)
        operands, mods, _ = _arguments(said, counts, tensors)
        out, lse, max_scores = operators[0](*operands, *mods, wants_max)
        ctx.mark_non_differentiable(max_scores)
        ctx.save_for_backward(out, lse, *tensors)
        return out, lse, max_scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, _: Any) -> Any:
        operator, said, counts = ctx.of
        if operator is None:
            _checks.no_gradient_of_pages()
        _checks.refuse_batches(d_out, d_lse)
        out, lse, *tensors = ctx.saved_tensors
        operands, mods, first = _arguments(said, counts, tensors)
        wanted = ctx.needs_input_grad[4:]
        learned = [at for at, want in enumerate(wanted[first:]) if want]
        found = operator(*operands, out, lse, d_out, d_lse, *mods, list(wanted[:3]), learned)
        gradients: list[Any] = [None] * len(tensors)
        for at in range(3):
            gradients[at] = found[at] if wanted[at] else None
        for at, d in zip(learned, found[3]):
            gradients[first + at] = d
        return (None, None, None, None, *gradients)


def _arguments(said: Any, counts: Sequence[int], tensors: Sequence[Any]) -> tuple[list[Any], list[Any], int]:
    """Of an operator the operands, with where they lie, the mods, and the place of the first tensor of a score."""
    score, mask, tile, scale, p = said
    parts, at = [], 4
    for n in counts:
        parts.append(list(tensors[at : at + n]))
        at += n
    where, mask_captures, lists = parts
    mods = [score, list(tensors[at:]), [], mask, mask_captures, [], lists, tile, scale, tensors[3], p]
    return [*tensors[:3], *where], mods, at


def _count() -> None:
    """Tells torch's counter of operations what the operators do, once it is there; importing it takes longer than the
    package."""
    counter: Any = sys.modules.get("torch.utils.flop_counter")
    if counter is None:
        return
    for packet, formula in _operations().items():
        counter.flop_registry.setdefault(packet, formula)
        for mode in _get_current_dispatch_mode_stack():
            counting = getattr(mode, "counter", None)
            if isinstance(counting, counter.FlopCounterMode):
                counting.flop_registry.setdefault(packet, formula)


def _operations() -> dict[Any, Callable[..., int]]:
    """The multiplications and additions of each operator without its mask, as torch counts its own attention's."""

    def of(pairs: Callable[..., int], q: int, v: int) -> Callable[..., int]:
        """``q`` and ``v`` products of each pair, of the size of keys and of that of values."""

        def count(query: Tensor, key: Tensor, value: Tensor, *more: Any, **_: Any) -> int:
            return 2 * query.size(1) * pairs(query, key, *more) * (q * query.size(3) + v * value.size(3))

        return count

    def dense(query: Tensor, key: Tensor, *_: Any) -> int:
        return query.size(0) * query.size(2) * key.size(2)

    def in_rows(query: Tensor, key: Tensor, cu_q: Tensor, cu_k: Tensor, *_: Any) -> int:
        n = max(cu_q.size(0) - 1, 1)
        if dispatches(cu_q, cu_k):  # Of lengths that nobody knows, as of equal ones.
            return query.size(2) * key.size(2) // n
        return int((cu_q.diff() * cu_k.diff()).sum())

    def in_pages(query: Tensor, pages: Tensor, table: Tensor, lengths: Tensor, *_: Any) -> int:
        if dispatches(lengths):
            return query.size(0) * query.size(2) * table.size(1) * pages.size(2)
        return query.size(2) * int(lengths.sum())

    ours = torch.ops.foveate
    return {
        ours.forward: of(dense, 1, 1), ours.backward: of(dense, 3, 2), ours.paged: of(in_pages, 1, 1),
        ours.varlen_forward: of(in_rows, 1, 1), ours.varlen_backward: of(in_rows, 3, 2),
    }
