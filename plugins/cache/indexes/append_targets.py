"""Which summaries a layer's kernels store of closed groups of keys, and where."""

from __future__ import annotations

import torch
from torch import Tensor

from plugins.append.arguments import GroupSummary
from plugins.append.launch import FIER, KINDS, NOTHING
from plugins.cache.cache import Cache
from plugins.select.summary import summary_of


def words(cache: Cache, layer: int) -> Tensor:
    """Return a layer's one-bit keys as the kernels lay them out: int32 [P, Hk, N / 32, D], the bytes of `fier_bits`."""
    packed = cache.buffer("fier_bits", layer)
    return packed.view(torch.int32).view(*packed.shape[:2], packed.shape[2] // 32, -1)


def ranges(cache: Cache, layer: int) -> Tensor:
    """Return the lows and ranges of one-bit keys as the kernels lay them out: fp16 [P, Hk, N / 32, 2, D], the bytes of `fier_range`."""
    return cache.buffer("fier_range", layer).view(torch.float16)


def group_summary(cache: Cache, layer: int) -> GroupSummary:
    """Return what kernels store for a layer; kind `NONE` where it chooses nothing or chooses in torch."""
    summary, select = summary_of(cache.plan, layer), cache.plan.chooses(layer)
    if summary is None or select is None:
        return NOTHING
    kind = KINDS[summary.kept]
    if kind == FIER:
        return GroupSummary(select.group, kind, words(cache, layer), ranges(cache, layer))
    return GroupSummary(
        select.group, kind, None if summary.beside is None else cache.buffer(summary.beside, layer), cache.buffer(summary.vectors, layer)
    )
