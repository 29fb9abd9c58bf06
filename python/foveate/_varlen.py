"""``varlen``: attention of sequences of any lengths, one after another."""

from __future__ import annotations

from typing import Any, Callable, overload

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

from . import _autograd, _checks, _cuda, _dispatched, _region, _trace
from ._arguments import dispatches, integer, offsets_vector
from ._compile import also_compiled
from ._masks import Mask, offsets_of
from ._trace import ScoreMod


@overload
def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    score_mod: ScoreMod | None = None,
    mask: Mask | Callable[..., Tensor] | None = None,
    scale: float | None = None,
    *,
    return_aux: None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor: ...
@overload
def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    score_mod: ScoreMod | None = None,
    mask: Mask | Callable[..., Tensor] | None = None,
    scale: float | None = None,
    *,
    return_aux: AuxRequest,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, AuxOutput]: ...
@also_compiled(_region.varlen)
def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    score_mod: ScoreMod | None = None,
    mask: Mask | Callable[..., Tensor] | None = None,
    scale: float | None = None,
    *,
    return_aux: AuxRequest | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor | tuple[Tensor, AuxOutput]:
    """Attention of sequences of any lengths, one after another, with a mask and a score function.

    Sequence ``b`` owns rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` of ``query`` and those of
    ``cu_seqlens_k`` of ``key`` and ``value``. Functions see the sequence as ``b`` and positions inside it.

    Args:
        query: ``[T, Hq, E]``, float32, bfloat16 or float16; or, as key and value too, a nested tensor of the
            jagged layout, ``[n, j, Hq, E]`` or ``[n, Hq, j, E]``, which brings its offsets.
        key: ``[S, Hkv, E]``; ``Hkv`` divides ``Hq``.
        value: ``[S, Hkv, Ev]``.
        cu_seqlens_q: ``[n + 1]``, integers that begin at 0 and do not decrease. Nested tensors have their own.
        cu_seqlens_k: Those of keys; ``cu_seqlens_q`` when it is None.
        max_seqlen_q: At least the queries of the longest sequence. On CUDA the offsets are never read by the host:
            kernels are launched for as many rows as this, or all of them, and leave out what is beyond it. Ignored
            on the CPU, where lengths are read from the offsets. ``max_seqlen_k`` is that of the keys.
        score_mod: As in :func:`flex_attention`.
        mask: A :class:`Mask` or a mask function.
        scale: Factor on ``query @ key``; ``1/sqrt(E)`` when it is None.
        return_aux: As in :func:`flex_attention`, of shape ``[Hq, T]``, also of nested tensors.
        sink: As in :func:`flex_attention`.
        dropout_p: As in :func:`flex_attention`.

    Returns:
        ``out [T, Hq, Ev]``, nested as ``query`` is. Rows past the last sequence are 0, and their gradients.

    Raises:
        ValueError: Shapes, dtypes or offsets do not fit each other.
        TraceError: A function does something that cannot be traced.
    """
    nested: Any = None
    if isinstance(query, Tensor) and query.is_nested:
        if cu_seqlens_q is not None or cu_seqlens_k is not None:
            raise ValueError("nested tensors have offsets of their own: leave out cu_seqlens_q and cu_seqlens_k")
        nested = query
        query, cu_seqlens_q = _jagged("query", query)
        key, cu_seqlens_k = _jagged("key", key)
        value, offsets_v = _jagged("value", value)
        if cu_seqlens_k is not offsets_v and not torch.equal(cu_seqlens_k, offsets_v):
            raise ValueError("key and value must have the same lengths")
    elif cu_seqlens_q is None:
        raise ValueError("cu_seqlens_q is missing: only nested tensors have offsets of their own")
    q, k, v = _checks.rows(query, key, value)
    number = None if scale is None else _checks.checked_scale(scale)
    aux = AuxRequest() if return_aux is None else return_aux
    _checks.check_aux(aux)
    seen = _dispatched.is_watched() or dispatches(q, k, v)
    drops = type(dropout_p) is not float or dropout_p != 0.0
    dropout = _checks.dropout_of(dropout_p, query, drawn=not seen) if drops else None
    longest = (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k))
    longest_q, longest_k = (None if n is None else integer(name, n, 0) for name, n in longest)
    assert cu_seqlens_q is not None
    both = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    logits = None if sink is None else _checks.sink_of(sink, q)
    _checks.refuse_tangents(q, k, v, logits)
    if seen:
        where = (cu_seqlens_q, both)
        for name, offsets in zip(("cu_seqlens_q", "cu_seqlens_k"), where):
            offsets_vector(name, offsets)
        mods = (score_mod, mask, (cu_seqlens_q.size(0) - 1, q.size(1), q.size(0), k.size(0)), number, logits, dropout)
        one, two, three = map(_checks.heads_first, (q, k, v))
        result, lse, max_scores = _dispatched.attention(one, two, three, *mods, aux.max_scores, "varlen_", where)
        out = result.squeeze(0).transpose(0, 1)
        lse = lse if sink is None else _checks.of_sequences(lse, cu_seqlens_q)
    else:
        offsets, extents = sequences(cu_seqlens_q, both, q, k, longest_q, longest_k)

        def made() -> _autograd.Call:
            score = None if score_mod is None else _trace.score(score_mod, extents)
            traced = None if mask is None else _trace.mask(mask, extents)
            return _autograd.Call(score, traced, number, dropout, aux.lse, aux.max_scores, offsets)

        call = _autograd.of_entries(made)
        out, lse, max_scores = _autograd.run(call, q, k, v, logits)
    if nested is not None:
        out = torch.nested.nested_tensor_from_jagged(out, nested.offsets())
        out = out.transpose(1, 2) if nested._ragged_idx == 2 else out
    if return_aux is None:
        return out
    more = ((lse, aux.lse), (max_scores, aux.max_scores))
    return out, AuxOutput(*(None if x is None or not wanted else x.squeeze(0) for x, wanted in more))


