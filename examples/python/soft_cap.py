"""Gemma's soft cap of scores, in bfloat16, with grouped key heads.

python examples/python/soft_cap.py
"""

from typing import Any

import torch

from foveate import create_block_mask, flex_attention

torch.manual_seed(0)
cap, length = 30.0, 300
q = torch.randn(1, 8, length, 64, dtype=torch.bfloat16, requires_grad=True)
k, v = (torch.randn(1, 2, length, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))


def capped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return cap * torch.tanh(score / cap)


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


mask = create_block_mask(causal, None, None, length, length, device=q.device)
out = flex_attention(q, k, v, capped, mask, enable_gqa=True)
out.float().square().mean().backward()

grouped = [t.detach().float().repeat_interleave(4, 1) for t in (k, v)]
scores = cap * torch.tanh(q.detach().float() @ grouped[0].transpose(-2, -1) / 8 / cap)
scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
torch.testing.assert_close(out.detach().float(), scores.softmax(-1) @ grouped[1], rtol=2e-2, atol=2e-2)
print("out", tuple(out.shape), out.dtype)
