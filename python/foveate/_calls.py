"""What torch's functions do with the values of a function that runs once for all indices.

Such a function is traced (:mod:`foveate._trace`), or runs on all points at once (:mod:`foveate._dense`). In both a
captured tensor is read at indices that are values of it, one element, or with one axis left over: a vector, whose
operations are unrolled. Of traced values :mod:`foveate._operations` says what each function is in operators.
"""

from __future__ import annotations

import functools
import math
import threading
from typing import Any, Callable

import torch
from torch.overrides import TorchFunctionMode

from . import _native, _source
from ._native import Expr, TraceError
from ._operations import OPERATIONS, cast, unknown


class OutOfBounds(IndexError):
    """A number is no index of a captured tensor, or there are too many."""


class Reader(TorchFunctionMode):
    """Reads captured tensors at indices of which some are values of the function that runs."""

    #: The class of these values.
    value: type

    def operand(self, name: str, x: Any) -> Any:
        raise NotImplementedError

    def element(self, tensor: torch.Tensor, index: list[Any]) -> Any:
        """The element of a captured tensor at an index of every axis."""
        raise NotImplementedError

    def __enter__(self) -> Any:
        _running.readers.append(self)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        _running.readers.pop()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def read(self, of: Any, index: Any) -> Any:
        """``of[index]`` of a captured tensor, where some index is traced."""
        if isinstance(of, self.value):
            raise TraceError("a traced value is a 0-d tensor: it cannot be indexed")
        tensor, axes = (of.tensor, list(of.index)) if isinstance(of, Rows) else (of, [None] * of.dim())
        given = index if isinstance(index, tuple) else (index,)
        if any(i is None for i in given):
            raise TraceError("a captured tensor is indexed with None, which adds an axis; leave it out")
        free = [axis for axis, i in enumerate(axes) if i is None]
        if any(i is Ellipsis for i in given):
            at = next(n for n, i in enumerate(given) if i is Ellipsis)
            given = given[:at] + (slice(None),) * (len(free) - len(given) + 1) + given[at + 1 :]
        if len(given) > len(free):
            raise OutOfBounds(f"too many indices for a captured tensor of dimension {len(free)}: {len(given)} given")
        for axis, i in zip(free, given):
            if isinstance(i, slice):
                if i != slice(None):
                    raise TraceError("a slice beside a traced index must be `:`")
                continue
            axes[axis] = self.index(i, tensor.shape[axis], axis)
        if any(i is None for i in axes):
            return Rows(tensor, axes)
        return self.element(tensor, axes)

    def index(self, i: Any, length: int, axis: int) -> Any:
        i = self.operand("[]", i)
        if isinstance(i, bool) or not isinstance(i, (self.value, int)):
            raise TraceError(f"a captured tensor is indexed with a {type(i).__name__}; integers and `:` can be")
        if isinstance(i, int) and not -length <= i < length:
            raise OutOfBounds(f"index {i} is out of bounds for dimension {axis} with size {length}")
        return i


class _Running(threading.local):
    """What reads captured tensors for the functions that run in a thread, the innermost last."""

    def __init__(self) -> None:
        self.readers: list[Reader] = []


_running = _Running()


def innermost() -> Reader | None:
    """What reads captured tensors for the function that this thread runs."""
    return _running.readers[-1] if _running.readers else None


class _NoAttribute(TraceError, AttributeError):
    """A tensor's attribute that traced values lack; ``hasattr`` is false for it."""


class RowError(TraceError):
    """Rows of captured tensors are used by a function that runs on all points at once."""


_ATTRIBUTES: dict[str, Any] = {
    "shape": torch.Size(()),
    "ndim": 0,
    "device": torch.device("cpu"),
    "requires_grad": False,
    "is_cpu": True,
    "is_cuda": False,
    "layout": torch.strided,
}


def attribute(value: Expr, name: str) -> Any:
    """What ``value.name`` is for a traced value; called by ``Expr.__getattr__``."""
    if name in _ATTRIBUTES:
        return _ATTRIBUTES[name]
    operation = OPERATIONS.get(name) or _OF_ONE.get(name)
    if operation is not None or name in READING:
        return functools.partial(call, name, operation, value)
    if callable(getattr(torch.Tensor, name, None)):
        return functools.partial(call, name, None, value)
    raise _NoAttribute(f"`.{name}` of a traced value is not supported in a mask or score")


