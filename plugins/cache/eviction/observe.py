"""What a layer's attention leaves for an evict role: the newest queries, and the attention that each token of a prompt received."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plugins.cache.batch import Row
from plugins.cache.eviction import launch
from plugins.cache.eviction.compactor import Compactor, add_mass
from plugins.cache.eviction.sums import launch as launch_sums
from plugins.cache.eviction.view import PagedView
from trtkv.ranking import attention

if TYPE_CHECKING:
    from plugins.cache.session import Session

BLOCK_QUERIES = 256  # whose probabilities are there at once


def observe(session: Session, layer: int, row: Row, query: Tensor) -> None:
    """Look at the queries [n, Hq, D] of a sequence's new tokens, in torch."""
    if not looks_at(session, row):
        return
    keep_queries(session, layer, row, query)
    if counts_sums(session, row):
        view = _view(session, layer, row)
        add_mass(view, column_sums(query, view.keys, view.scale))


def observe_chunk(session: Session, layer: int, row: Row, query: Tensor, keys: Tensor, lse: Tensor) -> None:
    """Do so by kernels for a prompt's chunk, whose attention over keys [Hk, S, D] left its log-sum-exp [Hq, n]."""
    if not looks_at(session, row):
        return
    keep_queries(session, layer, row, query)
    if counts_sums(session, row):
        add_mass(_view(session, layer, row), launch_sums.column_sums(query, keys, lse, session.plan.head_dim**-0.5))


def remember(session: Session, layer: int, rows: Sequence[Row], query: Tensor, seen: Tensor, slots: Tensor) -> None:
    """Look at a step in which every sequence has one new token, queries [B, Hq D]; seen and slots [B] int32 are the step's inputs.

    Where all are behind their prompt that is one launch, which can be captured.
    """
    evict = session.plan.evict
    if session.compactor is None or evict is None:
        return
    if not all(row.answers for row in rows):
        for row in rows:
            observe(session, layer, row, query[row.start : row.start + 1].unflatten(1, (session.plan.num_q_heads, -1)))
    elif evict.queries and not evict.prompt_only:
        launch.remember(query, seen, slots, session.buffer("last_queries", layer))


def evicts_in_step(session: Session, rows: Sequence[Row]) -> Compactor | None:
    """Return what evicts behind the attention of a step's last layer, which can be captured; None where that is done when the step has run."""
    evictor = session.compactor
    return evictor if isinstance(evictor, Compactor) and evictor.in_step and all(row.answers for row in rows) else None


def looks_at(session: Session, row: Row) -> bool:
    """Say whether anything of a sequence's queries is kept in this step."""
    evict = session.plan.evict
    return session.compactor is not None and evict is not None and not (row.answers and evict.prompt_only)


def counts_sums(session: Session, row: Row) -> bool:
    """Say whether the attention that tokens receive is counted with the attention itself; behind the prompt that is done when the step has run."""
    evict = session.plan.evict
    return evict is not None and "attention_mass" in evict.needs and not row.answers


def keep_queries(session: Session, layer: int, row: Row, query: Tensor) -> None:
    """Keep the newest of queries [n, Hq, D] in the sequence's slot, as many as a role looks at."""
    evict = session.plan.evict
    if evict is not None and evict.queries:
        last = query[-evict.queries :]
        places = torch.arange(row.seen - len(last), row.seen, device=query.device) % evict.queries
        session.buffer("last_queries", layer)[row.slot].index_copy_(0, places, last)


def _view(session: Session, layer: int, row: Row) -> PagedView:
    assert session.compactor is not None, "the session evicts nothing from pages"
    ledger = session.compactor.ledger
    account, group = ledger.find(row.slot), session.plan.page_groups[layer]
    return PagedView(session, [layer], row, account, ledger.occupancy(account, group), session.plan.head_dim**-0.5)


def column_sums(query: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Sum what each of S tokens receives from queries [n, Hq, D], the newest n tokens, over keys [Hk, S, D]: [Hq, S] fp32."""
    count, stored = len(query), keys.shape[1]
    total = keys.new_zeros(query.shape[1], stored, dtype=torch.float32)
    tokens = torch.arange(stored, device=keys.device)
    for start in range(0, count, BLOCK_QUERIES):
        part = query[start : start + BLOCK_QUERIES]
        asked = torch.arange(stored - count + start, stored - count + start + len(part), device=keys.device)
        total += attention(part, keys, scale, tokens <= asked[:, None]).sum(1)
    return total
