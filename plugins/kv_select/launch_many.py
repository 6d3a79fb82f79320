"""Launching the selector for long rows: several blocks a row, which tell each other lists of what reaches a bound."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trtkv.plugins._device import nvrtc
from trtkv.plugins._device.nvrtc import Int, Kernel, Long, Pointer
from trtkv.plugins._device.spec import shared_limit
from trtkv.plugins.kv_select.launch import OwnBudgets, arch, stream

_HERE = Path(__file__).parent
_MANY = (Pointer,) * 9 + (Long,) + (Int,) * 10
THREADS = 1024
MOST_BLOCKS = 8  # of a row
PIECE = 512  # units that are dealt to a row's blocks in turn
BULK_FROM = 90  # bulk copies came with this compute capability
# As measured on an H200: for fewer rows there are clusters of four and more, of two blocks a row a cluster is faster.
_FEWEST_ROWS, _FEWEST_BLOCKS = 25, 3
_REACH, _FEWEST, _SAMPLED = 2.5, 24, 2 * THREADS  # as in lists.cuh: times the wanted units that reach the bound, and of the sample
_STATIC = 28 * 1024  # shared memory of a block beside what its launch asks for
_MOST_UNITS = 65536  # of a block, which are told in sixteen bits
PATIENCE = 4096  # looks for what another block tells, before a block chooses by itself
_LEAST_UNITS = 8192  # of a block


@dataclass(frozen=True, slots=True)
class Many:
    """A selector for R rows: blocks a row, units of a block's list (listed), dynamic shared memory of a block."""

    rows: int
    blocks: int
    listed: int
    shared: int

    @staticmethod
    def plan(rows: int, heads: int, units: int, parts: int, width: int, sms: int, arch: str) -> Many | None:
        """Lay out R rows of at most `units` units with scored heads, of which at most `width` are chosen; None where another selector is faster."""
        blocks = min(sms // rows, units // _LEAST_UNITS, MOST_BLOCKS)
        if int(arch) < BULK_FROM or rows < _FEWEST_ROWS or blocks < _FEWEST_BLOCKS or 16 * width > units:
            return None
        return Many.layout(rows, blocks, heads, units, parts, width, arch)

    @staticmethod
    def layout(rows: int, blocks: int, heads: int, units: int, parts: int, width: int, arch: str) -> Many | None:
        """Lay out R rows for so many blocks each; None where that does not fit."""
        share, ring = max(-(-units // (32 * blocks)) * 32, -(-units // (PIECE * blocks)) * PIECE), ring_bytes(heads)
        reach = max(int(_REACH * width), _FEWEST * units // _SAMPLED)
        fixed = ring + share // 8 + 16 + parts * heads * 8 + 16
        # There is room for all that should reach the bound where it lies in one block, as far as shared memory goes; an equal share is a must.
        listed = min(max(reach * 5 // 4, reach * 8 // (5 * blocks) + 32), (shared_limit(arch) - _STATIC - fixed) // 8) // 32 * 32
        fits = share <= _MOST_UNITS and listed * blocks * 5 >= reach * 8 and reach * 5 <= ring // 2 and units // 8 + 4 <= ring
        return Many(rows, blocks, listed, fixed + listed * 8) if fits else None

    def allocate(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Allocate what blocks tell each other [R, blocks, words, 4] int32 and the rows' tickets [R] int64, all zero."""
        mail = torch.zeros(self.rows, self.blocks, self.listed // 2 + 1, 4, dtype=torch.int32, device=device)
        return mail, torch.zeros(self.rows, dtype=torch.int64, device=device)


def select_many(
    scores: Tensor, parts: Tensor, lens: Tensor, out: Tensor, mail: Tensor, tickets: Tensor, plan: Many, *,
    budget: int, sink: int, window: int, unit: int, group: int, pooling: str, own: OwnBudgets | None = None, overlap: bool = False,
    told: Tensor | None = None,
) -> None:  # fmt: skip
    """Choose units: arguments as of `launch.select_units`, mail and tickets as the plan allocates them.

    Launches that share mail must follow each other.
    """
    rows, heads, stride = scores.shape
    kernel = many_kernel(heads, pooling == "softmax-max", unit, group, arch())
    slots, budgets, below = (0, 0, 0) if own is None else (own.slots.data_ptr(), own.budgets.data_ptr(), own.dense_below)
    words, each = (0, 0) if told is None else (told.data_ptr(), told.numel() // (4 * rows))
    values = (scores.data_ptr(), parts.data_ptr(), lens.data_ptr(), out.data_ptr(), slots, budgets, mail.data_ptr(), tickets.data_ptr(), words, stride,
              parts.shape[1], rows // lens.shape[0], budget, below, out.shape[2] - 1, sink, window, plan.listed, plan.blocks, each)  # fmt: skip
    kernel.launch((rows * plan.blocks, 1, 1), THREADS, plan.shared, stream(), values, overlap=overlap)


def may_be_taken(rows: int, heads: int, units: int, width: int, arch: str) -> bool:
    """Say whether a GPU of a compute capability, whose multiprocessors are not counted when kernels are built, may launch it."""
    return any(Many.plan(rows, heads, units, 1, width, sms, arch) is not None for sms in (rows * b for b in range(_FEWEST_BLOCKS, MOST_BLOCKS + 1)))


def many_kernel(heads: int, maximum: bool, unit: int, group: int, arch: str) -> Kernel:
    """Load the kernel for a number of scored heads."""
    shape = {"HEADS": heads, "MAXIMUM": int(maximum and heads > 1), "UNIT": unit, "GROUP": group, "DEPTH": depth(heads), "PATIENCE": PATIENCE}
    defines = tuple(f"-D{name}={value}" for name, value in shape.items())
    return nvrtc.load(_HERE / "select_many.cu", "select_many", _MANY, defines, arch, shared_limit(arch) - _STATIC)


def depth(heads: int) -> int:
    """Choose how many stages are under way."""
    return max(2, min(8, 21 // heads))


def ring_bytes(heads: int) -> int:
    """Shared memory of stages under way: four units of every head a thread."""
    return depth(heads) * heads * 8 * THREADS
