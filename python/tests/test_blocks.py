"""Block masks: tables as torch makes them, and lists that are authoritative."""

import gc
import math
import random
import re

import pytest
import torch
from reference import UNREAD, attention, close, dense
from torch.nn.attention import flex_attention as torch_flex
from torch.utils import _pytree as pytree

from foveate import BlockMask, _blocks, and_masks, create_block_mask, create_mask, flex_attention, noop_mask, or_masks

DOCUMENTS = torch.tensor([0] * 100 + [1] * 37 + [2] * 163 + [3] * 90)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def same_document(b, h, q_idx, kv_idx):
    return DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]


def window(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() <= 40 + 30 * h


def prefix(b, h, q_idx, kv_idx):
    return (kv_idx < 50 * (b + 1)) | (q_idx >= kv_idx)


MASKS = [causal, same_document, window, prefix, noop_mask, and_masks(causal, same_document), or_masks(window, prefix)]
FIELDS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices",
          "full_q_num_blocks", "full_q_indices")


@pytest.mark.parametrize("tile", [128, 64, (32, 96), 7, (1000, 16)])
@pytest.mark.parametrize("mask_mod", MASKS, ids=lambda m: m.__name__)
def test_tables_are_torchs_bit_for_bit(mask_mod, tile):
    for batch, heads, q_len, kv_len in ((2, 3, 390, 390), (None, None, 256, 384), (1, 2, 130, 257)):
        ours = create_block_mask(mask_mod, batch, heads, q_len, kv_len, BLOCK_SIZE=tile)
        theirs = torch_flex.create_block_mask(
            mask_mod, batch, heads, q_len, kv_len, device=torch.get_default_device(), BLOCK_SIZE=tile
        )
        for field in FIELDS:
            one, two = getattr(ours, field), getattr(theirs, field)
            assert one.dtype == two.dtype and torch.equal(one, two), field
        assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE and ours.shape == theirs.shape
        assert ours.sparsity() == theirs.sparsity() and str(ours) == str(theirs) and type(ours) is BlockMask
        assert torch.equal(ours.to_dense(), theirs.to_dense())


def test_full_tiles_can_stay_among_the_partial_ones():
    mask = create_block_mask(causal, None, None, 300, 300, separate_full_blocks=False)
    assert mask.full_kv_num_blocks is None
    assert torch.equal(mask.kv_num_blocks.flatten(), torch.tensor([1, 2, 3], dtype=torch.int32))


def operands(b=2, h=4, l=200, s=210, d=16):
    g = torch.Generator().manual_seed(3)
    return tuple(torch.randn(b, h, n, d, generator=g).requires_grad_() for n in (l, s, s))


def compare(block_mask, mask, q, k, v):
    out = flex_attention(q, k, v, block_mask=block_mask)
    gold, _ = attention(q, k, v, mask=mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2]))
    close("out", out, gold, q.dtype, k.shape[2] * q.shape[3])
    d_out = torch.randn(out.shape)
    ours = torch.autograd.grad((out * d_out).sum(), (q, k, v))
    golds = torch.autograd.grad((gold * d_out).sum(), (q, k, v))
    for name, one, two in zip(("dq", "dk", "dv"), ours, golds):
        close(name, one, two, q.dtype, k.shape[2] * q.shape[3])


def spread(table, tile, q_len, kv_len):
    """A table of tiles as a mask of points."""
    return table.repeat_interleave(tile[0], -2).repeat_interleave(tile[1], -1)[..., :q_len, :kv_len]


@pytest.mark.parametrize("tile", [(16, 32), (128, 128), (30, 7)])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_lists_say_which_tiles_count(shape, tile):
    q, k, v = operands()
    rows, columns = -(-200 // tile[0]), -(-210 // tile[1])
    g = torch.Generator().manual_seed(rows)
    kind = torch.randint(0, 3, (*shape, rows, columns), generator=g)
    partial, full = (torch_flex._dense_to_ordered(kind == n) for n in (1, 2))
    block_mask = BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=tile, mask_mod=causal, seq_lengths=(200, 210), compute_q_blocks=False
    )
    points = spread(kind, tile, 200, 210)
    mask = (points == 2) | ((points == 1) & dense(causal, (1, 1, 200, 210)))
    compare(block_mask, mask, q, k, v)
    without_function = BlockMask.from_kv_blocks(*partial, BLOCK_SIZE=tile, seq_lengths=(200, 210))
    compare(without_function, points == 1, q, k, v)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_a_table_of_tiles_is_read_by_no_more_axes_than_it_needs(shape):
    lists = create_block_mask(causal, *shape, 200, 210, BLOCK_SIZE=16)
    lists = BlockMask.from_kv_blocks(lists.kv_num_blocks, lists.kv_indices, BLOCK_SIZE=16, seq_lengths=(200, 210))
    said = _blocks.program_of(lists, (2, 4, 200, 210), torch.get_default_device()).text()
    index = re.search(r"m0\[(.*?)\]", said).group(1)
    assert [axis.split()[0] for axis in index.split(", ")] == ["b"] * (shape[0] > 1) + ["h"] * (shape[1] > 1) + [
        "q",
        "kv",
    ], said


