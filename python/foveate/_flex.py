"""``flex_attention``: the checks of torch's, a trace of its functions, and one autograd function."""

from __future__ import annotations

import logging
import math
import warnings
from typing import Any, Callable, Literal, Union, overload

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as _torch_flex
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from . import _blocks, _cuda, _dense, _native, _region, _sharded, _trace
from ._compile import also_compiled, uncompiled
from ._masks import Mask, offsets_of

_log = logging.getLogger("foveate")
_BACKENDS = ("AUTO", "TRITON", "FLASH", "TRITON_DECODE")
_OWN_OPTIONS: frozenset[str] = frozenset()
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_said: set[str] = set()
_transforms_active = torch._C._are_functorch_transforms_active

_Returned = Union[Tensor, "tuple[Tensor, Tensor]", "tuple[Tensor, AuxOutput]"]

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | Mask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor: ...
@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | Mask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, AuxOutput]: ...
@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | Mask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[True],
    kernel_options: dict[str, Any] | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]: ...
@also_compiled(_region.flex_attention)
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | Mask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Attention with a score function and a mask, as ``torch.nn.attention.flex_attention`` has it.

    Runs forward and backward on CPU and CUDA tensors of any strides, uncompiled, without holding scores; in a
    function that ``torch.compile`` compiles, as part of its graph. CUDA tensors are used where they lie, on the
    current stream, with memory of torch's allocator, and nothing waits for the device.

    Args:
        query: ``[B, Hq, L, E]``, float32, bfloat16 or float16; float64 takes a slow path of plain torch
            operations that is differentiable twice.
        key: ``[B, Hkv, S, E]``; a batch of 1 is shared by all of ``query``'s, with a block mask of batch B.
        value: ``[B, Hkv, S, Ev]``.
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)`` gives the new score. It is traced in each call,
            so it may be a closure over anything; tensors that it captures and that require grad get
            gradients.
        block_mask: Which keys each query sees: a :class:`Mask`, a block mask from :func:`create_block_mask`, or
            any ``BlockMask`` of torch's. Of a block mask that was made here the function counts as it is now; of another
            one the lists count: of its full tiles every pair, of its partial tiles those that its
            function lets through, of others none.
        scale: Factor on ``query @ key``; ``1/sqrt(E)`` when it is None.
        enable_gqa: Lets ``Hq`` be a multiple of ``Hkv``.
        return_lse: Deprecated; ``return_aux=AuxRequest(lse=True)`` is the same.
        kernel_options: Torch's options for Triton are accepted and change nothing.
        return_aux: Which of ``lse`` and ``max_scores`` to return too, ``[B, Hq, L]``, float32, or
            float64 where ``query`` is. ``lse`` is a natural logarithm and differentiable; ``max_scores`` is not.
        sink: ``[Hq]``, a logit for each query head that joins the softmax's denominator only. It is not in
            torch's function. It gets a gradient; ``lse`` includes it.
        dropout_p: Drops each weight with this probability after the softmax and scales the others by
            ``1/(1 - dropout_p)``. It is not in torch's function. The seed is drawn from torch's generator, so
            ``torch.manual_seed`` and checkpointing repeat it.

    DTensors of one layout, sharded by batch and heads, are attended part by part. Functions see the indices of the whole,
    captured tensors and the sink are whole on each rank, and their gradients are those of its part.

    Returns:
        ``out [B, Hq, L, Ev]``, of the dtype and the stride order of ``query``, its last axis contiguous; with
        ``return_aux`` the pair of it and an ``AuxOutput``; with ``return_lse`` the pair of it and ``lse``. A
        query without a key has ``out`` 0, ``lse`` ``-inf`` and gradients 0.

    Raises:
        ValueError: Shapes, head counts, dtypes or lengths do not fit each other.
        TraceError: A function does something that cannot be traced; the message says what, and where.
        IndexError: A function read a captured tensor outside its bounds (CPU; CUDA reads the nearest element).
        torch.OutOfMemoryError: Torch's allocator has no memory for the call.
        RuntimeError: There is no NVRTC to compile kernels with; the message says how to get it.
    """
    if type(query) is not Tensor and _sharded.is_sharded(query):
        more: dict[str, Any] = dict(scale=scale, enable_gqa=enable_gqa, return_lse=return_lse, kernel_options=kernel_options)
        more |= dict(return_aux=return_aux, dropout_p=dropout_p)
        sharded: Any = _sharded.attention(flex_attention, query, key, value, score_mod, block_mask, sink, **more)
        return sharded  # type: ignore[no-any-return]
    if _autocasts(query):
        query, key, value = _autocast(query, key, value)
    extents = _native.extents(query, key, value, enable_gqa)
    if extents is None:
        _check(query, key, value, block_mask, enable_gqa)
    if return_lse:
        _check_return_lse(return_aux)
    if return_aux is not None:
        _check_aux(return_aux)
    if kernel_options:
        _check_options(kernel_options)
    if scale is not None:
        scale = _checked_scale(scale)
    dropout = None if dropout_p == 0.0 else _dropout(dropout_p, query)
    if sink is not None:
        sink = _sink(sink, query)
    if extents is None:
        key, value = _of_one_dtype(query, key, value)
        query, key, value = (t.resolve_neg() for t in (query, key, value))
        if query.dtype == torch.float64:
            results = _dense.attention(query, key, value, score_mod, block_mask, scale, sink, dropout_p)
            return _returned(*results, return_lse, return_aux)
        extents = (query.size(0), query.size(1), query.size(2), key.size(2))
    score = None if score_mod is None else _trace.score(score_mod, extents)
    mask = None if block_mask is None else _blocks.program_of(block_mask, extents, query.device)
    wants_lse = return_lse or (return_aux is not None and return_aux.lse)
    wants_max = return_aux is not None and return_aux.max_scores
    call = _Call(score, mask, scale, dropout, wants_lse, wants_max)
    out, lse, max_scores = _run(call, query, key, value, sink)
    return _returned(out, lse, max_scores, return_lse, return_aux)


def _checked_scale(scale: float) -> float:
    _is_number("scale", scale)
    if not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number, got {scale}")
    return float(scale)


def _is_number(name: str, given: Any) -> None:
    try:
        math.isfinite(given)
    except TypeError:
        raise TypeError(f"{name} must be a number, got {given!r}") from None


def _dropout(p: float, query: Tensor) -> tuple[float, int | Tensor]:
    """The probability, and a seed from torch's generator of the query's device, where it stays."""
    _is_number("dropout_p", p)
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout_p must be at least 0 and below 1, got {p}")
    if query.is_cuda:
        return p, torch.randint(2**63 - 1, (1,), device=query.device).view(torch.int32)
    return p, int(torch.randint(2**63 - 1, ()))


def _check_return_lse(return_aux: AuxRequest | None) -> None:
    if return_aux is not None:
        raise ValueError(
            "Cannot specify both return_lse and return_aux. return_lse is deprecated, please use "
            "return_aux=AuxRequest(lse=True) instead."
        )
    # Torch's function has said so too, and code that wants to hear it again clears torch's list.
    shown = getattr(_torch_flex, "_WARNINGS_SHOWN", _said)
    if "deprecated_return_lse" not in shown:
        shown.add("deprecated_return_lse")
        warnings.warn(
            "return_lse is deprecated. Please use return_aux=AuxRequest(lse=True) instead.",
            FutureWarning,
            stacklevel=4,
        )


def _check_aux(return_aux: Any) -> None:
    if not isinstance(return_aux, AuxRequest):
        raise TypeError(f"return_aux must be an AuxRequest, got {return_aux!r}; AuxRequest(lse=True) asks for lse")


def _of_one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values in the dtype of the queries, which they need not have where nothing wants a gradient."""
    if key.dtype == query.dtype and value.dtype == query.dtype:
        return key, value
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise ValueError(
            "Backward pass with mixed query, key, and value dtype is not supported, got "
            f"query.dtype={query.dtype}, key.dtype={key.dtype}, and value.dtype={value.dtype}"
        )
    return key.to(query.dtype), value.to(query.dtype)


