"""Calls inside ``torch.compile``: a graph break, and nothing of the package compiled.

It does what ``torch.compiler.disable`` does, without importing Dynamo, which takes longer than the rest of
the package.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, TypeVar

from torch._C._dynamo import eval_frame

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
