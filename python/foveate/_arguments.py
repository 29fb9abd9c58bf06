"""What is said of a single argument that is not what it must be: its name, what it must be, and what it is, in a line.

Checks take what torch takes in such a place, and give it back as what it stands for.
"""

from __future__ import annotations

import contextlib
import math
import operator
import sys
import threading
import warnings
from typing import Any, Collection, Iterator

import torch
from torch import Tensor

from ._native import TraceError


def shown(given: Any) -> str:
    """A value as messages show it, in one short line."""
    if isinstance(given, Tensor):
        return f"a tensor of {given.dtype} {list(given.shape)} on {given.device}"
    line = repr(given)
    if len(line) <= 100 and "\n" not in line:
        return line
    kind = type(given).__name__
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """A warning of the line that called the package, past torch's frames between; of the outermost line of a thread of
    autograd's, which nobody called."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in ("foveate", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


def flag(name: str, given: Any) -> bool:
    """True or False; 1 and 0 are, too."""
    if isinstance(given, (bool, int)) and given in (0, 1):
        return bool(given)
    raise TypeError(f"{name} must be True or False, got {shown(given)}")


def integer(name: str, given: Any, least: int | None = None) -> int:
    """An integer, of at least ``least``; one that 64 bits hold."""
    try:
        # Dynamo does not get over asking one of these.
        n = None if isinstance(given, (float, str)) else int(operator.index(given))
    except TypeError:
        n = None
    if n is None:
        raise TypeError(f"{name} must be an integer, got {shown(given)}")
    if n >= 2**63 or least is not None and n < least:
        bounds = "below 2**63" if least is None or n >= least else f"at least {least}"
        raise ValueError(f"{name} must be {bounds}, got {n}")
    return n


def number(name: str, given: Any) -> float:
    """A real number, also of a tensor of one element."""
    if isinstance(given, Tensor) and given.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} gets no gradient, and this tensor requires one: give {name}.item(), or multiply an operand by it"
        )
    try:
        # Of a number that changes Dynamo knows that it is one, and nothing of its value.
        if not isinstance(given, float):
            math.isfinite(given)
        return float(given)
    except OverflowError:
        raise ValueError(f"{name} must be a number that a float holds, got {shown(given)}") from None
    except (TypeError, ValueError, RuntimeError, NotImplementedError):
        raise TypeError(f"{name} must be a number, got {shown(given)}") from None


def probability(name: str, given: Any) -> float:
    """A number from 0 to below 1."""
    p = number(name, given)
    if not 0.0 <= p < 1.0:
        raise ValueError(f"{name} must be at least 0 and below 1, got {p}")
    return p


def tensor(name: str, given: Any) -> Tensor:
    if not isinstance(given, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(given)}")
    return given


#: What a class of tensors has that leaves its operators to torch.
_LEFT: Any = torch._C._disabled_torch_dispatch_impl


def dispatches(*tensors: Any) -> bool:
    """Whether the class of one of these has operators of its own: fake tensors, and such as wrap others."""
    return any(isinstance(t, Tensor) and type(t).__torch_dispatch__ is not _LEFT for t in tensors)


class Batched(TraceError):
    """A tensor is a batch of vmap, and no entry of it is chosen."""

    def __init__(self, name: str, batch: Tensor) -> None:
        super().__init__(f"{name} is a batch of torch.vmap: give its entries in the batch axis of one call instead")
        self.batch = batch


class _Entries(threading.local):
    """By the level of a vmap, the entry that is chosen of what is a batch there."""

    def __init__(self) -> None:
        self.of: dict[int, int] = {}


_entries = _Entries()


@contextlib.contextmanager
def entry(level: int, at: int) -> Iterator[None]:
    """Lets batches of a vmap be their entry ``at``."""
    _entries.of[level] = at
    try:
        yield
    finally:
        del _entries.of[level]


def wants_gradient(given: Tensor) -> bool:
    """Whether a gradient is wanted of a tensor, or of what a vmap made batches of."""
    if not torch.is_grad_enabled():
        return False
    while not given.requires_grad and torch._C._functorch.is_batchedtensor(given):
        given = torch._C._functorch.get_unwrapped(given)
    return given.requires_grad


def unwrapped(name: str, given: Tensor) -> Tensor:
    """The tensor in memory that transforms of ``torch.func`` have wrapped: inside of one every result is, whether it is
    differentiated or not. Of a batch of vmap the :func:`entry` that is chosen.

    Raises:
        Batched: No entry is.
        TraceError: Another transform than the innermost wants its gradient.
    """
    while torch._C._functorch.is_functorch_wrapped_tensor(given):
        if torch._C._functorch.is_batchedtensor(given):
            at = _entries.of.get(torch._C._functorch.maybe_get_level(given))
            if at is None:
                raise Batched(name, given)
            given = torch._C._functorch.get_unwrapped(given).select(torch._C._functorch.maybe_get_bdim(given), at)
            continue
        given = torch._C._functorch.get_unwrapped(given)
        if torch._C._functorch.is_functorch_wrapped_tensor(given) and given.requires_grad and torch.is_grad_enabled():
            raise TraceError(
                f"{name} gets its gradient by an outer transform of torch.func; pass it through the inner one"
            )
    return given


def offsets_vector(name: str, offsets: Any) -> None:
    """
    Raises:
        ValueError: It is no vector of integers.
    """
    fits = isinstance(offsets, Tensor) and offsets.dim() == 1 and offsets.numel() > 0 and not offsets.is_meta
    if not fits or offsets.is_floating_point() or offsets.is_complex() or offsets.dtype == torch.bool:
        raise ValueError(f"{name} must be a vector of integer offsets, got {shown(offsets)}")


def one_of(name: str, given: Any, known: Collection[str]) -> str:
    if not isinstance(given, str) or given not in known:
        raise ValueError(f"{name} {shown(given)} is not one of {', '.join(known)}")
    return given


def dtype(name: str, given: Any) -> torch.dtype | None:
    """A float dtype, or None for torch's default."""
    if given is not None and not (isinstance(given, torch.dtype) and given.is_floating_point):
        raise TypeError(f"{name} must be a float dtype of torch, got {shown(given)}")
    return given


def device(name: str, given: Any) -> torch.device:
    """What torch takes for a device."""
    if not isinstance(given, (torch.device, str, int)) or isinstance(given, bool):
        raise TypeError(f"{name} must be a device or its name, got {shown(given)}")
    try:
        return torch.device(given)
    except RuntimeError as error:
        raise ValueError(f"{name} {shown(given)} is no device: {str(error).splitlines()[0]}") from None


def function(name: str, given: Any) -> Any:
    """A function, or None where there is none."""
    if given is not None and not callable(given):
        raise TypeError(f"{name} must be a function, got {shown(given)}")
    return given
