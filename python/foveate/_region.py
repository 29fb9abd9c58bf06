"""Calls inside ``torch.compile``: torch's own flex operator, marked for :mod:`foveate._inductor` to replace.

Dynamo traces this module, not Foveate's tracer: it makes FX graphs of the mods, and lifts what they capture. Defaults
that are floats would be symbolic in a dynamic graph, and PyTorch would trace it twice to be rid of them: they are
integers.
"""

from __future__ import annotations

import math
import sys
from typing import Any, Callable

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as _torch_flex
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from . import _blocks, _checks, _trace
from ._compile import LAYOUT, OURS, register
from ._higher_order import ATTENTION, CHANGED, OUTSIDE
from ._masks import Mask

#: What a float holds at most.
_LARGEST = sys.float_info.max


def _install() -> None:
    from . import _inductor

    _inductor.install()


def _by_inductor() -> bool:
    """Whether Inductor compiles the region that Dynamo traces."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        backend: Any = InstructionTranslator.current_tx().output.compiler_fn
    except CHANGED:
        return True  # In another version of Dynamo, which does not say. What Inductor lacks runs outside then.
    while backend is not None:
        if "inductor" in (getattr(backend, "compiler_name", None), getattr(backend, "_compiler_name", None)):
            return True
        backend = getattr(backend, "_torchdynamo_orig_backend", getattr(backend, "__wrapped__", None))
    return False


def _transformed() -> bool:
    """Whether a transform of ``torch.func`` is active, which torch's operator has no rule for."""
    return torch._C._are_functorch_transforms_active()


def _is_outside(
    tensors: tuple[Any, ...],
    wanted: tuple[Any, ...],
    functions: tuple[Any, ...],
    numbers: tuple[Any, ...],
    flags: tuple[Any, ...],
    return_aux: Any,
) -> bool:
    """Whether a call runs outside of the region: where a transform of ``torch.func`` is active, and where an argument
    is of a kind that no call takes, which is said there by its name. ``tensors`` must be there, and of the others what
    is None is not given."""
    return _transformed() or not (
        all(isinstance(t, Tensor) for t in tensors)
        and all(t is None or isinstance(t, Tensor) for t in wanted)
        and all(f is None or callable(f) for f in functions)
        and all(n is None or isinstance(n, (int, float)) for n in numbers)
        and all(f is True or f is False for f in flags)
        and (return_aux is None or isinstance(return_aux, AuxRequest))
    )