def call(name: str, operation: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    trace = innermost()
    if trace is None:
        raise TraceError("a traced value is used after its function was traced")
    if trace.value is not Expr:
        raise RowError(f"`{name}` of {args[0]}")
    reading = READING.get(name)
    if reading is not None:
        return applied(name, reading, (trace, *args), kwargs)
    if any(isinstance(a, Many) for a in args) or any(isinstance(a, Many) for a in kwargs.values()):
        return _call_on_vectors(trace, name, operation, args, kwargs)
    args = tuple(trace.operand(name, a) for a in args)
    kwargs = {key: trace.operand(name, a) for key, a in kwargs.items()}
    if operation is None:
        raise unknown(name)
    return applied(name, operation, args, kwargs)


def called(name: str, *args: Any, **kwargs: Any) -> Any:
    """A call of torch's function ``name``, some of them in ``torch.special``, while a function is traced."""
    plain = name.removeprefix("special_")
    operation = OPERATIONS.get(plain) or _OF_ONE.get(plain)
    return call(name if operation is None else plain, operation, *args, **kwargs)


def applied(name: str, operation: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    try:
        return operation(*args, **kwargs)
    except TypeError as error:
        raise TraceError(f"`{name}` is not supported in a mask or score with these arguments: {error}") from None


def _call_on_vectors(trace: Reader, name: str, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def operand(a: Any) -> Any:
        if isinstance(a, Rows) or (isinstance(a, torch.Tensor) and a.dim() == 1):
            return Vector.of(trace, name, a)
        return a if isinstance(a, Vector) else trace.operand(name, a)

    args = tuple(map(operand, args))
    kwargs = {key: operand(a) for key, a in kwargs.items()}
    vectors = [a for a in (*args, *kwargs.values()) if isinstance(a, Vector)]
    alone = len(vectors) == 1 and isinstance(args[0], Vector)
    try:
        if name in REDUCTIONS and alone:
            return REDUCTIONS[name](*args, **kwargs)
        if name in ("max", "min") and alone and len(args) == 1 and not kwargs:
            return REDUCTIONS[f"a{name}"](*args)
        if name in PRODUCTS and len(vectors) == 2:
            return PRODUCTS[name](*args, **kwargs)
        if operation is None or name in REDUCTIONS:
            raise TraceError(
                f"`{name}` of {vectors[0]} is not supported in a mask or score; compute it outside and read the result"
            )
        length = max(map(len, vectors))
        if any(len(v) not in (1, length) for v in vectors):
            raise TraceError(f"`{name}` is given vectors of {sorted(set(map(len, vectors)))} elements")

        def at(a: Any, i: int) -> Any:
            return a.values[i if len(a) > 1 else 0] if isinstance(a, Vector) else a

        results = [
            operation(*(at(a, i) for a in args), **{key: at(a, i) for key, a in kwargs.items()}) for i in range(length)
        ]
    except TypeError as error:
        raise TraceError(f"`{name}` is not supported in a mask or score with these arguments: {error}") from None
    return Vector(results) if all(isinstance(r, Expr) for r in results) else results[0]


class Many:
    """Values that are more than one: operators and methods as on tensors of one axis."""

    __slots__ = ()

    @property
    def shape(self) -> torch.Size:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        operation = OPERATIONS.get(name) or REDUCTIONS.get(name)
        if (operation is None and name not in READING) or name.startswith("__"):
            raise _NoAttribute(f"`.{name}` of {self} is not supported in a mask or score")
        return functools.partial(call, name, operation, self)

    def __bool__(self) -> bool:
        raise TraceError(f"Python control flow on {self}; use .any() or .all()")

    def __len__(self) -> int:
        return self.shape[0]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(getattr(func, "__name__", str(func)), None, *args, **(kwargs or {}))


def _operators() -> None:
    def make(name: str) -> Callable[..., Any]:
        return lambda self, *others: call(name, OPERATIONS[name], self, *others)

    both = "add sub mul truediv floordiv mod pow and or xor lshift rshift".split()
    for name in both + ["r" + name for name in both] + "lt le gt ge eq ne neg abs invert".split():
        setattr(Many, f"__{name}__", make(name))
    for name in ("__matmul__", "__rmatmul__"):
        setattr(Many, name, lambda self, other: call("matmul", None, self, other))


_operators()


class Rows(Many):
    """A captured tensor with some axes indexed: ``t[b]`` before ``[h, q]``."""

    __slots__ = ("tensor", "index")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tensor: torch.Tensor, index: list[Any]) -> None:
        super().__init__()
        self.tensor, self.index = tensor, index

    def __getitem__(self, index: Any) -> Any:
        return _running.readers[-1].read(self, index)

    @property
    def shape(self) -> torch.Size:
        return torch.Size(n for n, i in zip(self.tensor.shape, self.index) if i is None)

    def __repr__(self) -> str:
        called = _source.captured(getattr(innermost(), "function", None), self.tensor)
        return f"{called} with axes left over, of shape {tuple(self.shape)}"


#: Elements of the longest vector: each operation on one is as many.
LONGEST = 64


class Vector(Many):
    """The values of a captured tensor with one axis left over, and what is computed of them, unrolled."""

    __slots__ = ("values",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, values: list[Expr]) -> None:
        super().__init__()
        self.values = values

    @classmethod
    def of(cls, trace: Reader, name: str, x: Rows | torch.Tensor) -> Vector:
        shape = x.shape
        if len(shape) != 1 or shape[0] > LONGEST:
            what = x if isinstance(x, Rows) else f"a captured tensor of shape {tuple(shape)}"
            raise TraceError(
                f"`{name}` is given {what}; index all axes, or all but one of up to {LONGEST} elements"
            )
        return cls([trace.read(x, _native.literal(i, torch.int64)) for i in range(shape[0])])

    def __getitem__(self, index: Any) -> Expr:
        if isinstance(index, bool) or not isinstance(index, int):
            raise TraceError("a vector of traced values is indexed with a number")
        return self.values[index]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.values),))

    def __repr__(self) -> str:
        return f"a vector of {len(self.values)} traced values"


