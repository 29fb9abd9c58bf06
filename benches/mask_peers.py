#!/usr/bin/env python3
"""Compares `foveate bench mask` with PyTorch's create_block_mask on the CPU.

    cargo build --release --bin foveate
    python3 benches/mask_peers.py

Both build the same masks in tiles of 128 by 128 on one thread; their numbers of full and partial
tiles are compared, and a difference is an error. PyTorch evaluates every point, so it is asked up
to --len only; the table shows Foveate beyond. The peer is installed like that of `cpu_peers.py`.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from cpu_peers import ROOT, fail, install

LENGTHS = (8192, 16384, 32768, 1 << 20, 4 << 20)
# The least ratio at 32768, and the most seconds at 4194304.
RATIO, SECONDS = 100.0, 2.0


def peer(case, runs: int):
    """Milliseconds of each build, and numbers of full and partial tiles."""
    from torch.nn.attention.flex_attention import create_block_mask

    from workloads import documents_of, mask_of

    mask, times = mask_of(case, documents_of(case)), []
    for _ in range(runs):
        began = time.perf_counter()
        block = create_block_mask(mask, None, None, case["len"], case["len"], device="cpu")
        times.append((time.perf_counter() - began) * 1e3)
    return times, int(block.full_kv_num_blocks.sum()), int(block.kv_num_blocks.sum())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--filter", default="", help="a part of the names of masks")
    parser.add_argument("--len", type=int, default=32768, help="what PyTorch builds at most")
    parser.add_argument("--runs", type=int, default=3, help="builds of each by PyTorch")
    parser.add_argument("--venv", type=Path, default=ROOT / "target" / "cpu_peers" / "venv")
    parser.add_argument("--foveate", type=lambda text: Path(text).absolute(), default=ROOT / "target" / "release" / "foveate")
    args = parser.parse_args()
    if not args.foveate.exists():
        fail(f"{args.foveate} is missing; run: cargo build --release --bin foveate")
    install(args.venv)
    import torch

    torch.set_num_threads(1)
    print(
        f"{'mask':<28} {'ms':>9} {'min':>9} {'kB':>8} {'PyTorch ms':>11} {'min':>9} {'ratio':>8} "
        f"{'bar':>8} {'load':>5}"
    )
    faults = 0
    lengths = ",".join(str(n) for n in LENGTHS)
    command = [args.foveate, "bench", "mask", "--json", "--len", lengths, "--filter", args.filter]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        cases = [json.loads(line) for line in child.stdout]
    if child.returncode != 0:
        return child.returncode
    for case in cases:
        text = f"{case['case']:<28} {case['ms']:>9.3f} {case['min_ms']:>9.3f} "
        text += f"{case['bytes'] / 1e3:>8.1f} "
        bar = ""
        if case["len"] <= args.len:
            times, full, partial = peer(case, args.runs)
            median, ours = sorted(times)[len(times) // 2], case["ms"]
            if case["len"] == 32768:
                bar = f">={RATIO:.0f}x" + (" " if median / ours >= RATIO else "!")
            text += f"{median:>11.1f} {min(times):>9.1f} {median / ours:>7.0f}x "
            if (full, partial) != (case["full_tiles"], case["partial_tiles"]):
                found = f"{case['full_tiles']} full and {case['partial_tiles']} partial"
                print(
                    f"mask_peers: {case['case']}: foveate has {found} tiles, PyTorch {full} "
                    f"and {partial}",
                    file=sys.stderr,
                )
                faults += 1
        else:
            if case["len"] == 4 << 20:
                bar = f"<={SECONDS:.0f} s" + (" " if case["ms"] <= 1e3 * SECONDS else "!")
            text += f"{'-':>11} {'':>9} {'':>8} "
        print(f"{text}{bar:>8} {os.getloadavg()[0]:>5.1f}", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
