"""Functions of torch on traced values, said in operators that :class:`~foveate._native.Expr` records.

They take and give 0-d values and know nothing of the function that is traced. What each dtype becomes is
torch's rule of promotion.
"""

from __future__ import annotations

import math
from typing import Any, Callable

import torch

from . import _native
from ._native import Expr, TraceError

#: What an operation takes for a traced value.
Scalar = Any


def _unary(name: str) -> Callable[..., Expr]:
    return lambda x: _native.unary(name, x)


def _binary(name: str) -> Callable[..., Expr]:
    return lambda a, b: _native.binary(name, a, b)


def _reflected(name: str) -> Callable[..., Expr]:
    return lambda a, b: _native.binary(name, b, a)


_where = _native.select


def _float(x: Scalar) -> Expr:
    """``x`` as torch converts it before a function of floats."""
    if isinstance(x, Expr) and x.dtype.is_floating_point:
        return x
    return cast(x, torch.get_default_dtype())


def cast(x: Scalar, dtype: torch.dtype) -> Expr:
    return x.cast(dtype) if isinstance(x, Expr) else _native.constant(x, dtype)


def _add(a: Scalar, b: Scalar, *, alpha: float = 1) -> Expr:
    return _native.binary("add", a, b if alpha == 1 else _native.binary("mul", b, alpha))


def _sub(a: Scalar, b: Scalar, *, alpha: float = 1) -> Expr:
    return _native.binary("sub", a, b if alpha == 1 else _native.binary("mul", b, alpha))


def _div(a: Scalar, b: Scalar, *, rounding_mode: str | None = None) -> Expr:
    if rounding_mode == "floor":
        return _native.binary("floordiv", a, b)
    quotient = _native.binary("truediv", a, b)
    if rounding_mode is None:
        return quotient
    if rounding_mode != "trunc":
        raise TraceError(f"`div` has no rounding_mode {rounding_mode!r}: None, 'floor' or 'trunc'")
    if _is_float(a) or _is_float(b):
        return _trunc(quotient)
    size = _native.binary("floordiv", abs(_value(a)), abs(_value(b)))
    return _where((_value(a) < 0) ^ (_value(b) < 0), -size, size)


def _value(x: Scalar) -> Expr:
    return x if isinstance(x, Expr) else _native.constant(x, torch.tensor(x).dtype)


def _is_float(x: Scalar) -> bool:
    return x.dtype.is_floating_point if isinstance(x, Expr) else isinstance(x, float)


def _fmod(a: Scalar, b: Scalar) -> Expr:
    return _sub(a, _native.binary("mul", _div(a, b, rounding_mode="trunc"), b))


def _trunc(x: Expr) -> Expr:
    return _where(x < 0, -_native.unary("floor", -x), _native.unary("floor", x)) if _is_float(x) else x


def _ceil(x: Expr) -> Expr:
    return -_native.unary("floor", -x) if _is_float(x) else x


def _round(x: Expr, *, decimals: int = 0) -> Expr:
    if not _is_float(x):
        return x
    if decimals:
        raise TraceError("`round` takes no decimals in a mask or score")
    low = _native.unary("floor", x)
    rest = x - low
    even = low * 0.5 == _native.unary("floor", low * 0.5)
    return _where((rest < 0.5) | ((rest == 0.5) & even), low, low + 1.0)


def _sign(x: Expr) -> Expr:
    if x.dtype == torch.bool:
        return x
    zero = cast(0, x.dtype)
    return _where(x > 0, zero + 1, _where(x < 0, zero - 1, _where(x == x, zero, x)))


def _clamp(x: Expr, min: Scalar = None, max: Scalar = None) -> Expr:
    if min is None and max is None:
        raise TraceError("`clamp` takes min, max or both")
    if max is not None and min is not None:
        # Where they cross, torch gives max.
        x = _where(x < min, min, x)
        return _where(x > max, max, x)
    return _where(x < min, min, x) if max is None else _where(x > max, max, x)


def _gelu(x: Expr, approximate: str = "none") -> Expr:
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
        return 0.5 * x * (1.0 + _native.unary("tanh", inner))
    return 0.5 * x * (1.0 + _native.unary("erf", x * math.sqrt(0.5)))


def _softplus(x: Expr, beta: float = 1.0, threshold: float = 20.0) -> Expr:
    scaled = x * beta
    linear = scaled > threshold
    small = _where(linear, 0.0, scaled)
    return _where(linear, x, _native.unary("log", 1.0 + _native.unary("exp", small)) / beta)


