"""Calls inside ``torch.compile``: torch's own flex operator, marked for :mod:`foveate._inductor` to replace.

Dynamo traces this module, not Foveate's tracer: it makes FX graphs of the mods, and lifts what they capture.
"""

from __future__ import annotations

import math
from typing import Any, Callable

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention as _operator
from torch.nn.attention import flex_attention as _torch_flex
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

#: Options of the operator: that Foveate made it, and that of its block mask the function alone counts.
OURS, FUNCTION = "FOVEATE", "FOVEATE_MASK_FUNCTION"


def _install() -> None:
    from . import _inductor

    _inductor.install()


# Dynamo calls it when it traces, and leaves nothing of it in the graph.
_install._dynamo_marked_constant = True  # type: ignore[attr-defined]


def flex_attention(
    breaking: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Any:
    """:func:`foveate.flex_attention` in a compiled region; ``breaking`` is what it is outside, behind a graph break.

    A sink joins the operator's results by their ``lse``. Torch's operator has no place for dropout, and float64 takes a
    path of its own: these break the graph.
    """
    from . import _blocks, _flex
    from ._masks import Mask

    wants_max = return_aux is not None and return_aux.max_scores
    if dropout_p or query.dtype == torch.float64 or (sink is not None and wants_max):
        return breaking(
            query,
            key,
            value,
            score_mod,
            block_mask,
            scale,
            enable_gqa,
            return_lse,
            kernel_options,
            return_aux=return_aux,
            sink=sink,
            dropout_p=dropout_p,
        )
    _install()
    without_tables = block_mask if isinstance(block_mask, Mask) else None
    if without_tables is not None:
        block_mask = None
    _flex._check(query, key, value, block_mask, enable_gqa)
    if return_lse and return_aux is not None:
        _flex._check_return_lse(return_aux)
    if kernel_options:
        _flex._check_options(kernel_options)
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number, got {scale}")
    wants_lse = return_lse or (return_aux is not None and return_aux.lse)
    options: dict[str, Any] = {} if kernel_options is None else {n: v for n, v in kernel_options.items() if n != "foveate"}
    options[OURS] = True
    options["OUTPUT_LOGSUMEXP"] = wants_lse or sink is not None
    options["OUTPUT_MAX"] = wants_max
    if block_mask is None:
        block_mask = _torch_flex._create_empty_block_mask(query, key)
    else:
        _blocks.check(block_mask, (query.size(0), query.size(1), query.size(2), key.size(2)))
        if _blocks.is_function(block_mask):
            options[FUNCTION] = True
    parts = tuple(block_mask.as_tuple())
    if without_tables is not None:
        parts = (*parts[:-1], lambda b, h, q_idx, kv_idx: without_tables(b, h, q_idx, kv_idx))
    if parts[7] is None:
        # The operator wants lists of the queries' side for its gradient. Foveate's does not read them.
        parts = (*parts[:6], *parts[2:4], *parts[8:])
    # As torch does it: number of heads and their dims are constants of the graph.
    for tensor in (query, key, value):
        torch._dynamo.mark_static(tensor, -3)
        torch._dynamo.mark_static(tensor, -1)
    if scale is None:
        scale = 1.0 / math.sqrt(query.size(-1))
    if score_mod is None:
        score_mod = _torch_flex._identity
    out, lse, max_scores = _operator(query, key, value, score_mod, parts, scale, options)
    ln2 = math.log(2.0)
    lse, max_scores = lse * ln2, max_scores * ln2
    if sink is not None:
        logit = _flex._sink(sink, query)[:, None]
        out = (out * torch.sigmoid(lse - logit)[..., None]).to(out.dtype)
        lse = torch.logaddexp(lse, logit)
    if return_aux is not None:
        return out, AuxOutput(lse=lse if wants_lse else None, max_scores=max_scores if wants_max else None)
    return (out, lse) if return_lse else out


def create_block_mask(breaking: Callable[..., Any], mask_mod: Any, *args: Any, device: Any = None, **kwargs: Any) -> BlockMask:
    """:func:`foveate.create_block_mask` in a compiled region: torch's own, which evaluates every pair there."""
    from ._enable import TORCHS

    made: BlockMask = TORCHS["create_block_mask"](mask_mod, *args, device="cpu" if device is None else device, **kwargs)
    return made


def parsed(text: str, names: dict[str, Any]) -> Any:
    """A mask in text form, as an operator that :mod:`foveate._graph` reads; called as the mask function returns it."""
    tensors = {name: t for name, t in names.items() if isinstance(t, Tensor)}
    floats = {name: n for name, n in names.items() if isinstance(n, float)}
    integers = {name: int(n) for name, n in names.items() if name not in tensors and name not in floats}
    return torch.ops.foveate.mask(
        text,
        list(tensors),
        list(tensors.values()),
        list(integers),
        list(integers.values()),
        list(floats),
        list(floats.values()),
    )
