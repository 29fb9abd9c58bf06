"""``paged``: attention on keys and values that a cache keeps in pages."""

from __future__ import annotations

from typing import Any, Callable, overload

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

from . import _checks, _dispatched, _region, _trace
from ._arguments import dispatches, unwrapped
from ._autograd import Call
from ._compile import also_compiled
from ._masks import Mask
from ._trace import ScoreMod


@overload
def paged(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    score_mod: ScoreMod | None = None,
    mask: Mask | Callable[..., Tensor] | None = None,
    scale: float | None = None,
    *,
    return_aux: None = None,
    sink: Tensor | None = None,
) -> Tensor: ...
@overload
def paged(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    score_mod: ScoreMod | None = None,
    mask: Mask | Callable[..., Tensor] | None = None,
    scale: float | None = None,
    *,
    return_aux: AuxRequest,
    sink: Tensor | None = None,
) -> tuple[Tensor, AuxOutput]: ...
@also_compiled(_region.paged)
def paged(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    score_mod: ScoreMod | None = None,
    mask: Mask | Callable[..., Tensor] | None = None,
    scale: float | None = None,
    *,
    return_aux: AuxRequest | None = None,
    sink: Tensor | None = None,
) -> Tensor | tuple[Tensor, AuxOutput]:
    """Attention on keys and values in pages, as a cache of sequences that grow keeps them.

    Key ``i`` of batch entry ``b`` is row ``i % page_size`` of page ``page_table[b, i // page_size]``. Functions see
    ``kv_idx`` from 0 to ``lengths[b] - 1``, wherever the pages lie; ``Mask.causal(bottom_right=True)`` lets the
    last query of each entry see all its keys. Nothing is gathered or copied.

    Args:
        query: ``[B, Hq, L, E]``, float32, bfloat16 or float16.
        key_pages: ``[pages, Hkv, page_size, E]``, of any strides; ``Hkv`` divides ``Hq``. Of a cache
            ``[1, Hkv, pages * page_size, E]``, as torch's ``PagedAttention`` keeps it, this view has them:
            ``cache[0].unflatten(1, (-1, page_size)).transpose(0, 1)``.
        value_pages: ``[pages, Hkv, page_size, Ev]``.
        page_table: ``[B, entries]``, integers. Entries that no key needs may be anything.
        lengths: ``[B]``, integers: the number of keys of each batch entry. Of CUDA keys they may be on the CPU. On the
            device they are read there and nothing waits, so that a graph that was recorded follows a cache that grows;
            an entry has at most the keys that its pages hold.
        score_mod: As in :func:`flex_attention`.
        mask: A :class:`Mask` or a mask function.
        scale: Factor on ``query @ key``; ``1/sqrt(E)`` when it is None.
        return_aux: As in :func:`flex_attention`.
        sink: As in :func:`flex_attention`.

    Returns:
        ``out [B, Hq, L, Ev]``; with ``return_aux`` the pair of it and an ``AuxOutput``. Pages have no gradient:
        a backward through the result raises a ``RuntimeError``.

    Raises:
        ValueError: Shapes or dtypes do not fit each other, a length is negative or longer than its entries
            of the table, or an entry that a key needs is no page (CPU; CUDA reads the nearest page, and at most the
            keys that there are).
        TraceError: A function does something that cannot be traced.
    """
    _checks.check_pages(query, key_pages, value_pages)
    query, key_pages, value_pages = (t.resolve_neg() for t in (query, key_pages, value_pages))
    aux = AuxRequest() if return_aux is None else return_aux
    _checks.check_aux(aux)
    number = None if scale is None else _checks.checked_scale(scale)
    logits = None if sink is None else _checks.sink_of(sink, query)
    _checks.refuse_tangents(query, key_pages, value_pages, logits)
    out: Tensor
    if _dispatched.is_watched() or dispatches(query, key_pages, value_pages):
        _check_pages(page_table, lengths, query)
        most = (query.size(0), query.size(1), query.size(2), page_table.size(1) * key_pages.size(2))
        mods = (score_mod, mask, most, number, logits, None, aux.max_scores, "paged", (page_table, lengths))
        seen = _dispatched.attention(query, key_pages, value_pages, *mods)
        rows = AuxOutput(lse=seen[1] if aux.lse else None, max_scores=seen[2] if aux.max_scores else None)
        return seen[0] if return_aux is None else (seen[0], rows)
    tables = pages(page_table, lengths, query)
    extents = (query.size(0), query.size(1), query.size(2), _most_keys(tables, key_pages))
    score = None if score_mod is None else _trace.score(score_mod, extents)
    traced = None if mask is None else _trace.mask(mask, extents)
    call = Call(score, traced, number, None, aux.lse, aux.max_scores, pages=tables)
    inputs = (call, query, key_pages, value_pages, logits)
    learned = () if score is None else score.learned
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*inputs[1:], *learned))
    if wanted or torch._C._are_functorch_transforms_active():
        out, lse, max_scores = _WithoutGradient.apply(*inputs, *learned)  # type: ignore[no-untyped-call]
    else:
        out, lse, max_scores = call.forward(*inputs[1:], (), forward_only=True)
    if return_aux is None:
        return out
    return out, AuxOutput(lse=lse if aux.lse else None, max_scores=max_scores if aux.max_scores else None)


