"""``enable()``: torch's own names run on Foveate.

Code may have imported ``flex_attention`` long before, so it is torch's functions themselves that call another
function while Foveate is enabled: their code is exchanged, and put back by ``disable()``.
"""

from __future__ import annotations

import inspect
import sys
import types
from typing import Any, Callable

import torch
from torch.nn.attention import flex_attention as _torch_flex
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import _blocks, _flex, _sharded
from ._arguments import warn
from ._native import TraceError
from ._torchs import TORCHS

#: The global of torch's module that the exchanged code calls.
_GLOBAL = "_foveate_in_place_of"
_said: set[str] = set()

_PUBLIC: tuple[Callable[..., Any], ...] = (_flex.flex_attention, _blocks.create_block_mask)
#: What torch's functions take and Foveate's do not, in a version that is newer, with the defaults.
_MORE: dict[str, dict[str, Any]] = {
    name: {
        more: parameter.default
        for more, parameter in inspect.signature(function).parameters.items()
        if more not in inspect.signature(ours).parameters
    }
    for (name, function), ours in zip(TORCHS.items(), _PUBLIC)
}
_CODE = {name: getattr(_torch_flex, name).__code__ for name in TORCHS}


def _asks_for_more(name: str, arguments: dict[str, Any]) -> str | None:
    """Which argument asks for what Foveate's function does not know. The others of this kind are left out."""
    for more, default in _MORE[name].items():
        if arguments[more] is not default:
            return more
    for more in _MORE[name]:
        del arguments[more]
    return None


def _wraps(tensor: torch.Tensor) -> bool:
    """Whether other tensors have its elements, which are not DTensor's: its class may have a rule for torch's
    operator."""
    return (
        type(tensor) is not torch.Tensor and is_traceable_wrapper_subclass(tensor) and not _sharded.is_sharded(tensor)
    )


def _flex_attention(query: Any, **arguments: Any) -> Any:
    if not isinstance(query, torch.Tensor) or query.device.type not in ("cpu", "cuda"):
        return TORCHS["flex_attention"](query, **arguments)
    more = _asks_for_more("flex_attention", arguments)
    if more is not None:
        _stays("flex_attention", f"Foveate does not know its argument {more}")
        return TORCHS["flex_attention"](query, **arguments)
    if torch.compiler.is_dynamo_compiling():
        return _flex.flex_attention(query, **arguments)
    if _wraps(query):
        return TORCHS["flex_attention"](query, **arguments)
    try:
        return _flex.flex_attention(query, **arguments)
    except TraceError as reason:
        _stays("flex_attention", reason)
        return TORCHS["flex_attention"](query, **arguments)


def _create_block_mask(mask_mod: Any, **arguments: Any) -> Any:
    device = arguments["device"] = _blocks._device(arguments["device"])
    if device.type not in ("cpu", "cuda"):
        return TORCHS["create_block_mask"](mask_mod, **arguments)
    more = _asks_for_more("create_block_mask", arguments)
    if more is not None:
        _stays("create_block_mask", f"Foveate does not know its argument {more}")
        return TORCHS["create_block_mask"](mask_mod, **arguments)
    if torch.compiler.is_dynamo_compiling():
        return _blocks.create_block_mask(mask_mod, **arguments)
    try:
        return _blocks.create_block_mask(mask_mod, **arguments)
    except TraceError as reason:
        _stays("create_block_mask", reason)
        return TORCHS["create_block_mask"](mask_mod, **arguments)


def _stays(name: str, reason: TraceError | str) -> None:
    said = f"a call of {name} stays torch's: {reason}"
    if not torch.compiler.is_dynamo_compiling() and said not in _said:
        _said.add(said)
        warn(said)


_OURS: dict[str, Callable[..., Any]] = {"flex_attention": _flex_attention, "create_block_mask": _create_block_mask}


def _code_of(name: str) -> types.CodeType:
    """Code of torch's signature that calls ours."""
    code = _CODE[name]
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    positional, keywords = names[: code.co_argcount], names[code.co_argcount :]
    signature = ", ".join((*positional, *(("*", *keywords) if keywords else ())))
    given = ", ".join((names[0], *(f"{n}={n}" for n in names[1:])))
    source = f"def {name}({signature}):\n    return {_GLOBAL}[{name!r}]({given})\n"
    scope: dict[str, Any] = {}
    # Dynamo follows torch's function by the file that its code is of.
    exec(compile(source, code.co_filename, "exec"), scope)
    made: types.CodeType = scope[name].__code__
    return made


class _Enabled:
    """What :func:`enable` did; leaving it as a context manager undoes that."""

    def __init__(self, before: bool) -> None:
        self._before = before

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        if not self._before:
            disable()


def is_enabled() -> bool:
    """Whether torch's own names run on Foveate."""
    return _torch_flex.flex_attention.__code__ is not _CODE["flex_attention"]


def enable() -> _Enabled:
    """Lets torch's own ``flex_attention`` and ``create_block_mask`` run on Foveate, compiled or not, wherever they
    were imported::

        foveate.enable()
        with foveate.enable(): ...  # until the block ends

    Calls on other devices than CPU and CUDA, uncompiled calls of tensors that wrap others, calls whose functions cannot
    be traced, and calls with an argument that only a newer torch knows, stay torch's; the latter two with one warning
    that says why. What ``torch.compile`` made before is compiled again.
    """
    before = is_enabled()
    if not before:
        _exchange({name: _code_of(name) for name in _CODE})
        _torch_flex.__dict__[_GLOBAL] = _OURS
    return _Enabled(before)


def disable() -> None:
    """Undoes :func:`enable`."""
    if is_enabled():
        _exchange(_CODE)
        del _torch_flex.__dict__[_GLOBAL]


def _exchange(codes: dict[str, types.CodeType]) -> None:
    for name, code in codes.items():
        getattr(_torch_flex, name).__code__ = code
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
