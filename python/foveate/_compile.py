"""Calls inside ``torch.compile``: a graph break and nothing of the package compiled, or what takes their place there.

:func:`uncompiled` does what ``torch.compiler.disable`` does, without importing Dynamo, which takes longer than the rest of
the package.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch._ops import HigherOrderOperator

#: Options of torch's operator in a graph: that Foveate made it, and for which other layout, "varlen" or "paged".
OURS, LAYOUT = "FOVEATE", "FOVEATE_LAYOUT"


class _Attention(HigherOrderOperator):
    """Torch's operator, as :mod:`foveate._dynamo` traces it. It is there in no graph, and none is made where it is called."""

    def __init__(self) -> None:
        super().__init__("foveate_attention")  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any) -> Any:
        return None


class _Outside(HigherOrderOperator):
    """A call of a function that breaks the graph; where it may not break, the error that the function would raise."""

    def __init__(self) -> None:
        super().__init__("foveate_outside")  # type: ignore[no-untyped-call]

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)


class _Instead(HigherOrderOperator):
    """A call of torch's function in place of ours; where torch's fails and the graph may not break, the error of ours."""

    def __init__(self) -> None:
        super().__init__("foveate_instead")  # type: ignore[no-untyped-call]

    def __call__(self, ours: Any, torchs: Any, *args: Any) -> Any:
        return torchs(*args)


ATTENTION, OUTSIDE, INSTEAD = _Attention(), _Outside(), _Instead()


def register() -> None:
    """Lets Dynamo, which calls it when it traces, know these."""
    from . import _dynamo

    _dynamo.register()


register._dynamo_marked_constant = True  # type: ignore[attr-defined]

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """``function``, run outside of compiled regions together with what it calls."""

    @functools.wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        callback = eval_frame.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            eval_frame.set_eval_frame(callback)

    outside._torchdynamo_disable = True  # type: ignore[attr-defined]
    outside._torchdynamo_disable_msg = "foveate runs outside of compiled regions"  # type: ignore[attr-defined]
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
    eval_frame.set_code_exec_strategy(outside.__code__, skip)  # type: ignore[attr-defined]
    return outside  # type: ignore[return-value]


def also_compiled(inside: Callable[..., Any]) -> Callable[[F], F]:
    """What a function is in a compiled region: ``inside(function, *args, **kwargs)``, which Dynamo traces; its
    ``function`` breaks the graph."""

    def decorate(function: F) -> F:
        breaking = uncompiled(function)

        @functools.wraps(function)
        def either(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                return inside(breaking, *args, **kwargs)
            callback = eval_frame.set_eval_frame(None)
            try:
                return function(*args, **kwargs)
            finally:
                eval_frame.set_eval_frame(callback)

        return either  # type: ignore[return-value]

    return decorate
