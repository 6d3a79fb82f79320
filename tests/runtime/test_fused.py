from __future__ import annotations

import pytest
import torch

from trtkv.plugins import support
from trtkv.runtime import fused

TYPES = [torch.float32, torch.bfloat16, torch.float16]


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 3584), (5, 96), (300, 2048)], ids=str)
def test_kernels_are_as_exact_as_torch(shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator("cuda").manual_seed(shape[1])
    x, more, both = (torch.randn(shape[0], width, generator=generator, device="cuda").to(dtype) for width in (shape[1], shape[1], 2 * shape[1]))
    weight = torch.rand(shape[1], generator=generator, device="cuda").to(dtype)
    found = fused.rms_norm(x, weight, 1e-6), *fused.add_rms_norm(x, more, weight, 1e-6), fused.silu_product(both)
    monkeypatch.setattr(fused, "gpu_ready", lambda device: "switched off")
    plain = fused.rms_norm(x, weight, 1e-6), *fused.add_rms_norm(x, more, weight, 1e-6), fused.silu_product(both)
    total, (gate, up) = x.double() + more.double(), both.double().chunk(2, -1)
    norm = lambda value: value / (value.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()  # noqa: E731
    exact = norm(x.double()), norm(total), total, torch.nn.functional.silu(gate) * up
    for ours, theirs, true in zip(found, plain, exact, strict=True):
        assert error(ours, true) <= 2 * error(theirs, true)


def test_a_sum_before_a_norm_is_the_sum() -> None:
    x, more, weight = torch.randn(3, 64), torch.randn(3, 64), torch.rand(64)
    normed, total = fused.add_rms_norm(x, more, weight, 1e-6)
    assert torch.equal(total, x + more)
    assert torch.equal(normed, fused.rms_norm(x + more, weight, 1e-6))
    assert support.gpu_ready(x.device) is not None
