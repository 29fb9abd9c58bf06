"""Wrong input of every kind, one after the other in one process: each is one clear error, and the next good call
gives the bits that it gave before."""

import _thread
import math
import threading
import warnings

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import foveate
from foveate import AuxRequest, Mask, _native, create_block_mask, create_mask, explain, flex_attention, paged, varlen

LEARNED = torch.zeros(12, requires_grad=True)
ELSEWHERE = torch.zeros(12, device="meta")
TABLE = LEARNED.detach().cpu().numpy()
SPARSE = torch.eye(12).to_sparse()
NESTED = torch.nested.nested_tensor([torch.ones(5, 4, 8), torch.ones(6, 4, 8)], layout=torch.jagged)
ENDS = torch.tensor([0, 5, 10]), torch.tensor([0, 7, 12])


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def rows(*tensors):
    return [t[0].transpose(0, 1) for t in tensors]


def paged_as(q, k, v, **changed):
    """A good call of ``paged``, changed."""
    table, lengths = torch.arange(4).view(2, 2), torch.tensor([20, 24])
    pages = [torch.cat([t, t]) for t in (k, v)]
    given = dict(query=q, key_pages=pages[0], value_pages=pages[1], page_table=table, lengths=lengths) | changed
    return paged(**given)


def masked(mask_mod):
    return lambda q, k, v: flex_attention(q, k, v, block_mask=create_block_mask(mask_mod, None, None, 10, 12))


def documents(ends_q, ends_k):
    mask = Mask.from_cu_seqlens(torch.tensor(ends_q), None if ends_k is None else torch.tensor(ends_k)) & Mask.causal()
    return lambda q, k, v: flex_attention(q, k, v, block_mask=mask)


def wrapped(tensor):
    """A tensor whose elements are in two others."""
    return TwoTensor(tensor.detach(), tensor.detach())


def huge(*shape):
    """A tensor of many elements that takes no memory."""
    return torch.zeros((1,) * len(shape)).expand(shape)


