"""Launching a scorer that lists what may be chosen, the choice among that, and both again for rows whose lists do not decide: for many rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trtkv.errors import CapacityError
from trtkv.plan import SelectPlan
from trtkv.plugins._device import nvrtc
from trtkv.plugins._device.nvrtc import Float, Int, Kernel, Long, Pointer
from trtkv.plugins._device.spec import shared_limit
from trtkv.plugins.kv_select import launch, launch_fused
from trtkv.plugins.kv_select.launch import CLUSTERS_FROM, OwnBudgets, Scratch, arch, largest_cluster, score_stages, stream
from trtkv.plugins.support import Summary, shares_selection

_HERE = Path(__file__).parent

# ---- The choice among what is listed ----

_LISTED = (Pointer,) * 9 + (Long,) + (Int,) * 11
SCORER_WARPS = 8  # warps of a block of the scorer, each of which has a list
_SEGMENT = 4096  # units whose bits a warp sends to another block
_ROUNDS = 8  # packets that a thread keeps, at most
_CROWDED = 512  # units that are compared, at most


@dataclass(frozen=True, slots=True)
class Regions:
    """Where lists lie in the memory of a row's scores: bytes of a region, and packets that there is room for."""

    bytes: int
    capacity: int

    @staticmethod
    def of(heads: int, stride: int, parts: int) -> Regions:
        """Lay out a row of `stride` units' scores, scored by so many blocks."""
        size = heads * stride * 2 // (parts * SCORER_WARPS) // 128 * 128
        return Regions(size, size // (16 * ((heads + 1) // 2) + 4) // 32 * 32)


def choose_listed(
    scores: Tensor, parts: Tensor, counts: Tensor, lens: Tensor, out: Tensor, failed: Tensor, *,
    budget: int, sink: int, window: int, unit: int, group: int, pooling: str, own: OwnBudgets | None = None, cluster: int = 0, overlap: bool = False,
    told: Tensor | None = None,
) -> None:  # fmt: skip
    """Choose as `launch.select_units` does, among lists in scores [R, heads, stride], counts [R, parts, 8] int32, parts [R, parts, heads, 4].

    failed [R] int32 is 1 where the lists do not hold the choice, whose row of out is left alone, and 0 elsewhere.
    """
    rows, heads, stride = scores.shape
    sm, regions = arch(), Regions.of(heads, stride, parts.shape[1])
    cluster = cluster or listed_cluster(rows, sm)
    rounds, shared = listed_shared(stride, cluster, heads, parts.shape[1], sm)
    slots, budgets, below = (0, 0, 0) if own is None else (own.slots.data_ptr(), own.budgets.data_ptr(), own.dense_below)
    words, each = (0, 0) if told is None else (told.data_ptr(), told.numel() // (4 * rows))
    values = (scores.data_ptr(), parts.data_ptr(), counts.data_ptr(), lens.data_ptr(), out.data_ptr(), failed.data_ptr(), slots, budgets, words,
              heads * stride * 2, regions.bytes, regions.capacity, parts.shape[1], rows // lens.shape[0], budget, below, out.shape[2] - 1, sink,
              window, rounds, each)  # fmt: skip
    kernel = listed_kernel(cluster, heads, pooling == "softmax-max", unit, group, sm)
    kernel.launch((rows * cluster, 1, 1), listed_threads(cluster), shared, stream(), values, cluster=cluster, overlap=overlap)


def listed_cluster(rows: int, arch: str = "90") -> int:
    """Choose blocks a row: as many as are resident at once."""
    return min(next((c for c, limit in ((16, 6), (8, 12), (4, 32), (2, 66)) if rows <= limit), 1), largest_cluster(arch))


def listed_threads(cluster: int) -> int:
    """Choose the threads of a block."""
    return 1024


def listed_shared(units: int, cluster: int, heads: int, parts: int, arch: str) -> tuple[int, int]:
    """Return the packets that a thread has room for, and the dynamic shared memory of rows of at most so many units.

    Raises CapacityError where a row's bits do not fit.
    """
    segments, peers, threads = -(-units // (_SEGMENT * cluster)), cluster - 1, listed_threads(cluster)
    bins = 512 if cluster > 8 else 1024
    static = 4 * bins + 4 * bins * max(1, peers) + 8 * _CROWDED + 1024
    least = 512 * segments * (cluster + peers) + 4 * segments * peers * peers + 4 * parts * heads + 64
    most = max(1, -(-Regions.of(heads, units, parts).capacity * parts * SCORER_WARPS // (cluster * threads)))
    rounds = min(most, _ROUNDS, (shared_limit(arch) - static - least) // (20 * threads))
    if rounds < 1:
        raise CapacityError(f"{units} units of one sequence cannot be ranked by lists on this GPU", "Lower the maximum length.")
    return rounds, least + 20 * threads * rounds


def listed_kernel(cluster: int, heads: int, maximum: bool, unit: int, group: int, arch: str) -> Kernel:
    """Load the choice among lists for a cluster size and number of scored heads."""
    shape = {"CLUSTER": cluster, "HEADS": heads, "MAXIMUM": int(maximum), "UNIT": unit, "GROUP": group, "THREADS": listed_threads(cluster)}
    defines = tuple(f"-D{name}={value}" for name, value in shape.items())
    return nvrtc.load(_HERE / "listed.cu", "choose_listed", _LISTED, defines, arch, 210 * 1024)


# ---- The scorer that lists, and the launches in turn ----

_LIST = (Pointer,) * 11 + (Int, Int, Int, Long) + (Int,) * 5 + (Float,)
_LOG2_E = 1.4426950408889634
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
        capacity = Regions.of(scratch.heads, scratch.stride, scratch.parts).capacity
        if capacity < _LEAST_CAPACITY or not _chooses(rows, scratch, arch):
            return None
        return Listed(rows, scratch.heads, scratch.stride, scratch.parts, capacity)

    def allocate(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Allocate beside scores and parts: counts [R, parts, warps] int32 of what is listed, failed [R] int32: rows whose lists do not decide."""
        counts = torch.zeros(self.rows, self.parts, SCORER_WARPS, dtype=torch.int32, device=device)
        return counts, torch.zeros(self.rows, dtype=torch.int32, device=device)


def _chooses(rows: int, scratch: Scratch, arch: str) -> bool:
    try:
        listed_shared(scratch.stride, listed_cluster(rows, arch), scratch.heads, scratch.parts, arch)
    except CapacityError:
        return False
    return True


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
    kernel.launch((parts.shape[1], heads, lens.shape[0]), 32 * SCORER_WARPS, _list_bytes(dim, sm), stream(), values, overlap=overlap)


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
    return 64 * score_stages(dim, arch) * dim + SCORER_WARPS * _SAMPLE_BYTES
