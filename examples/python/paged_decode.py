"""Decoding with a cache in pages: three sequences of different lengths grow a token a step.

python examples/python/paged_decode.py
"""

import torch

from foveate import Mask, flex_attention, paged

torch.manual_seed(0)
heads, kv_heads, dim, page_size, pages = 8, 2, 32, 16, 24
keys, values = (torch.zeros(pages, kv_heads, page_size, dim) for _ in range(2))
free = torch.randperm(pages).tolist()
table = torch.full((3, 8), -1)
lengths = torch.tensor([40, 7, 0])
written: list[list[torch.Tensor]] = [[], [], []]


def append(b: int, at: int) -> None:
    """Writes a token's key and value where the table says, taking a new page where it needs one."""
    if at % page_size == 0:
        table[b, at // page_size] = free.pop()
    token = torch.randn(2, kv_heads, dim)
    page = int(table[b, at // page_size])
    keys[page, :, at % page_size], values[page, :, at % page_size] = token[0], token[1]
    written[b].append(token)


for b in range(3):
    for at in range(int(lengths[b])):
        append(b, at)

with torch.no_grad():
    for step in range(20):
        for b in range(3):
            append(b, int(lengths[b]))
        lengths += 1
        query = torch.randn(3, heads, 1, dim)
        out = paged(query, keys, values, table, lengths, mask=Mask.sliding_window(32) | Mask("kv < 4"))

# The last step of the first sequence, with its keys gathered.
cache = torch.stack(written[0], 2)[:, None]
position = int(lengths[0]) - 1
seen = paged(query, keys, values, table, lengths)[:1]
gathered = flex_attention(query[:1], cache[0], cache[1], enable_gqa=True)
torch.testing.assert_close(seen, gathered, rtol=1e-5, atol=1e-5)
print("out", tuple(out.shape), "lengths", lengths.tolist(), "pages left", len(free))
