"""Activations of ``torch.nn.functional`` on traced values."""

from __future__ import annotations

import math
from typing import Any, Callable

from .. import _native
from .._native import Expr, TraceError
from .base import cast, floating, own, Scalar, where
from .comparisons import clamp
from .functions import expm1, log1p, sigmoid


def _gelu(x: Expr, approximate: str = "none") -> Expr:
    if approximate == "tanh":
        inner = own(math.sqrt(2 / math.pi), x) * (x + own(0.044715, x) * x * x * x)
        return own(0.5, x) * x * (own(1, x) + _native.unary("tanh", inner))
    return own(0.5, x) * x * (own(1, x) + _native.unary("erf", x * own(math.sqrt(0.5), x)))


def _softplus(x: Expr, beta: float = 1.0, threshold: float = 20.0) -> Expr:
    scaled = x * beta
    linear = scaled > threshold
    small = where(linear, own(0, x), scaled)
    return where(linear, x, log1p(_native.unary("exp", small)) / beta)


def _silu(x: Expr, inplace: bool = False) -> Expr:
    _not_in_place("silu", inplace)
    return x * sigmoid(x)


def _relu(x: Expr, inplace: bool = False) -> Expr:
    _not_in_place("relu", inplace)
    zero = own(0, x)
    return where(x <= zero, zero, x)


def _leaky_relu(x: Expr, negative_slope: float = 0.01, inplace: bool = False) -> Expr:
    _not_in_place("leaky_relu", inplace)
    return where(x > own(0, x), x, x * negative_slope)


def _neg_part(x: Scalar, alpha: Scalar) -> Expr:
    """``alpha * (exp(x / alpha) - 1)`` where ``x`` is negative; elsewhere 0, with nothing that overflows."""
    x = floating(x)
    zero = own(0, x)
    grown: Expr = alpha * expm1(where(x > zero, zero, x) / alpha)
    return grown


def _elu(x: Expr, alpha: float | None = None, inplace: bool = False) -> Expr:
    _not_in_place("elu", inplace)
    grown = _neg_part(x, own(1, x))
    return where(x > own(0, x), x, grown if alpha is None else alpha * grown)


def _celu(x: Expr, alpha: float | None = None, inplace: bool = False) -> Expr:
    _not_in_place("celu", inplace)
    return where(x > own(0, x), x, _neg_part(x, own(1, x) if alpha is None else alpha))


def _selu(x: Expr, inplace: bool = False) -> Expr:
    _not_in_place("selu", inplace)
    scale, alpha = own(1.0507009873554805, x), own(1.6732632423543772, x)
    return scale * where(x > own(0, x), x, alpha * _neg_part(x, own(1, x)))


def _hardtanh(x: Expr, min_val: Scalar = None, max_val: Scalar = None, inplace: bool = False) -> Expr:
    _not_in_place("hardtanh", inplace)
    return clamp(x, own(-1, x) if min_val is None else min_val, own(1, x) if max_val is None else max_val)


def _relu6(x: Expr, inplace: bool = False) -> Expr:
    return _hardtanh(x, own(0, x), own(6, x), inplace)


def _hardsigmoid(x: Expr, inplace: bool = False) -> Expr:
    return _relu6(x + own(3, x), inplace) / own(6, x)


def _hardswish(x: Expr, inplace: bool = False) -> Expr:
    return x * _hardsigmoid(x, inplace)


def _hardshrink(x: Expr, lambd: float | None = None) -> Expr:
    return where(abs(x) <= (own(0.5, x) if lambd is None else lambd), own(0, x), x)


def _softshrink(x: Expr, lambd: float | None = None) -> Expr:
    by = own(0.5, x) if lambd is None else lambd
    return where(x > by, x - by, where(x < -by, x + by, own(0, x) * x))


def _mish(x: Expr, inplace: bool = False) -> Expr:
    _not_in_place("mish", inplace)
    return x * _native.unary("tanh", _softplus(x))


def _threshold(x: Expr, threshold: float, value: float, inplace: bool = False) -> Expr:
    _not_in_place("threshold", inplace)
    return where(x > threshold, x, cast(value, x.dtype))


def _not_in_place(name: str, inplace: bool) -> None:
    if inplace:
        raise TraceError(f"`{name}` cannot write into a traced value: leave out inplace")


OPERATIONS: dict[str, Callable[..., Any]] = {
    "relu": _relu,
    "leaky_relu": _leaky_relu,
    "gelu": _gelu,
    "silu": _silu,
    "softplus": _softplus,
    "logsigmoid": lambda x: -_softplus(-x),
    "log_sigmoid": lambda x: -_softplus(-x),
    "elu": _elu,
    "celu": _celu,
    "selu": _selu,
    "relu6": _relu6,
    "hardtanh": _hardtanh,
    "hardsigmoid": _hardsigmoid,
    "hardswish": _hardswish,
    "hardshrink": _hardshrink,
    "softshrink": _softshrink,
    "tanhshrink": lambda x: x - _native.unary("tanh", x),
    "softsign": lambda x: x / (own(1, x) + abs(x)),
    "mish": _mish,
    "threshold": _threshold,
}
