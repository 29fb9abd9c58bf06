"""Wrong input of every kind in compiled functions, one after the other in one process: each is an error with the sentence
of an uncompiled call, and the next good call gives the bits that it gave before."""

import re
import sys
import warnings

import pytest
import torch
from compiled import Backend
from test_wrong_input import WRONG
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import higher_order_ops
from torch._dynamo.variables.builder import VariableBuilder

from foveate import Mask, TraceError, _compile, _dynamo, create_block_mask, flex_attention, paged, varlen

SLOPE = torch.linspace(0.1, 0.7, 4, requires_grad=True)
#: What is said instead of some: of a block mask that torch makes where its lists are, and what the engine says, which
#: knows no names of a graph's operands.
OTHERWISE = {
    "on meta": "got (cpu|cuda:0) and meta",
    "`LEARNED`": r"captured tensor of shape \(12,\)",
    "`ids`": r"captured tensor of shape \(3,\)",
}
#: Dynamo makes a tensor of an array, and torch has no rule for a subclass that is made in the graph.
TAKEN = ("torch.from_numpy", "a `TwoTensor` has no")
#: What no whole graph can hold, whatever it is given: torch says so.
NEVER_WHOLE = ("query must be a Tensor", "mixed query, key, and value dtype", "query must be a dense tensor")
#: Neither can `explain`, nor pages where a gradient is wanted.
OUTSIDE = "Skip inlining function <function (explain|paged) .*foveate runs outside of compiled regions"


def model(q, k, v, alpha):
    return flex_attention(q * 2, k, v, lambda s, b, h, i, j: s * alpha - SLOPE[h] * (i - j), Mask.causal()).sin()


