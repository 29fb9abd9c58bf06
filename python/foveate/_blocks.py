"""Block masks: torch's own class, its tables filled without evaluating every pair.

A ``BlockMask`` that is made here is remembered with the tables that it was given, by its identity and
weakly. While it still has these tables, its mask function alone says which pairs count, and the tables
are not read. Of any other ``BlockMask`` (sliced, adjusted, made of lists, made by torch) the lists are
authoritative: ``full | partial & mask_mod``.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import Any, Callable, Iterator, Sequence, cast

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as _torch_flex
from torch.nn.attention.flex_attention import BlockMask

from . import _native, _source, _trace
from ._arguments import device as device_of
from ._arguments import dispatches, flag, integer, shown, unwrapped
from ._compile import also_compiled, register
from ._higher_order import INSTEAD
from ._masks import Mask
from ._native import State
from ._torchs import KNOWS_FULL_BLOCKS, TORCHS

#: Masks that were made here, and the device of those that are of one batch entry and head.
_own: weakref.WeakKeyDictionary[BlockMask, tuple[State, torch.device | None]] = weakref.WeakKeyDictionary()
#: Of lists on the CPU what they make of each tile, for operands of these lengths. Lists on a device may be written
#: to by a graph that is replayed, which no version tells.
_read: weakref.WeakKeyDictionary[BlockMask, tuple[State, tuple[int, int], Tensor]] = weakref.WeakKeyDictionary()

#: Before 2.13 torch has no such order, and its class no place for it.
_torchs_write_order: Any = getattr(_torch_flex, "_compute_dq_write_order_from_block_mask", None)

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _in_region(
    breaking: Callable[..., Any],
    mask_mod: Any,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """:func:`create_block_mask` in a compiled region: torch's own, whose tables attention in the region does not
    read, so that they are made only where the graph uses them otherwise. What torch's does not know breaks the
    graph."""
    if not all(isinstance(n, int) and n >= 0 for n in (B or 0, H or 0, Q_LEN, KV_LEN)):
        _extents(B, H, Q_LEN, KV_LEN)  # Says which is wrong.
    if not isinstance(BLOCK_SIZE, int) or BLOCK_SIZE < 1:
        BLOCK_SIZE = _tile(BLOCK_SIZE)
    if not register():
        given = (mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, _compile, separate_full_blocks)
        return cast(BlockMask, breaking(*given, compute_dq_write_order, dq_kv_order))
    if isinstance(mask_mod, Mask):
        mask_mod._check((B or 1, H or 1, Q_LEN, KV_LEN))
    of = (mask_mod, B, H, Q_LEN, KV_LEN, _placed(device), BLOCK_SIZE)
    more = (separate_full_blocks, compute_dq_write_order, dq_kv_order)
    made: BlockMask
    # A mask has no gradient; attention refuses one that could want it.
    with torch.no_grad():
        if KNOWS_FULL_BLOCKS:
            made = INSTEAD(breaking, TORCHS["create_block_mask"], *of, False, *more)
        elif separate_full_blocks:
            made = INSTEAD(breaking, TORCHS["create_block_mask"], *of)
        else:
            made = breaking(*of, False, *more)
    made._foveate = (mask_mod, made.kv_indices)  # type: ignore[attr-defined]
    return made


@also_compiled(_in_region)
def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """A block mask of ``mask_mod``, as ``torch.nn.attention.flex_attention.create_block_mask`` makes it.

    The tables are the same, bit for bit. They are made from bounds of the traced function for each tile,
    so that neither time nor memory grow with ``Q_LEN * KV_LEN``.

    Args:
        mask_mod: ``mask_mod(b, h, q_idx, kv_idx)`` says whether the query sees the key.
        B: Batch size, or None for one mask for all.
        H: Query heads, or None for one mask for all.
        Q_LEN: Number of queries.
        KV_LEN: Number of keys.
        device: Where the tables lie, a CPU or CUDA device; when it is None, the current CUDA device, or the CPU where
            there is none. On CUDA the device makes them, and nothing waits.
        BLOCK_SIZE: Length of a tile in queries and keys, or a pair of them.
        _compile: Ignored: there is nothing to compile.
        separate_full_blocks: Whether full tiles have lists of their own.
        compute_dq_write_order: Whether the mask gets what torch's own kernels, from 2.13 on, need for a deterministic
            backward, of shape ``[B, H, columns, rows]``: it takes torch's dense table of tiles. Foveate does not read
            it.
        dq_kv_order: The order of key tiles in it: descending, or ascending when it is False.

    Raises:
        TraceError: ``mask_mod`` cannot be traced; the message says what, and where.
    """
    del _compile
    device = _placed(device)
    if not callable(mask_mod):
        raise TypeError(f"create_block_mask requires a mask_mod function! Got {shown(mask_mod)}")
    tile = _tile(BLOCK_SIZE)
    extents = batch, heads, Q_LEN, KV_LEN = _extents(B, H, Q_LEN, KV_LEN)
    separate_full_blocks = flag("separate_full_blocks", separate_full_blocks)
    if not isinstance(dq_kv_order, bool):
        raise ValueError("dq_kv_order must be a bool when using create_block_mask")
    lengths = (Q_LEN, KV_LEN)
    made: BlockMask
    with _counting_writes():
        if device.type == "cuda":
            tables = _tables_on_device(_trace.mask(mask_mod, extents), extents, tile, device, separate_full_blocks)
            made = BlockMask(seq_lengths=lengths, BLOCK_SIZE=tile, mask_mod=mask_mod, **tables)
        else:
            kinds = _kinds(mask_mod, extents, tile, device)
            partial = _listed(kinds == 1 if separate_full_blocks else kinds != 0)
            full: tuple[Tensor | None, Tensor | None] = _listed(kinds == 2) if separate_full_blocks else (None, None)
            made = BlockMask.from_kv_blocks(*partial, *full, tile, mask_mod, lengths)
        if compute_dq_write_order and _torchs_write_order is not None:
            order, full_order = _torchs_write_order(made, dq_kv_order=dq_kv_order)
            more = dict(dq_write_order=order, dq_write_order_full=full_order)
            vars(made).update(more, dq_kv_order=None, dq_kv_order_spt=dq_kv_order)
    _own[made] = State(made), made.kv_num_blocks.device if extents[:2] == (1, 1) else None
    made._foveate = (mask_mod, made.kv_indices)  # type: ignore[attr-defined]
    return made


@contextlib.contextmanager
def _counting_writes() -> Iterator[None]:
    """Tensors that are made inside count what is written to them, as :class:`State` asks, in inference mode too."""
    learns = torch.is_grad_enabled()
    # Leaving inference mode would enable gradients.
    with torch.inference_mode(False), torch.set_grad_enabled(learns):
        yield


def _tile(size: Any) -> tuple[int, int]:
    """Queries and keys of a tile."""
    both = size if isinstance(size, (tuple, list)) else (size, size)
    tile = tuple(integer("BLOCK_SIZE", n) for n in both)
    if len(tile) != 2 or min(tile) < 1:
        raise ValueError(f"BLOCK_SIZE must be a positive integer or two of them, got {shown(size)}")
    return tile


def _device(device: Any) -> torch.device:
    """``device``, or the accelerator if there is one that can be used, else the CPU: torch's default."""
    if device is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    return device_of("device", device)