def _relu(x: Expr, inplace: bool = False) -> Expr:
    return _where(x <= 0, cast(0, x.dtype), x)


def _leaky_relu(x: Expr, negative_slope: float = 0.01, inplace: bool = False) -> Expr:
    return _where(x > 0, x, x * negative_slope)


def _sigmoid(x: Scalar) -> Expr:
    return _native.unary("sigmoid", _float(x))


def _logical(name: str) -> Callable[..., Expr]:
    return lambda a, b: _native.binary(name, cast(a, torch.bool), cast(b, torch.bool))


def _pow(a: Scalar, b: Scalar) -> Expr:
    if isinstance(b, float) and b == 0.5:
        return _native.unary("sqrt", a)
    return _native.binary("pow", a, b)


def _to(x: Expr, *args: Any, **kwargs: Any) -> Expr:
    dtype = kwargs.get("dtype")
    for arg in args:
        if isinstance(arg, torch.dtype):
            dtype = arg
        elif isinstance(arg, (Expr, torch.Tensor)):
            dtype = arg.dtype
    return x if dtype is None else cast(x, dtype)


def _same(x: Expr, *args: Any, **kwargs: Any) -> Expr:
    return x


def _filled(value: Any) -> Callable[..., Expr]:
    def make(x: Expr, size: Any = (), *more: int, dtype: torch.dtype | None = None, **_: Any) -> Expr:
        size = (size, *more) if isinstance(size, int) else tuple(size)
        _only_0d(size)
        return _native.constant(value, dtype or x.dtype)

    return make


