"""The loop of `train_gpu_peers.py`: a Llama and its training step, as one writes them in PyTorch.

Layers are compiled one by one. Attention is the fastest, on this problem, of what PyTorch has for
it. The logits are there for a chunk of tokens at a time, and become their gradient in place.
"""

import contextlib
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from train_gpu_peers import MODELS, measure, measured_arguments

CHUNK = 2048


@torch.compile
def chunk_gradient(logits, labels):
    """Cross-entropy of a chunk, summed, and its gradient by the logits."""
    wide = logits.float()
    lse = wide.logsumexp(-1, keepdim=True)
    known = (labels >= 0).unsqueeze(-1)
    at = labels.clamp(min=0).unsqueeze(-1)
    loss = ((lse - wide.gather(-1, at)) * known).sum()
    is_label = torch.arange(logits.shape[-1], device=logits.device) == at
    gradient = ((wide - lse).exp() - is_label.float()) * known
    return loss, gradient.to(logits.dtype)


class HeadLoss(torch.autograd.Function):
    """Linear layer and mean cross-entropy, a chunk of tokens after the other."""

    @staticmethod
    def forward(ctx, x, weight, labels, scale):
        d_x, d_weight, total = torch.empty_like(x), None, 0.0
        for first in range(0, x.shape[0], CHUNK):
            of_chunk = slice(first, first + CHUNK)
            loss, gradient = chunk_gradient(x[of_chunk] @ weight.T, labels[of_chunk])
            total = total + loss
            torch.mm(gradient, weight, out=d_x[of_chunk])
            if d_weight is None:
                d_weight = gradient.T @ x[of_chunk]
            else:
                d_weight.addmm_(gradient.T, x[of_chunk])
        ctx.save_for_backward(d_x.mul_(scale), d_weight.mul_(scale))
        return total * scale

    @staticmethod
    def backward(ctx, d_loss):
        d_x, d_weight = ctx.saved_tensors
        return d_x, d_weight, None, None


