#!/usr/bin/env python3
"""Trains on a GPU and holds what comes of it to the CPU; part of gpu-bundle/ as train.py.

    train.py FOVEATE FOLDER [--tokens-per-second] [--only CHECK,CHECK] [--side-by-side] [--seconds N] [--set KEY=VALUE]...

Runs the command FOVEATE in FOLDER, on texts made here: losses of 20 steps in f32 and `exact` beside the
CPU's, repeats, `kill -9` at any moment and resume bit for bit, in every state and mode of recomputation,
with passes recorded as graphs, with inputs of layers in the host's memory and with the algorithms that a
run chose, a run that goes from the CPU to the GPU and back, evaluation and generation on the device, and
a few steps under compute-sanitizer's memcheck. --tokens-per-second also times a model of 135 million
parameters with random weights, and two saves of 1.2 billion; --only names checks, such as every_state.
--side-by-side runs each check as a process with a folder of its own below FOLDER, all at once, on a machine of many
cores: what they time then says nothing. --seconds bounds a command (150), and with --side-by-side all of them: what
is not over then is ended and told of. One line a check, ending in `passed` or FAILED; fails when one does. Without a
GPU it says why and passes.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import gpu_runs
from gpu_runs import lost_to_save, tell, write_texts

SECONDS = 150  # a command's limit: kernels can hang
RECIPE = """
[run]
dir = "unset"
seed = 5
[model]
hidden_size = 136
intermediate_size = 264
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 64
tie_word_embeddings = true
[attention]
mask = "causal & document"
[data]
files = ["*.txt"]
len = 200
held_out = 0.1
[train]
steps = 20
batch_rows = 3
accumulate = 2
eval_every = 0
save_every = 5
keep = 50
[optimizer]
lr = 3e-3
[schedule]
warmup_steps = 4
"""
SMOLLM = """
[run]
dir = "unset"
[model]
vocab_size = 49152
hidden_size = 576
intermediate_size = 1536
num_hidden_layers = 30
num_attention_heads = 9
num_key_value_heads = 3
max_position_embeddings = 2048
tie_word_embeddings = true
[attention]
mask = "causal & document"
[data]
files = ["*.txt"]
len = 2048
held_out = 0
[train]
steps = 30
batch_rows = 8
save_every = 0
eval_every = 0
"""


class Place:
    """A folder with texts and recipes, and the command."""

    def __init__(self, foveate, folder, sets=()):
        self.foveate, self.folder, self.sets = foveate, Path(folder), sets
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        write_texts(self.folder, 60, 900)
        (self.folder / "tiny.toml").write_text(RECIPE)
        (self.folder / "smollm.toml").write_text(SMOLLM)

    def arguments(self, run, device, sets=(), recipe="tiny", flags=()):
        command = [self.foveate, "train", str(self.folder / f"{recipe}.toml"), "--device", device]
        for key in (f"run.dir={self.folder / run}", *self.sets, *sets):
            command += ["--set", key]
        return [*command, *flags]

    def train(self, run, device, sets=(), recipe="tiny", flags=(), more=()):
        command = self.arguments(run, device, sets, recipe, flags)
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=os.environ | dict(more))
        if done.returncode:
            raise RuntimeError(f"{run} on {device}: {done.stderr.strip().splitlines()[-3:]}")
        return self.steps(run)

    def exact(self):
        """The run in `exact` that others are held to, made when the first of them asks."""
        if not (self.folder / "exact").exists():
            self.train("exact", "cuda:0", ["precision.state=exact"])
        return "exact"

    def steps(self, run):
        return gpu_runs.steps(self.folder / run)

    def losses(self, run):
        return gpu_runs.losses(self.folder / run)

    def weights(self, run):
        """A hash of the weights, masters and moments of the newest checkpoint."""
        files = sorted(Path(self.checkpoint(run)).glob("*.safetensors"))
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()

    def checkpoint(self, run):
        return str(sorted((self.folder / run / "checkpoints").glob("step-*"))[-1])


def worst(a, b):
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def beside_the_cpu(place):
    place.train("cpu", "cpu")
    cpu = place.losses("cpu")
    # f32 products may run in other orders; bf16 has 8 bits, and 20 steps carry them on.
    for state, allowed in (("f32", 1e-4), ("exact", 1e-2), ("bf16_moments", 1e-2)):
        place.train(state, "cuda:0", [f"precision.state={state}"])
        found = place.losses(state)
        off = worst(found, cpu)
        detail = f"first {cpu[0]:.4f}, last {cpu[-1]:.4f} beside {found[-1]:.4f}, at most {off:.2e} apart"
        tell(f"20 losses in {state} beside the CPU's", off < allowed and found[-1] < found[0] - 0.3, detail)


def repeats(place):
    place.train("again", "cuda:0", ["precision.state=exact"])
    same = place.losses("again") == place.losses(place.exact())
    same = same and place.weights("again") == place.weights("exact")
    tell("a repeat has the same losses and weights", same)


def killed_after(place, run, device, sets, after):
    """Kills a run when it has told of so many steps and resumes it; the steps that it had told of, and whether it
    was over before it was killed. A machine may be too busy to kill it in time; then it is tried again."""
    for _ in range(3):
        shutil.rmtree(place.folder / run, ignore_errors=True)
        command = place.arguments(run, device, sets, flags=["--json"])
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        limit = threading.Timer(SECONDS, process.kill)
        limit.start()
        seen = 0
        for line in process.stdout:
            seen += '"kind":"step"' in line.replace(" ", "")
            if seen > after:
                break
        process.send_signal(signal.SIGKILL)
        limit.cancel()
        is_early = seen <= after
        seen += sum('"kind":"step"' in line.replace(" ", "") for line in process.stdout)
        is_over = process.wait() == 0
        process.stdout.close()
        if is_early:
            raise RuntimeError(f"{run} on {device} ended after {seen} steps, before it was to be killed")
        if not is_over:
            break
    saved = list((place.folder / run / "checkpoints").glob("step-*"))
    place.train(run, device, sets, flags=["--resume" if saved else "--start-over"])
    return seen, is_over


def killed(place):
    moments = random.Random(11)
    for i in range(3):
        run, after = f"killed-{i}", moments.randint(1, 15)
        _, is_over = killed_after(place, run, "cuda:0", ["precision.state=exact", "train.save_every=3"], after)
        same = place.losses(run) == place.losses(place.exact()) and place.weights(run) == place.weights("exact")
        detail = "it was over before it was killed" if is_over else ""
        tell(f"killed after step {after}, the resumed run is the uninterrupted one", same and not is_over, detail)


def graphs(place):
    """Passes that are recorded and replayed beside passes that are not, in one run and killed in between."""
    sets = ["precision.state=exact", "train.save_every=3", "train.steps=40"]
    wrong = []
    for name, more in (
        ("two batches a step", []),
        ("one batch a step", ["train.accumulate=1", "train.recompute=mlp"]),
        ("evaluations", ["train.eval_every=7"]),
        ("moments of the host", ["precision.state=host_moments"]),
    ):
        runs = {}
        for which in ("off", "on", "killed"):
            run, switch = f"graphs-{name.replace(' ', '-')}-{which}", "off" if which == "off" else "on"
            own = [*sets, *more, f"run.graphs={switch}"]
            if which == "killed":
                if killed_after(place, run, "cuda:0", own, 22)[1]:
                    wrong.append(f"{name}: it was over before it was killed")
            else:
                command = place.arguments(run, "cuda:0", own)
                done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
                if done.returncode:
                    raise RuntimeError(f"{run}: {done.stderr.strip().splitlines()[-3:]}")
                recorded = "is recorded and replayed" in done.stderr and "graphs: off" not in done.stderr
                if recorded != (which == "on"):
                    wrong.append(f"{name}: with graphs {which}: {done.stderr.strip()[-300:]}")
            runs[which] = place.losses(run), place.weights(run)
        wrong += [f"{name}: {which} has other losses" for which in ("on", "killed") if runs[which][0] != runs["off"][0]]
        wrong += [f"{name}: {which} has other weights" for which in ("on", "killed") if runs[which][1] != runs["off"][1]]
    tell("recorded passes have the losses and weights of others, killed and resumed in between, too", not wrong, "; ".join(wrong))
    command = [place.foveate, "bench", "train", "--model", "135m", "--rows", "1", "--order", "fixed", "--json"]
    shares = []
    for switch in ("off", "on"):
        done = subprocess.run([*command, "--set", f"run.graphs={switch}"], capture_output=True, text=True, timeout=SECONDS)
        if done.returncode:
            return tell("bench train with graphs", False, done.stderr.strip()[-300:])
        found = json.loads(done.stdout)
        shares.append(f"{switch}: {found['ms']:.2f} ms a step, queued in {found['queue_ms']:.2f}, at work for {found['working_share']:.3f} of it")
    tell("135M, a row of 2048, graphs", True, "; ".join(shares))


STATES = ("f32", "exact", "bf16_gradients", "bf16_moments", "int8_moments", "host_moments", "bf16")
MODES = ("none", "attention", "mlp", "full")
STEPS = 40


def resumed(place, device, state, in_backward, modes=MODES, name="", sizes=(), more=()):
    """In a state, each mode of recomputation, with settings of its own and passes recorded where they can be, killed
    and resumed beside one run that computes nothing again and records nothing: what is other, in words, and the
    steps after which runs were killed."""
    moments, wrong, killed = random.Random(f"{state} {in_backward}"), [], []
    sets = [f"precision.state={state}", f"train.steps={STEPS}", "train.save_every=4", "train.keep=2"]
    sets += ["train.accumulate=1", f"optimizer.in_backward={str(in_backward).lower()}"]
    sets += ["optimizer.clip_norm=0"] if in_backward else []
    sets += sizes
    whole = f"{name}{state}-{'in' if in_backward else 'behind'}"
    place.train(whole, device, [*sets, "train.recompute=none", "run.graphs=off"])
    for mode in modes:
        run = f"{whole}-{mode}"
        own = [*sets, *more, f"train.recompute={mode}", "run.graphs=on"]
        seen, is_over = killed_after(place, run, device, own, moments.randint(2, 20))
        killed.append(seen)
        if is_over:
            wrong.append(f"{mode}: it was over before it was killed")
        elif place.losses(run) != place.losses(whole):
            wrong.append(f"{mode}: other losses")
        elif place.weights(run) != place.weights(whole):
            wrong.append(f"{mode}: other weights, masters or moments")
    return wrong, killed


def every_way(place, device, ways, said, *more):
    """Those ways side by side, each mostly the start of processes; a line for each."""
    with ThreadPoolExecutor(len(ways)) as pool:
        found = {pool.submit(resumed, place, device, *way, *more): way for way in ways}
        for future in as_completed(found):
            state, in_backward = found[future]
            name = said.format(f"{state}{', updates in the backward pass' if in_backward else ''}")
            try:
                wrong, killed = future.result()
            except Exception as error:  # the others may still say something
                wrong, killed = [str(error)[-600:]], []
            detail = "; ".join(wrong) or f"killed after steps {', '.join(map(str, killed))};"
            tell(name, not wrong, detail)


def every_state(place, device="cuda:0", states=STATES):
    """Killed and resumed in every state."""
    ways = [(state, in_backward) for in_backward in (False, True) for state in states]
    said = "{}: killed and resumed in every mode as never killed and nothing computed again"
    every_way(place, device, ways, said)


def offloaded(place, device="cuda:0"):
    """Inputs of layers in the memory of the host: the bits of runs in which they stay, alone and beside moments
    that are there too, killed and resumed; and with two batches a step, whose gradients are nobody's memory."""
    name, sizes, more = "offload-", ["model.num_hidden_layers=5"], ["train.offload=layer_inputs"]
    ways = [("exact", False), ("host_moments", False), ("host_moments", True)]
    said = "{}, inputs of layers on the host: killed and resumed in every mode as never killed and all on the GPU"
    every_way(place, device, ways, said, MODES, name, sizes, more)
    for run, sets in (("stay", []), ("away", more)):
        place.train(f"{name}{run}", device, [*sizes, *sets, "train.recompute=full"])
    same = place.losses(f"{name}stay") == place.losses(f"{name}away")
    same = same and place.weights(f"{name}stay") == place.weights(f"{name}away")
    tell("two batches a step, inputs of layers on the host: the same losses and weights", same)


