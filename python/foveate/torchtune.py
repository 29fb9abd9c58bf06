"""torchtune's models on Foveate's attention: ``foveate.torchtune.register()`` before they are built."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ._flex import flex_attention
from ._masks import Mask

__all__ = ["register"]


def register() -> None:
    """Makes models of torchtune that are built from now on attend with Foveate, with masks of packed documents and with
    dropout.

    Raises:
        ImportError: There is no torchtune 0.6, or it cannot be imported.
    """
    try:
        import torchtune.modules._export.attention as exported
        import torchtune.modules.attention as modules
        import torchtune.modules.attention_utils as utils

        utils._sdpa_or_flex_attention
    except (ImportError, AttributeError) as missing:
        raise ImportError(f"foveate.torchtune needs torchtune 0.6.1 and torchao 0.14.1: {missing}") from None
    for of in (utils, modules, exported):
        of._sdpa_or_flex_attention = _factory


def _factory() -> Callable[..., Tensor]:
    return _attention


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask | None, dropout_p: float, is_causal: bool
) -> Tensor:
    """``[B, H, Sq, D]`` of operands of these axes. ``mask`` is of blocks, or ``[B, Sq, Skv]``: bools that say what
    counts, or floats that are added."""
    score: Callable[..., Any] | None = None
    allowed: Mask | BlockMask | None = Mask.causal() if is_causal and mask is None else None
    if isinstance(mask, BlockMask):
        allowed = mask
    elif mask is not None:
        dense = mask.expand(q.size(0), q.size(2), k.size(2))
        if mask.dtype == torch.bool:
            allowed = Mask(lambda b, h, i, j: dense[b, i, j])
        else:
            score = lambda x, b, h, i, j: x + dense[b, i, j]  # noqa: E731
    return flex_attention(q, k, v, score, allowed, enable_gqa=True, dropout_p=dropout_p)
