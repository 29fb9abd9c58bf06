"""CUDA tensors: every result beside dense attention in float64 on the same device. What needs no kernel of its own
comes first, so that a short run says the most."""

import contextlib
import gc
import math
import os
import shutil
import subprocess
import sys
import threading

import pytest
import torch
import torch.utils.checkpoint
from on_cuda import BF16, DEVICE, F16, F32, causal, exact_matmul, like, no_more_memory, operands  # noqa: F401
from on_cuda import pytestmark, same_tables  # noqa: F401
from reference import attention, close, dense

from foveate import AuxRequest, BlockMask, Mask, TraceError, _native, create_block_mask, flex_attention, paged, varlen


def compare(q, k, v, score=None, mask=None, block_mask=None, learned=(), **more):
    """Forward, lse and every gradient beside float64; ``mask`` is a mask function."""
    extents = (*q.shape[:3], k.shape[2])
    if block_mask is None and mask is not None:
        block_mask = Mask(mask)
    out, aux = flex_attention(q, k, v, score, block_mask, enable_gqa=True, return_aux=AuxRequest(lse=True), **more)
    allowed = None if mask is None else dense(mask, extents, device=q.device).expand(extents)
    gold, gold_lse = attention(q, k, v, score, allowed)
    terms = max(extents[2:]) * q.shape[-1]
    # Tensor cores round probabilities to the dtype of the operands.
    low = None if q.dtype == F32 else attention(q, k, v, score, allowed, dtype=q.dtype)[0]
    close("out", out, gold, q.dtype, terms, low)
    close("lse", aux.lse, gold_lse, q.dtype, terms)
    d_out, d_lse = like(out, 1), like(aux.lse, 2)
    alive = gold_lse != -math.inf
    wanted = [t for t in (q, k, v, *learned) if t.requires_grad]
    loss = (out * d_out).sum() + aux.lse.masked_fill(~alive, 0).mul(d_lse).sum()
    ours = torch.autograd.grad(loss, wanted)
    gold_loss = (gold * d_out.double()).sum() + gold_lse.masked_fill(~alive, 0).mul(d_lse.double()).sum()
    golds = torch.autograd.grad(gold_loss, wanted)
    lows = [None] * len(wanted)
    if low is not None:
        low_out, low_lse = attention(q, k, v, score, allowed, dtype=q.dtype)
        low_loss = (low_out * d_out).sum() + low_lse.masked_fill(~alive, 0).mul(d_lse).sum()
        lows = torch.autograd.grad(low_loss, wanted)
    for name, mine, theirs, rough in zip("q k v".split() + ["capture"] * 9, ours, golds, lows):
        assert mine.dtype == theirs.dtype
        rounded = F32 if mine.dtype == q.dtype == F32 else BF16 if BF16 in (mine.dtype, q.dtype) else F16
        close(f"gradient of {name}", mine, theirs, rounded, terms, rough)
    return out, ours


def test_a_causal_call_forward_and_backward_in_bf16():
    compare(*operands(), mask=causal)


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_other_dtypes(dtype):
    compare(*operands(dtype=dtype), mask=causal)


def test_the_result_counts_in_torchs_memory_and_lies_on_torchs_device():
    q, k, v = operands()
    flex_attention(q, k, v, block_mask=Mask(causal), enable_gqa=True).sum().backward()
    del q, k, v
    gc.collect()
    q, k, v = (t.detach() for t in operands(l=1000, s=1000))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = flex_attention(q, k, v, block_mask=Mask(causal), enable_gqa=True)
    assert out.device == q.device
    kept = torch.cuda.memory_allocated() - before
    assert kept >= out.numel() * out.element_size()
    # The statistics of rows, which nobody asked for, are counted while the call runs.
    assert torch.cuda.max_memory_allocated() - before >= kept + 4 * 2 * 4 * 1000


