"""``foveate.Mask``: named masks, text and their combinations, beside the formulas."""

import copy
import pickle

import numpy as np
import pytest
import torch
from reference import UNREAD, attention, close

from foveate import Mask, create_block_mask, create_mask, explain, flex_attention

L, S = 70, 90
G = torch.Generator().manual_seed(4)
IDS = torch.repeat_interleave(torch.arange(5), torch.tensor([20, 1, 30, 9, 30]))
BATCHED = torch.stack([IDS, IDS.flip(0)])
PREFIXES = torch.tensor([3, 40])
I, J = torch.arange(L)[:, None], torch.arange(S)[None, :]
CU_Q = torch.tensor([0, 10, 10, 33, 61], dtype=torch.int32)
CU_K = torch.tensor([0, 5, 20, 20, 88])


def ids_of(offsets, n):
    ids = torch.full((n,), -1)
    for document, (start, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist())):
        ids[start:end] = document
    return ids


QI, KI = ids_of(CU_Q, L)[:, None], ids_of(CU_K, S)[None, :]
BOTH = torch.stack([b[:L, None] == b[None, :] for b in BATCHED])[:, None]
CASES = {
    "causal": (Mask.causal(), I >= J),
    "bottom right": (Mask.causal(bottom_right=True), I + S - L >= J),
    "sliding window": (Mask.sliding_window(9), (I >= J) & (I - J < 9)),
    "window": (Mask.window(7, 5), (J >= I - 7) & (J <= I + 5)),
    "chunked": (Mask.chunked(16), I // 16 == J // 16),
    "dilated": (Mask.dilated(12, 3), ((I - J).abs() <= 12) & ((I - J) % 3 == 0)),
    "global tokens": (Mask.global_tokens(4), (I < 4) | (J < 4)),
    "prefix": (Mask.prefix(20), (J < 20) | (I >= J)),
    "prefix of each batch": (Mask.prefix(PREFIXES), (J < PREFIXES[:, None, None, None]) | (I >= J)),
    "document": (Mask.document(IDS), IDS[:L, None] == IDS[None, :]),
    "document of each batch": (Mask.document(BATCHED), BOTH),
    "document pair": (Mask.document(IDS[:L], BATCHED), IDS[:L, None] == BATCHED[:, None, None, :]),
    "cu_seqlens": (Mask.from_cu_seqlens(CU_Q, CU_K), (QI == KI) & (QI >= 0) & (KI >= 0)),
    "text": (Mask("causal & (document | kv < n)", doc=IDS, n=12), (I >= J) & ((IDS[:L, None] == IDS[None]) | (J < 12))),
    "numbers of numpy": (
        Mask("causal & f32(kv) < n & q - kv < w", n=np.float32(11.5), w=np.int64(8)),
        (I >= J) & (J < 12) & (I - J < 8),
    ),
    "a truth value": (Mask("causal & (kv < 12 | all)", all=False), (I >= J) & (J < 12)),
    "a truth value of numpy": (Mask("causal & (kv < 12 | all)", all=np.bool_(False)), (I >= J) & (J < 12)),
    "text of heads": (
        Mask("q - kv < w[h]", w=torch.tensor([3, 9, 1, 70])),
        I - J < torch.tensor([3, 9, 1, 70])[:, None, None],
    ),
    "two windows": (Mask.sliding_window(40) & ~Mask.sliding_window(9), (I - J < 40) & (I - J >= 9)),
    "either": (Mask.sliding_window(5) | Mask.chunked(8), ((I >= J) & (I - J < 5)) | (I // 8 == J // 8)),
    "with a function": (
        Mask.causal() & (lambda b, h, i, j: j % 2 == h % 2),
        (I >= J) & (J % 2 == torch.arange(4)[:, None, None] % 2),
    ),
    "function first": ((lambda b, h, i, j: j != 3) & Mask.causal(), (I >= J) & (J != 3)),
}


def causal(b, h, q, kv):
    return q >= kv


BLOCK = create_block_mask(causal, None, None, L, S, device="cpu")


def operands():
    return tuple(torch.randn(2, 4, n, 8, generator=G).requires_grad_() for n in (L, S, S))


@pytest.mark.parametrize("name", CASES)
def test_a_mask_is_its_formula(name):
    mask, gold = CASES[name]
    gold = gold.expand(2, 4, L, S)
    q, k, v = operands()
    out = flex_attention(q, k, v, block_mask=mask)
    expected, _ = attention(q, k, v, mask=gold)
    close("out", out, expected, q.dtype, S * 8)
    ours = torch.autograd.grad(out.square().sum(), (q, k, v))
    for one, two in zip(ours, torch.autograd.grad(expected.square().sum(), (q, k, v))):
        close("gradient", one, two, q.dtype, S * 8)
    double = flex_attention(*(t.double() for t in (q, k, v)), block_mask=mask)
    assert torch.allclose(double, expected, atol=1e-12)
    assert torch.equal(create_mask(mask, 2, 4, L, S), gold)
    block_mask = create_block_mask(mask, 2, 4, L, S, BLOCK_SIZE=16)
    close("out", flex_attention(q, k, v, block_mask=block_mask), expected, q.dtype, S * 8)


def test_other_windows_reuse_the_plan_and_are_other_windows():
    q, k, v = operands()
    for outer, inner in ((40, 9), (41, 9), (9, 9), (40, 10), (10, 40), (40, 9)):
        mask = Mask.sliding_window(outer) & ~Mask.sliding_window(inner)
        gold = (I >= J) & (I - J < outer) & (I - J >= inner)
        close("out", flex_attention(q, k, v, block_mask=mask), attention(q, k, v, mask=gold)[0], q.dtype, S * 8)


def test_one_mask_serves_all_lengths():
    mask = Mask.causal() & Mask.sliding_window(20)
    for n in (1, 33, 150):
        q, k, v = (torch.randn(1, 2, n, 8) for _ in range(3))
        i, j = torch.arange(n)[:, None], torch.arange(n)[None]
        gold, _ = attention(q, k, v, mask=(i >= j) & (i - j < 20))
        close("out", flex_attention(q, k, v, block_mask=mask), gold, q.dtype, n * 8)


@pytest.mark.parametrize(
    "make, kind, words",
    [
        (lambda: Mask("causl"), ValueError, "causal"),
        (lambda: Mask("kv < n"), ValueError, "n"),
        (
            lambda: Mask("causal", window=8),
            ValueError,
            "mask `causal`: `window` is given, and the mask does not read it$",
        ),
        (
            lambda: Mask("q >= kv", q=IDS),
            ValueError,
            "mask `q >= kv`: the text form gives `q` a meaning; call the tensor something else$",
        ),
        (lambda: Mask("causal & document", doc=IDS, ids=IDS), ValueError, "`ids` is given, and"),
        (lambda: Mask("score > 0"), ValueError, "score"),
        (lambda: Mask("kv < n", n=2**40), ValueError, "32 bits"),
        (
            lambda: Mask("kv < n", n=np.ones(3)),
            ValueError,
            "mask `kv < n`: `n` must be a number or a tensor, got array",
        ),
        (lambda: Mask("kv < n", n="x"), ValueError, "`n` must be a number or a tensor, got 'x'"),
        (lambda: Mask(3), TypeError, "text"),
        (lambda: Mask.causal() & 3, TypeError, "operand"),
        (lambda: Mask.causal() & "causal", TypeError, "operand"),
        (lambda: "causal" & Mask.causal(), TypeError, "operand"),
        (
            lambda: Mask.causal() and Mask.document(IDS),
            TypeError,
            r"got Mask\(causal\) in `and`, .*: join masks with &, \| and ~",
        ),
        (lambda: Mask.causal() or Mask.document(IDS), TypeError, "join masks with &"),
        (lambda: not Mask.causal(), TypeError, "join masks with &"),
        (lambda: Mask.causal() if Mask.document(IDS) else None, TypeError, "ask whether there is one with `is None`"),
        (lambda: Mask.causal() and BLOCK, TypeError, "join masks with &"),
        (lambda: Mask.causal() and causal, TypeError, "join masks with &"),
        (lambda: any([Mask.causal(), Mask.document(IDS)]), TypeError, "join masks with &"),
        (lambda: Mask("causal\n& document", doc=IDS) and None, TypeError, "got a Mask in"),
        (lambda: Mask(*Mask.causal()), TypeError, "not iterable|iterable, not Mask"),
        (lambda: Mask.from_cu_seqlens(torch.tensor([0, 5, 3])), ValueError, "decrease"),
        (lambda: Mask.from_cu_seqlens(torch.tensor([1, 5])), ValueError, "begin at 0"),
        (lambda: Mask.from_cu_seqlens(CU_Q, torch.tensor([0, 5])), ValueError, "as many"),
        (lambda: Mask.from_cu_seqlens(torch.tensor([0.0, 5.0])), ValueError, "integer"),
        pytest.param(lambda: Mask.document(torch.zeros(3).long()), IndexError, "captured tensor `ids`", marks=UNREAD),
    ],
)
def test_a_wrong_mask_is_one_clear_error(make, kind, words):
    q, k, v = operands()
    with pytest.raises(kind, match=words) as raised:
        flex_attention(q, k, v, block_mask=make())
    assert "\n" not in str(raised.value)


def test_a_long_text_is_shown_by_its_beginning():
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match=r"mask `\({160}\.\.\.`: nested over 80 deep") as raised:
        flex_attention(q, q, q, block_mask=Mask("(" * 5000 + "causal" + ")" * 5000))
    assert len(str(raised.value)) < 320


def test_a_mask_equals_itself_alone_and_may_be_a_key():
    one, other = Mask.causal(), Mask.causal()
    assert one == one and one != other and len({one: 1, other: 2}) == 2


@pytest.mark.parametrize("name", [name for name in CASES if "function" not in name])
def test_a_mask_is_pickled_with_what_it_reads(name):
    """As a data loader's worker hands it over."""
    mask, gold = CASES[name]
    for again in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask)):
        assert repr(again) == repr(mask)
        assert torch.equal(create_mask(again, 2, 4, L, S), gold.expand(2, 4, L, S))


