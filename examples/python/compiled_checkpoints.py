"""A stack of blocks under torch.compile with activation checkpointing: packed documents and dropout, in one graph.

python examples/python/compiled_checkpoints.py
"""

import shutil

import torch
from torch.utils.checkpoint import checkpoint

from foveate import Mask, flex_attention

torch.manual_seed(0)
heads, length, dim = 4, 256, 16


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(heads * dim, 3 * heads * dim)
        self.out = torch.nn.Linear(heads * dim, heads * dim)

    def forward(self, x: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, heads, dim)).permute(2, 0, 3, 1, 4)
        mask = Mask.causal() & Mask.document(document)
        attended = flex_attention(q, k, v, block_mask=mask, dropout_p=0.1 if self.training else 0.0)
        added: torch.Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return x + added


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, document, use_reentrant=False)
        return x


model = Model()
# Inductor needs a C++ compiler for the CPU; without one the model trains as it is.
compiled = torch.compile(model, fullgraph=True) if shutil.which("g++") else model
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
x, target = torch.randn(2, length, heads * dim), torch.randn(2, length, heads * dim)
losses = []
for lengths in ([100, 156], [30, 126, 100], [256], [128, 128]):  # Another layout in each step, one compilation.
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    loss = (compiled(x, document) - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
model.eval()
with torch.no_grad():
    torch.testing.assert_close(compiled(x, document), model(x, document))
print("losses:", ", ".join(f"{loss:.3f}" for loss in losses))