def test_nothing_waits_for_the_device():
    q, k, v = operands()
    document = torch.arange(200, device=DEVICE) // 70
    bias = torch.zeros(4, 200, device=DEVICE, requires_grad=True)

    def run():
        mask = Mask.causal() & Mask.document(document)
        out = flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h, j], mask, enable_gqa=True, dropout_p=0.1)
        torch.autograd.grad(out, (q, k, v, bias), out.detach())

    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_side_streams_are_used():
    q, k, v = (t.detach() for t in operands(l=2000, s=2000))
    expected = flex_attention(q, k, v, block_mask=Mask(causal), enable_gqa=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    def run():
        return flex_attention(q * 2, k / 2, v, block_mask=Mask(causal), enable_gqa=True)

    with torch.cuda.stream(stream):
        # The first time, PyTorch and the engine take memory for the stream, and the driver may wait.
        run()
        stream.synchronize()
        torch.cuda._sleep(4_000_000_000)
        out = run()
    # Not done yet: it was queued behind the sleep.
    assert not stream.query()
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(out, expected)


def test_two_threads_on_two_streams():
    q, k, v = operands(l=777, s=777)
    expected = torch.autograd.grad(flex_attention(q, k, v, block_mask=Mask(causal), enable_gqa=True).sum(), (q, k, v))
    torch.cuda.synchronize()
    failures = []

    def work(seed):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    mine = [t.detach().clone().requires_grad_() for t in (q, k, v)]
                    out = flex_attention(*mine, block_mask=Mask(causal), enable_gqa=True)
                    found = torch.autograd.grad(out.sum(), mine)
                    for name, a, b in zip("qkv", found, expected):
                        # dq is summed in any order.
                        assert (a - b).abs().max() <= 0.02 * b.abs().max(), name
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures


def test_operands_may_be_freed_right_after_the_call():
    q, k, v = (t.detach() for t in operands(l=3000, s=3000))
    expected = flex_attention(q, k, v, block_mask=Mask(causal), enable_gqa=True)
    torch.cuda._sleep(50_000_000)
    copies = [t.clone() for t in (q, k, v)]
    out = flex_attention(*copies, block_mask=Mask(causal), enable_gqa=True)
    del copies
    for _ in range(8):
        torch.full_like(q, math.nan), torch.full_like(k, math.nan)
    assert torch.equal(out, expected)


def test_torchs_own_names_run_here_when_enabled():
    from torch.nn.attention.flex_attention import flex_attention as theirs

    import foveate

    q, k, v = operands()
    expected = flex_attention(q, k, v, block_mask=Mask(causal), enable_gqa=True)
    with foveate.enable():
        block_mask = torch.nn.attention.flex_attention.create_block_mask(causal, None, None, 200, 200)
        assert block_mask.kv_indices.is_cuda
        assert torch.equal(theirs(q, k, v, block_mask=block_mask, enable_gqa=True), expected)


def test_out_of_memory_is_torchs():
    q, k, v = (t.detach() for t in operands(b=1, hq=2, hkv=2, l=128, s=128))
    flex_attention(q, k, v)
    with no_more_memory(), pytest.raises(torch.OutOfMemoryError):
        flex_attention(*(t.expand(4096, 2, 128, 64) for t in (q, k, v)))
    flex_attention(q, k, v)


#: Of the operators: no score, no mask, a scale, no dropout.
PLAIN = (None, [], [], None, [], [], [], [1, 1], 0.3, None, 0.0)


def test_an_operators_memory_error_is_torchs_too():
    q, k, v = (t.detach() for t in operands(b=1, hq=2, hkv=2, l=128, s=128))
    forward = torch.ops.foveate.forward.default
    gold = forward(q, k, v, *PLAIN, False)[0]
    # Torch's allocator is asked for the result itself.
    with no_more_memory(), pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        forward(*(t.expand(4096, 2, 128, 64) for t in (q, k, v)), *PLAIN, False)
    assert torch.equal(forward(q, k, v, *PLAIN, False)[0], gold)


def test_an_operator_takes_no_operand_of_another_device():
    q, k, v = (t.detach() for t in operands(b=1, hq=2, hkv=2, l=128, s=128))
    # Another dtype is converted, where the operand is.
    for other in (k.cpu(), k.cpu().float()):
        with pytest.raises(RuntimeError, match="k is on cpu, and q, k and v are on cuda:0"):
            torch.ops.foveate.forward.default(q, other, v, *PLAIN, False)


@pytest.mark.skipif(
    not hasattr(_native, "panic_next"), reason="skipped: only debug builds of the native module can be let panic"
)
@pytest.mark.parametrize("name", ["forward", "varlen_forward", "paged", "backward", "varlen_backward"])
def test_a_panic_in_an_operator_is_an_exception_and_the_next_call_is_right(name):
    q, k, v = (t.detach() for t in operands(b=1, hq=2, hkv=2, l=128, s=128))
    ends = torch.tensor([0, 100, 128], device=DEVICE)
    where = [ends, ends] if "varlen" in name else []
    if name == "paged":
        where = [torch.zeros(1, 1, dtype=torch.int64, device=DEVICE), torch.tensor([128])]
    operator = getattr(torch.ops.foveate, name).default
    arguments = [q, k, v, *where, *PLAIN, False]
    if "backward" in name:
        out, lse, _ = getattr(torch.ops.foveate, name.replace("back", "for")).default(*arguments)
        arguments = [q, k, v, *where, out, lse, out, None, *PLAIN, [True] * 3, []]
    gold = operator(*arguments)
    _native.panic_next()
    with pytest.raises(RuntimeError, match="a bug in Foveate, please report it: injected by a test"):
        operator(*arguments)
    assert all(
        (a == b).all() or (a - b).abs().max() <= 0.02 * b.abs().max() for a, b in zip(operator(*arguments)[:3], gold)
    )


def test_the_workspaces_memory_error_is_torchs_too():
    q, k, v = operands(b=1, hq=2, hkv=2, l=4096, s=4096)
    out = flex_attention(q, k, v)
    d_out = torch.ones_like(out)
    torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)
    taken = []
    with no_more_memory():
        # What earlier tests of this process left in use may lie in larger pieces, whose rest is free.
        for size in (2 << 20, 1 << 20):
            with contextlib.suppress(torch.OutOfMemoryError):
                while True:
                    taken.append(torch.empty(size, dtype=torch.uint8, device=DEVICE))
        with pytest.raises(torch.OutOfMemoryError):
            torch.autograd.grad(out, (q, k, v), d_out)
    del taken
    torch.autograd.grad(flex_attention(q, k, v), (q, k, v), d_out)


