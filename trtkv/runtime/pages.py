"""Who owns which page: a free list for each page group."""

from __future__ import annotations

from collections.abc import Sequence

from trtkv.errors import CapacityError


class PageAllocator:
    """Hands out page numbers of one pool, lowest first, so that a sequence's pages tend to lie side by side."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take pages; raises CapacityError and takes none when there are too few."""
        if count > len(self._free):
            raise CapacityError(
                f"{count} pages wanted, {len(self._free)} of {self.num_pages} free", "Lower max-batch-size or give the cache more memory."
            )
        return [self._free.pop() for _ in range(count)]

    def give(self, pages: Sequence[int]) -> None:
        """Return pages to the pool."""
        self._free.extend(pages)
        self._free.sort(reverse=True)
