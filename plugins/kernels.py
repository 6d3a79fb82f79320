"""All kernels of an engine: what is compiled into its directory, and loaded before its first step."""

from __future__ import annotations

from trtkv.config import Limits, ModelConfig
from trtkv.plan import CachePlan
from trtkv.plugins._device import store
from trtkv.plugins._device.spec import Spec
from trtkv.plugins.dtypes import TORCH_DTYPES
from trtkv.plugins.face import OpConfig
from trtkv.plugins.kv_append import specs as append
from trtkv.plugins.kv_attend import specs as attend
from trtkv.plugins.kv_select import specs as select
from trtkv.plugins.support import fits

FOLDER = "kernels"  # of an engine directory
LEAST_CAPABILITY = 80


def request(plan: CachePlan, model: ModelConfig, limits: Limits, arch: str) -> None:
    """Load every kernel that decode and prefill steps of an engine may launch on the current device, of a compute capability such as "90".

    Afterwards no step compiles or loads one. Raises as `store.load` does.
    """
    config = OpConfig(plan.num_q_heads, plan.num_kv_heads, plan.head_dim, plan.head_dim**-0.5, model.rms_eps, 0, 0, plan.hash)
    taken = not plan.held and plan.page_size % 16 == 0 and fits(config, TORCH_DTYPES[plan.kv_dtype])
    if taken and int(arch) >= LEAST_CAPABILITY:
        for op in (append, select, attend):
            op.request(plan, model, limits, arch)


def kernels_for(plan: CachePlan, model: ModelConfig, limits: Limits, arch: str) -> list[Spec]:
    """List every kernel that an engine may launch on GPUs of a compute capability; none where its ops run in torch. Needs no GPU."""
    with store.listing() as asked:
        request(plan, model, limits, arch)
    return list(asked)
