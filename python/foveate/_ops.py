"""The operators ``foveate::forward`` and ``backward``, ``varlen_forward`` and ``varlen_backward``, and ``paged``:
attention that torch's dispatcher and compiler see as one call.

They are functional and have a fixed number of results. Mods are programs in Foveate's text form, so that they
are constants of a graph: ``score`` reads tensors ``s0``, ``s1``, ... and integers ``sn0``, ``sn1``, ...; ``mask`` reads
``m0`` and ``mn0`` and so on. ``lists`` are ``kv_num_blocks`` and ``kv_indices`` of a block mask, and those of its full
tiles where it has them; the mask reads the table of tiles that they make as its last tensor, without axes of batch and
heads where these have one entry. ``seed`` is an int64 of one element, for dropout with probability ``dropout_p``.
``lse`` and ``max_scores`` are natural.

The native module defines them and has their kernels, for CPU and CUDA tensors, which torch calls without Python,
through its stable C functions. What these have no way to say is said here: results of fake tensors, rules of vmap.
"""

from __future__ import annotations

import functools
import os
from typing import Any, Callable, Sequence

import torch
from torch import Tensor

from . import _native


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


def _mask_fake(at: Tensor, *_: Any) -> Tensor:
    return at.new_empty((), dtype=torch.bool)


def _argument(mask: Tensor, name: str, *_: Any) -> Tensor:
    raise NotImplementedError(f"{name} in a compiled function takes the backend Inductor")


def _argument_fake(mask: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(mask)


def _of_many(operator: Callable[..., Any], info: Any, dims: Any, *args: Any) -> Any:
    """Torch's own operator runs the functions of its graphs under vmap."""
    return operator(*args)


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


#: Whether torch's C functions tag operators: from 2.12 on.
_tagged = _native.register_operators(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
_library = torch.library.Library("foveate", "FRAGMENT")
_fake: Callable[..., Any]
for _name, _fake in (
    ("forward", _forward_fake),
    ("backward", _backward_fake),
    ("varlen_forward", _forward_fake),
    ("varlen_backward", _varlen_backward_fake),
    ("paged", _forward_fake),
):
    _overload = getattr(torch.ops.foveate, _name).default
    # An overload is hashed by what it calls: this comes before anything of torch's can have it as a key.
    _overload._op = _exact(_overload._op)
    if not _tagged:
        _overload.tags.append(torch.Tag.pt2_compliant_tag)
    torch.library.register_fake(f"foveate::{_name}", _fake, lib=_library)

# Operators that torch runs in no call: they stand in graphs, until the pass takes them.
for _schema, _run, _fake in (
    # What torch's operator has no place for travels in the graph of its mask, of which this is the result.
    ("argument(Tensor mask, str name, Tensor[] values, float number) -> Tensor", _argument, _argument_fake),
    # It is given a coordinate, and reads none: a call that is given nothing of a graph is run, and not recorded, where
    # graphs are read back from Inductor's cache.
    (
        "mask(Tensor at, str text, str[] tensor_names, Tensor[] tensors, str[] bool_names, bool[] bools, "
        "str[] integer_names, SymInt[] integers) -> Tensor",
        _mask,
        _mask_fake,
    ),
):
    _name = _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _run, _key)
    torch.library.register_fake(f"foveate::{_name}", _fake, lib=_library)
    torch.library.register_vmap(f"foveate::{_name}", functools.partial(_of_many, _run), lib=_library)
