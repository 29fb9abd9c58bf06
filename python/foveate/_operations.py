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


def _own(number: float, like: Expr) -> Expr:
    """A number of the tracer's own beside ``like``: part of the structure, as 0, 1 and 2 always are."""
    return _native.literal(number, like.dtype)


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


def _silu(x: Expr, inplace: bool = False) -> Expr:
    _not_in_place("silu", inplace)
    return x * _sigmoid(x)


def _relu(x: Expr, inplace: bool = False) -> Expr:
    _not_in_place("relu", inplace)
    return _where(x <= 0, cast(0, x.dtype), x)


def _leaky_relu(x: Expr, negative_slope: float = 0.01, inplace: bool = False) -> Expr:
    _not_in_place("leaky_relu", inplace)
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


def _neg_part(x: Scalar, alpha: float = 1) -> Expr:
    """``alpha * (exp(x / alpha) - 1)`` where ``x`` is negative; elsewhere 0, with nothing that overflows."""
    x = _float(x)
    return alpha * (_native.unary("exp", _where(x > 0, 0, x) / alpha) - 1)


def _elu(x: Expr, alpha: float = 1, inplace: bool = False) -> Expr:
    _not_in_place("elu", inplace)
    return _where(x > 0, x, alpha * _neg_part(x))


def _celu(x: Expr, alpha: float = 1, inplace: bool = False) -> Expr:
    _not_in_place("celu", inplace)
    return _where(x > 0, x, _neg_part(x, alpha))


def _selu(x: Expr, inplace: bool = False) -> Expr:
    _not_in_place("selu", inplace)
    scale, alpha = _own(1.0507009873554805, x), _own(1.6732632423543772, x)
    return scale * _where(x > 0, x, alpha * _neg_part(x))


def _hardtanh(x: Expr, min_val: Scalar = -1, max_val: Scalar = 1, inplace: bool = False) -> Expr:
    _not_in_place("hardtanh", inplace)
    return _clamp(x, min_val, max_val)


def _relu6(x: Expr, inplace: bool = False) -> Expr:
    return _hardtanh(x, 0, _own(6, x), inplace)


def _hardsigmoid(x: Expr, inplace: bool = False) -> Expr:
    return _relu6(x + _own(3, x), inplace) / _own(6, x)


def _hardswish(x: Expr, inplace: bool = False) -> Expr:
    return x * _hardsigmoid(x, inplace)


def _hardshrink(x: Expr, lambd: float | None = None) -> Expr:
    return _where(abs(x) <= (_own(0.5, x) if lambd is None else lambd), 0, x)


def _softshrink(x: Expr, lambd: float | None = None) -> Expr:
    by = _own(0.5, x) if lambd is None else lambd
    return _where(x > by, x - by, _where(x < -by, x + by, 0 * x))


def _mish(x: Expr, inplace: bool = False) -> Expr:
    _not_in_place("mish", inplace)
    return x * _native.unary("tanh", _softplus(x))


def _threshold(x: Expr, threshold: float, value: float, inplace: bool = False) -> Expr:
    _not_in_place("threshold", inplace)
    return _where(x > threshold, x, cast(value, x.dtype))


def _not_in_place(name: str, inplace: bool) -> None:
    if inplace:
        raise TraceError(f"`{name}` cannot write into a traced value: leave out inplace")


def _sinh(x: Scalar) -> Expr:
    x = _float(x)
    return (_native.unary("exp", x) - _native.unary("exp", -x)) / 2


def _cosh(x: Scalar) -> Expr:
    x = _float(x)
    return (_native.unary("exp", x) + _native.unary("exp", -x)) / 2


def _asinh(x: Scalar) -> Expr:
    x = _float(x)
    size = abs(x)
    size = _native.unary("log", size + _native.unary("sqrt", size * size + 1))
    return _where(x < 0, -size, size)


def _acosh(x: Scalar) -> Expr:
    x = _float(x)
    return _native.unary("log", x + _native.unary("sqrt", x * x - 1))


def _atanh(x: Scalar) -> Expr:
    x = _float(x)
    return _native.unary("log", (1 + x) / (1 - x)) / 2


