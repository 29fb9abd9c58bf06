"""Traces mask and score functions written for torch.

A function runs once, on :class:`~foveate._native.Expr` values in place of 0-d tensors. Python's operators
on these record themselves, in Rust. Calls of torch reach :class:`Trace`, a mode that sees every torch
function while the user's code runs, also those whose arguments are ordinary tensors with a traced index:
``bias[q_idx]``. :mod:`foveate._calls` does what they ask, in the operators that
:mod:`foveate._operations` says. What is not there is an error that names the operation, the file and the line;
nothing is guessed.
"""

from __future__ import annotations

from typing import Any, Callable, Iterable

import torch

from . import _checks, _kept, _native
from ._arguments import Batched, shown, unwrapped, wants_gradient
from ._calls import Many, OutOfBounds, Reader, applied, called, innermost
from ._native import Expr, TraceError
from ._operations import OPERATIONS, cast, unknown
from ._source import captured, defined, literals_of, miscalled, name_of, place

#: A score function: of the score, b, h, q_idx and kv_idx.
ScoreMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Trace(Reader):
    """Sees what torch is asked for while a function is traced."""

    value = Expr

    def __init__(self, kind: str, function: Any, extents: tuple[int, int, int, int], constants: bool = False) -> None:
        super().__init__()
        self.kind, self.function, self.extents = kind, function, extents
        self.captures: dict[int, _native.Capture] = {}
        self.held: list[torch.Tensor] = []
        #: Whether elements of a captured tensor became a number, or decided how many there are in another one.
        self.read_elements = False
        self.numbers = _native.Numbers(kind == "mask", constants)

    def __enter__(self) -> Any:
        self.numbers.exchange()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.numbers.exchange()

    def capture(self, tensor: torch.Tensor, name: str = "") -> _native.Capture:
        """The buffer that ``tensor`` is in the program; errors call it by its ``name``, or that which the function
        has."""
        found = self.captures.get(id(tensor))
        if found is not None:
            return found
        if tensor.layout is not torch.strided or tensor.device.type not in ("cpu", "cuda"):
            refuse_capture(tensor, name or captured(self.function, tensor))
        wanted = wants_gradient(tensor)
        if wanted and self.kind == "mask":
            raise ValueError(LEARNS)
        _checks.refuse_tangents(tensor)
        read = tensor.resolve_neg()
        if not wanted:
            read = unwrapped(name or "a captured tensor", read)
        elif tensor.dtype == torch.float64:
            read = read.to(torch.float32)  # Its gradient finds the way back by itself.
        made = _native.Capture(f"{self.kind[0]}{len(self.captures)}", read, wanted)
        self.captures[id(tensor)] = made
        self.held.append(tensor)
        return made

    def operand(self, name: str, x: Any) -> Any:
        """An argument of an operation: 0-d tensors are values, others are no operands."""
        if isinstance(x, torch.Tensor):
            if x.dim() != 0:
                raise TraceError(
                    f"`{name}` is given {captured(self.function, x)} of shape {tuple(x.shape)}; index it first"
                )
            # The value of one on a device is read by the kernel: nothing waits for it.
            if not x.is_cpu or wants_gradient(x):
                return self.capture(x).only()
            self.read_elements = True
            return _native.constant(unwrapped("a captured tensor", x).item(), x.dtype)
        return x

    def left_symbolic(self, x: Any) -> list[bool]:
        """Whether each axis of a captured tensor, or of its rows, that is left over is of symbolic length."""
        return []

    def element(self, tensor: torch.Tensor, index: list[Any]) -> Expr:
        return self.capture(tensor).at(index)

    def parsed(self, text: str, names: Iterable[tuple[str, Any]]) -> Expr:
        """The mask that a text says, of tensors and numbers by name; a tensor of no axes is a number."""
        of = [(name, self.operand(name, x) if isinstance(x, torch.Tensor) and x.dim() == 0 else x) for name, x in names]
        tensors = [(name, self.capture(x, f"`{name}`")) for name, x in of if isinstance(x, torch.Tensor)]
        numbers = [(name, x) for name, x in of if not isinstance(x, torch.Tensor)]
        return _native.parse(text, tensors, numbers, self.extents[1], max(self.extents[2:]))

    def kept(self, reads: _kept.Reads | None, traced: _native.Traced) -> _native.Traced:
        """The result, kept if all that it depends on is known."""
        if reads is not None and not self.read_elements:
            reads.keep(traced)
        return traced

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # First what most functions do: one element of a captured tensor, an operation on values and numbers.
        if func is _GETITEM:
            of, index = args
            if type(index) is Expr and type(of) is torch.Tensor and of.dim() == 1:
                return self.capture(of).at([index])
            if not _traced(of) and not _traced(index):
                self.read_elements |= _selects(index)
                return func(of, index)
            return self.read(of, index)
        if not kwargs:
            for x in args:
                if type(x) not in _PLAIN:
                    break
            else:
                operation = OPERATIONS.get(func.__name__)
                if operation is not None and not isinstance(func, _OPERATORS):  # Another library's may have its name.
                    return applied(func.__name__, operation, args, {})
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if not any(map(_traced, args)) and not any(map(_traced, kwargs.values())):
            refuse_random(name)
            self.read_elements |= name in _NUMBERS or (name == "where" and len(args) + len(kwargs) == 1)
            return func(*args, **kwargs)
        if isinstance(func, _OPERATORS):
            namespace, name = str(func).split(".")[:2]
            if namespace not in ("aten", "prims"):
                from . import _interpreter

                return _interpreter.decomposed(self, func, args, kwargs)
        if name.endswith("_") and not name.endswith("__"):
            raise unknown(name)  # It would have to write.
        return called(name.strip("_"), *args, **kwargs)


