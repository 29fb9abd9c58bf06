"""``DotProductAttention``: TransformerEngine's module and its arguments on Foveate's kernels.

Its layouts are not guessed. Queries, keys and values are read by their own strides, so that views of one
packed buffer are neither copied nor taken for something else. Lengths, windows, diagonals, biases and slopes
become one mask function and one score function, on positions within a sequence; sequences padded to one
length and sequences one after another differ only in where the rows lie.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from typing import Any, Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest
from torch.utils.checkpoint import checkpoint

from ._arguments import flag, integer, number, one_of, probability, shown, tensor, warn
from ._flex import flex_attention
from ._masks import Mask, offsets_of
from ._trace import element_of
from ._varlen import varlen

MASK_TYPES = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)
BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")
_FORMATS = ("sbhd", "bshd", "thd")
_SOFTMAXES = ("vanilla", "off-by-one", "learnable")
_Offsets = tuple[Tensor | None, Tensor | None]


def unsupported(where: str, **given: tuple[Any, Any]) -> None:
    """Refuses arguments of TransformerEngine's that are not at the value that means nothing."""
    for name, (value, neutral) in given.items():
        if value is not neutral and (isinstance(value, Tensor) or value != neutral):
            raise NotImplementedError(
                f"foveate.{where} does not support {name}={shown(value)}; leave it at {neutral!r}"
            )


def refuse_fp8(where: str) -> None:
    """Refuses to run inside TransformerEngine's autocast, which asks for FP8 by a recipe."""
    for name in ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8"):
        manager = getattr(sys.modules.get(name), "FP8GlobalStateManager", None)
        if manager is not None and manager.is_fp8_enabled():
            recipe = type(manager.get_fp8_recipe()).__name__
            raise NotImplementedError(
                f"foveate.{where} does not compute in FP8, and {recipe} asks for it: leave its autocast"
            )


class Stateless(torch.nn.Module):
    """A module whose state dict has TransformerEngine's place for FP8's scales, empty as without FP8."""

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        if state is not None and not (isinstance(state, Tensor) and state.numel() == 0):
            warn(f"foveate.{type(self).__name__} computes without FP8: the checkpoint's scales are left out")

    def _load_from_state_dict(
        self, state: Any, prefix: str, metadata: Any, strict: bool, missing: Any, *rest: Any
    ) -> None:
        super()._load_from_state_dict(state, prefix, metadata, strict, missing, *rest)
        # A checkpoint without FP8's place is complete.
        extra = prefix + "_extra_state"
        if extra in missing:
            missing.remove(extra)


def mask_type_of(name: str) -> str:
    """One of :data:`MASK_TYPES`, whose words may be joined with commas.

    Raises:
        ValueError: There is no such type.
    """
    if not isinstance(name, str):
        raise TypeError(f"attn_mask_type must be a str, got {shown(name)}")
    joined = name.replace(",", "_")
    joined = "padding_causal" if joined == "causal_padding" else joined
    if joined not in MASK_TYPES:
        raise ValueError(f"attn_mask_type {name!r} is not one of {', '.join(MASK_TYPES)}")
    return joined


def window_of(mask_type: str, window: tuple[int, int] | None) -> tuple[int, int]:
    """The window that a mask type allows: keys from ``left`` before the diagonal to ``right`` after it, -1 for all.

    Raises:
        ValueError: The window is none that TransformerEngine takes.
    """
    if window is not None and (not isinstance(window, (tuple, list)) or len(window) != 2):
        raise TypeError(f"window_size must be two integers, got {shown(window)}")
    left, right = (-1, -1) if window is None else (integer("window_size", n) for n in window)
    if left < -1 or right < -1:
        raise ValueError(f"window_size {window} has a side below -1, which is all keys on that side")
    if "causal" in mask_type:
        if window is not None and right > 0:
            warn(f"window_size {window} ends at the diagonal for attn_mask_type {mask_type!r}")
        return left, 0
    if window is not None and (left < 0) != (right < 0):
        if (left, right) != (-1, 0):
            raise ValueError(f"window_size {window} for attn_mask_type {mask_type!r} needs both sides, or (-1, -1)")
        warn(f"window_size {window} is taken for (-1, -1) for attn_mask_type {mask_type!r}")
        return -1, -1
    return left, right


