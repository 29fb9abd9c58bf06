"""What :func:`foveate.flex_attention` and its relatives check of their arguments before anything is traced."""

from __future__ import annotations

import logging
import math
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import flex_attention as _torch_flex
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

from . import _native
from ._arguments import flag, number, probability, shown, tensor, unwrapped, warn

_log = logging.getLogger("foveate")
_BACKENDS = ("AUTO", "TRITON", "FLASH", "TRITON_DECODE")
#: What the engine computes with; float64 takes plain operations of torch.
_FUSED = (torch.float32, torch.bfloat16, torch.float16)
_said: set[str] = set()
#: Of every device, in a third of the time that asking for one takes.
_any_autocast = torch._C._is_any_autocast_enabled


def autocasts(query: Tensor) -> bool:
    """Whether autocast is on for the device of the queries."""
    if not _any_autocast():
        return False
    if torch.is_autocast_enabled("cpu"):
        return bool(query.device.type == "cpu")
    return torch.is_autocast_enabled("cuda") and bool(query.is_cuda)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """q, k and v, and nothing else, in the dtype of the autocast that is on."""
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(t.to(dtype) if t.dtype in _FUSED else t for t in tensors)


def check_operands(query: Tensor, key: Tensor, value: Tensor, block_mask: Any, enable_gqa: bool) -> None:
    """Raises what torch raises for operands that do not fit each other."""
    for name, given in (("query", query), ("key", key), ("value", value)):
        tensor(name, given)
    flag("enable_gqa", enable_gqa)
    if query.device != key.device or query.device != value.device:
        raise ValueError(
            "Expected query, key, and value to have the same device type, but got query.device: "
            f"{query.device}, key.device: {key.device}, and value.device: {value.device} instead."
        )
    if query.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(
            f"foveate.flex_attention computes on CPU and CUDA tensors, got tensors on {query.device}; call "
            "torch.nn.attention.flex_attention for these"
        )
    for name, given in (("query", query), ("key", key), ("value", value)):
        if not given.dtype.is_floating_point:
            raise ValueError(f"Expected {name} to be a float tensor, got {name}.dtype: {given.dtype}")
        if given.layout == torch.jagged:
            raise ValueError(f"{name} is a nested tensor, of the layout that foveate.varlen takes: [n, j, heads, dim]")
        if given.layout != torch.strided:
            raise ValueError(
                f"{name} must be a dense tensor, got {name}.layout: {given.layout}; {name}.to_dense() is one"
            )
    if query.dtype not in (*_FUSED, torch.float64):
        raise ValueError(f"query must be float32, bfloat16, float16 or float64, got query.dtype: {query.dtype}")
    if query.dim() < 2 or key.dim() < 2 or value.dim() < 2:
        raise ValueError(
            "Expected query, key, and value to all be  at least 2 dimensional, but got query.dim: "
            f"{query.dim()}, key.dim: {key.dim()} and value.dim: {value.dim()} instead."
        )
    if query.size(-1) != key.size(-1):
        raise ValueError(
            "Expect query and key/value to have the same embedding dimension but got "
            f"E={query.size(-1)} and E={key.size(-1)}."
        )
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        raise NotImplementedError("NYI: query, key, and value must be 4D tensors")
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(
            "Expect key and value to have the same batch size, heads and length but got "
            f"{tuple(key.shape[:3])} and {tuple(value.shape[:3])}."
        )
    heads, kv_heads = query.size(1), key.size(1)
    if not enable_gqa and heads != kv_heads:
        raise ValueError(
            "Expect query and key/value to have the same number of heads but got "
            f"Hq={heads} and Hkv={kv_heads}. Try setting enable_gqa=True for GQA."
        )
    if enable_gqa and (kv_heads == 0 or heads % kv_heads != 0):
        raise ValueError(
            "Expect number of query heads to be a multiple of kv heads for GQA but got "
            f"Hq={heads} and Hkv={kv_heads}."
        )
    if query.size(0) != key.size(0):
        if block_mask is None:
            raise ValueError(
                "Expect query and key/value to have the same batch size, or non-none block_mask, but got "
                f"block_mask=None, Bq={query.size(0)}, and Bkv={key.size(0)}."
            )
        if isinstance(block_mask, BlockMask) and block_mask.kv_num_blocks.size(0) != query.size(0):
            raise ValueError(
                "Expect query and key/value to have the same batch size, or block_mask and query to have the "
                f"same batch size, but got Bq={query.size(0)}, Bkv={key.size(0)}, "
                f"B_block_mask={block_mask.kv_num_blocks.size(0)}."
            )
        if key.size(0) != 1:
            raise RuntimeError(f"Bq and Bkv must broadcast. Got Bq={query.size(0)} and Bkv={key.size(0)}")


