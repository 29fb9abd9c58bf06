"""The examples of examples/python run: each checks its own result, in a process of its own, in less than a minute."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = sorted((Path(__file__).parents[2] / "examples/python").glob("*.py"))
RUN = "import runpy, sys, torch; torch.set_default_device({device!r}); runpy.run_path(sys.argv[1], run_name='__main__')"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_in_less_than_a_minute(example):
    if example.stem == "huggingface":
        pytest.importorskip("transformers", reason="transformers is not installed: see scripts/python-env.sh")
    run = [sys.executable, "-c", RUN.format(device=torch.get_default_device().type), str(example)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run(run, capture_output=True, text=True, timeout=300)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout
    # Of processors: how long the clock's is depends on what else runs.
    taken = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert taken < 60, f"{taken:.0f} s"


def test_there_are_examples():
    assert len(EXAMPLES) >= 9
