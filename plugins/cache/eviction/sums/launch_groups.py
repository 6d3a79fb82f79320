"""Launching the column sums by matrix instructions of warp groups, which GPUs of compute capability 9.0 alone have."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from plugins.device import nvrtc
from plugins.device.driver import Kernel, arch
from plugins.device.nvrtc import Float, Int, Pointer

_SOURCE = Path(__file__).with_name("sums.cu")
_TYPES = (*(Pointer,) * 4, *(Int,) * 8, Float)
KEYS, TILE, STAGES, THREADS = 256, 128, 6, 384
FEWEST = 2 * TILE  # queries: the tiles of fewer are mostly empty


def fits(dim: int, dtype: str, arch: str) -> bool:
    """Say whether there is such a kernel for a head dimension, a dtype in Triton's words and a compute capability."""
    return arch == "90" and dim in (64, 128) and dtype in ("bf16", "fp16")


def kernel(group: int, dim: int, dtype: str, arch: str) -> Kernel:
    """Load the kernel for a shape that fits."""
    defines = (f"-DD={dim}", f"-DBF16={int(dtype == 'bf16')}", f"-DGROUP={group}")
    return nvrtc.load(_SOURCE, "column_sums", _TYPES, defines, arch, _shared_bytes(dim), specific=True)


def column_sums(query: Tensor, keys: Tensor, lse: Tensor, sums: Tensor, skipped: int, together: int, scale2: float, dtype: str) -> None:
    """Write sums [Hq, S] fp32; arguments as those of `launch.column_sums`, skipped queries do not count, `together` heads take turns."""
    count, heads, dim = query.shape
    stored = keys.shape[1]
    values = (
        query.data_ptr(), keys.data_ptr(), lse.data_ptr(), sums.data_ptr(), count, stored, query.stride(0), query.stride(1), keys.stride(0),
        lse.stride(0), skipped, together, scale2,
    )  # fmt: skip
    grid = (-(-stored // KEYS) * together, heads // together, 1)
    stream = torch.cuda.current_stream(query.device).cuda_stream
    kernel(heads // keys.shape[0], dim, dtype, arch()).launch(grid, THREADS, _shared_bytes(dim), stream, values)


def _shared_bytes(dim: int) -> int:
    """Return what the ring takes: tiles, a number for each of their queries, two barriers a stage, and what brings the first tile to 1,024 bytes."""
    return STAGES * (TILE * dim * 2 + TILE * 4 + 16) + 1024
