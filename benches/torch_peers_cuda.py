"""The rows of `torch_peers.py --device cuda`: the Python package on an NVIDIA GPU.

A time is the median of single runs between events of the stream, each behind a kernel that keeps the device
busy until the host has queued the run, as in training; rows that say "idle" have nothing before them, so the
host's time counts. What the host waits for is timed by the clock.
"""

import collections
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from torch.nn.attention import flex_attention as torch_flex

import foveate
from foveate import _autograd, _trace
from workloads import documents_of, mask_of, operands

# Clock cycles of the kernel that a timed run waits behind.
BUSY_CYCLES = 2_000_000


def case_of(s, mask="causal", width=0):
    """16 heads, D 128, bf16, the batch that fills 16,384 rows, as a case of `foveate bench gpu`."""
    return dict(batch=16384 // s, heads=16, heads_kv=16, q_len=s, len=s, dim=128, dtype="bf16", mask=mask,
                width=width, score="none")  # fmt: skip


def between_events(functions, seconds, idle=False):
    """Median milliseconds of each function, called in turn."""
    times = [[] for _ in functions]
    for function in functions * 3:
        function()
    torch.cuda.synchronize()
    until = time.perf_counter() + seconds * len(functions)
    while len(times[0]) < 10 or time.perf_counter() < until:
        for function, taken in zip(functions, times):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if not idle:
                torch.cuda._sleep(BUSY_CYCLES)
            start.record()
            function()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end))
    return [statistics.median(taken) for taken in times]


def by_clock(functions, seconds):
    """Median milliseconds of each function and of waiting for the device after it, called in turn."""
    times = [[] for _ in functions]
    for function in functions * 3:
        function()
    until = time.perf_counter() + seconds * len(functions)
    while len(times[0]) < 10 or time.perf_counter() < until:
        for function, taken in zip(functions, times):
            torch.cuda.synchronize()
            start = time.perf_counter()
            function()
            torch.cuda.synchronize()
            taken.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(taken) for taken in times]


def beside_rust(seconds):
    """A call of the package, and the engine's part of it alone: a plan with destinations."""
    for name, s, mask, width in (("s2048/causal", 2048, "causal", 0), ("s8192/causal", 8192, "causal", 0),
                                 ("s8192/documents", 8192, "documents", 16)):  # fmt: skip
        case = case_of(s, mask, width)
        q, k, v, d_out = operands(case, "cuda")
        mask_mod = mask_of(case, documents_of(case, "cuda"))
        block = foveate.create_block_mask(mask_mod, None, None, s, s, "cuda")
        learned = [t.clone().requires_grad_() for t in (q, k, v)]
        kept = foveate.flex_attention(*learned, block_mask=block)
        call = _autograd.Call(None, _trace.mask(mask_mod, (case["batch"], 16, s, s)), None, None, False, False)
        plan = call.planned(q, k, v, None, (), False)
        out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device="cuda")
        gradients = [torch.empty_like(t) for t in (q, k, v)]
        plan.forward(q, k, v, out, lse)
        pairs = {
            "forward": (lambda: foveate.flex_attention(q, k, v, block_mask=block), lambda: plan.forward(q, k, v, out, lse)),
            "backward": (
                lambda: torch.autograd.grad(kept, learned, d_out, retain_graph=True),
                lambda: plan.backward([q, k, v], [out, lse], d_out, None, gradients, [], None),
            ),
        }
        for which, pair in pairs.items():
            for idle in (False, True):
                whole, inner = between_events(pair, seconds, idle)
                row = f"rust/{name}/{which}{', idle' if idle else ''}: {inner:.3f} ms"
                yield row, "≤ 1.03 ×", f"{whole / inner:.3f} ×", whole / inner <= 1.03


def block_masks(seconds):
    """From ids to tables ready, S 32,768."""
    ids = torch.arange(32768, device="cuda") // 1000
    mods = {"causal": lambda b, h, q, kv: q >= kv, "documents": lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv])}
    for name, mod in mods.items():
        (taken,) = by_clock([lambda: foveate.create_block_mask(mod, None, None, 32768, 32768, "cuda")], seconds)
        yield f"create_block_mask/s32768/{name}", "≤ 0.5 ms", f"{taken:.3f} ms", taken <= 0.5


class NewDocuments:
    """Attention of a batch whose documents are new in every step, from ids to out; S 8192, 16 heads, D 64."""

    def __init__(self):
        self.qkv = [torch.randn(1, 16, 8192, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        draw = (torch.randint(0, 8 + n, (8192,), device="cuda", dtype=torch.int32) for n in range(8))
        self.batches = [torch.sort(ids).values for ids in draw]
        self.step = 0
        # One tensor for all batches and one function: nothing makes the peer compile again.
        self.ids = ids = torch.zeros(8192, device="cuda", dtype=torch.int32)
        self.mask_mod = lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv])
        self.attend = torch.compile(torch_flex.flex_attention)
        self.make = torch.compile(torch_flex.create_block_mask)

    def next(self):
        self.step += 1
        self.ids.copy_(self.batches[self.step % 8])

    def ours(self):
        self.next()
        return foveate.flex_attention(*self.qkv, block_mask=foveate.Mask(self.mask_mod))

    def ours_with_tables(self):
        self.next()
        block = foveate.create_block_mask(self.mask_mod, None, None, 8192, 8192, "cuda")
        return foveate.flex_attention(*self.qkv, block_mask=block)

    def flex(self):
        self.next()
        block = self.make(self.mask_mod, None, None, 8192, 8192, device="cuda")
        return self.attend(*self.qkv, block_mask=block)

    def check(self):
        """Whether all give the same of one batch."""
        results = []
        for run in (self.ours, self.ours_with_tables, self.flex):
            self.step = 0
            results.append(run().float())
        return all(bool((r - results[0]).abs().max() <= 0.02 * results[0].abs().max()) for r in results)


