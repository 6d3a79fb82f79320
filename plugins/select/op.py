"""KvSelect in torch: pool the scores of a group's query heads, take the exact best, add what every query reads."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from plugins.cache.batch import Row
from plugins.cache.indexes import index as indexes
from plugins.cache.roles import load_role
from plugins.cache.session import Session
from plugins.nodes.node import OpConfig
from plugins.select.choose import choose, pool, speculative_query, spread
from trtkv.plan import SelectPlan

DENSE = -1


def select(session: Session, layer: int, config: OpConfig, inputs: Sequence[Tensor], out: Tensor) -> None:
    """Choose units for every sequence of the step.

    inputs: rotated queries [T, Hq D] and tensors that `Session.begin_step` already carries. Writes out [B, H, K + 1] int32 (H is Hk, or Hq
    when every query head selects for itself): units in ascending order and, last, how many they are, -1 where the sequence is read whole:
    in prefill, and while it is no longer than the budget. Unused places hold -1 too.
    """
    plan = session.plan.select[layer]
    assert plan is not None, f"layer {layer} selects nothing"
    out.fill_(DENSE)
    for b, row in enumerate(session.step(layer).rows):
        if row.new != 1:
            continue
        query = inputs[0][row.start].unflatten(0, (config.num_q_heads, config.head_dim))
        if session.held is not None:
            chosen = session.held.find(layer, row.slot).select(query)
        else:
            chosen = _select_paged(session, layer, config, plan, row, query)
        if chosen is not None:
            out[b, :, : chosen.shape[1]] = chosen
            out[b, :, -1] = chosen.shape[1]


def _select_paged(session: Session, layer: int, config: OpConfig, plan: SelectPlan, row: Row, query: Tensor) -> Tensor | None:
    asking, own = query, session.own.plan(layer, row.slot) or plan
    if plan.speculative:
        remembered = session.buffer("previous_query", layer)
        first = row.stored <= row.prompt + 1
        asking = speculative_query(load_role(own.meaning), query, None if first else remembered[row.slot], config.num_kv_heads)
        remembered[row.slot] = query
    if row.stored <= max(own.budget, session.dense_below):
        return None
    scores, forced = indexes.find(plan).score(session, layer, plan, row, asking)
    pooled = pool(scores, config.num_kv_heads, config.scale, plan.pooling)
    return choose(own, pooled, row.stored, spread(forced, len(pooled)))
