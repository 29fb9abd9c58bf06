"""The examples of examples/python run: each checks its own result, in a process of its own, in less than a minute."""

from pathlib import Path

import pytest
import torch
from processes import run_copy

EXAMPLES = sorted((Path(__file__).parents[2] / "examples/python").glob("*.py"))
RUN = "import runpy, sys, torch; torch.set_default_device({device!r}); runpy.run_path(sys.argv[1], run_name='__main__')"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_in_less_than_a_minute(example):
    if example.stem == "huggingface":
        pytest.importorskip("transformers", reason="transformers is not installed: see scripts/python-env.sh")
    ended = run_copy(RUN.format(device=torch.get_default_device().type), str(example))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout
    # Of processors: how long the clock's is depends on what else runs. Torch's import, 3 s, is not counted.
    assert ended.seconds < 57, f"{ended.seconds:.0f} s"


def test_there_are_examples():
    assert len(EXAMPLES) >= 9