class _WithoutGradient(torch.autograd.Function):
    """The call, with a backward that says why there is none."""

    @staticmethod
    def forward(call: Call, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *learned: Tensor) -> Any:
        return call.forward(q, k, v, sink, learned, forward_only=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        _checks.no_gradient_of_pages()

    @staticmethod
    def vmap(*_: Any) -> Any:
        raise NotImplementedError(
            "foveate.paged has no rule for torch.vmap; give the entries in the batch axis of one call"
        )


def pages(page_table: Tensor, lengths: Tensor, query: Tensor) -> tuple[Tensor, Any]:
    """The table and the lengths as the engine reads them: for CUDA those on the CPU in a list.

    Raises:
        ValueError: They are no integers, not for as many entries as ``query`` has, or on another device.
    """
    _check_pages(page_table, lengths, query)
    table, numbers = _integers("page_table", page_table), _integers("lengths", lengths)
    return table, numbers.tolist() if query.is_cuda and not numbers.is_cuda else numbers


def _most_keys(pages: tuple[Tensor, Any], key_pages: Tensor) -> int:
    """At least the keys of the longest batch entry."""
    table, lengths = pages
    if isinstance(lengths, Tensor) and lengths.is_cuda:
        return table.size(1) * key_pages.size(2)
    known: list[int] = lengths.tolist() if isinstance(lengths, Tensor) else lengths
    return max([0, *known])


def _check_pages(page_table: Any, lengths: Any, query: Tensor) -> None:
    for name, given, axes in (("page_table", page_table, 2), ("lengths", lengths, 1)):
        if not isinstance(given, Tensor) or given.dim() != axes or given.dtype not in (torch.int32, torch.int64):
            what = f"{given.dtype} {tuple(given.shape)}" if isinstance(given, Tensor) else repr(given)
            raise ValueError(
                f"{name} must be an int32 or int64 tensor of {axes} ax{'es' if axes > 1 else 'is'}, got {what}"
            )
        if given.device != query.device and not (axes == 1 and given.device.type == "cpu"):
            raise ValueError(f"{name} must be on {query.device} as the query is, got {given.device}")
        if given.size(0) != query.size(0):
            raise ValueError(f"{name} is for {given.size(0)} batch entries, and query has {query.size(0)}")


def _integers(name: str, tensor: Tensor) -> Tensor:
    """As the engine reads them: contiguous, of 32 bits; what these cannot hold is no page."""
    if tensor.dtype == torch.int64:
        tensor = tensor.clamp(-(2**31), 2**31 - 1).to(torch.int32)
    return unwrapped(name, tensor.contiguous())
