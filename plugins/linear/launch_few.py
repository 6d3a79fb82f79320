"""Launching products of some tokens by matrix instructions; every tensor is given, nothing is allocated or synchronized."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from trtkv.plugins._device import nvrtc
from trtkv.plugins._device.driver import arch
from trtkv.plugins._device.nvrtc import Float, Int, Kernel, Pointer
from trtkv.plugins.linear.launch import Norm

_SOURCE = Path(__file__).parent / "few.cu"
_FEW = (Pointer,) * 7 + (Int, Int, Int, Float)
MOST_SHARED = 227 * 1024


@dataclass(frozen=True, slots=True)
class Few:
    """How a product is cut: tiles of sixteen matrix rows of a pass, pieces of 32 entries of a step, steps on their way, warps, blocks of a multiprocessor."""

    rows: int
    pieces: int
    ahead: int
    warps: int = 8
    resident: int = 2
    kept: bool = True
    fill: int = 1  # blocks of a multiprocessor in the grid
    cluster: int = 1
    own_ahead: int = 1
    ring: int = 0


def few(
    x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor, form: Few, *, gated: bool = False, norm: Norm | None = None
) -> None:
    tokens, inner = x.shape
    width = out.shape[1]
    tiles = -(-tokens // 8)
    kernel = few_kernel(form, tiles, gated, norm is not None, x.dtype == torch.float16, arch())
    tensors = (x, matrix, bias, out, *((norm.more, norm.weight, norm.total) if norm else (None,) * 3))
    values = (*(0 if one is None else one.data_ptr() for one in tensors), tokens, width, inner, norm.eps if norm else 0.0)
    blocks = min(form.fill * _multiprocessors(x.device) // form.cluster, width) * form.cluster
    shared, stream = shared_bytes(form, tiles, inner), torch.cuda.current_stream().cuda_stream
    kernel.launch((blocks, 1, 1), 32 * form.warps, shared, stream, values, cluster=form.cluster, overlap=True)


def shared_bytes(form: Few, tiles: int, inner: int) -> int:
    units, step = -(-(-(-inner // 32)) // form.cluster) * 32, 32 * form.pieces * form.warps
    ring = form.ring * form.ahead * form.rows * 2 * form.pieces * form.warps * 512
    return ring + 2 * form.warps * form.rows * tiles * 4 * 32 * 4 + (-(-units // step) * step * 16 * tiles if form.kept else 0)


def few_kernel(form: Few, tiles: int, gated: bool, normed: bool, half: bool, arch: str) -> Kernel:
    shape = {
        "TILES": tiles, "WARPS": form.warps, "ROWS": form.rows, "PIECES": form.pieces, "AHEAD": form.ahead, "RESIDENT": form.resident,
        "KEPT": int(form.kept), "OWN_AHEAD": form.own_ahead, "RING": form.ring, "CLUSTER": form.cluster, "GATED": int(gated), "NORM": int(normed),
    }  # fmt: skip
    return nvrtc.load(_SOURCE, "gemm_few", _FEW, (*(f"-D{name}={value}" for name, value in shape.items()), "-DFP16" if half else "-DBF16"), arch, MOST_SHARED)


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