def test_wrong_input_is_one_clear_error_and_the_next_call_is_right():
    q, k, v = (t.detach() for t in operands(l=64, s=64))
    expected = flex_attention(q, k, v, enable_gqa=True)
    here = torch.zeros(64, device="cpu")
    wrong = [
        (ValueError, lambda: flex_attention(q, k.cpu(), v)),
        (TraceError, lambda: flex_attention(q, k, v, lambda s, b, h, i, j: s + here[i], enable_gqa=True)),
        (
            RuntimeError,
            lambda: flex_attention(
                q, k, v, block_mask=create_block_mask(causal, None, None, 64, 64, "cpu"), enable_gqa=True
            ),
        ),
        (
            ValueError,
            lambda: varlen(*(t[0].transpose(0, 1) for t in (q, k, v)), torch.tensor([0, 64], device="cpu")),
        ),
        (ValueError, lambda: flex_attention(q.int(), k, v, enable_gqa=True)),
        (ValueError, lambda: flex_attention(q, k, v, scale=math.nan, enable_gqa=True)),
    ]
    for error, call in wrong:
        with pytest.raises(error) as raised:
            call()
        assert "\n" not in str(raised.value)
        assert torch.equal(flex_attention(q, k, v, enable_gqa=True), expected)


SCRIPT = """
import torch, foveate
q = torch.zeros(1, 1, 16, 64, device="cuda", dtype=torch.bfloat16)
try:
    foveate.flex_attention(q, q, q)
except RuntimeError as error:
    print("said:", error)
else:
    print("ran")
"""


