"""Launching what lists, of many long rows, the units that may be chosen: the selector then reads nothing else."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from plugins.device import kernel
from plugins.device.driver import arch
from plugins.device.kernel import CudaKernel
from plugins.device.nvrtc import CudaSpec
from plugins.device.spec import Int, Long, Pointer, shared_limit
from plugins.select.launch import MOST_LISTED, SELECT_STATIC, Lists, OwnBudgets

LIST = CudaKernel(Path(__file__).parent / "list_units.cu", "list_units", (Pointer,) * 7 + (Long,) + (Int,) * 8)
THREADS = 512
_RESIDENT = 2  # blocks on a multiprocessor
_MOST_BLOCKS = 32  # of a row: the selector reads a head a lane
_STATIC = 6 * 1024  # shared memory of a block beside what its launch requests
# As measured on an H200: fewer rows have clusters that count all as fast, fewer heads two blocks that list by themselves; one of so many is chosen.
_FEWEST_ROWS, _FEWEST_HEADS, _FEWEST_UNITS, _SHARE = 25, 5, 65536, 16


def lists(rows: int, heads: int, units: int, width: int, arch: str) -> bool:
    """Say whether R rows of at most `units` units with scored heads, of which `width` are chosen, are listed first."""
    long = units >= max(_FEWEST_UNITS, _SHARE * width)
    listing = _RESIDENT * (ring_bytes(heads) + _STATIC) <= shared_limit(arch)
    choosing = 8 * MOST_LISTED * width + units // 8 + 64 + SELECT_STATIC <= shared_limit(arch)
    return rows >= _FEWEST_ROWS and heads >= _FEWEST_HEADS and long and listing and choosing


def allocate(rows: int, width: int, sms: int, device: torch.device | str) -> Lists:
    """Allocate lists of R rows of which `width` units are chosen, with as many blocks a row as are resident at once."""
    blocks = max(1, min(_MOST_BLOCKS, _RESIDENT * sms // rows))
    capacity = -(-2 * MOST_LISTED * width // blocks)
    return Lists(*(torch.empty(rows, blocks, *shape, 2, dtype=torch.int32, device=device) for shape in ((capacity,), ())))


def list_units(
    scores: Tensor, parts: Tensor, lens: Tensor, lists: Lists, *,
    budget: int, width: int, sink: int, window: int, unit: int, group: int, pooling: str, own: OwnBudgets | None = None, overlap: bool = False,
) -> None:  # fmt: skip
    """List what may be chosen: arguments as of `launch.select_units`, width the most units that are."""
    rows, heads, stride = scores.shape
    spec = list_kernel(heads, pooling == "softmax-max", unit, group, arch())
    slots, budgets, below = (None, None, 0) if own is None else (own.slots, own.budgets, own.dense_below)
    blocks, capacity = lists.entries.shape[1:3]
    values = (scores, parts, lens, lists.entries, lists.heads, slots, budgets, stride, parts.shape[1], rows // lens.shape[0], budget, below, width,
              sink, window, capacity)  # fmt: skip
    shared = ring_bytes(heads) + 8 * parts.shape[1] * heads
    kernel.launch(spec, (blocks, rows, 1), values, threads=THREADS, shared=shared, overlap=overlap)


def list_kernel(heads: int, maximum: bool, unit: int, group: int, arch: str) -> CudaSpec:
    """Return the kernel for a number of scored heads."""
    shape = {"HEADS": heads, "MAXIMUM": int(maximum and heads > 1), "UNIT": unit, "GROUP": group}
    return LIST.variant(arch, shared=shared_limit(arch) // _RESIDENT - _STATIC, **shape)


def ring_bytes(heads: int) -> int:
    """Shared memory of packets under way, sixteen bytes of every head a thread, as list_units.cu counts them."""
    return (1 if heads > 6 else 12 // heads) * heads * 16 * THREADS
