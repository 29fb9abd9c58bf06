"""What checks of training on GPUs share: texts to train on, records of runs, and what is told of a check."""

import json
import random

_failures = []


def tell(name, ok, detail=""):
    """One line on a check."""
    if not ok:
        _failures.append(name)
    print(f"{name}: {detail + ' ' if detail else ''}{'passed' if ok else 'FAILED'}", flush=True)


def status():
    """The exit status of all checks."""
    return int(bool(_failures))


def write_texts(folder, texts, most_words):
    """Texts of random words, always the same ones."""
    letters = random.Random(3)
    words = ["".join(letters.choices("etaoinshrdlu", k=letters.randint(1, 8))) for _ in range(400)]
    for i in range(texts):
        text = " ".join(letters.choices(words, k=letters.randint(30, most_words)))
        (folder / f"{i:02}.txt").write_text(text)


def steps(run):
    """The records of the steps of the run in a folder, by number: of a step taken twice the later one."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines if line.startswith("{")]
    return {r["step"]: r for r in records if "grad_norm" in r}


def losses(run):
    """The losses of its steps, in order."""
    return [r["loss"] for _, r in sorted(steps(run).items())]
