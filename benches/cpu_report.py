"""Results of `cpu_peers.py` as a table, a picture for the terminal and one in SVG."""

import json
from pathlib import Path

WIDTH = 40
COLOURS = {"foveate": "#0072b2", "peer": "#d55e00"}


def read(file: Path):
    """The results in a file, the last of each case and number of threads."""
    if not file.exists():
        return []
    lines = [json.loads(text) for text in file.read_text().splitlines() if text.strip()]
    return list({(line["case"], line["threads"]): line for line in lines}.values())


def best_peer(line):
    """Name and times of the fastest peer by median, or None."""
    return min(line["peers"].items(), key=lambda peer: peer[1]["ms"], default=None)


def gflops(line, found) -> float:
    """Rate by live area, of the median."""
    return line["work"]["flops"] / found["ms"] / 1e6


def ratio(line):
    """Median of the best peer over ours, or None."""
    peer = best_peer(line)
    return peer and peer[1]["ms"] / line["foveate"]["ms"]


def bar_of(work):
    """The ratio that a case should reach; None where none is set."""
    forward = work["pass"] == "forward"
    if work["q_len"] == 1:
        return 2.0
    if work["mask"] not in ("full", "causal") or work["score"] != "none":
        return 2.0 if forward else 3.0
    if work["heads"] != work["heads_kv"]:
        return 1.25 if forward else 1.2
    if work["mask"] == "full":
        return 1.0 if work["len"] >= 2048 else None
    if work["len"] < 2048:
        return 1.7
    return 1.25 if forward else 1.2


def head() -> str:
    return (
        f"{'case':<52} {'thr':>3} {'ms':>9} {'min':>9} {'GFLOP/s':>8} {'peer':>10} {'ms':>9} "
        f"{'min':>9} {'GFLOP/s':>8} {'ratio':>6} {'bar':>6} {'error':>8} {'peer':>8} {'load':>5}"
    )


def row(line) -> str:
    """A line of the table."""
    ours, peer, wanted = line["foveate"], best_peer(line), bar_of(line["work"])
    text = f"{line['case']:<52} {line['threads']:>3} {ours['ms']:>9.2f} {ours['min_ms']:>9.2f} "
    text += f"{gflops(line, ours):>8.1f} "
    if peer:
        name, theirs = peer
        bar = f"{wanted:.2f}{' ' if ratio(line) >= wanted else '!'}" if wanted else "-"
        text += f"{name:>10} {theirs['ms']:>9.2f} {theirs['min_ms']:>9.2f} "
        text += f"{gflops(line, theirs):>8.1f} {ratio(line):>5.2f}x {bar:>6} "
        text += f"{ours['error']:>8.1e} {theirs['error']:>8.1e} "
    else:
        text += f"{'no peer':>10} {'':>9} {'':>9} {'':>8} {'':>6} {'':>6} {ours['error']:>8.1e} {'':>8} "
    text += f"{line['load']:>5.1f}"
    if "gemm_rate" in line:
        text += f"  {gflops(line, ours) / line['gemm_rate']:.0%} of a large product"
    if "read_rate" in line:
        rate = line["bytes"] / ours["ms"] / 1e6
        text += f"  {rate:.1f} GB/s, {rate / line['read_rate']:.0%} of a plain read"
    return text


def show(lines, svg: Path, table: bool = True):
    """Prints what was found, and draws it."""
    if table:
        print(head())
        for line in lines:
            print(row(line))
    print()
    for text in picture(lines):
        print(text)
    for text in within(lines):
        print(text)
    compared = [line for line in lines if ratio(line)]
    met = [ratio(line) >= (bar_of(line["work"]) or 0) for line in compared]
    print(f"\n{sum(met)} of {len(met)} cases reach their bar; drawn in {svg}")
    svg.parent.mkdir(parents=True, exist_ok=True)
    svg.write_text(drawn(compared))


def picture(lines):
    """Ratios as bars, one a case; `|` is the bar that is set."""
    compared = [line for line in lines if ratio(line)]
    most = max([3.0, *(ratio(line) for line in compared)])
    for line in compared:
        filled, wanted = round(ratio(line) / most * WIDTH), bar_of(line["work"])
        cells = ["█"] * filled + [" "] * (WIDTH - filled)
        if wanted:
            cells[min(WIDTH - 1, round(wanted / most * WIDTH))] = "|"
        name = f"{line['case']} ×{line['threads']}"
        yield f"{name:<55} {''.join(cells)} {ratio(line):.2f}x"


def within(lines):
    """16-bit beside f32, and a window beside its share of the full area, of our own times."""
    times = {(line["case"], line["threads"]): line for line in lines}
    for (case, threads), line in times.items():
        work = line["work"]
        full = times.get((case.replace(f"/{work['dtype']}/", "/f32/"), threads))
        if work["dtype"] != "f32" and full:
            speed = full["foveate"]["ms"] / line["foveate"]["ms"]
            yield f"{case} ×{threads}: {speed:.2f} of the speed in f32 (bar 0.80)"
        full = times.get((case.replace(f"window{work['width']}", "full"), threads))
        if work["mask"] == "window" and work["len"] >= 8192 and full:
            area = work["flops"] / full["work"]["flops"]
            share = line["foveate"]["ms"] / full["foveate"]["ms"] / area
            yield f"{case} ×{threads}: {share:.2f} times its share of the full area (bar 1.25)"


def drawn(lines) -> str:
    """Rates of ours and the best peer as bars, in SVG."""
    labels, width, bar, gap, top = 380, 480, 11, 8, 40
    most = max(
        [1.0, *(gflops(line, f) for line in lines for f in (line["foveate"], best_peer(line)[1]))]
    )
    height = top + len(lines) * (2 * bar + gap) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{labels + width + 120}" height="{height}" '
        'font-family="sans-serif" font-size="10"><rect width="100%" height="100%" fill="white"/>',
        '<text x="8" y="17" font-size="12">GFLOP/s by live area, median</text>',
    ]
    for i, (name, colour) in enumerate(
        (("foveate", COLOURS["foveate"]), ("PyTorch", COLOURS["peer"]))
    ):
        x = labels + 90 * i
        parts.append(f'<rect x="{x}" y="8" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14}" y="17">{name}</text>')
    y = top
    for line in lines:
        name, theirs = best_peer(line)
        title = f"{line['case']}, {line['threads']} threads"
        parts.append(f'<text x="8" y="{y + bar}">{title}</text>')
        ends = (
            (line["foveate"], "foveate", f"{ratio(line):.2f}x"),
            (theirs, "peer", name),
        )
        for found, who, said in ends:
            rate = gflops(line, found)
            long = width * rate / most
            parts.append(
                f'<rect x="{labels}" y="{y}" width="{long:.1f}" height="{bar - 2}" '
                f'fill="{COLOURS[who]}"/>'
                f'<text x="{labels + long + 4:.1f}" y="{y + bar - 3}">{rate:.0f} {said}</text>'
            )
            y += bar
        y += gap
    return "\n".join(parts) + "\n</svg>\n"
