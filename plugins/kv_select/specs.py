"""Every scorer and selector that an engine may launch."""

from __future__ import annotations

from trtkv.config import Limits, ModelConfig
from trtkv.plan import CachePlan, SelectPlan
from trtkv.plugins.kv_select import launch, launch_pages, launch_speculate
from trtkv.plugins.support import summary_kind

_NAMES = {"bfloat16": "bf16", "float16": "fp16"}
_SHAPES = {"bounds": "box"}  # what a scorer of pages calls a kind of summary


def request(plan: CachePlan, model: ModelConfig, limits: Limits, arch: str) -> None:
    """Load the kernels of every selecting layer for a compute capability: the scorer of its index, and a selector for every cluster size."""
    seen = set()
    for layer, select in enumerate(plan.select):
        kind = summary_kind(plan, layer)
        if select is not None and kind is not None and (key := (kind, select.unit, select.group, select.pooling)) not in seen:
            seen.add(key)
            _scorer(plan, select, kind, arch)
            if select.speculative:
                launch_speculate.speculate_kernel(plan.num_q_heads // plan.num_kv_heads, plan.head_dim, _NAMES[plan.kv_dtype], arch)
            for batch in range(1, limits.max_batch_size + 1):
                _selector(plan, select, kind, batch, limits, arch)


def _scorer(plan: CachePlan, select: SelectPlan, kind: str, arch: str) -> None:
    group, bf16 = plan.num_q_heads // plan.num_kv_heads, plan.kv_dtype == "bfloat16"
    if kind == "fier":
        launch.score_kernel(plan.head_dim, group, select.pooling, bf16, arch)
        return
    per_page = plan.page_size // select.unit
    launch_pages.score_kernel(_SHAPES[kind], plan.head_dim, group, select.pooling, per_page, bf16, arch, forced=select.forces, shared=_shared(select))
    if select.forces:
        launch_pages.cut_kernel(per_page, arch)


def _selector(plan: CachePlan, select: SelectPlan, kind: str, batch: int, limits: Limits, arch: str) -> None:
    group = plan.num_q_heads // plan.num_kv_heads
    units = plan.pages(limits.max_seq_len) * plan.page_size // select.unit
    # How many blocks score a row follows from the GPU, the layout of the scores does not.
    if kind == "fier":
        rows = batch * plan.num_kv_heads
        scratch = launch.Scratch.plan(rows, group, select.pooling, units, 1)
        heads, stride = scratch.heads, scratch.stride
    else:
        pages = launch_pages.PageScratch.plan(batch, plan.num_kv_heads, group, select.pooling, units, 1, shared=_shared(select))
        rows, heads, stride = pages.rows, pages.heads, pages.stride
    cluster = launch.select_cluster(rows, stride) if int(arch) >= launch.CLUSTERS_FROM else 1
    launch.select_kernel(cluster, heads, select.pooling == "softmax-max", select.unit, select.group, arch)


def _shared(select: SelectPlan) -> bool:
    return bool(select.meaning.fields.get("shared"))
