"""Launching FreeKV's choice of the query that selects: compiled ahead of time on a GPU, in Triton's interpreter on a CPU."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from plugins.device import triton_aot
from plugins.device.driver import Kernel, arch

_SOURCE = Path(__file__).parent / "speculate.py"
_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def speculate(query: Tensor, remembered: Tensor, slots: Tensor, taus: Tensor, tau: float, num_kv_heads: int) -> Tensor:
    """Return the query [B, Hq D] that each sequence selects with, and remember this step's; tensors as in `speculate.py`."""
    if not query.is_cuda:
        from plugins.select.speculate import speculate as interpreted

        return interpreted(query, remembered, slots, taus, tau, num_kv_heads)
    _, heads, dim = remembered.shape
    out = query.new_empty(query.shape)
    kernel = speculate_kernel(heads // num_kv_heads, dim, _TYPES[query.dtype], arch())
    values = (query.data_ptr(), remembered.data_ptr(), slots.data_ptr(), taus.data_ptr(), out.data_ptr(), query.stride(0), tau)
    triton_aot.launch(kernel, (query.shape[0], num_kv_heads, 1), torch.cuda.current_stream().cuda_stream, values)
    return out


def speculate_kernel(group: int, dim: int, dtype: str, arch: str) -> Kernel:
    """Load the kernel for a shape; dtype is Triton's name of what queries hold."""
    real = f"*{dtype}"
    power = lambda size: 1 << (size - 1).bit_length()  # noqa: E731
    signature: tuple[tuple[str, str | int | bool], ...] = (
        ("query", real), ("remembered", real), ("slots", "*i32"), ("taus", "*fp32"), ("out", real), ("query_stride", "i32"), ("tau", "fp32"),
        ("GROUP", group), ("D", dim), ("HEADS", power(group)), ("DIMS", power(dim)),
    )  # fmt: skip
    return triton_aot.load(_SOURCE, "_speculate_kernel", signature, (), 4, arch)
