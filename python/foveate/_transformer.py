"""``TransformerLayer``: attention and a feed-forward block with their residuals, by the arguments of
TransformerEngine's and with the names of its parameters, as :class:`MultiheadAttention` has them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._arguments import flag, one_of, probability
from ._dot_product import mask_type_of, unsupported
from ._layers import Feedforward, Init, Norm, normal, where_of
from ._multihead import MultiheadAttention


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

    The others are those of :class:`MultiheadAttention`.

    Raises:
        TypeError: An argument of another type.
        ValueError: Sizes or arguments that do not go together, or a name that there is not.
        NotImplementedError: An argument that is not supported, by its name.
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
            "TransformerLayer",
            ub_tp_comm_overlap=(ub_tp_comm_overlap, False),
            activation_params=(activation_params, None),
        )
        del ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad  # They are parts of it.
        one_of("layer_type", layer_type, ("encoder", "decoder"))
        for what, given in (
            ("parallel_attention_mlp", parallel_attention_mlp),
            ("output_layernorm", output_layernorm),
            ("apply_residual_connection_post_layernorm", apply_residual_connection_post_layernorm),
        ):
            flag(what, given)
        hidden_dropout = probability("hidden_dropout", hidden_dropout)
        drop_path_rate = probability("drop_path_rate", drop_path_rate)
        if parallel_attention_mlp and (
            layer_type == "decoder" or apply_residual_connection_post_layernorm or output_layernorm
        ):
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
        where = where_of(device, params_dtype)
        self.layernorm_mlp = Feedforward(
            hidden_size,
            ffn_hidden_size,
            bias,
            (init_method or normal, output_layer_init_method or normal),
            activation,
            (normalization, layernorm_epsilon, zero_centered_gamma),
            **where,
        )
        self.layernorm = None
        if output_layernorm:
            self.layernorm = Norm(hidden_size, normalization, layernorm_epsilon, zero_centered_gamma, **where)

    def _joined(self, made: Tensor, bias: Tensor | None, residual: Tensor, drops_path: bool = True) -> Tensor:
        made = F.dropout(made if bias is None else made + bias, self.hidden_dropout, self.training)
        if drops_path and self.training and self.drop_path_rate > 0:
            # Whole entries of the first axis, as TransformerEngine drops them.
            shape = made.shape[:1] + (1,) * (made.dim() - 1)
            kept = torch.rand(shape, device=made.device) >= self.drop_path_rate
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
        :meth:`MultiheadAttention.forward`; ``cu_seqlens_kv`` and what begins with ``enc_dec_`` are of cross attention.

        Raises:
            TypeError, ValueError, NotImplementedError: As :meth:`MultiheadAttention.forward`, in self attention and in
                cross attention.
        """
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
            return self._joined(
                made if bias is None else made + bias, inner if last is None else inner + last, hidden_states
            )
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
