"""Runs tests on another device: ``pytest --device cuda python/tests/test_dot_product.py`` makes every tensor that says
no device, and every generator, there. ``test_cuda*.py`` need no option. Tests marked ``cpu`` are of the CPU only.
"""

import os

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="where tensors are made that say no device")


def pytest_configure(config):
    config.addinivalue_line("markers", "cpu(why): holds of CPU tensors only")
    device = torch.device(config.getoption("--device"))
    if device.type == "cpu":
        # Inductor's kernels for it are few: a pool of processes that import torch takes longer to start than these take
        # to compile, and what tries the processor's instructions compiles as long as all of them.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
        return
    if device.type != "cuda" or not torch.cuda.is_available():
        raise pytest.UsageError(f"--device {device}: torch finds no such device")

    class Generator(torch.Generator):
        def __new__(cls, on=device):
            return super().__new__(cls, on)

    torch.set_default_device(device)
    torch.Generator = Generator


def pytest_collection_modifyitems(config, items):
    if torch.device(config.getoption("--device")).type == "cpu":
        return
    for item in items:
        if mark := item.get_closest_marker("cpu"):
            item.add_marker(pytest.mark.skip(reason=f"skipped: {mark.args[0]}"))


@pytest.fixture
def repeatable():
    """Sums in a fixed order on every device, as the CPU has them anyway: the same bits in each run."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)
