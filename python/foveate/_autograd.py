"""A call of attention: its plan, and one autograd function for all that calls it."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor

from . import _checks, _native, _source
from ._arguments import Batched, entry

_transforms_active = torch._C._are_functorch_transforms_active


def run(call: Call, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Any:
    """``out``, ``lse`` and ``max_scores`` of a call, with a gradient where one is wanted."""
    learned = () if call.score is None else call.score.learned
    if _transforms_active():
        of = call
        while of.entries is not None:
            # Zeros of what functions capture: a query without a batch of its own is part of that vmap with them, which
            # then comes to the rule of `_Attention` that runs a call of each entry.
            q = q - torch.zeros_like(of.batch, dtype=q.dtype, device=q.device).sum()
            of = of.entries[0]
        return _Attention.apply(q, k, v, sink, call, *learned)  # type: ignore[no-untyped-call]
    if torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or learned
        or (sink is not None and sink.requires_grad)
    ):
        return _apply(q, k, v, sink, call, *learned)
    return call.forward(q, k, v, sink, (), forward_only=True)


class Call:
    """What one call asks for, besides tensors; after ``forward``, its plan."""

    #: ``entries`` are the calls of each entry of the vmap in which functions capture ``batch``.
    __slots__ = tuple("score mask scale dropout wants_lse wants_max varlen pages plan entries batch".split())

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
        self.entries: list[Call] | None = None
        self.batch: Any = None

    def again(self) -> Call:
        """The same, for another run."""
        of = (self.score, self.mask, self.scale, self.dropout, self.wants_lse, self.wants_max, self.varlen, self.pages)
        made = Call(*of)
        made.entries, made.batch = self.entries, self.batch
        return made

    def entry(self, level: int, at: int) -> Call:
        """The same for one entry of a vmap, for another run."""
        if self.entries is not None and torch._C._functorch.maybe_get_level(self.batch) == level:
            return self.entries[at].again()
        made = self.again()
        if self.entries is not None:
            made.entries = [of.entry(level, at) for of in self.entries]
        return made

    def placed(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Rows ``[T, H, D]`` of one sequence after another as plans take them, ``[1, H, T, D]``; other tensors are
        that."""
        return tensors if self.varlen is None else tuple(map(_checks.heads_first, tensors))

    def planned(
        self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, learned: tuple[Tensor, ...], forward_only: bool
    ) -> Any:
        of = (self, (q, k, v), sink, learned, forward_only)
        if q.is_cuda:
            return _native.cuda_plan(*of, torch.are_deterministic_algorithms_enabled())
        return _native.plan(*of, torch.get_num_threads())

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, learned: tuple[Tensor, ...], forward_only: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        shape, width = q.shape, v.shape[-1]
        out = empty_in_order(q, shape if width == shape[-1] else (*shape[:-1], width))
        q, k, v, into = self.placed(q, k, v, out)
        plan = self.planned(q, k, v, sink, learned, forward_only)
        lse = _empty_rows(q) if self.wants_lse or not forward_only or q.is_cuda else None
        max_scores = _empty_rows(q) if self.wants_max else None
        try:
            plan.forward(q, k, v, into, lse, max_scores)
        except IndexError as error:
            raise _source.named(error, self.score, self.mask) from None
        self.plan = plan
        return out, lse, max_scores


def of_entries(make: Callable[[], Call]) -> Call:
    """The call that ``make`` makes of functions that it traces; of such as capture a batch of vmap, one of each
    entry."""
    try:
        return make()
    except Batched as found:
        batch = found.batch
    level, dim = torch._C._functorch.maybe_get_level(batch), torch._C._functorch.maybe_get_bdim(batch)
    entries = []
    for at in range(torch._C._functorch.get_unwrapped(batch).size(dim)):
        with entry(level, at):
            entries.append(of_entries(make))
    if not entries:
        raise ValueError("a mask or score captures a batch of torch.vmap that has no entries")
    call = entries[0].again()
    call.entries, call.batch = entries, batch
    return call


