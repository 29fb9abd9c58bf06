"""Comparisons of traced values, logic, choices and extremes."""

from __future__ import annotations

import math
from typing import Any, Callable

import torch

from .. import _native
from .._native import Expr, TraceError
from .base import binary, cast, floating, is_float, own, Scalar, valued, where


def clamp(x: Expr, min: Scalar = None, max: Scalar = None) -> Expr:
    if min is None and max is None:
        raise TraceError("`clamp` takes min, max or both")
    if max is not None and min is not None:
        # Where they cross, torch gives max.
        x = where(x < min, min, x)
        return where(x > max, max, x)
    return where(x < min, min, x) if max is None else where(x > max, max, x)


def _logical(name: str) -> Callable[..., Expr]:
    return lambda a, b: _native.binary(name, cast(a, torch.bool), cast(b, torch.bool))


def _extreme(name: str) -> Callable[..., Expr]:
    def of(a: Expr, b: Scalar = None, *_: Any, **kwargs: Any) -> Expr:
        if b is None and not kwargs:
            return a
        if b is None:
            raise TraceError(f"`{name}` over an axis: a traced value is a 0-d tensor")
        return _native.binary(name, a, b)

    return of


def _isinf(x: Expr) -> Expr:
    return abs(floating(x)) == math.inf


def _one_that_is_a_number(name: str) -> Callable[..., Expr]:
    def of(a: Scalar, b: Scalar) -> Expr:
        both, a, b = _native.binary(name, a, b), valued(a), valued(b)
        return where(a != a, b, where(b != b, a, both))

    return of


def _nan_to_num(x: Expr, nan: float | None = None, posinf: float | None = None, neginf: float | None = None) -> Expr:
    if not is_float(x):
        return x
    most = min(torch.finfo(x.dtype).max, torch.finfo(torch.float32).max)
    infinite = own(math.inf, x)
    x = where(x == infinite, own(most, x) if posinf is None else posinf, x)
    x = where(x == -infinite, own(-most, x) if neginf is None else neginf, x)
    return where(x != x, own(0, x) if nan is None else nan, x)


def _isclose(a: Expr, b: Scalar, rtol: float | None = None, atol: float | None = None, equal_nan: bool = False) -> Expr:
    b = valued(b)
    apart = abs(floating(a) - b)
    near = own(1e-5, apart) if rtol is None else rtol, own(1e-8, apart) if atol is None else atol
    close: Expr = (a == b) | ((apart < own(math.inf, apart)) & (apart <= near[1] + abs(near[0] * floating(b))))
    return close | ((a != a) & (b != b)) if equal_nan else close


OPERATIONS: dict[str, Callable[..., Any]] = {
    "lt": binary("lt"),
    "less": binary("lt"),
    "le": binary("le"),
    "less_equal": binary("le"),
    "gt": binary("gt"),
    "greater": binary("gt"),
    "ge": binary("ge"),
    "greater_equal": binary("ge"),
    "eq": binary("eq"),
    "ne": binary("ne"),
    "not_equal": binary("ne"),
    "isnan": lambda x: x != x,
    "isinf": _isinf,
    "isneginf": lambda x: floating(x) == -math.inf,
    "isposinf": lambda x: floating(x) == math.inf,
    "isfinite": lambda x: abs(floating(x)) < math.inf,
    "isclose": _isclose,
    "logical_and": _logical("and"),
    "logical_or": _logical("or"),
    "logical_xor": _logical("xor"),
    "logical_not": lambda x: _native.unary("invert", cast(x, torch.bool)),
    "where": lambda cond, x, y: where(cond, x, y),
    "masked_fill": lambda x, mask, value: cast(where(mask, value, x), x.dtype),
    "nan_to_num": _nan_to_num,
    "minimum": binary("min"),
    "maximum": binary("max"),
    "min": _extreme("min"),
    "max": _extreme("max"),
    "fmin": _one_that_is_a_number("min"),
    "fmax": _one_that_is_a_number("max"),
    "clamp": clamp,
    "clip": clamp,
    "clamp_min": lambda x, min: clamp(x, min=min),
    "clamp_max": lambda x, max: clamp(x, max=max),
}
