"""Masks and scores that cannot be traced, and wrong ones: each is refused with what, file and line."""

import functools

import pytest
import torch
import torch.nn.functional as F
from reference import UNREAD
from test_trace import BLOCKS, CUBE, FLOATS, INTS, LARGE, TABLE

from foveate import Mask, TraceError, _calls, create_block_mask, flex_attention

REFUSED = {
    "if": (lambda s, b, h, q, kv: s if q > kv else -s, "control flow"),
    "and": (lambda s, b, h, q, kv: torch.where(q > kv and h > 1, s, 0.0), "control flow"),
    "or": (lambda s, b, h, q, kv: torch.where(q > kv or h > 1, s, 0.0), "control flow"),
    "not": (lambda s, b, h, q, kv: torch.where(not q > kv, s, 0.0), "use torch.where, &, | and ~"),
    "a chained comparison": (lambda s, b, h, q, kv: torch.where(kv <= q < kv + 4, s, 0.0), "a < b < c"),
    "in": (lambda s, b, h, q, kv: torch.where(q in (1, 2), s, 0.0), "control flow"),
    "and of indices": (lambda s, b, h, q, kv: s * (q and kv), "control flow"),
    "and of rows": (lambda s, b, h, q, kv: s * (TABLE[q] and TABLE[kv]).sum(), "control flow"),
    "item": (lambda s, b, h, q, kv: s * q.item(), "item"),
    "float": (lambda s, b, h, q, kv: s * float(q), "float"),
    "range": (lambda s, b, h, q, kv: s * len(range(q)), "range"),
    "unknown function": (lambda s, b, h, q, kv: torch.special.bessel_j0(s), "bessel_j0"),
    "unknown method": (lambda s, b, h, q, kv: s.cumsum(0), "cumsum"),
    "unknown attribute": (lambda s, b, h, q, kv: s.grad_fn, "grad_fn"),
    "whole tensor": (lambda s, b, h, q, kv: s + FLOATS, "is given captured tensor `FLOATS` of shape (13,); index it first"),
    "tensor with axes left": (lambda s, b, h, q, kv: s + CUBE[b], "captured tensor `CUBE` with axes left over, of shape"),
    "sum over axes left": (lambda s, b, h, q, kv: s + CUBE[b].sum(), "captured tensor `CUBE` with axes left over"),
    "a long row": (lambda s, b, h, q, kv: s + LARGE[q].sum(), "64"),
    "sort of a row": (lambda s, b, h, q, kv: s + TABLE[q].sort(), "sort"),
    "cumsum of a row": (lambda s, b, h, q, kv: s + torch.cumsum(TABLE[q], 0), "cumsum"),
    "a branch on a row": (lambda s, b, h, q, kv: s if TABLE[q] > 0 else -s, "control flow"),
    "slice beside an index": (lambda s, b, h, q, kv: s + CUBE[b, 0:1, q], "slice"),
    "float index": (lambda s, b, h, q, kv: s + FLOATS[s], "integers"),
    "index of a score": (lambda s, b, h, q, kv: s[0], "0-d"),
    "xor of floats": (lambda s, b, h, q, kv: s + (s ^ s), "xor"),
    "shift by an unknown number": (lambda s, b, h, q, kv: s + (q << INTS[kv]), "known"),
    "32 bits": (lambda s, b, h, q, kv: s + (q * 1000000) * 1000000, "32 bits"),
    "a large number": (lambda s, b, h, q, kv: s + (q + 2**40), "32 bits"),
    "bool minus bool": (lambda s, b, h, q, kv: s + ((q > kv) - (h > 1)), "of two bools"),
    "in place": (lambda s, b, h, q, kv: s.add_(1), "use the result of `add`"),
    "a function in place": (lambda s, b, h, q, kv: torch.relu_(s), "use the result of `relu`"),
    "an option in place": (lambda s, b, h, q, kv: F.elu(s, inplace=True), "leave out inplace"),
    "written to": (lambda s, b, h, q, kv: torch.zeros(()).add_(q) + s, "cannot write"),
    "random numbers": (lambda s, b, h, q, kv: s + torch.rand_like(s), "dropout_p"),
    "a dropout": (lambda s, b, h, q, kv: F.dropout(s, 0.1), "dropout_p"),
    "a softmax": (lambda s, b, h, q, kv: F.softmax(s, 0), "one number"),
    "another shape": (lambda s, b, h, q, kv: s.view(-1), "needs no other shape"),
    "gcd": (lambda s, b, h, q, kv: s + torch.gcd(q, kv), "table"),
    "a function of indices": (lambda s, b, h, q, kv: s + torch.lgamma(q + 1.0), "computed outside and read by index"),
    "a long isin": (lambda s, b, h, q, kv: torch.where(torch.isin(q, LARGE[0]), s, 0.0), "64"),
    "a gather of two axes": (lambda s, b, h, q, kv: s + torch.gather(TABLE, 0, q), "one axis"),
    "an embedding with padding": (lambda s, b, h, q, kv: s + F.embedding(q, TABLE, padding_idx=0)[h], "no options"),
    "a median of a row": (lambda s, b, h, q, kv: s + TABLE[q].median(), "median"),
    "a matrix product of rows": (lambda s, b, h, q, kv: s + TABLE[q] @ BLOCKS[b], "axes left over"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_traced_is_refused_with_operation_file_and_line(name):
    score_mod, words = REFUSED[name]
    q = torch.randn(2, 3, 13, 8)
    with pytest.raises(TraceError) as raised:
        flex_attention(q, q, q, score_mod)
    message = str(raised.value)
    assert words in message and "test_trace_refused.py" in message and "\n" not in message
    assert f"line {score_mod.__code__.co_firstlineno}" in message
    assert _calls.innermost() is None


class Called:
    def __call__(self, score):
        return score


def three(score, b, h):
    return score


def number(score, b, h, q, kv):
    return 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("function", [three, functools.partial(three, b=0), Called(), Called().__call__,
                                      functools.partial(Called()), number])
def test_wrong_arguments_and_results_of_a_score_are_refused_with_file_and_line(function, dtype):
    q = torch.randn(1, 2, 5, 8, dtype=dtype)
    code = getattr(getattr(function, "func", function), "__code__", Called.__call__.__code__)
    with pytest.raises((TypeError, ValueError)) as raised:
        flex_attention(q, q, q, function)
    message = str(raised.value)
    assert f'; File "{code.co_filename}", line {code.co_firstlineno}, in {code.co_name}' in message, message
    assert ("must return" if function is number else "is called with 5 values") in message and "\n" not in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mask", [Mask(three), Mask.causal() & Mask(three), ~(three | Mask.causal())], ids=str)
def test_wrong_arguments_of_a_function_inside_a_mask_are_refused_with_its_file_and_line(mask, dtype):
    q = torch.randn(1, 2, 5, 8, dtype=dtype)
    with pytest.raises(TypeError) as raised:
        flex_attention(q, q, q, block_mask=mask)
    code = three.__code__
    assert str(raised.value).startswith("mask_mod `three` is called with 4 values: ")
    assert str(raised.value).endswith(f'; File "{code.co_filename}", line {code.co_firstlineno}, in three')


def whole(b, h, q, kv):
    return q


@pytest.mark.parametrize("mask", [Mask(whole), Mask(whole) & Mask.causal()], ids=str)
def test_what_a_mask_returns_is_refused_with_the_place_of_the_users_code_or_none(mask):
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises((ValueError, TraceError)) as raised:
        flex_attention(q, q, q, block_mask=mask)
    assert "_masks.py" not in str(raised.value)
    assert ("in whole" in str(raised.value)) == (not isinstance(mask._reads[0], str))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_type_error_of_a_functions_body_stays_what_it_is(dtype):
    q = torch.randn(1, 2, 5, 8, dtype=dtype)
    with pytest.raises(TypeError, match=r"^object of type 'int' has no len\(\)$"):
        flex_attention(q, q, q, lambda s, b, h, q, kv: s + len(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_type_error_inside_a_function_of_torch_is_no_wrong_arity(dtype):
    q = torch.randn(1, 2, 5, 8, dtype=dtype)
    of_torch: dict = {}
    exec(compile("def wrong(s, b, h, q, kv): return s + len(3)", torch.__file__, "exec"), of_torch)
    with pytest.raises(TypeError, match=r"^object of type 'int' has no len\(\)$"):
        flex_attention(q, q, q, of_torch["wrong"])


def test_a_traced_value_that_outlives_its_function_is_refused():
    kept = []

    def leak(b, h, q, kv):
        kept.append(q)
        return q >= kv

    create_block_mask(leak, None, None, 4, 4)
    with pytest.raises(TraceError, match="after its function"):
        torch.tanh(kept[0])
    with pytest.raises(TraceError, match="after its function"):
        kept[0].tanh()


def test_a_mask_that_captures_a_tensor_that_requires_grad_is_refused():
    limit = torch.tensor([3.0], requires_grad=True)
    with pytest.raises(ValueError, match="requires grad"):
        create_block_mask(lambda b, h, q, kv: q < limit[0], None, None, 4, 4)
    with torch.no_grad():
        create_block_mask(lambda b, h, q, kv: kv < limit[b], None, None, 4, 4)


NARROW, UNREAD_DTYPE, LEARNED = torch.zeros(8), torch.zeros(8, dtype=torch.complex64), torch.zeros(8, requires_grad=True)


def learned(b, h, i, j):
    return LEARNED[j] > 0


@pytest.mark.parametrize("given, kind, words", [
    (dict(score_mod=lambda s, b, h, i, j: s + NARROW[i, j]), IndexError, "too many indices for a captured tensor"),
    (dict(score_mod=lambda s, b, h, i, j: s + NARROW[None][9, i]), IndexError, "index 9 is out of bounds for dimension 0"),
    (dict(score_mod=lambda s, b, h, i, j: s + NARROW[i, None]), TraceError, "indexed with None, which adds an axis"),
    (dict(score_mod=lambda s, b, h, i, j: s + UNREAD_DTYPE[i]), TraceError, "torch.complex64 is no dtype of masks"),
    (dict(score_mod=lambda s, b, h, i, j: NARROW), ValueError, r"got a tensor of torch.float32 of shape \(8,\)"),
    (dict(block_mask=Mask(learned)), ValueError, "requires grad; a mask has no gradient: capture its .detach()"),
], ids=lambda given: next(iter(given)) if isinstance(given, dict) else None)
def test_what_is_captured_wrongly_is_refused_with_file_and_line(given, kind, words):
    q = torch.randn(1, 1, 8, 4)
    with pytest.raises(kind, match=words) as raised:
        flex_attention(q, q, q, **given)
    assert f'; File "{__file__}", line ' in str(raised.value) and "\n" not in str(raised.value)
    assert str(raised.value).startswith(("score_mod `<lambda>`", "mask_mod `Mask`"))


def test_a_module_that_takes_other_values_is_refused_as_a_score():
    q = torch.randn(1, 1, 8, 4)
    with pytest.raises(TypeError, match="score_mod `Linear` is called with 5 values: Linear.forward"):
        flex_attention(q, q, q, torch.nn.Linear(2, 2))


def test_an_error_of_the_users_own_passes_through():
    class Mine(Exception):
        pass

    def score_mod(score, b, h, q, kv):
        raise Mine("mine")

    q = torch.randn(1, 1, 4, 4)
    with pytest.raises(Mine, match="mine"):
        flex_attention(q, q, q, score_mod)


class _Biased:
    def __init__(self):
        self.tables = {"near": torch.zeros(3)}

    def __call__(self, score, b, h, i, j):
        return score + self.tables["near"][i]


@UNREAD
@pytest.mark.parametrize("score_mod, words", [
    (lambda score, b, h, i, j, table=torch.zeros(3): score + table[i], "a captured tensor of shape \\(3,\\)"),
    (lambda score, b, h, i, j: score + _SHORT[i], "captured tensor `_SHORT` was read at index 3"),
    (_Biased(), "captured tensor `near`"),
    (functools.partial(lambda table, score, b, h, i, j: score + table[i], torch.zeros(3)), "captured tensor `argument 0`"),
    (lambda score, b, h, i, j: score + _SHORT.long()[i], "a captured tensor of shape \\(3,\\)"),
])
def test_an_index_outside_names_the_variable(score_mod, words):
    q = torch.zeros(1, 1, 8, 4)
    with pytest.raises(IndexError, match=words):
        flex_attention(q, q, q, score_mod)


_SHORT = torch.zeros(3)
