"""A learned bias for each head and distance, with its gradient.

python examples/python/relative_bias.py
"""

from typing import Any

import torch

from foveate import Mask, flex_attention

torch.manual_seed(0)
heads, length, dim, reach = 4, 256, 32, 64
q, k, v = (torch.randn(2, heads, length, dim) for _ in range(3))
bias = torch.nn.Parameter(torch.zeros(heads, 2 * reach + 1))
goal = torch.randn(2, heads, length, dim)


def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + bias[h, torch.clamp(kv_idx - q_idx, -reach, reach) + reach]


optimizer = torch.optim.Adam([bias], lr=0.1)
losses = []
for _ in range(20):
    optimizer.zero_grad()
    loss = (flex_attention(q, k, v, relative, Mask.causal()) - goal).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0]
# Distances to later keys, which the mask hides, have no gradient.
assert bias.grad is not None and not bias.grad[:, reach + 1 :].any()
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
