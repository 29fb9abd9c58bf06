#!/usr/bin/env python3
"""Training steps of other trainers on GPUs, on the models and tokens of `foveate bench train`.

    python3 benches/train_gpu_peers.py --models 1b --documents 1,16 --states f32,bf16 > peers.jsonl
    foveate bench train --model 1b --documents 16 --peers peers.jsonl

Prints one JSON object a measurement. The peers:

- `loop` (`train_gpu_loop.py`): a plain loop, written for this comparison: compiled layers, the
  fastest of cuDNN's and FlashAttention's SDPA and FlexAttention, linear layer and cross-entropy in
  chunks, bf16 weights with f32 masters (`f32`) or nothing but bf16 (`bf16`), fused AdamW.
- `torchtitan` (`train_gpu_torchtitan.py`): the model, compiled layers, loss and activation
  checkpointing of torchtitan 0.2.2, with fused AdamW: f32 parameters under autocast (`f32`), or
  all of it bf16 (`bf16`). `--torchtitan` names its wheel or an unpacked folder; without it, pip
  downloads the wheel (0.5 MB).
- `transformers` (`train_gpu_transformers.py`): its Llama as the library runs it, for orientation:
  causal rows, f32 parameters under autocast or all of it bf16. Skipped where it is not installed.

Each is measured with nothing computed again, with torchtitan's selective activation checkpointing,
and with all layers computed again: the fastest that fits is the one to compare with.

`--ranks 2` runs torchtitan on two GPUs, by its FSDP2 (`--mesh shard`, the rows shared), its tensor
parallelism with sequence parallelism (`--mesh tensor`), or FSDP2 and its context parallelism with a
balance of load (`--mesh context`).

Documents are cut where `foveate bench train --starts` says. Each measurement is a process of its own:
a few steps to warm up, then the median of `--steps`.
"""

import argparse
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Built here, or in the bundle for machines with a GPU.
BUILT = [HERE.parent / "bin" / "foveate", HERE.parent / "target" / "release" / "foveate"]
FOVEATE = next(filter(Path.exists, BUILT), BUILT[-1])
# hidden, intermediate, layers, query heads, key/value heads, length of a head, words, tied
MODELS = {
    "tiny": (128, 384, 2, 4, 2, 32, 1000, True),
    "135m": (576, 1536, 30, 9, 3, 64, 49152, True),
    "1b": (2048, 8192, 16, 32, 8, 64, 128256, True),
    "3b": (3072, 8192, 28, 24, 8, 128, 128256, True),
    "8b": (4096, 14336, 32, 32, 8, 128, 128256, False),
}
WARM = 3
MESHES = ("shard", "tensor", "context")


def starts_of_rows(foveate: Path, rows: int, length: int, documents: int) -> list[list[int]]:
    """Where the documents of each row of the first batch of `foveate bench train` start; of no model."""
    if documents == 1:
        return [[0]] * rows
    if not foveate.exists():
        sys.exit(f"train_gpu_peers: {foveate} is missing; name it by --foveate")
    sizes = {"rows": rows, "len": length, "documents": documents}
    command = [foveate, "bench", "train", "--starts", "--model", "135m"]
    command += [part for name, n in sizes.items() for part in (f"--{name}", str(n))]
    ran = subprocess.run(command, text=True, capture_output=True)
    if ran.returncode != 0:
        sys.exit(f"train_gpu_peers: {foveate}: {ran.stderr.strip()}")
    return json.loads(ran.stdout)