def _reduction(fold: Callable[[list[Expr]], Expr]) -> Callable[..., Expr]:
    def reduce(x: Vector, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Expr:
        if dim not in (None, -1, 0, (-1,), (0,), [-1], [0]) or keepdim:
            raise TraceError("a vector of traced values is reduced over its only axis, without keepdim")
        if not x.values:
            raise TraceError("a vector without elements is reduced")
        return fold([v if dtype is None else cast(v, dtype) for v in x.values])

    return reduce


def _folded(operation: Callable[[Expr, Expr], Expr]) -> Callable[[list[Expr]], Expr]:
    return lambda values: functools.reduce(operation, values)


def _wide(values: list[Expr]) -> list[Expr]:
    """As torch sums them: integers and bools in int64."""
    return [v if v.dtype.is_floating_point else cast(v, torch.int64) for v in values]


def _total(values: list[Expr]) -> Expr:
    return functools.reduce(lambda a, b: a + b, _wide(values))


def _mean(values: list[Expr]) -> Expr:
    if not values[0].dtype.is_floating_point:
        raise TraceError("`mean` is of floats")
    total = _total(values)
    return total / _native.literal(len(values), total.dtype)


def _dot(a: Vector, b: Vector) -> Expr:
    if len(a) != len(b) or not len(a):
        raise TraceError(f"`dot` is of two vectors of one length, not {len(a)} and {len(b)}")
    return _total([x * y for x, y in zip(a.values, b.values)])


def _norm(x: Vector, p: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Expr:
    if p in (1, 2, "fro", None):
        total = REDUCTIONS["sum"](Vector([abs(v) if p == 1 else v * v for v in x.values]), dim, keepdim, dtype=dtype)
        if p == 1:
            return total
        # At 0 its gradient is 0, as torch's.
        nothing, one = (_native.literal(n, total.dtype) for n in (0, 1))
        zero = total == nothing
        return _native.select(zero, nothing * total, _native.unary("sqrt", _native.select(zero, one, total)))
    if p in (math.inf, -math.inf):
        return REDUCTIONS["amax" if p > 0 else "amin"](Vector(list(map(abs, x.values))), dim, keepdim, dtype=dtype)
    raise TraceError(f"`norm` of order {p} is not supported in a mask or score; 1, 2 and infinity are")


def _logsumexp(values: list[Expr]) -> Expr:
    return functools.reduce(lambda a, b: OPERATIONS["logaddexp"](a, b), values)


def _counted(x: Vector, dim: Any = None) -> Expr:
    return REDUCTIONS["sum"](Vector([cast(v, torch.bool) for v in x.values]), dim)


#: What makes one value of a vector.
REDUCTIONS: dict[str, Callable[..., Expr]] = {
    "sum": _reduction(_total),
    "mean": _reduction(_mean),
    "prod": _reduction(lambda values: functools.reduce(lambda a, b: a * b, _wide(values))),
    "any": _reduction(lambda values: _folded(lambda a, b: a | b)([cast(v, torch.bool) for v in values])),
    "all": _reduction(lambda values: _folded(lambda a, b: a & b)([cast(v, torch.bool) for v in values])),
    "amax": _reduction(_folded(lambda a, b: _native.binary("max", a, b))),
    "amin": _reduction(_folded(lambda a, b: _native.binary("min", a, b))),
    "logsumexp": _reduction(_logsumexp),
    "count_nonzero": _counted,
    "norm": _norm,
    "vector_norm": _norm,
    "linalg_vector_norm": _norm,
    "linalg_norm": _norm,
}


def _dist(a: Vector, b: Vector, p: Any = 2) -> Expr:
    if len(a) != len(b):
        raise TraceError(f"`dist` is of two vectors of one length, not {len(a)} and {len(b)}")
    return _norm(Vector([x - y for x, y in zip(a.values, b.values)]), p)


def _cosine(a: Vector, b: Vector, dim: int = 1, eps: float | None = None) -> Expr:
    if dim not in (0, -1):
        raise TraceError(f"`cosine_similarity` of two vectors is over their only axis: dim is 0 or -1, not {dim}")
    dot = _dot(a, b)
    least = _native.literal(1e-8, dot.dtype) if eps is None else eps
    sizes = [_native.binary("max", _norm(x), least) for x in (a, b)]
    return dot / (sizes[0] * sizes[1])


#: What makes one value of two vectors.
PRODUCTS: dict[str, Callable[..., Expr]] = {
    **dict.fromkeys(("dot", "inner", "vdot", "matmul"), _dot), "dist": _dist, "cosine_similarity": _cosine,
}

#: Reductions of one value, which is a 0-d tensor.
_OF_ONE: dict[str, Callable[..., Any]] = {
    name: lambda x, *args, _fold=fold, **kwargs: _fold(Vector([x]), *args, **kwargs)
    for name, fold in REDUCTIONS.items()
}


def _vector(trace: Reader, name: str, x: Any) -> Vector:
    """The elements of a captured tensor of one axis, of a row of one, or of a vector."""
    if isinstance(x, Vector):
        return x
    if isinstance(x, (Rows, torch.Tensor)):
        return Vector.of(trace, name, x)
    raise TraceError(f"`{name}` is given a {type(x).__name__} in place of a captured tensor of one axis")


def _isin(
    trace: Reader, elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False
) -> Expr:
    x = trace.operand("isin", elements)
    found: Expr
    if isinstance(test_elements, torch.Tensor) and test_elements.dim() > 1:
        test_elements = test_elements.flatten()
    if (
        isinstance(test_elements, torch.Tensor)
        and test_elements.dim() == 0
        or not isinstance(test_elements, (Many, torch.Tensor))
    ):
        found = x == trace.operand("isin", test_elements)
    else:
        values = _vector(trace, "isin", test_elements).values
        found = functools.reduce(lambda a, b: a | b, [x == v for v in values], _native.constant(False, torch.bool))
    return ~found if invert else found


def _position(name: str, right: bool, boundaries: Any, x: Any, trace: Reader) -> Expr:
    """How many of the boundaries, which are sorted, lie before ``x``."""
    x = trace.operand(name, x)
    before = [cast(v <= x if right else v < x, torch.int64) for v in _vector(trace, name, boundaries).values]
    return functools.reduce(lambda a, b: a + b, before, _native.literal(0, torch.int64))


def _bucketize(trace: Reader, input: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Expr:
    found = _position("bucketize", right, boundaries, input, trace)
    return cast(found, torch.int32) if out_int32 else found


def _searchsorted(
    trace: Reader,
    sorted_sequence: Any,
    input: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
) -> Expr:
    found = _position("searchsorted", right or side == "right", sorted_sequence, input, trace)
    return cast(found, torch.int32) if out_int32 else found


def _stack(trace: Reader, tensors: Any, dim: int = 0) -> Vector:
    if dim not in (0, -1):
        raise TraceError(f"`stack` of traced values has one axis: dim is 0 or -1, not {dim}")
    values = [trace.operand("stack", t) for t in tensors]
    if not all(isinstance(v, Expr) for v in values) or not 0 < len(values) <= LONGEST:
        raise TraceError(f"`stack` is of 1 to {LONGEST} traced values")
    return Vector(values)


def _embedding(
    trace: Reader,
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    # Aten's operator has the table first, and -1 for no padding.
    if not isinstance(weight, torch.Tensor):
        input, weight = weight, input
    if padding_idx not in (None, -1) or max_norm is not None or scale_grad_by_freq or sparse:
        raise TraceError("`embedding` takes a table and an index in a mask or score, no options")
    return trace.read(weight, input)


def _gather(trace: Reader, input: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    if len(input.shape) != 1 or dim not in (0, -1):
        raise TraceError(
            "`gather` is of a captured tensor of one axis in a mask or score; use `table[b, h, q_idx]` for more"
        )
    return trace.read(input, index)


def _take(trace: Reader, input: Any, index: Any) -> Any:
    if not isinstance(input, torch.Tensor):
        raise TraceError("`take` is of a captured tensor in a mask or score")
    return trace.read(input.reshape(-1), index)


#: Functions that take captured tensors as they are, or several values at once.
READING: dict[str, Callable[..., Any]] = {
    "isin": _isin,
    "bucketize": _bucketize,
    "searchsorted": _searchsorted,
    "stack": _stack,
    "embedding": _embedding,
    "gather": _gather,
    "take": _take,
}