def _run(call: _Call, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Any:
    """``out``, ``lse`` and ``max_scores`` of a call, with a gradient where one is wanted."""
    learned = () if call.score is None else call.score.learned
    if _transforms_active():
        return _Attention.apply(q, k, v, sink, call, *learned)  # type: ignore[no-untyped-call]
    if torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or learned
        or (sink is not None and sink.requires_grad)
    ):
        return _Plain.apply(q, k, v, sink, call, *learned)  # type: ignore[no-untyped-call]
    return call.forward(q, k, v, sink, (), forward_only=True)


def _returned(out: Tensor, lse: Any, max_scores: Any, return_lse: bool, aux: AuxRequest | None) -> _Returned:
    if aux is not None:
        return out, AuxOutput(lse=lse if aux.lse else None, max_scores=max_scores if aux.max_scores else None)
    return (out, lse) if return_lse else out


class _Call:
    """What one call asks for, besides tensors; after ``forward``, its plan."""

    __slots__ = ("score", "mask", "scale", "dropout", "wants_lse", "wants_max", "varlen", "pages", "plan")

    def __init__(
        self,
        score: Any,
        mask: Any,
        scale: float | None,
        dropout: Any,
        wants_lse: bool,
        wants_max: bool,
        varlen: Any = None,
        pages: tuple[Tensor, Any] | None = None,
    ) -> None:
        self.score, self.mask, self.scale, self.dropout = score, mask, scale, dropout
        self.wants_lse, self.wants_max, self.varlen, self.pages = wants_lse, wants_max, varlen, pages
        self.plan: Any = None

    def again(self) -> _Call:
        """The same, for another run."""
        of = (self.score, self.mask, self.scale, self.dropout, self.wants_lse, self.wants_max, self.varlen, self.pages)
        return _Call(*of)

    def planned(
        self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, learned: tuple[Tensor, ...], forward_only: bool
    ) -> Any:
        of = (q, k, v, self.score, self.mask, self.scale, sink, self.dropout, self.varlen, self.pages)
        if q.is_cuda:
            _cuda.start()
            deterministic = torch.are_deterministic_algorithms_enabled()
            return _native.cuda_plan(*of, list(learned), forward_only, deterministic)
        return _native.plan(*of, list(learned), forward_only, torch.get_num_threads())

    def clear(self, queries: tuple[Tensor | None, ...], keys: tuple[Tensor | None, ...]) -> None:
        """Sets rows past the last sequence to 0: nothing is computed there."""
        if self.varlen is None:
            return
        for ends, tensors in zip(self.varlen, (queries, keys)):
            for tensor in tensors:
                if tensor is None:
                    continue
                if isinstance(ends, Tensor):
                    past = torch.arange(tensor.size(2), device=tensor.device) >= ends[-1]
                    tensor.masked_fill_(past[:, None], 0)
                elif tensor.size(2) > ends[-1]:
                    tensor[:, :, ends[-1] :] = 0

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, learned: tuple[Tensor, ...], forward_only: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        plan = self.planned(q, k, v, sink, learned, forward_only)
        shape = q.shape
        out = _empty_in_order(q, shape if v.shape[3] == shape[3] else (*shape[:3], v.shape[3]))
        rows = shape[:3]
        lse = q.new_empty(rows, dtype=torch.float32) if self.wants_lse or not forward_only or q.is_cuda else None
        max_scores = q.new_empty(rows, dtype=torch.float32) if self.wants_max else None
        try:
            plan.forward(q, k, v, out, lse, max_scores)
        except IndexError as error:
            raise _trace.named(error, self.score, self.mask) from None
        self.plan = plan
        if self.varlen is not None:
            self.clear((out,), ())
            end = self.varlen[0][-1]
            for of_rows in (lse, max_scores):
                if of_rows is not None and isinstance(end, Tensor):
                    of_rows.masked_fill_(torch.arange(of_rows.size(2), device=of_rows.device) >= end, -math.inf)
                elif of_rows is not None:
                    of_rows[:, :, end:] = -math.inf
        return out, lse, max_scores


