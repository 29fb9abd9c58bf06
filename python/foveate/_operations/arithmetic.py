"""Arithmetic, bits and rounding on traced values."""

from __future__ import annotations

from typing import Any, Callable

import torch

from .. import _native
from .._native import Expr, TraceError
from .base import binary, cast, floating, is_float, own, reflected, same, Scalar, unary, valued, where


def _add(a: Scalar, b: Scalar, *, alpha: float | None = None) -> Expr:
    return _native.binary("add", a, b if alpha is None else _native.binary("mul", b, alpha))


def _sub(a: Scalar, b: Scalar, *, alpha: float | None = None) -> Expr:
    return _native.binary("sub", a, b if alpha is None else _native.binary("mul", b, alpha))


def _div(a: Scalar, b: Scalar, *, rounding_mode: str | None = None) -> Expr:
    if rounding_mode == "floor":
        return _native.binary("floordiv", a, b)
    quotient = _native.binary("truediv", a, b)
    if rounding_mode is None:
        return quotient
    if rounding_mode != "trunc":
        raise TraceError(f"`div` has no rounding_mode {rounding_mode!r}: None, 'floor' or 'trunc'")
    if is_float(a) or is_float(b):
        return _trunc(quotient)
    size = _native.binary("floordiv", abs(valued(a)), abs(valued(b)))
    return where(_negative(valued(a)) ^ _negative(valued(b)), -size, size)


def _negative(x: Expr) -> Expr:
    return x < own(0, x)


def _fmod(a: Scalar, b: Scalar) -> Expr:
    return _sub(a, _native.binary("mul", _div(a, b, rounding_mode="trunc"), b))


def _trunc(x: Expr) -> Expr:
    return where(_negative(x), -_native.unary("floor", -x), _native.unary("floor", x)) if is_float(x) else x


def _ceil(x: Expr) -> Expr:
    return -_native.unary("floor", -x) if is_float(x) else x


def _round(x: Expr, *, decimals: int = 0) -> Expr:
    if not is_float(x):
        return x
    if decimals:
        raise TraceError("`round` takes no decimals in a mask or score")
    low = _native.unary("floor", x)
    rest = x - low
    half = own(0.5, x)
    even = low * half == _native.unary("floor", low * half)
    return where((rest < half) | ((rest == half) & even), low, low + own(1, x))


def _sign(x: Expr) -> Expr:
    if x.dtype == torch.bool:
        return x
    zero = own(0, x)
    return where(x > zero, own(1, x), where(x < zero, own(-1, x), where(x == x, zero, x)))


def _reciprocal(x: Scalar) -> Expr:
    x = floating(x)
    return _native.binary("truediv", own(1, x), x)


def _pow(a: Scalar, b: Scalar) -> Expr:
    if isinstance(b, float) and b == 0.5:
        return _native.unary("sqrt", a)
    return _native.binary("pow", a, b)


def _addcmul(x: Scalar, a: Scalar, b: Scalar, *, value: float | None = None) -> Expr:
    return _add(x, _native.binary("mul", a, b), alpha=value)


def signbit(x: Expr) -> Expr:
    """Of -0.0 too."""
    return _negative(x) | _negative(own(1, x) / x) if is_float(x) else _negative(x)


def _copysign(a: Scalar, b: Scalar) -> Expr:
    size = abs(floating(a))
    return where(signbit(valued(b)), -size, size)


def _heaviside(x: Expr, values: Scalar) -> Expr:
    zero = own(0, x)
    return where(x == zero, values, where(x > zero, own(1, x), zero))


def _hypot(a: Scalar, b: Scalar) -> Expr:
    return _native.unary("sqrt", _native.binary("mul", a, a) + _native.binary("mul", b, b))


def _ldexp(x: Scalar, exponent: Scalar) -> Expr:
    return floating(x) * _native.unary("exp2", floating(exponent))


def _addcdiv(x: Scalar, a: Scalar, b: Scalar, *, value: float | None = None) -> Expr:
    return _add(x, _native.binary("truediv", a, b), alpha=value)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": _add,
    "radd": lambda a, b: _add(b, a),
    "sub": _sub,
    "subtract": _sub,
    "rsub": lambda a, b, *, alpha=None: _sub(b, a, alpha=alpha),
    "mul": binary("mul"),
    "multiply": binary("mul"),
    "rmul": reflected("mul"),
    "div": _div,
    "divide": _div,
    "truediv": _div,
    "true_divide": _div,
    "rdiv": lambda a, b: _div(b, a),
    "rtruediv": lambda a, b: _div(b, a),
    "floor_divide": binary("floordiv"),
    "floordiv": binary("floordiv"),
    "rfloordiv": reflected("floordiv"),
    "remainder": binary("mod"),
    "mod": binary("mod"),
    "rmod": reflected("mod"),
    "fmod": _fmod,
    "pow": _pow,
    "rpow": lambda a, b: _pow(b, a),
    "float_power": lambda a, b: _pow(floating(a), b),
    "square": lambda x: x * x,
    "reciprocal": _reciprocal,
    "neg": unary("neg"),
    "negative": unary("neg"),
    "positive": same,
    "abs": unary("abs"),
    "absolute": unary("abs"),
    "sign": _sign,
    "sgn": _sign,
    "signbit": signbit,
    "copysign": _copysign,
    "heaviside": _heaviside,
    "frac": lambda x: x - _trunc(x),
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "lerp": lambda a, b, weight: a + weight * (b - a),
    "hypot": _hypot,
    "ldexp": _ldexp,
    "and": binary("and"),
    "rand": reflected("and"),
    "bitwise_and": binary("and"),
    "or": binary("or"),
    "ror": reflected("or"),
    "bitwise_or": binary("or"),
    "xor": binary("xor"),
    "rxor": reflected("xor"),
    "bitwise_xor": binary("xor"),
    "invert": unary("invert"),
    "bitwise_not": unary("invert"),
    "lshift": binary("lshift"),
    "bitwise_left_shift": binary("lshift"),
    "rlshift": reflected("lshift"),
    "rshift": binary("rshift"),
    "bitwise_right_shift": binary("rshift"),
    "rrshift": reflected("rshift"),
    "floor": unary("floor"),
    "ceil": _ceil,
    "trunc": _trunc,
    "fix": _trunc,
    "round": _round,
}
