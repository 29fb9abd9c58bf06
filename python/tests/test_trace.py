"""Traced functions beside torch's own evaluation of them at every point."""

import functools
import math
import os
import random
import re
import types

import pytest
import torch
import torch.nn.functional as F
from reference import NO_LOGSIGMOID, close, dense
from torch.nn.functional import silu
from torch.overrides import TorchFunctionMode

from foveate import AuxRequest, Mask, TraceError, _calls, _trace, create_block_mask, flex_attention

EXTENTS = (2, 3, 11, 13)
G = torch.Generator().manual_seed(5)
FLOATS = torch.randn(13, generator=G)
INTS = torch.randint(-20, 20, (13,), generator=G)
SMALL = torch.randint(0, 255, (13,), generator=G).to(torch.uint8)
SIGNED = torch.randint(-128, 127, (13,), generator=G).to(torch.int8)
SHORT = torch.randint(-32768, 32767, (13,), generator=G).to(torch.int16)
BOOLS = torch.randint(0, 2, (13,), generator=G).bool()
CUBE = torch.randn(2, 3, 13, generator=G)
TABLE = torch.randn(13, 5, generator=G)
WEIGHTS = torch.randn(5, generator=G)
BLOCKS = torch.randint(-9, 9, (2, 3, 4), generator=G)
LARGE = torch.randn(13, 65, generator=G)
WIDE = LARGE[:, :64]
SCALAR = torch.tensor(2.5)
COUNT = torch.tensor(3)


def check(score_mod, spread=3.0):
    """The engine's lse of each single key beside torch's score: one key is live at a time."""
    scores = torch.randn(EXTENTS, generator=G) * spread
    gold = dense(score_mod, EXTENTS, scores.double()).expand(EXTENTS).double()
    rounded = dense(score_mod, EXTENTS, scores).expand(EXTENTS)
    columns = []
    for key in range(EXTENTS[3]):
        q = scores[..., key : key + 1].contiguous()
        one = torch.ones(EXTENTS[0], EXTENTS[1], EXTENTS[3], 1)
        only = create_block_mask(lambda b, h, i, j, key=key: j == key, None, None, *EXTENTS[2:])
        _, aux = flex_attention(q, one, one, score_mod, only, 1.0, return_aux=AuxRequest(lse=True))
        columns.append(aux.lse)
    ours = torch.stack(columns, dim=-1)
    # A value that is not finite, or within rounding of a jump, is compared with torch's in float32.
    same = torch.isclose(gold, rounded.double(), rtol=1e-4, atol=1e-4)
    plain = torch.isfinite(gold) & same
    assert bool(plain.any())
    close("score", ours[plain], gold[plain], torch.float32, 64)
    infinite = torch.isinf(rounded) & torch.isinf(gold)
    assert torch.equal(ours[infinite], rounded[infinite].float())


def mask_check(mask_mod):
    mask = create_block_mask(mask_mod, *EXTENTS, BLOCK_SIZE=1)
    full = torch.zeros(EXTENTS, dtype=torch.int32)
    counts, indices = mask.full_kv_num_blocks, mask.full_kv_indices
    live = torch.arange(EXTENTS[3]) < counts.unsqueeze(-1)
    full.scatter_(-1, indices.long(), live.int())
    assert torch.equal(full.bool(), dense(mask_mod, EXTENTS).expand(EXTENTS))


