"""Functions of torch on traced values, said in operators that :class:`~foveate._native.Expr` records.

They take and give 0-d values and know nothing of the function that is traced. What each dtype becomes is
torch's rule of promotion.
"""

from __future__ import annotations

from typing import Any, Callable

from .._native import TraceError
from . import activations, arithmetic, comparisons, functions, values
from .base import cast
from .refused import INSTEAD

__all__ = ["OPERATIONS", "cast", "unknown"]

#: Torch's functions and methods by name, without underscores around it.
OPERATIONS: dict[str, Callable[..., Any]] = {
    **arithmetic.OPERATIONS,
    **comparisons.OPERATIONS,
    **functions.OPERATIONS,
    **activations.OPERATIONS,
    **values.OPERATIONS,
}


def unknown(name: str) -> TraceError:
    """The error for a function that cannot be traced."""
    if name.endswith("_") and name.strip("_") in OPERATIONS:
        plain = name.strip("_")
        return TraceError(
            f"`{name}` cannot write into a tensor or a traced value in a mask or score: use the result of `{plain}`"
        )
    what = INSTEAD.get(
        name.strip("_"), "what depends on indices alone can be computed outside and read by index, as in `table[q_idx]`"
    )
    return TraceError(f"`{name}` is not supported in a mask or score; {what}")
