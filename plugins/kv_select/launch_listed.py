"""Launching a scorer that lists what may be chosen, the choice among that, and both again for rows whose lists do not decide: for many rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trtkv.plan import SelectPlan
from trtkv.plugins._device import nvrtc
from trtkv.plugins._device.nvrtc import Float, Int, Kernel, Long, Pointer
from trtkv.plugins.kv_select import launch, launch_fused
from trtkv.plugins.kv_select.launch import CLUSTERS_FROM, OwnBudgets, Scratch, arch, score_stages, stream
from trtkv.plugins.support import Summary, shares_selection

_HERE = Path(__file__).parent

# ---- The choice among what is listed ----


def choose_listed(
    scores: Tensor, parts: Tensor, counts: Tensor, lens: Tensor, out: Tensor, failed: Tensor, *,
    budget: int, sink: int, window: int, unit: int, group: int, pooling: str, own: OwnBudgets | None = None, cluster: int = 0, overlap: bool = False,
    told: Tensor | None = None,
) -> None:  # fmt: skip
    """Stand for the launch of listed.cu, which is made beside this."""
    raise NotImplementedError


# ---- The scorer that lists, and the launches in turn ----

_LIST = (Pointer,) * 11 + (Int, Int, Int, Long) + (Int,) * 5 + (Float,)
_LOG2_E = 1.4426950408889634
_WARPS = 8  # of a block that scores, each with a region of the row's lists
_SAMPLE_BYTES = 2048  # of shared memory, in which a warp keeps the scores of its sample
_POOLINGS = ("softmax-mean", "softmax-max")
_LEAST_CAPACITY = 96  # packets of a region; below that chance decides whether they fit
# Units of the longest row for each that is chosen: where more than a few of a hundred are, lists do not hold what may be.
_LEAST_UNITS_A_CHOICE = 24


@dataclass(frozen=True, slots=True)
class Listed:
    """Scores in lists of packets of four tokens: a region for each warp of each of a row's parts, in the memory of today's scores (`launch.Scratch`).

    rows R, scored heads, stride of the scores, parts of a row; capacity: packets of a region.
    """

    rows: int
    heads: int
    stride: int
    parts: int
    capacity: int

    @staticmethod
    def plan(rows: int, group_heads: int, dim: int, pooling: str, units: int, sms: int, arch: str, budget: int = 0) -> Listed | None:
        """Lay out R rows of at most `units` tokens of which up to `budget` are chosen; None where scores are better stored, all of them."""
        if int(arch) < CLUSTERS_FROM or group_heads == 1 or pooling not in _POOLINGS or units < _LEAST_UNITS_A_CHOICE * budget:
            return None
        scratch = Scratch.plan(rows, group_heads, pooling, units, sms)
        capacity = region_packets(scratch.heads, scratch.stride, scratch.parts)
        return Listed(rows, scratch.heads, scratch.stride, scratch.parts, capacity) if capacity >= _LEAST_CAPACITY else None

    def allocate(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Allocate beside scores and parts: counts [R, parts, warps] int32 of what is listed, failed [R] int32: rows whose lists do not decide."""
        counts = torch.zeros(self.rows, self.parts, _WARPS, dtype=torch.int32, device=device)
        return counts, torch.zeros(self.rows, dtype=torch.int32, device=device)


def region_packets(heads: int, stride: int, parts: int) -> int:
    """Return the packets of which a region has room: each has four scores a head, heads in pairs, and its first unit."""
    region = heads * stride * 2 // (parts * _WARPS) // 128 * 128
    return region // (16 * ((heads + 1) // 2) + 4) // 32 * 32


def plan_for(plan: SelectPlan, summary: Summary, batch: int, heads: int, group: int, dim: int, units: int, sms: int, arch: str) -> Listed | None:
    """Say how a layer lists scores for B sequences of at most `units` tokens, None where it stores all of them, or keeps them in one launch."""
    if summary.scorer != "fier" or plan.unit != 1 or shares_selection(plan):
        return None
    listed = Listed.plan(batch * heads, group, dim, plan.pooling, units, sms, arch, plan.width)
    if listed is None or launch_fused.plan_for(plan, summary, batch, heads, group, dim, units, sms, arch) is not None:
        return None
    return listed