def alibi_slopes_of(heads: int) -> Tensor:
    """ALiBi's slopes for a number of heads, f32: powers of ``2**(-8/n)``, ``n`` the power of two up to ``heads``,
    and for the heads that are left over every other power of its root."""
    n = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8.0 / n * i) for i in range(1, n + 1)]
    slopes += [2.0 ** (-4.0 / n * i) for i in range(1, 1 + 2 * (heads - n), 2)]
    return torch.tensor(slopes)


class DotProductAttention(Stateless):
    """Attention with the arguments of ``transformer_engine.pytorch.DotProductAttention``.

    Args:
        num_attention_heads: Query heads.
        kv_channels: Size of a head, or of a query and key head and of a value head.
        num_gqa_groups: Key and value heads; as many as query heads when it is None.
        attention_dropout: Probability to drop a weight in training.
        qkv_format: ``"sbhd"``, ``"bshd"`` (sequences of one length, or padded to it) or ``"thd"`` (sequences one
            after another): the order of axes. How tensors lie in memory is read from their strides.
        attn_mask_type: ``no_mask``, ``causal``, ``causal_bottom_right``, each of them with ``padding``, or
            ``arbitrary``.
        window_size: Keys from ``left`` before to ``right`` after the diagonal, both included; -1 is all.
        bottom_right_diagonal: Whether windows and ALiBi count from the last query and the last key. Causal types
            say it themselves; for others it is True when it is None.
        attention_type: ``"self"`` or ``"cross"``: whether ``attention_mask`` is one tensor or two.
        softmax_scale: Factor on scores; ``1/sqrt(head size)`` when it is None.
        softmax_type: ``"vanilla"``, ``"off-by-one"`` (a sink of logit 0) or ``"learnable"`` (a sink for each head,
            the parameter ``softmax_offset [heads]``).
        return_max_logit: Returns the largest score of each head too.
        layer_number, name: Kept.

    Tensor, sequence and context parallelism are not supported.

    Raises:
        ValueError: Numbers of heads, a type or a window that there is not.
        NotImplementedError: An argument that is not supported, by its name.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        unsupported(
            "DotProductAttention",
            sequence_parallel=(sequence_parallel, False),
            tp_size=(tp_size, 1),
            tp_group=(tp_group, None),
            cp_group=(cp_group, None),
            get_rng_state_tracker=(get_rng_state_tracker, None),
        )
        del cp_global_ranks, cp_stream, cp_comm_type
        integer("num_attention_heads", num_attention_heads, 1)
        groups = num_attention_heads if num_gqa_groups is None else integer("num_gqa_groups", num_gqa_groups)
        if groups < 1 or num_attention_heads % groups:
            raise ValueError(f"num_gqa_groups must divide num_attention_heads, got {groups} and {num_attention_heads}")
        for what, value, known in (
            ("qkv_format", qkv_format, _FORMATS),
            ("attention_type", attention_type, ("self", "cross")),
            ("softmax_type", softmax_type, _SOFTMAXES),
        ):
            one_of(what, value, known)
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads, groups
        sizes = kv_channels if isinstance(kv_channels, (tuple, list)) else (kv_channels, kv_channels)
        if len(sizes) != 2:
            raise ValueError(f"kv_channels must be a size, or two of keys and values, got {shown(kv_channels)}")
        self.head_sizes = (integer("kv_channels", sizes[0], 1), integer("kv_channels", sizes[1], 1))
        self.attention_dropout = probability("attention_dropout", attention_dropout)
        self.qkv_format, self.attention_type = qkv_format, attention_type
        self.attn_mask_type = mask_type_of(attn_mask_type)
        window_of(self.attn_mask_type, window_size)
        self.window_size = window_size
        self.bottom_right_diagonal = bottom_right_diagonal
        self.softmax_scale = (
            1 / math.sqrt(self.head_sizes[0]) if softmax_scale is None else number("softmax_scale", softmax_scale)
        )
        self.softmax_type, self.return_max_logit = softmax_type, return_max_logit
        self.layer_number = 1 if layer_number is None else layer_number
        self.name = name
        if softmax_type == "learnable":
            self.softmax_offset: Tensor | None = torch.nn.Parameter(torch.zeros(num_attention_heads))
        else:
            zero = torch.zeros(num_attention_heads) if softmax_type == "off-by-one" else None
            self.register_buffer("softmax_offset", zero, persistent=False)

    def forward(
        self,
        query_layer: Tensor | None = None,
        key_layer: Tensor | None = None,
        value_layer: Tensor | None = None,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        bf16_backward: bool | None = False,
        num_splits: int | None = 1,
        score_mod: Any = None,
        score_mod_bprop: Any = None,
        score_mod_tensors: Any = None,
        score_mod_bprop_tensors: Any = None,
        qkv_layer: Tensor | None = None,
        kv_layer: Tensor | None = None,
        qkv_interleave_dim: int = -3,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention.

        Args:
            query_layer: ``[s, b, h, d]``, ``[b, s, h, d]`` or ``[t, h, d]``, of any strides.
            key_layer, value_layer: The same with their own lengths, heads and sizes.
            attention_mask: True where it masks out. With a padding type ``[b, 1, 1, s]``, for cross attention one of
                queries and one of keys; with ``arbitrary`` broadcastable to ``[b, h, sq, skv]``. Else it is not read.
            cu_seqlens_q, cu_seqlens_kv: ``[b + 1]``, sums of the sequences' lengths, with a padding type. The host
                reads them in each call, so on CUDA it waits for the device.
            cu_seqlens_q_padded, cu_seqlens_kv_padded: ``[b + 1]``, where sequences begin in ``thd``, if there are rows
                between them that are none.
            core_attention_bias_type: ``"no_bias"``, ``"pre_scale_bias"`` (added before the factor on scores),
                ``"post_scale_bias"`` or ``"alibi"``.
            core_attention_bias: Broadcastable to ``[b, h, sq, skv]``; it gets its gradient.
            alibi_slopes: ``[h]`` or ``[b, h]``, f32; the usual ones when it is None.
            checkpoint_core_attention: Computes the forward again in the backward. It saves ``out`` and ``lse`` only.
            qkv_layer: Queries, keys and values in one buffer, an axis of 3 at ``qkv_interleave_dim`` (-3 or -2),
                in place of the three; its gradient is one buffer too.
            kv_layer: Keys and values in one buffer, an axis of 2.
            max_seqlen_q, max_seqlen_kv, fast_zero_fill, pad_between_seqs, num_splits: Not needed.

        Returns:
            ``[s, b, h * dv]``, ``[b, s, h * dv]`` or ``[t, h * dv]``, contiguous; with ``return_max_logit`` also
            ``[h]``. Padding queries give 0.

        Raises:
            ValueError: Shapes, types or lengths do not fit each other.
            NotImplementedError: An argument that is not supported, or FP8, by its name.
        """
        where = "DotProductAttention"
        refuse_fp8(where)
        unsupported(
            where,
            inference_params=(inference_params, None),
            fp8_output=(fp8_output or False, False),
            bf16_backward=(bf16_backward or False, False),
            score_mod=(score_mod, None),
            score_mod_bprop=(score_mod_bprop, None),
            score_mod_tensors=(score_mod_tensors, None),
            score_mod_bprop_tensors=(score_mod_bprop_tensors, None),
        )
        del max_seqlen_q, max_seqlen_kv, fast_zero_fill, pad_between_seqs, num_splits
        form = self.qkv_format if qkv_format is None else qkv_format
        if form not in _FORMATS:
            raise ValueError(f"qkv_format {shown(form)} is not one of {', '.join(_FORMATS)}")
        q, k, v = self._operands(form, query_layer, key_layer, value_layer, qkv_layer, kv_layer, qkv_interleave_dim)
        kind, window, at_end = self._kind(attn_mask_type, window_size, bottom_right_diagonal)
        offsets, padded_offsets = (cu_seqlens_q, cu_seqlens_kv), (cu_seqlens_q_padded, cu_seqlens_kv_padded)
        lengths, parts, starts = self._sequences(form, kind, q, k, attention_mask, offsets, padded_offsets)
        diagonal = _diagonal(lengths if at_end else None)
        between = starts is not None and bool(parts)
        parts += [] if window == (-1, -1) else [_within(window, diagonal)]
        mask = functools.reduce(operator.and_, map(Mask, parts)) if parts else None
        sequences = q.size(0) if starts is None else lengths[0].numel()
        # The host does not ask for the longest of sequences one after another.
        extents = (sequences, q.size(1), None if starts else q.size(2), None if starts else k.size(2))
        score = self._score(core_attention_bias_type, core_attention_bias, alibi_slopes, diagonal, extents)

        scale, wanted = self.softmax_scale, AuxRequest(max_scores=bool(self.return_max_logit))
        more: Any = dict(sink=self.softmax_offset, dropout_p=self.attention_dropout if self.training else 0.0)

        def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, AuxOutput]:
            if starts is None:
                return flex_attention(q, k, v, score, mask, scale, True, return_aux=wanted, **more)
            q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
            if not between:
                return varlen(q, k, v, *starts, None, None, score, mask, scale, return_aux=wanted, **more)
            # What lies between sequences may be no number, and 0 times that would reach gradients.
            kept = [_inside(length, at, t.size(0)) for length, at, t in zip(lengths, starts, (q, k))]
            inside = [at[:, None, None] for at in (kept[0], kept[1], kept[1])]
            q, k, v = (torch.where(at, t, 0) for t, at in zip((q, k, v), inside))
            out, aux = varlen(q, k, v, *starts, None, None, score, mask, scale, return_aux=wanted, **more)
            return torch.where(inside[0], out, 0), aux

        results: tuple[Tensor, AuxOutput]
        again = flag("checkpoint_core_attention", checkpoint_core_attention)
        results = checkpoint(run, q, k, v, use_reentrant=False) if again else run(q, k, v)
        return _in_form(form, *results)

    def _kind(
        self, name: str | None, window: tuple[int, int] | None, at_end: bool | None
    ) -> tuple[str, tuple[int, int], bool]:
        """The type of mask, its window, and whether its diagonal ends at the last query and the last key."""
        kind = self.attn_mask_type if name is None else mask_type_of(name)
        window = window_of(kind, self.window_size if window is None else window)
        if kind in ("causal", "padding_causal"):
            return kind, window, False
        asked = self.bottom_right_diagonal if at_end is None else at_end
        return kind, window, asked is None or asked or kind.endswith("bottom_right")

    def _sequences(
        self, form: str, kind: str, q: Tensor, k: Tensor, attention_mask: Any, cu: _Offsets, padded: _Offsets
    ) -> tuple[Any, list[Callable[..., Any]], tuple[Tensor, Tensor] | None]:
        """Lengths of the sequences of queries and keys, masks that keep to them or are given, and in ``thd`` where the
        sequences begin."""
        (cu_q, cu_kv), rows = cu, (q.size(2), k.size(2))
        if form == "thd":
            if "padding" not in kind:
                raise ValueError(f"qkv_format 'thd' needs a padding attn_mask_type, got {kind!r}")
            if cu_q is None or cu_kv is None:
                raise ValueError("qkv_format 'thd' needs cu_seqlens_q and cu_seqlens_kv")
            lengths = (_lengths("cu_seqlens_q", cu_q), _lengths("cu_seqlens_kv", cu_kv))
            starts = (cu_q if padded[0] is None else padded[0], cu_kv if padded[1] is None else padded[1])
            if padded[0] is None and padded[1] is None:
                return lengths, [], starts
            for what, length, at in zip(("q", "kv"), lengths, starts):
                room = _lengths(f"cu_seqlens_{what}_padded", at)
                if room.shape != length.shape or bool((room < length).any()):
                    raise ValueError(f"cu_seqlens_{what}_padded leaves a sequence of cu_seqlens_{what} no room")
            return lengths, [_shorter(*lengths)], starts
        if "padding" in kind and cu_q is not None and cu_kv is not None:
            lengths = (_lengths("cu_seqlens_q", cu_q), _lengths("cu_seqlens_kv", cu_kv))
            for what, length, most in zip(("q", "kv"), lengths, rows):
                if length.numel() != q.size(0) or bool((length > most).any()):
                    raise ValueError(
                        f"cu_seqlens_{what} must have {q.size(0)} lengths of at most {most}, got {length.tolist()[:8]}"
                    )
            return lengths, [_shorter(*lengths)], None
        if "padding" in kind:
            out_q, out_kv = self._padding(attention_mask, q, k)
            lengths = ((~out_q).sum(-1), (~out_kv).sum(-1))
            return lengths, [lambda b, h, i, j: ~(out_q[b, i] | out_kv[b, j])], None
        if kind == "arbitrary":
            masked_out = element_of(self._arbitrary(attention_mask, (q.size(0), q.size(1), *rows)))
            return rows, [lambda *point: ~masked_out(*point)], None
        return rows, [], None

    def _operands(
        self, form: str, q: Any, k: Any, v: Any, qkv: Tensor | None, kv: Tensor | None, at: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as ``[b, h, s, d]``, all views."""
        given = [
            name for name, t in (("query", q), ("key", k), ("value", v), ("kv", kv), ("qkv", qkv)) if t is not None
        ]
        wanted = {("query", "key", "value"), ("query", "kv"), ("qkv",)}
        if tuple(given) not in wanted:
            raise ValueError(
                f"query_layer, key_layer and value_layer, or query_layer and kv_layer, or qkv_layer: got {given}"
            )
        if at not in (-3, -2):
            raise ValueError(f"qkv_interleave_dim must be -3 or -2, got {at}")
        for what, packed, n in (("qkv_layer", qkv, 3), ("kv_layer", kv, 2)):
            if packed is not None and (tensor(what, packed).dim() != len(form) + 1 or packed.size(at) != n):
                raise ValueError(f"{what} must have {len(form) + 1} axes, {n} at {at}, got {tuple(packed.shape)}")
        if qkv is not None:
            q, k, v = qkv.unbind(at)
        elif kv is not None:
            k, v = kv.unbind(at)
        sizes = zip(
            ("query", "key", "value"),
            (q, k, v),
            (self.num_attention_heads, self.num_gqa_groups, self.num_gqa_groups),
            (self.head_sizes[0], *self.head_sizes),
        )
        for what, t, heads, size in sizes:
            if tensor(f"{what}_layer", t).dim() != len(form) or tuple(t.shape[-2:]) != (heads, size):
                axes = ", ".join([*form[:-2], str(heads), str(size)])
                raise ValueError(f"{what}_layer must be [{axes}], got {list(t.shape)}")
        order = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3)}.get(form)
        if order is None:
            q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
            return q, k, v
        return q.permute(order), k.permute(order), v.permute(order)

    def _padding(self, mask: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Which queries and keys are padding, ``[b, s]`` each."""
        if mask is None:
            raise ValueError("a padding attn_mask_type needs attention_mask, or cu_seqlens_q and cu_seqlens_kv")
        both = tuple(mask) if isinstance(mask, (tuple, list)) else (mask, mask)
        if len(both) != 2 or not all(isinstance(m, Tensor) for m in both):
            raise TypeError(
                f"attention_mask must be a bool tensor, or one of queries and one of keys, got {shown(mask)}"
            )
        wanted = ((q.size(0), 1, 1, q.size(2)), (q.size(0), 1, 1, k.size(2)))
        shapes = tuple(tuple(m.shape) for m in both)
        if shapes != wanted or any(m.dtype != torch.bool for m in both):
            raise ValueError(f"attention_mask must be bool of shapes {wanted[0]} and {wanted[1]}, got {shapes}")
        return both[0][:, 0, 0], both[1][:, 0, 0]

    def _arbitrary(self, mask: Any, extents: tuple[int, ...]) -> Tensor:
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            raise ValueError(f"attn_mask_type 'arbitrary' needs a bool attention_mask, got {shown(mask)}")
        _check_broadcast("attention_mask", mask, extents)
        return mask

    def _score(
        self,
        kind: str,
        bias: Tensor | None,
        slopes: Tensor | None,
        diagonal: Callable[..., Any],
        extents: tuple[int | None, ...],
    ) -> Callable[..., Any] | None:
        one_of("core_attention_bias_type", kind, BIAS_TYPES)
        if (bias is None) != (kind in ("no_bias", "alibi")):
            raise ValueError(
                f"core_attention_bias_type {kind!r} and core_attention_bias {'None' if bias is None else 'given'}"
            )
        if slopes is not None and kind != "alibi":
            raise ValueError(f"alibi_slopes are given, and core_attention_bias_type is {kind!r}")
        if kind == "alibi":
            slopes = alibi_slopes_of(self.num_attention_heads) if slopes is None else slopes
            if tensor("alibi_slopes", slopes).dim() not in (1, 2) or slopes.size(-1) != self.num_attention_heads:
                raise ValueError(
                    f"alibi_slopes must be [h] or [b, h] of {self.num_attention_heads} heads, got {list(slopes.shape)}"
                )
            if slopes.dim() == 2 and slopes.size(0) not in (1, extents[0]):
                raise ValueError(f"alibi_slopes are of {slopes.size(0)} sequences, and there are {extents[0]}")
            slope = element_of(slopes.reshape(-1, self.num_attention_heads, 1, 1))
            return lambda score, b, h, i, j: score - slope(b, h, i, j) * abs(diagonal(b, i, j))
        if bias is None:
            return None
        _check_broadcast("core_attention_bias", tensor("core_attention_bias", bias), extents)
        at = element_of(bias)
        if kind == "post_scale_bias":
            return lambda score, *point: score + at(*point)
        scale = self.softmax_scale
        return lambda score, *point: score + at(*point) * scale


def _in_form(form: str, out: Tensor, aux: AuxOutput) -> Tensor | tuple[Tensor, Tensor]:
    """Results with the axes of ``form``, heads side by side."""
    if form != "thd":
        out = out.permute((2, 0, 1, 3) if form == "sbhd" else (0, 2, 1, 3))
    out = out.flatten(-2).contiguous()
    if aux.max_scores is None:
        return out
    return out, aux.max_scores.amax(-1) if form == "thd" else aux.max_scores.amax((0, 2))


def _check_broadcast(what: str, t: Tensor, extents: tuple[int | None, ...]) -> None:
    """Raises where a tensor has more axes than four, or one of another length than 1 and that which is known of it."""
    fits = t.dim() <= 4 and all(b is None or a in (1, b) for a, b in zip(reversed(t.shape), reversed(extents)))
    if not fits:
        known = ", ".join("any" if n is None else str(n) for n in extents)
        raise ValueError(f"{what} must be broadcastable to [{known}], got {list(t.shape)}")


def _lengths(what: str, cu: Tensor) -> Tensor:
    offsets_of(what, cu)
    return cu.diff()


def _shorter(q_lengths: Tensor, kv_lengths: Tensor) -> Callable[..., Any]:
    return lambda b, h, i, j: (i < q_lengths[b]) & (j < kv_lengths[b])


def _inside(lengths: Tensor, starts: Tensor, rows: int) -> Tensor:
    """Which of ``rows`` rows are of a sequence, bool ``[rows]``; the others lie between sequences or behind them."""
    row = torch.arange(rows, device=starts.device)
    sequence = (torch.searchsorted(starts, row, right=True) - 1).clamp(0, lengths.numel() - 1)
    place = row - starts[sequence]
    return (place >= 0) & (place < lengths[sequence])


def _diagonal(lengths: tuple[Any, Any] | None) -> Callable[..., Any]:
    """How far a key lies before the query, counted from the first of both, or from the last where ``lengths``
    are given: numbers, or tensors of a number for each sequence."""
    if lengths is None:
        return lambda b, i, j: i - j
    q, kv = lengths
    if isinstance(q, Tensor):
        later = kv - q
        return lambda b, i, j: i - j + later[b]
    shift = kv - q
    return lambda b, i, j: i - j + shift


def _within(window: tuple[int, int], diagonal: Callable[..., Any]) -> Callable[..., Any]:
    left, right = window

    def within(b: Any, h: Any, i: Any, j: Any) -> Any:
        before = diagonal(b, i, j)
        if left < 0:
            return before >= -right
        if right < 0:
            return before <= left
        return (before <= left) & (before >= -right)

    return within
