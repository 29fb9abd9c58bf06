"""The examples of examples/python run: each checks its own result."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples/python").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example, capsys):
    if example.stem == "huggingface":
        pytest.importorskip("transformers", reason="transformers is not installed: see scripts/python-env.sh")
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out


def test_there_are_examples():
    assert len(EXAMPLES) >= 9