#: In place of the C library's: it opens no NVRTC, wherever the machine has one.
NO_NVRTC = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
void *dlopen(const char *name, int flags) {
    void *(*real)(const char *, int) = (void *(*)(const char *, int))dlsym(RTLD_NEXT, "dlopen");
    return real(name && strstr(name, "nvrtc") ? "/nowhere/libnvrtc.so" : name, flags);
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="skipped: there is no C compiler")
def test_a_missing_nvrtc_is_one_sentence(tmp_path):
    (tmp_path / "hide.c").write_text(NO_NVRTC)
    hide = tmp_path / "hide.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", hide, tmp_path / "hide.c", "-ldl"], check=True)
    environment = {**os.environ, "FOVEATE_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}

    def run(**more):
        command = [sys.executable, "-c", SCRIPT]
        return subprocess.run(command, env=environment | more, capture_output=True, text=True, timeout=300)

    without = run(LD_PRELOAD=str(hide))
    assert without.returncode == 0 and without.stdout.startswith("said:"), without.stdout + without.stderr
    said = without.stdout.strip()
    assert "\n" not in said and "NVRTC" in said and "pip install nvidia-cuda-nvrtc" in said, said
    assert run().stdout.strip() == "ran"


def test_the_nvrtc_of_torchs_wheels_is_found_without_another_process(tmp_path):
    spy = "import sys\nsys.addaudithook(lambda e, a: print('started', a) if e == 'subprocess.Popen' else None)\n"
    show = "print([l.split()[-1] for l in open('/proc/self/maps') if 'libnvrtc.so' in l][:1])\n"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "FOVEATE_CACHE_DIR": str(tmp_path)}
    environment.pop("FOVEATE_CUDA_LIBRARIES", None)
    run = subprocess.run(
        [sys.executable, "-c", spy + SCRIPT + show], env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0 and "ran" in run.stdout and "started" not in run.stdout, run.stdout + run.stderr
    print(run.stdout)


def test_an_autocast_casts_operands_only():
    q, k, v = operands(dtype=F32)
    slope = torch.randn(4, device=DEVICE)
    with torch.autocast("cuda", torch.bfloat16):
        out = flex_attention(q, k, v, lambda s, b, h, i, j: s + slope[h] * (j - i), enable_gqa=True)
    assert out.dtype == torch.bfloat16
    exact = flex_attention(
        *(t.bfloat16() for t in (q, k, v)), lambda s, b, h, i, j: s + slope[h] * (j - i), enable_gqa=True
    )
    assert torch.equal(out, exact)


def test_a_captured_tensor_must_not_be_written_to_before_the_backward():
    q, k, v = operands()
    slope = torch.randn(4, device=DEVICE)
    out = flex_attention(q, k, v, lambda s, b, h, i, j: s + slope[h] * (j - i), enable_gqa=True)
    slope.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_strides_of_operands_are_kept_and_views_are_read_in_place():
    storage = torch.randn(2, 200, 8, 64, device=DEVICE).bfloat16()
    q, k, v = (storage[:, :, a:b].transpose(1, 2).detach().requires_grad_() for a, b in ((0, 4), (4, 6), (6, 8)))
    out, gradients = compare(q, k, v, mask=causal)
    assert out.transpose(1, 2).is_contiguous()
    assert all(g.transpose(1, 2).is_contiguous() for g in gradients)


def test_checkpointing_repeats_dropout():
    q, k, v = operands()

    def layer(q, k, v):
        return flex_attention(q, k, v, block_mask=Mask(causal), enable_gqa=True, dropout_p=0.3)

    torch.manual_seed(3)
    plain = layer(q, k, v)
    torch.manual_seed(3)
    kept = torch.utils.checkpoint.checkpoint(layer, q, k, v, use_reentrant=False)
    assert torch.equal(plain, kept)
    d_out = like(plain, 4)
    for name, a, b in zip(
        "qkv", torch.autograd.grad(kept, (q, k, v), d_out), torch.autograd.grad(plain, (q, k, v), d_out)
    ):
        assert (a - b).abs().max() <= 0.02 * b.abs().max(), name
    torch.manual_seed(4)
    assert not torch.equal(plain, layer(q, k, v))


def test_a_sink_and_its_gradient():
    q, k, v = operands(dtype=F32)
    sink = torch.randn(4, device=DEVICE, requires_grad=True)
    out, aux = flex_attention(q, k, v, enable_gqa=True, sink=sink, return_aux=AuxRequest(lse=True))
    double = [t.detach().double().requires_grad_() for t in (q, k, v, sink)]
    kk, vv = (t.repeat_interleave(2, 1) for t in double[1:3])
    scores = double[0] @ kk.transpose(2, 3) / 8
    both = torch.cat([scores, double[3].view(1, 4, 1, 1).expand(2, 4, 200, 1)], -1)
    gold = both.softmax(-1)[..., :200] @ vv
    close("out", out, gold, F32, 200 * 64)
    close("lse", aux.lse, both.logsumexp(-1), F32, 200 * 64)
    d_out = like(out, 1)
    ours = torch.autograd.grad(out, (q, k, v, sink), d_out)
    for name, a, b in zip(("q", "k", "v", "sink"), ours, torch.autograd.grad(gold, double, d_out.double())):
        close(f"gradient of {name}", a, b, F32, 200 * 64)


def test_sequences_one_after_another_need_no_offsets_on_the_host():
    g = torch.Generator(DEVICE).manual_seed(0)
    lengths, rows = [70, 1, 0, 129], 210
    cu = torch.tensor([0, 70, 71, 71, 200], device=DEVICE)
    q, k, v = (torch.randn(rows, h, 64, generator=g, device=DEVICE).bfloat16().requires_grad_() for h in (4, 2, 2))
    run = lambda: varlen(q, k, v, cu, max_seqlen_q=129, max_seqlen_k=129, mask=Mask.causal())  # noqa: E731
    out = run()
    gradients = torch.autograd.grad(out, (q, k, v), like(out, 1), retain_graph=True)
    start = 0
    for n in lengths:
        part = [t[start : start + n].transpose(0, 1)[None] for t in (q, k, v)]
        alone = flex_attention(*part, block_mask=Mask.causal(), enable_gqa=True)
        close("out", out[start : start + n].transpose(0, 1)[None], alone.double(), BF16, 129 * 64)
        start += n
    assert torch.equal(out[200:], torch.zeros_like(out[200:]))
    whole = [t.detach()[:200] for t in (q, k, v)]
    seq = torch.repeat_interleave(torch.arange(4, device=DEVICE), torch.tensor(lengths, device=DEVICE))
    q2, k2, v2 = (t.transpose(0, 1)[None].requires_grad_() for t in whole)
    same = Mask(lambda b, h, i, j: (seq[i] == seq[j]) & (i >= j))
    packed = flex_attention(q2, k2, v2, block_mask=same, enable_gqa=True)
    golds = torch.autograd.grad(packed, (q2, k2, v2), like(out, 1)[:200].transpose(0, 1)[None])
    for name, mine, theirs in zip("qkv", gradients, golds):
        close(
            f"gradient of {name}",
            mine[:200].transpose(0, 1)[None],
            theirs.double(),
            BF16,
            200 * 64,
            mine[:200].transpose(0, 1)[None],
        )
        assert torch.equal(mine[200:], torch.zeros_like(mine[200:]))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_keys_in_pages():
    g = torch.Generator(DEVICE).manual_seed(0)
    keys, values = (torch.randn(16, 2, 128, 64, generator=g, device=DEVICE).bfloat16() for _ in range(2))
    table = torch.tensor([[3, 7, 1], [0, 12, -1]], device=DEVICE)
    lengths = torch.tensor([300, 129])
    query = torch.randn(2, 8, 3, 64, generator=g, device=DEVICE).bfloat16()
    out = paged(query, keys, values, table, lengths, mask=Mask.causal(bottom_right=True))
    for b, n in enumerate(lengths.tolist()):
        k, v = (torch.cat([t[p] for p in table[b].tolist() if p >= 0], 1)[None, :, :n] for t in (keys, values))
        alone = flex_attention(query[b : b + 1], k, v, block_mask=Mask.causal(bottom_right=True), enable_gqa=True)
        close("out", out[b : b + 1], alone.double(), BF16, n * 64)


def test_pages_and_lengths_that_32_bits_do_not_hold_are_the_nearest_that_they_hold():
    """In a call and in its operator: the last page, and all keys that the pages of an entry hold."""
    g = torch.Generator(DEVICE).manual_seed(0)
    keys, values = (torch.randn(16, 2, 128, 64, generator=g, device=DEVICE).bfloat16() for _ in range(2))
    query = torch.randn(2, 8, 3, 64, generator=g, device=DEVICE).bfloat16()
    table = torch.tensor([[3, 2**32 + 7, 1], [-(2**40), 12, 2**62 + 4]], device=DEVICE)
    lengths = torch.tensor([2**32 + 5, 300], device=DEVICE)
    held = torch.tensor([[3, 15, 1], [0, 12, 15]], device=DEVICE), torch.tensor([384, 300], device=DEVICE)
    gold = paged(query, keys, values, *held)
    assert torch.equal(paged(query, keys, values, table, lengths), gold)
    mods = (None, [], [], None, [], [], [], [1, 1], 64**-0.5, None, 0.0)
    assert torch.equal(torch.ops.foveate.paged(query, keys, values, table, lengths, *mods, False)[0], gold)


@pytest.mark.parametrize(
    "mask", [None, Mask.causal(bottom_right=True), Mask(lambda b, h, i, j: j % 3 != 1)], ids=["all", "causal", "third"]
)
def test_lengths_of_pages_that_stay_on_the_device_grow_in_a_graph(mask):
    g = torch.Generator(DEVICE).manual_seed(0)
    keys, values = (torch.randn(16, 2, 128, 64, generator=g, device=DEVICE).bfloat16() for _ in range(2))
    table = torch.tensor([[3, 7, 1], [0, 12, -1], [5, -1, 99]], device=DEVICE)
    query = torch.randn(3, 8, 2, 64, generator=g, device=DEVICE).bfloat16()
    lengths = torch.tensor([300, 129, 0], device=DEVICE)
    run = lambda of: paged(query, keys, values, table, of, mask=mask, return_aux=AuxRequest(lse=True))  # noqa: E731
    run(lengths)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(lengths)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, aux = run(lengths)
    for step in ([0, 0, 0], [1, 2, 1], [80, 100, 127], [0, 20, 0]):
        lengths += torch.tensor(step, device=DEVICE)
        graph.replay()
        known, known_aux = run(lengths.cpu())
        close("out", out, known.double(), BF16, 384 * 64)
        close("lse", aux.lse, known_aux.lse.double(), F32, 384 * 64)


def test_torchs_own_block_masks_count():
    from torch.nn.attention.flex_attention import create_block_mask as torchs

    def window(b, h, i, j):
        return (i >= j) & (i - j < 77)

    q, k, v = operands(l=300, s=300)
    compare(q, k, v, mask=window, block_mask=torchs(window, None, None, 300, 300, DEVICE))
    ours = create_block_mask(window, None, None, 300, 300, DEVICE)
    theirs = torchs(window, None, None, 300, 300, DEVICE)
    same_tables(ours, theirs)
    lists = BlockMask.from_kv_blocks(theirs.kv_num_blocks, theirs.kv_indices, BLOCK_SIZE=128, seq_lengths=(300, 300))

    partial = torch.zeros(3, 3, dtype=torch.bool, device=DEVICE)
    for row in range(3):
        partial[row, theirs.kv_indices[0, 0, row, : int(theirs.kv_num_blocks[0, 0, row])].long()] = True
    compare(q, k, v, mask=lambda b, h, i, j: partial[i // 128, j // 128], block_mask=lists)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize(
    "shape", [(2, 4, 2, 200, 200, 64, 64), (1, 6, 3, 77, 130, 40, 24), (1, 2, 2, 130, 130, 192, 128)], ids=str
)
def test_gradients_that_nobody_wants_are_not_made(shape, dtype):
    gc.collect()  # What is freed while memory is counted is not the call's.
    every = [*operands(*shape, dtype=dtype), torch.randn(shape[1], device=DEVICE).requires_grad_()]

    def gradients(*wanted):
        q, k, v, slope = (t.detach().requires_grad_(i in wanted) for i, t in enumerate(every))
        out = flex_attention(q, k, v, lambda s, b, h, i, j: s + slope[h] * (j - i), Mask(causal), enable_gqa=True)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        made = torch.autograd.grad(out, [t for t in (q, k, v, slope) if t.requires_grad], like(out, 1))
        return dict(zip(wanted, made)), torch.cuda.max_memory_allocated() - before

    expected, most = gradients(0, 1, 2, 3)
    for wanted in ((0,), (1,), (2,), (3,), (0, 1), (0, 2), (1, 2), (0, 3), (1, 2, 3)):
        made, memory = gradients(*wanted)
        assert made.keys() == set(wanted) and memory <= most
        for i, gradient in made.items():
            # Sums are in another order.
            close(
                f"gradient {i} of {wanted}",
                gradient,
                expected[i].double(),
                dtype,
                max(shape[3:5]) * shape[5],
                expected[i] * 1.01,
            )


def test_deterministic_algorithms_give_the_same_bits():
    q, k, v = operands(l=1000, s=1000)
    bias = torch.zeros(4, 1000, device=DEVICE, requires_grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(3):
            out = flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h, j], enable_gqa=True)
            runs.append(torch.autograd.grad(out, (q, k, v, bias), like(out, 1)))
        assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0]))
    finally:
        torch.use_deterministic_algorithms(False)


