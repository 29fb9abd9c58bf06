"""What Dynamo makes of attention in a compiled region: torch's operator, of mods that are known to be right.

The region calls :data:`foveate._compile.ATTENTION`, which is torch's operator but for its mods:

- One that Dynamo cannot trace, or that gives no value of its kind, is refused before there is a graph. Where the graph
  may break the call runs outside of it, and an error there is that of an uncompiled call; where it may not, the error
  has the same sentence, and its type beside Dynamo's own. Where it is not the mod that fails but Dynamo's internals,
  which change from version to version, this is what is said, and nothing of the mod.
- A captured float that changes is a number without a value to Dynamo, which torch's operator takes no operand of. It
  becomes a tensor of no axes outside of the mod, by a product with 1: of products torch makes tensors in the finished
  graph. Where a mod uses such a number as no tensor can be used, it is a constant, of a graph for this value alone.
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any, Iterator, NoReturn, Sequence

import torch
from torch import fx
from torch._dynamo import exc
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._dynamo.variables import ConstantVariable, higher_order_ops
from torch._dynamo.variables.builder import VariableBuilder, wrap_fx_proxy
from torch._higher_order_ops.flex_attention import flex_attention as _torchs
from torch._subclasses import fake_tensor
from torch.fx.experimental.symbolic_shapes import guard_scalar
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import _native, _source, _trace
from ._arguments import warn
from ._higher_order import ATTENTION, CHANGED, INSTEAD, OUTSIDE, of_another_version
from ._native import TraceError

#: What is no error of a mod: Dynamo begins again, or leaves the frame.
_PASSING = (exc.RestartAnalysis, exc.SkipFrame)
#: What tensors without elements raise where a call reads them.
_WITHOUT_ELEMENTS = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
)
_said: set[str] = set()


class _Refused(Exception):
    """A call that no graph is made of: ``reason`` is what is raised where the graph cannot break, and ``is_wrong``
    whether an uncompiled call raises it."""

    def __init__(self, reason: Exception, is_wrong: bool = False) -> None:
        super().__init__(str(reason))
        self.reason, self.is_wrong = reason, is_wrong


def _warn_once(refused: _Refused) -> None:
    if str(refused) not in _said:
        _said.add(str(refused))
        warn(f"a call of flex_attention runs outside of the compiled graph: {refused}")


class _Attention(higher_order_ops.FlexAttentionHigherOrderVariable):
    """:data:`ATTENTION` in Dynamo's trace. Its last argument is the mask as it is called in messages."""

    _HOP_NAME = "foveate.flex_attention"

    def __init__(self, value: Any, source: Any = None, **kwargs: Any) -> None:
        super().__init__(_torchs, source, **kwargs)

    def _call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        """The operator's results; None where it is refused, and the graph may break. Modes, such as a default device,
        have seen the call by then."""
        try:
            tried, log = tx.speculate(), tx.speculation_log
            if tried.failed(tx):
                return ConstantVariable.create(None)
            begun = log.index
        except CHANGED as error:  # Without a way back there is one on.
            _warn_once(_refused_call(error))
            return ConstantVariable.create(None)
        *args, mask = args
        query, key, _, score, *_ = args
        try:
            self.mods, self.extents = {"score_mod": score, "mask_fn": mask}, _extents(query, key)
            return super()._call_function(tx, args, kwargs)
        except _PASSING:
            raise
        except Exception as error:
            refused = error if isinstance(error, _Refused) else _refused_call(error)
            if _is_whole(tx):
                _raise_as_dynamos(refused.reason)
            if not refused.is_wrong:
                _warn_once(refused)
        # The trace begins again, and comes here without what it has entered since.
        del log.entries[begun:]
        tried.fail_and_restart_analysis(tx.error_on_graph_break)

    def create_wrapped_node(self, tx: Any, query: Any, fn: Any, fn_name: str) -> tuple[Any, tuple[Any, ...]]:
        try:
            with _numbers_outside():
                body, lifted = super().create_wrapped_node(tx, query, fn, fn_name)
            module = tx.output.nn_modules[body.node.target]
            _check("mask" if fn_name == "mask_fn" else "score", self.mods[fn_name], module.graph, lifted)
            captured = tuple(_with_tensors(tx, query, module.graph, lifted))
            module.recompile()
            return body, captured
        except _PASSING:
            raise
        except Exception as error:
            kind = "mask" if fn_name == "mask_fn" else "score"
            raise _refused(kind, self.mods[fn_name], self.extents, error) from error


class _Outside(higher_order_ops.TorchHigherOrderOperatorVariable):
    """:data:`OUTSIDE` in Dynamo's trace."""

    _HOP_NAME = "foveate.outside"

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        function, *args = args
        if _is_whole(tx):
            _raise_outside(tx, function, args, kwargs)
        return function.call_function(tx, args, kwargs)


