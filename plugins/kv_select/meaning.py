"""Any retrieve role without a kernel: run its meaning on the stored keys themselves."""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

from torch import Tensor

from trtkv.plan import Meaning, SelectPlan
from trtkv.plugins._torch.paged import read_pages
from trtkv.plugins.session import Row, Session


class MeaningIndex:
    """Summarizes anew for every query: as slow as reading all keys, and as right as the role's own definition."""

    def update(self, session: Session, layer: int, plan: SelectPlan) -> None:
        """Keep nothing: `score` reads the keys."""

    def score(self, session: Session, layer: int, plan: SelectPlan, row: Row, query: Tensor) -> Tensor:
        """Score by the role's `summarize` and `score` over the closed groups."""
        closed = row.stored // plan.group * plan.group
        keys = read_pages(session.buffer("keys", layer), row)[:, :closed]
        role = load_role(plan.meaning)
        return role.score(query, role.summarize(keys))


def load_role(meaning: Meaning) -> Any:
    """Return the role that a plan names by import path, so that this package needs no policies."""
    fields = tuple(sorted((key, tuple(value) if isinstance(value, list) else value) for key, value in meaning.fields.items()))
    return _load(meaning.role, fields)


@lru_cache(maxsize=256)
def _load(path: str, fields: tuple[tuple[str, Any], ...]) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)(**dict(fields))