def _placed(device: Any) -> torch.device:
    """The device of tables."""
    placed = _device(device)
    if placed.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"foveate.create_block_mask makes tables on CPU and CUDA devices, not on {placed}")
    return placed


def _kinds(
    mask_mod: MaskMod, extents: tuple[int, int, int, int], tile: tuple[int, int], device: torch.device
) -> Tensor:
    """What each tile is: 0 empty, 1 partial, 2 full; those that the lengths cut are not full."""
    traced = _trace.mask(mask_mod, extents)
    batch, heads, q_len, kv_len = extents
    if device.type == "cuda":
        return _kinds_on_device(traced, extents, tile, device)
    kinds = torch.empty((batch, heads, -(-q_len // tile[0]), -(-kv_len // tile[1])), dtype=torch.uint8, device=device)
    if dispatches(kinds):  # A fake one has no elements.
        return kinds
    try:
        _native.kinds(traced, extents, tile, unwrapped("a table of tiles", kinds), torch.get_num_threads())
    except IndexError as error:
        raise _source.named(error, traced) from None
    return kinds


def _kinds_on_device(
    traced: _native.Traced, extents: tuple[int, int, int, int], tile: tuple[int, int], device: torch.device
) -> Tensor:
    """:func:`_kinds`, made by the device without the host ever waiting: a graph that is recorded makes them anew."""
    batch, heads, q_len, kv_len = extents
    by_batch, by_head = _native.varies(traced)
    rows, columns = -(-q_len // tile[0]), -(-kv_len // tile[1])
    shape = (heads if by_head else min(heads, 1), batch if by_batch else min(batch, 1), rows)
    if 0 in (*shape, columns):
        return torch.zeros((batch, heads, rows, columns), dtype=torch.uint8, device=device)
    counts = torch.empty(shape, dtype=torch.int32, device=device)
    runs = torch.empty((*shape, columns, 2), dtype=torch.int32, device=device)
    _native.tile_runs(traced, extents, tile, *(unwrapped("a table of tiles", t) for t in (counts, runs)))
    column = torch.arange(columns, dtype=torch.int32, device=device)
    first = runs[..., 0].masked_fill(column >= counts.unsqueeze(-1), columns).contiguous()
    # The run that each tile is in, if it is in one: the last that begins up to it.
    at = torch.searchsorted(first, column.expand(*shape, columns).contiguous(), right=True) - 1
    inside = at >= 0
    at = at.clamp_(min=0)
    count = runs[..., 1].gather(-1, at)
    inside &= column < first.gather(-1, at) + (count >> 1)
    kinds = torch.where(inside, 2 - (count & 1), 0).to(torch.uint8).transpose(0, 1)
    if q_len % tile[0]:
        kinds[..., -1, :].clamp_(max=1)
    if kv_len % tile[1]:
        kinds[..., -1].clamp_(max=1)
    return kinds.expand(batch, heads, rows, columns)


def _tables_on_device(
    traced: _native.Traced, extents: tuple[int, int, int, int], tile: tuple[int, int], device: torch.device, apart: bool
) -> dict[str, Any]:
    """The tables by their names, made by the device without the host ever waiting."""
    batch, heads, q_len, kv_len = extents
    rows, columns = -(-q_len // tile[0]), -(-kv_len // tile[1])
    shapes = {
        "kv_num_blocks": (rows,),
        "kv_indices": (rows, columns),
        "q_num_blocks": (columns,),
        "q_indices": (columns, rows),
    }
    made: dict[str, Any] = {}
    for kind in ("", "full_"):
        for name, shape in shapes.items():
            wanted = apart or not kind
            made[kind + name] = (
                torch.empty((batch, heads, *shape), dtype=torch.int32, device=device) if wanted else None
            )
    if batch and heads and not dispatches(made["kv_indices"]):
        _native.tile_tables(
            traced, extents, tile, [unwrapped("a table of tiles", t) for t in made.values() if t is not None]
        )
    return made


def create_mask(
    mod_fn: Callable[..., Tensor],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
) -> Tensor:
    """The dense mask ``[B, H, Q_LEN, KV_LEN]`` of a mask or score function: torch's own function, and for a
    :class:`Mask` what it says. ``device`` is as in :func:`create_block_mask`.

    Raises:
        TypeError: ``mod_fn`` is no function, or an extent no integer.
        ValueError: An extent is negative.
        TraceError: The text of a :class:`Mask` cannot be read.
    """
    if not callable(mod_fn):
        raise TypeError(f"create_mask requires a mask_mod or score_mod function as mod_fn! Got {shown(mod_fn)}")
    extents = _extents(B, H, Q_LEN, KV_LEN)
    if isinstance(mod_fn, Mask):
        return dense(mod_fn, extents, _device(device))
    return _torch_flex.create_mask(mod_fn, *extents, _device(device))


def _extents(B: int | None, H: int | None, Q_LEN: int, KV_LEN: int) -> tuple[int, int, int, int]:
    """Of b, h, q and kv; None of batch or heads is one for all."""
    named = {"B": 1 if B is None else B, "H": 1 if H is None else H, "Q_LEN": Q_LEN, "KV_LEN": KV_LEN}
    batch, heads, q_len, kv_len = (integer(name, n) for name, n in named.items())
    if min(batch, heads, q_len, kv_len) < 0:
        raise ValueError(f"B, H, Q_LEN and KV_LEN must not be negative, got {(batch, heads, q_len, kv_len)}")
    if max(batch, heads, q_len, kv_len) >= 2**31:
        raise ValueError(f"B, H, Q_LEN and KV_LEN must be below 2**31, got {(batch, heads, q_len, kv_len)}")
    return batch, heads, q_len, kv_len


def dense(mask: Mask, extents: tuple[int, int, int, int], device: torch.device) -> Tensor:
    """A mask at every point."""
    return _kinds(mask, extents, (1, 1), device) == 2


def _listed(live: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers and indices of the live tiles of each row, those of others behind them, as torch lists them."""
    live = live.to(torch.int32)
    indices = torch.argsort(live, dim=-1, descending=True, stable=True)
    return live.sum(dim=-1).to(torch.int32), indices.to(torch.int32, memory_format=torch.contiguous_format)


def lists_of(mask: BlockMask) -> tuple[Any, Any, Any, Any]:
    """Numbers and indices of tiles, and those of full ones or None."""
    return mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices


def is_own(mask: BlockMask) -> bool:
    """Whether a block mask was made here and nothing of it has changed, so that its function alone counts."""
    known = _own.get(mask)
    return known is not None and known[0].holds(mask)


def check_kind(mask: Any) -> None:
    """Raises where a block mask is neither one nor a Mask."""
    if not isinstance(mask, (BlockMask, Mask)):
        raise TypeError(
            f"block_mask must be a BlockMask or a Mask, got {type(mask)}; create_block_mask makes one, and Mask one "
            "of a mask function"
        )


def program_of(mask: BlockMask | Mask, extents: tuple[int, int, int, int], device: torch.device) -> Any:
    """The traced program of a block mask for operands of these extents (b, h, q, kv) on a device."""
    if isinstance(mask, Mask):
        return mask._program(extents)
    kinds = kinds_of(mask, extents, device)
    wrap = None if kinds is None else within(kinds, mask.BLOCK_SIZE)
    return _trace.mask(mask.mask_mod, extents, wrap=wrap)


def kinds_of(mask: BlockMask, extents: tuple[int, int, int, int], device: torch.device) -> Tensor | None:
    """What the lists of a block mask make of each tile: 0 empty, 1 partial, 2 full (uint8, ``[B|1, H|1, rows,
    columns]``); None where its function alone counts."""
    check_kind(mask)
    batch, heads, q_len, kv_len = extents
    known = _own.get(mask)
    if known is not None and not known[0].holds(mask):
        known = None
    if known is not None and known[1] == device and mask.seq_lengths == (q_len, kv_len):
        return None
    check(mask, extents, device)
    if known is not None:
        return None
    read = _read.get(mask)
    if read is not None and read[1] == (q_len, kv_len) and read[0].holds(mask):
        return read[2]
    state = State(mask)
    made = table([t for t in lists_of(mask) if t is not None], mask.BLOCK_SIZE, q_len, kv_len)
    if device.type == "cpu":
        _read[mask] = (state, (q_len, kv_len), made)
    return made


def is_function(mask: BlockMask) -> bool:
    """Whether a block mask was made here and still has its function and indices, so that its function alone counts:
    what :func:`kinds_of` finds, but for writes into its lists, in words that Dynamo traces."""
    made = getattr(mask, "_foveate", None)
    # Dynamo compares no objects of `functools.partial`: of these masks the lists count.
    if made is None or isinstance(mask.mask_mod, functools.partial):
        return False
    return made[0] is mask.mask_mod and made[1] is mask.kv_indices


def check(mask: BlockMask, extents: tuple[int, int, int, int], device: torch.device) -> None:
    """Raises what torch raises for a block mask that does not fit operands of these extents (b, h, q, kv) on a
    device."""
    batch, heads, q_len, kv_len = extents
    if mask.mask_mod is _torch_flex._sliced_mask_mod_error:
        raise RuntimeError("Cannot use mask_mod from a sliced BlockMask")
    large = _torch_flex._LARGE_SPARSE_BLOCK_SIZE
    if tuple(mask.BLOCK_SIZE) != (large, large):
        _check_lengths(mask, q_len, kv_len)
    if mask.kv_num_blocks.device != device:
        raise RuntimeError(
            f"Expect q/k/v and block_mask to be on the same device but got {device} and {mask.kv_num_blocks.device}."
        )
    for axis, (what, n) in enumerate((("batch size", batch), ("heads", heads))):
        # Of a larger one the first entries count, as for torch's uncompiled call.
        if mask.kv_num_blocks.size(axis) != 1 and mask.kv_num_blocks.size(axis) < n:
            raise ValueError(f"block_mask has {what} {mask.kv_num_blocks.size(axis)}; q has {n}: 1, {n} or more fits")


def _check_lengths(mask: BlockMask, q_len: int, kv_len: int) -> None:
    made_q, made_kv = mask.seq_lengths
    if (made_q, made_kv) == (q_len, kv_len):
        return
    what = f"block_mask was created for block_mask.shape={mask.shape} but got q_len={q_len} and kv_len={kv_len}. "
    if q_len > made_q or kv_len > made_kv:
        raise ValueError(
            what + "As the block mask was created for a smaller length than you're using it for, you likely need "
            "to create a new block mask."
        )
    raise ValueError(
        what + "As the block mask was created for a larger length than you're using it for, you can either 1. "
        "create a new block mask with the correct length, or 2. 'adjust' the existing block mask to the correct "
        "length by calling block_mask._adjust(q_len, kv_len). This essentially 'crops' the block mask to the "
        "upper left corner, which does not work for all mask_mods!"
    )


def table(lists: Sequence[Tensor], tile: tuple[int, int], q_len: int, kv_len: int) -> Tensor:
    """What lists of tiles make of each tile, as :func:`kinds_of`: numbers and indices, and those of full tiles where
    these have lists of their own."""
    read = [unwrapped("a list of tiles", t.to(torch.int32) if t.is_cuda else t) for t in lists]
    known = _native.Lists(read, tile, q_len, kv_len)
    made = torch.empty(known.shape, dtype=torch.uint8, device=lists[0].device)
    known.table(unwrapped("a table of tiles", made))
    return made


def narrowed(kinds: Tensor) -> Tensor:
    """A table of tiles without the axes of batch and heads where these have one entry: reading 2 axes takes the CPU two
    thirds of the time that 4 take, of the whole forward."""
    for axis in (1, 0):
        if kinds.size(axis) == 1:
            kinds = kinds.squeeze(axis)
    return kinds


def within(kinds: Tensor, tile: tuple[int, int], table: Tensor | None = None) -> Callable[..., Any]:
    """``full | partial & mask_mod``, as a wrapper of a traced mask function; ``table`` is the narrowed one."""
    batch, heads = kinds.shape[:2]
    table = narrowed(kinds) if table is None else table

    def wrap(trace: Any, values: tuple[Any, ...], allowed: Any) -> Any:
        b, h, q, kv = values
        index = [*([b] if batch != 1 else ()), *([h] if heads != 1 else ()), q // tile[0], kv // tile[1]]
        kind = trace.capture(table).at(index)
        return (kind == 2) | ((kind == 1) & allowed)

    return wrap
