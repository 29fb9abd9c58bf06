#!/usr/bin/env python3
"""Whether cost on the CPU follows the live tiles: S from 1k to 64k under a window, and heads.

    cargo build --release --bin foveate
    python3 benches/cpu_scaling.py

A window of 256 keys has live tiles in proportion to S, and every head costs the same. The table
has the time for each live pair and the memory of the process for each query; the exit code is 1
when the time for a pair, or the memory for a query, of a case is more than --factor times that of
a smaller one.
"""

import argparse
import sys
from pathlib import Path

from cpu_peers import ROOT, Foveate, fail


def workload(length: int, heads: int, both: bool):
    """Windowed attention over one batch entry."""
    return {
        "mask": "window",
        "width": 256,
        "score": "none",
        "reach": 1,
        "batch": 1,
        "heads": heads,
        "heads_kv": heads,
        "q_len": length,
        "len": length,
        "dim": 64,
        "dtype": "f32",
        "pass": "forward+backward" if both else "forward",
    }


def peak_bytes(foveate) -> int:
    """The most memory that the process has had."""
    status = Path(f"/proc/{foveate.child.pid}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    kib = [int(line.split()[1]) for line in lines if line.startswith("VmHWM")]
    return 1024 * kib[0] if kib else 0


def measure(program: Path, work, runs: int):
    """Seconds of the fastest of so many runs, and the memory, of a process of its own."""
    foveate = Foveate(program)
    foveate.ask({"prepare": {"work": work, "threads": 1}})
    best = min(foveate.ask("run") for _ in range(runs)) / 1e3
    memory = peak_bytes(foveate)
    foveate.child.stdin.close()
    foveate.child.wait()
    return best, memory


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--factor", type=float, default=1.35, help="what growth is still linear")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--max", type=int, default=65536, help="the longest S")
    parser.add_argument("--foveate", type=lambda text: Path(text).absolute(), default=ROOT / "target" / "release" / "foveate")
    args = parser.parse_args()
    if not args.foveate.exists():
        fail(f"{args.foveate} is missing; run: cargo build --release --bin foveate")
    lengths = [n for n in (1024 << i for i in range(7)) if n <= args.max]
    series = [
        ("forward over S", [workload(n, 2, False) for n in lengths]),
        ("forward+backward over S", [workload(n, 2, True) for n in lengths]),
        ("forward over heads", [workload(4096, h, False) for h in (1, 2, 4, 8, 16)]),
    ]
    faults = []
    print(
        f"{'series':<26} {'S':>6} {'heads':>5} {'ms':>9} {'ns/pair':>8} {'MB':>7} {'kB/query':>9}"
    )
    for name, works in series:
        found = []
        for work in works:
            seconds, memory = measure(args.foveate, work, args.runs)
            length, heads = work["len"], work["heads"]
            pairs = heads * (256 * length - 256 * 255 // 2)
            queries = heads * length
            found.append((seconds / pairs, memory / queries))
            print(
                f"{name:<26} {length:>6} {heads:>5} {seconds * 1e3:>9.2f} "
                f"{seconds / pairs * 1e9:>8.3f} {memory / 1e6:>7.1f} {memory / queries / 1e3:>9.2f}",
                flush=True,
            )
        for what, costs in zip(("time for a pair", "memory for a query"), zip(*found)):
            growth = max(b / min(costs[: i + 1]) for i, b in enumerate(costs[1:]))
            if growth > args.factor:
                faults.append(f"{name}: {what} grows {growth:.2f} times; {args.factor} is linear")
    for fault in faults:
        print(f"cpu_scaling: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
