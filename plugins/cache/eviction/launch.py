"""Launching compaction: compiled ahead of time on a GPU, in Triton's interpreter on a CPU. Kept lists are int32; nothing waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plugins.device import triton_aot
from plugins.device.driver import Kernel, arch

_SOURCE = Path(__file__).parent / "kernel.py"
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
SCORES = {"lag": 0, "local": 1, "norm": 2}
WARPS = 4
MOVE_WORDS = 4096  # of a block of the move, which all lie in registers
Constants = tuple[tuple[str, int], ...]


def move(data: Tensor, kept: Tensor, table: Tensor, first: int, placed: int = -1, shift: int = 0) -> None:
    """Move tokens kept [L, Hk, K] to first, first + 1, ... in the pages table [M] of data [L, P, H, N, ...], H a multiple of Hk.

    kept ascends and kept[..., j] >= first + j. placed >= 0 says that data holds positions: those of tokens from `placed` on are index + shift.
    """
    layers, pages, heads, size = data.shape[:4]
    words = data[0, 0, 0, 0].numel() * data.element_size() // 4
    constants = move_constants(heads, heads // kept.shape[1], words, placed >= 0)
    values = (data, kept, table, pages, size, first, kept.shape[2], placed, shift)
    _run("move_kernel", (heads, layers, 1), values, constants, lambda: move_kernel(constants, arch()), words=True)


def lag_choose(
    keys: Tensor, values: Tensor, table: Tensor, kept: Tensor, *, start: int, partitions: int, count: int, lag: int, score: str, value_weight: float
) -> None:
    """Write the tokens that stay of each of so many scored partitions of `lag` tokens behind `start`: the first ones of kept [L, Hk, K].

    keys, values [L, P, Hk, N, D], table [M]; the partition behind the last scored one is its reference. Scores are LagKV's ("lag", "local", "norm").
    """
    layers, pages, heads, size, dim = keys.shape
    spread = torch.empty(layers, heads, partitions, 2, lag, dtype=torch.float32, device=keys.device)
    spread_own, choose_own = spread_constants(heads, dim, lag, score), choose_constants(heads, lag, score)
    _run(
        "spread_kernel", (2 * partitions, heads, layers), (keys, values, table, spread, pages, size, start), spread_own,
        lambda: spread_kernel(spread_own, TYPES[keys.dtype], arch()),
    )  # fmt: skip
    _run(
        "choose_kernel", (partitions, heads, layers), (spread, kept, start, count, kept.shape[2], value_weight), choose_own,
        lambda: choose_kernel(choose_own, arch()),
    )  # fmt: skip


def remember(query: Tensor, seen: Tensor, slots: Tensor, ring: Tensor) -> None:
    """Keep a decode step's queries [B, Hq D] of sequences that have seen so many tokens [B] in their slots [B] of ring [Z, W, Hq, D]."""
    constants = remember_constants(ring.shape[1], query.shape[1])
    grid = (-(-query.shape[1] // 1024), len(query), 1)
    values = (query, seen, slots, ring, query.stride(0))
    _run("remember_kernel", grid, values, constants, lambda: remember_kernel(constants, TYPES[query.dtype], arch()))


def received(keys: Tensor, ring: Tensor, mass: Tensor, table: Tensor, *, stored: int, slot: int, place: int, scale: float) -> None:
    """Add what a sequence's query at a place of its slot pays to each of its stored tokens to mass [L, P, Hq, N], anew for the newest.

    keys [L, P, Hk, N, D], ring [L, Z, W, Hq, D], table [M].
    """
    layers, pages, heads, size, dim = keys.shape
    constants = received_constants(heads, ring.shape[3] // heads, dim, ring.shape[2])
    values = (keys, ring, mass, table, pages, ring.shape[1], size, stored, slot, place, scale)
    _run("received_kernel", (ring.shape[3], layers, 1), values, constants, lambda: received_kernel(constants, TYPES[keys.dtype], arch()))


def _run(name: str, grid: tuple[int, int, int], values: Sequence[Any], constants: Constants, load: Any, words: bool = False) -> None:
    first = values[0]
    if not first.is_cuda:
        from plugins.cache.eviction import kernel

        if words:
            values = (first.view(torch.int32), *values[1:])
        getattr(kernel, name)[grid](*values, **dict(constants))
        return
    plain = [one.data_ptr() if isinstance(one, Tensor) else one for one in values]
    triton_aot.launch(load(), grid, torch.cuda.current_stream(first.device).cuda_stream, plain)


def move_kernel(constants: Constants, arch: str) -> Kernel:
    """Load the move."""
    kinds = {"data": "*i32", "kept": "*i32", "table": "*i32"}
    return _load("move_kernel", kinds, ("num_pages", "page_size", "first", "count", "placed", "shift"), (), constants, ("data",), arch)


def spread_kernel(constants: Constants, dtype: str, arch: str) -> Kernel:
    """Load LagKV's score."""
    kinds = {"keys": f"*{dtype}", "values": f"*{dtype}", "table": "*i32", "spread": "*fp32"}
    return _load("spread_kernel", kinds, ("num_pages", "page_size", "start"), (), constants, ("keys", "values"), arch)


def choose_kernel(constants: Constants, arch: str) -> Kernel:
    """Load LagKV's choice."""
    return _load(
        "choose_kernel", {"spread": "*fp32", "kept": "*i32"}, ("start", "count", "kept_stride"), ("value_weight",), constants, ("spread",), arch
    )


def remember_kernel(constants: Constants, dtype: str, arch: str) -> Kernel:
    """Load what keeps queries."""
    kinds = {"query": f"*{dtype}", "seen": "*i32", "slots": "*i32", "ring": f"*{dtype}"}
    return _load("remember_kernel", kinds, ("query_stride",), (), constants, (), arch)


def received_kernel(constants: Constants, dtype: str, arch: str) -> Kernel:
    """Load what counts attention."""
    kinds = {"keys": f"*{dtype}", "ring": f"*{dtype}", "mass": "*fp32", "table": "*i32"}
    integers = ("num_pages", "num_slots", "page_size", "stored", "slot", "place")
    return _load("received_kernel", kinds, integers, ("scale",), constants, ("keys",), arch)


def _load(
    name: str, kinds: dict[str, str], integers: Sequence[str], floats: Sequence[str], constants: Constants, aligned: tuple[str, ...], arch: str
) -> Kernel:
    signature = (*kinds.items(), *((one, "i32") for one in integers), *((one, "fp32") for one in floats), *constants)
    return triton_aot.load(_SOURCE, name, signature, aligned, WARPS, arch)


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()


def move_constants(heads: int, share: int, words: int, positions: bool) -> Constants:
    """Constants of the move of `heads` rows of so many words a token, `share` of them a KV head."""
    width = _power(words)
    block = min(1024, MOVE_WORDS // width)
    return (("HEADS", heads), ("SHARE", share), ("WORDS", words), ("BLOCK_W", width), ("BLOCK", block), ("POSITIONS", int(positions)))


def spread_constants(heads: int, dim: int, lag: int, score: str) -> Constants:
    """Constants of LagKV's score."""
    return (("HEADS", heads), ("D", dim), ("BLOCK_D", _power(dim)), ("LAG", lag), ("BLOCK", 32), ("SCORE", SCORES[score]))


def choose_constants(heads: int, lag: int, score: str) -> Constants:
    """Constants of LagKV's choice."""
    return (("HEADS", heads), ("LAG", lag), ("BLOCK_L", _power(lag)), ("SOFTMAX", int(score != "norm")))


def remember_constants(window: int, size: int) -> Constants:
    """Constants of what keeps queries of `size` numbers."""
    return (("WINDOW", window), ("SIZE", size), ("BLOCK", 1024))


def received_constants(heads: int, group: int, dim: int, window: int) -> Constants:
    """Constants of what counts attention."""
    return (("HEADS", heads), ("GROUP", group), ("D", dim), ("BLOCK_D", _power(dim)), ("WINDOW", window), ("BLOCK", 64))
