"""Launching the append kernel of a decode step, in CUDA C++: one new token a sequence."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from plugins.device import kernel
from plugins.device.driver import arch
from plugins.device.kernel import CudaKernel
from plugins.device.nvrtc import CudaSpec
from plugins.device.spec import Float, Int, Pointer

SUMMARIES = (0, 1, 2)  # that it knows, as kernel.py numbers them: none, one-bit keys, minima and maxima
THREADS = 256  # few blocks, beside which the choice's find multiprocessors for themselves
APPEND = CudaKernel(Path(__file__).parent / "append.cu", "append_token", (Pointer,) * 15 + (Int,) * 5 + (Float,))


def launch(
    qkv: Tensor, positions: Tensor, starts: Tensor, lens: Tensor, table: Tensor, homes: Tensor, rope: Tensor, norms: tuple[Tensor, Tensor] | None,
    out: Tensor, keys: Tensor, values: Tensor, bits: Tensor | None, meta: Tensor | None, *,
    eps: float, group: int, summary: int, overlap: bool = False, early: bool = False, settled: bool = False, told: Tensor | None = None,
) -> None:  # fmt: skip
    """Append the one new token of every sequence; arguments as of `launch.launch`."""
    heads_kv, page_size, dim = keys.shape[1:]
    heads_q = qkv.shape[1] // dim - 2 * heads_kv
    spec = token_kernel(heads_q, heads_kv, dim, group, summary, norms is not None, keys.dtype == torch.bfloat16, arch())
    q_weight, k_weight = norms or (None, None)
    tensors = (qkv, positions, starts, lens, table, homes, rope, q_weight, k_weight, out, keys, values, bits, meta, told)
    numbers = (qkv.stride(0), table.stride(-2), page_size, int(settled), int(early), eps)
    grid = (-(-(heads_q + 2 * heads_kv) * lanes(dim) // THREADS), lens.shape[-1], 1)
    kernel.launch(spec, grid, (*tensors, *numbers), threads=THREADS, overlap=overlap)


def takes(summary: int) -> bool:
    """Say whether it keeps a summary, by its number in kernel.py."""
    return summary in SUMMARIES


def lanes(dim: int) -> int:
    """Return the threads of a head, as append.cu counts them."""
    return 32 if dim > 128 else 16 if dim > 64 else 8


def token_kernel(heads_q: int, heads_kv: int, dim: int, group: int, summary: int, norm: bool, bf16: bool, arch: str) -> CudaSpec:
    """Return the kernel for a shape; where nothing is summarized group does not matter."""
    shape = {"D": dim, "HEADS_Q": heads_q, "HEADS_KV": heads_kv, "THREADS": THREADS, "SUMMARY": summary, "GROUP": group, "NORM": int(norm)}
    return APPEND.variant(arch, **shape, BF16=bf16)
