"""Launching products of few tokens and norms; every tensor is given, nothing is allocated or synchronized."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from plugins.device import nvrtc
from plugins.device.driver import CACHING_PERCENT, arch
from plugins.device.nvrtc import Float, Int, Kernel, Pointer

MOST_TOKENS = 2  # beyond, the library's products are as fast
MOST_WIDTH = 16384  # of a norm alone
NORM_THREADS, SILU_THREADS = 512, 256
FEW_TOKENS = 64  # of a decode step: what stands between its kernels overlaps with them
_SOURCE = Path(__file__).parent / "linear.cu"
_GEMV, _NORM, _SILU = (Pointer,) * 7 + (Int, Int, Float), (Pointer,) * 5 + (Int, Float), (Pointer, Pointer, Int)
_ALONE = ("-DTOKENS=1", "-DWARPS=8", "-DROWS=1", "-DSPLIT=1", "-DUNROLL=1", "-DGATED=0", "-DNORM=0")
_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Form:
    """How a product is cut: matrix rows of a group of warps, warps that share them, loads on their way, and warps of a block."""

    rows: int
    split: int
    unroll: int
    warps: int = 8

    @property
    def block_rows(self) -> int:
        """Results that a block computes for a token."""
        return self.rows * (self.warps // self.split)


@dataclass(frozen=True, slots=True)
class Norm:
    """What stands in front of a product: the norm of x + more [T, K] (more may be None), scaled by weight [K]; total [T, K] gets the sum."""

    weight: Tensor
    eps: float
    more: Tensor | None = None
    total: Tensor | None = None


def takes(x: Tensor, width: int) -> bool:
    """Say whether the kernels are written for tokens x [T, K] of a GPU and a product of this width."""
    return x.shape[0] <= MOST_TOKENS and x.dtype in _DTYPES and x.shape[1] % 8 == 0 and width % 8 == 0 and x.is_contiguous()


@cache
def form_of(width: int, inner: int, gated: bool) -> Form:
    """Choose the form for a matrix [width, inner], as measured on an H200."""
    return Form(2, 8, 1) if gated else Form(4, 8, 1)


def gemv(
    x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor, *, gated: bool = False, norm: Norm | None = None, form: Form | None = None
) -> None:
    """Write x [T, K] times the matrix [N, K] transposed, plus bias [N], to out [T, N]; gated: matrix [2 N, K], silu of one half times the other.

    Sums are fp32; results are rounded once, gate, its silu and up each before they are multiplied. A norm's result is not rounded, its sum is.
    """
    tokens, inner = x.shape
    width = out.shape[1]
    form = form or form_of(width, inner, gated)
    kernel = gemv_kernel(form, tokens, gated, norm is not None, x.dtype == torch.float16, arch())
    tensors = (x, matrix, bias, out, *((norm.more, norm.weight, norm.total) if norm else (None,) * 3))
    values = (*(0 if one is None else one.data_ptr() for one in tensors), width, inner, norm.eps if norm else 0.0)
    kernel.launch((-(-width // form.block_rows), 1, 1), 32 * form.warps, 0, torch.cuda.current_stream().cuda_stream, values, overlap=True)


def norm(x: Tensor, more: Tensor | None, weight: Tensor, eps: float, out: Tensor, total: Tensor | None) -> None:
    """Write the norm of x [T, E] (plus more, whose sum goes to total) scaled by weight [E] to out; all contiguous."""
    tokens, width = x.shape
    tensors = (x, more, weight, out, total)
    values = (*(0 if one is None else one.data_ptr() for one in tensors), width, eps)
    kernel, stream = norm_kernel(x.dtype == torch.float16, arch()), torch.cuda.current_stream().cuda_stream
    kernel.launch((tokens, 1, 1), NORM_THREADS, 0, stream, values, overlap=tokens <= FEW_TOKENS)


def silu_gate(both: Tensor, out: Tensor) -> None:
    """Write silu of the gate times the up, side by side in both [T, 2 F], to out [T, F]; both contiguous."""
    tokens, width = out.shape
    kernel, stream = silu_kernel(both.dtype == torch.float16, arch()), torch.cuda.current_stream().cuda_stream
    blocks = (tokens, -(-width // (8 * SILU_THREADS)), 1)
    kernel.launch(blocks, SILU_THREADS, 0, stream, (both.data_ptr(), out.data_ptr(), width), overlap=tokens <= FEW_TOKENS)


def gemv_kernel(form: Form, tokens: int, gated: bool, normed: bool, half: bool, arch: str) -> Kernel:
    """Load a form's kernel for a number of tokens."""
    shape = {"TOKENS": tokens, "WARPS": form.warps, "ROWS": form.rows, "SPLIT": form.split, "UNROLL": form.unroll}
    flags = (f"-DGATED={int(gated)}", f"-DNORM={int(normed)}", *(("-DFP16",) if half else ()))
    # All blocks read the same tokens: from the second-level cache they would take as long as the matrix from memory.
    return nvrtc.load(_SOURCE, "gemv", _GEMV, (*(f"-D{name}={value}" for name, value in shape.items()), *flags), arch, 0, percent=CACHING_PERCENT)


def norm_kernel(half: bool, arch: str) -> Kernel:
    """Load the norm."""
    return nvrtc.load(_SOURCE, "rms_norm", _NORM, (*_ALONE, *(("-DFP16",) if half else ())), arch, 0)


def silu_kernel(half: bool, arch: str) -> Kernel:
    """Load the gated activation."""
    return nvrtc.load(_SOURCE, "silu_gate", _SILU, (*_ALONE, *(("-DFP16",) if half else ())), arch, 0)


def request(width: int, inner: int, dtype: torch.dtype, most_tokens: int, arch: str, *, gated: bool = False, normed: bool = False) -> None:
    """Load every kernel for a matrix [width, inner] (gated: [2 width, inner]) and up to so many tokens, the norm and the gated activation."""
    if dtype not in _DTYPES or width % 8 or inner % 8:
        return
    half = dtype == torch.float16
    norm_kernel(half, arch)
    silu_kernel(half, arch)
    for tokens in range(1, min(MOST_TOKENS, most_tokens) + 1):
        gemv_kernel(form_of(width, inner, gated), tokens, gated, normed, half, arch)
