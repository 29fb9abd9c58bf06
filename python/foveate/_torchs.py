"""Torch's ``flex_attention`` and ``create_block_mask`` as they were, whatever :func:`foveate.enable` makes of the
names."""

from __future__ import annotations

import inspect
import types
from typing import Any, Callable

from torch.nn.attention import flex_attention as _torch_flex


def _copy(function: types.FunctionType) -> Callable[..., Any]:
    made = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


#: By name.
TORCHS: dict[str, Callable[..., Any]] = {
    name: _copy(getattr(_torch_flex, name)) for name in ("flex_attention", "create_block_mask")
}
#: Torch's create_block_mask takes what Foveate's does, since 2.13.
KNOWS_FULL_BLOCKS = "separate_full_blocks" in inspect.signature(TORCHS["create_block_mask"]).parameters