def chosen(place):
    """Algorithms of products that the first step timed are taken again by a resume, though the folder
    of compiled kernels has lost them."""
    # Products are large enough to be timed, checkpoints small enough for any disk: 0.17 GB, and three of them.
    sets = ["model.num_hidden_layers=3", "model.vocab_size=512", "train.batch_rows=4"]
    sets += ["train.save_every=0"]
    # A folder of its own: other runs of the machine write what they chose, too.
    more = {"FOVEATE_CACHE_DIR": str(place.folder / "kernels")}
    kept = place.folder / "kernels" / "products.txt"
    runs = {}
    for run, steps in (("whole", (6,)), ("parts", (2, 6))):
        for number, upto in enumerate(steps):
            if number:
                kept.unlink(missing_ok=True)
            flags = ["--resume"] if number else []
            # The schedule counts the steps of a run, so it is constant here.
            own = [*sets, f"train.steps={upto}", "schedule.kind=constant"]
            place.train(run, "cuda:0", own, "smollm", flags, more)
        state = json.loads((Path(place.checkpoint(run)) / "state.json").read_text())
        runs[run] = (place.losses(run), place.weights(run), state.get("choices", {}))
    choices = runs["whole"][2]
    other = sum(number > 0 for number in choices.values())
    same = runs["whole"] == runs["parts"] and len(choices) > 0
    detail = f"{len(choices)} products, {other} of them not by the library's first algorithm;"
    tell("a resume takes the algorithms of its checkpoint", same, detail)