@pytest.mark.parametrize("seed", range(8))
def test_lists_of_odd_shapes_count_padded_narrow_unsorted_and_empty(seed):
    """Random tiles and lengths; rows without tiles, lists narrower than the columns or wider, in any order, with
    anything behind their counts."""
    rng = random.Random(seed)
    q_len, kv_len = rng.randint(1, 150), rng.randint(1, 150)
    tile = rng.choice([(1, 1), (3, 50), (128, 7), (64, 64), (33, 20), (200, 200)])
    shape = rng.choice([(1, 1), (2, 1), (1, 4), (2, 4)])
    g = torch.Generator().manual_seed(seed)
    q, k, v = operands(2, 4, q_len, kv_len)
    rows, columns = -(-q_len // tile[0]) + rng.choice([0, 2]), -(-kv_len // tile[1])
    kind = torch.randint(0, 3, (*shape, rows, columns), generator=g)
    kind[:, :, rng.randrange(rows)] = 0
    lists = []
    for n in (1, 2):
        counts = (kind == n).sum(-1).to(torch.int32)
        width = int(counts.max()) + rng.choice([0, 3])
        order = (torch.rand(kind.shape, generator=g) - 2.0 * (kind == n)).argsort(-1).to(torch.int32)
        indices = torch.randint(-5, 500, (*shape, rows, max(width, 1)), generator=g, dtype=torch.int32)
        for at in range(min(width, columns)):
            indices[..., at] = torch.where(at < counts, order[..., at], indices[..., at])
        lists += [counts, indices]
    points = spread(kind, tile, q_len, kv_len)
    mask = (points == 2) | ((points == 1) & dense(causal, (1, 1, q_len, kv_len)))
    made = BlockMask(
        (q_len, kv_len), *lists, None, None, None, None, BLOCK_SIZE=tile, mask_mod=causal
    )
    compare(made, mask, q, k, v)
    # Given other lists, also ones that Python puts in the place of the first, these count.
    made.full_kv_num_blocks = None
    lists[2] = None
    made.full_kv_num_blocks = torch.zeros(*shape, rows, dtype=torch.int32)
    compare(made, (points == 1) & mask, q, k, v)
    made.kv_num_blocks.zero_()
    assert not flex_attention(q, k, v, block_mask=made).any()


def test_lists_that_were_moved_unflattened_and_sliced_count():
    kind = torch.randint(0, 3, (2, 4, 9, 7), generator=torch.Generator().manual_seed(8))
    partial, full = (torch_flex._dense_to_ordered(kind == n) for n in (1, 2))
    made = BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=(20, 30), mask_mod=causal)
    points = spread(kind, (20, 30), 180, 210)
    whole = (points == 2) | ((points == 1) & dense(causal, (1, 1, 180, 210)))
    leaves, spec = pytree.tree_flatten(made)
    q, k, v = operands(2, 4, 180, 210)
    for block_mask in (made, made.to(torch.get_default_device()), pytree.tree_unflatten(leaves, spec)):
        compare(block_mask, whole, q, k, v)
    part = made[1:, [0, 3]]
    part.mask_mod = causal
    compare(part, whole[1:, [0, 3]], *(t[1:, [0, 3]].detach().requires_grad_() for t in (q, k, v)))
    lower = made[:, :, -2:]
    lower.mask_mod, lower.seq_lengths = lambda b, h, i, j: causal(b, h, i + 140, j), (40, 210)
    compare(lower, whole[:, :, 140:], q[:, :, 140:].detach().requires_grad_(), k, v)


def test_what_stands_behind_a_rows_count_is_not_read():
    q, k, v = operands(1, 1, 64, 64)
    counts = torch.tensor([[[1, 2]]], dtype=torch.int32)
    indices = torch.tensor([[[[1, 99], [0, 1]]]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=32, compute_q_blocks=False)
    live = torch.tensor([[False, True], [True, True]])
    compare(mask, spread(live, (32, 32), 64, 64)[None, None], q, k, v)


@UNREAD
def test_a_list_that_names_a_tile_outside_is_refused():
    q, k, v = operands(1, 1, 64, 64)
    counts, indices = (
        torch.tensor([[[1, 2]]], dtype=torch.int32),
        torch.tensor([[[[99, 0], [0, 1]]]], dtype=torch.int32),
    )
    mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=32, compute_q_blocks=False)
    with pytest.raises(ValueError, match="outside"):
        flex_attention(q, k, v, block_mask=mask)


def test_a_slice_with_its_function_back_is_attention_of_the_slice():
    q, k, v = operands()
    whole = create_block_mask(window, 2, 4, 200, 210, BLOCK_SIZE=16)
    part = whole[:, 1:3]
    part.mask_mod = lambda b, h, i, j: window(b, h + 1, i, j)
    mask = dense(window, (2, 4, 200, 210)).expand(2, 4, -1, -1)[:, 1:3]
    compare(part, mask, *(t[:, 1:3].detach().requires_grad_() for t in (q, k, v)))
    rows = whole[:, :, 3:5]
    rows.mask_mod = lambda b, h, i, j: window(b, h, i + 48, j)
    rows.seq_lengths = (32, 210)
    mask = dense(window, (2, 4, 200, 210))[:, :, 48:80]
    compare(rows, mask, q[:, :, 48:80].detach().requires_grad_(), k, v)


