"""What CUDA tensors need besides plans: NVIDIA's libraries where the interpreter has them, offsets that stay on the
device."""

from __future__ import annotations

import glob
import os
import sys

import torch
from torch import Tensor

from ._arguments import offsets_vector, shown, unwrapped


def library_folders() -> list[str]:
    """Where the packages of this interpreter keep NVIDIA's libraries; the native module asks before its first call."""
    folders = (
        f
        for entry in sys.path
        if entry
        for f in sorted(glob.glob(os.path.join(glob.escape(entry), "nvidia", "*", "lib")))
    )
    # `cu13` holds all libraries of a version, and is newer than folders of one each.
    return sorted(folders, key=lambda f: not os.path.basename(os.path.dirname(f)).startswith("cu1"))


def offsets(
    cu_q: Tensor, cu_k: Tensor, longest_q: int | None, longest_k: int | None, query: Tensor, key: Tensor
) -> tuple[Tensor, Tensor, int, int]:
    """Offsets of sequences in ``[T, H, D]`` as kernels read them, and at least the rows of the longest.

    Raises:
        ValueError: They are no vectors of as many integers on the query's device.
    """
    made = []
    for name, of in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        offsets_vector(name, of)
        if of.device != query.device:
            raise ValueError(f"{name} must be on {query.device} as the query is, got {of.device}")
        made.append(unwrapped(name, of.to(torch.int32).contiguous()))
    if made[0].size(0) != made[1].size(0):
        raise ValueError(
            f"cu_seqlens_q has {made[0].size(0)} offsets and cu_seqlens_k {made[1].size(0)}; they need as many"
        )
    rows = []
    for name, longest, tensor in (("max_seqlen_q", longest_q, query), ("max_seqlen_k", longest_k, key)):
        if longest is not None and (not isinstance(longest, int) or longest < 0):
            raise ValueError(f"{name} must be a number of rows or None, got {shown(longest)}")
        rows.append(tensor.size(0) if longest is None else min(longest, tensor.size(0)))
    return made[0], made[1], rows[0], rows[1]
