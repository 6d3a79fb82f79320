"""Every kernel that eviction from two kinds of pages may launch."""

from __future__ import annotations

from plugins.cache.encodings.mixed import launch
from plugins.cache.eviction.launch import TYPES
from plugins.device.dtypes import TORCH_DTYPES
from trtkv.config import DTYPE_BYTES, Limits, ModelConfig
from trtkv.plan import CachePlan


def request(plan: CachePlan, model: ModelConfig, limits: Limits, arch: str) -> None:
    """Load the kernels of a mixed plan for a compute capability."""
    if not plan.mixed:
        return
    dtype = TYPES[TORCH_DTYPES[plan.kv_dtype]]
    for positions in (True, False):
        constants = launch.rewrite_constants(plan.num_kv_heads, plan.head_dim, DTYPE_BYTES[plan.kv_dtype], positions)
        for name in ("gather_kernel", "scatter_kernel"):
            launch.rewrite_kernel(name, constants, dtype, arch)
