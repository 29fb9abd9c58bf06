"""``MultiheadAttention`` and ``TransformerLayer`` beside torch's own layers and plain operations."""

import pytest
import torch
import torch.nn.functional as F

from foveate import MultiheadAttention, TransformerLayer

S, B, HIDDEN, HEADS, D = 19, 2, 32, 4, 8


def same(ours, theirs, what="result", floor=1e-6):
    worst, largest = float((ours - theirs).detach().abs().max()), float(theirs.detach().abs().max())
    assert worst <= 2e-5 * largest + floor, f"{what}: {worst:.3g} apart, of {largest:.3g}"


def filled(module, seed=6):
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * (0.4 if p.dim() == 1 else p.shape[-1] ** -0.5))
    return module.eval()


def states(*lead, seed=7):
    return torch.randn(*lead, HIDDEN, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def same_gradients(ours, theirs, inputs):
    weights = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(8))
    for at, (one, two) in enumerate(zip(*(torch.autograd.grad((x * weights).sum(), inputs) for x in (ours, theirs)))):
        same(one, two, f"gradient {at}", floor=1e-5)


def into_torch(ours, theirs, cross=False):
    """Weights of a layer of ours in torch's layer with norms first."""

    def attention(name, of, norm, first):
        first = getattr(of, first)
        parts = [first] if not hasattr(of, "key_value") else [first, of.key_value]
        for what in ("weight", "bias"):
            rows = [getattr(p, n + what) for p in parts for n in p.names]
            getattr(getattr(theirs, name), f"in_proj_{what}").data.copy_(torch.cat(rows))
            getattr(getattr(theirs, name).out_proj, what).data.copy_(getattr(of.proj, what))
            getattr(norm, what).data.copy_(getattr(first, f"layer_norm_{what}"))

    attention("self_attn", ours.self_attention, theirs.norm1, "layernorm_qkv")
    if cross:
        attention("multihead_attn", ours.inter_attention, theirs.norm2, "layernorm_query")
    last = theirs.norm3 if cross else theirs.norm2
    for what in ("weight", "bias"):
        getattr(last, what).data.copy_(getattr(ours.layernorm_mlp, f"layer_norm_{what}"))
        for at in ("1", "2"):
            getattr(getattr(theirs, f"linear{at}"), what).data.copy_(getattr(ours.layernorm_mlp, f"fc{at}_{what}"))
    return theirs.eval()


def gelu(x):
    return F.gelu(x, approximate="tanh")


def test_an_encoder_layer_is_torchs():
    ours = filled(TransformerLayer(HIDDEN, 48, HEADS, attn_input_format="bshd"))
    theirs = into_torch(
        ours, torch.nn.TransformerEncoderLayer(HIDDEN, HEADS, 48, 0.0, gelu, batch_first=True, norm_first=True)
    )
    x = states(B, S)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(S)
    golden = theirs(x, src_mask=mask)
    out = ours(x)
    same(out, golden)
    same_gradients(out, golden, [x])
    padding = torch.arange(S) >= torch.tensor([[S], [11]])
    out = ours(x, attention_mask=padding[:, None, None], self_attn_mask_type="padding_causal")
    golden = theirs(x, src_mask=mask.isinf(), src_key_padding_mask=padding)
    same(out[~padding], golden[~padding])


def test_a_decoder_layer_is_torchs():
    ours = filled(TransformerLayer(HIDDEN, 48, HEADS, layer_type="decoder", activation="relu"))
    theirs = into_torch(
        ours, torch.nn.TransformerDecoderLayer(HIDDEN, HEADS, 48, 0.0, "relu", norm_first=True), cross=True
    )
    x, memory = states(S, B), states(23, B, seed=9)
    out = ours(x, encoder_output=memory)
    golden = theirs(x, memory, tgt_mask=torch.nn.Transformer.generate_square_subsequent_mask(S))
    same(out, golden)
    same_gradients(out, golden, [x, memory])