UNARY = {
    "neg": lambda x: -x, "abs": abs, "abs method": lambda x: x.abs(), "square": torch.square,
    "exp": lambda x: torch.exp(x / 4), "exp2": lambda x: (x / 4).exp2(), "expm1": lambda x: torch.expm1(x / 4),
    "log": lambda x: torch.log(x.abs() + 0.1), "log2": lambda x: torch.log2(x.abs() + 0.1),
    "log10": lambda x: torch.log10(x.abs() + 0.1), "log1p": lambda x: torch.log1p(x.abs()),
    "sqrt": lambda x: x.abs().sqrt(), "rsqrt": lambda x: (x.abs() + 0.1).rsqrt(),
    "reciprocal": lambda x: torch.reciprocal(x.abs() + 0.5), "tanh": torch.tanh, "sigmoid": torch.sigmoid,
    "erf": torch.erf, "sin": torch.sin, "cos": torch.cos, "tan": lambda x: torch.tan(x / 4),
    "floor": torch.floor, "ceil": torch.ceil, "trunc": torch.trunc, "round": torch.round, "sign": torch.sign,
    "relu": F.relu, "leaky_relu": lambda x: F.leaky_relu(x, 0.2), "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu, "softplus": F.softplus,
    "softplus of beta": lambda x: F.softplus(x * 5, beta=2, threshold=3), "logsigmoid": F.logsigmoid,
    "clamp": lambda x: torch.clamp(x, -1, 1.5), "clamp method": lambda x: x.clamp(min=-1),
    "clip": lambda x: x.clip(max=0.5), "square root by power": lambda x: x.abs() ** 0.5, "cube": lambda x: x**3,
    "inverse square": lambda x: (x.abs() + 0.5) ** -2, "power": lambda x: (x.abs() + 0.1) ** 1.7,
    "power of two": lambda x: 2.0 ** (x / 4), "to int": lambda x: x.to(torch.int32).float(),
    "long": lambda x: x.long() * 1.0, "to float": lambda x: x.to(torch.float64).float(), "clone": lambda x: x.clone(),
    "isnan": lambda x: torch.where(torch.isnan(torch.log(x)), 1.0, 0.0),
    "isinf": lambda x: torch.where(torch.isinf(x / (x - x)), 1.0, x),
    "isfinite": lambda x: torch.where(torch.isfinite(1 / (x - x)), 1.0, x),
    "masked_fill": lambda x: x.masked_fill(x > 0, -2.0), "where": lambda x: torch.where(x > 0, x, 0.25 * x),
    "where to -inf": lambda x: torch.where(x > 0, x, -math.inf), "lerp": lambda x: torch.lerp(x, x * x, 0.3),
    "zeros_like": lambda x: x + torch.zeros_like(x), "full_like": lambda x: x * torch.full_like(x, 2),
    "new_full": lambda x: x + x.new_full((), 3), "max of two": lambda x: torch.max(x, x * x - 1),
    "minimum": lambda x: torch.minimum(x, -x), "maximum": lambda x: torch.maximum(x, FLOATS[2]),
    "float remainder": lambda x: torch.remainder(x, 1.75), "add with alpha": lambda x: torch.add(x, x * x, alpha=0.5),
    "rsub": lambda x: torch.rsub(x, 3.0), "addcmul": lambda x: torch.addcmul(x, x, x, value=0.1),
    "addcdiv": lambda x: torch.addcdiv(x, x, x.abs() + 1, value=0.1), "frac": torch.frac, "sgn": torch.sgn,
    "signbit": lambda x: torch.where(torch.signbit(x * 0.0), x, -x), "copysign": lambda x: torch.copysign(x * x, x),
    "copysign of a number": lambda x: torch.copysign(x, -2.0), "heaviside": lambda x: torch.heaviside(F.relu(x), 2 * x),
    "fmin": lambda x: torch.fmin(torch.log(x), x), "fmax": lambda x: torch.fmax(x, torch.log(x)),
    "hypot": lambda x: torch.hypot(x, x + 1), "logaddexp": lambda x: torch.logaddexp(x, -x),
    "logaddexp of equals": lambda x: torch.logaddexp(x, x), "logaddexp2": lambda x: torch.logaddexp2(x, 2 * x),
    "logaddexp of -inf": lambda x: torch.logaddexp(x * 0 - math.inf, x), "xlogy": lambda x: torch.xlogy(x, x.abs() + 0.1),
    "xlogy of 0": lambda x: torch.xlogy(F.relu(x), F.relu(x)), "xlog1py": lambda x: torch.special.xlog1py(x, x.abs()),
    "entr": lambda x: torch.special.entr(x.abs() + 0.1), "entr below 0": lambda x: torch.special.entr(x),
    "ldexp": lambda x: torch.ldexp(x, COUNT), "logit": lambda x: torch.logit(torch.tanh(x) * 0.4 + 0.5),
    "logit with eps": lambda x: torch.logit(x / 4, 0.1), "sinc": torch.sinc, "sinc of 0": lambda x: torch.sinc(F.relu(x)),
    "sinh": lambda x: torch.sinh(x / 4), "cosh": lambda x: torch.cosh(x / 4), "asin": lambda x: torch.asin(torch.tanh(x) * 0.9),
    "acos": lambda x: torch.arccos(torch.tanh(x) * 0.9), "atan": torch.atan, "atan far away": lambda x: torch.arctan(x * 1e4),
    "atan2": lambda x: torch.atan2(x, 1 - x), "atan2 of 0": lambda x: torch.atan2(x, x * 0), "asinh": torch.asinh,
    "acosh": lambda x: torch.acosh(x.abs() + 1.1), "atanh": lambda x: torch.atanh(torch.tanh(x) * 0.9), "erfc": torch.erfc,
    "ndtr": torch.special.ndtr, "special expit": torch.special.expit, "deg2rad": torch.deg2rad, "rad2deg": torch.rad2deg,
    "nan_to_num": lambda x: torch.nan_to_num(torch.log(x), 0.5), "infinities to numbers": lambda x: torch.nan_to_num(
        torch.where(x > 1, math.inf, torch.where(x < -1, -math.inf, x)), posinf=2.0, neginf=-3.0),
    "isclose": lambda x: torch.where(torch.isclose(x, 2 - x, rtol=0.01, atol=0.5), x, -x),
    "elu": lambda x: F.elu(x, 0.5), "elu far away": lambda x: F.elu(x * 100), "celu": lambda x: F.celu(x, 0.5), "selu": F.selu,
    "relu6": lambda x: F.relu6(x * 4), "hardtanh": lambda x: F.hardtanh(x, -0.5, 2.0), "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish, "hardshrink": F.hardshrink, "softshrink": lambda x: F.softshrink(x, 0.3),
    "tanhshrink": F.tanhshrink, "softsign": F.softsign, "mish": F.mish, "threshold": lambda x: F.threshold(x, 0.1, -2.0),
    "a bool as a factor": lambda x: x * (x > 0) + (x < -1), "a bool as a float": lambda x: (x > 0).float() * x,
    "a sum of one": lambda x: x.sum() + torch.any(x > 0),
}


def named(names):
    """Their parameters, of one of which the reference runs on the CPU alone."""
    return [pytest.param(name, marks=NO_LOGSIGMOID) if name == "logsigmoid" else name for name in names]


@pytest.mark.parametrize("name", named(UNARY))
def test_an_operation_on_the_score_is_torchs(name):
    check(lambda score, b, h, q, kv: UNARY[name](score))


@pytest.mark.parametrize("name", named(name for name in UNARY if name not in ("a sum of one", "heaviside")))
def test_the_gradient_of_an_operation_is_torchs(name):
    factor = torch.tensor(0.7, requires_grad=True)
    gradient(lambda s, b, h, q, kv: 0.1 * (UNARY[name](s * factor) + s * factor), (factor,))