def new_documents(seconds):
    began = time.perf_counter()
    both = NewDocuments()
    if not both.check():
        sys.exit("torch_peers: attention of new documents is not compiled flex_attention's")
    print(f"compiled flex_attention and create_block_mask after {time.perf_counter() - began:.1f} s", file=sys.stderr)
    mine, tables, theirs = by_clock([both.ours, both.ours_with_tables, both.flex], seconds)
    for name, taken in (("Mask", mine), ("create_block_mask", tables)):
        ratio = theirs / taken
        yield f"new documents/{name}: {taken:.3f} ms beside {theirs:.3f}", "≥ 2 ×", f"{ratio:.2f} ×", ratio >= 2


def first_call_alone(learns):
    """Prints the seconds of the first call of this process, batch 2, 8 heads, S 2048, D 128, bf16, causal; what
    PyTorch's own first backward imports is not counted."""
    q, k, v = (torch.randn(2, 8, 2048, 128, device="cuda", dtype=torch.bfloat16, requires_grad=learns) for _ in range(3))
    one = torch.ones(3, device="cuda", requires_grad=True)
    (one * 2).sum().backward()
    torch.cuda.synchronize()
    start = time.perf_counter()
    out = foveate.flex_attention(q, k, v, block_mask=foveate.Mask.causal())
    if learns:
        out.backward(out.detach())
    torch.cuda.synchronize()
    print(time.perf_counter() - start)


def first_calls(_):
    for which, bars in (("forward", (3, 0.3)), ("both", (5, 0.3))):
        with tempfile.TemporaryDirectory() as cache:
            for state, bar in zip(("cold", "warm"), bars):
                command = [sys.executable, os.path.join(os.path.dirname(__file__), "torch_peers.py"), "--first-call", which]
                child = subprocess.run(command, check=True, capture_output=True, text=True,
                                       env=os.environ | {"FOVEATE_CACHE_DIR": cache})  # fmt: skip
                taken = float(child.stdout)
                name = "with backward" if which == "both" else "forward"
                yield f"first call/{name}, {state} cache", f"≤ {bar} s", f"{taken:.3f} s", taken <= bar


def variants_alone():
    """Prints how many programs were made and how many variants were compiled of the kernel that has most, for 1,000
    lengths, captured values and layouts of documents, forward and backward, of one head dim and dtype."""
    programs = set()
    generator = torch.Generator().manual_seed(1)
    draw = lambda low, high: int(torch.randint(low, high, (), generator=generator))
    for _ in range(1000):
        s, window, cap = draw(1, 3000), draw(1, 500), 1.0 + draw(0, 1000) / 10
        ids = torch.sort(torch.randint(0, draw(1, 20), (s,), device="cuda")).values
        q, k, v = (torch.randn(1, 2, s, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        mask = foveate.Mask(lambda b, h, q, kv: (q >= kv) & (q - kv < window) & (ids[q] == ids[kv]))
        def score(score, b, h, q, kv):
            return cap * torch.tanh(score / cap)

        out = foveate.flex_attention(q, k, v, score, mask)
        torch.autograd.grad(out, (q, k, v), out.detach())
        programs.add((mask._program((1, 2, s, s)).text(), _trace.score(score, (1, 2, s, s)).text()))
    variants = collections.Counter()
    for file in pathlib.Path(os.environ["FOVEATE_DUMP_KERNELS"]).glob("*.cu"):
        variants[tuple(re.findall(r"__global__[^;{]*?(fv_\w+)\s*\(", file.read_text()))] += 1
    print(variants, file=sys.stderr)
    print(len(programs), max(variants.values()))


def variants(_):
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as dump:
        command = [sys.executable, os.path.join(os.path.dirname(__file__), "torch_peers.py"), "--variants"]
        folders = {"FOVEATE_CACHE_DIR": cache, "FOVEATE_DUMP_KERNELS": dump}
        child = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | folders)
    programs, most = map(int, child.stdout.split())
    row = "variants/1,000 lengths, captured values and layouts of documents"
    yield f"{row}: programs after the first", "≤ 0", str(programs - 1), programs == 1
    yield f"{row}: of a kernel", "≤ 6", str(most), most <= 6


GROUPS = [
    ("rust", beside_rust), ("create_block_mask", block_masks), ("new documents", new_documents),
    ("first call", first_calls), ("variants", variants),
]  # fmt: skip
