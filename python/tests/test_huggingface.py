"""``foveate.huggingface`` beside transformers' own eager attention, on tiny random models."""

import pytest
import torch
from packaging.version import Version
from reference import attention as gold_attention
from reference import close

import foveate
from foveate import _trace
from foveate.huggingface import attention, attention_mask

transformers = pytest.importorskip("transformers", reason="transformers is not installed: see scripts/python-env.sh")
foveate.huggingface.register()

TINY = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    pad_token_id=None,
    bos_token_id=1,
    eos_token_id=None,
)
LATENT = dict(qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, kv_lora_rank=12, q_lora_rank=12, head_dim=4)
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
KINDS = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", dict(sliding_window=7)),
    "qwen2": (
        "Qwen2",
        dict(use_sliding_window=True, sliding_window=7, layer_types=["sliding_attention", "full_attention"]),
    ),
    "qwen3": ("Qwen3", {}),
    "gemma2": ("Gemma2", dict(sliding_window=7, attn_logit_softcapping=2.0, query_pre_attn_scalar=8)),
    "gemma3": ("Gemma3", dict(sliding_window=7, layer_types=["sliding_attention", "full_attention"])),
    "gpt_oss": ("GptOss", dict(sliding_window=7, layer_types=["sliding_attention", "full_attention"], **EXPERTS)),
    "deepseek_v3": ("DeepseekV3", dict(first_k_dense_replace=9, num_key_value_heads=4, **LATENT)),
    "llama4": ("Llama4", dict(attention_chunk_size=7, intermediate_size_mlp=48, **EXPERTS)),
}


def model_of(kind, **changed):
    name, more = KINDS[kind]
    text = "Text" if name in ("Gemma3", "Llama4") else ""
    config = getattr(transformers, f"{name}{text}Config")(**(TINY | more | changed))
    config._experts_implementation = "eager"
    torch.manual_seed(3)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * (0.5 if weight.dim() == 1 else weight.shape[-1] ** -0.5))
    return model.eval()


G = torch.Generator().manual_seed(4)
IDS = torch.randint(0, 61, (2, 29), generator=G)
POSITIONS = torch.cat([torch.arange(13), torch.arange(5), torch.arange(11)])[None]
CU = torch.tensor([0, 13, 18, 29], dtype=torch.int32)
LEFT = torch.ones(2, 29, dtype=torch.long)
LEFT[0, :6] = 0
RIGHT = LEFT.flip(1)
OFFSETS = dict(cu_seq_lens_q=CU, cu_seq_lens_k=CU, max_length_q=13, max_length_k=13)
CASES = {
    "dense": (IDS, {}),
    "padded on the left": (IDS, dict(attention_mask=LEFT)),
    "padded on the right": (IDS, dict(attention_mask=RIGHT)),
    "packed": (IDS, dict(position_ids=POSITIONS.expand(2, -1))),
    "packed with offsets": (IDS[:1], dict(position_ids=POSITIONS, **OFFSETS)),
}


