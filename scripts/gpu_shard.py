#!/usr/bin/env python3
"""Trains on ranks that share GPUs and holds them to one rank; part of gpu-bundle/ as shard.py.

    shard.py FOVEATE FOLDER [PART,PART]
    shard.py FOVEATE FOLDER kills [NUMBER] [--seed N] [--seconds N] [--at-once N] [--device DEVICE]

Runs the command FOVEATE in FOLDER, on texts made here: five steps of meshes up to eight ranks, threads of a
process that take the GPUs there are in turn, in every state of the parameters; losses and weights beside one
rank's, repeats bit for bit, a run that goes on in another mesh, and runs of two processes of which one is
killed or stopped. So many checks as AT_ONCE says run at a time (6). One line a check, ending in `passed`, FAILED
or the reason why it was skipped; fails when one fails. Without a GPU it says so and passes. Parts are `meshes`,
`contexts` (ranks that share rows), `others` (what carries parameters, runs that go on or die) and `products` (every
product of the four axes that is 2, 3, 4 or 8 ranks), all unless some are named; `pairs` makes those checks alone that take two GPUs: by NCCL, and processes that die. `kills` kills and
stops ranks at random moments (gpu_kills.py says how), on CPUs, too.
"""

import hashlib
import itertools
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gpu_kills
from gpu_runs import losses, status, tell, write_texts

SECONDS = 100  # a command's limit: kernels can hang
RECIPE = """
[run]
dir = "unset"
seed = 5
[model]
hidden_size = 136
intermediate_size = 264
num_hidden_layers = 3
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 64
tie_word_embeddings = true
[attention]
PROGRAM
[data]
files = ["*.txt"]
len = 200
held_out = 0
[train]
steps = 5
batch_rows = 8
accumulate = 2
eval_every = 0
save_every = 0
[optimizer]
lr = 3e-3
[schedule]
kind = "constant"
warmup_steps = 0
"""
# Ranks, and what a recipe says of them; the first ones are the quick ones.
MESHES = [
    (2, ()),
    (4, ("mesh.replicate=2",)),
    (3, ("mesh.reshard=after_backward",)),
    (8, ("mesh.reshard=never", "model.tie_word_embeddings=false")),
    (2, ("mesh.replicate=2",)),
    (6, ("mesh.replicate=3", "mesh.reduce_dtype=bf16")),
]
# Attention by name; `documents` is what every recipe has unless it says otherwise.
PROGRAMS = {
    "documents": 'mask = "causal & document"',
    "window": 'mask = "causal & document & q - kv < 70"\nscore = "softcap(20)"',
    "alibi": 'mask = "causal"\nscore = "alibi"',
    "bias": 'mask = "causal & document"\nscore = "score + bias[h] * f32(kv - q) * 0.05"\n'
    "learned.bias = { shape = [4], init = 0.1, std = 0.1 }",
}
# Ranks that share rows: how many, the state, the program, and what a recipe says of the mesh.
CONTEXTS = [
    (2, "f32", "documents", ("mesh.context=2", "mesh.strategy=gather")),
    (4, "exact", "bias", ("mesh.context=4", "mesh.strategy=exchange:2")),
    (2, "f32", "alibi", ("mesh.context=2", "mesh.strategy=heads")),
    (4, "exact", "window", ("mesh.shard=2", "mesh.context=2")),
    (4, "f32", "bias", ("mesh.context=4", "mesh.strategy=exchange:1", "train.recompute=full")),
    (8, "exact", "alibi", ("mesh.replicate=2", "mesh.shard=2", "mesh.context=2", "mesh.strategy=exchange:3")),
]
# Ranks of tensor: with key/value heads of their own, and with one that several have.
TENSOR = [
    ("f32", 2, ("mesh.tensor=2",)),
    ("exact", 4, ("mesh.tensor=4",)),
    ("exact", 4, ("mesh.tensor=2", "model.tie_word_embeddings=false")),
    ("bf16_gradients", 6, ("mesh.tensor=3", "mesh.reshard=after_backward")),
    ("bf16", 4, ("mesh.tensor=2", "mesh.replicate=2")),
    ("int8_moments", 2, ("mesh.tensor=2",)),
    ("exact", 4, ("mesh.tensor=2", "mesh.context=2")),
]
STATES = ["f32", "exact", "bf16_gradients", "bf16_moments", "int8_moments", "bf16", "host_moments"]


