"""Launching the fused scorer and selector for few rows, and the choice between it and the separate kernels of `launch.py`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from trtkv.errors import CapacityError
from trtkv.plugins._device import nvrtc
from trtkv.plugins._device.nvrtc import Float, Int, Kernel, Pointer
from trtkv.plugins.kv_select.launch import arch, stream

_HERE = Path(__file__).parent
_TYPES = (Pointer,) * 9 + (Int,) * 9 + (Float,)
_POOLS = {"softmax-mean": 0, "mean": 1, "max": 2, "softmax-max": 3}
_CLUSTERS = ((16, 6), (8, 14), (4, 30), (2, 66))  # blocks a row and how many rows of so many are resident on an H200
_THREADS, _RING_GROUPS, _BIN_BYTES = 512, 64, 2048  # of fused.cu: threads of a block, groups in flight, bytes of its histogram
_FUSED_ROWS, _FUSED_UNITS = 6, 32768
_WORTHWHILE_PAGES = 256  # of a block
SHARED_BYTES = 211 * 1024  # of a block, beside its static variables


def fused_select(
    q: Tensor, index: Tensor, meta: Tensor | None, table: Tensor, lens: Tensor, out: Tensor, *,
    page_size: int, unit: int, budget: int, sink: int, window: int, scale: float, pooling: str,
    cluster: int = 0, overlap: bool = False, pooled: Tensor | None = None, cache: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Choose units of every row in one launch: out [B, Hk, K + 1] int32 as `select_units` writes it.

    q [B, Hq D]; unit 1: index bits int32 [P, Hk, N / 32, D], meta fp16 [P, Hk, N / 32, 2, D]; else index the bounds [P, Hk, 2, D] or
    [P, Hk, N / unit, 2, D] in the dtype of q; table [B, M], lens [B] int32. pooled [B, Hk, U] fp32 receives the scores that were ranked. What is
    chosen of cache, keys and values [P, Hk, N, D], is fetched into the second-level cache for the attention behind.
    Raises CapacityError where the scores do not fit into shared memory.
    """
    heads, dim = index.shape[1], index.shape[-1]
    group, batch = q.shape[1] // dim // heads, lens.shape[0]
    units = table.shape[1] * page_size // unit
    cluster = cluster or fused_cluster(batch * heads, units, unit)
    room = _room(units, cluster)
    shared = shared_bytes(units, dim, group, pooling, unit, cluster)
    if shared > SHARED_BYTES:
        raise CapacityError(f"{units} units do not fit into {cluster} blocks", "Use the separate kernels, as choose_route says.")
    kernel = fused_kernel(dim, group, pooling, cluster, unit, q.dtype == torch.bfloat16, arch())
    values = (q.data_ptr(), index.data_ptr(), 0 if meta is None else meta.data_ptr(), table.data_ptr(), lens.data_ptr(), out.data_ptr(),
              0 if pooled is None else pooled.data_ptr(), *((one.data_ptr() for one in cache) if cache else (0, 0)), q.stride(0), table.stride(0),
              page_size // (32 if unit == 1 else unit), 0 if pooled is None else pooled.shape[2], budget, out.shape[2] - 1, sink, window, room,
              scale * 1.4426950408889634)  # fmt: skip
    kernel.launch((cluster, heads, batch), _THREADS, shared, stream(), values, cluster=cluster, overlap=overlap)


def choose_route(rows: int, units: int, dim: int, group: int, pooling: str, unit: int) -> str:
    """Say which kernels select for R rows of at most `units` units: "fused", where they fit and measured faster, or "separate".

    One launch wins while a row's latencies outweigh its arithmetic: fused kernels use sixteen multiprocessors a row, scorers all of them.
    """
    return "fused" if rows <= _FUSED_ROWS and units <= _FUSED_UNITS and fits(rows, units, dim, group, pooling, unit) else "separate"


def fused_cluster(rows: int, units: int, unit: int) -> int:
    """Choose blocks a row: as many as are resident at once, but for pages no more than have work."""
    most = next((c for c, limit in _CLUSTERS if rows <= limit), 1)
    while unit > 1 and most > 1 and units < most * _WORTHWHILE_PAGES:
        most //= 2
    return most


def shared_bytes(units: int, dim: int, group: int, pooling: str, unit: int, cluster: int) -> int:
    """Count the dynamic shared memory of a block that holds its share of so many units."""
    room = _room(units, cluster)
    ring = _RING_GROUPS * 6 * dim if unit == 1 else 0
    places = room // 8 if unit == 1 else room * 4
    if group == 1 or pooling in ("mean", "max"):
        return places + room * 4 + max(ring, cluster * _BIN_BYTES)
    return places + -(-2 * group * (room + 16) // 128) * 128 + max(ring, room * 4 + cluster * _BIN_BYTES)


def fits(rows: int, units: int, dim: int, group: int, pooling: str, unit: int) -> bool:
    """Say whether the fused kernel holds rows of so many units."""
    return units <= 1 << 20 and shared_bytes(units, dim, group, pooling, unit, fused_cluster(rows, units, unit)) <= SHARED_BYTES


def fused_kernel(dim: int, group: int, pooling: str, cluster: int, unit: int, bf16: bool, arch: str) -> Kernel:
    """Load the fused kernel for a shape."""
    page = 0 if unit == 1 else unit
    shape = {"D": dim, "GROUP_HEADS": group, "POOL": _POOLS[pooling], "CLUSTER": cluster, "PAGE": page}
    defines = (*(f"-D{name}={value}" for name, value in shape.items()), *(("-DBF16",) if bf16 else ()))
    return nvrtc.load(_HERE / "fused.cu", "fused_select", _TYPES, defines, arch, SHARED_BYTES)


def _room(units: int, cluster: int) -> int:
    chunks = -(-units // 32)
    share = -(-chunks // cluster)
    return -(-share // 4) * 128