def _mods():
    g = torch.Generator(DEVICE).manual_seed(9)
    randn = lambda *n: torch.randn(*n, generator=g, device=DEVICE)  # noqa: E731
    ids = torch.sort(torch.randint(0, 5, (2, 200), generator=g, device=DEVICE)).values
    slope = randn(4).requires_grad_()
    table = randn(4, 399).bfloat16().requires_grad_()
    full = randn(2, 4, 200, 200).requires_grad_()
    cap = torch.tensor(20.0, device=DEVICE)
    prefix = torch.tensor([13, 101], device=DEVICE)
    return {
        "none": (None, None, ()),
        "documents": (None, lambda b, h, i, j: (ids[b, i] == ids[b, j]) & (i >= j), ()),
        "window": (None, lambda b, h, i, j: (i >= j) & (i - j < 50), ()),
        "prefix": (None, lambda b, h, i, j: (j < prefix[b]) | (i >= j), ()),
        "by head": (None, lambda b, h, i, j: (j % (h + 1) == 0) & (i >= j), ()),
        "no keys": (None, lambda b, h, i, j: (i < 100) & (i >= j), ()),
        "alibi": (lambda s, b, h, i, j: s + slope[h] * (j - i), None, (slope,)),
        "table": (lambda s, b, h, i, j: s + table[h, j - i + 199], causal, (table,)),
        "dense bias": (lambda s, b, h, i, j: s + full[b, h, i, j], None, (full,)),
        "soft cap": (lambda s, b, h, i, j: cap * torch.tanh(s / cap), causal, ()),
    }


