"""Programs of the FX graphs that torch's compiler makes of mask and score functions.

A graph's operations are said in the same operators as those of a function that is traced in an uncompiled
call (:mod:`foveate._trace`), and what cannot be said is the same ``TraceError``. Captured tensors are operands
here, of which only shapes and dtypes are known; captured integers that are symbolic are run-time scalars.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from . import _blocks, _calls, _native, _trace
from ._interpreter import interpreted
from ._native import Expr, TraceError
from ._operations import cast

#: Extents of coordinates whose length is symbolic: a program is for all lengths up to these.
BATCH, LENGTH = 1 << 16, 1 << 24


class Program(NamedTuple):
    """A mod as an operator takes it."""

    #: In text form; None where it changes nothing.
    text: str | None
    #: Of the graph's operands, the tensors ``s0``, ``s1``, ...
    captures: list[int]
    #: Of the graph's operands, the integers ``sn0``, ``sn1``, ...
    scalars: list[int]
    #: By name, which operands ``foveate::argument`` carries, and its number.
    arguments: dict[str, tuple[list[int], float]]


def score(graph: fx.GraphModule, extents: Sequence[Any], operands: Sequence[Any]) -> Program:
    """The program of the graph of a score function.

    Args:
        graph: It takes score, b, h, q_idx, kv_idx and the operands.
        extents: Of b, h, q and kv; symbolic ones are integers of torch.
        operands: Examples of what the graph takes besides: fake tensors, integers, symbolic integers.

    Raises:
        TraceError: It cannot be said.
    """
    return _read("score", graph, extents, operands)


def mask(
    graph: fx.GraphModule, extents: Sequence[Any], operands: Sequence[Any], tiles: tuple[Any, tuple[Any, Any]] | None
) -> Program:
    """The program of the graph of a mask function, as :func:`score`. ``tiles`` are batch and heads of the lists of
    a block mask, and its block size: the program reads the table that these lists make, after its other tensors."""
    return _read("mask", graph, extents, operands, tiles)


def _scalar(name: str, integer: torch.SymInt) -> Expr:
    """A run-time scalar; of an integer that is read from a tensor, which has no value yet, with 1 for an example."""
    hint = integer.node.hint
    return _native.scalar(name, 1 if hint is None else int(hint))


def _read(
    kind: str, graph: fx.GraphModule, extents: Sequence[Any], operands: Sequence[Any], tiles: Any = None
) -> Program:
    b, h, q, kv = (n if isinstance(n, int) else most for n, most in zip(extents, (BATCH, BATCH, LENGTH, LENGTH)))
    trace = _GraphTrace(kind, graph, (b, h, q, kv))
    leaves = tuple(map(_native.leaf, ("b", "h", "q", "kv"), (b, h, q, kv)))
    if kind == "score":
        leaves = (_native.leaf("score", 0), *leaves)
    tensors: list[int] = []
    scalars: list[int] = []
    given: list[Any] = []
    for at, operand in enumerate(operands):
        if isinstance(operand, torch.Tensor):
            given.append(trace.stand_in(operand))
            tensors.append(at)
        elif isinstance(operand, torch.SymInt):
            given.append(_scalar(f"{kind[0]}n{len(scalars)}", operand))
            scalars.append(at)
        else:
            given.append(operand)
    with trace:
        result = interpreted(trace, graph, (*leaves, *given))
        if isinstance(result, (torch.Tensor, bool, int, float)):
            result = trace.operand("return", result)
        if kind == "mask":
            result = cast(result, torch.bool)
            if tiles is not None:
                shape, sides = tiles
                tile = []
                for at, side in enumerate(sides, len(operands)):
                    if isinstance(side, torch.SymInt):
                        side = _scalar(f"mn{len(scalars)}", side)
                        scalars.append(at)
                    tile.append(side)
                kinds = torch.empty_strided((*(_sized(n) for n in shape), 1, 1), (0,) * 4, dtype=torch.uint8)
                table = _blocks.narrowed(kinds)
                trace.name(table)
                result = _blocks.within(kinds, (tile[0], tile[1]), table)(trace, leaves, result)
            traced = _native.mask(result, list(trace.captures.values()))
        else:
            traced = _native.score(cast(result, torch.float32), list(trace.captures.values()))
    text = traced.text()
    arguments = {name: ([tensors[i] for i in held], number) for name, (held, number) in trace.arguments.items()}
    return Program(None if text in ("score", "true") else text, tensors, scalars, arguments)


def _sized(n: Any) -> int:
    """A length of a table: symbolic ones are more than 1."""
    return n if isinstance(n, int) else max(n.node.hint, 2)


class _GraphTrace(_trace.Trace):
    """A trace whose captured tensors are stand-ins without elements."""

    def __init__(self, kind: str, graph: fx.GraphModule, extents: tuple[int, int, int, int]) -> None:
        super().__init__(kind, graph, extents, constants=True)
        self.symbolic: dict[int, list[bool]] = {}
        self.arguments: dict[str, tuple[list[int], float]] = {}

    def stand_in(self, example: torch.Tensor) -> torch.Tensor:
        shape = [n if isinstance(n, int) else max(n.node.hint, 2) for n in example.shape]
        made = torch.empty_strided(shape, [0] * len(shape), dtype=example.dtype)
        self.symbolic[id(made)] = [not isinstance(n, int) for n in example.shape]
        self.name(made)
        return made

    def name(self, tensor: torch.Tensor) -> None:
        # Whether a gradient of it is wanted only the backward knows.
        may_learn = self.kind == "score" and tensor.is_floating_point()
        self.captures[id(tensor)] = _native.Capture(f"{self.kind[0]}{len(self.held)}", tensor, False, may_learn)
        self.held.append(tensor)

    def left_symbolic(self, x: Any) -> list[bool]:
        tensor, index = (x.tensor, x.index) if isinstance(x, _calls.Rows) else (x, [None] * x.dim())
        symbolic = self.symbolic.get(id(tensor), [False] * len(index))
        return [long for long, i in zip(symbolic, index) if i is None]

    def capture(self, tensor: torch.Tensor, name: str = "") -> _native.Capture:
        found = self.captures.get(id(tensor))
        if found is None:
            raise TraceError(f"a tensor of shape {tuple(tensor.shape)} is computed of captured ones, or a constant")
        return found

    def argument(self, name: str, values: Sequence[torch.Tensor], number: float) -> None:
        held = [id(tensor) for tensor in self.held]
        self.arguments[name] = ([held.index(id(value)) for value in values], number)

    def operand(self, name: str, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return _native.constant(x, torch.tensor(x).dtype) if name == "return" and not isinstance(x, Expr) else x
        if x.dim() != 0:
            raise TraceError(f"`{name}` is given a captured tensor of shape {tuple(x.shape)}; index it first")
        if id(x) in self.captures:
            return self.capture(x).only()
        # A constant of the graph has a value, though the compiler's mode would refuse to say it.
        with unset_fake_temporarily():
            return _native.constant(x.item(), x.dtype)
