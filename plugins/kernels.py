"""All kernels of an engine: what is compiled into its directory, and loaded before its first step."""

from __future__ import annotations

from trtkv.config import Limits, ModelConfig
from trtkv.plan import CachePlan
from trtkv.plugins._device import store
from trtkv.plugins._device.spec import Spec
from trtkv.plugins.compaction import specs as compaction
from trtkv.plugins.encoded import specs as encoded
from trtkv.plugins.encoded.formats import find_format
from trtkv.plugins.kv_append import specs as append
from trtkv.plugins.kv_attend import specs as attend
from trtkv.plugins.kv_recall import specs as recall
from trtkv.plugins.kv_select import specs as select
from trtkv.plugins.linear import specs as linear
from trtkv.plugins.mixed import specs as mixed
from trtkv.plugins.ragged import specs as ragged
from trtkv.plugins.sampling import launch as sampling
from trtkv.plugins.support import why_torch

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
