"""Products with matrices of codes: the kernel's source, run on the CPU, against fp64 of the weights that are meant."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from plugins.device import nvrtc
from plugins.linear.packed import launch
from plugins.linear.packed.launch import Form, Shape
from tests.plugins import cuda_on_cpu
from trtkv.runtime.packed import Codes

SHAPES = [
    Shape(96, 256, 0, fp8=True),
    Shape(72, 384, 128, fp8=True, scales=torch.bfloat16),
    Shape(88, 144, 0, fp8=True, gated=True),
    Shape(96, 256, 32, fp8=False),
    Shape(72, 192, 64, fp8=False, zeros=True, scales=torch.float16),
    Shape(96, 2048, 128, fp8=False, zeros=True, gated=True, scales=torch.bfloat16),
    Shape(48, 96, 0, fp8=False),
]
FORMS = {"chosen": None, "other": Form(4, 3, 1)}
on_cpu = pytest.mark.skipif(cuda_on_cpu.missing() is not None, reason=str(cuda_on_cpu.missing()))


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
    return Codes(codes.to(device), scales.to(shape.scales).to(device), None if zeros is None else zeros.to(device), shape.group)


def compare(shape: Shape, tokens: int, dtype: torch.dtype, device: str = "cpu", form: Form | None = None) -> tuple[float, float]:
    """Return the root mean square of the kernel's error, and of torch's with the weights made wide in the dtype."""
    codes, draw = matrix(shape, tokens, device), torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, shape.inner, generator=draw).to(dtype).to(device)
    bias = None if shape.gated else torch.randn(shape.rows, generator=draw).to(dtype).to(device)
    wide = codes.wide(slice(0, shape.rows))
    out = torch.full((tokens, shape.width), torch.nan, dtype=dtype, device=device)
    assert launch.takes(x, shape)
    launch.multiply(x, (codes.codes, codes.scales, codes.zeros), bias, out, shape, form=form)
    exact = torch.nn.functional.linear(x.double(), wide.double(), None if bias is None else bias.double())
    theirs = torch.nn.functional.linear(x, wide.to(dtype), bias)
    if shape.gated:
        exact, theirs = (torch.nn.functional.silu(gate) * up for gate, up in (one.chunk(2, 1) for one in (exact, theirs)))
    return _rms(out.double() - exact), _rms(theirs.double() - exact)


def _rms(value: Tensor) -> float:
    return float(value.square().mean().sqrt())


@on_cpu
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_as_good_as_torchs(shape: Shape, dtype: torch.dtype, form: Form | None, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_on_cpu.install(monkeypatch)
    for tokens in (1, 3, 16):
        ours, theirs = compare(shape, tokens, dtype, form=form)
        assert ours <= 2 * theirs


@on_cpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_code_of_eight_bits_is_its_number(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the finite e4m3 numbers, the least ones too, times one."""
    cuda_on_cpu.install(monkeypatch)
    codes = torch.tensor([one for one in range(256) if one & 127 != 127], dtype=torch.uint8)
    padded = torch.zeros(len(codes), 32, dtype=torch.uint8)
    padded[:, 0] = codes
    shape, out = Shape(len(codes), 32, 0, fp8=True), torch.empty(1, len(codes), dtype=dtype)
    x = torch.zeros(1, 32, dtype=dtype)
    x[0, 0] = 1
    launch.multiply(x, (padded, torch.ones(len(codes), 1), None), None, out, shape)
    assert torch.equal(out[0].float(), codes.view(torch.float8_e4m3fn).float())


@on_cpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [one for one in SHAPES if not one.gated], ids=str)
def test_weights_made_wide(shape: Shape, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_on_cpu.install(monkeypatch)
    codes, out = matrix(shape), torch.full((shape.rows, shape.inner), torch.nan, dtype=dtype)
    launch.widen((codes.codes, codes.scales, codes.zeros), out, shape)
    assert torch.equal(out, codes.wide(slice(None)).to(dtype))


def encode(device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Encode tokens, one of them zero: codes, scales, and what they are to be."""
    x = (
        (torch.randn(5, 2056, generator=torch.Generator().manual_seed(1)) * torch.tensor([[1.0], [1e-3], [300.0], [0.0], [7.0]]))
        .bfloat16()
        .to(device)
    )
    codes, scales = torch.empty(5, 2056, dtype=torch.float8_e4m3fn, device=device), torch.empty(5, device=device)
    launch.narrow(x, codes, scales)
    top = x.float().abs().amax(1)
    return codes, scales, (x.float() * (1 / torch.where(top > 0, top / 448, 1))[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)


@on_cpu
def test_tokens_are_encoded_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_on_cpu.install(monkeypatch)
    codes, scales, expected = encode("cpu")
    assert torch.equal(codes.float(), expected.float()) and scales[3] == 1.0


@pytest.mark.gpu
def test_tokens_are_encoded_on_a_gpu() -> None:
    codes, scales, expected = encode("cuda")
    steps = (codes.view(torch.uint8).int() - expected.view(torch.uint8).int()).abs()
    assert scales[3] == 1.0 and int(steps.max()) <= 1 and float((steps > 0).float().mean()) < 0.001  # 1 / scale is rounded differently


def test_what_the_kernel_is_not_written_for() -> None:
    x = torch.zeros(17, 64, dtype=torch.float16)
    assert not launch.takes(x, Shape(16, 64, 0, fp8=True)) and not launch.takes(x[:1].float(), Shape(16, 64, 0, fp8=True))
    assert not launch.takes(x[:1], Shape(16, 64, 8, fp8=False)) and launch.takes(x[:1], Shape(16, 64, 32, fp8=False))
    assert not Shape(16, 384, 192, fp8=False).taken and not Shape(16, 72, 0, fp8=True).taken and not Shape(16, 64, 0, fp8=True, gated=True).taken


@pytest.mark.skipif(nvrtc.missing() is not None, reason="needs NVRTC")
@pytest.mark.parametrize("sm", ["80", "89", "90", "120"])
def test_the_kernels_compile(sm: str, quick_compiler: None) -> None:
    shapes = (Shape(192, 256, 0, fp8=True, gated=True), Shape(192, 256, 128, fp8=False, zeros=True), Shape(192, 256, 32, fp8=False))
    every = [spec for shape in shapes for spec in launch.kernels(shape, torch.bfloat16, 16, sm)]
    assert [spec.compile().cubin[:4] for spec in every] == [b"\x7fELF"] * 9


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_on_a_gpu(shape: Shape, dtype: torch.dtype, form: Form | None) -> None:
    for tokens in (1, 2, 7, 16):
        ours, theirs = compare(shape, tokens, dtype, "cuda", form)
        assert ours <= 2 * theirs
