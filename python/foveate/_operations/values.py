"""Other dtypes of traced values, numbers that are made beside them, and what a 0-d tensor is asked for."""

from __future__ import annotations

import math
from typing import Any, Callable

import torch

from .. import _native
from .._native import Expr, TraceError
from .base import cast, same, unary


def _to(x: Expr, *args: Any, **kwargs: Any) -> Expr:
    dtype = kwargs.get("dtype")
    for arg in args:
        if isinstance(arg, torch.dtype):
            dtype = arg
        elif isinstance(arg, (Expr, torch.Tensor)):
            dtype = arg.dtype
    return x if dtype is None else cast(x, dtype)


def _filled(value: Any) -> Callable[..., Expr]:
    def make(x: Expr, size: Any = (), *more: int, dtype: torch.dtype | None = None, **_: Any) -> Expr:
        size = (size, *more) if isinstance(size, int) else tuple(size)
        _only_0d(size)
        return _native.literal(value, dtype or x.dtype)

    return make


def _new_full(x: Expr, size: Any, fill_value: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Expr:
    _only_0d(tuple(size))
    return cast(fill_value, dtype or x.dtype)


def _full_like(x: Expr, fill_value: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Expr:
    return cast(fill_value, dtype or x.dtype)


def _like(value: Any) -> Callable[..., Expr]:
    return lambda x, *, dtype=None, **_: _native.literal(value, dtype or x.dtype)


def _new_tensor(x: Expr, data: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Expr:
    return cast(data, dtype or torch.tensor(data).dtype)


def _only_0d(size: tuple[int, ...]) -> None:
    if math.prod(size) != 1:
        raise TraceError(f"a tensor of shape {tuple(size)} is made of a traced value; only 0-d ones can be")


def _item(x: Expr) -> Any:
    return int(x)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "to": _to,
    "type": _to,
    "type_as": _to,
    "bool": lambda x: cast(x, torch.bool),
    "byte": lambda x: cast(x, torch.uint8),
    "char": lambda x: cast(x, torch.int8),
    "short": lambda x: cast(x, torch.int16),
    "int": lambda x: cast(x, torch.int32),
    "long": lambda x: cast(x, torch.int64),
    "half": lambda x: cast(x, torch.float16),
    "bfloat16": lambda x: cast(x, torch.bfloat16),
    "float": lambda x: cast(x, torch.float32),
    "double": lambda x: cast(x, torch.float64),
    "new_ones": _filled(1),
    "new_zeros": _filled(0),
    "new_full": _new_full,
    "new_tensor": _new_tensor,
    "ones_like": _like(1),
    "zeros_like": _like(0),
    "full_like": _full_like,
    "clone": same,
    "detach": unary("detach"),
    "real": same,
    "cuda": same,
    "contiguous": same,
    "cpu": same,
    "squeeze": same,
    "dim": lambda x: 0,
    "size": lambda x: torch.Size(()),
    "numel": lambda x: 1,
    "is_floating_point": lambda x: x.dtype.is_floating_point,
    "is_tensor": lambda x: True,
    "item": _item,
}