def measured_arguments():
    """The arguments of one measurement."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, choices=MODELS)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--len", type=int, required=True)
    parser.add_argument("--documents", type=int, required=True)
    parser.add_argument("--starts", type=json.loads, required=True, help="of documents, by row")
    parser.add_argument("--state", required=True, choices=["f32", "bf16"])
    parser.add_argument("--recompute", required=True, choices=["none", "selective", "full"])
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--mesh", choices=MESHES, default="shard", help="of the ranks that a launcher starts")
    parser.add_argument("--layers", type=int, help="the first so many; all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--window", type=int, default=0, help="keys back in every other layer")
    parser.add_argument("--cap", type=float, default=0.0, help="of scores, by tanh")
    return parser.parse_args()


def named(model: str, layers: int | None) -> str:
    """A model of fewer layers is another one."""
    return f"{model}, {layers} layers" if layers else model


def attention_of(window: int, cap: float) -> dict:
    """As `foveate bench train` has them."""
    return {"window": window or None, "score": f"softcap({cap:g})" if cap else None}


def measure(peer: str, args, device: str, step, more: dict):
    """Runs steps and prints what they took."""
    import time

    import torch

    ranks = int(os.environ.get("WORLD_SIZE", 1))

    def wait():
        if device == "cuda":
            torch.cuda.synchronize()

    began = time.perf_counter()
    for _ in range(WARM):
        step()
    wait()
    warm_seconds, times = time.perf_counter() - began, []
    for _ in range(args.steps):
        began = time.perf_counter()
        loss = step()
        wait()
        times.append(time.perf_counter() - began)
    median = sorted(times)[len(times) // 2]
    loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
    if int(os.environ.get("RANK", 0)) > 0:
        return
    unsaid = ("device", "steps", "starts", "window", "cap", "layers", *(["mesh"] if ranks == 1 else []))
    line = {"peer": peer} | {k: v for k, v in vars(args).items() if k not in unsaid} | {"ranks": ranks}
    line["model"] = named(args.model, args.layers)
    line |= attention_of(args.window, args.cap)
    line |= {"ms": median * 1e3, "min_ms": min(times) * 1e3}
    line |= {"tokens_per_s": args.rows * args.len / median, "loss": loss.item()}
    line |= {"warm_seconds": warm_seconds, "torch": torch.__version__}
    if device == "cuda":
        line["peak_bytes"] = torch.cuda.max_memory_allocated()
        line["reserved_bytes"] = torch.cuda.max_memory_reserved()
        line["device"] = torch.cuda.get_device_name()
    print(json.dumps(line | more), flush=True)


def unpacked(named: str | None, into: Path) -> Path:
    """The folder to import torchtitan from."""
    if named is None:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, "--dest", into, "torchtitan==0.2.2"], check=True)
        [named] = map(str, into.glob("*.whl"))
    if Path(named).is_dir():
        return Path(named)
    with zipfile.ZipFile(named) as wheel:
        wheel.extractall(into / "site")
    return into / "site"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="1b", help=f"of {', '.join(MODELS)}; comma between")
    parser.add_argument("--peers", default="loop,torchtitan,transformers", help="comma between: %(default)s")
    parser.add_argument("--documents", default="1,16", help="of a row; comma between")
    parser.add_argument("--states", default="f32,bf16", help="comma between: %(default)s")
    parser.add_argument("--recompute", default="none,selective,full", help="comma between: %(default)s")
    parser.add_argument("--window", type=int, default=0, help="keys back in every other layer; the loop's")
    parser.add_argument("--cap", type=float, default=0.0, help="of scores, by tanh; the loop's")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--len", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=300.0, help="most for a measurement")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs, of torchtitan; %(default)s")
    parser.add_argument("--mesh", choices=MESHES, default="shard", help="what ranks share; %(default)s")
    parser.add_argument("--layers", type=int, help="take so many layers of a model, torchtitan's and the loop's")
    parser.add_argument("--torchtitan", metavar="WHEEL|FOLDER")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--foveate", type=lambda text: Path(text).absolute(), default=FOVEATE, help="%(default)s")
    args = parser.parse_args()
    if args.ranks > 1 and args.peers != "torchtitan":
        sys.exit("train_gpu_peers: several ranks are torchtitan's: give --peers torchtitan")
    if args.layers is not None and "transformers" in args.peers.split(","):
        sys.exit("train_gpu_peers: fewer layers are torchtitan's and the loop's: give --peers loop,torchtitan")
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        site = None
        for model in args.models.split(","):
            for documents in args.documents.split(","):
                for state in args.states.split(","):
                    for recompute in args.recompute.split(","):
                        for peer in args.peers.split(","):
                            if peer == "torchtitan" and site is None:
                                site = unpacked(args.torchtitan, Path(folder))
                            failed |= not one(peer, model, documents, (state, recompute), args, site)
    return int(failed)


def declined(peer: str, recompute: str, documents: int, said: dict) -> str | None:
    """Why a peer has no such measurement; none where it has."""
    if peer != "loop" and any(said.values()):
        return "it has no windows and no caps"
    if peer != "torchtitan" and recompute == "selective":
        return "it computes layers again whole, or not"
    if peer == "transformers" and documents > 1:
        return "it is measured on causal rows alone"
    if peer == "transformers" and importlib.util.find_spec(peer) is None:
        return "transformers is not installed (pip install transformers)"
    return None


def one(peer: str, model: str, documents: str, how: tuple[str, str], args, site: Path | None) -> bool:
    """One measurement, of a state and of what is computed again; a line that says why where there is none."""
    state, recompute = how
    case = {"model": model, "rows": args.rows, "len": args.len, "documents": int(documents)}
    case |= {"state": state, "recompute": recompute}
    said = attention_of(args.window, args.cap)
    if why := declined(peer, recompute, int(documents), said):
        print(json.dumps({"peer": peer} | case | said | {"declined": why}), flush=True)
        return True
    starts = starts_of_rows(args.foveate, args.rows, args.len, int(documents))
    more = {"starts": json.dumps(starts), "steps": args.steps, "device": args.device}
    if args.layers is not None:
        more["layers"] = args.layers
    if args.ranks > 1:
        more["mesh"] = args.mesh
    command = [sys.executable, HERE / f"train_gpu_{peer}.py"]
    if peer == "loop":
        more |= {"window": args.window, "cap": args.cap}
    case |= said
    for name, value in ({k: v for k, v in case.items() if k not in said} | more).items():
        command += [f"--{name}", str(value)]
    if peer == "torchtitan":
        command += ["--site", site]
    ended, out, errors = on_ranks(command, args.ranks, args.seconds)
    if ended:
        print(out, end="", flush=True)
        return True
    if ended is None:
        why = f"it took more than {args.seconds:.0f} s"
    else:
        # What went wrong on one rank, and that another lost it.
        lines = errors.strip().splitlines() or ["it ended without a word"]
        why = next((line for line in lines if "Error: " in line), lines[-1])
        print(errors, file=sys.stderr)
    case["model"] = named(model, args.layers)
    print(json.dumps({"peer": peer} | case | {"declined": why[:300]}), flush=True)
    # Which of the settings fit is part of what is asked.
    return "OutOfMemoryError" in why


def on_ranks(command: list, ranks: int, seconds: float) -> tuple[bool | None, str, str]:
    """Runs a command as so many ranks of this host: whether all ended well, none after `seconds`, what the first
    printed, and the errors of all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    try:
        for rank in range(ranks):
            said = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment = os.environ | {name: str(value) for name, value in said.items()} if ranks > 1 else None
            out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            processes.append(subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, text=True, env=environment))
        with ThreadPoolExecutor(ranks) as pool:
            ends = [pool.submit(communicate, process, processes, seconds) for process in processes]
            texts = [end.result() for end in ends]
    finally:
        for process in processes:
            process.kill()
    if any(text is None for text in texts):
        return None, "", ""
    errors = "\n".join(text[1] for text in texts)
    return all(process.returncode == 0 for process in processes), texts[0][0], errors


def communicate(process, all_of_them, seconds: float) -> tuple[str, str] | None:
    """What a rank said; the others end with one that failed, and have a while to say why."""
    try:
        said = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return None
    if process.returncode != 0:
        for other in all_of_them:
            if other is not process:
                threading.Timer(5.0, other.kill).start()
    return said


if __name__ == "__main__":
    sys.exit(main())
