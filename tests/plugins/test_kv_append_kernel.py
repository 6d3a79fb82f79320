"""The append kernel in Triton's interpreter against the op's reference and the layout's packing."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

pytest.importorskip("triton")

from trtkv.plugins.face import OpConfig
from trtkv.plugins.kv_append import kernel, reference
from trtkv.plugins.kv_select import fier_layout


@pytest.mark.parametrize(
    ("dim", "summary", "norm", "lengths", "new"),
    [
        (64, kernel.FIER, False, [33, 64], [1, 1]),
        (96, kernel.FIER, True, [70, 96], [40, 32]),
        (128, kernel.MINMAX, False, [64, 31, 65], [1, 1, 65]),
        (32, kernel.NONE, True, [5], [5]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_append_matches_reference(dim: int, summary: int, norm: bool, lengths: list[int], new: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(dim)
    heads_q, heads_kv, page_size, most = 4, 2, 64, 3
    config = OpConfig(heads_q, heads_kv, dim, dim**-0.5, 1e-6, 0, 0, "")
    total, batch = sum(new), len(new)
    table = torch.randperm(batch * most + 2, dtype=torch.int32)[: batch * most].view(batch, most)
    keys = torch.randn(batch * most + 2, heads_kv, page_size, dim).to(dtype)
    values, old = torch.randn_like(keys), None
    bits = torch.full((keys.shape[0], heads_kv, page_size // 32, dim), 77, dtype=torch.int32)
    meta = torch.full((keys.shape[0], heads_kv, page_size // 32, 2, dim), torch.nan, dtype=torch.float16 if summary == kernel.FIER else dtype)
    old = (keys.clone(), values.clone(), bits.clone(), meta.clone())
    qkv = torch.randn(total, (heads_q + 2 * heads_kv) * dim).to(dtype)
    positions = torch.randint(0, 50, (total,), dtype=torch.int32)
    angles = torch.rand(50, dim // 2) * 6
    rope = torch.cat([angles.cos(), angles.sin()], 1)
    norms = (torch.rand(dim).to(dtype), torch.rand(dim).to(dtype)) if norm else None
    starts = torch.tensor([0, *torch.tensor(new).cumsum(0)], dtype=torch.int32)
    out = torch.full((total, heads_q * dim), torch.nan, dtype=dtype)
    lens = torch.tensor(lengths, dtype=torch.int32)
    kernel.launch(
        qkv, positions, starts, lens, table, rope, norms, out, keys, values, bits, meta, eps=1e-6, group=32, summary=summary, longest=max(new)
    )
    want_q, want_k, want_v = reference.append(qkv, positions, rope, config, norms)
    tolerance = 2e-3 if dtype == torch.float16 else 1e-5
    torch.testing.assert_close(out, want_q.flatten(1), atol=tolerance, rtol=tolerance)
    written = torch.zeros(keys.shape[:3], dtype=torch.bool)
    closed = torch.zeros(bits.shape[:3], dtype=torch.bool)
    for b in range(batch):
        for t in range(new[b]):
            index = lengths[b] - new[b] + t
            page, slot = table[b, index // page_size], index % page_size
            written[page, :, slot] = True
            torch.testing.assert_close(keys[page, :, slot], want_k[starts[b] + t], atol=tolerance, rtol=tolerance)
            assert torch.equal(values[page, :, slot], want_v[starts[b] + t])
        for group in range((lengths[b] - new[b]) // 32, lengths[b] // 32):
            page, inside = table[b, group * 32 // page_size], group % (page_size // 32)
            closed[page, :, inside] = True
            stored = keys[page, :, inside * 32 : inside * 32 + 32]
            if summary == kernel.FIER:
                words, bounds = fier_layout.pack(stored)
                assert torch.equal(bits[page, :, inside], words)
                assert torch.equal(meta[page, :, inside], bounds)
            elif summary == kernel.MINMAX:
                assert torch.equal(meta[page, :, inside], torch.stack([stored.amin(1), stored.amax(1)], 1))
    assert torch.equal(keys[~written], old[0][~written])
    assert torch.equal(values[~written], old[1][~written])
    assert torch.equal(bits[~closed], old[2][~closed])
    assert meta[~closed].isnan().all()
