"""Hugging Face models on Foveate's attention::

    foveate.huggingface.register()
    model.set_attn_implementation("foveate")

transformers asks an implementation of attention for two functions. :func:`attention_mask` is called once in a
forward pass for each kind of layer, and makes no table: it keeps the mask function that transformers composed
of causal, sliding, chunked, packed and padding parts. :func:`attention` is called in each layer. A model whose
implementation has no mask function gets no mask at all from transformers, without a word, so
:func:`attention` refuses to run without ours.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks
from torch.utils.weak import WeakTensorKeyDictionary

from . import _trace
from ._arguments import flag, function, integer, number, shown, tensor
from ._blocks import create_block_mask
from ._compile import uncompiled
from ._flex import flex_attention
from ._masks import Mask

__all__ = ["attention", "attention_mask", "register"]


def register(name: str = "foveate") -> None:
    """Makes ``name`` an attention implementation of transformers: for ``model.set_attn_implementation(name)``
    and for ``attn_implementation=name`` when a model is made.

    Raises:
        ImportError: There is no transformers 5 or newer.
        TypeError: ``name`` is no string.
        ValueError: ``name`` is empty, or transformers takes it for another kind of implementation.
    """
    masks, functions = _interfaces()
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {shown(name)}")
    if not name:
        raise ValueError("name is empty; models are given it as attn_implementation")
    if "flash" in name or "/" in name or "|" in name or name in ("eager", "sdpa", "flex_attention"):
        raise ValueError(
            f"transformers takes {name!r} for an implementation of its own or of its hub; choose another name"
        )
    functions.register(name, attention)
    masks.register(name, attention_mask)


def _interfaces() -> tuple[Any, Any]:
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as missing:
        raise ImportError(
            f"foveate.huggingface needs transformers 5 or newer: pip install -U transformers ({missing})"
        ) from None
    return AttentionMaskInterface, AttentionInterface


class _Pass(Mask):
    """The mask of one forward pass: traced once, not once in each layer."""

    __slots__ = ("_latest", "_programs")

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._programs: dict[tuple[int, ...], Any] = {}
        self._latest: tuple[Mask, _Pass] | None = None

    def _program(self, extents: tuple[int, int, int, int]) -> Any:
        if extents not in self._programs:
            self._programs[extents] = _trace.mask(self, extents)
        return self._programs[extents]

    def within(self, documents: Mask) -> _Pass:
        if self._latest is None or self._latest[0] is not documents:
            self._latest = (documents, _Pass(and_masks(self, documents)))
        return self._latest[1]


class _Symbolic(BlockMask):
    """A mask function where transformers wants a block mask or a tensor of four axes, and takes all else for
    a padding mask. What reads its tables gets them made."""

    def __init__(self, mask: Mask, batch: int, q_len: int, kv_len: int) -> None:
        self.mask = mask
        self._shape = (batch, 1, q_len, kv_len)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "mask":
            raise AttributeError(name)
        vars(self).update(vars(create_block_mask(self.mask, self._shape[0], None, *self._shape[2:])))
        return super().__getattribute__(name)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    def contiguous(self) -> _Symbolic:
        """Itself: ``generate`` asks masks that it makes for a static cache."""
        return self


@uncompiled
def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> BlockMask:
    """What transformers asks for once in a forward pass and kind of layer.

    Args:
        batch_size, q_length, kv_length: Extents of the mask.
        q_offset, kv_offset: Position of the first query and of the first key; a static cache has them in
            0-d tensors, which it changes in place.
        mask_function: ``(b, h, q, kv) -> bool`` on positions; causal when it is None.
        attention_mask: ``[batch, positions]``, bool, False where a key is padding; positions past its end are, too.

    Raises:
        TypeError: ``attention_mask`` is no dense tensor of two axes, ``mask_function`` no function, or a length no integer.
        ValueError: A length is negative.
    """
    if attention_mask is not None and (
        not isinstance(attention_mask, Tensor)
        or attention_mask.layout != torch.strided
        or attention_mask.dim() != 2
    ):
        raise TypeError(f"attention_mask must be a dense tensor [batch, positions], got {shown(attention_mask)}")
    function("mask_function", mask_function)
    batch_size, q_length, kv_length = (
        integer(name, n, 0)
        for name, n in (("batch_size", batch_size), ("q_length", q_length), ("kv_length", kv_length))
    )
    q_at, kv_at = _offset("q_offset", q_offset), _offset("kv_offset", kv_offset)
    parts = [_causal if mask_function is None else mask_function]
    if attention_mask is not None:
        if not bool(attention_mask.all()):
            parts.append(_not_padding(attention_mask))
        elif isinstance(kv_at, Tensor) or attention_mask.size(-1) < kv_at + kv_length:
            parts.append(_before(attention_mask.size(-1)))
    allowed = parts[0] if len(parts) == 1 else and_masks(*parts)

    def at_positions(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return allowed(b, h, q + q_at, kv + kv_at)

    return _Symbolic(_Pass(at_positions), batch_size, q_length, kv_length)


def _offset(name: str, given: Any) -> int | Tensor:
    """A position, as it is now."""
    if (
        isinstance(given, Tensor)
        and given.layout == torch.strided
        and given.numel() == 1
        and not given.is_floating_point()
    ):
        return given.reshape(()).clone()
    return integer(name, given)


def _causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return kv <= q


def _before(end: int) -> Callable[..., Any]:
    return lambda b, h, q, kv: kv < end


def _not_padding(kept: Tensor) -> Callable[..., Any]:
    last = kept.size(-1) - 1

    def not_padding(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (kv <= last) & kept[b, torch.clamp(kv, max=last)]

    return not_padding


@uncompiled
def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BlockMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer.

    Args:
        module: The layer; its ``config`` says which implementation it runs, and ``is_causal`` whether it is causal
            where no mask is given.
        query: ``[B, Hq, L, D]``.
        key: ``[B, Hkv, S, D]``, not repeated.
        value: ``[B, Hkv, S, Dv]``.
        attention_mask: From :func:`attention_mask`, or any block mask, or of a user's own making a tensor
            ``[B|1, Hq|1, L|1, at least S]``: bools say what counts, floats are added to scores.
        dropout: Probability to drop a weight.
        scaling: Factor on ``query @ key``; ``1/sqrt(D)`` when it is None.
        is_causal: Overrules ``module.is_causal``. Like it, it counts only where no mask is given and L is not 1.
        sliding_window: Counts only where no mask is given and the layer is causal.
        softcap: Scores are ``softcap * tanh(score / softcap)`` before anything is added to them.
        s_aux: ``[Hq]``, logits of attention sinks.
        position_bias: ``[B|1, Hq|1, L|1, at least S]``, added to scores, with its gradient.
        cu_seq_lens_q, cu_seq_lens_k: ``[n + 1]``, offsets of packed sequences in a batch of 1, which see
            themselves only.

    Returns:
        ``[B, L, Hq, Dv]``, contiguous, and None for the weights, which are never held.

    Raises:
        RuntimeError: The mask function is not registered for the layer's implementation.
        TypeError: An argument is of the wrong kind.
        ValueError: A mask's or bias's shape does not fit, a number is out of range, or offsets are given beside a block
            mask that transformers did not ask for.
        NotImplementedError: The call is given a paged cache.
    """
    _check_registered(module)
    if kwargs.get("cache") is not None:
        raise NotImplementedError(
            "foveate.huggingface does not run continuous batching: use generate, or another implementation"
        )
    for name, operand in (("query", query), ("key", key), ("value", value)):
        if tensor(name, operand).dim() != 4:
            raise ValueError(f"{name} must be a tensor of 4 axes [batch, heads, length, dim], got {shown(operand)}")
    if softcap is not None and not number("softcap", softcap) > 0.0:
        raise ValueError(f"softcap must be above 0, got {softcap}")
    if sliding_window is not None:
        sliding_window = integer("sliding_window", sliding_window, 1)
    if s_aux is not None:
        s_aux = _strided("s_aux", s_aux).reshape(-1)
        if not (s_aux.is_floating_point() and s_aux.numel() == query.size(1)):
            raise ValueError(
                f"s_aux must be a tensor of {query.size(1)} floats, one for each query head, got {shown(s_aux)}"
            )
    if not (attention_mask is None or isinstance(attention_mask, (Tensor, BlockMask, Mask))):
        raise TypeError(f"attention_mask must be a block mask or a dense tensor of 4 axes, got {shown(attention_mask)}")
    batch, kv_len = key.size(0), key.size(2)
    query = query.expand(batch, -1, -1, -1) if query.size(0) == 1 else query
    added = [] if position_bias is None else [_bias(_table("position_bias", position_bias, query, kv_len))]
    mask: BlockMask | Mask | None
    if isinstance(attention_mask, Tensor):
        dense = _table("attention_mask", attention_mask, query, kv_len)
        mask = _Pass(_trace.element_of(dense)) if dense.dtype == torch.bool else None
        added += [_bias(dense)] if mask is None else []
    elif isinstance(attention_mask, _Symbolic):
        # Without a cache transformers takes the length of keys from the mask of padding.
        rows, keys = attention_mask.shape[2:]
        if rows < query.size(2) or keys < kv_len:
            raise ValueError(
                f"attention_mask is for {rows} queries and {keys} keys, and the layer has {query.size(2)} and {kv_len}: "
                "give one as long as the tokens and what is cached"
            )
        mask = attention_mask.mask
    else:
        mask = attention_mask
    if attention_mask is None and query.size(2) > 1:
        if getattr(module, "is_causal", True) if is_causal is None else flag("is_causal", is_causal):
            mask = Mask.causal() if sliding_window is None else Mask.sliding_window(sliding_window)
    if cu_seq_lens_q is None and cu_seq_lens_k is not None:
        raise ValueError("cu_seq_lens_k is given without cu_seq_lens_q")
    if cu_seq_lens_q is not None:
        mask = _within(mask, _documents(cu_seq_lens_q, cu_seq_lens_k, query.size(2), key.size(2)))
    out = flex_attention(
        query,
        key,
        value,
        _score(softcap, added),
        mask,
        None if scaling is None else number("scaling", scaling),
        enable_gqa=True,
        sink=s_aux,
        dropout_p=number("dropout", dropout),
    )
    return out.transpose(1, 2).contiguous(), None


