"""``MultiheadAttention``: projections, norms of heads and rotary embeddings around :class:`DotProductAttention`, by the
arguments of TransformerEngine's and with the names of its parameters.

State dicts go from one to the other as they are. What TransformerEngine does for several GPUs or in FP8 is
refused by the name of its argument.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._arguments import flag, function, integer, number, one_of
from ._dot_product import DotProductAttention, unsupported
from ._layers import NORMS, Init, Norm, Projection, Unit, check_states, normal, rotated, where_of


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
        where = where_of(device, params_dtype)
        init = function("init_method", init_method) or normal
        init_out = function("output_layer_init_method", output_layer_init_method) or normal
        heads = integer("num_attention_heads", num_attention_heads, 1)
        hidden_size = integer("hidden_size", hidden_size, 1)
        size = hidden_size // heads if kv_channels is None else integer("kv_channels", kv_channels, 1)
        self.heads, self.groups, self.size = heads, heads if num_gqa_groups is None else num_gqa_groups, size
        self.attention_type, self.qkv_format = attention_type, qkv_format
        for what, given in (
            ("input_layernorm", input_layernorm),
            ("fuse_qkv_params", fuse_qkv_params),
            ("qkv_weight_interleaved", qkv_weight_interleaved),
            ("rotary_pos_interleaved", rotary_pos_interleaved),
            ("qk_norm_before_rope", qk_norm_before_rope),
            ("bias", bias),
            ("return_bias", return_bias),
            ("return_layernorm_output", return_layernorm_output),
        ):
            flag(what, given)
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
        setattr(self, self._first, Projection(hidden_size, first, bias, init, apart, norm, **where))
        if attention_type == "cross":
            self.key_value = Projection(hidden_size, keys, bias, init, not fuse_qkv_params, **where)
        self.proj = Projection(size * self.heads, dict(out=hidden_size), bias, init_out, **where)
        self.q_norm, self.k_norm = (self._head_norm(qk_norm_type, qk_norm_eps, where) for _ in range(2))

    def _head_norm(self, kind: str | None, eps: float, where: dict[str, Any]) -> torch.nn.Module | None:
        if kind is None:
            return None
        number("qk_norm_eps", eps)
        if kind == "L2Normalization":
            return Unit(eps)
        one_of("qk_norm_type", kind, ("L2Normalization", *NORMS))
        return Norm(self.size, kind, eps, False, **where)

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

        Raises:
            TypeError: ``hidden_states`` or ``encoder_output`` is no tensor.
            ValueError: Their features, device or dtype do not fit the weights, ``encoder_output`` is missing in cross
                attention, and what :meth:`DotProductAttention.forward` says of the rest.
            NotImplementedError: ``inference_params`` are given.
        """
        unsupported("MultiheadAttention", inference_params=(inference_params, None))
        del is_first_microbatch, fast_zero_fill
        first = getattr(self, self._first)
        check_states("hidden_states", hidden_states, first.weights()[0])
        normed, made = first(hidden_states)
        if self.attention_type == "self":
            q, k, v = self._parts(made)
        else:
            if encoder_output is None:
                raise ValueError("cross attention needs encoder_output")
            check_states("encoder_output", encoder_output, self.key_value.weights()[0])
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
            q, k = (
                rotated(t, a, self.qkv_format, cu, self.rotary_pos_interleaved)
                for t, a, cu in zip((q, k), angles, starts)
            )
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
