"""Inductor's graphs: torch's flex operators replaced by Foveate's.

Inside a compiled region calls are torch's own operator ``flex_attention``, whose gradient is
``flex_attention_backward``; both have their mods as FX graphs. :class:`_Pass` sees the finished forward and
backward graphs before Inductor lowers them, and puts ``foveate::forward`` and ``foveate::backward`` in their place.
An operator whose mods have no program stays torch's, with one warning that says why.

Torch's operators have ``lse`` and ``max_scores``, and the gradient of ``lse``, to base 2.
"""

from __future__ import annotations

import copy
import glob
import math
import operator
import os
import warnings
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._higher_order_ops.flex_attention import flex_attention as _forward
from torch._higher_order_ops.flex_attention import flex_attention_backward as _backward
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._prims.rng_prims import graphsafe_run_with_rng_state, run_and_save_rng_state, run_with_rng_state
from torch.nn.attention.flex_attention import _LARGE_SPARSE_BLOCK_SIZE

from . import _checks, _graph, _native
from ._compile import LAYOUT, OURS
from ._interpreter import is_reading

_LN2 = math.log(2.0)
_aten = torch.ops.aten
_ours = torch.ops.foveate
_getitem = operator.getitem
#: What the pass makes of a graph may depend on any of the package's files.
_SOURCES = tuple(
    sorted(glob.glob(os.path.join(os.path.dirname(os.path.abspath(__file__)), "**", "*.py"), recursive=True))
)
_said: set[str] = set()


class _Pass(CustomGraphPass):
    """Replaces the operators that Foveate's wrapper made, after the pass that was there."""

    def __init__(self, before: Any) -> None:
        self.before = before

    def __call__(self, graph: fx.Graph) -> None:
        if self.before is not None:
            self.before(graph)
        replace(graph)

    def uuid(self) -> Any:
        """Names what the pass does, for Inductor's cache; None, and no caching, beside a pass that has no name."""
        before = None
        if self.before is not None:
            before = self.before.uuid() if isinstance(self.before, CustomGraphPass) else None
            if before is None:
                return None
        return (get_hash_for_files((*_SOURCES, _native.__file__)), before)


def install() -> None:
    """Makes Inductor run the pass."""
    there = config.post_grad_custom_pre_pass
    if not isinstance(there, _Pass):
        config.post_grad_custom_pre_pass = _Pass(there)


def replace(graph: fx.Graph) -> None:
    """Replaces torch's flex operators of a graph."""
    found = [node for node in graph.nodes if node.op == "call_function" and node.target in (_forward, _backward)]
    for node in found:
        options = node.args[6] if node.target is _forward else node.args[11]
        if not options.get(OURS):
            continue
        if node.target is _backward:
            # Torch's own lowering says so from 2.11 on; that of 2.10 fails by its code.
            _checks.refuse_gradients(*(t.dtype for t in _value(node.args[:3])))
        try:
            with graph.inserting_before(node):
                (_replace_forward if node.target is _forward else _replace_backward)(graph, node, options)
        except (_native.TraceError, ValueError, IndexError, TypeError) as reason:
            if LAYOUT in options:
                raise RuntimeError(f"{options[LAYOUT]} cannot be compiled: {reason}") from reason
            if _holds_ours(graph, node):
                raise
            _leave(graph, node, options, str(reason))
    if found:
        graph.eliminate_dead_code()


def _holds_ours(graph: fx.Graph, node: fx.Node) -> bool:
    """Whether its mask or score holds operators that nothing but this pass reads, so that it cannot stay torch's."""
    modules = (getattr(graph.owning_module, str(of.target), None) for of in node.all_input_nodes if of.op == "get_attr")
    graphs = (module.graph for module in modules if isinstance(module, fx.GraphModule))
    return any(
        str(inner.target).startswith("foveate.") for of in graphs for inner in of.nodes if inner.op == "call_function"
    )


def _leave(graph: fx.Graph, node: fx.Node, options: dict[str, Any], reason: str) -> None:
    at = 6 if node.target is _forward else 11
    node.update_arg(at, {name: v for name, v in options.items() if name != OURS})
    if reason not in _said:
        _said.add(reason)
        warnings.warn(f"flex_attention in a compiled graph stays torch's: {reason}", stacklevel=2)


def _value(x: Any) -> Any:
    """The example of a node's value."""
    return fx.map_arg(x, lambda node: node.meta["val"] if "val" in node.meta else _drawn(node))


