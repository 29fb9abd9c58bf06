"""Inside ``torch.compile``: one graph break, the same results, and nothing of the package compiled."""

import subprocess
import sys

import pytest
import torch

from foveate import Mask, create_block_mask, flex_attention


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def test_a_compiled_function_breaks_its_graph_once_and_trains():
    slope = torch.randn(2, requires_grad=True)
    q = torch.randn(1, 2, 16, 8, requires_grad=True)

    def model(q, mask):
        x = q * 2
        return flex_attention(x, x, x, lambda s, b, h, i, j: s + slope[h] * j, mask).sin()

    for mask in (create_block_mask(causal, None, None, 16, 16), Mask.causal()):
        torch._dynamo.reset()
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        gold = model(q, mask)
        out = torch.compile(model, backend=backend)(q, mask)
        assert torch.equal(out, gold) and len(graphs) == 2
        ours = torch.autograd.grad(out.sum(), (q, slope))
        assert all(torch.equal(a, b) for a, b in zip(ours, torch.autograd.grad(gold.sum(), (q, slope))))
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="foveate runs outside of compiled regions"):
            torch.compile(model, backend=backend, fullgraph=True)(q, mask)


def test_a_block_mask_made_inside_a_compiled_function_is_a_block_mask():
    torch._dynamo.reset()

    def model(q):
        mask = create_block_mask(causal, None, None, q.shape[2], q.shape[2])
        return flex_attention(q, q, q, block_mask=mask)

    q = torch.randn(1, 2, 16, 8)
    assert torch.equal(torch.compile(model, backend="eager")(q), model(q))


IMPORT = """
import os, sys, time, torch
before = len(os.listdir("/proc/self/task"))
start = time.perf_counter()
import foveate
took = time.perf_counter() - start
assert len(os.listdir("/proc/self/task")) == before, "a thread was started"
assert "torch._dynamo" not in sys.modules, "dynamo was imported"
assert not torch.cuda.is_initialized()
print(took)
"""


def run(code, **environment):
    import os

    return subprocess.run(
        [sys.executable, "-B", "-c", code], capture_output=True, text=True, env={**os.environ, **environment}
    )


def test_importing_starts_no_thread_and_imports_no_compiler():
    done = run(IMPORT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("torch_module, words", [
    ("raise ModuleNotFoundError('none', name='torch')", "there is none"),
    ("__version__ = '2.9.1+cpu'", "this is 2.9.1"),
])
def test_without_a_torch_that_is_new_enough_the_import_says_so(tmp_path, torch_module, words):
    import os
    from pathlib import Path

    import foveate

    (tmp_path / "torch.py").write_text(torch_module)
    package = Path(foveate.__file__).parents[1]
    done = run("import foveate", PYTHONPATH=os.pathsep.join([str(tmp_path), str(package)]))
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode != 0 and last.startswith("ImportError: foveate needs PyTorch 2.10") and words in last