def _atan(x: Scalar) -> Expr:
    """Cephes' ``atanf``: the argument is brought to at most tan(pi/8), where a polynomial is exact to f32."""
    x = _float(x)
    size = abs(x)
    far, middle = size > _own(2.414213562373095, x), size > _own(0.4142135623730951, x)
    small = _where(far, -1 / _where(far, size, 1), _where(middle, (size - 1) / (size + 1), size))
    z = small * small
    series = _own(8.05374449538e-2, x)
    for term in (-1.38776856032e-1, 1.99777106478e-1, -3.33329491539e-1):
        series = series * z + _own(term, x)
    angle = _where(far, _own(math.pi / 2, x), _where(middle, _own(math.pi / 4, x), 0)) + (series * z * small + small)
    return _where(x < 0, -angle, angle)


def _atan2(y: Scalar, x: Scalar) -> Expr:
    y, x = _float(y), _float(x)
    zero = (x == 0) & (y == 0)
    inner = _atan(_where(zero, 0, y) / _where(zero, 1, x))
    half_turn = _where(_signbit(y), _own(-math.pi, y), _own(math.pi, y))
    return _where(_signbit(x), inner + half_turn, inner)


def _asin(x: Scalar) -> Expr:
    x = _float(x)
    return _atan(x / _native.unary("sqrt", (1 - x) * (1 + x)))


def _acos(x: Scalar) -> Expr:
    angle = _asin(x)
    return _own(math.pi / 2, angle) - angle


def _signbit(x: Expr) -> Expr:
    """Of -0.0 too."""
    return (x < 0) | (1 / x < 0) if _is_float(x) else x < 0


def _copysign(a: Scalar, b: Scalar) -> Expr:
    size = abs(_float(a))
    return _where(_signbit(_value(b)), -size, size)


def _heaviside(x: Expr, values: Scalar) -> Expr:
    return _where(x == 0, values, _where(x > 0, _own(1, x), _own(0, x)))


def _one_that_is_a_number(name: str) -> Callable[..., Expr]:
    def of(a: Scalar, b: Scalar) -> Expr:
        both, a, b = _native.binary(name, a, b), _value(a), _value(b)
        return _where(a != a, b, _where(b != b, a, both))

    return of


def _hypot(a: Scalar, b: Scalar) -> Expr:
    return _native.unary("sqrt", _native.binary("mul", a, a) + _native.binary("mul", b, b))


def _logaddexp(base: str) -> Callable[..., Expr]:
    exp, log, two = ("exp", "log", math.log(2)) if base == "e" else ("exp2", "log2", 1)

    def of(a: Scalar, b: Scalar) -> Expr:
        a, b = _float(a), _float(b)
        # Of equal ones, infinite ones too, the difference is not taken.
        same = a == b
        apart = _where(same, 0, -abs(a - b))
        total = _native.binary("max", a, b) + _native.unary(log, 1 + _native.unary(exp, apart))
        return _where(same, (a + b) / 2 + _own(two, total), total)

    return of


def _times_log(shift: int) -> Callable[..., Expr]:
    def of(x: Scalar, y: Scalar) -> Expr:
        x, y = _value(x), _float(y) + shift
        zero = (x == 0) & (y == y)
        return _where(zero, 0, x * _native.unary("log", _where(zero, 1, y)))

    return of


def _nan_to_num(x: Expr, nan: float | None = None, posinf: float | None = None, neginf: float | None = None) -> Expr:
    if not _is_float(x):
        return x
    most = min(torch.finfo(x.dtype).max, torch.finfo(torch.float32).max)
    infinite = _own(math.inf, x)
    x = _where(x == infinite, _own(most, x) if posinf is None else posinf, x)
    x = _where(x == -infinite, _own(-most, x) if neginf is None else neginf, x)
    return _where(x != x, 0 if nan is None else nan, x)


def _isclose(a: Expr, b: Scalar, rtol: float | None = None, atol: float | None = None, equal_nan: bool = False) -> Expr:
    b = _value(b)
    apart = abs(_float(a) - b)
    near = _own(1e-5, apart) if rtol is None else rtol, _own(1e-8, apart) if atol is None else atol
    close: Expr = (a == b) | ((apart < _own(math.inf, apart)) & (apart <= near[1] + abs(near[0] * _float(b))))
    return close | ((a != a) & (b != b)) if equal_nan else close


