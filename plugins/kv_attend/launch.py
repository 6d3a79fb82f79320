"""Launching decode attention over a list or over everything stored, a cluster of blocks a row."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from trtkv.plugins._device import nvrtc
from trtkv.plugins._device.nvrtc import Float, Int, Kernel, Pointer
from trtkv.plugins._device.spec import shared_limit

_HERE = Path(__file__).parent
_TYPES = (Pointer,) * 8 + (Int,) * 6 + (Float,)
CLUSTERS_FROM = 90  # clusters of blocks came with this compute capability
STAGES = 2  # blocks of tokens of a warp that are on their way
# Blocks a row and warps a block up to so many rows, as measured on an H200. Clusters have to find place all at once: its 132 multiprocessors stand in
# groups of which some have no more than 14, so one block each there is room for 30 clusters of four, and for fewer than 40 of three.
FORMS = ((8, 16, 4), (16, 8, 4), (28, 4, 8), (32, 3, 8), (44, 4, 4), (66, 2, 8), (99, 2, 4), (132, 1, 8))
MANY = (2, 4)
ALONE = 8  # warps of a block that has a multiprocessor for itself
EARLY = (range(24, 33), range(57, 67))  # rows of which blocks may begin early however much the kernel before reads: each finds a free multiprocessor


def attend_list(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lens: Tensor, chosen: Tensor | None, out: Tensor, *,
    unit: int, scale: float, overlap: bool = False, settled: bool = False, handed: Tensor | None = None,
) -> None:  # fmt: skip
    """Attend one token a sequence: q, out [B, Hq D], keys, values [P, Hk, N, D], table [B, M], lens [B], chosen [B, Hk, K + 1] int32 or None.

    With overlap the kernel launched before this one must not have written lens; settled says that it has not written q either. handed
    [B Hk, K + 1, 4] is what `launch_fused.page_select` hands the lists over in, where that is the launch before this one and q is settled.
    """
    _, heads, page_size, dim = keys.shape
    group, batch = q.shape[1] // dim // heads, lens.shape[0]
    sm = device_arch()
    cluster, warps = attend_form(batch * heads, dim, sm)
    kernel = attend_kernel(dim, group, cluster, warps, unit, q.dtype == torch.bfloat16, sm)
    pointers = [one.data_ptr() for one in (q, keys, values, table, lens)]
    strides = (q.stride(0), out.stride(0), table.stride(0), page_size, 0 if chosen is None else chosen.shape[2])
    values_ = (*pointers, 0 if chosen is None else chosen.data_ptr(), 0 if handed is None else handed.data_ptr(), out.data_ptr(), *strides, int(settled), scale * 1.4426950408889634)
    stream = torch.cuda.current_stream().cuda_stream
    shared = block_bytes(batch * heads, dim, warps, sm)
    kernel.launch((cluster, heads, batch), warps * 32, shared, stream, values_, cluster=cluster, overlap=overlap)


def device_arch() -> str:
    """Name the current device's compute capability, such as "90"."""
    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}"


def attend_form(rows: int, dim: int, arch: str = "90") -> tuple[int, int]:
    """Choose blocks a row, which are a cluster, and warps a block, whose rings have to fit in shared memory."""
    cluster, warps = _form(rows, arch)
    while _ring_bytes(dim, warps) + 128 * dim > shared_limit(arch):  # beside them lie queries and outputs of sixteen heads
        warps //= 2
    return cluster, warps


def begins_early(rows: int, arch: str = "90") -> bool:
    """Say whether nothing is lost where blocks begin before the kernel in front of them has ended, whatever that one does."""
    return int(arch) >= CLUSTERS_FROM and any(rows in some for some in EARLY)


def block_bytes(rows: int, dim: int, warps: int, arch: str = "90") -> int:
    """Return the dynamic shared memory of a block: its rings, or more, so that a multiprocessor has no room for a second one."""
    return max(_ring_bytes(dim, warps), shared_limit(arch) // 2 if _form(rows, arch)[1] == ALONE else 0)


def _form(rows: int, arch: str) -> tuple[int, int]:
    if int(arch) < CLUSTERS_FROM:
        return 1, 4
    return next(((cluster, warps) for most, cluster, warps in FORMS if rows <= most), MANY)


def _ring_bytes(dim: int, warps: int) -> int:
    return warps * STAGES * 64 * dim


def attend_kernel(dim: int, group: int, cluster: int, warps: int, unit: int, bf16: bool, arch: str) -> Kernel:
    """Load the kernel for a shape."""
    shape = {"D": dim, "GROUP_HEADS": group, "CLUSTER": cluster, "UNIT": unit, "WARPS": warps, "STAGES": STAGES}
    defines = (*(f"-D{name}={value}" for name, value in shape.items()), *(("-DBF16",) if bf16 else ()))
    return nvrtc.load(_HERE / "attend.cu", "attend_list", _TYPES, defines, arch, max(_ring_bytes(dim, warps), shared_limit(arch) // 2))