@pytest.mark.parametrize("form", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("kind", ["self", "cross"])
@pytest.mark.parametrize("groups", [1, 2, HEADS])
def test_fused_weights_give_what_their_parts_give(groups, kind, interleaved, form):
    options = dict(num_gqa_groups=groups, attention_type=kind, qkv_format=form, input_layernorm=True,
                   attn_mask_type="padding_causal" if form == "thd" else "causal")
    apart = filled(MultiheadAttention(HIDDEN, HEADS, **options))
    fused = MultiheadAttention(
        HIDDEN, HEADS, **options, fuse_qkv_params=True, qkv_weight_interleaved=interleaved
    ).eval()
    state = {}
    for name, value in apart.state_dict().items():
        module, _, of = name.rpartition(".")
        part, _, what = of.partition("_")
        if part not in ("query", "key", "value"):
            state[name] = value
        elif f"{module}.{what}" not in state:
            names = [n for n in ("query", "key", "value") if f"{module}.{n}_{what}" in apart.state_dict()]
            parts = [apart.state_dict()[f"{module}.{n}_{what}"] for n in names]
            if interleaved and len(parts) > 1:
                parts = [torch.cat([p.unflatten(0, (groups, -1)) for p in parts], 1).flatten(0, 1)]
            state[f"{module}.{what}"] = torch.cat(parts)
    fused.load_state_dict(state)
    lead = dict(sbhd=(S, B), bshd=(B, S), thd=(S,))[form]
    x, memory = states(*lead), states(*lead, seed=3)
    cu = torch.tensor([0, 7, S], dtype=torch.int32)
    more = dict(cu_seqlens_q=cu, cu_seqlens_kv=cu) if form == "thd" else {}
    out, golden = (m(x, encoder_output=memory if kind == "cross" else None, **more) for m in (fused, apart))
    same(out, golden)
    same_gradients(out, golden, [x, *([memory] if kind == "cross" else [])])


def rotated(x, angles, interleaved):
    """``[b, s, h, d]`` with complex numbers."""
    d = angles.shape[-1]
    pairs = x[..., :d].unflatten(-1, (-1, 2)) if interleaved else torch.stack(x[..., :d].chunk(2, -1), -1)
    by = angles[None, :, None, ::2] if interleaved else angles[None, :, None, : d // 2]
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(by), by))
    turned = turned.flatten(-2) if interleaved else torch.cat(turned.unbind(-1), -1)
    return torch.cat([turned, x[..., d:]], -1)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    "norm, before", [(None, False), ("RMSNorm", True), ("LayerNorm", False), ("L2Normalization", False)]
)
def test_rotary_embeddings_and_norms_of_heads(interleaved, norm, before):
    module = filled(
        MultiheadAttention(
            HIDDEN,
            HEADS,
            num_gqa_groups=2,
            qkv_format="bshd",
            rotary_pos_interleaved=interleaved,
            qk_norm_type=norm,
            qk_norm_before_rope=before,
            input_layernorm=True,
            normalization="RMSNorm",
            zero_centered_gamma=True,
            bias=False,
        )
    )
    half = torch.arange(S)[:, None] * 0.3 ** torch.arange(3)
    angles = half.repeat_interleave(2, -1) if interleaved else torch.cat([half, half], -1)
    x = states(B, S)
    p = dict(module.named_parameters())
    n = F.rms_norm(x, (HIDDEN,), p["layernorm_qkv.layer_norm_weight"] + 1, 1e-5)
    q, k, v = (F.linear(n, p[f"layernorm_qkv.{w}_weight"]).unflatten(-1, (-1, D)) for w in ("query", "key", "value"))

    def normed(t, which):
        if norm is None:
            return t
        if norm == "L2Normalization":
            return t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        weight = p[f"{which}_norm.weight"]
        return (
            F.rms_norm(t, (D,), weight, 1e-6)
            if norm == "RMSNorm"
            else F.layer_norm(t, (D,), weight, p[f"{which}_norm.bias"], 1e-6)
        )

    turn = lambda t: rotated(t, angles, interleaved)  # noqa: E731
    q, k = ((turn(normed(t, w)) if before else normed(turn(t), w)) for t, w in ((q, "q"), (k, "k")))
    golden = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True)
    golden = F.linear(golden.transpose(1, 2).flatten(2), p["proj.weight"])
    out = module(x, rotary_pos_emb=angles[:, None, None])
    same(out, golden)
    same_gradients(out, golden, [x, *p.values()])


