"""Masks as values: named, in text, joined with ``&``, ``|`` and ``~``."""

from __future__ import annotations

import numbers
import operator
import sys
from typing import Any, Callable

import torch
from torch import Tensor

from . import _native, _source, _trace
from ._arguments import flag, offsets_vector, shown, unwrapped


class Mask:
    """A mask without tables, accepted wherever a block mask or a mask function is.

    ::

        mask = Mask.causal() & Mask.document(ids)
        mask = Mask("causal & (document | kv < prefix)", doc=ids, prefix=64)
        out = flex_attention(q, k, v, block_mask=mask)

    Nothing is computed when a mask is made, and nothing depends on lengths: one mask serves all. Tensors are
    read when attention runs. A mask has no truth value, so ``and``, ``or``, ``not`` and ``if`` refuse it; it equals
    itself alone. ``pickle`` takes it, with its tensors, where it takes the functions that the mask is made of.

    Args:
        what: The mask in Foveate's text form (``docs/text-form.md``), or a mask function
            ``(b, h, q_idx, kv_idx) -> bool`` as PyTorch's block masks take it.
        names: Tensors and numbers that the text names; a tensor of no axes is a number. ``document`` reads the ids
            ``doc``, ``[len]`` or ``[batch, len]``.

    Raises:
        ValueError: A name is neither a tensor's nor a number's; or, raised where the mask is used, the text is no mask,
            names what is not given, or does not read what is.
    """

    #: ``_reads``: what the function is made of, as :mod:`foveate._kept` follows it. ``_ends``: of offsets that it is
    #: made of their name, the axis of (b, h, q, kv) whose rows they divide, and the last one.
    __slots__ = ("_function", "_what", "_reads", "_ends")

    def __init__(self, what: str | Callable[..., Any], **names: Tensor | float | int | bool) -> None:
        self._ends: tuple[tuple[str, int, int], ...] = ()
        if isinstance(what, str):
            self._what, names = what, {name: _named(what, name, given) for name, given in names.items()}
            self._function: Callable[..., Any] = lambda b, h, q, kv: _parsed(q, what, names)
            self._reads: tuple[Any, ...] = (what, names)
        elif callable(what) and not names:
            self._what = _source.name_of(what)
            self._function = what
            self._reads = (what,)
        elif callable(what):
            raise TypeError(
                f"a Mask of a function takes no names, got {', '.join(names)}: the function captures what it reads"
            )
        else:
            raise TypeError(f"a Mask is made of text with names, or of a mask function, got {shown(what)}")

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        if self._ends and not torch.compiler.is_dynamo_compiling():
            self._check(_trace.running().extents)
        return self._function(b, h, q_idx, kv_idx)

    def _program(self, extents: tuple[int, int, int, int]) -> Any:
        """The traced function, for extents of b, h, q and kv."""
        return _trace.mask(self, extents)

    def __and__(self, other: Any) -> Mask:
        return self._joined(other, "&", lambda a, b: a & b)

    def __or__(self, other: Any) -> Mask:
        return self._joined(other, "|", lambda a, b: a | b)

    def __rand__(self, other: Any) -> Mask:
        return Mask(other) & self if callable(other) else NotImplemented

    def __ror__(self, other: Any) -> Mask:
        return Mask(other) | self if callable(other) else NotImplemented

    def __invert__(self) -> Mask:
        return self._made(f"~({self._what})", lambda *at: ~self(*at), ("~", self), self._ends)

    def __bool__(self) -> bool:
        # Torch asks so whether there is a function; Dynamo, where it traces what asks, comes by without a frame of
        # torch's.
        asker = sys._getframe(1).f_globals.get("__name__", "")
        if not torch.compiler.is_dynamo_compiling() and asker.split(".")[0] == "torch":
            return True
        raise TypeError(
            f"a Mask has no truth value, got {shown(self)} in `and`, `or`, `not` or `if`: join masks with &, | and ~, "
            "and ask whether there is one with `is None`"
        )

    def __repr__(self) -> str:
        return f"Mask({self._what})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        if type(self) is not Mask:  # A class may say what its masks are.
            return super().__reduce_ex__(protocol)
        # Of a function pickle takes what it takes of a BlockMask's: one that a module has by its name.
        first, *rest = self._reads
        if isinstance(first, str) and first in _SIGNS:
            return _SIGNS[first], tuple(rest)
        return _of_text if rest else Mask, self._reads

    def _joined(self, other: Any, sign: str, join: Callable[[Any, Any], Any]) -> Mask:
        if not callable(other):
            return NotImplemented  # type: ignore[no-any-return]
        other = other if isinstance(other, Mask) else Mask(other)
        what = f"({self._what}) {sign} ({other._what})"
        return self._made(what, lambda *at: join(self(*at), other(*at)), (sign, self, other), self._ends + other._ends)

    @staticmethod
    def _made(what: str, function: Callable[..., Any], reads: tuple[Any, ...], ends: tuple[Any, ...]) -> Mask:
        mask = Mask(function)
        mask._what, mask._reads, mask._ends = what, reads, ends
        return mask

    def _check(self, extents: tuple[Any, ...]) -> None:
        """Raises where offsets end past the rows of a call, with these extents of b, h, q and kv."""
        for name, axis, end in self._ends:
            if end > extents[axis]:
                raise ValueError(f"{name} ends at {end}, past the {extents[axis]} {'queries' if axis == 2 else 'keys'}")

    @staticmethod
    def causal(*, bottom_right: bool = False) -> Mask:
        """Every key up to the query; aligned at the end of both with ``bottom_right``.

        Raises:
            TypeError: ``bottom_right`` is neither True nor False.
        """
        return Mask("causal_bottom_right" if flag("bottom_right", bottom_right) else "causal")

    @staticmethod
    def sliding_window(size: int) -> Mask:
        """The last ``size`` keys up to the query, itself among them."""
        return Mask("sliding_window(size)", size=size)

    @staticmethod
    def window(left: int, right: int = 0) -> Mask:
        """Keys from ``left`` before the query to ``right`` after it."""
        return Mask("window(left, right)", left=left, right=right)

    @staticmethod
    def chunked(size: int) -> Mask:
        """Keys of the query's chunk of ``size`` positions."""
        return Mask("chunked(size)", size=size)

    @staticmethod
    def dilated(reach: int, step: int) -> Mask:
        """Every ``step``-th key up to ``reach`` away."""
        return Mask("dilated(reach, step)", reach=reach, step=step)

    @staticmethod
    def global_tokens(n: int) -> Mask:
        """The first ``n`` positions see all and are seen by all."""
        return Mask("global_tokens(n)", n=n)

    @staticmethod
    def prefix(n: int | Tensor) -> Mask:
        """The first ``n`` keys, and every key up to the query; ``n`` may be an integer tensor ``[B]``."""
        return Mask("prefix(n)", n=n)

    @staticmethod
    def document(ids: Tensor, kv_ids: Tensor | None = None) -> Mask:
        """Keys of the query's document, by integer ids ``[len]`` or ``[B, len]``."""
        if kv_ids is None:
            return Mask("document(ids)", ids=ids)
        return Mask("document(ids, kv_ids)", ids=ids, kv_ids=kv_ids)

    @staticmethod
    def from_cu_seqlens(cu_seqlens: Tensor, cu_seqlens_k: Tensor | None = None) -> Mask:
        """Keys of the query's document, by the offsets of documents ``[n + 1]``, of queries and keys or of each.
        Queries and keys past the last offset see nothing. The host reads the offsets, so on CUDA it waits for the
        device; :func:`foveate.varlen` takes offsets without.

        Raises:
            ValueError: The offsets do not begin at 0, decrease, or differ in number; or, raised where the mask is used,
                end past the queries or keys of the call.
        """
        q = offsets_of("cu_seqlens", cu_seqlens, _MOST)
        k = q if cu_seqlens_k is None else offsets_of("cu_seqlens_k", cu_seqlens_k, _MOST)
        if len(q) != len(k):
            raise ValueError(f"cu_seqlens has {len(q)} offsets and cu_seqlens_k {len(k)}; they need as many")
        q_ids, k_ids = (_ids(of).to(cu_seqlens.device) for of in (q, k))
        q_len, k_len = q_ids.numel() - 1, k_ids.numel() - 1
        of_keys = "cu_seqlens" if cu_seqlens_k is None else "cu_seqlens_k"
        return _of_sequences(q_ids, k_ids, q_len, k_len, of_keys)


