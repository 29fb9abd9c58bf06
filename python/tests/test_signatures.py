"""Foveate's functions take what torch's take, in every version of torch that is supported."""

import inspect
import re

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import foveate
from foveate import _enable

#: Parameters and defaults of torch's functions by the release that gave them these, up to the last that was looked at.
SIGNATURES = {
    "flex_attention": {
        "2.10": "query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False, "
        "kernel_options=None, *, return_aux=None",
    },
    "create_block_mask": {
        "2.10": "mask_mod, B, H, Q_LEN, KV_LEN, device=None, BLOCK_SIZE=128, _compile=False",
        "2.13": "mask_mod, B, H, Q_LEN, KV_LEN, device=None, BLOCK_SIZE=128, _compile=False, separate_full_blocks=True, "
        "compute_dq_write_order=False, dq_kv_order=True",
    },
    "create_mask": {"2.10": "mod_fn, B, H, Q_LEN, KV_LEN, device=None"},
    "noop_mask": {"2.10": "batch, head, token_q, token_kv"},
    "and_masks": {"2.10": "*mask_mods"},
    "or_masks": {"2.10": "*mask_mods"},
}
NEWEST = "2.15"
#: What only Foveate's functions take, by keyword.
OURS = {"flex_attention": {"sink", "dropout_p"}}


def version(name):
    return tuple(map(int, re.match(r"(\d+)\.(\d+)", name).groups()))


def plain(function):
    """Parameters of a function, without types."""
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in parameters]


def told(text):
    scope = {}
    exec(f"def function({text}): pass", scope)
    return plain(scope["function"])


@pytest.mark.parametrize("name, since", [(name, since) for name, of in SIGNATURES.items() for since in of])
def test_what_a_version_of_torch_takes_foveate_takes(name, since):
    theirs, ours = told(SIGNATURES[name][since]), plain(getattr(foveate, name))
    ours = [p for p in ours if p[0] not in OURS.get(name, ())]
    assert ours[: len(theirs)] == theirs
    # Of later releases, all with defaults.
    assert all(default is not inspect.Parameter.empty for _, _, default in ours[len(theirs) :])
    only = [p for p in plain(getattr(foveate, name)) if p[0] in OURS.get(name, ())]
    assert all(kind is inspect.Parameter.KEYWORD_ONLY for _, kind, _ in only)


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_torch_that_is_here_takes_what_the_table_says(name):
    here = version(torch.__version__)
    if here > version(NEWEST):
        pytest.skip(f"torch {torch.__version__} is newer than the table, which ends with {NEWEST}")
    since = max((v for v in SIGNATURES[name] if version(v) <= here), key=version)
    assert plain(getattr(torch_flex, name)) == told(SIGNATURES[name][since])


def test_classes_are_torchs_own():
    for name in ("BlockMask", "AuxRequest", "AuxOutput"):
        assert getattr(foveate, name) is getattr(torch_flex, name)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def test_the_order_of_writes_that_torch_keeps_with_a_mask_is_torchs():
    sizes = (causal, 1, 1, 300, 260, "cpu", (32, 64))
    for descending in (True, False):
        made = foveate.create_block_mask(*sizes, compute_dq_write_order=True, dq_kv_order=descending)
        with foveate.enable():
            if version(torch.__version__) >= (2, 13):
                enabled = torch_flex.create_block_mask(*sizes, compute_dq_write_order=True, dq_kv_order=descending)
                assert torch.equal(enabled.dq_write_order, made.dq_write_order)
        if version(torch.__version__) < (2, 13):
            assert not hasattr(made, "dq_write_order")
            continue
        theirs = torch_flex.create_block_mask(*sizes, compute_dq_write_order=True, dq_kv_order=descending)
        assert torch.equal(made.dq_write_order, theirs.dq_write_order)
        assert torch.equal(made.dq_write_order_full, theirs.dq_write_order_full)
        assert (made.dq_kv_order, made.dq_kv_order_spt) == (theirs.dq_kv_order, theirs.dq_kv_order_spt)
    with pytest.raises(ValueError, match="dq_kv_order must be a bool"):
        foveate.create_block_mask(*sizes, dq_kv_order=1)


@pytest.mark.parametrize("apart", [True, False])
def test_a_compiled_region_takes_full_blocks_or_not_in_every_version(apart):
    def made():
        return foveate.create_block_mask(causal, 1, 1, 64, 64, "cpu", 16, separate_full_blocks=apart)

    mask = torch.compile(made, backend="eager")()
    torch._dynamo.reset()
    assert (mask.full_kv_num_blocks is not None) == apart
    assert torch.equal(mask.kv_num_blocks, made().kv_num_blocks)


def test_an_argument_of_a_torch_to_come_stays_torchs_with_a_warning(monkeypatch):
    """Given its default, it changes nothing."""
    seen = []

    def to_come(*args, **kwargs):
        seen.append(kwargs)
        return torch.zeros(())

    q = torch.randn(1, 1, 8, 4)
    mask = dict(B=1, H=1, Q_LEN=8, KV_LEN=8, device="cpu", BLOCK_SIZE=8, _compile=False)
    for name, function, given in (
        ("flex_attention", lambda **more: _enable._flex_attention(q, key=q, value=q, **more), None),
        ("create_block_mask", lambda **more: _enable._create_block_mask(causal, **mask, **more), None),
    ):
        monkeypatch.setitem(_enable._MORE, name, {"schedule": given})
        monkeypatch.setitem(_enable.TORCHS, name, to_come)
        function(schedule=None)
        assert not seen
        with pytest.warns(UserWarning, match=f"{name} stays torch's: Foveate does not know its argument schedule"):
            function(schedule="late")
        assert seen.pop()["schedule"] == "late"


def _public():
    """Public functions and classes of the package and its doors, and public methods of these classes, by name."""
    doors = (foveate.huggingface, foveate.sdpa, foveate.torchtitan, foveate.torchtune, foveate.xla)
    for module in (foveate, *doors):
        for name in module.__all__:
            made = getattr(module, name)
            if not getattr(made, "__module__", "").startswith("foveate."):
                continue  # Torch's, a door, or of the native module.
            yield f"{module.__name__}.{name}", made
            if inspect.isclass(made):
                methods = {n: f for n, f in vars(made).items() if n[0] != "_"}
                yield from ((f"{name}.{n}", getattr(f, "__func__", f)) for n, f in methods.items())


def test_what_raises_says_so_in_its_docstring():
    silent, seen = [], 0
    for name, made in _public():
        source = inspect.getsource(made.__init__ if inspect.isclass(made) else made)
        if re.search(r"\braise\b|\b(flag|integer|number|function|one_of|probability|unsupported)\(", source):
            seen += 1
            if "Raises:" not in (inspect.getdoc(made) or ""):
                silent.append(name)
    assert not silent and seen >= 15, (silent, seen)
