"""Runs test files that were written for torch's ``flex_attention`` on Foveate::

    python -m foveate.testing.upstream --compiled FILE...
    python -m foveate.testing.upstream --eager FILE...

``--compiled``: torch's own names run on Foveate in every call, by :func:`foveate.enable`. ``--eager``: what a test
compiles runs uncompiled, and calls of torch's names in it are Foveate's unless they are of float64; calls beside it
stay torch's, which is the judge. A file that compiles nothing has a judge of its own: there all calls are Foveate's.

Where there is no GPU, tests for one run on the CPU: the file's ``"cuda"`` is read as ``"cpu"``, its
``torch.cuda.is_available()`` as true, and what it skips on the CPU or without Triton runs. Nothing else of a file is
changed, and none is copied. Torch's own ``flex_attention``, as a judge, has gradients and ``max_scores`` there, which
it refuses otherwise.

A test that cannot say anything of Foveate is skipped for one of the :data:`REASONS`, by :data:`SKIPS`. A table ends
the run. The exit code is 1 when a test failed or a file could not be imported. It needs pytest.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
import types
from collections import Counter
from typing import Any, Callable, Generator, Iterator, NamedTuple, Sequence

import pytest
import torch
import torch._dynamo
import torch.utils.checkpoint
from torch.nn.attention import flex_attention as _torch_flex

import foveate
from foveate import _autograd, _blocks, _dense, _enable, _native

#: Why a test is skipped.
REASONS = {
    "code": "looks at generated code, graphs, logs or counts of compilations",
    "triton": "checks a Triton option",
    "refusal": "expects a refusal that Foveate lifts",
    "hardware": "needs hardware that is not there",
    "defect": "a defect of the test",
}

_ATTENTION, _DECODING, _BOTH = "test_flex_attention.py", "test_flex_decoding.py", "test_flex_(attention|decoding).py"
_COUNTS = "how often it is compiled"

#: Pattern of the file's name, pattern of the function's or the test's, reason, what exactly, the mode where it is one.
#: They are of PyTorch's files; other projects' need none.
SKIPS: tuple[tuple[str, str, str, str, str], ...] = (
    (_ATTENTION, "dynamic_divisibility_guards|epilogue_fused|triton_template_warp_specialization",
     "code", "Triton's code", ""),
    (_BOTH, "logsumexp_only_return", "code", "Triton's code", ""),
    (_ATTENTION, "backend_auto_matches_triton_large|strided_backwards", "code", "Triton's code", ""),
    (_BOTH, "mixed_dtype_backwards(_compiled)?", "code", "an error that Inductor hands on", "eager"),
    (_ATTENTION, "backend_triton_decode_matches_auto|flex_attention_always_freezes_layout",
     "code", "calls of Inductor's own functions", ""),
    (_ATTENTION, "flex_attention_logging", "code", "the log of Inductor's choices", ""),
    (_ATTENTION, "direct_backward_.*", "code", "calls of torch's operator itself", ""),
    (_ATTENTION, "fw_bw_graph_correctness|symbol_closure_in_score_mod", "code", "the graph of torch's operator", ""),
    (_BOTH, "subgraph_respect_decompostion", "code", "the graph of torch's operator", ""),
    (_ATTENTION, "debug_flag_disables_internal_compilation", "code", "a warning of torch's uncompiled call", ""),
    (_ATTENTION, "builtin_score_mods(_automatic)?_dynamic|dynamic_shapes_bug_dynamic_batch", "code", _COUNTS, "eager"),
    (_ATTENTION, "free_symbol_dynamic", "code", _COUNTS, ""),
    (_ATTENTION, "compiling_create_block_mask_no_recompile", "code", _COUNTS, "eager"),
    (_DECODING, "do_not_trigger_dynamic_shapes_on_empty_block_mask", "code", _COUNTS, "eager"),
    (_ATTENTION, "kernel_options_argument_is_respected", "triton", "the tile in Triton's code", ""),
    (_ATTENTION, "backend_triton_decode_errors_.*", "triton", "that Triton has no decoding kernel for a shape", ""),
    (_ATTENTION, "mixed_dtypes_compiled", "refusal", "keys and values of another dtype on the CPU", ""),
    (_ATTENTION, "invalid_block_size", "refusal", "block size 96", ""),
    (_ATTENTION, "cpu_error_message_return_lse", "refusal", "lse on the CPU", ""),
    (_ATTENTION, "cant_lower_error_message", "refusal", "a captured tensor that Triton has no code for", ""),
    (_ATTENTION, "validate_small_embedding_size_error_message", "refusal", "head dims below 16", ""),
    (_ATTENTION, "zero_length_sequence_error", "refusal", "sequences of no elements", ""),
    (_BOTH, "captured_reduction", "refusal", "a long reduction", ""),
    (_ATTENTION, "backward_error_with_none_q_indices", "refusal", "a backward without lists of the queries' side", ""),
    (_DECODING, "bw_decoding_fails", "refusal", "a backward of few queries", ""),
    (_ATTENTION, "captured_wrong_device_error_message|mixed_device_error_message",
     "hardware", "tensors on two devices", ""),
    (_ATTENTION, "create_is_cuda_graphable", "hardware", "a CUDA graph", ""),
    (_ATTENTION, "symmetric_bias", "refusal", "a learned tensor that is read twice", ""),
    (_ATTENTION, "(distinct_biases|head_specific_gate)_.*float16.*",
     "defect", "its reference sums a gradient of 16 bits in 16 bits", ""),
    (_ATTENTION, "learnable_bias_global_compiled",
     "defect", "Inductor's code for `assert tensor` is not C++ on the CPU", ""),
    (_ATTENTION, "create_block_mask_recompile_persistent_reduction_oob",
     "defect", "Inductor's code for it is not C++ on the CPU", "compiled"),
    (_BOTH, "mixed_dtypes_fails", "defect", "PyTorch has taken mixed dtypes since 2.10", ""),
)


#: What answers calls of torch's names.
_COUNTED: tuple[tuple[Any, str], ...] = ((_autograd.Call, "planned"), (_dense, "attention"), (_blocks, "State"))


class _OnTheCpu(ast.NodeTransformer):
    """A test for a GPU as one for the CPU."""

    _ANSWERS = {"is_available": True, "get_device_capability": (9, 0), "empty_cache": None, "synchronize": None}

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str) and re.fullmatch(r"cuda(:0)?", node.value):
            return ast.copy_location(ast.Constant("cpu"), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = ast.unparse(node.func)
        if name.split(".")[-1] in ("skipCPUIf", "skipIf") and self._speaks_of_the_cpu(node):
            node.args[0] = ast.copy_location(ast.Constant(False), node)
        if name.split(".")[-1] == "skipUnless" and re.search(r"\bTriton\b", ast.unparse(node)):
            node.args[0] = ast.copy_location(ast.Constant(True), node)
        if name.startswith("torch.cuda.") and name.removeprefix("torch.cuda.") in self._ANSWERS:
            answer = self._ANSWERS[name.removeprefix("torch.cuda.")]
            made: ast.expr = ast.parse(repr(answer), mode="eval").body
            for part in ast.walk(made):
                ast.copy_location(part, node)
            return made
        return node

    @staticmethod
    def _speaks_of_the_cpu(skip: ast.Call) -> bool:
        """Whether a condition or a reason to skip is that this is the CPU."""
        return len(skip.args) == 2 and any(re.search("CPU", ast.unparse(part)) for part in (skip.func, *skip.args))

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        return ast.copy_location(ast.Constant(True), node) if node.attr == "is_cuda" else node


class _Loader(importlib.machinery.SourceFileLoader):
    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:  # type: ignore[override]
        tree = ast.parse(data, path)
        if not torch.cuda.is_available():
            tree = ast.fix_missing_locations(_OnTheCpu().visit(tree))
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)

    def get_code(self, fullname: str) -> Any:
        # Not from a cache of byte code, nor into one.
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


class _Finder(importlib.abc.MetaPathFinder):
    """Imports the files that are tested, and leaves others to others."""

    def __init__(self, files: Sequence[str]) -> None:
        self.files = set(files)

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        found = importlib.machinery.PathFinder.find_spec(name, path)
        if found is None or found.origin is None or os.path.realpath(found.origin) not in self.files:
            return None
        return importlib.util.spec_from_file_location(name, found.origin, loader=_Loader(name, found.origin))


class _Case(NamedTuple):
    file: str
    #: Of the test's source: many tests may be made of one.
    function: str
    outcome: str
    detail: str


@contextlib.contextmanager
def _torch_as_on_a_gpu() -> Iterator[None]:
    """Lets torch's uncompiled ``flex_attention``, which is the judge, have gradients and ``max_scores`` on the CPU: it
    is made of plain operations there, and only checks refuse."""
    refusing = {name: getattr(_torch_flex, name, None) for name in ("_validate_device", "_apply_kernel_options")}
    there = types.SimpleNamespace(device=torch.device("cuda"), requires_grad=True)
    if not torch.cuda.is_available():
        for name, check in refusing.items():
            if check is not None:
                setattr(
                    _torch_flex, name, lambda query, key, value, *rest, check=check: check(there, there, there, *rest)
                )
    try:
        yield
    finally:
        for name, check in refusing.items():
            if check is not None:
                setattr(_torch_flex, name, check)


#: What torch's checkpoint calls: newer versions keep the first name for others, and call the second.
_CHECKPOINT: Any = torch.utils.checkpoint._checkpoint_without_reentrant_generator
_CHECKPOINT = getattr(torch.utils.checkpoint, f"{_CHECKPOINT.__name__}_impl", _CHECKPOINT)


def _checkpoint(function: Callable[..., Any], *rest: Any, **options: Any) -> Any:
    """Torch's checkpoint, which computes once more, after the compiled function has returned, what that computed."""
    if not _enable.is_enabled():
        return _CHECKPOINT(function, *rest, **options)

    def enabled(*args: Any, **kwargs: Any) -> Any:
        with foveate.enable():
            return function(*args, **kwargs)

    return _CHECKPOINT(enabled, *rest, **options)