def _drawn(node: fx.Node) -> Any:
    """The example of what a random operator draws in a checkpointed block, to which torch's partitioner gives none."""
    call: Any = node.args[0] if node.target is _getitem else node
    if call.target not in (graphsafe_run_with_rng_state, run_and_save_rng_state, run_with_rng_state):
        raise _native.TraceError(f"a graph has no example of `{node.name}`")
    drawing, *args = call.args[1:] if call.target is run_with_rng_state else call.args
    more = {name: x for name, x in call.kwargs.items() if name != "rng_state"}
    mode: Any = detect_fake_mode([n.meta["val"] for n in node.graph.nodes if "val" in n.meta])
    with mode:
        return drawing(*_value(args), **more)


class _Mods:
    """The arguments that say the mods of an operator."""

    def __init__(
        self,
        graph: fx.Graph,
        query: fx.Node,
        key: fx.Node,
        score: Any,
        block_mask: tuple[Any, ...],
        scale: float,
        options: dict[str, Any],
        score_operands: tuple[Any, ...],
        mask_operands: tuple[Any, ...],
    ) -> None:
        module = graph.owning_module
        q, k = query.meta["val"], key.meta["val"]
        if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise _native.TraceError(f"attention of {q.dtype} is not compiled")
        layout = options.get(LAYOUT)
        batch = _graph.BATCH if layout == "varlen" else q.shape[0]
        extents = (batch, q.shape[1], q.shape[2], _graph.LENGTH if layout == "paged" else k.shape[2])
        scoring, score_operands, self.whole = _moved_out(graph, getattr(module, score.target), score_operands)
        made = _graph.score(scoring, extents, _value(score_operands))
        self.score_captures = made.captures
        mods = [made.text, *_picked(made, score_operands)]
        lists, tile_q, tile_kv, mask = parts_of(block_mask)
        tiles = None
        if tile_q == _LARGE_SPARSE_BLOCK_SIZE and tile_kv == _LARGE_SPARSE_BLOCK_SIZE:
            lists = []
        else:
            tiles = (lists[0].meta["val"].shape[:2], _value((tile_q, tile_kv)))
        masking, mask_operands, _ = _moved_out(graph, getattr(module, mask.target), mask_operands)
        made = _graph.mask(masking, extents, _value(mask_operands), tiles)
        mods += [made.text, *_picked(made, (*mask_operands, tile_q, tile_kv))]
        carried = {name: ([mask_operands[i] for i in at], number) for name, (at, number) in made.arguments.items()}
        (seed,), dropout_p = carried.get("dropout_p", ([None], 0.0))
        self.arguments = [*mods, lists, [tile_q, tile_kv], scale, seed, dropout_p]
        #: The operators, and what these take after keys and values.
        self.operators, self.layout = _OPERATORS[layout], carried[layout][0] if layout else []


