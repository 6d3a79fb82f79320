"""Summaries by the type that a plan states: how they stay current and how a query scores against them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from plugins.cache.batch import Row
from plugins.cache.indexes import bounds as pages
from plugins.cache.indexes import definition as meaning
from plugins.cache.indexes import fier
from plugins.cache.indexes import summaries as kept
from plugins.cache.session import Session
from trtkv.plan import SelectPlan
from trtkv.rules import Ball, Box, Mean, OneBit


class Index(Protocol):
    """A kind of summary."""

    def update(self, session: Session, layer: int, plan: SelectPlan) -> None:
        """Summarize the groups that the announced step completes."""

    def score(self, session: Session, layer: int, plan: SelectPlan, row: Row, query: Tensor) -> tuple[Tensor, Tensor | None]:
        """Score every summarized unit of a sequence for query [Hq, D]: [Hq, U] fp32; and which units [Hk, U] bool are read in any case."""


_INDEXES: dict[type, Index] = {
    OneBit: fier.FierIndex(),
    Box: pages.PageIndex(),
    Ball: kept.KeptIndex(centre="page_centre", radius="page_radius"),
    Mean: kept.KeptIndex(landmark="landmarks", likeness="likeness"),
}


def find(plan: SelectPlan) -> Index:
    """Return the index of a plan's summary, or the one that runs the role's definition where it states none."""
    return _INDEXES.get(type(plan.summary), meaning.MeaningIndex())