def _logit(x: Scalar, eps: float | None = None) -> Expr:
    x = _float(x)
    if eps is not None:
        x = _clamp(x, eps, 1 - eps)
    return _native.unary("log", x / (1 - x))


def _sinc(x: Scalar) -> Expr:
    x = _float(x)
    turned = _own(math.pi, x) * _where(x == 0, 1, x)
    return _where(x == 0, 1, _native.unary("sin", turned) / turned)


def _ldexp(x: Scalar, exponent: Scalar) -> Expr:
    return _float(x) * _native.unary("exp2", _float(exponent))


def _addcdiv(x: Scalar, a: Scalar, b: Scalar, *, value: float = 1) -> Expr:
    return _add(x, _native.binary("truediv", a, b), alpha=value)


def _entr(x: Scalar) -> Expr:
    x = _float(x)
    inside = _where(x > 0, x, 1)
    outside = _where(x == 0, 0, _where(x < 0, _own(-math.inf, x), x))
    return _where(x > 0, -inside * _native.unary("log", inside), outside)


def _scaled(by: float) -> Callable[..., Expr]:
    return lambda x: _float(x) * _own(by, _float(x))


def _ndtr(x: Scalar) -> Expr:
    x = _float(x)
    return (1 + _native.unary("erf", x * _own(math.sqrt(0.5), x))) / 2


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
    "silu": _silu,
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
    "addcdiv": _addcdiv,
    "frac": lambda x: x - _trunc(x),
    "sgn": _sign,
    "signbit": _signbit,
    "copysign": _copysign,
    "heaviside": _heaviside,
    "fmin": _one_that_is_a_number("min"),
    "fmax": _one_that_is_a_number("max"),
    "hypot": _hypot,
    "logaddexp": _logaddexp("e"),
    "logaddexp2": _logaddexp("2"),
    "xlogy": _times_log(0),
    "xlog1py": _times_log(1),
    "entr": _entr,
    "ldexp": _ldexp,
    "logit": _logit,
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
    "erfc": lambda x: 1 - _native.unary("erf", x),
    "ndtr": _ndtr,
    "deg2rad": _scaled(math.pi / 180),
    "rad2deg": _scaled(180 / math.pi),
    "nan_to_num": _nan_to_num,
    "isclose": _isclose,
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
    "softsign": lambda x: x / (1 + abs(x)),
    "mish": _mish,
    "threshold": _threshold,
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
    "detach": _unary("detach"),
    "real": _same,
    "cuda": _same,
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


_RANDOM = "a function is read once, for all indices: draw numbers outside and read them by index; flex_attention has dropout_p"
_WHOLE = "a traced value is one number: compute it outside of the function and read the result by index, as in `table[q_idx]`"

#: What to write instead of some functions that cannot be traced.
INSTEAD: dict[str, str] = {
    **dict.fromkeys(("rand_like", "randn_like", "randint_like", "bernoulli", "dropout", "alpha_dropout", "normal"), _RANDOM),
    **dict.fromkeys(
        ("cumsum", "cumprod", "sort", "argsort", "topk", "argmax", "argmin", "unique", "softmax", "log_softmax", "nonzero",
         "median", "quantile", "histc", "flip", "roll", "cat", "one_hot", "linear"), _WHOLE),
    "view": "a traced value is a 0-d tensor: it needs no other shape",
    "reshape": "a traced value is a 0-d tensor: it needs no other shape",
    "unsqueeze": "a traced value is a 0-d tensor: it needs no other shape",
    "expand": "a traced value is a 0-d tensor: it broadcasts by itself",
    "tolist": "a function is read once, for all indices",
    "numpy": "a function is read once, for all indices",
    "gcd": "make a table of it outside and read that by index",
    "lcm": "make a table of it outside and read that by index",
}


def unknown(name: str) -> TraceError:
    """The error for a function that cannot be traced."""
    if name.endswith("_") and name.strip("_") in OPERATIONS:
        plain = name.strip("_")
        return TraceError(f"`{name}` cannot write into a tensor or a traced value in a mask or score: use the result of `{plain}`")
    what = INSTEAD.get(name.strip("_"), "what depends on indices alone can be computed outside and read by index, as in `table[q_idx]`")
    return TraceError(f"`{name}` is not supported in a mask or score; {what}")