class Place:
    """A folder with texts and a recipe, and the command."""

    def __init__(self, foveate, folder, device="cuda:0"):
        self.foveate, self.folder, self.device = foveate, Path(folder), device
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        write_texts(self.folder, 40, 700)
        for name, program in PROGRAMS.items():
            (self.folder / f"{name}.toml").write_text(RECIPE.replace("PROGRAM", program))

    def command(self, run, ranks, sets=(), flags=(), processes=False, program="documents"):
        launch = ["launch", "--ranks", str(ranks), "--"] if processes else []
        command = [self.foveate, *launch, "train", str(self.folder / f"{program}.toml"), "--device", self.device, *flags]
        command += ["--ranks", str(ranks)] if ranks > 1 and not processes else []
        for key in (f"run.dir={self.folder / run}", *sets):
            command += ["--set", key]
        return command

    def train(self, run, *args, **more):
        """Losses of the steps, and a hash of masters and moments."""
        command = self.command(run, *args, **more)
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        if done.returncode:
            raise RuntimeError(" | ".join(done.stderr.strip().splitlines()[-3:]))
        return self.reached(run)

    def saved(self, run):
        """The checkpoints of a run that are whole, the newest last."""
        return sorted((self.folder / run / "checkpoints").glob("step-*[0-9]"))

    def reached(self, run):
        """Losses of its steps, and a hash of the masters and moments of its newest checkpoint."""
        last = self.saved(run)[-1]
        hashed = hashlib.sha256()
        for file in sorted(last.rglob("*.safetensors")):
            hashed.update(file.read_bytes())
        return losses(self.folder / run), hashed.hexdigest()


def beside_one_rank(place, number, state, ranks, sets, program="documents", processes=False):
    # Sums in bf16 take one batch a step.
    once = state in ("bf16", "bf16_gradients")
    sets = (f"precision.state={state}", *sets, *(["train.accumulate=1"] if once else []))
    name = f"{ranks} {'processes' if processes else 'ranks'}, {program}, {', '.join(sets)}"
    model = [s for s in sets if not s.startswith("mesh.")]
    try:
        alone, _ = place.train(f"one-{number}", 1, model, program=program)
        found, weights = place.train(f"some-{number}", ranks, sets, processes=processes, program=program)
        again = place.train(f"again-{number}", ranks, sets, processes=processes, program=program)
    except (RuntimeError, subprocess.TimeoutExpired) as e:
        return tell(name, False, str(e)[:600])
    off = max(abs(a - b) for a, b in zip(alone, found, strict=True))
    # Sums in f32 have another order; in 16 bits five steps carry the roundings on.
    allowed = 1e-4 if state == "f32" and "mesh.reduce_dtype=bf16" not in sets else 1e-2
    detail = f"{alone[-1]:.5f} and {found[-1]:.5f} at the end, at most {off:.1e} apart"
    tell(name, off < allowed and found[-1] < found[0] - 0.1, detail)
    tell(f"{name}, again", again == (found, weights), "the same bits" if again[1] == weights else "other bits")


def carried(place, mesh):
    """Copies between threads, the host's memory and, on two GPUs, NCCL give the same bits on a mesh of two ranks."""
    runs = [("copies", (), False)]
    # Through the host ranks of tensor multiply all tokens at once.
    runs += [("host", ("mesh.transfers=host",), False)] if "tensor" not in mesh else []
    if gpus(place) > 1:
        runs += [("nccl", ("mesh.transfers=nccl",), False), ("processes", (), True)]
    else:
        print("ranks by NCCL skipped: there is one GPU")
    found = {}
    for name, sets, processes in runs:
        try:
            sets = ("precision.state=exact", mesh, *sets)
            found[name] = place.train(f"{mesh}-by-{name}", 2, sets, processes=processes)
        except (RuntimeError, subprocess.TimeoutExpired) as e:
            tell(f"{mesh} by {name}", False, str(e)[:600])
    for name, come in found.items():
        tell(f"{mesh} by {name} has the bits of copies", come == found.get("copies"))