def across(place):
    """Five steps on the CPU, five on the GPU, the rest on the CPU."""
    for device, steps, flags in (("cpu", 5, []), ("cuda:0", 10, ["--resume"]), ("cpu", 20, ["--resume"])):
        # The schedule counts the steps of a run, so it is constant here.
        sets = [f"train.steps={steps}", "schedule.kind=constant", "precision.state=f32"]
        place.train("across", device, sets, flags=flags)
    place.train("stays", "cpu", ["schedule.kind=constant"])
    off = worst(place.losses("across"), place.losses("stays"))
    tell("a run goes from the CPU to the GPU and back", off < 1e-4, f"at most {off:.2e} apart")


def used(place):
    """Evaluation and generation beside the CPU's."""
    found = {}
    for device in ("cpu", "cuda:0"):
        command = [place.foveate, "eval", place.checkpoint(place.exact()), str(place.folder / "0*.txt")]
        command += ["--device", device, "--json", "--len", "200"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        if done.returncode:
            return tell("eval", False, done.stderr.strip()[-300:])
        found[device] = json.loads(done.stdout)["loss"]
    off = abs(found["cpu"] - found["cuda:0"])
    tell("eval beside the CPU's", off < 1e-2, f"{found['cpu']:.4f} and {found['cuda:0']:.4f}")
    texts = []
    for device in ("cpu", "cuda:0"):
        command = [place.foveate, "generate", place.checkpoint(place.exact()), "--prompt", "the ", "--json"]
        command += ["--device", device, "--temperature", "0", "--max-tokens", "12"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        if done.returncode:
            return tell("generate", False, done.stderr.strip()[-300:])
        texts.append(json.loads(done.stdout)["token_ids"])
    # Greedy tokens may differ where two are nearly as likely; the first are not.
    tell("generate begins as the CPU's", texts[0][:2] == texts[1][:2], f"{texts[0]} and {texts[1]}")


def sanitized(place):
    """Two steps, an evaluation and a save under memcheck, every allocation as long as was asked for."""
    found = sorted(Path("/usr/local").glob("cuda*/bin/compute-sanitizer"))
    tool = shutil.which("compute-sanitizer") or (str(found[-1]) if found else None)
    if tool is None:
        return print("a run under memcheck: compute-sanitizer is not here, skipped", flush=True)
    # The end of a kernel's parameters is found by asking past it.
    command = [tool, "--tool", "memcheck", "--error-exitcode", "99", "--report-api-errors", "no"]
    command += place.arguments("memcheck", "cuda:0", ["train.steps=2", "train.eval_every=2", "train.save_every=2"])
    exact = os.environ | {"FOVEATE_EXACT_MEMORY": "1", "FOVEATE_TIMEOUT": str(max(120, SECONDS))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * SECONDS, env=exact)
    told = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line]
    tell("two steps, an evaluation and a save under memcheck", done.returncode == 0, (told or [done.stderr[-300:]])[-1])


ONE_BILLION = ["vocab_size=128256", "hidden_size=2048", "intermediate_size=8192", "num_hidden_layers=16"]
ONE_BILLION += ["num_attention_heads=32", "num_key_value_heads=8", "head_dim=64"]
SAVED_BYTES = 2 * 20e9  # two checkpoints: f32 masters and moments, and the weights


def saves(place):
    """Two saves of 1.2 billion parameters in `exact` that steps wait for: what they take of the host's memory beside
    what a small run takes, and their seconds; and the step after a resume from the second."""
    if (free := shutil.disk_usage(place.folder).free) < 1.1 * SAVED_BYTES:
        return print(f"saves of 1B: {free / 1e9:.0f} GB of disk are free, skipped", flush=True)
    # The checkpoint before goes when one is whole, so the disk holds two at most.
    sets = ["train.batch_rows=1", "train.keep=1", "train.async_save=false", "schedule.kind=constant"]
    sizes = [f"model.{size}" for size in ONE_BILLION]

    def most(run, more, recipe, flags=()):
        """The most host memory of a run, in bytes."""
        command = place.arguments(run, "cuda:0", [*sets, *more], recipe, flags)
        errors = place.folder / f"{run}.log"
        with errors.open("w") as file:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file)
            limit = threading.Timer(2 * SECONDS, os.kill, (process.pid, signal.SIGKILL))
            limit.start()
            _, status, usage = os.wait4(process.pid, 0)
            limit.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{run}: {errors.read_text().strip()[-300:]}")
        return usage.ru_maxrss * 1024

    small = most("saves-small", ["train.steps=2", "train.save_every=1"], "tiny")
    large = most("saves", [*sizes, "train.steps=2", "train.save_every=1"], "smollm")
    lines = map(json.loads, (place.folder / "saves" / "metrics.jsonl").read_text().splitlines())
    took = ", ".join(f"{record['seconds']:.1f}" for record in lines if record["kind"] == "save")
    files = list(Path(place.checkpoint("saves")).glob("*.safetensors"))
    largest = max(file.stat().st_size for file in files)
    resumed = most("saves", [*sizes, "train.steps=3", "train.save_every=0"], "smollm", ["--resume"])
    more = [(of - small) / 2**30 for of in (large, resumed)]
    detail = f"{more[0]:.2f} GiB of the host more than a small run, a resume {more[1]:.2f}; saves took {took} s; "
    detail += f"{len(files)} files of at most {largest / 1e9:.2f} GB"
    tell("two saves of 1B in exact take at most 2 GiB of the host", max(more) < 2 and largest <= 5e9, detail)
    shutil.rmtree(place.folder / "saves")