def _check_registered(module: torch.nn.Module) -> None:
    masks, _ = _interfaces()
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if name is not None and masks().get(name) is not attention_mask:
        raise RuntimeError(
            f"attention implementation {name!r} has no mask function of Foveate's, so that padding and packing would "
            "be ignored: call foveate.huggingface.register()"
        )


def _strided(name: str, given: Any) -> Tensor:
    dense = tensor(name, given)
    if dense.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got one of layout {dense.layout}")
    return dense


def _table(name: str, given: Any, query: Tensor, kv_len: int) -> Tensor:
    """``[B|1, H|1, L|1, S]`` of what is given for the points of a call."""
    batch, heads, q_len = query.shape[:3]
    of = _strided(name, given)
    fits = (
        of.dim() == 4
        and all(n in (1, most) for n, most in zip(of.shape, (batch, heads, q_len)))
        and of.size(3) >= kv_len
    )
    if not fits or not (of.dtype == torch.bool or of.is_floating_point()):
        most = f"[{batch} or 1, {heads} or 1, {q_len} or 1, at least {kv_len}]"
        raise ValueError(f"{name} must be a tensor of bools or floats {most}, got {shown(of)}")
    return of[..., :kv_len]


def _bias(added: Tensor) -> Callable[..., Any]:
    at = _trace.element_of(added)
    return lambda score, *point: score + at(*point)


