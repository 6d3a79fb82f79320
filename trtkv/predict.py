"""What a cache will take, before anything is built or downloaded."""

from __future__ import annotations

import re
from typing import Any

from trtkv.config import DTYPE_BYTES, ModelConfig
from trtkv.errors import ConfigError
from trtkv.plan import CachePlan

UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def parse_bytes(text: str) -> int:
    """Read a size such as 24GiB, 80GB or 1000000; raises ConfigError."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in UNITS:
        raise ConfigError(f"size '{text}' is not understood", "Write a number with a unit, such as 24GiB.")
    return int(float(match[1]) * UNITS[match[2].lower()])


def predict(model: ModelConfig, plan: CachePlan, context: int, batch_size: int, gpu_memory: str | None = None) -> dict[str, Any]:
    """Return the bytes of every buffer and of the whole for batch_size sequences of context tokens.

    With gpu_memory also the longest context at this batch and the largest batch at this context that fit beside the weights.
    """
    if context < 1 or batch_size < 1:
        raise ConfigError(f"context {context} and batch size {batch_size} must both be above 0", "Give positive numbers.")
    pages = plan.pages(context) * batch_size
    buffers = [
        {
            "name": spec.name,
            "shape": f"[{spec.letters}] = {[pages if spec.paged else batch_size, *spec.shape[1:]]}",
            "dtype": spec.dtype,
            "layers": len(spec.layers),
            "tier": spec.tier,
            "bytes": spec.row_bytes * (pages if spec.paged else batch_size) * len(spec.layers),
        }
        for spec in plan.buffers
    ]
    weights = model.num_params * DTYPE_BYTES[model.dtype]
    found: dict[str, Any] = {
        "policy": plan.policy,
        "plan_hash": plan.hash,
        "buffers": buffers,
        "bytes_per_token": plan.bytes_per_token(),
        "stored_bytes": plan.stored_bytes(context) * batch_size,
        "reserved_bytes": plan.reserved_bytes(context) * batch_size,
        "tokens_read_per_step": plan.tokens_read(context),
        "weight_bytes": weights,
    }
    if gpu_memory is not None:
        room = parse_bytes(gpu_memory) - weights
        found["cache_room_bytes"] = max(0, room)
        found["longest_context"] = _longest(plan, room // batch_size)
        found["largest_batch"] = max(0, room) // plan.reserved_bytes(context)
    return found


def _longest(plan: CachePlan, room: int) -> int:
    return max(0, (room - plan.slot_bytes) // plan.page_bytes) * plan.page_size
