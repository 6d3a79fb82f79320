"""A step's inputs as the engine reads them, made on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from plugins.cache.pages import HeadPages
from trtkv.runtime.rows import StepRow

Int32 = npt.NDArray[np.int32]


def small_inputs(rows: Sequence[StepRow], groups: int, stored_lens: Sequence[Sequence[int]] | None = None) -> dict[str, Int32]:
    """Return every per-step input but the page table, int32: by name, one entry a token or a sequence (or one a page group and sequence).

    stored_lens [Y][B] are the tokens behind the append where some have been evicted, by default all.
    """
    new = np.fromiter((len(row.tokens) for row in rows), np.int32, len(rows))
    seen = np.fromiter((row.seen for row in rows), np.int32, len(rows))
    starts = np.concatenate([np.zeros(1, np.int32), np.cumsum(new, dtype=np.int32)])
    stored = seen + new
    first = np.repeat(seen - starts[:-1], new)
    return {
        "token_ids": np.fromiter((token for row in rows for token in row.tokens), np.int32, int(starts[-1])),
        "positions": np.arange(starts[-1], dtype=np.int32) + first,
        "cu_seqlens": starts,
        "seq_lens": stored,
        "stored_lens": np.broadcast_to(stored, (groups, len(rows))) if stored_lens is None else np.array(stored_lens, np.int32),
        "slots": np.fromiter((row.slot for row in rows), np.int32, len(rows)),
        "last_rows": np.array([start + index for start, row in zip(starts, rows, strict=False) for index in row.logits_of] or [0], np.int32),
    }


def page_table(rows: Sequence[StepRow], groups: int, width: int) -> Int32:
    """Return the pages of every sequence [Y, B, M] int32; a constant width spares TensorRT a callback in every plugin."""
    if any(isinstance(row.pages, HeadPages) for row in rows):
        table = np.zeros((groups, len(rows), width), np.int32)
        for b, row in enumerate(rows):
            own = row.pages.table[:, :width]  # type: ignore[union-attr]
            table[:, b, : own.shape[1]] = own
        return table
    if not any(map(differ, rows)):
        table = np.zeros((len(rows), width), np.int32)
        for b, row in enumerate(rows):
            table[b, : len(row.pages)] = row.pages
        return np.broadcast_to(table, (groups, *table.shape))
    table = np.zeros((groups, len(rows), width), np.int32)
    for group in range(groups):
        for b, row in enumerate(rows):
            own = pages_of(row, group)
            table[group, b, : len(own)] = own
    return table


def differ(row: StepRow) -> bool:
    """Say whether a sequence's page groups have pages of their own."""
    return isinstance(row.pages, HeadPages) or (bool(row.pages) and not isinstance(row.pages[0], int))


def pages_of(row: StepRow, group: int) -> Sequence[int] | HeadPages:
    """Return a sequence's page numbers in one page group, or of all heads where they have their own."""
    if isinstance(row.pages, HeadPages):
        return row.pages
    return row.pages[group] if differ(row) else row.pages  # type: ignore[return-value]
