"""Block-sparse attention of a prompt's chunk as its role defines it, in torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from plugins.cache.roles import load_prefill
from trtkv.plan import PrefillPlan


def attend_blocks(plan: PrefillPlan, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attend query [n, Hq, D], the newest n of S tokens, to the blocks of keys and values [Hk, S, D] that the role chooses: [n, Hq, D]."""
    return attend_chosen(query, keys, values, load_prefill(plan.meaning).blocks(query, keys, scale), plan.block, scale)


def attend_chosen(query: Tensor, keys: Tensor, values: Tensor, chosen: Tensor, block: int, scale: float) -> Tensor:
    """Do so with chosen blocks [Hq, Bq, Bk] bool of so many tokens; queries are masked block by block, which bounds the memory that it takes."""
    stored, start = keys.shape[1], keys.shape[1] - len(query)
    heads_first, out = query.transpose(0, 1), torch.empty_like(query)
    for which, read in enumerate(chosen.unbind(1), start // block):
        low, high = max(start, which * block), min(stored, (which + 1) * block)
        token, asked = (torch.arange(first, high, device=keys.device) for first in (0, low))
        mask = read.repeat_interleave(block, 1)[:, None, :high] & (token <= asked[:, None])
        own, seen = heads_first[None, :, low - start : high - start], (keys[None, :, :high], values[None, :, :high])
        answer = scaled_dot_product_attention(own, *seen, attn_mask=mask[None], scale=scale, enable_gqa=True)
        out[low - start : high - start] = answer[0].transpose(0, 1)
    return out
