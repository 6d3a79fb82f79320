"""Every kernel that eviction from pages may launch."""

from __future__ import annotations

from plugins.cache.eviction import exchange, launch, stamps
from plugins.cache.eviction.sums import launch as sums
from plugins.cache.formats import ranks_partitions
from plugins.device.dtypes import TORCH_DTYPES
from trtkv.config import DTYPE_BYTES, Limits, ModelConfig
from trtkv.plan import CachePlan
from trtkv.rules import Lag


def lag_kernels(plan: CachePlan, dtype: str, arch: str) -> None:
    """Load LagKV's score and choice, for keys and values of Triton's name of a dtype."""
    rule, heads = plan.evict and plan.evict.rule, plan.num_kv_heads
    assert isinstance(rule, Lag), "the plan does not evict by partitions"
    launch.spread_kernel(launch.spread_constants(heads, plan.head_dim, rule.lag, rule.score), dtype, arch)
    launch.choose_kernel(launch.choose_constants(heads, rule.lag, rule.score), arch)


def request(plan: CachePlan, model: ModelConfig, limits: Limits, arch: str) -> None:
    """Load the kernels of a plan that compacts for a compute capability: moves, LagKV's score and choice, what is kept of queries and attention."""
    evict = plan.evict
    if not plan.compacts or plan.ragged or evict is None:
        return
    dtype, heads, dim = launch.TYPES[TORCH_DTYPES[plan.kv_dtype]], plan.num_kv_heads, plan.head_dim
    group = plan.num_q_heads // heads
    for spec in plan.buffers:
        if spec.paged:
            rows, words = int(spec.shape[1]), spec.row_bytes // (int(spec.shape[1]) * plan.page_size * 4)
            launch.move_kernel(launch.move_constants(rows, rows // heads, words, spec.name == "positions"), arch)
    if ranks_partitions(evict):
        lag_kernels(plan, dtype, arch)
    rule, stamped = exchange.rule_of(plan), stamps.rule_of(plan)
    if rule is not None:
        sizes = DTYPE_BYTES[plan.kv_dtype]
        exchange.load_kernel("exchange_kernel", exchange.exchange_constants(heads, group, dim, sizes, rule), "", arch)
        for window in (0, evict.queries) if evict.queries else ():
            exchange.load_kernel("logits_kernel", exchange.logits_constants(heads, group, dim, window), dtype, arch)
    if stamped is not None:
        stamps.load_kernel("stamp_kernel", stamps.stamp_constants(heads, group, dim * DTYPE_BYTES[plan.kv_dtype] // 4, stamped), "", arch)
        for window in (0, evict.queries):
            stamps.load_kernel("bounds_kernel", stamps.bounds_constants(heads, group, dim, window, stamped), dtype, arch)
    if evict.queries and not evict.prompt_only:
        launch.remember_kernel(launch.remember_constants(evict.queries, plan.num_q_heads * dim), dtype, arch)
    if "attention_mass" in evict.needs:
        sums.request(group, dim, dtype, arch)
        if not evict.prompt_only and rule is None:
            launch.received_kernel(launch.received_constants(heads, group, dim, evict.queries), dtype, arch)