NAMES = ["none", "documents", "window", "prefix", "by head", "no keys", "alibi", "table", "dense bias", "soft cap"]


@pytest.mark.parametrize("dtype", [BF16, F32, F16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_masks_and_scores_with_gradients_of_captures(name, dtype):
    score, mask, learned = _mods()[name]
    compare(*operands(dtype=dtype), score, mask, learned=learned)


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1, 1, 1, 8, 8),
        (1, 6, 3, 37, 130, 40, 24),
        (2, 2, 1, 257, 65, 128, 128),
        (1, 2, 2, 64, 0, 64, 64),
        (0, 2, 2, 8, 8, 64, 64),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_uneven_shapes(shape, dtype):
    b, hq, hkv, l, s, e, ev = shape
    q, k, v = operands(b, hq, hkv, l, s, e, ev, dtype=dtype)
    if b == 0 or s == 0:
        out = flex_attention(q, k, v, enable_gqa=True)
        assert out.shape == (b, hq, l, ev) and not out.any()
        assert all(not g.any() for g in torch.autograd.grad(out.sum(), (q, k, v)))
        return
    compare(q, k, v, mask=causal)


def test_float64_takes_plain_operations():
    q, k, v = (t.double().detach().requires_grad_() for t in operands(l=20, s=20))
    compare(q, k, v, mask=causal)


def test_a_compiled_function_runs_our_operators():
    from compiled import Backend

    q, k, v = operands()
    bias = torch.randn(4, 200, device=DEVICE, requires_grad=True)
    block_mask = create_block_mask(causal, None, None, 200, 200, DEVICE)

    def step(q, k, v, bias):
        return flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h, j], block_mask, enable_gqa=True)

    backend = Backend()
    out = backend.compile(step)(q, k, v, bias)
    d_out = like(out, 1)
    ours = torch.autograd.grad(out, (q, k, v, bias), d_out)
    eager = step(q, k, v, bias)
    assert torch.equal(out, eager)
    for a, b in zip(ours, torch.autograd.grad(eager, (q, k, v, bias), d_out)):
        assert (a - b).abs().max() <= 0.02 * b.abs().max()
    assert any(name.startswith("foveate.backward") for name in backend.operators), backend.operators


