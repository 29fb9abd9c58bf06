"""The workloads of `foveate bench` for PyTorch: the same numbers, masks and scores.

A case is what `foveate bench cpu --list --json` and `foveate bench gpu --list --json` print; the
Rust side of it, with the meaning of every field, is `crates/foveate-cli/src/bench/workload.rs`.
"""

import torch

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
MASK32 = 0xFFFFFFFF
COLUMNS = 64  # of the grid of neighbourhoods
BLOCK = 128  # queries and keys of a block of those that are seen or not


def mix(x, y: torch.Tensor) -> torch.Tensor:
    """The counter-based hash of Foveate's mods, on int64 tensors that hold 32-bit values."""
    z = (x * 0x9E3779B1 + y + 0x7F4A7C15) & MASK32
    z = ((z ^ (z >> 16)) * 0x85EBCA6B) & MASK32
    z = ((z ^ (z >> 13)) * 0xC2B2AE35) & MASK32
    return z ^ (z >> 16)


def random(seed: int, shape, dtype, device="cpu") -> torch.Tensor:
    """Element i is the sum of the four bytes of mix(seed, i), centred, with variance 1."""
    count = 1
    for n in shape:
        count *= n
    bits = mix(seed, torch.arange(count, device=device, dtype=torch.int64))
    total = (bits & 255) + (bits >> 8 & 255) + (bits >> 16 & 255) + (bits >> 24)
    deviation = (4 * (256**2 - 1) / 12) ** 0.5
    return ((total.to(torch.float32) - 510.0) / deviation).to(dtype).reshape(shape)


def operands(case, device="cpu"):
    """q, k, v and the gradient of the output."""
    q_shape = (case["batch"], case["heads"], case["q_len"], case["dim"])
    k_shape = (case["batch"], case["heads_kv"], case["len"], case["dim"])
    dim_v = case.get("dim_v", case["dim"])
    shapes = (q_shape, k_shape, (*k_shape[:3], dim_v), (*q_shape[:3], dim_v))
    dtype = DTYPES[case["dtype"]]
    return [random(seed, shape, dtype, device) for seed, shape in enumerate(shapes, 1)]


def documents_of(case, device="cpu"):
    """The document of each position, or None."""
    if case["mask"] == "documents":
        return torch.arange(case["len"], device=device) * case["width"] // case["len"]
    if case["mask"] == "ragged":
        lengths = 128 + mix(6, torch.arange(case["len"] // 128 + 1, device=device)) % 1921
        return torch.searchsorted(lengths.cumsum(0), torch.arange(case["len"], device=device), right=True)
    return None


def mask_of(case, documents):
    """The mask_mod of a case, or None."""
    kind, width = case["mask"], case["width"]
    if kind == "full":
        return None
    if kind == "causal":
        return lambda b, h, q, kv: q >= kv
    if kind == "window":
        return lambda b, h, q, kv: (q >= kv) & (q - kv < width)
    if kind == "prefix":
        return lambda b, h, q, kv: (q >= kv) | (kv < width)
    if kind in ("documents", "ragged"):
        return lambda b, h, q, kv: (q >= kv) & (documents[q] == documents[kv])
    if kind == "neighbourhood":
        half, rows = width // 2, case["len"] // COLUMNS

        def near(q, kv, size):
            return torch.abs(torch.clamp(q, half, size - 1 - half) - kv) <= half

        return lambda b, h, q, kv: near(q // COLUMNS, kv // COLUMNS, rows) & near(q % COLUMNS, kv % COLUMNS, COLUMNS)
    if kind == "blocks":
        return lambda b, h, q, kv: (mix(q // BLOCK, kv // BLOCK) % width == 0) | (q // BLOCK == kv // BLOCK)
    raise ValueError(f"no mask {kind!r}")


def score_of(case, bias=None):
    """The score_mod of a case, or None."""
    kind, heads = case["score"], case["heads"]
    if kind == "none":
        return None
    if kind == "alibi":
        return lambda s, b, h, q, kv: s - torch.exp2(-(h + 1) * (8.0 / heads)) * torch.abs(q - kv)
    if kind == "softcap":
        return lambda s, b, h, q, kv: 30.0 * torch.tanh(s / 30.0)
    if kind == "relative":
        reach = (bias.shape[1] - 1) // 2
        return lambda s, b, h, q, kv: s + bias[h, torch.clamp(q - kv, -reach, reach) + reach]
    raise ValueError(f"no score {kind!r}")


def intervals_of(case, device="cpu"):
    """The mask of a case as sorted ends of intervals, int32 `[odd n, q_len]`: query i sees the keys
    [0, e[0][i]), [e[1][i], e[2][i]), and so on."""
    kind, width = case["mask"], case["width"]
    q = torch.arange(case["q_len"], device=device)
    none = torch.zeros_like(q)
    after = torch.clamp(q + 1, max=case["len"])
    if kind == "full":
        ends = [torch.full_like(q, case["len"])]
    elif kind == "causal":
        ends = [after]
    elif kind == "window":
        ends = [none, torch.clamp(q - width + 1, min=0, max=case["len"]), after]
    elif kind == "prefix":
        ends = [torch.clamp(after, min=min(width, case["len"]))]
    elif kind in ("documents", "ragged"):
        documents = documents_of(case, device)
        ends = [none, torch.searchsorted(documents, documents[q]), after]
    elif kind == "blocks":
        seen = mask_of(case, None)(0, 0, q[:, None], torch.arange(case["len"], device=device))
        edges = seen.to(torch.int8).diff(dim=1, prepend=none[:, None].to(torch.int8), append=none[:, None].to(torch.int8))
        # Starts and ends of stretches, in turn; rows of fewer end in empty ones.
        at = torch.where(edges != 0, torch.arange(case["len"] + 1, device=device), case["len"]).sort(dim=1).values
        most = int((edges != 0).sum(dim=1).max())
        ends = [none, *at[:, :most].T.contiguous()]
    else:
        raise ValueError(f"no mask {kind!r}")
    return torch.stack(ends).to(torch.int32)