def gpus(place):
    said = subprocess.run([place.foveate, "doctor", "--json"], capture_output=True, text=True).stdout
    return said.count('"arch"')


def resumed(place):
    """Three steps on four ranks, the rest on two; beside two ranks all the way."""
    sets = ("precision.state=f32",)
    try:
        place.train("moves", 4, (*sets, "train.steps=3"))
        moved, _ = place.train("moves", 2, sets, ["--resume"])
        stays, _ = place.train("stays", 2, sets)
    except (RuntimeError, subprocess.TimeoutExpired) as e:
        return tell("a run goes on in another mesh", False, str(e)[:600])
    off = max(abs(a - b) for a, b in zip(moved, stays, strict=True))
    tell("a run goes on in another mesh", off < 1e-4, f"at most {off:.1e} apart")


def harmed(place, run, sets, harm):
    """A run of two processes, one of which is killed or stopped behind a checkpoint: its status, how long it took
    to end, what it said, and how many checkpoints it had."""
    command = place.command(run, 2, sets, processes=True)
    environment = os.environ | {"FOVEATE_SILENCE": "4"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    since = time.monotonic()
    while not place.saved(run):
        if process.poll() is not None or time.monotonic() > since + SECONDS:
            process.kill()
            raise RuntimeError(f"it saved nothing: {process.communicate()[1].strip()[-300:]}")
        time.sleep(0.02)
    had, began = len(place.saved(run)), time.monotonic()
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(ranks[-1]), harm)
    try:
        said = process.communicate(timeout=SECONDS)[1]
    finally:
        process.kill()
    return process.returncode, time.monotonic() - began, said, had


def goes_on(place, harm, name, sets):
    """Kills or stops a process of two and resumes; beside a run that was left alone."""
    run = f"harmed-{name}"
    try:
        status, took, said, had = harmed(place, run, sets, harm)
        left = len(place.saved(run))
        found = place.train(run, 2, sets, ["--resume"], processes=True)
    except (RuntimeError, subprocess.TimeoutExpired) as e:
        return name, None, str(e)[:600]
    lines = [line for line in said.splitlines() if "rank" in line and ("lost" in line or "silent" in line or "ended" in line)]
    said = (lines or said.strip().splitlines() or ["it said nothing"])[-1]
    whole = f"ended with {status} in {took:.1f} s with {had} to {left} checkpoints whole ({said.strip()[:200]});"
    return name, (status, found), whole


def processes_that_die(place):
    """Two processes, of which one is killed or stopped behind a checkpoint: the launcher ends with 75, and the run
    that is resumed has the bits of one that was left alone."""
    carried = "nccl" if gpus(place) > 1 else "host"
    sets = ("precision.state=exact", f"mesh.transfers={carried}", "train.steps=120", "train.save_every=10", "train.keep=20")
    harms = [(signal.SIGKILL, "killed"), (signal.SIGSTOP, "stopped")]
    with ThreadPoolExecutor(len(harms) + 1) as pool:
        alone = pool.submit(place.train, "left-alone", 2, sets, processes=True)
        ended = list(pool.map(lambda of: goes_on(place, *of, sets), harms))
        try:
            alone = alone.result()
        except (RuntimeError, subprocess.TimeoutExpired) as e:
            return tell(f"two processes by {carried}", False, str(e)[:600])
    for name, found, detail in ended:
        same = found == (75, alone)
        others = "" if same or found is None else " it came to other losses or weights, or did not end with 75;"
        tell(f"one of two processes by {carried} {name}, and the run resumed", same, detail + others)


def pairs(place):
    """What takes two GPUs."""
    sets = ("mesh.context=2", "mesh.strategy=exchange:2")
    checks = [
        lambda: processes_that_die(place),
        lambda: beside_one_rank(place, "context-nccl", "exact", 2, sets, "bias", processes=True),
        *(lambda mesh=mesh: carried(place, mesh) for mesh in ("mesh.shard=2", "mesh.tensor=2")),
    ]
    with ThreadPoolExecutor(len(checks)) as pool:
        list(pool.map(lambda check: check(), checks))


