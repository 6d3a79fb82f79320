"""Launching products of some tokens by matrix instructions; every tensor is given, nothing is allocated or synchronized."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from trtkv.plugins._device import nvrtc
from trtkv.plugins._device.driver import arch
from trtkv.plugins._device.nvrtc import Int, Kernel, Pointer
from trtkv.plugins._device.spec import shared_limit
from trtkv.plugins.linear.launch import DTYPES, MOST_TOKENS, WIDE

TILE = 8  # tokens of a matrix instruction
MOST_TILES = 1  # two take as long as the library's products
_SOURCE = Path(__file__).parent / "few.cu"
_FEW = (Pointer,) * 4 + (Int, Int, Int)


@dataclass(frozen=True, slots=True)
class Few:
    """How a product is cut: tiles of sixteen matrix rows and pieces of 32 of their entries that a warp takes at once, and such steps on their way.

    resident blocks fit on a multiprocessor, `fill` of them share its results; kept tokens lie in shared memory.
    """

    rows: int
    pieces: int
    ahead: int
    warps: int
    resident: int
    kept: bool = False
    fill: int = 1

    def shared_bytes(self, tiles: int, inner: int) -> int:
        """Return the bytes of dynamic shared memory of a block, for so many tiles of tokens [T, inner]."""
        step = 32 * self.pieces * self.warps
        sums, kept = 2 * self.warps * self.rows * tiles * 512, -(-inner // step) * step * 2 * TILE * tiles if self.kept else 0
        return sums + kept


def tiles_of(tokens: int) -> int:
    """Return how many tiles of tokens a product takes."""
    return -(-tokens // TILE)


def prefers(tokens: int) -> bool:
    """Say whether this kernel is the fastest for so many tokens, as measured on an H200."""
    return MOST_TOKENS < tokens <= MOST_TILES * TILE


@cache
def form_of(width: int, inner: int, gated: bool, tiles: int, arch: str) -> Few:
    """Choose the form for a matrix [width, inner], as measured on an H200; the same for all numbers of tokens of a tile."""
    form = Few(2, 2, 2, 16, 1, kept=gated or width >= WIDE)
    return form if form.shared_bytes(tiles, inner) <= shared_limit(arch) else Few(1, 2, 2, 8, 1)


def few(x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor, *, gated: bool = False, form: Few | None = None) -> None:
    """Write x [T, K] times the matrix [N, K] transposed, plus bias [N], to out [T, N]; gated: matrix [2 N, K], silu of one half times the other.

    Sums are fp32; results are rounded once, gate, its silu and up each before they are multiplied. A token's result depends neither on the others
    nor, up to a multiple of eight, on how many they are.
    """
    tokens, inner = x.shape
    width, tiles = out.shape[1], tiles_of(tokens)
    form = form or form_of(width, inner, gated, tiles, arch())
    kernel = few_kernel(form, inner, tiles, gated, x.dtype == torch.float16, arch())
    values = (*(0 if one is None else one.data_ptr() for one in (x, matrix, bias, out)), tokens, width, inner)
    blocks, stream = min(form.fill * _multiprocessors(x.device), width), torch.cuda.current_stream().cuda_stream
    kernel.launch((blocks, 1, 1), 32 * form.warps, form.shared_bytes(tiles, inner), stream, values, overlap=True)


def few_kernel(form: Few, inner: int, tiles: int, gated: bool, half: bool, arch: str) -> Kernel:
    """Load a form's kernel for a number of tiles of tokens."""
    shape = {
        "TILES": tiles, "WARPS": form.warps, "ROWS": form.rows, "PIECES": form.pieces, "AHEAD": form.ahead, "RESIDENT": form.resident,
        "KEPT": int(form.kept), "GATED": int(gated),
    }  # fmt: skip
    defines = (*(f"-D{name}={value}" for name, value in shape.items()), "-DFP16" if half else "-DBF16")
    return nvrtc.load(_SOURCE, "gemm_few", _FEW, defines, arch, form.shared_bytes(tiles, inner))


def request(width: int, inner: int, dtype: torch.dtype, most_tokens: int, arch: str, *, gated: bool = False) -> None:
    """Load every kernel for a matrix [width, inner] (gated: [2 width, inner]) and up to so many tokens."""
    if dtype not in DTYPES or width % 8 or inner % 8:
        return
    for tiles in sorted({tiles_of(tokens) for tokens in range(1, most_tokens + 1) if prefers(tokens)}):
        few_kernel(form_of(width, inner, gated, tiles, arch), inner, tiles, gated, dtype == torch.float16, arch)


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
