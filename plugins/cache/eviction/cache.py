"""Pages that tokens are evicted from, equally many of every KV head of a layer: freed pages return to the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from plugins.cache.eviction.compactor import Compactor
from plugins.cache.eviction.stacked_buffers import Stacks
from plugins.cache.ledgers.evicting import EvictingLedger
from plugins.cache.paged import PagedCache
from trtkv.plan import CachePlan


class EvictingCache(PagedCache):
    """Attention over the remaining tokens is plain attention over a shorter row of pages; what a role counts lies beside the tokens."""

    copies = False

    def __init__(self, plan: CachePlan, num_pages: Sequence[int], num_slots: int, device: torch.device | str = "cpu", dense_below: int = 0) -> None:
        """Allocate the layers of a page group in one tensor, so that one launch evicts from all of them."""
        ledger = EvictingLedger(plan)
        super().__init__(plan, num_pages, num_slots, device, dense_below, ledger)
        self.evictor = self.compactor = Compactor(self.stacks, ledger)

    def show_projections(self, of: Callable[[int], Tensor]) -> None:
        """Show them in the views of layers."""
        self.stacks.projection = of

    def _make_buffers(self) -> None:
        self.stacks = Stacks(self.plan, self.num_pages, self.num_slots, self.device)
        self.buffers = self.stacks.buffers