def saves_beside(place):
    """What steps of 1.2 billion parameters in `exact` lose to a save that is written beside them: to the copy that it
    is made from, and to the writing for as many steps as were taken before. The run is killed then."""
    if (free := shutil.disk_usage(place.folder).free) < SAVED_BYTES:
        return print(f"a save of 1B beside steps: {free / 1e9:.0f} GB of disk are free, skipped", flush=True)
    every, metrics = 30, place.folder / "beside" / "metrics.jsonl"
    sets = [f"model.{size}" for size in ONE_BILLION] + ["data.len=8192", "train.batch_rows=1", "schedule.kind=constant"]
    sets += ["model.max_position_embeddings=8192", "train.steps=100000", "train.async_save=true", f"train.save_every={every}"]
    command = place.arguments("beside", "cuda:0", sets, "smollm", ["--json"])
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        told = (json.loads(line) for line in process.stdout)
        steps = (line["metrics"]["step"] for line in told if line.get("kind") == "step")
        limit = threading.Timer(SECONDS, process.kill)
        limit.start()
        try:
            last = next((step for step in steps if step == 2 * every), None)
        finally:
            limit.cancel()
            process.kill()
    found = last and lost_to_save(metrics, every)
    if not found:
        raise RuntimeError(f"the run ended before step {2 * every}")
    detail = f"a step takes {found['quiet_s']:.3f} s; {found['steps']} beside a save waited {found['waited_s']:.2f} s for "
    detail += f"the copy and took {found['slowed_s']:+.2f} s more, {found['lost_s']:.2f} s in all (aim 0.5 s);"
    tell("1B in exact loses at most 2 s to a save", found["lost_s"] <= 2, detail)
    shutil.rmtree(place.folder / "beside")


