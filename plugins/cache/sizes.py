"""Bytes and tokens that a plan predicts, from constants counted once: the host asks for them with every sequence of every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from trtkv.plan import BOOKKEEPING, CachePlan


class Sizes:
    """The same numbers as `CachePlan`'s methods of these names; by group not of plans whose groups share a pool, which counts for itself."""

    def __init__(self, plan: CachePlan) -> None:
        """Count bytes by what they grow with."""
        self._page_size, self._groups = plan.page_size, range(plan.num_page_groups)
        self._slot_bytes = plan.slot_bytes
        self._pages, self._entries, own = Counter[int](), Counter[int](), Counter[tuple[int, int]]()
        for spec in plan.buffers:
            for layer in spec.layers if spec.paged else ():
                group = plan.page_groups[layer]
                self._pages[group] += spec.row_bytes
                if spec.pool == "plain":
                    self._entries[spec.tokens_per_entry] += spec.row_bytes * spec.tokens_per_entry // plan.page_size
                    if spec.name not in BOOKKEEPING:
                        own[group, spec.tokens_per_entry] += spec.row_bytes * spec.tokens_per_entry // plan.page_size
        self._by_group = [(group, tokens, size) for (group, tokens), size in own.items()]
        self._reads = Counter((one.budget, one.width * one.unit) if one else None for one in plan.select)
        self._layers = plan.num_layers

    def stored_bytes(self, tokens: int) -> int:
        """Bytes that hold data for a sequence of so many tokens."""
        total = self._slot_bytes
        for entry, size in self._entries.items():
            total += tokens // entry * size
        return total

    def stored_bytes_by_group(self, lengths: Sequence[int]) -> int:
        """Bytes that hold data for a sequence of which the layers of each page group store so many tokens, without bookkeeping."""
        return sum(lengths[group] // entry * size for group, entry, size in self._by_group)

    def reserved_bytes_by_group(self, lengths: Sequence[int]) -> int:
        """Bytes that the pool lends to such a sequence: whole pages and its slot."""
        total = self._slot_bytes
        for group in self._groups:
            total += -(-lengths[group] // self._page_size) * self._pages[group]
        return total

    def tokens_read(self, tokens: int) -> float:
        """Tokens whose keys and values one decode step reads, mean over the layers."""
        total = 0
        for kind, layers in self._reads.items():
            total += layers * (tokens if kind is None or tokens <= kind[0] else min(tokens, kind[1]))
        return total / self._layers