def test_pickle_takes_the_functions_of_a_mask_that_it_takes_of_a_block_mask():
    mask = Mask(causal) & ~Mask.sliding_window(3)
    again = pickle.loads(pickle.dumps(mask))
    assert repr(again) == repr(mask) and torch.equal(create_mask(again, 1, 1, L, S), create_mask(mask, 1, 1, L, S))
    for made in (
        CASES["function first"][0],
        create_block_mask(lambda b, h, i, j: i >= j, None, None, L, S, device="cpu"),
    ):
        with pytest.raises((AttributeError, pickle.PicklingError), match="Can't pickle"):
            pickle.dumps(made)


class Ahead(Mask):
    """A class of masks, which says by itself what they are."""

    def __init__(self, by):
        super().__init__(causal)
        self.by = by

    def __call__(self, b, h, q_idx, kv_idx):
        return super().__call__(b, h, q_idx, kv_idx) & (q_idx - kv_idx >= self.by)


def test_a_mask_of_another_class_is_pickled_as_one_of_it():
    mask = Ahead(3)
    for again in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask)):
        assert type(again) is Ahead and torch.equal(create_mask(again, 1, 1, L, S)[0, 0], I - J >= 3)


def test_a_copy_of_a_mask_reads_tensors_of_its_own():
    ids = IDS.clone()
    mask = Mask.causal() & Mask.document(ids)
    before, again = create_mask(mask, 1, 1, L, S), copy.deepcopy(mask)
    ids.zero_()
    assert torch.equal(create_mask(again, 1, 1, L, S), before)
    assert not torch.equal(create_mask(mask, 1, 1, L, S), before)