class _Instead(higher_order_ops.TorchHigherOrderOperatorVariable):
    """:data:`INSTEAD` in Dynamo's trace."""

    _HOP_NAME = "foveate.instead"

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        ours, torchs, *args = args
        try:
            return torchs.call_function(tx, args, kwargs)
        except _PASSING:
            raise
        except Exception:
            if _is_whole(tx):
                _raise_outside(tx, ours, args, kwargs)
            raise


def _is_whole(tx: Any) -> bool:
    """Whether the graph may not break."""
    return bool(getattr(tx, "one_graph", False) or getattr(tx, "error_on_graph_break", False))


def _raise_outside(tx: Any, function: Any, args: Any, kwargs: Any) -> None:
    """Raises what a call outside of the graph raises, if that is known: it is made, of tensors without elements."""
    try:
        given, named = [_python(x) for x in args], {name: _python(x) for name, x in kwargs.items()}
    except Exception:  # What is made in the region, of what has no value yet.
        return
    mode = tx.fake_mode
    allowed = mode.allow_non_fake_inputs
    try:
        mode.allow_non_fake_inputs = True  # What mods capture has its elements.
        with mode:
            function.get_function()(*given, **named)
    except _WITHOUT_ELEMENTS:
        return
    except Exception as error:
        _raise_as_dynamos(error)
    finally:
        mode.allow_non_fake_inputs = allowed


def _python(x: Any) -> Any:
    """What a variable of Dynamo's stands for, if that is known; of a tensor one without elements.

    Raises:
        Exception: It is not known.
    """
    if hasattr(x, "as_proxy") and isinstance(example := _try_example(x), torch.Tensor):
        return example
    if x.is_python_constant():
        return x.as_python_constant()
    if x.source is not None and hasattr(x, "value"):
        return x.value
    return x.get_function()


def _try_example(x: Any) -> Any:
    try:
        return _example(x.as_proxy())
    except Exception:
        return None


def register() -> None:
    """Lets Dynamo know the operators."""
    known = {ATTENTION: _Attention, OUTSIDE: _Outside, INSTEAD: _Instead}
    higher_order_ops._hop_name_to_variable_class |= {of.__name__: variable for of, variable in known.items()}


def _example(x: Any) -> Any:
    return (x if isinstance(x, fx.Node) else x.node).meta.get("example_value")


def _extents(query: Any, key: Any) -> tuple[int, ...]:
    """Of b, h, q and kv; of what is symbolic the example."""
    q, k = (_example(x.as_proxy()).shape for x in (query, key))
    return tuple(n if isinstance(n, int) else n.node.hint for n in (q[0], q[1], q[2], k[2]))


def _placeholders(graph: fx.Graph, captured: Sequence[Any]) -> list[fx.Node]:
    """Where the graph of a mod takes what it captures."""
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    return nodes[len(nodes) - len(captured) :]


@contextlib.contextmanager
def _numbers_outside() -> Iterator[None]:
    """Lets Dynamo make a number of a captured float in the whole graph: of one that it makes in a mod's, where the mod
    is the first to read it, no other mod knows."""
    inside = VariableBuilder.wrap_symfloat

    def outside(self: Any, value: float) -> Any:
        output = self.tx.output
        tracers, output.tracers = output.tracers, output.tracers[:1]
        try:
            return inside(self, value)
        finally:
            output.tracers = tracers

    VariableBuilder.wrap_symfloat = outside  # type: ignore[method-assign]
    try:
        yield
    finally:
        VariableBuilder.wrap_symfloat = inside  # type: ignore[method-assign]


def _check(kind: str, mod: Any, graph: fx.Graph, captured: Sequence[Any]) -> None:
    """Raises what an uncompiled call says of a mod's result, and of what it captures."""
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue  # What is captured may have any name.
        if node.op == "call_method" and node.target == "item":
            int(_native.leaf("q", 1))  # Raises what it says of an index that is made a number.
        _trace.refuse_random(getattr(node.target, "__name__", str(node.target)))
    (output,) = (node for node in graph.nodes if node.op == "output")
    result = output.args[0]
    result = _example(result) if isinstance(result, fx.Node) else result
    wrong = _trace.wrongly_returned(result, kind)
    if wrong is not None:
        raise ValueError(f"{kind}_mod `{_name(mod)}` {wrong}")
    for example in map(_example, captured):
        if not isinstance(example, torch.Tensor):
            continue
        _trace.refuse_capture(example, "a captured tensor")
        if is_traceable_wrapper_subclass(example):
            raise TraceError(f"a captured tensor is a {type(example).__name__}, which a graph has no operands of")
        if kind == "mask" and example.requires_grad and torch.is_grad_enabled():
            raise ValueError(_trace.LEARNS)