@pytest.mark.parametrize("inductor", [False, True])
def test_a_compiled_checkpoint_repeats_its_dropout(inductor):
    """Torch's partitioner draws by another operator on CUDA than on the CPU."""
    from compiled import Backend

    q, k, v = operands(dtype=F32)
    ids = torch.arange(200, device=DEVICE) // 70

    def block(q, k, v):
        return flex_attention(q, k, v, block_mask=Mask.document(ids), enable_gqa=True, dropout_p=0.4)

    def model(q, k, v):
        return torch.utils.checkpoint.checkpoint(block, q, k, v, use_reentrant=False)

    compiled = torch.compile(model, fullgraph=True) if inductor else Backend().compile(model)
    outs = []
    for _ in range(3):
        out = compiled(q, k, v)
        d_out = like(out, 1)
        (dv,) = torch.autograd.grad(out, v, d_out)
        # The result is linear in v: this holds where the backward drops what the forward dropped, and else nowhere.
        assert ((out * d_out).sum() - (v * dv).sum()).abs() <= 1e-4 * (out * d_out).abs().sum()
        outs.append(out)
    assert not torch.equal(outs[0], outs[1]) and not torch.equal(outs[1], outs[2])


def test_inductor_compiles_a_layer():
    q, k, v = operands()
    block_mask = create_block_mask(causal, None, None, 200, 200, DEVICE)

    def step(q, k, v):
        return flex_attention(q * 2, k, v, block_mask=block_mask, enable_gqa=True) + 1

    torch._dynamo.reset()
    out = torch.compile(step, fullgraph=True)(q, k, v)
    ours = torch.autograd.grad(out.sum(), (q, k, v))
    eager = step(q, k, v)
    assert (out - eager).abs().max() <= 0.02 * eager.abs().max()
    for a, b in zip(ours, torch.autograd.grad(eager.sum(), (q, k, v))):
        assert (a - b).abs().max() <= 0.02 * b.abs().max()


