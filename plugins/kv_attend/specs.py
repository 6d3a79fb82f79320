"""Every decode attention kernel that an engine may launch."""

from __future__ import annotations

from trtkv.config import Limits, ModelConfig
from trtkv.plan import CachePlan
from trtkv.plugins.kv_attend import launch


def request(plan: CachePlan, model: ModelConfig, limits: Limits, arch: str) -> None:
    """Load the kernels of every layer for a compute capability: for the units of its list, or for everything stored, and every cluster size."""
    group, bf16 = plan.num_q_heads // plan.num_kv_heads, plan.kv_dtype == "bfloat16"
    # Where every query head has its own list, attention runs in torch.
    units = {1 if select is None else select.unit for select in plan.select if select is None or select.pooling != "none"}
    for unit in sorted(units):
        for batch in range(1, limits.max_batch_size + 1):
            cluster = launch.attend_cluster(batch * plan.num_kv_heads) if int(arch) >= 90 else 1
            launch.attend_kernel(plan.head_dim, group, cluster, unit, bf16, arch)
