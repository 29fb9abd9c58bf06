"""DTensors sharded by batch and heads, on four ranks, beside whole tensors."""

import os

import pytest
import torch
from processes import run_ranks
from torch.nn.attention import flex_attention as torch_flex

from foveate import AuxRequest, Mask, create_block_mask, flex_attention


def ranks(rank, folder):
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    torch.set_num_threads(1)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2))
    generator = torch.Generator().manual_seed(7)
    slope, sink = torch.randn(8, generator=generator, requires_grad=True), torch.randn(8, generator=generator)
    ids = torch.randint(0, 2, (4, 21), generator=generator)

    def score(s, b, h, q_idx, kv_idx):
        return s + slope[h] * (kv_idx - q_idx) + b

    def document(b, h, q_idx, kv_idx):
        return (ids[b, q_idx] == ids[b, kv_idx]) & (q_idx >= kv_idx - h)

    masks = (
        None,
        Mask(document),
        create_block_mask(document, 4, 8, 21, 21, BLOCK_SIZE=8),
        # Lists without a function say other tiles for each entry and head.
        torch_flex.create_block_mask(document, 4, 8, 21, 21, "cpu", 8),
        torch_flex.create_block_mask(document, 4, None, 21, 21, "cpu", 8),
    )
    for mask in masks:
        for places in ([Shard(0), Shard(1)], [Shard(1), Shard(1)], [Replicate(), Shard(0)]):
            whole = [
                torch.randn(4, heads, 21, dim, generator=generator).requires_grad_()
                for heads, dim in ((8, 8), (4, 8), (4, 12))
            ]
            options = dict(enable_gqa=True, return_aux=AuxRequest(lse=True), sink=sink)
            out, aux = flex_attention(*whole, score, mask, **options)
            d_out = torch.randn(out.shape, generator=generator)
            gold = torch.autograd.grad((out * d_out).sum() + aux.lse.sum(), (*whole, slope))
            parts = [distribute_tensor(t.detach(), mesh, places).requires_grad_() for t in whole]
            ours, ours_aux = flex_attention(*parts, score, mask, **options)
            assert list(ours.placements) == places and ours.shape == out.shape
            torch.testing.assert_close(ours.full_tensor(), out)
            torch.testing.assert_close(ours_aux.lse.full_tensor(), aux.lse)
            loss = (ours * distribute_tensor(d_out, mesh, places)).sum() + ours_aux.lse.sum()
            slope.grad = None
            loss.backward()
            for part, of in zip(parts, gold):
                torch.testing.assert_close(part.grad.full_tensor(), of, rtol=1e-4, atol=1e-5)
            copies = 2 if Replicate() in places else 1
            dist.all_reduce(slope.grad)
            torch.testing.assert_close(slope.grad / copies, gold[3], rtol=1e-4, atol=1e-4)
    whole = torch.randn(4, 6, 21, 8)
    by_length = distribute_tensor(whole, mesh, [Shard(2), Replicate()])
    by_heads = distribute_tensor(whole, mesh, [Shard(1), Shard(1)])
    by_batch = distribute_tensor(whole, mesh, [Shard(0), Shard(0)])
    for call, words in (
        (lambda: flex_attention(by_length, by_length, by_length), "batch and heads can be sharded"),
        (lambda: flex_attention(by_heads, by_heads, by_heads), "6 key and value heads are sharded in 4 parts"),
        (lambda: flex_attention(by_heads, by_length, by_heads), "distribute them alike"),
        (lambda: flex_attention(by_heads, whole, whole), "distribute them alike"),
        (lambda: flex_attention(by_batch, by_batch, by_batch, dropout_p=0.5), "dropout_p needs whole tensors"),
        (lambda: flex_attention(by_batch.double(), by_batch.double(), by_batch.double()), "float64 .* whole tensors"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    dist.destroy_process_group()


@pytest.mark.cpu("its four ranks are processes on a CPU")
def test_sharded_tensors_on_four_ranks_equal_whole_ones(tmp_path):
    run_ranks(ranks, str(tmp_path))