def _new_full(x: Expr, size: Any, fill_value: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Expr:
    _only_0d(tuple(size))
    return cast(fill_value, dtype or x.dtype)


def _full_like(x: Expr, fill_value: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Expr:
    return cast(fill_value, dtype or x.dtype)


def _like(value: Any) -> Callable[..., Expr]:
    return lambda x, *, dtype=None, **_: _native.constant(value, dtype or x.dtype)


def _new_tensor(x: Expr, data: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Expr:
    return cast(data, dtype or torch.tensor(data).dtype)


def _only_0d(size: tuple[int, ...]) -> None:
    if math.prod(size) != 1:
        raise TraceError(f"a tensor of shape {tuple(size)} is made of a traced value; only 0-d ones can be")


def _item(x: Expr) -> Any:
    return int(x)


def _extreme(name: str) -> Callable[..., Expr]:
    def of(a: Expr, b: Scalar = None, *_: Any, **kwargs: Any) -> Expr:
        if b is None and not kwargs:
            return a
        if b is None:
            raise TraceError(f"`{name}` over an axis: a traced value is a 0-d tensor")
        return _native.binary(name, a, b)

    return of


def _isinf(x: Expr) -> Expr:
    return abs(_float(x)) == math.inf


def _addcmul(x: Scalar, a: Scalar, b: Scalar, *, value: float = 1) -> Expr:
    return _add(x, _native.binary("mul", a, b), alpha=value)


#: Torch's functions and methods by name, without underscores around it.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": _add,
    "radd": lambda a, b: _add(b, a),
    "sub": _sub,
    "subtract": _sub,
    "rsub": lambda a, b, *, alpha=1: _sub(b, a, alpha=alpha),
    "mul": _binary("mul"),
    "multiply": _binary("mul"),
    "rmul": _reflected("mul"),
    "div": _div,
    "divide": _div,
    "truediv": _div,
    "true_divide": _div,
    "rdiv": lambda a, b: _div(b, a),
    "rtruediv": lambda a, b: _div(b, a),
    "floor_divide": _binary("floordiv"),
    "floordiv": _binary("floordiv"),
    "rfloordiv": _reflected("floordiv"),
    "remainder": _binary("mod"),
    "mod": _binary("mod"),
    "rmod": _reflected("mod"),
    "fmod": _fmod,
    "pow": _pow,
    "rpow": lambda a, b: _pow(b, a),
    "float_power": lambda a, b: _pow(_float(a), b),
    "square": lambda x: x * x,
    "neg": _unary("neg"),
    "negative": _unary("neg"),
    "positive": _same,
    "abs": _unary("abs"),
    "absolute": _unary("abs"),
    "sign": _sign,
    "and": _binary("and"),
    "rand": _reflected("and"),
    "bitwise_and": _binary("and"),
    "or": _binary("or"),
    "ror": _reflected("or"),
    "bitwise_or": _binary("or"),
    "xor": _binary("xor"),
    "rxor": _reflected("xor"),
    "bitwise_xor": _binary("xor"),
    "invert": _unary("invert"),
    "bitwise_not": _unary("invert"),
    "lshift": _binary("lshift"),
    "bitwise_left_shift": _binary("lshift"),
    "rlshift": _reflected("lshift"),
    "rshift": _binary("rshift"),
    "bitwise_right_shift": _binary("rshift"),
    "rrshift": _reflected("rshift"),
    "lt": _binary("lt"),
    "less": _binary("lt"),
    "le": _binary("le"),
    "less_equal": _binary("le"),
    "gt": _binary("gt"),
    "greater": _binary("gt"),
    "ge": _binary("ge"),
    "greater_equal": _binary("ge"),
    "eq": _binary("eq"),
    "ne": _binary("ne"),
    "not_equal": _binary("ne"),
    "logical_and": _logical("and"),
    "logical_or": _logical("or"),
    "logical_xor": _logical("xor"),
    "logical_not": lambda x: _native.unary("invert", cast(x, torch.bool)),
    "where": lambda cond, x, y: _where(cond, x, y),
    "masked_fill": lambda x, mask, value: cast(_where(mask, value, x), x.dtype),
    "minimum": _binary("min"),
    "maximum": _binary("max"),
    "min": _extreme("min"),
    "max": _extreme("max"),
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": lambda x, min: _clamp(x, min=min),
    "clamp_max": lambda x, max: _clamp(x, max=max),
    "relu": _relu,
    "leaky_relu": _leaky_relu,
    "gelu": _gelu,
    "silu": lambda x, inplace=False: x * _sigmoid(x),
    "softplus": _softplus,
    "log_sigmoid": lambda x: -_softplus(-x),
    "logsigmoid": lambda x: -_softplus(-x),
    "tanh": _unary("tanh"),
    "sigmoid": _sigmoid,
    "expit": _sigmoid,
    "exp": _unary("exp"),
    "exp2": _unary("exp2"),
    "expm1": lambda x: _native.unary("exp", x) - 1.0,
    "log": _unary("log"),
    "log2": _unary("log2"),
    "log10": lambda x: _native.unary("log", x) * (1 / math.log(10)),
    "log1p": lambda x: _native.unary("log", 1.0 + _float(x)),
    "sqrt": _unary("sqrt"),
    "rsqrt": _unary("rsqrt"),
    "reciprocal": lambda x: 1.0 / x,
    "erf": _unary("erf"),
    "sin": _unary("sin"),
    "cos": _unary("cos"),
    "tan": lambda x: _native.unary("sin", x) / _native.unary("cos", x),
    "floor": _unary("floor"),
    "ceil": _ceil,
    "trunc": _trunc,
    "fix": _trunc,
    "round": _round,
    "isnan": lambda x: x != x,
    "isinf": _isinf,
    "isneginf": lambda x: _float(x) == -math.inf,
    "isposinf": lambda x: _float(x) == math.inf,
    "isfinite": lambda x: abs(_float(x)) < math.inf,
    "addcmul": _addcmul,
    "lerp": lambda a, b, weight: a + weight * (b - a),
    "to": _to,
    "type": _to,
    "type_as": _to,
    "bool": lambda x: cast(x, torch.bool),
    "int": lambda x: cast(x, torch.int32),
    "long": lambda x: cast(x, torch.int64),
    "short": lambda x: cast(x, torch.int16),
    "char": lambda x: cast(x, torch.int8),
    "byte": lambda x: cast(x, torch.uint8),
    "float": lambda x: cast(x, torch.float32),
    "double": lambda x: cast(x, torch.float64),
    "half": lambda x: cast(x, torch.float16),
    "bfloat16": lambda x: cast(x, torch.bfloat16),
    "clone": _same,
    "contiguous": _same,
    "cpu": _same,
    "squeeze": _same,
    "new_ones": _filled(1),
    "new_zeros": _filled(0),
    "new_full": _new_full,
    "new_tensor": _new_tensor,
    "ones_like": _like(1),
    "zeros_like": _like(0),
    "full_like": _full_like,
    "item": _item,
    "dim": lambda x: 0,
    "size": lambda x: torch.Size(()),
    "numel": lambda x: 1,
    "is_floating_point": lambda x: x.dtype.is_floating_point,
    "is_tensor": lambda x: True,
}