#: What no gradient passes in torch, of a score and of a captured tensor that learns, with an index that depends on the
#: score among it.
STEPS = {
    "a step of what is learned": lambda s, x: s * x + torch.round(3 * x) * s.detach(),
    "a factor that is detached": lambda s, x: s * x.detach() + x * s.detach(),
    "a score that is detached": lambda s, x: torch.tanh(s.detach()) * x - s,
    "a product of floors": lambda s, x: s + torch.floor(s * x) * x + torch.div(s, x, rounding_mode="floor"),
    "a comparison as a number": lambda s, x: s + (s > x).long() * x + ((s > 0) & (x > 0)).int() + (s < 0).to(torch.int8) // 2,
    "a remainder and what it rests on": lambda s, x: torch.fmod(s, x) + torch.remainder(s, x) + torch.frac(s * x),
}


@pytest.mark.parametrize("name", STEPS)
def test_no_gradient_passes_steps_and_what_is_detached(name):
    factor = torch.tensor(0.7, requires_grad=True)
    gradient(lambda s, b, h, q, kv: STEPS[name](s * factor, factor), (factor,))


@pytest.mark.parametrize("name", ["floor", "ceil", "trunc", "round", "frac", "long"])
def test_a_score_that_is_only_a_step_has_torchs_gradients_of_q_and_k(name):
    q, k, v = (torch.randn(2, 3, n, 8, generator=G).requires_grad_() for n in (7, 13, 13))
    score_mod = lambda s, b, h, i, j: UNARY[name](2 * s)  # noqa: E731
    ours = torch.autograd.grad(flex_attention(q, k, v, score_mod).square().sum(), (q, k, v))
    scores = q.double() @ k.double().transpose(-2, -1) / math.sqrt(8)
    gold = torch.softmax(score_mod(scores, 0, 0, 0, 0).double(), -1) @ v.double()
    golds = torch.autograd.grad(gold.square().sum(), (q, k, v), allow_unused=True)
    for mine, one, two in zip((q, k, v), ours, golds):
        close("gradient", one, torch.zeros_like(mine) if two is None else two, torch.float32, 13 * 8 * 42)


def test_a_learned_table_is_read_where_the_score_says():
    table = torch.randn(9, generator=G).requires_grad_()
    gradient(lambda s, b, h, q, kv: s + table[(2 * s).round().long().clamp(-4, 4) + 4], (table,))


def test_an_embedding_and_a_norm_of_learned_rows_learn():
    table = torch.randn(13, 3, generator=G).requires_grad_()
    layer = torch.nn.Embedding(13, 3)

    def score_mod(s, b, h, q, kv):
        if not isinstance(s, torch.Tensor):
            return s + layer((q - kv).abs())[h] - (table[q] - table[kv]).norm() + torch.take(table, kv * 3 + h)
        apart = (table[q] - table[kv]).double()
        near = (apart == 0).all(-1)
        size = torch.where(near, 0.0, torch.where(near[..., None], 1.0, apart).square().sum(-1).sqrt())
        return s + layer.weight.double()[(q - kv).abs(), h] - size + table.flatten()[kv * 3 + h]

    gradient(score_mod, (table, layer.weight))


EMBEDDING = torch.nn.Embedding(13, 3).requires_grad_(False)
SORTED = torch.tensor([0, 3, 3, 8, 11])