@pytest.mark.parametrize("whole", [False, True])
def test_wrong_input_is_the_error_of_an_uncompiled_call_and_the_next_call_is_right(whole, repeatable):
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, 4, 10, 8, generator=generator).requires_grad_()
    k, v = (torch.randn(2, 4, 12, 8, generator=generator).requires_grad_() for _ in range(2))
    backend = Backend()
    compiled = backend.compile(model, dynamic=True)

    def good():
        out = compiled(q, k, v, 0.5)
        return [out, *torch.autograd.grad(out.sum(), (q, k, v, SLOPE))]

    right = good()
    torch.testing.assert_close(right[0], model(q, k, v, 0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, (call, kind, words) in enumerate(WRONG):
            if words in TAKEN or whole and words in NEVER_WHOLE:
                continue
            wrong = torch.compile(call, backend=Backend()._backend, fullgraph=whole)
            with pytest.raises(Exception) as raised:
                wrong(q, k, v)
                pytest.fail(f"{number}: nothing was raised where an error of {words!r} is due")
            # Further down torch shows the line that made the call, with the words of this test.
            said = str(raised.value).split("from user code")[0]
            wanted = "|".join(filter(None, (words.rstrip("$"), OTHERWISE.get(words), OUTSIDE if whole else None)))
            assert re.search(wanted, said, re.MULTILINE), f"{number}: {words!r} is not in {said}"
            if re.search(words, said.splitlines()[0]):
                assert isinstance(raised.value, kind), f"{number}: {type(raised.value)}"
            before = backend.compilations
            assert all(map(torch.equal, good(), right)), f"{number}: another result after it"
            assert backend.compilations == before, f"{number}: compiled anew"


MODS = {
    "control flow": (lambda s, b, h, i, j: s if i > j else -s, TraceError, "Python control flow .*; File .*test_compile_wrong.py"),
    "a number of an index": (lambda s, b, h, i, j: s + i.item(), TraceError, "a traced value has no number yet"),
    "too few values": (lambda s, b, h, i: s, TypeError, "is called with 5 values"),
    "a list": (lambda s, b, h, i, j: [s], ValueError, "must return a float tensor, got"),
    "a comparison": (lambda s, b, h, i, j: i >= j, ValueError, "must return a float tensor, got a tensor of torch.bool"),
    "a row": (lambda s, b, h, i, j: s + SLOPE.view(2, 2)[b], ValueError, r"must return a float tensor, got a vector of 2 traced values"),
    "a draw": (lambda s, b, h, i, j: s + torch.rand(()), TraceError, "`rand` would draw the same numbers"),
}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", MODS)
def test_a_wrong_score_is_an_error_of_its_type_in_a_whole_graph_too(name, whole):
    score, kind, words = MODS[name]
    q = torch.randn(2, 4, 10, 8, requires_grad=True)
    rows, offsets = torch.randn(10, 4, 8), torch.tensor([0, 10])
    for call in (lambda q: flex_attention(q, q, q, score).sum(), lambda q: varlen(rows, rows, rows, offsets, score_mod=score)):
        compiled = Backend().compile(call, fullgraph=whole)
        with pytest.raises(kind, match=words) as raised:
            compiled(q)
        assert isinstance(raised.value, torch._dynamo.exc.Unsupported) == whole


def test_a_wrong_score_that_a_compiled_function_closes_over_says_what_and_where():
    """One that is made in the region, of values that have none yet, is nothing that an uncompiled call could be asked of."""
    q = torch.randn(2, 4, 10, 8)

    def call(q, far):
        near = far * 2
        return flex_attention(q, q, q, lambda s, b, h, i, j: s if i > near[0] else -s)

    compiled = Backend().compile(call)
    with pytest.raises(TraceError, match=r"score_mod `.*lambda>` cannot be part of a graph: Python control flow .*test_compile_wrong.py"):
        compiled(q, torch.ones(1))


@pytest.mark.parametrize("whole", [False, True])
def test_a_mask_that_could_want_a_gradient_is_refused(whole):
    q = torch.randn(2, 4, 10, 8)
    compiled = Backend().compile(lambda q: flex_attention(q, q, q, block_mask=Mask(lambda b, h, i, j: SLOPE[h] > 0.3)), fullgraph=whole)
    with pytest.raises(ValueError, match="captures a tensor that requires grad; a mask has no gradient: capture its .detach()"):
        compiled(q)


def test_what_dynamo_does_not_trace_breaks_the_graph_and_is_computed():
    """The elements of a captured tensor are known to an uncompiled call, and to no graph."""
    slopes = torch.tensor([0.1, 0.2, 0.3, 0.4])

    def score(s, b, h, i, j):
        return s + slopes[h] * slopes.sum().item()

    q = torch.randn(2, 4, 10, 8, requires_grad=True)
    backend = Backend()
    compiled = backend.compile(lambda q: flex_attention(q * 2, q, q, score).sin(), fullgraph=False)
    with pytest.warns(UserWarning, match="runs outside of the compiled graph: "):
        torch.testing.assert_close(compiled(q), flex_attention(q * 2, q, q, score).sin())
    assert backend.operators == []
    with pytest.raises(TraceError, match="cannot be part of a graph|has no number yet"):
        Backend().compile(lambda q: flex_attention(q * 2, q, q, score).sin())(q)


def test_pages_with_a_wrong_score_are_an_error_too():
    keys, values = (torch.randn(4, 2, 8, 12) for _ in range(2))
    query, table, lengths = torch.randn(2, 4, 3, 12), torch.tensor([[3, 1], [0, 2]]), torch.tensor([12, 9])
    for whole in (False, True):
        call = Backend().compile(lambda: paged(query, keys, values, table, lengths, lambda s, b, h, i, j: s if i > j else s), fullgraph=whole)
        with pytest.raises(TraceError, match="Python control flow"):
            call()


def test_offsets_past_the_rows_are_refused_of_a_block_mask_that_is_made_in_the_region():
    q, mask = torch.randn(1, 2, 20, 8), Mask.from_cu_seqlens(torch.tensor([0, 9, 21]))
    call = Backend().compile(lambda q: flex_attention(q, q, q, block_mask=create_block_mask(mask, None, None, 20, 20, device=q.device)))
    with pytest.raises(Exception, match="cu_seqlens ends at 21, past the 20 queries"):
        call(q)


def test_an_error_that_is_made_of_more_than_a_sentence_is_said_too():
    class Numbered(Exception):
        def __init__(self, number, why):
            super().__init__(f"{why}, number {number}")

    def score(s, b, h, i, j):
        raise Numbered(7, "no such score")

    q = torch.randn(1, 2, 20, 8)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="no such score, number 7"):
        Backend().compile(lambda q: flex_attention(q, q, q, score))(q)


SPECULATE = InstructionTranslatorBase.speculate


def elsewhere_alone(translator):
    """Dynamo's own, but not Foveate's, which asks for it by this name."""
    if sys._getframe(1).f_globals["__name__"].startswith("foveate"):
        raise AttributeError("'InstructionTranslator' object has no attribute 'speculate'")
    return SPECULATE(translator)


#: What is changed, its name, what is there instead (or nothing), and what Python says of it.
CHANGES = {
    "a number": (VariableBuilder, "wrap_symfloat", None, "has no attribute 'wrap_symfloat'"),
    "a part of torch's operator": (
        higher_order_ops.FlexAttentionHigherOrderVariable, "create_wrapped_node", None, "no attribute 'create_wrapped"
    ),
    "what this part calls": (higher_order_ops, "speculate_subgraph", None, "name 'speculate_subgraph' is not defined"),
    "where operators are known": (higher_order_ops, "_hop_name_to_variable_class", None, "_hop_name_to_variable_class"),
    "the way back": (InstructionTranslatorBase, "speculate", elsewhere_alone, "has no attribute 'speculate'"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_dynamo_is_one_warning_of_torchs_version_and_the_call_runs_uncompiled(name, monkeypatch):
    of, internal, instead, why = CHANGES[name]
    score = lambda s, b, h, i, j: s - SLOPE[h] * (i - j)  # noqa: E731
    q, offsets = torch.randn(2, 4, 10, 8, requires_grad=True), torch.tensor([0, 4, 10])

    def model(q):
        mask, rows = create_block_mask(lambda b, h, i, j: i >= j, None, None, 10, 10, device=q.device), q[0].transpose(0, 1)
        return flex_attention(q, q, q, score, mask) + varlen(rows, rows, rows, offsets, score_mod=score).transpose(0, 1)

    gold = model(q)
    golds = (gold, *torch.autograd.grad(gold.sum(), q))
    for module in (_compile, _dynamo):
        monkeypatch.setattr(module, "_said", set())
    torchs = {n: v for n, v in higher_order_ops._hop_name_to_variable_class.items() if not n.startswith("foveate.")}
    monkeypatch.setattr(higher_order_ops, "_hop_name_to_variable_class", torchs)
    monkeypatch.setattr(of, internal, instead) if instead else monkeypatch.delattr(of, internal)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        backend = Backend()
        out = backend.compile(model, fullgraph=False)(q)
        torch.testing.assert_close((out, *torch.autograd.grad(out.sum(), q)), golds)
        assert backend.operators == []
        whole = "has another Dynamo|foveate runs outside of compiled regions"
        with pytest.raises(torch._dynamo.exc.Unsupported, match=whole):
            Backend().compile(model)(q)
    said = [str(warning.message) for warning in caught if "PyTorch" in str(warning.message)]
    assert len(said) == 1 and "\n" not in said[0], said
    assert "run" in said[0] and "uncompiled" in said[0] and why in said[0], said
    assert f"PyTorch {torch.__version__} has another Dynamo than foveate knows" in said[0]
    assert "score_mod" not in said[0] and "lambda" not in said[0]
