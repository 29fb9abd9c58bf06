"""The runner of other people's tests, on a file written here."""

import re

import pytest
from processes import run_copy

FILE = '''
import unittest

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

device = "cuda" if torch.cuda.is_available() else "cpu"


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def operands(grad=False):
    return [torch.randn(1, 2, 32, 16, device=device, requires_grad=grad) for _ in range(3)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA not available")
def test_for_a_gpu():
    mask = create_block_mask(causal, None, None, 32, 32, device="cuda", BLOCK_SIZE=16)
    attend = lambda *tensors: flex_attention(*tensors, block_mask=mask)
    q, k, v = operands()
    torch.testing.assert_close(torch.compile(attend, backend="eager")(q, k, v), attend(q, k, v))
    assert torch.cuda.get_device_capability() >= (8, 0)


def test_with_a_backward_of_its_own():
    q, k, v = operands(grad=True)
    out = flex_attention(q, k, v)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), q), torch.autograd.grad(theirs.sum(), q))


def test_that_calls_no_attention():
    pass


@pytest.mark.skip(reason="its own reason")
def test_skipped():
    pass


@unittest.skipUnless(False, "Requires Triton")
@pytest.mark.parametrize("heads", [1, 2, 3])
def test_that_wants_triton(heads):
    q, k, v = (t[:, :1].repeat(1, heads, 1, 1) for t in operands())
    attend = lambda *tensors: flex_attention(*tensors, return_aux=AuxRequest(max_scores=True))
    (_, gold), (_, aux) = attend(q, k, v), torch.compile(attend, backend="eager")(q, k, v)
    torch.testing.assert_close(aux.max_scores, gold.max_scores)


@unittest.skipIf(True, "Skip on CPU as not supported")
def test_that_computes_twice():
    q, k, v = operands(grad=True)
    layer = lambda *tensors: checkpoint(flex_attention, *tensors, use_reentrant=False)
    out, gold = torch.compile(layer, backend="eager")(q, k, v), layer(q, k, v)
    for a, b in zip(torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(gold.sum(), (q, k, v))):
        torch.testing.assert_close(a, b)
'''


WRONG = "\n\ndef test_wrong():\n    assert float(flex_attention(*operands()).sum()) == 7.0\n"


#: No GPU, whatever the machine has: what runs, and what is skipped, depends on it.
WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": ""}
#: The command `python -m foveate.testing.upstream`.
COMMAND = "import runpy; runpy.run_module('foveate.testing.upstream', run_name='__main__', alter_sys=True)"


@pytest.mark.parametrize(
    "mode, more, code, row", [("--eager", "", 0, "8 6 0 1 1 5/6"), ("--compiled", WRONG, 1, "9 6 1 1 1 6/7")]
)
def test_a_file_for_torchs_flex_attention_runs_on_foveate_and_ends_in_a_table(mode, more, code, row, tmp_path):
    (tmp_path / "test_theirs.py").write_text(FILE + more)
    ran = run_copy(COMMAND, mode, str(tmp_path / "test_theirs.py"), **WITHOUT_GPU)
    assert ran.returncode == code, ran.stdout + ran.stderr
    table = ran.stdout[ran.stdout.index("file   ") :]
    assert " ".join(table.splitlines()[1].split()[1:7]) == row, ran.stdout
    assert "itself, 1 of: its own reason" in table


def test_a_test_that_calls_operators_alone_has_run_on_foveate(tmp_path):
    """As what Inductor compiles does: kernels that torch calls without Python."""
    head = FILE[: FILE.index("@pytest.mark.skipif")]
    test = "def test_under_a_mode():\n    with FlopCounterMode(display=False):\n        flex_attention(*operands())\n"
    (tmp_path / "test_theirs.py").write_text(f"{head}from torch.utils.flop_counter import FlopCounterMode\n\n\n{test}")
    ran = run_copy(COMMAND, "--compiled", str(tmp_path / "test_theirs.py"))
    assert re.search(r"test_theirs.py +1 +1 +0 +0 +0 +1/1 ", ran.stdout), ran.stdout + ran.stderr


def test_what_is_skipped_here_says_which_of_the_reasons(tmp_path):
    (tmp_path / "test_theirs.py").write_text(FILE)
    run = (
        "from foveate.testing import upstream\n"
        "upstream.SKIPS = (('test_theirs.py', 'for_a_gpu', 'hardware', 'two GPUs', ''),)\n"
        f"raise SystemExit(upstream.main(['--compiled', '--each', '1', {str(tmp_path / 'test_theirs.py')!r}]))"
    )
    ran = run_copy(run, **WITHOUT_GPU)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "1 hardware" in ran.stdout and re.search(r"test_theirs.py +6 +3 +0 +1 +1 +4/6 ", ran.stdout)
    assert "hardware, 1 of: hardware: needs hardware that is not there; two GPUs" in ran.stdout


def test_some_of_each_function_are_of_those_whose_names_match(tmp_path):
    (tmp_path / "test_theirs.py").write_text(FILE)
    match = ("--each", "1", "-k", "triton and 3")
    ran = run_copy(COMMAND, "--eager", *match, str(tmp_path / "test_theirs.py"), **WITHOUT_GPU)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"test_theirs.py +1 +1 +0 +0 +0 +1/1 ", ran.stdout), ran.stdout


def test_a_file_that_is_not_there_is_one_line():
    ran = run_copy(COMMAND, "--eager", "none.py")
    assert ran.returncode == 2 and ran.stderr.splitlines()[-1].endswith("error: there is no file none.py")