SCORES = {
    "alibi": lambda s, b, h, q, kv: s - 2.0 ** (-8.0 * (h + 1) / 3) * (q - kv).abs(),
    "int division is float": lambda s, b, h, q, kv: s + (q - kv) / 3,
    "floor division": lambda s, b, h, q, kv: s + (q - kv) // 3 + (kv - q) // -4,
    "remainder has the divisor's sign": lambda s, b, h, q, kv: s + (q - kv) % 5 + (q - kv) % -3 + (q - kv) % (h - 5),
    "fmod has the dividend's sign": lambda s, b, h, q, kv: s + torch.fmod(q - kv, 5) + torch.fmod(q - kv, -3),
    "division towards zero": lambda s, b, h, q, kv: s + torch.div(q - kv, 3, rounding_mode="trunc"),
    "bool arithmetic": lambda s, b, h, q, kv: s + (q > kv) + ((q > kv) * (h == 1)) + (q < kv).float(),
    "bool sum is or": lambda s, b, h, q, kv: s + ((q > kv) + (q > 2)).int(),
    "powers of integers": lambda s, b, h, q, kv: s + (q - kv) ** 2 + (-2) * (h**3),
    "shifts": lambda s, b, h, q, kv: s + ((q << 2) >> 1) + ((q - kv) >> 1),
    "low bits": lambda s, b, h, q, kv: s + ((q - kv) & 7) + (kv & 1),
    "bits": lambda s, b, h, q, kv: s + (q ^ kv) + (q | h) + (q & INTS[kv]) + (INTS[q] ^ -7),
    "bits of bytes": lambda s, b, h, q, kv: s + (SMALL[q] & SMALL[kv]) + (SIGNED[q] | SIGNED[kv]) + (SHORT[q] ^ 255),
    "shifts by traced numbers": lambda s, b, h, q, kv: s + (1 << (kv & 7)) + ((q - kv) >> (h + 1)) + (INTS[q] >> 2),
    "shifted bytes wrap": lambda s, b, h, q, kv: s + (SMALL[q] << 3) + (SIGNED[kv] << 2),
    "Morton order": lambda s, b, h, q, kv: s + (((q & 1) | ((q & 2) << 1) | ((q & 4) << 2)) ^ ((kv & 1) << 1)),
    "inverted bits": lambda s, b, h, q, kv: s + ~q,
    "captured integers": lambda s, b, h, q, kv: s + INTS[q] * INTS[kv],
    "captured bytes wrap": lambda s, b, h, q, kv: s + SMALL[q] * SMALL[kv] + (SMALL[q] - SMALL[kv]),
    "captured signed bytes wrap": lambda s, b, h, q, kv: s + SIGNED[q] * SIGNED[kv] - SIGNED[kv],
    "captured shorts wrap": lambda s, b, h, q, kv: s * 100 + SHORT[q] * SHORT[kv],
    "captured bytes and signed bytes": lambda s, b, h, q, kv: s + SMALL[q] * SIGNED[kv],
    "casts wrap": lambda s, b, h, q, kv: s + (q * 100).to(torch.int8) + (kv * 100 - 900).byte(),
    "captured bools": lambda s, b, h, q, kv: torch.where(BOOLS[q] ^ BOOLS[kv], s, -s),
    "captured doubles": lambda s, b, h, q, kv: s + FLOATS.double()[kv],
    "captured halves": lambda s, b, h, q, kv: s + FLOATS.half()[kv].float(),
    "captured in steps": lambda s, b, h, q, kv: s + CUBE[b][h, kv] + CUBE[b, h][q] + CUBE[b][:, q][h],
    "an ellipsis": lambda s, b, h, q, kv: s + CUBE[..., kv][b, h] + CUBE[b, ..., q][h],
    "a number among indices": lambda s, b, h, q, kv: s + CUBE[1, h, kv] + CUBE[b, -1, q],
    "a gather of a gather": lambda s, b, h, q, kv: s + FLOATS[INTS.clamp(0, 12)[kv]],
    "a view of a captured tensor": lambda s, b, h, q, kv: s + CUBE.transpose(0, 2)[kv, h, b] + CUBE[:, :, ::2][b, h, q // 2],
    "an expanded tensor": lambda s, b, h, q, kv: s + FLOATS[:1].expand(13)[q],
    "a negative index": lambda s, b, h, q, kv: s + FLOATS[q - kv] + FLOATS[-1 - h],
    "captured scalars": lambda s, b, h, q, kv: s * SCALAR + COUNT * q,
    "a captured tensor on the left": lambda s, b, h, q, kv: SCALAR * s - (COUNT > q).float() + (COUNT - q) // COUNT,
    "a tensor made inside": lambda s, b, h, q, kv: s + torch.tensor(1.5) * q + torch.ones(()) + torch.arange(13)[kv],
    "integers as a score's factor": lambda s, b, h, q, kv: s * (q + 1) / (kv + 1),
    "logical operations": lambda s, b, h, q, kv: torch.where(torch.logical_and(q, kv > 2) | torch.logical_not(h), s, 0.0),
    "squeezed": lambda s, b, h, q, kv: s.squeeze() + s.new_zeros(()) + s.new_tensor(2.0),
    "type_as": lambda s, b, h, q, kv: s + q.type_as(s) + kv.to(s.dtype) + h.to(s),
    "minimum of integers": lambda s, b, h, q, kv: s + torch.minimum(q, kv) + q.clamp(2, 5) + torch.maximum(h, COUNT),
    "a row's dot product": lambda s, b, h, q, kv: s + torch.dot(TABLE[q], TABLE[kv]) + TABLE[q] @ TABLE[h],
    "a row's sum and mean": lambda s, b, h, q, kv: s + TABLE[kv].sum() + torch.sum(BLOCKS[b][h], dim=-1) + TABLE[q].mean(-1),
    "a row's extremes": lambda s, b, h, q, kv: s * TABLE[q].amax() - TABLE[kv].amin(dim=0) + TABLE[h].max(),
    "elementwise on rows": lambda s, b, h, q, kv: s + (torch.tanh(TABLE[q]) * s - 2 * TABLE[kv] + WEIGHTS).sum(),
    "an element of a row": lambda s, b, h, q, kv: s + (TABLE[q] * TABLE[kv])[2] + len(TABLE[q]),
    "bounds of documents": lambda s, b, h, q, kv: s + torch.bucketize(q, SORTED) - torch.searchsorted(SORTED, kv, right=True),
    "an embedding": lambda s, b, h, q, kv: s + F.embedding((q - kv).abs(), EMBEDDING.weight)[h] + EMBEDDING(q)[0],
    "a take": lambda s, b, h, q, kv: s + torch.take(TABLE, kv * 5 + h) + torch.gather(FLOATS, 0, q),
    "a distance": lambda s, b, h, q, kv: s - (TABLE[q] - TABLE[kv]).norm() + torch.dist(TABLE[q], TABLE[h]),
    "a norm of order 1": lambda s, b, h, q, kv: s - torch.linalg.vector_norm(TABLE[q] - TABLE[kv], 1) + torch.linalg.norm(TABLE[q]),
    "a greatest distance": lambda s, b, h, q, kv: s - (TABLE[q] - TABLE[kv]).norm(p=math.inf),
    "a cosine": lambda s, b, h, q, kv: s + F.cosine_similarity(TABLE[q], TABLE[kv], dim=0),
    "logsumexp of a row": lambda s, b, h, q, kv: s + torch.logsumexp(TABLE[q] * s, 0),
    "nonzeros of a row": lambda s, b, h, q, kv: s + torch.count_nonzero(BLOCKS[b, h]),
    "stacked": lambda s, b, h, q, kv: s + torch.stack([FLOATS[q], FLOATS[kv], s]).amax() + torch.stack((q, kv)).sum(),
    "rounding halves to even": lambda s, b, h, q, kv: s + torch.round((q - kv) / 2) + ((q + kv) * 0.5).round(),
    "logical operations of two": lambda s, b, h, q, kv: s + torch.logical_or(q > kv, h) + 2 * torch.logical_xor(q, kv > 2),
    "clamps of one end": lambda s, b, h, q, kv: torch.clamp_min(s, -1.0).clamp_max(2.0) + torch.clamp_max(q - kv, 3),
    "rows of 64": lambda s, b, h, q, kv: s + 0.1 * torch.dot(WIDE[q], WIDE[kv]) + WIDE[q].amax() - (WIDE[kv] * s).sum() / 64,
    "atan2 of integers": lambda s, b, h, q, kv: s + torch.atan2(q - 3, kv - 4),
    "hypot of integers": lambda s, b, h, q, kv: s - torch.hypot((q % 4 - kv % 4) * 1.0, (q // 4 - kv // 4) * 1.0),
    "an index that is detached": lambda s, b, h, q, kv: s + FLOATS.detach()[q.detach()],
    "an integer beyond 32 bits in a comparison": lambda s, b, h, q, kv: torch.where(q < 2**40, s, 0.0),
}


@pytest.mark.parametrize("name", SCORES)
def test_a_score_function_is_torchs(name):
    check(SCORES[name])


MASKS = {
    "causal": lambda b, h, q, kv: q >= kv,
    "dilated": lambda b, h, q, kv: ((q - kv) % 3 == 0) & (q >= kv),
    "blocks": lambda b, h, q, kv: (q // 4) == (kv // 4),
    "not": lambda b, h, q, kv: ~(q == kv),
    "or": lambda b, h, q, kv: (q < 3) | (kv < 2) | (b == h),
    "xor": lambda b, h, q, kv: (q < 3) ^ (kv < 5),
    "bools": lambda b, h, q, kv: BOOLS[kv],
    "padding of a batch": lambda b, h, q, kv: kv < INTS.abs()[b],
    "equality of bools": lambda b, h, q, kv: (q > 3) == (kv > 3),
    "order of bools": lambda b, h, q, kv: (q > 3) <= BOOLS[kv],
    "where of bools": lambda b, h, q, kv: torch.where(h == 0, q >= kv, kv >= q),
    "new_ones": lambda b, h, q, kv: b.new_ones((), dtype=torch.bool),
    "a tensor": lambda b, h, q, kv: torch.tensor(True),
    "any of a row": lambda b, h, q, kv: (BLOCKS[b, h] == kv // 2).any(dim=-1),
    "all of a row": lambda b, h, q, kv: torch.all(TABLE[q] + 1 > TABLE[kv]) | (BLOCKS[b][h] > 0).all(),
    "isin": lambda b, h, q, kv: torch.isin(kv, SORTED) | q.eq(kv),
    "isin inverted, of one": lambda b, h, q, kv: torch.isin(kv, 3, invert=True) & torch.isin(q, BLOCKS[0]),
    "documents by their bounds": lambda b, h, q, kv: torch.searchsorted(SORTED, q) == torch.searchsorted(SORTED, kv),
    "any of several": lambda b, h, q, kv: torch.stack([q == kv, kv < 2, q > 8]).any() & (q >= 0).all(),
    "close floats": lambda b, h, q, kv: torch.isclose(FLOATS[q], FLOATS[kv], atol=0.5),
    "near points": lambda b, h, q, kv: (TABLE[q] - TABLE[kv]).norm() < 2,
    "float arithmetic": lambda b, h, q, kv: torch.sqrt((q * q + kv * kv).float()) < 9.5,
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_function_is_torchs(name):
    mask_check(MASKS[name])


class Window:
    def __init__(self, size):
        self.size = size

    def __call__(self, b, h, q, kv):
        return (q - kv).abs() < self.size

    def method(self, b, h, q, kv):
        return q - kv < self.size


def test_callables_of_every_kind_are_traced():
    for size in (2, 5):
        mask_check(lambda b, h, q, kv: Window(size)(b, h, q, kv))
        traced = [create_block_mask(m, *EXTENTS, BLOCK_SIZE=1).kv_num_blocks + create_block_mask(
            m, *EXTENTS, BLOCK_SIZE=1).full_kv_num_blocks for m in (
            Window(size), Window(size).method, functools.partial(lambda n, b, h, q, kv: (q - kv).abs() < n, size))]
        assert torch.equal(traced[0], traced[2]) and not torch.equal(traced[0], traced[1])


class Cap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.tanh(x / 2) * 2


def test_an_autograd_function_inside_a_score_is_its_forward():
    scores = torch.randn(1, 1, 4, 5)
    q = scores.clone()
    k = torch.eye(5).expand(1, 1, 5, 5)
    out = flex_attention(q, k, k, lambda s, b, h, i, j: Cap.apply(s), scale=1.0)
    close("out", out, torch.softmax(torch.tanh(scores.double() / 2) * 2, -1), torch.float32, 25)


def program(rng, depth):
    """A random score function, as nested closures over torch functions."""
    if depth == 0:
        return rng.choice([
            lambda s, b, h, q, kv: s, lambda s, b, h, q, kv: s * 0.5, lambda s, b, h, q, kv: q, lambda s, b, h, q, kv: kv,
            lambda s, b, h, q, kv: h, lambda s, b, h, q, kv: q - kv, lambda s, b, h, q, kv: FLOATS[kv],
            lambda s, b, h, q, kv: INTS[q], lambda s, b, h, q, kv: CUBE[b, h, kv], lambda s, b, h, q, kv: 3,
            lambda s, b, h, q, kv: SMALL[kv], lambda s, b, h, q, kv: q > kv, lambda s, b, h, q, kv: 0.75,
            lambda s, b, h, q, kv: CUBE[b][h][q - kv],
        ])
    x, y, z = (program(rng, depth - 1) for _ in range(3))
    number = rng.choice([2, 3, -3, 5])
    call = lambda f: lambda *p: f(*(g(*p) for g in (x, y, z)))  # noqa: E731
    tensor = lambda v: v if isinstance(v, torch.Tensor) or hasattr(v, "cast") else torch.tensor(v)  # noqa: E731
    return call(rng.choice([
        lambda a, b, c: a + b, lambda a, b, c: tensor(a) * 1 - b, lambda a, b, c: a * b,
        lambda a, b, c: torch.where(tensor(a) > b, b, c), lambda a, b, c: torch.maximum(tensor(a) + 0, tensor(b) + 0),
        lambda a, b, c: (a + 0) // number, lambda a, b, c: torch.tanh(tensor(a) * 0.25),
        lambda a, b, c: (tensor(a) + 0).abs(), lambda a, b, c: torch.where((tensor(a) <= b) & (tensor(b) != c), a, c),
        lambda a, b, c: torch.clamp(tensor(a) * 1.0, -2.0, 2.5), lambda a, b, c: (tensor(a) + 0.5) / number,
        lambda a, b, c: (tensor(a) * 1).to(torch.float32) * b,
    ]))


class BoolsSubtracted(TorchFunctionMode):
    """Promotes a bool before it is subtracted from a number or a number from it. Torch's vmap does so when one of
    them alone varies along its axis, and refuses it otherwise."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.__sub__, torch.Tensor.sub, torch.Tensor.__rsub__) and isinstance(args[1], torch.Tensor):
            a, b = args
            args = (a.to(b.dtype), b) if a.dtype == torch.bool else (a, b.to(a.dtype)) if b.dtype == torch.bool else args
        return func(*args, **(kwargs or {}))


#: Random programs that are compared; scripts/python-suite.sh asks for 1,000.
PROGRAMS = int(os.environ.get("FOVEATE_PROGRAMS", "60"))


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_a_random_program_is_torchs_or_is_refused(seed):
    rng = random.Random(seed)
    inner = program(rng, rng.choice([2, 3, 4]))

    def score_mod(score, b, h, q, kv):
        return score * 0.125 + torch.tanh(0.01 * inner(score, b, h, q, kv))

    try:
        dense(score_mod, EXTENTS, torch.zeros(EXTENTS))
    except (RuntimeError, TypeError) as refusal:
        if "with a bool tensor" in str(refusal):
            with BoolsSubtracted():
                check(score_mod)
            return
        q = torch.zeros(2, 3, 11, 8)
        with pytest.raises((TraceError, TypeError)):
            flex_attention(q, torch.zeros(2, 3, 13, 8), torch.zeros(2, 3, 13, 8), score_mod)
        return
    check(score_mod)


def gradient(score_mod, learned, extents=(2, 3, 7, 13)):
    """Gradients of captured tensors beside those of plain indexing (torch's vmap has none for most)."""
    q, k, v = (torch.randn(extents[0], extents[1], n, 8, generator=G) for n in (extents[2], extents[3], extents[3]))
    ours = torch.autograd.grad(flex_attention(q, k, v, score_mod).square().sum(), learned)
    indices = (torch.arange(n).reshape([-1 if a == axis else 1 for a in range(4)]) for axis, n in enumerate(extents))
    scores = q.double() @ k.double().transpose(-2, -1) / math.sqrt(8)
    gold = torch.softmax(score_mod(scores, *indices), -1) @ v.double()
    golds = torch.autograd.grad(gold.square().sum(), learned)
    for one, two in zip(ours, golds):
        close("gradient", one, two, one.dtype, 13 * 8 * 42)


def test_gradients_reach_captured_tensors_through_views_and_torch_functions():
    table = torch.randn(3, 13, dtype=torch.float64).requires_grad_()
    slope = torch.randn(3, requires_grad=True)
    offset = torch.randn((), requires_grad=True)
    half = torch.randn(13, dtype=torch.float16).requires_grad_()
    gradient(
        lambda s, b, h, q, kv: s * offset + table.exp()[h, kv] + F.softplus(slope)[h] * (q - kv)
        + table.t()[kv, h] * half[kv].float(),
        (table, slope, offset, half),
    )


#: Functions whose plain formulas cancel, by where they are looked at: from and up to which size, and of which signs.
#: Farther below 0 torch's own gradient of expm1 and its ndtr cancel in float64.
CANCELLING = {
    "log1p": (torch.log1p, 1e-30, 1e30, (1,)), "log1p below 0": (torch.log1p, 1e-30, 0.999, (-1,)),
    "expm1": (torch.expm1, 1e-30, 80, (1,)), "expm1 below 0": (torch.expm1, 1e-30, 20, (-1,)),
    "log of expm1": (lambda x: torch.log(torch.expm1(x)), 1e-30, 0.3, (1,)),
    "softplus": (F.softplus, 1e-30, 80, (1, -1)), "softplus of beta": (lambda x: F.softplus(x, 0.5), 1e-30, 80, (1, -1)),
    "logsigmoid": (F.logsigmoid, 1e-30, 80, (1, -1)), "erfc": (torch.erfc, 1e-30, 9, (1, -1)),
    "ndtr": (torch.special.ndtr, 1e-30, 5, (1, -1)), "sinh": (torch.sinh, 1e-30, 80, (1, -1)),
    "asinh": (torch.asinh, 1e-30, 1e30, (1, -1)), "atanh": (torch.atanh, 1e-30, 0.99, (1, -1)),
    "xlog1py": (lambda x: torch.special.xlog1py(x, x), 1e-15, 1e15, (1,)), "elu": (F.elu, 1e-30, 80, (-1,)),
}


@pytest.mark.parametrize("name", CANCELLING)
def test_functions_do_not_cancel_at_any_size(name):
    function, least, most, signs = CANCELLING[name]
    sizes = torch.logspace(math.log10(least), math.log10(most), 500, dtype=torch.float64)
    x = torch.cat([sign * sizes for sign in signs]).float().requires_grad_()
    # Each query has one key, whose score is its lse.
    q, k, v = torch.zeros(1, 1, len(x), 8), torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8)
    _, aux = flex_attention(q, k, v, lambda s, b, h, i, j: function(x[i]), return_aux=AuxRequest(lse=True))
    double = x.detach().double().requires_grad_()
    gold = function(double)
    ours, golds = torch.autograd.grad(aux.lse.sum(), x)[0], torch.autograd.grad(gold.sum(), double)[0]
    for what, one, two in (("value", aux.lse.flatten(), gold), ("gradient", ours, golds)):
        # Numbers of f32 without leading zeros.
        normal = two.abs() > 2.0**-120
        off = ((one.double() - two).abs() / two.abs())[normal]
        assert float(off.max()) < 1e-5, f"the {what} at {float(x.detach()[normal][off.argmax()]):.3g} is off by {float(off.max()):.3g}"
        assert bool((one[~normal].abs() < 2.0**-119).all())


@pytest.mark.parametrize("name, x, y", [
    ("log1p", -1.0, -math.inf), ("log1p", math.inf, math.inf), ("log1p", -2.0, math.nan), ("log1p", 0.0, 0.0),
    ("expm1", -math.inf, -1.0), ("expm1", math.inf, math.inf), ("expm1", math.nan, math.nan),
    ("softplus", -math.inf, 0.0), ("softplus", math.inf, math.inf), ("erfc", math.inf, 0.0), ("erfc", -math.inf, 2.0),
    ("asinh", math.inf, math.inf), ("asinh", -1e30, math.asinh(-1e30)), ("atanh", 1.0, math.inf), ("sinh", -math.inf, -math.inf),
])
def test_functions_at_the_ends_of_their_domains(name, x, y):
    q, k, v = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8)
    table, function = torch.tensor([x]), getattr(torch, name, None) or getattr(F, name)
    _, aux = flex_attention(q, k, v, lambda s, b, h, i, j: function(table[i]), return_aux=AuxRequest(max_scores=True))
    torch.testing.assert_close(aux.max_scores, torch.full((1, 1, 1), y), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("read", ["0-d", "an axis", "all points", "expanded", "twice", "a row"])
def test_captured_tensors_of_every_dtype_get_gradients_in_it(read, dtype):
    def leaf(*shape):
        return torch.randn(shape, generator=G).to(dtype).requires_grad_()

    if read == "0-d":
        learned = leaf()
        score_mod = lambda s, b, h, q, kv: s * learned  # noqa: E731
    elif read == "an axis":
        learned = leaf(13)
        score_mod = lambda s, b, h, q, kv: s + learned[kv]  # noqa: E731
    elif read == "all points":
        learned = leaf(2, 3, 7, 13)
        score_mod = lambda s, b, h, q, kv: s + learned[b, h, q, kv]  # noqa: E731
    elif read == "expanded":
        learned = leaf(3, 1)
        score_mod = lambda s, b, h, q, kv: s * learned.expand(3, 13)[h, kv]  # noqa: E731
    elif read == "twice":
        learned = leaf(3, 13)
        score_mod = lambda s, b, h, q, kv: s * learned[h, kv] + learned[h, q]  # noqa: E731
    else:
        learned = leaf(13, 5)
        rows = learned.double()  # Of plain indexing, which has no dot of one row.

        def score_mod(s, b, h, q, kv):
            if isinstance(s, torch.Tensor):
                return s + (rows[q] * rows[kv]).sum(-1)
            return s + torch.dot(learned[q], learned[kv])

    gradient(score_mod, (learned,))


def halved(i):
    return i // 2


MODULE = types.ModuleType("module")
MODULE.halved = halved


def test_numbers_in_the_source_are_constants_in_what_it_calls_too():
    def mask(b, h, i, j):
        near = halved(i) - j < 1
        for step in (4, 8):
            near = near | (j == step)
        return near

    text = _trace.mask(mask, EXTENTS).text()
    assert "mn" not in text and all(n in text for n in ("/ 2", "< 1", "4", "8")), text
    for called in (lambda i: (lambda x: halved(x))(i), lambda i: MODULE.halved(i)):
        text = _trace.mask(lambda b, h, i, j: called(i) < j, EXTENTS).text()
        assert "mn" not in text and "/ 2" in text, text


@pytest.mark.parametrize("score", [
    lambda n: lambda s, b, h, i, j: silu(s) + n,
    lambda n: lambda s, b, h, i, j: torch.add(s, i, alpha=n),
    lambda n: lambda s, b, h, i, j: s - torch.sub(i, j, alpha=n),
    lambda n: lambda s, b, h, i, j: torch.addcmul(s, i, j, value=n),
    lambda n: lambda s, b, h, i, j: torch.rsub(s, i, alpha=n),
])
def test_numbers_of_torch_and_of_no_effect_are_run_time_scalars_too(score):
    assert len({_trace.score(score(n), EXTENTS).text() for n in (0, 1, 2, 3)}) == 1


def test_numbers_of_the_tracer_are_constants():
    for score in (lambda s, b, h, i, j: torch.reciprocal(s), lambda s, b, h, i, j: torch.log10(s)):
        assert "sn" not in _trace.score(score, EXTENTS).text()


def test_a_function_that_calls_what_traces_another_keeps_its_own_numbers():
    q = torch.randn(1, 2, 20, 8)

    def within(wide, first):
        def mask(b, h, i, j):
            near = i - j < wide
            causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, 20, 20, device=q.device).mask_mod
            return near & causal(b, h, i, j) & (j > first)

        return Mask(mask)

    for wide, first in ((9, 4), (5, 3), (7, 6)):
        gold = Mask.causal() & Mask("q - kv < wide & kv > first", wide=wide, first=first)
        ours, theirs = (flex_attention(q, q, q, block_mask=mask) for mask in (within(wide, first), gold))
        assert torch.equal(ours, theirs), (wide, first)


def test_a_captured_number_compiles_nothing_new():
    q = torch.randn(1, 1, 8, 8)
    texts = set()
    for window in (-3, -1, 0, 1, 2, 3, 17, 400):
        texts.add(_trace.mask(lambda b, h, i, j: i - j < window, EXTENTS).text())
    assert len(texts) == 1, texts
    for low, high in ((0, 1), (-7, 2), (3, 5)):
        texts.add(_trace.score(lambda s, b, h, i, j: s + torch.clamp(i - j, low, high), EXTENTS).text())
    assert len(texts) == 2, texts
    for scale in (0.3, 0.7):
        out = flex_attention(q, q, q, lambda s, b, h, i, j: s * scale)
        close("out", out, torch.softmax(q @ q.transpose(-2, -1) / math.sqrt(8) * scale, -1) @ q, torch.float32, 64)


def test_the_manual_lists_the_operations_that_there_are_and_no_others():
    import pathlib

    manual = (pathlib.Path(__file__).parents[2] / "docs/python.md").read_text()
    table = manual.split("| arithmetic |")[1].split("\n\n")[0]
    listed = set(re.findall(r"`(\w+)`", table))
    assert listed == {*_calls.OPERATIONS, *_calls.REDUCTIONS, *_calls.PRODUCTS, *_calls.READING}


SCALES = torch.tensor([0.5, 2.0])


class _Applied(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return torch.ops.foveate_test.tanh(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


@pytest.fixture(scope="module")
def library():
    """Operators of a library: one that consists of torch's, one that has the name of another of torch's, one that reads a
    tensor of its own, one that looks at its argument, one that nothing is known of, one of two results, and one that has a body
    for all devices, in an `autograd.Function` or out of it."""
    library = torch.library.Library("foveate_test", "DEF")
    bodies = {
        "cap(Tensor x, float most, *, bool twice=False) -> Tensor": lambda x, most, twice=False: torch.tanh(x / most) * most * (1 + twice),
        "relu(Tensor x) -> Tensor": lambda x: x * 0.25 + 1,
        "scaled(Tensor x) -> Tensor": lambda x: x * SCALES[1],
        "choose(Tensor x) -> Tensor": lambda x: x if x > 0 else -x,
        "two(Tensor x) -> (Tensor, Tensor)": lambda x: (x + 1, x - 1),
    }
    for schema, body in bodies.items():
        library.define(schema)
        library.impl(schema.split("(")[0], body, "CompositeImplicitAutograd")
    library.define("opaque(Tensor x) -> Tensor")
    library.impl("opaque", lambda x: x + 1, "CPU")
    library.impl("opaque", torch.empty_like, "Meta")
    library.define("tanh(Tensor x) -> Tensor")
    library.impl("tanh", lambda x: torch.ops.foveate_test.relu(x).tanh() * 3, "CompositeExplicitAutograd")
    yield torch.ops.foveate_test
    library._destroy()


def test_operators_that_consist_of_others_are_traced_through(library):
    q = torch.randn(2, 4, 10, 8, requires_grad=True)
    pairs = (
        (lambda s, b, h, i, j: library.cap(s, 2.0), lambda s, b, h, i, j: torch.tanh(s / 2.0) * 2.0),
        (lambda s, b, h, i, j: library.cap(s, -0.5, twice=True), lambda s, b, h, i, j: torch.tanh(s / 0.5)),
        (lambda s, b, h, i, j: library.cap.default(s + i, 3.0), lambda s, b, h, i, j: torch.tanh((s + i) / 3.0) * 3.0),
        (lambda s, b, h, i, j: library.relu(s), lambda s, b, h, i, j: s * 0.25 + 1),
        (lambda s, b, h, i, j: s + library.relu(i - j), lambda s, b, h, i, j: s + (i - j) * 0.25 + 1),
        (lambda s, b, h, i, j: torch.ops.aten.tanh.default(s), lambda s, b, h, i, j: torch.tanh(s)),
        (lambda s, b, h, i, j: library.tanh(s), lambda s, b, h, i, j: torch.tanh(s * 0.25 + 1) * 3),
        (lambda s, b, h, i, j: _Applied.apply(s), lambda s, b, h, i, j: torch.tanh(s * 0.25 + 1) * 3),
    )
    for by_operator, plain in pairs:
        outs = [flex_attention(q, q, q, score) for score in (by_operator, plain)]
        torch.testing.assert_close(*outs, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), q)[0] for out in outs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name, words", [
    ("choose", "`foveate_test.choose` does not decompose"),
    ("opaque", "`foveate_test.opaque.default` has no decomposition"),
    ("two", "gives several tensors"),
    ("scaled", "does not decompose"),
])
def test_an_operator_that_cannot_be_traced_through_is_named(library, name, words):
    q = torch.randn(1, 1, 4, 8)
    for _ in range(2):
        with pytest.raises(TraceError, match=words) as raised:
            flex_attention(q, q, q, lambda s, b, h, i, j: getattr(library, name)(s))
        assert "\n" not in str(raised.value)
