"""Norms and the gated activation as one kernel each on an NVIDIA GPU (Triton), with the residual sum before a norm; in torch elsewhere.

Both forms round where the graph's own operators round: sums and products in the dtype of the activations, norms in fp32.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from trtkv.plugins.support import gpu_ready

_HAS_TRITON = find_spec("triton") is not None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize x [T, E] by its root mean square and scale by weight [E]."""
    if _takes(x):
        out = torch.empty_like(x)
        _kernels().norm(x, None, weight, eps, out, None)
        return out
    if x.dtype == torch.float32:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def add_rms_norm(x: Tensor, more: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of x + more, both [T, E], and the sum itself."""
    if _takes(x):
        out, total = torch.empty_like(x), torch.empty_like(x)
        _kernels().norm(x, more, weight, eps, out, total)
        return out, total
    total = x + more
    return rms_norm(total, weight, eps), total


def silu_product(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of gate and up side by side [T, 2 F]: [T, F]."""
    if _takes(gate_up):
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        _kernels().silu(gate_up, out)
        return out
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate).mul_(up)


def _takes(x: Tensor) -> bool:
    return _HAS_TRITON and gpu_ready(x.device) is None


def _kernels() -> Any:
    from trtkv.runtime import fused_kernels  # imports triton

    return fused_kernels
