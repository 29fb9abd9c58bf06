"""``torch.nn.functional.scaled_dot_product_attention`` and ``torch.nn.attention.varlen.varlen_attn`` on Foveate:
``foveate.sdpa.activate()``, undone by ``torch.nn.attention.restore_flash_attention_impl()``.

What is replaced are PyTorch's operators of FlashAttention on CUDA tensors, float16 and bfloat16. PyTorch still decides
which calls they take; with ``torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION)`` it is all that can be.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor

from . import _autograd, _trace, _varlen

__all__ = ["activate"]

NAME = "FOVEATE"


def activate() -> None:
    """Makes Foveate the implementation of FlashAttention in PyTorch, in place of its own or another one.

    Raises:
        RuntimeError: PyTorch 2.11 is the first that takes and gives back another implementation, and this is an older
            one.
    """
    try:
        from torch.nn.attention import (
            activate_flash_attention_impl,
            register_flash_attention_impl,
            restore_flash_attention_impl,  # noqa: F401: without it nothing would undo the call
        )
    except ImportError:
        raise RuntimeError(f"foveate.sdpa needs PyTorch 2.11 or newer, and this is {torch.__version__}") from None
    register_flash_attention_impl(NAME, register_fn=_registered)
    activate_flash_attention_impl(NAME)


class _Handle:
    """The operators while they are replaced."""

    def __init__(self) -> None:
        self.library = torch.library.Library("aten", "IMPL", "CUDA")  # noqa: TOR901
        for name, function in (
            ("_flash_attention_forward", flash_forward),
            ("_flash_attention_backward", flash_backward),
            ("_scaled_dot_product_flash_attention", forward),
            ("_scaled_dot_product_flash_attention_backward", backward),
        ):
            self.library.impl(name, function, "CUDA")

    def remove(self) -> None:
        self.library._destroy()


def _registered(**_: Any) -> _Handle:
    return _Handle()


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """``aten::_scaled_dot_product_flash_attention``: operands ``[B, H, S, D]``."""
    _refuse(return_debug_mask, None)
    mask = _mask(is_causal, None, None, key.size(2) - query.size(2))
    seed, dropout = _drawn(dropout_p, query)
    out, lse = _forward(query, key, value, mask, scale, dropout, None)
    nothing, unused = query.new_empty(0), _unused(query)
    return out, lse, None, None, query.size(2), key.size(2), seed, unused, nothing


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """``aten::_scaled_dot_product_flash_attention_backward``."""
    del cum_seq_q, cum_seq_k, max_q, max_k, philox_offset
    mask = _mask(is_causal, None, None, key.size(2) - query.size(2))
    return _backward(grad_out, query, key, value, out, logsumexp, mask, scale, _again(dropout_p, philox_seed), None)


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """``aten::_flash_attention_forward``: operands ``[B, S, H, D]``, or ``[T, H, D]`` with offsets of sequences."""
    _refuse(return_debug_mask, alibi_slopes)
    (q, k, v), offsets = _placed((query, key, value), cum_seq_q, cum_seq_k, max_q, max_k)
    shift = _shift(query, key, cum_seq_q, cum_seq_k, seqused_k)
    mask = _mask(is_causal, window_size_left, window_size_right, shift, seqused_k)
    seed, dropout = _drawn(dropout_p, query)
    out, lse = _forward(q, k, v, mask, scale, dropout, offsets)
    out, lse = (out.transpose(1, 2), lse) if offsets is None else (out, lse.squeeze(0))
    return out, lse, seed, _unused(query), query.new_empty(0)


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    """``aten::_flash_attention_backward``."""
    del unused
    tensors, offsets = _placed((query, key, value, grad_out, out), cum_seq_q, cum_seq_k, max_q, max_k)
    q, k, v, d_out, o = tensors
    lse = logsumexp if cum_seq_q is None else logsumexp.unsqueeze(0)
    mask = _mask(is_causal, window_size_left, window_size_right, _shift(query, key, cum_seq_q, cum_seq_k, None))
    gradients = _backward(d_out, q, k, v, o, lse, mask, scale, _again(dropout_p, rng_state), offsets)
    return gradients if offsets is not None else tuple(d.transpose(1, 2) for d in gradients)


def _refuse(return_debug_mask: bool, alibi_slopes: Tensor | None) -> None:
    if return_debug_mask:
        raise NotImplementedError("return_debug_mask: Foveate holds no weights that it could return")
    if alibi_slopes is not None:
        raise NotImplementedError("alibi_slopes: call foveate.flex_attention with a score function")


def _placed(
    tensors: tuple[Tensor, ...], cu_q: Tensor | None, cu_k: Tensor | None, max_q: int, max_k: int
) -> tuple[tuple[Tensor, ...], Any]:
    """Tensors as calls take them, ``[B, H, S, D]``, or rows of one sequence after another as they are, with the
    offsets."""
    if cu_q is None or cu_k is None:
        return tuple(t.transpose(1, 2) for t in tensors), None
    return tensors, _varlen.sequences(cu_q, cu_k, tensors[0], tensors[1], max_q, max_k)[0]


def _shift(query: Tensor, key: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, used: Tensor | None) -> int | Tensor:
    """How many more keys than queries there are: one number, or one for each sequence."""
    if cu_q is None or cu_k is None:
        return key.size(1) - query.size(1) if used is None else used - query.size(1)
    if cu_q is cu_k and used is None:
        return 0
    return (cu_k.diff() if used is None else used) - cu_q.diff()


def _mask(
    causal: bool, left: int | None, right: int | None, shift: int | Tensor, used: Tensor | None = None
) -> Callable[..., Any] | None:
    """Keys up to ``left`` before and ``right`` after the query, both counted from the last: negative, or None, for
    all."""
    before = None if left is None or left < 0 else left
    after = 0 if causal else None if right is None or right < 0 else right
    if before is None and after is None and used is None:
        return None

    def seen(b: Any, h: Any, q: Any, kv: Any) -> Any:
        at = q + shift[b] if isinstance(shift, Tensor) else q + shift if shift else q
        allowed = [] if used is None else [kv < used[b]]
        if after is not None:
            allowed.append(kv <= at + after if after else kv <= at)
        if before is not None:
            allowed.append(kv >= at - before)
        result = allowed[0]
        for more in allowed[1:]:
            result = result & more
        return result

    return seen


def _drawn(p: float, query: Tensor) -> tuple[Tensor, Any]:
    """The state of dropout as these operators return it, and as attention takes it."""
    if p == 0.0:
        return torch.zeros(2, dtype=torch.uint64, device=query.device), None
    seed = torch.randint(2**63 - 1, (2,), device=query.device).view(torch.uint64)
    return seed, _again(p, seed)


def _again(p: float, seed: Tensor) -> Any:
    if p == 0.0:
        return None
    first = seed[:1].view(torch.int64)
    return p, first.view(torch.int32) if seed.is_cuda else int(first)


def _unused(query: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.uint64, device=query.device)


def _call(q: Tensor, k: Tensor, mask: Any, scale: float | None, dropout: Any, offsets: Any) -> _autograd.Call:
    if offsets is None:
        extents = (q.size(0), q.size(1), q.size(2), k.size(2))
    elif q.is_cuda:
        extents = (offsets[0].size(0) - 1, q.size(1), offsets[2], offsets[3])
    else:
        extents = (len(offsets[0]) - 1, q.size(1), q.size(0), k.size(0))
    traced = None if mask is None else _trace.mask(mask, extents)
    return _autograd.Call(None, traced, scale, dropout, True, False, offsets)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float | None, dropout: Any, offsets: Any
) -> tuple[Tensor, Tensor]:
    call = _call(q, k, mask, scale, dropout, offsets)
    learns = q.requires_grad or k.requires_grad or v.requires_grad
    out, lse, _ = call.forward(q, k, v, None, (), forward_only=not learns)
    assert lse is not None
    return out, lse


def _backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Any,
    scale: float | None,
    dropout: Any,
    offsets: Any,
) -> tuple[Tensor, ...]:
    call = _call(q, k, mask, scale, dropout, offsets)
    needs = (True, True, True, False, False)
    gradients: Any = _autograd.Gradient.forward(call, needs, q, k, v, None, out, lse, d_out, None)
    return tuple(gradients[:3])
