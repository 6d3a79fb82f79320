"""The held caches of a session: one for each layer of each slot that is in use."""

from __future__ import annotations

import torch

from plugins.cache.reference.layer import LayerCache, Roles
from plugins.cache.roles import load_role
from plugins.device.dtypes import TORCH_DTYPES
from trtkv.plan import CachePlan


class HeldCaches:
    """Caches by layer and slot, made when a sequence starts and dropped when it ends."""

    def __init__(self, plan: CachePlan, device: torch.device) -> None:
        self._plan = plan
        self._roles = Roles(**{kind: load_role(one) for kind, one in plan.roles.items() if kind != "offload"})
        self._empty = torch.empty(0, plan.head_dim, dtype=TORCH_DTYPES[plan.kv_dtype], device=device)
        self._slots: dict[int, list[LayerCache]] = {}

    def start(self, slot: int) -> None:
        """Begin a sequence with empty caches."""
        plan, heads = self._plan, self._plan.num_kv_heads
        group, scale = plan.num_q_heads // heads, plan.head_dim**-0.5
        self._slots[slot] = [LayerCache(self._roles, layer, plan.num_layers, heads, group, self._empty, scale) for layer in range(plan.num_layers)]

    def find(self, layer: int, slot: int) -> LayerCache:
        """Return the cache of a layer of a sequence that has begun."""
        return self._slots[slot][layer]

    def finish(self, slot: int) -> None:
        """Evict and encode in every layer; what an allocate role measures is gathered from all layers first."""
        layers = self._slots[slot]
        own = [layer.measure() for layer in layers]
        measures = None if own[0] is None else torch.stack([one for one in own if one is not None])
        for layer in layers:
            layer.finish(measures)

    def nbytes(self, slot: int) -> int:
        """Return the bytes of a sequence's keys, values and what roles keep beside them, as held."""
        return sum(layer.nbytes() + layer.state_bytes() for layer in self._slots[slot])

    def release(self, slot: int) -> None:
        """Drop a sequence's caches."""
        self._slots.pop(slot, None)
