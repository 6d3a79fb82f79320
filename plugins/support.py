"""What the kernels take on: the one place that says whether a layer's ops run as kernels or in torch."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from trtkv.config import DTYPE_BYTES
from trtkv.plan import CachePlan, SelectPlan

if TYPE_CHECKING:
    from torch import Tensor

    from trtkv.plugins.face import OpConfig
    from trtkv.plugins.session import Session

HEAD_DIMS = (64, 96, 128, 256)
MOST_GROUP_HEADS = 8
MOST_OVERLAPPED_TOKENS = 1 << 21  # tokens times KV heads of a step, as measured on an H200
# Bytes of keys and values of a layer's step up to which an H200 reads all of them in the time of a selection, for fewer rows (sequences times
# KV heads) than FULL_ROWS and for more: few rows do not fill the device.
DENSE_BYTES, DENSE_BYTES_FULL, FULL_ROWS = 30_000_000, 85_000_000, 32
SUMMARIES = {"fier": "fier", "quest": "bounds", "freekv": "bounds"}  # op names of roles whose summaries the append kernel writes


@cache
def gpu_ready(device: torch.device) -> str | None:
    """Say why no kernel runs on a device, None when they do."""
    if device.type != "cuda":
        return "no CUDA device is used"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return "cuda-bindings is not installed (pip install 'trtkv[gpu]')"
    return None


def runs_kernels(plan: CachePlan, config: OpConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Say whether append and attention run as kernels."""
    return gpu_ready(device) is None and not plan.held and fits(config, dtype) and plan.page_size % 16 == 0


def captures(plan: CachePlan, layer: int, config: OpConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Say whether decode steps of a layer need nothing from the host, so that they can be captured."""
    return runs_kernels(plan, config, dtype, device) and (plan.select[layer] is None or summary_kind(plan, layer) is not None)


def overlaps(session: Session, table: Tensor) -> bool:
    """Say whether launches of a decode step may overlap, for tables [Y, B, M] or [B, M].

    Blocks that start early fill the gaps between small kernels and spoil the balance of those that fill the device for long.
    """
    batch, pages = table.shape[-2:]
    return batch * session.plan.num_kv_heads * pages * session.plan.page_size <= MOST_OVERLAPPED_TOKENS


def dense_below(plan: CachePlan, sequences: int, device: torch.device) -> int:
    """Return the tokens up to which decode reads everything because that is as fast as to select, for as many sequences as may run at once.

    One number for an engine, so that an answer does not depend on the batch that it shares; 0 where no kernels run.
    """
    if gpu_ready(device) is not None or plan.held or not any(plan.select):
        return 0
    rows = sequences * plan.num_kv_heads
    return (DENSE_BYTES_FULL if rows >= FULL_ROWS else DENSE_BYTES) // (rows * 2 * plan.head_dim * DTYPE_BYTES[plan.kv_dtype])


def fits(config: OpConfig, dtype: torch.dtype) -> bool:
    """Say whether the kernels are written for these heads."""
    group = config.num_q_heads // config.num_kv_heads
    return dtype in (torch.bfloat16, torch.float16) and config.head_dim in HEAD_DIMS and group <= MOST_GROUP_HEADS


def summary_kind(plan: CachePlan, layer: int) -> str | None:
    """Name the summary that the append kernel keeps for a layer, None where the layer selects nothing or selects in torch."""
    select = plan.select[layer]
    if select is None or not select.meaning.role.startswith("trtkv."):
        return None
    kind = SUMMARIES.get(select.meaning.op)
    if kind == "fier":
        return kind if select.group == 32 and plan.page_size % 32 == 0 and _pools(select) else None
    if kind == "bounds":
        return kind if select.unit == plan.page_size and select.meaning.fields.get("digest", "minmax") == "minmax" and _pools(select) else None
    return None


def _pools(select: SelectPlan) -> bool:
    return select.pooling != "none"
