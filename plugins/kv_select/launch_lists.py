"""Launching FIER's scorer of many rows and the selector of its lists, and behind them the kernels for rows that the lists do not decide."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trtkv.plugins._device import nvrtc
from trtkv.plugins._device.nvrtc import Float, Int, Kernel, Long, Pointer
from trtkv.plugins._device.spec import shared_limit
from trtkv.plugins.kv_select import launch
from trtkv.plugins.kv_select.launch import POOLS, SELECT_STATIC, OwnBudgets, Scratch

_HERE = Path(__file__).parent
_LIST = (Pointer,) * 8 + (Int, Int, Int, Long, Int, Int, Float)
_SELECT = (Pointer,) * 8 + (Long,) + (Int,) * 8
LOG2_E = 1.4426950408889634
LIST_WARPS, NOTES, NOT_LISTED = 8, 24, 1 << 30  # lists and words of a part, a count where there are none; as in lists.cuh
LEAST_TOKENS = 1 << 21  # of all rows: below, the kernels behind the lists take as long as is saved
LEAST_RATIO = 18  # tokens of a row for one that it may choose: below, too many would be listed
LEAST_ROOM = 4  # for tokens of a row in a block's shared memory for one that may be chosen


@dataclass(frozen=True, slots=True)
class Lists:
    """A selection by lists: blocks a row of the selector, tokens that a block holds, its shared memory in bytes, parts of a row."""

    rows: int
    cluster: int
    room_tokens: int
    shared: int
    parts: int

    @staticmethod
    def worthwhile(rows: int, group_heads: int, pooling: str, units: int, wanted: int) -> bool:
        """Say whether lists are short and scores many: R rows of at most `units` tokens that choose up to `wanted`."""
        pooled = group_heads > 1 and POOLS.get(pooling) == 0  # scores are normalized over the row
        return pooled and rows * units > LEAST_TOKENS and units >= LEAST_RATIO * wanted

    @staticmethod
    def plan(rows: int, group_heads: int, wanted: int, scratch: Scratch, arch: str) -> Lists | None:
        """Lay out R rows that choose up to `wanted` tokens; None where shared memory is too small for those that may be chosen."""
        cluster = launch.select_cluster(rows, scratch.stride, arch)
        each, per = -(-scratch.parts // cluster), -(-scratch.stride // 32 // scratch.parts)  # parts of a block, groups of a part
        beside = 4 * each * per + 12 * scratch.parts * group_heads + 4 * (each * LIST_WARPS + 1) + 64
        room = min(32 * each * per, (shared_limit(arch) - SELECT_STATIC - 1024 - beside) // 8)
        return Lists(rows, cluster, room, 8 * room + beside, scratch.parts) if room >= LEAST_ROOM * wanted else None

    def allocate(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Allocate notes [R, parts, 24] about the lists and which rows they do not decide, redo [R]; int32."""
        notes = torch.empty(self.rows, self.parts, NOTES, dtype=torch.int32, device=device)
        return notes, torch.empty(self.rows, dtype=torch.int32, device=device)


def choose_by_lists(
    q: Tensor, bits: Tensor, meta: Tensor, table: Tensor, lens: Tensor, out: Tensor, scores: Tensor, parts: Tensor, notes: Tensor, redo: Tensor,
    plan: Lists, *, page_size: int, scores_from: int, budget: int, scale: float, pooling: str, sink: int, window: int, own: OwnBudgets | None = None,
) -> None:  # fmt: skip
    """Score and choose: arguments as of `launch.fier_score` (up to scores_from tokens nothing is scored) and `launch.select_units`.

    The choice is theirs bit for bit. scores holds the lists, or the scores of rows that they do not decide. Kernels behind the first begin early:
    they wait for what they read, and the first one's blocks have all begun by then.
    """
    fier_list(q, bits, meta, table, lens, scores, parts, notes, page_size=page_size, budget=scores_from, wanted=out.shape[2] - 1, scale=scale,
              pooling=pooling)  # fmt: skip
    sizes = {"budget": budget, "sink": sink, "window": window, "pooling": pooling, "own": own}
    select_lists(scores, parts, notes, lens, out, redo, plan, overlap=True, **sizes)
    again = {"redo": redo, "overlap": True}
    launch.fier_score(q, bits, meta, table, lens, scores, parts, page_size=page_size, budget=scores_from, scale=scale, pooling=pooling, **again)
    launch.select_units(scores, parts, lens, out, unit=1, group=32, **sizes, **again)


