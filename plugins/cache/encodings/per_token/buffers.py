"""Which plans replace single tokens."""

from __future__ import annotations

from trtkv.plan import CachePlan
from trtkv.rules import Blend, PerToken

MOST_BUDGET = 16384  # tokens of a head among which one block finds the least


def replaces(plan: CachePlan) -> bool:
    """Say whether kernels encode each token of a plan by itself, and let a step's take the place of one that goes: pages hold the budget."""
    rule = plan.evict.rule if plan.evict is not None and plan.storage == "replaced" else None
    return isinstance(rule, Blend) and rule.budget <= MOST_BUDGET and plan.quantize is not None and plan.quantize.encoding == PerToken(4)
