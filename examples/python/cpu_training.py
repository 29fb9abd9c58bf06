"""Trains a small transformer on a CPU, uncompiled: windows, packed documents and ALiBi in one attention.

It learns to copy: each document is some random tokens, then the same ones again.

python examples/python/cpu_training.py
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foveate import Mask, flex_attention

torch.manual_seed(0)
torch.set_num_threads(1)  # So small a model takes longer on more.
vocabulary, width, heads, half, documents = 16, 64, 4, 12, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.slope = nn.Parameter(torch.tensor([0.5, 0.1, 0.0, 0.0]))

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score - self.slope[h] * (q_idx - kv_idx)

        # Heads of one buffer, by their strides: nothing is copied.
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        attended = flex_attention(q, k, v, alibi, mask)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        mixed: Tensor = x + self.mlp(self.norms[1](x))
        return mixed


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(2 * half, width)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, mask: Mask) -> Tensor:
        places = torch.arange(tokens.shape[1]) % (2 * half)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x, mask)
        logits: Tensor = self.head(x)
        return logits


ids = torch.arange(documents).repeat_interleave(2 * half)
mask = Mask.causal() & Mask.document(ids) & Mask.sliding_window(half + 1)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for step in range(60):
    tokens = torch.randint(vocabulary, (4, documents, half)).repeat(1, 1, 2).flatten(1)
    logits = model(tokens, mask)[:, :-1]
    copied = (torch.arange(tokens.shape[1] - 1) % (2 * half) >= half - 1) & (ids[1:] == ids[:-1])
    loss = F.cross_entropy(logits[:, copied].flatten(0, 1), tokens[:, 1:][:, copied].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 15 == 0:
        print(f"step {step:3}  loss {losses[-1]:.3f}")
print(f"step {step:3}  loss {losses[-1]:.3f}")
assert losses[-1] < 0.5 * losses[0], losses[-1]
