"""The examples of the manual's pages on Python run, one after the other, each page in a process of its own: some
register Foveate with other libraries."""

import re
from pathlib import Path

import pytest
import torch.nn.attention
from processes import run_copy

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", sorted(p.name for p in DOCS.glob("python*.md")))
def test_the_examples_of_the_manual_run(page):
    needed = {"python-huggingface.md": ["transformers"], "python-trainers.md": ["torchao", "torchtune", "torchtitan"]}
    for library in needed.get(page, ()):
        pytest.importorskip(library, reason=f"{library} is not installed: see scripts/python-env.sh")
    if page == "python-sdpa.md" and not hasattr(torch.nn.attention, "restore_flash_attention_impl"):
        pytest.skip("skipped: torch 2.11 is the first that takes another FlashAttention")
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert blocks
    if page == "python.md":
        assert len(blocks) >= 3
        blocks.append("assert out.shape == (1024, 8, 64)\n")
    ran = run_copy("\n".join(blocks))
    assert ran.returncode == 0, ran.stderr
