"""What is no argument of any kind in the place of each argument of each public function: one line that names it."""

import functools
import math

import pytest
import torch
from compiled import Backend

from foveate import (
    DotProductAttention,
    Mask,
    MultiheadAttention,
    TransformerLayer,
    create_block_mask,
    create_mask,
    explain,
    flex_attention,
    huggingface,
    paged,
    prepare,
    varlen,
    xla,
)

TABLE = torch.arange(1600).view(40, 40)
WRONG = {"object": object(), "str": "abc", "table": TABLE, "pair": [1, "a"], "complex": 2j, "sparse": torch.eye(4).to_sparse()}
Q, K = torch.randn(2, 4, 10, 8), torch.randn(2, 4, 12, 8)
ROWS = torch.randn(10, 4, 8)
STATES = torch.randn(10, 2, 32)
ENDS = torch.tensor([0, 5, 10])


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def seen(mask):
    return flex_attention(Q, K, K, block_mask=mask)


def layer(kind):
    return lambda **given: kind(**given)(STATES)


OPERANDS = dict(query=Q, key=K, value=K)
OPTIONS = dict(score_mod=None, scale=None, return_aux=None, sink=None)
SIZES = dict(B=None, H=None, Q_LEN=10, KV_LEN=12, device="cpu")
HEADS = dict(num_attention_heads=4, num_gqa_groups=None, attention_dropout=0.0, window_size=None, bias=True)
WEIGHTS = dict(hidden_size=32, kv_channels=None, init_method=None, params_dtype=None, device=None, normalization="LayerNorm")
STATE = dict(hidden_states=STATES, window_size=None, rotary_pos_emb=None, core_attention_bias_type="no_bias", core_attention_bias=None)

#: By name: a function, and the arguments of a good call, of which one is wrong at a time.
CALLS = {
    "flex_attention": (flex_attention, OPERANDS | OPTIONS | dict(
        block_mask=None, enable_gqa=False, return_lse=False, kernel_options=None, dropout_p=0.0)),
    "explain": (explain, OPERANDS | dict(score_mod=None, block_mask=None, scale=None, enable_gqa=False)),
    "prepare": (prepare, OPERANDS | dict(
        score_mod=None, block_mask=None, scale=None, enable_gqa=False, sink=None, dropout_p=0.0)),
    "create_block_mask": (create_block_mask, SIZES | dict(mask_mod=causal, BLOCK_SIZE=128, separate_full_blocks=True)),
    "create_mask": (create_mask, SIZES | dict(mod_fn=causal)),
    "varlen": (varlen, dict(query=ROWS, key=ROWS, value=ROWS, cu_seqlens_q=ENDS, cu_seqlens_k=ENDS, max_seqlen_q=None,
                            max_seqlen_k=None, mask=None, dropout_p=0.0) | OPTIONS),
    "paged": (paged, dict(query=Q, key_pages=torch.cat([K, K]), value_pages=torch.cat([K, K]), mask=None,
                          page_table=torch.arange(4).view(2, 2), lengths=torch.tensor([20, 24])) | OPTIONS),
    "Mask": (lambda what: seen(Mask(what)), dict(what="causal")),
    "Mask.causal": (lambda bottom_right: Mask.causal(bottom_right=bottom_right), dict(bottom_right=False)),
    "Mask.sliding_window": (lambda size: seen(Mask.sliding_window(size)), dict(size=4)),
    "Mask.document": (lambda ids: seen(Mask.document(ids)), dict(ids=torch.zeros(12).int())),
    "Mask.from_cu_seqlens": (lambda cu_seqlens: Mask.from_cu_seqlens(cu_seqlens), dict(cu_seqlens=ENDS)),
    "Mask.__and__": (lambda other: seen(Mask.causal() & other), dict(other=Mask.causal())),
    "DotProductAttention": (DotProductAttention, dict(
        num_attention_heads=4, kv_channels=8, num_gqa_groups=None, attention_dropout=0.0, qkv_format="sbhd", softmax_scale=None,
        attn_mask_type="causal", window_size=None, attention_type="self", softmax_type="vanilla", tp_size=1)),
    "DotProductAttention.forward": (DotProductAttention(4, 8), dict(
        query_layer=ROWS[:, None], key_layer=ROWS[:, None], value_layer=ROWS[:, None], qkv_format="sbhd", attn_mask_type="causal",
        window_size=None, core_attention_bias_type="no_bias", core_attention_bias=None, alibi_slopes=None,
        checkpoint_core_attention=False)),
    "MultiheadAttention": (layer(MultiheadAttention), HEADS | WEIGHTS | dict(
        qkv_format="sbhd", qk_norm_type=None, attention_type="self", input_layernorm=True, layernorm_epsilon=1e-5,
        attn_mask_type="causal")),
    "MultiheadAttention.forward": (MultiheadAttention(32, 4), STATE),
    "TransformerLayer": (layer(TransformerLayer), HEADS | WEIGHTS | dict(
        ffn_hidden_size=64, hidden_dropout=0.0, drop_path_rate=0.0, activation="gelu", layer_type="encoder",
        self_attn_mask_type="causal")),
    "TransformerLayer.forward": (TransformerLayer(32, 64, 4), STATE),
    "xla.flash_attention": (xla.flash_attention, dict(
        q=Q, k=Q, v=Q, causal=False, q_segment_ids=None, kv_segment_ids=None, sm_scale=1.0, ab=None)),
    "huggingface.attention_mask": (huggingface.attention_mask, dict(
        batch_size=2, q_length=10, kv_length=12, q_offset=0, kv_offset=0, mask_function=None, attention_mask=None)),
    "huggingface.attention": (functools.partial(huggingface.attention, torch.nn.Module()), OPERANDS | dict(
        attention_mask=None, dropout=0.0, scaling=None, is_causal=None, sliding_window=None, softcap=None, s_aux=None,
        position_bias=None, cu_seq_lens_q=ENDS, cu_seq_lens_k=ENDS)),
}
#: What messages say in place of some arguments' names.
SAID = {
    "self_attn_mask_type": "attn_mask_type",
    "what": "ask",
    "other": "unsupported operand",
    "mask": "a mask must be",
    "ids": "`ids`",
    "cu_seq_lens_q": "cu_seq",
    "cu_seq_lens_k": "cu_seq",
}
#: Integers of any shape are ids of more documents, or say what is no padding.
TAKEN = {("huggingface.attention_mask", "attention_mask", "table"), ("Mask.document", "ids", "table")}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_argument_is_one_line_that_names_it(name):
    if name == "huggingface.attention":
        pytest.importorskip("transformers", reason="transformers is not installed: see scripts/python-env.sh")
    call, good = CALLS[name]
    call(**good)
    for argument in good:
        for kind, wrong in WRONG.items():
            if (name, argument, kind) in TAKEN:
                continue
            with pytest.raises((TypeError, ValueError, NotImplementedError, RuntimeError, IndexError)) as raised:
                call(**good | {argument: wrong})
                pytest.fail(f"{argument} of {name} was taken: {wrong!r}")
            message = str(raised.value)
            assert "\n" not in message and len(message) < 320, f"{argument} of {name}: {message}"
            assert SAID.get(argument, argument) in message or "q, k and v" in message, f"{argument} of {name}: {message}"
    call(**good)