def turned(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Layer(nn.Module):
    def __init__(self, sizes, attend):
        super().__init__()
        hidden, wide, _, self.heads, self.kv_heads, self.dim, _, _ = sizes
        self.attend, linear = attend, lambda i, o: nn.Linear(i, o, bias=False)
        self.norm, self.mlp_norm = nn.RMSNorm(hidden, 1e-5), nn.RMSNorm(hidden, 1e-5)
        self.qkv = linear(hidden, (self.heads + 2 * self.kv_heads) * self.dim)
        self.o, self.down = linear(self.heads * self.dim, hidden), linear(wide, hidden)
        self.gate_up = linear(hidden, 2 * wide)

    def forward(self, x, cos, sin):
        rows, length, _ = x.shape
        qkv = self.qkv(self.norm(x)).view(rows, length, -1, self.dim).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
        out = self.attend(turned(q, cos, sin), turned(k, cos, sin), v)
        x = x + self.o(out.transpose(1, 2).reshape(rows, length, -1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, sizes, attends, recompute):
        super().__init__()
        hidden, _, layers, _, _, _, vocab, tied = sizes
        self.embedding = nn.Embedding(vocab, hidden)
        # Programs of layers, in turns.
        self.layers = nn.ModuleList(Layer(sizes, attends[i % len(attends)]) for i in range(layers))
        self.norm = nn.RMSNorm(hidden, 1e-5)
        self.head = self.embedding.weight if tied else nn.Parameter(torch.empty(vocab, hidden))
        self.recompute = recompute

    def forward(self, tokens, labels, cos, sin):
        x = self.embedding(tokens)
        for layer in self.layers:
            if self.recompute == "full":
                x = checkpoint(layer, x, cos, sin, use_reentrant=False)
            else:
                x = layer(x, cos, sin)
        x = self.norm(x).flatten(0, 1)
        scale = 1.0 / (labels >= 0).sum()
        return HeadLoss.apply(x, self.head, labels.flatten(), scale)


def attentions(document, window, cap):
    """What computes causal attention within documents, and within a window where that is not 0, by name;
    scores are capped where `cap` is not 0."""
    rows, length = document.shape

    def mask(b, h, q, kv):
        sees = (q >= kv) & (document[b, q] == document[b, kv])
        return sees & (q - kv < window) if window else sees

    def capped(score, b, h, q, kv):
        return cap * torch.tanh(score / cap)

    block_mask = create_block_mask(mask, rows, None, length, length, document.device)

    def flex(q, k, v):
        score = capped if cap else None
        return flex_attention(q, k, v, score_mod=score, block_mask=block_mask, enable_gqa=True)

    yield "flex", flex, contextlib.nullcontext
    if not document.any() and not window and not cap:

        def sdpa(q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        yield "cudnn", sdpa, lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)
        yield "flash", sdpa, lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)


def fastest(sizes, document, window, cap, device):
    """The attention of least time, forward and backward; times of all in ms."""
    heads, kv_heads, dim = sizes[3:6]
    rows, length = document.shape
    operands = [
        torch.randn(rows, n, length, dim, device=device, dtype=torch.bfloat16, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    ]
    times, best = {}, None
    for name, attend, within in attentions(document, window, cap):
        call = torch.compile(attend) if device == "cuda" else attend
        try:
            with within():
                for run in range(6):
                    if run == 3:
                        torch.cuda.synchronize() if device == "cuda" else None
                        began = time.perf_counter()
                    call(*operands).sum().backward()
            torch.cuda.synchronize() if device == "cuda" else None
        except RuntimeError:
            continue
        times[name] = (time.perf_counter() - began) / 3 * 1e3
        if times[name] == min(times.values()):
            best = name, attend, within
    return best, times


def main():
    args = measured_arguments()
    hidden, wide, layers, heads, kv_heads, dim, vocab, tied = MODELS[args.model]
    sizes, device = (hidden, wide, args.layers or layers, heads, kv_heads, dim, vocab, tied), args.device
    rows, length = args.rows, args.len
    is_start = torch.zeros(rows, length, dtype=torch.long)
    for row, of_row in enumerate(args.starts):
        is_start[row, of_row[1:]] = 1
    document = is_start.cumsum(1).to(device)
    place = torch.arange(length).expand(rows, length)
    position = place - torch.where(is_start.bool(), place, 0).cummax(1).values
    rate = 500000.0 ** (-torch.arange(0, dim, 2) / dim)
    angle = (position[..., None] * rate)[:, None].to(device)
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    generator = torch.Generator(device=device).manual_seed(0)
    tokens, labels = torch.randint(0, vocab, (2, rows, length), device=device, generator=generator)
    labels = torch.where(document.roll(-1, 1) == document, labels, -1)

    (name, attend, within), times = fastest(sizes, document, 0, args.cap, device)
    attends = [attend]
    if args.window:
        (_, near, _), more = fastest(sizes, document, args.window, args.cap, device)
        attends, times = [near, attend], times | {"window": min(more.values())}
    with torch.device(device):
        model = Llama(sizes, attends, args.recompute).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
    for layer in model.layers:
        layer.compile(dynamic=False)
    weights = list(model.parameters())
    kept = [p.detach().float() for p in weights] if args.state == "f32" else weights
    optimizer = torch.optim.AdamW(kept, lr=1e-4, fused=device == "cuda", weight_decay=0.1)

    def step():
        with within():
            loss = model(tokens, labels, cos, sin)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0, foreach=True)
        if kept is not weights:
            for master, weight in zip(kept, weights):
                master.grad = weight.grad.float()
        optimizer.step()
        if kept is not weights:
            with torch.no_grad():
                torch._foreach_copy_(weights, kept)
        optimizer.zero_grad()
        model.zero_grad()
        return loss

    measure("loop", args, device, step, {"attention": name, "attention_ms": times})


if __name__ == "__main__":
    main()