WRONG = [
    (lambda q, k, v: flex_attention(q[0], k, v), NotImplementedError, "4D"),
    (lambda q, k, v: flex_attention(q, k[..., :4], v), ValueError, "embedding dimension"),
    (lambda q, k, v: flex_attention(q, k[:, :1], v[:, :1]), ValueError, "enable_gqa=True"),
    (lambda q, k, v: flex_attention(q, k, v[:, :, :5]), ValueError, "key and value"),
    (lambda q, k, v: flex_attention(q[:, :3], k, v, enable_gqa=True), ValueError, "multiple of kv heads"),
    (lambda q, k, v: flex_attention(q, k[:1], v[:1]), ValueError, "block_mask=None"),
    (lambda q, k, v: flex_attention(q.int(), k.int(), v.int()), ValueError, "float"),
    (lambda q, k, v: flex_attention(q, k, v, scale=math.nan), ValueError, "finite"),
    (lambda q, k, v: flex_attention(q, k, v, windows=3), TypeError, "windows"),
    (lambda q, k, v: flex_attention(q, k, v, sink=torch.zeros(3)), ValueError, "each of 4 query heads"),
    (lambda q, k, v: flex_attention(q, k, v, sink=torch.zeros(4).int()), ValueError, "float"),
    (lambda q, k, v: flex_attention(q, k, v, dropout_p=1.0), ValueError, "below 1"),
    (lambda q, k, v: flex_attention(q, k, v, kernel_options={"BACKEND": "FAST"}), ValueError, "BACKEND"),
    (lambda q, k, v: flex_attention(q, k, v, kernel_options={"foveate": {"x": 1}}), ValueError, "no option"),
    (lambda q, k, v: flex_attention(q, k, v, return_lse=True, return_aux=AuxRequest()), ValueError, "both"),
    (lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i: s), TypeError, "5 values"),
    (lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: 3.0), ValueError, "must return"),
    (lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: [s]), ValueError, "must return"),
    (lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: s + torch.ones(10, 3)[i]), ValueError,
     "must return a float tensor, got a vector of 3 traced values; File"),
    (lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: i >= j), ValueError, "must return"),
    (lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: s if i > j else -s), RuntimeError, "control flow"),
    (lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: s + i.item()), RuntimeError, "item"),
    (lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: torch.fft.fft(s)), RuntimeError, "fft"),
    (lambda q, k, v: flex_attention(q, k, v, block_mask=create_block_mask(causal, None, None, 9, 8)), ValueError, "smaller"),
    (lambda q, k, v: flex_attention(q, k, v, block_mask=create_block_mask(causal, None, None, 90, 98)), ValueError, "larger"),
    (lambda q, k, v: flex_attention(q, k, v, block_mask=create_block_mask(causal, 2, None, 10, 12)[0]), RuntimeError, "sliced"),
    (lambda q, k, v: flex_attention(q, k, v, block_mask=causal), TypeError, "BlockMask"),
    (lambda q, k, v: flex_attention(q.tolist(), k, v), TypeError, "query must be a Tensor"),
    (lambda q, k, v: flex_attention(q, k.to("meta"), v.to("meta")), ValueError, "same device"),
    (lambda q, k, v: flex_attention(q.to("meta"), k.to("meta"), v.to("meta")), NotImplementedError, "on meta"),
    (lambda q, k, v: flex_attention(q, k.bfloat16(), v).sum().backward(), ValueError, "mixed query, key, and value dtype"),
    (lambda q, k, v: flex_attention(q.long(), k, v), ValueError, "float tensor"),
    (lambda q, k, v: flex_attention(q, k, v, scale=math.inf), ValueError, "finite"),
    (lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: s + ELSEWHERE[j]), RuntimeError,
     "captured tensor `ELSEWHERE` is on meta; capture one on the device of the query.*; File .*test_wrong_input.py"),
    (lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: s if i == j and j else s), RuntimeError, "control flow"),
    (lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: None), ValueError, "must return"),
    (lambda q, k, v: flex_attention(q, k, v, create_block_mask(causal, None, None, 10, 12)), TypeError, "got a BlockMask"),
    (lambda q, k, v: flex_attention(q, k, v, Mask.causal()), TypeError, "got a Mask: it is a block_mask"),
    (lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: s + None), TypeError, "'traced value' and 'NoneType'; File"),
    (lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: round(s)), TypeError, "type traced value doesn't.*; File"),
    (lambda q, k, v: Mask(causal, ids=LEARNED), TypeError, "takes no names, got ids: the function captures"),
    (lambda q, k, v: flex_attention(q, k, v, block_mask=Mask.document([0] * 500)), ValueError, "a number or a tensor, got a list$"),
    (lambda q, k, v: flex_attention(q, k, v, "alibi"), TypeError, "score_mod must be a function"),
    (lambda q, k, v: flex_attention(q, k, v, scale="1"), TypeError, "scale must be a number, got '1'"),
    (lambda q, k, v: flex_attention(q, k, v, dropout_p="half"), TypeError, "dropout_p must be a number, got 'half'"),
    (lambda q, k, v: flex_attention(q, k, v, return_aux=True), TypeError, "return_aux must be an AuxRequest, got True"),
    (lambda q, k, v: flex_attention(q, k, v, kernel_options=["BACKEND"]), TypeError, "kernel_options must be a dict"),
    (lambda q, k, v: flex_attention(q, k, v, kernel_options={"foveate": 3}), TypeError, "must be a dict of options, got 3"),
    (lambda q, k, v: flex_attention(q.detach().to_sparse(), k, v), ValueError, "query must be a dense tensor"),
    (lambda q, k, v: flex_attention(*(t.to(torch.float8_e4m3fn) for t in (q, k, v))), ValueError, "query must be float32"),
    (lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: s + wrapped(LEARNED)[j]), TypeError, "a `TwoTensor` has no"),
    (lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: s + TABLE[j]), RuntimeError, "torch.from_numpy"),
    (lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: s + torch.rand(())), RuntimeError, "`rand` would draw"),
    (lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: s + {0: 1.0}[h]), RuntimeError, "a dict cannot be read.*<lambda>"),
    (lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: torch.where(i > j, s, "-inf")), TypeError, "where.*str.*File"),
    (lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: s + SPARSE[i, j]), RuntimeError, "must be dense.*to_dense"),
    (lambda q, k, v: flex_attention(q, k, v, scale=LEARNED.sum()), ValueError, "scale gets no gradient.*scale.item"),
    (lambda q, k, v: flex_attention(*[NESTED] * 3), ValueError, "query is a nested tensor.*foveate.varlen"),
    (masked(lambda b, h, i, j: i - j), ValueError, "bool"),
    (masked(lambda b, h, i, j: True), ValueError, "must return"),
    (masked(lambda b, h, i: i > 0), TypeError, "4 values"),
    (masked(lambda b, h, i, j: LEARNED[j] > 0), ValueError, "requires grad"),
    (masked(lambda b, h, i, j: ELSEWHERE[j] > 0), RuntimeError, "on meta"),
    (masked(lambda b, h, i, j: bool(i > j)), RuntimeError, "control flow"),
    (masked(3), TypeError, "mask_mod function"),
    (lambda q, k, v: create_block_mask(causal, 1, 1, -3, 8), ValueError, "negative"),
    (lambda q, k, v: create_block_mask(causal, 1, 1, 8, 8, BLOCK_SIZE=0), ValueError, "BLOCK_SIZE"),
    (lambda q, k, v: create_block_mask(causal, 1, 1, 8, 8, BLOCK_SIZE=16.0), TypeError, "BLOCK_SIZE must be an integer, got 16.0"),
    (lambda q, k, v: create_block_mask(causal, 1, 1, 8.0, 8), TypeError, "Q_LEN must be an integer, got 8.0"),
    (lambda q, k, v: create_block_mask(causal, 1, 1, 8, 8, "meta"), NotImplementedError, "meta"),
    (lambda q, k, v: create_block_mask(causal, 1, 1, 2**22, 2**22, BLOCK_SIZE=1), RuntimeError, "memory"),
    (lambda q, k, v: flex_attention(q, k, v, block_mask=Mask("causl")), ValueError, "causl.*at column 1$"),
    (lambda q, k, v: flex_attention(q, k, v, block_mask=Mask("causal\n& q <")), ValueError, "mask `causal & q <`: .*at line 2, column 6$"),
    (lambda q, k, v: flex_attention(q, k, v, block_mask=Mask.prefix(None)), ValueError, "`n` must be a number or a tensor, got None"),
    (lambda q, k, v: flex_attention(q, k, v, block_mask=Mask.document(torch.zeros(12))), ValueError, "`ids` must hold integers, not floats"),
    (lambda q, k, v: Mask.from_cu_seqlens(torch.tensor([0, 9, 3])), ValueError, "decrease"),
    (lambda q, k, v: Mask.from_cu_seqlens(torch.tensor([0, 2**40])), ValueError, "cu_seqlens ends at 1099511627776, past"),
    (lambda q, k, v: flex_attention(q, k, v, scale=10**400), ValueError, "that a float holds, got an int$"),
    (documents([0, 4, 11], None), ValueError, "cu_seqlens ends at 11, past the 10 queries"),
    (documents([0, 10], [0, 13]), ValueError, "cu_seqlens_k ends at 13, past the 12 keys"),
    (lambda q, k, v: flex_attention(huge(2**14, 2**10, 2**14, 8), huge(2**14, 2**10, 1, 8), huge(2**14, 2**10, 1, 8)),
     RuntimeError, "memory"),
    (lambda q, k, v: varlen(*rows(q, k, v)), ValueError, "cu_seqlens_q is missing"),
    (lambda q, k, v: varlen(*rows(q, k, v), *ENDS, return_aux=True), TypeError, "AuxRequest"),
    (lambda q, k, v: varlen(*rows(q, k, v), *ENDS, mask="causal"), TypeError, "a mask must be a Mask or a function"),
    (lambda q, k, v: explain(q[0], k, v), NotImplementedError, "4D"),
]
#: Of elements that a call reads: it does not wait for those of CUDA tensors.
if torch.get_default_device().type == "cpu":
    WRONG += [
        (lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: s + LEARNED[i - 20]), IndexError, "`LEARNED`"),
        (lambda q, k, v: flex_attention(q, k, v, block_mask=Mask.document(torch.zeros(3).int())), IndexError, "`ids`"),
        (lambda q, k, v: varlen(*rows(q, k, v), torch.tensor([0, 9, 3]), torch.tensor([0, 3, 9])), ValueError, "decrease"),
        (lambda q, k, v: varlen(*rows(q, k, v), torch.tensor([0, 11]), torch.tensor([0, 12])), ValueError, "past the 10 rows"),
        (lambda q, k, v: varlen(*rows(q, k, v), torch.tensor([3, 9])), ValueError, "begin at 0"),
        (lambda q, k, v: paged_as(q, k, v, lengths=torch.tensor([25, 3])), ValueError, "pages"),
        (lambda q, k, v: paged_as(q, k, v, page_table=torch.full((2, 2), 4)), ValueError, "page"),
    ]