@pytest.mark.parametrize("name", ["flex_attention", "varlen", "paged"])
def test_a_compiled_call_says_the_same(name):
    call, good = CALLS[name]
    for argument in good:
        for wrong in (WRONG["object"], WRONG["table"]):
            given = good | {argument: wrong}
            with pytest.raises((TypeError, ValueError)) as outside:
                call(**given)
            with pytest.raises(type(outside.value)) as inside:
                Backend().compile(lambda: call(**given), fullgraph=False)()
            assert str(inside.value) == str(outside.value), f"{argument} of {name}"


def test_numbers_out_of_range_are_refused_by_name():
    for call, words in (
        (lambda: flex_attention(Q, K, K, scale=math.nan), "scale must be a finite number"),
        (lambda: flex_attention(Q, K, K, scale=10**400), "scale must be a number that a float holds"),
        (lambda: flex_attention(Q, K, K, dropout_p=-0.5), "dropout_p must be at least 0 and below 1"),
        (lambda: varlen(ROWS, ROWS, ROWS, ENDS, ENDS, -1), "max_seqlen_q must be at least 0, got -1"),
        (lambda: create_mask(causal, 1, 1, -1, 8), "must not be negative"),
        (lambda: create_block_mask(causal, 1, 1, 2**70, 8), "Q_LEN must be below"),
        (lambda: create_block_mask(causal, 1, 1, 2**31, 8), r"Q_LEN and KV_LEN must be below 2\*\*31, got"),
        (lambda: create_block_mask(causal, 1, 1, 8, 8, "cuda3"), "device 'cuda3' is no device"),
        (lambda: DotProductAttention(0, 8), "num_attention_heads must be at least 1, got 0"),
        (lambda: DotProductAttention(4, (8, 8, 8)), "kv_channels must be a size, or two"),
        (lambda: DotProductAttention(4, 8, window_size=(1, 2, 3)), "window_size must be two integers"),
        (lambda: MultiheadAttention(32, 4, num_gqa_groups=0), "num_gqa_groups must divide"),
        (lambda: MultiheadAttention(32, 4)(torch.randn(10, 2, 31)), "hidden_states must be a tensor of 32 features"),
        (lambda: MultiheadAttention(32, 4)(STATES.bfloat16()), "hidden_states must be torch.float32"),
        (lambda: MultiheadAttention(32, 4, attention_type="cross")(STATES, encoder_output=STATES[..., :3]), "encoder_output must be"),
        (lambda: TransformerLayer(32, 64, 4, hidden_dropout=1.5), "hidden_dropout must be at least 0"),
        (lambda: flex_attention(Q, K, K, sink=torch.zeros(4, device="meta")), r"sink must be a float tensor on .* \[4\] on meta"),
        (lambda: varlen(ROWS, ROWS, ROWS, ENDS.to("meta")), r"cu_seqlens_q must be a vector of integer offsets, got .* on meta"),
        (lambda: varlen(ROWS, ROWS, ROWS, ENDS > 0), "cu_seqlens_q must be a vector of integer offsets, got a tensor of torch.bool"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            call()


def test_a_probability_of_an_integer_zero_draws_nothing():
    torch.manual_seed(3)
    first = torch.rand(())
    torch.manual_seed(3)
    flex_attention(Q, K, K, dropout_p=0)
    assert torch.equal(torch.rand(()), first)
