"""Functions of one real number, or two, that the tracer's own make."""

from __future__ import annotations

import math
from typing import Any, Callable

from .. import _native
from .._native import Expr
from .arithmetic import signbit
from .base import floating, own, Scalar, unary, valued, where
from .comparisons import clamp


def sigmoid(x: Scalar) -> Expr:
    return _native.unary("sigmoid", floating(x))


def log1p(x: Scalar) -> Expr:
    """With what the rounding of ``1 + x`` left out, to first order; that is of no matter to the gradient."""
    x = floating(x)
    total = own(1, x) + x
    inside = (x > own(-1, x)) & (x < own(math.inf, x))
    left = where(inside, x - (total - own(1, x)), own(0, x))
    return _native.unary("log", total) + left / where(inside, total, own(1, x))


def expm1(x: Scalar) -> Expr:
    """Near 0 by its series, whose next term is below f32's rounding there."""
    x = floating(x)
    near = abs(x) < own(0.35, x)
    small = where(near, x, own(0, x))
    series = own(1 / math.factorial(8), x)
    for n in range(7, 0, -1):
        series = series * small + own(1 / math.factorial(n), x)
    return where(near, series * small, _native.unary("exp", x) - own(1, x))


def _erfc(x: Scalar) -> Expr:
    """Where ``1 - erf(x)`` cancels, ``t exp(p(t) - x²)`` with ``t = 2 / (2 + x)``: ``p`` was fitted to what it takes at
    Chebyshev points of ``x`` from 0.5 to 10.5, where f32 has no more of it, within 4e-8."""
    x = floating(x)
    far = x > own(0.5, x)
    one, two = own(1, x), own(2, x)
    size = where(far, x, one)
    t = two / (two + size)
    series = own(-0.09685511, x)
    for term in (0.15138604, 0.26961522, -0.64768639, 0.21116484, -0.013858277, 0.39329169, 0.9981499, -1.2654344):
        series = series * t + own(term, x)
    return where(far, t * _native.unary("exp", series - size * size), one - _native.unary("erf", x))


def _sinh(x: Scalar) -> Expr:
    x = floating(x)
    near = abs(x) < own(0.35, x)
    grown = expm1(where(near, x, own(0, x)))
    apart = _native.unary("exp", x) - _native.unary("exp", -x)
    return where(near, grown + grown / (grown + own(1, x)), apart) / own(2, x)


def _cosh(x: Scalar) -> Expr:
    x = floating(x)
    return (_native.unary("exp", x) + _native.unary("exp", -x)) / own(2, x)


def _asinh(x: Scalar) -> Expr:
    x = floating(x)
    size = abs(x)
    # Far from 0 its square is no number of f32, and `sqrt(1 + size²)` is `size`.
    near = size < own(1e4, x)
    zero, one = own(0, x), own(1, x)
    small = where(near, size, zero)
    close = log1p(small + small * small / (one + _native.unary("sqrt", small * small + one)))
    size = where(near, close, _native.unary("log", where(near, one, size)) + own(math.log(2), x))
    return where(x < zero, -size, size)


def _acosh(x: Scalar) -> Expr:
    x = floating(x)
    return _native.unary("log", x + _native.unary("sqrt", x * x - own(1, x)))


def _atanh(x: Scalar) -> Expr:
    x = floating(x)
    two = own(2, x)
    return log1p(two * x / (own(1, x) - x)) / two


def _atan(x: Scalar) -> Expr:
    """Cephes' ``atanf``: the argument is brought to at most tan(pi/8), where a polynomial is exact to f32."""
    x = floating(x)
    size = abs(x)
    far, middle = size > own(2.414213562373095, x), size > own(0.4142135623730951, x)
    zero, one = own(0, x), own(1, x)
    small = where(far, -one / where(far, size, one), where(middle, (size - one) / (size + one), size))
    z = small * small
    series = own(8.05374449538e-2, x)
    for term in (-1.38776856032e-1, 1.99777106478e-1, -3.33329491539e-1):
        series = series * z + own(term, x)
    angle = where(far, own(math.pi / 2, x), where(middle, own(math.pi / 4, x), zero)) + (series * z * small + small)
    return where(x < zero, -angle, angle)