def check_aux(return_aux: Any) -> None:
    if not isinstance(return_aux, AuxRequest):
        raise TypeError(f"return_aux must be an AuxRequest, got {shown(return_aux)}; AuxRequest(lse=True) asks for lse")


def check_options(options: dict[str, Any] | None) -> None:
    """Options for Triton change nothing here; there are none of ours."""
    if options is None:
        return
    if not isinstance(options, dict):
        raise TypeError(f"kernel_options must be a dict of options, got {shown(options)}")
    if not isinstance(options.get("foveate", {}), dict):
        raise TypeError(f"kernel_options['foveate'] must be a dict of options, got {shown(options['foveate'])}")
    if "BACKEND" in options:
        if options.get("FORCE_USE_FLEX_ATTENTION", False):
            raise RuntimeError(
                "BACKEND cannot be combined with legacy FORCE_USE_FLEX_ATTENTION. BACKEND supersedes the legacy "
                "knob; please drop FORCE_USE_FLEX_ATTENTION and only specify the desired BACKEND."
            )
        if options["BACKEND"] not in _BACKENDS:
            raise ValueError(f"Invalid BACKEND value '{options['BACKEND']}'. Must be one of {_BACKENDS}")
    for name in options.get("foveate", {}):
        raise ValueError(
            f"kernel_options['foveate'] has no option {name!r}; it has none, kernels are chosen by the problem"
        )
    # A compiled function that logs would break its graph.
    if set(options) - {"foveate"} and "kernel_options" not in _said and not torch.compiler.is_compiling():
        _said.add("kernel_options")
        ignored = sorted(map(str, set(options) - {"foveate"}))
        _log.info("kernel_options for Triton change nothing: %s", ", ".join(ignored))


def check_return_lse(return_aux: AuxRequest | None) -> None:
    if return_aux is not None:
        raise ValueError(
            "Cannot specify both return_lse and return_aux. return_lse is deprecated, please use "
            "return_aux=AuxRequest(lse=True) instead."
        )
    # Torch's function has said so too, and code that wants to hear it again clears torch's list.
    shown = getattr(_torch_flex, "_WARNINGS_SHOWN", _said)
    if "deprecated_return_lse" not in shown:
        shown.add("deprecated_return_lse")
        warn("return_lse is deprecated. Please use return_aux=AuxRequest(lse=True) instead.", FutureWarning)


def checked_scale(scale: float) -> float:
    scale = number("scale", scale)
    if not abs(scale) < math.inf:
        raise ValueError(f"scale must be a finite number, got {scale}")
    return scale


def dropout_of(p: float, query: Tensor, drawn: bool = True) -> tuple[float, Any] | None:
    """The probability, and a seed from torch's generator of the query's device; None where it is 0. What is ``drawn``
    is as plans take it, on the CPU a number; else it is a tensor."""
    p = probability("dropout_p", p)
    if p == 0.0:
        return None
    seed = torch.randint(2**63 - 1, (1,) if query.is_cuda else (), device=query.device)
    if torch._C._functorch.is_functorch_wrapped_tensor(seed):
        if torch._C._functorch.is_batchedtensor(seed):
            raise ValueError("dropout_p in torch.vmap takes randomness='same': all entries of the batch share a seed")
        seed = unwrapped("the seed of dropout", seed)
    if not drawn:
        return p, seed
    return p, seed.view(torch.int32) if query.is_cuda else int(seed)


def refuse_gradients(query: torch.dtype, key: torch.dtype, value: torch.dtype) -> None:
    """Raises torch's error where gradients of operands of several dtypes are wanted."""
    if not query == key == value:
        raise ValueError(
            "Backward pass with mixed query, key, and value dtype is not supported, got "
            f"query.dtype={query}, key.dtype={key}, and value.dtype={value}"
        )


def refuse_tangents(*tensors: Tensor | None) -> None:
    """Raises where a derivative in forward mode is wanted by one of the tensors: gradients here have a backward
    alone."""
    if forward_ad._current_level < 0:
        return
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        no_tangents()


def no_tangents() -> NoReturn:
    """What is said of a derivative in forward mode."""
    raise NotImplementedError(
        "foveate has no derivative in forward mode (jvp) for this dtype, as `torch.func.jvp`, `jacfwd` and `hessian` "
        "ask for: take `vjp` or `jacrev`, or float64 tensors of flex_attention, which have one"
    )


def refuse_batches(*gradients: Tensor | None) -> None:
    """Raises where gradients are batches of PyTorch's older vmap, which knows no rules of an ``autograd.Function``."""
    if any(d is not None and torch._C._functorch.is_legacy_batchedtensor(d) for d in gradients):
        raise NotImplementedError(
            "foveate takes no batch of gradients by `is_grads_batched` or `vectorize=True`: call `torch.vmap` on what "
            "`torch.func.vjp` returns, or `torch.func.jacrev`"
        )