NO_SCORE = "score_mod must be a function of (score, b, h, q_idx, kv_idx)"
#: What is said of a mask that could want a gradient.
LEARNS = "a mask function captures a tensor that requires grad; a mask has no gradient: capture its .detach()"
#: How Python calls a traced value in its own errors.
_EXPR = f"{Expr.__module__}.{Expr.__name__}"
#: What ``torch.ops`` has.
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_GETITEM = torch.Tensor.__getitem__
_PLAIN = frozenset((Expr, bool, int, float))
#: What Python asks a tensor for by itself, as for the index in `(3, 9)[t]`.
_NUMBERS = frozenset(("__bool__", "__float__", "__index__", "__int__"))
_RANDOM = frozenset(
    "rand randn randint randperm rand_like randn_like randint_like normal bernoulli multinomial poisson".split()
)


def refuse_capture(tensor: torch.Tensor, name: str) -> None:
    """Raises where a tensor cannot be captured, which is called by this name."""
    if tensor.layout is not torch.strided:
        raise TraceError(f"{name} must be dense, got one of {tensor.layout}; capture its .to_dense()")
    if tensor.device.type not in ("cpu", "cuda"):
        raise TraceError(
            f"{name} is on {tensor.device}; capture one on the device of the query, the CPU or a CUDA device"
        )


def refuse_random(name: str) -> None:
    """Raises where a function of torch draws numbers."""
    if name in _RANDOM:
        raise TraceError(
            f"`{name}` would draw the same numbers for all indices: draw a tensor outside of the function and read it "
            "by index, as in `noise[q_idx]`"
        )


def element_of(broadcast: torch.Tensor) -> Callable[..., Any]:
    """The element at a point ``(b, h, q, kv)`` of a tensor that is broadcast to ``[B, H, Sq, Skv]``."""
    single = [n == 1 for n in broadcast.shape]
    return lambda *point: broadcast[tuple(0 if one else i for one, i in zip(single, point[4 - len(single) :]))]


def running() -> Trace:
    """The trace of the function that runs."""
    trace = innermost()
    if not isinstance(trace, Trace):
        raise TraceError("a Mask in text form is part of attention or a block mask; it cannot be called otherwise")
    return trace


def _traced(x: Any) -> bool:
    if type(x) is Expr or isinstance(x, Many):
        return True
    return isinstance(x, (tuple, list)) and any(map(_traced, x))


def _selects(index: Any) -> bool:
    """Whether an index has elements that say which others to take."""
    if isinstance(index, (tuple, list)):
        return any(map(_selects, index))
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def literals() -> list[Any]:
    """Numbers in the source of the function that runs; called by the first operation that meets one."""
    trace = innermost()
    return list(literals_of(trace.function)) if isinstance(trace, Trace) else []


