from __future__ import annotations

import pytest
import torch

from trtkv.plugins.kv_attend import prefill

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("new", "stored", "dim"), [(1024, 1024 + 3 * 512 + 100, 128), (1024, 1024, 64), (300, 2000, 96), (2048, 2048 + 512, 128)])
def test_a_chunk_sees_what_a_causal_mask_lets_it_see(new: int, stored: int, dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "BLOCK_TOKENS", 512)
    generator = torch.Generator("cuda").manual_seed(stored)
    query = torch.randn(new, 14, dim, generator=generator, device="cuda").to(dtype)
    keys, values = (torch.randn(2, stored, dim, generator=generator, device="cuda").to(dtype) for _ in range(2))
    found = prefill.attend_chunk(query, keys, values, dim**-0.5)
    mask = torch.ones(new, stored, dtype=torch.bool, device="cuda").tril(stored - new)

    def attend(cast: torch.dtype) -> torch.Tensor:
        q, k, v = query.to(cast).transpose(0, 1), keys.to(cast).repeat_interleave(7, 0), values.to(cast).repeat_interleave(7, 0)
        weights = (q @ k.transpose(1, 2) * dim**-0.5).masked_fill(~mask, -torch.inf).softmax(-1)
        return (weights @ v).transpose(0, 1)

    exact = attend(torch.float64)
    error = lambda out: float((out.double() - exact).norm() / exact.norm())  # noqa: E731
    assert error(found) <= 2 * error(attend(dtype))
