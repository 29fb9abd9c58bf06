"""What checks of training on GPUs share: texts to train on, records of runs, and what is told of a check."""

import json
import random
import statistics

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


def lost_to_save(metrics, every):
    """What steps lost to the save behind step `every`: by the wall clock, from there to the last step that began
    before the save was whole, or the run was cut, less what as many quiet steps take. What is in no step's
    seconds they waited."""
    if not metrics.exists():
        return None
    records = [json.loads(line) for line in metrics.read_text().splitlines() if line.startswith("{")]
    steps = {record["step"]: record for record in records if record["kind"] == "step"}
    save = next((record for record in records if record["kind"] == "save" and record["step"] == every), None)
    # The first steps compile.
    quiet = [record["unix_time"] - steps[number - 1]["unix_time"]
             for number, record in steps.items() if 5 < number <= every]
    whole = save["unix_time"] if save else float("inf")
    during = [r for number, r in steps.items() if every < number <= 2 * every and r["unix_time"] - r["seconds"] < whole]
    if not quiet or not during:
        return None
    usual = statistics.median(quiet)
    wall = during[-1]["unix_time"] - steps[every]["unix_time"]
    waited, all_lost = wall - sum(record["seconds"] for record in during), wall - usual * len(during)
    found = {"quiet_s": usual, "steps": len(during), "waited_s": waited,
             "slowed_s": all_lost - waited, "lost_s": all_lost}
    return found | {"seconds": save["seconds"] if save else None, "record": save}
