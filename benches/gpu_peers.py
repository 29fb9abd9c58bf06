#!/usr/bin/env python3
"""Times PyTorch's attention on the cases of `foveate bench gpu`, on the same data.

    foveate bench gpu --list --json > cases.jsonl
    python3 benches/gpu_peers.py cases.jsonl > peers.jsonl
    foveate bench gpu --peers peers.jsonl

Peers: `cudnn` and `flash2` (scaled_dot_product_attention restricted to one backend; full and
causal without a score only), `flex` (flex_attention under torch.compile) and `flex-autotune`
(the same with max-autotune-no-cudagraphs). A peer that cannot run a case is reported with its
reason, not left out. One JSON object a line: case, peer, ms (median), min_ms, runs, tflops (by
live pairs), sample (a few elements of the result, to compare with Foveate's), or `declined`.

Compiling FlexAttention takes seconds a case. `--prepare N` first lets N processes compile all of
them into PyTorch's cache, and times afterwards, alone.

Needs PyTorch 2.6 or newer with a CUDA device.
"""

import argparse
import functools
import json
import subprocess
import sys
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from workloads import documents_of, mask_of, operands, random, score_of

SAMPLES = 16


def median_ms(run, seconds: float):
    """Median and minimum of single runs between device events, after a warm-up."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    times, until = [], time.monotonic() + seconds
    while len(times) < 5 or (time.monotonic() < until and len(times) < 200):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    times.sort()
    return times[len(times) // 2], times[0], len(times)


@functools.cache
def compiled(mode):
    torch._dynamo.config.cache_size_limit = 1000
    return torch.compile(flex_attention, dynamic=False, mode=mode)


def attention(peer: str, case, q, k, v, bias):
    """A function of q, k, v that runs the peer."""
    grouped = q.shape[1] != k.shape[1]
    if peer in ("cudnn", "flash2"):
        if case["mask"] not in ("full", "causal") or case["score"] != "none":
            raise NotImplementedError("scaled_dot_product_attention has no such mask or score")
        backend = SDPBackend.CUDNN_ATTENTION if peer == "cudnn" else SDPBackend.FLASH_ATTENTION
        causal = case["mask"] == "causal"

        def sdpa(q, k, v):
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=causal, enable_gqa=grouped
                )

        return sdpa
    length = case["len"]
    mask = mask_of(case, documents_of(case, "cuda"))
    block = create_block_mask(mask, None, None, length, length) if mask else None
    score = score_of(case, bias)
    flex = compiled("max-autotune-no-cudagraphs" if peer == "flex-autotune" else "default")
    return lambda q, k, v: flex(q, k, v, score_mod=score, block_mask=block, enable_gqa=grouped)


def measure(peer: str, case, seconds: float):
    backward = case["pass"] == "backward"
    q, k, v, d_out = operands(case, "cuda")
    bias = None
    if case["score"] == "relative":
        bias = random(5, (case["heads"], 2 * case["reach"] + 1), torch.float32, "cuda")
    learned = [q, k, v] + ([bias] if bias is not None else [])
    if backward:
        for x in learned:
            x.requires_grad_()
    run = attention(peer, case, q, k, v, bias)
    out = run(q, k, v)
    if not backward:
        result, timed = out, lambda: run(q, k, v)
    else:
        result = torch.autograd.grad(out, q, d_out, retain_graph=True)[0]
        timed = lambda: torch.autograd.grad(out, learned, d_out, retain_graph=True)  # noqa: E731
    with torch.set_grad_enabled(backward):
        median, least, runs = median_ms(timed, seconds)
    step = max(1, result.numel() // SAMPLES)
    sample = result.detach().flatten()[::step][:SAMPLES].float().tolist()
    return {
        "ms": median,
        "min_ms": least,
        "runs": runs,
        "tflops": case["flops"] / median / 1e9,
        "sample": sample,
    }


def prepare(cases, peers, workers: int):
    """Runs what is compiled, each case once, in processes that share PyTorch's cache."""
    processes = []
    for i in range(workers):
        share = "".join(json.dumps(case) + "\n" for case in cases[i::workers])
        command = [sys.executable, __file__, "-", "--peers", ",".join(peers), "--seconds", "0"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        process.stdin.write(share.encode())
        process.stdin.close()
        processes.append(process)
    for done, process in enumerate(processes):
        end = "done" if process.wait() == 0 else f"ended with {process.returncode}"
        print(f"compiling: process {done + 1} of {workers} {end}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", type=argparse.FileType("r"), help="JSON lines, - for stdin")
    parser.add_argument("--peers", default="cudnn,flash2,flex,flex-autotune")
    parser.add_argument("--prepare", type=int, default=0, metavar="N", help="compile with N first")
    parser.add_argument("--seconds", type=float, default=0.3, help="timing of one case and peer")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_peers: PyTorch sees no CUDA device", file=sys.stderr)
        return 1
    cases = [json.loads(line) for line in args.cases if line.strip()]
    peers = args.peers.split(",")
    compiling = [peer for peer in peers if peer.startswith("flex")]
    if args.prepare and compiling:
        prepare(cases, compiling, args.prepare)
    began = time.monotonic()
    for done, case in enumerate(cases):
        for peer in peers:
            line = {"case": case["case"], "peer": peer}
            try:
                line |= measure(peer, case, args.seconds)
            except Exception as error:  # a peer's refusal is a result
                line["declined"] = str(error).strip().splitlines()[0][:200] or repr(error)
            print(json.dumps(line), flush=True)
            torch.cuda.empty_cache()
        spent = time.monotonic() - began
        left = spent / (done + 1) * (len(cases) - done - 1)
        print(f"{done + 1}/{len(cases)} cases, {left:.0f} s left", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
