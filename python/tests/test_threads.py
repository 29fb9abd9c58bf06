"""The threads that compute: how many, in processes that are forked, and after threads of Python's that ended."""

import itertools
import os
import signal
import threading
import time

import pytest
import torch
from processes import run_copy

from foveate import Mask, flex_attention


@pytest.mark.cpu("PyTorch does not let a forked process use CUDA")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_process_that_is_forked_while_threads_are_made_computes():
    q = torch.randn(1, 1, 64, 64)
    before, ended = torch.get_num_threads(), threading.Event()

    def changing():
        for n in itertools.cycle((2, 3)):
            torch.set_num_threads(n)
            flex_attention(q, q, q)
            if ended.is_set():
                return

    others = [threading.Thread(target=changing) for _ in range(3)]
    for thread in others:
        thread.start()
    try:
        for _ in range(40):
            time.sleep(0.005)
            child = os.fork()
            if child == 0:
                torch.set_num_threads(2)
                flex_attention(q, q, q)
                os._exit(0)
            limit = time.monotonic() + 20
            while os.waitpid(child, os.WNOHANG)[0] == 0:
                if time.monotonic() > limit:
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    pytest.fail("the child hangs")
                time.sleep(0.002)
    finally:
        ended.set()
        for thread in others:
            thread.join()
        torch.set_num_threads(before)


COUNTED = """
import pathlib, time, torch
from foveate import Mask, flex_attention

def computing():
    names = [task / "comm" for task in pathlib.Path("/proc/self/task").iterdir()]
    return sum(name.read_text().startswith("foveate-") for name in names)

q, k, v = (torch.randn(2, 4, 300, 32, requires_grad=True) for _ in range(3))
results = []
for threads, made in ((1, 0), (5, 5), (3, 3), (1, 3)):
    torch.set_num_threads(threads)
    out = flex_attention(q, k, v)
    results.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
    until = time.monotonic() + 20
    while computing() != made and time.monotonic() < until:
        time.sleep(0.01)  # Threads of the pool before end by themselves.
    print(computing(), all(torch.equal(a, b) for a, b in zip(results[-1], results[0])))
"""


@pytest.mark.cpu("the threads of a CPU")
def test_as_many_threads_compute_as_torch_is_told_to_use_and_give_the_same_bits():
    ended = run_copy(COUNTED)
    # One thread is the caller's own: it starts none, and leaves those that there are asleep.
    assert ended.stdout.splitlines() == ["0 True", "5 True", "3 True", "3 True"], ended.stdout + ended.stderr


def test_functions_that_threads_trace_at_once_read_what_their_own_trace_knows():
    q = torch.randn(1, 2, 20, 8)

    def of(n, meet):
        """A mask and a score that ask their trace, by a text and by methods of values, while another one runs."""
        table, named = torch.arange(20.0) * n, Mask("t[kv] >= n & q - kv < m", t=torch.arange(20), n=n, m=3 * n)

        def mask(b, h, i, j):
            meet()
            return named(b, h, i, j) & ((i - j).abs() > n)

        def score(s, b, h, i, j):
            meet()
            return s + torch.take(table, j.clamp(min=n)) * torch.isin(i, torch.tensor([2, 5 * n], device=q.device)).float()

        return lambda: flex_attention(q, q, q, score, Mask(mask))

    alone = [of(n, lambda: None)() for n in (1, 2)]
    both, together = threading.Barrier(2), {}
    # Made here: the default device is each thread's own.
    made = {n: of(n, lambda: both.wait(20)) for n in (1, 2)}
    calls = [threading.Thread(target=lambda n=n: together.update({n: made[n]()})) for n in (1, 2)]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    assert torch.equal(together[1], alone[0]) and torch.equal(together[2], alone[1])


@pytest.mark.cpu("the threads of a CPU")
def test_threads_that_come_and_go_leave_no_memory():
    q = torch.randn(1, 1, 4, 8)

    def resident(threads):
        for _ in range(threads):
            thread = threading.Thread(target=flex_attention, args=(q, q, q))
            thread.start()
            thread.join()
        with open("/proc/self/statm") as pages:
            return int(pages.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    before = resident(200)
    assert resident(1500) - before < 6 << 20  # A pool of each took 11 MiB.
