#!/usr/bin/env python3
"""Draws docs/images/speed.svg, the plot of the README, from the tables of docs/records.

    python3 benches/summary.py            # draws
    python3 benches/summary.py --check    # fails when the picture is not the one of the tables

A row of the plot is a row of a table; a bar spans the ratios of all columns of its pass. Needs
nothing but Python.
"""

import argparse
import math
import re
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "docs" / "records"
PICTURE = ROOT / "docs" / "images" / "speed.svg"

# Readable on white and on black: the picture has no background of its own.
TEXT, GRID = "#7d8590", "#7d859055"
COLOURS = {"forward": "#2f81c7", "backward": "#d9772b"}
LABELS, WIDTH, ROW, RIGHT = 250, 400, 19, 30
AXIS = (0.5, 32.0)
TICKS = (0.5, 1, 2, 4, 8, 16, 32)


def table(file: str, heading: str):
    """Head and rows of the first table under a heading of a record."""
    lines = iter((RECORDS / file).read_text().splitlines())
    if not any(line == heading for line in lines):
        sys.exit(f"{file} has no heading {heading!r}")
    rows = []
    for line in lines:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            break
        elif line.startswith("#"):
            sys.exit(f"{file} has no table under {heading!r}")
    return rows[0], rows[2:]


def numbers(cell: str):
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", cell)]


def cpu():
    """Each cell is `forward / forward + backward`."""
    _, rows = table("2026-11-cpu-beside-pytorch.md", "## f32, two threads")
    for name, *cells in rows:
        pairs = [numbers(cell) for cell in cells]
        yield name, {"forward": [p[0] for p in pairs], "backward": [p[1] for p in pairs]}


def gpu():
    """Each column is of one pass; rows without a × are rates, not ratios."""
    head, rows = table("2026-11-gpu-portable-family.md", "## Beside PyTorch")
    for name, *cells in rows:
        if "×" not in cells[0]:
            continue
        found = {"forward": [], "backward": []}
        for column, cell in zip(head[1:], cells, strict=True):
            found[column.split()[-1]] += numbers(cell)
        yield name, found


def hopper():
    """Columns are peers, rows sizes and cases: a bar spans the head dims 64 and 128 at length 8192.

    A cell of an earlier table counts where a later one has none.
    """
    found, seen = {}, set()
    for which, heading in (
        ("forward", "### The forward by sums, beside every peer"),
        ("forward", "### The forward beside every peer"),
        ("backward", "### The backward beside every peer"),
    ):
        head, rows = table("hopper.md", heading)
        for case, *cells in rows:
            size, name = re.fullmatch(r"D (\d+) (.+)", case).groups()
            # Other lengths and heads are in the record.
            if size not in ("64", "128") or "," in name:
                continue
            for column, cell in zip(head[1:], cells, strict=True):
                if column in ("before", "Foveate") or not cell or (which, case, column) in seen:
                    continue
                seen.add((which, case, column))
                row = found.setdefault(f"{name}, to {column}", {"forward": [], "backward": []})
                row[which] += [float(ratio) for ratio in re.findall(r"\(([\d.]+)\)", cell)]
    plain = {"full": 0, "causal": 1}
    return sorted(found.items(), key=lambda row: plain.get(row[0].split(",")[0], 2))


def across(ratio: float) -> float:
    """Where a ratio stands, on a logarithmic axis."""
    low, high = (math.log(end) for end in AXIS)
    return LABELS + WIDTH * (math.log(ratio) - low) / (high - low)


def text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{TEXT}"{more}>{escape(words)}</text>'


def group(title: str, second: str, rows, y: float):
    """A title, and two bars for each row; ends with where the next group begins."""
    parts = [text(8, y, title, ' font-weight="bold"')]
    x = LABELS
    for name, colour in (("forward", COLOURS["forward"]), (second, COLOURS["backward"])):
        parts.append(f'<rect x="{x}" y="{y - 8}" width="9" height="9" fill="{colour}"/>')
        parts.append(text(x + 13, y, name))
        x += 80
    y += 8
    for name, found in rows:
        parts.append(text(LABELS - 8, y + 12, name, ' text-anchor="end"'))
        for i, (which, ratios) in enumerate(found.items()):
            if not ratios:
                continue
            if not all(AXIS[0] <= ratio <= AXIS[1] for ratio in ratios):
                sys.exit(f"{name}: {ratios} are not all on the axis from {AXIS[0]} to {AXIS[1]}")
            left, right = across(min(ratios)), across(max(ratios))
            parts.append(
                f'<rect x="{left - 2:.1f}" y="{y + 2 + 7 * i}" width="{right - left + 4:.1f}" '
                f'height="6" rx="2" fill="{COLOURS[which]}"/>'
            )
        y += ROW
    return parts, y


def drawn() -> str:
    """The picture."""
    above, parts = 52, []
    body, y = group("CPU: 2 AVX-512 cores, f32, to PyTorch", "with backward", list(cpu()), above + 14)
    parts += body
    body, y = group("GPU: H200, bf16, Hopper kernels", "backward", hopper(), y + 24)
    parts += body
    body, y = group("Portable kernels, calls one at a time, the host's part included", "backward", list(gpu()), y + 24)
    parts += body
    for tick in TICKS:
        x = across(tick)
        line = f'stroke="{TEXT}" stroke-width="1.5"' if tick == 1 else f'stroke="{GRID}"'
        parts.insert(0, f'<line x1="{x:.1f}" y1="{above - 6}" x2="{x:.1f}" y2="{y}" {line}/>')
        parts.append(text(x, above - 12, f"{tick:g}×", ' text-anchor="middle"'))
    title = "The peer's time over Foveate's: right of 1× Foveate is faster"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LABELS + WIDTH + RIGHT} {y + 8}" '
        f'width="{LABELS + WIDTH + RIGHT}" font-family="sans-serif" font-size="11">\n'
        f"<title>{escape(title)}</title>\n"
        + "\n".join([text(8, 18, title, ' font-size="13"'), *parts])
        + "\n</svg>\n"
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    args = parser.parse_args()
    picture = drawn()
    if not args.check:
        PICTURE.parent.mkdir(parents=True, exist_ok=True)
        PICTURE.write_text(picture)
    elif not PICTURE.exists() or PICTURE.read_text() != picture:
        sys.exit(f"{PICTURE.relative_to(ROOT)} is not drawn from the records: run {sys.argv[0]}")


if __name__ == "__main__":
    main()
