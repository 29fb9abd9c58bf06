#!/usr/bin/env python3
"""Compares `foveate eval` and `generate` with transformers on checkpoints of the Llama layout.

    cargo build --release --bin foveate
    python3 benches/llama_peers.py

Each checkpoint is made by transformers, of random weights and with a tokenizer trained on this
repository's manuals: f32 and bf16 files, one and several, tied and untied embeddings, one and
several query heads to a key/value head, plain and scaled rotary positions. Both programs read it
from its folder, and compute in f32. Compared are the ids of the tokens, the mean loss of each text,
the log-probability of each token given those before it, and the ids of a greedy continuation. Where
continuations part, the two logits that decide must be as near to one another as log-probabilities
may be. The exit code is 1 when something differs by more.

transformers is installed, pinned, into the virtual environment of `cpu_peers.py`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from cpu_peers import ROOT, fail, install

TRANSFORMERS = "5.23.0"
# Nats by which mean losses, and single tokens' log-probabilities, may differ.
MEAN, SINGLE = 1e-5, 1e-4
# Tokens of a greedy continuation.
WRITTEN = 64
VOCAB = 600

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "f32, tied, grouped heads": {"tie_word_embeddings": True, "num_key_value_heads": 2},
    "f32, untied, in shards": {"num_key_value_heads": 6, "shards": True},
    "bf16, one key/value head": {"num_key_value_heads": 1, "dtype": "bfloat16"},
    "f32, head dim of its own": {"num_key_value_heads": 3, "head_dim": 24},
    "f32, llama3 positions": {"num_key_value_heads": 2, "rope": LLAMA3},
}


def install_transformers():
    """Installs transformers beside PyTorch, in the virtual environment that this runs in."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        if version("transformers") == TRANSFORMERS:
            return
    except PackageNotFoundError:
        pass
    print(f"installing transformers {TRANSFORMERS} into {sys.prefix}", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "install", "--quiet", f"transformers=={TRANSFORMERS}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
        fail(f"transformers {TRANSFORMERS} cannot be installed: {said[-1]}")


def texts():
    """Documents of a few hundred bytes, with characters of several bytes among them."""
    manual = (ROOT / "docs" / "semantics.md").read_text()
    parts = [manual[i : i + 700] for i in range(0, 2800, 700)]
    return parts + ["αβγ ≤ δ – naïve façade\n", "x"]


def save_tokenizer(folder: Path):
    """A byte-level BPE tokenizer with a token that begins and one that ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in sorted((ROOT / "docs").glob("*.md"))], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def save_checkpoint(folder: Path, seed: int, case: dict):
    """A random model; its weights spread wide enough for tokens to differ clearly."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    case = dict(case)
    shards, rope = case.pop("shards", False), case.pop("rope", None)
    dtype = getattr(torch, case.pop("dtype", "float32"))
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=6,
        max_position_embeddings=512,
        initializer_range=0.12,
        bos_token_id=0,
        eos_token_id=1,
        rope_parameters={"rope_theta": 10000.0, **(rope or {"rope_type": "default"})},
        **case,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).to(dtype)
    model.save_pretrained(folder, max_shard_size="300KB" if shards else "1GB")
    save_tokenizer(folder)


def foveate(program: Path, *words):
    """The lines of JSON that a command prints."""
    done = subprocess.run([program, *map(str, words), "--json"], capture_output=True, text=True)
    if done.returncode != 0:
        fail(f"{' '.join(map(str, words))}: {done.stderr.strip()}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def greedy(model, read: list):
    """The ids that follow, with the logits each was chosen by."""
    import torch

    ids, written = list(read), []
    for _ in range(WRITTEN):
        logits = model(torch.tensor([ids])).logits[0, -1]
        token = int(logits.argmax())
        if token == 1:
            break
        written.append((token, logits))
        ids.append(token)
    return written


def compare(program: Path, folder: Path, documents: list):
    """The largest differences of a checkpoint: of a mean loss, of a single token; and faults."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    mean, single, faults, agreed = 0.0, 0.0, [], 0
    for file, text in documents:
        *tokens, total = foveate(program, "eval", folder, file, "--per-token")
        ids = tokenizer(text)["input_ids"]
        if [token["token_id"] for token in tokens] != ids[1:]:
            faults.append(f"{file.name}: other tokens")
            continue
        log_p = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1].double(), -1)
        wanted = -log_p[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
        apart = [abs(token["nats"] - float(w)) for token, w in zip(tokens, wanted)]
        single = max(single, *apart)
        mean = max(mean, abs(total["loss"] - float(wanted.mean())))

        prompt = text[:40]
        options = ("--temperature", 0, "--max-tokens", WRITTEN)
        (found,) = foveate(program, "generate", folder, "--prompt", prompt, *options)
        if found["prompt_token_ids"] != tokenizer(prompt)["input_ids"]:
            faults.append(f"{file.name}: other tokens of the prompt")
            continue
        written = greedy(model, found["prompt_token_ids"])
        pairs = enumerate(zip(written, found["token_ids"]))
        parted = next(((i, ours) for i, ((theirs, _), ours) in pairs if theirs != ours), None)
        if parted is not None:
            at, ours = parted
            theirs, logits = written[at]
            gap = float(logits[theirs] - logits[ours])
            if gap > SINGLE:
                faults.append(f"{file.name}: token {at} of the text differs, {gap:.1e} apart")
            agreed += at
        elif len(written) != len(found["token_ids"]):
            faults.append(f"{file.name}: {len(written)} tokens, not {len(found['token_ids'])}")
        else:
            agreed += len(written)
    if mean > MEAN or single > SINGLE:
        faults.append(f"losses differ by {mean:.1e}, of single tokens by {single:.1e}")
    return mean, single, agreed, faults


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--filter", default="", help="a part of the names of checkpoints")
    parser.add_argument("--seed", type=int, default=1, help="of the weights")
    parser.add_argument("--venv", type=Path, default=ROOT / "target" / "cpu_peers" / "venv")
    parser.add_argument("--foveate", type=lambda text: Path(text).absolute(), default=ROOT / "target" / "release" / "foveate")
    args = parser.parse_args()
    if not args.foveate.exists():
        fail(f"{args.foveate} is missing; run: cargo build --release --bin foveate")
    install(args.venv)
    install_transformers()
    import torch
    from transformers.utils import logging

    torch.set_grad_enabled(False)
    # Threads that spin for work would wait longer than they compute.
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    print(f"{'checkpoint':<28} {'mean loss':>10} {'a token':>10} {'same text':>10}")
    wrong = 0
    for name, case in CASES.items():
        if args.filter not in name:
            continue
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "checkpoint"
            folder.mkdir()
            save_checkpoint(folder, args.seed, case)
            documents = [(Path(place) / f"{i}.txt", text) for i, text in enumerate(texts())]
            for file, text in documents:
                file.write_text(text)
            mean, single, agreed, faults = compare(args.foveate, folder, documents)
        print(f"{name:<28} {mean:>10.1e} {single:>10.1e} {agreed:>10}", flush=True)
        for fault in faults:
            print(f"llama_peers: {name}: {fault}", file=sys.stderr)
        wrong += len(faults)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