def meshes():
    """What `beside_one_rank` is asked of meshes, each by a number of its own: the quick ones first."""
    cases = [(state, *MESHES[i % len(MESHES)]) for i, state in enumerate(STATES)]
    in_backward = ("optimizer.in_backward=true", "train.accumulate=1", "optimizer.clip_norm=0")
    cases.append(("exact", 2, in_backward))
    cases.append(("exact", 4, ("mesh.replicate=2", *in_backward)))
    cases.append(("f32", 2, ("mesh.transfers=host",)))
    cases += TENSOR
    cases.append(("exact", 2, ("mesh.tensor=2", *in_backward)))
    # Inputs of layers in the memory of the host, where parameters are gathered and where the stream is cut.
    cases.append(("exact", 2, ("train.offload=layer_inputs", "train.recompute=full")))
    cases.append(("host_moments", 2, ("mesh.tensor=2", "train.offload=layer_inputs", "train.recompute=mlp")))
    cases += [("exact", *mesh) for i, mesh in enumerate(MESHES) if i != 1]
    return [(number, state, ranks, sets) for number, (state, ranks, sets) in enumerate(cases)]


def contexts():
    """The same of ranks that share rows."""
    return [(f"context-{n}", state, ranks, sets, program) for n, (ranks, state, program, sets) in enumerate(CONTEXTS)]


def products():
    """The same of every product of the four axes that is 2, 3, 4 or 8 ranks."""
    sizes = [of for of in itertools.product((1, 2, 3, 4, 8), repeat=4) if math.prod(of) in (2, 3, 4, 8)]
    axes = ("replicate", "shard", "context", "tensor")
    # A head for each rank of tensor.
    more = ("model.num_attention_heads=8", "model.num_key_value_heads=4")
    sets = lambda of: (*(f"mesh.{axis}={size}" for axis, size in zip(axes, of, strict=True)), *more)
    return [("-".join(map(str, of)), "f32", math.prod(of), sets(of)) for of in sizes]


def others(place):
    """What is checked beside meshes: ways of carrying, a run that goes on in another mesh, processes that die."""
    checks = [lambda: processes_that_die(place), lambda: resumed(place)]
    checks += [lambda mesh=mesh: carried(place, mesh) for mesh in ("mesh.shard=2", "mesh.tensor=2")]
    if gpus(place) > 1:
        sets = ("mesh.context=2", "mesh.strategy=exchange:2")
        checks.append(lambda: beside_one_rank(place, "context-nccl", "exact", 2, sets, "bias", processes=True))
    return checks


def kills(foveate, folder, arguments):
    """Ranks that are killed and stopped at random moments."""
    options = gpu_kills.options(arguments)
    place = Place(foveate, folder, options.device)
    found = 0 if options.device == "cpu" else gpus(place)
    if options.device != "cpu" and found == 0:
        print("shard declined: no GPU")
        return 0
    gpu_kills.kills(place, options, found)
    return status()


def main(foveate, folder, parts="meshes,contexts,others,products", *more):
    # Without NVLink multicast, as everywhere.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if parts == "kills":
        return kills(foveate, folder, more)
    parts = parts.split(",")
    unknown = [part for part in parts if part not in ("meshes", "contexts", "others", "products", "pairs")]
    if unknown or more or ("pairs" in parts and len(parts) > 1):
        given = " ".join([",".join(parts), *more])
        sys.exit(f"shard.py: {given!r}; give meshes, contexts, others, products, or several of them, or pairs or kills alone")
    if subprocess.run([foveate, "doctor", "--json"], capture_output=True, text=True).stdout.find('"arch"') < 0:
        print("shard declined: no GPU")
        return 0
    place = Place(foveate, folder)
    if parts == ["pairs"]:
        if gpus(place) < 2:
            print("shard declined: one GPU")
            return 0
        pairs(place)
        return status()
    # Nothing is timed but how long ranks take to notice a death, which is seconds.
    checks = others(place) if "others" in parts else []
    cases = (contexts() if "contexts" in parts else []) + (meshes() if "meshes" in parts else [])
    cases += products() if "products" in parts else []
    checks += [lambda case=case: beside_one_rank(place, *case) for case in cases]
    with ThreadPoolExecutor(int(os.environ.get("AT_ONCE", 6))) as pool:
        list(pool.map(lambda check: check(), checks))
    return status()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
