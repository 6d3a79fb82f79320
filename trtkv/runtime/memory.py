"""How much memory there is, and how many pages of it the cache may have."""

from __future__ import annotations

import psutil
import torch

from trtkv.config import Limits
from trtkv.errors import CapacityError
from trtkv.plan import CachePlan

HEADROOM = 0.9  # the rest is left to activations and to everybody else


def available_bytes(device: torch.device) -> int:
    """Return the bytes that a new tensor on this device may still take."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def check_weights(weight_bytes: int, device: torch.device) -> None:
    """Raise CapacityError when the weights alone exceed the memory of the device."""
    there = available_bytes(device)
    if weight_bytes > there:
        raise CapacityError(
            f"the weights take {readable(weight_bytes)}, {readable(there)} of {device.type} memory is available",
            "Use a smaller model, another device, or a machine with more memory.",
        )


def pool_pages(plan: CachePlan, limits: Limits, device: torch.device, cache_bytes: int | None = None) -> int:
    """Return the pages of a pool: enough for every sequence at full length, or what the memory (or cache_bytes) allows.

    Raises CapacityError when not even one sequence of full length fits.
    """
    room = int(available_bytes(device) * HEADROOM) if cache_bytes is None else cache_bytes
    slots = limits.max_batch_size * plan.slot_bytes
    wanted = plan.pages(limits.max_seq_len)
    pages = min(wanted * limits.max_batch_size, max(0, room - slots) // max(1, plan.page_bytes))
    if pages < wanted:
        need = wanted * plan.page_bytes + slots
        raise CapacityError(
            f"the cache of one sequence of {limits.max_seq_len} tokens takes {readable(need)}, {readable(room)} is available",
            "Build with a lower --max-seq-len, or give the cache more memory.",
        )
    return pages


def readable(size: float) -> str:
    """Write bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError
