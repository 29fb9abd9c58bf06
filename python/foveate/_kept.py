"""Traces that are kept.

What a function reads may have changed since its last call, so it is traced in each. Of one whose code can do nothing
but compute, all that its trace depends on is known without running it: the code, the numbers that it captures, and
dtype, shape and place of the tensors. It is traced once for each of these, and a later call takes that trace with the
tensors of now. Which code this is, its instructions say: operators, functions of torch that the tracer knows, loops,
and other functions of the kind. With any other instruction, a new one of Python's too, it is traced in each call.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import types
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _native
from ._operations import OPERATIONS

#: Instructions that only move values, or apply an operator: of ``BINARY_OP`` some write, see :func:`_globals_of`.
_PURE = frozenset(
    """
    BINARY_ADD BINARY_AND BINARY_FLOOR_DIVIDE BINARY_LSHIFT BINARY_MODULO BINARY_MULTIPLY BINARY_OP BINARY_OR
    BINARY_POWER BINARY_RSHIFT BINARY_SUBSCR BINARY_SUBTRACT BINARY_TRUE_DIVIDE BINARY_XOR BUILD_TUPLE CACHE COMPARE_OP
    COPY COPY_FREE_VARS DUP_TOP END_FOR EXTENDED_ARG FOR_ITER GET_ITER JUMP_ABSOLUTE JUMP_BACKWARD LOAD_CONST LOAD_DEREF
    LOAD_FAST LOAD_FAST_BORROW LOAD_FAST_BORROW_LOAD_FAST_BORROW LOAD_FAST_LOAD_FAST LOAD_SMALL_INT NOP POP_ITER POP_TOP
    PUSH_NULL RESUME RETURN_CONST RETURN_VALUE ROT_THREE ROT_TWO STORE_FAST STORE_FAST_LOAD_FAST STORE_FAST_STORE_FAST
    SWAP UNARY_INVERT UNARY_NEGATIVE UNARY_POSITIVE UNPACK_SEQUENCE
    """.split()
)
#: Calls: what may be called is what may be named or captured.
_CALLS = frozenset("CALL CALL_FUNCTION CALL_FUNCTION_KW CALL_KW CALL_METHOD KW_NAMES PRECALL".split())
#: Attributes of values, captured tensors and torch, but for numbers that elements of captured tensors decide, as those
#: of ``table[table > 0]``; and ``rand`` of torch draws.
_ATTRIBUTES = frozenset(OPERATIONS) - {"item", "numel", "rand", "size"} | {"dtype", "ndim"}
_ATTRIBUTES |= {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}

#: Traces that are kept at most.
_MOST = 256
_kept: dict[tuple[Any, ...], tuple[_native.Structure, list[int]]] = {}

_transforms_active = torch._C._are_functorch_transforms_active


@functools.lru_cache(maxsize=4096)
def _globals_of(code: types.CodeType) -> tuple[str, ...] | None:
    """The globals that code reads; None where it may do something else than compute."""
    found = []
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if name == "LOAD_GLOBAL":
            found.append(instruction.argval)
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            if instruction.argval not in _ATTRIBUTES:
                return None
        elif name not in _PURE and name not in _CALLS or name == "BINARY_OP" and instruction.argrepr.endswith("="):
            return None
    return tuple(found)


class Reads:
    """What a function would read if it were traced now: what its trace depends on, and the tensors."""

    __slots__ = ("key", "tensors")

    def __init__(self) -> None:
        self.key: list[Any] = []
        self.tensors: list[Tensor] = []

    @staticmethod
    def of(kind: str, function: Any, extents: tuple[int, int, int, int]) -> Reads | None:
        """Of a mask or score function for these extents; None where it has to be traced."""
        if _transforms_active() or forward_ad._current_level >= 0:
            return None
        reads = Reads()
        reads.key += (kind, extents, torch.is_grad_enabled(), torch.get_default_dtype())
        if not _native.reads(function, reads.key, reads.tensors, _globals_of):
            return None
        if len(reads.tensors) > 1:
            which = list(map(id, reads.tensors))
            reads.key += map(which.index, which)
        return reads

    def known(self, function: Any) -> _native.Traced | None:
        """The trace, if it is kept."""
        found = _kept.get(tuple(self.key))
        if found is None:
            return None
        structure, order = found
        return structure.of([self.tensors[i] for i in order], function)

    def keep(self, traced: _native.Traced) -> None:
        """Keeps the trace, unless it captures what it computed of tensors."""
        which = list(map(id, self.tensors))
        captured = [id(capture.tensor) for capture in traced.captures]
        if not set(captured) <= set(which):
            return
        if len(_kept) >= _MOST:
            # Where another thread keeps one meanwhile, this one is kept beside it.
            with contextlib.suppress(RuntimeError, StopIteration):
                _kept.pop(next(iter(_kept)), None)
        _kept[tuple(self.key)] = traced.structure(), list(map(which.index, captured))