def sequences(
    cu_q: Tensor, cu_k: Tensor, q: Tensor, k: Tensor, longest_q: int | None = None, longest_k: int | None = None
) -> tuple[Any, tuple[int, int, int, int]]:
    """The offsets of sequences in the rows of q and k ``[T, H, D]``, and the extents of b, h, q and kv. The host
    does not read those on CUDA: there no sequence has more rows than ``longest_q`` and ``longest_k``.

    Raises:
        ValueError: They are none, or differ in number.
    """
    if q.is_cuda:
        made = _cuda.offsets(cu_q, cu_k, longest_q, longest_k, q, k)
        return made, (made[0].size(0) - 1, q.size(1), made[2], made[3])
    offsets = (offsets_of("cu_seqlens_q", cu_q, q.size(0)), offsets_of("cu_seqlens_k", cu_k, k.size(0)))
    if len(offsets[0]) != len(offsets[1]):
        raise ValueError(
            f"cu_seqlens_q has {len(offsets[0])} offsets and cu_seqlens_k {len(offsets[1])}; they need as many"
        )
    longest = [max((b - a for a, b in zip(of, of[1:])), default=0) for of in offsets]
    return offsets, (len(offsets[0]) - 1, q.size(1), longest[0], longest[1])


def _jagged(name: str, tensor: Any) -> tuple[Tensor, Tensor]:
    """The rows ``[T, H, E]`` of a nested tensor, and its offsets."""
    if not isinstance(tensor, Tensor) or not tensor.is_nested or tensor.layout != torch.jagged or tensor.dim() != 4:
        raise ValueError(
            f"query, key and value must all be nested tensors [n, j, heads, dim] of the jagged layout; {name} is not"
        )
    jagged: Any = tensor
    if jagged._ragged_idx == 2:
        jagged = jagged.transpose(1, 2)
    if jagged._ragged_idx != 1 or jagged.lengths() is not None:
        raise ValueError(f"{name} must be jagged in its second or third axis, without holes between its sequences")
    return jagged.values(), jagged.offsets()
