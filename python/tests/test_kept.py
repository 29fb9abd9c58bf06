"""Traces that are kept: what a function reads is what it reads now, whether it was traced in this call or before."""

import gc
import types
import weakref

import pytest
import torch

from foveate import Mask, _kept, _trace, create_mask, flex_attention

EXTENTS = (2, 4, 30, 40)
ids = torch.randint(0, 3, (40,))
width = 5


def shown(traced):
    """A trace's program, and the tensors that it reads; values of captured numbers are seen in results alone."""
    return traced.text(), [(c.name, c.tensor, c.learned) for c in traced.captures]


def same(a, b):
    return a[0] == b[0] and len(a[1]) == len(b[1]) and all(
        m == n and s is t and x is y for (m, s, x), (n, t, y) in zip(a[1], b[1])
    )


@pytest.fixture
def traced(monkeypatch):
    """Functions that were traced and not found, from here on."""
    _kept._kept.clear()
    found = []
    begin = _trace.Trace.__init__

    def note(self, kind, function, extents, constants):
        found.append(function)
        begin(self, kind, function, extents, constants)

    monkeypatch.setattr(_trace.Trace, "__init__", note)
    return found


def closure(value):
    return lambda b, h, i, j: (ids[i] == value) & (i >= j)


def two(first, second):
    return lambda b, h, i, j: first[i] == second[j]


def calls(other):
    def mask(b, h, i, j):
        near = other(b, h, i, j)
        return near & (torch.minimum(i, j).to(torch.int32) > 3)

    return mask


def with_default(b, h, i, j, reach=7):
    return i - j < reach


def within_width(b, h, i, j):
    return i - j < width


def of_a_global(b, h, i, j):
    return (i - j < width) & (ids[j] > 0)


def of_an_element(at):
    return lambda b, h, i, j: i - j < at


def of_an_item(at):
    return lambda b, h, i, j: i - j < at.item()


def of_a_choice(at):
    return lambda b, h, i, j: i - j < (3, 9)[at]


def of_a_count(table):
    return lambda b, h, i, j: i - j < table[table > 3].numel()


def of_a_shape(table):
    return lambda b, h, i, j: i - j < table[table > 3].shape[0]


def of_a_sum(table):
    return lambda b, h, i, j: (table + 1)[i] > j


def of_rounds(rounds, reach=2):
    def mask(b, h, i, j):
        near = i - j < reach
        for n, step in zip(range(rounds), (4, 5, 6)):
            near = near | (ids[i] == n) & (j - i == step)
        return near

    return mask


def of_rounds_by(function):
    def mask(b, h, i, j):
        for pair in function((4, 5)):
            j = j + pair[0]
        return i < j

    return mask


def of_each(chosen):
    def mask(b, h, i, j):
        for _ in chosen():
            j = j + 2
        return i < j

    return mask


def of_each_chosen(table):
    return of_each(lambda: table[table > 3])


def of_each_found(table):
    return of_each(lambda: torch.where(table > 3)[0])


def other(tensor):
    return tensor.clone() + 1


class Nearer(Mask):
    def __call__(self, b, h, i, j):
        return super().__call__(b, h, i, j) & (i - j < 3)


