"""Launching the column sums: compiled ahead of time on a GPU, by warp groups where it has them, in Triton's interpreter on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from plugins.cache.eviction.sums import launch_groups
from plugins.device import triton_aot
from plugins.device.driver import Kernel, arch

_SOURCE = Path(__file__).parent / "kernel.py"
_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_ALIGNED = ("query", "keys", "query_row", "query_head", "key_head")
LOG2_E = 1.4426950408889634
MOST_TOGETHER = 8


class Tile(NamedTuple):
    """Queries and keys of a tile, warps of a block."""

    queries: int
    keys: int
    warps: int


def column_sums(query: Tensor, keys: Tensor, lse: Tensor, scale: float, window: int = 0, tile: Tile | None = None) -> Tensor:
    """Sum what each of S tokens receives from queries [n, Hq, D], the newest n tokens, over keys [Hk, S, D]: [Hq, S] fp32.

    lse [Hq, n] fp32 are the natural log-sum-exps that attention left; with a window only the last so many queries count.
    """
    count, heads, dim = query.shape
    stored, group = keys.shape[1], heads // keys.shape[0]
    assert keys.stride(1) == dim and keys.stride(2) == 1 and query.stride(2) == 1 and lse.stride(1) == 1, "rows must lie side by side"
    sums = torch.empty(heads, stored, dtype=torch.float32, device=query.device)
    skipped = max(0, count - window) if window else 0
    together = _together(heads)
    if query.is_cuda and tile is None and count - skipped >= launch_groups.FEWEST and launch_groups.fits(dim, _TYPES[query.dtype], arch()):
        launch_groups.column_sums(query, keys, lse, sums, skipped, together, scale * LOG2_E, _TYPES[query.dtype])
        return sums
    tile = tile or tile_for(dim)
    grid = (-(-stored // tile.keys) * together, heads // together, 1)
    integers = (count, stored, query.stride(0), query.stride(1), keys.stride(0), lse.stride(0), skipped, together)
    if not query.is_cuda:
        from plugins.cache.eviction.sums import kernel

        kernel.sums_kernel[grid](query, keys, lse, sums, *integers, scale * LOG2_E, **dict(_constants(group, dim, tile)))
        return sums
    pointers = [one.data_ptr() for one in (query, keys, lse, sums)]
    stream = torch.cuda.current_stream(query.device).cuda_stream
    triton_aot.launch(sums_kernel(group, dim, _TYPES[query.dtype], arch(), tile), grid, stream, (*pointers, *integers, scale * LOG2_E))
    return sums


def tile_for(dim: int) -> Tile:
    """Return the tile that was fastest on an H200."""
    return Tile(64, 128, 4) if dim <= 128 else Tile(64, 64, 4)


def request(group: int, dim: int, dtype: str, arch: str) -> None:
    """Load the kernels that sums of a shape take, its dtype in Triton's words."""
    sums_kernel(group, dim, dtype, arch)
    if launch_groups.fits(dim, dtype, arch):
        launch_groups.kernel(group, dim, dtype, arch)


def sums_kernel(group: int, dim: int, dtype: str, arch: str, tile: Tile | None = None) -> Kernel:
    """Load Triton's kernel for a shape."""
    tile = tile or tile_for(dim)
    real, integers = f"*{dtype}", ("new", "stored", "query_row", "query_head", "key_head", "lse_head", "skipped", "together")
    signature: tuple[tuple[str, str | int | bool], ...] = (
        ("query", real), ("keys", real), ("lse", "*fp32"), ("sums", "*fp32"), *((one, "i32") for one in integers), ("scale2", "fp32"),
        *_constants(group, dim, tile),
    )  # fmt: skip
    return triton_aot.load(_SOURCE, "sums_kernel", signature, _ALIGNED, tile.warps, arch)


def _together(heads: int) -> int:
    """Return how many query heads take turns: few enough that blocks of one head still read the same queries at about the same time."""
    return max(one for one in range(1, MOST_TOGETHER + 1) if heads % one == 0)


def _constants(group: int, dim: int, tile: Tile) -> tuple[tuple[str, int], ...]:
    width = 1 << (dim - 1).bit_length()
    blocks = ("BLOCK_Q", tile.queries), ("BLOCK_K", tile.keys)
    return (("GROUP", group), ("D", dim), ("BLOCK_D", width), *blocks)
