"""Reading paged buffers with torch."""

from __future__ import annotations

from torch import Tensor

from trtkv.plugins.session import Row


def read_pages(buffer: Tensor, row: Row) -> Tensor:
    """Return a sequence's pages of buffer [P, Hk, n, ...] side by side: [Hk, M n, ...], the unused rest of the last page included."""
    pages = buffer[row.run] if row.run is not None else buffer.index_select(0, row.pages)
    return pages.transpose(0, 1).flatten(1, 2)


def read_tokens(buffer: Tensor, row: Row, tokens: Tensor) -> Tensor:
    """Return tokens [Hk, K] int64 of buffer [P, Hk, N, D]: [Hk, K, D]."""
    _, heads, size, dim = buffer.shape
    page = row.pages[tokens // size]
    head = tokens.new_tensor(range(heads))[:, None]
    flat = (page * heads + head) * size + tokens % size
    return buffer.view(-1, dim).index_select(0, flat.flatten()).view(heads, -1, dim)
