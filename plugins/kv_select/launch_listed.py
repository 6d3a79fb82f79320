"""Launching the choice among packets of tokens that a scorer listed; every tensor is given, nothing is allocated or synchronized."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from trtkv.errors import CapacityError
from trtkv.plugins._device import nvrtc
from trtkv.plugins._device.nvrtc import Int, Kernel, Pointer
from trtkv.plugins._device.spec import shared_limit
from trtkv.plugins.kv_select.launch import LARGE_CLUSTERS, OwnBudgets, arch, stream

_HERE = Path(__file__).parent
_LISTED = (Pointer,) * 9 + (Int,) * 7
SCORER_WARPS = 8  # warps of a block of the scorer, each of which has a list
_SEGMENT = 4096  # units whose bits a warp sends to another block
_ROUNDS = 10  # packets that a thread keeps, at most
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
    (rows, heads, stride), num_parts, sm = scores.shape, parts.shape[1], arch()
    cluster = cluster or listed_cluster(rows, sm)
    kernel = listed_kernel(cluster, heads, pooling == "softmax-max", unit, group, stride, num_parts, sm)
    slots, budgets, below = (0, 0, 0) if own is None else (own.slots.data_ptr(), own.budgets.data_ptr(), own.dense_below)
    words, each = (0, 0) if told is None else (told.data_ptr(), told.numel() // (4 * rows))
    values = (scores.data_ptr(), parts.data_ptr(), counts.data_ptr(), lens.data_ptr(), out.data_ptr(), failed.data_ptr(), slots, budgets, words,
              rows // lens.shape[0], budget, below, out.shape[2] - 1, sink, window, each)  # fmt: skip
    shared = listed_shared(stride, cluster, heads, num_parts, sm)[1]
    kernel.launch((rows * cluster, 1, 1), listed_threads(cluster), shared, stream(), values, cluster=cluster, overlap=overlap)


def listed_cluster(rows: int, arch: str = "90") -> int:
    """Choose blocks a row: as many as an H200 has room for at once; two where none are, because one keeps few packets."""
    largest = 16 if arch in LARGE_CLUSTERS else 8
    return next((c for c, limit in ((16, 7), (8, 15), (4, 30), (3, 39)) if rows <= limit and c <= largest), 2)


def listed_threads(cluster: int) -> int:
    """Choose the threads of a block, as measured on an H200."""
    return 512 if cluster >= 8 else 768


def listed_shared(units: int, cluster: int, heads: int, parts: int, arch: str) -> tuple[int, int]:
    """Return the packets that a thread has room for, and the dynamic shared memory of rows of at most so many units: listed.cuh's Room.

    Raises CapacityError where a row's bits do not fit.
    """
    segments, peers, threads = -(-units // (_SEGMENT * cluster)), cluster - 1, listed_threads(cluster)
    bins = 512 if cluster > 8 else 1024
    static = 4 * bins + 4 * bins * max(1, peers) + 8 * _CROWDED + 1024
    least = 512 * segments * (cluster + max(1, peers)) + 4 * segments * max(1, peers) ** 2 + parts * (32 + 4 * heads) + 64
    most = max(1, -(-Regions.of(heads, units, parts).capacity * parts * SCORER_WARPS // (cluster * threads)))
    rounds = min(most, _ROUNDS, (shared_limit(arch) - static - least) // (20 * threads))
    if rounds < 1:
        raise CapacityError(f"{units} units of one sequence cannot be ranked by lists on this GPU", "Lower the maximum length.")
    return rounds, least + 20 * threads * rounds


def listed_kernel(cluster: int, heads: int, maximum: bool, unit: int, group: int, units: int, parts: int, arch: str) -> Kernel:
    """Load the choice among lists for a cluster size and number of scored heads, for rows of at most so many units and parts."""
    rounds = listed_shared(units, cluster, heads, parts, arch)[0]
    shape = {"CLUSTER": cluster, "HEADS": heads, "MAXIMUM": int(maximum), "UNIT": unit, "GROUP": group, "THREADS": listed_threads(cluster),
             "STRIDE": units, "PARTS": parts, "ROUNDS": rounds}  # fmt: skip
    defines = tuple(f"-D{name}={value}" for name, value in shape.items())
    return nvrtc.load(_HERE / "listed.cu", "choose_listed", _LISTED, defines, arch, 225 * 1024)
