"""Attention of one sequence over an offloaded layer in torch: decode over frames, a prompt's chunk over everything stored."""

from __future__ import annotations

import torch
from torch import Tensor

from trtkv.plan import SelectPlan
from trtkv.plugins.kv_recall import op
from trtkv.plugins.kv_recall.store import Offload
from trtkv.plugins.rows import Row


def chosen_pages(store: Offload, row: Row, selection: Tensor | None, plan: SelectPlan | None, heads: int) -> Tensor:
    """Return the pages [Hk, n] int64 that a decoding sequence reads: of its selection [Hk, K + 1] int32, or all of them."""
    if selection is None or plan is None or row.stored <= plan.budget:
        return op.every_page(store, row.stored, heads)
    return selection[:, : min(plan.width, -(-row.stored // plan.unit))].long()


def read_pages(store: Offload, layer: int, row: Row, pages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Recall pages [Hk, n] of a decoding sequence: keys and values [Hk, n N, D], and the tokens [Hk, n N] int64 they are.

    Tokens behind the end, in the last page, repeat the last token.
    """
    size = store.shape.page_size
    places = op.recall(store, layer, row, pages, row.stored, ahead=False).repeat_interleave(size, 1)
    tokens = (pages[..., None] * size + torch.arange(size, device=pages.device)).flatten(1)
    keys, values = op.read_places(store, layer, row, places, tokens.clamp(max=row.stored - 1))
    return keys, values, tokens
