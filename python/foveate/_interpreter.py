"""What the operations of an FX graph do to traced values and captured tensors.

The graphs are those of mask and score functions (:mod:`foveate._graph`), and those that operators of other libraries
decompose to where a function that is traced calls one.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any, Callable, Sequence

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from . import _calls, _native
from ._native import Expr, TraceError
from ._operations import OPERATIONS, cast

if TYPE_CHECKING:
    from ._trace import Trace


def decomposed(trace: Trace, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator of ``torch.ops`` gives for traced values and numbers, by the operations that it consists of."""
    given = [*args, *kwargs.values()]
    if any(isinstance(x, (torch.Tensor, _calls.Many, tuple, list)) for x in given):
        raise TraceError(f"`{op}` is given a tensor or a list in a mask or score; traced values and numbers can be")
    form = tuple(x.dtype if isinstance(x, Expr) else (type(x), repr(x), x) for x in given)
    module = _decomposition(op, len(args), tuple(kwargs), form)
    return interpreted(trace, module, tuple(x for x in given if isinstance(x, Expr)))


@functools.lru_cache(maxsize=256)
def _decomposition(op: Any, positional: int, names: tuple[str, ...], form: tuple[Any, ...]) -> fx.GraphModule:
    """The graph of an operator for values of these dtypes and these numbers: type, text that tells ``-0.0``, and
    value."""

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
                raise TraceError(
                    f"`{target}` has no decomposition that a mask or score could be traced through; call what it "
                    "computes"
                )
            bodies[target] = functools.partial(target._op_dk, _OF_ALL_DEVICES)
    if any(node.op == "output" and not isinstance(node.args[0], fx.Node) for node in module.graph.nodes):
        raise TraceError(f"`{op}` gives several tensors, or none, in a mask or score")
    return module


#: The key of a kernel for all devices: one that consists of other operators, though it has a gradient of its own.
_OF_ALL_DEVICES = torch._C.DispatchKey.CompositeExplicitAutograd


def _has_body(op: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeExplicitAutograd"))


def interpreted(trace: Trace, module: fx.GraphModule, given: tuple[Any, ...]) -> Any:
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


def _operation(trace: Trace, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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


def _index(trace: Trace, of: Any, indices: Sequence[Any]) -> Any:
    return trace.read(of, tuple(slice(None) if i is None else i for i in indices))


def _select(trace: Trace, of: Any, dim: int, index: Any) -> Any:
    rank = len(of.shape)
    return trace.read(of, (slice(None),) * (dim % rank) + (index,))


def _constant(trace: Trace, *args: Any, dtype: torch.dtype | None = None, **_: Any) -> Any:
    *size, value = args
    if any(size):
        raise TraceError(f"a tensor of shape {tuple(size[0])} is made in a mask or score")
    return cast(value, dtype or (value.dtype if isinstance(value, Expr) else torch.tensor(value).dtype))


def _converted(trace: Trace, x: Any, dtype: torch.dtype | None = None, **_: Any) -> Any:
    x = trace.operand("to", x)
    return x if dtype is None else _calls.call("to", OPERATIONS["to"], x, dtype)


def _same(trace: Trace, x: Any, *_: Any, **__: Any) -> Any:
    return x


def _detached(trace: Trace, x: Any) -> Any:
    return OPERATIONS["detach"](x) if isinstance(x, Expr) else x


def _shaped(trace: Trace, x: Any, size: Sequence[int], **_: Any) -> Any:
    if len(size) or isinstance(x, (torch.Tensor, _calls.Rows, _calls.Vector)):
        raise TraceError("a tensor is given another shape in a mask or score")
    return x


def _text(
    trace: Trace,
    at: Expr,
    text: str,
    tensor_names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    bool_names: Sequence[str],
    bools: Sequence[bool],
    integer_names: Sequence[str],
    integers: Sequence[int],
) -> Any:
    names = (*tensor_names, *bool_names, *integer_names)
    return trace.parsed(text, zip(names, (*tensors, *bools, *integers)))


def _argument(trace: Any, mask: Any, name: str, values: Sequence[torch.Tensor], number: float) -> Any:
    trace.argument(name, values, number)
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
