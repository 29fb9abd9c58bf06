#!/usr/bin/env python3
"""Compares `foveate bench cpu` with PyTorch's attention on the CPU, case by case in one run.

    cargo build --release --bin foveate
    python3 benches/cpu_peers.py                      # everything: hours
    python3 benches/cpu_peers.py --quick --filter s2048/d64/f32 --threads 2

The peer is installed, pinned, into a virtual environment of its own. Both run in turn on the same
numbers and threads; medians are compared, minima shown, and both are held to f64. Results are
kept, so that a run goes on where the last one stopped (--again starts over); --draw shows them
and runs nothing. The exit code is 1 when a number is wrong.

Needs Python 3.10 with venv, and for the first run pip's registry. flex_attention needs a C++
compiler. Measure on a machine that does nothing else: the load is in the table.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "2.11.0"
# A larger error than this, relative to the largest number, is a wrong result.
TOLERANCE = {"f32": 1e-4, "f16": 1e-2, "bf16": 5e-2}
# Threads of the other side spin after their work, PyTorch's for up to 10 ms, and would take a core
# from a short call.
REST_SECONDS = 0.02
# The first call after a rest is up to twice as slow as those that follow it, on either side. One
# that takes less than this is therefore made twice in a turn, and the second is timed.
SHORT_MS = 50.0


def fail(message: str):
    """Ends with one line."""
    print(f"cpu_peers: {message}", file=sys.stderr)
    sys.exit(1)


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--filter", default="", help="parts of names of cases, comma between: any")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, comma between")
    parser.add_argument("--quick", action="store_true", help="fewer runs, and 512 and 2048 only")
    parser.add_argument("--seconds", type=float, default=2.0, help="of timing a case at least")
    parser.add_argument(
        "--budget", type=float, default=0, help="stop starting cases after so many s"
    )
    parser.add_argument("--again", action="store_true", help="run cases that have results, too")
    parser.add_argument("--draw", action="store_true", help="show the results and run nothing")
    parser.add_argument("--prepare", action="store_true", help="compile the peers and time nothing")
    folder = ROOT / "target" / "cpu_peers"
    parser.add_argument("--venv", type=Path, default=folder / "venv", help="%(default)s")
    parser.add_argument("--results", type=Path, default=folder / "results.jsonl")
    parser.add_argument("--svg", type=Path, default=folder / "results.svg")
    parser.add_argument("--foveate", type=lambda text: Path(text).absolute(), default=ROOT / "target" / "release" / "foveate")
    return parser.parse_args()


def install(venv: Path):
    """Goes on in the virtual environment that has the peer, made when it is not there."""
    python = venv / "bin" / "python"
    wanted = f"import torch; assert torch.__version__.split('+')[0] == '{TORCH}'"
    there = python.exists() and subprocess.run([python, "-c", wanted], capture_output=True)
    if not there or there.returncode != 0:
        print(f"installing PyTorch {TORCH} into {venv}", file=sys.stderr)
        for command in (
            [sys.executable, "-m", "venv", venv],
            [python, "-m", "pip", "install", "--quiet", f"torch=={TORCH}", "numpy"],
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                said = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
                fail(f"PyTorch {TORCH} cannot be installed into {venv}: {said[-1]}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(venv / "inductor"))
    if Path(sys.prefix).resolve() != venv.resolve():
        os.execv(python, [str(python), *sys.argv])


class Foveate:
    """`foveate bench cpu --serve`, asked over a pipe."""

    def __init__(self, program: Path, threads: int):
        self.program = program
        self.child = subprocess.Popen(
            [program, "bench", "cpu", "--serve", "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, request):
        """The answer to a request; ends the run when there is none."""
        print(json.dumps(request), file=self.child.stdin, flush=True)
        line = self.child.stdout.readline()
        if not line:
            fail(f"{self.program} ended in the middle of {request}")
        answer = json.loads(line)
        if "error" in answer:
            fail(f"foveate: {answer['error']}")
        return next(iter(answer.values()))

    def run(self) -> float:
        """Milliseconds of a call that follows another."""
        return self.ask({"run": {"short_ms": SHORT_MS}})

    def results(self, case):
        """What the last run wrote, as tensors."""
        import numpy
        import torch

        with tempfile.NamedTemporaryFile() as file:
            written = self.ask({"write": {"file": file.name}})
            flat = torch.from_numpy(numpy.fromfile(file.name, dtype="<f4"))
        parts = flat.split([length for _, length in written])
        of_q = (case["batch"], case["heads"], -1, case["dim"])
        of_kv = (case["batch"], case["heads_kv"], -1, case["dim"])
        named = zip(written, parts)
        return [p.view(of_q if name in ("out", "dq") else of_kv) for (name, _), p in named]


def spread(times):
    times = sorted(times)
    return {"ms": times[len(times) // 2], "min_ms": times[0], "runs": len(times)}


def peer_run(peer) -> float:
    """Milliseconds of a call that follows another."""
    taken = peer.timed()
    return peer.timed() if taken < SHORT_MS else taken


def measure(foveate, case, threads: int, reference, args):
    """One line of results: ours and each peer's, run in turn."""
    import torch

    from cpu_attention import Peer, error, peers_of

    torch.set_num_threads(threads)
    foveate.ask({"prepare": {"work": case}})
    ours, peers, declined, times = "foveate", [], {}, {}
    for name in peers_of(case):
        try:
            peer = Peer(name, case, threads)
            times[name] = {"error": error(case, peer.run(), reference)}
            peers.append(peer)
        except Exception as refusal:  # a peer's refusal is a result
            lines = str(refusal).strip().splitlines() or [repr(refusal)]
            declined[name] = lines[0][:200]
    if args.prepare:
        return None
    foveate.run()
    times[ours] = {"error": error(case, foveate.results(case), reference)}
    taken = {name: [] for name in times}
    machine = {"gemm": [], "read": []}
    bytes_read = 2 * case["batch"] * case["heads_kv"] * case["len"] * case["dim"]
    bytes_read *= 4 if case["dtype"] == "f32" else 2
    began, least = time.monotonic(), 2 if args.quick else 5
    while len(taken[ours]) < least or time.monotonic() < began + args.seconds:
        taken[ours].append(foveate.run())
        time.sleep(REST_SECONDS)
        for peer in peers:
            taken[peer.name].append(peer_run(peer))
            time.sleep(REST_SECONDS)
        if case["mask"] == "full" and case["dtype"] == "f32" and case["q_len"] > 1:
            machine["gemm"].append(foveate.ask("gemm"))
        if case["q_len"] == 1:
            machine["read"].append(bytes_read / foveate.ask({"read": {"bytes": bytes_read}}) / 1e6)
        if len(taken[ours]) >= 50:
            break
    for name, found in taken.items():
        times[name] |= spread(found)
    line = {"case": case["case"], "threads": threads, "work": case, "declined": declined}
    line |= {"foveate": times.pop(ours), "peers": times, "load": os.getloadavg()[0]}
    line |= {
        f"{name}_rate": sorted(found)[len(found) // 2] for name, found in machine.items() if found
    }
    if case["q_len"] == 1:
        line["bytes"] = bytes_read
    return line


def wrong(line):
    """What of a line's numbers is wrong, in words; nothing when all is well."""
    most = TOLERANCE[line["work"]["dtype"]]
    both = {"foveate": line["foveate"], **line["peers"]}
    for name, found in both.items():
        if not found["error"] <= most:
            yield f"{line['case']}: {name} is {found['error']:.1e} from f64; up to {most:.0e} is right"


def main() -> int:
    args = arguments()
    sys.path.insert(0, str(ROOT / "benches"))
    import cpu_report

    done = cpu_report.read(args.results)
    if args.draw:
        if not done:
            fail(f"{args.results} has no results; run without --draw first")
        cpu_report.show(done, args.svg)
        return 0
    if not args.foveate.exists():
        fail(f"{args.foveate} is missing; run: cargo build --release --bin foveate")
    install(args.venv)
    listed = subprocess.run(
        [args.foveate, "bench", "cpu", "--list", "--json"], capture_output=True, text=True
    )
    if listed.returncode != 0:
        fail(f"{args.foveate} lists no cases: {listed.stderr.strip()}")
    cases = [json.loads(line) for line in listed.stdout.splitlines()]
    parts = args.filter.split(",")
    cases = [c for c in cases if any(part in c["case"] for part in parts)]
    if args.quick:
        cases = [c for c in cases if c["len"] <= 2048 or c["q_len"] == 1]
    counts = [int(n) for n in args.threads.split(",")]
    has = set() if args.again else {(line["case"], line["threads"]) for line in done}
    todo = [(c, n) for c in cases for n in counts if (c["case"], n) not in has]
    if not cases:
        fail(f"no case has {args.filter!r} in its name")
    return compare(todo, args)


def compare(todo, args) -> int:
    """Runs cases, adds them to the results, prints each, then shows all results."""
    import torch

    import cpu_attention
    import cpu_report

    if not cpu_attention.has_compiler():
        print("cpu_peers: no C++ compiler, so flex_attention is left out", file=sys.stderr)
    counts = sorted({threads for _, threads in todo})
    foveates = {threads: Foveate(args.foveate, threads) for threads in counts}
    began, faults = time.monotonic(), []
    args.results.parent.mkdir(parents=True, exist_ok=True)
    of_case, reference = None, None
    print(cpu_report.head())
    for i, (case, threads) in enumerate(todo):
        if args.budget and time.monotonic() - began > args.budget:
            print(f"cpu_peers: {len(todo) - i} cases are left; run again", file=sys.stderr)
            break
        data = {key: case[key] for key in case if key not in ("case", "pass", "flops")}
        if data != of_case:
            torch.set_num_threads(os.cpu_count() or 1)
            of_case, reference = data, cpu_attention.exact(case)
        line = measure(foveates[threads], case, threads, reference, args)
        if line is None:
            continue
        with args.results.open("a") as file:
            print(json.dumps(line), file=file)
        print(cpu_report.row(line), flush=True)
        faults += wrong(line)
    for foveate in foveates.values():
        foveate.child.stdin.close()
        foveate.child.wait()
    cpu_report.show(cpu_report.read(args.results), args.svg, table=False)
    for fault in faults:
        print(f"cpu_peers: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
