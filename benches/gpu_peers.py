#!/usr/bin/env python3
"""Times other implementations of attention on the cases of `foveate bench gpu`, on the same data.

    foveate bench gpu --list --json > cases.jsonl
    python3 benches/gpu_peers.py cases.jsonl > peers.jsonl
    foveate bench gpu --peers peers.jsonl

Peers:

    foveate          Foveate itself, called from Python on these tensors
    cudnn, flash2    scaled_dot_product_attention restricted to one backend
    flex             flex_attention under torch.compile
    flex-autotune    the same with max-autotune-no-cudagraphs
    flex-flash       the same on FlashAttention-4 instead of Triton (kernel option BACKEND=FLASH)
    fa4              FlashAttention-4 called directly, documents as packed sequences
    cudnn-flex       cuDNN Frontend's flex_attention, masks as intervals of keys

A peer that cannot run a case, or is not installed, is reported with its reason, not left out. One
JSON object a line: case, peer, ms (median), min_ms, runs, ahead (whether the host was), tflops (by
live pairs), sample (a few elements of the result, to compare with Foveate's), or `declined`. Every
peer gets its operands in the order of axes that it documents; making them so is not timed. Forwards
need no gradient, so a peer may leave out lse, which Foveate writes.

Compiling FlexAttention and FlashAttention-4 takes seconds a case. `--prepare N`
first lets N processes run each case once, so that what PyTorch and FlashAttention-4 compile is in
their caches on disk, and times afterwards, alone.

Needs PyTorch 2.6 or newer with a CUDA device; flex-flash PyTorch 2.11; flex-flash and fa4 the
package flash-attn-4, cudnn-flex the package nvidia-cudnn-frontend.
"""

import argparse
import functools
import importlib
import json
import os
import subprocess
import sys
import time

# Read when the package is imported.
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")

try:
    import torch

    from workloads import documents_of, intervals_of, mask_of, mix, operands, random, score_of
except ImportError as error:
    torch, missing = None, str(error)

SAMPLES = 16
# Of a second, at the fastest clock of today's cards or above.
CYCLES = 2.1e9
# Runs that are timed without a pause.
AT_ONCE = 5
# Times that the device is made to wait longer where the host was not ahead.
TRIES = 6


class Declined(Exception):
    """Why a peer does not run a case."""


def median_ms(run, seconds: float):
    """Median and minimum of single runs between device events, after a warm-up; how many there were,
    and whether the host was ahead of all of them.

    Runs follow one another without a pause, and the host queues them while the device waits or is
    at the one before, which is not timed: the host's part is not measured, as in a training step.
    """
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    queued, took = [], []
    for _ in range(3):
        began = time.monotonic()
        run()
        queued.append(time.monotonic() - began)
        torch.cuda.synchronize()
        took.append(time.monotonic() - began)
    queued, took = sorted(queued)[1], sorted(took)[1]
    wait = 4 * queued + AT_ONCE * max(0.0, 2 * queued - took)
    times, tries, until = [], 0, time.monotonic() + seconds
    while len(times) < 5 or (time.monotonic() < until and len(times) < 200):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(AT_ONCE + 1)]
        torch.cuda._sleep(int(CYCLES * wait))
        run()
        for event in events[:-1]:
            event.record()
            run()
        events[-1].record()
        ahead = not events[0].query()
        events[-1].synchronize()
        if not ahead and tries < TRIES:
            wait, tries = 1.5 * wait, tries + 1
            continue
        times += [begin.elapsed_time(end) for begin, end in zip(events, events[1:])]
    times.sort()
    return times[len(times) // 2], times[0], len(times), tries < TRIES


def part_of(package: str, module: str, name: str):
    """A function of a package that need not be installed."""
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise Declined(f"{package} cannot be imported: {error}") from error
    except AttributeError as error:
        raise Declined(f"{package} is here without {module}.{name}") from error


def no_score(case, peer: str):
    if case["score"] != "none":
        raise Declined(f"{peer} has no such score")


def sdpa(backend: str, case, operands, bias):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if case["mask"] not in ("full", "causal") or case["score"] != "none":
        raise Declined("scaled_dot_product_attention has no such mask or score")
    backend, causal = getattr(SDPBackend, backend), case["mask"] == "causal"
    grouped = case["heads"] != case["heads_kv"]

    def run(q, k, v):
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=grouped
            )

    return run