def fier_list(
    q: Tensor, bits: Tensor, meta: Tensor, table: Tensor, lens: Tensor, scores: Tensor, parts: Tensor, notes: Tensor, *,
    page_size: int, budget: int, wanted: int, scale: float, pooling: str,
) -> None:  # fmt: skip
    """List the tokens that may be among the `wanted` best: arguments as of `launch.fier_score`, lists in the place of scores, notes about them."""
    heads, dim = bits.shape[1], bits.shape[-1]
    group = q.shape[1] // dim // heads
    kernel = list_kernel(dim, group, pooling, q.dtype == torch.bfloat16, launch.arch())
    given = (q, bits, meta, table, lens, scores, parts, notes)
    values = (*(one.data_ptr() for one in given), q.stride(0), table.stride(0), page_size // 32, scores.shape[2], budget, wanted, scale * LOG2_E)
    shared = 64 * launch.score_stages(dim, launch.arch()) * dim
    kernel.launch((parts.shape[1], heads, lens.shape[0]), 32 * LIST_WARPS, shared, launch.stream(), values)


def select_lists(
    scores: Tensor, parts: Tensor, notes: Tensor, lens: Tensor, out: Tensor, redo: Tensor, plan: Lists, *,
    budget: int, sink: int, window: int, pooling: str, own: OwnBudgets | None = None, overlap: bool = False,
) -> None:  # fmt: skip
    """Choose by what `fier_list` left, out as of `launch.select_units`; redo [R] int32 gets 1 where lists do not decide, and out nothing there."""
    rows, heads, stride = scores.shape
    slots, budgets, below = (0, 0, 0) if own is None else (own.slots.data_ptr(), own.budgets.data_ptr(), own.dense_below)
    given = (scores, parts, notes, lens, out, redo)
    values = (*(one.data_ptr() for one in given), slots, budgets, stride, parts.shape[1], rows // lens.shape[0], budget, below, out.shape[2] - 1,
              sink, window, plan.room_tokens)  # fmt: skip
    kernel = choose_kernel(plan.cluster, heads, pooling, launch.arch())
    kernel.launch((rows * plan.cluster, 1, 1), 1024, plan.shared, launch.stream(), values, cluster=plan.cluster, overlap=overlap)


def list_kernel(dim: int, group: int, pooling: str, bf16: bool, arch: str) -> Kernel:
    """Load the listing scorer for a shape."""
    stages = launch.score_stages(dim, arch)
    shape = {"D": dim, "GROUP_HEADS": group, "POOL": 0, "MAXIMUM": int(pooling == "softmax-max"), "STAGES": stages}
    defines = (*(f"-D{name}={value}" for name, value in shape.items()), *(("-DBF16",) if bf16 else ()))
    return nvrtc.load(_HERE / "fier_list.cu", "fier_list", _LIST, defines, arch, 64 * stages * dim)


def choose_kernel(cluster: int, heads: int, pooling: str, arch: str) -> Kernel:
    """Load the selector of lists for a cluster size and number of query heads a KV head."""
    shape = {"CLUSTER": cluster, "HEADS": heads, "MAXIMUM": int(pooling == "softmax-max"), "UNIT": 1, "GROUP": 32}
    defines = tuple(f"-D{name}={value}" for name, value in shape.items())
    return nvrtc.load(_HERE / "select_lists.cu", "select_lists", _SELECT, defines, arch, shared_limit(arch) - SELECT_STATIC)
