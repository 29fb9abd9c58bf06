"""Runs test files that were written for torch's ``flex_attention`` on Foveate::

    python -m foveate.testing.upstream --compiled FILE...
    python -m foveate.testing.upstream --eager FILE...

``--compiled``: torch's own names run on Foveate in every call, by :func:`foveate.enable`. ``--eager``: what a test
compiles runs uncompiled, and calls of torch's names in it are Foveate's unless they are of float64; calls beside it
stay torch's, which is the judge. A file that compiles nothing has a judge of its own: there all calls are Foveate's.
So are those of a test whose own calls want a backward on the CPU, which torch refuses.

Where there is no GPU, tests for one run on the CPU: the file's ``"cuda"`` is read as ``"cpu"``, and its
``torch.cuda.is_available()`` as true. Nothing else of a file is changed, and none is copied.

A test that cannot say anything of Foveate is skipped for one of the :data:`REASONS`, by :data:`SKIPS`. A table ends
the run. The exit code is 1 when a test failed or a file could not be imported. It needs pytest.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections import Counter
from typing import Any, Callable, Generator, NamedTuple, Sequence

import pytest
import torch
import torch._dynamo

import foveate
from foveate import _blocks, _enable, _flex

#: Why a test is skipped.
REASONS = {
    "code": "looks at generated code, graphs, logs or counts of compilations",
    "triton": "checks a Triton option",
    "refusal": "expects a refusal that Foveate lifts",
    "hardware": "needs hardware that is not there",
    "defect": "a defect of the test",
}

#: Name of the file, pattern of the test, reason, what exactly.
SKIPS: tuple[tuple[str, str, str, str], ...] = ()


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
        if name.startswith("torch.cuda.") and name.removeprefix("torch.cuda.") in self._ANSWERS:
            answer = self._ANSWERS[name.removeprefix("torch.cuda.")]
            made: ast.expr = ast.parse(repr(answer), mode="eval").body
            for part in ast.walk(made):
                ast.copy_location(part, node)
            return made
        return node

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
    outcome: str
    detail: str


class _Run:
    """A plugin of pytest: each test runs on Foveate, and is counted."""

    def __init__(self, eager: bool) -> None:
        self.eager = eager
        self.cases: dict[str, _Case] = {}
        #: Calls that Foveate answered.
        self.calls = 0
        self.compile = torch.compile
        for owner, name in ((_flex._Call, "planned"), (_blocks, "_State")):
            setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return function(*args, **kwargs)

        return counted

    def _compile(self, model: Any = None, **options: Any) -> Any:
        """``torch.compile``, for ``--eager``."""
        if model is None:
            return functools.partial(self._compile, **options)

        @functools.wraps(model, updated=())
        def uncompiled(*args: Any, **kwargs: Any) -> Any:
            with foveate.enable():
                return model(*args, **kwargs)

        return uncompiled

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for item in items:
            name = os.path.basename(item.path)
            for file, pattern, reason, what in SKIPS:
                if name == file and re.search(pattern, item.name):
                    item.add_marker(pytest.mark.skip(reason=f"{reason}: {REASONS[reason]}; {what}"))
                    break

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Generator[None, Any, Any]:
        self.calls = 0
        torch._dynamo.reset()
        if self.eager and re.search(r"\bcompile\b", item.path.read_text()):
            torch.compile = self._compile
            try:
                return (yield)
            except NotImplementedError as refusal:
                if "does not support backward on CPU" not in str(refusal):
                    raise
            finally:
                torch.compile = self.compile
            # Torch is no judge of it here; what the test compares with besides is.
            with foveate.enable():
                return item.runtest()
        with foveate.enable():
            return (yield)

    def pytest_runtest_logreport(self, report: Any) -> None:
        file = os.path.basename(report.nodeid.split("::")[0])
        if report.skipped:
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            why = why.removeprefix("Skipped: ")
            ours = next((r for r in REASONS if why.startswith(f"{r}: ")), "itself")
            self.cases[report.nodeid] = _Case(file, ours, why)
        elif report.failed:
            self.cases[report.nodeid] = _Case(file, "failed", report.longreprtext.strip().rpartition("\n")[2])
        elif report.when == "call":
            self.cases[report.nodeid] = _Case(file, "passed" if self.calls else "untouched", "")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            file = os.path.basename(report.nodeid.split("::")[0])
            self.cases[report.nodeid] = _Case(file, "failed", f"not imported: {report.longreprtext.strip().rpartition(chr(10))[2]}")

    def table(self) -> str:
        """What became of the tests of each file."""
        files = sorted({case.file for case in self.cases.values()})
        rows = [f"{'file':44} {'tests':>6} {'passed':>7} {'failed':>7} {'other':>6} {'own skips':>10}  skipped here"]
        for file in (*files, None) if len(files) > 1 else files:
            count = Counter(case.outcome for case in self.cases.values() if file in (None, case.file))
            ours = ", ".join(f"{count[reason]} {reason}" for reason in REASONS if count[reason])
            rows.append(
                f"{file or 'in all':44} {count.total():6} {count['passed']:7} {count['failed']:7} "
                f"{count['untouched']:6} {count['itself']:10}  {ours or '-'}"
            )
        rows.append("other: tests that pass and call no attention; own skips: by the file itself")
        reasons = Counter((c.outcome, c.detail) for c in self.cases.values() if c.outcome not in ("passed", "untouched"))
        rows += [f"{outcome}, {n} of: {detail}" for (outcome, detail), n in sorted(reasons.items())]
        return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the module's description says; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m foveate.testing.upstream", description=(__doc__ or "").split("::")[0])
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--eager", action="store_true", help="what tests compile runs uncompiled on Foveate")
    mode.add_argument("--compiled", action="store_true", help="torch's own names run on Foveate")
    parser.add_argument("-k", metavar="EXPRESSION", default="", help="only tests whose names match, as of pytest")
    parser.add_argument("files", nargs="+", metavar="FILE")
    given = parser.parse_args(arguments)
    missing = [file for file in given.files if not os.path.isfile(file)]
    if missing:
        parser.error(f"there is no file {missing[0]}")
    files = [os.path.realpath(file) for file in given.files]
    run = _Run(given.eager)
    finder = _Finder(files)
    sys.meta_path.insert(0, finder)
    try:
        options = ["-q", "-p", "no:cacheprovider", "--tb=short", "--import-mode=prepend", "-k", given.k]
        status = pytest.main([*options, *files], plugins=[run, _First(finder)])
    finally:
        sys.meta_path.remove(finder)
        for owner, name in ((_flex._Call, "planned"), (_blocks, "_State")):
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
