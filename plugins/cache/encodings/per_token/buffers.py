"""Which plans replace single tokens, and what is known of each beside its codes: buffers that follow from a plan, and are counted with it."""

from __future__ import annotations

from trtkv.plan import BufferSpec, CachePlan
from trtkv.rules import Blend, PerToken

MOST_BUDGET = 16384  # tokens of a head among which one block finds the least


def replaces(plan: CachePlan) -> bool:
    """Say whether kernels encode each token of a plan by itself, and let a step's take the place of one that goes: pages hold the budget."""
    rule = plan.evict.rule if plan.evict is not None and plan.storage == "replaced" else None
    return isinstance(rule, Blend) and rule.budget <= MOST_BUDGET and plan.quantize is not None and plan.quantize.encoding == PerToken(4)


def known_of(plan: CachePlan) -> tuple[BufferSpec, ...]:
    """Return positions, rounding errors and attention of the tokens in pages, and the newest query of a slot."""
    assert plan.evict is not None, "the plan evicts nothing"
    every, head = tuple(range(plan.num_layers)), ("P", plan.num_kv_heads, plan.page_size)
    return (
        BufferSpec("positions", head, "P Hk N", "int32", every),
        *(BufferSpec(name, head, "P Hk N", dtype, every) for name, dtype in plan.evict.token_state.items()),
        BufferSpec("attention_mass", ("P", plan.num_q_heads, plan.page_size), "P Hq N", "float32", every),
        BufferSpec("last_queries", ("Z", 1, plan.num_q_heads, plan.head_dim), "Z W Hq D", plan.kv_dtype, every),
    )