@functools.cache
def compiled(mode: str):
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.cache_size_limit = 1000
    return torch.compile(flex_attention, dynamic=False, mode=mode)


def flex(mode: str, case, operands, bias, options=None):
    from torch.nn.attention.flex_attention import create_block_mask

    mask = mask_of(case, documents_of(case, "cuda"))
    lengths = case["q_len"], case["len"]
    block = create_block_mask(mask, None, None, *lengths) if mask else None
    run = compiled(mode)
    settings = {
        "score_mod": score_of(case, bias),
        "block_mask": block,
        "enable_gqa": case["heads"] != case["heads_kv"],
    }
    if options:
        settings["kernel_options"] = options
    return lambda q, k, v: run(q, k, v, **settings)


def foveate(case, operands, bias):
    attend = part_of("foveate", "foveate", "flex_attention")
    create = part_of("foveate", "foveate", "create_block_mask")
    mask = mask_of(case, documents_of(case, "cuda"))
    settings = {
        "score_mod": score_of(case, bias),
        "block_mask": create(mask, None, None, case["q_len"], case["len"]) if mask else None,
        "enable_gqa": case["heads"] != case["heads_kv"],
    }
    return lambda q, k, v: attend(q, k, v, **settings)


def flex_flash(case, operands, bias):
    part_of("flash-attn-4", "flash_attn.cute.interface", "flash_attn_func")
    return flex("default", case, operands, bias, {"BACKEND": "FLASH"})


def fa4(case, operands, bias):
    mask, settings = case["mask"], {}
    if case["score"] == "softcap":
        settings["softcap"] = 30.0
    else:
        no_score(case, "FlashAttention-4 without a mod in CuTe DSL")
    if mask in ("prefix", "neighbourhood", "blocks"):
        raise Declined("FlashAttention-4 without a mod in CuTe DSL has no such mask")
    if mask != "full" and case["q_len"] != case["len"]:
        # It aligns the last query with the last key, these cases the first with the first.
        raise Declined("FlashAttention-4 aligns masks of other lengths differently")
    if mask in ("causal", "documents", "ragged"):
        settings["causal"] = True
    if mask == "window":
        settings["window_size"] = (case["width"] - 1, 0)
    if mask in ("documents", "ragged"):
        return fa4_packed(case, settings)
    attend = part_of("flash-attn-4", "flash_attn.cute.interface", "flash_attn_func")
    return lambda q, k, v: result_of(attend(q, k, v, **settings))


def fa4_packed(case, settings):
    """Documents as sequences, one after another, those of each batch entry after the last one's."""
    attend = part_of("flash-attn-4", "flash_attn.cute.interface", "flash_attn_varlen_func")
    documents = documents_of(case)
    lengths = torch.bincount(documents).repeat(case["batch"])
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to("cuda", torch.int32)
    settings |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}

    def run(q, k, v):
        packed = (x.flatten(0, 1) for x in (q, k, v))
        return result_of(attend(*packed, **settings)).unflatten(0, q.shape[:2])

    return run


def result_of(found):
    """The output of a function that may give the log-sum-exp after it."""
    return found[0] if isinstance(found, tuple) else found


def cudnn_flex(case, operands, bias):
    no_score(case, "cuDNN's flex_attention")
    create = part_of("nvidia-cudnn-frontend", "cudnn.flex_attention", "create_mask_plan")
    attend = part_of("nvidia-cudnn-frontend", "cudnn.flex_attention", "flex_attn_func")
    intervals = intervals_of(case, "cuda").repeat(1, case["batch"])[None].contiguous()
    plan = create(intervals, *operands)
    return lambda q, k, v: attend(q, k, v, mask_plan=plan)


