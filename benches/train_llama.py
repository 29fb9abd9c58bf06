"""The peer of `train_peers.py`: a plain training loop in PyTorch for a Llama-family model.

Served over a pipe: a line `{"steps": 4}` takes so many steps and answers with their times and
losses, a line `{"gemm": 2048}` with the rate of a product of two such square matrices.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy
import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        hidden, self.heads, self.kv = sizes["hidden"], sizes["heads"], sizes["kv_heads"]
        self.dim = hidden // self.heads
        self.q_proj = nn.Linear(hidden, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv * self.dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, hidden, bias=False)

    def forward(self, x, cos, sin):
        rows, length, _ = x.shape

        def heads_of(projection, heads):
            return projection(x).view(rows, length, heads, self.dim).transpose(1, 2)

        q = rotated(heads_of(self.q_proj, self.heads), cos, sin)
        k = rotated(heads_of(self.k_proj, self.kv), cos, sin)
        v = heads_of(self.v_proj, self.kv)
        grouped = self.heads != self.kv
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))


def rotated(x, cos, sin):
    """`x` turned by the angles of its positions, halves of a head being the two coordinates."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class FeedForward(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        hidden, wide = sizes["hidden"], sizes["intermediate"]
        self.gate_proj = nn.Linear(hidden, wide, bias=False)
        self.up_proj = nn.Linear(hidden, wide, bias=False)
        self.down_proj = nn.Linear(wide, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(sizes["hidden"], eps=1e-6)
        self.self_attn = Attention(sizes)
        self.post_attention_layernorm = nn.RMSNorm(sizes["hidden"], eps=1e-6)
        self.mlp = FeedForward(sizes)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Parameters have the names of a checkpoint; the output projection is the embedding."""

    def __init__(self, sizes):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(sizes["vocab"], sizes["hidden"])
        self.model.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes["layers"]))
        self.model.norm = nn.RMSNorm(sizes["hidden"], eps=1e-6)
        dim = sizes["hidden"] // sizes["heads"]
        frequencies = 1e4 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles = torch.arange(sizes["len"], dtype=torch.float64)[:, None] * frequencies
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, tokens, labels):
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, self.cos, self.sin)
        logits = F.linear(self.model.norm(x), self.model.embed_tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def weights_of(file: Path):
    """The tensors of a safetensors file in f32."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        first, end = entry["data_offsets"]
        assert entry["dtype"] == "F32", f"{name} is {entry['dtype']}"
        flat = numpy.frombuffer(data[start + first : start + end], dtype="<f4").copy()
        tensors[name] = torch.from_numpy(flat).view(entry["shape"])
    return tensors


class Training:
    """The loop: one batch after another of one long document, AdamW, clipping by the norm."""

    def __init__(self, args):
        self.sizes = json.loads(args.sizes)
        self.model = Llama(self.sizes)
        self.model.load_state_dict(weights_of(args.weights))
        decayed = [p for p in self.model.parameters() if p.dim() >= 2]
        others = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            groups, lr=self.sizes["lr"], betas=(0.9, 0.95), eps=1e-8, fused=True
        )
        self.run = torch.compile(self.model, dynamic=False) if args.compile else self.model
        document = numpy.frombuffer(args.text.read_bytes(), dtype=numpy.uint8).astype(numpy.int64)
        # As Foveate reads bytes: a token of its own opens and closes a document.
        end = numpy.array([self.sizes["vocab"] - 1])
        self.tokens = torch.from_numpy(numpy.concatenate((end, document, end)))
        self.at = 0

    def batch(self):
        cells = self.sizes["rows"] * self.sizes["len"]
        here = self.tokens[self.at : self.at + cells + 1]
        assert len(here) == cells + 1, "the document is long enough for all steps"
        self.at += cells
        shape = (self.sizes["rows"], self.sizes["len"])
        return here[:-1].view(shape), here[1:].view(shape)

    def step(self) -> float:
        tokens, labels = self.batch()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.run(tokens, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()


def gemm(size: int) -> float:
    """GFLOP/s of the fastest of a few large products."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    out, best = torch.empty(size, size), float("inf")
    for _ in range(5):
        start = time.perf_counter()
        torch.matmul(a, b, out=out)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 1e9


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    training = Training(args)
    for line in sys.stdin:
        request = json.loads(line)
        if "gemm" in request:
            answer = {"gflops": gemm(request["gemm"])}
        else:
            answer = {"ms": [], "losses": []}
            for _ in range(request["steps"]):
                start = time.perf_counter()
                answer["losses"].append(training.step())
                answer["ms"].append((time.perf_counter() - start) * 1e3)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
