"""Attention of an observation window and what else the meanings of several roles share."""

from __future__ import annotations

import torch
from torch import Tensor

from trtkv.plan import CacheView
from trtkv.ranking import attention, best, span


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


def window_sums(view: CacheView, window: int) -> Tensor:
    """Return what each of a view's stored tokens received from the newest W queries [Hq, S] fp32, by a kernel where the view has one."""
    counted = view.received(window)
    return window_attention(view, window).sum(1) if counted is None else counted


def recent_and_best(scores: Tensor, count: int, recent: int) -> tuple[Tensor, ...]:
    """Keep the last `recent` of S tokens and the `count` highest scores [Hk, S] before them: Hk ascending index tensors."""
    heads, stored = scores.shape
    past = stored - recent
    last = span(past, stored, scores).expand(heads, -1)
    return tuple(torch.cat([best(scores[:, :past], count), last], 1))
