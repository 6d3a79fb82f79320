"""KvSelect, by sorting."""

from __future__ import annotations

import torch
from torch import Tensor

from plugins.config import OpConfig
from trtkv.plan import SelectPlan


def select(scores: Tensor, stored: int, plan: SelectPlan, config: OpConfig) -> list[list[int]] | None:
    """Return for every head the ascending units that a query reads, from scores [Hq, U] of the summarized units; None reads everything.

    Read are the units of the first `sink` and last `window` tokens, those after the last full group, and then the best of the rest
    until the budget is used, or until all read hold the share `top_p` of the pooled softmax; of equal scores the lower index wins.
    """
    if stored <= plan.budget:
        return None
    every = range(-(-stored // plan.unit))
    closed = stored // plan.group * plan.group
    free = [unit for unit in every if unit * plan.unit >= plan.sink and (unit + 1) * plan.unit <= min(closed, stored - plan.window)]
    forced = [unit for unit in every if unit not in set(free)]
    chosen = []
    for row in _pooled(scores, plan, config).tolist():
        best = sorted(free, key=lambda unit: (-row[unit], unit))[: plan.width - len(forced)]
        if plan.top_p is not None:
            masses = row if plan.pooling.startswith("softmax") else (torch.tensor(row) * config.scale).softmax(0).tolist()
            best = _until(plan.top_p, masses, forced, best)
        chosen.append(sorted(forced + best))
    return chosen


def _until(share: float, masses: list[float], forced: list[int], best: list[int]) -> list[int]:
    """Take the best, one by one, until they and the forced ones hold a share of all masses [U]."""
    taken, enough = 0, share * sum(masses)
    while taken < len(best) and sum(masses[unit] for unit in (*forced, *best[:taken]) if unit < len(masses)) < enough:
        taken += 1
    return best[:taken]


def _pooled(scores: Tensor, plan: SelectPlan, config: OpConfig) -> Tensor:
    if plan.pooling == "none":
        return scores
    groups = scores.reshape(config.num_kv_heads, -1, scores.shape[1])
    if plan.pooling in ("softmax-mean", "softmax-max"):
        groups = (groups * config.scale).softmax(2)
    return groups.max(1).values if plan.pooling in ("max", "softmax-max") else groups.mean(1)
