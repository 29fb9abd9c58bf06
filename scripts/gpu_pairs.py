#!/usr/bin/env python3
"""Measures what takes two GPUs of one host, beside torchtitan and beside what was simulated.

    scripts/gpu_pairs.py FOVEATE OUT [--tests BINARY] [--torchtitan WHEEL|FOLDER] [--seconds N] [--only PART,PART]

Runs the command FOVEATE, and prints each row as soon as it is there: to OUT/rows.jsonl, one object a line, so
that a run that is cut loses nothing, and all that commands said to OUT/log.txt. `--list` says what the parts are.
--seconds bounds all of them together: a command whose limit does not fit into what is left is not begun, and a
row says so. Parts can be spread over several calls on a machine that is held for minutes: what was compiled before
is in the folder --work as long as the machine is the same.

Some rows have a bar. The last line says how many were met and missed; only what failed to run fails the script.

Rows of 65,536 tokens take cards of 141 GB. On smaller ones they are computed again in the backward pass, by
Foveate and the peers alike, and models of 8B have 16 layers; rows say so. Nothing else runs on the cards while
steps are timed: only `prepare` and `checks`, whose times nobody reads, run side by side. NVLink multicast stays
off (NCCL_NVLS_ENABLE=0) unless the environment says otherwise.

--cpu tries every part on tiny models of a processor: nothing that it prints is a measurement.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import meshes
from gpu_runs import lost_to_save, write_texts

NOT_BEGUN = "not begun"
LONG = 65536
DOCUMENTS = 16


class Rows:
    """What was found, in files of a line each: that of this call, and one that is kept between calls."""

    def __init__(self, out: Path, kept: Path):
        for folder in (out, kept):
            folder.mkdir(parents=True, exist_ok=True)
        self.lock, self.all, self.began = threading.Lock(), {}, time.monotonic()
        if (kept / "rows.jsonl").exists():
            earlier = [json.loads(line) for line in (kept / "rows.jsonl").read_text().splitlines()]
            self.all = {found.pop("row"): found for found in earlier}
        self.before = set(self.all)
        self.files, self.log = [open(folder / "rows.jsonl", "a") for folder in (out, kept)], open(out / "log.txt", "a")

    def add(self, row: str, found: dict, line: str):
        with self.lock:
            self.all[row] = found
            self.before.discard(row)
            seconds = round(time.monotonic() - self.began, 1)
            for file in self.files:
                file.write(json.dumps({"row": row, "at_s": seconds} | found) + "\n")
                file.flush()
                os.fsync(file.fileno())
            print(f"[{seconds:6.1f}] {row}: {line}", flush=True)

    def note(self, text: str):
        with self.lock:
            self.log.write(text + "\n")
            self.log.flush()


def descendants(pid: int) -> list[int]:
    """Processes that it has started, and those have; launchers put ranks into sessions of their own."""
    try:
        own = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(child) for child in own] + [under for child in own for under in descendants(int(child))]


class Pairs:
    def __init__(self, args):
        self.args, self.work, self.rows = args, args.work, Rows(args.out, args.work)
        self.until = time.monotonic() + args.seconds
        self.site = args.torchtitan
        if self.site and self.site.is_file():
            self.site = self.work / "torchtitan"
            shutil.unpack_archive(args.torchtitan, self.site, "zip")
        gib = self.gpu_gib()
        self.is_small = gib < 100
        self.machine = "h100x8" if self.is_small else "h200x8"
        self.recompute = "full" if self.is_small else "none"
        self.layers_8b = 16 if self.is_small else None
        # What torchtitan's own launcher sets; without it 64k tokens hardly fit.
        self.segments = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        self.environment = os.environ | {
            "FOVEATE_CACHE_DIR": str(self.work / "kernels"),
            "TRITON_CACHE_DIR": str(self.work / "triton"),
            "NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE", "0"),
        }

    def gpu_gib(self) -> float:
        command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version,clocks.sm,temperature.gpu",
                   "--format=csv,noheader"]
        if self.args.cpu:
            return 141.0
        if shutil.which(command[0]) is None:
            sys.exit("gpu_pairs: two GPUs are needed, and there is no nvidia-smi here")
        done = subprocess.run(command, capture_output=True, text=True)
        cards = done.stdout.strip().splitlines()
        if len(cards) < 2:
            sys.exit(f"gpu_pairs: two GPUs are needed, and there are {len(cards)}: "
                     f"{done.stdout.strip()} {done.stderr.strip()}")
        self.rows.add("machine", {"cards": cards}, "; ".join(cards))
        return min(float(card.split(",")[1].split()[0]) for card in cards) / 1024

    # Commands

    def run(self, name: str, command: list, limit: float, on_line=None, more=()) -> tuple[int | None, list[str], str]:
        """Runs a command for at most `limit` seconds: its status, none where that was too long or it was not begun;
        its lines, and why it has no status, or what it said last. `on_line` is given each line as it comes, and
        ends the command by returning true."""
        left = self.until - time.monotonic()
        if limit > left:
            self.rows.add(name, {"left": True}, f"not begun: it may take {limit:.0f} s, and {left:.0f} s are left")
            return None, [], NOT_BEGUN
        began, command = time.monotonic(), [str(part) for part in command]
        self.rows.note(f"\n$ {' '.join(command)}")
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env=self.environment | dict(more), cwd=ROOT,
        )
        lines, errors = [], []

        def read(pipe, into, told):
            for line in pipe:
                into.append(line.rstrip())
                self.rows.note(f"{name}| {line.rstrip()}")
                if told and told(line.rstrip()):
                    self.end(process)

        readers = [
            threading.Thread(target=read, args=(process.stdout, lines, on_line)),
            threading.Thread(target=read, args=(process.stderr, errors, None)),
        ]
        for reader in readers:
            reader.start()
        try:
            status = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            status = None
            self.end(process)
        for reader in readers:
            reader.join(timeout=10)
        last = next((line for line in reversed(lines + errors) if line.strip()), "it said nothing")
        self.rows.note(f"{name}: status {status} in {time.monotonic() - began:.1f} s")
        return status, lines, last if status is not None else f"cut after {limit:.0f} s"

    def failed(self, name: str, status: int | None, last: str):
        if status != 0 and last != NOT_BEGUN:
            self.rows.add(f"{name}, whole command", {"failed": last}, f"FAILED: {last[:300]}")

    def end(self, process):
        for pid in [*descendants(process.pid), process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        process.wait()

    def ours(self, name: str, model: str, limit: float, *, rows=1, length=8192, documents=1, state="exact",
             order="both", steps=8, mesh=(), layers=None, recompute="none", device=None, sets=(), quiet=False):
        """Steps of `foveate bench train`; a row for each order of sums, named by it."""
        cpu = self.args.cpu
        sets = [*sets, *mesh, *([f"model.num_hidden_layers={layers}"] if layers else [])]
        if cpu:
            model, length, steps, device, state = "135m", length // 128, 2, "cpu", "f32"
            sets = [s for s in sets if not s.startswith("model")]
            sets += ["model.num_hidden_layers=2", "model.vocab_size=512"]
        command = [self.args.foveate, "bench", "train", "--json", "--model", model, "--rows", rows, "--len", length]
        command += ["--documents", documents, "--state", state, "--recompute", recompute, "--order", order]
        command += ["--steps", steps, *(["--ranks", 2] if mesh else [])]
        command += ["--device", device] if device else []
        for key in sets:
            command += ["--set", key]

        def come(line):
            if line.startswith("{") and not quiet:
                found = json.loads(line) | {"layers": layers}
                self.rows.add(f"{name}, {'fixed' if found['deterministic'] else 'any'} order", found, told(found))

        status, _, last = self.run(name, command, limit, come)
        self.failed(name, status, last)

    def peer(self, name: str, model: str, limit: float, *, length=8192, rows=1, documents=1, state="f32",
             mesh="context",
             steps=6, layers=None, recompute="none", quiet=False, more=()):
        """Steps of torchtitan; a row, or why there is none."""
        if self.site is None:
            self.rows.add(name, {"declined": "no torchtitan"}, "no torchtitan: name its wheel by --torchtitan")
            return
        if self.args.cpu:
            model, length, steps = "tiny", length // 128, 1
        command = [sys.executable, ROOT / "benches/train_gpu_peers.py", "--peers", "torchtitan",
                   "--torchtitan", self.site]
        command += ["--foveate", self.args.foveate, "--models", model, "--documents", documents, "--states", state]
        command += ["--recompute", recompute, "--rows", rows, "--len", length, "--steps", steps, "--seconds", limit - 8]
        command += ["--ranks", 2, "--mesh", mesh, *(["--layers", layers] if layers else [])]
        command += ["--device", "cpu"] if self.args.cpu else []

        def come(line):
            if line.startswith("{") and not quiet:
                found = json.loads(line) | {"layers": layers}
                self.rows.add(name, found, found.get("declined") or told(found))

        status, _, last = self.run(name, command, limit, come, more)
        if name not in self.rows.all and not quiet:
            self.failed(name, status, last)

    def beside(self, row: str, ours: str, theirs: str, bar: float, said: str, per_gpu=(1, 1)):
        """The ratio of two rows' tokens a second, each by so many GPUs."""
        rates = [self.rows.all.get(name, {}).get("tokens_per_s") for name in (ours, theirs)]
        if None in rates:
            return
        ratio = rates[0] / per_gpu[0] / (rates[1] / per_gpu[1])
        found = {"ratio": ratio, "bar": bar, "of": ours, "beside": theirs, "predicted": said, "met": ratio >= bar}
        self.rows.add(row, found, f"{ratio:.3f} (bar {bar}; predicted {said})")

    # Parts

    def prepare(self):
        """a checkpoint of 3B's sizes for `saves`, Triton's and our kernels compiled, side by
        side; nothing of what is timed is kept"""
        (self.work / "kernels").mkdir(exist_ok=True)
        peers = [
            lambda: self.compile_peer("documents", documents=DOCUMENTS),
            lambda: (self.compile_peer("causal"),
                     self.compile_peer("tensor", mesh="tensor", state="bf16", model="8b", length=8192)),
        ]
        if self.is_small:
            # Logits of a row of 64k tokens are half of such a card.
            one_by_one = peers
            peers = [lambda: [peer() for peer in one_by_one]]
        jobs = [*peers, self.compile_ours, lambda: self.checkpoint(self.work / "3b")]
        if "checks" in self.args.only:
            jobs.append(self.checks)
        with ThreadPoolExecutor(len(jobs)) as pool:
            for job in [pool.submit(job) for job in jobs]:
                job.result()
        # Algorithms of products are chosen by their time, and were timed beside other work.
        (self.work / "kernels" / "products.txt").unlink(missing_ok=True)

    def compile_peer(self, what, *, documents=1, mesh="context", state="f32", model="3b", length=LONG):
        # What is chosen by time goes into a folder of its own and is not used again; what Triton compiles is.
        folder = str(self.work / f"inductor-{what}")
        more = {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "6"} | self.segments
        self.peer(f"compile torchtitan, {what}", model, 100, length=length, documents=documents, mesh=mesh, state=state,
                  steps=1, layers=2, recompute=self.recompute if mesh == "context" else "none",
                  quiet=True, more=more.items())

    def compile_ours(self):
        sizes = {"steps": 1, "layers": 2, "sets": ["model.vocab_size=8192"], "quiet": True}
        for what, documents in (("causal", 1), ("documents", DOCUMENTS)):
            self.ours(f"compile, {what}", "3b", 60, length=LONG, documents=documents, mesh=["mesh.context=2"], **sizes)
        self.ours("compile, tensor", "8b", 60, state="bf16", mesh=["mesh.tensor=2"], **sizes)

    def documents(self):
        """CP 2, 3B, a row of 64k tokens in 16 documents: whole steps beside torchtitan's with FlexAttention"""
        peer = "torchtitan, CP 2 documents"
        self.peer(peer, "3b", 150, length=LONG, documents=DOCUMENTS, recompute=self.recompute,
                  more=self.segments.items())
        # What it refuses it refuses again; what memory or the driver refused it may not.
        if any(word in self.rows.all.get(peer, {}).get("declined", "") for word in ("CUDA", "memory")):
            self.segments = {}
            self.peer(peer, "3b", 150, length=LONG, documents=DOCUMENTS, recompute=self.recompute)
        self.ours("CP 2 documents", "3b", 90, length=LONG, documents=DOCUMENTS, mesh=["mesh.context=2"],
                  steps=6, recompute=self.recompute)
        for order in ("fixed", "any"):
            self.beside(f"CP 2 documents beside torchtitan, {order}", f"CP 2 documents, {order} order",
                        "torchtitan, CP 2 documents", 1.4, "1.15 to 1.3")
            self.waits(f"CP 2 documents waits, {order}", f"CP 2 documents, {order} order")

    def causal(self):
        """CP 2, 3B, a causal row of 64k tokens: whole steps beside torchtitan's, and what waits for transfers"""
        self.ours("CP 2 causal", "3b", 125, length=LONG, mesh=["mesh.context=2"], steps=4, recompute=self.recompute)
        self.peer("torchtitan, CP 2 causal", "3b", 130, length=LONG, steps=4, recompute=self.recompute,
                  more=self.segments.items())
        for order in ("fixed", "any"):
            self.beside(f"CP 2 causal beside torchtitan, {order}", f"CP 2 causal, {order} order",
                        "torchtitan, CP 2 causal", 1.15, "1.04 to 1.08")
            # Where torchtitan refused documents: PyTorch's ring, which masks no document.
            if "declined" in self.rows.all.get("torchtitan, CP 2 documents", {}):
                self.beside(f"CP 2 documents beside PyTorch's context_parallel, which is causal only, {order}",
                            f"CP 2 documents, {order} order", "torchtitan, CP 2 causal", 1.4, "2.5")
            self.waits(f"CP 2 causal waits, {order}", f"CP 2 causal, {order} order")

    def waits(self, row: str, of: str):
        """What of a profiled step waits for transfers: within attention, and between blocks."""
        found = self.rows.all.get(of, {})
        if not found.get("blocks"):
            return
        step, keys = found["profiled_ms"], found["keys_wait_ms"]
        between = step - sum(block["ms"] for block in found["blocks"])
        share = 100 * (keys + between) / step
        line = f"{keys:.1f} ms for keys and {between:.1f} between blocks of {step:.1f}: "
        line += f"{share:.1f} % (bar 6 %; predicted 1 to 4 %)"
        found = {"keys_ms": keys, "between_ms": between, "profiled_ms": step, "share": share / 100}
        self.rows.add(row, found | {"met": share <= 6}, line)

    def attention(self):
        """attention alone under CP 2 beside one GPU on the same row, by live entries: 4 layers of 3B"""
        sizes = {"length": LONG, "layers": 4, "sets": ["model.vocab_size=8192"], "steps": 4}
        devices = ["cpu", "cpu"] if self.args.cpu else ["cuda:0", "cuda:1"]
        kinds = (("documents", DOCUMENTS), ("causal", 1))
        with ThreadPoolExecutor(2) as pool:
            alone = [pool.submit(self.ours, f"attention on one GPU, {what}", "3b", 60,
                                 documents=n, device=device, **sizes)
                     for (what, n), device in zip(kinds, devices)]
            for job in alone:
                job.result()
        for what, n in kinds:
            self.ours(f"attention under CP 2, {what}", "3b", 45, documents=n, mesh=["mesh.context=2"], **sizes)
            for order in ("fixed", "any"):
                self.rates(what, order)

    def rates(self, what: str, order: str):
        both = [self.rows.all.get(f"attention {where}, {what}, {order} order", {})
                for where in ("on one GPU", "under CP 2")]
        rates = [attention_rates(found) for found in both]
        if None in rates:
            return
        one, two = rates
        ratio = two["both"] / one["both"]
        predicted = "0.85 to 0.93" if what == "documents" else "0.95"
        line = f"{ratio:.3f} of one GPU's rate (bar 0.90; predicted {predicted}): "
        line += ", ".join(f"{name} {two[name]:.0f} of {one[name]:.0f} TFLOP/s"
                          for name in ("forward", "backward", "both"))
        found = {"ratio": ratio, "bar": 0.9, "one": one, "two": two, "met": ratio >= 0.9}
        self.rows.add(f"attention, {what}, {order} order", found, line)

    def tensor(self):
        """TP 2, 8B's layers, beside torchtitan and beside one GPU; one GPU of 3B on the other card meanwhile"""
        layers = self.layers_8b
        one, other = ["cpu", "cpu"] if self.args.cpu else ["cuda:0", "cuda:1"]
        with ThreadPoolExecutor(2) as pool:
            jobs = [pool.submit(self.ours, "one GPU, 8B", "8b", 60, state="bf16", device=one, layers=layers),
                    pool.submit(self.ours, "one GPU, 3B", "3b", 60, device=other)]
            for job in jobs:
                job.result()
        self.ours("TP 2, 8B", "8b", 60, state="bf16", mesh=["mesh.tensor=2"], layers=layers)
        for order in ("fixed", "any"):
            self.beside(f"TP 2 beside one GPU, by GPU, {order}", f"TP 2, 8B, {order} order",
                        f"one GPU, 8B, {order} order", 0.8, "0.82 to 0.90", (2, 1))
        self.peer("torchtitan, TP 2 8B", "8b", 110, state="bf16", mesh="tensor", layers=layers)
        for order in ("fixed", "any"):
            self.beside(f"TP 2 beside torchtitan, {order}", f"TP 2, 8B, {order} order",
                        "torchtitan, TP 2 8B", 1.1, "1.1 to 1.2")

    def shard(self):
        """FSDP 2 of 1B, 3B and 8B"""
        layers = self.layers_8b
        self.ours("FSDP 2, 1B", "1b", 40, rows=2, state="bf16", mesh=["mesh.shard=2"], order="fixed")
        self.ours("FSDP 2, 3B", "3b", 45, rows=2, mesh=["mesh.shard=2"], order="fixed")
        self.ours("FSDP 2, 8B", "8b", 45, rows=2, state="bf16", mesh=["mesh.shard=2"], order="fixed", layers=layers)

    def simulated(self):
        """what `foveate shard simulate` says of the eight configurations, beside what was measured here; no GPU"""
        again = {"train.recompute": "none"}
        narrow = again | {"precision.state": "bf16"}
        long = {"data.len": LONG, "model.max_position_embeddings": LONG, "train.recompute": self.recompute}
        fewer = {"model.num_hidden_layers": self.layers_8b} if self.layers_8b else {}
        lens = ["--doc-lens", ",".join(map(str, self.lengths()))]
        for name, model, mesh, rows, settings, more in [
            ("one GPU, 3B", "3B", "shard=1", 1, again, []),
            ("one GPU, 8B", "8B", "shard=1", 1, narrow | fewer, []),
            ("FSDP 2, 1B", "1B", "shard=2", 2, narrow, []),
            ("FSDP 2, 3B", "3B", "shard=2", 2, again, []),
            ("FSDP 2, 8B", "8B", "shard=2", 2, narrow | fewer, []),
            ("TP 2, 8B", "8B", "tensor=2", 1, narrow | fewer, []),
            ("CP 2 causal", "3B", "context=2", 1, long, []),
            ("CP 2 documents", "3B", "context=2", 1, long, lens),
        ]:
            try:
                found = meshes.simulate(self.args.foveate, model, mesh, rows, self.machine, settings, more)
            except subprocess.CalledProcessError as e:
                self.rows.add(f"simulated, {name}", {"failed": str(e)}, f"FAILED: {e}")
                continue
            measured = self.rows.all.get(f"{name}, fixed order", {}).get("ms")
            off = 100 * (found["step_ms"] / measured - 1) if measured else None
            line = f"{found['step_ms']:.1f} ms simulated, "
            line += f"{measured:.1f} measured: {off:+.1f} % (bar 10 %)" if measured else "not measured"
            row = {"simulated_ms": found["step_ms"], "measured_ms": measured, "off_percent": off}
            self.rows.add(f"simulated, {name}", row | ({"met": abs(off) <= 10} if measured else {}), line)

    def lengths(self) -> list[int]:
        command = [self.args.foveate, "bench", "train", "--starts", "--model", "135m", "--rows", "1",
                   "--len", str(LONG), "--documents", str(DOCUMENTS)]
        [starts] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        return [end - start for start, end in zip(starts, [*starts[1:], LONG])]

    def saves(self):
        """what steps of 3B over two GPUs lose to a checkpoint that is written beside them"""
        place = self.work / "saving"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        write_texts(place, 300, 2000)
        self.checkpoint(self.work / "3b")
        every, length = (40, 8192) if not self.args.cpu else (8, 64)
        (place / "saving.toml").write_text(
            f'[run]\ndir = "{place / "run"}"\n[model]\ncheckpoint = "{self.work / "3b"}"\n'
            f'[attention]\nmask = "causal"\n'
            f'[data]\nfiles = ["*.txt"]\nlen = {length}\nheld_out = 0\n[train]\nsteps = 100000\nbatch_rows = 2\n'
            f'accumulate = 1\nsave_every = {every}\nkeep = 1\neval_every = 0\nasync_save = true\nrecompute = "none"\n'
            f'[mesh]\nshard = 2\n[precision]\nstate = "{"f32" if self.args.cpu else "exact"}"\n'
            f'[schedule]\nwarmup_steps = 0\n'
        )
        command = [self.args.foveate, "train", place / "saving.toml", "--ranks", 2, "--json"]
        command += ["--device", "cpu" if self.args.cpu else "cuda:0"]

        def is_over(line):
            # The next save waits for the first one, if it must; then there is nothing more to see.
            record = json.loads(line) if line.startswith("{") else {}
            return record.get("kind") == "save"

        _, _, last = self.run("saving", command, 110, is_over)
        shutil.rmtree(place / "run" / "checkpoints", ignore_errors=True)
        if last == NOT_BEGUN:
            return
        found = lost_to_save(place / "run" / "metrics.jsonl", every)
        if found is None:
            return self.rows.add("saving beside steps, 3B", {"failed": last}, f"FAILED: {last}")
        line = f"a step takes {found['quiet_s']:.3f} s; steps waited {found['waited_s']:.2f} s for the copy, "
        line += f"and {found['steps']} beside the writing took {found['slowed_s']:+.2f} s more: "
        line += f"{found['lost_s']:.2f} s in all (bar 2 s, aim 0.5 s); "
        line += f"whole after {found['seconds']:.1f} s" if found["seconds"] else "it was not whole when the run was cut"
        self.rows.add("saving beside steps, 3B", found | {"met": found["lost_s"] <= 2}, line)

    def checkpoint(self, folder: Path):
        """A checkpoint of 3B's sizes in bf16, of small numbers that repeat: to draw billions takes minutes."""
        if (folder / "config.json").exists():
            return
        folder.mkdir(exist_ok=True)
        sizes = (64, 96, 2, 4, 2, 16, 512) if self.args.cpu else (3072, 8192, 28, 24, 8, 128, 128256)
        hidden, wide, layers, heads, kv, dim, vocab = sizes
        shapes = {"model.embed_tokens.weight": [vocab, hidden], "model.norm.weight": [hidden]}
        for layer in range(layers):
            at = f"model.layers.{layer}"
            shapes |= {f"{at}.input_layernorm.weight": [hidden], f"{at}.post_attention_layernorm.weight": [hidden]}
            shapes |= {f"{at}.self_attn.{name}_proj.weight": shape for name, shape in
                       (("q", [heads * dim, hidden]), ("k", [kv * dim, hidden]),
                        ("v", [kv * dim, hidden]), ("o", [hidden, heads * dim]))}
            shapes |= {f"{at}.mlp.{name}_proj.weight": shape for name, shape in
                       (("gate", [wide, hidden]), ("up", [wide, hidden]), ("down", [hidden, wide]))}
        header, at = {}, 0
        for name, shape in shapes.items():
            size = 2 * (shape[0] * shape[1] if len(shape) == 2 else shape[0])
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        # The upper half of an f32 is a bf16. An odd number of them, so that rows differ.
        small = [0.02 * statistics.NormalDist().inv_cdf((i * 0.6180339887498949 + 0.5) % 1) for i in range(65537)]
        small = b"".join(struct.pack("<f", x)[2:] for x in small) * 64
        one = struct.pack("<f", 1.0)[2:] * 8192
        with open(folder / "model.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for name, entry in header.items():
                left = entry["data_offsets"][1] - entry["data_offsets"][0]
                source = one if len(entry["shape"]) == 1 else small
                while left > 0:
                    left -= file.write(source[:left])
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab,
                  "hidden_size": hidden,
                  "intermediate_size": wide, "num_hidden_layers": layers, "num_attention_heads": heads,
                  "num_key_value_heads": kv,
                  "head_dim": dim, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
                  "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "bfloat16"}
        characters = {character: number for number, character in enumerate(" etaoinshrdlu")}
        end = {"id": len(characters), "content": "</s>", "special": True, "single_word": False,
               "lstrip": False, "rstrip": False, "normalized": False}
        model = {"type": "BPE", "vocab": characters | {"</s>": end["id"]}, "merges": []}
        tokenizer = {"version": "1.0", "added_tokens": [end], "model": model}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": end["id"]}))

    def checks(self):
        """what is right or wrong on two GPUs: blocks by NCCL, meshes by NCCL, plans of batches, processes that die"""
        jobs = [(f"blocks, {what}", [self.args.tests, f"cuda::tests::{what}", "--test-threads", 1, "--nocapture"], 120)
                for what in ("context", "sharing", "tensor")] if self.args.tests else []
        meet = [sys.executable, ROOT / "scripts/gpu_shard.py", self.args.foveate, self.work / "shard", "pairs"]
        jobs.append(("runs by NCCL", meet, 150))

        def check(name, command, limit):
            status, lines, last = self.run(name, command, limit)
            ends, has = ("passed", "FAILED", "... ok"), ("skipped", "test result")
            told = [line for line in lines if line.endswith(ends) or any(words in line for words in has)]
            found = {"status": status, "lines": told}
            outcome = "passed" if status == 0 else f"FAILED ({status}): {last}"
            self.rows.add(f"check: {name}", found, f"{outcome}; {len(told)} lines")
            for line in told:
                print(f"    {line}", flush=True)

        with ThreadPoolExecutor(len(jobs)) as pool:
            for job in [pool.submit(check, *job) for job in jobs]:
                job.result()


def told(found: dict) -> str:
    """A row of steps in words."""
    gib = (found.get("peak_bytes") or 0) / 2**30
    ranks = found.get("ranks", 1)
    rate = found["tokens_per_s"]
    line = f"{found['ms']:.1f} ms a step, {rate:,.0f} tokens/s ({rate / ranks:,.0f} a GPU), {gib:.1f} GiB"
    rates = attention_rates(found)
    if rates:
        line += f", attention {rates['forward']:.0f} and {rates['backward']:.0f} TFLOP/s"
    if "warm_seconds" in found:
        line += f", warm after {found['warm_seconds']:.0f} s"
    return line + (f", the first step {found['first_step_s']:.0f} s" if "first_step_s" in found else "")


def attention_rates(found: dict) -> dict | None:
    """TFLOP/s of attention by live pairs, with what it sends and waits for."""
    blocks = {block["block"]: block for block in found.get("blocks") or []}
    if not {"attention", "attention backward"} <= blocks.keys():
        return None
    passes = {"forward": ("attention", "keys send"), "backward": ("attention backward", "gradients return")}
    of = {way: [blocks[name] for name in names if name in blocks] for way, names in passes.items()}
    of["both"] = of["forward"] + of["backward"]
    return {way: sum(b["flops"] for b in all) / sum(b["ms"] for b in all) * 1e-9 for way, all in of.items()}


PARTS = ("prepare", "documents", "causal", "attention", "tensor", "saves", "shard", "simulated")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("foveate", type=lambda text: Path(text).absolute(), nargs="?")
    parser.add_argument("out", type=lambda text: Path(text).absolute(), nargs="?")
    parser.add_argument("--tests", type=lambda text: Path(text).absolute(), help="the tests of foveate-nn-cuda, built")
    parser.add_argument("--torchtitan", type=lambda text: Path(text).absolute())
    parser.add_argument("--work", type=Path, default=Path("/tmp/foveate-pairs"), help="%(default)s")
    parser.add_argument("--seconds", type=float, default=1e6)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[*PARTS, "checks"],
                        help="parts, comma between")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    if args.list:
        for part in (*PARTS, "checks"):
            print(f"{part:10} {' '.join(getattr(Pairs, part).__doc__.split())}")
        return 0
    unknown = [part for part in args.only if part not in (*PARTS, "checks")]
    if unknown or args.foveate is None or args.out is None:
        unheard = f"there is no part {unknown[0]}; --list says which there are" if unknown else "give FOVEATE and OUT"
        sys.exit(f"gpu_pairs: {unheard}")
    pairs = Pairs(args)
    for part in PARTS:
        if part in args.only:
            try:
                getattr(pairs, part)()
            except Exception as error:  # The next part may still say something.
                pairs.rows.add(part, {"failed": repr(error)}, f"FAILED: {error!r}")
    if "checks" in args.only and "prepare" not in args.only:
        pairs.checks()
    new = {name: found for name, found in pairs.rows.all.items() if name not in pairs.rows.before}
    bad = [name for name, found in new.items() if "failed" in found or found.get("status", 0) != 0]
    missed, met = ([name for name, found in new.items() if found.get("met") is one] for one in (False, True))
    listed = lambda names: f": {'; '.join(names)}" if names else ""
    if missed:
        print(f"bars missed{listed(missed)}")
    print(f"{len(new)} rows, {len(bad)} FAILED{listed(bad)}; {len(met)} bars met, {len(missed)} missed", flush=True)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
