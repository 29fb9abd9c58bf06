"""The operators: what they give has the bits and layout of uncompiled calls, their errors have type and words of these, they
hold nothing, and a torch without what they need says so."""

import os
import shutil
import subprocess
import sys
import threading

import pytest
import torch

import foveate
from foveate import _autograd, _blocks, _checks, _native, _trace, _varlen

ON_CPU = torch.get_default_device().type == "cpu"
OURS = torch.ops.foveate
NONE = (None, [], [], None, [], [], [], [1, 1], 0.3, None, 0.0)
CU_Q, CU_K = torch.tensor([0, 7, 7, 15]), torch.tensor([0, 20, 23, 25], dtype=torch.int32)
TABLE, LENGTHS = torch.tensor([[4, 1, 2**40], [0, 3, -1]]), torch.tensor([7, 5])


def scattered(*shape, order, dtype=torch.float32):
    """A random tensor whose axes lie in memory in this order."""
    return torch.randn([shape[axis] for axis in order]).to(dtype).permute([order.index(axis) for axis in range(len(shape))])


def operands(batch=2, q_len=18, kv_len=27, dtype=torch.float32):
    q = scattered(batch, 4, q_len, 8, order=[0, 2, 1, 3], dtype=dtype)
    k = scattered(batch, 2, kv_len, 8, order=[1, 0, 3, 2], dtype=dtype)
    return q, k, torch.randn(batch, 2, kv_len, 12).to(dtype)[:, :, :, ::2]


def listed(batch, heads, full):
    """Lists of some tiles of 8 by 8, in any order."""
    pair = []
    for _ in range(1 + full):
        counts = torch.randint(0, 5, (batch, heads, 3), dtype=torch.int32)
        pair += [counts, torch.stack([torch.randperm(4) for _ in range(batch * heads * 3)]).view(batch, heads, 3, 4).int()]
    return pair


IDS = torch.randint(0, 3, (27,))


