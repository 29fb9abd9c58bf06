"""Two CUDA devices: a call runs where its tensors lie, and the current device stays what it was."""

import gc
import threading

import pytest
import torch
from on_cuda import exact_matmul, like, operands, pytestmark  # noqa: F401

from foveate import Mask, TraceError, create_block_mask, flex_attention, paged, varlen

DEVICES = torch.cuda.device_count()
two_devices = pytest.mark.skipif(DEVICES < 2, reason=f"skipped: it takes two CUDA devices, and there are {DEVICES}")


def _everything(device, d=0):
    """Results of calls of every kind on a device, and gradients."""
    q, k, v = (t.detach().to(device).requires_grad_() for t in operands(seed=d))
    ids = torch.arange(200, device=device) // 70
    slope = torch.linspace(0.1, 0.4, 4, device=device).requires_grad_()
    sink = torch.linspace(-1, 1, 4, device=device).requires_grad_()
    block_mask = create_block_mask(lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j), None, None, 200, 200, device)
    out = flex_attention(q, k, v, lambda s, b, h, i, j: s + slope[h] * (j - i), block_mask, enable_gqa=True, sink=sink)
    found = [block_mask.kv_indices, out, *torch.autograd.grad(out, (q, k, v, slope, sink), like(out, 1).to(device))]
    rows = [t[0].transpose(0, 1) for t in (q, k, v)]
    cu = torch.tensor([0, 60, 61, 200], device=device)
    found.append(varlen(*rows, cu, mask=Mask.causal()))
    pages = [t.reshape(2, 2, 4, 50, 64).permute(0, 2, 1, 3, 4).reshape(8, 2, 50, 64) for t in (k, v)]
    table = torch.arange(8, dtype=torch.int32, device=device).view(2, 4)
    with torch.no_grad():
        found.append(paged(q[:, :, :1], *pages, table, torch.tensor([130, 7], device=device)))
    return found


@two_devices
def test_calls_on_another_device_give_the_same_and_leave_the_current_one():
    here = _everything("cuda:0")
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated(0)
    there = _everything("cuda:1")
    assert torch.cuda.current_device() == 0 and torch.zeros(1, device="cuda").device.index == 0
    assert torch.cuda.memory_allocated(0) == before
    assert len(here) == len(there)
    for a, b in zip(here, there):
        assert b.device.index == 1
        assert (a.cpu().float() - b.cpu().float()).abs().max() <= 0.02 * a.float().abs().max()
    # The current one may be the other, too.
    with torch.cuda.device(1):
        _everything("cuda:0")
        assert torch.cuda.current_device() == 1


@two_devices
def test_a_graph_of_another_device_is_replayed_there():
    q, k, v = (t.detach().to("cuda:1") for t in operands())
    ids = torch.arange(200, device="cuda:1") // 70
    call = lambda: flex_attention(q, k, v, block_mask=Mask.causal() & Mask.document(ids), enable_gqa=True)  # noqa: E731
    call()
    with torch.cuda.device(1):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()
        ids.copy_(torch.arange(200, device="cuda:1") // 33)
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(out, call())
    assert torch.cuda.current_device() == 0


@two_devices
def test_threads_of_two_devices_run_beside_each_other():
    expected, wrong = [_everything(f"cuda:{d}", d) for d in (0, 1)], []

    def work(device):
        for _ in range(5):
            for a, b in zip(_everything(f"cuda:{device}", device), expected[device]):
                if not (a.float() - b.float()).abs().max() <= 0.02 * b.float().abs().max():
                    wrong.append((device, a.shape))

    threads = [threading.Thread(target=work, args=(d,)) for d in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@two_devices
def test_tensors_of_two_devices_are_one_clear_error():
    q, k, v = operands()
    ids = torch.zeros(200, dtype=torch.int64, device="cuda:1")
    with pytest.raises(TraceError, match="is on cuda:1, and q, k and v are on cuda:0"):
        flex_attention(q, k, v, block_mask=Mask.document(ids), enable_gqa=True)
    with pytest.raises(ValueError, match="cuda:1"):
        flex_attention(q, k.to("cuda:1"), v.to("cuda:1"), enable_gqa=True)
    flex_attention(q, k, v, enable_gqa=True)
