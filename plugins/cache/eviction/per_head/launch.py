"""Launching compaction of single heads: compiled ahead of time on a GPU, in Triton's interpreter on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plugins.cache.eviction.launch import MOVE_WORDS, TYPES, WARPS, Constants
from plugins.device import triton_aot
from plugins.device.driver import Kernel, arch

_SOURCE = Path(__file__).parent / "kernel.py"
ROW = 5  # integers that describe a row of the move


def move(data: Tensor, table: Tensor, rows: Tensor, kept: Tensor | None, *, positions: bool) -> None:
    """Move tokens within the pages table [R, M] of data [P, H, N, ...]; rows [R, ROW] and kept [all] int32 as the kernel says."""
    heads, size = data.shape[1:3]
    words = data[0, 0, 0].numel() * data.element_size() // 4
    constants = move_constants(heads, words, positions, kept is not None)
    values = (data if data.is_cuda else data.view(torch.int32), rows if kept is None else kept, table, rows, size, table.shape[1])
    _run("move_kernel", (len(rows), heads, 1), values, constants, lambda: move_kernel(constants, arch()))


def received(keys: Tensor, query: Tensor, mass: Tensor, table: Tensor, lens: Tensor, scale: float) -> None:
    """Add what queries [L, Hq, D] pay to the stored tokens of table [L Hk, M], lens [L Hk] to mass [P, G, N], anew for each head's newest token."""
    layers, heads_q, dim = query.shape
    heads = len(lens) // layers
    constants = received_constants(heads, heads_q // heads, dim)
    values = (keys, query, mass, table, lens, table.shape[1], keys.shape[2], query.stride(0), scale)
    _run("received_kernel", (heads_q, layers, 1), values, constants, lambda: received_kernel(constants, TYPES[keys.dtype], arch()))


def _run(name: str, grid: tuple[int, int, int], values: Sequence[Any], constants: Constants, load: Callable[[], Kernel]) -> None:
    if not values[0].is_cuda:
        from plugins.cache.eviction.per_head import kernel

        getattr(kernel, name)[grid](*values, **dict(constants))
        return
    plain = [one.data_ptr() if isinstance(one, Tensor) else one for one in values]
    triton_aot.launch(load(), grid, torch.cuda.current_stream(values[0].device).cuda_stream, plain)


def move_kernel(constants: Constants, arch: str) -> Kernel:
    """Load the move."""
    kinds = dict.fromkeys(("data", "kept", "table", "rows"), "*i32")
    signature = (*kinds.items(), ("page_size", "i32"), ("table_stride", "i32"), *constants)
    return triton_aot.load(_SOURCE, "move_kernel", signature, ("data",), WARPS, arch)


def received_kernel(constants: Constants, dtype: str, arch: str) -> Kernel:
    """Load what counts attention."""
    kinds = {"keys": f"*{dtype}", "query": f"*{dtype}", "mass": "*fp32", "table": "*i32", "lens": "*i32"}
    signature = (*kinds.items(), *((one, "i32") for one in ("table_stride", "page_size", "query_layer")), ("scale", "fp32"), *constants)
    return triton_aot.load(_SOURCE, "received_kernel", signature, ("keys",), WARPS, arch)


def move_constants(heads: int, words: int, positions: bool, lists: bool) -> Constants:
    """Constants of the move of `heads` times so many words a token."""
    width = 1 << (words - 1).bit_length()
    block = min(1024, MOVE_WORDS // width)
    return (("HEADS", heads), ("WORDS", words), ("BLOCK_W", width), ("BLOCK", block), ("POSITIONS", int(positions)), ("LISTS", int(lists)))


def received_constants(heads: int, group: int, dim: int) -> Constants:
    """Constants of what counts attention."""
    return (("HEADS", heads), ("GROUP", group), ("D", dim), ("BLOCK_D", 1 << (dim - 1).bit_length()), ("BLOCK", 64))