def masked(lists, batch, heads):
    """Mods of the operator with lists of tiles, and the mask that they say as a function."""
    kinds = {(1, 1): "m1[q / 8, kv / 8]", (2, 1): "m1[b, q / 8, kv / 8]", (1, 4): "m1[h, q / 8, kv / 8]"}
    kind = kinds.get((batch, heads), "m1[b, h, q / 8, kv / 8]")
    table = _blocks.table(lists, (8, 8), 18, 27).contiguous()

    def mask(b, h, q, kv):
        kind = table[b if batch > 1 else 0, h if heads > 1 else 0, q // 8, kv // 8]
        return (kind == 2) | ((kind == 1) & (IDS[q] <= IDS[kv] + 1))

    said = f"{kind} == 2 | {kind} == 1 & m0[q] <= m0[kv] + mn0"
    return (None, [], [], said, [IDS], [1], lists, [8, 8], 0.3, None, 0.0), None, mask


BIASES = [torch.randn(4, dtype=torch.float64), torch.randn(30, 4).to(torch.bfloat16).t(), torch.tensor(0.5), torch.randn(3)]
SCORED = ("score * s2[0] + (s0[h] + s1[h, kv]) * sn0 as f32", BIASES, [2], *NONE[3:])


def scored(score, b, h, q, kv):
    return score * BIASES[2] + (BIASES[0][h] + BIASES[1][h, kv]) * 2


#: Mods of an operator, and the score and the mask that they say as functions.
MODS = {
    "none": (NONE, None, None),
    "a score": (SCORED, scored, None),
    "dropout": ((*NONE[:-2], torch.tensor([41]), 0.25), None, None),
    "an integer of a call": ((None, [], [], "kv <= q + mn0", [], [3], *NONE[6:]), None, lambda b, h, q, kv: kv <= q + 3),
    "a mask of which nothing is left": ((None, [], [], "kv < mn0", [], [0], *NONE[6:]), None, lambda b, h, q, kv: kv < 0),
    **{f"lists {of}": masked(listed(*of), *of[:2]) for of in ((1, 1, True), (2, 1, True), (1, 4, False), (2, 4, True))},
}


def same(ours, gold):
    """Whether results are the same bits in the same layout."""
    assert type(ours) is type(gold)
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == gold.dtype and ours.shape == gold.shape
        steps = [[step for step, n in zip(t.stride(), t.shape) if n > 1] for t in (ours, gold)]
        assert steps[0] == steps[1] or not gold.numel()
        assert torch.equal(ours.nan_to_num(7.5), gold.nan_to_num(7.5))
    else:
        assert len(ours) == len(gold)
        for one, two in zip(ours, gold):
            same(one, two)


def uncompiled(tensors, mods, where=(), gradients=None):
    """``out``, ``lse`` and ``max_scores`` of an uncompiled call; with gradients of the first two also those of q, k and v and
    of what the score captures."""
    (*_, seed, p), score, mask = mods
    q, k, v = leaves = [t.detach().requires_grad_(gradients is not None) for t in tensors]
    extents = (q.size(0), q.size(1), q.size(2), k.size(2))
    offsets = None
    if where:
        q, k, v = (t.squeeze(0).transpose(0, 1) for t in (q, k, v))
        offsets, extents = _varlen.sequences(*where, q, k)
    learned = BIASES[:3] if score else []
    for bias in learned:
        bias.requires_grad_(gradients is not None)
    made = _trace.score(score, extents) if score else None
    call = _autograd.Call(
        made, _trace.mask(mask, extents) if mask else None, 0.3, None if seed is None else (p, int(seed) if ON_CPU else seed.view(torch.int32)), True, True, offsets
    )
    results = _autograd.run(call, q, k, v, None)
    if where:
        results = (_checks.heads_first(results[0]), *results[1:])
    if gradients is not None:
        outputs, given = zip(*((of, d) for of, d in zip(results, gradients) if d is not None))
        found = torch.autograd.grad(outputs, [*leaves, *learned], given)
        results = (*results, found)
    for bias in learned:
        bias.requires_grad_(False)
    return results


def check(name, tensors, mods, where=()):
    """An operator and its gradient beside the uncompiled call."""
    forward, backward = (getattr(OURS, f"{name}{way}").default for way in ("forward", "backward"))
    said = mods[0]
    ours = forward(*tensors, *where, *said, True)
    same(list(ours), [t.detach() for t in uncompiled(tensors, mods, where)])
    out, lse, _ = ours
    learned = [2, 0, 1] if said is SCORED else []
    d_out, d_lse = torch.randn_like(out), torch.randn_like(lse)
    for d_out, d_lse, needs in ((d_out, d_lse, [True] * 3), (d_out, None, [True] * 3), (None, d_lse, [False, True, False])):
        *gradients, captured = backward(*tensors, *where, out, lse, d_out, d_lse, *said, needs, learned)
        gold, of_captures = (lambda found: (found[:3], found[3:]))(uncompiled(tensors, mods, where, (d_out, d_lse))[3])
        for ours, theirs, needed in zip(gradients, gold, needs):
            same(ours, theirs if needed else theirs.new_empty(0))
        same(captured, [of_captures[at] for at in learned])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mods", MODS)
def test_results_and_gradients_are_those_of_uncompiled_calls(mods, dtype, repeatable):
    torch.manual_seed(len(mods))
    check("", operands(dtype=dtype), MODS[mods])


@pytest.mark.parametrize("mods", [name for name in MODS if "lists" not in name])
def test_sequences_and_rows_past_them_are_those_of_uncompiled_calls(mods, repeatable):
    torch.manual_seed(len(mods))
    check("varlen_", operands(1), MODS[mods], (CU_Q, CU_K))


def test_a_score_of_sequences_reads_their_own_positions_and_learns_nothing_of_rows_past_them():
    torch.manual_seed(0)
    q, k, v = operands(1)
    out, lse, rows = OURS.varlen_forward.default(q, k, v, CU_Q, CU_K, *NONE, True)
    assert out[:, :, 15:].eq(0).all() and lse[:, :, 15:].isneginf().all() and rows[:, :, 15:].isneginf().all()
    dq, dk, dv, _ = OURS.varlen_backward.default(q, k, v, CU_Q, CU_K, out, lse, torch.ones_like(out), None, *NONE, [True] * 3, [])
    assert dq[:, :, 15:].eq(0).all() and dk[:, :, 25:].eq(0).all() and dv[:, :, 25:].eq(0).all()
    assert dq[:, :, :15].ne(0).any() and dk[:, :, :25].ne(0).any()


@pytest.mark.parametrize("mods", ["none", "a score", "an integer of a call"])
def test_pages_are_those_of_uncompiled_calls(mods):
    torch.manual_seed(len(mods))
    q, k, v = operands()[0], torch.randn(5, 2, 4, 8), torch.randn(5, 4, 2, 6).transpose(1, 2)
    said, score, mask = MODS[mods]
    for integers in (torch.int64, torch.int32):
        table = TABLE.clamp(-1, 99).to(integers).t().contiguous().t() if integers == torch.int32 else TABLE
        lengths = LENGTHS.to(integers)
        aux = foveate.AuxRequest(lse=True, max_scores=True)
        out, rows = foveate.paged(q, k, v, table, lengths, score, mask, 0.3, return_aux=aux)
        same(list(OURS.paged.default(q, k, v, table, lengths, *said, True)), [out, rows.lse, rows.max_scores])


def test_keys_of_another_dtype_and_lengths_of_0_are_those_of_uncompiled_calls(repeatable):
    torch.manual_seed(0)
    q, k, v = operands()
    for other in (torch.bfloat16, torch.float16, torch.float64):
        ours = OURS.forward.default(q, k.to(other), v.to(other), *NONE, True)
        same(list(ours), list(uncompiled((q, k.to(other).to(q.dtype), v.to(other).to(q.dtype)), MODS["none"])))
    for lengths in ((0, 5), (5, 0)):
        check("", operands(2, *lengths), MODS["none"])


Q, K, V = operands(1)
#: Operator, arguments, exception and words.
WRONG = [
    ("forward", (Q, K, V, "scor", *NONE[1:], False), ValueError, "there is no `scor`"),
    ("forward", (Q, K, V, "score + sn0 as f32", [], [2**40], *NONE[3:], False), ValueError, "does not fit 32 bits"),
    ("forward", (Q, K, V, "score + s0[kv]", [torch.randn(8)], *NONE[2:], False), IndexError, r"a captured tensor of shape \(8,\) was read at index 8"),
    ("forward", (Q, K, V, "score + s0[kv, 0]", [torch.randn(8, 3)], *NONE[2:], False), IndexError, r"a captured tensor of shape \(8, 3\)"),
    ("forward", (Q.int(), K, V, *NONE, False), NotImplementedError, "attention takes float32, bfloat16 and float16 tensors"),
    ("forward", (Q, K.int(), V, *NONE, False), NotImplementedError, "attention takes float32, bfloat16 and float16 tensors"),
    ("forward", (Q, K[..., :4], V, *NONE, False), ValueError, None),
    ("forward", (Q[0], K, V, *NONE, False), ValueError, "a tensor has 3 axes, not 4"),
    ("forward", (Q.to(torch.complex64), K, V, *NONE, False), TypeError, None),
    ("forward", (Q, K, V, None, [], [], "true", [], [], listed(1, 1, True)[:2], [4, 8], *NONE[8:], False), ValueError, "block_mask lists 3 rows of tiles of 4 queries; 18 queries need 5"),
    ("forward", (Q, K, V, None, [], [], "m0[q / 8, kv / 8] == 1", [], [], [torch.ones(1, 1, 3).int(), torch.full((1, 1, 3, 4), 4).int()], [8, 8], *NONE[8:], False), ValueError, "block_mask lists a tile outside its 4 columns"),
    ("forward", (Q, K, V, None, [], [], "true", [], [], listed(2, 1, False) + listed(3, 1, False), [8, 8], *NONE[8:], False), ValueError, "block_mask lists partial and full tiles for other batch entries or heads"),
    ("varlen_forward", (Q, K, V, torch.tensor([0, 9, 3]), CU_K, *NONE, False), ValueError, r"cu_seqlens_q must begin at 0 and not decrease, got \[0, 9, 3\]"),
    ("varlen_forward", (Q, K, V, CU_Q, torch.tensor([0, 99]), *NONE, False), ValueError, "cu_seqlens_k ends at 99, past the 27 rows"),
    ("varlen_forward", (Q, K, V, CU_Q, CU_K[:2], *NONE, False), ValueError, "they need as many"),
    ("varlen_forward", (Q, K, V, CU_Q.double(), CU_K, *NONE, False), ValueError, r"a vector of integer offsets, got a tensor of torch.float64 \[4\]"),
    ("paged", (Q, K, V, TABLE[0], LENGTHS[:1], *NONE, False), ValueError, r"int64 tensor of 2 axes, got torch.int64 \(3,\)"),
    ("paged", (Q, K, V, TABLE, LENGTHS, *NONE, False), ValueError, "page_table is for 2 batch entries, and query has 1"),
    ("paged", (Q, K, V, TABLE[:1], torch.tensor([99]), *NONE, False), ValueError, None),
]


@pytest.mark.cpu("of tensors on a device elements are not read")
@pytest.mark.parametrize("at", range(len(WRONG)))
def test_errors_have_their_own_type_and_the_next_call_is_right(at):
    name, arguments, kind, words = WRONG[at]
    operator = getattr(OURS, name)
    gold = OURS.forward.default(Q, K, V, *NONE, True)
    with pytest.raises(kind, match=words) as raised:
        operator.default(*arguments)
    assert type(raised.value) is kind and "\n" not in str(raised.value)
    # By its name alone, as by C++, it is torch's error of a kernel, of the same words.
    with pytest.raises(RuntimeError) as named:
        operator(*arguments)
    assert str(named.value) == str(raised.value)
    same(list(OURS.forward.default(Q, K, V, *NONE, True)), list(gold))


def test_threads_have_their_own_errors():
    said = {}

    def run(name):
        for _ in range(200):
            try:
                OURS.forward.default(Q, K, V, name, *NONE[1:], False)
            except ValueError as error:
                said.setdefault(name, set()).add(str(error).split("`: ")[0])

    threads = [threading.Thread(target=run, args=(f"wrong{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == {f"wrong{i}": {f"program `wrong{i}"} for i in range(4)}


def test_calls_that_end_well_or_badly_hold_no_tensors():
    ids = torch.zeros(27, dtype=torch.int64)
    lists, bias = listed(1, 1, True), torch.randn(4)
    mask = "m1[q / 8, kv / 8] != 0 & m0[kv] == 0"
    held = [Q, K, V, ids, bias, *lists]
    before = [t._use_count() for t in held]
    for kind in ("score + s0[h]", "scor"):
        mods = (kind, [bias], [], mask, [ids], [], lists, [8, 8], 0.3, None, 0.0)
        for _ in range(3):
            try:
                out, lse, _ = OURS.forward.default(Q, K, V, *mods, False)
                OURS.backward.default(Q, K, V, out, lse, out, lse, *mods, [True] * 3, [0])
            except ValueError:
                assert kind == "scor"
    assert [t._use_count() for t in held] == before
    assert out._use_count() == lse._use_count() == 1


def began(code, **more):
    """A new process that has ended, with these variables."""
    environment = {**os.environ, **more, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def ran(code, **more):
    """What it prints."""
    process = began(code, **more)
    process.check_returncode()
    return process.stdout.split("\n")


def test_each_function_is_looked_up_once_and_every_operator_has_its_tag():
    names = _native.kernel_functions()
    assert len(set(names)) == len(names) and all("torch_" in name for name in names)
    for name in ("forward", "backward", "varlen_forward", "varlen_backward", "paged"):
        assert torch.Tag.pt2_compliant_tag in getattr(OURS, name).default.tags
        dump = torch._C._dispatch_dump(f"foveate::{name}")
        assert "\nCPU: " in dump and "\nCUDA: " in dump and "Python" not in dump.split("\nCPU: ")[1].split("\n")[0]


def test_a_torch_without_its_library_is_an_import_error():
    said = began("import torch; torch.__file__ = '/nowhere/torch/__init__.py'; import foveate").stderr.strip().split("\n")[-1]
    assert said.startswith("ImportError: foveate's operators need another PyTorch: /nowhere/torch/lib/libtorch_cpu.so is not loaded")


TORCHS = os.path.join(os.path.dirname(torch.__file__), "lib")
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="skipped: no C compiler")


def linked(folder, text):
    """A library with torch's functions, and these in place of some."""
    source, made = folder / "functions.c", str(folder / "functions.so")
    source.write_text("#include <dlfcn.h>\n#include <stdint.h>\n#include <stdlib.h>\n#include <string.h>\n" + text)
    command = ["cc", "-shared", "-fPIC", "-fexceptions", "-D_GNU_SOURCE", f'-DTORCH="{TORCHS}/libtorch_cpu.so"', "-o", made]
    libraries = ["-Wl,--no-as-needed", f"-L{TORCHS}", "-ltorch_cpu", "-Wl,--allow-shlib-undefined", f"-Wl,-rpath,{TORCHS}"]
    subprocess.run([*command, str(source), *libraries], check=True)
    return made


#: The native module by itself, without the package that registers its operators.
ALONE = f"""
import ctypes, importlib.util, torch
of = importlib.util.spec_from_file_location("_native", {_native.__file__!r})
_native = importlib.util.module_from_spec(of)
of.loader.exec_module(_native)
"""

#: Refuses the third kernel.
REFUSING = """
int torch_library_impl(void *library, const char *name, void *kernel, uint64_t version) {
    static int calls;
    int (*torchs)(void *, const char *, void *, uint64_t) = dlsym(dlopen(TORCH, RTLD_NOW | RTLD_NOLOAD), "torch_library_impl");
    return ++calls == 3 ? 1 : torchs(library, name, kernel, version);
}
"""


@needs_compiler
def test_none_is_registered_where_torch_refuses_one(tmp_path):
    made = linked(tmp_path, REFUSING)
    call = f"""{ALONE}
try:
    ctypes.CDLL({made!r}) and _native.register_operators({made!r})
except ImportError as error:
    print(error)
print(hasattr(torch.ops.foveate, 'forward'))
torch.ops.foveate.__dict__.pop('forward', None)
tagged = [_native.register_operators({TORCHS + '/libtorch_cpu.so'!r}) for again in range(2)]
q = torch.ones(1, 1, 2, 4)
print(tagged[0] == tagged[1], torch.ops.foveate.forward.default(q, q, q, *{NONE}, False)[0].sum().item())
"""
    refused, known, total, _ = ran(call)
    assert refused == "foveate's operators need another PyTorch: torch took no kernel of \"varlen_forward\" for \"CPU\""
    assert (known, total) == ("False", "True 8.0")


#: Keeps the arguments of the first call of `forward` and calls its kernel when the process exits.
LATE = """
typedef void Kernel(uint64_t *, uint64_t, uint64_t);
static Kernel *forward;
static uint64_t stack[64], inputs, outputs;
int aoti_torch_new_tensor_handle(void *, void **);
static void late(void) { forward(stack, inputs, outputs); }
static void keep(uint64_t *values, uint64_t in, uint64_t out) {
    memcpy(stack, values, in * sizeof *values);
    inputs = in, outputs = out;
    for (int at = 0; at < 3; at++) aoti_torch_new_tensor_handle((void *)stack[0], (void **)&values[at]);
    atexit(late);
}
int torch_library_impl(void *library, const char *name, Kernel *kernel, uint64_t version) {
    int (*torchs)(void *, const char *, Kernel *, uint64_t) = dlsym(dlopen(TORCH, RTLD_NOW | RTLD_NOLOAD), "torch_library_impl");
    if (strcmp(name, "forward")) return torchs(library, name, kernel, version);
    forward = kernel;
    return torchs(library, name, keep, version);
}
"""


@needs_compiler
def test_a_call_after_python_has_ended_is_an_exception_of_cpp(tmp_path):
    made = linked(tmp_path, LATE)
    call = f"{ALONE}made = ctypes.CDLL({made!r})\n_native.register_operators({made!r}); q = torch.ones(1, 1, 2, 4)\n"
    call += f"torch.ops.foveate.forward.default(q, q, q, *{NONE}, False)"
    said = began(call).stderr
    assert "std::runtime_error" in said and "need the Python interpreter, which has ended" in said and "panicked" not in said
