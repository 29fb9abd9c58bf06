"""Programs of the FX graphs that torch's compiler makes of mask and score functions.

A graph's operations are said in the same operators as those of a function that is traced in an uncompiled
call (:mod:`foveate._trace`), and what cannot be said is the same ``TraceError``. Captured tensors are operands
here, of which only shapes and dtypes are known; captured integers that are symbolic are run-time scalars.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, Callable, NamedTuple, Sequence

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx

from . import _blocks, _calls, _native, _trace
from ._native import Expr, TraceError
from ._operations import OPERATIONS, cast

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


def _read(kind: str, graph: fx.GraphModule, extents: Sequence[Any], operands: Sequence[Any], tiles: Any = None) -> Program:
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
            given.append(_native.scalar(f"{kind[0]}n{len(scalars)}"))
            scalars.append(at)
        else:
            given.append(operand)
    with trace:
        result = _interpreted(trace, graph, (*leaves, *given))
        if isinstance(result, (torch.Tensor, bool, int, float)):
            result = trace.operand("return", result)
        if kind == "mask":
            result = cast(result, torch.bool)
            if tiles is not None:
                shape, sides = tiles
                tile = []
                for at, side in enumerate(sides, len(operands)):
                    if isinstance(side, torch.SymInt):
                        side = _native.scalar(f"mn{len(scalars)}")
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


def decomposed(trace: _trace.Trace, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator of ``torch.ops`` gives for traced values and numbers, by the operations that it consists of."""
    given = [*args, *kwargs.values()]
    if any(isinstance(x, (torch.Tensor, _calls.Many, tuple, list)) for x in given):
        raise TraceError(f"`{op}` is given a tensor or a list in a mask or score; traced values and numbers can be")
    form = tuple(x.dtype if isinstance(x, Expr) else (type(x), repr(x), x) for x in given)
    module = _decomposition(op, len(args), tuple(kwargs), form)
    return _interpreted(trace, module, tuple(x for x in given if isinstance(x, Expr)))


@functools.lru_cache(maxsize=256)
def _decomposition(op: Any, positional: int, names: tuple[str, ...], form: tuple[Any, ...]) -> fx.GraphModule:
    """The graph of an operator for values of these dtypes and these numbers: type, text that tells ``-0.0``, and value."""

    def call(*values: torch.Tensor) -> Any:
        given = iter(values)
        all_given = [next(given) if isinstance(x, torch.dtype) else x[2] for x in form]
        return op(*all_given[:positional], **dict(zip(names, all_given[positional:])))

    examples = [torch.zeros((), dtype=x) for x in form if isinstance(x, torch.dtype)]
    bodies: dict[Any, Any] = {}
    while True:
        try:
            module = make_fx(call, decomposition_table=bodies, tracing_mode="fake")(*examples)
        except Exception as error:  # Whatever its body, which knows nothing of tensors without elements, makes of them.
            raise TraceError(f"`{op}` does not decompose for traced values: {str(error).splitlines()[0]}") from None
        targets = (node.target for node in module.graph.nodes if node.op == "call_function")
        others = [target for target in targets if getattr(target, "namespace", "aten") not in ("aten", "prims")]
        if not others:
            break
        for target in others:
            if target in bodies or not _has_body(target):
                raise TraceError(f"`{target}` has no decomposition that a mask or score could be traced through; call what it computes")
            bodies[target] = functools.partial(target._op_dk, _OF_ALL_DEVICES)
    if any(node.op == "output" and not isinstance(node.args[0], fx.Node) for node in module.graph.nodes):
        raise TraceError(f"`{op}` gives several tensors, or none, in a mask or score")
    return module


#: The key of a kernel for all devices: one that consists of other operators, though it has a gradient of its own.
_OF_ALL_DEVICES = torch._C.DispatchKey.CompositeExplicitAutograd


