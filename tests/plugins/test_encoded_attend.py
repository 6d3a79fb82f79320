"""Attention over encoded pages: the kernel's own source, run on the CPU, against fp64 over what the pages stand for."""

from __future__ import annotations

import ctypes
from math import gcd
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.plugins.cuda_host import COMPILER, compile_kernel
from trtkv.plugins.encoded import launch, reference
from trtkv.plugins.encoded.formats import Format

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
SOURCE = Path(launch.__file__).parent / "attend.cu"
HEADS, PAGE = 2, 64


def make_pages(form: Format, dim: int, dtype: torch.dtype, pool: int) -> launch.Pages:
    """Fill pages and the rings of four slots at random: any codes but e4m3's NaN are codes."""
    meta = (pool, HEADS, PAGE)
    key_meta = meta if form.bits == 8 else (pool, HEADS, PAGE // form.key_group, dim)
    value_meta = meta if form.bits == 8 else (pool, HEADS, PAGE, dim // form.value_group)
    real = lambda shape: torch.randn(shape).to(dtype)  # noqa: E731
    scale = lambda shape: (torch.rand(shape) * (0.02 if form.bits == 8 else 0.5)).to(dtype)  # noqa: E731
    codes = lambda: torch.randint(0, 127 if form.bits == 8 else 256, (pool, HEADS, PAGE, dim * form.bits // 8), dtype=torch.uint8)  # noqa: E731
    ring = (4, HEADS, form.ring, dim)
    key_codes, value_codes = codes(), codes()
    if form.bits == 8:
        key_codes |= torch.randint(0, 2, key_codes.shape, dtype=torch.uint8) << 7
        value_codes |= torch.randint(0, 2, value_codes.shape, dtype=torch.uint8) << 7
    return launch.Pages(
        form, PAGE, real(ring), real(ring), key_codes, scale(key_meta), real(key_meta), value_codes, scale(value_meta), real(value_meta)
    )  # fmt: skip


def attend(run: Any, pages: launch.Pages, q: Tensor, table: Tensor, lens: Tensor, slots: Tensor, splits: int, warps: int) -> Tensor:
    """Launch the kernel for a batch."""
    form, dim, batch = pages.format, pages.dim, len(lens)
    group = q.shape[1] // dim // HEADS
    out = torch.full_like(q, torch.nan)
    scratch = launch.Scratch.allocate(batch, HEADS, group, dim, splits, torch.device("cpu"))
    tensors = (q, *pages.codes, pages.keys, pages.values, table, lens, slots, out, scratch.parts, scratch.tops, scratch.counters)
    numbers = (q.stride(0), out.stride(0), table.stride(0), PAGE, form.ring, form.residual, form.lag, int(form.together))
    run(*(x.data_ptr() for x in tensors), *numbers, dim**-0.5 * 1.4426950408889634, splits, HEADS, batch, warps * 32)
    assert not scratch.counters.any()
    return out


CASES = [  # bits, key group, residual, query heads a KV head, head dimension, dtype
    (2, 32, 128, 4, 128, torch.bfloat16),
    (2, 16, 48, 7, 64, torch.float16),
    (2, 32, 32, 2, 96, torch.float16),
    (2, 64, 64, 1, 256, torch.bfloat16),
    (4, 32, 64, 8, 96, torch.bfloat16),
    (4, 16, 32, 3, 128, torch.float16),
    (8, 1, 1, 5, 64, torch.bfloat16),
    (8, 1, 1, 4, 128, torch.float16),
]


@pytest.mark.parametrize(("bits", "key_group", "residual", "group", "dim", "dtype"), CASES)
def test_attention_reads_codes_as_they_are_stored(
    bits: int, key_group: int, residual: int, group: int, dim: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(bits + dim)
    form = Format(8, 1, dim, 1, together=True) if bits == 8 else Format(bits, key_group, gcd(key_group, dim), residual)
    warps = 2
    defines = launch.attend_defines(form, dim, group, dtype == torch.bfloat16, warps, launch.STAGES)
    library = compile_kernel(SOURCE, "attend_encoded", launch.ATTEND_TYPES, defines, tmp_path)
    run = library.run
    stored = [330, 1, residual + 1, 2 * residual + 40]
    pages = make_pages(form, dim, dtype, 4 * 8)
    table = torch.randperm(4 * 8).int().view(4, 8)
    lens, slots = torch.tensor(stored, dtype=torch.int32), torch.tensor([3, 0, 2, 1], dtype=torch.int32)
    q = torch.randn(4, HEADS * group * dim).to(dtype)
    out = attend(run, pages, q, table, lens, slots, 2, warps)
    errors, torchs = [], []
    for b, count in enumerate(stored):
        keys, values = reference.visible(pages, table[b], int(slots[b]), count)
        query = q[b].view(HEADS, group, dim)
        exact = torch.softmax(query.double() @ keys.double().transpose(1, 2) * dim**-0.5, -1) @ values.double()
        plain = scaled_dot_product_attention(query[None], keys.to(dtype)[None], values.to(dtype)[None])[0]
        errors.append((out[b].view_as(exact).double() - exact).norm() / exact.norm())
        torchs.append(max((plain.double() - exact).norm(), (exact.to(dtype).double() - exact).norm()) / exact.norm())
    assert float(torch.stack(errors).square().mean().sqrt()) <= 2 * float(torch.stack(torchs).square().mean().sqrt())
    one = attend(run, pages, q[:1], table[:1], lens[:1], slots[:1], 2, warps)
    assert torch.equal(one, out[:1])  # an answer does not depend on the batch
    ctypes.c_int.in_dll(library, "backwards").value = 1
    assert torch.equal(attend(run, pages, q, table, lens, slots, 2, warps), out)  # no thread waits for another without a barrier
    whole = attend(run, pages, q[:1], table[:1], lens[:1], slots[:1], 1, warps)
    assert (whole.float() - one.float()).norm() <= 2 * torchs[0] * one.float().norm()