def _within(mask: BlockMask | Mask | None, documents: Mask) -> Mask:
    if isinstance(mask, _Pass):
        return mask.within(documents)
    if isinstance(mask, BlockMask):
        raise ValueError(
            "cu_seq_lens_q and a block mask of a user's own making are given: put the documents into the mask"
        )
    return documents if mask is None else mask & documents


def _score(softcap: float | None, added: list[Callable[..., Any]]) -> Callable[..., Any] | None:
    if softcap is None and not added:
        return None

    def score_mod(score: Any, *point: Any) -> Any:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        for add in added:
            score = add(score, *point)
        return score

    return score_mod


def _state(offsets: Tensor) -> Any:
    """What changes when offsets are written to: their elements, where they do not count the writes."""
    return offsets.tolist() if offsets.is_inference() else offsets._version


_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _documents(cu_q: Tensor, cu_k: Tensor | None, q_len: int, kv_len: int) -> Mask:
    """The mask of packed sequences, made once for the offsets and lengths that all layers are given."""
    _strided("cu_seq_lens_q", cu_q)
    if cu_k is not None:
        _strided("cu_seq_lens_k", cu_k)
    state = (_state(cu_q), None if cu_k is None else (id(cu_k), _state(cu_k)), q_len, kv_len)
    found = _known.get(cu_q)
    if found is None or found[0] != state:
        documents = Mask.from_cu_seqlens(cu_q, cu_k)
        for name, (_, _, end), rows in zip(("cu_seq_lens_q", "cu_seq_lens_k"), documents._ends, (q_len, kv_len)):
            if end > rows:
                raise ValueError(f"{name} ends at {end}, past the {rows} rows")
        # The second tensor is held, so that its id stays its own.
        found = _known[cu_q] = (state, _Pass(documents), cu_k)
    made: Mask = found[1]
    return made