def _named(text: str, name: str, given: Any) -> Any:
    """What a text names, as the engine takes it: numbers of other libraries are Python's."""
    if isinstance(given, Tensor) or type(given) in (bool, int, float):
        return given
    if isinstance(given, numbers.Integral):
        return int(given)
    if type(given).__module__ == "numpy" and type(given).__name__ in ("bool", "bool_"):
        return bool(given)
    if isinstance(given, numbers.Real):
        return float(given)
    raise ValueError(f"mask `{' '.join(text.split())}`: `{name}` must be a number or a tensor, got {shown(given)}")


def _of_text(text: str, names: dict[str, Any]) -> Mask:
    return Mask(text, **names)


def _of_sequences(q_ids: Tensor, k_ids: Tensor, q_end: int, k_end: int, of_keys: str) -> Mask:
    text = "q < q_end && kv < k_end && q_ids[min(q, q_end)] == k_ids[min(kv, k_end)]"
    mask = Mask(text, q_ids=q_ids, k_ids=k_ids, q_end=q_end, k_end=k_end)
    reads = ("cu_seqlens", q_ids, k_ids, q_end, k_end, of_keys)
    return Mask._made(mask._what, mask._function, reads, (("cu_seqlens", 2, q_end), (of_keys, 3, k_end)))


