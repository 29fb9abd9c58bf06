"""torchtune's models on Foveate's attention: ``foveate.torchtune.register()`` before they are built."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ._arguments import shown
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
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask | Mask | None, dropout_p: float, is_causal: bool
) -> Tensor:
    """``[B, H, Sq, D]`` of operands of these axes. ``mask`` is of blocks, a ``Mask``, or expands to ``[B, Sq, Skv]``:
    bools that say what counts, or floats that are added.

    Raises:
        ValueError: It is none of these.
    """
    score: Callable[..., Any] | None = None
    allowed: Mask | BlockMask | None = Mask.causal() if is_causal and mask is None else None
    if isinstance(mask, (BlockMask, Mask)):
        allowed = mask
    elif mask is not None:
        dense = _dense(mask, (q.size(0), q.size(2), k.size(2)))
        if mask.dtype == torch.bool:
            allowed = Mask(lambda b, h, i, j: dense[b, i, j])
        else:
            score = lambda x, b, h, i, j: x + dense[b, i, j]  # noqa: E731
    return flex_attention(q, k, v, score, allowed, enable_gqa=True, dropout_p=dropout_p)


def _dense(mask: Any, extents: tuple[int, ...]) -> Tensor:
    fits = (
        isinstance(mask, Tensor)
        and (mask.dtype == torch.bool or mask.is_floating_point())
        and mask.dim() <= 3
        and all(n in (1, most) for n, most in zip(reversed(mask.shape), reversed(extents)))
    )
    if not fits:
        raise ValueError(
            f"mask must be a block mask, a Mask, or a tensor of bools or floats that expands to {list(extents)}, got "
            f"{shown(mask)}"
        )
    expanded: Tensor = mask.expand(extents)
    return expanded
