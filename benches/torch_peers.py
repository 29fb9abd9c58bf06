#!/usr/bin/env python3
"""Measures the Python package `foveate` beside PyTorch, each bar with its peer in the same run.

    pip install . && python3 benches/torch_peers.py                   # all rows of the CPU: half an hour
    python3 benches/torch_peers.py --device cuda                      # those of an NVIDIA GPU: two minutes
    python3 benches/torch_peers.py --filter overhead,memory           # those rows
    python3 benches/torch_peers.py --filter s512/d64 --seconds 1
    python3 benches/torch_peers.py --shared                           # on a machine that does other work

Both sides run in turn on the same numbers and as many threads; medians are compared. It ends in a table with
the bar of every row and a plot of how far each is from it. The exit code is 1 when a result is wrong or a row
missed its bar.

Needs torch 2.11 and a C++ compiler, for PyTorch's compiled flex_attention. Measure on a machine that does
nothing else: the load is in the table's last line. Where that cannot be had, `--shared` compares processor
seconds of one thread, lower quartiles of the calls: waiting for a processor does not count, but what others
do to its caches and clock does.
"""

import argparse
import functools
import math
import os
import re
import statistics
import subprocess
import sys
import time

import torch
from torch.nn.attention import flex_attention as torch_flex

import foveate
import torch_peers_cuda
from cpu_attention import Peer, error, exact, peers_of
from foveate import _autograd, _native, _trace
from workloads import documents_of, mask_of, operands, score_of

# The other side's threads spin after their work and would take a core from a short call.
REST_SECONDS = 0.02
TOLERANCE = 1e-4
# Calls of one timing of what takes microseconds.
CALLS = 20
# The clock, and what is taken of its readings: see `--shared`.
CLOCK, TYPICAL = time.perf_counter, statistics.median


def medians(functions, seconds):
    """Typical seconds of each function, called in turn until each had `seconds`, or five calls."""
    times = [[] for _ in functions]
    for function in functions:
        function()
    while len(times[0]) < 5 or sum(map(sum, times)) < seconds * len(functions):
        for function, taken in zip(functions, times):
            time.sleep(REST_SECONDS)
            function()
            start = CLOCK()
            function()
            taken.append(CLOCK() - start)
    return list(map(TYPICAL, times))


def microseconds(functions, seconds):
    """Typical microseconds of a call of each function, in turn, of many timings of some calls."""
    times = [[] for _ in functions]
    until = time.perf_counter() + seconds * len(functions)
    while len(times[0]) < 25 or time.perf_counter() < until:
        for function, taken in zip(functions, times):
            function()
            start = CLOCK()
            for _ in range(CALLS):
                function()
            taken.append((CLOCK() - start) / CALLS * 1e6)
    return list(map(TYPICAL, times))


class Native:
    """The engine's part of a forward pass: a plan with destinations, without the package's Python."""

    def __init__(self, q, k, v, score_mod=None, mask_mod=None, forward_only=True):
        extents = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        score = score_mod and _trace.score(score_mod, extents)
        mask = mask_mod and _trace.mask(mask_mod, extents)
        call = _autograd.Call(score, mask, None, None, False, False)
        self.plan = call.planned(q, k, v, None, (), forward_only)
        self.operands = (q.detach(), k.detach(), v.detach(), torch.empty(*q.shape[:3], v.shape[3]))
        self.lse = None if forward_only else torch.empty(q.shape[:3])

    def __call__(self):
        self.plan.forward(*self.operands, self.lse)


def overhead(seconds):
    """What a warm call takes more than the native one, on operands so small that little else is measured."""
    q, k, v = (torch.randn(1, 2, 16, 64) for _ in range(3))
    learned = [t.clone().requires_grad_() for t in (q, k, v)]
    ids, slope = torch.zeros(16, dtype=torch.long), torch.ones(2)

    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    def documents(b, h, q_idx, kv_idx):
        return (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)

    def alibi(score, b, h, q_idx, kv_idx):
        return score + slope[h] * (kv_idx - q_idx)

    def operations(score, b, h, q_idx, kv_idx):
        for _ in range(33):
            score = score * 0.5 + 0.1
        return score + slope[h]

    def both(score_mod=None, mask_mod=None):
        block = mask_mod and foveate.create_block_mask(mask_mod, None, None, 16, 16)
        return [lambda: foveate.flex_attention(q, k, v, score_mod, block), Native(q, k, v, score_mod, mask_mod)]

    timed = [
        *both(), *both(mask_mod=causal), *both(alibi), *both(mask_mod=documents), *both(operations),
        lambda: foveate.flex_attention(*learned), Native(*learned, forward_only=False),
    ]  # fmt: skip
    taken = microseconds(timed, seconds)
    plain, *more, learns = [whole - native for whole, native in zip(taken[::2], taken[1::2])]
    yield "overhead/no mods, no grad", "≤ 8 µs", f"{plain:.1f} µs", plain <= 8
    yield "overhead/no mods, forward with grad", "≤ 25 µs", f"{learns:.1f} µs", learns <= 25
    for name, bar, mod in zip(("causal", "ALiBi", "documents", "67 operations"), (15, 15, 15, 60), more):
        yield f"overhead/more with {name}", f"≤ {bar} µs", f"{mod - plain:.1f} µs", mod - plain <= bar


