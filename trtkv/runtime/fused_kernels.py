"""The Triton kernels of `fused`: a program normalizes one token, or multiplies a stretch of one token's gate and up."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_STRETCH = 1024


@triton.jit
def _norm_kernel(x, more, weight, out, total, width, eps, MORE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + row + at, inside, 0.0)
    dtype = value.dtype
    if MORE:
        value = (value.to(tl.float32) + tl.load(more + row + at, inside, 0.0).to(tl.float32)).to(dtype)
        tl.store(total + row + at, value, inside)
    wide = value.to(tl.float32)
    scaled = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)).to(dtype)
    tl.store(out + row + at, scaled * tl.load(weight + at, inside, 0.0), inside)


@triton.jit
def _silu_kernel(gate_up, out, width, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + row * 2 * width + at, inside, 0.0)
    up = tl.load(gate_up + row * 2 * width + width + at, inside, 0.0)
    wide = gate.to(tl.float32)
    tl.store(out + row * width + at, (wide / (1 + tl.exp(-wide))).to(gate.dtype) * up, inside)


def norm(x: Tensor, more: Tensor | None, weight: Tensor, eps: float, out: Tensor, total: Tensor | None) -> None:
    """Write the norm of x [T, E] (plus more, whose sum goes to total) scaled by weight [E] to out; all contiguous."""
    tokens, width = x.shape
    block = triton.next_power_of_2(width)
    warps = min(16, max(1, block // 512))
    _norm_kernel[(tokens,)](
        x, x if more is None else more, weight, out, out if total is None else total, width, eps, MORE=more is not None, BLOCK=block, num_warps=warps
    )


def silu(gate_up: Tensor, out: Tensor) -> None:
    """Write the product of silu of the gate and up, side by side in gate_up [T, 2 F], to out [T, F]; both contiguous."""
    tokens, width = out.shape
    _silu_kernel[(tokens, triton.cdiv(width, _STRETCH))](gate_up, out, width, BLOCK=_STRETCH, num_warps=4)
