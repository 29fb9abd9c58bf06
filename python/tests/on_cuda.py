"""What the tests of CUDA tensors share. Each of their files imports ``pytestmark``, which skips it without a device,
and the fixture ``exact_matmul``, which keeps the reference free of TF32.
"""

import contextlib
import gc

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="skipped: torch finds no CUDA device")

DEVICE = "cuda"
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def exact_matmul():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@contextlib.contextmanager
def no_more_memory():
    """PyTorch's allocator has what it has taken of the device and gets no more, as on a device that is full; other
    processes on the device lack nothing."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def operands(b=2, hq=4, hkv=2, l=200, s=200, e=64, ev=64, dtype=BF16, seed=0):
    g = torch.Generator(DEVICE).manual_seed(seed)
    sizes = ((b, hq, l, e), (b, hkv, s, e), (b, hkv, s, ev))
    return tuple(torch.randn(n, generator=g, device=DEVICE).to(dtype).requires_grad_() for n in sizes)


def like(x, seed):
    g = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(x.shape, generator=g, device=DEVICE).to(x.dtype)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def same_tables(ours, theirs):
    for a, b in zip(ours.as_tuple()[2:-1], theirs.as_tuple()[2:-1]):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