#: What makes a mask of others, or of offsets, by its sign in ``Mask._reads``.
_SIGNS: dict[Any, Callable[..., Any]] = {
    "&": operator.and_,
    "|": operator.or_,
    "~": operator.invert,
    "cu_seqlens": _of_sequences,
}


def offsets_of(name: str, offsets: Tensor, rows: int | None = None) -> list[int]:
    """Offsets of sequences in ``rows`` rows.

    Raises:
        ValueError: They are no integers, do not begin at 0, decrease, or end past the rows.
    """
    offsets_vector(name, offsets)
    if not torch.compiler.is_dynamo_compiling():
        offsets = unwrapped(name, offsets)
    numbers: list[int] = offsets.tolist()
    if numbers[0] != 0 or any(b < a for a, b in zip(numbers, numbers[1:])):
        raise ValueError(f"{name} must begin at 0 and not decrease, got {numbers[:8]}")
    if rows is not None and numbers[-1] > rows:
        raise ValueError(f"{name} ends at {numbers[-1]}, past the {rows} rows")
    return numbers


#: Positions are numbers of 32 bits.
_MOST = 2**31 - 1


def _ids(offsets: list[int]) -> Tensor:
    """The document of each position, and one more of none."""
    lengths = torch.tensor([*(b - a for a, b in zip(offsets, offsets[1:])), 1], dtype=torch.long)
    documents = torch.arange(lengths.numel(), dtype=torch.int32)
    documents[-1] = -1
    return torch.repeat_interleave(documents, lengths)


def _parsed(at: Any, text: str, names: dict[str, Any]) -> Any:
    if torch.compiler.is_dynamo_compiling():
        return _operator(at, text, names)
    return _trace.running().parsed(text, names.items())


def _by_sign(size: int) -> int:
    """A number, of which Dynamo guards whether it is below 0, 0, or above: named masks refuse sizes of the first kind,
    and some of the second, so that these have graphs of their own."""
    if size < 0:
        return size
    return size if size > 0 else 0


def _operator(at: Tensor, text: str, names: dict[str, Any]) -> Any:
    """A mask in text form, as an operator that :mod:`foveate._graph` reads; called as the mask function returns it,
    with a coordinate that it is given."""
    kinds: dict[Any, dict[str, Any]] = {Tensor: {}, bool: {}, int: {}}
    for name, given in names.items():
        if isinstance(given, float):
            # An operator's list of floats would be of these values alone.
            given = torch.ones((), dtype=torch.float32) * given
        elif not isinstance(given, (Tensor, bool)):
            given = _by_sign(given)
        kind = next(kind for kind in kinds if isinstance(given, kind))
        kinds[kind][name] = given
    by_kind = [part for kind in kinds.values() for part in (list(kind), list(kind.values()))]
    return torch.ops.foveate.mask(at, text, *by_kind)
