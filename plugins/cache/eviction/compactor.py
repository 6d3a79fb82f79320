"""Evicting behind a step: which sequences and layers are due, what they keep, and the move in their pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from plugins.cache.batch import Row, brought
from plugins.cache.eviction import exchange, lag, launch, move, stamps
from plugins.cache.eviction.ledger import Account
from plugins.cache.eviction.newest import Step
from plugins.cache.eviction.view import PagedView
from plugins.cache.support import compacts_by_kernels
from trtkv.rules import Exchange

if TYPE_CHECKING:
    from torch import Tensor

    from plugins.cache.session import Session

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
        self.kernels = self._attends = compacts_by_kernels(plan, session.device)
        self.waits = False  # until a step has been compared with its definition
        self._rule = exchange.rule_of(plan) or stamps.rule_of(plan)
        self._queries: list[Tensor] = []

    @property
    def joins(self) -> bool:
        """Whether kernels look at the newest tokens of all layers at once behind a decode step."""
        return self.kernels and self._rule is not None

    @property
    def in_step(self) -> bool:
        """Whether they do so in a step in which every sequence answers, behind the attention of its last layer."""
        return self.joins and self._attends and not self.waits

    def attended(self, layer: int, query: Tensor, lens: Tensor, seen: Tensor, slots: Tensor, table: Tensor) -> None:
        """Take note of a layer's queries [B, Hq D] and act behind the last layer's: lens [Y, B], seen, slots [B], table [Y, B, M] int32.

        Asked where `in_step` in steps in which every sequence answers.
        """
        if layer == 0:
            self._queries = []
        if self._evict.queries and self._session.keeps_inputs:
            self._queries.append(query)
        elif self._evict.queries:
            launch.remember(query, seen, slots, self._session.buffer("last_queries", layer))
        if layer == self._plan.num_layers - 1:
            for group, layers in enumerate(self._stacks.layers):
                own = torch.stack([self._queries[one] for one in layers]) if self._queries else None
                self._join(group, own, table[group], lens[group], seen, slots)
            self._queries = []

    def finish(self, rows: Sequence[Sequence[Row]]) -> None:
        """Evict behind a step, whose rows [Y][B] are those of the page groups."""
        if self.joins and not (self.in_step and all(row.answers for row in rows[0])):
            for group, own in enumerate(rows):
                self._join_rows(group, [row for row in own if row.answers])
        for b, row in enumerate(rows[0]):
            account, joined = self.ledger.find(row.slot), self.joins and row.answers
            for group in range(0 if joined else self._plan.num_page_groups):
                self._observe(group, rows[group][b], account)
            due = self.ledger.due(account)
            for group in () if joined else due:
                self._evict_from(group, rows[group][b], account)
            self.ledger.settle(account, due)

    def _join_rows(self, group: int, rows: Sequence[Row]) -> None:
        """Look at sequences whose queries are remembered."""
        if not rows:
            return
        device, used = self._session.device, [row.page_numbers[: self._plan.pages(row.stored)] for row in rows]
        width = max(map(len, used))
        table = brought([one for own in used for one in (*own, *(0,) * (width - len(own)))], torch.int32, device).view(len(rows), width)
        lens, seen, slots = (brought(own, torch.int32, device) for own in zip(*((row.stored, row.seen, row.slot) for row in rows), strict=True))
        self._join(group, None, table, lens, seen, slots)

    def _join(self, group: int, queries: Tensor | None, table: Tensor, lens: Tensor, seen: Tensor, slots: Tensor) -> None:
        step = Step(queries, table, lens, seen, slots, self._plan.num_q_heads, self._scale)
        rule, stacks, slots_ = self._rule, self._stacks, self._session.num_slots
        if isinstance(rule, Exchange):
            found = self._session.scratch(("exchange", group), lambda: exchange.Scratch.of(stacks, group, rule, step.heads_q, slots_))
            exchange.run(stacks, group, rule, found, step)
        elif rule is not None:
            own = self._session.scratch(("stamps", group), lambda: stamps.Scratch.of(stacks, group, rule, step.heads_q, slots_))
            stamps.run(stacks, group, rule, own, step)

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