def speed(place):
    """Tokens a second of a model of SmolLM-135M's sizes."""
    for state in ("exact", "f32"):
        steps = place.train(f"speed-{state}", "cuda:0", [f"precision.state={state}"], "smollm")
        rates = sorted(r["packed_tokens_per_s"] for n, r in steps.items() if n > 10)
        # The last whose blocks were timed.
        record = steps[max(n for n, r in steps.items() if "linear_seconds" in r)]
        parts = {key: round(1e3 * record[key], 2) for key in ("seconds", "data_seconds", "linear_seconds", "loss_seconds", "optimizer_seconds")}
        tell(f"135M, 8 rows of 2048, {state}", True, f"{rates[len(rates) // 2]:,.0f} tokens/s (median of {len(rates)} steps); a step in ms: {parts}; loss {record['loss']:.3f};")


CHECKS = (beside_the_cpu, repeats, killed, graphs, every_state, offloaded, chosen, used, across, sanitized)
TIMED = (speed, saves, saves_beside)


def side_by_side(options, checks):
    """Each check as a process of its own in a folder of its own, until the time is over."""
    # On a machine that runs some twenty commands at once none gains by more threads.
    environment = {"RAYON_NUM_THREADS": "2"} | os.environ
    command = [sys.executable, "-B", os.path.abspath(__file__), options.foveate]
    sets = [word for key in options.set for word in ("--set", key)]
    running = {}
    for check in checks:
        own = [*command, str(Path(options.folder) / check.__name__), "--only", check.__name__]
        # A process group, so that the commands of a check end with it.
        running[check.__name__] = subprocess.Popen(
            [*own, "--seconds", str(options.seconds), *sets], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=environment, start_new_session=True,
        )

    def read(name, process):
        for line in process.stdout:
            print(f"{name} | {line.rstrip()}", flush=True)

    def end(why):
        """Ends what runs, and tells of it."""
        for name in [name for name, process in running.items() if process.poll() is None]:
            os.killpg(running[name].pid, signal.SIGKILL)
            tell(name, False, why)

    def cut(*_):
        end("cut")
        os._exit(1)

    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, cut)
    readers = [threading.Thread(target=read, args=of, daemon=True) for of in running.items()]
    for reader in readers:
        reader.start()
    until = time.monotonic() + options.seconds
    while any(process.poll() is None for process in running.values()) and time.monotonic() < until:
        time.sleep(0.1)
    end(f"cut after {options.seconds:.0f} s")
    for reader in readers:
        reader.join(timeout=5)
    failed = [name for name, process in running.items() if process.wait() != 0]
    told = f", all but {', '.join(failed)}" if failed else ""
    print(f"{len(running) - len(failed)} of {len(running)} checks ended well{told}", flush=True)
    return int(bool(failed))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("foveate")
    parser.add_argument("folder")
    parser.add_argument("--tokens-per-second", action="store_true")
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="CHECK,CHECK")
    parser.add_argument("--side-by-side", action="store_true")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    known = {check.__name__: check for check in (*CHECKS, *TIMED)}
    if unknown := [name for name in options.only or () if name not in known]:
        parser.error(f"there is no check {', '.join(unknown)}; there are {', '.join(known)}")
    checks = [known[name] for name in options.only] if options.only else list(CHECKS)
    return options, [*checks, *(TIMED if options.tokens_per_second else ())]


def main():
    global SECONDS
    options, checks = arguments()
    SECONDS = options.seconds
    doctor = subprocess.run([options.foveate, "doctor", "--json"], capture_output=True, text=True, timeout=SECONDS)
    if '"arch"' not in doctor.stdout:
        print("train declined: no GPU")
        return 0
    if options.side_by_side:
        return side_by_side(options, checks)
    place = Place(options.foveate, options.folder, options.set)
    for check in checks:
        start = time.monotonic()
        try:
            check(place)
        except Exception as error:  # the next check may still say something
            tell(check.__name__, False, str(error)[-600:])
        print(f"  {check.__name__}: {time.monotonic() - start:.1f} s", flush=True)
    return gpu_runs.status()


if __name__ == "__main__":
    sys.exit(main())