def case_of(s, d, mask="full", score="none", learns=False, width=0):
    return dict(batch=1, heads=8, heads_kv=8, q_len=s, len=s, dim=d, dtype="f32", mask=mask, score=score,
                width=width, **{"pass": "both" if learns else "forward"})  # fmt: skip


class Ours(Peer):
    """Foveate as a peer of a case."""

    def __init__(self, case):
        super().__init__("sdpa", case | dict(mask="full"), torch.get_num_threads())
        self.name = "foveate"
        mask, score = mask_of(case, documents_of(case)), score_of(case)
        block = mask and foveate.create_block_mask(mask, None, None, case["q_len"], case["len"])
        self.attend = lambda q, k, v: foveate.flex_attention(q, k, v, score, block)


def checked(peer, case):
    """Fails where a result is not that of f64."""
    wrong = error(case, peer.run(), exact(case))
    if not wrong <= TOLERANCE:
        sys.exit(f"torch_peers: {peer.name} is {wrong:.2g} from f64 on {case}")


def beside_rust(seconds):
    for s in (512, 2048):
        case = case_of(s, 64, "causal")
        q, k, v, _ = operands(case)
        ours, native = Ours(case), Native(q, k, v, mask_mod=mask_of(case, None))
        with torch.no_grad():
            whole, inner = medians([ours.run, native], seconds)
        yield f"rust/s{s}/d64/causal", "≤ 1.05 ×", f"{whole / inner:.3f} ×", whole / inner <= 1.05


WORKLOADS = {
    "full": ("full", "none", 0, (1.2, 1.2)),
    "causal": ("causal", "none", 0, (1.4, 1.5)),
    "window": ("window", "none", 256, (1.8, 2.0)),
    "documents": ("documents", "none", 8, (1.8, 2.0)),
    "prefix": ("prefix", "none", 128, (1.8, 2.0)),
    "alibi": ("causal", "alibi", 0, (1.8, 2.0)),
    "softcap": ("causal", "softcap", 0, (1.8, 2.0)),
}


def beside_torch(name, s, d, learns, seconds):
    mask, score, width, bars = WORKLOADS[name]
    case = case_of(s, d, mask, score, learns, width)
    bar = bars[learns]
    ours, rivals = Ours(case), []
    for peer in peers_of(case):
        try:
            rivals.append(Peer(peer, case, torch.get_num_threads()))
            rivals[-1].run()
        except NotImplementedError as reason:
            print(f"{name}: without {peer}: {reason}", file=sys.stderr)
            rivals.pop()
    for peer in (ours, *rivals):
        checked(peer, case)
    mine, *theirs = medians([p.run for p in (ours, *rivals)], seconds)
    fastest = min(range(len(theirs)), key=theirs.__getitem__)
    ratio = theirs[fastest] / mine
    row = f"torch/s{s}/d{d}/{name}/{'with backward' if learns else 'forward'} beside {rivals[fastest].name}"
    yield row, f"≥ {bar} ×", f"{ratio:.2f} ×", ratio >= bar


def beside_eager_flex(seconds):
    case = case_of(2048, 64, "causal")
    q, k, v, _ = operands(case)
    block = torch_flex.create_block_mask(mask_of(case, None), None, None, 2048, 2048, device="cpu")
    ours = Ours(case)
    with torch.no_grad():
        mine, theirs = medians([ours.run, lambda: torch_flex.flex_attention(q, k, v, block_mask=block)], seconds)
    yield "torch/s2048/d64/causal/forward beside uncompiled flex", "≥ 10 ×", f"{theirs / mine:.1f} ×", theirs / mine >= 10


def memory_alone():
    """Prints the MiB that documents of S 32768, 8 heads, D 64 take, forward and backward, over inputs and
    results: the peak of this process after the inputs are there."""
    q, k, v = (torch.randn(1, 8, 32768, 64, requires_grad=True) for _ in range(3))
    d_out = torch.randn(1, 8, 32768, 64)
    ids = torch.arange(32768) // 1024
    small = [t[:, :, :64] for t in (q, k, v)]
    foveate.flex_attention(*small).sum().backward()
    for t in (q, k, v):
        t.grad = None
    mask = foveate.Mask.causal() & foveate.Mask.document(ids)
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    before = resident("VmHWM")
    out = foveate.flex_attention(q, k, v, block_mask=mask)
    out.backward(d_out)
    results = 4 * (4 * out.numel() + 8 * 32768)
    print((resident("VmHWM") - before - results) / 2**20)