FIRST, SECOND = torch.randint(0, 9, (40,)), torch.randint(0, 9, (40,))
#: Functions in pairs: what changes from one call to the next, and whether the second is traced again.
CHANGES = {
    "nothing": (closure(1), closure(1), False),
    "a number": (closure(1), closure(3), True),
    "the type of a number": (closure(1), closure(True), True),
    "a number's sign": (closure(0.0), closure(-0.0), True),
    "a tensor": (two(FIRST, SECOND), two(other(FIRST), other(SECOND)), False),
    "a tensor's dtype": (two(FIRST, SECOND), two(FIRST, SECOND.to(torch.int32)), True),
    "a tensor's shape": (two(FIRST, SECOND), two(FIRST, torch.cat([SECOND, SECOND])), True),
    "a tensor's strides": (two(FIRST, SECOND), two(FIRST, torch.stack([SECOND, SECOND], 1)[:, 0]), False),
    "one tensor in place of two": (two(FIRST, SECOND), two(FIRST, FIRST), True),
    "two tensors in place of one": (two(FIRST, FIRST), two(FIRST, SECOND), True),
    "a function": (calls(closure(1)), calls(lambda b, h, i, j: i != j), True),
    "a function's number": (calls(closure(1)), calls(closure(4)), True),
    "a mask's number": (Mask.sliding_window(4), Mask.sliding_window(5), True),
    "a mask's tensor": (Mask.causal() & Mask.document(FIRST), Mask.causal() & Mask.document(other(FIRST)), False),
    "a mask's sign": (Mask.causal() & Mask.document(FIRST), Mask.causal() | Mask.document(FIRST), True),
    "a mask's parts": (
        Mask(closure(1)) & (lambda b, h, i, j: i > j),
        Mask(closure(1)) & (lambda b, h, i, j: i < j),
        True,
    ),
    "a mask's class": (Mask(closure(1)), Nearer(closure(1)), True),
    # On a device it is read there.
    "the element that is a number": (of_an_element(torch.tensor(4)), of_an_element(torch.tensor(6)), FIRST.is_cpu),
    "the item that is a number": (of_an_item(torch.tensor(4)), of_an_item(torch.tensor(6)), True),
    "the element that chooses a number": (of_a_choice(torch.tensor(0)), of_a_choice(torch.tensor(1)), True),
    "how many elements there are": (of_a_count(FIRST), of_a_count(FIRST.clamp(max=5) * 2), True),
    "how long the chosen elements are": (of_a_shape(FIRST), of_a_shape(FIRST.clamp(max=5) * 2), True),
    "nothing in a loop": (of_rounds(2), of_rounds(2), False),
    "how often a loop runs": (of_rounds(2), of_rounds(3), True),
    "what a loop runs over": (of_rounds_by(zip), of_rounds_by(enumerate), True),
    "how many elements a loop runs over": (of_each_chosen(FIRST), of_each_chosen(FIRST.clamp(max=5) - 1), True),
    "how many places a loop runs over": (of_each_found(FIRST), of_each_found(FIRST.clamp(max=5) - 1), True),
    "what is computed of a tensor": (of_a_sum(FIRST), of_a_sum(other(FIRST)), True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changed_is_seen(name, traced):
    before, after, again = CHANGES[name]
    _trace.mask(before, EXTENTS)
    assert len(traced) == 1
    found = shown(_trace.mask(after, EXTENTS))
    assert len(traced) == 1 + again
    _kept._kept.clear()
    fresh = shown(_trace.mask(after, EXTENTS))
    if name == "what is computed of a tensor":
        assert found[0] == fresh[0] and torch.equal(found[1][0][1], fresh[1][0][1])
    else:
        assert same(found, fresh)
    q, k = torch.randn(2, 4, 30, 8), torch.randn(2, 4, 40, 8)
    out = flex_attention(q, k, k, block_mask=Mask(after))
    _kept._kept.clear()
    allowed = create_mask(after, *EXTENTS, q.device)
    scores = (q.double() @ k.double().mT / 8**0.5).masked_fill(~allowed, -torch.inf)
    torch.testing.assert_close(out.double(), scores.softmax(-1).nan_to_num() @ k.double(), rtol=1e-5, atol=1e-5)


def test_lengths_gradients_and_transforms_are_seen(traced):
    bias = torch.randn(40, requires_grad=True)
    score = lambda s, b, h, i, j: s + bias[j]  # noqa: E731
    assert _trace.score(score, EXTENTS).learned == (bias,)
    assert _trace.score(score, EXTENTS).learned == (bias,) and len(traced) == 1
    with torch.no_grad():
        assert _trace.score(score, EXTENTS).learned == () and len(traced) == 2
    bias.requires_grad_(False)
    assert _trace.score(score, EXTENTS).learned == () and len(traced) == 3
    _trace.score(score, (2, 4, 30, 39))
    assert len(traced) == 4
    q = torch.randn(2, 4, 30, 8)
    torch.func.vmap(lambda x: flex_attention(x[None], x[None], x[None], score))(q.repeat(1, 1, 1, 1))
    assert len(traced) > 4


def test_globals_defaults_and_elements_are_those_of_now(traced, monkeypatch):
    q, k = torch.randn(2, 4, 30, 8), torch.randn(2, 4, 40, 8)
    module = globals()

    def seen(function, number):
        """The result, which is the one of a fresh trace, after so many in all."""
        out = flex_attention(q, k, k, block_mask=Mask(function))
        assert len(traced) == number
        kept = dict(_kept._kept)
        _kept._kept.clear()
        assert torch.equal(out, flex_attention(q, k, k, block_mask=Mask(function)))
        _kept._kept.update(kept)
        traced.pop()
        return out

    outs = [seen(of_a_global, 1), seen(of_a_global, 1)]
    assert torch.equal(*outs)
    monkeypatch.setitem(module, "width", 9)
    outs.append(seen(of_a_global, 2))
    tensor = (ids + 1) % 3
    monkeypatch.setitem(module, "ids", tensor)
    outs.append(seen(of_a_global, 2))
    tensor.fill_(1)
    outs.append(seen(of_a_global, 2))
    outs.append(seen(with_default, 3))
    monkeypatch.setattr(with_default, "__defaults__", (8,))
    outs.append(seen(with_default, 4))
    assert all(not torch.equal(a, b) for a, b in zip(outs[1:], outs[2:]))


def counted(found):
    def mask(b, h, i, j):
        found.append(1)
        return i >= j

    return mask


def written(table):
    def mask(b, h, i, j):
        x = table
        x += 1
        return x[i] > j

    return mask


class Holder:
    reach = 3

    def __call__(self, b, h, i, j):
        return i - j < self.reach


def by_attribute(holder):
    return lambda b, h, i, j: i - j < holder.reach


def by_torch(b, h, i, j):
    return i - j < torch.initial_seed() % 7


def local(b, h, i, j):
    return (lambda x: x >= j)(i)


class Growing(dict):
    """Globals that are others each time."""

    def __getitem__(self, name):
        self[name] = super().__getitem__(name) + 1
        return super().__getitem__(name)


@pytest.mark.parametrize("function", [
    types.FunctionType(within_width.__code__, Growing(width=3)),
    counted([]), written(ids.clone()), Holder(), by_attribute(Holder()), by_torch, local, closure([1][0:1].pop), two(ids, FIRST.cpu().numpy()),
], ids=["globals of its own", "a call", "a write", "an object", "an attribute", "other of torch", "a function made", "a captured method", "numpy"])  # fmt: skip
def test_code_that_may_do_more_than_compute_is_traced_in_each_call(function, traced):
    for n in (1, 2, 3):
        try:
            _trace.mask(function, EXTENTS)
        except Exception as error:
            assert n == 1 or str(error) == said
            said = str(error)
        assert len(traced) == n


def test_no_tensor_is_held(traced):
    table = torch.randint(0, 3, (40,))
    gone = weakref.ref(table)
    _trace.mask(two(table, table), EXTENTS)
    assert _kept._kept
    del table
    traced.clear()
    gc.collect()
    assert gone() is None


def test_few_are_kept(traced):
    for reach in range(3, 3 + 2 * _kept._MOST):
        _trace.mask(of_an_element(reach), EXTENTS)
    assert len(_kept._kept) == _kept._MOST


def test_no_attribute_that_may_be_used_makes_a_number_of_elements():
    """An operation that did, or chose how many elements there are, would have to be left out of
    :data:`foveate._kept._ATTRIBUTES`. Of :func:`torch.where` the trace itself notes it."""
    several = [torch.tensor([1.5, 2.0, 0.0]), torch.tensor([0.0, 0.0, 7.0])]
    one = [torch.tensor(0.5), torch.tensor(3.0)]
    for name in sorted(_kept._ATTRIBUTES):
        for owner in (torch.Tensor, torch):
            function = getattr(owner, name, None)
            for tensors in (several, one):
                for arguments in ((), (2,)):
                    try:
                        results = [function(t, *arguments) for t in tensors]
                    except Exception:
                        continue
                    if isinstance(results[0], torch.Tensor):
                        results = [t.shape for t in results]
                    if not isinstance(results[0], tuple) or name != "where":
                        assert results[0] == results[1], name


def test_where_a_function_captures_torch_tells_it_from_another():
    """`torch` left no mark, so that where it stood among captured values did not count."""
    table = torch.randn(40, requires_grad=True)

    def score(x, y):
        return lambda s, b, h, q_idx, kv_idx: x.add(s, y[kv_idx])

    right = _trace.score(score(torch, table), EXTENTS)
    with pytest.raises(TypeError):
        _trace.score(score(table, torch), EXTENTS)
    assert same(shown(_trace.score(score(torch, table), EXTENTS)), shown(right))
