"""Kills and stops ranks at random moments, several runs at a time: `kills` of gpu_shard.py.

    shard.py FOVEATE FOLDER kills [NUMBER] [--seed N] [--seconds N] [--at-once N] [--device DEVICE]

A run is two processes, or two threads of one, on texts made here. One rank is killed or stopped at a moment that is
drawn: before the first step, behind a step, or while a checkpoint is written. The other has to end by itself with 75
and at most one error; then the run is resumed by the command that began it, and harmed again, until it reaches its
end before its moment has come. Losses and weights then have to have the bits of a run that was left alone. Processes
on two GPUs meet by NCCL, on one GPU by the memory of the host, and on `--device cpu` over TCP.

--seconds bounds all of it: behind four fifths of them nothing more is harmed, and runs go on to their ends. What was
found is told every ten seconds, and when the script is cut by SIGTERM or Ctrl-C. --seed says how to draw again what
an earlier call drew; what a moment hits is up to the machine.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from gpu_runs import tell

STEPS, SAVE_EVERY = 32, 2
SILENCE = 4  # seconds without a sign of life after which a rank counts as lost
ARRIVAL = 10  # seconds for both ranks to come
LIMIT = 60  # seconds in which what is left of a harmed run has to end
AGAIN = 75  # what ranks end with when another one is lost
PAUSE = 0.002
STEP = re.compile(rb'"kind":\s*"step"')
MESHES = ("mesh.shard=2", "mesh.tensor=2", "mesh.context=2")


class Attempt:
    """Two ranks of a run between their start and their end."""

    def __init__(self, kills, run, mesh, slot, together):
        self.folder, self.since = kills.place.folder / run, time.time()
        own = (mesh, *kills.sets, f"train.steps={STEPS}", f"train.save_every={SAVE_EVERY}")
        own += ("train.accumulate=1", "train.keep=3", "train.async_save=true", "model.num_hidden_layers=2")
        command = kills.place.command(run, 2 if together else 1, own, ["--resume", "--json"])
        common = os.environ | {"FOVEATE_SILENCE": str(SILENCE), "FOVEATE_ARRIVAL": str(ARRIVAL)}
        common["RAYON_NUM_THREADS"] = "1"
        meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port(slot))}
        ranks = [{}] if together else [meet | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
        self.out = kills.place.folder / f"{run}.out"
        self.errors = [kills.place.folder / f"{run}.{rank}.err" for rank in range(len(ranks))]
        self.ranks, self.steps, self.read = [], 0, 0
        for rank, (own, errors) in enumerate(zip(ranks, self.errors)):
            with (self.out if rank == 0 else Path(os.devnull)).open("wb") as out, errors.open("wb") as told:
                self.ranks.append(kills.start(command, common | own, out, told))

    def told_steps(self):
        """How many steps it has told of."""
        with self.out.open("rb") as out:
            out.seek(self.read)
            whole = out.read().rpartition(b"\n")[0]
        self.read += len(whole) + bool(whole)
        self.steps += len(STEP.findall(whole))
        return self.steps

    def is_saving(self):
        """Whether a checkpoint is being written that was begun since it started."""
        try:
            with os.scandir(self.folder / "checkpoints") as entries:
                return any(e.name.startswith(".writing-") and e.stat().st_mtime > self.since for e in entries)
        except OSError:  # there is none yet, or one was renamed meanwhile
            return False

    def is_over(self):
        return all(rank.poll() is not None for rank in self.ranks)

    def until(self, reached):
        """Waits until something is reached; whether it was, before all ranks had ended."""
        while not reached():
            if self.is_over():
                return False
            time.sleep(PAUSE)
        return not self.is_over()

    def passes(self, seconds):
        end = time.monotonic() + seconds
        return self.until(lambda: time.monotonic() >= end)

    def said(self, rank):
        return self.errors[rank].read_text(errors="replace")


def free_port(slot, ports=40):
    """A port of this slot's own, below those that the system hands out: another slot could be handed one that is
    free for a moment."""
    for port in random.sample(range(20_000 + slot * ports, 20_000 + (slot + 1) * ports), ports):
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise RuntimeError(f"kills: none of {ports} ports from {20_000 + slot * ports} on is free; end what has them")


class Kills:
    def __init__(self, place, options, sets, meshes):
        self.place, self.options, self.sets, self.meshes = place, options, sets, meshes
        self.lock, self.alive, self.is_cut = threading.Lock(), set(), False
        names = ("kills", "stops", "threads", "starts", "saves", "resumed", "unsaved", "finished")
        self.counts = dict.fromkeys(names, 0)
        self.wrong, self.right, self.until = [], {}, time.monotonic() + 0.8 * options.seconds

    def start(self, command, environment, out, errors):
        with self.lock:
            if self.is_cut:
                raise RuntimeError("the script is cut")
            process = subprocess.Popen(command, stdout=out, stderr=errors, stdin=subprocess.DEVNULL, env=environment)
            self.alive.add(process)
        return process

    def cut(self):
        """Ends all processes, and lets none begin."""
        with self.lock:
            self.is_cut = True
            for process in self.alive:
                if process.poll() is None:
                    process.kill()

    def count(self, **more):
        with self.lock:
            for name, number in more.items():
                self.counts[name] += number

    def harmed(self):
        return self.counts["kills"] + self.counts["stops"]

    def fail(self, run, why):
        with self.lock:
            if not self.is_cut:
                self.wrong.append(run)
                print(f"kills: {run}: {why}", flush=True)

    def alone(self, number, mesh):
        """A run that is left alone: what is right, and how long its parts take."""
        run, began = f"alone-{number}", time.monotonic()
        attempt = Attempt(self, run, mesh, number, False)
        attempt.until(lambda: attempt.told_steps() > 0)
        start = time.monotonic() - began
        is_late = attempt.until(lambda: time.monotonic() > began + LIMIT)
        whole = time.monotonic() - began
        if is_late or any(rank.returncode != 0 for rank in attempt.ranks):
            said = " | ".join(attempt.said(rank).strip()[-300:] for rank in range(2))
            raise RuntimeError(f"a run that was left alone, {mesh}, did not end well within {LIMIT} s: {said}")
        lines = (attempt.folder / "metrics.jsonl").read_text().splitlines()
        saves = [record["seconds"] for record in map(json.loads, lines) if record["kind"] == "save"]
        self.right[mesh] = self.place.reached(run)
        return start, whole, max(saves)

    def moment(self, draws, attempt):
        """Waits for a moment that is drawn, and says whether it came before the run was over."""
        where, steps = draws.random(), draws.randint(1, STEPS // 2)
        start, whole, save = self.took
        if where < 0.15:
            return attempt.passes(draws.uniform(0, start))
        if not attempt.until(lambda: attempt.told_steps() > 0):
            return False
        # The runs that were left alone may have compiled kernels.
        self.took[0] = min(self.took[0], time.time() - attempt.since)
        if not attempt.until(lambda: attempt.told_steps() >= steps):
            return False
        if where < 0.45:
            return attempt.passes(draws.uniform(0, (whole - start) / STEPS))
        return attempt.until(attempt.is_saving) and attempt.passes(draws.uniform(0, save))

    def harm(self, draws, attempt, history):
        """Kills or stops a rank, and writes it down; the one that was, or none where it had ended."""
        index, stops = draws.randrange(len(attempt.ranks)), draws.random() < 0.25
        rank = attempt.ranks[index]
        with self.lock:
            if self.harmed() >= self.options.number or rank.poll() is not None:
                return None
            rank.send_signal(signal.SIGSTOP if stops else signal.SIGKILL)
            self.counts["stops" if stops else "kills"] += 1
            self.counts["threads"] += len(attempt.ranks) == 1
            self.counts["saves"] += (saves := attempt.is_saving())
            self.counts["starts"] += (steps := attempt.told_steps()) == 0
        who = f"rank {index}" if len(attempt.ranks) > 1 else "both"
        history.append(f"{who} {'stopped' if stops else 'killed'} behind {steps} steps{', in a save' if saves else ''}")
        return index

    def end(self, run, attempt, harmed):
        """Waits for the ranks that were left alone, then ends the one that was not: whether all went as it should,
        and whether the run is at its end."""
        began, others = time.monotonic(), [rank for i, rank in enumerate(attempt.ranks) if i != harmed]
        # A run that nobody harms may take as long as there is.
        limit = began + (LIMIT if harmed is not None else self.options.seconds)
        while any(rank.poll() is None for rank in others) and time.monotonic() < limit and not self.is_cut:
            time.sleep(PAUSE)
        hangs = [rank for rank in others if rank.poll() is None]
        for rank in attempt.ranks if harmed is not None else hangs:
            rank.kill()
            rank.wait()
        with self.lock:
            self.alive -= set(attempt.ranks)
        if hangs:
            said = " | ".join(attempt.said(rank).strip()[-200:] for rank in range(len(attempt.ranks)))
            self.fail(run, f"after {limit - began:.0f} s what was not harmed had not ended: {said}")
            return False, False
        is_whole = harmed is None
        for index, rank in enumerate(attempt.ranks):
            said = attempt.said(index)
            if index == harmed or rank.returncode == 0:
                is_whole &= index != harmed
                continue
            is_whole, errors = False, [line for line in said.splitlines() if "error: " in line]
            if rank.returncode != AGAIN or harmed is None or len(errors) > 1 or "panicked" in said:
                why = f"rank {index} ended with {rank.returncode} after {time.monotonic() - began:.1f} s"
                self.fail(run, f"{why}, the other one {'harmed' if harmed is not None else 'left alone'}: "
                          f"{' | '.join(errors)[:300] or said.strip()[-300:]}")
                return False, False
        return True, is_whole

    def slot(self, number):
        """Runs one after the other, each harmed until it is at its end."""
        draws, run, runs = random.Random(f"{self.options.seed} {number}"), None, 0
        while not self.is_cut:
            may_harm = self.harmed() < self.options.number and time.monotonic() < self.until
            if run is None:
                if not may_harm:
                    return
                run, mesh, history = f"run-{number}-{runs}", self.meshes[(number + runs) % len(self.meshes)], []
                runs += 1
            elif not self.place.saved(run):
                self.count(unsaved=1)
            attempt = Attempt(self, run, mesh, number, draws.random() < 0.2)
            came = may_harm and self.moment(draws, attempt)
            harmed = self.harm(draws, attempt, history) if came else None
            well, is_whole = self.end(f"{run}, {mesh}, {'; '.join(history)}", attempt, harmed)
            if well and not is_whole:
                self.count(resumed=1)
                continue
            if well:
                self.count(finished=1)
                found, right = self.place.reached(run), self.right[mesh]
                if found != right:
                    what = "weights or moments" if found[0] == right[0] else "losses"
                    self.fail(f"{run}, {mesh}, {'; '.join(history)}", f"other {what} than the run that was left alone")
            shutil.rmtree(self.place.folder / run, ignore_errors=True)
            run = None

    def told(self):
        of = self.counts
        return (f"{of['kills']} kills and {of['stops']} stops, {of['starts']} of them before a first step, "
                f"{of['saves']} while a checkpoint was written, {of['threads']} of both ranks at once; "
                f"{of['resumed']} resumed, {of['unsaved']} before the first checkpoint was there; "
                f"{of['finished']} runs compared at their end, {len(self.wrong)} wrong;")

    def run(self):
        """All of it: a line on what was found."""
        with ThreadPoolExecutor(len(self.meshes)) as pool:
            took = list(pool.map(self.alone, range(len(self.meshes)), self.meshes))
        self.took = [max(of) for of in zip(*took)]
        start, whole, save = self.took
        print(f"kills, left alone: the first step after {start:.1f} s, all {STEPS} in {whole:.1f} s, "
              f"a save in {1e3 * save:.0f} ms; {self.options.at_once} runs at a time", flush=True)
        with ThreadPoolExecutor(self.options.at_once) as pool:
            slots, began = [pool.submit(self.slot, number) for number in range(self.options.at_once)], time.monotonic()
            left = set(slots)
            while left and time.monotonic() < self.until + 0.2 * self.options.seconds:
                _, left = wait(left, timeout=10)
                print(f"kills after {time.monotonic() - began:.0f} s: {self.told()}", flush=True)
            if left:
                self.cut()
        for error in (slot.exception() for slot in slots):
            if error and not self.is_cut:
                self.wrong.append(str(error))
                print(f"kills: {error!r}", flush=True)
        name = f"{self.harmed()} ranks harmed, {', '.join(self.meshes)} by {self.carried}, seed {self.options.seed}"
        tell(name, not self.wrong and self.counts["finished"] > 0, self.told())
        if self.harmed() < self.options.number or left:
            left = f"{len(left)} runs were not at their end" if left else "the time was over"
            print(f"{self.options.number - self.harmed()} more skipped: {left}", flush=True)


def options(arguments):
    parser = argparse.ArgumentParser(prog="shard.py FOVEATE FOLDER kills", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", type=int, nargs="?", default=200)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--seconds", type=float, default=110)
    # A process for each core: runs are mostly starts.
    at_once = int(os.environ.get("AT_ONCE", max(1, (os.cpu_count() or 2) // 2)))
    parser.add_argument("--at-once", type=int, default=at_once, help="runs (%(default)s)")
    parser.add_argument("--device", default="cuda:0")
    return parser.parse_args(arguments)


def kills(place, options, gpus):
    """Of the command of `place`, on so many GPUs."""
    on_cpu = options.device == "cpu"
    # Ranks that share rows have no way through the memory of the host.
    sets = ["precision.state=f32" if on_cpu else "precision.state=exact"]
    sets += ["mesh.transfers=host"] if gpus == 1 else []
    sets += ["data.len=32", "train.batch_rows=2", "model.intermediate_size=64"] if on_cpu else []
    all_of_it = Kills(place, options, sets, MESHES[:2] if gpus == 1 else MESHES)
    all_of_it.carried = "TCP" if on_cpu else "NCCL" if gpus > 1 else "the host"
    print(f"kills: seed {options.seed}", flush=True)

    def cut(*_):
        all_of_it.cut()
        print(f"kills skipped, cut: {all_of_it.told()}", flush=True)
        os._exit(1)

    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, cut)
    try:
        all_of_it.run()
    except RuntimeError as e:
        tell("kills", False, str(e)[:900])
    finally:
        all_of_it.cut()
