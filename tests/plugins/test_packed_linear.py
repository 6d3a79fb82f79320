"""Products with matrices of codes: the kernel's source, run on the CPU, against fp64 of the weights that are meant."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from plugins.device import triton_aot
from plugins.linear.packed import launch
from plugins.linear.packed.launch import Shape
from trtkv.runtime.packed import Codes

SHAPES = [
    Shape(96, 256, 0, fp8=True),
    Shape(80, 256, 128, fp8=True, bias=True),
    Shape(96, 160, 0, fp8=True, gated=True),
    Shape(96, 256, 32, fp8=False),
    Shape(72, 192, 64, fp8=False, zeros=True, bias=True),
    Shape(96, 256, 128, fp8=False, zeros=True, gated=True),
    Shape(48, 96, 0, fp8=False),
]


def matrix(shape: Shape, seed: int = 0, device: str = "cpu") -> Codes:
    """A random matrix of codes with scales that differ by more than the codes do."""
    draw = torch.Generator().manual_seed(seed)
    groups = -(-shape.inner // shape.group) if shape.group else 1
    scales = torch.rand(shape.rows, groups, generator=draw).add(0.1).mul(0.02)
    zeros = torch.randint(0, 16, (shape.rows, groups), generator=draw, dtype=torch.uint8) if shape.zeros else None
    if shape.fp8:
        codes = (torch.randn(shape.rows, shape.inner, generator=draw) * 40).clamp(-448, 448).to(torch.float8_e4m3fn)
        scales /= 40
    else:
        codes = torch.randint(0, 256, (shape.rows, shape.inner // 2), generator=draw, dtype=torch.uint8)
    return Codes(codes.to(device), scales.to(device), None if zeros is None else zeros.to(device), shape.group)


def compare(shape: Shape, tokens: int, dtype: torch.dtype, device: str = "cpu", rows: int = 16) -> tuple[float, float]:
    """Return the root mean square of the kernel's error, and of torch's with the weights made wide in the dtype."""
    codes, draw = matrix(shape, tokens, device), torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, shape.inner, generator=draw).to(dtype).to(device)
    bias = torch.randn(shape.rows, generator=draw).to(dtype).to(device) if shape.bias else None
    wide = codes.wide(slice(0, shape.rows))
    out = torch.full((tokens, shape.width), torch.nan, dtype=dtype, device=device)
    assert launch.takes(x, shape)
    launch.multiply(x, (codes.codes, codes.scales, codes.zeros), bias, out, shape, rows=rows)
    exact = torch.nn.functional.linear(x.double(), wide.double(), None if bias is None else bias.double())
    theirs = torch.nn.functional.linear(x, wide.to(dtype), bias)
    if shape.gated:
        exact, theirs = (torch.nn.functional.silu(gate) * up for gate, up in (one.chunk(2, 1) for one in (exact, theirs)))
    return _rms(out.double() - exact), _rms(theirs.double() - exact)


def _rms(value: Tensor) -> float:
    return float(value.square().mean().sqrt())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_as_good_as_torchs(shape: Shape, tokens: int, dtype: torch.dtype) -> None:
    ours, theirs = compare(shape, tokens, dtype)
    assert ours <= 2 * theirs


def test_every_code_of_eight_bits_is_its_number() -> None:
    """Each of the finite e4m3 numbers, the least ones too, times one."""
    codes = torch.tensor([one for one in range(256) if one & 127 != 127], dtype=torch.uint8)
    padded = torch.zeros(len(codes), 32, dtype=torch.uint8)
    padded[:, 0] = codes
    shape, out = Shape(len(codes), 32, 0, fp8=True), torch.empty(1, len(codes))
    x = torch.zeros(1, 32)
    x[0, 0] = 1
    launch.multiply(x, (padded, torch.ones(len(codes), 1), None), None, out, shape)
    assert torch.equal(out[0], codes.view(torch.float8_e4m3fn).float())


def test_what_the_kernel_is_not_written_for() -> None:
    x = torch.zeros(17, 64)
    assert not launch.takes(x, Shape(8, 64, 0, fp8=True))
    assert not launch.takes(x[:1], Shape(8, 64, 8, fp8=False)) and launch.takes(x[:1], Shape(8, 64, 32, fp8=False))


@pytest.mark.skipif(triton_aot.missing() is not None, reason="needs Triton")
@pytest.mark.parametrize("sm", ["80", "89", "90", "120"])
def test_the_kernels_compile(sm: str) -> None:
    shapes = (Shape(192, 256, 0, fp8=True, gated=True), Shape(192, 256, 128, fp8=False, zeros=True))
    every = [spec for shape in shapes for spec in launch.kernels(shape, torch.bfloat16, torch.float32, sm)]
    assert [binary.cubin[:4] == b"\x7fELF" for _, binary in triton_aot.compile_all(every)] == [True, True]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_on_a_gpu(shape: Shape, dtype: torch.dtype) -> None:
    for tokens in (1, 2, 7, 16):
        ours, theirs = compare(shape, tokens, dtype, "cuda")
        assert ours <= 2 * theirs
