"""Every kernel that eviction from single heads may launch."""

from __future__ import annotations

from plugins.cache.eviction import launch as compaction
from plugins.cache.eviction.per_head import launch
from plugins.cache.eviction.sums import launch as sums
from plugins.cache.formats import slides
from plugins.device.dtypes import TORCH_DTYPES
from trtkv.config import Limits, ModelConfig
from trtkv.plan import CachePlan


def request(plan: CachePlan, model: ModelConfig, limits: Limits, arch: str) -> None:
    """Load the kernels of a plan with one pool for a compute capability: moves of single heads, what is kept of queries and attention."""
    evict = plan.evict
    if not plan.pooled or evict is None:
        return
    dtype, heads, dim = compaction.TYPES[TORCH_DTYPES[plan.kv_dtype]], plan.num_kv_heads, plan.head_dim
    group, lists = plan.num_q_heads // heads, slides(evict) is None
    for spec in plan.buffers if plan.ragged else ():
        if spec.paged:
            rows = int(spec.shape[1]) // heads
            words = spec.row_bytes // (int(spec.shape[1]) * plan.page_size * 4)
            launch.move_kernel(launch.move_constants(rows, words, spec.name == "positions", lists), arch)
    if evict.queries and not evict.prompt_only:
        compaction.remember_kernel(compaction.remember_constants(evict.queries, plan.num_q_heads * dim), dtype, arch)
    if "attention_mass" in evict.needs or ("allocate" in plan.roles and evict.queries):
        sums.request(group, dim, dtype, arch)
    if "attention_mass" in evict.needs and not evict.prompt_only:
        launch.received_kernel(launch.received_constants(heads, group, dim), dtype, arch)