# By name: the order of axes of its operands, and what makes the function of q, k, v to be timed
# from a case, its operands and the table of its bias.
PEERS = {
    "foveate": ("bhsd", foveate),
    "cudnn": ("bhsd", functools.partial(sdpa, "CUDNN_ATTENTION")),
    "flash2": ("bhsd", functools.partial(sdpa, "FLASH_ATTENTION")),
    "flex": ("bhsd", functools.partial(flex, "default")),
    "flex-autotune": ("bhsd", functools.partial(flex, "max-autotune-no-cudagraphs")),
    "flex-flash": ("bhsd", flex_flash),
    "fa4": ("bshd", fa4),
    "cudnn-flex": ("bshd", cudnn_flex),
}


def measure(peer: str, case, seconds: float):
    if case.get("storage", "packed") != "packed":
        raise ValueError("operands that are not contiguous")
    backward = case["pass"] == "backward"
    order, make = PEERS[peer]
    laid_out = (lambda x: x) if order == "bhsd" else (lambda x: x.transpose(1, 2).contiguous())
    q, k, v, d_out = map(laid_out, operands(case, "cuda"))
    bias = None
    if case["score"] == "relative":
        bias = random(5, (case["heads"], 2 * case["reach"] + 1), torch.float32, "cuda")
    learned = [q, k, v] + ([bias] if bias is not None else [])
    if backward:
        for x in learned:
            x.requires_grad_()
    run = make(case, (q, k, v), bias)
    out = run(q, k, v)
    if not backward:
        result, timed = out, lambda: run(q, k, v)
    else:
        result = torch.autograd.grad(out, q, d_out, retain_graph=True)[0]
        timed = lambda: torch.autograd.grad(out, learned, d_out, retain_graph=True)  # noqa: E731
    with torch.set_grad_enabled(backward):
        median, least, runs, ahead = median_ms(timed, seconds)
    if order == "bshd":
        result = result.transpose(1, 2)
    at = mix(7, torch.arange(SAMPLES, device="cuda")) % result.numel()
    sample = result.detach().flatten()[at].float().tolist()
    return {
        "ms": median,
        "min_ms": least,
        "runs": runs,
        "ahead": ahead,
        "tflops": case["flops"] / median / 1e9,
        "sample": sample,
    }


def prepare(cases, peers, workers: int):
    """Runs what is compiled, each case once, in processes that share caches on disk."""
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


def peers_of(text: str):
    """The peers of a list with commas."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in PEERS]
    if unknown or not names:
        wrong = f"no peer {unknown[0]!r}" if unknown else "no peer"
        raise argparse.ArgumentTypeError(f"{wrong}; there are {', '.join(PEERS)}")
    return names


def arguments(args=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", type=argparse.FileType("r"), help="JSON lines, - for stdin")
    parser.add_argument(
        "--peers", type=peers_of, default=list(PEERS), help="with commas between; all if left out"
    )
    parser.add_argument("--prepare", type=int, default=0, metavar="N", help="compile with N first")
    parser.add_argument("--seconds", type=float, default=0.3, help="timing of one case and peer")
    return parser.parse_args(args)


def main() -> int:
    args = arguments()
    # Libraries tell on stdout what they compile; it belongs to stderr.
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if torch is None:
        print(f"gpu_peers: PyTorch is not installed: {missing}", file=sys.stderr)
        return 1
    if not torch.cuda.is_available():
        print("gpu_peers: PyTorch sees no CUDA device", file=sys.stderr)
        return 1
    cases = [json.loads(line) for line in args.cases if line.strip()]
    compiling = [peer for peer in args.peers if peer.startswith("flex") or peer == "fa4"]
    if args.prepare and compiling:
        prepare(cases, compiling, args.prepare)
    began = time.monotonic()
    for done, case in enumerate(cases):
        for peer in args.peers:
            line = {"case": case["case"], "peer": peer}
            try:
                line |= measure(peer, case, args.seconds)
            except Exception as error:  # a peer's refusal is a result
                line["declined"] = (str(error).strip().splitlines() or [repr(error)])[0][:200]
            print(json.dumps(line), file=report, flush=True)
            torch.cuda.empty_cache()
        spent = time.monotonic() - began
        left = spent / (done + 1) * (len(cases) - done - 1)
        print(f"{done + 1}/{len(cases)} cases, {left:.0f} s left", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
