"""Evicting and demoting behind a step: what stays is read in order, chosen by the roles, and written anew in two kinds of pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from trtkv.plan import Occupancy
from trtkv.plugins.mixed.ledger import MixedLedger
from trtkv.plugins.mixed.pool import MixedPool
from trtkv.plugins.ragged.compactor import HeadCompactor
from trtkv.plugins.ragged.ledger import HeadAccount
from trtkv.plugins.ragged.view import count_received, newest_queries
from trtkv.plugins.rows import Row
from trtkv.plugins.support import compacts_by_kernels

if TYPE_CHECKING:
    from trtkv.plugins.session import Session

PARTS = ("key", "value")


@dataclass
class MixedView:
    """A `CacheView` of one layer of sequence b of the announced step, its tokens in the order of their positions, in whatever pages they lie."""

    pool: MixedPool
    layer: int
    b: int
    account: HeadAccount
    at: Occupancy
    scale: float
    num_layers: int = 1

    @cached_property
    def counts(self) -> tuple[int, int]:
        """Tokens in full precision and encoded ones."""
        return int(self.pool.stored[self.layer, self.b]), int(self.pool.stored[self.pool.layers + self.layer, self.b])

    @cached_property
    def laid(self) -> Tensor:
        """Logical positions [Hk, S] int64 as they lie: encoded tokens, then the others, which follow each other behind the placed ones."""
        count, coded = self.counts
        placed = int(self.account.placed[self.layer])
        index = torch.arange(count, device=self.pool.device)
        own = self.pool.entries("positions", self.layer, self.b, count).long()
        own = torch.where(index < placed, own, index + self.account.seen - count)
        return torch.cat([self.pool.entries("positions", self.layer, self.b, coded, True).long(), own], 1) if coded else own

    @cached_property
    def order(self) -> Tensor:
        """Where the tokens lie [Hk, S] int64, in the order of their positions."""
        return self.laid.argsort(1)

    @cached_property
    def positions(self) -> Tensor:
        """Logical positions [Hk, S] int64, ascending."""
        return self.laid.gather(1, self.order)

    @cached_property
    def was_coded(self) -> Tensor:
        """Which tokens [Hk, S] bool are encoded."""
        return self.order < self.counts[1]

    @cached_property
    def keys(self) -> Tensor:
        """Keys [Hk, S, D] fp32."""
        return self.decoded("key")

    @cached_property
    def values(self) -> Tensor:
        """Values [Hk, S, D] fp32."""
        return self.decoded("value")

    @cached_property
    def queries(self) -> Tensor | None:
        """The newest queries [W, Hq, D] fp32, oldest first."""
        found = newest_queries(self.pool, self.layer, self.b, self.account.seen)
        return None if found is None else found.float()

    def received(self, window: int) -> Tensor | None:
        """Return what each token [Hq, S] received from the newest queries, by kernels, where every token seen is still stored; else None."""
        return None if self.counts[1] else count_received(self.pool, self.layer, self.b, self.at, window, self.scale)

    def decoded(self, part: str) -> Tensor:
        """Return keys or values [Hk, S, D] fp32 as they are attended to, in order."""
        rows = self.pool.aligned(f"{part}s", self.layer, self.b)
        return rows.gather(1, self.order[:, :, None].expand_as(rows))

    def codes(self, part: str, kept: Tensor, rows: Tensor) -> dict[str, Tensor]:
        """Return codes and scales of the kept tokens [Hk, K]: what there is of those that are encoded, the others' rows [Hk, K, D] encoded now."""
        made = self.pool.quantize.encode(rows, f"{part}s")
        coded = self.counts[1]
        if not coded:
            return made  # type: ignore[no-any-return]
        lie, was = self.order.gather(1, kept), self.was_coded.gather(1, kept)
        for name, new in made.items():
            old = self.pool.entries(f"{part}_{name}", self.layer, self.b, coded, True)
            index = lie.clamp(max=coded - 1)
            more = (1,) * (new.dim() - 2)
            old = old.gather(1, index.view(*index.shape, *more).expand(*index.shape, *new.shape[2:]))
            made[name] = torch.where(was.view(*was.shape, *more), old, new)
        return made  # type: ignore[no-any-return]


class MixedCompactor(HeadCompactor):
    """What a session does behind each step for a mixed plan."""

    def __init__(self, session: Session) -> None:
        """Serve a session whose pool is allocated."""
        plan = session.plan
        assert plan.evict is not None, "the plan evicts nothing"
        self._pool, self._plan, self._evict, self._scale = cast(MixedPool, session.ragged), plan, plan.evict, plan.head_dim**-0.5
        self.ledger, self._turned = MixedLedger(plan), []
        self.kernels = self._pool.kernels = compacts_by_kernels(plan, session.device)

    def finish(self, rows: Sequence[Row]) -> None:
        """Evict and demote behind the announced step."""
        for b, row in enumerate(rows):
            account = self.ledger.find(row.slot)
            if account.measures:
                self.ledger.grant(account, self._measure(b, account))
            due, stay = self.ledger.cut(account)
            for layer in due:
                self._rewrite(layer, b, account, int(stay[layer]))
            self.ledger.settle(account, stay)

    def view(self, layer: int, b: int, account: HeadAccount) -> MixedView:  # type: ignore[override]
        """Show a layer of a sequence to a role."""
        return MixedView(self._pool, layer, b, account, self.ledger.occupancy(account, layer), self._scale)

    def _measure(self, b: int, account: HeadAccount) -> Tensor | None:
        return super()._measure(b, account) if self.ledger.allocate is not None else None

    def _rewrite(self, layer: int, b: int, account: HeadAccount, count: int) -> None:
        """Keep what the role keeps of a layer, `count` tokens of each head in full precision and the others encoded."""
        view, pool = self.view(layer, b, account), self._pool
        verdict = self.ledger.evict.keep(view)
        kept = verdict.kept if isinstance(verdict.kept, Tensor) else torch.stack(list(verdict.kept))
        kept = kept.to(pool.device)
        marked = torch.zeros_like(kept, dtype=torch.bool)
        if verdict.demoted is not None:
            marked = verdict.demoted if isinstance(verdict.demoted, Tensor) else torch.stack(list(verdict.demoted))
        turn = marked.to(pool.device).long().argsort(dim=1, stable=True)  # in full precision first, each kind in order
        plain, coded = turn[:, :count], turn[:, count:]
        positions = view.positions.gather(1, kept)
        for part in PARTS:
            rows = view.decoded(part)
            rows = rows.gather(1, kept[:, :, None].expand(-1, -1, rows.shape[2])).to(pool.pools[f"{part}s"].dtype)
            made = view.codes(part, kept, rows) if coded.shape[1] else {}
            pool.put(f"{part}s", layer, b, rows.gather(1, plain[:, :, None].expand(-1, -1, rows.shape[2])))
            for name, x in made.items():
                index = coded.view(*coded.shape, *(1,) * (x.dim() - 2)).expand(*coded.shape, *x.shape[2:])
                pool.put(f"{part}_{name}", layer, b, x.gather(1, index), True)
        pool.put("positions", layer, b, positions.gather(1, plain))
        pool.put("positions", layer, b, positions.gather(1, coded), True)
