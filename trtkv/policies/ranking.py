"""What the meanings of several roles share: exact ranking with fixed ties, attention of an observation window, head groups."""

from __future__ import annotations

import torch
from torch import Tensor

from trtkv.plan import CacheView


def best(scores: Tensor, count: int) -> Tensor:
    """Return the ascending indices [H, count] int64 of the highest scores [H, U]; of equal scores the lowest index wins."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return order[..., :count].sort(-1).values


def span(start: int, stop: int, like: Tensor) -> Tensor:
    """Return the indices start, ..., stop - 1 int64 on the device of `like`."""
    return torch.arange(start, max(start, stop), device=like.device)


def group_mean(x: Tensor, num_kv_heads: int, pooling: str = "mean") -> Tensor:
    """Let the query heads of a group agree: x [Hq, ...] to [Hk, ...] by their mean or maximum."""
    grouped = torch.unflatten(x, 0, (num_kv_heads, -1))
    return grouped.amax(1) if pooling == "max" else grouped.mean(1)


def attention(queries: Tensor, keys: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """Return attention probabilities [Hq, W, S] fp32 of queries [W, Hq, D] over keys [Hk, S, D]; mask [W, S] or [Hk, 1, W, S], True is visible."""
    heads = keys.shape[0]
    grouped = torch.unflatten(queries.float().transpose(0, 1), 0, (heads, -1))
    scores = grouped @ keys.float()[:, None].transpose(2, 3) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1).flatten(0, 1)


def window_attention(view: CacheView, window: int) -> Tensor:
    """Return the attention [Hq, W, S] fp32 of the newest W queries over a view's stored tokens, causal inside the window.

    W is `window`, or what there is; a view may hold more queries than one role asked for.
    """
    assert view.queries is not None, "the role reads queries that it does not ask for"
    queries = view.queries[-window:]
    count = queries.shape[0]
    asked = span(view.at.seen - count, view.at.seen, view.keys)
    stored = view.positions[:, None, None]
    return attention(queries, view.keys, view.scale, (stored >= 0) & (stored <= asked[:, None]))


def recent_and_best(scores: Tensor, count: int, recent: int) -> tuple[Tensor, ...]:
    """Keep the last `recent` of S tokens and the `count` highest scores [Hk, S] before them: Hk ascending index tensors."""
    heads, stored = scores.shape
    past = stored - recent
    last = span(past, stored, scores).expand(heads, -1)
    return tuple(torch.cat([best(scores[:, :past], count), last], 1))
