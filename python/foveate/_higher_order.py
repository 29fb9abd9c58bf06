"""Operators that a compiled region calls where Dynamo is to do something of Foveate's, which :mod:`foveate._dynamo`
says; and what is said where a version of Dynamo cannot.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import HigherOrderOperator

#: What is raised by code that uses what another version of PyTorch has changed.
CHANGED = (AttributeError, ImportError, LookupError, NameError, TypeError)


class _Attention(HigherOrderOperator):
    """Torch's operator, as :mod:`foveate._dynamo` traces it: no graph has this one. In a frame that Dynamo does not
    trace it gives None, and the call is then made by :data:`OUTSIDE`."""

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
    """A call of torch's function in place of ours; where torch's fails and the graph may not break, the error of
    ours."""

    def __init__(self) -> None:
        super().__init__("foveate_instead")  # type: ignore[no-untyped-call]

    def __call__(self, ours: Any, torchs: Any, *args: Any) -> Any:
        return torchs(*args)


ATTENTION, OUTSIDE, INSTEAD = _Attention(), _Outside(), _Instead()


def of_another_version(error: Exception) -> str:
    """What is said where Foveate's part of Dynamo fails, and no function of the user's is at fault."""
    why = next(iter(str(error).splitlines()), "")
    return (
        f"PyTorch {torch.__version__} has another Dynamo than foveate knows ({type(error).__name__}: {why}), with "
        "which attention runs uncompiled: update foveate, or use a version that its manual names"
    )