def test_positions_of_packed_sequences_begin_anew():
    angles = (torch.arange(S)[:, None] * 0.3 ** torch.arange(4)).repeat(1, 2)[:, None, None]
    module = filled(MultiheadAttention(HIDDEN, HEADS, qkv_format="thd", attn_mask_type="padding_causal"))
    x, cu = states(S), torch.tensor([0, 7, 7, S - 2], dtype=torch.int32)
    out = module(x, rotary_pos_emb=angles, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    module.qkv_format = module.core_attention.qkv_format = "bshd"
    for a, b in ((0, 7), (7, S - 2)):
        same(out[a:b], module(x[None, a:b], rotary_pos_emb=angles, attn_mask_type="causal")[0])
    module.qkv_format = module.core_attention.qkv_format = "thd"
    with pytest.raises(ValueError, match="angles for 5 positions"):
        module(x, rotary_pos_emb=angles[:5], cu_seqlens_q=cu, cu_seqlens_kv=cu)


@pytest.mark.parametrize(
    "activation, act, gates",
    [
        ("gelu", gelu, False),
        ("geglu", gelu, True),
        ("reglu", F.relu, True),
        ("silu", F.silu, False),
        ("swiglu", F.silu, True),
        ("srelu", lambda x: F.relu(x) ** 2, False),
        ("qgelu", lambda x: x * torch.sigmoid(1.702 * x), False),
        ("glu", torch.sigmoid, True),
    ],
)
@pytest.mark.parametrize("shape", ["plain", "parallel", "output_layernorm", "residual of norms"])
def test_the_blocks_of_a_layer_are_joined_as_asked(activation, act, gates, shape):
    options = {
        "parallel": dict(parallel_attention_mlp=True),
        "output_layernorm": dict(output_layernorm=True),
        "residual of norms": dict(apply_residual_connection_post_layernorm=True),
    }.get(shape, {})
    layer = filled(TransformerLayer(HIDDEN, 48, HEADS, activation=activation, **options))
    x = states(S, B)
    p = dict(layer.named_parameters())
    norm = lambda t, name: F.layer_norm(t, (HIDDEN,), p[name + "weight"], p[name + "bias"])  # noqa: E731

    def attention(t):
        prefix = "self_attention.qkv." if shape == "output_layernorm" else "self_attention.layernorm_qkv."
        n = t if shape == "output_layernorm" else norm(t, prefix + "layer_norm_")
        q, k, v = (
            F.linear(n, p[f"{prefix}{w}_weight"], p[f"{prefix}{w}_bias"]).unflatten(-1, (HEADS, D)).permute(1, 2, 0, 3)
            for w in ("query", "key", "value")
        )
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)
        return n, F.linear(context, p["self_attention.proj.weight"], p["self_attention.proj.bias"])

    def feedforward(t):
        n = norm(t, "layernorm_mlp.layer_norm_")
        inner = F.linear(n, p["layernorm_mlp.fc1_weight"], p["layernorm_mlp.fc1_bias"])
        inner = act(inner[..., :48]) * inner[..., 48:] if gates else act(inner)
        return n, F.linear(inner, p["layernorm_mlp.fc2_weight"], p["layernorm_mlp.fc2_bias"])

    n, attended = attention(x)
    if shape == "parallel":
        golden = x + attended + feedforward(x)[1]
    elif shape == "residual of norms":
        middle = n + attended
        normed, made = feedforward(middle)
        golden = normed + made
    else:
        middle = x + attended
        golden = middle + feedforward(middle)[1]
        golden = norm(golden, "layernorm.") if shape == "output_layernorm" else golden
    out = layer(x)
    same(out, golden)
    same_gradients(out, golden, [x, *p.values()])