_VARIANTS = """
import collections, pathlib, re, sys
import torch
from foveate import Mask, _trace, flex_attention

def draw(low, high):
    return int(torch.randint(low, high, ()))

torch.manual_seed(1)
programs = set()
for _ in range(200):
    s, window, cap = draw(1, 3000), draw(1, 500), 1.0 + draw(0, 1000) / 10
    ids = torch.sort(torch.randint(0, draw(1, 20), (s,), device="cuda")).values
    q, k, v = (torch.randn(1, 2, s, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    mask = Mask(lambda b, h, q, kv: (q >= kv) & (q - kv < window) & (ids[q] == ids[kv]))

    def score(score, b, h, q, kv):
        return cap * torch.tanh(score / cap)

    out = flex_attention(q, k, v, score, mask)
    torch.autograd.grad(out, (q, k, v), out.detach())
    programs.add((mask._program((1, 2, s, s)).text(), _trace.score(score, (1, 2, s, s)).text()))
torch.cuda.synchronize()
kernels = collections.Counter(
    tuple(re.findall(r"__global__[^;{]*?(fv_\\w+)\\s*\\(", file.read_text()))
    for file in pathlib.Path(sys.argv[1]).glob("*.cu")
)
assert len(programs) == 1, len(programs)
assert kernels and max(kernels.values()) <= 6, kernels
print(dict(kernels))
"""


def test_other_lengths_values_and_documents_are_no_other_program_and_few_kernels(tmp_path):
    dumped = tmp_path / "kernels"
    more = dict(
        FOVEATE_DUMP_KERNELS=str(dumped),
        FOVEATE_CACHE_DIR=str(tmp_path / "cache"),
        PYTHONPATH=os.pathsep.join(sys.path),
    )
    run = [sys.executable, "-c", _VARIANTS, str(dumped)]
    done = subprocess.run(run, env=os.environ | more, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "fv_backward" in done.stdout, done.stdout


def test_more_than_2_to_the_31_elements():
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 30 << 30:
        pytest.skip("skipped: it takes 30 GB")
    q = torch.zeros(1, 1, 64, 64, device=DEVICE, dtype=BF16)
    k = torch.zeros(1, 1, (1 << 25) + 300, 64, device=DEVICE, dtype=BF16)
    v = torch.zeros_like(k)
    v[:, :, -100:] = 1
    n = k.shape[2]
    out = flex_attention(q, k, v, block_mask=Mask(lambda b, h, i, j: j >= n - 200))
    assert (out - 0.5).abs().max() < 1e-2
    del q, k, v, out
    torch.cuda.empty_cache()  # Other processes have the device, too.
