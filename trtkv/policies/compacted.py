"""What lies beside keys and values in the pages of a cache that is evicted from."""

from __future__ import annotations

from trtkv.config import ModelConfig
from trtkv.plan import BufferSpec, EvictPlan


def state_buffers(evict: EvictPlan, model: ModelConfig, page_size: int) -> tuple[BufferSpec, ...]:
    """Return the buffers of what an evict role reads besides keys and values, in every layer: scores lie in pages, queries in slots."""
    every, head = tuple(range(model.num_layers)), ("P", model.num_kv_heads, page_size)
    found = [BufferSpec("positions", head, "P Hk N", "int32", every)]
    found += [BufferSpec(name, head, "P Hk N", dtype, every) for name, dtype in evict.token_state.items()]
    if "attention_mass" in evict.needs:
        found.append(BufferSpec("attention_mass", ("P", model.num_q_heads, page_size), "P Hq N", "float32", every))
    if evict.queries:
        found.append(BufferSpec("last_queries", ("Z", evict.queries, model.num_q_heads, model.head_dim), "Z W Hq D", model.dtype, every))
    return tuple(found)
