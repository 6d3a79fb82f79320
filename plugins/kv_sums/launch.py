"""Launching the column sums: compiled ahead of time on a GPU, in Triton's interpreter on a CPU."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from trtkv.plugins._device import triton_aot
from trtkv.plugins._device.driver import Kernel, arch

_SOURCE = Path(__file__).parent / "kernel.py"
_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_ALIGNED = ("query", "keys", "query_row", "query_head", "key_head")
LOG2_E = 1.4426950408889634


def column_sums(query: Tensor, keys: Tensor, lse: Tensor, scale: float, window: int = 0) -> Tensor:
    """Sum what each of S tokens receives from queries [n, Hq, D], the newest n tokens, over keys [Hk, S, D]: [Hq, S] fp32.

    lse [Hq, n] fp32 are the natural log-sum-exps that attention left; with a window only the last so many queries count.
    """
    count, heads, dim = query.shape
    stored, group = keys.shape[1], heads // keys.shape[0]
    assert keys.stride(1) == dim and keys.stride(2) == 1 and query.stride(2) == 1 and lse.stride(1) == 1, "rows must lie side by side"
    sums = torch.empty(heads, stored, dtype=torch.float32, device=query.device)
    block_q, block_k, _ = blocks(dim)
    skipped = max(0, count - window) if window else 0
    grid = (-(-stored // block_k), heads, 1)
    integers = (count, stored, query.stride(0), query.stride(1), keys.stride(0), lse.stride(0), skipped)
    if not query.is_cuda:
        from trtkv.plugins.kv_sums import kernel

        constants = {"GROUP": group, "D": dim, "BLOCK_D": 1 << (dim - 1).bit_length(), "BLOCK_Q": block_q, "BLOCK_K": block_k}
        kernel.sums_kernel[grid](query, keys, lse, sums, *integers, scale * LOG2_E, **constants)
        return sums
    pointers = [one.data_ptr() for one in (query, keys, lse, sums)]
    stream = torch.cuda.current_stream(query.device).cuda_stream
    triton_aot.launch(sums_kernel(group, dim, _TYPES[query.dtype], arch()), grid, stream, (*pointers, *integers, scale * LOG2_E))
    return sums


def blocks(dim: int) -> tuple[int, int, int]:
    """Queries and keys of a tile, and warps of a block."""
    return (64, 128, 4) if dim <= 128 else (64, 64, 4)


def sums_kernel(group: int, dim: int, dtype: str, arch: str) -> Kernel:
    """Load the kernel for a shape."""
    block_q, block_k, warps = blocks(dim)
    real, integers = f"*{dtype}", ("new", "stored", "query_row", "query_head", "key_head", "lse_head", "skipped")
    signature: tuple[tuple[str, str | int | bool], ...] = (
        ("query", real), ("keys", real), ("lse", "*fp32"), ("sums", "*fp32"), *((one, "i32") for one in integers), ("scale2", "fp32"),
        ("GROUP", group), ("D", dim), ("BLOCK_D", 1 << (dim - 1).bit_length()), ("BLOCK_Q", block_q), ("BLOCK_K", block_k),
    )  # fmt: skip
    return triton_aot.load(_SOURCE, "sums_kernel", signature, _ALIGNED, warps, arch)