def _has_body(op: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeExplicitAutograd"))


def _interpreted(trace: _trace.Trace, module: fx.GraphModule, given: tuple[Any, ...]) -> Any:
    values: dict[fx.Node, Any] = {}
    waiting = iter(given)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(waiting)
        elif node.op == "get_attr":
            values[node] = operator.attrgetter(node.target)(module)
        elif node.op == "output":
            result = fx.map_arg(node.args[0], values.__getitem__)
            return result[0] if isinstance(result, (tuple, list)) else result
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = _operation(trace, node.target, args, kwargs)
        else:
            raise TraceError(f"a graph of a mask or score has a node `{node.op}`")
    raise TraceError("a graph of a mask or score has no result")


def _operation(trace: _trace.Trace, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not isinstance(target, torch._ops.OpOverload):
        # Arithmetic on captured integers.
        return target(*args, **kwargs)
    if target.namespace not in _NAMED:
        return decomposed(trace, target, args, kwargs)
    name = target._schema.name.split("::")[1]
    special = _SPECIAL.get(name)
    if special is not None:
        return special(trace, *args, **kwargs)
    for arg in args:
        if isinstance(arg, (torch.Tensor, _calls.Rows)) and any(trace.left_symbolic(arg)):
            raise TraceError(f"`{name}` is given a row of a captured tensor whose length is symbolic")
    return _calls.called(name.strip("_"), *args, **kwargs)


def is_reading(target: torch._ops.OpOverload) -> bool:
    """Whether an operation on a captured tensor is part of reading it."""
    return target.namespace in _NAMED and target._schema.name.split("::")[1] in _SPECIAL


def _index(trace: _trace.Trace, of: Any, indices: Sequence[Any]) -> Any:
    return trace.read(of, tuple(slice(None) if i is None else i for i in indices))


def _select(trace: _trace.Trace, of: Any, dim: int, index: Any) -> Any:
    rank = len(of.shape)
    return trace.read(of, (slice(None),) * (dim % rank) + (index,))


def _constant(trace: _trace.Trace, *args: Any, dtype: torch.dtype | None = None, **_: Any) -> Any:
    *size, value = args
    if any(size):
        raise TraceError(f"a tensor of shape {tuple(size[0])} is made in a mask or score")
    return cast(value, dtype or (value.dtype if isinstance(value, Expr) else torch.tensor(value).dtype))


def _converted(trace: _trace.Trace, x: Any, dtype: torch.dtype | None = None, **_: Any) -> Any:
    x = trace.operand("to", x)
    return x if dtype is None else _calls.call("to", OPERATIONS["to"], x, dtype)


def _same(trace: _trace.Trace, x: Any, *_: Any, **__: Any) -> Any:
    return x


def _detached(trace: _trace.Trace, x: Any) -> Any:
    return OPERATIONS["detach"](x) if isinstance(x, Expr) else x


def _shaped(trace: _trace.Trace, x: Any, size: Sequence[int], **_: Any) -> Any:
    if len(size) or isinstance(x, (torch.Tensor, _calls.Rows, _calls.Vector)):
        raise TraceError("a tensor is given another shape in a mask or score")
    return x


def _text(
    trace: _trace.Trace,
    text: str,
    tensor_names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    integer_names: Sequence[str],
    integers: Sequence[int],
    float_names: Sequence[str],
    floats: Sequence[float],
) -> Any:
    captures = [(name, trace.capture(t)) for name, t in zip(tensor_names, tensors)]
    numbers = [*zip(integer_names, integers), *zip(float_names, floats)]
    return _native.parse(text, captures, numbers, trace.extents[1], max(trace.extents[2:]))


def _argument(trace: _GraphTrace, mask: Any, name: str, values: Sequence[torch.Tensor], number: float) -> Any:
    held = [id(tensor) for tensor in trace.held]
    trace.arguments[name] = ([held.index(id(value)) for value in values], number)
    return mask


#: Whose operators are what their names say; others may have the name of one of torch's.
_NAMED = ("aten", "prims", "foveate")
#: Operations of graphs that have no name in torch's functions, or other arguments there.
_SPECIAL: dict[str, Callable[..., Any]] = {
    "argument": _argument,
    "mask": _text,
    "index": _index,
    "select": _select,
    "full": _constant,
    "scalar_tensor": _constant,
    "convert_element_type": _converted,
    "_to_copy": _converted,
    "lift_fresh": _same,
    "lift_fresh_copy": _same,
    # What torch's decompositions make of `detach`, and of nothing else that keeps a gradient.
    "alias": _detached,
    "detach": _detached,
    "expand": _shaped,
    "view": _shaped,
    "_unsafe_view": _shaped,
    "reshape": _shaped,
}