class _Run:
    """A plugin of pytest: each test runs on Foveate, and is counted."""

    def __init__(self, eager: bool, each: int | None = None) -> None:
        self.eager = eager
        self.each = each
        self.cases: dict[str, _Case] = {}
        #: File and function of what was collected.
        self.collected: set[tuple[str, str]] = set()
        #: The test functions of each file.
        self.functions: dict[str, list[str]] = {}
        #: Calls that Foveate answered in Python, and how many kernels torch had called before the test.
        self.calls, self.kernels = 0, 0
        self.compile = torch.compile
        for owner, name in _COUNTED:
            setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return function(*args, **kwargs)

        return counted

    def _answered(self) -> bool:
        """Whether the test has called attention of Foveate's, or an operator, as compiled functions do."""
        return self.calls > 0 or _native.kernel_calls() != self.kernels

    def _compile(self, model: Any = None, **options: Any) -> Any:
        """``torch.compile``, for ``--eager``."""
        if model is None:
            return functools.partial(self._compile, **options)
        if getattr(model, "__name__", None) == "_flex_attention_hop_wrapper":
            return self.compile(model, **options)  # Torch's own uncompiled call finds with it what functions capture.

        @functools.wraps(model, updated=())
        def uncompiled(*args: Any, **kwargs: Any) -> Any:
            with foveate.enable():
                return model(*args, **kwargs)

        return uncompiled

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        # Last: of what `-k` left.
        for item in items:
            name = os.path.basename(item.path)
            if name not in self.functions:
                nodes = ast.walk(ast.parse(item.path.read_text()))
                found = {
                    node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test")
                }
                self.functions[name] = sorted(found, key=len, reverse=True)
        self.collected = {self._function(item.nodeid) for item in items}
        if self.each is not None:
            items[:] = self._some(items, self.each)
        for item in items:
            name, function = self._function(item.nodeid)
            for file, pattern, reason, what, mode in SKIPS:
                here = mode in ("", "eager" if self.eager else "compiled")
                if (
                    here
                    and re.fullmatch(file, name)
                    and any(re.fullmatch(f"test_({pattern})", n) for n in (function, item.name))
                ):
                    item.add_marker(pytest.mark.skip(reason=f"{reason}: {REASONS[reason]}; {what}"))
                    break

    def _function(self, nodeid: str) -> tuple[str, str]:
        """File and function that a test is made of."""
        file, *_, name = nodeid.split("::")
        file = os.path.basename(file)
        return file, next((known for known in self.functions[file] if name.startswith(known)), name)

    def _some(self, items: list[Any], each: int) -> list[Any]:
        """At most so many tests of a function, evenly spread over all that are made of it."""
        of: dict[tuple[str, str], list[Any]] = {}
        for item in items:
            of.setdefault(self._function(item.nodeid), []).append(item)
        chosen = {id(tests[i * len(tests) // each]) for tests in of.values() for i in range(each)}
        return [item for item in items if id(item) in chosen]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Generator[None, Any, Any]:
        self.calls, self.kernels = 0, _native.kernel_calls()
        torch._dynamo.reset()
        if self.eager and re.search(r"\bcompile\b", item.path.read_text()):
            torch.compile = self._compile
            setattr(torch.utils.checkpoint, _CHECKPOINT.__name__, _checkpoint)
            try:
                with _torch_as_on_a_gpu():
                    ran = yield
            finally:
                torch.compile = self.compile
                setattr(torch.utils.checkpoint, _CHECKPOINT.__name__, _CHECKPOINT)
            if self._answered():
                return ran
            # It compiles nothing, so all of its calls are Foveate's, and what it compares with is the judge.
            with foveate.enable():
                return item.runtest()
        with foveate.enable():
            return (yield)

    def pytest_runtest_logreport(self, report: Any) -> None:
        file, function = self._function(report.nodeid)
        if report.skipped:
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            why = why.removeprefix("Skipped: ")
            ours = next((r for r in REASONS if why.startswith(f"{r}: ")), "itself")
            self.cases[report.nodeid] = _Case(file, function, ours, why)
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            said = report.longreprtext if crash is None else crash.message
            first = said.strip().partition("\n")[0]
            self.cases[report.nodeid] = _Case(file, function, "failed", first)
            # A run may end before its table.
            print(f"\nfailed: {report.nodeid.split('::')[-1]}: {first}", flush=True)
        elif report.when == "call":
            self.cases[report.nodeid] = _Case(file, function, "passed" if self._answered() else "untouched", "")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            file = os.path.basename(report.nodeid.split("::")[0])
            self.cases[report.nodeid] = _Case(
                file, "", "failed", f"not imported: {report.longreprtext.strip().rpartition(chr(10))[2]}"
            )

    def table(self) -> str:
        """What became of the tests of each file."""
        files = sorted({case.file for case in self.cases.values()})
        rows = [
            f"{'file':44} {'tests':>6} {'passed':>7} {'failed':>7} {'other':>6} {'own skips':>10} {'functions':>10}  "
            "skipped here"
        ]
        for file in (*files, None) if len(files) > 1 else files:
            cases = [case for case in self.cases.values() if file in (None, case.file)]
            count = Counter(case.outcome for case in cases)
            ours = ", ".join(f"{count[reason]} {reason}" for reason in REASONS if count[reason])
            functions = {function for function in self.collected if file in (None, function[0])}
            ran = {(case.file, case.function) for case in cases if case.outcome in ("passed", "failed", "untouched")}
            rows.append(
                f"{file or 'in all':44} {count.total():6} {count['passed']:7} {count['failed']:7} "
                f"{count['untouched']:6} {count['itself']:10} {f'{len(ran)}/{len(functions)}':>10}  {ours or '-'}"
            )
        rows.append(
            "other: tests that pass and call no attention; own skips: by the file itself; functions: that ran, of all"
        )
        reasons = Counter(
            (c.outcome, c.detail) for c in self.cases.values() if c.outcome not in ("passed", "untouched")
        )
        rows += [f"{outcome}, {n} of: {detail}" for (outcome, detail), n in sorted(reasons.items())]
        return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the module's description says; its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m foveate.testing.upstream", description=(__doc__ or "").split("::")[0]
    )
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--eager", action="store_true", help="what tests compile runs uncompiled on Foveate")
    mode.add_argument("--compiled", action="store_true", help="torch's own names run on Foveate")
    parser.add_argument("-k", metavar="EXPRESSION", default="", help="only tests whose names match, as of pytest")
    parser.add_argument("--each", type=int, metavar="N", help="at most N of the tests that are made of one function")
    parser.add_argument("files", nargs="+", metavar="FILE")
    given = parser.parse_args(arguments)
    missing = [file for file in given.files if not os.path.isfile(file)]
    if missing:
        parser.error(f"there is no file {missing[0]}")
    if given.each is not None and given.each < 1:
        parser.error(f"--each must be at least 1, got {given.each}")
    files = [os.path.realpath(file) for file in given.files]
    run = _Run(given.eager, given.each)
    finder = _Finder(files)
    sys.meta_path.insert(0, finder)
    try:
        options = ["-q", "-p", "no:cacheprovider", "--tb=short", "--import-mode=prepend", "-k", given.k]
        status = pytest.main([*options, *files], plugins=[run, _First(finder)])
    finally:
        sys.meta_path.remove(finder)
        for owner, name in _COUNTED:
            setattr(owner, name, getattr(owner, name).__wrapped__)
    print(run.table())
    failed = any(case.outcome == "failed" for case in run.cases.values())
    return 1 if failed or status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) else 0


class _First:
    """Keeps the finder before pytest's own."""

    def __init__(self, finder: _Finder) -> None:
        self.finder = finder

    def pytest_collectstart(self) -> None:
        sys.meta_path.remove(self.finder)
        sys.meta_path.insert(0, self.finder)


if __name__ == "__main__":
    sys.exit(main())
