"""``flex_attention``: the checks of torch's, a trace of its functions, and a call with its gradient."""

from __future__ import annotations

import math
from typing import Any, Literal, Union, overload

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from . import _autograd, _blocks, _checks, _dense, _dispatched, _native, _region, _sharded, _trace
from ._arguments import dispatches, flag, probability
from ._compile import also_compiled, uncompiled
from ._masks import Mask
from ._trace import ScoreMod

_Returned = Union[Tensor, "tuple[Tensor, Tensor]", "tuple[Tensor, AuxOutput]"]


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | Mask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor: ...
@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | Mask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, AuxOutput]: ...
@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | Mask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[True],
    kernel_options: dict[str, Any] | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]: ...
@also_compiled(_region.flex_attention)
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | Mask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Attention with a score function and a mask, as ``torch.nn.attention.flex_attention`` has it.

    Runs forward and backward on CPU and CUDA tensors of any strides, uncompiled, without holding scores; in a
    function that ``torch.compile`` compiles, as part of its graph. CUDA tensors are used where they lie, on the
    current stream, with memory of torch's allocator, and nothing waits for the device.

    Args:
        query: ``[B, Hq, L, E]``, float32, bfloat16 or float16; float64 takes a slow path of plain torch
            operations that is differentiable twice.
        key: ``[B, Hkv, S, E]``; a batch of 1 is shared by all of ``query``'s, with a block mask of batch B.
        value: ``[B, Hkv, S, Ev]``.
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)`` gives the new score. It is read as it is in
            each call, so it may be a closure over anything; tensors that it captures and that require grad get
            gradients.
        block_mask: Which keys each query sees: a :class:`Mask`, a block mask from :func:`create_block_mask`, or
            any ``BlockMask`` of torch's. Of a block mask that was made here the function counts as it is now; of
            another one the lists count: of its full tiles every pair, of its partial tiles those that its
            function lets through, of others none.
        scale: Factor on ``query @ key``; ``1/sqrt(E)`` when it is None.
        enable_gqa: Lets ``Hq`` be a multiple of ``Hkv``.
        return_lse: Deprecated; ``return_aux=AuxRequest(lse=True)`` is the same.
        kernel_options: Torch's options for Triton are accepted and change nothing.
        return_aux: Which of ``lse`` and ``max_scores`` to return too, ``[B, Hq, L]``, float32, or
            float64 where ``query`` is. ``lse`` is a natural logarithm and differentiable; ``max_scores`` is not.
        sink: ``[Hq]``, a logit for each query head that joins the softmax's denominator only. It is not in
            torch's function. It gets a gradient; ``lse`` includes it.
        dropout_p: Drops each weight with this probability after the softmax and scales the others by
            ``1/(1 - dropout_p)``. It is not in torch's function. The seed is drawn from torch's generator, so
            ``torch.manual_seed`` and checkpointing repeat it.

    DTensors of one layout, sharded by batch and heads, are attended part by part. Functions see the indices of the
    whole, captured tensors and the sink are whole on each rank, and their gradients are those of its part.

    Returns:
        ``out [B, Hq, L, Ev]``, of the dtype and the stride order of ``query``, its last axis contiguous; with
        ``return_aux`` the pair of it and an ``AuxOutput``; with ``return_lse`` the pair of it and ``lse``. A
        query without a key has ``out`` 0, ``lse`` ``-inf`` and gradients 0.

    Raises:
        ValueError: Shapes, head counts, dtypes or lengths do not fit each other.
        TraceError: A function does something that cannot be traced; the message says what, and where.
        IndexError: A function read a captured tensor outside its bounds (CPU; CUDA reads the nearest element).
        torch.OutOfMemoryError: Torch's allocator has no memory for the call.
        RuntimeError: There is no NVRTC to compile kernels with; the message says how to get it.
    """
    if type(query) is not Tensor and _sharded.is_sharded(query):
        more: dict[str, Any] = dict(scale=scale, enable_gqa=enable_gqa, return_lse=return_lse)
        more |= dict(kernel_options=kernel_options, return_aux=return_aux, dropout_p=dropout_p)
        sharded: Any = _sharded.attention(flex_attention, query, key, value, score_mod, block_mask, sink, **more)
        return sharded  # type: ignore[no-any-return]
    if _checks.autocasts(query):
        query, key, value = _checks.autocast(query, key, value)
    if enable_gqa is not False and enable_gqa is not True:
        enable_gqa = flag("enable_gqa", enable_gqa)
    if return_lse is not False:
        return_lse = flag("return_lse", return_lse)
    extents = _native.extents(query, key, value, enable_gqa)
    if extents is None:
        _checks.check_operands(query, key, value, block_mask, enable_gqa)
    if return_lse:
        _checks.check_return_lse(return_aux)
    if return_aux is not None:
        _checks.check_aux(return_aux)
    if kernel_options is not None:
        _checks.check_options(kernel_options)
    if scale is not None:
        scale = _checks.checked_scale(scale)
    wants_max = return_aux is not None and return_aux.max_scores
    seen = _dispatched.is_watched() or (extents is None and dispatches(query, key, value))
    drops = type(dropout_p) is not float or dropout_p != 0.0
    dropout = _checks.dropout_of(dropout_p, query, drawn=not seen) if drops else None
    if sink is not None:
        sink = _checks.sink_of(sink, query)
    if extents is None:
        query, key, value = _checks.of_one_dtype(query, key, value)
        query, key, value = (t.resolve_neg() for t in (query, key, value))
        if query.dtype == torch.float64:
            p = 0.0 if dropout is None else dropout[0]
            results = _dense.attention(query, key, value, score_mod, block_mask, scale, sink, p)
            return _returned(*results, return_lse, return_aux)
        extents = _extents(query, key)
    _checks.refuse_tangents(query, key, value, sink)
    wants_lse = return_lse or (return_aux is not None and return_aux.lse)
    if seen:
        if block_mask is not None:
            _blocks.check_kind(block_mask)
        mods = (score_mod, block_mask, extents, scale, sink, dropout, wants_max)
        return _returned(*_dispatched.attention(query, key, value, *mods), return_lse, return_aux)
    of: tuple[Any, ...] = (scale, dropout, wants_lse, wants_max)
    call = _autograd.of_entries(lambda: _autograd.Call(*_traced(score_mod, block_mask, extents, query), *of))
    out, lse, max_scores = _autograd.run(call, query, key, value, sink)
    return _returned(out, lse, max_scores, return_lse, return_aux)


def _extents(query: Tensor, key: Tensor) -> tuple[int, int, int, int]:
    """Of b, h, q and kv."""
    return query.size(0), query.size(1), query.size(2), key.size(2)


def _traced(
    score_mod: ScoreMod | None, block_mask: Any, extents: tuple[int, int, int, int], query: Tensor
) -> tuple[Any, Any]:
    score = None if score_mod is None else _trace.score(score_mod, extents)
    return score, None if block_mask is None else _blocks.program_of(block_mask, extents, query.device)


def _returned(out: Tensor, lse: Any, max_scores: Any, return_lse: bool, aux: AuxRequest | None) -> _Returned:
    if aux is not None:
        return out, AuxOutput(lse=lse if aux.lse else None, max_scores=max_scores if aux.max_scores else None)
    return (out, lse) if return_lse else out


def _asked(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreMod | None, block_mask: Any, scale: Any, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Any, Any, float | None]:
    """What a call computes with, for those that only say or prepare it: operands, traced functions, scale."""
    if _checks.autocasts(query):
        query, key, value = _checks.autocast(query, key, value)
    _checks.check_operands(query, key, value, block_mask, enable_gqa)
    number = None if scale is None else _checks.checked_scale(scale)
    score, mask = _traced(score_mod, block_mask, _extents(query, key), query)
    return *_checks.of_one_dtype(query, key, value), score, mask, number


@uncompiled
def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | Mask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
) -> None:
    """Compiles and loads what :func:`flex_attention` runs for these arguments on CUDA, and for its backward if
    something wants a gradient, all side by side. Nothing is computed, and elements are not read: tensors from
    ``torch.empty`` serve. The CPU compiles nothing.

    Raises:
        ValueError, TraceError: As :func:`flex_attention` does.
        RuntimeError: There is no NVRTC, or it refuses a kernel.
    """
    query, key, value, score, mask, number = _asked(query, key, value, score_mod, block_mask, scale, enable_gqa)
    p = probability("dropout_p", dropout_p)
    logits = None if sink is None else _checks.sink_of(sink, query)
    if not query.is_cuda or query.dtype == torch.float64:
        return
    dropout = (p, torch.zeros(2, dtype=torch.int32, device=query.device)) if p else None
    learned = () if score is None else score.learned
    wants = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (query, key, value, sink, *learned)
    )
    plan = _autograd.Call(score, mask, number, dropout, False, False).planned(query, key, value, logits, (), not wants)
    out = _autograd.empty_in_order(query, (*query.shape[:3], value.shape[3]))
    plan.prepare(query, key, value, out, torch.empty(query.shape[:3], dtype=torch.float32, device=query.device))


@uncompiled
def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | Mask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> str:
    """What :func:`flex_attention` would run for these arguments, in words: the traced functions, how many tiles are
    live, kernels, memory. Nothing is computed.

    Raises:
        ValueError, TraceError: As :func:`flex_attention` does.
    """
    query, key, value, score, mask, number = _asked(query, key, value, score_mod, block_mask, scale, enable_gqa)
    if query.dtype == torch.float64:
        scores = math.prod(_extents(query, key)) * 8
        return f"plain operations of PyTorch, for float64: they hold all scores, {scores / 2**20:.1f} MiB"
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    learns = learns or (score is not None and bool(score.learned))
    plan = _autograd.Call(score, mask, number, None, False, False).planned(
        query, key, value, None, (), forward_only=not learns
    )
    said: str = plan.explain()
    return said
