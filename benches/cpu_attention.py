"""PyTorch's ways to compute a case of `foveate bench cpu` on the CPU, and its values in f64.

`sdpa` is scaled_dot_product_attention as it is (full and causal), `sdpa-mask` the same with the
mask and the bias as a dense tensor made beforehand, `flex` flex_attention under torch.compile
(forward only: PyTorch has no backward of it on the CPU), `eager` plain operations, for what the
others cannot do.
"""

import shutil
import os
import time

import torch
import torch._dynamo
import torch._inductor.config
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from workloads import DTYPES, documents_of, mask_of, operands, score_of

# Queries that the f64 attention takes at once.
CHUNK = 1024


def peers_of(case):
    """Names of the peers that a case is measured beside."""
    masked = case["mask"] not in ("full", "causal")
    forward = case["pass"] == "forward"
    if case["score"] == "softcap":
        return ["flex"] if forward else ["eager"]
    if masked or case["score"] != "none":
        return ["sdpa-mask", "flex"] if forward else ["sdpa-mask"]
    return ["sdpa"]


def positions(case):
    """Head, query and key indices that broadcast to the scores."""
    h = torch.arange(case["heads"]).view(-1, 1, 1)
    q = torch.arange(case["q_len"]).view(1, -1, 1)
    kv = torch.arange(case["len"]).view(1, 1, -1)
    return h, q, kv


def dense_bias(case):
    """Mask and position bias as one tensor to add to the scores, of as few heads as tell."""
    h, q, kv = positions(case)
    mask, score = mask_of(case, documents_of(case)), score_of(case)
    bias = torch.zeros(()) if score is None else score(0.0, 0, h, q, kv)
    if mask is not None:
        bias = torch.where(mask(0, h, q, kv), bias, float("-inf"))
    return bias.to(DTYPES[case["dtype"]]).unsqueeze(0)


def has_compiler() -> bool:
    """Whether torch.compile finds a C++ compiler."""
    named = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
    return any(shutil.which(name) for name in named)


def attention(peer: str, case, threads: int):
    """A function of q, k, v that runs the peer."""
    grouped = case["heads"] != case["heads_kv"]
    if peer == "sdpa":
        causal = case["mask"] == "causal"
        return lambda q, k, v: scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=grouped
        )
    if peer == "sdpa-mask":
        bias = dense_bias(case)
        return lambda q, k, v: scaled_dot_product_attention(
            q, k, v, attn_mask=bias, enable_gqa=grouped
        )
    mask, score = mask_of(case, documents_of(case)), score_of(case)
    if peer == "eager":
        h, q_at, kv_at = positions(case)
        seen, scale = mask(0, h, q_at, kv_at), case["dim"] ** -0.5

        def eager(q, k, v):
            scores = score(q @ k.transpose(-1, -2) * scale, 0, h, q_at, kv_at)
            return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v

        return eager
    if not has_compiler():
        raise NotImplementedError("torch.compile needs a C++ compiler: g++, clang++ or $CXX")
    # Generated loops carry their number of threads.
    torch._dynamo.reset()
    torch._inductor.config.cpp.threads = threads
    flex = torch.compile(flex_attention, dynamic=False)
    block = mask and create_block_mask(mask, None, None, case["q_len"], case["len"], device="cpu")
    return lambda q, k, v: flex(q, k, v, score_mod=score, block_mask=block, enable_gqa=grouped)


class Peer:
    """A peer with its operands, ready to run the pass of a case."""

    def __init__(self, name: str, case, threads: int):
        self.name = name
        self.backward = case["pass"] != "forward"
        *self.operands, self.d_out = operands(case)
        for x in self.operands:
            x.requires_grad_(self.backward)
        self.attend = attention(name, case, threads)

    def run(self):
        """The results: out, then dq, dk and dv."""
        with torch.set_grad_enabled(self.backward):
            out = self.attend(*self.operands)
            if not self.backward:
                return [out]
            return [out.detach(), *torch.autograd.grad(out, self.operands, self.d_out)]

    def timed(self) -> float:
        """Milliseconds of a run."""
        start = time.perf_counter()
        self.run()
        return (time.perf_counter() - start) * 1e3


def checked_heads(case):
    """Key/value heads that are compared with f64: the first and the last, or one of a large case."""
    last = case["heads_kv"] - 1
    return [last] if case["q_len"] * case["len"] > 2048 * 2048 else sorted({0, last})


def exact(case):
    """out, dq, dk and dv in f64 of the checked heads, each [head][position, dim]."""
    q, k, v, d_out = (x[0].double() for x in operands(case))
    mask, score = mask_of(case, documents_of(case)), score_of(case)
    group, scale = case["heads"] // case["heads_kv"], case["dim"] ** -0.5
    at_kv = torch.arange(case["len"])
    results = [[], [], [], []]
    for g in checked_heads(case):
        own_k, own_v = k[g].requires_grad_(), v[g].requires_grad_()
        d_k, d_v = torch.zeros_like(k[g]), torch.zeros_like(v[g])
        for h in range(g * group, (g + 1) * group):
            outs, d_qs = [], []
            for rows in torch.arange(case["q_len"]).split(CHUNK):
                own_q, at_q = q[h][rows].requires_grad_(), rows.view(-1, 1)
                scores = own_q @ own_k.T * scale
                if score is not None:
                    scores = score(scores, 0, torch.tensor(h), at_q, at_kv)
                if mask is not None:
                    scores = scores.masked_fill(~mask(0, h, at_q, at_kv), float("-inf"))
                out = scores.softmax(-1) @ own_v
                grads = torch.autograd.grad(out, (own_q, own_k, own_v), d_out[h][rows])
                outs.append(out.detach())
                d_qs.append(grads[0])
                d_k += grads[1]
                d_v += grads[2]
            results[0].append(torch.cat(outs))
            results[1].append(torch.cat(d_qs))
        results[2].append(d_k)
        results[3].append(d_v)
    return results


def error(case, results, reference) -> float:
    """The largest difference from f64 over the largest number, of the worst of the results."""
    group = case["heads"] // case["heads_kv"]
    worst = 0.0
    for i, (got, want) in enumerate(zip(results, reference)):
        heads = checked_heads(case)
        if i < 2:
            heads = [h for g in heads for h in range(g * group, (g + 1) * group)]
        for head, exact_head in zip(heads, want):
            apart = (got[0, head].double() - exact_head).abs().max() / exact_head.abs().max()
            # A NaN is no small error.
            worst = max(worst, float("inf") if apart.isnan() else apart.item())
    return worst
