#!/usr/bin/env python3
"""The tables of docs/sharding.md that `foveate shard simulate` makes.

    scripts/meshes.py [FOVEATE]     the program; target/debug/foveate when left out
"""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Models, and the steps that were measured.
GIVEN = tomllib.loads((ROOT / "scripts/meshes.toml").read_text())
# State as it was measured, steps of one batch.
EXACT = {"train.accumulate": 1, "precision.state": "exact"}


def simulate(program, model, mesh, rows, machine, settings, more=()):
    sizes = {f"model.{name}": value for name, value in GIVEN["models"][model].items()}
    recipe = ROOT / "recipes" / (sizes.pop("model.recipe") + ".toml")
    command = [program, "shard", "simulate", recipe, "--json", "--mesh", mesh, "--rows", str(rows)]
    command += ["--machine", machine, "--insist", *more]
    for name, value in (EXACT | sizes | settings).items():
        command += ["--set", f"{name}={str(value).lower()}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def table(*rows):
    for i, row in enumerate(rows):
        print("| " + " | ".join(str(cell) for cell in row) + " |")
        if i == 0:
            print("| " + " | ".join("---" for _ in row) + " |")
    print()


def beside_gpus(program):
    rows = [("model", "GPUs", "rows", "measured, ms", "simulated, ms", "off")]
    for step in GIVEN["steps"]:
        length, gpus = step["len"], step["mesh"].split("=")[1]
        settings = {"train.recompute": "none", "precision.state": step["state"], "data.len": length}
        settings |= {"model.max_position_embeddings": length} if length > 8192 else {}
        settings |= {"mesh.strategy": step["strategy"]} if "strategy" in step else {}
        more = ["--doc-lens", ",".join(map(str, step["doc_lens"]))] if "doc_lens" in step else []
        found = simulate(program, step["model"], step["mesh"], step["rows"], "h200x8", settings, more)["step_ms"]
        off = 100 * (found / step["ms"] - 1)
        batch = f"{step['rows']} × {length:,}"
        rows.append((step["name"], gpus, batch, f"{step['ms']:,.1f}", f"{found:,.1f}", f"{off:+.1f} %"))
    table(*rows)


def row(program, name, model, mesh, rows, settings, published):
    found = simulate(program, model, mesh, rows, "h100x8", settings)
    idle = {}
    for rank in found["ranks"]:
        for wait in rank["idle"]:
            queue = wait["queue"]
            idle[queue] = max(idle.get(queue, 0), 1e3 * wait["seconds"] / found["step_ms"])
    waits = ", ".join(f"{queue} {100 * share:.1f} %" for queue, share in idle.items() if share >= 0.001)
    return (
        name,
        mesh.replace(",", ", "),
        rows,
        found["recompute"],
        f"{found['step_ms'] / 1e3:.2f}",
        f"{found['tokens_per_s_per_gpu']:,.0f}",
        f"{found['tflops_dense']:.0f}",
        f"{found['memory_bytes'] / 2**30:.0f}",
        waits or "–",
        published,
    )


HEAD = (
    "model, GPUs", "mesh", "rows", "again", "step, s", "tokens/s a GPU", "TFLOP/s a GPU", "GiB",
    "not hidden", "published",
)


def many(program):
    auto, full = {"train.recompute": "auto"}, {"train.recompute": "full"}
    published = {8: "6,667 (FSDP, 2 rows, selective)", 128: "6,514 (the same)"}
    rows = [HEAD]
    for gpus in [8, 16, 32, 64, 128]:
        mesh = f"shard={gpus}"
        rows.append(row(program, f"8B, {gpus}", "8B", mesh, 2 * gpus, auto, published.get(gpus, "–")))
    rows.append(row(program, "8B, 64", "8B", "shard=8,tensor=8", 128, auto, "4,378; 4,809 (asynchronous)"))
    rows.append(row(program, "70B, 256", "70B", "shard=32,tensor=8", 512, full, "597; 652 (asynchronous)"))
    for batch in [128, 512, 1024]:
        rows.append(row(program, "405B, 1,024", "405B", "shard=128,tensor=8", batch, full, "100; 128 (512 GPUs, PP 8, Float8)"))
    table(*rows)
    rows = [HEAD]
    for context, length, published in [
        (4, 131072, "1,071 (Float8, CP 4 of 8)"),
        (8, 262144, "548 (Float8, CP 8)"),
        (16, 524288, "–"),
        (32, 1048576, "–"),
    ]:
        settings = full | {"data.len": length, "model.max_position_embeddings": length}
        rows.append(row(program, f"8B, {context}, {length // 1024}k", "8B", f"context={context}", 1, settings, published))
    table(*rows)


def main():
    program = sys.argv[1] if len(sys.argv) > 1 else ROOT / "target/debug/foveate"
    beside_gpus(program)
    many(program)


if __name__ == "__main__":
    main()
