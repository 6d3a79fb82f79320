"""From scores to a selection: pool the query heads of a group, take the exact best, add what every query reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trtkv.plan import SelectPlan
from trtkv.ranking import best, group_mean, span


def spread(forced: Tensor | None, heads: int) -> Tensor | None:
    """Repeat forced units [Hk, U] for the query heads of a group where each selects for itself: [heads, U]."""
    return None if forced is None else forced.repeat_interleave(heads // len(forced), 0)


def pool(scores: Tensor, num_kv_heads: int, scale: float, pooling: str) -> Tensor:
    """Let the query heads of a group agree: scores [Hq, U] fp32 to [Hk, U], or unchanged for pooling "none".

    The softmax runs over all units that have a summary, scaled as attention is, because sums of raw scores follow the loudest head.
    """
    if pooling == "none":
        return scores
    if pooling.startswith("softmax"):
        scores = torch.softmax(scores * scale, -1)
    return group_mean(scores, num_kv_heads, pooling.rpartition("-")[2])


def choose(plan: SelectPlan, scores: Tensor, stored: int, forced: Tensor | None = None) -> Tensor:
    """Return the units [H, K] int64, ascending, that a query reads of `stored` tokens, from pooled scores [H, U].

    Read are the units of sink and window, those after the last full group, the forced ones [H, U] bool, and the best of the others until
    the budget is used. The last unit may be an open page. Ties go to the lowest index.
    """
    units, closed = -(-stored // plan.unit), stored // plan.group * plan.group
    first = -(-plan.sink // plan.unit)
    last = max(first, min(closed, stored - plan.window) // plan.unit)
    wanted = plan.width - first - (units - last)
    heads = scores.shape[0]
    if wanted >= last - first:
        return span(0, units, scores).expand(heads, -1)
    middle = scores[:, first:last]
    if forced is not None:
        middle = middle.masked_fill(forced[:, first:last], float("inf"))
    ends = [span(0, first, scores).expand(heads, -1), best(middle, max(0, wanted)) + first, span(last, units, scores).expand(heads, -1)]
    return torch.cat(ends, 1)


def speculative_query(role: Any, query: Tensor, previous: Tensor | None, num_kv_heads: int) -> Tensor:
    """Return the query [Hq, D] that each head selects with: this step's where the role corrects, else the previous step's.

    The first decode step of a sequence has no previous query and uses its own.
    """
    if previous is None:
        return query
    own = role.corrected(query, previous, num_kv_heads).repeat_interleave(query.shape[0] // num_kv_heads)
    return torch.where(own[:, None], query, previous)
