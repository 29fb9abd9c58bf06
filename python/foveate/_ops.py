"""The operators ``foveate::forward`` and ``backward``, ``varlen_forward`` and ``varlen_backward``, and ``paged``:
attention that torch's dispatcher and compiler see as one call.

They are functional and have a fixed number of results. Mods are programs in Foveate's text form, so that they
are constants of a graph: ``score`` reads tensors ``s0``, ``s1``, ... and integers ``sn0``, ``sn1``, ...; ``mask`` reads
``m0`` and ``mn0`` and so on. ``lists`` are ``kv_num_blocks`` and ``kv_indices`` of a block mask, and those of its full tiles
where it has them; the mask reads the table of tiles that they make as its last tensor, without axes of batch and heads
where these have one entry. ``seed`` is an int64 of one element, for dropout with probability ``dropout_p``. ``lse`` and
``max_scores`` are natural.

On CPU tensors they are functions of the native module, which torch calls without Python, through its stable C functions:
:data:`NOT_NATIVE` says why, where they are not. What these functions have no way to say is said here: schemas with tags,
results of fake tensors, rules of vmap.
"""

from __future__ import annotations

import os
from typing import Any, Callable, Sequence

import torch
from torch import Tensor

from . import _autograd, _blocks, _cuda, _native, _paged, _varlen

_MODS = (
    "str? score, Tensor[] score_captures, SymInt[] score_scalars, "
    "str? mask, Tensor[] mask_captures, SymInt[] mask_scalars, Tensor[] lists, SymInt[] tile, float scale, "
    "Tensor? seed, float dropout_p"
)
_RESULTS = "(Tensor out, Tensor lse, Tensor max_scores)"
_GRADIENTS = "bool[3] needs, int[] learned) -> (Tensor dq, Tensor dk, Tensor dv, Tensor[] d_captures)"
_library = torch.library.Library("foveate", "FRAGMENT")
for _schema in (
    f"forward(Tensor query, Tensor key, Tensor value, {_MODS}, bool max_scores) -> {_RESULTS}",
    f"backward(Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor? d_out, Tensor? d_lse, {_MODS}, "
    f"{_GRADIENTS}",
    # Sequences one after another: query [1, Hq, T, E], with the offsets of those of queries and of keys.
    f"varlen_forward(Tensor query, Tensor key, Tensor value, Tensor cu_q, Tensor cu_k, {_MODS}, bool max_scores) "
    f"-> {_RESULTS}",
    "varlen_backward(Tensor query, Tensor key, Tensor value, Tensor cu_q, Tensor cu_k, Tensor out, Tensor lse, "
    f"Tensor? d_out, Tensor? d_lse, {_MODS}, {_GRADIENTS}",
    "paged(Tensor query, Tensor key_pages, Tensor value_pages, Tensor page_table, Tensor lengths, "
    f"{_MODS}, bool max_scores) -> {_RESULTS}",
    # What torch's operator has no place for travels in the graph of its mask, of which this is the result.
    "argument(Tensor mask, str name, Tensor[] values, float number) -> Tensor",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
_library.define(
    "mask(str text, str[] tensor_names, Tensor[] tensors, str[] integer_names, int[] integers, str[] float_names, "
    "float[] floats) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _program(
    kind: str, text: str | None, captures: Sequence[Tensor], scalars: Sequence[int], learned: Sequence[int] = ()
) -> Any:
    if text is None:
        return None
    made = [_native.Capture(f"{kind}{i}", t, i in learned) for i, t in enumerate(captures)]
    return _native.program(text, made, [(f"{kind}n{i}", n) for i, n in enumerate(scalars)], kind == "m")


def _call(
    query: Tensor,
    key: Tensor,
    mods: Sequence[Any],
    max_scores: bool = False,
    learned: Sequence[int] = (),
    varlen: tuple[Tensor, Tensor] | None = None,
    pages: tuple[Tensor, Tensor] | None = None,
) -> _autograd.Call:
    score, score_captures, score_scalars, mask, mask_captures, mask_scalars, lists, tile, scale, seed, dropout_p = mods
    if mask is not None and lists:
        kinds = _blocks.table(lists, (tile[0], tile[1]), query.size(2), key.size(2))
        mask_captures = [*mask_captures, _blocks.narrowed(kinds)]
    return _autograd.Call(
        _program("s", score, score_captures, score_scalars, learned),
        _program("m", mask, mask_captures, mask_scalars),
        scale,
        None if seed is None else (dropout_p, seed.reshape(1).view(torch.int32) if query.is_cuda else int(seed)),
        True,
        max_scores,
        _varlen.sequences(*varlen, query, key)[0] if varlen is not None else None,
        _paged.pages(*pages, query) if pages is not None else None,
    )


def _forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **layout: Any) -> tuple[Tensor, Tensor, Tensor]:
    *mods, max_scores = rest
    call = _call(query, key, mods, max_scores=max_scores, **layout)
    key, value = (t.to(query.dtype) if t.is_floating_point() else t for t in (key, value))
    out, lse, rows = call.forward(query, key, value, None, (), forward_only=True)
    assert lse is not None
    return out, lse, query.new_empty(0, dtype=torch.float32) if rows is None else rows


def _varlen_forward(query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, *rest: Any) -> Any:
    return _forward(query, key, value, *rest, varlen=(cu_q, cu_k))


def _paged_forward(query: Tensor, key: Tensor, value: Tensor, table: Tensor, lengths: Tensor, *rest: Any) -> Any:
    return _forward(query, key, value, *rest, pages=(table, lengths))


