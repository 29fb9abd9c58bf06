"""Keys in pages: ``foveate.paged``, and what torch's ``PagedAttention`` converts."""

import pytest
import torch
from reference import UNREAD, attention, close, dense
from torch.nn.attention.experimental._paged_attention import PagedAttention

from foveate import AuxRequest, Mask, create_block_mask, flex_attention, paged

G = torch.Generator().manual_seed(15)
PAGE = 13
TABLE = torch.tensor([[4, 1, 7], [0, -1, 99], [3, 3, 5], [-1, -1, -1]])
LENGTHS = torch.tensor([30, 13, 27, 0])
CAUSAL = Mask.causal(bottom_right=True)


def cache(heads, dim, dtype=torch.float32):
    """Eight pages as torch's cache holds them: a view of ``[1, H, pages * page_size, D]``."""
    held = torch.randn(1, heads, 8 * PAGE, dim, generator=G).to(dtype)
    return held, held[0].unflatten(1, (-1, PAGE)).transpose(0, 1)


def gathered(pages, b):
    length = int(LENGTHS[b])
    rows = pages[TABLE[b, : -(-length // PAGE)]].transpose(0, 1).flatten(1, 2)
    return rows[None, :, :length]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keys_in_pages_are_the_gathered_keys(dtype):
    q = torch.randn(4, 6, 5, 8, generator=G).to(dtype)
    (_, k), (_, v) = cache(2, 8, dtype), cache(2, 10, dtype)
    k[6] = v[2] = torch.nan  # Pages that no entry names.
    k[7, :, 4:] = v[5, :, 1:] = torch.nan  # Rows behind the last key.
    bias = torch.randn(6, 30, generator=G)

    def score_mod(score, b, h, i, j):
        return torch.tanh(score) + bias[h, j]

    out, aux = paged(q, k, v, TABLE, LENGTHS, score_mod, CAUSAL, return_aux=AuxRequest(lse=True, max_scores=True))
    assert out.shape == (4, 6, 5, 10) and out.dtype == dtype
    for b in range(4):
        length = int(LENGTHS[b])
        visible = torch.arange(length) <= torch.arange(5)[:, None] + length - 5
        part = q[b : b + 1], gathered(k, b), gathered(v, b)
        gold, lse = attention(*part, score_mod, visible.expand(1, 6, 5, length))
        close("out", out[b : b + 1], gold, dtype, max(length, 1) * 8)
        close("lse", aux.lse[b : b + 1], lse, torch.float32, max(length, 1) * 8)
    assert bool((aux.max_scores[3] == -torch.inf).all())


def test_a_sink_and_narrow_integers_are_taken():
    q = torch.randn(4, 2, 1, 8, generator=G)
    (_, k), (_, v) = cache(2, 8), cache(2, 8)
    sink = torch.randn(2, generator=G)
    one = paged(q, k, v, TABLE, LENGTHS, scale=0.5, sink=sink)
    assert torch.equal(one, paged(q, k, v, TABLE.int(), LENGTHS.int(), scale=0.5, sink=sink))
    alone = flex_attention(q[:1], gathered(k, 0), gathered(v, 0), scale=0.5, sink=sink)
    close("out", one[:1], alone, torch.float32, 30 * 8)


@pytest.mark.parametrize("lse", [True, False])
@pytest.mark.parametrize("max_scores", [True, False])
def test_rows_are_given_that_were_asked_for_and_no_others(lse, max_scores):
    q = torch.randn(4, 2, 1, 8, generator=G)
    (_, k), (_, v) = cache(2, 8), cache(2, 8)
    _, aux = paged(q, k, v, TABLE, LENGTHS, return_aux=AuxRequest(lse=lse, max_scores=max_scores))
    assert (aux.lse is not None, aux.max_scores is not None) == (lse, max_scores)


def test_a_cache_that_grows_gives_what_it_holds_now():
    q = torch.randn(1, 2, 1, 8, generator=G)
    (_, k), (_, v) = cache(2, 8), cache(2, 8)
    table, lengths = torch.tensor([[2, 6, 1]]), torch.tensor([11])
    for _ in range(20):
        length = int(lengths)
        rows = [p[table[0]].transpose(0, 1).flatten(1, 2)[None, :, :length] for p in (k, v)]
        gold, _ = attention(q, *rows)
        close("out", paged(q, k, v, table, lengths, mask=CAUSAL), gold, torch.float32, length * 8)
        lengths += 1


def test_a_backward_says_that_pages_have_no_gradient():
    q = torch.randn(4, 2, 3, 8, generator=G).requires_grad_()
    (_, k), (_, v) = cache(2, 8), cache(2, 8)
    out = paged(q, k, v, TABLE, LENGTHS)
    with pytest.raises(RuntimeError, match="no gradient; gather the keys"):
        out.sum().backward()


@pytest.mark.parametrize("change, words", [
    (dict(query=torch.zeros(2, 8)), "query must be a tensor of 4 axes"),
    (dict(key_pages=torch.zeros(8, 2, PAGE, 8).half()), "one dtype"),
    (dict(query=torch.zeros(4, 3, 5, 8)), "heads"),
    (dict(query=torch.zeros(4, 2, 5, 7)), "key_pages must have the query's head dim 7, got 8"),
    (dict(value_pages=torch.zeros(8, 2, 5, 8)), "value_pages and key_pages must have the same pages, heads and page size, got"),
    (dict(page_table=TABLE.float()), "page_table must be an int32 or int64 tensor of 2 axes"),
    (dict(page_table=TABLE[:2]), "batch"),
    pytest.param(dict(page_table=TABLE.clamp(min=9)), "page", marks=UNREAD),
    pytest.param(dict(page_table=TABLE + 2**32), "page", marks=UNREAD),
    (dict(lengths=LENGTHS[:2]), "batch"),
    pytest.param(dict(lengths=LENGTHS - 1), "-1", marks=UNREAD),
    pytest.param(dict(lengths=LENGTHS + 10), "pages", marks=UNREAD),
    (dict(lengths=[3, 3, 3, 3]), "lengths must be"),
    (dict(scale=float("nan")), "scale must be a finite number"),
])
def test_wrong_input_is_one_clear_error(change, words):
    (_, k), (_, v) = cache(2, 8), cache(2, 8)
    q = torch.randn(4, 2, 5, 8, generator=G)
    arguments = dict(query=q, key_pages=k, value_pages=v, page_table=TABLE, lengths=LENGTHS)
    with pytest.raises(ValueError, match=words) as raised:
        paged(**(arguments | change))
    assert "\n" not in str(raised.value)
    assert not torch.isnan(paged(**arguments)).any()


def test_what_torchs_paged_attention_converts_is_what_it_was_converted_from():
    batch, heads, length, page = 3, 2, 64, 16
    slope = torch.randn(heads, generator=G)

    def causal(b, h, q_idx, kv_idx):
        return q_idx + 10 * b >= kv_idx

    def alibi(score, b, h, q_idx, kv_idx):
        return score + slope[h] * (kv_idx - q_idx)

    q, k, v = (torch.randn(batch, heads, length, 8, generator=G) for _ in range(3))
    pages = PagedAttention(20, page, batch, device=torch.get_default_device())
    k_cache, v_cache = (torch.full((1, heads, 20 * page, 8), torch.nan) for _ in range(2))
    for b in (2, 0, 1):
        pages.reserve(torch.tensor([b]), torch.tensor([length]))
    entries = torch.arange(batch)
    pages.assign(entries, torch.arange(length).expand(batch, -1), k, v, k_cache, v_cache)
    mask = create_block_mask(causal, batch, heads, length, length, BLOCK_SIZE=page)
    out, aux = flex_attention(
        q, k_cache, v_cache, pages.get_score_mod(alibi), pages.convert_logical_block_mask(mask, entries),
        return_aux=AuxRequest(lse=True),
    )
    gold, lse = attention(q, k, v, alibi, dense(causal, (batch, heads, length, length)))
    close("out", out, gold, torch.float32, length * 8)
    close("lse", aux.lse, lse, torch.float32, length * 8)
    views = [c[0].unflatten(1, (-1, page)).transpose(0, 1) for c in (k_cache, v_cache)]
    close(
        "paged",
        paged(q, *views, pages.page_table, torch.full((batch,), length), alibi, causal),
        gold,
        torch.float32,
        length * 8,
    )
