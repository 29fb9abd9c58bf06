"""Code in a process of its own: of a new interpreter, or, which takes 2 s less, a copy of one that has imported torch and
Foveate and done nothing else.
"""

import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import NamedTuple

import torch

_COPIES = multiprocessing.get_context("forkserver")
_COPIES.set_forkserver_preload(["foveate", "pytest", "torch._dynamo", "torch.distributed.tensor"])


def run(code, **environment):
    """The end of a process that ran ``code``, with this environment beside the usual one."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


class Ended(NamedTuple):
    """A copy's end; ``seconds`` are of processors, of its children too."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float


def run_copy(code, *arguments, **environment):
    """As :func:`run`, with these arguments, in a copy; it ends without what C++ does then."""
    with tempfile.TemporaryDirectory() as folder:
        copy = _COPIES.Process(target=_main, args=(folder, code, arguments, {**os.environ, **environment}))
        copy.start()
        copy.join(300)
        if copy.exitcode is None:
            copy.kill()
            copy.join()
        out, err, seconds = (_text(Path(folder, name)) for name in ("out", "err", "seconds"))
        return Ended(copy.exitcode, out, err, float(seconds or "nan"))


def run_ranks(function, *arguments, ranks=4):
    """``function(rank, *arguments)`` in as many copies."""
    torch.multiprocessing.start_processes(function, arguments, nprocs=ranks, start_method="forkserver")


def _text(file):
    return file.read_text() if file.exists() else ""


def _main(folder, code, arguments, environment):
    os.environ.clear()
    os.environ.update(environment)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT), number)
    sys.argv = ["-c", *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(code, "<string>", "exec"), main.__dict__)
    finally:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        Path(folder, "seconds").write_text(str(sum(u.ru_utime + u.ru_stime for u in used)))