def resident(which):
    """Bytes of this process."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(which + ":"))


def memory(_):
    child = subprocess.run([sys.executable, __file__, "--memory-alone"], check=True, capture_output=True, text=True)
    mib = float(child.stdout)
    yield "memory/documents, S 32768, over inputs and results", "≤ 512 MiB", f"{mib:.0f} MiB", mib <= 512


def operators(device, seconds):
    """What warm calls of the operator take, which pass PyTorch's dispatcher, beside an uncompiled call, which does not."""
    heads, length, dtype = (2, 16, torch.float32) if device == "cpu" else (4, 128, torch.bfloat16)
    q, k, v = (torch.randn(1, heads, length, 64, device=device, dtype=dtype) for _ in range(3))
    slope = torch.randn(heads, device=device)
    plain = (None, [], [], None, [], [], [], [1, 1], 0.125, None, 0.0)
    mods = ("score + s0[h] * (kv - q) as f32", [slope], [], "kv <= q + mn0", [], [3], *plain[6:])
    forward = torch.ops.foveate.forward.default
    timed = [
        lambda: foveate.flex_attention(q, k, v),
        lambda: forward(q, k, v, *plain, False),
        lambda: forward(q, k, v, *mods, False),
    ]
    uncompiled, *taken = microseconds(timed, seconds)
    for name, one in zip(("no mods", "a score and a mask"), taken):
        seen = f"{one / uncompiled:.2f} × ({one:.1f} / {uncompiled:.1f} µs)"
        yield f"operator/{name}, over an uncompiled call without", "≤ 2 ×", seen, one <= 2 * uncompiled


def cpu_groups():
    """What is measured on the CPU: part of the rows' names, and a function that yields them."""
    groups = [("overhead", overhead), ("rust/s512/s2048", beside_rust)]
    for s in (512, 2048):
        for d in (64, 128):
            for name in WORKLOADS:
                for learns in (False, True):
                    row = f"torch/s{s}/d{d}/{name}/{'with backward' if learns else 'forward'}"
                    groups.append((row, lambda t, a=(name, s, d, learns): beside_torch(*a, t)))
    return [*groups, ("torch/uncompiled flex", beside_eager_flex), ("memory", memory)]


def rows(groups, wanted, seconds):
    """Rows of the table, as they are measured: name, bar, value, whether it is reached."""
    for name, measure in groups:
        if any(part in name for part in wanted):
            yield from measure(seconds)


def plot(table):
    """Bars of how many times better than its bar each row is, on a logarithmic axis; `|` is the bar."""
    print(f"\n{'times better than the bar':68} {'1/4':>5}{'1/2':>8}{'1':>8}{'2':>8}{'4':>8}{'8':>8}")
    for name, bar, seen, _ in table:
        limit, value = (float(re.search(r"[\d.]+", text).group()) for text in (bar, seen))
        better = value / max(limit, 1e-9) if "≥" in bar else max(limit, 1e-9) / max(value, 1e-9)
        end = round(8 * min(max(math.log2(max(better, 1e-9)), -2.5), 3.5))
        line = ["#" if min(end, 0) <= at <= max(end, 0) else " " for at in range(-20, 29)]
        line[20] = "|"
        print(f"{name:68} {''.join(line).rstrip()}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--filter", default="", help="parts of names of rows, comma between: any")
    parser.add_argument("--seconds", type=float, default=3.0, help="of timing each side of a row at least")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of both sides (%(default)s)")
    parser.add_argument("--shared", action="store_true", help="the machine does other work: one thread's processor time")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the tensors (%(default)s)")
    parser.add_argument("--memory-alone", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--first-call", choices=("forward", "both"), help=argparse.SUPPRESS)
    parser.add_argument("--variants", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.shared:
        global CLOCK, TYPICAL
        CLOCK, TYPICAL = time.process_time, lambda taken: statistics.quantiles(taken, n=4)[0]
        args.threads = 1
    torch.set_num_threads(args.threads)
    if args.memory_alone:
        return memory_alone()
    if args.first_call:
        return torch_peers_cuda.first_call_alone(args.first_call == "both")
    if args.variants:
        return torch_peers_cuda.variants_alone()
    table = []
    groups = cpu_groups() if args.device == "cpu" else torch_peers_cuda.GROUPS
    groups = [*groups, ("operator", functools.partial(operators, args.device))]
    for row in rows(groups, args.filter.split(","), args.seconds):
        print(*row[:3], "" if row[3] else "MISSED", sep="  ", file=sys.stderr)
        table.append(row)
    print(f"\n| {'row':68} | {'bar':9} | {'seen':9} |  |\n| {'-' * 68} | {'-' * 9} | {'-' * 9} | - |")
    for name, bar, seen, reached in table:
        print(f"| {name:68} | {bar:9} | {seen:9} | {' ' if reached else '✗'} |")
    plot(table)
    load = os.getloadavg()[0]
    print(f"\ntorch {torch.__version__}, {args.threads} threads, load {load:.1f} at the end")
    sys.exit(0 if all(row[3] for row in table) else 1)


if __name__ == "__main__":
    main()