def run(model, implementation, ids, arguments, valid=None, pieces=None):
    """Logits and gradients; of each piece by itself, where pieces are given."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    parts = [ids] if pieces is None else [ids[:, a:b] for a, b in pieces]
    logits = torch.cat([model(part, use_cache=False, **arguments).logits for part in parts], 1)
    if valid is not None:
        logits = logits[valid.bool()]
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
    (logits * weights).sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(ours, theirs, what, bound=3e-5):
    assert bool(torch.isfinite(ours).all()), f"{what}: not finite"
    worst, largest = float((ours - theirs).detach().abs().max()), float(theirs.detach().abs().max())
    assert worst <= bound * largest + 1e-6, f"{what}: {worst:.3g} apart, of {largest:.3g}"


def same_runs(ours, theirs):
    same(ours[0], theirs[0], "logits")
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        same(ours[1][name], gradient, name, bound=1e-4)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_are_those_of_eager_attention(kind, case):
    ids, arguments = CASES[case]
    model, valid = model_of(kind), arguments.get("attention_mask")
    if "cu_seq_lens_q" in arguments:
        if kind == "llama4" and Version(transformers.__version__) < Version("5.23"):
            pytest.skip(
                "skipped: of a packed row this transformers' Llama 4 computes something else by every attention"
            )
        theirs = run(model, "eager", ids, {}, pieces=((0, 13), (13, 18), (18, 29)))
    else:
        theirs = run(model, "eager", ids, arguments, valid)
    same_runs(run(model, "foveate", ids, arguments, valid), theirs)
    assert kind != "gpt_oss" or any("sinks" in name for name in theirs[1])


def test_offsets_alone_keep_documents_apart():
    model = model_of("llama")
    positions = torch.arange(29)[None]
    together, _ = run(model, "foveate", IDS[:1], dict(position_ids=positions, **OFFSETS))
    for a, b in ((0, 13), (13, 18), (18, 29)):
        alone, _ = run(model, "eager", IDS[:1, a:b], dict(position_ids=positions[:, a:b]))
        same(together[:, a:b], alone, f"document {a}..{b}")


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind, padded", [
    ("llama", True), ("llama", False), ("mistral", True), ("gemma3", True), ("gemma3", False), ("gpt_oss", True),
])
def test_generate_gives_what_eager_attention_gives(kind, cache, padded):
    model, results = model_of(kind), {}
    for implementation in ("eager", "foveate"):
        model.set_attn_implementation(implementation)
        results[implementation] = model.generate(
            IDS[:, :11],
            attention_mask=LEFT[:, :11] if padded else torch.ones(2, 11),
            max_new_tokens=6,
            do_sample=False,
            pad_token_id=0,
            cache_implementation=None if cache == "dynamic" else cache,
            return_dict_in_generate=True,
            output_logits=True,
        )
    ours, theirs = results["foveate"], results["eager"]
    assert torch.equal(ours.sequences, theirs.sequences)
    for step, (one, two) in enumerate(zip(ours.logits, theirs.logits)):
        same(one, two, f"logits of step {step}")


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_checkpointing_repeats_the_forward_with_its_dropout(dropout):
    model = model_of("llama", attention_dropout=dropout).train()
    torch.manual_seed(7)
    plain = run(model, "foveate", IDS, {})
    torch.manual_seed(8)
    other = run(model, "foveate", IDS, {})
    assert torch.equal(plain[0], other[0]) == (dropout == 0.0)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    torch.manual_seed(7)
    again = run(model, "foveate", IDS, {})
    assert torch.equal(plain[0], again[0])
    for name, gradient in plain[1].items():
        assert torch.equal(gradient, again[1][name]), name


@pytest.mark.parametrize("padded", [False, True])
def test_position_biases_of_an_encoder_and_decoder_get_their_gradients(padded):
    torch.manual_seed(9)
    config = transformers.T5Config(
        vocab_size=61,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    arguments = dict(decoder_input_ids=IDS[:, :17], **(dict(attention_mask=RIGHT) if padded else {}))
    theirs = run(model, "eager", IDS, arguments)
    same_runs(run(model, "foveate", IDS, arguments), theirs)
    assert sum("relative_attention_bias" in name for name in theirs[1]) == 2


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_users_own_mask_of_four_axes_counts(dtype):
    model = model_of("llama")
    kept = (torch.rand(2, 1, 29, 29, generator=G) > 0.5) | torch.eye(29, dtype=torch.bool)
    added = torch.where(kept, 0.0, torch.finfo(torch.float32).min)
    theirs = run(model, "eager", IDS, dict(attention_mask=added))
    same_runs(run(model, "foveate", IDS, dict(attention_mask=kept if dtype == torch.bool else added)), theirs)


@pytest.mark.parametrize("kept", [torch.ones(2, 9, dtype=torch.long), LEFT[:, :9]], ids=["all", "some"])
def test_positions_past_a_mask_of_padding_are_padding(kept):
    model, logits = model_of("llama"), []
    for implementation in ("foveate", "eager"):
        model.set_attn_implementation(implementation)
        logits.append(model(IDS, attention_mask=kept).logits[LEFT > 0])
    same(*logits, "logits")


def test_a_mask_of_padding_that_is_too_short_without_a_cache_is_refused():
    model = model_of("llama")
    model.set_attn_implementation("foveate")
    with pytest.raises(ValueError, match="is for 29 queries and 5 keys, and the layer has 29 and 29: give one"):
        model(IDS, attention_mask=LEFT[:, :5], use_cache=False)


def test_a_mask_of_padding_has_two_axes():
    with pytest.raises(TypeError, match=r"\[batch, positions\], got a tensor of torch.float32 \[2, 16, 16\]"):
        attention_mask(2, 16, 16, attention_mask=torch.ones(2, 16, 16))


def test_weights_are_not_given():
    model = model_of("llama")
    model.set_attn_implementation("foveate")
    assert model(IDS, output_attentions=True).attentions == ()


def test_an_encoder_sees_both_sides():
    torch.manual_seed(2)
    config = transformers.ModernBertConfig(
        **(TINY | dict(pad_token_id=0, local_attention=6, global_attn_every_n_layers=2))
    )
    model = transformers.ModernBertForMaskedLM(config).eval()
    for arguments in ({}, dict(attention_mask=RIGHT)):
        results = []
        for implementation in ("eager", "foveate"):
            model.set_attn_implementation(implementation)
            results.append(model(IDS, **arguments).logits[RIGHT.bool()])
        same(results[1], results[0], "logits")


def test_a_compiled_model_breaks_its_graph_around_attention():
    model = model_of("llama")
    arguments = dict(attention_mask=LEFT)
    theirs = run(model, "eager", IDS, arguments, LEFT)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    model.set_attn_implementation("foveate")
    model.zero_grad()
    logits = compiled(IDS, use_cache=False, **arguments).logits[LEFT.bool()]
    same(logits, theirs[0], "logits")
    torch._dynamo.reset()


def test_one_mask_is_traced_for_all_layers_of_a_kind(monkeypatch):
    traced = []
    whole = _trace.mask
    monkeypatch.setattr(_trace, "mask", lambda *given, **named: traced.append(given) or whole(*given, **named))
    for kind, masks in (("llama", 1), ("gemma3", 2)):
        traced.clear()
        run(model_of(kind), "foveate", *CASES["packed"])
        assert len(traced) == masks, kind
    traced.clear()
    run(model_of("llama"), "foveate", *CASES["packed with offsets"])
    assert len(traced) == 1


class Layer(torch.nn.Module):
    is_causal = True


def operands(q_len=19, kv_len=19, batch=1):
    sizes = ((batch, 4, q_len, 8), (batch, 2, kv_len, 8), (batch, 2, kv_len, 5))
    return tuple(torch.randn(size, generator=G) for size in sizes)


@pytest.mark.parametrize("arguments, allowed", [
    ({}, lambda q, kv: q >= kv),
    (dict(is_causal=False), lambda q, kv: q >= 0),
    (dict(sliding_window=4), lambda q, kv: (q >= kv) & (q - kv < 4)),
    (dict(is_causal=False, cu_seq_lens_q=torch.tensor([0, 8, 19])), lambda q, kv: (q < 8) == (kv < 8)),
    (dict(cu_seq_lens_q=torch.tensor([0, 8, 19])), lambda q, kv: ((q < 8) == (kv < 8)) & (q >= kv)),
])
def test_a_layer_without_a_mask_goes_by_its_own_arguments(arguments, allowed):
    q, k, v = operands()
    out, weights = attention(Layer(), q, k, v, None, scaling=0.3, **arguments)
    at = torch.arange(19)
    mask = allowed(at[:, None], at[None, :]).expand(1, 4, 19, 19)
    gold, _ = gold_attention(q, k, v, mask=mask, scale=0.3)
    close("out", out, gold.transpose(1, 2), torch.float32, 19 * 8)
    assert weights is None and out.is_contiguous()
    one, _ = attention(Layer(), q[:, :, :1], k, v, None, **{k: v for k, v in arguments.items() if "cu" not in k})
    gold, _ = gold_attention(q[:, :, :1], k, v)
    close("one query", one, gold.transpose(1, 2), torch.float32, 19 * 8)


def test_offsets_that_change_in_place_change_the_result():
    q, k, v = operands()
    cu = torch.tensor([0, 8, 19])
    before, _ = attention(Layer(), q, k, v, None, cu_seq_lens_q=cu)
    cu[1] = 5
    after, _ = attention(Layer(), q, k, v, None, cu_seq_lens_q=cu)
    fresh, _ = attention(Layer(), q, k, v, None, cu_seq_lens_q=torch.tensor([0, 5, 19]))
    assert torch.equal(after, fresh) and not torch.equal(before, after)


@pytest.mark.parametrize(
    "offsets, words",
    [
        (dict(cu_seq_lens_q=torch.tensor([0, 8, 20])), "cu_seq_lens_q ends at 20, past the 19 rows"),
        (
            dict(cu_seq_lens_q=torch.tensor([0, 8, 19]), cu_seq_lens_k=torch.tensor([0, 8, 24])),
            "cu_seq_lens_k ends at 24, past the 23 rows",
        ),
    ],
)
def test_offsets_that_end_past_the_rows_are_refused(offsets, words):
    with pytest.raises(ValueError, match=words):
        attention(Layer(), *operands(19, 23 if "cu_seq_lens_k" in offsets else 19), None, **offsets)


def test_the_mask_is_a_block_mask_to_those_who_look():
    mask = attention_mask(2, 29, 29, attention_mask=LEFT.bool())
    assert isinstance(mask, foveate.BlockMask) and len(mask.shape) == 4
    at = torch.arange(29)
    dense = (at[:, None] >= at[None, :]) & LEFT.bool()[:, None, None, :]
    made = foveate.create_block_mask(lambda b, h, q, kv: dense[b, 0, q, kv], 2, None, 29, 29)
    assert torch.equal(mask.to_dense(), made.to_dense()) and mask.sparsity() == made.sparsity()
    with pytest.raises(AttributeError):
        mask.no_such_table


def test_it_refuses_to_run_where_masks_would_be_ignored():
    transformers.AttentionInterface.register("half_registered", attention)
    model = model_of("llama")
    model.set_attn_implementation("half_registered")
    with pytest.raises(RuntimeError, match="no mask function.*register") as raised:
        model(IDS)
    assert "\n" not in str(raised.value)
    foveate.huggingface.register("half_registered")
    model(IDS)


@pytest.mark.parametrize("name", ["eager", "my_flash", "owner/name", "paged|foveate"])
def test_names_that_mean_something_else_are_refused(name):
    with pytest.raises(ValueError, match="another name"):
        foveate.huggingface.register(name)


def test_a_name_is_not_empty():
    with pytest.raises(ValueError, match="name is empty"):
        foveate.huggingface.register("")


def test_a_name_is_a_string():
    for wrong in (None, 7, ["foveate"]):
        with pytest.raises(TypeError, match="name must be a string, got") as raised:
            foveate.huggingface.register(wrong)
        assert "\n" not in str(raised.value)


def test_continuous_batching_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="continuous batching"):
        attention(Layer(), *operands(), None, cache=object())
