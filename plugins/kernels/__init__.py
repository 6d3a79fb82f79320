"""All kernels of an engine: what is compiled into its directory, and loaded before its first step."""

from __future__ import annotations

from plugins.cache.encodings.grouped import specs as encoded
from plugins.cache.encodings.mixed import specs as mixed
from plugins.cache.eviction import specs as compaction
from plugins.cache.eviction.per_head import specs as ragged
from plugins.cache.formats import find_format
from plugins.cache.support import why_torch
from plugins.cache.tiers.host import specs as recall
from plugins.device import store
from plugins.device.spec import Spec
from plugins.kernels import append, attend, linear, select
from plugins.sampling import launch as sampling
from trtkv.config import Limits, ModelConfig
from trtkv.plan import CachePlan

FOLDER = "kernels"  # of an engine directory
LEAST_CAPABILITY = 80


def request(plan: CachePlan, model: ModelConfig, limits: Limits, arch: str) -> None:
    """Load every kernel that decode and prefill steps of an engine may launch on the current device, of a compute capability such as "90".

    Afterwards no step compiles or loads one. Raises as `store.load` does.
    """
    if int(arch) < LEAST_CAPABILITY:
        return
    if why_torch(plan) is None:
        for op in (append, select, recall, encoded) if find_format(plan) else (append, select, attend, recall, compaction, ragged, mixed):
            op.request(plan, model, limits, arch)
        sampling.request(model.vocab_size, arch)
    linear.request(model, limits, arch)


def kernels_for(plan: CachePlan, model: ModelConfig, limits: Limits, arch: str) -> list[Spec]:
    """List every kernel that an engine may launch on GPUs of a compute capability; few where its ops over the cache run in torch. Needs no GPU."""
    with store.listing() as asked:
        request(plan, model, limits, arch)
    return list(asked)
