"""Attention in float64 by plain torch operations, and how far a result may be from it; marks that tests share."""

import math

import pytest
import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention.flex_attention import _vmap_for_bhqkv


#: Of tests of what a call says of elements that it reads.
UNREAD = pytest.mark.cpu("calls do not wait for elements of CUDA tensors")
NO_LOGSIGMOID = pytest.mark.cpu("PyTorch's vmap does not compute logsigmoid of CUDA tensors")


class _Indexing(TransformGetItemToIndex):
    """Numbers and whole axes among traced indices, which torch's mode takes from 2.11 on."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__ and torch.__version__ < "2.11":
            of, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
            if Ellipsis in [i for i in index if not isinstance(i, torch.Tensor)]:
                at = next(n for n, i in enumerate(index) if i is Ellipsis)
                index = index[:at] + (slice(None),) * (of.dim() - len(index) + 1) + index[at + 1 :]
            if any(isinstance(i, torch.Tensor) for i in index):
                if all(isinstance(i, (torch.Tensor, int)) or i == slice(None) for i in index):
                    number = lambda i: torch.tensor(i, device=of.device) if isinstance(i, int) else i  # noqa: E731
                    return torch.ops.aten.index.Tensor(
                        of, [number(i) if not isinstance(i, slice) else None for i in index]
                    )
        return super().__torch_function__(func, types, args, kwargs)


def dense(function, extents, scores=None, device=None):
    """A mask or score function at every point, by torch's own vmap."""
    indices = [torch.arange(n, device=device if scores is None else scores.device) for n in extents]
    with _Indexing():
        if scores is None:
            return _vmap_for_bhqkv(function, prefix=())(*indices)
        return _vmap_for_bhqkv(function, prefix=(0,))(scores, *indices)


def attention(q, k, v, score_mod=None, mask=None, scale=None, dtype=torch.float64):
    """``out`` and ``lse``, every step in ``dtype``. ``mask`` is a dense bool tensor."""
    q, k, v = (t.to(dtype) for t in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1).expand(q.shape[0], -1, -1, -1) for t in (k, v))
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if score_mod is not None:
        scores = dense(score_mod, scores.shape, scores).to(dtype)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    if scores.shape[-1] == 0:
        return q.new_zeros((*q.shape[:3], v.shape[3])), q.new_full(q.shape[:3], -math.inf)
    dead = (scores == -math.inf).all(dim=-1, keepdim=True)
    alive = scores.masked_fill(dead, 0.0)
    lse = torch.logsumexp(alive, dim=-1).masked_fill(dead.squeeze(-1), -math.inf)
    weights = torch.softmax(alive, dim=-1).masked_fill(dead, 0.0)
    return weights @ v, lse


_UNITS = {torch.float64: 2.0**-24, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}


def close(name, ours, gold, dtype, terms, low=None):
    """Fails where ``ours`` is further from ``gold`` than sums of ``terms`` products in f32, rounded once to
    ``dtype``, may be; or than twice the error of ``low``, which took every step in ``dtype``."""
    assert ours.shape == gold.shape, f"{name}: {tuple(ours.shape)}, not {tuple(gold.shape)}"
    if gold.numel() == 0:
        return
    ours, gold = ours.detach().double(), gold.detach().double()
    assert torch.equal(torch.isinf(ours), torch.isinf(gold)), f"{name}: infinite elsewhere"
    finite = torch.isfinite(gold)
    assert bool(torch.isfinite(ours[finite]).all()), f"{name}: not finite"
    if not bool(finite.any()):
        return
    largest = float(gold[finite].abs().max())
    bound = largest * (2 * _UNITS[dtype] + 16 * math.sqrt(terms + 1) * _UNITS[torch.float32]) + 1e-6
    if low is not None:
        bound += 2 * float((low.detach().double() - gold)[finite].abs().max())
    worst = float((ours - gold)[finite].abs().max())
    assert worst <= bound, f"{name}: {worst:.3g} from float64, {bound:.3g} allowed"
