"""Calls inside ``torch.compile``: a graph break and nothing of the package compiled, or what takes their place there.

:func:`uncompiled` does what ``torch.compiler.disable`` does, without importing Dynamo, which takes longer than the rest
of the package.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, TypeVar

import torch
from torch._C._dynamo import eval_frame

from ._arguments import warn
from ._higher_order import CHANGED, of_another_version

#: Options of torch's operator in a graph: that Foveate made it, and for which other layout, "varlen" or "paged".
OURS, LAYOUT = "FOVEATE", "FOVEATE_LAYOUT"
_said: set[str] = set()


def register() -> bool:
    """Lets Dynamo, which calls it when it traces, know the operators of :mod:`foveate._higher_order`. False, after a
    warning, where this version's Dynamo lacks what they are made of: no compiled region can call them."""
    try:
        from . import _dynamo

        _dynamo.register()
    except CHANGED as error:
        said = f"calls of attention run outside of compiled graphs: {of_another_version(error)}"
        if said not in _said:
            _said.add(said)
            warn(said)
        return False
    return True


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