def good():
    """A call with a mask, a score and gradients, of all that the wrong ones use."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, 4, 10, 8, generator=generator).requires_grad_()
    k, v = (torch.randn(2, 4, 12, 8, generator=generator).requires_grad_() for _ in range(2))
    out = flex_attention(q, k, v, lambda s, b, h, i, j: s + LEARNED[j], create_block_mask(causal, None, None, 10, 12))
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v, LEARNED))
    return (q, k, v), [out, *gradients, varlen(*rows(q, k, v), torch.tensor([0, 10]), torch.tensor([0, 12])), paged_as(q, k, v)]


def test_wrong_input_is_one_clear_error_and_the_next_call_is_right(repeatable):
    operands, right = good()
    q, k, v = (t.detach().double() for t in operands)
    scores = (q @ k.transpose(-2, -1) / math.sqrt(8)).masked_fill(~create_mask(causal, 1, 1, 10, 12), -math.inf)
    torch.testing.assert_close(right[0].double(), scores.softmax(-1) @ v, rtol=1e-5, atol=1e-5)
    for number, (call, kind, words) in enumerate(WRONG):
        with pytest.raises(kind, match=words) as raised:
            call(*operands)
            pytest.fail(f"{number}: nothing was raised where an error of {words!r} is due")
        assert "\n" not in str(raised.value).strip(), f"{number}: {raised.value}"
        assert all(map(torch.equal, good()[1], right)), f"{number}: another result after it"


def learning(call):
    """A call and its backward."""

    def run(q, k, v):
        operands = [t.detach().requires_grad_() for t in (q, k, v)]
        out = call(*operands)
        panicking("the backward")
        return torch.autograd.grad(out.sum(), operands)

    return run


def panicking(what):
    """Lets the next computation panic, if it is in turn."""
    if what == IN_TURN[0]:
        _native.panic_next()


IN_TURN = ["the call"]
MODS = (None, [], [], None, [], [], [], [1, 1], 0.5, None, 0.0)


def operator(name, *layout):
    """The operator ``foveate::name``, forward and backward."""

    def run(q, k, v):
        q, k, v = (t[:1] if layout else t for t in (q, k, v))
        forward, backward = (getattr(torch.ops.foveate, name + way) for way in ("forward", "backward"))
        out, lse, _ = forward(q, k, v, *layout, *MODS, False)
        panicking("the backward")
        return backward(q, k, v, *layout, out, lse, out, None, *MODS, [True] * 3, [])

    return run


PANICS = {
    "flex_attention": learning(lambda q, k, v: flex_attention(q, k, v)),
    "varlen": learning(lambda q, k, v: varlen(*rows(q, k, v), *ENDS)),
    "forward and backward": operator(""),
    "varlen_forward and varlen_backward": operator("varlen_", *ENDS),
    "paged": lambda q, k, v: paged_as(q, k, v),
    "the operator paged": lambda q, k, v: torch.ops.foveate.paged(q, k, v, torch.tensor([[0], [1]]), torch.tensor([12, 5]), *MODS, False),
    "create_block_mask": lambda q, k, v: create_block_mask(causal, None, None, 10, 12),
    "explain": lambda q, k, v: explain(q, k, v),
}


@pytest.mark.skipif(not hasattr(_native, "panic_next"), reason="skipped: only debug builds of the native module can be let panic")
@pytest.mark.parametrize(
    "name, turn",
    [(name, "the call") for name in PANICS]
    + [(name, "the backward") for name in PANICS if name in ("flex_attention", "varlen") or "backward" in name],
)
def test_a_panic_in_the_engine_is_an_exception_and_the_next_call_is_right(name, turn):
    torch.manual_seed(2)
    q, k, v = torch.randn(2, 4, 10, 8), torch.randn(2, 4, 12, 8), torch.randn(2, 4, 12, 8)
    call = PANICS[name]
    IN_TURN[0] = None
    gold = call(q, k, v)
    for _ in range(2):
        IN_TURN[0] = turn
        panicking("the call")
        with pytest.raises(RuntimeError, match="a bug in Foveate, please report it: injected by a test"):
            call(q, k, v)
        IN_TURN[0] = None
        again = call(q, k, v)
    assert str(again) == str(gold)


def test_a_warning_in_a_thread_that_nobody_outside_called_is_one():
    # As one of autograd's on a GPU, whose outermost Python frame is torch's or the package's.
    failed, done = [], threading.Event()
    names = {"__name__": "foveate.inner", "warn": foveate._arguments.warn, "failed": failed, "done": done}
    exec("def work():\n try: warn('heard')\n except Exception as e: failed.append(e)\n finally: done.set()\n", names)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        _thread.start_new_thread(names["work"], ())
        assert done.wait(10)
    assert not failed and [str(said.message) for said in heard] == ["heard"]