def test_an_adjusted_mask_is_cropped_to_its_upper_left_corner():
    q, k, v = operands(1, 2, 96, 128)
    mask = create_block_mask(causal, None, None, 256, 256, BLOCK_SIZE=32)._adjust(96, 128)
    compare(mask, dense(causal, (1, 1, 96, 128)), q, k, v)


def test_masks_of_torch_and_masks_that_were_moved_or_unflattened_count():
    q, k, v = operands()
    mask = dense(window, (2, 4, 200, 210))
    theirs = torch_flex.create_block_mask(window, 2, 4, 200, 210, device=torch.get_default_device())
    ours = create_block_mask(window, 2, 4, 200, 210)
    leaves, spec = pytree.tree_flatten(ours)
    for block_mask in (theirs, ours, ours.to(torch.get_default_device()), pytree.tree_unflatten(leaves, spec)):
        compare(block_mask, mask, q, k, v)


def test_a_mask_made_here_whose_tables_were_edited_is_its_tables():
    q, k, v = operands(1, 1, 128, 128)
    mask = create_block_mask(noop_mask, None, None, 128, 128, BLOCK_SIZE=64)
    compare(mask, torch.ones(1, 1, 128, 128, dtype=torch.bool), q, k, v)
    mask.full_kv_num_blocks[0, 0, 0] = 1
    left = torch.ones(1, 1, 128, 128, dtype=torch.bool)
    left[..., :64, 64:] = False
    compare(mask, left, q, k, v)


def test_masks_are_remembered_weakly():
    from foveate._blocks import _own

    gc.collect()
    before = len(_own)
    mask = create_block_mask(causal, None, None, 64, 64)
    assert len(_own) == before + 1
    del mask
    gc.collect()
    assert len(_own) == before


def test_a_mask_of_fewer_heads_or_entries_is_refused_and_of_more_the_first_count():
    q, k, v = operands(b=4)
    for batch, heads, words in ((3, 1, "batch size 3"), (1, 3, "heads 3")):
        mask = create_block_mask(causal, batch, heads, 200, 210)
        with pytest.raises(ValueError, match=words):
            flex_attention(q, k, v, block_mask=mask)

    def shifted(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx + 7 * b - h

    fits = create_block_mask(shifted, 4, 4, 200, 210)
    more = create_block_mask(shifted, 6, 5, 200, 210)
    listed = torch_flex.create_block_mask(shifted, 6, 5, 200, 210, device=torch.get_default_device())
    out = flex_attention(q, k, v, block_mask=fits)
    for mask in (more, listed):
        assert torch.equal(flex_attention(q, k, v, block_mask=mask), out)
        exact = flex_attention(q.double(), k.double(), v.double(), block_mask=mask)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


def test_a_long_mask_takes_no_memory_of_all_pairs():
    lengths = torch.full((64,), 512)
    documents = torch.repeat_interleave(torch.arange(64), lengths)
    n = documents.numel()
    mask = create_block_mask(
        lambda b, h, i, j: (documents[i] == documents[j]) & (i >= j), None, None, n, n
    )
    assert int(mask.kv_num_blocks.sum()) == n // 128 and int(mask.full_kv_num_blocks.sum()) == 64 * 6


def test_the_default_device_is_of_no_matter_where_tensors_say_theirs():
    q, k, v = (t.detach() for t in operands())
    expected = flex_attention(q, k, v, block_mask=create_block_mask(causal, None, None, 200, 210))
    with torch.device("meta"):
        mask = create_block_mask(causal, None, None, 200, 210, q.device)
        assert torch.equal(flex_attention(q, k, v, block_mask=mask), expected)
        assert flex_attention(q, k, v, block_mask=mask, dropout_p=0.5).device == q.device


def test_a_dense_mask_is_torchs():
    theirs = torch_flex.create_mask(window, 1, 2, 20, 30, device=torch.get_default_device())
    assert torch.equal(create_mask(window, 1, 2, 20, 30), theirs)


@UNREAD
def test_document_ids_beyond_32_bits_are_refused_by_name():
    documents = torch.tensor([0, 1, 2**31])
    with pytest.raises(IndexError, match="2147483648.*32"):
        create_block_mask(lambda b, h, i, j: documents[i] == documents[j], None, None, 3, 3)
    within = torch.tensor([2**31 - 1, -(2**31), 0])
    mask = create_block_mask(lambda b, h, i, j: within[i] == within[j], None, None, 3, 3, BLOCK_SIZE=1)
    assert math.prod(mask.full_kv_num_blocks.shape) == 3 and bool((mask.full_kv_num_blocks == 1).all())
