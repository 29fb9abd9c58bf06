"""The examples of docs/python.md run, one after the other."""

import re
from pathlib import Path


def test_the_examples_of_the_manual_run():
    manual = (Path(__file__).parents[2] / "docs/python.md").read_text()
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", manual, re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)
    assert names["out"].shape == (1024, 8, 64)