class _Attention(torch.autograd.Function):
    """Attention and its gradient. Captured tensors that want one are inputs, in the order of the score's
    captures."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, call: _Call, *learned: Tensor) -> Any:
        return call.forward(q, k, v, sink, learned, forward_only=False)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Any]) -> None:
        q, k, v, sink, call, *learned = inputs
        out, lse, max_scores = output
        ctx.call = call
        ctx.learned = learned
        ctx.sink = sink
        ctx.set_materialize_grads(False)
        if max_scores is not None:
            ctx.mark_non_differentiable(max_scores)
        # Torch says so if one that is read where it lies is written to before the backward.
        shared = (t for traced in (call.score, call.mask) if traced is not None for t in traced.shared)
        ctx.save_for_backward(q, k, v, out, lse, *shared)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, _: Any) -> tuple[Any, ...]:
        q, k, v, out, lse, *_shared = ctx.saved_tensors
        if d_out is None:
            d_out = torch.zeros((), dtype=out.dtype, device=out.device).expand(out.shape)
        d_out, d_lse = (None if d is None else d.resolve_neg() for d in (d_out, d_lse))
        inputs = (ctx.call, ctx.needs_input_grad, q, k, v, ctx.sink, out, lse, d_out, d_lse, *ctx.learned)
        if torch.is_grad_enabled() or _transforms_active():
            gradients = _Gradient.apply(*inputs)  # type: ignore[no-untyped-call]
        else:
            gradients = _Gradient.forward(*inputs)
        return (*gradients[:4], None, *gradients[4:])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, tuple[Any, ...]]:
        """One run for each entry of the axis: functions see the indices of their own run."""
        return _each_entry(_Attention, info, in_dims, inputs)


class _Plain(torch.autograd.Function):
    """:class:`_Attention` outside of transforms of ``torch.func``, for which alone torch binds signatures, in
    twice the time of everything else."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        output = _Attention.forward(*inputs)
        _Attention.setup_context(ctx, inputs, output)
        return output

    backward = _Attention.backward


