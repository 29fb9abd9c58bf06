"""A sliding window whose first tokens stay visible, and a learned sink logit for each head.

python examples/python/window_with_sinks.py
"""

import torch

from foveate import AuxRequest, Mask, flex_attention

torch.manual_seed(0)
heads, length, dim, window, first = 4, 512, 32, 128, 4
q, k, v = (torch.randn(1, heads, length, dim) for _ in range(3))
sink = torch.nn.Parameter(torch.zeros(heads))

mask = Mask("causal & (sliding_window(size) | kv < first)", size=window, first=first)
out, aux = flex_attention(q, k, v, block_mask=mask, sink=sink, return_aux=AuxRequest(lse=True))
out.square().mean().backward()
assert sink.grad is not None and aux.lse is not None

# By plain operations: the sink is one more column of the scores, which has no value.
row, column = torch.arange(length)[:, None], torch.arange(length)
visible = (column <= row) & ((row - column < window) | (column < first))
scores = (q @ k.transpose(-2, -1) / dim**0.5).masked_fill(~visible, -torch.inf)
scores = torch.cat([scores, sink.detach().reshape(1, heads, 1, 1).expand(1, heads, length, 1)], -1)
torch.testing.assert_close(out.detach(), scores.softmax(-1)[..., :-1] @ v, rtol=1e-4, atol=1e-5)
print("gradient of the sinks:", sink.grad.tolist())
