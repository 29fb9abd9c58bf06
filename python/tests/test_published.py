"""Masks and scores that papers and libraries publish, in words of our own, beside dense attention: forward and
gradients, uncompiled and compiled; in float32 on the CPU and bfloat16 on CUDA.
"""

import math

import pytest
import torch
from compiled import Backend
from reference import NO_LOGSIGMOID, attention, close, dense

from foveate import Mask, flex_attention

BATCH, HEADS, LENGTH, DIM = 2, 4, 48, 16
#: Positions are an image of 6 rows of 8, or 3 images, frames or documents.
ROWS, COLUMNS, TILE = 6, 8, 2
IDS = torch.repeat_interleave(torch.arange(3), torch.tensor([20, 11, 17]))
STARTS = torch.tensor([0, 20, 31])
SEEN = torch.arange(LENGTH)[None] < torch.tensor([48, 37])[:, None]
MIDDLE = torch.tensor([5, 30]), torch.tensor([9, 44])
GLOBAL = torch.arange(LENGTH) % 13 == 4
PARENTS = [0, 0, 0, 1, 1, 2, 5, 5]
ANCESTORS = torch.eye(len(PARENTS), dtype=torch.bool)
for node, parent in enumerate(PARENTS[1:], start=1):
    ANCESTORS[node] |= ANCESTORS[parent]
BLOCKS = torch.rand(BATCH, HEADS, 6, 6, generator=torch.Generator().manual_seed(3)) < 0.4


def spread(x):
    """The bits of a number, a zero between each two."""
    x = (x | (x << 8)) & 0x00FF00FF
    x = (x | (x << 4)) & 0x0F0F0F0F
    x = (x | (x << 2)) & 0x33333333
    return (x | (x << 1)) & 0x55555555


def gathered(x):
    """Every other bit of a number, as one number."""
    x = x & 0x55555555
    x = (x | (x >> 1)) & 0x33333333
    x = (x | (x >> 2)) & 0x0F0F0F0F
    return (x | (x >> 4)) & 0x00FF00FF


def by_rows(i):
    return i // COLUMNS, i % COLUMNS


def by_tiles(i):
    tile, inner = i // (TILE * TILE), i % (TILE * TILE)
    return tile // (COLUMNS // TILE) * TILE + inner // TILE, tile % (COLUMNS // TILE) * TILE + inner % TILE


def by_bits(i):
    return gathered(i >> 1), gathered(i)


def neighbourhood(place, radius=1):
    """Neighbourhood attention: the window of a pixel, moved inwards at borders."""

    def near(b, h, q, kv):
        (row, column), (to_row, to_column) = place(q), place(kv)
        rows = (row.clamp(radius, ROWS - 1 - radius) - to_row).abs() <= radius
        return rows & ((column.clamp(radius, COLUMNS - 1 - radius) - to_column).abs() <= radius)

    return near