def _run(trace: Trace, function: Any, values: tuple[Expr, ...]) -> Any:
    def said_of(what: Any, error: Exception) -> str:
        at = place(error)
        return f"{trace.kind}_mod `{name_of(function)}`: {what}" + (f";{at}" if at else "")

    try:
        with trace:
            result = function(*values)
            if isinstance(result, torch.Tensor) and result.dim() == 0:
                result = trace.operand("return", result)
            return result
    except Batched as error:
        error.args = (said_of(error, error),)  # Who made the trace may choose an entry.
        raise
    except TraceError as error:
        what = f"{trace.kind}_mod `{name_of(function)}`: {error}"
        raise TraceError(what if "File" in what else said_of(error, error)) from error
    except ValueError as error:
        if str(error) != LEARNS:
            raise
        raise ValueError(said_of(error, error)) from None
    except KeyError as error:
        if not any(isinstance(key, Expr) for key in error.args):
            raise
        raise TraceError(
            said_of("a dict cannot be read at a traced value; capture a tensor and index it", error)
        ) from error
    except TypeError as error:
        if " received an invalid combination of arguments" in str(error):
            # In further lines torch says what it would have taken.
            raise TypeError(said_of(str(error).split(", but expected")[0], error)) from error
        if _EXPR in str(error):
            raise TypeError(said_of(str(error).replace(_EXPR, "traced value"), error)) from error
        wrong = miscalled(trace.kind, function, len(values), error)
        if wrong is None:
            raise
        if trace.kind == "score" and hasattr(function, "_program"):
            raise TypeError(f"{NO_SCORE}, got a Mask: it is a block_mask") from None
        raise wrong from None
    except IndexError as error:
        if isinstance(error, OutOfBounds):
            raise IndexError(said_of(error, error)) from None
        if "numpy" not in str(error):
            raise
        what = "an array of NumPy cannot be read at a traced index; capture `torch.from_numpy(array)`"
        raise TraceError(said_of(what, error)) from error


def mask(
    function: Any, extents: tuple[int, int, int, int], wrap: Any = None, constants: bool = False
) -> _native.Traced:
    """The program of a mask function, for ``extents`` of b, h, q and kv.

    ``wrap(trace, values, mask)`` makes another mask of it. With ``constants`` captured numbers are constants.
    """
    if not callable(function):
        raise TypeError(f"a mask must be a Mask or a function of (b, h, q_idx, kv_idx), got {shown(function)}")
    reads = None if wrap is not None or constants else _kept.Reads.of("mask", function, extents)
    known = None if reads is None else reads.known(function)
    if known is not None:
        return known
    trace = Trace("mask", function, extents, constants)
    values = tuple(map(_native.leaf, ("b", "h", "q", "kv"), extents))
    result = _run(trace, function, values)
    _check(result, function, "mask")
    result = cast(result, torch.bool)
    if wrap is not None:
        result = _run(trace, lambda *v: wrap(trace, v, result), values)
    return trace.kept(reads, _native.mask(result, list(trace.captures.values()), function))


def score(function: Any, extents: tuple[int, int, int, int], constants: bool = False) -> _native.Traced:
    """The program of a score function, for ``extents`` of b, h, q and kv; captured numbers as in :func:`mask`."""
    if not callable(function):
        raise TypeError(f"{NO_SCORE}, got {shown(function)}")
    reads = None if constants else _kept.Reads.of("score", function, extents)
    known = None if reads is None else reads.known(function)
    if known is not None:
        return known
    trace = Trace("score", function, extents, constants)
    values = tuple(map(_native.leaf, ("score", "b", "h", "q", "kv"), (0, *extents)))
    result = _run(trace, function, values)
    _check(result, function, "score")
    return trace.kept(reads, _native.score(cast(result, torch.float32), list(trace.captures.values()), function))


def _check(result: Any, function: Any, kind: str) -> None:
    wrong = wrongly_returned(result, kind)
    if wrong is not None:
        raise ValueError(f"{kind}_mod `{name_of(function)}` {wrong}{defined(function)}")


def wrongly_returned(result: Any, kind: str) -> str | None:
    """What is wrong with the result of a function: right are traced values of its kind, and tensors of no axes."""
    if isinstance(result, (Expr, torch.Tensor)):
        dtype, shape = result.dtype, tuple(result.shape)
        if not shape and (dtype == torch.bool if kind == "mask" else dtype.is_floating_point):
            return None
        what = f"a tensor of {dtype}" + (f" of shape {shape}" if shape else "")
    else:
        what = str(result if isinstance(result, Many) else type(result))
    return f"must return {'a bool' if kind == 'mask' else 'a float'} tensor, got {what}"
