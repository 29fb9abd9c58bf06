"""``MultiheadAttention`` and ``TransformerLayer``: TransformerEngine's layers, by its arguments and with the names
of its parameters, around :class:`DotProductAttention`.

State dicts go from one to the other as they are. What TransformerEngine does for several GPUs or in FP8 is
refused by the name of its argument.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from ._dot_product import DotProductAttention, Stateless, mask_type_of, unsupported
from ._masks import offsets_of

Init = Callable[[Tensor], Any]
_NORMS = ("LayerNorm", "RMSNorm")


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


#: Activations, and whether they gate: the first half of the features is activated and multiplies the second.
_ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "gelu": (_gelu, False),
    "geglu": (_gelu, True),
    "qgelu": (_quick_gelu, False),
    "qgeglu": (_quick_gelu, True),
    "relu": (F.relu, False),
    "reglu": (F.relu, True),
    "srelu": (_squared_relu, False),
    "sreglu": (_squared_relu, True),
    "silu": (F.silu, False),
    "swiglu": (F.silu, True),
    "glu": (torch.sigmoid, True),
}


class _Layer(Stateless):
    """What layers are made of: a norm, linear maps, and TransformerEngine's names for their parameters."""

    def __init__(self, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.where = dict(device=device, dtype=dtype)

    def add_norm(self, size: int, kind: str, eps: float, centered: bool, prefix: str = "layer_norm_") -> None:
        if kind not in _NORMS:
            raise ValueError(f"normalization {kind!r} is not one of {', '.join(_NORMS)}")
        self.norm = (size, eps, centered, prefix)
        self.register_parameter(prefix + "weight", Parameter((torch.zeros if centered else torch.ones)(size, **self.where)))
        if kind == "LayerNorm":
            self.register_parameter(prefix + "bias", Parameter(torch.zeros(size, **self.where)))

    def normed(self, x: Tensor) -> Tensor:
        size, eps, centered, prefix = self.norm
        weight, bias = getattr(self, prefix + "weight"), getattr(self, prefix + "bias", None)
        weight = weight + 1 if centered else weight
        return F.rms_norm(x, (size,), weight, eps) if bias is None else F.layer_norm(x, (size,), weight, bias, eps)

    def add_linear(self, prefix: str, inputs: int, outputs: int, bias: bool, init: Init) -> None:
        weight = torch.empty(outputs, inputs, **self.where)
        init(weight)
        self.register_parameter(prefix + "weight", Parameter(weight))
        self.register_parameter(prefix + "bias", Parameter(torch.zeros(outputs, **self.where)) if bias else None)

    def linear(self, prefix: str, x: Tensor, with_bias: bool = True) -> Tensor:
        return F.linear(x, getattr(self, prefix + "weight"), getattr(self, prefix + "bias") if with_bias else None)


class _Norm(_Layer):
    """LayerNorm or RMSNorm over the last axis."""

    def __init__(self, size: int, kind: str, eps: float, centered: bool, **where: Any) -> None:
        super().__init__(**where)
        self.add_norm(size, kind, eps, centered, "")

    def forward(self, x: Tensor) -> Tensor:
        return self.normed(x)


class _Projection(_Layer):
    """A linear map, or several of one input, ``weight`` and ``bias``, or each with its name before it; after a norm
    where there is one."""

    def __init__(
        self,
        size: int,
        outputs: dict[str, int],
        bias: bool,
        init: Init,
        apart: bool = False,
        norm: tuple[str, float, bool] | None = None,
        **where: Any,
    ) -> None:
        super().__init__(**where)
        self.has_norm = norm is not None
        if norm is not None:
            self.add_norm(size, *norm)
        self.names = [f"{name}_" for name in outputs] if apart else [""]
        for name, features in zip(self.names, outputs.values() if apart else [sum(outputs.values())]):
            self.add_linear(name, size, features, bias, init)

    def forward(self, x: Tensor, with_bias: bool = True) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The input as it was projected, and the projections."""
        x = self.normed(x) if self.has_norm else x
        return x, tuple(self.linear(name, x, with_bias) for name in self.names)


class _Feedforward(_Layer):
    """A norm and two linear maps with an activation between them."""

    def __init__(
        self,
        size: int,
        inner: int,
        bias: bool,
        inits: tuple[Init, Init],
        activation: str,
        norm: tuple[str, float, bool],
        **where: Any,
    ) -> None:
        super().__init__(**where)
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation {activation!r} is not one of {', '.join(_ACTIVATIONS)}")
        self.activation, self.gates = _ACTIVATIONS[activation]
        self.add_norm(size, *norm)
        self.add_linear("fc1_", size, inner * 2 if self.gates else inner, bias, inits[0])
        self.add_linear("fc2_", inner, size, bias, inits[1])

    @property
    def last_bias(self) -> Tensor | None:
        return self._parameters["fc2_bias"]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The norm's result, and the maps' before the last bias."""
        x = self.normed(x)
        inner = self.linear("fc1_", x)
        if self.gates:
            gate, other = inner.chunk(2, -1)
            inner = self.activation(gate) * other
        else:
            inner = self.activation(inner)
        return x, self.linear("fc2_", inner, with_bias=False)


class _Unit(torch.nn.Module):
    """Vectors of length 1, without parameters."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + self.eps)).to(x.dtype)


def _normal(weight: Tensor) -> None:
    torch.nn.init.normal_(weight, 0.0, 0.023)


def _rotated(x: Tensor, angles: Tensor, form: str, cu: Tensor | None, interleaved: bool) -> Tensor:
    """Rotary embeddings by ``angles [s, 1, 1, d]``, of the first ``d`` of ``x``'s features."""
    if angles.dim() != 4 or angles.size(-1) > x.size(-1) or angles.size(-1) % 2:
        raise ValueError(f"rotary_pos_emb must be [s, 1, 1, d] with an even d of at most {x.size(-1)}, got {list(angles.shape)}")
    if form == "thd":
        if cu is None:
            raise ValueError("rotary_pos_emb with qkv_format 'thd' needs cu_seqlens_q and cu_seqlens_kv")
        starts = torch.tensor(offsets_of("cu_seqlens", cu, x.size(0)))
        at = torch.arange(x.size(0))
        sequence = torch.searchsorted(starts, at, right=True) - 1
        at = torch.where(at < starts[-1], at - starts[sequence], 0)
        longest = int(at.max()) + 1 if at.numel() else 0
    else:
        longest = x.size(0 if form == "sbhd" else 1)
        at = torch.arange(longest)
    if longest > angles.size(0):
        raise ValueError(f"rotary_pos_emb has angles for {angles.size(0)} positions, and there are {longest}")
    angles = angles[at, :, 0] if form == "thd" else angles[at]
    angles = angles.transpose(0, 1) if form == "bshd" else angles
    size = angles.size(-1)
    turned, rest = x[..., :size], x[..., size:]
    if interleaved:
        other = torch.stack([-turned[..., 1::2], turned[..., ::2]], -1).flatten(-2)
    else:
        low, high = turned.chunk(2, -1)
        other = torch.cat([-high, low], -1)
    turned = (turned * angles.cos() + other * angles.sin()).to(x.dtype)
    return torch.cat([turned, rest], -1) if rest.size(-1) else turned


class MultiheadAttention(torch.nn.Module):
    """Projections around attention, with the arguments of ``transformer_engine.pytorch.MultiheadAttention``.

    Args:
        hidden_size: Features of ``hidden_states``.
        num_attention_heads, kv_channels, num_gqa_groups: Query heads, the size of a head, key and value heads.
        attention_dropout, attn_mask_type, window_size, bottom_right_diagonal, softmax_type, qkv_format: As
            :class:`DotProductAttention` has them.
        input_layernorm, normalization, layernorm_epsilon, zero_centered_gamma: A norm (``"LayerNorm"`` or
            ``"RMSNorm"``) before the projections; a centred weight is stored less 1.
        fuse_qkv_params: One weight for queries, keys and values, in place of three. Its rows are, for each group,
            its query heads, its key head and its value head; with ``qkv_weight_interleaved=False`` all queries,
            all keys, all values. The parts are read as views, but for the queries of several interleaved groups.
        attention_type: ``"cross"`` takes keys and values from ``encoder_output``.
        rotary_pos_interleaved: Rotates neighbours in place of halves.
        qk_norm_type: ``"L2Normalization"``, ``"RMSNorm"`` or ``"LayerNorm"`` of query and key heads, after rotary
            embeddings or ``qk_norm_before_rope``.
        bias, return_bias: Biases of the projections; the last one returned beside the result, not added.
        return_layernorm_output: Returns the norm's result too.
        init_method, output_layer_init_method, params_dtype, device: How and where weights are made.
        layer_number, name, set_parallel_mode, seq_length, micro_batch_size: Change nothing on one device.

    Raises:
        ValueError: Sizes that do not fit each other, or a name that there is not.
        NotImplementedError: An argument that is not supported, by its name.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Any = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: Any = None,
        qkv_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        softmax_type: str = "vanilla",
    ) -> None:
        super().__init__()
        unsupported(
            "MultiheadAttention",
            tp_group=(tp_group, None),
            tp_size=(tp_size, 1),
            sequence_parallel=(sequence_parallel, False),
            fuse_wgrad_accumulation=(fuse_wgrad_accumulation, False),
            get_rng_state_tracker=(get_rng_state_tracker, None),
            ub_overlap_ag=(ub_overlap_ag, False),
            ub_overlap_rs=(ub_overlap_rs, False),
            ub_overlap_rs_dgrad=(ub_overlap_rs_dgrad, False),
            ub_bulk_dgrad=(ub_bulk_dgrad, False),
            ub_bulk_wgrad=(ub_bulk_wgrad, False),
        )
        del set_parallel_mode, seq_length, micro_batch_size
        where: dict[str, Any] = dict(device=device, dtype=params_dtype)
        init, init_out = init_method or _normal, output_layer_init_method or _normal
        size = kv_channels or hidden_size // num_attention_heads
        self.heads, self.groups, self.size = num_attention_heads, num_gqa_groups or num_attention_heads, size
        self.attention_type, self.qkv_format = attention_type, qkv_format
        self.interleaved = fuse_qkv_params and qkv_weight_interleaved
        self.fused, self.rotary_pos_interleaved = fuse_qkv_params, rotary_pos_interleaved
        self.return_bias, self.return_layernorm_output = return_bias, return_layernorm_output and input_layernorm
        self.qk_norm_before_rope, self.name = qk_norm_before_rope, name
        self.core_attention = DotProductAttention(
            num_attention_heads,
            size,
            num_gqa_groups,
            attention_dropout,
            qkv_format,
            attn_mask_type,
            window_size,
            bottom_right_diagonal,
            layer_number=layer_number,
            attention_type=attention_type,
            softmax_type=softmax_type,
        )
        if device is not None or params_dtype is not None:
            self.core_attention.to(device=device, dtype=params_dtype)
        queries, keys = dict(query=size * self.heads), dict(key=size * self.groups, value=size * self.groups)
        first = queries | keys if attention_type == "self" else queries
        names = ("layernorm_qkv", "qkv") if attention_type == "self" else ("layernorm_query", "query_layer")
        self._first = names[0 if input_layernorm else 1]
        norm = (normalization, layernorm_epsilon, zero_centered_gamma) if input_layernorm else None
        apart = not fuse_qkv_params and self._first != "query_layer"
        setattr(self, self._first, _Projection(hidden_size, first, bias, init, apart, norm, **where))
        if attention_type == "cross":
            self.key_value = _Projection(hidden_size, keys, bias, init, not fuse_qkv_params, **where)
        self.proj = _Projection(size * self.heads, dict(out=hidden_size), bias, init_out, **where)
        self.q_norm, self.k_norm = (self._head_norm(qk_norm_type, qk_norm_eps, where) for _ in range(2))

    def _head_norm(self, kind: str | None, eps: float, where: dict[str, Any]) -> torch.nn.Module | None:
        if kind is None:
            return None
        if kind == "L2Normalization":
            return _Unit(eps)
        if kind not in _NORMS:
            raise ValueError(f"qk_norm_type {kind!r} is not one of L2Normalization, {', '.join(_NORMS)}")
        return _Norm(self.size, kind, eps, False, **where)

    def _parts(self, made: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Heads of what was projected from one input, as views: queries, keys and values, or some of them."""
        if len(made) > 1 or not self.fused:
            return tuple(t.unflatten(-1, (-1, self.size)) for t in made)
        whole, ratio = made[0], self.heads // self.groups
        counts = [ratio, 1, 1] if self.attention_type == "self" else [1, 1]
        if self.interleaved:
            parts = whole.unflatten(-1, (self.groups, sum(counts), self.size)).split(counts, -2)
            return tuple(t.flatten(-3, -2) for t in parts)
        return tuple(torch.split(whole.unflatten(-1, (-1, self.size)), [n * self.groups for n in counts], -2))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        encoder_output: Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: Any = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None,
    ) -> Any:
        """Attention of ``hidden_states [s, b, hidden]`` (``[b, s, hidden]``, ``[t, hidden]``), of keys and values from
        ``encoder_output`` in cross attention.

        ``rotary_pos_emb`` is angles ``[s, 1, 1, d]``, or one for queries and one for keys. The others are those of
        :meth:`DotProductAttention.forward`. The result is one tensor like ``hidden_states``, or it with the last
        bias and the norm's result where these are asked for.
        """
        unsupported("MultiheadAttention", inference_params=(inference_params, None))
        del is_first_microbatch, fast_zero_fill
        normed, made = getattr(self, self._first)(hidden_states)
        if self.attention_type == "self":
            q, k, v = self._parts(made)
        else:
            if encoder_output is None:
                raise ValueError("cross attention needs encoder_output")
            q = made[0].unflatten(-1, (self.heads, self.size))
            k, v = self._parts(self.key_value(encoder_output)[1])

        def norm(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            return (q, k) if self.q_norm is None or self.k_norm is None else (self.q_norm(q), self.k_norm(k))

        if self.qk_norm_before_rope:
            q, k = norm(q, k)
        if rotary_pos_emb is not None:
            angles = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb,) * 2
            starts = (cu_seqlens_q, cu_seqlens_kv)
            if cu_seqlens_q_padded is not None and cu_seqlens_kv_padded is not None:
                starts = (cu_seqlens_q_padded, cu_seqlens_kv_padded)
            q, k = (_rotated(t, a, self.qkv_format, cu, self.rotary_pos_interleaved) for t, a, cu in zip((q, k), angles, starts))
        if not self.qk_norm_before_rope:
            q, k = norm(q, k)
        context = self.core_attention(
            q,
            k,
            v,
            attention_mask=attention_mask,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            cu_seqlens_q_padded=cu_seqlens_q_padded,
            cu_seqlens_kv_padded=cu_seqlens_kv_padded,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_kv,
            attn_mask_type=attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            checkpoint_core_attention=checkpoint_core_attention,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
            pad_between_seqs=pad_between_seqs,
        )
        _, results = self.proj(context, with_bias=not self.return_bias)
        results += (self.proj.bias,) if self.return_bias else ()
        results += (normed,) if self.return_layernorm_output else ()
        return results if len(results) > 1 else results[0]