class _Gradient(torch.autograd.Function):
    """The gradients of q, k, v, the sink and captured tensors. They have none themselves."""

    @staticmethod
    def forward(
        call: _Call,
        needs: tuple[bool, ...],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor,
        d_lse: Tensor | None,
        *learned: Tensor,
    ) -> tuple[Tensor | None, ...]:
        plan = call.plan or call.planned(q, k, v, sink, learned, forward_only=False)
        gradients = [_empty_in_order(t, t.shape) if wanted else None for t, wanted in zip((q, k, v), needs)]
        d_sink = torch.empty_like(sink) if sink is not None and needs[3] else None
        captures = () if call.score is None else call.score.captures
        destinations = [
            torch.empty(t.shape, dtype=torch.float32 if t.is_cuda else t.dtype, device=t.device) if wanted else None
            for t, wanted in zip(learned, needs[5:])
        ]
        each = iter(destinations)
        into = [next(each) if capture.learned else None for capture in captures]
        try:
            plan.backward([q, k, v], [out, lse], d_out, d_lse, gradients, into, d_sink)
        except IndexError as error:
            raise _trace.named(error, call.score, call.mask) from None
        call.clear(tuple(gradients[:1]), tuple(gradients[1:]))
        return (*gradients, d_sink, *(d if d is None else d.to(t.dtype) for d, t in zip(destinations, learned)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "foveate.flex_attention has no second derivative for this dtype; float64 tensors take a path that has one"
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, tuple[Any, ...]]:
        return _each_entry(_Gradient, info, in_dims, inputs)


def _each_entry(
    function: Any, info: Any, in_dims: tuple[Any, ...], inputs: tuple[Any, ...]
) -> tuple[Any, tuple[Any, ...]]:
    """``function`` on each entry of a batch axis, stacked."""
    runs = []
    for at in range(info.batch_size):
        entry = (x.select(dim, at) if isinstance(x, Tensor) and dim is not None else x for x, dim in zip(inputs, in_dims))
        runs.append(function.apply(*(x.again() if isinstance(x, _Call) else x for x in entry)))
    outputs = tuple(None if of[0] is None else torch.stack(of) for of in zip(*runs))
    return outputs, tuple(None if out is None else 0 for out in outputs)


def _sink(sink: Tensor, query: Tensor) -> Tensor:
    """The sink in float32, or float64 as the operands; its gradient finds the way back by itself."""
    if not isinstance(sink, Tensor) or not sink.dtype.is_floating_point or sink.device != query.device:
        raise ValueError(f"sink must be a float tensor on {query.device}, got {sink!r}")
    if sink.shape != query.shape[1:2]:
        raise ValueError(f"sink must have a logit for each of {query.size(1)} query heads, got {tuple(sink.shape)}")
    return sink.to(torch.promote_types(query.dtype, torch.float32)).resolve_neg().contiguous()


def _empty_in_order(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A new tensor of ``shape`` whose axes lie in memory in the order of ``like``'s, the last one innermost."""
    if like.is_contiguous():
        # Of the ways to ask for memory the first takes a third of the time.
        return torch.empty_like(like) if shape is like.shape or shape == like.shape else like.new_empty(shape)
    strides = like.stride()
    order = sorted(range(len(shape) - 1), key=lambda axis: (-strides[axis], axis))
    made, step = [1] * len(shape), max(shape[-1], 1)
    for axis in reversed(order):
        made[axis] = step
        step *= max(shape[axis], 1)
    return like.new_empty_strided(shape, made)


def _autocasts(query: Tensor) -> bool:
    """Whether autocast is on for the device of the queries."""
    if torch.is_autocast_enabled("cpu"):
        return bool(query.device.type == "cpu")
    return torch.is_autocast_enabled("cuda") and bool(query.is_cuda)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """q, k and v, and nothing else, in the dtype of the autocast that is on."""
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    eligible = (torch.float32, torch.float16, torch.bfloat16)
    return tuple(t.to(dtype) if t.dtype in eligible else t for t in tensors)


def _check(query: Tensor, key: Tensor, value: Tensor, block_mask: Any, enable_gqa: bool) -> None:
    """Raises what torch raises for operands that do not fit each other."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a Tensor, got {type(tensor)}")
    if query.device != key.device or query.device != value.device:
        raise ValueError(
            "Expected query, key, and value to have the same device type, but got query.device: "
            f"{query.device}, key.device: {key.device}, and value.device: {value.device} instead."
        )
    if query.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(
            f"foveate.flex_attention computes on CPU and CUDA tensors, got tensors on {query.device}; call "
            "torch.nn.attention.flex_attention for these"
        )
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not tensor.dtype.is_floating_point:
            raise ValueError(f"Expected {name} to be a float tensor, got {name}.dtype: {tensor.dtype}")
        if tensor.layout != torch.strided:
            raise ValueError(f"{name} must be a dense tensor, got {name}.layout: {tensor.layout}; {name}.to_dense() is one")
    if query.dtype not in _DTYPES:
        raise ValueError(f"query must be float32, bfloat16, float16 or float64, got query.dtype: {query.dtype}")
    if query.dim() < 2 or key.dim() < 2 or value.dim() < 2:
        raise ValueError(
            "Expected query, key, and value to all be  at least 2 dimensional, but got query.dim: "
            f"{query.dim()}, key.dim: {key.dim()} and value.dim: {value.dim()} instead."
        )
    if query.size(-1) != key.size(-1):
        raise ValueError(
            "Expect query and key/value to have the same embedding dimension but got "
            f"E={query.size(-1)} and E={key.size(-1)}."
        )
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        raise NotImplementedError("NYI: query, key, and value must be 4D tensors")
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(
            "Expect key and value to have the same batch size, heads and length but got "
            f"{tuple(key.shape[:3])} and {tuple(value.shape[:3])}."
        )
    heads, kv_heads = query.size(1), key.size(1)
    if not enable_gqa and heads != kv_heads:
        raise ValueError(
            "Expect query and key/value to have the same number of heads but got "
            f"Hq={heads} and Hkv={kv_heads}. Try setting enable_gqa=True for GQA."
        )
    if enable_gqa and (kv_heads == 0 or heads % kv_heads != 0):
        raise ValueError(
            "Expect number of query heads to be a multiple of kv heads for GQA but got "
            f"Hq={heads} and Hkv={kv_heads}."
        )
    if query.size(0) != key.size(0):
        if block_mask is None:
            raise ValueError(
                "Expect query and key/value to have the same batch size, or non-none block_mask, but got "
                f"block_mask=None, Bq={query.size(0)}, and Bkv={key.size(0)}."
            )
        if isinstance(block_mask, BlockMask) and block_mask.kv_num_blocks.size(0) != query.size(0):
            raise ValueError(
                "Expect query and key/value to have the same batch size, or block_mask and query to have the "
                f"same batch size, but got Bq={query.size(0)}, Bkv={key.size(0)}, "
                f"B_block_mask={block_mask.kv_num_blocks.size(0)}."
            )
        if key.size(0) != 1:
            raise RuntimeError(f"Bq and Bkv must broadcast. Got Bq={query.size(0)} and Bkv={key.size(0)}")


def _check_options(options: dict[str, Any] | None) -> None:
    """Options for Triton change nothing here; ours are checked."""
    if not options:
        return
    if not isinstance(options, dict):
        raise TypeError(f"kernel_options must be a dict of options, got {options!r}")
    if not isinstance(options.get("foveate", {}), dict):
        raise TypeError(f"kernel_options['foveate'] must be a dict of options, got {options['foveate']!r}")
    if "BACKEND" in options:
        if options.get("FORCE_USE_FLEX_ATTENTION", False):
            raise RuntimeError(
                "BACKEND cannot be combined with legacy FORCE_USE_FLEX_ATTENTION. BACKEND supersedes the legacy "
                "knob; please drop FORCE_USE_FLEX_ATTENTION and only specify the desired BACKEND."
            )
        if options["BACKEND"] not in _BACKENDS:
            raise ValueError(f"Invalid BACKEND value '{options['BACKEND']}'. Must be one of {_BACKENDS}")
    own = options.get("foveate", {})
    for name in own:
        if name not in _OWN_OPTIONS:
            raise ValueError(f"kernel_options['foveate'] has no option {name!r}; it has {sorted(_OWN_OPTIONS)}")
    if set(options) - {"foveate"} and "kernel_options" not in _said:
        _said.add("kernel_options")
        _log.info("kernel_options for Triton change nothing: %s", ", ".join(sorted(set(options) - {"foveate"})))


@overload
def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    score_mod: ScoreMod | None = None,
    mask: Mask | Callable[..., Tensor] | None = None,
    scale: float | None = None,
    *,
    return_aux: None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor: ...
@overload
def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    score_mod: ScoreMod | None = None,
    mask: Mask | Callable[..., Tensor] | None = None,
    scale: float | None = None,
    *,
    return_aux: AuxRequest,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, AuxOutput]: ...
@also_compiled(_region.varlen)
def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    score_mod: ScoreMod | None = None,
    mask: Mask | Callable[..., Tensor] | None = None,
    scale: float | None = None,
    *,
    return_aux: AuxRequest | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor | tuple[Tensor, AuxOutput]:
    """Attention of sequences of any lengths, one after another, with a mask and a score function.

    Sequence ``b`` owns rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` of ``query`` and those of
    ``cu_seqlens_k`` of ``key`` and ``value``. Functions see the sequence as ``b`` and positions inside it.

    Args:
        query: ``[T, Hq, E]``, float32, bfloat16 or float16; or, as key and value too, a nested tensor of the
            jagged layout, ``[n, j, Hq, E]`` or ``[n, Hq, j, E]``, which brings its offsets.
        key: ``[S, Hkv, E]``; ``Hkv`` divides ``Hq``.
        value: ``[S, Hkv, Ev]``.
        cu_seqlens_q: ``[n + 1]``, integers that begin at 0 and do not decrease. Nested tensors have their own.
        cu_seqlens_k: Those of keys; ``cu_seqlens_q`` when it is None.
        max_seqlen_q: At least the queries of the longest sequence. On CUDA the offsets are never read by the host:
            kernels are launched for as many rows as this, or all of them, and leave out what is beyond it. Ignored
            on the CPU, where lengths are read from the offsets. ``max_seqlen_k`` is that of the keys.
        score_mod: As in :func:`flex_attention`.
        mask: A :class:`Mask` or a mask function.
        scale: Factor on ``query @ key``; ``1/sqrt(E)`` when it is None.
        return_aux: As in :func:`flex_attention`, of shape ``[Hq, T]``, also of nested tensors.
        sink: As in :func:`flex_attention`.
        dropout_p: As in :func:`flex_attention`.

    Returns:
        ``out [T, Hq, Ev]``, nested as ``query`` is. Rows past the last sequence are 0, and their gradients.

    Raises:
        ValueError: Shapes, dtypes or offsets do not fit each other.
        TraceError: A function does something that cannot be traced.
    """
    nested: Any = None
    if isinstance(query, Tensor) and query.is_nested:
        if cu_seqlens_q is not None or cu_seqlens_k is not None:
            raise ValueError("nested tensors have offsets of their own: leave out cu_seqlens_q and cu_seqlens_k")
        nested = query
        query, cu_seqlens_q = _jagged("query", query)
        key, cu_seqlens_k = _jagged("key", key)
        value, offsets_v = _jagged("value", value)
        if cu_seqlens_k is not offsets_v and not torch.equal(cu_seqlens_k, offsets_v):
            raise ValueError("key and value must have the same lengths")
    elif cu_seqlens_q is None:
        raise ValueError("cu_seqlens_q is missing: only nested tensors have offsets of their own")
    q, k, v = _rows(query, key, value)
    number = None if scale is None else _checked_scale(scale)
    dropout = None if dropout_p == 0.0 else _dropout(dropout_p, query)
    assert cu_seqlens_q is not None
    both = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    offsets, extents = sequences(cu_seqlens_q, both, q, k, max_seqlen_q, max_seqlen_k)
    score = None if score_mod is None else _trace.score(score_mod, extents)
    traced = None if mask is None else _trace.mask(mask, extents)
    aux = AuxRequest() if return_aux is None else return_aux
    _check_aux(aux)
    call = _Call(score, traced, number, dropout, aux.lse, aux.max_scores, offsets)
    result, lse, max_scores = _run(call, q, k, v, None if sink is None else _sink(sink, q))
    out: Tensor = result.squeeze(0).transpose(0, 1)
    if nested is not None:
        out = torch.nested.nested_tensor_from_jagged(out, nested.offsets())
        out = out.transpose(1, 2) if nested._ragged_idx == 2 else out
    if return_aux is None:
        return out
    rows = (None if x is None or not wanted else x.squeeze(0) for x, wanted in ((lse, aux.lse), (max_scores, aux.max_scores)))
    return out, AuxOutput(*rows)


def _rows(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows ``[T, H, D]`` as ``[1, H, T, D]``.

    Raises:
        ValueError: They are none, or do not fit each other.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 3:
            raise ValueError(f"{name} must be a tensor [rows, heads, dim], got {getattr(tensor, 'shape', tensor)}")
    if _autocasts(query):
        query, key, value = _autocast(query, key, value)
    q, k, v = (t.resolve_neg().transpose(0, 1).unsqueeze(0) for t in (query, key, value))
    _check(q, k, v, None, enable_gqa=True)
    if len({query.dtype, key.dtype, value.dtype}) != 1 or query.dtype == torch.float64:
        dtypes = f"{query.dtype}, {key.dtype} and {value.dtype}"
        raise ValueError(f"query, key and value must have one dtype, float32, bfloat16 or float16, got {dtypes}")
    return q, k, v


def sequences(
    cu_q: Tensor, cu_k: Tensor, q: Tensor, k: Tensor, longest_q: int | None = None, longest_k: int | None = None
) -> tuple[Any, tuple[int, int, int, int]]:
    """The offsets of sequences in the rows of q and k ``[1, H, rows, D]``, and the extents of b, h, q and kv. The host
    does not read those on CUDA: there no sequence has more rows than ``longest_q`` and ``longest_k``.

    Raises:
        ValueError: They are none, or differ in number.
    """
    if q.is_cuda:
        made = _cuda.offsets(cu_q, cu_k, longest_q, longest_k, q, k)
        return made, (made[0].size(0) - 1, q.size(1), made[2], made[3])
    offsets = (offsets_of("cu_seqlens_q", cu_q, q.size(2)), offsets_of("cu_seqlens_k", cu_k, k.size(2)))
    if len(offsets[0]) != len(offsets[1]):
        raise ValueError(f"cu_seqlens_q has {len(offsets[0])} offsets and cu_seqlens_k {len(offsets[1])}; they need as many")
    longest = [max((b - a for a, b in zip(of, of[1:])), default=0) for of in offsets]
    return offsets, (len(offsets[0]) - 1, q.size(1), longest[0], longest[1])


def _jagged(name: str, tensor: Any) -> tuple[Tensor, Tensor]:
    """The rows ``[T, H, E]`` of a nested tensor, and its offsets."""
    if not isinstance(tensor, Tensor) or not tensor.is_nested or tensor.layout != torch.jagged or tensor.dim() != 4:
        raise ValueError(f"query, key and value must all be nested tensors [n, j, heads, dim] of the jagged layout; {name} is not")
    jagged: Any = tensor
    if jagged._ragged_idx == 2:
        jagged = jagged.transpose(1, 2)
    if jagged._ragged_idx != 1 or jagged.lengths() is not None:
        raise ValueError(f"{name} must be jagged in its second or third axis, without holes between its sequences")
    return jagged.values(), jagged.offsets()


@uncompiled
def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | Mask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
) -> None:
    """Compiles and loads what :func:`flex_attention` runs for these arguments on CUDA, and for its backward if
    something wants a gradient, all side by side. Nothing is computed, and elements are not read: tensors from
    ``torch.empty`` serve. The CPU compiles nothing.

    Raises:
        ValueError, TraceError: As :func:`flex_attention` does.
        RuntimeError: There is no NVRTC, or it refuses a kernel.
    """
    _check(query, key, value, block_mask, enable_gqa)
    extents = (query.size(0), query.size(1), query.size(2), key.size(2))
    score = None if score_mod is None else _trace.score(score_mod, extents)
    mask = None if block_mask is None else _blocks.program_of(block_mask, extents, query.device)
    if not query.is_cuda:
        return
    dropout = None if dropout_p == 0.0 else (dropout_p, torch.zeros(2, dtype=torch.int32, device=query.device))
    logits = None if sink is None else _sink(sink, query)
    learned = () if score is None else score.learned
    wants = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (query, key, value, sink, *learned))
    number = None if scale is None else _checked_scale(scale)
    plan = _Call(score, mask, number, dropout, False, False).planned(query, key, value, logits, (), not wants)
    out = _empty_in_order(query, (*query.shape[:3], value.shape[3]))
    plan.prepare(query, key, value, out, torch.empty(query.shape[:3], dtype=torch.float32, device=query.device))


@uncompiled
def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | Mask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> str:
    """What :func:`flex_attention` would run for these arguments, in words: the traced functions, how many tiles are
    live, kernels, memory. Nothing is computed.

    Raises:
        ValueError, TraceError: As :func:`flex_attention` does.
    """
    _check(query, key, value, block_mask, enable_gqa)
    extents = (query.size(0), query.size(1), query.size(2), key.size(2))
    score = None if score_mod is None else _trace.score(score_mod, extents)
    mask = None if block_mask is None else _blocks.program_of(block_mask, extents, query.device)
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    learns = learns or (score is not None and bool(score.learned))
    plan = _Call(score, mask, scale, None, False, False).planned(query, key, value, None, (), forward_only=not learns)
    said: str = plan.explain()
    return said