class _Converted(torch.autograd.Function):
    """Keys and values in the dtype of the queries; the backward is torch's error."""

    generate_vmap_rule = True

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return query.view_as(query), key.to(query.dtype), value.to(query.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Any) -> None:
        ctx.dtypes = [t.dtype for t in inputs]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        refuse_gradients(*ctx.dtypes)


def of_one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values in the dtype of the queries, which they need not have but for a backward."""
    if query.dtype == key.dtype == value.dtype:
        return query, key, value
    converted: tuple[Tensor, Tensor, Tensor] = _Converted.apply(query, key, value)  # type: ignore[no-untyped-call]
    return converted


def sink_of(sink: Tensor, query: Tensor) -> Tensor:
    """The sink in float32, or float64 as the operands; its gradient finds the way back by itself."""
    if not isinstance(sink, Tensor) or not sink.dtype.is_floating_point or sink.device != query.device:
        raise ValueError(f"sink must be a float tensor on {query.device}, got {shown(sink)}")
    if sink.shape != query.shape[1:2]:
        raise ValueError(f"sink must have a logit for each of {query.size(1)} query heads, got {tuple(sink.shape)}")
    return sink.to(torch.promote_types(query.dtype, torch.float32)).resolve_neg().contiguous()


def joined(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """``out`` and ``lse`` of attention with the logit of each head among those of its keys."""
    logit = sink[:, None]
    return (out * torch.sigmoid(lse - logit)[..., None]).to(out.dtype), torch.logaddexp(lse, logit)


def of_sequences(lse: Tensor, offsets: Tensor) -> Tensor:
    """``lse [1, H, T]`` beside a sink: rows past the last sequence have no sink either."""
    return torch.where(torch.arange(lse.size(2), device=lse.device) < offsets[-1], lse, -math.inf)


def no_gradient_of_pages() -> NoReturn:
    """What is said of a gradient of :func:`foveate.paged`."""
    raise RuntimeError("foveate.paged has no gradient; gather the keys and call foveate.flex_attention for one")


def heads_first(rows: Tensor) -> Tensor:
    """Rows ``[T, H, D]`` as ``[1, H, T, D]``."""
    return rows.transpose(0, 1).unsqueeze(0)


def rows(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows ``[T, H, D]`` as attention takes them.

    Raises:
        ValueError: They are none, or do not fit each other.
    """
    for name, given in (("query", query), ("key", key), ("value", value)):
        if not isinstance(given, Tensor) or given.dim() != 3:
            raise ValueError(f"{name} must be a tensor [rows, heads, dim], got {shown(given)}")
    if autocasts(query):
        query, key, value = autocast(query, key, value)
    if not torch.compiler.is_compiling() and _native.rows_fit(query, key, value):
        return query, key, value
    check_operands(heads_first(query), heads_first(key), heads_first(value), None, enable_gqa=True)
    if len({query.dtype, key.dtype, value.dtype}) != 1 or query.dtype == torch.float64:
        dtypes = f"{query.dtype}, {key.dtype} and {value.dtype}"
        raise ValueError(f"query, key and value must have one dtype, float32, bfloat16 or float16, got {dtypes}")
    return query.resolve_neg(), key.resolve_neg(), value.resolve_neg()


def check_pages(query: Tensor, key_pages: Tensor, value_pages: Tensor) -> None:
    """Raises what :func:`foveate.paged` raises for tensors that are no pages of one dtype."""
    for name, tensor in (("query", query), ("key_pages", key_pages), ("value_pages", value_pages)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 4:
            shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else tensor
            raise ValueError(f"{name} must be a tensor of 4 axes, got {shape}")
        if tensor.dtype not in _FUSED or tensor.dtype != query.dtype:
            dtypes = f"{query.dtype}, {key_pages.dtype} and {value_pages.dtype}"
            raise ValueError(
                f"query, key_pages and value_pages must have one dtype, float32, bfloat16 or float16, got {dtypes}"
            )
    if torch.compiler.is_dynamo_compiling():
        # Sizes that change are compared where the operator has them.
        return
    if key_pages.shape[:3] != value_pages.shape[:3]:
        shapes = f"{list(value_pages.shape[:3])} and {list(key_pages.shape[:3])}"
        raise ValueError(f"value_pages and key_pages must have the same pages, heads and page size, got {shapes}")
    if query.size(3) != key_pages.size(3):
        raise ValueError(f"key_pages must have the query's head dim {query.size(3)}, got {key_pages.size(3)}")