class TransformerLayer(torch.nn.Module):
    """An attention block and a feed-forward block, with the arguments of
    ``transformer_engine.pytorch.TransformerLayer``.

    Args:
        hidden_size, ffn_hidden_size, num_attention_heads, num_gqa_groups, kv_channels: Sizes.
        self_attn_mask_type, window_size, bottom_right_diagonal: Of self attention; with ``enc_dec_`` before them those
            of cross attention.
        hidden_dropout, attention_dropout, drop_path_rate: Probabilities of dropout, in training.
        layer_type: ``"decoder"`` has cross attention to ``encoder_output``.
        output_layernorm: A norm at the end, and none before attention.
        apply_residual_connection_post_layernorm: The residual is what the norm gave.
        parallel_attention_mlp: Both blocks read the layer's input.
        activation: gelu, geglu, qgelu, qgeglu, relu, reglu, srelu, sreglu, silu, swiglu or glu.
        attn_input_format: ``"sbhd"``, ``"bshd"`` or ``"thd"``.

    The others are those of :class:`MultiheadAttention`, and errors too.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: Any = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        ub_tp_comm_overlap: bool = False,
        ub_overlap_ag: bool = True,
        ub_overlap_rs: bool = True,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = True,
        ub_bulk_wgrad: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: dict[str, Any] | None = None,
        normalization: str = "LayerNorm",
        device: Any = None,
        attn_input_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
    ) -> None:
        super().__init__()
        unsupported(
            "TransformerLayer", ub_tp_comm_overlap=(ub_tp_comm_overlap, False), activation_params=(activation_params, None)
        )
        del ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad  # They are parts of it.
        if layer_type not in ("encoder", "decoder"):
            raise ValueError(f"layer_type {layer_type!r} is not one of encoder, decoder")
        if parallel_attention_mlp and (layer_type == "decoder" or apply_residual_connection_post_layernorm or output_layernorm):
            raise ValueError(
                "parallel_attention_mlp goes with an encoder without output_layernorm and without "
                "apply_residual_connection_post_layernorm"
            )
        self.self_attn_mask_type = mask_type_of(self_attn_mask_type)
        self.enc_dec_attn_mask_type = mask_type_of(enc_dec_attn_mask_type)
        self.layer_type, self.parallel, self.hidden_dropout = layer_type, parallel_attention_mlp, hidden_dropout
        self.drop_path_rate, self.residual_normed = drop_path_rate, apply_residual_connection_post_layernorm
        self.name = name
        attention = functools.partial(
            MultiheadAttention,
            hidden_size,
            num_attention_heads,
            kv_channels,
            attention_dropout,
            layernorm_epsilon,
            init_method,
            output_layer_init_method,
            layer_number,
            tp_group=tp_group,
            tp_size=tp_size,
            num_gqa_groups=num_gqa_groups,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            get_rng_state_tracker=get_rng_state_tracker,
            sequence_parallel=sequence_parallel,
            params_dtype=params_dtype,
            return_layernorm_output=apply_residual_connection_post_layernorm,
            set_parallel_mode=set_parallel_mode,
            fuse_qkv_params=fuse_qkv_params,
            zero_centered_gamma=zero_centered_gamma,
            qkv_weight_interleaved=qkv_weight_interleaved,
            rotary_pos_interleaved=rotary_pos_interleaved,
            bias=bias,
            return_bias=True,
            normalization=normalization,
            device=device,
            qkv_format=attn_input_format,
            qk_norm_type=qk_norm_type,
            qk_norm_eps=qk_norm_eps,
            qk_norm_before_rope=qk_norm_before_rope,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            softmax_type=softmax_type,
        )
        self.self_attention = attention(
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            input_layernorm=not output_layernorm,
        )
        if layer_type == "decoder":
            self.inter_attention = attention(
                attn_mask_type=enc_dec_attn_mask_type,
                window_size=enc_dec_window_size,
                bottom_right_diagonal=enc_dec_bottom_right_diagonal,
                input_layernorm=True,
                attention_type="cross",
            )
        where: dict[str, Any] = dict(device=device, dtype=params_dtype)
        self.layernorm_mlp = _Feedforward(
            hidden_size,
            ffn_hidden_size,
            bias,
            (init_method or _normal, output_layer_init_method or _normal),
            activation,
            (normalization, layernorm_epsilon, zero_centered_gamma),
            **where,
        )
        self.layernorm = None
        if output_layernorm:
            self.layernorm = _Norm(hidden_size, normalization, layernorm_epsilon, zero_centered_gamma, **where)

    def _joined(self, made: Tensor, bias: Tensor | None, residual: Tensor, drops_path: bool = True) -> Tensor:
        made = F.dropout(made if bias is None else made + bias, self.hidden_dropout, self.training)
        if drops_path and self.training and self.drop_path_rate > 0:
            # Whole entries of the first axis, as TransformerEngine drops them.
            kept = torch.rand(made.shape[:1] + (1,) * (made.dim() - 1)) >= self.drop_path_rate
            made = made * kept / (1 - self.drop_path_rate)
        return residual + made

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: Any = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: Any = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None,
    ) -> Tensor:
        """The layer's result for ``hidden_states``, of the same shape. Arguments are those of
        :meth:`MultiheadAttention.forward`; ``cu_seqlens_kv`` and what begins with ``enc_dec_`` are of cross attention."""
        del fast_zero_fill, pad_between_seqs, max_seqlen_q, max_seqlen_kv, is_first_microbatch
        shared: dict[str, Any] = dict(
            checkpoint_core_attention=checkpoint_core_attention,
            inference_params=inference_params,
            rotary_pos_emb=rotary_pos_emb,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_q_padded=cu_seqlens_q_padded,
        )
        made, bias, *normed = self.self_attention(
            hidden_states,
            attention_mask=attention_mask,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            cu_seqlens_kv=cu_seqlens_q,
            cu_seqlens_kv_padded=cu_seqlens_q_padded,
            **shared,
        )
        if self.parallel:
            _, inner = self.layernorm_mlp(hidden_states)
            last = self.layernorm_mlp.last_bias
            return self._joined(made if bias is None else made + bias, inner if last is None else inner + last, hidden_states)
        hidden_states = self._joined(made, bias, normed[0] if normed else hidden_states)
        if self.layer_type == "decoder":
            made, bias, *normed = self.inter_attention(
                hidden_states,
                attention_mask=enc_dec_attn_mask,
                encoder_output=encoder_output,
                attn_mask_type=enc_dec_attn_mask_type,
                window_size=enc_dec_window_size,
                bottom_right_diagonal=enc_dec_bottom_right_diagonal,
                cu_seqlens_kv=cu_seqlens_kv,
                cu_seqlens_kv_padded=cu_seqlens_kv_padded,
                **shared,
            )
            hidden_states = self._joined(made, bias, normed[0] if normed else hidden_states, drops_path=False)
        normalized, made = self.layernorm_mlp(hidden_states)
        residual = normalized if self.residual_normed else hidden_states
        out = self._joined(made, self.layernorm_mlp.last_bias, residual)
        return out if self.layernorm is None else self.layernorm(out)
