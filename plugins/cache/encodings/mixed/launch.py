"""Launching the eviction from two kinds of pages: compiled ahead of time on a GPU, in Triton's interpreter on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plugins.cache.eviction.launch import TYPES, WARPS, Constants
from plugins.device import triton_aot
from plugins.device.driver import Kernel, arch

if TYPE_CHECKING:
    from plugins.cache.encodings.mixed.pool import MixedPool

_SOURCE = Path(__file__).parent / "kernel.py"
BLOCK_ELEMENTS = 4096  # tokens times channels of a block
_INTEGERS = ("count", "page_size", "table_stride", "first", "num_layers")


def rewrite(pool: MixedPool, first: int, counts: Tensor, table: Tensor, chosen: Tensor) -> None:
    """Keep tokens chosen [n, Hk, K] int32 of layers first, first + 1, ... of a sequence.

    counts [n, 4] int32 and table [2 L, M] int32 are as the kernel says.
    """
    layers, heads, count = chosen.shape
    keys = pool.pools["keys"]
    size, dim, wide = keys.shape[2], keys.shape[3], keys.element_size()
    out = torch.empty(layers, heads, count, dim, dtype=keys.dtype, device=keys.device)
    scales, positions = (torch.empty(layers, heads, count, dtype=dtype, device=keys.device) for dtype in (keys.dtype, torch.int32))
    for part in ("key", "value"):
        constants = rewrite_constants(heads, dim, wide, part == "key")
        block = dict(constants)["BLOCK"]
        pools = [pool.pools[name] for name in (f"{part}s", f"{part}_codes", f"{part}_scale", "positions")]
        beside = (out, out.view(torch.uint8), scales, positions, count, size, table.shape[1], first, pool.layers)
        grid = (-(-count // block), heads, layers)
        _run("gather_kernel", grid, (*pools, chosen.contiguous(), counts, table, *beside), constants)
        _run("scatter_kernel", grid, (*pools, counts, table, *beside), constants)


def _run(name: str, grid: tuple[int, int, int], values: tuple[Tensor | int, ...], constants: Constants) -> None:
    first = values[0]
    assert isinstance(first, Tensor)
    if not first.is_cuda:
        from plugins.cache.encodings.mixed import kernel

        getattr(kernel, name)[grid](*values, **dict(constants))
        return
    plain = [one.data_ptr() if isinstance(one, Tensor) else one for one in values]
    loaded = rewrite_kernel(name, constants, TYPES[first.dtype], arch())
    triton_aot.launch(loaded, grid, torch.cuda.current_stream(first.device).cuda_stream, plain)


def rewrite_kernel(name: str, constants: Constants, dtype: str, arch: str) -> Kernel:
    """Load one of the two kernels."""
    pools = {"rows": f"*{dtype}", "codes": "*u8", "scales": f"*{dtype}", "positions": "*i32"}
    lists = {"chosen": "*i32", "counts": "*i32", "table": "*i32"}
    if name == "scatter_kernel":
        del lists["chosen"]
    beside = {f"out{'_' + one if one != 'rows' else ''}": kind for one, kind in pools.items()}
    signature = (*pools.items(), *lists.items(), *beside.items(), *((one, "i32") for one in _INTEGERS), *constants)
    return triton_aot.load(_SOURCE, name, signature, ("rows", "codes", "out", "out_codes"), WARPS, arch)


def rewrite_constants(heads: int, dim: int, wide: int, positions: bool) -> Constants:
    """Constants of both kernels for so many KV heads, channels and bytes an element."""
    width = 1 << (dim - 1).bit_length()
    return (("HEADS", heads), ("D", dim), ("BLOCK_D", width), ("WIDE", wide), ("BLOCK", BLOCK_ELEMENTS // width), ("POSITIONS", int(positions)))