@pytest.mark.cpu("the words of a plan of the CPU")
def test_explain_says_what_would_run():
    q, k, v = operands()
    slope = torch.randn(4)
    threads = "1 thread" if torch.get_num_threads() == 1 else f"{torch.get_num_threads()} threads"
    text = explain(q, k, v, lambda s, b, h, i, j: s + slope[h] * j, Mask.causal())
    for words in ("kv <= q", "score + f32(kv) * s0[h]", threads, "\nbackward"):
        assert words in text, text
    with torch.autocast("cpu", torch.bfloat16):
        assert ", bf16, " in explain(q, k, v)
    assert ", f32, " in explain(q, k.bfloat16(), v.bfloat16())
    assert "all scores" in explain(q.double(), k.double(), v.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_offsets_past_the_rows_of_a_call_are_refused_wherever_the_mask_is_used(dtype):
    """They were taken, and of the last documents those rows counted that there were."""
    mask = Mask.from_cu_seqlens(CU_Q, CU_K)
    q, k = torch.randn(1, 2, 61, 8, dtype=dtype), torch.randn(1, 2, 88, 8, dtype=dtype)
    again = pickle.loads(pickle.dumps(mask))
    for made in (mask, again, copy.deepcopy(mask), ~mask, mask & Mask.causal(), Mask.causal() | mask):
        out = flex_attention(q, k, k, block_mask=made)
        with pytest.raises(ValueError, match="cu_seqlens ends at 61, past the 60 queries"):
            flex_attention(q[:, :, :60], k, k, block_mask=made)
        with pytest.raises(ValueError, match="cu_seqlens_k ends at 88, past the 87 keys"):
            flex_attention(q, k[:, :, :87], k[:, :, :87], block_mask=made)
        with pytest.raises(ValueError, match="cu_seqlens ends at 61, past the 60 queries"):
            create_block_mask(made, None, None, 60, 88, device=q.device)
        assert torch.equal(flex_attention(q, k, k, block_mask=made), out)
    assert torch.equal(flex_attention(q, k, k, block_mask=again), flex_attention(q, k, k, block_mask=mask))


def test_a_tensor_of_no_axes_is_a_number_in_a_text():
    window, far, every = torch.tensor(9), torch.tensor(7.5), torch.tensor(False)
    q, k = torch.randn(1, 2, L, 8), torch.randn(1, 2, S, 8)
    for text, names, plain in (
        ("sliding_window(n)", dict(n=window), dict(n=9)),
        ("causal & f32(q - kv) < far", dict(far=far), dict(far=7.5)),
        ("causal | every", dict(every=every), dict(every=False)),
        ("prefix(n)", dict(n=window), dict(n=9)),
    ):
        out = flex_attention(q, k, k, block_mask=Mask(text, **names))
        assert torch.equal(out, flex_attention(q, k, k, block_mask=Mask(text, **plain))), text
    mask = Mask("sliding_window(n)", n=window)
    window.fill_(4)
    assert torch.equal(flex_attention(q, k, k, block_mask=mask), flex_attention(q, k, k, block_mask=Mask.sliding_window(4)))
