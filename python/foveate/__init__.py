"""Foveate: programmable attention for training transformers.

:func:`flex_attention` and :func:`create_block_mask` have the names, arguments, results and errors of
``torch.nn.attention.flex_attention``, so one import is what changes::

    from foveate import flex_attention, create_block_mask

Masks and scores are ordinary functions. They are read as they are in each call, and run in fused kernels, forward
and backward, without being compiled first. The manual is ``docs/python.md`` of the repository.
"""

try:
    import torch
except ModuleNotFoundError as missing:
    if missing.name != "torch":
        raise
    raise ImportError("foveate needs PyTorch 2.10 or newer, and there is none: pip install torch") from None

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 10):
    raise ImportError(f"foveate needs PyTorch 2.10 or newer, and this is {torch.__version__}: pip install -U torch")

from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    and_masks,
    noop_mask,
    or_masks,
)

from . import _ops, huggingface, sdpa, torchtitan, torchtune, xla
from ._blocks import create_block_mask, create_mask
from ._dot_product import DotProductAttention
from ._enable import disable, enable
from ._flex import explain, flex_attention, prepare
from ._masks import Mask
from ._native import VERSION as __version__
from ._native import TraceError
from ._multihead import MultiheadAttention
from ._paged import paged
from ._transformer import TransformerLayer
from ._varlen import varlen

__all__ = [
    "__version__",
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "DotProductAttention",
    "Mask",
    "MultiheadAttention",
    "TraceError",
    "TransformerLayer",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "disable",
    "enable",
    "explain",
    "flex_attention",
    "huggingface",
    "noop_mask",
    "or_masks",
    "paged",
    "prepare",
    "sdpa",
    "torchtitan",
    "torchtune",
    "varlen",
    "xla",
]