def lists_on_any(plan: SelectPlan, summary: Summary, batch: int, heads: int, group: int, dim: int, units: int, arch: str) -> bool:
    """Say whether GPUs of a compute capability may list scores, whose multiprocessors are not counted when kernels are built."""
    counts = range(1, launch_fused.MOST_SMS + 1)
    return any(plan_for(plan, summary, batch, heads, group, dim, units, sms, arch) is not None for sms in counts)


def fier_list(
    q: Tensor, bits: Tensor, meta: Tensor, table: Tensor, lens: Tensor, scores: Tensor, parts: Tensor, counts: Tensor, *,
    page_size: int, budget: int, room: int, scale: float, pooling: str, sink: int, window: int, own: OwnBudgets | None = None,
    overlap: bool = False, told: Tensor | None = None,
) -> None:  # fmt: skip
    """Score all closed groups and list what may be chosen: arguments as of `launch.fier_score`, and of `launch.select_units` what says how much may.

    scores [R, heads, stride] is the memory of the lists, counts [R, parts, 8] int32 says how many packets each has, or would have; room is K.
    """
    heads, dim = bits.shape[1], bits.shape[-1]
    group, sm = q.shape[1] // dim // heads, arch()
    kernel = list_kernel(dim, group, pooling, q.dtype == torch.bfloat16, sm)
    slots, budgets, below = (None, None, 0) if own is None else (own.slots, own.budgets, own.dense_below)
    given = (q, bits, meta, table, lens, scores, parts, counts, told, slots, budgets)
    values = (*(0 if one is None else one.data_ptr() for one in given), q.stride(0), table.stride(0), page_size // 32,
              scores.stride(0) * scores.element_size(), budget, below, room, sink, window, scale * _LOG2_E)  # fmt: skip
    kernel.launch((parts.shape[1], heads, lens.shape[0]), 32 * _WARPS, _list_bytes(dim, sm), stream(), values, overlap=overlap)


def score_and_choose_listed(
    q: Tensor, bits: Tensor, meta: Tensor, table: Tensor, lens: Tensor, scores: Tensor, parts: Tensor, counts: Tensor, failed: Tensor, out: Tensor, *,
    page_size: int, scores_from: int, budget: int, scale: float, pooling: str, sink: int, window: int, unit: int, group: int,
    own: OwnBudgets | None = None, overlap: bool = False, told: Tensor | None = None,
) -> None:  # fmt: skip
    """List, choose, and score and choose again by `launch` where the lists did not decide: out as of `launch.select_units`.

    Sequences of up to scores_from tokens need no scores, those of up to budget are read whole unless own says otherwise. Of rows that failed, scores
    and parts are those of `launch.fier_score` behind this, of others lists and what `fier_list` says of them.
    """
    index, says = (q, bits, meta, table, lens), {"sink": sink, "window": window, "own": own, "overlap": overlap}
    common = {"page_size": page_size, "budget": scores_from, "scale": scale, "pooling": pooling}
    handed = scores, parts
    fier_list(*index, *handed, counts, room=out.shape[2] - 1, told=told, **common, **says)
    choice = {"budget": budget, "unit": unit, "group": group, "pooling": pooling, **says}
    choose_listed(*handed, counts, lens, out, failed, told=told, **choice)
    launch.fier_score(*index, *handed, overlap=overlap, only=failed, **common)  # its words are empty now, and the query has come
    launch.select_units(*handed, lens, out, only=failed, **choice)


def list_kernel(dim: int, group: int, pooling: str, bf16: bool, arch: str) -> Kernel:
    """Load the scorer that lists for a shape."""
    shape = {"D": dim, "GROUP_HEADS": group, "POOL": 0, "STAGES": score_stages(dim, arch), "MAXIMUM": int(pooling == "softmax-max")}
    defines = (*(f"-D{name}={value}" for name, value in shape.items()), *(("-DBF16",) if bf16 else ()))
    return nvrtc.load(_HERE / "fier_list.cu", "fier_list", _LIST, defines, arch, _list_bytes(dim, arch))


def _list_bytes(dim: int, arch: str) -> int:
    """Shared memory of the scorer's rings, and of its warps' samples."""
    return 64 * score_stages(dim, arch) * dim + _WARPS * _SAMPLE_BYTES
