"""Launching decode attention over a list or over everything stored."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from trtkv.plugins._device import nvrtc
from trtkv.plugins._device.nvrtc import Float, Int, Kernel, Pointer

_HERE = Path(__file__).parent
_TYPES = (Pointer,) * 7 + (Int,) * 5 + (Float,)
WARPS, STAGES = 4, 2


def attend_list(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lens: Tensor, chosen: Tensor | None, out: Tensor, *,
    unit: int, scale: float, cluster: int = 0, overlap: bool = False,
) -> None:  # fmt: skip
    """Attend one token a sequence: q, out [B, Hq D], keys, values [P, Hk, N, D], table [B, M], lens [B], chosen [B, Hk, K + 1] int32 or None."""
    _, heads, page_size, dim = keys.shape
    group, batch = q.shape[1] // dim // heads, lens.shape[0]
    cluster = cluster or attend_cluster(batch * heads)
    major, minor = torch.cuda.get_device_capability()
    kernel = attend_kernel(dim, group, cluster, unit, q.dtype == torch.bfloat16, f"{major}{minor}")
    values_ = (q.data_ptr(), keys.data_ptr(), values.data_ptr(), table.data_ptr(), lens.data_ptr(), 0 if chosen is None else chosen.data_ptr(),
               out.data_ptr(), q.stride(0), out.stride(0), table.stride(0), page_size, 0 if chosen is None else chosen.shape[2],
               scale * 1.4426950408889634)  # fmt: skip
    stream = torch.cuda.current_stream().cuda_stream
    kernel.launch((cluster, heads, batch), WARPS * 32, WARPS * STAGES * 64 * dim, stream, values_, cluster=cluster, overlap=overlap)


def attend_cluster(rows: int) -> int:
    """Choose blocks a row."""
    return next((c for c in (16, 8, 4, 2) if rows * c <= 264), 2)


def attend_kernel(dim: int, group: int, cluster: int, unit: int, bf16: bool, arch: str) -> Kernel:
    """Load the kernel for a shape."""
    defines = (f"-DD={dim}", f"-DGROUP_HEADS={group}", f"-DCLUSTER={cluster}", f"-DUNIT={unit}", f"-DWARPS={WARPS}", f"-DSTAGES={STAGES}")
    return nvrtc.load(_HERE / "attend.cu", "attend_list", _TYPES, defines + (("-DBF16",) if bf16 else ()), arch, WARPS * STAGES * 64 * dim)
