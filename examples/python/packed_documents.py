"""Documents packed in one row: attention inside each, a new layout in every step, no table of tiles.

python examples/python/packed_documents.py
"""

import torch

from foveate import Mask, flex_attention, varlen

torch.manual_seed(0)
heads, length, dim = 4, 1024, 32


def random_lengths() -> torch.Tensor:
    """Lengths of documents that fill a row."""
    ends = torch.cat([torch.randperm(length - 1)[:6].sort().values + 1, torch.tensor([length])])
    return ends.diff(prepend=torch.tensor([0]))


for step in range(3):
    lengths = random_lengths()
    ids = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    q, k, v = (torch.randn(1, heads, length, dim, requires_grad=True) for _ in range(3))

    # A mask without tables: it costs nothing to make, and serves every layer of the step.
    mask = Mask.causal() & Mask.document(ids)
    out = flex_attention(q, k, v, block_mask=mask)
    out.square().mean().backward()

    # The same as sequences one after another, by their offsets.
    offsets = torch.cat([torch.tensor([0]), lengths.cumsum(0)])
    rows = [t.detach()[0].transpose(0, 1) for t in (q, k, v)]
    again = varlen(rows[0], rows[1], rows[2], offsets, mask=Mask.causal())
    torch.testing.assert_close(out[0].transpose(0, 1), again, rtol=1e-5, atol=1e-5)
    print(f"step {step}: documents of {lengths.tolist()}")