def _backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    *rest: Any,
    **layout: Any,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    *mods, needs, learned = rest
    captures = mods[1]
    # Gradients are of float32 at most.
    mods[1] = [t.to(torch.float32) if i in learned and t.dtype == torch.float64 else t for i, t in enumerate(captures)]
    call = _call(query, key, mods, learned=learned, **layout)
    plan = call.planned(query, key, value, None, (), forward_only=False)
    if d_out is None:
        d_out = torch.zeros((), dtype=out.dtype, device=out.device).expand(out.shape)
    operands = (query, key, value)
    gradients = [_autograd.empty_in_order(t, t.shape) if wanted else None for t, wanted in zip(operands, needs)]
    into = {  # On CUDA in float32.
        f"s{i}": torch.zeros(captures[i].shape, dtype=torch.float32 if query.is_cuda else mods[1][i].dtype, device=query.device)
        for i in learned
    }
    read = () if call.score is None else call.score.captures
    plan.backward(
        list(operands), [out, lse], d_out, d_lse, gradients, [into[c.name] if c.learned else None for c in read], None
    )
    call.clear(tuple(gradients[:1]), tuple(gradients[1:]))
    dq, dk, dv = (t.new_empty(0) if d is None else d for t, d in zip(operands, gradients))
    return dq, dk, dv, [into[f"s{i}"].to(captures[i].dtype) for i in learned]


def _varlen_backward(query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, *rest: Any) -> Any:
    return _backward(query, key, value, *rest, varlen=(cu_q, cu_k))


def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *mods: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = query.shape[:3]
    lse = query.new_empty(rows, dtype=torch.float32)
    max_scores = query.new_empty(rows if mods[-1] else (0,), dtype=torch.float32)
    return _fake_in_order(query, (*rows, value.shape[3])), lse, max_scores


def _backward_fake(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    needs, learned = rest[-2:]
    captures = rest[5]  # After out, lse, d_out, d_lse and the score.
    dq, dk, dv = (
        _fake_in_order(t, t.shape) if wanted else t.new_empty(0) for t, wanted in zip((query, key, value), needs)
    )
    return dq, dk, dv, [captures[i].new_empty(captures[i].shape) for i in learned]


def _varlen_backward_fake(query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, *rest: Any) -> Any:
    return _backward_fake(query, key, value, *rest)


def _fake_in_order(like: Tensor, shape: Sequence[Any]) -> Tensor:
    """:func:`_autograd.empty_in_order` of symbolic shapes; the order of axes is that of the example's."""

    def known(n: Any) -> int:
        return int(n.node.hint if isinstance(n, torch.SymInt) else n)

    strides = [known(n) for n in like.stride()]
    order = sorted(range(len(shape) - 1), key=lambda axis: (-strides[axis], axis))
    made: list[Any] = [1] * len(shape)
    step = shape[-1] if known(shape[-1]) else 1
    for axis in reversed(order):
        made[axis] = step
        step = step * shape[axis] if known(shape[axis]) else step
    return torch.empty_strided(shape, made, dtype=like.dtype, device=like.device)


def _mask(*_: Any) -> Tensor:
    raise NotImplementedError("a Mask in text form runs in a graph that Inductor compiles, or in an uncompiled call")


def _mask_fake(*_: Any) -> Tensor:
    return torch.empty((), dtype=torch.bool)


def _argument(mask: Tensor, name: str, *_: Any) -> Tensor:
    raise NotImplementedError(f"{name} in a compiled function takes the backend Inductor")


def _argument_of_many(info: Any, dims: Any, mask: Tensor, name: str, *_: Any) -> Any:
    """Torch's own operator runs the functions of its graphs under vmap."""
    return _argument(mask, name)


def _argument_fake(mask: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(mask)


def _native_kernels() -> str | None:
    """Registers the native module's kernels for CPU tensors, or says why not."""
    if os.environ.get("FOVEATE_KERNELS") == "python":
        return "FOVEATE_KERNELS is python"
    return _native.register_kernels(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))


def _exact(operator: Callable[..., Any]) -> Callable[..., Any]:
    """An operator that raises what its kernel did, where torch has a RuntimeError of the same words."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return operator(*args, **kwargs)
        except RuntimeError as said:
            error = _native.kernel_error(str(said))
            if error is None:
                raise
        raise error

    return call


#: Why operators on CPU tensors are functions of Python's; None where they are the native module's.
NOT_NATIVE = _native_kernels()
# An overload is hashed by what it calls: this comes before anything of torch's can have it as a key.
if NOT_NATIVE is None:
    for _name in ("forward", "backward", "varlen_forward", "varlen_backward", "paged"):
        _overload = getattr(torch.ops.foveate, _name).default
        _overload._op = _exact(_overload._op)
_DEVICES = ("CPU", "CUDA")
_COMPUTING = _DEVICES if NOT_NATIVE else ("CUDA",)
for _name, _run, _fake, _keys in (
    ("forward", _forward, _forward_fake, _COMPUTING),
    ("backward", _backward, _backward_fake, _COMPUTING),
    ("varlen_forward", _varlen_forward, _forward_fake, _COMPUTING),
    ("varlen_backward", _varlen_backward, _varlen_backward_fake, _COMPUTING),
    ("paged", _paged_forward, _forward_fake, _COMPUTING),
    ("argument", _argument, _argument_fake, _DEVICES),
    # Its arguments need not have a tensor among them.
    ("mask", _mask, _mask_fake, ("CompositeExplicitAutograd",)),
):
    for _key in _keys:
        _library.impl(_name, _cuda.giving_back(_run) if _key == "CUDA" else _run, _key)
    torch.library.register_fake(f"foveate::{_name}", _fake, lib=_library)

torch.library.register_vmap("foveate::argument", _argument_of_many, lib=_library)
