"""Evicting behind a step: which sequences and layers are due, what they keep, and the move in their pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from trtkv.plugins.compaction import lag, launch, move
from trtkv.plugins.compaction.ledger import Account
from trtkv.plugins.compaction.view import PagedView
from trtkv.plugins.rows import Row
from trtkv.plugins.support import compacts_by_kernels

if TYPE_CHECKING:
    from torch import Tensor

    from trtkv.plugins.session import Session

MOST_ELEMENTS = 1 << 27  # of the fp32 tensors that a role sees of several layers at once


class Compactor:
    """What a session does behind each step for a plan that compacts."""

    def __init__(self, session: Session) -> None:
        """Serve a session whose buffers are allocated; `kernels` says that eviction runs by them."""
        plan = session.plan
        assert plan.evict is not None, "the plan evicts nothing"
        assert session.stacks is not None and session.ledger is not None, "the session holds caches in tensors"
        self._session, self.ledger = session, session.ledger
        self._plan, self._evict, self._stacks, self._scale = plan, plan.evict, session.stacks, plan.head_dim**-0.5
        self.kernels = compacts_by_kernels(plan, session.device)

    def finish(self, rows: Sequence[Sequence[Row]]) -> None:
        """Evict behind a step, whose rows [Y][B] are those of the page groups."""
        for b, row in enumerate(rows[0]):
            account = self.ledger.find(row.slot)
            for group in range(self._plan.num_page_groups):
                self._observe(group, rows[group][b], account)
            due = self.ledger.due(account)
            for group in due:
                self._evict_from(group, rows[group][b], account)
            self.ledger.settle(account, due)

    def _observe(self, group: int, row: Row, account: Account) -> None:
        """Bring what the role counts up to date: the attention of a decode step's query, and the role's own numbers."""
        if "attention_mass" in self._evict.needs and row.answers and not self._evict.prompt_only:
            if self.kernels:
                keys, ring, mass = (self._stacks.groups[name][group] for name in ("keys", "last_queries", "attention_mass"))
                place = (row.seen - 1) % self._evict.queries
                launch.received(keys, ring, mass, row.table, stored=row.stored, slot=row.slot, place=place, scale=self._scale)
            else:
                for view in self._views(group, row, account):
                    add_mass(view, view.newest)
        if not self._evict.token_state:
            return
        for view in self._views(group, row, account):
            fresh = {name: x.clone() for name, x in view.state.items()}
            for x in fresh.values():
                x[:, row.stored - row.new :] = 0
            view.state = fresh
            for name, x in self.ledger.evict.observe(view).items():
                view.write(name, x)

    def _evict_from(self, group: int, row: Row, account: Account) -> None:
        if self.kernels and lag.takes(self._evict):
            lag.evict(self._stacks, group, row, account, self.ledger)
            return
        for view in self._views(group, row, account):
            verdict = self.ledger.evict.keep(view)
            kept = verdict.kept if isinstance(verdict.kept, torch.Tensor) else torch.stack(list(verdict.kept))
            kept = kept.to(self._session.device).unflatten(0, (len(view.layers), -1))
            if self.kernels:
                first = self._stacks.layers[group].index(view.layers[0])
                move.launch_moves(self._stacks, group, range(first, first + len(view.layers)), row, account, kept.int().contiguous())
            else:
                move.move(self._session, view.layers, row, account, kept)

    def _views(self, group: int, row: Row, account: Account) -> Iterator[PagedView]:
        """Show as many layers at once as the role takes and as fit."""
        plan, layers = self._plan, self._stacks.layers[group]
        each = row.stored * (2 * plan.num_kv_heads * plan.head_dim + plan.num_q_heads * (1 + self._evict.queries))
        count = max(1, MOST_ELEMENTS // each) if self.ledger.evict.takes_layers else 1
        at = self.ledger.occupancy(account, group)
        for start in range(0, len(layers), count):
            some = layers[start : start + count]
            budget = at.budget * len(some) if at.budget is not None else None
            precise = at.precise * len(some) if at.precise is not None else None
            whole = replace(at, lengths=at.lengths * len(some), layer=some[0], budget=budget, precise=precise)
            yield PagedView(self._session, some, row, account, whole, self._scale)


def add_mass(view: PagedView, received: Tensor) -> None:
    """Count attention [Hq, S] that the stored tokens received in this step on top of what the older ones had."""
    old = view.row.stored - view.row.new
    mass = received.clone()
    mass[:, :old] += view.mass[:, :old]
    view.write("attention_mass", mass)