def _atan2(y: Scalar, x: Scalar) -> Expr:
    y, x = floating(y), floating(x)
    zero = (x == own(0, x)) & (y == own(0, y))
    inner = _atan(where(zero, own(0, y), y) / where(zero, own(1, x), x))
    half_turn = where(signbit(y), own(-math.pi, y), own(math.pi, y))
    return where(signbit(x), inner + half_turn, inner)


def _asin(x: Scalar) -> Expr:
    x = floating(x)
    one = own(1, x)
    return _atan(x / _native.unary("sqrt", (one - x) * (one + x)))


def _acos(x: Scalar) -> Expr:
    angle = _asin(x)
    return own(math.pi / 2, angle) - angle


def _logaddexp(base: str) -> Callable[..., Expr]:
    exp, log, two = ("exp", "log", math.log(2)) if base == "e" else ("exp2", "log2", 1)

    def of(a: Scalar, b: Scalar) -> Expr:
        a, b = floating(a), floating(b)
        # Of equal ones, infinite ones too, the difference is not taken.
        same = a == b
        apart = where(same, own(0, a), -abs(a - b))
        total = _native.binary("max", a, b) + _native.unary(log, own(1, a) + _native.unary(exp, apart))
        return where(same, (a + b) / own(2, a) + own(two, total), total)

    return of


def _times(log: Callable[[Scalar], Expr], inside: int) -> Callable[..., Expr]:
    """``x * log(y)``, 0 where ``x`` is; ``inside`` is a number of which there is a logarithm."""

    def of(x: Scalar, y: Scalar) -> Expr:
        x, y = valued(x), floating(y)
        zero = (x == own(0, x)) & (y == y)
        return where(zero, own(0, x), x * log(where(zero, own(inside, y), y)))

    return of


def _logit(x: Scalar, eps: float | None = None) -> Expr:
    x = floating(x)
    if eps is not None:
        x = clamp(x, eps, 1 - eps)
    return _native.unary("log", x / (own(1, x) - x))


def _sinc(x: Scalar) -> Expr:
    x = floating(x)
    zero, one = x == own(0, x), own(1, x)
    turned = own(math.pi, x) * where(zero, one, x)
    return where(zero, one, _native.unary("sin", turned) / turned)


def _entr(x: Scalar) -> Expr:
    x = floating(x)
    zero = own(0, x)
    inside = where(x > zero, x, own(1, x))
    outside = where(x == zero, zero, where(x < zero, own(-math.inf, x), x))
    return where(x > zero, -inside * _native.unary("log", inside), outside)


def _scaled(by: float) -> Callable[..., Expr]:
    return lambda x: floating(x) * own(by, floating(x))


def _ndtr(x: Scalar) -> Expr:
    x = floating(x)
    return _erfc(x * own(-math.sqrt(0.5), x)) / own(2, x)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "exp": unary("exp"),
    "exp2": unary("exp2"),
    "expm1": expm1,
    "log": unary("log"),
    "log2": unary("log2"),
    "log10": lambda x: _scaled(1 / math.log(10))(_native.unary("log", x)),
    "log1p": log1p,
    "sqrt": unary("sqrt"),
    "rsqrt": unary("rsqrt"),
    "sin": unary("sin"),
    "cos": unary("cos"),
    "tan": lambda x: _native.unary("sin", x) / _native.unary("cos", x),
    "tanh": unary("tanh"),
    "sigmoid": sigmoid,
    "expit": sigmoid,
    "logit": _logit,
    "erf": unary("erf"),
    "erfc": _erfc,
    "ndtr": _ndtr,
    "sinc": _sinc,
    "sinh": _sinh,
    "cosh": _cosh,
    "asin": _asin,
    "arcsin": _asin,
    "acos": _acos,
    "arccos": _acos,
    "atan": _atan,
    "arctan": _atan,
    "atan2": _atan2,
    "arctan2": _atan2,
    "asinh": _asinh,
    "arcsinh": _asinh,
    "acosh": _acosh,
    "arccosh": _acosh,
    "atanh": _atanh,
    "arctanh": _atanh,
    "logaddexp": _logaddexp("e"),
    "logaddexp2": _logaddexp("2"),
    "xlogy": _times(unary("log"), 1),
    "xlog1py": _times(log1p, 0),
    "entr": _entr,
    "deg2rad": _scaled(math.pi / 180),
    "rad2deg": _scaled(180 / math.pi),
}