NAMES = {
    "self_attention.layernorm_qkv": "layer_norm_weight layer_norm_bias query_weight query_bias key_weight key_bias value_weight value_bias",
    "self_attention.proj": "weight bias",
    "inter_attention.layernorm_query": "layer_norm_weight layer_norm_bias query_weight query_bias",
    "inter_attention.key_value": "key_weight key_bias value_weight value_bias",
    "inter_attention.proj": "weight bias",
    "layernorm_mlp": "layer_norm_weight layer_norm_bias fc1_weight fc1_bias fc2_weight fc2_bias",
    "self_attention.core_attention": "",
    "inter_attention.core_attention": "",
}


def test_state_dicts_have_transformer_engines_names_and_come_back(recwarn):
    layer = filled(TransformerLayer(HIDDEN, 48, HEADS, layer_type="decoder"))
    names = {f"{module}.{name}" for module, of in NAMES.items() for name in (*of.split(), "_extra_state")}
    state = layer.state_dict()
    assert set(state) == names and all(v.numel() == 0 for k, v in state.items() if k.endswith("_extra_state"))
    x, memory = states(S, B), states(23, B, seed=9)
    other = filled(TransformerLayer(HIDDEN, 48, HEADS, layer_type="decoder"), seed=1)
    assert not torch.equal(other(x, encoder_output=memory), layer(x, encoder_output=memory))
    other.load_state_dict(state)
    assert torch.equal(other(x, encoder_output=memory), layer(x, encoder_output=memory))
    other.load_state_dict({k: v for k, v in state.items() if "_extra_state" not in k})
    assert not recwarn.list
    with pytest.warns(UserWarning, match="without FP8"):
        other.load_state_dict(state | {"layernorm_mlp._extra_state": torch.ones(3, dtype=torch.uint8)})
    with pytest.raises(RuntimeError, match="fc1_weight"):
        other.load_state_dict({k: v for k, v in state.items() if "fc1_weight" not in k})


def test_dropout_is_of_training_alone():
    layer = filled(TransformerLayer(HIDDEN, 48, HEADS, drop_path_rate=0.5))
    x = states(S, B)
    assert torch.equal(layer(x), layer(x))
    layer.train()
    torch.manual_seed(1)
    one = layer(x)
    torch.manual_seed(1)
    assert torch.equal(one, layer(x)) and not torch.equal(one, layer(x))


def test_paths_are_dropped_on_the_device_of_the_input_not_on_the_default_one():
    layer = filled(TransformerLayer(HIDDEN, 48, HEADS, drop_path_rate=0.5, attention_dropout=0)).train()
    x = states(S, B)
    with torch.device("meta"):
        assert layer(x).device == x.device


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: MultiheadAttention(HIDDEN, HEADS, tp_size=2), NotImplementedError, "tp_size"),
        (
            lambda: MultiheadAttention(HIDDEN, HEADS, fuse_wgrad_accumulation=True),
            NotImplementedError,
            "fuse_wgrad_accumulation",
        ),
        (lambda: MultiheadAttention(HIDDEN, HEADS, num_gqa_groups=3), ValueError, "divide"),
        (lambda: MultiheadAttention(HIDDEN, HEADS, qk_norm_type="Norm"), ValueError, "L2Normalization"),
        (lambda: TransformerLayer(HIDDEN, 48, HEADS, activation="step"), ValueError, "not one of"),
        (lambda: TransformerLayer(HIDDEN, 48, HEADS, normalization="Norm"), ValueError, "not one of"),
        (lambda: TransformerLayer(HIDDEN, 48, HEADS, layer_type="both"), ValueError, "not one of"),
        (
            lambda: TransformerLayer(HIDDEN, 48, HEADS, ub_tp_comm_overlap=True),
            NotImplementedError,
            "ub_tp_comm_overlap",
        ),
        (
            lambda: TransformerLayer(HIDDEN, 48, HEADS, parallel_attention_mlp=True, output_layernorm=True),
            ValueError,
            "parallel",
        ),
        (lambda: MultiheadAttention(HIDDEN, HEADS, attention_type="cross")(states(S, B)), ValueError, "encoder_output"),
    ],
)
def test_wrong_input_is_one_clear_error(make, error, words):
    with pytest.raises(error, match=words) as raised:
        make()
    assert "\n" not in str(raised.value)
