"""Launching decode attention over a list or over everything stored, a cluster of blocks a row."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from trtkv.plugins._device import nvrtc
from trtkv.plugins._device.nvrtc import Float, Int, Kernel, Pointer
from trtkv.plugins._device.spec import shared_limit

_HERE = Path(__file__).parent
_TYPES = (Pointer,) * 7 + (Int,) * 6 + (Float,)
STAGES = 2
CLUSTERS_FROM = 90  # clusters of blocks came with this compute capability


def attend_list(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lens: Tensor, chosen: Tensor | None, out: Tensor, *,
    unit: int, scale: float, cluster: int = 0, overlap: bool = False, settled: bool = False,
) -> None:  # fmt: skip
    """Attend one token a sequence: q, out [B, Hq D], keys, values [P, Hk, N, D], table [B, M], lens [B], chosen [B, Hk, K + 1] int32 or None.

    With overlap the kernel launched before this one must not have written lens; settled says that it has not written q either.
    """
    _, heads, page_size, dim = keys.shape
    group, batch = q.shape[1] // dim // heads, lens.shape[0]
    sm = device_arch()
    cluster = cluster or attend_cluster(batch * heads, sm)
    warps = attend_warps(dim, sm)
    kernel = attend_kernel(dim, group, cluster, unit, q.dtype == torch.bfloat16, sm)
    pointers = [one.data_ptr() for one in (q, keys, values, table, lens)]
    strides = (q.stride(0), out.stride(0), table.stride(0), page_size, 0 if chosen is None else chosen.shape[2])
    values_ = (*pointers, 0 if chosen is None else chosen.data_ptr(), out.data_ptr(), *strides, int(settled), scale * 1.4426950408889634)
    stream = torch.cuda.current_stream().cuda_stream
    kernel.launch((cluster, heads, batch), warps * 32, warps * STAGES * 64 * dim, stream, values_, cluster=cluster, overlap=overlap)


def device_arch() -> str:
    """Name the current device's compute capability, such as "90"."""
    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}"


def attend_cluster(rows: int, arch: str = "90") -> int:
    """Choose blocks a row."""
    return next((c for c in (16, 8, 4, 2) if rows * c <= 264), 2) if int(arch) >= CLUSTERS_FROM else 1


def attend_warps(dim: int, arch: str) -> int:
    """Choose warps of a block, so that their rings fit in shared memory."""
    return 4 if 4 * STAGES * 64 * dim + 8192 <= shared_limit(arch) else 2


def attend_kernel(dim: int, group: int, cluster: int, unit: int, bf16: bool, arch: str) -> Kernel:
    """Load the kernel for a shape."""
    warps = attend_warps(dim, arch)
    shape = {"D": dim, "GROUP_HEADS": group, "CLUSTER": cluster, "UNIT": unit, "WARPS": warps, "STAGES": STAGES}
    defines = (*(f"-D{name}={value}" for name, value in shape.items()), *(("-DBF16",) if bf16 else ()))
    return nvrtc.load(_HERE / "attend.cu", "attend_list", _TYPES, defines, arch, warps * STAGES * 64 * dim)
