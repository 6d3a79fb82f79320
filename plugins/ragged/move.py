"""Moving the tokens that stay to the front of a head's pages, in order: those of all heads and sequences of a step together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trtkv.plan import EvictPlan
from trtkv.plugins.ragged import launch
from trtkv.plugins.ragged.pages import Ints
from trtkv.plugins.ragged.pool import HeadPool


@dataclass(slots=True)
class Move:
    """One head of sequence b of the step: of its stored tokens `stay` do, those in kept [stay] or, without it, the first `sink` and the newest.

    The logical positions of the first `placed` tokens are written; behind those they are index plus shift.
    """

    b: int
    head: int
    stored: int
    stay: int
    placed: int
    shift: int
    kept: Tensor | None = None
    sink: int = 0


def slides(evict: EvictPlan) -> int | None:
    """Return the sink of a role that keeps it and the newest tokens whatever they hold, so that nothing has to be scored; None of any other."""
    meaning = evict.meaning
    return int(meaning.fields["sink"]) if meaning.op == "streaming" and meaning.role.startswith("trtkv.") else None


def run(pool: HeadPool, moves: Sequence[Move], kernels: bool) -> None:
    """Move in all paged buffers, and write the positions that follow from it."""
    if kernels:
        _by_kernels(pool, moves)
        return
    for one in moves:
        table = torch.from_numpy(pool.pages[one.b].table[one.head].astype(np.int64)).to(pool.device)
        index = torch.arange(one.stay, device=pool.device)
        kept = torch.where(index < one.sink, index, index + one.stored - one.stay) if one.kept is None else one.kept
        for name, data in pool.pools.items():
            moved = data[table[kept // data.shape[2]], :, kept % data.shape[2]]
            if name == "positions":
                moved = torch.where((kept < one.placed)[:, None], moved, (kept + one.shift).to(moved.dtype)[:, None])
            data[table[index // data.shape[2]], :, index % data.shape[2]] = moved


def _by_kernels(pool: HeadPool, moves: Sequence[Move]) -> None:
    """Launch once a buffer; page numbers and what moves where go to the device together."""
    pages = -(-max(one.stored for one in moves) // pool.plan.page_size)
    table, rows = np.zeros((len(moves), pages), np.int32), np.zeros((len(moves), launch.ROW), np.int32)
    start, lists = 0, []
    for r, one in enumerate(moves):
        own = pool.pages[one.b].table[one.head, :pages]
        table[r, : len(own)] = own
        first, source = (one.sink, one.sink + one.stored - one.stay) if one.kept is None else (0, start)
        rows[r] = (first, one.stay - first, source, one.placed, one.shift)
        if one.kept is not None:
            lists.append(one.kept)
            start += one.stay
    kept = torch.cat(lists).int() if lists else None
    on_device = [_moved(one, pool.device) for one in (table, rows)]
    for name, data in pool.pools.items():
        launch.move(data, on_device[0], on_device[1], kept, positions=name == "positions")


def _moved(values: Ints, device: torch.device) -> Tensor:
    """Bring numbers to the device without waiting for it."""
    found = torch.from_numpy(values)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found
