#!/usr/bin/env python3
"""Compares `foveate train` with a plain training loop in PyTorch, on the CPU, in one run.

    cargo build --release --bin foveate
    python3 benches/train_peers.py                       # both sizes, one and two threads
    python3 benches/train_peers.py --sizes 1.6M --threads 1 --rounds 3

Both start from the same weights and take the same steps on the same tokens, in f32: slices of
`foveate train --resume` alternate with slices of the loop, eager and compiled
(`benches/train_llama.py`). Medians of step times are compared, minima shown. The losses of all
steps are compared, too; a difference is exit code 1, since then the work was not the same.

The last columns are the rate of the products with the weights of the layers, in Foveate's fastest
step and alone, each product at its fastest, beside the fastest large product, of `gemm` or PyTorch,
in the same run; the share is that of the products alone, which is seen on a machine with other work,
too. PyTorch is installed as by `cpu_peers.py`. The machine should do nothing else: the load is in
the table.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from cpu_peers import REST_SECONDS, ROOT, Foveate, fail, install

SIZES = {
    "1.6M": {"hidden": 192, "intermediate": 512, "layers": 4, "heads": 6, "kv_heads": 2},
    "15M": {"hidden": 384, "intermediate": 960, "layers": 10, "heads": 6, "kv_heads": 2},
}
SHARED = {"vocab": 257, "rows": 8, "len": 512, "lr": 1e-3}
# Losses of the first steps agree to rounding; training then amplifies any difference.
FIRST_STEPS, FIRST_TOLERANCE, TOLERANCE = 5, 1e-5, 1e-3
GEMM_SIZE = 2048
# One takes 1 to 70 ms: among so many of all rounds, one is not disturbed.
PRODUCT_RUNS = 20

RECIPE = """
[run]
dir = "{run}"
seed = 1
[model]
hidden_size = {hidden}
intermediate_size = {intermediate}
num_hidden_layers = {layers}
num_attention_heads = {heads}
num_key_value_heads = {kv_heads}
tie_word_embeddings = true
[attention]
mask = "causal"
[data]
root = "{folder}"
files = ["document.txt"]
len = {len}
shuffle = false
held_out = 0.0
[train]
steps = 1
batch_rows = {rows}
save_every = 0
eval_every = 0
keep = 1
[optimizer]
lr = {lr}
[schedule]
kind = "constant"
warmup_steps = 0
"""


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default=",".join(SIZES), help="comma between: %(default)s")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, comma between")
    parser.add_argument("--rounds", type=int, default=6, help="slices of each side")
    parser.add_argument("--steps", type=int, default=0, help="steps of a slice; 12 or 4")
    parser.add_argument("--eager-only", action="store_true", help="leave the compiled loop out")
    parser.add_argument("--venv", type=Path, default=ROOT / "target" / "cpu_peers" / "venv")
    parser.add_argument("--work", type=Path, default=ROOT / "target" / "train_peers")
    parser.add_argument("--foveate", type=lambda text: Path(text).absolute(), default=ROOT / "target" / "release" / "foveate")
    return parser.parse_args()


def document(file: Path, bytes_wanted: int):
    """Writes one long document: the sources and manuals of this repository, over and over."""
    parts = [*sorted(ROOT.glob("crates/**/*.rs")), *sorted(ROOT.glob("docs/**/*.md"))]
    text = b"\n".join(part.read_bytes() for part in parts)
    file.write_bytes((text * (bytes_wanted // len(text) + 1))[:bytes_wanted])


class Trainer:
    """Runs of `foveate train`, each going on where the last one stopped."""

    def __init__(self, program: Path, recipe: Path, run: Path, threads: int):
        self.program, self.recipe, self.run, self.done = program, recipe, run, 0
        self.environment = os.environ | {"RAYON_NUM_THREADS": str(threads)}

    def start(self, *options):
        command = [self.program, "train", self.recipe, *options]
        ran = subprocess.run(command, capture_output=True, text=True, env=self.environment)
        if ran.returncode != 0:
            fail(f"foveate train: {ran.stderr.strip()}")

    def first_weights(self) -> Path:
        """The weights that a run starts from: those after a step that changes nothing."""
        self.start("--start-over", "--set", "optimizer.lr=0.0")
        [weights] = self.run.glob("checkpoints/*/model.safetensors")
        kept = self.run.parent / "first.safetensors"
        kept.write_bytes(weights.read_bytes())
        return kept

    def steps(self, count: int):
        """The records of the next `count` steps."""
        self.done += count
        how = "--start-over" if self.done == count else "--resume"
        self.start(how, "--set", f"train.steps={self.done}")
        records = map(json.loads, (self.run / "metrics.jsonl").read_text().splitlines())
        return [r for r in records if r["kind"] == "step"][-count:]


class Loop:
    """The loop in PyTorch, asked over a pipe."""

    def __init__(self, name: str, options):
        self.name = name
        command = [sys.executable, ROOT / "benches" / "train_llama.py", *map(str, options)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.child = subprocess.Popen(command, text=True, **pipes)

    def ask(self, request):
        print(json.dumps(request), file=self.child.stdin, flush=True)
        line = self.child.stdout.readline()
        if not line:
            fail(f"the loop {self.name} ended in the middle of {request}")
        return json.loads(line)

    def end(self):
        self.child.stdin.close()
        self.child.wait()


def products(sizes):
    """Inputs and outputs of the products of a layer."""
    hidden, wide = sizes["hidden"], sizes["intermediate"]
    qkv = hidden + 2 * sizes["kv_heads"] * (hidden // sizes["heads"])
    return [(hidden, qkv), (hidden, hidden), (hidden, 2 * wide), (wide, hidden)]


def weights_of(sizes) -> int:
    """Elements of the weights of all layers."""
    return sizes["layers"] * sum(inputs * outputs for inputs, outputs in products(sizes))


def median(values):
    return sorted(values)[len(values) // 2]


def different(name: str, ours, theirs):
    """In which step the losses differ, in words; nothing when they agree."""
    for step, (a, b) in enumerate(zip(ours, theirs), start=1):
        if not abs(a - b) <= (FIRST_TOLERANCE if step <= FIRST_STEPS else TOLERANCE) * abs(b):
            yield f"step {step}: foveate's loss is {a:.5f}, that of {name} {b:.5f}"
            return


def measure(name: str, threads: int, args):
    """One line of results: slices of each side in turn."""
    sizes = SIZES[name] | SHARED
    count = args.steps or (12 if name == "1.6M" else 4)
    folder = args.work / f"{name}-{threads}"
    folder.mkdir(parents=True, exist_ok=True)
    text, recipe, run = folder / "document.txt", folder / "recipe.toml", folder / "run"
    cells = sizes["rows"] * sizes["len"]
    document(text, cells * count * (args.rounds + 1))
    recipe.write_text(RECIPE.format(**sizes, run=run, folder=folder))
    trainer = Trainer(args.foveate, recipe, run, threads)
    weights = trainer.first_weights()
    options = ["--sizes", json.dumps(sizes), "--weights", weights, "--text", text]
    options += ["--threads", threads]
    loops = [Loop("eager", options)]
    if not args.eager_only:
        loops.append(Loop("compiled", [*options, "--compile"]))
    bench = Foveate(args.foveate, threads)
    taken = {loop.name: [] for loop in loops} | {"foveate": []}
    losses = {loop.name: [] for loop in loops} | {"foveate": []}
    linear_seconds, best, alone = [], 0.0, {}
    for _ in range(args.rounds):
        records = trainer.steps(count)
        losses["foveate"] += [record["loss"] for record in records]
        # The first step of a slice makes its arrays and fills the caches anew, on either side.
        for record in records[1:]:
            taken["foveate"].append(record["seconds"] * 1e3)
            linear_seconds.append(record["linear_seconds"])
        for loop in loops:
            answer = loop.ask({"steps": count})
            losses[loop.name] += answer["losses"]
            taken[loop.name] += answer["ms"][1:]
            time.sleep(REST_SECONDS)
        for shape in products(sizes):
            request = {"linear": dict(zip(("tokens", "inputs", "outputs"), (cells, *shape)))}
            for ms in [bench.ask(request) for _ in range(PRODUCT_RUNS)]:
                alone[shape] = list(map(min, ms, alone.get(shape, ms)))
        large = [bench.ask("gemm") for _ in range(PRODUCT_RUNS)]
        best = max(best, *large, loops[0].ask({"gemm": GEMM_SIZE})["gflops"])
        time.sleep(REST_SECONDS)
    for loop in loops:
        loop.end()
    bench.child.stdin.close()
    bench.child.wait()
    ours, faults = losses["foveate"], []
    for loop in loops:
        faults += different(loop.name, ours, losses[loop.name])
    line = {"size": name, "threads": threads, "steps": count * args.rounds, "losses": losses}
    line["ms"] = {side: [median(times), min(times)] for side, times in taken.items()}
    # The fastest step's rate, since that of the large product is the fastest, too.
    rate = 6 * weights_of(sizes) * cells / min(linear_seconds) / 1e9
    fastest = sizes["layers"] * sum(map(sum, alone.values())) / 1e3
    alone_rate = 6 * weights_of(sizes) * cells / fastest / 1e9
    line |= {"product_gflops": rate, "alone_gflops": alone_rate, "gemm_gflops": best}
    line["faults"] = faults
    return line | {"load": os.getloadavg()[0]}


def row(line) -> str:
    ms = line["ms"]
    text = f"{line['size']:>5} {line['threads']:>3}"
    for side in ("foveate", "eager", "compiled"):
        text += "".join(f" {time:>8.1f}" for time in ms.get(side, (float("nan"),) * 2))
    medians = min(found[0] for side, found in ms.items() if side != "foveate")
    minima = min(found[1] for side, found in ms.items() if side != "foveate")
    text += f" {medians / ms['foveate'][0]:>6.2f} {minima / ms['foveate'][1]:>6.2f}"
    rate, alone, best = line["product_gflops"], line["alone_gflops"], line["gemm_gflops"]
    losses = line["losses"]
    text += f" {rate:>8.1f} {alone:>8.1f} {best:>8.1f} {alone / best:>5.2f} {line['load']:>5.1f}"
    return text + "  " + " ".join(f"{losses[side][-1]:.4f}" for side in losses)


def head() -> str:
    columns = "".join(f" {name:>8} {'min':>8}" for name in ("foveate", "eager", "compiled"))
    rates = f" {'products':>8} {'alone':>8} {'gemm':>8} {'share':>5} {'load':>5}"
    return f"{'size':>5} {'thr':>3}{columns} {'ratio':>6} {'of min':>6}{rates}  last losses"


def main() -> int:
    args = arguments()
    if not args.foveate.exists():
        fail(f"{args.foveate} is missing; run: cargo build --release --bin foveate")
    names = args.sizes.split(",")
    unknown = [name for name in names if name not in SIZES]
    if unknown:
        fail(f"no size {unknown[0]!r}; there are {', '.join(SIZES)}")
    install(args.venv)
    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    print("times of a step in ms, rates in GFLOP/s")
    print(head())
    faults = []
    for name in names:
        for threads in map(int, args.threads.split(",")):
            line = measure(name, threads, args)
            with (args.work / "results.jsonl").open("a") as file:
                print(json.dumps(line), file=file)
            print(row(line), flush=True)
            faults += [f"{name}, {threads} threads: {fault}" for fault in line["faults"]]
    for fault in faults:
        print(f"train_peers: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