def _run_outside(known: bool, breaking: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """``breaking``, where the graph breaks; ``known`` is whether Dynamo knows the operator that says its errors."""
    return OUTSIDE(breaking, *given, **named) if known else breaking(*given, **named)


def _one_tile(query: Tensor) -> tuple[Any, ...]:
    """The parts of torch's block mask of one tile for all. The tile, seen from the keys, is itself: torch's
    transposition by ``vmap`` takes Dynamo two thirds of a call's trace, and would run in each call, for forward graphs
    keep what a backward might read."""
    count = torch.ones((1, 1, 1), dtype=torch.int32, device=query.device)
    index = torch.zeros((1, 1, 1, 1), dtype=torch.int32, device=query.device)
    tile = BlockMask.from_kv_blocks(count, index, BLOCK_SIZE=1 << 30, seq_lengths=(1, 1), compute_q_blocks=False)
    parts = tuple(tile.as_tuple())
    return (*parts[:6], *parts[2:4], *parts[8:])


# Dynamo calls them when it traces, and leaves nothing of them in the graph.
_install._dynamo_marked_constant = True  # type: ignore[attr-defined]
_by_inductor._dynamo_marked_constant = True  # type: ignore[attr-defined]
_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def flex_attention(
    breaking: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0,
) -> Any:
    """:func:`foveate.flex_attention` in a compiled region; ``breaking`` is what it is outside, behind a graph break.

    Arguments of a wrong kind, which are errors there, break the graph, and so does float64, which Inductor has no
    operator for; other backends run torch's, of plain operations. A sink joins the operator's results by their ``lse``.
    """
    known = register()
    given = (query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options)

    def outside() -> Any:
        return _run_outside(known, breaking, *given, return_aux=return_aux, sink=sink, dropout_p=dropout_p)

    is_outside = (
        not known
        or _is_outside(
            (query, key, value), (sink,), (score_mod,), (scale, dropout_p), (enable_gqa, return_lse), return_aux
        )
        or not (block_mask is None or isinstance(block_mask, (BlockMask, Mask)))
        or not (kernel_options is None or isinstance(kernel_options, dict))
    )
    more = not is_outside and (sink is not None or dropout_p or isinstance(block_mask, Mask))
    if isinstance(score_mod, (BlockMask, Mask)):
        raise TypeError(f"{_trace.NO_SCORE}, got a {type(score_mod).__name__}: it is a block_mask")
    if is_outside or (query.dtype == torch.float64 and (more or _by_inductor())):
        return outside()
    own = block_mask if isinstance(block_mask, BlockMask) else None
    _checks.check_operands(query, key, value, own, enable_gqa)
    if return_lse and return_aux is not None:
        _checks.check_return_lse(return_aux)
    if kernel_options:
        _checks.check_options(kernel_options)
    options: dict[str, Any] = (
        {} if kernel_options is None else {n: v for n, v in kernel_options.items() if n != "foveate"}
    )
    parts = None
    if own is not None:
        _blocks.check(own, (query.size(0), query.size(1), query.size(2), key.size(2)), query.device)
        if _blocks.is_function(own):
            block_mask = own.mask_mod
        else:
            parts = tuple(own.as_tuple())
            if parts[7] is None:
                # The operator wants lists of the queries' side for its gradient. Foveate's does not read them.
                parts = (*parts[:6], *parts[2:4], *parts[8:])
    wants_lse = return_lse or (return_aux is not None and return_aux.lse)
    wants_max = return_aux is not None and return_aux.max_scores
    results = _attention(
        query, key, value, score_mod, block_mask, parts, scale, options, wants_lse, wants_max, sink, dropout_p
    )
    if results is None:
        return outside()
    out, lse, max_scores = results
    if return_aux is not None:
        return out, AuxOutput(lse=lse if wants_lse else None, max_scores=max_scores if wants_max else None)
    return (out, lse) if return_lse else out


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any,
    mask: Any,
    parts: tuple[Any, ...] | None,
    scale: float | None,
    options: dict[str, Any],
    wants_lse: bool,
    wants_max: bool,
    sink: Tensor | None,
    dropout_p: float,
    layout: tuple[str, list[Tensor]] | None = None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """``out``, ``lse`` and ``max_scores`` of the operator, of a mask function or of the parts of a block mask; None
    where a mod is none for a graph. Arguments that the operator has no place for travel in the graph of its mask."""
    _install()
    if _checks.autocasts(query):
        # Torch's operator does so itself from 2.11 on.
        query, key, value = _checks.autocast(query, key, value)
    if scale is not None and not abs(scale) <= _LARGEST:
        if isinstance(scale, int):
            raise ValueError("scale must be a number that a float holds, got an int")
        raise ValueError(f"scale must be a finite number, got {scale}")
    options[OURS] = True
    options["OUTPUT_LOGSUMEXP"] = wants_lse or sink is not None
    options["OUTPUT_MAX"] = wants_max
    carried = []
    if layout is not None:
        options[LAYOUT] = layout[0]
        carried.append((*layout, 0.0))
    if dropout_p:
        if not 0.0 <= dropout_p < 1.0:
            raise ValueError(f"dropout_p must be at least 0 and below 1, got {dropout_p}")
        carried.append(("dropout_p", [torch.randint(2**63 - 1, (), device=query.device)], dropout_p))
    if isinstance(mask, Mask) and layout is None:
        mask._check((query.size(0), query.size(1), query.size(2), key.size(2)))
    if parts is None:
        parts = _one_tile(query)
        if mask is None:
            mask = parts[-1]
        else:
            parts = (*parts[:-1], lambda b, h, q_idx, kv_idx: mask(b, h, q_idx, kv_idx))
    else:
        mask = parts[-1]
    if carried:
        allowed = parts[-1]

        def carrying(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            result: Tensor = allowed(b, h, q_idx, kv_idx)
            for name, values, number in carried:
                result = torch.ops.foveate.argument(result, name, values, number)
            return result

        parts = (*parts[:-1], carrying)
    # As torch does it: number of heads and their dims are constants of the graph.
    for tensor in (query, key, value):
        torch._dynamo.mark_static(tensor, -3)
        torch._dynamo.mark_static(tensor, -1)
    if scale is None:
        scale = 1.0 / math.sqrt(query.size(-1))
    if score_mod is None:
        score_mod = _torch_flex._identity
    results = ATTENTION(query, key, value, score_mod, parts, scale, options, mask)
    if results is None:
        return None
    out, lse, max_scores = results
    ln2 = math.log(2.0)
    lse, max_scores = lse * ln2, max_scores * ln2
    if sink is not None:
        out, lse = _checks.joined(out, lse, _checks.sink_of(sink, query))
    return out, lse, max_scores


def varlen(
    breaking: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    score_mod: Any = None,
    mask: Any = None,
    scale: float | None = None,
    *,
    return_aux: AuxRequest | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0,
) -> Any:
    """:func:`foveate.varlen` in a compiled region. Nested tensors break the graph."""
    known = register()
    given = (query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, score_mod, mask, scale)

    def outside() -> Any:
        return _run_outside(known, breaking, *given, return_aux=return_aux, sink=sink, dropout_p=dropout_p)

    aux = AuxRequest() if return_aux is None else return_aux
    offsets, longest = (cu_seqlens_q, cu_seqlens_k, sink), (max_seqlen_q, max_seqlen_k)
    numbers = (*longest, scale, dropout_p)
    is_outside = not known or _is_outside((query, key, value), offsets, (score_mod, mask), numbers, (), return_aux)
    if is_outside or query.is_nested or cu_seqlens_q is None:
        return outside()
    q, k, v = map(_checks.heads_first, _checks.rows(query, key, value))
    layout = ("varlen", [cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k])
    results = _attention(
        q, k, v, score_mod, mask, None, scale, {}, aux.lse, aux.max_scores, sink, dropout_p, layout
    )
    if results is None:
        return outside()
    out, lse, max_scores = results
    if sink is not None:
        lse = _checks.of_sequences(lse, cu_seqlens_q)
    out = out.squeeze(0).transpose(0, 1)
    if return_aux is None:
        return out
    return out, AuxOutput(lse=lse[0] if aux.lse else None, max_scores=max_scores[0] if aux.max_scores else None)


def paged(
    breaking: Callable[..., Any],
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    score_mod: Any = None,
    mask: Any = None,
    scale: float | None = None,
    *,
    return_aux: AuxRequest | None = None,
    sink: Tensor | None = None,
) -> Any:
    """:func:`foveate.paged` in a compiled region. What wants a gradient breaks the graph, for there is none."""
    known = register()
    given = (query, key_pages, value_pages, page_table, lengths, score_mod, mask, scale)

    def outside() -> Any:
        return _run_outside(known, breaking, *given, return_aux=return_aux, sink=sink)

    aux = AuxRequest() if return_aux is None else return_aux
    tensors = (query, key_pages, value_pages, page_table, lengths)
    is_outside = not known or _is_outside(tensors, (sink,), (score_mod, mask), (scale,), (), return_aux)
    wanted = not is_outside and (query.requires_grad or key_pages.requires_grad or value_pages.requires_grad)
    if is_outside or (torch.is_grad_enabled() and wanted):
        return outside()
    _checks.check_pages(query, key_pages, value_pages)
    layout = ("paged", [page_table, lengths])
    results = _attention(
        query, key_pages, value_pages, score_mod, mask, None, scale, {}, aux.lse, aux.max_scores, sink, 0.0, layout
    )
    if results is None:
        return outside()
    out, lse, max_scores = results
    if return_aux is None:
        return out
    return out, AuxOutput(lse=lse if aux.lse else None, max_scores=max_scores if aux.max_scores else None)