class _Attention(torch.autograd.Function):
    """Attention and its gradient. Captured tensors that want one are inputs, in the order of the score's
    captures."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, call: Call, *learned: Tensor) -> Any:
        return call.forward(q, k, v, sink, learned, forward_only=False)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Any]) -> None:
        q, k, v, sink, call, *learned = inputs
        out, lse, max_scores = output
        ctx.call = call
        ctx.set_materialize_grads(False)
        if max_scores is not None:
            ctx.mark_non_differentiable(max_scores)
        # Torch says so if one of them is written to before the backward; of captured tensors without a gradient, those
        # that are read where they lie.
        shared = (t for traced in (call.score, call.mask) if traced is not None for t in traced.shared)
        ctx.learns = len(learned)
        ctx.save_for_backward(q, k, v, sink, out, lse, *learned, *shared)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, _: Any) -> tuple[Any, ...]:
        q, k, v, sink, out, lse, *read = ctx.saved_tensors
        if d_out is None:
            d_out = torch.zeros((), dtype=out.dtype, device=out.device).expand(out.shape)
        d_out, d_lse = (None if d is None else d.resolve_neg() for d in (d_out, d_lse))
        _checks.refuse_batches(d_out, d_lse)
        inputs = (ctx.call, ctx.needs_input_grad, q, k, v, sink, out, lse, d_out, d_lse, *read[: ctx.learns])
        if torch.is_grad_enabled() or _transforms_active():
            gradients = Gradient.apply(*inputs)  # type: ignore[no-untyped-call]
        else:
            gradients = Gradient.forward(*inputs)
        return (*gradients[:4], None, *gradients[4:])

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        _checks.no_tangents()

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


#: What ``_Plain.apply`` comes to outside of transforms, in 4 µs less: of its arguments :func:`run` knows the rest.
_apply: Any = super(torch.autograd.Function, _Plain).apply


class Gradient(torch.autograd.Function):
    """The gradients of q, k, v, the sink and captured tensors. They have none themselves."""

    @staticmethod
    def forward(
        call: Call,
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
        gradients = [empty_in_order(t, t.shape) if wanted else None for t, wanted in zip((q, k, v), needs)]
        q, k, v, out, d_out = call.placed(q, k, v, out, d_out)
        plan = call.plan or call.planned(q, k, v, sink, learned, forward_only=False)
        placed = [None if d is None else call.placed(d)[0] for d in gradients]
        d_sink = torch.empty_like(sink) if sink is not None and needs[3] else None
        captures = () if call.score is None else call.score.captures
        destinations = [
            torch.empty(t.shape, dtype=torch.float32 if t.is_cuda else t.dtype, device=t.device) if wanted else None
            for t, wanted in zip(learned, needs[5:])
        ]
        each = iter(destinations)
        into = [next(each) if capture.learned else None for capture in captures]
        try:
            plan.backward([q, k, v], [out, lse], d_out, d_lse, placed, into, d_sink)
        except IndexError as error:
            raise _source.named(error, call.score, call.mask) from None
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
    def jvp(ctx: Any, *_: Any) -> Any:
        _checks.no_tangents()

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, tuple[Any, ...]]:
        return _each_entry(Gradient, info, in_dims, inputs)


def _each_entry(
    function: Any, info: Any, in_dims: tuple[Any, ...], inputs: tuple[Any, ...]
) -> tuple[Any, tuple[Any, ...]]:
    """``function`` on each entry of a batch axis, stacked."""
    runs = []
    level = (torch._C._functorch.maybe_current_level() or 0) + 1  # Torch calls a rule in the level below.
    for at in range(info.batch_size):
        entries = (
            x.select(dim, at) if isinstance(x, Tensor) and dim is not None else x for x, dim in zip(inputs, in_dims)
        )
        runs.append(function.apply(*(x.entry(level, at) if isinstance(x, Call) else x for x in entries)))
    outputs = tuple(None if of[0] is None else torch.stack(of) for of in zip(*runs))
    return outputs, tuple(None if out is None else 0 for out in outputs)


def _empty_rows(q: Tensor) -> Tensor:
    """A new tensor for a float of each row of ``q``."""
    batch, heads, length, _ = q.shape
    # Sizes one by one take half the time of a tuple of them.
    return q.new_empty(batch, heads, length, dtype=torch.float32)


def empty_in_order(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A new tensor of ``shape`` whose axes lie in memory in the order of ``like``'s, the last one innermost."""
    if like.is_contiguous():
        # Of the ways to ask for memory the first takes a third of the time.
        return torch.empty_like(like) if shape is like.shape or shape == like.shape else like.new_empty(shape)
    order = sorted(range(len(shape) - 1), key=like.stride().__getitem__, reverse=True)
    made, step = [1] * len(shape), shape[-1] or 1
    for axis in reversed(order):
        made[axis] = step
        step *= shape[axis] or 1
    return like.new_empty_strided(shape, made)
