"""Every kernel that caches of single encoded tokens may launch."""

from __future__ import annotations

from dataclasses import replace

from trtkv.config import ModelConfig
from trtkv.plan import CachePlan
from trtkv.plugins.compaction import launch as compaction
from trtkv.plugins.encoded import launch as encoded
from trtkv.plugins.encoded.formats import Format
from trtkv.plugins.kv_attend import launch_dense
from trtkv.plugins.kv_sums import launch as sums
from trtkv.plugins.replaced import launch
from trtkv.plugins.replaced.store import NEVER, rule_of


def request(plan: CachePlan, form: Format, model: ModelConfig, dtype: str, arch: str) -> None:
    """Load the kernels of a plan for a compute capability; dtype is Triton's name."""
    assert plan.evict is not None, "the plan evicts nothing"
    heads, dim, rule = plan.num_kv_heads, plan.head_dim, rule_of(plan.evict)
    group = plan.num_q_heads // heads
    encoded.append_kernel(replace(form, bits=8, residual=NEVER), plan.num_q_heads, heads, dim, model.qk_norm, dtype, arch)
    launch_dense.dense_kernel(dim, group, dtype == "bf16", arch, nibbles=True)
    compaction.remember_kernel(compaction.remember_constants(1, plan.num_q_heads * dim), dtype, arch)
    sums.request(group, dim, dtype, arch)
    for name, constants in (
        ("errors_kernel", launch.errors_constants(dim, rule.bits)),
        ("prompt_kernel", launch.prompt_constants(heads, group, dim)),
        ("mass_kernel", launch.mass_constants(heads, group, dim, rule)),
        ("exchange_kernel", launch.exchange_constants(heads, group, dim, rule)),
    ):
        launch.load_kernel(name, constants, dtype, arch)
