"""What is known of a user's function without running it: the numbers in its source, the variables that it can reach,
and where in it an error came from."""

from __future__ import annotations

import dis
import functools
import os
import types
from typing import Any, Iterator

import torch

from . import _native

_HERE = os.path.dirname(os.path.abspath(__file__))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
#: What calls the ``forward`` of a module.
_CALL_OF_MODULE = torch.nn.Module._call_impl.__code__


@functools.lru_cache(maxsize=4096)
def _literals(code: types.CodeType) -> tuple[Any, ...]:
    """Numbers in a function's source, and in that of functions defined inside it."""
    # Since Python 3.14 small integers are in instructions and not among the constants.
    found: list[Any] = [i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_SMALL_INT"]
    waiting = list(code.co_consts)
    while waiting:
        constant = waiting.pop()
        if isinstance(constant, (int, float)):
            found.append(constant)
        elif isinstance(constant, (tuple, frozenset)):
            waiting.extend(constant)
        elif isinstance(constant, types.CodeType):
            found.extend(_literals(constant))
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Names of globals and attributes that a function reads, and those of functions defined inside it."""
    nested = (name for inner in code.co_consts if isinstance(inner, types.CodeType) for name in _names(inner))
    return (*code.co_names, *nested)


def _called(function: types.FunctionType) -> Iterator[Any]:
    """Functions that a function has by a global name, or as a module's."""
    names = _names(function.__code__)
    for name in names:
        known = function.__globals__.get(name)
        if isinstance(known, (types.FunctionType, functools.partial)):
            yield known
        elif isinstance(known, types.ModuleType):
            members = (vars(known).get(member) for member in names)
            yield from (member for member in members if isinstance(member, (types.FunctionType, functools.partial)))


def literals_of(function: Any) -> Iterator[Any]:
    """Numbers in the source of ``function`` and of functions that it captures, or has by a global name or as a
    module's. Torch's functions and the package's have none that are the user's, but may hold functions of the user."""
    seen: set[int] = set()
    waiting = [function]
    while waiting:
        f = waiting.pop()
        if id(f) in seen or len(seen) > 64:
            continue
        seen.add(id(f))
        if isinstance(f, (tuple, list)):
            waiting.extend(f[:64])
        elif isinstance(f, functools.partial):
            waiting.append(f.func)
        elif isinstance(f, types.MethodType):
            waiting.append(f.__func__)
        elif isinstance(f, types.FunctionType):
            if not is_ours(f.__code__.co_filename):
                yield from _literals(f.__code__)
                waiting.extend(_called(f))
            for cell in f.__closure__ or ():
                try:
                    waiting.append(cell.cell_contents)
                except ValueError:
                    continue
        elif not isinstance(f, (type, torch.Tensor)) and isinstance(
            getattr(type(f), "__call__", None), types.FunctionType
        ):
            waiting.append(type(f).__call__)


@functools.lru_cache(maxsize=4096)
def is_ours(file: str) -> bool:
    """Whether a file is the package's, or torch's."""
    return os.path.abspath(file).startswith((_HERE + os.sep, _TORCH + os.sep))


def place(error: BaseException) -> str:
    """File, line and function of the user's code that an error comes from."""
    found, tb = "", error.__traceback__
    while tb is not None:
        code = tb.tb_frame.f_code
        if not is_ours(code.co_filename):
            found = f' File "{code.co_filename}", line {tb.tb_lineno}, in {code.co_name}'
        tb = tb.tb_next
    return found


def defined(function: Any) -> str:
    """File, line and name of the user's code that a call of ``function`` runs first, to follow a message; empty where
    that is not Python's."""
    while not isinstance(function, types.FunctionType):
        if hasattr(function, "_program"):
            function = function._function  # What a Mask is made of.
        elif isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__func__
        else:
            function = type(function).__call__
            if not isinstance(function, (types.FunctionType, types.MethodType, functools.partial)):
                return ""
    code = function.__code__
    if is_ours(code.co_filename):
        return ""
    return f'; File "{code.co_filename}", line {code.co_firstlineno}, in {code.co_name}'


def miscalled(kind: str, function: Any, given: int, error: TypeError) -> TypeError | None:
    """What ``error`` says of a mask or score function that takes other arguments than the ``given`` values; None of an
    error of its body."""
    if place(error):
        return None
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    if tb is None:
        return None
    code = tb.tb_frame.f_code
    if not os.path.abspath(code.co_filename).startswith(_HERE + os.sep) and code is not _CALL_OF_MODULE:
        return None  # A function of torch has begun.
    caller: Any = tb.tb_frame.f_locals.get("self")
    if hasattr(caller, "_program"):
        # A Mask that calls what it is made of, which may be one of several that are joined.
        function = caller._function
    return TypeError(f"{kind}_mod `{name_of(function)}` is called with {given} values: {error}{defined(function)}")


def named(error: IndexError, *functions: _native.Traced | None) -> IndexError:
    """An error of the engine with the user's name of the captured tensor in place of the program's."""
    message = str(error)
    for traced in filter(None, functions):
        for capture in traced.captures:
            slot = f"captured buffer `{capture.name}`"
            if slot in message:
                called = captured(traced.function, capture.tensor)
                shape = "" if "`" in called else f" of shape {tuple(capture.tensor.shape)}"
                message = message.replace(slot, called + shape)
    return IndexError(message)


def captured(function: Any, tensor: torch.Tensor) -> str:
    """What a captured tensor is called in messages: by the name by which ``function`` reaches it."""
    name = next((name for name, value in _variables(function) if value is tensor), None)
    return f"captured tensor `{name}`" if name else "a captured tensor"


def _variables(function: Any) -> Iterator[tuple[str, Any]]:
    """Names and values that a function can reach: of its closure, its globals, its object, and these in turn."""
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", function)]
    while waiting and len(seen) < 1024:
        name, value = waiting.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if name:
            yield name, value
        if isinstance(value, types.FunctionType):
            code = value.__code__
            for variable, cell in zip(code.co_freevars, value.__closure__ or ()):
                try:
                    waiting.append((variable, cell.cell_contents))
                except ValueError:
                    continue
            waiting.extend((g, value.__globals__[g]) for g in code.co_names if g in value.__globals__)
        elif isinstance(value, functools.partial):
            waiting.extend(
                [(name, value.func), *((f"argument {i}", a) for i, a in enumerate(value.args)), *value.keywords.items()]
            )
        elif isinstance(value, types.MethodType):
            waiting.extend([(name, value.__func__), (name, value.__self__)])
        elif isinstance(value, dict):
            waiting.extend((str(key), item) for key, item in value.items())
        elif isinstance(value, (list, tuple)):
            waiting.extend((f"{name}[{i}]", item) for i, item in enumerate(value))
        elif not isinstance(value, (type, types.ModuleType, torch.Tensor)):
            waiting.extend(getattr(value, "__dict__", {}).items())
            waiting.extend(
                (slot, getattr(value, slot)) for slot in getattr(type(value), "__slots__", ()) if hasattr(value, slot)
            )


def name_of(function: Any) -> str:
    """What a function is called in messages."""
    return getattr(function, "__name__", None) or type(function).__name__