def _moved_out(
    graph: fx.Graph, module: fx.GraphModule, operands: tuple[Any, ...]
) -> tuple[fx.GraphModule, tuple[Any, ...], set[int]]:
    """A mod whose operations on whole captured tensors (``table.cumsum(0)``) are done before the operator: its graph
    without them, its operands with their results, and which operands are read there."""
    nodes = list(module.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    captured = placeholders[len(placeholders) - len(operands) :]
    examples = dict(zip(captured, _value(operands)))
    wanted: dict[fx.Node, None] = {}
    for node in nodes:
        inputs = node.all_input_nodes
        if not isinstance(node.target, torch._ops.OpOverload) or not inputs or any(i not in examples for i in inputs):
            continue
        if node.target.namespace == "foveate":
            continue  # It stands for what the program says.
        args, kwargs = fx.map_arg((node.args, node.kwargs), examples.__getitem__)
        examples[node] = node.target(*args, **kwargs)
        if isinstance(examples[node], torch.Tensor) and examples[node].dim() and not is_reading(node.target):
            wanted[node] = None
    results = [node for node in wanted if any(user not in wanted for user in node.users)]
    if not results:
        return module, operands, set()
    outside: dict[fx.Node, Any] = dict(zip(captured, operands))
    read: set[int] = set()

    def moved(node: fx.Node) -> Any:
        if node in captured:
            read.add(captured.index(node))
        elif node not in outside:
            args, kwargs = fx.map_arg((node.args, node.kwargs), moved)
            target: Any = node.target
            outside[node] = graph.call_function(target, args, kwargs)
            outside[node].meta["val"] = examples[node]
        return outside[node]

    made = copy.deepcopy(module.graph)
    copies = dict(zip(nodes, made.nodes))
    last = copies[placeholders[-1]]
    for at, node in enumerate(results):
        with made.inserting_after(last):
            last = made.placeholder(f"whole_{at}")
        copies[node].replace_all_uses_with(last)
    made.eliminate_dead_code()
    return fx.GraphModule(module, made), (*operands, *map(moved, results)), read


#: Forward and backward of each layout.
_OPERATORS = {
    None: (_ours.forward.default, _ours.backward.default),
    "varlen": (_ours.varlen_forward.default, _ours.varlen_backward.default),
    "paged": (_ours.paged.default, None),
}


def parts_of(block_mask: tuple[Any, ...]) -> tuple[list[Any], Any, Any, Any]:
    """The lists of a block mask's tiles for queries, its block size, and the graph of its function. Between the lists
    and the block size are those for keys, and in newer versions of torch more."""
    *_, tile_q, tile_kv, mask = block_mask
    return [t for t in block_mask[2:6] if t is not None], tile_q, tile_kv, mask


def _picked(made: _graph.Program, operands: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    return [operands[i] for i in made.captures], [operands[i] for i in made.scalars]


def _call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*_value(args))
    return node


def _item(graph: fx.Graph, of: fx.Node, at: int) -> fx.Node:
    node = graph.call_function(_getitem, (of, at))
    node.meta["val"] = of.meta["val"][at]
    return node


def _items(node: fx.Node) -> dict[Any, list[fx.Node]]:
    """The nodes that are an item of a node's value."""
    items: dict[Any, list[fx.Node]] = {}
    for user in node.users:
        if user.target is not _getitem:
            raise _native.TraceError("a graph uses the results of flex_attention as one")
        items.setdefault(user.args[1], []).append(user)
    return items


def _put(nodes: list[fx.Node], by: fx.Node) -> None:
    for node in nodes:
        node.replace_all_uses_with(by)


def _replace_forward(graph: fx.Graph, node: fx.Node, options: dict[str, Any]) -> None:
    args: Any = node.args
    query, key, value, score, block_mask, scale, _, score_operands, mask_operands = args
    mods = _Mods(graph, query, key, score, block_mask, scale, options, score_operands, mask_operands)
    items = _items(node)
    made = _call(graph, mods.operators[0], query, key, value, *mods.layout, *mods.arguments, 2 in items)
    for at, nodes in items.items():
        result = _item(graph, made, at)
        if at > 0:
            result = _call(graph, _aten.mul.Scalar, result, 1 / _LN2)
        _put(nodes, result)


def _replace_backward(graph: fx.Graph, node: fx.Node, options: dict[str, Any]) -> None:
    args: Any = node.args
    query, key, value, out, lse, d_out, d_lse, score, _, block_mask, scale, _, score_operands, mask_operands = args
    mods = _Mods(graph, query, key, score, block_mask, scale, options, score_operands, mask_operands)
    items = _items(node)
    captured: dict[int, list[fx.Node]] = {}
    for whole in items.get(3, ()):
        for at, nodes in _items(whole).items():
            captured.setdefault(at, []).extend(nodes)
    # Of the operands, those whose gradient is used; of the captured tensors that the operator takes, where these are.
    learned = [at for at in sorted(captured) if at in mods.score_captures]
    if mods.whole & captured.keys():
        raise _native.TraceError(
            "a score computes of a whole captured tensor that requires grad: compute it before the call"
        )
    lse = _call(graph, _aten.mul.Scalar, lse, _LN2)
    if d_lse is not None:
        d_lse = _call(graph, _aten.mul.Scalar, d_lse, 1 / _LN2)
    needs = [at in items for at in range(3)]
    places = [mods.score_captures.index(at) for at in learned]
    arguments = (query, key, value, *mods.layout, out, lse, d_out, d_lse, *mods.arguments, needs, places)
    made = _call(graph, mods.operators[1], *arguments)
    for at in range(3):
        if at in items:
            _put(items[at], _item(graph, made, at))
    if learned:
        gradients = _item(graph, made, 3)
        for place, at in enumerate(learned):
            _put(captured[at], _item(graph, gradients, place))
