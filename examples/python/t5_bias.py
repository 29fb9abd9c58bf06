"""T5's bias of buckets of distances: integer and logarithmic arithmetic on indices, a learned table.

python examples/python/t5_bias.py
"""

import math
from typing import Any

import torch

from foveate import flex_attention

torch.manual_seed(0)
heads, length, dim, buckets, farthest = 4, 200, 16, 32, 128
q, k, v = (torch.randn(2, heads, length, dim, requires_grad=True) for _ in range(3))
table = torch.nn.Parameter(torch.randn(buckets, heads))


def bucket_of(distance: Any) -> Any:
    """T5's bucket of a distance in both directions: one for each near one, wider ones further away."""
    half, exact = buckets // 2, buckets // 4
    away = torch.abs(distance)
    wide = exact + (torch.log(away.clamp(min=1) / exact) / math.log(farthest / exact) * (half - exact)).long()
    side = torch.where(distance > 0, half, 0)
    return side + torch.where(away < exact, away, torch.clamp(wide, max=half - 1))


def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + table[bucket_of(kv_idx - q_idx), h]


out = flex_attention(q, k, v, biased, scale=1.0)
d_out = torch.randn_like(out)
ours = torch.autograd.grad(out, [q, k, v, table], d_out)

distance = torch.arange(length) - torch.arange(length)[:, None]
dense = table[bucket_of(distance)].permute(2, 0, 1)
plain = (q @ k.transpose(-2, -1) + dense).softmax(-1) @ v
theirs = torch.autograd.grad(plain, [q, k, v, table], d_out)
for one, two in zip((out, *ours), (plain, *theirs)):
    torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)
print("gradient of the table:", tuple(ours[-1].shape))
