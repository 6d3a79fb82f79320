"""KvSelect in torch: pool the scores of a group's query heads, take the exact best, add what every query reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trtkv.plan import SelectPlan
from trtkv.plugins.face import OpConfig
from trtkv.plugins.kv_select import indexes
from trtkv.plugins.session import Session

DENSE = -1


def select(session: Session, layer: int, config: OpConfig, inputs: Sequence[Tensor], out: Tensor) -> None:
    """Choose units for every sequence of the step.

    inputs: rotated queries [T, Hq D] and tensors that `Session.begin_step` already carries. Writes out [B, H, K + 1] int32 (H is Hk, or Hq
    when every query head selects for itself): units in ascending order and, last, how many they are, -1 where the sequence is read whole:
    in prefill, and while it is no longer than the budget. Unused places hold -1 too.
    """
    plan = session.plan.select[layer]
    assert plan is not None, f"layer {layer} selects nothing"
    index = indexes.find(plan)
    out.fill_(DENSE)
    for b, row in enumerate(session.step(layer).rows):
        if row.new != 1 or row.stored <= plan.budget:
            continue
        query = inputs[0][row.start].unflatten(0, (config.num_q_heads, config.head_dim))
        pooled = pool(index.score(session, layer, plan, row, query), config.num_kv_heads, config.scale, plan.pooling)
        chosen = choose(pooled, row.stored, plan)
        out[b, :, : chosen.shape[1]] = chosen
        out[b, :, -1] = chosen.shape[1]


def pool(scores: Tensor, num_kv_heads: int, scale: float, pooling: str) -> Tensor:
    """Let the query heads of a group agree: scores [Hq, U] fp32 to [Hk, U], or unchanged for pooling "none".

    The softmax runs over all units that have a summary, scaled as attention is, because sums of raw scores follow the loudest head.
    """
    if pooling == "none":
        return scores
    grouped = scores.unflatten(0, (num_kv_heads, -1))
    if pooling.startswith("softmax"):
        grouped = torch.softmax(grouped * scale, -1)
    return grouped.amax(1) if pooling.endswith("max") else grouped.mean(1)


def choose(scores: Tensor, stored: int, plan: SelectPlan) -> Tensor:
    """Return the units [H, K] int64, ascending, that a sequence of `stored` tokens reads: forced ones and the best by scores [H, U].

    Forced are the units of sink and window and those behind the last full group. Ties go to the lowest index.
    """
    units = -(-stored // plan.unit)
    closed = stored // plan.group * plan.group
    first = -(-plan.sink // plan.unit)
    last = max(first, min(closed, stored - plan.window) // plan.unit)
    wanted = plan.width - first - (units - last)
    heads, device = scores.shape[0], scores.device
    if wanted >= last - first:
        return torch.arange(units, device=device).expand(heads, -1)
    best = best_indices(scores[:, first:last], wanted) + first
    front = torch.arange(first, device=device).expand(heads, -1)
    back = torch.arange(last, units, device=device).expand(heads, -1)
    return torch.cat([front, best, back], 1)


def best_indices(scores: Tensor, count: int) -> Tensor:
    """Return the ascending indices [H, count] int64 of the highest scores [H, U]; of equal scores the lowest index wins."""
    if count <= 0:
        return torch.empty(scores.shape[0], 0, dtype=torch.int64, device=scores.device)
    threshold = scores.topk(count, -1).values[:, -1:]
    above = scores > threshold
    level = scores == threshold
    room = count - above.sum(-1, keepdim=True)
    taken = above | (level & (level.cumsum(-1) <= room))
    return taken.nonzero()[:, 1].view(scores.shape[0], count)