def _with_tensors(tx: Any, query: Any, graph: fx.Graph, captured: Sequence[Any]) -> Sequence[Any]:
    """What a mod captures, with tensors in the place of floats that change; the graph takes these."""
    places = dict(zip(_placeholders(graph, captured), captured))
    numbers = {node: proxy for node, proxy in places.items() if isinstance(_example(proxy), torch.SymFloat)}
    if not numbers:
        return captured

    def outside(target: Any, *args: Any, **kwargs: Any) -> Any:
        kind = "call_method" if isinstance(target, str) else "call_function"
        return wrap_fx_proxy(tx, tx.output.create_proxy(kind, target, args, kwargs)).as_proxy()

    def tensor_of(number: Any) -> Any:
        """What is computed of a number, computed of a tensor: torch makes a product with a number one with a tensor
        where it is of the number itself."""
        if not isinstance(number, fx.Proxy) or not isinstance(_example(number), torch.SymFloat):
            return number
        node = number.node
        if node.op != "call_function":
            return outside(operator.mul, outside(torch.ones, (), dtype=torch.float64, device=like.device), number)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda of: tensor_of(fx.Proxy(of, number.tracer)))
        return outside(node.target, *args, **kwargs)

    like = _example(query.as_proxy())
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    try:
        made = {node: outside("to", tensor_of(number), dtype) for node, number in numbers.items()}
        _take(tx, graph, {node: _example(tensor) for node, tensor in made.items()})
    except _PASSING:
        raise
    except Exception:
        # What it does with a number it does with this one.
        for node, number in numbers.items():
            constant = guard_scalar(_example(number))
            for user in list(node.users):
                user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda x: constant if x is node else x)
            graph.erase_node(node)
        return [proxy for node, proxy in places.items() if node not in numbers]
    return [made.get(node, proxy) for node, proxy in places.items()]


def _take(tx: Any, graph: fx.Graph, tensors: dict[fx.Node, Any]) -> None:
    """Gives a graph tensors in the place of numbers.

    Raises:
        Exception: An operation does not take them; nothing is changed.
    """
    values = dict(tensors)
    pending = tx.output.shape_env.pending_fresh_unbacked_symbols
    before = len(pending)
    try:
        with tx.fake_mode, TransformGetItemToIndex():
            for node in graph.nodes:
                if node.op == "output" or not any(of in values for of in node.all_input_nodes):
                    continue
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: values.get(x, _example(x)))
                target: Any = node.target
                if node.op == "call_method":
                    target, args = getattr(args[0], target), args[1:]
                values[node] = target(*args, **kwargs)
                if not isinstance(values[node], torch.Tensor) or len(pending) > before:
                    raise TypeError(f"{target} takes a number")
    finally:
        del pending[before:]
    for node, value in values.items():
        node.meta["example_value"] = value


def _refused_call(error: Exception) -> _Refused:
    """Of what is no mod's."""
    if _is_of_another_version(error):
        return _Refused(TraceError(of_another_version(error)))
    return _Refused(TraceError(f"flex_attention: {_first_line(error)}"))


def _is_of_another_version(error: Exception) -> bool:
    """Whether it comes from code that uses Dynamo's internals: what Dynamo says of a function is an error of its
    own."""
    return isinstance(error, CHANGED) and not isinstance(error, exc.TorchDynamoException)


def _refused(kind: str, mod: Any, extents: tuple[int, ...], error: Exception) -> _Refused:
    """With what an uncompiled call says of a mod, if that can be asked; else with what Dynamo does."""
    try:
        function = _python(mod)
    except Exception:  # One that is made in the region, of what has no value yet.
        function = None
    if function is not None:
        try:
            getattr(_trace, kind)(function, extents, constants=True)
        except Exception as said:
            return _Refused(said, is_wrong=True)
    if isinstance(error, (ValueError, TraceError)):
        return _Refused(error)
    if _is_of_another_version(error):
        return _refused_call(error)
    why = _first_line(error)
    if why.startswith("Data-dependent branching"):
        try:
            bool(_native.leaf("q", 1))
        except TraceError as branch:
            why = str(branch)
    return _Refused(TraceError(f"{kind}_mod `{_name(mod)}` cannot be part of a graph: {why}{_place(error)}"))


def _name(mod: Any) -> str:
    return str(mod.get_name()) if hasattr(mod, "get_name") else _source.name_of(getattr(mod, "value", mod))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _place(error: Exception) -> str:
    """The last line of the user's code that Dynamo was at."""
    frames = [frame for frame in getattr(error, "real_stack", None) or () if not _source.is_ours(frame.filename)]
    return f'; File "{frames[-1].filename}", line {frames[-1].lineno}, in {frames[-1].name}' if frames else ""


def _raise_as_dynamos(reason: Exception) -> NoReturn:
    """Raises an error as Dynamo lets it through, which is one of its own, and of its type besides."""
    if isinstance(reason, exc.Unsupported):
        raise reason
    try:
        raised = type("Unsupported", (exc.Unsupported, type(reason)), {})(str(reason))
    except TypeError:  # A type that is made of other things than a sentence.
        raised = exc.Unsupported(f"{type(reason).__name__}: {reason}")
    raise raised from None
