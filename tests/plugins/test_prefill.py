"""A prompt's chunk by the library's kernels, whole and in parts."""

from __future__ import annotations

import pytest
import torch

from plugins.attend import prefill


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("new", "stored", "dim"), [(1024, 1024 + 3 * 512 + 100, 128), (1024, 1024, 64), (300, 2000, 96), (2048, 2048 + 512, 128)])
def test_a_chunk_sees_what_a_causal_mask_lets_it_see(new: int, stored: int, dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "BLOCK_TOKENS", 512)
    monkeypatch.setattr(prefill, "LEAST_SQUARE", 2048)
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


@pytest.mark.parametrize(
    ("new", "stored", "calls"),
    [
        (8, 8, ["cudnn 8 causal"]),
        (8, 45, ["cudnn 8 causal", "flash 5", "cudnn 16", "cudnn 16"]),
        (8, 40, ["cudnn 8 causal", "cudnn 16", "cudnn 16"]),
        (4, 45, ["flash 13 causal", "cudnn 16", "cudnn 16"]),
        (7, 45, ["flash 45 causal"]),
    ],
)
def test_parts_are_shared_out_and_merged(new: int, stored: int, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for the two libraries: every part once, squares causal, and the whole softmax in the end."""
    for name, value in (("BLOCK_TOKENS", 16), ("LEAST_QUERIES", 4), ("LEAST_SQUARE", 8)):
        monkeypatch.setattr(prefill, name, value)
    monkeypatch.setattr(prefill, "_takes_cudnn", lambda query: len(query) % prefill.LEAST_QUERIES == 0)
    made: list[str] = []

    def attend(
        name: str, causal: bool, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        made.append(f"{name} {keys.shape[2]}" + " causal" * causal)
        assert not (name == "cudnn" and causal) or query.shape[2] == keys.shape[2]
        logits = query @ keys.repeat_interleave(3, 1).transpose(2, 3) * scale
        hidden = torch.ones(logits.shape[2:], dtype=torch.bool).triu(keys.shape[2] - query.shape[2] + 1)
        logits = logits.masked_fill(hidden, -torch.inf) if causal else logits
        return logits.softmax(3) @ values.repeat_interleave(3, 1), logits.logsumexp(3)

    monkeypatch.setattr(prefill, "_flash", lambda q, k, v, scale, causal=True: attend("flash", causal, q, k, v, scale))
    monkeypatch.setattr(prefill, "_cudnn", lambda q, k, v, scale, causal=False: attend("cudnn", causal, q, k, v, scale))
    generator = torch.Generator().manual_seed(stored)
    query = torch.randn(new, 6, 16, generator=generator)
    keys, values = (torch.randn(2, stored, 16, generator=generator) for _ in range(2))
    found = prefill.attend_with_lse(query, keys, values, 0.25)
    assert made == calls
    given = [query.transpose(0, 1)[None], keys[None], values[None]]
    exact, whole = (attend("flash", True, *(x.to(dtype) for x in given), 0.25) for dtype in (torch.float64, torch.float32))
    for mine, right, plain in zip(found, (exact[0][0].transpose(0, 1), exact[1][0]), (whole[0][0].transpose(0, 1), whole[1][0]), strict=True):
        bound = 2 * float((plain.double() - right).abs().max()) + 4 * len(calls) * 2.0**-24 * float(right.abs().max())
        assert float((mine.double() - right).abs().max()) <= bound
