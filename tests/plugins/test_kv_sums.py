"""Column sums in Triton's interpreter against one query at a time."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

pytest.importorskip("triton")

from trtkv.plugins.compaction import observe
from trtkv.plugins.kv_sums import launch, reference
from trtkv.ranking import attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("count", "stored", "heads", "group", "dim", "window"),
    [
        (150, 150, 2, 2, 16, 0),
        (70, 333, 1, 3, 32, 0),
        (1, 130, 2, 1, 16, 0),
        (40, 150, 5, 2, 16, 0),
        (200, 200, 1, 2, 16, 32),
        (65, 65, 1, 1, 24, 7),
        (130, 140, 1, 1, 64, 300),
    ],
)
def test_sums_are_what_each_token_receives(count: int, stored: int, heads: int, group: int, dim: int, window: int, dtype: torch.dtype) -> None:
    made = torch.Generator().manual_seed(count + stored)
    query = (3 * torch.randn(count, heads * group, dim, generator=made)).to(dtype).to(DEVICE)
    keys = torch.randn(heads, stored, dim, generator=made).to(dtype).to(DEVICE)
    scale = dim**-0.5
    logits = torch.einsum("nhd,hsd->hns", query.double(), keys.double().repeat_interleave(group, 0)) * scale
    visible = torch.arange(stored, device=DEVICE) <= torch.arange(stored - count, stored, device=DEVICE)[:, None]
    lse = logits.masked_fill(~visible, float("-inf")).logsumexp(2).float()
    exact = reference.column_sums(query.cpu(), keys.cpu(), scale, min(window, count))
    found = launch.column_sums(query, keys, lse, scale, window)
    torch_form = attention(query[-window:] if window else query, keys, scale, visible[-window:] if window else visible).sum(1)
    bound = 2 * (torch_form.cpu().double() - exact).abs().max() + stored * 2.0**-22
    assert float((found.cpu().double() - exact).abs().max()) <= bound
    assert torch.equal(found, launch.column_sums(query, keys, lse, scale, window))


def test_the_torch_form_sums_in_blocks() -> None:
    made = torch.Generator().manual_seed(5)
    query, keys = torch.randn(300, 4, 8, generator=made), torch.randn(2, 420, 8, generator=made)
    exact = reference.column_sums(query, keys, 0.3)
    assert float((observe.column_sums(query, keys, 0.3).double() - exact).abs().max()) <= 300 * 2.0**-22
