"""What every operation is said in: the tracer's own operations, and torch's conversions of what they take."""

from __future__ import annotations

from typing import Any, Callable

import torch

from .. import _native
from .._native import Expr

#: What an operation takes for a traced value.
Scalar = Any


def unary(name: str) -> Callable[..., Expr]:
    return lambda x: _native.unary(name, x)


def binary(name: str) -> Callable[..., Expr]:
    return lambda a, b: _native.binary(name, a, b)


def reflected(name: str) -> Callable[..., Expr]:
    return lambda a, b: _native.binary(name, b, a)


where = _native.select


def floating(x: Scalar) -> Expr:
    """``x`` as torch converts it before a function of floats."""
    if isinstance(x, Expr) and x.dtype.is_floating_point:
        return x
    return cast(x, torch.get_default_dtype())


def cast(x: Scalar, dtype: torch.dtype) -> Expr:
    return x.cast(dtype) if isinstance(x, Expr) else _native.constant(x, dtype)


def own(number: float, like: Expr) -> Expr:
    """A number of the tracer's own beside ``like``: part of the structure."""
    return _native.literal(number, like.dtype)


def valued(x: Scalar) -> Expr:
    return x if isinstance(x, Expr) else _native.constant(x, torch.tensor(x).dtype)


def is_float(x: Scalar) -> bool:
    return x.dtype.is_floating_point if isinstance(x, Expr) else isinstance(x, float)


def same(x: Expr, *args: Any, **kwargs: Any) -> Expr:
    return x
