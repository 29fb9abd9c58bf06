"""Runs tests on another device: ``pytest --device cuda python/tests/test_dot_product.py`` makes every tensor that says
no device, and every generator, there. ``test_cuda*.py`` need no option. Tests marked ``cpu`` are of the CPU only.

Tests may run in parallel processes on one device (``pytest -n 14 --dist worksteal --device cuda python/tests``, with
pytest-xdist). None has to be alone there: each draws numbers of its own, and what tests a lack of memory limits its
own process (``on_cuda.no_more_memory``).
"""

import logging
import os
import zlib

# A thread of OpenMP that waits for the next kernel does so asleep: awake, it takes a processor from what else runs on the
# machine, and 2 ms or more of every small kernel where there are more of both than processors. Read as torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest  # noqa: E402
import torch  # noqa: E402


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="where tensors are made that say no device")


def pytest_configure(config):
    config.addinivalue_line("markers", "cpu(why): holds of CPU tensors only")
    # To loggers that do not propagate pytest adds its own handlers, and for a handler of this one torch records every
    # step of a compilation, with stacks and guards.
    logging.getLogger("torch.__trace").propagate = True
    device = torch.device(config.getoption("--device"))
    if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):
        # Each process has its share of the processors: no pool of compilers of its own, and no more threads.
        threads = max(1, len(os.sched_getaffinity(0)) // workers)
        torch.set_num_threads(threads)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if device.type == "cpu":
        # Inductor's kernels for it are few: a pool of processes that import torch takes longer to start than these take
        # to compile, and so does what tries the processor's vector instructions. Scalar code says as much of Foveate.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
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


def pytest_collectstart(collector):
    # A module that is imported draws its numbers: the same ones whichever modules were imported before.
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def seeded(request):
    """A test draws the same numbers whichever tests ran before in the process."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def repeatable():
    """Sums in a fixed order on every device, as the CPU has them anyway: the same bits in each run."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)
