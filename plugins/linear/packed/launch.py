"""Launching products of few tokens with matrices of codes; not chosen by any executor until they are measured (`tests/gpu/check_packed.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from plugins.device import kernel
from plugins.device.dtypes import TRITON_DTYPES
from plugins.device.kernel import Constants, TritonKernel
from plugins.device.spec import Spec
from plugins.device.triton_aot import TritonSpec

MOST_TOKENS = 16
MOST_BLOCK = 128  # inputs that are multiplied at once
_PARAMETERS = {"x": "*real", "codes": "*u8", "scales": "*scale", "zeros": "*u8", "bias": "*real", "out": "*real", "tokens": "i32"}
PACKED = TritonKernel(Path(__file__).parent / "kernel.py", "packed_kernel", _PARAMETERS, aligned=("x", "codes", "scales", "out"))


Matrix = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class Shape:
    """A matrix of codes [rows, inner] (gated: gate above up): inputs that share a scale (0: all), fp8 or int4, and what is beside them."""

    rows: int
    inner: int
    group: int
    fp8: bool
    zeros: bool = False
    bias: bool = False
    gated: bool = False

    @property
    def width(self) -> int:
        """Results of a token."""
        return self.rows // 2 if self.gated else self.rows

    @property
    def block(self) -> int:
        """Inputs that are multiplied at once: a power of two that no group cuts through, at least 32; 0 where there is none."""
        unit = self.group or 1 << (self.inner - 1).bit_length()
        block = min(MOST_BLOCK, unit & -unit)
        return block if block >= 32 and (self.fp8 or self.inner % 2 == 0) else 0


def takes(x: Tensor, shape: Shape) -> bool:
    """Say whether the kernel is written for tokens x [T, K] and a matrix."""
    return x.shape[0] <= MOST_TOKENS and x.dtype in TRITON_DTYPES and x.is_contiguous() and shape.block > 0


def multiply(x: Tensor, matrix: Matrix, bias: Tensor | None, out: Tensor, shape: Shape, *, rows: int = 16) -> None:
    """Write x [T, K] times a matrix transposed, plus bias [N], to out [T, N]; all contiguous. A program computes `rows` results of a token.

    The matrix is its codes, fp8 [N, K] or uint8 [N, K / 2] with two in a byte, its scales and its zero points (None: 8), both [N, groups].
    """
    codes, scales, zeros = matrix
    constants = _constants(shape, rows)
    values = (x, codes.view(torch.uint8), scales, codes.view(torch.uint8) if zeros is None else zeros, x if bias is None else bias, out, len(x))
    grid = (-(-shape.width // rows), 1, 1)
    if x.is_cuda:
        from plugins.device.driver import arch

        kernel.launch(_variant(arch(), constants, x.dtype, scales.dtype), grid, values)
    else:
        kernel.run(PACKED, grid, values, constants)


def kernels(shape: Shape, dtype: torch.dtype, scale_dtype: torch.dtype, arch: str, *, rows: int = 16) -> Iterator[Spec]:
    """Yield the kernel of a matrix and its products' dtype."""
    if shape.block:
        yield _variant(arch, _constants(shape, rows), dtype, scale_dtype)


def _variant(arch: str, constants: Constants, dtype: torch.dtype, scale_dtype: torch.dtype) -> TritonSpec:
    return PACKED.variant(arch, constants, TRITON_DTYPES[dtype], types=(("scale", TRITON_DTYPES[scale_dtype]),))


def _constants(shape: Shape, rows: int) -> Constants:
    sizes = {"WIDTH": shape.width, "K": shape.inner, "GROUP": shape.group or shape.inner, "FP8": int(shape.fp8), "ZEROS": int(shape.zeros)}
    return {**sizes, "BIAS": int(shape.bias), "GATED": int(shape.gated), "BLOCK_M": MOST_TOKENS, "BLOCK_N": rows, "BLOCK_K": shape.block}