def sliding_tiles(b, h, q, kv):
    """Tiles see the tiles around them; what follows the image is text, which all see."""
    image = 40
    (row, column), (to_row, to_column) = ((i // 4 // (COLUMNS // TILE), i // 4 % (COLUMNS // TILE)) for i in (q, kv))
    near = ((row.clamp(1, 1) - to_row).abs() <= 1) & ((column.clamp(1, 2) - to_column).abs() <= 1)
    return ((q < image) & (kv < image) & near) | (kv >= image) | (q >= image)


def block_diffusion(b, h, q, kv):
    """The first half is noised and sees its block, and of the clean second half what lies before."""
    noised, to_noised = q < LENGTH // 2, kv < LENGTH // 2
    block, to_block = q % (LENGTH // 2) // 5, kv % (LENGTH // 2) // 5
    return ((block == to_block) & (noised == to_noised)) | (
        ~to_noised & torch.where(noised, block > to_block, block >= to_block)
    )


def tree(b, h, q, kv):
    """Drafts see what precedes them all, and their ancestors in a tree of drafts."""
    nodes = len(PARENTS)
    inside = ANCESTORS[q.clamp(max=nodes - 1), (kv - 16).clamp(0, nodes - 1)]
    return torch.where(kv < 16, q >= 0, (kv - 16 < nodes) & inside)


def restarted(b, h, q, kv):
    """A window of positions that are counted within each document."""
    offset, to_offset = q - STARTS[IDS[q]], kv - STARTS[IDS[kv]]
    return (IDS[q] == IDS[kv]) & (offset >= to_offset) & (offset - to_offset < 6)


MASKS = {
    "causal": lambda b, h, q, kv: q >= kv,
    "window": lambda b, h, q, kv: (q >= kv) & (q - kv <= 7),
    "dilated window": lambda b, h, q, kv: ((q - kv).abs() <= 9) & ((q - kv) % 3 == 0),
    "prefix": lambda b, h, q, kv: (kv < 11) | (q >= kv),
    "prefixes of a batch": lambda b, h, q, kv: (kv < MIDDLE[0][b]) | (q >= kv),
    "shared prefix": lambda b, h, q, kv: (kv < 12) | ((q >= kv) & ((q - 12) // 9 == (kv - 12) // 9)),
    "documents": lambda b, h, q, kv: IDS[q] == IDS[kv],
    "causal documents": lambda b, h, q, kv: (IDS[q] == IDS[kv]) & (q >= kv),
    "documents with positions of their own": restarted,
    "packed batch": lambda b, h, q, kv: (q // 12 == kv // 12) & (q % 12 >= kv % 12),
    "blocks": lambda b, h, q, kv: (q // 10 == kv // 10) & (q >= kv),
    "chunks and a window": lambda b, h, q, kv: torch.where(h % 2 == 0, q // 16 == kv // 16, q - kv < 9) & (q >= kv),
    "padding on the right": lambda b, h, q, kv: SEEN[b, kv] & (q >= kv),
    "padding on the left": lambda b, h, q, kv: SEEN.flip(1)[b, kv] & (q >= kv),
    "global tokens": lambda b, h, q, kv: (GLOBAL[q] | GLOBAL[kv]) | ((q - kv).abs() <= 4),
    "text that sees images": lambda b, h, q, kv: (q >= STARTS[kv // 16]) & (q < STARTS[kv // 16] + 20),
    "images in a causal text": lambda b, h, q, kv: (q >= kv) | ((q >= MIDDLE[0][b]) & (q < MIDDLE[1][b]) & (kv >= MIDDLE[0][b]) & (kv < MIDDLE[1][b])),
    "neighbourhood": neighbourhood(by_rows),
    "neighbourhood, tiled": neighbourhood(by_tiles),
    "neighbourhood, in Morton order": neighbourhood(lambda i: tuple(x.clamp(max=5) for x in by_bits(i))),
    "Morton order": lambda b, h, q, kv: ((spread(q // 8) << 1) | spread(q % 8)) >= ((spread(kv // 8) << 1) | spread(kv % 8)),
    "sliding tiles": sliding_tiles,
    "frames": lambda b, h, q, kv: (q < 6) | (kv < 6) | ((q - kv).abs() < 16),
    "the same pixel of frames": lambda b, h, q, kv: (q < 6) | (kv < 6) | (((q - 6) % 14 - (kv - 6) % 14).abs() < 2),
    "block diffusion": block_diffusion,
    "tree of drafts": tree,
    "blocks of a table": lambda b, h, q, kv: BLOCKS[b, h, q // 8, kv // 8] | (q == kv),
}  # fmt: skip


@pytest.fixture
def tables():
    """Captured tensors of scores by name; those that learn require grad."""
    generator = torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    rates = 10000 ** (-2 * torch.arange(16) / 32)
    made = {
        "slopes": 2.0 ** (-8 * torch.arange(1, HEADS + 1) / HEADS),
        "waves": torch.cos((torch.arange(2 * LENGTH) - LENGTH)[:, None] * rates).sum(1),
        "hops": torch.randint(0, 5, (BATCH, LENGTH, LENGTH), generator=generator),
        "of hops": draw(HEADS, 5).requires_grad_(),
        "edges": torch.randint(0, 7, (BATCH, LENGTH, LENGTH, 3), generator=generator),
        "of edges": draw(3, 7).requires_grad_(),
        "buckets": draw(32, HEADS).requires_grad_(),
        "q rope": draw(BATCH, HEADS, LENGTH, 8),
        "k rope": draw(BATCH, 1, LENGTH, 8),
        "by row": draw(HEADS, LENGTH, COLUMNS).requires_grad_(),
        "gate": draw(BATCH, LENGTH).requires_grad_(),
    }
    return made


def bucket(distance):
    """T5's buckets of the distance to a key before: each of the first 16, then wider and wider ones."""
    far = 16 + (torch.log(distance.clamp(min=1) / 16) / math.log(128 / 16) * 16).int()
    return torch.where(distance < 16, distance, far.clamp(max=31))


#: By name: a score over tables, and the tables that learn.
SCORES = {
    "ALiBi": (lambda t: lambda s, b, h, q, kv: s + (kv - q) * t["slopes"][h], []),
    "soft cap": (lambda t: lambda s, b, h, q, kv: 5 * torch.tanh(s / 5), []),
    "relu in place of softmax": (lambda t: lambda s, b, h, q, kv: torch.log(torch.relu(s) + 1e-6), []),
    "Sandwich": (lambda t: lambda s, b, h, q, kv: s + t["waves"][q - kv + LENGTH] * HEADS / (8 * (h + 1)), []),
    "T5": (lambda t: lambda s, b, h, q, kv: s + t["buckets"][bucket((q - kv).clamp(min=0)), h], ["buckets"]),
    "Graphormer's distances": (lambda t: lambda s, b, h, q, kv: s + t["of hops"][h, t["hops"][b, q, kv]], ["of hops"]),
    "Graphormer's edges": (
        lambda t: lambda s, b, h, q, kv: s + sum(t["of edges"][n, t["edges"][b, q, kv, n]] for n in range(3)) / 3,
        ["of edges"],
    ),
    "rotated halves beside latent keys": (lambda t: lambda s, b, h, q, kv: s + 0.1 * torch.dot(t["q rope"][b, h, q], t["k rope"][b, 0, kv]), []),
    "decomposed relative positions": (lambda t: lambda s, b, h, q, kv: s + t["by row"][h, q, kv % COLUMNS], ["by row"]),
    "gated keys": (lambda t: lambda s, b, h, q, kv: s + torch.nn.functional.logsigmoid(t["gate"][b, kv]), ["gate"]),
}  # fmt: skip


#: What PyTorch 2.10 does not compile, of its own attention either: `sum` of a generator, rows read at traced indices.
NOT_IN_2_10 = ("Graphormer's edges", "rotated halves beside latent keys")


def agrees(score, mask, learned, kinds=("uncompiled", "compiled")):
    """Attention, uncompiled and compiled, and the gradients of operands and tables, are those of dense attention."""
    device = torch.get_default_device().type
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    generator = torch.Generator().manual_seed(7)
    draw = lambda heads: torch.randn(BATCH, heads, LENGTH, DIM, generator=generator).to(dtype)
    q, k, v, d_out = draw(HEADS), draw(2), draw(2), draw(HEADS)
    inputs = [t.requires_grad_() for t in (q, k, v)] + learned
    seen = None if mask is None else dense(mask, (BATCH, HEADS, LENGTH, LENGTH), device=q.device)
    results = []
    for of in (torch.float64, dtype):
        out = attention(q, k, v, score, seen, dtype=of)[0]
        results.append([out, *torch.autograd.grad(out, inputs, d_out.to(of))])
    call = lambda: flex_attention(q, k, v, score, None if mask is None else Mask(mask), enable_gqa=True)
    for kind in kinds:
        out = (call if kind == "uncompiled" else Backend().compile(call))()
        ours = [out, *torch.autograd.grad(out, inputs, d_out)]
        for name, mine, gold, low in zip(["out", "dq", "dk", "dv", "table"], ours, *results):
            close(f"{kind} {name}", mine, gold, dtype, BATCH * HEADS * LENGTH, low)


@pytest.mark.parametrize("name", MASKS)
def test_a_published_mask_is_dense_attentions(name):
    agrees(None, MASKS[name], [])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=NO_LOGSIGMOID) if name == "gated keys" else name for name in SCORES]
)
def test_a_published_score_is_dense_attentions(name, tables):
    make, learned = SCORES[name]
    old = torch.__version__.startswith("2.10") and name in NOT_IN_2_10
    agrees(make(tables), MASKS["causal"], [tables[n] for n in learned], ("uncompiled", "compiled")[: 2 - old])
